//! For each quantised format with a matmul: the mapping from integers to weights, as data.
//!
//! A weight is `scale * level [+ min]`. Levels are small integers stored as unsigned codes (after a table
//! lookup for formats with a codebook), `level = code - offset`. The scale, and the min if the format has
//! one, apply to 32 consecutive values of a row, or to 16 (the two *halves* of 32).

use super::{GgmlType, e4m3};

/// Bits of a stored code. They determine the bit planes of a packed block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bits {
    Two,
    Three,
    Four,
    Five,
    Six,
    Eight,
}

/// Mapping from stored code to unsigned code: `level = unsigned code - offset`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Levels {
    /// The stored code is the unsigned code.
    Plain,
    /// A codebook of unsigned codes for 4-bit stored codes.
    Table(&'static [u8; 16]),
    /// The stored code is an E4M3 value, which is no integer.
    E4m3,
}

/// Source of the scales (and mins) of 32 values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scaling {
    /// f32 scale per 32.
    F32,
    /// f16 scale per 32.
    F16,
    /// f16 scale and f16 min per 32.
    F16Min,
    /// Power-of-two scale per 32, one byte.
    E8m0,
    /// f16 scale per 256 times a signed byte per 32.
    Super,
    /// f16 scale and f16 min per 256, each times an unsigned byte per 32; the min is subtracted.
    SuperMin,
    /// f16 scale per 256 times a signed byte per 16.
    Sixteenths,
    /// f16 scale and f16 min per 256, each times a nibble per 16; the min is subtracted.
    SixteenthsMin,
    /// Unsigned E4M3 scale per 16.
    Ue4m3,
}

impl Scaling {
    /// Whether weights have a min that does not scale with the level.
    pub const fn has_min(self) -> bool {
        matches!(self, Self::F16Min | Self::SuperMin | Self::SixteenthsMin)
    }
}

/// Constants of a quantised format with a matmul.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scheme {
    pub bits: Bits,
    pub levels: Levels,
    pub offset: i32,
    pub scaling: Scaling,
}

/// IQ4_NL's 16 levels, each plus 128.
static IQ4_CODES: [u8; 16] = [1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241];

/// The E2M1 values doubled (0, 1, 2, 3, 4, 6, 8, 12 and their negatives), each plus 16.
static E2M1_CODES: [u8; 16] = [16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4];

impl Scheme {
    /// The scheme of `ty`. `None` unless it is a quantised format with a matmul.
    pub const fn of(ty: GgmlType) -> Option<Self> {
        Some(match ty {
            GgmlType::Q4_0 => Self::plain(Bits::Four, 8, Scaling::F16),
            GgmlType::Q4_1 => Self::plain(Bits::Four, 0, Scaling::F16Min),
            GgmlType::Q5_0 => Self::plain(Bits::Five, 16, Scaling::F16),
            GgmlType::Q5_1 => Self::plain(Bits::Five, 0, Scaling::F16Min),
            GgmlType::Q8_0 => Self::plain(Bits::Eight, 128, Scaling::F16),
            GgmlType::Q2_K => Self::plain(Bits::Two, 0, Scaling::SixteenthsMin),
            GgmlType::Q3_K => Self::plain(Bits::Three, 4, Scaling::Sixteenths),
            GgmlType::Q4_K => Self::plain(Bits::Four, 0, Scaling::SuperMin),
            GgmlType::Q5_K => Self::plain(Bits::Five, 0, Scaling::SuperMin),
            GgmlType::Q6_K => Self::plain(Bits::Six, 32, Scaling::Sixteenths),
            GgmlType::IQ4_NL => Self::table(&IQ4_CODES, 128, Scaling::F16),
            GgmlType::IQ4_XS => Self::table(&IQ4_CODES, 128, Scaling::Super),
            GgmlType::MXFP4 => Self::table(&E2M1_CODES, 16, Scaling::E8m0),
            GgmlType::NVFP4 => Self::table(&E2M1_CODES, 16, Scaling::Ue4m3),
            GgmlType::FP8 => Self { levels: Levels::E4m3, ..Self::plain(Bits::Eight, 0, Scaling::F32) },
            GgmlType::INT8 => Self::plain(Bits::Eight, 128, Scaling::F32),
            GgmlType::INT5 => Self::plain(Bits::Five, 16, Scaling::F32),
            GgmlType::INT4 => Self::plain(Bits::Four, 8, Scaling::F32),
            _ => return None,
        })
    }

    const fn plain(bits: Bits, offset: i32, scaling: Scaling) -> Self {
        Self { bits, levels: Levels::Plain, offset, scaling }
    }

    const fn table(codes: &'static [u8; 16], offset: i32, scaling: Scaling) -> Self {
        Self { bits: Bits::Four, levels: Levels::Table(codes), offset, scaling }
    }

    /// Whether levels are integers, so that products with 8-bit activations are possible.
    pub const fn is_integer(&self) -> bool {
        !matches!(self.levels, Levels::E4m3)
    }

    /// The level of a stored code as a float.
    pub fn value(&self, stored: u8) -> f32 {
        if self.is_integer() { self.level(stored) as f32 } else { e4m3(stored) }
    }

    /// The level of a stored code, if levels are integers.
    pub fn level(&self, stored: u8) -> i32 {
        let code = match self.levels {
            Levels::Plain | Levels::E4m3 => stored,
            Levels::Table(codes) => codes[usize::from(stored & 15)],
        };
        i32::from(code) - self.offset
    }
}
