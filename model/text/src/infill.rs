//! The tokens with which a model fills in the middle between two texts.

use crate::Error;
use crate::tokenizer::{Kind, Tokenizer};
use metadata::Metadata;

/// Keys of a token's id, and its texts in known vocabularies, for files without the keys.
type Names = ([&'static str; 2], &'static [&'static str]);

const PREFIX: Names = (
    ["tokenizer.ggml.fim_pre_token_id", "tokenizer.ggml.prefix_token_id"],
    &[
        "<|fim_prefix|>",
        "<fim-prefix>",
        "<fim_prefix>",
        "<｜fim▁begin｜>",
        "<|code_prefix|>",
        "<PRE>",
        "▁<PRE>",
    ],
);
const SUFFIX: Names = (
    ["tokenizer.ggml.fim_suf_token_id", "tokenizer.ggml.suffix_token_id"],
    &[
        "<|fim_suffix|>",
        "<fim-suffix>",
        "<fim_suffix>",
        "<｜fim▁hole｜>",
        "<|code_suffix|>",
        "<SUF>",
        "▁<SUF>",
    ],
);
const MIDDLE: Names = (
    ["tokenizer.ggml.fim_mid_token_id", "tokenizer.ggml.middle_token_id"],
    &[
        "<|fim_middle|>",
        "<fim-middle>",
        "<fim_middle>",
        "<｜fim▁end｜>",
        "<|code_middle|>",
        "<MID>",
        "▁<MID>",
    ],
);

/// Tokens before the text before the gap, before the text after it, and before what fills it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Infill {
    prefix: u32,
    suffix: u32,
    middle: u32,
}

impl Infill {
    /// `None` if the model has no such tokens. If it has, they become control tokens of the tokenizer.
    ///
    /// # Errors
    /// Keys of a wrong type.
    pub fn from_metadata(metadata: &Metadata, tokenizer: &mut Tokenizer) -> Result<Option<Self>, Error> {
        let mut tokens = [0; 3];
        for (token, names) in tokens.iter_mut().zip([PREFIX, SUFFIX, MIDDLE]) {
            match find(metadata, tokenizer, names)? {
                Some(found) => *token = found,
                None => return Ok(None),
            }
        }
        tokenizer.make_control(&tokens);
        let [prefix, suffix, middle] = tokens;
        Ok(Some(Self { prefix, suffix, middle }))
    }

    /// The prompt for what is between `before` and `after`, in the order prefix, suffix, middle.
    pub fn prompt(&self, before: &[u32], after: &[u32]) -> Vec<u32> {
        [&[self.prefix], before, &[self.suffix], after, &[self.middle]].concat()
    }
}

fn find(metadata: &Metadata, tokenizer: &Tokenizer, (keys, texts): Names) -> Result<Option<u32>, Error> {
    for key in keys {
        if let Some(id) = metadata.get::<u32>(key)?.filter(|id| tokenizer.kind(*id).is_some()) {
            return Ok(Some(id));
        }
    }
    // An ordinary token of this text would be a coincidence.
    let cut_out = |id: &u32| matches!(tokenizer.kind(*id), Some(Kind::Control | Kind::UserDefined));
    let ids = || (0..tokenizer.vocab_size() as u32).filter(cut_out);
    let named = |text: &&str| ids().find(|id| tokenizer.token_text(*id) == Some(text));
    Ok(texts.iter().find_map(named))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::tests::tiny;

    #[test]
    fn tokens_are_found_by_keys_or_texts() {
        let mut metadata = Metadata::default();
        let mut tokenizer = tiny("qwen2");
        let named = Infill::from_metadata(&metadata, &mut tokenizer).unwrap();
        assert_eq!(named, None, "the vocabulary has no such tokens");
        for (key, id) in [("fim_pre", 5u32), ("suffix", 6), ("fim_mid", 7)] {
            metadata.insert(format!("tokenizer.ggml.{key}_token_id"), id);
        }
        let infill = Infill::from_metadata(&metadata, &mut tokenizer).unwrap().unwrap();
        assert_eq!(infill.prompt(&[1, 2], &[3]), [5, 1, 2, 6, 3, 7]);
        // An id beyond the vocabulary is none.
        metadata.insert("tokenizer.ggml.fim_mid_token_id", u32::MAX);
        assert_eq!(Infill::from_metadata(&metadata, &mut tokenizer).unwrap(), None);
    }
}
