use proptest::prelude::*;

use super::*;

/// Expressions in a syntax that both engines read alike.
const BOTH: &[&str] = &[
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(a|ab)(c|bcd)(d*)",
    r"a*?b|a+",
    r"(?:a|b)*abb",
    r"a{2,4}b{0,2}|b{3}",
    r"(?=a[ab]*c)a|(?!b)[bc]+",
    r"(?<=a)b+|(?<!a)bb",
    r"\bab|c\b|\Aa|b\z",
    r"x*",
    r"a++b?|[ab]*+c",
    r"(?:(?:a?b)+c)+|a",
    r"\s*a|\s",
];

fn ours(pattern: &str, text: &str) -> Vec<(usize, usize)> {
    Regex::new(pattern).unwrap().matches(text).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn matches_are_those_of_a_backtracking_engine(
        text in prop_oneof!["[abcd]{0,12}", "[ab \n'sLÀé1²你\u{301}!/]{0,24}", ".{0,16}"],
    ) {
        for pattern in BOTH {
            let theirs: Vec<_> = fancy_regex::Regex::new(pattern).unwrap().find_iter(&text)
                .map(|found| found.map(|found| (found.start(), found.end())).unwrap()).collect();
            // The other engine leaves out an empty match at the end of the match before.
            let mut end = usize::MAX;
            let found: Vec<_> = ours(pattern, &text).into_iter().filter(|found| {
                let kept = found.0 < found.1 || found.0 != end;
                end = found.1;
                kept
            }).collect();
            prop_assert_eq!(found, theirs, "{}", pattern);
        }
    }
}

#[test]
fn syntax_is_that_of_ruby() {
    assert_eq!(ours("a$", "a\nba"), [(0, 1), (3, 4)], "the end of every line");
    assert_eq!(ours("^.", "a\nb"), [(0, 1), (2, 3)]);
    assert_eq!(ours("(?m:a.b)|.", "a\nb"), [(0, 3)]);
    assert_eq!(ours(r"\h+", "xBe8g"), [(1, 4)]);
    assert_eq!(ours("(?i)k|Ⅷ", "Kkⅷ"), [(0, 1), (1, 2), (2, 5)]);
    assert_eq!(ours(r"\w+", "a²½_ b"), [(0, 6), (7, 8)]);
    assert_eq!(ours(r"[\w&&[^a]]+", "abc"), [(1, 3)]);
    assert_eq!(ours("a{,2}{x}", "aa{x}"), [(0, 5)], "a brace that is no repetition is a character");
}

#[test]
fn what_is_not_supported_is_refused() {
    let error = |pattern: &str| Regex::new(pattern).unwrap_err().to_string();
    assert!(error(r"(a)\1").contains(r"`\1` is not supported"));
    assert!(error("(?>a)").contains("`(?>` is not supported"));
    assert!(error("(?<name>a)").contains("`(?<` is not supported"));
    assert!(error(r"\p{Klingon}").contains("is not a valid class"));
    assert!(error("(?:a|b)++").contains("a possessive repetition of a group"));
    assert!(error("(?<=a+)b").contains("look-behind without a fixed length"));
    assert!(error("(a*)*").contains("may be empty"));
    assert!(error("[[:alpha:]]").contains("`[:` in a class"));
    for pattern in [
        "(",
        ")",
        "[",
        "[]a]",
        "a{5,2}",
        "*",
        "a{1001}",
        r"\",
        r"[\",
        "(?",
        "(?i",
        r"\x{110000}",
        r"\xé",
        r"\u00é",
    ] {
        drop(error(pattern));
    }
    assert!(error(&"(".repeat(100)).contains("groups in each other"));
    assert!(error(&"[".repeat(100)).contains("classes in each other"));
    assert!(error(&format!("{}a", "(?:".repeat(40))).contains("groups in each other"));
    assert!(error("a{1000}{1000}").contains("8192 instructions"));
    assert!(error("(?:a?){1000}").contains("512 branches"));
    assert!(error(&"a".repeat(17 << 10)).contains("more than 16384 bytes"));
}

#[test]
fn time_is_linear_in_the_text() {
    let started = std::time::Instant::now();
    let patterns =
        [r"(?:a|a|ab)*c", r"\s*x|\s", r"(?=a*b)a|a", r"(?:a+)+b|a", r"a++b|a", r"(?<=a)a*b|a", r"a*$x|a"];
    for pattern in patterns {
        for unit in ["a", " ", "ab", "\n"] {
            let text = unit.repeat((1 << 16) / unit.len());
            let bytes: usize = ours(pattern, &text).iter().map(|(start, end)| end - start).sum();
            assert!(bytes <= text.len());
        }
    }
    assert!(started.elapsed() < std::time::Duration::from_secs(20), "{:?}", started.elapsed());
}
