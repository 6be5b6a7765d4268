use super::pace::DecodePace;
use super::*;
use proptest::prelude::*;

/// A query with 16 expected output tokens.
fn query(prompt_tokens: u32, random: u64) -> Query {
    Query { routing: Routing::Prefix, prompt_tokens, output_tokens: 16.0, standing: None, random, round: 0 }
}

fn choose(prompt_tokens: u32, candidates: &[Candidate], random: u64) -> Option<RoutingDecision> {
    super::choose(&query(prompt_tokens, random), candidates)
}

fn idle(index: usize) -> Candidate {
    Candidate {
        slot: Slot::new(index).unwrap(),
        units: 0,
        pending_tokens: 0,
        running: 0,
        queued: 0,
        slots: 0,
        prefill_rate: 2_000.0,
        prefill_age_s: 0.0,
        pace: DecodePace { seconds: 0.008, share: 0.05 },
        pace_age_s: 0.0,
        pull: None,
        given_tokens: 0.0,
    }
}

#[test]
fn the_comparison_policies_ignore_cached_prefixes() {
    let workers = [Candidate { units: 60, pending_tokens: 10, ..idle(0) }, idle(1)];
    let by = |routing, round| super::choose(&Query { routing, round, ..query(1_000, 3) }, &workers).unwrap();
    assert_eq!(by(Routing::Prefix, 0).slot.index(), 0);
    let least = by(Routing::LeastLoad, 0);
    assert_eq!((least.slot.index(), least.reason, least.predicted), (1, Reason::Load, 0));
    let rounds: Vec<_> = (0..4).map(|round| by(Routing::RoundRobin, round)).collect();
    assert_eq!(rounds.iter().map(|c| c.slot.index()).collect::<Vec<_>>(), [0, 1, 0, 1]);
    // The prediction is correct with these policies too.
    assert_eq!((rounds[0].predicted, rounds[1].predicted), (960, 0));
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
fn a_burst_with_an_uncached_prefix_goes_to_the_worker_that_computes_it() {
    // As the caller books it: tokens sent to a worker are pending until it starts to answer.
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
        // A second wave finds the prefix cached.
        workers[leader].pending_tokens = 0;
        workers[leader].units = shared / 16;
        assert_eq!(choose(prompt, &workers, 5).unwrap().slot, first.slot);
    }
}

#[test]
fn a_busy_holder_loses_requests_to_an_idle_worker() {
    // A short shared system prompt does not justify waiting behind a long document.
    let holder = Candidate { units: 4, pending_tokens: 8_000, ..idle(0) };
    let choice = choose(100, &[holder, idle(1)], 0).unwrap();
    assert_eq!((choice.slot.index(), choice.reason, choice.predicted), (1, Reason::Load, 0));
    // It does not justify joining a large batch while another worker is idle either.
    let busy = Candidate { units: 4, running: 60, ..idle(0) };
    assert_eq!(choose(100, &[busy, idle(1)], 0).unwrap().slot.index(), 1);
    // A long document is worth a wait, but not any wait.
    let worth = Candidate { units: 250, pending_tokens: 7_000, ..idle(0) };
    assert_eq!(choose(4_030, &[worth, idle(1)], 0).unwrap().slot.index(), 0);
    let not_worth = Candidate { pending_tokens: 9_000, ..worth };
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
fn an_idle_holder_is_chosen_though_computing_the_prompt_would_cost_less_than_a_tie() {
    let fast = |index, units| Candidate { units, prefill_rate: 1e6, ..idle(index) };
    let workers = [fast(0, 0), fast(1, 10), fast(2, 0), fast(3, 9)];
    for random in 0..100 {
        let choice = choose(170, &workers, random << 32 | random).unwrap();
        assert_eq!((choice.slot.index(), choice.predicted), (1, 160));
    }
    // Ties between workers that have equally much are still spread.
    let both = [fast(0, 10), fast(1, 10)];
    assert!((0..2).all(|slot| (0..9).any(|random| choose(170, &both, random).unwrap().slot.index() == slot)));
}

#[test]
fn one_candidate_gives_the_reason_only_and_none_gives_none() {
    assert_eq!(choose(64, &[], 3), None);
    let only = Candidate { units: 2, ..idle(9) };
    let choice = choose(64, &[only], 3).unwrap();
    assert_eq!((choice.slot.index(), choice.reason, choice.predicted), (9, Reason::Only, 32));
}

fn standing(home: usize, regret: f64) -> Option<Standing> {
    Some(Standing { home: Slot::new(home).unwrap(), regret })
}

#[test]
fn a_prefix_in_demand_gets_a_second_holder_and_only_then() {
    // Recomputing takes 1 s. The wait at the holder is 0.25 s longer than that.
    let holder = Candidate { units: 125, pending_tokens: 2_500, ..idle(0) };
    let by = |regret| {
        let query = Query { standing: standing(0, regret), ..query(2_010, 1) };
        super::choose(&query, &[holder, idle(1)]).unwrap()
    };
    let waits = by(0.0);
    assert_eq!((waits.slot.index(), waits.reason, waits.predicted), (0, Reason::Prefix, 2_000));
    assert!((waits.excess - 0.25).abs() < 0.01, "{waits:?}");
    assert_eq!(by(0.95).reason, Reason::Prefix);
    let replica = by(1.05);
    assert_eq!((replica.slot.index(), replica.reason, replica.predicted), (1, Reason::Replica, 0));
    // If no other worker is faster, no replica is made, however large the regret.
    let busy = Candidate { pending_tokens: 600, ..idle(1) };
    let query = Query { standing: standing(0, 50.0), ..query(2_010, 1) };
    assert_eq!(super::choose(&query, &[holder, busy]).unwrap().reason, Reason::Prefix);
}

#[test]
fn a_replica_is_used_while_the_first_holder_is_busy_and_left_when_it_is_not() {
    let home = Candidate { units: 125, ..idle(0) };
    let replica = Candidate { units: 125, ..idle(1) };
    let chosen = |home: Candidate, random| {
        let query = Query { standing: standing(0, 0.0), ..query(2_010, random) };
        super::choose(&query, &[home, replica]).unwrap().slot.index()
    };
    assert!((0..100).all(|random| chosen(home, random << 20 | random) == 0));
    assert_eq!(chosen(Candidate { pending_tokens: 500, ..home }, 1), 0);
    assert_eq!(chosen(Candidate { pending_tokens: 1_100, ..home }, 1), 1);
}

#[test]
fn ties_go_to_the_worker_with_less_recent_work() {
    let given = Candidate { given_tokens: 1_000.0, ..idle(0) };
    for random in 0..50 {
        assert_eq!(choose(640, &[given, idle(1)], random << 32 | random).unwrap().slot.index(), 1);
    }
    // A cached prefix of some length counts for more.
    let holder = Candidate { units: 20, ..given };
    assert_eq!(choose(640, &[holder, idle(1)], 1).unwrap().slot.index(), 0);
}

#[test]
fn small_differences_of_rates_are_ignored() {
    let slower = Candidate { prefill_rate: 1_300.0, ..idle(0) };
    let busy = Candidate { pending_tokens: 100, ..idle(1) };
    assert_eq!(choose(1_000, &[slower, busy], 0).unwrap().slot.index(), 0);
    let slow = Candidate { prefill_rate: 300.0, ..idle(0) };
    assert_eq!(choose(1_000, &[slow, busy], 0).unwrap().slot.index(), 1);
}

type Numbers = (u32, u64, u32, f32, f64, f64);

fn candidates(workers: &[Numbers]) -> Vec<Candidate> {
    let candidate = |(index, &(units, pending_tokens, running, prefill_rate, token_s, given_tokens)): (
        usize,
        &Numbers,
    )| {
        Candidate {
            slot: Slot::new(index).unwrap(),
            units,
            pending_tokens,
            running,
            queued: 0,
            slots: 0,
            prefill_rate,
            prefill_age_s: 0.0,
            pace: DecodePace { seconds: token_s, share: 0.05 },
            pace_age_s: 0.0,
            given_tokens,
            pull: None,
        }
    };
    workers.iter().enumerate().map(candidate).collect()
}

fn numbers() -> impl Strategy<Value = Numbers> {
    (0u32..7_000, 0u64..1 << 40, 0u32..500, 0f32..1e5, 0f64..10.0, 0f64..1e9)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_choice_costs_at_most_as_much_as_a_tie(
        prompt in 0u32..100_000,
        workers in proptest::collection::vec(numbers(), 1..64),
        random in any::<u64>(),
        home in proptest::option::of(0usize..64),
    ) {
        let candidates = candidates(&workers);
        let query = Query { standing: home.and_then(|home| standing(home, 0.0)), ..query(prompt, random) };
        let estimates = Estimates::new(&query, &candidates);
        let choice = super::choose(&query, &candidates).unwrap();
        prop_assert!(choice.predicted <= prompt.saturating_sub(1));
        prop_assert!(choice.excess >= 0.0);
        if choice.reason != Reason::Replica {
            for candidate in &candidates {
                let limit = estimates.cost(candidate);
                prop_assert!(choice.cost <= limit + (limit * TIE_SHARE).max(TIE_S));
            }
        }
    }

    /// More work or fewer cached units never lower the cost.
    #[test]
    fn the_cost_rises_with_all_that_takes_time(
        prompt in 1u32..100_000,
        workers in proptest::collection::vec(numbers(), 2..8),
        (units, pending, running, queued, given) in
            (0u32..100, 0u64..1 << 30, 0u32..100, 0u32..100, 0f64..1e6),
    ) {
        let candidates = candidates(&workers);
        let query = query(prompt, 0);
        let estimates = Estimates::new(&query, &candidates);
        let before = candidates[0];
        let after = Candidate {
            units: before.units.saturating_sub(units),
            pending_tokens: before.pending_tokens + pending,
            running: before.running + running,
            queued: before.queued + queued,
            given_tokens: before.given_tokens + given,
            ..before
        };
        prop_assert!(estimates.cost(&after) >= estimates.cost(&before) * (1.0 - 1e-12));
    }
}

#[test]
fn hits_end_at_multiples_of_the_workers_block_and_leave_one_token() {
    // (prompt tokens, units held, tokens of a block) -> units served.
    for (prompt, held, block, served) in
        [(1000, 4, 64, 4), (1000, 5, 64, 4), (64, 4, 64, 0), (128, 8, 64, 4), (48, 3, 16, 3), (0, 0, 64, 0)]
    {
        assert_eq!(hit_units(prompt, held, block), served, "{prompt} {held} {block}");
    }
}
