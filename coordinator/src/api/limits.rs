//! What a request may cost before anybody has looked at it. Every limit has a row in the table test.

use super::error::ApiError;
use axum::body::Body;
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use std::time::Duration;

/// Longest body, in bytes.
pub const MAX_BODY: usize = 8 << 20;
/// Longest request head (request line and headers), in bytes.
pub const MAX_HEAD: usize = 16 << 10;
/// The head must have arrived after this.
pub const HEAD_TIMEOUT: Duration = Duration::from_secs(5);
/// A body must go on within this.
pub const BODY_IDLE: Duration = Duration::from_secs(10);
/// A client that takes nothing of a response for this long is cut off.
pub const WRITE_STALL: Duration = Duration::from_secs(30);
/// Messages of a chat.
pub const MAX_MESSAGES: usize = 4096;
/// Tools of a chat.
pub const MAX_TOOLS: usize = 128;
/// Choices for each prompt.
pub const MAX_N: u32 = 8;
/// Prompts in one request, times choices.
pub const MAX_CHOICES: usize = 128;
/// Stop strings.
pub const MAX_STOP: usize = 16;
/// Bytes of one stop string.
pub const MAX_STOP_BYTES: usize = 1024;
/// Stop tokens.
pub const MAX_STOP_TOKENS: usize = 1024;
/// Entries of `logit_bias`.
pub const MAX_LOGIT_BIAS: usize = 1024;
/// Alternatives with log-probabilities.
pub const MAX_LOGPROBS: u8 = 20;

/// Reads a whole body, within [`MAX_BODY`] and [`BODY_IDLE`].
pub async fn read(mut body: Body) -> Result<Bytes, ApiError> {
    let mut whole = BytesMut::new();
    loop {
        let frame = tokio::time::timeout(BODY_IDLE, body.frame()).await.map_err(|_| ApiError::BodyTimeout)?;
        let Some(frame) = frame else { return Ok(whole.freeze()) };
        let frame = frame.map_err(|_| ApiError::field("body", "cut off or malformed"))?;
        let Ok(data) = frame.into_data() else { continue };
        if whole.len() + data.len() > MAX_BODY {
            return Err(ApiError::BodyTooLarge { limit: MAX_BODY });
        }
        whole.extend_from_slice(&data);
    }
}

/// The length that the client announces is too much already.
pub fn check_announced(length: Option<u64>) -> Result<(), ApiError> {
    match length {
        Some(length) if length > MAX_BODY as u64 => Err(ApiError::BodyTooLarge { limit: MAX_BODY }),
        _ => Ok(()),
    }
}
