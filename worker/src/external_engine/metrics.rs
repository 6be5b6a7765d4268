//! Metrics of an engine of another project: those of requests, under the names of the built-in engine's, and
//! those of the index of its cache.

use engine::telemetry::{EngineMetrics, SecondsHistogram};
use external::{IndexStats, Inexact};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

/// Reason why the index is not exact.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct ReasonLabel {
    reason: &'static str,
}

#[derive(Debug, Default)]
pub(super) struct ExternalMetrics {
    pub(super) requests: EngineMetrics,
    exact: Gauge,
    inexact: Family<ReasonLabel, Gauge>,
    gaps: Counter,
    restarts: Counter,
    forgotten: Counter,
    invalid: Counter,
    /// Answers with another number of cached tokens than the coordinator had predicted.
    pub(super) mispredicted: Counter,
    /// Requests that named an argument which the engine does not honour.
    pub(super) unsupported: Counter,
}

/// Sleep of an engine. Clones count the same.
#[derive(Debug, Clone, Default)]
pub(super) struct SleepMetrics {
    pub(super) asleep: Gauge,
    pub(super) sleeps: Counter,
    pub(super) wakes: Counter,
    pub(super) wake_seconds: SecondsHistogram,
}

impl SleepMetrics {
    pub(super) fn register(&self, registry: &mut Registry) {
        let Self { asleep, sleeps, wakes, wake_seconds } = self.clone();
        registry.register("kvasir_engine_asleep", "1 while the engine sleeps", asleep);
        registry.register("kvasir_engine_sleeps", "Times that the engine was put to sleep", sleeps);
        registry.register("kvasir_engine_wakes", "Times that the engine was woken", wakes);
        registry.register("kvasir_engine_wake_seconds", "Time to wake the engine", wake_seconds.0);
    }
}

impl ExternalMetrics {
    pub(super) fn register(&self, registry: &mut Registry) {
        self.requests.register_requests(registry);
        registry.register(
            "kvasir_engine_index_exact",
            "1 while the KV events name exactly what the engine's cache holds",
            self.exact.clone(),
        );
        registry.register(
            "kvasir_engine_index_inexact",
            "1 for the reason why the index is not exact",
            self.inexact.clone(),
        );
        let mut counter =
            |name: &str, help: &str, metric: &Counter| registry.register(name, help, metric.clone());
        counter("kvasir_engine_index_gaps", "Gaps in the engine's KV events", &self.gaps);
        counter(
            "kvasir_engine_index_restarts",
            "Restarts of the engine seen in its KV events",
            &self.restarts,
        );
        counter(
            "kvasir_engine_index_forgotten",
            "Times that the index was emptied with the engine still running",
            &self.forgotten,
        );
        counter(
            "kvasir_engine_index_invalid",
            "Batches of KV events that were not understood",
            &self.invalid,
        );
        counter(
            "kvasir_engine_mispredicted_requests",
            "Answers with another number of cached tokens than predicted",
            &self.mispredicted,
        );
        counter(
            "kvasir_engine_unsupported_requests",
            "Requests refused for an argument that the engine does not honour",
            &self.unsupported,
        );
    }

    /// `reason`: why the index is not exact.
    pub(super) fn update_exact(&self, reason: Option<&'static str>) {
        self.exact.set(i64::from(reason.is_none()));
        self.inexact.clear();
        if let Some(reason) = reason {
            self.inexact.get_or_create(&ReasonLabel { reason }).set(1);
        }
    }

    pub(super) fn update_index(&self, stats: &IndexStats) {
        for (counter, to) in [
            (&self.gaps, stats.gaps),
            (&self.restarts, stats.restarts),
            (&self.forgotten, stats.forgotten),
            (&self.invalid, stats.invalid),
        ] {
            counter.inc_by(to.saturating_sub(counter.get()));
        }
    }
}

/// Why the cache of a server without events is not known exactly.
pub(super) const MODELLED: &str = "modelled";
/// Why the cache of a server whose events are not followed is not known.
pub(super) const NO_EVENTS: &str = "no_events";

/// Value of the label for a reason of the index.
pub(super) fn reason_of(inexact: Inexact) -> &'static str {
    inexact.name()
}
