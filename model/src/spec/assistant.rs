//! A drafter that reads its target model's KV cache.

use super::{AttentionSpec, KvSpec, LinearSpec, ModelSpec};

/// A small decoder that drafts for a target model (Gemma 4's assistant). It has no KV cache, embedding or
/// history of its own. For each draft token: `x = before concat(embedding(token), h)`, then `o = norm(trunk
/// x)`, `logits = W o` and `h' = behind o`. The embedding is the target's, with the target's scale. h is the
/// target's last residual after its final norm, or h' of the previous draft token. All layers attend to the
/// target's keys and values at positions before the token. All draft tokens of a round have the token's
/// position.
/// round have.
#[derive(Debug, Clone, PartialEq)]
pub struct AssistantSpec {
    /// Layers and output. Its attention layers do not name the layer that provides their keys and values: see
    /// [`Self::producer`]. Its embedding is the output matrix and is not used otherwise.
    pub trunk: ModelSpec,
    /// From `2 * backbone` values to the trunk's width.
    pub before: LinearSpec,
    /// From the trunk's width to `backbone` values.
    pub behind: LinearSpec,
    /// Width of the target's residual stream.
    pub backbone: usize,
}

impl AssistantSpec {
    /// Names of all tensors, without duplicates.
    pub fn tensors(&self) -> Vec<&str> {
        let mut names = self.trunk.tensors();
        names.extend([self.before.weight.as_str(), self.behind.weight.as_str()]);
        names
    }

    /// The layer of `target` whose keys and values a layer of the trunk reads: the last layer with its own KV
    /// of the same kind and shape.
    pub fn producer(&self, target: &ModelSpec, layer: usize) -> Option<usize> {
        let shape = |a: &AttentionSpec| (a.window, a.kv_heads, a.head_dim, a.v_head_dim);
        let expected = shape(self.trunk.attention(layer)?);
        let has = |at: &usize| {
            target.attention(*at).is_some_and(|a| matches!(a.kv, KvSpec::Own(_)) && shape(a) == expected)
        };
        (0..target.layers.len()).rev().find(has)
    }

    /// The first layer of `target` whose keys and values are read; `None` if this drafter does not fit
    /// `target`.
    pub fn from_layer(&self, target: &ModelSpec) -> Option<usize> {
        let producers = (0..self.trunk.layers.len()).map(|layer| self.producer(target, layer));
        producers.collect::<Option<Vec<usize>>>()?.into_iter().min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ModelFile;
    use std::path::Path;

    fn file(arch: &str) -> ModelFile {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/tiny");
        ModelFile::open(root.join(arch).join(format!("{arch}-f32.gguf"))).unwrap()
    }

    #[test]
    fn the_layers_whose_caches_it_reads_are_the_last_of_their_kinds() {
        let assistant = AssistantSpec::from_file(&file("gemma4-assistant")).unwrap();
        let mut target = ModelSpec::from_file(&file("gemma4")).unwrap();
        // Layers 0, 1, 3 and 4 are windowed; layers from 3 on read the KV of earlier layers.
        assert_eq!(assistant.from_layer(&target), Some(1));
        // Without shared KV, the drafter reads the last two layers, so the last stage must contain both.
        target.layers = [0, 0, 2, 0, 0, 2].map(|layer: usize| target.layers[layer].clone()).to_vec();
        assert_eq!(assistant.from_layer(&target), Some(4));
        assert_eq!(target.cut_points(), [1, 2, 3, 4, 5]);
        assert_eq!(target.stage_ranges_before(5, 4).unwrap()[4], 4..6);
        assert_eq!(target.stage_ranges_before(6, 4), None);
        let llama = ModelSpec::from_file(&file("llama")).unwrap();
        assert_eq!(assistant.from_layer(&llama), None);
    }
}
