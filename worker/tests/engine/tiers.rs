//! Evicted prefixes come back from host memory and from files, also after a restart, without changing a bit.
//! Damaged pieces and those of another origin are computed again.

use crate::harness::{Output, Request, Submitted, cramped, one_by_one, open, options, prompt, submit};
use engine::decoder::StateType;
use engine::engine::{Engine, StepOutcome};
use engine::tiers::{DiskConfig, TiersConfig};
use kernels::backend::KvType;
use kvasir_worker::load::EngineOptions;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// One model for every kind of cache: full, sliding (also with sinks), delta-net and Mamba-2 states, in f32
/// and in other types.
pub(crate) const KINDS: [&str; 10] = [
    "tiny/llama/llama-f32",
    "tiny/gemma3/gemma3-f32",
    "tiny/gpt-oss/gpt-oss-f32",
    "tiny/qwen35/qwen35-f32",
    "tiny/granitehybrid/granitehybrid-f32",
    "hf/falcon_h1",
    "hf/lfm2_moe",
    "tiny/qwen35/qwen35-f32+bf16",
    "tiny/llama/llama-f32+kv:fp8/q4_0",
    "tiny/gpt-oss/gpt-oss-f32+kv:q4_0/q8_0",
];
const PROMPT: usize = 200;
const GENERATE: u32 = 12;

pub(crate) fn base_request() -> Request {
    Request::greedy(prompt(1, PROMPT), GENERATE)
}

/// All positions of the prompt and the output, without sharing.
pub(crate) fn undisturbed(model: &str, request: &Request) -> Output {
    let options = EngineOptions { prefix_cache: false, chunk: Some(0), ..options(model) };
    one_by_one(&mut open(model, &options), std::slice::from_ref(request)).remove(0)
}

/// Options with an arena for little more than one such request.
pub(crate) fn small(model: &str, block_tokens: usize, tiers: TiersConfig) -> EngineOptions {
    let options = EngineOptions { block_tokens, ..options(model) };
    EngineOptions { tiers, ..cramped(model, &options, 2 * PROMPT) }
}

pub(crate) fn host(host_bytes: u64) -> TiersConfig {
    TiersConfig { host_bytes, ..TiersConfig::default() }
}

pub(crate) fn disk(dir: &Path, host_bytes: u64) -> TiersConfig {
    let disk = Some(DiskConfig { dir: dir.to_owned(), bytes: 1 << 30 });
    TiersConfig { host_bytes, disk, load_timeout: Duration::from_secs(60), ..TiersConfig::default() }
}

/// Runs requests to the end. They may wait for files meanwhile.
pub(crate) fn finish(engine: &mut Engine, requests: &[Request]) -> Vec<Output> {
    let submitted: Vec<Submitted> = requests.iter().map(|request| submit(engine, request)).collect();
    let deadline = Instant::now() + Duration::from_secs(60);
    while engine.has_work() {
        if engine.step(Instant::now()).unwrap() == StepOutcome::Idle {
            assert!(Instant::now() < deadline, "it waits for ever");
            std::thread::yield_now();
        }
    }
    while engine.copy_out() {}
    submitted.iter().map(Submitted::output).collect()
}

/// The files of pieces, without the lock file.
pub(crate) fn pieces(dir: &Path) -> Vec<PathBuf> {
    let files = std::fs::read_dir(dir).unwrap().map(|file| file.unwrap().path());
    files.filter(|path| path.extension().is_some_and(|extension| extension == "kvpiece")).collect()
}

pub(crate) fn evict(engine: &mut Engine) {
    for seed in 100..108 {
        finish(engine, &[Request::greedy(prompt(seed, 330), 2).tokens_only()]);
    }
}

/// Checks for the same tokens, and the same bits at every position with logits.
pub(crate) fn assert_same(case: &str, output: &Output, expected: &Output) {
    assert_eq!(output.failed, None, "{case}");
    assert_eq!(output.tokens, expected.tokens, "{case}");
    assert_eq!(output.logits.len(), expected.logits.len() - output.cached(), "{case}");
    for (position, row) in &output.logits {
        assert!(*row == expected.logits[position], "{case}: logits at {position} differ");
    }
}

#[test]
fn without_tiers_an_evicted_prefix_is_gone() {
    for model in KINDS {
        let mut engine = open(model, &small(model, 16, TiersConfig::default()));
        finish(&mut engine, &[base_request()]);
        evict(&mut engine);
        assert_eq!(finish(&mut engine, &[base_request()])[0].cached(), 0, "{model}");
    }
}

#[test]
fn an_evicted_prefix_comes_back_from_host_memory_bit_by_bit() {
    for model in KINDS {
        for block_tokens in [16, 64] {
            let case = format!("{model}, blocks of {block_tokens}");
            let mut engine = open(model, &small(model, block_tokens, host(64 << 20)));
            let first = finish(&mut engine, &[base_request()]).remove(0);
            let expected = undisturbed(model, &base_request());
            assert_same(&case, &first, &expected);
            evict(&mut engine);
            let again = finish(&mut engine, &[base_request()]).remove(0);
            assert_eq!(again.cached(), 192, "{case}");
            assert_same(&case, &again, &expected);
            assert_eq!(engine.metrics().tiers.hits.get(), 1, "{case}");
            assert_eq!(engine.metrics().tiers.hit_tokens.get(), 192, "{case}");

            // The next turn: the generated tokens came back too.
            let next =
                Request::greedy([base_request().prompt, first.tokens, prompt(9, 30)].concat(), GENERATE);
            evict(&mut engine);
            let output = finish(&mut engine, std::slice::from_ref(&next)).remove(0);
            assert_eq!(output.cached(), 208, "{case}");
            assert_same(&case, &output, &undisturbed(model, &next));
        }
    }
}

#[test]
fn a_tier_that_is_too_small_keeps_the_start() {
    let model = KINDS[0];
    let expected = undisturbed(model, &base_request());
    let mut engine = open(model, &small(model, 16, host(1)));
    finish(&mut engine, &[base_request()]);
    evict(&mut engine);
    let output = finish(&mut engine, &[base_request()]).remove(0);
    assert_eq!(output.cached(), 0);
    assert_same(model, &output, &expected);

    let block = engine.decoder().groups()[0].block_bytes as u64;
    let dir = tempfile::tempdir().unwrap();
    let six = Some(DiskConfig { dir: dir.path().to_owned(), bytes: 6 * (block + 128) });
    let options = small(model, 16, TiersConfig { disk: six, ..disk(dir.path(), 0) });
    finish(&mut open(model, &options), &[base_request()]);
    let output = finish(&mut open(model, &options), &[base_request()]).remove(0);
    assert_eq!(output.cached(), 96);
    assert_same(model, &output, &expected);
}

#[test]
fn files_serve_the_next_process_and_a_burst_of_requests() {
    for model in KINDS {
        for host_bytes in [0, 64 << 20] {
            let case = format!("{model}, {host_bytes} bytes of host memory");
            let dir = tempfile::tempdir().unwrap();
            let options = small(model, 16, disk(dir.path(), host_bytes));
            let expected = undisturbed(model, &base_request());
            let mut engine = open(model, &options);
            finish(&mut engine, &[base_request()]);
            drop(engine);
            let mut engine = open(model, &options);
            let output = finish(&mut engine, &[base_request()]).remove(0);
            assert_eq!(output.cached(), 192, "{case}");
            assert_same(&case, &output, &expected);
            assert_eq!(engine.metrics().tiers.load_failures.get(), 0, "{case}");
            evict(&mut engine);
            drop(engine);

            let mut engine = open(model, &options);
            for output in finish(&mut engine, &[base_request(), base_request(), base_request()]) {
                assert_eq!(output.cached(), 192, "{case}");
                assert_same(&case, &output, &expected);
            }
            assert_eq!(engine.metrics().tiers.hits.get(), 1, "{case}: then the arena has it");
            assert_eq!(engine.load().kv_used, 0, "{case}");
        }
    }
}

#[test]
fn damaged_files_are_computed_again() {
    for model in KINDS {
        let dir = tempfile::tempdir().unwrap();
        let options = small(model, 16, disk(dir.path(), 0));
        let expected = undisturbed(model, &base_request());
        finish(&mut open(model, &options), &[base_request()]);
        for (index, path) in pieces(dir.path()).iter().enumerate() {
            let mut bytes = std::fs::read(path).unwrap();
            match index % 2 {
                0 => {
                    let middle = bytes.len() / 2;
                    bytes[middle] ^= 4;
                }
                _ => bytes.truncate(bytes.len() - 1),
            }
            std::fs::write(path, bytes).unwrap();
        }
        let mut engine = open(model, &options);
        let output = finish(&mut engine, &[base_request()]).remove(0);
        assert_eq!(output.cached(), 0, "{model}");
        assert_same(model, &output, &expected);
        let failures = engine.metrics().tiers.load_failures.get();
        assert!(failures > 0 && engine.metrics().tiers.hits.get() == 0, "{model}: {failures}");
        drop(engine);
        // The piece was stored again, and is now intact.
        let output = finish(&mut open(model, &options), &[base_request()]).remove(0);
        assert_eq!(output.cached(), 192, "{model}");
        assert_same(model, &output, &expected);
    }
}

#[test]
fn one_damaged_block_truncates() {
    let model = KINDS[0];
    let dir = tempfile::tempdir().unwrap();
    let options = small(model, 16, disk(dir.path(), 0));
    finish(&mut open(model, &options), &[base_request()]);
    let expected = undisturbed(model, &base_request());
    let mut served = Vec::new();
    for path in pieces(dir.path()) {
        let whole = std::fs::read(&path).unwrap();
        let mut bytes = whole.clone();
        bytes[100] ^= 1;
        std::fs::write(&path, bytes).unwrap();
        let output = finish(&mut open(model, &options), &[base_request()]).remove(0);
        served.push(output.cached());
        assert_same(model, &output, &expected);
        std::fs::write(&path, whole).unwrap();
    }
    // With the first block damaged nothing is served. With the second one, the prefix is too short to be
    // worth it. From then on everything before the damage is served. One further block after the prompt is
    // never read.
    served.sort_unstable();
    assert_eq!(served, [0, 0, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192]);
}

#[test]
fn pieces_of_another_origin_are_not_used() {
    for model in KINDS {
        let dir = tempfile::tempdir().unwrap();
        let here = small(model, 16, disk(dir.path(), 0));
        // A smaller type, for which the arena has room.
        let smaller = if here.kv_type.k == KvType::F32 { KvType::F16 } else { KvType::Q4_0 };
        let other = EngineOptions { kv_type: smaller.into(), ..here.clone() };
        finish(&mut open(model, &other), &[base_request()]);
        let other = EngineOptions { state_type: StateType::AutoBf16 { tau: 5 }, ..here.clone() };
        let [origin, own] = [&other, &here].map(|options| open(model, options).origin());
        if origin != own {
            finish(&mut open(model, &other), &[base_request()]);
        }
        assert!(!pieces(dir.path()).is_empty());
        let mut engine = open(model, &here);
        let output = finish(&mut engine, &[base_request()]).remove(0);
        assert_eq!((output.cached(), engine.metrics().tiers.loads.get()), (0, 0), "{model}");
        assert_same(model, &output, &undisturbed(model, &base_request()));
    }
}

#[test]
fn the_wait_of_a_request_for_files_is_bounded_and_can_be_cancelled() {
    let model = KINDS[0];
    let dir = tempfile::tempdir().unwrap();
    let options = small(model, 16, disk(dir.path(), 0));
    finish(&mut open(model, &options), &[base_request()]);

    let mut engine = open(model, &options);
    let waiting_twice = [submit(&mut engine, &base_request()), submit(&mut engine, &base_request())];
    assert_eq!(engine.load().waiting, 2);
    engine.check().unwrap();
    engine.cancel(waiting_twice[0].id.unwrap());
    assert_eq!(engine.load().waiting, 1, "the other one waits for a leader that is gone");
    engine.check().unwrap();
    let rest = finish(&mut engine, &[]);
    assert!(rest.is_empty() && waiting_twice[0].output().started.is_none());
    assert_eq!(waiting_twice[1].output().cached(), 192);
    drop(engine);

    let mut engine = open(model, &options);
    let waiting = submit(&mut engine, &base_request());
    assert!(!engine.can_compute(), "it waits for files");
    engine.cancel(waiting.id.unwrap());
    assert!(!engine.has_work());
    assert_eq!(engine.load().waiting, 0);
    engine.check().unwrap();
    drop(engine);

    let tiers = TiersConfig { load_timeout: Duration::ZERO, ..disk(dir.path(), 0) };
    let mut engine = open(model, &EngineOptions { tiers, ..options });
    let output = finish(&mut engine, &[base_request()]).remove(0);
    assert_same(model, &output, &undisturbed(model, &base_request()));
}
