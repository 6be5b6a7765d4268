//! Metrics of a replica's stages, as its first stage measures them.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use std::sync::atomic::AtomicU64;

/// Counters of a replica's stages since the replica was formed.
#[derive(Debug, Clone, Default)]
pub struct StageCounts {
    pub stages: Vec<StageCount>,
    /// For each step that was alone in the pipeline: seconds of network time, summed over all hops. Reset by each
    /// read.
    pub hops: Vec<f64>,
    /// Number of steps in flight at later stages.
    pub under_way: usize,
    /// Rows whose logits the first and the last stage computed together.
    pub divided: u64,
}

/// Counters of one stage; see [`StageCounts`].
#[derive(Debug, Clone, Copy, Default)]
pub struct StageCount {
    /// Bytes received from the previous stage.
    pub bytes: u64,
    /// Seconds of computing.
    pub computed: f64,
    /// Seconds without a step.
    pub stalled: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct StageLabel {
    /// Index of the stage; the first stage is 0.
    pub stage: u32,
}

type Seconds = Counter<f64, AtomicU64>;

/// Metrics of a replica's stages. Empty if the model runs on one worker.
#[derive(Debug)]
pub struct ShardMetrics {
    /// Bytes that a stage received from the previous one; the first stage from the last one.
    pub bytes: Family<StageLabel, Counter>,
    /// Seconds of computing.
    pub busy: Family<StageLabel, Seconds>,
    /// Seconds of waiting for a step; at the first stage for a result.
    pub stalled: Family<StageLabel, Seconds>,
    /// Seconds of network time, summed over all hops, of steps that were alone in the pipeline.
    pub hops: Histogram,
    /// Steps in flight at later stages.
    pub under_way: Gauge,
    /// Rows whose logits the first and the last stage computed together.
    pub divided: Counter,
}

impl Default for ShardMetrics {
    fn default() -> Self {
        let buckets =
            [50e-6, 100e-6, 200e-6, 400e-6, 800e-6, 0.0016, 0.0032, 0.0064, 0.0125, 0.025, 0.05, 0.1, 1.0];
        Self {
            bytes: Family::default(),
            busy: Family::default(),
            stalled: Family::default(),
            hops: Histogram::new(buckets),
            under_way: Gauge::default(),
            divided: Counter::default(),
        }
    }
}

impl ShardMetrics {
    pub(crate) fn update(&self, counts: &StageCounts) {
        for (stage, count) in (0..).zip(&counts.stages) {
            let label = StageLabel { stage };
            let bytes = self.bytes.get_or_create(&label);
            bytes.inc_by(count.bytes.saturating_sub(bytes.get()));
            for (family, to) in [(&self.busy, count.computed), (&self.stalled, count.stalled)] {
                let seconds = family.get_or_create(&label);
                seconds.inc_by((to - seconds.get()).max(0.0));
            }
        }
        counts.hops.iter().for_each(|seconds| self.hops.observe(*seconds));
        self.under_way.set(counts.under_way as i64);
        self.divided.inc_by(counts.divided.saturating_sub(self.divided.get()));
    }

    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register(
            "kvasir_shard_received_bytes",
            "Bytes that a stage has received from the previous stage",
            self.bytes.clone(),
        );
        registry.register(
            "kvasir_shard_busy_seconds",
            "Seconds that a stage spent computing",
            self.busy.clone(),
        );
        registry.register(
            "kvasir_shard_stalled_seconds",
            "Seconds that a stage spent waiting for a step",
            self.stalled.clone(),
        );
        registry.register(
            "kvasir_shard_hop_seconds",
            "Time of all hops of a step between stages",
            self.hops.clone(),
        );
        registry.register(
            "kvasir_shard_steps_under_way",
            "Steps in flight at later stages",
            self.under_way.clone(),
        );
        registry.register(
            "kvasir_shard_divided_heads",
            "Rows whose logits the first and the last stage computed together",
            self.divided.clone(),
        );
    }
}
