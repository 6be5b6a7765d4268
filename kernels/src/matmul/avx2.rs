//! AVX2 kernels: a panel is two vectors of eight rows.
#![allow(unsafe_code)]

mod codes;
mod float;
mod int8;
mod scales;

use super::PANEL_ROWS;
use super::activations::QuantizedBlock;
use super::formats::by_format;
use super::kernel::{F32Call, Int8Call, KernelSet, Tile};
use super::scalar::{interleave, quantize_row};
use crate::quant::GgmlType;
use codes::{Bits2, Bits3, Bits4, Bits5, Bits6, Bits8, E2m1, Iq4};
use scales::{E4m3, E8m0, F16, F16Min, F32, Sixteenths, SixteenthsMin, Super, SuperMin, Ue4m3};

pub(super) static KERNELS: KernelSet = KernelSet { int8, f32, quantize, interleave };

/// Rows in a vector.
const HALF_PANEL: usize = PANEL_ROWS / 2;

/// # Safety
/// See [`KernelSet`].
unsafe fn int8(call: &Int8Call<'_>, tile: &mut Tile) {
    // SAFETY: the caller's contract.
    unsafe { by_format!(call.ty, int8::product, (call, tile), ()) }
}

/// # Safety
/// See [`KernelSet`].
unsafe fn f32(call: &F32Call<'_>, tile: &mut Tile) {
    // SAFETY: the caller's contract.
    unsafe { by_format!(call.ty, float::quantised, (call, tile), float::plain(call, tile)) }
}

/// # Safety
/// See [`KernelSet`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn quantize(src: &[f32], out: &mut [QuantizedBlock]) {
    quantize_row(src, out);
}
