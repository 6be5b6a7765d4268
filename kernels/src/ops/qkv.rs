//! The op between the q, k, v projections and attention, fused per row.

use super::norm::{Rms, RmsNorm};
use super::rope::{RopeTable, rope_on_axes};
use crate::attention::{ArenaView, PlanWriter, PlannedRow, StepPlan, check_len};
use crate::backend::QueryGrowth;
use crate::disjoint::Disjoint;
use crate::error::Error;
use crate::isa::Isa;
use crate::pool::Pool;
use crate::simd::dispatch;

/// Arguments for one layer's q, k and v before attention.
#[derive(Debug, Clone, Copy)]
pub struct QkvStep<'a> {
    /// Byte offset of the layer inside each block; a multiple of 64.
    pub layer_offset: usize,
    /// Norm of the runs of each query row before rope.
    pub q_norm: Option<RmsNorm<'a>>,
    /// Norm of the runs of each key row before rope.
    pub k_norm: Option<RmsNorm<'a>>,
    /// Norm of the runs of each value row.
    pub v_norm: Option<RmsNorm<'a>>,
    /// Rotation of q and k. The table must hold the positions of the step.
    pub rope: Option<&'a RopeTable>,
    /// Positions of each row on the axes of the rotation. Empty: the row's position.
    pub axes: &'a [[u32; 3]],
    /// Factor of q by position.
    pub q_growth: Option<QueryGrowth>,
}

/// Projections of a step, with one row per row of its plan.
#[derive(Debug)]
pub struct Qkv<'a> {
    /// `[rows][heads * head_dim]`
    pub q: &'a mut [f32],
    /// Keys and values for the cache. `None`: the layer reads the cache of another layer.
    pub kv: Option<KeysValues<'a>>,
}

/// Keys and values of a [`Qkv`].
#[derive(Debug)]
pub struct KeysValues<'a> {
    /// `[rows][kv_heads * head_dim]`
    pub k: &'a mut [f32],
    /// `[rows][kv_heads * v_head_dim]`. `None`: the values are the keys before norm and rope, or a latent cache has
    /// none.
    pub v: Option<&'a mut [f32]>,
}

/// For each row of the plan: norms and rotates q and k and norms v in place, then writes k and v to the row's
/// slot in the arena.
///
/// # Errors
/// [`Error::Length`] if a buffer has another shape, [`Error::OutOfRange`] for a position outside the rope
/// table, [`Error::OverlappingWrites`] if two rows have the same slot, [`Error::OutsideArena`],
/// [`Error::UnalignedArena`].
pub fn norm_rope_write(
    pool: &Pool,
    isa: Isa,
    plan: &StepPlan,
    step: &QkvStep<'_>,
    arena: &mut ArenaView<'_>,
    qkv: Qkv<'_>,
) -> Result<(), Error> {
    let shape = plan.shape();
    let layout = &shape.layout;
    let head_dim = layout.head_dim();
    let q_width = shape.heads * head_dim;
    check_len("q", plan.rows() * q_width, qkv.q.len())?;
    step.q_norm.map_or(Ok(()), |norm| norm.check(q_width))?;
    if let Some(table) = step.rope {
        if table.n_rot() > head_dim {
            return Err(Error::Length { what: "head width", expected: table.n_rot(), found: head_dim });
        }
        if let Some(last) = plan.rows.iter().map(|row| row.position).max() {
            table.row(last)?;
        }
        if let Some(last) = step.axes.iter().flatten().max() {
            check_len("positions on axes", plan.rows(), step.axes.len())?;
            table.row(*last as usize)?;
        }
    }
    let norm_rope = |row: &PlannedRow, norm: Option<RmsNorm<'_>>, x: &mut [f32]| {
        norm_row(isa, norm, x);
        if let Some(table) = step.rope {
            let positions = match step.axes.get(row.query).filter(|_| table.has_axes()) {
                Some(axes) => axes.map(|position| position as usize),
                None => [row.position; 3],
            };
            let rotated = rope_on_axes(isa, table, positions, head_dim, x);
            debug_assert_eq!(rotated, Ok(()), "shapes and positions are checked above");
        }
    };
    let writer = match qkv.kv {
        Some(kv) => Some(KvRows::new(plan, step, arena, kv)?),
        None => None,
    };
    let q = Disjoint::new(qkv.q);
    pool.for_each_range(plan.rows(), 1, &|range| {
        let mut raw = Vec::new();
        for index in range {
            let row = &plan.rows[index];
            // SAFETY: every planned row has its own row of q and is visited once.
            let q = unsafe { q.slice(row.query * q_width, q_width) };
            norm_rope(row, step.q_norm, q);
            if let Some(growth) = step.q_growth {
                let factor = growth.at(row.position);
                q.iter_mut().for_each(|q| *q *= factor);
            }
            if let Some(writer) = &writer {
                // SAFETY: every planned row is visited once.
                let (k, v) = unsafe { writer.row(row.query, &mut raw) };
                norm_rope(row, step.k_norm, k);
                norm_row(isa, step.v_norm, v);
                // SAFETY: every planned row is visited once; `KvRows::row` gives the layout's widths.
                unsafe { writer.writer.write(isa, index, k, v) };
            }
        }
    });
    Ok(())
}

/// Norms the runs of one row.
fn norm_row(isa: Isa, norm: Option<RmsNorm<'_>>, row: &mut [f32]) {
    if let Some(norm) = norm {
        for (run, x) in row.chunks_exact_mut(norm.width).enumerate() {
            dispatch(isa, Rms { norm: norm.of_run(run), x });
        }
    }
}

/// Rows of k and v to write to the cache.
struct KvRows<'a> {
    k: Disjoint<'a, f32>,
    v: Option<Disjoint<'a, f32>>,
    k_width: usize,
    v_width: usize,
    writer: PlanWriter<'a>,
}

impl<'a> KvRows<'a> {
    fn new(
        plan: &'a StepPlan,
        step: &QkvStep<'_>,
        arena: &'a mut ArenaView<'_>,
        kv: KeysValues<'a>,
    ) -> Result<Self, Error> {
        let layout = &plan.shape().layout;
        let k_width = layout.kv_heads() * layout.head_dim();
        let v_width = layout.kv_heads() * layout.stored_v_dim();
        check_len("k", plan.rows() * k_width, kv.k.len())?;
        match &kv.v {
            None if layout.is_latent() => {}
            Some(v) => check_len("v", plan.rows() * v_width, v.len())?,
            None => check_len("values that are keys", v_width, k_width)?,
        }
        step.k_norm.map_or(Ok(()), |norm| norm.check(k_width))?;
        step.v_norm.map_or(Ok(()), |norm| norm.check(v_width))?;
        let writer = PlanWriter::new(plan, arena, step.layer_offset)?;
        Ok(Self { k: Disjoint::new(kv.k), v: kv.v.map(Disjoint::new), k_width, v_width, writer })
    }

    /// Returns a row of keys and of values. `raw` is the buffer for values that are copies of the keys.
    ///
    /// # Safety
    /// No second call for the same row while the result of the first one is alive.
    unsafe fn row<'b>(&'b self, row: usize, raw: &'b mut Vec<f32>) -> (&'b mut [f32], &'b mut [f32]) {
        // SAFETY: rows do not overlap, and only the caller uses this one.
        let k = unsafe { self.k.slice(row * self.k_width, self.k_width) };
        let v = match &self.v {
            // SAFETY: as above.
            Some(v) => unsafe { v.slice(row * self.v_width, self.v_width) },
            None => {
                raw.clear();
                raw.extend_from_slice(&k[..self.v_width]);
                raw
            }
        };
        (k, v)
    }
}
