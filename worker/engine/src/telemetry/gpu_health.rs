//! Metrics of the GPUs' health. A value that a GPU does not report is not exported.

use cuda::nvml::{CLOCK_REASONS, GpuHealth};
use parking_lot::Mutex;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Interval between two readings.
pub const GPU_HEALTH_EVERY: Duration = Duration::from_secs(5);
/// Older readings are not exported: the library hangs.
const STALE: Duration = GPU_HEALTH_EVERY.saturating_mul(3);

/// The latest reading of the GPUs. Empty until there is one.
#[derive(Debug, Clone, Default)]
pub struct GpuHealthMetrics(Arc<Mutex<Option<Reading>>>);

#[derive(Debug)]
struct Reading {
    at: Instant,
    gpus: Vec<GpuHealth>,
}

impl GpuHealthMetrics {
    /// Sets the reading that was begun at this time.
    pub fn set(&self, at: Instant, gpus: Vec<GpuHealth>) {
        *self.0.lock() = Some(Reading { at, gpus });
    }

    /// The GPUs with their current values. A GPU whose values are too old is as one that is lost.
    fn at(&self, now: Instant) -> Vec<GpuHealth> {
        let latest = self.0.lock();
        let Some(Reading { at, gpus }) = &*latest else { return Vec::new() };
        let stale = now.saturating_duration_since(*at) > STALE;
        let current = |gpu: &GpuHealth| match stale {
            true => GpuHealth { index: gpu.index, lost: true, ..GpuHealth::default() },
            false => gpu.clone(),
        };
        gpus.iter().map(current).collect()
    }
}

impl Collector for GpuHealthMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let gpus: Vec<(String, GpuHealth)> =
            self.at(Instant::now()).into_iter().map(|gpu| (gpu.index.to_string(), gpu)).collect();
        if gpus.is_empty() {
            return Ok(());
        }
        let mut gauge = |name: &str, help: &str, of: &dyn Fn(&GpuHealth) -> Option<f64>| {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for (index, gpu) in &gpus {
                if let Some(value) = of(gpu) {
                    let labels = [("gpu", index.as_str())];
                    ConstGauge::new(value).encode(family.encode_family(&labels)?)?;
                }
            }
            Ok(())
        };
        let readable = "1 while the GPU's values can be read, 0 if it is lost or NVML does not answer";
        gauge("kvasir_gpu_readable", readable, &|gpu| Some(f64::from(u8::from(!gpu.lost))))?;
        gauge("kvasir_gpu_power_watts", "Power", &|gpu| gpu.power_watts)?;
        gauge("kvasir_gpu_power_limit_watts", "Enforced power limit", &|gpu| gpu.power_limit_watts)?;
        gauge("kvasir_gpu_temperature_celsius", "Temperature", &|gpu| {
            gpu.temperature_celsius.map(f64::from)
        })?;
        let slowdown = "Temperature from which on the GPU lowers its clocks";
        gauge("kvasir_gpu_slowdown_celsius", slowdown, &|gpu| gpu.slowdown_celsius.map(f64::from))?;
        let state = "Performance state, 0 (fastest) to 15";
        gauge("kvasir_gpu_performance_state", state, &|gpu| gpu.performance_state.map(f64::from))?;
        let generation = "Generation of the PCIe link; idle GPUs lower it";
        gauge("kvasir_gpu_pcie_generation", generation, &|gpu| gpu.pcie_generation.map(f64::from))?;
        let most = "Highest generation of the PCIe link that GPU and slot support";
        gauge("kvasir_gpu_pcie_generation_max", most, &|gpu| gpu.pcie_generation_max.map(f64::from))?;
        gauge("kvasir_gpu_pcie_width", "Lanes of the PCIe link", &|gpu| gpu.pcie_width.map(f64::from))?;
        let most = "Most lanes of the PCIe link that GPU and slot support";
        gauge("kvasir_gpu_pcie_width_max", most, &|gpu| gpu.pcie_width_max.map(f64::from))?;
        labelled(&mut encoder, &gpus)
    }
}

/// The families with a second label.
fn labelled(encoder: &mut DescriptorEncoder<'_>, gpus: &[(String, GpuHealth)]) -> fmt::Result {
    let hertz = |mhz: Option<u32>| mhz.map(|mhz| f64::from(mhz) * 1e6);
    let clocks = |gpu: &GpuHealth| [("sm", hertz(gpu.sm_clock_mhz)), ("memory", hertz(gpu.memory_clock_mhz))];
    let most =
        |gpu: &GpuHealth| [("sm", hertz(gpu.sm_clock_max_mhz)), ("memory", hertz(gpu.memory_clock_max_mhz))];
    for (name, help, of) in [
        (
            "kvasir_gpu_clock_hertz",
            "Clock",
            &clocks as &dyn Fn(&GpuHealth) -> [(&'static str, Option<f64>); 2],
        ),
        ("kvasir_gpu_clock_max_hertz", "Highest clock", &most),
    ] {
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (index, gpu) in gpus {
            for (clock, value) in of(gpu) {
                if let Some(value) = value {
                    let labels = [("gpu", index.as_str()), ("clock", clock)];
                    ConstGauge::new(value).encode(family.encode_family(&labels)?)?;
                }
            }
        }
    }
    let help = "1 while this reason lowers the clocks";
    let mut family = encoder.encode_descriptor("kvasir_gpu_throttled", help, None, MetricType::Gauge)?;
    for (index, gpu) in gpus {
        for reason in CLOCK_REASONS {
            if let Some(active) = gpu.slowed_by(reason) {
                let labels = [("gpu", index.as_str()), ("reason", reason.name)];
                ConstGauge::new(i64::from(active)).encode(family.encode_family(&labels)?)?;
            }
        }
    }
    let replays = "Packets that were sent again over PCIe, since the driver was loaded";
    let mut family =
        encoder.encode_descriptor("kvasir_gpu_pcie_replays", replays, None, MetricType::Counter)?;
    for (index, gpu) in gpus {
        if let Some(replays) = gpu.pcie_replays {
            let labels = [("gpu", index.as_str())];
            ConstCounter::new(u64::from(replays)).encode(family.encode_family(&labels)?)?;
        }
    }
    let help = "Errors of an NVLink";
    let mut family =
        encoder.encode_descriptor("kvasir_gpu_nvlink_errors", help, None, MetricType::Counter)?;
    for (index, gpu) in gpus {
        for (link, error, count) in &gpu.nvlink_errors {
            let link = link.to_string();
            let labels = [("gpu", index.as_str()), ("link", link.as_str()), ("error", *error)];
            ConstCounter::new(*count).encode(family.encode_family(&labels)?)?;
        }
    }
    let help = "Errors of the GPU's memory, since the driver was loaded";
    let mut family = encoder.encode_descriptor("kvasir_gpu_ecc_errors", help, None, MetricType::Counter)?;
    for (index, gpu) in gpus {
        for (error, count) in &gpu.ecc_errors {
            let labels = [("gpu", index.as_str()), ("error", *error)];
            ConstCounter::new(*count).encode(family.encode_family(&labels)?)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::EngineMetrics;
    use prometheus_client::registry::Registry;

    fn text(metrics: &GpuHealthMetrics) -> String {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(metrics.clone()));
        EngineMetrics::text(&registry)
    }

    #[test]
    fn reported_values_are_exported_and_no_others() {
        let metrics = GpuHealthMetrics::default();
        assert_eq!(text(&metrics), "# EOF\n");
        let gpu = GpuHealth {
            power_watts: Some(45.5),
            sm_clock_mhz: Some(2400),
            clock_reasons: Some(0x20),
            pcie_replays: Some(7),
            ecc_errors: vec![("corrected", 5)],
            ..GpuHealth::default()
        };
        metrics.set(Instant::now(), vec![gpu]);
        let text = text(&metrics);
        for line in [
            "kvasir_gpu_readable{gpu=\"0\"} 1.0",
            "kvasir_gpu_power_watts{gpu=\"0\"} 45.5",
            "kvasir_gpu_clock_hertz{gpu=\"0\",clock=\"sm\"} 2400000000.0",
            "kvasir_gpu_throttled{gpu=\"0\",reason=\"sw_thermal\"} 1",
            "kvasir_gpu_throttled{gpu=\"0\",reason=\"idle\"} 0",
            "kvasir_gpu_pcie_replays_total{gpu=\"0\"} 7",
            "kvasir_gpu_ecc_errors_total{gpu=\"0\",error=\"corrected\"} 5",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
        for absent in
            ["kvasir_gpu_temperature_celsius{", "clock=\"memory\"", "kvasir_gpu_nvlink_errors_total{"]
        {
            assert!(!text.contains(absent), "{absent}\n{text}");
        }
    }

    #[test]
    fn values_of_a_library_that_hangs_end() {
        let metrics = GpuHealthMetrics::default();
        let start = Instant::now();
        let gpu = GpuHealth { index: 3, power_watts: Some(1.0), ..GpuHealth::default() };
        metrics.set(start, vec![gpu.clone()]);
        assert_eq!(metrics.at(start + STALE), [gpu]);
        let lost = GpuHealth { index: 3, lost: true, ..GpuHealth::default() };
        assert_eq!(metrics.at(start + STALE + Duration::from_millis(1)), [lost]);
    }
}
