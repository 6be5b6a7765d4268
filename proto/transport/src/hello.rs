//! Hello: the first message of each side on a connection. Both sides send their protocol versions, node id
//! and epoch, and compute the same version.

use crate::Error;
use pki::PeerIdentity;
use proto::ids::{Epoch, NodeId};
use serde::{Deserialize, Serialize};

/// A range of protocol versions, both ends included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct VersionRange {
    pub min: u16,
    pub max: u16,
}

impl VersionRange {
    /// Versions of this build. 1 to 6 were used only by builds before v0.1.0, which were never released.
    pub const CURRENT: Self = Self { min: 7, max: 7 };

    /// Returns the newest version in both ranges.
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

/// First message of each side. Its form never changes under one ALPN name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    pub versions: VersionRange,
    /// Must equal the certificate's node id.
    pub node: NodeId,
    /// Epoch of this run of the process.
    pub epoch: Epoch,
}

/// Result of the exchange of hellos.
#[derive(Debug, Clone)]
pub(super) struct Agreement {
    pub(super) version: u16,
    pub(super) peer_epoch: Epoch,
}

/// Checks the peer's hello. Both sides run this and get the same version.
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
            // An inverted range contains no version.
            (range(5, 2), range(1, 9), None),
        ] {
            assert_eq!(a.newest_common(b), common, "{a} and {b}");
            assert_eq!(b.newest_common(a), common, "{b} and {a}");
        }
    }
}
