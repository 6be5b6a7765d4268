//! Products of weight matrices with activations.
//!
//! # Layout
//! A matrix of `rows x cols` (each row one output) is repacked once into *panels* of 16 rows whose SIMD lanes
//! are output rows: no horizontal sums, and no output depends on its neighbours. See [`PackedMatrix`].
//!
//! # Exactness
//! Output `(token, row)` depends only on that row's weights and that token's activations. The order of its
//! operations is fixed: it does not depend on the number of tokens, on the panels of a call or on threads.
//! Decoding one token therefore gives the same bits as prefilling it in a batch.
//!
//! *int8* ([`ActivationMode::Int8`]). Activations are quantised per row in blocks of 32 (see
//! [`QuantizedRows`]); `da` is the block's scale and `s` the sum of its quants (`s0`, `s1` of its halves).
//! `i` is the exact integer sum of `level * quant` over the block (`i0`, `i1` over the halves). Blocks are
//! added in ascending order, in f32 and with fused multiply-adds:
//!
//! | formats | per block of 32 |
//! |---|---|
//! | one scale `d` per 32: Q4_0 Q5_0 Q8_0 IQ4_NL IQ4_XS MXFP4 | `acc = fma(i, d*da, acc)` |
//! | with a min `m` per 32: Q4_1 Q5_1 Q4_K Q5_K | the same, then `acc = fma(m, da*s, acc)` |
//! | integer scales `c0`, `c1` per 16: Q3_K Q6_K | `acc = fma(c0*i0 + c1*i1, d*da, acc)`, the sum in integers |
//! | and integer mins `m0`, `m1`: Q2_K | the same, then `acc = fma(m0*s0 + m1*s1, -dmin*da, acc)` |
//! | float scales `d0`, `d1` per 16: NVFP4 | `acc = fma(i0, d0*da, acc)`, `acc = fma(i1, d1*da, acc)` |
//!
//! Integer sums are exact and stay below 2^24, so every instruction set gives the same bits.
//!
//! *f32* ([`ActivationMode::F32`], and F32, F16 and BF16 weights in either mode). Weights are dequantised to
//! exactly the f32 values of [`dequantize`](crate::quant::dequantize). There are two partial sums, for even
//! and odd columns, each `acc = fma(w, a, acc)` in ascending order; the result is even plus odd. Every
//! instruction set gives the same bits.

mod activations;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod formats;
mod kernel;
mod layout;
#[cfg(target_arch = "aarch64")]
mod neon;
mod output;
mod packed;
mod rows;
mod scalar;
#[cfg(test)]
mod tests;

pub use activations::{ActivationMode, Activations, QuantizedBlock, QuantizedRows, SharedQuantizedRows};
pub use kernel::{MatmulKernels, matmul_single_thread};
pub use output::{Epilogue, SharedOut};
pub use packed::{
    MatrixView, PACK_LAYOUT, PackedMatrix, PackedMatrixBuilder, PackedPieces, PanelChunk, SharedBytes,
};

/// Output rows in a panel: the number of lanes of the widest vector.
pub const PANEL_ROWS: usize = 16;
