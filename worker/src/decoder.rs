//! The decoder: walks a layer range of a [`ModelSpec`] on a backend, activations in and out.
//!
//! It knows no device and no architecture. Everything that changes from step to step comes in a
//! [`StepInput`]; what leaves is the residual stream, logits rows or pooled vectors.

use crate::Error;
use crate::weights::{Head, Linear, Loader, Packs, TensorSource, Weights};
use assistant::Assistant;
#[cfg(doc)]
use kernels::backend::StepState;
use kernels::backend::{
    Backend, BufferId, EmbedIndex, EmbedOp, GateActivation, GateOp, KvCopy, KvType, MatmulJob, MatrixId,
    Norm, StepInput, StepOps,
};
use layout::{Buffers, LayerCache};
use model::spec::ModelSpec;
use mtp_head::Appended;
use std::ops::Range;

mod assistant;
mod feed_forward;
mod layout;
mod mixer;
mod mtp_head;
mod pooled;
mod state_type;
mod states;

pub(crate) use assistant::{DraftFrom, Drafted};
pub(crate) use layout::Widths;
pub use layout::{CacheGroup, CacheKind};
pub(crate) use pooled::pool;
pub use state_type::StateType;
pub use states::LayerState;

/// How a decoder is laid out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DecoderConfig {
    pub layers: Range<usize>,
    /// Rows of the largest step.
    pub max_rows: usize,
    /// Logits rows computed together; more are computed in pieces.
    pub logit_rows: usize,
    pub block_tokens: usize,
    /// Element type of the KV cache.
    pub kv_type: KvType,
    /// How recurrent states are kept.
    pub state_type: StateType,
}

pub struct Decoder {
    spec: ModelSpec,
    config: DecoderConfig,
    backend: Box<dyn Backend>,
    weights: Weights,
    groups: Vec<CacheGroup>,
    caches: Vec<LayerCache>,
    /// Heads of recurrent layers whose state is kept in fewer bits than it is computed in.
    narrow_heads: usize,
    buffers: Buffers,
    /// Group of each layer's keys and values, and where they lie in its blocks.
    places: Vec<Option<(usize, usize)>>,
    /// What guesses by this model's caches.
    assistant: Option<Assistant>,
    /// What guesses behind the last layer.
    appended: Option<Appended>,
    /// Rows whose logits are made already, in their order; none if that is not known.
    made: Vec<u32>,
}

/// A row of logits, as far as it was read.
#[derive(Debug, Clone, Copy)]
pub(crate) enum RowLogits<'a> {
    /// The largest ones and their tokens, in no order, equal ones by the lowest tokens.
    Best(&'a [(u32, f32)]),
    Whole(&'a [f32]),
}

/// The blocks of a decoder's caches, apart from what computes.
pub(crate) struct Blocks<'a>(&'a mut Decoder);

impl Blocks<'_> {
    /// See [`Decoder::groups`].
    pub(crate) fn groups(&self) -> &[CacheGroup] {
        self.0.groups()
    }

    /// See [`Decoder::read_block`].
    pub(crate) fn read(&mut self, group: usize, offset: u32) -> Result<Vec<u8>, Error> {
        self.0.read_block(group, offset)
    }

    /// See [`Decoder::write_block`].
    pub(crate) fn write(&mut self, group: usize, offset: u32, bytes: &[u8]) -> Result<(), Error> {
        self.0.write_block(group, offset, bytes)
    }

    /// See [`Decoder::states`].
    pub(crate) fn states(&mut self, slot: u32) -> Result<Vec<LayerState>, Error> {
        self.0.states(slot)
    }

    /// The same for a shorter time.
    pub(crate) fn again(&mut self) -> Blocks<'_> {
        Blocks(self.0)
    }
}

impl Decoder {
    /// Loads the layers of `config` from `source`, and what was repacked before from `packs`. `progress` hears (layers
    /// done, layers in all).
    pub(crate) fn load(
        spec: ModelSpec,
        config: DecoderConfig,
        (source, packs): (&dyn TensorSource, Packs),
        mut backend: Box<dyn Backend>,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Self, Error> {
        let weights =
            Loader::new(source, packs, backend.as_mut()).load(&spec, config.layers.clone(), progress)?;
        let layout::Placed { groups, caches, places, narrow_heads } =
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
            places,
            assistant: None,
            appended: None,
            made: Vec::new(),
        })
    }

    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// Cache groups: those of keys and values in the order in which [`StepInput::tables`] names them, then that
    /// of recurrent states, if the model has any.
    pub fn groups(&self) -> &[CacheGroup] {
        &self.groups
    }

    /// Distance of blocks that lie one behind the other, for each group of keys and values.
    pub(crate) fn block_strides(&self) -> Vec<u32> {
        let paged = self.groups.iter().filter(|group| group.kind != CacheKind::State);
        paged.map(|group| (group.block_bytes / 64) as u32).collect()
    }

    /// How recurrent states are kept, as part of a numeric class; none where it is as in any class, because all heads
    /// are f32.
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

    /// Bytes of weights, as they stand in the source, that one token reads.
    pub fn weight_bytes_per_token(&self) -> usize {
        self.weights.bytes_per_token
    }

    /// Bytes of KV and state that one token reads, and of state that it writes, at `context` positions before it.
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
        let bytes = match &mut self.appended {
            Some(appended) => appended.make_room(bytes)?,
            None => bytes,
        };
        Ok(self.backend.create_kv_arena(bytes, &block_bytes)?)
    }

    pub(crate) fn blocks(&mut self) -> Blocks<'_> {
        Blocks(self)
    }

    /// The bytes of a block of a group, or of a state, given as byte offset / 64 into the arena: of a layer range its
    /// part.
    pub fn read_block(&mut self, group: usize, offset: u32) -> Result<Vec<u8>, Error> {
        let mut bytes = vec![0; self.groups.get(group).map_or(0, |group| group.block_bytes)];
        self.backend.read_arena(offset, &mut bytes)?;
        Ok(bytes)
    }

    /// Fills a block of a group with bytes that [`Decoder::read_block`] gave, here or elsewhere.
    pub fn write_block(&mut self, group: usize, offset: u32, bytes: &[u8]) -> Result<(), Error> {
        let length = self.groups.get(group).map_or(0, |group| group.block_bytes);
        if bytes.len() != length {
            return Err(Error::Invariant(format!("{} bytes for a block of {length}", bytes.len())));
        }
        Ok(self.backend.write_arena(offset, bytes)?)
    }

    /// Writes bytes anywhere into the arena, to byte offset / 64 `offset`.
    #[cfg(debug_assertions)]
    pub(crate) fn write_bytes(&mut self, offset: u32, bytes: &[u8]) -> Result<(), Error> {
        Ok(self.backend.write_arena(offset, bytes)?)
    }

    /// Runs the layers over a step; the residual stream stays on the device. Only for a range that begins with the
    /// model's first layer.
    pub fn forward(&mut self, copies: &[KvCopy], step: &StepInput<'_>) -> Result<(), Error> {
        self.forward_beside(copies, step, &mut |_| {})
    }

    /// As [`Decoder::forward`], with something else done behind each layer: a step may take long, and who only reads
    /// blocks that it does not write need not wait for its end.
    pub(crate) fn forward_beside(
        &mut self,
        copies: &[KvCopy],
        step: &StepInput<'_>,
        beside: &mut dyn FnMut(Blocks<'_>),
    ) -> Result<(), Error> {
        if self.config.layers.start > 0 {
            return Err(Error::Invariant("a later stage starts from activations".to_owned()));
        }
        self.begin(copies, step)?;
        self.run(true, beside)?;
        self.follow(step)
    }

    /// As [`Decoder::forward_beside`], for a range that begins behind the first layer: from what [`Decoder::residual`]
    /// gave for the range before it, row by row.
    pub(crate) fn forward_from(
        &mut self,
        copies: &[KvCopy],
        step: &StepInput<'_>,
        activations: &[f32],
        beside: &mut dyn FnMut(Blocks<'_>),
    ) -> Result<(), Error> {
        let (rows, width) = (step.tokens.len(), self.spec.hidden);
        if self.config.layers.start == 0 || activations.len() != rows * width {
            let found = activations.len();
            return Err(Error::Invariant(format!("{found} activations for {rows} rows of {width}")));
        }
        self.begin(copies, step)?;
        self.embed()?;
        self.backend.write_rows(self.buffers.x, activations)?;
        self.run(false, beside)?;
        self.follow(step)
    }

    /// The residual stream behind the last layer run: these rows of the last step, one behind the other.
    pub fn residual(&mut self, rows: impl ExactSizeIterator<Item = usize>) -> Result<Vec<f32>, Error> {
        let mut values = vec![0f32; rows.len() * self.spec.hidden];
        for (row, out) in rows.zip(values.chunks_exact_mut(self.spec.hidden)) {
            self.backend.read_row(self.buffers.x, row, out)?;
        }
        Ok(values)
    }

    /// Whether it can make logits of the residual stream behind the last layer, for which [`Decoder::resume_behind`]
    /// stands in for the layers that it lacks.
    pub fn has_head(&self) -> bool {
        matches!(self.weights.head, Some(Head::Logits { .. }))
    }

    /// As if a step of `residual`'s rows had just left the model's last layer: what [`Decoder::residual`] gave where
    /// that layer is.
    pub fn resume_behind(&mut self, residual: &[f32]) -> Result<(), Error> {
        self.made.clear();
        Ok(self.backend.write_rows(self.buffers.x, residual)?)
    }

    fn begin(&mut self, copies: &[KvCopy], step: &StepInput<'_>) -> Result<(), Error> {
        self.made.clear();
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

    /// The ops of a step: those of the layers, behind those of the embedding if it `embeds`.
    fn run(&mut self, embeds: bool, beside: &mut dyn FnMut(Blocks<'_>)) -> Result<(), Error> {
        let ops = self.backend.begin_ops()?;
        let layers = 0..self.weights.layers.len();
        if ops != StepOps::Replayed {
            if embeds {
                self.embed()?;
            }
            for index in layers.clone() {
                self.layer(index)?;
                if ops == StepOps::Called {
                    beside(Blocks(self));
                }
            }
        }
        if ops == StepOps::Recorded {
            self.backend.end_ops()?;
        }
        if ops != StepOps::Called {
            // As often as between layers: whoever reads blocks then is as far as with them.
            layers.for_each(|_| beside(Blocks(self)));
        }
        Ok(())
    }

    /// Ends the oldest step that defers states ([`StepState::deferred`]), made to look at guesses: of each sequence that does,
    /// in their order, the first `rows` of its rows count. Afterwards its caches are, bit for bit, those of having been
    /// stepped by these rows: go on at `context + rows`, with the state in [`StepState::write`].
    ///
    /// What [`Decoder::forward`] computes is the same with and without. Keys and values of the rows that do not count
    /// stay where they are and are written over by the next step; nothing reads them before, since no query looks
    /// behind its own position. What a sliding window needs must therefore be judged by rows that count: a block is
    /// out of the window when it is for position `context + rows`, not for the last guess, and a table must hold the
    /// blocks of all guesses, none of which is shared or named before it is known that it counts.
    ///
    /// # Errors
    /// [`Error::Backend`] for another number of sequences than defer, more rows than one has, or a second time for one
    /// step.
    pub fn accept(&mut self, rows: &[usize]) -> Result<(), Error> {
        self.backend.accept(rows)?;
        match &mut self.appended {
            Some(appended) => appended.accept(self.backend.as_mut(), rows),
            None => Ok(()),
        }
    }

    /// Tokens into the residual stream, and into the slices that layers read by themselves.
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

    /// Logits of the named rows of the last step: `sink(i, row)` hears row `rows[i]`, vocabulary values.
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

    /// As [`Decoder::logits`], but of the first `drawn` rows `sink` hears the best logits first, where reading these costs
    /// less, and then the row only if it answers that they do not do.
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

    /// Index of the largest logit of each named row of the last step; ties go to the lowest token.
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

    /// Whether it can make the logits of some tokens by themselves.
    pub(crate) fn splits_head(&self) -> bool {
        self.has_head() && self.backend.serves_parts()
    }

    /// Makes the logits of a row of the last step for the tokens of `part`; no others are made then.
    pub(crate) fn make_part(&mut self, row: u32, part: &Range<usize>) -> Result<(), Error> {
        self.head(&[row], Some(part.clone()))
    }

    /// The logits that [`Decoder::make_part`] has made last, which was told the same.
    pub(crate) fn part(&mut self, part: Range<usize>) -> Result<Vec<f32>, Error> {
        let mut values = vec![0f32; part.len()];
        self.backend.read_part(self.buffers.logits, 0, part.start, &mut values)?;
        Ok(values)
    }

    /// The token of the largest of them, and that logit, as [`Decoder::argmax`] has it.
    pub(crate) fn best_of_part(&mut self, part: Range<usize>) -> Result<(u32, f32), Error> {
        Ok(self.backend.best_of_part(self.buffers.logits, 0, part)?)
    }

    /// Takes the logits of the tokens from `from` to the last one, which another decoder has made of the same row: with
    /// those before `from`, which this one has made last, these are all of it.
    pub(crate) fn complete(&mut self, row: u32, from: usize, values: &[f32]) -> Result<(), Error> {
        if from.checked_add(values.len()) != Some(self.spec.vocab) {
            let found = values.len();
            return Err(Error::Invariant(format!("{found} logits behind {from} of {}", self.spec.vocab)));
        }
        self.backend.write_part(self.buffers.logits, 0, from, values)?;
        self.made = vec![row];
        Ok(())
    }

    fn compute_logits(&mut self, rows: &[u32]) -> Result<(), Error> {
        match self.made == rows && !rows.is_empty() {
            true => Ok(()),
            false => self.head(rows, None),
        }
    }

    /// Makes the logits of rows, or those of a part of the vocabulary.
    fn head(&mut self, rows: &[u32], part: Option<Range<usize>>) -> Result<(), Error> {
        self.made.clear();
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
        mixer::run(backend, b, layer, scale, &self.caches, index)?;
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
        match layer.output_scale {
            Some(factor) => Ok(backend.scale(b.x, factor)?),
            None => Ok(()),
        }
    }
}

/// The model's embedding for whoever guesses behind its last layer: where no layer reads tokens there it is the output
/// matrix too, or is loaded.
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

/// The rows that a mixer or FFN reads: the residual, normed where there is a norm.
fn normed(
    backend: &mut dyn Backend,
    b: &Buffers,
    norm: Option<&Norm>,
    out: BufferId,
) -> Result<BufferId, Error> {
    let Some(norm) = norm else { return Ok(b.x) };
    backend.norm(b.x, norm, out)?;
    Ok(out)
}

fn job(linear: &Linear, out: BufferId, accumulate: bool) -> MatmulJob {
    MatmulJob { matrix: linear.matrix, out, bias: linear.bias, scale: linear.scale, accumulate }
}
