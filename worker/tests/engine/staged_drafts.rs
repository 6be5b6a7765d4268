//! Draft tokens for models with recurrent layers over several workers: the states of all stages follow the
//! accepted rows, and every bit equals that of one worker without draft tokens.

use crate::exactness::{assert_same, same_twice};
use crate::harness::{
    Output, Request, cramped, open, options, prompt, run_to_end, submit, together, whole_matrix,
};
use crate::snapshots::{assert_continues, key, save, undisturbed};
use crate::speculation::{counts, plain, requests};
use crate::stages::{Workers, max_shards};
use crate::tiers::{self, host, small};
use engine::engine::{Engine, StepOutcome};
use engine::speculation::Speculation;
use kvasir_worker::load::EngineOptions;
use proto::message::Sampling;
use std::time::Instant;

/// Every architecture with recurrent layers, and states in bfloat16.
const MODELS: [&str; 9] = [
    "tiny/qwen35/qwen35-f32",
    "tiny/qwen35moe/qwen35moe-f32",
    "tiny/qwen3next/qwen3next-f32",
    "tiny/granitehybrid/granitehybrid-f32",
    "hf/falcon_h1",
    "hf/lfm2_moe",
    "tiny/granitehybrid-dense/granitehybrid-dense-f32",
    "tiny/qwen35/qwen35-f32+bf16",
    "tiny/granitehybrid/granitehybrid-f32+bf16",
];

fn drafting(workers: &Workers, model: &str, options: &EngineOptions, draft_len: u32) -> Engine {
    workers.next_engine(model, options).with_speculation(Speculation::ngram().always(draft_len))
}

/// Generates one token repeatedly, so that draft tokens are accepted.
fn repeating_request(prompt: Vec<u32>) -> Request {
    let sampling = Sampling { logit_bias: vec![(10, 100.0)], ..Sampling::default() };
    Request { sampling, ..Request::greedy(prompt, 40) }
}

#[test]
fn states_of_all_stages_follow_the_accepted_rows() {
    let (mut preempted, mut max_seen) = (0, 0);
    for model in MODELS {
        let requests = requests();
        let expected = plain(model, &requests);
        let max_shards = max_shards(model).min(3);
        max_seen = max_seen.max(max_shards);
        let min_shards = if whole_matrix() { 2 } else { max_shards };
        for shards in min_shards..=max_shards {
            let workers = Workers::start(model, shards - 1, &options(model));
            let (mut drafted, mut accepted) = (0, 0);
            let mut run = |case: &str, at_once: bool, draft_len: u32, options: EngineOptions| {
                let case = format!("{model} over {shards}: {case}");
                let mut engine = drafting(&workers, model, &options, draft_len);
                let rounds = same_twice(&case, &mut engine, &requests, &expected, at_once);
                let (all, right) = counts(&rounds);
                (drafted, accepted) = (drafted + all, accepted + right);
                assert_eq!(engine.load().kv_used, 0, "{case}");
                let hits = rounds.iter().map(Output::cached).sum::<usize>();
                (hits, rounds.iter().map(Output::preemptions).sum::<u32>())
            };
            let (hits, _) = run("alone", false, 5, options(model));
            assert!(hits > 0, "{model} over {shards}");
            run("eight at once", true, 7, options(model));
            run("chunks of 7", true, 1, EngineOptions { chunk: Some(7), ..options(model) });
            if whole_matrix() {
                run("one draft token", true, 1, options(model));
                run(
                    "chunks of 7, five draft tokens",
                    true,
                    5,
                    EngineOptions { chunk: Some(7), ..options(model) },
                );
                run("no prefix cache", true, 5, EngineOptions { prefix_cache: false, ..options(model) });
            }
            let (_, preemptions) = run("preempted", true, 5, cramped(model, &options(model), 140));
            preempted += preemptions;
            assert!(accepted > 0 && drafted > accepted, "{model} over {shards}: {accepted} of {drafted}");
        }
    }
    assert_eq!(max_seen, 3);
    assert!(preempted > 0);
}

/// After a generation with draft tokens the caches of all stages equal, byte by byte, those of one worker
/// without them.
#[test]
fn cached_bytes_equal_those_of_one_worker() {
    for model in MODELS {
        let request = repeating_request([prompt(3, 40).repeat(2), vec![9; 21]].concat()).named(key("r").name);
        let generate = |engine: &mut Engine| {
            let output = together(engine, std::slice::from_ref(&request)).remove(0);
            ([&request.prompt[..], &output.tokens].concat(), counts(&[output]).1)
        };
        let mut whole = open(model, &options(model));
        let (tokens, _) = generate(&mut whole);
        let file = save(&mut whole, "r").unwrap();
        let expected = undisturbed(model, &tokens);
        for shards in 2..=max_shards(model).min(3) {
            let workers = Workers::start(model, shards - 1, &options(model));
            for chunk in [7, 0] {
                let case = format!("{model} over {shards}, chunks of {chunk}");
                let options = EngineOptions { chunk: Some(chunk), ..options(model) };
                let mut engine = drafting(&workers, model, &options, 7);
                // Steps of other sequences run in between.
                let concurrent: Vec<_> =
                    requests().iter().map(|request| submit(&mut engine, request)).collect();
                let (got, accepted) = generate(&mut engine);
                assert_eq!(got, tokens, "{case}");
                assert!(accepted > 10, "{case}: {accepted}");
                assert!(save(&mut engine, "r").unwrap() == file, "{case}: other bytes");
                assert_continues(&case, &mut engine, &tokens, &expected, (tokens.len() - 1) / 16 * 16);
                assert!(concurrent.iter().all(|submitted| submitted.output().finished.is_some()), "{case}");
            }
        }
    }
}

/// States reached through draft tokens are copied to a tier, evicted and brought back at all stages.
#[test]
fn tiers_keep_states_reached_through_draft_tokens() {
    for model in ["tiny/qwen35/qwen35-f32", "tiny/granitehybrid/granitehybrid-f32"] {
        let request = repeating_request(prompt(5, 48).repeat(2));
        let whole = plain(model, std::slice::from_ref(&request)).remove(0);
        // After the generated tokens.
        let next = Request::greedy([&request.prompt[..], &whole.tokens, &prompt(6, 5)].concat(), 6);
        let expected = plain(model, std::slice::from_ref(&next));
        let tiers = small(model, 16, host(64 << 20));
        let tiers = EngineOptions { kv_bytes: tiers.kv_bytes.map(|bytes| 2 * bytes), ..tiers };
        let workers = Workers::start(model, 1, &options(model));
        let mut engine = drafting(&workers, model, &tiers, 7);
        assert_same(model, &[whole], &tiers::finish(&mut engine, std::slice::from_ref(&request)));
        assert!(engine.metrics().accepted.get() > 0, "{model}");
        tiers::evict(&mut engine);
        let hits = engine.metrics().tiers.hits.get();
        let got = tiers::finish(&mut engine, std::slice::from_ref(&next));
        assert_same(model, &expected, &got);
        assert!(
            engine.metrics().tiers.hits.get() > hits && got[0].cached() > request.prompt.len(),
            "{model}"
        );
    }
}

/// A request may be removed before its accepted rows are known. At all stages the rows before its draft
/// tokens then count, and its slots are used by others afterwards.
#[test]
fn a_request_removed_with_draft_tokens_in_flight_leaves_nothing() {
    for model in MODELS {
        let remaining = repeating_request(prompt(2, 50));
        let expected = plain(model, std::slice::from_ref(&remaining));
        let shards = max_shards(model).min(3);
        let workers = Workers::start(model, shards - 1, &options(model));
        let mut engine = drafting(&workers, model, &options(model), 7);
        for steps in 1..12 {
            let concurrent = submit(&mut engine, &remaining);
            let accepting = (30..33).map(|seed| repeating_request(prompt(seed, 20)));
            let cancelled: Vec<_> = requests()
                .into_iter()
                .chain(accepting)
                .map(|request| submit(&mut engine, &request))
                .collect();
            // After the prompts.
            while cancelled.iter().any(|submitted| submitted.output().tokens.is_empty()) {
                engine.step(Instant::now()).unwrap();
            }
            for (at, submitted) in cancelled.iter().enumerate() {
                for _ in 0..(at + steps) % 4 {
                    engine.step(Instant::now()).unwrap();
                }
                engine.cancel(submitted.id.unwrap());
                engine.check().unwrap();
            }
            run_to_end(&mut engine);
            // Results that were in flight when the last request ended are processed too.
            while engine.step(Instant::now()).unwrap() != StepOutcome::Idle {}
            assert_same(&format!("{model} over {shards}, {steps} steps"), &expected, &[concurrent.output()]);
            assert_eq!(engine.load().kv_used, 0, "{model} over {shards}, {steps} steps");
        }
        assert!(engine.metrics().accepted.get() > 0, "{model}");
        // From the caches that these requests left.
        let all = requests();
        assert_same(model, &plain(model, &all), &together(&mut engine, &all));
    }
}

/// With its own choice it drafts where that pays, and the tokens are the same.
#[test]
fn the_choice_of_draft_length_changes_no_token() {
    for model in MODELS {
        let (requests, workers) = (requests(), Workers::start(model, 1, &options(model)));
        let mut engine = workers.next_engine(model, &options(model)).with_speculation(Speculation::ngram());
        assert_same(model, &plain(model, &requests), &together(&mut engine, &requests));
    }
}
