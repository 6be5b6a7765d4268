//! History of operators' changes during faults, checked for linearizability.
//!
//! A register is the drain state of a worker. One operator changes it, using the coordinators in turn; all
//! operators read all registers. A coordinator reports its own table, which may be stale. But after it
//! acknowledged a change its table includes at least that change, so change and report together are a read
//! that began with the change.

use crate::group::{drain, own};
use kvasir_cluster_tests::fleet::{Fleet, Node};
use kvasir_cluster_tests::linearizable::{Call, Op, linearizable};
use kvasir_cluster_tests::wait;
use std::io::ErrorKind;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

const WORKERS: usize = 3;

pub(crate) struct History {
    began: Instant,
    calls: [Mutex<Vec<Call>>; WORKERS],
    acknowledged: AtomicUsize,
    over: AtomicBool,
}

/// An operator that changes one register.
pub(crate) struct Operator<'a> {
    fleet: &'a Fleet,
    history: &'a History,
    worker: usize,
    /// The last acknowledged value.
    last: bool,
}

impl History {
    pub(crate) fn new() -> Self {
        let (acknowledged, over) = (AtomicUsize::new(0), AtomicBool::new(false));
        Self { began: Instant::now(), calls: Default::default(), acknowledged, over }
    }

    pub(crate) fn operator<'a>(&'a self, fleet: &'a Fleet, worker: usize) -> Operator<'a> {
        Operator { fleet, history: self, worker, last: false }
    }

    /// Number of acknowledged changes.
    pub(crate) fn acknowledged(&self) -> usize {
        self.acknowledged.load(Ordering::Relaxed)
    }

    /// Waits until several more changes have been acknowledged.
    pub(crate) fn goes_on(&self, within: Duration) -> anyhow::Result<()> {
        let before = self.acknowledged();
        wait::until("changes are acknowledged", within, || (self.acknowledged() > before + 2).then_some(()))
    }

    /// When the result is dropped, ends operators that run [`Operator::act_until_over`].
    pub(crate) fn ends(&self) -> impl Drop {
        struct Ends<'a>(&'a AtomicBool);
        impl Drop for Ends<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        Ends(&self.over)
    }

    /// Asserts that the history is linearizable. Call this after all operators have stopped.
    pub(crate) fn check(&self) {
        for (worker, calls) in self.calls.iter().enumerate() {
            let calls = calls.lock().unwrap_or_else(PoisonError::into_inner);
            let unknown = calls.iter().filter(|call| call.returned.is_none()).count();
            println!("w{worker}: {} changes and looks, {unknown} without an answer", calls.len());
            assert!(linearizable(&calls), "w{worker}: {calls:?}");
        }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_nanos()).unwrap()
    }

    fn note(&self, worker: usize, op: Op, called: u64, returned: Option<u64>) {
        let mut calls = self.calls[worker].lock().unwrap_or_else(PoisonError::into_inner);
        calls.push(Call { op, called, returned });
    }
}

impl Operator<'_> {
    /// Changes the register at a coordinator and reads all registers there. `false` if not acknowledged.
    pub(crate) fn act(&mut self, coordinator: usize) -> bool {
        let (history, called) = (self.history, self.history.now());
        let op = Op::Write(u64::from(!self.last));
        match drain(self.fleet, coordinator, self.worker, !self.last) {
            Ok(answer) if answer.status == 204 => {
                history.note(self.worker, op, called, Some(history.now()));
                self.last = !self.last;
                history.acknowledged.fetch_add(1, Ordering::Relaxed);
                self.look(coordinator, called);
                true
            }
            // The change was not received.
            Err(error) if refused(&error) => false,
            // It is unknown whether the change took effect.
            _ => {
                history.note(self.worker, op, called, None);
                false
            }
        }
    }

    /// Changes the register at any running coordinator until [`History::ends`].
    pub(crate) fn act_until_over(&mut self) {
        for turn in self.worker.. {
            if self.history.over.load(Ordering::Relaxed) {
                return;
            }
            if self.fleet.pid(Node::Coordinator(turn % 3)).is_some() {
                self.act(turn % 3);
            }
        }
    }

    /// Retries at all coordinators until the register has this value.
    pub(crate) fn act_until(&mut self, draining: bool, within: Duration) {
        let mut turn = 0..;
        wait::until("a change is acknowledged", within, || {
            let coordinator = turn.next()? % 3;
            let runs = self.fleet.pid(Node::Coordinator(coordinator)).is_some();
            (self.last == draining || runs && self.act(coordinator)).then_some(())
        })
        .unwrap();
    }

    /// Records the table of the coordinator that acknowledged a change called at this time.
    fn look(&self, coordinator: usize, called: u64) {
        let Ok(status) = self.fleet.status(coordinator) else { return };
        let returned = self.history.now();
        for listed in status["workers"].as_array().into_iter().flatten() {
            let worker = listed["id"].as_str().and_then(|id| id.strip_prefix('w')?.parse::<usize>().ok());
            // A joining worker is not listed with its final state yet.
            if let (Some(worker), Some(draining)) = (worker, listed["draining"].as_bool())
                && listed["state"] != "starting"
            {
                self.history.note(worker, Op::Read(u64::from(draining)), called, Some(returned));
            }
        }
    }
}

/// The highest term of the running coordinators.
pub(crate) fn term(fleet: &Fleet, among: &[usize]) -> u64 {
    among.iter().filter_map(|&coordinator| own(fleet, coordinator)).map(|(_, term, _)| term).max().unwrap()
}

/// Whether the connection was refused.
fn refused(error: &anyhow::Error) -> bool {
    let io = error.downcast_ref::<std::io::Error>();
    io.is_some_and(|error| error.kind() == ErrorKind::ConnectionRefused)
}
