mod churn;
mod peer;

use super::*;
use proptest::prelude::*;
use proto::event::KvSnapshot;
use std::time::Duration;

fn slot(index: usize) -> Slot {
    Slot::new(index).unwrap()
}

fn unit(n: u64) -> BlockId {
    let mut id = [0; 16];
    id[..8].copy_from_slice(&n.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    id[8..].copy_from_slice(&n.to_le_bytes());
    BlockId(id)
}

fn chain(numbers: impl IntoIterator<Item = u64>) -> Arc<[BlockId]> {
    numbers.into_iter().map(unit).collect()
}

/// Unit n follows unit n - 1 and is the n-th of its path; 0 is the root.
fn stored(numbers: impl IntoIterator<Item = u64>) -> KvEvent {
    let numbers: Vec<u64> = numbers.into_iter().collect();
    let parent = unit(numbers[0] - 1);
    KvEvent::Stored { parent, units: chain(numbers).to_vec(), medium: Medium::Device }
}

fn removed(numbers: impl IntoIterator<Item = u64>) -> KvEvent {
    KvEvent::Removed { units: chain(numbers).to_vec(), medium: Medium::Device }
}

fn batch(epoch: u64, first_sequence: u64, events: Vec<KvEvent>) -> KvEventBatch {
    KvEventBatch { epoch: Epoch(epoch), first_sequence, events }
}

fn joined(workers: usize) -> PrefixIndex {
    let mut index = PrefixIndex::new(1 << 20);
    (0..workers).for_each(|w| join(&mut index, w, 1));
    index
}

fn install(
    index: &mut PrefixIndex,
    slot: Slot,
    snapshot: KvSnapshot,
) -> Result<Option<GapRepair>, StreamError> {
    snapshot.into_parts().map(|frame| index.install(slot, frame)).last().unwrap()
}

/// Joins a worker without any events.
fn join(index: &mut PrefixIndex, worker: usize, epoch: u64) {
    assert_eq!(index.join(slot(worker), Epoch(epoch)), GapRepair::Replay { from: 1 });
    assert_eq!(index.replayed(slot(worker), Epoch(epoch), Some(batch(epoch, 1, vec![]))), Ok(None));
}

#[test]
fn events_that_come_before_the_first_replay_wait_for_it() {
    let mut index = PrefixIndex::new(1 << 20);
    let s = slot(0);
    index.join(s, Epoch(1));
    assert_eq!(index.apply(s, batch(1, 3, vec![removed([1])])), Ok(None));
    let replay = batch(1, 1, vec![stored([1]), stored([2]), removed([1])]);
    assert_eq!(index.replayed(s, Epoch(1), Some(replay)), Ok(None));
    assert_eq!(index.lookup(&chain([1, 2])).units(s), 2);
    assert_eq!(index.lookup(&chain([1])).units(s), 0);
    assert_eq!(index.stream(s).unwrap().applied, 3);
}

#[test]
fn the_deepest_unit_held_decides() {
    let mut index = joined(2);
    // A sliding window has dropped units 1 and 2, and 4 was evicted.
    index.apply(slot(0), batch(1, 1, vec![stored(1..=4), removed([1, 2, 4])])).unwrap();
    index.apply(slot(1), batch(1, 1, vec![stored(1..=3)])).unwrap();
    let overlap = index.lookup(&chain(1..=4));
    assert_eq!((overlap.units(slot(0)), overlap.units(slot(1)), overlap.units(slot(2))), (3, 3, 0));
    assert_eq!((0..2).map(|w| index.lookup(&[]).units(slot(w))).sum::<u32>(), 0);
}

#[test]
fn a_resume_point_counts_until_it_is_removed() {
    let point = |n, medium| KvEvent::ResumePoint { unit: unit(n), position: 16 * n as u32, medium };
    let mut index = joined(1);
    let s = slot(0);
    index.apply(s, batch(1, 1, vec![point(2, Medium::Device), point(5, Medium::Disk)])).unwrap();
    let reservation = index.reserve(s, chain(1..=5));
    assert_eq!([1, 3, 5].map(|units| index.lookup(&chain(1..=units)).units(s)), [1, 3, 5]);
    // The worker is past unit 3 and keeps no state there or before 2. Only later units are still expected.
    index.apply(s, batch(1, 3, vec![point(4, Medium::Device)])).unwrap();
    assert_eq!([1, 3, 4, 5].map(|units| index.lookup(&chain(1..=units)).units(s)), [0, 2, 4, 5]);
    index.release(reservation);
    assert_eq!(index.lookup(&chain(1..=5)).units(s), 4);
    assert_eq!(index.lookup(&chain(1..=3)).units(s), 2);
    assert_eq!(index.lookup(&chain(1..=1)).units(s), 0);
    index.apply(s, batch(1, 4, vec![removed([4])])).unwrap();
    assert_eq!(index.lookup(&chain(1..=5)).units(s), 2);
}

#[test]
fn a_gap_requests_a_replay_and_events_are_applied_in_order() {
    let mut index = joined(1);
    let s = slot(0);
    assert_eq!(index.apply(s, batch(1, 1, vec![stored([1])])), Ok(None));
    assert_eq!(index.apply(s, batch(1, 3, vec![removed([1])])), Ok(Some(GapRepair::Replay { from: 2 })));
    // During the replay all batches wait, and nothing is requested twice.
    assert_eq!(index.apply(s, batch(1, 4, vec![stored([3])])), Ok(None));
    assert_eq!(index.lookup(&chain([1])).units(s), 1);
    assert!(index.stream(s).unwrap().behind);
    let missing = batch(1, 2, vec![stored([2]), removed([1])]);
    assert_eq!(index.replayed(s, Epoch(1), Some(missing)), Ok(None));
    assert_eq!(index.lookup(&chain([1])).units(s), 0);
    assert_eq!(index.lookup(&chain(1..=3)).units(s), 3);
    let view = index.stream(s).unwrap();
    assert_eq!((view.applied, view.gaps, view.behind), (4, 1, false));
}

#[test]
fn a_replay_may_come_in_parts() {
    let mut index = joined(1);
    let s = slot(0);
    assert_eq!(index.apply(s, batch(1, 6, vec![stored([6])])), Ok(Some(GapRepair::Replay { from: 1 })));
    assert_eq!(index.replaying(s, batch(1, 1, vec![stored([1]), stored([2])])), Ok(()));
    // Received parts count at once; the stream still waits for the rest.
    assert_eq!(index.lookup(&chain(1..=6)).units(s), 2);
    assert_eq!(index.apply(s, batch(1, 7, vec![stored([7])])), Ok(None));
    // A part is lost: only a snapshot can repair this.
    assert_eq!(index.replaying(s, batch(1, 4, vec![stored([4])])), Ok(()));
    let last = batch(1, 5, vec![stored([5])]);
    assert_eq!(index.replayed(s, Epoch(1), Some(last.clone())), Ok(Some(GapRepair::Snapshot)));
    assert_eq!(index.lookup(&chain(1..=6)).units(s), 2);
    // No part is lost.
    index.fetch_failed(s);
    assert_eq!(index.apply(s, batch(1, 8, vec![stored([8])])), Ok(Some(GapRepair::Replay { from: 3 })));
    assert_eq!(index.replaying(s, batch(1, 3, vec![stored([3]), stored([4])])), Ok(()));
    assert_eq!(index.replayed(s, Epoch(1), Some(last)), Ok(None));
    assert_eq!(index.lookup(&chain(1..=9)).units(s), 8);
}

#[test]
fn an_unavailable_replay_requests_a_snapshot_that_replaces_everything() {
    let mut index = joined(1);
    let s = slot(0);
    index.apply(s, batch(1, 1, vec![stored([1])])).unwrap();
    index.apply(s, batch(1, 50, vec![stored([50])])).unwrap();
    assert_eq!(index.replayed(s, Epoch(1), None), Ok(Some(GapRepair::Snapshot)));
    index.apply(s, batch(1, 51, vec![stored([51])])).unwrap();
    let runs = vec![(unit(39), chain(40..=50).to_vec(), Medium::Device)];
    let resume_points = vec![(unit(60), 60 * 16, Medium::Device), (unit(61), 61 * 16, Medium::Disk)];
    let snapshot = KvSnapshot { epoch: Epoch(1), sequence: 50, runs, resume_points };
    assert_eq!(install(&mut index, s, snapshot), Ok(None));
    assert_eq!(index.lookup(&chain(1..=39)).units(s), 0);
    assert_eq!(index.lookup(&chain(1..=55)).units(s), 51);
    assert_eq!(index.lookup(&chain(1..=61)).units(s), 60);
    assert_eq!(index.stream(s).unwrap().applied, 51);
}

#[test]
fn a_failed_fetch_is_requested_again_by_the_next_batch() {
    let mut index = joined(1);
    let s = slot(0);
    assert!(index.apply(s, batch(1, 5, vec![stored([5])])).unwrap().is_some());
    index.fetch_failed(s);
    assert_eq!(index.apply(s, batch(1, 6, vec![stored([6])])), Ok(Some(GapRepair::Replay { from: 1 })));
}

#[test]
fn duplicates_are_ignored_and_other_epochs_refused() {
    let mut index = joined(1);
    let s = slot(0);
    index.apply(s, batch(1, 1, vec![stored([1]), removed([1])])).unwrap();
    assert_eq!(index.apply(s, batch(1, 1, vec![stored([1]), removed([1]), stored([2])])), Ok(None));
    assert_eq!(index.lookup(&chain([1])).units(s), 0);
    assert_eq!(index.lookup(&chain([1, 2])).units(s), 2);
    let refused = index.apply(s, batch(0, 4, vec![stored([9])]));
    assert_eq!(refused, Err(StreamError::WrongEpoch { expected: Epoch(1), got: Epoch(0) }));
    assert_eq!(
        index.apply(s, batch(1, 0, vec![stored([9])])),
        Err(StreamError::BadSequence { first: 0, len: 1 })
    );
    let wrap = index.apply(s, batch(1, u64::MAX, vec![stored([9])]));
    assert_eq!(wrap, Err(StreamError::BadSequence { first: u64::MAX, len: 1 }));
    assert_eq!(index.apply(slot(7), batch(1, 1, vec![])), Err(StreamError::NotFollowed));
}

#[test]
fn a_new_epoch_drops_the_units_of_the_old_one() {
    let mut index = joined(1);
    let s = slot(0);
    index.apply(s, batch(1, 1, vec![stored(1..=3)])).unwrap();
    index.reserve(s, chain(1..=5));
    join(&mut index, 0, 2);
    assert_eq!(index.lookup(&chain(1..=5)).units(s), 0);
    assert_eq!(index.size().blocks, 0);
    assert_eq!(index.size().reservations, 0);
    assert!(index.apply(s, batch(1, 4, vec![stored([4])])).is_err());
    assert_eq!(index.apply(s, batch(2, 1, vec![stored([1])])), Ok(None));
}

#[test]
fn reservations_count_until_the_workers_events_arrive() {
    let now = Instant::now();
    let mut index = joined(2);
    let s = slot(0);
    let first = index.reserve(s, chain(1..=4));
    let second = index.reserve(s, chain(1..=4));
    assert_eq!(index.lookup(&chain(1..=4)).units(s), 4);
    assert_eq!(index.lookup(&chain(1..=4)).units(slot(1)), 0);
    // One of two reservations is released: the other still expects the prefix.
    index.release(first);
    assert_eq!(index.lookup(&chain(1..=4)).units(s), 4);
    // The worker announces units and later evicts some: its events count.
    index.apply(s, batch(1, 1, vec![stored(1..=4), removed([4])])).unwrap();
    assert_eq!(index.lookup(&chain(1..=4)).units(s), 3);
    index.settle(second, now);
    assert_eq!(index.size().reservations, 0);
    assert_eq!(index.lookup(&chain(1..=4)).units(s), 3);
}

#[test]
fn a_settled_reservation_covers_the_delay_of_events_and_then_expires() {
    let now = Instant::now();
    let mut index = joined(1);
    let s = slot(0);
    let id = index.reserve(s, chain(1..=2));
    index.settle(id, now + Duration::from_secs(1));
    index.expire(now);
    assert_eq!(index.lookup(&chain(1..=2)).units(s), 2);
    index.expire(now + Duration::from_secs(1));
    assert_eq!(index.lookup(&chain(1..=2)).units(s), 0);
}

#[test]
fn a_settled_reservation_ends_when_its_events_have_arrived() {
    let until = Instant::now() + Duration::from_secs(1);
    let mut index = joined(1);
    let s = slot(0);
    let settled = |index: &mut PrefixIndex, last: u64| {
        let id = index.reserve(s, chain([1, last]));
        index.settle(id, until);
    };
    // More than [`Claims`] checks one by one.
    for last in 1_000..1_400 {
        settled(&mut index, last);
    }
    assert_eq!(index.size().reservations, 400);
    index.expire(until);
    assert_eq!((index.size().reservations, index.size().blocks), (0, 0));
    // The events of the second and third request, and one of an unknown request, arrive before those of the
    // first.
    index.apply(s, batch(1, 1, vec![stored([1])])).unwrap();
    (1_000..1_003).for_each(|last| settled(&mut index, last));
    for (number, (last, left)) in (2..).zip([(1_001, 2), (1_002, 1), (1_003, 1), (1_000, 0)]) {
        let event = KvEvent::Stored { parent: unit(1), units: vec![unit(last)], medium: Medium::Device };
        index.apply(s, batch(1, number, vec![event])).unwrap();
        assert_eq!(index.size().reservations, left, "{last}");
    }
    assert_eq!(index.lookup(&chain([1, 1_000])).units(s), 2);
}

#[test]
fn a_unit_evicted_before_it_is_used_again_counts_again_for_the_new_request() {
    let mut index = joined(1);
    let s = slot(0);
    let old = index.reserve(s, chain([1]));
    index.apply(s, batch(1, 1, vec![stored([1]), removed([1])])).unwrap();
    let new = index.reserve(s, chain([1]));
    assert_eq!(index.lookup(&chain([1])).units(s), 1);
    index.release(old);
    assert_eq!(index.lookup(&chain([1])).units(s), 1);
    index.release(new);
    assert_eq!(index.lookup(&chain([1])).units(s), 0);
}

#[test]
fn an_interrupted_snapshot_is_requested_again() {
    let mut index = joined(1);
    let s = slot(0);
    index.apply(s, batch(1, 1, vec![stored([1])])).unwrap();
    assert_eq!(index.apply(s, batch(1, 9, vec![stored([9])])), Ok(Some(GapRepair::Replay { from: 2 })));
    assert_eq!(index.replayed(s, Epoch(1), None), Ok(Some(GapRepair::Snapshot)));
    let runs = |units: std::ops::RangeInclusive<u64>| {
        KvSnapshotFrame::Runs(vec![(unit(0), chain(units).to_vec(), Medium::Device)])
    };
    assert_eq!(index.install(s, runs(1..=2)), Err(StreamError::NoSnapshot));
    let begin = KvSnapshotFrame::Begin { epoch: Epoch(1), sequence: 8 };
    assert_eq!(index.install(s, begin.clone()), Ok(None));
    assert_eq!(index.install(s, runs(1..=2)), Ok(None));
    // The received part already counts.
    assert_eq!(index.lookup(&chain(1..=3)).units(s), 2);
    index.fetch_failed(s);
    assert_eq!(index.install(s, KvSnapshotFrame::End), Err(StreamError::NoSnapshot));
    // A replay cannot fill the hole between the part and the stream.
    assert_eq!(index.apply(s, batch(1, 10, vec![stored([10])])), Ok(Some(GapRepair::Snapshot)));
    assert_eq!(index.install(s, begin), Ok(None));
    assert_eq!(index.lookup(&chain(1..=3)).units(s), 0);
    assert_eq!(index.install(s, runs(1..=8)), Ok(None));
    assert_eq!(index.install(s, KvSnapshotFrame::End), Ok(None));
    assert_eq!(index.lookup(&chain(1..=20)).units(s), 10);
    assert!(!index.stream(s).unwrap().behind);
}

#[test]
fn a_path_reported_from_its_end_is_found_before_and_after_its_start() {
    let mut index = joined(3);
    index.apply(slot(0), batch(1, 1, vec![stored(700..=800)])).unwrap();
    index.apply(slot(1), batch(1, 1, vec![stored(300..=400)])).unwrap();
    let depths = |index: &PrefixIndex, units: u64| {
        let overlap = index.lookup(&chain(1..=units));
        [0, 1, 2].map(|w| overlap.units(slot(w)))
    };
    assert_eq!(depths(&index, 1024), [800, 400, 0]);
    assert_eq!(depths(&index, 699), [0, 400, 0]);
    index.apply(slot(2), batch(1, 1, vec![stored(1..=299)])).unwrap();
    assert_eq!(depths(&index, 1024), [800, 400, 299]);
    index.apply(slot(2), batch(1, 2, vec![stored(401..=699)])).unwrap();
    assert_eq!(depths(&index, 1024), [800, 400, 699]);
    assert_eq!(depths(&index, 500), [0, 400, 500]);
    index.apply(slot(0), batch(1, 2, vec![removed((701..=800).rev())])).unwrap();
    index.apply(slot(2), batch(1, 3, vec![removed(1..=690)])).unwrap();
    assert_eq!(depths(&index, 1024), [700, 400, 699]);
    assert_eq!(depths(&index, 690), [0, 400, 0]);
}

#[test]
fn workers_beyond_the_first_word_of_a_set_are_found() {
    let mut index = joined(1500);
    for worker in 0..1500 {
        index.apply(slot(worker), batch(1, 1, vec![stored(1..=16)])).unwrap();
    }
    index.apply(slot(1499), batch(1, 2, vec![stored(17..=1024)])).unwrap();
    index.leave(slot(3));
    let overlap = index.lookup(&chain(1..=1024));
    assert_eq!([0, 3, 64, 1498, 1499].map(|w| overlap.units(slot(w))), [16, 0, 16, 16, 1024]);
}

#[test]
fn the_byte_budget_holds_and_refused_units_are_counted() {
    let budget = 1 << 20;
    let mut index = PrefixIndex::new(budget);
    join(&mut index, 0, 1);
    index.apply(slot(0), batch(1, 1, vec![stored(1..=100_000)])).unwrap();
    let size = index.size();
    assert!(size.bytes <= budget, "{size:?}");
    assert!(size.bytes > budget / 4 * 3, "{size:?}");
    assert_eq!(size.blocks + size.refused, 100_000);
    assert_eq!(u64::from(index.lookup(&chain(1..=100_000)).units(slot(0))), size.blocks);
    index.leave(slot(0));
    assert!(index.size().bytes < budget / 4, "memory goes back");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn cut_lost_and_repeated_batches_lead_to_the_same_state(
        events in proptest::collection::vec((1..12u64, any::<bool>()), 1..40),
        cuts in proptest::collection::vec((1..6usize, any::<bool>(), any::<bool>()), 1..20),
    ) {
        let events: Vec<KvEvent> =
            events.into_iter().map(|(u, put)| if put { stored([u]) } else { removed([u]) }).collect();
        let mut plain = joined(1);
        plain.apply(slot(0), batch(1, 1, events.clone())).unwrap();
        let mut index = joined(1);
        let mut at = 0;
        let mut pending: Option<GapRepair> = None;
        for (len, lost, repeated) in cuts.iter().cycle().copied() {
            if at == events.len() {
                break;
            }
            let end = (at + len).min(events.len());
            let from = if repeated { at.saturating_sub(3) } else { at };
            if !lost {
                let need = index.apply(slot(0), batch(1, from as u64 + 1, events[from..end].to_vec())).unwrap();
                pending = pending.or(need);
            }
            at = end;
            if let Some(GapRepair::Replay { from }) = pending.take_if(|_| repeated) {
                let from_index = from as usize - 1;
                let missing = batch(1, from, events[from_index..at].to_vec());
                prop_assert_eq!(index.replayed(slot(0), Epoch(1), Some(missing)), Ok(None));
            }
        }
        // A final event reveals any loss at the end.
        let last = events.len() as u64 + 1;
        let need = index.apply(slot(0), batch(1, last, vec![stored([99])])).unwrap();
        if let Some(GapRepair::Replay { from }) = pending.or(need) {
            let mut missing = events[from as usize - 1..].to_vec();
            missing.push(stored([99]));
            prop_assert_eq!(index.replayed(slot(0), Epoch(1), Some(batch(1, from, missing))), Ok(None));
        }
        for u in 1..12 {
            prop_assert_eq!(index.lookup(&chain(1..=u)), plain.lookup(&chain(1..=u)));
        }
        prop_assert_eq!(index.stream(slot(0)).unwrap().applied, last);
    }
}
