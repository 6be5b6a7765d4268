//! A simulated disk. A crash keeps all synced writes and possibly some unsynced ones.

use consensus::storage::{Loaded, Write};
use kvasir_cluster_tests::random::Random;

/// One member's disk. Writes are atomic, as the real disk's transactions are (its own tests cut the power
/// during them), and become durable in order.
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

    /// Contents after a crash: some prefix of the unsynced writes survives.
    pub(crate) fn crash(&mut self, random: &mut Random) {
        let survivor_count = random.below(self.unsynced.len() as u64 + 1) as usize;
        self.unsynced.truncate(survivor_count);
        self.sync();
    }

    pub(crate) fn load(&self) -> Loaded {
        self.synced.clone()
    }
}
