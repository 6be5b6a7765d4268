//! Carries out the decisions: tasks that search, load and end models, and the reports to coordinators.

use super::decide::{Action, ModelView, Stage, decide};
use super::files::{FindProgress, Found, PinnedFiles, Search, blocking};
use super::record::{Pin, Record, Running, Task};
use super::{Host, NodeContext};
use crate::Error;
use crate::load::{EngineOptions, HostedLoad, pinned_files};
use crate::service::node::Loaded;
use crate::service::pool::later_epoch;
use crate::service::runner::Runner;
use pipeline::weight_distribution::{Shipper, ShippingConfig, WantedLayers};
use proto::deployment::{ModelsReport, OrderedModel, WantedState};
use proto::ids::Epoch;
use proto::served_model::MAX_MODELS;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// Interval between two looks at what changes by itself: drains, pauses, progress.
const TICK: Duration = Duration::from_millis(50);
/// Time limit for copying the last prefixes to the tiers before an engine ends.
const FLUSH_LIMIT: Duration = Duration::from_secs(2);
/// Pause between two looks at an engine that copies.
const FLUSH_TICK: Duration = Duration::from_millis(5);
/// Interval of the question whether sequences wait for memory.
const LACK_EVERY: Duration = Duration::from_millis(200);
/// Pause after an arena had less to give than it seemed to have, because sequences were in all of its parts.
const SPARE_AGAIN: Duration = Duration::from_secs(1);
/// Interval of counting the process's memory.
const COUNT_EVERY: Duration = Duration::from_millis(500);
/// Weight of the newest load in the measured rate.
const NEWEST: f64 = 0.5;

enum Event {
    Found(Result<Found, Error>),
    Loaded(Result<Loaded, Error>),
    /// The engine cannot go on.
    Broken(String),
    /// The engine has copied its prefixes and may end.
    Flushed,
    Pinned(Result<PinnedFiles, Error>),
    /// The arena was shrunk, by as much as was wanted or less.
    Shrunk {
        enough: bool,
    },
    /// Whether sequences wait for a larger arena.
    Lacks(bool),
}

struct Reconciler<'a> {
    host: &'a Arc<Host>,
    context: &'a Arc<NodeContext>,
    records: Vec<Record>,
    events: mpsc::UnboundedSender<(u64, Event)>,
    next_key: u64,
    /// Version of the order that the records follow.
    version: u64,
    /// The last epoch of an instance.
    epoch: Epoch,
    /// Bytes per second of earlier loads; 0 before the first.
    rate: f64,
    /// When the memory of the process was last counted.
    counted: Option<Instant>,
    /// When engines were last asked whether they lack memory.
    asked: Option<Instant>,
}

pub(super) async fn run(host: &Arc<Host>, context: &Arc<NodeContext>) {
    let (events, mut inbox) = mpsc::unbounded_channel();
    let (mut orders, mut released) = (host.orders.subscribe(), host.device.budget.released());
    let mut reconciler = Reconciler {
        host,
        context,
        records: Vec::new(),
        events,
        next_key: 0,
        version: 0,
        epoch: Epoch(0),
        rate: 0.0,
        asked: None,
        counted: None,
    };
    loop {
        let acted = reconciler.act();
        reconciler.publish();
        tokio::select! {
            _ = orders.changed() => {}
            _ = released.changed() => {}
            event = inbox.recv() => match event {
                Some((key, event)) => reconciler.take(key, event),
                None => return,
            },
            () = tokio::time::sleep(if acted { Duration::from_millis(1) } else { TICK }) => {}
        }
        while let Ok((key, event)) = inbox.try_recv() {
            reconciler.take(key, event);
        }
    }
}

impl Reconciler<'_> {
    /// Brings the records up to the newest order.
    fn sync(&mut self) {
        let Some(order) = self.host.orders.borrow().clone() else { return };
        self.version = order.version;
        let mut seen = HashSet::new();
        let ordered: Vec<OrderedModel> = order
            .models
            .into_iter()
            .filter(|ordered| seen.insert(ordered.model.clone()))
            .take(MAX_MODELS)
            .collect();
        for record in &mut self.records {
            match ordered.iter().find(|ordered| ordered.model == record.ordered.model) {
                Some(ordered) if record.serves(ordered) => {
                    let priority = record.ordered.priority;
                    record.update(ordered);
                    if priority != ordered.priority {
                        set_priority(record);
                    }
                }
                _ => record.gone = true,
            }
        }
        for ordered in &ordered {
            // A record of other files of this model ends first.
            if !self.records.iter().any(|record| record.ordered.model == ordered.model) {
                let shipping = self.context.shipping.of_model();
                let config = ShippingConfig { from: Vec::new(), ..self.host.config.shipping.clone() };
                let shipper = Shipper::new(Arc::clone(&self.context.endpoint), &config, shipping.clone());
                self.records.push(Record::new(self.next_key, ordered.clone(), shipping, shipper));
                self.next_key += 1;
            }
        }
        // Reports have the models in the order of the order.
        let place = |record: &Record| ordered.iter().position(|other| other.model == record.ordered.model);
        self.records.sort_by_key(|record| (place(record).unwrap_or(usize::MAX), record.key));
    }

    /// Takes the next actions. Returns whether there were any.
    fn act(&mut self) -> bool {
        self.sync();
        if self.host.stopping.load(Ordering::SeqCst) {
            return false;
        }
        let now = Instant::now();
        for record in &mut self.records {
            if record.stage == Stage::Ending
                && let Some(running) = record.running.take_if(|running| running.has_ended())
            {
                self.context.instances.remove(running.number);
                drop(tokio::task::spawn_blocking(self.host.config.free_memory));
                record.slept |= record.next == Stage::Found;
                record.enter(record.next);
                if let Some(found) = record.found.take_if(|_| record.next == Stage::Unknown) {
                    self.context.holdings.remove(&record.ordered.model, &found.path);
                }
            }
        }
        if self.counted.is_none_or(|counted| now - counted >= COUNT_EVERY) {
            self.counted = Some(now);
            let with_models = self.host.servers.is_none();
            self.host.device.count_process(engine::memory::resident_bytes(), with_models);
        }
        self.ask_for_lacks(now);
        let mut views: Vec<_> = self.records.iter_mut().map(|record| record.view(now)).collect();
        let (models, stages) = (views.len(), self.host.room.waiting());
        views.extend(stages.iter().map(|bytes| ModelView::of_stage(*bytes)));
        let actions = decide(now, &views, self.host.device.budget.free());
        for action in &actions {
            match action {
                Action::Load(at) if *at >= models => {
                    stages.get(at - models).into_iter().for_each(|bytes| self.host.room.grant(*bytes));
                }
                // It waits until its limit.
                Action::NoRoom(at) if *at >= models => {}
                action => self.perform(*action, now),
            }
        }
        self.records.retain(|record| record.stage != Stage::Unknown || !record.gone);
        !actions.is_empty()
    }

    fn perform(&mut self, action: Action, now: Instant) {
        let at = match action {
            Action::Find(at)
            | Action::Load(at)
            | Action::Cancel(at)
            | Action::Drain(at)
            | Action::Undrain(at) => at,
            Action::End(at)
            | Action::Pin(at)
            | Action::Unpin(at)
            | Action::NoRoom(at)
            | Action::Shrink(at, _)
            | Action::Forget(at) => at,
        };
        let timeout = self.host.config.drain_timeout;
        let Some(record) = self.records.get_mut(at) else { return };
        let model = record.ordered.model.clone();
        match action {
            Action::Find(_) => self.find(at),
            Action::Load(_) => self.load(at, now),
            Action::Cancel(_) => {
                if let Some(search) = record.search.take() {
                    search.cancel();
                    record.task = None;
                    record.enter(Stage::Unknown);
                }
                if let Some(running) = &record.running {
                    running.load.cancel();
                }
            }
            Action::Drain(_) => {
                record.retire(true);
                record.enter(Stage::Draining { done: false, until: now + timeout });
            }
            Action::Undrain(_) => {
                record.retire(false);
                record.enter(Stage::Ready);
            }
            Action::End(_) => self.end(at),
            Action::Pin(_) => self.pin(at),
            Action::Unpin(_) => {
                record.pin = None;
                self.host.metrics.unpins.inc();
            }
            Action::Shrink(_, bytes) => self.shrink(at, bytes),
            Action::NoRoom(_) => {
                let needed = record.found.as_ref().map_or(0, |found| found.facts.needed_bytes);
                let (free, limit) = (self.host.device.budget.free(), self.host.device.budget.limit());
                record.failed(
                    format!("{needed} bytes do not fit: {free} of the {limit} bytes for models are free"),
                    now,
                );
                record.short_of_room = true;
                self.host.metrics.failures.inc();
            }
            Action::Forget(_) => {
                if let Some(found) = record.found.take() {
                    self.context.holdings.remove(&model, &found.path);
                }
                record.enter(Stage::Unknown);
            }
        }
    }

    /// Options of a model.
    fn options(&self, ordered: &OrderedModel, load: HostedLoad) -> EngineOptions {
        let context = (ordered.context > 0).then_some(ordered.context as usize);
        EngineOptions { max_model_len: context, hosted: Some(load), ..self.host.config.engine.clone() }
    }

    fn find(&mut self, at: usize) {
        let Some(record) = self.records.get(at) else { return };
        let progress = Arc::new(FindProgress::default());
        let search = Search {
            ordered: record.ordered.clone(),
            // Only computes what the model needs.
            options: self.options(&record.ordered, HostedLoad::new(&self.host.device, 1)),
            resolver: Arc::clone(&self.host.config.resolver),
            shipper: Arc::clone(&record.shipper),
            store: self.host.config.shipping.store.clone(),
            servers: self.host.config.servers.clone(),
            progress: Arc::clone(&progress),
        };
        let (key, events) = (record.key, self.events.clone());
        let task = tokio::spawn(async move {
            // The receiver is gone only when the worker stops.
            let _ = events.send((key, Event::Found(search.run().await)));
        });
        if let Some(record) = self.records.get_mut(at) {
            record.task = Some(Task(task.abort_handle()));
            record.search = Some(progress);
            record.enter(Stage::Finding);
        }
    }

    fn load(&mut self, at: usize, now: Instant) {
        let Some(record) = self.records.get(at) else { return };
        let (Some(found), model) = (record.found.clone(), record.ordered.model.clone()) else { return };
        let Some(number) = self.context.instances.take_number(&model) else { return };
        let load = HostedLoad::new(&self.host.device, record.ordered.priority);
        let options = self.options(&record.ordered, load.clone());
        self.epoch = later_epoch(&self.epoch);
        let (reason_tx, mut reasons) = mpsc::unbounded_channel();
        let run = self.context.begin_instance(number, self.epoch, record.shipping.clone(), reason_tx);
        self.context.instances.set(number, &run.node);
        let (key, events) = (record.key, self.events.clone());
        tokio::spawn({
            let events = events.clone();
            async move {
                while let Some(reason) = reasons.recv().await {
                    // The receiver is gone only when the worker stops.
                    let _ = events.send((key, Event::Broken(reason)));
                }
            }
        });
        let (shipper, servers) = (Arc::clone(&record.shipper), self.host.servers.clone());
        let of_server = load.clone();
        let task = tokio::spawn(async move {
            let path = found.path.clone();
            let loaded = match servers {
                Some(servers) => {
                    let opened = servers.load(path, options, &of_server).await;
                    opened.map(|opened| Loaded::External(Box::new(opened)))
                }
                None => {
                    let load =
                        move |arrivals| Loaded::load(&path, &EngineOptions { arrivals, ..options.clone() });
                    shipper.load(&found.path, WantedLayers::default(), load).await
                }
            };
            let _ = events.send((key, Event::Loaded(loaded)));
        });
        // Not aborted: a load frees its memory before it ends.
        drop(task);
        tracing::info!(%model, instance = %run.node.node, "loading a model");
        if let Some(record) = self.records.get_mut(at) {
            record.running = Some(Running { number, run, load });
            record.enter(Stage::Loading);
            record.since = now;
        }
    }

    fn end(&mut self, at: usize) {
        let Some(record) = self.records.get_mut(at) else { return };
        let engine = record.running.as_ref().and_then(|running| running.run.node.engine());
        let (key, events) = (record.key, self.events.clone());
        let task = tokio::spawn(async move {
            if let Some(engine) = engine {
                let _ = tokio::time::timeout(FLUSH_LIMIT, flush(&engine)).await;
            }
            let _ = events.send((key, Event::Flushed));
        });
        record.task = Some(Task(task.abort_handle()));
        record.enter(Stage::Ending);
    }

    fn shrink(&mut self, at: usize, bytes: u64) {
        let Some(record) = self.records.get_mut(at) else { return };
        let engine = record.running.as_ref().and_then(|running| running.run.node.engine());
        let Some(engine) = engine.as_ref().and_then(Runner::built_in).cloned() else { return };
        record.shrinks = true;
        let (key, events) = (record.key, self.events.clone());
        tokio::spawn(async move {
            let freed = match engine.call(move |engine| engine.shrink_arena(bytes)).await {
                Ok(Ok(freed)) => freed,
                Ok(Err(error)) => {
                    tracing::warn!(%error, "cannot shrink a KV cache");
                    0
                }
                // It has given back everything.
                Err(_) => bytes,
            };
            tracing::debug!(freed, bytes, "a KV cache was shrunk for another model");
            let _ = events.send((key, Event::Shrunk { enough: freed >= bytes }));
        });
    }

    /// Asks the engines whether their sequences wait for memory, at most once in [`LACK_EVERY`].
    fn ask_for_lacks(&mut self, now: Instant) {
        if self.asked.is_some_and(|asked| now - asked < LACK_EVERY) {
            return;
        }
        self.asked = Some(now);
        for record in &mut self.records {
            let engine = record.running.as_ref().and_then(|running| running.run.node.engine());
            let waits = |engine: &Runner| record.stage == Stage::Ready && engine.load().waiting > 0;
            let Some(engine) = engine.filter(waits).as_ref().and_then(Runner::built_in).cloned() else {
                record.lacks = false;
                continue;
            };
            let (key, events) = (record.key, self.events.clone());
            tokio::spawn(async move {
                if let Ok(lacks) = engine.call(|engine| engine.lacks_memory()).await {
                    let _ = events.send((key, Event::Lacks(lacks)));
                }
            });
        }
    }

    fn pin(&mut self, at: usize) {
        let Some(record) = self.records.get_mut(at) else { return };
        let (paths, bytes) = record.to_pin.clone();
        let Ok(reservation) = self.host.device.budget.reserve(bytes) else { return };
        record.pin = Some(Pin { reservation, files: None });
        let (key, events) = (record.key, self.events.clone());
        tokio::spawn(async move {
            let pinned = match blocking(move || PinnedFiles::open(&paths)).await {
                Ok(pinned) => pinned,
                Err(error) => Err(error),
            };
            let _ = events.send((key, Event::Pinned(pinned)));
        });
    }

    fn take(&mut self, key: u64, event: Event) {
        let now = Instant::now();
        let Some(at) = self.records.iter().position(|record| record.key == key) else { return };
        match event {
            Event::Found(found) => self.take_found(at, found, now),
            Event::Loaded(loaded) => self.take_loaded(at, loaded, now),
            Event::Broken(reason) => {
                let Some(record) = self.records.get_mut(at) else { return };
                if matches!(record.stage, Stage::Ready | Stage::Draining { .. }) {
                    tracing::error!(model = %record.ordered.model, reason, "the engine of a model has ended");
                    self.host.metrics.failures.inc();
                    record.failed(reason, now);
                    record.end_run(Stage::Found);
                }
            }
            Event::Flushed => {
                let Some(record) = self.records.get_mut(at) else { return };
                if record.stage == Stage::Ending {
                    self.host.metrics.unloads.inc();
                    tracing::info!(model = %record.ordered.model, "a model was unloaded");
                    record.end_run(Stage::Found);
                }
            }
            Event::Shrunk { enough } => {
                if let Some(record) = self.records.get_mut(at) {
                    record.shrinks = false;
                    record.spare_from = (!enough).then(|| now + SPARE_AGAIN);
                }
            }
            Event::Lacks(lacks) => {
                if let Some(record) = self.records.get_mut(at) {
                    record.lacks = lacks;
                }
            }
            Event::Pinned(pinned) => {
                let Some(record) = self.records.get_mut(at) else { return };
                match (pinned, &mut record.pin) {
                    (Ok(files), Some(pin)) => {
                        pin.reservation.settle(files.bytes);
                        pin.files = Some(files);
                    }
                    (Err(error), _) => {
                        tracing::warn!(model = %record.ordered.model, %error, "cannot keep the weights of a model in memory");
                        record.pin = None;
                        record.to_pin = (Vec::new(), 0);
                    }
                    (Ok(_), None) => {}
                }
            }
        }
    }

    fn take_found(&mut self, at: usize, found: Result<Found, Error>, now: Instant) {
        let Some(record) = self.records.get_mut(at).filter(|record| record.stage == Stage::Finding) else {
            return;
        };
        (record.task, record.search) = (None, None);
        match found {
            Ok(found) => {
                tracing::info!(model = %record.ordered.model, path = %found.path.display(), "the files of a model are here");
                self.context.holdings.add(record.ordered.model.clone(), &found.path);
                record.found = Some(found);
                record.enter(Stage::Found);
                self.measure_pin(at);
            }
            Err(error) => {
                let bad = error.is_of_content();
                tracing::warn!(model = %record.ordered.model, %error, "cannot get the files of a model");
                self.host.metrics.failures.inc();
                record.failed(error.to_string(), now);
                record.enter(if bad { Stage::BadFile } else { Stage::Unknown });
            }
        }
    }

    fn take_loaded(&mut self, at: usize, loaded: Result<Loaded, Error>, now: Instant) {
        let Some(record) = self.records.get_mut(at).filter(|record| record.stage == Stage::Loading) else {
            // Dropping may take long.
            drop(std::thread::spawn(move || drop(loaded)));
            return;
        };
        let wanted = !record.gone && record.ordered.wanted == WantedState::Ready;
        let model = record.ordered.model.clone();
        let digest = record.found.as_ref().map(|found| found.facts.digest);
        let checked = loaded.and_then(|loaded| {
            let served = loaded.served(model.clone()).map(|served| served.model_digest);
            match served == digest {
                true => Ok(loaded),
                false => Err(Error::FileChanged),
            }
        });
        let next = match checked {
            Ok(loaded) if wanted => {
                let seconds = (now - record.since).as_secs_f64();
                let needed = record.found.as_ref().map_or(0, |found| found.facts.needed_bytes) as f64;
                let rate = needed / seconds.max(1e-3);
                self.rate = if self.rate == 0.0 { rate } else { self.rate + NEWEST * (rate - self.rate) };
                let metrics = &self.host.metrics;
                metrics.load_seconds.0.observe(seconds);
                if record.slept { &metrics.wakes } else { &metrics.loads }.inc();
                if let Some(running) = &record.running {
                    tracing::info!(%model, instance = %running.run.node.node, seconds, wakes = record.slept, "loaded a model");
                    running.run.loaded(loaded, Some(&model));
                }
                record.pin = None;
                record.enter(Stage::Ready);
                self.measure_pin(at);
                return;
            }
            Ok(loaded) => {
                drop(std::thread::spawn(move || drop(loaded)));
                Stage::Found
            }
            Err(Error::Engine(engine::Error::LoadCancelled)) => Stage::Found,
            Err(error) => {
                tracing::warn!(%model, %error, "cannot load a model");
                self.host.metrics.failures.inc();
                record.failed(error.to_string(), now);
                match error {
                    Error::FileChanged => Stage::Unknown,
                    error if error.is_of_content() => Stage::BadFile,
                    _ => Stage::Found,
                }
            }
        };
        record.end_run(next);
    }

    /// Sets the files that are pinned while the model is asleep.
    fn measure_pin(&mut self, at: usize) {
        let Some(found) = self.records.get(at).and_then(|record| record.found.clone()) else { return };
        let files = pinned_files(&found.path, &found.facts.digest, &self.host.config.engine);
        let bytes = files.iter().filter_map(|path| Some(std::fs::metadata(path).ok()?.len())).sum();
        if let Some(record) = self.records.get_mut(at) {
            record.to_pin = (files, bytes);
        }
    }

    /// Reports to coordinators, and in the metrics.
    fn publish(&self) {
        let here = self.records.iter().filter_map(|record| record.found.as_ref());
        self.host.room.set_files(here.map(|found| (found.facts.digest, found.path.clone())).collect());
        let now = Instant::now();
        let (budget, metrics) = (&self.host.device.budget, &self.host.metrics);
        let models =
            self.records.iter().map(|record| record.report(now, self.rate)).take(MAX_MODELS).collect();
        let own = self.host.own.bytes();
        let pinned = |record: &Record| record.pin.as_ref().map_or(0, |pin| pin.reservation.bytes());
        // Without what is given back when a model needs the room.
        let spare: u64 = self.records.iter().map(|record| record.spare() + pinned(record)).sum();
        let process = self.host.device.process_bytes();
        let used = budget.reserved().saturating_sub(spare + process);
        let for_models = budget.limit().saturating_sub(process);
        *self.host.report.lock() =
            ModelsReport { version: self.version, budget: for_models, used, own, models };
        let pins = self.records.iter().filter_map(|record| record.pin.as_ref());
        metrics.pinned.set(pins.map(|pin| pin.reservation.bytes()).sum::<u64>().cast_signed());
        metrics.budget.set(budget.limit().cast_signed());
        metrics.reserved.set(budget.reserved().cast_signed());
        metrics.ready.set(self.records.iter().filter(|record| record.stage == Stage::Ready).count() as i64);
    }
}

fn set_priority(record: &Record) {
    let priority = record.ordered.priority;
    let engine = record.running.as_ref().and_then(|running| running.run.node.engine());
    if let Some(engine) = engine.as_ref().and_then(Runner::built_in).cloned() {
        tokio::spawn(async move {
            // An engine that has stopped has no turns.
            let _ = engine.call(move |engine| engine.set_priority(priority)).await;
        });
    }
}

/// Waits until an engine has copied the prefixes of its ended sequences to the tiers.
async fn flush(engine: &Runner) {
    let Some(engine) = engine.built_in() else { return };
    while engine.call(|engine| engine.copies_prefixes()).await.unwrap_or(false) {
        tokio::time::sleep(FLUSH_TICK).await;
    }
}
