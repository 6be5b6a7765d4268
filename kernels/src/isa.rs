//! The instruction sets that a kernel may be compiled for, and which of them this processor has.

/// An instruction set level. Kernels of one op exist once per level; results of integer paths are equal on
/// all levels, results of float paths are equal within one level.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Portable Rust, on every processor.
    Scalar,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ, VL, VNNI, BF16 and VBMI, besides everything in [`Isa::Avx2`].
    Avx512,
}

impl Isa {
    /// Every level, lowest first.
    pub const ALL: [Self; 3] = [Self::Scalar, Self::Avx2, Self::Avx512];

    /// The highest level that this processor has.
    pub fn detect() -> Self {
        Self::ALL.into_iter().rev().find(|isa| isa.is_available()).unwrap_or(Self::Scalar)
    }

    /// All levels that this processor has, lowest first. Never empty.
    pub fn available() -> Vec<Self> {
        Self::ALL.into_iter().filter(|isa| isa.is_available()).collect()
    }

    /// Whether this processor has the level.
    pub fn is_available(self) -> bool {
        match self {
            Self::Scalar => true,
            Self::Avx2 => has_avx2(),
            Self::Avx512 => has_avx2() && has_avx512(),
        }
    }

    /// The name used in logs, metrics and configuration: `scalar`, `avx2` or `avx512`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        }
    }
}

impl std::fmt::Display for Isa {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}

#[cfg(target_arch = "x86_64")]
fn has_avx512() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vnni")
        && is_x86_feature_detected!("avx512bf16")
        && is_x86_feature_detected!("avx512vbmi")
}

#[cfg(not(target_arch = "x86_64"))]
fn has_avx2() -> bool {
    false
}

#[cfg(not(target_arch = "x86_64"))]
fn has_avx512() -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::Isa;

    #[test]
    fn the_detected_level_is_the_last_available_one() {
        let available = Isa::available();
        assert_eq!(available.first(), Some(&Isa::Scalar));
        assert_eq!(available.last(), Some(&Isa::detect()));
        assert!(available.iter().all(|isa| isa.is_available()));
    }

    #[test]
    fn names_are_distinct_and_displayed() {
        let names: Vec<String> = Isa::ALL.iter().map(ToString::to_string).collect();
        assert_eq!(names, ["scalar", "avx2", "avx512"]);
    }
}
