//! The engine on the CUDA backend, kernel for kernel as a GPU would run it, on an interpreter.

use crate::harness::{Ask, QUANT, TINY, open, open_on, options, path, prompt, together};
use kernels::backend::Backend;
use kernels::cuda::{Arch, Compiler, CubinCache, CudaBackend, CudaConfig, SimDevice, source};
use kvasir_worker::load::EngineOptions;
use safetensors::SafeTensors;
use std::path::Path;

/// Interpreting is slow: little room, and few rows at a time.
fn small(model: &str) -> EngineOptions {
    EngineOptions { max_rows: Some(64), max_sequences: Some(4), kv_bytes: Some(2 << 20), ..options(model) }
}

fn simulated(arch: Arch, options: &EngineOptions) -> Box<dyn Backend> {
    let compiler = Compiler::find().unwrap();
    // Among what is built: compiling takes longer than all else here.
    let cache = CubinCache::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/cubins"));
    let compile = Box::new(move |source: &source::Source| cache.compile(&compiler, source, arch));
    let config = CudaConfig { arch, activations: options.activations, threads: 1 };
    let device = SimDevice::new(ptx::Limits::GB10, 1);
    Box::new(CudaBackend::new(Box::new(device), config, compile).unwrap())
}

/// `p0` of a fixture: its tokens and what follows them.
fn reference(model: &str) -> (Vec<u32>, Vec<u32>) {
    let bytes = std::fs::read(path(model).with_file_name("ref.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tokens = |name: &str| {
        let tensor = file.tensor(name).unwrap();
        let width = tensor.data().len() / tensor.shape()[0];
        let number = |bytes: &[u8]| bytes.iter().rev().fold(0, |number, byte| number << 8 | u32::from(*byte));
        tensor.data().chunks_exact(width).map(|bytes| number(&bytes[..4])).collect()
    };
    (tokens("p0.ids"), tokens("p0.greedy"))
}

#[test]
fn fixtures_are_continued_as_their_references_are() {
    // Of each layer kind one; the two architectures take turns, their kernels are compared elsewhere.
    let models = TINY.into_iter().filter(|model| !model.ends_with("+bf16"));
    for (model, arch) in models.zip(Arch::CHECKED.into_iter().cycle()) {
        let options = small(model);
        let mut engine = open_on(model, &options, simulated(arch, &options));
        let (ids, greedy) = reference(model);
        let ask = Ask::greedy(ids, greedy.len() as u32).tokens_only();
        let heard = together(&mut engine, &[ask]).remove(0);
        assert_eq!(heard.tokens, greedy, "{model} for {arch}");
    }
}

/// On 8-bit activations, several sequences at a time, with a prefix that they share.
#[test]
fn quantised_models_are_continued_as_on_the_cpu() {
    for (model, arch) in QUANT.into_iter().zip(Arch::CHECKED) {
        let options = small(model);
        let shared = prompt(3, 33);
        let asks: Vec<Ask> = [(4, 3), (5, 9)]
            .map(|(seed, len)| Ask::greedy([shared.clone(), prompt(seed, len)].concat(), 6).tokens_only())
            .into();
        let mut engine = open_on(model, &options, simulated(arch, &options));
        let mut cpu = open(model, &options);
        for _ in 0..2 {
            let (found, wanted) = (together(&mut engine, &asks), together(&mut cpu, &asks));
            for (found, wanted) in found.iter().zip(&wanted) {
                assert_eq!(found.tokens, wanted.tokens, "{model} for {arch}");
                assert_eq!(found.cached(), wanted.cached(), "{model} for {arch}");
            }
        }
    }
}
