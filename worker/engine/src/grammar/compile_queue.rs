//! Schedules grammar compilation by tenant: the tenant that has used the least compile time goes next.
//!
//! At most [`MAX_PER_TENANT`] grammars of a tenant and [`MAX_TOTAL`] in total are compiled at once. So slow
//! grammars of one tenant leave room for other tenants.

use parking_lot::Mutex;
use proto::message::TenantShare;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// Maximum compilations of one tenant at a time.
const MAX_PER_TENANT: usize = 2;
/// Maximum compilations at a time. One that exceeds its limit counts until it has ended.
const MAX_TOTAL: usize = 4;
/// Maximum waiting requests of a tenant; more are refused at once.
const MAX_WAITING: usize = 256;

/// Time charged for a compilation until its real time is known.
const ASSUMED: Duration = super::COMPILE_TIME;

/// Permission to compile one grammar. Dropping it hands it to the next request.
#[derive(Debug)]
pub(super) struct CompilePermit {
    queue: CompileQueue,
    tenant: u64,
    since: Instant,
}

impl Drop for CompilePermit {
    fn drop(&mut self) {
        self.queue.0.lock().ended(self.tenant, self.since.elapsed());
        self.queue.hand_out();
    }
}

#[derive(Debug, Clone, Default)]
pub(super) struct CompileQueue(Arc<Mutex<Queue<oneshot::Sender<CompilePermit>>>>);

impl CompileQueue {
    /// Waits for a permit. `None` if too many requests of the tenant wait already. Dropping the future
    /// cancels the wait.
    pub(super) async fn permit(&self, share: TenantShare) -> Option<CompilePermit> {
        let (sender, permit) = oneshot::channel();
        if !self.0.lock().push(share, sender, oneshot::Sender::is_closed) {
            return None;
        }
        self.hand_out();
        permit.await.ok()
    }

    fn hand_out(&self) {
        loop {
            let next = self.0.lock().pop(oneshot::Sender::is_closed);
            let Some((tenant, waiting)) = next else { return };
            // If the receiver was just dropped, the permit is dropped with the message and handed on.
            let _ = waiting.send(CompilePermit { queue: self.clone(), tenant, since: Instant::now() });
        }
    }
}

/// Waiting requests by tenant. Sans-IO.
#[derive(Debug)]
struct Queue<W> {
    lanes: HashMap<u64, Lane<W>>,
    under_way: usize,
    /// Clock of the tenant that was served last.
    now: u64,
    /// Number of requests so far.
    pushed: u64,
}

#[derive(Debug)]
struct Lane<W> {
    weight: u64,
    /// Nanoseconds of compile time divided by weight, added to the clock that the lane started with.
    clock: u64,
    under_way: usize,
    waiting: VecDeque<(u64, W)>,
}

impl<W> Default for Queue<W> {
    fn default() -> Self {
        Self { lanes: HashMap::new(), under_way: 0, now: 0, pushed: 0 }
    }
}

impl<W> Queue<W> {
    /// Adds a request. Returns `false` if too many requests of the tenant wait. Drops cancelled requests
    /// first.
    fn push(&mut self, share: TenantShare, waiter: W, is_cancelled: impl Fn(&W) -> bool) -> bool {
        let now = self.now;
        self.lanes.retain(|_, lane| lane.under_way > 0 || !lane.waiting.is_empty() || lane.clock > now);
        let new = || Lane { weight: 1, clock: now, under_way: 0, waiting: VecDeque::new() };
        let lane = self.lanes.entry(share.tenant).or_insert_with(new);
        lane.weight = u64::from(share.weight.max(1));
        if lane.under_way == 0 && lane.waiting.is_empty() {
            // An idle tenant gains no credit.
            lane.clock = lane.clock.max(now);
        }
        if lane.waiting.len() >= MAX_WAITING {
            lane.waiting.retain(|(_, waiter)| !is_cancelled(waiter));
        }
        let room = lane.waiting.len() < MAX_WAITING;
        if room {
            self.pushed += 1;
            lane.waiting.push_back((self.pushed, waiter));
        }
        room
    }

    /// The next request, if fewer than the maximum are being compiled.
    fn pop(&mut self, is_cancelled: impl Fn(&W) -> bool) -> Option<(u64, W)> {
        if self.under_way >= MAX_TOTAL {
            return None;
        }
        for lane in self.lanes.values_mut() {
            while lane.waiting.pop_front_if(|(_, waiter)| is_cancelled(waiter)).is_some() {}
        }
        let open = self.lanes.iter_mut().filter(|(_, lane)| lane.under_way < MAX_PER_TENANT);
        let heads =
            open.filter_map(|(&tenant, lane)| Some(((lane.clock, lane.waiting.front()?.0), tenant, lane)));
        let (_, tenant, lane) = heads.min_by_key(|(order, ..)| *order)?;
        let (_, waiter) = lane.waiting.pop_front()?;
        self.now = self.now.max(lane.clock);
        lane.clock += nanos(ASSUMED) / lane.weight;
        lane.under_way += 1;
        self.under_way += 1;
        Some((tenant, waiter))
    }

    /// Records that a compilation of the tenant ended after `took`.
    fn ended(&mut self, tenant: u64, took: Duration) {
        self.under_way -= 1;
        if let Some(lane) = self.lanes.get_mut(&tenant) {
            lane.under_way -= 1;
            lane.clock =
                (lane.clock + nanos(took) / lane.weight).saturating_sub(nanos(ASSUMED) / lane.weight);
        }
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(tenant: u64, weight: u32) -> TenantShare {
        TenantShare { tenant, weight }
    }

    fn never_cancelled(_: &u32) -> bool {
        false
    }

    #[test]
    fn a_tenants_grammars_wait_for_its_own_and_not_for_anothers() {
        let mut queue = Queue::default();
        for n in 0..16 {
            assert!(queue.push(share(1, 1), n, never_cancelled));
        }
        let granted = std::iter::from_fn(|| queue.pop(never_cancelled)).collect::<Vec<_>>();
        assert_eq!(granted, [(1, 0), (1, 1)], "a tenant has two places, although there are more");
        // Another tenant's grammar gets a permit at once, and so does its next one.
        for n in 100..105 {
            assert!(queue.push(share(2, 1), n, never_cancelled));
            assert_eq!(queue.pop(never_cancelled), Some((2, n)));
            queue.ended(2, Duration::from_millis(100));
        }
    }

    /// All tenants always have waiting requests; each gets its share of the time.
    #[test]
    fn time_is_shared_by_weight() {
        let mut queue = Queue::default();
        let tenants = [(1, 1, 500), (2, 1, 50), (3, 2, 200)];
        for (tenant, weight, _) in tenants {
            (0..200).for_each(|n| assert!(queue.push(share(tenant, weight), n, never_cancelled)));
        }
        let mut used: HashMap<u64, u64> = HashMap::new();
        // By end time.
        let (mut under_way, mut now) = (Vec::new(), 0);
        for _ in 0..150 {
            while let Some((tenant, _)) = queue.pop(never_cancelled) {
                let (.., took) = tenants.into_iter().find(|(name, ..)| *name == tenant).unwrap();
                under_way.push((now + took, tenant, took));
            }
            assert!(under_way.len() <= MAX_TOTAL);
            under_way.sort();
            let (over, tenant, took) = under_way.remove(0);
            now = over;
            *used.entry(tenant).or_default() += took;
            queue.ended(tenant, Duration::from_millis(took));
        }
        let (a, b, c) = (used[&1] as f64, used[&2] as f64, used[&3] as f64);
        assert!((0.6..1.6).contains(&(a / b)) && (1.4..2.8).contains(&(c / a)), "{used:?}");
    }

    #[test]
    fn canceled_requests_are_skipped_and_the_queue_is_bounded() {
        let mut queue = Queue::default();
        let is_cancelled = |n: &u32| *n < 1_000;
        for n in 0..MAX_WAITING as u32 {
            assert!(queue.push(share(1, 1), n, is_cancelled));
        }
        assert!(queue.push(share(1, 1), 2_000, is_cancelled), "those that left do not count");
        assert_eq!(queue.pop(is_cancelled), Some((1, 2_000)));
        assert_eq!(queue.pop(is_cancelled), None);
        (0..MAX_WAITING as u32).for_each(|n| assert!(queue.push(share(1, 1), 1_000 + n, is_cancelled)));
        assert!(!queue.push(share(1, 1), 3_000, is_cancelled));
        assert!(queue.push(share(2, 1), 3_000, is_cancelled), "another tenant's may");
        // An idle tenant is removed once the others have caught up with its clock.
        queue.ended(1, Duration::ZERO);
        for tenant in 10..1_000 {
            assert!(queue.push(share(tenant, 1), 1_000, is_cancelled));
            let (next, _) = queue.pop(is_cancelled).unwrap();
            queue.ended(next, Duration::from_secs(1));
        }
        assert!(queue.lanes.len() < 1_000);
    }

    #[tokio::test]
    async fn a_permit_is_handed_on_when_it_is_dropped_or_not_taken() {
        let queue = CompileQueue::default();
        let (first, second) =
            (queue.permit(share(1, 1)).await.unwrap(), queue.permit(share(1, 1)).await.unwrap());
        let mut left = Box::pin(queue.permit(share(1, 1)));
        let mut waits = Box::pin(queue.permit(share(1, 1)));
        assert!(futures_now(&mut left).is_none() && futures_now(&mut waits).is_none());
        drop(left);
        drop(first);
        assert!(waits.await.is_some());
        drop(second);
        assert_eq!(queue.0.lock().under_way, 0);
    }

    /// The future's value if it is ready.
    fn futures_now<T>(future: &mut (impl Future<Output = T> + Unpin)) -> Option<T> {
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        match std::pin::Pin::new(future).poll(&mut context) {
            std::task::Poll::Ready(ready) => Some(ready),
            std::task::Poll::Pending => None,
        }
    }
}
