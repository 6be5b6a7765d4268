//! Puts an engine to sleep after a time without requests, and wakes it before the next one.

use super::idle::{IdleSleep, Slept, Step};
use super::metrics::SleepMetrics;
use external::{Engine, EngineError, SleepState};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio::time::{sleep_until, timeout};

/// Longest wait of an ending worker for its engine.
const LEAVE_LIMIT: Duration = Duration::from_secs(10);

/// Sleep of one run of an engine.
pub(crate) struct Sleeper {
    engine: Arc<dyn Engine>,
    state: watch::Sender<IdleSleep>,
}

/// A request that waits for the engine or runs in it, which keeps it awake.
pub(super) struct ActiveRequest<'a>(&'a Sleeper);

impl Drop for ActiveRequest<'_> {
    fn drop(&mut self) {
        self.0.state.send_modify(|state| state.left(Instant::now()));
    }
}

impl Sleeper {
    /// `idle`: time without requests after which the engine sleeps. It is awake now.
    pub(super) fn new(engine: Arc<dyn Engine>, idle: Duration) -> Self {
        Self { engine, state: watch::Sender::new(IdleSleep::new(idle, Instant::now())) }
    }

    /// The engine serves, or is lost.
    pub(super) fn settled(&self) -> bool {
        let state = self.state.borrow();
        state.serves() || state.lost()
    }

    /// Waits until the engine serves. `None`: it is lost. The wait is limited by the limits of the calls to sleep
    /// and to wake.
    pub(super) async fn begin_request(&self) -> Option<ActiveRequest<'_>> {
        self.state.send_modify(IdleSleep::arrived);
        let request = ActiveRequest(self);
        let mut changes = self.state.subscribe();
        let serves = changes.wait_for(|state| state.serves() || state.lost()).await.ok()?.serves();
        serves.then_some(request)
    }

    /// Gives the orders until the engine is lost. `cleared` is called while no request runs: the engine's cache is
    /// empty. `lost` receives the reason.
    pub(super) async fn run(&self, metrics: SleepMetrics, cleared: impl Fn(), lost: impl FnOnce(&str)) {
        let engine = self.engine.kind();
        let mut changes = self.state.subscribe();
        loop {
            changes.mark_unchanged();
            let mut step = Step::Wait;
            // Waiting requests need to know of results alone.
            self.state.send_if_modified(|state| {
                step = state.next(Instant::now());
                false
            });
            match step {
                Step::Wait => {
                    // The sender is `self`'s.
                    let _ = changes.changed().await;
                }
                Step::Until(at) => tokio::select! {
                    _ = changes.changed() => {}
                    () = sleep_until(at.into()) => {}
                },
                Step::Sleep => {
                    let result = self.fall_asleep().await;
                    let slept = match &result {
                        Ok(true) => Slept::Asleep,
                        Ok(false) => Slept::Busy,
                        Err(error) if error.lost() => Slept::Lost,
                        Err(_) => Slept::Refused,
                    };
                    if slept == Slept::Asleep {
                        cleared();
                        metrics.sleeps.inc();
                        metrics.asleep.set(1);
                        tracing::info!(%engine, "the engine sleeps");
                    }
                    self.state.send_modify(|state| state.slept(slept, Instant::now()));
                    match result {
                        Err(error) if slept == Slept::Lost => {
                            return lost(&format!("the engine did not fall asleep: {error}"));
                        }
                        Err(error) => {
                            tracing::warn!(%engine, %error, "the engine does not sleep and is left awake");
                        }
                        Ok(_) => {}
                    }
                }
                Step::Wake => {
                    let begun = Instant::now();
                    let result = self.engine.wake().await;
                    metrics.asleep.set(0);
                    // Events from before the sleep may have arrived during it.
                    cleared();
                    self.state.send_modify(|state| state.woke(result.is_ok(), Instant::now()));
                    if let Err(error) = result {
                        return lost(&format!("the engine does not wake: {error}"));
                    }
                    let took = begun.elapsed();
                    metrics.wakes.inc();
                    metrics.wake_seconds.0.observe(took.as_secs_f64());
                    tracing::info!(%engine, ?took, "the engine is awake");
                }
            }
        }
    }

    /// Whether it sleeps now. If not, it may have requests that are not this worker's.
    async fn fall_asleep(&self) -> Result<bool, EngineError> {
        match self.engine.load().await {
            Ok(load) if load.running == 0 && load.queued == 0 => self.engine.sleep().await.map(|()| true),
            _ => Ok(false),
        }
    }

    /// Wakes a sleeping engine for others, when this worker ends. Not while [`run`](Self::run) runs.
    pub(super) async fn leave_awake(&self) {
        let (asleep, changing) = {
            let state = self.state.borrow();
            (state.asleep(), state.changing())
        };
        let engine = self.engine.kind();
        let wake = async {
            if asleep || changing && self.engine.sleep_state().await? == SleepState::Asleep {
                self.engine.wake().await?;
                tracing::info!(%engine, "the engine is awake for others");
            }
            Ok::<_, EngineError>(())
        };
        match timeout(LEAVE_LIMIT, wake).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(%engine, %error, "the engine may be left asleep"),
            Err(_) => tracing::warn!(%engine, limit = ?LEAVE_LIMIT, "the engine wakes without this worker"),
        }
    }
}
