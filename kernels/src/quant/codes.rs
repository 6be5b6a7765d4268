//! Splits a file block into stored codes and scales, the common input of dequantising, packing and the
//! reference product.

use super::scheme::{Scaling, Scheme};
use super::{GgmlType, e8m0_half, k, legacy, ue4m3_half};
use half::f16;

/// The parts of one block. Formats with smaller blocks do not change the remaining entries.
#[derive(Debug, Clone)]
pub struct Codes {
    /// Stored codes in column order.
    pub codes: [u8; 256],
    /// Bits of the f16 scale, for the formats that have one.
    pub d: u16,
    /// Bits of the f16 min or scale of mins.
    pub dmin: u16,
    /// The f32 scale, for the formats that have one.
    pub scale: f32,
    /// The small scales, one per 32 or 16 values, in the form of the packed layout: signed scales as `i8`
    /// bits, E8M0 and UE4M3 as in the file (UE4M3's one NaN pattern, which reads as 0, is replaced by 0).
    pub scales: [u8; 16],
    pub mins: [u8; 16],
}

impl Default for Codes {
    fn default() -> Self {
        Self { codes: [0; 256], d: 0, dmin: 0, scale: 0.0, scales: [0; 16], mins: [0; 16] }
    }
}

/// Splits one block of a format that has a [`Scheme`].
///
/// `block` must be `ty.block_bytes()` long.
pub fn split(ty: GgmlType, block: &[u8], out: &mut Codes) {
    debug_assert_eq!(block.len(), ty.block_bytes());
    match ty {
        GgmlType::Q5_0 => legacy::split_q5_0(block, out),
        GgmlType::Q5_1 => legacy::split_q5_1(block, out),
        GgmlType::Q8_0 => legacy::split_q8_0(block, out),
        GgmlType::Q2_K => k::split_q2(block, out),
        GgmlType::Q3_K => k::split_q3(block, out),
        GgmlType::Q5_K => k::split_q5(block, out),
        GgmlType::Q6_K => k::split_q6(block, out),
        GgmlType::FP8 => legacy::split_fp8(block, out),
        GgmlType::INT8 => legacy::split_int8(block, out),
        GgmlType::INT5 => legacy::split_int5(block, out),
        _ => {
            split_scales(ty, block, out);
            for (run, codes) in out.codes.chunks_exact_mut(32).take(ty.block_len() / 32).enumerate() {
                let (low, high) = codes.split_at_mut(16);
                for ((low, high), byte) in low.iter_mut().zip(high).zip(nibbles(ty, block, run)) {
                    (*low, *high) = (byte & 15, byte >> 4);
                }
            }
        }
    }
}

/// [`split`] without the codes, for the formats of four bits.
pub(crate) fn split_scales(ty: GgmlType, block: &[u8], out: &mut Codes) {
    match ty {
        GgmlType::Q4_0 | GgmlType::IQ4_NL => legacy::scales_q4_0(block, out),
        GgmlType::Q4_1 => legacy::scales_q4_1(block, out),
        GgmlType::Q4_K => k::scales_q4(block, out),
        GgmlType::IQ4_XS => k::scales_iq4_xs(block, out),
        GgmlType::MXFP4 => out.scales[0] = block[0],
        GgmlType::NVFP4 => super::fp4::scales_nvfp4(block, out),
        GgmlType::INT4 => legacy::scales_int4(block, out),
        _ => debug_assert!(false, "{ty} has no codes of four bits"),
    }
}

/// Codes of the values `32 * run..32 * run + 32` of a block, for the formats of four bits. Byte `i` has value `i` in its
/// low nibble and value `i + 16` in its high one.
pub(crate) fn nibbles(ty: GgmlType, block: &[u8], run: usize) -> [u8; 16] {
    let stored = |at: usize| block[at + 16 * run..].first_chunk().copied().unwrap_or_default();
    match ty {
        GgmlType::Q4_0 | GgmlType::IQ4_NL => stored(2),
        GgmlType::Q4_1 | GgmlType::INT4 => stored(4),
        GgmlType::IQ4_XS => stored(8),
        GgmlType::MXFP4 => stored(1),
        GgmlType::NVFP4 => super::fp4::nibbles_nvfp4(stored(4)),
        GgmlType::Q4_K => k::nibbles_q4(block, run),
        _ => {
            debug_assert!(false, "{ty} has no codes of four bits");
            [0; 16]
        }
    }
}

impl Codes {
    /// Scale and addend (the min, or minus the min) of the block's 16 values with index `sixteenth`. The
    /// addend is `None` for formats without mins.
    pub fn affine(&self, scaling: Scaling, sixteenth: usize) -> (f32, Option<f32>) {
        let d = || f16::from_bits(self.d).to_f32();
        let dmin = || f16::from_bits(self.dmin).to_f32();
        let signed = |i: usize| f32::from(self.scales[i].cast_signed());
        let by_32 = sixteenth / 2;
        match scaling {
            Scaling::F32 => (self.scale, None),
            Scaling::F16 => (d(), None),
            Scaling::F16Min => (d(), Some(dmin())),
            Scaling::E8m0 => (e8m0_half(self.scales[0]), None),
            Scaling::Super => (d() * signed(by_32), None),
            Scaling::SuperMin => {
                (d() * f32::from(self.scales[by_32]), Some(-(dmin() * f32::from(self.mins[by_32]))))
            }
            Scaling::Sixteenths => (d() * signed(sixteenth), None),
            Scaling::SixteenthsMin => {
                (d() * f32::from(self.scales[sixteenth]), Some(-(dmin() * f32::from(self.mins[sixteenth]))))
            }
            Scaling::Ue4m3 => (ue4m3_half(self.scales[sixteenth]), None),
        }
    }

    /// The weights of the block, `out.len()` of them.
    pub fn dequantize(&self, scheme: &Scheme, out: &mut [f32]) {
        for (sixteenth, (out, codes)) in out.chunks_mut(16).zip(self.codes.chunks(16)).enumerate() {
            let (scale, added) = self.affine(scheme.scaling, sixteenth);
            for (x, &code) in out.iter_mut().zip(codes) {
                let level = scheme.value(code);
                *x = match added {
                    None => scale * level,
                    Some(added) => scale * level + added,
                };
            }
        }
    }
}
