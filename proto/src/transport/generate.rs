//! One generation on one stream: the request goes one way, frames come back, and either side's leaving is
//! seen by the other.

use super::streams::{FrameReader, FrameWriter, StreamKind, read_request};
use crate::Error;
use crate::codec::Cap;
use crate::message::{GenerateFrame, GenerateRequest, GenerateRequestV2};
use quinn::{RecvStream, SendStream};

/// What a request takes besides its tokens, unless it has many stop strings or biases.
const REQUEST_ROOM: usize = 512;

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
    ended: bool,
}

impl GenerateStream {
    /// On a stream that nothing has been sent on.
    pub(super) async fn start(
        send: SendStream,
        receive: RecvStream,
        request: &GenerateRequest,
    ) -> Result<Self, Error> {
        let tokens = match request {
            GenerateRequest::V1(request) | GenerateRequest::V2(GenerateRequestV2 { request, .. }) => {
                request.prompt.len() + request.emitted.len()
            }
            GenerateRequest::V3(request) => request.prompt.len() + request.emitted.len(),
        };
        // Fails only for a stream that is finished.
        let _ = send.set_priority(priority(send.id().index()));
        // A token takes three bytes at most in all vocabularies there are.
        let room = 3 * tokens + REQUEST_ROOM;
        let mut writer = FrameWriter::opening(send, StreamKind::Generate, Cap::GenerateRequest, room);
        writer.write(request).await?;
        writer.finish();
        Ok(Self { frames: FrameReader::new(receive, Cap::Stream), ended: false })
    }

    /// The next frame; `None` after the last one or after an error. A stream that ends before its last frame
    /// is [`Error::StreamCut`], a worker that is gone [`Error::ConnectionLost`]. Dropping the future loses
    /// nothing.
    pub async fn next(&mut self) -> Option<Result<GenerateFrame, Error>> {
        if self.ended {
            return None;
        }
        let frame = match self.frames.next().await {
            Ok(Some(frame)) => Ok(frame),
            Ok(None) => Err(Error::StreamCut { what: "the last frame of a generation" }),
            Err(error) => Err(error),
        };
        self.ended = !matches!(&frame, Ok(frame) if !is_last(frame));
        if self.ended {
            self.frames.take_end();
        }
        Some(frame)
    }
}

/// The worker's end: a request and where its frames go.
#[derive(Debug)]
pub struct GenerateCall {
    /// What to generate.
    pub request: GenerateRequest,
    /// Where the frames go.
    pub reply: GenerateReply,
}

impl GenerateCall {
    pub(super) async fn read(send: SendStream, receive: RecvStream) -> Result<Self, Error> {
        let (request, frames) = read_request(send, receive, "a generation's request").await?;
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
