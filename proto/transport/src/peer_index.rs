//! A coordinator's index of one worker's prefixes, for another coordinator. A request goes one way; frames
//! come back as the bytes that their digest covers.

use super::streams::{FrameReader, FrameWriter};
use crate::Error;
use bytes::Bytes;
use proto::codec::Cap;
use proto::event::{PeerIndexAsk, PeerIndexFrame};
use quinn::{RecvStream, SendStream};

const REQUEST: Cap = Cap::Control;
const FRAMES: Cap = Cap::Events;

/// Requesting coordinator's end. Dropping it ends the reply.
#[derive(Debug)]
pub struct PeerIndexStream {
    frames: FrameReader<PeerIndexFrame>,
}

impl PeerIndexStream {
    pub(super) async fn start(
        send: SendStream,
        receive: RecvStream,
        request: &PeerIndexAsk,
    ) -> Result<Self, Error> {
        let mut writer = FrameWriter::new(send, REQUEST);
        writer.write(request).await?;
        writer.finish();
        Ok(Self { frames: FrameReader::new(receive, FRAMES) })
    }

    /// Returns the bytes of the next [`PeerIndexFrame`], at most 4 MiB, or `None` after the last. The first
    /// call returns `None` if the other coordinator has nothing newer.
    pub async fn next(&mut self) -> Result<Option<Bytes>, Error> {
        self.frames.next_bytes().await
    }
}

/// Replying coordinator's end.
#[derive(Debug)]
pub struct PeerIndexCall {
    pub request: PeerIndexAsk,
    frames: FrameWriter<PeerIndexFrame>,
}

impl PeerIndexCall {
    pub(super) async fn read(send: SendStream, receive: RecvStream) -> Result<Self, Error> {
        let request = FrameReader::new(receive, REQUEST).next().await?;
        let request = request.ok_or(Error::StreamCut { what: "a request for a worker's prefixes" })?;
        Ok(Self { request, frames: FrameWriter::new(send, FRAMES) })
    }

    /// Sends the bytes of a [`PeerIndexFrame`]. Waits while the peer reads more slowly.
    pub async fn send(&mut self, frame: &[u8]) -> Result<(), Error> {
        self.frames.write_bytes(frame).await
    }

    pub fn finish(mut self) {
        self.frames.finish();
    }
}
