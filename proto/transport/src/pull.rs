//! One pull of a prefix's resume point on one stream. The request goes to the holder; frames and the
//! pieces' raw bytes come back.

use super::streams::{FrameReader, FrameWriter, ask, read_request};
use crate::Error;
use proto::codec::Cap;
use proto::pull::{PullFrame, PullHead, PullRefusal, PullRequest, PulledPiece};
use quinn::{RecvStream, SendStream};

/// Receiver's end. Dropping it before the last piece cancels the pull.
#[derive(Debug)]
pub struct PullStream {
    frames: FrameReader<PullFrame>,
}

impl PullStream {
    pub(super) async fn start(
        send: SendStream,
        receive: RecvStream,
        request: &PullRequest,
    ) -> Result<Self, Error> {
        Ok(Self { frames: ask(send, receive, Cap::GenerateRequest, request).await? })
    }

    /// Returns the head. Fails with [`Error::PullRefused`] if the peer refuses. Call it once, before
    /// [`piece`](Self::piece).
    pub async fn head(&mut self) -> Result<PullHead, Error> {
        match self.next().await? {
            PullFrame::Head(head) => Ok(head),
            PullFrame::Failed(refusal) => Err(Error::PullRefused(refusal)),
            PullFrame::Piece(_) => Err(Error::Protocol("a piece before the head of a pull")),
        }
    }

    /// Returns the next piece. `length` returns the expected length of a piece in bytes, or `None` if no
    /// such piece is expected. A piece that announces another length is refused before any of its bytes are
    /// read.
    pub async fn piece(
        &mut self,
        length: impl FnOnce(&PulledPiece) -> Option<usize>,
    ) -> Result<(PulledPiece, Vec<u8>), Error> {
        let piece = match self.next().await? {
            PullFrame::Piece(piece) => piece,
            PullFrame::Failed(refusal) => return Err(Error::PullRefused(refusal)),
            PullFrame::Head(_) => return Err(Error::Protocol("a second head of a pull")),
        };
        let length = length(&piece).filter(|length| usize::try_from(piece.bytes) == Ok(*length));
        let length = length.ok_or(Error::Protocol("a received piece does not belong to the prefix"))?;
        let mut bytes = Vec::new();
        self.frames.read_raw(length, &mut bytes).await?;
        Ok((piece, bytes))
    }

    async fn next(&mut self) -> Result<PullFrame, Error> {
        self.frames.next().await?.ok_or(Error::StreamCut { what: "the end of a pull" })
    }
}

/// Holder's end: the request, and the sender of the reply.
#[derive(Debug)]
pub struct PullCall {
    pub request: PullRequest,
    pub reply: PullReply,
}

impl PullCall {
    pub(super) async fn read(send: SendStream, receive: RecvStream) -> Result<Self, Error> {
        let (request, frames) = read_request(send, receive, "a pull's request").await?;
        Ok(Self { request, reply: PullReply { frames } })
    }
}

/// Sends the holder's reply. If it is dropped before the end, the receiver sees a stream that was cut off.
#[derive(Debug)]
pub struct PullReply {
    frames: FrameWriter<PullFrame>,
}

impl PullReply {
    pub async fn head(&mut self, head: PullHead) -> Result<(), Error> {
        self.frames.write(&PullFrame::Head(head)).await
    }

    /// Sends a piece. Waits while the receiver reads more slowly. Fails with [`Error::StreamEnded`] once
    /// the receiver has cancelled.
    pub async fn piece(&mut self, piece: PulledPiece, bytes: &[u8]) -> Result<(), Error> {
        if usize::try_from(piece.bytes) != Ok(bytes.len()) {
            return Err(Error::Protocol("a piece has another length than its frame says"));
        }
        self.frames.write(&PullFrame::Piece(piece)).await?;
        self.frames.write_raw(bytes).await
    }

    pub fn finish(mut self) {
        self.frames.finish();
    }

    /// Sends the reason why nothing, or nothing more, follows.
    pub async fn fail(mut self, refusal: PullRefusal) -> Result<(), Error> {
        self.frames.write(&PullFrame::Failed(refusal)).await?;
        self.frames.finish();
        Ok(())
    }

    /// Resolves once the stream is no longer read: the pull is cancelled, the connection is lost, or
    /// everything has arrived.
    pub fn cancelled(&self) -> impl Future<Output = ()> + Send + 'static {
        self.frames.unread()
    }
}
