//! Mamba-2: its inputs to the shared scan over states (`scan.rs`).

use std::ops::Range;

use super::plan::LayerState;
use super::scan::{KeyHeads, Rule, Scan, ScanScratch, TILE_ROWS, Tile, scan};
use crate::attention::check_len;
use crate::backend::StateKind;
use crate::error::Error;
use crate::isa::Isa;
use crate::pool::Pool;
use crate::simd::{self, LANES, Simd};

/// Weights and shape of a Mamba-2 layer, except for the shape of its state.
#[derive(Debug, Clone, Copy)]
pub struct Mamba2<'a> {
    /// `[heads]`, below zero.
    pub a: &'a [f32],
    /// `[heads]`.
    pub d: &'a [f32],
    /// `[heads]`.
    pub dt_bias: &'a [f32],
    /// Groups that share B and C: head h uses group `h / (heads / groups)`.
    pub groups: usize,
}

/// Inputs of the rows of a step.
#[derive(Debug, Clone, Copy)]
pub struct Mamba2Input<'a> {
    /// `[rows][heads head_dim + 2 groups state]`: x, B of all groups, C of all groups, after the convolution.
    pub xbc: &'a [f32],
    /// `[rows][heads]`, before `dt_bias` and softplus.
    pub dt: &'a [f32],
}

/// For each head, a state S of `[head_dim][state]`. For each row, with `dt = softplus(dt + dt_bias)`:
/// `S = exp(dt a) S + dt x B^T`, `out = S C + d x`.
///
/// `out` is `[rows][heads][head_dim]`.
///
/// # Errors
/// [`Error::StateKind`], [`Error::HeadGroups`], [`Error::Length`].
pub fn mamba2(
    pool: &Pool,
    isa: Isa,
    state: &mut LayerState<'_>,
    net: &Mamba2<'_>,
    input: &Mamba2Input<'_>,
    out: &mut [f32],
    scratch: &mut ScanScratch,
) -> Result<(), Error> {
    let shape = *state.layout().shape();
    if shape.kind != StateKind::Mamba2 {
        return Err(Error::StateKind { op: "Mamba-2" });
    }
    let (rows, heads) = (state.plan().rows(), shape.heads);
    let key_heads = KeyHeads::new(heads, net.groups, false)?;
    let width = heads * shape.rows + 2 * net.groups * shape.cols;
    check_len("Mamba-2 decay", heads, net.a.len())?;
    check_len("Mamba-2 skip", heads, net.d.len())?;
    check_len("Mamba-2 step bias", heads, net.dt_bias.len())?;
    check_len("Mamba-2 xBC", rows * width, input.xbc.len())?;
    check_len("Mamba-2 step size", rows * heads, input.dt.len())?;
    check_len("Mamba-2 output", rows * heads * shape.rows, out.len())?;
    let rule = Mamba2Rule { net, input, key_heads, heads, width, state: shape.cols };
    let call = Scan { rule, values: input.xbc, value_stride: width, value_offset: 0, out, scratch };
    scan(pool, isa, state, call);
    Ok(())
}

struct Mamba2Rule<'a> {
    net: &'a Mamba2<'a>,
    input: &'a Mamba2Input<'a>,
    key_heads: KeyHeads,
    heads: usize,
    /// Width of a row of x, B and C.
    width: usize,
    state: usize,
}

impl Rule for Mamba2Rule<'_> {
    const CORRECTS: bool = false;

    #[inline(always)]
    fn prepare<S: Simd>(&self, s: S, head: usize, rows: Range<usize>, tile: &mut Tile<'_>) {
        let Self { width, state, .. } = *self;
        let (groups, group) = (self.net.groups, self.key_heads.of(head));
        for (row, pair) in rows.clone().zip(tile.keys.chunks_exact_mut(2 * state)) {
            let bc = &self.input.xbc[(row + 1) * width - 2 * groups * state..(row + 1) * width];
            let (b, c) = pair.split_at_mut(state);
            b.copy_from_slice(&bc[group * state..][..state]);
            c.copy_from_slice(&bc[(groups + group) * state..][..state]);
        }
        let (a, dt_bias) = (s.splat(self.net.a[head]), s.splat(self.net.dt_bias[head]));
        let mut steps = [0.0; TILE_ROWS];
        for (step, row) in steps.iter_mut().zip(rows.clone()) {
            *step = self.input.dt[row * self.heads + head];
        }
        for at in (0..rows.len()).step_by(LANES) {
            let lanes = at..at + LANES;
            let step = simd::softplus(s, s.add(s.tail(&steps[lanes.clone()]), dt_bias));
            s.put_tail(step, &mut tile.gain[lanes.clone()]);
            s.put_tail(simd::exp(s, s.mul(a, step)), &mut tile.decay[lanes]);
        }
    }

    fn skip(&self, head: usize) -> f32 {
        self.net.d[head]
    }
}
