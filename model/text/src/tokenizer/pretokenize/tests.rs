use fancy_regex::Regex;
use proptest::prelude::*;

use super::*;

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// The expressions of each style, each applied to the pieces of the previous one.
fn expressions(style: Style) -> Vec<String> {
    match style {
        Style::Gpt2 => vec![GPT2.into()],
        Style::DigitsThenGpt2 => vec![r"\p{N}".into(), GPT2.into()],
        Style::PunctuationThenGpt2 => {
            vec![r"[\p{P}\$\+<=>\^~\|]+".into(), GPT2.into(), r"\p{N}+".into(), "[0-9][0-9][0-9]".into()]
        }
        Style::Cased { long_s } => {
            let (upper, lower) = (r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]");
            let s = if long_s { "[sS\u{17f}]" } else { "[sS]" };
            let short = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?";
            let short = short.replace("[sS]", s);
            let lead = r"[^\r\n\p{L}\p{N}]?";
            vec![format!(
                r"{lead}{upper}*{lower}+{short}|{lead}{upper}+{lower}*{short}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            )]
        }
        Style::Words { digits, marks, long_s } => {
            let s = if long_s { "[sS\u{17f}]" } else { "[sS]" };
            let (l, o) = if marks {
                (r"[\p{L}\p{M}]", r"[^\s\p{L}\p{M}\p{N}]")
            } else {
                (r"\p{L}", r"[^\s\p{L}\p{N}]")
            };
            vec![format!(
                r"(?:'{s}|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{{L}}\p{{N}}]?{l}+|\p{{N}}{{1,{digits}}}| ?{o}+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            )]
        }
    }
}

fn by_regex<'a>(regexes: &[Regex], text: &'a str) -> Vec<&'a str> {
    let mut pieces = vec![text];
    for regex in regexes {
        let mut next = Vec::new();
        for piece in pieces {
            let mut end = 0;
            for found in regex.find_iter(piece) {
                let found = found.unwrap();
                if found.start() > end {
                    next.push(&piece[end..found.start()]);
                }
                next.push(found.as_str());
                end = found.end();
            }
            if end < piece.len() {
                next.push(&piece[end..]);
            }
        }
        pieces = next;
    }
    pieces
}

fn by_scanner(style: Style, text: &str) -> Vec<&str> {
    let mut pieces = Vec::new();
    split(style, text, &mut |piece| pieces.push(piece));
    pieces
}

fn styles() -> Vec<(Style, Vec<Regex>)> {
    let mut styles: Vec<Style> = Vec::new();
    let scanned = crate::tokenizer::hf::scanned().map(|(_, style)| style);
    for style in TABLE.iter().map(|row| row.style).chain(scanned) {
        if !styles.contains(&style) {
            styles.push(style);
        }
    }
    styles.into_iter().map(|s| (s, expressions(s).iter().map(|e| Regex::new(e).unwrap()).collect())).collect()
}

/// Text with many characters that the expressions distinguish.
fn tricky() -> impl Strategy<Value = String> {
    let bit = prop_oneof![
        4 => prop::sample::select(vec![
            " ", "  ", "\t", "\n", "\r\n", "\r", "\u{a0}", "\u{85}", "\u{3000}", "\u{2028}", "'", "'s", "'LL", "'re", "'\u{17f}", "a", "Z",
            "é", "e\u{301}", "\u{301}", "ना", "你", "5", "123", "²", "Ⅷ", "٣", ".", "!?", "$", "~", "_", "😀", "\u{200d}", "\u{feff}",
            "\u{378}", "0", "<|im_end|>", "ß", "ǅ", "ʰ", "/", "É", "AB", "aB",
        ]).prop_map(str::to_string),
        1 => any::<char>().prop_map(String::from),
    ];
    prop::collection::vec(bit, 0..24).prop_map(|bits| bits.concat())
}

#[test]
fn scanners_cut_as_the_expressions_do() {
    let styles = styles();
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(3000));
    runner
        .run(&tricky(), |text| {
            for (style, regexes) in &styles {
                prop_assert_eq!(by_scanner(*style, &text), by_regex(regexes, &text), "{:?}", style);
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn each_row_of_the_table_is_found_by_its_name() {
    for row in TABLE {
        assert_eq!(find(row.name), Some(*row));
    }
    assert_eq!(find("no-such"), None);
}

#[test]
fn a_long_run_is_cut_in_linear_time() {
    // A backtracking engine needs minutes for such a run, so the limit can be generous.
    let started = std::time::Instant::now();
    for unit in [" ", "\n", "a", "'", "1", " \n", "e\u{301}"] {
        let text = unit.repeat((1 << 18) / unit.len());
        for row in TABLE {
            let mut bytes = 0;
            split(row.style, &text, &mut |piece| bytes += piece.len());
            assert_eq!(bytes, text.len(), "{} on {unit:?}", row.name);
        }
    }
    assert!(started.elapsed() < std::time::Duration::from_secs(20), "{:?}", started.elapsed());
}

#[test]
fn ascii_letters_end_at_whatever_is_none() {
    for (at, byte) in (0..8).flat_map(|at| (0..=255u8).map(move |byte| (at, byte))) {
        for around in [*b"abcdyzAZ", *b"ZzYydcBa"] {
            let mut text = around;
            text[at] = byte;
            let expected = if byte.is_ascii_alphabetic() { 8 } else { at };
            assert_eq!(ascii_letters(text), expected, "{byte:#x} at {at}");
        }
    }
    assert_eq!(ascii_letters(*b"ab cd\xff@["), 2);
}
