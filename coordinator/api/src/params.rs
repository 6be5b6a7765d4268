//! Sampling and stopping: the fields that completions and chats share.

use super::error::ApiError;
use super::fields::{Fields, plain};
use super::limits::{MAX_CACHE_SALT, MAX_LOGIT_BIAS, MAX_N, MAX_STOP, MAX_STOP_BYTES, MAX_STOP_TOKENS};
use proto::message::{Sampling, Stop, TokenIds};
use router::admission::MAX_PRIORITY;
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, SeqAccess, Visitor};
use std::fmt;
use std::marker::PhantomData;
use text::sampling::SamplingDefaults;

/// The parameters of a request besides prompt and length.
#[derive(Debug, Clone, PartialEq)]
pub struct Params {
    pub n: u32,
    /// Whether to answer with server-sent events.
    pub stream: bool,
    /// Whether the stream ends with a usage chunk.
    pub include_usage: bool,
    /// Sampling; `seed` is that of the first choice.
    pub sampling: Sampling,
    /// Priority among the tenant's requests. Lower goes first.
    pub priority: i32,
    /// Stop conditions; `max_tokens` is 0 here.
    pub stop: Stop,
    /// Whether a matched stop string is part of the answer.
    pub include_stop: bool,
    /// Whether choices have their token ids.
    pub return_token_ids: bool,
    /// Whether BOS precedes a text prompt, if the model uses BOS. `None`: not given.
    pub add_special_tokens: Option<bool>,
    /// Only the tenant's requests with the same salt share cached prefixes.
    pub cache_salt: Option<String>,
}

/// The limit of an answer's length.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct MaxTokens {
    /// The name of the field in this API.
    pub(super) field: &'static str,
    pub(super) tokens: Option<u32>,
    /// Whether the client set the limit. An explicit limit that does not fit is refused; a default one is
    /// reduced.
    pub(super) explicit: bool,
}

impl MaxTokens {
    pub(super) fn fit(&self, tokens: TokenIds, limit: u32) -> Result<(TokenIds, u32), ApiError> {
        if tokens.is_empty() {
            return Err(ApiError::field("prompt", "has no tokens"));
        }
        let (prompt, limit) = (tokens.len() as u64, u64::from(limit));
        let requested = if self.explicit { self.tokens.map(u64::from) } else { None };
        let need = prompt + requested.unwrap_or(1).max(1);
        if need > limit {
            return Err(ApiError::ContextLength { prompt, need, limit });
        }
        if self.tokens == Some(0) {
            return Err(ApiError::field(self.field, "must be at least 1"));
        }
        let available = u32::try_from(limit - prompt).unwrap_or(u32::MAX);
        Ok((tokens, self.tokens.unwrap_or(available).min(available)))
    }
}

#[derive(Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
}

impl Params {
    /// Parses and checks the parameters. `vocab`: size of the vocabulary; `seed` and `defaults`: used where
    /// the request has no value; `stop`: name of the field with the stop strings.
    pub fn read(
        fields: &Fields<'_>,
        vocab: usize,
        seed: u64,
        defaults: &SamplingDefaults,
        stop: &'static str,
    ) -> Result<Self, ApiError> {
        let stream = fields.get("stream")?.unwrap_or(false);
        let options: Option<StreamOptions> = fields.get("stream_options")?;
        if options.is_some() && !stream {
            return Err(ApiError::field("stream_options", "only with stream"));
        }
        let min_tokens = fields.get("min_tokens")?.unwrap_or(0);
        let sampling = Sampling {
            temperature: fields.ranged("temperature", 0.0..=100.0)?.unwrap_or(defaults.temperature),
            top_p: fields.ranged("top_p", 0.0..=1.0)?.map_or(defaults.top_p, positive_top_p),
            top_k: match fields.ranged("top_k", -1..=i64::from(u32::MAX))? {
                Some(k) => u32::try_from(k).unwrap_or(0),
                None => defaults.top_k,
            },
            min_p: fields.ranged("min_p", 0.0..=1.0)?.unwrap_or(defaults.min_p),
            repetition_penalty: match above_zero(fields, "repetition_penalty", 100.0)? {
                None => above_zero(fields, "repeat_penalty", 100.0)?,
                value => value,
            }
            .unwrap_or(defaults.repetition_penalty),
            presence_penalty: fields.ranged("presence_penalty", -2.0..=2.0)?.unwrap_or(0.0),
            frequency_penalty: fields.ranged("frequency_penalty", -2.0..=2.0)?.unwrap_or(0.0),
            logit_bias: logit_bias(fields, vocab)?,
            // Any 64 bits are a seed. A negative seed is used by its bit pattern.
            seed: match fields.ranged("seed", i128::from(i64::MIN)..=i128::from(u64::MAX))? {
                Some(seed) => (seed & i128::from(u64::MAX)) as u64,
                None => seed,
            },
            seeded: fields.raw("seed").is_some(),
            logprobs: None,
        };
        let stop = Stop {
            max_tokens: 0,
            min_tokens,
            strings: stop_strings(fields, stop)?,
            token_ids: stop_tokens(fields, vocab)?,
            ignore_eos: fields.get("ignore_eos")?.unwrap_or(false),
        };
        Ok(Self {
            n: fields.ranged("n", 1..=MAX_N)?.unwrap_or(1),
            stream,
            include_usage: options.and_then(|o| o.include_usage).unwrap_or(false),
            sampling,
            priority: fields.ranged("priority", -MAX_PRIORITY..=MAX_PRIORITY)?.unwrap_or(0),
            stop,
            include_stop: fields.get("include_stop_str_in_output")?.unwrap_or(false),
            return_token_ids: fields.get("return_token_ids")?.unwrap_or(false),
            add_special_tokens: fields.get("add_special_tokens")?,
            cache_salt: cache_salt(fields)?,
        })
    }
}

fn cache_salt(fields: &Fields<'_>) -> Result<Option<String>, ApiError> {
    let salt: Option<String> = fields.get("cache_salt")?;
    if salt.as_ref().is_some_and(|salt| salt.is_empty() || salt.len() > MAX_CACHE_SALT) {
        return Err(ApiError::field("cache_salt", format!("must have 1 to {MAX_CACHE_SALT} bytes")));
    }
    Ok(salt)
}

/// A `top_p` of 0 selects the most likely token. Workers require a value above 0.
fn positive_top_p(top_p: f32) -> f32 {
    top_p.max(f32::MIN_POSITIVE)
}

fn above_zero(fields: &Fields<'_>, name: &'static str, max: f32) -> Result<Option<f32>, ApiError> {
    match fields.ranged(name, 0.0..=max)? {
        Some(0.0) => Err(ApiError::field(name, "must be above 0")),
        value => Ok(value),
    }
}

fn stop_strings(fields: &Fields<'_>, name: &'static str) -> Result<Vec<String>, ApiError> {
    let strings = match fields.raw(name) {
        None => Vec::new(),
        Some(raw) if raw.starts_with('"') => fields.get(name)?.into_iter().collect(),
        Some(_) => fields.get::<Bounded<String, { MAX_STOP }>>(name)?.map_or_else(Vec::new, |list| list.0),
    };
    for (at, text) in strings.iter().enumerate() {
        if text.is_empty() || text.len() > MAX_STOP_BYTES {
            let reason = format!("must have 1 to {MAX_STOP_BYTES} bytes");
            return Err(ApiError::field(format!("{name}[{at}]"), reason));
        }
    }
    Ok(strings)
}

fn stop_tokens(fields: &Fields<'_>, vocab: usize) -> Result<Vec<u32>, ApiError> {
    let tokens: Option<Bounded<u32, { MAX_STOP_TOKENS }>> = fields.get("stop_token_ids")?;
    let tokens = tokens.map_or_else(Vec::new, |list| list.0);
    check_tokens("stop_token_ids", &tokens, vocab)?;
    Ok(tokens)
}

/// Refuses token ids outside the vocabulary.
pub fn check_tokens(field: &str, tokens: &[u32], vocab: usize) -> Result<(), ApiError> {
    match tokens.iter().position(|&id| id as usize >= vocab) {
        None => Ok(()),
        Some(at) => {
            let reason =
                format!("{} is not a token; the model has {vocab}", tokens.get(at).copied().unwrap_or(0));
            Err(ApiError::field(format!("{field}[{at}]"), reason))
        }
    }
}

fn logit_bias(fields: &Fields<'_>, vocab: usize) -> Result<Vec<(u32, f32)>, ApiError> {
    const NAME: &str = "logit_bias";
    let Some(raw) = fields.raw(NAME) else { return Ok(Vec::new()) };
    let mut json = serde_json::Deserializer::from_str(raw);
    let pairs = json.deserialize_map(Biases).map_err(|e| ApiError::field(NAME, plain(&e)))?;
    for &(token, bias) in &pairs {
        if token as usize >= vocab {
            return Err(ApiError::field(NAME, format!("{token} is not a token; the model has {vocab}")));
        }
        if !(-100.0..=100.0).contains(&bias) {
            return Err(ApiError::field(NAME, format!("{bias} is not from -100 to 100")));
        }
    }
    Ok(pairs)
}

struct Biases;

impl<'de> Visitor<'de> for Biases {
    type Value = Vec<(u32, f32)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an object of at most {MAX_LOGIT_BIAS} token ids and numbers")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Self::Value, M::Error> {
        let mut pairs = Vec::new();
        while let Some(pair) = map.next_entry::<u32, f32>()? {
            if pairs.len() == MAX_LOGIT_BIAS {
                return Err(serde::de::Error::invalid_length(MAX_LOGIT_BIAS + 1, &self));
            }
            pairs.push(pair);
        }
        Ok(pairs)
    }
}

/// A list that is refused as soon as it has more than `MAX` entries.
#[derive(Debug)]
pub struct Bounded<T, const MAX: usize>(pub Vec<T>);

impl<'de, T: Deserialize<'de>, const MAX: usize> Deserialize<'de> for Bounded<T, MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct List<T, const MAX: usize>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de> for List<T, MAX> {
            type Value = Vec<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a list of at most {MAX}")
            }

            fn visit_seq<S: SeqAccess<'de>>(self, mut seq: S) -> Result<Vec<T>, S::Error> {
                let mut items = Vec::new();
                while let Some(item) = seq.next_element()? {
                    if items.len() == MAX {
                        return Err(serde::de::Error::invalid_length(MAX + 1, &self));
                    }
                    items.push(item);
                }
                Ok(items)
            }
        }
        deserializer.deserialize_seq(List::<T, MAX>(PhantomData)).map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kind::Kind;
    use serde_json::{Value, json};

    fn read(body: &Value) -> Result<Params, ApiError> {
        let body = body.to_string();
        let fields = Fields::parse(body.as_bytes(), Kind::Completion.known_fields()).unwrap();
        Params::read(&fields, 1000, 77, &SamplingDefaults::PLAIN, "stop")
    }

    #[test]
    fn without_parameters_the_defaults_and_a_seed_are_used() {
        let params = read(&json!({})).unwrap();
        assert_eq!(params.sampling, Sampling { temperature: 1.0, seed: 77, ..Sampling::default() });
        assert_eq!((params.n, params.stream, params.stop), (1, false, Stop::default()));
    }

    #[test]
    fn all_given_parameters_are_used() {
        let params = read(&json!({
            "n": 8, "stream": true, "stream_options": {"include_usage": true}, "temperature": 0, "top_p": 0.5,
            "top_k": -1, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": -2,
            "frequency_penalty": 2, "logit_bias": {"999": -100, "0": 1.5}, "seed": -1, "stop": "x",
            "stop_token_ids": [1, 2], "priority": -5, "ignore_eos": true, "min_tokens": 3, "return_token_ids": true,
            "add_special_tokens": false,
        }))
        .unwrap();
        let expected = Sampling {
            temperature: 0.0,
            top_k: 0,
            top_p: 0.5,
            min_p: 0.1,
            repetition_penalty: 1.1,
            presence_penalty: -2.0,
            frequency_penalty: 2.0,
            logit_bias: vec![(999, -100.0), (0, 1.5)],
            seed: u64::MAX,
            seeded: true,
            logprobs: None,
        };
        assert_eq!(params.sampling, expected);
        assert!(params.stream && params.include_usage && params.return_token_ids);
        assert_eq!((params.n, params.add_special_tokens), (8, Some(false)));
        assert_eq!(params.stop.strings, ["x"]);
        assert_eq!(params.stop.token_ids, [1, 2]);
    }

    #[test]
    fn whole_numbers_may_be_floats_and_top_p_may_be_zero() {
        let params =
            read(&json!({"n": 128.0, "seed": 7.0, "top_k": 3e0, "min_tokens": 2.0, "top_p": 0})).unwrap();
        assert_eq!((params.n, params.sampling.seed, params.sampling.top_k), (128, 7, 3));
        assert_eq!((params.stop.min_tokens, params.sampling.top_p), (2, f32::MIN_POSITIVE));
    }

    #[test]
    fn the_error_names_the_field() {
        for (body, field) in [
            (json!({"n": 0}), "n"),
            (json!({"n": 1.5}), "n"),
            (json!({"stream": "yes"}), "stream"),
            (json!({"stream_options": {}}), "stream_options"),
            (json!({"temperature": -0.1}), "temperature"),
            (json!({"temperature": "hot"}), "temperature"),
            (json!({"temperature": 1e39}), "temperature"),
            (json!({"top_p": -0.1}), "top_p"),
            (json!({"top_p": 1.01}), "top_p"),
            (json!({"top_k": -2}), "top_k"),
            (json!({"min_p": 2}), "min_p"),
            (json!({"repetition_penalty": 0}), "repetition_penalty"),
            (json!({"presence_penalty": 2.1}), "presence_penalty"),
            (json!({"frequency_penalty": -2.1}), "frequency_penalty"),
            (json!({"seed": 18446744073709551616.0}), "seed"),
            (json!({"seed": "a"}), "seed"),
            (json!({"priority": 101}), "priority"),
            (json!({"priority": 0.5}), "priority"),
            (json!({"stop": ["ok", ""]}), "stop[1]"),
            (json!({"stop": "x".repeat(MAX_STOP_BYTES + 1)}), "stop[0]"),
            (json!({"stop": 7}), "stop"),
            (json!({"stop_token_ids": [1, 1000]}), "stop_token_ids[1]"),
            (json!({"stop_token_ids": [-1]}), "stop_token_ids"),
            (json!({"logit_bias": {"1000": 1}}), "logit_bias"),
            (json!({"logit_bias": {"1": 101}}), "logit_bias"),
            (json!({"logit_bias": {"x": 1}}), "logit_bias"),
            (json!({"logit_bias": [1]}), "logit_bias"),
            (json!({"min_tokens": -1}), "min_tokens"),
            (json!({"ignore_eos": 1}), "ignore_eos"),
        ] {
            match read(&body) {
                Err(ApiError::InvalidField { field: named, .. }) => assert_eq!(named, field, "{body}"),
                other => panic!("{body}: {other:?}"),
            }
        }
    }
}
