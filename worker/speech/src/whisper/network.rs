//! Whisper's network: an encoder for thirty seconds of audio, and a decoder that attends to the encoder's
//! output.
//!
//! As published by OpenAI: two convolutions over the features, the second with stride 2; learned positions;
//! layers with a norm before each part; GELU with the error function; the embedding matrix is also the output
//! head.

use super::source::Source;
use crate::Error;
use crate::compute::{Compute, Linear, Matrix, Norm};
use crate::finite;
use kernels::ops::softmax;
use parking_lot::Mutex;
use sound::dot;

/// Positions of the encoder, one for every 20 ms.
pub(super) const POSITIONS: usize = 1500;
/// Frames of a window, one for every 10 ms.
pub(super) const FRAMES: usize = 2 * POSITIONS;
const TAPS: usize = 3;
/// Queries of one work item in the encoder's attention.
const QUERIES: usize = 100;
/// Rows whose logits are computed together.
const OUTPUT_ROWS: usize = 16;
/// Value of GELU with the error function in the file.
const GELU: i32 = 3;
const MAX_LAYERS: usize = 128;
const MAX_WIDTH: usize = 8192;
const MAX_TOKENS: usize = 1 << 20;
const MAX_CONTEXT: usize = 1 << 13;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) bands: usize,
    /// Size of the vocabulary.
    pub(super) tokens: usize,
    pub(super) context: usize,
    width: usize,
    heads: [usize; 2],
}

pub(super) struct Network {
    pub(super) shape: Shape,
    convolutions: [Linear; 2],
    encoder_positions: Vec<f32>,
    encoder: Vec<EncoderLayer>,
    encoder_norm: Norm,
    embeddings: Linear,
    decoder_positions: Vec<f32>,
    decoder: Vec<DecoderLayer>,
    decoder_norm: Norm,
}

struct FeedForward {
    norm: Norm,
    up: Linear,
    down: Linear,
}

struct SelfAttention {
    norm: Norm,
    /// Queries, keys and values, concatenated.
    qkv: Linear,
    out: Linear,
}

struct EncoderLayer {
    attention: SelfAttention,
    feed_forward: FeedForward,
}

struct DecoderLayer {
    attention: SelfAttention,
    cross_norm: Norm,
    cross_query: Linear,
    /// Keys and values, concatenated.
    cross_keys: Linear,
    cross_out: Linear,
    feed_forward: FeedForward,
}

/// Keys and values of a window's audio, for each head of each decoder layer.
pub(super) struct Memory(Vec<Vec<Head>>);

struct Head {
    keys: Matrix,
    /// One row for each dimension of a value.
    values: Matrix,
}

/// Keys and values of the tokens so far, layer by layer, `[token][width]` each.
#[derive(Clone)]
pub(super) struct Cache {
    layers: Vec<[Vec<f32>; 2]>,
    tokens: usize,
}

/// Receives the attention of some heads.
struct Sink<'a> {
    heads: &'a [[usize; 2]],
    scores: &'a mut dyn FnMut(Vec<f32>),
}

impl Cache {
    /// Number of tokens so far.
    pub(super) fn tokens(&self) -> usize {
        self.tokens
    }
}

/// Reads the parts of a network.
struct Loader<'a, S> {
    weights: &'a mut S,
    width: usize,
    /// Number of parts of the decoder's matrices, which are multiplied with single rows.
    parts: usize,
}

impl<S: Source> Loader<'_, S> {
    fn norm(&mut self, name: &str) -> Result<Norm, Error> {
        let mut of = |part| self.weights.vector(&format!("{name}/layer_norm/{part}"), &[self.width]);
        Ok(Norm { weight: of("gamma")?, bias: of("beta")? })
    }

    fn linear(&mut self, name: &str, rows: usize, cols: usize, parts: usize) -> Result<Linear, Error> {
        let (ty, bytes) = self.weights.floats(&format!("{name}/weight"), &[rows, cols])?;
        let weight = Matrix::pack(ty, rows, cols, &bytes, parts)?;
        let bias = self.weights.vector(&format!("{name}/bias"), &[rows])?;
        Ok(Linear { weight, bias: Some(bias) })
    }

    fn convolution(&mut self, name: &str, cols: usize) -> Result<Linear, Error> {
        let (ty, bytes) = self.weights.floats(&format!("{name}/weight"), &[self.width, cols, TAPS])?;
        let weight = Matrix::pack(ty, self.width, cols * TAPS, &bytes, 1)?;
        Ok(Linear { weight, bias: Some(self.weights.vector(&format!("{name}/bias"), &[self.width])?) })
    }

    fn attention(&mut self, name: &str, parts: usize) -> Result<SelfAttention, Error> {
        let name = format!("{name}/self_attention");
        let width = self.width;
        Ok(SelfAttention {
            norm: self.norm(&name)?,
            qkv: self.linear(&format!("{name}/linear_0"), 3 * width, width, parts)?,
            out: self.linear(&format!("{name}/linear_1"), width, width, parts)?,
        })
    }

    fn feed_forward(&mut self, name: &str, parts: usize) -> Result<FeedForward, Error> {
        let name = format!("{name}/ffn");
        let up = format!("{name}/linear_0");
        let [inner, _] = self.weights.dims(&format!("{up}/weight"))?;
        if !(1..=4 * MAX_WIDTH).contains(&inner) {
            return Err(self.weights.wrong(format!("{up} has {inner} rows, the limit is {}", 4 * MAX_WIDTH)));
        }
        Ok(FeedForward {
            norm: self.norm(&name)?,
            up: self.linear(&up, inner, self.width, parts)?,
            down: self.linear(&format!("{name}/linear_1"), self.width, inner, parts)?,
        })
    }

    fn layers<L>(
        &mut self,
        of: &str,
        mut layer: impl FnMut(&mut Self, &str) -> Result<L, Error>,
    ) -> Result<Vec<L>, Error> {
        let name = |at: usize| format!("{of}/layer_{at}");
        let there = (0..).take_while(|at| self.weights.has(&format!("{}/ffn/linear_0/weight", name(*at))));
        let there = there.take(MAX_LAYERS + 1).count();
        if !(1..=MAX_LAYERS).contains(&there) {
            return Err(self
                .weights
                .wrong(format!("its {of} has {there} layers, 1 to {MAX_LAYERS} are served")));
        }
        (0..there).map(|at| layer(self, &name(at))).collect()
    }
}

impl Network {
    /// Loads a network, for `threads` threads.
    ///
    /// # Errors
    /// [`Error::Artefact`] if it is not such a network.
    pub(super) fn load(weights: &mut impl Source, threads: usize) -> Result<Self, Error> {
        let shape = Shape::read(weights)?;
        let Shape { bands, tokens, context, width, .. } = shape;
        let (ty, bytes) = weights.floats("decoder/embeddings/weight", &[tokens, width])?;
        let embeddings = Linear { weight: Matrix::pack(ty, tokens, width, &bytes, threads)?, bias: None };
        drop(bytes);
        let encoder_positions =
            weights.vector("encoder/position_encodings/encodings", &[POSITIONS, width])?;
        let decoder_positions = weights.vector("decoder/position_encodings/encodings", &[context, width])?;
        let mut loader = Loader { weights, width, parts: threads };
        let convolutions =
            [loader.convolution("encoder/conv1", bands)?, loader.convolution("encoder/conv2", width)?];
        let encoder = loader.layers("encoder", |loader, name| {
            Ok(EncoderLayer {
                attention: loader.attention(name, 1)?,
                feed_forward: loader.feed_forward(name, 1)?,
            })
        })?;
        let decoder = loader.layers("decoder", |loader, name| {
            let cross = format!("{name}/attention");
            let (width, parts) = (loader.width, loader.parts);
            Ok(DecoderLayer {
                attention: loader.attention(name, parts)?,
                cross_norm: loader.norm(&cross)?,
                cross_query: loader.linear(&format!("{cross}/linear_0"), width, width, parts)?,
                cross_keys: loader.linear(&format!("{cross}/linear_1"), 2 * width, width, 1)?,
                cross_out: loader.linear(&format!("{cross}/linear_2"), width, width, parts)?,
                feed_forward: loader.feed_forward(name, parts)?,
            })
        })?;
        let (encoder_norm, decoder_norm) = (loader.norm("encoder")?, loader.norm("decoder")?);
        Ok(Self {
            shape,
            convolutions,
            encoder_positions,
            encoder,
            encoder_norm,
            embeddings,
            decoder_positions,
            decoder,
            decoder_norm,
        })
    }

    /// Encodes `features`, `[band][frame]` of [`FRAMES`] frames, into `[position][width]`.
    pub(super) fn encode(&self, compute: &Compute, features: &[f32]) -> Result<Vec<f32>, Error> {
        let Shape { bands, width, heads: [heads, _], .. } = self.shape;
        let [first, second] = &self.convolutions;
        let (mut x, mut h, mut wide) = (Vec::new(), Vec::new(), Vec::new());
        let taken = taps(FRAMES, 1, FRAMES, bands, |band, frame| features[band * FRAMES + frame]);
        compute.linear(&taken, first, false, &mut h)?;
        compute.gelu(&mut h);
        let taken = taps(POSITIONS, 2, FRAMES, width, |channel, frame| h[frame * width + channel]);
        compute.linear(&taken, second, false, &mut x)?;
        compute.gelu(&mut x);
        x.iter_mut().zip(&self.encoder_positions).for_each(|(x, position)| *x += position);
        for EncoderLayer { attention, feed_forward } in &self.encoder {
            compute.norm(&x, &attention.norm, &mut h)?;
            compute.linear(&h, &attention.qkv, false, &mut wide)?;
            let attended = attend_to_all(compute, &wide, width, heads)?;
            compute.linear(&attended, &attention.out, true, &mut x)?;
            feed_forward.add(compute, &mut x, &mut h, &mut wide)?;
        }
        compute.norm(&x, &self.encoder_norm, &mut h)?;
        Ok(h)
    }

    /// Computes the keys and values of the encoder's output, which the decoder's layers attend to.
    pub(super) fn memory(&self, compute: &Compute, encoded: &[f32]) -> Result<Memory, Error> {
        let Shape { width, heads: [_, heads], .. } = self.shape;
        let mut wide = Vec::new();
        let mut layers = Vec::with_capacity(self.decoder.len());
        for layer in &self.decoder {
            compute.linear(encoded, &layer.cross_keys, false, &mut wide)?;
            layers.push(heads_of(compute, &wide, 2 * width, [0, width], width, heads)?);
        }
        Ok(Memory(layers))
    }

    /// An empty cache.
    pub(super) fn cache(&self) -> Cache {
        Cache { layers: self.decoder.iter().map(|_| [Vec::new(), Vec::new()]).collect(), tokens: 0 }
    }

    /// Decodes these tokens. Returns the logits of the next token for each of the `output_rows`.
    ///
    /// # Errors
    /// [`Error::Kernel`] for a token outside the vocabulary, or more tokens than positions.
    pub(super) fn decode(
        &self,
        compute: &Compute,
        memory: &Memory,
        cache: &mut Cache,
        tokens: &[u32],
        output_rows: &[usize],
    ) -> Result<Vec<Vec<f32>>, Error> {
        let width = self.shape.width;
        let x = self.hidden(compute, memory, &mut [(cache, tokens)], None)?;
        let rows: Vec<f32> =
            output_rows.iter().flat_map(|row| &x[row * width..(row + 1) * width]).copied().collect();
        self.logits(compute, &rows)
    }

    /// Decodes one token of each sequence. Returns the logits of each sequence's next token. They do not
    /// depend on the other sequences.
    ///
    /// # Errors
    /// As [`Self::decode`].
    pub(super) fn decode_each(
        &self,
        compute: &Compute,
        memory: &Memory,
        sequences: &mut [(&mut Cache, &[u32])],
    ) -> Result<Vec<Vec<f32>>, Error> {
        let x = self.hidden(compute, memory, sequences, None)?;
        self.logits(compute, &x)
    }

    /// The attention of tokens to the audio, which `scores` receives for each of `heads` (layer and head):
    /// `[token][position]` before the softmax. Returns the probability of each token from `first` on, but the
    /// last, among the tokens below `end`.
    ///
    /// # Errors
    /// As [`Self::decode`].
    pub(super) fn attention(
        &self,
        compute: &Compute,
        memory: &Memory,
        tokens: &[u32],
        (first, end): (usize, u32),
        heads: &[[usize; 2]],
        scores: &mut dyn FnMut(Vec<f32>),
    ) -> Result<Vec<f32>, Error> {
        let width = self.shape.width;
        let x =
            self.hidden(compute, memory, &mut [(&mut self.cache(), tokens)], Some(Sink { heads, scores }))?;
        let predicted = tokens.get(first..tokens.len().saturating_sub(1)).unwrap_or_default();
        let mut shares = Vec::with_capacity(predicted.len());
        for (tokens, x) in predicted
            .chunks(OUTPUT_ROWS)
            .zip(x[first.saturating_sub(1) * width..].chunks(OUTPUT_ROWS * width))
        {
            for (token, logits) in tokens.iter().zip(self.logits(compute, x)?) {
                let mut texts = logits.get(..end as usize).unwrap_or(&logits).to_vec();
                softmax(compute.isa, &mut texts);
                shares.push(texts.get(*token as usize).copied().unwrap_or(0.0));
            }
        }
        Ok(shares)
    }

    /// The output of the decoder's last layer for the next tokens of some sequences, concatenated.
    fn hidden(
        &self,
        compute: &Compute,
        memory: &Memory,
        sequences: &mut [(&mut Cache, &[u32])],
        mut sink: Option<Sink<'_>>,
    ) -> Result<Vec<f32>, Error> {
        let Shape { width, context, heads: [_, heads], .. } = self.shape;
        let mut x = Vec::new();
        for (cache, tokens) in sequences.iter() {
            let end = cache.tokens + tokens.len();
            if end > context {
                return Err(kernels::Error::OutOfRange { what: "position", index: end, len: context }.into());
            }
            let from = x.len();
            x.resize(from + tokens.len() * width, 0.0);
            for (token, x) in tokens.iter().zip(x[from..].chunks_mut(width)) {
                self.embeddings.weight.row(compute.kernels, *token as usize, x)?;
            }
            let positions = &self.decoder_positions[cache.tokens * width..];
            x[from..].iter_mut().zip(positions).for_each(|(x, position)| *x += position);
        }
        let (mut h, mut wide) = (Vec::new(), Vec::new());
        for (number, (layer, memory)) in self.decoder.iter().zip(&memory.0).enumerate() {
            let attention = &layer.attention;
            compute.norm(&x, &attention.norm, &mut h)?;
            compute.linear(&h, &attention.qkv, false, &mut wide)?;
            let (mut attended, mut rows) = (Vec::with_capacity(x.len()), &wide[..]);
            for (cache, tokens) in sequences.iter_mut() {
                let (own, others) = rows.split_at(tokens.len() * 3 * width);
                rows = others;
                let before = cache.tokens;
                let cached = &mut cache.layers[number];
                for row in own.chunks(3 * width) {
                    cached[0].extend_from_slice(&row[width..2 * width]);
                    cached[1].extend_from_slice(&row[2 * width..]);
                }
                attended.extend(attend_to_past(compute, own, cached, before, width, heads)?);
            }
            compute.linear(&attended, &attention.out, true, &mut x)?;
            compute.norm(&x, &layer.cross_norm, &mut h)?;
            compute.linear(&h, &layer.cross_query, false, &mut wide)?;
            if let Some(Sink { heads, scores }) = &mut sink {
                for [_, head] in heads.iter().filter(|[layer, _]| *layer == number) {
                    let dims = width / memory.len();
                    scores(memory[*head].scores(compute, &columns(&wide, width, head * dims, dims), dims)?);
                }
            }
            let attended = attend_to_memory(compute, &wide, memory, width)?;
            compute.linear(&attended, &layer.cross_out, true, &mut x)?;
            layer.feed_forward.add(compute, &mut x, &mut h, &mut wide)?;
        }
        for (cache, tokens) in sequences {
            cache.tokens += tokens.len();
        }
        Ok(x)
    }

    /// The logits of rows of the last layer.
    fn logits(&self, compute: &Compute, rows: &[f32]) -> Result<Vec<Vec<f32>>, Error> {
        let (mut h, mut wide) = (Vec::new(), Vec::new());
        compute.norm(rows, &self.decoder_norm, &mut h)?;
        compute.linear(&h, &self.embeddings, false, &mut wide)?;
        finite("logits are", &wide)?;
        Ok(wide.chunks(self.embeddings.weight.rows()).map(<[f32]>::to_vec).collect())
    }

    /// Number of layers and of heads of the decoder.
    pub(super) fn decoder_heads(&self) -> [usize; 2] {
        [self.decoder.len(), self.shape.heads[1]]
    }
}

impl FeedForward {
    fn add(
        &self,
        compute: &Compute,
        x: &mut Vec<f32>,
        h: &mut Vec<f32>,
        wide: &mut Vec<f32>,
    ) -> Result<(), Error> {
        compute.norm(x, &self.norm, h)?;
        compute.linear(h, &self.up, false, wide)?;
        compute.gelu(wide);
        compute.linear(wide, &self.down, true, x)
    }
}

impl Shape {
    fn read(weights: &mut impl Source) -> Result<Self, Error> {
        let [width, bands, taps] = weights.dims("encoder/conv1/weight")?;
        let [tokens, _] = weights.dims("decoder/embeddings/weight")?;
        let [context, _] = weights.dims("decoder/position_encodings/encodings")?;
        let within = |dimension: &str, found: usize, limits: std::ops::RangeInclusive<usize>| {
            let (min, max) = (*limits.start(), *limits.end());
            match limits.contains(&found) {
                true => Ok(()),
                false => Err(format!("it has {found} {dimension}, {min} to {max} are served")),
            }
        };
        within("dimensions", width, 16..=MAX_WIDTH)
            .and_then(|()| within("bands", bands, 8..=256))
            .and_then(|()| within("taps", taps, TAPS..=TAPS))
            .and_then(|()| within("tokens", tokens, 1..=MAX_TOKENS))
            .and_then(|()| within("positions of its decoder", context, 16..=MAX_CONTEXT))
            .map_err(|reason| weights.wrong(reason))?;
        let mut heads = [0; 2];
        for (heads, of) in heads.iter_mut().zip(["encoder", "decoder"]) {
            let found = weights.number(&format!("{of}/num_heads"))?.unwrap_or_default();
            *heads = usize::try_from(found)
                .ok()
                .filter(|heads| *heads > 0 && width % heads == 0)
                .ok_or_else(|| {
                    weights.wrong(format!(
                        "{of}/num_heads is {found}, which {width} dimensions are not divided by"
                    ))
                })?;
        }
        // Values of the published networks. Another value is another network.
        let supported = [
            ("encoder/pre_norm", 1),
            ("decoder/pre_norm", 1),
            ("encoder/activation", GELU),
            ("decoder/activation", GELU),
            ("decoder/scale_embeddings", 0),
            ("decoder/start_from_zero_embedding", 0),
            ("decoder/alibi", 0),
        ];
        for (name, expected) in supported {
            if let Some(found) = weights.number(name)?.filter(|found| *found != expected) {
                return Err(weights.wrong(format!("{name} is {found}, {expected} is served")));
            }
        }
        Ok(Self { bands, tokens, context, width, heads })
    }
}

/// The inputs of a convolution with three taps at each of its outputs, as rows: `[output][channel][tap]`.
/// Zeros pad the input at both ends.
fn taps(
    outputs: usize,
    stride: usize,
    inputs: usize,
    channels: usize,
    input: impl Fn(usize, usize) -> f32,
) -> Vec<f32> {
    let mut rows = Vec::with_capacity(outputs * channels * TAPS);
    for output in 0..outputs {
        for channel in 0..channels {
            for tap in 0..TAPS {
                let at = (output * stride + tap).checked_sub(TAPS / 2).filter(|at| *at < inputs);
                rows.push(at.map_or(0.0, |at| input(channel, at)));
            }
        }
    }
    rows
}

/// The columns of one head, `[row][dimension]`.
fn columns(x: &[f32], stride: usize, from: usize, dims: usize) -> Vec<f32> {
    x.chunks(stride).flat_map(|row| &row[from..from + dims]).copied().collect()
}

/// Keys and values of every head, from rows of `stride` columns in which they start at the offsets `at`.
fn heads_of(
    compute: &Compute,
    x: &[f32],
    stride: usize,
    at: [usize; 2],
    width: usize,
    heads: usize,
) -> Result<Vec<Head>, Error> {
    let dims = width / heads;
    let rows = x.len() / stride;
    compute.all(heads, |head| {
        let keys = Matrix::of(&columns(x, stride, at[0] + head * dims, dims), dims)?;
        let from = at[1] + head * dims;
        let values: Vec<f32> =
            (from..from + dims).flat_map(|col| (0..rows).map(move |row| x[row * stride + col])).collect();
        Ok(Head { keys, values: Matrix::of(&values, rows)? })
    })
}

impl Head {
    /// Scores of some queries, `[query][dimension]`, for all keys.
    fn scores(&self, compute: &Compute, queries: &[f32], dims: usize) -> Result<Vec<f32>, Error> {
        let rows = queries.len() / dims;
        let mut scores = vec![0.0; rows * self.keys.rows()];
        self.keys.multiply(compute.kernels, queries, scale(dims), &mut scores)?;
        Ok(scores)
    }

    /// Attention of some queries to all keys.
    fn attend(&self, compute: &Compute, queries: &[f32], dims: usize) -> Result<Vec<f32>, Error> {
        let mut scores = self.scores(compute, queries, dims)?;
        scores.chunks_mut(self.keys.rows()).for_each(|row| softmax(compute.isa, row));
        let mut out = vec![0.0; queries.len()];
        self.values.multiply(compute.kernels, &scores, 1.0, &mut out)?;
        Ok(out)
    }
}

fn scale(dims: usize) -> f32 {
    1.0 / (dims as f32).sqrt()
}

/// Attention of the encoder: every row attends to all rows.
fn attend_to_all(compute: &Compute, qkv: &[f32], width: usize, heads: usize) -> Result<Vec<f32>, Error> {
    let stride = 3 * width;
    let dims = width / heads;
    let of_heads = heads_of(compute, qkv, stride, [width, 2 * width], width, heads)?;
    let blocks: Vec<&[f32]> = qkv.chunks(QUERIES * stride).collect();
    let attended = compute.all(heads * blocks.len(), |item| {
        let (block, head) = (item / heads, item % heads);
        let queries = columns(blocks[block], stride, head * dims, dims);
        of_heads[head].attend(compute, &queries, dims)
    })?;
    let mut out = vec![0.0; qkv.len() / 3];
    for (item, attended) in attended.iter().enumerate() {
        let (block, head) = (item / heads, item % heads);
        let rows = out[block * QUERIES * width..].chunks_mut(width);
        for (out, row) in rows.zip(attended.chunks(dims)) {
            out[head * dims..][..dims].copy_from_slice(row);
        }
    }
    Ok(out)
}

/// Cross-attention of the decoder: every token attends to the encoder's output.
fn attend_to_memory(
    compute: &Compute,
    queries: &[f32],
    memory: &[Head],
    width: usize,
) -> Result<Vec<f32>, Error> {
    let dims = width / memory.len();
    let attended = compute.all(memory.len(), |head| {
        memory[head].attend(compute, &columns(queries, width, head * dims, dims), dims)
    })?;
    let mut out = vec![0.0; queries.len()];
    for (head, attended) in attended.iter().enumerate() {
        for (out, row) in out.chunks_mut(width).zip(attended.chunks(dims)) {
            out[head * dims..][..dims].copy_from_slice(row);
        }
    }
    Ok(out)
}

/// Self-attention of the decoder: every token attends to itself and earlier tokens. Row `n` of `qkv` is token
/// `before + n`.
fn attend_to_past(
    compute: &Compute,
    qkv: &[f32],
    [keys, values]: &[Vec<f32>; 2],
    before: usize,
    width: usize,
    heads: usize,
) -> Result<Vec<f32>, Error> {
    let dims = width / heads;
    let mut out = vec![0.0; qkv.len() / 3];
    let rows: Vec<_> = qkv.chunks(3 * width).zip(out.chunks_mut(width).map(Mutex::new)).collect();
    compute.each(rows.len(), |row| {
        let (qkv, out) = &rows[row];
        let mut scores = vec![0.0; before + row + 1];
        for (head, out) in out.lock().chunks_mut(dims).enumerate() {
            let of = head * dims..(head + 1) * dims;
            let query = &qkv[of.clone()];
            for (score, key) in scores.iter_mut().zip(keys.chunks(width)) {
                *score = scale(dims) * dot(query, &key[of.clone()]);
            }
            softmax(compute.isa, &mut scores);
            for (score, value) in scores.iter().zip(values.chunks(width)) {
                out.iter_mut().zip(&value[of.clone()]).for_each(|(out, value)| *out += score * value);
            }
        }
        Ok(())
    })?;
    drop(rows);
    Ok(out)
}

#[cfg(test)]
pub(super) mod tests;
