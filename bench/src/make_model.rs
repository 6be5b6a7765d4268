//! `make-model`: a GGUF of a real model's shape with random weights, for speed at realistic size.
//!
//! Speed does not depend on the values. Scales are small, so that activations stay finite; the vocabulary is
//! one that every engine can load, its texts mean nothing.

use anyhow::{Context, Result};
use clap::{Parser, ValueEnum};
use half::f16;
use model::GgmlType;
use model::gguf::writer::Writer;
use model::metadata::{Metadata, Strings};
use std::io::BufWriter;
use std::path::PathBuf;

/// Writes a GGUF of a real model's shape with random weights
#[derive(Parser)]
#[command(
    after_help = "Example:\n  make-model --shape qwen3-0.6b --quant q4-k-m --out target/qwen3-0.6b-q4_k_m.gguf"
)]
struct Args {
    /// Whose dimensions
    #[arg(long, value_enum, default_value = "qwen3-0.6b")]
    shape: Shape,
    /// How weights are stored
    #[arg(long, value_enum)]
    quant: Quant,
    /// The file to write
    #[arg(long)]
    out: PathBuf,
}

#[derive(Clone, Copy, ValueEnum)]
enum Shape {
    /// 28 layers, 1024 wide.
    #[value(name = "qwen3-0.6b")]
    Qwen3_0_6b,
    /// 28 layers, 2048 wide.
    #[value(name = "qwen3-1.7b")]
    Qwen3_1_7b,
}

#[derive(Clone, Copy, ValueEnum)]
enum Quant {
    /// Mixed, as llama.cpp's quantiser does it.
    Q4KM,
    /// 8 bits.
    Q8_0,
    /// 4 bits, blocks of 32.
    Q4_0,
    /// Half precision.
    F16,
}

struct Dims {
    layers: u32,
    hidden: u32,
    ff: u32,
    heads: u32,
    kv_heads: u32,
    head_dim: u32,
    vocab: u32,
    context: u32,
}

impl Shape {
    fn dims(self) -> Dims {
        let base = Dims {
            layers: 28,
            hidden: 1024,
            ff: 3072,
            heads: 16,
            kv_heads: 8,
            head_dim: 128,
            vocab: 151_936,
            context: 40_960,
        };
        match self {
            Self::Qwen3_0_6b => base,
            Self::Qwen3_1_7b => Dims { hidden: 2048, ff: 6144, ..base },
        }
    }
}

fn main() -> Result<()> {
    let args = Args::parse();
    let dims = args.shape.dims();
    let mut writer = Writer::new(metadata(&dims, args.quant))?;
    let (h, hd) = (u64::from(dims.hidden), u64::from(dims.head_dim));
    let (q, kv, ff) = (u64::from(dims.heads) * hd, u64::from(dims.kv_heads) * hd, u64::from(dims.ff));
    writer.tensor("token_embd.weight", args.quant.embedding(), &[h, u64::from(dims.vocab)])?;
    writer.tensor("output_norm.weight", GgmlType::F32, &[h])?;
    for layer in 0..dims.layers {
        let wide = args.quant.wide(layer, dims.layers);
        let base = args.quant.base();
        let tensors: [(&str, GgmlType, &[u64]); 11] = [
            ("attn_norm", GgmlType::F32, &[h]),
            ("attn_q", base, &[h, q]),
            ("attn_k", base, &[h, kv]),
            ("attn_v", wide, &[h, kv]),
            ("attn_q_norm", GgmlType::F32, &[hd]),
            ("attn_k_norm", GgmlType::F32, &[hd]),
            ("attn_output", base, &[q, h]),
            ("ffn_norm", GgmlType::F32, &[h]),
            ("ffn_gate", base, &[h, ff]),
            ("ffn_up", base, &[h, ff]),
            ("ffn_down", wide, &[ff, h]),
        ];
        for (name, ty, shape) in tensors {
            writer.tensor(&format!("blk.{layer}.{name}.weight"), ty, shape)?;
        }
    }
    let file =
        std::fs::File::create(&args.out).with_context(|| format!("cannot create {}", args.out.display()))?;
    let mut random = Random(0x5eed);
    writer.write(&mut BufWriter::new(file), |info| random.tensor(info.ty(), info.bytes() as usize))?;
    Ok(())
}

fn metadata(dims: &Dims, quant: Quant) -> Metadata {
    let mut metadata = Metadata::default();
    let mut set = |key: &str, value: u32| metadata.insert(format!("qwen3.{key}"), value);
    set("block_count", dims.layers);
    set("context_length", dims.context);
    set("embedding_length", dims.hidden);
    set("feed_forward_length", dims.ff);
    set("attention.head_count", dims.heads);
    set("attention.head_count_kv", dims.kv_heads);
    set("attention.key_length", dims.head_dim);
    set("attention.value_length", dims.head_dim);
    metadata.insert("qwen3.rope.freq_base", 1_000_000f32);
    metadata.insert("qwen3.attention.layer_norm_rms_epsilon", 1e-6f32);
    metadata.insert("general.architecture", "qwen3");
    metadata.insert("general.name", "random weights");
    metadata.insert("general.file_type", quant.file_type());
    metadata.insert("general.quantization_version", 2u32);
    metadata.insert("tokenizer.ggml.model", "gpt2");
    metadata.insert("tokenizer.ggml.pre", "qwen2");
    metadata.insert("tokenizer.ggml.eos_token_id", dims.vocab - 1);
    metadata.insert("tokenizer.ggml.add_bos_token", false);
    // Printable bytes stand for themselves, the others for U+0100 and up, as in GPT-2's table.
    let printable = |byte: u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let mut other = 0x100;
    let mut tokens: Vec<String> = Vec::with_capacity(dims.vocab as usize);
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
    tokens.extend((256..dims.vocab - 1).map(|id| format!("t{id}")));
    tokens.push("<|endoftext|>".to_owned());
    let mut types = vec![1i32; dims.vocab as usize];
    if let Some(last) = types.last_mut() {
        *last = 3;
    }
    metadata.insert("tokenizer.ggml.tokens", tokens.iter().collect::<Strings>());
    metadata.insert("tokenizer.ggml.token_type", types);
    metadata.insert("tokenizer.ggml.merges", ["t 2"].iter().collect::<Strings>());
    metadata
}

impl Quant {
    fn base(self) -> GgmlType {
        match self {
            Self::Q4KM => GgmlType::Q4_K,
            Self::Q8_0 => GgmlType::Q8_0,
            Self::Q4_0 => GgmlType::Q4_0,
            Self::F16 => GgmlType::F16,
        }
    }

    fn embedding(self) -> GgmlType {
        match self {
            Self::Q4KM | Self::Q4_0 => GgmlType::Q6_K,
            Self::Q8_0 => GgmlType::Q8_0,
            Self::F16 => GgmlType::F16,
        }
    }

    /// Type of `attn_v` and `ffn_down`: more bits in the first and last eighth and in every third layer.
    fn wide(self, layer: u32, layers: u32) -> GgmlType {
        let eighth = layers / 8;
        let more = layer < eighth || layer >= 7 * layers / 8 || (layer - eighth) % 3 == 2;
        match self {
            Self::Q4KM if more => GgmlType::Q6_K,
            _ => self.base(),
        }
    }

    /// llama.cpp's number for the mix.
    fn file_type(self) -> u32 {
        match self {
            Self::Q4KM => 15,
            Self::Q8_0 => 7,
            Self::Q4_0 => 2,
            Self::F16 => 1,
        }
    }
}

/// xorshift64* (Vigna 2014): enough for bytes that only have to differ.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn tensor(&mut self, ty: GgmlType, bytes: usize) -> Vec<u8> {
        match ty {
            GgmlType::F32 => std::iter::repeat_n(1f32.to_le_bytes(), bytes / 4).flatten().collect(),
            GgmlType::F16 => (0..bytes / 2).flat_map(|_| self.small(0.03).to_le_bytes()).collect(),
            _ => {
                let mut data: Vec<u8> =
                    (0..bytes.div_ceil(8)).flat_map(|_| self.next().to_le_bytes()).collect();
                data.truncate(bytes);
                self.set_scales(ty, &mut data);
                data
            }
        }
    }

    /// A value in (-range, range).
    fn small(&mut self, range: f32) -> f16 {
        f16::from_f32(range * ((self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0))
    }

    /// Makes the f16 fields of every block finite and small.
    fn set_scales(&mut self, ty: GgmlType, data: &mut [u8]) {
        let (block, fields, range): (usize, &[usize], f32) = match ty {
            GgmlType::Q4_0 => (18, &[0], 0.004),
            GgmlType::Q8_0 => (34, &[0], 0.0004),
            GgmlType::Q4_K => (144, &[0, 2], 0.0001),
            GgmlType::Q6_K => (210, &[208], 0.00002),
            _ => return,
        };
        for block in data.chunks_exact_mut(block) {
            for &at in fields {
                let scale = self.small(range).to_le_bytes();
                block[at..at + 2].copy_from_slice(&scale);
            }
        }
    }
}
