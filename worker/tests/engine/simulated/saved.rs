//! Snapshots and tiers move the content of device memory out and back without changing a bit.

use super::{simulated, small};
use crate::harness::{self, Output, Request, one_by_one, open, open_on, path, prompt};
use crate::snapshots::{generate, key, save};
use crate::tiers::{assert_same, disk, finish};
use cuda::Arch;
use engine::decoder::CacheKind;
use engine::engine::Engine;
use engine::snapshot::{Snapshot, SnapshotError};
use kvasir_worker::Error;
use kvasir_worker::load::{self, EngineOptions};

/// Keys and values, also with windows, and recurrent states.
const MODELS: [(&str, Arch); 3] = [
    ("tiny/llama/llama-f32", Arch::SM_90),
    ("tiny/gemma3/gemma3-f32", Arch::SM_121A),
    ("tiny/qwen35/qwen35-f32", Arch::SM_121A),
];
const PROMPT: usize = 40;
const GENERATE: u32 = 12;
/// Tokens in whole units before the last token of such a prompt and its output.
const HELD: usize = 48;

/// The result without sharing, on a separate device.
fn undisturbed(model: &str, arch: Arch, request: &Request) -> Output {
    let options = EngineOptions { prefix_cache: false, ..small(model) };
    one_by_one(&mut open_on(model, &options, simulated(arch, &options)), std::slice::from_ref(request))
        .remove(0)
}

fn on_device(model: &str, arch: Arch, options: &EngineOptions) -> Engine {
    open_on(model, options, simulated(arch, options))
}

#[test]
fn a_sequence_saved_from_device_memory_continues_on_another_device() {
    for (model, arch) in MODELS {
        let options = small(model);
        let mut first = on_device(model, arch, &options);
        let tokens = generate(&mut first, "r", prompt(3, PROMPT));
        assert_eq!((tokens.len() - 1) / 16 * 16, HELD);
        let file = save(&mut first, "r").unwrap().to_bytes().unwrap();
        let next = Request::greedy(tokens, GENERATE);
        let expected = undisturbed(model, arch, &next);

        let mut second = on_device(model, arch, &options);
        let snapshot = Snapshot::from_bytes(&file, &second.origin()).unwrap();
        let restored = second.restore(key("again"), &snapshot).unwrap();
        assert_eq!((restored.cached as usize, second.metrics().steps.get()), (HELD, 0), "{model}");
        // The restored bytes equal the saved ones.
        assert_eq!(save(&mut second, "again").unwrap(), snapshot, "{model}");
        for engine in [&mut second, &mut first] {
            let output = finish(engine, std::slice::from_ref(&next)).remove(0);
            assert_eq!(output.cached(), HELD, "{model}");
            assert_same(model, &output, &expected);
        }

        // The same bytes have another meaning on the CPU.
        let refused =
            Snapshot::from_bytes(&file, &open(model, &harness::options(model)).origin()).unwrap_err();
        let other = matches!(refused, SnapshotError::Other { field: "numeric class", .. });
        assert!(other && refused.to_string().contains("ptx-sim"), "{refused}");
    }
}

/// Options with the smallest KV memory that serves `tokens` tokens.
fn cramped(model: &str, arch: Arch, tokens: usize) -> EngineOptions {
    let engine = on_device(model, arch, &small(model));
    let all: u64 = engine.decoder().groups().iter().map(|group| group.block_bytes as u64).sum();
    let options = |blocks: u64| EngineOptions { kv_bytes: Some(blocks * all), ..small(model) };
    let fits = |blocks: &u64| {
        let options = options(*blocks);
        match load::open_on(&path(model), &options, simulated(arch, &options), &mut |_, _| {}) {
            Ok(loaded) => loaded.max_model_len >= tokens,
            Err(Error::Engine(engine::Error::KvMemory { .. })) => false,
            Err(error) => panic!("{model}: {error}"),
        }
    };
    options((4..100).find(fits).unwrap())
}

/// Checks that all cached tokens came from a tier: with states up to the last checkpoint for which there was
/// room, otherwise all whole units.
fn assert_came_back(model: &str, engine: &Engine, again: &Output) {
    let states = engine.decoder().groups().iter().any(|group| group.kind == CacheKind::State);
    let held = if states { 32 } else { HELD };
    assert_eq!((again.cached(), engine.metrics().tiers.hit_tokens.get()), (held, held as u64), "{model}");
}

#[test]
fn prefixes_evicted_from_device_memory_come_back_from_the_tiers() {
    for (model, arch) in MODELS {
        let folder = tempfile::tempdir().unwrap();
        let tiers = disk(folder.path(), 64 << 20);
        let options = EngineOptions { tiers, ..cramped(model, arch, 2 * PROMPT) };
        let request = Request::greedy(prompt(1, PROMPT + 10), GENERATE);
        let expected = undisturbed(model, arch, &request);
        let mut engine = on_device(model, arch, &options);
        assert_same(model, &finish(&mut engine, std::slice::from_ref(&request))[0], &expected);
        for seed in 100..104 {
            finish(&mut engine, &[Request::greedy(prompt(seed, 60), 2).tokens_only()]);
        }
        let again = finish(&mut engine, std::slice::from_ref(&request)).remove(0);
        assert_came_back(model, &engine, &again);
        assert_same(model, &again, &expected);
        drop(engine);

        let mut next = on_device(model, arch, &options);
        let again = finish(&mut next, std::slice::from_ref(&request)).remove(0);
        assert_came_back(model, &next, &again);
        assert_same(model, &again, &expected);
    }
}
