//! MTP head: a block after a model's last layer that drafts tokens.

use super::tensors::distinct;
use super::{LayerSpec, LinearSpec, NormSpec};

/// Predicts the token after the next one (MTP; Qwen3-Next, Qwen 3.5). It is an attention layer with its own
/// KV cache. Its input at position p combines the token at p with the model's residual after the final norm
/// at p - 1: `x = join concat(embedding_norm(embedding(token_p)), hidden_norm(h_{p-1}))`. Then `g =
/// norm(layer x)`, and `logits = W g` are those of the token at p + 1. For further draft tokens, g replaces
/// the h that the model has not computed yet.
#[derive(Debug, Clone, PartialEq)]
pub struct MtpHeadSpec {
    /// From `2 * hidden` to `hidden` values.
    pub join: LinearSpec,
    /// Norm of the token's embedding.
    pub embedding_norm: NormSpec,
    /// Norm of the hidden state.
    pub hidden_norm: NormSpec,
    pub layer: LayerSpec,
    /// Norm of the layer's output.
    pub norm: NormSpec,
    /// Own embedding, `[hidden, vocab]` in GGUF order; `None` uses the model's.
    pub embedding: Option<String>,
    /// Own output matrix; `None` uses the model's.
    pub head: Option<LinearSpec>,
}

impl MtpHeadSpec {
    /// Names of its own tensors, without duplicates. Tensors shared with the model are excluded.
    pub fn tensors(&self) -> Vec<&str> {
        let Self { join, embedding_norm, hidden_norm, layer, norm, embedding, head } = self;
        let mut names = vec![join.weight.as_str()];
        names.extend([embedding_norm, hidden_norm, norm].iter().filter_map(|norm| norm.weight.as_deref()));
        layer.push_tensors(&mut names);
        names.extend(embedding.as_deref());
        names.extend(head.as_ref().map(|head| head.weight.as_str()));
        distinct(names)
    }
}
