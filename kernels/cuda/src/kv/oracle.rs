//! Test helpers that write and read blocks value by value.

use super::{KvBlock, ROW_STEP, RUN};
use half::f16;
use kernels::attention::KvType;

impl KvBlock {
    /// Writes keys and values of one token, `[kv_heads][width]` each, into a layer's part of a block.
    pub(crate) fn put(&self, block: &mut [u8], token: usize, k: &[f32], v: &[f32]) {
        let [k_rotation, v_rotation] = [true, false].map(|keys| self.rotation(keys));
        for (head, k) in k.chunks_exact(self.head_dim).enumerate() {
            let stripe = &mut block[self.k_start(head)..][..self.k_stripe()];
            self.put_row(stripe, self.types.k, token, &rotated(k, k_rotation));
        }
        for (head, v) in v.chunks_exact(self.v_head_dim).enumerate() {
            let stripe = &mut block[self.v_start(head)..][..self.v_stripe()];
            self.put_row(stripe, self.types.v, token, &rotated(v, v_rotation));
        }
    }

    /// Reads the values that [`Self::put`] wrote, as the kernels see them, and turned back.
    pub(crate) fn get(&self, block: &[u8], token: usize) -> (Vec<f32>, Vec<f32>) {
        let [k_rotation, v_rotation] = [true, false].map(|keys| self.rotation(keys));
        let k = |head| {
            let stripe = &block[self.k_start(head)..][..self.k_stripe()];
            rotated(&self.get_row(stripe, self.types.k, token, self.head_dim), k_rotation)
        };
        let v = |head| {
            let stripe = &block[self.v_start(head)..][..self.v_stripe()];
            rotated(&self.get_row(stripe, self.types.v, token, self.v_head_dim), v_rotation)
        };
        ((0..self.kv_heads).flat_map(k).collect(), (0..self.kv_heads).flat_map(v).collect())
    }

    fn k_start(&self, head: usize) -> usize {
        head * self.k_stripe()
    }

    fn v_start(&self, head: usize) -> usize {
        self.kv_heads * self.k_stripe() + head * self.v_stripe()
    }

    fn scales_start(&self, ty: KvType, width: usize) -> usize {
        let elements = self.block_tokens * width.next_multiple_of(ROW_STEP);
        (if ty == KvType::Q4_0 { elements / 2 } else { elements }).next_multiple_of(16)
    }

    fn put_row(&self, stripe: &mut [u8], ty: KvType, token: usize, row: &[f32]) {
        let (width, first) = (row.len(), token * row.len().next_multiple_of(ROW_STEP));
        let stride = width.next_multiple_of(ROW_STEP);
        let padded = row.iter().copied().chain(std::iter::repeat_n(0.0, stride - width));
        let largest = |x: &[f32]| x.iter().fold(0.0f32, |m, x| m.max(x.abs()));
        let scales = self.scales_start(ty, width) + token * width.div_ceil(RUN) * 2;
        match ty {
            KvType::F32 => {
                let slots = stripe.as_chunks_mut().0[first..].iter_mut();
                slots.zip(padded).for_each(|(slot, x)| *slot = x.to_ne_bytes());
            }
            KvType::F16 => {
                let slots = stripe.as_chunks_mut().0[first..].iter_mut();
                slots.zip(padded).for_each(|(slot, x)| *slot = f16::from_f32(x).to_ne_bytes());
            }
            KvType::Q8_0 => {
                for (run, x) in padded.collect::<Vec<_>>().chunks(RUN).enumerate() {
                    let scale = f16::from_f32(largest(x) / 127.0);
                    stripe[scales + 2 * run..][..2].copy_from_slice(&scale.to_ne_bytes());
                    for (i, x) in x.iter().enumerate() {
                        let q = (x * (1.0 / scale.to_f32().max(1e-30))).round_ties_even();
                        stripe[first + run * RUN + i] = (q.clamp(-127.0, 127.0) as i8).cast_unsigned();
                    }
                }
            }
            KvType::Fp8 => {
                let scale = f16::from_f32(largest(row) / 448.0);
                let at = self.scales_start(ty, width) + 2 * token;
                stripe[at..][..2].copy_from_slice(&scale.to_ne_bytes());
                for (i, x) in padded.enumerate() {
                    let x = (x * (1.0 / scale.to_f32().max(1e-30))).clamp(-448.0, 448.0);
                    // The nearest of all codes; of two, the even one.
                    let away = |code: u8| (f64::from(e4m3(code)) - f64::from(x.abs())).abs();
                    let order = |a: &u8, b: &u8| away(*a).total_cmp(&away(*b)).then((a & 1).cmp(&(b & 1)));
                    let code = (0..0x7f).min_by(order).unwrap();
                    stripe[first + i] = code | if x.is_sign_negative() { 0x80 } else { 0 };
                }
            }
            KvType::Q4_0 => {
                for (run, x) in padded.collect::<Vec<_>>().chunks(RUN).enumerate() {
                    let farthest = x.iter().fold(0.0f32, |m, x| if x.abs() > m.abs() { *x } else { m });
                    let scale = f16::from_f32(farthest / -8.0);
                    stripe[scales + 2 * run..][..2].copy_from_slice(&scale.to_ne_bytes());
                    let inverse = if scale.to_f32() == 0.0 { 0.0 } else { 1.0 / scale.to_f32() };
                    let code = |x: f32| ((x * inverse).round_ties_even().clamp(-8.0, 7.0) + 8.0) as u8;
                    for (i, pair) in x.chunks(2).enumerate() {
                        stripe[(first + run * RUN) / 2 + i] = code(pair[0]) | code(pair[1]) << 4;
                    }
                }
            }
        }
    }

    fn get_row(&self, stripe: &[u8], ty: KvType, token: usize, width: usize) -> Vec<f32> {
        let first = token * width.next_multiple_of(ROW_STEP);
        let runs = width.div_ceil(RUN);
        let scale = |index: usize| {
            let at = self.scales_start(ty, width) + 2 * index;
            f16::from_ne_bytes([stripe[at], stripe[at + 1]]).to_f32()
        };
        (0..width)
            .map(|d| match ty {
                KvType::F32 => f32::from_ne_bytes(stripe.as_chunks().0[first + d]),
                KvType::F16 => f16::from_ne_bytes(stripe.as_chunks().0[first + d]).to_f32(),
                KvType::Q8_0 => f32::from(stripe[first + d].cast_signed()) * scale(token * runs + d / RUN),
                KvType::Fp8 => {
                    let sign = if stripe[first + d] & 0x80 == 0 { 1.0 } else { -1.0 };
                    sign * e4m3(stripe[first + d] & 0x7f) * scale(token)
                }
                KvType::Q4_0 => {
                    let nibble = stripe[(first + d) / 2] >> (d % 2 * 4) & 15;
                    (f32::from(nibble) - 8.0) * scale(token * runs + d / RUN)
                }
            })
            .collect()
    }
}

/// A number of E4M3 that is not negative.
fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3), f32::from(code & 7));
    if exponent == 0 { mantissa / 512.0 } else { (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7) }
}

/// Each run of `len` elements times the normalised Hadamard matrix.
fn rotated(row: &[f32], len: usize) -> Vec<f32> {
    if len == 1 {
        return row.to_vec();
    }
    let of = |run: &[f32], i: usize| {
        let sign = |j: usize| if (i & j).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
        let sum: f64 = run.iter().enumerate().map(|(j, x)| f64::from(*x) * sign(j)).sum();
        (sum / (len as f64).sqrt()) as f32
    };
    row.chunks(len).flat_map(|run| (0..len).map(|i| of(run, i)).collect::<Vec<_>>()).collect()
}
