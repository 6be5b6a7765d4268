//! Converts a step's plan into the decoder's input.

use crate::Error;
use crate::decoder::{Blocks, Decoder};
use crate::kv_cache::BlockTable as Table;
use crate::scheduler::{PlannedSequence, Scheduler, SequenceState, StepPlan};
use kernels::backend::{BlockTable, KvCopy, StateExport, StepInput, StepSequence, StepState};

/// Uploads the plan and runs the layers. Calls `beside` after each layer.
pub(super) fn run(
    decoder: &mut Decoder,
    scheduler: &Scheduler,
    plan: &StepPlan,
    beside: &mut dyn FnMut(Blocks<'_>),
) -> Result<(), Error> {
    let part = |sequence: &PlannedSequence| StepSequence {
        rows: sequence.rows.start as usize..sequence.rows.end as usize,
        context: sequence.context_before as usize,
        segment_start: None,
    };
    let sequences: Vec<StepSequence> = plan.sequences.iter().map(part).collect();
    let strides = decoder.block_strides();
    let table = |sequence: &PlannedSequence, group: usize| {
        table_of(scheduler.tables(sequence.slot).get(group), strides[group])
    };
    let tables: Vec<Vec<BlockTable<'_>>> = (0..strides.len())
        .map(|group| plan.sequences.iter().map(|sequence| table(sequence, group)).collect())
        .collect();
    let states: Vec<StepState> =
        plan.sequences.iter().filter_map(|sequence| sequence.state.as_ref()).map(step_state).collect();
    let copies: Vec<KvCopy> =
        plan.copies.iter().map(|copy| KvCopy { group: copy.group, from: copy.src, to: copy.dst }).collect();
    let input = StepInput { tokens: &plan.tokens, sequences: &sequences, tables: &tables, states: &states };
    decoder.forward_beside(&copies, &input, beside)
}

/// A sequence's block table in the form of the decoder's input.
fn table_of(table: Option<&Table>, stride: u32) -> BlockTable<'_> {
    table.map_or(BlockTable::Paged(&[]), |table| match table.contiguous_base() {
        Some(first) => BlockTable::Contiguous { first, stride },
        None => BlockTable::Paged(table.offsets()),
    })
}

/// All of a sequence's tables.
pub(super) fn tables_of<'a>(tables: &'a [Table], strides: &[u32]) -> Vec<BlockTable<'a>> {
    (0usize..).zip(strides).map(|(group, stride)| table_of(tables.get(group), *stride)).collect()
}

fn step_state(state: &SequenceState) -> StepState {
    let export = |&(row, slot): &(u32, u32)| StateExport { row: row as usize, slot };
    let exports = state.exports.iter().map(export).collect();
    StepState { read: state.read, write: state.write, exports, deferred: state.deferred }
}
