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

fn indices(ask: &ChunkAsk) -> Vec<ChunkIndex> {
    ask.chunks.iter().map(|(index, ..)| *index).collect()
}

#[test]
fn requests_are_cut_by_bytes_and_count_and_spread_over_sources_within_the_window() {
    let now = Instant::now();
    let mut schedule = schedule(&[10, 10, 10, 10, 35, 35, 35], 2);
    let asks: Vec<ChunkAsk> = std::iter::from_fn(|| schedule.next(now)).collect();
    let made: Vec<_> = asks.iter().map(|ask| (ask.source, indices(ask))).collect();
    // At most three chunks and 40 bytes each; a fourth request would exceed the window of 100 bytes.
    assert_eq!(made, [(0, vec![0, 1, 2]), (1, vec![3]), (0, vec![4])]);
    assert_eq!(asks[0].chunks[1], (1, id(1), 10));
    // Held chunks count against the window until they are stored.
    (0..3).for_each(|chunk| schedule.received(asks[0].request, chunk));
    schedule.ended(asks[0].request, false, now);
    assert_eq!(schedule.next(now), None);
    (0..3).for_each(|chunk| schedule.kept(0, chunk));
    assert_eq!(schedule.next(now).map(|ask| indices(&ask)), Some(vec![5]));
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
    let lanes: Vec<_> = made.iter().map(|ask| (ask.source, ask.lane, indices(ask))).collect();
    let want = [
        (0, 0, vec![0]),
        (1, 1, vec![1, 2, 3]),
        (0, 2, vec![4, 5]),
        // 40, 30 and 40 bytes are outstanding.
        (1, 1, vec![6]),
        (0, 0, vec![7]),
        (1, 2, vec![8]),
    ];
    assert_eq!(lanes, want);
    // Arrived and failed chunks are no longer outstanding, even if not stored yet.
    schedule.received(made[1].request, 1);
    schedule.received(made[1].request, 2);
    schedule.received(made[1].request, 3);
    schedule.ended(made[1].request, false, now);
    schedule.not_held(made[3].request, 6, now);
    schedule.ended(made[3].request, true, now);
    let next = schedule.next(now + ASK_AGAIN).unwrap();
    assert_eq!((next.source, next.lane), (1, 1));
}

#[test]
fn failures_and_strikes_of_a_lane_count_for_its_source() {
    let now = Instant::now();
    let limits = Limits { window: 1000, request: 10, chunks: 1, requests: 4, lanes: 4 };
    let mut schedule = of(limits, &[10; 5], 1);
    let asks: Vec<_> = std::iter::from_fn(|| schedule.next(now)).collect();
    assert_eq!(asks.iter().map(|ask| ask.lane).collect::<Vec<_>>(), [0, 1, 2, 3]);
    schedule.ended(asks[1].request, true, now);
    assert_eq!(schedule.next(now), None, "it is left alone, over other lanes too");
    // The requests over other lanes go on, and their strikes count for the same source.
    let mut lie = |ask: &ChunkAsk| {
        schedule.received(ask.request, ask.chunks[0].0);
        let out = schedule.damaged(ask.source, ask.chunks[0].0, now);
        schedule.ended(ask.request, false, now);
        out
    };
    assert_eq!([&asks[0], &asks[2], &asks[3]].map(&mut lie), [false, false, true]);
    assert!(schedule.is_hopeless());
}

#[test]
fn a_chunk_larger_than_the_window_goes_alone() {
    let mut schedule = schedule(&[500, 5], 1);
    let ask = schedule.next(Instant::now()).unwrap();
    assert_eq!(indices(&ask), [0]);
    assert_eq!(schedule.next(Instant::now()), None);
}

#[test]
fn a_failed_request_is_retried_at_once_elsewhere_and_later_at_its_source() {
    let now = Instant::now();
    let mut one = schedule(&[10, 10], 1);
    let ask = one.next(now).unwrap();
    one.received(ask.request, 0);
    one.ended(ask.request, true, now);
    assert_eq!(one.next(now), None);
    let wake = one.wake(now).unwrap();
    assert_eq!(wake, now + RETRY.0);
    assert_eq!(one.next(wake).map(|ask| indices(&ask)), Some(vec![1]));

    let mut two = schedule(&[10, 10], 2);
    let ask = two.next(now).unwrap();
    assert_eq!(ask.source, 0);
    two.ended(ask.request, true, now);
    let again = two.next(now).unwrap();
    assert_eq!((again.source, indices(&again)), (1, vec![0, 1]));
}

#[test]
fn wrong_bytes_are_requested_elsewhere_and_three_drop_the_source() {
    let now = Instant::now();
    let mut schedule = schedule(&[10, 10, 10], 2);
    let lie = |schedule: &mut Schedule, ask: &ChunkAsk| {
        for (chunk, ..) in &ask.chunks {
            schedule.received(ask.request, *chunk);
        }
        let out = ask
            .chunks
            .iter()
            .map(|(chunk, ..)| schedule.damaged(ask.source, *chunk, now))
            .collect::<Vec<_>>();
        schedule.ended(ask.request, false, now);
        out
    };
    let ask = schedule.next(now).unwrap();
    assert_eq!(lie(&mut schedule, &ask), [false, false, true]);
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
    let ask = schedule.next(now).unwrap();
    schedule.not_held(ask.request, 0, now);
    schedule.ended(ask.request, false, now);
    assert_eq!(schedule.next(now), None);
    assert!(schedule.next(schedule.wake(now).unwrap()).is_some());
}

#[test]
fn a_request_that_ends_late_does_not_affect_its_successor() {
    let now = Instant::now();
    let mut schedule = schedule(&[10], 2);
    let first = schedule.next(now).unwrap();
    schedule.not_held(first.request, 0, now);
    let second = schedule.next(now).unwrap();
    assert_eq!(second.source, 1);
    schedule.ended(first.request, true, now);
    assert_eq!(schedule.next(now), None, "the second has it");
    schedule.received(second.request, 0);
    schedule.kept(1, 0);
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

    /// Whatever sources do: no chunk is requested twice at a time, the window holds, dropped sources are not
    /// asked, and everything arrives if one source is honest. Requests use the lane with the fewest
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
        let mut open: BTreeMap<RequestId, ChunkAsk> = BTreeMap::new();
        let (mut asked, mut strikes, mut steps) = (HashSet::new(), vec![0; sources + 1], 0);
        while !schedule.is_done() {
            steps += 1;
            prop_assert!(steps < 20_000, "it does not end");
            prop_assert!(!schedule.is_hopeless());
            while let Some(ask) = schedule.next(now) {
                prop_assert!(strikes[ask.source] < STRIKES);
                prop_assert!(ask.chunks.len() <= LIMITS.chunks);
                for (chunk, name, size) in &ask.chunks {
                    prop_assert!(asked.insert(*chunk), "asked for twice");
                    prop_assert_eq!((*name, *size), (id(*chunk), bytes[*chunk]));
                }
                let under_way: usize = asked.iter().map(|chunk: &usize| bytes[*chunk]).sum();
                prop_assert!(under_way <= LIMITS.window as usize || asked.len() == 1);
                let to_come = |lane: usize| -> usize {
                    let asks = open.values().filter(|ask| ask.lane == lane);
                    asks.flat_map(|ask| &ask.chunks).map(|(.., bytes)| *bytes).sum()
                };
                let least = (0..lanes).min_by_key(|lane| to_come(*lane));
                prop_assert_eq!(Some(ask.lane), least);
                open.insert(ask.request, ask);
            }
            let pick = usize::from(picks.next().unwrap());
            let Some(request) = open.keys().nth(pick % open.len().max(1)).copied() else {
                now = schedule.wake(now).expect("nothing is under way and nothing will be");
                continue;
            };
            let ask = open.remove(&request).unwrap();
            let mut failed = false;
            for (chunk, ..) in &ask.chunks {
                let fate = if ask.source == sources { Fate::Comes } else { fates.next().unwrap() };
                match fate {
                    Fate::Comes => {
                        schedule.received(request, *chunk);
                        schedule.kept(ask.source, *chunk);
                    }
                    Fate::Lies => {
                        schedule.received(request, *chunk);
                        strikes[ask.source] += 1;
                        let out = schedule.damaged(ask.source, *chunk, now);
                        prop_assert_eq!(out, strikes[ask.source] == STRIKES);
                    }
                    Fate::Misses => schedule.not_held(request, *chunk, now),
                    Fate::Breaks => failed = true,
                }
                if failed {
                    break;
                }
            }
            for (chunk, ..) in &ask.chunks {
                asked.remove(chunk);
            }
            schedule.ended(request, failed, now);
        }
        prop_assert_eq!(schedule.done_bytes(), bytes.iter().sum::<usize>() as u64);
        prop_assert!(schedule.next(now).is_none());
    }
}
