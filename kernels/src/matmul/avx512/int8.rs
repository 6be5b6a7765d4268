//! Products with int8 activations. The weights of a block are unpacked once into eight registers and used for
//! up to 16 tokens, whose accumulators stay in registers over the whole panel.

use super::super::PANEL_ROWS;
use super::super::activations::QuantizedBlock;
use super::super::kernel::{Int8Call, Tile};
use super::super::layout::{HEADER_BLOCKS, cluster_blocks};
use super::codes::Codes;
use super::scales::Scales;
use super::{PREFETCH, unroll};
use crate::aligned::CACHE_LINE;
use std::arch::x86_64::{
    _MM_HINT_T0, _MM_HINT_T1, _mm_prefetch, _mm512_add_epi32, _mm512_dpbusd_epi32, _mm512_set1_epi32,
    _mm512_setzero_ps, _mm512_setzero_si512, _mm512_storeu_ps,
};

/// Whether to prefetch all weights, given the number of tokens and the bytes of a block. While codes are unpacked, and
/// beside the activations of many tokens, the hardware prefetcher does not run far enough ahead (measured on Zen 5). For
/// a few tokens and codes of eight bits it does, and prefetching would slow it down; [`lead`] helps it for one token.
const fn prefetches(tokens: usize, block_bytes: usize) -> bool {
    block_bytes <= 448 || tokens * 210 >= block_bytes
}

/// Prefetch distance of [`lead`]: a page of 4,096 bytes. Twice that is no better, and half of it is worse for
/// long rows (measured on Zen 4).
const LEAD: usize = 4096;

/// # Safety
/// See [`KernelSet`](super::super::kernel::KernelSet); the format is `C` with `S`.
pub(super) unsafe fn product<C: Codes, S: Scales>(call: &Int8Call<'_>, tile: &mut Tile) {
    // If the next larger kernel would compute unused tokens, a second pass over the panel is faster. The
    // panel is in L1 by then.
    let first = match call.tokens.len() {
        9..=11 => 8,
        13..=14 => 12,
        all => all,
    };
    let (tokens, rest) = call.tokens.split_at(first);
    let (lanes, rest_lanes) = tile.0.split_at_mut(first);
    // SAFETY: the caller's contract; each token has its lanes.
    unsafe {
        some::<C, S>(&Int8Call { tokens, ..*call }, lanes);
        if !rest.is_empty() {
            some::<C, S>(&Int8Call { tokens: rest, ..*call }, rest_lanes);
        }
    }
}

/// # Safety
/// As [`product`], with lanes for each token.
unsafe fn some<C: Codes, S: Scales>(call: &Int8Call<'_>, lanes: &mut [[f32; PANEL_ROWS]]) {
    // SAFETY: the caller's contract; each `N` is at least the number of tokens, and tokens past the last read
    // the last one's row.
    unsafe {
        match call.tokens.len() {
            1 => tokens::<C, S, 1>(call, lanes),
            2 => tokens::<C, S, 2>(call, lanes),
            3 => tokens::<C, S, 3>(call, lanes),
            4 => tokens::<C, S, 4>(call, lanes),
            5..=6 => tokens::<C, S, 6>(call, lanes),
            7..=8 => tokens::<C, S, 8>(call, lanes),
            9..=12 => tokens::<C, S, 12>(call, lanes),
            _ => tokens::<C, S, 16>(call, lanes),
        }
    }
}

/// Prefetches `bytes` bytes, [`PREFETCH`] above `at`, if that helps. Must be called for every line of a
/// panel: a missed line costs a full memory access.
#[inline(always)]
fn prefetch<C: Codes, S: Scales, const N: usize>(at: *const u8, bytes: usize) {
    if const { prefetches(N, S::BYTES + C::BYTES) } {
        for line in (0..bytes).step_by(CACHE_LINE) {
            let ahead = at.wrapping_add(PREFETCH + line);
            // The activations of several tokens take L1.
            // SAFETY: a hint, which may name any address.
            unsafe {
                match N {
                    1 => _mm_prefetch::<_MM_HINT_T0>(ahead.cast()),
                    _ => _mm_prefetch::<_MM_HINT_T1>(ahead.cast()),
                }
            }
        }
    }
}

/// With one token and codes of eight bits, prefetches one line of each block far ahead. Prefetching every line would
/// be slower than prefetching none.
#[inline(always)]
fn lead<C: Codes, S: Scales, const N: usize>(at: *const u8) {
    if const { N == 1 && !prefetches(N, S::BYTES + C::BYTES) } {
        // SAFETY: a hint, which may name any address.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.wrapping_add(LEAD).cast()) };
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx2,fma,f16c")]
unsafe fn tokens<C: Codes, S: Scales, const N: usize>(call: &Int8Call<'_>, lanes: &mut [[f32; PANEL_ROWS]]) {
    let last = call.tokens.len() - 1;
    // Multiplied here, so that the loop needs no arithmetic on offsets.
    let offsets: [usize; N] = std::array::from_fn(|t| call.tokens[t.min(last)] * size_of::<QuantizedBlock>());
    let mut acc = [_mm512_setzero_ps(); N];
    let mut at = call.panel;
    let mut activations = call.activations;
    let mut header = at;
    let per_cluster = cluster_blocks(S::BYTES);
    for first in (0..call.blocks).step_by(per_cluster) {
        if S::HEADER && first % HEADER_BLOCKS == 0 {
            prefetch::<C, S, N>(at, CACHE_LINE);
            // SAFETY: one line of header precedes each group of `HEADER_BLOCKS` blocks.
            (header, at) = unsafe { (at, at.add(CACHE_LINE)) };
        }
        prefetch::<C, S, N>(at, CACHE_LINE);
        let blocks = per_cluster.min(call.blocks - first);
        // SAFETY: a cluster of `blocks` blocks starts at `at`: a line of scales, then the codes.
        let (mut scales_at, mut codes_at) = unsafe { (at, at.add(CACHE_LINE)) };
        for _ in 0..blocks {
            prefetch::<C, S, N>(codes_at, C::BYTES);
            lead::<C, S, N>(codes_at);
            let raised = const { N == 1 && C::RAISED };
            // SAFETY: the scales and codes of the block are readable.
            let (scales, w) = unsafe {
                let codes = if raised { C::load_raised(codes_at) } else { C::load(codes_at) };
                (S::block(header, scales_at), codes)
            };
            unroll!(N, |t| {
                // SAFETY: every token has the same number of blocks as the panel, and 32 quants are 8 words.
                acc[t] = unsafe {
                    let a = activations.byte_add(offsets[t]);
                    let quants = (&raw const (*a).quants).cast::<i32>();
                    let word = |g: usize| _mm512_set1_epi32(quants.add(g).read_unaligned());
                    let [mut first, second] = S::start(a);
                    first = _mm512_dpbusd_epi32(first, w[0], word(0));
                    first = _mm512_dpbusd_epi32(first, w[1], word(1));
                    first = _mm512_dpbusd_epi32(first, w[2], word(2));
                    first = _mm512_dpbusd_epi32(first, w[3], word(3));
                    let so_far = if S::HALVES { second } else { first };
                    let mut second = if raised { _mm512_setzero_si512() } else { so_far };
                    second = _mm512_dpbusd_epi32(second, w[4], word(4));
                    second = _mm512_dpbusd_epi32(second, w[5], word(5));
                    second = _mm512_dpbusd_epi32(second, w[6], word(6));
                    second = _mm512_dpbusd_epi32(second, w[7], word(7));
                    if raised {
                        second = _mm512_add_epi32(C::settle(second), so_far);
                    }
                    let first = if S::HALVES { first } else { second };
                    S::fold(acc[t], first, second, &scales, a)
                };
            });
            // SAFETY: advances by one block, at most to one past the end.
            (scales_at, codes_at, activations) =
                unsafe { (scales_at.add(S::BYTES), codes_at.add(C::BYTES), activations.add(1)) };
        }
        at = codes_at;
    }
    for (lanes, acc) in lanes.iter_mut().zip(acc) {
        // SAFETY: 16 lanes.
        unsafe { _mm512_storeu_ps(lanes.as_mut_ptr(), acc) };
    }
}
