//! What happens between the q, k, v projections and attention, fused per row.

use super::norm::{RmsInPlace, RmsNorm};
use super::rope::{RopeTable, rope};
use crate::attention::{ArenaView, PlanWriter, StepPlan, check_len};
use crate::disjoint::Disjoint;
use crate::error::Error;
use crate::isa::Isa;
use crate::pool::Pool;
use crate::simd::dispatch;

/// What one layer does to q, k and v before attention.
#[derive(Debug, Clone, Copy)]
pub struct QkvStep<'a> {
    /// Added to every block offset, in bytes; a multiple of 64.
    pub layer_offset: usize,
    /// Norm of each query head before rope; the weight is one head wide.
    pub q_norm: Option<RmsNorm<'a>>,
    /// Norm of each key head, likewise.
    pub k_norm: Option<RmsNorm<'a>>,
    /// Rotation of q and k. The table must hold the positions of the step.
    pub rope: Option<&'a RopeTable>,
}

/// Projections of a step, one row per row of its plan.
#[derive(Debug)]
pub struct Qkv<'a> {
    /// `[rows][heads * head_dim]`
    pub q: &'a mut [f32],
    /// `[rows][kv_heads * head_dim]`
    pub k: &'a mut [f32],
    /// `[rows][kv_heads * v_head_dim]`
    pub v: &'a [f32],
}

/// Per row of the plan: norms and rotates q and k in place, then writes k and v to the row's slot in the
/// arena.
///
/// # Errors
/// [`Error::Length`] for buffers of other shapes, [`Error::OutOfRange`] for a position that the rope table lacks,
/// [`Error::OverlappingWrites`] where two rows have one slot, [`Error::OutsideArena`], [`Error::UnalignedArena`].
pub fn norm_rope_write(
    pool: &Pool,
    isa: Isa,
    plan: &StepPlan,
    step: &QkvStep<'_>,
    arena: &mut ArenaView<'_>,
    qkv: Qkv<'_>,
) -> Result<(), Error> {
    let Qkv { q, k, v } = qkv;
    let shape = plan.shape();
    let layout = &shape.layout;
    let head_dim = layout.head_dim();
    let (q_width, k_width) = (shape.heads * head_dim, layout.kv_heads() * head_dim);
    let v_width = layout.kv_heads() * layout.v_head_dim();
    check_len("q", plan.rows() * q_width, q.len())?;
    check_len("k", plan.rows() * k_width, k.len())?;
    check_len("v", plan.rows() * v_width, v.len())?;
    for norm in [step.q_norm, step.k_norm].into_iter().flatten() {
        if let Some(weight) = norm.weight {
            check_len("head norm weight", head_dim, weight.len())?;
        }
    }
    if let Some(table) = step.rope {
        if table.n_rot() > head_dim {
            return Err(Error::Length { what: "head width", expected: table.n_rot(), found: head_dim });
        }
        if let Some(last) = plan.rows.iter().map(|row| row.position).max() {
            table.row(last)?;
        }
    }
    let writer = PlanWriter::new(plan, arena, step.layer_offset)?;
    let (q, k) = (Disjoint::new(q), Disjoint::new(k));
    pool.for_each_range(plan.rows(), 1, &|range| {
        for index in range {
            let row = &plan.rows[index];
            // SAFETY: every planned row has its own row of q and k and is visited once.
            let (q, k) =
                unsafe { (q.slice(row.query * q_width, q_width), k.slice(row.query * k_width, k_width)) };
            for (x, norm) in [(&mut *q, step.q_norm), (&mut *k, step.k_norm)] {
                if let Some(norm) = norm {
                    for x in x.chunks_exact_mut(head_dim) {
                        dispatch(isa, RmsInPlace { norm, x });
                    }
                }
                if let Some(table) = step.rope {
                    let rotated = rope(isa, table, row.position, head_dim, x);
                    debug_assert_eq!(rotated, Ok(()), "shapes and positions are checked above");
                }
            }
            // SAFETY: every planned row is visited once; the widths are checked above.
            unsafe { writer.write(isa, index, k, &v[row.query * v_width..(row.query + 1) * v_width]) };
        }
    });
    Ok(())
}
