//! Recurrent models continue from states of other sequences: the second request with a prefix hits, a burst
//! computes it once, and no bit changes.

use crate::harness::{Ask, Heard, one_by_one, open, options, prompt, together};
use kvasir_worker::load::EngineOptions;

/// Every recurrent architecture of the set.
const RECURRENT: [&str; 4] = [
    "tiny/qwen3next/qwen3next-f32",
    "tiny/qwen35/qwen35-f32",
    "tiny/qwen35moe/qwen35moe-f32",
    "tiny/granitehybrid/granitehybrid-f32",
];
const SHARED: usize = 100;
/// The part of it that ends at a hash-unit boundary.
const HIT: usize = 96;

fn asks(users: u64) -> Vec<Ask> {
    let own = |user| prompt(10 + user, 37);
    (0..users).map(|user| Ask::greedy([prompt(1, SHARED), own(user)].concat(), 12)).collect()
}

/// Checks for the same tokens, and the same bits wherever both have logits. Rows that the cache serves have
/// none.
fn assert_same(got: &[Heard], want: &[Heard], what: &str) {
    for (user, (got, want)) in got.iter().zip(want).enumerate() {
        assert_eq!(got.tokens, want.tokens, "{what}, user {user}");
        assert_eq!(got.logits.len(), want.logits.len() - got.cached(), "{what}, user {user}");
        for (position, bits) in &got.logits {
            assert!(want.logits[position] == *bits, "{what}, user {user}: other logits at {position}");
        }
    }
}

#[test]
fn the_second_sighting_of_a_prefix_hits_and_changes_no_bit() {
    for model in RECURRENT {
        let calm = EngineOptions { prefix_cache: false, chunk: Some(0), ..options(model) };
        let want = one_by_one(&mut open(model, &calm), &asks(3));
        for (chunk, block_tokens) in [(1, 16), (16, 32), (63, 16), (66, 64), (0, 16)] {
            let what = format!("{model}, chunks of {chunk}, blocks of {block_tokens}");
            let options = EngineOptions { chunk: Some(chunk), block_tokens, ..options(model) };
            let got = one_by_one(&mut open(model, &options), &asks(3));
            assert_eq!(got.iter().map(Heard::cached).collect::<Vec<_>>(), [0, HIT, HIT], "{what}");
            assert_same(&got, &want, &what);
        }
    }
}

#[test]
fn a_burst_computes_a_prefix_once_and_changes_no_bit() {
    for model in RECURRENT {
        let calm = EngineOptions { prefix_cache: false, chunk: Some(0), ..options(model) };
        let want = one_by_one(&mut open(model, &calm), &asks(6));
        for chunk in [16, 63, 0] {
            let what = format!("{model}, chunks of {chunk}");
            let options = EngineOptions { chunk: Some(chunk), ..options(model) };
            let got = together(&mut open(model, &options), &asks(6));
            let cached: Vec<usize> = got.iter().map(Heard::cached).collect();
            assert_eq!(cached, [0, HIT, HIT, HIT, HIT, HIT], "{what}");
            assert_same(&got, &want, &what);
        }
    }
}

#[test]
fn the_next_turn_resumes_after_the_generated_tokens() {
    for model in RECURRENT {
        let mut chat = prompt(3, 50);
        let mut calm = open(model, &EngineOptions { prefix_cache: false, chunk: Some(0), ..options(model) });
        let mut engine = open(model, &options(model));
        for turn in 0..3 {
            let ask = [Ask::greedy(chat.clone(), 40)];
            let (got, want) = (one_by_one(&mut engine, &ask), one_by_one(&mut calm, &ask));
            let known = if turn == 0 { 0 } else { (chat.len() - 21) / 16 * 16 };
            assert_eq!(got[0].cached(), known, "{model}, turn {turn}");
            assert_same(&got, &want, &format!("{model}, turn {turn}"));
            chat.extend(&got[0].tokens);
            chat.extend(prompt(40 + turn, 20));
        }
    }
}
