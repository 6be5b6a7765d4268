//! Random values that keep activations finite.

use half::f16;
use model::GgmlType;

/// xorshift64* (Vigna 2014): sufficient for arbitrary bytes.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new() -> Self {
        Self(0x5eed)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// The bytes of a tensor.
    pub(crate) fn tensor(&mut self, name: &str, ty: GgmlType, bytes: usize) -> Vec<u8> {
        match ty {
            GgmlType::F32 => {
                std::iter::repeat_n(plain_value(name).to_le_bytes(), bytes / 4).flatten().collect()
            }
            GgmlType::F16 => (0..bytes / 2).flat_map(|_| self.small(0.03).to_le_bytes()).collect(),
            _ => {
                let mut data: Vec<u8> =
                    (0..bytes.div_ceil(8)).flat_map(|_| self.next().to_le_bytes()).collect();
                data.truncate(bytes);
                self.set_scales(ty, &mut data);
                data
            }
        }
    }

    /// A value in (-range, range).
    fn small(&mut self, range: f32) -> f16 {
        f16::from_f32(range * ((self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0))
    }

    /// Makes the f16 fields of every block finite and small.
    fn set_scales(&mut self, ty: GgmlType, data: &mut [u8]) {
        let (block, fields, range): (usize, &[usize], f32) = match ty {
            GgmlType::Q4_0 => (18, &[0], 0.004),
            GgmlType::Q8_0 => (34, &[0], 0.0004),
            GgmlType::Q4_K => (144, &[0, 2], 0.0001),
            GgmlType::Q5_K => (176, &[0, 2], 0.00005),
            GgmlType::Q6_K => (210, &[208], 0.00002),
            _ => return,
        };
        for block in data.chunks_exact_mut(block) {
            for &at in fields {
                let scale = self.small(range).to_le_bytes();
                block[at..at + 2].copy_from_slice(&scale);
            }
        }
    }
}

/// Value of all elements of a plain float tensor: norms multiply by one, recurrent states decay by about a
/// twentieth per token.
fn plain_value(name: &str) -> f32 {
    if name.ends_with("ssm_a") {
        -1.0
    } else if name.ends_with("ssm_dt.bias") {
        -3.0
    } else if name.ends_with("ssm_conv1d.weight") {
        0.25
    } else if name.ends_with(".bias") {
        0.0
    } else {
        1.0
    }
}
