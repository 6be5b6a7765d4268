//! Metrics of weight distribution: chunks fetched from and sent to other workers.

use parking_lot::Mutex;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use proto::ids::NodeId;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Label of a source that sent wrong bytes.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct SourceLabel {
    /// Its node, or its address if the node is unknown.
    pub source: String,
}

/// Metrics of weight distribution. Clones share their values.
#[derive(Debug, Clone, Default)]
pub struct ShippingMetrics {
    /// Bytes of chunks received from other workers, refused ones included.
    pub fetched: Counter,
    /// Bytes of chunks sent to other workers.
    pub served: Counter,
    /// Requests of other workers that are being served.
    pub serving: Gauge,
    /// Chunks refused because their hash is wrong.
    pub refused: Family<SourceLabel, Counter>,
    /// Sources dropped for sending too many such chunks.
    pub struck: Family<SourceLabel, Counter>,
    /// Bytes of the model, or of its layers, that this worker needs.
    pub needed: Gauge,
    /// Bytes of these that are in the store.
    pub present: Gauge,
    /// Bytes of the shard store.
    pub store: Gauge,
    dishonest: Arc<Mutex<BTreeSet<NodeId>>>,
}

impl ShippingMetrics {
    /// Metrics of one of several models: counters are shared, the needed and the present bytes are its own.
    pub fn of_model(&self) -> Self {
        Self { needed: Gauge::default(), present: Gauge::default(), ..self.clone() }
    }

    pub fn fetched(&self, bytes: u64) {
        self.fetched.inc_by(bytes);
    }

    /// Counts a request of another worker as being served until the returned guard is dropped.
    pub fn serves(&self) -> Serving {
        self.serving.inc();
        Serving(self.serving.clone())
    }

    pub fn served(&self, bytes: u64) {
        self.served.inc_by(bytes);
    }

    /// Sets the needed and the present bytes.
    pub fn set_needed(&self, needed: u64, present: u64) {
        self.needed.set(needed.cast_signed());
        self.present.set(present.cast_signed());
    }

    pub fn stored(&self, bytes: u64) {
        self.present.inc_by(bytes.cast_signed());
    }

    pub fn refused(&self, source: &str) {
        self.refused.get_or_create(&SourceLabel { source: source.to_owned() }).inc();
    }

    pub fn struck(&self, source: &str, node: Option<&NodeId>) {
        self.struck.get_or_create(&SourceLabel { source: source.to_owned() }).inc();
        self.dishonest.lock().extend(node.cloned());
    }

    /// Workers that were dropped for sending too many chunks with wrong hashes.
    pub fn dishonest(&self) -> Vec<NodeId> {
        self.dishonest.lock().iter().cloned().collect()
    }

    pub fn register(&self, registry: &mut Registry) {
        let mut counter =
            |name: &str, help: &str, metric: &Counter| registry.register(name, help, metric.clone());
        counter(
            "kvasir_shard_fetched_bytes",
            "Bytes of model chunks received from other workers",
            &self.fetched,
        );
        counter("kvasir_shard_served_bytes", "Bytes of model chunks sent to other workers", &self.served);
        registry.register(
            "kvasir_shard_chunks_refused",
            "Received chunks whose bytes do not match their names",
            self.refused.clone(),
        );
        registry.register(
            "kvasir_shard_sources_struck",
            "Sources that were dropped after three wrong chunks",
            self.struck.clone(),
        );
        let mut gauge =
            |name: &str, help: &str, metric: &Gauge| registry.register(name, help, metric.clone());
        gauge(
            "kvasir_shard_serving",
            "Requests for chunks by other workers that are being served",
            &self.serving,
        );
        gauge(
            "kvasir_shard_wanted_bytes",
            "Bytes of the chunks that this worker needs of a fetched model",
            &self.needed,
        );
        gauge("kvasir_shard_present_bytes", "Bytes of these chunks that this worker has", &self.present);
        gauge("kvasir_shard_store_bytes", "Bytes of the shard store of this host", &self.store);
    }
}

/// Guard of [`ShippingMetrics::serves`].
#[derive(Debug)]
pub struct Serving(Gauge);

impl Drop for Serving {
    fn drop(&mut self) {
        self.0.dec();
    }
}
