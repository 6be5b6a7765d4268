//! Metrics of sessions of operations.

use super::families::{Histograms, One, Two, WAIT, one, registered};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use proto::operation::Operation;
use router::balancer::WorkerView;
use std::borrow::Cow;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

#[derive(Debug)]
pub struct Operations {
    open: Family<One, Gauge>,
    ended: Family<Two, Counter>,
    audio_seconds: Family<One, Counter<f64, AtomicU64>>,
    opening: Histograms,
    workers: Family<One, Gauge>,
}

/// A session, counted as open until this is dropped.
#[derive(Debug)]
pub struct Counting<'a> {
    operations: &'a Operations,
    operation: Operation,
    over: bool,
}

impl Operations {
    pub(super) fn register(r: &mut Registry) -> Self {
        Self {
            open: registered(r, "kvasir_operation_client_sessions", "Open sessions and calls of operations"),
            ended: registered(
                r,
                "kvasir_operation_client_sessions_ended",
                "Ended sessions and calls of operations, by reason",
            ),
            audio_seconds: registered(
                r,
                "kvasir_operation_client_audio_seconds",
                "Seconds of audio that clients have sent",
            ),
            opening: WAIT.histograms(
                r,
                "kvasir_operation_open_seconds",
                "Time until a worker had opened a session",
            ),
            workers: registered(r, "kvasir_operation_workers", "Workers that offer an operation"),
        }
    }

    /// Records the time to open a session at a worker.
    pub fn opened(&self, operation: Operation, took: Duration) {
        let seconds: Histogram = self.opening.get_or_create_owned(&one("operation", operation.name()));
        seconds.observe(took.as_secs_f64());
    }

    pub fn session(&self, operation: Operation) -> Counting<'_> {
        self.open.get_or_create(&one("operation", operation.name())).inc();
        Counting { operations: self, operation, over: false }
    }

    /// Updates the number of workers that offer each operation.
    pub(super) fn update(&self, workers: &[WorkerView]) {
        for operation in Operation::ALL {
            let offers =
                |view: &&WorkerView| view.operations.iter().any(|offer| offer.operation == operation);
            let count = workers.iter().filter(offers).count();
            let gauge = self.workers.get_or_create_owned(&one("operation", operation.name()));
            gauge.set(i64::try_from(count).unwrap_or(i64::MAX));
        }
    }

    fn end(&self, operation: Operation, reason: &'static str) {
        self.open.get_or_create(&one("operation", operation.name())).dec();
        let labels = [("operation", Cow::Borrowed(operation.name())), ("reason", Cow::Borrowed(reason))];
        self.ended.get_or_create(&labels).inc();
    }
}

impl Counting<'_> {
    /// Counts the end of a session. `audio_seconds`: seconds of audio.
    pub fn ended(mut self, reason: &'static str, audio_seconds: f64) {
        self.over = true;
        self.operations.end(self.operation, reason);
        self.operations
            .audio_seconds
            .get_or_create(&one("operation", self.operation.name()))
            .inc_by(audio_seconds);
    }
}

impl Drop for Counting<'_> {
    fn drop(&mut self) {
        if !self.over {
            // The task was dropped before the session ended.
            self.operations.end(self.operation, "gone");
        }
    }
}
