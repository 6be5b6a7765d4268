//! Requests that wait for a prefix which one worker is getting and another will pull. A request leaves when
//! the first worker has the prefix or will not get it, or when its patience is over. It is then placed again
//! with the current state.

use super::{Load, QueuedRequest, WorkerPool, load_of};
use crate::balancer::{QueueView, RouteRequest};
use crate::routing::transfer::Pull;
use crate::slot::Slot;
use std::time::{Duration, Instant};

/// A request waits for at most this many times the expected duration, within the two limits below. It may
/// wait again only if more of the prefix has arrived meanwhile.
const PATIENCE: f64 = 2.0;
/// Lower limit of a wait.
const LEAST_PATIENCE: Duration = Duration::from_secs(1);
/// Upper limit of a wait, used as is while a worker's prefill rate is unknown.
const MOST_PATIENCE: Duration = Duration::from_secs(10);

#[derive(Debug, Default)]
pub(super) struct Awaited {
    /// In order of arrival.
    requests: Vec<Kept>,
    /// Workers with a change that may end a wait.
    stirred: Vec<Slot>,
}

#[derive(Debug)]
struct Kept {
    waiter: QueuedRequest,
    /// The worker that will pull.
    at: Slot,
    /// The puller's membership.
    join: u64,
    /// The worker whose prefix is awaited.
    from: Slot,
    /// Awaited length in units.
    units: u32,
    /// Announced units when the wait began.
    held: u32,
}

impl Awaited {
    /// Marks a change of the worker in `slot`.
    pub(super) fn stir(&mut self, slot: Slot) {
        if self.requests.iter().any(|kept| kept.from == slot) && !self.stirred.contains(&slot) {
            self.stirred.push(slot);
        }
    }

    /// Marks a possible change of any worker.
    pub(super) fn stir_all(&mut self) {
        self.stirred = self.requests.iter().map(|kept| kept.from).collect();
        self.stirred.sort_unstable();
        self.stirred.dedup();
    }

    fn take(&mut self, mut leaves: impl FnMut(&Kept) -> bool) -> Vec<Kept> {
        let (gone, stay) = std::mem::take(&mut self.requests).into_iter().partition(|kept| leaves(kept));
        self.requests = stay;
        gone
    }
}

impl WorkerPool {
    /// Keeps a request for the worker `at` until its pull can begin.
    pub(super) fn keep(
        &mut self,
        now: Instant,
        mut waiter: QueuedRequest,
        at: Slot,
        pull: &Pull,
        measured: bool,
    ) {
        let join = self.loads[at.index()].as_mut().map_or(0, |load| {
            load.awaiting += 1;
            load.join
        });
        let patience = match measured {
            true => Duration::try_from_secs_f64(PATIENCE * pull.seconds).unwrap_or(MOST_PATIENCE),
            false => MOST_PATIENCE,
        };
        waiter.waits_until.get_or_insert(now + patience.clamp(LEAST_PATIENCE, MOST_PATIENCE));
        let (from, units) = (pull.from, pull.units);
        let held = self.index.lookup_held(&waiter.ask.chain).units(from);
        self.awaited.requests.push(Kept { waiter, at, join, from, units, held });
    }

    /// Takes out the requests whose wait is over.
    pub(in crate::balancer) fn due(&mut self, now: Instant) -> Vec<QueuedRequest> {
        let stirred = std::mem::take(&mut self.awaited.stirred);
        if stirred.is_empty() {
            return Vec::new();
        }
        let Self { awaited, index, loads, policy, .. } = self;
        let present = |slot: Slot, join: Option<u64>| {
            let is_present = |load: &Load| {
                join.is_none_or(|join| load.join == join) && load.is_lively(now, policy.suspect_after)
            };
            loads[slot.index()].as_ref().is_some_and(is_present)
        };
        let over = |kept: &Kept| {
            let Kept { waiter, at, join, from, units, .. } = kept;
            let chain = &waiter.ask.chain;
            !waiter.may_wait(now)
                || !present(*at, Some(*join))
                || !present(*from, None)
                || index.lookup_held(chain).units(*from) >= *units
                || index.lookup(chain).units(*from) < *units
        };
        let mut due = awaited.take(|kept| stirred.contains(&kept.from) && over(kept));
        for Kept { waiter, from, held, .. } in &mut due {
            // More of the prefix has arrived: the next placement may start another wait.
            if !waiter.may_wait(now) && index.lookup_held(&waiter.ask.chain).units(*from) > *held {
                waiter.waits_until = None;
            }
        }
        self.let_go(due)
    }

    /// Takes out the requests that `which` selects, e.g. cancelled ones.
    pub(in crate::balancer) fn give_up(
        &mut self,
        mut which: impl FnMut(&QueuedRequest) -> bool,
    ) -> Vec<QueuedRequest> {
        let gone = self.awaited.take(|kept| which(&kept.waiter));
        self.let_go(gone)
    }

    fn let_go(&mut self, gone: Vec<Kept>) -> Vec<QueuedRequest> {
        let let_go = |kept: Kept| {
            if let Some(load) = load_of(&mut self.loads, kept.at, kept.join) {
                load.awaiting -= 1;
            }
            kept.waiter
        };
        gone.into_iter().map(let_go).collect()
    }

    pub(in crate::balancer) fn awaited(&self) -> impl Iterator<Item = &RouteRequest> {
        self.awaited.requests.iter().map(|kept| &*kept.waiter.ask)
    }

    pub(in crate::balancer) fn waiting(&self) -> QueueView {
        let tokens = self.awaited().map(|ask| u64::from(ask.prompt_tokens)).sum();
        QueueView { requests: self.awaited.requests.len(), tokens }
    }
}

impl QueuedRequest {
    /// Whether the request may wait for another worker's prefix.
    pub(super) fn may_wait(&self, now: Instant) -> bool {
        self.waits_until.is_none_or(|until| now < until)
    }
}
