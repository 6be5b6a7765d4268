//! Conversion of f32 to the formats that `kvasir models convert` writes.

use super::GgmlType;
use crate::error::Error;
use half::{bf16, f16};

/// Appends `values`, whole blocks of `ty`, as F32, F16, BF16 or Q8_0. Each value is rounded to the nearest, ties to even;
/// a block of Q8_0 has the scale max |x| / 127.
///
/// # Errors
/// [`Error::NotHeld`] for a value that the format cannot hold, [`Error::PartialBlock`], and [`Error::NoEncoder`] for
/// other formats.
pub fn encode(ty: GgmlType, values: &[f32], out: &mut Vec<u8>) -> Result<(), Error> {
    ty.row_bytes(values.len())?;
    let refuse = |value: &f32| Error::NotHeld { ty: ty.name(), value: value.to_string() };
    if let Some(value) = values.iter().find(|value| !value.is_finite()) {
        return Err(refuse(value));
    }
    match ty {
        GgmlType::F32 => out.extend(values.iter().flat_map(|value| value.to_le_bytes())),
        GgmlType::BF16 | GgmlType::F16 => {
            for value in values {
                let (bytes, finite) = match ty {
                    GgmlType::BF16 => {
                        (bf16::from_f32(*value).to_le_bytes(), bf16::from_f32(*value).is_finite())
                    }
                    _ => (f16::from_f32(*value).to_le_bytes(), f16::from_f32(*value).is_finite()),
                };
                if !finite {
                    return Err(refuse(value));
                }
                out.extend(bytes);
            }
        }
        GgmlType::Q8_0 => {
            for block in values.as_chunks::<32>().0 {
                let largest = block.iter().fold(0_f32, |largest, value| largest.max(value.abs()));
                let scale = largest / 127.0;
                let stored = f16::from_f32(scale);
                if !stored.is_finite() {
                    return Err(refuse(&largest));
                }
                let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
                out.extend(stored.to_le_bytes());
                out.extend(block.iter().map(|value| (value * inverse).round_ties_even() as i8 as u8));
            }
        }
        _ => return Err(Error::NoEncoder { ty: ty.name() }),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::dequantize;
    use super::*;

    fn round_trip(ty: GgmlType, values: &[f32]) -> Vec<f32> {
        let (mut bytes, mut back) = (Vec::new(), vec![0.0; values.len()]);
        encode(ty, values, &mut bytes).unwrap();
        dequantize(ty, &bytes, &mut back).unwrap();
        back
    }

    #[test]
    fn values_that_a_format_holds_come_back() {
        let values: Vec<f32> = (0..64).map(|at| (at as f32 - 32.0) * 0.25).collect();
        for ty in [GgmlType::F32, GgmlType::F16, GgmlType::BF16] {
            assert_eq!(round_trip(ty, &values), values);
        }
        let whole: Vec<f32> =
            (0..64).map(|at| (at as f32 - 32.0) * 4.0 - 0.0).map(|x| x.max(-127.0)).collect();
        assert_eq!(
            round_trip(GgmlType::Q8_0, &whole[..32]),
            whole[..32],
            "a largest value of 127 has the scale 1"
        );
        assert_eq!(round_trip(GgmlType::Q8_0, &[0.0; 32]), [0.0; 32]);
    }

    #[test]
    fn others_are_refused() {
        let mut out = Vec::new();
        for (ty, value) in [
            (GgmlType::F16, 70_000.0),
            (GgmlType::F16, f32::NAN),
            (GgmlType::BF16, f32::MAX),
            (GgmlType::F32, f32::INFINITY),
            (GgmlType::Q8_0, 1e30),
        ] {
            let error = encode(ty, &[value; 32], &mut out).unwrap_err().to_string();
            assert!(error.contains(ty.name()) && error.contains(&value.to_string()), "{error}");
        }
        assert!(matches!(encode(GgmlType::Q8_0, &[0.0; 31], &mut out), Err(Error::PartialBlock { .. })));
        assert!(matches!(encode(GgmlType::Q4_K, &[0.0; 256], &mut out), Err(Error::NoEncoder { .. })));
    }

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig::with_cases(64))]
        #[test]
        fn errors_are_half_a_step(values in proptest::collection::vec(-1e3_f32..1e3, 64)) {
            for (block, back) in values.chunks(32).zip(round_trip(GgmlType::Q8_0, &values).chunks(32)) {
                let largest = block.iter().fold(0_f32, |largest, value| largest.max(value.abs()));
                for (value, back) in block.iter().zip(back) {
                    // Half a step, and the rounding of the scale to f16.
                    proptest::prop_assert!((value - back).abs() <= largest / 127.0 * 0.5 + value.abs() * 1e-3);
                }
            }
            for (value, back) in values.iter().zip(round_trip(GgmlType::BF16, &values)) {
                proptest::prop_assert!((value - back).abs() <= value.abs() / 256.0);
            }
        }
    }
}
