//! Flags and settings of LoRA adapters.

use crate::config::ByteSize;
use engine::engine::AdapterLimits;
use proto::ids::{InvalidId, ModelId};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use worker::load::{EngineOptions, LoraSource};

/// An adapter: `NAME=DIR`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LoraArg(pub(crate) LoraSource);

/// The text is no `NAME=DIR`.
#[derive(Debug, thiserror::Error)]
pub(crate) enum InvalidLora {
    #[error("{0:?} is not NAME=DIR")]
    Form(String),
    #[error(transparent)]
    Name(#[from] InvalidId),
    #[error("{0}: {1}")]
    Path(String, std::io::Error),
}

impl FromStr for LoraArg {
    type Err = InvalidLora;

    fn from_str(text: &str) -> Result<Self, InvalidLora> {
        let refuse = || InvalidLora::Form(text.chars().take(256).collect());
        let (name, path) = text.split_once('=').filter(|(_, path)| !path.is_empty()).ok_or_else(refuse)?;
        let name = ModelId::new(name)?;
        // Other processes, which are told of it, may have another working directory.
        let absolute = std::path::absolute(PathBuf::from(path));
        let path = absolute.map_err(|error| InvalidLora::Path(path.to_owned(), error))?;
        Ok(Self(LoraSource { name, path }))
    }
}

impl fmt::Display for LoraArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.0.name, self.0.path.display())
    }
}

impl Serialize for LoraArg {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for LoraArg {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

/// Adapters of the model.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct LoraArgs {
    /// LoRA adapter in PEFT's layout, with its name as a model; repeatable
    #[arg(long, value_name = "NAME=DIR")]
    pub(crate) lora: Vec<LoraArg>,
    /// Largest rank of an adapter, at most 512 [default: 64]
    #[arg(long, value_name = "RANK", value_parser = clap::value_parser!(u16).range(1..=512))]
    max_lora_rank: Option<u16>,
    /// Memory for all adapters together, as 32-bit floats [default: 1GiB]
    #[arg(long, value_name = "SIZE")]
    lora_bytes: Option<ByteSize>,
}

impl LoraArgs {
    pub(crate) fn apply(&self, options: &mut EngineOptions) {
        options.lora = self.lora.iter().map(|arg| arg.0.clone()).collect();
        options.lora_limits = limits(self.max_lora_rank, self.lora_bytes);
    }

    /// Names in the order of the flags.
    pub(crate) fn names(&self) -> impl Iterator<Item = &ModelId> {
        self.lora.iter().map(|arg| &arg.0.name)
    }
}

/// Limits, where they are set.
pub(crate) fn limits(rank: Option<u16>, bytes: Option<ByteSize>) -> AdapterLimits {
    let default = AdapterLimits::default();
    AdapterLimits {
        rank: rank.map_or(default.rank, usize::from),
        bytes: bytes.map_or(default.bytes, |bytes| bytes.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_and_a_folder_are_read_and_printed() {
        let arg: LoraArg = "sql=/a=b/c".parse().unwrap();
        assert_eq!((arg.0.name.as_str(), arg.0.path.to_str()), ("sql", Some("/a=b/c")));
        assert_eq!(arg.to_string().parse::<LoraArg>().unwrap(), arg);
        assert!("sql=c".parse::<LoraArg>().unwrap().0.path.is_absolute());
        for text in ["sql", "sql=", "=x", "a b=x"] {
            assert!(text.parse::<LoraArg>().is_err(), "{text}");
        }
    }
}
