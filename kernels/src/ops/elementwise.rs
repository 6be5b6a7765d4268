//! Elementwise operations.

use super::norm::for_each_row;
use crate::attention::check_len;
use crate::error::Error;
use crate::isa::Isa;
use crate::pool::Pool;
use crate::simd::{self, Kernel, LANES, Simd, dispatch};

/// Elements per work item.
const CHUNK: usize = 4096;

/// A function of one value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    Silu,
    /// GELU in its tanh form.
    GeluTanh,
    /// GELU by the error function.
    GeluErf,
    /// 1 / (1 + e^-x)
    Sigmoid,
    /// max(x, 0)^2
    ReluSquared,
    /// x
    Identity,
}

impl Activation {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, x: S::V) -> S::V {
        match self {
            Self::Silu => simd::silu(s, x),
            Self::GeluTanh => simd::gelu_tanh(s, x),
            Self::GeluErf => simd::gelu_erf(s, x),
            Self::Sigmoid => simd::sigmoid(s, x),
            Self::ReluSquared => {
                // NaN stays NaN.
                let positive = s.max(s.splat(0.0), x);
                s.mul(positive, positive)
            }
            Self::Identity => x,
        }
    }
}

/// Combines a gate and the value that it gates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gating {
    By(Activation),
    /// `g sigmoid(1.702 g) (u + 1)` with `g = min(gate, 7)` and `u = clamp(up, -7, 7)`
    ClampedSwiglu,
}

impl Gating {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, gate: S::V, up: S::V) -> S::V {
        match self {
            Self::By(activation) => s.mul(activation.apply(s, gate), up),
            Self::ClampedSwiglu => simd::clamped_swiglu(s, gate, up),
        }
    }
}

/// A range of columns of a row-major matrix.
#[derive(Debug, Clone, Copy)]
pub struct Columns<'a> {
    /// `[rows][width]`
    pub values: &'a [f32],
    /// Columns of the whole matrix.
    pub width: usize,
    /// First column of the range.
    pub from: usize,
    pub len: usize,
}

/// `out = gating(gate, up)`, element by element, on the calling thread.
///
/// # Errors
/// [`Error::Length`] if the three lengths differ.
pub fn gated_row(isa: Isa, gating: Gating, gate: &[f32], up: &[f32], out: &mut [f32]) -> Result<(), Error> {
    check_len("gate", out.len(), gate.len())?;
    check_len("up", out.len(), up.len())?;
    dispatch(isa, MapChunk { a: gate, b: up, out, map: Gated(gating) });
    Ok(())
}

/// `out = scale * sum of weight * row (+ out)`, rows in order, on the calling thread.
///
/// # Errors
/// [`Error::Length`] if a row and `out` differ in length.
pub fn weighted_sum(
    isa: Isa,
    rows: &[(&[f32], f32)],
    scale: f32,
    accumulate: bool,
    out: &mut [f32],
) -> Result<(), Error> {
    for (row, _) in rows {
        check_len("row of a weighted sum", out.len(), row.len())?;
    }
    dispatch(isa, WeightedSum { rows, scale, accumulate, out });
    Ok(())
}

/// `gate = gating(gate, up)`, element by element, in place; `gate` is `[rows][columns]`.
///
/// # Errors
/// [`Error::Length`] if `up` has other columns or rows.
pub fn gate_in_place(
    pool: &Pool,
    isa: Isa,
    gating: Gating,
    gate: &mut [f32],
    up: Columns<'_>,
) -> Result<(), Error> {
    let rows = gate.len().checked_div(up.len).unwrap_or(0);
    check_len("gate", rows * up.len, gate.len())?;
    up.check("up", rows, up.len)?;
    if up.len == up.width {
        map(pool, isa, up.values, &[], gate, GateInPlace(gating));
    } else {
        for_each_row(pool, rows, up.len, gate, |row, out| {
            dispatch(isa, MapChunk { a: up.row(row), b: &[], out, map: GateInPlace(gating) });
        });
    }
    Ok(())
}

impl<'a> Columns<'a> {
    /// All columns of a matrix of width `width`.
    pub fn all(values: &'a [f32], width: usize) -> Self {
        Self { values, width, from: 0, len: width }
    }

    fn check(&self, what: &'static str, rows: usize, len: usize) -> Result<(), Error> {
        check_len(what, len, self.len)?;
        check_len(what, rows * self.width, self.values.len())?;
        match self.from.checked_add(self.len) {
            Some(end) if end <= self.width => Ok(()),
            _ => Err(Error::OutOfRange { what, index: self.from.saturating_add(self.len), len: self.width }),
        }
    }

    fn row(&self, row: usize) -> &'a [f32] {
        &self.values[row * self.width + self.from..][..self.len]
    }
}

/// `x = activation(x)`, element by element.
pub fn activate(pool: &Pool, isa: Isa, activation: Activation, x: &mut [f32]) {
    map(pool, isa, &[], &[], x, Alone(activation));
}

/// Multiplies each row of `x` (`[rows][width]`) by the sigmoid of the first column of `gates`.
///
/// # Errors
/// [`Error::Length`] if `gates` has another number of rows or no column.
pub fn scale_rows(
    pool: &Pool,
    isa: Isa,
    width: usize,
    x: &mut [f32],
    gates: Columns<'_>,
) -> Result<(), Error> {
    let rows = x.len().checked_div(width).unwrap_or(0);
    check_len("rows to scale", rows * width, x.len())?;
    gates.check("row gates", rows, 1)?;
    for_each_row(pool, rows, width, x, |row, x| {
        dispatch(isa, ScaleRow { x, gate: gates.row(row)[0] });
    });
    Ok(())
}

/// `x += scale * y`
///
/// # Errors
/// [`Error::Length`] if the lengths differ.
pub fn add_scaled(pool: &Pool, isa: Isa, x: &mut [f32], scale: f32, y: &[f32]) -> Result<(), Error> {
    check_len("addend", x.len(), y.len())?;
    map(pool, isa, y, y, x, AddScaled(scale));
    Ok(())
}

/// `x *= factor`
pub fn scale(pool: &Pool, isa: Isa, x: &mut [f32], factor: f32) {
    map(pool, isa, &[], &[], x, Scale(factor));
}

/// `x = cap * tanh(x / cap)`
pub fn softcap(pool: &Pool, isa: Isa, x: &mut [f32], cap: f32) {
    map(pool, isa, &[], &[], x, Softcap(cap));
}

/// A function of an element of each of two inputs and of the old output.
trait Map: Copy + Send + Sync {
    fn at<S: Simd>(self, s: S, a: S::V, b: S::V, old: S::V) -> S::V;
}

#[derive(Clone, Copy)]
struct Gated(Gating);

impl Map for Gated {
    #[inline(always)]
    fn at<S: Simd>(self, s: S, gate: S::V, up: S::V, _old: S::V) -> S::V {
        self.0.apply(s, gate, up)
    }
}

#[derive(Clone, Copy)]
struct GateInPlace(Gating);

impl Map for GateInPlace {
    #[inline(always)]
    fn at<S: Simd>(self, s: S, up: S::V, _: S::V, gate: S::V) -> S::V {
        self.0.apply(s, gate, up)
    }
}

#[derive(Clone, Copy)]
struct Alone(Activation);

impl Map for Alone {
    #[inline(always)]
    fn at<S: Simd>(self, s: S, _: S::V, _: S::V, x: S::V) -> S::V {
        self.0.apply(s, x)
    }
}

#[derive(Clone, Copy)]
struct AddScaled(f32);

impl Map for AddScaled {
    #[inline(always)]
    fn at<S: Simd>(self, s: S, y: S::V, _: S::V, x: S::V) -> S::V {
        s.fma(y, s.splat(self.0), x)
    }
}

#[derive(Clone, Copy)]
struct Scale(f32);

impl Map for Scale {
    #[inline(always)]
    fn at<S: Simd>(self, s: S, _: S::V, _: S::V, x: S::V) -> S::V {
        s.mul(x, s.splat(self.0))
    }
}

#[derive(Clone, Copy)]
struct Softcap(f32);

impl Map for Softcap {
    #[inline(always)]
    fn at<S: Simd>(self, s: S, _: S::V, _: S::V, x: S::V) -> S::V {
        simd::softcap(s, x, s.splat(self.0), s.splat(1.0 / self.0))
    }
}

/// Applies `map` in chunks over the threads. An input has the length of the output, or is empty if `map`
/// ignores it.
fn map<M: Map>(pool: &Pool, isa: Isa, a: &[f32], b: &[f32], out: &mut [f32], map: M) {
    let whole = out.len() / CHUNK * CHUNK;
    let subrange = |x: &'_ [f32], from: usize, to: usize| -> std::ops::Range<usize> {
        if x.is_empty() { 0..0 } else { from..to }
    };
    let (body, rest) = out.split_at_mut(whole);
    for_each_row(pool, whole / CHUNK, CHUNK, body, |row, out| {
        let (from, to) = (row * CHUNK, (row + 1) * CHUNK);
        dispatch(isa, MapChunk { a: &a[subrange(a, from, to)], b: &b[subrange(b, from, to)], out, map });
    });
    let end = whole + rest.len();
    dispatch(
        isa,
        MapChunk { a: &a[subrange(a, whole, end)], b: &b[subrange(b, whole, end)], out: rest, map },
    );
}

struct MapChunk<'a, M> {
    a: &'a [f32],
    b: &'a [f32],
    out: &'a mut [f32],
    map: M,
}

impl<M: Map> Kernel for MapChunk<'_, M> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (a, a_rest) = self.a.as_chunks::<LANES>();
        let (b, b_rest) = self.b.as_chunks::<LANES>();
        let (out, out_rest) = self.out.as_chunks_mut::<LANES>();
        let zero = s.splat(0.0);
        for (i, out) in out.iter_mut().enumerate() {
            let a = a.get(i).map_or(zero, |a| s.chunk(a));
            let b = b.get(i).map_or(zero, |b| s.chunk(b));
            s.put(self.map.at(s, a, b, s.chunk(out)), out);
        }
        s.put_tail(self.map.at(s, s.tail(a_rest), s.tail(b_rest), s.tail(out_rest)), out_rest);
    }
}

/// `x *= sigmoid(gate)`
struct ScaleRow<'a> {
    x: &'a mut [f32],
    gate: f32,
}

impl Kernel for ScaleRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let factor = simd::sigmoid(s, s.splat(self.gate));
        let (xs, rest) = self.x.as_chunks_mut::<LANES>();
        for x in xs {
            s.put(s.mul(s.chunk(x), factor), x);
        }
        s.put_tail(s.mul(s.tail(rest), factor), rest);
    }
}

struct WeightedSum<'a> {
    rows: &'a [(&'a [f32], f32)],
    scale: f32,
    accumulate: bool,
    out: &'a mut [f32],
}

impl Kernel for WeightedSum<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (zero, scale) = (s.splat(0.0), s.splat(self.scale));
        for (i, out) in self.out.chunks_mut(LANES).enumerate() {
            let mut sum = zero;
            for (row, weight) in self.rows {
                let row = &row[i * LANES..];
                sum = s.fma(s.tail(&row[..out.len()]), s.splat(*weight), sum);
            }
            let before = if self.accumulate { s.tail(out) } else { zero };
            s.put_tail(s.fma(sum, scale, before), out);
        }
    }
}
