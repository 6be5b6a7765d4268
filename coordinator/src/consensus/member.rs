//! Who takes part in the agreement: a coordinator in one life of its disk.

use proto::ids::NodeId;
use serde::{Deserialize, Serialize};

/// One life of a coordinator's data directory: drawn at random when the directory is first written. A
/// coordinator whose data is gone comes back with another one and is another member, so that it cannot vote
/// a second time where it has voted before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Incarnation(pub u64);

/// A member's number in Raft: follows from who it is, so that whoever knows a sender's certificate can check
/// the number that it uses. Never zero, which is nobody in Raft.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct MemberId(u64);

impl MemberId {
    /// The number of `node` in this life.
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
