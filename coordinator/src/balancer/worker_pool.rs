//! The balancer's view of the workers: members, their load, and the requests that run on them.

mod awaited;
mod lengths;
mod load;
mod locality;
mod operations;
mod peers;
mod pulls;

pub use peers::{PeerExport, PeerImport};

use super::recent::{Decided, Ending, Outcome, Recent};
use super::{Action, Assignment, Explained, Policy, QueuedRequest, Refusal, Ticket, WorkerView};
use crate::prefix_index::{GapRepair, IndexSize, PrefixIndex, ReservationId, StreamError, StreamView};
use crate::routing::demand::{CommonKey, Demand};
use crate::routing::groups::Groups;
use crate::routing::transfer::is_worth_asking;
use crate::routing::{
    self, COMMON_UNITS, Candidate, Outlook, Query, Reason, Routing, RoutingDecision, predicted_tokens,
};
use crate::slot::{MAX_SLOTS, Slot};
use crate::table::{Applied, Member, TableChange, TableError, WorkerTable};
use awaited::Awaited;
use lengths::Lengths;
use load::{Load, Queued};
use proto::block::{BlockId, HASH_UNIT_TOKENS};
use proto::ids::{Attempt, Epoch, ModelId, NodeId};
use proto::message::{LoadReport, ServedModel, WorkerState};
use pulls::{PrefillStage, Supply};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long requests wait for a worker that should take work but whose last report says that it drains. Drain
/// and undrain requests of several coordinators can cross, and the reported state is as old as the last
/// report.
const RESUMES_WITHIN: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(super) struct WorkerPool {
    policy: Policy,
    table: WorkerTable,
    index: PrefixIndex,
    loads: Vec<Option<Load>>,
    flights: HashMap<Ticket, InFlight>,
    awaited: Awaited,
    demand: Demand,
    lengths: Lengths,
    groups: Groups,
    recent: Recent,
    expected: HashMap<ModelId, Expected>,
    joins: u64,
    turns: u64,
}

/// A generation that was sent to a worker.
#[derive(Debug)]
struct InFlight {
    waiter: QueuedRequest,
    node: NodeId,
    epoch: Epoch,
    slot: Slot,
    join: u64,
    reservation: ReservationId,
    /// The group whose followers may join it, until it has started.
    leads: Option<CommonKey>,
    /// The prompt's booking at the prefill worker, if one computes it.
    stage: Option<PrefillStage>,
    started: bool,
    /// Number of the routing decision.
    decision: u64,
}

/// A model that may have no worker now and is expected to have one again.
#[derive(Debug)]
struct Expected {
    /// Deadline of all waiting requests.
    until: Instant,
    served: Option<ServedModel>,
}

pub(super) enum Placing {
    Assigned(Assignment),
    Refused(Refusal),
    Later(QueuedRequest),
    /// A worker has room, but would compute what another worker is already computing.
    Yielding(QueuedRequest),
    /// The request waits in [`Awaited`] until its prefix can be pulled.
    Awaiting,
}

impl WorkerPool {
    pub(super) fn new(policy: Policy) -> Self {
        Self {
            policy,
            table: WorkerTable::default(),
            index: PrefixIndex::new(policy.index_bytes),
            loads: (0..MAX_SLOTS).map(|_| None).collect(),
            flights: HashMap::new(),
            awaited: Awaited::default(),
            demand: Demand::default(),
            lengths: Lengths::default(),
            groups: Groups::default(),
            recent: Recent::default(),
            expected: HashMap::new(),
            joins: 0,
            turns: 0,
        }
    }

    pub(super) fn policy(&self) -> &Policy {
        &self.policy
    }

    pub(super) fn table(&self) -> &WorkerTable {
        &self.table
    }

    pub(super) fn change(&mut self, now: Instant, change: TableChange) -> Result<Option<Action>, TableError> {
        match self.table.apply(change)? {
            Applied::Joined { slot, node, epoch } => {
                self.joins += 1;
                self.recent.joined(slot, &node);
                let need = self.index.join(slot, epoch);
                self.loads[slot.index()] = Some(Load::new(now, self.joins));
                return Ok(Some(Action::Fetch { node, epoch, need }));
            }
            Applied::Left(slot) => self.forget(slot),
            Applied::Drained(slot) => {
                let takes_work = self.table.in_slot(slot).is_some_and(|member| !member.draining);
                if let Some(load) = self.loads[slot.index()].as_mut() {
                    load.resumes = takes_work.then_some(now + RESUMES_WITHIN);
                }
            }
        }
        Ok(None)
    }

    pub(super) fn load(&mut self, now: Instant, node: &NodeId, report: LoadReport) {
        let Some(member) = self.table.member(node).filter(|m| m.register.epoch == report.epoch) else {
            return;
        };
        let Some(load) = self.loads[member.slot.index()].as_mut() else { return };
        load.take(now, report);
    }

    /// Applies `change` to the index at the member's slot and returns the required fetch, if any.
    pub(super) fn index_of(
        &mut self,
        node: &NodeId,
        change: impl FnOnce(&mut PrefixIndex, Slot) -> Result<Option<GapRepair>, StreamError>,
    ) -> Result<Option<Action>, StreamError> {
        let member = self.table.member(node).ok_or(StreamError::NotFollowed)?;
        self.awaited.stir(member.slot);
        let need = change(&mut self.index, member.slot)?;
        let fetch = |need| Action::Fetch { node: node.clone(), epoch: member.register.epoch, need };
        Ok(need.map(fetch))
    }

    pub(super) fn fetch_failed(&mut self, node: &NodeId) {
        if let Some(member) = self.table.member(node) {
            self.index.fetch_failed(member.slot);
        }
    }

    pub(super) fn serves(&self, model: &ModelId) -> bool {
        self.serving(model).next().is_some()
    }

    pub(super) fn expect(&mut self, model: &ModelId, until: Instant) {
        let before = self.expected.remove(model).and_then(|expected| expected.served);
        let served = self.table.model(model).cloned().or(before);
        self.expected.insert(model.clone(), Expected { until, served });
    }

    /// The model of this name, if it is served or was served and is expected to be again.
    pub(super) fn model(&self, id: &ModelId) -> Option<&ServedModel> {
        let expected = || self.expected.get(id).and_then(|expected| expected.served.as_ref());
        self.table.model(id).or_else(expected)
    }

    /// Whether a worker is expected to serve this model soon.
    pub(super) fn expects(&self, now: Instant, model: &ModelId) -> bool {
        let resumes = |member: &Member| {
            let load = self.loads[member.slot.index()].as_ref();
            !member.draining && member.model(model).is_some() && load.is_some_and(|load| load.resumes(now))
        };
        self.expected.get(model).is_some_and(|expected| now < expected.until)
            || self.table.members().any(resumes)
    }

    /// Records that a worker refused work because it drains.
    pub(super) fn drains(&mut self, now: Instant, node: &NodeId, epoch: Epoch) {
        let member = self.table.member(node).filter(|member| member.register.epoch == epoch);
        let Some(member) = member.filter(|member| !member.draining) else { return };
        if let Some(load) = self.loads[member.slot.index()].as_mut() {
            load.report.iter_mut().for_each(|report| report.state = WorkerState::Draining);
            load.resumes = Some(now + RESUMES_WITHIN);
        }
    }

    /// Chooses a worker for `waiter` and books the request there. With `yields`, a request that would repeat
    /// another worker's computation is returned as [`Placing::Yielding`].
    pub(super) fn place(
        &mut self,
        now: Instant,
        waiter: QueuedRequest,
        yields: bool,
        random: u64,
    ) -> Placing {
        let ask = &waiter.ask;
        let asked = |member, load| {
            ask.operation.is_none_or(|operation| operations::offers(member, load, operation, &ask.model))
        };
        let wanted: Vec<(&Member, &Load)> =
            self.serving(&ask.model).filter(|(m, load)| waiter.accepts(m) && asked(m, load)).collect();
        if wanted.is_empty() && self.expects(now, &waiter.ask.model) {
            return Placing::Later(waiter);
        }
        if wanted.is_empty() {
            let declined = !waiter.avoid.is_empty() && self.serves(&waiter.ask.model);
            return Placing::Refused(if declined { Refusal::AttemptsFailed } else { Refusal::NoWorker });
        }
        let lively = |&&(_, load): &&(&Member, &Load)| self.is_lively(now, load);
        let any_lively = wanted.iter().any(|w| lively(&w));
        let overlap = self.index.lookup(&waiter.ask.chain);
        let wanted: Vec<(&Member, &Load)> =
            wanted.into_iter().filter(|w| !any_lively || lively(&w)).collect();
        let generates = Self::generates(&wanted);
        let mut candidates: Vec<Candidate> = wanted
            .iter()
            .filter(|(_, load)| generates(load))
            .filter(|(_, load)| load.has_room(&ask.tenant, self.policy.max_inflight))
            .map(|(member, load)| load.candidate(now, member.slot, overlap.units(member.slot)))
            .collect();
        // Early exit, since waiting requests are checked often: no candidate can pull more than some worker
        // holds or expects.
        let most = candidates.iter().map(|c| predicted_tokens(waiter.ask.prompt_tokens, c.units)).max();
        if !candidates.is_empty() && self.holds_back(&candidates, &waiter, most.unwrap_or(0)) {
            return Placing::Later(waiter);
        }
        self.offer_pulls(now, &waiter, &wanted, &overlap, &mut candidates);
        let common = waiter.common(&candidates);
        let standing = common.and_then(|(key, most)| {
            let holds = |slot| candidates.iter().any(|c| c.slot == slot && c.units >= most);
            self.demand.standing(now, key).filter(|standing| holds(standing.home))
        });
        let query = Query {
            routing: self.policy.routing,
            prompt_tokens: waiter.ask.prompt_tokens,
            output_tokens: self.lengths.expected(&ask.tenant, ask.output),
            standing,
            random,
            turn: self.turns,
        };
        let choice = routing::choose(&query, &candidates);
        let Some((mut choice, member)) = choice.and_then(|c| Some((c, self.table.in_slot(c.slot)?))) else {
            return Placing::Later(waiter);
        };
        if self.holds_back(&candidates, &waiter, choice.predicted) {
            return Placing::Later(waiter);
        }
        let pull = candidates.iter().find(|c| c.slot == choice.slot).and_then(|c| c.pull);
        if let Some(pull) = pull.filter(|pull| pull.awaits.is_some()) {
            let measured = candidates.iter().all(|c| c.prefill_rate > 0.0);
            self.keep(now, waiter, choice.slot, &pull, measured);
            return Placing::Awaiting;
        }
        if yields && self.computes_twice(&candidates, &waiter, &choice) {
            return Placing::Yielding(waiter);
        }
        let group = waiter.group();
        if choice.reason == Reason::Prefix && group.is_some_and(|key| self.groups.leads(key, choice.slot)) {
            choice.reason = Reason::Group;
        }
        let supply = self.supply(now, &waiter, &choice, &wanted, &candidates);
        let assignment = Assignment {
            node: member.register.node.clone(),
            epoch: member.register.epoch,
            attempt: Attempt(waiter.attempts),
            predicted: supply.predicted,
            reason: choice.reason,
            numeric_class: member
                .model(&waiter.ask.model)
                .map(|m| m.numeric_class.clone())
                .unwrap_or_default(),
            prefill: supply.prefill.as_ref().map(|(_, _, stage)| stage.clone()),
            pull: supply.pull.clone(),
            together: 1,
            explained: waiter.ask.explain.then(|| Arc::new(self.explained(now, &query, &candidates))),
        };
        let (best, lost) = self.best_holder(now, &waiter, &overlap, &candidates, (&choice, &supply));
        if let Some((key, _)) = common {
            self.demand.note(now, key, standing.map_or(choice.slot, |standing| standing.home), &choice);
        }
        let (number, names) = self.recent.next();
        self.recent.decided(Decided {
            number,
            ask: Arc::clone(&waiter.ask),
            attempt: assignment.attempt,
            waited: now.saturating_duration_since(waiter.since),
            at: now,
            query,
            candidates,
            choice,
            predicted: supply.predicted,
            pull: supply.sends,
            prefill: supply.prefill.as_ref().map(|(slot, ..)| *slot),
            best,
            lost,
            names,
        });
        self.book(now, waiter, choice, &assignment, &supply, number);
        Placing::Assigned(assignment)
    }

    fn explained(&self, now: Instant, query: &Query, candidates: &[Candidate]) -> Explained {
        let name = |candidate: &Candidate| Some(self.table.in_slot(candidate.slot)?.register.node.clone());
        let parts = candidates.iter().zip(routing::explain(query, candidates));
        let candidates = parts.filter_map(|(candidate, parts)| Some((name(candidate)?, parts))).collect();
        Explained { at: now, candidates }
    }

    pub(super) fn started(&mut self, now: Instant, ticket: Ticket) {
        let Some(flight) = self.flights.get_mut(&ticket) else { return };
        if std::mem::replace(&mut flight.started, true) {
            return;
        }
        flight.leads.take().into_iter().for_each(|key| self.groups.end(key, flight.slot));
        self.recent.change(flight.decision, |outcome| outcome.started = Some(now));
        flight.stage.iter_mut().for_each(|stage| stage.is_over(now, &mut self.loads));
        if let Some(load) = load_of(&mut self.loads, flight.slot, flight.join) {
            load.started(now, ticket);
        }
    }

    /// Ends a generation; `None` if no worker had it.
    pub(super) fn end(&mut self, now: Instant, ticket: Ticket) -> Option<()> {
        let flight = self.land(now, ticket, Ending::Over)?;
        for reservation in flight.reservations() {
            match flight.started {
                true => self.index.settle(reservation, now + self.policy.event_lag),
                false => self.index.release(reservation),
            }
        }
        Some(())
    }

    /// Ends a failed attempt. Returns the request and the worker that had it.
    pub(super) fn fail(&mut self, now: Instant, ticket: Ticket) -> Option<(QueuedRequest, NodeId, Epoch)> {
        let flight = self.land(now, ticket, Ending::Failed)?;
        flight.reservations().for_each(|reservation| self.index.release(reservation));
        Some((flight.waiter, flight.node, flight.epoch))
    }

    /// Expires reservations and leases.
    pub(super) fn expire(&mut self, now: Instant) -> Vec<Action> {
        self.index.expire(now);
        self.awaited.stir_all();
        let lease = self.policy.lease;
        let silent = |m: &&Member| {
            let load = self.loads[m.slot.index()].as_ref();
            load.is_some_and(|l| now.saturating_duration_since(l.heard) >= lease)
        };
        let lost: Vec<(NodeId, Epoch)> = self
            .table
            .members()
            .filter(silent)
            .map(|m| (m.register.node.clone(), m.register.epoch))
            .collect();
        let mut actions = Vec::new();
        for (node, epoch) in lost {
            if let Ok(Applied::Left(slot)) =
                self.table.apply(TableChange::Leave { node: node.clone(), epoch })
            {
                self.forget(slot);
                actions.push(Action::Drop { node, epoch });
            }
        }
        actions
    }

    /// Updates the outcome of a generation's decision.
    pub(super) fn learn(&mut self, ticket: Ticket, change: impl FnOnce(&mut Outcome)) {
        if let Some(flight) = self.flights.get(&ticket) {
            self.recent.change(flight.decision, change);
        }
    }

    /// Records the answer length of a generation that ended well.
    pub(super) fn generated(&mut self, ticket: Ticket, tokens: u32) {
        if let Some(flight) = self.flights.get(&ticket) {
            self.lengths.learn(&flight.waiter.ask.tenant, tokens);
            self.recent.change(flight.decision, |outcome| outcome.generated = Some(tokens));
        }
    }

    pub(super) fn recent(&self) -> &Recent {
        &self.recent
    }

    /// By node: the leading units that a worker has announced, and those that it holds or is expected to
    /// hold.
    pub(super) fn holders(&self, chain: &[BlockId]) -> Vec<(NodeId, u32, u32)> {
        let (held, expected) = (self.index.lookup_held(chain), self.index.lookup(chain));
        let holder = |member: &Member| {
            let (held, expected) = (held.units(member.slot), expected.units(member.slot));
            (expected > 0).then(|| (member.register.node.clone(), held, expected))
        };
        self.table.members().filter_map(holder).collect()
    }

    pub(super) fn workers(&self, now: Instant) -> Vec<WorkerView> {
        let all: Vec<Candidate> = self
            .table
            .members()
            .filter_map(|m| Some(self.loads[m.slot.index()].as_ref()?.candidate(now, m.slot, 0)))
            .collect();
        let outlook = Outlook::new(&all);
        let view = |member: &Member| {
            let load = self.loads[member.slot.index()].as_ref()?;
            Some(WorkerView {
                member: member.clone(),
                report: load.report.clone(),
                silent: now.saturating_duration_since(load.heard),
                inflight: load.inflight(),
                pending_tokens: load.own_pending(),
                queue_seconds: outlook.queue(&load.candidate(now, member.slot, 0)),
                part: load.pulls.part(),
                pulls: load.pulls.report(),
                operations: Self::offer_views(member, load),
                stream: self.index.stream(member.slot),
            })
        };
        self.table.members().filter_map(view).collect()
    }

    pub(super) fn stream(&self, node: &NodeId) -> Option<StreamView> {
        self.index.stream(self.table.member(node)?.slot)
    }

    pub(super) fn index_size(&self) -> IndexSize {
        self.index.size()
    }

    pub(super) fn inflight(&self) -> usize {
        self.flights.len()
    }

    /// Uncached prompt tokens that all workers have still to compute.
    pub(super) fn pending_tokens(&self) -> u64 {
        self.loads.iter().flatten().map(Load::sent).sum()
    }

    /// Sum of the measured prefill rates, in tokens per second.
    pub(super) fn prefill_rate(&self) -> f64 {
        self.loads.iter().flatten().filter_map(|l| l.report.as_ref()).map(|r| f64::from(r.prefill_rate)).sum()
    }

    fn serving(&self, model: &ModelId) -> impl Iterator<Item = (&Member, &Load)> {
        self.table
            .members()
            .filter(|m| m.model(model).is_some())
            .filter_map(|m| Some((m, self.loads[m.slot.index()].as_ref()?)))
            .filter(|(member, load)| Self::takes_work(member, load))
    }

    /// Neither an operator nor the worker has disabled new work.
    fn takes_work(member: &Member, load: &Load) -> bool {
        !member.draining && load.report.as_ref().is_some_and(|r| r.state == WorkerState::Ready)
    }

    /// Whether the worker reports in time and is not stalled.
    fn is_lively(&self, now: Instant, load: &Load) -> bool {
        load.is_lively(now, self.policy.suspect_after)
    }

    /// Whether the request should stay in the queue, where any worker can take it and tenants take turns: all
    /// candidates have the maximum of pending prefill. A request whose prompt is mostly cached or on its way
    /// (`predicted` tokens) does not wait.
    fn holds_back(&self, candidates: &[Candidate], waiter: &QueuedRequest, predicted: u32) -> bool {
        let most = self.policy.max_pending.as_secs_f64();
        let full = |c: &Candidate| {
            c.pending_tokens as f64 >= most * f64::from(c.prefill_rate).max(f64::MIN_POSITIVE)
        };
        let measured = candidates.iter().all(|c| c.prefill_rate > 0.0);
        let follows = predicted >= waiter.ask.prompt_tokens / 4 * 3 && predicted > 0;
        measured && !follows && candidates.iter().all(full)
    }

    /// Whether the chosen worker would compute tokens that another worker holds or is computing, and that it
    /// could soon pull.
    fn computes_twice(
        &self,
        candidates: &[Candidate],
        waiter: &QueuedRequest,
        choice: &RoutingDecision,
    ) -> bool {
        let most = candidates.iter().map(|c| predicted_tokens(waiter.ask.prompt_tokens, c.units)).max();
        self.policy.routing == Routing::Prefix
            && choice.reason != Reason::Replica
            && is_worth_asking(choice.predicted, most.unwrap_or(0))
    }

    fn book(
        &mut self,
        now: Instant,
        mut waiter: QueuedRequest,
        choice: RoutingDecision,
        assignment: &Assignment,
        supply: &Supply,
        decision: u64,
    ) {
        let Some(load) = self.loads[choice.slot.index()].as_mut() else { return };
        let uncached = u64::from(waiter.ask.prompt_tokens - supply.predicted);
        self.turns += 1;
        let pulled = supply.sends.and_then(|pull| Duration::try_from_secs_f64(pull.seconds).ok());
        load.give(
            now,
            Queued {
                ticket: waiter.ticket,
                chain: Arc::clone(&waiter.ask.chain),
                prompt: u64::from(waiter.ask.prompt_tokens),
                uncached,
                from: pulled.and_then(|seconds| now.checked_add(seconds)).unwrap_or(now),
            },
        );
        load.count(&waiter.ask.tenant, true);
        let join = load.join;
        waiter.attempts += 1;
        if let Some((pull, from)) = supply.sends.and_then(|p| Some((p, self.loads[p.from.index()].as_mut()?)))
        {
            from.sends.add(now, &pull);
        }
        let reservation = self.index.reserve(choice.slot, Arc::clone(&waiter.ask.chain));
        let leads = waiter.group().filter(|_| choice.predicted < COMMON_UNITS * HASH_UNIT_TOKENS as u32);
        leads.into_iter().for_each(|key| self.groups.begin(key, choice.slot));
        let stage = supply.prefill.as_ref();
        let stage = stage.and_then(|(slot, uncached, _)| self.book_stage(now, &waiter, *slot, *uncached));
        let flight = InFlight {
            node: assignment.node.clone(),
            epoch: assignment.epoch,
            slot: choice.slot,
            join,
            reservation,
            leads,
            stage,
            started: false,
            decision,
            waiter,
        };
        self.flights.insert(flight.waiter.ticket, flight);
    }

    fn land(&mut self, now: Instant, ticket: Ticket, how: Ending) -> Option<InFlight> {
        let mut flight = self.flights.remove(&ticket)?;
        self.recent.change(flight.decision, |outcome| outcome.ended = Some((now, how)));
        flight.leads.into_iter().for_each(|key| self.groups.end(key, flight.slot));
        flight.stage.iter_mut().for_each(|stage| stage.is_over(now, &mut self.loads));
        self.awaited.stir(flight.slot);
        if let Some(load) = load_of(&mut self.loads, flight.slot, flight.join) {
            load.ended(now, ticket, flight.started);
            load.count(&flight.waiter.ask.tenant, false);
        }
        Some(flight)
    }

    fn forget(&mut self, slot: Slot) {
        self.index.leave(slot);
        self.loads[slot.index()] = None;
        self.awaited.stir_all();
    }
}

impl InFlight {
    fn reservations(&self) -> impl Iterator<Item = ReservationId> + use<> {
        let stage = self.stage.as_ref().map(|stage| stage.reservation);
        std::iter::once(self.reservation).chain(stage)
    }
}

impl QueuedRequest {
    /// The key of what the request has in common with earlier ones, and the units held of it: its named
    /// group, or the deepest held prefix if that has at least [`COMMON_UNITS`].
    fn common(&self, candidates: &[Candidate]) -> Option<(CommonKey, u32)> {
        let most = candidates.iter().map(|c| c.units).max()?;
        let last = self.ask.chain.get((most as usize).checked_sub(1)?)?;
        let key = self.ask.group.or((most >= COMMON_UNITS).then_some(CommonKey(last.0)));
        key.map(|key| (key, most))
    }

    /// The key of what the request has in common with requests being computed: its named group, or its first
    /// [`COMMON_UNITS`] units.
    fn group(&self) -> Option<CommonKey> {
        let begins = || self.ask.chain.get(COMMON_UNITS as usize - 1).map(|unit| CommonKey(unit.0));
        self.ask.group.or_else(begins)
    }

    /// Whether the member may take the request, given refusals and the numeric class.
    fn accepts(&self, member: &Member) -> bool {
        let register = &member.register;
        let declined = self.avoid.iter().any(|(n, e)| *n == register.node && *e == register.epoch);
        let class = || member.model(&self.ask.model).map(|m| m.numeric_class.as_str());
        !declined && self.only_class.as_deref().is_none_or(|only| class() == Some(only))
    }
}

/// The load in `slot`, if it still belongs to the membership `join`.
fn load_of(loads: &mut [Option<Load>], slot: Slot, join: u64) -> Option<&mut Load> {
    loads[slot.index()].as_mut().filter(|load| load.join == join)
}
