//! What a node says on stdout, as one line, when it has bound its ports and answers on them.

use serde::{Deserialize, Serialize};
use std::io::Write;
use std::net::SocketAddr;

/// The addresses that a node really listens on, ports that it was free to choose included.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Announcement {
    pub(crate) id: String,
    pub(crate) pid: u32,
    /// The API; coordinators only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) http: Option<SocketAddr>,
    pub(crate) ops: SocketAddr,
    pub(crate) quic: SocketAddr,
}

impl Announcement {
    /// Prints the line. Nothing else goes to a node's stdout.
    pub(crate) fn print(&self) -> anyhow::Result<()> {
        let mut out = std::io::stdout().lock();
        writeln!(out, "{}", serde_json::to_string(self)?)?;
        Ok(out.flush()?)
    }
}
