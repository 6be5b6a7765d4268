//! One pull of a prefix's resume point on one stream: the request goes one way, frames and the bytes of pieces, which
//! no codec touches, come back.

use super::streams::{FrameReader, FrameWriter, read_request};
use crate::Error;
use crate::codec::Cap;
use crate::pull::{PullFrame, PullHead, PullRefusal, PullRequest, PulledPiece};
use quinn::{RecvStream, SendStream};

/// The asking worker's end. Dropping it before the last piece cancels the pull.
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
        let mut writer = FrameWriter::new(send, Cap::GenerateRequest);
        writer.write(request).await?;
        writer.finish();
        Ok(Self { frames: FrameReader::new(receive, Cap::Stream) })
    }

    /// What will follow; [`Error::PullRefused`] is the peer's answer too. To be asked once, first.
    pub async fn head(&mut self) -> Result<PullHead, Error> {
        match self.next().await? {
            PullFrame::Head(head) => Ok(head),
            PullFrame::Failed(refusal) => Err(Error::PullRefused(refusal)),
            PullFrame::Piece(_) => Err(Error::Protocol("a piece before the head of a pull")),
        }
    }

    /// The next piece. `length` says how many bytes such a piece has, or that there is none; of one that announces
    /// anything else no byte is read.
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
        let length = length.ok_or(Error::Protocol("a pulled piece is not of the prefix"))?;
        let mut bytes = Vec::new();
        self.frames.read_raw(length, &mut bytes).await?;
        Ok((piece, bytes))
    }

    async fn next(&mut self) -> Result<PullFrame, Error> {
        self.frames.next().await?.ok_or(Error::StreamCut { what: "the end of a pull" })
    }
}

/// The holder's end: what is asked, and where the answer goes.
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

/// Where a holder sends its answer. Dropped before the end, the asking worker sees a stream that was cut off.
#[derive(Debug)]
pub struct PullReply {
    frames: FrameWriter<PullFrame>,
}

impl PullReply {
    pub async fn head(&mut self, head: PullHead) -> Result<(), Error> {
        self.frames.write(&PullFrame::Head(head)).await
    }

    /// Sends a piece; waits while the other side reads slower than we send. Fails with [`Error::StreamEnded`] once
    /// nobody wants it any more.
    pub async fn piece(&mut self, piece: PulledPiece, bytes: &[u8]) -> Result<(), Error> {
        if usize::try_from(piece.bytes) != Ok(bytes.len()) {
            return Err(Error::Protocol("a piece's bytes are not as many as its frame says"));
        }
        self.frames.write(&PullFrame::Piece(piece)).await?;
        self.frames.write_raw(bytes).await
    }

    pub fn finish(mut self) {
        self.frames.finish();
    }

    /// Says why nothing follows, or nothing more.
    pub async fn fail(mut self, refusal: PullRefusal) -> Result<(), Error> {
        self.frames.write(&PullFrame::Failed(refusal)).await?;
        self.frames.finish();
        Ok(())
    }

    /// Resolves as soon as nobody reads any more: the pull is cancelled, the connection is gone, or all has arrived.
    pub fn cancelled(&self) -> impl Future<Output = ()> + Send + 'static {
        let stopped = self.frames.stream().stopped();
        async move {
            let _ = stopped.await;
        }
    }
}
