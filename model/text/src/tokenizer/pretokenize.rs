//! Splits text into the words inside which byte-level BPE merges.
//!
//! Every style is a regular expression in its models' files. These scanners split the same way in one pass
//! without backtracking; the tests compare them with the expressions.

use std::sync::OnceLock;

use unicode_general_category::{GeneralCategory, get_general_category};

/// One row per value of `tokenizer.ggml.pre`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PreTokenizer {
    /// The value in the file.
    pub(super) name: &'static str,
    pub(super) style: Style,
    /// True: a word that is a token is not merged from its bytes.
    pub(super) whole_words_first: bool,
    /// Default of `tokenizer.ggml.add_bos_token`.
    pub(super) adds_bos: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Style {
    /// GPT-2's expression.
    Gpt2,
    /// Every number character by itself, GPT-2's expression between them.
    DigitsThenGpt2,
    /// Runs of punctuation, then GPT-2's expression, then numbers, then ASCII digits in groups of three.
    PunctuationThenGpt2,
    /// The cl100k family: any one character may begin a word; newlines end punctuation.
    Words {
        /// Maximum count of number characters in one word.
        digits: usize,
        /// Combining marks count as letters.
        marks: bool,
        /// U+017F counts as an s in contractions, as where case is ignored.
        long_s: bool,
    },
    /// The o200k family: like cl100k, and a change of case may end a word.
    Cased {
        /// As in `Words`.
        long_s: bool,
    },
}

const fn row(name: &'static str, style: Style) -> PreTokenizer {
    PreTokenizer { name, style, whole_words_first: false, adds_bos: false }
}

const fn words_of(digits: usize, marks: bool) -> Style {
    Style::Words { digits, marks, long_s: false }
}

const fn llama3(name: &'static str) -> PreTokenizer {
    PreTokenizer { name, style: words_of(3, false), whole_words_first: true, adds_bos: true }
}

pub(super) const TABLE: &[PreTokenizer] = &[
    row("default", Style::PunctuationThenGpt2),
    row("gpt-2", Style::Gpt2),
    row("modern-bert", Style::Gpt2),
    row("roberta-bpe", Style::Gpt2),
    row("smollm", Style::DigitsThenGpt2),
    row("refact", Style::DigitsThenGpt2),
    row("starcoder", Style::DigitsThenGpt2),
    row("qwen2", words_of(1, false)),
    row("deepseek-r1-qwen", words_of(1, false)),
    row("qwen35", words_of(1, true)),
    row("gpt-4o", Style::Cased { long_s: false }),
    row("dbrx", words_of(3, false)),
    llama3("llama-bpe"),
    llama3("llama3"),
    llama3("llama-v3"),
    llama3("falcon-h1"),
    llama3("lfm2"),
];

/// The row of `name`.
pub(super) fn find(name: &str) -> Option<PreTokenizer> {
    TABLE.iter().copied().find(|row| row.name == name)
}

/// Classes of characters in the expressions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Class {
    Letter,
    Mark,
    Number,
    Newline,
    /// White space other than CR and LF.
    Space,
    Other,
}

impl Class {
    fn is_space(self) -> bool {
        matches!(self, Self::Space | Self::Newline)
    }
}

fn class(c: char) -> Class {
    match c {
        'a'..='z' | 'A'..='Z' => Class::Letter,
        '0'..='9' => Class::Number,
        '\n' | '\r' => Class::Newline,
        ' ' | '\t' | '\u{b}' | '\u{c}' => Class::Space,
        _ if c.is_ascii() => Class::Other,
        _ => properties(c).class,
    }
}

/// `[\p{P}$+<=>^~|]`
fn is_punctuation(c: char) -> bool {
    if c.is_ascii() { c.is_ascii_punctuation() && c != '`' } else { properties(c).punctuation }
}

/// Cached properties of a character outside ASCII.
#[derive(Debug, Clone, Copy)]
struct Properties {
    class: Class,
    case: Option<Case>,
    punctuation: bool,
}

/// Case of a letter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Case {
    Upper,
    Lower,
    /// Either case: letters of scripts without case, modifiers, marks.
    Any,
}

impl Case {
    fn is_upper(self) -> bool {
        self != Self::Lower
    }

    fn is_lower(self) -> bool {
        self != Self::Upper
    }
}

fn case(c: char) -> Option<Case> {
    match c {
        'a'..='z' => Some(Case::Lower),
        'A'..='Z' => Some(Case::Upper),
        _ if c.is_ascii() => None,
        _ => properties(c).case,
    }
}

const PAGE: usize = 256;

/// Properties of every character, by page. A page is computed at first use, because each lookup is a search.
static PAGES: [OnceLock<[Properties; PAGE]>; (char::MAX as usize + 1) / PAGE] =
    [const { OnceLock::new() }; (char::MAX as usize + 1) / PAGE];

fn properties(c: char) -> Properties {
    let at = c as usize;
    let page = PAGES[at / PAGE].get_or_init(|| {
        std::array::from_fn(|low| {
            let c = u32::try_from(at / PAGE * PAGE + low).ok().and_then(char::from_u32);
            c.map_or(Properties { class: Class::Other, case: None, punctuation: false }, search)
        })
    });
    page[at % PAGE]
}

fn search(c: char) -> Properties {
    use GeneralCategory as G;
    let category = get_general_category(c);
    let class = match category {
        _ if c.is_whitespace() => Class::Space,
        G::UppercaseLetter | G::LowercaseLetter | G::TitlecaseLetter | G::ModifierLetter | G::OtherLetter => {
            Class::Letter
        }
        G::NonspacingMark | G::SpacingMark | G::EnclosingMark => Class::Mark,
        G::DecimalNumber | G::LetterNumber | G::OtherNumber => Class::Number,
        _ => Class::Other,
    };
    let punctuation = matches!(
        category,
        G::ConnectorPunctuation
            | G::DashPunctuation
            | G::OpenPunctuation
            | G::ClosePunctuation
            | G::InitialPunctuation
            | G::FinalPunctuation
            | G::OtherPunctuation
    );
    let case = match category {
        G::UppercaseLetter | G::TitlecaseLetter => Some(Case::Upper),
        G::LowercaseLetter => Some(Case::Lower),
        _ if matches!(class, Class::Letter | Class::Mark) => Some(Case::Any),
        _ => None,
    };
    Properties { class, case, punctuation }
}

/// Calls `emit` with every word of `text`, in order. The words together are the text.
#[inline]
pub(super) fn split<'a>(style: Style, text: &'a str, emit: &mut impl FnMut(&'a str)) {
    match style {
        Style::Gpt2 => words(text, gpt2_word, emit),
        // The common case.
        Style::DigitsThenGpt2 if !may_have_numbers(text) => words(text, gpt2_word, emit),
        Style::DigitsThenGpt2 => {
            alternate(text, |c| class(c) == Class::Number, &mut |segment, digits| {
                if digits {
                    for (at, c) in segment.char_indices() {
                        emit(&segment[at..at + c.len_utf8()]);
                    }
                } else {
                    words(segment, gpt2_word, emit);
                }
            });
        }
        Style::PunctuationThenGpt2 => {
            let mut by_number = |word: &'a str| {
                alternate(word, |c| class(c) == Class::Number, &mut |segment, _| {
                    by_three_digits(segment, emit)
                });
            };
            // The second expression also treats runs of punctuation as separate words, and may split them.
            alternate(text, is_punctuation, &mut |segment, _| words(segment, gpt2_word, &mut by_number));
        }
        Style::Words { digits, marks, long_s } => {
            let short = if long_s { Contractions::WithLongS } else { Contractions::AnyCase };
            words(text, |rest| cl100k_word(rest, digits, marks, short), emit);
        }
        Style::Cased { long_s } => {
            let short = if long_s { Contractions::WithLongS } else { Contractions::AnyCase };
            words(text, |rest| o200k_word(rest, short), emit);
        }
    }
}

/// Splits off one word after the other. `word` returns the length of the first one, never 0.
fn words<'a>(mut text: &'a str, word: impl Fn(&str) -> usize, emit: &mut impl FnMut(&'a str)) {
    while !text.is_empty() {
        let (head, tail) = text.split_at(word(text));
        emit(head);
        text = tail;
    }
}

/// Splits `text` into maximal runs of characters with the same result of `pick`.
fn alternate<'a>(mut text: &'a str, pick: impl Fn(char) -> bool, emit: &mut impl FnMut(&'a str, bool)) {
    while let Some(first) = text.chars().next() {
        let picked = pick(first);
        let end = run(text, |c| pick(c) == picked);
        let (head, tail) = text.split_at(end);
        emit(head, picked);
        text = tail;
    }
}

/// `[0-9][0-9][0-9]`, and the text between.
fn by_three_digits<'a>(mut text: &'a str, emit: &mut impl FnMut(&'a str)) {
    while !text.is_empty() {
        let triple = text.as_bytes().windows(3).position(|w| w.iter().all(u8::is_ascii_digit));
        let (head, tail) = text.split_at(match triple {
            Some(0) => 3,
            Some(at) => at,
            None => text.len(),
        });
        emit(head);
        text = tail;
    }
}

/// Length in bytes of the longest prefix whose characters all satisfy `pick`.
fn run(text: &str, pick: impl Fn(char) -> bool) -> usize {
    text.char_indices().find(|&(_, c)| !pick(c)).map_or(text.len(), |(at, _)| at)
}

/// Like [`run`]; `pick` must accept all ASCII letters and no other ASCII characters.
fn letters(text: &str, pick: impl Fn(char) -> bool) -> usize {
    let bytes = text.as_bytes();
    let mut ascii = 0;
    while let Some(eight) = bytes.get(ascii..).and_then(|rest| rest.first_chunk::<8>()) {
        let letters = ascii_letters(*eight);
        ascii += letters;
        if letters < 8 {
            break;
        }
    }
    // The last few bytes of the text, and non-ASCII text.
    let rest = text.get(ascii..).unwrap_or_default();
    ascii + run(rest, pick)
}

/// Number of leading ASCII letters.
fn ascii_letters(eight: [u8; 8]) -> usize {
    const EACH: u64 = 0x0101_0101_0101_0101;
    const HIGHEST: u64 = 0x80 * EACH;
    let text = u64::from_le_bytes(eight);
    // Lower-case capitals; nothing else becomes a letter. Without the highest bits no sum overflows its byte.
    let small = (text | (0x20 * EACH)) & !HIGHEST;
    let from_a = small + u64::from(0x80 - b'a') * EACH;
    let above_z = small + u64::from(0x7f - b'z') * EACH;
    let others = !(from_a & !above_z & !text) & HIGHEST;
    others.trailing_zeros() as usize / 8
}

/// False if the text is ASCII without digits. Reads every byte, which is faster than stopping early.
fn may_have_numbers(text: &str) -> bool {
    text.bytes().fold(false, |any, byte| any | byte.is_ascii_digit() | !byte.is_ascii())
}

/// Which contractions are words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Contractions {
    LowerCase,
    AnyCase,
    /// In any case; the long s, which folds to s, too.
    WithLongS,
}

/// Length in bytes of the contraction at the start of `text`; 0 if there is none.
fn contraction(text: &str, which: Contractions) -> usize {
    let lower = |b: Option<&u8>| {
        b.map(|b| if which == Contractions::LowerCase { *b } else { b.to_ascii_lowercase() })
    };
    let bytes = text.as_bytes();
    if bytes.first() != Some(&b'\'') {
        return 0;
    }
    match (lower(bytes.get(1)), lower(bytes.get(2))) {
        (Some(b's' | b't' | b'm' | b'd'), _) => 2,
        (Some(b'r' | b'v'), Some(b'e')) | (Some(b'l'), Some(b'l')) => 3,
        (Some(0xc5), Some(0xbf)) if which == Contractions::WithLongS => 3,
        _ => 0,
    }
}

/// `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s`
fn gpt2_word(text: &str) -> usize {
    let short = contraction(text, Contractions::LowerCase);
    if short > 0 {
        return short;
    }
    let (space, body) = match text.strip_prefix(' ') {
        Some(rest) => (1, rest),
        None => (0, text),
    };
    let word = letters(body, |c| class(c) == Class::Letter);
    if word > 0 {
        return space + word;
    }
    match body.chars().next().map(class) {
        Some(Class::Number) => space + run(body, |c| class(c) == Class::Number),
        Some(Class::Other | Class::Mark) => {
            space + run(body, |c| matches!(class(c), Class::Other | Class::Mark))
        }
        Some(Class::Letter | Class::Space | Class::Newline) | None => spaces(text),
    }
}

/// `\s+(?!\S)|\s+`: all white space at the end of the text. Elsewhere all but its last character, which
/// begins the next word, unless it is the only one.
fn spaces(text: &str) -> usize {
    let end = run(text, |c| class(c).is_space());
    if end == text.len() {
        return end;
    }
    match text[..end].char_indices().next_back() {
        Some((0, c)) => c.len_utf8(),
        Some((last, _)) => last,
        None => end,
    }
}

/// `'(?i:s|t|re|ve|m|ll|d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,digits}|
/// ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`,
/// with marks counted as letters if `marks`.
fn cl100k_word(text: &str, digits: usize, marks: bool, short: Contractions) -> usize {
    let short = contraction(text, short);
    if short > 0 {
        return short;
    }
    let letter = |k: Class| k == Class::Letter || (marks && k == Class::Mark);
    let Some(first) = text.chars().next() else { return 0 };
    let kind = class(first);
    if letter(kind) {
        return letters(text, |c| letter(class(c)));
    }
    if kind == Class::Number {
        return number(text, digits);
    }
    if kind != Class::Newline {
        let word = letters(&text[first.len_utf8()..], |c| letter(class(c)));
        if word > 0 {
            return first.len_utf8() + word;
        }
    }
    let other = |k: Class| k == Class::Other || (!marks && k == Class::Mark);
    symbols_or_blank(text, |c| other(class(c)), |c| class(c) == Class::Newline)
}

/// With U for `\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}`, L for `\p{Ll}\p{Lm}\p{Lo}\p{M}` and 's for `(?i:'s|'t|'re|'ve|'m|'ll|'d)?`:
/// `[^\r\n\p{L}\p{N}]?[U]*[L]+'s|[^\r\n\p{L}\p{N}]?[U]+[L]*'s|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+`
fn o200k_word(text: &str, short: Contractions) -> usize {
    let Some(first) = text.chars().next() else { return 0 };
    let kind = class(first);
    if kind == Class::Number {
        return number(text, 3);
    }
    // One character may precede the word, if a word follows it.
    let lead = if matches!(kind, Class::Letter | Class::Newline) { 0 } else { first.len_utf8() };
    let ends = [lead, 0].map(|start| small_word(&text[start..]).map(|end| start + end));
    let capitals =
        || Some(lead + run(&text[lead..], |c| case(c) == Some(Case::Upper))).filter(|&end| end > lead);
    if let Some(end) = ends[0].or(ends[1]).or_else(capitals) {
        return end + contraction(&text[end..], short);
    }
    let other = |c| matches!(class(c), Class::Other | Class::Mark);
    symbols_or_blank(text, other, |c| class(c) == Class::Newline || c == '/')
}

/// `[U]*[L]+` of [`o200k_word`]; `None` if the text does not begin with it.
fn small_word(text: &str) -> Option<usize> {
    let capitals = run(text, |c| case(c).is_some_and(Case::is_upper));
    let small = run(&text[capitals..], |c| case(c).is_some_and(Case::is_lower));
    if small > 0 {
        return Some(capitals + small);
    }
    // The last character that can be lower case counts as such.
    let last = text[..capitals].char_indices().rev().find(|&(_, c)| case(c) == Some(Case::Any));
    last.map(|(at, c)| at + c.len_utf8())
}

/// `\p{N}{1,max}` of a text that begins with a number character.
fn number(text: &str, max: usize) -> usize {
    let numbers = text.char_indices().take(max).take_while(|&(_, c)| class(c) == Class::Number);
    numbers.map(|(at, c)| at + c.len_utf8()).last().unwrap_or(0)
}

/// ` ?[other]+[tail]*|\s*[\r\n]+|\s+(?!\S)|\s+`
fn symbols_or_blank(text: &str, other: impl Fn(char) -> bool, tail: impl Fn(char) -> bool) -> usize {
    let space = usize::from(text.starts_with(' '));
    let body = run(&text[space..], other);
    if body > 0 {
        let end = space + body;
        return end + run(&text[end..], tail);
    }
    let blank = &text[..run(text, |c| class(c).is_space())];
    match blank.rfind(['\r', '\n']) {
        Some(last) => last + 1,
        None => spaces(text),
    }
}

#[cfg(test)]
mod tests;
