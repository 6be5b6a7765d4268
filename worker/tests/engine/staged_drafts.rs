//! Draft tokens for models with recurrent layers over several workers: the states of all stages follow the
//! accepted rows, and every bit equals that of one worker without draft tokens.

use crate::exactness::{assert_same, same_twice};
use crate::harness::{Ask, Heard, cramped, open, options, prompt, run_to_end, submit, together};
use crate::snapshots::{assert_continues, key, save, undisturbed};
use crate::speculation::{asks, counts, plain};
use crate::stages::{Workers, most_shards};
use crate::tiers::{self, host, small};
use kvasir_worker::engine::{Engine, StepOutcome};
use kvasir_worker::load::EngineOptions;
use kvasir_worker::speculation::Speculation;
use proto::message::Sampling;
use std::time::Instant;

/// Every architecture with recurrent layers, and states in bfloat16.
const MODELS: [&str; 7] = [
    "tiny/qwen35/qwen35-f32",
    "tiny/qwen35moe/qwen35moe-f32",
    "tiny/qwen3next/qwen3next-f32",
    "tiny/granitehybrid/granitehybrid-f32",
    "tiny/granitehybrid-dense/granitehybrid-dense-f32",
    "tiny/qwen35/qwen35-f32+bf16",
    "tiny/granitehybrid/granitehybrid-f32+bf16",
];

fn drafting(workers: &Workers, model: &str, options: &EngineOptions, most: u32) -> Engine {
    workers.next_engine(model, options).with_speculation(Speculation::ngram().always(most))
}

/// Generates one token repeatedly, so that draft tokens are accepted.
fn saying(prompt: Vec<u32>) -> Ask {
    let sampling = Sampling { logit_bias: vec![(10, 100.0)], ..Sampling::default() };
    Ask { sampling, ..Ask::greedy(prompt, 40) }
}

#[test]
fn states_of_all_stages_follow_the_accepted_rows() {
    let (mut preempted, mut most_seen) = (0, 0);
    for model in MODELS {
        let asks = asks();
        let want = plain(model, &asks);
        let most = most_shards(model).min(3);
        most_seen = most_seen.max(most);
        for shards in 2..=most {
            let workers = Workers::start(model, shards - 1, &options(model));
            let (mut drafted, mut accepted) = (0, 0);
            let mut run = |what: &str, at_once: bool, most: u32, options: EngineOptions| {
                let what = format!("{model} over {shards}: {what}");
                let mut engine = drafting(&workers, model, &options, most);
                let rounds = same_twice(&what, &mut engine, &asks, &want, at_once);
                let (all, right) = counts(&rounds);
                (drafted, accepted) = (drafted + all, accepted + right);
                assert_eq!(engine.load().kv_used, 0, "{what}");
                let hits = rounds.iter().map(Heard::cached).sum::<usize>();
                (hits, rounds.iter().map(Heard::preemptions).sum::<u32>())
            };
            let (hits, _) = run("alone", false, 5, options(model));
            assert!(hits > 0, "{model} over {shards}");
            run("eight at once", true, 7, options(model));
            run("one draft token", true, 1, options(model));
            run("chunks of 7", true, 5, EngineOptions { chunk: Some(7), ..options(model) });
            run("no prefix cache", true, 5, EngineOptions { prefix_cache: false, ..options(model) });
            let (_, gave_way) = run("preempted", true, 5, cramped(model, &options(model), 140));
            preempted += gave_way;
            assert!(accepted > 0 && drafted > accepted, "{model} over {shards}: {accepted} of {drafted}");
        }
    }
    assert_eq!(most_seen, 3);
    assert!(preempted > 0);
}

/// After a generation with draft tokens the caches of all stages equal, byte by byte, those of one worker
/// without them.
#[test]
fn cached_bytes_equal_those_of_one_worker() {
    for model in MODELS {
        let ask = saying([prompt(3, 40).repeat(2), vec![9; 21]].concat()).named(key("r").name);
        let generate = |engine: &mut Engine| {
            let heard = together(engine, std::slice::from_ref(&ask)).remove(0);
            ([&ask.prompt[..], &heard.tokens].concat(), counts(&[heard]).1)
        };
        let mut whole = open(model, &options(model));
        let (tokens, _) = generate(&mut whole);
        let file = save(&mut whole, "r").unwrap();
        let want = undisturbed(model, &tokens);
        for shards in 2..=most_shards(model).min(3) {
            let workers = Workers::start(model, shards - 1, &options(model));
            for chunk in [7, 0] {
                let what = format!("{model} over {shards}, chunks of {chunk}");
                let options = EngineOptions { chunk: Some(chunk), ..options(model) };
                let mut engine = drafting(&workers, model, &options, 7);
                // Steps of other sequences run in between.
                let beside: Vec<_> = asks().iter().map(|ask| submit(&mut engine, ask)).collect();
                let (got, accepted) = generate(&mut engine);
                assert_eq!(got, tokens, "{what}");
                assert!(accepted > 10, "{what}: {accepted}");
                assert!(save(&mut engine, "r").unwrap() == file, "{what}: other bytes");
                assert_continues(&what, &mut engine, &tokens, &want, (tokens.len() - 1) / 16 * 16);
                assert!(beside.iter().all(|asked| asked.heard().finished.is_some()), "{what}");
            }
        }
    }
}

/// States reached through draft tokens are copied to a tier, evicted and brought back at all stages.
#[test]
fn tiers_keep_states_reached_through_draft_tokens() {
    for model in ["tiny/qwen35/qwen35-f32", "tiny/granitehybrid/granitehybrid-f32"] {
        let ask = saying(prompt(5, 48).repeat(2));
        let whole = plain(model, std::slice::from_ref(&ask)).remove(0);
        // After the generated tokens.
        let next = Ask::greedy([&ask.prompt[..], &whole.tokens, &prompt(6, 5)].concat(), 6);
        let want = plain(model, std::slice::from_ref(&next));
        let tiers = small(model, 16, host(64 << 20));
        let tiers = EngineOptions { kv_bytes: tiers.kv_bytes.map(|bytes| 2 * bytes), ..tiers };
        let workers = Workers::start(model, 1, &options(model));
        let mut engine = drafting(&workers, model, &tiers, 7);
        assert_same(model, &[whole], &tiers::finish(&mut engine, std::slice::from_ref(&ask)));
        assert!(engine.metrics().accepted.get() > 0, "{model}");
        tiers::evict(&mut engine);
        let hits = engine.metrics().tiers.hits.get();
        let got = tiers::finish(&mut engine, std::slice::from_ref(&next));
        assert_same(model, &want, &got);
        assert!(engine.metrics().tiers.hits.get() > hits && got[0].cached() > ask.prompt.len(), "{model}");
    }
}

/// A request may be removed before its accepted rows are known. At all stages the rows before its draft
/// tokens then count, and its slots are used by others afterwards.
#[test]
fn a_request_removed_with_draft_tokens_in_flight_leaves_nothing() {
    for model in MODELS {
        let kept = saying(prompt(2, 50));
        let want = plain(model, std::slice::from_ref(&kept));
        let shards = most_shards(model).min(3);
        let workers = Workers::start(model, shards - 1, &options(model));
        let mut engine = drafting(&workers, model, &options(model), 7);
        for steps in 1..12 {
            let beside = submit(&mut engine, &kept);
            let sure = (30..33).map(|seed| saying(prompt(seed, 20)));
            let gone: Vec<_> = asks().into_iter().chain(sure).map(|ask| submit(&mut engine, &ask)).collect();
            // After the prompts.
            while gone.iter().any(|asked| asked.heard().tokens.is_empty()) {
                engine.step(Instant::now()).unwrap();
            }
            for (at, asked) in gone.iter().enumerate() {
                for _ in 0..(at + steps) % 4 {
                    engine.step(Instant::now()).unwrap();
                }
                engine.cancel(asked.id.unwrap());
                engine.check().unwrap();
            }
            run_to_end(&mut engine);
            // Results that were in flight when the last request ended are processed too.
            while engine.step(Instant::now()).unwrap() != StepOutcome::Idle {}
            assert_same(&format!("{model} over {shards}, {steps} steps"), &want, &[beside.heard()]);
            assert_eq!(engine.load().kv_used, 0, "{model} over {shards}, {steps} steps");
        }
        assert!(engine.metrics().accepted.get() > 0, "{model}");
        // From the caches that these requests left.
        let all = asks();
        assert_same(model, &plain(model, &all), &together(&mut engine, &all));
    }
}

/// With its own choice it drafts where that pays, and the tokens are the same.
#[test]
fn the_choice_of_draft_length_changes_no_token() {
    for model in MODELS {
        let (asks, workers) = (asks(), Workers::start(model, 1, &options(model)));
        let mut engine = workers.next_engine(model, &options(model)).with_speculation(Speculation::ngram());
        assert_same(model, &plain(model, &asks), &together(&mut engine, &asks));
    }
}
