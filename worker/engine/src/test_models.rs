//! Models of the oracle set for this crate's tests.

use crate::decoder::{Decoder, DecoderConfig, StateType};
use crate::weights::Packs;
use kernels::backend::{ActivationMode, KvType};
use kernels::cpu::{CpuBackend, CpuConfig};
use kernels::pool::{Pool, PoolConfig};
use model::{ModelFile, ModelSpec};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

/// Path of a file of the set: under `$KVASIR_FIXTURES`, else under `tests/fixtures` of the workspace.
pub(crate) fn fixture(name: &str) -> PathBuf {
    let named = std::env::var_os("KVASIR_FIXTURES").map(PathBuf::from);
    named.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures")).join(name)
}

/// Loads all layers of a model without a KV arena, for one thread, in blocks of 16 tokens.
pub(crate) fn load(path: &Path, (kv_type, activations): (KvType, ActivationMode)) -> Decoder {
    let file = ModelFile::open(path).unwrap();
    let spec = ModelSpec::from_file(&file).unwrap();
    let config = DecoderConfig {
        layers: 0..spec.layers.len(),
        max_rows: 512,
        logit_rows: 64,
        block_tokens: 16,
        kv_type: kv_type.into(),
        state_type: StateType::F32,
    };
    let cpu = CpuConfig::select(activations, |name| std::env::var(name).ok()).unwrap();
    let pool = Pool::new(PoolConfig::new(NonZeroUsize::MIN)).unwrap();
    let backend = Box::new(CpuBackend::new(cpu, pool).unwrap());
    Decoder::load(spec, config, (&file, Packs::Off), backend, &mut |_, _| {}).unwrap()
}
