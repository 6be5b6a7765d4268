//! `kvasir coordinator`: one front of a cluster.

use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::path::PathBuf;

/// Runs one coordinator: the OpenAI API, the prefix index, routing.
#[derive(clap::Args)]
#[command(
    after_help = "Example:\n  kvasir coordinator --identity ./c0 --http 0.0.0.0:8080 --quic 0.0.0.0:7000 --config keys.toml\n\n\
    keys.toml:\n  [[keys]]\n  sha256 = \"<SHA-256 of the key, in hexadecimal>\"\n  tenant = \"team-a\""
)]
pub(crate) struct Coordinator {
    #[command(flatten)]
    settings: CoordinatorSettings,
    #[command(flatten)]
    node: NodeArgs,
}

/// Everything that can be set, and nothing that is not; what is not set is computed.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, clap::Args)]
#[serde(deny_unknown_fields)]
pub(crate) struct CoordinatorSettings {
    /// Directory with node.crt, node.key and ca.crt, as `kvasir ca issue` makes it.
    #[arg(long, value_name = "DIR", env = "KVASIR_IDENTITY")]
    pub(crate) identity: Option<PathBuf>,
    /// Where the OpenAI API answers [default: 127.0.0.1:8080].
    #[arg(long, value_name = "ADDR", env = "KVASIR_HTTP")]
    pub(crate) http: Option<SocketAddr>,
    /// Where /livez, /readyz, /metrics and /admin/v1 answer [default: 127.0.0.1:9090].
    #[arg(long, value_name = "ADDR", env = "KVASIR_OPS")]
    pub(crate) ops: Option<SocketAddr>,
    /// UDP address where workers dial in [default: 127.0.0.1:7000].
    #[arg(long, value_name = "ADDR", env = "KVASIR_QUIC")]
    pub(crate) quic: Option<SocketAddr>,
    /// Directory of the cluster's key and salts, shared by its coordinators; made on first use.
    #[arg(long, value_name = "DIR", env = "KVASIR_SECRETS")]
    pub(crate) secrets: Option<PathBuf>,
    /// Keep /readyz at 503 until a POST to /admin/v1/ready; `kvasir up` uses it.
    #[arg(long, value_name = "BOOL", env = "KVASIR_HOLD_READY", hide = true)]
    pub(crate) hold_ready: Option<bool>,
    /// Client keys; in the file only.
    #[arg(skip)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) keys: Option<Vec<KeyEntry>>,
}

/// One `[[keys]]` entry: who a client key belongs to. The key itself is never written down.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct KeyEntry {
    /// SHA-256 of the key, 64 hexadecimal digits.
    pub(crate) sha256: String,
    /// The tenant.
    pub(crate) tenant: String,
}

impl Coordinator {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        Ok(())
    }
}
