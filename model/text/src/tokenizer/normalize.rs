//! Changes of a text before it is cut into words, as a tokenizer file's `normalizer` says.

use std::borrow::Cow;

use unicode_general_category::{GeneralCategory, get_general_category};
use unicode_normalization::UnicodeNormalization;

use super::bpe::byte_char;
use super::charsmap::Charsmap;
use super::classes::{is_ideograph, is_mark, is_other};
use super::regex::Regex;

/// A change. A list of them is applied in order.
#[derive(Debug)]
pub(super) enum Normalizer {
    Nfc,
    Nfd,
    Nfkc,
    Nfkd,
    Lowercase,
    /// Removes combining marks.
    StripAccents,
    /// Removes white space at the ends.
    Strip {
        left: bool,
        right: bool,
    },
    /// Puts a text before every text that is not empty.
    Prepend(Box<str>),
    Replace {
        pattern: Pattern,
        content: Box<str>,
    },
    /// Replaces characters by a table.
    Charsmap(Box<Charsmap>),
    /// Writes every byte as its character in byte-level vocabularies.
    ByteLevel,
    Bert {
        /// Removes control characters, and makes all white space spaces.
        clean: bool,
        /// Puts spaces around ideographs.
        ideographs: bool,
        strip_accents: bool,
        lowercase: bool,
    },
}

/// Search pattern of a normalizer.
#[derive(Debug)]
pub(super) enum Pattern {
    /// Not empty.
    Text(Box<str>),
    Regex(Box<Regex>),
}

impl Pattern {
    /// Calls `found` with the start and end of every match, from left to right. Matches do not overlap.
    pub(super) fn matches(&self, text: &str, mut found: impl FnMut(usize, usize)) {
        match self {
            Self::Text(pattern) => {
                text.match_indices(&**pattern).for_each(|(at, _)| found(at, at + pattern.len()));
            }
            Self::Regex(regex) => regex.matches(text).for_each(|(start, end)| found(start, end)),
        }
    }
}

/// Applies `normalizers` to a part of a text. `begins`: the part begins a text or follows an added token.
pub(super) fn apply<'a>(normalizers: &[Normalizer], text: &'a str, begins: bool) -> Cow<'a, str> {
    let mut text = Cow::Borrowed(text);
    for normalizer in normalizers {
        if let Some(changed) = normalizer.change(&text, begins) {
            text = Cow::Owned(changed);
        }
    }
    text
}

/// Whether `normalizers` keep the first character of a text, maybe as another one.
pub(super) fn keep_start(normalizers: &[Normalizer], text: &str) -> bool {
    let removed = |normalizer: &Normalizer| match (normalizer, text.chars().next()) {
        (Normalizer::Charsmap(map), Some(first)) => map.replace(first.encode_utf8(&mut [0; 4])).is_empty(),
        (Normalizer::Strip { left: true, .. }, Some(first)) => first.is_whitespace(),
        (Normalizer::StripAccents, Some(first)) => is_mark(first),
        (Normalizer::Bert { clean: true, .. }, Some(first)) => is_removed(first),
        _ => false,
    };
    !normalizers.iter().any(removed)
}

impl Normalizer {
    /// The changed text; `None` if nothing changes.
    fn change(&self, text: &str, begins: bool) -> Option<String> {
        match self {
            // ASCII is in every normal form.
            Self::Nfc | Self::Nfd | Self::Nfkc | Self::Nfkd if text.is_ascii() => None,
            Self::Nfc => Some(text.nfc().collect()),
            Self::Nfd => Some(text.nfd().collect()),
            Self::Nfkc => Some(text.nfkc().collect()),
            Self::Nfkd => Some(text.nfkd().collect()),
            // By character: a final sigma is not special.
            Self::Lowercase => Some(text.chars().flat_map(char::to_lowercase).collect()),
            Self::StripAccents => Some(text.chars().filter(|c| !is_mark(*c)).collect()),
            Self::Strip { left, right } => {
                let text = if *left { text.trim_start() } else { text };
                Some(if *right { text.trim_end() } else { text }.to_owned())
            }
            Self::Prepend(prefix) => (begins && !text.is_empty()).then(|| format!("{prefix}{text}")),
            Self::Replace { pattern, content } => {
                let (mut changed, mut at) = (String::with_capacity(text.len()), 0);
                pattern.matches(text, |start, end| {
                    changed.push_str(text.get(at..start).unwrap_or_default());
                    changed.push_str(content);
                    at = end;
                });
                changed.push_str(text.get(at..).unwrap_or_default());
                Some(changed)
            }
            Self::Charsmap(map) => Some(map.replace(text)),
            Self::ByteLevel => Some(text.bytes().map(byte_char).collect()),
            Self::Bert { clean, ideographs, strip_accents, lowercase } => {
                let mut changed: String = match clean {
                    true => text.chars().filter(|c| !is_removed(*c)).map(plain_space).collect(),
                    false => text.to_owned(),
                };
                if *ideographs {
                    changed = changed.chars().fold(String::with_capacity(changed.len()), |mut text, c| {
                        match is_ideograph(c) {
                            true => text.extend([' ', c, ' ']),
                            false => text.push(c),
                        }
                        text
                    });
                }
                if *strip_accents {
                    let mark = |c: &char| {
                        !c.is_ascii() && get_general_category(*c) == GeneralCategory::NonspacingMark
                    };
                    changed = changed.nfd().filter(|c| !mark(c)).collect();
                }
                if *lowercase {
                    changed = changed.chars().flat_map(char::to_lowercase).collect();
                }
                Some(changed)
            }
        }
    }

    /// Whether a text may be cut between an ASCII letter and a space, or after a newline between printable
    /// ASCII characters, and each side changed by itself.
    pub(super) fn may_be_cut(&self) -> bool {
        match self {
            Self::Nfc
            | Self::Nfd
            | Self::Nfkc
            | Self::Nfkd
            | Self::Lowercase
            | Self::StripAccents
            | Self::Prepend(_)
            | Self::ByteLevel => true,
            Self::Replace { pattern: Pattern::Text(text), .. } => text.chars().count() == 1,
            Self::Replace { .. } | Self::Strip { .. } | Self::Charsmap(_) | Self::Bert { .. } => false,
        }
    }

    /// By which factor a text becomes shorter in bytes at most; `None` if there is no bound.
    pub(super) fn shortens(&self) -> Option<usize> {
        match self {
            Self::Prepend(_) | Self::ByteLevel => Some(1),
            // Three Hangul letters of three bytes each become one character of three bytes.
            Self::Nfc | Self::Nfd => Some(3),
            Self::Replace { pattern: Pattern::Text(text), content } if content.len() >= text.len() => Some(1),
            _ => None,
        }
    }
}

/// What `clean_text` of BERT removes.
fn is_removed(c: char) -> bool {
    c == char::REPLACEMENT_CHARACTER || (is_other(c) && !matches!(c, '\t' | '\n' | '\r'))
}

fn plain_space(c: char) -> char {
    if c.is_whitespace() { ' ' } else { c }
}
