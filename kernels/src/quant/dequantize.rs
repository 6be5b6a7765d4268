//! Conversion of file bytes to f32, for every format.

use super::codes::{Codes, split};
use super::scheme::Scheme;
use super::{GgmlType, iq, ternary};
use crate::error::Error;
use half::{bf16, f16};

/// Dequantises whole blocks of `ty` to f32. The values are those of the format's definition, bit for bit.
///
/// # Errors
/// [`Error::PartialBlock`] if `out` is not a whole number of blocks, [`Error::Length`] if `bytes` does not
/// have their size.
pub fn dequantize(ty: GgmlType, bytes: &[u8], out: &mut [f32]) -> Result<(), Error> {
    let expected = ty.row_bytes(out.len())?;
    if bytes.len() != expected {
        return Err(Error::Length { what: "quantised bytes", expected, found: bytes.len() });
    }
    let blocks = bytes.chunks_exact(ty.block_bytes()).zip(out.chunks_exact_mut(ty.block_len()));
    if let Some(scheme) = Scheme::of(ty) {
        let mut codes = Codes::default();
        for (block, out) in blocks {
            split(ty, block, &mut codes);
            codes.dequantize(&scheme, out);
        }
        return Ok(());
    }
    for (block, out) in blocks {
        match ty {
            GgmlType::F32 => out[0] = f32::from_le_bytes([block[0], block[1], block[2], block[3]]),
            GgmlType::F16 => out[0] = f16::from_le_bytes([block[0], block[1]]).to_f32(),
            GgmlType::BF16 => out[0] = bf16::from_le_bytes([block[0], block[1]]).to_f32(),
            GgmlType::TQ1_0 => ternary::dequantize_tq1_0(block, out),
            GgmlType::TQ2_0 => ternary::dequantize_tq2_0(block, out),
            _ => iq::dequantize(ty, block, out),
        }
    }
    Ok(())
}
