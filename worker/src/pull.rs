//! A resume point that another worker holds, as the engine sees it: something that can be fetched while requests wait,
//! for a bounded time, within a bounded number of bytes, and that is computed if it does not come.
//!
//! The engine says what it wants ([`PullOrder`]) and takes pieces in ([`PullDelivery`]); how they travel is the business of
//! whoever implements [`Source`]. Nothing is believed: a piece counts only with the digest that its tokens, root and
//! origin give its bytes.

use crate::pieces::{Namer, PrefixNames};
use proto::block::{BlockId, HASH_UNIT_TOKENS};
use proto::pull::{PullRequest, PulledPiece};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;

/// Another worker that is expected to hold a prefix of a prompt.
pub trait Source: Send {
    /// How many leading tokens.
    fn tokens(&self) -> u32;

    /// Starts to fetch. Called on the engine's thread: it must not block. Fetching ends as soon as nobody wants the
    /// delivery any more ([`PullDelivery::unwanted`]).
    fn fetch(self: Box<Self>, order: PullOrder, delivery: PullDelivery);
}

/// Why a pull brings less than was hoped for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PullFailure {
    /// The holder cannot be reached, or not as the worker that it should be.
    Unreachable,
    /// The holder is of another origin, or does not hold the prefix.
    Refused,
    /// The holder has gone before everything had come.
    Lost,
    /// What came is not what was asked for.
    Damaged,
    /// It took longer than computing would.
    Patience,
    /// Too many bytes are on their way already.
    Budget,
    /// Live sequences hold too much of the arena.
    NoRoom,
}

impl PullFailure {
    /// Its name in metrics and lookup reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Unreachable => "unreachable",
            Self::Refused => "refused",
            Self::Lost => "lost",
            Self::Damaged => "damaged",
            Self::Patience => "patience",
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
    /// Bytes of a piece, by group.
    piece_bytes: Vec<usize>,
    /// Bytes of all pieces at most.
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

    /// What to ask the holder.
    pub fn request(&self) -> PullRequest {
        let (origin, root, have) = (self.origin, self.root, self.have);
        PullRequest { origin, root, tokens: self.tokens.to_vec(), have }
    }

    /// Bytes of all pieces together at most.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// How long the bytes of a piece must be; `None`: there can be no such piece.
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

/// Where what is fetched goes. Dropped without [`PullDelivery::end`], the holder counts as lost.
#[derive(Debug)]
pub struct PullDelivery {
    to: mpsc::UnboundedSender<PullEvent>,
}

/// What arrives at the engine.
#[derive(Debug)]
pub(crate) enum PullEvent {
    /// A sound piece: group, end, bytes.
    Piece(usize, u32, Arc<[u8]>),
    /// So many bytes took so long once the holder had begun to send them.
    Travelled(u64, Duration),
    End(Result<(), PullFailure>),
}

impl PullDelivery {
    pub(crate) fn new() -> (Self, mpsc::UnboundedReceiver<PullEvent>) {
        let (to, inbox) = mpsc::unbounded_channel();
        (Self { to }, inbox)
    }

    /// Hands on a piece whose bytes are sound.
    pub fn piece(&self, piece: &PulledPiece, bytes: Vec<u8>) {
        // Nobody wants it any more: that is noticed by `unwanted`.
        let _ = self.to.send(PullEvent::Piece(piece.group as usize, piece.end, bytes.into()));
    }

    /// So many bytes took so long, without what the holder did before it began to send them.
    pub fn travelled(&self, bytes: u64, took: Duration) {
        let _ = self.to.send(PullEvent::Travelled(bytes, took));
    }

    pub fn end(self, outcome: Result<(), PullFailure>) {
        let _ = self.to.send(PullEvent::End(outcome));
    }

    /// Resolves when nobody wants it any more.
    pub async fn unwanted(&self) {
        self.to.closed().await;
    }
}
