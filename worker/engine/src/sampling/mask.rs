//! Masks of the tokens that may be drawn next.

/// A set of tokens, one bit each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenMask {
    words: Vec<u32>,
}

impl TokenMask {
    /// Bit `t % 32` of word `t / 32` is set if token `t` is in the set. Tokens beyond the last word are not
    /// in it.
    pub fn new(words: Vec<u32>) -> Self {
        Self { words }
    }

    pub fn allows(&self, token: u32) -> bool {
        self.words.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
    }

    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|word| *word == 0)
    }

    /// Sets the logits of all other tokens to minus infinity. If no token remains because the allowed ones
    /// were barred before (`bars`), their logits are restored: the grammar takes precedence over the minimum
    /// length.
    pub(super) fn apply(&self, logits: &mut [f32], bars: &[(u32, f32)]) {
        let mut left = false;
        for (token, logit) in (0u32..).zip(logits.iter_mut()) {
            match self.allows(token) {
                true => left |= *logit > f32::NEG_INFINITY,
                false => *logit = f32::NEG_INFINITY,
            }
        }
        if !left {
            for (token, before) in bars.iter().filter(|(token, _)| self.allows(*token)) {
                if let Some(logit) = logits.get_mut(*token as usize) {
                    *logit = *before;
                }
            }
        }
    }
}
