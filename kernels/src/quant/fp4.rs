//! The 4-bit float formats and their scales.

use super::codes::Codes;

/// Half of an E8M0 scale: `2^(e - 128)`. It is halved because E2M1 levels are stored doubled.
pub(crate) fn e8m0_half(e: u8) -> f32 {
    f32::from_bits(match e {
        0 | 1 => 0x0020_0000 << e,
        _ => u32::from(e - 1) << 23,
    })
}

/// Half of an unsigned E4M3 scale (bias 7). The sign bit is ignored.
pub(crate) fn ue4m3_half(x: u8) -> f32 {
    // Exponent and mantissa are placed at their positions in an f32. The exponent is then off by the
    // difference of the biases, 120.
    f32::from_bits(u32::from(x & 0x7f) << 20) * 2f32.powi(119)
}

/// A signed E4M3 value (bias 7) without infinities. The two NaN patterns read as 480 of their sign: whoever makes
/// blocks refuses them.
pub(crate) fn e4m3(x: u8) -> f32 {
    // The bits are those of an f16 with another bias, so subnormals need no case of their own.
    let bits = u16::from(x & 0x80) << 8 | u16::from(x & 0x7f) << 7;
    half::f16::from_bits(bits).to_f32() * 256.0
}

pub(super) fn scales_nvfp4(block: &[u8], out: &mut Codes) {
    for (out, &scale) in out.scales.iter_mut().zip(&block[..4]) {
        *out = if scale == 0x7f { 0 } else { scale };
    }
}

/// Two times 16 values, of each the first eight in the low nibbles, to the order of [`super::codes::nibbles`].
pub(super) fn nibbles_nvfp4(codes: [u8; 16]) -> [u8; 16] {
    const LOW: u128 = 0x0f0f_0f0f_0f0f_0f0f;
    let both = u128::from_le_bytes(codes);
    let (first, second) = (both & (u128::MAX >> 64), both >> 64);
    let low = first & LOW | (second & LOW) << 4;
    let high = first >> 4 & LOW | second & LOW << 4;
    (low | high << 64).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::{e4m3, e8m0_half, ue4m3_half};

    #[test]
    fn e8m0_scales_are_powers_of_two() {
        assert_eq!(e8m0_half(128), 1.0);
        assert_eq!(e8m0_half(127), 0.5);
        assert_eq!(e8m0_half(2), 2f32.powi(-126));
        assert_eq!(e8m0_half(1), 2f32.powi(-126) / 2.0);
        assert_eq!(e8m0_half(0), 2f32.powi(-126) / 4.0);
        assert_eq!(e8m0_half(255), 2f32.powi(127));
    }

    #[test]
    fn e4m3_values_follow_the_definition() {
        for x in 0..=0xfe_u8 {
            let (exponent, mantissa) = (i32::from(x >> 3 & 15), f64::from(x & 7));
            let size = match exponent {
                0 => mantissa * 2f64.powi(-9),
                _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
            };
            assert_eq!(f64::from(e4m3(x)), if x >= 0x80 { -size } else { size }, "{x:#x}");
        }
    }

    #[test]
    fn ue4m3_scales_follow_the_definition() {
        for x in 0..=0x7e_u8 {
            let (exponent, mantissa) = (i32::from(x >> 3), f64::from(x & 7));
            let value = match exponent {
                0 => mantissa * 2f64.powi(-9),
                _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
            };
            assert_eq!(f64::from(ue4m3_half(x)), value / 2.0, "{x:#x}");
        }
    }
}
