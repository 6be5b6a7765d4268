//! F11: the disk of a leader's log accepts writes and then fails to sync. Unsynced data must not be relied
//! on: the process exits without another write, the others elect a leader, and no acknowledged change is
//! lost.

use crate::group::{RECOVERY, completes, converge, drain, drain_by_any, is_draining, leader, others};
use kvasir_cluster_tests::fleet::{Fleet, Node};
use kvasir_cluster_tests::wait;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// A tracer that makes every sync of a process fail; ended when dropped.
struct FailingSync(Child);

impl FailingSync {
    /// Syncs fail from the return of this function on.
    fn of(pid: u32) -> Self {
        let mut tracer = Command::new("strace");
        tracer.args(["-f", "-qq", "-e", "trace=fsync,fdatasync", "-e", "signal=none"]);
        tracer.args(["-e", "inject=fsync,fdatasync:error=EIO", "-p", &pid.to_string()]);
        let tracer = tracer.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let failing = Self(tracer.expect("Debian's package `strace` is needed"));
        let threads = format!("/proc/{pid}/task");
        wait::until("all threads are traced", RECOVERY, || {
            let mut threads = fs::read_dir(&threads).ok()?.flatten();
            threads.all(|thread| is_traced(&thread.path())).then_some(())
        })
        .unwrap();
        failing
    }
}

impl Drop for FailingSync {
    fn drop(&mut self) {
        // It exits by itself with the traced process.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn is_traced(thread: &Path) -> bool {
    let status = fs::read_to_string(thread.join("status")).unwrap_or_default();
    let tracer = status.lines().find_map(|line| line.strip_prefix("TracerPid:"));
    tracer.is_some_and(|tracer| tracer.trim() != "0")
}

#[test]
fn a_leader_whose_disk_keeps_nothing_ends_and_the_others_decide() {
    let fleet = Fleet::builder("sync-fails", &crate::tiny_model(), 3, 1).start(58).unwrap();
    let model = fleet.model().unwrap();
    let failing = leader(&fleet, &[0, 1, 2]);
    let left = others(failing);
    assert_eq!(drain(&fleet, left[0], 0, true).unwrap().status, 204);
    let disk = FailingSync::of(fleet.pid(Node::Coordinator(failing)).unwrap());
    // The client may get an unknown outcome for this change.
    let answer = drain(&fleet, left[0], 0, false);
    // Ended by a signal, as by abort.
    assert_eq!(fleet.ended(Node::Coordinator(failing)).unwrap(), None);
    drop(disk);
    let log = fs::read_to_string(fleet.log(Node::Coordinator(failing)).unwrap()).unwrap();
    assert!(log.contains("Raft cannot continue"), "{log}");
    leader(&fleet, &left);
    if answer.is_ok_and(|answer| answer.status == 204) {
        assert_eq!(is_draining(&fleet, left[1], 0), Some(false), "an acknowledged change is lost");
    }
    drain_by_any(&fleet, 0, false);

    fleet.start(Node::Coordinator(failing)).unwrap();
    converge(&fleet);
    let undrained = || (!is_draining(&fleet, failing, 0)?).then_some(());
    wait::until("it knows what was decided", RECOVERY, undrained).unwrap();
    fleet.wait_for_workers(failing, 1).unwrap();
    assert!(completes(&fleet, failing, &model));
}
