//! Progress of a compute thread, readable by other threads, with a watchdog.

use crate::Error;
use crate::watchdog::{EXIT_STALLED, Health, Watchdog};
use parking_lot::Mutex;
use std::fmt::Display;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Interval of the watchdog's checks.
const WATCH_INTERVAL: Duration = Duration::from_millis(250);

/// An engine's current load.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct EngineLoad {
    pub running: usize,
    pub waiting: usize,
    /// Prompt tokens not yet computed.
    pub pending_prefill_tokens: u64,
    /// KV bytes held by live sequences.
    pub kv_used: u64,
    /// Total KV bytes.
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
    /// Starts a watchdog that ends the process if no step ends for `stall_floor` (or 20 slow steps) while
    /// work is queued.
    pub(crate) fn watched(load: EngineLoad, stall_floor: Duration) -> Result<Arc<Self>, Error> {
        let watchdog = Mutex::new(Watchdog::new(stall_floor));
        let progress = Arc::new(Self { load: Mutex::new(load), watchdog });
        let watched = Arc::downgrade(&progress);
        spawn("kvasir-watchdog", move || watch_over(&watched))?;
        Ok(progress)
    }

    /// Load after the last step.
    pub(crate) fn load(&self) -> EngineLoad {
        *self.load.lock()
    }

    pub(crate) fn set_load(&self, load: EngineLoad) {
        *self.load.lock() = load;
    }

    /// Records whether work is queued.
    pub(crate) fn queued(&self, now: Instant, queued: bool) {
        self.watchdog.lock().queued(now, queued);
    }

    /// Records that a step ended at `now` after `took`. `queued`: whether work is left.
    pub(crate) fn step_ended(&self, now: Instant, took: Duration, queued: bool) {
        self.watchdog.lock().step_ended(now, took, queued);
    }

    /// Time for which queued work has made no progress.
    pub(crate) fn stalled(&self) -> Duration {
        self.watchdog.lock().stalled(Instant::now())
    }

    /// Whether the thread makes progress or is idle.
    pub(crate) fn healthy(&self) -> bool {
        self.watchdog.lock().check(Instant::now()) == Health::Healthy
    }
}

/// Starts a detached thread.
pub fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<(), Error> {
    let spawned = std::thread::Builder::new().name(name.to_owned()).spawn(body);
    spawned.map(drop).map_err(|source| Error::Io { what: format!("cannot start thread {name}"), source })
}

fn watch_over(progress: &Weak<Progress>) {
    loop {
        std::thread::park_timeout(WATCH_INTERVAL);
        let Some(progress) = progress.upgrade() else { return };
        let verdict = progress.watchdog.lock().check(Instant::now());
        if let Health::Stalled { after } = verdict {
            let load = progress.load();
            tracing::error!(
                ?after,
                ?load,
                "no step has finished while work is queued; the worker process ends"
            );
            proto::log::flush();
            kernels::exit::end_process(EXIT_STALLED);
        }
    }
}

/// Time for the last log lines and packets before the process exits.
const EXIT_DELAY: Duration = Duration::from_millis(100);

/// Ends the process after an unrecoverable error. Other threads send the packets that close connections.
pub fn end_process(error: &dyn Display, exit_code: i32) -> ! {
    tracing::error!(%error, "the engine cannot continue; the worker process ends");
    std::thread::sleep(EXIT_DELAY);
    proto::log::flush();
    kernels::exit::end_process(exit_code)
}
