//! The engine's load and metrics.

use super::Engine;
use crate::progress::EngineLoad;
use crate::telemetry::GroupLabel;
use proto::event::KvEvent;
use std::time::Duration;

/// Exponential averages over recent steps.
#[derive(Debug, Default)]
pub(super) struct Rates {
    prefill: f32,
    step_ms: f32,
}

impl Engine {
    /// Moves the scheduler's KV events to the log and refreshes gauges.
    pub(super) fn publish(&mut self) {
        let events: Vec<KvEvent> = self.scheduler.take_events();
        if !events.is_empty() {
            self.events.lock().append(events);
        }
        let counters = self.scheduler.stats().counters;
        let raise = |metric: &prometheus_client::metrics::counter::Counter, to: u64| {
            metric.inc_by(to.saturating_sub(metric.get()));
        };
        raise(&self.metrics.prefill_computed, counters.prefill_tokens_computed);
        raise(&self.metrics.recomputed, counters.recomputed_tokens);
        raise(&self.metrics.prefix_queries, counters.prefix_query_tokens);
        raise(&self.metrics.prefix_hits, counters.prefix_hit_tokens);
        raise(&self.metrics.preemptions, counters.preemptions);
        raise(&self.metrics.yields, counters.yields);
        raise(&self.metrics.evictions, counters.evictions);
        raise(&self.metrics.checkpoints, counters.checkpoints);
        raise(&self.metrics.checkpoints_skipped, counters.checkpoints_skipped);
        raise(&self.metrics.pins_lost, counters.pins_lost);
        raise(&self.metrics.forks, counters.forks);
        raise(&self.metrics.drafts, counters.drafts);
        raise(&self.metrics.drafted, counters.drafted_tokens);
        raise(&self.metrics.accepted, counters.accepted_tokens);
        self.publish_tiers();
        self.metrics.device.update(self.executor.decoder().backend().step_counts());
        if let Some(counts) = self.executor.take_counts() {
            self.metrics.shards.update(&counts);
        }
        for (group, owned, used) in self.scheduler.cache_bytes() {
            self.metrics.kv_group_bytes.get_or_create(&GroupLabel { group }).set(owned as i64);
            self.metrics.kv_group_used_bytes.get_or_create(&GroupLabel { group }).set(used as i64);
        }
        let load = self.load();
        self.metrics.running.set(load.running as i64);
        self.metrics.waiting.set(load.waiting as i64);
        self.metrics.kv_usage.set(if load.kv_total == 0 {
            0.0
        } else {
            load.kv_used as f64 / load.kv_total as f64
        });
    }

    fn publish_tiers(&self) {
        let Some(tiering) = &self.tiering else { return };
        self.metrics.tiers.update(&tiering.tiers().stats(), &tiering.counts());
    }

    pub fn load(&self) -> EngineLoad {
        let stats = self.scheduler.stats();
        EngineLoad {
            running: stats.running,
            waiting: stats.waiting + self.waiting_outside_scheduler(),
            pending_prefill_tokens: stats.pending_prefill_tokens,
            kv_used: stats.kv_used_bytes,
            kv_total: stats.kv_total_bytes,
            steps: self.steps,
            tokens: self.tokens,
            prefill_rate: self.rates.prefill,
            step_ms: self.rates.step_ms,
        }
    }
}

impl Rates {
    /// Tokens per second; 0 if unknown.
    pub(super) fn prefill(&self) -> f32 {
        self.prefill
    }

    pub(super) fn step_ended(&mut self, took: Duration, rows: usize, prefill_rows: usize) {
        let seconds = took.as_secs_f32().max(1e-6);
        let blend = |old: f32, new: f32| if old == 0.0 { new } else { old + 0.2 * (new - old) };
        self.step_ms = blend(self.step_ms, seconds * 1e3);
        // Mixed steps are not a measure of prefill alone.
        if prefill_rows * 10 >= rows * 9 && prefill_rows >= 64 {
            self.prefill = blend(self.prefill, prefill_rows as f32 / seconds);
        }
    }
}
