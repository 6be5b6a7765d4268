//! Writes one token's keys and values to its slot.

use half::f16;

use super::layout::{GROUP, KvLayout, KvType, Q8_RUN, q8_scales_bytes};
use crate::simd::{Kernel, LANES, Simd};

/// Writes the keys and values of one token into slot `slot` of a block.
pub(super) struct WriteToken<'a> {
    pub(super) layout: &'a KvLayout,
    /// First byte of the block.
    pub(super) block: *mut u8,
    pub(super) slot: usize,
    /// `[kv_heads * head_dim]`
    pub(super) k: &'a [f32],
    /// `[kv_heads * v_head_dim]`
    pub(super) v: &'a [f32],
}

impl WriteToken<'_> {
    /// # Safety
    /// `block` must be writable for `layout.bytes()` bytes and aligned to 64, nothing else may access its
    /// slot `slot` meanwhile, and `slot < layout.block_tokens()`.
    pub(super) unsafe fn on(self, isa: crate::isa::Isa) {
        crate::simd::dispatch(isa, self);
    }
}

impl Kernel for WriteToken<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let layout = self.layout;
        let (group, token) = (self.slot / GROUP, self.slot % GROUP);
        for (head, row) in self.k.chunks_exact(layout.head_dim()).enumerate() {
            // SAFETY: the group lies inside the block (`on`'s contract).
            unsafe {
                write_row(s, layout.kv_type(), self.block.add(layout.k_group(head, group)), row, token, true)
            }
        }
        for (head, row) in self.v.chunks_exact(layout.v_head_dim()).enumerate() {
            // SAFETY: as above.
            unsafe {
                write_row(s, layout.kv_type(), self.block.add(layout.v_group(head, group)), row, token, false)
            }
        }
    }
}

/// Writes one head of one token to its group. Keys are `transposed`: element d is at `[d][token]`; values are
/// at `[token][d]`.
///
/// # Safety
/// `group` must be writable for a whole group of `row.len()` wide heads and aligned to 2 (Q8_0, F16) or 4
/// (F32).
#[inline(always)]
unsafe fn write_row<S: Simd>(
    s: S,
    kv_type: KvType,
    group: *mut u8,
    row: &[f32],
    token: usize,
    transposed: bool,
) {
    let width = row.len();
    let at = |d: usize| if transposed { d * GROUP + token } else { token * width + d };
    match kv_type {
        KvType::F32 => {
            let out = group.cast::<f32>();
            for (d, x) in row.iter().enumerate() {
                // SAFETY: `at` is inside the group.
                unsafe { *out.add(at(d)) = *x };
            }
        }
        KvType::F16 => {
            let out = group.cast::<u16>();
            let mut bits = [0u16; LANES];
            for (chunk, xs) in row.chunks(LANES).enumerate() {
                to_f16(s, xs, &mut bits);
                for (i, x) in bits[..xs.len()].iter().enumerate() {
                    // SAFETY: `at` is inside the group.
                    unsafe { *out.add(at(chunk * LANES + i)) = *x };
                }
            }
        }
        KvType::Q8_0 => {
            let runs = width.div_ceil(Q8_RUN);
            let scales = group.cast::<u16>();
            // SAFETY: the bytes follow the scales inside the group.
            let out = unsafe { group.add(q8_scales_bytes(width)) }.cast::<i8>();
            for (run, xs) in row.chunks(Q8_RUN).enumerate() {
                let largest = xs.iter().fold(0.0f32, |m, x| m.max(x.abs()));
                let scale = f16::from_f32((largest / 127.0).min(f16::MAX.to_f32()));
                let inverse = if scale.to_f32() > 0.0 { 1.0 / scale.to_f32() } else { 0.0 };
                // SAFETY: one scale per run and token precedes the bytes.
                unsafe {
                    *scales.add(if transposed { run * GROUP + token } else { token * runs + run }) =
                        scale.to_bits()
                };
                for (i, x) in xs.iter().enumerate() {
                    let q = (x * inverse).round_ties_even().clamp(-127.0, 127.0);
                    // SAFETY: `at` is inside the group.
                    unsafe { *out.add(at(run * Q8_RUN + i)) = q as i8 };
                }
            }
        }
    }
}

/// Rounds up to 16 values to binary16. Values out of range become its largest value; NaN stays NaN.
#[inline(always)]
fn to_f16<S: Simd>(s: S, xs: &[f32], bits: &mut [u16; LANES]) {
    let largest = f16::MAX.to_f32();
    let x = s.max(s.splat(-largest), s.min(s.splat(largest), s.tail(xs)));
    // SAFETY: `bits` is sixteen u16.
    unsafe { s.store_f16(x, bits.as_mut_ptr()) }
}
