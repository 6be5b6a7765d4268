//! Which tensors a model, or a range of its layers, needs.

use std::collections::HashSet;
use std::ops::Range;

use super::{AttentionSpec, ExpertGateUp, FfnSpec, LayerSpec, LinearSpec, MixerSpec, ModelSpec, NormSpec};

impl ModelSpec {
    /// Names of the tensors that the layers of `range` read, each once, in order of use. Layers that do not
    /// exist have none.
    pub fn layer_tensors(&self, range: Range<usize>) -> Vec<&str> {
        let mut names = Vec::new();
        for layer in self.layers.iter().take(range.end).skip(range.start) {
            layer.push_tensors(&mut names);
        }
        distinct(names)
    }

    /// Names of the tensors that turn the residual of the last layer into logits.
    pub fn output_tensors(&self) -> Vec<&str> {
        let mut names = Vec::new();
        self.output_norm.push_tensors(&mut names);
        self.output.linear.push_tensors(&mut names);
        names
    }

    /// Names of all tensors, each once: the embedding, the layers, the output.
    pub fn tensors(&self) -> Vec<&str> {
        let mut names = vec![self.embedding.tensor.as_str()];
        names.extend(self.layer_tensors(0..self.layers.len()));
        names.extend(self.output_tensors());
        distinct(names)
    }
}

fn distinct(mut names: Vec<&str>) -> Vec<&str> {
    let mut seen = HashSet::new();
    names.retain(|name| seen.insert(*name));
    names
}

impl LayerSpec {
    fn push_tensors<'a>(&'a self, names: &mut Vec<&'a str>) {
        let Self { mixer_norm, mixer, mixer_post_norm, ffn_norm, ffn, ffn_post_norm, residual_scale: _ } =
            self;
        push_norm(mixer_norm, names);
        match mixer {
            MixerSpec::Attention(attention) => attention.push_tensors(names),
        }
        push_norm(mixer_post_norm, names);
        push_norm(ffn_norm, names);
        ffn.push_tensors(names);
        push_norm(ffn_post_norm, names);
    }
}

impl AttentionSpec {
    fn push_tensors<'a>(&'a self, names: &mut Vec<&'a str>) {
        for linear in [&self.q, &self.k, &self.v] {
            linear.push_tensors(names);
        }
        push_norm(&self.q_norm, names);
        push_norm(&self.k_norm, names);
        names.extend(self.rope.iter().filter_map(|rope| rope.factors.as_deref()));
        self.o.push_tensors(names);
    }
}

impl FfnSpec {
    fn push_tensors<'a>(&'a self, names: &mut Vec<&'a str>) {
        match self {
            Self::Dense { gate, up, down, activation: _ } => {
                for linear in [gate, up, down] {
                    linear.push_tensors(names);
                }
            }
            Self::Moe(moe) => {
                moe.router.push_tensors(names);
                match &moe.gate_up {
                    ExpertGateUp::Separate { gate, up } => {
                        gate.push_tensors(names);
                        up.push_tensors(names);
                    }
                    ExpertGateUp::Fused(gate_up) => gate_up.push_tensors(names),
                }
                moe.down.push_tensors(names);
            }
        }
    }
}

impl LinearSpec {
    fn push_tensors<'a>(&'a self, names: &mut Vec<&'a str>) {
        names.push(&self.weight);
        names.extend(self.scale.as_deref());
        names.extend(self.bias.as_deref());
    }
}

impl NormSpec {
    fn push_tensors<'a>(&'a self, names: &mut Vec<&'a str>) {
        names.extend(self.weight.as_deref());
        names.extend(self.bias.as_deref());
    }
}

fn push_norm<'a>(norm: &'a Option<NormSpec>, names: &mut Vec<&'a str>) {
    if let Some(norm) = norm {
        norm.push_tensors(names);
    }
}
