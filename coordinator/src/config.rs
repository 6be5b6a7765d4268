//! The coordinator's configuration, as it stands in a file.

use crate::admission::{BadWeight, QueueLimits, TenantWeights};
use crate::api::auth::KeyEntry;
use crate::api::cors::Cors;
use crate::balancer::Policy;
use crate::consensus::table::MAX_VOTERS;
use crate::models::ModelEntry;
use crate::routing::Routing;
use proto::ids::NodeId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

/// Another coordinator of the group, or this one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PeerEntry {
    /// Its name, as its certificate says.
    pub node: NodeId,
    /// Where it is dialed, `host:port`.
    pub quic: String,
}

/// A coordinator's configuration. Every field has a default; unknown fields are refused.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// API port. Port 0: any. Elsewhere than on loopback only with `keys`.
    pub http: SocketAddr,
    /// Operations port: health, metrics, administration. Port 0: any.
    pub ops: SocketAddr,
    /// UDP port for workers. Port 0: any.
    pub quic: SocketAddr,
    /// All coordinators of the group, with or without this one; 1 to 5 in all. None: a group of one.
    pub peers: Vec<PeerEntry>,
    /// Where this coordinator keeps what the group has agreed on. Without it, which only a group of one may
    /// be, nothing is kept over a restart.
    pub data_dir: Option<PathBuf>,
    /// Models that the API offers.
    pub models: Vec<ModelEntry>,
    /// API keys. Without any, everybody on this machine is one tenant.
    pub keys: Vec<KeyEntry>,
    /// Whether `/readyz` stays 503 until someone posts to `/admin/v1/ready`.
    pub hold_ready: bool,
    /// Whether texts of control tokens in chats become these tokens.
    pub raw_chats: bool,
    /// Seconds that a request may take in all.
    pub request_timeout_s: u64,
    /// Generations that may wait for a worker.
    pub queue_requests: usize,
    /// Prompt tokens that may wait for a worker.
    pub queue_tokens: u64,
    /// Generations that one worker may have at a time; more wait here, where any worker can take them.
    pub worker_inflight: u32,
    /// How often workers report, in milliseconds.
    pub report_every_ms: u64,
    /// A worker not heard of for this long gets no new work while another is there, in milliseconds.
    pub suspect_ms: u64,
    /// A worker not heard of for this long has left, in milliseconds.
    pub lease_ms: u64,
    /// Memory for the prefix index, in bytes.
    pub index_bytes: u64,
    /// By what a worker is chosen.
    pub routing: Routing,
    /// Stages of each replica that is made of workers of the pool; none: as few as hold the model.
    pub shards: Option<usize>,
    /// HTTP connections at a time, on the API port.
    pub max_connections: usize,
    /// Seconds that an HTTP connection may be idle between requests.
    pub keep_alive_s: u64,
    /// Origins whose pages may ask from browsers: `https://app.example`, `*` or `none`. None: any where keys are needed,
    /// and else none.
    pub cors_origins: Option<Vec<String>>,
    /// Tenants that get more turns than others: `TENANT=WEIGHT`.
    pub tenant_weights: Vec<String>,
    /// Sessions of operations that one tenant may have here at a time.
    pub sessions_per_tenant: u32,
    /// A session in which nothing is said for so many seconds ends.
    pub session_idle_s: u64,
    /// Seconds that a session may last.
    pub session_max_s: u64,
    /// Seconds that requests under way are given when the coordinator is told to stop.
    pub drain_s: u64,
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
            models: Vec::new(),
            keys: Vec::new(),
            hold_ready: false,
            raw_chats: false,
            request_timeout_s: 600,
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
            // Proxies and clients keep theirs for 60 s or less, and whoever closes first loses no request.
            keep_alive_s: 75,
            cors_origins: None,
            tenant_weights: Vec::new(),
            sessions_per_tenant: 64,
            session_idle_s: 30,
            session_max_s: 3600,
            drain_s: 30,
        }
    }
}

/// What is wrong with a configuration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    #[error("http = {http} is reachable from elsewhere; without [[keys]] only loopback is served")]
    KeysRequired { http: SocketAddr },
    /// A number that makes no sense.
    #[error("{field} = {value}: {rule}")]
    OutOfRange {
        field: &'static str,
        value: u64,
        /// The rule that it breaks.
        rule: &'static str,
    },
    /// Something that no page has for an origin.
    #[error("cors_origins: {0:?} is no origin such as https://app.example, nor * or none")]
    Origin(String),
    #[error(transparent)]
    Weight(#[from] BadWeight),
    /// The group cannot be what is configured.
    #[error("peers: {rule}")]
    Peers {
        /// The rule that it breaks.
        rule: &'static str,
    },
    /// The keys cannot be used.
    #[error("[[keys]]: {0}")]
    Keys(#[from] crate::api::auth::KeysError),
}

impl Config {
    /// Checks what can be checked without starting.
    pub fn check(&self) -> Result<(), ConfigError> {
        crate::api::auth::Keys::check(&self.keys)?;
        if self.keys.is_empty() && !self.http.ip().is_loopback() {
            return Err(ConfigError::KeysRequired { http: self.http });
        }
        Cors::new(self.cors_origins.as_deref()).map_err(ConfigError::Origin)?;
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

    /// The numbers that steer the balancer.
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
    fn the_defaults_are_valid_and_unknown_fields_are_not() {
        assert_eq!(Config::default().check(), Ok(()));
        let empty: Config = serde_json::from_str("{}").unwrap();
        assert_eq!(empty, Config::default());
        assert!(serde_json::from_str::<Config>(r#"{"htpp": "127.0.0.1:1"}"#).is_err());
    }

    #[test]
    fn what_is_wrong_is_named() {
        let open = SocketAddr::from(([0, 0, 0, 0], 8080));
        let exposed = Config { http: open, ..Config::default() };
        assert_eq!(exposed.check(), Err(ConfigError::KeysRequired { http: open }));
        let key = crate::api::auth::tests::entry("k", "t", false);
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
        let kept = |config| Config { data_dir: Some("state".into()), ..config };
        assert_eq!(kept(group(&["a", "b", "c"])).check(), Ok(()));
        assert!(matches!(group(&["a", "b"]).check(), Err(ConfigError::Peers { .. })));
        assert!(matches!(kept(group(&["a", "a"])).check(), Err(ConfigError::Peers { .. })));
        let six = kept(group(&["a", "b", "c", "d", "e", "f"])).check();
        assert!(matches!(six, Err(ConfigError::Peers { .. })));
        assert_eq!(field(Config { lease_ms: 1_000, ..Config::default() }), "lease_ms");
    }
}
