//! The ternary formats: levels -1, 0, 1 and one f16 scale per 256.

use half::f16;

fn scale_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Digit `digit` (most significant first) of a byte that holds a five-digit base-3 fraction of 256.
fn trit(byte: u8, digit: usize) -> f32 {
    const POWERS: [u8; 5] = [1, 3, 9, 27, 81];
    let rest = byte.wrapping_mul(POWERS[digit]);
    f32::from(((u16::from(rest) * 3) >> 8) as i8 - 1)
}

pub(super) fn dequantize_tq1_0(block: &[u8], out: &mut [f32]) {
    let d = scale_at(block, 52);
    // Runs of bytes, each holding `digits` digits; digit p of a run's bytes are consecutive values.
    let mut at = 0;
    for (bytes, digits) in [(&block[..32], 5), (&block[32..48], 5), (&block[48..52], 4)] {
        for digit in 0..digits {
            for &byte in bytes {
                out[at] = d * trit(byte, digit);
                at += 1;
            }
        }
    }
}

pub(super) fn dequantize_tq2_0(block: &[u8], out: &mut [f32]) {
    let d = scale_at(block, 64);
    for (run, out) in out.chunks_exact_mut(32).enumerate() {
        let bytes = &block[run / 4 * 32..][..32];
        for (x, &byte) in out.iter_mut().zip(bytes) {
            *x = d * f32::from((byte >> (2 * (run % 4)) & 3) as i8 - 1);
        }
    }
}
