//! The engine's metrics: vLLM's names where existing dashboards query them, `kvasir_*` for all others.

use crate::tiers::TierStats;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use std::sync::atomic::AtomicU64;

mod device;
mod gpu_health;
mod grammar;
mod host_memory;
mod images;
mod node;
mod shards;
mod traces;
mod transfers;
mod usage;
mod weight_distribution;

pub use device::{DeviceMetrics, Launched, LaunchedLabel, OpLabel};
pub use gpu_health::{GPU_HEALTH_EVERY, GpuHealthMetrics};
pub use grammar::{GrammarMetrics, MaskHistogram, Refused, RefusedLabel};
pub use host_memory::HostMetrics;
pub use images::ImageMetrics;
pub use node::CPUS_SLEEP;
pub use node::{CertificateLabel, NodeMetrics};
pub use shards::{ShardMetrics, StageLabel};
pub use shards::{StageCount, StageCounts};
pub use transfers::{Direction, DirectionLabel, FailureLabel, TransferMetrics};
pub use usage::{EnergyMetrics, UsageMetrics, Work, WorkLabel};
pub use weight_distribution::{ShippingMetrics, SourceLabel};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct FinishedLabel {
    pub finished_reason: Reason,
}

/// Why a request ended, in vLLM's terms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(non_camel_case_types, reason = "label values are lower case on the wire")]
pub enum Reason {
    /// End of sequence, stop token or stop string.
    stop,
    length,
    abort,
    error,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct LookupLabel {
    /// Why the lookup stopped: the first word of the reason in the response.
    pub stop: &'static str,
}

/// Label of a use of the arena.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct GroupLabel {
    /// The kind of cache: `full`, `sliding` or `state`.
    pub group: &'static str,
}

/// Label of a tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct TierLabel {
    pub tier: Tier,
}

/// A tier for resume points below the arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(non_camel_case_types, reason = "label values are lower case on the wire")]
pub enum Tier {
    host,
    disk,
}

/// Metrics of the tiers below the arena.
#[derive(Debug, Default)]
pub struct TierMetrics {
    /// Bytes in use.
    pub bytes: Family<TierLabel, Gauge>,
    /// Requests that got a part of their prompt from a tier.
    pub hits: Counter,
    /// Tokens that these requests did not compute.
    pub hit_tokens: Counter,
    pub loads: Counter,
    /// Files that were damaged or missing.
    pub load_failures: Counter,
    /// Pieces that could not be written to a file.
    pub write_failures: Counter,
    /// Ended sequences that were not copied.
    pub dropped: Counter,
}

impl TierMetrics {
    pub(crate) fn update(&self, stats: &TierStats, counts: &TieringCounts) {
        for (tier, bytes) in [(Tier::host, stats.host_bytes), (Tier::disk, stats.disk_bytes)] {
            self.bytes.get_or_create(&TierLabel { tier }).set(bytes as i64);
        }
        for (counter, to) in [
            (&self.hits, counts.hits),
            (&self.hit_tokens, counts.hit_tokens),
            (&self.dropped, counts.dropped),
            (&self.loads, stats.loads),
            (&self.load_failures, stats.load_failures),
            (&self.write_failures, stats.write_failures),
        ] {
            counter.inc_by(to.saturating_sub(counter.get()));
        }
    }

    fn register(&self, registry: &mut Registry) {
        registry.register("kvasir_tier_bytes", "Bytes of KV kept besides the arena", self.bytes.clone());
        let mut counter =
            |name: &str, help: &str, metric: &Counter| registry.register(name, help, metric.clone());
        counter("kvasir_tier_hits", "Requests with a part of their prompt restored from a tier", &self.hits);
        counter("kvasir_tier_hit_tokens", "Prompt tokens restored from a tier", &self.hit_tokens);
        counter("kvasir_tier_loads", "Pieces read from files", &self.loads);
        counter(
            "kvasir_tier_load_failures",
            "Files of pieces that were damaged or missing",
            &self.load_failures,
        );
        counter("kvasir_tier_write_failures", "Pieces that could not be written", &self.write_failures);
        counter("kvasir_tier_dropped", "Ended sequences that were not copied to a tier", &self.dropped);
    }
}

type Fraction = Gauge<f64, AtomicU64>;

/// All metrics of one engine.
#[derive(Debug, Default)]
pub struct EngineMetrics {
    pub running: Gauge,
    pub waiting: Gauge,
    /// Share of KV bytes in use by live sequences.
    pub kv_usage: Fraction,
    /// Prompt tokens looked up in the prefix cache.
    pub prefix_queries: Counter,
    /// Prompt tokens found in the prefix cache.
    pub prefix_hits: Counter,
    /// Prefix lookups by the reason why they stopped.
    pub lookups: Family<LookupLabel, Counter>,
    /// Prompt tokens of admitted requests.
    pub prompt_tokens: Counter,
    /// Tokens generated.
    pub generation_tokens: Counter,
    /// Prompt tokens computed, recomputation after preemption included.
    pub prefill_computed: Counter,
    /// Prompt tokens computed again after preemption.
    pub recomputed: Counter,
    pub preemptions: Counter,
    /// Sequences that were preempted for another tenant's.
    pub yields: Counter,
    /// Blocks evicted from the prefix cache.
    pub evictions: Counter,
    /// Recurrent states kept as checkpoints.
    pub checkpoints: Counter,
    /// Recurrent states that were not kept as checkpoints because no slot was free.
    pub checkpoints_skipped: Counter,
    /// Pins dropped because a sequence could not have run otherwise.
    pub pins_lost: Counter,
    /// Sequences that continued from another one.
    pub forks: Counter,
    /// Sequences in steps whose draft tokens were verified.
    pub drafts: Counter,
    pub drafted: Counter,
    pub accepted: Counter,
    pub steps: Counter,
    pub finished: Family<FinishedLabel, Counter>,
    /// Seconds from receipt to first token.
    pub ttft: SecondsHistogram,
    /// Seconds between tokens.
    pub itl: SecondsHistogram,
    /// Seconds from receipt to end.
    pub e2e: SecondsHistogram,
    /// Seconds queued.
    pub queue: SecondsHistogram,
    /// Rows of a step.
    pub iteration_tokens: TokensHistogram,
    pub rss: Gauge,
    /// Bytes of weights in memory.
    pub weight_bytes: Gauge,
    /// Bytes of the same tensors in the file.
    pub weight_file_bytes: Gauge,
    /// Bytes of the KV arena.
    pub kv_bytes: Gauge,
    /// Bytes of the KV arena by kind of cache.
    pub kv_group_bytes: Family<GroupLabel, Gauge>,
    /// Bytes of these that live sequences use.
    pub kv_group_used_bytes: Family<GroupLabel, Gauge>,
    pub tiers: TierMetrics,
    /// KV transfers from and to other workers.
    pub transfers: TransferMetrics,
    pub shards: ShardMetrics,
    /// Grammars that constrain answers.
    pub grammars: GrammarMetrics,
    pub images: ImageMetrics,
    pub device: DeviceMetrics,
    pub usage: UsageMetrics,
}

/// A histogram of seconds, 1 ms to 2 minutes.
#[derive(Debug, Clone)]
pub struct SecondsHistogram(pub Histogram);

impl Default for SecondsHistogram {
    fn default() -> Self {
        let buckets = [
            0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
            10.0, 20.0, 40.0, 80.0, 120.0,
        ];
        Self(Histogram::new(buckets))
    }
}

/// A histogram of tokens, powers of two.
#[derive(Debug, Clone)]
pub struct TokensHistogram(pub Histogram);

impl Default for TokensHistogram {
    fn default() -> Self {
        Self(Histogram::new((0..14).map(|power| f64::from(1u32 << power))))
    }
}

impl EngineMetrics {
    /// Registers all metrics.
    pub fn register(&self, registry: &mut Registry) {
        self.register_requests(registry);
        let mut gauge =
            |name: &str, help: &str, metric: &Gauge| registry.register(name, help, metric.clone());
        gauge("kvasir_weight_bytes", "Bytes of weights in memory", &self.weight_bytes);
        gauge("kvasir_weight_file_bytes", "Bytes of the same tensors in the file", &self.weight_file_bytes);
        gauge("kvasir_kv_bytes", "Bytes of the KV arena", &self.kv_bytes);
        registry.register(
            "kvasir_kv_group_bytes",
            "Bytes of the KV arena owned by a group of caches",
            self.kv_group_bytes.clone(),
        );
        registry.register(
            "kvasir_kv_group_used_bytes",
            "Bytes of the group held by live sequences",
            self.kv_group_used_bytes.clone(),
        );
        let mut counter =
            |name: &str, help: &str, metric: &Counter| registry.register(name, help, metric.clone());
        counter("vllm:num_preemptions", "Preemptions", &self.preemptions);
        counter("kvasir_yields", "Sequences that returned to the queue for another tenant's", &self.yields);
        counter(
            "kvasir_prefill_tokens_recomputed",
            "Prompt tokens computed again after preemption",
            &self.recomputed,
        );
        counter("kvasir_kv_evictions", "Blocks evicted from the prefix cache", &self.evictions);
        counter("kvasir_checkpoints", "Recurrent states kept as checkpoints", &self.checkpoints);
        counter(
            "kvasir_checkpoints_skipped",
            "Checkpoints that were not kept because no slot was free",
            &self.checkpoints_skipped,
        );
        counter(
            "kvasir_pins_lost",
            "Pins removed because a sequence could not run otherwise, or because their rows were not finite",
            &self.pins_lost,
        );
        counter("kvasir_forks", "Forked sequences", &self.forks);
        counter("vllm:spec_decode_num_drafts", "Verifications of a sequence's draft tokens", &self.drafts);
        counter("vllm:spec_decode_num_draft_tokens", "Verified draft tokens", &self.drafted);
        counter("vllm:spec_decode_num_accepted_tokens", "Accepted draft tokens", &self.accepted);
        counter("kvasir_steps", "Steps executed", &self.steps);
        self.tiers.register(registry);
        self.transfers.register(registry);
        self.shards.register(registry);
        self.grammars.register(registry);
        self.images.register(registry);
        self.device.register(registry);
        self.usage.register(registry);
        registry.register_collector(Box::new(traces::SpanCounts));
        registry.register(
            "kvasir_prefix_lookups",
            "Prefix lookups of admitted requests, by the reason why they stopped",
            self.lookups.clone(),
        );
        registry.register("vllm:request_queue_time_seconds", "Queued", self.queue.0.clone());
        registry.register("vllm:iteration_tokens_total", "Rows of a step", self.iteration_tokens.0.clone());
    }

    /// Registers the metrics of requests, which every engine has.
    pub fn register_requests(&self, registry: &mut Registry) {
        let build = Family::<[(&str, &str); 1], Gauge>::default();
        build.get_or_create(&[("version", env!("CARGO_PKG_VERSION"))]).set(1);
        registry.register("kvasir_build_info", "1 for the running version", build);
        let mut gauge =
            |name: &str, help: &str, metric: &Gauge| registry.register(name, help, metric.clone());
        gauge("vllm:num_requests_running", "Sequences in the batch", &self.running);
        gauge("vllm:num_requests_waiting", "Sequences queued", &self.waiting);
        gauge("kvasir_rss_bytes", "Resident set size", &self.rss);
        for name in ["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"] {
            registry.register(name, "Share of KV bytes held by live sequences", self.kv_usage.clone());
        }
        let mut counter =
            |name: &str, help: &str, metric: &Counter| registry.register(name, help, metric.clone());
        for prefix in ["vllm:prefix_cache", "vllm:gpu_prefix_cache"] {
            counter(
                &format!("{prefix}_queries"),
                "Prompt tokens looked up in the prefix cache",
                &self.prefix_queries,
            );
            counter(&format!("{prefix}_hits"), "Prompt tokens served by the prefix cache", &self.prefix_hits);
        }
        counter("vllm:prompt_tokens", "Prompt tokens of admitted requests", &self.prompt_tokens);
        counter("vllm:generation_tokens", "Tokens generated", &self.generation_tokens);
        counter("kvasir_prefill_tokens_computed", "Prompt tokens computed", &self.prefill_computed);
        registry.register("vllm:request_success", "Finished requests", self.finished.clone());
        let mut seconds = |name: &str, help: &str, metric: &SecondsHistogram| {
            registry.register(name, help, metric.0.clone())
        };
        seconds("vllm:time_to_first_token_seconds", "Receipt to first token", &self.ttft);
        seconds("vllm:inter_token_latency_seconds", "Between tokens", &self.itl);
        seconds("vllm:time_per_output_token_seconds", "Between tokens (older name)", &self.itl);
        seconds("vllm:e2e_request_latency_seconds", "Receipt to end", &self.e2e);
    }

    /// The registry as Prometheus text.
    pub fn text(registry: &Registry) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail. An empty text would only mean a failed encoder.
        let _ = encode(&mut text, registry);
        text
    }
}
/// Use of the KV tiers so far.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct TieringCounts {
    /// Requests that got part of their prompt from the tiers.
    pub(crate) hits: u64,
    /// Tokens that these did not compute.
    pub(crate) hit_tokens: u64,
    /// Ended sequences that were not copied: too many at once.
    pub(crate) dropped: u64,
}
