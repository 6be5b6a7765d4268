//! Evaluates every fixture's spec and compares it with the oracle's results.

use super::evaluate::Model;
use crate::ModelFile;
use crate::safetensors;
use crate::test_files::fixture;
use ::safetensors::Dtype;
use text::Tokenizer;

/// The reference tensors of a fixture.
struct Reference(Vec<u8>);

impl Reference {
    fn read(name: &str) -> Self {
        Self(std::fs::read(fixture(&format!("tiny/{name}/ref.safetensors"))).unwrap())
    }

    fn bytes(&self, name: &str, dtype: Dtype) -> &[[u8; 4]] {
        let tensor =
            safetensors::parse(&self.0).unwrap().into_iter().find(|tensor| tensor.name == name).unwrap();
        assert_eq!(tensor.dtype, dtype, "{name}");
        self.0[tensor.offset as usize..][..tensor.bytes as usize].as_chunks().0
    }

    fn floats(&self, name: &str) -> Vec<f64> {
        self.bytes(name, Dtype::F32).iter().map(|bytes| f32::from_le_bytes(*bytes).into()).collect()
    }

    fn ids(&self, name: &str) -> Vec<u32> {
        self.bytes(name, Dtype::I32).iter().map(|bytes| i32::from_le_bytes(*bytes) as u32).collect()
    }
}

fn open(name: &str) -> ModelFile {
    ModelFile::open(fixture(&format!("tiny/{name}/{name}-f32.gguf"))).unwrap()
}

fn largest_difference(found: impl IntoIterator<Item = f64>, expected: &[f64]) -> f64 {
    let found: Vec<f64> = found.into_iter().collect();
    assert_eq!(found.len(), expected.len());
    found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

/// Uses the prompt of 40 tokens: longer than the windows, and long enough for states to matter. The oracle's
/// frequencies and the compared values are f32.
fn check(name: &str) {
    check_prompt(name, "p1");
}

fn check_prompt(name: &str, prompt: &str) {
    let (file, reference) = (open(name), Reference::read(name));
    let logits = Model::open(&file).forward(&reference.ids(&format!("{prompt}.ids")));
    let expected = reference.floats(&format!("{prompt}.logits"));
    // Of long prompts the reference has only the last rows.
    let rows = expected.len() / logits.first().unwrap().len();
    let skipped = logits.len() - rows;
    let difference = largest_difference(logits.into_iter().skip(skipped).flatten(), &expected);
    assert!(difference < 5e-5, "{name}: {difference}");
}

#[test]
fn decoders() {
    for name in ["llama", "llama3rope", "qwen2", "qwen3", "qwen3moe", "gemma3", "qwen2moe"] {
        check(name);
    }
}

#[test]
fn gemma4() {
    check("gemma4");
    check("gemma4moe");
}

#[test]
fn gpt_oss() {
    // A wrong frequency is hard to detect with few tokens.
    check_prompt("gpt-oss", "p2");
}

#[test]
fn delta_nets() {
    for name in ["qwen3next", "qwen35", "qwen35moe"] {
        check(name);
    }
}

#[test]
fn granite_hybrids() {
    check("granitehybrid");
    check("granitehybrid-dense");
}

#[test]
fn encoders() {
    let (file, reference) = (open("bert"), Reference::read("bert"));
    let model = Model::open(&file);
    for prompt in 0..3 {
        let vectors = model.forward(&reference.ids(&format!("p{prompt}.ids")));
        let mean = model.pool(&vectors);
        assert!(largest_difference(mean, &reference.floats(&format!("p{prompt}.mean"))) < 1e-6);
        let tokens = reference.floats(&format!("p{prompt}.tokens"));
        assert!(largest_difference(vectors.into_iter().flatten(), &tokens) < 1e-6);
    }
}

#[test]
fn scores_of_pairs() {
    let (file, reference) = (open("bert-rerank"), Reference::read("bert-rerank"));
    let model = Model::open(&file);
    let tokenizer = Tokenizer::from_metadata(file.metadata()).unwrap();
    let texts = std::fs::read(fixture("tiny/bert-rerank/ref.json")).unwrap();
    let texts: serde_json::Value = serde_json::from_slice(&texts).unwrap();
    let expected = reference.floats("scores");
    assert_eq!(expected.len(), 10);
    for (pair, expected) in expected.iter().enumerate() {
        let text = |key: &str| texts["pairs"][pair][key].as_str().unwrap();
        let ids = tokenizer.pairs(text("query")).with(text("document")).0;
        assert_eq!(ids, reference.ids(&format!("pair{pair}.ids")));
        let vectors = model.forward(&ids);
        assert!((model.pool(&vectors)[0] - expected).abs() < 1e-6, "pair {pair}");
    }
}
