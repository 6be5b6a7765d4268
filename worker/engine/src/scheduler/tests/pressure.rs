//! Blocks run out: which sequence is preempted, and that nothing is lost.

use super::simulator::*;
use crate::kv_cache::{BlockLayout, CacheSpec, GroupKind, GroupSpec};
use crate::scheduler::{Rejected, Scheduler, SchedulerConfig, SeqId, SeqSlot};

#[test]
fn exhausted_blocks_preempt_and_change_no_token() {
    // 64 blocks of 16 tokens. Each sequence grows to 300 tokens, so three of them fit at once.
    let config = SchedulerConfig { max_seqs: 32, ..chunked(64) };
    let mut sim = Sim::new(config, full(16, 64));
    for request in 0..32u32 {
        let prompt = (0..100).map(|i| request * 1000 + i).collect();
        sim.submit(ROOT, prompt, 200).unwrap();
    }
    let mut oldest = None;
    while sim.step() {
        let first =
            sim.live.first_key_value().map(|(&id, _)| (id, sim.scheduler.info(id).unwrap().preemptions));
        if let (Some((id, before)), Some((same, after))) = (oldest, first)
            && id == same
        {
            assert_eq!(before, after, "the oldest, {id:?}, was preempted");
        }
        oldest = first;
        sim.check();
    }
    assert_eq!(sim.done.len(), 32);
    let stats = sim.scheduler.stats();
    assert!(stats.counters.preemptions > 0);
    assert_eq!(stats.kv_used_bytes, 0);
    // Recomputed work stays a small part of the whole.
    assert!(stats.counters.recomputed_tokens < 32 * 300 / 4, "{:?}", stats.counters);
}

#[test]
fn the_oldest_sequence_is_never_preempted() {
    let mut scheduler = bare(chunked(64), full(16, 20));
    scheduler.submit(request(1, tokens(0..10), 150)).unwrap();
    scheduler.submit(request(2, tokens(1000..1207), 100)).unwrap();
    let mut preempted = 0;
    for _ in 0..150 {
        let plan = scheduler.plan().unwrap().unwrap();
        // Every step advances the oldest.
        assert_eq!(plan.sequences[0].id, SeqId(1));
        finish(&mut scheduler, &plan);
        assert_eq!(scheduler.info(SeqId(1)).unwrap().preemptions, 0);
        preempted = scheduler.info(SeqId(2)).unwrap().preemptions;
    }
    assert!(preempted > 0);
}

#[test]
fn the_sequence_with_the_least_work_is_preempted_first() {
    let mut scheduler = bare(chunked(64), full(16, 30));
    scheduler.submit(request(1, tokens(0..100), 300)).unwrap();
    scheduler.submit(request(2, tokens(1000..1040), 300)).unwrap();
    scheduler.submit(request(3, tokens(2000..2160), 300)).unwrap();
    let preemptions = |scheduler: &Scheduler, id| scheduler.info(SeqId(id)).unwrap().preemptions;
    while (1..=3).all(|id| preemptions(&scheduler, id) == 0) {
        let plan = scheduler.plan().unwrap().unwrap();
        finish(&mut scheduler, &plan);
    }
    // Preempts the shortest, neither the oldest nor the youngest.
    assert_eq!([1, 2, 3].map(|id| preemptions(&scheduler, id)), [0, 1, 0]);
}

#[test]
fn a_preempted_sequence_leaves_no_uncomputed_units_behind() {
    let mut preemptions = 0;
    for seed in 0..60 {
        let mut rng = Rng(seed);
        let config = SchedulerConfig { max_seqs: 8, ..chunked(rng.pick(&[16, 20, 64])) };
        let mut sim = Sim::new(config, full(16, 24 + rng.below(16)));
        for request in 0..12u32 {
            let len = 1 + rng.below(200) as u32;
            sim.submit(ROOT, tokens(1000 * request..1000 * request + len), 150).unwrap();
        }
        while sim.step() {
            sim.check();
        }
        assert_eq!(sim.done.len(), 12);
        preemptions += sim.scheduler.stats().counters.preemptions;
    }
    assert!(preemptions > 300, "{preemptions}");
}

#[test]
fn contiguous_sequences_lie_in_one_run_or_wait() {
    let config = SchedulerConfig { block_layout: BlockLayout::Contiguous, ..chunked(64) };
    let mut sim = Sim::new(config, mixed(20, 384 * 20));
    for i in 0..3u32 {
        sim.submit(ROOT, tokens(1000 * i..1000 * i + 100), 45).unwrap();
    }
    let pending = sim.plan().unwrap();
    assert_eq!((sim.scheduler.stats().running, sim.scheduler.stats().waiting), (2, 1));
    for slot in 0..2 {
        for (table, stride) in sim.scheduler.tables(SeqSlot(slot)).iter().zip([1, 5]) {
            let base = table.contiguous_base().unwrap();
            let run: Vec<u32> = (0..9).map(|block| base + block * stride).collect();
            assert_eq!(table.offsets(), run);
        }
    }
    sim.complete(pending);
    sim.run();
    assert_eq!(sim.done.len(), 3);
    assert!(sim.scheduler.is_pristine());
    let too_long = sim.submit(ROOT, tokens(0..330), 1).unwrap_err();
    assert_eq!(too_long, Rejected::TooLong { need: 330, limit: 320 });
}

#[test]
fn scattered_blocks_make_the_oldest_start_again_alone() {
    let mut restarts = 0;
    for (full, window, sliding, arena_bytes) in
        [(320, 33, 64, 3840), (448, 100, 256, 4224), (192, 64, 128, 2240)]
    {
        let groups = vec![
            GroupSpec { kind: GroupKind::Full, block_bytes: full },
            GroupSpec { kind: GroupKind::Sliding { window }, block_bytes: sliding },
        ];
        let spec = CacheSpec { groups, block_tokens: 16, arena_bytes };
        for seed in 0..100 {
            let mut rng = Rng(seed);
            let mut sim = Sim::new(SchedulerConfig { max_seqs: 4, ..chunked(7) }, spec.clone());
            let limit = sim.scheduler.max_sequence_tokens();
            for request in 0..6u32 {
                let shared = rng.below(60) as u32;
                let len = 20 + rng.below(u64::from(limit) - 20) as u32;
                let prompt =
                    (0..shared).chain(1000 * request..1000 * (request + 1)).take(len as usize).collect();
                sim.submit(ROOT, prompt, limit - len + 1).unwrap();
            }
            sim.run();
            assert_eq!(sim.done.len(), 6);
            restarts += sim.scheduler.stats().counters.lone_restarts;
        }
    }
    assert!(restarts > 0, "nothing was scattered");
}
