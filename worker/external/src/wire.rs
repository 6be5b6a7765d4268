//! What the clients of all engines do with bodies and events.

use crate::error::EngineError;
use crate::request::{EngineToken, EngineUsage};
use proto::message::{MAX_LOGPROBS, TokenLogprobs};
use serde::de::DeserializeOwned;
use serde_json::Value;

/// Parses the `data` of an event.
pub(crate) fn parse_event<T: DeserializeOwned>(data: &[u8]) -> Result<T, EngineError> {
    serde_json::from_slice(data).map_err(|error| {
        let start = String::from_utf8_lossy(data.get(..80).unwrap_or(data)).into_owned();
        EngineError::invalid(format!("event {start:?}: {error}"))
    })
}

/// The error inside a stream: `{"error": {"message", "code"}}`, or `{"error": "..."}`.
pub(crate) fn error_of(value: &Value) -> EngineError {
    let message = value.get("message").or(Some(value)).and_then(Value::as_str).unwrap_or("no message");
    let status = value.get("code").and_then(Value::as_u64).and_then(|code| u16::try_from(code).ok());
    EngineError::of_status(status.unwrap_or(500), message)
}

/// Tokens with their log-probabilities, at most `top` alternatives each, best first.
pub(crate) fn with_logprobs(
    ids: &[u32],
    logprobs: Option<Vec<TokenLogprobs>>,
) -> Result<Vec<EngineToken>, EngineError> {
    match logprobs {
        None => Ok(ids.iter().map(|&id| EngineToken { id, logprobs: None }).collect()),
        Some(logprobs) if logprobs.len() == ids.len() => Ok(ids
            .iter()
            .zip(logprobs)
            .map(|(&id, logprobs)| EngineToken { id, logprobs: Some(logprobs) })
            .collect()),
        Some(logprobs) => Err(EngineError::invalid(format!(
            "log-probabilities of {} tokens beside {} token ids",
            logprobs.len(),
            ids.len()
        ))),
    }
}

/// The best `top` alternatives, best first; equal ones by token.
pub(crate) fn best(mut alternatives: Vec<(u32, f32)>, top: u8) -> Vec<(u32, f32)> {
    alternatives.retain(|(_, logprob)| !logprob.is_nan());
    alternatives.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    alternatives.truncate(usize::from(top).min(MAX_LOGPROBS));
    alternatives
}

/// Checks the engine's counts against what was sent and received. A difference means that the engine changed
/// the prompt, or that tokens were lost.
pub(crate) fn check_usage(
    usage: EngineUsage,
    prompt: u32,
    received: u32,
) -> Result<EngineUsage, EngineError> {
    let EngineUsage { prompt_tokens, completion_tokens, cached_tokens, .. } = usage;
    if prompt_tokens != prompt {
        return Err(EngineError::invalid(format!("{prompt_tokens} prompt tokens, {prompt} were sent")));
    }
    if completion_tokens != received {
        let reason = format!("{completion_tokens} completion tokens, {received} were received");
        return Err(EngineError::invalid(reason));
    }
    if let Some(cached) = cached_tokens
        && cached > prompt
    {
        return Err(EngineError::invalid(format!("{cached} cached tokens of a prompt of {prompt}")));
    }
    Ok(usage)
}

/// The number of tokens, which [`TokenIds`](proto::message::TokenIds) limits.
pub(crate) fn count(tokens: &[u32]) -> u32 {
    u32::try_from(tokens.len()).unwrap_or(u32::MAX)
}

/// The schema of a grammar as JSON.
pub(crate) fn parse_schema(field: &str, text: &str) -> Result<Value, EngineError> {
    serde_json::from_str(text).map_err(|error| EngineError::of_status(400, &format!("{field}: {error}")))
}
