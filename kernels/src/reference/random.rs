//! Random inputs of tests, equal on every machine.

use crate::quant::GgmlType;

/// A small deterministic generator. Each test passes its seed.
#[derive(Debug)]
pub struct Random(pub u64);

impl Random {
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let x = self.0 ^ self.0 >> 29;
        x.wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 24
    }

    pub fn byte(&mut self) -> u8 {
        self.next_u64() as u8
    }

    /// Roughly normal, of magnitude 1, with occasional outliers.
    pub fn value(&mut self) -> f32 {
        let sum: i64 = (0..4).map(|_| i64::from(self.next_u64() as u16) - 32768).sum();
        let scale = if self.next_u64().is_multiple_of(50) { 30.0 } else { 1.0 };
        sum as f32 / 32768.0 * scale
    }

    pub fn values(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.value()).collect()
    }

    /// A finite f16, mostly of ordinary size, sometimes of any size.
    fn f16(&mut self) -> [u8; 2] {
        let bits = self.next_u64() as u16;
        let exponent =
            if self.next_u64().is_multiple_of(8) { (bits >> 10) % 31 } else { 5 + (bits >> 10) % 12 };
        (bits & 0x83ff | exponent << 10).to_le_bytes()
    }

    /// Bytes of `count` blocks with arbitrary codes and small scales, and finite f16 scales.
    fn blocks(&mut self, ty: GgmlType, count: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(count * ty.block_bytes());
        for _ in 0..count {
            let start = bytes.len();
            bytes.extend((0..ty.block_bytes()).map(|_| self.byte()));
            let block = &mut bytes[start..];
            match ty {
                GgmlType::F32 => block.copy_from_slice(&self.value().to_le_bytes()),
                GgmlType::F16 => block.copy_from_slice(&self.f16()),
                GgmlType::BF16 => block.copy_from_slice(&self.value().to_le_bytes()[2..]),
                GgmlType::MXFP4 => block[0] = if block[0] < 8 { block[0] / 4 } else { 100 + block[0] % 50 },
                GgmlType::FP8 | GgmlType::INT8 | GgmlType::INT5 | GgmlType::INT4 => {
                    block[..4].copy_from_slice(&(self.value() / 64.0).to_le_bytes());
                    if ty == GgmlType::FP8 {
                        // No NaN.
                        block[4..]
                            .iter_mut()
                            .filter(|code| **code & 0x7f == 0x7f)
                            .for_each(|code| *code = 0x7e);
                    }
                }
                _ => {
                    for &at in f16_fields(ty) {
                        block[at..at + 2].copy_from_slice(&self.f16());
                    }
                }
            }
        }
        bytes
    }

    /// `[rows, cols]` in file format.
    pub fn tensor(&mut self, ty: GgmlType, rows: usize, cols: usize) -> Vec<u8> {
        self.blocks(ty, rows * cols / ty.block_len())
    }
}

/// Byte offsets of the f16 values of a block.
pub fn f16_fields(ty: GgmlType) -> &'static [usize] {
    match ty {
        GgmlType::Q4_0 | GgmlType::Q5_0 | GgmlType::Q8_0 | GgmlType::IQ4_NL | GgmlType::IQ4_XS => &[0],
        GgmlType::Q4_1 | GgmlType::Q5_1 | GgmlType::Q4_K | GgmlType::Q5_K => &[0, 2],
        GgmlType::Q2_K => &[80, 82],
        GgmlType::Q3_K => &[108],
        GgmlType::Q6_K => &[208],
        _ => &[],
    }
}
