//! Executes the balancer's decisions: the balancer behind a lock, the connections to the workers, and the
//! life cycle of each generation ([`Generation`]), call to encode texts ([`Encoding`]) and session of an
//! operation ([`OpenedSession`]).
//!
//! Guarantees: requests are sent to a worker in the order of the balancer's decisions, except those that wait
//! for a prefill worker. A client gets no token twice: a retry continues after the emitted tokens. Dropping a
//! request takes it out of the balancer and cancels its stream at the worker.
//! Must not contain: the choice of a worker (the crate `router`), HTTP, plans of replicas, arithmetic.

mod adapters;
mod certificates;
mod choice;
mod encoders;
mod encoding;
mod generation;
pub mod hosts;
mod link;
mod loads;
mod lost_devices;
pub mod metrics;
pub mod models;
mod operation;
mod outcomes;
mod peers;
mod pool;
mod progress;
pub mod quota;
pub mod random;
mod sequences;
mod shipments;
mod ticket;
mod usage;
mod waiting;

pub use adapters::AdapterOutcome;
pub use certificates::Certificates;
pub use encoding::{EncodeJob, Encoded, Encoding};
pub use generation::{Event, Failure, Generation, GenerationJob, Started};
pub use hosts::HostWorker;
pub use link::SessionId;
pub use loads::WorkerLoads;
pub use lost_devices::LostDevices;
pub use operation::{OpenedSession, OperationJob, Seating, Unopened};
pub use outcomes::{ModelCounts, OutcomeReport, Outcomes};
pub use peers::Peers;
pub use pool::PoolWorker;
pub use progress::{Progress, ProgressProbe};
pub use shipments::Shipments;
pub use usage::Payer;
pub use waiting::WaitingReport;

use ::usage::recorder::Recorder;
use link::{Link, Pooled};
use metrics::Metrics;
use parking_lot::{Mutex, MutexGuard};
use proto::block::BlockId;
use proto::event::{KvEventBatch, KvReplay};
use proto::ids::{Epoch, ModelId, NodeId};
use proto::log::Repeats;
use proto::message::GenerateError;
use proto::sequence::SequenceName;
use proto::served_model::{ModelTask, ServedModel};
use proto::worker::{LoadReport, Register, WorkerInfo};
use random::random_u64;
use router::admission::TenantWeights;
use router::balancer::{
    Action, Assignment, AttemptError, Balancer, Policy, QueueView, Refusal, RouteRequest, Ticket, WorkerView,
};
use router::prefix_index::{GapRepair, IndexSize};
use router::table::roster::Roster;
use router::table::{Member, TableChange, TableError};
use sequences::Served;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use ticket::{PlacedAttempt, TicketGuard};
use tokio::sync::{Notify, mpsc};
use transport::service::deadline;
use transport::{CloseCode, Connection};

/// Timeout of RPCs to a worker, except generations.
const RPC_LIMIT: Duration = Duration::from_secs(5);
/// How long a worker may take to prove that it is alive when another process registers under its name.
const ALIVE_LIMIT: Duration = Duration::from_secs(1);
/// Rate limit for logs of refused KV events.
static REFUSED: Repeats = Repeats::new();

/// The balancer with its connections. Shared in an `Arc`.
#[derive(Debug)]
pub struct Dispatch {
    state: Mutex<DispatchState>,
    metrics: Arc<Metrics>,
    peers: Peers,
    shipments: Shipments,
    certificates: Certificates,
    lost_devices: LostDevices,
    weights: TenantWeights,
    usage: Arc<Recorder>,
    waiting: waiting::Waiting,
    /// Notified after a worker's events have been applied.
    events_applied: Notify,
    /// Load reports received so far.
    reports: AtomicU64,
    /// Most sequences at one worker.
    max_inflight: u32,
}

/// State under one lock, so that a decision is atomic with its inputs. Never held across an `await`.
#[derive(Debug)]
struct DispatchState {
    balancer: Balancer,
    /// Channels for the placement results of tickets that were not decided at submission.
    tickets: HashMap<Ticket, mpsc::UnboundedSender<PlacementResult>>,
    links: HashMap<NodeId, Arc<Link>>,
    served: Served,
}

/// The balancer's decision about a ticket. Boxed, because a channel allocates space for dozens of values up
/// front.
type PlacementResult = Result<Box<PlacedAttempt>, Refusal>;

/// Source of a ticket's next placement.
#[derive(Debug)]
enum PlacementSource {
    /// Decided at submission; `None` once it was taken and no retry has followed.
    Decided(Option<PlacementResult>),
    Pending(mpsc::UnboundedReceiver<PlacementResult>),
}

impl PlacementSource {
    async fn next(&mut self) -> Option<PlacementResult> {
        match self {
            Self::Decided(placement) => placement.take(),
            Self::Pending(placements) => placements.recv().await,
        }
    }
}

impl DispatchState {
    fn pending(&mut self, ticket: Ticket) -> PlacementSource {
        let (sender, placements) = mpsc::unbounded_channel();
        self.tickets.insert(ticket, sender);
        PlacementSource::Pending(placements)
    }
}

impl Dispatch {
    pub fn new(
        policy: Policy,
        metrics: Arc<Metrics>,
        weights: TenantWeights,
        usage: Arc<Recorder>,
    ) -> Arc<Self> {
        let max_inflight = policy.max_inflight;
        let balancer = Balancer::weighted(policy, weights.clone());
        let state = DispatchState {
            balancer,
            tickets: HashMap::new(),
            links: HashMap::new(),
            served: Served::default(),
        };
        Arc::new(Self {
            state: Mutex::new(state),
            metrics,
            peers: Peers::default(),
            shipments: Shipments::default(),
            certificates: Certificates::default(),
            lost_devices: LostDevices::default(),
            weights,
            usage,
            waiting: waiting::Waiting::default(),
            events_applied: Notify::new(),
            reports: AtomicU64::new(0),
            max_inflight,
        })
    }

    /// Submits the generations of one request: all are taken or none. Dropping a [`Generation`] cancels it.
    pub fn generate(self: &Arc<Self>, jobs: Vec<GenerationJob>) -> Result<Vec<Generation>, Refusal> {
        let requests: Vec<_> = jobs.iter().map(|job| Arc::clone(&job.request)).collect();
        let tickets = self.submit(&requests)?.into_iter();
        Ok(tickets.zip(jobs).map(|(ticket, job)| Generation::new(ticket, job)).collect())
    }

    /// Submits the parts of one request to encode texts: all are taken or none. Dropping an [`Encoding`]
    /// cancels it.
    pub fn encode(self: &Arc<Self>, jobs: Vec<EncodeJob>) -> Result<Vec<Encoding>, Refusal> {
        let requests: Vec<_> = jobs.iter().map(|job| Arc::clone(&job.request)).collect();
        let tickets = self.submit(&requests)?.into_iter();
        Ok(tickets.zip(jobs).map(|(ticket, job)| Encoding::new(ticket, job)).collect())
    }

    fn submit(self: &Arc<Self>, requests: &[Arc<RouteRequest>]) -> Result<Vec<TicketGuard>, Refusal> {
        let mut state = self.state.lock();
        let (tickets, actions) = state.balancer.submit(Instant::now(), requests, random_u64())?;
        // Most requests are placed at once and need no channel. Actions are handled in order, so that
        // requests are sent in the order of the decisions.
        let mut decided: Vec<Option<PlacementResult>> = tickets.iter().map(|_| None).collect();
        for action in actions {
            let own = |ticket: &Ticket| tickets.iter().position(|own| own == ticket);
            match action {
                Action::Assign(ticket, assignment) => match own(&ticket) {
                    Some(at) => decided[at] = Some(self.assigned(&state, assignment)),
                    None => self.perform(&mut state, [Action::Assign(ticket, assignment)]),
                },
                Action::Refuse(ticket, refusal) => match own(&ticket) {
                    Some(at) => decided[at] = Some(Err(refusal)),
                    None => self.perform(&mut state, [Action::Refuse(ticket, refusal)]),
                },
                action => self.perform(&mut state, [action]),
            }
        }
        let guard = |(ticket, decided): (Ticket, Option<PlacementResult>)| {
            let placements = match decided {
                Some(placement) => PlacementSource::Decided(Some(placement)),
                None => state.pending(ticket),
            };
            TicketGuard::new(Arc::clone(self), ticket, placements)
        };
        Ok(tickets.into_iter().zip(decided).map(guard).collect())
    }

    /// Adds a worker that has registered on `connection`. Closes its earlier connection, if any.
    pub fn join(
        self: &Arc<Self>,
        session: SessionId,
        connection: Connection,
        register: Register,
    ) -> Result<(), TableError> {
        let Register { worker, part, pulls, capacity, operations, drafter } = register;
        let (node, epoch) = (worker.node.clone(), worker.epoch);
        let quic = reachable(&worker.quic, connection.remote_address());
        let mut state = self.state.lock();
        let join = TableChange::Join(worker);
        let actions = state.balancer.change(Instant::now(), join, random_u64())?;
        state.balancer.introduce(&node, epoch, part, pulls, quic.clone());
        state.balancer.offer(&node, epoch, operations);
        let pool = capacity.map(|capacity| Pooled { capacity, drafter });
        let link = Arc::new(Link::new(session, epoch, (connection, quic), pool));
        if let Some(old) = state.links.insert(node.clone(), link)
            && old.session() != session
        {
            old.close(CloseCode::Fenced);
        }
        self.perform(&mut state, actions);
        if state.balancer.table().members().any(|member| member.adapters().any(|adapter| adapter.ordered)) {
            tokio::spawn(Arc::clone(self).pass_adapters(node.clone()));
        }
        // The worker's earlier epoch was draining. The new process does not know this yet.
        if state.balancer.table().member(&node).is_some_and(|member| member.draining) {
            let dispatch = Arc::clone(self);
            tokio::spawn(async move { dispatch.send_drain_state(&node).await });
        }
        Ok(())
    }

    /// Returns the address of another live process that is a member under this worker's name: it has another
    /// connection and an earlier epoch, and answers or reports during this call. A killed or frozen process
    /// does neither. If the other process has a later epoch, this returns `None` and `join` refuses the
    /// newcomer.
    pub async fn is_alive_elsewhere(
        &self,
        session: SessionId,
        node: &NodeId,
        epoch: Epoch,
    ) -> Option<SocketAddr> {
        let other = || {
            let state = self.state.lock();
            let link = state.links.get(node)?;
            let other = link.session() != session && link.epoch() < epoch && !link.is_closed();
            other.then(|| Arc::clone(link))
        };
        let link = other()?;
        let started = Instant::now();
        let answer = async { link.api().await.ok()?.status(deadline(ALIVE_LIMIT)).await.ok() };
        let answers = tokio::time::timeout(ALIVE_LIMIT, answer).await.is_ok_and(|answer| answer.is_some());
        // The other process may have left meanwhile.
        let link = other().filter(|now| now.session() == link.session())?;
        let silent = self
            .state
            .lock()
            .balancer
            .workers(Instant::now())
            .into_iter()
            .find_map(|view| (view.member.register.node == *node).then_some(view.silent));
        let reports = silent.is_some_and(|silent| silent < started.elapsed());
        (answers || reports).then(|| link.connection().remote_address())
    }

    /// Takes a worker's load report. Returns `false` if the worker is not a member with this session and
    /// epoch.
    pub fn load(self: &Arc<Self>, session: SessionId, node: &NodeId, report: LoadReport) -> bool {
        let mut state = self.state.lock();
        let epoch = report.epoch;
        let member = state.links.get(node).is_some_and(|l| l.session() == session && l.epoch() == epoch);
        if member {
            self.reports.fetch_add(1, Ordering::Relaxed);
            state.balancer.pulled(node, epoch, report.pulls);
            let actions = state.balancer.load(Instant::now(), node, report, random_u64());
            self.perform(&mut state, actions);
        }
        member
    }

    /// The workers' reports of model downloads.
    pub fn shipments(&self) -> &Shipments {
        &self.shipments
    }

    /// The reported expiry times of the workers' certificates.
    pub fn certificates(&self) -> &Certificates {
        &self.certificates
    }

    /// The worker epochs that ended with a lost GPU.
    pub fn lost_devices(&self) -> &LostDevices {
        &self.lost_devices
    }

    /// Applies a worker's KV events.
    pub fn events(self: &Arc<Self>, session: SessionId, node: &NodeId, batch: KvEventBatch) {
        for part in batch.into_parts() {
            let mut state = self.state.lock();
            if state.links.get(node).is_none_or(|link| link.session() != session) {
                // The worker has not registered yet, or this connection was replaced. The replay after its
                // registration repeats the events.
                return;
            }
            match state.balancer.events(node, part) {
                Ok(action) => {
                    let placed = state.balancer.announced(Instant::now(), random_u64());
                    self.perform(&mut state, action.into_iter().chain(placed));
                }
                Err(error) => {
                    if let Some(left_out) = REFUSED.due((node, error.to_string())) {
                        tracing::warn!(%node, %error, left_out, "KV events refused");
                    }
                }
            }
            // Lets waiting requests take the lock between the parts.
            MutexGuard::unlock_fair(state);
        }
        self.events_applied.notify_waiters();
    }

    /// The session's connection is gone. If it is the worker's current connection, the worker leaves.
    pub fn session_lost(self: &Arc<Self>, session: SessionId, node: &NodeId) {
        self.shipments.forget(session, node);
        self.certificates.forget(session, node);
        self.remove(node, "connection lost", |link| link.session() == session);
    }

    /// Removes a worker whose process is reported dead, without waiting for QUIC to time out. Returns `false`
    /// if the worker is not a member.
    pub fn notice_dead(self: &Arc<Self>, node: &NodeId) -> bool {
        let of_process: Vec<_> = {
            let state = self.state.lock();
            state.links.keys().filter(|link| link.worker() == node.as_str()).cloned().collect()
        };
        of_process.iter().filter(|node| self.remove(node, "reported dead", |_| true)).count() > 0
    }

    /// Removes the workers without a generation from here. They join other coordinators.
    pub fn remove_idle_workers(self: &Arc<Self>, why: &str) {
        for view in self.workers().iter().filter(|view| view.inflight == 0) {
            self.remove(&view.member.register.node, why, |_| true);
        }
    }

    /// Makes a worker drain, or take work again: here at once, at the worker by RPC.
    pub async fn drain(self: &Arc<Self>, node: &NodeId, draining: bool) -> Result<(), TableError> {
        let change = TableChange::Drain { node: node.clone(), draining };
        self.change(change)?;
        self.send_drain_state(node).await;
        Ok(())
    }

    fn change(self: &Arc<Self>, change: TableChange) -> Result<(), TableError> {
        let mut state = self.state.lock();
        let actions = state.balancer.change(Instant::now(), change, random_u64())?;
        self.perform(&mut state, actions);
        Ok(())
    }

    /// Applies what the coordinators have agreed on: which workers drain, and each worker's current epoch.
    /// Workers of an older epoch are removed.
    pub fn agree(self: &Arc<Self>, roster: &Roster) {
        for (node, epoch, draining) in self.member_epochs() {
            let Some(agreed) = roster.worker(&node) else { continue };
            if agreed.epoch > epoch {
                self.remove(&node, "the group knows a later epoch of the worker", |link| {
                    link.epoch() == epoch
                });
            } else if agreed.standing.drains() != draining {
                let change = TableChange::Drain { node: node.clone(), draining: !draining };
                // Fails only if the worker has left meanwhile.
                if self.change(change).is_ok() {
                    let dispatch = Arc::clone(self);
                    tokio::spawn(async move { dispatch.send_drain_state(&node).await });
                }
            }
        }
    }

    /// The registrations of all members.
    pub fn introductions(&self) -> Vec<Arc<WorkerInfo>> {
        self.state.lock().balancer.table().members().map(|member| Arc::clone(&member.register)).collect()
    }

    fn member_epochs(&self) -> Vec<(NodeId, Epoch, bool)> {
        let state = self.state.lock();
        let epoch = |member: &Member| (member.register.node.clone(), member.register.epoch, member.draining);
        state.balancer.table().members().map(epoch).collect()
    }

    /// Sends a worker its drain state, again if the state changes during the call.
    async fn send_drain_state(&self, node: &NodeId) {
        let target = || {
            let state = self.state.lock();
            let member = state.balancer.table().member(node)?;
            Some((Arc::clone(state.links.get(node)?), member.draining))
        };
        let mut last = None;
        while let Some((link, draining)) = target()
            && last != Some(draining)
        {
            last = Some(draining);
            let sent = match link.api().await {
                Ok(api) if draining => api.drain(deadline(RPC_LIMIT)).await.map_err(|e| e.to_string()),
                Ok(api) => api.undrain(deadline(RPC_LIMIT)).await.map_err(|e| e.to_string()),
                Err(error) => Err(error.to_string()),
            };
            if let Err(error) = sent {
                // The worker gets no work from here in any case.
                tracing::warn!(%node, draining, %error, "cannot send a drain or its end to the worker");
            }
        }
    }

    /// Expires deadlines, leases and reservations. Call it several times a second.
    pub fn tick(self: &Arc<Self>) {
        let mut state = self.state.lock();
        let actions = state.balancer.tick(Instant::now(), random_u64());
        self.perform(&mut state, actions);
    }

    /// The workers' own metrics as text, by node. Workers that do not answer within `limit` are left out.
    pub async fn worker_metrics(&self, limit: Duration) -> Vec<(NodeId, String)> {
        let links: Vec<_> = self.state.lock().links.iter().map(|(n, l)| (n.clone(), Arc::clone(l))).collect();
        let fetch = async |node: NodeId, link: Arc<Link>| {
            let text = link.api().await.ok()?.metrics_text(deadline(limit)).await.ok()?;
            Some((node, text))
        };
        let fetched = links.into_iter().map(|(n, l)| tokio::time::timeout(limit, fetch(n, l)));
        futures::future::join_all(fetched).await.into_iter().filter_map(|r| r.ok().flatten()).collect()
    }

    /// The model of this name, if a worker serves it or is expected to.
    pub fn model(&self, id: &ModelId) -> Option<ServedModel> {
        let state = self.state.lock();
        let mut served = state.balancer.model(id).cloned()?;
        let mut members = state.balancer.table().members().filter_map(|member| member.model(id));
        if served.task.generates() && members.any(|served| served.task.sees_images()) {
            served.task = ModelTask::GenerateFromImages;
        }
        Some(served)
    }

    pub fn serves(&self, id: &ModelId) -> bool {
        self.state.lock().balancer.serves(id)
    }

    /// Checks whether the queue has room for another request. Cheap; call it before preparing a request.
    pub fn check_room(&self) -> Result<(), Refusal> {
        self.state.lock().balancer.check_room(1, 0)
    }

    /// Number of changes of the worker table so far.
    pub fn table_version(&self) -> u64 {
        self.state.lock().balancer.table().version()
    }

    /// This coordinator's view of the workers.
    pub fn workers(&self) -> Vec<WorkerView> {
        self.state.lock().balancer.workers(Instant::now())
    }

    /// Calls `look` with the balancer locked.
    pub fn look<T>(&self, look: impl FnOnce(&Balancer) -> T) -> T {
        look(&self.state.lock().balancer)
    }

    /// Size of the index, size of the queue, and number of assigned generations.
    pub fn sizes(&self) -> (IndexSize, QueueView, usize) {
        let state = self.state.lock();
        (state.balancer.index_size(), state.balancer.queue(), state.balancer.inflight())
    }

    /// How requests for versions of deployed models ended.
    pub fn outcomes(&self) -> &Outcomes {
        &self.metrics.outcomes
    }

    /// Forgets counts and metrics of versions that are not deployed any more.
    pub fn retain_versions(&self, is_deployed: impl Fn(&ModelId) -> bool) {
        self.metrics.retain_versions(is_deployed);
    }

    /// The gauges of a scrape.
    pub fn metrics_load(&self) -> metrics::Load {
        let (index, queue, inflight) = self.sizes();
        metrics::Load { index, queue, inflight, workers: self.workers() }
    }

    fn remove(self: &Arc<Self>, node: &NodeId, why: &str, which: impl FnOnce(&Link) -> bool) -> bool {
        let mut state = self.state.lock();
        let Some(link) = state.links.get(node).filter(|link| which(link)).cloned() else { return false };
        state.links.remove(node);
        // A connection that is closed already keeps its close code.
        if !link.is_closed() {
            link.close(CloseCode::Fenced);
        }
        let leave = TableChange::Leave { node: node.clone(), epoch: link.epoch() };
        match state.balancer.change(Instant::now(), leave, random_u64()) {
            Ok(actions) => {
                tracing::warn!(%node, epoch = link.epoch().0, why, "a worker has left");
                self.perform(&mut state, actions);
            }
            Err(error) => tracing::debug!(%node, %error, "the worker has already left"),
        }
        true
    }

    /// The connection of a member in this epoch.
    fn link(&self, node: &NodeId, epoch: Epoch) -> Option<Arc<Link>> {
        self.state.lock().links.get(node).filter(|link| link.epoch() == epoch).cloned()
    }

    fn started(
        self: &Arc<Self>,
        ticket: Ticket,
        cached: u32,
        (root, name, node): (BlockId, &SequenceName, &NodeId),
    ) {
        let mut state = self.state.lock();
        state.served.insert(root, name, node.clone());
        state.balancer.found_cached(ticket, cached);
        let actions = state.balancer.started(Instant::now(), ticket, random_u64());
        self.perform(&mut state, actions);
    }

    fn ended(self: &Arc<Self>, ticket: Ticket, generated: Option<u32>) {
        let mut state = self.state.lock();
        state.tickets.remove(&ticket);
        if let Some(tokens) = generated {
            state.balancer.generated(ticket, tokens);
        }
        let actions = state.balancer.ended(Instant::now(), ticket, random_u64());
        self.perform(&mut state, actions);
    }

    /// Handles a failed attempt on `link`. `worker_error`: the worker's error, if it sent one. With
    /// `only_class`, only a worker of this numeric class may continue. Returns the source of the next
    /// placement.
    fn retry(
        self: &Arc<Self>,
        ticket: Ticket,
        node: &NodeId,
        link: &Link,
        worker_error: Option<&GenerateError>,
        only_class: Option<String>,
    ) -> PlacementSource {
        let error = if link.is_closed() {
            // The session's task will notice later, but the next choice must exclude the worker now.
            self.session_lost(link.session(), node);
            AttemptError::Lost
        } else if worker_error == Some(&GenerateError::Draining) {
            AttemptError::Draining
        } else if matches!(worker_error, Some(GenerateError::Unsupported { .. })) {
            AttemptError::Unsupported
        } else {
            AttemptError::Declined
        };
        self.metrics.retried(error);
        let mut state = self.state.lock();
        let placements = state.pending(ticket);
        let actions = state.balancer.retry(Instant::now(), ticket, error, only_class, random_u64());
        self.perform(&mut state, actions);
        placements
    }

    /// The placement of an assigned ticket.
    fn assigned(&self, state: &DispatchState, assignment: Assignment) -> PlacementResult {
        self.metrics.routed(assignment.reason);
        let link = state.links.get(&assignment.node).filter(|link| link.epoch() == assignment.epoch);
        // A member always has a link; without one there is no worker to send to.
        let link = Arc::clone(link.ok_or(Refusal::NoWorker)?);
        let send_order = Some(link.next_send());
        Ok(Box::new(PlacedAttempt { assignment, link, send_order, chosen: Instant::now() }))
    }

    fn perform(self: &Arc<Self>, state: &mut DispatchState, actions: impl IntoIterator<Item = Action>) {
        for action in actions {
            match action {
                Action::Assign(ticket, assignment) => {
                    let Some(sender) = state.tickets.get(&ticket) else { continue };
                    // Fails only while the generation is being dropped, which ends the ticket.
                    let _ = sender.send(self.assigned(state, assignment));
                }
                Action::Refuse(ticket, refusal) => {
                    if let Some(sender) = state.tickets.remove(&ticket) {
                        let _ = sender.send(Err(refusal));
                    }
                }
                Action::Fetch { node, epoch, need } => {
                    if let Some(link) = state.links.get(&node).filter(|l| l.epoch() == epoch) {
                        tokio::spawn(Arc::clone(self).fetch(node, Arc::clone(link), need));
                    }
                }
                Action::Drop { node, epoch } => {
                    tracing::warn!(%node, epoch = epoch.0, "a worker has lost its lease");
                    if let Some(link) = state.links.remove(&node) {
                        link.close(CloseCode::Fenced);
                    }
                }
            }
        }
    }

    async fn fetch(self: Arc<Self>, node: NodeId, link: Arc<Link>, need: GapRepair) {
        let mut need = Some(need);
        if matches!(need, Some(GapRepair::Snapshot | GapRepair::Replay { from: 1 })) {
            need = self.import_from_peers(&node, link.epoch()).await.or(need);
        }
        while let Some(repair) = need.take() {
            let applied = match self.fetch_once(&node, &link, repair).await {
                Ok(applied) => applied,
                Err(error) => {
                    if let Some(left_out) = REFUSED.due((&node, "fetch")) {
                        tracing::warn!(%node, %error, ?repair, left_out, "cannot fetch missing KV events");
                    }
                    self.state.lock().balancer.fetch_failed(&node);
                    return;
                }
            };
            self.events_applied.notify_waiters();
            need = match applied {
                Ok(Some(Action::Fetch { need, .. })) => Some(need),
                Ok(_) => None,
                Err(error) => {
                    if let Some(left_out) = REFUSED.due((&node, error.to_string())) {
                        tracing::warn!(%node, %error, left_out, "fetched KV events refused");
                    }
                    self.state.lock().balancer.fetch_failed(&node);
                    None
                }
            };
        }
    }

    async fn fetch_once(
        &self,
        node: &NodeId,
        link: &Link,
        need: GapRepair,
    ) -> Result<Result<Option<Action>, router::prefix_index::StreamError>, String> {
        match need {
            GapRepair::Replay { from } => {
                let api = link.api().await.map_err(|e| e.to_string())?;
                let replay = api.kv_replay(deadline(RPC_LIMIT), from).await.map_err(|e| e.to_string())?;
                let KvReplay::Events(batch) = replay else {
                    return Ok(self.state.lock().balancer.replayed(node, link.epoch(), None));
                };
                let (epoch, first_sequence) = (batch.epoch, batch.first_sequence);
                let mut last = KvEventBatch { epoch, first_sequence, events: Vec::new() };
                for part in batch.into_parts() {
                    let part = std::mem::replace(&mut last, part);
                    if part.events.is_empty() {
                        continue;
                    }
                    let mut state = self.state.lock();
                    let taken = state.balancer.replaying(node, part);
                    MutexGuard::unlock_fair(state);
                    if taken.is_err() {
                        return Ok(taken);
                    }
                }
                Ok(self.state.lock().balancer.replayed(node, link.epoch(), Some(last)))
            }
            GapRepair::Snapshot => {
                let snapshot = tokio::time::timeout(RPC_LIMIT, link.connection().kv_snapshot()).await;
                let snapshot = snapshot.map_err(|e| e.to_string())?.map_err(|e| e.to_string())?;
                let mut need = Ok(None);
                for part in snapshot.into_parts() {
                    // Lets waiting requests take the lock between the parts.
                    let mut state = self.state.lock();
                    need = state.balancer.snapshot(node, part);
                    MutexGuard::unlock_fair(state);
                    if need.is_err() {
                        break;
                    }
                }
                Ok(need)
            }
        }
    }
}

/// A worker's address for other workers: as registered, but with the source IP of its connection if the
/// registered IP is unspecified.
fn reachable(registered: &str, seen: SocketAddr) -> String {
    match registered.parse::<SocketAddr>() {
        Ok(address) if address.ip().is_unspecified() => {
            SocketAddr::new(seen.ip(), address.port()).to_string()
        }
        _ => registered.to_owned(),
    }
}
