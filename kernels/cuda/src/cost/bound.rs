//! Parameters of machines, and the least time of a launch on one.

use super::code::{Class, Code, GROUP_PRODUCTS, Latencies, Run, Work};
use super::trace::Launched;
use crate::Arch;

/// A GPU. See the page for the sources of the numbers.
#[derive(Debug, Clone, Copy)]
pub(super) struct Gpu {
    pub(super) name: &'static str,
    pub(super) arch: Arch,
    pub(super) multiprocessors: usize,
    pub(super) hertz: f64,
    /// Bytes of memory a second, by the data sheet.
    pub(super) bandwidth: f64,
    /// Share of the bandwidth that a copy reaches.
    pub(super) usable: f64,
    pub(super) l2_bytes: f64,
    /// Shared memory of a multiprocessor, and what each block takes besides its own.
    pub(super) shared_bytes: u32,
    pub(super) warps: u32,
    pub(super) blocks: u32,
    /// Seconds until a load from memory returns while the memory is idle, and while it is busy.
    pub(super) latency: [f64; 2],
    /// Cycles until a load from the L2 cache returns.
    pub(super) l2_cycles: f64,
    /// Lanes of a multiprocessor that add integers, and those that multiply them.
    pub(super) integer_lanes: f64,
    /// Products of a multiprocessor in a cycle by `mma`: 8-bit integers, 16-bit floats, 8-bit and 4-bit floats in
    /// blocks with scales; by `wgmma`: 16-bit floats.
    pub(super) products: [f64; 5],
}

const RESERVED_BYTES: u32 = 1 << 10;
const REGISTERS: u32 = 65_536;
/// Instructions that a multiprocessor issues in a cycle.
const ISSUED: f64 = 4.0;
/// Lanes of the special functions and conversions, and of shared memory, of a multiprocessor.
const SPECIAL_LANES: f64 = 16.0;
const SHARED_LANES: f64 = 32.0;
/// Rounds until latency and used bandwidth agree.
const ROUNDS: usize = 4;
/// Seconds from the end of one kernel of a graph until the next one reads its results.
pub(super) const GAP: f64 = 1e-6;
/// The same for a kernel that waits for earlier ones itself, so that it is launched before they end.
pub(super) const DEPENDENT_GAP: f64 = 0.5e-6;

impl Gpu {
    pub(super) const H100: Self = Self {
        name: "H100 SXM",
        arch: Arch::SM_90,
        multiprocessors: 132,
        hertz: 1.755e9,
        bandwidth: 3.35e12,
        usable: 0.9,
        l2_bytes: 50e6,
        shared_bytes: 228 << 10,
        warps: 64,
        blocks: 32,
        latency: [0.35e-6, 0.7e-6],
        l2_cycles: 270.0,
        integer_lanes: 64.0,
        products: [2540.0, 1270.0, f64::INFINITY, f64::INFINITY, GROUP_PRODUCTS],
    };
    pub(super) const GB10: Self = Self {
        name: "GB10",
        arch: Arch::SM_121A,
        multiprocessors: 48,
        hertz: 2.4e9,
        bandwidth: 273e9,
        usable: 0.88,
        l2_bytes: 24e6,
        shared_bytes: 100 << 10,
        warps: 48,
        blocks: 24,
        latency: [0.4e-6, 0.9e-6],
        l2_cycles: 360.0,
        integer_lanes: 128.0,
        products: [1024.0, 512.0, 1024.0, 2048.0, f64::INFINITY],
    };

    /// Returns the cycles of loads while a share of the memory's time is used.
    fn latencies(&self, used: f64) -> Latencies {
        let [idle, busy] = self.latency;
        Latencies { memory: (idle + (busy - idle) * used) * self.hertz, cache: self.l2_cycles }
    }

    /// Returns the blocks of a kernel that a multiprocessor has at once.
    pub(super) fn resident(&self, kernel: &Resources, launched: &Launched) -> u32 {
        let warps = launched.threads.div_ceil(32);
        // Registers are given out to warps, 256 at a time.
        let registers = (kernel.registers * 32).next_multiple_of(256) * warps;
        let shared = kernel.shared + launched.shared_bytes + RESERVED_BYTES;
        (REGISTERS / registers.max(1))
            .min(self.shared_bytes / shared)
            .min(self.warps / warps)
            .min(self.blocks)
    }
}

/// Registers, shared memory and spills of a kernel, from the compiler's log.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Resources {
    pub(super) registers: u32,
    pub(super) shared: u32,
    pub(super) spills: u32,
}

/// The limit of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Limit {
    Memory,
    Latency,
    Issue,
    Integers,
    Multiplies,
    Specials,
    Shared,
    Tensor,
    Gap,
}

impl std::fmt::Display for Limit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Memory => "memory",
            Self::Latency => "latency",
            Self::Issue => "issue",
            Self::Integers => "integers",
            Self::Multiplies => "multiplications",
            Self::Specials => "special functions",
            Self::Shared => "shared memory",
            Self::Tensor => "tensor cores",
            Self::Gap => "gaps",
        })
    }
}

/// Least time of a launch.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Bound {
    pub(super) resident: u32,
    /// Bytes of global memory that a multiprocessor has in flight.
    pub(super) in_flight: f64,
    /// Seconds by the resource that takes longest, without the gap.
    pub(super) seconds: f64,
    pub(super) by: Limit,
}

impl Bound {
    pub(super) fn of(
        gpu: &Gpu,
        kernel: &Resources,
        launched: &Launched,
        code: &Code,
        run: &Run<'_>,
    ) -> (Self, Work) {
        let moved = launched.cold + if launched.warm > gpu.l2_bytes { launched.warm } else { 0.0 };
        let memory = moved / (gpu.bandwidth * gpu.usable);
        // Loads take longer the more of the memory's time is used, and the launch takes longer the longer loads take.
        let frequencies = code.frequencies(run);
        let mut used = 1.0;
        let mut round = || {
            let work = code.work(&frequencies, run, gpu.latencies(used));
            let bound = Self::with(gpu, kernel, launched, &work, memory);
            used = memory / bound.seconds;
            (bound, work)
        };
        (1..ROUNDS).for_each(|_| drop(round()));
        round()
    }

    fn with(gpu: &Gpu, kernel: &Resources, launched: &Launched, work: &Work, memory: f64) -> Self {
        let resident = gpu.resident(kernel, launched).max(1);
        // Blocks of the busiest multiprocessor.
        let blocks = (launched.blocks() / gpu.multiprocessors as f64).ceil();
        let warps = blocks * launched.warps();
        let lanes = |classes: &[Class], lanes: f64| work.of(classes) * warps * 32.0 / lanes;
        let cycles = [
            (Limit::Issue, work.total() * warps / ISSUED),
            (Limit::Integers, lanes(&[Class::Integer], gpu.integer_lanes)),
            (Limit::Multiplies, lanes(&[Class::Multiply, Class::Dot], gpu.integer_lanes)),
            (Limit::Specials, lanes(&[Class::Special, Class::Convert], SPECIAL_LANES)),
            (Limit::Shared, lanes(&[Class::SharedLoad, Class::SharedStore, Class::Shuffle], SHARED_LANES)),
            (
                Limit::Tensor,
                work.products.iter().zip(gpu.products).map(|(work, rate)| work / rate).sum::<f64>() * warps,
            ),
            (Limit::Latency, (blocks / f64::from(resident)).ceil() * work.cycles),
        ];
        let memory = (Limit::Memory, memory);
        let all = cycles.map(|(limit, cycles)| (limit, cycles / gpu.hertz)).into_iter().chain([memory]);
        let (by, seconds) = all.max_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or(memory);
        let together = f64::from(resident).min(blocks) * launched.warps();
        Self { resident, in_flight: work.in_flight * together, seconds, by }
    }
}
