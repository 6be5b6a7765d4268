//! KV transfers as the worker pool sees them: each worker's role, the address and the costs of its pulls, and
//! prompts that a prefill worker computes for another worker.

use super::{Load, RequestState, RouteRequest, WorkerPool};
use crate::prefix_index::Overlap;
use crate::routing::transfer::{self, Holder, Pull, PullPrice, is_worth_pulling};
use crate::routing::{Candidate, Outlook, Routing, RoutingDecision, hit_units, predicted_tokens};
use crate::slot::Slot;
use crate::table::{Member, TableError};
use proto::adapter::OfferedAdapter;
use proto::block::HASH_UNIT_TOKENS;
use proto::ids::{Epoch, ModelId, NodeId};
use proto::message::{PullCost, PullReport, WorkPart};
use proto::pull::{PullSource, SENDS_AT_ONCE};
use proto::worker::WorkerState;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// A worker's role and pull costs, as registered, and its last report of pulls.
#[derive(Debug, Clone, Default)]
pub(super) struct PullTerms {
    part: WorkPart,
    costs: Vec<PullCost>,
    /// Address for other workers.
    quic: String,
    report: PullReport,
}

/// Deadlines of a worker's expected sends, one each. The worker's own report of them arrives too late for
/// routing.
#[derive(Debug, Clone, Default)]
pub(super) struct Sends(VecDeque<Instant>);

impl Sends {
    pub(super) fn len(&self, now: Instant) -> usize {
        self.0.iter().filter(|until| **until > now).count()
    }

    /// Seconds until all sends are done.
    pub(super) fn seconds(&self, now: Instant) -> f64 {
        self.0.back().map_or(0.0, |until| until.saturating_duration_since(now).as_secs_f64())
    }

    /// Adds a send behind the others.
    pub(super) fn add(&mut self, now: Instant, pull: &Pull) {
        self.0.retain(|until| *until > now);
        let until =
            Duration::try_from_secs_f64(pull.seconds).ok().and_then(|seconds| now.checked_add(seconds));
        self.0.extend(until);
    }
}

/// How a chosen worker gets the prefix that it does not compute.
#[derive(Debug, Default)]
pub(super) struct Supply {
    /// Prompt tokens that its cache will serve.
    pub(super) predicted: u32,
    pub(super) pull: Option<PullSource>,
    /// The pull itself, if the prefix is held already.
    pub(super) sends: Option<Pull>,
    /// The prefill worker's slot, and the prompt tokens that it computes.
    pub(super) prefill: Option<(Slot, u32)>,
}

impl WorkerPool {
    /// Sets a worker's role, pull costs and address.
    pub(in crate::balancer) fn introduce(
        &mut self,
        node: &NodeId,
        epoch: Epoch,
        (part, costs, quic): (WorkPart, Vec<PullCost>, String),
    ) {
        if let Some(load) = self.load_of(node, epoch) {
            load.pulls = PullTerms { part, costs, quic, report: PullReport::default() };
        }
    }

    /// Replaces a member's adapters; returns those that are left out. Pulls of an adapter's prefixes cost what those
    /// of its parent cost.
    pub(in crate::balancer) fn set_adapters(
        &mut self,
        node: &NodeId,
        epoch: Epoch,
        offered: Vec<OfferedAdapter>,
    ) -> Result<Vec<OfferedAdapter>, TableError> {
        let left_out = self.table.set_adapters(node, epoch, offered)?;
        let adapters: Vec<(ModelId, ModelId)> = match self.table.member(node) {
            Some(member) => member.adapters().map(|a| (a.name.clone(), a.parent.clone())).collect(),
            None => Vec::new(),
        };
        let models: Vec<ModelId> = match self.table.member(node) {
            Some(member) => member.register.models.iter().map(|model| model.id.clone()).collect(),
            None => Vec::new(),
        };
        if let Some(load) = self.load_of(node, epoch) {
            let costs = &mut load.pulls.costs;
            costs.retain(|cost| models.contains(&cost.model));
            for (name, parent) in adapters {
                let cost = costs.iter().find(|cost| cost.model == parent).cloned();
                costs.extend(cost.map(|cost| PullCost { model: name, ..cost }));
            }
        }
        Ok(left_out)
    }

    /// Takes a worker's report of its pulls and sends.
    pub(in crate::balancer) fn pulled(&mut self, node: &NodeId, epoch: Epoch, report: PullReport) {
        if let Some(load) = self.load_of(node, epoch) {
            load.pulls.report = report;
        }
    }

    pub(super) fn load_of(&mut self, node: &NodeId, epoch: Epoch) -> Option<&mut Load> {
        let member = self.table.member(node).filter(|m| m.register.epoch == epoch)?;
        self.loads[member.slot.index()].as_mut()
    }

    /// A filter for workers that a generation may go to. Prefill workers pass only if no other worker is
    /// available.
    pub(super) fn generates(eligible: &[(&Member, &Load)]) -> impl Fn(&Load) -> bool + use<> {
        let others = eligible.iter().any(|(_, load)| load.pulls.part != WorkPart::Prefill);
        move |load| !others || load.pulls.part != WorkPart::Prefill
    }

    /// Adds to each candidate the pull that pays, if one does.
    pub(super) fn offer_pulls(
        &self,
        now: Instant,
        state: &RequestState,
        eligible: &[(&Member, &Load)],
        overlap: &Overlap,
        candidates: &mut [Candidate],
    ) {
        // The other policies are for comparison with prefix routing and do not use pulls.
        if self.policy.routing != Routing::Prefix {
            return;
        }
        // No worker holds or expects more than the candidates have.
        let longest = self.table.members().map(|member| overlap.units(member.slot)).max();
        if candidates.iter().all(|c| Some(c.units) == longest) {
            return;
        }
        let (chain, model) = (&state.request.chain, &state.request.model);
        let held = self.index.lookup_held(chain);
        let outlook = Outlook::new(candidates);
        let may_wait = state.may_wait(now);
        let mut holders: Vec<(&Member, Holder)> = Vec::new();
        for (member, load) in self.holders_for_pulls(now, model) {
            let (units, expected) = (held.units(member.slot), overlap.units(member.slot));
            let holder = Holder {
                slot: member.slot,
                units,
                layer: load.step_seconds() / layers(model, member),
                backlog: load.sends.seconds(now),
                ready: None,
            };
            holders.push((member, holder));
            let brings =
                (may_wait && expected > units).then(|| load.brings(now, chain, (units, expected))).flatten();
            holders.extend(brings.map(|(pending_tokens, from)| {
                let until = Candidate { pending_tokens, ..load.candidate(now, member.slot, expected) };
                let ready = Some(outlook.queue(&until).max(from));
                (member, Holder { units: expected, ready, ..holder })
            }));
        }
        // While there is a prefill worker, a decode worker does not wait here: the prefill worker computes
        // for it.
        let prefills = eligible.iter().any(|(_, load)| load.pulls.part == WorkPart::Prefill);
        for candidate in candidates {
            let at = |(member, _): &&(&Member, &Load)| member.slot == candidate.slot;
            let Some((member, load)) = eligible.iter().find(at) else { continue };
            let Some(price) = load.pulls.price(model) else { continue };
            let waits = !(prefills && load.pulls.part == WorkPart::Decode);
            let pullable = holders
                .iter()
                .filter(|(other, holder)| {
                    (waits || holder.ready.is_none()) && same_class(model, member, other)
                })
                .map(|(_, holder)| *holder);
            candidate.pull =
                transfer::best(state.request.prompt_tokens, candidate, &outlook, &price, pullable);
        }
    }

    /// Workers that can serve pulls now: ready or draining, responsive, and with fewer than [`SENDS_AT_ONCE`]
    /// sends.
    fn holders_for_pulls(&self, now: Instant, model: &ModelId) -> impl Iterator<Item = (&Member, &Load)> {
        let serves = |load: &Load| {
            let state = load.report.as_ref().map(|report| report.state);
            matches!(state, Some(WorkerState::Ready | WorkerState::Draining))
        };
        self.table
            .members()
            .filter_map(|member| Some((member, self.loads[member.slot.index()].as_ref()?)))
            .filter(move |(_, load)| serves(load) && self.is_responsive(now, load))
            .filter(move |(_, load)| load.pulls.price(model).is_some() && load.sends.len(now) < SENDS_AT_ONCE)
    }

    /// How the chosen worker gets the prompt: from its cache, by a pull, or from a prefill worker.
    pub(super) fn supply(
        &self,
        now: Instant,
        state: &RequestState,
        choice: &RoutingDecision,
        eligible: &[(&Member, &Load)],
        candidates: &[Candidate],
    ) -> Supply {
        let at = |slot: Slot| eligible.iter().find(|(member, _)| member.slot == slot);
        let sends = candidates.iter().find(|c| c.slot == choice.slot).and_then(|c| c.pull);
        let pull = sends.and_then(|pull| {
            let (member, load) = (self.table.in_slot(pull.from)?, self.loads[pull.from.index()].as_ref()?);
            let tokens = predicted_tokens(state.request.prompt_tokens, pull.units);
            Some(load.pulls.source(&member.register.node, tokens))
        });
        let supply = Supply { predicted: choice.predicted, pull, sends, prefill: None };
        self.prefilled(now, state, choice, eligible, at(choice.slot)).unwrap_or(supply)
    }

    /// Has a prefill worker compute a long prompt for a decode worker, if one is available.
    fn prefilled(
        &self,
        now: Instant,
        state: &RequestState,
        choice: &RoutingDecision,
        eligible: &[(&Member, &Load)],
        chosen: Option<&(&Member, &Load)>,
    ) -> Option<Supply> {
        let (decodes, load) = chosen.filter(|(_, load)| load.pulls.part == WorkPart::Decode)?;
        let request = &state.request;
        load.pulls.price(&request.model)?;
        let predicted =
            predicted_tokens(request.prompt_tokens, request.prompt_tokens / HASH_UNIT_TOKENS as u32);
        // Expected units may be units that a prefill worker computes for another request and that are not
        // pulled yet.
        let held = self.index.lookup_held(&request.chain).units(choice.slot);
        let have = predicted_tokens(request.prompt_tokens, held);
        let long = request.prompt_tokens - have > self.policy.decode_prefill_tokens;
        if !long || !is_worth_pulling(have, predicted) {
            return None;
        }
        let overlap = self.index.lookup(&request.chain);
        let free = |load: &Load| load.inflight() < self.policy.max_inflight;
        let computes = eligible
            .iter()
            .filter(|(member, load)| {
                let prefills =
                    load.pulls.part == WorkPart::Prefill && load.pulls.price(&request.model).is_some();
                prefills && free(load) && same_class(&request.model, decodes, member)
            })
            .map(|(member, load)| {
                let held = predicted_tokens(request.prompt_tokens, overlap.units(member.slot));
                let waits = load.pending(now) + u64::from(request.prompt_tokens - held);
                (waits, request.prompt_tokens - held, member, load)
            })
            .min_by_key(|(waits, ..)| *waits);
        let (_, uncached, member, load) = computes?;
        let node = member.register.node.clone();
        let pull = Some(load.pulls.source(&node, predicted));
        Some(Supply { predicted, pull, sends: None, prefill: Some((member.slot, uncached)) })
    }
}

impl PullTerms {
    pub(super) fn part(&self) -> WorkPart {
        self.part
    }

    pub(super) fn report(&self) -> PullReport {
        self.report
    }

    fn price(&self, model: &ModelId) -> Option<PullPrice<'_>> {
        let cost = self.costs.iter().find(|cost| cost.model == *model)?;
        Some(PullPrice { cost, rate: self.report.rate })
    }

    fn source(&self, node: &NodeId, tokens: u32) -> PullSource {
        PullSource { node: node.clone(), quic: self.quic.clone(), tokens }
    }
}

/// Number of layers that the member computes.
fn layers(model: &ModelId, member: &Member) -> f64 {
    let (from, to) = member.model(model).map_or((0, 1), |model| model.layers);
    f64::from(to.saturating_sub(from).max(1))
}

/// Leading units of the prompt that the member holds and would serve.
pub(super) fn held_units(request: &RouteRequest, member: &Member, overlap: &Overlap) -> u32 {
    let hit_tokens = member.model(&request.model).map_or(0, |model| model.hit_tokens);
    hit_units(request.prompt_tokens, overlap.units(member.slot), hit_tokens)
}

/// Whether both members serve the model in the same numeric class, with bit-equal results.
fn same_class(model: &ModelId, one: &Member, other: &Member) -> bool {
    let served = one.model(model).zip(other.model(model));
    served.is_some_and(|(one, other)| one.numeric_class == other.numeric_class)
}
