//! Requests that wait for a prefix which one worker is getting and another will pull. A request leaves when
//! the first worker has the prefix or will not get it, or when its deadline passes. It is then placed again
//! with the current state.

use super::{Load, RequestState, WorkerPool, load_of};
use crate::balancer::{QueueView, RouteRequest};
use crate::routing::transfer::Pull;
use crate::slot::Slot;
use std::time::{Duration, Instant};

/// A request waits for at most this many times the expected duration, within the two limits below. It may
/// wait again only if more of the prefix has arrived meanwhile.
const WAIT_FACTOR: f64 = 2.0;
/// Lower limit of a wait.
const MIN_WAIT: Duration = Duration::from_secs(1);
/// Upper limit of a wait, used as is while a worker's prefill rate is unknown.
const MAX_WAIT: Duration = Duration::from_secs(10);

#[derive(Debug, Default)]
pub(super) struct PrefixWaits {
    /// In order of arrival.
    waits: Vec<PrefixWait>,
    /// Workers with a change that may end a wait.
    changed: Vec<Slot>,
}

#[derive(Debug)]
struct PrefixWait {
    state: RequestState,
    /// The worker that will pull.
    puller: Slot,
    /// The puller's membership.
    join: u64,
    /// The worker whose prefix is awaited.
    holder: Slot,
    /// Awaited length in units.
    units: u32,
    /// Announced units when the wait began.
    announced: u32,
}

impl PrefixWaits {
    /// Marks a change of the worker in `slot`.
    pub(super) fn mark_changed(&mut self, slot: Slot) {
        if self.waits.iter().any(|wait| wait.holder == slot) && !self.changed.contains(&slot) {
            self.changed.push(slot);
        }
    }

    /// Marks a possible change of any worker.
    pub(super) fn mark_all_changed(&mut self) {
        self.changed = self.waits.iter().map(|wait| wait.holder).collect();
        self.changed.sort_unstable();
        self.changed.dedup();
    }
}

impl WorkerPool {
    /// Has a request wait until the worker `puller` can begin its pull.
    pub(super) fn wait_for_prefix(
        &mut self,
        now: Instant,
        mut state: RequestState,
        puller: Slot,
        pull: &Pull,
        measured: bool,
    ) {
        let join = self.loads[puller.index()].as_mut().map_or(0, |load| {
            load.waiting_for_prefix += 1;
            load.join
        });
        let wait = match measured {
            true => Duration::try_from_secs_f64(WAIT_FACTOR * pull.seconds).unwrap_or(MAX_WAIT),
            false => MAX_WAIT,
        };
        state.prefix_deadline.get_or_insert(now + wait.clamp(MIN_WAIT, MAX_WAIT));
        let (holder, units) = (pull.from, pull.units);
        let announced = self.index.lookup_held(&state.request.chain).units(holder);
        self.prefix_waits.waits.push(PrefixWait { state, puller, join, holder, units, announced });
    }

    /// Takes out the requests whose wait is over.
    pub(in crate::balancer) fn take_ended_waits(&mut self, now: Instant) -> Vec<RequestState> {
        let changed = std::mem::take(&mut self.prefix_waits.changed);
        if changed.is_empty() {
            return Vec::new();
        }
        let Self { prefix_waits, index, loads, policy, .. } = self;
        let present = |slot: Slot, join: Option<u64>| {
            let is_present = |load: &Load| {
                join.is_none_or(|join| load.join == join) && load.is_responsive(now, policy.suspect_after)
            };
            loads[slot.index()].as_ref().is_some_and(is_present)
        };
        let mut ended = Vec::new();
        for PrefixWait { state, puller, join, holder, units, announced } in &mut prefix_waits.waits {
            if !changed.contains(holder) {
                continue;
            }
            let may_wait = state.may_wait(now);
            let now_announced = index.lookup_held(&state.request.chain).units(*holder);
            // More of the prefix has arrived: the next placement may start another wait.
            if !may_wait && now_announced > *announced {
                state.prefix_deadline = None;
            }
            if !may_wait
                || !present(*puller, Some(*join))
                || !present(*holder, None)
                || now_announced >= *units
                || index.lookup(&state.request.chain).units(*holder) < *units
            {
                ended.push(state.ticket);
            }
        }
        self.remove_waiting(|state| ended.contains(&state.ticket))
    }

    /// Takes out the waiting requests that `leaves` selects.
    pub(in crate::balancer) fn remove_waiting(
        &mut self,
        mut leaves: impl FnMut(&RequestState) -> bool,
    ) -> Vec<RequestState> {
        let Self { prefix_waits, loads, .. } = self;
        let removed = prefix_waits.waits.extract_if(.., |wait| leaves(&wait.state));
        removed
            .map(|wait| {
                if let Some(load) = load_of(loads, wait.puller, wait.join) {
                    load.waiting_for_prefix -= 1;
                }
                wait.state
            })
            .collect()
    }

    pub(in crate::balancer) fn waiting_for_prefix(&self) -> impl Iterator<Item = &RouteRequest> {
        self.prefix_waits.waits.iter().map(|wait| &*wait.state.request)
    }

    pub(in crate::balancer) fn waiting(&self) -> QueueView {
        let tokens = self.waiting_for_prefix().map(|request| u64::from(request.prompt_tokens)).sum();
        QueueView { requests: self.prefix_waits.waits.len(), tokens }
    }
}

impl RequestState {
    /// Whether the request may wait for another worker's prefix.
    pub(super) fn may_wait(&self, now: Instant) -> bool {
        self.prefix_deadline.is_none_or(|until| now < until)
    }
}
