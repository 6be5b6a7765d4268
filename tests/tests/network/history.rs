//! What operators were told while things went wrong: is there an order in which it all could have happened?
//!
//! A register is whether a worker drains. One operator changes it, turn by turn by another coordinator; all of them read
//! all registers. A coordinator shows its own table, which may be old; but who has just been acknowledged a change by it
//! sees at least that, so change and look together are a read that began with the change.

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

/// Whoever changes one register.
pub(crate) struct Operator<'a> {
    fleet: &'a Fleet,
    history: &'a History,
    worker: usize,
    /// What it was acknowledged last.
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

    /// Changes that were acknowledged.
    pub(crate) fn acknowledged(&self) -> usize {
        self.acknowledged.load(Ordering::Relaxed)
    }

    /// Waits until some more changes have been acknowledged.
    pub(crate) fn goes_on(&self, within: Duration) -> anyhow::Result<()> {
        let before = self.acknowledged();
        wait::until("changes are acknowledged", within, || (self.acknowledged() > before + 2).then_some(()))
    }

    /// Ends operators that act [until it is over](Operator::act_until_over), when it is dropped.
    pub(crate) fn ends(&self) -> impl Drop {
        struct Ends<'a>(&'a AtomicBool);
        impl Drop for Ends<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        Ends(&self.over)
    }

    /// All of it could have happened one after the other. Once nobody acts any more.
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
    /// Changes the register by a coordinator and looks at all of them there. `false` if it was not acknowledged.
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
            // Nobody has heard of it.
            Err(error) if refused(&error) => false,
            // Nobody knows.
            _ => {
                history.note(self.worker, op, called, None);
                false
            }
        }
    }

    /// Acts until [`History::ends`], on whoever runs.
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

    /// Acts until the register is this, by whoever acknowledges it.
    pub(crate) fn act_until(&mut self, draining: bool, within: Duration) {
        let mut turn = 0..;
        wait::until("a change is acknowledged", within, || {
            let coordinator = turn.next()? % 3;
            let runs = self.fleet.pid(Node::Coordinator(coordinator)).is_some();
            (self.last == draining || runs && self.act(coordinator)).then_some(())
        })
        .unwrap();
    }

    /// What the coordinator shows that has acknowledged a change called at this time.
    fn look(&self, coordinator: usize, called: u64) {
        let Ok(status) = self.fleet.status(coordinator) else { return };
        let returned = self.history.now();
        for listed in status["workers"].as_array().into_iter().flatten() {
            let worker = listed["id"].as_str().and_then(|id| id.strip_prefix('w')?.parse::<usize>().ok());
            // One that is just joining is not shown as it will be.
            if let (Some(worker), Some(draining)) = (worker, listed["draining"].as_bool())
                && listed["state"] != "starting"
            {
                self.history.note(worker, Op::Read(u64::from(draining)), called, Some(returned));
            }
        }
    }
}

/// Elections since this term, as the coordinators that run tell it.
pub(crate) fn term(fleet: &Fleet, among: &[usize]) -> u64 {
    among.iter().filter_map(|&coordinator| own(fleet, coordinator)).map(|(_, term, _)| term).max().unwrap()
}

/// Nobody has taken the connection.
fn refused(error: &anyhow::Error) -> bool {
    let io = error.downcast_ref::<std::io::Error>();
    io.is_some_and(|error| error.kind() == ErrorKind::ConnectionRefused)
}
