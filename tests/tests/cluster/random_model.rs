//! Model files of the Llama family with random weights and the tokenizer of the tiny one.

use kvasir_cluster_tests::fixtures;
use kvasir_cluster_tests::random::Random;
use metadata::Value;
use model::gguf::writer::Writer;
use model::{GgmlType, ModelFile};
use std::fs::File;
use std::path::Path;

/// Tokens of the tokenizer.
pub(crate) const VOCABULARY: u64 = 448;

/// Sizes of a model, in elements but for the counts.
pub(crate) struct Shape {
    pub(crate) layers: u32,
    pub(crate) hidden: u64,
    pub(crate) feed_forward: u64,
    pub(crate) heads: u32,
    pub(crate) kv_heads: u32,
    pub(crate) head: u64,
    /// Longest sequence in tokens.
    pub(crate) context: u32,
    /// Type of the matrices of the layers.
    pub(crate) ty: GgmlType,
    /// Whether the matrix of the logits is another one than that of the embeddings. Then the next token hardly depends
    /// on the last one, and models of other seeds generate other tokens.
    pub(crate) output: bool,
}

impl Shape {
    pub(crate) fn write(&self, path: &Path, seed: u64) {
        let tiny = fixtures::Manifest::read().unwrap().tiny("llama").unwrap().path();
        let tiny = ModelFile::open(tiny).unwrap();
        let mut metadata = tiny.metadata().clone();
        for (key, value) in [
            ("block_count", self.layers),
            ("context_length", self.context),
            ("embedding_length", self.hidden as u32),
            ("feed_forward_length", self.feed_forward as u32),
            ("attention.head_count", self.heads),
            ("attention.head_count_kv", self.kv_heads),
            ("attention.key_length", self.head as u32),
            ("attention.value_length", self.head as u32),
            ("rope.dimension_count", self.head as u32),
        ] {
            metadata.insert(format!("llama.{key}"), Value::U32(value));
        }
        let (hidden, feed_forward) = (self.hidden, self.feed_forward);
        let (queries, keys) = (u64::from(self.heads) * self.head, u64::from(self.kv_heads) * self.head);
        let mut writer = Writer::new(metadata).unwrap();
        writer.tensor("token_embd.weight", GgmlType::F32, &[hidden, VOCABULARY]).unwrap();
        for layer in 0..self.layers {
            let mut add = |name: &str, ty, dims: &[u64]| {
                writer.tensor(&format!("blk.{layer}.{name}.weight"), ty, dims).unwrap();
            };
            add("attn_norm", GgmlType::F32, &[hidden]);
            add("ffn_norm", GgmlType::F32, &[hidden]);
            add("attn_q", self.ty, &[hidden, queries]);
            add("attn_k", self.ty, &[hidden, keys]);
            add("attn_v", self.ty, &[hidden, keys]);
            add("attn_output", self.ty, &[queries, hidden]);
            add("ffn_gate", self.ty, &[hidden, feed_forward]);
            add("ffn_up", self.ty, &[hidden, feed_forward]);
            add("ffn_down", self.ty, &[feed_forward, hidden]);
        }
        writer.tensor("output_norm.weight", GgmlType::F32, &[hidden]).unwrap();
        if self.output {
            writer.tensor("output.weight", GgmlType::F32, &[hidden, VOCABULARY]).unwrap();
        }
        let mut random = Random::new(seed);
        let mut out = std::io::BufWriter::new(File::create(path).unwrap());
        let data = |info: &model::header::TensorInfo| -> Vec<u8> {
            let elements: u64 = info.dims().iter().product();
            // Small values of either sign, in a pattern that no other tensor has.
            let small: Vec<u16> = (0..4093)
                .map(|_| (random.below(0x800) as u16 + 0x2000) | (random.below(2) as u16) << 15)
                .collect();
            let values = small.iter().cycle().take(elements as usize);
            match info.ty() {
                GgmlType::F32 => {
                    values.flat_map(|bits| (f32::from(*bits as i16) / 1e6 + 1e-3).to_le_bytes()).collect()
                }
                GgmlType::F16 => values.flat_map(|bits| bits.to_le_bytes()).collect(),
                other => panic!("{other:?}"),
            }
        };
        writer.write(&mut out, data).unwrap();
    }
}
