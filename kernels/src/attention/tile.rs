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

/// Computes `R` rows against one tile: scores and weights with the format of keys, then values with theirs.
pub(super) struct TileRows<'a, const R: usize> {
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
    /// Factors of the sums so far, from the scores to the values.
    pub(super) corrections: [f32; R],
}

impl<const R: usize> TileRows<'_, R> {
    /// Keys that a row sees; none if the first is not less than the second.
    fn keys(&self) -> (usize, usize) {
        let rows = self.visible.iter().filter(|(from, to)| from < to);
        let from = rows.clone().map(|(from, _)| *from).min().unwrap_or(0);
        (from, rows.map(|(_, to)| *to).max().unwrap_or(0))
    }
}

/// Turns the keys of a tile into weights.
pub(super) struct TileScores<'a, 'b, F, const R: usize>(
    pub(super) &'a mut TileRows<'b, R>,
    pub(super) PhantomData<F>,
);

/// Adds the weighted values of a tile.
pub(super) struct TileValues<'a, 'b, F, const R: usize>(
    pub(super) &'a mut TileRows<'b, R>,
    pub(super) PhantomData<F>,
);

impl<F: Format, const R: usize> Kernel for TileScores<'_, '_, F, R> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let rows = self.0;
        let (from, to) = rows.keys();
        if from >= to {
            return;
        }
        let groups = (from / GROUP, to.div_ceil(GROUP));
        // SAFETY: the callers (`work.rs`) provide state for R rows and groups that are readable wherever a
        // row of the block sees a key; `from..to` is within those.
        unsafe {
            // The conditions are constants of the instruction set: only tiles that fit its registers are
            // compiled.
            if const { S::COLUMNS >= 4 && 2 * R <= S::ROWS } && groups.1 - groups.0 > 4 {
                rows.scores::<S, F, 8>(s, groups);
            } else if const { S::COLUMNS >= 4 } {
                rows.scores::<S, F, 4>(s, groups);
            } else if const { S::COLUMNS >= 2 } {
                rows.scores::<S, F, 2>(s, groups);
            } else {
                rows.scores::<S, F, 1>(s, groups);
            }
            rows.weights(s, groups);
        }
    }
}

impl<F: Format, const R: usize> Kernel for TileValues<'_, '_, F, R> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let rows = self.0;
        let keys = rows.keys();
        if keys.0 >= keys.1 {
            return;
        }
        let mut d = 0;
        // SAFETY: as for the scores, which have been computed.
        unsafe {
            if const { S::COLUMNS >= 4 && 2 * R <= S::ROWS } {
                d = rows.values::<S, F, 8>(s, d, keys);
            }
            if const { S::COLUMNS >= 4 } {
                d = rows.values::<S, F, 4>(s, d, keys);
            }
            if const { S::COLUMNS == 2 } {
                d = rows.values::<S, F, 2>(s, d, keys);
            }
            rows.values::<S, F, 1>(s, d, keys);
        }
    }
}

impl<const R: usize> TileRows<'_, R> {
    /// Scores of the groups `from..to`, `C` groups at a time. If fewer are left, the last one is repeated.
    #[inline(always)]
    unsafe fn scores<S: Simd, F: Format, const C: usize>(&mut self, s: S, (from, to): (usize, usize)) {
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

    /// Turns scores into weights. Sets `corrections`.
    #[inline(always)]
    unsafe fn weights<S: Simd>(&mut self, s: S, (first, last): (usize, usize)) {
        for r in 0..R {
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
            self.corrections[r] = s.reduce_max(correction);
        }
    }

    /// Adds the values of the keys `from..to` to elements `d..` of the results, `C` vectors at a time as long
    /// as whole steps fit. Returns the first element that is left.
    #[inline(always)]
    unsafe fn values<S: Simd, F: Format, const C: usize>(
        &mut self,
        s: S,
        mut d: usize,
        keys: (usize, usize),
    ) -> usize {
        while d + C * LANES <= self.v_padded {
            // SAFETY: d + 16 C <= v_padded.
            unsafe { self.value_vectors::<S, F, C>(s, d, keys) };
            d += C * LANES;
        }
        d
    }

    /// Like `values`, for elements `d..d + 16 C`.
    #[inline(always)]
    unsafe fn value_vectors<S: Simd, F: Format, const C: usize>(
        &mut self,
        s: S,
        d: usize,
        (from, to): (usize, usize),
    ) {
        let mut acc = [[s.splat(0.0); C]; R];
        for (r, acc) in acc.iter_mut().enumerate() {
            let correction = s.splat(self.corrections[r]);
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

/// Copies keys of a tile to f32. Worth its cost only for enough rows.
pub(super) struct ConvertKeys<'a, F> {
    pub(super) groups: &'a TileGroups,
    pub(super) width: usize,
    /// Visible keys of the tile, not empty.
    pub(super) keys: (usize, usize),
    /// `[TILE_GROUPS][width][16]`
    pub(super) to: *mut f32,
    pub(super) format: PhantomData<F>,
}

/// Copies values of a tile to f32.
pub(super) struct ConvertValues<'a, F> {
    pub(super) groups: &'a TileGroups,
    pub(super) v_width: usize,
    /// Visible keys of the tile, not empty.
    pub(super) keys: (usize, usize),
    /// `[TILE][v_padded]`
    pub(super) to: *mut f32,
    pub(super) format: PhantomData<F>,
}

/// Copies the ends of keys, which have been copied to f32, as values.
pub(super) struct KeyEnds {
    pub(super) width: usize,
    pub(super) v_width: usize,
    /// Visible keys of the tile, not empty.
    pub(super) keys: (usize, usize),
    /// `[TILE_GROUPS][width][16]`
    pub(super) k: *const f32,
    /// `[TILE][v_padded]`
    pub(super) to: *mut f32,
}

/// Tokens of a group that are in `from..to` of the tile.
fn tokens_of(group: usize, (from, to): (usize, usize)) -> std::ops::Range<usize> {
    from.saturating_sub(group * GROUP)..GROUP.min(to - group * GROUP)
}

impl<F: Format> Kernel for ConvertKeys<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for group in self.keys.0 / GROUP..self.keys.1.div_ceil(GROUP) {
            let k = self.groups.k[group];
            for d in 0..self.width {
                // SAFETY: the group holds visible keys, so it is readable; the scratch holds TILE_GROUPS groups of this
                // shape, and group < TILE_GROUPS.
                unsafe {
                    let to = self.to.add((group * self.width + d) * GROUP);
                    s.store(F::k(s, k, self.width, d, F::k_scales(s, k, d / F::RUN)), to);
                }
            }
        }
    }
}

impl<F: Format> Kernel for ConvertValues<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let v_padded = self.v_width.next_multiple_of(LANES);
        let whole = self.v_width / LANES * LANES;
        for group in self.keys.0 / GROUP..self.keys.1.div_ceil(GROUP) {
            let v = self.groups.v[group];
            for token in tokens_of(group, self.keys) {
                // SAFETY: the group holds visible values, so it is readable up to `v_width`; the scratch holds TILE
                // rows of `v_padded`.
                unsafe {
                    let to = self.to.add((group * GROUP + token) * v_padded);
                    for d in (0..whole).step_by(LANES) {
                        s.store(F::v(s, v, self.v_width, token, d), to.add(d));
                    }
                    if whole < self.v_width {
                        s.store(F::v_tail(s, v, self.v_width, token, whole), to.add(whole));
                    }
                }
            }
        }
    }
}

impl Kernel for KeyEnds {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _s: S) {
        let v_padded = self.v_width.next_multiple_of(LANES);
        let skipped = self.width - self.v_width;
        for group in self.keys.0 / GROUP..self.keys.1.div_ceil(GROUP) {
            let tokens = tokens_of(group, self.keys);
            // SAFETY: both copies hold a tile, of keys of `width` and of values of `v_padded` elements.
            unsafe {
                let k = self.k.add((group * self.width + skipped) * GROUP);
                let to = self.to.add(group * GROUP * v_padded);
                for d in 0..self.v_width {
                    for token in tokens.clone() {
                        *to.add(token * v_padded + d) = *k.add(d * GROUP + token);
                    }
                }
                for token in tokens {
                    for d in self.v_width..v_padded {
                        *to.add(token * v_padded + d) = 0.0;
                    }
                }
            }
        }
    }
}
