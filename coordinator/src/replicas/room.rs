//! How much the caches of a replica may take, so that each stage has room for its part.

use crate::consensus::table::ReplicaPlanV1;
use crate::dispatch::PoolWorker;
use crate::models::Models;
use crate::placement::{stage_cache, stage_weights};

/// Bytes over all stages: what the stage with the least room for its part of a sequence allows. 0 where the model or a
/// worker is not known here.
pub(super) fn cache_bytes(plan: &ReplicaPlanV1, models: &Models, pool: &[PoolWorker]) -> u64 {
    let model = models.get(plan.model.as_str());
    let Some((costs, context)) = model.and_then(|model| Some((model.costs.as_ref()?, model.context))) else {
        return 0;
    };
    let stages: Option<Vec<(u64, u64)>> = plan
        .stages
        .iter()
        .map(|stage| {
            let worker = pool.iter().find(|worker| worker.node == stage.node)?;
            let layers = stage.layers.0 as usize..stage.layers.1 as usize;
            let range = (layers.end <= costs.layers()).then(|| costs.range(layers))?;
            let usable = worker.capacity.memory / 10 * 9;
            Some((usable.saturating_sub(stage_weights(&range)), stage_cache(&range, context as u64)))
        })
        .collect();
    share_out(&stages.unwrap_or_default())
}

/// Of each stage, the bytes that it has room for and those that a sequence takes there.
fn share_out(stages: &[(u64, u64)]) -> u64 {
    let all: u128 = stages.iter().map(|(_, part)| u128::from(*part)).sum();
    let parts = stages.iter().filter(|(_, part)| *part > 0);
    let least = parts.map(|(room, part)| u128::from(*room) * all / u128::from(*part)).min();
    least.map_or(0, |bytes| u64::try_from(bytes).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stage_with_the_least_room_decides() {
        assert_eq!(share_out(&[(100, 1), (100, 1)]), 200);
        // Three quarters of every sequence are in the first.
        assert_eq!(share_out(&[(90, 3), (100, 1)]), 120);
        assert_eq!(share_out(&[(90, 1), (0, 1)]), 0);
        assert_eq!(share_out(&[(90, 1), (0, 0)]), 90, "who keeps nothing needs no room");
        assert_eq!(share_out(&[]), 0);
    }
}
