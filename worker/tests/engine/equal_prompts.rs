//! Choices of one request: their prompt is computed once, they continue as forks, and no token changes.

use crate::harness::{
    Output, Request, cramped, one_by_one, open, options, prompt, run_to_end, submit, submit_at, together,
};
use engine::engine::StepOutcome;
use kvasir_worker::load::EngineOptions;
use proto::message::{GenerateError, Sampling};
use std::time::{Duration, Instant};

/// One model for every kind of cache.
const KINDS: [&str; 8] = [
    "tiny/llama/llama-f32",
    "tiny/gemma3/gemma3-f32",
    "tiny/gpt-oss/gpt-oss-f32",
    "tiny/qwen35/qwen35-f32",
    "tiny/granitehybrid/granitehybrid-f32",
    "hf/falcon_h1",
    "hf/lfm2_moe",
    "tiny/gemma4/gemma4-f32",
];
const GENERATE: u32 = 20;

/// `n` choices as the API creates them, with consecutive seeds. The last one is greedy.
fn choices(prompt: &[u32], n: u64) -> Vec<Request> {
    let choice = |nth| {
        let temperature = if nth + 1 == n { 0.0 } else { 1.0 };
        let sampling = Sampling { temperature, seed: 40 + nth, ..Sampling::default() };
        Request { sampling, ..Request::greedy(prompt.to_vec(), GENERATE).tokens_only() }
    };
    (0..n).map(choice).collect()
}

fn tokens(outputs: &[Output]) -> Vec<&[u32]> {
    outputs.iter().map(|output| &output.tokens[..]).collect()
}

#[test]
fn choices_compute_their_prompt_once_and_equal_single_requests() {
    for model in KINDS {
        for (len, chunk, block_tokens) in [(7, 0, 16), (100, 16, 16), (100, 33, 64), (128, 0, 32)] {
            let case = format!("{model}, {len} tokens in chunks of {chunk}, blocks of {block_tokens}");
            let requests = choices(&prompt(3, len), 4);
            let baseline = EngineOptions { prefix_cache: false, chunk: Some(0), ..options(model) };
            let expected = one_by_one(&mut open(model, &baseline), &requests);
            let options = EngineOptions { chunk: Some(chunk), block_tokens, ..options(model) };
            let mut engine = open(model, &options);
            let got = together(&mut engine, &requests);
            assert_eq!(tokens(&got), tokens(&expected), "{case}");
            let cached: Vec<usize> = got.iter().map(Output::cached).collect();
            assert_eq!(cached, [0, len, len, len], "{case}");
            let stops: Vec<&str> = got.iter().map(|h| &h.started.as_ref().unwrap().hit_stop[..]).collect();
            assert_eq!(stops[1..], ["forked"; 3], "{case}");
            assert_eq!(engine.metrics().prefill_computed.get(), len as u64, "{case}");
            assert_eq!(engine.load().kv_used, 0, "{case}");
            assert!(got[0].tokens != got[1].tokens, "{case}: the choices do not differ");
        }
    }
}

#[test]
fn choices_survive_the_removal_of_their_leader() {
    for model in KINDS {
        let requests = choices(&prompt(4, 90), 4);
        let baseline = EngineOptions { prefix_cache: false, chunk: Some(0), ..options(model) };
        let expected = one_by_one(&mut open(model, &baseline), &requests);
        let mut engine = open(model, &EngineOptions { chunk: Some(16), ..options(model) });
        let submitted: Vec<_> = requests.iter().map(|request| submit(&mut engine, request)).collect();
        assert_eq!(engine.load().waiting, 4, "{model}");
        for cancelled in [0, 1] {
            engine.step(Instant::now()).unwrap();
            engine.cancel(submitted[cancelled].id.unwrap());
        }
        run_to_end(&mut engine);
        assert_eq!(submitted[2].output().tokens, expected[2].tokens, "{model}");
        assert_eq!(submitted[3].output().tokens, expected[3].tokens, "{model}");
        assert_eq!(submitted[3].output().cached(), 90, "{model}");
        assert_eq!((engine.load().waiting, engine.load().kv_used), (0, 0), "{model}");
    }
}

#[test]
fn choices_that_do_not_fit_together_take_turns() {
    for model in KINDS {
        let requests = choices(&prompt(5, 100), 6);
        let baseline = EngineOptions { prefix_cache: false, chunk: Some(0), ..options(model) };
        let expected = one_by_one(&mut open(model, &baseline), &requests);
        let mut engine = open(model, &cramped(model, &options(model), 130));
        let got = together(&mut engine, &requests);
        assert_eq!(tokens(&got), tokens(&expected), "{model}");
        assert_eq!(engine.load().kv_used, 0, "{model}");
    }
}

#[test]
fn a_leader_waits_for_announced_choices_at_the_end_of_its_prompt() {
    for model in KINDS {
        let requests: Vec<Request> = choices(&prompt(6, 100), 3)
            .into_iter()
            .map(|request| Request { together: 3, ..request })
            .collect();
        let baseline = EngineOptions { prefix_cache: false, chunk: Some(0), ..options(model) };
        let expected = one_by_one(&mut open(model, &baseline), &choices(&prompt(6, 100), 3));
        let mut engine = open(model, &EngineOptions { chunk: Some(16), ..options(model) });
        let now = Instant::now();
        let first = submit_at(&mut engine, &requests[0], now, None);
        // Computes all but the last row. Then it waits for the others, for any time on this test's clock.
        while engine.step(now).unwrap() != StepOutcome::Idle {}
        assert_eq!(engine.metrics().prefill_computed.get(), 99, "{model}");
        let followers: Vec<_> =
            requests[1..].iter().map(|request| submit_at(&mut engine, request, now, None)).collect();
        run_to_end(&mut engine);
        assert_eq!(engine.metrics().prefill_computed.get(), 100, "{model}");
        assert_eq!(first.output().tokens, expected[0].tokens, "{model}");
        for (follower, expected) in followers.iter().zip(&expected[1..]) {
            assert_eq!(follower.output().tokens, expected.tokens, "{model}");
            assert_eq!(follower.output().started.unwrap().hit_stop, "forked", "{model}");
        }
        // The wait for requests that never arrive is bounded.
        let alone = submit_at(&mut engine, &requests[0], now, None);
        while engine.step(now).unwrap() != StepOutcome::Idle {}
        assert!(alone.output().tokens.is_empty(), "{model}");
        engine.step(now + Duration::from_secs(1)).unwrap();
        run_to_end(&mut engine);
        assert_eq!(alone.output().tokens, expected[0].tokens, "{model}");
        assert_eq!(engine.load().kv_used, 0, "{model}");
    }
}

#[test]
fn choices_of_a_cached_prompt_wait_for_each_other() {
    for model in KINDS {
        for block_tokens in [16, 64] {
            let case = format!("{model}, blocks of {block_tokens}");
            let requests = choices(&prompt(7, 97), 3);
            let baseline = EngineOptions { prefix_cache: false, chunk: Some(0), ..options(model) };
            let expected = one_by_one(&mut open(model, &baseline), &requests);
            let mut engine = open(model, &EngineOptions { block_tokens, ..options(model) });
            one_by_one(&mut engine, &requests[..1]);
            let now = Instant::now();
            let submit_choice = |engine: &mut _, request: &Request| {
                submit_at(engine, &Request { together: 3, ..request.clone() }, now, None)
            };
            let first = submit_choice(&mut engine, &requests[0]);
            for _ in 0..3 {
                engine.step(now).unwrap();
            }
            let followers =
                [submit_choice(&mut engine, &requests[1]), submit_choice(&mut engine, &requests[2])];
            run_to_end(&mut engine);
            let got: Vec<Output> =
                std::iter::once(&first).chain(&followers).map(|submitted| submitted.output()).collect();
            assert_eq!(tokens(&got), tokens(&expected), "{case}");
            assert_eq!(engine.load().kv_used, 0, "{case}");
        }
    }
}

#[test]
fn a_follower_that_is_cancelled_or_late_leaves_at_once() {
    let model = KINDS[0];
    let requests = choices(&prompt(8, 90), 4);
    let baseline = EngineOptions { prefix_cache: false, chunk: Some(0), ..options(model) };
    let expected = one_by_one(&mut open(model, &baseline), &requests);
    let mut engine = open(model, &EngineOptions { chunk: Some(16), ..options(model) });
    let now = Instant::now();
    let leader = submit_at(&mut engine, &requests[0], now, None);
    let cancelled = submit_at(&mut engine, &requests[1], now, None);
    let expired = submit_at(&mut engine, &requests[2], now, Some(Duration::from_secs(1)));
    let last = submit_at(&mut engine, &requests[3], now, None);
    engine.step(now).unwrap();
    assert_eq!((engine.load().running, engine.load().waiting), (1, 3));
    engine.cancel(cancelled.id.unwrap());
    assert_eq!(engine.load().waiting, 2);
    engine.check().unwrap();
    engine.step(now + Duration::from_secs(2)).unwrap();
    assert!(matches!(expired.output().failed, Some(GenerateError::DeadlineExceeded { .. })));
    assert_eq!(engine.load().waiting, 1);
    engine.check().unwrap();
    run_to_end(&mut engine);
    assert_eq!(leader.output().tokens, expected[0].tokens);
    assert_eq!(last.output().tokens, expected[3].tokens);
    assert_eq!(last.output().started.unwrap().hit_stop, "forked");
    assert!(cancelled.output().started.is_none());
    assert_eq!((engine.load().waiting, engine.load().kv_used), (0, 0));
}

/// A leader and its followers leave the tables one by one, in any order of cancellation.
#[test]
fn cancelled_orphans_are_not_scheduled() {
    let model = KINDS[0];
    let mut engine = open(model, &EngineOptions { chunk: Some(16), ..options(model) });
    let submitted: Vec<_> =
        choices(&prompt(9, 90), 3).iter().map(|request| submit(&mut engine, request)).collect();
    engine.step(Instant::now()).unwrap();
    for (index, left) in [(0, 2), (2, 1), (1, 0)] {
        engine.cancel(submitted[index].id.unwrap());
        assert_eq!(engine.load().waiting, left);
        engine.check().unwrap();
    }
    run_to_end(&mut engine);
    assert!(submitted.iter().all(|submitted| submitted.output().started.is_none()));
    assert_eq!(engine.load().kv_used, 0);
}
