//! What decides: table, index, loads and queue under one roof, as one state machine.
//!
//! Every method takes the time (and a random number where ties may have to be broken) and gives back
//! [`Action`]s; nothing in here waits, measures time or talks to anyone. The life of a ticket:
//! `submit` → (queued) → [`Action::Assign`] → `started` → `ended`, or `retry` after an attempt that failed,
//! or [`Action::Refuse`] at any point before it is assigned.

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

/// The numbers that steer it.
#[derive(Debug, Clone, Copy)]
pub struct Policy {
    /// How much may wait for a worker.
    pub queue: QueueLimits,
    /// Sequences sent to one worker and not yet ended, at most; more wait here, where any worker can still
    /// take them.
    pub max_inflight: u32,
    /// Prefill that a worker shall have in hand at most, by its measured rate; while all have as much, requests wait
    /// here.
    pub max_pending: Duration,
    /// A worker not heard of for this long gets no new work while another is there.
    pub suspect_after: Duration,
    /// A worker not heard of for this long has left.
    pub lease: Duration,
    /// How long after a request's end its reservation stands in for events under way.
    pub event_lag: Duration,
    /// Attempts at a request, the first included.
    pub max_attempts: u32,
    /// Bytes for the prefix index.
    pub index_bytes: u64,
    /// By what a worker is chosen.
    pub routing: Routing,
    /// Prompt tokens that a worker for decoding computes itself at most while there is one for prefill.
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

/// One generation to be placed.
#[derive(Debug, Clone)]
pub struct RouteRequest {
    /// The client's name for it.
    pub request: RequestId,
    pub tenant: Arc<str>,
    pub model: ModelId,
    /// What is asked of it, if that is more than tokens: only workers that offer it are.
    pub operation: Option<Operation>,
    pub prompt_tokens: u32,
    /// How long the answer may be.
    pub output: Output,
    /// Ids of the prompt's full units.
    pub chain: Arc<[BlockId]>,
    /// The group of requests that it says to be of.
    pub group: Option<CommonKey>,
    /// How urgent it is among its tenant's; lower goes first.
    pub priority: i32,
    /// When it is worth nothing any more.
    pub deadline: Instant,
    /// Whether it is wanted to know why a worker is chosen.
    pub explain: bool,
}

/// How many tokens an answer has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Output {
    pub most: u32,
    /// It has as many: nothing else ends it.
    pub fixed: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(u64);

/// Why a worker was chosen.
#[derive(Debug, Clone, PartialEq)]
pub struct Explained {
    pub at: Instant,
    /// The workers that could have been, and what each was compared by.
    pub candidates: Vec<(NodeId, Parts)>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Assignment {
    pub node: NodeId,
    pub epoch: Epoch,
    /// Which attempt this is, from 0.
    pub attempt: Attempt,
    /// Prompt tokens that the worker is expected to have cached.
    pub predicted: u32,
    pub reason: Reason,
    /// Workers of equal classes give bit-equal results.
    pub numeric_class: String,
    /// Who computes the prompt first, for this worker to pull it.
    pub prefill: Option<Prefilling>,
    /// Where the worker may pull a prefix from.
    pub pull: Option<PullSource>,
    /// How many generations of this prompt go to this worker with this decision, this one included.
    pub together: u32,
    /// Why this worker, at length, if that was asked.
    pub explained: Option<Arc<Explained>>,
}

/// A worker that computes a prompt for another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prefilling {
    pub node: NodeId,
    pub epoch: Epoch,
}

/// Why a generation is not placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("the queue is full")]
    QueueFull {
        /// When trying again makes sense.
        retry_after: Duration,
    },
    /// Nobody serves the model just now.
    #[error("no worker serves the model at the moment")]
    NoWorker,
    #[error("the deadline passed in the queue")]
    Deadline,
    /// As many attempts as are allowed have failed.
    #[error("every attempt failed")]
    AttemptsFailed,
}

/// Why an attempt failed, so far as the next choice depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttemptError {
    /// The worker died or the connection to it did: it may be tried again in its next life.
    Lost,
    /// The worker lives but does not want this request.
    Declined,
    /// The worker drains, by its own word; it may be asked again once it says that it takes work.
    Draining,
}

/// What the caller has to do.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Send the generation to a worker.
    Assign(Ticket, Assignment),
    Refuse(Ticket, Refusal),
    /// Fetch what is missing of a worker's events.
    Fetch {
        node: NodeId,
        epoch: Epoch,
        need: GapRepair,
    },
    /// The worker has lost its lease: close its connection, so that what runs there fails and moves.
    Drop {
        node: NodeId,
        epoch: Epoch,
    },
}

/// A worker as seen from here, for status and metrics.
#[derive(Debug, Clone)]
pub struct WorkerView {
    /// Its place in the table.
    pub member: Member,
    /// Its last report, if one has come.
    pub report: Option<LoadReport>,
    /// Time since it was last heard of.
    pub silent: Duration,
    /// Sequences sent there by this coordinator and not yet ended.
    pub inflight: u32,
    /// Prompt tokens sent there by this coordinator and not yet computed.
    pub pending_tokens: u64,
    /// Seconds until it would begin with another prompt, whoever sent what it has to do, as requests are placed by.
    pub queue_seconds: f64,
    /// What part of requests it is for.
    pub part: WorkPart,
    /// What it has pulled and sent, by its last report.
    pub pulls: PullReport,
    /// The operations that it offers.
    pub operations: Vec<OfferView>,
    pub stream: Option<StreamView>,
}

impl WorkerView {
    /// What it does: draining also while only an operator has asked for it.
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
    /// Their prompt tokens.
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
    /// The only class that may go on with what has been emitted.
    only_class: Option<String>,
    /// Until when it may wait for what another worker computes, once it has begun to.
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

/// The state machine. See the module.
#[derive(Debug)]
pub struct Balancer {
    queue: Queue<QueuedRequest>,
    floor: WorkerPool,
    next_ticket: u64,
}

impl Balancer {
    /// No workers, nothing waiting; all tenants have one weight.
    pub fn new(policy: Policy) -> Self {
        Self::weighted(policy, TenantWeights::default())
    }

    pub fn weighted(policy: Policy, weights: TenantWeights) -> Self {
        Self { queue: Queue::new(policy.queue, weights), floor: WorkerPool::new(policy), next_ticket: 0 }
    }

    /// Takes generations that belong to one request, all or none.
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
        // Most requests are one generation, which is together with nobody.
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

    /// Whether `requests` more with `tokens` prompt tokens in all would be queued.
    pub fn check_room(&self, requests: usize, tokens: u64) -> Result<(), Refusal> {
        let waiting = self.floor.waiting();
        let (requests, tokens) = (requests + waiting.requests, tokens + waiting.tokens);
        self.queue.check(requests, tokens).map_err(|full| {
            let backlog = full.tokens + self.floor.pending_tokens();
            Refusal::QueueFull { retry_after: retry_after(backlog, self.floor.prefill_rate()) }
        })
    }

    /// So many tokens of the prompt were cached at its worker.
    pub fn found_cached(&mut self, ticket: Ticket, tokens: u32) {
        self.floor.learn(ticket, |outcome| outcome.cached = Some(tokens));
    }

    /// It has ended well, with so many tokens.
    pub fn generated(&mut self, ticket: Ticket, tokens: u32) {
        self.floor.generated(ticket, tokens);
    }

    /// The worker has computed the prompt, and has room for another.
    pub fn started(&mut self, now: Instant, ticket: Ticket, random: u64) -> Vec<Action> {
        self.floor.started(now, ticket);
        self.pump(now, random)
    }

    /// The generation is over, however it ended, or nobody wants it any more.
    pub fn ended(&mut self, now: Instant, ticket: Ticket, random: u64) -> Vec<Action> {
        if self.floor.end(now, ticket).is_none() {
            self.queue.remove(|waiter| waiter.ticket == ticket);
            self.floor.give_up(|waiter| waiter.ticket == ticket);
        }
        self.pump(now, random)
    }

    /// The attempt failed; the generation goes to the head of its tenant's lane. `only_class`: tokens have
    /// been emitted, and only a worker of this numeric class may go on behind them.
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

    /// Changes the table of workers.
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

    /// A worker reports. Reports of other lives than the member's are ignored.
    pub fn load(&mut self, now: Instant, node: &NodeId, report: LoadReport, random: u64) -> Vec<Action> {
        self.floor.load(now, node, report);
        self.pump(now, random)
    }

    /// A member says what part of requests it is for, what pulls of its models' prefixes cost, and where other workers
    /// reach it. Until then it is for everything, and nothing is pulled.
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

    /// A model that nobody serves will be served again until then: requests for it wait.
    pub fn expect(&mut self, model: &ModelId, until: Instant) {
        self.floor.expect(model, until);
    }

    /// A member tells what it has pulled and sent.
    pub fn pulled(&mut self, node: &NodeId, epoch: Epoch, report: PullReport) {
        self.floor.pulled(node, epoch, report);
    }

    pub fn events(&mut self, node: &NodeId, batch: KvEventBatch) -> Result<Option<Action>, StreamError> {
        self.floor.index_of(node, |index, slot| index.apply(slot, batch))
    }

    /// To be called after [`Balancer::events`]: places what has waited for these.
    pub fn announced(&mut self, now: Instant, random: u64) -> Vec<Action> {
        self.pump_awaited(now, random)
    }

    /// A part of what [`GapRepair::Replay`] asked for, and not its last.
    pub fn replaying(&mut self, node: &NodeId, part: KvEventBatch) -> Result<Option<Action>, StreamError> {
        self.floor.index_of(node, |index, slot| index.replaying(slot, part).map(|()| None))
    }

    /// The last part of what [`GapRepair::Replay`] asked for; `None` if the worker no longer has it.
    pub fn replayed(
        &mut self,
        node: &NodeId,
        epoch: Epoch,
        missed: Option<KvEventBatch>,
    ) -> Result<Option<Action>, StreamError> {
        self.floor.index_of(node, |index, slot| index.replayed(slot, epoch, missed))
    }

    /// The next part of what [`GapRepair::Snapshot`] asked for.
    pub fn snapshot(&mut self, node: &NodeId, part: KvSnapshotFrame) -> Result<Option<Action>, StreamError> {
        self.floor.index_of(node, |index, slot| index.install(slot, part))
    }

    /// Begins to tell a peer what is known of a worker in this life, if that is more than up to event `after`.
    pub fn export(&self, node: &NodeId, epoch: Epoch, after: u64) -> Option<PeerExport> {
        self.floor.export(node, epoch, after)
    }

    /// The next frame of what a peer is told; `None` behind the last.
    pub fn exported(&self, export: &mut PeerExport) -> Result<Option<Vec<u8>>, CodecError> {
        self.floor.exported(export)
    }

    /// Begins to hear from a peer what it knows of a worker in this life, and the last event known here. Only whoever
    /// has been asked by an [`Action::Fetch`] may, in its place.
    pub fn import(&self, node: &NodeId, epoch: Epoch) -> Option<(PeerImport, u64)> {
        self.floor.import(node, epoch)
    }

    /// The next frame of what a peer knows; the last one is answered with what has to be asked of the worker.
    pub fn imported(&mut self, import: &mut PeerImport, frame: &[u8]) -> Result<Option<Action>, PeerError> {
        self.floor.imported(import, frame)
    }

    /// A fetch did not work out; the worker's next events will ask for it again.
    pub fn fetch_failed(&mut self, node: &NodeId) {
        self.floor.fetch_failed(node);
    }

    /// To be called several times a second: deadlines, leases, reservations.
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

    /// What is served under this name, if a worker does, or will again.
    pub fn model(&self, id: &ModelId) -> Option<&ServedModel> {
        self.floor.model(id)
    }

    /// Whether a worker takes work for this model now.
    pub fn serves(&self, id: &ModelId) -> bool {
        self.floor.serves(id)
    }

    /// The workers as seen from here.
    pub fn workers(&self, now: Instant) -> Vec<WorkerView> {
        self.floor.workers(now)
    }

    /// The event stream of a worker, if it is a member.
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

    /// What was decided lately, and why.
    pub fn recent(&self) -> &Recent {
        self.floor.recent()
    }

    /// Who holds how many leading units of a chain: by name, units that the worker has announced, and those that it is
    /// expected to hold soon.
    pub fn holders(&self, chain: &[BlockId]) -> Vec<(NodeId, u32, u32)> {
        self.floor.holders(chain)
    }

    /// Generations assigned and not ended.
    pub fn inflight(&self) -> usize {
        self.floor.inflight()
    }

    /// Places what can be placed.
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

    /// Places what has waited for a prefix that is there now, or will not be.
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

/// Tells each generation with how many others of its prompt it goes to its worker. Choices of one prompt have its chain
/// in common, not only an equal one.
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

/// The next of a sequence of well-mixed numbers (splitmix64).
fn mix(state: u64) -> u64 {
    let z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
