//! Models over several workers: the same bits as in one, and a failed stage fails the replica.

use crate::exactness::{assert_same, models, requests, undisturbed};
use crate::harness::{Output, Request, cramped, one_by_one, open, options, path, prompt, submit, together};
use engine::engine::{Engine, StepOutcome};
use engine::kv_cache::BlockLayout;
use engine::telemetry::StageLabel;
use kvasir_worker::Error;
use kvasir_worker::load::{self, EngineOptions};
use kvasir_worker::rank_server::{StageConfig, StageService};
use model::ModelFile;
use model::spec::ModelSpec;
use pipeline::weight_distribution::ShippingConfig;
use pipeline::{Replica, ShardCountError};
use pki::Identity;
use pki::ca::Authority;
use proto::ids::{ClusterName, NodeId, Role};
use proto::message::{Sampling, Stop};
use proto::stage::{ActivationType, StageAddress, StageFailure};
use std::time::{Duration, Instant, SystemTime};
use tokio::runtime::Runtime;

/// Workers that serve stages, and the identity and runtime to connect to them.
pub(crate) struct Workers {
    pub(crate) runtime: Runtime,
    ca: Authority,
    pub(crate) services: Vec<StageService>,
    addresses: Vec<StageAddress>,
}

fn identity(ca: &Authority, name: &str) -> Identity {
    ca.issue(Role::Worker, NodeId::new(name).unwrap(), SystemTime::now()).unwrap().identity().unwrap()
}

impl Workers {
    pub(crate) fn start(model: &str, count: usize, engine: &EngineOptions) -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let ca = Authority::new(ClusterName::new("c").unwrap(), SystemTime::now()).unwrap();
        let mut workers = Self { runtime, ca, services: Vec::new(), addresses: Vec::new() };
        (0..count).for_each(|index| workers.add(index, format!("w{}", index + 1), model, engine));
        workers
    }

    fn add(&mut self, index: usize, name: String, model: &str, engine: &EngineOptions) {
        let config = StageConfig {
            model_path: Some(path(model)),
            shipping: ShippingConfig::default(),
            listen: "127.0.0.1:0".parse().unwrap(),
            engine: engine.clone(),
        };
        self.add_as(index, name, config);
    }

    /// Adds a worker for one more stage, with this configuration.
    pub(crate) fn add_as(&mut self, index: usize, name: String, config: StageConfig) {
        let _entered = self.runtime.enter();
        let service = StageService::start(config, &identity(&self.ca, &name)).unwrap();
        let quic = service.quic_address().to_string();
        self.addresses.insert(index, StageAddress { node: NodeId::new(name).unwrap(), quic });
        self.services.insert(index, service);
    }

    /// Removes a worker from the stages, whether it has stopped or not.
    pub(crate) fn leave(&mut self, index: usize) {
        self.addresses.remove(index);
    }

    /// Replaces a stopped worker by another one.
    pub(crate) fn replace(&mut self, index: usize, model: &str) {
        self.leave(index);
        self.add(index, format!("other{index}"), model, &options(model));
    }

    fn replica(&self, activations: ActivationType) -> Replica {
        let own = identity(&self.ca, "w0");
        Replica::new(self.runtime.handle().clone(), &own, self.addresses.clone(), activations).unwrap()
    }

    pub(crate) fn engine(&self, model: &str, options: &EngineOptions) -> Result<Engine, Error> {
        self.engine_over(model, options, ActivationType::F32)
    }

    fn engine_over(
        &self,
        model: &str,
        options: &EngineOptions,
        activations: ActivationType,
    ) -> Result<Engine, Error> {
        let replica = self.replica(activations);
        let loaded = load::open_replica(&path(model), options, replica, &mut |_, _| {})?;
        Ok(loaded.engine)
    }

    /// Like [`Self::engine`], after the stages have noticed that the previous replica has ended.
    pub(crate) fn next_engine(&self, model: &str, options: &EngineOptions) -> Engine {
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            match self.engine(model, options) {
                Ok(engine) => return engine,
                Err(error) if is_busy(&error) && Instant::now() < deadline => {
                    std::thread::yield_now();
                }
                Err(error) => panic!("{model}: {error}"),
            }
        }
    }
}

fn is_busy(error: &Error) -> bool {
    let busy = |error: &_| matches!(error, transport::Error::StageFailed(StageFailure::Busy));
    matches!(error, Error::Engine(engine::Error::StageLost(lost)) if busy(&lost.source))
}

pub(crate) fn max_shards(model: &str) -> usize {
    ModelSpec::from_file(&ModelFile::open(path(model)).unwrap()).unwrap().cut_points().len() + 1
}

#[test]
fn two_and_three_stages_change_no_bit() {
    let mut max_seen = 0;
    for model in models() {
        let requests = requests();
        let expected = undisturbed(model, &requests);
        let max_shards = max_shards(model).min(3);
        max_seen = max_seen.max(max_shards);
        for shards in 2..=max_shards {
            let workers = Workers::start(model, shards - 1, &options(model));
            let run = |case: &str, at_once: bool, options: EngineOptions| {
                let mut engine = workers.next_engine(model, &options);
                let got = if at_once {
                    together(&mut engine, &requests)
                } else {
                    one_by_one(&mut engine, &requests)
                };
                assert_same(&format!("{model} over {shards}: {case}"), &expected, &got);
                // Again: from the prefix cache, and with the state that it kept.
                let hits = one_by_one(&mut engine, &requests);
                assert_same(&format!("{model} over {shards}: {case}, again"), &expected, &hits);
                hits.iter().map(Output::cached).sum::<usize>()
            };
            run("whole prompts", false, EngineOptions { chunk: Some(0), ..options(model) });
            let hits = run("chunks of 7, together", true, EngineOptions { chunk: Some(7), ..options(model) });
            assert!(hits > 0, "{model}: prefix hits");
            let scattered = BlockLayout::Permuted { seed: 5 };
            run("scattered", true, EngineOptions { block_layout: scattered, ..options(model) });
            let narrow = EngineOptions { prefix_cache: false, chunk: Some(16), ..options(model) };
            run("no prefix cache", true, narrow);
        }
    }
    assert_eq!(max_seen, 3);
}

#[test]
fn preemption_and_sampling_equal_those_of_one_worker() {
    for model in ["tiny/llama/llama-f32", "tiny/gemma3/gemma3-f32", "tiny/qwen35/qwen35-f32"] {
        let sampled = |seed: u64| Request {
            sampling: Sampling { temperature: 1.0, seed, ..Sampling::default() },
            ..Request::greedy(prompt(seed, 20), 240).tokens_only()
        };
        let greedy = |seed: u64| Request::greedy(prompt(seed, 20), 240).tokens_only();
        let requests = [
            greedy(21),
            sampled(22),
            greedy(23),
            Request::greedy(prompt(24, 20), 240),
            sampled(25),
            greedy(26),
        ];
        let base = EngineOptions { prefix_cache: false, chunk: Some(8), ..options(model) };
        let smallest = cramped(model, &base, 260);
        let preemptions = |outputs: &[Output]| outputs.iter().map(Output::preemptions).sum::<u32>();
        // Arenas in which some sequences are admitted and later preempted, the smallest first. The number
        // that a pipeline admits depends on the steps in flight when it plans, so some arenas may cause no
        // preemption.
        let stages_preempted = (4..40).any(|quarters| {
            let kv_bytes = smallest.kv_bytes.map(|bytes| bytes * quarters / 4);
            let options = EngineOptions { kv_bytes, ..base.clone() };
            let expected = together(&mut open(model, &options), &requests);
            if preemptions(&expected) == 0 {
                return false;
            }
            let workers = Workers::start(model, max_shards(model).min(3) - 1, &options);
            let got = together(&mut workers.engine(model, &options).unwrap(), &requests);
            for (expected, got) in expected.iter().zip(&got) {
                assert_eq!((&got.tokens, &got.failed), (&expected.tokens, &None), "{model}");
            }
            preemptions(&got) > 0
        });
        assert!(stages_preempted, "{model}");
    }
}

/// One request for each way of sampling, and choices of one prompt.
fn draws() -> Vec<Request> {
    let base = Sampling { temperature: 0.9, seed: 11, ..Sampling::default() };
    let bias = vec![(9, 3.0), (17, -100.0), (300, 1.5)];
    let samplings = [
        Sampling::default(),
        base.clone(),
        Sampling { top_k: 5, ..base.clone() },
        Sampling { top_p: 0.7, ..base.clone() },
        Sampling { min_p: 0.1, ..base.clone() },
        Sampling { repetition_penalty: 1.3, ..base.clone() },
        Sampling { presence_penalty: 0.8, frequency_penalty: 0.4, ..base.clone() },
        Sampling { logit_bias: bias.clone(), ..base.clone() },
        Sampling { logprobs: Some(4), ..base.clone() },
        Sampling { logprobs: Some(0), repetition_penalty: 0.8, logit_bias: bias, ..Sampling::default() },
    ];
    let with = |(seed, sampling): (u64, Sampling)| {
        let request = Request { sampling, ..Request::greedy(prompt(60 + seed, 21), 24).tokens_only() };
        // End tokens are barred for a while, on the device or on the host.
        Request {
            stop: Stop { min_tokens: if seed % 2 == 0 { 6 } else { 0 }, ..request.stop.clone() },
            ..request
        }
    };
    let mut requests: Vec<Request> = (0..).zip(samplings).map(with).collect();
    requests.extend((0..4).map(|seed| Request {
        sampling: Sampling { seed, logprobs: Some(2), ..base.clone() },
        ..Request::greedy(prompt(99, 40), 24).tokens_only()
    }));
    // Rows that are read whole next to rows that are sampled at another stage.
    requests.push(Request { sampling: base, ..Request::greedy(prompt(98, 30), 10) });
    requests
}

#[test]
fn the_last_stage_draws_like_one_worker() {
    for model in ["tiny/llama/llama-f32", "tiny/gemma3/gemma3-f32", "tiny/qwen35/qwen35-f32"] {
        let requests = draws();
        let expected = one_by_one(&mut open(model, &options(model)), &requests);
        for shards in 2..=max_shards(model).min(3) {
            let workers = Workers::start(model, shards - 1, &options(model));
            let mut engine = workers.engine(model, &options(model)).unwrap();
            for case in ["at once", "again, from the cache"] {
                let got = together(&mut engine, &requests);
                for (index, (expected, got)) in expected.iter().zip(&got).enumerate() {
                    let case = format!("{model} over {shards}, {case}: {:?}", requests[index].sampling);
                    assert_eq!((&got.tokens, &got.text), (&expected.tokens, &expected.text), "{case}");
                    assert_eq!(got.logprobs, expected.logprobs, "{case}");
                }
            }
            assert_eq!(engine.load().kv_used, 0, "nothing is held");
            engine.check().unwrap();
        }
    }
}

#[test]
fn the_first_and_last_stages_share_the_logits_of_one_stream() {
    // The output head is tied to the embedding, also with a soft cap. The last model has a separate head.
    let models = [
        ("tiny/llama/llama-f32", true),
        ("tiny/gemma4/gemma4-f32", true),
        ("tiny/qwen3moe/qwen3moe-f32", false),
    ];
    for (model, divides) in models {
        let requests = draws();
        let expected = one_by_one(&mut open(model, &options(model)), &requests);
        for shards in 2..=max_shards(model).min(3) {
            let workers = Workers::start(model, shards - 1, &options(model));
            let mut engine = workers.engine(model, &options(model)).unwrap();
            let got = one_by_one(&mut engine, &requests);
            for (index, (expected, got)) in expected.iter().zip(&got).enumerate() {
                let case = format!("{model} over {shards}: {:?}", requests[index].sampling);
                assert_eq!((&got.tokens, &got.text), (&expected.tokens, &expected.text), "{case}");
                assert_eq!(got.logprobs, expected.logprobs, "{case}");
            }
            let divided = engine.metrics().shards.divided.get();
            assert_eq!(divided > 0, divides, "{model} over {shards}: {divided}");
        }
    }
}

#[test]
fn several_steps_are_in_flight_and_all_stages_compute() {
    let model = "tiny/llama/llama-f32";
    let workers = Workers::start(model, 2, &options(model));
    let mut engine = workers.engine(model, &options(model)).unwrap();
    let requests: Vec<Request> =
        (0..6).map(|seed| Request::greedy(prompt(seed, 300), 40).tokens_only()).collect();
    let submitted: Vec<_> = requests.iter().map(|request| submit(&mut engine, request)).collect();
    let mut max_under_way = 0;
    while engine.has_work() {
        engine.step(Instant::now()).unwrap();
        max_under_way = max_under_way.max(engine.metrics().shards.under_way.get());
    }
    assert!(max_under_way >= 3, "{max_under_way} steps under way");
    assert!(submitted.iter().all(|submitted| submitted.output().tokens.len() == 40));
    let shards = &engine.metrics().shards;
    for stage in 0..3 {
        let label = StageLabel { stage };
        assert!(shards.busy.get_or_create(&label).get() > 0.0, "stage {stage}");
        assert!(shards.bytes.get_or_create(&label).get() > 0 || stage == 0, "stage {stage}");
    }
    assert_eq!(shards.under_way.get(), 0);
}

#[test]
fn a_request_cancelled_with_rows_in_flight_leaves_nothing_behind() {
    let model = "tiny/qwen35/qwen35-f32";
    let workers = Workers::start(model, 1, &options(model));
    let mut engine = workers.engine(model, &options(model)).unwrap();
    let remaining = Request::greedy(prompt(2, 50), 20).tokens_only();
    let expected = one_by_one(&mut open(model, &options(model)), std::slice::from_ref(&remaining));
    for steps in 1..6 {
        let submitted = submit(&mut engine, &Request::greedy(prompt(40 + steps, 500), 20).tokens_only());
        let concurrent = submit(&mut engine, &remaining);
        for _ in 0..steps {
            engine.step(Instant::now()).unwrap();
        }
        engine.cancel(submitted.id.unwrap());
        while engine.has_work() {
            engine.step(Instant::now()).unwrap();
        }
        assert_eq!(concurrent.output().tokens, expected[0].tokens);
        // Results that were in flight when the last request ended are processed too.
        while engine.step(Instant::now()).unwrap() != StepOutcome::Idle {}
        assert_eq!(engine.load().kv_used, 0, "cancelled after {steps} steps");
        engine.check().unwrap();
    }
}

#[test]
fn bfloat16_between_stages_is_close_and_independent_of_chunks() {
    let model = "tiny/llama/llama-f32";
    let requests = [Request::greedy(prompt(3, 60), 4)];
    let expected = one_by_one(&mut open(model, &options(model)), &requests);
    let workers = Workers::start(model, 1, &options(model));
    let run = |chunk| {
        let options = EngineOptions { chunk: Some(chunk), prefix_cache: false, ..options(model) };
        let deadline = Instant::now() + Duration::from_secs(10);
        let mut engine = loop {
            match workers.engine_over(model, &options, ActivationType::Bf16) {
                Ok(engine) => break engine,
                Err(error) if is_busy(&error) && Instant::now() < deadline => {}
                Err(error) => panic!("{error}"),
            }
        };
        assert!(engine.origin().numeric_class.ends_with("/wire-bf16"), "part of the numeric class");
        one_by_one(&mut engine, &requests)
    };
    let (whole, chunked) = (run(0), run(7));
    assert_same("chunks of 7", &whole, &chunked);
    let float = |bits: &u32| f32::from_bits(*bits);
    let (exact, rounded) = (&expected[0].logits[&59], &whole[0].logits[&59]);
    let worst = exact.iter().zip(rounded).map(|(a, b)| (float(a) - float(b)).abs()).fold(0.0, f32::max);
    assert!(worst > 0.0 && worst < 0.2, "max |dlogit| {worst}");
}

#[test]
fn a_stage_of_another_class_or_an_impossible_split_is_refused() {
    let model = "tiny/llama/llama-f32";
    let other = EngineOptions { kv_type: kernels::backend::KvType::F16.into(), ..options(model) };
    let workers = Workers::start(model, 1, &other);
    let refused = workers.engine(model, &options(model)).err().unwrap();
    let Error::Engine(engine::Error::StageLost(lost)) = &refused else { panic!("{refused}") };
    let source = &lost.source;
    assert!(matches!(source, transport::Error::StageFailed(StageFailure::OtherClass { .. })), "{source}");
    assert_eq!(lost.stage, 1);

    let max = max_shards(model);
    let workers = Workers::start(model, max, &options(model));
    let refused = workers.engine(model, &options(model)).err().unwrap();
    assert!(
        matches!(
            refused,
            Error::Shards(ShardCountError { shards, most: m }) if shards == max + 1 && m == max
        ),
        "{refused}"
    );

    let contiguous = EngineOptions { block_layout: BlockLayout::Contiguous, ..options(model) };
    let refused = workers.engine(model, &contiguous).err().unwrap();
    let config = matches!(refused, Error::Engine(engine::Error::Config { option: "contiguous", .. }));
    assert!(config, "{refused}");
}

#[test]
fn a_worker_holds_one_stage_at_a_time() {
    let model = "tiny/llama/llama-f32";
    let workers = Workers::start(model, 1, &options(model));
    let first = workers.engine(model, &options(model)).unwrap();
    let refused = workers.engine(model, &options(model)).err().unwrap();
    assert!(is_busy(&refused), "{refused}");
    drop(first);
    let mut second = workers.next_engine(model, &options(model));
    let outputs = together(&mut second, &[Request::greedy(prompt(1, 20), 4)]);
    assert_eq!(outputs[0].tokens.len(), 4);
}

#[test]
fn a_lost_stage_ends_the_replica_within_three_seconds() {
    let model = "tiny/llama/llama-f32";
    for lost in [0, 1] {
        let mut workers = Workers::start(model, 2, &options(model));
        let mut engine = workers.engine(model, &options(model)).unwrap();
        let submitted = submit(&mut engine, &Request::greedy(prompt(1, 20), 400).tokens_only());
        while submitted.output().tokens.len() < 3 {
            engine.step(Instant::now()).unwrap();
        }
        let service = workers.services.remove(lost);
        workers.runtime.block_on(service.stop());
        let since = Instant::now();
        let error = loop {
            match engine.step(Instant::now()) {
                Ok(_) => assert!(since.elapsed() < 3 * Duration::from_secs(3), "stage {lost} is not missed"),
                Err(error) => break error,
            }
        };
        assert!(matches!(&error, engine::Error::StageLost(failure) if failure.stage == lost + 1), "{error}");
        assert!(since.elapsed() < 3 * Duration::from_secs(3), "{:?}", since.elapsed());
        // A new replica with another worker in its place has nothing of the steps in flight.
        drop(engine);
        workers.replace(lost, model);
        let mut engine = workers.next_engine(model, &options(model));
        let request = Request::greedy(prompt(1, 20), 8);
        let expected = one_by_one(&mut open(model, &options(model)), std::slice::from_ref(&request));
        assert_eq!(engine.load().kv_used, 0);
        assert_same("formed again", &expected, &one_by_one(&mut engine, &[request]));
        assert_eq!(engine.load().kv_used, 0);
        engine.check().unwrap();
    }
}
