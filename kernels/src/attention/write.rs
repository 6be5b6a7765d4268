//! Writes one token's keys and values to its slot.

use half::f16;

use super::layout::{FP8_SCALES_BYTES, GROUP, KvLayout, KvType, MAX_HEAD_DIM, Q8_RUN, q8_scales_bytes};
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
        let mut rotated = [0.0; MAX_HEAD_DIM];
        for (head, row) in self.k.chunks_exact(layout.head_dim()).enumerate() {
            let row = rotate_into(&mut rotated, row, layout.rotation(true));
            // SAFETY: the group lies inside the block (`on`'s contract).
            unsafe {
                write_row(s, layout.types().k, self.block.add(layout.k_group(head, group)), row, token, true)
            }
        }
        for (head, row) in self.v.chunks_exact(layout.v_head_dim()).enumerate() {
            let row = rotate_into(&mut rotated, row, layout.rotation(false));
            // SAFETY: as above.
            unsafe {
                write_row(s, layout.types().v, self.block.add(layout.v_group(head, group)), row, token, false)
            }
        }
    }
}

/// The row times a Hadamard matrix of `rotation` elements.
fn rotate_into<'a>(space: &'a mut [f32; MAX_HEAD_DIM], row: &'a [f32], rotation: usize) -> &'a [f32] {
    if rotation == 1 {
        return row;
    }
    let rotated = &mut space[..row.len()];
    rotated.copy_from_slice(row);
    rotate(rotated, rotation);
    rotated
}

/// Multiplies each run of `len` elements, a power of two, by the normalised Hadamard matrix, which is its own inverse.
/// Sums are in one order on every instruction set.
pub(super) fn rotate(row: &mut [f32], len: usize) {
    if len == 1 {
        return;
    }
    let factor = 1.0 / (len as f32).sqrt();
    for run in row.chunks_exact_mut(len) {
        let mut half = 1;
        while half < len {
            for pair in run.chunks_exact_mut(2 * half) {
                let (low, high) = pair.split_at_mut(half);
                for (a, b) in low.iter_mut().zip(high) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            half *= 2;
        }
        run.iter_mut().for_each(|x| *x *= factor);
    }
}

/// Writes one head of one token to its group. Keys are `transposed`: element d is at `[d][token]`; values are
/// at `[token][d]`.
///
/// # Safety
/// `group` must be writable for a whole group of `row.len()` wide heads and aligned to 4 (F32) or 2.
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
                let (scale, inverse) = scale_of(xs, 127.0);
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
        KvType::Fp8 => {
            let (scale, inverse) = scale_of(row, 448.0);
            // SAFETY: a scale per token precedes the bytes.
            unsafe { *group.cast::<u16>().add(token) = scale.to_bits() };
            for (d, x) in row.iter().enumerate() {
                // SAFETY: `at` is inside the group, behind the scales.
                unsafe { *group.add(FP8_SCALES_BYTES + at(d)) = e4m3((x * inverse).clamp(-448.0, 448.0)) };
            }
        }
        KvType::Q4_0 => {
            let runs = width.div_ceil(Q8_RUN);
            for (run, xs) in row.chunks(Q8_RUN).enumerate() {
                // The value that is farthest from zero becomes -8, so that all sixteen codes are used.
                let farthest = xs.iter().fold(0.0f32, |m, x| if x.abs() > m.abs() { *x } else { m });
                let scale = f16::from_f32((farthest / -8.0).clamp(-f16::MAX.to_f32(), f16::MAX.to_f32()));
                let inverse = if scale.to_f32() == 0.0 { 0.0 } else { 1.0 / scale.to_f32() };
                let mut codes = [8u8; Q8_RUN];
                for (code, x) in codes.iter_mut().zip(xs) {
                    *code = ((x * inverse).round_ties_even().clamp(-8.0, 7.0) + 8.0) as u8;
                }
                // SAFETY: one scale per run and token precedes the bytes, of which a run has sixteen per token.
                unsafe {
                    let scales = group.cast::<u16>();
                    let place = if transposed { run * GROUP + token } else { token * runs + run };
                    *scales.add(place) = scale.to_bits();
                    let out = group.add(q8_scales_bytes(width));
                    for i in 0..Q8_RUN / 2 {
                        let byte = run * Q8_RUN / 2 + i;
                        let place =
                            if transposed { byte * GROUP + token } else { token * runs * Q8_RUN / 2 + byte };
                        *out.add(place) = codes[i] | codes[i + Q8_RUN / 2] << 4;
                    }
                }
            }
        }
    }
}

/// The scale with which the largest of `xs` becomes `most`, and its inverse.
fn scale_of(xs: &[f32], most: f32) -> (f16, f32) {
    let largest = xs.iter().fold(0.0f32, |m, x| m.max(x.abs()));
    let scale = f16::from_f32((largest / most).min(f16::MAX.to_f32()));
    (scale, if scale.to_f32() > 0.0 { 1.0 / scale.to_f32() } else { 0.0 })
}

/// Rounds a value of at most 448 to E4M3, ties to even.
pub(super) fn e4m3(x: f32) -> u8 {
    let (bits, sign) = (x.abs().to_bits(), if x.is_sign_negative() { 0x80 } else { 0 });
    let code = match x.abs() < 1.0 / 64.0 {
        // Below the normal range, multiples of 2^-9.
        _ if x.is_nan() => 0,
        true => (x.abs() * 512.0).round_ties_even() as u8,
        false => ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20).wrapping_sub(120 << 3) as u8,
    };
    sign | code
}

/// Rounds up to 16 values to binary16. Values out of range become its largest value; NaN stays NaN.
#[inline(always)]
fn to_f16<S: Simd>(s: S, xs: &[f32], bits: &mut [u16; LANES]) {
    let largest = f16::MAX.to_f32();
    let x = s.max(s.splat(-largest), s.min(s.splat(largest), s.tail(xs)));
    // SAFETY: `bits` is sixteen u16.
    unsafe { s.store_f16(x, bits.as_mut_ptr()) }
}
