//! Orders that were sent, and the reports that answer them.

use super::{ANSWER_LIMIT, ROUND_LIMIT};
use dispatch::HostWorker;
use proto::deployment::{ModelsOrder, ModelsReport};
use proto::ids::{Epoch, NodeId};
use std::collections::HashSet;
use std::time::Instant;
use tokio::task::JoinSet;

/// Exchanges in progress, at most one with each worker: one that does not answer delays no other.
#[derive(Debug, Default)]
pub(super) struct Exchanges {
    tasks: JoinSet<(NodeId, Epoch, Option<ModelsReport>)>,
    /// A worker that has started again is another one.
    running: HashSet<(NodeId, Epoch)>,
}

impl Exchanges {
    /// Sends an order unless the worker still has one to answer.
    pub(super) fn begin(&mut self, worker: &HostWorker, order: impl FnOnce() -> ModelsOrder) {
        if !self.running.insert((worker.node.clone(), worker.epoch)) {
            return;
        }
        let (worker, order) = (worker.clone(), order());
        self.tasks.spawn(async move {
            let report = worker.order(order, ANSWER_LIMIT).await;
            (worker.node, worker.epoch, report)
        });
    }

    /// Waits until all exchanges have ended, at most for [`ROUND_LIMIT`], and returns the reports with their times.
    pub(super) async fn ended(&mut self) -> Vec<(NodeId, Instant, ModelsReport)> {
        let until = tokio::time::Instant::now() + ROUND_LIMIT;
        let mut reports = Vec::new();
        while let Ok(Some(ended)) = tokio::time::timeout_at(until, self.tasks.join_next()).await {
            // A panic of the task was already reported; its worker would get no further order.
            let Ok((node, epoch, report)) = ended else {
                self.running.clear();
                continue;
            };
            self.running.remove(&(node.clone(), epoch));
            reports.extend(report.map(|report| (node, Instant::now(), report)));
        }
        reports
    }
}
