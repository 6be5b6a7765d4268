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

use crate::admission::{self, Offered, Queue, QueueLimits, TenantView, TenantWeights, Waiting, retry_after};
use crate::prefix_index::peer::PeerError;
use crate::prefix_index::{GapRepair, IndexSize, StreamError, StreamView};
use crate::routing::demand::CommonKey;
use crate::routing::{Parts, Reason, Routing};
use crate::table::{Member, TableChange, TableError, WorkerTable};
pub use operations::{OfferView, OperationAsk, SessionPlacement, SessionRefusal, SessionSlot};
use proto::block::BlockId;
use proto::codec::CodecError;
use proto::event::{KvEventBatch, KvSnapshotFrame};
use proto::ids::{Attempt, Epoch, ModelId, NodeId, RequestId};
use proto::message::{LoadReport, PullCost, PullReport, ServedModel, WorkPart, WorkerState};
use proto::operation::Operation;
use proto::pull::PullSource;
use recent::Recent;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
pub use worker_pool::{PeerExport, PeerImport};
use worker_pool::{Placing, WorkerPool};

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

/// A generation, or a call to encode texts, that needs a worker.
#[derive(Debug, Clone)]
pub struct RouteRequest {
    /// The client's request id.
    pub request: RequestId,
    pub tenant: Arc<str>,
    pub model: ModelId,
    /// The operation, for requests that are no generation. Only workers that offer it are candidates.
    pub operation: Option<Operation>,
    pub prompt_tokens: u32,
    /// Limit of the answer's length.
    pub output: Output,
    /// Ids of the prompt's full hash units.
    pub chain: Arc<[BlockId]>,
    /// The request group that the client named.
    pub group: Option<CommonKey>,
    /// Priority among the tenant's requests; lower goes first.
    pub priority: i32,
    pub deadline: Instant,
    /// Whether to return the costs of all candidates with the assignment.
    pub explain: bool,
}

/// Expected length of an answer, in tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Output {
    pub most: u32,
    /// The answer has exactly `most` tokens: nothing else ends it.
    pub fixed: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(u64);

/// The candidates of a routing decision.
#[derive(Debug, Clone, PartialEq)]
pub struct Explained {
    pub at: Instant,
    /// All candidates, each with the estimates that it was compared by.
    pub candidates: Vec<(NodeId, Parts)>,
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
    pub prefill: Option<Prefilling>,
    /// The worker to pull a prefix from, if any.
    pub pull: Option<PullSource>,
    /// Number of generations with this prompt that the same decision sends to this worker, including this
    /// one.
    pub together: u32,
    /// Set if [`RouteRequest::explain`] is.
    pub explained: Option<Arc<Explained>>,
}

/// A prefill worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prefilling {
    pub node: NodeId,
    pub epoch: Epoch,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("the queue is full")]
    QueueFull {
        /// Suggested delay before the client retries.
        retry_after: Duration,
    },
    /// No worker serves the model now, and none is expected to.
    #[error("no worker serves the model at the moment")]
    NoWorker,
    #[error("the deadline passed in the queue")]
    Deadline,
    /// [`Policy::max_attempts`] attempts have failed.
    #[error("every attempt failed")]
    AttemptsFailed,
}

/// Why an attempt failed, as far as it affects the next choice of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttemptError {
    /// The worker or its connection is gone. The worker may be chosen again in a later epoch.
    Lost,
    /// The worker is alive and refused this request. It is not tried again in this epoch.
    Declined,
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

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueView {
    pub requests: usize,
    /// Prompt tokens of all queued requests.
    pub tokens: u64,
}

#[derive(Debug)]
struct QueuedRequest {
    ticket: Ticket,
    ask: Arc<RouteRequest>,
    since: Instant,
    rank: Instant,
    attempts: u32,
    avoid: Vec<(NodeId, Epoch)>,
    /// Numeric class that must continue the answer, once tokens have been emitted.
    only_class: Option<String>,
    /// Until when the request may wait for a prefix that another worker computes. `None`: it has not begun to
    /// wait.
    waits_until: Option<Instant>,
}

impl Waiting for QueuedRequest {
    fn tokens(&self) -> u64 {
        u64::from(self.ask.prompt_tokens)
    }
    fn deadline(&self) -> Instant {
        self.ask.deadline
    }
    fn rank(&self) -> Instant {
        self.rank
    }
    fn priority(&self) -> i32 {
        self.ask.priority
    }
}

#[derive(Debug)]
pub struct Balancer {
    queue: Queue<QueuedRequest>,
    floor: WorkerPool,
    next_ticket: u64,
}

impl Balancer {
    /// Starts without workers and with equal weights for all tenants.
    pub fn new(policy: Policy) -> Self {
        Self::weighted(policy, TenantWeights::default())
    }

    pub fn weighted(policy: Policy, weights: TenantWeights) -> Self {
        Self { queue: Queue::new(policy.queue, weights), floor: WorkerPool::new(policy), next_ticket: 0 }
    }

    /// Submits the generations of one request: all are taken or none.
    pub fn submit(
        &mut self,
        now: Instant,
        asks: Vec<RouteRequest>,
        random: u64,
    ) -> Result<(Vec<Ticket>, Vec<Action>), Refusal> {
        if asks.iter().any(|ask| !self.floor.serves(&ask.model) && !self.floor.expects(now, &ask.model)) {
            return Err(Refusal::NoWorker);
        }
        let tokens = asks.iter().map(|ask| u64::from(ask.prompt_tokens)).sum();
        self.check_room(asks.len(), tokens)?;
        let mut tickets = Vec::with_capacity(asks.len());
        // Only generations of the same request can be sent together.
        let several = asks.len() > 1;
        let mut prompts = HashMap::new();
        for ask in asks {
            let ticket = Ticket(self.next_ticket);
            self.next_ticket += 1;
            tickets.push(ticket);
            if several {
                prompts.insert(ticket, Arc::clone(&ask.chain));
            }
            let tenant = Arc::clone(&ask.tenant);
            let rank = admission::rank(now, ask.priority);
            let waiter = QueuedRequest {
                ticket,
                ask: Arc::new(ask),
                since: now,
                rank,
                attempts: 0,
                avoid: Vec::new(),
                only_class: None,
                waits_until: None,
            };
            self.queue.push(&tenant, waiter);
        }
        let mut actions = self.pump(now, random);
        if several {
            count_together(&mut actions, &prompts);
        }
        Ok((tickets, actions))
    }

    /// Checks whether the queue has room for `requests` more, with `tokens` prompt tokens in all.
    pub fn check_room(&self, requests: usize, tokens: u64) -> Result<(), Refusal> {
        let waiting = self.floor.waiting();
        let (requests, tokens) = (requests + waiting.requests, tokens + waiting.tokens);
        self.queue.check(requests, tokens).map_err(|full| {
            let backlog = full.tokens + self.floor.pending_tokens();
            Refusal::QueueFull { retry_after: retry_after(backlog, self.floor.prefill_rate()) }
        })
    }

    /// Records how many prompt tokens the worker found in its cache.
    pub fn found_cached(&mut self, ticket: Ticket, tokens: u32) {
        self.floor.learn(ticket, |outcome| outcome.cached = Some(tokens));
    }

    /// Records the number of generated tokens of a generation that ended well.
    pub fn generated(&mut self, ticket: Ticket, tokens: u32) {
        self.floor.generated(ticket, tokens);
    }

    /// The worker has computed the prompt and has room for another.
    pub fn started(&mut self, now: Instant, ticket: Ticket, random: u64) -> Vec<Action> {
        self.floor.started(now, ticket);
        self.pump(now, random)
    }

    /// The generation has ended in any way, or was cancelled.
    pub fn ended(&mut self, now: Instant, ticket: Ticket, random: u64) -> Vec<Action> {
        if self.floor.end(now, ticket).is_none() {
            self.queue.remove(|waiter| waiter.ticket == ticket);
            self.floor.give_up(|waiter| waiter.ticket == ticket);
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
        setback: AttemptError,
        only_class: Option<String>,
        random: u64,
    ) -> Vec<Action> {
        let Some((mut waiter, node, epoch)) = self.floor.fail(now, ticket) else { return Vec::new() };
        waiter.only_class = only_class;
        match setback {
            AttemptError::Declined => waiter.avoid.push((node, epoch)),
            AttemptError::Draining => self.floor.drains(now, &node, epoch),
            AttemptError::Lost => {}
        }
        let mut actions = Vec::new();
        if waiter.attempts >= self.floor.policy().max_attempts {
            actions.push(Action::Refuse(ticket, Refusal::AttemptsFailed));
        } else {
            let tenant = Arc::clone(&waiter.ask.tenant);
            self.queue.push_back_first(&tenant, waiter);
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
        let mut actions: Vec<Action> = self.floor.change(now, change)?.into_iter().collect();
        actions.extend(self.pump(now, random));
        Ok(actions)
    }

    /// Takes a load report. Reports of another epoch than the member's are ignored.
    pub fn load(&mut self, now: Instant, node: &NodeId, report: LoadReport, random: u64) -> Vec<Action> {
        self.floor.load(now, node, report);
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
        self.floor.introduce(node, epoch, (part, pulls, quic));
    }

    /// Expects that a model without a worker is served again by `until`. Requests for it are queued until
    /// then.
    pub fn expect(&mut self, model: &ModelId, until: Instant) {
        self.floor.expect(model, until);
    }

    /// Takes a member's report of its pulls and sends.
    pub fn pulled(&mut self, node: &NodeId, epoch: Epoch, report: PullReport) {
        self.floor.pulled(node, epoch, report);
    }

    pub fn events(&mut self, node: &NodeId, batch: KvEventBatch) -> Result<Option<Action>, StreamError> {
        self.floor.index_of(node, |index, slot| index.apply(slot, batch))
    }

    /// Places requests that waited for the events just applied. Call it after [`Balancer::events`].
    pub fn announced(&mut self, now: Instant, random: u64) -> Vec<Action> {
        self.pump_awaited(now, random)
    }

    /// Applies one part of the answer to [`GapRepair::Replay`]; [`replayed`](Self::replayed) takes the last
    /// part.
    pub fn replaying(&mut self, node: &NodeId, part: KvEventBatch) -> Result<Option<Action>, StreamError> {
        self.floor.index_of(node, |index, slot| index.replaying(slot, part).map(|()| None))
    }

    /// Applies the last part of the answer to [`GapRepair::Replay`]. `None`: the worker no longer has the
    /// events.
    pub fn replayed(
        &mut self,
        node: &NodeId,
        epoch: Epoch,
        missed: Option<KvEventBatch>,
    ) -> Result<Option<Action>, StreamError> {
        self.floor.index_of(node, |index, slot| index.replayed(slot, epoch, missed))
    }

    /// Applies the next part of the answer to [`GapRepair::Snapshot`].
    pub fn snapshot(&mut self, node: &NodeId, part: KvSnapshotFrame) -> Result<Option<Action>, StreamError> {
        self.floor.index_of(node, |index, slot| index.install(slot, part))
    }

    /// Starts an export of a worker's prefixes for a peer. `None` if nothing newer than event `after` of this
    /// epoch is known.
    pub fn export(&self, node: &NodeId, epoch: Epoch, after: u64) -> Option<PeerExport> {
        self.floor.export(node, epoch, after)
    }

    /// Returns the export's next frame, and `None` after the last.
    pub fn exported(&self, export: &mut PeerExport) -> Result<Option<Vec<u8>>, CodecError> {
        self.floor.exported(export)
    }

    /// Starts an import of a worker's prefixes from a peer. Returns it with the number of the last event
    /// known here. Only the handler of an [`Action::Fetch`] may call this, in place of that fetch.
    pub fn import(&self, node: &NodeId, epoch: Epoch) -> Option<(PeerImport, u64)> {
        self.floor.import(node, epoch)
    }

    /// Applies the next frame of an import. The last frame returns what remains to be fetched from the
    /// worker.
    pub fn imported(&mut self, import: &mut PeerImport, frame: &[u8]) -> Result<Option<Action>, PeerError> {
        self.floor.imported(import, frame)
    }

    /// Marks a fetch as failed. The worker's next events request it again.
    pub fn fetch_failed(&mut self, node: &NodeId) {
        self.floor.fetch_failed(node);
    }

    /// Expires deadlines, leases and reservations. Call it several times a second.
    pub fn tick(&mut self, now: Instant, random: u64) -> Vec<Action> {
        let mut actions: Vec<Action> = self.floor.expire(now);
        let mut late = self.queue.expire(now);
        late.extend(self.floor.give_up(|waiter| waiter.ask.deadline <= now));
        actions.extend(late.into_iter().map(|w| Action::Refuse(w.ticket, Refusal::Deadline)));
        actions.extend(self.pump(now, random));
        actions
    }

    pub fn table(&self) -> &WorkerTable {
        self.floor.table()
    }

    /// The model of this name, if a worker serves it or is expected to.
    pub fn model(&self, id: &ModelId) -> Option<&ServedModel> {
        self.floor.model(id)
    }

    /// Whether a worker takes work for this model now.
    pub fn serves(&self, id: &ModelId) -> bool {
        self.floor.serves(id)
    }

    pub fn workers(&self, now: Instant) -> Vec<WorkerView> {
        self.floor.workers(now)
    }

    /// The KV event stream of a member.
    pub fn stream(&self, node: &NodeId) -> Option<StreamView> {
        self.floor.stream(node)
    }

    pub fn index_size(&self) -> IndexSize {
        self.floor.index_size()
    }

    pub fn queue(&self) -> QueueView {
        let waiting = self.floor.waiting();
        QueueView {
            requests: self.queue.requests() + waiting.requests,
            tokens: self.queue.tokens() + waiting.tokens,
        }
    }

    pub fn tenants(&self) -> Vec<TenantView> {
        let mut all: Vec<TenantView> = self.queue.tenants().collect();
        for ask in self.floor.awaited() {
            let tokens = u64::from(ask.prompt_tokens);
            match all.iter_mut().find(|view| *view.tenant == *ask.tenant) {
                Some(view) => (view.requests, view.tokens) = (view.requests + 1, view.tokens + tokens),
                None => all.push(TenantView { tenant: ask.tenant.to_string(), requests: 1, tokens }),
            }
        }
        all
    }

    /// The last routing decisions.
    pub fn recent(&self) -> &Recent {
        self.floor.recent()
    }

    /// Workers that hold leading units of `chain`: the node, the units that it has announced, and the units
    /// that it is expected to hold soon.
    pub fn holders(&self, chain: &[BlockId]) -> Vec<(NodeId, u32, u32)> {
        self.floor.holders(chain)
    }

    /// Number of assigned generations that have not ended.
    pub fn inflight(&self) -> usize {
        self.floor.inflight()
    }

    /// Places every queued request that a worker can take.
    fn pump(&mut self, now: Instant, random: u64) -> Vec<Action> {
        let mut actions = self.pump_awaited(now, random);
        let Self { queue, floor, .. } = self;
        let mut random = random;
        queue.drain(|waiter, yields| {
            let ticket = waiter.ticket;
            random = mix(random);
            match floor.place(now, waiter, yields, random) {
                Placing::Assigned(assignment) => actions.push(Action::Assign(ticket, assignment)),
                Placing::Refused(refusal) => actions.push(Action::Refuse(ticket, refusal)),
                Placing::Later(waiter) => return Offered::Stuck(waiter),
                Placing::Yielding(waiter) => return Offered::Yields(waiter),
                Placing::Awaiting => {}
            }
            Offered::Taken
        });
        actions
    }

    /// Places requests whose awaited prefix has arrived or no longer will.
    fn pump_awaited(&mut self, now: Instant, random: u64) -> Vec<Action> {
        let mut actions = Vec::new();
        let mut random = random;
        for waiter in self.floor.due(now) {
            let (ticket, tenant) = (waiter.ticket, Arc::clone(&waiter.ask.tenant));
            random = mix(random);
            match self.floor.place(now, waiter, false, random) {
                Placing::Assigned(assignment) => actions.push(Action::Assign(ticket, assignment)),
                Placing::Refused(refusal) => actions.push(Action::Refuse(ticket, refusal)),
                Placing::Later(waiter) | Placing::Yielding(waiter) => {
                    self.queue.push_back_first(&tenant, waiter);
                }
                Placing::Awaiting => {}
            }
        }
        actions
    }
}

/// Sets [`Assignment::together`]. Generations have the same prompt if they share the chain's allocation;
/// equal chains in different allocations do not count.
fn count_together(actions: &mut [Action], prompts: &HashMap<Ticket, Arc<[BlockId]>>) {
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
