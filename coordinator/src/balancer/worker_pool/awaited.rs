//! Requests whose prefix is on its way to one worker and shall be pulled from there by another. They are kept here until
//! the first has it, or will not have it, or a limit has passed; then they are placed anew, by what is known then.

use super::{Load, QueuedRequest, WorkerPool, load_of};
use crate::balancer::{QueueView, RouteRequest};
use crate::routing::transfer::Pull;
use crate::slot::Slot;
use std::time::{Duration, Instant};

/// A request waits so many times as long as it was expected to, but not less or more than this; and for the most where a
/// worker has not measured how long computing takes. Then it may wait on only if more of the prefix has come meanwhile.
const PATIENCE: f64 = 2.0;
const LEAST_PATIENCE: Duration = Duration::from_secs(1);
const MOST_PATIENCE: Duration = Duration::from_secs(10);

#[derive(Debug, Default)]
pub(super) struct Awaited {
    /// In the order in which they came.
    requests: Vec<Kept>,
    /// Workers of which something has changed that may end a wait.
    stirred: Vec<Slot>,
}

#[derive(Debug)]
struct Kept {
    waiter: QueuedRequest,
    /// Where it goes, and the membership.
    at: Slot,
    join: u64,
    /// Whose prefix it waits for, and its length.
    from: Slot,
    units: u32,
    /// How much of it was there when it began to wait.
    held: u32,
}

impl Awaited {
    /// Something has changed of the worker.
    pub(super) fn stir(&mut self, slot: Slot) {
        if self.requests.iter().any(|kept| kept.from == slot) && !self.stirred.contains(&slot) {
            self.stirred.push(slot);
        }
    }

    /// Something may have changed of any worker.
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
    /// Keeps a request that shall go to the worker `at` once the pull can begin.
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

    /// Takes out those that need not wait any longer.
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
            // More of it has come: whether to go on waiting is decided anew.
            if !waiter.may_wait(now) && index.lookup_held(&waiter.ask.chain).units(*from) > *held {
                waiter.waits_until = None;
            }
        }
        self.let_go(due)
    }

    /// Takes out those of which nobody wants an answer any more.
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
    /// Whether it may wait for what another worker computes.
    pub(super) fn may_wait(&self, now: Instant) -> bool {
        self.waits_until.is_none_or(|until| now < until)
    }
}
