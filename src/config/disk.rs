//! A directory with a size limit, as in settings: `/var/cache/kvasir:64GiB`.

use super::ByteSize;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// `DIR:BYTES`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DiskBudget {
    pub(crate) dir: PathBuf,
    pub(crate) bytes: ByteSize,
}

/// Error of a text that is not a valid [`DiskBudget`].
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is not a directory and a size such as /var/cache/kvasir:64GiB")]
pub(crate) struct InvalidDiskBudget(String);

impl DiskBudget {
    /// The same limit for a subdirectory.
    pub(crate) fn below(&self, name: &str) -> Self {
        Self { dir: self.dir.join(name), ..self.clone() }
    }
}

impl FromStr for DiskBudget {
    type Err = InvalidDiskBudget;

    fn from_str(text: &str) -> Result<Self, InvalidDiskBudget> {
        let refuse = || InvalidDiskBudget(text.chars().take(256).collect());
        let (dir, bytes) = text.rsplit_once(':').filter(|(dir, _)| !dir.is_empty()).ok_or_else(refuse)?;
        Ok(Self { dir: dir.into(), bytes: bytes.parse().map_err(|_| refuse())? })
    }
}

impl fmt::Display for DiskBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.dir.display(), self.bytes)
    }
}

impl Serialize for DiskBudget {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for DiskBudget {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_and_a_size_are_read_and_printed() {
        let budget: DiskBudget = "/a:b/kv:1.5GiB".parse().unwrap();
        assert_eq!((budget.dir.to_str(), budget.bytes.0), (Some("/a:b/kv"), 3 << 29));
        assert_eq!(budget.to_string().parse::<DiskBudget>().unwrap(), budget);
        assert_eq!(budget.below("w").to_string(), "/a:b/kv/w:1536MiB");
        for text in ["/var/cache", ":1GiB", "/var:", "/var:much", ""] {
            assert!(text.parse::<DiskBudget>().unwrap_err().to_string().contains(text), "{text}");
        }
    }
}
