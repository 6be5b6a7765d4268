//! JSON as OpenAI's clients expect it, with vLLM's additions.

use super::plan::Kind;
use crate::ops::metrics::finish_name;
use model::Tokenizer;
use proto::message::{FinishedV1, TokenLogprobs, TokenOut};
use serde_json::{Map, Value, json};

/// What all objects of one answer have in common.
#[derive(Debug)]
pub struct Shape {
    /// Which API.
    pub kind: Kind,
    /// The answer's id.
    pub id: String,
    /// Seconds since 1970.
    pub created: u64,
    /// The model's name.
    pub model: String,
    /// Whether choices carry token ids.
    pub token_ids: bool,
    /// Whether choices carry log-probabilities.
    pub logprobs: bool,
}

/// Something new of a choice.
#[derive(Debug, Default)]
pub struct Delta {
    /// Text.
    pub text: String,
    /// The tokens that it came with.
    pub tokens: Vec<TokenOut>,
    /// Characters of the choice before these tokens.
    pub offset: usize,
    /// The end.
    pub finished: Option<FinishedV1>,
}

/// Tokens counted, as clients are told.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Usage {
    /// Of the prompts.
    pub prompt: u64,
    /// Of these, served from the prefix cache.
    pub cached: u64,
    /// Per choice, why the prefix lookup stopped where it did.
    pub lookups: Vec<String>,
    /// Generated.
    pub completion: u64,
}

impl Usage {
    fn json(self) -> Value {
        json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached, "kvasir_lookups": self.lookups},
        })
    }
}

impl Shape {
    /// A chunk of a stream with something new of one choice. `usage`: the stream will end with a usage chunk.
    pub fn chunk(&self, index: u32, delta: &Delta, usage: bool, tokenizer: &Tokenizer) -> Value {
        let mut choice = self.choice(index, delta, tokenizer);
        match self.kind {
            Kind::Completion => choice.insert("text".into(), delta.text.as_str().into()),
            Kind::Chat => {
                let last = delta.finished.is_some() && delta.text.is_empty();
                choice.insert("delta".into(), if last { json!({}) } else { json!({"content": delta.text}) })
            }
        };
        self.envelope(vec![Value::Object(choice)], true, usage.then_some(Value::Null))
    }

    /// The first chunk of a chat's choice, which says who speaks.
    pub fn opening(&self, index: u32, usage: bool) -> Option<Value> {
        (self.kind == Kind::Chat).then(|| {
            let delta = json!({"role": "assistant", "content": ""});
            let choice = json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": null});
            self.envelope(vec![choice], true, usage.then_some(Value::Null))
        })
    }

    /// The chunk that tells the usage.
    pub fn usage_chunk(&self, usage: Usage) -> Value {
        self.envelope(Vec::new(), true, Some(usage.json()))
    }

    /// A whole answer.
    pub fn whole(&self, choices: &[Delta], usage: Usage, tokenizer: &Tokenizer) -> Value {
        let choice = |(index, delta): (u32, &Delta)| {
            let mut choice = self.choice(index, delta, tokenizer);
            match self.kind {
                Kind::Completion => choice.insert("text".into(), delta.text.as_str().into()),
                Kind::Chat => {
                    let message = json!({"role": "assistant", "content": delta.text});
                    choice.insert("message".into(), message)
                }
            };
            Value::Object(choice)
        };
        self.envelope((0u32..).zip(choices).map(choice).collect(), false, Some(usage.json()))
    }

    fn envelope(&self, choices: Vec<Value>, chunk: bool, usage: Option<Value>) -> Value {
        let object = match (self.kind, chunk) {
            (Kind::Completion, _) => "text_completion",
            (Kind::Chat, true) => "chat.completion.chunk",
            (Kind::Chat, false) => "chat.completion",
        };
        let mut all = Map::new();
        all.insert("id".into(), self.id.as_str().into());
        all.insert("object".into(), object.into());
        all.insert("created".into(), self.created.into());
        all.insert("model".into(), self.model.as_str().into());
        all.insert("choices".into(), Value::Array(choices));
        if let Some(usage) = usage {
            all.insert("usage".into(), usage);
        }
        Value::Object(all)
    }

    fn choice(&self, index: u32, delta: &Delta, tokenizer: &Tokenizer) -> Map<String, Value> {
        let mut choice = Map::new();
        choice.insert("index".into(), index.into());
        let logprobs = match (self.logprobs, self.kind) {
            (false, _) => Value::Null,
            (true, Kind::Completion) => completion_logprobs(delta, tokenizer),
            (true, Kind::Chat) => chat_logprobs(delta, tokenizer),
        };
        choice.insert("logprobs".into(), logprobs);
        let finished = delta.finished.as_ref();
        choice.insert("finish_reason".into(), finished.map_or(Value::Null, |f| finish_name(f.reason).into()));
        if let Some(matched) = finished.and_then(|f| f.matched.as_deref()) {
            choice.insert("stop_reason".into(), matched.into());
        }
        if self.token_ids {
            choice.insert("token_ids".into(), delta.tokens.iter().map(|t| t.id).collect());
        }
        choice
    }
}

fn text(tokenizer: &Tokenizer, id: u32) -> String {
    String::from_utf8_lossy(tokenizer.token_bytes(id)).into_owned()
}

/// JSON has no minus infinity; this is what others send in its place.
fn finite(logprob: f32) -> f32 {
    logprob.max(-9999.0)
}

fn completion_logprobs(delta: &Delta, tokenizer: &Tokenizer) -> Value {
    let (mut tokens, mut logprobs, mut top, mut offsets) = (vec![], vec![], vec![], vec![]);
    let mut offset = delta.offset;
    for token in &delta.tokens {
        let Some(TokenLogprobs { chosen, top: best }) = &token.logprobs else { continue };
        let name = text(tokenizer, token.id);
        let mut alternatives = Map::new();
        alternatives.insert(name.clone(), finite(*chosen).into());
        for &(id, logprob) in best {
            alternatives.insert(text(tokenizer, id), finite(logprob).into());
        }
        offsets.push(Value::from(offset));
        offset += name.chars().count();
        tokens.push(Value::from(name));
        logprobs.push(Value::from(finite(*chosen)));
        top.push(Value::Object(alternatives));
    }
    json!({"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets})
}

fn chat_logprobs(delta: &Delta, tokenizer: &Tokenizer) -> Value {
    let entry = |id: u32, logprob: f32| {
        let bytes = tokenizer.token_bytes(id);
        json!({"token": text(tokenizer, id), "logprob": finite(logprob), "bytes": bytes})
    };
    let with_top = |token: &TokenOut| {
        let logprobs = token.logprobs.as_ref()?;
        let mut value = entry(token.id, logprobs.chosen);
        let top: Vec<Value> = logprobs.top.iter().map(|&(id, logprob)| entry(id, logprob)).collect();
        value.as_object_mut()?.insert("top_logprobs".into(), top.into());
        Some(value)
    };
    json!({"content": delta.tokens.iter().filter_map(with_top).collect::<Vec<_>>()})
}
