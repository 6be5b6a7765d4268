//! Accepts worker connections: registration, load reports and KV events. Other coordinators dial the same
//! port and are passed to the agreement.

use consensus::table::Level;
use dispatch::{Dispatch, SessionId};
use group::agreement::Agreement;
use group::audit::{Audit, Record};
use proto::adapter::AdapterReport;
use proto::block::ClusterKey;
use proto::codec::CodecError;
use proto::deployment::HostReport;
use proto::ids::{ModelId, NodeId, Role};
use proto::log::Repeats;
use proto::message::image_encoder::EncoderReport;
use proto::shard::ShippingReport;
use proto::usage::UsageReport;
use proto::worker::{CertificateReport, LoadReport, Refusal, Register, Registered};
use router::table::TableError;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tarpc::context::Context;
use tokio::task::JoinSet;
use transport::heartbeat::{BEAT_EVERY, Heartbeat};
use transport::service::CoordinatorApi;
use transport::{CloseCode, Connection, Endpoint, Incoming, KvEventReceiver};

/// Rate limit for logs of workers that connect, or are refused, repeatedly.
static NOTED: Repeats = Repeats::new();

/// Parameters for workers, and what their registrations must match.
#[derive(Debug)]
pub struct Terms {
    /// Keys every block id of the cluster.
    pub cluster_key: ClusterKey,
    /// A worker without a report for this long is removed.
    pub lease: Duration,
    pub report_every: Duration,
    /// Digests of the tokenizers that this coordinator uses, by model.
    pub tokenizers: HashMap<ModelId, [u8; 32]>,
    /// The audit log, for joins.
    pub audit: Arc<Audit>,
}

/// Serves workers until the endpoint is closed.
pub async fn serve(
    endpoint: Arc<Endpoint>,
    dispatch: Arc<Dispatch>,
    terms: Arc<Terms>,
    agreement: Option<Arc<Agreement>>,
    heart: Heartbeat,
) {
    let sessions = AtomicU64::new(0);
    let mut open = JoinSet::new();
    let mut beats = tokio::time::interval(BEAT_EVERY);
    beats.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        heart.beat();
        let connection = tokio::select! {
            connection = endpoint.accept() => connection,
            _ = beats.tick() => continue,
        };
        let Some(connection) = connection else { return };
        while open.try_join_next().is_some() {}
        if let (Role::Coordinator, Some(agreement)) = (connection.peer().role, &agreement) {
            agreement.accepted(connection);
            continue;
        }
        let session = Session {
            id: SessionId(sessions.fetch_add(1, Ordering::Relaxed)),
            connection,
            dispatch: Arc::clone(&dispatch),
            terms: Arc::clone(&terms),
            agreement: agreement.clone(),
            instance: Arc::default(),
        };
        open.spawn(session.run());
    }
}

/// One connection of a worker.
#[derive(Debug, Clone)]
struct Session {
    id: SessionId,
    connection: Connection,
    dispatch: Arc<Dispatch>,
    terms: Arc<Terms>,
    agreement: Option<Arc<Agreement>>,
    /// The worker's instance that has registered on this connection.
    instance: Arc<OnceLock<NodeId>>,
}

impl Session {
    /// The name under which it has registered, else that of its certificate.
    fn node(&self) -> &NodeId {
        self.instance.get().unwrap_or(&self.connection.peer().node)
    }

    async fn run(self) {
        if self.connection.peer().role != Role::Worker {
            self.connection.close(CloseCode::Protocol);
            return;
        }
        if let Some(left_out) = NOTED.due((self.node(), "connected")) {
            let epoch = self.connection.peer_epoch().0;
            tracing::info!(node = %self.node(), epoch, left_out, "a worker has connected");
        }
        let mut streams = JoinSet::new();
        loop {
            while streams.try_join_next().is_some() {}
            match self.connection.accept().await {
                Ok(Incoming::CoordinatorRpc(rpc)) => {
                    streams.spawn(rpc.serve(self.clone()));
                }
                Ok(Incoming::KvEvents(events)) => {
                    streams.spawn(self.clone().follow(events));
                }
                // The transport refuses streams that a worker may not open at a coordinator. Bulk streams are
                // not used here; dropping them refuses them.
                Ok(Incoming::Bulk(_) | Incoming::WorkerRpc(_)) => {}
                Ok(Incoming::Generate(_) | Incoming::Encode(_) | Incoming::Operation(_)) => {}
                Ok(Incoming::KvSnapshot(_) | Incoming::Sequence(_) | Incoming::Pull(_)) => {}
                Ok(Incoming::Group(_) | Incoming::PeerIndex(_)) => {}
                Ok(
                    Incoming::Stage(_)
                    | Incoming::StageLease(_)
                    | Incoming::StageBlocks(_)
                    | Incoming::Activations(_),
                ) => {}
                Ok(Incoming::Shard(_) | Incoming::EncodeImage(_)) => {}
                Err(error) => {
                    if let Some(left_out) = NOTED.due((self.node(), "ended")) {
                        tracing::info!(node = %self.node(), %error, left_out, "a worker's connection has ended");
                    }
                    if self.connection.was_closed_for(CloseCode::DeviceLost) {
                        self.device_lost().await;
                    }
                    self.dispatch.session_lost(self.id, self.node());
                    return;
                }
            }
        }
    }

    /// The worker's epoch ends with its GPU. After repeated losses, the worker drains until an operator
    /// undrains it.
    async fn device_lost(&self) {
        let (node, epoch) = (self.node(), self.connection.peer_epoch());
        tracing::error!(%node, epoch = epoch.0, "a worker has lost its GPU");
        if !self.dispatch.lost_devices().lost(Instant::now(), node, epoch) {
            return;
        }
        tracing::error!(%node, "a worker has lost its GPU repeatedly: it is drained until an operator undrains it");
        self.drain(node).await;
    }

    /// Drains a worker because of a report on this connection.
    async fn drain(&self, node: &NodeId) {
        let drained = match &self.agreement {
            Some(agreement) => agreement.drain(node, true).await.map_err(|error| error.to_string()),
            None => self.dispatch.drain(node, true).await.map_err(|error| error.to_string()),
        };
        if let Err(error) = &drained {
            tracing::error!(%node, error, "the drain of a worker failed");
        }
        self.audit("drain", node.as_str(), &drained.map_or_else(|error| error, |()| "made".to_owned()));
    }

    async fn follow(self, mut events: KvEventReceiver) {
        while let Some(batch) = events.next().await {
            match batch {
                Ok(batch) => self.dispatch.events(self.id, self.node(), batch),
                // A later version's event. The skipped number shows as a gap.
                Err(transport::Error::Codec(error @ CodecError::UnknownVariant { .. })) => {
                    tracing::debug!(node = %self.node(), %error, "skipped KV events of a later version");
                }
                Err(error) => {
                    tracing::debug!(node = %self.node(), %error, "the stream of KV events has ended");
                    return;
                }
            }
        }
    }
}

impl CoordinatorApi for Session {
    async fn register(self, _: Context, request: Register) -> Result<Registered, Refusal> {
        let registered = self.admit(request).await;
        let result = registered.as_ref().map_or_else(ToString::to_string, |_| "joined".to_owned());
        // A refused worker retries forever: limit the audit records.
        if registered.is_ok() || NOTED.due((self.node(), "audit", &result)).is_some() {
            self.audit("join", &format!("epoch {}", self.connection.peer_epoch().0), &result);
        }
        registered
    }

    async fn report(self, _: Context, report: LoadReport) -> Result<(), Refusal> {
        if self.dispatch.load(self.id, self.node(), report) { Ok(()) } else { Err(Refusal::NotRegistered) }
    }

    async fn adapters(self, _: Context, report: AdapterReport) -> Result<(), Refusal> {
        let AdapterReport { epoch, adapters } = report;
        let left_out = self.dispatch.set_adapters(self.id, self.node(), epoch, adapters);
        for adapter in left_out.ok_or(Refusal::NotRegistered)? {
            tracing::error!(node = %self.node(), adapter = %adapter.name, "an adapter is not served: its name means something else here, or its model is not served");
        }
        Ok(())
    }

    async fn host(self, _: Context, report: HostReport) -> Result<(), Refusal> {
        if self.dispatch.set_host(self.id, self.node(), report) {
            Ok(())
        } else {
            Err(Refusal::NotRegistered)
        }
    }

    async fn certificate(self, _: Context, report: CertificateReport) {
        let CertificateReport { ends } = report;
        self.dispatch.certificates().report(self.id, self.node(), ends);
    }

    async fn usage(self, _: Context, report: UsageReport) {
        self.dispatch.usage().reported(self.node(), report);
    }

    async fn encoder(self, _: Context, report: EncoderReport) {
        tracing::info!(node = %self.node(), model = %report.tower.model, "a worker encodes images for others");
        self.dispatch.set_encoder(self.id, self.node(), report);
    }

    async fn shipping(self, _: Context, report: ShippingReport) {
        for struck in self.dispatch.shipments().report(self.id, self.node(), report) {
            tracing::error!(node = %self.node(), source = %struck, "a worker received wrong bytes: their source is drained");
            self.drain(&struck).await;
        }
    }
}

impl Session {
    fn audit(&self, what: &str, on: &str, result: &str) {
        let from = Some(self.connection.remote_address().ip().to_canonical());
        let who = format!("worker {}", self.node());
        self.terms.audit.note(&Record { who: &who, from, what, on, result });
    }

    /// Whether all coordinators of the group know deployed models, whose workers have instances.
    fn deploys(&self) -> bool {
        let table = self.agreement.as_ref().and_then(|agreement| agreement.table());
        table.is_some_and(|table| table.level() >= Level(2))
    }

    async fn admit(&self, register: Register) -> Result<Registered, Refusal> {
        let worker = &register.worker;
        let node = worker.node.clone();
        self.connection.require_node(&node).map_err(|_| Refusal::NotYourName { claimed: node.clone() })?;
        if node.is_instance() && !self.deploys() {
            return Err(Refusal::NotRegistered);
        }
        for model in worker.models.iter().filter(|model| !model.id.is_version()) {
            match self.terms.tokenizers.get(&model.id) {
                Some(digest) if *digest != model.tokenizer_digest => {
                    if let Some(left_out) = NOTED.due((&node, &model.id, "tokenizer")) {
                        tracing::error!(%node, model = %model.id, left_out, "registration refused: the worker's tokenizer differs from this coordinator's");
                    }
                    return Err(Refusal::ModelDiffers { model: model.id.to_string() });
                }
                Some(_) => {}
                None => {
                    if let Some(left_out) = NOTED.due((&node, &model.id, "not configured")) {
                        tracing::warn!(%node, model = %model.id, left_out, "the worker serves a model that this coordinator does not offer");
                    }
                }
            }
        }
        if node.is_instance() && *self.instance.get_or_init(|| node.clone()) != node {
            return Err(Refusal::NotYourName { claimed: node });
        }
        let epoch = worker.epoch;
        if let Some(agreement) = &self.agreement {
            agreement.settings_compared().await;
            if let Some(settings) = agreement.odd_settings() {
                return Err(Refusal::SettingsDiffer { settings });
            }
        }
        if let Some(at) = self.dispatch.is_alive_elsewhere(self.id, &node, epoch).await {
            let at = at.to_string();
            if let Some(left_out) = NOTED.due((&node, "copy")) {
                let from = self.connection.remote_address();
                tracing::error!(
                    %node,
                    %from,
                    alive_at = at,
                    left_out,
                    "registration refused: another process with this worker's identity is alive; each worker needs an identity of its own"
                );
            }
            return Err(Refusal::AlreadyHere { at });
        }
        let models: Vec<_> = worker.models.iter().map(|m| m.id.to_string()).collect();
        let newer = self.agreement.as_ref().and_then(|agreement| agreement.newer_epoch(&node, epoch));
        if let Some(known) = newer {
            if let Some(left_out) = NOTED.due((&node, "later life")) {
                tracing::error!(%node, epoch = epoch.0, known = known.0, left_out, "registration refused: the group knows a later epoch of this worker");
            }
            return Err(Refusal::StaleEpoch { known });
        }
        match self.dispatch.join(self.id, self.connection.clone(), register) {
            Ok(()) => {
                if let Some(agreement) = &self.agreement {
                    agreement.joined();
                }
                tracing::info!(%node, epoch = epoch.0, ?models, "a worker has joined");
                let millis = |d: Duration| u64::try_from(d.as_millis()).unwrap_or(u64::MAX);
                Ok(Registered {
                    lease_ms: millis(self.terms.lease),
                    report_every_ms: millis(self.terms.report_every),
                    cluster_key: self.terms.cluster_key.clone(),
                })
            }
            Err(error) => {
                if let Some(left_out) = NOTED.due((&node, error.to_string())) {
                    tracing::error!(%node, epoch = epoch.0, %error, left_out, "registration refused");
                }
                Err(match error {
                    TableError::StaleEpoch { known, .. } => Refusal::StaleEpoch { known },
                    TableError::ModelConflict { model, .. } => {
                        Refusal::ModelDiffers { model: model.to_string() }
                    }
                    TableError::Full { .. } | TableError::TooLarge { .. } | TableError::UnknownWorker(_) => {
                        Refusal::NotRegistered
                    }
                })
            }
        }
    }
}
