//! Handles a full disk. When space is low, proposals are refused. Required writes use the reserve. When the
//! reserve is used up too, the driver waits until there is space.

use crate::storage::{Storage, StorageError, Write};

/// Ticks between checks for free space.
const LOOK_AGAIN: u32 = 20;

/// A disk and the state of its free space.
pub(super) struct DiskSpace {
    disk: Box<dyn Storage + Send>,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Unseen,
    Enough,
    /// Space is low; holds the ticks since the last check.
    Lacking(u32),
}

impl DiskSpace {
    pub(super) fn new(disk: Box<dyn Storage + Send>) -> Self {
        Self { disk, state: State::Unseen }
    }

    /// Whether proposals are allowed.
    pub(super) fn is_enough(&self) -> bool {
        !matches!(self.state, State::Lacking(_))
    }

    /// Creates the reserve, and retries it periodically while space is low.
    pub(super) fn tick(&mut self) -> Result<(), StorageError> {
        match &mut self.state {
            State::Enough => return Ok(()),
            State::Lacking(ticks) if *ticks < LOOK_AGAIN => {
                *ticks += 1;
                return Ok(());
            }
            State::Lacking(_) | State::Unseen => {}
        }
        if self.disk.reserve_space()? {
            if !self.is_enough() {
                tracing::info!("the disk has room again: this coordinator accepts changes");
            }
            self.state = State::Enough;
        } else {
            self.lack();
        }
        Ok(())
    }

    /// Makes a write durable. Returns `false` if the disk is full; the caller must then retry the same write
    /// first.
    pub(super) fn write(&mut self, write: &Write) -> Result<bool, StorageError> {
        match self.disk.write(write) {
            Ok(()) => return Ok(true),
            Err(StorageError::Full) => self.lack(),
            Err(error) => return Err(error),
        }
        match self.disk.recover().and_then(|()| self.disk.write(write)) {
            Ok(()) => Ok(true),
            Err(StorageError::Full) => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn lack(&mut self) {
        if self.is_enough() {
            tracing::error!("the disk is full: this coordinator proposes no change until there is room");
        }
        self.state = State::Lacking(0);
    }
}
