//! Runs steps over a decoder that has all layers.

use super::{DecoderRows, Executor, KvBlocks, StepRequest, StepResult, StepRows};
use crate::Error;
use crate::decoder::{Blocks, Decoder, LayerState};
use crate::images::StepImages;
use crate::kv_cache::BlockTable as Table;
use crate::scheduler::{Demand, PlannedSequence, Scheduler, SequenceState, StepLimits, StepPlan};
use crate::telemetry::StageCounts;
use kernels::backend::{AdapterId, BlockTable, KvCopy, StateExport, StepInput, StepSequence, StepState};
use model::checkpoint::lora::LoraAdapter;
use std::path::Path;
use std::time::Duration;

pub struct LocalExecutor {
    decoder: Decoder,
}

impl LocalExecutor {
    pub fn new(decoder: Decoder) -> Self {
        Self { decoder }
    }
}

impl KvBlocks for LocalExecutor {
    fn block_bytes(&self, group: usize) -> usize {
        self.decoder.groups().get(group).map_or(0, |group| group.block_bytes)
    }

    fn read_blocks(&mut self, blocks: &[(usize, u32)]) -> Result<Vec<Vec<u8>>, Error> {
        self.decoder.blocks().read_blocks(blocks)
    }

    fn write_blocks(&mut self, pieces: &[(usize, u32, &[u8])]) -> Result<(), Error> {
        self.decoder.blocks().write_blocks(pieces)
    }

    fn read_states(&mut self, slot: u32) -> Result<Vec<LayerState>, Error> {
        self.decoder.blocks().read_states(slot)
    }
}

impl Executor for LocalExecutor {
    fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    fn decoder_mut(&mut self) -> &mut Decoder {
        &mut self.decoder
    }

    fn ranks(&self) -> usize {
        1
    }

    fn limits(&mut self, _demand: Demand) -> Option<StepLimits> {
        Some(StepLimits::NONE)
    }

    fn submit(
        &mut self,
        scheduler: &Scheduler,
        plan: &StepPlan,
        request: StepRequest,
        between_layers: &mut dyn FnMut(&mut dyn KvBlocks),
    ) -> Result<Option<StepResult>, Error> {
        self.decoder.use_adapters(&request.adapters)?;
        run(&mut self.decoder, scheduler, plan, &mut |mut blocks| between_layers(&mut blocks))?;
        Ok(Some(StepResult {
            step: plan.step,
            rows: StepRows::InDecoder(DecoderRows::All),
            draft_tokens: Vec::new(),
            draft_time: Duration::ZERO,
            spent: None,
        }))
    }

    fn load_adapter(&mut self, adapter: &LoraAdapter, _path: &Path) -> Result<AdapterId, Error> {
        self.decoder.load_adapter(adapter)
    }

    fn unload_adapter(&mut self, adapter: AdapterId) {
        self.decoder.unload_adapter(adapter);
    }

    fn result(&mut self, _wait: bool) -> Result<Option<StepResult>, Error> {
        Ok(None)
    }

    fn drawing_took(&mut self, _took: Duration) {}

    fn accept(&mut self, _step: u64, rows: &[usize]) -> Result<(), Error> {
        self.decoder.accept(rows)
    }

    fn can_defer(&self) -> bool {
        true
    }

    fn is_lost(&self) -> bool {
        false
    }

    fn take_counts(&mut self) -> Option<StageCounts> {
        None
    }
}

/// Uploads the plan and runs the layers. Calls `between_layers` after each layer.
fn run(
    decoder: &mut Decoder,
    scheduler: &Scheduler,
    plan: &StepPlan,
    between_layers: &mut dyn FnMut(Blocks<'_>),
) -> Result<(), Error> {
    let step_sequence = |sequence: &PlannedSequence| StepSequence {
        rows: sequence.rows.start as usize..sequence.rows.end as usize,
        context: sequence.context_before as usize,
        segment_start: None,
    };
    let sequences: Vec<StepSequence> = plan.sequences.iter().map(step_sequence).collect();
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
    if plan.sequences.iter().any(|sequence| scheduler.images(sequence.slot).is_some()) {
        let mut images = StepImages::default();
        for sequence in &plan.sequences {
            let rows = sequence.rows.end - sequence.rows.start;
            images.push(scheduler.images(sequence.slot), sequence.context_before, rows);
        }
        decoder.use_images(images);
    }
    let input = StepInput { tokens: &plan.tokens, sequences: &sequences, tables: &tables, states: &states };
    decoder.forward_with(&copies, &input, between_layers)
}

/// A sequence's block table in the form of the decoder's input.
fn table_of(table: Option<&Table>, stride: u32) -> BlockTable<'_> {
    table.map_or(BlockTable::Paged(&[]), |table| match table.contiguous_base() {
        Some(first) => BlockTable::Contiguous { first, stride },
        None => BlockTable::Paged(table.offsets()),
    })
}

/// All of a sequence's tables.
pub fn tables_of<'a>(tables: &'a [Table], strides: &[u32]) -> Vec<BlockTable<'a>> {
    (0usize..).zip(strides).map(|(group, stride)| table_of(tables.get(group), *stride)).collect()
}

fn step_state(state: &SequenceState) -> StepState {
    let export = |&(row, slot): &(u32, u32)| StateExport { row: row as usize, slot };
    let exports = state.exports.iter().map(export).collect();
    StepState { read: state.read, write: state.write, exports, deferred: state.deferred }
}
