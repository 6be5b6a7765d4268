//! Files for this crate's tests.

use std::path::{Path, PathBuf};

use crate::gguf::writer::Writer;
use crate::header::TensorInfo;
use crate::{GgmlType, ModelFile};
use metadata::{Metadata, Strings, Value};

/// Path of a file of the oracle set: under `$KVASIR_FIXTURES`, else under `tests/fixtures` of the workspace.
/// Not checked for existence: a missing file must fail the test, never skip it.
pub(crate) fn fixture(name: &str) -> PathBuf {
    match std::env::var_os("KVASIR_FIXTURES") {
        Some(dir) => Path::new(&dir).join(name),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures").join(name),
    }
}

/// Writes the oracle set's small llama in three files into a folder: their headers, and the tensors of the whole.
pub(crate) fn split_llama(dir: &Path) -> [PathBuf; 3] {
    const BYTES: [usize; 3] = [297_952, 173_504, 173_184];
    let whole = std::fs::read(fixture("tiny/llama/llama-f32.gguf")).unwrap();
    let names = [1, 2, 3].map(|number| format!("llama-split-{number:05}-of-00003"));
    let headers =
        names.each_ref().map(|name| std::fs::read(fixture(&format!("split/llama/{name}.header"))).unwrap());
    let all: usize = BYTES.iter().zip(&headers).map(|(bytes, header)| bytes - header.len()).sum();
    let mut at = whole.len() - all;
    std::array::from_fn(|part| {
        let end = at + BYTES[part] - headers[part].len();
        let path = dir.join(format!("{}.gguf", names[part]));
        std::fs::write(&path, [&headers[part], &whole[at..end]].concat()).unwrap();
        at = end;
        path
    })
}

/// A small model file to write; valid until a test changes it.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) metadata: Metadata,
    pub(crate) tensors: Vec<(String, GgmlType, Vec<u64>)>,
}

impl Plan {
    pub(crate) fn writer(&self) -> Writer {
        let mut writer = Writer::new(self.metadata.clone()).unwrap();
        for (name, ty, dims) in &self.tensors {
            writer.tensor(name, *ty, dims).unwrap();
        }
        writer
    }

    /// Writes the file with all tensors zero, and opens it. The file is deleted; the mapping stays.
    pub(crate) fn open(&self) -> ModelFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let zeros = |info: &TensorInfo| vec![0; usize::try_from(info.bytes()).unwrap()];
        self.writer().write(&mut file, zeros).unwrap();
        ModelFile::open(file.path()).unwrap()
    }

    pub(crate) fn set(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.metadata.insert(key, value);
        self
    }

    pub(crate) fn unset(mut self, key: &str) -> Self {
        self.metadata.retain(|other| other != key);
        self
    }

    /// Adds a tensor, or changes its shape.
    pub(crate) fn tensor(mut self, name: &str, dims: &[u64]) -> Self {
        self = self.without(name);
        self.tensors.push((name.to_owned(), GgmlType::F32, dims.to_vec()));
        self
    }

    pub(crate) fn without(mut self, name: &str) -> Self {
        self.tensors.retain(|(other, ..)| other != name);
        self
    }

    /// Keys, names and shapes of a fixture, without its tokenizer.
    pub(crate) fn of_fixture(name: &str) -> Self {
        let file = ModelFile::open(fixture(name)).unwrap();
        let mut metadata = file.metadata().clone();
        metadata
            .retain(|key| !key.starts_with("tokenizer.ggml.") || key == "tokenizer.ggml.token_type_count");
        let tensor = |info: &TensorInfo| (info.name().to_owned(), info.ty(), info.dims().to_vec());
        Self { metadata, tensors: file.tensors().map(tensor).collect() }
    }

    fn new(arch: &str, layers: u64, layer: &[(&str, &[u64])]) -> Self {
        let key = |key: &str| format!("{arch}.{key}");
        let tokens = (0..VOCAB).map(|id| format!("<{id}>"));
        let metadata = Metadata::from_iter([
            ("general.architecture".to_owned(), Value::from(arch)),
            (key("block_count"), Value::U32(layers as u32)),
            (key("context_length"), Value::U32(128)),
            (key("embedding_length"), Value::U32(HIDDEN as u32)),
            (key("feed_forward_length"), Value::U32(FFN as u32)),
            (key("attention.head_count"), Value::U32(2)),
            (key("attention.head_count_kv"), Value::U32(1)),
            (key("attention.layer_norm_rms_epsilon"), Value::F32(1e-5)),
            ("tokenizer.ggml.model".to_owned(), Value::from("gpt2")),
            ("tokenizer.ggml.tokens".to_owned(), Value::from(Strings::from_iter(tokens))),
        ]);
        let mut plan = Self { metadata, tensors: Vec::new() };
        plan = plan.tensor("token_embd.weight", &[HIDDEN, VOCAB]);
        for index in 0..layers {
            for (name, dims) in layer {
                plan = plan.tensor(&format!("blk.{index}.{name}.weight"), dims);
            }
        }
        plan.tensor("output_norm.weight", &[HIDDEN])
    }
}

const VOCAB: u64 = 12;
const HIDDEN: u64 = 16;
const FFN: u64 = 24;
const HEAD_DIM: u64 = 8;

const ATTENTION: [(&str, &[u64]); 5] = [
    ("attn_norm", &[HIDDEN]),
    ("attn_q", &[HIDDEN, HIDDEN]),
    ("attn_k", &[HIDDEN, HEAD_DIM]),
    ("attn_v", &[HIDDEN, HEAD_DIM]),
    ("attn_output", &[HIDDEN, HIDDEN]),
];
const QK_NORM: [(&str, &[u64]); 2] = [("attn_q_norm", &[HEAD_DIM]), ("attn_k_norm", &[HEAD_DIM])];
const DENSE: [(&str, &[u64]); 4] = [
    ("ffn_norm", &[HIDDEN]),
    ("ffn_gate", &[HIDDEN, FFN]),
    ("ffn_up", &[HIDDEN, FFN]),
    ("ffn_down", &[FFN, HIDDEN]),
];

/// A llama of two layers, hidden 16, two heads of 8 on one, FFN 24, 12 tokens.
pub(crate) fn llama() -> Plan {
    Plan::new("llama", 2, &[ATTENTION.as_slice(), &DENSE].concat())
}

/// A qwen2 of the same shape.
pub(crate) fn qwen2() -> Plan {
    let mut plan = Plan::new("qwen2", 2, &[ATTENTION.as_slice(), &DENSE].concat());
    for layer in 0..2 {
        for (name, width) in [("attn_q", HIDDEN), ("attn_k", HEAD_DIM), ("attn_v", HEAD_DIM)] {
            plan = plan.tensor(&format!("blk.{layer}.{name}.bias"), &[width]);
        }
    }
    plan
}

/// A qwen3 of the same shape.
pub(crate) fn qwen3() -> Plan {
    Plan::new("qwen3", 2, &[ATTENTION.as_slice(), &QK_NORM, &DENSE].concat())
}

/// A qwen3moe of the same shape, with two of three experts of 12, and separate gate and up.
pub(crate) fn qwen3moe() -> Plan {
    let moe: [(&str, &[u64]); 5] = [
        ("ffn_norm", &[HIDDEN]),
        ("ffn_gate_inp", &[HIDDEN, 3]),
        ("ffn_gate_exps", &[HIDDEN, 12, 3]),
        ("ffn_up_exps", &[HIDDEN, 12, 3]),
        ("ffn_down_exps", &[12, HIDDEN, 3]),
    ];
    Plan::new("qwen3moe", 2, &[ATTENTION.as_slice(), &QK_NORM, &moe].concat())
        .set("qwen3moe.expert_count", 3_u32)
        .set("qwen3moe.expert_used_count", 2_u32)
        .set("qwen3moe.expert_feed_forward_length", 12_u32)
}

/// A gemma3 of the same shape and `layers` layers, window 4.
pub(crate) fn gemma3(layers: u64) -> Plan {
    let post: [(&str, &[u64]); 2] = [("post_attention_norm", &[HIDDEN]), ("post_ffw_norm", &[HIDDEN])];
    Plan::new("gemma3", layers, &[ATTENTION.as_slice(), &QK_NORM, &DENSE, &post].concat())
        .set("gemma3.attention.sliding_window", 4_u32)
        .set("gemma3.rope.freq_base", 1e6_f32)
}
