//! A model's share of a device that it computes on beside others.

use crate::budget::Reservation;
use crate::kv_cache::memory::HostFloor;
use crate::turns::Turn;

/// The turns and the memory of a model. Its engine keeps it as long as it holds memory of the device.
#[derive(Debug)]
pub struct DeviceShare {
    turn: Turn,
    memory: Reservation,
    has_turn: bool,
    /// `None` if the KV arena has one size.
    elastic: Option<ElasticArena>,
}

/// How a model's KV arena grows and shrinks.
#[derive(Debug, Clone)]
pub struct ElasticArena {
    /// Bytes that it keeps: room for the longest sequence.
    pub smallest: u64,
    /// Memory of the host that no growth may touch.
    pub host: Option<HostFloor>,
}

impl DeviceShare {
    pub fn new(turn: Turn, memory: Reservation) -> Self {
        Self { turn, memory, has_turn: false, elastic: None }
    }

    /// With an arena that grows while the device has memory, and is shrunk for other models.
    pub fn with_elastic_arena(self, elastic: ElasticArena) -> Self {
        Self { elastic: Some(elastic), ..self }
    }

    /// How the arena grows and shrinks; `None` if it has one size.
    pub fn elastic(&self) -> Option<&ElasticArena> {
        self.elastic.as_ref()
    }

    /// Reserves memory for a larger arena. Returns whether there was enough.
    pub(crate) fn grow(&mut self, bytes: u64) -> bool {
        let host = self.elastic.as_ref().and_then(|elastic| elastic.host.as_ref());
        let allowed = host
            .is_none_or(|host| host.floor.admit(host.memory.as_ref(), "a larger KV cache", bytes).is_ok());
        allowed && self.memory.grow(bytes).is_ok()
    }

    /// Adds memory that was reserved for the model.
    pub fn add(&mut self, memory: Reservation) {
        self.memory.add(memory);
    }

    pub(crate) fn shrink(&mut self, bytes: u64) {
        self.memory.shrink(bytes);
    }

    /// Blocks until it is the model's turn.
    pub fn begin(&mut self) {
        self.turn.begin();
        self.has_turn = true;
    }

    /// Whether the model may compute a step.
    pub(crate) fn has_turn(&self) -> bool {
        self.has_turn
    }

    /// Ends the turn. `rows`: those of the step. `again`: the model has another step to compute.
    pub fn end(&mut self, rows: usize, again: bool) {
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
