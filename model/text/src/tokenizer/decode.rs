//! From a token's text to the bytes that it stands for: a tokenizer file's `decoder`.

use super::bpe::char_byte;
use super::normalize::Pattern;

/// A decoder. Each changes the result of the one before, token by token.
#[derive(Debug)]
pub(super) enum TokenDecoder {
    Replace {
        pattern: Pattern,
        content: Box<str>,
    },
    /// `<0xE2>` is a byte.
    ByteFallback,
    /// Marks are spaces. `drops_first`: those of the first token are nothing.
    Metaspace {
        mark: char,
        drops_first: bool,
    },
    /// Words are separated by spaces. `cleans`: not before punctuation and contractions.
    WordPiece {
        prefix: Box<str>,
        cleans: bool,
    },
    /// Removes `content` up to `start` times at the beginning and `stop` times at the end.
    Strip {
        content: char,
        start: usize,
        stop: usize,
    },
    /// Characters of byte-level vocabularies are bytes.
    ByteLevel,
    /// Tokens are separated by spaces.
    Separated,
}

/// A token between two decoders.
enum Decoded {
    Text(String),
    Bytes(Vec<u8>),
}

/// The bytes of a token. `first`: it is the first one of a text.
pub(super) fn spell(decoders: &[TokenDecoder], token: &str, first: bool) -> Vec<u8> {
    let mut decoded = Decoded::Text(token.to_owned());
    for decoder in decoders {
        if let Decoded::Text(text) = decoded {
            decoded = decoder.apply(text, first);
        }
    }
    match decoded {
        Decoded::Text(text) => text.into_bytes(),
        Decoded::Bytes(bytes) => bytes,
    }
}

/// Parses a byte token such as `<0xE2>`.
pub(super) fn byte(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    u8::from_str_radix(digits, 16).ok()
}

impl TokenDecoder {
    fn apply(&self, text: String, first: bool) -> Decoded {
        Decoded::Text(match self {
            Self::Replace { pattern, content } => {
                let (mut changed, mut at) = (String::new(), 0);
                pattern.matches(&text, |start, end| {
                    changed.push_str(text.get(at..start).unwrap_or_default());
                    changed.push_str(content);
                    at = end;
                });
                changed.push_str(text.get(at..).unwrap_or_default());
                changed
            }
            Self::ByteFallback => match byte(&text).filter(|_| text.len() == 6) {
                Some(byte) => return Decoded::Bytes(vec![byte]),
                None => text,
            },
            Self::Metaspace { mark, drops_first } if first && *drops_first => text.replace(*mark, ""),
            Self::Metaspace { mark, .. } => text.replace(*mark, " "),
            Self::WordPiece { prefix, cleans } => {
                let mut word = match text.strip_prefix(&**prefix) {
                    _ if first => text,
                    Some(rest) => rest.to_owned(),
                    None => format!(" {text}"),
                };
                if *cleans {
                    for (spaced, joined) in CLEANED {
                        word = word.replace(spaced, joined);
                    }
                }
                word
            }
            Self::Strip { content, start, stop } => {
                let mut rest = text.as_str();
                for _ in 0..*start {
                    rest = rest.strip_prefix(*content).unwrap_or(rest);
                }
                for _ in 0..*stop {
                    rest = rest.strip_suffix(*content).unwrap_or(rest);
                }
                rest.to_owned()
            }
            Self::ByteLevel => match text.chars().map(char_byte).collect() {
                Some(bytes) => return Decoded::Bytes(bytes),
                None => text,
            },
            Self::Separated if first => text,
            Self::Separated => format!(" {text}"),
        })
    }
}

/// Texts that the decoder of WordPiece replaces, each with its replacement.
const CLEANED: [(&str, &str); 11] = [
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
];
