//! KV transfers as the engine sees them: a resume point at another worker that can be fetched while requests
//! wait, within a bounded time and a bounded number of bytes. If it does not arrive, it is computed.
//!
//! The engine passes a [`PullOrder`] and receives pieces through the [`PullDelivery`]. The implementation of
//! [`Source`] does the transport. Nothing is trusted: a piece is accepted only if its digest matches its
//! bytes, tokens, root and origin.

use crate::pieces::{Namer, PrefixNames};
use proto::block::{BlockId, HASH_UNIT_TOKENS};
use proto::pull::{PullRequest, PulledPiece};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;

/// Another worker that probably holds a prefix of a prompt.
pub trait Source: Send {
    /// Number of leading tokens that it probably holds.
    fn tokens(&self) -> u32;

    /// Starts to fetch. Called on the engine's thread, so implementations must not block. Fetching must end
    /// when the pieces are no longer needed ([`PullDelivery::unwanted`]).
    fn fetch(self: Box<Self>, order: PullOrder, delivery: PullDelivery);
}

/// Why a pull brings less than expected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PullFailure {
    /// The holder cannot be reached, or its identity is not the expected one.
    Unreachable,
    /// The holder is busy, is of another origin, holds no more of the prefix than the receiver, or no longer
    /// has one of the pieces. A holder of a shorter prefix than requested offers that one.
    Refused,
    /// The connection to the holder was lost before everything arrived.
    Lost,
    /// A received piece is not the requested one.
    Damaged,
    /// The pull exceeded its time limit.
    TimedOut,
    /// Too many bytes are already in flight.
    Budget,
    /// Live sequences hold too much of the arena.
    NoRoom,
}

impl PullFailure {
    /// Label in metrics and lookup reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Unreachable => "unreachable",
            Self::Refused => "refused",
            Self::Lost => "lost",
            Self::Damaged => "damaged",
            Self::TimedOut => "timed_out",
            Self::Budget => "budget",
            Self::NoRoom => "no_room",
        }
    }
}

#[derive(Debug, Clone)]
pub struct PullOrder {
    origin: [u8; 32],
    root: BlockId,
    tokens: Arc<[u32]>,
    have: u32,
    names: PrefixNames,
    /// Bytes of a piece of each group.
    piece_bytes: Vec<usize>,
    /// Maximum number of bytes of all pieces.
    bytes: u64,
}

impl PullOrder {
    pub(crate) fn new(
        namer: &Namer,
        (root, tokens): (BlockId, Arc<[u32]>),
        have: u32,
        piece_bytes: Vec<usize>,
        bytes: u64,
    ) -> Self {
        let names = namer.names(root, &tokens);
        Self { origin: namer.origin(), root, tokens, have, names, piece_bytes, bytes }
    }

    /// The request to the holder.
    pub fn request(&self) -> PullRequest {
        let (origin, root, have) = (self.origin, self.root, self.have);
        PullRequest { origin, root, tokens: self.tokens.to_vec(), have }
    }

    /// Maximum number of bytes of all pieces together.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Required number of bytes of a piece. `None` if the piece is not part of the order.
    pub fn length(&self, piece: &PulledPiece) -> Option<usize> {
        let bytes = *self.piece_bytes.get(piece.group as usize)?;
        let inside = piece.end > self.have && piece.end as usize <= self.tokens.len();
        let whole = (piece.end as usize).is_multiple_of(HASH_UNIT_TOKENS);
        (inside && whole && usize::try_from(piece.bytes) == Ok(bytes)).then_some(bytes)
    }

    /// Whether these are the bytes of that piece of this prefix.
    pub fn is_sound(&self, piece: &PulledPiece, bytes: &[u8]) -> bool {
        let key = self.names.piece(piece.group as usize, piece.end);
        key.is_some_and(|key| key.digest(bytes) == piece.digest)
    }
}

/// Receiver of the fetched pieces. If it is dropped without [`PullDelivery::end`], the holder counts as lost.
#[derive(Debug)]
pub struct PullDelivery {
    to: mpsc::UnboundedSender<PullEvent>,
}

/// Events for the engine.
#[derive(Debug)]
pub(crate) enum PullEvent {
    /// A verified piece: group, end, bytes.
    Piece(usize, u32, Arc<[u8]>),
    /// Bytes received and the time that they took since the holder began to send.
    Travelled(u64, Duration),
    End(Result<(), PullFailure>),
}

impl PullDelivery {
    pub(crate) fn new() -> (Self, mpsc::UnboundedReceiver<PullEvent>) {
        let (to, inbox) = mpsc::unbounded_channel();
        (Self { to }, inbox)
    }

    /// Passes on a piece whose bytes are verified.
    pub fn piece(&self, piece: &PulledPiece, bytes: Vec<u8>) {
        // If the receiver is gone, `unwanted` reports it.
        let _ = self.to.send(PullEvent::Piece(piece.group as usize, piece.end, bytes.into()));
    }

    /// Records the time that `bytes` bytes took, without the time before the holder began to send.
    pub fn travelled(&self, bytes: u64, took: Duration) {
        let _ = self.to.send(PullEvent::Travelled(bytes, took));
    }

    pub fn end(self, outcome: Result<(), PullFailure>) {
        let _ = self.to.send(PullEvent::End(outcome));
    }

    /// Resolves when no request needs the pieces any more.
    pub async fn unwanted(&self) {
        self.to.closed().await;
    }
}
