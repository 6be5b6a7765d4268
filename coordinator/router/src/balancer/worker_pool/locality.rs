//! Finds the best holder of a prompt, and why the request did not go there.

use super::pulls::held_units;
use super::{Load, RequestState, Supply, WorkerPool};
use crate::balancer::recent::Lost;
use crate::prefix_index::Overlap;
use crate::routing::{Candidate, Reason, RoutingDecision, predicted_tokens};
use crate::slot::Slot;
use crate::table::Member;
use proto::message::WorkPart;
use proto::worker::WorkerState;
use std::time::Instant;

impl WorkerPool {
    /// The worker that holds most of the prompt, in tokens. If the chosen worker serves less, also why it was
    /// preferred.
    pub(super) fn best_holder(
        &self,
        now: Instant,
        state: &RequestState,
        overlap: &Overlap,
        candidates: &[Candidate],
        (choice, supply): (&RoutingDecision, &Supply),
    ) -> (Option<(u32, Slot)>, Option<Lost>) {
        let held = |member: &Member| (held_units(&state.request, member, overlap), member.slot);
        // Ties go to the chosen worker, then to the lowest slot.
        let best = self
            .table
            .members()
            .map(held)
            .max_by_key(|&(units, slot)| (units, slot == choice.slot, std::cmp::Reverse(slot)));
        let Some((units, slot)) = best.filter(|(units, _)| *units > 0) else { return (None, None) };
        let tokens = predicted_tokens(state.request.prompt_tokens, units);
        let lost = (tokens > supply.predicted).then(|| self.lost(now, state, slot, candidates, choice));
        (Some((tokens, slot)), lost)
    }

    fn lost(
        &self,
        now: Instant,
        state: &RequestState,
        slot: Slot,
        candidates: &[Candidate],
        choice: &RoutingDecision,
    ) -> Lost {
        if candidates.iter().any(|candidate| candidate.slot == slot) {
            return if choice.reason == Reason::Replica { Lost::Replica } else { Lost::Load };
        }
        let (Some(member), Some(load)) = (self.table.in_slot(slot), self.loads[slot.index()].as_ref()) else {
            return Lost::NotReady;
        };
        let reported = load.report.as_ref().map(|report| report.state);
        let is_full = |load: &Load| !load.has_room(&state.request.tenant, self.policy.max_inflight);
        match reported {
            _ if member.draining => Lost::Drain,
            Some(WorkerState::Draining) => Lost::Drain,
            Some(WorkerState::Ready) if !state.accepts(member) => Lost::Declined,
            Some(WorkerState::Ready) if !self.is_responsive(now, load) => Lost::Silent,
            Some(WorkerState::Ready) if is_full(load) => Lost::Full,
            Some(WorkerState::Ready) if load.pulls.part() == WorkPart::Prefill => Lost::Role,
            _ => Lost::NotReady,
        }
    }
}
