//! A model's share of a device that it computes on beside others.

use crate::budget::Reservation;
use crate::turns::Turn;

/// The turns and the memory of a model. Its engine keeps it as long as it holds memory of the device.
#[derive(Debug)]
pub struct DeviceShare {
    turn: Turn,
    memory: Reservation,
    has_turn: bool,
}

impl DeviceShare {
    pub fn new(turn: Turn, memory: Reservation) -> Self {
        Self { turn, memory, has_turn: false }
    }

    /// Blocks until it is the model's turn.
    pub(crate) fn begin(&mut self) {
        self.turn.begin();
        self.has_turn = true;
    }

    /// Whether the model may compute a step.
    pub(crate) fn has_turn(&self) -> bool {
        self.has_turn
    }

    /// Ends the turn. `rows`: those of the step. `again`: the model has another step to compute.
    pub(crate) fn end(&mut self, rows: usize, again: bool) {
        if std::mem::take(&mut self.has_turn) {
            self.turn.end(rows as u64, again);
        }
    }

    /// The model has nothing to compute now.
    pub(crate) fn withdraw(&mut self) {
        self.turn.withdraw();
    }

    /// Memory of the model.
    pub fn memory(&self) -> &Reservation {
        &self.memory
    }

    /// Weight of the model in the turns; 0 counts as 1.
    pub fn set_priority(&self, priority: u32) {
        self.turn.set_weight(priority);
    }
}
