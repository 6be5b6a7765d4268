//! The step in flight, in the host's memory and the device's.

use super::super::attention::SPLIT;
use super::super::step::{KvGroup, Step, StepLayout, StepLimits, StepPointers};
use super::super::{CudaError, Device};
use super::memory::GrowingBuffer;
use crate::backend::{EmbedIndex, StepInput, StepSequence};
use crate::error::Error;

/// The largest numbers of a step that tables are indexed by; zero of a step without rows.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Largest {
    pub(super) token: usize,
    pub(super) position: usize,
    pub(super) segment: usize,
}

impl Largest {
    const ANY: Self = Self { token: usize::MAX, position: usize::MAX, segment: usize::MAX };

    /// Checks the numbers of a step against those that tables have rows for.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    pub(super) fn check(&self, room: &Self) -> Result<(), Error> {
        let pairs = [(self.token, room.token), (self.position, room.position), (self.segment, room.segment)];
        match pairs.into_iter().find(|(index, most)| index > most) {
            Some((index, most)) => Err(Error::OutOfRange { what: "matrix row", index, len: most + 1 }),
            None => Ok(()),
        }
    }
}

/// What the launches of a step that decodes follow from: its rows, each of another sequence, and how far the longest of
/// these reaches: `2^reach` splits of attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct StepForm {
    rows: usize,
    reach: u32,
}

impl StepForm {
    /// None for steps that prefill, and for those with rows that may be taken back.
    fn of(sequences: &[StepSequence], kept_rows: usize) -> Option<Self> {
        if sequences.is_empty() || kept_rows > 0 || sequences.iter().any(|sequence| sequence.rows.len() != 1)
        {
            return None;
        }
        let end = sequences.iter().map(|sequence| sequence.context + 1).max()?;
        let reach = end.div_ceil(SPLIT).next_power_of_two().trailing_zeros();
        Some(Self { rows: sequences.len(), reach })
    }

    /// Sequences that attention needs no fewer launches, blocks or scratch for than for any of this form. A window may
    /// begin in any place of a split, hence the last one has one position only.
    fn widest(self) -> Vec<StepSequence> {
        let end = if self.reach == 0 { SPLIT } else { ((SPLIT << self.reach) - SPLIT) + 1 };
        let sequence = |row| StepSequence { rows: row..row + 1, context: end - 1, segment_start: None };
        (0..self.rows).map(sequence).collect()
    }
}

/// A step and the memory that it is uploaded to.
pub(super) struct StepMemory {
    step: Step,
    groups: Vec<KvGroup>,
    limits: StepLimits,
    room: GrowingBuffer,
    pointers: Option<StepPointers>,
    largest: Largest,
    /// What the tables that were read by it have rows for.
    most: Largest,
    form: Option<StepForm>,
    /// [`StepForm::widest`].
    widest: Vec<StepSequence>,
}

impl StepMemory {
    /// For layers over `groups`.
    pub(super) fn new(groups: Vec<KvGroup>) -> Self {
        let limits = StepLimits { rows: 0, sequences: 0, exports: 0, table_entries: 0 };
        let step = Step::new(StepLayout::new(limits, &groups));
        Self {
            step,
            groups,
            limits,
            room: GrowingBuffer::default(),
            pointers: None,
            largest: Largest::default(),
            most: Largest::ANY,
            form: None,
            widest: Vec::new(),
        }
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
        self.make_room(device, input)?;
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
        self.most = Largest::ANY;
        let form = StepForm::of(input.sequences, self.step.kept_rows());
        if self.form != form {
            self.widest = form.map_or_else(Vec::new, StepForm::widest);
            self.form = form;
        }
        Ok(())
    }

    /// What its launches follow from, if it may be recorded.
    pub(super) fn form(&self) -> Option<StepForm> {
        self.form
    }

    /// The sequences that attention's launches are planned for: those of the step, or the widest of its form.
    pub(super) fn planned(&self) -> &[StepSequence] {
        if self.form.is_some() { &self.widest } else { self.step.sequences() }
    }

    /// A table with so many rows is read by the step's tokens, positions or segments, at which kernels do not look.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    pub(super) fn read_table(&mut self, index: EmbedIndex, rows: usize) -> Result<(), Error> {
        let most = match index {
            EmbedIndex::Token => &mut self.most.token,
            EmbedIndex::Position => &mut self.most.position,
            EmbedIndex::Segment => &mut self.most.segment,
        };
        *most = (*most).min(rows.saturating_sub(1));
        if self.step.rows() == 0 { Ok(()) } else { self.largest.check(&self.most) }
    }

    /// The largest numbers that all tables read so far have rows for.
    pub(super) fn most(&self) -> Largest {
        self.most
    }

    /// What tables must have a row for.
    pub(super) fn largest(&self) -> Largest {
        self.largest
    }

    /// Steps larger than any before get a layout with room for twice as much. With more rows or sequences it lies in other
    /// memory: even where it takes no more bytes, the arrays of its groups lie elsewhere, and what was recorded names where
    /// they were.
    fn make_room(&mut self, device: &mut dyn Device, input: &StepInput<'_>) -> Result<(), CudaError> {
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
            return Ok(());
        }
        let grown: [usize; 4] =
            std::array::from_fn(
                |i| if wanted[i] > known[i] { wanted[i].next_power_of_two() } else { known[i] },
            );
        let moved = grown[..2] != known[..2];
        let [rows, sequences, exports, table_entries] = grown;
        self.limits = StepLimits { rows, sequences, exports, table_entries };
        self.step = Step::new(StepLayout::new(self.limits, &self.groups));
        if moved { self.room.give_back(device) } else { Ok(()) }
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
