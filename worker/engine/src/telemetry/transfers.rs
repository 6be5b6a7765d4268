//! Metrics of KV transfers from and to other workers.

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

/// Label of transferred bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct DirectionLabel {
    pub direction: Direction,
}

/// Direction of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(non_camel_case_types, reason = "label values are lower case on the wire")]
pub enum Direction {
    pulled,
    /// Sent to a worker that requested it.
    sent,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct FailureLabel {
    /// The reason, as [`PullFailure::name`].
    pub reason: &'static str,
}

/// Metrics of KV transfers. Clones share their values.
#[derive(Debug, Clone, Default)]
pub struct TransferMetrics {
    /// Bytes of pieces.
    pub bytes: Family<DirectionLabel, Counter>,
    /// Seconds from the start of a transfer until its result can be used.
    pub seconds: SecondsHistogram,
    /// Transfers that delivered less than expected, by reason.
    pub failures: Family<FailureLabel, Counter>,
    /// Moving average of bytes per second, measured from when the holder starts to send. 0 if not measured.
    pub rate: Gauge<f64, AtomicU64>,
    failed: Counter,
}

impl TransferMetrics {
    /// Bytes so far.
    pub fn bytes(&self, direction: Direction) -> u64 {
        self.bytes.get_or_create(&DirectionLabel { direction }).get()
    }

    /// Transfers that failed for this reason so far.
    pub fn failures(&self, failure: PullFailure) -> u64 {
        self.failures.get_or_create(&FailureLabel { reason: failure.name() }).get()
    }

    pub fn moved(&self, direction: Direction, bytes: u64) {
        self.bytes.get_or_create(&DirectionLabel { direction }).inc_by(bytes);
    }

    pub(crate) fn succeeded(&self, took: Duration) {
        self.seconds.0.observe(took.as_secs_f64());
    }

    /// Updates the transfer rate.
    pub(crate) fn travelled(&self, bytes: u64, took: Duration) {
        let (old, new) = (self.rate.get(), bytes as f64 / took.as_secs_f64().max(1e-6));
        self.rate.set(if old == 0.0 { new } else { old + 0.2 * (new - old) });
    }

    pub(crate) fn failed(&self, failure: PullFailure) {
        self.failures.get_or_create(&FailureLabel { reason: failure.name() }).inc();
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
            "Time from the beginning of a pull until the prefix can be used",
            self.seconds.0.clone(),
        );
        registry.register(
            "kvasir_block_transfer_failures",
            "Pulls that brought less than expected, by reason",
            self.failures.clone(),
        );
        registry.register(
            "kvasir_block_transfer_rate_bytes",
            "Bytes per second of recent pulls, from the first byte on",
            self.rate.clone(),
        );
    }
}
