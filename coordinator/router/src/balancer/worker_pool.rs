//! The balancer's view of the workers: members, their load, and the requests that run on them.

mod lengths;
mod load;
mod locality;
mod operations;
mod peers;
mod prefix_waits;
mod pulls;

pub use peers::{PeerExport, PeerImport};

use super::recent::{Decided, Ending, Outcome, Recent};
use super::{
    Action, Assignment, Availability, Explained, Policy, Refusal, RequestState, RouteRequest, Ticket,
    WorkerView,
};
use crate::admission::PlacementOutcome;
use crate::prefix_index::{GapRepair, IndexSize, PrefixIndex, ReservationId, StreamError, StreamView};
use crate::routing::demand::{CommonKey, Demand};
use crate::routing::groups::Groups;
use crate::routing::transfer::is_worth_pulling;
use crate::routing::{
    self, COMMON_UNITS, Candidate, Outlook, Query, Reason, Routing, RoutingDecision, predicted_tokens,
};
use crate::slot::{MAX_SLOTS, Slot};
use crate::table::{Applied, Member, TableChange, TableError, WorkerTable};
use lengths::Lengths;
use load::{Load, PendingPrompt};
use prefix_waits::PrefixWaits;
use proto::block::{BlockId, HASH_UNIT_TOKENS};
use proto::ids::{Attempt, Epoch, ModelId, NodeId};
use proto::served_model::ServedModel;
use proto::worker::{LoadReport, WorkerState};
use pulls::{Supply, held_units};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long requests wait for a worker that should take work but was draining in its last report. Drain and
/// undrain requests of several coordinators can cross, and the reported state is as old as the last report.
const RESUMES_WITHIN: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(super) struct WorkerPool {
    policy: Policy,
    table: WorkerTable,
    index: PrefixIndex,
    loads: Vec<Option<Load>>,
    /// Requests that were sent to a worker and have not ended.
    running: HashMap<Ticket, RequestState>,
    prefix_waits: PrefixWaits,
    demand: Demand,
    lengths: Lengths,
    groups: Groups,
    recent: Recent,
    expected: HashMap<ModelId, ExpectedModel>,
    joins: u64,
    rounds: u64,
}

/// A prompt that a worker computes, for itself or for the worker that pulls the result.
#[derive(Debug)]
pub(super) struct Booking {
    pub(super) node: NodeId,
    pub(super) epoch: Epoch,
    slot: Slot,
    /// The worker's membership.
    join: u64,
    reservation: ReservationId,
    /// The prompt is not known to be computed yet.
    computing: bool,
}

/// A model that may have no worker now and is expected to have one again.
#[derive(Debug)]
struct ExpectedModel {
    /// Deadline of all waiting requests.
    until: Instant,
    served: Option<ServedModel>,
}

impl WorkerPool {
    pub(super) fn new(policy: Policy) -> Self {
        Self {
            policy,
            table: WorkerTable::default(),
            index: PrefixIndex::new(policy.index_bytes),
            loads: (0..MAX_SLOTS).map(|_| None).collect(),
            running: HashMap::new(),
            prefix_waits: PrefixWaits::default(),
            demand: Demand::default(),
            lengths: Lengths::default(),
            groups: Groups::default(),
            recent: Recent::default(),
            expected: HashMap::new(),
            joins: 0,
            rounds: 0,
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
        self.prefix_waits.mark_changed(member.slot);
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

    pub(super) fn expect_no_more(&mut self, model: &ModelId) {
        self.expected.remove(model);
    }

    /// `first`: how the model will be served, if no worker has served it yet.
    pub(super) fn expect(&mut self, model: &ModelId, until: Instant, first: Option<ServedModel>) {
        let before = self.expected.remove(model).and_then(|expected| expected.served);
        let served = self.table.model(model).cloned().or(before).or(first);
        self.expected.insert(model.clone(), ExpectedModel { until, served });
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

    /// Numeric class in which the worker of this epoch serves the model.
    pub(super) fn numeric_class(&self, node: &NodeId, epoch: Epoch, model: &ModelId) -> Option<String> {
        let member = self.table.member(node).filter(|member| member.register.epoch == epoch);
        member.and_then(|member| member.model(model)).map(|model| model.numeric_class.clone())
    }

    /// Chooses a worker for a request and books the request there, or refuses it, or has it wait for a prefix.
    /// Otherwise returns it: with `yields` also if it would repeat another worker's computation.
    pub(super) fn place(
        &mut self,
        now: Instant,
        state: RequestState,
        yields: bool,
        random: u64,
        actions: &mut Vec<Action>,
    ) -> PlacementOutcome<RequestState> {
        let request = Arc::clone(&state.request);
        let offers = |member, load| {
            let offers = |operation| operations::offers(member, load, operation, &request.model);
            request.operation.is_none_or(offers)
        };
        let serving = self.serving(&request.model);
        let eligible: Vec<(&Member, &Load)> =
            serving.filter(|(m, load)| state.accepts(m) && offers(m, load)).collect();
        // A deployed model is always expected. If all workers that have it declined the request, no other will take it.
        let declined = !state.declined_by.is_empty() && self.serves(&request.model);
        if eligible.is_empty() && !declined && self.expects(now, &request.model) {
            return PlacementOutcome::Blocked(state);
        }
        if eligible.is_empty() {
            let refusal = if declined { Refusal::AttemptsFailed } else { Refusal::NoWorker };
            actions.push(Action::Refuse(state.ticket, refusal));
            return PlacementOutcome::Done;
        }
        let responsive = |&&(_, load): &&(&Member, &Load)| self.is_responsive(now, load);
        let any_responsive = eligible.iter().any(|w| responsive(&w));
        let overlap = self.index.lookup(&request.chain);
        let eligible: Vec<(&Member, &Load)> =
            eligible.into_iter().filter(|w| !any_responsive || responsive(&w)).collect();
        let generates = Self::generates(&eligible);
        let mut candidates: Vec<Candidate> = eligible
            .iter()
            .filter(|(_, load)| generates(load))
            .filter(|(_, load)| load.has_room(&request.tenant, self.policy.max_inflight))
            .map(|(member, load)| load.candidate(now, member.slot, held_units(&request, member, &overlap)))
            .collect();
        // Early exit, since waiting requests are checked often: no candidate can pull more than some worker
        // holds or expects.
        let cached = candidates.iter().map(|c| predicted_tokens(request.prompt_tokens, c.units)).max();
        if !candidates.is_empty() && self.holds_back(&candidates, &state, cached.unwrap_or(0)) {
            return PlacementOutcome::Blocked(state);
        }
        self.offer_pulls(now, &state, &eligible, &overlap, &mut candidates);
        let common = state.common(&candidates);
        let standing = common.and_then(|(key, units)| {
            let holds = |slot| candidates.iter().any(|c| c.slot == slot && c.units >= units);
            self.demand.standing(now, key).filter(|standing| holds(standing.home))
        });
        let query = Query {
            routing: self.policy.routing,
            prompt_tokens: request.prompt_tokens,
            output_tokens: self.lengths.expected(&request.tenant, request.output),
            standing,
            random,
            round: self.rounds,
        };
        let choice = routing::choose(&query, &candidates);
        let Some((mut choice, member)) = choice.and_then(|c| Some((c, self.table.in_slot(c.slot)?))) else {
            return PlacementOutcome::Blocked(state);
        };
        if self.holds_back(&candidates, &state, choice.predicted) {
            return PlacementOutcome::Blocked(state);
        }
        let pull = candidates.iter().find(|c| c.slot == choice.slot).and_then(|c| c.pull);
        if let Some(pull) = pull.filter(|pull| pull.wait_seconds.is_some()) {
            let measured = candidates.iter().all(|c| c.prefill_rate > 0.0);
            self.wait_for_prefix(now, state, choice.slot, &pull, measured);
            return PlacementOutcome::Done;
        }
        if yields && self.computes_twice(&candidates, &state, &choice) {
            return PlacementOutcome::Deferrable(state);
        }
        let group = state.group();
        if choice.reason == Reason::Prefix && group.is_some_and(|key| self.groups.leads(key, choice.slot)) {
            choice.reason = Reason::Group;
        }
        let supply = self.supply(now, &state, &choice, &eligible, &candidates);
        let assignment = Assignment {
            node: member.register.node.clone(),
            epoch: member.register.epoch,
            attempt: Attempt(state.attempts),
            predicted: supply.predicted,
            reason: choice.reason,
            numeric_class: member.model(&request.model).map(|m| m.numeric_class.clone()).unwrap_or_default(),
            prefill: supply.prefill.and_then(|(slot, _)| {
                let register = &self.table.in_slot(slot)?.register;
                Some((register.node.clone(), register.epoch))
            }),
            pull: supply.pull.clone(),
            together: 1,
            explained: request.trace.map(|_| Arc::new(self.explained(now, &query, &candidates))),
        };
        let (best, lost) = self.best_holder(now, &state, &overlap, &candidates, (&choice, &supply));
        if let Some((key, _)) = common {
            self.demand.note(now, key, standing.map_or(choice.slot, |standing| standing.home), &choice);
        }
        let (number, names) = self.recent.next();
        self.recent.decided(Decided {
            number,
            attempt: assignment.attempt,
            waited: now.saturating_duration_since(request.submitted),
            request,
            at: now,
            query,
            candidates,
            choice,
            predicted: supply.predicted,
            pull: supply.sends,
            prefill: supply.prefill.map(|(slot, _)| slot),
            best,
            lost,
            names,
        });
        actions.push(Action::Assign(state.ticket, assignment));
        self.assign(now, state, &choice, &supply, number);
        PlacementOutcome::Done
    }

    fn explained(&self, now: Instant, query: &Query, candidates: &[Candidate]) -> Explained {
        let name = |candidate: &Candidate| Some(self.table.in_slot(candidate.slot)?.register.node.clone());
        let parts = candidates.iter().zip(routing::explain(query, candidates));
        let candidates = parts.filter_map(|(candidate, parts)| Some((name(candidate)?, parts))).collect();
        Explained { at: now, candidates }
    }

    pub(super) fn started(&mut self, now: Instant, ticket: Ticket) {
        let Some(state) = self.running.get_mut(&ticket) else { return };
        let Some(worker) = state.worker.as_mut().filter(|worker| worker.computing) else { return };
        worker.computing = false;
        state.leads.take().into_iter().for_each(|key| self.groups.end(key, worker.slot));
        self.recent.change(state.decision, |outcome| outcome.started = Some(now));
        if let Some(load) = load_of(&mut self.loads, worker.slot, worker.join) {
            load.started(now, ticket);
        }
        if let Some(prefill) = state.prefill.as_mut().filter(|prefill| prefill.computing) {
            prefill.computing = false;
            if let Some(load) = load_of(&mut self.loads, prefill.slot, prefill.join) {
                load.ended(now, ticket, false);
            }
        }
    }

    /// Takes a request out of the pool: ends its bookings, its lead of a group, and its wait for a prefix.
    /// `None` if no worker has the request and it waits for no prefix. The only way out of `running`.
    /// Requests that wait for a prefix also leave by [`take_ended_waits`](Self::take_ended_waits) and
    /// [`remove_waiting`](Self::remove_waiting).
    pub(super) fn remove(&mut self, now: Instant, ticket: Ticket, ending: Ending) -> Option<RequestState> {
        let Some(mut state) = self.running.remove(&ticket) else {
            return self.remove_waiting(|state| state.ticket == ticket).pop();
        };
        self.recent.change(state.decision, |outcome| outcome.ended = Some((now, ending)));
        let Some(worker) = &state.worker else { return Some(state) };
        let (slot, started) = (worker.slot, !worker.computing);
        state.leads.take().into_iter().for_each(|key| self.groups.end(key, slot));
        if let Some(load) = load_of(&mut self.loads, slot, worker.join) {
            load.ended(now, ticket, started);
            load.count(&state.request.tenant, false);
        }
        let prefill = state.prefill.take();
        if let Some(prefill) = prefill.as_ref().filter(|prefill| prefill.computing)
            && let Some(load) = load_of(&mut self.loads, prefill.slot, prefill.join)
        {
            load.ended(now, ticket, false);
        }
        for booking in std::iter::once(worker).chain(&prefill) {
            match ending {
                Ending::Over if started => {
                    self.index.settle(booking.reservation, now + self.policy.event_lag);
                }
                _ => self.index.release(booking.reservation),
            }
        }
        self.prefix_waits.mark_changed(slot);
        Some(state)
    }

    /// Expires reservations and leases.
    pub(super) fn expire(&mut self, now: Instant) -> Vec<Action> {
        self.index.expire(now);
        self.prefix_waits.mark_all_changed();
        let lease = self.policy.lease;
        let silent = |m: &&Member| {
            let load = self.loads[m.slot.index()].as_ref();
            load.is_some_and(|load| now.saturating_duration_since(load.reported) >= lease)
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
        if let Some(state) = self.running.get(&ticket) {
            self.recent.change(state.decision, change);
        }
    }

    /// Records the answer length of a generation that ended well.
    pub(super) fn generated(&mut self, ticket: Ticket, tokens: u32) {
        if let Some(state) = self.running.get(&ticket) {
            self.lengths.learn(&state.request.tenant, tokens);
            self.recent.change(state.decision, |outcome| outcome.generated = Some(tokens));
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
                silent: now.saturating_duration_since(load.reported),
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
        self.running.len()
    }

    /// Whether no table has an entry of a request.
    #[cfg(test)]
    pub(super) fn is_idle(&self) -> bool {
        self.running.is_empty()
            && self.waiting().requests == 0
            && self.groups.is_empty()
            && self.index.size().reservations == 0
            && self.loads.iter().flatten().all(Load::is_idle)
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

    pub(super) fn availability(&self, now: Instant, node: &NodeId) -> Availability {
        let member = self.table.member(node);
        let with_load = member.and_then(|member| Some((member, self.loads[member.slot.index()].as_ref()?)));
        match with_load.filter(|(member, load)| Self::takes_work(member, load)) {
            None => Availability::Away,
            Some((_, load)) if self.is_responsive(now, load) => Availability::Ready,
            Some(_) => Availability::Silent,
        }
    }

    /// Neither an operator nor the worker has disabled new work.
    fn takes_work(member: &Member, load: &Load) -> bool {
        !member.draining && load.report.as_ref().is_some_and(|r| r.state == WorkerState::Ready)
    }

    /// Whether the worker reports in time and is not stalled.
    fn is_responsive(&self, now: Instant, load: &Load) -> bool {
        load.is_responsive(now, self.policy.suspect_after)
    }

    /// Whether the request should stay in the queue, where any worker can take it and tenants take turns: all
    /// candidates have the maximum of pending prefill. A request whose prompt is mostly cached or on its way
    /// (`predicted` tokens) does not wait.
    fn holds_back(&self, candidates: &[Candidate], state: &RequestState, predicted: u32) -> bool {
        let max_pending_s = self.policy.max_pending.as_secs_f64();
        let full = |c: &Candidate| {
            c.pending_tokens as f64 >= max_pending_s * f64::from(c.prefill_rate).max(f64::MIN_POSITIVE)
        };
        let measured = candidates.iter().all(|c| c.prefill_rate > 0.0);
        let follows = predicted >= state.request.prompt_tokens / 4 * 3 && predicted > 0;
        measured && !follows && candidates.iter().all(full)
    }

    /// Whether the chosen worker would compute tokens that another worker holds or is computing, and that it
    /// could soon pull.
    fn computes_twice(
        &self,
        candidates: &[Candidate],
        state: &RequestState,
        choice: &RoutingDecision,
    ) -> bool {
        let cached = candidates.iter().map(|c| predicted_tokens(state.request.prompt_tokens, c.units)).max();
        self.policy.routing == Routing::Prefix
            && choice.reason != Reason::Replica
            && is_worth_pulling(choice.predicted, cached.unwrap_or(0))
    }

    /// Books a placed request at the chosen worker, at its prefill worker and at the sender of its pull.
    fn assign(
        &mut self,
        now: Instant,
        mut state: RequestState,
        choice: &RoutingDecision,
        supply: &Supply,
        decision: u64,
    ) {
        let request = Arc::clone(&state.request);
        let pulled = supply.sends.and_then(|pull| Duration::try_from_secs_f64(pull.seconds).ok());
        let from = pulled.and_then(|seconds| now.checked_add(seconds)).unwrap_or(now);
        let uncached = request.prompt_tokens - supply.predicted;
        state.worker = self.book(now, &state, choice.slot, uncached, from);
        if let Some(load) = self.loads[choice.slot.index()].as_mut() {
            load.count(&request.tenant, true);
        }
        if let Some((pull, from)) = supply.sends.and_then(|p| Some((p, self.loads[p.from.index()].as_mut()?)))
        {
            from.sends.add(now, &pull);
        }
        let prefill = supply.prefill;
        state.prefill = prefill.and_then(|(slot, uncached)| self.book(now, &state, slot, uncached, now));
        state.leads = state.group().filter(|_| choice.predicted < COMMON_UNITS * HASH_UNIT_TOKENS as u32);
        state.leads.into_iter().for_each(|key| self.groups.begin(key, choice.slot));
        state.decision = decision;
        state.attempts += 1;
        self.rounds += 1;
        self.running.insert(state.ticket, state);
    }

    /// Books a prompt at the worker in `slot`, which computes `uncached` of its tokens after `from`.
    fn book(
        &mut self,
        now: Instant,
        state: &RequestState,
        slot: Slot,
        uncached: u32,
        from: Instant,
    ) -> Option<Booking> {
        let (load, member) = (self.loads[slot.index()].as_mut()?, self.table.in_slot(slot)?);
        let request = Arc::clone(&state.request);
        load.enqueue(now, PendingPrompt { ticket: state.ticket, request, uncached: uncached.into(), from });
        Some(Booking {
            node: member.register.node.clone(),
            epoch: member.register.epoch,
            slot,
            join: load.join,
            reservation: self.index.reserve(slot, Arc::clone(&state.request.chain)),
            computing: true,
        })
    }

    fn forget(&mut self, slot: Slot) {
        self.index.leave(slot);
        self.loads[slot.index()] = None;
        self.prefix_waits.mark_all_changed();
    }
}

impl RequestState {
    /// The key of what the request has in common with earlier ones, and the units held of it: its named
    /// group, or the deepest held prefix if that has at least [`COMMON_UNITS`].
    fn common(&self, candidates: &[Candidate]) -> Option<(CommonKey, u32)> {
        let units = candidates.iter().map(|c| c.units).max()?;
        let last = self.request.chain.get((units as usize).checked_sub(1)?)?;
        let key = self.request.group.or((units >= COMMON_UNITS).then_some(CommonKey(last.0)));
        key.map(|key| (key, units))
    }

    /// The key of what the request has in common with requests being computed: its named group, or its first
    /// [`COMMON_UNITS`] units.
    fn group(&self) -> Option<CommonKey> {
        let begins = || self.request.chain.get(COMMON_UNITS as usize - 1).map(|unit| CommonKey(unit.0));
        self.request.group.or_else(begins)
    }

    /// Whether the member may take the request, given refusals, its images and the numeric class.
    fn accepts(&self, member: &Member) -> bool {
        let register = &member.register;
        let declined = self.declined_by.iter().any(|(n, e)| *n == register.node && *e == register.epoch);
        let class = || member.model(&self.request.model).map(|m| m.numeric_class.as_str());
        let unsupported = || self.unsupported_by.iter().any(|refusing| class() == Some(refusing.as_str()));
        let sees = || member.model(&self.request.model).is_some_and(|model| model.task.sees_images());
        let sees = !self.request.images || sees();
        sees && !declined
            && !unsupported()
            && self.only_class.as_deref().is_none_or(|only| class() == Some(only))
    }
}

/// The load in `slot`, if it still belongs to the membership `join`.
fn load_of(loads: &mut [Option<Load>], slot: Slot, join: u64) -> Option<&mut Load> {
    loads[slot.index()].as_mut().filter(|load| load.join == join)
}
