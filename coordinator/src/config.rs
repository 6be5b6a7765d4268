//! The coordinator's configuration file.

use api::auth::KeyEntry;
use api::cors::Cors;
use api::image_urls::ImageUrls;
use consensus::table::MAX_VOTERS;
use dispatch::models::ModelEntry;
use group::agreement::PeerEntry;
use group::joining::JoinSettings;
use pki::ca::Authority;
use pki::service_account;
use router::admission::{BadWeight, QueueLimits, TenantWeights};
use router::balancer::Policy;
use router::routing::Routing;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

/// A coordinator's configuration. Every field has a default. Unknown fields are refused.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// API port. Port 0: any free port. An address other than loopback requires `keys`.
    pub http: SocketAddr,
    /// Operations port: health, metrics, administration. Port 0: any free port.
    pub ops: SocketAddr,
    /// UDP port for workers. Port 0: any free port.
    pub quic: SocketAddr,
    /// All coordinators of the group, with or without this one; 1 to 5 in total. Empty: a group of one.
    pub peers: Vec<PeerEntry>,
    /// Directory for what the group agreed on. Only a group of one may leave it unset; then nothing survives
    /// a restart.
    pub data_dir: Option<PathBuf>,
    /// Directory of files that tenants upload, and of their batches. `None`: `files` in `data_dir`, or without one a
    /// temporary directory of at most 1 GiB, which ends with the process.
    pub files_dir: Option<PathBuf>,
    /// Models that the API offers.
    pub models: Vec<ModelEntry>,
    /// API keys. If empty, all callers on this machine are one tenant.
    pub keys: Vec<KeyEntry>,
    /// If set, `/readyz` returns 503 until a POST to `/admin/v1/ready`.
    pub hold_ready: bool,
    /// If set, texts of control tokens in chats become control tokens.
    pub raw_chats: bool,
    /// Time limit of a request, in seconds.
    pub request_timeout_s: u64,
    /// How long a request that is not streamed waits for a deployed model to be loaded, in seconds.
    pub load_wait_s: u64,
    /// Silence after which a stream of events gets a comment, or `ping` of Anthropic's, in milliseconds: proxies close
    /// silent connections.
    pub stream_silence_ms: u64,
    /// Most generations that may wait for a worker.
    pub queue_requests: usize,
    /// Most prompt tokens that may wait for a worker.
    pub queue_tokens: u64,
    /// Most in-flight generations of one worker. Further ones wait at the coordinator, where any worker can
    /// take them.
    pub worker_inflight: u32,
    /// Interval of the workers' reports, in milliseconds.
    pub report_every_ms: u64,
    /// A worker without a heartbeat for this long gets no new work if another is available, in milliseconds.
    pub suspect_ms: u64,
    /// A worker without a heartbeat for this long has left, in milliseconds.
    pub lease_ms: u64,
    /// Memory for the prefix index, in bytes.
    pub index_bytes: u64,
    /// How a worker is chosen.
    pub routing: Routing,
    /// Stages of each replica that is built from pool workers. `None`: as few as hold the model.
    pub shards: Option<usize>,
    /// Most concurrent HTTP connections of the API port.
    pub max_connections: usize,
    /// Seconds that an HTTP connection may be idle between requests.
    pub keep_alive_s: u64,
    /// Origins whose pages may send requests from browsers: `https://app.example`, `*` or `none`. `None`: any
    /// origin if keys are configured, else no origin.
    pub cors_origins: Option<Vec<String>>,
    /// Whether the API port serves Ollama's API. `None`: if `http` is a loopback address.
    pub ollama: Option<bool>,
    /// Hosts from which images of chats are fetched: names, `*.example.com` or `any`. Empty: no addresses are fetched.
    pub image_urls: Vec<String>,
    /// Tenants with a larger share of turns: `TENANT=WEIGHT`.
    pub tenant_weights: Vec<String>,
    /// Most concurrent sessions of operations for one tenant at this coordinator.
    pub sessions_per_tenant: u32,
    /// Ends a session after this many seconds without a message.
    pub session_idle_s: u64,
    /// Longest session, in seconds.
    pub session_max_s: u64,
    /// Time for running requests to finish after a stop signal, in seconds.
    pub drain_s: u64,
    /// Directory with `ca.crt` and `ca.key`: the authority with which the group issues certificates to nodes that
    /// join. The group keeps it, sealed with the cluster key, so one coordinator needs it once. Needs `data_dir`.
    pub ca: Option<PathBuf>,
    /// Lifetime of the certificates that the group issues, in seconds.
    pub certificate_lifetime_s: u64,
    /// File of the Kubernetes API server's keys (a JSON Web Key Set). Pods of `service_accounts` may then join.
    pub service_account_keys: Option<PathBuf>,
    /// Issuer of the API server's tokens.
    pub service_account_issuer: String,
    /// Service accounts whose pods may join as workers: `NAMESPACE/NAME`.
    pub service_accounts: Vec<String>,
}

impl Default for Config {
    fn default() -> Self {
        let loopback = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let policy = Policy::default();
        let millis = |d: Duration| u64::try_from(d.as_millis()).unwrap_or(u64::MAX);
        Self {
            http: loopback(8080),
            ops: loopback(9090),
            quic: loopback(7000),
            peers: Vec::new(),
            data_dir: None,
            files_dir: None,
            models: Vec::new(),
            keys: Vec::new(),
            hold_ready: false,
            raw_chats: false,
            request_timeout_s: 600,
            load_wait_s: 120,
            stream_silence_ms: 10_000,
            queue_requests: policy.queue.requests,
            queue_tokens: policy.queue.tokens,
            worker_inflight: policy.max_inflight,
            report_every_ms: 250,
            suspect_ms: millis(policy.suspect_after),
            lease_ms: millis(policy.lease),
            index_bytes: policy.index_bytes,
            routing: policy.routing,
            shards: None,
            max_connections: 4096,
            // Proxies and clients close idle connections after 60 s or less. The side that closes first loses
            // no request.
            keep_alive_s: 75,
            cors_origins: None,
            ollama: None,
            image_urls: Vec::new(),
            tenant_weights: Vec::new(),
            sessions_per_tenant: 64,
            session_idle_s: 30,
            session_max_s: 3600,
            drain_s: 30,
            ca: None,
            certificate_lifetime_s: 30 * 24 * 60 * 60,
            service_account_keys: None,
            service_account_issuer: "https://kubernetes.default.svc.cluster.local".into(),
            service_accounts: vec!["kvasir/kvasir-worker".into()],
        }
    }
}

/// Bounds of the lifetime of certificates, seconds.
const MIN_LIFETIME_S: u64 = 10;
const MAX_LIFETIME_S: u64 = 366 * 24 * 60 * 60;

/// Error of a configuration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    #[error("http = {http} is reachable from other machines; without [[keys]] it must be a loopback address")]
    KeysRequired { http: SocketAddr },
    /// A number outside its range.
    #[error("{field} = {value}: {rule}")]
    OutOfRange {
        field: &'static str,
        value: u64,
        /// The rule that the value breaks.
        rule: &'static str,
    },
    /// A text that is not an origin.
    #[error("cors_origins: {0:?} is neither an origin such as https://app.example, nor * or none")]
    Origin(String),
    /// A text that names no host.
    #[error("image_urls: {0:?} is neither the name of a host, nor *. and a domain, nor any")]
    ImageHost(String),
    #[error(transparent)]
    Weight(#[from] BadWeight),
    /// An impossible group of coordinators.
    #[error("peers: {rule}")]
    Peers {
        /// The rule that the list breaks.
        rule: &'static str,
    },
    /// Unusable keys.
    #[error("service_accounts: {0:?} is not NAMESPACE/NAME")]
    ServiceAccount(String),
    #[error("ca = {0}: {1}")]
    Ca(PathBuf, String),
    #[error("[[keys]]: {0}")]
    Keys(#[from] api::auth::KeysError),
}

impl Config {
    /// Checks what can be checked without starting.
    pub fn check(&self) -> Result<(), ConfigError> {
        api::auth::Keys::check(&self.keys)?;
        if self.keys.is_empty() && !self.http.ip().is_loopback() {
            return Err(ConfigError::KeysRequired { http: self.http });
        }
        Cors::new(self.cors_origins.as_deref()).map_err(ConfigError::Origin)?;
        ImageUrls::new(&self.image_urls).map_err(ConfigError::ImageHost)?;
        TenantWeights::new(&self.tenant_weights)?;
        self.check_peers()?;
        let wrong = |field, value, rule| Err(ConfigError::OutOfRange { field, value, rule });
        let positive = [
            ("request_timeout_s", self.request_timeout_s),
            ("worker_inflight", self.worker_inflight.into()),
            ("report_every_ms", self.report_every_ms),
            ("max_connections", self.max_connections as u64),
            ("keep_alive_s", self.keep_alive_s),
            ("session_idle_s", self.session_idle_s),
            ("session_max_s", self.session_max_s),
        ];
        self.accounts()?;
        if self.ca.is_some() && self.data_dir.is_none() {
            return Err(ConfigError::Peers { rule: "a coordinator with ca needs a data_dir" });
        }
        if !(MIN_LIFETIME_S..=MAX_LIFETIME_S).contains(&self.certificate_lifetime_s) {
            return wrong("certificate_lifetime_s", self.certificate_lifetime_s, "must be 10 s to 366 days");
        }
        if let Some(&(field, value)) = positive.iter().find(|(_, value)| *value == 0) {
            return wrong(field, value, "must be above 0");
        }
        if self.suspect_ms < self.report_every_ms.saturating_mul(2) {
            return wrong("suspect_ms", self.suspect_ms, "must be at least twice report_every_ms");
        }
        if self.lease_ms < self.suspect_ms {
            return wrong("lease_ms", self.lease_ms, "must be at least suspect_ms");
        }
        Ok(())
    }

    pub(crate) fn serves_ollama(&self) -> bool {
        self.ollama.unwrap_or(self.http.ip().is_loopback())
    }

    /// The service accounts as (namespace, name).
    fn accounts(&self) -> Result<Vec<(String, String)>, ConfigError> {
        let parse = |text: &String| {
            let pair = text.split_once('/').filter(|(space, name)| !space.is_empty() && !name.is_empty());
            let pair = pair.map(|(space, name)| (space.to_owned(), name.to_owned()));
            pair.ok_or_else(|| ConfigError::ServiceAccount(text.clone()))
        };
        self.service_accounts.iter().map(parse).collect()
    }

    /// The part of nodes that join.
    pub(crate) fn joining(&self) -> Result<JoinSettings, ConfigError> {
        let authority = self.ca.as_ref().map(|directory| {
            Authority::load(directory).map_err(|error| ConfigError::Ca(directory.clone(), error.to_string()))
        });
        let accounts = self.accounts()?;
        let policy = || service_account::Policy { issuer: self.service_account_issuer.clone(), accounts };
        Ok(JoinSettings {
            lifetime: Duration::from_secs(self.certificate_lifetime_s),
            authority: authority.transpose()?,
            service_accounts: self.service_account_keys.clone().map(|keys| (policy(), keys)),
        })
    }

    fn check_peers(&self) -> Result<(), ConfigError> {
        let names: BTreeSet<_> = self.peers.iter().map(|peer| &peer.node).collect();
        let rule = if names.len() != self.peers.len() {
            "each coordinator is named once"
        } else if names.len() > MAX_VOTERS {
            "a group has at most 5 coordinators"
        } else if !names.is_empty() && self.data_dir.is_none() {
            "a coordinator of a group needs a data_dir"
        } else {
            return Ok(());
        };
        Err(ConfigError::Peers { rule })
    }

    /// A line for each configured API key. Two coordinators have the same lines if they accept the same keys
    /// with the same rights.
    pub(crate) fn key_lines(&self) -> Vec<String> {
        let line = |KeyEntry { sha256, tenant, admin }: &KeyEntry| {
            format!("{} {tenant} {admin}", sha256.to_lowercase())
        };
        self.keys.iter().map(line).collect()
    }

    /// The balancer's part of the configuration.
    pub fn policy(&self) -> Policy {
        Policy {
            queue: QueueLimits { requests: self.queue_requests, tokens: self.queue_tokens },
            max_inflight: self.worker_inflight,
            suspect_after: Duration::from_millis(self.suspect_ms),
            lease: Duration::from_millis(self.lease_ms),
            index_bytes: self.index_bytes,
            routing: self.routing,
            ..Policy::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::ids::NodeId;

    #[test]
    fn the_defaults_are_valid_and_unknown_fields_are_refused() {
        assert_eq!(Config::default().check(), Ok(()));
        let empty: Config = serde_json::from_str("{}").unwrap();
        assert_eq!(empty, Config::default());
        assert!(serde_json::from_str::<Config>(r#"{"htpp": "127.0.0.1:1"}"#).is_err());
    }

    #[test]
    fn ollamas_api_is_for_this_machine_unless_it_is_set() {
        let open = SocketAddr::from(([0, 0, 0, 0], 8080));
        let serves = |http, ollama| Config { http, ollama, ..Config::default() }.serves_ollama();
        let here = Config::default().http;
        assert!(serves(here, None) && serves(open, Some(true)));
        assert!(!serves(open, None) && !serves(here, Some(false)));
    }

    #[test]
    fn the_error_names_the_field() {
        let open = SocketAddr::from(([0, 0, 0, 0], 8080));
        let exposed = Config { http: open, ..Config::default() };
        assert_eq!(exposed.check(), Err(ConfigError::KeysRequired { http: open }));
        let key = KeyEntry { sha256: "0".repeat(64), tenant: "t".into(), admin: false };
        assert_eq!(Config { keys: vec![key], ..exposed }.check(), Ok(()));
        let field = |config: Config| match config.check() {
            Err(ConfigError::OutOfRange { field, .. }) => field,
            other => panic!("{other:?}"),
        };
        assert_eq!(field(Config { worker_inflight: 0, ..Config::default() }), "worker_inflight");
        assert_eq!(field(Config { keep_alive_s: 0, ..Config::default() }), "keep_alive_s");
        let pages = Config { cors_origins: Some(vec!["app.example".into()]), ..Config::default() };
        assert_eq!(pages.check(), Err(ConfigError::Origin("app.example".into())));
        assert_eq!(field(Config { suspect_ms: 100, ..Config::default() }), "suspect_ms");
        let peer = |name: &str| PeerEntry { node: NodeId::new(name).unwrap(), quic: "h:1".into() };
        let group = |names: &[&str]| Config {
            peers: names.iter().map(|name| peer(name)).collect(),
            ..Config::default()
        };
        let with_dir = |config| Config { data_dir: Some("state".into()), ..config };
        assert_eq!(with_dir(group(&["a", "b", "c"])).check(), Ok(()));
        assert!(matches!(group(&["a", "b"]).check(), Err(ConfigError::Peers { .. })));
        assert!(matches!(with_dir(group(&["a", "a"])).check(), Err(ConfigError::Peers { .. })));
        let six = with_dir(group(&["a", "b", "c", "d", "e", "f"])).check();
        assert!(matches!(six, Err(ConfigError::Peers { .. })));
        assert_eq!(field(Config { lease_ms: 1_000, ..Config::default() }), "lease_ms");
    }

    #[test]
    fn the_line_of_a_key_does_not_depend_on_the_case_of_its_digest() {
        let lines = |sha256: &str| {
            let key = KeyEntry { sha256: sha256.into(), tenant: "t".into(), admin: true };
            Config { keys: vec![key], ..Config::default() }.key_lines()
        };
        assert_eq!(lines("AB"), ["ab t true"]);
        assert_eq!(lines("AB"), lines("ab"));
    }
}
