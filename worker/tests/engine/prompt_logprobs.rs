//! Log-probabilities of prompts: those of the logits, whatever is cached and computed beside.

use crate::harness::{
    Output, QUANT, Request, TINY, cramped, one_by_one, open, options, prompt, together, whole_matrix,
};
use crate::stages::Workers;
use engine::engine::Engine;
use kvasir_worker::load::EngineOptions;
use proto::message::{FinishReason, GenerateError, PromptLogprob};
use std::slice::from_ref;

const TOP: u8 = 3;

fn models() -> Vec<&'static str> {
    let all = TINY.into_iter().chain(QUANT);
    if whole_matrix() { all.collect() } else { vec![TINY[0], TINY[2], TINY[5], TINY[7], QUANT[0]] }
}

/// Bits of a log-probability, its rank, and the alternatives.
type Bits = (u32, u32, Vec<(u32, u32)>);

fn bits(logprobs: &[PromptLogprob]) -> Vec<Bits> {
    let top = |scored: &PromptLogprob| scored.top.iter().map(|(id, value)| (*id, value.to_bits())).collect();
    logprobs.iter().map(|scored| (scored.logprob.to_bits(), scored.rank, top(scored))).collect()
}

/// Compares log-probabilities with those of whole rows of logits.
fn assert_of_logits(scored: &[PromptLogprob], prompt: &[u32], logits: &Output, case: &str) {
    assert_eq!(scored.len(), prompt.len() - 1, "{case}");
    for (at, scored) in scored.iter().enumerate() {
        let row: Vec<f64> = logits.logits[&at].iter().map(|bits| f64::from(f32::from_bits(*bits))).collect();
        let max = row.iter().copied().fold(f64::MIN, f64::max);
        let log_sum = max + row.iter().map(|logit| (logit - max).exp()).sum::<f64>().ln();
        let logit = row[prompt[at + 1] as usize];
        let near = |value: f32, logit: f64| (f64::from(value) - (logit - log_sum)).abs() < 1e-5;
        assert!(near(scored.logprob, logit), "{case}: token {at}");
        assert_eq!(scored.rank as usize, 1 + row.iter().filter(|other| **other > logit).count(), "{case}");
        let mut best: Vec<usize> = (0..row.len()).collect();
        best.sort_by(|a, b| row[*b].total_cmp(&row[*a]).then(a.cmp(b)));
        assert_eq!(scored.top.len(), usize::from(TOP), "{case}");
        for ((id, value), expected) in scored.top.iter().zip(best) {
            assert!(*id as usize == expected && near(*value, row[expected]), "{case}: token {at}");
        }
    }
}

#[test]
fn they_depend_on_neither_cache_nor_batch_nor_chunks() {
    for model in models() {
        let prompts: Vec<Vec<u32>> = [(1, 150), (2, 70), (3, 2)].map(|(seed, len)| prompt(seed, len)).into();
        let whole: Vec<Request> = prompts.iter().map(|prompt| Request::greedy(prompt.clone(), 4)).collect();
        let scored: Vec<Request> = whole.iter().map(|request| request.clone().scored(TOP)).collect();
        let logits = one_by_one(&mut open(model, &options(model)), &whole);
        let alone = one_by_one(&mut open(model, &options(model)), &scored);
        for ((output, logits), prompt) in alone.iter().zip(&logits).zip(&prompts) {
            assert_of_logits(&output.prompt, prompt, logits, model);
            assert_eq!((&output.tokens, output.rows), (&logits.tokens, 0), "{model}");
        }
        let same = |outputs: &[Output], case: &str| {
            assert_eq!(outputs.len(), alone.len());
            for (output, alone) in outputs.iter().zip(&alone) {
                assert!(bits(&output.prompt) == bits(&alone.prompt), "{model}: {case}");
                assert_eq!((&output.tokens, output.cached()), (&alone.tokens, 0), "{model}: {case}");
            }
        };
        let mut engine = open(model, &options(model));
        one_by_one(&mut engine, &whole);
        same(&one_by_one(&mut engine, &scored), "cached prompts");
        let mixed: Vec<Request> = scored.iter().chain(&whole).chain(&scored).cloned().collect();
        let outputs = together(&mut engine, &mixed);
        same(&outputs[..3], "among others");
        same(&outputs[6..], "among equal prompts");
        // The blocks that such a request has computed serve later ones.
        let longer = Request::greedy([&prompts[0][..], &[9, 8]].concat(), 2);
        let filled = |request: &Request| {
            let mut engine = open(model, &options(model));
            one_by_one(&mut engine, from_ref(request));
            one_by_one(&mut engine, from_ref(&longer)).remove(0).cached()
        };
        assert_eq!(filled(&scored[0]), filled(&whole[0]), "{model}");
        let chunks = EngineOptions { chunk: Some(7), ..options(model) };
        same(&together(&mut open(model, &chunks), &scored), "chunks");
    }
}

#[test]
fn a_preempted_prompt_gives_each_of_them_once() {
    let mut preempted = Vec::new();
    for model in models() {
        let scored: Vec<Request> =
            (21..27).map(|seed| Request::greedy(prompt(seed, 40), 100).scored(TOP)).collect();
        let alone = one_by_one(&mut open(model, &options(model)), &scored);
        let options = EngineOptions { chunk: Some(8), ..options(model) };
        let options = cramped(model, &options, 140);
        let smallest = options.kv_bytes.unwrap();
        let preemptions = (4..40u64).find_map(|quarters| {
            let options = EngineOptions { kv_bytes: Some(smallest * quarters / 4), ..options.clone() };
            let outputs = together(&mut open(model, &options), &scored);
            for (output, alone) in outputs.iter().zip(&alone) {
                assert!(bits(&output.prompt) == bits(&alone.prompt), "{model}: {quarters} quarters");
                assert_eq!(output.tokens, alone.tokens, "{model}: {quarters} quarters");
            }
            Some(outputs.iter().map(Output::preemptions).sum::<u32>()).filter(|preempted| *preempted > 0)
        });
        preempted.extend(preemptions.map(|_| model));
    }
    // A sequence of narrow windows hardly grows.
    assert!(preempted.len() > 1, "{preempted:?}");
}

#[test]
fn a_request_may_want_nothing_else() {
    for model in models() {
        for len in [1, 2, 64, 130] {
            let whole = Request::greedy(prompt(4, len), 1).scored(TOP);
            let only = Request::greedy(prompt(4, len), 0).scored(TOP);
            let mut engine = open(model, &options(model));
            let outputs = together(&mut engine, &[only.clone(), only, whole]);
            for only in &outputs[..2] {
                assert_eq!(bits(&only.prompt), bits(&outputs[2].prompt), "{model}");
                let finished = only.finished.as_ref().unwrap();
                assert_eq!((finished.reason, finished.completion_tokens), (FinishReason::Length, 0));
                assert!(only.tokens.is_empty() && only.started.is_some(), "{model}");
            }
        }
    }
}

fn refused(engine: &mut Engine, request: Request) -> GenerateError {
    together(engine, from_ref(&request)).remove(0).failed.unwrap()
}

#[test]
fn what_cannot_be_served_is_refused_before_it_is_computed() {
    let mut engine = open(TINY[0], &options(TINY[0]));
    let field = |error: GenerateError| match error {
        GenerateError::InvalidField { field, .. } | GenerateError::Unsupported { field, .. } => field,
        other => panic!("{other:?}"),
    };
    let few = Request::greedy(prompt(1, 9), 2);
    assert_eq!(field(refused(&mut engine, few.clone().scored(21))), "prompt_logprobs");
    assert_eq!(field(refused(&mut engine, Request::greedy(prompt(1, 9), 0))), "max_tokens");
    let workers = Workers::start(TINY[0], 1, &options(TINY[0]));
    let mut engine = workers.engine(TINY[0], &options(TINY[0])).unwrap();
    let error = refused(&mut engine, few.scored(1));
    assert!(error.retryable(), "a worker with all layers can serve it: {error}");
    assert_eq!(field(error), "prompt_logprobs");
}
