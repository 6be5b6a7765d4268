//! Encoders compared with the oracle, and independence of the other texts in a step.
#![allow(clippy::unwrap_used, reason = "a panic in a test is its report")]

mod exactness;
mod oracle;
mod serving;

use engine::encoder::{Encoder, Text};
use kernels::backend::KvType;
use kvasir_worker::load::{self, EngineOptions};
use safetensors::{Dtype, SafeTensors};
use std::path::{Path, PathBuf};

/// A file below the fixtures' root.
fn fixture(name: &str) -> PathBuf {
    let named = std::env::var_os("KVASIR_FIXTURES").map(PathBuf::from);
    let root = named.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures"));
    root.join(name)
}

fn model(arch: &str) -> PathBuf {
    fixture(&format!("tiny/{arch}/{arch}-f32.gguf"))
}

/// f32 keys and values, one thread.
fn options() -> EngineOptions {
    EngineOptions { threads: Some(1), kv_type: KvType::F32.into(), ..EngineOptions::default() }
}

fn open(arch: &str, options: &EngineOptions) -> Encoder {
    load::encoder(&model(arch), options, &mut |_, _| {}).unwrap()
}

fn text(tokens: Vec<u32>) -> Text {
    Text { tokens, second: None }
}

/// Contents of an oracle file.
struct Reference(Vec<u8>);

impl Reference {
    fn of(arch: &str) -> Self {
        Self(std::fs::read(fixture(&format!("tiny/{arch}/ref.safetensors"))).unwrap())
    }

    fn floats(&self, name: &str) -> Vec<f32> {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        let tensor = file.tensor(name).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(tensor.dtype(), Dtype::F32, "{name}");
        tensor.data().as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    }

    fn tokens(&self, name: &str) -> Option<Vec<u32>> {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        let tensor = file.tensor(name).ok()?;
        assert_eq!(tensor.dtype(), Dtype::I32, "{name}");
        let id = |bytes: &[u8; 4]| u32::try_from(i32::from_le_bytes(*bytes)).unwrap();
        Some(tensor.data().as_chunks::<4>().0.iter().map(id).collect())
    }
}

/// The largest difference between two rows of numbers.
fn worst(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}
