//! A drafter that attends to its target's keys and values: see [`AssistantSpec`].
//!
//! It lives in the target's decoder, since it reads the target's embedding, its residual stream after the
//! final norm, and its caches, which it never writes. All draft tokens of a round have the position of the
//! token that they follow, and attend to the positions before it.

use super::layout::{self, Buffers};
use super::{Decoder, DecoderConfig, embedding_of, feed_forward, job, normed};
use crate::Error;
use crate::weights::{Head, Linear, Loader, MixerWeights, Packs, TensorSource, Weights};
use kernels::backend::{
    AttentionOp, Backend, BlockTable, BufferId, EmbedIndex, EmbedOp, KvLayerId, MatrixId, NO_INDEX, QkvOp,
    StepInput, StepSequence,
};
use model::spec::AssistantSpec;

pub(super) struct Assistant {
    weights: Weights,
    before: Linear,
    behind: Linear,
    embedding: MatrixId,
    /// For each layer of the drafter: the target's cache of keys and values that it attends to.
    caches: Vec<KvLayerId>,
    buffers: Buffers,
    /// The input: embedding and hidden state, concatenated.
    joined: BufferId,
    /// The hidden state that is the next draft token's input.
    next: BufferId,
    backbone: usize,
}

/// The state that drafting for a sequence starts from.
#[derive(Debug, Clone)]
pub struct DraftFrom<'a> {
    /// The newest token, whose keys and values are not computed yet.
    pub token: u32,
    /// Number of tokens before it; at least 1.
    pub context: usize,
    /// The target's hidden state of the last of these tokens: [`Decoder::hidden`].
    pub hidden: Vec<f32>,
    /// The target's block table for each group of keys and values, as in [`StepInput::tables`].
    pub tables: Vec<BlockTable<'a>>,
    /// Maximum number of useful draft tokens.
    pub most: usize,
}

#[derive(Debug, Clone, Default, PartialEq)]
pub struct Drafted {
    /// The most likely tokens, each following those before it.
    pub tokens: Vec<u32>,
    /// The hidden state that the next draft token would have used.
    pub(crate) hidden: Vec<f32>,
}

impl Decoder {
    /// Loads a drafter for this model, for `rows` sequences at a time. The model's last layer and all layers
    /// whose caches the drafter reads must be here. Must be called before the arena is allocated. `source`
    /// has the drafter; `target_source` has the model's embedding, which is loaded if it is not here.
    ///
    /// # Errors
    /// [`Error::Config`] for a drafter of another model, or one that reads layers of other stages.
    pub fn load_assistant(
        &mut self,
        spec: &AssistantSpec,
        (source, target_source): (&dyn TensorSource, &dyn TensorSource),
        rows: usize,
    ) -> Result<(), Error> {
        let refuse = |reason: String| Err(Error::Config { option: "spec", reason });
        let (trunk, target) = (&spec.trunk, &self.spec);
        if (spec.backbone, trunk.vocab) != (target.hidden, target.vocab) {
            let (backbone, vocab) = (spec.backbone, trunk.vocab);
            return refuse(format!(
                "the drafter is for a width of {backbone} and {vocab} tokens, but the model has {} and {}",
                target.hidden, target.vocab
            ));
        }
        let held = self.config.layers.clone();
        if held.end != target.layers.len() || !self.has_head() {
            return refuse(format!("a drafter needs the last layer, but this stage has layers {held:?}"));
        }
        let rows = rows.min(self.config.max_rows).min(self.config.logit_rows).max(1);
        let config = DecoderConfig {
            layers: 0..trunk.layers.len(),
            max_rows: rows,
            logit_rows: rows,
            ..self.config.clone()
        };
        let mut caches = Vec::with_capacity(trunk.layers.len());
        for layer in 0..trunk.layers.len() {
            let (Some(attention), Some(producer)) = (trunk.attention(layer), spec.producer(target, layer))
            else {
                return refuse(format!("layer {layer} of the drafter finds no layer of its kind and shape"));
            };
            let location =
                producer.checked_sub(held.start).and_then(|at| self.kv_locations.get(at).copied().flatten());
            let Some((group, offset)) = location else {
                return refuse(format!(
                    "the drafter reads the caches of layer {producer}, but this stage has layers {held:?}"
                ));
            };
            let mut shape = layout::kv_shape(attention, &config);
            // From the previous position, a window reaches one position further back.
            shape.window = match shape.window {
                Some(0 | 1) => return refuse(format!("layer {layer} of the drafter sees no position")),
                window => window.map(|window| window - 1),
            };
            caches.push(self.backend.create_kv_layer(group, shape, offset)?);
        }
        let mut loader = Loader::new(target_source, Packs::Off, self.backend.as_mut());
        let embedding = embedding_of(target, &self.weights, &mut loader)?;
        let mut loader = Loader::new(source, Packs::Off, self.backend.as_mut());
        let (before, behind) = (loader.linear(&spec.before)?, loader.linear(&spec.behind)?);
        let weights = loader.load(trunk, config.layers.clone(), &mut |_, _| {})?;
        let backend = self.backend.as_mut();
        self.assistant = Some(Assistant {
            weights,
            before,
            behind,
            embedding,
            caches,
            buffers: layout::create_buffers(trunk, &trunk.layers, &config, backend)?,
            joined: backend.create_buffer(rows, 2 * spec.backbone)?,
            next: backend.create_buffer(rows, spec.backbone)?,
            backbone: spec.backbone,
        });
        Ok(())
    }

    pub fn drafts(&self) -> bool {
        self.assistant.is_some() || self.mtp_head.is_some()
    }

    /// The residual stream of these rows of the last step, after the final norm.
    pub fn hidden(&mut self, rows: &[u32]) -> Result<Vec<Vec<f32>>, Error> {
        let Some(Head::Logits { norm, .. }) = &self.weights.head else { return Err(Error::NoOutputHead) };
        let mut hidden = Vec::with_capacity(rows.len());
        for rows in rows.chunks(self.config.logit_rows) {
            let b = &self.buffers;
            self.backend.gather_rows(b.x, rows, b.picked)?;
            self.backend.norm(b.picked, norm, b.picked_normed)?;
            for row in 0..rows.len() {
                let mut values = vec![0f32; self.spec.hidden];
                self.backend.read_row(b.picked_normed, row, &mut values)?;
                hidden.push(values);
            }
        }
        Ok(hidden)
    }

    /// Drafts up to `count` tokens for each sequence; fewer if fewer are useful or possible. Overwrites the
    /// residual stream of the last step.
    pub fn draft(&mut self, from: &[DraftFrom<'_>], count: usize) -> Result<Vec<Drafted>, Error> {
        let mut drafted = Vec::with_capacity(from.len());
        if let Some(mtp_head) = &self.mtp_head {
            for from in from.chunks(mtp_head.sequences()) {
                drafted.extend(mtp_head.draft(self.backend.as_mut(), from, count)?);
            }
            return Ok(drafted);
        }
        let max_rows = self.config.max_rows.min(self.config.logit_rows);
        for from in from.chunks(max_rows.max(1)) {
            drafted.extend(self.draft_together(from, count)?);
        }
        Ok(drafted)
    }

    fn draft_together(&mut self, from: &[DraftFrom<'_>], count: usize) -> Result<Vec<Drafted>, Error> {
        let Some(assistant) = &self.assistant else {
            return Err(Error::Invariant("this stage has no drafter".to_owned()));
        };
        let (backend, target) = (self.backend.as_mut(), &self.buffers);
        let own = Rows::own(from, self.config.block_tokens);
        let seen = Rows::seen(from);
        let start = |from: &DraftFrom<'_>| Drafted { tokens: Vec::new(), hidden: from.hidden.clone() };
        let mut drafted: Vec<Drafted> = from.iter().map(start).collect();
        for _ in 0..count {
            let newest = |(from, drafted): (&DraftFrom<'_>, &Drafted)| {
                drafted.tokens.last().copied().unwrap_or(from.token)
            };
            let tokens: Vec<u32> = from.iter().zip(&drafted).map(newest).collect();
            own.begin(backend, &tokens)?;
            backend.embed(&EmbedOp {
                table: assistant.embedding,
                index: EmbedIndex::Token,
                scale: self.spec.embedding.scale,
                accumulate: false,
                out: target.x,
            })?;
            let mut joined = vec![0f32; 2 * assistant.backbone * from.len()];
            for (row, (both, drafted)) in joined.chunks_mut(2 * assistant.backbone).zip(&drafted).enumerate()
            {
                let (token, hidden) = both.split_at_mut(assistant.backbone);
                backend.read_row(target.x, row, token)?;
                hidden.copy_from_slice(&drafted.hidden);
            }
            backend.write_rows(assistant.joined, &joined)?;
            assistant.draft_round(backend, (&own, &seen), &tokens)?;
            let mut best = Vec::with_capacity(from.len());
            backend.argmax(assistant.buffers.logits, &mut best)?;
            for (row, (drafted, token)) in drafted.iter_mut().zip(best).enumerate() {
                // Logits that are not finite give no draft token.
                if token == NO_INDEX {
                    continue;
                }
                drafted.tokens.push(token);
                backend.read_row(assistant.next, row, &mut drafted.hidden)?;
            }
        }
        Ok(drafted)
    }

    /// The logits of a row of the last draft step. For tests.
    #[cfg(test)]
    pub(crate) fn draft_logits(&mut self, row: usize) -> Result<Vec<f32>, Error> {
        let mut logits = vec![0f32; self.spec.vocab];
        let of_assistant = self.assistant.as_ref().map(|assistant| assistant.buffers.logits);
        // An MTP head uses the model's logits buffer.
        self.backend.read_row(of_assistant.unwrap_or(self.buffers.logits), row, &mut logits)?;
        Ok(logits)
    }
}

impl Assistant {
    /// Computes logits and the next hidden state from `joined`.
    fn draft_round(
        &self,
        backend: &mut dyn Backend,
        (own, seen): (&Rows<'_>, &Rows<'_>),
        tokens: &[u32],
    ) -> Result<(), Error> {
        let b = &self.buffers;
        backend.matmul(self.joined, &[job(&self.before, b.x, false)])?;
        for (layer, &cache) in self.weights.layers.iter().zip(&self.caches) {
            let MixerWeights::Attention(weights) = &layer.mixer else {
                return Err(Error::Invariant("a drafter's layer without attention".to_owned()));
            };
            let input = normed(backend, b, layer.mixer_norm.as_ref(), b.normed, &[weights.q.matrix])?;
            backend.matmul(input, &[job(&weights.q, b.q, false)])?;
            let (q, q_norm, rope) = (b.q, weights.q_norm, weights.rope);
            backend.qkv(&QkvOp { q, q_norm, kv: None, rope, q_growth: None, layer: cache })?;
            // The query has the token's position in its rotary embedding, and attends to earlier positions.
            seen.begin(backend, tokens)?;
            let (scale, sinks) = (weights.scale, weights.sinks);
            backend.attention(&AttentionOp { q, out: b.mixed, scale, softcap: None, sinks, layer: cache })?;
            own.begin(backend, tokens)?;
            backend.matmul(b.mixed, &[job(&weights.o, b.branch, false)])?;
            backend.add(b.x, b.branch, layer.mixer_post_norm.as_ref(), 1.0)?;
            feed_forward::run(backend, b, layer, 1.0)?;
            if let Some(factor) = layer.output_scale {
                backend.scale(b.x, factor)?;
            }
        }
        let Some(Head::Logits { norm, linear }) = &self.weights.head else { return Err(Error::NoOutputHead) };
        backend.norm(b.x, norm, b.normed)?;
        let jobs = [job(linear, b.logits, false), job(&self.behind, self.next, false)];
        Ok(backend.matmul(b.normed, &jobs)?)
    }
}

/// One row for each sequence.
struct Rows<'a> {
    sequences: Vec<StepSequence>,
    tables: Vec<Vec<Table<'a>>>,
}

enum Table<'a> {
    As(BlockTable<'a>),
    Longer(Vec<u32>),
}

impl<'a> Rows<'a> {
    /// Rows at the positions of the newest tokens. No cache is read there, and there may be no block yet.
    fn own(from: &[DraftFrom<'a>], block_tokens: usize) -> Self {
        let table = |from: &DraftFrom<'a>, group: usize| match from.tables[group] {
            BlockTable::Paged(offsets) => {
                let mut longer = offsets.to_vec();
                let last = offsets.last().copied().unwrap_or_default();
                longer.resize(longer.len().max(from.context / block_tokens + 1), last);
                Table::Longer(longer)
            }
            contiguous => Table::As(contiguous),
        };
        Self::new(from, |from| from.context, table)
    }

    /// Rows at the positions before the newest tokens.
    fn seen(from: &[DraftFrom<'a>]) -> Self {
        Self::new(from, |from| from.context.saturating_sub(1), |from, group| Table::As(from.tables[group]))
    }

    fn new(
        from: &[DraftFrom<'a>],
        context: impl Fn(&DraftFrom<'a>) -> usize,
        table: impl Fn(&DraftFrom<'a>, usize) -> Table<'a>,
    ) -> Self {
        let sequence = |(row, from): (usize, &DraftFrom<'a>)| StepSequence {
            rows: row..row + 1,
            context: context(from),
            segment_start: None,
        };
        let groups = from.first().map_or(0, |from| from.tables.len());
        Self {
            sequences: from.iter().enumerate().map(sequence).collect(),
            tables: (0..groups).map(|group| from.iter().map(|from| table(from, group)).collect()).collect(),
        }
    }

    fn begin(&self, backend: &mut dyn Backend, tokens: &[u32]) -> Result<(), Error> {
        let mut tables: Vec<Vec<BlockTable<'_>>> = Vec::with_capacity(self.tables.len());
        for group in &self.tables {
            let mut group_tables = Vec::with_capacity(group.len());
            for table in group {
                group_tables.push(match table {
                    Table::As(table) => *table,
                    Table::Longer(offsets) => BlockTable::Paged(offsets),
                });
            }
            tables.push(group_tables);
        }
        let input = StepInput { tokens, sequences: &self.sequences, tables: &tables, states: &[] };
        Ok(backend.begin_step(&input)?)
    }
}

#[cfg(test)]
mod tests;
