//! Configuration sources: a TOML file, then `KVASIR_*` variables, then flags; later sources win.
//!
//! A node's settings are one struct of optional fields, used as flags (clap, which also reads the variables)
//! and as a file (serde, unknown fields refused). Unset fields are computed later, so that `--check-config`
//! can print all values and `--explain` can give the reasons.

mod bind;
mod disk;
mod units;

pub(crate) use bind::{Bind, listen, listen_in_file};
pub(crate) use disk::DiskBudget;
pub(crate) use units::{ByteSize, Period};

use anyhow::Context;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::path::Path;

/// An invalid setting; the process exits with code 64.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConfigError {
    /// The file is missing, is not TOML, or has an unknown field or a value of the wrong type.
    #[error("configuration file {path}: {reason}")]
    File {
        /// Path as given.
        path: String,
        /// The problem, with line and field.
        reason: String,
    },
    /// A field's value is out of its limit.
    #[error("setting `{field}`: {value} is refused: {limit}")]
    Field {
        /// Name of the field in the file. The flag has dashes in place of underscores.
        field: &'static str,
        /// The value found.
        value: String,
        /// Accepted values, or the reason why this value is not one.
        limit: String,
    },
    /// A required field is not set.
    #[error("setting `{field}` is missing: {need}")]
    Missing {
        /// Name of the field in the file.
        field: &'static str,
        /// Reason why the field is required.
        need: String,
    },
    /// A node that another command started refuses its settings.
    #[error("{name} refuses its settings:\n{log}")]
    Node {
        name: String,
        /// The end of its log.
        log: String,
    },
    /// A coordinator's settings contradict each other or exceed a limit.
    #[error(transparent)]
    Coordinator(coordinator::config::ConfigError),
    /// An environment variable is invalid.
    #[error("environment: {0}")]
    Environment(String),
}

/// Flags that exclude each other; the process exits with code 2.
#[derive(Debug, thiserror::Error)]
#[error("{flag} cannot be used with {other}: {reason}")]
pub(crate) struct UsageError {
    pub(crate) flag: &'static str,
    /// The other flag.
    pub(crate) other: &'static str,
    pub(crate) reason: &'static str,
}

impl ConfigError {
    /// A value that violates `limit`.
    pub(crate) fn field(field: &'static str, value: impl ToString, limit: impl Into<String>) -> Self {
        Self::Field { field, value: value.to_string(), limit: limit.into() }
    }

    /// A required field that is not set.
    pub(crate) fn missing(field: &'static str, need: impl Into<String>) -> Self {
        Self::Missing { field, need: need.into() }
    }
}

/// Overrides the values of `file` with `flags`, which already include the environment.
pub(crate) fn layered<T: Serialize + DeserializeOwned>(file: Option<&Path>, flags: &T) -> anyhow::Result<T> {
    let mut table = match file {
        None => toml::Table::new(),
        Some(path) => {
            let refuse = |reason: String| ConfigError::File { path: path.display().to_string(), reason };
            let text = std::fs::read_to_string(path).map_err(|error| refuse(error.to_string()))?;
            let read: T = toml::from_str(&text).map_err(|error| refuse(error.to_string()))?;
            toml::Table::try_from(&read).context("cannot read the settings of the file")?
        }
    };
    table.extend(toml::Table::try_from(flags).context("cannot read the settings of the flags")?);
    table.try_into().context("cannot merge the settings of the file and the flags")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;
    use std::io::Write;

    #[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Sample {
        threads: Option<usize>,
        kv_bytes: Option<ByteSize>,
        listen: Option<std::net::SocketAddr>,
    }

    fn file(text: &str) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file
    }

    #[test]
    fn flags_win_over_the_file_field_by_field() {
        let file = file("threads = 4\nkv_bytes = \"512MiB\"\n");
        let flags = Sample { threads: Some(2), ..Sample::default() };
        let merged = layered(Some(file.path()), &flags).unwrap();
        assert_eq!(merged, Sample { threads: Some(2), kv_bytes: Some(ByteSize(512 << 20)), listen: None });
    }

    #[test]
    fn unknown_fields_and_wrong_types_name_the_field() {
        for (text, expected) in [
            ("thread = 4", "unknown field `thread`"),
            ("kv_bytes = \"12 parsecs\"", "kv_bytes"),
            ("listen = \"nowhere\"", "listen"),
            ("threads = ", "line 1"),
        ] {
            let error = layered(Some(file(text).path()), &Sample::default()).unwrap_err();
            assert!(error.is::<ConfigError>(), "{error:?}");
            assert!(error.to_string().contains(expected), "{error}");
        }
    }

    #[test]
    fn a_missing_file_is_a_configuration_error() {
        let error = layered(Some(Path::new("/nonexistent.toml")), &Sample::default()).unwrap_err();
        assert!(error.is::<ConfigError>());
        assert!(error.to_string().contains("/nonexistent.toml"));
    }
}
