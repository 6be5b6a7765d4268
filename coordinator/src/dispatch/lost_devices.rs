//! Workers that end because their GPU does: who does so again and again is quarantined.

use parking_lot::Mutex;
use proto::ids::{Epoch, NodeId};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// So many lives that end with a lost GPU...
const MOST: usize = 3;
/// ...within this time are no accident.
const WITHIN: Duration = Duration::from_secs(600);

/// The lives of workers that ended with a lost GPU, as far as this coordinator has been told.
#[derive(Debug, Default)]
pub struct LostDevices(Mutex<BTreeMap<NodeId, Losses>>);

#[derive(Debug, Default)]
struct Losses {
    lives: Vec<(Epoch, Instant)>,
    quarantined: bool,
}

impl LostDevices {
    /// This life of a worker has ended so. `true` if the worker is to take no work any more.
    pub fn lost(&self, now: Instant, node: &NodeId, epoch: Epoch) -> bool {
        let mut all = self.0.lock();
        let losses = all.entry(node.clone()).or_default();
        losses.lives.retain(|(_, at)| now.saturating_duration_since(*at) < WITHIN);
        // A life may have had several connections.
        if losses.lives.iter().all(|(known, _)| *known != epoch) {
            losses.lives.push((epoch, now));
        }
        if losses.lives.len() < MOST {
            return false;
        }
        losses.quarantined = true;
        true
    }

    /// Whether the worker was found to lose its GPU again and again, and nobody has forgiven it.
    pub fn quarantined(&self, node: &NodeId) -> bool {
        self.0.lock().get(node).is_some_and(|losses| losses.quarantined)
    }

    pub fn pardon(&self, node: &NodeId) {
        self.0.lock().remove(node);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_lives_within_ten_minutes_are_too_many() {
        let (losses, node, start) = (LostDevices::default(), NodeId::new("w1").unwrap(), Instant::now());
        let after = |seconds| start + Duration::from_secs(seconds);
        let lost = |epoch, seconds| losses.lost(after(seconds), &node, Epoch(epoch));
        assert!(!lost(1, 0) && !lost(2, 10));
        // The same life once more, and another one after the first is forgotten.
        assert!(!lost(2, 20) && !lost(3, 601));
        assert!(!losses.quarantined(&node));
        assert!(lost(4, 602) && losses.quarantined(&node));
        assert!(!losses.quarantined(&NodeId::new("w2").unwrap()));
        losses.pardon(&node);
        assert!(!losses.quarantined(&node) && !lost(5, 603));
    }
}
