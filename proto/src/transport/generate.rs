//! One generation on one stream. The request goes to the worker, frames come back. Each side detects when
//! the other leaves.

use super::Connection;
use super::prefixes::{KeptPrefixes, Numbering, Sending};
use super::streams::{FrameReader, FrameWriter, StreamCode, StreamKind, next_request, read_request};
use crate::Error;
use crate::codec::Cap;
use crate::message::{GenerateFrame, GenerateRequest, NumberedPrefix, PrefixNote};
use quinn::{RecvStream, SendStream};

/// Bytes of a request other than its tokens, unless it has many stop strings or biases.
const REQUEST_ROOM: usize = 512;
const WHAT: &str = "a generation's request";

/// Priority of a request's stream. Requests are sent one after the other, the oldest first, not
/// interleaved: a worker admits them in the order in which their streams were opened, so interleaving would
/// serve none sooner and all but the last later. Everything else on the connection goes first.
fn priority(stream: u64) -> i32 {
    // Priorities wrap once in 2^30 requests; then a newer request goes first.
    const COUNT: u64 = 1 << 30;
    -1 - i32::try_from(stream % COUNT).unwrap_or(0)
}

fn is_last(frame: &GenerateFrame) -> bool {
    match frame {
        GenerateFrame::Finished(_) | GenerateFrame::Failed(_) => true,
        GenerateFrame::Started(_) | GenerateFrame::Tokens(_) => false,
    }
}

/// Coordinator's end. Dropping it before the last frame cancels the generation.
#[derive(Debug)]
pub struct GenerateStream {
    frames: FrameReader<GenerateFrame>,
    /// Numbered prefix of the request, until the worker has replied.
    said: SentPrefix,
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

impl GenerateStream {
    /// Starts a generation on a stream on which nothing has been sent.
    pub(super) async fn start(
        send: SendStream,
        receive: RecvStream,
        request: &GenerateRequest,
    ) -> Result<Self, Error> {
        let writer = opening(send, StreamKind::Generate, request);
        Self::sent(writer, receive, request, SentPrefix::default()).await
    }

    /// Like [`start`](Self::start), for a prompt whose beginning gets a number on `connection`, or is
    /// replaced by one.
    pub(super) async fn start_after(
        (send, receive): (SendStream, RecvStream),
        connection: &Connection,
        request: &GenerateRequest,
        Sending { after, keep }: Sending,
    ) -> Result<Self, Error> {
        let (keep, numbering) = keep.unzip();
        let short = after
            .map(|after| Box::new(Short { after, connection: connection.clone(), request: request.clone() }));
        let known = after.map_or(0, |prefix| prefix.tokens as usize);
        let mut request = request.clone();
        if known > 0 {
            request.prompt = request.prompt.get(known..).unwrap_or_default().into();
        }
        let note = PrefixNote { after, keep };
        let writer = opening(send, StreamKind::GenerateAfter, &request).preceded_by(&note)?;
        Self::sent(writer, receive, &request, SentPrefix { numbering, short, unknown: false }).await
    }

    async fn sent(
        mut writer: FrameWriter<GenerateRequest>,
        receive: RecvStream,
        request: &GenerateRequest,
        said: SentPrefix,
    ) -> Result<Self, Error> {
        writer.write(request).await?;
        writer.finish();
        Ok(Self { frames: FrameReader::new(receive, Cap::Stream), said, ended: false })
    }

    /// Returns the next frame, or `None` after the last frame or after an error. Fails with
    /// [`Error::StreamCut`] if the stream ends before its last frame, and with [`Error::ConnectionLost`] if
    /// the worker is lost. Cancel-safe.
    pub async fn next(&mut self) -> Option<Result<GenerateFrame, Error>> {
        if self.ended {
            return None;
        }
        if !self.said.unknown {
            match self.frames.next().await {
                Err(Error::StreamEnded(StreamCode::UnknownPrefix)) if self.said.short.is_some() => {
                    self.said.unknown = true;
                }
                frame => return Some(self.took(frame)),
            }
        }
        // Retried once: the whole prompt has no number. If the future is dropped here, the retry starts
        // again.
        if let Some(short) = &self.said.short {
            match short.connection.open_whole(&short.request, short.after).await {
                Ok(whole) => *self = whole,
                Err(error) => return Some(self.took(Err(error))),
            }
        }
        let frame = self.frames.next().await;
        Some(self.took(frame))
    }

    fn took(&mut self, frame: Result<Option<GenerateFrame>, Error>) -> Result<GenerateFrame, Error> {
        let SentPrefix { numbering, .. } = std::mem::take(&mut self.said);
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

/// Worker's end: a request, and the sender for its frames.
#[derive(Debug)]
pub struct GenerateCall {
    pub request: GenerateRequest,
    pub reply: GenerateReply,
}

impl GenerateCall {
    pub(super) async fn read(send: SendStream, receive: RecvStream) -> Result<Self, Error> {
        let (request, frames) = read_request(send, receive, WHAT).await?;
        Ok(Self { request, reply: GenerateReply { frames, finished: false } })
    }

    /// Like [`read`](Self::read), for a prompt that may begin with a numbered prefix of an earlier one.
    pub(super) async fn read_after(
        send: SendStream,
        receive: RecvStream,
        kept: &KeptPrefixes,
    ) -> Result<Self, Error> {
        let mut notes = FrameReader::<PrefixNote>::new(receive, Cap::GenerateRequest);
        let PrefixNote { after, keep } = notes.next().await?.ok_or(Error::StreamCut { what: WHAT })?;
        let (mut request, mut frames) =
            next_request::<GenerateRequest, _>(send, notes.retyped(Cap::GenerateRequest), WHAT).await?;
        if let Some(after) = after {
            let Some(whole) = kept.whole(after, &request.prompt) else {
                frames.reset(StreamCode::UnknownPrefix);
                return Err(Error::Protocol(
                    "a prompt begins with a numbered prefix that is not known any more",
                ));
            };
            request.prompt = whole;
        }
        keep.into_iter().for_each(|keep| kept.keep(keep, &request.prompt));
        Ok(Self { request, reply: GenerateReply { frames, finished: false } })
    }
}

/// Sends the frames of one generation. If it is dropped before the last frame, the coordinator sees a
/// stream that was cut off.
#[derive(Debug)]
pub struct GenerateReply {
    frames: FrameWriter<GenerateFrame>,
    finished: bool,
}

impl GenerateReply {
    /// Sends a frame. Waits while the coordinator reads more slowly. Fails with [`Error::StreamEnded`] once
    /// the coordinator has cancelled. The last frame of a generation also finishes the stream. If the
    /// future is dropped before it completes, the stream is unusable.
    pub async fn send(&mut self, frame: &GenerateFrame) -> Result<(), Error> {
        self.frames.write(frame).await?;
        if is_last(frame) {
            self.frames.finish();
            self.finished = true;
        }
        Ok(())
    }

    /// Whether the last frame was sent. It may still be in transit.
    pub fn is_finished(&self) -> bool {
        self.finished
    }

    /// Resolves once nobody reads any more: the coordinator has cancelled, the connection is lost, or
    /// everything up to the last frame has arrived.
    pub fn cancelled(&self) -> impl Future<Output = ()> + Send + 'static {
        let stopped = self.frames.stream().stopped();
        async move {
            let _ = stopped.await;
        }
    }
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
