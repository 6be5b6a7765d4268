//! The current step, in host memory and device memory.

use super::super::attention::SPLIT;
use super::super::step::{KvGroup, Step, StepLayout, StepLimits, StepPointers};
use super::super::{CudaError, Device};
use super::memory::GrowingBuffer;
use kernels::Error;
use kernels::backend::{EmbedIndex, StepInput, StepSequence};

/// Largest indices of a step into tables; zero for a step without rows.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Largest {
    pub(super) token: usize,
    pub(super) position: usize,
    pub(super) segment: usize,
}

impl Largest {
    const ANY: Self = Self { token: usize::MAX, position: usize::MAX, segment: usize::MAX };

    /// Checks the indices of a step against the largest ones that tables have rows for.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    pub(super) fn check(&self, room: &Self) -> Result<(), Error> {
        let pairs = [(self.token, room.token), (self.position, room.position), (self.segment, room.segment)];
        match pairs.into_iter().find(|(index, max)| index > max) {
            Some((index, max)) => Err(Error::OutOfRange { what: "matrix row", index, len: max + 1 }),
            None => Ok(()),
        }
    }
}

/// Maximum number of rows of a sequence in a recorded step: a token and its draft tokens.
const MAX_SEQUENCE_ROWS: usize = 16;

/// Graph shape of a decode step, which determines its launches: its sequences, the rows of each, and the reach
/// of the longest sequence: `2^reach` splits of attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct GraphShape {
    sequences: usize,
    /// Rows of each sequence.
    rows: usize,
    reach: u32,
    /// A row has an adapter: products have more launches.
    adapters: bool,
}

impl GraphShape {
    /// Returns `None` for steps that prefill, for sequences with different numbers of rows, and for several rows
    /// of a sequence with a state.
    fn of(input: &StepInput<'_>, adapters: bool) -> Option<Self> {
        let sequences = input.sequences;
        let rows = sequences.first()?.rows.len();
        let differ = sequences.iter().any(|sequence| sequence.rows.len() != rows);
        let most = if input.states.is_empty() { MAX_SEQUENCE_ROWS } else { 1 };
        if differ || !(1..=most).contains(&rows) || input.states.iter().any(|state| state.deferred) {
            return None;
        }
        let end = sequences.iter().map(|sequence| sequence.context + rows).max()?;
        let reach = end.div_ceil(SPLIT).next_power_of_two().trailing_zeros();
        Some(Self { sequences: sequences.len(), rows, reach, adapters })
    }

    /// Returns sequences for which attention needs at least as many launches, blocks and scratch bytes as
    /// for any step of this shape. A window may begin anywhere in a split, hence the last split has only
    /// one position.
    fn widest(self) -> Vec<StepSequence> {
        let end = if self.reach == 0 { SPLIT } else { ((SPLIT << self.reach) - SPLIT) + 1 };
        let rows = self.rows;
        let sequence =
            |s| StepSequence { rows: s * rows..(s + 1) * rows, context: end - rows, segment_start: None };
        (0..self.sequences).map(sequence).collect()
    }
}

/// A step, with the device memory that it is uploaded to.
pub(super) struct StepMemory {
    step: Step,
    groups: Vec<KvGroup>,
    limits: StepLimits,
    room: GrowingBuffer,
    pointers: Option<StepPointers>,
    largest: Largest,
    /// Largest indices that the tables read by this step have rows for.
    max_index: Largest,
    graph_shape: Option<GraphShape>,
    /// Result of [`GraphShape::widest`].
    widest: Vec<StepSequence>,
}

impl StepMemory {
    /// Creates the memory for steps of layers over `groups`.
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
            max_index: Largest::ANY,
            graph_shape: None,
            widest: Vec::new(),
        }
    }

    /// Stores a step and uploads it in one piece. `adapters`: a row has one.
    ///
    /// # Errors
    /// As [`Step::fill`]; errors of the device.
    pub(super) fn begin(
        &mut self,
        device: &mut dyn Device,
        input: &StepInput<'_>,
        arena_bytes: usize,
        adapters: bool,
    ) -> Result<(), Error> {
        self.pointers = None;
        self.make_room(device, input)?;
        self.step.fill(input, arena_bytes)?;
        let layout = self.step.layout();
        let base = self.room.of(device, layout.bytes())?;
        device.upload(base, self.step.bytes())?;
        self.pointers = Some(layout.at(base));
        let ends =
            || input.sequences.iter().map(|sequence| (sequence, sequence.context + sequence.rows.len()));
        let second = |start: Option<usize>, end| start.is_some_and(|start| start < end);
        self.largest = Largest {
            token: input.tokens.iter().max().map_or(0, |token| *token as usize),
            position: ends().map(|(_, end)| end).max().unwrap_or(0).saturating_sub(1),
            segment: usize::from(ends().any(|(sequence, end)| second(sequence.segment_start, end))),
        };
        self.max_index = Largest::ANY;
        let graph_shape = GraphShape::of(input, adapters);
        if self.graph_shape != graph_shape {
            self.widest = graph_shape.map_or_else(Vec::new, GraphShape::widest);
            self.graph_shape = graph_shape;
        }
        Ok(())
    }

    /// Returns the graph shape. `None` if the step must not be recorded.
    pub(super) fn graph_shape(&self) -> Option<GraphShape> {
        self.graph_shape
    }

    /// Returns the sequences that attention's launches are planned for: those of the step, or the widest of
    /// its graph shape.
    pub(super) fn planned(&self) -> &[StepSequence] {
        if self.graph_shape.is_some() { &self.widest } else { self.step.sequences() }
    }

    /// Checks the step's tokens, positions or segments against a table with `rows` rows, because kernels do
    /// not check them.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    pub(super) fn read_table(&mut self, index: EmbedIndex, rows: usize) -> Result<(), Error> {
        let max = match index {
            EmbedIndex::Token => &mut self.max_index.token,
            EmbedIndex::Position => &mut self.max_index.position,
            EmbedIndex::Segment => &mut self.max_index.segment,
        };
        *max = (*max).min(rows.saturating_sub(1));
        if self.step.rows() == 0 { Ok(()) } else { self.largest.check(&self.max_index) }
    }

    /// Returns the largest indices that all tables read so far have rows for.
    pub(super) fn max_index(&self) -> Largest {
        self.max_index
    }

    /// Returns the largest indices of the step.
    pub(super) fn largest(&self) -> Largest {
        self.largest
    }

    /// Makes a layout with room for twice as much if the step is larger than any before. If it has more
    /// rows or sequences, the memory is allocated again even if its size stays the same: the groups' arrays
    /// move, and graphs refer to their old addresses.
    fn make_room(&mut self, device: &mut dyn Device, input: &StepInput<'_>) -> Result<(), CudaError> {
        let blocks = |group: &KvGroup| -> usize {
            let ends = input.sequences.iter().map(|sequence| sequence.context + sequence.rows.len());
            ends.map(|end| end.div_ceil(group.block_tokens)).sum()
        };
        let needed = [
            input.tokens.len(),
            input.sequences.len(),
            input.states.iter().map(|state| state.exports.len()).sum(),
            self.groups.iter().map(blocks).sum(),
        ];
        let StepLimits { rows, sequences, exports, table_entries } = self.limits;
        let current = [rows, sequences, exports, table_entries];
        if needed.iter().zip(current).all(|(needed, current)| *needed <= current) {
            return Ok(());
        }
        let grown: [usize; 4] = std::array::from_fn(|i| {
            if needed[i] > current[i] { needed[i].next_power_of_two() } else { current[i] }
        });
        let moved = grown[..2] != current[..2];
        let [rows, sequences, exports, table_entries] = grown;
        self.limits = StepLimits { rows, sequences, exports, table_entries };
        self.step = Step::new(StepLayout::new(self.limits, &self.groups));
        if moved { self.room.release(device) } else { Ok(()) }
    }

    /// Returns the step that was stored last.
    pub(super) fn step(&self) -> &Step {
        &self.step
    }

    /// Returns the addresses of the step's arrays.
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
