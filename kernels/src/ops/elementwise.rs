//! Operations on one element at a time.

use super::norm::for_each_row;
use crate::attention::check_len;
use crate::error::Error;
use crate::isa::Isa;
use crate::pool::Pool;
use crate::simd::{self, Kernel, LANES, Simd, dispatch};

/// Elements that one thread takes at a time.
const CHUNK: usize = 4096;

/// Gate activation of an FFN.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// x * sigmoid(x)
    Silu,
    /// GELU in its tanh form.
    GeluTanh,
}

impl Activation {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, x: S::V) -> S::V {
        match self {
            Self::Silu => simd::silu(s, x),
            Self::GeluTanh => simd::gelu_tanh(s, x),
        }
    }
}

/// `out = activation(gate) * up`, element by element.
///
/// # Errors
/// [`Error::Length`] where the three are not of one length.
pub fn gated_activation(
    pool: &Pool,
    isa: Isa,
    activation: Activation,
    gate: &[f32],
    up: &[f32],
    out: &mut [f32],
) -> Result<(), Error> {
    check_len("up", gate.len(), up.len())?;
    check_len("gated output", gate.len(), out.len())?;
    match activation {
        Activation::Silu => map(pool, isa, gate, up, out, Gated(Activation::Silu)),
        Activation::GeluTanh => map(pool, isa, gate, up, out, Gated(Activation::GeluTanh)),
    }
    Ok(())
}

/// `gate = activation(gate) * up`, element by element, in place.
///
/// # Errors
/// [`Error::Length`] where the two are not of one length.
pub fn gate_in_place(
    pool: &Pool,
    isa: Isa,
    activation: Activation,
    gate: &mut [f32],
    up: &[f32],
) -> Result<(), Error> {
    check_len("up", gate.len(), up.len())?;
    match activation {
        Activation::Silu => map(pool, isa, up, &[], gate, GateInPlace(Activation::Silu)),
        Activation::GeluTanh => map(pool, isa, up, &[], gate, GateInPlace(Activation::GeluTanh)),
    }
    Ok(())
}

/// `x += scale * y`
///
/// # Errors
/// [`Error::Length`] where the two are not of one length.
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

/// A function of one element of two inputs and of the old output.
trait Map: Copy + Send + Sync {
    fn at<S: Simd>(self, s: S, a: S::V, b: S::V, old: S::V) -> S::V;
}

#[derive(Clone, Copy)]
struct Gated(Activation);

impl Map for Gated {
    #[inline(always)]
    fn at<S: Simd>(self, s: S, gate: S::V, up: S::V, _old: S::V) -> S::V {
        s.mul(self.0.apply(s, gate), up)
    }
}

#[derive(Clone, Copy)]
struct GateInPlace(Activation);

impl Map for GateInPlace {
    #[inline(always)]
    fn at<S: Simd>(self, s: S, up: S::V, _: S::V, gate: S::V) -> S::V {
        s.mul(self.0.apply(s, gate), up)
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

/// Applies `map` in chunks over the threads. The inputs are as long as the output, or empty where they are not
/// looked at.
fn map<M: Map>(pool: &Pool, isa: Isa, a: &[f32], b: &[f32], out: &mut [f32], map: M) {
    let whole = out.len() / CHUNK * CHUNK;
    let part = |x: &'_ [f32], from: usize, to: usize| -> std::ops::Range<usize> {
        if x.is_empty() { 0..0 } else { from..to }
    };
    let (body, rest) = out.split_at_mut(whole);
    for_each_row(pool, whole / CHUNK, CHUNK, body, |row, out| {
        let (from, to) = (row * CHUNK, (row + 1) * CHUNK);
        dispatch(isa, MapChunk { a: &a[part(a, from, to)], b: &b[part(b, from, to)], out, map });
    });
    let end = whole + rest.len();
    dispatch(isa, MapChunk { a: &a[part(a, whole, end)], b: &b[part(b, whole, end)], out: rest, map });
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
