//! Codes with which a node closes a connection.

use quinn::VarInt;

/// Reason why a node closes a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CloseCode {
    Shutdown,
    /// The nodes have no protocol version in common.
    VersionMismatch,
    /// A message body contained another node's name.
    Spoofed,
    /// The peer violated the protocol.
    Protocol,
    /// The node was declared dead, or a newer connection or epoch of it has replaced this one.
    Fenced,
    /// The node's GPU is lost for this run of the process, which ends. A new run may work again.
    DeviceLost,
    /// The peer's certificate was revoked.
    Revoked,
}

impl CloseCode {
    pub(super) fn to_wire(self) -> VarInt {
        VarInt::from_u32(match self {
            Self::Shutdown => 0,
            Self::VersionMismatch => 1,
            Self::Spoofed => 2,
            Self::Protocol => 3,
            Self::Fenced => 4,
            Self::DeviceLost => 5,
            Self::Revoked => 6,
        })
    }

    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Shutdown => "shutdown",
            Self::VersionMismatch => "version mismatch",
            Self::Spoofed => "spoofed name",
            Self::Protocol => "protocol violation",
            Self::Fenced => "fenced",
            Self::DeviceLost => "device lost",
            Self::Revoked => "certificate revoked",
        }
    }
}
