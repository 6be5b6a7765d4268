//! Resources that a model needs, layer by layer: bytes stored, bytes read per token, multiply-adds per row.
//! Computed from the spec and tensor sizes; reads no weights.

use std::collections::HashMap;
use std::ops::Range;

use crate::header::ModelHeader;
use crate::spec::{ExpertGateUp, FfnSpec, LayerSpec, MoeSpec};
use crate::{ModelFile, ModelSpec};

mod drafter;
#[cfg(test)]
mod tests;

pub use drafter::{DrafterCosts, DrafterStage};

/// Multiply-adds of a row per element of a recurrent state: decay, correct, add, read.
const STATE_PRODUCTS: u64 = 4;

/// Costs of a model's parts: the embedding, each layer, the output head.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelCosts {
    hidden: usize,
    /// The embedding, the layers in order, the head.
    parts: Vec<PartCosts>,
    /// Tensors read by several parts: bytes, and the parts in ascending order.
    shared: Vec<(u64, Vec<usize>)>,
    cuts: Vec<usize>,
    /// Every stage computes its layers' further inputs from the tokens, and therefore keeps the embedding's
    /// tensors.
    embeds_everywhere: bool,
    drafter: Option<DrafterCosts>,
}

/// Costs of one part by itself.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct PartCosts {
    /// Bytes of the tensors that only this part reads.
    own_bytes: u64,
    token_bytes: u64,
    products: u64,
    attention: Option<AttentionCosts>,
    state_elements: u64,
}

/// Bytes that 32 elements of cached keys and of values take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvSize {
    pub k: u64,
    pub v: u64,
}

impl KvSize {
    pub const F16: Self = Self { k: 64, v: 64 };
}

/// Costs of one layer's attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct AttentionCosts {
    window: Option<usize>,
    /// Elements of one position's keys and values.
    kv_elements: u64,
    /// Those of values.
    v_elements: u64,
    /// True if the layer keeps its own keys and values, false if it reads another layer's.
    own: bool,
    /// Multiply-adds of one row per position attended to.
    products: u64,
}

/// Costs of a range of layers. The first layer includes the embedding, the last one the head.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RangeCosts {
    /// Bytes of all tensors that the range reads, each counted once.
    pub weight_bytes: u64,
    /// Bytes of the tensors read by layers, without embedding and head.
    pub layer_bytes: u64,
    /// Bytes of tensors read per decoded token. Embedding rows are not counted; of experts, only the used
    /// ones.
    pub token_bytes: u64,
    /// Multiply-adds of one row with the layers' matrices.
    pub row_products: u64,
    /// Multiply-adds of one row with the head's matrix. A prompt needs this for its last row only.
    pub head_products: u64,
    /// Elements of one sequence's recurrent state.
    pub state_elements: u64,
    attention: Vec<AttentionCosts>,
    /// Bytes of tensors used by the drafter alone; included in [`weight_bytes`](Self::weight_bytes).
    pub drafter_weight_bytes: u64,
    /// Elements that the drafter keeps beside each recurrent state of a sequence.
    pub drafter_state_elements: u64,
    drafter_kv: drafter::Kv,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorSize {
    pub elements: u64,
    /// Bytes as stored.
    pub bytes: u64,
}

impl ModelCosts {
    /// The costs of the model in `file`, whose spec is `spec`.
    pub fn of_file(spec: &ModelSpec, file: &ModelFile) -> Self {
        Self::of_header(spec, file.header())
    }

    /// The same for a model of which only the header is here.
    pub fn of_header(spec: &ModelSpec, header: &ModelHeader) -> Self {
        Self::new(spec, |name| {
            let info = header.tensor(name)?;
            Some(TensorSize { elements: info.elements(), bytes: info.bytes() })
        })
    }

    /// Costs of `spec` with tensors of these sizes. A tensor without a size counts 0.
    pub fn new(spec: &ModelSpec, size: impl Fn(&str) -> Option<TensorSize>) -> Self {
        let size = |name: &str| size(name).unwrap_or(TensorSize { elements: 0, bytes: 0 });
        let layers = spec.layers.len();
        let head = spec.output_tensors();
        let mut parts = vec![PartCosts::default(); layers + 2];
        let mut readers: HashMap<&str, Vec<usize>> = HashMap::new();
        let mut order = Vec::new();
        for (part, costs) in parts.iter_mut().enumerate() {
            let names = match part.checked_sub(1) {
                None => spec.embedding_tensors(),
                Some(layer) if layer < layers => spec.layer_tensors(layer..layer + 1),
                Some(_) => head.clone(),
            };
            let layer = part.checked_sub(1).and_then(|layer| spec.layers.get(layer));
            if let Some(layer) = layer {
                costs.attention = attention(layer);
                costs.state_elements = layer.state_elements() as u64;
            }
            let experts = layer.map(experts).unwrap_or_default();
            for name in names {
                let TensorSize { elements, bytes } = size(name);
                let (used, of) = experts.get(name).copied().unwrap_or((1, 1));
                if part > 0 {
                    costs.token_bytes += share(bytes, used, of);
                    costs.products += share(elements, used, of);
                }
                let parts = readers.entry(name).or_insert_with(|| {
                    order.push(name);
                    Vec::new()
                });
                if parts.last() != Some(&part) {
                    parts.push(part);
                }
            }
        }
        let mut shared = Vec::new();
        for name in order {
            let (bytes, readers) = (size(name).bytes, readers.remove(name).unwrap_or_default());
            match readers.as_slice() {
                [only] => parts[*only].own_bytes += bytes,
                _ => shared.push((bytes, readers)),
            }
        }
        let embeds_everywhere = spec.per_layer_input.is_some();
        let cuts = spec.cut_points();
        Self { hidden: spec.hidden, parts, shared, cuts, embeds_everywhere, drafter: None }
    }

    /// Adds the costs of a drafter.
    pub fn with_drafter(self, drafter: DrafterCosts) -> Self {
        let last = match drafter.stage {
            DrafterStage::First => usize::MAX,
            DrafterStage::Last { from_layer } => from_layer,
        };
        let cuts = self.cuts.into_iter().filter(|cut| *cut <= last).collect();
        Self { cuts, drafter: Some(drafter), ..self }
    }

    /// Costs of the drafter, if there is one.
    pub fn drafter(&self) -> Option<&DrafterCosts> {
        self.drafter.as_ref()
    }

    pub fn layers(&self) -> usize {
        self.parts.len() - 2
    }

    /// Width of the activations between layers, in elements.
    pub fn hidden(&self) -> usize {
        self.hidden
    }

    /// Layers at which a further stage may begin, ascending. Excluded are those where a later layer, or the
    /// drafter, reads the keys and values of an earlier one. A model can have one stage more than cut points.
    pub fn cuts(&self) -> &[usize] {
        &self.cuts
    }

    /// Costs of the layers of `range` together. Layers beyond the last one are ignored.
    pub fn range(&self, range: Range<usize>) -> RangeCosts {
        let layers = self.layers();
        let first = if range.start == 0 { 0 } else { range.start + 1 };
        let end = if range.end >= layers { layers + 2 } else { range.end + 1 };
        let parts = first..end;
        let is_layer = |part: usize| (1..=layers).contains(&part);
        let mut sum = RangeCosts { weight_bytes: self.weight_bytes(&parts, false), ..RangeCosts::default() };
        for index in parts.clone() {
            let Some(part) = self.parts.get(index) else { continue };
            if is_layer(index) {
                sum.layer_bytes += part.own_bytes;
            }
            sum.token_bytes += part.token_bytes;
            match index > layers {
                true => sum.head_products += part.products,
                false => sum.row_products += part.products,
            }
            sum.state_elements += part.state_elements;
            sum.attention.extend(part.attention);
        }
        for (bytes, readers) in &self.shared {
            if readers.iter().any(|part| parts.contains(part) && is_layer(*part)) {
                sum.layer_bytes += bytes;
            }
        }
        let here = |drafter: &&DrafterCosts| match drafter.stage {
            DrafterStage::First => parts.contains(&0),
            DrafterStage::Last { .. } => parts.contains(&(layers + 1)),
        };
        if let Some(drafter) = self.drafter.as_ref().filter(here) {
            let with_embedding = self.weight_bytes(&parts, drafter.reads_embedding);
            let more = (with_embedding - sum.weight_bytes).saturating_add(drafter.weight_bytes);
            sum.weight_bytes = sum.weight_bytes.saturating_add(more);
            sum.drafter_weight_bytes = more;
            sum.drafter_state_elements = drafter.state_elements;
            let all = self.parts.iter().filter_map(|part| part.attention);
            sum.drafter_kv = drafter::Kv::of(drafter, all);
        }
        sum
    }

    /// Bytes of the tensors that these parts read, each counted once. `reads_embedding` adds the embedding
    /// for a drafter.
    fn weight_bytes(&self, parts: &Range<usize>, reads_embedding: bool) -> u64 {
        let is_read =
            |part: usize| parts.contains(&part) || part == 0 && (self.embeds_everywhere || reads_embedding);
        let own =
            self.parts.iter().enumerate().filter(|(part, _)| is_read(*part)).map(|(_, part)| part.own_bytes);
        let shared = self.shared.iter().filter(|(_, readers)| readers.iter().any(|part| is_read(*part)));
        own.sum::<u64>() + shared.map(|(bytes, _)| bytes).sum::<u64>()
    }
}

impl RangeCosts {
    /// Bytes of keys and values of a sequence of `tokens` tokens, stored in `size`. A sliding window keeps
    /// `slack` tokens more than it attends to, for the step that computes them.
    pub fn kv_bytes(&self, tokens: u64, slack: u64, size: KvSize) -> u64 {
        let own = self.attention.iter().filter(|layer| layer.own);
        let own: u64 = own.map(|layer| layer.visible(tokens, slack) * layer.token_bytes(size)).sum();
        own.saturating_add(self.drafter_kv_bytes(tokens, slack, size))
    }

    /// The drafter's share of [`Self::kv_bytes`].
    pub fn drafter_kv_bytes(&self, tokens: u64, slack: u64, size: KvSize) -> u64 {
        self.drafter_kv.bytes(tokens, slack, size)
    }

    /// Bytes of keys and values that one token at position `depth` reads.
    pub fn kv_token_bytes(&self, depth: u64, size: KvSize) -> u64 {
        self.attention.iter().map(|layer| layer.visible(depth, 0) * layer.token_bytes(size)).sum()
    }

    /// Multiply-adds of one row at position `depth` without weights: attention and recurrent states.
    pub fn mixing_products(&self, depth: u64) -> u64 {
        let attention: u64 =
            self.attention.iter().map(|layer| layer.visible(depth, 0) * layer.products).sum();
        attention + STATE_PRODUCTS * self.state_elements
    }
}

impl AttentionCosts {
    fn visible(&self, tokens: u64, slack: u64) -> u64 {
        self.window.map_or(tokens, |window| tokens.min(window as u64 + slack))
    }

    /// Bytes of one position.
    fn token_bytes(&self, size: KvSize) -> u64 {
        let keys = self.kv_elements.saturating_sub(self.v_elements);
        let (keys, values) = (keys.saturating_mul(size.k), self.v_elements.saturating_mul(size.v));
        keys.saturating_add(values).div_ceil(32)
    }
}

fn share(amount: u64, used: usize, of: usize) -> u64 {
    (u128::from(amount) * used as u128 / of.max(1) as u128) as u64
}

fn attention(layer: &LayerSpec) -> Option<AttentionCosts> {
    let attention = layer.attention()?;
    let v_width = if attention.latent().is_some() { 0 } else { attention.v_width() };
    Some(AttentionCosts {
        window: attention.window,
        kv_elements: (attention.k_width() + v_width) as u64,
        v_elements: v_width as u64,
        own: attention.cache_width() > 0,
        products: (attention.heads * (attention.head_dim + attention.v_head_dim)) as u64,
    })
}

/// Tensors of which a token reads only a share: (used experts, all experts).
fn experts(layer: &LayerSpec) -> HashMap<&str, (usize, usize)> {
    let mut shares = HashMap::new();
    for part in &layer.ffn {
        let FfnSpec::Moe(MoeSpec { gate_up, down, used, experts, .. }) = &part.ffn else { continue };
        let mut add = |name| shares.insert(name, (*used, *experts));
        match gate_up {
            ExpertGateUp::Separate { gate, up } => {
                add(gate.weight.as_str());
                add(&up.weight);
            }
            ExpertGateUp::Fused(fused) => {
                add(&fused.weight);
            }
        }
        add(&down.weight);
    }
    shares
}
