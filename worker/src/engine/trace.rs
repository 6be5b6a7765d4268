//! Where the time of a sampled request goes while its model is over several workers: a line for each of its steps and
//! each stage, on a target of their own at level debug.

use super::Engine;
use crate::scheduler::StepPlan;
use crate::stage::Spent;
use proto::sequence::SequenceName;
use tracing::Level;

/// Where the lines go.
const TARGET: &str = "kvasir::stages";
/// Of so many requests one is traced.
const SAMPLED: u64 = 64;

impl Engine {
    /// Tells what a step has cost, if it has rows of a sampled request and somebody listens.
    pub(super) fn trace(&self, plan: &StepPlan, spent: &Spent) {
        if !tracing::enabled!(target: TARGET, Level::DEBUG) {
            return;
        }
        for sequence in plan.sequences.iter().filter(|sequence| sequence.id.0 % SAMPLED == 1) {
            let key = self.live.get(&sequence.id).and_then(|live| live.key.as_ref());
            let Some(SequenceName { request, choice }) = key.map(|key| &key.name) else { continue };
            for (stage, at) in spent.stages.iter().enumerate() {
                tracing::debug!(
                    target: TARGET,
                    %request,
                    choice,
                    step = plan.step,
                    stage,
                    rows = sequence.rows.len(),
                    rows_of_step = plan.tokens.len(),
                    received_bytes = at.received,
                    stalled_us = at.stalled_us,
                    computed_us = at.computed_us,
                    under_way_us = spent.under_way.as_micros() as u64,
                );
            }
        }
    }
}
