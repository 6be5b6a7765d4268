//! Draft tokens change no bit: tokens, logits, texts and endings are those of computing one token at a time.

use crate::exactness::{assert_same, models, same_twice};
use crate::harness::{
    Output, Request, cramped, one_by_one, open, options, path, prompt, run_to_end, submit, together,
};
use crate::stages::{Workers, max_shards};
use engine::engine::Engine;
use engine::kv_cache::BlockLayout;
use engine::speculation::{Speculation, SpeculativeMethod};
use kvasir_worker::Error;
use kvasir_worker::load::{self, EngineOptions};
use proto::message::{FinishReason, Sampling, Stop};

const LLAMA: &str = "tiny/llama/llama-f32";
const GENERATE: u32 = 40;

/// Prompts with repetitions, so that there are always draft tokens, accepted or not.
pub(crate) fn requests() -> Vec<Request> {
    let repeated = |seed: u64, len: usize, times: usize| prompt(seed, len).repeat(times);
    let prompts = [
        repeated(1, 7, 2),
        repeated(2, 20, 3),
        [repeated(3, 30, 2), prompt(4, 3)].concat(),
        repeated(5, 45, 2),
        vec![9; 21],
        repeated(6, 16, 4),
        [prompt(7, 40), repeated(7, 11, 2)].concat(),
    ];
    let mut requests: Vec<Request> =
        prompts.into_iter().map(|prompt| Request::greedy(prompt, GENERATE)).collect();
    // Among three tokens some draft tokens are accepted with every model.
    let three = prompt(8, 60).iter().map(|token| 10 + token % 3).collect();
    let logit_bias = vec![(10, 100.0), (11, 100.0), (12, 100.0)];
    requests.push(Request {
        sampling: Sampling { logit_bias, ..Sampling::default() },
        ..Request::greedy(three, GENERATE)
    });
    requests
}

/// The result without draft tokens.
pub(crate) fn plain(model: &str, requests: &[Request]) -> Vec<Output> {
    one_by_one(&mut open(model, &EngineOptions { prefix_cache: false, ..options(model) }), requests)
}

fn drafting(model: &str, options: &EngineOptions, draft_len: u32) -> Engine {
    open(model, options).with_speculation(Speculation::ngram().always(draft_len))
}

/// (verified draft tokens, accepted draft tokens).
pub(crate) fn counts(outputs: &[Output]) -> (u32, u32) {
    let finished = outputs.iter().filter_map(|output| output.finished.as_ref());
    finished.fold((0, 0), |(all, right), finished| {
        (all + finished.drafted_tokens, right + finished.accepted_tokens)
    })
}

#[test]
fn draft_tokens_change_no_bit() {
    let mut preempted = 0;
    for model in models() {
        let requests = requests();
        let expected = plain(model, &requests);
        let (mut drafted, mut accepted) = (0, 0);
        let mut run = |case: &str, at_once: bool, draft_len: u32, options: EngineOptions| {
            let mut engine = drafting(model, &options, draft_len);
            let rounds = same_twice(&format!("{model}: {case}"), &mut engine, &requests, &expected, at_once);
            let (all, right) = counts(&rounds);
            (drafted, accepted) = (drafted + all, accepted + right);
            let metrics = engine.metrics();
            assert_eq!((metrics.drafted.get(), metrics.accepted.get()), (all.into(), right.into()), "{case}");
            assert_eq!(engine.load().kv_used, 0, "{model}: {case}");
            rounds.iter().map(Output::preemptions).sum::<u32>()
        };
        run("alone", false, 5, options(model));
        run("eight at once", true, 5, options(model));
        run("one draft token", true, 1, options(model));
        run("as many as can be", true, 64, options(model));
        run("chunks of 7", true, 5, EngineOptions { chunk: Some(7), ..options(model) });
        run("no room for draft tokens", true, 5, EngineOptions { max_rows: Some(9), ..options(model) });
        run("no prefix cache", true, 5, EngineOptions { prefix_cache: false, ..options(model) });
        let contiguous = EngineOptions { block_layout: BlockLayout::Contiguous, ..options(model) };
        run("contiguous", true, 5, contiguous);
        // Windows keep some models so small that all sequences fit.
        preempted += run("preempted", true, 5, cramped(model, &options(model), 140));
        assert!(accepted > 0 && drafted > accepted, "{model}: {accepted} of {drafted}");
    }
    assert!(preempted > 0);
}

#[test]
fn seeded_draws_are_the_same_with_draft_tokens() {
    let sampling = |seed| Sampling {
        temperature: 0.3,
        top_p: 0.95,
        repetition_penalty: 1.05,
        presence_penalty: 0.1,
        frequency_penalty: 0.02,
        logit_bias: vec![(17, 2.0), (18, -100.0)],
        seed,
        logprobs: Some(2),
        ..Sampling::default()
    };
    let few = |seed| Sampling { temperature: 0.2, top_k: 8, seed, ..Sampling::default() };
    let (mut drafted, mut accepted) = (0, 0);
    for model in models() {
        let all = requests();
        let seeded = |(seed, request): (u64, Request)| Request {
            sampling: if seed % 2 == 0 { few(seed) } else { sampling(seed) },
            ..request.tokens_only()
        };
        let requests: Vec<Request> = (1..).zip(all).map(seeded).collect();
        let expected = plain(model, &requests);
        let got = together(&mut drafting(model, &options(model), 6), &requests);
        for (expected, got) in expected.iter().zip(&got) {
            assert_eq!((&expected.tokens, &expected.logprobs), (&got.tokens, &got.logprobs), "{model}");
        }
        let (all, right) = counts(&got);
        (drafted, accepted) = (drafted + all, accepted + right);
    }
    assert!(accepted > 0 && drafted > accepted, "{accepted} of {drafted}");
}

/// Every cause of an ending ends the generation at the same token, and draft tokens after it have no effect.
#[test]
fn endings_are_found_among_draft_tokens() {
    for model in [LLAMA, "tiny/gemma3/gemma3-f32", "tiny/qwen35/qwen35-f32"] {
        for request in requests().into_iter().step_by(3).map(Request::tokens_only) {
            let whole = plain(model, std::slice::from_ref(&request)).remove(0);
            let text: Vec<char> = whole.text.chars().collect();
            let half: String = text[text.len() / 2..].iter().take(2).collect();
            let mut stops: Vec<Stop> = (1..GENERATE)
                .step_by(5)
                .map(|max_tokens| Stop { max_tokens, ignore_eos: true, ..Stop::default() })
                .collect();
            let token_ids = vec![whole.tokens[whole.tokens.len() / 2]];
            let stop = Stop { max_tokens: GENERATE, ignore_eos: true, ..Stop::default() };
            stops.push(Stop { token_ids: token_ids.clone(), ..stop.clone() });
            stops.push(Stop { token_ids, min_tokens: GENERATE / 2 + 3, ..stop.clone() });
            stops.push(Stop { strings: vec![half], ..stop });
            for stop in stops {
                let request = Request { stop, ..request.clone() };
                let expected = plain(model, std::slice::from_ref(&request)).remove(0);
                let mut engine = drafting(model, &options(model), 7);
                let got = one_by_one(&mut engine, std::slice::from_ref(&request)).remove(0);
                let end = |output: &Output| {
                    let finished = output.finished.clone().unwrap();
                    (finished.reason, finished.matched, finished.completion_tokens)
                };
                assert_eq!(
                    (&got.tokens, &got.text, end(&got)),
                    (&expected.tokens, &expected.text, end(&expected))
                );
                engine.check().unwrap();
                // The cache afterwards is the one without draft tokens.
                let mut without = open(model, &options(model));
                one_by_one(&mut without, std::slice::from_ref(&request));
                let longer = Request::greedy([&request.prompt[..], &expected.tokens, &[1, 2, 3]].concat(), 1);
                let cached =
                    |engine: &mut Engine| one_by_one(engine, std::slice::from_ref(&longer))[0].cached();
                assert_eq!(cached(&mut engine), cached(&mut without), "{model}");
            }
        }
    }
}

#[test]
fn choices_and_attempts_continue_with_draft_tokens() {
    for model in [LLAMA, "tiny/gemma4/gemma4-f32", "tiny/granitehybrid/granitehybrid-f32"] {
        let request = requests().remove(1).tokens_only();
        let choice = |seed| Request {
            sampling: Sampling { temperature: 0.7, seed, ..Sampling::default() },
            together: 3,
            ..request.clone()
        };
        let choices: Vec<Request> = (1..4).map(choice).collect();
        let expected = plain(
            model,
            &choices.iter().cloned().map(|request| Request { together: 1, ..request }).collect::<Vec<_>>(),
        );
        let got = together(&mut drafting(model, &options(model), 5), &choices);
        for (expected, got) in expected.iter().zip(&got) {
            assert_eq!(expected.tokens, got.tokens, "{model}");
        }
        for (choice, expected) in choices.iter().zip(&expected) {
            let resumed = Request { emitted: expected.tokens[..17].to_vec(), together: 1, ..choice.clone() };
            let rest = one_by_one(&mut drafting(model, &options(model), 5), &[resumed]).remove(0);
            assert_eq!(rest.tokens, expected.tokens[17..], "{model}");
            assert_eq!(rest.finished.unwrap().reason, FinishReason::Length);
        }
    }
}

#[test]
fn a_request_removed_with_draft_tokens_in_flight_leaves_nothing() {
    for model in models() {
        let mut engine = drafting(model, &options(model), 5);
        let submitted: Vec<_> = requests().iter().map(|request| submit(&mut engine, request)).collect();
        for submitted in submitted.iter().step_by(2) {
            for _ in 0..3 {
                engine.step(std::time::Instant::now()).unwrap();
            }
            engine.cancel(submitted.id.unwrap());
            engine.check().unwrap();
        }
        run_to_end(&mut engine);
        assert_eq!(engine.load().kv_used, 0, "{model}");
    }
}

#[test]
fn two_stages_verify_draft_tokens_too() {
    for model in models().filter(|model| max_shards(model) >= 2) {
        let requests = requests();
        let expected = plain(model, &requests);
        let workers = Workers::start(model, 1, &options(model));
        let mut engine =
            workers.next_engine(model, &options(model)).with_speculation(Speculation::ngram().always(5));
        let got = together(&mut engine, &requests);
        assert_same(&format!("{model} over two"), &expected, &got);
        let tokens: Vec<Request> = requests.into_iter().map(Request::tokens_only).collect();
        let got = together(&mut engine, &tokens);
        let same = expected.iter().zip(&got).all(|(expected, got)| expected.tokens == got.tokens);
        assert!(same, "{model} over two, tokens only");
        assert!(counts(&got).1 > 0, "{model}");
    }
}

/// With its own choice it drafts where that pays, and the tokens are the same.
#[test]
fn the_choice_of_draft_length_changes_no_token() {
    for model in models() {
        let requests = requests();
        let expected = plain(model, &requests);
        let mut engine = open(model, &options(model)).with_speculation(Speculation::ngram());
        assert_same(model, &expected, &together(&mut engine, &requests));
    }
}

/// Tokens drawn from rows of draft tokens have the model's distribution. Over many seeds the second token,
/// which was drafted, and the tokens after accepted or rejected draft tokens have the same frequencies as
/// with one token at a time.
#[test]
fn drawn_tokens_keep_their_distribution() {
    const SEEDS: u64 = 3000;
    const TOKENS: usize = 6;
    // Three tokens, so that all runs of them have occurred before.
    let text: Vec<u32> = prompt(3, 60).iter().map(|token| 10 + token % 3).collect();
    let request = |seed| Request {
        sampling: Sampling {
            temperature: 1.0,
            logit_bias: vec![(10, 100.0), (11, 100.0), (12, 100.0)],
            seed,
            ..Sampling::default()
        },
        ..Request::greedy(text.clone(), TOKENS as u32).tokens_only()
    };
    let draws = |engine: &mut Engine, seeds: std::ops::Range<u64>| {
        let requests: Vec<Request> = seeds.map(request).collect();
        let outputs: Vec<Output> =
            requests.chunks(200).flat_map(|requests| together(engine, requests)).collect();
        let all = counts(&outputs);
        (outputs.into_iter().map(|output| output.tokens).collect::<Vec<_>>(), all)
    };
    let (with_drafts, (drafted, accepted)) = draws(&mut drafting(LLAMA, &options(LLAMA), 3), 0..SEEDS);
    let (plain, _) = draws(&mut open(LLAMA, &options(LLAMA)), SEEDS..2 * SEEDS);
    assert!(accepted > 100 && drafted - accepted > 100, "{accepted} of {drafted}");
    for at in 0..TOKENS {
        let mut cells: std::collections::BTreeMap<u32, [f64; 2]> = Default::default();
        for (which, draws) in [&with_drafts, &plain].into_iter().enumerate() {
            draws.iter().for_each(|tokens| cells.entry(tokens[at]).or_default()[which] += 1.0);
        }
        // Rare tokens are counted together.
        let (rare, mut often): (Vec<_>, Vec<_>) = cells.into_values().partition(|[a, b]| a + b < 20.0);
        often.push(rare.into_iter().fold([0.0; 2], |sum, cell| [sum[0] + cell[0], sum[1] + cell[1]]));
        often.retain(|[a, b]| a + b > 0.0);
        // Chi squared of two samples of the same size.
        let chi: f64 = often.iter().map(|[a, b]| (a - b) * (a - b) / (a + b)).sum();
        let freedom = (often.len() - 1) as f64;
        // 4.5 standard deviations of the chi-squared distribution.
        assert!(chi < freedom + 4.5 * (2.0 * freedom).sqrt() + 5.0, "token {at}: {chi} of {freedom}");
    }
}

const Q4: &str = "quant/qwen3-q/qwen3-q-q4_k_m";

/// Models and their drafters.
fn drafters() -> [(&'static str, SpeculativeMethod); 3] {
    let assistant = SpeculativeMethod::Assistant(path("tiny/gemma4-assistant/gemma4-assistant-f32"));
    [
        ("tiny/gemma4/gemma4-f32", assistant),
        (LLAMA, SpeculativeMethod::Model(path(LLAMA))),
        (Q4, SpeculativeMethod::Model(path("quant/qwen3-q/qwen3-q-q8_0"))),
    ]
}

#[test]
fn drafters_change_no_bit() {
    for (model, speculative_method) in drafters() {
        let requests = requests();
        let expected = plain(model, &requests);
        let (mut drafted, mut accepted) = (0, 0);
        let mut run = |case: &str, at_once: bool, options: EngineOptions| {
            let mut engine =
                open(model, &EngineOptions { speculative_method: speculative_method.clone(), ..options })
                    .with_draft_len(4);
            for _ in 0..2 {
                let got = if at_once {
                    together(&mut engine, &requests)
                } else {
                    one_by_one(&mut engine, &requests)
                };
                assert_same(&format!("{model}, {speculative_method:?}: {case}"), &expected, &got);
                engine.check().unwrap();
                // The last request has a logit bias, which no drafter takes into account.
                let (all, right) = counts(&got[..got.len() - 1]);
                (drafted, accepted) = (drafted + all, accepted + right);
            }
            assert_eq!(engine.load().kv_used, 0, "{model}: {case}");
        };
        run("alone", false, options(model));
        run("eight at once", true, options(model));
        run("chunks of 7", true, EngineOptions { chunk: Some(7), ..options(model) });
        run("contiguous", true, EngineOptions { block_layout: BlockLayout::Contiguous, ..options(model) });
        run("preempted", true, cramped(model, &options(model), 140));
        assert!(accepted > 0, "{model}");
        // A model's own draft tokens are always accepted.
        let same =
            matches!(&speculative_method, SpeculativeMethod::Model(drafter) if *drafter == path(model));
        assert_eq!(drafted == accepted, same, "{model}: {accepted} of {drafted}");
    }
}

/// Through the engine the assistant's draft tokens are accepted as often as in the reference.
#[test]
fn the_assistants_acceptance_equals_the_references() {
    let text = std::fs::read_to_string(path("tiny/gemma4-assistant/ref").with_extension("json")).unwrap();
    let reference: serde_json::Value = serde_json::from_str(&text).unwrap();
    let (model, speculative_method) = drafters().into_iter().next().unwrap();
    for (ids, rounds) in
        reference["prompts"].as_array().unwrap().iter().zip(reference["rounds"].as_array().unwrap())
    {
        let prompt: Vec<u32> = serde_json::from_value(ids.clone()).unwrap();
        let rounds = rounds.as_array().unwrap();
        let accepted: u64 = rounds.iter().map(|round| round["accepted"].as_u64().unwrap()).sum();
        // The token after the prompt, and the tokens of all rounds.
        let tokens = 1 + rounds.len() as u32 + accepted as u32;
        let options = EngineOptions { speculative_method: speculative_method.clone(), ..options(model) };
        // Room for four draft tokens in the last round too.
        let request = Request::greedy(prompt, tokens + 4).tokens_only();
        let mut engine = open(model, &options).with_draft_len(4);
        let submitted = submit(&mut engine, &request);
        while (submitted.output().tokens.len() as u32) < tokens {
            engine.step(std::time::Instant::now()).unwrap();
        }
        assert_eq!(submitted.output().tokens.len() as u32, tokens, "a round ends there");
        let metrics = engine.metrics();
        let counted = (metrics.drafts.get(), metrics.drafted.get(), metrics.accepted.get());
        assert_eq!(counted, (rounds.len() as u64, 4 * rounds.len() as u64, accepted));
    }
}

#[test]
fn drafters_that_cannot_serve_are_refused() {
    let refused = |model: &str, speculative_method: SpeculativeMethod| {
        let options = EngineOptions { speculative_method, ..options(model) };
        let loaded = load::open(&path(model), &options, &mut |_, _| {});
        match loaded.map(drop) {
            Err(Error::Engine(engine::Error::Config { option: "spec", reason })) => reason,
            other => panic!("{model}: {other:?}"),
        }
    };
    let other = refused(LLAMA, SpeculativeMethod::Model(path("tiny/gemma3/gemma3-f32")));
    assert!(other.contains("vocabulary"), "{other}");
    let hybrid = "tiny/qwen35/qwen35-f32";
    let recurrent = refused(hybrid, SpeculativeMethod::Model(path(hybrid)));
    assert!(recurrent.contains("recurrent"), "{recurrent}");
}
