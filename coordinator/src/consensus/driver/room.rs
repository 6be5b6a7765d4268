//! A disk that may be full. While there is little room, nothing new is put forward; what has to be written takes the
//! room that was set aside; and when that is gone too, nothing goes on until there is room again.

use crate::consensus::storage::{Storage, StorageError, Write};

/// Ticks after which it is looked whether there is room again.
const LOOK_AGAIN: u32 = 20;

/// A disk, and whether there is room on it.
pub(super) struct DiskSpace {
    disk: Box<dyn Storage + Send>,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Unseen,
    Enough,
    /// There is little or none; so many ticks since it was looked.
    Lacking(u32),
}

impl DiskSpace {
    pub(super) fn new(disk: Box<dyn Storage + Send>) -> Self {
        Self { disk, state: State::Unseen }
    }

    /// Whether anything new may be put forward.
    pub(super) fn is_enough(&self) -> bool {
        !matches!(self.state, State::Lacking(_))
    }

    /// Sets room aside, now and then, until that is done.
    pub(super) fn tick(&mut self) -> Result<(), StorageError> {
        match &mut self.state {
            State::Enough => return Ok(()),
            State::Lacking(ticks) if *ticks < LOOK_AGAIN => {
                *ticks += 1;
                return Ok(());
            }
            State::Lacking(_) | State::Unseen => {}
        }
        if self.disk.set_aside()? {
            if !self.is_enough() {
                tracing::info!("there is room on the disk again");
            }
            self.state = State::Enough;
        } else {
            self.lack();
        }
        Ok(())
    }

    /// Makes a write durable. False if there is no room at all: the same must be written before anything else.
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
            tracing::error!("the disk is full: no change is put forward from here until there is room");
        }
        self.state = State::Lacking(0);
    }
}
