//! Names of the tensors that a model, or a range of its layers, needs.

use std::collections::HashSet;
use std::ops::Range;

use super::{
    AttentionSpec, ClassifierSpec, ConvSpec, DeltaNetSpec, EmbeddingSpec, ExpertGateUp, FfnPart, FfnSpec,
    KvSpec, LatentSpec, LayerSpec, LinearSpec, LogitsSpec, Mamba2Spec, MixerSpec, ModelSpec, MoeSpec,
    NormSpec, OutputSpec, OwnKvSpec, PerLayerInputSpec, PerLayerSpec, PooledSpec, ShortConvSpec, TableSpec,
};

impl ModelSpec {
    /// Tensors that compute the first layer's residual and the layers' further inputs from tokens, without
    /// duplicates.
    pub fn embedding_tensors(&self) -> Vec<&str> {
        let mut names = Vec::new();
        self.embedding.push_tensors(&mut names);
        if let Some(input) = &self.per_layer_input {
            input.push_tensors(&mut names);
        }
        distinct(names)
    }

    /// Tensors that the layers of `range` read, without duplicates, in order of use. Layers that do not exist
    /// are ignored.
    pub fn layer_tensors(&self, range: Range<usize>) -> Vec<&str> {
        let mut names = Vec::new();
        for layer in self.layers.iter().take(range.end).skip(range.start) {
            layer.push_tensors(&mut names);
        }
        distinct(names)
    }

    /// Products with the rows of a step in the layers of `range`: all but those of experts. Layers that do not
    /// exist are ignored.
    pub fn layer_linears(&self, range: Range<usize>) -> Vec<&LinearSpec> {
        let mut linears = Vec::new();
        for layer in self.layers.iter().take(range.end).skip(range.start) {
            for mixer in layer.mixers() {
                match mixer {
                    MixerSpec::Attention(AttentionSpec { q, gate, kv, o, .. }) => {
                        linears.extend([q, o].into_iter().chain(gate));
                        match kv {
                            KvSpec::Own(OwnKvSpec { k, v, .. }) => linears.extend([k].into_iter().chain(v)),
                            // The heads' own matrices are no products with rows of a step.
                            KvSpec::Latent(latent) => {
                                let LatentSpec { q_down, q_rope, k_rope, latent, .. } = &**latent;
                                linears.extend([q_rope, k_rope, latent]);
                                linears.extend(q_down.iter().map(|(down, _)| down));
                            }
                            KvSpec::Shared { .. } => {}
                        }
                    }
                    MixerSpec::DeltaNet(DeltaNetSpec { qkv, gate, beta, alpha, out, .. }) => {
                        linears.extend([qkv, gate, beta, alpha, out]);
                    }
                    MixerSpec::Mamba2(Mamba2Spec { z, xbc, dt, out, .. }) => {
                        linears.extend([z, xbc, dt, out])
                    }
                    MixerSpec::ShortConv(ShortConvSpec { b, c, x, out, .. }) => {
                        linears.extend([b, c, x, out])
                    }
                }
            }
            for part in &layer.ffn {
                match &part.ffn {
                    FfnSpec::Gated { gate, up, down, row_gate, .. } => {
                        linears.extend([gate, up, down].into_iter().chain(row_gate));
                    }
                    FfnSpec::Plain { up, down, .. } => linears.extend([up, down]),
                    FfnSpec::Moe(moe) => linears.push(&moe.router),
                }
            }
            if let Some(PerLayerSpec { gate, projection, .. }) = &layer.per_layer {
                linears.extend([gate, projection]);
            }
        }
        linears
    }

    /// Tensors that compute the output from the last layer's residual.
    pub fn output_tensors(&self) -> Vec<&str> {
        let mut names = Vec::new();
        match &self.output {
            OutputSpec::Logits(LogitsSpec { norm, linear, softcap: _, scale: _ }) => {
                norm.push_tensors(&mut names);
                linear.push_tensors(&mut names);
            }
            OutputSpec::Pooled(PooledSpec { pooling: _, classifier }) => {
                if let Some(ClassifierSpec { difference: _, dense, activation: _, norm, out }) = classifier {
                    push_linear(dense, &mut names);
                    push_norm(norm, &mut names);
                    out.push_tensors(&mut names);
                }
            }
        }
        names
    }

    /// All tensors without duplicates: embedding, layers, output.
    pub fn tensors(&self) -> Vec<&str> {
        let mut names = self.embedding_tensors();
        names.extend(self.layer_tensors(0..self.layers.len()));
        names.extend(self.output_tensors());
        distinct(names)
    }
}

pub(super) fn distinct(mut names: Vec<&str>) -> Vec<&str> {
    let mut seen = HashSet::new();
    names.retain(|name| seen.insert(*name));
    names
}

impl EmbeddingSpec {
    fn push_tensors<'a>(&'a self, names: &mut Vec<&'a str>) {
        let Self { tensor, scale: _, positions, token_types, norm } = self;
        names.push(tensor);
        for TableSpec { tensor, rows: _ } in positions.iter().chain(token_types) {
            names.push(tensor);
        }
        push_norm(norm, names);
    }
}

impl PerLayerInputSpec {
    fn push_tensors<'a>(&'a self, names: &mut Vec<&'a str>) {
        let Self { table, table_scale: _, width: _, projection, norm } = self;
        names.push(table);
        projection.push_tensors(names);
        norm.push_tensors(names);
    }
}

impl LayerSpec {
    pub(super) fn push_tensors<'a>(&'a self, names: &mut Vec<&'a str>) {
        let Self {
            mixer_norm,
            mixer: _,
            parallel_mixer: _,
            mixer_post_norm,
            mixer_out_norm,
            parallel: _,
            ffn_norm,
            ffn,
            ffn_post_norm,
            ffn_out_norm,
            per_layer,
            output_scale,
            residual_scale: _,
        } = self;
        push_norm(mixer_norm, names);
        for mixer in self.mixers() {
            match mixer {
                MixerSpec::Attention(attention) => attention.push_tensors(names),
                MixerSpec::DeltaNet(delta_net) => delta_net.push_tensors(names),
                MixerSpec::Mamba2(mamba2) => mamba2.push_tensors(names),
                MixerSpec::ShortConv(short) => short.push_tensors(names),
            }
        }
        push_norm(mixer_post_norm, names);
        push_norm(mixer_out_norm, names);
        push_norm(ffn_norm, names);
        for FfnPart { own_norm, ffn, post_norm } in ffn {
            push_norm(own_norm, names);
            ffn.push_tensors(names);
            push_norm(post_norm, names);
        }
        push_norm(ffn_post_norm, names);
        push_norm(ffn_out_norm, names);
        if let Some(PerLayerSpec { gate, projection, norm }) = per_layer {
            gate.push_tensors(names);
            projection.push_tensors(names);
            norm.push_tensors(names);
        }
        names.extend(output_scale.as_deref());
    }
}

impl AttentionSpec {
    fn push_tensors<'a>(&'a self, names: &mut Vec<&'a str>) {
        self.q.push_tensors(names);
        push_linear(&self.gate, names);
        push_norm(&self.q_norm, names);
        match &self.kv {
            KvSpec::Own(OwnKvSpec { k, v, k_norm, v_norm }) => {
                k.push_tensors(names);
                push_linear(v, names);
                push_norm(k_norm, names);
                push_norm(v_norm, names);
            }
            KvSpec::Shared { layer: _ } => {}
            KvSpec::Latent(latent) => {
                let LatentSpec { q_down, q_rope, k_rope, latent, latent_norm, k_up, v_up } = &**latent;
                if let Some((down, norm)) = q_down {
                    down.push_tensors(names);
                    norm.push_tensors(names);
                }
                for linear in [q_rope, k_rope, latent, k_up, v_up] {
                    linear.push_tensors(names);
                }
                latent_norm.push_tensors(names);
            }
        }
        if let Some(factors) = self.rope.as_ref().and_then(|rope| rope.factors.as_ref()) {
            factors.push_tensors(names);
        }
        names.extend(self.sinks.as_deref());
        self.o.push_tensors(names);
    }
}

impl DeltaNetSpec {
    fn push_tensors<'a>(&'a self, names: &mut Vec<&'a str>) {
        for linear in [&self.qkv, &self.gate, &self.beta, &self.alpha] {
            linear.push_tensors(names);
        }
        self.conv.push_tensors(names);
        names.extend([self.a.as_str(), &self.dt_bias]);
        self.norm.push_tensors(names);
        self.out.push_tensors(names);
    }
}

impl Mamba2Spec {
    fn push_tensors<'a>(&'a self, names: &mut Vec<&'a str>) {
        for linear in [&self.z, &self.xbc, &self.dt] {
            linear.push_tensors(names);
        }
        self.conv.push_tensors(names);
        names.extend([self.a.as_str(), &self.d, &self.dt_bias]);
        push_norm(&self.norm, names);
        self.out.push_tensors(names);
    }
}

impl ShortConvSpec {
    fn push_tensors<'a>(&'a self, names: &mut Vec<&'a str>) {
        for linear in [&self.b, &self.c, &self.x] {
            linear.push_tensors(names);
        }
        self.conv.push_tensors(names);
        self.out.push_tensors(names);
    }
}

impl ConvSpec {
    fn push_tensors<'a>(&'a self, names: &mut Vec<&'a str>) {
        names.push(&self.weight);
        names.extend(self.bias.as_deref());
    }
}

impl FfnSpec {
    fn push_tensors<'a>(&'a self, names: &mut Vec<&'a str>) {
        match self {
            Self::Gated { gate, up, down, activation: _, row_gate } => {
                for linear in [gate, up, down] {
                    linear.push_tensors(names);
                }
                push_linear(row_gate, names);
            }
            Self::Plain { up, down, activation: _ } => {
                up.push_tensors(names);
                down.push_tensors(names);
            }
            Self::Moe(moe) => moe.push_tensors(names),
        }
    }
}

impl MoeSpec {
    fn push_tensors<'a>(&'a self, names: &mut Vec<&'a str>) {
        push_norm(&self.router_norm, names);
        self.router.push_tensors(names);
        names.extend(self.selection_bias.as_deref());
        match &self.gate_up {
            ExpertGateUp::Separate { gate, up } => {
                gate.push_tensors(names);
                up.push_tensors(names);
            }
            ExpertGateUp::Fused(gate_up) => gate_up.push_tensors(names),
        }
        self.down.push_tensors(names);
    }
}

impl LinearSpec {
    pub(super) fn push_tensors<'a>(&'a self, names: &mut Vec<&'a str>) {
        names.push(&self.weight);
        names.extend(self.order.as_deref());
        names.extend(self.scale.as_deref());
        names.extend(self.bias.as_deref());
    }
}

impl NormSpec {
    pub(super) fn push_tensors<'a>(&'a self, names: &mut Vec<&'a str>) {
        names.extend(self.weight.as_deref());
        names.extend(self.bias.as_deref());
    }
}

fn push_linear<'a>(linear: &'a Option<LinearSpec>, names: &mut Vec<&'a str>) {
    if let Some(linear) = linear {
        linear.push_tensors(names);
    }
}

fn push_norm<'a>(norm: &'a Option<NormSpec>, names: &mut Vec<&'a str>) {
    if let Some(norm) = norm {
        norm.push_tensors(names);
    }
}
