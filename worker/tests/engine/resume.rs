//! Recurrent models continue from states of other sequences: the second request with a prefix hits, a burst
//! computes it once, and no bit changes.

use crate::harness::{Output, Request, one_by_one, open, options, prompt, together};
use kvasir_worker::load::EngineOptions;

/// Every recurrent architecture of the set.
const RECURRENT: [&str; 6] = [
    "tiny/qwen3next/qwen3next-f32",
    "tiny/qwen35/qwen35-f32",
    "tiny/qwen35moe/qwen35moe-f32",
    "tiny/granitehybrid/granitehybrid-f32",
    "hf/falcon_h1",
    "hf/lfm2_moe",
];
const SHARED: usize = 100;
/// The part of it that ends at a hash-unit boundary.
const HIT: usize = 96;

fn requests(users: u64) -> Vec<Request> {
    let own = |user| prompt(10 + user, 37);
    (0..users).map(|user| Request::greedy([prompt(1, SHARED), own(user)].concat(), 12)).collect()
}

/// Checks for the same tokens, and the same bits wherever both have logits. Rows that the cache serves have
/// none.
fn assert_same(got: &[Output], expected: &[Output], case: &str) {
    for (user, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert_eq!(got.tokens, expected.tokens, "{case}, user {user}");
        assert_eq!(got.logits.len(), expected.logits.len() - got.cached(), "{case}, user {user}");
        for (position, bits) in &got.logits {
            assert!(expected.logits[position] == *bits, "{case}, user {user}: other logits at {position}");
        }
    }
}

#[test]
fn the_second_sighting_of_a_prefix_hits_and_changes_no_bit() {
    for model in RECURRENT {
        let baseline = EngineOptions { prefix_cache: false, chunk: Some(0), ..options(model) };
        let expected = one_by_one(&mut open(model, &baseline), &requests(3));
        for (chunk, block_tokens) in [(1, 16), (16, 32), (63, 16), (66, 64), (0, 16)] {
            let case = format!("{model}, chunks of {chunk}, blocks of {block_tokens}");
            let options = EngineOptions { chunk: Some(chunk), block_tokens, ..options(model) };
            let got = one_by_one(&mut open(model, &options), &requests(3));
            assert_eq!(got.iter().map(Output::cached).collect::<Vec<_>>(), [0, HIT, HIT], "{case}");
            assert_same(&got, &expected, &case);
        }
    }
}

#[test]
fn a_burst_computes_a_prefix_once_and_changes_no_bit() {
    for model in RECURRENT {
        let baseline = EngineOptions { prefix_cache: false, chunk: Some(0), ..options(model) };
        let expected = one_by_one(&mut open(model, &baseline), &requests(6));
        for chunk in [16, 63, 0] {
            let case = format!("{model}, chunks of {chunk}");
            let options = EngineOptions { chunk: Some(chunk), ..options(model) };
            let got = together(&mut open(model, &options), &requests(6));
            let cached: Vec<usize> = got.iter().map(Output::cached).collect();
            assert_eq!(cached, [0, HIT, HIT, HIT, HIT, HIT], "{case}");
            assert_same(&got, &expected, &case);
        }
    }
}

#[test]
fn the_next_turn_resumes_after_the_generated_tokens() {
    for model in RECURRENT {
        let mut chat = prompt(3, 50);
        let mut baseline =
            open(model, &EngineOptions { prefix_cache: false, chunk: Some(0), ..options(model) });
        let mut engine = open(model, &options(model));
        for turn in 0..3 {
            let request = [Request::greedy(chat.clone(), 40)];
            let (got, expected) = (one_by_one(&mut engine, &request), one_by_one(&mut baseline, &request));
            let expected_cached = if turn == 0 { 0 } else { (chat.len() - 21) / 16 * 16 };
            assert_eq!(got[0].cached(), expected_cached, "{model}, turn {turn}");
            assert_same(&got, &expected, &format!("{model}, turn {turn}"));
            chat.extend(&got[0].tokens);
            chat.extend(prompt(40 + turn, 20));
        }
    }
}
