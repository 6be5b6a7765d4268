//! Registers of a warp and program counters of its lanes.

use crate::decode::Kernel;
use crate::lanes::{ALL, LANES, V32, V64, each};
use crate::op::{Condition, Data, GroupProduct};

/// Contents of unwritten registers; NaN as a float.
const POISON: u32 = 0xffc0_dead;

/// Execution state of a warp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    Ready,
    /// At a barrier, with the number of threads to wait for (0 is the whole block).
    Waiting {
        barrier: u32,
        threads: u32,
        pc: u32,
    },
    Done,
}

#[derive(Debug)]
pub(crate) struct Warp {
    pub(crate) index: usize,
    pub(crate) r32: Vec<V32>,
    pub(crate) r64: Vec<V64>,
    pub(crate) pred: Vec<u32>,
    /// Program counter of the lanes of `active`.
    pub(crate) pc: u32,
    pub(crate) active: u32,
    /// (program counter, lanes) of other lanes, all further on. Lanes with the lowest program counter run
    /// first, so that diverged lanes reconverge.
    pub(crate) others: Vec<(u32, u32)>,
    /// Lanes that exist and have not exited.
    pub(crate) live: u32,
    /// Lanes that have waited for the kernels before this one.
    pub(crate) waited: u32,
    pub(crate) state: State,
    /// Local memory, lane by lane.
    pub(crate) local: Vec<u8>,
    pub(crate) copies: Copies,
    pub(crate) products: Products,
}

/// A copy into shared memory that has begun and was not waited for yet.
#[derive(Debug)]
pub(crate) struct Copy {
    pub(crate) lane: usize,
    pub(crate) group: u32,
    pub(crate) to: u64,
    pub(crate) data: [u8; 16],
    pub(crate) bytes: usize,
}

#[derive(Debug, Default)]
pub(crate) struct Copies {
    pub(crate) pending: Vec<Copy>,
    /// Number of groups that each lane has committed.
    pub(crate) groups: V32,
}

/// A product of a warp group that was not waited for yet.
#[derive(Debug)]
pub(crate) struct PendingProduct {
    pub(crate) group: u32,
    pub(crate) product: GroupProduct,
    pub(crate) pc: u32,
    pub(crate) descriptor: u64,
    /// The factors when it began.
    pub(crate) first: Vec<V32>,
    pub(crate) second: Vec<u8>,
}

#[derive(Debug, Default)]
pub(crate) struct Products {
    pub(crate) pending: Vec<PendingProduct>,
    /// Number of groups that the warp has committed.
    pub(crate) groups: u32,
}

impl Copies {
    /// Makes a group of the copies since the last commit.
    pub(crate) fn commit(&mut self, mask: u32) {
        for lane in each(mask) {
            self.groups[lane] += 1;
        }
    }
}

impl Warp {
    pub(crate) fn new(index: usize, kernel: &Kernel) -> Self {
        let [n32, n64, preds] = kernel.registers.map(|n| n as usize);
        let mut warp = Self {
            index,
            r32: vec![[POISON; LANES]; n32],
            r64: vec![[u64::from(POISON) << 32 | u64::from(POISON); LANES]; n64],
            pred: vec![0; preds],
            pc: 0,
            active: 0,
            others: Vec::new(),
            live: 0,
            waited: 0,
            state: State::Ready,
            local: vec![0xff; kernel.local_bytes as usize * LANES],
            copies: Copies::default(),
            products: Products::default(),
        };
        for &(register, value) in &kernel.constants32 {
            warp.r32[register as usize] = [value; LANES];
        }
        for &(register, value) in &kernel.constants64 {
            warp.r64[register as usize] = [value; LANES];
        }
        warp
    }

    /// Resets the warp to the first instruction, with `threads` lanes.
    pub(crate) fn start(&mut self, threads: usize) {
        self.live = if threads >= LANES { ALL } else { (1 << threads) - 1 };
        self.active = self.live;
        self.pc = 0;
        self.waited = 0;
        self.others.clear();
        self.copies = Copies::default();
        self.products = Products::default();
        self.state = State::Ready;
    }

    pub(crate) fn condition(&self, condition: Condition) -> u32 {
        let mask = self.pred[condition.pred as usize];
        if condition.negated { !mask } else { mask }
    }

    /// Sets a predicate for the lanes of `mask`.
    pub(crate) fn set_pred(&mut self, register: u32, value: u32, mask: u32) {
        let pred = &mut self.pred[register as usize];
        *pred = *pred & !mask | value & mask;
    }

    /// Sets a 32-bit register for the lanes of `mask`.
    #[inline]
    pub(crate) fn set32(&mut self, register: u32, value: &V32, mask: u32) {
        let to = &mut self.r32[register as usize];
        if mask == ALL {
            *to = *value;
        } else {
            for lane in 0..LANES {
                to[lane] = if mask >> lane & 1 == 1 { value[lane] } else { to[lane] };
            }
        }
    }

    /// Sets a 64-bit register for the lanes of `mask`.
    #[inline]
    pub(crate) fn set64(&mut self, register: u32, value: &V64, mask: u32) {
        let to = &mut self.r64[register as usize];
        if mask == ALL {
            *to = *value;
        } else {
            for lane in 0..LANES {
                to[lane] = if mask >> lane & 1 == 1 { value[lane] } else { to[lane] };
            }
        }
    }

    #[inline]
    pub(crate) fn lane(&self, data: Data, lane: usize) -> u64 {
        match data {
            Data::B16(register) => u64::from(self.r32[register as usize][lane] as u16),
            Data::B32(register) => u64::from(self.r32[register as usize][lane]),
            Data::B64(register) => self.r64[register as usize][lane],
        }
    }

    /// Sets the register of one lane, truncated to the register's width.
    #[inline]
    pub(crate) fn set_lane(&mut self, data: Data, lane: usize, value: u64) {
        match data {
            Data::B16(register) => self.r32[register as usize][lane] = u32::from(value as u16),
            Data::B32(register) => self.r32[register as usize][lane] = value as u32,
            Data::B64(register) => self.r64[register as usize][lane] = value,
        }
    }

    pub(crate) fn suspend(&mut self, pc: u32, mask: u32) {
        if mask != 0 {
            self.others.push((pc, mask));
        }
    }

    /// Chooses the lanes that run next. Does nothing if no lane is left.
    pub(crate) fn choose(&mut self) {
        if self.others.is_empty() {
            return;
        }
        if self.active != 0 && self.others.iter().all(|&(pc, _)| pc > self.pc) {
            return;
        }
        self.suspend(self.pc, self.active);
        let lowest = self.others.iter().map(|&(pc, _)| pc).min().unwrap_or(self.pc);
        self.pc = lowest;
        self.active = 0;
        let active = &mut self.active;
        self.others.retain(|&(pc, mask)| {
            let here = pc == lowest;
            *active |= if here { mask } else { 0 };
            !here
        });
    }
}
