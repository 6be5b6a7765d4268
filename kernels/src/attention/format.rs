//! Reads of the elements of a KV group, for each element type.

use super::layout::{FP8_SCALES_BYTES, GROUP, Q8_RUN, q8_scales_bytes};
use crate::simd::{LANES, Simd};

/// An element type of the cache. Every value is exact in f32, so a kernel that converts while reading and one
/// that reads converted copies compute the same result.
///
/// Contract of all methods: `group` must point to a whole group of heads of width `width` in this format,
/// aligned as in a block whose first byte is aligned to 64.
pub(super) trait Format: Copy + Send + Sync + 'static {
    /// Elements per loop iteration of a row: the number that share a scale, or a few if the format has no
    /// scales.
    const RUN: usize;

    /// Scales of 16 keys for one run of their elements. Ignored if the format has no scales.
    unsafe fn k_scales<S: Simd>(s: S, group: *const u8, run: usize) -> S::V;

    /// Element `d` of 16 keys.
    unsafe fn k<S: Simd>(s: S, group: *const u8, width: usize, d: usize, scales: S::V) -> S::V;

    /// Elements `d..d + 16` of the value of one token.
    unsafe fn v<S: Simd>(s: S, group: *const u8, width: usize, token: usize, d: usize) -> S::V;

    /// Elements `d..width` of the value of one token, fewer than 16, padded with zeros.
    unsafe fn v_tail<S: Simd>(s: S, group: *const u8, width: usize, token: usize, d: usize) -> S::V;
}

#[derive(Clone, Copy)]
pub(super) struct F32;

#[derive(Clone, Copy)]
pub(super) struct F16;

#[derive(Clone, Copy)]
pub(super) struct Q8;

impl Format for F32 {
    const RUN: usize = 4;

    #[inline(always)]
    unsafe fn k_scales<S: Simd>(s: S, _group: *const u8, _run: usize) -> S::V {
        s.splat(1.0)
    }
    #[inline(always)]
    unsafe fn k<S: Simd>(s: S, group: *const u8, _width: usize, d: usize, _scales: S::V) -> S::V {
        // SAFETY: sixteen f32 per element of the group.
        unsafe { s.load(group.cast::<f32>().add(d * GROUP)) }
    }
    #[inline(always)]
    unsafe fn v<S: Simd>(s: S, group: *const u8, width: usize, token: usize, d: usize) -> S::V {
        // SAFETY: d + 16 <= width.
        unsafe { s.load(group.cast::<f32>().add(token * width + d)) }
    }
    #[inline(always)]
    unsafe fn v_tail<S: Simd>(s: S, group: *const u8, width: usize, token: usize, d: usize) -> S::V {
        // SAFETY: the row has width elements.
        unsafe { s.load_first(group.cast::<f32>().add(token * width + d), width - d) }
    }
}

impl Format for F16 {
    const RUN: usize = 4;

    #[inline(always)]
    unsafe fn k_scales<S: Simd>(s: S, _group: *const u8, _run: usize) -> S::V {
        s.splat(1.0)
    }
    #[inline(always)]
    unsafe fn k<S: Simd>(s: S, group: *const u8, _width: usize, d: usize, _scales: S::V) -> S::V {
        // SAFETY: sixteen u16 per element of the group.
        unsafe { s.load_f16(group.cast::<u16>().add(d * GROUP)) }
    }
    #[inline(always)]
    unsafe fn v<S: Simd>(s: S, group: *const u8, width: usize, token: usize, d: usize) -> S::V {
        // SAFETY: d + 16 <= width.
        unsafe { s.load_f16(group.cast::<u16>().add(token * width + d)) }
    }
    #[inline(always)]
    unsafe fn v_tail<S: Simd>(s: S, group: *const u8, width: usize, token: usize, d: usize) -> S::V {
        let mut row = [0u16; LANES];
        // SAFETY: the row has width elements, the copy at least width - d < 16.
        unsafe {
            row.as_mut_ptr().copy_from_nonoverlapping(group.cast::<u16>().add(token * width + d), width - d);
            s.load_f16(row.as_ptr())
        }
    }
}

impl Q8 {
    /// Scale of the run that element `d` of a value belongs to.
    #[inline(always)]
    unsafe fn v_scale<S: Simd>(s: S, group: *const u8, width: usize, token: usize, d: usize) -> S::V {
        let runs = width.div_ceil(Q8_RUN);
        // SAFETY: a value group starts with `runs` scales for each token.
        unsafe { s.splat_f16(group.cast::<u16>().add(token * runs + d / Q8_RUN)) }
    }
}

impl Format for Q8 {
    const RUN: usize = Q8_RUN;

    #[inline(always)]
    unsafe fn k_scales<S: Simd>(s: S, group: *const u8, run: usize) -> S::V {
        // SAFETY: a key group starts with sixteen scales for each run.
        unsafe { s.load_f16(group.cast::<u16>().add(run * GROUP)) }
    }
    #[inline(always)]
    unsafe fn k<S: Simd>(s: S, group: *const u8, width: usize, d: usize, scales: S::V) -> S::V {
        // SAFETY: sixteen bytes per element follow the scales.
        s.mul(unsafe { s.load_i8(group.add(q8_scales_bytes(width) + d * GROUP).cast()) }, scales)
    }
    #[inline(always)]
    unsafe fn v<S: Simd>(s: S, group: *const u8, width: usize, token: usize, d: usize) -> S::V {
        // SAFETY: d + 16 <= width; the bytes follow the scales.
        unsafe {
            let x = s.load_i8(group.add(q8_scales_bytes(width) + token * width + d).cast());
            s.mul(x, Self::v_scale(s, group, width, token, d))
        }
    }
    #[inline(always)]
    unsafe fn v_tail<S: Simd>(s: S, group: *const u8, width: usize, token: usize, d: usize) -> S::V {
        let mut row = [0i8; LANES];
        // SAFETY: the row has width elements, the copy at least width - d < 16.
        unsafe {
            let from = group.add(q8_scales_bytes(width) + token * width + d).cast();
            row.as_mut_ptr().copy_from_nonoverlapping(from, width - d);
            s.mul(s.load_i8(row.as_ptr()), Self::v_scale(s, group, width, token, d))
        }
    }
}

/// E4M3 with a binary16 scale for each head of each token.
#[derive(Clone, Copy)]
pub(super) struct Fp8;

impl Format for Fp8 {
    const RUN: usize = 32;

    #[inline(always)]
    unsafe fn k_scales<S: Simd>(s: S, group: *const u8, _run: usize) -> S::V {
        // SAFETY: a group starts with sixteen scales.
        unsafe { s.load_f16(group.cast::<u16>()) }
    }
    #[inline(always)]
    unsafe fn k<S: Simd>(s: S, group: *const u8, _width: usize, d: usize, scales: S::V) -> S::V {
        // SAFETY: sixteen bytes per element follow the scales.
        s.mul(unsafe { s.load_e4m3(group.add(FP8_SCALES_BYTES + d * GROUP)) }, scales)
    }
    #[inline(always)]
    unsafe fn v<S: Simd>(s: S, group: *const u8, width: usize, token: usize, d: usize) -> S::V {
        // SAFETY: d + 16 <= width; the bytes follow the scales.
        unsafe {
            let x = s.load_e4m3(group.add(FP8_SCALES_BYTES + token * width + d));
            s.mul(x, s.splat_f16(group.cast::<u16>().add(token)))
        }
    }
    #[inline(always)]
    unsafe fn v_tail<S: Simd>(s: S, group: *const u8, width: usize, token: usize, d: usize) -> S::V {
        let mut row = [0u8; LANES];
        // SAFETY: the row has width elements, the copy at least width - d < 16.
        unsafe {
            let from = group.add(FP8_SCALES_BYTES + token * width + d);
            row.as_mut_ptr().copy_from_nonoverlapping(from, width - d);
            s.mul(s.load_e4m3(row.as_ptr()), s.splat_f16(group.cast::<u16>().add(token)))
        }
    }
}

/// Four bits with a binary16 scale per 32 elements. A run has sixteen bytes for each token, also the last one: element
/// `i` of a run is in the lower bits of byte `i`, or in the upper ones of byte `i - 16`.
#[derive(Clone, Copy)]
pub(super) struct Q4;

impl Q4 {
    #[inline(always)]
    unsafe fn half<S: Simd>(s: S, bytes: *const u8, upper: bool) -> S::V {
        // SAFETY: by the caller, sixteen bytes.
        unsafe { if upper { s.load_i4::<true>(bytes) } else { s.load_i4::<false>(bytes) } }
    }
}

impl Format for Q4 {
    const RUN: usize = Q8_RUN;

    #[inline(always)]
    unsafe fn k_scales<S: Simd>(s: S, group: *const u8, run: usize) -> S::V {
        // SAFETY: a key group starts with sixteen scales for each run.
        unsafe { s.load_f16(group.cast::<u16>().add(run * GROUP)) }
    }
    #[inline(always)]
    unsafe fn k<S: Simd>(s: S, group: *const u8, width: usize, d: usize, scales: S::V) -> S::V {
        let (run, i) = (d / Q8_RUN, d % Q8_RUN);
        // SAFETY: sixteen bytes for each two elements of a run follow the scales.
        unsafe {
            let bytes = group.add(q8_scales_bytes(width) + (run * Q8_RUN / 2 + i % 16) * GROUP);
            s.mul(Self::half(s, bytes, i >= 16), scales)
        }
    }
    #[inline(always)]
    unsafe fn v<S: Simd>(s: S, group: *const u8, width: usize, token: usize, d: usize) -> S::V {
        let run = token * width.div_ceil(Q8_RUN) + d / Q8_RUN;
        // SAFETY: a value group starts with a scale for each run of each token; the runs' bytes follow.
        unsafe {
            let bytes = group.add(q8_scales_bytes(width) + run * Q8_RUN / 2);
            s.mul(Self::half(s, bytes, d % Q8_RUN >= 16), s.splat_f16(group.cast::<u16>().add(run)))
        }
    }
    #[inline(always)]
    unsafe fn v_tail<S: Simd>(s: S, group: *const u8, width: usize, token: usize, d: usize) -> S::V {
        // SAFETY: a run is whole in memory, and zero behind the width.
        unsafe { Self::v(s, group, width, token, d) }
    }
}
