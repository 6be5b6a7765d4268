//! One request for a manifest or for chunks on one stream. The request goes to the holder; frames and raw
//! bytes come back. These streams have the lowest priority on a connection.

use super::streams::{FrameReader, FrameWriter, ask, read_request, within};
use crate::Error;
use bytes::Bytes;
use proto::codec::Cap;
use proto::shard::{ShardFrame, ShardRefusal, ShardRequest};
use quinn::{RecvStream, SendStream};
use std::time::Duration;

/// A holder that sends nothing for this long has failed.
const STALL: Duration = Duration::from_secs(10);
/// Below the 0 of all other streams between workers.
const PRIORITY: i32 = -1;

/// Receiver's end. Dropping it before the last reply cancels the request.
#[derive(Debug)]
pub struct ShardStream {
    frames: FrameReader<ShardFrame>,
}

impl ShardStream {
    pub(super) async fn start(
        send: SendStream,
        receive: RecvStream,
        request: &ShardRequest,
    ) -> Result<Self, Error> {
        Ok(Self { frames: ask(send, receive, Cap::GenerateRequest, request).await? })
    }

    /// Returns the next requested item, or `None` if the peer does not hold it. See [`Self::next_into`].
    pub async fn next(&mut self, max_bytes: usize) -> Result<Option<Vec<u8>>, Error> {
        let mut bytes = Vec::new();
        let here = self.next_into(max_bytes, |part| bytes.extend_from_slice(part)).await?;
        Ok(here.then_some(bytes))
    }

    /// Passes the next requested item to `take`, in parts as they arrive. Returns `false` if the peer does
    /// not hold it. Fails before reading any bytes if the item is longer than `max_bytes`, and if nothing
    /// arrives for ten seconds.
    pub async fn next_into(&mut self, max_bytes: usize, mut take: impl FnMut(&[u8])) -> Result<bool, Error> {
        let frame = within("an answer of a holder", STALL, self.frames.next()).await?;
        let frame = frame.ok_or(Error::StreamCut { what: "an answer of a holder" })?;
        let length = match frame {
            ShardFrame::Bytes(length) => length,
            ShardFrame::NotHeld => return Ok(false),
            ShardFrame::Failed(refusal) => return Err(Error::ShardRefused(refusal)),
        };
        let length = usize::try_from(length).ok().filter(|length| *length <= max_bytes);
        let mut left = length.ok_or(Error::Protocol("the answer has more bytes than the requested chunk"))?;
        while left > 0 {
            let part = within("more bytes of a holder", STALL, self.frames.read_some(left)).await?;
            left = left.saturating_sub(part.len());
            take(&part);
        }
        Ok(true)
    }
}

/// Holder's end: the request, and the sender of the replies.
#[derive(Debug)]
pub struct ShardCall {
    pub request: ShardRequest,
    pub reply: ShardReply,
}

impl ShardCall {
    pub(super) async fn read(send: SendStream, receive: RecvStream) -> Result<Self, Error> {
        // Fails only for an ended stream, which needs no priority.
        let _ = send.set_priority(PRIORITY);
        let (request, frames) = read_request(send, receive, "a request for chunks").await?;
        Ok(Self { request, reply: ShardReply { frames } })
    }
}

/// Sends the holder's replies. If it is dropped before the end, the receiver sees a stream that was cut
/// off.
#[derive(Debug)]
pub struct ShardReply {
    frames: FrameWriter<ShardFrame>,
}

impl ShardReply {
    /// Sends the next requested item without copying it. Waits while the receiver reads more slowly.
    pub async fn bytes(&mut self, bytes: impl Into<Bytes>) -> Result<(), Error> {
        let bytes = bytes.into();
        let length = u32::try_from(bytes.len()).map_err(|_| Error::Protocol("an answer of over 4 GiB"))?;
        self.frames.write_with(&ShardFrame::Bytes(length), bytes).await.map(drop)
    }

    /// Reports that the next requested item is not held.
    pub async fn not_held(&mut self) -> Result<(), Error> {
        self.frames.write(&ShardFrame::NotHeld).await
    }

    pub fn finish(mut self) {
        self.frames.finish();
    }

    /// Sends the reason why nothing, or nothing more, follows.
    pub async fn fail(mut self, refusal: ShardRefusal) -> Result<(), Error> {
        self.frames.write(&ShardFrame::Failed(refusal)).await?;
        self.frames.finish();
        Ok(())
    }

    /// Resolves once the stream is no longer read: the request is cancelled, the connection is lost, or
    /// everything has arrived.
    pub fn cancelled(&self) -> impl Future<Output = ()> + Send + 'static {
        self.frames.unread()
    }
}
