//! The balancer: one state machine that owns the worker table, the prefix index, the worker loads and the
//! queue.
//!
//! Every method takes the current time, and a random number where ties must be broken, and returns
//! [`Action`]s. The balancer never blocks, reads a clock or does I/O. Life cycle of a ticket: `submit` →
//! (queued) → [`Action::Assign`] → `started` → `ended`. A failed attempt goes through `retry` back to the
//! queue. [`Action::Refuse`] can end a ticket at any point before it is assigned.

mod operations;
pub mod recent;
#[cfg(test)]
mod tests;
mod worker_pool;

use crate::admission::{
    self, PlacementOutcome, Queue, QueueLimits, TenantView, TenantWeights, Waiting, retry_after,
};
use crate::prefix_index::peer::PeerError;
use crate::prefix_index::{GapRepair, IndexSize, StreamError, StreamView};
use crate::routing::demand::CommonKey;
use crate::routing::{CostEstimate, Reason, Routing};
use crate::table::{Member, TableChange, TableError, WorkerTable};
pub use operations::{OfferView, SessionPlacement, SessionRefusal, SessionRequest, SessionSlot};
use proto::adapter::OfferedAdapter;
use proto::block::BlockId;
use proto::codec::CodecError;
use proto::event::{KvEventBatch, KvSnapshotFrame};
use proto::ids::{Attempt, Epoch, ModelId, NodeId, RequestId};
use proto::message::{GrammarSpec, PullCost, PullReport, Stop, WorkPart};
use proto::operation::Operation;
use proto::pull::PullSource;
use proto::served_model::ServedModel;
use proto::trace::TraceContext;
use proto::worker::{LoadReport, WorkerState};
use recent::{Ending, Recent};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};
use worker_pool::{Booking, WorkerPool};
pub use worker_pool::{PeerExport, PeerImport};

/// Limits and timeouts of the balancer.
#[derive(Debug, Clone, Copy)]
pub struct Policy {
    /// Limits of the queue of requests without a worker.
    pub queue: QueueLimits,
    /// Maximum of unfinished sequences that this coordinator has sent to one worker. Further requests stay in
    /// the queue, where any worker can still take them.
    pub max_inflight: u32,
    /// Maximum of pending prefill per worker, as time at its measured rate. Requests stay in the queue while
    /// all candidates are at this limit.
    pub max_pending: Duration,
    /// A worker without a report for this long gets no new work while a live worker is available.
    pub suspect_after: Duration,
    /// A worker without a report for this long is removed from the table.
    pub lease: Duration,
    /// How long a reservation outlives its request, until the worker's KV events arrive.
    pub event_lag: Duration,
    /// Maximum of attempts per request, including the first.
    pub max_attempts: u32,
    /// Size limit of the prefix index in bytes.
    pub index_bytes: u64,
    pub routing: Routing,
    /// Maximum of uncached prompt tokens that a decode worker computes itself while a prefill worker is
    /// available.
    pub decode_prefill_tokens: u32,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            queue: QueueLimits { requests: 2_048, tokens: 4_000_000 },
            max_inflight: 256,
            max_pending: Duration::from_secs(1),
            suspect_after: Duration::from_millis(1_500),
            lease: Duration::from_secs(4),
            event_lag: Duration::from_secs(1),
            max_attempts: 4,
            index_bytes: 256 << 20,
            routing: Routing::Prefix,
            decode_prefill_tokens: 256,
        }
    }
}

/// A generation, or a call to encode texts, that needs a worker. It never changes: the dispatcher, the queue,
/// the router and the tables of running and recent requests share one.
#[derive(Debug, Clone)]
pub struct RouteRequest {
    pub request_id: RequestId,
    pub tenant: Arc<str>,
    pub model: ModelId,
    /// The operation, for requests that are no generation. Only workers that offer it are candidates.
    pub operation: Option<Operation>,
    pub prompt_tokens: u32,
    /// Limit of the answer's length.
    pub output: Output,
    /// The prompt has images. Only workers that see images are candidates.
    pub images: bool,
    /// Ids of the prompt's full hash units.
    pub chain: Arc<[BlockId]>,
    /// The request group that the client named.
    pub group: Option<CommonKey>,
    /// Priority among the tenant's requests; lower goes first.
    pub priority: i32,
    pub submitted: Instant,
    pub deadline: Instant,
    /// Parent span. If there is one, the assignment has the costs of all candidates.
    pub trace: Option<TraceContext>,
}

/// Expected length of an answer, in tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Output {
    pub max_tokens: u32,
    /// The answer has exactly `max_tokens` tokens: nothing else ends it.
    pub fixed: bool,
}

impl Output {
    /// The expected length of an answer that `stop` and a grammar limit.
    pub fn of(stop: &Stop, grammar: Option<&GrammarSpec>) -> Self {
        let Stop { max_tokens, strings, token_ids, ignore_eos, .. } = stop;
        let fixed = *ignore_eos && strings.is_empty() && token_ids.is_empty() && grammar.is_none();
        Self { max_tokens: *max_tokens, fixed }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(u64);

/// The candidates of a routing decision.
#[derive(Debug, Clone, PartialEq)]
pub struct Explained {
    pub at: Instant,
    /// All candidates, each with the estimates that it was compared by.
    pub candidates: Vec<(NodeId, CostEstimate)>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Assignment {
    pub node: NodeId,
    pub epoch: Epoch,
    /// Number of the attempt, from 0.
    pub attempt: Attempt,
    /// Prompt tokens that are expected in the worker's cache.
    pub predicted: u32,
    pub reason: Reason,
    /// Workers of equal classes give bit-equal results.
    pub numeric_class: String,
    /// The prefill worker that computes the prompt first. `None`: the chosen worker computes it.
    pub prefill: Option<(NodeId, Epoch)>,
    /// The worker to pull a prefix from, if any.
    pub pull: Option<PullSource>,
    /// Number of generations with this prompt that the same decision sends to this worker, including this
    /// one.
    pub together: u32,
    /// Set if [`RouteRequest::trace`] is.
    pub explained: Option<Arc<Explained>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("the queue is full")]
    QueueFull {
        /// Suggested delay before the client retries.
        retry_after: Duration,
    },
    /// No worker that serves the model can take the request now, and the model is not expected to be served
    /// again soon. Either none serves it, or none offers the operation or has the numeric class of the tokens
    /// that were sent.
    #[error("no worker serves the model at the moment")]
    NoWorker,
    #[error("the deadline passed in the queue")]
    Deadline,
    /// [`Policy::max_attempts`] attempts have failed, or a worker has declined the request and no other one
    /// that serves the model can take it.
    #[error("every attempt failed")]
    AttemptsFailed,
}

/// Why an attempt failed, as far as it affects the next choice of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttemptError {
    /// The worker or its connection is gone. The worker may be chosen again in a later epoch.
    Lost,
    /// The worker refused this request, or its stream failed while its connection stays open. It is not tried
    /// again in this epoch.
    Declined,
    /// The worker's engine does not honour an argument of the request. No worker of its numeric class is tried,
    /// and the attempt does not count.
    Unsupported,
    /// The worker reported that it drains. It may be chosen again once it reports that it is ready.
    Draining,
}

/// An instruction to the caller of the balancer.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    Assign(Ticket, Assignment),
    Refuse(Ticket, Refusal),
    /// Fetch a worker's missing KV events.
    Fetch {
        node: NodeId,
        epoch: Epoch,
        need: GapRepair,
    },
    /// The worker's lease has expired: close its connection, so that its requests fail and are retried.
    Drop {
        node: NodeId,
        epoch: Epoch,
    },
}

/// This coordinator's view of a worker, for status and metrics.
#[derive(Debug, Clone)]
pub struct WorkerView {
    pub member: Member,
    /// The last load report; `None` before the first.
    pub report: Option<LoadReport>,
    /// Time since the last report, or since the join.
    pub silent: Duration,
    /// Unfinished sequences that this coordinator has sent to the worker.
    pub inflight: u32,
    /// Uncached prompt tokens that this coordinator has sent and the worker has not computed yet.
    pub pending_tokens: u64,
    /// Estimated seconds until the worker could start another prompt, counting the work from all
    /// coordinators.
    pub queue_seconds: f64,
    /// Prefill, decode, or both.
    pub part: WorkPart,
    /// Pulls and sends, from the last report.
    pub pulls: PullReport,
    pub operations: Vec<OfferView>,
    pub stream: Option<StreamView>,
}

impl WorkerView {
    /// The reported state, but `Draining` as soon as an operator has requested a drain.
    pub fn state(&self) -> WorkerState {
        match self.report.as_ref().map_or(WorkerState::Starting, |r| r.state) {
            WorkerState::Ready if self.member.draining => WorkerState::Draining,
            state => state,
        }
    }
}

/// Whether a node takes new work. Greater is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Availability {
    /// It is no member, is draining or is not ready.
    Away,
    /// It has not reported in time: it gets work only if no other takes it.
    Silent,
    Ready,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueView {
    pub requests: usize,
    /// Prompt tokens of all queued requests.
    pub tokens: u64,
}

/// The mutable part of a request, from its submission to its end. It is in one place at a time: in the queue,
/// among the requests that wait for a prefix, or in the table of running requests.
#[derive(Debug)]
struct RequestState {
    ticket: Ticket,
    request: Arc<RouteRequest>,
    attempts: u32,
    declined_by: Vec<(NodeId, Epoch)>,
    /// Numeric classes whose engine does not honour an argument of the request.
    unsupported_by: Vec<String>,
    /// Numeric class that must continue the answer, once tokens have been emitted.
    only_class: Option<String>,
    /// Deadline of its wait for a prefix that another worker computes. `None`: it has not waited.
    prefix_deadline: Option<Instant>,
    /// The booking at the worker of the last attempt; `None` before the first.
    worker: Option<Booking>,
    /// The booking at the prefill worker, if one computes the prompt.
    prefill: Option<Booking>,
    /// The group whose followers may join the request, until its prompt is computed.
    leads: Option<CommonKey>,
    /// Number of the last routing decision.
    decision: u64,
}

impl RequestState {
    fn new(ticket: Ticket, request: Arc<RouteRequest>) -> Self {
        Self {
            ticket,
            request,
            attempts: 0,
            declined_by: Vec::new(),
            unsupported_by: Vec::new(),
            only_class: None,
            prefix_deadline: None,
            worker: None,
            prefill: None,
            leads: None,
            decision: 0,
        }
    }
}

impl Waiting for RequestState {
    type Kind = ModelId;
    fn kind(&self) -> ModelId {
        self.request.model.clone()
    }
    fn tokens(&self) -> u64 {
        u64::from(self.request.prompt_tokens)
    }
    fn deadline(&self) -> Instant {
        self.request.deadline
    }
    fn rank(&self) -> Instant {
        admission::rank(self.request.submitted, self.request.priority)
    }
    fn priority(&self) -> i32 {
        self.request.priority
    }
}

#[derive(Debug)]
pub struct Balancer {
    queue: Queue<RequestState>,
    worker_pool: WorkerPool,
    next_ticket: u64,
}

impl Balancer {
    /// Starts without workers and with equal weights for all tenants.
    pub fn new(policy: Policy) -> Self {
        Self::weighted(policy, TenantWeights::default())
    }

    pub fn weighted(policy: Policy, weights: TenantWeights) -> Self {
        Self {
            queue: Queue::new(policy.queue, weights),
            worker_pool: WorkerPool::new(policy),
            next_ticket: 0,
        }
    }

    /// Submits the generations of one request: all are taken or none.
    pub fn submit(
        &mut self,
        now: Instant,
        requests: &[Arc<RouteRequest>],
        random: u64,
    ) -> Result<(Vec<Ticket>, Vec<Action>), Refusal> {
        let is_served = |model| self.worker_pool.serves(model) || self.worker_pool.expects(now, model);
        if !requests.iter().all(|request| is_served(&request.model)) {
            return Err(Refusal::NoWorker);
        }
        let tokens = requests.iter().map(|request| u64::from(request.prompt_tokens)).sum();
        self.check_room(requests.len(), tokens)?;
        let tickets: Vec<Ticket> = (self.next_ticket..).take(requests.len()).map(Ticket).collect();
        self.next_ticket += requests.len() as u64;
        for (ticket, request) in tickets.iter().zip(requests) {
            self.queue.push(&request.tenant, RequestState::new(*ticket, Arc::clone(request)));
        }
        let mut actions = self.pump(now, random);
        // Only generations of the same request can be sent together.
        if requests.len() > 1 {
            let chains = tickets.iter().copied().zip(requests.iter().map(|request| &request.chain));
            count_together(&mut actions, &chains.collect());
        }
        Ok((tickets, actions))
    }

    /// Checks whether the queue has room for `requests` more, with `tokens` prompt tokens in all.
    pub fn check_room(&self, requests: usize, tokens: u64) -> Result<(), Refusal> {
        let waiting = self.worker_pool.waiting();
        let (requests, tokens) = (requests + waiting.requests, tokens + waiting.tokens);
        self.queue.check(requests, tokens).map_err(|full| {
            let backlog = full.tokens + self.worker_pool.pending_tokens();
            Refusal::QueueFull { retry_after: retry_after(backlog, self.worker_pool.prefill_rate()) }
        })
    }

    /// Records how many prompt tokens the worker found in its cache.
    pub fn found_cached(&mut self, ticket: Ticket, tokens: u32) {
        self.worker_pool.learn(ticket, |outcome| outcome.cached = Some(tokens));
    }

    /// Records the number of generated tokens of a generation that ended well.
    pub fn generated(&mut self, ticket: Ticket, tokens: u32) {
        self.worker_pool.generated(ticket, tokens);
    }

    /// The worker has computed the prompt and has room for another.
    pub fn started(&mut self, now: Instant, ticket: Ticket, random: u64) -> Vec<Action> {
        self.worker_pool.started(now, ticket);
        self.pump(now, random)
    }

    /// The generation has ended in any way, or was cancelled.
    pub fn ended(&mut self, now: Instant, ticket: Ticket, random: u64) -> Vec<Action> {
        if self.worker_pool.remove(now, ticket, Ending::Over).is_none() {
            self.queue.remove(|state| state.ticket == ticket);
        }
        self.pump(now, random)
    }

    /// Handles a failed attempt: the request returns to the head of its tenant's lane, or is refused after
    /// the last attempt. `only_class` is set if tokens have been emitted: only a worker of this numeric class
    /// may continue.
    pub fn retry(
        &mut self,
        now: Instant,
        ticket: Ticket,
        error: AttemptError,
        only_class: Option<String>,
        random: u64,
    ) -> Vec<Action> {
        let Some(mut state) = self.worker_pool.remove(now, ticket, Ending::Failed) else { return Vec::new() };
        state.only_class = only_class;
        match (error, &state.worker) {
            (AttemptError::Declined, Some(at)) => state.declined_by.push((at.node.clone(), at.epoch)),
            (AttemptError::Unsupported, Some(at)) => {
                let class = self.worker_pool.numeric_class(&at.node, at.epoch, &state.request.model);
                // A worker that has left is not chosen again either.
                state.declined_by.push((at.node.clone(), at.epoch));
                state.unsupported_by.extend(class);
            }
            (AttemptError::Draining, Some(at)) => self.worker_pool.drains(now, &at.node, at.epoch),
            _ => {}
        }
        let mut actions = Vec::new();
        let uncounted = u32::try_from(state.unsupported_by.len()).unwrap_or(u32::MAX);
        if state.attempts >= self.worker_pool.policy().max_attempts.saturating_add(uncounted) {
            actions.push(Action::Refuse(ticket, Refusal::AttemptsFailed));
        } else {
            self.requeue(state);
        }
        actions.extend(self.pump(now, random));
        actions
    }

    /// Applies a change to the worker table.
    pub fn change(
        &mut self,
        now: Instant,
        change: TableChange,
        random: u64,
    ) -> Result<Vec<Action>, TableError> {
        let mut actions: Vec<Action> = self.worker_pool.change(now, change)?.into_iter().collect();
        actions.extend(self.pump(now, random));
        Ok(actions)
    }

    /// Takes a load report. Reports of another epoch than the member's are ignored.
    pub fn load(&mut self, now: Instant, node: &NodeId, report: LoadReport, random: u64) -> Vec<Action> {
        self.worker_pool.load(now, node, report);
        self.pump(now, random)
    }

    /// Sets a member's role, the costs of pulling its models' prefixes, and its address for other workers.
    /// Before this call the worker takes all parts of requests, and pulls are off.
    pub fn introduce(
        &mut self,
        node: &NodeId,
        epoch: Epoch,
        part: WorkPart,
        pulls: Vec<PullCost>,
        quic: String,
    ) {
        self.worker_pool.introduce(node, epoch, (part, pulls, quic));
    }

    /// Whether a node takes new work.
    pub fn availability(&self, now: Instant, node: &NodeId) -> Availability {
        self.worker_pool.availability(now, node)
    }

    /// Replaces a member's adapters. Returns those that are left out: see [`WorkerTable::set_adapters`].
    ///
    /// [`WorkerTable::set_adapters`]: crate::table::WorkerTable::set_adapters
    pub fn set_adapters(
        &mut self,
        node: &NodeId,
        epoch: Epoch,
        offered: Vec<OfferedAdapter>,
    ) -> Result<Vec<OfferedAdapter>, TableError> {
        self.worker_pool.set_adapters(node, epoch, offered)
    }

    /// Expects that a model without a worker is served again by `until`. Requests for it are queued until
    /// then.
    pub fn expect(&mut self, model: &ModelId, until: Instant) {
        self.worker_pool.expect(model, until, None);
    }

    /// Like [`expect`](Self::expect), for a model that no worker need have served yet.
    pub fn expect_first(&mut self, served: ServedModel, until: Instant) {
        self.worker_pool.expect(&served.id.clone(), until, Some(served));
    }

    /// Forgets that a model was expected.
    pub fn expect_no_more(&mut self, model: &ModelId) {
        self.worker_pool.expect_no_more(model);
    }

    /// Takes a member's report of its pulls and sends.
    pub fn pulled(&mut self, node: &NodeId, epoch: Epoch, report: PullReport) {
        self.worker_pool.pulled(node, epoch, report);
    }

    pub fn events(&mut self, node: &NodeId, batch: KvEventBatch) -> Result<Option<Action>, StreamError> {
        self.worker_pool.index_of(node, |index, slot| index.apply(slot, batch))
    }

    /// Places the requests whose wait for a prefix has ended. Call it after [`Balancer::events`].
    pub fn announced(&mut self, now: Instant, mut random: u64) -> Vec<Action> {
        let mut actions = Vec::new();
        for state in self.worker_pool.take_ended_waits(now) {
            random = mix(random);
            match self.worker_pool.place(now, state, false, random, &mut actions) {
                PlacementOutcome::Done => {}
                PlacementOutcome::Blocked(state) | PlacementOutcome::Deferrable(state) => self.requeue(state),
            }
        }
        actions
    }

    /// Applies one batch of the answer to [`GapRepair::Replay`]; [`replayed`](Self::replayed) takes the last
    /// one.
    pub fn replaying(&mut self, node: &NodeId, batch: KvEventBatch) -> Result<Option<Action>, StreamError> {
        self.worker_pool.index_of(node, |index, slot| index.replaying(slot, batch).map(|()| None))
    }

    /// Applies the last batch of the answer to [`GapRepair::Replay`]. `None`: the worker no longer has the
    /// events.
    pub fn replayed(
        &mut self,
        node: &NodeId,
        epoch: Epoch,
        missed: Option<KvEventBatch>,
    ) -> Result<Option<Action>, StreamError> {
        self.worker_pool.index_of(node, |index, slot| index.replayed(slot, epoch, missed))
    }

    /// Applies the next frame of the answer to [`GapRepair::Snapshot`].
    pub fn snapshot(&mut self, node: &NodeId, frame: KvSnapshotFrame) -> Result<Option<Action>, StreamError> {
        self.worker_pool.index_of(node, |index, slot| index.install(slot, frame))
    }

    /// Starts an export of a worker's prefixes for a peer. `None` if nothing newer than event `after` of this
    /// epoch is known.
    pub fn export(&self, node: &NodeId, epoch: Epoch, after: u64) -> Option<PeerExport> {
        self.worker_pool.export(node, epoch, after)
    }

    /// Returns the export's next frame, and `None` after the last.
    pub fn exported(&self, export: &mut PeerExport) -> Result<Option<Vec<u8>>, CodecError> {
        self.worker_pool.exported(export)
    }

    /// Starts an import of a worker's prefixes from a peer. Returns it with the number of the last event
    /// known here. Only the handler of an [`Action::Fetch`] may call this, in place of that fetch.
    pub fn import(&self, node: &NodeId, epoch: Epoch) -> Option<(PeerImport, u64)> {
        self.worker_pool.import(node, epoch)
    }

    /// Applies the next frame of an import. The last frame returns what remains to be fetched from the
    /// worker.
    pub fn imported(&mut self, import: &mut PeerImport, frame: &[u8]) -> Result<Option<Action>, PeerError> {
        self.worker_pool.imported(import, frame)
    }

    /// Marks a fetch as failed. The worker's next events request it again.
    pub fn fetch_failed(&mut self, node: &NodeId) {
        self.worker_pool.fetch_failed(node);
    }

    /// Expires deadlines, leases and reservations. Call it several times a second.
    pub fn tick(&mut self, now: Instant, random: u64) -> Vec<Action> {
        let mut actions: Vec<Action> = self.worker_pool.expire(now);
        let mut expired = self.queue.expire(now);
        expired.extend(self.worker_pool.remove_waiting(|state| state.request.deadline <= now));
        actions.extend(expired.into_iter().map(|state| Action::Refuse(state.ticket, Refusal::Deadline)));
        actions.extend(self.pump(now, random));
        actions
    }

    pub fn table(&self) -> &WorkerTable {
        self.worker_pool.table()
    }

    /// The model of this name, if a worker serves it or is expected to.
    pub fn model(&self, id: &ModelId) -> Option<&ServedModel> {
        self.worker_pool.model(id)
    }

    /// Whether a worker takes work for this model now.
    pub fn serves(&self, id: &ModelId) -> bool {
        self.worker_pool.serves(id)
    }

    pub fn workers(&self, now: Instant) -> Vec<WorkerView> {
        self.worker_pool.workers(now)
    }

    /// The KV event stream of a member.
    pub fn stream(&self, node: &NodeId) -> Option<StreamView> {
        self.worker_pool.stream(node)
    }

    pub fn index_size(&self) -> IndexSize {
        self.worker_pool.index_size()
    }

    pub fn queue(&self) -> QueueView {
        let waiting = self.worker_pool.waiting();
        QueueView {
            requests: self.queue.requests() + waiting.requests,
            tokens: self.queue.tokens() + waiting.tokens,
        }
    }

    /// The place of a queued request among those of its tenant, from 1, and their number.
    pub fn queue_place(&self, ticket: Ticket) -> Option<(usize, usize)> {
        self.queue.place(|state| state.ticket == ticket)
    }

    /// Waiting requests by model.
    pub fn queued_by_model(&self) -> BTreeMap<ModelId, usize> {
        let mut models = BTreeMap::new();
        for (model, requests) in self.queue.kinds() {
            *models.entry(model.clone()).or_default() += requests;
        }
        models
    }

    pub fn tenants(&self) -> Vec<TenantView> {
        let mut all: Vec<TenantView> = self.queue.tenants().collect();
        for request in self.worker_pool.waiting_for_prefix() {
            let tokens = u64::from(request.prompt_tokens);
            match all.iter_mut().find(|view| *view.tenant == *request.tenant) {
                Some(view) => (view.requests, view.tokens) = (view.requests + 1, view.tokens + tokens),
                None => all.push(TenantView { tenant: request.tenant.to_string(), requests: 1, tokens }),
            }
        }
        all
    }

    /// The last routing decisions.
    pub fn recent(&self) -> &Recent {
        self.worker_pool.recent()
    }

    /// Workers that hold leading units of `chain`: the node, the units that it has announced, and the units
    /// that it is expected to hold soon.
    pub fn holders(&self, chain: &[BlockId]) -> Vec<(NodeId, u32, u32)> {
        self.worker_pool.holders(chain)
    }

    /// Number of assigned generations that have not ended.
    pub fn inflight(&self) -> usize {
        self.worker_pool.inflight()
    }

    /// Returns a request to the head of its tenant's lane.
    fn requeue(&mut self, state: RequestState) {
        let tenant = Arc::clone(&state.request.tenant);
        self.queue.push_back_first(&tenant, state);
    }

    /// Places every queued request that a worker can take.
    fn pump(&mut self, now: Instant, random: u64) -> Vec<Action> {
        let mut actions = self.announced(now, random);
        let Self { queue, worker_pool, .. } = self;
        let mut random = random;
        queue.drain(|state, yields| {
            random = mix(random);
            worker_pool.place(now, state, yields, random, &mut actions)
        });
        actions
    }
}

/// Sets [`Assignment::together`]. Generations have the same prompt if they share the chain's allocation;
/// equal chains in different allocations do not count.
fn count_together(actions: &mut [Action], prompts: &HashMap<Ticket, &Arc<[BlockId]>>) {
    let key = |ticket: &Ticket, assignment: &Assignment| {
        let chain = prompts.get(ticket).filter(|_| assignment.prefill.is_none())?;
        Some((chain.as_ptr(), assignment.node.clone()))
    };
    let mut counts: HashMap<_, u32> = HashMap::new();
    for action in &*actions {
        if let Action::Assign(ticket, assignment) = action {
            key(ticket, assignment).into_iter().for_each(|key| *counts.entry(key).or_default() += 1);
        }
    }
    for action in actions {
        if let Action::Assign(ticket, assignment) = action {
            assignment.together =
                key(ticket, assignment).and_then(|key| counts.get(&key).copied()).unwrap_or(1);
        }
    }
}

/// Next value of a splitmix64 sequence.
fn mix(state: u64) -> u64 {
    let z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
