//! Texts as an encoder reads them: whole, between the tokens that its vocabulary puts around a text.

use super::Tokenizer;

/// Two texts as one sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pair {
    /// The tokens.
    pub tokens: Vec<u32>,
    /// Where the second text begins.
    pub second: usize,
}

impl Tokenizer {
    /// The tokens of `text`, special tokens parsed, between BOS and EOS where the vocabulary asks for them:
    /// `[CLS] text [SEP]`.
    pub fn encode_framed(&self, text: &str) -> Vec<u32> {
        let mut tokens: Vec<u32> = self.opening().into_iter().chain(self.encode(text, true)).collect();
        tokens.extend(self.closing());
        tokens
    }

    /// The tokens of a pair of texts, each given as [`encode`](Self::encode) cuts it:
    /// `[CLS] first [SEP] second [SEP]`.
    pub fn frame_pair(&self, first: &[u32], second: &[u32]) -> Pair {
        let mut tokens: Vec<u32> = self.opening().into_iter().chain(first.iter().copied()).collect();
        tokens.extend(self.closing());
        let at = tokens.len();
        tokens.extend_from_slice(second);
        tokens.extend(self.closing());
        Pair { tokens, second: at }
    }

    fn opening(&self) -> Option<u32> {
        self.bos().filter(|_| self.adds_bos())
    }

    fn closing(&self) -> Option<u32> {
        self.eos().filter(|_| self.adds_eos())
    }
}
