//! Runs a warp until it waits or ends.

mod copies;
mod dependent;
mod lane_data;
mod lane_exchange;
mod matrix;
mod warpgroup;

use crate::FaultKind;
use crate::ast::Space;
use crate::decode::Kernel;
use crate::lanes::{ALL, LANES, V32, V64};
use crate::memory::Memory;
use crate::names::Names;
use crate::op::{Compared, Instruction, Op};
use crate::shared::{Race, Shared, Wrong};
use crate::warp::{State, Warp};

/// Instructions of a warp before other warps run, so that a warp may poll for a value that another one
/// writes.
const TURN: u64 = 1 << 20;

/// State of the machine that a block uses.
pub(crate) struct Block<'a> {
    pub(crate) kernel: &'a Kernel,
    pub(crate) memory: &'a mut Memory,
    pub(crate) constants: &'a [u8],
    pub(crate) counts: &'a mut crate::Counts,
    pub(crate) executed: &'a mut [crate::Executed],
    pub(crate) names: &'a Names,
    pub(crate) parameters: Vec<u8>,
    pub(crate) shared: Shared,
    pub(crate) number: u32,
    /// Whether the block did an atomic on global memory, which may order it after writes of other blocks.
    pub(crate) synchronised: bool,
}

/// Result with a fault and the lane that it concerns.
pub(crate) type Run<T> = Result<T, (FaultKind, usize)>;

enum Flow {
    Next,
    /// The program counter of the active lanes was set.
    Jumped,
    /// The warp waits or has ended.
    Stop,
}

impl Block<'_> {
    /// Runs a warp until it waits, ends or has used up its turn.
    pub(crate) fn run(&mut self, warp: &mut Warp) -> Run<()> {
        let code = &self.kernel.code;
        let end = self.counts.warp_instructions + TURN;
        while self.counts.warp_instructions < end {
            let at = warp.pc as usize;
            let Instruction { op, guard } = &code[at];
            let mask = match guard {
                Some(condition) => warp.active & warp.condition(*condition),
                None => warp.active,
            };
            let lanes = if mask == ALL { 32 } else { u64::from(mask.count_ones()) };
            self.counts.warp_instructions += 1;
            self.counts.lane_instructions += lanes;
            // A branch that is not taken is executed nevertheless.
            let executed = &mut self.executed[at];
            executed.lanes += lanes.max(matches!(op, Op::Branch { .. }).into());
            executed.warps += 1;
            let flow = if mask == 0 { Flow::Next } else { self.execute(warp, op, mask)? };
            match flow {
                Flow::Next => warp.pc += 1,
                Flow::Jumped => {}
                Flow::Stop => return Ok(()),
            }
            warp.choose();
        }
        Ok(())
    }

    fn execute(&mut self, warp: &mut Warp, op: &Op, mask: u32) -> Run<Flow> {
        let first = mask.trailing_zeros() as usize;
        match *op {
            Op::Move32 { d, a } => {
                let value = warp.r32[a as usize];
                warp.set32(d, &value, mask);
            }
            Op::Move64 { d, a } => {
                let value = warp.r64[a as usize];
                warp.set64(d, &value, mask);
            }
            Op::Unary32 { f, d, a } => to32(warp, d, mask, |w, out| f(w.v32(a), out)),
            Op::Unary64 { f, d, a } => to64(warp, d, mask, |w, out| f(w.v64(a), out)),
            Op::Widen { f, d, a } => to64(warp, d, mask, |w, out| f(w.v32(a), out)),
            Op::Narrow { f, d, a } => to32(warp, d, mask, |w, out| f(w.v64(a), out)),
            Op::Binary32 { f, d, a, b } => to32(warp, d, mask, |w, out| f(w.v32(a), w.v32(b), out)),
            Op::Binary64 { f, d, a, b } => to64(warp, d, mask, |w, out| f(w.v64(a), w.v64(b), out)),
            Op::BinaryWide { f, d, a, b } => to64(warp, d, mask, |w, out| f(w.v32(a), w.v32(b), out)),
            Op::Shift64 { f, d, a, b } => to64(warp, d, mask, |w, out| f(w.v64(a), w.v32(b), out)),
            Op::Ternary32 { f, d, a, b, c } => {
                to32(warp, d, mask, |w, out| f(w.v32(a), w.v32(b), w.v32(c), out));
            }
            Op::Ternary64 { f, d, a, b, c } => {
                to64(warp, d, mask, |w, out| f(w.v64(a), w.v64(b), w.v64(c), out));
            }
            Op::TernaryWide { f, d, a, b, c } => {
                to64(warp, d, mask, |w, out| f(w.v32(a), w.v32(b), w.v64(c), out));
            }
            Op::Field64 { f, d, a, b, c } => {
                to64(warp, d, mask, |w, out| f(w.v64(a), w.v32(b), w.v32(c), out));
            }
            Op::Quaternary32 { f, d, a, b, c, e } => {
                to32(warp, d, mask, |w, out| f(w.v32(a), w.v32(b), w.v32(c), w.v32(e), out));
            }
            Op::Insert64 { f, d, a, b, c, e } => {
                to64(warp, d, mask, |w, out| f(w.v64(a), w.v64(b), w.v32(c), w.v32(e), out));
            }
            Op::Compare32 { f, a, b, to } => {
                let result = f(warp.v32(a), warp.v32(b));
                compared(warp, to, result, mask);
            }
            Op::Compare64 { f, a, b, to } => {
                let result = f(warp.v64(a), warp.v64(b));
                compared(warp, to, result, mask);
            }
            Op::Set32 { f, d, a, b, true_value } => {
                let result = f(warp.v32(a), warp.v32(b));
                let value = std::array::from_fn(|lane| if result >> lane & 1 == 1 { true_value } else { 0 });
                warp.set32(d, &value, mask);
            }
            Op::Select32 { d, a, b, when } => {
                let selected = warp.condition(when);
                let (x, y) = (warp.v32(a), warp.v32(b));
                let value =
                    std::array::from_fn(|lane| if selected >> lane & 1 == 1 { x[lane] } else { y[lane] });
                warp.set32(d, &value, mask);
            }
            Op::Select64 { d, a, b, when } => {
                let selected = warp.condition(when);
                let (x, y) = (warp.v64(a), warp.v64(b));
                let value =
                    std::array::from_fn(|lane| if selected >> lane & 1 == 1 { x[lane] } else { y[lane] });
                warp.set64(d, &value, mask);
            }
            Op::MovePred { d, a } => warp.set_pred(d, warp.condition(a), mask),
            Op::SetPred { d, value } => warp.set_pred(d, if value { ALL } else { 0 }, mask),
            Op::LogicPred { op, d, a, b } => {
                let value = op.of(warp.condition(a), warp.condition(b));
                warp.set_pred(d, value, mask);
            }
            Op::Pack { d, ref parts } => lane_data::pack(warp, d, parts, mask),
            Op::Unpack { a, ref parts } => lane_data::unpack(warp, a, parts, mask),
            Op::Load(ref access) => {
                self.after_wait(warp, "read", (access.space, access.address), mask)?;
                self.constant(warp, access, mask)?;
                self.load(warp, access, mask)?;
            }
            Op::Prefetch { space, address } => self.prefetch(warp, space, address, mask)?,
            Op::Store(ref access) => {
                self.after_wait(warp, "write", (access.space, access.address), mask)?;
                self.store(warp, access, mask)?;
            }
            Op::Atomic(ref atomic) => {
                self.after_wait(warp, "write", (atomic.space, atomic.address), mask)?;
                self.atomic(warp, atomic, mask)?;
            }
            Op::Branch { to } => {
                warp.suspend(warp.pc + 1, warp.active & !mask);
                warp.pc = to;
                warp.active = mask;
                return Ok(Flow::Jumped);
            }
            Op::BranchTable { index, ref to } => {
                let next = warp.pc + 1;
                warp.suspend(next, warp.active & !mask);
                for lane in crate::lanes::each(mask) {
                    let chosen = warp.r32[index as usize][lane];
                    let Some(&target) = to.get(chosen as usize) else {
                        let what = format!("index {chosen} of a list of {} labels", to.len());
                        return Err((FaultKind::Invalid { what }, lane));
                    };
                    warp.suspend(target, 1 << lane);
                }
                warp.active = 0;
                return Ok(Flow::Jumped);
            }
            Op::Exit => {
                self.exit_after_wait(warp, mask)?;
                warp.live &= !mask;
                warp.active &= !mask;
                if warp.live == 0 {
                    warp.state = State::Done;
                    return Ok(Flow::Stop);
                }
                if warp.active != 0 {
                    return Ok(Flow::Next);
                }
                return Ok(Flow::Jumped);
            }
            Op::Trap => return Err((FaultKind::Trap, first)),
            Op::Barrier { barrier, threads, waits } => {
                return self.barrier(warp, barrier, threads, waits, mask);
            }
            Op::SyncWarp { members } => {
                lane_exchange::members(warp, "bar.warp.sync", members, mask)?;
            }
            Op::Shuffle { mode, d, valid, a, b, c, members } => {
                lane_exchange::shuffle(warp, mode, (d, valid), (a, b, c, members), mask)?;
            }
            Op::Vote { mode, d, a, members } => lane_exchange::vote(warp, mode, d, a, members, mask)?,
            Op::Match { all, d, equal, a, members } => {
                lane_exchange::matching(warp, all, (d, equal), a, members, mask)?
            }
            Op::MatrixProduct(ref product) => matrix::product(warp, product, mask)?,
            Op::LoadMatrix(ref load) => self.load_matrix(warp, load, mask)?,
            Op::CopyAsync(ref copy) => {
                self.after_wait(warp, "read", (Space::Global, copy.from), mask)?;
                self.copy_begin(warp, copy, mask)?;
            }
            Op::CopyCommit => warp.copies.commit(mask),
            Op::CopyWait { keep } => self.copy_wait(warp, keep, mask)?,
            Op::GroupProduct(ref product) => self.group_product(warp, product, mask)?,
            Op::GroupCommit => warp.products.groups += 1,
            Op::GroupWait { keep } => self.group_wait(warp, keep, mask)?,
            Op::ProxyFence => self.shared.fence(warp.index),
            Op::Reduce { f, d, a, members } => lane_exchange::reduce(warp, f, (d, a), members, mask)?,
            Op::ActiveMask { d } => warp.set32(d, &[mask; LANES], mask),
            Op::GridWait => warp.waited |= mask,
            Op::Nothing => {}
        }
        Ok(Flow::Next)
    }

    /// Runs a block-wide barrier. All live lanes of the warp must reach it together.
    fn barrier(
        &mut self,
        warp: &mut Warp,
        barrier: u32,
        threads: Option<u32>,
        waits: bool,
        mask: u32,
    ) -> Run<Flow> {
        let first = mask.trailing_zeros() as usize;
        if mask != warp.live {
            let missing = warp.live & !mask;
            let reason = format!("lanes {missing:#010x} of warp {} did not come", warp.index);
            return Err((FaultKind::DivergentBarrier { reason }, missing.trailing_zeros() as usize));
        }
        if !waits {
            return Err((FaultKind::Invalid { what: "bar.arrive is not known".into() }, first));
        }
        let number = warp.v32(barrier)[first];
        let threads = threads.map_or(0, |threads| warp.v32(threads)[first]);
        if number > 15 || !threads.is_multiple_of(32) {
            let what = format!("barrier {number} of {threads} threads");
            return Err((FaultKind::Invalid { what }, first));
        }
        warp.state = State::Waiting { barrier: number, threads, pc: warp.pc };
        warp.pc += 1;
        Ok(Flow::Stop)
    }

    /// Converts an error of shared memory to a fault.
    fn wrong(&self, wrong: Wrong, lane: usize) -> (FaultKind, usize) {
        let kind = match wrong {
            Wrong::Fault(kind) => kind,
            Wrong::Race(Race { address, access, other, warp, pc }) => {
                let location = self.source_location(pc);
                let other = format!("the {other} of warp {warp} at {location} ({})", self.text(pc));
                FaultKind::Race { space: "shared", address, access, other }
            }
            Wrong::InFlight { address, pc } => {
                let copy = format!("{} ({})", self.source_location(pc), self.text(pc));
                FaultKind::InFlight { address, copy }
            }
        };
        (kind, lane)
    }

    /// Returns file and line of an instruction.
    pub(crate) fn source_location(&self, pc: u32) -> String {
        self.names.source_line(self.kernel.locations[pc as usize].source)
    }

    /// Returns the text of an instruction.
    fn text(&self, pc: u32) -> String {
        self.names.instruction(self.kernel.locations[pc as usize].line)
    }
}

impl Warp {
    #[inline]
    pub(crate) fn v32(&self, register: u32) -> &V32 {
        &self.r32[register as usize]
    }

    #[inline]
    pub(crate) fn v64(&self, register: u32) -> &V64 {
        &self.r64[register as usize]
    }
}

#[inline(always)]
fn to32(warp: &mut Warp, d: u32, mask: u32, f: impl Fn(&Warp, &mut V32)) {
    let mut out = [0; LANES];
    f(warp, &mut out);
    warp.set32(d, &out, mask);
}

#[inline(always)]
fn to64(warp: &mut Warp, d: u32, mask: u32, f: impl Fn(&Warp, &mut V64)) {
    let mut out = [0; LANES];
    f(warp, &mut out);
    warp.set64(d, &out, mask);
}

fn compared(warp: &mut Warp, to: Compared, result: u32, mask: u32) {
    let combined = |value: u32| match to.combine {
        Some((logic, condition)) => logic.of(value, warp.condition(condition)),
        None => value,
    };
    let (value, opposite) = (combined(result), combined(!result));
    warp.set_pred(to.to, value, mask);
    if let Some(other) = to.other {
        warp.set_pred(other, opposite, mask);
    }
}
