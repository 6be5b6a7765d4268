//! The op vocabulary: the ops that the decoder may call on a device.
//!
//! Buffers, matrices and vectors are opaque handles: the host never addresses a device's memory. All values
//! that change from step to step are in one [`StepInput`]. The host reads back sampled tokens and the logits
//! rows that it requests. A backend refuses an op that it cannot compute exactly; it never ignores an
//! argument.
//!
//! Every op is batch invariant: a row's result depends only on that row, its position and its own context. It
//! has the same bits for any batch, chunking and cache.

mod handle;
mod op;
mod shape;

use crate::Error;
use std::ops::{ControlFlow, Range};

pub use crate::attention::{BlockTable, KvType, KvTypes};
pub use crate::matmul::{ActivationMode, SharedBytes};
pub use handle::{AdapterId, BufferId, KvLayerId, MatrixId, RopeId, StateLayerId, VectorId};
pub use op::{
    AttentionOp, ConvOp, DeltaNetOp, EmbedIndex, EmbedOp, ExpertGateUp, ExpertGroups, GateActivation, GateOp,
    GatedNormOp, HeadMatmulOp, HeadPart, KvWrite, Mamba2Op, MatmulJob, MoeOp, Norm, QkvOp, QueryGrowth,
    Selection,
};
pub use shape::{
    HeadType, KvShape, LowRankSource, MatrixBytes, MatrixSource, RopeSource, StateKind, StateShape,
};

/// Description of a backend; part of a worker's numeric class.
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

/// The rows of one sequence in a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepSequence {
    /// Rows of the step; their positions are `context..context + rows.len()`.
    pub rows: Range<usize>,
    /// Positions already in the cache.
    pub context: usize,
    /// First position of the second segment, for encoders that distinguish two texts. `None`: one segment.
    pub segment_start: Option<usize>,
}

/// Maximum number of rows of a sequence whose state is [`StepState::deferred`].
pub const MAX_DEFERRED_ROWS: usize = 8;
/// Result of [`Backend::argmax`] for a row without a largest element.
pub const NO_INDEX: u32 = u32::MAX;

/// Maximum number of steps whose deferred rows wait for [`Backend::accept`] at a time.
pub const MAX_DEFERRED_STEPS: usize = 16;

/// How a step reads and writes the recurrent state of one sequence. Slots are byte offsets / 64 into the
/// arena.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StepState {
    /// Slot with the state before the sequence's first row. `None`: the state is all zeros.
    pub read: Option<u32>,
    /// Slot that receives the state after the sequence's last row. It may equal `read`.
    pub write: u32,
    /// Further slots, each for the state after one row; ascending by row.
    pub exports: Vec<StateExport>,
    /// If true, the step writes no state. [`Backend::accept`] writes it once the number of accepted rows is
    /// known. For rows of draft tokens: at most [`MAX_DEFERRED_ROWS`] rows, and `exports` must be empty.
    pub deferred: bool,
}

/// A copy of the state after a row in the middle of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateExport {
    /// Index of the row among the sequence's rows of this step.
    pub row: usize,
    /// Slot that receives the state after this row.
    pub slot: u32,
}

/// All values that change from step to step.
#[derive(Debug, Clone, Copy)]
pub struct StepInput<'a> {
    /// One token per row.
    pub tokens: &'a [u32],
    /// The sequences, in row order, covering all rows.
    pub sequences: &'a [StepSequence],
    /// `tables[group][sequence]`.
    pub tables: &'a [Vec<BlockTable<'a>>],
    /// One entry per sequence if the model has recurrent layers, else empty.
    pub states: &'a [StepState],
}

/// Places of a step's rows, instead of the positions that [`StepSequence`] gives them. A list is empty, or has an entry
/// for each row.
#[derive(Debug, Clone, Copy, Default)]
pub struct RowPlaces<'a> {
    /// Positions on the axes of rotary embeddings with [`RopeSource::axes`]. A table holds all positions up to the
    /// largest. Empty list: the row's position on each axis.
    pub axes: &'a [[u32; 3]],
    /// Range of positions that the row sees besides those that its layers show it, in both directions. It is empty,
    /// or contains the row's position and ends at or before the sequence's last row of the step.
    pub spans: &'a [(u32, u32)],
}

/// How the caller must run the ops of a step; see [`Backend::begin_ops`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepOps {
    /// The caller calls the ops.
    Called,
    /// The caller calls the ops and nothing else between them. Their results are available after
    /// [`Backend::end_ops`].
    Recorded,
    /// The device has already run the ops, as recorded for an earlier step of the same graph shape. The
    /// caller calls none.
    Replayed,
}

/// Number of steps by how their ops were run. All zero if [`Backend::begin_ops`] was never called or the
/// backend records nothing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StepCounts {
    /// Steps whose ops were launched one by one.
    pub called: u64,
    /// Steps whose ops were recorded and then run.
    pub recorded: u64,
    /// Steps that ran a recording.
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

/// Stores a piece of a repacked matrix. The arguments are the piece's byte offset in the matrix and its
/// bytes.
pub type KeepPiece<'a> = dyn Fn(usize, &[u8]) + Sync + 'a;

/// Receives a piece of a repacked matrix: its byte offset in the matrix and its bytes. A break ends the
/// repacking.
pub type TakePiece<'a> = dyn FnMut(usize, &[u8]) -> ControlFlow<()> + 'a;

/// Repacks a matrix like [`Backend::pack_matrix`], but on the calling thread alone and without the backend.
pub type Packer = fn(MatrixSource<'_>, &mut TakePiece<'_>) -> Result<(), Error>;

/// A device that serves the op vocabulary.
pub trait Backend: Send {
    fn info(&self) -> &BackendInfo;

    fn memory(&self) -> MemoryUse;

    /// Pins the calling thread to its CPU if CPUs are assigned. Only for the thread that runs steps.
    fn bind_thread(&self) {}

    /// Creates an f32 buffer with room for `rows` x `cols`.
    fn create_buffer(&mut self, rows: usize, cols: usize) -> Result<BufferId, Error>;

    /// Uploads and repacks a matrix.
    fn create_matrix(&mut self, source: MatrixSource<'_>) -> Result<MatrixId, Error>;

    /// Name of the layout of repacked matrices. Different layouts have different names. `None`: repacked
    /// matrices cannot be stored and mapped by later processes.
    fn pack_layout(&self) -> Option<&'static str> {
        None
    }

    /// Bytes of a matrix in this layout. `source.bytes` is ignored.
    fn packed_bytes(&self, _source: MatrixSource<'_>) -> Result<usize, Error> {
        Err(Error::Unsupported { what: "packed matrices" })
    }

    /// Repacks a matrix and passes it to `keep` in pieces. Several threads call `keep`, in any order.
    fn pack_matrix(&self, _source: MatrixSource<'_>, _keep: &KeepPiece<'_>) -> Result<(), Error> {
        Err(Error::Unsupported { what: "packed matrices" })
    }

    /// Creates a matrix from the bytes that [`Self::pack_matrix`] produced in this layout. `source.bytes` is
    /// ignored.
    fn create_packed_matrix(
        &mut self,
        _source: MatrixSource<'_>,
        _packed: SharedBytes,
    ) -> Result<MatrixId, Error> {
        Err(Error::Unsupported { what: "packed matrices" })
    }

    /// Creates a matrix that is read directly from `bytes`, in the layout of the model file. It is slower
    /// than a repacked matrix and gives the same bits. `source.bytes` is ignored. `None`: the device cannot
    /// do this.
    fn create_matrix_in_place(
        &mut self,
        _source: MatrixSource<'_>,
        _bytes: &SharedBytes,
    ) -> Result<Option<MatrixId>, Error> {
        Ok(None)
    }

    /// Function that repacks matrices for [`Self::replace_by_packed`] while the backend computes. `None`: not
    /// supported.
    fn packer(&self) -> Option<Packer> {
        None
    }

    /// Replaces the bytes of a matrix by `packed`, which [`Self::packer`] produced.
    fn replace_by_packed(&mut self, _matrix: MatrixId, _packed: SharedBytes) -> Result<(), Error> {
        Err(Error::Unsupported { what: "packed matrices" })
    }

    fn create_vector(&mut self, values: &[f32]) -> Result<VectorId, Error>;

    /// Sets the order of a matrix's columns: column `i` multiplies value `order[i]` of a row. Only [`Self::matmul`]
    /// and [`Self::matmul_part`] read it.
    ///
    /// # Errors
    /// [`Error::Length`], [`Error::Order`]; [`Error::Unsupported`] if the device serves no such matrices.
    fn set_order(&mut self, _matrix: MatrixId, _order: &[u32]) -> Result<(), Error> {
        Err(Error::Unsupported { what: "matrices with another order of columns" })
    }

    fn create_rope(&mut self, source: RopeSource) -> Result<RopeId, Error>;

    /// Bytes of one block of one layer; a multiple of 64.
    fn kv_block_bytes(&self, shape: KvShape) -> Result<usize, Error>;

    /// Declares a layer's KV: its group and its byte offset inside the group's blocks (a multiple of 64).
    /// Layers that share keys and values have the same offset; their number of query heads may differ.
    fn create_kv_layer(&mut self, group: usize, shape: KvShape, offset: usize) -> Result<KvLayerId, Error>;

    /// Bytes of one layer's state in a slot; a multiple of 64. `heads` has the type of each head.
    fn state_bytes(&self, shape: StateShape, heads: &[HeadType]) -> Result<usize, Error>;

    /// Declares a layer's state: its shape, the type of each head, and its byte offset inside a slot (a
    /// multiple of 64).
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

    /// Copies `out.len()` bytes of the arena to the host, from byte offset / 64 `from` on.
    fn read_arena(&mut self, from: u32, out: &mut [u8]) -> Result<(), Error>;

    /// Copies bytes from the host into the arena, to byte offset / 64 `to`.
    fn write_arena(&mut self, to: u32, bytes: &[u8]) -> Result<(), Error>;

    /// Allocates the KV arena. `group_block_bytes[g]` is the size of a block of group g over all its layers.
    fn create_kv_arena(&mut self, bytes: usize, group_block_bytes: &[usize]) -> Result<(), Error>;

    /// Whether an arena takes memory only where it is written, and [`give_back_kv`](Self::give_back_kv) frees it.
    fn gives_back_kv(&self) -> bool {
        false
    }

    /// Frees the memory of parts of the arena, (offset in units of 64 bytes, bytes), that nothing will read before it is
    /// written again. No step may be in progress.
    fn give_back_kv(&mut self, _places: &[(u32, u64)]) -> Result<(), Error> {
        Ok(())
    }

    /// Copies blocks inside the arena, before the next step.
    fn copy_kv(&mut self, copies: &[KvCopy]) -> Result<(), Error>;

    /// Loads an adapter: additions to the products of matrices, at most one of each.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the device serves no adapters; [`Error::Length`] for one that does not fit.
    fn load_adapter(&mut self, _parts: &[LowRankSource<'_>]) -> Result<AdapterId, Error> {
        Err(Error::Unsupported { what: "LoRA adapters" })
    }

    /// Frees an adapter that no later step uses.
    fn unload_adapter(&mut self, _adapter: AdapterId) {}

    /// Sets the adapters of rows of the next step; the other rows have none. Steps after it have none.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for an adapter that is not loaded.
    fn use_adapters(&mut self, rows: &[(Range<usize>, AdapterId)]) -> Result<(), Error> {
        match rows.is_empty() {
            true => Ok(()),
            false => Err(Error::Unsupported { what: "LoRA adapters" }),
        }
    }

    /// Whether the device serves [`Self::place_rows`].
    fn places_rows(&self) -> bool {
        false
    }

    /// Sets the places of the rows of the next step. Rows of the steps after it have their ordinary ones.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the device serves no such rows.
    fn place_rows(&mut self, places: &RowPlaces<'_>) -> Result<(), Error> {
        match places.axes.is_empty() && places.spans.is_empty() {
            true => Ok(()),
            false => Err(Error::Unsupported { what: "rows of images" }),
        }
    }

    /// Starts a step with this input.
    ///
    /// # Errors
    /// [`Error::DeferredSteps`] if the step defers a state while [`MAX_DEFERRED_STEPS`] deferred steps wait
    /// for [`Self::accept`]. Other errors report an invalid input.
    fn begin_step(&mut self, step: &StepInput<'_>) -> Result<(), Error>;

    /// Returns how the caller must run the ops of the step that has begun. The caller may use this only if
    /// the number of rows alone decides which ops run between here and [`Self::end_ops`] and with which
    /// arguments.
    ///
    /// # Errors
    /// Errors of the ops.
    fn begin_ops(&mut self) -> Result<StepOps, Error> {
        Ok(StepOps::Called)
    }

    /// Ends the ops that were [`StepOps::Recorded`], and runs them.
    ///
    /// # Errors
    /// Errors of the ops.
    fn end_ops(&mut self) -> Result<(), Error> {
        Ok(())
    }

    /// How steps have been run so far.
    fn step_counts(&self) -> StepCounts {
        StepCounts::default()
    }

    /// See [`EmbedOp`].
    fn embed(&mut self, op: &EmbedOp) -> Result<(), Error>;

    /// `out[row] = norm(x[row])`. Also quantises the result if the next op multiplies with 8-bit activations.
    /// `out` may be `x`.
    fn norm(&mut self, x: BufferId, norm: &Norm, out: BufferId) -> Result<(), Error>;

    /// Like [`Self::norm`] if, until `out` is written again, only products with `readers` read it. A backend may
    /// then store no more than what these products read.
    fn norm_for(
        &mut self,
        x: BufferId,
        norm: &Norm,
        out: BufferId,
        _readers: &[MatrixId],
    ) -> Result<(), Error> {
        self.norm(x, norm, out)
    }

    /// Products of the rows of `x` with several matrices, in one call. If `x` has the rows of the step, what their
    /// adapters add to these matrices is added last.
    fn matmul(&mut self, x: BufferId, jobs: &[MatmulJob]) -> Result<(), Error>;

    /// Whether the backend serves [`Self::matmul_part`] and the other ops on part of a row.
    fn serves_parts(&self) -> bool {
        false
    }

    /// Like [`Self::matmul`] with one job that does not accumulate, but computes only `rows` of the
    /// matrix. All other values of `out` are unspecified.
    fn matmul_part(&mut self, _x: BufferId, _job: &MatmulJob, _rows: Range<usize>) -> Result<(), Error> {
        Err(Error::Unsupported { what: "a part of a product" })
    }

    /// See [`HeadMatmulOp`].
    fn head_matmul(&mut self, _op: &HeadMatmulOp) -> Result<(), Error> {
        Err(Error::Unsupported { what: "products of heads" })
    }

    /// Copies the heads of the rows of `x`, `[rows][heads * columns]`, to columns of the heads of `out`.
    fn place_heads(&mut self, _x: BufferId, _heads: usize, _out: &HeadPart) -> Result<(), Error> {
        Err(Error::Unsupported { what: "parts of heads" })
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

    /// Accepts deferred rows of the oldest step that has any. `rows[i]` is the number of accepted rows, from
    /// 0 to all, of the i-th sequence with a deferred state. Slot [`StepState::write`] then holds, for each
    /// layer that the step ran, the state after these rows, bit for bit as if only they had been computed.
    /// With 0 accepted rows that is the state from before the step. Call this once for each step that defers,
    /// between two steps. Other steps may run before it, but must not use the slots that the deferred step
    /// named. At most [`MAX_DEFERRED_STEPS`] steps may wait.
    ///
    /// The device stores the inputs of the deferred rows' recurrences instead of their states: per layer and
    /// row, `channels` values and one or two per head, where a state has `rows * cols` values per head.
    fn accept(&mut self, rows: &[usize]) -> Result<(), Error>;

    /// See [`GatedNormOp`].
    fn gated_norm(&mut self, op: &GatedNormOp) -> Result<(), Error>;

    /// See [`GateOp`].
    fn gate(&mut self, op: &GateOp) -> Result<(), Error>;

    /// Like [`Self::gate`] if only products with `readers` read the result, as in [`Self::norm_for`].
    fn gate_for(&mut self, op: &GateOp, _readers: &[MatrixId]) -> Result<(), Error> {
        self.gate(op)
    }

    /// `x[row] *= sigmoid(gate[row][0])`.
    fn scale_rows(&mut self, x: BufferId, gate: BufferId) -> Result<(), Error>;

    /// `x *= factor`.
    fn scale(&mut self, x: BufferId, factor: f32) -> Result<(), Error>;

    /// `x[row] += scale * norm(y[row])`.
    fn add(&mut self, x: BufferId, y: BufferId, norm: Option<&Norm>, scale: f32) -> Result<(), Error>;

    /// See [`MoeOp`].
    fn moe(&mut self, op: &MoeOp) -> Result<(), Error>;

    /// Copies the given rows of `x` to `out`, in the given order.
    fn gather_rows(&mut self, x: BufferId, rows: &[u32], out: BufferId) -> Result<(), Error>;

    /// `x = softcap(scale * x)`, `softcap(v) = c tanh(v / c)`.
    fn finish_logits(&mut self, x: BufferId, scale: f32, softcap: Option<f32>) -> Result<(), Error>;

    /// Index of the largest element of each row; ties go to the lowest index. [`NO_INDEX`] for a row that
    /// contains NaN or infinity, or no value above minus infinity.
    fn argmax(&mut self, x: BufferId, out: &mut Vec<u32>) -> Result<(), Error>;

    /// Number of a row's largest values that [`Self::best`] returns; a shorter row returns all its values. 0:
    /// reading the whole row costs no more.
    fn best_values(&self) -> usize {
        0
    }

    /// The largest values of each row with their indices, row by row, unordered within a row. Ties go to the
    /// lowest index. 0 ranks above -0, and NaN above everything, so that a row with a NaN can be recognised.
    fn best(&mut self, _x: BufferId, _out: &mut Vec<(u32, f32)>) -> Result<(), Error> {
        Err(Error::Unsupported { what: "the best of rows" })
    }

    /// Copies one row to the host.
    fn read_row(&mut self, x: BufferId, row: usize, out: &mut [f32]) -> Result<(), Error>;

    /// The largest value of a non-empty part of a row and its index in the row; ties go to the lowest index.
    /// The value is NaN if the part contains NaN or infinity.
    fn best_of_part(
        &mut self,
        _x: BufferId,
        _row: usize,
        _columns: Range<usize>,
    ) -> Result<(u32, f32), Error> {
        Err(Error::Unsupported { what: "a part of a row" })
    }

    /// Copies values of one row to the host, from column `from` on.
    fn read_part(&mut self, _x: BufferId, _row: usize, _from: usize, _out: &mut [f32]) -> Result<(), Error> {
        Err(Error::Unsupported { what: "a part of a row" })
    }

    /// Copies values from the host to one row, from column `from` on.
    fn write_part(&mut self, _x: BufferId, _row: usize, _from: usize, _values: &[f32]) -> Result<(), Error> {
        Err(Error::Unsupported { what: "a part of a row" })
    }

    /// Copies all current rows from the host (layer shards, tests).
    fn write_rows(&mut self, x: BufferId, values: &[f32]) -> Result<(), Error>;
}

/// # Errors
/// [`Error::Length`]; [`Error::Order`] unless each column is named once.
pub fn check_order(order: &[u32], cols: usize) -> Result<(), Error> {
    if order.len() != cols {
        return Err(Error::Length { what: "order of columns", expected: cols, found: order.len() });
    }
    let mut seen = vec![false; cols];
    let once = |&col: &u32| seen.get_mut(col as usize).is_some_and(|seen| !std::mem::replace(seen, true));
    if order.iter().all(once) { Ok(()) } else { Err(Error::Order { cols }) }
}
