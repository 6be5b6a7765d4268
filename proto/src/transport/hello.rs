//! The first words on a connection: both sides say which protocol versions they speak, who they are and in
//! which life, and both work out the same version.

use super::identity::PeerIdentity;
use crate::Error;
use crate::ids::{Epoch, NodeId};
use serde::{Deserialize, Serialize};

/// A range of protocol versions, both ends included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct VersionRange {
    pub min: u16,
    pub max: u16,
}

impl VersionRange {
    /// The versions of this build. 1 to 6 were never released: builds from before v0.1.0 spoke them.
    pub const CURRENT: Self = Self { min: 7, max: 7 };

    /// The newest version in both ranges.
    pub fn newest_common(self, other: Self) -> Option<u16> {
        let newest = self.max.min(other.max);
        (newest >= self.min.max(other.min)).then_some(newest)
    }
}

impl std::fmt::Display for VersionRange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} to {}", self.min, self.max)
    }
}

/// The first message of each side. Its form never changes under one ALPN name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    pub versions: VersionRange,
    /// Must equal the certificate's node id.
    pub node: NodeId,
    /// This life of the process.
    pub epoch: Epoch,
}

/// What a connection is, once both hellos are known.
#[derive(Debug, Clone)]
pub(super) struct Agreement {
    pub(super) version: u16,
    pub(super) peer_epoch: Epoch,
}

/// Judges the peer's hello. Both sides run this and come to the same version.
pub(super) fn agree(ours: VersionRange, peer: &PeerIdentity, hello: Hello) -> Result<Agreement, Error> {
    if hello.node != peer.node {
        return Err(Error::Spoofed { certified: peer.clone(), claimed: hello.node });
    }
    let theirs = hello.versions;
    let version = ours.newest_common(theirs).ok_or_else(|| Error::VersionMismatch {
        ours,
        theirs,
        peer: peer.clone(),
    })?;
    Ok(Agreement { version, peer_epoch: hello.epoch })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newest_common_version_is_symmetric() {
        let range = |min, max| VersionRange { min, max };
        for (a, b, common) in [
            (range(1, 1), range(1, 1), Some(1)),
            (range(1, 3), range(2, 5), Some(3)),
            (range(1, 3), range(3, 9), Some(3)),
            (range(2, 9), range(4, 5), Some(5)),
            (range(1, 2), range(3, 4), None),
            // A range turned upside down speaks nothing.
            (range(5, 2), range(1, 9), None),
        ] {
            assert_eq!(a.newest_common(b), common, "{a} and {b}");
            assert_eq!(b.newest_common(a), common, "{b} and {a}");
        }
    }
}
