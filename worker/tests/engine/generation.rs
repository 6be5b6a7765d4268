//! How requests end, and what happens to other requests.

use crate::harness::{
    Output, QUANT, Request, Submitted, TINY, one_by_one, open, options, prompt, run_to_end, submit,
    submit_at, together,
};
use engine::engine::{EngineRequest, StepOutcome};
use kvasir_worker::load::EngineOptions;
use proto::block::BlockId;
use proto::message::{FinishReason, GenerateError, GenerateFrame, Sampling, Stop, TenantShare};
use std::time::{Duration, Instant};

const LLAMA: &str = TINY[0];

fn reason(output: &Output) -> FinishReason {
    output.finished.as_ref().unwrap().reason
}

/// Sampling with every filter and penalty.
fn seeded(seed: u64) -> Sampling {
    Sampling {
        temperature: 0.9,
        top_k: 50,
        top_p: 0.95,
        min_p: 0.01,
        repetition_penalty: 1.1,
        presence_penalty: 0.2,
        frequency_penalty: 0.1,
        logit_bias: vec![(17, 2.0), (18, -100.0)],
        seed,
        seeded: true,
        logprobs: Some(3),
    }
}

fn sampled(seed: u64, len: usize, tokens: u32) -> Request {
    Request { sampling: seeded(seed), ..Request::greedy(prompt(seed, len), tokens).tokens_only() }
}

#[test]
fn asking_for_logits_changes_no_token() {
    for model in TINY.into_iter().chain(QUANT) {
        let requests: Vec<Request> = (1..5).map(|seed| Request::greedy(prompt(seed, 30), 20)).collect();
        let with = together(&mut open(model, &options(model)), &requests);
        let tokens_only: Vec<Request> = requests.into_iter().map(Request::tokens_only).collect();
        let without = together(&mut open(model, &options(model)), &tokens_only);
        for (with, without) in with.iter().zip(&without) {
            assert_eq!(with.tokens, without.tokens, "{model}");
            assert_eq!(without.rows, 0, "{model}: nobody asked for logits");
        }
    }
}

#[test]
fn a_seed_gives_the_same_tokens_in_any_batch() {
    let requests: Vec<Request> = (1..7).map(|seed| sampled(seed, 25, 30)).collect();
    let alone = one_by_one(&mut open(LLAMA, &options(LLAMA)), &requests);
    let cramped = EngineOptions { chunk: Some(7), max_sequences: Some(4), ..options(LLAMA) };
    let crowd = together(&mut open(LLAMA, &cramped), &requests);
    for (alone, crowd) in alone.iter().zip(&crowd) {
        assert_eq!(alone.tokens, crowd.tokens);
        assert_eq!(alone.logprobs, crowd.logprobs);
        assert_eq!(alone.logprobs.len(), 30);
        assert!(alone.logprobs.iter().all(|draw| draw.top.len() == 3 && draw.chosen <= 0.0));
        assert!(!alone.tokens.contains(&18), "its bias forbids it");
    }
    let other = Request { sampling: seeded(99), ..requests[0].clone() };
    assert_ne!(one_by_one(&mut open(LLAMA, &options(LLAMA)), &[other])[0].tokens, alone[0].tokens);
}

#[test]
fn a_request_continues_where_an_earlier_attempt_stopped() {
    for model in TINY.into_iter().chain(QUANT) {
        for request in [sampled(3, 40, 24), Request::greedy(prompt(4, 40), 24).tokens_only()] {
            let whole =
                one_by_one(&mut open(model, &options(model)), std::slice::from_ref(&request)).remove(0);
            assert_eq!(whole.tokens.len(), 24);
            for sent in [1, 9, 23] {
                let resumed = Request { emitted: whole.tokens[..sent].to_vec(), ..request.clone() };
                let rest = one_by_one(&mut open(model, &options(model)), &[resumed]).remove(0);
                assert_eq!(rest.tokens, whole.tokens[sent..], "{model}, resumed after {sent}");
                let finished = rest.finished.unwrap();
                assert_eq!((finished.reason, finished.completion_tokens), (FinishReason::Length, 24));
            }
        }
    }
}

/// The attempt that sent the last token was cut off before the end frame.
#[test]
fn a_request_that_lacks_only_its_end_frame_gets_it() {
    let mut engine = open(LLAMA, &options(LLAMA));
    let request = sampled(3, 40, 24).tokens_only();
    let whole = one_by_one(&mut engine, std::slice::from_ref(&request)).remove(0);
    let stopping =
        |stop: Stop| Request { stop: Stop { max_tokens: 24, ignore_eos: true, ..stop }, ..request.clone() };
    let text = whole.text.chars().skip(whole.text.chars().count() / 2).take(3).collect::<String>();
    for request in [
        request.clone(),
        stopping(Stop { token_ids: vec![whole.tokens[9]], ..Stop::default() }),
        stopping(Stop { strings: vec![text], ..Stop::default() }),
    ] {
        let whole = one_by_one(&mut engine, std::slice::from_ref(&request)).remove(0);
        let before = engine.metrics().prompt_tokens.get();
        let all = Request { emitted: whole.tokens.clone(), ..request.clone() };
        let submitted = submit(&mut engine, &all);
        assert!(submitted.id.is_none() && !engine.has_work(), "there is nothing to compute");
        let (end, output) = (whole.finished.unwrap(), submitted.output());
        assert!(output.started.is_some() && output.tokens.is_empty());
        let finished = output.finished.unwrap();
        assert_eq!(
            (finished.reason, finished.matched, finished.tail, finished.completion_tokens),
            (end.reason, end.matched, end.tail, end.completion_tokens)
        );
        assert_eq!(engine.metrics().prompt_tokens.get(), before);
    }
    let more = Request { emitted: [&whole.tokens[..], &[5]].concat(), ..request };
    let refused = submit(&mut engine, &more).output().failed;
    assert!(matches!(refused, Some(GenerateError::InvalidField { field, .. }) if field == "emitted"));
}

#[test]
fn a_cancelled_request_frees_its_blocks_within_a_step() {
    let mut engine = open(LLAMA, &options(LLAMA));
    let stays = submit(&mut engine, &Request::greedy(prompt(1, 40), 40));
    engine.step(Instant::now()).unwrap();
    let before = engine.load().kv_used;
    // One in the middle of its prompt and one that has drawn tokens.
    let long = submit(&mut engine, &Request::greedy(prompt(2, 300), 40));
    let short = submit(&mut engine, &Request::greedy(prompt(3, 20), 40));
    engine.step(Instant::now()).unwrap();
    engine.step(Instant::now()).unwrap();
    assert!(long.output().started.is_none() && short.output().started.is_some());
    assert!(engine.load().kv_used > before);
    engine.cancel(long.id.unwrap());
    engine.cancel(short.id.unwrap());
    let holds_one_sequence = |engine: &engine::engine::Engine| {
        // At most 40 + 40 positions.
        let block: u64 = engine.decoder().groups().iter().map(|group| group.block_bytes as u64).sum();
        engine.load().kv_used <= 5 * block
    };
    assert!(holds_one_sequence(&engine));
    assert_eq!(engine.load().running, 1);
    run_to_end(&mut engine);
    assert_eq!(reason(&stays.output()), FinishReason::Length);
    assert!(long.output().finished.is_none() && short.output().finished.is_none());
    assert_eq!(engine.load().kv_used, 0);
}

#[test]
fn a_request_without_a_receiver_is_cancelled() {
    let mut engine = open(LLAMA, &options(LLAMA));
    let mut tokens = 0;
    let request = EngineRequest {
        name: None,
        root: BlockId([7; 16]),
        adapter: None,
        tenant: TenantShare { tenant: 1, weight: 1 },
        prompt: prompt(1, 20),
        images: Vec::new(),
        emitted: Vec::new(),
        prompt_logprobs: None,
        sampling: Sampling::default(),
        stop: Stop { max_tokens: 400, ignore_eos: true, ..Stop::default() },
        deadline: None,
        pull: None,
        together: 1,
        guide: None,
        sink: Box::new(move |frame: GenerateFrame| {
            tokens += usize::from(matches!(frame, GenerateFrame::Tokens(_)));
            tokens < 3
        }),
    };
    engine.submit(Instant::now(), request);
    run_to_end(&mut engine);
    assert_eq!(engine.load().tokens, 3);
    assert_eq!(engine.load().kv_used, 0);
}

#[test]
fn stop_tokens_stop_strings_and_minimum_lengths_are_kept() {
    let mut engine = open(LLAMA, &options(LLAMA));
    let free = Request::greedy(prompt(8, 30), 40).tokens_only();
    let whole = one_by_one(&mut engine, std::slice::from_ref(&free)).remove(0);
    let mut generate = |stop: Stop| {
        let stop = Stop { max_tokens: 40, ignore_eos: true, ..stop };
        one_by_one(&mut engine, &[Request { stop, ..free.clone() }]).remove(0)
    };

    // The first token that has not occurred before its position.
    let (at, token) = whole
        .tokens
        .iter()
        .copied()
        .enumerate()
        .skip(3)
        .find(|(at, token)| !whole.tokens[..*at].contains(token))
        .unwrap();
    let stopped = generate(Stop { token_ids: vec![token], ..Stop::default() });
    assert_eq!(reason(&stopped), FinishReason::Stop);
    assert_eq!(stopped.tokens, whole.tokens[..=at]);
    assert_eq!(stopped.finished.unwrap().completion_tokens, at as u32 + 1);

    // Not before `min_tokens`: until then it cannot be drawn.
    let min_tokens = at as u32 + 4;
    let delayed = generate(Stop { token_ids: vec![token], min_tokens, ..Stop::default() });
    assert_eq!(delayed.tokens[..at], whole.tokens[..at]);
    assert!(delayed.tokens.len() >= min_tokens as usize);
    assert!(!delayed.tokens[..min_tokens as usize].contains(&token));

    // Three characters from the middle of the text.
    let text: Vec<char> = whole.text.chars().collect();
    let stop_string: String = text[text.len() / 2..][..3].iter().collect();
    let cut = generate(Stop { strings: vec![stop_string.clone()], ..Stop::default() });
    assert_eq!(cut.text, whole.text[..whole.text.find(&stop_string).unwrap()]);
    let finished = cut.finished.unwrap();
    assert_eq!((finished.reason, finished.matched), (FinishReason::Stop, Some(stop_string)));

    let never = generate(Stop { strings: vec!["\u{1F980} not in any text".to_owned()], ..Stop::default() });
    assert_eq!((never.text.as_str(), reason(&never)), (whole.text.as_str(), FinishReason::Length));
}

#[test]
fn only_a_late_request_ends_at_its_deadline() {
    let mut engine = open(LLAMA, &options(LLAMA));
    let now = Instant::now();
    let request = Request::greedy(prompt(1, 30), 200).tokens_only();
    let expired = submit_at(&mut engine, &request, now, Some(Duration::from_secs(5)));
    let timely = submit_at(&mut engine, &request, now, Some(Duration::from_secs(500)));
    engine.step(now + Duration::from_millis(4999)).unwrap();
    assert_eq!(expired.output().failed, None);
    engine.step(now + Duration::from_secs(5)).unwrap();
    assert_eq!(expired.output().failed, Some(GenerateError::DeadlineExceeded { after_ms: 5000 }));
    assert_eq!(engine.load().running, 1);
    while engine.has_work() {
        assert_ne!(engine.step(now + Duration::from_secs(6)).unwrap(), StepOutcome::Idle);
    }
    assert_eq!(timely.output().tokens.len(), 200);
    assert_eq!(engine.load().kv_used, 0);
}

/// Invalid requests fail alone: the logits of the others are those of a run without them.
#[test]
fn sec_poison_request() {
    let good: Vec<Request> =
        (1..8).map(|seed| Request::greedy(prompt(seed, 20 + seed as usize), 16)).collect();
    let expected = one_by_one(&mut open(LLAMA, &options(LLAMA)), &good);
    let fine = good[0].clone();
    let bad = |change: &dyn Fn(&mut Request)| {
        let mut request = fine.clone();
        change(&mut request);
        request
    };
    let wrong = [
        ("prompt", bad(&|request| request.prompt[3] = 448)),
        ("prompt", bad(&|request| request.prompt[0] = u32::MAX)),
        ("prompt", bad(&|request| request.prompt.clear())),
        ("prompt", bad(&|request| request.emitted = vec![1 << 30])),
        ("max_tokens", bad(&|request| request.stop.max_tokens = 0)),
        ("temperature", bad(&|request| request.sampling.temperature = f32::NAN)),
        ("top_p", bad(&|request| request.sampling.top_p = 0.0)),
        ("logit_bias", bad(&|request| request.sampling.logit_bias = vec![(448, 1.0)])),
        ("stop", bad(&|request| request.stop.strings = vec![String::new()])),
        ("context", bad(&|request| request.prompt = prompt(1, 600))),
    ];
    let mut engine = open(LLAMA, &options(LLAMA));
    for (field, wrong) in &wrong {
        let submitted: Vec<Submitted> =
            good[..3].iter().map(|request| submit(&mut engine, request)).collect();
        let refused = submit(&mut engine, wrong);
        let more: Vec<Submitted> = good[3..].iter().map(|request| submit(&mut engine, request)).collect();
        assert_eq!(refused.id, None, "{field}");
        match refused.output().failed.unwrap() {
            GenerateError::InvalidField { field: named, .. } => assert_eq!(named, *field),
            GenerateError::ContextLength { need: 601, limit: 512 } => assert_eq!(*field, "context"),
            other => panic!("{field}: {other}"),
        }
        run_to_end(&mut engine);
        for (expected, got) in expected.iter().zip(submitted.iter().chain(&more).map(Submitted::output)) {
            assert_eq!(expected.tokens, got.tokens, "{field}");
            assert!(got.logits.iter().all(|(position, row)| *row == expected.logits[position]), "{field}");
        }
        assert_eq!(engine.load().kv_used, 0, "{field}");
    }
}

#[test]
fn a_completion_ends_at_the_context_limit() {
    let short = EngineOptions { max_model_len: Some(48), ..options(LLAMA) };
    let mut engine = open(LLAMA, &short);
    let output = one_by_one(&mut engine, &[Request::greedy(prompt(1, 40), 100)]).remove(0);
    assert_eq!((reason(&output), output.tokens.len()), (FinishReason::Length, 8));
}

#[test]
fn weights_take_little_more_memory_than_their_file() {
    let files = ["q8_0", "q4_k_m", "nvfp4"].map(|ty| format!("quant/qwen3-q/qwen3-q-{ty}"));
    // In folders vectors are BF16, and models so small have more of them than others.
    let tiny = TINY.into_iter().filter(|model| !model.starts_with("hf/"));
    for model in files.iter().map(String::as_str).chain(tiny).chain(QUANT) {
        let engine = open(model, &options(model));
        let (held, file) = (engine.decoder().backend().memory().weights, engine.decoder().source_bytes());
        assert!(held * 10 <= file * 11, "{model}: {held} bytes for {file} in the file");
        assert_eq!(engine.metrics().weight_bytes.get(), held as i64);
    }
}
