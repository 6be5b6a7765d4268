//! The formats with blocks of 32 and f16 or f32 scales. A byte holds value `i` in its low nibble and value `i + 16`
//! in its high nibble.

use super::codes::Codes;

fn u16_at(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([block[at], block[at + 1]])
}

fn nibbles(qs: &[u8], out: &mut Codes) {
    for (i, &byte) in qs[..16].iter().enumerate() {
        out.codes[i] = byte & 15;
        out.codes[i + 16] = byte >> 4;
    }
}

/// Adds the fifth bits from a little-endian mask of 32.
fn fifth_bits(mask: &[u8], out: &mut Codes) {
    let mask = u32::from_le_bytes([mask[0], mask[1], mask[2], mask[3]]);
    for (i, code) in out.codes[..32].iter_mut().enumerate() {
        *code |= ((mask >> i) as u8 & 1) << 4;
    }
}

fn f32_at(block: &[u8], at: usize) -> f32 {
    f32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

pub(super) fn split_fp8(block: &[u8], out: &mut Codes) {
    out.scale = f32_at(block, 0);
    out.codes[..32].copy_from_slice(&block[4..36]);
}

pub(super) fn split_int8(block: &[u8], out: &mut Codes) {
    out.scale = f32_at(block, 0);
    for (code, &q) in out.codes[..32].iter_mut().zip(&block[4..]) {
        *code = q ^ 0x80;
    }
}

/// The fifth bits are those of [`split_q5_0`].
pub(super) fn split_int5(block: &[u8], out: &mut Codes) {
    out.scale = f32_at(block, 0);
    nibbles(&block[8..], out);
    fifth_bits(&block[4..], out);
}

pub(super) fn scales_int4(block: &[u8], out: &mut Codes) {
    out.scale = f32_at(block, 0);
}

pub(super) fn scales_q4_0(block: &[u8], out: &mut Codes) {
    out.d = u16_at(block, 0);
}

pub(super) fn scales_q4_1(block: &[u8], out: &mut Codes) {
    out.d = u16_at(block, 0);
    out.dmin = u16_at(block, 2);
}

pub(super) fn split_q5_0(block: &[u8], out: &mut Codes) {
    out.d = u16_at(block, 0);
    nibbles(&block[6..], out);
    fifth_bits(&block[2..], out);
}

pub(super) fn split_q5_1(block: &[u8], out: &mut Codes) {
    out.d = u16_at(block, 0);
    out.dmin = u16_at(block, 2);
    nibbles(&block[8..], out);
    fifth_bits(&block[4..], out);
}

pub(super) fn split_q8_0(block: &[u8], out: &mut Codes) {
    out.d = u16_at(block, 0);
    for (code, &q) in out.codes[..32].iter_mut().zip(&block[2..]) {
        *code = q ^ 0x80;
    }
}
