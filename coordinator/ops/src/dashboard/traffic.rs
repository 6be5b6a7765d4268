//! Requests and tokens per second of each model.

use super::requests::rounded;
use dispatch::ModelCounts;
use proto::ids::{Epoch, ModelId, NodeId};
use router::balancer::WorkerView;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

/// Rates are averages over this time.
const WINDOW: Duration = Duration::from_secs(10);
/// Most samples, in case they are taken faster than once a second.
const MAX_SAMPLES: usize = 16;

/// Totals at one time.
#[derive(Debug, Default)]
pub(super) struct Totals {
    /// Ended requests at all coordinators, and the failed ones among them.
    requests: BTreeMap<ModelId, (u64, u64)>,
    /// Generated tokens by model, since each worker's start.
    tokens: BTreeMap<ModelId, BTreeMap<(NodeId, Epoch), u64>>,
}

impl Totals {
    pub(super) fn read(workers: &[WorkerView], outcomes: BTreeMap<ModelId, ModelCounts>) -> Self {
        let counts = |(model, counts): (ModelId, ModelCounts)| (model, (counts.requests(), counts.failed));
        let mut totals = Self { requests: outcomes.into_iter().map(counts).collect(), ..Self::default() };
        for view in workers {
            // Reports do not divide the tokens among the models of an engine.
            let ([model], Some(report)) = (view.member.register.models.as_slice(), &view.report) else {
                continue;
            };
            let key = (view.member.register.node.clone(), report.epoch);
            totals.tokens.entry(model.id.clone()).or_default().insert(key, report.tokens);
        }
        totals
    }
}

/// The totals of the last seconds.
#[derive(Debug, Default)]
pub(super) struct Traffic(VecDeque<(Instant, Totals)>);

impl Traffic {
    pub(super) fn take(&mut self, now: Instant, totals: Totals) {
        let is_old = |at: Instant| now.saturating_duration_since(at) > WINDOW;
        while self.0.len() >= MAX_SAMPLES || self.0.front().is_some_and(|(at, _)| is_old(*at)) {
            self.0.pop_front();
        }
        self.0.push_back((now, totals));
    }

    /// The growth of a total per second, from the first sample that has it. `None` before two samples have it.
    fn rate(&self, of: impl Fn(&Totals) -> Option<u64>) -> Option<f64> {
        let mut known = self.0.iter().filter_map(|(at, totals)| Some((*at, of(totals)?)));
        let (first, before) = known.next()?;
        let (last, now) = known.next_back()?;
        let seconds = last.saturating_duration_since(first).as_secs_f64();
        (seconds > 0.0).then(|| now.saturating_sub(before) as f64 / seconds)
    }

    /// Each model that has workers or has had requests.
    pub(super) fn view(&self) -> Vec<Value> {
        let Some((_, totals)) = self.0.back() else { return Vec::new() };
        let models: BTreeSet<&ModelId> = totals.requests.keys().chain(totals.tokens.keys()).collect();
        let view = |model: &ModelId| {
            let requests = self.rate(|totals| totals.requests.get(model).map(|counts| counts.0));
            let errors = self.rate(|totals| totals.requests.get(model).map(|counts| counts.1));
            let nodes = totals.tokens.get(model).into_iter().flat_map(BTreeMap::keys);
            let tokens =
                nodes.filter_map(|node| self.rate(|totals| totals.tokens.get(model)?.get(node).copied()));
            json!({
                "id": model.as_str(),
                "requests_per_s": requests.map(rounded),
                "errors_per_s": errors.map(rounded),
                "generated_per_s": tokens.reduce(|sum, rate| sum + rate).map(rounded),
            })
        };
        models.into_iter().map(view).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_begin_with_the_first_sample_of_each_worker_and_epoch() {
        let (start, mut traffic) = (Instant::now(), Traffic::default());
        let model = ModelId::new("chat").unwrap().version(&[1; 32]).unwrap();
        let mut view = |second: u64, requests: (u64, u64), tokens: &[(&str, u64, u64)]| {
            let tokens = tokens
                .iter()
                .map(|(node, epoch, count)| ((NodeId::new(*node).unwrap(), Epoch(*epoch)), *count));
            let totals = Totals {
                requests: BTreeMap::from([(model.clone(), requests)]),
                tokens: BTreeMap::from([(model.clone(), tokens.collect())]),
            };
            traffic.take(start + Duration::from_secs(second), totals);
            let view = traffic.view();
            let field = |name: &str| view[0][name].as_f64();
            (field("requests_per_s"), field("errors_per_s"), field("generated_per_s"))
        };
        assert_eq!(view(0, (10, 0), &[("w0", 1, 500)]), (None, None, None));
        assert_eq!(view(2, (20, 4), &[("w0", 1, 600)]), (Some(5.0), Some(2.0), Some(50.0)));
        // Another worker counts once it has two samples, and a restarted one anew.
        let both = [("w0", 1, 700), ("w1", 1, 9_000)];
        assert_eq!(view(4, (20, 4), &both), (Some(2.5), Some(1.0), Some(50.0)));
        assert_eq!(view(6, (20, 4), &[("w0", 2, 3), ("w1", 1, 9_020)]).2, Some(10.0));
        // The first samples have become too old.
        assert_eq!(view(20, (30, 4), &[("w1", 1, 9_020)]), (None, None, None));
    }
}
