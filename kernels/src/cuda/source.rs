//! The kernels' sources.

use super::matmul::sources as matmul;

/// What every source may include, by the name `prelude.cuh`.
pub const PRELUDE: &str = include_str!("prelude.cuh");

/// One file of kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Source {
    /// Its name, as in messages.
    pub name: &'static str,
    /// CUDA C++.
    pub text: &'static str,
    /// `extern "C"` kernels in it.
    pub kernels: &'static [&'static str],
}

/// Per row: norms, gates, sums, the 8-bit form.
pub const ROWWISE: Source = Source {
    name: "rowwise.cu",
    text: concat!(include_str!("math.cuh"), include_str!("rowwise.cu")),
    kernels: &[
        "quantise",
        "norm_rows",
        "add_norm",
        "gated_norm",
        "gate",
        "add",
        "scale_rows",
        "scale",
        "gather_rows",
        "argmax",
    ],
};

/// All of them.
pub const ALL: &[Source] = &[
    ROWWISE,
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
];
