//! Sizes the caches of a replica so that they fit into every stage.

use crate::placement::{draft_model_cache, stage_cache, stage_weights};
use consensus::table::ReplicaPlan;
use dispatch::PoolWorker;
use dispatch::models::Models;
use model::costs::ModelCosts;
use proto::ids::NodeId;
use proto::placement::OfferedDrafter;

/// Cache bytes of a replica over all stages, limited by the stage with the least room relative to its share,
/// without the drafter's arena. 0 if the model or a worker is unknown here.
pub(super) fn cache_bytes(
    plan: &ReplicaPlan,
    models: &Models,
    (pool, drafter): (&[PoolWorker], Option<&OfferedDrafter>),
) -> u64 {
    let model = models.get(plan.model.as_str());
    let Some((costs, context)) =
        model.as_ref().and_then(|model| Some((model.costs.as_ref()?, model.context)))
    else {
        return 0;
    };
    let costs = super::drafters::with(costs, drafter);
    let memory = |node: &NodeId| Some(pool.iter().find(|worker| worker.node == *node)?.capacity.memory);
    of_stages(plan, (&costs, context as u64), memory)
}

/// The same for a model of these costs and this context. `memory` returns a worker's bytes for its stage.
pub(crate) fn of_stages(
    plan: &ReplicaPlan,
    (costs, context): (&ModelCosts, u64),
    memory: impl Fn(&NodeId) -> Option<u64>,
) -> u64 {
    let stages: Option<Vec<StageMemory>> = plan
        .stages
        .iter()
        .map(|stage| {
            let layers = stage.layers.0 as usize..stage.layers.1 as usize;
            let range = (layers.end <= costs.layers()).then(|| costs.range(layers))?;
            let usable = memory(&stage.node)? / 10 * 9;
            Some(StageMemory {
                room: usable.saturating_sub(stage_weights(&range)),
                sequence: stage_cache(&range, context),
                draft_cache: draft_model_cache(costs, &range, context),
            })
        })
        .collect();
    share_out(&stages.unwrap_or_default())
}

/// Memory of a stage, in bytes.
struct StageMemory {
    room: u64,
    /// Bytes that a sequence takes in this stage.
    sequence: u64,
    /// The part of `sequence` that is in the draft model's own arena.
    draft_cache: u64,
}

fn share_out(stages: &[StageMemory]) -> u64 {
    let all: u128 =
        stages.iter().map(|stage| u128::from(stage.sequence.saturating_sub(stage.draft_cache))).sum();
    let cached = stages.iter().filter(|stage| stage.sequence > 0);
    let least = cached.map(|stage| u128::from(stage.room) * all / u128::from(stage.sequence)).min();
    least.map_or(0, |bytes| u64::try_from(bytes).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shared(stages: &[(u64, u64)]) -> u64 {
        let stage =
            |(room, sequence): &(u64, u64)| StageMemory { room: *room, sequence: *sequence, draft_cache: 0 };
        share_out(&stages.iter().map(stage).collect::<Vec<_>>())
    }

    #[test]
    fn a_model_that_drafts_has_its_part_beside_the_caches() {
        // A sequence takes 8 bytes in the caches of both stages, and 2 in the drafter's arena at the first.
        let stages = |room| {
            [
                StageMemory { room, sequence: 6, draft_cache: 2 },
                StageMemory { room: 1000, sequence: 4, draft_cache: 0 },
            ]
        };
        let bytes = share_out(&stages(60));
        assert_eq!(bytes, 80);
        assert_eq!(
            bytes / 2 + bytes / 4,
            60,
            "of the first stage: half of the caches, and a quarter beside them"
        );
    }

    #[test]
    fn the_stage_with_the_least_room_decides() {
        assert_eq!(shared(&[(100, 1), (100, 1)]), 200);
        // The first stage holds three quarters of every sequence.
        assert_eq!(shared(&[(90, 3), (100, 1)]), 120);
        assert_eq!(shared(&[(90, 1), (0, 1)]), 0);
        assert_eq!(shared(&[(90, 1), (0, 0)]), 90, "who keeps nothing needs no room");
        assert_eq!(shared(&[]), 0);
    }
}
