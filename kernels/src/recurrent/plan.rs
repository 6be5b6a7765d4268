//! The slots that a step reads and writes, checked once for all layers.

use std::marker::PhantomData;
use std::ops::Range;

use super::layout::StateLayout;
use crate::aligned::CACHE_LINE;
use crate::attention::OFFSET_UNIT;
use crate::backend::{MAX_DEFERRED_ROWS, StepSequence, StepState};
use crate::error::Error;

/// Four-byte units per unit of a slot's offset.
const UNIT: usize = OFFSET_UNIT / size_of::<f32>();

/// The reads and writes of states in one step.
///
/// A slot that is written overlaps no other written slot and no slot that another sequence reads. Sequences
/// can therefore be advanced in any order and in parallel.
#[derive(Debug, Clone, Default)]
pub struct StatePlan {
    sequences: Vec<PlannedSequence>,
    rows: usize,
    slot_bytes: usize,
    /// First byte after the last slot.
    end: u64,
}

/// One sequence of a [`StatePlan`]. Slots are offsets in the arena, in units of four bytes.
#[derive(Debug, Clone)]
pub(super) struct PlannedSequence {
    pub(super) rows: Range<usize>,
    pub(super) read: Option<usize>,
    pub(super) write: usize,
    /// (Row among the sequence's rows, slot); ascending by row.
    pub(super) exports: Vec<(usize, usize)>,
    pub(super) deferred: bool,
}

impl PlannedSequence {
    /// The slot that holds the state before a row. `None`: the state is all zeros.
    pub(super) fn before(&self, row: usize) -> Option<usize> {
        row.checked_sub(1).map_or(self.read, |previous| Some(self.after(previous)))
    }

    /// The slot that holds the state after a row. A state that is exported in the middle of a step is written
    /// to its export slot, and the next row continues from there.
    pub(super) fn after(&self, row: usize) -> usize {
        match self.exports_of(row) {
            [(_, slot), ..] if row + 1 < self.rows.len() => *slot,
            _ => self.write,
        }
    }

    /// The slots that receive a copy of the state in [`PlannedSequence::after`].
    pub(super) fn copies(&self, row: usize) -> impl Iterator<Item = usize> {
        let left_in = self.after(row);
        self.exports_of(row).iter().map(|(_, slot)| *slot).filter(move |slot| *slot != left_in)
    }

    fn exports_of(&self, row: usize) -> &[(usize, usize)] {
        let start = self.exports.partition_point(|(after, _)| *after < row);
        let len = self.exports[start..].partition_point(|(after, _)| *after == row);
        &self.exports[start..start + len]
    }
}

impl StatePlan {
    /// Checks the states of a step. `slot_bytes` is the size of a slot over all layers.
    ///
    /// # Errors
    /// [`Error::Length`] unless there is one state for each sequence and the sequences' rows follow each
    /// other, [`Error::OutOfRange`] for an export after a row that the sequence does not have,
    /// [`Error::ExportOrder`], [`Error::DeferredRows`], [`Error::DeferredExport`],
    /// [`Error::OverlappingStates`].
    pub fn new(sequences: &[StepSequence], states: &[StepState], slot_bytes: usize) -> Result<Self, Error> {
        if sequences.len() != states.len() {
            let (expected, found) = (sequences.len(), states.len());
            return Err(Error::Length { what: "states of the step", expected, found });
        }
        let mut rows = 0;
        for (sequence, state) in sequences.iter().zip(states) {
            let Range { start, end } = sequence.rows;
            if start != rows || end < start {
                return Err(Error::Length { what: "first row of a sequence", expected: rows, found: start });
            }
            rows = end;
            check_exports(end - start, state)?;
            if state.deferred {
                check_deferred(end - start, state)?;
            }
        }
        let end = check_overlap(states, slot_bytes)?;
        let unit_of = |slot: u32| slot as usize * UNIT;
        let planned = sequences.iter().zip(states).map(|(sequence, state)| PlannedSequence {
            rows: sequence.rows.clone(),
            read: state.read.map(unit_of),
            write: unit_of(state.write),
            exports: state.exports.iter().map(|export| (export.row, unit_of(export.slot))).collect(),
            deferred: state.deferred,
        });
        Ok(Self { sequences: planned.collect(), rows, slot_bytes, end })
    }

    /// Rows of the step.
    pub fn rows(&self) -> usize {
        self.rows
    }

    pub(super) fn sequences(&self) -> &[PlannedSequence] {
        &self.sequences
    }

    /// Whether the state of any sequence is deferred.
    pub(super) fn defers(&self) -> bool {
        self.sequences.iter().any(|sequence| sequence.deferred)
    }
}

fn check_exports(rows: usize, state: &StepState) -> Result<(), Error> {
    let mut last = 0;
    for export in &state.exports {
        if export.row >= rows {
            return Err(Error::OutOfRange { what: "row of a state export", index: export.row, len: rows });
        }
        if export.row < last {
            return Err(Error::ExportOrder { row: export.row });
        }
        last = export.row;
    }
    Ok(())
}

fn check_deferred(rows: usize, state: &StepState) -> Result<(), Error> {
    if rows > MAX_DEFERRED_ROWS {
        return Err(Error::DeferredRows { rows, max: MAX_DEFERRED_ROWS });
    }
    if !state.exports.is_empty() {
        return Err(Error::DeferredExport);
    }
    Ok(())
}

/// Rejects slots that must not be used in one step. Returns the first byte after the last slot.
fn check_overlap(states: &[StepState], slot_bytes: usize) -> Result<u64, Error> {
    let bytes = slot_bytes as u64;
    let at = |slot: u32| u64::from(slot) * OFFSET_UNIT as u64;
    let mut writes: Vec<(u32, usize)> = Vec::new();
    for (sequence, state) in states.iter().enumerate() {
        writes.push((state.write, sequence));
        writes.extend(state.exports.iter().map(|export| (export.slot, sequence)));
    }
    writes.sort_unstable();
    if let Some(pair) = writes.windows(2).find(|pair| at(pair[1].0) - at(pair[0].0) < bytes) {
        return Err(Error::OverlappingStates { slot: pair[1].0 });
    }
    let mut farthest = writes.last().map(|(slot, _)| *slot);
    for (sequence, state) in states.iter().enumerate() {
        let Some(read) = state.read else { continue };
        farthest = farthest.max(Some(read));
        // Written slots do not overlap each other, so only the two nearest can overlap the slot that is read.
        let next = writes.partition_point(|(slot, _)| *slot < read);
        let near = &writes[next.saturating_sub(1)..writes.len().min(next + 1)];
        let clash = near.iter().any(|(slot, writer)| {
            let in_place = *slot == read && *writer == sequence;
            !in_place && at(*slot).abs_diff(at(read)) < bytes
        });
        if clash {
            return Err(Error::OverlappingStates { slot: read });
        }
    }
    Ok(farthest.map_or(0, |slot| at(slot) + bytes))
}

/// One layer's states in the slots of a step.
#[derive(Debug)]
pub struct LayerState<'a> {
    plan: &'a StatePlan,
    layout: &'a StateLayout,
    /// The layer's part of a slot at offset zero.
    start: *mut f32,
    arena: PhantomData<&'a mut [u8]>,
}

// SAFETY: an exclusive borrow of the arena's bytes; threads use parts of it that do not overlap (see `at`).
unsafe impl Send for LayerState<'_> {}
// SAFETY: as above.
unsafe impl Sync for LayerState<'_> {}

impl<'a> LayerState<'a> {
    /// The states of a layer at `offset` bytes into each slot.
    ///
    /// # Errors
    /// [`Error::UnalignedArena`] if the arena or `offset` is not on a cache line, [`Error::OutsideSlot`],
    /// [`Error::OutsideArena`].
    pub fn new(
        arena: &'a mut [u8],
        plan: &'a StatePlan,
        layout: &'a StateLayout,
        offset: usize,
    ) -> Result<Self, Error> {
        if !arena.as_ptr().addr().is_multiple_of(CACHE_LINE) || !offset.is_multiple_of(CACHE_LINE) {
            return Err(Error::UnalignedArena);
        }
        let (end, slot) = (offset.saturating_add(layout.bytes()), plan.slot_bytes);
        if end > slot && !plan.sequences.is_empty() {
            return Err(Error::OutsideSlot { end, slot });
        }
        if plan.end > arena.len() as u64 {
            return Err(Error::OutsideArena { end: plan.end, len: arena.len() });
        }
        let start = arena.as_mut_ptr().cast::<f32>().wrapping_add(offset / size_of::<f32>());
        Ok(Self { plan, layout, start, arena: PhantomData })
    }

    pub(super) fn plan(&self) -> &'a StatePlan {
        self.plan
    }

    pub(super) fn layout(&self) -> &'a StateLayout {
        self.layout
    }

    /// Pointer to unit `index` of the layer's part of a slot. For a slot of the plan and an index inside the
    /// layout it points to four aligned, initialised bytes of the arena: an f32 or two bfloat16. Only the
    /// sequence that writes a slot may access it, and only one thread each value of it. Then no two accesses
    /// conflict.
    pub(super) fn at(&self, slot: usize, index: usize) -> *mut f32 {
        self.start.wrapping_add(slot + index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::StateExport;

    fn sequence(rows: Range<usize>) -> StepSequence {
        StepSequence { rows, context: 0, segment_start: None }
    }

    fn state(read: Option<u32>, write: u32, exports: &[(usize, u32)]) -> StepState {
        let exports = exports.iter().map(|&(row, slot)| StateExport { row, slot }).collect();
        StepState { read, write, exports, deferred: false }
    }

    /// A plan of slots of two units, two rows per sequence.
    fn plan(states: &[StepState]) -> Result<StatePlan, Error> {
        let sequences: Vec<_> = (0..states.len()).map(|i| sequence(2 * i..2 * i + 2)).collect();
        StatePlan::new(&sequences, states, 2 * OFFSET_UNIT)
    }

    #[test]
    fn slots_that_may_be_used_together() {
        for states in [
            vec![],
            vec![state(None, 0, &[])],
            vec![state(Some(0), 0, &[])],
            vec![state(Some(0), 2, &[(0, 4), (1, 0)])],
            vec![state(Some(0), 2, &[(1, 4), (1, 6)])],
            vec![state(Some(0), 2, &[]), state(Some(0), 4, &[]), state(Some(0), 6, &[])],
            // Two overlapping slots may both be read.
            vec![state(Some(0), 4, &[]), state(Some(1), 6, &[])],
        ] {
            let planned = plan(&states).unwrap();
            assert_eq!(planned.rows(), 2 * states.len());
        }
        assert_eq!(plan(&[state(Some(9), 2, &[])]).unwrap().end, 11 * OFFSET_UNIT as u64);
    }

    #[test]
    fn slots_that_may_not_be_used_together() {
        for (states, slot) in [
            (vec![state(None, 3, &[]), state(None, 3, &[])], 3),
            (vec![state(None, 3, &[]), state(None, 4, &[])], 4),
            (vec![state(None, 3, &[(0, 3)])], 3),
            (vec![state(None, 3, &[(0, 5)]), state(None, 7, &[(0, 6)])], 6),
            (vec![state(Some(0), 0, &[]), state(Some(0), 2, &[])], 0),
            (vec![state(Some(0), 4, &[]), state(None, 2, &[(1, 0)])], 0),
            (vec![state(Some(1), 0, &[])], 1),
            (vec![state(Some(1), 2, &[])], 1),
        ] {
            assert_eq!(plan(&states).unwrap_err(), Error::OverlappingStates { slot });
        }
    }

    #[test]
    fn rows_and_exports_are_checked() {
        let out_of_range = plan(&[state(None, 0, &[(2, 4)])]);
        assert_eq!(
            out_of_range.unwrap_err(),
            Error::OutOfRange { what: "row of a state export", index: 2, len: 2 }
        );
        let disordered = plan(&[state(None, 0, &[(1, 4), (0, 6)])]);
        assert_eq!(disordered.unwrap_err(), Error::ExportOrder { row: 0 });
        let (one, two) = ([state(None, 0, &[])], [state(None, 0, &[]), state(None, 2, &[])]);
        let gap = [sequence(0..1), sequence(2..3)];
        for result in [
            StatePlan::new(&[sequence(0..1)], &two, 128),
            StatePlan::new(&gap, &two, 128),
            StatePlan::new(&[sequence(1..2)], &one, 128),
        ] {
            assert!(matches!(result, Err(Error::Length { .. })), "{result:?}");
        }
    }
}
