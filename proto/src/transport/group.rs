//! What coordinators tell each other: frames of a type that is theirs to define.

use super::streams::{FrameReader, FrameWriter};
use crate::Error;
use crate::codec::Cap;
use quinn::{RecvStream, SendStream};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The end of the coordinator that tells.
#[derive(Debug)]
pub struct GroupSender<T> {
    frames: FrameWriter<T>,
}

impl<T: Serialize> GroupSender<T> {
    pub(super) fn new(stream: SendStream) -> Self {
        Self { frames: FrameWriter::new(stream, Cap::Stream) }
    }

    /// Sends a frame of at most 1 MiB; waits while the other one reads slower than we send. Do not drop the
    /// future halfway and then send on.
    pub async fn send(&mut self, frame: &T) -> Result<(), Error> {
        self.frames.write(frame).await
    }
}

/// A stream that another coordinator has opened; whose it is, its connection's certificate says.
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

/// The end of the coordinator that is told.
#[derive(Debug)]
pub struct GroupReceiver<T> {
    frames: FrameReader<T>,
}

impl<T: DeserializeOwned> GroupReceiver<T> {
    /// The next frame; `None` at a clean end. After
    /// [`CodecError::UnknownVariant`](crate::codec::CodecError::UnknownVariant) the stream goes on behind the
    /// frame that was not understood. Dropping the future loses nothing.
    pub async fn next(&mut self) -> Option<Result<T, Error>> {
        self.frames.next().await.transpose()
    }
}
