//! Text form of a summary.

use std::fmt::{self, Display, Formatter};

use super::{LayerRun, ModelSummary, Reading, Summary};
use crate::ModelSpec;
use crate::spec::{
    Activation, AttentionSpec, DeltaNetSpec, FfnPart, FfnSpec, KvSpec, LayerSpec, Mamba2Spec, MixerSpec,
    OutputSpec, OwnKvSpec, Pooling, RopeSpec, RopeStyle, ShortConvSpec, VisionSpec,
};

/// Mixer and FFN of a layer, without its tensors' names.
pub(super) fn layer(layer: &LayerSpec) -> String {
    let mixers: Vec<String> = layer.mixers().map(mixer).collect();
    let ffn: Vec<String> = layer.ffn.iter().map(|FfnPart { ffn, .. }| self::ffn(ffn)).collect();
    let per_layer = match &layer.per_layer {
        Some(per_layer) => format!("; {} values per layer", per_layer.gate.rows),
        None => String::new(),
    };
    format!("{}; {}{per_layer}", mixers.join(" + "), ffn.join(" + "))
}

fn mixer(mixer: &MixerSpec) -> String {
    match mixer {
        MixerSpec::Attention(attention) => self::attention(attention),
        MixerSpec::DeltaNet(net) => delta_net(net),
        MixerSpec::Mamba2(mamba2) => self::mamba2(mamba2),
        MixerSpec::ShortConv(ShortConvSpec { conv, .. }) => {
            format!("gated convolution over {} of {} channels", conv.taps, conv.channels)
        }
    }
}

pub(super) fn output(spec: &ModelSpec) -> String {
    match &spec.output {
        OutputSpec::Logits(logits) if logits.linear.weight == spec.embedding.tensor => {
            "tied to the embedding".to_owned()
        }
        OutputSpec::Logits(_) => "its own matrix".to_owned(),
        OutputSpec::Pooled(pooled) => {
            let pooling = match pooled.pooling {
                Pooling::Mean => "mean of all tokens",
                Pooling::First => "first token",
                Pooling::Last => "last token",
            };
            match &pooled.classifier {
                Some(classifier) => format!("{pooling}, scores: {}", classifier.scores()),
                None => pooling.to_owned(),
            }
        }
    }
}

/// The part that sees images.
pub(super) fn images(spec: &VisionSpec) -> String {
    let (layers, hidden, side) = (spec.layers.len(), spec.hidden, spec.patches.side);
    let row = match spec.merge_side() {
        1 => "each a row".to_owned(),
        merge => format!("{merge} x {merge} of them a row"),
    };
    format!("{layers} layers of width {hidden}; patches of {side} x {side} pixels, {row}")
}

fn attention(attention: &AttentionSpec) -> String {
    let AttentionSpec { causal, window, heads, kv_heads, head_dim, .. } = attention;
    let kind = match (window, causal) {
        (Some(window), true) => format!("attention over the last {window}"),
        (Some(window), false) => format!("attention to {} on each side", window.saturating_sub(1)),
        (None, true) => "full attention".to_owned(),
        (None, false) => "attention to all".to_owned(),
    };
    let kv = match &attention.kv {
        KvSpec::Own(OwnKvSpec { v: None, .. }) => ", values from keys".to_owned(),
        KvSpec::Own(_) => String::new(),
        KvSpec::Shared { layer } => format!(", keys and values of layer {layer}"),
        KvSpec::Latent(_) => format!(", latent of {}", attention.v_head_dim),
    };
    let norm = if attention.q_norm.is_some() { ", q/k norm" } else { "" };
    let bias = if attention.q.bias.is_some() { ", biases" } else { "" };
    let sinks = if attention.sinks.is_some() { ", sinks" } else { "" };
    let gate = if attention.gate.is_some() { ", gated" } else { "" };
    let rope = attention.rope.as_ref().map_or_else(|| "no rope".to_owned(), self::rope);
    format!("{kind}, {heads} heads on {kv_heads} of {head_dim}{kv}{norm}{bias}{sinks}{gate}, {rope}")
}

fn delta_net(net: &DeltaNetSpec) -> String {
    let DeltaNetSpec { k_heads, v_heads, k_dim, v_dim, conv, .. } = net;
    let taps = conv.taps;
    format!("delta net, {v_heads} heads of {v_dim} on {k_heads} of {k_dim}, convolution over {taps}")
}

fn mamba2(mamba2: &Mamba2Spec) -> String {
    let Mamba2Spec { heads, head_dim, groups, state, conv, .. } = mamba2;
    let groups = if *groups == 1 { String::new() } else { format!(" in {groups} groups") };
    let taps = conv.taps;
    format!("Mamba-2, {heads} heads of {head_dim}{groups}, state {state}, convolution over {taps}")
}

fn rope(rope: &RopeSpec) -> String {
    let RopeSpec { style, n_rot, base, freq_scale, factors, magnitude: _, axes } = rope;
    let style = match style {
        RopeStyle::Interleaved => "interleaved",
        RopeStyle::Half => "half-split",
    };
    let scaled = if *freq_scale == 1.0 { String::new() } else { format!(" scaled by {freq_scale}") };
    let factors = if factors.is_some() { " with frequency factors" } else { "" };
    let axes = if axes.is_some() { ", three axes" } else { "" };
    format!("{style} rope on {n_rot}, base {base}{scaled}{factors}{axes}")
}

fn ffn(ffn: &FfnSpec) -> String {
    match ffn {
        FfnSpec::Gated { gate, activation, row_gate: None, .. } => {
            format!("dense FFN of {}, {}", gate.rows, self::activation(*activation))
        }
        FfnSpec::Gated { gate, activation, row_gate: Some(_), .. } => {
            format!("gated expert of {}, {}", gate.rows, self::activation(*activation))
        }
        FfnSpec::Plain { up, activation, .. } => {
            format!("plain FFN of {}, {}", up.rows, self::activation(*activation))
        }
        FfnSpec::Moe(moe) => {
            let activation = activation(moe.activation);
            format!("{} of {} experts of {}, {activation}", moe.used, moe.experts, moe.expert_ff)
        }
    }
}

fn activation(activation: Activation) -> &'static str {
    match activation {
        Activation::Silu => "SiLU",
        Activation::GeluTanh => "GELU",
        Activation::GeluErf => "GELU by erf",
        Activation::ReluSquared => "squared ReLU",
        Activation::ClampedSwiglu => "clamped SwiGLU",
    }
}

impl Display for Summary {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        for file in &self.files {
            writeln!(f, "file           {file}")?;
        }
        writeln!(f, "name           {}", self.name.as_deref().unwrap_or("-"))?;
        writeln!(f, "architecture   {}", self.architecture.as_deref().unwrap_or("-"))?;
        writeln!(f, "parameters     {}", self.parameters)?;
        writeln!(f, "tensors        {}, {} bytes", self.tensors.count, self.tensors.bytes)?;
        for ty in &self.tensors.by_type {
            writeln!(f, "  {:<12} {}, {} bytes", ty.ty, ty.count, ty.bytes)?;
        }
        if let Some(tokenizer) = &self.tokenizer {
            let pre = tokenizer.pre.as_deref().map(|pre| format!("/{pre}")).unwrap_or_default();
            let template = if tokenizer.chat_template { ", with a chat template" } else { "" };
            writeln!(f, "tokenizer      {}{pre}, {} tokens{template}", tokenizer.model, tokenizer.tokens)?;
        }
        if let Some(images) = &self.images {
            writeln!(f, "images         {images}")?;
        }
        match &self.reading {
            Reading::Model(model) => model.fmt(f),
            Reading::Error(error) => writeln!(f, "not served     {error}"),
        }
    }
}

impl Display for ModelSummary {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "vocabulary     {}", self.vocab)?;
        writeln!(f, "hidden         {}", self.hidden)?;
        writeln!(f, "context        {} tokens", self.context_length)?;
        writeln!(f, "output         {}", self.output)?;
        writeln!(f, "KV elements    {} per token", self.kv_elements_per_token)?;
        if self.state_elements > 0 {
            writeln!(f, "state elements {} per sequence", self.state_elements)?;
        }
        writeln!(f, "layers         {}", self.layers)?;
        for LayerRun { first, last, description } in &self.layer_list {
            let range = if first == last { first.to_string() } else { format!("{first}-{last}") };
            writeln!(f, "  {range:<12} {description}")?;
        }
        Ok(())
    }
}
