//! A smaller model with the same vocabulary that drafts tokens for a larger one.
//!
//! The draft model computes the same tokens in its own decoder and arena, a few steps behind. Positions of
//! rejected draft tokens are overwritten. The engine never waits for it: a sequence that the draft model has
//! not read to its end gets no draft tokens.

use crate::Error;
use crate::decoder::{CacheKind, Decoder};
use crate::scheduler::SeqId;
use kernels::backend::{BlockTable, NO_INDEX, StepInput, StepSequence};
use std::collections::HashMap;

/// Maximum number of tokens that it reads before one step, over all sequences.
const MAX_READ_TOKENS: usize = 512;

pub struct DraftModel {
    decoder: Decoder,
    block_tokens: usize,
    longest: usize,
    max_rows: usize,
    /// Numbers of free blocks.
    free: Vec<u32>,
    /// For each group: (offset of the first block, distance between blocks), in units of 64 bytes.
    groups: Vec<(u32, u32)>,
    sequences: HashMap<SeqId, Read>,
}

/// The computed tokens and the blocks of a sequence.
#[derive(Debug, Default)]
struct Read {
    tokens: Vec<u32>,
    blocks: Vec<u32>,
}

struct DraftRows {
    at: usize,
    id: SeqId,
    tokens: Vec<u32>,
    context: usize,
}

impl DraftModel {
    /// Creates it over a loaded decoder without an arena, and allocates an arena of at most `bytes`.
    ///
    /// # Errors
    /// [`Error::Config`] for a model with recurrent layers: their state cannot be rolled back.
    pub fn new(
        mut decoder: Decoder,
        (block_tokens, max_rows): (usize, usize),
        bytes: u64,
    ) -> Result<Self, Error> {
        if decoder.groups().iter().any(|group| group.kind == CacheKind::State) {
            let reason = "a model with recurrent layers does not draft".to_owned();
            return Err(Error::Config { option: "spec", reason });
        }
        let each: usize = decoder.groups().iter().map(|group| group.block_bytes).sum();
        let count = (bytes / each.max(1) as u64).min(u64::from(u32::MAX)) as usize;
        let (mut end, mut groups) = (0, Vec::new());
        for group in decoder.groups() {
            let offset = |bytes: usize| u32::try_from(bytes / 64);
            match (offset(end), offset(end + count * group.block_bytes), offset(group.block_bytes)) {
                (Ok(first), Ok(_), Ok(stride)) => groups.push((first, stride)),
                _ => return Err(Error::Invariant(format!("{bytes} bytes for a drafter"))),
            }
            end += count * group.block_bytes;
        }
        decoder.allocate_kv(end)?;
        let longest = decoder.spec().context_length;
        let free = (0..count as u32).rev().collect();
        Ok(Self { decoder, block_tokens, longest, max_rows, free, groups, sequences: HashMap::new() })
    }

    /// Forgets the sequences for which `is_live` returns `false`.
    pub(crate) fn retain(&mut self, is_live: impl Fn(SeqId) -> bool) {
        let Self { sequences, free, .. } = self;
        sequences.retain(|id, read| {
            let is_live = is_live(*id);
            if !is_live {
                free.append(&mut read.blocks);
            }
            is_live
        });
    }

    /// The next `count` draft tokens of each sequence, or an empty list if the sequence is not read to its
    /// end.
    pub(crate) fn draft(&mut self, of: &[(SeqId, &[u32])], count: usize) -> Result<Vec<Vec<u32>>, Error> {
        let mut drafted = vec![Vec::new(); of.len()];
        let (mut draft_rows, mut ready) = (Vec::new(), Vec::new());
        let mut left = MAX_READ_TOKENS.min(self.max_rows);
        for (at, (id, tokens)) in of.iter().enumerate() {
            if !self.make_room(*id, tokens, count) {
                continue;
            }
            let read_len = self.sequences.get(id).map_or(0, |read| common_prefix_len(&read.tokens, tokens));
            let rows = (tokens.len() - read_len).min(left);
            if rows == 0 {
                continue;
            }
            left -= rows;
            if read_len + rows == tokens.len() {
                ready.push(at);
            }
            draft_rows.push(DraftRows {
                at,
                id: *id,
                tokens: tokens[read_len..read_len + rows].to_vec(),
                context: read_len,
            });
        }
        for _ in 0..count {
            if draft_rows.is_empty() {
                break;
            }
            let best = self.step(&draft_rows)?;
            let mut next = Vec::with_capacity(ready.len());
            for (entry, token) in draft_rows.into_iter().zip(best) {
                // No draft token if the logits are not finite.
                if ready.contains(&entry.at) && token != NO_INDEX {
                    drafted[entry.at].push(token);
                    let context = entry.context + entry.tokens.len();
                    next.push(DraftRows { tokens: vec![token], context, ..entry });
                }
            }
            draft_rows = next;
        }
        Ok(drafted)
    }

    /// Allocates blocks for a sequence's tokens and `draft_tokens` draft tokens. Returns `false` if there are
    /// too few.
    fn make_room(&mut self, id: SeqId, tokens: &[u32], draft_tokens: usize) -> bool {
        let len = tokens.len() + draft_tokens;
        let blocks = len.div_ceil(self.block_tokens);
        let read = self.sequences.entry(id).or_default();
        let needed = blocks.saturating_sub(read.blocks.len());
        if len > self.longest || needed > self.free.len() {
            return false;
        }
        read.blocks.extend(self.free.drain(self.free.len() - needed..));
        true
    }

    /// Computes these rows. Returns the most likely token after each entry.
    fn step(&mut self, draft_rows: &[DraftRows]) -> Result<Vec<u32>, Error> {
        let (mut tokens, mut sequences, mut last) = (Vec::new(), Vec::new(), Vec::new());
        let mut offsets: Vec<Vec<Vec<u32>>> = vec![Vec::with_capacity(draft_rows.len()); self.groups.len()];
        for entry in draft_rows {
            let rows = tokens.len()..tokens.len() + entry.tokens.len();
            tokens.extend_from_slice(&entry.tokens);
            last.push(tokens.len() as u32 - 1);
            sequences.push(StepSequence { rows, context: entry.context, segment_start: None });
            let read = self.sequences.entry(entry.id).or_default();
            read.tokens.truncate(entry.context);
            read.tokens.extend_from_slice(&entry.tokens);
            for ((first, stride), group) in self.groups.iter().zip(&mut offsets) {
                group.push(read.blocks.iter().map(|block| first + block * stride).collect());
            }
        }
        let tables: Vec<Vec<BlockTable<'_>>> = offsets
            .iter()
            .map(|group| group.iter().map(|offsets| BlockTable::Paged(offsets)).collect())
            .collect();
        let input = StepInput { tokens: &tokens, sequences: &sequences, tables: &tables, states: &[] };
        self.decoder.forward(&[], &input)?;
        let mut best = Vec::with_capacity(draft_rows.len());
        self.decoder.argmax(&last, &mut best)?;
        Ok(best)
    }
}

/// Length of the common prefix, but at most `tokens.len() - 1`, so that there is always a row to compute.
fn common_prefix_len(read: &[u32], tokens: &[u32]) -> usize {
    let common = read.iter().zip(tokens).take_while(|(a, b)| a == b).count();
    common.min(tokens.len().saturating_sub(1))
}
