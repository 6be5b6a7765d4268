//! `kvasir coordinator`: runs one coordinator of a cluster.

use crate::config::{self, ByteSize, ConfigError, Period};
use crate::doctor::watch_coordinator;
use crate::identity::{self, keep_renewed, renew_in_time};
use crate::node::{Announcement, Explained, NodeArgs, StopSignals};
use crate::{allocator, cluster_key, home, models, otlp};
use api::auth::KeyEntry;
use coordinator::config::Config;
use coordinator::server::{self, StartError};
use dispatch::models::ModelEntry;
use doctor::Places;
use group::agreement::PeerEntry;
use proto::ids::NodeId;
use router::routing::Routing;
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};

/// Prompts, texts and memos allocate and free megabytes, also after minutes without load. On a virtual
/// machine whose host reclaimed free memory, getting 2 MiB back takes milliseconds.
const KEEP_FREE_MEMORY: Duration = Duration::from_secs(600);

/// Runs one coordinator: OpenAI API, prefix index, routing.
#[derive(clap::Args)]
#[command(
    after_help = "Example:\n  kvasir coordinator --identity ./c0 --models smollm2-135m --http 0.0.0.0:8080 --quic 0.0.0.0:7000 --config keys.toml\n\n\
    kvasir coordinator --identity ./c0 --models smollm2-135m --quic 10.0.0.1:7000 --data-dir ./c0-data \\\n    \
    --peers c0=10.0.0.1:7000,c1=10.0.0.2:7000,c2=10.0.0.3:7000\n\n\
    keys.toml:\n  [[keys]]\n  sha256 = \"<SHA-256 of the key, in hexadecimal>\"\n  tenant = \"team-a\"\n\n\
    Once it listens it prints one line of JSON with its addresses on stdout; logs go to stderr."
)]
pub(crate) struct Coordinator {
    #[command(flatten)]
    settings: CoordinatorSettings,
    #[command(flatten)]
    node: NodeArgs,
}

/// All settings. Every unset one has a default.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, clap::Args)]
#[serde(deny_unknown_fields)]
pub(crate) struct CoordinatorSettings {
    /// Directory with node.crt, node.key and ca.crt, as created by `kvasir ca issue`.
    #[arg(long, value_name = "DIR", env = "KVASIR_IDENTITY")]
    pub(crate) identity: Option<PathBuf>,
    /// Models that the API offers, separated by commas: catalog names, paths, or ID=PATH.
    #[arg(long, value_name = "MODEL,..", env = "KVASIR_MODELS", value_delimiter = ',')]
    pub(crate) models: Option<Vec<String>>,
    /// Address of the OpenAI API [default: 127.0.0.1:8080]; an address that is not loopback requires keys.
    #[arg(long, value_name = "ADDR", env = "KVASIR_HTTP", value_parser = config::listen)]
    #[serde(default, deserialize_with = "config::listen_in_file")]
    pub(crate) http: Option<SocketAddr>,
    /// Address of /livez, /readyz, /metrics and /admin/v1 [default: 127.0.0.1:9090].
    #[arg(long, value_name = "ADDR", env = "KVASIR_OPS", value_parser = config::listen)]
    #[serde(default, deserialize_with = "config::listen_in_file")]
    pub(crate) ops: Option<SocketAddr>,
    /// UDP address that workers and other coordinators connect to [default: 127.0.0.1:7000].
    #[arg(long, value_name = "ADDR", env = "KVASIR_QUIC", value_parser = config::listen)]
    #[serde(default, deserialize_with = "config::listen_in_file")]
    pub(crate) quic: Option<SocketAddr>,
    /// All coordinators of the group, at most 5, separated by commas; this one may be left out. Requires a data
    /// directory. Must be equal at all of them when the group is founded.
    #[arg(long, value_name = "NAME=HOST:PORT,..", env = "KVASIR_PEERS", value_delimiter = ',')]
    pub(crate) peers: Option<Vec<String>>,
    /// Directory for the replicated table, such as drained workers and keys; for this coordinator only. Without it
    /// that state is lost at a restart.
    #[arg(long, value_name = "DIR", env = "KVASIR_DATA_DIR")]
    pub(crate) data_dir: Option<PathBuf>,
    /// Directory of files that clients upload, and of their batches; for this coordinator only [default: files in the
    /// data directory; without one a temporary directory of at most 1 GiB, which ends with the process].
    #[arg(long, value_name = "DIR", env = "KVASIR_FILES_DIR")]
    pub(crate) files_dir: Option<PathBuf>,
    /// File of the cluster key, which keys all block ids; equal at all coordinators [default: cluster.key in
    /// $KVASIR_HOME, created on first use].
    #[arg(long, value_name = "FILE", env = "KVASIR_CLUSTER_KEY")]
    pub(crate) cluster_key: Option<PathBuf>,
    /// Keep /readyz at 503 until a POST to /admin/v1/ready; `kvasir up` uses it.
    #[arg(long, value_name = "BOOL", env = "KVASIR_HOLD_READY", hide = true)]
    pub(crate) hold_ready: Option<bool>,
    /// Parse control tokens in the messages of chats, as in prompts of completions. Must be equal at all
    /// coordinators [default: false, they are ordinary text].
    #[arg(long, value_name = "BOOL", env = "KVASIR_RAW_CHATS")]
    pub(crate) raw_chats: Option<bool>,
    /// Limit of a request's total time [default: 10 minutes].
    #[arg(long, value_name = "TIME", env = "KVASIR_REQUEST_TIMEOUT")]
    pub(crate) request_timeout: Option<Period>,
    /// How long a request that is not streamed waits for a deployed model to be loaded [default: 2m].
    #[arg(long, value_name = "TIME", env = "KVASIR_LOAD_WAIT")]
    pub(crate) load_wait: Option<Period>,
    /// Time for running requests to finish after a stop signal [default: 30s].
    #[arg(long, value_name = "TIME", env = "KVASIR_DRAIN_TIMEOUT")]
    pub(crate) drain_timeout: Option<Period>,
    /// Most generations that wait for a worker.
    #[arg(long, value_name = "N", env = "KVASIR_QUEUE_REQUESTS")]
    pub(crate) queue_requests: Option<usize>,
    /// Most prompt tokens that wait for a worker.
    #[arg(long, value_name = "N", env = "KVASIR_QUEUE_TOKENS")]
    pub(crate) queue_tokens: Option<u64>,
    /// Most generations that one worker has at a time; more wait at the coordinator, for any worker.
    #[arg(long, value_name = "N", env = "KVASIR_WORKER_INFLIGHT")]
    pub(crate) worker_inflight: Option<u32>,
    /// Interval of the workers' load reports.
    #[arg(long, value_name = "TIME", env = "KVASIR_REPORT_EVERY")]
    pub(crate) report_every: Option<Period>,
    /// A worker without a report for this time gets no new work while another worker is available.
    #[arg(long, value_name = "TIME", env = "KVASIR_SUSPECT_AFTER")]
    pub(crate) suspect_after: Option<Period>,
    /// A worker without a report for this time is removed.
    #[arg(long, value_name = "TIME", env = "KVASIR_LEASE")]
    pub(crate) lease: Option<Period>,
    /// Memory for the prefix index, such as 256MiB.
    #[arg(long, value_name = "SIZE", env = "KVASIR_INDEX_BYTES")]
    pub(crate) index_bytes: Option<ByteSize>,
    /// Rule by which a worker is chosen; all but `prefix` are for comparison.
    #[arg(long, value_enum, env = "KVASIR_ROUTING")]
    pub(crate) routing: Option<RoutingArg>,
    /// Workers of the pool that serve one replica together [default: as few as hold the model].
    #[arg(long, value_name = "N", env = "KVASIR_SHARDS")]
    pub(crate) shards: Option<usize>,
    /// Most open HTTP connections on the API port.
    #[arg(long, value_name = "N", env = "KVASIR_MAX_CONNECTIONS")]
    pub(crate) max_connections: Option<usize>,
    /// An HTTP connection that is idle between requests for this time is closed [default: 75s]. It should be longer
    /// than the idle time of clients and proxies in front.
    #[arg(long, value_name = "TIME", env = "KVASIR_KEEP_ALIVE")]
    pub(crate) keep_alive: Option<Period>,
    /// Origins whose web pages may send requests, such as `https://app.example`, separated by commas; or `*`, or `none`
    /// [default: any origin if keys are required, else only origins on this machine].
    #[arg(long, value_name = "ORIGIN,..", env = "KVASIR_CORS_ORIGINS", value_delimiter = ',')]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) cors_origins: Option<Vec<String>>,
    /// Serve Ollama's API on the API port, too [default: true if --http is a loopback address].
    #[arg(long, value_name = "BOOL", env = "KVASIR_OLLAMA")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ollama: Option<bool>,
    /// Hosts from which images of chats are fetched by `http://` and `https://`, separated by commas: names,
    /// `*.example.com`, or `any`. Private addresses are never connected to [default: none].
    #[arg(long, value_name = "HOST,..", env = "KVASIR_IMAGE_URLS", value_delimiter = ',')]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) image_urls: Option<Vec<String>>,
    /// Weights of tenants whose requests wait at the same time, such as `team-a=4,team-b=2`: coordinators and workers
    /// divide tokens in proportion [default: 1 for each].
    #[arg(long, value_name = "TENANT=N,..", env = "KVASIR_TENANT_WEIGHTS", value_delimiter = ',')]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tenant_weights: Option<Vec<String>>,
    /// Most open sessions of operations of one tenant at this coordinator, such as voice activity over a WebSocket.
    #[arg(long, value_name = "N", env = "KVASIR_SESSIONS_PER_TENANT")]
    pub(crate) sessions_per_tenant: Option<u32>,
    /// A session without a message from the client for this time is closed.
    #[arg(long, value_name = "TIME", env = "KVASIR_SESSION_IDLE")]
    pub(crate) session_idle: Option<Period>,
    /// Limit of a session's total time.
    #[arg(long, value_name = "TIME", env = "KVASIR_SESSION_MAX")]
    pub(crate) session_max: Option<Period>,
    /// OTLP collector that receives the spans of requests, such as http://127.0.0.1:4318; without it nothing is traced.
    #[arg(long, value_name = "URL", env = "OTEL_EXPORTER_OTLP_ENDPOINT")]
    pub(crate) otlp_endpoint: Option<String>,
    /// PEM file of certificates that verify a collector at https:// [default: those that browsers trust, and SSL_CERT_FILE].
    #[arg(long, value_name = "FILE", env = "OTEL_EXPORTER_OTLP_CERTIFICATE")]
    pub(crate) otlp_certificate: Option<PathBuf>,
    /// Share of the requests without a `traceparent` that are traced, 0 to 1 [default: 1].
    #[arg(long, value_name = "SHARE", env = "OTEL_TRACES_SAMPLER_ARG")]
    pub(crate) trace_ratio: Option<f64>,
    /// Directory with ca.crt and ca.key, as created by `kvasir ca init`: the coordinators issue certificates to nodes
    /// that join (`kvasir ca token`). They keep the authority, sealed with the cluster key, so one of them needs the
    /// directory once. Requires a data directory.
    #[arg(long, value_name = "DIR", env = "KVASIR_CA")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ca: Option<PathBuf>,
    /// Lifetime of the certificates that the coordinators issue; nodes renew them at a third of it [default: 30d].
    #[arg(long, value_name = "TIME", env = "KVASIR_CERTIFICATE_LIFETIME")]
    pub(crate) certificate_lifetime: Option<Period>,
    /// File of the Kubernetes API server's keys (`kubectl get --raw /openid/v1/jwks`): pods of the service accounts
    /// may join as workers.
    #[arg(long, value_name = "FILE", env = "KVASIR_SERVICE_ACCOUNT_KEYS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) service_account_keys: Option<PathBuf>,
    /// Issuer of the Kubernetes API server's tokens.
    #[arg(long, value_name = "URL", env = "KVASIR_SERVICE_ACCOUNT_ISSUER")]
    pub(crate) service_account_issuer: Option<String>,
    /// Service accounts whose pods may join, separated by commas [default: kvasir/kvasir-worker].
    #[arg(long, value_name = "NAMESPACE/NAME,..", env = "KVASIR_SERVICE_ACCOUNTS", value_delimiter = ',')]
    pub(crate) service_accounts: Option<Vec<String>>,
    /// Client keys; in the file only.
    #[arg(skip)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) keys: Option<Vec<KeyEntry>>,
}

/// See [`Routing`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum RoutingArg {
    /// The worker whose answer is expected first, its cached part of the prompt included.
    Prefix,
    /// The same, without regard to cached prefixes.
    LeastLoad,
    /// The workers in turns.
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
            files_dir: self.files_dir,
            keys: self.keys,
            shards: self.shards,
            cors_origins: self.cors_origins,
            ollama: self.ollama,
            image_urls: self.image_urls,
            tenant_weights: self.tenant_weights,
            otlp_endpoint: self.otlp_endpoint,
            otlp_certificate: self.otlp_certificate,
            trace_ratio: self.trace_ratio,
            ca: self.ca,
            service_account_keys: self.service_account_keys,
            http: or!(http, default.http, "reachable from this machine only"),
            ops: or!(ops, default.ops, "reachable from this machine only"),
            quic: or!(quic, default.quic, "reachable from this machine only"),
            cluster_key: or!(cluster_key, home::home()?.join("cluster.key"), "beside the model cache"),
            hold_ready: or!(hold_ready, default.hold_ready, "ready as soon as a worker has joined"),
            raw_chats: or!(
                raw_chats,
                default.raw_chats,
                "users must not be able to write turns of other roles"
            ),
            request_timeout: or!(request_timeout, seconds(default.request_timeout_s), "bounds every wait"),
            load_wait: or!(load_wait, seconds(default.load_wait_s), "clients give up after minutes"),
            drain_timeout: or!(drain_timeout, seconds(default.drain_s), "the usual limit of supervisors"),
            queue_requests: or!(queue_requests, default.queue_requests, "a bounded queue, then 429"),
            queue_tokens: or!(queue_tokens, default.queue_tokens, "a bounded queue, then 429"),
            worker_inflight: or!(
                worker_inflight,
                default.worker_inflight,
                "more wait at the coordinator, where any worker can take them"
            ),
            report_every: or!(
                report_every,
                millis(default.report_every_ms),
                "more often than decisions need"
            ),
            suspect_after: or!(suspect_after, millis(default.suspect_ms), "a few missed reports"),
            lease: or!(lease, millis(default.lease_ms), "a worker that is silent for longer counts as dead"),
            index_bytes: or!(index_bytes, ByteSize(default.index_bytes), "a bound, not a reservation"),
            routing: or!(routing, RoutingArg::Prefix, "computes the fewest prompt tokens"),
            max_connections: or!(max_connections, default.max_connections, "a bound on open files"),
            keep_alive: or!(
                keep_alive,
                seconds(default.keep_alive_s),
                "longer than the idle time of proxies"
            ),
            sessions_per_tenant: or!(
                sessions_per_tenant,
                default.sessions_per_tenant,
                "leaves room for other tenants"
            ),
            session_idle: or!(
                session_idle,
                seconds(default.session_idle_s),
                "audio does not pause for as long"
            ),
            session_max: or!(session_max, seconds(default.session_max_s), "longer than most calls"),
            certificate_lifetime: or!(
                certificate_lifetime,
                seconds(default.certificate_lifetime_s),
                "renewed at a third, so a cluster may be off for ten days"
            ),
            service_account_issuer: or!(
                service_account_issuer,
                default.service_account_issuer,
                "the default of API servers"
            ),
            service_accounts: or!(
                service_accounts,
                default.service_accounts,
                "the account of the manifests' workers"
            ),
        };
        Ok((complete, explained))
    }

    /// The library's configuration. Requires complete settings; downloads models if needed.
    fn service(&self) -> anyhow::Result<Config> {
        let models = self.models.as_deref().unwrap_or_default();
        if models.is_empty() && self.data_dir.is_none() {
            let need = "name at least one model to offer, or a data_dir so that models can be deployed";
            return Err(ConfigError::missing("models", need).into());
        }
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
            files_dir: self.files_dir.clone(),
            models: models.collect::<anyhow::Result<_>>()?,
            keys: self.keys.clone().unwrap_or_default(),
            hold_ready: self.hold_ready.unwrap_or(default.hold_ready),
            raw_chats: self.raw_chats.unwrap_or(default.raw_chats),
            request_timeout_s: ms(self.request_timeout, default.request_timeout_s * 1000).div_ceil(1000),
            stream_silence_ms: default.stream_silence_ms,
            load_wait_s: ms(self.load_wait, default.load_wait_s * 1000).div_ceil(1000),
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
            ollama: self.ollama,
            image_urls: self.image_urls.clone().unwrap_or_default(),
            tenant_weights: self.tenant_weights.clone().unwrap_or_default(),
            sessions_per_tenant: self.sessions_per_tenant.unwrap_or(default.sessions_per_tenant),
            session_idle_s: ms(self.session_idle, default.session_idle_s * 1000).div_ceil(1000),
            session_max_s: ms(self.session_max, default.session_max_s * 1000).div_ceil(1000),
            drain_s: ms(self.drain_timeout, default.drain_s * 1000).div_ceil(1000),
            ca: self.ca.clone(),
            certificate_lifetime_s: ms(self.certificate_lifetime, default.certificate_lifetime_s * 1000)
                .div_ceil(1000),
            service_account_keys: self.service_account_keys.clone(),
            service_account_issuer: self
                .service_account_issuer
                .clone()
                .unwrap_or(default.service_account_issuer),
            service_accounts: self.service_accounts.clone().unwrap_or(default.service_accounts),
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
        let identity = identity::identity(settings.identity.as_deref())?;
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
            watch_coordinator(Places {
                identities: settings.identity.iter().cloned().collect(),
                directories: settings.data_dir.iter().chain(&settings.files_dir).cloned().collect(),
                secrets: [settings.cluster_key.clone(), settings.ca.as_ref().map(|dir| dir.join("ca.key"))]
                    .into_iter()
                    .flatten()
                    .collect(),
            });
            let started = server::Coordinator::start(config, &identity, key).await;
            let node = started.map_err(|error| match error {
                StartError::Config(error) => ConfigError::Coordinator(error).into(),
                error => anyhow::Error::from(error),
            })?;
            let addresses = node.addresses();
            if let Some(directory) = &settings.identity {
                // A coordinator that holds the authority renews its own certificate too, at itself.
                renew_in_time(&identity, directory, vec![reachable(addresses.quic).to_string()]);
            }
            let announcement = Announcement {
                id: identity.name().node.to_string(),
                pid: std::process::id(),
                http: Some(addresses.http),
                ops: addresses.ops,
                quic: addresses.quic,
            };
            announcement.print()?;
            signals.next().await;
            tracing::info!("stop signal received: no new requests are accepted, running ones finish");
            tokio::select! {
                finished = node.stop() => if !finished { tracing::warn!("the drain timeout has passed; the remaining requests are cut off") },
                () = signals.next() => {}
            }
            Ok(())
        })
    }
}

/// The address by which this machine reaches a socket that may be bound to all addresses.
fn reachable(bound: SocketAddr) -> SocketAddr {
    match bound.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => (Ipv4Addr::LOCALHOST, bound.port()).into(),
        IpAddr::V6(ip) if ip.is_unspecified() => (Ipv6Addr::LOCALHOST, bound.port()).into(),
        _ => bound,
    }
}

/// Uses as many threads as half of the CPUs. A request is tens of microseconds of work in several tasks, and
/// waking another thread for each task costs more than the task. The other CPUs serve the kernel's network
/// stack and local workers.
fn runtime() -> std::io::Result<Runtime> {
    let threads = engine::cgroup::cpus().get() / 2;
    // A single-threaded runtime runs tasks strictly in turn. A multi-threaded one runs the most recently
    // woken task first, and moves half of a thread's tasks to a shared queue at more than 256 of them.
    let mut builder = if threads > 1 { Builder::new_multi_thread() } else { Builder::new_current_thread() };
    builder.worker_threads(threads.max(1)).enable_all().build()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn given_settings_are_kept_and_computed_ones_explained() {
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
    fn a_coordinator_without_models_needs_a_place_for_deployments() {
        let error = CoordinatorSettings::default().service().unwrap_err();
        assert!(error.is::<ConfigError>() && error.to_string().contains("`models`"), "{error}");
    }
}
