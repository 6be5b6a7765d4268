//! Keeps the usage of tenants on disk: what has changed is written every second, and when the coordinator stops.

use ::usage::recorder::Recorder;
use ::usage::store::{Store, StoreError};
use dispatch::random::random_u64;
use proto::ids::NodeId;
use proto::log::Repeats;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::Mutex;
use tokio::time::MissedTickBehavior;

/// A coordinator that is killed loses at most the usage of this time, and of one write.
const SAVE_EVERY: Duration = Duration::from_secs(1);
/// Rate limit for logs of failed writes.
static UNSAVED: Repeats = Repeats::new();

/// The recorder, with its file if the coordinator has a data directory.
#[derive(Debug, Clone)]
pub(crate) struct UsageFile {
    recorder: Arc<Recorder>,
    /// `None` without a data directory, and once it is closed. Locked while a write runs.
    store: Arc<Mutex<Option<Store>>>,
    closed: Arc<AtomicBool>,
}

impl UsageFile {
    /// Reads the usage of earlier runs. Without a data directory, usage is kept in memory only.
    pub(crate) fn open(data_dir: Option<&Path>, node: NodeId) -> Result<Self, StoreError> {
        let recorder = Arc::new(Recorder::new(node, random_u64()));
        let store = match data_dir {
            Some(directory) => {
                let (store, saved) = Store::open(directory)?;
                recorder.restore(saved);
                Some(store)
            }
            None => None,
        };
        Ok(Self { recorder, store: Arc::new(Mutex::new(store)), closed: Arc::default() })
    }

    pub(crate) fn recorder(&self) -> &Arc<Recorder> {
        &self.recorder
    }

    /// Writes changes until it is dropped.
    pub(crate) async fn keep(self) {
        let mut ticks = tokio::time::interval(SAVE_EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            self.save().await;
        }
    }

    /// Writes what has changed since the last call.
    pub(crate) async fn save(&self) {
        let mut store = Arc::clone(&self.store).lock_owned().await;
        let unsaved = self.recorder.take_unsaved();
        if unsaved.is_empty() {
            return;
        }
        let (recorder, closed) = (Arc::clone(&self.recorder), Arc::clone(&self.closed));
        // A panic of the task is logged there.
        let _ended = tokio::task::spawn_blocking(move || {
            if let Some(Err(error)) = store.as_ref().map(|store| store.save(&unsaved)) {
                if let Some(left_out) = UNSAVED.due(error.to_string()) {
                    tracing::error!(%error, left_out, "the usage of tenants cannot be written; it is tried again every second");
                }
                recorder.not_saved(unsaved);
            }
            if closed.load(Ordering::SeqCst) {
                *store = None;
            }
        })
        .await;
    }

    /// Closes the file, after a write that runs now. The next coordinator with this directory may be in this process.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        if let Ok(mut store) = self.store.try_lock() {
            *store = None;
        }
    }
}
