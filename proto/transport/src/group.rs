//! Streams between coordinators, with frames of a type that the coordinators define.

use super::streams::{FrameReader, FrameWriter};
use crate::Error;
use proto::codec::Cap;
use quinn::{RecvStream, SendStream};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Sending coordinator's end.
#[derive(Debug)]
pub struct GroupSender<T> {
    frames: FrameWriter<T>,
}

impl<T: Serialize> GroupSender<T> {
    pub(super) fn new(stream: SendStream) -> Self {
        Self { frames: FrameWriter::new(stream, Cap::Stream) }
    }

    /// Sends a frame of at most 1 MiB. Waits while the peer reads more slowly. If the future is dropped
    /// before it completes, the stream is unusable.
    pub async fn send(&mut self, frame: &T) -> Result<(), Error> {
        self.frames.write(frame).await
    }
}

/// A stream opened by another coordinator. The connection's certificate identifies that coordinator.
#[derive(Debug)]
pub struct GroupStream(RecvStream);

impl GroupStream {
    pub(super) fn new(stream: RecvStream) -> Self {
        Self(stream)
    }

    pub fn frames<T: DeserializeOwned>(self) -> GroupReceiver<T> {
        GroupReceiver { frames: FrameReader::new(self.0, Cap::Stream) }
    }
}

/// Receiving coordinator's end.
#[derive(Debug)]
pub struct GroupReceiver<T> {
    frames: FrameReader<T>,
}

impl<T: DeserializeOwned> GroupReceiver<T> {
    /// Returns the next frame, or `None` at a clean end. After
    /// [`CodecError::UnknownVariant`](proto::codec::CodecError::UnknownVariant) the stream continues with
    /// the following frame. Cancel-safe.
    pub async fn next(&mut self) -> Option<Result<T, Error>> {
        self.frames.next().await.transpose()
    }
}
