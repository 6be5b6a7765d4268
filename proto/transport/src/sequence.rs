//! One operation on sequences on one stream. A request goes to the worker, a reply comes back. Either may
//! be followed by a snapshot's raw bytes.

use super::streams::{FrameReader, FrameWriter, StreamCode};
use crate::Error;
use bytes::Bytes;
use proto::codec::{Cap, CodecError};
use proto::sequence::{SequenceError, SequenceOperation, SequenceReply, SequenceRequest};
use quinn::{RecvStream, SendStream};

const REQUEST: Cap = Cap::GenerateRequest;
const REPLY: Cap = Cap::Control;
/// Bytes per write.
const PIECE: usize = 1 << 20;

/// Coordinator's end. Dropping it cancels the parts of the operation that are not done yet.
#[derive(Debug)]
pub struct SequenceExchange {
    writer: FrameWriter<SequenceRequest>,
    frames: FrameReader<SequenceReply>,
}

impl SequenceExchange {
    pub(super) async fn start(
        send: SendStream,
        receive: RecvStream,
        request: &SequenceRequest,
    ) -> Result<Self, Error> {
        let mut writer = FrameWriter::new(send, REQUEST);
        writer.write(request).await?;
        Ok(Self { writer, frames: FrameReader::new(receive, REPLY) })
    }

    /// Sends a part of the bytes that the request announces. Fails with [`Error::StreamEnded`] once the
    /// worker accepts no more of them; the worker has replied by then.
    pub async fn send(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.writer.write_raw(bytes).await
    }

    /// Returns the worker's reply and the bytes that follow it.
    pub async fn answer(mut self) -> Result<(SequenceReply, SequenceBytes), Error> {
        self.writer.finish();
        let reply = self.frames.next().await?;
        let reply = reply.ok_or(Error::StreamCut { what: "the answer to an operation on a sequence" })?;
        let left = if let SequenceReply::Bytes(bytes) = reply { bytes } else { 0 };
        Ok((reply, SequenceBytes { frames: self.frames, left }))
    }
}

/// A snapshot's bytes as they arrive.
#[derive(Debug)]
pub struct SequenceBytes {
    frames: FrameReader<SequenceReply>,
    left: u64,
}

impl SequenceBytes {
    /// Returns the next bytes, or `None` after the last.
    pub async fn next(&mut self) -> Result<Option<Bytes>, Error> {
        if self.left == 0 {
            return Ok(None);
        }
        let max = usize::try_from(self.left).unwrap_or(usize::MAX);
        let bytes = self.frames.read_some(max).await?;
        self.left -= bytes.len() as u64;
        Ok(Some(bytes))
    }
}

/// Worker's end: the request, its bytes, and the replier.
#[derive(Debug)]
pub struct SequenceCall {
    pub request: SequenceRequest,
    pub body: SequenceBody,
    pub reply: SequenceReplier,
}

impl SequenceCall {
    pub(super) async fn read(send: SendStream, receive: RecvStream) -> Result<Self, Error> {
        let mut reply = SequenceReplier { frames: FrameWriter::new(send, REPLY) };
        let mut frames = FrameReader::<SequenceRequest>::new(receive, REQUEST);
        match frames.next().await {
            Ok(Some(request)) => {
                let bytes = match request.operation {
                    SequenceOperation::Upload { bytes, .. } => bytes,
                    _ => 0,
                };
                Ok(Self { request, body: SequenceBody { frames, bytes }, reply })
            }
            Ok(None) => Err(Error::StreamCut { what: "a request about a sequence" }),
            Err(error) => {
                reply.frames.reset(StreamCode::Malformed);
                frames.stop(StreamCode::Malformed);
                Err(error)
            }
        }
    }
}

/// The bytes that a request announces.
#[derive(Debug)]
pub struct SequenceBody {
    frames: FrameReader<SequenceRequest>,
    bytes: u64,
}

impl SequenceBody {
    /// Reads all bytes. Fails without reading any if they are more than `max_bytes`. Memory grows with the
    /// received bytes.
    pub async fn read(mut self, max_bytes: u64) -> Result<Vec<u8>, Error> {
        let len = usize::try_from(self.bytes).unwrap_or(usize::MAX);
        if self.bytes > max_bytes {
            let cap = usize::try_from(max_bytes).unwrap_or(usize::MAX);
            return Err(CodecError::TooLong { message: "snapshot", len, cap }.into());
        }
        let mut bytes = Vec::new();
        self.frames.read_raw(len, &mut bytes).await?;
        Ok(bytes)
    }
}

/// Sends the worker's single reply. If it is dropped before, the coordinator sees a stream that was cut
/// off.
#[derive(Debug)]
pub struct SequenceReplier {
    frames: FrameWriter<SequenceReply>,
}

impl SequenceReplier {
    /// Sends a reply without bytes.
    pub async fn send(mut self, reply: SequenceReply) -> Result<(), Error> {
        if matches!(reply, SequenceReply::Bytes(_)) {
            return Err(Error::Protocol("a snapshot was announced but not sent"));
        }
        self.frames.write(&reply).await?;
        self.frames.finish();
        Ok(())
    }

    pub async fn send_bytes(mut self, bytes: &[u8]) -> Result<(), Error> {
        self.frames.write(&SequenceReply::Bytes(bytes.len() as u64)).await?;
        for piece in bytes.chunks(PIECE) {
            self.frames.write_raw(piece).await?;
        }
        self.frames.finish();
        Ok(())
    }

    /// Sends an error.
    pub async fn fail(self, error: SequenceError) -> Result<(), Error> {
        self.send(SequenceReply::Failed(error)).await
    }

    /// Resolves once the stream is no longer read: the coordinator has cancelled or the connection is lost.
    pub fn cancelled(&self) -> impl Future<Output = ()> + Send + 'static {
        self.frames.unread()
    }
}
