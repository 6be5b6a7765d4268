//! `kvasir worker`: one engine of a cluster.

use crate::config::ByteSize;
use crate::cpus::CpuSet;
use crate::numerics::{ActivationsArg, Device, KvTypeArg};
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::path::PathBuf;

/// Runs one worker: weights, KV cache and arithmetic behind the coordinators it dials.
#[derive(clap::Args)]
#[command(
    after_help = "Example:\n  kvasir worker --identity ./w0 --coordinators 10.0.0.1:7000 --model smollm2-135m\n  \
    kvasir worker --config worker.toml --explain"
)]
pub(crate) struct Worker {
    #[command(flatten)]
    settings: WorkerSettings,
    #[command(flatten)]
    node: NodeArgs,
}

/// Everything that can be set, and nothing that is not; what is not set is computed.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, clap::Args)]
#[serde(deny_unknown_fields)]
pub(crate) struct WorkerSettings {
    /// Directory with node.crt, node.key and ca.crt, as `kvasir ca issue` makes it.
    #[arg(long, value_name = "DIR", env = "KVASIR_IDENTITY")]
    pub(crate) identity: Option<PathBuf>,
    /// UDP addresses of all coordinators, names or numbers, separated by commas.
    #[arg(long, value_name = "HOST:PORT,..", env = "KVASIR_COORDINATORS", value_delimiter = ',')]
    pub(crate) coordinators: Option<Vec<String>>,
    /// Catalog name or path of a .gguf file.
    #[arg(long, value_name = "MODEL", env = "KVASIR_MODEL")]
    pub(crate) model: Option<PathBuf>,
    /// The model's name in the API [default: catalog name or file stem].
    #[arg(long, value_name = "ID", env = "KVASIR_MODEL_ID")]
    pub(crate) model_id: Option<String>,
    /// UDP address where other nodes reach this one [default: 0.0.0.0:7000].
    #[arg(long, value_name = "ADDR", env = "KVASIR_QUIC")]
    pub(crate) quic: Option<SocketAddr>,
    /// Where /livez, /readyz and /metrics answer [default: 127.0.0.1:9090].
    #[arg(long, value_name = "ADDR", env = "KVASIR_OPS")]
    pub(crate) ops: Option<SocketAddr>,
    /// Compute threads.
    #[arg(long, value_name = "N", env = "KVASIR_THREADS")]
    pub(crate) threads: Option<usize>,
    /// CPUs to compute on, such as 0-3,8; unset, threads are not pinned and do not spin.
    #[arg(long, value_name = "LIST", env = "KVASIR_CPUS")]
    pub(crate) cpus: Option<CpuSet>,
    /// What to compute on.
    #[arg(long, value_enum, env = "KVASIR_DEVICE")]
    pub(crate) device: Option<Device>,
    /// Memory for KV, such as 2GiB.
    #[arg(long, value_name = "SIZE", env = "KVASIR_KV_BYTES")]
    pub(crate) kv_bytes: Option<ByteSize>,
    /// Tokens of a KV block: 16, 32 or 64.
    #[arg(long, value_name = "N", env = "KVASIR_BLOCK_TOKENS")]
    pub(crate) block_tokens: Option<usize>,
    /// Element type of the KV cache.
    #[arg(long, value_enum, env = "KVASIR_KV_TYPE")]
    pub(crate) kv_type: Option<KvTypeArg>,
    /// What quantised matrices are multiplied with.
    #[arg(long, value_enum, env = "KVASIR_ACTIVATIONS")]
    pub(crate) activations: Option<ActivationsArg>,
    /// Sequences computed at a time.
    #[arg(long, value_name = "N", env = "KVASIR_MAX_SEQS")]
    pub(crate) max_seqs: Option<usize>,
    /// Prompt tokens computed in one step at most.
    #[arg(long, value_name = "N", env = "KVASIR_CHUNK")]
    pub(crate) chunk: Option<usize>,
    /// What the node keeps over restarts.
    #[arg(long, value_name = "DIR", env = "KVASIR_DATA_DIR")]
    pub(crate) data_dir: Option<PathBuf>,
}

const MAX_SEQS: usize = 4096;
/// Requests that run when a worker is told to end get this long.
const DRAIN_DEADLINE: Duration = Duration::from_secs(30);

impl Worker {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        let settings: WorkerSettings = config::layered(self.node.config.as_deref(), &self.settings)?;
        settings.check()?;
        let (settings, explained) = settings.complete()?;
        if self.node.answer(&settings, &explained)? {
            return Ok(());
        }
        let identity = settings.identity()?;
        let config = settings.service()?;
        // Arithmetic has threads of its own; these only move bytes.
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        runtime.block_on(async {
            let mut signals = StopSignals::listen()?;
            let service = tokio::select! {
                service = WorkerService::start(config, &identity) => service?,
                () = signals.next() => return Ok(()),
            };
            let announcement = Announcement {
                id: identity.name().node.to_string(),
                pid: std::process::id(),
                http: None,
                ops: service.ops_address(),
                quic: service.quic_address(),
            };
            announcement.print()?;
            signals.next().await;
            tracing::info!("draining");
            tokio::select! {
                () = service.drain() => {}
                () = tokio::time::sleep(DRAIN_DEADLINE) => tracing::warn!("requests still run; ending anyway"),
                () = signals.next() => {}
            }
            service.stop().await;
            Ok(())
        })
    }
}
