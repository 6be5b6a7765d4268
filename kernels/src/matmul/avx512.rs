//! AVX-512 kernels: one vector lane per row of the panel.
#![allow(unsafe_code)]

mod codes;
mod float;
mod int8;
mod quantize;
mod rows;
mod scales;

use super::formats::by_format;
use super::kernel::{F32Call, Int8Call, KernelSet, Tile};
use crate::quant::GgmlType;
use codes::{Bits2, Bits3, Bits4, Bits5, Bits6, Bits8, E2m1, Iq4};
use scales::{E4m3, E8m0, F16, F16Min, F32, Sixteenths, SixteenthsMin, Super, SuperMin, Ue4m3};

/// Prefetch distance of packed weights into L2, in bytes. Shorter distances interfere with the hardware
/// prefetchers (measured on Zen 4).
const PREFETCH: usize = 8192;

pub(super) static KERNELS: KernelSet =
    KernelSet { int8, f32, quantize: quantize::row, interleave: rows::interleave };

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

/// Repeats `$body` for every `$i` below the constant `$count`, at most 16, as unrolled code, so that
/// accumulators indexed by `$i` stay in registers.
macro_rules! unroll {
    ($count:expr, |$i:ident| $body:expr) => {
        unroll!(@ $count, $i, $body, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)
    };
    (@ $count:expr, $i:ident, $body:expr, $($n:literal)*) => {
        $( if $n < $count { let $i: usize = $n; $body } )*
    };
}
use unroll;
