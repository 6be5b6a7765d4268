//! The step in flight, in the host's memory and the device's.

use super::super::step::{KvGroup, Step, StepLayout, StepLimits, StepPointers};
use super::super::{CudaError, Device};
use super::memory::Room;
use crate::backend::StepInput;
use crate::error::Error;

/// The largest numbers of a step that tables are indexed by; zero of a step without rows.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Largest {
    pub(super) token: usize,
    pub(super) position: usize,
    pub(super) segment: usize,
}

/// A step and the memory that it is uploaded to.
pub(super) struct StepMemory {
    step: Step,
    groups: Vec<KvGroup>,
    limits: StepLimits,
    room: Room,
    pointers: Option<StepPointers>,
    largest: Largest,
}

impl StepMemory {
    /// For layers over `groups`.
    pub(super) fn new(groups: Vec<KvGroup>) -> Self {
        let limits = StepLimits { rows: 0, sequences: 0, exports: 0, table_entries: 0 };
        let step = Step::new(StepLayout::new(limits, &groups));
        Self { step, groups, limits, room: Room::default(), pointers: None, largest: Largest::default() }
    }

    /// Takes in a step and uploads it, in one piece.
    ///
    /// # Errors
    /// As [`Step::fill`]; what the device says.
    pub(super) fn begin(
        &mut self,
        device: &mut dyn Device,
        input: &StepInput<'_>,
        arena_bytes: usize,
    ) -> Result<(), Error> {
        self.pointers = None;
        self.make_room(input);
        self.step.fill(input, arena_bytes)?;
        let layout = self.step.layout();
        let base = self.room.of(device, layout.bytes())?;
        device.upload(base, self.step.bytes())?;
        self.pointers = Some(layout.at(base));
        let ends = || input.sequences.iter().map(|part| (part, part.context + part.rows.len()));
        let second = |start: Option<usize>, end| start.is_some_and(|start| start < end);
        self.largest = Largest {
            token: input.tokens.iter().max().map_or(0, |token| *token as usize),
            position: ends().map(|(_, end)| end).max().unwrap_or(0).saturating_sub(1),
            segment: usize::from(ends().any(|(part, end)| second(part.segment_start, end))),
        };
        Ok(())
    }

    /// What tables must have a row for.
    pub(super) fn largest(&self) -> Largest {
        self.largest
    }

    /// Steps larger than any before get a layout with room for twice as much.
    fn make_room(&mut self, input: &StepInput<'_>) {
        let blocks = |group: &KvGroup| -> usize {
            let ends = input.sequences.iter().map(|sequence| sequence.context + sequence.rows.len());
            ends.map(|end| end.div_ceil(group.block_tokens)).sum()
        };
        let wanted = [
            input.tokens.len(),
            input.sequences.len(),
            input.states.iter().map(|state| state.exports.len()).sum(),
            self.groups.iter().map(blocks).sum(),
        ];
        let StepLimits { rows, sequences, exports, table_entries } = self.limits;
        let known = [rows, sequences, exports, table_entries];
        if wanted.iter().zip(known).all(|(wanted, known)| *wanted <= known) {
            return;
        }
        let grown =
            std::array::from_fn(
                |i| if wanted[i] > known[i] { wanted[i].next_power_of_two() } else { known[i] },
            );
        let [rows, sequences, exports, table_entries] = grown;
        self.limits = StepLimits { rows, sequences, exports, table_entries };
        self.step = Step::new(StepLayout::new(self.limits, &self.groups));
    }

    /// The step that was taken in last.
    pub(super) fn step(&self) -> &Step {
        &self.step
    }

    /// Its arrays.
    ///
    /// # Errors
    /// [`CudaError::Invalid`] before the first step.
    pub(super) fn pointers(&self) -> Result<&StepPointers, CudaError> {
        self.pointers.as_ref().ok_or_else(|| CudaError::Invalid { what: "an op before any step".into() })
    }

    pub(super) fn bytes(&self) -> usize {
        self.room.bytes()
    }
}
