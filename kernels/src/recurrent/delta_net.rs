//! Gated delta net.

use super::plan::LayerState;
use super::scan::{KeyHeads, Prepared, Rule, Scan, ScanScratch, scan};
use crate::attention::check_len;
use crate::backend::StateKind;
use crate::disjoint::Disjoint;
use crate::error::Error;
use crate::isa::Isa;
use crate::ops::row_sum;
use crate::pool::Pool;
use crate::simd::{self, Kernel, LANES, Simd, dispatch};

/// Below this many inputs a thread is faster alone than woken.
const GRAIN: usize = 8192;

/// Weights and shape of a delta net, beside those of its state.
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

/// What the rows of a step bring.
#[derive(Debug, Clone, Copy)]
pub struct DeltaNetInput<'a> {
    /// `[rows][2 k_heads k_dim + heads v_dim]`: q, k, v of all heads, after the convolution.
    pub qkv: &'a [f32],
    /// `[rows][heads]`, before the sigmoid.
    pub beta: &'a [f32],
    /// `[rows][heads]`, before `dt_bias` and softplus.
    pub alpha: &'a [f32],
}

/// Per head a state S of `[k_dim][v_dim]`, per row, with q and k of unit length and q times `k_dim^-0.5`:
/// `S = exp(a softplus(alpha + dt_bias)) S`, `d = sigmoid(beta) (v - S^T k)`, `S += k d^T`, `out = S^T q`.
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
    let mut prepared = scratch.prepare(rows, heads, net.k_heads, shape.rows);
    prepare(pool, isa, net, input, shape.rows, &mut prepared);
    let values = input.qkv;
    let rule = Rule::DeltaNet;
    let call = Scan { rule, key_heads, prepared, values, value_stride: width, value_offset: keys, out };
    scan(pool, isa, state, call);
    Ok(())
}

/// Keys and queries of unit length, decays and gains of all rows.
fn prepare(
    pool: &Pool,
    isa: Isa,
    net: &DeltaNet<'_>,
    input: &DeltaNetInput<'_>,
    k_dim: usize,
    prepared: &mut Prepared<'_>,
) {
    let heads = net.a.len();
    let rows = input.beta.len() / heads;
    let width = input.qkv.len() / rows.max(1);
    let keys = Disjoint::new(prepared.keys);
    let (decay, gain) = (Disjoint::new(prepared.decay), Disjoint::new(prepared.gain));
    pool.for_each_range(rows, GRAIN.div_ceil(width.max(1)), &|range| {
        for row in range {
            for head in 0..net.k_heads {
                let at = |head: usize| &input.qkv[row * width + head * k_dim..][..k_dim];
                // SAFETY: every row is visited once and has its own place in every key head.
                let pair = unsafe { keys.slice((head * rows + row) * 2 * k_dim, 2 * k_dim) };
                let (key, query) = pair.split_at_mut(k_dim);
                let unit = |x, scale, out| dispatch(isa, Unit { x, eps: net.l2_eps, scale, out });
                unit(at(net.k_heads + head), 1.0, key);
                unit(at(head), 1.0 / (k_dim as f32).sqrt(), query);
            }
            let scalars = row * heads..(row + 1) * heads;
            // SAFETY: every row is visited once.
            let (decay, gain) =
                unsafe { (decay.slice(scalars.start, heads), gain.slice(scalars.start, heads)) };
            let (beta, alpha) = (&input.beta[scalars.clone()], &input.alpha[scalars]);
            dispatch(isa, Gates { net, beta, alpha, decay, gain });
        }
    });
}

/// `out = scale x / sqrt(sum x^2 + eps)`
struct Unit<'a> {
    x: &'a [f32],
    eps: f32,
    scale: f32,
    out: &'a mut [f32],
}

impl Kernel for Unit<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let sum = row_sum(s, self.x, |acc, x| s.fma(x, x, acc));
        let factor = s.splat(self.scale / (sum + self.eps).sqrt());
        let (xs, x_rest) = self.x.as_chunks::<LANES>();
        let (outs, out_rest) = self.out.as_chunks_mut::<LANES>();
        for (x, out) in xs.iter().zip(outs) {
            s.put(s.mul(s.chunk(x), factor), out);
        }
        s.put_tail(s.mul(s.tail(x_rest), factor), out_rest);
    }
}

/// `decay = exp(a softplus(alpha + dt_bias))`, `gain = sigmoid(beta)` for all heads of a row.
struct Gates<'a> {
    net: &'a DeltaNet<'a>,
    beta: &'a [f32],
    alpha: &'a [f32],
    decay: &'a mut [f32],
    gain: &'a mut [f32],
}

impl Kernel for Gates<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let lanes = |x: &[f32], at: usize| s.tail(&x[at..x.len().min(at + LANES)]);
        let heads = self.beta.len();
        for at in (0..heads).step_by(LANES) {
            let step = simd::softplus(s, s.add(lanes(self.alpha, at), lanes(self.net.dt_bias, at)));
            let decay = simd::exp(s, s.mul(lanes(self.net.a, at), step));
            let gain = simd::sigmoid(s, lanes(self.beta, at));
            s.put_tail(decay, &mut self.decay[at..heads.min(at + LANES)]);
            s.put_tail(gain, &mut self.gain[at..heads.min(at + LANES)]);
        }
    }
}
