//! One work item: rows of a step that one thread computes for one key/value head.

use std::marker::PhantomData;
use std::ops::Range;

use super::format::{F16, F32, Format, Fp8, Q4, Q8};
use super::layout::{GROUP, KvType, KvTypes};
use super::plan::{Item, PlannedRow, SPLIT, StepPlan, TILE};
use super::tile::{
    Ahead, ConvertKeys, ConvertValues, KeyEnds, RowState, TILE_GROUPS, TileGroups, TileRows, TileScores,
    TileValues,
};
use super::write::rotate;
use crate::aligned::AlignedBuf;
use crate::disjoint::Disjoint;
use crate::simd::{Kernel, LANES, Simd, exp};

/// Number of rows of the largest register tile.
const MAX_TILE_ROWS: usize = 6;

/// Minimum number of rows per tile from which the tile is converted to f32 first.
const CONVERT_ROWS: usize = 7;

/// State that all items of one call share.
pub(super) struct Step<'a> {
    pub(super) plan: &'a StepPlan,
    /// Address of the layer's part of block offset 0.
    pub(super) layer: *const u8,
    pub(super) scale: f32,
    pub(super) softcap: Option<f32>,
    pub(super) sinks: Option<&'a [f32]>,
    /// `[rows][heads * head_dim]`
    pub(super) q: &'a [f32],
    /// `[rows][heads * v_head_dim]`
    pub(super) out: Disjoint<'a, f32>,
    /// `[partials][heads][record]`, see [`record_len`].
    pub(super) partials: Disjoint<'a, f32>,
}

// SAFETY: `layer` is only read, inside blocks that the plan has checked, while the arena is borrowed for
// reading.
unsafe impl Sync for Step<'_> {}

/// f32 values of a partial result: the weighted sum padded to whole vectors, then maximum, sum of weights,
/// padding.
pub(super) fn record_len(v_padded: usize) -> usize {
    v_padded + LANES
}

#[derive(Debug, Default)]
pub(super) struct ThreadScratch {
    q: AlignedBuf<f32>,
    o: AlignedBuf<f32>,
    l: AlignedBuf<f32>,
    m: AlignedBuf<f32>,
    /// Merged splits of rows without partials, `[rows][record]`.
    totals: AlignedBuf<f32>,
    scores: AlignedBuf<f32>,
    k: AlignedBuf<f32>,
    v: AlignedBuf<f32>,
}

impl ThreadScratch {
    /// Grows the buffers to the plan's widest item.
    pub(super) fn fit(&mut self, plan: &StepPlan) {
        let layout = &plan.shape().layout;
        let rows = plan.widest_item * plan.group_size();
        let v_padded = layout.v_head_dim().next_multiple_of(LANES);
        self.q.grow(rows * layout.head_dim());
        self.o.grow(rows * v_padded);
        self.l.grow(rows * LANES);
        self.m.grow(rows);
        self.totals.grow(rows * record_len(v_padded));
        self.scores.grow(MAX_TILE_ROWS * TILE);
        self.k.grow(TILE * layout.head_dim());
        self.v.grow(TILE * v_padded);
    }
}

/// Computes one item for one key/value head.
pub(super) struct RunItem<'a> {
    pub(super) step: &'a Step<'a>,
    pub(super) item: &'a Item,
    pub(super) kv_head: usize,
    /// Returns the item and key/value head that this thread probably computes next.
    pub(super) upcoming: &'a dyn Fn() -> Option<(&'a Item, usize)>,
    pub(super) scratch: &'a mut ThreadScratch,
}

/// Rows of an item that see keys of a tile and have the same blocks there.
struct Run {
    members: Range<usize>,
    /// Keys of the tile that at least one of these rows sees.
    keys: (usize, usize),
}

impl Kernel for RunItem<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        self.load_queries(s);
        let rows = self.step.plan.rows.as_slice();
        let members = self.members();
        let splits = match self.item.only_split {
            Some(split) => split..split + 1,
            None => {
                let all = members.iter().map(|row| rows[*row].splits());
                all.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0)
            }
        };
        for split in splits {
            self.clear();
            for tile in split * (SPLIT / TILE)..(split + 1) * (SPLIT / TILE) {
                self.tile(s, tile);
            }
            self.keep(s, split);
        }
        self.finish(s);
    }
}

impl<'a> RunItem<'a> {
    fn members(&self) -> &'a [usize] {
        &self.step.plan.members[self.item.members.clone()]
    }

    /// The planned row of a member.
    fn row(&self, member: usize) -> &'a PlannedRow {
        &self.step.plan.rows[self.members()[member]]
    }

    fn v_padded(&self) -> usize {
        self.step.plan.shape().layout.v_head_dim().next_multiple_of(LANES)
    }

    /// Query head of entry `entry` of the state; the state is `[member][heads of the group]`.
    fn head(&self, entry: usize) -> usize {
        let group = self.step.plan.group_size();
        self.kv_head * group + entry % group
    }

    #[inline(always)]
    fn load_queries<S: Simd>(&mut self, s: S) {
        let shape = self.step.plan.shape();
        let width = shape.layout.head_dim();
        let group = self.step.plan.group_size();
        let scale = s.splat(self.step.scale);
        for (row, out) in self.members().iter().zip(self.scratch.q.chunks_exact_mut(group * width)) {
            let start = (self.step.plan.rows[*row].query * shape.heads + self.kv_head * group) * width;
            let q = self.step.q[start..start + group * width].as_chunks::<LANES>();
            let out = out.as_chunks_mut::<LANES>();
            for (q, out) in q.0.iter().zip(out.0) {
                s.put(s.mul(s.chunk(q), scale), out);
            }
            s.put_tail(s.mul(s.tail(q.1), scale), out.1);
        }
        let rotation = shape.layout.rotation(true);
        if rotation > 1 {
            let queries = self.scratch.q
                [..self.step.plan.members[self.item.members.clone()].len() * group * width]
                .chunks_exact_mut(width);
            queries.for_each(|query| rotate(query, rotation));
        }
    }

    /// Clears the accumulated state for the next split.
    #[inline(always)]
    fn clear(&mut self) {
        let entries = self.members().len() * self.step.plan.group_size();
        let v_padded = self.v_padded();
        self.scratch.o[..entries * v_padded].fill(0.0);
        self.scratch.l[..entries * LANES].fill(0.0);
        self.scratch.m[..entries].fill(f32::NEG_INFINITY);
    }

    /// Keys of a tile that a row sees, relative to the tile; none if `from >= to`.
    fn visible(&self, member: usize, tile: usize) -> (usize, usize) {
        let row = self.row(member);
        let start = tile * TILE;
        (row.start.saturating_sub(start), row.end.saturating_sub(start).min(TILE))
    }

    fn tile<S: Simd>(&mut self, s: S, tile: usize) {
        let plan = self.step.plan;
        let mut run: Option<Run> = None;
        for member in 0..self.members().len() {
            let (from, to) = self.visible(member, tile);
            if from >= to {
                continue;
            }
            match &mut run {
                Some(run)
                    if run.members.end == member
                        && plan.same_blocks(
                            self.row(run.members.start).sequence,
                            self.row(member).sequence,
                            tile,
                        ) =>
                {
                    run.members.end += 1;
                    run.keys = (run.keys.0.min(from), run.keys.1.max(to));
                }
                _ => {
                    let next = Run { members: member..member + 1, keys: (from, to) };
                    if let Some(done) = run.replace(next) {
                        self.attend(s, tile, &done);
                    }
                }
            }
        }
        if let Some(run) = run {
            self.attend(s, tile, &run);
        }
    }

    /// Computes the rows of a run against a tile. Copies keys or values to f32 first if that pays, or if vectors would
    /// not end where values do.
    fn attend<S: Simd>(&mut self, s: S, tile: usize, run: &Run) {
        let layout = self.step.plan.shape().layout;
        let mut groups = self.groups(tile, run.members.start, run.keys);
        let rows = run.members.len() * self.step.plan.group_size();
        let (mut types, mut v_width) = (layout.types(), layout.v_head_dim());
        let (keys, width, v_padded) = (run.keys, layout.head_dim(), self.v_padded());
        let all = keys.0 / GROUP..keys.1.div_ceil(GROUP);
        if layout.is_latent() || rows >= CONVERT_ROWS && types.k != KvType::F32 {
            let to = self.scratch.k.as_mut_ptr();
            match types.k {
                KvType::F32 => convert_keys::<S, F32>(s, &groups, width, keys, to),
                KvType::F16 => convert_keys::<S, F16>(s, &groups, width, keys, to),
                KvType::Q8_0 => convert_keys::<S, Q8>(s, &groups, width, keys, to),
                KvType::Fp8 => convert_keys::<S, Fp8>(s, &groups, width, keys, to),
                KvType::Q4_0 => convert_keys::<S, Q4>(s, &groups, width, keys, to),
            }
            types.k = KvType::F32;
            for group in all.clone() {
                groups.k[group] = to.wrapping_add(group * GROUP * width).cast_const().cast();
            }
        }
        let to = self.scratch.v.as_mut_ptr();
        let whole = v_width == v_padded;
        let copied = if layout.is_latent() {
            s.vectorize(KeyEnds { width, v_width, keys, k: self.scratch.k.as_ptr(), to });
            true
        } else if !whole || rows >= CONVERT_ROWS && types.v != KvType::F32 {
            match types.v {
                KvType::F32 => convert_values::<S, F32>(s, &groups, v_width, keys, to),
                KvType::F16 => convert_values::<S, F16>(s, &groups, v_width, keys, to),
                KvType::Q8_0 => convert_values::<S, Q8>(s, &groups, v_width, keys, to),
                KvType::Fp8 => convert_values::<S, Fp8>(s, &groups, v_width, keys, to),
                KvType::Q4_0 => convert_values::<S, Q4>(s, &groups, v_width, keys, to),
            }
            true
        } else {
            false
        };
        if copied {
            (types.v, v_width) = (KvType::F32, v_padded);
            for group in all {
                groups.v[group] = to.wrapping_add(group * GROUP * v_padded).cast_const().cast();
            }
        }
        self.attend_rows(s, tile, run, &groups, (types, v_width), self.ahead(tile, run));
    }

    /// Addresses of the groups of some visible keys of a tile.
    fn groups(&self, tile: usize, member: usize, keys: (usize, usize)) -> TileGroups {
        let layout = &self.step.plan.shape().layout;
        let sequence = self.row(member).sequence;
        let mut groups =
            TileGroups { k: [std::ptr::null(); TILE_GROUPS], v: [std::ptr::null(); TILE_GROUPS] };
        for group in keys.0 / GROUP..keys.1.div_ceil(GROUP) {
            let key = tile * TILE + group * GROUP;
            let (block, inner) = (key / layout.block_tokens(), key % layout.block_tokens() / GROUP);
            let Some(offset) = self.step.plan.block(sequence, block) else {
                unreachable!("the plan has checked every visible block");
            };
            // SAFETY: `StepPlan::check_arena` put the whole block inside the arena.
            unsafe {
                let start = self.step.layer.add(offset as usize);
                groups.k[group] = start.add(layout.k_group(self.kv_head, inner));
                groups.v[group] = match layout.is_latent() {
                    true => groups.k[group],
                    false => start.add(layout.v_group(self.kv_head, inner)),
                };
            }
        }
        groups
    }

    /// Memory that the thread reads after a run's tile: the next tile of the item, or the first tile of the
    /// next item.
    fn ahead(&self, tile: usize, run: &Run) -> Ahead {
        let last = run.members.end - 1;
        let (from, to) = self.visible(last, tile + 1);
        if from < to && (self.item.only_split.is_none() || !(tile + 1).is_multiple_of(SPLIT / TILE)) {
            return self.step.head_runs(self.row(last), self.kv_head, tile + 1);
        }
        match (self.upcoming)() {
            Some((item, kv_head)) if run.members.end == self.members().len() => {
                let row = &self.step.plan.rows[self.step.plan.members[item.members.start]];
                let first = item.only_split.unwrap_or(row.splits().start) * SPLIT;
                self.step.head_runs(row, kv_head, row.start.max(first) / TILE)
            }
            _ => Ahead::new(0),
        }
    }

    /// Cuts the entries of a run into register tiles.
    fn attend_rows<S: Simd>(
        &mut self,
        s: S,
        tile: usize,
        run: &Run,
        groups: &TileGroups,
        form: (KvTypes, usize),
        mut ahead: Ahead,
    ) {
        let size = self.step.plan.group_size();
        let (mut entry, end) = (run.members.start * size, run.members.end * size);
        while entry < end {
            let left = end - entry;
            // The constant conditions decide which tiles are compiled for an instruction set.
            entry += if const { S::ROWS >= 6 } && left >= 6 {
                self.rows::<S, 6>(s, tile, entry, groups, form, ahead)
            } else if const { S::ROWS >= 4 } && left >= 4 {
                self.rows::<S, 4>(s, tile, entry, groups, form, ahead)
            } else if const { S::ROWS >= 3 } && left >= 3 {
                self.rows::<S, 3>(s, tile, entry, groups, form, ahead)
            } else if const { S::ROWS >= 2 } && left >= 2 {
                self.rows::<S, 2>(s, tile, entry, groups, form, ahead)
            } else {
                self.rows::<S, 1>(s, tile, entry, groups, form, ahead)
            };
            // Prefetching once is enough.
            ahead = Ahead::new(0);
        }
    }

    /// `form`: the types and the row length of the values that `groups` point to.
    fn rows<S: Simd, const R: usize>(
        &mut self,
        s: S,
        tile: usize,
        entry: usize,
        groups: &TileGroups,
        (types, v_width): (KvTypes, usize),
        ahead: Ahead,
    ) -> usize {
        let width = self.step.plan.shape().layout.head_dim();
        let v_padded = self.v_padded();
        let size = self.step.plan.group_size();
        let visible = std::array::from_fn(|r| self.visible((entry + r) / size, tile));
        let scratch = &mut *self.scratch;
        let end = entry + R;
        let mut rows = TileRows::<R> {
            groups,
            width,
            v_width,
            v_padded,
            state: RowState {
                q: scratch.q[entry * width..end * width].as_ptr(),
                o: scratch.o[entry * v_padded..end * v_padded].as_mut_ptr(),
                l: scratch.l[entry * LANES..end * LANES].as_mut_ptr(),
                m: scratch.m[entry..end].as_mut_ptr(),
                scores: scratch.scores[..R * TILE].as_mut_ptr(),
            },
            visible,
            softcap: self.step.softcap,
            ahead,
            corrections: [0.0; R],
        };
        match types.k {
            KvType::F32 => s.vectorize(TileScores(&mut rows, PhantomData::<F32>)),
            KvType::F16 => s.vectorize(TileScores(&mut rows, PhantomData::<F16>)),
            KvType::Q8_0 => s.vectorize(TileScores(&mut rows, PhantomData::<Q8>)),
            KvType::Fp8 => s.vectorize(TileScores(&mut rows, PhantomData::<Fp8>)),
            KvType::Q4_0 => s.vectorize(TileScores(&mut rows, PhantomData::<Q4>)),
        }
        match types.v {
            KvType::F32 => s.vectorize(TileValues(&mut rows, PhantomData::<F32>)),
            KvType::F16 => s.vectorize(TileValues(&mut rows, PhantomData::<F16>)),
            KvType::Q8_0 => s.vectorize(TileValues(&mut rows, PhantomData::<Q8>)),
            KvType::Fp8 => s.vectorize(TileValues(&mut rows, PhantomData::<Fp8>)),
            KvType::Q4_0 => s.vectorize(TileValues(&mut rows, PhantomData::<Q4>)),
        }
        R
    }

    /// Stores the split's result of every row that sees it, or merges it with the earlier splits.
    #[inline(always)]
    fn keep<S: Simd>(&mut self, s: S, split: usize) {
        let v_padded = self.v_padded();
        let len = record_len(v_padded);
        let size = self.step.plan.group_size();
        let heads = self.step.plan.shape().heads;
        for entry in 0..self.members().len() * size {
            let row = self.row(entry / size);
            if !row.splits().contains(&split) {
                continue;
            }
            let head = self.head(entry);
            let scratch = &mut *self.scratch;
            let o = &scratch.o[entry * v_padded..(entry + 1) * v_padded];
            let l = s.reduce_add(s.tail(&scratch.l[entry * LANES..(entry + 1) * LANES]));
            let m = scratch.m[entry];
            match row.partial {
                Some(first) => {
                    let index = (first + split - row.splits().start) * heads + head;
                    // SAFETY: a partial belongs to one row and split, and so to one item; the head belongs to
                    // one kv head.
                    let record = unsafe { self.step.partials.slice(index * len, len) };
                    store_record(record, o, m, l);
                }
                None => {
                    let total = &mut scratch.totals[entry * len..(entry + 1) * len];
                    if split == row.splits().start {
                        store_record(total, o, m, l);
                    } else {
                        merge(s, total, o, m, l);
                    }
                }
            }
        }
    }

    /// Writes the results of rows without partials.
    #[inline(always)]
    fn finish<S: Simd>(&mut self, s: S) {
        let len = record_len(self.v_padded());
        let size = self.step.plan.group_size();
        for entry in 0..self.members().len() * size {
            let row = self.row(entry / size);
            if row.partial.is_none() {
                let total = &self.scratch.totals[entry * len..(entry + 1) * len];
                self.step.write(s, row, self.head(entry), total);
            }
        }
    }
}

impl Step<'_> {
    /// Memory of one head in the blocks of a tile that a row sees.
    fn head_runs(&self, row: &PlannedRow, kv_head: usize, tile: usize) -> Ahead {
        let layout = &self.plan.shape().layout;
        let tokens = layout.block_tokens();
        let mut ahead = Ahead::new(layout.head_bytes());
        let (from, to) = (row.start.max(tile * TILE), row.end.min((tile + 1) * TILE));
        for block in from / tokens..to.div_ceil(tokens) {
            if let Some(offset) = self.plan.block(row.sequence, block) {
                ahead.push(self.layer.wrapping_add(offset as usize + kv_head * layout.head_bytes()));
            }
        }
        ahead
    }

    /// Normalises and writes the result of one head of one row.
    #[inline(always)]
    fn write<S: Simd>(&self, s: S, row: &PlannedRow, head: usize, record: &[f32]) {
        let shape = self.plan.shape();
        let width = shape.layout.v_head_dim();
        let (o, (m, l)) = split_record(record);
        // A sink acts as one more key whose value is zero.
        let (o_scale, l) = match self.sinks {
            Some(sinks) => {
                let new = m.max(sinks[head]);
                let (old, sink) = (scalar_exp(s, m - new), scalar_exp(s, sinks[head] - new));
                (old, l * old + sink)
            }
            None => (1.0, l),
        };
        let factor = s.splat(o_scale / l);
        // SAFETY: each row is finished once, and the outputs of its heads do not overlap.
        let out = unsafe { self.out.slice((row.query * shape.heads + head) * width, width) };
        for (o, out) in o.chunks_exact(LANES).zip(out.chunks_mut(LANES)) {
            // Adding zero makes the sign of a zero unique.
            s.put_tail(s.fma(s.tail(o), factor, s.splat(0.0)), out);
        }
        let rotation = shape.layout.rotation(false);
        if rotation > 1 {
            rotate(out, rotation);
        }
    }
}

/// Merges the partial results of one row and one head, in position order.
pub(super) struct MergeRow<'a> {
    pub(super) step: &'a Step<'a>,
    pub(super) row: &'a PlannedRow,
    /// First partial of the row.
    pub(super) first: usize,
}

impl Kernel for MergeRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let shape = self.step.plan.shape();
        let v_padded = shape.layout.v_head_dim().next_multiple_of(LANES);
        let len = record_len(v_padded);
        for head in 0..shape.heads {
            let at = |split: usize| ((self.first + split) * shape.heads + head) * len;
            // SAFETY: the partials of a row are merged by one call, after all items have ended.
            let total = unsafe { self.step.partials.slice(at(0), len) };
            for split in 1..self.row.splits().len() {
                // SAFETY: as above; another record.
                let (o, (m, l)) = split_record(unsafe { self.step.partials.slice(at(split), len) });
                merge(s, total, o, m, l);
            }
            self.step.write(s, self.row, head, total);
        }
    }
}

fn convert_keys<S: Simd, F: Format>(
    s: S,
    groups: &TileGroups,
    width: usize,
    keys: (usize, usize),
    to: *mut f32,
) {
    s.vectorize(ConvertKeys::<F> { groups, width, keys, to, format: PhantomData });
}

fn convert_values<S: Simd, F: Format>(
    s: S,
    groups: &TileGroups,
    v_width: usize,
    keys: (usize, usize),
    to: *mut f32,
) {
    s.vectorize(ConvertValues::<F> { groups, v_width, keys, to, format: PhantomData });
}

fn store_record(record: &mut [f32], o: &[f32], m: f32, l: f32) {
    record[..o.len()].copy_from_slice(o);
    record[o.len()] = m;
    record[o.len() + 1] = l;
}

fn split_record(record: &[f32]) -> (&[f32], (f32, f32)) {
    let (o, rest) = record.split_at(record.len() - LANES);
    (o, (rest[0], rest[1]))
}

/// Merges a later split into the result of the earlier ones.
#[inline(always)]
fn merge<S: Simd>(s: S, total: &mut [f32], o: &[f32], m: f32, l: f32) {
    let end = total.len() - LANES;
    let new = total[end].max(m);
    let (old, add) = (scalar_exp(s, total[end] - new), scalar_exp(s, m - new));
    for (t, o) in total[..end].as_chunks_mut::<LANES>().0.iter_mut().zip(o.as_chunks::<LANES>().0) {
        s.put(s.fma(s.chunk(o), s.splat(add), s.mul(s.chunk(t), s.splat(old))), t);
    }
    total[end] = new;
    total[end + 1] = l.mul_add(add, total[end + 1] * old);
}

/// The vector exponential of a single number.
#[inline(always)]
fn scalar_exp<S: Simd>(s: S, x: f32) -> f32 {
    s.reduce_max(exp(s, s.splat(x)))
}
