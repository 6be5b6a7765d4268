//! Rotary position embedding.

use crate::attention::check_len;
use crate::error::Error;
use crate::isa::Isa;
use crate::simd::{Kernel, LANES, Simd, dispatch};

/// The elements of a head that rotate as a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeStyle {
    /// Pairs (2i, 2i + 1).
    Interleaved,
    /// Pairs (i, i + n_rot / 2).
    Half,
}

/// `angle_i(pos) = pos * base^(-2i / n_rot) / factor_i * freq_scale`
#[derive(Debug, Clone, PartialEq)]
pub struct RopeParams {
    pub style: RopeStyle,
    /// Number of elements of a head that rotate; even. The others are unchanged.
    pub n_rot: usize,
    pub base: f32,
    pub freq_scale: f32,
    /// `[n_rot / 2]` divisors of the frequencies.
    pub factors: Option<Vec<f32>>,
    /// Factor of every cosine and sine; 1 except for YaRN.
    pub magnitude: f32,
    /// `[n_rot / 2]` axes, 0 to 2: whose position each pair has. `None`: all have the row's position.
    pub axes: Option<Vec<u8>>,
}

/// Cosines and sines of a [`RopeParams`], computed in f64, for the positions requested so far.
#[derive(Debug)]
pub struct RopeTable {
    style: RopeStyle,
    n_rot: usize,
    magnitude: f64,
    /// Angle per position, for each pair.
    frequencies: Vec<f64>,
    /// `[position][row]`, see `fill`.
    rows: Vec<f32>,
    axes: Option<Vec<u8>>,
}

impl RopeTable {
    /// An empty table.
    ///
    /// # Errors
    /// [`Error::Length`] for an odd `n_rot` or factors of another length than `n_rot / 2`.
    pub fn new(params: &RopeParams) -> Result<Self, Error> {
        let pairs = params.n_rot / 2;
        check_len("rotating elements of a head", pairs * 2, params.n_rot)?;
        if let Some(factors) = &params.factors {
            check_len("rope factors", pairs, factors.len())?;
        }
        if let Some(axes) = &params.axes {
            check_len("rope axes", pairs, axes.len())?;
            if let Some(axis) = axes.iter().find(|axis| **axis > 2) {
                return Err(Error::OutOfRange { what: "rope axis", index: usize::from(*axis), len: 3 });
            }
        }
        let frequency = |i: usize| {
            let exponent = -2.0 * i as f64 / params.n_rot as f64;
            let factor = params.factors.as_ref().map_or(1.0, |factors| f64::from(factors[i]));
            f64::from(params.base).powf(exponent) / factor * f64::from(params.freq_scale)
        };
        Ok(Self {
            style: params.style,
            n_rot: params.n_rot,
            magnitude: f64::from(params.magnitude),
            frequencies: (0..pairs).map(frequency).collect(),
            rows: Vec::new(),
            axes: params.axes.clone(),
        })
    }

    /// Extends the table to at least the positions `0..positions`. Grows by doubling.
    pub fn ensure(&mut self, positions: usize) {
        let held = self.positions();
        if positions > held && self.n_rot > 0 {
            let target = positions.max(2 * held).max(256);
            self.rows.reserve_exact((target - held) * self.row_len());
            for position in held..target {
                self.fill(position);
            }
        }
    }

    /// Elements of a head that rotate.
    pub fn n_rot(&self) -> usize {
        self.n_rot
    }

    fn positions(&self) -> usize {
        self.rows.len().checked_div(self.row_len()).unwrap_or(usize::MAX)
    }

    fn row_len(&self) -> usize {
        match self.style {
            RopeStyle::Half => self.n_rot,
            RopeStyle::Interleaved => 2 * self.n_rot,
        }
    }

    /// Appends a position. `Half`: all cosines, then all sines. `Interleaved`: the factor of each element,
    /// then the factor of each element's partner, so that no lane depends on its parity.
    fn fill(&mut self, position: usize) {
        let magnitude = self.magnitude;
        let angles = self.frequencies.iter().map(|frequency| position as f64 * frequency);
        let cos_sin =
            angles.map(|angle| ((angle.cos() * magnitude) as f32, (angle.sin() * magnitude) as f32));
        match self.style {
            RopeStyle::Half => {
                self.rows.extend(cos_sin.clone().map(|(cos, _)| cos));
                self.rows.extend(cos_sin.map(|(_, sin)| sin));
            }
            RopeStyle::Interleaved => {
                self.rows.extend(cos_sin.clone().flat_map(|(cos, _)| [cos, cos]));
                self.rows.extend(cos_sin.flat_map(|(_, sin)| [-sin, sin]));
            }
        }
    }

    /// Whether pairs have axes.
    pub(crate) fn has_axes(&self) -> bool {
        self.axes.is_some()
    }

    /// Cosines and sines of a position on each axis. `mixed` is the buffer for those of several rows.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a position that [`RopeTable::ensure`] has not added.
    fn at<'a>(&'a self, positions: [usize; 3], mixed: &'a mut Vec<f32>) -> Result<&'a [f32], Error> {
        let rows = [self.row(positions[0])?, self.row(positions[1])?, self.row(positions[2])?];
        let Some(axes) = self.axes.as_ref().filter(|_| positions != [positions[0]; 3]) else {
            return Ok(rows[0]);
        };
        // Values of a pair in each half of a row.
        let run = if self.style == RopeStyle::Half { 1 } else { 2 };
        mixed.clear();
        for half in [0, self.n_rot / 2 * run] {
            for (pair, axis) in axes.iter().enumerate() {
                mixed.extend_from_slice(&rows[usize::from(*axis)][half + pair * run..][..run]);
            }
        }
        Ok(mixed)
    }

    /// # Errors
    /// [`Error::OutOfRange`] for a position that [`RopeTable::ensure`] has not added.
    pub(super) fn row(&self, position: usize) -> Result<&[f32], Error> {
        let len = self.row_len();
        let out_of_range =
            Error::OutOfRange { what: "rope position", index: position, len: self.positions() };
        let start = position.checked_mul(len).ok_or_else(|| out_of_range.clone())?;
        self.rows.get(start..start.saturating_add(len)).ok_or(out_of_range)
    }
}

/// Rotates every head of one row (`[heads][head_dim]`) to `position`.
///
/// # Errors
/// As [`rope_on_axes`].
pub fn rope(
    isa: Isa,
    table: &RopeTable,
    position: usize,
    head_dim: usize,
    row: &mut [f32],
) -> Result<(), Error> {
    rope_on_axes(isa, table, [position; 3], head_dim, row)
}

/// Rotates every head of one row (`[heads][head_dim]`), each pair to the position of its axis. Without axes all have
/// the first position.
///
/// # Errors
/// [`Error::Length`] if the row is not a whole number of heads or a head is narrower than `n_rot`,
/// [`Error::OutOfRange`] for a position that is not in the table.
pub fn rope_on_axes(
    isa: Isa,
    table: &RopeTable,
    positions: [usize; 3],
    head_dim: usize,
    row: &mut [f32],
) -> Result<(), Error> {
    let heads = row.len().checked_div(head_dim).unwrap_or(0);
    check_len("rope row", heads * head_dim, row.len())?;
    if table.n_rot > head_dim {
        return Err(Error::Length { what: "head width", expected: table.n_rot, found: head_dim });
    }
    let mut mixed = Vec::new();
    let angles = table.at(positions, &mut mixed)?;
    dispatch(isa, Rotate { style: table.style, n_rot: table.n_rot, angles, head_dim, row });
    Ok(())
}

/// Rotates every head of a row.
pub(super) struct Rotate<'a> {
    style: RopeStyle,
    n_rot: usize,
    angles: &'a [f32],
    head_dim: usize,
    row: &'a mut [f32],
}

impl Kernel for Rotate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let n = self.n_rot;
        for head in self.row.chunks_exact_mut(self.head_dim) {
            match self.style {
                RopeStyle::Half => {
                    let (cos, sin) = self.angles.split_at(n / 2);
                    let (a, rest) = head.split_at_mut(n / 2);
                    half(s, a, &mut rest[..n / 2], cos, sin);
                }
                RopeStyle::Interleaved => {
                    let (own, partner) = self.angles.split_at(n);
                    interleaved(s, &mut head[..n], own, partner);
                }
            }
        }
    }
}

#[inline(always)]
fn half<S: Simd>(s: S, a: &mut [f32], b: &mut [f32], cos: &[f32], sin: &[f32]) {
    let zero = s.splat(0.0);
    let rotate = |x, y, cos, sin| (s.fma(x, cos, s.mul(y, s.sub(zero, sin))), s.fma(y, cos, s.mul(x, sin)));
    let (a, a_rest) = a.as_chunks_mut::<LANES>();
    let (b, b_rest) = b.as_chunks_mut::<LANES>();
    let (cos, cos_rest) = cos.as_chunks::<LANES>();
    let (sin, sin_rest) = sin.as_chunks::<LANES>();
    for (((a, b), cos), sin) in a.iter_mut().zip(b).zip(cos).zip(sin) {
        let (x, y) = rotate(s.chunk(a), s.chunk(b), s.chunk(cos), s.chunk(sin));
        s.put(x, a);
        s.put(y, b);
    }
    let (x, y) = rotate(s.tail(a_rest), s.tail(b_rest), s.tail(cos_rest), s.tail(sin_rest));
    s.put_tail(x, a_rest);
    s.put_tail(y, b_rest);
}

#[inline(always)]
fn interleaved<S: Simd>(s: S, x: &mut [f32], own: &[f32], partner: &[f32]) {
    let rotate = |x, own, partner| s.fma(x, own, s.mul(s.swap_pairs(x), partner));
    let (xs, x_rest) = x.as_chunks_mut::<LANES>();
    let (own, own_rest) = own.as_chunks::<LANES>();
    let (partner, partner_rest) = partner.as_chunks::<LANES>();
    for ((x, own), partner) in xs.iter_mut().zip(own).zip(partner) {
        s.put(rotate(s.chunk(x), s.chunk(own), s.chunk(partner)), x);
    }
    s.put_tail(rotate(s.tail(x_rest), s.tail(own_rest), s.tail(partner_rest)), x_rest);
}
