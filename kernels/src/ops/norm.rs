//! RMS norm and layer norm.

use crate::attention::check_len;
use crate::disjoint::Disjoint;
use crate::error::Error;
use crate::isa::Isa;
use crate::pool::Pool;
use crate::simd::{Kernel, LANES, Simd, dispatch};

/// x / sqrt(mean(x^2) + eps) * weight, for each run of `width` elements.
#[derive(Debug, Clone, Copy)]
pub struct RmsNorm<'a> {
    pub width: usize,
    /// Weight of one run, or of several runs, which the runs of a row use in turn. `None`: no weight.
    pub weight: Option<&'a [f32]>,
    /// Added to the mean square.
    pub eps: f32,
}

/// (x - mean) / sqrt(variance + eps) * weight + bias, for each run of `width` elements.
#[derive(Debug, Clone, Copy)]
pub struct LayerNorm<'a> {
    pub width: usize,
    /// As for [`RmsNorm`].
    pub weight: Option<&'a [f32]>,
    /// Same lengths as a weight. `None`: no bias.
    pub bias: Option<&'a [f32]>,
    pub eps: f32,
}

impl RmsNorm<'_> {
    /// # Errors
    /// [`Error::Length`] if `len` is not a multiple of the width, or not a multiple of the weight's length.
    pub(super) fn check(&self, len: usize) -> Result<(), Error> {
        check_runs("norm input", self.width, len)?;
        check_affine("norm weight", self.weight, self.width, len)
    }

    /// The norm for run number `run`, with that run's weights.
    #[inline(always)]
    pub(super) fn of_run(self, run: usize) -> Self {
        Self { weight: values_of_run(self.weight, self.width, run), ..self }
    }
}

impl LayerNorm<'_> {
    fn check(&self, len: usize) -> Result<(), Error> {
        check_runs("norm input", self.width, len)?;
        check_affine("norm weight", self.weight, self.width, len)?;
        check_affine("norm bias", self.bias, self.width, len)
    }

    #[inline(always)]
    fn of_run(self, run: usize) -> Self {
        Self {
            weight: values_of_run(self.weight, self.width, run),
            bias: values_of_run(self.bias, self.width, run),
            ..self
        }
    }
}

/// The values of a weight or bias that belong to run `run`.
#[inline(always)]
fn values_of_run(values: Option<&[f32]>, width: usize, run: usize) -> Option<&[f32]> {
    values.map(|values| &values[run % (values.len() / width) * width..][..width])
}

/// RMS norm of each run of `x` into `out`.
///
/// # Errors
/// [`Error::Length`] if `x` is not a whole number of runs, `out` has another length, or the weight's length
/// does not fit.
pub fn rms_norm(pool: &Pool, isa: Isa, norm: RmsNorm<'_>, x: &[f32], out: &mut [f32]) -> Result<(), Error> {
    norm.check(x.len())?;
    check_len("norm output", x.len(), out.len())?;
    let width = norm.width;
    for_each_row(pool, x.len() / width, width, out, |run, out| {
        out.copy_from_slice(&x[run * width..(run + 1) * width]);
        dispatch(isa, Rms { norm: norm.of_run(run), x: out });
    });
    Ok(())
}

/// RMS norm of each run of `x`, in place.
///
/// # Errors
/// As [`rms_norm`].
pub fn rms_norm_in_place(pool: &Pool, isa: Isa, norm: RmsNorm<'_>, x: &mut [f32]) -> Result<(), Error> {
    norm.check(x.len())?;
    for_each_row(pool, x.len() / norm.width, norm.width, x, |run, x| {
        dispatch(isa, Rms { norm: norm.of_run(run), x });
    });
    Ok(())
}

/// Adds `scale` times the RMS norm of each run of `x` to `residual`: a norm after a mixer or FFN.
///
/// # Errors
/// As [`rms_norm`].
pub fn rms_norm_add(
    pool: &Pool,
    isa: Isa,
    norm: RmsNorm<'_>,
    x: &[f32],
    scale: f32,
    residual: &mut [f32],
) -> Result<(), Error> {
    norm.check(x.len())?;
    check_len("residual", x.len(), residual.len())?;
    let width = norm.width;
    for_each_row(pool, x.len() / width, width, residual, |run, residual| {
        dispatch(
            isa,
            RmsAdd { norm: norm.of_run(run), x: &x[run * width..(run + 1) * width], scale, residual },
        );
    });
    Ok(())
}

/// Layer norm of each run of `x` into `out`.
///
/// # Errors
/// As [`rms_norm`].
pub fn layer_norm(
    pool: &Pool,
    isa: Isa,
    norm: LayerNorm<'_>,
    x: &[f32],
    out: &mut [f32],
) -> Result<(), Error> {
    norm.check(x.len())?;
    check_len("norm output", x.len(), out.len())?;
    let width = norm.width;
    for_each_row(pool, x.len() / width, width, out, |run, out| {
        out.copy_from_slice(&x[run * width..(run + 1) * width]);
        dispatch(isa, Layer { norm: norm.of_run(run), x: out });
    });
    Ok(())
}

/// Layer norm of each run of `x`, in place.
///
/// # Errors
/// As [`rms_norm`].
pub fn layer_norm_in_place(pool: &Pool, isa: Isa, norm: LayerNorm<'_>, x: &mut [f32]) -> Result<(), Error> {
    norm.check(x.len())?;
    for_each_row(pool, x.len() / norm.width, norm.width, x, |run, x| {
        dispatch(isa, Layer { norm: norm.of_run(run), x });
    });
    Ok(())
}

fn check_runs(what: &'static str, width: usize, len: usize) -> Result<(), Error> {
    check_len(what, len.checked_div(width).unwrap_or(0) * width, len)
}

fn check_affine(what: &'static str, values: Option<&[f32]>, width: usize, len: usize) -> Result<(), Error> {
    match values {
        Some(values) if values.is_empty() || !values.len().is_multiple_of(width) => {
            Err(Error::Length { what, expected: width, found: values.len() })
        }
        Some(values) => check_runs(what, values.len(), len),
        None => Ok(()),
    }
}

/// Calls `f` for each row of `out`, rows distributed over the threads.
pub(super) fn for_each_row(
    pool: &Pool,
    rows: usize,
    width: usize,
    out: &mut [f32],
    f: impl Fn(usize, &mut [f32]) + Sync,
) {
    // Below this number of elements the calling thread alone is faster than waking other threads.
    const GRAIN: usize = 4096;
    let out = Disjoint::new(out);
    pool.for_each_range(rows, (GRAIN / width.max(1)).max(1), &|range| {
        for row in range {
            // SAFETY: every row is visited once.
            f(row, unsafe { out.slice(row * width, width) });
        }
    });
}

/// Sum over a row: four vectors of partial sums over chunks of 64 elements, combined as a tree. `f(sum, x)`
/// adds an element.
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

/// Sum of `a * x` over two rows of one length, in the order of [`row_sum`].
#[inline(always)]
pub(super) fn row_product<S: Simd>(s: S, a: &[f32], x: &[f32]) -> f32 {
    let mut acc = [s.splat(0.0); 4];
    let (a_whole, a_rest) = a.as_chunks::<{ 4 * LANES }>();
    let (x_whole, x_rest) = x.as_chunks::<{ 4 * LANES }>();
    for (a, x) in a_whole.iter().zip(x_whole) {
        let pairs = a.as_chunks::<LANES>().0.iter().zip(x.as_chunks::<LANES>().0);
        for (acc, (a, x)) in acc.iter_mut().zip(pairs) {
            *acc = s.fma(s.chunk(a), s.chunk(x), *acc);
        }
    }
    // The lanes behind the end are zero.
    for (acc, (a, x)) in acc.iter_mut().zip(a_rest.chunks(LANES).zip(x_rest.chunks(LANES))) {
        *acc = s.fma(s.tail(a), s.tail(x), *acc);
    }
    s.reduce_add(s.add(s.add(acc[0], acc[1]), s.add(acc[2], acc[3])))
}

/// 1 / sqrt(mean(x^2) + eps)
#[inline(always)]
fn rms_factor<S: Simd>(s: S, x: &[f32], eps: f32) -> f32 {
    let sum = row_sum(s, x, |acc, x| s.fma(x, x, acc));
    1.0 / (sum / x.len() as f32 + eps).sqrt()
}

/// RMS norm of one run, in place.
pub(super) struct Rms<'a> {
    pub(super) norm: RmsNorm<'a>,
    pub(super) x: &'a mut [f32],
}

impl Kernel for Rms<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let factor = s.splat(rms_factor(s, self.x, self.norm.eps));
        let weights = Affine::new(self.norm.weight);
        let (xs, rest) = self.x.as_chunks_mut::<LANES>();
        for (i, x) in xs.iter_mut().enumerate() {
            s.put(s.mul(s.mul(s.chunk(x), factor), weights.chunk(s, i, 1.0)), x);
        }
        s.put_tail(s.mul(s.mul(s.tail(rest), factor), weights.tail(s, 1.0)), rest);
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
        let weights = Affine::new(self.norm.weight);
        let add = |x, w, residual| s.fma(s.mul(s.mul(x, factor), w), scale, residual);
        let (xs, x_rest) = self.x.as_chunks::<LANES>();
        let (residuals, rest) = self.residual.as_chunks_mut::<LANES>();
        for (i, (x, residual)) in xs.iter().zip(residuals).enumerate() {
            s.put(add(s.chunk(x), weights.chunk(s, i, 1.0), s.chunk(residual)), residual);
        }
        s.put_tail(add(s.tail(x_rest), weights.tail(s, 1.0), s.tail(rest)), rest);
    }
}

/// Layer norm of one run, in place.
struct Layer<'a> {
    norm: LayerNorm<'a>,
    x: &'a mut [f32],
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
        let (weights, biases) = (Affine::new(self.norm.weight), Affine::new(self.norm.bias));
        let at = |x, w, b| s.add(s.mul(s.mul(s.sub(x, center), factor), w), b);
        let (xs, rest) = self.x.as_chunks_mut::<LANES>();
        for (i, x) in xs.iter_mut().enumerate() {
            s.put(at(s.chunk(x), weights.chunk(s, i, 1.0), biases.chunk(s, i, 0.0)), x);
        }
        s.put_tail(at(s.tail(rest), weights.tail(s, 1.0), biases.tail(s, 0.0)), rest);
    }
}

/// A weight or bias of one run as vectors. Without values, every element is the default that the reader
/// passes.
struct Affine<'a> {
    chunks: &'a [[f32; LANES]],
    /// Elements after the last whole vector. `None`: no values.
    rest: Option<&'a [f32]>,
}

impl<'a> Affine<'a> {
    #[inline(always)]
    fn new(values: Option<&'a [f32]>) -> Self {
        let (chunks, rest) = values.unwrap_or_default().as_chunks::<LANES>();
        Self { chunks, rest: values.map(|_| rest) }
    }

    #[inline(always)]
    fn chunk<S: Simd>(&self, s: S, index: usize, default: f32) -> S::V {
        self.chunks.get(index).map_or(s.splat(default), |chunk| s.chunk(chunk))
    }

    #[inline(always)]
    fn tail<S: Simd>(&self, s: S, default: f32) -> S::V {
        self.rest.map_or(s.splat(default), |rest| s.tail(rest))
    }
}
