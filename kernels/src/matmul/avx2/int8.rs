//! Products with int8 activations. The weights of a block and eight rows are unpacked once into eight
//! registers and used for all tokens of the tile.

use super::super::PANEL_ROWS;
use super::super::activations::QuantizedBlock;
use super::super::kernel::{Int8Call, TILE_TOKENS, Tile};
use super::super::layout::{HEADER_BLOCKS, VECTOR, cluster_blocks};
use super::HALF_PANEL;
use super::codes::Codes;
use super::scales::Scales;
use crate::aligned::CACHE_LINE;
use std::arch::x86_64::{
    __m256, __m256i, _MM_HINT_T1, _mm_prefetch, _mm256_abs_epi8, _mm256_add_epi16, _mm256_add_epi32,
    _mm256_madd_epi16, _mm256_maddubs_epi16, _mm256_set1_epi16, _mm256_set1_epi32, _mm256_setzero_ps,
    _mm256_sign_epi8, _mm256_storeu_ps,
};

/// Prefetch distance of the weights for a single token, in bytes. Half of it was as good on Zen 3.
/// Prefetching only one line of each block, as AVX-512 does on Zen 4, halved the rate on Zen 3.
const PREFETCH: usize = 8192;

/// Accumulators of a token: for the first eight rows and for the last eight.
type Acc = [__m256; PANEL_ROWS / HALF_PANEL];

/// # Safety
/// See [`KernelSet`](super::super::kernel::KernelSet); the format is `C` with `S`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn product<C: Codes, S: Scales>(call: &Int8Call<'_>, tile: &mut Tile) {
    let mut accs = [[_mm256_setzero_ps(); 2]; TILE_TOKENS];
    // SAFETY: the caller's contract. The case of one token is separate, so that its accumulators stay in
    // registers.
    unsafe {
        match *call.tokens {
            [token] => {
                let mut acc = [accs[0]];
                walk::<C, S, true>(call, &[token], &mut acc);
                accs[0] = acc[0];
            }
            _ => walk::<C, S, false>(call, call.tokens, &mut accs),
        }
    }
    for (lanes, acc) in tile.0.iter_mut().zip(&accs).take(call.tokens.len()) {
        for (lanes, acc) in lanes.as_chunks_mut::<HALF_PANEL>().0.iter_mut().zip(acc) {
            // SAFETY: eight lanes.
            unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), *acc) };
        }
    }
}

/// For a single token, prefetches the lines [`PREFETCH`] above `bytes` bytes from `at`. One token finishes a
/// block sooner than the hardware prefetcher expects. With more tokens this gains nothing. Must be called for
/// every line of a panel.
#[inline(always)]
fn prefetch<const SINGLE: bool>(at: *const u8, bytes: usize) {
    if SINGLE {
        for line in (0..bytes).step_by(CACHE_LINE) {
            let ahead = at.wrapping_add(PREFETCH + line);
            // SAFETY: a hint, which may name any address.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(ahead.cast()) };
        }
    }
}

/// Adds the products of all blocks of the call to the accumulators of `tokens`. `tokens` are the call's
/// tokens; `SINGLE` means that there is one.
///
/// # Safety
/// As [`product`].
#[inline(always)]
unsafe fn walk<C: Codes, S: Scales, const SINGLE: bool>(
    call: &Int8Call<'_>,
    tokens: &[usize],
    accs: &mut [Acc],
) {
    let (mut at, mut header) = (call.panel, call.panel);
    let per_cluster = cluster_blocks(S::BYTES);
    for first in (0..call.blocks).step_by(per_cluster) {
        if S::HEADER && first % HEADER_BLOCKS == 0 {
            prefetch::<SINGLE>(at, VECTOR);
            // SAFETY: one line of header precedes each group of `HEADER_BLOCKS` blocks.
            (header, at) = unsafe { (at, at.add(VECTOR)) };
        }
        prefetch::<SINGLE>(at, VECTOR);
        let blocks = per_cluster.min(call.blocks - first);
        // SAFETY: a cluster of `blocks` blocks starts at `at`: a line of scales, then the codes.
        let (mut scales_at, mut codes_at) = unsafe { (at, at.add(VECTOR)) };
        for index in first..first + blocks {
            prefetch::<SINGLE>(codes_at, C::BYTES);
            for half in 0..PANEL_ROWS / HALF_PANEL {
                // SAFETY: the scales and codes of the block are readable; each row has four bytes of each
                // vector.
                let (scales, codes) = unsafe {
                    let codes = C::load(codes_at.add(4 * HALF_PANEL * half));
                    (S::block(header, scales_at, HALF_PANEL * half), Loaded::of::<C>(codes))
                };
                for (token, acc) in tokens.iter().zip(accs.iter_mut()) {
                    // SAFETY: every token has the same number of blocks as the panel.
                    unsafe {
                        let a = call.activations.add(token + index);
                        let [first, second] = codes.sums::<C, S>(a);
                        acc[half] = S::fold(acc[half], first, second, &scales, a);
                    }
                }
            }
            // SAFETY: advances by one block, at most to one past the end.
            (scales_at, codes_at) = unsafe { (scales_at.add(S::BYTES), codes_at.add(C::BYTES)) };
        }
        at = codes_at;
    }
}

/// Number of groups whose products can be summed in 16 bits: two products per lane, with quants of at most
/// 127.
const fn run(largest: usize) -> usize {
    i16::MAX as usize / (2 * 127 * largest)
}

/// The codes or levels of eight rows of a block, and the magnitudes of levels.
struct Loaded {
    codes: [__m256i; 8],
    magnitudes: [__m256i; 8],
}

impl Loaded {
    /// # Safety
    /// Needs AVX2.
    #[inline(always)]
    unsafe fn of<C: Codes>(codes: [__m256i; 8]) -> Self {
        let mut magnitudes = codes;
        if C::SIGNED {
            for magnitude in &mut magnitudes {
                // SAFETY: the caller's contract. The magnitude of -128 is 128 as an unsigned byte.
                *magnitude = unsafe { _mm256_abs_epi8(*magnitude) };
            }
        }
        Self { codes, magnitudes }
    }

    /// Products of group `g` with the quants of its four columns, summed in pairs.
    ///
    /// # Safety
    /// Needs AVX2; `a` must be readable.
    #[inline(always)]
    unsafe fn pairs<C: Codes>(&self, g: usize, a: *const QuantizedBlock) -> __m256i {
        // SAFETY: the caller's contract; 32 quants are 8 words.
        unsafe {
            let words = (&raw const (*a).quants).cast::<i32>();
            let quants = _mm256_set1_epi32(words.add(g).read_unaligned());
            // The magnitude is unsigned, so the quant takes over the sign of the level.
            let quants = if C::SIGNED { _mm256_sign_epi8(quants, self.codes[g]) } else { quants };
            _mm256_maddubs_epi16(self.magnitudes[g], quants)
        }
    }

    /// The products of four groups, summed by row.
    ///
    /// # Safety
    /// As [`Self::pairs`].
    #[inline(always)]
    unsafe fn four<C: Codes>(&self, g: usize, a: *const QuantizedBlock) -> __m256i {
        // SAFETY: the caller's contract.
        unsafe {
            let [p, q, r, s] = [
                self.pairs::<C>(g, a),
                self.pairs::<C>(g + 1, a),
                self.pairs::<C>(g + 2, a),
                self.pairs::<C>(g + 3, a),
            ];
            match const { run(C::LARGEST) } {
                4.. => wide(_mm256_add_epi16(_mm256_add_epi16(p, q), _mm256_add_epi16(r, s))),
                2..=3 => _mm256_add_epi32(wide(_mm256_add_epi16(p, q)), wide(_mm256_add_epi16(r, s))),
                _ => _mm256_add_epi32(_mm256_add_epi32(wide(p), wide(q)), _mm256_add_epi32(wide(r), wide(s))),
            }
        }
    }

    /// The integer sums: `[block, unused]`, or the sums of the two halves.
    ///
    /// # Safety
    /// As [`Self::pairs`].
    #[inline(always)]
    unsafe fn sums<C: Codes, S: Scales>(&self, a: *const QuantizedBlock) -> [__m256i; 2] {
        // SAFETY: the caller's contract.
        unsafe {
            let [first, second] = S::start(a);
            let [low, high] = [self.four::<C>(0, a), self.four::<C>(4, a)];
            if S::HALVES {
                [_mm256_add_epi32(first, low), _mm256_add_epi32(second, high)]
            } else {
                [_mm256_add_epi32(first, _mm256_add_epi32(low, high)), second]
            }
        }
    }
}

/// Sum of both 16-bit sums of each row.
///
/// # Safety
/// Needs AVX2.
#[inline(always)]
unsafe fn wide(pairs: __m256i) -> __m256i {
    // SAFETY: the caller's contract.
    unsafe { _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)) }
}
