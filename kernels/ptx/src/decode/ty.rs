//! Types of operands, as opcodes name them.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ty {
    Pred,
    B(u8),
    U(u8),
    S(u8),
    F16,
    F16x2,
    Bf16,
    Bf16x2,
    F32,
    F64,
    /// Two floats in 64 bits.
    F32x2,
    E4m3,
    E4m3x2,
    E5m2x2,
    E2m1,
    E2m1x2,
    Tf32,
    Ue4m3,
    Ue8m0,
}

impl Ty {
    pub(super) fn read(word: &str) -> Option<Self> {
        Some(match word {
            "pred" => Self::Pred,
            "b8" => Self::B(8),
            "b16" => Self::B(16),
            "b32" => Self::B(32),
            "b64" => Self::B(64),
            "u8" => Self::U(8),
            "u16" => Self::U(16),
            "u32" => Self::U(32),
            "u64" => Self::U(64),
            "s8" => Self::S(8),
            "s16" => Self::S(16),
            "s32" => Self::S(32),
            "s64" => Self::S(64),
            "f16" => Self::F16,
            "f16x2" => Self::F16x2,
            "bf16" => Self::Bf16,
            "bf16x2" => Self::Bf16x2,
            "f32" => Self::F32,
            "f64" => Self::F64,
            "f32x2" => Self::F32x2,
            "e4m3" => Self::E4m3,
            "e4m3x2" => Self::E4m3x2,
            "e5m2x2" => Self::E5m2x2,
            "e2m1" => Self::E2m1,
            "e2m1x2" => Self::E2m1x2,
            "tf32" => Self::Tf32,
            "ue4m3" => Self::Ue4m3,
            "ue8m0" => Self::Ue8m0,
            _ => return None,
        })
    }

    pub(super) fn bits(self) -> u8 {
        match self {
            Self::Pred => 1,
            Self::B(bits) | Self::U(bits) | Self::S(bits) => bits,
            Self::E4m3 | Self::E2m1 | Self::E2m1x2 | Self::Ue4m3 | Self::Ue8m0 => 8,
            Self::F16 | Self::Bf16 | Self::E4m3x2 | Self::E5m2x2 => 16,
            Self::F16x2 | Self::Bf16x2 | Self::F32 | Self::Tf32 => 32,
            Self::F64 | Self::F32x2 => 64,
        }
    }

    pub(super) fn signed(self) -> bool {
        matches!(self, Self::S(_))
    }

    pub(super) fn is_float(self) -> bool {
        !matches!(self, Self::Pred | Self::B(_) | Self::U(_) | Self::S(_))
    }
}
