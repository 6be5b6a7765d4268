//! AVX2 kernels, on two vectors of eight rows. A block is unpacked to memory and meets all tokens of the tile
//! from there; scales are unpacked by the portable code, compiled for AVX2.
#![allow(unsafe_code)]

use super::PANEL_ROWS;
use super::activations::{BLOCK, QuantizedBlock};
use super::kernel::{F32Call, Int8Call, KernelSet, Tile};
use super::layout::{Block, Lanes, Layout, PackedBlock, VECTOR, panel_bytes};
use super::scalar::{Columns, f32_by_columns, fold, interleave, quantize_row};
use crate::quant::{Bits, GgmlType, Levels, Scheme};
use std::arch::x86_64::{
    __m128i, __m256, __m256i, _mm_cvtsi32_si128, _mm_loadu_si128, _mm256_abs_epi8, _mm256_add_epi32,
    _mm256_and_si256, _mm256_broadcastsi128_si256, _mm256_castsi256_ps, _mm256_cvtepu16_epi32,
    _mm256_cvtph_ps, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_loadu_si256, _mm256_madd_epi16,
    _mm256_maddubs_epi16, _mm256_or_si256, _mm256_set1_epi8, _mm256_set1_epi16, _mm256_set1_epi32,
    _mm256_set1_ps, _mm256_shuffle_epi8, _mm256_sign_epi8, _mm256_sll_epi16, _mm256_slli_epi32,
    _mm256_srl_epi16, _mm256_storeu_ps, _mm256_storeu_si256, _mm256_xor_si256,
};

pub(super) static KERNELS: KernelSet = KernelSet { int8, f32, quantize, interleave };

/// Rows in a vector.
const HALF_PANEL: usize = PANEL_ROWS / 2;

/// # Safety
/// See [`KernelSet`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn int8(call: &Int8Call<'_>, tile: &mut Tile) {
    let Some(scheme) = Scheme::of(call.ty) else { return };
    let bytes = panel_bytes(call.ty, call.blocks * BLOCK).unwrap_or(0);
    // SAFETY: the caller's contract.
    let panel = unsafe { std::slice::from_raw_parts(call.panel, bytes) };
    tile.0[..call.tokens.len()].fill([0.0; PANEL_ROWS]);
    let mut block = Block::EMPTY;
    for (index, packed) in Layout::of(&scheme).blocks(panel, call.blocks).enumerate() {
        unpack(&scheme, packed, &mut block);
        for (token, acc) in call.tokens.iter().zip(&mut tile.0) {
            // SAFETY: the caller's contract.
            let a = unsafe { &*call.activations.add(token + index) };
            let sums = [half_sums(&block, &scheme, 0, a), half_sums(&block, &scheme, 1, a)];
            fold(&block, &scheme, &sums, a, acc);
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn unpack(scheme: &Scheme, packed: PackedBlock<'_>, block: &mut Block) {
    block.unpack_scales(scheme, packed, |bytes| plain_lanes(GgmlType::F16, &bytes[..2 * PANEL_ROWS]));
    unpack_codes(scheme, packed.codes, block);
}

/// Half a group's codes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn load_codes(bytes: &[u8; VECTOR / 2]) -> __m256i {
    // SAFETY: 32 bytes.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

/// Fills `block.codes` from the planes that [`super::layout`] describes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn unpack_codes(scheme: &Scheme, planes: &[u8], block: &mut Block) {
    let table = match scheme.levels {
        Levels::Plain => None,
        Levels::Table(codes) => {
            // SAFETY: 16 bytes.
            let codes = unsafe { _mm_loadu_si128(codes.as_ptr().cast::<__m128i>()) };
            Some(_mm256_broadcastsi128_si256(codes))
        }
    };
    let (vectors, _) = planes.as_chunks::<{ VECTOR / 2 }>();
    for (g, group) in block.codes.iter_mut().enumerate() {
        // The vector of the first plane, how far its bits are up, and their mask; then the same of the second
        // plane and where its bits go.
        let (low, high) = match scheme.bits {
            Bits::Eight => ((g, 0, 0xff), None),
            Bits::Two => ((g / 4, 2 * (g % 4), 3), None),
            Bits::Three => ((g / 4, 2 * (g % 4), 3), Some((2, g, 1, 2))),
            Bits::Four => ((g % 4, 4 * (g / 4), 15), None),
            Bits::Five => ((g % 4, 4 * (g / 4), 15), Some((4, g, 1, 4))),
            Bits::Six => ((g % 4, 4 * (g / 4), 15), Some((4 + g / 4, 2 * (g % 4), 3, 4))),
        };
        for (half, rows) in group.as_chunks_mut::<HALF_PANEL>().0.iter_mut().enumerate() {
            let (vector, from, mask) = low;
            let mut codes = bits_at(load_codes(&vectors[2 * vector + half]), from, mask);
            if let Some((vector, from, mask, to)) = high {
                let bits = bits_at(load_codes(&vectors[2 * vector + half]), from, mask);
                codes = _mm256_or_si256(codes, _mm256_sll_epi16(bits, _mm_cvtsi32_si128(to)));
            }
            if let Some(table) = table {
                codes = _mm256_shuffle_epi8(table, codes);
            }
            // SAFETY: eight rows of four codes are 32 bytes.
            unsafe { _mm256_storeu_si256(rows.as_mut_ptr().cast(), codes) };
        }
    }
}

/// The bits under `mask` of every byte after a shift right by `from`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn bits_at(bytes: __m256i, from: usize, mask: u8) -> __m256i {
    let shifted = _mm256_srl_epi16(bytes, _mm_cvtsi32_si128(from as i32));
    _mm256_and_si256(shifted, _mm256_set1_epi8(mask.cast_signed()))
}

/// `sum of level * quant` over one half of a block, per row.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn half_sums(block: &Block, scheme: &Scheme, half: usize, a: &QuantizedBlock) -> Lanes<i32> {
    // Codes of up to 8 bits have an offset of 128. Their levels are signed bytes, and pairs of products of
    // magnitudes stay within i16 (2 * 128 * 127); smaller codes (at most 63) do as they are.
    let wide = scheme.offset == 128;
    let start = if wide { 0 } else { scheme.offset * i32::from(a.minus_half_sums[half]) };
    let mut sums = [_mm256_set1_epi32(start); 2];
    let (quads, _) = a.quants[16 * half..].as_chunks::<4>();
    for (codes, quants) in block.codes[4 * half..][..4].iter().zip(quads) {
        let quants = _mm256_set1_epi32(i32::from_ne_bytes(quants.map(i8::cast_unsigned)));
        for (sum, codes) in sums.iter_mut().zip(codes.as_chunks::<HALF_PANEL>().0) {
            // SAFETY: eight rows of four codes are 32 bytes.
            let codes = unsafe { _mm256_loadu_si256(codes.as_ptr().cast::<__m256i>()) };
            let pairs = if wide {
                let levels = _mm256_xor_si256(codes, _mm256_set1_epi8(i8::MIN));
                _mm256_maddubs_epi16(_mm256_abs_epi8(levels), _mm256_sign_epi8(quants, levels))
            } else {
                _mm256_maddubs_epi16(codes, quants)
            };
            *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
        }
    }
    let mut lanes = [0; PANEL_ROWS];
    for (lanes, sum) in lanes.as_chunks_mut::<HALF_PANEL>().0.iter_mut().zip(sums) {
        // SAFETY: eight i32 are 32 bytes.
        unsafe { _mm256_storeu_si256(lanes.as_mut_ptr().cast(), sum) };
    }
    lanes
}

/// # Safety
/// See [`KernelSet`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn f32(call: &F32Call<'_>, tile: &mut Tile) {
    // SAFETY: the caller's contract.
    unsafe {
        f32_by_columns(
            call,
            tile,
            |scheme, packed, block| unpack(scheme, packed, block),
            |ty, bytes| plain_lanes(ty, bytes),
            |even, odd, columns, a| add_columns(even, odd, columns, a),
        );
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

/// # Safety
/// See [`KernelSet`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn quantize(src: &[f32], out: &mut [QuantizedBlock]) {
    quantize_row(src, out);
}
