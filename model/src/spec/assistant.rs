//! A drafter that lives off the model it drafts for.

use super::{AttentionSpec, KvSpec, LinearSpec, ModelSpec};

/// A small decoder that guesses what another model, its target, draws next (Gemma 4's assistant): it has no keys and
/// values, no embedding and no past of its own. For each guess
/// `x = before concat(embedding(token), h)`, then `o = norm(trunk x)`, `logits = W o` and `h' = behind o`: the embedding
/// is the target's, scaled as there, and h the target's last residual behind its final norm, or h' of the guess before.
/// All layers look at the target's keys and values of the positions before the token, whose position all guesses of a
/// round have.
#[derive(Debug, Clone, PartialEq)]
pub struct AssistantSpec {
    /// Layers and output. Its attention names no layer that has the keys and values: see [`Self::producer`]. Its embedding
    /// is the output matrix and is read as nothing else.
    pub trunk: ModelSpec,
    /// From `2 * backbone` values to the trunk's width.
    pub before: LinearSpec,
    /// From the trunk's width to `backbone` values.
    pub behind: LinearSpec,
    /// Width of the target's residual stream.
    pub backbone: usize,
}

impl AssistantSpec {
    /// Names of its tensors, each once.
    pub fn tensors(&self) -> Vec<&str> {
        let mut names = self.trunk.tensors();
        names.extend([self.before.weight.as_str(), self.behind.weight.as_str()]);
        names
    }

    /// The layer of `target` whose keys and values a layer of the trunk looks at: the last one that has its own, of the
    /// same kind and shape.
    pub fn producer(&self, target: &ModelSpec, layer: usize) -> Option<usize> {
        let shape = |a: &AttentionSpec| (a.window, a.kv_heads, a.head_dim, a.v_head_dim);
        let wanted = shape(self.trunk.attention(layer)?);
        let has = |at: &usize| {
            target.attention(*at).is_some_and(|a| matches!(a.kv, KvSpec::Own(_)) && shape(a) == wanted)
        };
        (0..target.layers.len()).rev().find(has)
    }

    /// The first layer of `target` whose keys and values it looks at; none if it is a drafter of another model.
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
        // Windows at 0, 1, 3 and 4, where those from 3 on read the keys of others.
        assert_eq!(assistant.from_layer(&target), Some(1));
        // As in a model without shared keys: the drafter reads the last two layers, so that the last stage has both.
        target.layers = [0, 0, 2, 0, 0, 2].map(|layer: usize| target.layers[layer].clone()).to_vec();
        assert_eq!(assistant.from_layer(&target), Some(4));
        assert_eq!(target.cut_points(), [1, 2, 3, 4, 5]);
        assert_eq!(target.stage_ranges_before(5, 4).unwrap()[4], 4..6);
        assert_eq!(target.stage_ranges_before(6, 4), None);
        let llama = ModelSpec::from_file(&file("llama")).unwrap();
        assert_eq!(assistant.from_layer(&llama), None);
    }
}
