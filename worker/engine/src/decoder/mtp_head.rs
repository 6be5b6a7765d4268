//! The MTP head, a drafter behind the last layer: see [`MtpHeadSpec`]
//! (docs/decisions/0051-use-a-models-mtp-head.md).
//!
//! Its keys and values are one more layer of the group with full attention. The hidden state that its next
//! position needs is stored at the end of a sequence's recurrent state. So both depend only on earlier
//! tokens, like the rest of the cache, and are shared, saved and transferred with it. Each step of the model
//! writes them for its rows, which needs no attention and no feed-forward.
//!
//! A drafting round also writes keys and values, at positions that are not computed yet. The next step
//! overwrites them. For a sequence without a block at these positions there is a spare block behind the
//! arena.

use super::layout::{self, Buffers, CacheKind, LayerCache, Widths};
use super::{Decoder, DraftFrom, Drafted, embedding_of, feed_forward, job, mixer};
use crate::Error;
use crate::weights::{Head, LayerWeights, Linear, Loader, Packs, TensorSource};
use kernels::backend::{
    Backend, BlockTable, BufferId, EmbedIndex, EmbedOp, MatrixId, NO_INDEX, Norm, StepInput, StepSequence,
    StepState,
};
use model::spec::{MixerSpec, MtpHeadSpec};
use std::collections::{HashSet, VecDeque};

/// Unit of offsets into the arena, in bytes.
const UNIT: usize = 64;

pub(super) struct MtpHead {
    join: Linear,
    embedding_norm: Norm,
    hidden_norm: Norm,
    layer: LayerWeights,
    norm: Norm,
    embedding: MatrixId,
    embedding_scale: f32,
    /// The norm after the model's last layer.
    model_norm: Norm,
    head: Linear,
    cache: LayerCache,
    width: usize,
    block_tokens: usize,
    /// Offset in a state of the hidden state for the next position, and size of a state; both in units.
    past_at: u32,
    state_units: usize,
    /// Units of a block of its group.
    block_units: usize,
    /// The model's buffers, except for the residual stream.
    buffers: Buffers,
    embedded: BufferId,
    hidden: BufferId,
    /// Embedding and hidden state, concatenated.
    joined: BufferId,
    /// For each step with deferred updates, the oldest first: the deferred sequences.
    deferred: VecDeque<Vec<Deferred>>,
    /// Number of sequences that it drafts for at a time. Each has a spare block, from offset `spare` on.
    sequences: usize,
    spare: u32,
}

/// A sequence whose number of accepted rows is not known yet.
struct Deferred {
    write: u32,
    /// Hidden states before each row and after the last one, `[rows + 1, width]`.
    pasts: Vec<f32>,
}

impl Decoder {
    /// Loads the MTP head of this model, for `sequences` sequences at a time, before the arena is allocated.
    /// The model's last layer must be here.
    ///
    /// # Errors
    /// [`Error::Config`] if the last layer is at another stage, or the model lacks recurrent or
    /// full-attention layers.
    pub fn load_mtp_head(
        &mut self,
        spec: &MtpHeadSpec,
        source: &dyn TensorSource,
        sequences: usize,
    ) -> Result<(), Error> {
        let refuse = |reason: &str| Err(Error::Config { option: "spec", reason: reason.to_owned() });
        let held = self.config.layers.clone();
        if held.end != self.spec.layers.len() {
            return refuse("the MTP head needs the last layer, which another stage has");
        }
        let [full, state] = &mut self.groups[..] else {
            return refuse("an MTP head is supported only beside full attention and recurrent layers");
        };
        if (full.kind, state.kind) != (CacheKind::Full, CacheKind::State) {
            return refuse("an MTP head is supported only beside full attention and recurrent layers");
        }
        let (MixerSpec::Attention(attention), Some(Head::Logits { norm: model_norm, linear })) =
            (&spec.layer.mixer, &self.weights.head)
        else {
            return Err(Error::NoOutputHead);
        };
        let (width, rows) = (self.spec.hidden, self.config.max_rows);
        let own = std::slice::from_ref(&spec.layer);
        let wide_enough =
            Widths::of(&self.spec, &self.spec.layers[held]).covers(&Widths::of(&self.spec, own));
        let backend = self.backend.as_mut();
        let buffers = match wide_enough {
            true => Buffers { x: backend.create_buffer(rows, width)?, ..self.buffers.clone() },
            false => layout::create_buffers(&self.spec, own, &self.config, backend)?,
        };
        let shape = layout::kv_shape(attention, &self.config);
        let kv = backend.create_kv_layer(0, shape, full.block_bytes)?;
        let cache = LayerCache { kv: Some(kv), state: None };
        full.block_bytes += backend.kv_block_bytes(shape)?;
        full.layers += 1;
        let past_at = state.block_bytes / UNIT;
        state.block_bytes += (width * size_of::<f32>()).next_multiple_of(UNIT);
        let mut loader = Loader::new(source, Packs::Off, backend);
        let mtp_head = MtpHead {
            join: loader.linear(&spec.join)?,
            embedding_norm: loader.norm(&spec.embedding_norm)?,
            hidden_norm: loader.norm(&spec.hidden_norm)?,
            layer: loader.layer(&spec.layer)?,
            norm: loader.norm(&spec.norm)?,
            embedding: match &spec.embedding {
                Some(table) => loader.table(table, self.spec.vocab, width)?,
                None => embedding_of(&self.spec, &self.weights, &mut loader)?,
            },
            embedding_scale: self.spec.embedding.scale,
            model_norm: *model_norm,
            head: match &spec.head {
                Some(head) => loader.linear(head)?,
                None => *linear,
            },
            cache,
            width,
            block_tokens: self.config.block_tokens,
            past_at: units(past_at)?,
            state_units: state.block_bytes / UNIT,
            block_units: full.block_bytes / UNIT,
            buffers,
            embedded: backend.create_buffer(rows, width)?,
            hidden: backend.create_buffer(rows, width)?,
            joined: backend.create_buffer(rows, 2 * width)?,
            deferred: VecDeque::new(),
            sequences: sequences.min(rows).min(self.config.logit_rows).max(1),
            spare: 0,
        };
        self.mtp_head = Some(mtp_head);
        Ok(())
    }

    /// Bytes of the arena on top of those passed to [`Decoder::allocate_kv`].
    pub fn spare_bytes(&self) -> usize {
        self.mtp_head.as_ref().map_or(0, |mtp_head| mtp_head.sequences * mtp_head.block_units * UNIT)
    }

    /// Runs the MTP head on the rows of a step that has just left the last layer.
    pub(super) fn follow(&mut self, step: &StepInput<'_>) -> Result<(), Error> {
        match &mut self.mtp_head {
            Some(mtp_head) => mtp_head.follow(self.backend.as_mut(), self.buffers.x, step),
            None => Ok(()),
        }
    }
}

impl MtpHead {
    /// Reserves space for spare blocks behind an arena of `bytes`. Returns the bytes to allocate.
    pub(super) fn make_room(&mut self, bytes: usize) -> Result<usize, Error> {
        let first = bytes.div_ceil(UNIT);
        let all = first + self.sequences * self.block_units;
        (self.spare, _) = (units(first)?, units(all)?);
        // A step names a state for each sequence, even if it uses none.
        self.sequences = self.sequences.min(all / self.state_units.max(1)).max(1);
        Ok(all * UNIT)
    }

    /// Maximum number of sequences of a call of [`MtpHead::draft`].
    pub(super) fn sequences(&self) -> usize {
        self.sequences
    }

    /// Writes keys and values of a step's rows, whose residual stream after the last layer is in `x`, and the
    /// hidden state for the position after each sequence's last row.
    fn follow(&mut self, backend: &mut dyn Backend, x: BufferId, step: &StepInput<'_>) -> Result<(), Error> {
        let width = self.width;
        self.embed(backend)?;
        backend.norm(x, &self.model_norm, self.hidden)?;
        let left = self.normed_hidden(backend, step.tokens.len())?;
        let mut pasts = Vec::with_capacity(left.len());
        let mut deferred = Vec::new();
        for (sequence, state) in step.sequences.iter().zip(step.states) {
            let own = &left[sequence.rows.start * width..sequence.rows.end * width];
            // The first token has no hidden state before it.
            let mut row = vec![0f32; width];
            if let Some(slot) = state.read {
                self.read_past(backend, slot, &mut row)?;
            }
            row.extend_from_slice(own);
            pasts.extend_from_slice(&row[..own.len()]);
            for export in &state.exports {
                self.write_past(backend, export.slot, &row[(export.row + 1) * width..][..width])?;
            }
            if state.deferred {
                deferred.push(Deferred { write: state.write, pasts: row });
            } else {
                self.write_past(backend, state.write, &row[own.len()..])?;
            }
        }
        if !deferred.is_empty() {
            self.deferred.push_back(deferred);
        }
        self.join(backend, &pasts)?;
        mixer::write_kv(backend, &self.buffers, &self.layer, self.cache)
    }

    /// See [`Decoder::accept`].
    pub(super) fn accept(&mut self, backend: &mut dyn Backend, rows: &[usize]) -> Result<(), Error> {
        let deferred = self.deferred.pop_front().unwrap_or_default();
        for (Deferred { write, pasts }, rows) in deferred.into_iter().zip(rows) {
            let past = pasts.get(rows * self.width..(rows + 1) * self.width);
            let past = past.ok_or_else(|| Error::Invariant(format!("{rows} rows count of fewer")))?;
            self.write_past(backend, write, past)?;
        }
        Ok(())
    }

    /// See [`Decoder::draft`]. Of several sequences whose next position is in the same block, only the first
    /// one gets draft tokens. They have just diverged and will get blocks of their own.
    pub(super) fn draft(
        &self,
        backend: &mut dyn Backend,
        from: &[DraftFrom<'_>],
        count: usize,
    ) -> Result<Vec<Drafted>, Error> {
        let start = |from: &DraftFrom<'_>| Drafted { tokens: Vec::new(), hidden: from.hidden.clone() };
        let mut drafted: Vec<Drafted> = from.iter().map(start).collect();
        let mut taken = HashSet::new();
        let own = |from: &DraftFrom<'_>| {
            let mut blocks = own_blocks(from, self.block_tokens).skip(from.context / self.block_tokens);
            blocks.next().is_none_or(|block| taken.insert(block))
        };
        let has_own_block: Vec<bool> = from.iter().map(own).collect();
        // A sequence may need at most one block more than it has.
        for round in 0..count.min(self.block_tokens) {
            let draft_tokens = |at: &usize| has_own_block[*at] && round < from[*at].most;
            let rows: Vec<usize> = (0..from.len()).filter(draft_tokens).collect();
            if rows.is_empty() {
                break;
            }
            self.draft_round(backend, from, &rows, &mut drafted)?;
        }
        Ok(drafted)
    }

    /// Drafts one more token for these sequences.
    fn draft_round(
        &self,
        backend: &mut dyn Backend,
        from: &[DraftFrom<'_>],
        rows: &[usize],
        drafted: &mut [Drafted],
    ) -> Result<(), Error> {
        let (b, width) = (&self.buffers, self.width);
        let (mut tokens, mut sequences, mut blocks) = (Vec::new(), Vec::new(), Vec::new());
        let (mut states, mut hidden) = (Vec::new(), Vec::with_capacity(rows.len() * width));
        for (row, &at) in rows.iter().enumerate() {
            let (from, so_far) = (&from[at], &drafted[at]);
            let context = from.context + so_far.tokens.len();
            tokens.push(so_far.tokens.last().copied().unwrap_or(from.token));
            sequences.push(StepSequence { rows: row..row + 1, context, segment_start: None });
            let spare = units(self.spare as usize + at * self.block_units)?;
            let own = own_blocks(from, self.block_tokens).chain(std::iter::once(spare));
            blocks.push(own.take(context / self.block_tokens + 1).collect::<Vec<u32>>());
            // No op of this step uses a state, but each sequence must name one.
            states.push(StepState { write: units(row * self.state_units)?, ..StepState::default() });
            hidden.extend_from_slice(&so_far.hidden);
        }
        let tables = [blocks.iter().map(|blocks| BlockTable::Paged(blocks)).collect()];
        let input = StepInput { tokens: &tokens, sequences: &sequences, tables: &tables, states: &states };
        backend.begin_step(&input)?;
        self.embed(backend)?;
        backend.write_rows(self.hidden, &hidden)?;
        let pasts = self.normed_hidden(backend, rows.len())?;
        self.join(backend, &pasts)?;
        mixer::run(backend, b, &self.layer, 1.0, self.cache)?;
        feed_forward::run(backend, b, &self.layer, 1.0)?;
        backend.norm(b.x, &self.norm, b.normed)?;
        backend.matmul(b.normed, &[job(&self.head, b.logits, false)])?;
        let mut best = Vec::with_capacity(rows.len());
        backend.argmax(b.logits, &mut best)?;
        // Logits that are not finite give no draft token.
        for ((row, &at), token) in rows.iter().enumerate().zip(best).filter(|(_, token)| *token != NO_INDEX) {
            drafted[at].tokens.push(token);
            backend.read_row(b.normed, row, &mut drafted[at].hidden)?;
        }
        Ok(())
    }

    /// Computes the normed embeddings of the step's tokens.
    fn embed(&self, backend: &mut dyn Backend) -> Result<(), Error> {
        backend.embed(&EmbedOp {
            table: self.embedding,
            index: EmbedIndex::Token,
            scale: self.embedding_scale,
            accumulate: false,
            out: self.embedded,
        })?;
        Ok(backend.norm(self.embedded, &self.embedding_norm, self.embedded)?)
    }

    /// Norms the hidden states in their buffer and returns them.
    fn normed_hidden(&self, backend: &mut dyn Backend, rows: usize) -> Result<Vec<f32>, Error> {
        backend.norm(self.hidden, &self.hidden_norm, self.hidden)?;
        let mut values = vec![0f32; rows * self.width];
        for (row, out) in values.chunks_exact_mut(self.width).enumerate() {
            backend.read_row(self.hidden, row, out)?;
        }
        Ok(values)
    }

    /// Computes the layer's input from the step's embeddings and the hidden state before each row.
    fn join(&self, backend: &mut dyn Backend, pasts: &[f32]) -> Result<(), Error> {
        let mut joined = vec![0f32; 2 * pasts.len()];
        let rows = joined.chunks_exact_mut(2 * self.width).zip(pasts.chunks_exact(self.width));
        for (row, (both, past)) in rows.enumerate() {
            let (embedded, hidden) = both.split_at_mut(self.width);
            backend.read_row(self.embedded, row, embedded)?;
            hidden.copy_from_slice(past);
        }
        backend.write_rows(self.joined, &joined)?;
        Ok(backend.matmul(self.joined, &[job(&self.join, self.buffers.x, false)])?)
    }

    fn read_past(&self, backend: &mut dyn Backend, slot: u32, past: &mut [f32]) -> Result<(), Error> {
        let mut bytes = vec![0; size_of_val(past)];
        backend.read_arena(slot + self.past_at, &mut bytes)?;
        let values = bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
        past.iter_mut().zip(values).for_each(|(past, value)| *past = value);
        Ok(())
    }

    fn write_past(&self, backend: &mut dyn Backend, slot: u32, past: &[f32]) -> Result<(), Error> {
        let bytes: Vec<u8> = past.iter().flat_map(|value| value.to_le_bytes()).collect();
        Ok(backend.write_arena(slot + self.past_at, &bytes)?)
    }
}

/// The offsets of a sequence's blocks. For contiguous blocks, those with its tokens.
fn own_blocks<'a>(from: &'a DraftFrom<'_>, block_tokens: usize) -> impl Iterator<Item = u32> + use<'a> {
    let (listed, run) = match from.tables.first() {
        Some(BlockTable::Paged(offsets)) => (*offsets, None),
        Some(BlockTable::Contiguous { first, stride }) => (&[][..], Some((*first, *stride))),
        None => (&[][..], None),
    };
    let count = from.context.div_ceil(block_tokens) as u32;
    let run = run.into_iter().flat_map(move |(first, stride)| (0..count).map(move |at| first + at * stride));
    listed.iter().copied().chain(run)
}

/// Converts a number of units into an offset.
fn units(count: usize) -> Result<u32, Error> {
    u32::try_from(count).map_err(|_| Error::Invariant(format!("an arena of {count} times {UNIT} bytes")))
}

#[cfg(test)]
mod tests;
