//! One generation on one stream, the coordinator's end. The request goes to the worker, frames come back. Each
//! side detects when the other leaves.

use super::connection::Connection;
use super::generate_call::is_last;
use super::prefixes::{Numbering, Sending};
use super::streams::{FrameReader, FrameWriter, StreamCode, StreamKind};
use crate::Error;
use proto::codec::Cap;
use proto::message::image_encoder::ImageEncoders;
use proto::message::{GenerateFrame, GenerateRequest, NumberedPrefix, PrefixNote, PromptImages};
use quinn::{RecvStream, SendStream};

/// Bytes of a request other than its tokens, unless it has many stop strings or biases.
const REQUEST_ROOM: usize = 512;

/// Priority of a request's stream. Requests are sent one after the other, the oldest first, not
/// interleaved: a worker admits them in the order in which their streams were opened, so interleaving would
/// serve none sooner and all but the last later. Everything else on the connection goes first.
fn priority(stream: u64) -> i32 {
    // Priorities wrap once in 2^30 requests; then a newer request goes first.
    const COUNT: u64 = 1 << 30;
    -1 - i32::try_from(stream % COUNT).unwrap_or(0)
}

/// Coordinator's end. Dropping it before the last frame cancels the generation.
#[derive(Debug)]
pub struct GenerateStream {
    frames: FrameReader<GenerateFrame>,
    /// Numbered prefix of the request, until the worker has replied.
    prefix: SentPrefix,
    ended: bool,
}

/// Form in which the beginning of the prompt was sent. See [`GenerateStream`].
#[derive(Debug, Default)]
struct SentPrefix {
    numbering: Option<Numbering>,
    /// Set if the prompt was sent without its beginning.
    short: Option<Box<Short>>,
    /// Set once the worker has reported that it does not have the prefix. The whole prompt must be sent.
    unknown: bool,
}

#[derive(Debug)]
struct Short {
    after: NumberedPrefix,
    connection: Connection,
    request: GenerateRequest,
}

impl Connection {
    /// Sends a generate request to the worker. Dropping the result cancels the request.
    pub async fn open_generate(&self, request: &GenerateRequest) -> Result<GenerateStream, Error> {
        let (send, receive) = self.open_unnamed().await?;
        let sending = self.sent_prefixes().sending(&request.prompt, request.predicted_cached as usize);
        if sending.after.is_some() || sending.keep.is_some() {
            return GenerateStream::start_after((send, receive), self, request, sending).await;
        }
        GenerateStream::start(send, receive, request).await
    }

    /// Like [`open_generate`](Self::open_generate), with the whole prompt, for a worker that does not have
    /// the numbered prefix `unknown`.
    async fn open_whole(
        &self,
        request: &GenerateRequest,
        unknown: NumberedPrefix,
    ) -> Result<GenerateStream, Error> {
        self.sent_prefixes().forget(unknown.number);
        let (send, receive) = self.open_unnamed().await?;
        GenerateStream::start(send, receive, request).await
    }
}

impl GenerateStream {
    /// Starts a generation on a stream on which nothing has been sent.
    async fn start(send: SendStream, receive: RecvStream, request: &GenerateRequest) -> Result<Self, Error> {
        let writer = match request.images.is_empty() && request.prompt_logprobs.is_none() {
            true => opening(send, StreamKind::Generate, request),
            false => noted(send, &PrefixNote::default(), request)?,
        };
        Self::sent(writer, receive, request, SentPrefix::default()).await
    }

    /// Like [`start`](Self::start), for a prompt whose beginning gets a number on `connection`, or is
    /// replaced by one.
    async fn start_after(
        (send, receive): (SendStream, RecvStream),
        connection: &Connection,
        request: &GenerateRequest,
        Sending { after, keep }: Sending,
    ) -> Result<Self, Error> {
        let (keep, numbering) = keep.unzip();
        let short = after
            .map(|after| Box::new(Short { after, connection: connection.clone(), request: request.clone() }));
        let numbered = after.map_or(0, |prefix| prefix.tokens as usize);
        let mut request = request.clone();
        if numbered > 0 {
            request.prompt = request.prompt.get(numbered..).unwrap_or_default().into();
        }
        let note = PrefixNote { after, keep };
        let writer = noted(send, &note, &request)?;
        Self::sent(writer, receive, &request, SentPrefix { numbering, short, unknown: false }).await
    }

    async fn sent(
        mut writer: FrameWriter<GenerateRequest>,
        receive: RecvStream,
        request: &GenerateRequest,
        prefix: SentPrefix,
    ) -> Result<Self, Error> {
        writer.write(request).await?;
        writer.finish();
        Ok(Self { frames: FrameReader::new(receive, Cap::Stream), prefix, ended: false })
    }

    /// Returns the next frame, or `None` after the last frame or after an error. Fails with
    /// [`Error::StreamCut`] if the stream ends before its last frame, and with [`Error::ConnectionLost`] if
    /// the worker is lost. Cancel-safe.
    pub async fn next(&mut self) -> Option<Result<GenerateFrame, Error>> {
        if self.ended {
            return None;
        }
        if !self.prefix.unknown {
            match self.frames.next().await {
                Err(Error::StreamEnded(StreamCode::UnknownPrefix)) if self.prefix.short.is_some() => {
                    self.prefix.unknown = true;
                }
                frame => return Some(self.took(frame)),
            }
        }
        // Retried once: the whole prompt has no number. If the future is dropped here, the retry starts
        // again.
        if let Some(short) = &self.prefix.short {
            match short.connection.open_whole(&short.request, short.after).await {
                Ok(whole) => *self = whole,
                Err(error) => return Some(self.took(Err(error))),
            }
        }
        let frame = self.frames.next().await;
        Some(self.took(frame))
    }

    fn took(&mut self, frame: Result<Option<GenerateFrame>, Error>) -> Result<GenerateFrame, Error> {
        let SentPrefix { numbering, .. } = std::mem::take(&mut self.prefix);
        let frame = match frame {
            Ok(Some(frame)) => {
                numbering.into_iter().for_each(Numbering::read);
                Ok(frame)
            }
            Ok(None) => Err(Error::StreamCut { what: "the last frame of a generation" }),
            Err(error) => Err(error),
        };
        self.ended = !matches!(&frame, Ok(frame) if !is_last(frame));
        if self.ended {
            self.frames.take_end();
        }
        frame
    }
}

/// Creates a writer that starts with the stream's kind and has capacity for the request.
fn opening(send: SendStream, kind: StreamKind, request: &GenerateRequest) -> FrameWriter<GenerateRequest> {
    let tokens = request.prompt.len() + request.emitted.len();
    // Fails only for a finished stream.
    let _ = send.set_priority(priority(send.id().index()));
    // A token takes at most three bytes in all existing vocabularies.
    let room = 3 * tokens + REQUEST_ROOM;
    FrameWriter::opening(send, kind, Cap::GenerateRequest, room)
}

/// Creates a writer that starts with the note and what is sent before a request: its images, or that the
/// log-probabilities of its prompt are requested.
fn noted(
    send: SendStream,
    note: &PrefixNote,
    request: &GenerateRequest,
) -> Result<FrameWriter<GenerateRequest>, Error> {
    if let Some(logprobs) = &request.prompt_logprobs {
        let writer = opening(send, StreamKind::GenerateWithPromptLogprobs, request);
        return writer.preceded_by(note, Cap::GenerateRequest)?.preceded_by(logprobs, Cap::Stream);
    }
    if request.images.is_empty() {
        return opening(send, StreamKind::GenerateAfter, request).preceded_by(note, Cap::GenerateRequest);
    }
    let images = PromptImages(request.images.clone());
    if request.encoders.is_empty() {
        let writer = opening(send, StreamKind::GenerateFromImages, request);
        return writer.preceded_by(note, Cap::GenerateRequest)?.preceded_by(&images, Cap::Images);
    }
    let writer = opening(send, StreamKind::GenerateWithEncoders, request);
    let encoders = ImageEncoders(request.encoders.clone());
    let writer = writer.preceded_by(note, Cap::GenerateRequest)?;
    writer.preceded_by(&encoders, Cap::Stream)?.preceded_by(&images, Cap::Images)
}

#[cfg(test)]
mod tests {
    use super::priority;

    #[test]
    fn older_requests_have_priority_over_newer_ones_and_none_over_other_streams() {
        for stream in [0, 1, 1_000_000, (1 << 30) - 2] {
            assert!(priority(stream) > priority(stream + 1));
            assert!(priority(stream) < 0);
        }
        assert!(priority((1 << 30) - 1) < 0 && priority(u64::MAX) < 0);
    }
}
