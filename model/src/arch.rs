//! Translators: what a GGUF's keys and tensors mean, one file per architecture.
//!
//! A translator reads hyper-parameters and names tensors; its source checks that every number is sane and that
//! every tensor is there with the shape that the numbers ask for. A tensor that no part of the resulting
//! [`ModelSpec`] uses is an error: a model that is more than we understand must not run as if it were less.

use std::collections::HashSet;

use crate::file::ModelHeader;
use crate::spec::{AppendedSpec, AssistantSpec};
use crate::{Error, ModelFile, ModelSpec};

use source::Source;

mod bert;
mod decoder;
mod ffn;
mod gemma3;
mod gemma4;
mod gpt_oss;
mod granite;
mod llama;
mod qwen2;
mod qwen3;
mod qwen_hybrid;
mod rope;
mod shape;
mod source;
mod windows;

/// Key that names the architecture.
pub const ARCHITECTURE_KEY: &str = "general.architecture";

struct Arch {
    /// Value of `general.architecture`.
    name: &'static str,
    translate: fn(&Source<'_>) -> Result<ModelSpec, Error>,
    /// Whether a tensor that the model does not use belongs to what it is served without.
    ignores: fn(&Source<'_>, &str) -> bool,
}

const fn arch(name: &'static str, translate: fn(&Source<'_>) -> Result<ModelSpec, Error>) -> Arch {
    Arch { name, translate, ignores: |_, _| false }
}

/// Every architecture served, in alphabetical order.
const ARCHES: [Arch; 15] = [
    arch("bert", bert::translate),
    arch("gemma3", gemma3::translate),
    arch("gemma4", gemma4::translate),
    arch("gpt-oss", gpt_oss::translate),
    arch("granite", granite::translate),
    arch("granitehybrid", granite::translate_hybrid),
    arch("granitemoe", granite::translate_moe),
    arch("llama", llama::translate),
    arch("qwen2", qwen2::translate),
    arch("qwen2moe", qwen2::translate_moe),
    arch("qwen3", qwen3::translate),
    Arch { ignores: qwen_hybrid::is_appended, ..arch("qwen35", qwen_hybrid::translate_qwen35) },
    Arch { ignores: qwen_hybrid::is_appended, ..arch("qwen35moe", qwen_hybrid::translate_qwen35moe) },
    arch("qwen3moe", qwen3::translate_moe),
    Arch { ignores: qwen_hybrid::is_appended, ..arch("qwen3next", qwen_hybrid::translate_qwen3next) },
];

/// Names of the architectures served.
pub fn known() -> impl ExactSizeIterator<Item = &'static str> {
    ARCHES.iter().map(|arch| arch.name)
}

impl ModelSpec {
    /// What the model in `file` computes.
    ///
    /// Fails if its architecture is not served, a hyper-parameter is missing, absurd or asks for something that
    /// is not served, or the tensors are not exactly those that the hyper-parameters ask for.
    pub fn from_file(file: &ModelFile) -> Result<Self, Error> {
        Self::from_header(file.header())
    }

    /// As [`from_file`](Self::from_file), of a model whose bytes are elsewhere.
    pub fn from_header(header: &ModelHeader) -> Result<Self, Error> {
        let found: &str = header.metadata().require(ARCHITECTURE_KEY)?;
        let Some(arch) = ARCHES.iter().find(|arch| arch.name == found) else {
            return Err(Error::UnknownArch { found: found.to_owned(), known: known().collect() });
        };
        let source = Source::new(header, arch.name);
        let spec = (arch.translate)(&source)?;
        all_used(&source, spec.tensors(), arch.ignores)?;
        Ok(spec)
    }
}

/// Name of the one architecture that drafts for another and generates nothing by itself.
const ASSISTANT: &str = "gemma4-assistant";

impl AssistantSpec {
    /// What the drafter in `file` computes; an error as of [`ModelSpec::from_file`].
    pub fn from_file(file: &ModelFile) -> Result<Self, Error> {
        let header = file.header();
        let found: &str = header.metadata().require(ARCHITECTURE_KEY)?;
        if found != ASSISTANT {
            return Err(Error::UnknownArch { found: found.to_owned(), known: vec![ASSISTANT] });
        }
        let source = Source::new(header, ASSISTANT);
        let spec = gemma4::translate_assistant(&source)?;
        all_used(&source, spec.tensors(), gemma4::names_candidates)?;
        Ok(spec)
    }
}

impl AppendedSpec {
    /// The block behind the last layer of the model in `file` that predicts a further token; `None` if the file has none,
    /// or is of an architecture that has none.
    ///
    /// Fails if the model has several, or if a tensor of the block is not there or has another shape.
    pub fn from_file(file: &ModelFile) -> Result<Option<Self>, Error> {
        let header = file.header();
        let found: &str = header.metadata().require(ARCHITECTURE_KEY)?;
        let translate = match found {
            "qwen3next" | "qwen35moe" => qwen_hybrid::translate_appended_mixture,
            "qwen35" => qwen_hybrid::translate_appended_dense,
            _ => return Ok(None),
        };
        translate(&Source::new(header, found))
    }
}

/// Refuses a file with a tensor that is not among those `used`.
fn all_used(
    source: &Source<'_>,
    used: Vec<&str>,
    ignores: fn(&Source<'_>, &str) -> bool,
) -> Result<(), Error> {
    let used: HashSet<&str> = used.into_iter().collect();
    // Scales of activations are for engines that quantise activations to four bits.
    let ignored = |name: &str| name.ends_with(".input_scale") || ignores(source, name);
    match source.header().tensors().find(|info| !used.contains(info.name()) && !ignored(info.name())) {
        Some(info) => {
            Err(Error::UnusedTensor { tensor: info.name().to_owned(), arch: source.arch().to_owned() })
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
