//! A fork-join pool of pinned threads.
//!
//! [`Pool::run`] calls one closure on every thread and returns when all calls have returned. Between runs
//! workers spin for a while, because the next run of a decode step is microseconds away, and then park,
//! because an idle server must not burn its CPUs. While all threads are awake a run costs one store and one
//! counter; in a pool of one thread it costs nothing.

#![allow(unsafe_code)]

mod affinity;

#[cfg(test)]
mod tests;

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::num::NonZeroUsize;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use crate::error::Error;

pub use affinity::{give_way, run_when_idle};

#[derive(Debug, Clone)]
pub struct PoolConfig {
    /// Number of threads, including the caller of [`Pool::run`].
    pub threads: NonZeroUsize,
    /// CPU of each thread (`cpus[i % cpus.len()]`). `None`: the operating system places the threads. The
    /// caller is thread 0 and is pinned only by [`Pool::pin_caller`].
    pub cpus: Option<Vec<usize>>,
    /// How long a thread spins before it parks. Must be zero or short if there are more threads than CPUs.
    pub spin: Duration,
}

impl PoolConfig {
    /// `threads` unpinned threads that spin for 50 µs, or not at all if there are more threads than usable
    /// CPUs.
    pub fn new(threads: NonZeroUsize) -> Self {
        let cpus = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let spin = if threads.get() > cpus { Duration::ZERO } else { Duration::from_micros(50) };
        Self { threads, cpus: None, spin }
    }
}

/// A closure to run with its lifetime erased: [`Pool::run`] does not return before every worker has finished
/// it.
type Job = *const (dyn Fn(usize) + Sync);

/// State that the caller and the workers share.
struct Shared {
    /// Number of runs begun. A change signals the workers to start.
    epoch: AtomicUsize,
    /// The closure of the current run. The caller writes it before it increments `epoch`, while no worker is
    /// running.
    job: UnsafeCell<Option<Job>>,
    /// Workers that have not yet finished the current run.
    remaining: AtomicUsize,
    stop: AtomicBool,
    /// The first panic of the current run.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    /// Thread to wake when `remaining` reaches zero. Written like `job`.
    caller: UnsafeCell<Option<Thread>>,
    caller_parked: AtomicBool,
    workers_parked: Box<[AtomicBool]>,
    spin: Duration,
}

// SAFETY: `job` and `caller` are written only by the thread that holds `Pool::turn`, before it increments
// `epoch` and after it saw `remaining` of the previous run at zero, so never while a worker may read them.
// Workers read them only between seeing that increment and their own decrement of `remaining`. The job itself
// is `Sync`.
unsafe impl Sync for Shared {}
// SAFETY: as above; the job pointer is dereferenced only while the caller of `run` keeps the closure alive.
unsafe impl Send for Shared {}

thread_local! {
    /// Set while this thread is inside a run. A nested run must not wait for threads that wait for it.
    static INSIDE_RUN: Cell<bool> = const { Cell::new(false) };
}

/// A fork-join pool of pinned threads.
pub struct Pool {
    shared: Arc<Shared>,
    /// Serialises runs.
    turn: Mutex<()>,
    workers: Vec<JoinHandle<()>>,
    /// Same order as `workers`.
    handles: Vec<Thread>,
    cpus: Option<Vec<usize>>,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("threads", &self.threads()).field("cpus", &self.cpus).finish()
    }
}

impl Pool {
    /// Starts the worker threads, `config.threads - 1` of them.
    ///
    /// If a thread cannot be pinned to its CPU (for example outside the container's set), this is logged and
    /// otherwise ignored.
    ///
    /// # Errors
    /// [`Error::Spawn`] if the operating system cannot start a thread.
    pub fn new(config: PoolConfig) -> Result<Self, Error> {
        let workers = config.threads.get() - 1;
        let shared = Arc::new(Shared {
            epoch: AtomicUsize::new(0),
            job: UnsafeCell::new(None),
            remaining: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            panic: Mutex::new(None),
            caller: UnsafeCell::new(None),
            caller_parked: AtomicBool::new(false),
            workers_parked: (0..workers).map(|_| AtomicBool::new(false)).collect(),
            spin: config.spin,
        });
        let cpus = config.cpus.filter(|cpus| !cpus.is_empty());
        // The pool is built first: if a spawn fails, dropping it stops the threads that have started.
        let mut pool = Self { shared, turn: Mutex::new(()), workers: Vec::new(), handles: Vec::new(), cpus };
        for thread in 1..config.threads.get() {
            let shared = Arc::clone(&pool.shared);
            let cpu = pool.cpu_of(thread);
            let handle = std::thread::Builder::new()
                .name(format!("kvasir-cpu-{thread}"))
                .spawn(move || {
                    if let Some(cpu) = cpu {
                        affinity::pin(cpu);
                    }
                    work(&shared, thread);
                })
                .map_err(|source| Error::Spawn { thread, kind: source.kind() })?;
            pool.handles.push(handle.thread().clone());
            pool.workers.push(handle);
        }
        Ok(pool)
    }

    /// Number of threads, including the caller.
    pub fn threads(&self) -> usize {
        self.shared.workers_parked.len() + 1
    }

    /// Pins the calling thread to the CPU of thread 0 if CPUs are assigned. Only for the thread that calls
    /// [`Pool::run`]. Threads that it starts later inherit the CPU.
    pub fn pin_caller(&self) {
        if let Some(cpu) = self.cpu_of(0) {
            affinity::pin(cpu);
        }
    }

    fn cpu_of(&self, thread: usize) -> Option<usize> {
        self.cpus.as_ref().map(|cpus| cpus[thread % cpus.len()])
    }

    /// Calls `f(thread)` once for every thread number, in parallel, and returns when all calls have returned.
    /// The caller is thread 0. A nested run makes its calls one after the other on its own thread.
    ///
    /// # Panics
    /// If a call panics: resumes the first panic after all calls have ended.
    pub fn run(&self, f: &(dyn Fn(usize) + Sync)) {
        if self.workers.is_empty() || INSIDE_RUN.get() {
            (0..self.threads()).for_each(f);
            return;
        }
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes. This function returns, normally or by a panic, only after it saw
        // `remaining` at zero, and workers do not access the closure after they decrement it.
        let job: Job = unsafe { std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), Job>(f) };
        // SAFETY: `turn` is held and the previous run has ended (see `Shared`).
        unsafe {
            *shared.job.get() = Some(job);
            *shared.caller.get() = Some(std::thread::current());
        }
        shared.remaining.store(self.workers.len(), Ordering::Relaxed);
        shared.epoch.fetch_add(1, Ordering::Release);
        // Pairs with the fence in `wait`.
        fence(Ordering::SeqCst);
        for (parked, handle) in shared.workers_parked.iter().zip(&self.handles) {
            if parked.load(Ordering::Relaxed) {
                handle.unpark();
            }
        }
        let own = inside_run(|| f(0));
        wait(shared.spin, &shared.caller_parked, || shared.remaining.load(Ordering::Acquire) == 0);
        let worker = shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(payload) = own.err().or(worker) {
            resume_unwind(payload);
        }
    }

    /// Calls `f(item)` once for every item in `0..items`. Each thread has a share of consecutive items and takes
    /// small chunks of it in ascending order, so that it reads memory in order. A thread that has finished its
    /// share takes chunks of the others' shares. It is not determined which thread runs an item, so results must
    /// not depend on it.
    ///
    /// # Panics
    /// As [`Pool::run`].
    pub fn for_each(&self, items: usize, f: &(dyn Fn(usize) + Sync)) {
        self.for_each_range(items, 1, &|range| range.for_each(f));
    }

    /// Like [`Pool::for_each`], in ranges of consecutive items, each range except the last a multiple of
    /// `grain`. For items that are too small to be taken one by one.
    ///
    /// # Panics
    /// As [`Pool::run`].
    pub fn for_each_range(&self, items: usize, grain: usize, f: &(dyn Fn(Range<usize>) + Sync)) {
        if items == 0 {
            return;
        }
        let grain = grain.max(1);
        if self.workers.is_empty() || items <= grain {
            f(0..items);
            return;
        }
        // About eight chunks per thread: a slow thread then delays the others by at most an eighth of its
        // share.
        let chunk = (items / (self.threads() * 8)).next_multiple_of(grain).max(grain);
        let shares = shares(items.div_ceil(chunk), self.threads());
        self.run(&|thread| {
            let (before, own) = shares.split_at(thread);
            for share in own.iter().chain(before) {
                while let Some(index) = share.take() {
                    f(index * chunk..items.min((index + 1) * chunk));
                }
            }
        });
    }
}

/// Consecutive chunks that one thread takes before it helps the others. A cache line of its own, since its thread
/// writes it all the time.
#[repr(align(64))]
struct Share {
    /// The next chunk, or any number from `end` on.
    next: AtomicUsize,
    end: usize,
}

impl Share {
    /// Takes the next chunk. The plain load keeps threads that find the share empty from writing to its line.
    fn take(&self) -> Option<usize> {
        if self.next.load(Ordering::Relaxed) >= self.end {
            return None;
        }
        Some(self.next.fetch_add(1, Ordering::Relaxed)).filter(|index| *index < self.end)
    }
}

/// Divides `chunks` chunks among `threads` threads.
fn shares(chunks: usize, threads: usize) -> Vec<Share> {
    let (each, left) = (chunks / threads, chunks % threads);
    let start = |thread: usize| thread * each + thread.min(left);
    (0..threads)
        .map(|thread| Share { next: AtomicUsize::new(start(thread)), end: start(thread + 1) })
        .collect()
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.epoch.fetch_add(1, Ordering::Release);
        for handle in &self.handles {
            handle.unpark();
        }
        for worker in self.workers.drain(..) {
            // Workers catch the panics of their jobs, so a join error has nothing to report.
            let _ = worker.join();
        }
    }
}

/// Runs `f` as part of a run and catches a panic.
fn inside_run(f: impl FnOnce()) -> std::thread::Result<()> {
    INSIDE_RUN.set(true);
    let result = catch_unwind(AssertUnwindSafe(f));
    INSIDE_RUN.set(false);
    result
}

/// Spins, then parks, until `done` returns true. The thread that makes `done` true must then pass a fence,
/// and unpark this thread if it sees `parked`. This function sets `parked`, passes a fence and checks `done`,
/// so that at least one of the two threads sees the other's store. Fences are used instead of sequentially
/// consistent accesses because emulators of Arm let a load overtake an earlier release store.
fn wait(spin: Duration, parked: &AtomicBool, done: impl Fn() -> bool) {
    if done() {
        return;
    }
    if !spin.is_zero() {
        let start = Instant::now();
        loop {
            // Reading the clock costs more than reading the flag, so the clock is read once in 64 spins.
            for _ in 0..64 {
                if done() {
                    return;
                }
                std::hint::spin_loop();
            }
            if start.elapsed() >= spin {
                break;
            }
        }
    }
    parked.store(true, Ordering::Relaxed);
    fence(Ordering::SeqCst);
    while !done() {
        std::thread::park();
    }
    parked.store(false, Ordering::Relaxed);
}

/// Main loop of a worker.
fn work(shared: &Shared, thread: usize) {
    let parked = &shared.workers_parked[thread - 1];
    let mut seen = 0;
    loop {
        wait(shared.spin, parked, || shared.epoch.load(Ordering::Acquire) != seen);
        // The epoch has advanced by exactly one: the caller increments it again only after this worker has
        // finished, except to stop.
        seen = shared.epoch.load(Ordering::Acquire);
        if shared.stop.load(Ordering::Relaxed) {
            return;
        }
        // SAFETY: the epoch has changed and this worker has not yet decremented `remaining` (see `Shared`).
        if let Some(job) = unsafe { *shared.job.get() } {
            // SAFETY: `run` keeps the closure alive until `remaining` is zero.
            let job = unsafe { &*job };
            if let Err(payload) = inside_run(|| job(thread)) {
                shared.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(payload);
            }
        }
        finish(shared);
    }
}

/// Marks this worker as finished. The last worker wakes the caller.
fn finish(shared: &Shared) {
    let mut left = shared.remaining.load(Ordering::Acquire);
    while left > 1 {
        match shared.remaining.compare_exchange_weak(left, left - 1, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => return,
            Err(now) => left = now,
        }
    }
    // This is the last worker: the run cannot end and `caller` cannot change before the store below.
    // SAFETY: this worker has not yet decremented `remaining` (see `Shared`).
    let caller = unsafe { (*shared.caller.get()).clone() };
    shared.remaining.store(0, Ordering::Release);
    // Pairs with the fence in `wait`.
    fence(Ordering::SeqCst);
    if shared.caller_parked.load(Ordering::Relaxed)
        && let Some(caller) = caller
    {
        caller.unpark();
    }
}
