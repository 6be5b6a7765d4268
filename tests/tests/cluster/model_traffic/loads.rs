//! Loads of the workers, read from their logs: these outlive kills, and metrics do not.

use super::site::{Member, Site, WORKERS};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};

/// A line of a worker's log about a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LoadEvent {
    pub(super) worker: usize,
    pub(super) kind: LoadKind,
    /// The version's name.
    pub(super) model: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LoadKind {
    Begun,
    Ready,
    Unloaded,
    Failed,
}

/// All events of a worker so far, in order.
pub(super) fn of_worker(site: &Site, worker: usize) -> Vec<LoadEvent> {
    of_worker_since(site, worker, 0)
}

/// Bytes of a worker's log.
pub(super) fn log_bytes(site: &Site, worker: usize) -> u64 {
    std::fs::metadata(site.log(Member::Worker(worker))).unwrap().len()
}

/// The events of a worker after so many bytes of its log.
pub(super) fn of_worker_since(site: &Site, worker: usize, bytes: u64) -> Vec<LoadEvent> {
    let mut text = String::new();
    let mut log = File::open(site.log(Member::Worker(worker))).unwrap();
    log.seek(SeekFrom::Start(bytes)).unwrap();
    log.read_to_string(&mut text).unwrap();
    let event = |line: &str| {
        let line: Value = serde_json::from_str(line).ok()?;
        let fields = line.get("fields").unwrap_or(&line);
        let kind = match fields["message"].as_str()? {
            "loading a model" => LoadKind::Begun,
            "loaded a model" => LoadKind::Ready,
            "a model was unloaded" => LoadKind::Unloaded,
            "cannot load a model" => LoadKind::Failed,
            _ => return None,
        };
        Some(LoadEvent { worker, kind, model: fields["model"].as_str()?.to_owned() })
    };
    text.lines().filter_map(event).collect()
}

/// Loads that were begun.
pub(super) fn begun(site: &Site) -> usize {
    let all = (0..WORKERS).flat_map(|worker| of_worker(site, worker));
    all.filter(|event| event.kind == LoadKind::Begun).count()
}

/// The models that a worker has loaded or loads, from its events since its start.
pub(super) fn held(events: &[LoadEvent]) -> BTreeSet<String> {
    let mut held = BTreeSet::new();
    for event in events {
        match event.kind {
            LoadKind::Begun => drop(held.insert(event.model.clone())),
            LoadKind::Ready => {}
            LoadKind::Unloaded | LoadKind::Failed => drop(held.remove(&event.model)),
        }
    }
    held
}
