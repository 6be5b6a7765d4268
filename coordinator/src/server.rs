//! A whole coordinator: opens its three ports, connects all parts, and stops them in order.

mod http;

use crate::access::{ApiAccess, ApiAudit};
use crate::config::{Config, ConfigError};
use crate::usage::UsageFile;
use crate::workers::{self, Terms};
use ::files::{FilesError, Limits as FileLimits, Store};
use ::usage::store::StoreError;
use api::batch_runner;
use api::batches::Batches;
use api::cors::Cors;
use api::image_urls::ImageUrls;
use api::images::HeldImages;
use api::operations::Sessions;
use api::planning_threads::PlanningThreads;
use api::realtime::SessionLimits;
use api::{self, AppState, auth::Keys, documents::Popularity};
use consensus::telemetry::RaftMetrics;
use dispatch::Dispatch;
use dispatch::metrics::Metrics;
use dispatch::models::{Models, ModelsError};
use dispatch::random::random_u64;
use group::agreement::{Agreement, GroupConfig, GroupError, ModelDigests, OwnSettings};
use group::audit::{Audit, AuditError, Record};
use group::deployments::Deployments;
use group::joining::Joining;
use group::replicas::Replicas;
use http::{Limits, Listener};
use ops::{Feed, Ops, ReadyGate};
use pki::Identity;
use proto::block::ClusterKey;
use proto::directory::{ClaimError, DirectoryClaim};
use proto::ids::{Epoch, ModelId, NodeId, Role};
use router::admission::TenantWeights;
use router::chain_memo::ChainMemo;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::task::{JoinHandle, JoinSet};
use transport::heartbeat::Heartbeat;
use transport::{Endpoint, EndpointConfig};

/// Interval for checking deadlines, leases and reservations.
const TICK: Duration = Duration::from_millis(50);
/// Most concurrent connections of the operations port.
const OPS_CONNECTIONS: usize = 256;
/// Memory for the memo of hash chains of prompts.
const CHAIN_BYTES: usize = 32 << 20;

/// Why a coordinator does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The configuration is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A model cannot be offered.
    #[error(transparent)]
    Models(#[from] ModelsError),
    /// The certificate is not a coordinator's.
    #[error("the certificate is a {0:?}'s, not a coordinator's")]
    WrongRole(Role),
    /// The QUIC endpoint cannot be opened.
    #[error(transparent)]
    Quic(#[from] transport::Error),
    /// The coordinator cannot join its group.
    #[error(transparent)]
    Group(#[from] GroupError),
    /// Another process holds the data directory, or it cannot be used.
    #[error(transparent)]
    DataDir(#[from] ClaimError),
    #[error("the async runtime has stopped")]
    Ended,
    /// The audit log cannot be opened.
    #[error(transparent)]
    Audit(#[from] AuditError),
    /// The usage of earlier runs cannot be read.
    #[error(transparent)]
    Usage(#[from] StoreError),
    /// The files of tenants cannot be read.
    #[error(transparent)]
    Files(#[from] FilesError),
    /// A TCP port cannot be opened.
    #[error("cannot listen on {address}: {source}")]
    Bind { address: SocketAddr, source: std::io::Error },
}

/// The addresses that a coordinator listens on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Addresses {
    pub http: SocketAddr,
    pub ops: SocketAddr,
    pub quic: SocketAddr,
}

/// A running coordinator. Dropping it stops it immediately; [`stop`](Self::stop) stops it in order.
#[derive(Debug)]
pub struct Coordinator {
    addresses: Addresses,
    dispatch: Arc<Dispatch>,
    ops: Arc<Ops>,
    endpoint: Arc<Endpoint>,
    agreement: Option<Arc<Agreement>>,
    http: Listener,
    ops_http: Listener,
    tasks: Vec<JoinHandle<()>>,
    /// Runs batches.
    batches: JoinHandle<()>,
    drain: Duration,
    usage: UsageFile,
    _claim: Option<DirectoryClaim>,
}

impl Coordinator {
    /// Starts a coordinator in the current tokio runtime: reads the model files, opens the ports, serves.
    pub async fn start(
        config: Config,
        identity: &Identity,
        cluster_key: ClusterKey,
    ) -> Result<Self, StartError> {
        config.check()?;
        let name = identity.name();
        if name.role != Role::Coordinator {
            return Err(StartError::WrongRole(name.role));
        }
        let claim = match config.data_dir.clone() {
            // May wait for another process to exit.
            Some(dir) => {
                let claimed = tokio::task::spawn_blocking(move || DirectoryClaim::of(&dir)).await;
                Some(claimed.map_err(|_| StartError::Ended)??)
            }
            None => None,
        };
        let models = Arc::new(Models::open(&config.models, config.raw_chats)?);
        let keys = Keys::new(&config.keys, cluster_key.clone(), config.data_dir.as_deref())
            .map_err(ConfigError::from)?;
        let audit = Arc::new(Audit::open(config.data_dir.as_deref(), name.node.clone())?);
        let raft = RaftMetrics::default();
        let in_group = config.data_dir.as_ref().map(|_| &raft);
        let metrics = Arc::new(Metrics::new(in_group));
        let counted = in_group.cloned();
        let weights = TenantWeights::new(&config.tenant_weights).map_err(ConfigError::from)?;
        let usage = UsageFile::open(config.data_dir.as_deref(), name.node.clone())?;
        let recorder = Arc::clone(usage.recorder());
        let batches = Batches::new(open_files(&config, name.node.clone())?);
        let dispatch = Dispatch::new(config.policy(), Arc::clone(&metrics), weights, recorder);

        let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let epoch = Epoch(u64::try_from(started.as_millis()).unwrap_or(u64::MAX));
        // A group of one may get further members.
        let single = config.data_dir.is_none();
        let accepted_roles = if single { vec![Role::Worker] } else { vec![Role::Worker, Role::Coordinator] };
        let joining = config.joining()?;
        let endpoint = EndpointConfig { joins: !single, ..EndpointConfig::new(epoch, accepted_roles) };
        let endpoint = Endpoint::bind(config.quic, identity, endpoint)?;
        let endpoint = Arc::new(endpoint);
        let digests =
            ModelDigests { tokenizers: models.tokenizer_digests(), prompting: models.prompting_digests() };
        let key_lines = config.key_lines();
        let settings =
            OwnSettings::new(&cluster_key, &digests, config.raw_chats, &key_lines, &config.tenant_weights);
        let agreement = Agreement::start(
            GroupConfig { data_dir: config.data_dir.as_deref(), peers: &config.peers },
            &endpoint,
            Arc::clone(&dispatch),
            Arc::new(ApiAccess(Arc::clone(&keys))),
            raft,
            settings,
            identity,
        )?;
        let replicas = agreement.as_ref().map(|agreement| {
            let (dispatch, agreement) = (Arc::clone(&dispatch), Arc::clone(agreement));
            Replicas::new(dispatch, agreement, Arc::clone(&models), Arc::clone(&audit), config.shards)
        });
        let deployments = agreement.as_ref().map(|agreement| {
            let (dispatch, agreement) = (Arc::clone(&dispatch), Arc::clone(agreement));
            Deployments::new(dispatch, agreement, Arc::clone(&models), Arc::clone(&audit))
        });
        let joining = Joining::new(
            agreement.clone(),
            identity.clone(),
            cluster_key.clone(),
            Arc::clone(&audit),
            Arc::clone(&metrics),
            joining,
        );
        let terms = Arc::new(Terms {
            cluster_key: cluster_key.clone(),
            lease: Duration::from_millis(config.lease_ms),
            report_every: Duration::from_millis(config.report_every_ms),
            tokenizers: models.tokenizer_digests(),
            audit: Arc::clone(&audit),
        });

        let (runtime, ticks) = (Heartbeat::new("the runtime"), Heartbeat::new("the dispatcher"));
        let join_loop = Heartbeat::new("the loop that takes workers");
        let chains = Arc::new(ChainMemo::new(&cluster_key, CHAIN_BYTES));
        let planning = PlanningThreads::new(std::thread::available_parallelism().map_or(2, usize::from));
        let state = Arc::new(AppState {
            dispatch: Arc::clone(&dispatch),
            models: Arc::clone(&models),
            keys: Arc::clone(&keys),
            chains: Arc::clone(&chains),
            metrics: Arc::clone(&metrics),
            popularity: Popularity::default(),
            batches,
            image_urls: ImageUrls::new(&config.image_urls).map_err(ConfigError::ImageHost)?,
            images: HeldImages::default(),
            planning: Arc::clone(&planning),
            cors: Cors::new(config.cors_origins.as_deref()).map_err(ConfigError::Origin)?,
            audit: Arc::new(ApiAudit(Arc::clone(&audit))),
            request_timeout: Duration::from_secs(config.request_timeout_s),
            load_wait: Duration::from_secs(config.load_wait_s),
            stream_silence: Duration::from_millis(config.stream_silence_ms),
            ollama: config.serves_ollama(),
            realtime: SessionLimits {
                sessions: Sessions::new(config.sessions_per_tenant),
                idle: Duration::from_secs(config.session_idle_s),
                longest: Duration::from_secs(config.session_max_s),
            },
            started: started.as_secs(),
        });
        let ops = Arc::new(Ops {
            id: name.node.clone(),
            dispatch: Arc::clone(&dispatch),
            agreement: agreement.clone(),
            replicas: replicas.clone(),
            deployments: deployments.clone(),
            models,
            keys,
            cluster_key,
            chains,
            planning,
            metrics: Arc::clone(&metrics),
            raft: counted,
            feed: Feed::default(),
            audit,
            gate: ReadyGate::new(config.hold_ready),
            identity: identity.clone(),
            loops: vec![runtime.clone(), ticks.clone(), join_loop.clone()],
        });
        let limits = Limits {
            port: "api",
            connections: config.max_connections,
            idle: Duration::from_secs(config.keep_alive_s),
            always: &[],
            metrics,
        };
        let ops_limits =
            Limits { port: "ops", connections: OPS_CONNECTIONS, always: &ops::PROBES, ..limits.clone() };
        let http = Listener::open(config.http, api::router(&state), limits).await?;
        let playground = api::routes(&state, &ops::PLAYGROUND);
        let ops_http =
            Listener::open(config.ops, ops::router(Arc::clone(&ops), playground), ops_limits).await?;

        let addresses = Addresses { http: http.address(), ops: ops_http.address(), quic: endpoint.address() };
        let mut tasks = vec![
            tokio::spawn(workers::serve(
                Arc::clone(&endpoint),
                Arc::clone(&dispatch),
                terms,
                agreement.clone(),
                join_loop,
            )),
            tokio::spawn(tick(Arc::clone(&dispatch), ticks)),
            tokio::spawn(runtime.of_runtime()),
            tokio::spawn(usage.clone().keep()),
        ];
        tasks.push(tokio::spawn(Arc::clone(&joining).keep()));
        tasks.push(tokio::spawn(serve_joining(Arc::clone(&endpoint), joining)));
        tasks.push(tokio::spawn(note_revocations(identity.clone(), Arc::clone(&ops.audit))));
        tasks.extend(replicas.map(|replicas| tokio::spawn(replicas.run())));
        tasks.extend(deployments.map(|deployments| tokio::spawn(deployments.run())));
        tracing::info!(id = %name.node, ?addresses, "coordinator started");
        let batches = tokio::spawn(batch_runner::run(state));
        let drain = Duration::from_secs(config.drain_s);
        Ok(Self {
            addresses,
            dispatch,
            ops,
            endpoint,
            agreement,
            http,
            ops_http,
            tasks,
            batches,
            drain,
            usage,
            _claim: claim,
        })
    }

    pub fn addresses(&self) -> Addresses {
        self.addresses
    }

    /// Whether a worker accepts requests for this model.
    pub fn serves(&self, model: &ModelId) -> bool {
        self.dispatch.serves(model)
    }

    /// Releases `/readyz` if the configuration holds it at 503.
    pub fn release_ready(&self) {
        self.ops.gate.release();
    }

    /// Removes a worker whose parent process reports it dead. Returns `false` if the worker is not a member.
    pub fn notice_dead(&self, worker: &NodeId) -> bool {
        self.dispatch.notice_dead(worker)
    }

    /// Hands leadership over, stops accepting connections, lets running requests finish within the configured
    /// time, and closes everything. Returns `true` if all of them finished.
    pub async fn stop(mut self) -> bool {
        self.ops.gate.stop();
        // Its lines run again after a restart; none may fail because the workers' connections close.
        self.batches.abort();
        // First, so that another coordinator takes changes while requests finish here.
        if let Some(agreement) = &self.agreement {
            agreement.stop().await;
        }
        let finished = self.http.stop(self.drain).await;
        self.ops_http.stop(Duration::ZERO).await;
        self.endpoint.close().await;
        self.usage.save().await;
        tracing::info!(finished, "coordinator stopped");
        finished
    }
}

impl Drop for Coordinator {
    fn drop(&mut self) {
        self.batches.abort();
        for task in &self.tasks {
            task.abort();
        }
        self.usage.close();
    }
}

/// Opens the files and batches of the tenants.
fn open_files(config: &Config, node: NodeId) -> Result<Arc<Store>, FilesError> {
    let of_data = config.data_dir.as_ref().map(|directory| directory.join("files"));
    let directory = config.files_dir.clone().or(of_data);
    let store = Store::open(directory.as_deref(), node, FileLimits::default())?;
    if let (directory, true) = store.place() {
        let (directory, most) = (directory.display(), store.limits().total_bytes);
        tracing::info!(%directory, most, "files and batches are kept in a temporary directory and end with this process");
    }
    Ok(store)
}

/// Answers nodes that join or renew their certificates.
async fn serve_joining(endpoint: Arc<Endpoint>, joining: Arc<Joining>) {
    let mut calls = JoinSet::new();
    while let Some(call) = endpoint.accept_join().await {
        while calls.try_join_next().is_some() {}
        calls.spawn(Arc::clone(&joining).serve(call));
    }
}

/// Records in the audit log when this node receives revocations of certificates.
async fn note_revocations(identity: Identity, audit: Arc<Audit>) {
    let mut count = 0;
    loop {
        count = identity.more_revoked_than(count).await;
        let on = format!("{count} certificates in all");
        audit.note(&Record { who: "authority", from: None, what: "revoke", on: &on, result: "taken" });
    }
}

async fn tick(dispatch: Arc<Dispatch>, heart: Heartbeat) {
    // A random phase, so that coordinators do not tick in step.
    tokio::time::sleep(TICK.mul_f64((random_u64() % 1_000) as f64 / 1e3)).await;
    let mut ticks = tokio::time::interval(TICK);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        dispatch.tick();
        heart.beat();
    }
}
