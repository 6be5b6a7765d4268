//! Reads tensors and uploads them, each once.

use super::{
    AttentionWeights, Classifier, ConvWeights, DeltaNetWeights, EmbeddingWeights, FfnPart, FfnWeights, Head,
    KvWeights, LatentWeights, LayerWeights, Linear, Mamba2Weights, MixerWeights, MoeWeights, OwnKvWeights,
    Packs, PerLayerInputWeights, PerLayerWeights, ShortConvWeights, TensorSource, Weights,
};
use crate::Error;
use kernels::backend::{
    Backend, ExpertGateUp, GateActivation, MatrixId, MatrixSource, Norm, QueryGrowth, RopeId, RopeSource,
    VectorId,
};
use model::TensorBytes;
use model::spec::{
    self, Activation, AttentionSpec, ConvSpec, DeltaNetSpec, EmbeddingSpec, FfnSpec, HeadGrouping, KvSpec,
    LatentSpec, LayerSpec, LinearSpec, Mamba2Spec, MixerSpec, ModelSpec, MoeSpec, NormKind, NormSpec,
    OutputSpec, RopeFactors, RowSlice, ShortConvSpec, TableSpec,
};
use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;

/// Reads and uploads tensors, each once.
pub(crate) struct Loader<'a> {
    source: &'a dyn TensorSource,
    backend: &'a mut dyn Backend,
    packs: Packs,
    matrices: HashMap<(String, Option<RowSlice>), MatrixId>,
    ropes: Vec<(spec::RopeSpec, RopeId)>,
    source_bytes: usize,
    bytes_per_token: usize,
}

/// Names of the tensors that `Loader::load` reads for a range of layers, in its order and without duplicates.
pub fn tensors_of(spec: &ModelSpec, range: Range<usize>) -> Vec<&str> {
    let mut names = Vec::new();
    if embeds(spec, &range) {
        names.extend(spec.embedding_tensors());
    }
    names.extend(spec.layer_tensors(range.clone()));
    if has_head(spec, &range) {
        names.extend(spec.output_tensors());
    }
    names
}

/// Whether a range needs the embedding. Per-layer embeddings are computed from the embedded tokens on every
/// stage.
fn embeds(spec: &ModelSpec, range: &Range<usize>) -> bool {
    range.start == 0 || spec.per_layer_input.is_some()
}

/// Whether a range has the output head. The last range does. So does a range for which the head costs no
/// memory because it is also the embedding, since it can then help the last stage.
fn has_head(spec: &ModelSpec, range: &Range<usize>) -> bool {
    let shared = || spec.logits().is_some_and(|head| head.linear.weight == spec.embedding.tensor);
    range.end == spec.layers.len() || embeds(spec, range) && shared()
}

impl<'a> Loader<'a> {
    /// Reads from `source`, and repacked matrices from `packs`.
    pub(crate) fn new(source: &'a dyn TensorSource, packs: Packs, backend: &'a mut dyn Backend) -> Self {
        Self {
            source,
            backend,
            packs,
            matrices: HashMap::new(),
            ropes: Vec::new(),
            source_bytes: 0,
            bytes_per_token: 0,
        }
    }

    /// Loads `range` of the model's layers. Calls `progress` with (loaded layers, total layers).
    pub(crate) fn load(
        mut self,
        spec: &ModelSpec,
        range: Range<usize>,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Weights, Error> {
        let (total, has_head) = (range.len(), has_head(spec, &range));
        let embedding = embeds(spec, &range).then(|| self.embedding(spec)).transpose()?;
        let per_layer_input = match &spec.per_layer_input {
            Some(input) => Some(PerLayerInputWeights {
                table: self.table(&input.table, spec.vocab, input.width * spec.layers.len())?,
                projection: self.linear(&input.projection)?,
                norm: self.norm(&input.norm)?,
            }),
            None => None,
        };
        let mut layers = Vec::with_capacity(total);
        for (done, layer) in spec.layers[range].iter().enumerate() {
            progress(done, total);
            layers.push(self.layer(layer)?);
        }
        let head = has_head.then(|| self.head(spec)).transpose()?;
        progress(total, total);
        let repacking = self.packs.finish();
        Ok(Weights {
            embedding,
            per_layer_input,
            layers,
            head,
            source_bytes: self.source_bytes,
            bytes_per_token: self.bytes_per_token,
            matrices: self.matrices,
            repacking,
        })
    }

    /// Bytes of the tensors that were read.
    pub(crate) fn source_bytes(&self) -> usize {
        self.source_bytes
    }

    fn embedding(&mut self, spec: &ModelSpec) -> Result<EmbeddingWeights, Error> {
        let EmbeddingSpec { tensor, scale: _, positions, token_types, norm } = &spec.embedding;
        let rows = |table: &TableSpec| (table.tensor.clone(), table.rows);
        Ok(EmbeddingWeights {
            tokens: self.table(tensor, spec.vocab, spec.hidden)?,
            positions: self.optional_table(positions.as_ref().map(rows), spec.hidden)?,
            token_types: self.optional_table(token_types.as_ref().map(rows), spec.hidden)?,
            norm: self.optional_norm(norm.as_ref())?,
        })
    }

    fn head(&mut self, spec: &ModelSpec) -> Result<Head, Error> {
        match &spec.output {
            OutputSpec::Logits(logits) => {
                if logits.linear.weight == spec.embedding.tensor {
                    // As a table a token reads one row of it; as the head it is read whole.
                    self.bytes_per_token += self.source.measure(&spec.embedding.tensor)?.1 as usize;
                }
                Ok(Head::Logits { norm: self.norm(&logits.norm)?, linear: self.linear(&logits.linear)? })
            }
            OutputSpec::Pooled(pooled) => {
                let classifier = match &pooled.classifier {
                    Some(classifier) => Some(Classifier {
                        dense: classifier.dense.as_ref().map(|dense| self.linear(dense)).transpose()?,
                        norm: self.optional_norm(classifier.norm.as_ref())?,
                        out: self.linear(&classifier.out)?,
                    }),
                    None => None,
                };
                Ok(Head::Pooled { classifier })
            }
        }
    }

    pub(crate) fn layer(&mut self, layer: &LayerSpec) -> Result<LayerWeights, Error> {
        let mixer = self.mixer(&layer.mixer)?;
        let parallel_mixer = layer.parallel_mixer.as_ref().map(|mixer| self.mixer(mixer)).transpose()?;
        let mut ffn = Vec::with_capacity(layer.ffn.len());
        for part in &layer.ffn {
            ffn.push(FfnPart {
                own_norm: self.optional_norm(part.own_norm.as_ref())?,
                ffn: self.ffn(&part.ffn)?,
                post_norm: self.optional_norm(part.post_norm.as_ref())?,
            });
        }
        let per_layer = match &layer.per_layer {
            Some(per_layer) => Some(PerLayerWeights {
                gate: self.linear(&per_layer.gate)?,
                projection: self.linear(&per_layer.projection)?,
                norm: self.norm(&per_layer.norm)?,
            }),
            None => None,
        };
        Ok(LayerWeights {
            mixer_norm: self.optional_norm(layer.mixer_norm.as_ref())?,
            mixer,
            parallel_mixer,
            mixer_post_norm: self.optional_norm(layer.mixer_post_norm.as_ref())?,
            mixer_out_norm: self.optional_norm(layer.mixer_out_norm.as_ref())?,
            parallel: layer.parallel,
            ffn_norm: self.optional_norm(layer.ffn_norm.as_ref())?,
            ffn,
            ffn_post_norm: self.optional_norm(layer.ffn_post_norm.as_ref())?,
            ffn_out_norm: self.optional_norm(layer.ffn_out_norm.as_ref())?,
            per_layer,
            output_scale: layer.output_scale.as_deref().map(|name| self.scalar(name)).transpose()?,
        })
    }

    fn mixer(&mut self, mixer: &MixerSpec) -> Result<MixerWeights, Error> {
        Ok(match mixer {
            MixerSpec::Attention(attention) => MixerWeights::Attention(Box::new(self.attention(attention)?)),
            MixerSpec::DeltaNet(delta) => MixerWeights::DeltaNet(Box::new(self.delta_net(delta)?)),
            MixerSpec::Mamba2(mamba) => MixerWeights::Mamba2(Box::new(self.mamba2(mamba)?)),
            MixerSpec::ShortConv(short) => MixerWeights::ShortConv(Box::new(self.short_conv(short)?)),
        })
    }

    fn attention(&mut self, attention: &AttentionSpec) -> Result<AttentionWeights, Error> {
        let kv = match &attention.kv {
            KvSpec::Own(own) => KvWeights::Own(OwnKvWeights {
                k: self.linear(&own.k)?,
                v: own.v.as_ref().map(|v| self.linear(v)).transpose()?,
                k_norm: self.optional_norm(own.k_norm.as_ref())?,
                v_norm: self.optional_norm(own.v_norm.as_ref())?,
            }),
            KvSpec::Shared { .. } => KvWeights::Shared,
            KvSpec::Latent(latent) => KvWeights::Latent(Box::new(self.latent(latent, attention)?)),
        };
        Ok(AttentionWeights {
            q: self.linear(&attention.q)?,
            q_norm: self.optional_norm(attention.q_norm.as_ref())?,
            q_growth: attention.q_growth.map(|growth| QueryGrowth { beta: growth.beta, every: growth.every }),
            kv,
            rope: attention.rope.as_ref().map(|rope| self.rope(rope)).transpose()?,
            scale: attention.scale,
            softcap: attention.softcap,
            sinks: self.optional_vector(attention.sinks.as_deref(), attention.heads)?,
            gate: attention.gate.as_ref().map(|gate| self.linear(gate)).transpose()?,
            o: self.linear(&attention.o)?,
        })
    }

    fn latent(&mut self, latent: &LatentSpec, attention: &AttentionSpec) -> Result<LatentWeights, Error> {
        Ok(LatentWeights {
            q_down: match &latent.q_down {
                Some((down, norm)) => Some((self.linear(down)?, self.norm(norm)?)),
                None => None,
            },
            q_rope: self.linear(&latent.q_rope)?,
            k_rope: self.linear(&latent.k_rope)?,
            latent: self.linear(&latent.latent)?,
            latent_norm: self.norm(&latent.latent_norm)?,
            k_up: self.linears(&latent.k_up, attention.heads)?,
            v_up: self.linears(&latent.v_up, attention.heads)?,
            heads: attention.heads,
            rotating: latent.k_rope.rows,
            width: attention.head_dim,
            value: latent.v_up.rows,
        })
    }

    fn delta_net(&mut self, delta: &DeltaNetSpec) -> Result<DeltaNetWeights, Error> {
        let (a, dt_bias, memory) = self.decay(&delta.a, &delta.dt_bias, delta.v_heads)?;
        Ok(DeltaNetWeights {
            qkv: self.linear(&delta.qkv)?,
            conv: self.conv(&delta.conv)?,
            gate: self.linear(&delta.gate)?,
            beta: self.linear(&delta.beta)?,
            alpha: self.linear(&delta.alpha)?,
            a,
            dt_bias,
            memory,
            k_heads: delta.k_heads,
            tiled: delta.grouping == HeadGrouping::Tiled,
            l2_eps: delta.l2_eps,
            norm: self.norm(&delta.norm)?,
            out: self.linear(&delta.out)?,
        })
    }

    fn mamba2(&mut self, mamba: &Mamba2Spec) -> Result<Mamba2Weights, Error> {
        let inner = mamba.heads * mamba.head_dim;
        let (a, dt_bias, memory) = self.decay(&mamba.a, &mamba.dt_bias, mamba.heads)?;
        Ok(Mamba2Weights {
            z: self.linear(&mamba.z)?,
            xbc: self.linear(&mamba.xbc)?,
            dt: self.linear(&mamba.dt)?,
            conv: self.conv(&mamba.conv)?,
            a,
            d: self.vector(&mamba.d, mamba.heads)?,
            dt_bias,
            memory,
            groups: mamba.groups,
            norm: match &mamba.norm {
                Some(norm) => Some(Norm {
                    // The weight spans all groups; each group is normed separately.
                    weight: self.optional_vector(norm.weight.as_deref(), inner)?,
                    ..self.norm(&NormSpec { weight: None, ..norm.clone() })?
                }),
                None => None,
            },
            norm_first: mamba.norm_first,
            out: self.linear(&mamba.out)?,
        })
    }

    fn short_conv(&mut self, short: &ShortConvSpec) -> Result<ShortConvWeights, Error> {
        Ok(ShortConvWeights {
            b: self.linear(&short.b)?,
            c: self.linear(&short.c)?,
            x: self.linear(&short.x)?,
            conv: self.conv(&short.conv)?,
            out: self.linear(&short.out)?,
        })
    }

    /// The parameters of the heads' decay, and the resulting memory of each head.
    fn decay(
        &mut self,
        a: &str,
        dt_bias: &str,
        heads: usize,
    ) -> Result<(VectorId, VectorId, Vec<f32>), Error> {
        let (a, dt_bias) = (self.floats(a, heads)?, self.floats(dt_bias, heads)?);
        let memory = head_memory(&a, &dt_bias);
        Ok((self.backend.create_vector(&a)?, self.backend.create_vector(&dt_bias)?, memory))
    }

    fn conv(&mut self, conv: &ConvSpec) -> Result<ConvWeights, Error> {
        let mut weight = self.floats(&conv.weight, conv.channels * conv.taps)?;
        for (weights, factor) in weight.chunks_exact_mut(conv.taps).zip(conv.factors()) {
            weights.iter_mut().for_each(|weight| *weight *= factor);
        }
        Ok(ConvWeights {
            weight: self.backend.create_vector(&weight)?,
            bias: self.optional_vector(conv.bias.as_deref(), conv.channels)?,
        })
    }

    fn ffn(&mut self, ffn: &FfnSpec) -> Result<FfnWeights, Error> {
        match ffn {
            FfnSpec::Gated { gate, up, down, activation, row_gate } => Ok(FfnWeights::Gated {
                gate: self.linear(gate)?,
                up: self.linear(up)?,
                down: self.linear(down)?,
                activation: gate_activation(*activation),
                row_gate: row_gate.as_ref().map(|gate| self.linear(gate)).transpose()?,
            }),
            FfnSpec::Plain { up, down, activation } => Ok(FfnWeights::Plain {
                up: self.linear(up)?,
                down: self.linear(down)?,
                activation: gate_activation(*activation),
            }),
            FfnSpec::Moe(moe) => Ok(FfnWeights::Moe(Box::new(self.moe(moe)?))),
        }
    }

    fn moe(&mut self, moe: &MoeSpec) -> Result<MoeWeights, Error> {
        let (experts, ff) = (moe.experts, moe.expert_ff);
        let gate_up = match &moe.gate_up {
            spec::ExpertGateUp::Separate { gate, up } => ExpertGateUp::Separate {
                gate: self.experts(gate, moe)?,
                up: self.experts(up, moe)?,
                gate_scale: self.optional_vector(gate.scale.as_deref(), experts)?,
                up_scale: self.optional_vector(up.scale.as_deref(), experts)?,
                gate_bias: self.optional_vector(gate.bias.as_deref(), experts * ff)?,
                up_bias: self.optional_vector(up.bias.as_deref(), experts * ff)?,
            },
            spec::ExpertGateUp::Fused(linear) => ExpertGateUp::Fused {
                gate_up: self.experts(linear, moe)?,
                scale: self.optional_vector(linear.scale.as_deref(), experts)?,
                bias: self.optional_vector(linear.bias.as_deref(), experts * 2 * ff)?,
            },
        };
        Ok(MoeWeights {
            router_norm: self.optional_norm(moe.router_norm.as_ref())?,
            router: self.linear(&moe.router)?,
            selection_bias: self.optional_vector(moe.selection_bias.as_deref(), experts)?,
            gate_up,
            down: self.experts(&moe.down, moe)?,
            down_scale: self.optional_vector(moe.down.scale.as_deref(), experts)?,
            down_bias: self.optional_vector(moe.down.bias.as_deref(), experts * moe.down.rows)?,
            activation: gate_activation(moe.activation),
            spec: moe.clone(),
        })
    }

    pub(crate) fn linear(&mut self, linear: &LinearSpec) -> Result<Linear, Error> {
        self.linears(linear, 1)
    }

    /// `count` matrices in one tensor, without biases if there are several.
    fn linears(&mut self, linear: &LinearSpec, count: usize) -> Result<Linear, Error> {
        let scale = linear.scale.as_deref().map(|name| self.scalar(name)).transpose()?;
        let matrix = self.matrix(&linear.weight, linear.rows, linear.cols, count, linear.slice)?;
        if let Some(name) = &linear.order {
            let order = self.floats(name, linear.cols)?;
            // A value that is no number of a column is refused.
            let place = |col: f32| if col.fract() == 0.0 && col >= 0.0 { col as u32 } else { u32::MAX };
            self.backend.set_order(matrix, &order.into_iter().map(place).collect::<Vec<u32>>())?;
        }
        Ok(Linear {
            matrix,
            bias: linear.bias.as_deref().map(|name| self.bias(name, linear)).transpose()?,
            scale: scale.unwrap_or(1.0) * linear.factor,
        })
    }

    /// The bias of the rows that are used.
    fn bias(&mut self, name: &str, linear: &LinearSpec) -> Result<VectorId, Error> {
        let mut values = self.floats(name, linear.tensor_rows())?;
        if let Some(RowSlice { period, start, len, .. }) = linear.slice {
            let periods = values.chunks_exact(period.max(1));
            values = periods.flat_map(|rows| &rows[start..start + len]).copied().collect();
        }
        values.iter_mut().for_each(|value| *value *= linear.bias_factor);
        Ok(self.backend.create_vector(&values)?)
    }

    fn experts(&mut self, linear: &LinearSpec, moe: &MoeSpec) -> Result<MatrixId, Error> {
        let before = self.bytes_per_token;
        let id = self.matrix(&linear.weight, linear.rows, linear.cols, moe.experts, None)?;
        self.bytes_per_token = before + (self.bytes_per_token - before) * moe.used / moe.experts;
        Ok(id)
    }

    /// Loads a matrix of which a token reads one row.
    pub(crate) fn table(&mut self, name: &str, rows: usize, cols: usize) -> Result<MatrixId, Error> {
        let before = self.bytes_per_token;
        let id = self.matrix(name, rows, cols, 1, None)?;
        self.bytes_per_token = before;
        Ok(id)
    }

    fn optional_table(
        &mut self,
        table: Option<(String, usize)>,
        cols: usize,
    ) -> Result<Option<MatrixId>, Error> {
        table.map(|(name, rows)| self.table(&name, rows, cols)).transpose()
    }

    fn matrix(
        &mut self,
        name: &str,
        rows: usize,
        cols: usize,
        experts: usize,
        slice: Option<RowSlice>,
    ) -> Result<MatrixId, Error> {
        let key = (name.to_owned(), slice);
        if let Some(id) = self.matrices.get(&key) {
            return Ok(*id);
        }
        let (ggml_type, bytes) = self.source.measure(name)?;
        let shape = MatrixSource { ggml_type, rows, cols, experts, bytes: &[] };
        let (packed_name, bytes) = match slice {
            None => (name.to_owned(), bytes as usize),
            Some(RowSlice { of, period, start, len }) => {
                let slice_bytes = bytes as usize / of.max(1) * (of / period.max(1)) * len;
                (format!("{name} {of}/{period}/{start}/{len}"), slice_bytes)
            }
        };
        let id = match self.packs.find(&packed_name, shape, self.backend) {
            Some(id) => id,
            None => match self.load_deferred(name, &packed_name, shape, slice)? {
                Some(id) => id,
                None => self.repack(name, &packed_name, shape, slice)?,
            },
        };
        self.source_bytes += bytes;
        self.bytes_per_token += bytes;
        self.matrices.insert(key, id);
        Ok(id)
    }

    /// Loads a matrix that is repacked later, under the name `packed_name`. `None` if that is not possible.
    fn load_deferred(
        &mut self,
        name: &str,
        packed_name: &str,
        shape: MatrixSource<'_>,
        slice: Option<RowSlice>,
    ) -> Result<Option<MatrixId>, Error> {
        if slice.is_some() || !self.packs.can_wait() {
            return Ok(None);
        }
        match self.source.shared(name)? {
            Some(bytes) => self.packs.defer_matrix(packed_name, shape, bytes, self.backend),
            None => Ok(None),
        }
    }

    /// Reads a matrix and has the device repack it. `packed_name` is its name in the store of repacked
    /// weights.
    fn repack(
        &mut self,
        name: &str,
        packed_name: &str,
        shape: MatrixSource<'_>,
        slice: Option<RowSlice>,
    ) -> Result<MatrixId, Error> {
        let tensor = self.source.tensor(name)?;
        let bytes: Box<dyn kernels::backend::MatrixBytes> = match slice {
            Some(slice) if slice.period != slice.of => Box::new(sliced(&tensor.whole()?, slice)),
            Some(RowSlice { of, start, len, .. }) => {
                let row = tensor.info().bytes() / of.max(1) as u64;
                let range = start as u64 * row..(start + len) as u64 * row;
                Box::new(InParts { tensor, range })
            }
            None => {
                let range = 0..tensor.info().bytes();
                Box::new(InParts { tensor, range })
            }
        };
        let source = MatrixSource { bytes: bytes.as_ref(), ..shape };
        match self.packs.store_matrix(packed_name, source, self.backend)? {
            Some(id) => Ok(id),
            None => Ok(self.backend.create_matrix(source)?),
        }
    }

    pub(crate) fn norm(&mut self, norm: &NormSpec) -> Result<Norm, Error> {
        Ok(Norm {
            rms: norm.kind == NormKind::Rms,
            weight: self.optional_vector(norm.weight.as_deref(), norm.width)?,
            bias: self.optional_vector(norm.bias.as_deref(), norm.width)?,
            eps: norm.eps,
            width: norm.width,
        })
    }

    fn optional_norm(&mut self, norm: Option<&NormSpec>) -> Result<Option<Norm>, Error> {
        norm.map(|norm| self.norm(norm)).transpose()
    }

    fn vector(&mut self, name: &str, len: usize) -> Result<VectorId, Error> {
        let values = self.floats(name, len)?;
        Ok(self.backend.create_vector(&values)?)
    }

    fn optional_vector(&mut self, name: Option<&str>, len: usize) -> Result<Option<VectorId>, Error> {
        name.map(|name| self.vector(name, len)).transpose()
    }

    fn scalar(&mut self, name: &str) -> Result<f32, Error> {
        Ok(self.floats(name, 1)?.first().copied().unwrap_or(1.0))
    }

    fn rope(&mut self, rope: &spec::RopeSpec) -> Result<RopeId, Error> {
        if let Some((_, id)) = self.ropes.iter().find(|(cached, _)| cached == rope) {
            return Ok(*id);
        }
        let factors = match &rope.factors {
            Some(RopeFactors::Tensor(name)) => Some(self.floats(name, rope.n_rot / 2)?),
            Some(RopeFactors::ByContext { short, long, is_long, .. }) => {
                Some(self.floats(if *is_long { long } else { short }, rope.n_rot / 2)?)
            }
            Some(RopeFactors::Values(values)) => Some(values.clone()),
            None => None,
        };
        let id = self.backend.create_rope(RopeSource {
            interleaved: rope.style == spec::RopeStyle::Interleaved,
            n_rot: rope.n_rot,
            base: rope.base,
            freq_scale: rope.freq_scale,
            factors,
            magnitude: rope.magnitude,
            axes: rope.axes.clone(),
        })?;
        self.ropes.push((rope.clone(), id));
        Ok(id)
    }

    pub(crate) fn floats(&mut self, name: &str, len: usize) -> Result<Vec<f32>, Error> {
        let tensor = self.source.tensor(name)?;
        let (ty, bytes) = (tensor.info().ty().id(), tensor.whole()?);
        let mut values = vec![0f32; len];
        kernels::quant::GgmlType::from_id(ty)
            .and_then(|ty| kernels::quant::dequantize(ty, &bytes, &mut values))?;
        self.source_bytes += bytes.len();
        Ok(values)
    }
}

/// Bytes of a tensor that the device reads in parts, so that converted ones need not be in memory as a whole.
#[derive(Debug)]
struct InParts<'a> {
    tensor: TensorBytes<'a>,
    range: Range<u64>,
}

impl kernels::backend::MatrixBytes for InParts<'_> {
    fn size(&self) -> usize {
        (self.range.end - self.range.start) as usize
    }

    fn part(&self, part: Range<usize>) -> Result<Cow<'_, [u8]>, kernels::Error> {
        let at = |place: usize| self.range.start + place as u64;
        let bytes = self.tensor.part(at(part.start)..at(part.end));
        bytes.map_err(|error| kernels::Error::Read { reason: error.to_string() })
    }
}

/// The bytes of a slice's rows, in order.
fn sliced(bytes: &[u8], slice: RowSlice) -> Vec<u8> {
    let RowSlice { of, period, start, len } = slice;
    let row = bytes.len() / of.max(1);
    let periods = bytes.chunks_exact((period * row).max(1));
    periods.flat_map(|rows| &rows[start * row..(start + len) * row]).copied().collect()
}

pub(crate) fn gate_activation(activation: Activation) -> GateActivation {
    match activation {
        Activation::Silu => GateActivation::Silu,
        Activation::GeluTanh => GateActivation::GeluTanh,
        Activation::GeluErf => GateActivation::GeluErf,
        Activation::ReluSquared => GateActivation::ReluSquared,
        Activation::ClampedSwiglu => GateActivation::ClampedSwiglu,
    }
}

/// The memory of each head, in tokens: see [`StateType`].
pub(crate) fn head_memory(a: &[f32], dt_bias: &[f32]) -> Vec<f32> {
    let softplus = |x: f32| if x > 20.0 { x } else { x.exp().ln_1p() };
    a.iter().zip(dt_bias).map(|(a, dt_bias)| 1.0 / (-a * softplus(*dt_bias))).collect()
}
