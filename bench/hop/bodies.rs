//! Request bodies: chats with words of a fixed text, most of which routers have seen before.

use std::fmt::Write;

/// Source of the words: ordinary English, always the same.
const TEXT: &str = include_str!("../../LICENSE");

/// Words of a body of about 100 tokens.
const SHORT_WORDS: usize = 55;
/// Words of a body of about 8,000 tokens.
const LONG_WORDS: usize = 5_600;
/// Long common prefixes, nine tenths of a request's words.
const PREFIXES: u64 = 8;
/// Documents; nine tenths of a body consist of them.
const DOCUMENTS: u64 = 200;
/// Words of a document.
const DOCUMENT_WORDS: usize = 120;

/// Kind of a request body.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Kind {
    /// About 100 tokens, never seen before but for the first words.
    Short,
    /// About 8,000 tokens: nine tenths are one of 8 prefixes, the rest is new.
    Prefix,
    /// About 8,000 tokens: nine tenths are documents out of 200, in another order each time, the rest is new.
    Rag,
    /// About 8,000 tokens, all of them new.
    Cold,
}

/// Generates request bodies.
pub(crate) struct Bodies {
    kind: Kind,
    words: Vec<&'static str>,
    /// Prefixes or documents.
    contexts: Vec<String>,
    random: Random,
    tail: String,
}

impl Bodies {
    /// `model`, `stream` and `tokens` to generate are the same in every request. Equal seeds give equal
    /// requests.
    pub(crate) fn new(kind: Kind, model: &str, tokens: u32, stream: bool, seed: u64) -> Self {
        let plain = |c: char| c.is_ascii_alphanumeric() || ".,;()-".contains(c);
        let words: Vec<&str> = TEXT.split_whitespace().filter(|word| word.chars().all(plain)).collect();
        // Parts do not depend on the seed, so that a later run repeats prefixes of an earlier one.
        let context = |number, length| {
            let mut text = String::new();
            words_into(&words, &mut Random::new(number), length, &mut text);
            text
        };
        let contexts = match kind {
            Kind::Short | Kind::Cold => Vec::new(),
            Kind::Prefix => (0..PREFIXES).map(|number| context(number, LONG_WORDS * 9 / 10)).collect(),
            Kind::Rag => (0..DOCUMENTS).map(|number| context(number, DOCUMENT_WORDS)).collect(),
        };
        let include_usage = if stream { r#","stream_options":{"include_usage":true}"# } else { "" };
        let tail = format!(
            r#""}}],"model":"{model}","max_tokens":{tokens},"temperature":0,"ignore_eos":true,"stream":{stream}{include_usage}}}"#
        );
        Self { kind, words, contexts, random: Random::new(1_000 + seed), tail }
    }

    /// Appends the next request's body.
    pub(crate) fn next(&mut self, body: &mut String) {
        body.push_str(r#"{"messages":[{"role":"system","content":"You answer from what is given."},{"role":"user","content":""#);
        let new = match self.kind {
            Kind::Short => SHORT_WORDS,
            Kind::Cold => LONG_WORDS,
            Kind::Prefix => {
                let at = self.random.below(PREFIXES);
                body.push_str(&self.contexts[at as usize]);
                LONG_WORDS / 10
            }
            Kind::Rag => {
                for rank in 0..LONG_WORDS * 9 / 10 / DOCUMENT_WORDS {
                    let at = self.random.below(DOCUMENTS);
                    // Writing to memory does not fail.
                    let _ = write!(
                        body,
                        "\\n<document rank=\\\"{rank}\\\">\\n{}\\n</document>",
                        self.contexts[at as usize]
                    );
                }
                body.push_str("\\n\\n");
                LONG_WORDS / 10
            }
        };
        words_into(&self.words, &mut self.random, new, body);
        body.push_str(&self.tail);
    }
}

fn words_into(words: &[&str], random: &mut Random, count: usize, out: &mut String) {
    for nth in 0..count {
        if nth > 0 {
            out.push(' ');
        }
        out.push_str(words[random.below(words.len() as u64) as usize]);
    }
}

/// splitmix64, for selecting words.
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0xd134_2543_de82_ef95))
    }

    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((u128::from(z ^ (z >> 31)) * u128::from(end)) >> 64) as u64
    }
}
