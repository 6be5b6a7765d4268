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
    /// Bytes to be pinned while it is asleep; 0 if it is not to be pinned, or if they were refused.
    pub(super) to_pin: u64,
    /// No attempt before this instant.
    pub(super) retry_at: Option<Instant>,
    /// Whether the last attempt was refused for lack of room: the next one follows as soon as there is room.
    pub(super) short_of_room: bool,
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
            Stage::Draining { .. } | Stage::Ready => leaves,
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
        let reclaimable: u64 = pinned.iter().sum();
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
        actions.push(Action::Load(index));
        free -= model.needed;
        loads = true;
    }
    // What is left after the loads may hold the weights of models that are asleep.
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
