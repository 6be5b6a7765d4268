//! KV transfer: a worker pulls the resume point of a prefix from another worker instead of computing it.
//! One pull is one stream: a [`PullRequest`], and back [`PullFrame`]s, each piece's bytes after its frame.
//!
//! The receiver names root and tokens, never ids alone, so it cannot request a prefix whose tokens it does
//! not know. The receiver trusts no reply: it derives the pieces of a resume point and their lengths from
//! its own caches, and every piece carries a digest over everything that decides its bytes.

use crate::block::BlockId;
use crate::ids::NodeId;
use serde::{Deserialize, Serialize};

/// Most bytes that a holder copies from its caches at once, between two of its steps or between two layers of
/// a step; at least one piece is copied. A pull from a busy holder waits for such a point before each slice.
pub const SLICE_BYTES: u64 = 16 << 20;

/// Most transfers that one worker sends at once, to any workers. Further ones are refused, and the receiver
/// computes the prefix.
pub const SENDS_AT_ONCE: usize = 8;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PullRequest {
    /// Digest of everything that must be equal on both sides for the bytes to mean the same: model,
    /// tokenizer, numeric class, layout of the caches.
    pub origin: [u8; 32],
    /// Root of the prefix: tenant, model, tokenizer and adapter.
    pub root: BlockId,
    /// The prefix in whole hash units.
    pub tokens: Vec<u32>,
    /// Leading tokens that the receiver has. Pieces that end before them are not sent.
    pub have: u32,
}

/// Frame of the sender: `Head`, then the announced number of `Piece`s, each followed by its bytes. `Failed`
/// may come at any time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum PullFrame {
    Head(PullHead),
    /// A piece; its bytes follow the frame.
    Piece(PulledPiece),
    Failed(PullRefusal),
}

/// See [`PullFrame::Head`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PullHead {
    /// Tokens of the resume point: at most those requested, and more than the receiver has.
    pub tokens: u32,
    /// Number of pieces that follow: those of this resume point that end after the receiver's tokens,
    /// ordered by end and then by group.
    pub pieces: u32,
}

/// See [`PullFrame::Piece`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PulledPiece {
    pub group: u32,
    /// Tokens up to the end of the piece.
    pub end: u32,
    /// Number of bytes that follow.
    pub bytes: u32,
    /// Digest of the bytes and of everything that they depend on: origin, root, the tokens up to the end,
    /// the group.
    pub digest: [u8; 32],
}

/// Reason why a worker sends nothing, or nothing more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, thiserror::Error)]
pub enum PullRefusal {
    /// The worker has another model, numeric class or cache layout.
    #[error("the holder's caches are of another model, tokenizer or numeric class")]
    OtherOrigin,
    /// The worker holds no more of these tokens than the receiver.
    #[error("the holder does not have the prefix")]
    NotHeld,
    /// The worker already sends [`SENDS_AT_ONCE`] transfers.
    #[error("the holder already serves its limit of transfers")]
    Busy,
    #[error("internal error")]
    Internal,
}

/// A worker that a prefix may be pulled from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PullSource {
    /// The worker that holds the prefix. Its certificate must carry this id.
    pub node: NodeId,
    /// QUIC address, `ip:port`.
    pub quic: String,
    /// Leading tokens of the prompt that the worker is expected to hold.
    pub tokens: u32,
}
