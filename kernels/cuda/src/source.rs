//! Sources of the kernels.

pub mod matmul;

/// Headers that every source may include, by name: types and conversions, elementary functions.
pub const HEADERS: [(&str, &str); 2] =
    [("prelude.cuh", include_str!("prelude.cuh")), ("math.cuh", include_str!("math.cuh"))];

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
        "norm_rows",
        "add_norm",
        "gated_norm",
        "gate",
        "add",
        "scale_rows",
        "scale",
        "gather_cols",
        "gather_rows",
        "place_heads",
        "argmax",
    ],
};

/// Attention for one element type (a number of `kv::type_number`) and one head width, by lanes or on tensor
/// cores.
macro_rules! attention {
    ($kv_type:literal, $width:literal, $how:literal, $($attend:literal),*) => {
        attention_source!($kv_type, $width, 0, 0, "", $how, $($attend),*)
    };
}

/// The same, with LATENT, AROUND and the beginning of the name.
macro_rules! attention_source {
    (
        $kv_type:literal, $width:literal, $latent:literal, $around:literal, $what:literal, $how:literal,
        $($attend:literal),*
    ) => {
        Source {
            name: concat!($what, "attention, type ", $kv_type, ", width ", $width),
            text: concat!(
                "#define KV_TYPE ",
                $kv_type,
                "\n#define LATENT ",
                $latent,
                "\n#define AROUND ",
                $around,
                "\n#define WIDTH ",
                $width,
                "\n#line 1 \"common.cuh\"\n",
                include_str!("attention/common.cuh"),
                "#line 1 \"",
                $how,
                "\"\n",
                include_str!(concat!("attention/", $how)),
            ),
            kernels: &["combine", $($attend),*],
        }
    };
}

/// Attention for heads up to 64, 128, 256 and 512 wide.
macro_rules! attention_by_lanes {
    ($kv_type:literal) => {
        [
            attention!($kv_type, 64, "lanes.cu", "attend_1", "attend_2", "attend_4", "attend_8"),
            attention!($kv_type, 128, "lanes.cu", "attend_1", "attend_2", "attend_4", "attend_8"),
            attention!($kv_type, 256, "lanes.cu", "attend_1", "attend_2", "attend_4", "attend_8"),
            attention!($kv_type, 512, "lanes.cu", "attend_1", "attend_2", "attend_4"),
        ]
    };
}

/// Paged attention, by element type of the cache and by head width.
pub static ATTENTION: [[Source; 4]; 3] = [
    attention_by_lanes!(0),
    [
        attention!(1, 64, "tensor.cu", "attend_16"),
        attention!(1, 128, "tensor.cu", "attend_16"),
        attention!(1, 256, "tensor.cu", "attend_16"),
        attention!(1, 512, "lanes.cu", "attend_1", "attend_2", "attend_4"),
    ],
    attention_by_lanes!(2),
];

macro_rules! latent_attention {
    ($kv_type:literal) => {
        attention_source!($kv_type, 768, 1, 0, "latent ", "lanes.cu", "attend_1", "attend_2")
    };
}

/// Attention over latent caches, by element type.
pub static LATENT_ATTENTION: [Source; 3] = [latent_attention!(0), latent_attention!(1), latent_attention!(2)];

macro_rules! attention_around {
    ($kv_type:literal) => {
        attention_source!($kv_type, 64, 0, 1, "two-sided ", "lanes.cu", "attend_1", "attend_2", "attend_4")
    };
}

/// Attention to the keys around each row, of heads up to 64 wide, by element type.
pub static ATTENTION_AROUND: [Source; 3] = [attention_around!(0), attention_around!(1), attention_around!(2)];

/// Norm and rotation of heads, and writes to the cache, for one element type.
macro_rules! qkv {
    ($kv_type:literal) => {
        qkv!($kv_type, 0, 512, "")
    };
    ($kv_type:literal, $latent:literal, $max_dim:literal, $what:literal) => {
        Source {
            name: concat!($what, "qkv.cu, type ", $kv_type),
            text: concat!(
                "#define KV_TYPE ",
                $kv_type,
                "\n#define LATENT ",
                $latent,
                "\n#define MAX_DIM ",
                $max_dim,
                "\n#line 1\n",
                include_str!("qkv.cu")
            ),
            kernels: &["rope_angles", "run_factors", "qkv"],
        }
    };
}

/// Operations between projections and attention, by element type of the cache.
pub static QKV: [Source; 3] = [qkv!(0), qkv!(1), qkv!(2)];

/// The same for latent caches.
pub static LATENT_QKV: [Source; 3] =
    [qkv!(0, 1, 576, "latent "), qkv!(1, 1, 576, "latent "), qkv!(2, 1, 576, "latent ")];

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

/// Best tokens of rows of logits.
pub const SAMPLING: Source =
    Source { name: "sampling.cu", text: include_str!("sampling.cu"), kernels: &["best"] };

/// Sources without variants for cache types.
const PLAIN: &[Source] = &[
    ROWWISE,
    RECURRENT,
    MOE,
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

/// Returns every source that a worker may compile.
pub fn all() -> impl Iterator<Item = &'static Source> {
    let latent = LATENT_QKV.iter().chain(&LATENT_ATTENTION);
    PLAIN.iter().chain(&QKV).chain(ATTENTION.iter().flatten()).chain(latent).chain(&ATTENTION_AROUND)
}
