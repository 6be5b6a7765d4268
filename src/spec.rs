//! `--spec`: selects the drafter, the same flag for all commands that generate.

use crate::models::resolve_or_pull;
use engine::speculation::SpeculativeMethod;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::fmt;
use std::str::FromStr;

/// The drafter.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) enum SpecArg {
    /// No drafter.
    #[default]
    Off,
    /// N-grams: the tokens that followed the same tokens before.
    Ngram,
    /// A drafter that reads the model's caches: the MTP head in the model's own file, or a separate file.
    DraftMtp(Option<String>),
    /// A smaller model with the same vocabulary.
    Draft(String),
}

/// Error of a text that is not a valid `--spec`.
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is not one of off, ngram, draft-mtp, draft-mtp:MODEL, draft:MODEL")]
pub(crate) struct InvalidSpec(String);

impl SpecArg {
    /// The engine's option.
    pub(crate) fn speculative_method(&self) -> anyhow::Result<SpeculativeMethod> {
        Ok(match self {
            Self::Off => SpeculativeMethod::Off,
            Self::Ngram => SpeculativeMethod::Ngram,
            Self::DraftMtp(None) => SpeculativeMethod::MtpHead,
            Self::DraftMtp(Some(model)) => SpeculativeMethod::Assistant(resolve_or_pull(model)?.path),
            Self::Draft(model) => SpeculativeMethod::Model(resolve_or_pull(model)?.path),
        })
    }
}

impl FromStr for SpecArg {
    type Err = InvalidSpec;

    fn from_str(text: &str) -> Result<Self, InvalidSpec> {
        match text.split_once(':') {
            None if text == "off" => Ok(Self::Off),
            None if text == "ngram" => Ok(Self::Ngram),
            None if text == "draft-mtp" => Ok(Self::DraftMtp(None)),
            Some(("draft-mtp", model)) if !model.is_empty() => Ok(Self::DraftMtp(Some(model.to_owned()))),
            Some(("draft", model)) if !model.is_empty() => Ok(Self::Draft(model.to_owned())),
            _ => Err(InvalidSpec(text.chars().take(256).collect())),
        }
    }
}

impl fmt::Display for SpecArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => write!(f, "off"),
            Self::Ngram => write!(f, "ngram"),
            Self::DraftMtp(None) => write!(f, "draft-mtp"),
            Self::DraftMtp(Some(model)) => write!(f, "draft-mtp:{model}"),
            Self::Draft(model) => write!(f, "draft:{model}"),
        }
    }
}

impl Serialize for SpecArg {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for SpecArg {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_data_is_read_again() {
        let texts = [
            "off",
            "ngram",
            "draft:smollm2-135m",
            "draft:https://a.b/c.gguf",
            "draft-mtp:a.gguf",
            "draft-mtp",
        ];
        for text in texts {
            assert_eq!(text.parse::<SpecArg>().unwrap().to_string(), text);
        }
        for text in ["", "on", "ngram:3", "draft", "draft:", "draft-mtp:", "mtp"] {
            let refused = text.parse::<SpecArg>().unwrap_err().to_string();
            assert!(refused.contains("off, ngram"), "{refused}");
        }
    }
}
