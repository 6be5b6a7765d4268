//! Products with int8 activations. The weights of a block are unpacked into eight registers once and meet up
//! to 16 tokens, whose accumulators stay in registers over the whole panel.

use super::super::activations::QuantizedBlock;
use super::super::kernel::{Int8Call, Tile};
use super::super::layout::{SECTION, codes_offset};
use super::codes::Codes;
use super::scales::Scales;
use super::unroll;
use std::arch::x86_64::{_mm512_dpbusd_epi32, _mm512_set1_epi32, _mm512_setzero_ps, _mm512_storeu_ps};

/// # Safety
/// See [`KernelSet`](super::super::kernel::KernelSet); the format is `C` with `S`.
pub(super) unsafe fn product<C: Codes, S: Scales>(call: &Int8Call, tile: &mut Tile) {
    // SAFETY: the caller's contract; each `N` is at least the number of tokens, and tokens past the last are
    // read from the last one's row.
    unsafe {
        match call.tokens {
            1 => tokens::<C, S, 1>(call, tile),
            2 => tokens::<C, S, 2>(call, tile),
            3 => tokens::<C, S, 3>(call, tile),
            4 => tokens::<C, S, 4>(call, tile),
            5..=6 => tokens::<C, S, 6>(call, tile),
            7..=8 => tokens::<C, S, 8>(call, tile),
            9..=12 => tokens::<C, S, 12>(call, tile),
            _ => tokens::<C, S, 16>(call, tile),
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx2,fma,f16c")]
unsafe fn tokens<C: Codes, S: Scales, const N: usize>(call: &Int8Call, tile: &mut Tile) {
    let last = call.tokens - 1;
    let mut acc = [_mm512_setzero_ps(); N];
    let mut at = call.panel;
    let mut activations = call.activations;
    for first in (0..call.blocks).step_by(SECTION) {
        let blocks = SECTION.min(call.blocks - first);
        // SAFETY: a section of the panel starts at `at`, and has scales and codes of `blocks` blocks.
        let (header, mut scales_at, mut codes_at) =
            unsafe { (S::header(at), at.add(S::HEADER), at.add(codes_offset(S::HEADER, S::BYTES, blocks))) };
        for _ in 0..blocks {
            // SAFETY: a block's scales and codes are there.
            let (scales, w) = unsafe { (S::block(header, scales_at), C::load(codes_at)) };
            unroll!(N, |t| {
                let row = if t < 2 || N <= 4 { t } else { t.min(last) };
                // SAFETY: row `row` of the call has a block at `activations`, and 32 quants are 8 words.
                acc[t] = unsafe {
                    let a: *const QuantizedBlock = activations.add(row * call.stride);
                    let quants = (&raw const (*a).quants).cast::<i32>();
                    let word = |g: usize| _mm512_set1_epi32(quants.add(g).read_unaligned());
                    let [mut first, second] = S::start(a);
                    first = _mm512_dpbusd_epi32(first, w[0], word(0));
                    first = _mm512_dpbusd_epi32(first, w[1], word(1));
                    first = _mm512_dpbusd_epi32(first, w[2], word(2));
                    first = _mm512_dpbusd_epi32(first, w[3], word(3));
                    let mut second = if S::HALVES { second } else { first };
                    second = _mm512_dpbusd_epi32(second, w[4], word(4));
                    second = _mm512_dpbusd_epi32(second, w[5], word(5));
                    second = _mm512_dpbusd_epi32(second, w[6], word(6));
                    second = _mm512_dpbusd_epi32(second, w[7], word(7));
                    let first = if S::HALVES { first } else { second };
                    S::fold(acc[t], first, second, &scales, a)
                };
            });
            // SAFETY: one block on, at most one past the end.
            (scales_at, codes_at, activations) =
                unsafe { (scales_at.add(S::BYTES), codes_at.add(C::BYTES), activations.add(1)) };
        }
        at = codes_at;
    }
    for (lanes, acc) in tile.0.iter_mut().zip(acc) {
        // SAFETY: 16 lanes.
        unsafe { _mm512_storeu_ps(lanes.as_mut_ptr(), acc) };
    }
}
