//! The activity of a connection: idle, or answering a request.

use futures::task::AtomicWaker;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::task::Context;
use std::time::Duration;
use tokio::time::Instant;

/// No request is being answered; a head may be arriving.
const IDLE: u8 = 0;
/// A request is being answered.
const BUSY: u8 = 1;
/// The connection has changed to another protocol.
const UPGRADED: u8 = 2;
/// Closed while idle; accepts no more requests.
const CLOSED: u8 = 3;

/// The activity of a connection. Shared by its stream, its responses and the listener.
#[derive(Debug)]
pub(super) struct ConnectionActivity {
    state: AtomicU8,
    /// When the connection became idle last, in microseconds after `began`.
    idle_since: AtomicU64,
    began: Instant,
    /// Whether bytes of a response wait for the client to read them.
    unsent: AtomicBool,
    /// Woken at the end of a response.
    reader: AtomicWaker,
}

impl ConnectionActivity {
    /// The activity of a new connection. `began` is the same instant for all connections of a listener.
    pub(super) fn new(began: Instant) -> Self {
        let activity = Self {
            state: AtomicU8::new(IDLE),
            idle_since: AtomicU64::new(0),
            began,
            unsent: AtomicBool::new(false),
            reader: AtomicWaker::new(),
        };
        activity.idle_since.store(activity.now(), Ordering::Relaxed);
        activity
    }

    fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    fn change(&self, from: u8, to: u8) -> bool {
        self.state.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Marks the start of a request. Returns `false` if the connection is closed.
    pub(super) fn begin(&self) -> bool {
        self.change(IDLE, BUSY)
    }

    pub(super) fn end(&self) {
        self.idle_since.store(self.now(), Ordering::Relaxed);
        if self.change(BUSY, IDLE) {
            self.reader.wake();
        }
    }

    /// Marks the connection as upgraded to another protocol.
    pub(super) fn upgrade(&self) {
        if self.change(BUSY, UPGRADED) {
            self.reader.wake();
        }
    }

    /// Closes an idle connection. Returns `false` if it is not idle, or a response is not fully sent.
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

    /// When the connection became idle, as a number that orders the connections of one listener. `None` if
    /// not idle.
    pub(super) fn idle_since(&self) -> Option<u64> {
        let idle = self.state.load(Ordering::Acquire) == IDLE && !self.unsent.load(Ordering::Acquire);
        idle.then(|| self.idle_since.load(Ordering::Relaxed))
    }

    /// The time since the connection became idle last.
    pub(super) fn idle_for(&self) -> Duration {
        Duration::from_micros(self.now().saturating_sub(self.idle_since.load(Ordering::Relaxed)))
    }

    /// Sets whether bytes of a response wait for the client.
    pub(super) fn unsent(&self, unsent: bool) {
        if self.unsent.load(Ordering::Relaxed) != unsent {
            self.unsent.store(unsent, Ordering::Release);
        }
    }

    /// Registers the task to be woken at the end of the current response.
    pub(super) fn wait(&self, cx: &Context<'_>) {
        self.reader.register(cx.waker());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_idle_connection_is_closed_and_a_closed_one_accepts_no_request() {
        let activity = ConnectionActivity::new(Instant::now());
        assert!(activity.begin());
        assert!(!activity.close() && activity.idle_since().is_none());
        activity.end();
        activity.unsent(true);
        assert!(!activity.close() && activity.idle_since().is_none(), "its answer is not sent");
        activity.unsent(false);
        assert!(activity.idle_since().is_some() && activity.close());
        assert!(!activity.begin() && activity.is_closed());
        let upgraded = ConnectionActivity::new(Instant::now());
        assert!(upgraded.begin());
        upgraded.upgrade();
        upgraded.end();
        assert!(upgraded.is_upgraded() && !upgraded.close());
    }
}
