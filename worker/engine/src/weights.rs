//! Weights of a layer range, read through a tensor source and uploaded to a backend.

use crate::Error;
use kernels::backend::{
    ExpertGateUp, GateActivation, MatrixId, Norm, QueryGrowth, RopeId, SharedBytes, VectorId,
};
use model::TensorBytes;
use model::spec::{MoeSpec, RowSlice};
use std::collections::HashMap;

mod loader;
mod packed;
mod repacking;

#[cfg(test)]
pub(crate) use loader::head_memory;
pub use loader::tensors_of;
pub(crate) use loader::{Loader, gate_activation};
pub use packed::Packs;
pub(crate) use repacking::Repacking;

/// Where weights come from: a file, a split set, a shard store.
pub trait TensorSource {
    /// The named tensor, or [`Error::MissingTensor`] if the model has none.
    fn tensor(&self, name: &str) -> Result<TensorBytes<'_>, Error>;

    /// The bytes of a tensor as a shared mapping that is never written again. `None` if the source has no
    /// such mapping.
    fn shared(&self, _name: &str) -> Result<Option<SharedBytes>, Error> {
        Ok(None)
    }

    /// Hints that the named tensor is not needed for now, so that its memory may be freed.
    fn forget(&self, _name: &str) {}

    /// The ggml type id and the bytes of the named tensor, without reading it.
    fn measure(&self, name: &str) -> Result<(u32, u64), Error>;
}

impl TensorSource for model::ModelFile {
    fn tensor(&self, name: &str) -> Result<TensorBytes<'_>, Error> {
        match Self::tensor(self, name) {
            Some(_) => Ok(self.tensor_bytes(name)?),
            None => Err(Error::MissingTensor { name: name.to_owned() }),
        }
    }

    fn shared(&self, name: &str) -> Result<Option<SharedBytes>, Error> {
        Ok(self.stored_tensor(name)?)
    }

    fn forget(&self, name: &str) {
        self.forget_tensor(name);
    }

    fn measure(&self, name: &str) -> Result<(u32, u64), Error> {
        let info = Self::tensor(self, name);
        let info = info.ok_or_else(|| Error::MissingTensor { name: name.to_owned() })?;
        Ok((info.ty().id(), info.bytes()))
    }
}

/// A linear map on the device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Linear {
    pub(crate) matrix: MatrixId,
    pub(crate) bias: Option<VectorId>,
    pub(crate) scale: f32,
}

/// Weights of a layer's mixer.
#[derive(Debug)]
pub(crate) enum MixerWeights {
    Attention(Box<AttentionWeights>),
    DeltaNet(Box<DeltaNetWeights>),
    Mamba2(Box<Mamba2Weights>),
    ShortConv(Box<ShortConvWeights>),
}

impl MixerWeights {
    /// The memory of each head of a recurrent layer, in tokens: see [`crate::decoder::StateType`].
    pub(crate) fn memory(&self) -> &[f32] {
        match self {
            Self::Attention(_) | Self::ShortConv(_) => &[],
            Self::DeltaNet(net) => &net.memory,
            Self::Mamba2(mamba) => &mamba.memory,
        }
    }
}

/// Attention weights of a layer.
#[derive(Debug)]
pub(crate) struct AttentionWeights {
    pub(crate) q: Linear,
    pub(crate) q_norm: Option<Norm>,
    pub(crate) q_growth: Option<QueryGrowth>,
    pub(crate) kv: KvWeights,
    pub(crate) rope: Option<RopeId>,
    pub(crate) scale: f32,
    pub(crate) softcap: Option<f32>,
    pub(crate) sinks: Option<VectorId>,
    pub(crate) gate: Option<Linear>,
    pub(crate) o: Linear,
}

/// Where a layer's keys and values come from.
#[derive(Debug)]
pub(crate) enum KvWeights {
    Own(OwnKvWeights),
    /// Another layer.
    Shared,
    Latent(Box<LatentWeights>),
}

/// Weights of latent attention: see [`model::spec::LatentSpec`].
#[derive(Debug)]
pub(crate) struct LatentWeights {
    pub(crate) q_down: Option<(Linear, Norm)>,
    pub(crate) q_rope: Linear,
    pub(crate) k_rope: Linear,
    pub(crate) latent: Linear,
    pub(crate) latent_norm: Norm,
    /// A matrix for each head.
    pub(crate) k_up: Linear,
    /// A matrix for each head.
    pub(crate) v_up: Linear,
    pub(crate) heads: usize,
    /// Elements of a key that rotate.
    pub(crate) rotating: usize,
    /// Elements of a key.
    pub(crate) width: usize,
    /// Elements of a head's value.
    pub(crate) value: usize,
}

/// Projections of a layer's own keys and values.
#[derive(Debug)]
pub(crate) struct OwnKvWeights {
    pub(crate) k: Linear,
    /// `None`: the values are the keys before norm and rotary embedding.
    pub(crate) v: Option<Linear>,
    pub(crate) k_norm: Option<Norm>,
    pub(crate) v_norm: Option<Norm>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct ConvWeights {
    pub(crate) weight: VectorId,
    pub(crate) bias: Option<VectorId>,
}

/// Gated delta net of a layer.
#[derive(Debug)]
pub(crate) struct DeltaNetWeights {
    pub(crate) qkv: Linear,
    pub(crate) conv: ConvWeights,
    pub(crate) gate: Linear,
    pub(crate) beta: Linear,
    pub(crate) alpha: Linear,
    pub(crate) a: VectorId,
    pub(crate) dt_bias: VectorId,
    /// See [`MixerWeights::memory`].
    pub(crate) memory: Vec<f32>,
    pub(crate) k_heads: usize,
    pub(crate) tiled: bool,
    pub(crate) l2_eps: f32,
    pub(crate) norm: Norm,
    pub(crate) out: Linear,
}

/// Mamba-2 of a layer.
#[derive(Debug)]
pub(crate) struct Mamba2Weights {
    pub(crate) z: Linear,
    pub(crate) xbc: Linear,
    pub(crate) dt: Linear,
    pub(crate) conv: ConvWeights,
    pub(crate) a: VectorId,
    pub(crate) d: VectorId,
    pub(crate) dt_bias: VectorId,
    /// See [`MixerWeights::memory`].
    pub(crate) memory: Vec<f32>,
    pub(crate) groups: usize,
    pub(crate) norm: Option<Norm>,
    pub(crate) norm_first: bool,
    pub(crate) out: Linear,
}

/// Gated short convolution of a layer.
#[derive(Debug)]
pub(crate) struct ShortConvWeights {
    pub(crate) b: Linear,
    pub(crate) c: Linear,
    pub(crate) x: Linear,
    pub(crate) conv: ConvWeights,
    pub(crate) out: Linear,
}

/// One part of a layer's feed-forward.
#[derive(Debug)]
pub(crate) struct FfnPart {
    pub(crate) own_norm: Option<Norm>,
    pub(crate) ffn: FfnWeights,
    pub(crate) post_norm: Option<Norm>,
}

/// FFN weights of a layer.
#[derive(Debug)]
pub(crate) enum FfnWeights {
    Gated { gate: Linear, up: Linear, down: Linear, activation: GateActivation, row_gate: Option<Linear> },
    Plain { up: Linear, down: Linear, activation: GateActivation },
    Moe(Box<MoeWeights>),
}

/// Weights of a mixture of experts.
#[derive(Debug)]
pub(crate) struct MoeWeights {
    pub(crate) router_norm: Option<Norm>,
    pub(crate) router: Linear,
    pub(crate) spec: MoeSpec,
    pub(crate) selection_bias: Option<VectorId>,
    pub(crate) gate_up: ExpertGateUp,
    pub(crate) down: MatrixId,
    pub(crate) down_scale: Option<VectorId>,
    pub(crate) down_bias: Option<VectorId>,
    pub(crate) activation: GateActivation,
}

/// Weights for a layer's slice of the per-layer input.
#[derive(Debug)]
pub(crate) struct PerLayerWeights {
    pub(crate) gate: Linear,
    pub(crate) projection: Linear,
    pub(crate) norm: Norm,
}

#[derive(Debug)]
pub(crate) struct LayerWeights {
    pub(crate) mixer_norm: Option<Norm>,
    pub(crate) mixer: MixerWeights,
    pub(crate) parallel_mixer: Option<MixerWeights>,
    pub(crate) mixer_post_norm: Option<Norm>,
    pub(crate) mixer_out_norm: Option<Norm>,
    pub(crate) parallel: bool,
    pub(crate) ffn_norm: Option<Norm>,
    pub(crate) ffn: Vec<FfnPart>,
    pub(crate) ffn_post_norm: Option<Norm>,
    pub(crate) ffn_out_norm: Option<Norm>,
    pub(crate) per_layer: Option<PerLayerWeights>,
    pub(crate) output_scale: Option<f32>,
}

impl LayerWeights {
    /// The mixer and the parallel one.
    pub(crate) fn mixers(&self) -> impl Iterator<Item = &MixerWeights> {
        std::iter::once(&self.mixer).chain(&self.parallel_mixer)
    }
}

/// Token embedding.
#[derive(Debug)]
pub(crate) struct EmbeddingWeights {
    pub(crate) tokens: MatrixId,
    pub(crate) positions: Option<MatrixId>,
    pub(crate) token_types: Option<MatrixId>,
    pub(crate) norm: Option<Norm>,
}

#[derive(Debug)]
pub(crate) struct PerLayerInputWeights {
    pub(crate) table: MatrixId,
    pub(crate) projection: Linear,
    pub(crate) norm: Norm,
}

/// The output head after the last layer.
#[derive(Debug)]
pub(crate) enum Head {
    Logits { norm: Norm, linear: Linear },
    Pooled { classifier: Option<Classifier> },
}

/// Computes scores from a pooled vector.
#[derive(Debug)]
pub(crate) struct Classifier {
    pub(crate) dense: Option<Linear>,
    pub(crate) norm: Option<Norm>,
    pub(crate) out: Linear,
}

/// Weights of a layer range. The head is loaded if the range has the last layer, or if the head is the
/// embedding's matrix and that is loaded. The embedding is loaded if the range has the first layer, or if
/// layers read per-layer embeddings of the tokens.
#[derive(Debug)]
pub(crate) struct Weights {
    pub(crate) embedding: Option<EmbeddingWeights>,
    pub(crate) per_layer_input: Option<PerLayerInputWeights>,
    pub(crate) layers: Vec<LayerWeights>,
    pub(crate) head: Option<Head>,
    /// Bytes of the tensors in the source's format.
    pub(crate) source_bytes: usize,
    /// Bytes of them that one token reads: of experts only the share that is used, of tables one row.
    pub(crate) bytes_per_token: usize,
    /// All matrices by the names of their tensors.
    pub(crate) matrices: HashMap<(String, Option<RowSlice>), MatrixId>,
    /// Repacks matrices that are still read in the source's format. `None` if there are none.
    pub(crate) repacking: Option<Repacking>,
}
