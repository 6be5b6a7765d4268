//! The K formats and IQ4_XS: blocks of 256 with small scales per 16 or 32.

use super::codes::Codes;

fn u16_at(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([block[at], block[at + 1]])
}

/// 2-bit codes: each run of 32 bytes holds four runs of 32 values, in the lowest bits first.
fn crumbs(qs: &[u8], out: &mut Codes) {
    for (run, codes) in out.codes.chunks_exact_mut(32).enumerate() {
        let bytes = &qs[run / 4 * 32..][..32];
        let shift = 2 * (run % 4);
        for (code, &byte) in codes.iter_mut().zip(bytes) {
            *code = byte >> shift & 3;
        }
    }
}

/// 4-bit codes: each run of 32 bytes holds 32 values in its low nibbles and the next 32 in its high nibbles.
fn nibble_runs(qs: &[u8], out: &mut Codes) {
    for (codes, bytes) in out.codes.chunks_exact_mut(64).zip(qs.chunks_exact(32)) {
        let (low, high) = codes.split_at_mut(32);
        for ((low, high), &byte) in low.iter_mut().zip(high).zip(bytes) {
            *low = byte & 15;
            *high = byte >> 4;
        }
    }
}

/// The eight 6-bit scales and mins of Q4_K and Q5_K, in 12 bytes. The first eight bytes hold scales 0..4,
/// then mins 0..4, in their low 6 bits, and the top 2 bits of scales and mins 4..8 above. The last four hold
/// the low nibbles of 4..8.
fn scales_and_mins(bytes: &[u8], out: &mut Codes) {
    for i in 0..4 {
        let (scale, min, low) = (bytes[i], bytes[i + 4], bytes[i + 8]);
        out.scales[i] = scale & 63;
        out.mins[i] = min & 63;
        out.scales[i + 4] = low & 15 | scale >> 6 << 4;
        out.mins[i + 4] = low >> 4 | min >> 6 << 4;
    }
}

pub(super) fn split_q2(block: &[u8], out: &mut Codes) {
    for (i, &byte) in block[..16].iter().enumerate() {
        out.scales[i] = byte & 15;
        out.mins[i] = byte >> 4;
    }
    crumbs(&block[16..80], out);
    out.d = u16_at(block, 80);
    out.dmin = u16_at(block, 82);
}

pub(super) fn split_q3(block: &[u8], out: &mut Codes) {
    let (high_bits, scales) = (&block[..32], &block[96..108]);
    crumbs(&block[32..96], out);
    for (run, codes) in out.codes.chunks_exact_mut(32).enumerate() {
        for (code, &byte) in codes.iter_mut().zip(high_bits) {
            *code |= (byte >> run & 1) << 2;
        }
    }
    // 16 scales of 6 bits: bytes 0..8 hold the low nibbles of scales 0..8 and 8..16, bytes 8..12 the top two
    // bits.
    for i in 0..16 {
        let low = scales[i % 8] >> (4 * (i / 8)) & 15;
        let high = scales[8 + i % 4] >> (2 * (i / 4)) & 3;
        out.scales[i] = (low | high << 4).wrapping_sub(32);
    }
    out.d = u16_at(block, 108);
}

pub(super) fn scales_q4(block: &[u8], out: &mut Codes) {
    out.d = u16_at(block, 0);
    out.dmin = u16_at(block, 2);
    scales_and_mins(&block[4..16], out);
}

/// See [`super::codes::nibbles`]. Each 32 bytes hold 32 values in their low nibbles and the next 32 in their high ones.
pub(super) fn nibbles_q4(block: &[u8], run: usize) -> [u8; 16] {
    let (bytes, shift) = (&block[16 + 32 * (run / 2)..][..32], 4 * (run % 2));
    std::array::from_fn(|i| bytes[i] >> shift & 15 | (bytes[i + 16] >> shift & 15) << 4)
}

pub(super) fn split_q5(block: &[u8], out: &mut Codes) {
    out.d = u16_at(block, 0);
    out.dmin = u16_at(block, 2);
    scales_and_mins(&block[4..16], out);
    nibble_runs(&block[48..176], out);
    for (run, codes) in out.codes.chunks_exact_mut(32).enumerate() {
        for (code, &byte) in codes.iter_mut().zip(&block[16..48]) {
            *code |= (byte >> run & 1) << 4;
        }
    }
}

pub(super) fn split_q6(block: &[u8], out: &mut Codes) {
    // Each half of 128 values has 64 bytes of nibbles (runs 0 and 1 low, 2 and 3 high) and 32 bytes with the
    // top two bits (run r in bits 2r).
    for (half, codes) in out.codes.chunks_exact_mut(128).enumerate() {
        let nibbles = &block[64 * half..][..64];
        let pairs = &block[128 + 32 * half..][..32];
        for (run, codes) in codes.chunks_exact_mut(32).enumerate() {
            let nibbles = &nibbles[run % 2 * 32..][..32];
            for ((code, &nibble), &pair) in codes.iter_mut().zip(nibbles).zip(pairs) {
                *code = nibble >> (4 * (run / 2)) & 15 | (pair >> (2 * run) & 3) << 4;
            }
        }
    }
    out.scales.copy_from_slice(&block[192..208]);
    out.d = u16_at(block, 208);
}

pub(super) fn scales_iq4_xs(block: &[u8], out: &mut Codes) {
    out.d = u16_at(block, 0);
    let high = u16_at(block, 2);
    for i in 0..8 {
        let low = block[4 + i / 2] >> (4 * (i % 2)) & 15;
        let pair = (high >> (2 * i)) as u8 & 3;
        out.scales[i] = (low | pair << 4).wrapping_sub(32);
    }
}
