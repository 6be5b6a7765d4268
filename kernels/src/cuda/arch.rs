//! What kernels are compiled for.

/// A compute capability, with the suffix that unlocks its own instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Arch {
    major: u32,
    minor: u32,
    specific: bool,
}

impl Arch {
    /// Hopper: H100, H200.
    pub const SM_90: Self = Self { major: 9, minor: 0, specific: false };
    /// GB10 of DGX Spark, with its own instructions. CUBINs for `sm_120a` do not load there.
    pub const SM_121A: Self = Self { major: 12, minor: 1, specific: true };

    /// Those that every kernel is compiled and checked for.
    pub const CHECKED: [Self; 2] = [Self::SM_90, Self::SM_121A];

    /// Of a device with this compute capability.
    pub const fn of(major: u32, minor: u32) -> Self {
        Self { major, minor, specific: major == 12 && minor == 1 }
    }

    /// As NVRTC counts: ten times the major and once the minor number.
    pub(super) const fn number(self) -> u32 {
        10 * self.major + self.minor
    }
}

impl std::fmt::Display for Arch {
    /// As NVRTC wants it after `--gpu-architecture=`: `sm_90`, `sm_121a`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { major, minor, specific } = self;
        write!(f, "sm_{major}{minor}{}", if *specific { "a" } else { "" })
    }
}
