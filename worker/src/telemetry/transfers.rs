//! What is pulled from other workers and sent to them.

use super::SecondsHistogram;
use crate::pull::PullFailure;
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use proto::message::PullReport;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

/// Label of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct DirectionLabel {
    pub direction: Direction,
}

/// Which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(non_camel_case_types, reason = "label values are lower case on the wire")]
pub enum Direction {
    pulled,
    /// Sent to one that pulls.
    sent,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct FailureLabel {
    /// Why, as [`PullFailure::name`] says it.
    pub reason: &'static str,
}

/// Metrics of pulls. Clones count together.
#[derive(Debug, Clone, Default)]
pub struct TransferMetrics {
    /// Bytes of pieces.
    pub bytes: Family<DirectionLabel, Counter>,
    /// Seconds from the beginning of a pull until what it brought can be used.
    pub seconds: SecondsHistogram,
    /// Pulls that brought less than was hoped for, by why.
    pub failures: Family<FailureLabel, Counter>,
    /// Bytes per second of recent pulls, once their holders had begun to send.
    pub rate: Gauge<f64, AtomicU64>,
    failed: Counter,
}

impl TransferMetrics {
    /// Bytes so far.
    pub fn bytes(&self, direction: Direction) -> u64 {
        self.bytes.get_or_create(&DirectionLabel { direction }).get()
    }

    /// Pulls so far that failed for this reason.
    pub fn failures(&self, why: PullFailure) -> u64 {
        self.failures.get_or_create(&FailureLabel { reason: why.name() }).get()
    }

    pub(crate) fn moved(&self, direction: Direction, bytes: u64) {
        self.bytes.get_or_create(&DirectionLabel { direction }).inc_by(bytes);
    }

    pub(crate) fn succeeded(&self, took: Duration) {
        self.seconds.0.observe(took.as_secs_f64());
    }

    /// So many bytes took so long to come.
    pub(crate) fn travelled(&self, bytes: u64, took: Duration) {
        let (old, new) = (self.rate.get(), bytes as f64 / took.as_secs_f64().max(1e-6));
        self.rate.set(if old == 0.0 { new } else { old + 0.2 * (new - old) });
    }

    pub(crate) fn failed(&self, why: PullFailure) {
        self.failures.get_or_create(&FailureLabel { reason: why.name() }).inc();
        self.failed.inc();
    }

    pub fn report(&self) -> PullReport {
        PullReport {
            rate: self.rate.get() as f32,
            pulled_bytes: self.bytes(Direction::pulled),
            sent_bytes: self.bytes(Direction::sent),
            failures: self.failed.get(),
        }
    }

    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register(
            "kvasir_block_transfer_bytes",
            "Bytes of KV and states pulled from other workers and sent to them",
            self.bytes.clone(),
        );
        registry.register(
            "kvasir_block_transfer_seconds",
            "From the beginning of a pull until it can be used",
            self.seconds.0.clone(),
        );
        registry.register(
            "kvasir_block_transfer_failures",
            "Pulls that brought less than was hoped for",
            self.failures.clone(),
        );
        registry.register(
            "kvasir_block_transfer_rate_bytes",
            "Bytes per second of recent pulls, once their holders had begun to send",
            self.rate.clone(),
        );
    }
}
