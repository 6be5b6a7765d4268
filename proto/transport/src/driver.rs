//! Driver of a QUIC connection, which a thread that writes a small message can poll itself to send it at
//! once.
//!
//! quinn has one task per connection: a writer wakes the task, and the task sends. For a thread outside the
//! runtime, this costs a wake-up and a thread switch before the first byte leaves, a good part of a short
//! message's latency. So the task's future is kept here, and the writing thread can poll it
//! ([`Handover::poll`]). Wake-ups of the task during that poll are recorded, and the polling thread handles
//! them.

use super::socket::Socket;
use crate::Error;
use std::cell::RefCell;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Instant;
use tokio::runtime::Handle;

/// [`Driver::state`]: a wake-up wakes the background task.
const FREE: u8 = 0;
/// A thread is polling the driver and handles wake-ups itself.
const TAKEN: u8 = 1;
/// Like [`TAKEN`], and a wake-up has arrived.
const WOKEN: u8 = 2;

type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Tokio's runtime for QUIC, with a [`Driver`] for each connection's task.
#[derive(Debug)]
pub(super) struct Drivers;

thread_local! {
    /// The last driver that this thread has spawned.
    static SPAWNED: RefCell<Option<Arc<Driver>>> = const { RefCell::new(None) };
}

impl quinn::Runtime for Drivers {
    fn new_timer(&self, at: Instant) -> Pin<Box<dyn quinn::AsyncTimer>> {
        quinn::TokioRuntime.new_timer(at)
    }

    fn spawn(&self, future: Task) {
        let driver = Arc::new(Driver {
            task: Mutex::new(Some(future)),
            spawned: Mutex::new(None),
            state: AtomicU8::new(FREE),
        });
        SPAWNED.set(Some(Arc::clone(&driver)));
        tokio::spawn(Background(driver));
    }

    fn wrap_udp_socket(&self, socket: std::net::UdpSocket) -> io::Result<Arc<dyn quinn::AsyncUdpSocket>> {
        Ok(Arc::new(Socket(quinn::TokioRuntime.wrap_udp_socket(socket)?)))
    }

    fn now(&self) -> Instant {
        quinn::TokioRuntime.now()
    }
}

/// Background task that polls the driver when no writing thread does. A runtime that shuts down drops it,
/// and the driver's task with it.
struct Background(Arc<Driver>);

impl Future for Background {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        self.0.poll(context)
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        let task = self.0.task.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(task);
    }
}

/// Task of a connection.
pub(super) struct Driver {
    /// `None` once the task has ended.
    task: Mutex<Option<Task>>,
    /// Waker of the background task.
    spawned: Mutex<Option<Waker>>,
    state: AtomicU8,
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Driver")
    }
}

impl Wake for Driver {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let woken = |state| (state != FREE).then_some(WOKEN);
        if self.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, woken).is_err() {
            self.wake_task();
        }
    }
}

impl Driver {
    /// Returns the driver of the connection that this thread has just started.
    pub(super) fn spawned() -> Result<Arc<Self>, Error> {
        SPAWNED.take().ok_or(Error::Protocol("a connection has no driver"))
    }

    fn wake_task(&self) {
        let waker = self.spawned.lock().unwrap_or_else(PoisonError::into_inner).clone();
        waker.inspect(Waker::wake_by_ref);
    }

    fn poll(self: &Arc<Self>, context: &Context<'_>) -> Poll<()> {
        {
            let mut spawned = self.spawned.lock().unwrap_or_else(PoisonError::into_inner);
            if spawned.as_ref().is_none_or(|waker| !waker.will_wake(context.waker())) {
                *spawned = Some(context.waker().clone());
            }
        }
        self.poll_task(&mut self.task.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn poll_task(self: &Arc<Self>, task: &mut MutexGuard<'_, Option<Task>>) -> Poll<()> {
        let Some(future) = task.as_mut() else { return Poll::Ready(()) };
        let polled = future.as_mut().poll(&mut Context::from_waker(&Waker::from(Arc::clone(self))));
        if polled.is_ready() {
            **task = None;
        }
        polled
    }
}

/// Sends what is written to one connection at once, from the writing thread.
#[derive(Debug, Clone)]
pub struct Handover(Arc<Driver>);

impl Handover {
    pub(super) fn new(driver: &Arc<Driver>) -> Self {
        Self(Arc::clone(driver))
    }

    /// Polls a future that writes to the connection, once, and sends what it has written, up to some
    /// datagrams. After [`Poll::Pending`] the caller must poll the future to completion elsewhere, because
    /// nothing wakes this thread. `runtime` is the connection's runtime; the caller need not be one of its
    /// threads.
    pub fn poll<F: Future>(&self, runtime: &Handle, write: Pin<&mut F>) -> Poll<F::Output> {
        let driver = &self.0;
        let _runtime = runtime.enter();
        let mut context = Context::from_waker(Waker::noop());
        let mut task = match driver.task.try_lock() {
            Ok(task) => task,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            // Another thread polls the driver and, once woken, sends this too.
            Err(TryLockError::WouldBlock) => return write.poll(&mut context),
        };
        driver.state.store(TAKEN, Ordering::Release);
        let written = write.poll(&mut context);
        let woken = driver.state.swap(TAKEN, Ordering::AcqRel) == WOKEN;
        let ended = woken && driver.poll_task(&mut task).is_ready();
        drop(task);
        // The background task does the rest of the work, and ends the task.
        if driver.state.swap(FREE, Ordering::AcqRel) == WOKEN || ended {
            driver.wake_task();
        }
        written
    }
}
