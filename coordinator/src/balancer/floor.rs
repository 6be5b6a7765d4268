//! The workers' side of the balancer: who is there, how busy each is, what runs where.

mod peers;
mod pulls;

pub use peers::{PeerExport, PeerImport};

use super::{Action, Assignment, Policy, Refusal, Ticket, Waiter, WorkerView};
use crate::prefix_index::{IndexSize, Need, PrefixIndex, ReservationId, StreamError};
use crate::routing::{self, Candidate};
use crate::slot::{MAX_SLOTS, Slot};
use crate::table::{Applied, Member, TableChange, TableError, WorkerTable};
use proto::ids::{Attempt, Epoch, ModelId, NodeId};
use proto::message::{LoadReportV1, WorkerState};
use pulls::{PullTerms, Stage, Supply};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

/// A worker that has been stuck in a step for this long gets no new work while another is there.
const STALLED_MS: u64 = 3_000;

#[derive(Debug)]
pub(super) struct Floor {
    policy: Policy,
    table: WorkerTable,
    index: PrefixIndex,
    loads: Vec<Option<Load>>,
    flights: HashMap<Ticket, Flight>,
    joins: u64,
    /// Generations placed.
    turns: u64,
}

/// How busy a worker is: what it reports, and what this coordinator has sent there since.
#[derive(Debug)]
struct Load {
    /// Tells this membership of the slot from earlier ones.
    join: u64,
    report: Option<LoadReportV1>,
    heard: Instant,
    own: Own,
    /// What others have sent there, by the last report.
    foreign: Own,
    pulls: PullTerms,
}

#[derive(Debug, Default, Clone, Copy)]
struct Own {
    /// Prompt tokens to be computed.
    pending: u64,
    /// Sequences whose prompt is still to be computed.
    unstarted: u32,
    /// Sequences that are decoded.
    running: u32,
}

/// A generation that a worker has.
#[derive(Debug)]
struct Flight {
    waiter: Waiter,
    node: NodeId,
    epoch: Epoch,
    slot: Slot,
    join: u64,
    uncached: u64,
    reservation: ReservationId,
    /// The prompt at the worker that computes it for this one.
    stage: Option<Stage>,
    started: bool,
}

pub(super) enum Placing {
    Assigned(Assignment),
    Refused(Refusal),
    Later(Waiter),
}

impl Floor {
    pub(super) fn new(policy: Policy) -> Self {
        Self {
            policy,
            table: WorkerTable::default(),
            index: PrefixIndex::new(policy.index_bytes),
            loads: (0..MAX_SLOTS).map(|_| None).collect(),
            flights: HashMap::new(),
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
                let need = self.index.join(slot, epoch);
                let (own, foreign) = (Own::default(), Own::default());
                let pulls = PullTerms::default();
                let load = Load { join: self.joins, report: None, heard: now, own, foreign, pulls };
                self.loads[slot.index()] = Some(load);
                return Ok(Some(Action::Fetch { node, epoch, need }));
            }
            Applied::Left(slot) => self.forget(slot),
            Applied::Drained(_) => {}
        }
        Ok(None)
    }

    pub(super) fn load(&mut self, now: Instant, node: &NodeId, report: LoadReportV1) {
        let Some(member) = self.table.member(node).filter(|m| m.register.epoch == report.epoch) else {
            return;
        };
        let Some(load) = self.loads[member.slot.index()].as_mut() else { return };
        load.heard = now;
        load.foreign = Own {
            pending: report.pending_prefill_tokens.saturating_sub(load.own.pending),
            unstarted: report.waiting.saturating_sub(load.own.unstarted),
            running: report.running.saturating_sub(load.own.running + load.own.unstarted),
        };
        load.report = Some(report);
    }

    /// Applies `change` to the index at the member's slot and turns what it needs into an action.
    pub(super) fn index_of(
        &mut self,
        node: &NodeId,
        change: impl FnOnce(&mut PrefixIndex, Slot) -> Result<Option<Need>, StreamError>,
    ) -> Result<Option<Action>, StreamError> {
        let member = self.table.member(node).ok_or(StreamError::NotFollowed)?;
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

    /// Chooses a worker for `waiter` and books it there.
    pub(super) fn place(&mut self, now: Instant, waiter: Waiter, random: u64) -> Placing {
        let wanted: Vec<(&Member, &Load)> =
            self.serving(&waiter.ask.model).filter(|(m, _)| waiter.accepts(m)).collect();
        if wanted.is_empty() {
            let declined = !waiter.avoid.is_empty() && self.serves(&waiter.ask.model);
            return Placing::Refused(if declined { Refusal::AttemptsFailed } else { Refusal::NoWorker });
        }
        let lively = |&&(_, load): &&(&Member, &Load)| {
            let stalled = load.report.as_ref().is_some_and(|r| r.stalled_ms > STALLED_MS);
            !stalled && now.saturating_duration_since(load.heard) < self.policy.suspect_after
        };
        let any_lively = wanted.iter().any(|w| lively(&w));
        let overlap = self.index.lookup(&waiter.ask.chain);
        let wanted: Vec<(&Member, &Load)> =
            wanted.into_iter().filter(|w| !any_lively || lively(&w)).collect();
        let generates = Self::generates(&wanted);
        let mut candidates: Vec<Candidate> = wanted
            .iter()
            .filter(|(_, load)| generates(load))
            .filter(|(_, load)| load.own.unstarted + load.own.running < self.policy.max_inflight)
            .map(|(member, load)| load.candidate(member.slot, overlap.units(member.slot)))
            .collect();
        self.offer_pulls(&waiter, &wanted, &overlap, &mut candidates);
        let choice =
            routing::choose(self.policy.routing, waiter.ask.prompt_tokens, &candidates, random, self.turns);
        let Some((choice, member)) = choice.and_then(|c| Some((c, self.table.in_slot(c.slot)?))) else {
            return Placing::Later(waiter);
        };
        let supply = self.supply(&waiter, &choice, &wanted, &candidates);
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
        };
        self.book(waiter, choice, &assignment, &supply);
        Placing::Assigned(assignment)
    }

    pub(super) fn started(&mut self, ticket: Ticket) {
        let Some(flight) = self.flights.get_mut(&ticket) else { return };
        if std::mem::replace(&mut flight.started, true) {
            return;
        }
        flight.stage.iter_mut().for_each(|stage| stage.is_over(&mut self.loads));
        if let Some(own) = own_of(&mut self.loads, flight.slot, flight.join) {
            own.pending -= flight.uncached;
            own.unstarted -= 1;
            own.running += 1;
        }
    }

    /// The generation is over; `None` if no worker had it.
    pub(super) fn end(&mut self, now: Instant, ticket: Ticket) -> Option<()> {
        let flight = self.land(ticket)?;
        for reservation in flight.reservations() {
            match flight.started {
                true => self.index.settle(reservation, now + self.policy.event_lag),
                false => self.index.release(reservation),
            }
        }
        Some(())
    }

    /// The attempt failed: gives back what waited, and the worker that had it.
    pub(super) fn fail(&mut self, ticket: Ticket) -> Option<(Waiter, NodeId, Epoch)> {
        let flight = self.land(ticket)?;
        flight.reservations().for_each(|reservation| self.index.release(reservation));
        Some((flight.waiter, flight.node, flight.epoch))
    }

    /// Ends reservations and leases whose time is up.
    pub(super) fn expire(&mut self, now: Instant) -> Vec<Action> {
        self.index.expire(now);
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

    pub(super) fn workers(&self, now: Instant) -> Vec<WorkerView> {
        let view = |member: &Member| {
            let load = self.loads[member.slot.index()].as_ref()?;
            Some(WorkerView {
                member: member.clone(),
                report: load.report.clone(),
                silent: now.saturating_duration_since(load.heard),
                inflight: load.own.unstarted + load.own.running,
                pending_tokens: load.own.pending,
                part: load.pulls.part(),
                stream: self.index.stream(member.slot),
            })
        };
        self.table.members().filter_map(view).collect()
    }

    pub(super) fn index_size(&self) -> IndexSize {
        self.index.size()
    }

    pub(super) fn inflight(&self) -> usize {
        self.flights.len()
    }

    /// Prompt tokens that all workers have still to compute.
    pub(super) fn pending_tokens(&self) -> u64 {
        self.loads.iter().flatten().map(|l| l.own.pending + l.foreign.pending).sum()
    }

    /// Tokens per second that all workers together compute.
    pub(super) fn prefill_rate(&self) -> f64 {
        self.loads.iter().flatten().filter_map(|l| l.report.as_ref()).map(|r| f64::from(r.prefill_rate)).sum()
    }

    fn serving(&self, model: &ModelId) -> impl Iterator<Item = (&Member, &Load)> {
        self.table
            .members()
            .filter(|m| !m.draining && m.model(model).is_some())
            .filter_map(|m| Some((m, self.loads[m.slot.index()].as_ref()?)))
            .filter(|(_, load)| load.report.as_ref().is_some_and(|r| r.state == WorkerState::Ready))
    }

    fn book(
        &mut self,
        mut waiter: Waiter,
        choice: routing::Choice,
        assignment: &Assignment,
        supply: &Supply,
    ) {
        let Some(load) = self.loads[choice.slot.index()].as_mut() else { return };
        let uncached = u64::from(waiter.ask.prompt_tokens - supply.predicted);
        self.turns += 1;
        load.own.pending += uncached;
        load.own.unstarted += 1;
        let join = load.join;
        waiter.attempts += 1;
        let reservation = self.index.reserve(choice.slot, Arc::clone(&waiter.ask.chain));
        let stage = supply.prefill.as_ref();
        let stage = stage.and_then(|(slot, uncached, _)| self.book_stage(&waiter, *slot, *uncached));
        let flight = Flight {
            node: assignment.node.clone(),
            epoch: assignment.epoch,
            slot: choice.slot,
            join,
            uncached,
            reservation,
            stage,
            started: false,
            waiter,
        };
        self.flights.insert(flight.waiter.ticket, flight);
    }

    fn land(&mut self, ticket: Ticket) -> Option<Flight> {
        let mut flight = self.flights.remove(&ticket)?;
        flight.stage.iter_mut().for_each(|stage| stage.is_over(&mut self.loads));
        if let Some(own) = own_of(&mut self.loads, flight.slot, flight.join) {
            if flight.started {
                own.running -= 1;
            } else {
                own.pending -= flight.uncached;
                own.unstarted -= 1;
            }
        }
        Some(flight)
    }

    fn forget(&mut self, slot: Slot) {
        self.index.leave(slot);
        self.loads[slot.index()] = None;
    }
}

impl Flight {
    fn reservations(&self) -> impl Iterator<Item = ReservationId> + use<> {
        let stage = self.stage.as_ref().map(|stage| stage.reservation);
        std::iter::once(self.reservation).chain(stage)
    }
}

impl Waiter {
    /// Whether this member may have it, besides serving the model.
    fn accepts(&self, member: &Member) -> bool {
        let register = &member.register;
        let declined = self.avoid.iter().any(|(n, e)| *n == register.node && *e == register.epoch);
        let class = || member.model(&self.ask.model).map(|m| m.numeric_class.as_str());
        !declined && self.only_class.as_deref().is_none_or(|only| class() == Some(only))
    }
}

impl Load {
    fn candidate(&self, slot: Slot, units: u32) -> Candidate {
        let report = self.report.as_ref();
        Candidate {
            slot,
            units,
            pending_tokens: self.own.pending + self.foreign.pending,
            running: self.own.running + self.foreign.running,
            prefill_rate: report.map_or(0.0, |r| r.prefill_rate),
            step_ms: report.map_or(0.0, |r| r.step_ms),
            pull: None,
        }
    }
}

/// The account of the worker in `slot`, if it is still the membership that the flight was booked with.
fn own_of(loads: &mut [Option<Load>], slot: Slot, join: u64) -> Option<&mut Own> {
    loads[slot.index()].as_mut().filter(|load| load.join == join).map(|load| &mut load.own)
}
