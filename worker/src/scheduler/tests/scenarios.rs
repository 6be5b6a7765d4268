//! Situations with known figures.

use super::simulator::*;
use crate::kv_cache::{CacheSpec, GroupKind, GroupSpec, HitStop, NULL_OFFSET, Placement};
use crate::scheduler::{
    LogitRows, Rejected, Scheduler, SchedulerConfig, SeqId, SequenceRequest, StepError, StepPlan,
};
use proto::block::BlockId;
use proto::event::KvEvent;

const ROOT: BlockId = BlockId([9; 16]);

fn full(block_tokens: u32, blocks: u64) -> CacheSpec {
    let groups = vec![GroupSpec { kind: GroupKind::Full, block_bytes: 64 }];
    CacheSpec { groups, block_tokens, arena_bytes: 64 * blocks }
}

/// One full layer for every five with a window.
fn mixed(window: u32, bytes: u64) -> CacheSpec {
    let groups = vec![
        GroupSpec { kind: GroupKind::Full, block_bytes: 64 },
        GroupSpec { kind: GroupKind::Sliding { window }, block_bytes: 320 },
    ];
    CacheSpec { groups, block_tokens: 16, arena_bytes: bytes }
}

fn tokens(range: std::ops::Range<u32>) -> Vec<u32> {
    range.collect()
}

fn chunked(chunk: u32) -> SchedulerConfig {
    SchedulerConfig { chunk, max_batch_tokens: 512, ..SchedulerConfig::default() }
}

fn request(id: u64, prompt: Vec<u32>, max_new_tokens: u32) -> SequenceRequest {
    SequenceRequest {
        id: SeqId(id),
        root: ROOT,
        prompt,
        max_new_tokens,
        logit_rows: LogitRows::LastOnly,
        priority: 0,
    }
}

/// A scheduler without a model behind it.
fn bare(config: SchedulerConfig, spec: CacheSpec) -> Scheduler {
    Scheduler::new(config, spec, KEY).unwrap()
}

/// Completes a step in which every sequence that samples draws token 1.
fn finish(scheduler: &mut Scheduler, plan: &StepPlan) {
    let drawn: Vec<_> = plan.sequences.iter().filter(|s| s.samples).map(|s| (s.id, 1)).collect();
    scheduler.complete(plan.step, &drawn).unwrap();
}

#[test]
fn a_burst_computes_its_shared_prefix_once() {
    for (spec, chunk) in [
        (full(16, 4000), 512),
        (full(16, 4000), 0),
        (full(32, 2000), 100),
        (full(64, 1000), 512),
        (mixed(512, 384 * 4000), 512),
    ] {
        let mut sim = Sim::new(SchedulerConfig { chunk, ..SchedulerConfig::default() }, spec);
        let burst = |sim: &mut Sim, first: u32| {
            for request in first..first + 32 {
                let own = (0..30).map(|i| 10_000 + request * 100 + i);
                sim.submit(ROOT, (0..1500).chain(own).collect(), 16).unwrap();
            }
            sim.run();
            let infos = std::mem::take(&mut sim.done).into_values().map(|client| client.info.unwrap());
            infos.map(|info| (info.computed_tokens, info.cached_tokens)).collect::<Vec<_>>()
        };
        let cold = burst(&mut sim, 0);
        let computed: u32 = cold.iter().map(|&(computed, _)| computed).sum();
        assert_eq!(computed, 1530 + 31 * 42);
        assert_eq!(u64::from(computed), sim.scheduler.stats().counters.prefill_tokens_computed);
        assert_eq!(cold.iter().filter(|&&(_, cached)| cached == 1488).count(), 31);

        let warm = burst(&mut sim, 32);
        assert!(warm.iter().all(|&served| served == (42, 1488)), "{warm:?}");
    }
}

#[test]
fn without_prefix_cache_nothing_is_shared() {
    let mut sim = Sim::new(SchedulerConfig { prefix_cache: false, ..chunked(512) }, full(16, 4000));
    for _ in 0..8 {
        sim.submit(ROOT, tokens(0..4126), 2).unwrap();
    }
    sim.run();
    assert!(sim.done.values().all(|client| client.info.unwrap().cached_tokens == 0));
    assert!(sim.done.values().all(|client| client.info.unwrap().hit_stop == HitStop::Disabled));
    assert_eq!(sim.scheduler.stats().counters.prefill_tokens_computed, 8 * 4126);
    assert_eq!(sim.log.last_sequence(), 0);
    assert!(sim.scheduler.is_pristine());
}

#[test]
fn exhausted_blocks_preempt_and_change_no_token() {
    // 64 blocks of 16 tokens; each sequence grows to 300 tokens, so three of them fit at once.
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
    // Work that is done twice stays a small part of the whole.
    assert!(stats.counters.recomputed_tokens < 32 * 300 / 4, "{:?}", stats.counters);
}

#[test]
fn the_oldest_is_never_preempted_however_little_it_has() {
    let mut scheduler = bare(chunked(64), full(16, 20));
    scheduler.submit(request(1, tokens(0..10), 150)).unwrap();
    scheduler.submit(request(2, tokens(1000..1207), 100)).unwrap();
    let mut preempted = 0;
    for _ in 0..150 {
        let plan = scheduler.plan().unwrap().unwrap();
        // Every step moves the oldest on.
        assert_eq!(plan.sequences[0].id, SeqId(1));
        finish(&mut scheduler, &plan);
        assert_eq!(scheduler.info(SeqId(1)).unwrap().preemptions, 0);
        preempted = scheduler.info(SeqId(2)).unwrap().preemptions;
    }
    assert!(preempted > 0);
}

#[test]
fn the_least_work_is_given_up_first() {
    let mut scheduler = bare(chunked(64), full(16, 30));
    scheduler.submit(request(1, tokens(0..100), 300)).unwrap();
    scheduler.submit(request(2, tokens(1000..1040), 300)).unwrap();
    scheduler.submit(request(3, tokens(2000..2160), 300)).unwrap();
    let preemptions = |scheduler: &Scheduler, id| scheduler.info(SeqId(id)).unwrap().preemptions;
    while (1..=3).all(|id| preemptions(&scheduler, id) == 0) {
        let plan = scheduler.plan().unwrap().unwrap();
        finish(&mut scheduler, &plan);
    }
    // Neither the oldest nor the youngest, but the shortest.
    assert_eq!([1, 2, 3].map(|id| preemptions(&scheduler, id)), [0, 1, 0]);
}

#[test]
fn what_gives_way_in_a_step_leaves_nothing_behind_that_was_not_computed() {
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
fn followers_take_over_when_their_producer_goes() {
    for block_tokens in [16, 64] {
        let mut sim = Sim::new(chunked(100), full(block_tokens, 4000));
        let ids: Vec<SeqId> = (0..4u32)
            .map(|i| sim.submit(ROOT, (0..1000).chain(5000 + i..5010 + i).collect(), 4).unwrap())
            .collect();
        for _ in 0..3 {
            assert!(sim.step());
        }
        assert_eq!(sim.scheduler.stats().following, 3);
        let producer = sim.remove(ids[0]).info.unwrap();
        assert_eq!((producer.computed_tokens, producer.cached_tokens), (300, 0));
        assert!(sim.step());
        // Exactly one of the others goes on in its place.
        assert_eq!(sim.scheduler.stats().following, 2);
        assert_eq!(sim.scheduler.stats().counters.prefill_tokens_computed, 400);
        sim.run();
        let computed: u32 = sim.done.values().map(|client| client.info.unwrap().computed_tokens).sum();
        let once = 1010 - 288 + 2 * (1010 - 992);
        assert_eq!(computed, once, "{block_tokens} tokens per block");
    }
}

#[test]
fn a_stalled_producer_is_not_waited_for() {
    // The producer's only row of a step is in flight and does not return; the follower gives up on it.
    let mut scheduler = bare(SchedulerConfig { follower_patience: 3, ..chunked(16) }, full(16, 100));
    scheduler.submit(request(1, tokens(0..200), 1)).unwrap();
    scheduler.submit(request(2, tokens(0..201), 1)).unwrap();
    scheduler.submit(request(3, tokens(500..900), 1)).unwrap();
    let stuck = scheduler.plan().unwrap().unwrap();
    assert_eq!(stuck.sequences.iter().map(|s| s.id.0).collect::<Vec<_>>(), [1, 3]);
    // Sequence 3 is in flight as well, so nothing can be planned, however often one asks.
    for _ in 0..10 {
        assert_eq!(scheduler.plan().unwrap(), None);
    }
    scheduler.submit(request(4, tokens(1000..1400), 1)).unwrap();
    let mut waited = 0;
    loop {
        // Fresh prompts keep the steps coming while the first step does not end.
        let plan = scheduler.plan().unwrap().unwrap();
        if plan.sequences.iter().any(|s| s.id.0 == 2) {
            break;
        }
        waited += 1;
        assert!(waited < 10, "the follower waits for ever");
        let id = 10 + waited;
        scheduler.submit(request(id, tokens(2000 * id as u32..2000 * id as u32 + 100), 1)).unwrap();
    }
    assert_eq!(waited, 3);
    assert_eq!(scheduler.stats().counters.takeovers, 1);
}

#[test]
fn a_sliding_window_holds_its_window_and_is_hit_by_it() {
    let mut sim = Sim::new(chunked(64), mixed(100, 384 * 400));
    sim.submit(ROOT, tokens(0..2000), 100).unwrap();
    let step = |sim: &mut Sim| {
        let used = sim.scheduler.stats().kv_used_bytes;
        let full = 64 * (2100u64.div_ceil(16));
        // Window and chunk, rounded up to blocks, and one block for the odd ends.
        assert!(used <= full + 320 * (163u64.div_ceil(16) + 1), "{used} bytes used");
        sim.step()
    };
    while step(&mut sim) {}
    assert_eq!(sim.done.len(), 1);

    let again = sim.submit(ROOT, tokens(0..2000), 1).unwrap();
    let pending = sim.plan().unwrap();
    let slot =
        sim.scheduler.sequences.iter().position(|s| s.as_ref().is_some_and(|s| s.id == again)).unwrap();
    let tables = sim.scheduler.tables(crate::scheduler::SeqSlot(slot as u32));
    assert!(!tables[0].offsets().contains(&NULL_OFFSET));
    let nulls = tables[1].offsets().iter().take_while(|&&offset| offset == NULL_OFFSET).count();
    assert_eq!((nulls, tables[1].offsets().len()), ((1984 - 99) / 16, 125));
    sim.complete(pending);
    let info = sim.done[&again].info.unwrap();
    assert_eq!((info.cached_tokens, info.hit_stop), (1984, HitStop::PromptEnd));
}

#[test]
fn a_lost_window_shortens_the_hit_and_says_so() {
    // Room for the whole full group, but not for all of the sliding one.
    let mut sim = Sim::new(chunked(64), mixed(100, 64 * 130 + 320 * 40));
    sim.submit(ROOT, tokens(0..2000), 1).unwrap();
    sim.run();
    let middle = sim.submit(ROOT, tokens(0..1000), 1).unwrap();
    assert_eq!(sim.predict(ROOT, &tokens(0..1000)), 0);
    assert_eq!(sim.predict(ROOT, &tokens(0..2000)), 1984);
    sim.run();
    let info = sim.done[&middle].info.unwrap();
    assert_eq!((info.cached_tokens, info.computed_tokens), (0, 1000));
    assert_eq!(info.hit_stop.to_string(), "not_cached group=1 token=0");
}

#[test]
fn what_can_never_fit_is_refused_with_the_limit() {
    let mut scheduler = bare(SchedulerConfig { max_waiting: 1, ..chunked(64) }, full(16, 10));
    assert_eq!(scheduler.submit(request(1, vec![], 5)), Err(Rejected::EmptyPrompt));
    assert_eq!(
        scheduler.submit(request(1, tokens(0..100), 62)),
        Err(Rejected::TooLong { need: 161, limit: 160 })
    );
    let huge = Err(Rejected::TooLong { need: u64::from(u32::MAX) + 99, limit: 160 });
    assert_eq!(scheduler.submit(request(1, tokens(0..100), u32::MAX)), huge);
    assert_eq!(scheduler.submit(request(1, tokens(0..100), 61)), Ok(()));
    assert_eq!(scheduler.submit(request(2, tokens(0..100), 61)), Err(Rejected::QueueFull { waiting: 1 }));
    scheduler.plan().unwrap().unwrap();
    assert_eq!(scheduler.submit(request(1, tokens(0..100), 61)), Err(Rejected::Duplicate(SeqId(1))));

    // A sliding group is charged for its window, not for the length.
    let spec = mixed(64, 384 * 100);
    let limit = bare(chunked(64), spec.clone()).max_sequence_tokens();
    let sliding_blocks = (63 + 64u64).div_ceil(16) + 1;
    assert_eq!(u64::from(limit), (384 * 100 - sliding_blocks * 320) / 64 * 16);
    let mut sim = Sim::new(chunked(64), spec);
    sim.submit(ROOT, tokens(0..limit), 1).unwrap();
    sim.run();
}

#[test]
fn a_removed_sequence_frees_its_blocks_within_the_step() {
    let mut scheduler = bare(chunked(64), full(16, 100));
    scheduler.submit(request(1, tokens(0..64), 5)).unwrap();
    scheduler.submit(request(2, tokens(100..164), 5)).unwrap();
    scheduler.submit(request(3, tokens(200..264), 5)).unwrap();
    scheduler.remove(SeqId(3)).unwrap();
    let plan = scheduler.plan().unwrap().unwrap();
    assert_eq!(plan.sequences.iter().map(|s| s.id.0).collect::<Vec<_>>(), [1, 2]);
    assert_eq!(scheduler.stats().kv_used_bytes, 8 * 64);
    scheduler.remove(SeqId(1)).unwrap();
    assert_eq!(scheduler.remove(SeqId(1)), None);
    // The device may still be writing: tables and blocks stay until it is done.
    assert_eq!(scheduler.stats().kv_used_bytes, 8 * 64);
    assert_eq!(scheduler.tables(plan.sequences[0].slot)[0].offsets().len(), 4);
    scheduler.complete(plan.step, &[(SeqId(1), 7), (SeqId(2), 7)]).unwrap();
    assert_eq!(scheduler.stats().kv_used_bytes, 4 * 64);
    scheduler.remove(SeqId(2)).unwrap();
    assert_eq!(scheduler.stats().kv_used_bytes, 0);
    scheduler.check().unwrap();
}

#[test]
fn a_failed_step_announces_nothing_and_is_computed_again() {
    let mut sim = Sim::new(chunked(64), full(32, 100));
    sim.submit(ROOT, tokens(0..100), 3).unwrap();
    sim.submit(ROOT, tokens(0..120), 3).unwrap();
    assert!(sim.step());
    assert_eq!(sim.scheduler.stats().held_units, 4);
    let failed = sim.plan().unwrap();
    sim.abort([failed]);
    sim.check();
    assert_eq!(sim.scheduler.stats().held_units, 4);
    assert_eq!((sim.scheduler.stats().running, sim.scheduler.stats().waiting), (0, 2));
    sim.run();
    assert_eq!(sim.done.len(), 2);
}

#[test]
fn events_come_when_the_step_has_been_computed() {
    let mut scheduler = bare(chunked(64), full(16, 100));
    scheduler.submit(request(1, tokens(0..100), 5)).unwrap();
    let units = KEY.chain(ROOT, &tokens(0..100));
    let first = scheduler.plan().unwrap().unwrap();
    assert_eq!(scheduler.take_events(), []);
    finish(&mut scheduler, &first);
    let [KvEvent::Stored { parent, units: stored, .. }] = &scheduler.take_events()[..] else {
        panic!("one run of stored units")
    };
    assert_eq!((*parent, &stored[..]), (ROOT, &units[..4]));
    let second = scheduler.plan().unwrap().unwrap();
    finish(&mut scheduler, &second);
    let [KvEvent::Stored { parent, units: stored, .. }] = &scheduler.take_events()[..] else {
        panic!("one run of stored units")
    };
    assert_eq!((*parent, &stored[..]), (units[3], &units[4..]));
    scheduler.clear_prefixes();
    assert_eq!(scheduler.take_events(), [KvEvent::Cleared]);
}

#[test]
fn steps_complete_in_order_and_draw_what_they_sampled() {
    let mut scheduler = bare(chunked(16), full(16, 100));
    scheduler.submit(request(1, tokens(0..40), 5)).unwrap();
    let first = scheduler.plan().unwrap().unwrap();
    scheduler.submit(request(2, tokens(100..110), 5)).unwrap();
    let second = scheduler.plan().unwrap().unwrap();
    assert_eq!((first.sequences[0].samples, second.sequences[0].samples), (false, true));
    assert_eq!(scheduler.complete(2, &[]), Err(StepError::OutOfOrder { step: 2, oldest: Some(1) }));
    assert_eq!(scheduler.abort(2), Err(StepError::OutOfOrder { step: 2, oldest: Some(1) }));
    assert_eq!(scheduler.complete(1, &[(SeqId(1), 3)]), Err(StepError::NotSampled { step: 1, id: SeqId(1) }));
    assert_eq!(scheduler.complete(2, &[(SeqId(2), 3)]), Ok(()));
    assert_eq!(scheduler.complete(3, &[]), Err(StepError::OutOfOrder { step: 3, oldest: None }));
}

#[test]
fn sequences_that_decode_go_before_prompts() {
    let config = SchedulerConfig { max_batch_tokens: 20, ..chunked(16) };
    let mut scheduler = bare(config, full(16, 1000));
    for id in 0..4 {
        scheduler.submit(request(id, tokens(1000 * id as u32..1000 * id as u32 + 3), 100)).unwrap();
    }
    let plan = scheduler.plan().unwrap().unwrap();
    finish(&mut scheduler, &plan);
    scheduler.submit(request(9, tokens(9000..9100), 1)).unwrap();
    scheduler.submit(request(10, tokens(20_000..20_100), 1)).unwrap();
    for _ in 0..4 {
        let plan = scheduler.plan().unwrap().unwrap();
        let rows: Vec<_> = plan.sequences.iter().map(|s| (s.id.0, s.rows.len())).collect();
        assert_eq!(rows, [(0, 1), (1, 1), (2, 1), (3, 1), (9, 16)]);
        finish(&mut scheduler, &plan);
    }
    let stats = scheduler.stats();
    assert_eq!((stats.running, stats.pending_prefill_tokens), (6, 36 + 100));
}

#[test]
fn contiguous_sequences_lie_in_one_run_or_wait() {
    let config = SchedulerConfig { placement: Placement::Contiguous, ..chunked(64) };
    let mut sim = Sim::new(config, mixed(20, 384 * 20));
    for i in 0..3u32 {
        sim.submit(ROOT, tokens(1000 * i..1000 * i + 100), 45).unwrap();
    }
    let pending = sim.plan().unwrap();
    assert_eq!((sim.scheduler.stats().running, sim.scheduler.stats().waiting), (2, 1));
    for slot in 0..2 {
        for (table, stride) in sim.scheduler.tables(crate::scheduler::SeqSlot(slot)).iter().zip([1, 5]) {
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
