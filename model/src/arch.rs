//! Translators from a GGUF's keys and tensors to a [`ModelSpec`], one file per architecture.
//!
//! A translator reads hyper-parameters and names tensors. Its source checks that every number is in range and
//! that every tensor exists with the expected shape. A tensor that the resulting [`ModelSpec`] does not use
//! is an error, so that a model with unsupported parts is refused instead of computed wrongly.

use std::collections::HashSet;

use crate::header::ModelHeader;
use crate::spec::{AssistantSpec, MtpHeadSpec};
use crate::{Error, ModelFile, ModelSpec};

use source::Source;

mod bert;
mod cohere2;
mod decoder;
mod deepseek2;
mod ernie4_5_moe;
mod falcon_h1;
mod ffn;
mod gemma2;
mod gemma3;
mod gemma4;
mod glm4;
mod glm4_moe;
mod gpt_oss;
mod granite;
mod lfm2;
mod llama;
mod minimax_m2;
mod mistral3;
mod modern_bert;
mod nemotron_h;
mod olmo2;
mod phi3;
mod qwen2;
mod qwen3;
mod qwen_hybrid;
mod rope;
mod seed_oss;
mod shape;
mod smollm3;
mod source;
mod vision;
mod windows;

/// Key that names the architecture.
pub const ARCHITECTURE_KEY: &str = "general.architecture";

struct Arch {
    /// Value of `general.architecture`.
    name: &'static str,
    translate: fn(&Source<'_>) -> Result<ModelSpec, Error>,
    /// True for tensors that belong to optional parts of the model and may stay unused.
    ignores: fn(&Source<'_>, &str) -> bool,
}

const fn arch(name: &'static str, translate: fn(&Source<'_>) -> Result<ModelSpec, Error>) -> Arch {
    Arch { name, translate, ignores: |_, _| false }
}

/// Supported architectures, in alphabetical order.
const ARCHES: &[Arch] = &[
    arch("bert", bert::translate),
    arch("cohere2", cohere2::translate),
    Arch { ignores: glm4_moe::is_mtp_head, ..arch("deepseek2", deepseek2::translate) },
    arch("ernie4_5-moe", ernie4_5_moe::translate),
    arch("falcon-h1", falcon_h1::translate),
    arch("gemma2", gemma2::translate),
    arch("gemma3", gemma3::translate),
    Arch { ignores: gemma4::is_replaced, ..arch("gemma4", gemma4::translate) },
    arch("glm4", glm4::translate),
    Arch { ignores: glm4_moe::is_mtp_head, ..arch("glm4moe", glm4_moe::translate) },
    arch("gpt-oss", gpt_oss::translate),
    arch("granite", granite::translate),
    arch("granitehybrid", granite::translate_hybrid),
    arch("granitemoe", granite::translate_moe),
    arch("lfm2", lfm2::translate),
    arch("lfm2moe", lfm2::translate_moe),
    arch("llama", llama::translate),
    arch("minimax-m2", minimax_m2::translate),
    arch("mistral3", mistral3::translate),
    Arch { ignores: modern_bert::is_unused_head, ..arch("modern-bert", modern_bert::translate) },
    arch("nemotron_h", nemotron_h::translate),
    arch("olmo2", olmo2::translate),
    arch("phi3", phi3::translate),
    arch("qwen2", qwen2::translate),
    arch("qwen2moe", qwen2::translate_moe),
    arch("qwen2vl", qwen2::translate),
    arch("qwen3", qwen3::translate),
    Arch { ignores: qwen_hybrid::is_mtp_head, ..arch("qwen35", qwen_hybrid::translate_qwen35) },
    Arch { ignores: qwen_hybrid::is_mtp_head, ..arch("qwen35moe", qwen_hybrid::translate_qwen35moe) },
    arch("qwen3moe", qwen3::translate_moe),
    Arch { ignores: qwen_hybrid::is_mtp_head, ..arch("qwen3next", qwen_hybrid::translate_qwen3next) },
    arch("qwen3vl", qwen3::translate),
    arch("qwen3vlmoe", qwen3::translate_moe),
    arch("seed_oss", seed_oss::translate),
    arch("smollm3", smollm3::translate),
];

/// Names of the supported architectures.
pub fn supported() -> impl ExactSizeIterator<Item = &'static str> {
    ARCHES.iter().map(|arch| arch.name)
}

impl ModelSpec {
    /// Builds the spec of the model in `file`.
    ///
    /// Fails if the architecture is not supported, if a hyper-parameter is missing, out of range or
    /// unsupported, or if the tensors are not exactly the expected ones.
    pub fn from_file(file: &ModelFile) -> Result<Self, Error> {
        Self::from_header(file.header())
    }

    /// Like [`from_file`](Self::from_file), without tensor bytes.
    pub fn from_header(header: &ModelHeader) -> Result<Self, Error> {
        let found: &str = header.metadata().require(ARCHITECTURE_KEY)?;
        let Some(arch) = ARCHES.iter().find(|arch| arch.name == found) else {
            return Err(Error::UnknownArch { found: found.to_owned(), supported: supported().collect() });
        };
        let source = Source::new(header, arch.name);
        let spec = (arch.translate)(&source)?;
        // Factors of frequencies are for full layers, of which a model with other layers may have none.
        let mut full = (0..spec.layers.len()).filter_map(|layer| spec.attention(layer));
        let rotates = full.any(|attention| attention.window.is_none() && attention.rope.is_some());
        let unused_factors = |tensor: &str| !rotates && tensor == "rope_freqs.weight";
        let ignores =
            |source: &Source<'_>, tensor: &str| (arch.ignores)(source, tensor) || unused_factors(tensor);
        // Those of a part that sees images are checked with it.
        let ignores = |source: &Source<'_>, tensor: &str| {
            ignores(source, tensor) || crate::vision::is_part(header.metadata(), tensor)
        };
        all_used(&source, spec.tensors(), ignores)?;
        Ok(spec)
    }
}

/// The only architecture that is a drafter and cannot generate by itself.
const ASSISTANT: &str = "gemma4-assistant";

impl AssistantSpec {
    /// Builds the spec of the drafter in `file`. Fails like [`ModelSpec::from_file`].
    pub fn from_file(file: &ModelFile) -> Result<Self, Error> {
        let header = file.header();
        let found: &str = header.metadata().require(ARCHITECTURE_KEY)?;
        if found != ASSISTANT {
            return Err(Error::UnknownArch { found: found.to_owned(), supported: vec![ASSISTANT] });
        }
        let source = Source::new(header, ASSISTANT);
        let spec = gemma4::translate_assistant(&source)?;
        all_used(&source, spec.tensors(), gemma4::names_candidates)?;
        Ok(spec)
    }
}

impl MtpHeadSpec {
    /// The MTP head of the model in `file`; `None` if the file or its architecture has none.
    ///
    /// Fails if the model has several, or if a tensor of the head is missing or has the wrong shape.
    pub fn from_file(file: &ModelFile) -> Result<Option<Self>, Error> {
        let header = file.header();
        let found: &str = header.metadata().require(ARCHITECTURE_KEY)?;
        let translate = match found {
            "qwen3next" | "qwen35moe" => qwen_hybrid::translate_mtp_head_mixture,
            "qwen35" => qwen_hybrid::translate_mtp_head_dense,
            _ => return Ok(None),
        };
        translate(&Source::new(header, found))
    }
}

/// Fails if the file has a tensor that is not in `used`.
fn all_used(
    source: &Source<'_>,
    used: Vec<&str>,
    ignores: impl Fn(&Source<'_>, &str) -> bool,
) -> Result<(), Error> {
    let used: HashSet<&str> = used.into_iter().collect();
    // Activation scales are for engines that quantise activations.
    let of_activations = |name: &str| {
        [".input_scale", ".q_scale", ".k_scale", ".v_scale"].iter().any(|end| name.ends_with(end))
    };
    let ignored = |name: &str| of_activations(name) || ignores(source, name);
    match source.header().tensors().find(|info| !used.contains(info.name()) && !ignored(info.name())) {
        Some(info) => {
            Err(Error::UnusedTensor { tensor: info.name().to_owned(), arch: source.arch().to_owned() })
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
