//! Device time, as reported to coordinators for their tenants.

use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct WorkLabel {
    pub work: Work,
}

/// For whom a device works.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(non_camel_case_types, reason = "label values are lower case on the wire")]
pub enum Work {
    /// Requests of clients.
    requests,
    /// Sequences that no request waits for, such as prefixes that are computed ahead.
    other,
}

#[derive(Debug, Default)]
pub struct UsageMetrics {
    pub device_seconds: Family<WorkLabel, Counter<f64, AtomicU64>>,
}

impl UsageMetrics {
    /// Counts a step. `requests`: the part of its time that belongs to requests.
    pub(crate) fn step(&self, took: Duration, requests: Duration) {
        let other = took.saturating_sub(requests);
        for (work, time) in [(Work::requests, requests), (Work::other, other)] {
            if !time.is_zero() {
                self.device_seconds.get_or_create(&WorkLabel { work }).inc_by(time.as_secs_f64());
            }
        }
    }

    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register(
            "kvasir_device_seconds",
            "Time of steps, times the number of devices",
            self.device_seconds.clone(),
        );
    }
}

/// Measured energy.
#[derive(Debug, Clone, Default)]
pub struct EnergyMetrics {
    steps: Family<WorkLabel, Counter<f64, AtomicU64>>,
    measured: Counter<f64, AtomicU64>,
}

/// Microjoules of a joule.
const MICRO: f64 = 1e6;

impl EnergyMetrics {
    pub(crate) fn step(&self, work: Work, energy_uj: u64) {
        if energy_uj > 0 {
            self.steps.get_or_create(&WorkLabel { work }).inc_by(energy_uj as f64 / MICRO);
        }
    }

    pub(crate) fn measured(&self, energy_uj: u64) {
        self.measured.inc_by(energy_uj as f64 / MICRO);
    }

    /// Registers the metrics of a worker whose energy is measured.
    pub fn register(&self, registry: &mut Registry) {
        registry.register("kvasir_device_joules", "Energy of steps", self.steps.clone());
        let help = "Energy of this worker, between steps too; 0 if it cannot be read";
        registry.register("kvasir_device_joules_measured", help, self.measured.clone());
    }
}
