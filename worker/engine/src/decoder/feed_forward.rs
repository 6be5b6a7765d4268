//! A layer's feed-forward: the sum of its parts.

use super::{Buffers, job, normed};
use crate::Error;
use crate::weights::{FfnPart, FfnWeights, LayerWeights, MoeWeights};
use kernels::backend::{Backend, BufferId, ExpertGroups, GateOp, MatrixId, MoeOp, Selection};

/// `x = out(x + scale * post(sum of the parts))`
pub(super) fn run(
    backend: &mut dyn Backend,
    b: &Buffers,
    layer: &LayerWeights,
    scale: f32,
) -> Result<(), Error> {
    let reads_x = |part: &FfnPart| {
        let routes_on_x = matches!(&part.ffn, FfnWeights::Moe(moe) if moe.router_norm.is_some());
        part.own_norm.is_some() || routes_on_x
    };
    // Add directly to the residual if nothing is applied to the sum and no part reads the residual after
    // another part was added to it.
    let from_x = layer.ffn_norm.is_none() && !layer.parallel;
    let later_reads_x = layer.ffn.iter().any(reads_x) || from_x && layer.ffn.len() > 1;
    let direct = layer.ffn_post_norm.is_none() && scale == 1.0 && !later_reads_x;
    let sum = if direct { b.x } else { b.branch };
    let shared = match layer.parallel {
        // What the mixer has read.
        true if layer.mixer_norm.is_some() => b.normed,
        _ => normed(backend, b, layer.ffn_norm.as_ref(), b.normed, &readers(layer))?,
    };
    for (index, part) in layer.ffn.iter().enumerate() {
        let input = match &part.own_norm {
            Some(norm) => normed(backend, b, Some(norm), b.own_normed, &[])?,
            None => shared,
        };
        let accumulate = direct || index > 0;
        match &part.post_norm {
            None => part_into(backend, b, &part.ffn, input, sum, accumulate)?,
            Some(norm) => {
                part_into(backend, b, &part.ffn, input, b.part, false)?;
                match accumulate {
                    true => backend.add(sum, b.part, Some(norm), 1.0)?,
                    false => backend.norm(b.part, norm, sum)?,
                }
            }
        }
    }
    if !direct {
        backend.add(b.x, b.branch, layer.ffn_post_norm.as_ref(), scale)?;
    }
    match &layer.ffn_out_norm {
        Some(norm) => Ok(backend.norm(b.x, norm, b.x)?),
        None => Ok(()),
    }
}

/// Returns the matrices that are multiplied with the layer's normalised residual, if nothing else reads it.
fn readers(layer: &LayerWeights) -> Vec<MatrixId> {
    let [FfnPart { ffn, own_norm: None, .. }] = layer.ffn.as_slice() else { return Vec::new() };
    match ffn {
        FfnWeights::Gated { gate, up, row_gate, .. } => {
            [gate, up].into_iter().chain(row_gate).map(|linear| linear.matrix).collect()
        }
        FfnWeights::Plain { up, .. } => vec![up.matrix],
        FfnWeights::Moe(_) => Vec::new(),
    }
}

fn part_into(
    backend: &mut dyn Backend,
    b: &Buffers,
    ffn: &FfnWeights,
    input: BufferId,
    out: BufferId,
    accumulate: bool,
) -> Result<(), Error> {
    match ffn {
        FfnWeights::Gated { gate, up, down, activation, row_gate } => {
            let mut jobs = vec![job(gate, b.gate, false), job(up, b.up, false)];
            jobs.extend(row_gate.as_ref().map(|row_gate| job(row_gate, b.row_gate, false)));
            backend.matmul(input, &jobs)?;
            let op = GateOp { gate: b.gate, up: Some(b.up), up_from: 0, activation: *activation };
            if row_gate.is_some() {
                backend.gate(&op)?;
                // Scaling before the down projection equals scaling after it, since it is linear and has no
                // bias.
                backend.scale_rows(b.gate, b.row_gate)?;
            } else {
                backend.gate_for(&op, &[down.matrix])?;
            }
            backend.matmul(b.gate, &[job(down, out, accumulate)])?;
        }
        FfnWeights::Plain { up, down, activation } => {
            backend.matmul(input, &[job(up, b.gate, false)])?;
            let op = GateOp { gate: b.gate, up: None, up_from: 0, activation: *activation };
            backend.gate_for(&op, &[down.matrix])?;
            backend.matmul(b.gate, &[job(down, out, accumulate)])?;
        }
        FfnWeights::Moe(moe) => mixture(backend, b, moe, input, out, accumulate)?,
    }
    Ok(())
}

fn mixture(
    backend: &mut dyn Backend,
    b: &Buffers,
    moe: &MoeWeights,
    input: BufferId,
    out: BufferId,
    accumulate: bool,
) -> Result<(), Error> {
    let routed_on = match &moe.router_norm {
        Some(norm) => normed(backend, b, Some(norm), b.router_normed, &[])?,
        None => input,
    };
    backend.matmul(routed_on, &[job(&moe.router, b.router, false)])?;
    backend.moe(&MoeOp {
        x: input,
        router: b.router,
        out,
        accumulate,
        scale: moe.spec.scale,
        used: moe.spec.used,
        selection: Selection {
            sigmoid: moe.spec.sigmoid,
            bias: moe.selection_bias,
            groups: moe.spec.groups.map(|groups| ExpertGroups {
                count: groups.count,
                used: groups.used,
                two_best: groups.two_best,
            }),
        },
        renormalise: moe.spec.renormalise,
        gate_up: moe.gate_up,
        down: moe.down,
        down_scale: moe.down_scale,
        down_bias: moe.down_bias,
        ff: moe.spec.expert_ff,
        activation: moe.activation,
    })?;
    Ok(())
}
