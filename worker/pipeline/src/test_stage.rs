//! The last stage of a model of the oracle set, for this crate's tests.

use engine::decoder::{Decoder, DecoderConfig, StateType};
use engine::kv_cache::Slabs;
use engine::weights::Packs;
use kernels::backend::{ActivationMode, KvType};
use kernels::cpu::{CpuBackend, CpuConfig};
use kernels::pool::{Pool, PoolConfig};
use model::spec::AssistantSpec;
use model::{ModelFile, ModelSpec};
use std::num::NonZeroUsize;
use std::path::Path;

fn open(arch: &str) -> ModelFile {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tiny");
    ModelFile::open(root.join(arch).join(format!("{arch}-f32.gguf"))).unwrap()
}

/// Loads the last layers of a small model, and the named drafter that reads its caches. Steps have at most
/// 8 rows. Returns also the slabs of the arena.
pub(crate) fn load(arch: &str, assistant: Option<&str>) -> (Decoder, Slabs) {
    let file = open(arch);
    let spec = ModelSpec::from_file(&file).unwrap();
    let config = DecoderConfig {
        layers: spec.cut_points()[0]..spec.layers.len(),
        max_rows: 8,
        logit_rows: 64,
        block_tokens: 16,
        kv_type: KvType::F16.into(),
        state_type: StateType::F32,
    };
    let cpu = CpuConfig::select(ActivationMode::Int8, |name| std::env::var(name).ok()).unwrap();
    let pool = Pool::new(PoolConfig::new(NonZeroUsize::MIN)).unwrap();
    let backend = Box::new(CpuBackend::new(cpu, pool).unwrap());
    let mut decoder = Decoder::load(spec, config, (&file, Packs::Off), backend, &mut |_, _| {}).unwrap();
    if let Some(assistant) = assistant {
        let drafter = open(assistant);
        let spec = AssistantSpec::from_file(&drafter).unwrap();
        decoder.load_assistant(&spec, (&drafter, &file), usize::MAX).unwrap();
    }
    let sizes: Vec<u64> = decoder.groups().iter().map(|group| group.block_bytes as u64).collect();
    let slabs = Slabs::with_blocks(2, &vec![3; sizes.len()], &sizes).unwrap();
    decoder.allocate_kv(slabs.bytes() as usize).unwrap();
    (decoder, slabs)
}
