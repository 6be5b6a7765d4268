//! Instruction sets that kernels are compiled for, and detection of those that this processor has.

/// An instruction set level. Every op runs on every level of the architecture and gives the same bits on all levels;
/// a kernel without code for a level uses a lower level's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Portable Rust, on every processor.
    Scalar,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ, VL, VNNI and VBMI (Ice Lake, Zen 4 and later), and all of
    /// [`Isa::Avx2`].
    Avx512,
    /// AArch64 with NEON and dot products of bytes.
    Neon,
    /// [`Isa::Neon`] and products of small byte matrices (i8mm), for example the cores of GB10.
    NeonI8mm,
}

impl Isa {
    /// Every level; within an architecture the lowest first.
    pub const ALL: [Self; 5] = [Self::Scalar, Self::Avx2, Self::Avx512, Self::Neon, Self::NeonI8mm];

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
            Self::Neon => has_dotprod(),
            Self::NeonI8mm => has_dotprod() && has_i8mm(),
        }
    }

    /// The name used in logs, metrics and configuration: `scalar`, `avx2`, `avx512`, `neon`, `neon-i8mm`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Neon => "neon",
            Self::NeonI8mm => "neon-i8mm",
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

#[cfg(target_arch = "aarch64")]
fn has_dotprod() -> bool {
    std::arch::is_aarch64_feature_detected!("neon") && std::arch::is_aarch64_feature_detected!("dotprod")
}

#[cfg(target_arch = "aarch64")]
fn has_i8mm() -> bool {
    std::arch::is_aarch64_feature_detected!("i8mm")
}

#[cfg(not(target_arch = "aarch64"))]
fn has_dotprod() -> bool {
    false
}

#[cfg(not(target_arch = "aarch64"))]
fn has_i8mm() -> bool {
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
        assert_eq!(names, ["scalar", "avx2", "avx512", "neon", "neon-i8mm"]);
    }

    #[test]
    #[ignore = "for processors and emulators that have all levels of their architecture (./test arm)"]
    fn this_processor_has_every_level() {
        let neon = [Isa::Scalar, Isa::Neon, Isa::NeonI8mm];
        let x86 = [Isa::Scalar, Isa::Avx2, Isa::Avx512];
        assert_eq!(Isa::available(), if cfg!(target_arch = "aarch64") { neon } else { x86 });
    }
}
