//! What one rendering may use up.
//!
//! Every operation of the interpreter charges what it reads and what it makes before it does so, in bytes. All limits
//! are checked where the charge is made, so no single operation can run past one of them.

use std::cell::Cell;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use super::Limit;
use super::value::{Fallible, Fault};

/// Bytes of one value.
pub(super) const ONE: u64 = 32 << 20;
/// What handling a value costs, whatever its size.
pub(super) const VISIT: u64 = 64;
/// Depth of statements, operations and calls within each other.
const DEPTH: u32 = 400;
/// Depth of macro calls and recursive loops within each other.
const CALLS: u32 = 64;
/// Charged work between two looks at the clock, well below a millisecond.
const UNTIMED: u64 = 1 << 17;

/// What one rendering may use up in all.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    pub(super) time: Duration,
    /// Bytes read and made.
    pub(super) work: u64,
    /// Statements, operations and passes of loops.
    pub(super) steps: u32,
}

impl Limits {
    pub(super) const FULL: Self =
        Self { time: Duration::from_millis(250), work: 256 << 20, steps: 1_000_000 };
    /// Of a rendering on a thread that has other work to do.
    pub(super) const SHORT: Self = Self { time: Duration::from_millis(1), work: 1 << 20, steps: 4_000 };
}

/// The account of one rendering.
#[derive(Debug)]
pub(super) struct Budget {
    started: Duration,
    limits: Limits,
    work: Cell<u64>,
    /// The clock is read when so much work is done.
    look: Cell<u64>,
    steps: Cell<u32>,
    depth: Cell<u32>,
    calls: Cell<u32>,
}

impl Budget {
    pub(super) fn new(limits: Limits) -> Self {
        Self {
            started: cpu_time(),
            limits,
            work: Cell::new(0),
            look: Cell::new(UNTIMED),
            steps: Cell::new(0),
            depth: Cell::new(0),
            calls: Cell::new(0),
        }
    }

    /// Charges so many bytes.
    pub(super) fn charge(&self, bytes: u64) -> Fallible<()> {
        let work = self.work.get().saturating_add(bytes);
        self.work.set(work);
        if bytes > ONE || work > self.limits.work {
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

    /// Charges going through a text character by character, so many times as slow as copying it.
    pub(super) fn charge_slow(&self, text: &str, times: u64) -> Fallible<()> {
        self.charge((text.len() as u64).saturating_mul(times))
    }

    pub(super) fn check_time(&self) -> Fallible<()> {
        if cpu_time().saturating_sub(self.started) > self.limits.time {
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

    /// Goes one level down. A rendering that fails never comes up again, so only success calls [`leave`](Self::leave).
    pub(super) fn enter(&self) -> Fallible<()> {
        let depth = self.depth.get() + 1;
        self.depth.set(depth);
        if depth > DEPTH { Err(Limit::Recursion.into()) } else { Ok(()) }
    }

    pub(super) fn leave(&self) {
        self.depth.set(self.depth.get() - 1);
    }

    /// Runs a macro's body or a recursive loop.
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

/// CPU time of this thread: a busy machine must not fail a chat.
fn cpu_time() -> Duration {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(u64::try_from(now.tv_sec).unwrap_or(0), u32::try_from(now.tv_nsec).unwrap_or(0))
}
