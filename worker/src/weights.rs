//! Weights of a layer range, read through a tensor source and uploaded to a backend.

use crate::Error;
use kernels::backend::{
    Backend, ExpertGateUp, GateActivation, MatrixId, MatrixSource, Norm, RopeId, RopeSource, VectorId,
};
use model::spec::{
    self, Activation, FfnSpec, LayerSpec, LinearSpec, MixerSpec, ModelSpec, MoeSpec, NormKind, NormSpec,
};
use std::collections::HashMap;
use std::ops::Range;

/// A tensor as a source hands it out.
#[derive(Debug, Clone, Copy)]
pub struct TensorView<'a> {
    /// ggml type id.
    pub ggml_type: u32,
    /// Dimensions in GGUF order (first = contiguous).
    pub dims: &'a [u64],
    /// Its bytes as in the file.
    pub bytes: &'a [u8],
}

/// Where weights come from: a file, a split set, a shard store.
pub trait TensorSource {
    /// The named tensor, if the source holds it.
    fn tensor(&self, name: &str) -> Option<TensorView<'_>>;
}

impl TensorSource for model::gguf::Gguf {
    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let info = Self::tensor(self, name)?;
        let bytes = self.tensor_data(name).ok()?;
        Some(TensorView { ggml_type: info.ty().id(), dims: info.dims(), bytes })
    }
}

/// A linear map on the device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Linear {
    pub(crate) matrix: MatrixId,
    pub(crate) bias: Option<VectorId>,
    pub(crate) scale: f32,
}

/// Attention weights of a layer.
#[derive(Debug)]
pub(crate) struct AttentionWeights {
    pub(crate) q: Linear,
    pub(crate) k: Linear,
    pub(crate) v: Linear,
    pub(crate) o: Linear,
    pub(crate) q_norm: Option<Norm>,
    pub(crate) k_norm: Option<Norm>,
    pub(crate) rope: Option<RopeId>,
}

/// FFN weights of a layer.
#[derive(Debug)]
pub(crate) enum FfnWeights {
    Dense { gate: Linear, up: Linear, down: Linear, activation: GateActivation },
    Moe(Box<MoeWeights>),
}

/// Weights of a mixture of experts.
#[derive(Debug)]
pub(crate) struct MoeWeights {
    pub(crate) router: Linear,
    pub(crate) spec: MoeSpec,
    pub(crate) gate_up: ExpertGateUp,
    pub(crate) down: MatrixId,
    pub(crate) down_scale: Option<VectorId>,
    pub(crate) activation: GateActivation,
}

/// Weights of one layer.
#[derive(Debug)]
pub(crate) struct LayerWeights {
    pub(crate) mixer_norm: Option<Norm>,
    pub(crate) attention: AttentionWeights,
    pub(crate) mixer_post_norm: Option<Norm>,
    pub(crate) ffn_norm: Option<Norm>,
    pub(crate) ffn: FfnWeights,
    pub(crate) ffn_post_norm: Option<Norm>,
}

/// Weights of a layer range; embedding and head only where the range holds the first or last layer.
#[derive(Debug)]
pub(crate) struct Weights {
    pub(crate) embedding: Option<MatrixId>,
    pub(crate) layers: Vec<LayerWeights>,
    pub(crate) head: Option<(Norm, Linear)>,
    /// Bytes of the tensors as they stand in the source.
    pub(crate) source_bytes: usize,
    /// Bytes of them that one token reads: of experts the share that is used, of the embedding one row.
    pub(crate) bytes_per_token: usize,
}

/// Reads and uploads, each tensor once.
pub(crate) struct Loader<'a> {
    source: &'a dyn TensorSource,
    backend: &'a mut dyn Backend,
    matrices: HashMap<String, MatrixId>,
    ropes: Vec<(spec::RopeSpec, RopeId)>,
    source_bytes: usize,
    bytes_per_token: usize,
}

impl<'a> Loader<'a> {
    pub(crate) fn new(source: &'a dyn TensorSource, backend: &'a mut dyn Backend) -> Self {
        Self {
            source,
            backend,
            matrices: HashMap::new(),
            ropes: Vec::new(),
            source_bytes: 0,
            bytes_per_token: 0,
        }
    }

    /// Loads `range` of the model's layers; `progress` hears (layers done, layers in all).
    pub(crate) fn load(
        mut self,
        spec: &ModelSpec,
        range: Range<usize>,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Weights, Error> {
        let first = range.start == 0;
        let last = range.end == spec.layers.len();
        let total = range.len();
        let embedding = match first {
            true => Some(self.matrix(&spec.embedding.tensor, spec.vocab, spec.hidden, 1)?),
            false => None,
        };
        // A token reads one row of the embedding; where the head is tied to it, the head counts.
        self.bytes_per_token = 0;
        let mut layers = Vec::with_capacity(total);
        for (done, layer) in spec.layers[range].iter().enumerate() {
            progress(done, total);
            layers.push(self.layer(layer)?);
        }
        let head = match last {
            true => {
                if spec.output.linear.weight == spec.embedding.tensor {
                    self.bytes_per_token += self.view(&spec.embedding.tensor)?.bytes.len();
                }
                Some((self.norm(&spec.output_norm)?, self.linear(&spec.output.linear)?))
            }
            false => None,
        };
        progress(total, total);
        Ok(Weights {
            embedding,
            layers,
            head,
            source_bytes: self.source_bytes,
            bytes_per_token: self.bytes_per_token,
        })
    }

    fn layer(&mut self, layer: &LayerSpec) -> Result<LayerWeights, Error> {
        let MixerSpec::Attention(attention) = &layer.mixer;
        Ok(LayerWeights {
            mixer_norm: self.optional_norm(layer.mixer_norm.as_ref())?,
            attention: AttentionWeights {
                q: self.linear(&attention.q)?,
                k: self.linear(&attention.k)?,
                v: self.linear(&attention.v)?,
                o: self.linear(&attention.o)?,
                q_norm: self.optional_norm(attention.q_norm.as_ref())?,
                k_norm: self.optional_norm(attention.k_norm.as_ref())?,
                rope: attention.rope.as_ref().map(|rope| self.rope(rope)).transpose()?,
            },
            mixer_post_norm: self.optional_norm(layer.mixer_post_norm.as_ref())?,
            ffn_norm: self.optional_norm(layer.ffn_norm.as_ref())?,
            ffn: self.ffn(&layer.ffn)?,
            ffn_post_norm: self.optional_norm(layer.ffn_post_norm.as_ref())?,
        })
    }

    fn ffn(&mut self, ffn: &FfnSpec) -> Result<FfnWeights, Error> {
        match ffn {
            FfnSpec::Dense { gate, up, down, activation } => Ok(FfnWeights::Dense {
                gate: self.linear(gate)?,
                up: self.linear(up)?,
                down: self.linear(down)?,
                activation: gate_activation(*activation),
            }),
            FfnSpec::Moe(moe) => {
                let gate_up = match &moe.gate_up {
                    spec::ExpertGateUp::Separate { gate, up } => ExpertGateUp::Separate {
                        gate: self.experts(gate, moe)?,
                        up: self.experts(up, moe)?,
                        gate_scale: self.optional_vector(gate.scale.as_deref(), moe.experts)?,
                        up_scale: self.optional_vector(up.scale.as_deref(), moe.experts)?,
                    },
                    spec::ExpertGateUp::Fused(linear) => ExpertGateUp::Fused {
                        gate_up: self.experts(linear, moe)?,
                        scale: self.optional_vector(linear.scale.as_deref(), moe.experts)?,
                    },
                };
                Ok(FfnWeights::Moe(Box::new(MoeWeights {
                    router: self.linear(&moe.router)?,
                    gate_up,
                    down: self.experts(&moe.down, moe)?,
                    down_scale: self.optional_vector(moe.down.scale.as_deref(), moe.experts)?,
                    activation: gate_activation(moe.activation),
                    spec: moe.clone(),
                })))
            }
        }
    }

    fn linear(&mut self, linear: &LinearSpec) -> Result<Linear, Error> {
        let scale = match &linear.scale {
            Some(name) => self.floats(name, 1)?.first().copied().unwrap_or(1.0),
            None => 1.0,
        };
        Ok(Linear {
            matrix: self.matrix(&linear.weight, linear.rows, linear.cols, 1)?,
            bias: self.optional_vector(linear.bias.as_deref(), linear.rows)?,
            scale,
        })
    }

    fn experts(&mut self, linear: &LinearSpec, moe: &MoeSpec) -> Result<MatrixId, Error> {
        let before = self.bytes_per_token;
        let id = self.matrix(&linear.weight, linear.rows, linear.cols, moe.experts)?;
        self.bytes_per_token = before + (self.bytes_per_token - before) * moe.used / moe.experts;
        Ok(id)
    }

    fn matrix(&mut self, name: &str, rows: usize, cols: usize, experts: usize) -> Result<MatrixId, Error> {
        if let Some(id) = self.matrices.get(name) {
            return Ok(*id);
        }
        let view = self.view(name)?;
        let id = self.backend.create_matrix(MatrixSource {
            ggml_type: view.ggml_type,
            rows,
            cols,
            experts,
            bytes: view.bytes,
        })?;
        self.source_bytes += view.bytes.len();
        self.bytes_per_token += view.bytes.len();
        self.matrices.insert(name.to_owned(), id);
        Ok(id)
    }

    fn norm(&mut self, norm: &NormSpec) -> Result<Norm, Error> {
        Ok(Norm {
            rms: norm.kind == NormKind::Rms,
            weight: self.optional_vector(norm.weight.as_deref(), norm.width)?,
            bias: self.optional_vector(norm.bias.as_deref(), norm.width)?,
            eps: norm.eps,
        })
    }

    fn optional_norm(&mut self, norm: Option<&NormSpec>) -> Result<Option<Norm>, Error> {
        norm.map(|norm| self.norm(norm)).transpose()
    }

    fn optional_vector(&mut self, name: Option<&str>, len: usize) -> Result<Option<VectorId>, Error> {
        let Some(name) = name else { return Ok(None) };
        let values = self.floats(name, len)?;
        Ok(Some(self.backend.create_vector(&values)?))
    }

    fn rope(&mut self, rope: &spec::RopeSpec) -> Result<RopeId, Error> {
        if let Some((_, id)) = self.ropes.iter().find(|(known, _)| known == rope) {
            return Ok(*id);
        }
        let factors = rope.factors.as_deref().map(|name| self.floats(name, rope.n_rot / 2)).transpose()?;
        let id = self.backend.create_rope(RopeSource {
            interleaved: rope.style == spec::RopeStyle::Interleaved,
            n_rot: rope.n_rot,
            base: rope.base,
            freq_scale: rope.freq_scale,
            factors,
        })?;
        self.ropes.push((rope.clone(), id));
        Ok(id)
    }

    fn floats(&mut self, name: &str, len: usize) -> Result<Vec<f32>, Error> {
        let view = self.view(name)?;
        let (source_bytes, mut values) = (view.bytes.len(), vec![0f32; len]);
        kernels::quant::GgmlType::from_id(view.ggml_type)
            .and_then(|ty| kernels::quant::dequantize(ty, view.bytes, &mut values))?;
        self.source_bytes += source_bytes;
        Ok(values)
    }

    fn view(&self, name: &str) -> Result<TensorView<'a>, Error> {
        self.source.tensor(name).ok_or_else(|| Error::MissingTensor { name: name.to_owned() })
    }
}

fn gate_activation(activation: Activation) -> GateActivation {
    match activation {
        Activation::Silu => GateActivation::Silu,
        Activation::GeluTanh => GateActivation::GeluTanh,
    }
}
