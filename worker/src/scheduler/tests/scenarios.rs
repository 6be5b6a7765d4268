//! Situations with known figures.

use super::simulator::*;
use crate::kv_cache::{CacheSpec, GroupKind, GroupSpec};
use crate::scheduler::SchedulerConfig;
use proto::block::BlockId;

const ROOT: BlockId = BlockId([9; 16]);

fn full(block_tokens: u32, blocks: u64) -> CacheSpec {
    let groups = vec![GroupSpec { kind: GroupKind::Full, block_bytes: 64 }];
    CacheSpec { groups, block_tokens, arena_bytes: 64 * blocks }
}

#[test]
fn a_burst_computes_its_shared_prefix_once() {
    for block_tokens in [16, 32, 64] {
        for chunk in [0, 100, 512] {
            let config = SchedulerConfig { max_seqs: 32, chunk, ..SchedulerConfig::default() };
            let mut sim = Sim::new(config, full(block_tokens, 40_000 / u64::from(block_tokens)));
            let shared: Vec<u32> = (0..1500).map(|i| i % 97).collect();
            for request in 0..32u32 {
                let own = (0..30).map(|i| 1000 + request * 100 + i);
                sim.submit(ROOT, shared.iter().copied().chain(own).collect(), 16).unwrap();
            }
            sim.run();
            let infos: Vec<_> = sim.done.values().map(|client| client.info.unwrap()).collect();
            let computed: u32 = infos.iter().map(|info| info.computed_tokens).sum();
            assert!(computed <= 1530 + 31 * 42, "{computed} computed");
            assert_eq!(u64::from(computed), sim.scheduler.stats().counters.prefill_tokens_computed);
            assert_eq!(infos.iter().filter(|info| info.cached_tokens >= 1488).count(), 31);
        }
    }
}
