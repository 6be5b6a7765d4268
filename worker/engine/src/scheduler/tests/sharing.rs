//! Prefixes are shared, followed and announced.

use super::simulator::*;
use crate::kv_cache::{HitStop, NULL_OFFSET};
use crate::scheduler::{SchedulerConfig, SeqId, SeqSlot, SequenceRequest};
use proto::event::KvEvent;

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
fn a_follower_takes_over_when_its_producer_is_removed() {
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
        // Exactly one of the others continues in its place.
        assert_eq!(sim.scheduler.stats().following, 2);
        assert_eq!(sim.scheduler.stats().counters.prefill_tokens_computed, 400);
        sim.run();
        let computed: u32 = sim.done.values().map(|client| client.info.unwrap().computed_tokens).sum();
        let once = 1010 - 288 + 2 * (1010 - 992);
        assert_eq!(computed, once, "{block_tokens} tokens per block");
    }
}

#[test]
fn followers_of_a_stalled_producer_do_not_wait() {
    // The producer goes last, and the rows of a step are used up before its turn.
    let config = SchedulerConfig { max_stalled_steps: 3, max_batch_tokens: 24, ..chunked(16) };
    let mut scheduler = bare(config, full(16, 100));
    scheduler.submit(request(1, tokens(0..200), 1)).unwrap();
    let plan = scheduler.plan().unwrap().unwrap();
    finish(&mut scheduler, &plan);
    for (id, priority, prompt) in [(2, 2, 5000..5400), (3, 1, 0..201), (4, 1, 9000..9400)] {
        scheduler.submit(SequenceRequest { priority, ..request(id, tokens(prompt), 1) }).unwrap();
    }
    // A newly admitted sequence goes last once.
    let plan = scheduler.plan().unwrap().unwrap();
    finish(&mut scheduler, &plan);
    let mut waited = 0;
    loop {
        let plan = scheduler.plan().unwrap().unwrap();
        let ids: Vec<_> = plan.sequences.iter().map(|s| s.id.0).collect();
        if ids.contains(&3) {
            break;
        }
        assert_eq!(ids, [2, 4]);
        finish(&mut scheduler, &plan);
        waited += 1;
        assert!(waited < 10, "the follower waits for ever");
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
        // Window and chunk, rounded up to blocks, and one block for unaligned ends.
        assert!(used <= full + 320 * (163u64.div_ceil(16) + 1), "{used} bytes used");
        sim.step()
    };
    while step(&mut sim) {}
    assert_eq!(sim.done.len(), 1);

    let again = sim.submit(ROOT, tokens(0..2000), 1).unwrap();
    let pending = sim.plan().unwrap();
    let slot =
        sim.scheduler.sequences.iter().position(|s| s.as_ref().is_some_and(|s| s.id == again)).unwrap();
    let tables = sim.scheduler.tables(SeqSlot(slot as u32));
    assert!(!tables[0].offsets().contains(&NULL_OFFSET));
    let nulls = tables[1].offsets().iter().take_while(|&&offset| offset == NULL_OFFSET).count();
    assert_eq!((nulls, tables[1].offsets().len()), ((1984 - 99) / 16, 125));
    sim.complete(pending);
    let info = sim.done[&again].info.unwrap();
    assert_eq!((info.cached_tokens, info.hit_stop), (1984, HitStop::PromptEnd));
}

#[test]
fn a_lost_window_shortens_the_hit_and_is_reported() {
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
fn events_are_emitted_after_the_step_has_been_computed() {
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
