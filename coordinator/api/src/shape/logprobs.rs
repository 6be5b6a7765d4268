//! Log-probabilities of tokens, in the forms of completions and of chats.

use super::{Delta, PromptDelta};
use proto::message::{PromptLogprob, TokenLogprobs, TokenOut};
use serde::{Serialize, Serializer};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use text::Tokenizer;

/// The form of completions: lists with one entry for each token, those of an echoed prompt first, with at most
/// `echoed_top` alternatives. The first token of a prompt has no log-probability. A token that is not valid UTF-8 is
/// named by its bytes.
pub(super) fn of_completion(delta: &Delta, echoed_top: Option<u8>, tokenizer: &Tokenizer) -> Value {
    let (mut tokens, mut logprobs, mut top, mut offsets) = (vec![], vec![], vec![], vec![]);
    let name = |id: u32| match std::str::from_utf8(tokenizer.token_bytes(id)) {
        Ok(text) => text.to_owned(),
        Err(_) => format!("bytes:{}", escaped(tokenizer.token_bytes(id))),
    };
    let mut add = |id: u32, logprob: Option<(f32, &[(u32, f32)])>, offset: Option<usize>| {
        tokens.push(Value::from(name(id)));
        logprobs.push(Value::from(logprob.map(|(logprob, _)| finite(logprob))));
        top.push(logprob.map_or(Value::Null, |(logprob, best)| {
            let mut alternatives = Map::new();
            alternatives.insert(name(id), finite(logprob).into());
            for &(id, logprob) in best {
                // Of tokens with the same name, the drawn one is kept, or else the most likely one.
                alternatives.entry(name(id)).or_insert_with(|| finite(logprob).into());
            }
            Value::Object(alternatives)
        }));
        offsets.push(Value::from(offset));
    };
    if let (Some(echoed_top), Some(prompt)) = (echoed_top, &delta.prompt) {
        for (at, (id, logprob)) in prompt.scored().enumerate() {
            let logprob = logprob.map(|scored| (scored.logprob, best_of(scored, echoed_top)));
            add(id, logprob, prompt.offsets.get(at).copied());
        }
    }
    for (at, token) in delta.tokens.iter().enumerate() {
        let Some(TokenLogprobs { chosen, top: best }) = &token.logprobs else { continue };
        add(token.id, Some((*chosen, best)), delta.offsets.get(at).copied());
    }
    json!({"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets})
}

impl PromptDelta {
    /// The tokens with their log-probabilities; the first one has none.
    fn scored(&self) -> impl Iterator<Item = (u32, Option<&PromptLogprob>)> {
        let logprobs = std::iter::once(None).chain(self.logprobs.iter().map(Some));
        self.tokens.iter().copied().zip(logprobs)
    }
}

fn best_of(scored: &PromptLogprob, top: u8) -> &[(u32, f32)] {
    scored.top.get(..usize::from(top)).unwrap_or(&scored.top)
}

/// vLLM's form of a prompt: null for the first token, then objects from token ids to log-probability, rank and text.
pub(super) struct OfPrompt<'a> {
    pub(super) prompt: &'a PromptDelta,
    pub(super) top: u8,
    pub(super) tokenizer: &'a Tokenizer,
}

#[derive(Serialize)]
struct Ranked {
    logprob: f32,
    rank: u32,
    decoded_token: String,
}

impl Serialize for OfPrompt<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let ranked = |id: u32, rank: u32, logprob: f32| {
            let decoded_token = String::from_utf8_lossy(self.tokenizer.token_bytes(id)).into_owned();
            (id, Ranked { logprob: finite(logprob), rank, decoded_token })
        };
        serializer.collect_seq(self.prompt.scored().map(|(id, scored)| {
            let scored = scored?;
            let best = (1u32..).zip(best_of(scored, self.top));
            let best = best.map(|(rank, &(id, logprob))| ranked(id, rank, logprob));
            // The token itself has its own rank, also among equals.
            Some(best.chain([ranked(id, scored.rank, scored.logprob)]).collect::<BTreeMap<_, _>>())
        }))
    }
}

impl std::fmt::Debug for OfPrompt<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OfPrompt")
            .field("prompt", self.prompt)
            .field("top", &self.top)
            .finish_non_exhaustive()
    }
}

/// The form of chats: one object for each token, with its bytes.
pub(super) fn of_chat(delta: &Delta, tokenizer: &Tokenizer) -> Value {
    json!({"content": of_tokens(delta, tokenizer), "refusal": null})
}

/// An object for each token: its text, log-probability, bytes and alternatives.
pub(crate) fn of_tokens(delta: &Delta, tokenizer: &Tokenizer) -> Vec<Value> {
    let entry = |id: u32, logprob: f32| {
        let bytes = tokenizer.token_bytes(id);
        let token = match std::str::from_utf8(bytes) {
            Ok(text) => text.to_owned(),
            Err(_) => escaped(bytes),
        };
        json!({"token": token, "logprob": finite(logprob), "bytes": bytes})
    };
    let with_top = |token: &TokenOut| {
        let logprobs = token.logprobs.as_ref()?;
        let mut value = entry(token.id, logprobs.chosen);
        let top: Vec<Value> = logprobs.top.iter().map(|&(id, logprob)| entry(id, logprob)).collect();
        value.as_object_mut()?.insert("top_logprobs".into(), top.into());
        Some(value)
    };
    delta.tokens.iter().filter_map(with_top).collect()
}

/// Bytes that are not valid UTF-8, in OpenAI's notation.
fn escaped(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("\\x{byte:02x}")).collect()
}

/// JSON has no minus infinity; other servers send -9999.
fn finite(logprob: f32) -> f32 {
    logprob.max(-9999.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::responses::tests::tokenizer;

    #[test]
    fn tokens_of_invalid_utf8_are_named_by_their_bytes() {
        let tokenizer = tokenizer();
        let ids: Vec<u32> = (0..tokenizer.vocab_size() as u32)
            .filter(|id| std::str::from_utf8(tokenizer.token_bytes(*id)).is_err())
            .take(3)
            .collect();
        let [one, two, three] = ids[..] else { panic!("{ids:?}") };
        let text = tokenizer.encode("a", false)[0];
        let token = |id, chosen, top| TokenOut {
            id,
            text: String::new(),
            logprobs: Some(TokenLogprobs { chosen, top }),
        };
        let delta = Delta {
            tokens: vec![
                token(one, -2.0, vec![(two, -0.5), (three, -1.0), (one, -2.0)]),
                token(text, f32::NEG_INFINITY, vec![(text, f32::NEG_INFINITY)]),
            ],
            offsets: vec![4, 5],
            ..Delta::default()
        };
        let written = of_completion(&delta, None, &tokenizer);
        let bytes = |id| tokenizer.token_bytes(id).iter().map(|b| format!("\\x{b:02x}")).collect::<String>();
        assert_eq!(written["tokens"][0], format!("bytes:{}", bytes(one)));
        assert_eq!(written["top_logprobs"][0].as_object().unwrap().len(), 3, "{written}");
        assert_eq!(written["top_logprobs"][0][format!("bytes:{}", bytes(two))], -0.5);
        assert_eq!(
            (&written["text_offset"], &written["token_logprobs"][1]),
            (&json!([4, 5]), &json!(-9999.0))
        );
        let written = of_chat(&delta, &tokenizer);
        assert_eq!(written["content"][0]["token"], bytes(one));
        assert_eq!(written["content"][0]["bytes"], json!(tokenizer.token_bytes(one)));
        assert_eq!(written["content"][0]["top_logprobs"].as_array().unwrap().len(), 3);
        assert!(written.as_object().unwrap().contains_key("refusal"));
    }
}
