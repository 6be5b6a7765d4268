//! The attention of one step, checked once and cut into work items.
//!
//! A plan is made once per step and KV group and serves all layers of the group. The exactness of attention
//! is decided here: scores are computed in *tiles* of keys and partial results in *splits*, both at absolute
//! positions, so the computation of a row depends on the row's position alone. The grouping of rows and
//! splits into work items only decides which thread computes them.

use std::num::NonZeroU32;
use std::ops::Range;

use super::check_len;
use super::layout::KvLayout;
use crate::error::Error;

/// Keys between two updates of a row's running maximum.
pub(crate) const TILE: usize = 128;

/// Keys of a split: its partial result is computed from scratch and then merged in position order.
pub(crate) const SPLIT: usize = 1024;

/// A block table entry without a block.
pub const NO_BLOCK: u32 = u32::MAX;

/// Bytes in one unit of a block offset.
pub const OFFSET_UNIT: usize = 64;

/// Minimum number of rows from which a sequence's work is cut by rows instead of by splits.
const PREFILL_ROWS: usize = 8;

/// Number of f32 of row state (query and results) in one work item: a share of the L2 cache.
const ITEM_STATE: usize = 56 * 1024;

/// One query: a token of this step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueryRow {
    /// Index into the step's placements.
    pub sequence: u32,
    /// Absolute position.
    pub position: u32,
}

/// Positions of a sequence's blocks. Offsets are in units of [`OFFSET_UNIT`] bytes from the start of the
/// arena, without the layer's offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockTable<'a> {
    /// Entry i is the offset of block i (position / block tokens), or [`NO_BLOCK`] if the sequence has no
    /// such block.
    Paged(&'a [u32]),
    /// Block i is at offset `first + i * stride`.
    Contiguous {
        /// Offset of block 0.
        first: u32,
        /// Distance from one block to the next.
        stride: u32,
    },
}

impl BlockTable<'_> {
    /// Byte offset of a block, without the layer's offset.
    #[inline(always)]
    pub fn byte(&self, block: usize) -> Option<u64> {
        let unit = match *self {
            Self::Paged(table) => u64::from(*table.get(block).filter(|offset| **offset != NO_BLOCK)?),
            Self::Contiguous { first, stride } => u64::from(first) + block as u64 * u64::from(stride),
        };
        // Saturates, so that `check_arena` rejects an offset that is too large.
        Some(unit.saturating_mul(OFFSET_UNIT as u64))
    }
}

/// The shape that a plan is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionShape {
    /// Layout of the KV blocks.
    pub layout: KvLayout,
    /// Query heads, a multiple of the layout's key/value heads.
    pub heads: usize,
    pub visible: Visible,
}

/// The keys of its sequence that a query sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Visible {
    /// Keys up to and including the query's own position.
    Causal,
    /// The last w of the causal keys: the query at p sees keys j <= p with p - j < w.
    Window(NonZeroU32),
    /// All keys. A step contains the whole input of a sequence, from position 0 on.
    Whole,
    /// Of all keys those less than w positions before or behind the query.
    Around(NonZeroU32),
}

/// A row of the step in the plan's order.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PlannedRow {
    /// Index of the row in q and in the result.
    pub(crate) query: usize,
    pub(crate) sequence: usize,
    pub(crate) position: usize,
    pub(crate) start: usize,
    /// Position after the last visible one.
    pub(crate) end: usize,
    /// Index of the row's first partial result, one per visible split. `None`: the row has no stored partial
    /// results.
    pub(crate) partial: Option<usize>,
}

impl PlannedRow {
    /// Splits with a visible key.
    pub(crate) fn splits(&self) -> Range<usize> {
        self.start / SPLIT..self.end.div_ceil(SPLIT)
    }
}

/// Rows and splits that one thread computes for one key/value head.
#[derive(Debug, Clone)]
pub(crate) struct Item {
    /// Range in [`StepPlan::members`].
    pub(crate) members: Range<usize>,
    /// `Some`: a split whose partial results are stored. `None`: all splits of all rows.
    pub(crate) only_split: Option<usize>,
}

/// An owned copy of a placement, so that a backend can keep plans from op to op.
#[derive(Debug)]
enum OwnedPlacement {
    Paged(Vec<u32>),
    Contiguous { first: u32, stride: u32 },
}

impl OwnedPlacement {
    fn placement(&self) -> BlockTable<'_> {
        match self {
            Self::Paged(table) => BlockTable::Paged(table),
            Self::Contiguous { first, stride } => BlockTable::Contiguous { first: *first, stride: *stride },
        }
    }
}

/// A checked step, cut into work items.
#[derive(Debug)]
pub struct StepPlan {
    shape: AttentionShape,
    group_size: usize,
    placements: Vec<OwnedPlacement>,
    pub(crate) rows: Vec<PlannedRow>,
    /// Rows of the items, as indices into `rows`.
    pub(crate) members: Vec<usize>,
    pub(crate) items: Vec<Item>,
    /// Number of partial results of one head.
    pub(crate) partials: usize,
    /// Maximum number of members of an item.
    pub(crate) widest_item: usize,
    /// End of the last block of the step, without the layer's offset.
    end: u64,
    writes: Result<(), Error>,
}

impl StepPlan {
    /// Checks a step and cuts it into work for `threads` threads. The result of attention does not depend on
    /// `threads`.
    ///
    /// Rows of one sequence need not be in order. Sequences may share blocks; decoding sequences that share
    /// blocks are computed together. Takes time linear in rows and visible blocks.
    ///
    /// # Errors
    /// [`Error::HeadGroups`], [`Error::OutOfRange`] (a row of a sequence without placement),
    /// [`Error::MissingBlock`], [`Error::PartialSequence`] (only with [`Visible::Whole`] and [`Visible::Around`]).
    pub fn new(
        shape: AttentionShape,
        rows: &[QueryRow],
        placements: &[BlockTable<'_>],
        threads: usize,
    ) -> Result<Self, Error> {
        Self::with_spans(shape, rows, &[], placements, threads)
    }

    /// Like [`Self::new`]. `spans` is empty or has a range of positions for each row, which the row sees besides those
    /// of the shape. A range is empty, or contains the row's position and ends at or before the last row of the
    /// sequence; ranges of a sequence are equal or apart.
    ///
    /// # Errors
    /// Also [`Error::Length`], [`Error::Span`].
    pub fn with_spans(
        shape: AttentionShape,
        rows: &[QueryRow],
        spans: &[(u32, u32)],
        placements: &[BlockTable<'_>],
        threads: usize,
    ) -> Result<Self, Error> {
        if !spans.is_empty() {
            check_len("spans of rows", rows.len(), spans.len())?;
        }
        let group_size = shape.layout.group_size(shape.heads)?.get();
        let mut planned = Vec::with_capacity(rows.len());
        for (query, row) in rows.iter().enumerate() {
            let (sequence, position) = (row.sequence as usize, row.position as usize);
            if sequence >= placements.len() {
                return Err(Error::OutOfRange { what: "sequence", index: sequence, len: placements.len() });
            }
            let end = position + 1;
            let start = match shape.visible {
                Visible::Window(window) | Visible::Around(window) => {
                    end.saturating_sub(window.get() as usize)
                }
                Visible::Causal | Visible::Whole => 0,
            };
            planned.push(PlannedRow { query, sequence, position, start, end, partial: None });
        }
        planned.sort_unstable_by_key(|row| (row.sequence, row.position, row.query));
        match shape.visible {
            Visible::Causal | Visible::Window(_) => {}
            Visible::Whole => see_ahead(&mut planned, usize::MAX)?,
            Visible::Around(window) => see_ahead(&mut planned, window.get() as usize - 1)?,
        }
        if !spans.is_empty() {
            see_spans(&mut planned, spans)?;
        }
        let mut plan = Self {
            shape,
            group_size,
            placements: placements
                .iter()
                .map(|placement| match *placement {
                    BlockTable::Paged(table) => OwnedPlacement::Paged(table.to_vec()),
                    BlockTable::Contiguous { first, stride } => OwnedPlacement::Contiguous { first, stride },
                })
                .collect(),
            rows: planned,
            members: Vec::new(),
            items: Vec::new(),
            partials: 0,
            widest_item: 0,
            end: 0,
            writes: Ok(()),
        };
        plan.check_blocks()?;
        plan.writes = plan.check_writes();
        plan.cut(threads);
        Ok(plan)
    }

    pub fn shape(&self) -> &AttentionShape {
        &self.shape
    }

    /// Number of query rows in the step.
    pub fn rows(&self) -> usize {
        self.rows.len()
    }

    /// Query heads per key/value head.
    pub(crate) fn group_size(&self) -> usize {
        self.group_size
    }

    /// Byte offset of a block that is visible to a row of the plan, without the layer's offset.
    #[inline(always)]
    pub(crate) fn block(&self, sequence: usize, block: usize) -> Option<u64> {
        self.placements[sequence].placement().byte(block)
    }

    /// Checks that all blocks of a layer lie inside an arena of `len` bytes.
    pub(crate) fn check_arena(&self, layer_offset: usize, len: usize) -> Result<(), Error> {
        let end = self.end.saturating_add(layer_offset as u64);
        if end > len as u64 { Err(Error::OutsideArena { end, len }) } else { Ok(()) }
    }

    /// Checks that all rows may write their keys and values in parallel.
    pub(crate) fn writes(&self) -> Result<(), Error> {
        self.writes.clone()
    }

    /// The range of rows of each sequence.
    fn sequences(&self) -> impl Iterator<Item = Range<usize>> {
        let mut start = 0;
        self.rows.chunk_by(|a, b| a.sequence == b.sequence).map(move |rows| {
            let range = start..start + rows.len();
            start = range.end;
            range
        })
    }

    fn check_blocks(&mut self) -> Result<(), Error> {
        let tokens = self.shape.layout.block_tokens();
        let mut end = 0;
        for range in self.sequences() {
            // First block that no earlier row of the sequence has checked; rows are sorted by position.
            let mut next = 0;
            for row in &self.rows[range] {
                let sequence = row.sequence;
                for block in next.max(row.start / tokens)..row.end.div_ceil(tokens) {
                    let offset =
                        self.block(sequence, block).ok_or(Error::MissingBlock { sequence, block })?;
                    end = end.max(offset);
                }
                next = row.end.div_ceil(tokens);
            }
        }
        self.end = end.saturating_add(self.shape.layout.bytes() as u64);
        Ok(())
    }

    fn check_writes(&self) -> Result<(), Error> {
        let layout = &self.shape.layout;
        let mut slots: Vec<(u64, usize)> = Vec::with_capacity(self.rows.len());
        for row in &self.rows {
            let block = row.position / layout.block_tokens();
            let offset = self
                .block(row.sequence, block)
                .ok_or(Error::MissingBlock { sequence: row.sequence, block })?;
            slots.push((offset, row.position % layout.block_tokens()));
        }
        slots.sort_unstable();
        for pair in slots.windows(2) {
            let ((offset, slot), (next, next_slot)) = (pair[0], pair[1]);
            let overlap =
                if offset == next { slot == next_slot } else { next - offset < layout.bytes() as u64 };
            if overlap {
                return Err(Error::OverlappingWrites { offset: next });
            }
        }
        Ok(())
    }

    /// Cuts the step into items.
    fn cut(&mut self, threads: usize) {
        let (prefills, decodes): (Vec<_>, Vec<_>) =
            self.sequences().partition(|rows| rows.len() >= PREFILL_ROWS);
        self.cut_prefills(&prefills, threads);
        self.cut_decodes(&decodes);
        // Long items first, so that no long item is left for the end.
        let rows = &self.rows;
        let members = &self.members;
        let cost = |item: &Item| {
            let keys = |row: &usize| match item.only_split {
                Some(_) => SPLIT,
                None => rows[*row].end - rows[*row].start,
            };
            members[item.members.clone()].iter().map(keys).sum::<usize>()
        };
        self.items.sort_by_cached_key(|item| std::cmp::Reverse(cost(item)));
        self.widest_item = self.items.iter().map(|item| item.members.len()).max().unwrap_or(0);
    }

    /// Cuts the rows of one sequence into chunks whose state fits a thread's caches. If that gives too few
    /// items for the threads, each chunk is also cut by splits.
    fn cut_prefills(&mut self, sequences: &[Range<usize>], threads: usize) {
        let layout = &self.shape.layout;
        let kv_heads = layout.kv_heads();
        let rows: usize = sequences.iter().map(ExactSizeIterator::len).sum();
        let widest = self.widest_chunk();
        let balanced = if threads > 1 { (rows * kv_heads).div_ceil(4 * threads).max(16) } else { widest };
        let chunk = widest.min(balanced);
        let chunks: Vec<Range<usize>> = sequences
            .iter()
            .flat_map(|rows| rows.clone().step_by(chunk).map(move |start| start..rows.end.min(start + chunk)))
            .collect();
        let by_split = threads > 1 && chunks.len() * kv_heads < 4 * threads;
        for rows in chunks {
            let splits = self.rows[rows.start].splits().start..self.rows[rows.end - 1].splits().end;
            if by_split && splits.len() > 1 {
                self.reserve_partials(rows.clone());
                for split in splits {
                    self.push_item(rows.clone(), Some(split));
                }
            } else {
                self.push_item(rows, None);
            }
        }
    }

    /// Makes an item of each split of a decoding sequence, together with the other sequences that have the
    /// same blocks at the start of the split.
    fn cut_decodes(&mut self, sequences: &[Range<usize>]) {
        let mut by_split: Vec<Vec<Range<usize>>> = Vec::new();
        for rows in sequences {
            let splits = self.rows[rows.start].splits().start..self.rows[rows.end - 1].splits().end;
            if splits.len() > 1 {
                self.reserve_partials(rows.clone());
            }
            if by_split.len() < splits.end {
                by_split.resize_with(splits.end, Vec::new);
            }
            for split in splits {
                by_split[split].push(rows.clone());
            }
        }
        for (split, mut sequences) in by_split.into_iter().enumerate() {
            sequences.sort_by(|a, b| self.blocks_of_split(a, split).cmp(self.blocks_of_split(b, split)));
            let mut set: Vec<Range<usize>> = Vec::new();
            let widest = self.widest_chunk();
            for rows in sequences {
                let set_rows: usize = set.iter().map(ExactSizeIterator::len).sum();
                let joins = set.last().is_some_and(|last| {
                    set_rows + rows.len() <= widest && self.share_first_tile(last, &rows, split)
                });
                if !joins {
                    self.push_set(&set, split);
                    set.clear();
                }
                set.push(rows);
            }
            self.push_set(&set, split);
        }
    }

    fn push_set(&mut self, set: &[Range<usize>], split: usize) {
        if !set.is_empty() {
            self.push_item(set.iter().cloned().flatten(), Some(split));
        }
    }

    fn push_item(&mut self, rows: impl Iterator<Item = usize>, only_split: Option<usize>) {
        let start = self.members.len();
        let all = &self.rows;
        self.members
            .extend(rows.filter(|row| only_split.is_none_or(|split| all[*row].splits().contains(&split))));
        if self.members.len() > start {
            self.items.push(Item { members: start..self.members.len(), only_split });
        }
    }

    fn reserve_partials(&mut self, rows: Range<usize>) {
        for row in &mut self.rows[rows] {
            row.partial = Some(self.partials);
            self.partials += row.splits().len();
        }
    }

    /// Maximum number of rows in an item, so that their state stays in the L2 cache.
    fn widest_chunk(&self) -> usize {
        let layout = &self.shape.layout;
        let state = self.group_size * (layout.head_dim() + layout.v_head_dim());
        (ITEM_STATE / state).clamp(8, 128)
    }

    /// Byte offsets of the blocks of a split that a sequence sees, for comparison. `None`: no block.
    fn blocks_of_split(&self, rows: &Range<usize>, split: usize) -> impl Iterator<Item = Option<u64>> {
        self.blocks_of_keys(rows, split * SPLIT..(split + 1) * SPLIT)
    }

    fn blocks_of_keys(&self, rows: &Range<usize>, keys: Range<usize>) -> impl Iterator<Item = Option<u64>> {
        let tokens = self.shape.layout.block_tokens();
        let row = &self.rows[rows.end - 1];
        (keys.start / tokens..keys.end / tokens)
            .map(move |block| if block * tokens < row.end { self.block(row.sequence, block) } else { None })
    }

    fn share_first_tile(&self, a: &Range<usize>, b: &Range<usize>, split: usize) -> bool {
        let first = |rows: &Range<usize>| self.rows[rows.start].start.max(split * SPLIT) / TILE;
        first(a) == first(b)
            && self.same_blocks(self.rows[a.start].sequence, self.rows[b.start].sequence, first(a))
    }

    /// Whether two sequences have the same blocks in a tile.
    pub(crate) fn same_blocks(&self, a: usize, b: usize, tile: usize) -> bool {
        let tokens = self.shape.layout.block_tokens();
        a == b
            || (tile * TILE / tokens..(tile + 1) * TILE / tokens)
                .all(|block| self.block(a, block) == self.block(b, block))
    }
}

/// Adds each row's span to what the row sees. Starts and ends then still ascend with the positions of a sequence.
fn see_spans(rows: &mut [PlannedRow], spans: &[(u32, u32)]) -> Result<(), Error> {
    for rows in rows.chunk_by_mut(|a, b| a.sequence == b.sequence) {
        let last = rows.last().map_or(0, |row| row.position);
        let mut before = (0, 0);
        for row in rows {
            let (start, end) = spans[row.query];
            let (start, end) = (start as usize, end as usize);
            if start == end {
                continue;
            }
            let inside = (start..end).contains(&row.position) && end <= last + 1;
            if !inside || (start, end) != before && start < before.1 {
                return Err(Error::Span { position: row.position, start, end });
            }
            before = (start, end);
            (row.start, row.end) = (row.start.min(start), row.end.max(end));
        }
    }
    Ok(())
}

/// Makes the whole sequence visible to every row.
fn see_ahead(rows: &mut [PlannedRow], ahead: usize) -> Result<(), Error> {
    for rows in rows.chunk_by_mut(|a, b| a.sequence == b.sequence) {
        let len = rows.len();
        for (position, row) in rows.iter_mut().enumerate() {
            if row.position != position {
                return Err(Error::PartialSequence { sequence: row.sequence, position });
            }
            row.end = row.end.saturating_add(ahead).min(len);
        }
    }
    Ok(())
}
