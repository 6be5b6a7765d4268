//! A summary in words.

use std::fmt::{self, Display, Formatter};

use super::{LayerRun, ModelSummary, Reading, Summary};
use crate::spec::{Activation, AttentionSpec, FfnSpec, LayerSpec, MixerSpec, RopeSpec, RopeStyle};

/// Mixer and FFN of a layer, without its tensors' names.
pub(super) fn layer(layer: &LayerSpec) -> String {
    let mixer = match &layer.mixer {
        MixerSpec::Attention(attention) => self::attention(attention),
    };
    format!("{mixer}; {}", ffn(&layer.ffn))
}

fn attention(attention: &AttentionSpec) -> String {
    let AttentionSpec { window, heads, kv_heads, head_dim, .. } = attention;
    let kind = match window {
        Some(window) => format!("attention over the last {window}"),
        None => "full attention".to_owned(),
    };
    let norm = if attention.q_norm.is_some() { ", q/k norm" } else { "" };
    let bias = if attention.q.bias.is_some() { ", biases" } else { "" };
    let rope = attention.rope.as_ref().map_or_else(|| "no rope".to_owned(), self::rope);
    format!("{kind}, {heads} heads on {kv_heads} of {head_dim}{norm}{bias}, {rope}")
}

fn rope(rope: &RopeSpec) -> String {
    let RopeSpec { style, n_rot, base, freq_scale, factors } = rope;
    let style = match style {
        RopeStyle::Interleaved => "interleaved",
        RopeStyle::Half => "half-split",
    };
    let scaled = if *freq_scale == 1.0 { String::new() } else { format!(" scaled by {freq_scale}") };
    let factors = if factors.is_some() { " with frequency factors" } else { "" };
    format!("{style} rope on {n_rot}, base {base}{scaled}{factors}")
}

fn ffn(ffn: &FfnSpec) -> String {
    match ffn {
        FfnSpec::Dense { gate, activation, .. } => {
            format!("dense FFN of {}, {}", gate.rows, self::activation(*activation))
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
        match &self.reading {
            Reading::Model(model) => model.fmt(f),
            Reading::Error(error) => writeln!(f, "not served     {error}"),
        }
    }
}

impl Display for ModelSummary {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let output = if self.tied_output { "tied to the embedding" } else { "its own matrix" };
        writeln!(f, "vocabulary     {}", self.vocab)?;
        writeln!(f, "hidden         {}", self.hidden)?;
        writeln!(f, "context        {} tokens", self.context_length)?;
        writeln!(f, "output         {output}")?;
        writeln!(f, "KV elements    {} per token", self.kv_elements_per_token)?;
        writeln!(f, "layers         {}", self.layers)?;
        for LayerRun { first, last, description } in &self.layer_list {
            let range = if first == last { first.to_string() } else { format!("{first}-{last}") };
            writeln!(f, "  {range:<12} {description}")?;
        }
        Ok(())
    }
}
