//! What a worker asks of another: the resume point of a prefix, so that it need not compute it. One pull is one
//! stream: a [`PullRequest`] goes one way; [`PullFrame`]s come back, each piece's bytes behind its frame.
//!
//! Who asks names root and tokens, never ids alone: what it does not know already it cannot ask for. Nothing that
//! comes back is believed: which pieces belong to a resume point and how long they are the asking worker knows by its
//! own caches, and every piece carries a digest over all that decides its bytes.

use crate::block::BlockId;
use crate::ids::NodeId;
use serde::{Deserialize, Serialize};

/// Bytes that a holder copies out at a time, and one piece more: so a pull from a busy holder takes a layer of a step for
/// every so many bytes.
pub const SLICE_BYTES: u64 = 16 << 20;

/// Workers that one sends to at once; further ones are refused and compute.
pub const SENDS_AT_ONCE: usize = 8;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PullRequest {
    /// Digest of what must be equal on both sides for bytes to mean the same: model, tokenizer, numeric class, layout
    /// of the caches.
    pub origin: [u8; 32],
    /// Root of the prefix: tenant, model, tokenizer and adapter.
    pub root: BlockId,
    /// The prefix, whole hash units.
    pub tokens: Vec<u32>,
    /// Leading tokens that the asking worker has: what ends before them is not sent.
    pub have: u32,
}

/// What comes back: `Head`, then as many `Piece`s as it says, each followed by its bytes; or `Failed`, at any time.
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
    /// Tokens of the resume point: at most those asked for, more than the asking worker has.
    pub tokens: u32,
    /// Pieces that follow: those of this resume point that end behind what the asking worker has, in the order of
    /// their ends, of equal ends in that of their groups.
    pub pieces: u32,
}

/// See [`PullFrame::Piece`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PulledPiece {
    pub group: u32,
    /// Tokens up to its end.
    pub end: u32,
    /// Bytes that follow.
    pub bytes: u32,
    /// Digest of the bytes and of all that they depend on: origin, root, the tokens up to its end, the group.
    pub digest: [u8; 32],
}

/// Why a worker sends nothing, or nothing more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, thiserror::Error)]
pub enum PullRefusal {
    /// It computes something else, or otherwise.
    #[error("it is of another origin")]
    OtherOrigin,
    /// It holds no more of these tokens than the asking worker.
    #[error("it does not hold the prefix")]
    NotHeld,
    /// It sends to as many others already as it may.
    #[error("it sends to too many others")]
    Busy,
    #[error("internal error")]
    Internal,
}

/// Where a worker may pull from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PullSource {
    /// The worker that holds the prefix; its certificate must say so.
    pub node: NodeId,
    /// Where it is reached by QUIC, `ip:port`.
    pub quic: String,
    /// Leading tokens of the prompt that it is expected to hold.
    pub tokens: u32,
}
