//! The workers' engine metrics, and their rates.

use proto::ids::{Epoch, NodeId};
use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

/// Rates are computed over this time.
const WINDOW: Duration = Duration::from_secs(5);
/// Most samples kept for each worker, in case they arrive faster than expected.
const MAX_SAMPLES: usize = 8;
/// Most label values kept (stages, groups, tiers): a worker's text may have any number.
const MAX_LABEL_VALUES: usize = 64;

/// The metrics of one worker at one time.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Engine {
    /// Values without labels, summed over all labels.
    plain: HashMap<&'static str, f64>,
    /// Values by their relevant label.
    by_label: HashMap<&'static str, Vec<(String, f64)>>,
}

/// Metrics that are summed over their labels.
const PLAIN: [&str; 14] = [
    "vllm:generation_tokens_total",
    "vllm:num_preemptions_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "kvasir_prefill_tokens_computed_total",
    "kvasir_prefill_tokens_recomputed_total",
    "kvasir_steps_total",
    "kvasir_kv_evictions_total",
    "kvasir_weight_bytes",
    "kvasir_shard_fetched_bytes_total",
    "kvasir_shard_served_bytes_total",
    "kvasir_shard_steps_under_way",
    "kvasir_tier_hit_tokens_total",
    "kvasir_block_transfer_rate_bytes",
];

/// Metrics that are read by one label.
const LABELLED: [(&str, &str); 11] = [
    ("kvasir_kv_group_bytes", "group"),
    ("kvasir_kv_group_used_bytes", "group"),
    ("kvasir_tier_bytes", "tier"),
    ("kvasir_shard_received_bytes_total", "stage"),
    ("kvasir_shard_busy_seconds_total", "stage"),
    ("kvasir_shard_stalled_seconds_total", "stage"),
    ("kvasir_block_transfer_bytes_total", "direction"),
    ("kvasir_gpu_readable", "gpu"),
    ("kvasir_gpu_power_watts", "gpu"),
    ("kvasir_gpu_temperature_celsius", "gpu"),
    ("kvasir_gpu_throttled", "reason"),
];

/// Reasons of `kvasir_gpu_throttled` that are no fault: settings, the power limit, an idle GPU.
const NO_FAULT: [&str; 5] = ["idle", "applications_clocks", "sw_power_cap", "sync_boost", "display_clocks"];

impl Engine {
    /// Parses the text format. Other metrics and invalid lines are ignored.
    pub(super) fn read(text: &str) -> Self {
        let mut engine = Self::default();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let Some((series, value)) = line.rsplit_once(' ') else { continue };
            let Some(value) = value.parse::<f64>().ok().filter(|value| value.is_finite()) else { continue };
            let (name, labels) = series.split_once('{').unwrap_or((series, ""));
            if let Some(&name) = PLAIN.iter().find(|&&listed| listed == name) {
                *engine.plain.entry(name).or_default() += value;
            } else if let Some(&(name, label)) = LABELLED.iter().find(|(listed, _)| *listed == name)
                && let Some(label_value) = label_of(labels, label)
            {
                let values = engine.by_label.entry(name).or_default();
                match values.iter().position(|(existing, _)| existing == label_value) {
                    Some(at) => values[at].1 += value,
                    None if values.len() < MAX_LABEL_VALUES => values.push((label_value.to_owned(), value)),
                    None => {}
                }
            }
        }
        engine
    }

    /// The value of a metric; 0 if absent.
    pub(super) fn get(&self, name: &str) -> f64 {
        self.plain.get(name).copied().unwrap_or(0.0)
    }

    /// The values of a metric by label.
    pub(super) fn by_label(&self, name: &str) -> &[(String, f64)] {
        self.by_label.get(name).map_or(&[], Vec::as_slice)
    }

    /// Health of the worker's GPUs; `None` if it reports none.
    pub(super) fn gpu_health(&self) -> Option<GpuSummary> {
        let readable = self.by_label("kvasir_gpu_readable");
        let values = |name: &str| self.by_label(name).iter().map(|(_, value)| *value).collect::<Vec<_>>();
        let slowed = self.by_label("kvasir_gpu_throttled").iter();
        let slowed = slowed.filter(|(reason, gpus)| *gpus > 0.0 && !NO_FAULT.contains(&reason.as_str()));
        (!readable.is_empty()).then(|| GpuSummary {
            power_watts: values("kvasir_gpu_power_watts").into_iter().reduce(|sum, power| sum + power),
            temperature_celsius: values("kvasir_gpu_temperature_celsius").into_iter().reduce(f64::max),
            slowed_by: slowed.map(|(reason, _)| reason.clone()).collect(),
            unreadable: readable.iter().filter(|(_, value)| *value == 0.0).count(),
        })
    }

    fn labelled(&self, name: &str, label_value: &str) -> f64 {
        self.by_label(name)
            .iter()
            .find(|(existing, _)| existing == label_value)
            .map_or(0.0, |(_, value)| *value)
    }
}

/// Health of all GPUs of a worker.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct GpuSummary {
    /// Of all GPUs together.
    pub(super) power_watts: Option<f64>,
    /// Of the hottest GPU.
    pub(super) temperature_celsius: Option<f64>,
    /// Faults that lower the clocks of any GPU, named as the label `reason` of `kvasir_gpu_throttled`.
    pub(super) slowed_by: Vec<String>,
    /// GPUs whose values cannot be read.
    pub(super) unreadable: usize,
}

fn label_of<'a>(labels: &'a str, label: &str) -> Option<&'a str> {
    let start = labels.find(&format!("{label}=\""))? + label.len() + 2;
    labels.get(start..)?.split('"').next()
}

/// The engines over the last seconds.
#[derive(Debug, Default)]
pub(super) struct Engines(HashMap<NodeId, VecDeque<EngineSample>>);

#[derive(Debug)]
struct EngineSample {
    at: Instant,
    epoch: Epoch,
    engine: Engine,
}

impl Engines {
    /// Adds the current metrics and removes workers without any. A new epoch counts from 0.
    pub(super) fn take(&mut self, now: Instant, metrics: Vec<(NodeId, Epoch, Engine)>) {
        self.0.retain(|node, _| metrics.iter().any(|(reported, ..)| reported == node));
        for (node, epoch, engine) in metrics {
            let samples = self.0.entry(node).or_default();
            let of_now = |sample: &EngineSample| {
                sample.epoch == epoch && now.saturating_duration_since(sample.at) <= WINDOW
            };
            while samples.len() >= MAX_SAMPLES || samples.front().is_some_and(|sample| !of_now(sample)) {
                samples.pop_front();
            }
            samples.push_back(EngineSample { at: now, epoch, engine });
        }
    }

    /// A worker's latest metrics.
    pub(super) fn last(&self, node: &NodeId) -> Option<&Engine> {
        Some(&self.0.get(node)?.back()?.engine)
    }

    /// A counter's growth per second. `None` before two samples.
    pub(super) fn rate(&self, node: &NodeId, name: &str) -> Option<f64> {
        self.grown(node, |engine| engine.get(name)).map(|(grown, seconds)| grown / seconds)
    }

    /// A counter's growth over the last seconds.
    pub(super) fn growth(&self, node: &NodeId, name: &str) -> f64 {
        self.grown(node, |engine| engine.get(name)).map_or(0.0, |(grown, _)| grown)
    }

    /// Like [`Self::rate`], for one label value.
    pub(super) fn label_rate(&self, node: &NodeId, name: &str, label_value: &str) -> Option<f64> {
        self.grown(node, |engine| engine.labelled(name, label_value)).map(|(grown, seconds)| grown / seconds)
    }

    fn grown(&self, node: &NodeId, of: impl Fn(&Engine) -> f64) -> Option<(f64, f64)> {
        let samples = self.0.get(node)?;
        let (first, last) = (samples.front()?, samples.back()?);
        let seconds = last.at.saturating_duration_since(first.at).as_secs_f64();
        (seconds > 0.0).then(|| ((of(&last.engine) - of(&first.engine)).max(0.0), seconds))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str) -> NodeId {
        NodeId::new(name).unwrap()
    }

    #[test]
    fn listed_metrics_are_parsed_and_others_ignored() {
        let text = "# TYPE kvasir_steps counter\nkvasir_steps_total 40\nkvasir_unknown 7\nnonsense\n\
                    kvasir_tier_bytes{tier=\"host\"} 5\nkvasir_tier_bytes{tier=\"disk\"} 6\n\
                    vllm:prefix_cache_hits_total{a=\"b\"} 2\nvllm:prefix_cache_hits_total{a=\"c\"} 3\n\
                    kvasir_weight_bytes NaN\n";
        let engine = Engine::read(text);
        assert_eq!((engine.get("kvasir_steps_total"), engine.get("kvasir_unknown")), (40.0, 0.0));
        assert_eq!(
            (engine.get("vllm:prefix_cache_hits_total"), engine.get("kvasir_weight_bytes")),
            (5.0, 0.0)
        );
        assert_eq!(
            engine.by_label("kvasir_tier_bytes"),
            [("host".to_owned(), 5.0), ("disk".to_owned(), 6.0)]
        );
        let many: String = (0..1000).map(|i| format!("kvasir_tier_bytes{{tier=\"{i}\"}} 1\n")).collect();
        assert_eq!(Engine::read(&many).by_label("kvasir_tier_bytes").len(), MAX_LABEL_VALUES);
    }

    #[test]
    fn the_health_of_gpus_is_summarised() {
        assert_eq!(Engine::read("kvasir_steps_total 1\n").gpu_health(), None);
        let text = "kvasir_gpu_readable{gpu=\"0\"} 1\nkvasir_gpu_readable{gpu=\"1\"} 0\n\
                    kvasir_gpu_power_watts{gpu=\"0\"} 40.5\nkvasir_gpu_power_watts{gpu=\"1\"} 10\n\
                    kvasir_gpu_temperature_celsius{gpu=\"0\"} 80\nkvasir_gpu_temperature_celsius{gpu=\"1\"} 70\n\
                    kvasir_gpu_throttled{gpu=\"0\",reason=\"idle\"} 1\n\
                    kvasir_gpu_throttled{gpu=\"0\",reason=\"hw_thermal\"} 1\n\
                    kvasir_gpu_throttled{gpu=\"0\",reason=\"sw_thermal\"} 0\n";
        let expected = GpuSummary {
            power_watts: Some(50.5),
            temperature_celsius: Some(80.0),
            slowed_by: vec!["hw_thermal".to_owned()],
            unreadable: 1,
        };
        assert_eq!(Engine::read(text).gpu_health(), Some(expected));
    }

    #[test]
    fn rates_cover_one_epoch_and_the_last_seconds() {
        let start = Instant::now();
        let mut engines = Engines::default();
        let mut rate_after = |second: u64, epoch: u64, steps: u64| {
            let engine = Engine::read(&format!("kvasir_steps_total {steps}\n"));
            engines.take(start + Duration::from_secs(second), vec![(node("w"), Epoch(epoch), engine)]);
            engines.rate(&node("w"), "kvasir_steps_total")
        };
        assert_eq!(rate_after(0, 1, 100), None);
        assert_eq!(rate_after(2, 1, 120), Some(10.0));
        assert_eq!(rate_after(4, 1, 180), Some(20.0));
        // The first sample is too old.
        assert_eq!(rate_after(7, 1, 220), Some(20.0));
        assert_eq!(rate_after(8, 2, 3), None, "another life");
        assert_eq!(rate_after(9, 2, 8), Some(5.0));
        engines.take(start + Duration::from_secs(10), Vec::new());
        assert!(engines.last(&node("w")).is_none());
    }
}
