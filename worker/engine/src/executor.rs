//! Runs planned steps, on this worker alone or on the ranks of a pipeline. The engine sees no difference: it
//! submits a step, and gets the requested rows with the step's result.

mod local;

pub use local::{LocalExecutor, tables_of};

use crate::Error;
use crate::decoder::{Blocks, Decoder, LayerState};
use crate::scheduler::{Demand, Scheduler, StepLimits, StepPlan};
use crate::telemetry::StageCounts;
use kernels::backend::AdapterId;
use model::checkpoint::lora::LoraAdapter;
use proto::stage::{StageDraftRequest, StageSample, StageSampled, StageSpent};
use proto::trace::TraceContext;
use std::ops::Range;
use std::path::Path;
use std::time::Duration;

/// Access to the bytes of blocks, which are addressed by the scheduler's group and offset. Blocks of
/// completed steps may be read at any time.
pub trait KvBlocks {
    /// Bytes of a block or of a recurrent state.
    fn block_bytes(&self, group: usize) -> usize;

    fn read_blocks(&mut self, blocks: &[(usize, u32)]) -> Result<Vec<Vec<u8>>, Error>;

    /// Fills blocks that no step in flight uses with bytes from [`KvBlocks::read_blocks`], of this worker or
    /// of another one of the same origin.
    fn write_blocks(&mut self, pieces: &[(usize, u32, &[u8])]) -> Result<(), Error>;

    /// The recurrent states of all layers in a slot.
    fn read_states(&mut self, slot: u32) -> Result<Vec<LayerState>, Error>;
}

/// Another stage of the replica is lost, so the engine must stop.
#[derive(Debug, thiserror::Error)]
#[error("stage {stage} is lost: {source}")]
pub struct LostStage {
    /// Index of the stage; the first stage is 0.
    pub stage: usize,
    pub source: transport::Error,
}

/// Runs steps in the order of their submission.
pub trait Executor: KvBlocks + Send {
    /// The layers of this worker.
    fn decoder(&self) -> &Decoder;

    fn decoder_mut(&mut self) -> &mut Decoder;

    /// Number of workers that hold the model's layers.
    fn ranks(&self) -> usize;

    /// Limits of the next step. `None`: the engine must first take a result.
    fn limits(&mut self, demand: Demand) -> Option<StepLimits>;

    /// Runs a step over the layers of this worker. Returns its result if it is complete; otherwise a later
    /// call of [`Executor::result`] returns it. Calls `between_layers` between two layers where blocks can be
    /// read there.
    fn submit(
        &mut self,
        scheduler: &Scheduler,
        plan: &StepPlan,
        request: StepRequest,
        between_layers: &mut dyn FnMut(&mut dyn KvBlocks),
    ) -> Result<Option<StepResult>, Error>;

    /// Loads an adapter, which is also in `path` on the host of every rank.
    fn load_adapter(&mut self, adapter: &LoraAdapter, path: &Path) -> Result<AdapterId, Error>;

    /// Frees an adapter that no step uses that is submitted later.
    fn unload_adapter(&mut self, adapter: AdapterId);

    /// The result of the oldest step in flight. `None` if there is no step, or if `wait` is false and the
    /// result has not arrived.
    fn result(&mut self, wait: bool) -> Result<Option<StepResult>, Error>;

    /// Records that drawing from [`StepRows::InDecoder`] took this time.
    fn drawing_took(&mut self, took: Duration);

    /// Commits the recurrent states of a completed step with draft tokens. `rows` has the number of accepted
    /// rows of each sequence whose state update the step deferred.
    fn accept(&mut self, step: u64, rows: &[usize]) -> Result<(), Error>;

    /// Whether every step that may be in flight can defer its state updates.
    fn can_defer(&self) -> bool;

    /// Whether a rank has failed. The next [`Executor::result`] returns the error.
    fn is_lost(&self) -> bool;

    /// Counters of the ranks of a pipeline. Resets [`StageCounts::hops`].
    fn take_counts(&mut self) -> Option<StageCounts>;
}

/// Rows that need a result after the last layer.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RequestedRows {
    /// Rows that need their most likely token.
    pub argmax: Vec<u32>,
    /// Rows that need a token from a sampler.
    pub samples: Vec<StageSample>,
    pub logits: Vec<u32>,
}

impl RequestedRows {
    /// Whether the rank that computes this row also draws a token from it.
    pub(crate) fn draws(&self, row: u32) -> bool {
        self.argmax.contains(&row) || self.samples.iter().any(|sample| sample.row == row)
    }

    /// Whether exactly one row needs one result.
    pub fn is_one(&self) -> bool {
        self.argmax.len() + self.samples.len() + self.logits.len() == 1
    }

    /// All rows in ascending order, without duplicates.
    pub fn distinct(&self) -> Vec<u32> {
        let sampled = self.samples.iter().map(|sample| sample.row);
        let mut rows: Vec<u32> = self.argmax.iter().chain(&self.logits).copied().chain(sampled).collect();
        rows.sort_unstable();
        rows.dedup();
        rows
    }
}

/// The results that a step requests from the other ranks: none on a worker with all layers, whose results are in the
/// decoder. The adapters of its rows.
#[derive(Debug, Default)]
pub struct StepRequest {
    /// Rows that need a token, a sample or logits.
    pub rows: RequestedRows,
    /// Sequences for which the last rank drafts tokens after sampling, in the order of the plan's sequences.
    pub drafts: Vec<StageDraftRequest>,
    /// Parent spans of the step.
    pub traces: Vec<TraceContext>,
    /// Rows that have an adapter.
    pub adapters: Vec<(Range<usize>, AdapterId)>,
}

/// The result of a step.
#[derive(Debug)]
pub struct StepResult {
    pub step: u64,
    pub rows: StepRows,
    /// Draft tokens for each of [`StepRequest::drafts`].
    pub draft_tokens: Vec<Vec<u32>>,
    /// Time that the last rank spent on drafting.
    pub draft_time: Duration,
    /// `None` if the step ran on this worker alone.
    pub spent: Option<StepSpent>,
}

/// Location of the results of a step's rows.
#[derive(Debug)]
pub enum StepRows {
    /// The decoder has the rows' hidden states after the last layer.
    InDecoder(DecoderRows),
    /// The last rank computed the results that [`RequestedRows`] requests, in its order.
    Computed { argmax: Vec<u32>, samples: Vec<StageSampled>, logits: Vec<Vec<f32>> },
}

/// The rows of a step that the decoder holds.
#[derive(Debug)]
pub enum DecoderRows {
    All,
    /// These ones, in ascending order.
    Some(Vec<u32>),
}

impl DecoderRows {
    /// The decoder's row that holds a row of the step.
    pub(crate) fn decoder_row(&self, row: u32) -> u32 {
        match self {
            Self::All => row,
            Self::Some(rows) => rows.partition_point(|other| *other < row) as u32,
        }
    }
}

/// Time and traffic of a step in a pipeline.
#[derive(Debug)]
pub struct StepSpent {
    /// One entry for each rank, the first one included. The first rank's waiting time and received bytes are
    /// not part of it, since they belong to no single step.
    pub ranks: Vec<StageSpent>,
    /// Time since the step was sent to the second rank. What the ranks did not spend computing was waiting or
    /// network time.
    pub in_flight: Duration,
}

/// The arena of this worker.
impl KvBlocks for Blocks<'_> {
    fn block_bytes(&self, group: usize) -> usize {
        self.groups().get(group).map_or(0, |group| group.block_bytes)
    }

    fn read_blocks(&mut self, blocks: &[(usize, u32)]) -> Result<Vec<Vec<u8>>, Error> {
        blocks.iter().map(|(group, offset)| self.read(*group, *offset)).collect()
    }

    fn write_blocks(&mut self, pieces: &[(usize, u32, &[u8])]) -> Result<(), Error> {
        pieces.iter().try_for_each(|(group, offset, bytes)| self.write(*group, *offset, bytes))
    }

    fn read_states(&mut self, slot: u32) -> Result<Vec<LayerState>, Error> {
        self.states(slot)
    }
}
