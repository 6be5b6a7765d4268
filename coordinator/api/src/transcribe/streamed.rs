//! A transcript as server-sent events, in OpenAI's form: `transcript.text.delta` for each segment, as soon as it
//! is known, then `transcript.text.done` with the whole text.
//!
//! The body is pulled: the worker computes the next segment only when the connection has room, and a client
//! that disconnects drops the call.

use super::written::{Usage, usage};
use crate::audio::OperationResults;
use crate::error::ApiError;
use axum::body::Body;
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::future::BoxFuture;
use futures::stream;
use proto::operation::SpokenText;
use serde::Serialize;
use std::convert::Infallible;
use std::time::Duration;
use tokio::sync::mpsc::Receiver;

/// The end of `data`, as in all of OpenAI's streams.
const DONE: &str = "data: [DONE]\n\n";

#[derive(Debug, Serialize)]
#[serde(tag = "type")]
enum Event<'a> {
    #[serde(rename = "transcript.text.delta")]
    Delta { delta: &'a str },
    #[serde(rename = "transcript.text.done")]
    Done { text: &'a str, usage: Usage },
}

impl Event<'_> {
    fn write(&self, out: &mut String) {
        // Serializing numbers and texts cannot fail.
        let json = serde_json::to_string(self).unwrap_or_default();
        *out += &format!("data: {json}\n\n");
    }
}

/// A call whose segments arrive one by one. The headers of its session come with the first one.
pub(super) struct Segments {
    /// Runs the operation, and passes each text to `texts`.
    pub(super) call: BoxFuture<'static, Result<OperationResults, ApiError>>,
    pub(super) texts: Receiver<(HeaderMap, SpokenText)>,
    /// Of the recording, in seconds.
    pub(super) duration: f64,
    /// Silence after which the stream gets a comment.
    pub(super) silence: Duration,
}

/// The text so far.
#[derive(Default)]
struct Written(String);

impl Written {
    /// Writes a segment. Nothing precedes the first word.
    fn delta(&mut self, text: &str, out: &mut String) {
        let delta = if self.0.is_empty() { text.trim_start() } else { text };
        if !delta.is_empty() {
            self.0 += delta;
            Event::Delta { delta }.write(out);
        }
    }

    fn done(&self, duration: f64, out: &mut String) {
        Event::Done { text: self.0.trim_end(), usage: usage(duration) }.write(out);
        *out += DONE;
    }
}

impl Segments {
    /// The next events, and whether more may follow.
    async fn next(&mut self, written: &mut Written) -> Result<(HeaderMap, String, bool), ApiError> {
        let mut out = String::new();
        loop {
            tokio::select! {
                biased;
                Some((session, text)) = self.texts.recv() => {
                    written.delta(&text.text, &mut out);
                    if !out.is_empty() {
                        return Ok((session, out, true));
                    }
                }
                results = &mut self.call => {
                    results?;
                    // The texts that were sent before the call ended.
                    let mut last = HeaderMap::new();
                    while let Ok((session, text)) = self.texts.try_recv() {
                        written.delta(&text.text, &mut out);
                        last = session;
                    }
                    written.done(self.duration, &mut out);
                    return Ok((last, out, false));
                }
            }
        }
    }

    /// Like [`Self::next`], or a comment after a silence.
    async fn next_or_comment(
        &mut self,
        written: &mut Written,
    ) -> Result<(HeaderMap, String, bool), ApiError> {
        let silence = self.silence;
        let next = tokio::time::timeout(silence, self.next(written)).await;
        next.unwrap_or_else(|_| Ok((HeaderMap::new(), ": transcribing\n\n".to_owned(), true)))
    }

    /// Streams the events. Waits for the first one, so that an error before it gets its own status, but no longer than
    /// `silence`.
    pub(super) async fn respond(mut self) -> Result<Response, ApiError> {
        let mut written = Written::default();
        let (mut headers, first, more) = self.next_or_comment(&mut written).await?;
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        // Proxies must not buffer this response.
        headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
        let rest = more.then_some((self, written));
        let body = stream::unfold((Some(first), rest), |(first, rest)| async {
            if let Some(first) = first {
                return Some((Ok::<_, Infallible>(Bytes::from(first)), (None, rest)));
            }
            let (mut segments, mut written) = rest?;
            let (out, more) = match segments.next_or_comment(&mut written).await {
                Ok((_, out, more)) => (out, more),
                Err(error) => (format!("data: {}\n\n", error.body()), false),
            };
            Some((Ok(out.into()), (None, more.then_some((segments, written)))))
        });
        Ok((headers, Body::from_stream(body)).into_response())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_have_openais_form_and_deltas_make_the_text() {
        let (mut written, mut out) = (Written::default(), String::new());
        for text in [" ", " One.", " \"Two\"\n"] {
            written.delta(text, &mut out);
        }
        written.done(1.5, &mut out);
        let expected = concat!(
            "data: {\"type\":\"transcript.text.delta\",\"delta\":\"One.\"}\n\n",
            "data: {\"type\":\"transcript.text.delta\",\"delta\":\" \\\"Two\\\"\\n\"}\n\n",
            "data: {\"type\":\"transcript.text.done\",\"text\":\"One. \\\"Two\\\"\",",
            "\"usage\":{\"type\":\"duration\",\"seconds\":2}}\n\n",
            "data: [DONE]\n\n",
        );
        assert_eq!(out, expected);
    }
}
