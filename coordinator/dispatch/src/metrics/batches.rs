//! Metrics of files and batches.

use super::families::{One, one, registered};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

#[derive(Debug)]
pub(super) struct Batches {
    pub(super) lines: Family<One, Counter>,
    files: Gauge,
    file_bytes: Gauge,
    unfinished: Gauge,
    at_workers: Gauge,
}

impl Batches {
    pub(super) fn register(r: &mut Registry) -> Self {
        let lines = registered(r, "kvasir_batch_lines", "Lines of batches that have ended, by outcome");
        Self {
            lines,
            files: registered(r, "kvasir_files", "Files of all tenants"),
            file_bytes: registered(r, "kvasir_files_bytes", "Bytes of all files"),
            unfinished: registered(r, "kvasir_batches_unfinished", "Batches that have not ended"),
            at_workers: registered(r, "kvasir_batch_lines_running", "Lines of batches at workers"),
        }
    }

    pub(super) fn line(&self, completed: bool) {
        let outcome = if completed { "completed" } else { "failed" };
        self.lines.get_or_create(&one("outcome", outcome)).inc();
    }

    pub(super) fn set(&self, files: u64, bytes: u64, unfinished: u64, at_workers: usize) {
        let whole = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
        self.files.set(whole(files));
        self.file_bytes.set(whole(bytes));
        self.unfinished.set(whole(unfinished));
        self.at_workers.set(whole(at_workers as u64));
    }
}
