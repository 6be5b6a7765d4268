//! Products with two thin matrices, added to a row.

use super::norm::row_product;
use crate::attention::check_len;
use crate::error::Error;
use crate::isa::Isa;
use crate::simd::{Kernel, LANES, Simd, dispatch};

/// `scale * B (A x)`.
#[derive(Debug, Clone, PartialEq)]
pub struct LowRank {
    rank: usize,
    scale: f32,
    /// `[rank][cols]`
    a: Vec<f32>,
    /// `[rank][rows]`, so that the outputs of a row are consecutive.
    b: Vec<f32>,
    rows: usize,
    cols: usize,
}

impl LowRank {
    /// `a` is `[rank][cols]`, `b` is `[rows][rank]`.
    ///
    /// # Errors
    /// [`Error::Length`] if a length does not fit.
    pub fn new(
        rank: usize,
        (rows, cols): (usize, usize),
        scale: f32,
        a: &[f32],
        b: &[f32],
    ) -> Result<Self, Error> {
        check_len("A of an adapter", rank.saturating_mul(cols), a.len())?;
        check_len("B of an adapter", rank.saturating_mul(rows), b.len())?;
        let upright = (0..rank).flat_map(|j| (0..rows).map(move |i| b[i * rank + j])).collect();
        Ok(Self { rank, scale, a: a.to_vec(), b: upright, rows, cols })
    }

    pub fn bytes(&self) -> usize {
        4 * (self.a.len() + self.b.len())
    }

    /// `out += scale * B (A x)`, on the calling thread. Sums over `x` are in the order of the norms, sums over the
    /// rank from the first to the last.
    ///
    /// # Errors
    /// [`Error::Length`] if `x` or `out` has another width.
    pub fn add_row(&self, isa: Isa, x: &[f32], out: &mut [f32]) -> Result<(), Error> {
        check_len("input of an adapter", self.cols, x.len())?;
        check_len("output of an adapter", self.rows, out.len())?;
        dispatch(isa, AddRow { of: self, x, out });
        Ok(())
    }
}

struct AddRow<'a> {
    of: &'a LowRank,
    x: &'a [f32],
    out: &'a mut [f32],
}

/// Ranks whose inner values are on the stack at a time.
const PIECE: usize = 64;
/// Vectors of outputs that are summed at a time.
const COLUMNS: usize = 4;

impl Kernel for AddRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { of, x, out } = self;
        let mut inner = [0.0; PIECE];
        for from in (0..of.rank).step_by(PIECE) {
            let inner = &mut inner[..PIECE.min(of.rank - from)];
            for (j, value) in inner.iter_mut().enumerate() {
                let a = &of.a[(from + j) * of.cols..][..of.cols];
                *value = of.scale * row_product(s, a, x);
            }
            let b = |j: usize| &of.b[(from + j) * of.rows..][..of.rows];
            let (chunks, rest) = out.as_chunks_mut::<{ COLUMNS * LANES }>();
            for (at, chunk) in chunks.iter_mut().enumerate() {
                let mut sums = [s.splat(0.0); COLUMNS];
                for (j, value) in inner.iter().enumerate() {
                    let (value, b) = (s.splat(*value), &b(j)[at * COLUMNS * LANES..][..COLUMNS * LANES]);
                    for (sum, b) in sums.iter_mut().zip(b.as_chunks::<LANES>().0) {
                        *sum = s.fma(value, s.chunk(b), *sum);
                    }
                }
                for (sum, out) in sums.iter().zip(chunk.as_chunks_mut::<LANES>().0) {
                    s.put(s.add(s.chunk(out), *sum), out);
                }
            }
            let done = chunks.len() * COLUMNS * LANES;
            for (at, chunk) in rest.chunks_mut(LANES).enumerate() {
                let start = done + at * LANES;
                let mut sum = s.splat(0.0);
                for (j, value) in inner.iter().enumerate() {
                    sum = s.fma(s.splat(*value), s.tail(&b(j)[start..start + chunk.len()]), sum);
                }
                s.put_tail(s.add(s.tail(chunk), sum), chunk);
            }
        }
    }
}
