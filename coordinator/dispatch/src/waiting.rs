//! Requests that wait for versions of deployed models, at this coordinator and at the others. The leader orders loads
//! by them, and models with waiting requests keep their room.

use super::Dispatch;
use parking_lot::Mutex;
use proto::ids::{ModelId, NodeId};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

/// Most versions of a report.
const MAX_VERSIONS: usize = 1024;
/// A report that is older does not count. Coordinators send one every 500 ms.
const VALID_FOR: Duration = Duration::from_millis(1500);

/// The waiting requests of a coordinator, by version. Sent to the others; the form is frozen.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WaitingReport(Vec<(ModelId, u32)>);

/// The last reports of the other coordinators.
#[derive(Debug, Default)]
pub(super) struct Waiting(Mutex<HashMap<NodeId, (Instant, WaitingReport)>>);

impl WaitingReport {
    fn new(queued: BTreeMap<ModelId, usize>) -> Self {
        let count = |(model, requests)| (model, u32::try_from(requests).unwrap_or(u32::MAX));
        let versions = queued.into_iter().filter(|(model, _)| model.is_version());
        Self(versions.take(MAX_VERSIONS).map(count).collect())
    }
}

impl Waiting {
    /// Takes a report. Further versions than a coordinator may send are dropped.
    fn reported(&self, now: Instant, peer: &NodeId, mut report: WaitingReport) {
        report.0.truncate(MAX_VERSIONS);
        self.0.lock().insert(peer.clone(), (now, report));
    }

    /// Adds the requests of the other coordinators to those of this one.
    fn add(&self, now: Instant, mut queued: BTreeMap<ModelId, usize>) -> BTreeMap<ModelId, usize> {
        let mut peers = self.0.lock();
        peers.retain(|_, (at, _)| now.saturating_duration_since(*at) < VALID_FOR);
        for (model, requests) in peers.values().flat_map(|(_, WaitingReport(report))| report) {
            let sum = queued.entry(model.clone()).or_default();
            *sum = sum.saturating_add(*requests as usize);
        }
        queued
    }
}

impl Dispatch {
    /// The requests that wait for versions at this coordinator.
    pub fn waiting_report(&self) -> WaitingReport {
        WaitingReport::new(self.look(|balancer| balancer.queued_by_model()))
    }

    /// Takes the report of another coordinator.
    pub fn waiting_elsewhere(&self, peer: &NodeId, report: WaitingReport) {
        self.waiting.reported(Instant::now(), peer, report);
    }

    /// The requests that wait at all coordinators, by model.
    pub fn waiting_everywhere(&self) -> BTreeMap<ModelId, usize> {
        self.waiting.add(Instant::now(), self.look(|balancer| balancer.queued_by_model()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_replaces_the_one_before_and_counts_for_a_short_time() {
        let version = |name: &str| ModelId::new(name).unwrap().version(&[1; 32]).unwrap();
        let (waiting, now) = (Waiting::default(), Instant::now());
        let (a, b, peer) = (version("a"), version("b"), NodeId::new("c1").unwrap());
        let own = BTreeMap::from([(a.clone(), 2)]);
        let unversioned = (ModelId::new("own").unwrap(), 7);
        let report =
            |requests| WaitingReport::new(BTreeMap::from([(a.clone(), requests), unversioned.clone()]));
        waiting.reported(now, &peer, report(5));
        waiting.reported(now, &peer, report(1));
        waiting.reported(now, &NodeId::new("c2").unwrap(), WaitingReport(vec![(b.clone(), u32::MAX)]));
        let all = BTreeMap::from([(a, 3), (b, u32::MAX as usize)]);
        assert_eq!(waiting.add(now, own.clone()), all);
        assert_eq!(waiting.add(now + VALID_FOR, own.clone()), own);
    }
}
