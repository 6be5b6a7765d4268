//! A device of its own: memory, modules, launches.

use crate::ast::Special;
use crate::decode::{Kernel, kernel};
use crate::exec::Block;
use crate::lanes::LANES;
use crate::memory::Memory;
use crate::parse::{Parsed, parse};
use crate::shared::Shared;
use crate::warp::{State, Warp};
use crate::{Fault, FaultKind, PtxError, RunError};
use std::collections::HashMap;

/// What a device can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of shared memory that a block may have.
    pub shared_bytes: u32,
    /// Threads that a block may have.
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

/// What was done so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Instructions of warps.
    pub warp_instructions: u64,
    /// The same, counted once for each lane that took part.
    pub lane_instructions: u64,
    /// Bytes that lanes read from global memory.
    pub global_read: u64,
    /// Bytes that lanes wrote to global memory.
    pub global_written: u64,
}

impl Counts {
    fn since(self, before: Self) -> Self {
        Self {
            warp_instructions: self.warp_instructions - before.warp_instructions,
            lane_instructions: self.lane_instructions - before.lane_instructions,
            global_read: self.global_read - before.global_read,
            global_written: self.global_written - before.global_written,
        }
    }
}

/// A kernel of a loaded module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KernelRef {
    module: usize,
    kernel: usize,
}

/// A loaded module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ModuleRef(usize);

/// One launch.
#[derive(Debug, Clone, Copy)]
pub struct Launch<'a> {
    /// What runs.
    pub kernel: KernelRef,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory.
    pub shared_bytes: u32,
    /// The kernel's parameters in their order, each in the low bytes.
    pub arguments: &'a [u64],
}

/// An instruction that never ran, as coverage reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Uncovered {
    /// Line of the PTX text, from 1.
    pub line: u32,
    /// The instruction.
    pub instruction: String,
    /// File and line of the source.
    pub source_line: String,
}

#[derive(Debug)]
struct Module {
    kernels: Vec<Kernel>,
    /// For each kernel and instruction: how many lanes ran it.
    executed: Vec<Vec<u64>>,
    constants: Vec<u8>,
    files: HashMap<u32, String>,
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
    /// An empty one. The seed chooses the order of blocks and of the warps between barriers.
    pub fn new(limits: Limits, seed: u64) -> Self {
        let memory = Memory::new(limits.memory_bytes);
        Self { limits, seed, memory, modules: Vec::new(), counts: Counts::default() }
    }

    /// Reads a PTX text; its variables get memory.
    ///
    /// # Errors
    /// [`PtxError`] for anything in it that is not known.
    pub fn load(&mut self, ptx: &str) -> Result<ModuleRef, PtxError> {
        let parsed = parse(ptx)?;
        let lines: Vec<&str> = ptx.lines().collect();
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
            .map(|function| kernel(function, &addresses, &lines))
            .collect::<Result<_, _>>()?;
        let executed = kernels.iter().map(|kernel| vec![0; kernel.code.len()]).collect();
        let Parsed { constants, files, .. } = parsed;
        self.modules.push(Module { kernels, executed, constants, files });
        Ok(ModuleRef(self.modules.len() - 1))
    }

    /// A kernel by its name.
    pub fn kernel(&self, module: ModuleRef, name: &str) -> Option<KernelRef> {
        let kernel = self.modules.get(module.0)?.kernels.iter().position(|kernel| kernel.name == name)?;
        Some(KernelRef { module: module.0, kernel })
    }

    /// Takes memory, aligned to 256 bytes, that nobody has written yet.
    ///
    /// # Errors
    /// [`RunError::OutOfMemory`].
    pub fn allocate(&mut self, bytes: usize) -> Result<u64, RunError> {
        self.memory.allocate(bytes, None)
    }

    /// Gives memory back. Its address is never used again.
    ///
    /// # Errors
    /// [`RunError::Host`] where nothing begins.
    pub fn free(&mut self, address: u64) -> Result<(), RunError> {
        self.memory.free(address)
    }

    /// Writes as the host does.
    ///
    /// # Errors
    /// [`RunError::Host`] outside of one allocation.
    pub fn write(&mut self, address: u64, data: &[u8]) -> Result<(), RunError> {
        self.memory.write(address, data)
    }

    /// Sets bytes as the host does.
    ///
    /// # Errors
    /// [`RunError::Host`] outside of one allocation.
    pub fn fill(&mut self, address: u64, value: u8, bytes: usize) -> Result<(), RunError> {
        self.memory.fill(address, value, bytes)
    }

    /// Reads as the host does. What nobody wrote reads as 0xff.
    ///
    /// # Errors
    /// [`RunError::Host`] outside of one allocation.
    pub fn read(&self, address: u64, out: &mut [u8]) -> Result<(), RunError> {
        self.memory.read(address, out)
    }

    /// Whether all of these bytes were written by somebody.
    ///
    /// # Errors
    /// [`RunError::Host`] outside of one allocation.
    pub fn is_written(&self, address: u64, bytes: usize) -> Result<bool, RunError> {
        self.memory.is_written(address, bytes)
    }

    /// Copies inside the memory; what was not written stays so in the copy.
    ///
    /// # Errors
    /// [`RunError::Host`] outside of one allocation.
    pub fn copy(&mut self, from: u64, to: u64, bytes: usize) -> Result<(), RunError> {
        self.memory.copy(from, to, bytes)
    }

    /// All that was done so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Instructions of a kernel that no launch has run yet.
    pub fn uncovered(&self, kernel: KernelRef) -> Vec<Uncovered> {
        let module = &self.modules[kernel.module];
        let (code, executed) = (&module.kernels[kernel.kernel], &module.executed[kernel.kernel]);
        // The last one is the end that every body gets.
        let written = executed.len().saturating_sub(1);
        (0..written)
            .filter(|&at| executed[at] == 0)
            .map(|at| Uncovered {
                line: code.places[at].line,
                instruction: code.texts[at].clone(),
                source_line: source_line(&module.files, code.places[at].source),
            })
            .collect()
    }

    /// Runs a kernel to its end.
    ///
    /// # Errors
    /// [`RunError::Launch`] for what cannot be launched, [`RunError::Fault`] for what the kernel did wrong.
    pub fn launch(&mut self, launch: &Launch<'_>) -> Result<Counts, RunError> {
        let before = self.counts;
        let module = &mut self.modules[launch.kernel.module];
        let kernel = &module.kernels[launch.kernel.kernel];
        let parameters = check(kernel, launch, self.limits)?;
        let threads: u32 = launch.block.iter().product();
        let warps = (threads as usize).div_ceil(LANES);
        let shared_bytes = (kernel.shared_bytes + launch.shared_bytes) as usize;
        let mut shared = Shared::new(shared_bytes, warps);
        let mut all: Vec<Warp> = (0..warps).map(|index| Warp::new(index, kernel)).collect();
        for warp in &mut all {
            set_thread_specials(warp, kernel, launch, warps);
        }
        let mut block = Block {
            kernel,
            memory: &mut self.memory,
            constants: &module.constants,
            parameters: &parameters,
            shared: &mut shared,
            counts: &mut self.counts,
            executed: &mut module.executed[launch.kernel.kernel],
            files: &module.files,
        };
        let blocks = launch.grid.iter().map(|&n| u64::from(n)).product::<u64>();
        let mut random = Random(self.seed);
        let (start, stride) = random.walk(blocks);
        for step in 0..blocks {
            let number =
                ((u128::from(start) + u128::from(step) * u128::from(stride)) % u128::from(blocks)) as u64;
            let [x, y] = [launch.grid[0], launch.grid[1]].map(u64::from);
            let place = [number % x, number / x % y, number / x / y].map(|n| n as u32);
            for warp in &mut all {
                set_block_specials(warp, kernel, place);
                warp.start((threads as usize).saturating_sub(warp.index * LANES).min(LANES));
            }
            block.shared.reset(warps);
            run_block(&mut block, &mut all, &mut random).map_err(|(kind, warp, lane)| {
                let pc = all[warp].pc as usize;
                RunError::Fault(Box::new(Fault {
                    kind,
                    kernel: kernel.name.clone(),
                    block: place,
                    thread: thread(launch.block, warp * LANES + lane),
                    source_line: source_line(&module.files, kernel.places[pc].source),
                    line: kernel.places[pc].line,
                    instruction: kernel.texts[pc].clone(),
                }))
            })?;
        }
        Ok(self.counts.since(before))
    }
}

/// Checks a launch and lays out its parameters.
fn check(kernel: &Kernel, launch: &Launch<'_>, limits: Limits) -> Result<Vec<u8>, RunError> {
    let refuse = |why: String| Err(RunError::Launch { kernel: kernel.name.clone(), why });
    let threads = launch.block.iter().map(|&n| u64::from(n)).product::<u64>();
    if threads == 0 || threads > u64::from(limits.threads) || launch.block[2] > 64 {
        return refuse(format!("a block of {:?} threads; {} is the most", launch.block, limits.threads));
    }
    if launch.grid.contains(&0)
        || launch.grid[0] > i32::MAX as u32
        || launch.grid[1].max(launch.grid[2]) > 65535
    {
        return refuse(format!("a grid of {:?} blocks", launch.grid));
    }
    if let Some((most, exact)) = kernel.max_threads {
        let product = most.iter().map(|&n| u64::from(n)).product::<u64>();
        if threads > product || exact && most != launch.block {
            return refuse(format!("a block of {:?} threads; it was compiled for {most:?}", launch.block));
        }
    }
    let shared = u64::from(kernel.shared_bytes) + u64::from(launch.shared_bytes);
    if shared > u64::from(limits.shared_bytes) {
        return refuse(format!("{shared} bytes of shared memory; {} is the most", limits.shared_bytes));
    }
    if launch.arguments.len() != kernel.parameters.len() {
        let (given, needed) = (launch.arguments.len(), kernel.parameters.len());
        return refuse(format!("{given} arguments for {needed} parameters"));
    }
    let mut bytes = vec![0; kernel.parameter_bytes as usize];
    for (&argument, &(offset, size)) in launch.arguments.iter().zip(&kernel.parameters) {
        if size > 8 {
            return refuse(format!("a parameter of {size} bytes; arguments have 8"));
        }
        bytes[offset as usize..][..size as usize].copy_from_slice(&argument.to_le_bytes()[..size as usize]);
    }
    Ok(bytes)
}

/// Runs all warps of a block to their ends. A fault comes with its warp and lane.
fn run_block(
    block: &mut Block<'_>,
    warps: &mut [Warp],
    random: &mut Random,
) -> Result<(), (FaultKind, usize, usize)> {
    let mut order: Vec<usize> = (0..warps.len()).collect();
    loop {
        random.shuffle(&mut order);
        for &index in &order {
            if warps[index].state == State::Ready {
                block.run(&mut warps[index]).map_err(|(kind, lane)| (kind, index, lane))?;
            }
        }
        if warps.iter().all(|warp| warp.state == State::Done) {
            return Ok(());
        }
        let moved = release(block, warps)?;
        if !moved && !warps.iter().any(|warp| warp.state == State::Ready) {
            let index = warps.iter().position(|warp| warp.state != State::Done).unwrap_or(0);
            let why = "all warps wait at barriers that are not complete".into();
            return Err((FaultKind::Stuck { why }, index, 0));
        }
    }
}

/// Lets warps pass the barriers that are complete.
fn release(block: &mut Block<'_>, warps: &mut [Warp]) -> Result<bool, (FaultKind, usize, usize)> {
    let mut moved = false;
    for number in 0..16 {
        let mut here = Vec::new();
        let mut needs = 0;
        for (index, warp) in warps.iter().enumerate() {
            if let State::Waiting { barrier, threads, pc } = warp.state
                && barrier == number
            {
                here.push((index, pc));
                needs = threads;
            }
        }
        let Some(&(first, at)) = here.first() else { continue };
        let complete = if needs == 0 {
            warps.iter().filter(|warp| warp.state != State::Done).count() == here.len()
        } else {
            here.len() * LANES >= needs as usize
        };
        if !complete {
            continue;
        }
        if let Some(&(other, elsewhere)) = here.iter().find(|&&(_, pc)| pc != at) {
            let (a, b) = (block.place(at), block.place(elsewhere));
            let why = format!("warp {first} waits at {a}, warp {other} at another one at {b}");
            return Err((FaultKind::DivergentBarrier { why }, other, 0));
        }
        let met: Vec<usize> = here.iter().map(|&(index, _)| index).collect();
        for &index in &met {
            warps[index].state = State::Ready;
        }
        block.shared.clocks.meet(&met);
        moved = true;
    }
    Ok(moved)
}

fn source_line(files: &HashMap<u32, String>, (file, line): (u32, u32)) -> String {
    let name = files.get(&file).map_or("?", |name| name.rsplit('/').next().unwrap_or(name));
    format!("{name}:{line}")
}

/// The place of a thread in its block.
fn thread([x, y, _]: [u32; 3], linear: usize) -> [u32; 3] {
    let linear = linear as u32;
    [linear % x, linear / x % y, linear / x / y]
}

fn set_thread_specials(warp: &mut Warp, kernel: &Kernel, launch: &Launch<'_>, warps: usize) {
    for &(special, register) in &kernel.specials {
        let first = warp.index * LANES;
        let value: [u32; LANES] = std::array::from_fn(|lane| {
            let bit = 1u32 << lane;
            match special {
                Special::Tid(axis) => thread(launch.block, first + lane)[axis],
                Special::BlockDim(axis) => launch.block[axis],
                Special::GridDim(axis) => launch.grid[axis],
                Special::Ctaid(_) => 0,
                Special::Lane => lane as u32,
                Special::Warp => warp.index as u32,
                Special::Warps => warps as u32,
                Special::MaskEq => bit,
                Special::MaskLt => bit - 1,
                Special::MaskLe => bit | (bit - 1),
                Special::MaskGt => !(bit | (bit - 1)),
                Special::MaskGe => !(bit - 1),
                Special::DynamicShared => launch.shared_bytes,
                Special::TotalShared => launch.shared_bytes + kernel.shared_bytes,
            }
        });
        warp.r32[register as usize] = value;
    }
}

fn set_block_specials(warp: &mut Warp, kernel: &Kernel, block: [u32; 3]) {
    for &(special, register) in &kernel.specials {
        if let Special::Ctaid(axis) = special {
            warp.r32[register as usize] = [block[axis]; LANES];
        }
    }
}

/// Numbers that a seed repeats (SplitMix64).
#[derive(Debug)]
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    fn shuffle(&mut self, list: &mut [usize]) {
        for i in (1..list.len()).rev() {
            list.swap(i, (self.next() % (i as u64 + 1)) as usize);
        }
    }

    /// A first number and a stride that together visit all below `count`.
    fn walk(&mut self, count: u64) -> (u64, u64) {
        fn divisor(a: u64, b: u64) -> u64 {
            if b == 0 { a } else { divisor(b, a % b) }
        }
        let start = self.next() % count;
        let mut stride = self.next() % count;
        while divisor(stride, count) != 1 {
            stride += 1;
        }
        (start, stride)
    }
}
