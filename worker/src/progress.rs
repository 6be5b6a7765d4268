//! How far a compute thread is, as everybody else sees it, with a watchdog beside it.

use crate::Error;
use crate::watchdog::{EXIT_STALLED, Health, Watchdog};
use parking_lot::Mutex;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// How often a busy but silent thread is looked at.
const WATCH_EVERY: Duration = Duration::from_millis(250);

/// What the engine holds right now.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct EngineLoad {
    pub running: usize,
    pub waiting: usize,
    /// Prompt tokens not yet computed.
    pub pending_prefill_tokens: u64,
    /// KV bytes held by live sequences.
    pub kv_used: u64,
    /// KV bytes in all.
    pub kv_total: u64,
    pub steps: u64,
    /// Tokens generated so far.
    pub tokens: u64,
    /// Prefill rate over recent steps, tokens per second.
    pub prefill_rate: f32,
    /// Recent step time, milliseconds.
    pub step_ms: f32,
}

pub(crate) struct Progress {
    load: Mutex<EngineLoad>,
    watchdog: Mutex<Watchdog>,
}

impl Progress {
    /// Starts a watchdog that ends the process when no step ends for `stall_floor` (or 20 slow steps) while work
    /// is queued.
    pub(crate) fn watched(load: EngineLoad, stall_floor: Duration) -> Result<Arc<Self>, Error> {
        let watchdog = Mutex::new(Watchdog::new(stall_floor));
        let progress = Arc::new(Self { load: Mutex::new(load), watchdog });
        let watched = Arc::downgrade(&progress);
        spawn("kvasir-watchdog", move || watch_over(&watched))?;
        Ok(progress)
    }

    /// Load as of the last step.
    pub(crate) fn load(&self) -> EngineLoad {
        *self.load.lock()
    }

    pub(crate) fn set_load(&self, load: EngineLoad) {
        *self.load.lock() = load;
    }

    /// Work is queued, or there is none any more.
    pub(crate) fn queued(&self, now: Instant, queued: bool) {
        self.watchdog.lock().queued(now, queued);
    }

    /// A step ended at `now` after `took`; `queued` says whether work is left.
    pub(crate) fn step_ended(&self, now: Instant, took: Duration, queued: bool) {
        self.watchdog.lock().step_ended(now, took, queued);
    }

    /// How long work has waited without progress.
    pub(crate) fn stalled(&self) -> Duration {
        self.watchdog.lock().stalled(Instant::now())
    }

    /// Whether there is progress as there should be.
    pub(crate) fn healthy(&self) -> bool {
        self.watchdog.lock().check(Instant::now()) == Health::Healthy
    }
}

/// Starts a thread that nobody joins.
pub(crate) fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<(), Error> {
    let spawned = std::thread::Builder::new().name(name.to_owned()).spawn(body);
    spawned.map(drop).map_err(|source| Error::Io { what: format!("cannot start thread {name}"), source })
}

fn watch_over(progress: &Weak<Progress>) {
    loop {
        std::thread::park_timeout(WATCH_EVERY);
        let Some(progress) = progress.upgrade() else { return };
        let verdict = progress.watchdog.lock().check(Instant::now());
        if let Health::Stalled { after } = verdict {
            let load = progress.load();
            tracing::error!(?after, ?load, "no step has ended while work is queued; the worker ends");
            proto::log::flush();
            kernels::exit::end_process(EXIT_STALLED);
        }
    }
}

/// What the last words of a process that ends by itself are given to leave.
const FAREWELL: Duration = Duration::from_millis(100);

/// Ends the process because of an error behind which nothing here can go on. Whoever is to be told has been told: the
/// packets are sent by other threads.
pub(crate) fn end_process(error: &Error) -> ! {
    tracing::error!(%error, "the engine cannot go on; the worker ends");
    std::thread::sleep(FAREWELL);
    proto::log::flush();
    kernels::exit::end_process(error.exit_code())
}
