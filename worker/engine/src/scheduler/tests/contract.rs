//! Guarantees for callers: refusals, order, removal, failure.

use super::simulator::*;
use crate::scheduler::{Rejected, SchedulerConfig, SeqId, SequenceRequest, StepError};

#[test]
fn a_sequence_that_can_never_fit_is_refused_with_the_limit() {
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

    // A sliding group needs room for its window, not for the whole length.
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
    let [("full", owned, held)] = scheduler.cache_bytes()[..] else { panic!("one kind of cache") };
    assert!(held == 8 * 64 && (held..=100 * 64).contains(&owned), "{held} of {owned}");
    scheduler.remove(SeqId(1)).unwrap();
    assert_eq!(scheduler.remove(SeqId(1)), None);
    // The device may still be writing: tables and blocks remain until the step has completed.
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
fn steps_complete_in_order_and_draw_what_they_sampled() {
    let mut scheduler = bare(chunked(16), full(16, 100));
    scheduler.submit(request(1, tokens(0..40), 5)).unwrap();
    let first = scheduler.plan().unwrap().unwrap();
    scheduler.submit(request(2, tokens(100..110), 5)).unwrap();
    let second = scheduler.plan().unwrap().unwrap();
    assert!(!first.sequences[0].samples);
    // The next rows of a prompt need not wait for the rows before them.
    let second: Vec<_> = second.sequences.iter().map(|s| (s.id.0, s.context_before, s.samples)).collect();
    assert_eq!(second, [(1, 16, false), (2, 0, true)]);
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
fn a_reserved_queue_position_goes_before_later_arrivals() {
    let mut scheduler = bare(chunked(0), full(16, 400));
    let position = Some(scheduler.next_position());
    scheduler.submit(request(1, (0..32).collect(), 1)).unwrap();
    scheduler.submit(SequenceRequest { position, ..request(2, (100..132).collect(), 1) }).unwrap();
    let plan = scheduler.plan().unwrap().unwrap();
    let order: Vec<u64> = plan.sequences.iter().map(|sequence| sequence.id.0).collect();
    assert_eq!(order, [2, 1]);
}

/// A sequence whose grammar mask is not ready skips steps while others continue.
#[test]
fn a_token_may_be_drawn_after_its_step() {
    let mut scheduler = bare(chunked(0), full(16, 400));
    for id in [1, 2] {
        scheduler.submit(request(id, tokens(100 * id as u32..100 * id as u32 + 20), 9)).unwrap();
    }
    let ids = |plan: &crate::scheduler::StepPlan| plan.sequences.iter().map(|s| s.id.0).collect::<Vec<_>>();
    let plan = scheduler.plan().unwrap().unwrap();
    assert_eq!(ids(&plan), [1, 2]);
    assert!(!scheduler.draw_late(SeqId(1), 7), "its row is being computed");
    scheduler.complete(plan.step, &[(SeqId(2), 3)]).unwrap();
    for _ in 0..3 {
        let plan = scheduler.plan().unwrap().unwrap();
        assert_eq!(ids(&plan), [2]);
        scheduler.complete(plan.step, &[(SeqId(2), 3)]).unwrap();
    }
    assert!(scheduler.draw_late(SeqId(1), 7));
    let plan = scheduler.plan().unwrap().unwrap();
    assert_eq!((ids(&plan), plan.tokens[0]), (vec![1, 2], 7));
    assert_eq!(plan.positions[0], 20);
    assert!(!scheduler.draw_late(SeqId(9), 7), "it has gone");
    finish(&mut scheduler, &plan);
    scheduler.check().unwrap();
}
