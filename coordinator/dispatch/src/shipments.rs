//! The workers' reports of model downloads from each other.

use super::SessionId;
use parking_lot::Mutex;
use proto::ids::NodeId;
use proto::shard::ShippingReport;
use std::collections::BTreeMap;

/// The last report of each connected worker, if it has sent one.
#[derive(Debug, Default)]
pub struct Shipments(Mutex<BTreeMap<NodeId, (SessionId, ShippingReport)>>);

impl Shipments {
    /// Stores a worker's report. Returns the sources of wrong bytes that it names for the first time in this
    /// session.
    pub fn report(&self, session: SessionId, node: &NodeId, report: ShippingReport) -> Vec<NodeId> {
        let mut shipments = self.0.lock();
        let before = shipments.get(node).filter(|(current, _)| *current == session);
        let is_new = |source: &&NodeId| before.is_none_or(|(_, report)| !report.struck.contains(source));
        let new = report.struck.iter().filter(is_new).cloned().collect();
        shipments.insert(node.clone(), (session, report));
        new
    }

    /// All reports, by worker name.
    pub fn all(&self) -> Vec<(NodeId, ShippingReport)> {
        self.0.lock().iter().map(|(node, (_, report))| (node.clone(), report.clone())).collect()
    }

    pub(super) fn forget(&self, session: SessionId, node: &NodeId) {
        let mut shipments = self.0.lock();
        if shipments.get(node).is_some_and(|(current, _)| *current == session) {
            shipments.remove(node);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str) -> NodeId {
        NodeId::new(name).unwrap()
    }

    fn report(present: u64, struck: &[&str]) -> ShippingReport {
        ShippingReport { wanted: 9, present, struck: struck.iter().map(|name| node(name)).collect() }
    }

    #[test]
    fn a_struck_source_is_returned_once_per_session() {
        let shipments = Shipments::default();
        let (first, second) = (SessionId(1), SessionId(2));
        assert!(shipments.report(first, &node("w1"), report(1, &[])).is_empty());
        assert_eq!(shipments.report(first, &node("w1"), report(2, &["w2"])), [node("w2")]);
        assert!(shipments.report(first, &node("w1"), report(3, &["w2"])).is_empty());
        assert_eq!(shipments.report(first, &node("w1"), report(3, &["w2", "w3"])), [node("w3")]);
        assert_eq!(shipments.all(), [(node("w1"), report(3, &["w2", "w3"]))]);
        // The end of an earlier session does not remove the current one's report.
        assert_eq!(shipments.report(second, &node("w1"), report(3, &["w2"])), [node("w2")]);
        shipments.forget(first, &node("w1"));
        assert_eq!(shipments.all().len(), 1);
        shipments.forget(second, &node("w1"));
        assert!(shipments.all().is_empty());
    }
}
