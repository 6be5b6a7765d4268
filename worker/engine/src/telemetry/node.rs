//! Metrics of the process: its log, its certificates, its CPUs.

use pki::Identity;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::registry::Registry;
use std::fmt;
use std::sync::LazyLock;
use std::sync::atomic::AtomicU64;
use std::time::{SystemTime, UNIX_EPOCH};

/// 1 once the system has refused the thread that keeps a CPU awake. From then on CPUs sleep while stages of
/// this process wait.
pub static CPUS_SLEEP: LazyLock<Gauge> = LazyLock::new(Gauge::default);

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct CertificateLabel {
    /// The certificate: `node` or `authority`.
    pub certificate: &'static str,
}

#[derive(Debug, Clone, Default)]
pub struct NodeMetrics {
    /// Dropped log lines.
    pub log_dropped: Counter,
    /// Days until a certificate expires.
    pub certificate_days: Family<CertificateLabel, Gauge<f64, AtomicU64>>,
    /// Share of a certificate's lifetime that is left.
    pub certificate_lifetime: Family<CertificateLabel, Gauge<f64, AtomicU64>>,
    /// The wall clock in seconds since 1970.
    pub time: Gauge<f64, AtomicU64>,
}

impl NodeMetrics {
    pub fn register(&self, registry: &mut Registry) {
        let asleep = "1 if the system refuses SCHED_IDLE, so that CPUs sleep while a stage waits";
        registry.register("kvasir_stage_cpus_sleep", asleep, CPUS_SLEEP.clone());
        let dropped = "Log lines that were dropped because the reader was too slow or had closed the pipe";
        registry.register("kvasir_worker_log_lines_dropped", dropped, self.log_dropped.clone());
        let days =
            "Days until the certificate of the node or of its authority expires; negative if it has expired";
        registry.register("kvasir_worker_certificate_days_left", days, self.certificate_days.clone());
        let lifetime = "Remaining share of the certificate's lifetime, 1 to 0";
        registry.register("kvasir_worker_certificate_life_left", lifetime, self.certificate_lifetime.clone());
        let time = "The worker's wall clock in seconds since 1970";
        registry.register("kvasir_worker_time_seconds", time, self.time.clone());
        let build = Family::<[(&str, &str); 1], Gauge>::default();
        build.get_or_create(&[("version", env!("CARGO_PKG_VERSION"))]).set(1);
        registry.register("kvasir_worker_build_info", "1 for the worker's version", build);
        registry.register_collector(Box::new(Checks));
    }

    pub fn update(&self, identity: &Identity) {
        self.log_dropped.inc_by(proto::log::dropped().saturating_sub(self.log_dropped.get()));
        let now = SystemTime::now();
        self.time.set(now.duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64()));
        // An unreadable certificate was already refused when it was loaded.
        let Ok(validities) = identity.validities() else { return };
        for (certificate, validity) in validities.named() {
            let label = CertificateLabel { certificate };
            self.certificate_days.get_or_create(&label).set(validity.days_left(now));
            self.certificate_lifetime.get_or_create(&label).set(validity.lifetime_left(now));
        }
    }
}

/// The latest findings about this machine, read on every scrape.
#[derive(Debug)]
struct Checks;

impl Collector for Checks {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let help = "Findings about the worker's machine: 0 ok, 1 warning, 2 problem";
        let mut family = encoder.encode_descriptor("kvasir_worker_check", help, None, MetricType::Gauge)?;
        for (check, severity) in doctor::latest() {
            ConstGauge::new(severity.number()).encode(family.encode_family(&[("check", check)])?)?;
        }
        Ok(())
    }
}
