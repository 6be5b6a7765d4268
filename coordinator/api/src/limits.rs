//! Limits of a request before it is parsed. Every limit has a row in the table test.

use super::error::ApiError;
use axum::body::Body;
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::Body as HttpBody;
use proto::message;
use std::time::Duration;
use tokio::time::{Instant, timeout_at};

/// Longest body, in bytes.
pub const MAX_BODY: usize = 8 << 20;
/// Longest body of a chat where a model sees images, in bytes: text, and images in base64.
pub const MAX_IMAGE_BODY: usize = MAX_BODY + (32 << 20);
/// Most images of a request.
pub const MAX_IMAGES: usize = message::MAX_PROMPT_IMAGES;
/// Bytes of all images of a request, so that they fit the frame to a worker together with the longest prompt.
pub const MAX_IMAGE_BYTES: usize = 23 << 20;
/// Bytes of the images of all requests that have no whole answer yet.
pub const MAX_HELD_IMAGE_BYTES: usize = 1 << 30;
/// Longest recording in a form, in bytes: OpenAI's limit.
pub const MAX_UPLOAD: usize = 25 << 20;
/// Longest form with a recording, in bytes.
pub const MAX_FORM: usize = MAX_UPLOAD + (64 << 10);
pub const MAX_FORM_FIELDS: usize = 32;
/// Longest field of a form other than the recording, in bytes.
pub const MAX_FORM_TEXT: usize = 16 << 10;
/// Longest request head (request line and headers), in bytes.
pub const MAX_HEAD: usize = 16 << 10;
pub const MAX_HEADERS: usize = 100;
/// Time from the first byte of a head to its last.
pub const HEAD_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest pause within a body.
pub const BODY_IDLE: Duration = Duration::from_secs(10);
/// Time for the whole body.
pub const BODY_TOTAL: Duration = Duration::from_secs(60);
/// A connection is closed if the client reads nothing of a response for this long.
pub const WRITE_STALL: Duration = Duration::from_secs(30);
pub const MAX_MESSAGES: usize = 4096;
pub const MAX_TOOLS: usize = 128;
/// Longest name of a tool, in bytes.
pub const MAX_TOOL_NAME: usize = 64;
/// Longest JSON schema, regular expression or grammar, in bytes. The schemas of all tools together may be
/// twice as long.
pub const MAX_SCHEMA_BYTES: usize = 64 << 10;
/// Deepest nesting of a JSON schema.
pub const MAX_SCHEMA_DEPTH: usize = 32;
pub const MAX_N: u32 = 128;
/// Most prompts in one request, times choices.
pub const MAX_CHOICES: usize = 128;
/// Most texts to embed, or documents to rank, in one request.
pub const MAX_TEXTS: usize = 2048;
pub const MAX_STOP: usize = message::MAX_STOP_STRINGS;
/// Longest stop string, in bytes.
pub const MAX_STOP_BYTES: usize = 1024;
/// Longest `cache_salt`, in bytes.
pub const MAX_CACHE_SALT: usize = 256;
/// Most stop tokens.
pub const MAX_STOP_TOKENS: usize = 1024;
/// Most entries of `logit_bias`.
pub const MAX_LOGIT_BIAS: usize = message::MAX_LOGIT_BIAS;
/// Most log-probabilities of the prompts of a request: tokens, times each token and its alternatives, times choices.
pub const MAX_PROMPT_LOGPROBS: usize = message::MAX_PROMPT_LOGPROBS;
pub const MAX_LOGPROBS: u8 = message::MAX_LOGPROBS as u8;

/// Longest text message on a WebSocket, in bytes. A message of audio has at most
/// [`MAX_FRAME_SAMPLES`](proto::operation::MAX_FRAME_SAMPLES) samples.
pub const MAX_CONTROL_BYTES: usize = 16 << 10;
/// Most references of a session of the operation `speaker`.
pub const MAX_REFERENCES: usize = 16;
/// Longest name of a reference, in bytes.
pub const MAX_REFERENCE_NAME: usize = 64;
/// Most messages on a WebSocket in a second. One message each 20 ms is 50.
pub const MESSAGES_PER_SECOND: f64 = 250.0;
/// Most messages in a burst.
pub const MESSAGE_BURST: f64 = 500.0;

/// Most bytes that are allocated for a body before it arrives.
const ROOM_AHEAD: u64 = 64 << 10;

/// Reads a whole body, within [`MAX_BODY`], [`BODY_IDLE`] and [`BODY_TOTAL`].
pub async fn read(body: Body) -> Result<Bytes, ApiError> {
    read_within(body, MAX_BODY).await
}

/// Like [`read`], with at most `max_bytes` bytes.
pub async fn read_within(mut body: Body, max_bytes: usize) -> Result<Bytes, ApiError> {
    // `content-length`, if there is one.
    let announced = HttpBody::size_hint(&body).lower();
    if announced > max_bytes as u64 {
        return Err(ApiError::BodyTooLarge { limit: max_bytes });
    }
    let capacity = usize::try_from(announced.min(ROOM_AHEAD)).unwrap_or_default();
    let mut whole = BytesMut::new();
    let end = Instant::now() + BODY_TOTAL;
    loop {
        let limit = end.min(Instant::now() + BODY_IDLE);
        let frame = timeout_at(limit, body.frame()).await.map_err(|_| ApiError::BodyTimeout)?;
        let Some(frame) = frame else { return Ok(whole.freeze()) };
        let frame = frame.map_err(|_| ApiError::field("body", "cut off or malformed"))?;
        let Ok(data) = frame.into_data() else { continue };
        if whole.len() + data.len() > max_bytes {
            return Err(ApiError::BodyTooLarge { limit: max_bytes });
        }
        if whole.is_empty() && HttpBody::is_end_stream(&body) {
            // The whole body is one frame: returned without a copy.
            return Ok(data);
        }
        if whole.is_empty() {
            whole.reserve(capacity.max(data.len()));
        }
        whole.extend_from_slice(&data);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::stream::{self, StreamExt};
    use std::convert::Infallible;

    /// A body that arrives byte by byte, one each `every`.
    fn trickle(every: Duration) -> Body {
        let byte = move |_| async move {
            tokio::time::sleep(every).await;
            Ok::<_, Infallible>(Bytes::from_static(b"x"))
        };
        Body::from_stream(stream::iter(0..1_000).then(byte))
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_must_go_on_and_must_end() {
        let start = Instant::now();
        assert_eq!(read(trickle(BODY_IDLE + Duration::from_secs(1))).await, Err(ApiError::BodyTimeout));
        assert_eq!(start.elapsed(), BODY_IDLE);
        let start = Instant::now();
        assert_eq!(read(trickle(Duration::from_secs(1))).await, Err(ApiError::BodyTimeout));
        assert_eq!(start.elapsed(), BODY_TOTAL);
        assert_eq!(read(trickle(Duration::from_millis(10))).await.map(|b| b.len()), Ok(1_000));
    }

    #[tokio::test]
    async fn a_body_ends_at_the_limit() {
        let pieces = |n: usize| {
            Body::from_stream(
                stream::iter(vec![MAX_BODY / 2, MAX_BODY / 2, n])
                    .map(|n| Ok::<_, Infallible>(Bytes::from(vec![b'x'; n]))),
            )
        };
        assert_eq!(read(pieces(0)).await.map(|b| b.len()), Ok(MAX_BODY));
        assert_eq!(read(pieces(1)).await, Err(ApiError::BodyTooLarge { limit: MAX_BODY }));
    }
}
