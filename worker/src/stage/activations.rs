//! Activations as bytes.

use proto::stage::ActivationType;

/// Little endian; as brain floats rounded to the nearest, ties to even.
pub(super) fn encode(element: ActivationType, values: &[f32]) -> Vec<u8> {
    match element {
        ActivationType::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        ActivationType::Bf16 => values.iter().flat_map(|value| to_bf16(*value).to_le_bytes()).collect(),
    }
}

/// What [`encode`] wrote; bytes that fill no element are left out.
pub(super) fn decode(element: ActivationType, bytes: &[u8]) -> Vec<f32> {
    match element {
        ActivationType::F32 => bytes.as_chunks::<4>().0.iter().map(|x| f32::from_le_bytes(*x)).collect(),
        ActivationType::Bf16 => {
            let wide = |x: &[u8; 2]| f32::from_bits(u32::from(u16::from_le_bytes(*x)) << 16);
            bytes.as_chunks::<2>().0.iter().map(wide).collect()
        }
    }
}

fn to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        // Rounding must not make an infinity of it.
        return (bits >> 16) as u16 | 0x40;
    }
    (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use ActivationType::{Bf16, F32};

    #[test]
    fn f32_changes_no_bit() {
        let values = [0.0, -0.0, 1.5, f32::MIN_POSITIVE / 8.0, f32::MAX, f32::INFINITY, f32::NAN];
        let back = decode(F32, &encode(F32, &values));
        assert!(back.iter().zip(values).all(|(a, b)| a.to_bits() == b.to_bits()));
    }

    #[test]
    fn brain_floats_round_to_nearest_even() {
        let bits = |value: u32| decode(Bf16, &encode(Bf16, &[f32::from_bits(value)]))[0].to_bits();
        for (value, want) in [
            (0x3f80_0000, 0x3f80_0000),
            (0x3f80_7fff, 0x3f80_0000),
            (0x3f80_8000, 0x3f80_0000),
            (0x3f81_8000, 0x3f82_0000),
            (0x3f80_8001, 0x3f81_0000),
            (0xbf80_8001, 0xbf81_0000),
            (0x7f7f_ffff, 0x7f80_0000),
            (0xff80_0000, 0xff80_0000),
        ] {
            assert_eq!(bits(value), want, "{value:x}");
        }
        assert!(f32::from_bits(bits(0x7f80_0001)).is_nan());
    }
}
