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
    /// Whether the stream has events of its progress before the first token.
    pub include_progress: bool,
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
    /// Whether a long prompt loses its beginning, and how much stays.
    pub truncate: Option<Truncate>,
}

/// The part that stays of a prompt: its last tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Truncate {
    /// At most this many tokens.
    To(u32),
    /// As many as fit beside the answer.
    ToFit,
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
    /// The prompt and the length of its answer, within the context of `limit` tokens.
    pub(super) fn fit(
        &self,
        tokens: TokenIds,
        limit: u32,
        truncate: Option<Truncate>,
        allows_no_tokens: bool,
    ) -> Result<(TokenIds, u32), ApiError> {
        if tokens.is_empty() {
            return Err(ApiError::field("prompt", "has no tokens"));
        }
        let kept = truncate.map(|truncate| match truncate {
            Truncate::To(count) => count as usize,
            Truncate::ToFit => {
                let answer = self.tokens.filter(|_| self.explicit).unwrap_or(1).max(1);
                limit.saturating_sub(answer).max(1) as usize
            }
        });
        let tokens = match kept.filter(|kept| *kept < tokens.len()) {
            Some(kept) => tokens.get(tokens.len() - kept..).unwrap_or_default().into(),
            None => tokens,
        };
        let (prompt, limit) = (tokens.len() as u64, u64::from(limit));
        let requested = if self.explicit { self.tokens.map(u64::from) } else { None };
        let need = prompt + requested.unwrap_or(1).max(1);
        if need > limit {
            return Err(ApiError::ContextLength { prompt, need, limit });
        }
        if self.tokens == Some(0) && !allows_no_tokens {
            return Err(ApiError::field(self.field, "must be at least 1, or 0 with echo or prompt_logprobs"));
        }
        let available = u32::try_from(limit - prompt).unwrap_or(u32::MAX);
        Ok((tokens, self.tokens.unwrap_or(available).min(available)))
    }
}

#[derive(Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
    include_progress: Option<bool>,
}

impl Params {
    /// Parses and checks the parameters. `seed` and `defaults`: used where the request has no value; `stop`:
    /// name of the field with the stop strings.
    pub fn read(
        fields: &Fields<'_>,
        vocabulary: &Vocabulary<'_>,
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
            logit_bias: logit_bias(fields, vocabulary)?,
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
            token_ids: stop_tokens(fields, vocabulary.size)?,
            ignore_eos: fields.get("ignore_eos")?.unwrap_or(false),
        };
        Ok(Self {
            n: fields.ranged("n", 1..=MAX_N)?.unwrap_or(1),
            stream,
            include_usage: options.as_ref().and_then(|o| o.include_usage).unwrap_or(false),
            include_progress: options.and_then(|o| o.include_progress).unwrap_or(false),
            sampling,
            priority: fields.ranged("priority", -MAX_PRIORITY..=MAX_PRIORITY)?.unwrap_or(0),
            stop,
            include_stop: fields.get("include_stop_str_in_output")?.unwrap_or(false),
            return_token_ids: fields.get("return_token_ids")?.unwrap_or(false),
            add_special_tokens: fields.get("add_special_tokens")?,
            cache_salt: cache_salt(fields)?,
            truncate: truncate(fields)?,
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

/// Reads vLLM's `truncate_prompt_tokens` and TGI's `truncate`.
fn truncate(fields: &Fields<'_>) -> Result<Option<Truncate>, ApiError> {
    for name in ["truncate_prompt_tokens", "truncate"] {
        match fields.ranged(name, -1..=i64::from(u32::MAX))? {
            None => {}
            Some(0) => return Err(ApiError::field(name, "must be -1 or at least 1")),
            Some(count) => return Ok(Some(u32::try_from(count).map_or(Truncate::ToFit, Truncate::To))),
        }
    }
    Ok(None)
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

/// The tokens that a request may name.
pub struct Vocabulary<'a> {
    pub size: usize,
    /// The tokens of a text.
    pub encode: &'a dyn Fn(&str) -> Vec<u32>,
}

/// Reads `logit_bias`: an object from token ids to numbers, or llama-server's list of pairs. A text in place of a
/// token id means each of its tokens, and `false` in place of a number means -100.
fn logit_bias(fields: &Fields<'_>, vocabulary: &Vocabulary<'_>) -> Result<Vec<(u32, f32)>, ApiError> {
    const NAME: &str = "logit_bias";
    let wrong = |reason: String| ApiError::field(NAME, reason);
    let Some(raw) = fields.raw(NAME) else { return Ok(Vec::new()) };
    let given: Vec<(Biased, Bias)> = match raw.starts_with('[') {
        true => fields.get::<Bounded<_, { MAX_LOGIT_BIAS }>>(NAME)?.map_or_else(Vec::new, |list| list.0),
        false => {
            serde_json::Deserializer::from_str(raw).deserialize_map(Biases).map_err(|e| wrong(plain(&e)))?
        }
    };
    let mut pairs = Vec::new();
    for (biased, bias) in given {
        let bias = match bias {
            Bias::Number(bias) if (-100.0..=100.0).contains(&bias) => bias,
            Bias::Number(bias) => return Err(wrong(format!("{bias} is not from -100 to 100"))),
            Bias::Never(false) => -100.0,
            Bias::Never(true) => return Err(wrong("true is not a number or false".to_owned())),
        };
        match biased {
            Biased::Token(token) if (token as usize) < vocabulary.size => pairs.push((token, bias)),
            Biased::Token(token) => {
                return Err(wrong(format!("{token} is not a token; the model has {}", vocabulary.size)));
            }
            Biased::Text(text) if text.is_empty() || text.len() > MAX_STOP_BYTES => {
                return Err(wrong(format!("a text must have 1 to {MAX_STOP_BYTES} bytes")));
            }
            Biased::Text(text) => {
                pairs.extend((vocabulary.encode)(&text).into_iter().map(|token| (token, bias)))
            }
        }
    }
    match pairs.len() <= MAX_LOGIT_BIAS {
        true => Ok(pairs),
        false => Err(wrong(format!("names {} tokens, at most {MAX_LOGIT_BIAS}", pairs.len()))),
    }
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "must be a token id or a text")]
enum Biased {
    Token(u32),
    Text(String),
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "must be a number or false")]
enum Bias {
    Number(f32),
    Never(bool),
}

struct Biases;

impl<'de> Visitor<'de> for Biases {
    type Value = Vec<(Biased, Bias)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an object of at most {MAX_LOGIT_BIAS} tokens and numbers, or a list of pairs")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Self::Value, M::Error> {
        let mut pairs = Vec::new();
        while let Some((name, bias)) = map.next_entry::<String, Bias>()? {
            if pairs.len() == MAX_LOGIT_BIAS {
                return Err(serde::de::Error::invalid_length(MAX_LOGIT_BIAS + 1, &self));
            }
            pairs.push((name.parse().map_or(Biased::Text(name), Biased::Token), bias));
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
        let encode = |text: &str| text.bytes().map(u32::from).collect();
        let vocabulary = Vocabulary { size: 1000, encode: &encode };
        Params::read(&fields, &vocabulary, 77, &SamplingDefaults::PLAIN, "stop")
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
    fn biases_may_name_texts_and_come_as_pairs() {
        let bias = |given: Value| read(&json!({"logit_bias": given})).unwrap().sampling.logit_bias;
        assert_eq!(bias(json!({"7": 1, "ab": -2.5})), [(7, 1.0), (97, -2.5), (98, -2.5)]);
        let pairs = json!([[7, 1], ["ab", -2.5], [8, false], ["7", 2]]);
        assert_eq!(bias(pairs), [(7, 1.0), (97, -2.5), (98, -2.5), (8, -100.0), (55, 2.0)]);
        assert_eq!(bias(json!([])), []);
    }

    #[test]
    fn a_truncated_prompt_keeps_its_last_tokens() {
        let truncate = |body: Value| read(&body).unwrap().truncate;
        assert_eq!(truncate(json!({"truncate": 3})), Some(Truncate::To(3)));
        assert_eq!(truncate(json!({"truncate_prompt_tokens": -1, "truncate": 3})), Some(Truncate::ToFit));
        let fit = |truncate, tokens| {
            let answer = MaxTokens { field: "max_tokens", tokens, explicit: tokens.is_some() };
            let (prompt, answer) = answer.fit((0..12).collect::<Vec<_>>().into(), 10, truncate, false)?;
            Ok::<_, ApiError>((prompt.to_vec(), answer))
        };
        assert_eq!(fit(Some(Truncate::To(3)), Some(4)).unwrap(), (vec![9, 10, 11], 4));
        assert_eq!(fit(Some(Truncate::ToFit), Some(7)).unwrap(), (vec![9, 10, 11], 7));
        assert_eq!(fit(Some(Truncate::ToFit), None).unwrap(), ((3..12).collect(), 1));
        for refused in
            [fit(None, Some(4)), fit(Some(Truncate::To(11)), None), fit(Some(Truncate::To(7)), Some(4))]
        {
            assert!(matches!(refused, Err(ApiError::ContextLength { .. })), "{refused:?}");
        }
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
            (json!({"logit_bias": {"": 1}}), "logit_bias"),
            (json!({"logit_bias": {"1": true}}), "logit_bias"),
            (json!({"logit_bias": {"x".repeat(MAX_LOGIT_BIAS): 1, "y": 1}}), "logit_bias"),
            (json!({"logit_bias": [1]}), "logit_bias"),
            (json!({"logit_bias": [[1, 2, 3]]}), "logit_bias"),
            (json!({"logit_bias": [[1.5, 2]]}), "logit_bias"),
            (json!({"logit_bias": [[1000, 2]]}), "logit_bias"),
            (json!({"logit_bias": 7}), "logit_bias"),
            (json!({"truncate_prompt_tokens": 0}), "truncate_prompt_tokens"),
            (json!({"truncate": -2}), "truncate"),
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
