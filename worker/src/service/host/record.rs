//! A model of an order: how far it is, and what is reported of it.

use super::decide::{ModelView, Stage, Target, pause};
use super::files::{FindProgress, Found, PinnedFiles};
use crate::load::HostedLoad;
use crate::service::node::NodeRun;
use engine::budget::Reservation;
use engine::telemetry::ShippingMetrics;
use pipeline::weight_distribution::Shipper;
use proto::deployment::{ModelReport, ModelState, OrderedModel, WantedState};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::task::AbortHandle;

/// Time for which a model must serve until its earlier failures are forgotten.
const STABLE_AFTER: Duration = Duration::from_secs(60);

/// A task that ends with its record.
pub(super) struct Task(pub(super) AbortHandle);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The instance of a model that is being loaded or is loaded.
pub(super) struct Running {
    pub(super) number: u16,
    pub(super) run: NodeRun,
    pub(super) load: HostedLoad,
}

impl Running {
    /// Whether all memory of the model is free.
    pub(super) fn has_ended(&self) -> bool {
        self.load.bytes() == 0
    }
}

/// Memory for the files of a model that is asleep.
pub(super) struct Pin {
    pub(super) reservation: Reservation,
    /// `None` while they are read.
    pub(super) files: Option<PinnedFiles>,
}

pub(super) struct Record {
    /// Tells events of this record from those of an earlier one of the model.
    pub(super) key: u64,
    pub(super) ordered: OrderedModel,
    /// Whether the model is not ordered any more, or ordered with other files or another length.
    pub(super) gone: bool,
    pub(super) stage: Stage,
    /// When the stage began.
    pub(super) since: Instant,
    pub(super) found: Option<Found>,
    pub(super) failures: u32,
    pub(super) reason: String,
    pub(super) retry_at: Option<Instant>,
    /// Whether the last attempt was refused for lack of room.
    pub(super) short_of_room: bool,
    /// Whether it was loaded before.
    pub(super) slept: bool,
    pub(super) task: Option<Task>,
    pub(super) search: Option<Arc<FindProgress>>,
    pub(super) shipping: ShippingMetrics,
    /// Keeps the model's chunks in the store.
    pub(super) shipper: Arc<Shipper>,
    pub(super) running: Option<Running>,
    /// Stage after [`Stage::Ending`].
    pub(super) next: Stage,
    pub(super) pin: Option<Pin>,
    /// Whether its arena is being shrunk.
    pub(super) shrinks: bool,
    /// Until then its arena counts as having nothing to give.
    pub(super) spare_from: Option<Instant>,
    /// Whether its sequences waited for a larger arena when that was last asked.
    pub(super) lacks: bool,
    /// Files to be pinned while it is asleep, and their bytes.
    pub(super) to_pin: (Vec<PathBuf>, u64),
}

impl Record {
    pub(super) fn new(key: u64, ordered: OrderedModel, shipping: ShippingMetrics, shipper: Shipper) -> Self {
        Self {
            key,
            ordered,
            gone: false,
            stage: Stage::Unknown,
            since: Instant::now(),
            found: None,
            failures: 0,
            reason: String::new(),
            retry_at: None,
            short_of_room: false,
            slept: false,
            task: None,
            search: None,
            shipping,
            shipper: Arc::new(shipper),
            running: None,
            next: Stage::Found,
            pin: None,
            shrinks: false,
            spare_from: None,
            lacks: false,
            to_pin: (Vec::new(), 0),
        }
    }

    /// Whether what is here serves this order: the same files and the same longest sequence.
    pub(super) fn serves(&self, ordered: &OrderedModel) -> bool {
        let found = self.found.as_ref().map(|found| found.facts.digest);
        let (here, wanted) = (found.or(self.ordered.digest), ordered.digest);
        let same_content = match (here, wanted) {
            (Some(here), Some(wanted)) => here == wanted,
            _ => true,
        };
        let same_source = ordered.source == self.ordered.source || found.is_some() && wanted.is_some();
        ordered.context == self.ordered.context && same_content && same_source
    }

    /// Takes a newer order that it [serves](Self::serves).
    pub(super) fn update(&mut self, ordered: &OrderedModel) {
        let before = std::mem::replace(&mut self.ordered, ordered.clone());
        let returned = std::mem::take(&mut self.gone);
        if before.wanted != ordered.wanted || returned {
            (self.failures, self.retry_at) = (0, None);
            self.reason.clear();
        }
        if self.stage == Stage::BadFile && before != *ordered {
            self.enter(Stage::Unknown);
        }
    }

    pub(super) fn enter(&mut self, stage: Stage) {
        (self.stage, self.since) = (stage, Instant::now());
    }

    /// Counts a failed attempt. The next one follows after a pause.
    pub(super) fn failed(&mut self, reason: String, now: Instant) {
        self.failures = self.failures.saturating_add(1);
        self.retry_at = Some(now + pause(self.failures));
        self.short_of_room = false;
        self.reason = reason;
    }

    pub(super) fn view(&mut self, now: Instant) -> ModelView {
        if let (Stage::Draining { done, .. }, Some(running)) = (&mut self.stage, &self.running) {
            *done = running.run.node.calls.running() == 0;
        }
        if self.stage == Stage::Ready && self.failures > 0 && now - self.since > STABLE_AFTER {
            (self.failures, self.retry_at) = (0, None);
            self.reason.clear();
        }
        ModelView {
            target: if self.gone { Target::Gone } else { Target::Wanted(self.ordered.wanted) },
            stage: self.stage,
            needed: self.found.as_ref().map_or(0, |found| found.facts.needed_bytes),
            spare: self.spare(),
            shrinks: self.shrinks,
            lacks: self.stage == Stage::Ready && self.lacks,
            pinned: self.pin.as_ref().map_or(0, |pin| pin.reservation.bytes()),
            to_pin: if self.ordered.pin { self.to_pin.1 } else { 0 },
            retry_at: self.retry_at,
            short_of_room: self.short_of_room,
        }
    }

    /// Bytes of its arena that it can give back.
    pub(super) fn spare(&self) -> u64 {
        let Some(running) = self.running.as_ref().filter(|_| self.stage == Stage::Ready) else { return 0 };
        if self.spare_from.is_some_and(|from| Instant::now() < from) {
            return 0;
        }
        let load = running.run.node.engine().map(|engine| engine.load()).unwrap_or_default();
        running.load.spare_arena(load.kv_total, load.kv_used)
    }

    /// Bytes that the model holds and gives back only when it ends: without files of a model that is asleep, and without
    /// the part of its arena that others get when they need it.
    pub(super) fn bytes(&self) -> u64 {
        self.running.as_ref().map_or(0, |running| running.load.bytes()).saturating_sub(self.spare())
    }

    fn state(&self) -> ModelState {
        let failed = self.failures > 0;
        match self.stage {
            Stage::BadFile => ModelState::BadFile,
            Stage::Finding => ModelState::Fetching,
            Stage::Unknown if failed => ModelState::Failed,
            Stage::Unknown => ModelState::Absent,
            Stage::Loading if self.slept => ModelState::Waking,
            Stage::Loading => ModelState::Loading,
            // The engine starts with the first coordinator's cluster key.
            Stage::Ready
                if self.running.as_ref().is_some_and(|running| running.run.node.engine().is_some()) =>
            {
                ModelState::Ready
            }
            Stage::Ready => ModelState::Loading,
            Stage::Draining { .. } | Stage::Ending => ModelState::Ready,
            Stage::Found => match self.ordered.wanted {
                WantedState::Ready if failed => ModelState::Failed,
                WantedState::Ready if self.slept => ModelState::Waking,
                WantedState::Ready => ModelState::Loading,
                WantedState::Asleep => ModelState::Asleep,
                WantedState::Identified => ModelState::Absent,
            },
        }
    }

    /// Thousandths of the present stage, and the estimated time until the model is ready. `rate`: bytes per second of
    /// earlier loads; 0 if none was measured.
    fn progress(&self, now: Instant, rate: f64) -> (u16, Duration) {
        let elapsed = (now - self.since).as_secs_f64();
        let needed = self.found.as_ref().map_or(0, |found| found.facts.needed_bytes) as f64;
        let load = if rate > 0.0 { needed / rate } else { 0.0 };
        let left = |part: f64| if part > 0.0 { elapsed * (1.0 - part) / part } else { 0.0 };
        let (part, seconds) = match (self.stage, &self.search, &self.running) {
            (Stage::Finding, Some(search), _) => {
                let (here, all) = search.bytes(&self.shipping);
                let part = if all > 0 { here as f64 / all as f64 } else { 0.0 };
                (part, if part > 0.0 { left(part) + load.max(all as f64 / rate.max(1e9)) } else { 0.0 })
            }
            (Stage::Loading, _, Some(running)) => {
                let part = f64::from(running.load.permille()) / 1000.0;
                (part, if part > 0.1 { left(part) } else { (load - elapsed).max(0.0) })
            }
            (Stage::Found, ..) if self.ordered.wanted == WantedState::Ready => (0.0, load),
            (Stage::Ready, ..) => (1.0, 0.0),
            _ => (0.0, 0.0),
        };
        ((part.clamp(0.0, 1.0) * 1000.0) as u16, Duration::try_from_secs_f64(seconds).unwrap_or_default())
    }

    /// See [`progress`](Self::progress) for `rate`.
    pub(super) fn report(&self, now: Instant, rate: f64) -> ModelReport {
        let (permille, eta) = self.progress(now, rate);
        let calls = self
            .running
            .as_ref()
            .filter(|_| self.stage == Stage::Ready)
            .map(|running| &running.run.node.calls);
        ModelReport {
            model: self.ordered.model.clone(),
            state: self.state(),
            permille,
            eta_ms: u32::try_from(eta.as_millis()).unwrap_or(u32::MAX),
            failures: self.failures,
            reason: self.reason.clone(),
            bytes: self.bytes(),
            idle_ms: calls.map_or(0, |calls| u64::try_from(calls.idle().as_millis()).unwrap_or(u64::MAX)),
            has_files: self.found.is_some(),
            facts: self.found.as_ref().map(|found| found.facts),
        }
    }

    /// Ends the instance. `next`: the stage that follows once its memory is free.
    pub(super) fn end_run(&mut self, next: Stage) {
        if let Some(running) = &mut self.running {
            running.run.end();
        }
        self.task = None;
        self.next = next;
        self.enter(Stage::Ending);
    }

    /// Sets whether the instance refuses new requests.
    pub(super) fn retire(&self, retires: bool) {
        if let Some(running) = &self.running {
            running.run.node.retiring.store(retires, Ordering::SeqCst);
        }
    }
}
