//! A drafter at the last stage of a replica: its draft tokens change no bit, and equal those of one worker.

use crate::exactness::assert_same;
use crate::harness::{Output, Request, cramped, one_by_one, open, options, path, prompt, submit, together};
use crate::speculation::{counts, plain, requests};
use crate::stages::Workers;
use engine::engine::Engine;
use engine::kv_cache::BlockLayout;
use engine::speculation::SpeculativeMethod;
use kvasir_worker::Error;
use kvasir_worker::load::{self, EngineOptions};
use kvasir_worker::rank_server::StageConfig;
use model::shard::{ChunkId, Manifest, ShardStore};
use model::spec::AssistantSpec;
use model::{ModelFile, ModelSpec};
use pipeline::ShardCountError;
use pipeline::weight_distribution::ShippingConfig;
use proto::message::Sampling;
use proto::stage::StageFailure;
use std::collections::HashSet;
use std::path::PathBuf;
use std::time::{Duration, Instant};

const MODEL: &str = "tiny/gemma4/gemma4-f32";

fn drafter() -> PathBuf {
    path("tiny/gemma4-assistant/gemma4-assistant-f32")
}

fn drafting() -> EngineOptions {
    EngineOptions { speculative_method: SpeculativeMethod::Assistant(drafter()), ..options(MODEL) }
}

/// A replica of two stages with four draft tokens of each sequence.
fn over_two(workers: &Workers, options: &EngineOptions) -> Engine {
    workers.next_engine(MODEL, options).with_draft_len(4)
}

#[test]
fn draft_tokens_of_the_last_stage_change_no_bit() {
    let requests = requests();
    let expected = plain(MODEL, &requests);
    let tokens_only: Vec<Request> = requests.iter().cloned().map(Request::tokens_only).collect();
    let workers = Workers::start(MODEL, 1, &drafting());
    let run = |case: &str, at_once: bool, options: EngineOptions| {
        let mut engine = over_two(&workers, &options);
        let run = |engine: &mut Engine, requests: &[Request]| match at_once {
            true => together(engine, requests),
            false => one_by_one(engine, requests),
        };
        let mut all = Vec::new();
        // The second time from the prefix cache, if there is one.
        for _ in 0..2 {
            let got = run(&mut engine, &requests);
            assert_same(&format!("over two: {case}"), &expected, &got);
            engine.check().unwrap();
            all.extend(got);
        }
        // Sequences that are sampled at the last stage alone get draft tokens too.
        let got = run(&mut engine, &tokens_only);
        for (expected, got) in expected.iter().zip(&got) {
            assert_eq!(
                (&expected.tokens, &expected.text),
                (&got.tokens, &got.text),
                "over two: {case}, tokens only"
            );
        }
        let (drafted, accepted) = counts(&got);
        assert!(accepted > 0 && drafted > accepted, "{case}: {accepted} of {drafted}");
        all.extend(got);
        let (drafted, accepted) = counts(&all);
        let metrics = engine.metrics();
        assert_eq!(
            (metrics.drafted.get(), metrics.accepted.get()),
            (drafted.into(), accepted.into()),
            "{case}"
        );
        assert_eq!(engine.load().kv_used, 0, "{case}");
        all
    };
    let cached = |outputs: &[Output]| outputs.iter().map(Output::cached).sum::<usize>();
    let alone = run("alone", false, drafting());
    assert!(cached(&alone) > 0);
    assert!(cached(&run("eight at once", true, drafting())) > 0);
    run("chunks of 7", true, EngineOptions { chunk: Some(7), ..drafting() });
    run("no prefix cache", true, EngineOptions { prefix_cache: false, ..drafting() });
    run("no room for draft tokens", true, EngineOptions { max_rows: Some(9), ..drafting() });
    let scattered = BlockLayout::Permuted { seed: 5 };
    run("scattered", true, EngineOptions { block_layout: scattered, ..drafting() });
    // The smallest arenas in which sequences preempt each other.
    let cramped = cramped(MODEL, &drafting(), 140);
    let preempted = (4..12).any(|quarters| {
        let kv_bytes = cramped.kv_bytes.map(|bytes| bytes * quarters / 4);
        let outputs = run("preempted", true, EngineOptions { kv_bytes, ..cramped.clone() });
        outputs.iter().map(Output::preemptions).sum::<u32>() > 0
    });
    assert!(preempted);
}

#[test]
fn the_last_stage_drafts_like_one_worker() {
    let requests: Vec<Request> = requests().into_iter().map(Request::tokens_only).collect();
    let mut one = open(MODEL, &drafting()).with_draft_len(4);
    let workers = Workers::start(MODEL, 1, &drafting());
    let mut two = over_two(&workers, &drafting());
    for request in &requests {
        let request = std::slice::from_ref(request);
        let (expected, got) = (one_by_one(&mut one, request), one_by_one(&mut two, request));
        assert_eq!(counts(&got), counts(&expected));
    }
}

#[test]
fn seeded_draws_and_choices_are_the_same_with_a_drafter_at_the_last_stage() {
    let sampling = |seed| Sampling {
        temperature: 0.3,
        top_p: 0.95,
        presence_penalty: 0.1,
        logit_bias: vec![(17, 2.0)],
        seed,
        logprobs: Some(2),
        ..Sampling::default()
    };
    let seeded =
        |(seed, request): (u64, Request)| Request { sampling: sampling(seed), ..request.tokens_only() };
    let mut requests: Vec<Request> = (1..).zip(requests()).map(seeded).collect();
    // Several draws from the last row of one prompt.
    let chosen = requests[1].clone();
    requests.extend((20..23).map(|seed| Request { sampling: sampling(seed), together: 3, ..chosen.clone() }));
    let expected = plain(
        MODEL,
        &requests.iter().cloned().map(|request| Request { together: 1, ..request }).collect::<Vec<_>>(),
    );
    let workers = Workers::start(MODEL, 1, &drafting());
    let got = together(&mut over_two(&workers, &drafting()), &requests);
    for (expected, got) in expected.iter().zip(&got) {
        assert_eq!((&expected.tokens, &expected.logprobs), (&got.tokens, &got.logprobs));
    }
    let (drafted, accepted) = counts(&got);
    assert!(accepted > 0 && drafted > accepted, "{accepted} of {drafted}");
}

/// With its own choice it drafts where that pays, and the tokens are the same.
#[test]
fn the_choice_of_draft_length_over_stages_changes_no_token() {
    let requests = requests();
    let expected = plain(MODEL, &requests);
    let workers = Workers::start(MODEL, 1, &drafting());
    let mut engine = workers.next_engine(MODEL, &drafting());
    assert_same("what pays", &expected, &together(&mut engine, &requests));
    let tokens_only: Vec<Request> = requests.into_iter().map(Request::tokens_only).collect();
    for (expected, got) in expected.iter().zip(together(&mut engine, &tokens_only)) {
        assert_eq!(expected.tokens, got.tokens);
    }
}

#[test]
fn a_request_removed_while_the_stage_drafts_leaves_nothing() {
    let workers = Workers::start(MODEL, 1, &drafting());
    let mut engine = over_two(&workers, &drafting());
    let requests: Vec<Request> = requests().into_iter().map(Request::tokens_only).collect();
    let submitted: Vec<_> = requests.iter().map(|request| submit(&mut engine, request)).collect();
    for submitted in submitted.iter().step_by(2) {
        for _ in 0..5 {
            engine.step(Instant::now()).unwrap();
        }
        engine.cancel(submitted.id.unwrap());
        engine.check().unwrap();
    }
    while engine.has_work() {
        engine.step(Instant::now()).unwrap();
    }
    assert_eq!(engine.load().kv_used, 0);
}

#[test]
fn a_last_stage_that_is_lost_while_it_drafts_ends_the_replica() {
    let mut workers = Workers::start(MODEL, 1, &drafting());
    let mut engine = over_two(&workers, &drafting());
    let submitted = submit(&mut engine, &Request::greedy(prompt(1, 20), 400).tokens_only());
    while submitted.output().tokens.len() < 8 {
        engine.step(Instant::now()).unwrap();
    }
    assert!(engine.metrics().drafted.get() > 0);
    let service = workers.services.remove(0);
    workers.runtime.block_on(service.stop());
    let since = Instant::now();
    let error = loop {
        match engine.step(Instant::now()) {
            Ok(_) => assert!(since.elapsed() < 3 * Duration::from_secs(3), "nobody misses it"),
            Err(error) => break error,
        }
    };
    assert!(matches!(&error, engine::Error::StageLost(failure) if failure.stage == 1), "{error}");
}

/// Names of the chunks of some tensors of a file.
fn chunks(file: &ModelFile, tensors: &[&str]) -> HashSet<ChunkId> {
    let manifest = Manifest::of_file(file).unwrap();
    tensors.iter().flat_map(|name| manifest.chunks(name).unwrap().map(|chunk| chunk.id)).collect()
}

/// The last stage has no file. It fetches its layers and the drafter from a worker that has both, and has
/// them at the next start.
#[test]
fn a_drafter_is_fetched_once_from_another_worker() {
    let requests = requests();
    let expected = plain(MODEL, &requests);
    let tokens_only: Vec<Request> = requests.iter().cloned().map(Request::tokens_only).collect();
    let dir = tempfile::tempdir().unwrap();
    let store = ShardStore::open(dir.path().join("shards"), 1 << 30).unwrap();
    let mut workers = Workers::start(MODEL, 1, &drafting());
    let holder = workers.services[0].quic_address().to_string();
    // The second time there is no source.
    let mut stored = None;
    for (name, from) in [("fetches", vec![holder]), ("again", Vec::new())] {
        workers.leave(0);
        let config = StageConfig {
            model_path: None,
            shipping: ShippingConfig { store: Some(store.clone()), from, lanes: 1 },
            listen: "127.0.0.1:0".parse().unwrap(),
            engine: options(MODEL),
        };
        workers.add_as(0, name.to_owned(), config);
        let mut engine = over_two(&workers, &drafting());
        assert_same(name, &expected, &one_by_one(&mut engine, &requests));
        let got = one_by_one(&mut engine, &tokens_only);
        for (expected, got) in expected.iter().zip(&got) {
            assert_eq!((&expected.tokens, &expected.text), (&got.tokens, &got.text), "{name}");
        }
        let (drafted, accepted) = counts(&got);
        assert!(accepted > 0 && drafted > accepted, "{name}: {accepted} of {drafted}");
        assert!(engine.metrics().accepted.get() > 0, "{name}");
        let has = |chunk: &ChunkId| store.get(*chunk).unwrap().is_some();
        let file = ModelFile::open(drafter()).unwrap();
        let drafter = AssistantSpec::from_file(&file).unwrap();
        assert!(chunks(&file, &drafter.tensors()).iter().all(has), "{name}");
        let file = ModelFile::open(path(MODEL)).unwrap();
        let spec = ModelSpec::from_file(&file).unwrap();
        let elsewhere = chunks(&file, &spec.layer_tensors(0..1));
        assert!(!elsewhere.iter().any(has), "{name}: it has layers that are not its own");
        let bytes = store.bytes();
        assert_eq!(*stored.get_or_insert(bytes), bytes, "{name}");
        drop(engine);
        let service = workers.services.remove(0);
        workers.runtime.block_on(service.stop());
    }
}

#[test]
fn a_drafter_that_no_worker_has_is_refused() {
    let refusal = |stage: &EngineOptions, lead: &EngineOptions| {
        let workers = Workers::start(MODEL, 1, stage);
        let refused = workers.engine(MODEL, lead).err().unwrap();
        let Error::Engine(engine::Error::StageLost(lost)) = &refused else { panic!("{refused}") };
        let transport::Error::StageFailed(StageFailure::Load { reason }) = &lost.source else {
            panic!("{refused}")
        };
        reason.clone()
    };
    let none = refusal(&options(MODEL), &drafting());
    assert!(none.contains("this worker has none") && none.contains("--spec"), "{none}");
    // Another drafter of the same shape: the last byte is in a tensor.
    let folder = tempfile::tempdir().unwrap();
    let other = folder.path().join("other.gguf");
    let mut bytes = std::fs::read(drafter()).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&other, bytes).unwrap();
    let another = EngineOptions { speculative_method: SpeculativeMethod::Assistant(other), ..options(MODEL) };
    let another = refusal(&another, &drafting());
    assert!(another.contains("this worker has another"), "{another}");
    // With a model that the drafter does not fit, it is refused before any stage is contacted.
    let llama = "tiny/llama/llama-f32";
    let refused = load::check_shards(&path(llama), &drafting().speculative_method, 2).unwrap_err();
    assert!(matches!(refused, Error::Engine(engine::Error::Config { option: "spec", .. })), "{refused}");
    load::check_shards(&path(MODEL), &drafting().speculative_method, 2).unwrap();
    let refused = load::check_shards(&path(MODEL), &drafting().speculative_method, 3).unwrap_err();
    let shards = matches!(refused, Error::Shards(ShardCountError { shards: 3, most: 2 }));
    assert!(shards, "{refused}");
}
