//! Identity of a member: a coordinator and the incarnation of its disk.

use proto::ids::NodeId;
use serde::{Deserialize, Serialize};

/// Identifies a coordinator's data directory: a random number, drawn when the directory is first written. A
/// coordinator that has lost its data returns with a new incarnation and is another member. So it cannot vote
/// twice in one term.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Incarnation(pub u64);

/// A member's id in Raft, derived from node and incarnation. A receiver verifies it with the sender's
/// certificate. Never 0, which means "no member" in Raft.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct MemberId(u64);

impl MemberId {
    /// The id of `node` with this incarnation.
    pub fn of(node: &NodeId, incarnation: Incarnation) -> Self {
        let mut hash = blake3::Hasher::new();
        hash.update(b"kvasir/raft/member/1");
        hash.update(&incarnation.0.to_le_bytes());
        hash.update(node.as_str().as_bytes());
        let mut bytes = [0; 8];
        hash.finalize_xof().fill(&mut bytes);
        Self(u64::from_le_bytes(bytes).max(1))
    }

    pub fn get(self) -> u64 {
        self.0
    }
}

impl std::fmt::Display for MemberId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}
