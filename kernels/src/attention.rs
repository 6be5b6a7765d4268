//! Attention over a paged KV cache.
//!
//! A [`StepPlan`] has the blocks that each row (token of this step) attends to. [`attention`] computes one
//! layer of it; [`kv_write`] writes a token's keys and values to its slot. Kernels read the block table
//! themselves: blocks may lie anywhere in the arena and are never gathered.
//!
//! **Exactness.** A row's result has the same bits for any other rows in the step, any split of its prompt
//! into steps, any position of its blocks, any number of threads, and every [`Isa`]. Tiles and splits lie at
//! absolute positions, every sum has one order, and splits are merged in position order (`plan.rs`,
//! `tile.rs`). This assumes that keys and values are finite: a NaN at one position may reach the rows of
//! neighbouring positions.

#![allow(unsafe_code)]

mod format;
mod layout;
mod plan;
mod tile;
mod work;
mod write;

#[cfg(test)]
mod tests;

use std::marker::PhantomData;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

pub use layout::{KvLayout, KvType, KvTypes};
pub use plan::{AttentionShape, BlockTable, NO_BLOCK, OFFSET_UNIT, QueryRow, StepPlan, Visible};

use crate::aligned::{AlignedBuf, CACHE_LINE};
use crate::disjoint::Disjoint;
use crate::error::Error;
use crate::isa::Isa;
use crate::pool::Pool;
use crate::simd::{LANES, dispatch};
use plan::Item;
pub(crate) use plan::PlannedRow;
use work::{MergeRow, RunItem, Step, ThreadScratch, record_len};
use write::WriteToken;

/// The memory that contains all blocks.
#[derive(Debug)]
pub struct ArenaView<'a> {
    start: *mut u8,
    len: usize,
    borrow: PhantomData<&'a mut [u8]>,
}

// SAFETY: an exclusive borrow of bytes; shared access through this module only reads.
unsafe impl Send for ArenaView<'_> {}
// SAFETY: as above.
unsafe impl Sync for ArenaView<'_> {}

impl<'a> ArenaView<'a> {
    /// Creates a view of an arena whose first byte is on a cache line.
    ///
    /// # Errors
    /// [`Error::UnalignedArena`].
    pub fn new(bytes: &'a mut [u8]) -> Result<Self, Error> {
        if !bytes.as_ptr().addr().is_multiple_of(CACHE_LINE) {
            return Err(Error::UnalignedArena);
        }
        Ok(Self { start: bytes.as_mut_ptr(), len: bytes.len(), borrow: PhantomData })
    }

    /// Pointer to a layer's data in block offset 0. Checks that all blocks of the plan lie inside the arena.
    fn layer(&self, plan: &StepPlan, layer_offset: usize) -> Result<*mut u8, Error> {
        plan.check_arena(layer_offset, self.len)?;
        if plan.rows() > 0 && !layer_offset.is_multiple_of(CACHE_LINE) {
            return Err(Error::UnalignedArena);
        }
        Ok(self.start.wrapping_add(layer_offset))
    }
}

/// Arguments of one layer's attention, besides the plan.
#[derive(Debug, Clone, Copy)]
pub struct AttentionCall<'a> {
    pub arena: &'a ArenaView<'a>,
    /// Byte offset of the layer inside each block; a multiple of 64.
    pub layer_offset: usize,
    pub scale: f32,
    /// `c`: scores become `c * tanh(score / c)`. `None`: no softcap.
    pub softcap: Option<f32>,
    /// One extra logit per query head in the softmax, unscaled and without a key or a value.
    pub sinks: Option<&'a [f32]>,
}

/// Buffers that [`attention`] reuses from call to call.
#[derive(Debug, Default)]
pub struct AttentionScratch {
    threads: Vec<Mutex<ThreadScratch>>,
    partials: AlignedBuf<f32>,
}

/// One layer of attention: `out = softmax(scale * q k^T) v` over the visible keys of each row.
///
/// `q` is `[rows][heads * head_dim]`, `out` is `[rows][heads * v_head_dim]`, both in the order of the rows
/// that the plan was made from. Keys and values of the step's own rows must have been written before.
///
/// # Errors
/// [`Error::Length`] if a buffer has another shape, [`Error::OutsideArena`], [`Error::UnalignedArena`].
pub fn attention(
    pool: &Pool,
    isa: Isa,
    plan: &StepPlan,
    call: &AttentionCall<'_>,
    q: &[f32],
    out: &mut [f32],
    scratch: &mut AttentionScratch,
) -> Result<(), Error> {
    let shape = plan.shape();
    let layout = &shape.layout;
    check_len("attention q", plan.rows() * shape.heads * layout.head_dim(), q.len())?;
    check_len("attention out", plan.rows() * shape.heads * layout.v_head_dim(), out.len())?;
    if let Some(sinks) = call.sinks {
        check_len("attention sinks", shape.heads, sinks.len())?;
    }
    let layer = call.arena.layer(plan, call.layer_offset)?;
    let record = record_len(layout.v_head_dim().next_multiple_of(LANES));
    scratch.partials.grow(plan.partials * shape.heads * record);
    scratch.threads.resize_with(pool.threads().max(scratch.threads.len()), Mutex::default);
    let step = Step {
        plan,
        layer: layer.cast_const(),
        scale: call.scale,
        softcap: call.softcap,
        sinks: call.sinks,
        q,
        out: Disjoint::new(out),
        partials: Disjoint::new(&mut scratch.partials),
    };
    let next = AtomicUsize::new(0);
    let threads = &scratch.threads;
    pool.run(&|thread| {
        // A panic elsewhere may have left stale numbers, but every item starts from scratch.
        let mut scratch = threads[thread].lock().unwrap_or_else(PoisonError::into_inner);
        scratch.fit(plan);
        while let Some((item, kv_head)) = item_at(plan, next.fetch_add(1, Ordering::Relaxed)) {
            let upcoming = || item_at(plan, next.load(Ordering::Relaxed));
            dispatch(isa, RunItem { step: &step, item, kv_head, upcoming: &upcoming, scratch: &mut scratch });
        }
    });
    if plan.partials > 0 {
        pool.for_each(plan.rows.len(), &|index| {
            let row = &plan.rows[index];
            if let Some(first) = row.partial {
                dispatch(isa, MergeRow { step: &step, row, first });
            }
        });
    }
    Ok(())
}

/// Item and key/value head of work index `index`: every item is computed once for every head.
fn item_at(plan: &StepPlan, index: usize) -> Option<(&Item, usize)> {
    let kv_heads = plan.shape().layout.kv_heads();
    plan.items.get(index / kv_heads).map(|item| (item, index % kv_heads))
}

/// Writes keys and values of one token into slot `slot` of a block.
///
/// `block` has the bytes of one layer of the block and starts on a cache line. `k` is
/// `[kv_heads * head_dim]`, `v` is `[kv_heads * v_head_dim]`, empty in a latent layout.
///
/// # Errors
/// [`Error::Length`], [`Error::OutOfRange`] for the slot, [`Error::UnalignedArena`].
pub fn kv_write(
    isa: Isa,
    layout: &KvLayout,
    block: &mut [u8],
    slot: usize,
    k: &[f32],
    v: &[f32],
) -> Result<(), Error> {
    check_len("KV block", layout.bytes(), block.len())?;
    check_len("keys", layout.kv_heads() * layout.head_dim(), k.len())?;
    check_len("values", layout.kv_heads() * layout.stored_v_dim(), v.len())?;
    if slot >= layout.block_tokens() {
        return Err(Error::OutOfRange { what: "slot", index: slot, len: layout.block_tokens() });
    }
    if !block.as_ptr().addr().is_multiple_of(CACHE_LINE) {
        return Err(Error::UnalignedArena);
    }
    // SAFETY: the block is borrowed exclusively, aligned and has the layout's size, and the slot is inside
    // it.
    unsafe { WriteToken { layout, block: block.as_mut_ptr(), slot, k, v }.on(isa) };
    Ok(())
}

/// Writes keys and values of the rows of a plan, from any thread.
pub(crate) struct PlanWriter<'a> {
    plan: &'a StepPlan,
    layer: *mut u8,
}

// SAFETY: rows write disjoint slots (`StepPlan::writes`, checked by `new`), each through `write`'s contract.
unsafe impl Sync for PlanWriter<'_> {}

impl<'a> PlanWriter<'a> {
    /// Creates a writer to the blocks of a layer.
    ///
    /// # Errors
    /// [`Error::OverlappingWrites`] if two rows of the plan share a slot, [`Error::OutsideArena`].
    pub(crate) fn new(
        plan: &'a StepPlan,
        arena: &'a mut ArenaView<'_>,
        layer_offset: usize,
    ) -> Result<Self, Error> {
        plan.writes()?;
        Ok(Self { plan, layer: arena.layer(plan, layer_offset)? })
    }

    /// Writes planned row `index`.
    ///
    /// # Safety
    /// No two calls for one row may run at the same time; `k` and `v` must have the layout's widths.
    pub(crate) unsafe fn write(&self, isa: Isa, index: usize, k: &[f32], v: &[f32]) {
        let layout = &self.plan.shape().layout;
        let row = &self.plan.rows[index];
        let tokens = layout.block_tokens();
        let Some(offset) = self.plan.block(row.sequence, row.position / tokens) else {
            unreachable!("the plan has checked every visible block");
        };
        let block = self.layer.wrapping_add(offset as usize);
        // SAFETY: the block lies inside the exclusively borrowed arena (`check_arena`); slots of different
        // rows are different memory (`writes`).
        unsafe { WriteToken { layout, block, slot: row.position % tokens, k, v }.on(isa) }
    }
}

/// Checks the length of a buffer.
///
/// # Errors
/// [`Error::Length`], which names `what`.
pub fn check_len(what: &'static str, expected: usize, found: usize) -> Result<(), Error> {
    if expected == found { Ok(()) } else { Err(Error::Length { what, expected, found }) }
}
