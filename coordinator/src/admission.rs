//! The bounded queue in front of the workers: first come first served within a tenant, tenants in turn.
//!
//! Bounded in requests and in prompt tokens, because tokens are what takes time. Pure state: the caller says
//! when and decides what can be placed.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Longest and shortest `Retry-After`.
const RETRY_MIN: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(60);

/// How much may wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueLimits {
    /// Requests.
    pub requests: usize,
    /// Prompt tokens of these requests.
    pub tokens: u64,
}

/// The queue is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{requests} requests with {tokens} prompt tokens are waiting")]
pub struct QueueFull {
    /// Requests waiting.
    pub requests: usize,
    /// Their prompt tokens.
    pub tokens: u64,
}

/// Something that waits.
pub trait Waiting {
    /// Prompt tokens that it brings.
    fn tokens(&self) -> u64;
    /// When it is worth nothing any more.
    fn deadline(&self) -> Instant;
}

#[derive(Debug)]
struct Lane<T> {
    tenant: String,
    items: VecDeque<T>,
}

/// The queue. Lanes stand in the order in which tenants are served next.
#[derive(Debug)]
pub struct Queue<T> {
    limits: QueueLimits,
    lanes: VecDeque<Lane<T>>,
    requests: usize,
    tokens: u64,
}

impl<T: Waiting> Queue<T> {
    /// An empty queue.
    pub fn new(limits: QueueLimits) -> Self {
        Self { limits, lanes: VecDeque::new(), requests: 0, tokens: 0 }
    }

    /// Whether `requests` more with `tokens` in all would fit. An empty queue takes anything: what is too
    /// long for the model has been refused before.
    pub fn check(&self, requests: usize, tokens: u64) -> Result<(), QueueFull> {
        let fits = self.requests.saturating_add(requests) <= self.limits.requests
            && self.tokens.saturating_add(tokens) <= self.limits.tokens;
        if fits || self.requests == 0 {
            return Ok(());
        }
        Err(QueueFull { requests: self.requests, tokens: self.tokens })
    }

    /// Appends to the tenant's lane.
    pub fn push_back(&mut self, tenant: &str, item: T) {
        self.lane(tenant, &item).push_back(item);
    }

    /// Puts back at the head of the tenant's lane what had been taken out.
    pub fn push_front(&mut self, tenant: &str, item: T) {
        self.lane(tenant, &item).push_front(item);
    }

    /// Offers the head of each lane to `place`, tenants in turn, until none can be placed. `place` gives
    /// back what it cannot place now; that lane then waits, the others go on.
    pub fn drain(&mut self, mut place: impl FnMut(T) -> Option<T>) {
        let mut blocked = 0;
        while blocked < self.lanes.len() {
            let Some(mut lane) = self.lanes.pop_front() else { return };
            let Some(item) = lane.items.pop_front() else { continue };
            let tokens = item.tokens();
            match place(item) {
                Some(back) => {
                    lane.items.push_front(back);
                    blocked += 1;
                }
                None => {
                    self.requests -= 1;
                    self.tokens -= tokens;
                    blocked = 0;
                }
            }
            if !lane.items.is_empty() {
                self.lanes.push_back(lane);
            }
        }
        // A full round of refusals has turned the lanes once around: the order is as before it.
    }

    /// Takes out all that `leaves` says, in lane order.
    pub fn remove(&mut self, mut leaves: impl FnMut(&T) -> bool) -> Vec<T> {
        let mut out = Vec::new();
        for lane in &mut self.lanes {
            let (gone, stay): (Vec<T>, Vec<T>) = lane.items.drain(..).partition(&mut leaves);
            lane.items.extend(stay);
            out.extend(gone);
        }
        self.lanes.retain(|lane| !lane.items.is_empty());
        self.requests -= out.len();
        self.tokens -= out.iter().map(Waiting::tokens).sum::<u64>();
        out
    }

    /// Takes out what has passed its deadline.
    pub fn expire(&mut self, now: Instant) -> Vec<T> {
        self.remove(|item| item.deadline() <= now)
    }

    /// Requests that wait.
    pub fn requests(&self) -> usize {
        self.requests
    }

    /// Prompt tokens that wait.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    fn lane(&mut self, tenant: &str, item: &T) -> &mut VecDeque<T> {
        self.requests += 1;
        self.tokens += item.tokens();
        let at = self.lanes.iter().position(|lane| lane.tenant == tenant).unwrap_or_else(|| {
            self.lanes.push_back(Lane { tenant: tenant.to_owned(), items: VecDeque::new() });
            self.lanes.len() - 1
        });
        &mut self.lanes[at].items
    }
}

/// When to come back: the time in which workers that compute `rate` tokens per second get through `tokens`.
pub fn retry_after(tokens: u64, rate: f64) -> Duration {
    let seconds = if rate > 0.0 { tokens as f64 / rate } else { 0.0 };
    Duration::try_from_secs_f64(seconds.ceil()).unwrap_or(RETRY_MAX).clamp(RETRY_MIN, RETRY_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq)]
    struct Item(&'static str, u64, Instant);

    impl Waiting for Item {
        fn tokens(&self) -> u64 {
            self.1
        }
        fn deadline(&self) -> Instant {
            self.2
        }
    }

    fn queue(requests: usize, tokens: u64) -> (Queue<Item>, Instant) {
        (Queue::new(QueueLimits { requests, tokens }), Instant::now())
    }

    #[test]
    fn it_is_full_by_requests_or_by_tokens_but_never_when_empty() {
        let (mut q, now) = queue(2, 100);
        assert_eq!(q.check(1, 1_000), Ok(()));
        q.push_back("t", Item("a", 60, now));
        assert_eq!(q.check(1, 40), Ok(()));
        assert_eq!(q.check(1, 41), Err(QueueFull { requests: 1, tokens: 60 }));
        q.push_back("t", Item("b", 1, now));
        assert_eq!(q.check(1, 0), Err(QueueFull { requests: 2, tokens: 61 }));
        q.drain(|_| None);
        assert_eq!((q.requests(), q.tokens()), (0, 0));
    }

    #[test]
    fn tenants_take_turns_whatever_they_queue() {
        let (mut q, now) = queue(100, 1_000);
        for name in ["a1", "a2", "a3", "a4"] {
            q.push_back("a", Item(name, 1, now));
        }
        q.push_back("b", Item("b1", 1, now));
        q.push_back("c", Item("c1", 1, now));
        let mut order = Vec::new();
        q.drain(|item| {
            order.push(item.0);
            None
        });
        assert_eq!(order, ["a1", "b1", "c1", "a2", "a3", "a4"]);
    }

    #[test]
    fn a_lane_that_cannot_go_does_not_hold_up_the_others() {
        let (mut q, now) = queue(100, 1_000);
        for (tenant, name) in [("a", "a1"), ("a", "a2"), ("b", "b1"), ("b", "b2")] {
            q.push_back(tenant, Item(name, 5, now));
        }
        let mut order = Vec::new();
        q.drain(|item| {
            if item.0 == "a1" {
                return Some(item);
            }
            order.push(item.0);
            None
        });
        assert_eq!(order, ["b1", "b2"]);
        assert_eq!((q.requests(), q.tokens()), (2, 10));
    }

    #[test]
    fn what_came_back_goes_first_and_what_is_late_goes_out() {
        let (mut q, now) = queue(100, 1_000);
        let later = now + Duration::from_secs(1);
        q.push_back("a", Item("late", 3, now));
        q.push_back("a", Item("a1", 1, later));
        q.push_front("a", Item("back", 1, later));
        assert_eq!(q.expire(now), [Item("late", 3, now)]);
        assert_eq!(q.tokens(), 2);
        let mut order = Vec::new();
        q.drain(|item| {
            order.push(item.0);
            None
        });
        assert_eq!(order, ["back", "a1"]);
    }

    #[test]
    fn retry_after_follows_the_backlog_within_bounds() {
        let s = Duration::from_secs;
        assert_eq!(retry_after(0, 1_000.0), s(1));
        assert_eq!(retry_after(12_500, 1_000.0), s(13));
        assert_eq!(retry_after(u64::MAX, 1.0), s(60));
        assert_eq!(retry_after(10, 0.0), s(1));
    }
}
