//! Errors of this crate.

use crate::isa::Isa;

/// Every failure of this crate. Apart from failures of a device, all are detected before any arithmetic starts.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A type id in a file that is no known weight format.
    #[error("unknown tensor type id {id}")]
    UnknownType { id: u32 },
    /// A weight format that can be dequantised but has no matmul kernel.
    #[error("matrix products of tensor type {ty} are not supported")]
    NoMatmul { ty: &'static str },
    /// A weight format that is read but not written.
    #[error("tensor type {ty} cannot be written; F32, F16, BF16 and Q8_0 can")]
    NoEncoder { ty: &'static str },
    /// A value that is not finite, or too large for a format.
    #[error("{ty} cannot hold the value {value}")]
    NotHeld { ty: &'static str, value: String },
    /// A row length that is not a whole number of the format's blocks.
    #[error("{ty} rows must be a multiple of {block} values, not {cols}")]
    PartialBlock {
        ty: &'static str,
        block: usize,
        /// Values in one row.
        cols: usize,
    },
    /// A tensor with a dimension of zero, or one whose size does not fit the address space.
    #[error("matrix shape {rows} x {cols} x {experts} is not valid")]
    Shape {
        /// Output rows.
        rows: usize,
        /// Values in one row.
        cols: usize,
        experts: usize,
    },
    /// A buffer whose length differs from what the shapes require.
    #[error("{what}: expected {expected} elements, found {found}")]
    Length {
        what: &'static str,
        /// The length that the shapes require.
        expected: usize,
        found: usize,
    },
    /// Bytes of a tensor that cannot be read.
    #[error("{reason}")]
    Read { reason: String },
    /// An index past the end.
    #[error("{what} {index} is out of range, there are {len}")]
    OutOfRange {
        what: &'static str,
        /// The first requested index past the end.
        index: usize,
        len: usize,
    },
    /// An int8 product without quantised activations.
    #[error("int8 matrix product without quantised activations")]
    NotQuantized,
    /// A matrix was finished before every panel had been packed.
    #[error("the matrix is not fully repacked: {packed} of {total} panels")]
    Unpacked { packed: usize, total: usize },
    /// An instruction set that this processor does not have.
    #[error("this processor has no {isa}")]
    IsaUnavailable { isa: Isa },
    /// The operating system could not start a thread of the pool.
    #[error("cannot start pool thread {thread}: {kind}")]
    Spawn { thread: usize, kind: std::io::ErrorKind },
    /// A KV cache layout that no kernel serves.
    #[error(
        "KV layout of {block_tokens} tokens, {kv_heads} heads, key width {head_dim}, value width {v_head_dim} is not supported"
    )]
    KvLayout {
        block_tokens: usize,
        kv_heads: usize,
        /// Width of a key head.
        head_dim: usize,
        /// Width of a value head.
        v_head_dim: usize,
    },
    /// Query heads that do not share the key/value heads evenly.
    #[error("{heads} query heads cannot share {kv_heads} key/value heads")]
    HeadGroups { heads: usize, kv_heads: usize },
    /// A sliding window that would hide every key from its query.
    #[error("a sliding window holds at least one position")]
    EmptyWindow,
    /// A position is visible to a query, but its sequence has no block for it.
    #[error("sequence {sequence} has no block {block}, which is visible to a query")]
    MissingBlock {
        /// Index of the sequence in the step.
        sequence: usize,
        /// Absolute block number.
        block: usize,
    },
    /// A row sees a range of positions that does not contain it, ends after the step, or overlaps another one.
    #[error("the row at position {position} cannot see positions {start}..{end} in this step")]
    Span { position: usize, start: usize, end: usize },
    /// A non-causal layer, in which every row sees the whole sequence, needs all of it in one step.
    #[error("sequence {sequence} is incomplete: its position {position} is not in the step")]
    PartialSequence {
        /// Index of the sequence in the step.
        sequence: usize,
        /// First position that is missing.
        position: usize,
    },
    /// A block or slot that does not lie inside the arena.
    #[error("a block or slot ends at byte {end} of an arena of {len}")]
    OutsideArena {
        /// First byte after the block or slot.
        end: u64,
        /// Bytes in the arena.
        len: usize,
    },
    /// An arena whose first byte is not on a cache line.
    #[error("the KV arena does not start on a cache line")]
    UnalignedArena,
    /// Two rows of one step would write the same memory.
    #[error("two rows of the step would write overlapping KV slots at arena offset {offset}")]
    OverlappingWrites {
        /// Byte offset of the second of the two blocks, without the layer's offset.
        offset: u64,
    },
    /// A shape of recurrent state that no kernel serves.
    #[error(
        "no state of {channels} channels x {taps} taps and {heads} heads of {rows} x {cols}: no dimension may be \
         zero, and there are at most 4 taps"
    )]
    StateShape {
        channels: usize,
        /// Positions that the convolution sees.
        taps: usize,
        heads: usize,
        /// Rows of a head's matrix.
        rows: usize,
        /// Columns of a head's matrix.
        cols: usize,
    },
    /// A layer's state that does not fit the slots of the step.
    #[error("a layer's state ends at byte {end} of a slot of {slot}")]
    OutsideSlot {
        /// First byte after the layer's state.
        end: usize,
        /// Bytes of a slot.
        slot: usize,
    },
    /// A slot that one sequence of a step writes while the step uses it for something else.
    #[error("the state slot at {slot} is written and overlaps another slot of the step")]
    OverlappingStates {
        /// Offset / 64 of one of the two slots.
        slot: u32,
    },
    /// State exports that are not in the order of their rows.
    #[error("the state export after row {row} follows one after a later row")]
    ExportOrder {
        /// The row whose export is out of order.
        row: usize,
    },
    /// More deferred rows than the device can store.
    #[error("{rows} rows with a deferred state, at most {max}")]
    DeferredRows {
        /// Rows of the sequence.
        rows: usize,
        /// Maximum number of rows.
        max: usize,
    },
    /// More deferred steps than the device can store.
    #[error("rows of {max} steps are deferred already, and none of them has been accepted")]
    DeferredSteps {
        /// Maximum number of steps.
        max: usize,
    },
    /// A deferred state with exports.
    #[error("a sequence whose state is deferred exports none")]
    DeferredExport,
    /// An op on a layer whose state belongs to another recurrence.
    #[error("the layer's state does not belong to {op}")]
    StateKind { op: &'static str },
    /// An order of a matrix's columns that does not name each of them once.
    #[error("the order of a matrix's columns does not name each of {cols} columns once")]
    Order { cols: usize },
    /// An op whose input and output are the same buffer.
    #[error("an op reads and writes the same buffer")]
    SameBuffer,
    /// A device, its driver or its compiler refused or failed.
    #[error("{reason}")]
    Device { reason: String },
    /// The device is unusable for this process. Every later call fails, too.
    #[error("{reason}")]
    DeviceLost { reason: String },
    /// An argument that this backend does not implement.
    #[error("this backend does not serve {what}")]
    Unsupported { what: &'static str },
}
