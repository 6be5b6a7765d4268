//! Runs long computations, such as planning a request, outside the threads that serve connections: about as
//! many at once as there are cores, and in turns by tenant. A tenant delays others by at most one job.
//!
//! The work runs on dedicated threads, each of which waits on a channel. The thread that became idle last
//! gets the next job ([decision 61](../../../docs/decisions/0061-plan-requests-outside-the-runtime.md)).

use super::error::ApiError;
use parking_lot::Mutex;
use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, mpsc};
use tokio::sync::oneshot;

#[derive(Debug)]
pub struct PlanningThreads {
    state: Mutex<State>,
    /// Channels of the idle threads; the last one became idle last.
    idle: Mutex<Vec<Thread>>,
    /// Most concurrent jobs.
    max_jobs: usize,
    /// Most concurrent jobs of one tenant.
    max_tenant_jobs: usize,
}

#[derive(Debug, Default)]
struct State {
    running: usize,
    lanes: HashMap<Arc<str>, Lane>,
    /// Tenants with waiting jobs, in order of their turns.
    order: VecDeque<Arc<str>>,
}

#[derive(Debug, Default)]
struct Lane {
    running: usize,
    waiting: VecDeque<oneshot::Sender<PlanningPermit>>,
}

/// A job. `work` returns a closure that sends the result to the waiter.
struct PlanningJob {
    work: Box<dyn FnOnce() -> Box<dyn FnOnce() + Send> + Send>,
    permit: PlanningPermit,
}

/// The channel to a thread. It is sent along with each job, so that the thread ends when no sender is left.
#[derive(Debug)]
struct Thread(mpsc::Sender<(PlanningJob, Self)>);

fn planner() -> std::io::Result<Thread> {
    let (jobs, queue) = mpsc::channel::<(PlanningJob, Thread)>();
    let run = move || {
        for (PlanningJob { work, permit }, thread) in queue {
            let send_result = work();
            permit.threads.idle.lock().push(thread);
            drop(permit);
            send_result();
        }
    };
    std::thread::Builder::new().name("planner".into()).spawn(run)?;
    Ok(Thread(jobs))
}

/// Permission to run a job; returned when dropped.
#[derive(Debug)]
struct PlanningPermit {
    threads: Arc<PlanningThreads>,
    tenant: Arc<str>,
}

impl PlanningThreads {
    /// `cores`: concurrent jobs of one tenant. One more job may run, so that another tenant need not wait for
    /// all of them.
    pub fn new(cores: usize) -> Arc<Self> {
        let (state, idle) = (Mutex::default(), Mutex::default());
        Arc::new(Self { state, idle, max_jobs: cores + 1, max_tenant_jobs: cores })
    }

    /// Runs `work` when it is the tenant's turn.
    pub async fn run<T: Send + 'static>(
        self: &Arc<Self>,
        tenant: &Arc<str>,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let permit = self.permit(tenant).await.ok_or(ApiError::Internal)?;
        let (sender, receiver) = oneshot::channel();
        let work = move || {
            let result = catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
                tracing::error!("the planning of a request panicked; the request fails");
                Err(ApiError::Internal)
            });
            // Fails only if the waiter is gone.
            Box::new(move || drop(sender.send(result))) as Box<dyn FnOnce() + Send>
        };
        self.hand_over(PlanningJob { work: Box::new(work), permit })?;
        receiver.await.unwrap_or(Err(ApiError::Internal))
    }

    /// Gives a job to an idle thread, or to a new one. There are at most as many threads as concurrent jobs.
    fn hand_over(&self, job: PlanningJob) -> Result<(), ApiError> {
        let idle = self.idle.lock().pop();
        let thread = match idle {
            Some(thread) => thread,
            None => planner().map_err(|error| {
                tracing::error!(%error, "cannot start a planning thread; the request fails");
                ApiError::Internal
            })?,
        };
        let again = Thread(thread.0.clone());
        thread.0.send((job, again)).map_err(|_| ApiError::Internal)
    }

    /// Waits until the tenant may run another job.
    async fn permit(self: &Arc<Self>, tenant: &Arc<str>) -> Option<PlanningPermit> {
        let receiver = {
            let mut state = self.state.lock();
            let all = state.running;
            let lane = state.lanes.entry(Arc::clone(tenant)).or_default();
            if all < self.max_jobs && lane.running < self.max_tenant_jobs {
                lane.running += 1;
                state.running += 1;
                return Some(PlanningPermit { threads: Arc::clone(self), tenant: Arc::clone(tenant) });
            }
            let (sender, receiver) = oneshot::channel();
            lane.waiting.push_back(sender);
            if lane.waiting.len() == 1 {
                state.order.push_back(Arc::clone(tenant));
            }
            receiver
        };
        receiver.await.ok()
    }
}

impl State {
    /// The next job, if one may run.
    fn next(
        &mut self,
        max_jobs: usize,
        max_tenant_jobs: usize,
    ) -> Option<(Arc<str>, oneshot::Sender<PlanningPermit>)> {
        for _ in 0..self.order.len() {
            if self.running >= max_jobs {
                return None;
            }
            let tenant = self.order.pop_front()?;
            let Some(lane) = self.lanes.get_mut(&tenant) else { continue };
            // Drops waiters that are gone.
            lane.waiting.retain(|sender| !sender.is_closed());
            let next = if lane.running < max_tenant_jobs { lane.waiting.pop_front() } else { None };
            if !lane.waiting.is_empty() {
                self.order.push_back(Arc::clone(&tenant));
            }
            if let Some(next) = next {
                lane.running += 1;
                self.running += 1;
                return Some((tenant, next));
            }
        }
        None
    }
}

impl Drop for PlanningPermit {
    fn drop(&mut self) {
        let mut given = Vec::new();
        {
            let mut state = self.threads.state.lock();
            state.running -= 1;
            let idle = state.lanes.get_mut(&self.tenant).is_some_and(|lane| {
                lane.running -= 1;
                lane.running == 0 && lane.waiting.is_empty()
            });
            if idle {
                state.lanes.remove(&self.tenant);
            }
            while let Some((tenant, sender)) = state.next(self.threads.max_jobs, self.threads.max_tenant_jobs)
            {
                given.push((sender, Self { threads: Arc::clone(&self.threads), tenant }));
            }
        }
        for (sender, permit) in given {
            // If the waiter is gone, the permit is dropped and passed on.
            let _ = sender.send(permit);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    fn tenant(name: &str) -> Arc<str> {
        name.into()
    }

    #[tokio::test]
    async fn one_tenant_leaves_a_turn_and_turns_go_round() {
        let threads = PlanningThreads::new(2);
        let (a, b, c) = (tenant("a"), tenant("b"), tenant("c"));
        let first = threads.permit(&a).now_or_never().unwrap().unwrap();
        let _second = threads.permit(&a).now_or_never().unwrap().unwrap();
        let mut more: Vec<_> = (0..3).map(|_| Box::pin(threads.permit(&a))).collect();
        assert!(more.iter_mut().all(|permit| permit.now_or_never().is_none()), "two cores are one tenant's");
        let b_permit = threads.permit(&b).now_or_never().expect("another has one more").unwrap();
        let mut b_next = Box::pin(threads.permit(&b));
        let mut third = Box::pin(threads.permit(&c));
        assert!((&mut b_next).now_or_never().is_none() && (&mut third).now_or_never().is_none());
        // `a` has waited longest, but is at its limit.
        drop(b_permit);
        let _b_permit = (&mut b_next).now_or_never().flatten().expect("it is the turn of b");
        drop(first);
        assert!((&mut more[0]).now_or_never().is_none(), "a has had its turn before c");
        let of_c = (&mut third).now_or_never().flatten().expect("it is the turn of c");
        drop(of_c);
        assert!((&mut more[0]).now_or_never().flatten().is_some());
    }

    #[tokio::test]
    async fn a_cancelled_waiter_does_not_block_others() {
        let threads = PlanningThreads::new(1);
        let (a, b) = (tenant("a"), tenant("b"));
        let held = [threads.permit(&a).await.unwrap(), threads.permit(&b).await.unwrap()];
        let mut cancelled: Vec<_> = (0..1_000).map(|_| Box::pin(threads.permit(&a))).collect();
        cancelled.iter_mut().for_each(|turn| assert!(turn.now_or_never().is_none()));
        let mut last = Box::pin(threads.permit(&a));
        assert!((&mut last).now_or_never().is_none());
        drop(cancelled);
        drop(held);
        assert!(last.now_or_never().flatten().is_some());
        let state = threads.state.lock();
        assert_eq!((state.running, state.lanes.len(), state.order.len()), (0, 0, 0));
    }

    #[tokio::test]
    async fn a_panic_of_the_work_is_an_internal_error_and_returns_the_permit() {
        let threads = PlanningThreads::new(1);
        let result = threads.run::<()>(&tenant("a"), || panic!("it must not end the process")).await;
        assert_eq!(result, Err(ApiError::Internal));
        assert_eq!(threads.run(&tenant("a"), || Ok(7)).await, Ok(7));
    }

    /// Long work does not block the other tasks of a single-threaded runtime.
    #[tokio::test]
    async fn a_runtime_goes_on_beside_work() {
        let threads = PlanningThreads::new(2);
        let (notify, channel) = (Arc::new(tokio::sync::Notify::new()), std::sync::mpsc::channel());
        let (sender, receiver) = channel;
        let notified = Arc::clone(&notify);
        let other = tokio::spawn(async move {
            notified.notified().await;
            sender.send(()).unwrap();
        });
        let result = tokio::spawn(async move {
            let work = move || {
                notify.notify_one();
                receiver.recv().map_err(|_| ApiError::Internal)
            };
            threads.run(&tenant("a"), work).await
        });
        assert_eq!(result.await.unwrap(), Ok(()));
        other.await.unwrap();
    }

    #[tokio::test]
    async fn threads_are_reused_and_end_with_their_owner() {
        let threads = PlanningThreads::new(2);
        let a = tenant("a");
        let name = || Ok(std::thread::current().id());
        let first = threads.run(&a, name).await.unwrap();
        assert_ne!(first, std::thread::current().id());
        for _ in 0..10 {
            assert_eq!(threads.run(&a, name).await.unwrap(), first);
        }
        assert_eq!(threads.idle.lock().len(), 1);
        let (weak, alive) = (Arc::downgrade(&threads), Arc::new(()));
        let seen = Arc::downgrade(&alive);
        let work = move || {
            drop(alive);
            Ok(())
        };
        threads.run(&a, work).await.unwrap();
        drop(threads);
        assert!(weak.upgrade().is_none() && seen.upgrade().is_none());
    }
}
