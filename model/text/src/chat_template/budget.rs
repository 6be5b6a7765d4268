//! Limits of one rendering.
//!
//! Every operation of the interpreter charges the bytes that it reads and creates before it runs. The charge
//! checks all limits, so no single operation can exceed one of them.

use std::cell::Cell;
use std::time::Duration;

use super::Limit;
use super::value::{Fallible, Fault};
use crate::cpu_time::thread_time;

/// Largest value in bytes.
pub(super) const MAX_VALUE_BYTES: u64 = 32 << 20;
/// Cost of handling a value, independent of its size.
pub(super) const VISIT: u64 = 64;
/// Deepest nesting of statements, operations and calls.
const DEPTH: u32 = 400;
/// Deepest nesting of macro calls and recursive loops.
const CALLS: u32 = 64;
/// Work charged between two reads of the clock; takes well below a millisecond.
const UNTIMED: u64 = 1 << 17;

/// Limits of a whole rendering.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    pub(super) time: Duration,
    /// Bytes read and created.
    pub(super) work: u64,
    /// Statements, operations and loop iterations.
    pub(super) steps: u32,
}

impl Limits {
    pub(super) const FULL: Self =
        Self { time: Duration::from_millis(250), work: 256 << 20, steps: 1_000_000 };
    /// For one message, to find out how a template reads it.
    pub(super) const PROBE: Self = Self { time: Duration::from_millis(50), work: 16 << 20, steps: 50_000 };
    /// For rendering on a thread with other work.
    pub(super) const SHORT: Self = Self { time: Duration::from_millis(1), work: 1 << 20, steps: 4_000 };
}

/// Resources used by one rendering.
#[derive(Debug)]
pub(super) struct Budget {
    started: Duration,
    limits: Limits,
    work: Cell<u64>,
    /// Work at which the clock is read next.
    look: Cell<u64>,
    steps: Cell<u32>,
    depth: Cell<u32>,
    calls: Cell<u32>,
}

impl Budget {
    pub(super) fn new(limits: Limits) -> Self {
        Self {
            started: thread_time(),
            limits,
            work: Cell::new(0),
            look: Cell::new(UNTIMED),
            steps: Cell::new(0),
            depth: Cell::new(0),
            calls: Cell::new(0),
        }
    }

    /// Charges `bytes` bytes.
    pub(super) fn charge(&self, bytes: u64) -> Fallible<()> {
        let work = self.work.get().saturating_add(bytes);
        self.work.set(work);
        if bytes > MAX_VALUE_BYTES || work > self.limits.work {
            return Err(Limit::Work.into());
        }
        if work < self.look.get() {
            return Ok(());
        }
        self.look.set(work + UNTIMED);
        self.check_time()
    }

    pub(super) fn charge_len(&self, bytes: usize) -> Fallible<()> {
        self.charge(bytes as u64)
    }

    /// Charges a pass over a text, character by character, at `times` times the cost of a copy.
    pub(super) fn charge_slow(&self, text: &str, times: u64) -> Fallible<()> {
        self.charge((text.len() as u64).saturating_mul(times))
    }

    pub(super) fn check_time(&self) -> Fallible<()> {
        if thread_time().saturating_sub(self.started) > self.limits.time {
            Err(Limit::Time.into())
        } else {
            Ok(())
        }
    }

    pub(super) fn step(&self) -> Fallible<()> {
        let steps = self.steps.get() + 1;
        self.steps.set(steps);
        if steps > self.limits.steps {
            return Err(Limit::Instructions.into());
        }
        self.charge(VISIT)
    }

    /// Goes one level deeper. Only a successful operation calls [`leave`](Self::leave): a failed rendering
    /// ends.
    pub(super) fn enter(&self) -> Fallible<()> {
        let depth = self.depth.get() + 1;
        self.depth.set(depth);
        if depth > DEPTH { Err(Limit::Recursion.into()) } else { Ok(()) }
    }

    pub(super) fn leave(&self) {
        self.depth.set(self.depth.get() - 1);
    }

    /// Runs the body of a macro or of a recursive loop.
    pub(super) fn call<T>(&self, run: impl FnOnce() -> Fallible<T>) -> Fallible<T> {
        let calls = self.calls.get() + 1;
        self.calls.set(calls);
        if calls > CALLS {
            return Err(Limit::Recursion.into());
        }
        let value = run()?;
        self.calls.set(calls - 1);
        Ok(value)
    }
}

impl From<Limit> for Fault {
    fn from(limit: Limit) -> Self {
        Self::Limit(limit)
    }
}
