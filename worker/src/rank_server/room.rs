//! Memory and files of a worker that holds several models, for the stages that it takes of models on several workers.

use crate::Error;
use crate::load::{HostedLoad, SharedDevice};
use engine::budget::Reservation;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// Time for other models to give memory back.
const ROOM_LIMIT: Duration = Duration::from_secs(20);

/// Memory and turns of a device that several models share. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct StageRoom {
    device: SharedDevice,
    requests: Arc<Mutex<Vec<RoomRequest>>>,
    /// Has the allocator return memory to the system.
    free_memory: fn(),
    /// Paths of the models that are here, by digest.
    files: Arc<Mutex<HashMap<[u8; 32], PathBuf>>>,
}

/// A request for memory, which the worker grants as it does for models.
#[derive(Debug)]
pub(crate) struct RoomRequest {
    pub(crate) bytes: u64,
    since: Instant,
    grant: oneshot::Sender<Reservation>,
}

impl StageRoom {
    pub(crate) fn new(device: SharedDevice, free_memory: fn()) -> Self {
        Self { device, free_memory, requests: Arc::default(), files: Arc::default() }
    }

    /// Waits until `bytes` are free, up to [`ROOM_LIMIT`].
    ///
    /// # Errors
    /// [`engine::Error::KvMemory`] after that.
    pub(crate) async fn reserve(&self, bytes: u64) -> Result<Reservation, Error> {
        let (grant, granted) = oneshot::channel();
        self.requests.lock().push(RoomRequest { bytes, since: Instant::now(), grant });
        granted.await.map_err(|_| {
            let budget = &self.device.budget;
            let reason = format!(
                "{bytes} bytes for a stage do not fit: {} of the {} bytes for models are in use",
                budget.reserved(),
                budget.limit()
            );
            engine::Error::KvMemory { reason }.into()
        })
    }

    /// A load of a stage that takes `bytes`, and computes in turns of `priority`.
    pub(crate) async fn load(&self, bytes: u64, priority: u32) -> Result<HostedLoad, Error> {
        Ok(HostedLoad::stage(&self.device, priority, self.reserve(bytes).await?))
    }

    /// A stage has ended: its memory goes back to the system.
    pub(crate) fn returned(&self) {
        drop(tokio::task::spawn_blocking(self.free_memory));
    }

    /// The requests that wait, oldest first. Those that nobody waits for any more, and those past their limit, are
    /// removed.
    pub(crate) fn waiting(&self) -> Vec<u64> {
        let mut requests = self.requests.lock();
        requests.retain(|request| !request.grant.is_closed() && request.since.elapsed() < ROOM_LIMIT);
        requests.iter().map(|request| request.bytes).collect()
    }

    /// Grants a request of these bytes if they are free.
    pub(crate) fn grant(&self, bytes: u64) {
        let mut requests = self.requests.lock();
        let Some(at) = requests.iter().position(|request| request.bytes == bytes) else { return };
        if let Ok(memory) = self.device.budget.reserve(bytes) {
            // If nobody waits any more, the memory is free again.
            let _ = requests.remove(at).grant.send(memory);
        }
    }

    pub(crate) fn set_files(&self, files: HashMap<[u8; 32], PathBuf>) {
        *self.files.lock() = files;
    }

    /// Path of a model that is here.
    pub(crate) fn file(&self, digest: &[u8; 32]) -> Option<PathBuf> {
        self.files.lock().get(digest).cloned()
    }
}
