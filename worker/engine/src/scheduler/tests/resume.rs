//! Recurrent layers: where states are kept, found, waited for and evicted.

use super::simulator::*;
use crate::kv_cache::{CheckpointPolicy, GroupKind, GroupSpec, HitStop, PinRefused};
use crate::scheduler::{ForkRefused, Rejected, SchedulerConfig, SeqId};
use proto::event::KvEvent;

fn ample() -> crate::kv_cache::CacheSpec {
    hybrid(16, 400, 8000)
}

fn served(sim: &Sim, id: SeqId) -> (u32, u32) {
    let info = sim.done[&id].info.unwrap();
    (info.cached_tokens, info.computed_tokens)
}

fn prompt(shared: u32, request: u32, own: u32) -> Vec<u32> {
    (0..shared).chain(100_000 + 1000 * request..100_000 + 1000 * request + own).collect()
}

#[test]
fn the_second_sighting_of_a_prefix_hits() {
    for block_tokens in [16, 32, 64] {
        for chunk in [1, 3, 16, 63, 66, 0] {
            let mut sim = Sim::new(chunked(chunk), hybrid(block_tokens, 400, 2000));
            for request in 0..3 {
                let id = sim.submit(ROOT, prompt(100, request, 37), 20).unwrap();
                assert_eq!(sim.predict(ROOT, &prompt(100, request, 37)), if request == 0 { 0 } else { 96 });
                sim.run();
                let expected = if request == 0 { (0, 137) } else { (96, 41) };
                assert_eq!(served(&sim, id), expected, "{block_tokens} {chunk} {request}");
            }
            sim.check();
        }
    }
}

#[test]
fn a_burst_computes_its_shared_prefix_once_up_to_the_unit() {
    for (spec, chunk) in [
        (ample(), 512),
        (ample(), 500),
        (ample(), 0),
        (hybrid(32, 400, 4000), 100),
        (hybrid(64, 400, 2000), 512),
    ] {
        let mut sim = Sim::new(SchedulerConfig { chunk, ..SchedulerConfig::default() }, spec);
        let burst = |sim: &mut Sim, first: u32| {
            let ids: Vec<SeqId> =
                (first..first + 32).map(|r| sim.submit(ROOT, prompt(1500, r, 30), 16).unwrap()).collect();
            sim.run();
            ids.iter().map(|&id| served(sim, id)).collect::<Vec<_>>()
        };
        let cold = burst(&mut sim, 0);
        let computed: u32 = cold.iter().map(|&(_, computed)| computed).sum();
        assert_eq!(computed, 1530 + 31 * 42, "chunk {chunk}");
        assert_eq!(cold.iter().filter(|&&(cached, _)| cached == 1488).count(), 31);
        let warm = burst(&mut sim, 32);
        assert!(warm.iter().all(|&served| served == (1488, 42)), "{warm:?}");
    }
}

#[test]
fn samples_of_one_prompt_compute_it_once() {
    for (len, chunk) in [(33, 512), (129, 512), (1000, 64), (1000, 0)] {
        let mut sim = Sim::new(chunked(chunk), ample());
        let ids: Vec<SeqId> = (0..8).map(|_| sim.submit(ROOT, tokens(0..len), 20).unwrap()).collect();
        sim.run();
        let computed: Vec<u32> = ids.iter().map(|&id| served(&sim, id).1).collect();
        assert_eq!(computed[0], len);
        assert!(computed[1..].iter().all(|&rest| rest == (len - 1) % 16 + 1), "{computed:?}");
    }
}

#[test]
fn the_distance_to_a_shared_state_counts_as_recomputed_work() {
    let mut scheduler = bare(chunked(512), hybrid(16, 6, 60));
    let long = |request| prompt(160, 0, 0).into_iter().chain(prompt(0, request, 2)).collect::<Vec<u32>>();
    scheduler.submit(request(1, tokens(0..160), 400)).unwrap();
    let plan = scheduler.plan().unwrap().unwrap();
    finish(&mut scheduler, &plan);
    // Without the pin, an unreferenced prefix would be evicted when sequences are preempted.
    scheduler.pin(ROOT, &tokens(0..160)).unwrap();
    scheduler.submit(request(2, long(7), 400)).unwrap();
    scheduler.submit(request(3, tokens(5000..5120), 400)).unwrap();
    let preemptions =
        |scheduler: &crate::scheduler::Scheduler, id| scheduler.info(SeqId(id)).unwrap().preemptions;
    while (1..=3).all(|id| preemptions(&scheduler, id) == 0) {
        let plan = scheduler.plan().unwrap().unwrap();
        finish(&mut scheduler, &plan);
    }
    // The second is longer than the third, but resumes from the pinned state.
    assert_eq!([1, 2, 3].map(|id| preemptions(&scheduler, id)), [0, 1, 0]);
}

#[test]
fn followers_that_diverge_at_different_positions_each_find_a_state_there() {
    let mut sim = Sim::new(chunked(100), ample());
    let shared = [700, 333, 500, 90, 650];
    let ids: Vec<SeqId> =
        (0..5).map(|r| sim.submit(ROOT, prompt(shared[r as usize], r, 40), 4).unwrap()).collect();
    sim.run();
    let cached: Vec<u32> = ids.iter().map(|&id| served(&sim, id).0).collect();
    assert_eq!(cached, [0, 320, 496, 80, 640]);
}

#[test]
fn followers_of_a_removed_producer_do_not_wait() {
    let mut sim = Sim::new(chunked(100), ample());
    let ids: Vec<SeqId> = (0..4).map(|r| sim.submit(ROOT, prompt(1000, r, 10), 4).unwrap()).collect();
    for _ in 0..3 {
        assert!(sim.step());
    }
    assert_eq!(sim.scheduler.stats().following, 3);
    sim.remove(ids[0]);
    assert!(sim.step());
    // Exactly one of the others continues from the last state that was kept, and the rest follow it.
    assert_eq!(sim.scheduler.stats().following, 2);
    sim.run();
    let computed: u32 = sim.done.values().map(|client| client.info.unwrap().computed_tokens).sum();
    let (resumed, junction) = (256, 992);
    assert_eq!(computed, 1010 - resumed + 2 * (1010 - junction));
}

#[test]
fn a_third_prompt_finds_a_state_where_two_diverged() {
    // The policy keeps the prompt's end and two more, so that there is hardly a state at spaced positions.
    let config = SchedulerConfig { checkpoints: CheckpointPolicy { max_per_path: 3 }, ..chunked(64) };
    let mut sim = Sim::new(config, ample());
    let mut cached = Vec::new();
    for request in 0..3 {
        let id = sim.submit(ROOT, prompt(1100, request, 300), 1).unwrap();
        sim.run();
        cached.push(served(&sim, id).0);
        if request == 1 {
            assert_eq!(sim.done[&id].info.unwrap().hit_stop, HitStop::StateGone { token: 1088 });
        }
    }
    assert!(cached[1] < 1088);
    assert_eq!(cached[2], 1088);
}

#[test]
fn named_turns_are_kept_and_found() {
    let config = SchedulerConfig { checkpoints: CheckpointPolicy { max_per_path: 3 }, ..chunked(512) };
    let mut sim = Sim::new(config, ample());
    sim.boundaries = vec![333, 700];
    sim.submit(ROOT, prompt(800, 0, 100), 4).unwrap();
    sim.run();
    for (shared, expected) in [(340, 320), (710, 688), (800, 688)] {
        assert_eq!(sim.predict(ROOT, &prompt(shared, 9, 50)), expected);
    }
}

#[test]
fn a_finished_sequence_keeps_its_last_boundary_and_no_more() {
    let mut sim = Sim::new(chunked(64), ample());
    let id = sim.submit(ROOT, tokens(0..40), 100).unwrap();
    let mut max_held = 0;
    while sim.step() {
        max_held = max_held.max(sim.scheduler.stats().held_units);
    }
    let client = sim.done[&id].clone();
    let whole = [client.prompt, client.output].concat();
    // The next turn continues after everything that was computed: 139 tokens, 8 whole units.
    assert_eq!(sim.predict(ROOT, &[&whole[..], &[7; 20]].concat()), 128);
    // 16 and 32 in the prompt, 48, 64, 96 and 128 by spacing, and the tail checkpoint.
    assert!(max_held <= 7, "{max_held} resume points");
    let again = sim.submit(ROOT, [&whole[..], &[7; 20]].concat(), 5).unwrap();
    sim.run();
    assert_eq!(served(&sim, again), (128, 160 - 128));
}

#[test]
fn a_path_keeps_no_more_states_than_the_cap() {
    for cap in [1, 3, 8] {
        let config = SchedulerConfig { checkpoints: CheckpointPolicy { max_per_path: cap }, ..chunked(100) };
        let mut sim = Sim::new(config, ample());
        let mut last = tokens(0..500);
        for turn in 0..6u32 {
            sim.boundaries = vec![last.len() as u32 - 20];
            let id = sim.submit(ROOT, last.clone(), 60).unwrap();
            sim.run();
            let client = &sim.done[&id];
            last = [&client.prompt[..], &client.output[..], &tokens(1000 * turn + 1000..1000 * turn + 1100)]
                .concat();
            assert!(sim.scheduler.stats().held_units <= cap, "turn {turn}, cap {cap}");
        }
        assert!(sim.predict(ROOT, &last) as usize >= last.len() - 200);
    }
}

#[test]
fn returning_users_find_their_last_turn_still_cached() {
    // Slots for two checkpoints of each user and for the batch. Each turn leaves more than that behind.
    let mut sim = Sim::new(SchedulerConfig { max_seqs: 4, ..chunked(512) }, hybrid(16, 19, 350));
    let mut chats: Vec<Vec<u32>> = vec![tokens(0..300); 8];
    for turn in 0..5u32 {
        for (user, chat) in (0u32..).zip(&mut chats) {
            let expected_cached = (chat.len() - 1) as u32 / 16 * 16;
            chat.extend(10_000 * (user + 1) + 100 * turn..10_000 * (user + 1) + 100 * turn + 50);
            let id = sim.submit(ROOT, chat.clone(), 80).unwrap();
            sim.run();
            if turn > 0 {
                assert_eq!(served(&sim, id).0, expected_cached, "user {user}, turn {turn}");
            }
            chat.extend(&sim.done[&id].output);
        }
    }
    assert!(sim.scheduler.stats().counters.evictions > 40, "{:?}", sim.scheduler.stats().counters);
}

#[test]
fn decode_writes_its_slot_in_place_or_leaves_it_as_a_checkpoint() {
    let mut scheduler = bare(chunked(64), ample());
    scheduler.submit(request(1, tokens(0..30), 40)).unwrap();
    let mut slots = Vec::new();
    for _ in 0..20 {
        let plan = scheduler.plan().unwrap().unwrap();
        let state = plan.sequences[0].state.clone().unwrap();
        slots.push((plan.sequences[0].context_before, state.read, state.write, state.exports));
        finish(&mut scheduler, &plan);
    }
    // The prompt's 30 rows: the state after row 15 is exported.
    let (context, read, write, exports) = &slots[0];
    assert_eq!((*context, *read, exports.len(), exports[0].0), (0, None, 1, 15));
    assert_ne!(exports[0].1, *write);
    let mut before = *write;
    for (context, read, write, exports) in &slots[1..] {
        assert_eq!((*read, exports.len()), (Some(before), 0));
        assert_eq!(read == &Some(*write), *context != 32 && *context != 48, "at {context}");
        before = *write;
    }
}

#[test]
fn one_slot_is_enough_and_a_lack_of_slots_only_makes_sequences_wait() {
    // A slot is as large as ten blocks: KV and slots compete for the same bytes.
    for slots in [1, 2, 3] {
        let mut sim = Sim::new(SchedulerConfig { max_seqs: 8, ..chunked(64) }, hybrid(16, slots, 10));
        let limit = sim.scheduler.max_sequence_tokens();
        assert_eq!(limit, slots as u32 * 160);
        for request in 0..12u32 {
            let len = 40 + request % 3 * 16;
            sim.submit(ROOT, prompt(32, request % 4, len), (limit - len - 32).min(60)).unwrap();
        }
        while sim.step() {
            sim.check();
        }
        assert_eq!(sim.done.len(), 12);
        sim.scheduler.clear_prefixes();
        assert!(sim.scheduler.is_pristine());
    }
}

#[test]
fn the_pool_is_pristine_after_a_burst() {
    let spec = || hybrid(16, 24, 600);
    let config = || SchedulerConfig { max_seqs: 16, ..chunked(64) };
    let workload = |sim: &mut Sim| {
        let (before, looked) = (sim.scheduler.stats().counters, sim.scheduler.allocation_work());
        for request in 0..40 {
            sim.submit(ROOT, prompt(100, request % 7, 50), 40).unwrap();
        }
        sim.run();
        let after = sim.scheduler.stats().counters;
        let steps = after.steps - before.steps;
        (steps, after.preemptions - before.preemptions, sim.scheduler.allocation_work() - looked)
    };
    let mut first = Sim::new(config(), spec());
    let expected = workload(&mut first);
    let mut sim = Sim::new(config(), spec());
    for request in 0..200 {
        sim.submit(ROOT, prompt(300, request, 1 + request % 90), 30).unwrap();
    }
    sim.run();
    sim.scheduler.clear_prefixes();
    sim.check();
    assert!(sim.scheduler.is_pristine(), "the burst left something behind");
    assert_eq!(workload(&mut sim), expected);

    // Without clearing, in a pool full of other prefixes, allocation examines hardly more blocks.
    let mut worn = Sim::new(config(), spec());
    let mut work = Vec::new();
    for round in 0..30 {
        let looked = worn.scheduler.allocation_work();
        for request in 0..40 {
            worn.submit(ROOT, prompt(10, 50 * round + request, 140), 40).unwrap();
        }
        worn.run();
        work.push(worn.scheduler.allocation_work() - looked);
    }
    let (early, late): (u64, u64) = (work[5..10].iter().sum(), work[25..].iter().sum());
    assert!(late <= early + early / 5, "allocation becomes slower: {work:?}");
}

#[test]
fn resume_points_are_announced_when_their_step_has_been_computed() {
    let mut scheduler = bare(chunked(64), ample());
    scheduler.submit(request(1, tokens(0..60), 1)).unwrap();
    let units = KEY.chain(ROOT, &tokens(0..60));
    let plan = scheduler.plan().unwrap().unwrap();
    assert_eq!(scheduler.take_events(), []);
    finish(&mut scheduler, &plan);
    let points: Vec<_> = scheduler
        .take_events()
        .into_iter()
        .map(|event| match event {
            KvEvent::ResumePoint { unit, position, .. } => (unit, position),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(points, [(units[0], 16), (units[1], 32), (units[2], 48)]);
    scheduler.clear_prefixes();
    assert_eq!(scheduler.take_events(), [KvEvent::Cleared]);
}

#[test]
fn a_failed_step_keeps_no_state() {
    let mut sim = Sim::new(chunked(64), ample());
    sim.submit(ROOT, tokens(0..200), 3).unwrap();
    sim.submit(ROOT, prompt(150, 1, 50), 3).unwrap();
    assert!(sim.step());
    let held = sim.scheduler.stats().held_units;
    let failed = sim.plan().unwrap();
    sim.abort([failed]);
    sim.check();
    assert_eq!(sim.scheduler.stats().held_units, held);
    sim.run();
    assert_eq!(sim.done.len(), 2);
}

#[test]
fn a_fork_computes_nothing_and_shares_all_but_the_last_block() {
    let specs = [ample(), full(16, 400), full(64, 100), mixed(40, 384 * 400), hybrid(64, 30, 300)];
    for spec in specs {
        for (prompt_len, steps) in [(5, 1), (33, 1), (64, 1), (100, 20), (128, 1), (90, 7)] {
            let case = format!("{spec:?}: {prompt_len} {steps}");
            let mut sim = Sim::new(chunked(512), spec.clone());
            let parent = sim.submit(ROOT, tokens(0..prompt_len), 50).unwrap();
            for _ in 0..steps {
                assert!(sim.step());
            }
            let before = sim.scheduler.stats().kv_used_bytes;
            let computed = sim.scheduler.stats().counters.prefill_tokens_computed;
            let forks: Vec<SeqId> = (0..3).map(|token| sim.fork(parent, token, 10).unwrap()).collect();
            let last: u64 = spec
                .groups
                .iter()
                .filter(|group| group.kind != GroupKind::State)
                .map(|group| group.block_bytes)
                .sum();
            let partial = !(prompt_len + steps - 1).is_multiple_of(spec.block_tokens);
            let own = if partial { 3 * last } else { 0 };
            assert_eq!(sim.scheduler.stats().kv_used_bytes, before + own, "{case}");
            sim.check();
            // One fork is removed before it has computed anything.
            sim.remove(forks[1]);
            sim.run();
            for fork in [forks[0], forks[2]] {
                assert_eq!(served(&sim, fork), (prompt_len + steps - 1, 0), "{case}");
                assert_eq!(sim.done[&fork].info.unwrap().hit_stop, HitStop::Forked, "{case}");
            }
            assert_eq!(sim.scheduler.stats().counters.prefill_tokens_computed, computed, "{case}");
            assert_eq!(sim.scheduler.stats().kv_used_bytes, 0, "{case}");
            sim.check();
        }
    }
}

#[test]
fn only_a_sequence_that_ends_with_a_drawn_token_is_forked() {
    let mut sim = Sim::new(SchedulerConfig { max_seqs: 2, ..chunked(16) }, full(16, 400));
    let parent = sim.submit(ROOT, tokens(0..40), 50).unwrap();
    let id = SeqId(99);
    let not_here = Err(ForkRefused::NotHere(parent));
    assert_eq!(sim.scheduler.fork(parent, id, 1, 5), not_here);
    for _ in 0..2 {
        assert!(sim.step());
        assert_eq!(sim.scheduler.fork(parent, id, 1, 5), not_here);
    }
    assert!(sim.step());
    let pending = sim.plan().unwrap();
    assert_eq!(sim.scheduler.fork(parent, id, 1, 5), not_here);
    sim.complete(pending);
    assert_eq!(sim.scheduler.fork(parent, parent, 1, 5), Err(Rejected::Duplicate(parent).into()));
    assert!(matches!(sim.scheduler.fork(parent, id, 1, 9999), Err(ForkRefused::Rejected(_))));
    sim.fork(parent, 1, 5).unwrap();
    assert_eq!(sim.scheduler.fork(parent, id, 1, 5), Err(ForkRefused::NoRoom));
    sim.run();
}

#[test]
fn a_pinned_prefix_outlives_any_load_and_its_budget() {
    let spec = hybrid(16, 30, 300);
    let config = SchedulerConfig { pin_bytes: Some(640 + 7 * 64), ..chunked(64) };
    let mut sim = Sim::new(config, spec);
    sim.boundaries = vec![100];
    sim.submit(ROOT, tokens(0..101), 0).unwrap();
    sim.submit(ROOT, tokens(500..601), 0).unwrap();
    sim.run();
    sim.boundaries = Vec::new();
    assert_eq!(sim.scheduler.pin(ROOT, &tokens(900..1000)), Err(PinRefused::NotCached));
    let (pin, covered) = sim.scheduler.pin(ROOT, &tokens(0..100)).unwrap();
    assert_eq!((covered, sim.scheduler.stats().pinned_bytes), (96, 640 + 6 * 64));
    // Blocks that are already pinned are not counted again. Another prefix exceeds the budget.
    let (again, _) = sim.scheduler.pin(ROOT, &tokens(0..99)).unwrap();
    assert_eq!(
        sim.scheduler.pin(ROOT, &tokens(500..600)),
        Err(PinRefused::OverBudget { wanted: 2 * (640 + 6 * 64), budget: 640 + 7 * 64 })
    );
    let overload = |sim: &mut Sim, first: u32| {
        for request in first..first + 60 {
            sim.submit(ROOT, prompt(0, request, 300), 20).unwrap();
        }
        sim.run();
        sim.check();
    };
    overload(&mut sim, 1);
    assert_eq!(sim.predict(ROOT, &tokens(0..150)), 96);
    assert_eq!(sim.predict(ROOT, &tokens(500..650)), 0);
    assert!(sim.scheduler.unpin(again) && !sim.scheduler.unpin(again));
    overload(&mut sim, 100);
    assert_eq!(sim.predict(ROOT, &tokens(0..150)), 96);
    assert!(sim.scheduler.unpin(pin));
    assert_eq!(sim.scheduler.stats().pinned_bytes, 0);
    overload(&mut sim, 200);
    assert_eq!(sim.predict(ROOT, &tokens(0..150)), 0);
}

#[test]
fn a_cut_forgets_the_unused_units_after_it() {
    for block_tokens in [16, 32, 64] {
        let sliding = GroupSpec { kind: GroupKind::Sliding { window: 100 }, block_bytes: 320 };
        let mut spec = hybrid(block_tokens, 60, 4000);
        spec.groups.insert(1, sliding);
        let mut sim = Sim::new(chunked(64), spec);
        let finish = |sim: &mut Sim, prompt: Vec<u32>| {
            let id = sim.submit(ROOT, prompt, 20).unwrap();
            sim.run();
            let client = sim.done[&id].clone();
            [client.prompt, client.output].concat()
        };
        let long = finish(&mut sim, tokens(0..400));
        let branch = finish(&mut sim, prompt(200, 1, 80));
        let (_, pinned) = sim.scheduler.pin(ROOT, &tokens(0..300)).unwrap();
        sim.scheduler.cut(ROOT, &long, 250);
        sim.check();
        // The pin keeps its prefix, the branch belongs to another path, and everything after both is gone.
        assert_eq!(sim.predict(ROOT, &[&long[..], &[7; 20]].concat()), pinned, "{block_tokens}");
        assert_eq!(sim.predict(ROOT, &[&branch[..], &[7; 20]].concat()), 288, "{block_tokens}");
        sim.scheduler.cut(ROOT, &branch, 0);
        sim.check();
        assert!(sim.predict(ROOT, &[&branch[..], &[7; 20]].concat()) <= 192, "{block_tokens}");
        assert_eq!(sim.predict(ROOT, &[&long[..], &[7; 20]].concat()), pinned, "{block_tokens}");
        // An unknown prefix or root changes nothing.
        sim.scheduler.cut(ROOT, &tokens(9000..9100), 0);
        sim.scheduler.cut(proto::block::BlockId([99; 16]), &long, 0);
        sim.check();
        assert_eq!(finish(&mut sim, tokens(0..400)), long, "{block_tokens}");
    }
    let mut sim = Sim::new(chunked(64), ample());
    let id = sim.submit(ROOT, tokens(0..400), 20).unwrap();
    sim.run();
    let client = sim.done[&id].clone();
    sim.scheduler.cut(ROOT, &[client.prompt, client.output].concat(), 0);
    assert!(sim.scheduler.is_pristine());
}

#[test]
fn a_pin_yields_only_to_a_sequence_that_could_not_run() {
    let config = SchedulerConfig { pin_bytes: Some(u64::MAX), ..chunked(64) };
    let mut sim = Sim::new(config, hybrid(16, 4, 60));
    sim.submit(ROOT, tokens(0..400), 0).unwrap();
    sim.run();
    sim.scheduler.pin(ROOT, &tokens(0..400)).unwrap();
    let limit = sim.scheduler.max_sequence_tokens();
    sim.submit(ROOT, tokens(5000..5000 + limit), 1).unwrap();
    sim.run();
    assert_eq!(sim.scheduler.stats().counters.pins_lost, 1);
    assert_eq!(sim.scheduler.stats().pinned_bytes, 0);
}

#[test]
fn the_path_of_a_spoiled_sequence_is_neither_served_nor_announced() {
    for (spec, chunk) in
        [(full(16, 400), 64), (mixed(48, 384 * 400), 64), (ample(), 64), (hybrid(64, 400, 2000), 50)]
    {
        let mut sim = Sim::new(chunked(chunk), spec);
        // A prefix of an earlier request, a pinned prefix, and another path that branches off from it.
        sim.submit(ROOT, prompt(200, 1, 80), 4).unwrap();
        sim.submit(ROOT, prompt(200, 2, 80), 4).unwrap();
        sim.run();
        let (pin, _) = sim.scheduler.pin(ROOT, &prompt(200, 1, 80)).unwrap();
        let other = tokens(5000..5100);
        sim.submit(ROOT, other.clone(), 4).unwrap();
        sim.run();
        let spoiled = sim.submit(ROOT, prompt(200, 3, 200), 4).unwrap();
        // The first chunk is complete and announced. The second is in flight when a row of it turns out to be
        // NaN or infinite.
        assert!(sim.step());
        let second = sim.plan().unwrap();
        assert!(sim.predict(ROOT, &prompt(200, 3, 200)) > 0);
        sim.remove_spoiled(spoiled);
        sim.complete(second);
        sim.check();
        assert_eq!(sim.scheduler.resume_point(ROOT, &prompt(200, 3, 200)), None);
        assert!(!sim.scheduler.is_pinned(pin));
        assert_eq!((sim.scheduler.stats().counters.pins_lost, sim.scheduler.stats().pinned_bytes), (1, 0));
        assert!(sim.predict(ROOT, &[&other[..], &[7; 20]].concat()) > 0, "another path stays");
        let again = sim.submit(ROOT, prompt(200, 3, 200), 4).unwrap();
        sim.run();
        assert_eq!(served(&sim, again), (0, 400));
        sim.check();
        sim.scheduler.clear_prefixes();
        assert!(sim.scheduler.is_pristine());
    }
}

#[test]
fn a_saved_resume_point_can_be_restored_into_an_empty_cache() {
    let sliding = GroupSpec { kind: GroupKind::Sliding { window: 100 }, block_bytes: 320 };
    for block_tokens in [16, 32, 64] {
        let mut spec = hybrid(block_tokens, 40, 2000);
        spec.groups.insert(1, sliding);
        let mut sim = Sim::new(chunked(64), spec.clone());
        let id = sim.submit(ROOT, tokens(0..300), 50).unwrap();
        sim.run();
        let client = sim.done[&id].clone();
        let whole = [client.prompt, client.output].concat();
        let point = sim.scheduler.resume_point(ROOT, &whole).unwrap();
        assert_eq!(point.tokens, 336);
        // The full group has all tokens, the sliding one the whole blocks of its window, the state group one
        // slot.
        let of = |group| point.blocks.iter().filter(move |block| block.group == group);
        assert_eq!(of(0).map(|block| block.tokens.len()).sum::<usize>(), 336);
        let window: usize = of(1).map(|block| block.tokens.len()).sum();
        assert!((99..99 + 16 + block_tokens as usize).contains(&window), "{window}");
        assert!(of(2).map(|block| block.tokens.clone()).eq(std::iter::once(336..336)));
        // A shorter query finds a shorter resume point.
        assert_eq!(sim.scheduler.resume_point(ROOT, &whole[..335]).unwrap().tokens, 288);
        assert!(sim.scheduler.resume_point(ROOT, &whole[..10]).is_none());

        let saved = sim.save(ROOT, &whole).unwrap();
        let mut other = Sim::new(chunked(64), spec);
        assert!(other.restore(&saved));
        other.check();
        let next = [&whole[..], &[3; 30]].concat();
        assert_eq!(other.predict(ROOT, &next), 336);
        let again = other.submit(ROOT, next, 20).unwrap();
        other.run();
        assert_eq!(served(&other, again), (336, 380 - 336));
        // A failed restore leaves nothing behind.
        let (id, _) = other.scheduler.begin_restore(64).unwrap();
        assert!(!other.scheduler.end_restore(id, None) && !other.scheduler.end_restore(id, None));
        assert!(other.scheduler.begin_restore(17).is_none());
        other.scheduler.clear_prefixes();
        assert!(other.scheduler.is_pristine());
    }
}
