//! Products with f32 activations. A block's weights are unpacked to memory and used for all tokens. The
//! portable code, compiled for AVX2, unpacks scales.

use super::super::PANEL_ROWS;
use super::super::kernel::{F32Call, Tile};
use super::super::layout::{Block, Lanes, PackedBlock};
use super::super::scalar::{Columns, f32_by_columns};
use super::HALF_PANEL;
use super::codes::Codes;
use super::scales::Scales;
use crate::quant::{GgmlType, Scheme};
use std::arch::x86_64::{
    __m256, _mm_loadu_si128, _mm256_castsi256_ps, _mm256_cvtepu16_epi32, _mm256_cvtph_ps, _mm256_fmadd_ps,
    _mm256_loadu_ps, _mm256_set1_epi8, _mm256_set1_ps, _mm256_setzero_si256, _mm256_slli_epi32,
    _mm256_storeu_ps, _mm256_storeu_si256, _mm256_xor_si256,
};

/// # Safety
/// See [`KernelSet`](super::super::kernel::KernelSet); the format is `C` with `S`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn quantised<C: Codes, S: Scales>(call: &F32Call<'_>, tile: &mut Tile) {
    // SAFETY: the caller's contract.
    unsafe {
        f32_by_columns(
            call,
            tile,
            |scheme, packed, block| unpack::<C>(scheme, packed, block),
            |ty, bytes| plain_lanes(ty, bytes),
            |even, odd, columns, a| add_columns(even, odd, columns, a),
        );
    }
}

/// # Safety
/// See [`KernelSet`](super::super::kernel::KernelSet); the format is one of plain floats.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn plain(call: &F32Call<'_>, tile: &mut Tile) {
    // SAFETY: the caller's contract. There are no blocks to unpack.
    unsafe {
        f32_by_columns(
            call,
            tile,
            |_, _, _| {},
            |ty, bytes| plain_lanes(ty, bytes),
            |even, odd, columns, a| add_columns(even, odd, columns, a),
        );
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn unpack<C: Codes>(scheme: &Scheme, packed: PackedBlock<'_>, block: &mut Block) {
    block.unpack_scales(scheme, packed, |bytes| plain_lanes(GgmlType::F16, &bytes[..2 * PANEL_ROWS]));
    assert_eq!(packed.codes.len(), C::BYTES, "the planes of a block");
    let turned = if C::SIGNED { _mm256_set1_epi8(i8::MIN) } else { _mm256_setzero_si256() };
    for half in 0..PANEL_ROWS / HALF_PANEL {
        // SAFETY: the planes of the block are readable; each row has four bytes of each vector.
        let codes = unsafe { C::load(packed.codes.as_ptr().add(4 * HALF_PANEL * half)) };
        for (group, codes) in block.codes.iter_mut().zip(codes) {
            let rows = group[HALF_PANEL * half..][..HALF_PANEL].as_mut_ptr();
            // SAFETY: eight rows of four codes are 32 bytes.
            unsafe { _mm256_storeu_si256(rows.cast(), _mm256_xor_si256(codes, turned)) };
        }
    }
}

/// Adds `a.len()` columns, the first one even, to one token's sums.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn add_columns(even: &mut Lanes<f32>, odd: &mut Lanes<f32>, columns: &Columns, a: &[f32]) {
    let mut sums = [load(even), load(odd)];
    for (k, (column, &a)) in columns.iter().zip(a).enumerate() {
        let (column, sum) = (load(column), &mut sums[k % 2]);
        for (sum, weights) in sum.iter_mut().zip(column) {
            *sum = _mm256_fmadd_ps(weights, _mm256_set1_ps(a), *sum);
        }
    }
    store(sums[0], even);
    store(sums[1], odd);
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn load(lanes: &Lanes<f32>) -> [__m256; 2] {
    // SAFETY: two vectors of eight are the sixteen lanes.
    unsafe { [_mm256_loadu_ps(lanes.as_ptr()), _mm256_loadu_ps(lanes.as_ptr().add(HALF_PANEL))] }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn store(vectors: [__m256; 2], lanes: &mut Lanes<f32>) {
    for (lanes, vector) in lanes.as_chunks_mut::<HALF_PANEL>().0.iter_mut().zip(vectors) {
        // SAFETY: eight lanes.
        unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), vector) };
    }
}

/// One column of a plain float format.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn plain_lanes(ty: GgmlType, bytes: &[u8]) -> Lanes<f32> {
    let mut lanes = [0.0; PANEL_ROWS];
    let values = bytes.chunks_exact(HALF_PANEL * ty.block_bytes());
    for (lanes, values) in lanes.as_chunks_mut::<HALF_PANEL>().0.iter_mut().zip(values) {
        // SAFETY: `values` is eight values of the format: 16 bytes, or 32 of f32; `lanes` is eight f32.
        unsafe {
            let vector = match ty {
                GgmlType::F16 => _mm256_cvtph_ps(_mm_loadu_si128(values.as_ptr().cast())),
                GgmlType::BF16 => {
                    let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(values.as_ptr().cast()));
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
                }
                _ => _mm256_loadu_ps(values.as_ptr().cast()),
            };
            _mm256_storeu_ps(lanes.as_mut_ptr(), vector);
        }
    }
    lanes
}
