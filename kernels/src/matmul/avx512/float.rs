//! Products with f32 activations. Weights are unpacked to f32 lanes, column by column, and used for up to 8
//! tokens. Even and odd columns have separate accumulators.

use super::super::activations::BLOCK;
use super::super::kernel::{F32Call, Tile};
use super::super::layout::{HEADER_BLOCKS, cluster_blocks};
use super::PREFETCH;
use super::codes::Codes;
use super::scales::Scales;
use super::unroll;
use crate::aligned::CACHE_LINE;
use crate::quant::GgmlType;
use std::arch::x86_64::{
    __m512, _MM_HINT_T0, _MM_HINT_T1, _mm_prefetch, _mm256_loadu_si256, _mm512_add_ps, _mm512_castsi512_ps,
    _mm512_cvtepu16_epi32, _mm512_cvtph_ps, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_mul_ps, _mm512_set1_ps,
    _mm512_setzero_ps, _mm512_slli_epi32, _mm512_storeu_ps,
};

/// Calls `$kernel::<.., N>` for the tokens of the call, at most eight at a time.
macro_rules! by_tokens {
    ($call:expr, $tile:expr, $kernel:ident::<$($generic:ty),+>) => {
        for (group, tokens) in $call.tokens.chunks(8).enumerate() {
            let call = F32Call { tokens, ..*$call };
            let lanes = $tile.0[8 * group..].as_mut_ptr().cast();
            match tokens.len() {
                1 => $kernel::<$($generic),+, 1>(&call, lanes),
                2 => $kernel::<$($generic),+, 2>(&call, lanes),
                3..=4 => $kernel::<$($generic),+, 4>(&call, lanes),
                _ => $kernel::<$($generic),+, 8>(&call, lanes),
            }
        }
    };
}

/// # Safety
/// See [`KernelSet`](super::super::kernel::KernelSet); the format is `C` with `S`.
pub(super) unsafe fn quantised<C: Codes, S: Scales>(call: &F32Call<'_>, tile: &mut Tile) {
    // SAFETY: the caller's contract; each group is at most eight tokens, which have their lanes in the tile.
    unsafe { by_tokens!(call, tile, quantised_tokens::<C, S>) }
}

/// # Safety
/// See [`KernelSet`](super::super::kernel::KernelSet); the format is a plain float.
pub(super) unsafe fn plain(call: &F32Call<'_>, tile: &mut Tile) {
    // SAFETY: as above.
    unsafe {
        match call.ty {
            GgmlType::F16 => by_tokens!(call, tile, plain_tokens::<F16>),
            GgmlType::BF16 => by_tokens!(call, tile, plain_tokens::<Bf16>),
            _ => by_tokens!(call, tile, plain_tokens::<F32>),
        }
    }
}

/// Accumulators of `N` tokens, even columns first.
type Sums<const N: usize> = [[__m512; N]; 2];

/// Stores the sum of even and odd columns for the tokens that exist.
#[target_feature(enable = "avx512f")]
unsafe fn store<const N: usize>(sums: Sums<N>, tokens: usize, lanes: *mut f32) {
    unroll!(N, |t| {
        if t < tokens {
            // SAFETY: the caller provides 16 lanes for each token.
            unsafe { _mm512_storeu_ps(lanes.add(16 * t), _mm512_add_ps(sums[0][t], sums[1][t])) };
        }
    });
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx2,fma,f16c")]
unsafe fn quantised_tokens<C: Codes, S: Scales, const N: usize>(call: &F32Call<'_>, lanes: *mut f32) {
    let last = call.tokens.len() - 1;
    let starts: [usize; N] = std::array::from_fn(|t| call.tokens[t.min(last)]);
    let mut sums: Sums<N> = [[_mm512_setzero_ps(); N]; 2];
    let mut at = call.panel;
    let mut activations = call.activations;
    let all = call.cols / BLOCK;
    let mut header = at;
    let per_cluster = cluster_blocks(S::BYTES);
    for first in (0..all).step_by(per_cluster) {
        if S::HEADER && first % HEADER_BLOCKS == 0 {
            // SAFETY: one line of header precedes each group of `HEADER_BLOCKS` blocks.
            (header, at) = unsafe { (at, at.add(CACHE_LINE)) };
        }
        let blocks = per_cluster.min(all - first);
        // SAFETY: a cluster of `blocks` blocks starts at `at`: a line of scales, then the codes.
        let (mut scales_at, mut codes_at) = unsafe { (at, at.add(CACHE_LINE)) };
        for _ in 0..blocks {
            // Unpacking takes so long that the hardware prefetcher alone does not keep ahead (measured on Zen 5).
            for line in (0..C::BYTES + CACHE_LINE).step_by(CACHE_LINE) {
                _mm_prefetch::<_MM_HINT_T0>(codes_at.wrapping_add(PREFETCH + line).cast());
            }
            // SAFETY: the scales and codes of the block are readable.
            let (affine, codes) = unsafe { (S::affine(&S::block(header, scales_at)), C::load(codes_at)) };
            for (group, codes) in codes.into_iter().enumerate() {
                let (scale, added) = affine[group / 4];
                // SAFETY: the function's target features.
                let w = unsafe { S::levels(codes) }.map(|level| {
                    let product = _mm512_mul_ps(level, scale);
                    if S::ADDED { _mm512_add_ps(product, added) } else { product }
                });
                unroll!(N, |t| {
                    // SAFETY: the row of an existing token has the four columns of the group here.
                    unsafe {
                        let a = activations.add(starts[t] + 4 * group);
                        sums[0][t] = _mm512_fmadd_ps(w[0], _mm512_set1_ps(*a), sums[0][t]);
                        sums[1][t] = _mm512_fmadd_ps(w[1], _mm512_set1_ps(*a.add(1)), sums[1][t]);
                        sums[0][t] = _mm512_fmadd_ps(w[2], _mm512_set1_ps(*a.add(2)), sums[0][t]);
                        sums[1][t] = _mm512_fmadd_ps(w[3], _mm512_set1_ps(*a.add(3)), sums[1][t]);
                    }
                });
            }
            // SAFETY: advances by one block, at most to one past the end.
            (scales_at, codes_at, activations) =
                unsafe { (scales_at.add(S::BYTES), codes_at.add(C::BYTES), activations.add(BLOCK)) };
        }
        at = codes_at;
    }
    // SAFETY: the caller's contract.
    unsafe { store(sums, call.tokens.len(), lanes) }
}

trait Plain {
    /// Bytes of 16 values.
    const BYTES: usize;

    /// # Safety
    /// Needs AVX-512 F and `BYTES` readable bytes.
    unsafe fn load(at: *const u8) -> __m512;
}

struct F32;
impl Plain for F32 {
    const BYTES: usize = 64;

    #[inline(always)]
    unsafe fn load(at: *const u8) -> __m512 {
        // SAFETY: the caller's contract.
        unsafe { _mm512_loadu_ps(at.cast()) }
    }
}

struct F16;
impl Plain for F16 {
    const BYTES: usize = 32;

    #[inline(always)]
    unsafe fn load(at: *const u8) -> __m512 {
        // SAFETY: the caller's contract.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())) }
    }
}

struct Bf16;
impl Plain for Bf16 {
    const BYTES: usize = 32;

    #[inline(always)]
    unsafe fn load(at: *const u8) -> __m512 {
        // SAFETY: the caller's contract.
        unsafe {
            let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(at.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn plain_tokens<P: Plain, const N: usize>(call: &F32Call<'_>, lanes: *mut f32) {
    let last = call.tokens.len() - 1;
    let starts: [usize; N] = std::array::from_fn(|t| call.tokens[t.min(last)]);
    let mut sums: Sums<N> = [[_mm512_setzero_ps(); N]; 2];
    for k in (0..call.cols & !1).step_by(2) {
        // As in `super::int8`: with few tokens the hardware prefetcher alone is as fast.
        if N * 16 >= 2 * P::BYTES {
            for line in (0..2 * P::BYTES).step_by(CACHE_LINE) {
                let ahead = call.panel.wrapping_add(k * P::BYTES + PREFETCH + line);
                _mm_prefetch::<_MM_HINT_T1>(ahead.cast());
            }
        }
        // SAFETY: columns `k` and `k + 1` exist.
        let w =
            unsafe { [P::load(call.panel.add(k * P::BYTES)), P::load(call.panel.add((k + 1) * P::BYTES))] };
        unroll!(N, |t| {
            // SAFETY: these columns also exist in the row of an existing token.
            unsafe {
                let a = call.activations.add(starts[t] + k);
                sums[0][t] = _mm512_fmadd_ps(w[0], _mm512_set1_ps(*a), sums[0][t]);
                sums[1][t] = _mm512_fmadd_ps(w[1], _mm512_set1_ps(*a.add(1)), sums[1][t]);
            }
        });
    }
    if call.cols % 2 == 1 {
        let k = call.cols - 1;
        // SAFETY: the last column, if the number of columns is odd.
        let w = unsafe { P::load(call.panel.add(k * P::BYTES)) };
        unroll!(N, |t| {
            // SAFETY: as above.
            let a = unsafe { *call.activations.add(starts[t] + k) };
            sums[0][t] = _mm512_fmadd_ps(w, _mm512_set1_ps(a), sums[0][t]);
        });
    }
    // SAFETY: the caller's contract.
    unsafe { store(sums, call.tokens.len(), lanes) }
}
