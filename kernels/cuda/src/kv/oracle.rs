//! Test helpers that write and read blocks value by value.

use super::{KvBlock, Q8_RUN, ROW_STEP};
use half::f16;
use kernels::attention::KvType;

impl KvBlock {
    /// Writes keys and values of one token, `[kv_heads][width]` each, into a layer's part of a block.
    pub(crate) fn put(&self, block: &mut [u8], token: usize, k: &[f32], v: &[f32]) {
        for (head, k) in k.chunks_exact(self.head_dim).enumerate() {
            self.put_row(&mut block[self.k_start(head)..][..self.k_stripe()], token, k);
        }
        for (head, v) in v.chunks_exact(self.v_head_dim).enumerate() {
            self.put_row(&mut block[self.v_start(head)..][..self.v_stripe()], token, v);
        }
    }

    /// Reads the values that [`Self::put`] wrote, as the kernels see them.
    pub(crate) fn get(&self, block: &[u8], token: usize) -> (Vec<f32>, Vec<f32>) {
        let k = |head| self.get_row(&block[self.k_start(head)..][..self.k_stripe()], token, self.head_dim);
        let v = |head| self.get_row(&block[self.v_start(head)..][..self.v_stripe()], token, self.v_head_dim);
        ((0..self.kv_heads).flat_map(k).collect(), (0..self.kv_heads).flat_map(v).collect())
    }

    fn k_start(&self, head: usize) -> usize {
        head * self.k_stripe()
    }

    fn v_start(&self, head: usize) -> usize {
        self.kv_heads * self.k_stripe() + head * self.v_stripe()
    }

    fn scales_start(&self, width: usize) -> usize {
        (self.block_tokens * width.next_multiple_of(ROW_STEP)).next_multiple_of(16)
    }

    fn put_row(&self, stripe: &mut [u8], token: usize, row: &[f32]) {
        let (width, first) = (row.len(), token * row.len().next_multiple_of(ROW_STEP));
        let stride = width.next_multiple_of(ROW_STEP);
        let padded = row.iter().copied().chain(std::iter::repeat_n(0.0, stride - width));
        match self.kv_type {
            KvType::F32 => {
                let slots = stripe.as_chunks_mut().0[first..].iter_mut();
                slots.zip(padded).for_each(|(slot, x)| *slot = x.to_ne_bytes());
            }
            KvType::F16 => {
                let slots = stripe.as_chunks_mut().0[first..].iter_mut();
                slots.zip(padded).for_each(|(slot, x)| *slot = f16::from_f32(x).to_ne_bytes());
            }
            KvType::Q8_0 => {
                let scales = self.scales_start(width) + token * width.div_ceil(Q8_RUN) * 2;
                for (run, x) in padded.collect::<Vec<_>>().chunks(Q8_RUN).enumerate() {
                    let largest = x.iter().fold(0.0f32, |m, x| m.max(x.abs()));
                    let scale = f16::from_f32(largest / 127.0);
                    stripe[scales + 2 * run..][..2].copy_from_slice(&scale.to_ne_bytes());
                    for (i, x) in x.iter().enumerate() {
                        let q = (x * (1.0 / scale.to_f32().max(1e-30))).round_ties_even();
                        stripe[first + run * Q8_RUN + i] = (q.clamp(-127.0, 127.0) as i8).cast_unsigned();
                    }
                }
            }
        }
    }

    fn get_row(&self, stripe: &[u8], token: usize, width: usize) -> Vec<f32> {
        let first = token * width.next_multiple_of(ROW_STEP);
        let runs = width.div_ceil(Q8_RUN);
        (0..width)
            .map(|d| match self.kv_type {
                KvType::F32 => f32::from_ne_bytes(stripe.as_chunks().0[first + d]),
                KvType::F16 => f16::from_ne_bytes(stripe.as_chunks().0[first + d]).to_f32(),
                KvType::Q8_0 => {
                    let at = self.scales_start(width) + 2 * (token * runs + d / Q8_RUN);
                    let scale = f16::from_ne_bytes([stripe[at], stripe[at + 1]]).to_f32();
                    f32::from(stripe[first + d].cast_signed()) * scale
                }
            })
            .collect()
    }
}
