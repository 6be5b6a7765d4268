//! Metrics of the consensus. Clones share their counters.

use super::core::{ProposeError, RaftRole, Status, Vitals};
use super::error::ConsensusError;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use std::time::Duration;

type Label = [(&'static str, String); 1];

/// Histogram buckets in seconds: from a read on an idle loopback to a timeout without a majority.
const SECONDS: [f64; 13] = [5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0];

/// State of the coordinator group, as known to one coordinator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupStanding {
    /// Whether a leader is known.
    pub quorum: bool,
    pub term: u64,
    /// Index of the last entry known to be committed.
    pub committed: u64,
    /// Index of the last entry applied here.
    pub applied: u64,
    pub voters: u64,
    /// Coordinators that replicate the log without a vote.
    pub learners: u64,
    /// Number of observed leader changes.
    pub leader_changes: u64,
    pub log_entries: u64,
    /// Bytes of the log entries.
    pub log_bytes: u64,
    /// Whether the disk is too full for proposals.
    pub disk_full: bool,
}

#[derive(Debug, Clone)]
pub struct RaftMetrics {
    role: Family<Label, Gauge>,
    term: Gauge,
    quorum: Gauge,
    committed: Gauge,
    applied: Gauge,
    leader_changes: Counter,
    voters: Gauge,
    learners: Gauge,
    log_entries: Gauge,
    log_bytes: Gauge,
    snapshot_index: Gauge,
    snapshot_bytes: Gauge,
    disk_full: Gauge,
    lag: Family<Label, Gauge>,
    proposals: Counter,
    failed: Family<Label, Counter>,
    read: Histogram,
    write: Histogram,
}

impl Default for RaftMetrics {
    fn default() -> Self {
        let default = Family::default;
        Self {
            role: default(),
            term: Gauge::default(),
            quorum: Gauge::default(),
            committed: Gauge::default(),
            applied: Gauge::default(),
            leader_changes: Counter::default(),
            voters: Gauge::default(),
            learners: Gauge::default(),
            log_entries: Gauge::default(),
            log_bytes: Gauge::default(),
            snapshot_index: Gauge::default(),
            snapshot_bytes: Gauge::default(),
            disk_full: Gauge::default(),
            lag: default(),
            proposals: Counter::default(),
            failed: Family::default(),
            read: Histogram::new(SECONDS),
            write: Histogram::new(SECONDS),
        }
    }
}

impl RaftMetrics {
    pub fn register(&self, registry: &mut Registry) {
        let mut gauge = |name: &str, help: &str, gauge: &Gauge| registry.register(name, help, gauge.clone());
        gauge("kvasir_raft_term", "The latest known term", &self.term);
        gauge("kvasir_raft_quorum", "1 while a leader is known, so that changes can be made", &self.quorum);
        gauge("kvasir_raft_commit_index", "Index of the last committed entry", &self.committed);
        gauge(
            "kvasir_raft_applied_index",
            "Index of the last entry that this coordinator applied",
            &self.applied,
        );
        gauge("kvasir_raft_voters", "Voters of the group", &self.voters);
        gauge("kvasir_raft_learners", "Learners of the group, which do not vote", &self.learners);
        gauge("kvasir_raft_log_entries", "Entries in the log", &self.log_entries);
        gauge("kvasir_raft_log_bytes", "Bytes of the entries in the log", &self.log_bytes);
        gauge("kvasir_raft_snapshot_index", "Index of the last entry in the snapshot", &self.snapshot_index);
        gauge("kvasir_raft_snapshot_bytes", "Bytes of the snapshot", &self.snapshot_bytes);
        gauge(
            "kvasir_raft_disk_full",
            "1 while the disk is full, so that this coordinator proposes no changes",
            &self.disk_full,
        );
        let role = "1 for the current role of this coordinator in its group";
        registry.register("kvasir_raft_role", role, self.role.clone());
        let lag = "Entries that another coordinator has not confirmed; exported by the leader";
        registry.register("kvasir_raft_peer_lag_entries", lag, self.lag.clone());
        let changes = "Changes of the leader";
        registry.register("kvasir_raft_leader_changes", changes, self.leader_changes.clone());
        registry.register(
            "kvasir_raft_proposals",
            "Changes proposed by this coordinator",
            self.proposals.clone(),
        );
        let failed = "Changes proposed by this coordinator that have no outcome, by reason";
        registry.register("kvasir_raft_proposals_failed", failed, self.failed.clone());
        let read = "Time until a read reflected all changes acknowledged before it";
        registry.register("kvasir_raft_read_index_seconds", read, self.read.clone());
        let write = "Time of a durable write to the disk";
        registry.register("kvasir_raft_write_seconds", write, self.write.clone());
    }

    /// The last known state of the group.
    pub fn standing(&self) -> GroupStanding {
        let count = |gauge: &Gauge| u64::try_from(gauge.get()).unwrap_or(0);
        GroupStanding {
            quorum: self.quorum.get() == 1,
            term: count(&self.term),
            committed: count(&self.committed),
            applied: count(&self.applied),
            voters: count(&self.voters),
            learners: count(&self.learners),
            leader_changes: self.leader_changes.get(),
            log_entries: count(&self.log_entries),
            log_bytes: count(&self.log_bytes),
            disk_full: self.disk_full.get() == 1,
        }
    }

    /// Updates the metrics to `now`; `before` is the status of the last call.
    pub(super) fn update(&self, before: &Status, now: &Status) {
        let int = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
        for role in RaftRole::ALL {
            self.role.get_or_create(&[("role", role.name().to_owned())]).set(i64::from(role == now.role));
        }
        self.term.set(int(now.term));
        self.quorum.set(i64::from(now.leader.is_some()));
        self.committed.set(int(now.committed));
        self.applied.set(int(now.applied));
        if now.leader.is_some() && (now.leader != before.leader || now.term != before.term) {
            self.leader_changes.inc();
        }
    }

    pub(super) fn holds(&self, vitals: &Vitals) {
        let int = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
        self.voters.set(int(vitals.voters));
        self.learners.set(int(vitals.learners));
        self.log_entries.set(int(vitals.log_entries));
        self.log_bytes.set(int(vitals.log_bytes));
        self.snapshot_index.set(int(vitals.snapshot_index));
        self.snapshot_bytes.set(int(vitals.snapshot_bytes));
        // Removes members that have left or that this coordinator no longer tracks.
        self.lag.clear();
        for (node, lag) in &vitals.lags {
            self.lag.get_or_create(&[("coordinator", node.to_string())]).set(int(*lag));
        }
    }

    pub(super) fn has_room(&self, enough: bool) {
        self.disk_full.set(i64::from(!enough));
    }

    pub(super) fn proposed(&self) {
        self.proposals.inc();
    }

    pub(super) fn failed(&self, error: &ConsensusError) {
        let reason = match error {
            ConsensusError::NoQuorum => "no_quorum",
            ConsensusError::Refused(ProposeError::Refused(_) | ProposeError::TooLong(_)) => "refused",
            ConsensusError::Refused(ProposeError::NoRoom) => "no_room",
            ConsensusError::Refused(_) => "not_now",
            ConsensusError::Overloaded => "overloaded",
            ConsensusError::Stopped => "stopped",
        };
        self.failed.get_or_create(&[("reason", reason.to_owned())]).inc();
    }

    pub(super) fn read(&self, took: Duration) {
        self.read.observe(took.as_secs_f64());
    }

    pub(super) fn wrote(&self, took: Duration) {
        self.write.observe(took.as_secs_f64());
    }
}
