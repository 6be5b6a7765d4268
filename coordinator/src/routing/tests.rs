use super::*;
use proptest::prelude::*;

fn choose(prompt_tokens: u32, candidates: &[Candidate], random: u64) -> Option<Choice> {
    super::choose(Routing::Prefix, prompt_tokens, candidates, random, 0)
}

fn idle(index: usize) -> Candidate {
    Candidate {
        slot: Slot::new(index).unwrap(),
        units: 0,
        pending_tokens: 0,
        running: 0,
        prefill_rate: 2_000.0,
        pull: None,
        step_ms: 8.0,
    }
}

#[test]
fn routings_to_compare_with_do_not_look_at_what_is_held() {
    let workers = [Candidate { units: 60, pending_tokens: 10, ..idle(0) }, idle(1)];
    let by = |routing, turn| super::choose(routing, 1_000, &workers, 3, turn).unwrap();
    assert_eq!(by(Routing::Prefix, 0).slot.index(), 0);
    let least = by(Routing::LeastLoad, 0);
    assert_eq!((least.slot.index(), least.reason, least.predicted), (1, Reason::Load, 0));
    let turns: Vec<_> = (0..4).map(|turn| by(Routing::RoundRobin, turn)).collect();
    assert_eq!(turns.iter().map(|c| c.slot.index()).collect::<Vec<_>>(), [0, 1, 0, 1]);
    // What a worker has is told truly all the same.
    assert_eq!((turns[0].predicted, turns[1].predicted), (960, 0));
}

#[test]
fn a_prediction_leaves_the_last_token_to_compute_and_ends_at_a_unit() {
    for (prompt, units, expected) in [
        (0, 0, 0),
        (1, 9, 0),
        (16, 1, 0),
        (17, 1, 16),
        (32, 2, 16),
        (33, 2, 32),
        (1530, 95, 1520),
        (1530, 93, 1488),
    ] {
        assert_eq!(predicted_tokens(prompt, units), expected, "{prompt} tokens, {units} units");
    }
    assert_eq!(predicted_tokens(u32::MAX, u32::MAX), u32::MAX / 16 * 16);
}

#[test]
fn a_burst_that_shares_an_uncached_prefix_gathers_where_it_is_computed() {
    // As the caller accounts it: what is sent to a worker is pending there until it starts to answer.
    for (own, shared) in [(30u32, 1500u32), (30, 4096)] {
        let mut workers = [idle(0), idle(1)];
        let prompt = shared + own;
        let first = choose(prompt, &workers, 1).unwrap();
        assert_eq!((first.reason, first.predicted), (Reason::Load, 0));
        let leader = first.slot.index();
        workers[leader].pending_tokens += u64::from(prompt);
        workers[leader].units = shared / 16;
        for follower in 1..32u64 {
            let choice = choose(prompt, &workers, follower.wrapping_mul(0x9e37_79b9_7f4a_7c15)).unwrap();
            assert_eq!(choice.slot, first.slot, "follower {follower}");
            assert_eq!((choice.reason, choice.predicted), (Reason::Prefix, shared / 16 * 16));
            workers[leader].pending_tokens += u64::from(prompt - choice.predicted);
        }
        // A second wave finds it cached.
        workers[leader].pending_tokens = 0;
        workers[leader].units = shared / 16;
        assert_eq!(choose(prompt, &workers, 5).unwrap().slot, first.slot);
    }
}

#[test]
fn load_alone_spills() {
    // A short shared system prompt is no reason to queue behind a long document.
    let holder = Candidate { units: 4, pending_tokens: 8_000, ..idle(0) };
    let choice = choose(100, &[holder, idle(1)], 0).unwrap();
    assert_eq!((choice.slot.index(), choice.reason, choice.predicted), (1, Reason::Load, 0));
    // Nor is it to join a large batch while another worker is idle.
    let busy = Candidate { units: 4, running: 60, ..idle(0) };
    assert_eq!(choose(100, &[busy, idle(1)], 0).unwrap().slot.index(), 1);
    // A long document is worth a wait, but not any wait.
    let worth = Candidate { units: 250, pending_tokens: 8_000, ..idle(0) };
    assert_eq!(choose(4_030, &[worth, idle(1)], 0).unwrap().slot.index(), 0);
    let not_worth = Candidate { pending_tokens: 13_000, ..worth };
    assert_eq!(choose(4_030, &[not_worth, idle(1)], 0).unwrap().slot.index(), 1);
}

#[test]
fn the_faster_of_two_idle_workers_is_chosen() {
    let slow = Candidate { prefill_rate: 500.0, ..idle(0) };
    assert_eq!(choose(1_000, &[slow, idle(1)], 0).unwrap().slot.index(), 1);
}

#[test]
fn ties_are_spread_and_lean_to_the_emptier_worker() {
    let workers: Vec<_> = (0..4).map(idle).collect();
    let mut seen = [0; 4];
    let mut random = 1u64;
    for _ in 0..4_000 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        seen[choose(64, &workers, random ^ (random >> 29)).unwrap().slot.index()] += 1;
    }
    assert!(seen.iter().all(|&n| n > 800), "{seen:?}");
    let fuller = Candidate { pending_tokens: 1, ..idle(0) };
    assert_eq!(choose(64, &[fuller, idle(1)], 7).unwrap().slot.index(), 1);
}

#[test]
fn alone_is_told_and_nobody_is_nobody() {
    assert_eq!(choose(64, &[], 3), None);
    let only = Candidate { units: 2, ..idle(9) };
    let choice = choose(64, &[only], 3).unwrap();
    assert_eq!((choice.slot.index(), choice.reason, choice.predicted), (9, Reason::Only, 32));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_choice_is_never_dearer_than_a_tie(
        prompt in 0u32..100_000,
        workers in proptest::collection::vec((0u32..7_000, 0u64..1 << 40, 0u32..500, 0f32..1e5, 0f32..1e4), 1..64),
        random in any::<u64>(),
    ) {
        let candidates: Vec<_> = workers
            .iter()
            .enumerate()
            .map(|(index, &(units, pending_tokens, running, prefill_rate, step_ms))| Candidate {
                pull: None,
                slot: Slot::new(index).unwrap(), units, pending_tokens, running, prefill_rate, step_ms,
            })
            .collect();
        let choice = choose(prompt, &candidates, random).unwrap();
        let rate = candidates.iter().map(|c| f64::from(c.prefill_rate)).fold(0.0, f64::max);
        let rate = if rate > 0.0 { rate } else { ASSUMED_PREFILL_RATE };
        for candidate in &candidates {
            let limit = cost(prompt, candidate, rate);
            prop_assert!(choice.cost <= limit + (limit * TIE_SHARE).max(TIE_S));
        }
        prop_assert!(choice.predicted <= prompt.saturating_sub(1));
    }
}
