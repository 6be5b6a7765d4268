//! AVX-512 kernels: one vector lane per row of the panel.
#![allow(unsafe_code)]

mod codes;
mod float;
mod int8;
mod quantize;
mod rows;
mod scales;

use super::kernel::{F32Call, Int8Call, KernelSet, Tile};
use crate::quant::GgmlType;
use codes::{Bits2, Bits3, Bits4, Bits5, Bits6, Bits8, E2m1, Iq4};
use scales::{E8m0, F16, F16Min, Sixteenths, SixteenthsMin, Super, SuperMin, Ue4m3};

/// How far ahead of use packed weights are asked into L2. Shorter distances get in the hardware prefetchers'
/// way (measured on Zen 4).
const PREFETCH: usize = 8192;

pub(super) static KERNELS: KernelSet =
    KernelSet { int8, f32, quantize: quantize::row, interleave: rows::interleave };

/// Calls `$module::$kernel::<Codes, Scales>` for the format of the call.
macro_rules! by_format {
    ($ty:expr, $module:ident::$kernel:ident, $args:tt, $other:expr) => {
        match $ty {
            GgmlType::Q4_0 => $module::$kernel::<Bits4, F16<8>> $args,
            GgmlType::Q4_1 => $module::$kernel::<Bits4, F16Min> $args,
            GgmlType::Q5_0 => $module::$kernel::<Bits5, F16<16>> $args,
            GgmlType::Q5_1 => $module::$kernel::<Bits5, F16Min> $args,
            GgmlType::Q8_0 => $module::$kernel::<Bits8, F16<128>> $args,
            GgmlType::Q2_K => $module::$kernel::<Bits2, SixteenthsMin> $args,
            GgmlType::Q3_K => $module::$kernel::<Bits3, Sixteenths<4>> $args,
            GgmlType::Q4_K => $module::$kernel::<Bits4, SuperMin> $args,
            GgmlType::Q5_K => $module::$kernel::<Bits5, SuperMin> $args,
            GgmlType::Q6_K => $module::$kernel::<Bits6, Sixteenths<32>> $args,
            GgmlType::IQ4_NL => $module::$kernel::<Iq4, F16<128>> $args,
            GgmlType::IQ4_XS => $module::$kernel::<Iq4, Super> $args,
            GgmlType::MXFP4 => $module::$kernel::<E2m1, E8m0> $args,
            GgmlType::NVFP4 => $module::$kernel::<E2m1, Ue4m3> $args,
            _ => $other,
        }
    };
}

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

/// Repeats `$body` for every `$i` below the constant `$count`, at most 16, as straight code: accumulators
/// indexed by `$i` stay in registers.
macro_rules! unroll {
    ($count:expr, |$i:ident| $body:expr) => {
        unroll!(@ $count, $i, $body, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)
    };
    (@ $count:expr, $i:ident, $body:expr, $($n:literal)*) => {
        $( if $n < $count { let $i: usize = $n; $body } )*
    };
}
use unroll;
