//! Gated delta net: its inputs to the shared scan over states (`scan.rs`).

use std::ops::Range;

use super::plan::LayerState;
use super::scan::{KeyHeads, Rule, Scan, ScanScratch, TILE_ROWS, Tile, scan};
use crate::attention::check_len;
use crate::backend::StateKind;
use crate::error::Error;
use crate::isa::Isa;
use crate::ops::row_sum;
use crate::pool::Pool;
use crate::simd::{self, LANES, Simd};

/// Weights and shape of a delta net, except for the shape of its state.
#[derive(Debug, Clone, Copy)]
pub struct DeltaNet<'a> {
    /// `[heads]`, below zero.
    pub a: &'a [f32],
    /// `[heads]`.
    pub dt_bias: &'a [f32],
    /// Heads of q and k.
    pub k_heads: usize,
    /// Head h uses key head `h % k_heads` if true, `h / (heads / k_heads)` otherwise.
    pub tiled: bool,
    /// Added to the squared length of q and k.
    pub l2_eps: f32,
}

/// Inputs of the rows of a step.
#[derive(Debug, Clone, Copy)]
pub struct DeltaNetInput<'a> {
    /// `[rows][2 k_heads k_dim + heads v_dim]`: q, k, v of all heads, after the convolution.
    pub qkv: &'a [f32],
    /// `[rows][heads]`, before the sigmoid.
    pub beta: &'a [f32],
    /// `[rows][heads]`, before `dt_bias` and softplus.
    pub alpha: &'a [f32],
}

/// For each head, a state S of `[k_dim][v_dim]`. For each row, with q and k scaled to unit length and q
/// multiplied by `k_dim^-0.5`: `S = exp(a softplus(alpha + dt_bias)) S`, `d = sigmoid(beta) (v - S^T k)`,
/// `S += k d^T`, `out = S^T q`.
///
/// `out` is `[rows][heads][v_dim]`.
///
/// # Errors
/// [`Error::StateKind`], [`Error::HeadGroups`], [`Error::Length`].
pub fn delta_net(
    pool: &Pool,
    isa: Isa,
    state: &mut LayerState<'_>,
    net: &DeltaNet<'_>,
    input: &DeltaNetInput<'_>,
    out: &mut [f32],
    scratch: &mut ScanScratch,
) -> Result<(), Error> {
    let shape = *state.layout().shape();
    if shape.kind != StateKind::DeltaNet {
        return Err(Error::StateKind { op: "delta net" });
    }
    let (rows, heads) = (state.plan().rows(), shape.heads);
    let key_heads = KeyHeads::new(heads, net.k_heads, net.tiled)?;
    let keys = 2 * net.k_heads * shape.rows;
    let width = keys + heads * shape.cols;
    check_len("delta net decay", heads, net.a.len())?;
    check_len("delta net step bias", heads, net.dt_bias.len())?;
    check_len("delta net qkv", rows * width, input.qkv.len())?;
    check_len("delta net beta", rows * heads, input.beta.len())?;
    check_len("delta net alpha", rows * heads, input.alpha.len())?;
    check_len("delta net output", rows * heads * shape.cols, out.len())?;
    let rule = DeltaRule { net, input, key_heads, heads, width, k_dim: shape.rows };
    let call = Scan { rule, values: input.qkv, value_stride: width, value_offset: keys, out, scratch };
    scan(pool, isa, state, call);
    Ok(())
}

struct DeltaRule<'a> {
    net: &'a DeltaNet<'a>,
    input: &'a DeltaNetInput<'a>,
    key_heads: KeyHeads,
    heads: usize,
    /// Width of a row of q, k and v.
    width: usize,
    k_dim: usize,
}

impl Rule for DeltaRule<'_> {
    const CORRECTS: bool = true;

    /// Scales keys and queries to unit length, once for each head that uses them. The cost is negligible next
    /// to the pass over a state, and they are still in the cache when they are used.
    #[inline(always)]
    fn prepare<S: Simd>(&self, s: S, head: usize, rows: Range<usize>, tile: &mut Tile<'_>) {
        let Self { net, input, heads, width, k_dim, .. } = *self;
        let key_head = self.key_heads.of(head);
        let query_scale = 1.0 / (k_dim as f32).sqrt();
        for (row, pair) in rows.clone().zip(tile.keys.chunks_exact_mut(2 * k_dim)) {
            let qkv = &input.qkv[row * width..(row + 1) * width];
            let (key, query) = pair.split_at_mut(k_dim);
            unit(s, &qkv[(net.k_heads + key_head) * k_dim..][..k_dim], net.l2_eps, 1.0, key);
            unit(s, &qkv[key_head * k_dim..][..k_dim], net.l2_eps, query_scale, query);
        }
        let (a, dt_bias) = (s.splat(net.a[head]), s.splat(net.dt_bias[head]));
        let (mut alphas, mut betas) = ([0.0; TILE_ROWS], [0.0; TILE_ROWS]);
        for (i, row) in rows.clone().enumerate() {
            alphas[i] = input.alpha[row * heads + head];
            betas[i] = input.beta[row * heads + head];
        }
        for at in (0..rows.len()).step_by(LANES) {
            let lanes = at..at + LANES;
            let step = simd::softplus(s, s.add(s.tail(&alphas[lanes.clone()]), dt_bias));
            s.put_tail(simd::exp(s, s.mul(a, step)), &mut tile.decay[lanes.clone()]);
            s.put_tail(simd::sigmoid(s, s.tail(&betas[lanes.clone()])), &mut tile.gain[lanes]);
        }
    }

    fn skip(&self, _head: usize) -> f32 {
        0.0
    }
}

/// `out = scale x / sqrt(sum x^2 + eps)`
#[inline(always)]
fn unit<S: Simd>(s: S, x: &[f32], eps: f32, scale: f32, out: &mut [f32]) {
    let sum = row_sum(s, x, |acc, x| s.fma(x, x, acc));
    let factor = s.splat(scale / (sum + eps).sqrt());
    let (xs, x_rest) = x.as_chunks::<LANES>();
    let (outs, out_rest) = out.as_chunks_mut::<LANES>();
    for (x, out) in xs.iter().zip(outs) {
        s.put(s.mul(s.chunk(x), factor), out);
    }
    s.put_tail(s.mul(s.tail(x_rest), factor), out_rest);
}
