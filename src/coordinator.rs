//! `kvasir coordinator`: runs one coordinator of a cluster.

use crate::config::{self, ByteSize, ConfigError, Period};
use crate::node::{Announcement, Explained, NodeArgs, StopSignals, keep_renewed};
use crate::{allocator, cluster_key, home, models, otlp};
use coordinator::api::auth::KeyEntry;
use coordinator::config::Config;
use coordinator::config::PeerEntry;
use coordinator::models::ModelEntry;
use coordinator::routing::Routing;
use coordinator::server::{self, StartError};
use proto::ids::NodeId;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};

/// Prompts, texts and memos allocate and free megabytes, also after minutes without load. On a virtual
/// machine whose host reclaimed free memory, getting 2 MiB back takes milliseconds.
const KEEP_FREE_MEMORY: Duration = Duration::from_secs(600);

/// Runs one coordinator: the OpenAI API, the prefix index, routing.
#[derive(clap::Args)]
#[command(
    after_help = "Example:\n  kvasir coordinator --identity ./c0 --models smollm2-135m --http 0.0.0.0:8080 --quic 0.0.0.0:7000 --config keys.toml\n\n\
    kvasir coordinator --identity ./c0 --models smollm2-135m --quic 10.0.0.1:7000 --data-dir ./c0-data \\\n    \
    --peers c0=10.0.0.1:7000,c1=10.0.0.2:7000,c2=10.0.0.3:7000\n\n\
    keys.toml:\n  [[keys]]\n  sha256 = \"<SHA-256 of the key, in hexadecimal>\"\n  tenant = \"team-a\"\n\n\
    It prints one line of JSON with its addresses when it listens; logs go to stderr."
)]
pub(crate) struct Coordinator {
    #[command(flatten)]
    settings: CoordinatorSettings,
    #[command(flatten)]
    node: NodeArgs,
}

/// Everything that can be set; what is not set has a default.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, clap::Args)]
#[serde(deny_unknown_fields)]
pub(crate) struct CoordinatorSettings {
    /// Directory with node.crt, node.key and ca.crt, as `kvasir ca issue` makes it.
    #[arg(long, value_name = "DIR", env = "KVASIR_IDENTITY")]
    pub(crate) identity: Option<PathBuf>,
    /// Models that the API offers, separated by commas: catalog names, paths, or ID=PATH.
    #[arg(long, value_name = "MODEL,..", env = "KVASIR_MODELS", value_delimiter = ',')]
    pub(crate) models: Option<Vec<String>>,
    /// Where the OpenAI API answers [default: 127.0.0.1:8080]; elsewhere than on loopback only with keys.
    #[arg(long, value_name = "ADDR", env = "KVASIR_HTTP", value_parser = config::listen)]
    #[serde(default, deserialize_with = "config::listen_in_file")]
    pub(crate) http: Option<SocketAddr>,
    /// Where /livez, /readyz, /metrics and /admin/v1 answer [default: 127.0.0.1:9090].
    #[arg(long, value_name = "ADDR", env = "KVASIR_OPS", value_parser = config::listen)]
    #[serde(default, deserialize_with = "config::listen_in_file")]
    pub(crate) ops: Option<SocketAddr>,
    /// UDP address where workers and other coordinators dial in [default: 127.0.0.1:7000].
    #[arg(long, value_name = "ADDR", env = "KVASIR_QUIC", value_parser = config::listen)]
    #[serde(default, deserialize_with = "config::listen_in_file")]
    pub(crate) quic: Option<SocketAddr>,
    /// All coordinators of the group, at most 5, separated by commas; this one may be left out. Needs a data
    /// directory. The same at each of them when the group is founded.
    #[arg(long, value_name = "NAME=HOST:PORT,..", env = "KVASIR_PEERS", value_delimiter = ',')]
    pub(crate) peers: Option<Vec<String>>,
    /// Directory for what the coordinators agree on, such as which workers drain; nobody else's. Without it
    /// nothing of that is kept over a restart.
    #[arg(long, value_name = "DIR", env = "KVASIR_DATA_DIR")]
    pub(crate) data_dir: Option<PathBuf>,
    /// File of the key that keys all block ids, shared by all coordinators [default: cluster.key in
    /// $KVASIR_HOME]; made on first use.
    #[arg(long, value_name = "FILE", env = "KVASIR_CLUSTER_KEY")]
    pub(crate) cluster_key: Option<PathBuf>,
    /// Keep /readyz at 503 until a POST to /admin/v1/ready; `kvasir up` uses it.
    #[arg(long, value_name = "BOOL", env = "KVASIR_HOLD_READY", hide = true)]
    pub(crate) hold_ready: Option<bool>,
    /// Take the texts of control tokens in the messages of chats for these tokens, as in prompts of completions; the same at
    /// all coordinators [default: false, they are ordinary text].
    #[arg(long, value_name = "BOOL", env = "KVASIR_RAW_CHATS")]
    pub(crate) raw_chats: Option<bool>,
    /// Time that a request may take in all [default: 10 minutes].
    #[arg(long, value_name = "TIME", env = "KVASIR_REQUEST_TIMEOUT")]
    pub(crate) request_timeout: Option<Period>,
    /// Time that requests under way are given when the node is told to end [default: 30s].
    #[arg(long, value_name = "TIME", env = "KVASIR_DRAIN_TIMEOUT")]
    pub(crate) drain_timeout: Option<Period>,
    /// Generations that may wait for a worker.
    #[arg(long, value_name = "N", env = "KVASIR_QUEUE_REQUESTS")]
    pub(crate) queue_requests: Option<usize>,
    /// Prompt tokens that may wait for a worker.
    #[arg(long, value_name = "N", env = "KVASIR_QUEUE_TOKENS")]
    pub(crate) queue_tokens: Option<u64>,
    /// Generations that one worker may have at a time; more wait here, where any worker can take them.
    #[arg(long, value_name = "N", env = "KVASIR_WORKER_INFLIGHT")]
    pub(crate) worker_inflight: Option<u32>,
    /// How often workers report.
    #[arg(long, value_name = "TIME", env = "KVASIR_REPORT_EVERY")]
    pub(crate) report_every: Option<Period>,
    /// A worker not heard of for this long gets no new work while another is there.
    #[arg(long, value_name = "TIME", env = "KVASIR_SUSPECT_AFTER")]
    pub(crate) suspect_after: Option<Period>,
    /// A worker not heard of for this long has left.
    #[arg(long, value_name = "TIME", env = "KVASIR_LEASE")]
    pub(crate) lease: Option<Period>,
    /// Memory for the prefix index, such as 256MiB.
    #[arg(long, value_name = "SIZE", env = "KVASIR_INDEX_BYTES")]
    pub(crate) index_bytes: Option<ByteSize>,
    /// By what a worker is chosen; all but `prefix` are there to compare with.
    #[arg(long, value_enum, env = "KVASIR_ROUTING")]
    pub(crate) routing: Option<RoutingArg>,
    /// Workers of the pool that serve one replica together [default: as few as hold the model].
    #[arg(long, value_name = "N", env = "KVASIR_SHARDS")]
    pub(crate) shards: Option<usize>,
    /// HTTP connections at a time on the API port.
    #[arg(long, value_name = "N", env = "KVASIR_MAX_CONNECTIONS")]
    pub(crate) max_connections: Option<usize>,
    /// An HTTP connection that is idle between requests for so long is closed [default: 75s]; longer than what proxies in
    /// front and clients keep theirs for.
    #[arg(long, value_name = "TIME", env = "KVASIR_KEEP_ALIVE")]
    pub(crate) keep_alive: Option<Period>,
    /// Origins whose pages may ask from browsers, such as `https://app.example`, separated by commas; or `*`, or `none`
    /// [default: any where keys are needed, and else those of this machine].
    #[arg(long, value_name = "ORIGIN,..", env = "KVASIR_CORS_ORIGINS", value_delimiter = ',')]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) cors_origins: Option<Vec<String>>,
    /// Tenants that get more turns than others while all have requests waiting, such as `team-a=4,team-b=2`: tokens are
    /// shared out by these weights, at coordinators and workers [default: 1 for each].
    #[arg(long, value_name = "TENANT=N,..", env = "KVASIR_TENANT_WEIGHTS", value_delimiter = ',')]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tenant_weights: Option<Vec<String>>,
    /// Sessions of operations, such as voice activity over a WebSocket, that one tenant may have at this coordinator at a
    /// time.
    #[arg(long, value_name = "N", env = "KVASIR_SESSIONS_PER_TENANT")]
    pub(crate) sessions_per_tenant: Option<u32>,
    /// A session in which the client says nothing for so long ends.
    #[arg(long, value_name = "TIME", env = "KVASIR_SESSION_IDLE")]
    pub(crate) session_idle: Option<Period>,
    /// Time that a session may last.
    #[arg(long, value_name = "TIME", env = "KVASIR_SESSION_MAX")]
    pub(crate) session_max: Option<Period>,
    /// Collector that spans of requests go to by OTLP, such as http://127.0.0.1:4318; without, nothing is traced.
    #[arg(long, value_name = "URL", env = "OTEL_EXPORTER_OTLP_ENDPOINT")]
    pub(crate) otlp_endpoint: Option<String>,
    /// Certificates that a collector at https:// is believed by, PEM [default: those that browsers trust, and SSL_CERT_FILE].
    #[arg(long, value_name = "FILE", env = "OTEL_EXPORTER_OTLP_CERTIFICATE")]
    pub(crate) otlp_certificate: Option<PathBuf>,
    /// Share of the requests without a `traceparent` that are traced [default: 1].
    #[arg(long, value_name = "SHARE", env = "OTEL_TRACES_SAMPLER_ARG")]
    pub(crate) trace_ratio: Option<f64>,
    /// Client keys; in the file only.
    #[arg(skip)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) keys: Option<Vec<KeyEntry>>,
}

/// See [`Routing`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum RoutingArg {
    /// The least time until it answers, what it holds of the prompt counted in.
    Prefix,
    /// The same as if nobody held anything.
    LeastLoad,
    /// One after the other.
    RoundRobin,
}

impl From<RoutingArg> for Routing {
    fn from(arg: RoutingArg) -> Self {
        match arg {
            RoutingArg::Prefix => Self::Prefix,
            RoutingArg::LeastLoad => Self::LeastLoad,
            RoutingArg::RoundRobin => Self::RoundRobin,
        }
    }
}

impl CoordinatorSettings {
    /// Fills in every unset setting and records the reason for each value.
    fn complete(self) -> anyhow::Result<(Self, Vec<Explained>)> {
        let default = Config::default();
        let mut explained = Vec::new();
        macro_rules! or {
            ($field:ident, $default:expr, $reason:literal) => {
                Some(match self.$field {
                    Some(value) => value,
                    None => {
                        let value = $default;
                        explained.push(Explained::new(stringify!($field), &value, $reason)?);
                        value
                    }
                })
            };
        }
        let seconds = |s| Period(Duration::from_secs(s));
        let millis = |ms| Period(Duration::from_millis(ms));
        let complete = Self {
            identity: self.identity,
            models: self.models,
            peers: self.peers,
            data_dir: self.data_dir,
            keys: self.keys,
            shards: self.shards,
            cors_origins: self.cors_origins,
            tenant_weights: self.tenant_weights,
            otlp_endpoint: self.otlp_endpoint,
            otlp_certificate: self.otlp_certificate,
            trace_ratio: self.trace_ratio,
            http: or!(http, default.http, "this machine only, unless told otherwise"),
            ops: or!(ops, default.ops, "this machine only, unless told otherwise"),
            quic: or!(quic, default.quic, "this machine only, unless told otherwise"),
            cluster_key: or!(cluster_key, home::home()?.join("cluster.key"), "beside the model cache"),
            hold_ready: or!(hold_ready, default.hold_ready, "ready as soon as a worker is"),
            raw_chats: or!(raw_chats, default.raw_chats, "users must not write turns of others"),
            request_timeout: or!(
                request_timeout,
                seconds(default.request_timeout_s),
                "nothing waits for ever"
            ),
            drain_timeout: or!(drain_timeout, seconds(default.drain_s), "what supervisors commonly grant"),
            queue_requests: or!(queue_requests, default.queue_requests, "a bounded queue, then 429"),
            queue_tokens: or!(queue_tokens, default.queue_tokens, "a bounded queue, then 429"),
            worker_inflight: or!(
                worker_inflight,
                default.worker_inflight,
                "more wait where any worker can take them"
            ),
            report_every: or!(report_every, millis(default.report_every_ms), "fresher than a decision needs"),
            suspect_after: or!(suspect_after, millis(default.suspect_ms), "a few missed reports"),
            lease: or!(lease, millis(default.lease_ms), "a pause longer than this is a death"),
            index_bytes: or!(index_bytes, ByteSize(default.index_bytes), "a bound, not a reservation"),
            routing: or!(routing, RoutingArg::Prefix, "it computes the least"),
            max_connections: or!(max_connections, default.max_connections, "a bound on open files"),
            keep_alive: or!(keep_alive, seconds(default.keep_alive_s), "longer than proxies keep theirs"),
            sessions_per_tenant: or!(
                sessions_per_tenant,
                default.sessions_per_tenant,
                "one tenant leaves room for others"
            ),
            session_idle: or!(
                session_idle,
                seconds(default.session_idle_s),
                "sound does not pause for as long"
            ),
            session_max: or!(session_max, seconds(default.session_max_s), "longer than most calls"),
        };
        Ok((complete, explained))
    }

    /// The library's configuration. Requires complete settings; downloads models if needed.
    fn service(&self) -> anyhow::Result<Config> {
        let Some(models) = self.models.as_ref().filter(|models| !models.is_empty()) else {
            return Err(ConfigError::missing("models", "name at least one model to offer").into());
        };
        let models = models.iter().map(|model| {
            let models::Resolved { path, id } = models::resolve_named(model)?;
            Ok(ModelEntry { id, path })
        });
        let default = Config::default();
        let ms = |period: Option<Period>, default| period.map_or(default, Period::millis);
        let config = Config {
            http: self.http.unwrap_or(default.http),
            ops: self.ops.unwrap_or(default.ops),
            quic: self.quic.unwrap_or(default.quic),
            peers: self.peers.iter().flatten().map(|peer| peer_entry(peer)).collect::<Result<_, _>>()?,
            data_dir: self.data_dir.clone(),
            models: models.collect::<anyhow::Result<_>>()?,
            keys: self.keys.clone().unwrap_or_default(),
            hold_ready: self.hold_ready.unwrap_or(default.hold_ready),
            raw_chats: self.raw_chats.unwrap_or(default.raw_chats),
            request_timeout_s: ms(self.request_timeout, default.request_timeout_s * 1000).div_ceil(1000),
            queue_requests: self.queue_requests.unwrap_or(default.queue_requests),
            queue_tokens: self.queue_tokens.unwrap_or(default.queue_tokens),
            worker_inflight: self.worker_inflight.unwrap_or(default.worker_inflight),
            report_every_ms: ms(self.report_every, default.report_every_ms),
            suspect_ms: ms(self.suspect_after, default.suspect_ms),
            lease_ms: ms(self.lease, default.lease_ms),
            index_bytes: self.index_bytes.map_or(default.index_bytes, |size| size.0),
            routing: self.routing.map_or(default.routing, Into::into),
            shards: self.shards,
            max_connections: self.max_connections.unwrap_or(default.max_connections),
            keep_alive_s: ms(self.keep_alive, default.keep_alive_s * 1000).div_ceil(1000),
            cors_origins: self.cors_origins.clone(),
            tenant_weights: self.tenant_weights.clone().unwrap_or_default(),
            sessions_per_tenant: self.sessions_per_tenant.unwrap_or(default.sessions_per_tenant),
            session_idle_s: ms(self.session_idle, default.session_idle_s * 1000).div_ceil(1000),
            session_max_s: ms(self.session_max, default.session_max_s * 1000).div_ceil(1000),
            drain_s: ms(self.drain_timeout, default.drain_s * 1000).div_ceil(1000),
        };
        config.check().map_err(ConfigError::Coordinator)?;
        Ok(config)
    }
}

/// Parses one entry of `--peers`.
fn peer_entry(text: &str) -> Result<PeerEntry, ConfigError> {
    let entry = text.split_once('=').and_then(|(name, quic)| {
        let (host, port) = quic.rsplit_once(':')?;
        let reachable = !host.is_empty() && port.parse::<u16>().is_ok_and(|port| port > 0);
        let node = NodeId::new(name).ok().filter(|_| reachable)?;
        Some(PeerEntry { node, quic: quic.to_owned() })
    });
    entry.ok_or_else(|| ConfigError::field("peers", text, "NAME=HOST:PORT"))
}

impl Coordinator {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        let settings: CoordinatorSettings = config::layered(self.node.config.as_deref(), &self.settings)?;
        let (settings, explained) = settings.complete()?;
        if self.node.answer(&settings, &explained)? {
            return Ok(());
        }
        let identity = crate::node::identity(settings.identity.as_deref())?;
        let config = settings.service()?;
        let key =
            cluster_key::load_or_make(settings.cluster_key.as_deref().unwrap_or("cluster.key".as_ref()))?;
        let node = &identity.name().node;
        let endpoint = settings.otlp_endpoint.as_deref();
        let certificates = settings.otlp_certificate.as_deref();
        let _exporting =
            otlp::start(endpoint, certificates, settings.trace_ratio, "kvasir-coordinator", node)?;
        allocator::keep_free_memory(KEEP_FREE_MEMORY);
        let runtime = runtime()?;
        runtime.block_on(async {
            let mut signals = StopSignals::listen()?;
            if let Some(directory) = &settings.identity {
                keep_renewed(&identity, directory);
            }
            let started = server::Coordinator::start(config, &identity, key).await;
            let node = started.map_err(|error| match error {
                StartError::Config(error) => ConfigError::Coordinator(error).into(),
                error => anyhow::Error::from(error),
            })?;
            let addresses = node.addresses();
            let announcement = Announcement {
                id: identity.name().node.to_string(),
                pid: std::process::id(),
                http: Some(addresses.http),
                ops: addresses.ops,
                quic: addresses.quic,
            };
            announcement.print()?;
            signals.next().await;
            tracing::info!("draining");
            tokio::select! {
                finished = node.stop() => if !finished { tracing::warn!("requests were cut off") },
                () = signals.next() => {}
            }
            Ok(())
        })
    }
}

/// Uses as many threads as half of the CPUs. A request is tens of microseconds of work in several tasks, and
/// waking another thread for each task costs more than the task. The other CPUs serve the kernel's network
/// stack and local workers.
fn runtime() -> std::io::Result<Runtime> {
    let threads = ::worker::cgroup::cpus().get() / 2;
    // A single-threaded runtime runs tasks strictly in turn. A multi-threaded one runs the most recently
    // woken task first, and moves half of a thread's tasks to a shared queue at more than 256 of them.
    let mut builder = if threads > 1 { Builder::new_multi_thread() } else { Builder::new_current_thread() };
    builder.worker_threads(threads.max(1)).enable_all().build()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_set_is_kept_and_what_is_not_is_explained() {
        let set = CoordinatorSettings { lease: Some(Period(Duration::from_secs(9))), ..Default::default() };
        let (complete, explained) = set.complete().unwrap();
        assert_eq!(complete.lease, Some(Period(Duration::from_secs(9))));
        assert!(!explained.iter().any(|e| e.field == "lease"));
        let http = explained.iter().find(|e| e.field == "http").unwrap();
        assert_eq!(http.value, "\"127.0.0.1:8080\"");
        // Completing twice changes nothing, and the printed file can be parsed.
        let file = toml::to_string(&complete).unwrap();
        let again: CoordinatorSettings = toml::from_str(&file).unwrap();
        assert_eq!(again, complete);
        assert!(again.complete().unwrap().1.is_empty());
    }

    #[test]
    fn peers_are_names_and_places() {
        let PeerEntry { node, quic } = peer_entry("c1=host.example:7000").unwrap();
        assert_eq!((node.as_str(), quic.as_str()), ("c1", "host.example:7000"));
        for wrong in ["c1", "c1=host", "c1=host:0", "c1=:7000", "=host:7000", "c 1=host:7000", "c1=host:port"]
        {
            assert!(peer_entry(wrong).unwrap_err().to_string().contains("`peers`"), "{wrong}");
        }
    }

    #[test]
    fn a_coordinator_without_models_is_refused() {
        let error = CoordinatorSettings::default().service().unwrap_err();
        assert!(error.is::<ConfigError>() && error.to_string().contains("`models`"), "{error}");
    }
}
