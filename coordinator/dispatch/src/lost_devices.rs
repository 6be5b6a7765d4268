//! Counts workers that end because they lost their GPU, and quarantines those that do so repeatedly.

use parking_lot::Mutex;
use proto::ids::{Epoch, NodeId};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Number of epochs ended by a lost GPU within [`WITHIN`] that quarantines a worker.
const MAX_LOSSES: usize = 3;
/// Time window of the count.
const WITHIN: Duration = Duration::from_secs(600);

/// The worker epochs that ended with a lost GPU, as reported to this coordinator.
#[derive(Debug, Default)]
pub struct LostDevices(Mutex<BTreeMap<NodeId, Losses>>);

#[derive(Debug, Default)]
struct Losses {
    epochs: Vec<(Epoch, Instant)>,
    quarantined: bool,
}

impl LostDevices {
    /// Records that an epoch of a worker ended with a lost GPU. Returns `true` if the worker is now
    /// quarantined.
    pub fn lost(&self, now: Instant, node: &NodeId, epoch: Epoch) -> bool {
        let mut all = self.0.lock();
        let losses = all.entry(node.clone()).or_default();
        losses.epochs.retain(|(_, at)| now.saturating_duration_since(*at) < WITHIN);
        // An epoch may have several connections, and so several reports.
        if losses.epochs.iter().all(|(lost, _)| *lost != epoch) {
            losses.epochs.push((epoch, now));
        }
        if losses.epochs.len() < MAX_LOSSES {
            return false;
        }
        losses.quarantined = true;
        true
    }

    /// Whether the worker is quarantined and was not released since.
    pub fn quarantined(&self, node: &NodeId) -> bool {
        self.0.lock().get(node).is_some_and(|losses| losses.quarantined)
    }

    pub fn unblock(&self, node: &NodeId) {
        self.0.lock().remove(node);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_lost_gpus_within_ten_minutes_quarantine_a_worker() {
        let (losses, node, start) = (LostDevices::default(), NodeId::new("w1").unwrap(), Instant::now());
        let after = |seconds| start + Duration::from_secs(seconds);
        let lost = |epoch, seconds| losses.lost(after(seconds), &node, Epoch(epoch));
        assert!(!lost(1, 0) && !lost(2, 10));
        // The same epoch again, and another epoch after the first has aged out.
        assert!(!lost(2, 20) && !lost(3, 601));
        assert!(!losses.quarantined(&node));
        assert!(lost(4, 602) && losses.quarantined(&node));
        assert!(!losses.quarantined(&NodeId::new("w2").unwrap()));
        losses.unblock(&node);
        assert!(!losses.quarantined(&node) && !lost(5, 603));
    }
}
