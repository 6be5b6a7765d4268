//! Element types of tensors, as GGUF numbers them.

use std::fmt;

/// A tensor's element type. [`block_len`](Self::block_len) elements take [`block_bytes`](Self::block_bytes)
/// bytes. The discriminant is the number in a GGUF file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(non_camel_case_types, reason = "the field's own names, which say it all")]
#[repr(u32)]
pub enum GgmlType {
    F32 = 0,
    F16 = 1,
    Q4_0 = 2,
    Q4_1 = 3,
    Q5_0 = 6,
    Q5_1 = 7,
    Q8_0 = 8,
    Q2_K = 10,
    Q3_K = 11,
    Q4_K = 12,
    Q5_K = 13,
    Q6_K = 14,
    IQ2_XXS = 16,
    IQ2_XS = 17,
    IQ3_XXS = 18,
    IQ1_S = 19,
    IQ4_NL = 20,
    IQ3_S = 21,
    IQ2_S = 22,
    IQ4_XS = 23,
    IQ1_M = 29,
    BF16 = 30,
    TQ1_0 = 34,
    TQ2_0 = 35,
    MXFP4 = 39,
    NVFP4 = 40,
    /// E4M3 with an f32 scale per 32, like the three that follow Kvasir's and not GGUF's.
    FP8 = 1000,
    INT8 = 1001,
    INT5 = 1002,
    INT4 = 1003,
}

impl GgmlType {
    /// Every type, by ascending id.
    pub const ALL: [Self; 30] = [
        Self::F32,
        Self::F16,
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
        Self::IQ2_XXS,
        Self::IQ2_XS,
        Self::IQ3_XXS,
        Self::IQ1_S,
        Self::IQ4_NL,
        Self::IQ3_S,
        Self::IQ2_S,
        Self::IQ4_XS,
        Self::IQ1_M,
        Self::BF16,
        Self::TQ1_0,
        Self::TQ2_0,
        Self::MXFP4,
        Self::NVFP4,
        Self::FP8,
        Self::INT8,
        Self::INT5,
        Self::INT4,
    ];

    /// The type with this number; `None` if unknown.
    pub fn from_id(id: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|ty| ty.id() == id)
    }

    pub const fn id(self) -> u32 {
        self as u32
    }

    /// Type name, such as `Q4_K`.
    pub const fn name(self) -> &'static str {
        self.layout().0
    }

    /// Elements of a block; rows are whole blocks.
    pub const fn block_len(self) -> usize {
        self.layout().1
    }

    /// Bytes of a block.
    pub const fn block_bytes(self) -> usize {
        self.layout().2
    }

    /// Bytes of a tensor with these dimensions. `None` if the first is not a multiple of the block length or
    /// the size overflows.
    pub fn byte_size(self, dims: &[u64]) -> Option<u64> {
        let (&row, rest) = dims.split_first()?;
        let block_len = self.block_len() as u64;
        if row % block_len != 0 {
            return None;
        }
        let row_bytes = (row / block_len).checked_mul(self.block_bytes() as u64)?;
        rest.iter().try_fold(row_bytes, |bytes, &dim| bytes.checked_mul(dim))
    }

    const fn layout(self) -> (&'static str, usize, usize) {
        match self {
            Self::F32 => ("F32", 1, 4),
            Self::F16 => ("F16", 1, 2),
            Self::Q4_0 => ("Q4_0", 32, 18),
            Self::Q4_1 => ("Q4_1", 32, 20),
            Self::Q5_0 => ("Q5_0", 32, 22),
            Self::Q5_1 => ("Q5_1", 32, 24),
            Self::Q8_0 => ("Q8_0", 32, 34),
            Self::Q2_K => ("Q2_K", 256, 84),
            Self::Q3_K => ("Q3_K", 256, 110),
            Self::Q4_K => ("Q4_K", 256, 144),
            Self::Q5_K => ("Q5_K", 256, 176),
            Self::Q6_K => ("Q6_K", 256, 210),
            Self::IQ2_XXS => ("IQ2_XXS", 256, 66),
            Self::IQ2_XS => ("IQ2_XS", 256, 74),
            Self::IQ3_XXS => ("IQ3_XXS", 256, 98),
            Self::IQ1_S => ("IQ1_S", 256, 50),
            Self::IQ4_NL => ("IQ4_NL", 32, 18),
            Self::IQ3_S => ("IQ3_S", 256, 110),
            Self::IQ2_S => ("IQ2_S", 256, 82),
            Self::IQ4_XS => ("IQ4_XS", 256, 136),
            Self::IQ1_M => ("IQ1_M", 256, 56),
            Self::BF16 => ("BF16", 1, 2),
            Self::TQ1_0 => ("TQ1_0", 256, 54),
            Self::TQ2_0 => ("TQ2_0", 256, 66),
            Self::MXFP4 => ("MXFP4", 32, 17),
            Self::NVFP4 => ("NVFP4", 64, 36),
            Self::FP8 => ("FP8", 32, 36),
            Self::INT8 => ("INT8", 32, 36),
            Self::INT5 => ("INT5", 32, 24),
            Self::INT4 => ("INT4", 32, 20),
        }
    }
}

impl fmt::Display for GgmlType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_are_those_of_the_vectors() {
        let text = std::fs::read_to_string(crate::test_files::fixture("quant/vectors/vectors.json")).unwrap();
        let vectors: serde_json::Map<String, serde_json::Value> = serde_json::from_str(&text).unwrap();
        assert_eq!(
            vectors.len(),
            GgmlType::ALL.into_iter().filter(|ty| ty.id() < GgmlType::FP8.id()).count()
        );
        for (name, layout) in vectors {
            let number = |key: &str| layout[key].as_u64().unwrap();
            let ty = GgmlType::from_id(u32::try_from(number("type_id")).unwrap()).unwrap();
            assert_eq!(ty.name(), name);
            assert_eq!(ty.block_len() as u64, number("block"), "{name}");
            assert_eq!(ty.block_bytes() as u64, number("block_bytes"), "{name}");
        }
    }

    #[test]
    fn ids_rise_and_unknown_ids_are_refused() {
        assert!(GgmlType::ALL.is_sorted_by_key(|ty| ty.id()));
        for id in [4, 5, 9, 15, 24, 28, 31, 33, 36, 41, u32::MAX] {
            assert_eq!(GgmlType::from_id(id), None);
        }
    }

    #[test]
    fn byte_sizes() {
        assert_eq!(GgmlType::Q4_K.byte_size(&[512, 3]), Some(2 * 144 * 3));
        assert_eq!(GgmlType::Q4_K.byte_size(&[640, 3]), None);
        assert_eq!(GgmlType::F32.byte_size(&[]), None);
        assert_eq!(GgmlType::F32.byte_size(&[1 << 62, 4]), None);
        assert_eq!(GgmlType::F16.byte_size(&[3, 5, 7]), Some(210));
    }
}
