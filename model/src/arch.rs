//! Translators: what a GGUF's keys and tensors mean, one file per architecture.
//!
//! A translator reads hyper-parameters and names tensors; its source checks that every number is sane and that
//! every tensor is there with the shape that the numbers ask for. A tensor that no part of the resulting
//! [`ModelSpec`] uses is an error: a model that is more than we understand must not run as if it were less.

use std::collections::HashSet;

use crate::{Error, Gguf, ModelSpec};

use source::Source;

mod decoder;
mod gemma3;
mod llama;
mod qwen2;
mod qwen3;
mod source;

/// Key that names the architecture.
pub const ARCHITECTURE_KEY: &str = "general.architecture";

type Translate = fn(&Source<'_>) -> Result<ModelSpec, Error>;

/// Every architecture served, by the value of `general.architecture`.
const TRANSLATORS: [(&str, Translate); 5] = [
    ("gemma3", gemma3::translate),
    ("llama", llama::translate),
    ("qwen2", qwen2::translate),
    ("qwen3", qwen3::translate),
    ("qwen3moe", qwen3::translate_moe),
];

/// Names of the architectures served.
pub fn known() -> impl ExactSizeIterator<Item = &'static str> {
    TRANSLATORS.iter().map(|(name, _)| *name)
}

impl ModelSpec {
    /// What the model in `gguf` computes.
    ///
    /// Fails if its architecture is not served, a hyper-parameter is missing, absurd or asks for something that
    /// is not served, or the tensors are not exactly those that the hyper-parameters ask for.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self, Error> {
        let found: &str = gguf.metadata().require(ARCHITECTURE_KEY)?;
        let Some((arch, translate)) = TRANSLATORS.iter().find(|(name, _)| *name == found) else {
            return Err(Error::UnknownArch { found: found.to_owned(), known: known().collect() });
        };
        let spec = translate(&Source::new(gguf, arch))?;
        refuse_unused(gguf, &spec)?;
        Ok(spec)
    }
}

fn refuse_unused(gguf: &Gguf, spec: &ModelSpec) -> Result<(), Error> {
    let used: HashSet<&str> = spec.tensors().into_iter().collect();
    // Scales of activations, for engines that quantise activations to four bits.
    let ignored = |name: &str| name.ends_with(".input_scale");
    match gguf.tensors().find(|info| !used.contains(info.name()) && !ignored(info.name())) {
        Some(info) => Err(Error::UnusedTensor { tensor: info.name().to_owned(), arch: spec.arch.clone() }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
