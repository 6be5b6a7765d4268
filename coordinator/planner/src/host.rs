//! A node's models: files, memory, loads. It follows the worker's rules (`worker/src/service/host/decide.rs`): one load
//! at a time, as soon as there is room; pinned files give way; a model that is not wanted any more ends its requests.

use crate::device::{Device, Micros, micros};
use crate::fleet::{Fleet, Model, Node};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// The files are not here.
    Absent,
    Fetching,
    /// The files are here, nothing is loaded.
    Found,
    Loading {
        /// Whether it was loaded before.
        wakes: bool,
    },
    Ready,
    /// It takes no new requests.
    Draining,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Held {
    pub(crate) stage: Stage,
    /// Whether the leader wants it ready here.
    pub(crate) wanted: bool,
    /// Whether it was loaded before.
    slept: bool,
    pub(crate) pinned: bool,
    /// Time at which it became ready or its last request ended.
    pub(crate) idle_since: Micros,
    /// Events of earlier stages do not count.
    pub(crate) epoch: u32,
    /// Time for which it was ready.
    pub(crate) ready_for: Micros,
    ready_since: Micros,
}

/// A stage that ends by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Timer {
    pub(crate) model: usize,
    pub(crate) epoch: u32,
    pub(crate) at: Micros,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) loads: u64,
    pub(crate) wakes: u64,
}

#[derive(Debug)]
pub(crate) struct Host {
    pub(crate) models: Vec<Held>,
    pub(crate) device: Device,
    /// Number of the device's latest timer.
    pub(crate) service_epoch: u32,
    /// Models whose files are in the page cache, the latest last.
    cached: Vec<usize>,
    /// Time at which the link is free.
    pub(crate) link_free: Micros,
    /// Bytes of models that are loaded or pinned.
    pub(crate) used: u64,
    pub(crate) most_used: u64,
    /// Bytes times microseconds.
    pub(crate) used_for: f64,
    used_since: Micros,
    /// Time with a load.
    pub(crate) loading_for: Micros,
    loading_since: Micros,
    /// By model.
    pub(crate) counts: Vec<Counts>,
}

impl Host {
    pub(crate) fn new(node: &Node, fleet: &Fleet) -> Self {
        let held = |model: &Model| {
            let here = node.files.as_ref().is_none_or(|files| files.contains(&model.name));
            Held {
                stage: if here { Stage::Found } else { Stage::Absent },
                wanted: false,
                slept: false,
                pinned: false,
                idle_since: 0,
                epoch: 0,
                ready_for: 0,
                ready_since: 0,
            }
        };
        Self {
            models: fleet.models.iter().map(held).collect(),
            device: Device::new(node, fleet.models.len()),
            service_epoch: 0,
            cached: Vec::new(),
            link_free: 0,
            used: 0,
            most_used: 0,
            used_for: 0.0,
            used_since: 0,
            loading_for: 0,
            loading_since: 0,
            counts: vec![Counts::default(); fleet.models.len()],
        }
    }

    pub(crate) fn has_files(&self, model: usize) -> bool {
        !matches!(self.models[model].stage, Stage::Absent | Stage::Fetching)
    }

    /// Counts anew from here.
    pub(crate) fn begin_counts(&mut self, now: Micros) {
        self.counts.fill(Counts::default());
        (self.most_used, self.used_for, self.used_since) = (self.used, 0.0, now);
        (self.loading_for, self.loading_since, self.device.busy) = (0, now, 0);
        self.models.iter_mut().for_each(|held| (held.ready_for, held.ready_since) = (0, now));
    }

    /// Adds what has lasted until now to the counts.
    pub(crate) fn end_counts(&mut self, now: Micros) {
        self.use_memory(now, self.used);
        for held in &mut self.models {
            if matches!(held.stage, Stage::Ready | Stage::Draining) {
                held.ready_for += now - held.ready_since;
                held.ready_since = now;
            }
        }
    }

    fn use_memory(&mut self, now: Micros, used: u64) {
        self.used_for += self.used as f64 * (now - self.used_since) as f64;
        self.used_since = now;
        self.used = used;
        self.most_used = self.most_used.max(used);
    }

    fn enter(&mut self, now: Micros, model: usize, stage: Stage) {
        let held = &mut self.models[model];
        if held.stage == Stage::Ready && stage != Stage::Draining
            || held.stage == Stage::Draining && stage != Stage::Ready
        {
            held.ready_for += now - held.ready_since;
        }
        if stage == Stage::Ready && held.stage != Stage::Draining {
            held.ready_since = now;
        }
        held.stage = stage;
        held.epoch += 1;
    }

    fn pages(&mut self, node: &Node, fleet: &Fleet, model: usize) {
        self.cached.retain(|other| *other != model);
        self.cached.push(model);
        let bytes =
            |cached: &[usize]| -> u64 { cached.iter().map(|model| fleet.models[*model].costs.bytes).sum() };
        while !self.cached.is_empty() && bytes(&self.cached) > node.page_cache {
            self.cached.remove(0);
        }
    }

    /// Takes the leader's order for a model.
    pub(crate) fn order(&mut self, now: Micros, fleet: &Fleet, model: usize, wanted: bool) {
        self.models[model].wanted = wanted;
        match (self.models[model].stage, wanted) {
            (Stage::Ready, false) => {
                self.enter(now, model, Stage::Draining);
                self.drained(now, fleet, model);
            }
            (Stage::Draining, true) => self.enter(now, model, Stage::Ready),
            (Stage::Loading { .. }, false) => {
                self.loading_for += now - self.loading_since;
                self.enter(now, model, Stage::Found);
                self.use_memory(now, self.used - fleet.models[model].costs.needed);
            }
            _ => {}
        }
    }

    /// Frees the memory of a model whose requests have ended, if it is draining.
    pub(crate) fn drained(&mut self, now: Micros, fleet: &Fleet, model: usize) {
        if self.models[model].stage == Stage::Draining && self.device.running(model) == 0 {
            self.enter(now, model, Stage::Found);
            self.models[model].slept = true;
            self.use_memory(now, self.used - fleet.models[model].costs.needed);
        }
    }

    /// Starts the next load if there is room, or pins files.
    pub(crate) fn reconcile(&mut self, now: Micros, node: &Node, fleet: &Fleet) -> Option<Timer> {
        let waits = |held: &Held| held.wanted && !matches!(held.stage, Stage::Ready);
        if !self.models.iter().any(waits) {
            self.pin(now, node, fleet);
            return None;
        }
        if self.models.iter().any(|held| matches!(held.stage, Stage::Loading { .. })) {
            return None;
        }
        let pinned =
            |held: &Held, model: usize| if held.pinned { fleet.models[model].costs.bytes } else { 0 };
        let reclaimable: u64 = self.models.iter().enumerate().map(|(model, held)| pinned(held, model)).sum();
        let room = node.memory - self.used;
        let fits = |model: usize| fleet.models[model].costs.needed <= room + reclaimable;
        let next = (0..self.models.len()).find(|model| {
            waits(&self.models[*model]) && self.models[*model].stage == Stage::Found && fits(*model)
        })?;
        let in_memory = self.models[next].pinned || self.cached.contains(&next);
        // Its own pages stay until the end if there is room for them.
        for model in (0..self.models.len()).filter(|model| *model != next).chain([next]) {
            if node.memory - self.used >= fleet.models[next].costs.needed {
                break;
            }
            self.unpin(now, fleet, model);
        }
        self.use_memory(now, self.used + fleet.models[next].costs.needed);
        let rate = if in_memory { node.copy } else { node.read };
        let takes = fleet.models[next].costs.bytes as f64 / rate + node.load_overhead;
        let wakes = self.models[next].slept;
        match wakes {
            true => self.counts[next].wakes += 1,
            false => self.counts[next].loads += 1,
        }
        self.pages(node, fleet, next);
        self.enter(now, next, Stage::Loading { wakes });
        self.loading_since = now;
        Some(Timer {
            model: next,
            epoch: self.models[next].epoch,
            at: now.saturating_add(micros(takes).max(1)),
        })
    }

    fn unpin(&mut self, now: Micros, fleet: &Fleet, model: usize) {
        if std::mem::take(&mut self.models[model].pinned) {
            self.use_memory(now, self.used - fleet.models[model].costs.bytes);
        }
    }

    /// Keeps files of models that are asleep in what memory is left.
    fn pin(&mut self, now: Micros, node: &Node, fleet: &Fleet) {
        for (model, Model { settings, costs, .. }) in fleet.models.iter().enumerate() {
            let held = &self.models[model];
            let asleep = held.stage == Stage::Found && !held.wanted && !held.pinned;
            if asleep && settings.pin && costs.bytes <= node.memory - self.used {
                self.models[model].pinned = true;
                self.use_memory(now, self.used + costs.bytes);
            }
        }
    }

    pub(crate) fn loaded(&mut self, now: Micros, fleet: &Fleet, model: usize) {
        self.loading_for += now - self.loading_since;
        self.enter(now, model, Stage::Ready);
        self.models[model].idle_since = now;
        self.unpin(now, fleet, model);
    }

    /// The model whose files are fetched next: a wanted one first.
    pub(crate) fn next_fetch(&self) -> Option<usize> {
        if self.models.iter().any(|held| held.stage == Stage::Fetching) {
            return None;
        }
        let absent = |model: &usize| self.models[*model].stage == Stage::Absent;
        (0..self.models.len()).filter(absent).min_by_key(|model| (!self.models[*model].wanted, *model))
    }

    pub(crate) fn fetch(&mut self, now: Micros, model: usize, at: Micros) -> Timer {
        self.enter(now, model, Stage::Fetching);
        Timer { model, epoch: self.models[model].epoch, at }
    }

    pub(crate) fn fetched(&mut self, now: Micros, node: &Node, fleet: &Fleet, model: usize) {
        self.enter(now, model, Stage::Found);
        self.pages(node, fleet, model);
    }
}
