//! RMS norm and layer norm.

use crate::attention::check_len;
use crate::disjoint::Disjoint;
use crate::error::Error;
use crate::isa::Isa;
use crate::pool::Pool;
use crate::simd::{Kernel, LANES, Simd, dispatch};

/// x / sqrt(mean(x^2) + eps) * weight
#[derive(Debug, Clone, Copy)]
pub struct RmsNorm<'a> {
    /// `[width]`; none multiplies by one.
    pub weight: Option<&'a [f32]>,
    /// Added to the mean square.
    pub eps: f32,
}

/// (x - mean) / sqrt(variance + eps) * weight + bias
#[derive(Debug, Clone, Copy)]
pub struct LayerNorm<'a> {
    /// `[width]`; none multiplies by one.
    pub weight: Option<&'a [f32]>,
    /// `[width]`; none adds nothing.
    pub bias: Option<&'a [f32]>,
    /// Added to the variance.
    pub eps: f32,
}

/// RMS norm of each row of `x` (`[rows][width]`) into `out`.
///
/// # Errors
/// [`Error::Length`] where `x` is not a whole number of rows, `out` not as long or the weight not one row.
pub fn rms_norm(
    pool: &Pool,
    isa: Isa,
    norm: RmsNorm<'_>,
    width: usize,
    x: &[f32],
    out: &mut [f32],
) -> Result<(), Error> {
    let rows = check_rows(width, x, out)?;
    check_weight("norm weight", norm.weight, width)?;
    for_each_row(pool, rows, width, out, |row, out| {
        dispatch(isa, Rms { norm, x: &x[row * width..(row + 1) * width], out });
    });
    Ok(())
}

/// Adds the RMS norm of each row of `x`, times `scale`, to `residual`: a norm after a mixer or FFN.
///
/// # Errors
/// As [`rms_norm`].
pub fn rms_norm_add(
    pool: &Pool,
    isa: Isa,
    norm: RmsNorm<'_>,
    width: usize,
    x: &[f32],
    scale: f32,
    residual: &mut [f32],
) -> Result<(), Error> {
    let rows = check_rows(width, x, residual)?;
    check_weight("norm weight", norm.weight, width)?;
    for_each_row(pool, rows, width, residual, |row, residual| {
        dispatch(isa, RmsAdd { norm, x: &x[row * width..(row + 1) * width], scale, residual });
    });
    Ok(())
}

/// Layer norm of each row of `x` (`[rows][width]`) into `out`.
///
/// # Errors
/// As [`rms_norm`].
pub fn layer_norm(
    pool: &Pool,
    isa: Isa,
    norm: LayerNorm<'_>,
    width: usize,
    x: &[f32],
    out: &mut [f32],
) -> Result<(), Error> {
    let rows = check_rows(width, x, out)?;
    check_weight("norm weight", norm.weight, width)?;
    check_weight("norm bias", norm.bias, width)?;
    for_each_row(pool, rows, width, out, |row, out| {
        dispatch(isa, Layer { norm, x: &x[row * width..(row + 1) * width], out });
    });
    Ok(())
}

fn check_rows(width: usize, x: &[f32], out: &[f32]) -> Result<usize, Error> {
    let rows = x.len().checked_div(width).unwrap_or(0);
    check_len("rows", rows * width, x.len())?;
    check_len("norm output", x.len(), out.len())?;
    Ok(rows)
}

fn check_weight(what: &'static str, weight: Option<&[f32]>, width: usize) -> Result<(), Error> {
    weight.map_or(Ok(()), |weight| check_len(what, width, weight.len()))
}

/// Gives each row of `out` to one thread.
pub(super) fn for_each_row(
    pool: &Pool,
    rows: usize,
    width: usize,
    out: &mut [f32],
    f: impl Fn(usize, &mut [f32]) + Sync,
) {
    // Below this many elements a thread is faster alone than woken.
    const GRAIN: usize = 4096;
    let out = Disjoint::new(out);
    pool.for_each_range(rows, (GRAIN / width.max(1)).max(1), &|range| {
        for row in range {
            // SAFETY: every row is visited once.
            f(row, unsafe { out.slice(row * width, width) });
        }
    });
}

/// Sum of `f(x)` over a row: four vectors of lanes over chunks of 64, folded as a
/// tree. `f(sum, x)` adds.
#[inline(always)]
pub(crate) fn row_sum<S: Simd>(s: S, x: &[f32], f: impl Fn(S::V, S::V) -> S::V) -> f32 {
    let mut acc = [s.splat(0.0); 4];
    let (whole, rest) = x.as_chunks::<{ 4 * LANES }>();
    for chunk in whole {
        for (acc, x) in acc.iter_mut().zip(chunk.as_chunks::<LANES>().0) {
            *acc = f(*acc, s.chunk(x));
        }
    }
    for (acc, x) in acc.iter_mut().zip(rest.chunks(LANES)) {
        *acc = s.keep_lanes(f(*acc, s.tail(x)), 0, x.len(), *acc);
    }
    s.reduce_add(s.add(s.add(acc[0], acc[1]), s.add(acc[2], acc[3])))
}

/// 1 / sqrt(mean(x^2) + eps)
#[inline(always)]
fn rms_factor<S: Simd>(s: S, x: &[f32], eps: f32) -> f32 {
    let sum = row_sum(s, x, |acc, x| s.fma(x, x, acc));
    1.0 / (sum / x.len() as f32 + eps).sqrt()
}

/// Calls `f(x, weight or one, chunk of out)` for each chunk of a row; the last one may be short.
#[inline(always)]
fn weighted<S: Simd>(
    s: S,
    x: &[f32],
    weight: Option<&[f32]>,
    out: &mut [f32],
    f: impl Fn(S::V, S::V, S::V) -> S::V,
) {
    let one = s.splat(1.0);
    let (xs, x_rest) = x.as_chunks::<LANES>();
    let (outs, out_rest) = out.as_chunks_mut::<LANES>();
    let (ws, w_rest) = weight.unwrap_or_default().as_chunks::<LANES>();
    for (i, (x, out)) in xs.iter().zip(outs).enumerate() {
        let w = ws.get(i).map_or(one, |w| s.chunk(w));
        s.put(f(s.chunk(x), w, s.chunk(out)), out);
    }
    let w = if weight.is_some() { s.tail(w_rest) } else { one };
    s.put_tail(f(s.tail(x_rest), w, s.tail(out_rest)), out_rest);
}

/// RMS norm of one row.
pub(super) struct Rms<'a> {
    pub(super) norm: RmsNorm<'a>,
    pub(super) x: &'a [f32],
    pub(super) out: &'a mut [f32],
}

impl Kernel for Rms<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let factor = s.splat(rms_factor(s, self.x, self.norm.eps));
        weighted(s, self.x, self.norm.weight, self.out, |x, w, _| s.mul(s.mul(x, factor), w));
    }
}

struct RmsAdd<'a> {
    norm: RmsNorm<'a>,
    x: &'a [f32],
    scale: f32,
    residual: &'a mut [f32],
}

impl Kernel for RmsAdd<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let factor = s.splat(rms_factor(s, self.x, self.norm.eps));
        let scale = s.splat(self.scale);
        weighted(s, self.x, self.norm.weight, self.residual, |x, w, residual| {
            s.fma(s.mul(s.mul(x, factor), w), scale, residual)
        });
    }
}

/// RMS norm of one row in its own place.
pub(super) struct RmsInPlace<'a> {
    pub(super) norm: RmsNorm<'a>,
    pub(super) x: &'a mut [f32],
}

impl Kernel for RmsInPlace<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let factor = s.splat(rms_factor(s, self.x, self.norm.eps));
        let one = s.splat(1.0);
        let (xs, rest) = self.x.as_chunks_mut::<LANES>();
        let (ws, w_rest) = self.norm.weight.unwrap_or_default().as_chunks::<LANES>();
        for (i, x) in xs.iter_mut().enumerate() {
            let w = ws.get(i).map_or(one, |w| s.chunk(w));
            s.put(s.mul(s.mul(s.chunk(x), factor), w), x);
        }
        let w = if self.norm.weight.is_some() { s.tail(w_rest) } else { one };
        s.put_tail(s.mul(s.mul(s.tail(rest), factor), w), rest);
    }
}

struct Layer<'a> {
    norm: LayerNorm<'a>,
    x: &'a [f32],
    out: &'a mut [f32],
}

impl Kernel for Layer<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let width = self.x.len();
        let mean = row_sum(s, self.x, |acc, x| s.add(acc, x)) / width as f32;
        let center = s.splat(mean);
        let squares = row_sum(s, self.x, |acc, x| {
            let d = s.sub(x, center);
            s.fma(d, d, acc)
        });
        let variance = squares / width as f32;
        let factor = s.splat(1.0 / (variance + self.norm.eps).sqrt());
        weighted(s, self.x, self.norm.weight, self.out, |x, w, _| s.mul(s.mul(s.sub(x, center), factor), w));
        if let Some(bias) = self.norm.bias {
            let (outs, out_rest) = self.out.as_chunks_mut::<LANES>();
            let (bs, b_rest) = bias.as_chunks::<LANES>();
            for (out, b) in outs.iter_mut().zip(bs) {
                s.put(s.add(s.chunk(out), s.chunk(b)), out);
            }
            s.put_tail(s.add(s.tail(out_rest), s.tail(b_rest)), out_rest);
        }
    }
}
