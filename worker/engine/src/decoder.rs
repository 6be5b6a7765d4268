//! The decoder: runs a layer range of a [`ModelSpec`] on a backend.
//!
//! It depends on no device and on no architecture. All input that changes from step to step is in a
//! [`StepInput`]. The outputs are the residual stream, rows of logits or pooled vectors.

use crate::Error;
use crate::images::StepImages;
use crate::weights::{Head, Linear, Loader, Packs, TensorSource, Weights};
use assistant::Assistant;
#[cfg(doc)]
use kernels::backend::StepState;
use kernels::backend::{
    Backend, BufferId, EmbedIndex, EmbedOp, GateActivation, GateOp, KvCopy, KvTypes, MatmulJob, MatrixId,
    Norm, StepInput, StepOps,
};
use layout::{Buffers, LayerCache};
use model::spec::ModelSpec;
use mtp_head::MtpHead;
use std::ops::Range;

mod adapter;
mod assistant;
mod feed_forward;
mod images;
mod layer_ops;
mod layout;
mod mixer;
mod mtp_head;
mod pooled;
mod state_type;
mod states;

pub use assistant::{DraftFrom, Drafted};
pub(crate) use layer_ops::LayerOps;
pub use layout::Widths;
pub use layout::{CacheGroup, CacheKind};
pub(crate) use pooled::pool;
pub use state_type::StateType;
pub use states::LayerState;

/// Configuration of a decoder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DecoderConfig {
    pub layers: Range<usize>,
    /// Rows of the largest step.
    pub max_rows: usize,
    /// Maximum rows whose logits are computed together; more rows are split.
    pub logit_rows: usize,
    pub block_tokens: usize,
    /// Element type of the KV cache.
    pub kv_type: KvTypes,
    /// Element type of recurrent states.
    pub state_type: StateType,
}

pub struct Decoder {
    spec: ModelSpec,
    config: DecoderConfig,
    backend: Box<dyn Backend>,
    weights: Weights,
    groups: Vec<CacheGroup>,
    caches: Vec<LayerCache>,
    /// Number of recurrent heads whose state is stored in fewer bits than it is computed in.
    narrow_heads: usize,
    buffers: Buffers,
    /// Cache group of each layer's keys and values, and their byte offset in its blocks.
    kv_locations: Vec<Option<(usize, usize)>>,
    /// Drafter that reads this model's caches.
    assistant: Option<Assistant>,
    /// MTP head behind the last layer.
    mtp_head: Option<MtpHead>,
    /// Of the next step, then of the one that runs.
    images: StepImages,
    /// Rows of the last step whose logits are in the buffer, in order. Empty if unknown.
    computed_rows: Vec<u32>,
}

/// A row of logits, or its best values.
#[derive(Debug, Clone, Copy)]
pub(crate) enum RowLogits<'a> {
    /// The largest logits with their tokens, in any order. Among equal logits, the lowest tokens are
    /// included.
    Best(&'a [(u32, f32)]),
    Whole(&'a [f32]),
}

/// Access to the blocks of a decoder's caches only.
pub struct Blocks<'a>(&'a mut Decoder);

impl Blocks<'_> {
    /// See [`Decoder::groups`].
    pub(crate) fn groups(&self) -> &[CacheGroup] {
        self.0.groups()
    }

    /// See [`Decoder::read_block`].
    pub fn read(&mut self, group: usize, offset: u32) -> Result<Vec<u8>, Error> {
        self.0.read_block(group, offset)
    }

    /// See [`Decoder::write_block`].
    pub fn write(&mut self, group: usize, offset: u32, bytes: &[u8]) -> Result<(), Error> {
        self.0.write_block(group, offset, bytes)
    }

    /// See [`Decoder::states`].
    pub fn states(&mut self, slot: u32) -> Result<Vec<LayerState>, Error> {
        self.0.states(slot)
    }
}

impl Decoder {
    /// Loads the layers of `config` from `source`, with repacked weights from `packs`. Calls `progress` with
    /// (loaded layers, total layers).
    pub fn load(
        spec: ModelSpec,
        config: DecoderConfig,
        (source, packs): (&dyn TensorSource, Packs),
        mut backend: Box<dyn Backend>,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Self, Error> {
        let weights =
            Loader::new(source, packs, backend.as_mut()).load(&spec, config.layers.clone(), progress)?;
        let layout::PlacedCaches { groups, caches, kv_locations, narrow_heads } =
            layout::place_caches(&spec, &weights, &config, backend.as_mut())?;
        let buffers =
            layout::create_buffers(&spec, &spec.layers[config.layers.clone()], &config, backend.as_mut())?;
        Ok(Self {
            spec,
            config,
            backend,
            weights,
            groups,
            caches,
            narrow_heads,
            buffers,
            kv_locations,
            assistant: None,
            mtp_head: None,
            images: StepImages::default(),
            computed_rows: Vec::new(),
        })
    }

    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// Cache groups: those of keys and values in the order of [`StepInput::tables`], then that of recurrent
    /// states, if the model has any.
    pub fn groups(&self) -> &[CacheGroup] {
        &self.groups
    }

    /// Distance of consecutive blocks in units of 64 bytes, for each group of keys and values.
    pub(crate) fn block_strides(&self) -> Vec<u32> {
        let paged = self.groups.iter().filter(|group| group.kind != CacheKind::State);
        paged.map(|group| (group.block_bytes / 64) as u32).collect()
    }

    /// The state type's part of the numeric class. `None` if all states are stored in f32.
    pub fn state_class(&self) -> Option<String> {
        self.config.state_type.class().filter(|_| self.narrow_heads > 0)
    }

    pub fn backend(&self) -> &dyn Backend {
        self.backend.as_ref()
    }

    /// Bytes of the loaded tensors in the source.
    pub fn source_bytes(&self) -> usize {
        self.weights.source_bytes
    }

    /// Bytes of weights that one token reads, in their format in the source.
    pub fn weight_bytes_per_token(&self) -> usize {
        self.weights.bytes_per_token
    }

    /// Bytes of KV and state that one token reads, plus bytes of state that it writes, after `context`
    /// positions.
    pub fn cache_bytes_moved(&self, context: usize) -> usize {
        let moved = |group: &CacheGroup| match group.kind {
            CacheKind::Full => group.block_bytes * context / self.config.block_tokens,
            CacheKind::Sliding(window) => group.block_bytes * context.min(window) / self.config.block_tokens,
            CacheKind::State => 2 * group.block_bytes,
        };
        self.groups.iter().map(moved).sum()
    }

    pub fn allocate_kv(&mut self, bytes: usize) -> Result<(), Error> {
        let block_bytes: Vec<usize> = self.groups.iter().map(|group| group.block_bytes).collect();
        let bytes = match &mut self.mtp_head {
            Some(mtp_head) => mtp_head.make_room(bytes)?,
            None => bytes,
        };
        Ok(self.backend.create_kv_arena(bytes, &block_bytes)?)
    }

    /// Frees the memory of parts of the arena: see [`kernels::backend::Backend::give_back_kv`].
    pub(crate) fn give_back_kv(&mut self, places: &[(u32, u64)]) -> Result<(), Error> {
        Ok(self.backend.give_back_kv(places)?)
    }

    pub fn blocks(&mut self) -> Blocks<'_> {
        Blocks(self)
    }

    /// Reads a block of a group, or a state. `offset` is its byte offset in the arena divided by 64. The
    /// block contains only this layer range's part.
    pub fn read_block(&mut self, group: usize, offset: u32) -> Result<Vec<u8>, Error> {
        let mut bytes = vec![0; self.groups.get(group).map_or(0, |group| group.block_bytes)];
        self.backend.read_arena(offset, &mut bytes)?;
        Ok(bytes)
    }

    /// Writes a block of a group with bytes that [`Decoder::read_block`] returned, here or on another worker.
    pub fn write_block(&mut self, group: usize, offset: u32, bytes: &[u8]) -> Result<(), Error> {
        let length = self.groups.get(group).map_or(0, |group| group.block_bytes);
        if bytes.len() != length {
            return Err(Error::Invariant(format!("{} bytes for a block of {length}", bytes.len())));
        }
        Ok(self.backend.write_arena(offset, bytes)?)
    }

    /// Writes bytes at any place of the arena. `offset` is the byte offset divided by 64.
    #[cfg(debug_assertions)]
    pub(crate) fn write_bytes(&mut self, offset: u32, bytes: &[u8]) -> Result<(), Error> {
        Ok(self.backend.write_arena(offset, bytes)?)
    }

    /// Runs the layers over a step. The residual stream stays on the device. Only for a range that begins
    /// with the model's first layer.
    pub fn forward(&mut self, copies: &[KvCopy], step: &StepInput<'_>) -> Result<(), Error> {
        self.forward_with(copies, step, &mut |_| {})
    }

    /// Like [`Decoder::forward`], but calls `between_layers` after each layer. A step may take long, and
    /// readers of blocks that it does not write need not wait for its end.
    pub fn forward_with(
        &mut self,
        copies: &[KvCopy],
        step: &StepInput<'_>,
        between_layers: &mut dyn FnMut(Blocks<'_>),
    ) -> Result<(), Error> {
        if self.config.layers.start > 0 {
            return Err(Error::Invariant("a later stage starts from activations".to_owned()));
        }
        let images = std::mem::take(&mut self.images);
        self.place(&images)?;
        let tokens = images.without_ids(step.tokens);
        let step = StepInput { tokens: &tokens, ..*step };
        self.begin(copies, &step)?;
        self.images = images;
        let ran = self.run(true, between_layers);
        self.images = StepImages::default();
        ran?;
        self.follow(&step)
    }

    /// Like [`Decoder::forward_with`], for a range that begins after the first layer. `activations` is the
    /// result of [`Decoder::residual`] for the previous range, `[rows, hidden]`.
    pub fn forward_from(
        &mut self,
        copies: &[KvCopy],
        step: &StepInput<'_>,
        activations: &[f32],
        between_layers: &mut dyn FnMut(Blocks<'_>),
    ) -> Result<(), Error> {
        let (rows, width) = (step.tokens.len(), self.spec.hidden);
        if self.config.layers.start == 0 || activations.len() != rows * width {
            let found = activations.len();
            return Err(Error::Invariant(format!("{found} activations for {rows} rows of {width}")));
        }
        self.begin(copies, step)?;
        self.embed()?;
        self.backend.write_rows(self.buffers.x, activations)?;
        self.run(false, between_layers)?;
        self.follow(step)
    }

    /// Returns the residual stream after the last layer of the range, for these rows of the last step:
    /// `[rows, hidden]`.
    pub fn residual(&mut self, rows: impl ExactSizeIterator<Item = usize>) -> Result<Vec<f32>, Error> {
        let mut values = vec![0f32; rows.len() * self.spec.hidden];
        for (row, out) in rows.zip(values.chunks_exact_mut(self.spec.hidden)) {
            self.backend.read_row(self.buffers.x, row, out)?;
        }
        Ok(values)
    }

    /// Whether it can compute logits from the residual stream after the model's last layer.
    /// [`Decoder::resume_behind`] sets that stream if this range lacks the last layer.
    pub fn has_head(&self) -> bool {
        matches!(self.weights.head, Some(Head::Logits { .. }))
    }

    /// Sets the residual stream as if a step of these rows had just left the model's last layer. `residual`
    /// is the result of [`Decoder::residual`] at the stage with that layer.
    pub fn resume_behind(&mut self, residual: &[f32]) -> Result<(), Error> {
        self.computed_rows.clear();
        Ok(self.backend.write_rows(self.buffers.x, residual)?)
    }

    fn begin(&mut self, copies: &[KvCopy], step: &StepInput<'_>) -> Result<(), Error> {
        self.computed_rows.clear();
        if let Some(repacking) = &self.weights.repacking
            && repacking.adopt(self.backend.as_mut())?
        {
            self.weights.repacking = None;
        }
        if !copies.is_empty() {
            self.backend.copy_kv(copies)?;
        }
        Ok(self.backend.begin_step(step)?)
    }

    /// Runs the ops of a step: those of the embedding if `embeds`, then those of the layers.
    fn run(&mut self, embeds: bool, between_layers: &mut dyn FnMut(Blocks<'_>)) -> Result<(), Error> {
        let ops = self.backend.begin_ops()?;
        let layers = 0..self.weights.layers.len();
        if ops != StepOps::Replayed {
            if embeds {
                self.embed()?;
            }
            for index in layers.clone() {
                self.layer(index)?;
                if ops == StepOps::Called {
                    between_layers(Blocks(self));
                }
            }
        }
        if ops == StepOps::Recorded {
            self.backend.end_ops()?;
        }
        if ops != StepOps::Called {
            // Call it as often as if the layers had been run one by one.
            layers.for_each(|_| between_layers(Blocks(self)));
        }
        Ok(())
    }

    /// Ends the oldest step with deferred state updates ([`StepState::deferred`]), which verified draft
    /// tokens. For each sequence that defers, in order, its first `rows` rows are accepted. Afterwards its
    /// caches equal, bit for bit, those after a step with only these rows. Continue at `context + rows` with
    /// the state in [`StepState::write`].
    ///
    /// [`Decoder::forward`] computes the same with and without deferring. Keys and values of rejected rows
    /// stay in place until the next step overwrites them. Nothing reads them before, since no query attends
    /// beyond its own position. So use accepted rows to decide which blocks a sliding window needs: a block
    /// has left the window if it has left it for position `context + rows`, not for the last draft token. A
    /// table must have the blocks of all draft tokens, and none of these blocks may be shared or named before
    /// its tokens are accepted.
    ///
    /// # Errors
    /// [`Error::Kernel`] if the number of sequences does not match, a sequence has fewer rows, or the step
    /// was already ended.
    pub fn accept(&mut self, rows: &[usize]) -> Result<(), Error> {
        self.backend.accept(rows)?;
        match &mut self.mtp_head {
            Some(mtp_head) => mtp_head.accept(self.backend.as_mut(), rows),
            None => Ok(()),
        }
    }

    /// Embeds tokens into the residual stream, and into the per-layer embeddings.
    fn embed(&mut self) -> Result<(), Error> {
        let (backend, b) = (self.backend.as_mut(), &self.buffers);
        if let Some(embedding) = &self.weights.embedding {
            let op = EmbedOp {
                table: embedding.tokens,
                index: EmbedIndex::Token,
                scale: self.spec.embedding.scale,
                accumulate: false,
                out: b.x,
            };
            backend.embed(&op)?;
            images::write(backend, b.x, &self.images, self.spec.hidden)?;
            for (table, index) in
                [(embedding.positions, EmbedIndex::Position), (embedding.token_types, EmbedIndex::Segment)]
            {
                if let Some(table) = table {
                    backend.embed(&EmbedOp { table, index, scale: 1.0, accumulate: true, ..op })?;
                }
            }
            if let Some(norm) = &embedding.norm {
                backend.norm(b.x, norm, b.x)?;
            }
        }
        if let (Some(input), Some(spec)) = (&self.weights.per_layer_input, &self.spec.per_layer_input) {
            backend.matmul(b.x, &[job(&input.projection, b.per_layer, false)])?;
            backend.norm(b.per_layer, &input.norm, b.per_layer)?;
            backend.embed(&EmbedOp {
                table: input.table,
                index: EmbedIndex::Token,
                scale: spec.table_scale,
                accumulate: true,
                out: b.per_layer,
            })?;
            backend.scale(b.per_layer, std::f32::consts::FRAC_1_SQRT_2)?;
        }
        Ok(())
    }

    /// Computes the logits of these rows of the last step. Calls `sink(i, row)` for each `rows[i]`; a row has
    /// one value for each token of the vocabulary.
    pub fn logits(&mut self, rows: &[u32], sink: &mut dyn FnMut(usize, &[f32])) -> Result<(), Error> {
        let mut values = vec![0f32; self.spec.vocab];
        for (piece, picked) in rows.chunks(self.config.logit_rows).enumerate() {
            self.compute_logits(picked)?;
            for row in 0..picked.len() {
                self.backend.read_row(self.buffers.logits, row, &mut values)?;
                sink(piece * self.config.logit_rows + row, &values);
            }
        }
        Ok(())
    }

    /// Like [`Decoder::logits`], but for the first `drawn` rows `sink` gets only the best logits first, if
    /// reading these is cheaper. It then gets the whole row only if it returned that the best logits are not
    /// enough.
    pub(crate) fn logits_to_draw(
        &mut self,
        rows: &[u32],
        drawn: usize,
        sink: &mut dyn FnMut(usize, RowLogits<'_>) -> bool,
    ) -> Result<(), Error> {
        let each = self.backend.best_values().min(self.spec.vocab);
        let (mut values, mut best) = (vec![0f32; self.spec.vocab], Vec::new());
        for (piece, picked) in rows.chunks(self.config.logit_rows).enumerate() {
            let first = piece * self.config.logit_rows;
            self.compute_logits(picked)?;
            best.clear();
            if each > 0 && first < drawn {
                self.backend.best(self.buffers.logits, &mut best)?;
            }
            for row in 0..picked.len() {
                let index = first + row;
                if let Some(best) = best.chunks_exact(each.max(1)).nth(row).filter(|_| index < drawn)
                    && sink(index, RowLogits::Best(best))
                {
                    continue;
                }
                self.backend.read_row(self.buffers.logits, row, &mut values)?;
                sink(index, RowLogits::Whole(&values));
            }
        }
        Ok(())
    }

    /// Token of the largest logit of each of these rows of the last step. Ties go to the lowest token.
    pub fn argmax(&mut self, rows: &[u32], out: &mut Vec<u32>) -> Result<(), Error> {
        out.clear();
        let mut best = Vec::new();
        for picked in rows.chunks(self.config.logit_rows) {
            self.compute_logits(picked)?;
            self.backend.argmax(self.buffers.logits, &mut best)?;
            out.extend_from_slice(&best);
        }
        Ok(())
    }

    /// Whether it can compute the logits of a part of the vocabulary.
    pub fn splits_head(&self) -> bool {
        self.has_head() && self.backend.serves_parts()
    }

    /// Computes the logits of a row of the last step for the tokens of `part` only.
    pub fn make_part(&mut self, row: u32, part: &Range<usize>) -> Result<(), Error> {
        self.head(&[row], Some(part.clone()))
    }

    /// Reads the logits of the last [`Decoder::make_part`], which had the same `part`.
    pub fn part(&mut self, part: Range<usize>) -> Result<Vec<f32>, Error> {
        let mut values = vec![0f32; part.len()];
        self.backend.read_part(self.buffers.logits, 0, part.start, &mut values)?;
        Ok(values)
    }

    /// The token with the largest logit of the part, and that logit. Ties are resolved as in
    /// [`Decoder::argmax`].
    pub fn best_of_part(&mut self, part: Range<usize>) -> Result<(u32, f32), Error> {
        Ok(self.backend.best_of_part(self.buffers.logits, 0, part)?)
    }

    /// Adds the logits of the tokens from `from` on, which another decoder computed for the same row, to
    /// those before `from`, which this decoder computed last. Together they are the whole row.
    pub fn complete(&mut self, row: u32, from: usize, values: &[f32]) -> Result<(), Error> {
        if from.checked_add(values.len()) != Some(self.spec.vocab) {
            let found = values.len();
            return Err(Error::Invariant(format!("{found} logits behind {from} of {}", self.spec.vocab)));
        }
        self.backend.write_part(self.buffers.logits, 0, from, values)?;
        self.computed_rows = vec![row];
        Ok(())
    }

    fn compute_logits(&mut self, rows: &[u32]) -> Result<(), Error> {
        match self.computed_rows == rows && !rows.is_empty() {
            true => Ok(()),
            false => self.head(rows, None),
        }
    }

    /// Computes the logits of rows, or those of a part of the vocabulary.
    fn head(&mut self, rows: &[u32], part: Option<Range<usize>>) -> Result<(), Error> {
        self.computed_rows.clear();
        let (Some(Head::Logits { norm, linear }), Some(output)) = (&self.weights.head, self.spec.logits())
        else {
            return Err(Error::NoOutputHead);
        };
        let b = &self.buffers;
        self.backend.gather_rows(b.x, rows, b.picked)?;
        self.backend.norm(b.picked, norm, b.picked_normed)?;
        let job = job(linear, b.logits, false);
        match part {
            None => self.backend.matmul(b.picked_normed, &[job])?,
            Some(part) => self.backend.matmul_part(b.picked_normed, &job, part)?,
        }
        if output.scale != 1.0 || output.softcap.is_some() {
            self.backend.finish_logits(b.logits, output.scale, output.softcap)?;
        }
        Ok(())
    }

    fn layer(&mut self, index: usize) -> Result<(), Error> {
        let layer = &self.weights.layers[index];
        let number = self.config.layers.start + index;
        let scale = self.spec.layers[number].residual_scale;
        let (backend, b) = (self.backend.as_mut(), &self.buffers);
        mixer::run(backend, b, layer, scale, self.caches[index])?;
        feed_forward::run(backend, b, layer, scale)?;
        if let (Some(own), Some(input)) = (&layer.per_layer, &self.spec.per_layer_input) {
            backend.matmul(b.x, &[job(&own.gate, b.slice, false)])?;
            backend.gate(&GateOp {
                gate: b.slice,
                up: Some(b.per_layer),
                up_from: number * input.width,
                activation: GateActivation::GeluTanh,
            })?;
            backend.matmul(b.slice, &[job(&own.projection, b.branch, false)])?;
            backend.add(b.x, b.branch, Some(&own.norm), 1.0)?;
        }
        if let Some(factor) = layer.output_scale {
            backend.scale(b.x, factor)?;
        }
        images::add(backend, b.x, &self.images, number, self.spec.hidden)
    }
}

/// The model's embedding for the MTP head. If this layer range has no embedding, it is the output matrix if
/// both are the same tensor, else it is loaded.
fn embedding_of(spec: &ModelSpec, weights: &Weights, loader: &mut Loader<'_>) -> Result<MatrixId, Error> {
    match (&weights.embedding, &weights.head) {
        (Some(embedding), _) => Ok(embedding.tokens),
        (None, Some(Head::Logits { linear, .. }))
            if spec.logits().is_some_and(|head| head.linear.weight == spec.embedding.tensor) =>
        {
            Ok(linear.matrix)
        }
        _ => loader.table(&spec.embedding.tensor, spec.vocab, spec.hidden),
    }
}

/// The input rows of a mixer or FFN: the residual, normalized if there is a norm. `readers` are the matrices that are
/// multiplied with it, if nothing else reads it, else empty.
fn normed(
    backend: &mut dyn Backend,
    b: &Buffers,
    norm: Option<&Norm>,
    out: BufferId,
    readers: &[MatrixId],
) -> Result<BufferId, Error> {
    let Some(norm) = norm else { return Ok(b.x) };
    match readers {
        [] => backend.norm(b.x, norm, out)?,
        readers => backend.norm_for(b.x, norm, out, readers)?,
    }
    Ok(out)
}

fn job(linear: &Linear, out: BufferId, accumulate: bool) -> MatmulJob {
    MatmulJob { matrix: linear.matrix, out, bias: linear.bias, scale: linear.scale, accumulate }
}
