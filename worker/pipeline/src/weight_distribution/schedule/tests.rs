use super::*;
use proptest::prelude::*;
use std::collections::{BTreeMap, HashSet};

const LIMITS: Limits = Limits { window: 100, request: 40, chunks: 3, requests: 2, lanes: 1 };

fn id(number: usize) -> ChunkId {
    ChunkId::of(&number.to_le_bytes())
}

fn schedule(bytes: &[usize], sources: usize) -> Schedule {
    of(LIMITS, bytes, sources)
}

fn of(limits: Limits, bytes: &[usize], sources: usize) -> Schedule {
    Schedule::new(limits, bytes.iter().enumerate().map(|(number, bytes)| (id(number), *bytes)), sources)
}

fn indices(request: &ScheduledRequest) -> Vec<ChunkIndex> {
    request.chunks.iter().map(|(index, ..)| *index).collect()
}

#[test]
fn requests_are_cut_by_bytes_and_count_and_spread_over_sources_within_the_window() {
    let now = Instant::now();
    let mut schedule = schedule(&[10, 10, 10, 10, 35, 35, 35], 2);
    let requests: Vec<ScheduledRequest> = std::iter::from_fn(|| schedule.next(now)).collect();
    let made: Vec<_> = requests.iter().map(|request| (request.source, indices(request))).collect();
    // At most three chunks and 40 bytes each; a fourth request would exceed the window of 100 bytes.
    assert_eq!(made, [(0, vec![0, 1, 2]), (1, vec![3]), (0, vec![4])]);
    assert_eq!(requests[0].chunks[1], (1, id(1), 10));
    // Held chunks count against the window until they are stored.
    (0..3).for_each(|chunk| schedule.received(requests[0].id, chunk));
    schedule.ended(requests[0].id, false, now);
    assert_eq!(schedule.next(now), None);
    (0..3).for_each(|chunk| schedule.stored(0, chunk));
    assert_eq!(schedule.next(now).map(|request| indices(&request)), Some(vec![5]));
    assert_eq!(schedule.done_bytes(), 30);
}

#[test]
fn the_window_has_two_requests_for_each_lane() {
    let one = Limits { window: 32 << 20, request: 8 << 20, chunks: 256, requests: 3, lanes: 1 };
    // (lanes, window in MiB, requests)
    let cases = [(0, 32, 3), (1, 32, 3), (2, 32, 4), (3, 48, 6), (6, 96, 12), (8, 128, 16), (16, 256, 32)];
    for (lanes, window, requests) in cases {
        let limits = Limits { window: window << 20, requests, lanes: lanes.max(1), ..one };
        assert_eq!(Limits::of_lanes(lanes), limits, "{lanes}");
        assert!(limits.window >= 2 * limits.request * limits.lanes as u64);
    }
    assert_eq!(Limits::of_lanes(usize::MAX).lanes, usize::MAX, "no arithmetic overflows");
}

#[test]
fn requests_use_the_lane_with_the_fewest_bytes_of_all_sources() {
    let now = Instant::now();
    let limits = Limits { window: 1000, request: 40, chunks: 3, requests: 3, lanes: 3 };
    let mut schedule = of(limits, &[40, 10, 10, 10, 20, 20, 40, 40, 40, 5], 2);
    let made: Vec<_> = std::iter::from_fn(|| schedule.next(now)).collect();
    let lanes: Vec<_> = made.iter().map(|request| (request.source, request.lane, indices(request))).collect();
    let expected = [
        (0, 0, vec![0]),
        (1, 1, vec![1, 2, 3]),
        (0, 2, vec![4, 5]),
        // 40, 30 and 40 bytes are outstanding.
        (1, 1, vec![6]),
        (0, 0, vec![7]),
        (1, 2, vec![8]),
    ];
    assert_eq!(lanes, expected);
    // Arrived and failed chunks are no longer outstanding, even if not stored yet.
    schedule.received(made[1].id, 1);
    schedule.received(made[1].id, 2);
    schedule.received(made[1].id, 3);
    schedule.ended(made[1].id, false, now);
    schedule.not_held(made[3].id, 6, now);
    schedule.ended(made[3].id, true, now);
    let next = schedule.next(now + CHUNK_RETRY).unwrap();
    assert_eq!((next.source, next.lane), (1, 1));
}

#[test]
fn failures_and_strikes_of_a_lane_count_for_its_source() {
    let now = Instant::now();
    let limits = Limits { window: 1000, request: 10, chunks: 1, requests: 4, lanes: 4 };
    let mut schedule = of(limits, &[10; 5], 1);
    let requests: Vec<_> = std::iter::from_fn(|| schedule.next(now)).collect();
    assert_eq!(requests.iter().map(|request| request.lane).collect::<Vec<_>>(), [0, 1, 2, 3]);
    schedule.ended(requests[1].id, true, now);
    assert_eq!(schedule.next(now), None, "it is left alone, over other lanes too");
    // The requests over other lanes go on, and their strikes count for the same source.
    let mut lie = |request: &ScheduledRequest| {
        schedule.received(request.id, request.chunks[0].0);
        let out = schedule.damaged(request.source, request.chunks[0].0, now);
        schedule.ended(request.id, false, now);
        out
    };
    assert_eq!([&requests[0], &requests[2], &requests[3]].map(&mut lie), [false, false, true]);
    assert!(schedule.is_hopeless());
}

#[test]
fn a_chunk_larger_than_the_window_goes_alone() {
    let mut schedule = schedule(&[500, 5], 1);
    let request = schedule.next(Instant::now()).unwrap();
    assert_eq!(indices(&request), [0]);
    assert_eq!(schedule.next(Instant::now()), None);
}

#[test]
fn a_failed_request_is_retried_at_once_elsewhere_and_later_at_its_source() {
    let now = Instant::now();
    let mut one = schedule(&[10, 10], 1);
    let request = one.next(now).unwrap();
    one.received(request.id, 0);
    one.ended(request.id, true, now);
    assert_eq!(one.next(now), None);
    let wake = one.wake(now).unwrap();
    assert_eq!(wake, now + SOURCE_RETRY.0);
    assert_eq!(one.next(wake).map(|request| indices(&request)), Some(vec![1]));

    let mut two = schedule(&[10, 10], 2);
    let request = two.next(now).unwrap();
    assert_eq!(request.source, 0);
    two.ended(request.id, true, now);
    let again = two.next(now).unwrap();
    assert_eq!((again.source, indices(&again)), (1, vec![0, 1]));
}

#[test]
fn wrong_bytes_are_requested_elsewhere_and_three_drop_the_source() {
    let now = Instant::now();
    let mut schedule = schedule(&[10, 10, 10], 2);
    let lie = |schedule: &mut Schedule, request: &ScheduledRequest| {
        for (chunk, ..) in &request.chunks {
            schedule.received(request.id, *chunk);
        }
        let out = request
            .chunks
            .iter()
            .map(|(chunk, ..)| schedule.damaged(request.source, *chunk, now))
            .collect::<Vec<_>>();
        schedule.ended(request.id, false, now);
        out
    };
    let request = schedule.next(now).unwrap();
    assert_eq!(lie(&mut schedule, &request), [false, false, true]);
    let other = schedule.next(now).unwrap();
    assert_eq!((other.source, other.chunks.len()), (1, 3));
    assert_eq!(lie(&mut schedule, &other), [false, false, true]);
    assert!(schedule.is_hopeless() && !schedule.is_done());
    assert_eq!(schedule.next(now), None);
}

#[test]
fn a_missing_chunk_is_requested_again_after_a_pause() {
    let now = Instant::now();
    let mut schedule = schedule(&[10], 1);
    let request = schedule.next(now).unwrap();
    schedule.not_held(request.id, 0, now);
    schedule.ended(request.id, false, now);
    assert_eq!(schedule.next(now), None);
    assert!(schedule.next(schedule.wake(now).unwrap()).is_some());
}

#[test]
fn a_request_that_ends_late_does_not_affect_its_successor() {
    let now = Instant::now();
    let mut schedule = schedule(&[10], 2);
    let first = schedule.next(now).unwrap();
    schedule.not_held(first.id, 0, now);
    let second = schedule.next(now).unwrap();
    assert_eq!(second.source, 1);
    schedule.ended(first.id, true, now);
    assert_eq!(schedule.next(now), None, "the second has it");
    schedule.received(second.id, 0);
    schedule.stored(1, 0);
    assert!(schedule.is_done());
}

#[derive(Debug, Clone, Copy)]
enum Fate {
    Comes,
    Lies,
    Misses,
    Breaks,
}

fn fate() -> impl Strategy<Value = Fate> {
    prop_oneof![5 => Just(Fate::Comes), 1 => Just(Fate::Lies), 1 => Just(Fate::Misses), 1 => Just(Fate::Breaks)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Whatever sources do: no chunk is requested twice at a time, the window holds, dropped sources get
    /// no request, and everything arrives if one source is honest. Requests use the lane with the fewest
    /// outstanding bytes.
    #[test]
    fn everything_comes_in_the_end(
        bytes in proptest::collection::vec(1usize..60, 1..40),
        fates in proptest::collection::vec(fate(), 1..200),
        sources in 1usize..4,
        lanes in 1usize..5,
        picks in proptest::collection::vec(any::<u8>(), 400),
    ) {
        let mut now = Instant::now();
        let mut schedule = of(Limits { lanes, ..LIMITS }, &bytes, sources + 1);
        // The last source is honest.
        let mut fates = fates.into_iter().chain(std::iter::repeat(Fate::Comes));
        let mut picks = picks.into_iter().cycle();
        let mut open: BTreeMap<RequestId, ScheduledRequest> = BTreeMap::new();
        let (mut requested, mut strikes, mut steps) = (HashSet::new(), vec![0; sources + 1], 0);
        while !schedule.is_done() {
            steps += 1;
            prop_assert!(steps < 20_000, "it does not end");
            prop_assert!(!schedule.is_hopeless());
            while let Some(request) = schedule.next(now) {
                prop_assert!(strikes[request.source] < STRIKES);
                prop_assert!(request.chunks.len() <= LIMITS.chunks);
                for (chunk, name, size) in &request.chunks {
                    prop_assert!(requested.insert(*chunk), "asked for twice");
                    prop_assert_eq!((*name, *size), (id(*chunk), bytes[*chunk]));
                }
                let under_way: usize = requested.iter().map(|chunk: &usize| bytes[*chunk]).sum();
                prop_assert!(under_way <= LIMITS.window as usize || requested.len() == 1);
                let to_come = |lane: usize| -> usize {
                    let requests = open.values().filter(|request| request.lane == lane);
                    requests.flat_map(|request| &request.chunks).map(|(.., bytes)| *bytes).sum()
                };
                let least = (0..lanes).min_by_key(|lane| to_come(*lane));
                prop_assert_eq!(Some(request.lane), least);
                open.insert(request.id, request);
            }
            let pick = usize::from(picks.next().unwrap());
            let Some(request_id) = open.keys().nth(pick % open.len().max(1)).copied() else {
                now = schedule.wake(now).expect("nothing is under way and nothing will be");
                continue;
            };
            let request = open.remove(&request_id).unwrap();
            let mut failed = false;
            for (chunk, ..) in &request.chunks {
                let fate = if request.source == sources { Fate::Comes } else { fates.next().unwrap() };
                match fate {
                    Fate::Comes => {
                        schedule.received(request_id, *chunk);
                        schedule.stored(request.source, *chunk);
                    }
                    Fate::Lies => {
                        schedule.received(request_id, *chunk);
                        strikes[request.source] += 1;
                        let out = schedule.damaged(request.source, *chunk, now);
                        prop_assert_eq!(out, strikes[request.source] == STRIKES);
                    }
                    Fate::Misses => schedule.not_held(request_id, *chunk, now),
                    Fate::Breaks => failed = true,
                }
                if failed {
                    break;
                }
            }
            for (chunk, ..) in &request.chunks {
                requested.remove(chunk);
            }
            schedule.ended(request_id, failed, now);
        }
        prop_assert_eq!(schedule.done_bytes(), bytes.iter().sum::<usize>() as u64);
        prop_assert!(schedule.next(now).is_none());
    }
}
