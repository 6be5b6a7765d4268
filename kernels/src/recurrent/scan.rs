//! Advances a layer's matrices over the rows of a step: the part that both recurrences share.
//!
//! For each head there is a state S of `[inner][outer]`. Each row has a key k and a query q of length
//! `inner`, a value v of length `outer`, a decay and a gain:
//!
//! - delta net: `u = gain (v - decay S^T k)`; Mamba-2: `u = gain v`
//! - `S = decay S + k u^T`
//! - `out = S^T q`, Mamba-2 also `+ skip v`
//!
//! Columns of S are independent, so a few strips of them pass through all rows of the step in the L1 cache.
//! The delta net sums `S^T k` of the next row in the same sweep that updates S with this row, so S is loaded
//! and stored once per row. A sum over `inner` is always two sums, over even and odd indices in ascending
//! order, which are then added. This holds on every instruction set, with and without that fusion of sweeps.
//!
//! A row is computed in f32 from the state that the previous row stored. For a head stored as bfloat16, the
//! stored state is rounded: `S^T q` uses the state before rounding, the next row's `S^T k` the state after
//! it.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use super::plan::{LayerState, PlannedSequence};
use crate::aligned::AlignedBuf;
use crate::backend::HeadType;
use crate::disjoint::Disjoint;
use crate::error::Error;
use crate::isa::Isa;
use crate::pool::Pool;
use crate::simd::{Kernel, LANES, Simd, dispatch};

/// Strips that pass through the rows together. With an `inner` of 128 they take half of an L1 cache.
const STRIPS: usize = 2;

/// Rows that all strips of a work item pass before the next rows. Keys, values and outputs of a tile come
/// from distant memory once, and then from the L2 cache.
pub(super) const TILE_ROWS: usize = 64;

/// Heads are cut into several work items if there would be fewer than this number of items per thread.
const ITEMS_PER_THREAD: usize = 4;

/// Prefetch distance of values and outputs, in rows. Rows are far apart, so that each one is a cache line
/// from memory or the last-level cache.
const AHEAD_ROWS: usize = 8;

/// Buffers that scans reuse from step to step.
#[derive(Debug, Default)]
pub struct ScanScratch {
    /// For each thread: keys of a tile and strips of a deferred state.
    threads: Vec<Mutex<AlignedBuf<f32>>>,
}

impl ScanScratch {
    pub fn bytes(&self) -> usize {
        let keys = |keys: &Mutex<AlignedBuf<f32>>| {
            size_of_val(&keys.lock().unwrap_or_else(PoisonError::into_inner)[..])
        };
        self.threads.iter().map(keys).sum()
    }
}

/// Maps a head to its key head.
#[derive(Debug, Clone, Copy)]
pub(super) struct KeyHeads {
    heads: usize,
    key_heads: usize,
    tiled: bool,
}

impl KeyHeads {
    /// # Errors
    /// [`Error::HeadGroups`] unless the number of heads is a multiple of the number of key heads.
    pub(super) fn new(heads: usize, key_heads: usize, tiled: bool) -> Result<Self, Error> {
        if key_heads == 0 || !heads.is_multiple_of(key_heads) {
            return Err(Error::HeadGroups { heads, kv_heads: key_heads });
        }
        Ok(Self { heads, key_heads, tiled })
    }

    pub(super) fn of(self, head: usize) -> usize {
        if self.tiled { head % self.key_heads } else { head / (self.heads / self.key_heads) }
    }
}

/// The differences between the two recurrences.
pub(super) trait Rule: Sync {
    /// Whether `S^T k` is subtracted from the value (delta net).
    const CORRECTS: bool;

    /// Computes decay, gain, keys and queries of rows for a head.
    fn prepare<S: Simd>(&self, s: S, head: usize, rows: Range<usize>, tile: &mut Tile<'_>);

    /// Factor of a head's value in its output.
    fn skip(&self, head: usize) -> f32;
}

/// Inputs of a tile of rows for one head.
pub(super) struct Tile<'a> {
    pub(super) decay: [f32; TILE_ROWS],
    pub(super) gain: [f32; TILE_ROWS],
    /// `[rows][2][inner]`: key, then query. They are copied together because rows of the input are far apart.
    pub(super) keys: &'a mut [f32],
}

/// One call of [`scan`].
pub(super) struct Scan<'a, R> {
    pub(super) rule: R,
    /// `[rows][value_stride]`; a row's values `[heads][outer]` start at `value_offset`.
    pub(super) values: &'a [f32],
    pub(super) value_stride: usize,
    pub(super) value_offset: usize,
    /// `[rows][heads][outer]`.
    pub(super) out: &'a mut [f32],
    pub(super) scratch: &'a mut ScanScratch,
}

/// Advances the states over the rows of the plan. The caller has checked all shapes.
pub(super) fn scan<R: Rule>(pool: &Pool, isa: Isa, state: &mut LayerState<'_>, scan: Scan<'_, R>) {
    let Scan { rule, values, value_stride, value_offset, out, scratch } = scan;
    let state = &*state;
    let (layout, sequences) = (state.layout(), state.plan().sequences());
    let shared = Shared { rule, state, values, value_stride, value_offset, out: Disjoint::new(out) };
    let heads = layout.shape().heads;
    let whole_heads = sequences.len() * heads >= ITEMS_PER_THREAD * pool.threads();
    let strips = if whole_heads { layout.strips() } else { STRIPS };
    let items_per_head = layout.strips().div_ceil(strips);
    // Ordered by sequence, head and strips: the order of memory.
    let work = |item: usize| {
        let (rest, index) = (item / items_per_head, item % items_per_head);
        let sequence = sequences.get(rest / heads)?;
        let strips = index * strips..layout.strips().min((index + 1) * strips);
        Some(HeadStrips { sequence, head: rest % heads, strips })
    };
    let spill = if state.plan().defers() { STRIPS * layout.inner() * LANES } else { 0 };
    let threads = &mut scratch.threads;
    threads.resize_with(pool.threads().max(threads.len()), Mutex::default);
    let (threads, next) = (&*threads, AtomicUsize::new(0));
    pool.run(&|thread| {
        // A panic elsewhere may have left stale numbers, but every tile is prepared from scratch.
        let mut keys = threads[thread].lock().unwrap_or_else(PoisonError::into_inner);
        let tile = TILE_ROWS * 2 * layout.inner();
        keys.grow(tile + spill);
        let (keys, spill) = keys.split_at_mut(tile);
        loop {
            let item = next.fetch_add(1, Ordering::Relaxed);
            let Some(now) = work(item) else { break };
            let upcoming = work(item + 1).map(|work| shared.source(&work, work.strips.start));
            let advance = Advance { shared: &shared, work: now, upcoming, keys, spill };
            match layout.head_type(advance.work.head) {
                HeadType::F32 => dispatch(isa, Typed::<_, f32>(advance, PhantomData)),
                HeadType::Bf16 => dispatch(isa, Typed::<_, Bf16>(advance, PhantomData)),
            }
        }
    });
}

/// Storage type of a state's elements.
trait Element: Copy {
    /// # Safety
    /// `p` must be readable for sixteen elements.
    unsafe fn load<S: Simd>(s: S, p: *const Self) -> S::V;

    /// Stores 16 elements and returns the values that a load would return afterwards.
    ///
    /// # Safety
    /// `p` must be writable for sixteen elements.
    unsafe fn store<S: Simd>(s: S, state: S::V, p: *mut Self) -> S::V;
}

impl Element for f32 {
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const Self) -> S::V {
        // SAFETY: by this function's contract.
        unsafe { s.load(p) }
    }

    #[inline(always)]
    unsafe fn store<S: Simd>(s: S, state: S::V, p: *mut Self) -> S::V {
        // SAFETY: by this function's contract.
        unsafe { s.store(state, p) };
        state
    }
}

/// See [`HeadType::Bf16`].
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Bf16(u16);

impl Element for Bf16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const Self) -> S::V {
        // SAFETY: by this function's contract.
        unsafe { s.load_bf16(p.cast()) }
    }

    #[inline(always)]
    unsafe fn store<S: Simd>(s: S, state: S::V, p: *mut Self) -> S::V {
        // SAFETY: by this function's contract.
        unsafe { s.store_bf16(state, p.cast()) }
    }
}

/// State that all work items of a scan share.
struct Shared<'a, R> {
    rule: R,
    state: &'a LayerState<'a>,
    values: &'a [f32],
    value_stride: usize,
    value_offset: usize,
    out: Disjoint<'a, f32>,
}

impl<R> Shared<'_, R> {
    /// Address of a strip of a work item in the slot that it is read from.
    fn source(&self, work: &HeadStrips<'_>, strip: usize) -> *const f32 {
        let slot = work.sequence.read.unwrap_or(work.sequence.write);
        self.state.at(slot, self.state.layout().strip(work.head, strip))
    }
}

/// Some strips of one head of one sequence.
struct HeadStrips<'a> {
    sequence: &'a PlannedSequence,
    head: usize,
    strips: Range<usize>,
}

/// Advances a work item over its sequence's rows.
struct Advance<'a, R> {
    shared: &'a Shared<'a, R>,
    work: HeadStrips<'a>,
    /// Start of the work item that this thread probably computes next.
    upcoming: Option<*const f32>,
    /// Buffer for the keys of a tile.
    keys: &'a mut [f32],
    /// Buffer for the strips of a deferred state.
    spill: &'a mut [f32],
}

/// A work item whose head has elements of type `E`.
struct Typed<'a, R, E>(Advance<'a, R>, PhantomData<E>);

impl<R: Rule, E: Element> Kernel for Typed<'_, R, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Advance { shared, work, upcoming, keys, spill } = self.0;
        let rows = work.sequence.rows.clone();
        if rows.is_empty() {
            if !work.sequence.deferred {
                work.carry_over(shared.state);
            }
            return;
        }
        let mut tile = Tile { decay: [0.0; TILE_ROWS], gain: [0.0; TILE_ROWS], keys };
        let strips = work.strips.clone();
        for start in rows.clone().step_by(TILE_ROWS) {
            let rows = start..rows.end.min(start + TILE_ROWS);
            shared.rule.prepare(s, work.head, rows.clone(), &mut tile);
            for first in strips.clone().step_by(STRIPS) {
                let passage = Passage { shared, work: &work, rows: rows.clone(), tile: &tile, upcoming };
                // Two strips at once need 20 vectors, which only the largest register file has. For a single
                // row that comes from memory they are no faster.
                if S::COLUMNS > 2 && rows.len() > 1 && first + STRIPS <= strips.end {
                    passage.run::<S, E, STRIPS>(s, first, spill);
                } else {
                    for strip in first..strips.end.min(first + STRIPS) {
                        passage.run::<S, E, 1>(s, strip, spill);
                    }
                }
            }
        }
    }
}

impl HeadStrips<'_> {
    /// A sequence without rows: copies its state to its target slot.
    fn carry_over(&self, state: &LayerState<'_>) {
        let slot_ptr = |slot| state.at(slot, state.layout().strip(self.head, self.strips.start));
        let (to, len) =
            (slot_ptr(self.sequence.write), self.strips.len() * state.layout().strip_len(self.head));
        // SAFETY: these are the strips of this item, in slots of its sequence; the two slots may be the same.
        unsafe {
            match self.sequence.read {
                Some(slot) => slot_ptr(slot).copy_to(to, len),
                None => to.write_bytes(0, len),
            }
        }
    }
}

/// A tile of rows and the work item whose strips pass through it.
struct Passage<'a, R> {
    shared: &'a Shared<'a, R>,
    work: &'a HeadStrips<'a>,
    /// Rows, as indices of the step.
    rows: Range<usize>,
    tile: &'a Tile<'a>,
    upcoming: Option<*const f32>,
}

impl<R: Rule> Passage<'_, R> {
    /// Advances strips `strip..strip + N` over the rows. A deferred state is kept in `spill` from row to row.
    #[inline(always)]
    fn run<S: Simd, E: Element, const N: usize>(&self, s: S, strip: usize, spill: &mut [f32]) {
        let Self { shared, work, rows, tile, .. } = self;
        let (sequence, layout) = (work.sequence, shared.state.layout());
        let inner = layout.inner();
        let len = N * inner * LANES;
        let slot_ptr = |slot: usize| shared.state.at(slot, layout.strip(work.head, strip)).cast::<E>();
        // A deferred sequence has few rows, all in one tile, so its spill need not outlive this call.
        assert!(!sequence.deferred || len * size_of::<E>() <= size_of_val(spill));
        let spill = spill.as_mut_ptr().cast::<E>();
        let written = |slot: usize| if sequence.deferred { spill } else { slot_ptr(slot) };
        let mut from = match sequence.before(rows.start - sequence.rows.start) {
            Some(slot) => slot_ptr(slot),
            None => {
                let zeroes = written(sequence.write);
                // SAFETY: `len` elements of strips of this item, in a slot that only its sequence uses, or
                // the same number in this thread's spill.
                unsafe { zeroes.write_bytes(0, len) };
                zeroes
            }
        };
        let skip = s.splat(shared.rule.skip(work.head));
        let (mut key, mut query) = self.key_query(0);
        let mut projected = [s.splat(0.0); N];
        if R::CORRECTS {
            assert_eq!(key.len(), inner);
            // SAFETY: `from` points to N strips of `inner` vectors.
            projected = unsafe { project(s, from, key) };
        }
        for row in 0..rows.len() {
            let of_sequence = rows.start - sequence.rows.start + row;
            let last = row + 1 == rows.len();
            let to = written(sequence.after(of_sequence));
            let (decay, gain) = (tile.decay[row], tile.gain[row]);
            let (mut values, mut update) = ([s.splat(0.0); N], [s.splat(0.0); N]);
            for (n, (value, update)) in values.iter_mut().zip(&mut update).enumerate() {
                *value = self.value(s, rows.start + row, strip + n);
                *update = if R::CORRECTS { s.fma(s.splat(-decay), projected[n], *value) } else { *value };
                *update = s.mul(s.splat(gain), *update);
            }
            let (next_key, next_query) = if last { (key, query) } else { self.key_query(row + 1) };
            let ahead = if last { self.ahead(strip).map(<*const f32>::cast) } else { None };
            assert!(key.len() == inner && query.len() == inner && next_key.len() == inner);
            let sweep = Sweep { from, to, key, query, next_key, ahead, decay: s.splat(decay), update };
            // SAFETY: `from` and `to` point to N strips of `inner` vectors, and nothing else accesses the
            // written memory: a slot (`LayerState::at`) or this thread's spill.
            let (mut out, next_projected) = unsafe {
                match (R::CORRECTS && !last, ahead.is_some()) {
                    (true, _) => sweep.run::<S, true, false>(s),
                    (false, true) => sweep.run::<S, false, true>(s),
                    (false, false) => sweep.run::<S, false, false>(s),
                }
            };
            projected = next_projected;
            for (n, (out, value)) in out.iter_mut().zip(&values).enumerate() {
                if !R::CORRECTS {
                    *out = s.fma(skip, *value, *out);
                }
                self.put(s, rows.start + row, strip + n, *out);
            }
            for slot in sequence.copies(of_sequence) {
                // SAFETY: as above, and slots that are written do not overlap.
                unsafe { to.copy_to_nonoverlapping(slot_ptr(slot), len) };
            }
            (from, key, query) = (to, next_key, next_query);
        }
    }

    /// Key and query of a row of the tile.
    #[inline(always)]
    fn key_query(&self, row: usize) -> (&[f32], &[f32]) {
        let inner = self.shared.state.layout().inner();
        self.tile.keys[row * 2 * inner..(row + 1) * 2 * inner].split_at(inner)
    }

    /// Memory to prefetch while the last row passes over a strip: the strip after the next one, because the
    /// next one is too close.
    fn ahead(&self, strip: usize) -> Option<*const f32> {
        let (ahead, end) = (strip + 2, self.work.strips.end);
        if ahead < end {
            return Some(self.shared.source(self.work, ahead));
        }
        let layout = self.shared.state.layout();
        self.upcoming.map(|start| start.wrapping_add((ahead - end) * layout.strip_len(self.work.head)))
    }

    /// A strip of a row's value; the padding is zero.
    #[inline(always)]
    fn value<S: Simd>(&self, s: S, row: usize, strip: usize) -> S::V {
        let shared = self.shared;
        let outer = shared.state.layout().outer();
        let column = self.work.head * outer + strip * LANES;
        let lanes = LANES.min(outer - strip * LANES);
        let at = row * shared.value_stride + shared.value_offset + column;
        // Rows are too far apart for the hardware prefetcher.
        s.prefetch(shared.values.as_ptr().wrapping_add(at + AHEAD_ROWS * shared.value_stride).cast());
        match shared.values[at..at + lanes].first_chunk() {
            Some(chunk) => s.chunk(chunk),
            None => s.tail(&shared.values[at..at + lanes]),
        }
    }

    /// Stores a strip of a row's output, without the padding.
    #[inline(always)]
    fn put<S: Simd>(&self, s: S, row: usize, strip: usize, out: S::V) {
        let layout = self.shared.state.layout();
        let outer = layout.outer();
        let lanes = LANES.min(outer - strip * LANES);
        let at = (row * layout.shape().heads + self.work.head) * outer + strip * LANES;
        // SAFETY: sequences do not share rows, and only this item uses this strip of this head.
        let target = unsafe { self.shared.out.slice(at, lanes) };
        // Prefetched, because a store that waits for its line delays the stores of the state behind it.
        s.prefetch(target.as_ptr().wrapping_add(AHEAD_ROWS * layout.shape().heads * outer).cast());
        match target.first_chunk_mut() {
            Some(chunk) => s.put(out, chunk),
            None => s.put_tail(out, target),
        }
    }
}

/// One row's pass over N strips.
struct Sweep<'a, E, V, const N: usize> {
    from: *const E,
    to: *mut E,
    key: &'a [f32],
    query: &'a [f32],
    next_key: &'a [f32],
    /// Memory to prefetch meanwhile, of the same size as the strips.
    ahead: Option<*const E>,
    decay: V,
    update: [V; N],
}

/// For each of N strips, two partial sums: over even and over odd indices.
struct Sums<V, const N: usize>([[V; N]; 2]);

impl<V: Copy, const N: usize> Sums<V, N> {
    #[inline(always)]
    fn zero<S: Simd<V = V>>(s: S) -> Self {
        Self([[s.splat(0.0); N]; 2])
    }

    #[inline(always)]
    fn total<S: Simd<V = V>>(self, s: S) -> [V; N] {
        let Self([mut total, odd]) = self;
        for (even, odd) in total.iter_mut().zip(&odd) {
            *even = s.add(*even, *odd);
        }
        total
    }
}

/// Computes `S^T key` of N strips.
///
/// # Safety
/// `from` must be readable for N strips of `key.len()` vectors.
#[inline(always)]
unsafe fn project<S: Simd, E: Element, const N: usize>(s: S, from: *const E, key: &[f32]) -> [S::V; N] {
    let strip = key.len() * LANES;
    let mut sums = Sums::<S::V, N>::zero(s);
    for (i, pair) in key.chunks(2).enumerate() {
        for (parity, key) in pair.iter().enumerate() {
            let at = (2 * i + parity) * LANES;
            for (n, sum) in sums.0[parity].iter_mut().enumerate() {
                // SAFETY: each strip has one vector for each element of the key.
                *sum = s.fma(s.splat(*key), unsafe { E::load(s, from.add(at + n * strip)) }, *sum);
            }
        }
    }
    sums.total(s)
}

impl<E: Element, V: Copy, const N: usize> Sweep<'_, E, V, N> {
    /// Updates the strips. Returns their new `S^T query` and, if `NEXT`, `S^T next_key`. `AHEAD` enables
    /// prefetching.
    ///
    /// # Safety
    /// `from` must be readable and `to` writable for N strips of `key.len()` vectors; they may be the same
    /// memory.
    #[inline(always)]
    unsafe fn run<S: Simd<V = V>, const NEXT: bool, const AHEAD: bool>(&self, s: S) -> ([V; N], [V; N]) {
        let inner = self.key.len();
        assert!(self.query.len() == inner && self.next_key.len() == inner);
        let (mut sums, mut next_sums) = (Sums::zero(s), Sums::zero(s));
        for i in (0..inner / 2 * 2).step_by(2) {
            // SAFETY: both indices are below `inner`; else this function's own contract.
            unsafe {
                self.step::<S, NEXT, AHEAD>(s, i, &mut sums.0[0], &mut next_sums.0[0]);
                self.step::<S, NEXT, AHEAD>(s, i + 1, &mut sums.0[1], &mut next_sums.0[1]);
            }
        }
        if inner % 2 == 1 {
            // SAFETY: as above.
            unsafe { self.step::<S, NEXT, AHEAD>(s, inner - 1, &mut sums.0[0], &mut next_sums.0[0]) };
        }
        (sums.total(s), next_sums.total(s))
    }

    /// Updates index `i` of all strips.
    ///
    /// # Safety
    /// As for `run`, and `i` below the length of key, query and next key.
    #[inline(always)]
    unsafe fn step<S: Simd<V = V>, const NEXT: bool, const AHEAD: bool>(
        &self,
        s: S,
        i: usize,
        sums: &mut [V; N],
        next_sums: &mut [V; N],
    ) {
        let strip = self.key.len() * LANES;
        // SAFETY: `i` is below their lengths, by this function's contract.
        let [key, query, next_key] =
            unsafe { [self.key, self.query, self.next_key].map(|x| s.splat(*x.get_unchecked(i))) };
        // All loads come first: a store of one strip looks like the source of a load of the next strip, which
        // is a multiple of 4 KiB away.
        let mut states = self.update;
        for (n, state) in states.iter_mut().enumerate() {
            let at = i * LANES + n * strip;
            if AHEAD && let Some(ahead) = self.ahead {
                s.prefetch(ahead.wrapping_add(at).cast());
            }
            // SAFETY: vector i of strip n, by this function's contract.
            let old = unsafe { E::load(s, self.from.add(at)) };
            *state = s.fma(key, *state, s.mul(self.decay, old));
        }
        for (n, state) in states.into_iter().enumerate() {
            // SAFETY: as above.
            let left = unsafe { E::store(s, state, self.to.add(i * LANES + n * strip)) };
            sums[n] = s.fma(query, state, sums[n]);
            if NEXT {
                next_sums[n] = s.fma(next_key, left, next_sums[n]);
            }
        }
    }
}
