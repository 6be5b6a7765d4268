//! Keys and tensors of the generated models.

use crate::quant::Quant;
use clap::ValueEnum;
use metadata::{Metadata, Strings, Value};
use model::GgmlType;

#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum Shape {
    /// 28 layers, 1024 wide.
    #[value(name = "qwen3-0.6b")]
    Qwen3_0_6b,
    /// 28 layers, 2048 wide.
    #[value(name = "qwen3-1.7b")]
    Qwen3_1_7b,
    /// A hybrid after Qwen3.5: 20 layers, 1024 wide, every fourth with attention, the others delta nets.
    #[value(name = "qwen3.5-0.5b")]
    Qwen35_0_5b,
    /// A hybrid after Granite 4.0 H 350M: 32 layers, 768 wide, four with attention, the others Mamba-2.
    #[value(name = "granite-4-h-0.35b")]
    Granite4H0_35b,
}

/// A file to write: keys, and every tensor's name, type and dimensions.
pub(crate) struct Plan {
    pub(crate) metadata: Metadata,
    pub(crate) tensors: Vec<(String, GgmlType, Vec<u64>)>,
}

impl Shape {
    pub(crate) fn plan(self, quant: Quant) -> Plan {
        match self {
            Self::Qwen3_0_6b => qwen3(quant, 1024, 3072),
            Self::Qwen3_1_7b => qwen3(quant, 2048, 6144),
            Self::Qwen35_0_5b => qwen35(quant),
            Self::Granite4H0_35b => granite_hybrid(quant),
        }
    }
}

/// Sizes common to all of these models.
struct Sizes {
    arch: &'static str,
    pre: &'static str,
    layers: u32,
    hidden: u32,
    ff: u32,
    heads: u32,
    kv_heads: u32,
    vocab: u32,
    context: u32,
}

impl Plan {
    fn new(quant: Quant, sizes: &Sizes) -> Self {
        let mut metadata = tokenizer(sizes.vocab, sizes.pre);
        metadata.insert("general.architecture", sizes.arch);
        metadata.insert("general.name", "random weights");
        metadata.insert("general.file_type", quant.file_type());
        metadata.insert("general.quantization_version", 2u32);
        let mut plan = Self { metadata, tensors: Vec::new() };
        for (key, value) in [
            ("block_count", sizes.layers),
            ("context_length", sizes.context),
            ("embedding_length", sizes.hidden),
            ("feed_forward_length", sizes.ff),
            ("attention.head_count", sizes.heads),
            ("attention.head_count_kv", sizes.kv_heads),
        ] {
            plan.set(sizes, key, value);
        }
        plan.set(sizes, "attention.layer_norm_rms_epsilon", 1e-6f32);
        plan.tensor("token_embd", quant.embedding(), &[sizes.hidden, sizes.vocab]);
        plan.tensor("output_norm", GgmlType::F32, &[sizes.hidden]);
        plan
    }

    fn set(&mut self, sizes: &Sizes, key: &str, value: impl Into<Value>) {
        self.metadata.insert(format!("{}.{key}", sizes.arch), value);
    }

    fn tensor(&mut self, stem: &str, ty: GgmlType, dims: &[u32]) {
        self.named(&format!("{stem}.weight"), ty, dims);
    }

    fn named(&mut self, name: &str, ty: GgmlType, dims: &[u32]) {
        self.tensors.push((name.to_owned(), ty, dims.iter().map(|&dim| dim.into()).collect()));
    }

    fn ffn(&mut self, quant: Quant, sizes: &Sizes, layer: u32, norm: &str) {
        let Sizes { hidden, ff, layers, .. } = *sizes;
        self.tensor(&format!("blk.{layer}.{norm}"), GgmlType::F32, &[hidden]);
        self.tensor(&format!("blk.{layer}.ffn_gate"), quant.base(), &[hidden, ff]);
        self.tensor(&format!("blk.{layer}.ffn_up"), quant.base(), &[hidden, ff]);
        self.tensor(&format!("blk.{layer}.ffn_down"), quant.wide(layer, layers), &[ff, hidden]);
    }
}

fn qwen3(quant: Quant, hidden: u32, ff: u32) -> Plan {
    let sizes = Sizes {
        arch: "qwen3",
        pre: "qwen2",
        layers: 28,
        hidden,
        ff,
        heads: 16,
        kv_heads: 8,
        vocab: 151_936,
        context: 40_960,
    };
    let dim = 128;
    let mut plan = Plan::new(quant, &sizes);
    plan.set(&sizes, "attention.key_length", dim);
    plan.set(&sizes, "attention.value_length", dim);
    plan.set(&sizes, "rope.freq_base", 1_000_000f32);
    let (q, kv) = (sizes.heads * dim, sizes.kv_heads * dim);
    for layer in 0..sizes.layers {
        let stem = |name| format!("blk.{layer}.{name}");
        plan.tensor(&stem("attn_norm"), GgmlType::F32, &[hidden]);
        plan.tensor(&stem("attn_q"), quant.base(), &[hidden, q]);
        plan.tensor(&stem("attn_k"), quant.base(), &[hidden, kv]);
        plan.tensor(&stem("attn_v"), quant.wide(layer, sizes.layers), &[hidden, kv]);
        plan.tensor(&stem("attn_q_norm"), GgmlType::F32, &[dim]);
        plan.tensor(&stem("attn_k_norm"), GgmlType::F32, &[dim]);
        plan.tensor(&stem("attn_output"), quant.base(), &[q, hidden]);
        plan.ffn(quant, &sizes, layer, "ffn_norm");
    }
    plan
}

fn qwen35(quant: Quant) -> Plan {
    let sizes = Sizes {
        arch: "qwen35",
        pre: "qwen35",
        layers: 20,
        hidden: 1024,
        ff: 2816,
        heads: 8,
        kv_heads: 2,
        vocab: 151_936,
        context: 262_144,
    };
    let (dim, state, state_heads, taps, interval) = (256, 128, 16, 4, 4);
    let hidden = sizes.hidden;
    let inner = state_heads * state;
    let mut plan = Plan::new(quant, &sizes);
    for (key, value) in [
        ("attention.key_length", dim),
        ("attention.value_length", dim),
        ("rope.dimension_count", dim / 4),
        ("ssm.conv_kernel", taps),
        ("ssm.state_size", state),
        ("ssm.group_count", state_heads),
        ("ssm.time_step_rank", state_heads),
        ("ssm.inner_size", inner),
        ("full_attention_interval", interval),
    ] {
        plan.set(&sizes, key, value);
    }
    plan.set(&sizes, "rope.freq_base", 10_000_000f32);
    plan.set(&sizes, "rope.dimension_sections", vec![11i32, 11, 10, 0]);
    let has_attention = |layer: u32| (layer + 1).is_multiple_of(interval);
    plan.set(
        &sizes,
        "attention.recurrent_layers",
        (0..sizes.layers).map(|layer| !has_attention(layer)).collect::<Vec<bool>>(),
    );
    let (q, kv) = (sizes.heads * dim, sizes.kv_heads * dim);
    for layer in 0..sizes.layers {
        let stem = |name| format!("blk.{layer}.{name}");
        plan.tensor(&stem("attn_norm"), GgmlType::F32, &[hidden]);
        if has_attention(layer) {
            let wide = quant.wide(layer / interval, sizes.layers / interval);
            plan.tensor(&stem("attn_q"), quant.base(), &[hidden, 2 * q]);
            plan.tensor(&stem("attn_k"), quant.base(), &[hidden, kv]);
            plan.tensor(&stem("attn_v"), wide, &[hidden, kv]);
            plan.tensor(&stem("attn_q_norm"), GgmlType::F32, &[dim]);
            plan.tensor(&stem("attn_k_norm"), GgmlType::F32, &[dim]);
            plan.tensor(&stem("attn_output"), quant.base(), &[q, hidden]);
        } else {
            plan.tensor(&stem("attn_qkv"), quant.fused(), &[hidden, 3 * inner]);
            plan.tensor(&stem("attn_gate"), quant.base(), &[hidden, inner]);
            plan.tensor(&stem("ssm_conv1d"), GgmlType::F32, &[taps, 3 * inner]);
            plan.tensor(&stem("ssm_beta"), quant.base(), &[hidden, state_heads]);
            plan.tensor(&stem("ssm_alpha"), quant.base(), &[hidden, state_heads]);
            plan.named(&stem("ssm_a"), GgmlType::F32, &[state_heads]);
            plan.named(&stem("ssm_dt.bias"), GgmlType::F32, &[state_heads]);
            plan.tensor(&stem("ssm_norm"), GgmlType::F32, &[state]);
            plan.tensor(&stem("ssm_out"), quant.base(), &[inner, hidden]);
        }
        plan.ffn(quant, &sizes, layer, "post_attention_norm");
    }
    plan
}

/// Layers with attention in Granite 4.0 H 350M.
const GRANITE_ATTENTION: [u32; 4] = [10, 13, 17, 27];

fn granite_hybrid(quant: Quant) -> Plan {
    let sizes = Sizes {
        arch: "granitehybrid",
        pre: "dbrx",
        layers: 32,
        hidden: 768,
        ff: 2048,
        heads: 12,
        kv_heads: 4,
        vocab: 100_352,
        context: 32_768,
    };
    let (state, state_heads, groups, taps) = (128, 48, 1, 4);
    let (hidden, inner) = (sizes.hidden, 2 * sizes.hidden);
    let dim = hidden / sizes.heads;
    let mut plan = Plan::new(quant, &sizes);
    let attention_at = |layer| GRANITE_ATTENTION.iter().position(|&at| at == layer);
    let kv_heads = |layer| attention_at(layer).map_or(0, |_| sizes.kv_heads);
    let kv_heads: Vec<u32> = (0..sizes.layers).map(kv_heads).collect();
    plan.set(&sizes, "attention.head_count_kv", kv_heads);
    for (key, value) in [
        ("vocab_size", sizes.vocab),
        ("rope.dimension_count", dim),
        ("expert_count", 0),
        ("expert_used_count", 0),
        ("expert_shared_feed_forward_length", sizes.ff),
        ("ssm.conv_kernel", taps),
        ("ssm.state_size", state),
        ("ssm.group_count", groups),
        ("ssm.inner_size", inner),
        ("ssm.time_step_rank", state_heads),
    ] {
        plan.set(&sizes, key, value);
    }
    for (key, value) in [
        ("rope.freq_base", 10_000f32),
        ("attention.scale", 0.015_625),
        ("embedding_scale", 12.0),
        ("residual_scale", 0.246),
        ("logit_scale", 3.0),
    ] {
        plan.set(&sizes, key, value);
    }
    plan.set(&sizes, "rope.scaling.finetuned", false);
    let channels = inner + 2 * groups * state;
    let (q, kv) = (sizes.heads * dim, sizes.kv_heads * dim);
    for layer in 0..sizes.layers {
        let stem = |name| format!("blk.{layer}.{name}");
        plan.tensor(&stem("attn_norm"), GgmlType::F32, &[hidden]);
        if let Some(nth) = attention_at(layer) {
            let wide = quant.wide(nth as u32, GRANITE_ATTENTION.len() as u32);
            plan.tensor(&stem("attn_q"), quant.base(), &[hidden, q]);
            plan.tensor(&stem("attn_k"), quant.base(), &[hidden, kv]);
            plan.tensor(&stem("attn_v"), wide, &[hidden, kv]);
            plan.tensor(&stem("attn_output"), quant.base(), &[q, hidden]);
        } else {
            plan.tensor(&stem("ssm_in"), quant.base(), &[hidden, inner + channels + state_heads]);
            plan.tensor(&stem("ssm_conv1d"), GgmlType::F32, &[taps, channels]);
            plan.named(&stem("ssm_conv1d.bias"), GgmlType::F32, &[channels]);
            plan.named(&stem("ssm_a"), GgmlType::F32, &[1, state_heads]);
            plan.named(&stem("ssm_d"), GgmlType::F32, &[1, state_heads]);
            plan.named(&stem("ssm_dt.bias"), GgmlType::F32, &[state_heads]);
            plan.tensor(&stem("ssm_norm"), GgmlType::F32, &[inner / groups, groups]);
            plan.tensor(&stem("ssm_out"), quant.base(), &[inner, hidden]);
        }
        plan.ffn(quant, &sizes, layer, "ffn_norm");
    }
    plan
}

/// A byte-level vocabulary; its further tokens are arbitrary.
fn tokenizer(vocab: u32, pre: &str) -> Metadata {
    let mut metadata = Metadata::default();
    metadata.insert("tokenizer.ggml.model", "gpt2");
    metadata.insert("tokenizer.ggml.pre", pre);
    metadata.insert("tokenizer.ggml.eos_token_id", vocab - 1);
    metadata.insert("tokenizer.ggml.add_bos_token", false);
    // Printable bytes map to themselves, the others to U+0100 and up, as in GPT-2's table.
    let printable = |byte: u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let mut other = 0x100;
    let mut tokens: Vec<String> = Vec::with_capacity(vocab as usize);
    for byte in 0..256u32 {
        let symbol = if printable(byte) {
            byte
        } else {
            let symbol = other;
            other += 1;
            symbol
        };
        tokens.extend(char::from_u32(symbol).map(String::from));
    }
    tokens.extend((256..vocab - 1).map(|id| format!("t{id}")));
    tokens.push("<|endoftext|>".to_owned());
    let mut types = vec![1i32; vocab as usize];
    if let Some(last) = types.last_mut() {
        *last = 3;
    }
    metadata.insert("tokenizer.ggml.tokens", tokens.iter().collect::<Strings>());
    metadata.insert("tokenizer.ggml.token_type", types);
    metadata.insert("tokenizer.ggml.merges", ["t 2"].iter().collect::<Strings>());
    metadata
}
