//! Another process with this worker's identity, which is alive: this one waits until that one is gone, and joins no other
//! coordinator meanwhile, where the other one may be missing only for a moment.

use parking_lot::Mutex;
use proto::Error;
use proto::ids::NodeId;
use proto::transport::Connection;
use std::time::{Duration, Instant};

/// For so long a coordinator's word counts. It is asked again more often.
const COUNTS_FOR: Duration = Duration::from_secs(10);
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// What coordinators have said of one.
#[derive(Debug, Default)]
pub(super) struct Twin(Mutex<Option<(NodeId, Instant)>>);

impl Twin {
    /// This coordinator refuses us because of it.
    pub(super) fn seen(&self, by: &Connection) {
        self.seen_at(&by.peer().node, Instant::now());
    }

    fn seen_at(&self, by: &NodeId, now: Instant) {
        *self.0.lock() = Some((by.clone(), now));
    }

    /// This coordinator has taken us.
    pub(super) fn not_seen(&self, by: &Connection) {
        let mut seen = self.0.lock();
        if seen.as_ref().is_some_and(|(node, _)| *node == by.peer().node) {
            *seen = None;
        }
    }

    pub(super) fn is_there(&self) -> bool {
        self.who_says(Instant::now()).is_some()
    }

    fn who_says(&self, now: Instant) -> Option<NodeId> {
        let seen = self.0.lock();
        let (node, at) = seen.as_ref()?;
        (now.saturating_duration_since(*at) < COUNTS_FOR).then(|| node.clone())
    }

    /// Waits while another coordinator than this one says that there is one. An error if the connection ends first.
    pub(super) async fn hold_back(&self, connection: &Connection) -> Result<(), Error> {
        while self.who_says(Instant::now()).is_some_and(|node| node != connection.peer().node) {
            tokio::select! {
                error = connection.closed() => return Err(error),
                () = tokio::time::sleep(LOOK_EVERY) => {}
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_coordinator_said_counts_for_a_while() {
        let (twin, now, node) = (Twin::default(), Instant::now(), NodeId::new("c0").unwrap());
        assert_eq!(twin.who_says(now), None);
        twin.seen_at(&node, now);
        assert_eq!(twin.who_says(now + COUNTS_FOR / 2), Some(node));
        assert_eq!(twin.who_says(now + COUNTS_FOR), None);
    }
}
