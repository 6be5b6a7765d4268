//! The interpreted device: memory, modules, launches.

use crate::decode::{Kernel, kernel};
use crate::exec::Block;
use crate::memory::Memory;
use crate::names::Names;
use crate::op::SourceLocation;
use crate::parse::{Parsed, parse};
use crate::shared::Shared;
use crate::{PtxError, RunError};

/// Limits of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Maximum bytes of shared memory per block.
    pub shared_bytes: u32,
    /// Maximum number of threads per block.
    pub threads: u32,
    /// Bytes of global memory.
    pub memory_bytes: u64,
}

impl Limits {
    /// H100 and H200: 227 KiB of shared memory.
    pub const HOPPER: Self = Self { shared_bytes: 227 << 10, threads: 1024, memory_bytes: 4 << 30 };
    /// GB10: 99 KiB of shared memory.
    pub const GB10: Self = Self { shared_bytes: 99 << 10, threads: 1024, memory_bytes: 4 << 30 };
}

/// Counters of executed work.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    pub warp_instructions: u64,
    /// The same instructions, counted once for each participating lane.
    pub lane_instructions: u64,
    /// Bytes that lanes have read from global memory.
    pub global_read: u64,
    /// Bytes that lanes have written to global memory.
    pub global_written: u64,
    /// Prefetches by lanes.
    pub prefetches: u64,
}

impl Counts {
    fn since(self, before: Self) -> Self {
        Self {
            warp_instructions: self.warp_instructions - before.warp_instructions,
            lane_instructions: self.lane_instructions - before.lane_instructions,
            global_read: self.global_read - before.global_read,
            global_written: self.global_written - before.global_written,
            prefetches: self.prefetches - before.prefetches,
        }
    }
}

/// A kernel of a loaded module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KernelRef {
    module: usize,
    kernel: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ModuleRef(usize);

#[derive(Debug, Clone, Copy)]
pub struct Launch<'a> {
    pub kernel: KernelRef,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory.
    pub shared_bytes: u32,
    /// The kernel's parameters in order, each in the low bytes.
    pub arguments: &'a [u64],
}

/// Number of runs of an instruction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Executed {
    /// Lanes that ran it. A branch that no lane takes counts once.
    pub lanes: u64,
    /// Warps that issued it, with or without a lane.
    pub warps: u64,
    /// Address that it read from last, unless it reads from one space that is not global.
    pub address: u64,
}

/// Executed instructions of some blocks of a launch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sample {
    pub blocks: u64,
    pub counts: Counts,
    /// For each instruction of the kernel.
    pub executed: Vec<Executed>,
}

/// An instruction of a kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    pub instruction: String,
    /// File and line of the CUDA source.
    pub source_line: String,
}

/// An instruction that never ran, as coverage reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Uncovered {
    /// Line of the PTX text, from 1.
    pub line: u32,
    pub instruction: String,
    /// File and line of the CUDA source.
    pub source_line: String,
}

#[derive(Debug)]
struct Module {
    kernels: Vec<Kernel>,
    /// For each kernel and instruction.
    executed: Vec<Vec<Executed>>,
    constants: Vec<u8>,
    names: Names,
}

/// A device that interprets PTX.
#[derive(Debug)]
pub struct Machine {
    limits: Limits,
    seed: u64,
    memory: Memory,
    modules: Vec<Module>,
    counts: Counts,
}

impl Machine {
    /// Creates an empty device. The seed determines the order of blocks, and of warps between barriers.
    pub fn new(limits: Limits, seed: u64) -> Self {
        let memory = Memory::new(limits.memory_bytes);
        Self { limits, seed, memory, modules: Vec::new(), counts: Counts::default() }
    }

    /// Loads a PTX text and allocates its variables.
    ///
    /// # Errors
    /// [`PtxError`] for anything unknown in the text.
    pub fn load(&mut self, ptx: &str) -> Result<ModuleRef, PtxError> {
        let parsed = parse(ptx)?;
        let mut addresses = Vec::with_capacity(parsed.globals.len());
        for variable in &parsed.globals {
            let mut bytes = variable.initial.clone();
            bytes.resize(variable.bytes as usize, 0);
            let placed = self.memory.allocate(bytes.len(), Some(variable.name.clone())).and_then(|address| {
                self.memory.write(address, &bytes)?;
                Ok(address)
            });
            addresses.push(placed.map_err(|error| PtxError::Syntax {
                line: 0,
                what: format!("variable {}: {error}", variable.name),
            })?);
        }
        let kernels: Vec<_> = parsed
            .kernels
            .iter()
            .map(|function| kernel(function, &addresses, ptx))
            .collect::<Result<_, _>>()?;
        let executed = kernels.iter().map(|kernel| vec![Executed::default(); kernel.code.len()]).collect();
        let Parsed { constants, files, .. } = parsed;
        self.modules.push(Module { kernels, executed, constants, names: Names::new(ptx, files) });
        Ok(ModuleRef(self.modules.len() - 1))
    }

    /// Returns a kernel by its name.
    pub fn kernel(&self, module: ModuleRef, name: &str) -> Option<KernelRef> {
        let kernel = self.modules.get(module.0)?.kernels.iter().position(|kernel| kernel.name == name)?;
        Some(KernelRef { module: module.0, kernel })
    }

    /// Allocates zeroes, which count as written. Memory of the host is needed for the accessed pages only.
    ///
    /// # Errors
    /// [`RunError::OutOfMemory`].
    pub fn allocate_zeroed(&mut self, bytes: usize) -> Result<u64, RunError> {
        self.memory.allocate_zeroed(bytes)
    }

    /// Allocates memory, aligned to 256 bytes. Its bytes count as unwritten.
    ///
    /// # Errors
    /// [`RunError::OutOfMemory`].
    pub fn allocate(&mut self, bytes: usize) -> Result<u64, RunError> {
        self.memory.allocate(bytes, None)
    }

    /// Frees memory. Its address is never used again.
    ///
    /// # Errors
    /// [`RunError::Host`] if no allocation starts there.
    pub fn free(&mut self, address: u64) -> Result<(), RunError> {
        self.memory.free(address)
    }

    /// Writes from the host.
    ///
    /// # Errors
    /// [`RunError::Host`] unless the bytes lie inside one allocation.
    pub fn write(&mut self, address: u64, data: &[u8]) -> Result<(), RunError> {
        self.memory.write(address, data)
    }

    /// Sets bytes from the host.
    ///
    /// # Errors
    /// [`RunError::Host`] unless the bytes lie inside one allocation.
    pub fn fill(&mut self, address: u64, value: u8, bytes: usize) -> Result<(), RunError> {
        self.memory.fill(address, value, bytes)
    }

    /// Reads from the host. Unwritten bytes read as 0xff.
    ///
    /// # Errors
    /// [`RunError::Host`] unless the bytes lie inside one allocation.
    pub fn read(&self, address: u64, out: &mut [u8]) -> Result<(), RunError> {
        self.memory.read(address, out)
    }

    /// Whether all of these bytes were written.
    ///
    /// # Errors
    /// [`RunError::Host`] unless the bytes lie inside one allocation.
    pub fn is_written(&self, address: u64, bytes: usize) -> Result<bool, RunError> {
        self.memory.is_written(address, bytes)
    }

    /// Copies inside global memory. Unwritten bytes count as unwritten in the copy too.
    ///
    /// # Errors
    /// [`RunError::Host`] unless each range lies inside one allocation.
    pub fn copy(&mut self, from: u64, to: u64, bytes: usize) -> Result<(), RunError> {
        self.memory.copy(from, to, bytes)
    }

    /// Returns the counters since the machine was created.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Returns the instructions of a kernel that no launch has run yet.
    pub fn uncovered(&self, kernel: KernelRef) -> Vec<Uncovered> {
        let Some(module) = self.modules.get(kernel.module) else { return Vec::new() };
        let (Some(code), Some(executed)) =
            (module.kernels.get(kernel.kernel), module.executed.get(kernel.kernel))
        else {
            return Vec::new();
        };
        // The last instruction is the end that is added to every body.
        let written = executed.len().saturating_sub(1);
        (0..written)
            .filter(|&at| executed[at].lanes == 0)
            .map(|at| Uncovered {
                line: code.locations[at].line,
                instruction: module.names.instruction(code.locations[at].line),
                source_line: module.names.source_line(code.locations[at].source),
            })
            .collect()
    }

    /// Returns the instructions of a kernel, in the order of [`Sample::executed`].
    pub fn listing(&self, kernel: KernelRef) -> Vec<Listed> {
        let Some(module) = self.modules.get(kernel.module) else { return Vec::new() };
        let Some(code) = module.kernels.get(kernel.kernel) else { return Vec::new() };
        let lines = module.names.lines();
        let listed = |at: &SourceLocation| Listed {
            instruction: lines.get(at.line.wrapping_sub(1) as usize).copied().unwrap_or("the end").into(),
            source_line: module.names.source_line(at.source),
        };
        code.locations.iter().map(listed).collect()
    }

    /// Runs a kernel to its end.
    ///
    /// # Errors
    /// [`RunError::Launch`] for an invalid launch, [`RunError::Fault`] for a fault of the kernel.
    pub fn launch(&mut self, launch: &Launch<'_>) -> Result<Counts, RunError> {
        let before = self.counts;
        self.run(launch, None)?;
        Ok(self.counts.since(before))
    }

    /// Runs blocks that are spread evenly over the grid, until all have run or `instructions` warp instructions were
    /// issued.
    ///
    /// # Errors
    /// As [`Self::launch`].
    pub fn sample(&mut self, launch: &Launch<'_>, instructions: u64) -> Result<Sample, RunError> {
        let (counts, before) = (self.counts, self.executed(launch.kernel)?.to_vec());
        let blocks = self.run(launch, Some(instructions))?;
        let mut executed = self.executed(launch.kernel)?.to_vec();
        for (after, before) in executed.iter_mut().zip(before) {
            after.lanes -= before.lanes;
            after.warps -= before.warps;
        }
        Ok(Sample { blocks, counts: self.counts.since(counts), executed })
    }

    fn executed(&self, kernel: KernelRef) -> Result<&[Executed], RunError> {
        let module = self.modules.get(kernel.module).ok_or_else(another_machine)?;
        Ok(module.executed.get(kernel.kernel).ok_or_else(another_machine)?)
    }

    fn run(&mut self, launch: &Launch<'_>, limit: Option<u64>) -> Result<u64, RunError> {
        let KernelRef { module, kernel } = launch.kernel;
        let Some(module) = self.modules.get_mut(module) else { return Err(another_machine()) };
        let (Some(code), Some(executed)) = (module.kernels.get(kernel), module.executed.get_mut(kernel))
        else {
            return Err(another_machine());
        };
        self.memory.begin_launch();
        crate::launch::run(
            launch,
            self.limits,
            (self.seed, limit),
            Block {
                kernel: code,
                memory: &mut self.memory,
                constants: &module.constants,
                counts: &mut self.counts,
                executed,
                names: &module.names,
                parameters: Vec::new(),
                shared: Shared::default(),
                number: 0,
                synchronised: false,
            },
        )
    }
}

fn another_machine() -> RunError {
    RunError::Launch { kernel: "?".into(), reason: "it belongs to another machine".into() }
}
