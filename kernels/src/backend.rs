//! The op vocabulary: what the decoder may ask of a device.
//!
//! Buffers, matrices and vectors are opaque handles: the host never addresses a device's memory. Everything
//! that changes from step to step comes in one [`StepInput`]; the host reads back sampled tokens and the
//! logits rows it asked for. A backend refuses what it cannot do exactly; it never ignores an argument.
//!
//! Batch invariance is part of every op's contract: a row's result depends on nothing but that row, its position and
//! its own context, so it has the same bits for any batch, chunking and cache.

mod handle;
mod op;
mod shape;

use crate::Error;
use std::ops::{ControlFlow, Range};

pub use crate::attention::{KvType, Placement as BlockTable};
pub use crate::matmul::{ActivationMode, SharedBytes};
pub use handle::{BufferId, KvLayerId, MatrixId, RopeId, StateLayerId, VectorId};
pub use op::{
    AttentionOp, ConvOp, DeltaNetOp, EmbedIndex, EmbedOp, ExpertGateUp, GateActivation, GateOp, GatedNormOp,
    KvWrite, Mamba2Op, MatmulJob, MoeOp, Norm, QkvOp,
};
pub use shape::{HeadType, KvShape, MatrixSource, RopeSource, StateKind, StateShape};

/// What a backend says about itself; part of a worker's numeric class.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackendInfo {
    /// `cpu`, `cuda`, ...
    pub device: String,
    /// Instruction set or compute capability.
    pub isa: String,
    /// Matmul path, such as `int8` or `f32`.
    pub weight_path: String,
    pub threads: usize,
}

/// Bytes of device memory in use.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryUse {
    pub weights: usize,
    pub activations: usize,
    pub kv: usize,
}

/// One sequence's part of a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepSequence {
    /// Its rows; positions are `context..context + rows.len()`.
    pub rows: Range<usize>,
    /// Positions already in the cache.
    pub context: usize,
    /// First position of the second segment, for encoders that tell two texts apart.
    pub segment_start: Option<usize>,
}

/// Most rows of a sequence whose state is [`StepState::deferred`].
pub const MAX_DEFERRED_ROWS: usize = 8;
/// What [`Backend::argmax`] says of a row that has no largest element.
pub const NO_INDEX: u32 = u32::MAX;

/// Most steps whose deferred rows wait for [`Backend::accept`] at a time.
pub const MAX_DEFERRED_STEPS: usize = 16;

/// What a step does with the recurrent state of one sequence. Slots are byte offsets / 64 into the arena.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StepState {
    /// The slot with the state before the sequence's first row; none stands for a state of zeros.
    pub read: Option<u32>,
    /// The slot that gets the state after its last row; it may be the one that is read.
    pub write: u32,
    /// Further slots, ascending by row, each for the state after one row.
    pub exports: Vec<StateExport>,
    /// Nothing is written by the step, but by [`Backend::accept`], once it is known how many of the rows count: for
    /// rows that are guesses, [`MAX_DEFERRED_ROWS`] at most, without exports.
    pub deferred: bool,
}

/// A copy of the state in the middle of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateExport {
    /// The row, among those of the sequence in this step.
    pub row: usize,
    /// The slot that gets the state after it.
    pub slot: u32,
}

/// All that changes from step to step.
#[derive(Debug, Clone, Copy)]
pub struct StepInput<'a> {
    /// One token per row.
    pub tokens: &'a [u32],
    /// The sequences, in row order, covering all rows.
    pub sequences: &'a [StepSequence],
    /// `tables[group][sequence]`.
    pub tables: &'a [Vec<BlockTable<'a>>],
    /// One for each sequence where the model has recurrent layers, else empty.
    pub states: &'a [StepState],
}

/// What the caller has to do for the ops of a step; see [`Backend::begin_ops`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepOps {
    /// They are to be called.
    Called,
    /// They are to be called, with nothing else between them. What they compute is there after [`Backend::end_ops`].
    Recorded,
    /// They have been run, as an earlier step like this one had them.
    Replayed,
}

/// Steps by how their ops were run; all zero where none asked with [`Backend::begin_ops`] or nothing is recorded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StepCounts {
    /// Steps whose ops were launched one by one.
    pub called: u64,
    /// Steps whose ops were recorded, then run.
    pub recorded: u64,
    /// Steps that were run as recorded.
    pub replayed: u64,
    pub kept: usize,
}

/// A copy of a block to another block of the same group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvCopy {
    pub group: usize,
    /// Byte offset / 64 of the block read.
    pub from: u32,
    /// Byte offset / 64 of the block written.
    pub to: u32,
}

/// Keeps a piece of a repacked matrix, which belongs so many bytes from its start.
pub type KeepPiece<'a> = dyn Fn(usize, &[u8]) + Sync + 'a;

/// Takes a piece of a repacked matrix, which belongs so many bytes from its start; a break ends the repacking.
pub type TakePiece<'a> = dyn FnMut(usize, &[u8]) -> ControlFlow<()> + 'a;

/// Repacks a matrix as [`Backend::pack_matrix`] does, in the calling thread alone and without the backend.
pub type Packer = fn(MatrixSource<'_>, &mut TakePiece<'_>) -> Result<(), Error>;

/// A device that serves the op vocabulary.
pub trait Backend: Send {
    fn info(&self) -> &BackendInfo;

    fn memory(&self) -> MemoryUse;

    /// Binds the calling thread to its CPU, where CPUs are assigned. For the one thread that runs steps.
    fn bind_thread(&self) {}

    /// Creates an f32 buffer with room for `rows` x `cols`.
    fn create_buffer(&mut self, rows: usize, cols: usize) -> Result<BufferId, Error>;

    /// Uploads and repacks a matrix.
    fn create_matrix(&mut self, source: MatrixSource<'_>) -> Result<MatrixId, Error>;

    /// Names the layout that matrices are repacked to, where that can be kept and mapped by later processes; another
    /// layout has another name.
    fn pack_layout(&self) -> Option<&'static str> {
        None
    }

    /// Bytes of a matrix in this layout; of `source` the bytes do not matter.
    fn packed_bytes(&self, _source: MatrixSource<'_>) -> Result<usize, Error> {
        Err(Error::Unsupported { what: "packed matrices" })
    }

    /// Repacks a matrix to where the caller keeps it: all of it is handed to `keep` in pieces, each with its place, by
    /// several threads and in any order.
    fn pack_matrix(&self, _source: MatrixSource<'_>, _keep: &KeepPiece<'_>) -> Result<(), Error> {
        Err(Error::Unsupported { what: "packed matrices" })
    }

    /// A matrix as [`Self::pack_matrix`] gave it in this layout; of `source` the bytes do not matter.
    fn create_packed_matrix(
        &mut self,
        _source: MatrixSource<'_>,
        _packed: SharedBytes,
    ) -> Result<MatrixId, Error> {
        Err(Error::Unsupported { what: "packed matrices" })
    }

    /// A matrix that is multiplied with as it stands in `bytes`, as in a file: slower than a repacked one, and the same
    /// bits come out. Of `source` the bytes do not matter. `None` where the device cannot do that.
    fn create_matrix_in_place(
        &mut self,
        _source: MatrixSource<'_>,
        _bytes: &SharedBytes,
    ) -> Result<Option<MatrixId>, Error> {
        Ok(None)
    }

    /// What repacks matrices for [`Self::replace_by_packed`] while the backend computes, where that is possible.
    fn packer(&self) -> Option<Packer> {
        None
    }

    /// From now on a matrix is read as [`Self::packer`] has made it, in `packed`.
    fn replace_by_packed(&mut self, _matrix: MatrixId, _packed: SharedBytes) -> Result<(), Error> {
        Err(Error::Unsupported { what: "packed matrices" })
    }

    fn create_vector(&mut self, values: &[f32]) -> Result<VectorId, Error>;

    fn create_rope(&mut self, source: RopeSource) -> Result<RopeId, Error>;

    /// Bytes that one block of one layer takes; a multiple of 64.
    fn kv_block_bytes(&self, shape: KvShape) -> Result<usize, Error>;

    /// Declares a layer's KV: its group and its byte offset inside the group's blocks (a multiple of 64). Layers
    /// that share keys and values lie at one place; they may differ in their query heads.
    fn create_kv_layer(&mut self, group: usize, shape: KvShape, offset: usize) -> Result<KvLayerId, Error>;

    /// Bytes that one layer's state takes in a slot; a multiple of 64. `heads` names the type of each head.
    fn state_bytes(&self, shape: StateShape, heads: &[HeadType]) -> Result<usize, Error>;

    /// Declares a layer's state: its shape, the type of each head, its byte offset inside a slot (a multiple of 64).
    fn create_state_layer(
        &mut self,
        shape: StateShape,
        heads: &[HeadType],
        offset: usize,
    ) -> Result<StateLayerId, Error>;

    /// Reads a layer's state out of a slot: the convolution's past inputs `[taps][channels]`, oldest first,
    /// and the matrices `[heads][rows][cols]`.
    fn read_state(
        &mut self,
        layer: StateLayerId,
        slot: u32,
        conv: &mut [f32],
        recurrent: &mut [f32],
    ) -> Result<(), Error>;

    /// Copies bytes of the arena to the host, from byte offset / 64 `from` on.
    fn read_arena(&mut self, from: u32, out: &mut [u8]) -> Result<(), Error>;

    /// Copies bytes from the host into the arena, to byte offset / 64 `to`.
    fn write_arena(&mut self, to: u32, bytes: &[u8]) -> Result<(), Error>;

    /// Allocates the KV arena. `group_block_bytes[g]` is the size of a block of group g over all its layers.
    fn create_kv_arena(&mut self, bytes: usize, group_block_bytes: &[usize]) -> Result<(), Error>;

    /// Copies blocks inside the arena, before the next step.
    fn copy_kv(&mut self, copies: &[KvCopy]) -> Result<(), Error>;

    /// Takes in what is new in this step.
    ///
    /// # Errors
    /// [`Error::DeferredSteps`] for one that defers while as many as are remembered wait; what is wrong with it.
    fn begin_step(&mut self, step: &StepInput<'_>) -> Result<(), Error>;

    /// Asks what is to be done for the ops of the step that has begun. They must be the same for each step: the caller
    /// may leave them to the device from here on to where it would call [`Self::end_ops`], if nothing but the number of
    /// rows decides which there are and with which arguments.
    ///
    /// # Errors
    /// What the ops would say.
    fn begin_ops(&mut self) -> Result<StepOps, Error> {
        Ok(StepOps::Called)
    }

    /// Ends the ops that were [`StepOps::Recorded`], and runs them.
    ///
    /// # Errors
    /// What the ops would say.
    fn end_ops(&mut self) -> Result<(), Error> {
        Ok(())
    }

    /// How steps were run so far.
    fn step_counts(&self) -> StepCounts {
        StepCounts::default()
    }

    /// See [`EmbedOp`].
    fn embed(&mut self, op: &EmbedOp) -> Result<(), Error>;

    /// `out[row] = norm(x[row])`; also quantised if the next op multiplies with 8-bit activations. `out` may be
    /// `x`.
    fn norm(&mut self, x: BufferId, norm: &Norm, out: BufferId) -> Result<(), Error>;

    /// Products of the rows of `x`, all in one go.
    fn matmul(&mut self, x: BufferId, jobs: &[MatmulJob]) -> Result<(), Error>;

    /// Whether it serves [`Self::matmul_part`] and what else is done with a part of a row.
    fn serves_parts(&self) -> bool {
        false
    }

    /// As [`Self::matmul`] of one job that does not accumulate, but only for rows `part` of its matrix: other values of
    /// `out` may be anything.
    fn matmul_part(&mut self, _x: BufferId, _job: &MatmulJob, _part: Range<usize>) -> Result<(), Error> {
        Err(Error::Unsupported { what: "a part of a product" })
    }

    /// See [`QkvOp`].
    fn qkv(&mut self, op: &QkvOp) -> Result<(), Error>;

    /// See [`AttentionOp`].
    fn attention(&mut self, op: &AttentionOp) -> Result<(), Error>;

    /// See [`ConvOp`].
    fn conv(&mut self, op: &ConvOp) -> Result<(), Error>;

    /// See [`DeltaNetOp`].
    fn delta_net(&mut self, op: &DeltaNetOp) -> Result<(), Error>;

    /// See [`Mamba2Op`].
    fn mamba2(&mut self, op: &Mamba2Op) -> Result<(), Error>;

    /// Ends the deferred part of the oldest step that has one: of each sequence whose state is deferred, in their order,
    /// `rows` of its rows count (none to all). Its slot [`StepState::write`] gets, of every layer that the step ran, the
    /// state of having been stepped by these rows, bit for bit. A sequence that none is accepted of keeps the state that
    /// it had. Once for each step that defers, between two steps. Until then other steps may be run, which must leave
    /// alone the slots that it has named; [`MAX_DEFERRED_STEPS`] such steps are remembered.
    ///
    /// The device keeps the inputs of the deferred rows' recurrences, not their states: per layer a few rows of
    /// `channels` values and of one or two per head, where a state has `rows * cols` per head.
    fn accept(&mut self, rows: &[usize]) -> Result<(), Error>;

    /// See [`GatedNormOp`].
    fn gated_norm(&mut self, op: &GatedNormOp) -> Result<(), Error>;

    /// See [`GateOp`].
    fn gate(&mut self, op: &GateOp) -> Result<(), Error>;

    /// `x[row] *= sigmoid(gate[row][0])`.
    fn scale_rows(&mut self, x: BufferId, gate: BufferId) -> Result<(), Error>;

    /// `x *= factor`.
    fn scale(&mut self, x: BufferId, factor: f32) -> Result<(), Error>;

    /// `x[row] += scale * norm(y[row])`.
    fn add(&mut self, x: BufferId, y: BufferId, norm: Option<&Norm>, scale: f32) -> Result<(), Error>;

    /// See [`MoeOp`].
    fn moe(&mut self, op: &MoeOp) -> Result<(), Error>;

    /// `out` gets the named rows of `x`, in that order.
    fn gather_rows(&mut self, x: BufferId, rows: &[u32], out: BufferId) -> Result<(), Error>;

    /// `x = softcap(scale * x)`, `softcap(v) = c tanh(v / c)`.
    fn finish_logits(&mut self, x: BufferId, scale: f32, softcap: Option<f32>) -> Result<(), Error>;

    /// Index of the largest element of each row; ties go to the lowest index. [`NO_INDEX`] of a row that holds NaN or
    /// infinity, or nothing above minus infinity.
    fn argmax(&mut self, x: BufferId, out: &mut Vec<u32>) -> Result<(), Error>;

    /// How many of a row's largest values [`Self::best`] gives, or all of a shorter row's; 0 where reading the row costs
    /// no more.
    fn best_values(&self) -> usize {
        0
    }

    /// The largest values of each row with their places, row by row, in no order; of equals those in the lowest places.
    /// 0 is more than -0, and NaN is more than anything, so that a row that holds one is known by it.
    fn best(&mut self, _x: BufferId, _out: &mut Vec<(u32, f32)>) -> Result<(), Error> {
        Err(Error::Unsupported { what: "the best of rows" })
    }

    /// Copies one row to the host.
    fn read_row(&mut self, x: BufferId, row: usize, out: &mut [f32]) -> Result<(), Error>;

    /// The largest value of a part of a row, which must not be empty, and its place in the row; of equals the lowest one.
    /// The value is NaN where the part holds NaN or infinity.
    fn best_of_part(&mut self, _x: BufferId, _row: usize, _part: Range<usize>) -> Result<(u32, f32), Error> {
        Err(Error::Unsupported { what: "a part of a row" })
    }

    /// Copies one row to the host, from its value `from` on.
    fn read_part(&mut self, _x: BufferId, _row: usize, _from: usize, _out: &mut [f32]) -> Result<(), Error> {
        Err(Error::Unsupported { what: "a part of a row" })
    }

    /// Copies values from the host to one row, from its value `from` on.
    fn write_part(&mut self, _x: BufferId, _row: usize, _from: usize, _values: &[f32]) -> Result<(), Error> {
        Err(Error::Unsupported { what: "a part of a row" })
    }

    /// Copies all current rows from the host (layer shards, tests).
    fn write_rows(&mut self, x: BufferId, values: &[f32]) -> Result<(), Error>;
}
