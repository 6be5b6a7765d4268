//! Memory that a drafter needs at its stage. Its compute time is not counted: a drafter is used only where it
//! was measured to pay off.

use super::{AttentionCosts, KvSize, attention};
use crate::spec::{AssistantSpec, MtpHeadSpec};
use crate::{ModelFile, ModelSpec};

/// A draft model's KV cache gets 1 / `MODEL_SHARE` of the model's.
const MODEL_SHARE: u64 = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DrafterCosts {
    pub stage: DrafterStage,
    pub weight_bytes: u64,
    /// Whether it reads the model's embedding, which is then kept at its stage.
    pub reads_embedding: bool,
    /// Elements of keys and values per position.
    pub kv_elements: u64,
    /// Elements kept beside each recurrent state of a sequence.
    pub state_elements: u64,
}

/// The stage where the drafter runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DrafterStage {
    /// A separate draft model beside the scheduler. Its caches are a quarter of the model's.
    First,
    /// It reads data of the last stage.
    Last {
        /// First layer whose caches it reads. All layers from here on belong to the last stage.
        from_layer: usize,
    },
}

impl DrafterCosts {
    /// Costs of a drafter in `file` that reads the caches of `model`; `None` if that has no suitable layers.
    pub fn of_assistant(drafter: &AssistantSpec, file: &ModelFile, model: &ModelSpec) -> Option<Self> {
        let from_layer = drafter.from_layer(model)?;
        Some(Self {
            stage: DrafterStage::Last { from_layer },
            weight_bytes: bytes(file, &drafter.tensors()),
            reads_embedding: true,
            kv_elements: 0,
            state_elements: 0,
        })
    }

    /// Costs of the MTP head of `model`, in the model's own `file`.
    pub fn of_mtp_head(block: &MtpHeadSpec, file: &ModelFile, model: &ModelSpec) -> Self {
        let costs = attention(&block.layer).filter(|layer| layer.own);
        Self {
            stage: DrafterStage::Last { from_layer: model.layers.len() },
            weight_bytes: bytes(file, &block.tensors()),
            reads_embedding: block.embedding.is_none(),
            kv_elements: costs.map_or(0, |layer| layer.kv_elements),
            state_elements: model.hidden as u64,
        }
    }

    /// Costs of a separate draft model in `file`.
    pub fn of_model(drafter: &ModelSpec, file: &ModelFile) -> Self {
        Self {
            stage: DrafterStage::First,
            weight_bytes: bytes(file, &drafter.tensors()),
            reads_embedding: false,
            kv_elements: 0,
            state_elements: 0,
        }
    }
}

fn bytes(file: &ModelFile, tensors: &[&str]) -> u64 {
    tensors.iter().filter_map(|name| file.tensor(name)).map(|info| info.bytes()).sum()
}

/// KV that a drafter keeps: that of these layers, divided.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Kv {
    layers: Vec<AttentionCosts>,
    divisor: u64,
}

impl Kv {
    /// KV of a drafter beside a model with these layers.
    pub(super) fn of(drafter: &DrafterCosts, model: impl Iterator<Item = AttentionCosts>) -> Self {
        match drafter.stage {
            DrafterStage::First => {
                Self { layers: model.filter(|layer| layer.own).collect(), divisor: MODEL_SHARE }
            }
            DrafterStage::Last { .. } => {
                let kv_elements = drafter.kv_elements;
                let v_elements = kv_elements / 2;
                let layer = AttentionCosts { window: None, kv_elements, v_elements, own: true, products: 0 };
                Self { layers: vec![layer], divisor: 1 }
            }
        }
    }

    pub(super) fn bytes(&self, tokens: u64, slack: u64, size: KvSize) -> u64 {
        let bytes = self
            .layers
            .iter()
            .map(|layer| layer.visible(tokens, slack).saturating_mul(layer.token_bytes(size)));
        bytes.fold(0, u64::saturating_add) / self.divisor.max(1)
    }
}
