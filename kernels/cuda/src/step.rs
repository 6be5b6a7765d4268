//! Everything that changes from step to step, in one area of device memory that is uploaded once per step.
//!
//! The area consists of arrays of u32. Each has room for the largest step, so that every array keeps its
//! address and a launch can be recorded once. Only the block tables are packed: they come last, and a step
//! uploads only the entries that it has.

mod check;
mod order;

#[cfg(test)]
mod tests;

pub use check::KvGroup;
pub(super) use order::has_several;

use super::DevicePtr;
use kernels::Error;
use kernels::attention::{BlockTable, NO_BLOCK};
use kernels::backend::{StepInput, StepSequence, StepState};
use std::ops::Range;

/// Marker for no slot. A read of it gives a state of zeros; a write to it writes nothing.
pub(super) const NO_SLOT: u32 = u32::MAX;

/// Arrays start at multiples of this number of bytes.
const ALIGN: usize = 16;

/// Limits of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepLimits {
    pub rows: usize,
    pub sequences: usize,
    /// State exports of all sequences together.
    pub exports: usize,
    /// Block table entries of all groups and sequences together.
    pub table_entries: usize,
}

/// Arrays of a step, in their order in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Field {
    /// `[rows]`
    Tokens,
    /// `[rows]`
    Positions,
    /// `[rows]`: index of the row's sequence.
    RowSequences,
    /// `[rows]`: 0 or 1.
    Segments,
    /// `[rows]`: rows whose state updates are deferred.
    KeptRows,
    /// `[sequences]`: number of positions after the step.
    SequenceEnds,
    /// `[sequences]`
    FirstRows,
    /// `[sequences]`: number of rows.
    Rows,
    /// `[sequences]`: slot, or [`NO_SLOT`].
    Reads,
    /// `[sequences]`: slot, or [`NO_SLOT`].
    Writes,
    /// `[sequences + 1]`
    ExportStarts,
    /// `[exports]`
    ExportRows,
    /// `[exports]`
    ExportSlots,
    /// `[groups][rows]`
    Order,
    /// `[groups][rows]`
    Common,
    /// `[groups][sequences]`: offsets into the tables.
    TableStarts,
    /// `[table entries]`
    Tables,
}

impl Field {
    const ALL: [Self; 17] = [
        Self::Tokens,
        Self::Positions,
        Self::RowSequences,
        Self::Segments,
        Self::KeptRows,
        Self::SequenceEnds,
        Self::FirstRows,
        Self::Rows,
        Self::Reads,
        Self::Writes,
        Self::ExportStarts,
        Self::ExportRows,
        Self::ExportSlots,
        Self::Order,
        Self::Common,
        Self::TableStarts,
        Self::Tables,
    ];

    /// Returns the most elements, and their name for the error of a longer array.
    fn room(self, limits: &StepLimits, groups: usize) -> (usize, &'static str) {
        match self {
            Self::Tokens | Self::Positions | Self::RowSequences | Self::Segments | Self::KeptRows => {
                (limits.rows, "rows of a step")
            }
            Self::SequenceEnds | Self::FirstRows | Self::Rows | Self::Reads | Self::Writes => {
                (limits.sequences, "sequences of a step")
            }
            Self::ExportStarts => (limits.sequences + 1, "sequences of a step"),
            Self::ExportRows | Self::ExportSlots => (limits.exports, "state exports of a step"),
            Self::Order | Self::Common => (groups * limits.rows, "rows of a step"),
            Self::TableStarts => (groups * limits.sequences, "block tables of a step"),
            Self::Tables => (limits.table_entries, "block table entries of a step"),
        }
    }
}

/// Layout of a step's arrays.
#[derive(Debug, Clone)]
pub struct StepLayout {
    limits: StepLimits,
    groups: Vec<KvGroup>,
    /// Byte offsets from the start, in the order of [`Field::ALL`].
    offsets: [usize; Field::ALL.len()],
    bytes: usize,
}

impl StepLayout {
    /// Creates the layout for steps within `limits` over the KV groups.
    pub fn new(limits: StepLimits, groups: &[KvGroup]) -> Self {
        let mut bytes = 0;
        let offsets = Field::ALL.map(|field| {
            let offset = bytes;
            let (room, _) = field.room(&limits, groups.len());
            bytes += (room * size_of::<u32>()).next_multiple_of(ALIGN);
            offset
        });
        Self { limits, groups: groups.to_vec(), offsets, bytes }
    }

    /// Returns the bytes of device memory of a step.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the addresses of the arrays of a step at `base`.
    pub fn at(&self, base: DevicePtr) -> StepPointers {
        let at = |field: Field| base.offset(self.offsets[field as usize]);
        StepPointers {
            tokens: at(Field::Tokens),
            positions: at(Field::Positions),
            row_sequences: at(Field::RowSequences),
            segments: at(Field::Segments),
            kept_rows: at(Field::KeptRows),
            sequence_ends: at(Field::SequenceEnds),
            tables: at(Field::Tables),
            states: StatePointers {
                first_rows: at(Field::FirstRows),
                rows: at(Field::Rows),
                reads: at(Field::Reads),
                writes: at(Field::Writes),
                export_starts: at(Field::ExportStarts),
                export_rows: at(Field::ExportRows),
                export_slots: at(Field::ExportSlots),
            },
            order: at(Field::Order),
            common: at(Field::Common),
            table_starts: at(Field::TableStarts),
            rows: self.limits.rows,
            sequences: self.limits.sequences,
        }
    }
}

/// Addresses of a step's arrays; see [`StepLayout::at`]. All elements are u32.
#[derive(Debug, Clone, Copy)]
pub struct StepPointers {
    /// `[rows]`
    pub tokens: DevicePtr,
    /// `[rows]`
    pub positions: DevicePtr,
    /// `[rows]`: index of the row's sequence.
    pub row_sequences: DevicePtr,
    /// `[rows]`: 0 or 1.
    pub segments: DevicePtr,
    /// Rows whose state updates are deferred, [`Step::kept_rows`] of them.
    pub kept_rows: DevicePtr,
    /// `[sequences]`: number of positions after the step.
    pub sequence_ends: DevicePtr,
    /// Block tables of all groups and sequences: byte offsets / 64.
    pub tables: DevicePtr,
    /// State updates of the sequences.
    pub states: StatePointers,
    order: DevicePtr,
    common: DevicePtr,
    table_starts: DevicePtr,
    rows: usize,
    sequences: usize,
}

impl StepPointers {
    /// Returns `[rows]`: the rows in attention's order. Rows whose caches begin with the same blocks of a
    /// group are adjacent.
    pub fn order(&self, group: usize) -> DevicePtr {
        self.order.offset(group * self.rows * size_of::<u32>())
    }

    /// Returns `[rows]`: the number of leading attention splits that a row shares with the one before it in
    /// that order. All bits are set for a row of the same sequence.
    pub fn common(&self, group: usize) -> DevicePtr {
        self.common.offset(group * self.rows * size_of::<u32>())
    }

    /// Returns `[sequences]`: start of each sequence's table in a group.
    pub fn table_starts(&self, group: usize) -> DevicePtr {
        self.table_starts.offset(group * self.sequences * size_of::<u32>())
    }
}

/// Addresses of the sequences' state updates.
#[derive(Debug, Clone, Copy)]
pub struct StatePointers {
    /// `[sequences]`
    pub first_rows: DevicePtr,
    /// `[sequences]`: number of rows.
    pub rows: DevicePtr,
    /// `[sequences]`: slot, or all bits set for a state of zeros.
    pub reads: DevicePtr,
    /// `[sequences]`: slot, or all bits set if no state is written.
    pub writes: DevicePtr,
    /// `[sequences + 1]`: offsets into the following two arrays.
    pub export_starts: DevicePtr,
    /// Row index within the sequence, ascending.
    pub export_rows: DevicePtr,
    pub export_slots: DevicePtr,
}

/// A step in upload format.
#[derive(Debug, Clone)]
pub struct Step {
    layout: StepLayout,
    bytes: Vec<u8>,
    used: usize,
    sequences: Vec<StepSequence>,
    rows: usize,
    kept_rows: usize,
}

impl Step {
    /// Creates room for steps of a layout.
    pub fn new(layout: StepLayout) -> Self {
        let bytes = vec![0; layout.bytes()];
        Self { layout, bytes, used: 0, sequences: Vec::new(), rows: 0, kept_rows: 0 }
    }

    pub fn layout(&self) -> &StepLayout {
        &self.layout
    }

    /// Returns the sequences of the step, in row order.
    pub fn sequences(&self) -> &[StepSequence] {
        &self.sequences
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the number of rows whose state updates are deferred.
    pub fn kept_rows(&self) -> usize {
        self.kept_rows
    }

    /// Returns the bytes to upload.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.used]
    }

    /// Stores a step. Kernels do not check tables, so this finds their errors: blocks outside the arena's
    /// `arena_bytes`, missing blocks, and blocks that two rows would write.
    ///
    /// `states` have been checked: see [`StatePlan`](kernels::recurrent::StatePlan).
    ///
    /// # Errors
    /// [`Error::Length`] if rows, tokens, tables or states do not match the sequences,
    /// [`Error::OutOfRange`] beyond the layout's limits, [`Error::MissingBlock`], [`Error::OutsideArena`],
    /// [`Error::OverlappingWrites`], [`Error::PartialSequence`].
    pub fn fill(&mut self, input: &StepInput<'_>, arena_bytes: usize) -> Result<(), Error> {
        self.take_rows(input)?;
        self.put_states(input.sequences, input.states)?;
        let limits = self.layout.limits;
        let mut starts = Vec::with_capacity(self.layout.groups.len() * limits.sequences);
        let mut tables = Vec::new();
        let mut order = Vec::with_capacity(self.layout.groups.len() * limits.rows);
        let mut common = Vec::with_capacity(self.layout.groups.len() * limits.rows);
        for (index, group) in self.layout.groups.iter().enumerate() {
            let missing = Error::OutOfRange { what: "KV group", index, len: input.tables.len() };
            let placements = input.tables.get(index).ok_or(missing)?;
            group.check(input.sequences, placements, arena_bytes)?;
            starts.resize(index * limits.sequences, 0);
            for (sequence, placement) in input.sequences.iter().zip(placements) {
                starts.push(tables.len() as u32);
                let blocks = (sequence.context + sequence.rows.len()).div_ceil(group.block_tokens);
                append(&mut tables, *placement, blocks);
            }
            order.resize(index * limits.rows, 0);
            common.resize(index * limits.rows, 0);
            let own = &starts[index * limits.sequences..];
            let blocks = |sequence: usize, range: Range<usize>| {
                let start = own[sequence] as usize;
                &tables[start + range.start..start + range.end]
            };
            group.put_order(input.sequences, blocks, &mut order, &mut common);
        }
        self.put(Field::Order, order)?;
        self.put(Field::Common, common)?;
        self.put(Field::TableStarts, starts)?;
        self.used = self.layout.offsets[Field::Tables as usize] + tables.len() * size_of::<u32>();
        self.put(Field::Tables, tables)
    }

    fn take_rows(&mut self, input: &StepInput<'_>) -> Result<(), Error> {
        let limits = self.layout.limits;
        let (mut positions, mut sequence_of, mut segments) = (Vec::new(), Vec::new(), Vec::new());
        for (index, sequence) in input.sequences.iter().enumerate() {
            if sequence.rows.start != positions.len() || sequence.rows.end < sequence.rows.start {
                let (expected, found) = (positions.len(), sequence.rows.start);
                return Err(Error::Length { what: "rows before a sequence", expected, found });
            }
            let rows = sequence.rows.len();
            if rows > limits.rows {
                return Err(Error::OutOfRange { what: "rows of a step", index: rows, len: limits.rows });
            }
            let segment_start = sequence.segment_start.unwrap_or(usize::MAX);
            for position in sequence.context..sequence.context + rows {
                positions.push(position as u32);
                sequence_of.push(index as u32);
                segments.push(u32::from(position >= segment_start));
            }
        }
        if positions.len() != input.tokens.len() {
            let (expected, found) = (input.tokens.len(), positions.len());
            return Err(Error::Length { what: "rows of the step's sequences", expected, found });
        }
        self.rows = positions.len();
        self.sequences.clear();
        self.sequences.extend_from_slice(input.sequences);
        let ends = input.sequences.iter().map(|sequence| (sequence.context + sequence.rows.len()) as u32);
        self.put(Field::SequenceEnds, ends)?;
        self.put(Field::Tokens, input.tokens.iter().copied())?;
        self.put(Field::Positions, positions)?;
        self.put(Field::RowSequences, sequence_of)?;
        self.put(Field::Segments, segments)
    }

    fn put_states(&mut self, sequences: &[StepSequence], states: &[StepState]) -> Result<(), Error> {
        // A model without recurrent layers has no states.
        if !states.is_empty() && states.len() != sequences.len() {
            let (expected, found) = (sequences.len(), states.len());
            return Err(Error::Length { what: "states of the step", expected, found });
        }
        let is_deferred = |state: &StepState| state.deferred;
        let kept_rows = sequences.iter().zip(states).filter(|(_, state)| is_deferred(state));
        let kept_rows: Vec<u32> =
            kept_rows.flat_map(|(sequence, _)| sequence.rows.clone()).map(|row| row as u32).collect();
        self.kept_rows = kept_rows.len();
        self.put(Field::KeptRows, kept_rows)?;
        self.put(Field::FirstRows, sequences.iter().map(|sequence| sequence.rows.start as u32))?;
        self.put(Field::Rows, sequences.iter().map(|sequence| sequence.rows.len() as u32))?;
        self.put(Field::Reads, states.iter().map(|state| state.read.unwrap_or(NO_SLOT)))?;
        let write = |state: &StepState| if is_deferred(state) { NO_SLOT } else { state.write };
        self.put(Field::Writes, states.iter().map(write))?;
        let mut starts = vec![0];
        for state in states {
            let end: u32 = starts.last().copied().unwrap_or(0);
            starts.push(end + state.exports.len() as u32);
        }
        self.put(Field::ExportStarts, starts)?;
        let exports = || states.iter().flat_map(|state| &state.exports);
        self.put(Field::ExportRows, exports().map(|export| export.row as u32))?;
        self.put(Field::ExportSlots, exports().map(|export| export.slot))
    }

    /// Writes an array.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if there are more values than room.
    fn put(&mut self, field: Field, values: impl IntoIterator<Item = u32>) -> Result<(), Error> {
        let (room, what) = field.room(&self.layout.limits, self.layout.groups.len());
        let start = self.layout.offsets[field as usize];
        let (words, _) = self.bytes[start..][..room * size_of::<u32>()].as_chunks_mut();
        let mut words = words.iter_mut();
        for value in values {
            let word = words.next().ok_or(Error::OutOfRange { what, index: room, len: room })?;
            *word = value.to_ne_bytes();
        }
        Ok(())
    }
}

/// Appends the first `blocks` entries of a table.
fn append(tables: &mut Vec<u32>, placement: BlockTable<'_>, blocks: usize) {
    let start = tables.len();
    match placement {
        BlockTable::Paged(table) => tables.extend(table.iter().take(blocks)),
        BlockTable::Contiguous { first, stride } => {
            tables.extend((0..blocks as u32).map(|block| first.wrapping_add(block.wrapping_mul(stride))));
        }
    }
    tables.resize(start + blocks, NO_BLOCK);
}
