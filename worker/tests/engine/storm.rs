//! Random storms through the real engine: whatever is admitted, cancelled, preempted and evicted around a request,
//! its tokens are those of an undisturbed run.

use crate::harness::{Ask, Asked, QUANT, TINY, cramped, one_by_one, open, options, prompt, submit};
use kvasir_worker::engine::StepOutcome;
use kvasir_worker::kv_cache::Placement;
use kvasir_worker::load::EngineOptions;
use proto::message::FinishReason;
use std::time::Instant;

/// Storms per model.
const SEEDS: u64 = 30;
/// More than admission keeps room for.
const GENERATE: u32 = 44;
/// Longest prompt and its output.
const LONGEST: usize = 170;

/// A small generator, so that a storm is its seed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % n
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }
}

/// Prompts that part from each other at block edges, inside blocks, and not at all.
fn prompts() -> Vec<Vec<u32>> {
    let stem = prompt(1, 160);
    let mut prompts = vec![stem.clone(), prompt(2, 23), prompt(3, 70)];
    for (seed, parts_at) in (10..).zip([16, 40, 96, 100, 128, 150]) {
        prompts.push([&stem[..parts_at], &prompt(seed, 9)].concat());
    }
    // Grows out of another, as the next turn of a chat.
    prompts.push([prompts[2].clone(), prompt(20, 30)].concat());
    prompts.push([prompts[5].clone(), prompt(21, 40)].concat());
    prompts
}

#[test]
fn a_storm_changes_no_token() {
    let (mut preempted, mut cached, mut cancelled) = (0u64, 0u64, 0u64);
    for model in TINY.into_iter().chain(QUANT) {
        let asks: Vec<Ask> =
            prompts().into_iter().map(|prompt| Ask::greedy(prompt, GENERATE).tokens_only()).collect();
        let calm = EngineOptions { prefix_cache: false, chunk: Some(0), ..options(model) };
        let want = one_by_one(&mut open(model, &calm), &asks);
        // Windows hold more at once the more of a prompt goes into one step.
        let whole = EngineOptions { chunk: Some(0), ..options(model) };
        let smallest = cramped(model, &whole, LONGEST + GENERATE as usize).kv_bytes.unwrap();
        for seed in 0..SEEDS {
            let mut dice = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
            let options = EngineOptions {
                kv_bytes: Some(smallest * dice.pick(&[4, 5, 6, 8, 12]) / 4),
                chunk: Some(dice.pick(&[1, 5, 16, 33, 64, 0])),
                max_rows: Some(dice.pick(&[8, 40, 200, 1024])),
                max_sequences: Some(dice.pick(&[2, 3, 6])),
                placement: dice.pick(&[Placement::Paged, Placement::Permuted { seed }]),
                ..options(model)
            };
            let what = format!("{model}, seed {seed}");
            let mut engine = open(model, &options);
            let mut asked: Vec<(usize, Asked)> = Vec::new();
            let mut left = 6 + dice.below(10);
            while left > 0 || engine.has_work() {
                while left > 0 && (!engine.has_work() || dice.below(3) == 0) {
                    let which = dice.below(asks.len());
                    asked.push((which, submit(&mut engine, &asks[which])));
                    left -= 1;
                }
                if dice.below(100) == 0 {
                    let at = dice.below(asked.len());
                    asked[at].1.id.into_iter().for_each(|id| engine.cancel(id));
                }
                let outcome = engine.step(Instant::now()).unwrap();
                assert!(outcome != StepOutcome::Idle || !engine.has_work(), "{what}: nothing is planned");
            }
            assert_eq!(engine.load().kv_used, 0, "{what}");
            for (which, asked) in &asked {
                let heard = asked.heard();
                assert_eq!(heard.failed, None, "{what}, prompt {which}");
                match &heard.finished {
                    Some(finished) => {
                        assert_eq!(finished.reason, FinishReason::Length, "{what}, prompt {which}");
                        assert_eq!(heard.tokens, want[*which].tokens, "{what}, prompt {which}");
                        cached += heard.cached() as u64;
                    }
                    None => {
                        assert!(want[*which].tokens.starts_with(&heard.tokens), "{what}, prompt {which}");
                        cancelled += 1;
                    }
                }
            }
            preempted += engine.metrics().preemptions.get();
        }
    }
    assert!(preempted > 100 && cached > 10_000 && cancelled > 50, "{preempted} {cached} {cancelled}");
    println!("{preempted} preemptions, {cached} tokens served by the cache, {cancelled} cancelled");
}
