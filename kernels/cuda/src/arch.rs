//! GPU architectures that kernels are compiled for.

/// A compute capability, with the suffix that unlocks architecture-specific instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Arch {
    major: u32,
    minor: u32,
    specific: bool,
}

impl Arch {
    /// Hopper: H100, H200, with its architecture-specific instructions.
    pub const SM_90: Self = Self { major: 9, minor: 0, specific: true };
    /// GB10 of DGX Spark, with its architecture-specific instructions. CUBINs for `sm_120a` do not load on
    /// it.
    pub const SM_121A: Self = Self { major: 12, minor: 1, specific: true };

    /// Architectures that every kernel is compiled and checked for.
    pub const CHECKED: [Self; 2] = [Self::SM_90, Self::SM_121A];

    /// Returns the architecture of a device with this compute capability.
    pub const fn of(major: u32, minor: u32) -> Self {
        Self { major, minor, specific: matches!((major, minor), (9, 0) | (12, 0 | 1)) }
    }

    /// Whether matrix products of a warp take blocks with scales.
    pub const fn has_block_scales(self) -> bool {
        self.major == 12 && self.specific
    }

    /// Whether kernels wait for earlier ones by `griddepcontrol`, as `prelude.cuh` makes them.
    pub(super) const fn has_dependent_launches(self) -> bool {
        self.major >= 9
    }

    /// Whether it multiplies matrices of warp groups (`wgmma`).
    pub const fn has_group_products(self) -> bool {
        self.major == 9 && self.specific
    }

    /// Returns ten times the major plus the minor number, as NVRTC counts.
    pub(super) const fn number(self) -> u32 {
        10 * self.major + self.minor
    }
}

impl std::fmt::Display for Arch {
    /// Formats the value of `--gpu-architecture=`: `sm_90a`, `sm_121a`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { major, minor, specific } = self;
        write!(f, "sm_{major}{minor}{}", if *specific { "a" } else { "" })
    }
}
