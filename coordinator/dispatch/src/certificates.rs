//! Expiry times of the connected workers' certificates.

use super::SessionId;
use parking_lot::Mutex;
use proto::ids::NodeId;
use std::collections::BTreeMap;

/// The last reported expiry of each worker, in Unix seconds.
#[derive(Debug, Default)]
pub struct Certificates(Mutex<BTreeMap<NodeId, (SessionId, i64)>>);

impl Certificates {
    /// Takes a worker's report.
    pub fn report(&self, session: SessionId, node: &NodeId, ends: i64) {
        self.0.lock().insert(node.clone(), (session, ends));
    }

    /// Expiry of this worker's certificate in Unix seconds; `None` if not reported.
    pub fn ends(&self, node: &NodeId) -> Option<i64> {
        self.0.lock().get(node).map(|(_, ends)| *ends)
    }

    pub(super) fn forget(&self, session: SessionId, node: &NodeId) {
        let mut certificates = self.0.lock();
        if certificates.get(node).is_some_and(|(current, _)| *current == session) {
            certificates.remove(node);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_present_session_of_a_worker_counts() {
        let (certificates, node) = (Certificates::default(), NodeId::new("w1").unwrap());
        certificates.report(SessionId(1), &node, 10);
        certificates.report(SessionId(2), &node, 20);
        certificates.forget(SessionId(1), &node);
        assert_eq!(certificates.ends(&node), Some(20));
        certificates.forget(SessionId(2), &node);
        assert_eq!(certificates.ends(&node), None);
    }
}
