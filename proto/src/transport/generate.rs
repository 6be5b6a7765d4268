//! One generation on one stream: the request goes one way, frames come back, and either side's leaving is
//! seen by the other.

use super::Connection;
use super::prefixes::{KeptPrefixes, Numbering, Sending};
use super::streams::{FrameReader, FrameWriter, StreamCode, StreamKind, next_request, read_request};
use crate::Error;
use crate::codec::Cap;
use crate::message::{GenerateFrame, GenerateRequest, NumberedPrefix, PrefixNote};
use quinn::{RecvStream, SendStream};

/// What a request takes besides its tokens, unless it has many stop strings or biases.
const REQUEST_ROOM: usize = 512;
const WHAT: &str = "a generation's request";

/// Requests leave one after the other, the oldest first, and not a packet of each in turn: a worker takes them in the order
/// in which their streams were opened, so nobody would be served sooner and all but the last later. Everything else that
/// goes over the connection goes before them.
fn priority(stream: u64) -> i32 {
    // Once in a thousand million requests a newer one goes first.
    const COUNT: u64 = 1 << 30;
    -1 - i32::try_from(stream % COUNT).unwrap_or(0)
}

fn is_last(frame: &GenerateFrame) -> bool {
    match frame {
        GenerateFrame::Finished(_) | GenerateFrame::Failed(_) => true,
        GenerateFrame::Started(_) | GenerateFrame::Tokens(_) => false,
    }
}

/// The coordinator's end. Dropping it before the last frame cancels the generation.
#[derive(Debug)]
pub struct GenerateStream {
    frames: FrameReader<GenerateFrame>,
    /// What the request has said of its prompt's beginning, until the worker has answered.
    said: SentPrefix,
    ended: bool,
}

/// See [`GenerateStream`].
#[derive(Debug, Default)]
struct SentPrefix {
    numbering: Option<Numbering>,
    /// The prompt was sent without its beginning.
    short: Option<Box<Short>>,
    /// The worker does not have that: all of it has to be sent.
    unknown: bool,
}

#[derive(Debug)]
struct Short {
    after: NumberedPrefix,
    connection: Connection,
    request: GenerateRequest,
}

impl GenerateStream {
    /// On a stream that nothing has been sent on.
    pub(super) async fn start(
        send: SendStream,
        receive: RecvStream,
        request: &GenerateRequest,
    ) -> Result<Self, Error> {
        let writer = opening(send, StreamKind::Generate, request);
        Self::sent(writer, receive, request, SentPrefix::default()).await
    }

    /// [`start`](Self::start) for a prompt whose beginning is numbered, or known by its number, on `connection`.
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

    /// The next frame; `None` after the last one or after an error. A stream that ends before its last frame
    /// is [`Error::StreamCut`], a worker that is gone [`Error::ConnectionLost`]. Dropping the future loses
    /// nothing.
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
        // SentPrefix once: what follows has no number. Dropped on the way, it begins again.
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

/// A writer that begins with the kind of the stream and has room for the request.
fn opening(send: SendStream, kind: StreamKind, request: &GenerateRequest) -> FrameWriter<GenerateRequest> {
    let tokens = request.prompt.len() + request.emitted.len();
    // Fails only for a stream that is finished.
    let _ = send.set_priority(priority(send.id().index()));
    // A token takes three bytes at most in all vocabularies there are.
    let room = 3 * tokens + REQUEST_ROOM;
    FrameWriter::opening(send, kind, Cap::GenerateRequest, room)
}

/// The worker's end: a request and where its frames go.
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

    /// [`read`](Self::read) of a prompt that may begin with what was kept of an earlier one.
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
                return Err(Error::Protocol("a prompt begins with what is not here any more"));
            };
            request.prompt = whole;
        }
        keep.into_iter().for_each(|keep| kept.keep(keep, &request.prompt));
        Ok(Self { request, reply: GenerateReply { frames, finished: false } })
    }
}

/// Where a worker sends the frames of one generation. Dropped before the last frame, the coordinator sees a
/// stream that was cut off.
#[derive(Debug)]
pub struct GenerateReply {
    frames: FrameWriter<GenerateFrame>,
    finished: bool,
}

impl GenerateReply {
    /// Sends a frame; waits while the coordinator reads slower than we generate. Fails with
    /// [`Error::StreamEnded`] once the coordinator has cancelled. After a frame that is a generation's last
    /// the stream is finished. Do not drop the future halfway and then send on.
    pub async fn send(&mut self, frame: &GenerateFrame) -> Result<(), Error> {
        self.frames.write(frame).await?;
        if is_last(frame) {
            self.frames.finish();
            self.finished = true;
        }
        Ok(())
    }

    /// Whether a generation's last frame was sent; it may still be under way.
    pub fn is_finished(&self) -> bool {
        self.finished
    }

    /// Resolves as soon as nobody reads any more: the coordinator has cancelled, the connection is gone, or
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
    fn older_requests_go_before_newer_ones_and_behind_everything_else() {
        for stream in [0, 1, 1_000_000, (1 << 30) - 2] {
            assert!(priority(stream) > priority(stream + 1));
            assert!(priority(stream) < 0);
        }
        assert!(priority((1 << 30) - 1) < 0 && priority(u64::MAX) < 0);
    }
}
