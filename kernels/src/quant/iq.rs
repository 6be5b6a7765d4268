//! The codebook formats below four bits. Groups of 8 or 4 values are indices into a grid of magnitudes, with
//! separate signs. All have 256 values per block.

use super::GgmlType;
use super::grids::{IQ1, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS};
use half::f16;

/// Magnitudes of the three packed values of an IQ2 grid. The fourth is unused.
const IQ2_LEVELS: [f32; 4] = [8.0, 25.0, 43.0, 0.0];
/// Magnitudes of the eight packed values of IQ3_XXS's grid.
const IQ3_XXS_LEVELS: [f32; 8] = [4.0, 12.0, 20.0, 28.0, 36.0, 44.0, 52.0, 62.0];
/// IQ1 levels are shifted up or down by this value.
const IQ1_DELTA: f32 = 0.125;

/// Dequantises one block of an IQ format other than IQ4.
pub(super) fn dequantize(ty: GgmlType, block: &[u8], out: &mut [f32]) {
    match ty {
        GgmlType::IQ1_S => iq1_s(block, out),
        GgmlType::IQ1_M => iq1_m(block, out),
        GgmlType::IQ2_XXS => iq2_xxs(block, out),
        GgmlType::IQ2_XS => iq2_xs(block, out),
        GgmlType::IQ2_S => iq2_s(block, out),
        GgmlType::IQ3_XXS => iq3_xxs(block, out),
        GgmlType::IQ3_S => iq3_s(block, out),
        _ => debug_assert!(false, "{ty} is no grid format"),
    }
}

fn u16_at(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([block[at], block[at + 1]])
}

fn u32_at(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

fn f16_at(block: &[u8], at: usize) -> f32 {
    f16::from_bits(u16_at(block, at)).to_f32()
}

/// Eight signs from seven bits: the eighth sign makes the number of minus signs even.
fn even_signs(bits: u32) -> u8 {
    let bits = (bits & 127) as u8;
    bits | ((bits.count_ones() as u8 & 1) << 7)
}

fn signed(signs: u8, i: usize, magnitude: f32) -> f32 {
    if signs >> i & 1 == 1 { -magnitude } else { magnitude }
}

fn iq2_group(entry: u16, signs: u8, scale: f32, out: &mut [f32]) {
    for (i, x) in out.iter_mut().enumerate() {
        *x = signed(signs, i, scale * IQ2_LEVELS[usize::from(entry >> (2 * i) & 3)]);
    }
}

fn iq2_xxs(block: &[u8], out: &mut [f32]) {
    let d = f16_at(block, 0);
    for (run, out) in out.chunks_exact_mut(32).enumerate() {
        let indices = &block[2 + 8 * run..][..4];
        let rest = u32_at(block, 2 + 8 * run + 4);
        let scale = d * (0.5 + (rest >> 28) as f32) * 0.25;
        for (group, out) in out.chunks_exact_mut(8).enumerate() {
            let entry = IQ2_XXS[usize::from(indices[group])];
            iq2_group(entry, even_signs(rest >> (7 * group)), scale, out);
        }
    }
}

/// Scale of IQ2_XS and IQ2_S: a nibble per 16 values.
fn iq2_scale(d: f32, scales: &[u8], group: usize) -> f32 {
    let nibble = scales[group / 4] >> (4 * (group / 2 % 2)) & 15;
    d * (0.5 + f32::from(nibble)) * 0.25
}

fn iq2_xs(block: &[u8], out: &mut [f32]) {
    let d = f16_at(block, 0);
    for (group, out) in out.chunks_exact_mut(8).enumerate() {
        let word = u16_at(block, 2 + 2 * group);
        let scale = iq2_scale(d, &block[66..74], group);
        iq2_group(IQ2_XS[usize::from(word & 511)], even_signs(u32::from(word >> 9)), scale, out);
    }
}

fn iq2_s(block: &[u8], out: &mut [f32]) {
    let d = f16_at(block, 0);
    let (low, signs, high, scales) = (&block[2..34], &block[34..66], &block[66..74], &block[74..82]);
    for (group, out) in out.chunks_exact_mut(8).enumerate() {
        let top = high[group / 4] >> (2 * (group % 4)) & 3;
        let index = usize::from(low[group]) | usize::from(top) << 8;
        iq2_group(IQ2_S[index], signs[group], iq2_scale(d, scales, group), out);
    }
}

fn iq3_xxs(block: &[u8], out: &mut [f32]) {
    let d = f16_at(block, 0);
    for (run, out) in out.chunks_exact_mut(32).enumerate() {
        let indices = &block[2 + 8 * run..][..8];
        let rest = u32_at(block, 66 + 4 * run);
        let scale = d * (0.5 + (rest >> 28) as f32) * 0.5;
        for (i, x) in out.iter_mut().enumerate() {
            let entry = IQ3_XXS[usize::from(indices[i / 4])];
            let level = IQ3_XXS_LEVELS[usize::from(entry >> (4 * (i % 4)) & 7)];
            *x = signed(even_signs(rest >> (7 * (i / 8))), i % 8, scale * level);
        }
    }
}

fn iq3_s(block: &[u8], out: &mut [f32]) {
    let d = f16_at(block, 0);
    let (low, high, signs, scales) = (&block[2..66], &block[66..74], &block[74..106], &block[106..110]);
    for (run, out) in out.chunks_exact_mut(32).enumerate() {
        let nibble = scales[run / 2] >> (4 * (run % 2)) & 15;
        let scale = d * f32::from(1 + 2 * nibble);
        for (i, x) in out.iter_mut().enumerate() {
            let top = high[run] >> (i / 4) & 1;
            let entry = IQ3_S[usize::from(low[8 * run + i / 4]) | usize::from(top) << 8];
            let level = f32::from((entry >> (4 * (i % 4)) & 7) * 2 + 1);
            *x = signed(signs[4 * run + i / 8], i % 8, scale * level);
        }
    }
}

fn iq1_group(entry: u16, delta: f32, scale: f32, out: &mut [f32]) {
    for (i, x) in out.iter_mut().enumerate() {
        *x = scale * (f32::from((entry >> (2 * i) & 3) as i8 - 1) + delta);
    }
}

fn iq1_s(block: &[u8], out: &mut [f32]) {
    let d = f16_at(block, 0);
    for (run, out) in out.chunks_exact_mut(32).enumerate() {
        let high = u16_at(block, 34 + 2 * run);
        let scale = d * f32::from(2 * (high >> 12 & 7) + 1);
        let delta = if high & 0x8000 == 0 { IQ1_DELTA } else { -IQ1_DELTA };
        for (group, out) in out.chunks_exact_mut(8).enumerate() {
            let index = u16::from(block[2 + 4 * run + group]) | (high >> (3 * group) & 7) << 8;
            iq1_group(IQ1[usize::from(index)], delta, scale, out);
        }
    }
}

fn iq1_m(block: &[u8], out: &mut [f32]) {
    let scales: [u16; 4] = std::array::from_fn(|i| u16_at(block, 48 + 2 * i));
    // The f16 scale is distributed over the top nibbles of the four words, lowest nibble first.
    let d = scales.iter().enumerate().fold(0, |bits, (i, word)| bits | word >> 12 << (4 * i));
    let d = f16::from_bits(d).to_f32();
    for (group, out) in out.chunks_exact_mut(8).enumerate() {
        let sixteenth = group / 2;
        let scale = d * f32::from(2 * (scales[sixteenth / 4] >> (3 * (sixteenth % 4)) & 7) + 1);
        let high = block[32 + group / 2] >> (4 * (group % 2));
        let delta = if high & 8 == 0 { IQ1_DELTA } else { -IQ1_DELTA };
        let index = u16::from(block[group]) | u16::from(high & 7) << 8;
        iq1_group(IQ1[usize::from(index)], delta, scale, out);
    }
}
