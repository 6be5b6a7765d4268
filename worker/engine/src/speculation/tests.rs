use super::ngrams::{Grounds, Record};
use super::*;
use crate::scheduler::SeqSlot;

fn times(row: f64) -> DraftCost {
    let mut cost = DraftCost::default();
    for rows in 1..=64u32 {
        cost.took(rows, 1.0 + row * f64::from(rows - 1));
    }
    cost
}

#[test]
fn the_followed_place_predicts_the_next_tokens() {
    let mut ngrams = Ngrams::default();
    let text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 2, 3, 4];
    let mut observed = Vec::new();
    ngrams.catch_up(&text, |grounds, right| observed.push((grounds.matched, right)));
    assert!(observed.is_empty(), "what was there before is not counted");
    let (next, grounds) = ngrams.next(&text, 4);
    let matched: Vec<usize> = grounds.iter().map(|grounds| grounds.matched).collect();
    assert_eq!((next, matched), (vec![5, 6, 7, 8], vec![3, 4, 5, 6]));
    let text = [&text[..], &[5, 6, 9]].concat();
    ngrams.catch_up(&text, |grounds, right| observed.push((grounds.matched, right)));
    assert_eq!(observed, [(3, true), (4, true), (5, false)]);
    assert!(ngrams.next(&text, 4).0.is_empty(), "nothing like it came before");
}

#[test]
fn a_repetition_is_predicted_to_continue() {
    let mut ngrams = Ngrams::default();
    let text = [7, 1, 2, 1, 2, 1];
    ngrams.catch_up(&text, |_, _| {});
    assert_eq!(ngrams.next(&text, 5).0, [2, 1, 2, 1, 2]);
    assert!(ngrams.next(&text, 0).0.is_empty());
    let mut short = Ngrams::default();
    short.catch_up(&[1, 1], |_, _| {});
    assert!(short.next(&[1, 1], 5).0.is_empty());
}

/// A phrase that continues differently each time is distinguished from its own words, which are always the
/// same. This also holds in the prompt and for draft tokens further ahead.
#[test]
fn runs_are_rated_by_their_earlier_continuations() {
    let mut ngrams = Ngrams::default();
    let line = |number: u32| [1, 2, 3, 4, 5, 6, 100 + number];
    let text: Vec<u32> = [&(0..5).flat_map(line).collect::<Vec<_>>()[..], &[1, 2, 3]].concat();
    ngrams.catch_up(&text, |_, _| {});
    let (next, grounds) = ngrams.next(&text, 5);
    assert_eq!(next, [4, 5, 6, 104, 1]);
    let right = |grounds: &Grounds| (grounds.record.right, grounds.record.all);
    let counts: Vec<_> = grounds.iter().map(right).collect();
    // There are no observations after a number that occurred once.
    assert_eq!(counts, [(4, 4), (4, 4), (4, 4), (0, 4), (0, 0)], "{grounds:?}");
    let of = AcceptanceRates::default().of(&grounds);
    assert!(of[0] > 0.8 && of[2] > 0.6 && of[3] < 0.15, "{of:?}");
}

#[test]
fn acceptance_rates_follow_observations_and_decay() {
    let mut chances = AcceptanceRates::default();
    let unknown = |matched| Grounds { matched, record: Record::default() };
    let first = |chances: &AcceptanceRates| chances.of(&[unknown(3)])[0];
    assert!((first(&chances) - 0.3).abs() < 1e-9);
    (0..8).for_each(|_| chances.observe(unknown(3), false));
    assert!(first(&chances) < 0.1);
    assert!((chances.of(&[unknown(30)])[0] - 0.9).abs() < 1e-9, "another class");
    (0..40).for_each(|_| chances.observe(unknown(3), true));
    assert!(first(&chances) > 0.8);
    // Observations of known runs do not change the rates of others.
    let with_record = Grounds { record: Record { right: 0, all: 1 }, ..unknown(3) };
    (0..40).for_each(|_| chances.observe(with_record, false));
    assert!(first(&chances) > 0.8 && chances.of(&[with_record])[0] < 0.5);
    let all = chances.of(&(3..15).map(unknown).collect::<Vec<_>>());
    assert!(all.windows(2).all(|pair| pair[1] < pair[0]), "{all:?}");
}

#[test]
fn draft_tokens_that_do_not_pay_are_not_verified() {
    let sure = vec![vec![0.95, 0.9, 0.86, 0.81]];
    let doubtful = vec![vec![0.1, 0.02]];
    assert_eq!(times(0.05).choose(1, &sure), [4]);
    assert_eq!(times(0.05).choose(1, &doubtful), [1]);
    assert_eq!(times(0.3).choose(1, &doubtful), [0]);
    assert_eq!(times(1.0).choose(1, &sure), [0], "a row costs as much as a step");
    // Nothing was measured yet.
    assert_eq!(DraftCost::default().choose(1, &sure), [0]);
    assert_eq!(times(0.05).choose(0, &[]), [0usize; 0]);
}

#[test]
fn drafting_stops_under_load() {
    // A row costs 6 % of a step of one row. It pays for one sequence; among 64 it costs nearly as much as it
    // gains.
    let chosen = |rows| times(0.06).choose(rows, &vec![vec![0.6, 0.36, 0.2]; rows as usize]);
    assert_eq!(chosen(1), [3]);
    let of_many: usize = times(0.2).choose(48, &vec![vec![0.6, 0.36, 0.2]; 48]).iter().sum();
    assert_eq!(of_many, 0);
}

#[test]
fn step_times_are_interpolated_and_expire() {
    let mut cost = DraftCost::default();
    cost.took(1, 1.0);
    cost.took(5, 2.0);
    assert!((cost.seconds(3) - 1.5).abs() < 1e-9);
    assert!((cost.seconds(9) - 2.0 * 2.2 / 1.6).abs() < 1e-9);
    (0..2 * TRUSTED_STEPS).for_each(|_| cost.took(1, 1.0));
    assert!((cost.seconds(5) - 1.6).abs() < 1e-9, "what was measured long ago is taken for unknown");
}

const TRUSTED_STEPS: u64 = 512;

/// A text that answers each repetition differently: drafting stops after a few draft tokens, and their cost
/// is less than one hundredth of the whole.
#[test]
fn adversarial_text_costs_next_to_nothing() {
    let (mut speculation, row) = (Speculation::ngram(), 0.15);
    let mut tokens: Vec<u32> = (0..200).collect();
    let (mut seconds, mut drafted) = (0.0, 0);
    for drawn in 0..400u32 {
        let decoding = Decoding { id: SeqId(1), slot: SeqSlot(0), tokens: &tokens, max_draft_tokens: 64 };
        let draft_tokens: usize =
            speculation.draft(std::iter::once(decoding)).iter().map(|(_, g)| g.len()).sum();
        let took = 1.0 + row * draft_tokens as f64;
        speculation.step_took(1 + draft_tokens, Duration::from_secs_f64(took));
        (seconds, drafted) = (seconds + took, drafted + draft_tokens);
        // Three tokens that occurred before, and one that never did.
        tokens.push(if drawn % 4 == 3 { 1000 + drawn } else { drawn % 4 + 10 });
    }
    assert!(drafted > 0, "it was tried");
    assert!(seconds < 400.0 * 1.01, "{seconds}");
}

/// A text that repeats itself is drafted in long runs and needs few steps.
#[test]
fn a_quotation_is_drafted_in_long_runs() {
    let (mut speculation, document): (_, Vec<u32>) = (Speculation::ngram(), (0..300).collect());
    let mut tokens = [&document[..], &[900, 901], &document[20..24]].concat();
    let mut steps = 0;
    while tokens.len() < document.len() + 200 {
        let decoding = Decoding { id: SeqId(1), slot: SeqSlot(0), tokens: &tokens, max_draft_tokens: 64 };
        let draft_tokens = speculation.draft(std::iter::once(decoding)).pop().map_or(0, |(_, g)| g.len());
        speculation.step_took(1 + draft_tokens, Duration::from_secs_f64(1.0 + 0.15 * draft_tokens as f64));
        let next = tokens[tokens.len() - 1] + 1;
        tokens.extend(next..=next + draft_tokens as u32);
        steps += 1;
    }
    assert!(steps < 40, "{steps} steps for 194 tokens");
}

/// Tokens per second over `steps` steps with a drafter of this acceptance rate. A plain step takes one
/// second.
fn drafted(chance: u64, round: f64, row: f64, steps: u64) -> f64 {
    let mut speculation = Speculation::computed();
    let (mut tokens, mut seconds, mut dice) = (0usize, 0.0, 7u64);
    for _ in 0..steps {
        let count = speculation.rounds(1, &[(SeqId(1), 20)]);
        if count > 0 {
            speculation.rounds_took(count, Duration::from_secs_f64(round * count as f64));
        }
        let mut hit = || {
            dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (dice >> 33) % 100 < chance
        };
        let right = (0..count).take_while(|_| hit()).count();
        speculation.observe(SeqId(1), count, right);
        let took = 1.0 + row * count as f64;
        speculation.step_took(1 + count, Duration::from_secs_f64(took));
        tokens += 1 + right;
        seconds += took + round * count as f64;
    }
    tokens as f64 / seconds
}

#[test]
fn a_drafter_that_does_not_pay_is_tried_seldom() {
    assert!(drafted(90, 0.1, 0.05, 2000) > 2.0);
    assert!(drafted(60, 0.1, 0.05, 2000) > 1.2);
    for (chance, round, row) in [(5, 0.1, 0.05), (90, 3.0, 0.05), (40, 0.5, 0.5)] {
        assert!(drafted(chance, round, row, 2000) > 0.98, "{chance} %, {round} a round, {row} a row");
    }
}
