//! Metrics of the sessions of operations: their number, their ends and their cost.

use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use proto::operation::{Operation, OperationError};
use std::sync::atomic::AtomicU64;
use std::time::Duration;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct OperationLabel {
    operation: &'static str,
}

impl OperationLabel {
    pub(crate) fn new(operation: Operation) -> Self {
        Self { operation: operation.name() }
    }
}

/// Label of the end of a session.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SessionEndLabel {
    operation: &'static str,
    end: SessionEnd,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(non_camel_case_types, reason = "label values are lower case on the wire")]
pub enum SessionEnd {
    finished,
    /// The client left or stopped reading.
    cut,
    /// No input for too long.
    idle,
    /// A frame was invalid, or a limit was exceeded.
    refused,
    error,
}

/// Label of sessions that were refused.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SessionRefusedLabel {
    operation: &'static str,
    reason: &'static str,
}

/// Buckets in seconds, 100 us to 5 s.
#[derive(Debug, Clone, Copy, Default)]
struct ComputeBuckets;

impl MetricConstructor<Histogram> for ComputeBuckets {
    fn new_metric(&self) -> Histogram {
        Histogram::new([
            1e-4, 2.5e-4, 5e-4, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0,
        ])
    }
}

/// Metrics of operations. Clones share their values.
#[derive(Debug, Clone)]
pub struct OperationMetrics {
    pub(crate) sessions: Family<OperationLabel, Gauge>,
    ended: Family<SessionEndLabel, Counter>,
    refused: Family<SessionRefusedLabel, Counter>,
    audio: Family<OperationLabel, Counter<f64, AtomicU64>>,
    compute: Family<OperationLabel, Histogram, ComputeBuckets>,
}

impl Default for OperationMetrics {
    fn default() -> Self {
        Self {
            sessions: Family::default(),
            ended: Family::default(),
            refused: Family::default(),
            audio: Family::default(),
            compute: Family::new_with_constructor(ComputeBuckets),
        }
    }
}

impl OperationMetrics {
    pub(crate) fn ended(&self, operation: Operation, end: SessionEnd) {
        self.ended.get_or_create(&SessionEndLabel { operation: operation.name(), end }).inc();
    }

    /// Counts a session that was refused.
    pub fn refused(&self, operation: Operation, error: &OperationError) {
        let reason = match error {
            OperationError::NotServed { .. } => "not_served",
            OperationError::ModelNotFound { .. } => "model_not_found",
            OperationError::InvalidField { .. } => "invalid_field",
            OperationError::TooManySessions { .. } => "too_many_sessions",
            OperationError::Draining => "draining",
            OperationError::Idle { .. }
            | OperationError::TooLong { .. }
            | OperationError::Internal
            | OperationError::NotFinite => "internal",
        };
        self.refused.get_or_create(&SessionRefusedLabel { operation: operation.name(), reason }).inc();
    }

    pub(crate) fn computed(&self, operation: Operation, took: Duration, seconds_of_sound: f64) {
        let label = OperationLabel::new(operation);
        self.audio.get_or_create(&label).inc_by(seconds_of_sound);
        self.compute.get_or_create(&label).observe(took.as_secs_f64());
    }

    pub fn register(&self, registry: &mut Registry) {
        let sessions = "Open sessions of an operation";
        registry.register("kvasir_operation_sessions", sessions, self.sessions.clone());
        let ended = "Ended sessions of an operation, by the way they ended";
        registry.register("kvasir_operation_sessions_ended", ended, self.ended.clone());
        let refused = "Refused sessions of an operation, by reason";
        registry.register("kvasir_operation_refused", refused, self.refused.clone());
        let audio = "Seconds of audio that sessions of an operation have received or spoken";
        registry.register("kvasir_operation_audio_seconds", audio, self.audio.clone());
        let compute = "Time to compute the results of one piece of audio";
        registry.register("kvasir_operation_compute_seconds", compute, self.compute.clone());
    }
}
