//! Metrics of images in prompts.

use super::SecondsHistogram;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

/// Metrics of encoded images. Clones share their values.
#[derive(Debug, Clone, Default)]
pub struct ImageMetrics {
    /// Images that the tower of this worker has encoded.
    pub encoded: Counter,
    /// Images that another worker has encoded for this one.
    pub remote: Counter,
    /// Images that no other worker has encoded, although some are to.
    pub fallbacks: Counter,
    /// Images that a request had from the cache.
    pub hits: Counter,
    /// Requests that waited for an image which another request had encoded.
    pub shared: Counter,
    /// Seconds to encode an image.
    pub seconds: SecondsHistogram,
    /// Bytes of the cache.
    pub bytes: Gauge,
}

impl ImageMetrics {
    pub fn register(&self, registry: &mut Registry) {
        registry.register("kvasir_images_encoded", "Images encoded here", self.encoded.clone());
        registry.register(
            "kvasir_images_encoded_elsewhere",
            "Images that another worker has encoded for this one",
            self.remote.clone(),
        );
        registry.register(
            "kvasir_image_encoder_fallbacks",
            "Images that no worker with the role encode has encoded, although the cluster has one",
            self.fallbacks.clone(),
        );
        registry.register("kvasir_image_cache_hits", "Images found in the cache", self.hits.clone());
        registry.register(
            "kvasir_image_encodings_shared",
            "Requests that waited for an image which another request had encoded",
            self.shared.clone(),
        );
        registry.register("kvasir_image_encode_seconds", "Time to encode an image", self.seconds.0.clone());
        registry.register("kvasir_image_cache_bytes", "Bytes of encoded images", self.bytes.clone());
    }
}
