//! Expressions of published tokenizers: the scanners that cut as they do, and where texts may be cut.

use crate::tokenizer::Cutting;
use crate::tokenizer::pretokenize::Style;
use crate::tokenizer::splitters::{CharClass, Splitter};

/// Expressions with a scanner.
const SCANNED: &[(&str, Style)] = &[
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        Style::Words { digits: 3, marks: false, long_s: true },
    ),
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        Style::Words { digits: 1, marks: false, long_s: true },
    ),
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        Style::Words { digits: 1, marks: true, long_s: true },
    ),
    (
        r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        Style::Words { digits: 3, marks: false, long_s: false },
    ),
    (
        r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        Style::Words { digits: 1, marks: false, long_s: false },
    ),
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        Style::Cased { long_s: true },
    ),
    (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", Style::Gpt2),
    (r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", Style::Gpt2),
];

/// Expressions whose words end before a space after a letter, and after a newline between printable characters.
const CUTTABLE: &[&str] = &[
    // Tekken.
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    // DeepSeek V3.
    r"[!#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
];

/// Expressions of runs of characters that are neither letters of ASCII nor white space.
const APART: &[&str] = &[r"\p{N}", r"\p{N}{1,3}", "[一-龥\u{3040}-ゟ゠-ヿ]+", "[0-9][0-9][0-9]"];

/// The splitter for an expression whose matches, and what is between them, are words.
pub(super) fn scanner(pattern: &str) -> Option<Style> {
    SCANNED.iter().find(|(known, _)| *known == pattern).map(|(_, style)| *style)
}

/// Places where a text may be cut without changing the words of these splitters. `None` if not known.
pub(super) fn cutting(splitters: &[Splitter]) -> Option<Cutting> {
    let mut cutting = Cutting { newlines: true, words: true };
    let mut words = false;
    for splitter in splitters {
        match splitter {
            Splitter::Style(_) => words = true,
            Splitter::Chars { class: CharClass::Numeric, .. } => {}
            // A part after a newline would get a space.
            Splitter::PrefixSpace => cutting.newlines = false,
            Splitter::Split { source: Some(source), .. } if APART.contains(&&**source) => {}
            Splitter::Split { source: Some(source), .. } if CUTTABLE.contains(&&**source) => words = true,
            _ => return None,
        }
    }
    words.then_some(cutting)
}

#[cfg(test)]
pub(in super::super) fn scanned() -> impl Iterator<Item = (&'static str, Style)> {
    SCANNED.iter().copied()
}
