//! Whose turn it is on a connection: the client's, which may be idle, or the server's, which answers.

use futures::task::AtomicWaker;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::task::Context;
use std::time::Duration;
use tokio::time::Instant;

/// Nothing is being answered; a head may be on its way.
const IDLE: u8 = 0;
/// A request is being answered.
const BUSY: u8 = 1;
/// The connection is no HTTP any more.
const UPGRADED: u8 = 2;
/// It was idle, and shall be used no more.
const CLOSED: u8 = 3;

/// See the module. Shared by the connection's stream, by what answers and by the listener.
#[derive(Debug)]
pub(super) struct ConnectionActivity {
    state: AtomicU8,
    /// Microseconds from `began` to when it was idle last.
    idle_since: AtomicU64,
    began: Instant,
    /// Bytes of an answer wait for the client to take them.
    unsent: AtomicBool,
    /// Waits for the end of an answer.
    reader: AtomicWaker,
}

impl ConnectionActivity {
    /// Of a connection that is new. `began` is one time for all connections of a listener.
    pub(super) fn new(began: Instant) -> Self {
        let turn = Self {
            state: AtomicU8::new(IDLE),
            idle_since: AtomicU64::new(0),
            began,
            unsent: AtomicBool::new(false),
            reader: AtomicWaker::new(),
        };
        turn.idle_since.store(turn.now(), Ordering::Relaxed);
        turn
    }

    fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    fn change(&self, from: u8, to: u8) -> bool {
        self.state.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// A request has come. `false` if the connection is closed.
    pub(super) fn begin(&self) -> bool {
        self.change(IDLE, BUSY)
    }

    pub(super) fn end(&self) {
        self.idle_since.store(self.now(), Ordering::Relaxed);
        if self.change(BUSY, IDLE) {
            self.reader.wake();
        }
    }

    /// It is being answered by something else than HTTP from here on.
    pub(super) fn upgrade(&self) {
        if self.change(BUSY, UPGRADED) {
            self.reader.wake();
        }
    }

    /// Closes an idle connection. `false` if it is not idle, or an answer is not sent yet.
    pub(super) fn close(&self) -> bool {
        !self.unsent.load(Ordering::Acquire) && self.change(IDLE, CLOSED)
    }

    pub(super) fn is_busy(&self) -> bool {
        self.state.load(Ordering::Acquire) == BUSY
    }

    pub(super) fn is_upgraded(&self) -> bool {
        self.state.load(Ordering::Acquire) == UPGRADED
    }

    pub(super) fn is_closed(&self) -> bool {
        self.state.load(Ordering::Acquire) == CLOSED
    }

    /// Since when it is idle, as a number that orders connections of one listener; none while it is not.
    pub(super) fn idle_since(&self) -> Option<u64> {
        let idle = self.state.load(Ordering::Acquire) == IDLE && !self.unsent.load(Ordering::Acquire);
        idle.then(|| self.idle_since.load(Ordering::Relaxed))
    }

    /// How long it has been idle, if it is.
    pub(super) fn idle_for(&self) -> Duration {
        Duration::from_micros(self.now().saturating_sub(self.idle_since.load(Ordering::Relaxed)))
    }

    /// Whether bytes of an answer wait for the client.
    pub(super) fn unsent(&self, unsent: bool) {
        if self.unsent.load(Ordering::Relaxed) != unsent {
            self.unsent.store(unsent, Ordering::Release);
        }
    }

    /// Has the task woken when the answer under way has ended.
    pub(super) fn wait(&self, cx: &Context<'_>) {
        self.reader.register(cx.waker());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_idle_connection_is_closed_and_a_closed_one_takes_nothing() {
        let turn = ConnectionActivity::new(Instant::now());
        assert!(turn.begin());
        assert!(!turn.close() && turn.idle_since().is_none());
        turn.end();
        turn.unsent(true);
        assert!(!turn.close() && turn.idle_since().is_none(), "its answer is not sent");
        turn.unsent(false);
        assert!(turn.idle_since().is_some() && turn.close());
        assert!(!turn.begin() && turn.is_closed());
        let upgraded = ConnectionActivity::new(Instant::now());
        assert!(upgraded.begin());
        upgraded.upgrade();
        upgraded.end();
        assert!(upgraded.is_upgraded() && !upgraded.close());
    }
}
