//! One tile of keys against a few rows: scores, softmax, values.
//!
//! This module fixes the order of a row's arithmetic, independent of other rows. A score is a chain of fused
//! multiply-adds over ascending elements. The sixteen lanes of a tile's weights are summed lane by lane over
//! ascending groups. A result element is a chain over ascending keys. Keys that a row does not see have
//! weight zero, which changes only the sign of a zero; the last operation on a row makes that sign unique.

use std::marker::PhantomData;

use super::format::Format;
use super::layout::GROUP;
use super::plan::TILE;
use crate::aligned::CACHE_LINE;
use crate::simd::{Kernel, LANES, Simd, exp, softcap};

pub(super) const TILE_GROUPS: usize = TILE / GROUP;

/// Addresses of the groups of a tile. Entries for groups that no row sees are not read.
#[derive(Clone, Copy)]
pub(super) struct TileGroups {
    pub(super) k: [*const u8; TILE_GROUPS],
    pub(super) v: [*const u8; TILE_GROUPS],
}

/// Memory to prefetch while a tile is computed: the memory that this thread reads next. It consists of short
/// runs all over the arena, which no hardware prefetcher follows.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    pub(super) runs: [*const u8; TILE_GROUPS],
    pub(super) len: usize,
    /// Bytes of each run.
    pub(super) bytes: usize,
    next: usize,
    byte: usize,
}

impl Ahead {
    pub(super) fn new(bytes: usize) -> Self {
        Self { runs: [std::ptr::null(); TILE_GROUPS], len: 0, bytes, next: 0, byte: 0 }
    }

    pub(super) fn push(&mut self, run: *const u8) {
        self.runs[self.len] = run;
        self.len += 1;
    }

    /// Prefetches about `bytes` more.
    #[inline(always)]
    fn fetch<S: Simd>(&mut self, s: S, bytes: usize) {
        if self.next < self.len {
            let run = self.runs[self.next];
            let end = self.bytes.min(self.byte + bytes);
            while self.byte < end {
                s.prefetch(run.wrapping_add(self.byte));
                self.byte += CACHE_LINE;
            }
            if self.byte >= self.bytes {
                self.byte = 0;
                self.next += 1;
            }
        }
    }
}

/// Accumulated state of rows. All pointers have one entry per row.
#[derive(Clone, Copy)]
pub(super) struct RowState {
    /// Queries times the attention scale, `[rows][width]`.
    pub(super) q: *const f32,
    /// Weighted sum of values, `[rows][v_padded]`.
    pub(super) o: *mut f32,
    /// Lanes of the sum of weights, `[rows][16]`.
    pub(super) l: *mut f32,
    pub(super) m: *mut f32,
    /// Scratch, `[R][TILE]`.
    pub(super) scores: *mut f32,
}

/// Computes `R` rows against one tile.
pub(super) struct TileRows<'a, F, const R: usize> {
    pub(super) groups: &'a TileGroups,
    pub(super) width: usize,
    /// Row length of the values in memory.
    pub(super) v_width: usize,
    /// `v_width` rounded up to whole vectors; the values must be readable up to there.
    pub(super) v_padded: usize,
    pub(super) state: RowState,
    /// Keys `from..to` of the tile that each row sees; not empty for at least one row.
    pub(super) visible: [(usize, usize); R],
    pub(super) softcap: Option<f32>,
    /// Memory to prefetch meanwhile.
    pub(super) ahead: Ahead,
    pub(super) format: PhantomData<F>,
}

impl<F: Format, const R: usize> Kernel for TileRows<'_, F, R> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let rows = self.visible.iter().filter(|(from, to)| from < to);
        let from = rows.clone().map(|(from, _)| *from).min().unwrap_or(0);
        let to = rows.map(|(_, to)| *to).max().unwrap_or(0);
        if from >= to {
            return;
        }
        let groups = (from / GROUP, to.div_ceil(GROUP));
        let mut corrections = [0.0; R];
        // SAFETY: the callers (`work.rs`) provide state for R rows and groups that are readable wherever a
        // row of the block sees a key; `from..to` is within those.
        unsafe {
            // The conditions are constants of the instruction set: only tiles that fit its registers are
            // compiled.
            if const { S::COLUMNS >= 4 && 2 * R <= S::ROWS } && groups.1 - groups.0 > 4 {
                self.scores::<S, 8>(s, groups);
            } else if const { S::COLUMNS >= 4 } {
                self.scores::<S, 4>(s, groups);
            } else if const { S::COLUMNS >= 2 } {
                self.scores::<S, 2>(s, groups);
            } else {
                self.scores::<S, 1>(s, groups);
            }
            self.weights(s, groups, &mut corrections);
            let mut d = 0;
            let keys = (from, to);
            if const { S::COLUMNS >= 4 && 2 * R <= S::ROWS } {
                d = self.values::<S, 8>(s, d, keys, &corrections);
            }
            if const { S::COLUMNS >= 4 } {
                d = self.values::<S, 4>(s, d, keys, &corrections);
            }
            if const { S::COLUMNS == 2 } {
                d = self.values::<S, 2>(s, d, keys, &corrections);
            }
            self.values::<S, 1>(s, d, keys, &corrections);
        }
    }
}

impl<F: Format, const R: usize> TileRows<'_, F, R> {
    /// Scores of the groups `from..to`, `C` groups at a time. If fewer are left, the last one is repeated.
    #[inline(always)]
    unsafe fn scores<S: Simd, const C: usize>(&mut self, s: S, (from, to): (usize, usize)) {
        // Half of the memory is prefetched with the scores, half with the values.
        let steps = (to - from).div_ceil(C) * self.width.div_ceil(F::RUN);
        let per_run = (self.ahead.len * self.ahead.bytes / 2).div_ceil(steps);
        let mut first = from;
        while first < to {
            let group: [*const u8; C] = std::array::from_fn(|c| self.groups.k[(first + c).min(to - 1)]);
            let mut acc = [[s.splat(0.0); C]; R];
            let mut d = 0;
            while d < self.width {
                self.ahead.fetch(s, per_run);
                // SAFETY: a row of the block sees the groups, so they are readable; d < width.
                let scales: [S::V; C] =
                    std::array::from_fn(|c| unsafe { F::k_scales(s, group[c], d / F::RUN) });
                let end = self.width.min(d.saturating_add(F::RUN));
                while d < end {
                    // SAFETY: as above; R queries of `width` elements.
                    let k = |c: usize| unsafe { F::k(s, group[c], self.width, d, scales[c]) };
                    // SAFETY: as above.
                    let q = |r: usize| s.splat(unsafe { *self.state.q.add(r * self.width + d) });
                    outer_product(s, &mut acc, q, k);
                    d += 1;
                }
            }
            for (r, acc) in acc.iter().enumerate() {
                for (c, acc) in acc.iter().enumerate().take(to - first) {
                    // SAFETY: first + c < to <= TILE_GROUPS and r < R.
                    unsafe { s.store(*acc, self.state.scores.add(r * TILE + (first + c) * GROUP)) };
                }
            }
            first += C;
        }
    }

    /// Turns scores into weights. Sets `corrections` to the factors of the sums so far.
    #[inline(always)]
    unsafe fn weights<S: Simd>(&self, s: S, (first, last): (usize, usize), corrections: &mut [f32; R]) {
        for (r, row_correction) in corrections.iter_mut().enumerate() {
            let (from, to) = self.visible[r];
            // SAFETY: R rows of TILE scores.
            let row = unsafe { self.state.scores.add(r * TILE) };
            let hidden = s.splat(f32::NEG_INFINITY);
            let mut highest = hidden;
            for group in first..last {
                let start = group * GROUP;
                // SAFETY: group < TILE_GROUPS.
                let x = unsafe { row.add(start) };
                // SAFETY: sixteen scores.
                let mut score = unsafe { s.load(x) };
                if let Some(cap) = self.softcap {
                    score = softcap(s, score, s.splat(cap), s.splat(1.0 / cap));
                }
                if from > start || to < start + GROUP {
                    let (from, to) = (from.saturating_sub(start), to.saturating_sub(start));
                    score = s.keep_lanes(score, from.min(GROUP), to.min(GROUP), hidden);
                }
                // SAFETY: as above.
                unsafe { s.store(score, x) };
                highest = s.max(score, highest);
            }
            let highest = s.reduce_max(highest);
            // SAFETY: one maximum and sixteen lanes for each of R rows.
            let (m, l) = unsafe { (&mut *self.state.m.add(r), self.state.l.add(r * LANES)) };
            let new = if highest > *m { highest } else { *m };
            // A row that has not seen any key yet keeps sums of zero.
            let base = if new == f32::NEG_INFINITY { 0.0 } else { new };
            let correction = exp(s, s.splat(*m - base));
            *m = new;
            // SAFETY: sixteen lanes.
            let mut sum = s.mul(unsafe { s.load(l) }, correction);
            let base = s.splat(base);
            for group in first..last {
                // SAFETY: group < TILE_GROUPS.
                let x = unsafe { row.add(group * GROUP) };
                // SAFETY: sixteen scores.
                let weight = exp(s, s.sub(unsafe { s.load(x) }, base));
                sum = s.add(sum, weight);
                // SAFETY: as above.
                unsafe { s.store(weight, x) };
            }
            // SAFETY: as above.
            unsafe { s.store(sum, l) };
            *row_correction = s.reduce_max(correction);
        }
    }

    /// Adds the values of the keys `from..to` to elements `d..` of the results, `C` vectors at a time as long
    /// as whole steps fit. Returns the first element that is left.
    #[inline(always)]
    unsafe fn values<S: Simd, const C: usize>(
        &mut self,
        s: S,
        mut d: usize,
        keys: (usize, usize),
        corrections: &[f32; R],
    ) -> usize {
        while d + C * LANES <= self.v_padded {
            // SAFETY: d + 16 C <= v_padded.
            unsafe { self.value_vectors::<S, C>(s, d, keys, corrections) };
            d += C * LANES;
        }
        d
    }

    /// Like `values`, for elements `d..d + 16 C`.
    #[inline(always)]
    unsafe fn value_vectors<S: Simd, const C: usize>(
        &mut self,
        s: S,
        d: usize,
        (from, to): (usize, usize),
        corrections: &[f32; R],
    ) {
        let mut acc = [[s.splat(0.0); C]; R];
        for (r, acc) in acc.iter_mut().enumerate() {
            let correction = s.splat(corrections[r]);
            for (c, acc) in acc.iter_mut().enumerate() {
                // SAFETY: R results of v_padded elements, d + 16 C <= v_padded.
                let o = unsafe { s.load(self.state.o.add(r * self.v_padded + d + c * LANES)) };
                *acc = s.mul(o, correction);
            }
        }
        let steps = (to - from).div_ceil(2) * self.v_padded.div_ceil(C * LANES);
        let per_pair = (self.ahead.len * self.ahead.bytes / 2).div_ceil(steps);
        let mut key = from;
        while key < to {
            let group = self.groups.v[key / GROUP];
            let end = to.min((key / GROUP + 1) * GROUP);
            while key < end {
                if key % 2 == 0 {
                    self.ahead.fetch(s, per_pair);
                }
                // SAFETY: some row of the block sees the key's group, so it is readable; d + 16 C <=
                // v_padded.
                let v = |c: usize| unsafe { F::v(s, group, self.v_width, key % GROUP, d + c * LANES) };
                // SAFETY: R rows of TILE weights.
                let weight = |r: usize| s.splat(unsafe { *self.state.scores.add(r * TILE + key) });
                outer_product(s, &mut acc, weight, v);
                key += 1;
            }
        }
        for (r, acc) in acc.iter().enumerate() {
            for (c, acc) in acc.iter().enumerate() {
                // SAFETY: as for the loads.
                unsafe { s.store(*acc, self.state.o.add(r * self.v_padded + d + c * LANES)) };
            }
        }
    }
}

/// `acc[r][c] += row(r) * column(c)`. The shorter side stays in registers; the longer one passes through one
/// register.
#[inline(always)]
fn outer_product<S: Simd, const R: usize, const C: usize>(
    s: S,
    acc: &mut [[S::V; C]; R],
    row: impl Fn(usize) -> S::V,
    column: impl Fn(usize) -> S::V,
) {
    if R < C {
        let rows: [S::V; R] = std::array::from_fn(row);
        (0..C).for_each(|c| {
            let column = column(c);
            for (acc, row) in acc.iter_mut().zip(rows) {
                acc[c] = s.fma(row, column, acc[c]);
            }
        });
    } else {
        let columns: [S::V; C] = std::array::from_fn(column);
        for (r, acc) in acc.iter_mut().enumerate() {
            let row = row(r);
            for (acc, column) in acc.iter_mut().zip(columns) {
                *acc = s.fma(row, column, *acc);
            }
        }
    }
}

/// Copies keys and values of a tile to f32. Worth its cost only for enough rows.
pub(super) struct Convert<'a, F> {
    pub(super) groups: &'a TileGroups,
    pub(super) width: usize,
    pub(super) v_width: usize,
    /// Whether a value is the last elements of its key.
    pub(super) latent: bool,
    /// Visible keys of the tile, not empty.
    pub(super) keys: (usize, usize),
    /// `[TILE_GROUPS][width][16]`
    pub(super) k: *mut f32,
    /// `[TILE][v_padded]`
    pub(super) v: *mut f32,
    pub(super) format: PhantomData<F>,
}

impl<F: Format> Kernel for Convert<'_, F> {
    type Output = TileGroups;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> TileGroups {
        let (from, to) = self.keys;
        let v_padded = self.v_width.next_multiple_of(LANES);
        let whole = self.v_width / LANES * LANES;
        let mut out = *self.groups;
        for group in from / GROUP..to.div_ceil(GROUP) {
            let (k, v) = (self.groups.k[group], self.groups.v[group]);
            // SAFETY: the scratch holds TILE_GROUPS groups, and group < TILE_GROUPS.
            let (k_out, v_out) =
                unsafe { (self.k.add(group * GROUP * self.width), self.v.add(group * GROUP * v_padded)) };
            for d in 0..self.width {
                // SAFETY: the group holds visible keys, so it is readable; the copy has the same shape.
                unsafe {
                    s.store(F::k(s, k, self.width, d, F::k_scales(s, k, d / F::RUN)), k_out.add(d * GROUP))
                };
            }
            let first = from.saturating_sub(group * GROUP);
            let tokens = first..GROUP.min(to - group * GROUP);
            if self.latent {
                let skipped = self.width - self.v_width;
                for d in 0..self.v_width {
                    for token in tokens.clone() {
                        // SAFETY: the keys have been converted above; the copy has `v_padded` elements a token.
                        unsafe {
                            *v_out.add(token * v_padded + d) = *k_out.add((skipped + d) * GROUP + token)
                        };
                    }
                }
                for token in tokens {
                    for d in self.v_width..v_padded {
                        // SAFETY: as above.
                        unsafe { *v_out.add(token * v_padded + d) = 0.0 };
                    }
                }
                out.k[group] = k_out.cast_const().cast();
                out.v[group] = v_out.cast_const().cast();
                continue;
            }
            for token in tokens {
                for d in (0..whole).step_by(LANES) {
                    // SAFETY: as above, d + 16 <= v_width.
                    unsafe { s.store(F::v(s, v, self.v_width, token, d), v_out.add(token * v_padded + d)) };
                }
                if whole < self.v_width {
                    // SAFETY: as above; whole + 16 <= v_padded.
                    unsafe {
                        s.store(
                            F::v_tail(s, v, self.v_width, token, whole),
                            v_out.add(token * v_padded + whole),
                        );
                    }
                }
            }
            out.k[group] = k_out.cast_const().cast();
            out.v[group] = v_out.cast_const().cast();
        }
        out
    }
}
