//! Detects another live process with this worker's identity. This process then waits until the other one has
//! exited. Meanwhile it joins no other coordinator, because the other process may have lost that connection
//! only briefly.

use parking_lot::Mutex;
use proto::ids::NodeId;
use std::time::{Duration, Instant};
use transport::{Connection, Error};

/// Lifetime of a coordinator's report. The worker registers with the coordinator again within that time.
const COUNTS_FOR: Duration = Duration::from_secs(10);
const CHECK_INTERVAL: Duration = Duration::from_millis(250);

/// The last coordinator that reported another process, and when.
#[derive(Debug, Default)]
pub(super) struct Twin(Mutex<Option<(NodeId, Instant)>>);

impl Twin {
    /// Records that this coordinator refused the worker because of another process.
    pub(super) fn record(&self, by: &Connection) {
        self.record_at(&by.peer().node, Instant::now());
    }

    fn record_at(&self, by: &NodeId, now: Instant) {
        *self.0.lock() = Some((by.clone(), now));
    }

    /// Records that this coordinator has accepted the worker.
    pub(super) fn clear(&self, by: &Connection) {
        let mut record = self.0.lock();
        if record.as_ref().is_some_and(|(node, _)| *node == by.peer().node) {
            *record = None;
        }
    }

    pub(super) fn is_present(&self) -> bool {
        self.reporter(Instant::now()).is_some()
    }

    fn reporter(&self, now: Instant) -> Option<NodeId> {
        let record = self.0.lock();
        let (node, at) = record.as_ref()?;
        (now.saturating_duration_since(*at) < COUNTS_FOR).then(|| node.clone())
    }

    /// Waits while a coordinator other than this one reports another process. Returns an error if the
    /// connection ends first.
    pub(super) async fn hold_back(&self, connection: &Connection) -> Result<(), Error> {
        while self.reporter(Instant::now()).is_some_and(|node| node != connection.peer().node) {
            tokio::select! {
                error = connection.closed() => return Err(error),
                () = tokio::time::sleep(CHECK_INTERVAL) => {}
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_coordinators_report_expires() {
        let (twin, now, node) = (Twin::default(), Instant::now(), NodeId::new("c0").unwrap());
        assert_eq!(twin.reporter(now), None);
        twin.record_at(&node, now);
        assert_eq!(twin.reporter(now + COUNTS_FOR / 2), Some(node));
        assert_eq!(twin.reporter(now + COUNTS_FOR), None);
    }
}
