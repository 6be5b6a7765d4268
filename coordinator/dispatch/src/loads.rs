//! The load of the workers, for requests that run in their idle time.

use super::Dispatch;
use proto::worker::WorkerState;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// The load of all workers.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct WorkerLoads {
    /// Reports received so far.
    pub reports: u64,
    /// Workers that take work.
    pub ready: usize,
    /// Sequences that wait at workers.
    pub waiting: u64,
    /// Requests that wait for a worker.
    pub queued: usize,
    /// The largest used part of a worker's cache, 0 to 1.
    pub kv_used: f64,
    /// Most sequences that this coordinator may have at one worker.
    pub max_inflight: usize,
}

impl Dispatch {
    pub fn worker_loads(&self) -> WorkerLoads {
        let reports = self.reports.load(Ordering::Relaxed);
        let state = self.state.lock();
        let mut loads = WorkerLoads {
            reports,
            queued: state.balancer.queue().requests,
            max_inflight: self.max_inflight as usize,
            ..WorkerLoads::default()
        };
        for view in state.balancer.workers(Instant::now()) {
            let Some(report) = view.report.as_ref().filter(|_| view.state() == WorkerState::Ready) else {
                continue;
            };
            loads.ready += 1;
            loads.waiting += u64::from(report.waiting);
            loads.kv_used = loads.kv_used.max(report.kv_used as f64 / report.kv_total.max(1) as f64);
        }
        loads
    }
}
