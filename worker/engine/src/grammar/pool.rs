//! Threads that compute masks, shared fairly between requests. A request that has used much time waits for
//! requests that have used little. So a costly grammar slows similar ones and has little effect on others.
//!
//! Uses start-time fair queueing (Goyal, Vin and Cheng, 1996). Each request has a clock of the time that it
//! used, which never lags behind the pool's clock. The job of the request with the lowest clock runs next.
//! Short jobs, which nearly all are, hardly advance the clock, so they run between jobs of other requests.

use crate::Error;
use crate::progress::spawn;
use parking_lot::{Condvar, Mutex};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// A job must drop its [`RunningJob`] when its work is done, before it reports its result.
pub(super) type Job = Box<dyn FnOnce(RunningJob) + Send>;

/// A job of `t` ns that is shorter than this counts as `t * t / SHORT` ns.
const SHORT: u64 = 1_000_000;

/// A request's clock: nanoseconds of work that are charged to it.
#[derive(Debug, Clone, Default)]
pub(super) struct Share(Arc<AtomicU64>);

/// The pool. Its threads end when it is dropped and all jobs are done.
pub(super) struct Pool(Arc<Inside>);

struct Inside {
    queue: Mutex<(Queue<Job>, Open)>,
    changed: Condvar,
}

#[derive(PartialEq, Eq)]
enum Open {
    Yes,
    No,
}

impl Pool {
    pub(super) fn start(threads: usize) -> Result<Self, Error> {
        let pool = Self(Arc::new(Inside {
            queue: Mutex::new((Queue::default(), Open::Yes)),
            changed: Condvar::new(),
        }));
        for _ in 0..threads.max(1) {
            let inside = Arc::clone(&pool.0);
            spawn("kvasir-grammar", move || serve(&inside))?;
        }
        Ok(pool)
    }

    /// Queues a job of a request.
    pub(super) fn run(&self, share: &Share, job: Job) {
        self.0.queue.lock().0.push(share, job);
        self.0.changed.notify_one();
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.0.queue.lock().1 = Open::No;
        self.0.changed.notify_all();
    }
}

fn serve(inside: &Inside) {
    loop {
        let (start, share, job) = {
            let mut queue = inside.queue.lock();
            loop {
                match queue.0.pop() {
                    Some(next) => break next,
                    None if queue.1 == Open::No => return,
                    None => inside.changed.wait(&mut queue),
                }
            }
        };
        let running = RunningJob { start, share, since: Instant::now() };
        // A panic affects only its job; the waiting request has a deadline.
        drop(catch_unwind(AssertUnwindSafe(|| job(running))));
    }
}

/// A running job. Dropping it charges its time to the request.
pub(super) struct RunningJob {
    start: u64,
    share: Share,
    since: Instant,
}

impl Drop for RunningJob {
    fn drop(&mut self) {
        let took = u64::try_from(self.since.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.share.spend(self.start, took);
    }
}

impl Share {
    /// Charges a job that started at clock `start` and took `took` ns.
    fn spend(&self, start: u64, took: u64) {
        let counts = if took < SHORT { took * took / SHORT } else { took };
        self.0.store(start.saturating_add(counts), Ordering::Release);
    }
}

/// Waiting jobs by start clock. Ties go to the job that was queued first.
struct Queue<T> {
    waiting: BTreeMap<(u64, u64), (Share, T)>,
    /// Start clock of the job that was started last.
    now: u64,
    pushed: u64,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Self { waiting: BTreeMap::new(), now: 0, pushed: 0 }
    }
}

impl<T> Queue<T> {
    fn push(&mut self, share: &Share, job: T) {
        // An idle request gains no credit.
        let start = share.0.load(Ordering::Acquire).max(self.now);
        self.pushed += 1;
        self.waiting.insert((start, self.pushed), (share.clone(), job));
    }

    /// The next job, with its start clock.
    fn pop(&mut self) -> Option<(u64, Share, T)> {
        let ((start, _), (share, job)) = self.waiting.pop_first()?;
        self.now = self.now.max(start);
        Some((start, share, job))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn a_cheap_job_waits_for_at_most_one_expensive_job_and_none_starves() {
        const EXPENSIVE: u64 = 17_000_000;
        const CHEAP: u64 = 50_000;
        let shares: Vec<Share> = (0..33).map(|_| Share::default()).collect();
        let mut queue = Queue::default();
        for (request, share) in shares.iter().enumerate() {
            queue.push(share, request);
        }
        let mut turns = vec![0; shares.len()];
        let (mut jobs_between, mut waited, mut comes) = (0u32, Vec::new(), false);
        for step in 0..20_000u64 {
            let (start, share, request) = queue.pop().unwrap();
            turns[request] += 1;
            let took = if request == 0 { CHEAP } else { EXPENSIVE + step * 1_037_389 % 3_400_000 };
            share.spend(start, took);
            if std::mem::take(&mut comes) {
                queue.push(&shares[0], 0);
            }
            if request == 0 {
                // Its next job arrives while another job runs.
                waited.push(std::mem::take(&mut jobs_between));
                comes = true;
            } else {
                jobs_between += 1;
                queue.push(&share, request);
            }
        }
        // At first all clocks are equal. Later the job runs next, or nearly so, whenever it arrives.
        assert!(waited[2..].iter().all(|waited| *waited <= 3), "{:?}", waited[2..].iter().max());
        let expensive = &turns[1..];
        let (min, max) = (expensive.iter().min().unwrap(), expensive.iter().max().unwrap());
        assert!(turns[0] > 9_000 && *min > 280 && max - min <= 8, "{turns:?}");
    }

    #[test]
    fn jobs_run_after_a_panic_and_threads_end_with_the_pool() {
        let pool = Pool::start(1).unwrap();
        let inside = Arc::downgrade(&pool.0);
        let (sender, receiver) = channel();
        let share = Share::default();
        pool.run(&share, Box::new(|_| panic!("a job of a test breaks")));
        for n in 0..3 {
            let sender = sender.clone();
            pool.run(&Share::default(), Box::new(move |_| sender.send(n).unwrap()));
        }
        assert_eq!([0, 1, 2].map(|_| receiver.recv().unwrap()), [0, 1, 2]);
        assert!(share.0.load(Ordering::Acquire) > 0, "it has paid for what it broke");
        drop(pool);
        let ended = Instant::now();
        while inside.strong_count() > 0 {
            assert!(ended.elapsed().as_secs() < 20, "its threads go on");
            std::thread::yield_now();
        }
    }
}
