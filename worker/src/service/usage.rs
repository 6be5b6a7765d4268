//! Reports of what ended requests have used, to the coordinator that sent them.
//!
//! Records wait in a queue of their coordinator until it has replied. They are numbered, so a repeated report counts
//! once. If a coordinator restarts, records that it may have counted before are dropped and the others are sent to the
//! new process. So a record is never counted twice; those that are not counted are in a metric.

use engine::usage::{RequestUsage, RequestUsed};
use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::registry::Registry;
use proto::ids::{Epoch, ModelId, NodeId};
use proto::usage::{AttemptId, UsageRecord, UsageReport};
use std::collections::{HashMap, VecDeque};
use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tarpc::client::RpcError;
use tokio::sync::watch;
use tokio::time::timeout;
use transport::Connection;
use transport::service::deadline;

/// Most records of a report.
const REPORT_RECORDS: usize = 512;
/// Most records that wait for one coordinator: about 5 MB.
const MAX_WAITING: usize = 1 << 14;
const CALL_LIMIT: Duration = Duration::from_secs(5);
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// A coordinator's process.
type Receiver = (NodeId, Epoch);

#[derive(Debug, Default)]
struct Queue {
    /// Number of the first record.
    first: u64,
    records: VecDeque<UsageRecord>,
    /// The first ones of these were sent, and not replied to.
    sent: usize,
    /// The coordinator is of a version that takes no reports.
    refused: bool,
}

/// The records that wait for their coordinators.
#[derive(Debug)]
pub(super) struct UsageLog {
    /// Start of this process, so that numbers of an earlier one are not taken for its own.
    epoch: Epoch,
    queues: Mutex<HashMap<Receiver, Queue>>,
    changed: watch::Sender<()>,
    unreported: Counter,
    /// Attempts that have not ended, or whose last step waits for its energy.
    open: AtomicUsize,
}

impl UsageLog {
    pub(super) fn new(epoch: Epoch, registry: &mut Registry) -> Arc<Self> {
        let unreported = Counter::default();
        let help = "Ended requests whose use of the device no coordinator has counted";
        registry.register("kvasir_usage_unreported", help, unreported.clone());
        Arc::new(Self {
            epoch,
            queues: Mutex::default(),
            changed: watch::Sender::new(()),
            unreported,
            open: AtomicUsize::new(0),
        })
    }

    /// Counts what an attempt uses, and reports it when it has ended.
    pub(super) fn attempt(
        self: &Arc<Self>,
        connection: &Connection,
        id: AttemptId,
        model: ModelId,
    ) -> Arc<RequestUsage> {
        let attempt = OpenAttempt::of(self);
        let receiver = receiver(connection);
        RequestUsage::new(move |used| attempt.0.push(receiver, record(id, model, used)))
    }

    fn push(&self, receiver: Receiver, record: UsageRecord) {
        let mut queues = self.queues.lock();
        let queue = queues.entry(receiver).or_default();
        if queue.refused || queue.records.len() >= MAX_WAITING {
            self.unreported.inc();
            return;
        }
        queue.records.push_back(record);
        drop(queues);
        self.changed.send_replace(());
    }

    /// A coordinator is connected: takes over the records for its earlier processes.
    fn adopt(&self, receiver: &Receiver) {
        let mut queues = self.queues.lock();
        let earlier = queues.keys().filter(|(node, epoch)| *node == receiver.0 && *epoch != receiver.1);
        let earlier: Vec<Receiver> = earlier.cloned().collect();
        let mut unsent = Vec::new();
        for old in earlier.iter().filter_map(|earlier| queues.remove(earlier)) {
            self.unreported.inc_by(old.sent as u64);
            unsent.extend(old.records.into_iter().skip(old.sent));
        }
        queues.entry(receiver.clone()).or_default().records.extend(unsent);
    }

    fn next(&self, receiver: &Receiver) -> Option<UsageReport> {
        let mut queues = self.queues.lock();
        let queue = queues.get_mut(receiver)?;
        let records: Vec<UsageRecord> = queue.records.iter().take(REPORT_RECORDS).cloned().collect();
        queue.sent = queue.sent.max(records.len());
        (!records.is_empty()).then_some(UsageReport { epoch: self.epoch, first: queue.first, records })
    }

    /// The coordinator has counted the records of a report.
    fn counted(&self, receiver: &Receiver, first: u64, records: usize) {
        let mut queues = self.queues.lock();
        // Another connection may have reported the same records.
        if let Some(queue) = queues.get_mut(receiver).filter(|queue| queue.first == first) {
            queue.records.drain(..records.min(queue.records.len()));
            queue.first += records as u64;
            queue.sent = queue.sent.saturating_sub(records);
        }
        drop(queues);
        self.changed.send_replace(());
    }

    fn refused(&self, receiver: &Receiver) {
        let mut queues = self.queues.lock();
        let queue = queues.entry(receiver.clone()).or_default();
        queue.refused = true;
        self.unreported.inc_by(queue.records.len() as u64);
        queue.records.clear();
        drop(queues);
        self.changed.send_replace(());
    }

    /// Waits until all attempts have ended and their records are counted, at most `limit`.
    pub(super) async fn reported(&self, limit: Duration) {
        let mut changed = self.changed.subscribe();
        let is_empty = || {
            self.open.load(Ordering::SeqCst) == 0
                && self.queues.lock().values().all(|queue| queue.records.is_empty())
        };
        // The sender is here, so this returns only when the condition holds.
        let _late = timeout(limit, changed.wait_for(|()| is_empty())).await;
    }

    /// Reports to a coordinator until the connection is closed. Returns the reason.
    pub(super) async fn report(&self, connection: &Connection) -> String {
        let api = match connection.coordinator_api().await {
            Ok(api) => api,
            Err(error) => return error.to_string(),
        };
        let receiver = receiver(connection);
        self.adopt(&receiver);
        let mut changed = self.changed.subscribe();
        loop {
            changed.mark_unchanged();
            let Some(report) = self.next(&receiver) else {
                if changed.changed().await.is_err() {
                    return "the node has ended".to_owned();
                }
                continue;
            };
            let (first, records) = (report.first, report.records.len());
            match api.usage(deadline(CALL_LIMIT), report).await {
                Ok(()) => self.counted(&receiver, first, records),
                Err(RpcError::Server(error)) if error.kind == ErrorKind::Unsupported => {
                    tracing::debug!(coordinator = %receiver.0, "a coordinator of an earlier version takes no reports of usage");
                    self.refused(&receiver);
                    return std::future::pending().await;
                }
                Err(error) => {
                    tracing::debug!(coordinator = %receiver.0, %error, "cannot report usage to a coordinator");
                    tokio::time::sleep(RETRY_AFTER).await;
                }
            }
        }
    }
}

/// Counts an attempt as open until this is dropped.
struct OpenAttempt(Arc<UsageLog>);

impl OpenAttempt {
    fn of(log: &Arc<UsageLog>) -> Self {
        log.open.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(log))
    }
}

impl Drop for OpenAttempt {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::SeqCst);
        self.0.changed.send_replace(());
    }
}

fn receiver(connection: &Connection) -> Receiver {
    (connection.peer().node.clone(), connection.peer_epoch())
}

fn record(id: AttemptId, model: ModelId, used: RequestUsed) -> UsageRecord {
    UsageRecord {
        id,
        model,
        input_tokens: used.input_tokens,
        cached_tokens: used.cached_tokens,
        output_tokens: used.output_tokens,
        input_ns: used.input_ns,
        output_ns: used.output_ns,
        energy_uj: used.energy_uj,
        energy_ns: used.energy_ns,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::block::BlockId;
    use proto::ids::{Attempt, RequestId};

    fn log() -> Arc<UsageLog> {
        UsageLog::new(Epoch(9), &mut Registry::default())
    }

    fn to(epoch: u64) -> Receiver {
        (NodeId::new("c").unwrap(), Epoch(epoch))
    }

    fn request(name: &str) -> UsageRecord {
        let id = AttemptId {
            request: RequestId::new(name).unwrap(),
            part: 0,
            attempt: Attempt(0),
            root: BlockId([0; 16]),
        };
        record(id, ModelId::new("m").unwrap(), RequestUsed::default())
    }

    fn names(report: Option<UsageReport>) -> (u64, Vec<String>) {
        let report = report.unwrap();
        assert_eq!(report.epoch, Epoch(9));
        (report.first, report.records.iter().map(|record| record.id.request.to_string()).collect())
    }

    #[test]
    fn a_report_is_repeated_until_it_is_counted() {
        let log = log();
        ["a", "b"].into_iter().for_each(|name| log.push(to(1), request(name)));
        assert_eq!(names(log.next(&to(1))), (0, vec!["a".into(), "b".into()]));
        log.push(to(1), request("c"));
        assert_eq!(names(log.next(&to(1))).1.len(), 3);
        log.counted(&to(1), 0, 2);
        log.counted(&to(1), 0, 2);
        assert_eq!(names(log.next(&to(1))), (2, vec!["c".into()]));
        log.counted(&to(1), 2, 1);
        assert_eq!(log.next(&to(1)), None);
        assert_eq!(log.unreported.get(), 0);
    }

    #[test]
    fn a_restarted_coordinator_gets_only_what_its_predecessor_did_not_see() {
        let log = log();
        log.push(to(1), request("seen"));
        assert!(log.next(&to(1)).is_some());
        log.push(to(1), request("unseen"));
        log.adopt(&to(2));
        assert_eq!(names(log.next(&to(2))), (0, vec!["unseen".into()]));
        assert_eq!(log.unreported.get(), 1);
    }

    #[test]
    fn an_earlier_version_gets_no_reports_and_a_queue_is_bounded() {
        let log = log();
        log.push(to(1), request("a"));
        log.refused(&to(1));
        log.push(to(1), request("b"));
        assert_eq!((log.next(&to(1)), log.unreported.get()), (None, 2));
        (0..MAX_WAITING + 5).for_each(|_| log.push(to(2), request("c")));
        assert_eq!(log.unreported.get(), 7);
    }
}
