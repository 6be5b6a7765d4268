//! Quantises f32 rows to int8 blocks, bit for bit like `scalar::quantize_block`.

use super::super::activations::{BLOCK, QuantizedBlock};
use super::super::scalar::SMALLEST;
use std::arch::x86_64::{
    _mm_storeu_si128, _mm512_and_si512, _mm512_castps_si512, _mm512_cvtepi32_epi8, _mm512_cvtps_epi32,
    _mm512_loadu_ps, _mm512_max_epu32, _mm512_mul_ps, _mm512_reduce_add_epi32, _mm512_reduce_max_epu32,
    _mm512_set1_epi32, _mm512_set1_ps,
};

/// # Safety
/// Needs AVX-512 F; see [`KernelSet`](super::super::kernel::KernelSet).
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2")]
pub(super) unsafe fn row(src: &[f32], out: &mut [QuantizedBlock]) {
    let (whole, rest) = src.as_chunks::<BLOCK>();
    for (values, out) in whole.iter().zip(&mut *out) {
        quantize_block(values, out);
    }
    if let (false, Some(out)) = (rest.is_empty(), out.get_mut(whole.len())) {
        let mut padded = [0.0; BLOCK];
        padded[..rest.len()].copy_from_slice(rest);
        quantize_block(&padded, out);
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2")]
fn quantize_block(values: &[f32; BLOCK], out: &mut QuantizedBlock) {
    // SAFETY: two vectors of 16 are the 32 values.
    let v = unsafe { [_mm512_loadu_ps(values.as_ptr()), _mm512_loadu_ps(values.as_ptr().add(16))] };
    let magnitude = v.map(|v| _mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(0x7fff_ffff)));
    let largest = f32::from_bits(_mm512_reduce_max_epu32(_mm512_max_epu32(magnitude[0], magnitude[1])));
    if !largest.is_finite() {
        *out = QuantizedBlock::POISON;
        return;
    }
    if largest < SMALLEST {
        *out = QuantizedBlock::ZERO;
        return;
    }
    let inverse = _mm512_set1_ps(127.0 / largest);
    let quants = v.map(|v| _mm512_cvtps_epi32(_mm512_mul_ps(v, inverse)));
    *out = QuantizedBlock::with_sums(largest / 127.0, quants.map(|quants| _mm512_reduce_add_epi32(quants)));
    for (half, quants) in quants.into_iter().enumerate() {
        // SAFETY: 16 of the 32 quants.
        unsafe {
            _mm_storeu_si128(out.quants.as_mut_ptr().add(16 * half).cast(), _mm512_cvtepi32_epi8(quants))
        };
    }
}
