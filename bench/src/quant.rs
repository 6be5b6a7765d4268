//! The type that each weight is stored in.

use clap::ValueEnum;
use model::GgmlType;

#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum Quant {
    /// Mixed, as llama.cpp's quantiser does it.
    #[value(name = "q4-k-m")]
    Q4KM,
    /// 8 bits.
    Q8_0,
    /// 4 bits, blocks of 32.
    Q4_0,
    /// Half precision.
    F16,
}

impl Quant {
    pub(crate) fn base(self) -> GgmlType {
        match self {
            Self::Q4KM => GgmlType::Q4_K,
            Self::Q8_0 => GgmlType::Q8_0,
            Self::Q4_0 => GgmlType::Q4_0,
            Self::F16 => GgmlType::F16,
        }
    }

    pub(crate) fn embedding(self) -> GgmlType {
        match self {
            Self::Q4KM | Self::Q4_0 => GgmlType::Q6_K,
            Self::Q8_0 => GgmlType::Q8_0,
            Self::F16 => GgmlType::F16,
        }
    }

    /// Type of `attn_v` and `ffn_down`: more bits in the first and last eighth of the layers and in every
    /// third between.
    pub(crate) fn wide(self, layer: u32, layers: u32) -> GgmlType {
        let eighth = layers / 8;
        let more = layer < eighth || layer >= 7 * layers / 8 || (layer - eighth) % 3 == 2;
        match self {
            Self::Q4KM if more => GgmlType::Q6_K,
            _ => self.base(),
        }
    }

    /// Type of `attn_qkv`.
    pub(crate) fn fused(self) -> GgmlType {
        match self {
            Self::Q4KM => GgmlType::Q5_K,
            _ => self.base(),
        }
    }

    /// llama.cpp's number for the mix.
    pub(crate) fn file_type(self) -> u32 {
        match self {
            Self::Q4KM => 15,
            Self::Q8_0 => 7,
            Self::Q4_0 => 2,
            Self::F16 => 1,
        }
    }
}
