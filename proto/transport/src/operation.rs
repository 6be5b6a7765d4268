//! One session of an operation on one stream. The request and the input go to the worker, the results come
//! back. Both ends may send while they receive. Results come in the order of the inputs.

use super::streams::{FrameReader, FrameWriter, StreamCode};
use crate::Error;
use proto::codec::Cap;
use proto::operation::{
    BackendRequest, OpenedOperation, OperationError, OperationInput, OperationOutput, OperationRequest,
};
use quinn::{RecvStream, SendStream};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Coordinator's end of an open session.
#[derive(Debug)]
pub struct OperationSession {
    /// The worker's description of the session.
    pub opened: OpenedOperation,
    /// Sends the input. Dropping it ends the input, and the worker ends the session.
    pub sender: OperationSender,
    /// Receives the results. Dropping it cancels the session.
    pub answers: OperationStream,
}

impl OperationSession {
    pub(super) async fn open(
        send: SendStream,
        receive: RecvStream,
        request: &(impl Serialize + Sync),
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
            _ => Err(Error::Protocol("a session sends results before it is open")),
        }
    }
}

/// Sends a session's input to the worker.
#[derive(Debug)]
pub struct OperationSender {
    frames: FrameWriter<OperationInput>,
}

impl OperationSender {
    /// Sends one frame. Waits while the worker reads more slowly; callers should pass this back pressure on
    /// to their source. Fails with [`Error::StreamEnded`] once the worker has ended the session; the reason
    /// is among the results. If the future is dropped before it completes, the stream is unusable.
    pub async fn send(&mut self, input: &OperationInput) -> Result<(), Error> {
        self.frames.write(input).await
    }
}

/// Receives a session's results from the worker.
#[derive(Debug)]
pub struct OperationStream {
    frames: FrameReader<OperationOutput>,
}

impl OperationStream {
    /// Returns the next result. Nothing follows `Finished` and `Failed`. Cancel-safe.
    pub async fn next(&mut self) -> Result<OperationOutput, Error> {
        let answer = self.frames.next().await?.ok_or(Error::StreamCut { what: "a session" })?;
        if matches!(answer, OperationOutput::Finished { .. } | OperationOutput::Failed(_)) {
            self.frames.take_end();
        }
        Ok(answer)
    }
}

/// Worker's end of a session that is not open yet.
#[derive(Debug)]
pub struct OperationCall {
    pub request: OperationRequest,
    /// The backend that the client has chosen.
    pub backend: Option<String>,
    pub inputs: OperationInputs,
    pub reply: OperationReplier,
}

impl OperationCall {
    pub(super) async fn read(send: SendStream, receive: RecvStream) -> Result<Self, Error> {
        Self::read_as(send, receive, |request: OperationRequest| (request, None)).await
    }

    pub(super) async fn read_by_backend(send: SendStream, receive: RecvStream) -> Result<Self, Error> {
        Self::read_as(send, receive, |BackendRequest { backend, request }| (request, Some(backend))).await
    }

    async fn read_as<H: DeserializeOwned>(
        send: SendStream,
        receive: RecvStream,
        parts: fn(H) -> (OperationRequest, Option<String>),
    ) -> Result<Self, Error> {
        let mut frames = FrameWriter::new(send, Cap::Stream);
        let mut head = FrameReader::new(receive, Cap::Stream);
        match head.next().await {
            Ok(Some(head_frame)) => {
                let (request, backend) = parts(head_frame);
                let inputs = OperationInputs { frames: head.retyped(Cap::Stream) };
                Ok(Self { request, backend, inputs, reply: OperationReplier { frames } })
            }
            Ok(None) => Err(Error::StreamCut { what: "a session's request" }),
            Err(error) => {
                frames.reset(StreamCode::Malformed);
                head.stop(StreamCode::Malformed);
                Err(error)
            }
        }
    }
}

/// Receives a session's input from the coordinator.
#[derive(Debug)]
pub struct OperationInputs {
    frames: FrameReader<OperationInput>,
}

impl OperationInputs {
    /// Returns the next frame, or `None` at the end of the input. Cancel-safe.
    pub async fn next(&mut self) -> Result<Option<OperationInput>, Error> {
        self.frames.next().await
    }

    /// Discards all further input.
    pub fn stop(mut self) {
        self.frames.stop(StreamCode::Cancelled);
    }
}

/// Sends a session's results to the coordinator. If it is dropped before `Finished` or `Failed`, the
/// coordinator sees a session that was cut off.
#[derive(Debug)]
pub struct OperationReplier {
    frames: FrameWriter<OperationOutput>,
}

impl OperationReplier {
    /// Sends one frame. Waits while the coordinator reads more slowly. If the future is dropped before it
    /// completes, the stream is unusable.
    pub async fn send(&mut self, output: &OperationOutput) -> Result<(), Error> {
        self.frames.write(output).await
    }

    pub async fn end(mut self, output: &OperationOutput) -> Result<(), Error> {
        self.frames.write(output).await?;
        self.frames.finish();
        Ok(())
    }

    /// Resolves once the stream is no longer read: the coordinator has cancelled or the connection is lost.
    pub fn cancelled(&self) -> impl Future<Output = ()> + Send + 'static {
        self.frames.unread()
    }
}
