//! The part of an answer about its prompt (`echo`, `prompt_logprobs`), and `best_of`.

use super::error::ApiError;
use super::fields::Fields;
use super::kind::Kind;
use super::limits::{MAX_LOGPROBS, MAX_N, MAX_PROMPT_LOGPROBS};
use super::params::Params;
use super::shape::{Delta, DeltaPart, PromptDelta};
use proto::message::{PromptLogprob, PromptLogprobs, TokenIds};
use std::sync::Arc;
use text::Tokenizer;

/// The fields of completions and chats about the prompt, and how many answers are generated.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Scoring {
    /// Whether the answer's text begins with the prompt's.
    pub echo: bool,
    /// vLLM's `prompt_logprobs`: the number of alternatives of each token of the prompt.
    pub prompt_logprobs: Option<u8>,
    /// Answers that are generated for each prompt, of which the `n` best are returned. `None`: `n`.
    pub best_of: Option<u32>,
}

impl Scoring {
    /// Reads the fields. `params`: the other parameters, including `logprobs`.
    pub fn read(kind: Kind, fields: &Fields<'_>, params: &Params) -> Result<Self, ApiError> {
        if !matches!(kind, Kind::Completion | Kind::Chat) {
            // These APIs refuse them.
            return Ok(Self::default());
        }
        let prompt_logprobs = fields.ranged("prompt_logprobs", 0..=MAX_LOGPROBS)?;
        if params.stream && prompt_logprobs.is_some_and(|top| top > 0) {
            return Err(ApiError::field("prompt_logprobs", "not with stream"));
        }
        let prompt_logprobs = prompt_logprobs.filter(|_| !params.stream);
        if kind == Kind::Chat {
            return Ok(Self { prompt_logprobs, ..Self::default() });
        }
        let best_of: Option<u32> = fields.ranged("best_of", 1..=MAX_N)?;
        if best_of.is_some_and(|best_of| best_of < params.n) {
            return Err(ApiError::field("best_of", format!("must be at least n, which is {}", params.n)));
        }
        let best_of = best_of.filter(|best_of| *best_of > params.n);
        if best_of.is_some() && params.stream {
            return Err(ApiError::field("best_of", "above n only without stream"));
        }
        Ok(Self { echo: fields.get("echo")?.unwrap_or(false), prompt_logprobs, best_of })
    }

    /// Whether an answer may have no token at all.
    pub fn allows_no_tokens(&self) -> bool {
        self.echo || self.prompt_logprobs.is_some()
    }

    /// The alternatives of an echoed prompt's tokens in `logprobs`. `None`: it has no log-probabilities.
    pub fn echoed(&self, logprobs: Option<u8>) -> Option<u8> {
        logprobs.filter(|_| self.echo)
    }

    /// The request to a worker for a prompt whose answer has at most `max_tokens` tokens.
    pub fn of_prompt(&self, logprobs: Option<u8>, max_tokens: u32) -> Option<PromptLogprobs> {
        let only_prompt = (max_tokens == 0).then_some(0);
        let top = self.echoed(logprobs).max(self.prompt_logprobs).max(only_prompt)?;
        Some(PromptLogprobs { top })
    }

    /// Refuses more log-probabilities of prompts than a request may have. `prompts`: length of each prompt and the
    /// limit of its answers.
    pub fn check(
        &self,
        params: &Params,
        prompts: impl Iterator<Item = (usize, u32)>,
    ) -> Result<(), ApiError> {
        let choices = self.best_of.unwrap_or(params.n) as usize;
        let entries = prompts.fold(0usize, |sum, (tokens, max_tokens)| {
            let scores = self.of_prompt(params.sampling.logprobs, max_tokens);
            let entries = scores.map_or(0, |scores| scores.entries(tokens));
            sum.saturating_add(entries.saturating_mul(choices))
        });
        if entries <= MAX_PROMPT_LOGPROBS {
            return Ok(());
        }
        let field = if self.echo { "echo" } else { "prompt_logprobs" };
        let reason = format!(
            "tokens of the prompts times their log-probabilities are {entries}, at most {MAX_PROMPT_LOGPROBS}"
        );
        Err(ApiError::field(field, reason))
    }
}

/// The prompt of a choice, as the answer tells of it.
#[derive(Debug)]
pub(crate) struct ToldPrompt {
    pub tokens: TokenIds,
    /// The prompt's text, with which the choice's text begins. `None`: it does not.
    pub echo: Option<Arc<str>>,
}

impl ToldPrompt {
    /// Characters before the answer.
    pub(crate) fn characters(&self) -> usize {
        self.echo.as_ref().map_or(0, |text| text.chars().count())
    }

    /// The beginning of the choice. `logprobs`: of the tokens from the second one on.
    pub(crate) fn delta(&self, logprobs: Vec<PromptLogprob>, tokenizer: &Tokenizer) -> Delta {
        let text = self.echo.as_deref().unwrap_or_default();
        let offsets = if logprobs.is_empty() && self.tokens.len() > 1 {
            Vec::new()
        } else {
            offsets(tokenizer, &self.tokens, text)
        };
        let mut delta = Delta {
            prompt: Some(PromptDelta { tokens: self.tokens.clone(), logprobs, offsets }),
            ..Delta::default()
        };
        delta.push(DeltaPart::Text(text.to_owned()));
        delta
    }
}

/// The text of an echoed prompt of tokens.
pub(crate) fn text_of(tokenizer: &Tokenizer, tokens: &[u32]) -> String {
    let begins = tokenizer.bos().is_some_and(|bos| tokenizer.adds_bos() && tokens.first() == Some(&bos));
    tokenizer.decode(tokens.get(usize::from(begins)..).unwrap_or_default(), false)
}

/// Offset of each token in the prompt's text, in characters. A token that continues a character has that character's
/// offset; one that is not in the text, such as BOS, takes no room.
fn offsets(tokenizer: &Tokenizer, tokens: &[u32], text: &str) -> Vec<usize> {
    let bytes = text.as_bytes();
    let (mut at, mut begun) = (0, 0);
    let offset = |token: &u32| {
        let offset = if text.is_char_boundary(at) { begun } else { begun - 1 };
        let rest = bytes.get(at..).unwrap_or_default();
        let written = tokenizer.token_bytes(*token);
        let length = match written {
            _ if rest.starts_with(written) => written.len(),
            // Some vocabularies write a space before the first word.
            [b' ', word @ ..] if at == 0 && rest.starts_with(word) => word.len(),
            _ if tokenizer.is_special(*token) => 0,
            _ => written.len().min(rest.len()),
        };
        let passed = rest.get(..length).unwrap_or_default();
        begun += passed.iter().filter(|byte| !is_continuation(**byte)).count();
        at += length;
        offset
    };
    tokens.iter().map(offset).collect()
}

/// Whether a byte of UTF-8 continues a character.
fn is_continuation(byte: u8) -> bool {
    byte & 0xc0 == 0x80
}

/// Of each prompt's `candidates` choices the `n` with the highest log-probability per token, the best first.
pub(crate) fn best(choices: Vec<Delta>, n: usize, candidates: usize) -> Vec<Delta> {
    let mut choices = choices.into_iter();
    let mut best = Vec::new();
    loop {
        let mut group: Vec<(f64, Delta)> =
            choices.by_ref().take(candidates.max(1)).map(|choice| (mean_logprob(&choice), choice)).collect();
        if group.is_empty() {
            return best;
        }
        // Equal ones stay in the order of their seeds.
        group.sort_by(|(a, _), (b, _)| b.total_cmp(a));
        best.extend(group.into_iter().take(n).map(|(_, choice)| choice));
    }
}

fn mean_logprob(choice: &Delta) -> f64 {
    let logprobs = choice.tokens.iter().filter_map(|token| token.logprobs.as_ref());
    let (sum, count) =
        logprobs.fold((0.0, 0u32), |(sum, count), logprobs| (sum + f64::from(logprobs.chosen), count + 1));
    if count == 0 { 0.0 } else { sum / f64::from(count) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::responses::tests::tokenizer;
    use proto::message::{TokenLogprobs, TokenOut};

    #[test]
    fn offsets_count_characters_of_the_text() {
        let tokenizer = tokenizer();
        let text = "A cafe\u{301} \u{1f44d}\u{1f3fd} ok";
        let tokens = tokenizer.encode(text, false);
        let offsets = offsets(&tokenizer, &tokens, text);
        assert_eq!((offsets.len(), offsets[0]), (tokens.len(), 0));
        let mut passed = 0;
        for (token, offset) in tokens.iter().zip(&offsets) {
            let begun = text.char_indices().take_while(|(at, _)| *at <= passed).count() - 1;
            assert_eq!(*offset, begun, "token {token} at byte {passed}");
            passed += tokenizer.token_bytes(*token).len();
        }
        assert_eq!(passed, text.len());
        assert_eq!(text_of(&tokenizer, &tokens), text);
    }

    #[test]
    fn the_best_choices_have_the_highest_logprob_per_token() {
        let choice = |logprobs: &[f32]| {
            let token = |chosen: &f32| TokenOut {
                id: 1,
                text: String::new(),
                logprobs: Some(TokenLogprobs { chosen: *chosen, top: Vec::new() }),
            };
            Delta { tokens: logprobs.iter().map(token).collect(), ..Delta::default() }
        };
        let choices = vec![
            choice(&[-1.0]),
            choice(&[-0.5, -0.5, -0.5]),
            choice(&[-3.0, -0.1]),
            choice(&[-2.0]),
            choice(&[-2.0, -1.0]),
            choice(&[-9.0]),
        ];
        let lengths = |best: Vec<Delta>| best.iter().map(|choice| choice.tokens.len()).collect::<Vec<_>>();
        assert_eq!(lengths(best(choices, 2, 3)), [3, 1, 2, 1]);
    }
}
