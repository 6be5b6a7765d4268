//! The weight formats of GGUF files: their block shapes and the meaning of their bytes. Four more have an f32 scale and
//! 32 values a block: E4M3 (`FP8`), and integers of 8, 5 and 4 bits.

mod codes;
mod dequantize;
mod encode;
mod fp4;
mod grids;
mod iq;
mod k;
mod legacy;
mod scheme;
mod ternary;
#[cfg(test)]
mod tests;

pub use codes::{Codes, split};
pub(crate) use codes::{nibbles, split_scales};
pub use dequantize::dequantize;
pub use encode::encode;
pub(crate) use fp4::{e4m3, e8m0_half, ue4m3_half};
pub use scheme::{Bits, Levels, Scaling, Scheme};

use crate::error::Error;

/// A tensor's element format, with the name that the file format uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types)]
pub enum GgmlType {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    IQ1_S,
    IQ1_M,
    IQ2_XXS,
    IQ2_XS,
    IQ2_S,
    IQ3_XXS,
    IQ3_S,
    IQ4_NL,
    IQ4_XS,
    TQ1_0,
    TQ2_0,
    MXFP4,
    NVFP4,
    FP8,
    INT8,
    INT5,
    INT4,
}

impl GgmlType {
    pub const ALL: [Self; 30] = [
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q2_K,
        Self::Q3_K,
        Self::Q4_K,
        Self::Q5_K,
        Self::Q6_K,
        Self::IQ1_S,
        Self::IQ1_M,
        Self::IQ2_XXS,
        Self::IQ2_XS,
        Self::IQ2_S,
        Self::IQ3_XXS,
        Self::IQ3_S,
        Self::IQ4_NL,
        Self::IQ4_XS,
        Self::TQ1_0,
        Self::TQ2_0,
        Self::MXFP4,
        Self::NVFP4,
        Self::FP8,
        Self::INT8,
        Self::INT5,
        Self::INT4,
    ];

    /// The format with this id in a GGUF tensor table.
    ///
    /// # Errors
    /// [`Error::UnknownType`] for an unknown id.
    pub fn from_id(id: u32) -> Result<Self, Error> {
        Self::ALL.into_iter().find(|ty| ty.id() == id).ok_or(Error::UnknownType { id })
    }

    /// Whether GGUF has the format. The others are Kvasir's, for checkpoints with f32 scales.
    pub fn is_of_gguf(self) -> bool {
        self.id() < 1000
    }

    /// The id in a GGUF tensor table.
    pub fn id(self) -> u32 {
        self.facts().0
    }

    /// The name that files and tools use.
    pub fn name(self) -> &'static str {
        self.facts().1
    }

    /// Values in one block; 1 for plain floats.
    pub fn block_len(self) -> usize {
        self.facts().2
    }

    /// Bytes of one block in a file.
    pub fn block_bytes(self) -> usize {
        self.facts().3
    }

    /// Bytes in a file of one row of `cols` values.
    ///
    /// # Errors
    /// [`Error::PartialBlock`] if `cols` is not a whole number of blocks, [`Error::Shape`] if the size
    /// overflows.
    pub fn row_bytes(self, cols: usize) -> Result<usize, Error> {
        if !cols.is_multiple_of(self.block_len()) {
            return Err(Error::PartialBlock { ty: self.name(), block: self.block_len(), cols });
        }
        let overflow = Error::Shape { rows: 1, cols, experts: 1 };
        (cols / self.block_len()).checked_mul(self.block_bytes()).ok_or(overflow)
    }

    fn facts(self) -> (u32, &'static str, usize, usize) {
        match self {
            Self::F32 => (0, "F32", 1, 4),
            Self::F16 => (1, "F16", 1, 2),
            Self::Q4_0 => (2, "Q4_0", 32, 18),
            Self::Q4_1 => (3, "Q4_1", 32, 20),
            Self::Q5_0 => (6, "Q5_0", 32, 22),
            Self::Q5_1 => (7, "Q5_1", 32, 24),
            Self::Q8_0 => (8, "Q8_0", 32, 34),
            Self::Q2_K => (10, "Q2_K", 256, 84),
            Self::Q3_K => (11, "Q3_K", 256, 110),
            Self::Q4_K => (12, "Q4_K", 256, 144),
            Self::Q5_K => (13, "Q5_K", 256, 176),
            Self::Q6_K => (14, "Q6_K", 256, 210),
            Self::IQ2_XXS => (16, "IQ2_XXS", 256, 66),
            Self::IQ2_XS => (17, "IQ2_XS", 256, 74),
            Self::IQ3_XXS => (18, "IQ3_XXS", 256, 98),
            Self::IQ1_S => (19, "IQ1_S", 256, 50),
            Self::IQ4_NL => (20, "IQ4_NL", 32, 18),
            Self::IQ3_S => (21, "IQ3_S", 256, 110),
            Self::IQ2_S => (22, "IQ2_S", 256, 82),
            Self::IQ4_XS => (23, "IQ4_XS", 256, 136),
            Self::IQ1_M => (29, "IQ1_M", 256, 56),
            Self::BF16 => (30, "BF16", 1, 2),
            Self::TQ1_0 => (34, "TQ1_0", 256, 54),
            Self::TQ2_0 => (35, "TQ2_0", 256, 66),
            Self::MXFP4 => (39, "MXFP4", 32, 17),
            Self::NVFP4 => (40, "NVFP4", 64, 36),
            Self::FP8 => (1000, "FP8", 32, 36),
            Self::INT8 => (1001, "INT8", 32, 36),
            Self::INT5 => (1002, "INT5", 32, 24),
            Self::INT4 => (1003, "INT4", 32, 20),
        }
    }
}

impl std::fmt::Display for GgmlType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
