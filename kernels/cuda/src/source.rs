//! Sources of the kernels.

use super::Arch;
use kernels::quant::GgmlType;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

pub mod matmul;

/// Headers that every source may include, by name: types and conversions, elementary functions, rows of values.
pub const HEADERS: [(&str, &str); 3] = [
    ("prelude.cuh", include_str!("prelude.cuh")),
    ("math.cuh", include_str!("math.cuh")),
    ("rows.cuh", include_str!("rows.cuh")),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Source {
    /// Name in messages.
    pub name: &'static str,
    pub text: &'static str,
    /// Names of its `extern "C"` kernels.
    pub kernels: &'static [&'static str],
}

/// Row operations: norms, gates, sums, quantisation to 8 bits.
pub const ROWWISE: Source = Source {
    name: "rowwise.cu",
    text: include_str!("rowwise.cu"),
    kernels: &[
        "quantise",
        "quantise_nvfp4",
        "norm_rows",
        "add_norm",
        "gated_norm",
        "gate",
        "add",
        "scale_rows",
        "scale",
        "hadamard",
        "gather_cols",
        "gather_rows",
        "place_heads",
        "argmax",
    ],
};

/// A source for the element types of a cache, see `KvBlock::type_numbers`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CacheSource {
    /// Paged attention for heads up to `width`: 64, 128, 256 or 512; 768 if latent.
    Attention { types: [usize; 2], width: usize, kind: AttentionKind },
    /// Operations between projections and attention.
    Qkv { types: [usize; 2], latent: bool },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AttentionKind {
    Plain,
    /// Over latent caches.
    Latent,
    /// To the keys on both sides of each row, of heads up to 64 wide.
    TwoSided,
}

/// Names of a source's kernels between projections and attention.
pub const QKV_KERNELS: &[&str] = &["rope_angles", "run_factors", "qkv"];

impl CacheSource {
    /// The source, which is made once.
    pub fn get(self) -> &'static Source {
        static MADE: Mutex<BTreeMap<String, &'static Source>> = Mutex::new(BTreeMap::new());
        let mut made = MADE.lock().unwrap_or_else(PoisonError::into_inner);
        let (name, text, kernels) = self.parts();
        made.entry(name.clone()).or_insert_with(|| {
            Box::leak(Box::new(Source { name: name.leak(), text: text().leak(), kernels }))
        })
    }

    fn parts(self) -> (String, Box<dyn Fn() -> String>, &'static [&'static str]) {
        let (types, kind) = match self {
            Self::Attention { types, kind, .. } => (types, kind),
            Self::Qkv { types, latent: true } => (types, AttentionKind::Latent),
            Self::Qkv { types, latent: false } => (types, AttentionKind::Plain),
        };
        let (what, latent, around) = match kind {
            AttentionKind::Plain => ("", 0, 0),
            AttentionKind::Latent => ("latent ", 1, 0),
            AttentionKind::TwoSided => ("two-sided ", 0, 1),
        };
        let [k, v] = types;
        let named = if k == v { format!("type {k}") } else { format!("types {k} and {v}") };
        let defines = move |rest: String| {
            format!("#define K_TYPE {k}\n#define V_TYPE {v}\n#define LATENT {latent}\n{rest}")
        };
        match self {
            Self::Qkv { latent, .. } => {
                let max_dim = if latent { 576 } else { 512 };
                let text = move || {
                    defines(format!("#define MAX_DIM {max_dim}\n#line 1\n{}", include_str!("qkv.cu")))
                };
                (format!("{what}qkv.cu, {named}"), Box::new(text), QKV_KERNELS)
            }
            Self::Attention { width, .. } => {
                // Tensor cores take binary16.
                let tensor = types == [1, 1] && width <= 256 && kind == AttentionKind::Plain;
                let (how, text, kernels): (_, _, &[&str]) = match width {
                    _ if tensor => (
                        "tensor.cu",
                        include_str!("attention/tensor.cu"),
                        &["combine", "attend_16", "attend_prompt"],
                    ),
                    ..=256 if kind == AttentionKind::Plain => {
                        ("lanes.cu", LANES, &["combine", "attend_1", "attend_2", "attend_4", "attend_8"])
                    }
                    ..=512 => ("lanes.cu", LANES, &["combine", "attend_1", "attend_2", "attend_4"]),
                    _ => ("lanes.cu", LANES, &["combine", "attend_1", "attend_2"]),
                };
                let text = move || {
                    let common = include_str!("attention/common.cuh");
                    defines(format!(
                        "#define AROUND {around}\n#define WIDTH {width}\n#line 1 \"common.cuh\"\n{common}\
                         #line 1 \"{how}\"\n{text}"
                    ))
                };
                (format!("{what}attention, {named}, width {width}"), Box::new(text), kernels)
            }
        }
    }

    /// All sources of caches with one type, and two of the many with two. Two-sided attention without the smallest
    /// types, which encoders have no use for.
    fn checked() -> impl Iterator<Item = Self> {
        use AttentionKind::{Latent, Plain, TwoSided};
        let one = (0..5).flat_map(|ty| {
            let types = [ty; 2];
            let forms = [(64, Plain), (128, Plain), (256, Plain), (512, Plain), (768, Latent)];
            let attention = forms.map(|(width, kind)| Self::Attention { types, width, kind });
            attention.into_iter().chain([false, true].map(|latent| Self::Qkv { types, latent }))
        });
        let around = (0..3).map(|ty| Self::Attention { types: [ty; 2], width: 64, kind: TwoSided });
        let types = [2, 4];
        let apart = [Self::Attention { types, width: 128, kind: Plain }, Self::Qkv { types, latent: false }];
        one.chain(around).chain(apart)
    }
}

const LANES: &str = include_str!("attention/lanes.cu");

/// Convolution, delta net, Mamba-2.
pub const RECURRENT: Source = Source {
    name: "recurrent.cu",
    text: include_str!("recurrent.cu"),
    kernels: &[
        "conv",
        "keep_rows",
        "delta_net_64",
        "delta_net_128",
        "delta_net_256",
        "mamba2_64",
        "mamba2_128",
        "mamba2_256",
    ],
};

/// Mixture of experts without the products.
pub const MOE: Source = Source {
    name: "moe.cu",
    text: include_str!("moe.cu"),
    kernels: &["route", "expert_lists", "expert_gate", "expert_sum", "head_lists"],
};

/// Additions of LoRA adapters.
pub const LORA: Source =
    Source { name: "lora.cu", text: include_str!("lora.cu"), kernels: &["lora_inner", "lora_add"] };

/// Best tokens of rows of logits.
pub const SAMPLING: Source =
    Source { name: "sampling.cu", text: include_str!("sampling.cu"), kernels: &["best"] };

/// Sources without variants for cache types.
const PLAIN: &[Source] = &[
    ROWWISE,
    RECURRENT,
    MOE,
    LORA,
    SAMPLING,
    matmul::F32,
    matmul::F16,
    matmul::BF16,
    matmul::Q4_0,
    matmul::Q4_1,
    matmul::Q5_0,
    matmul::Q5_1,
    matmul::Q8_0,
    matmul::Q2_K,
    matmul::Q3_K,
    matmul::Q4_K,
    matmul::Q5_K,
    matmul::Q6_K,
    matmul::IQ4_NL,
    matmul::IQ4_XS,
    matmul::MXFP4,
    matmul::NVFP4,
    matmul::FP8,
    matmul::INT8,
    matmul::INT5,
    matmul::INT4,
];

/// Sources for architectures that multiply blocks with scales.
const SCALED: &[Source] = &[matmul::MXFP4_SCALED, matmul::NVFP4_SCALED];

/// Returns every source that a worker may compile for an architecture, but those of caches whose keys and values have
/// different types: of these, two.
pub fn all(arch: Arch) -> impl Iterator<Item = &'static Source> {
    let scaled = if arch.has_block_scales() { SCALED } else { &[] };
    let bf16 =
        GgmlType::ALL.iter().filter_map(|ty| matmul::bf16(*ty)).filter(move |_| arch.has_group_products());
    PLAIN.iter().chain(scaled).chain(bf16).chain(CacheSource::checked().map(CacheSource::get))
}
