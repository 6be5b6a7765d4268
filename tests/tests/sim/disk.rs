//! A disk that keeps what was synced and, after a crash, perhaps some of what was not.

use coordinator::consensus::storage::{Loaded, Write};
use kvasir_cluster_tests::random::Random;

/// One member's disk. Writes are atomic, as the real one's transactions are (its own tests cut the power in
/// the middle of them); the order in which they become durable is the order in which they were made.
#[derive(Debug, Clone)]
pub(crate) struct Disk {
    synced: Loaded,
    unsynced: Vec<Write>,
}

impl Disk {
    pub(crate) fn new(loaded: Loaded) -> Self {
        Self { synced: loaded, unsynced: Vec::new() }
    }

    pub(crate) fn write(&mut self, write: Write) {
        self.unsynced.push(write);
    }

    pub(crate) fn sync(&mut self) {
        for write in self.unsynced.drain(..) {
            self.synced.take(&write);
        }
    }

    /// What is there after a crash: of the unsynced writes the first few, or none.
    pub(crate) fn crash(&mut self, random: &mut Random) {
        let kept = random.below(self.unsynced.len() as u64 + 1) as usize;
        self.unsynced.truncate(kept);
        self.sync();
    }

    pub(crate) fn load(&self) -> Loaded {
        self.synced.clone()
    }
}
