//! Outcomes of requests by model and version, at this coordinator and at the others: the basis on which the leader
//! judges a canary, and chooses the model that makes room.

use parking_lot::Mutex;
use proto::ids::{ModelId, NodeId};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

/// Buckets of times to first token, each 19 % wider than the one before: from 1 ms to 10 minutes.
const BUCKETS: usize = 78;
/// Most models of a report.
const MAX_MODELS: usize = 1024;

/// Requests for one model, or one version of a deployed model, since a coordinator's start.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelCounts {
    pub finished: u64,
    /// Requests that ended with an error of the server.
    pub failed: u64,
    /// Finished requests by time to first token.
    first_token: Vec<u64>,
}

/// All counts of a coordinator. Sent to the others; the form is frozen.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutcomeReport(Vec<(ModelId, ModelCounts)>);

#[derive(Debug, Default)]
pub struct Outcomes {
    own: Mutex<BTreeMap<ModelId, ModelCounts>>,
    peers: Mutex<HashMap<NodeId, OutcomeReport>>,
}

/// Lower bound of a bucket, seconds.
fn bound(bucket: usize) -> f64 {
    1e-3 * 2f64.powf(bucket as f64 / 4.0)
}

fn bucket(time: Duration) -> usize {
    let quarters = ((time.as_secs_f64() / 1e-3).max(1.0).log2() * 4.0).floor();
    (quarters as usize).min(BUCKETS - 1)
}

impl ModelCounts {
    pub fn requests(&self) -> u64 {
        self.finished.saturating_add(self.failed)
    }

    /// The median time to first token, rounded down to a bucket. `None` without finished requests.
    pub fn median_first_token(&self) -> Option<Duration> {
        let total: u64 = self.first_token.iter().sum();
        let mut passed = 0;
        let at = self.first_token.iter().position(|count| {
            passed += count;
            passed * 2 >= total.max(1)
        })?;
        Some(Duration::from_secs_f64(bound(at)))
    }

    pub fn add(&mut self, other: &Self) {
        self.finished = self.finished.saturating_add(other.finished);
        self.failed = self.failed.saturating_add(other.failed);
        self.first_token.resize(BUCKETS, 0);
        self.first_token
            .iter_mut()
            .zip(&other.first_token)
            .for_each(|(sum, more)| *sum = sum.saturating_add(*more));
    }

    /// The counts since `before`. Counts that were begun anew since then are 0.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let of = |bucket: usize| before.first_token.get(bucket).copied().unwrap_or(0);
        let first_token = self.first_token.iter().enumerate().map(|(at, now)| now.saturating_sub(of(at)));
        Self {
            finished: self.finished.saturating_sub(before.finished),
            failed: self.failed.saturating_sub(before.failed),
            first_token: first_token.collect(),
        }
    }
}

impl Outcomes {
    pub fn finished(&self, model: &ModelId, to_first: Duration) {
        self.count(model, |counts| {
            counts.finished += 1;
            counts.first_token.resize(BUCKETS, 0);
            counts.first_token.get_mut(bucket(to_first)).into_iter().for_each(|count| *count += 1);
        });
    }

    pub fn failed(&self, model: &ModelId) {
        self.count(model, |counts| counts.failed += 1);
    }

    fn count(&self, model: &ModelId, count: impl FnOnce(&mut ModelCounts)) {
        count(self.own.lock().entry(model.clone()).or_default());
    }

    /// Forgets versions that are not deployed any more.
    pub fn retain(&self, deployed: impl Fn(&ModelId) -> bool) {
        self.own.lock().retain(|model, _| !model.is_version() || deployed(model));
    }

    /// The counts of this coordinator.
    pub fn report(&self) -> OutcomeReport {
        let own = self.own.lock();
        OutcomeReport(
            own.iter().take(MAX_MODELS).map(|(model, counts)| (model.clone(), counts.clone())).collect(),
        )
    }

    /// Takes the counts of another coordinator. Further ones than a coordinator may send are dropped.
    pub fn reported(&self, peer: &NodeId, mut report: OutcomeReport) {
        report.0.truncate(MAX_MODELS);
        report.0.iter_mut().for_each(|(_, counts)| counts.first_token.truncate(BUCKETS));
        self.peers.lock().insert(peer.clone(), report);
    }

    /// The counts of all coordinators, by model or version.
    pub fn totals(&self) -> BTreeMap<ModelId, ModelCounts> {
        let mut totals = self.own.lock().clone();
        for OutcomeReport(report) in self.peers.lock().values() {
            for (model, counts) in report {
                totals.entry(model.clone()).or_default().add(counts);
            }
        }
        totals
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(name: &str) -> ModelId {
        ModelId::new(name).unwrap().version(&[1; 32]).unwrap()
    }

    #[test]
    fn a_peers_counts_replace_its_earlier_ones_and_only_versions_are_forgotten() {
        let outcomes = Outcomes::default();
        let (a, peer) = (version("a"), NodeId::new("c1").unwrap());
        let configured = ModelId::new("a").unwrap();
        outcomes.finished(&configured, Duration::from_secs(1));
        outcomes.finished(&a, Duration::from_secs(1));
        outcomes.failed(&a);
        let mut more = ModelCounts { finished: 5, ..ModelCounts::default() };
        outcomes.reported(&peer, OutcomeReport(vec![(a.clone(), more.clone())]));
        more.finished = 7;
        outcomes.reported(&peer, OutcomeReport(vec![(a.clone(), more)]));
        assert_eq!((outcomes.totals()[&a].finished, outcomes.totals()[&a].failed), (8, 1));
        outcomes.retain(|_| false);
        assert_eq!(outcomes.totals()[&a].finished, 7);
        assert_eq!(outcomes.totals()[&configured].finished, 1);
    }

    #[test]
    fn the_median_is_within_a_bucket() {
        let outcomes = Outcomes::default();
        let a = version("a");
        assert_eq!(ModelCounts::default().median_first_token(), None);
        for millis in [1, 10, 100, 1_000, 1_000_000] {
            outcomes.finished(&a, Duration::from_millis(millis));
        }
        let counts = outcomes.totals().remove(&a).unwrap();
        let median = counts.median_first_token().unwrap().as_secs_f64();
        assert!((0.08..=0.1).contains(&median), "{median}");
        let before = counts.clone();
        outcomes.finished(&a, Duration::from_millis(3));
        let new = outcomes.totals()[&a].since(&before);
        assert_eq!((new.finished, new.requests()), (1, 1));
        assert!(new.median_first_token().unwrap() <= Duration::from_millis(3));
    }
}
