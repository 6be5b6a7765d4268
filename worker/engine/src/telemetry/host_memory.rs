//! Metrics of a host that shares its memory with its GPU.

use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

#[derive(Debug, Clone, Default)]
pub struct HostMetrics {
    /// Bytes that can be allocated.
    pub available: Gauge,
    /// 1 while no new work is taken because memory is short.
    pub short: Gauge,
}

impl HostMetrics {
    pub fn register(&self, registry: &mut Registry) {
        let available = "Available bytes of a host that shares its memory with its GPU";
        registry.register("kvasir_host_available_bytes", available, self.available.clone());
        let short = "1 while free memory is below the floor, so that no new work is accepted";
        registry.register("kvasir_host_memory_short", short, self.short.clone());
    }
}
