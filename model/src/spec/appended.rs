//! A block behind a model's last layer that guesses.

use super::tensors::distinct;
use super::{LayerSpec, LinearSpec, NormSpec};

/// What predicts the token behind the next one (MTP; Qwen3-Next, Qwen 3.5): a layer with attention and keys and values
/// of its own, whose input at position p is made of the token there and of the model's residual stream behind its final
/// norm at the position before:
/// `x = join concat(embedding_norm(embedding(token_p)), hidden_norm(h_{p-1}))`, then `g = norm(layer x)`, and
/// `logits = W g` are of the token at p + 1. A further guess takes g in for the h that the model has yet to compute.
#[derive(Debug, Clone, PartialEq)]
pub struct AppendedSpec {
    /// From twice the residual's width to it.
    pub join: LinearSpec,
    /// Norm of the token's embedding.
    pub embedding_norm: NormSpec,
    /// Norm of the hidden state.
    pub hidden_norm: NormSpec,
    pub layer: LayerSpec,
    /// Norm of what leaves it.
    pub norm: NormSpec,
    /// Its own embedding, `[hidden, vocab]` in GGUF order; the model's where there is none.
    pub embedding: Option<String>,
    /// Its own output matrix; the model's where there is none.
    pub head: Option<LinearSpec>,
}

impl AppendedSpec {
    /// Names of its tensors, each once; not those that it has from the model.
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
