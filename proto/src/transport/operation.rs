//! One session of an operation on one stream: the request and what is heard go one way, what is made of it comes back.
//! Either end may send while it receives; the order of what comes is that of what it answers.

use super::streams::{FrameReader, FrameWriter, StreamCode};
use crate::Error;
use crate::codec::Cap;
use crate::operation::{OpenedOperation, OperationError, OperationInput, OperationOutput, OperationRequest};
use quinn::{RecvStream, SendStream};

/// The coordinator's end of a session that is open.
#[derive(Debug)]
pub struct OperationSession {
    /// What the worker has said of it.
    pub opened: OpenedOperation,
    /// Where what is heard goes. Dropped: the worker hears no more, and ends the session.
    pub sender: OperationSender,
    /// Where what is made of it comes from. Dropped: the session is cancelled.
    pub answers: OperationStream,
}

impl OperationSession {
    pub(super) async fn open(
        send: SendStream,
        receive: RecvStream,
        request: &OperationRequest,
    ) -> Result<Result<Self, OperationError>, Error> {
        let mut head = FrameWriter::new(send, Cap::Stream);
        head.write(request).await?;
        let mut answers = OperationStream { frames: FrameReader::new(receive, Cap::Stream) };
        match answers.next().await? {
            OperationOutput::Opened(opened) => Ok(Ok(Self {
                opened,
                sender: OperationSender { frames: head.retyped(Cap::Stream) },
                answers,
            })),
            OperationOutput::Failed(error) => Ok(Err(error)),
            _ => Err(Error::Protocol("a session answers before it is open")),
        }
    }
}

/// The coordinator's way to a session.
#[derive(Debug)]
pub struct OperationSender {
    frames: FrameWriter<OperationInput>,
}

impl OperationSender {
    /// Sends one frame; waits while the worker hears slower than we send, so that whoever feeds this is to be read only
    /// as fast. Fails with [`Error::StreamEnded`] once the worker has ended the session: why is among its answers.
    /// When the future is dropped halfway the stream is unusable.
    pub async fn send(&mut self, input: &OperationInput) -> Result<(), Error> {
        self.frames.write(input).await
    }
}

/// The coordinator's way from a session.
#[derive(Debug)]
pub struct OperationStream {
    frames: FrameReader<OperationOutput>,
}

impl OperationStream {
    /// The next answer; nothing comes after `Finished` and `Failed`. Dropping the future loses nothing.
    pub async fn next(&mut self) -> Result<OperationOutput, Error> {
        let answer = self.frames.next().await?.ok_or(Error::StreamCut { what: "a session" })?;
        if matches!(answer, OperationOutput::Finished { .. } | OperationOutput::Failed(_)) {
            self.frames.take_end();
        }
        Ok(answer)
    }
}

/// The worker's end of a session that is to be opened.
#[derive(Debug)]
pub struct OperationCall {
    pub request: OperationRequest,
    pub inputs: OperationInputs,
    pub reply: OperationReplier,
}

impl OperationCall {
    pub(super) async fn read(send: SendStream, receive: RecvStream) -> Result<Self, Error> {
        let mut frames = FrameWriter::new(send, Cap::Stream);
        let mut head = FrameReader::new(receive, Cap::Stream);
        match head.next().await {
            Ok(Some(request)) => Ok(Self {
                request,
                inputs: OperationInputs { frames: head.retyped(Cap::Stream) },
                reply: OperationReplier { frames },
            }),
            Ok(None) => Err(Error::StreamCut { what: "a session's request" }),
            Err(error) => {
                frames.reset(StreamCode::Malformed);
                head.stop(StreamCode::Malformed);
                Err(error)
            }
        }
    }
}

/// The worker's way from a session's client.
#[derive(Debug)]
pub struct OperationInputs {
    frames: FrameReader<OperationInput>,
}

impl OperationInputs {
    /// The next frame; none where the client says no more. Dropping the future loses nothing.
    pub async fn next(&mut self) -> Result<Option<OperationInput>, Error> {
        self.frames.next().await
    }

    /// What still comes is of no interest.
    pub fn stop(mut self) {
        self.frames.stop(StreamCode::Cancelled);
    }
}

/// The worker's way to a session's client. Dropped before `Finished` or `Failed`, the client sees a session that was
/// cut off.
#[derive(Debug)]
pub struct OperationReplier {
    frames: FrameWriter<OperationOutput>,
}

impl OperationReplier {
    /// Sends one frame; waits while the client reads slower than we send. When the future is dropped halfway the stream
    /// is unusable.
    pub async fn send(&mut self, output: &OperationOutput) -> Result<(), Error> {
        self.frames.write(output).await
    }

    pub async fn end(mut self, output: &OperationOutput) -> Result<(), Error> {
        self.frames.write(output).await?;
        self.frames.finish();
        Ok(())
    }

    /// Resolves as soon as nobody reads any more: the client has left or the connection is gone.
    pub fn cancelled(&self) -> impl Future<Output = ()> + Send + 'static {
        let stopped = self.frames.stream().stopped();
        async move {
            let _ = stopped.await;
        }
    }
}
