//! Mamba-2.

use super::plan::LayerState;
use super::scan::{KeyHeads, Prepared, Rule, Scan, ScanScratch, scan};
use crate::attention::check_len;
use crate::backend::StateKind;
use crate::disjoint::Disjoint;
use crate::error::Error;
use crate::isa::Isa;
use crate::pool::Pool;
use crate::simd::{self, Kernel, LANES, Simd, dispatch};

/// Below this many inputs a thread is faster alone than woken.
const GRAIN: usize = 8192;

/// Weights and shape of a Mamba-2 layer, beside those of its state.
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

/// What the rows of a step bring.
#[derive(Debug, Clone, Copy)]
pub struct Mamba2Input<'a> {
    /// `[rows][heads head_dim + 2 groups state]`: x, B of all groups, C of all groups, after the convolution.
    pub xbc: &'a [f32],
    /// `[rows][heads]`, before `dt_bias` and softplus.
    pub dt: &'a [f32],
}

/// Per head a state S of `[head_dim][state]`, per row, with `dt = softplus(dt + dt_bias)`:
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
    let mut prepared = scratch.prepare(rows, heads, net.groups, shape.cols);
    prepare(pool, isa, net, input, shape.cols, &mut prepared);
    let (values, rule) = (input.xbc, Rule::Mamba2(net.d));
    let call = Scan { rule, key_heads, prepared, values, value_stride: width, value_offset: 0, out };
    scan(pool, isa, state, call);
    Ok(())
}

/// B and C in the order of the scan, decays and gains of all rows.
fn prepare(
    pool: &Pool,
    isa: Isa,
    net: &Mamba2<'_>,
    input: &Mamba2Input<'_>,
    state: usize,
    prepared: &mut Prepared<'_>,
) {
    let heads = net.a.len();
    let rows = input.dt.len() / heads;
    let width = input.xbc.len() / rows.max(1);
    let keys = Disjoint::new(prepared.keys);
    let (decay, gain) = (Disjoint::new(prepared.decay), Disjoint::new(prepared.gain));
    pool.for_each_range(rows, GRAIN.div_ceil(heads + 2 * net.groups * state), &|range| {
        for row in range {
            let bc = &input.xbc[(row + 1) * width - 2 * net.groups * state..(row + 1) * width];
            for group in 0..net.groups {
                // SAFETY: every row is visited once and has its own place in every group.
                let pair = unsafe { keys.slice((group * rows + row) * 2 * state, 2 * state) };
                let (b, c) = pair.split_at_mut(state);
                b.copy_from_slice(&bc[group * state..][..state]);
                c.copy_from_slice(&bc[(net.groups + group) * state..][..state]);
            }
            let scalars = row * heads..(row + 1) * heads;
            // SAFETY: every row is visited once.
            let (decay, gain) =
                unsafe { (decay.slice(scalars.start, heads), gain.slice(scalars.start, heads)) };
            dispatch(isa, Steps { net, dt: &input.dt[scalars], decay, gain });
        }
    });
}

/// `gain = softplus(dt + dt_bias)`, `decay = exp(a gain)` for all heads of a row.
struct Steps<'a> {
    net: &'a Mamba2<'a>,
    dt: &'a [f32],
    decay: &'a mut [f32],
    gain: &'a mut [f32],
}

impl Kernel for Steps<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let lanes = |x: &[f32], at: usize| s.tail(&x[at..x.len().min(at + LANES)]);
        let heads = self.dt.len();
        for at in (0..heads).step_by(LANES) {
            let gain = simd::softplus(s, s.add(lanes(self.dt, at), lanes(self.net.dt_bias, at)));
            let decay = simd::exp(s, s.mul(lanes(self.net.a, at), gain));
            s.put_tail(gain, &mut self.gain[at..heads.min(at + LANES)]);
            s.put_tail(decay, &mut self.decay[at..heads.min(at + LANES)]);
        }
    }
}
