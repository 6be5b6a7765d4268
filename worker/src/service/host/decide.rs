//! Decides what a worker does next to reach the ordered states of its models. No clock, no I/O.

use proto::deployment::WantedState;
use std::time::{Duration, Instant};

/// Pauses after failed attempts: the first and the longest. They double in between.
const RETRY: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(60));

/// Stage of a model at this worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// Its files are not known.
    Unknown,
    /// Its files are searched, fetched and read for their digest.
    Finding,
    /// Its files are here. Nothing is loaded.
    Found,
    Loading,
    Ready,
    /// It takes no new requests.
    Draining {
        /// Whether no request runs any more.
        done: bool,
        /// The end of the drain timeout.
        until: Instant,
    },
    /// Its memory is being freed.
    Ending,
    /// Its files cannot be loaded, or are another model's.
    BadFile,
}

/// State that a model should reach.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Target {
    /// Not ordered any more, or ordered with other files or another length: what is there ends first.
    Gone,
    Wanted(WantedState),
}

/// A model, as the decision sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ModelView {
    pub(super) target: Target,
    pub(super) stage: Stage,
    /// Bytes that its load takes at its peak.
    pub(super) needed: u64,
    /// Bytes of its files that are pinned in host memory.
    pub(super) pinned: u64,
    /// Bytes of its arena that it can give back.
    pub(super) spare: u64,
    /// Whether its arena is being shrunk.
    pub(super) shrinks: bool,
    /// Whether its sequences wait for a larger arena.
    pub(super) lacks: bool,
    /// Bytes to be pinned while it is asleep; 0 if it is not to be pinned, or if they were refused.
    pub(super) to_pin: u64,
    /// No attempt before this instant.
    pub(super) retry_at: Option<Instant>,
    /// Whether the last attempt was refused for lack of room: the next one follows as soon as there is room.
    pub(super) short_of_room: bool,
}

impl ModelView {
    /// A stage of a model on several workers, which waits for memory.
    pub(super) fn of_stage(needed: u64) -> Self {
        Self {
            target: Target::Wanted(WantedState::Ready),
            stage: Stage::Found,
            needed,
            pinned: 0,
            spare: 0,
            shrinks: false,
            lacks: false,
            to_pin: 0,
            retry_at: None,
            short_of_room: false,
        }
    }
}

/// A model by its index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    Find(usize),
    Load(usize),
    /// Cancels what runs: a search, a fetch or a load.
    Cancel(usize),
    Drain(usize),
    /// Takes requests again.
    Undrain(usize),
    /// Ends the engine.
    End(usize),
    Pin(usize),
    Unpin(usize),
    /// Shrinks the arena by these bytes.
    Shrink(usize, u64),
    /// Counts a failed attempt: there is no room, and none is about to become free.
    NoRoom(usize),
    Forget(usize),
}

/// Pause after `failures` failed attempts.
pub(super) fn pause(failures: u32) -> Duration {
    RETRY.0.saturating_mul(1 << failures.saturating_sub(1).min(10)).min(RETRY.1)
}

/// The next actions. `free`: bytes that are not reserved. One model is loaded at a time, because each load needs room
/// for its peak.
pub(super) fn decide(now: Instant, models: &[ModelView], free: u64) -> Vec<Action> {
    let mut actions = Vec::new();
    let mut free = free;
    let mut loads = models.iter().any(|model| model.stage == Stage::Loading);
    let frees = |model: &ModelView| {
        let leaves = model.target != Target::Wanted(WantedState::Ready);
        match model.stage {
            Stage::Ending => true,
            Stage::Ready => leaves || model.shrinks,
            Stage::Draining { .. } => leaves,
            _ => false,
        }
    };
    let freeing = models.iter().any(frees);
    let mut pinned: Vec<u64> = models.iter().map(|model| model.pinned).collect();
    let due = |model: &ModelView| model.retry_at.is_none_or(|at| at <= now);
    for (index, model) in models.iter().enumerate() {
        let wanted = match model.target {
            Target::Gone => None,
            Target::Wanted(wanted) => Some(wanted),
        };
        let ready = wanted == Some(WantedState::Ready);
        match model.stage {
            Stage::Ending => {}
            Stage::Finding => {
                if wanted.is_none() {
                    actions.push(Action::Cancel(index));
                }
            }
            Stage::Loading => {
                if !ready {
                    actions.push(Action::Cancel(index));
                }
            }
            Stage::Ready => {
                if !ready {
                    actions.push(Action::Drain(index));
                }
            }
            Stage::Draining { .. } if ready => actions.push(Action::Undrain(index)),
            Stage::Draining { done, until } => {
                if done || until <= now {
                    actions.push(Action::End(index));
                }
            }
            Stage::Unknown | Stage::Found | Stage::BadFile if wanted.is_none() => {
                if pinned[index] > 0 {
                    actions.push(Action::Unpin(index));
                    free = free.saturating_add(std::mem::take(&mut pinned[index]));
                }
                actions.push(Action::Forget(index));
            }
            Stage::Unknown => {
                if due(model) {
                    actions.push(Action::Find(index));
                }
            }
            Stage::BadFile => {}
            Stage::Found => {
                let keeps = wanted == Some(WantedState::Asleep);
                if pinned[index] > 0
                    && (wanted == Some(WantedState::Identified) || keeps && model.to_pin == 0)
                {
                    actions.push(Action::Unpin(index));
                    free = free.saturating_add(std::mem::take(&mut pinned[index]));
                }
            }
        }
    }
    for (index, model) in models.iter().enumerate() {
        let loads_next = model.stage == Stage::Found && model.target == Target::Wanted(WantedState::Ready);
        if !loads_next || loads || !due(model) && !model.short_of_room {
            continue;
        }
        let spare = |other: &ModelView| if other.shrinks { 0 } else { other.spare };
        let reclaimable = pinned.iter().copied().chain(models.iter().map(spare)).fold(0, u64::saturating_add);
        if free.saturating_add(reclaimable) < model.needed {
            if !freeing && due(model) {
                actions.push(Action::NoRoom(index));
            }
            continue;
        }
        // Its own pages stay mapped during the load if there is room for them.
        let order = (0..models.len()).filter(|other| *other != index).chain([index]);
        for other in order {
            if free >= model.needed {
                break;
            }
            if pinned[other] > 0 {
                free += std::mem::take(&mut pinned[other]);
                actions.push(Action::Unpin(other));
            }
        }
        loads = true;
        if free >= model.needed {
            actions.push(Action::Load(index));
            free -= model.needed;
            continue;
        }
        // Arenas above their smallest size give the rest, the largest first. The load follows when they have.
        let mut missing = model.needed - free;
        let mut others: Vec<usize> = (0..models.len()).filter(|other| spare(&models[*other]) > 0).collect();
        others.sort_by_key(|other| std::cmp::Reverse(models[*other].spare));
        for other in others {
            let bytes = models[other].spare.min(missing);
            if bytes > 0 {
                actions.push(Action::Shrink(other, bytes));
                missing -= bytes;
            }
        }
    }
    // A model whose sequences wait gets a part of the largest arena that does not need all of its own.
    let shrinks = models.iter().any(|model| model.shrinks);
    if models.iter().any(|model| model.lacks) && !loads && !shrinks {
        let largest =
            (0..models.len()).filter(|index| !models[*index].lacks).max_by_key(|index| models[*index].spare);
        if let Some(index) = largest.filter(|index| models[*index].spare > 0) {
            actions.push(Action::Shrink(index, models[index].spare.div_ceil(4)));
        }
    }
    // Memory that is left after the loads may hold the weights of models that are asleep.
    let waits = |model: &ModelView| {
        model.target == Target::Wanted(WantedState::Ready)
            && !matches!(model.stage, Stage::Ready | Stage::BadFile)
    };
    if !models.iter().any(waits) {
        for (index, model) in models.iter().enumerate() {
            let asleep = model.stage == Stage::Found && model.target == Target::Wanted(WantedState::Asleep);
            if asleep && pinned[index] == 0 && model.to_pin > 0 && model.to_pin <= free {
                free -= model.to_pin;
                actions.push(Action::Pin(index));
            }
        }
    }
    actions
}

#[cfg(test)]
mod tests;
