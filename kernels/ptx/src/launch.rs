//! Execution of one launch: checks, blocks and barriers.

use crate::ast::Special;
use crate::decode::Kernel;
use crate::exec::Block;
use crate::lanes::LANES;
use crate::shared::Shared;
use crate::warp::{State, Warp};
use crate::{Fault, FaultKind, Launch, Limits, RunError};

/// Maximum bytes of local memory per thread.
const MAX_LOCAL: u32 = 512 << 10;
/// Warp instructions after which a block is taken for endless.
const MAX_INSTRUCTIONS: u64 = 1 << 28;

/// Runs all blocks, in an order that the seed determines. With a limit, runs blocks spread over the grid until that many
/// warp instructions were issued. Returns the number of blocks.
pub(crate) fn run(
    launch: &Launch<'_>,
    limits: Limits,
    (seed, limit): (u64, Option<u64>),
    mut block: Block<'_>,
) -> Result<u64, RunError> {
    let kernel = block.kernel;
    block.parameters = check(kernel, launch, limits)?;
    let threads: u32 = launch.block.iter().product();
    let warps = (threads as usize).div_ceil(LANES);
    block.shared = Shared::new((kernel.shared_bytes + launch.shared_bytes) as usize);
    let mut all: Vec<Warp> = (0..warps).map(|index| Warp::new(index, kernel)).collect();
    for warp in &mut all {
        set_thread_specials(warp, kernel, launch, warps);
    }
    let blocks = launch.grid.iter().map(|&n| u64::from(n)).product::<u64>();
    let mut random = Random(seed);
    let (start, stride) = if limit.is_some() { spread(blocks) } else { random.walk(blocks) };
    let end = limit.map(|limit| block.counts.warp_instructions.saturating_add(limit));
    for step in 0..blocks {
        if end.is_some_and(|end| block.counts.warp_instructions >= end) {
            return Ok(step);
        }
        let number =
            ((u128::from(start) + u128::from(step) * u128::from(stride)) % u128::from(blocks)) as u64;
        let [x, y] = [launch.grid[0], launch.grid[1]].map(u64::from);
        let block_index = [number % x, number / x % y, number / x / y].map(|n| n as u32);
        for warp in &mut all {
            set_block_specials(warp, kernel, block_index);
            warp.start((threads as usize).saturating_sub(warp.index * LANES).min(LANES));
        }
        block.shared.reset(warps);
        // Numbers beyond 32 bits are truncated; blocks with the same number are not distinguished.
        block.number = number as u32;
        block.synchronised = false;
        run_block(&mut block, &mut all, &mut random).map_err(|(kind, warp, lane)| {
            let pc = match all[warp].state {
                State::Waiting { pc, .. } => pc,
                State::Ready | State::Done => all[warp].pc,
            };
            let at = &kernel.locations[pc as usize];
            RunError::Fault(Box::new(Fault {
                kind,
                kernel: kernel.name.clone(),
                block: block_index,
                thread: thread(launch.block, warp * LANES + lane),
                source_line: block.names.source_line(at.source),
                line: at.line,
                instruction: block.names.instruction(at.line),
            }))
        })?;
    }
    Ok(blocks)
}

/// Checks a launch and lays out its parameters.
fn check(kernel: &Kernel, launch: &Launch<'_>, limits: Limits) -> Result<Vec<u8>, RunError> {
    let refuse = |reason: String| Err(RunError::Launch { kernel: kernel.name.clone(), reason });
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
    if let Some((max, exact)) = kernel.max_threads {
        let product = max.iter().map(|&n| u64::from(n)).product::<u64>();
        if threads > product || exact && max != launch.block {
            return refuse(format!("a block of {:?} threads; it was compiled for {max:?}", launch.block));
        }
    }
    let shared = u64::from(kernel.shared_bytes) + u64::from(launch.shared_bytes);
    if shared > u64::from(limits.shared_bytes) {
        return refuse(format!("{shared} bytes of shared memory; {} is the most", limits.shared_bytes));
    }
    if kernel.local_bytes > MAX_LOCAL {
        return refuse(format!("{} bytes of local memory; {MAX_LOCAL} is the most", kernel.local_bytes));
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

/// Runs all warps of a block to their ends. A fault is returned with its warp and lane.
fn run_block(
    block: &mut Block<'_>,
    warps: &mut [Warp],
    random: &mut Random,
) -> Result<(), (FaultKind, usize, usize)> {
    let mut order: Vec<usize> = (0..warps.len()).collect();
    let end = block.counts.warp_instructions + MAX_INSTRUCTIONS;
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
        if block.counts.warp_instructions > end {
            let index = warps.iter().position(|warp| warp.state != State::Done).unwrap_or(0);
            let reason = format!("{MAX_INSTRUCTIONS} instructions of one block did not bring it to its end");
            return Err((FaultKind::Stuck { reason }, index, 0));
        }
        let moved = release(block, warps)?;
        if !moved && !warps.iter().any(|warp| warp.state == State::Ready) {
            let index = warps.iter().position(|warp| warp.state != State::Done).unwrap_or(0);
            let reason = "all warps wait at barriers that are not complete".into();
            return Err((FaultKind::Stuck { reason }, index, 0));
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
            let (a, b) = (block.source_location(at), block.source_location(elsewhere));
            let reason = format!("warp {first} waits at {a}, warp {other} at another one at {b}");
            return Err((FaultKind::DivergentBarrier { reason }, other, 0));
        }
        let arrived: Vec<usize> = here.iter().map(|&(index, _)| index).collect();
        for &index in &arrived {
            warps[index].state = State::Ready;
        }
        block.shared.clocks.pass_barrier(&arrived);
        moved = true;
    }
    Ok(moved)
}

/// Returns the index of a thread in its block.
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

/// Random numbers from a seed (SplitMix64).
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

    /// Returns a start and a stride that together visit all numbers below `count`.
    fn walk(&mut self, count: u64) -> (u64, u64) {
        let start = self.next() % count;
        (start, coprime(self.next() % count, count))
    }
}

/// Returns a start and a stride whose first numbers are spread evenly over those below `count`: steps of the golden
/// ratio from the middle.
fn spread(count: u64) -> (u64, u64) {
    (count / 2, coprime((u128::from(count) * 618_033_989 / 1_000_000_000) as u64, count))
}

/// Returns the first number from `least` on that has no divisor in common with `count`.
fn coprime(least: u64, count: u64) -> u64 {
    fn divisor(a: u64, b: u64) -> u64 {
        if b == 0 { a } else { divisor(b, a % b) }
    }
    (least..).find(|&stride| divisor(stride, count) == 1).unwrap_or(1)
}
