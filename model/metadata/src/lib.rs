//! Key/value metadata of a model file, with typed access.
//!
//! Writers use different integer widths, and bool or integer arrays.
//!
//! Guarantees: a getter accepts every stored type that holds the value exactly; anything else is an error
//! that names the key.
//! Must not contain: readers of files, names of keys. The crates `model` and `text` have them.

use std::collections::BTreeMap;

pub use strings::Strings;
pub use value::{Array, FromValue, Mismatch, Value};

mod strings;
mod value;

/// Why a key cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    #[error("the file has no key {key}")]
    Missing { key: String },
    #[error("{key} is {found}, expected {expected}")]
    Type { key: String, found: &'static str, expected: &'static str },
    /// An integer that the expected type does not hold.
    #[error("{key} is {found}, which is not a valid {expected}")]
    Range { key: String, found: i128, expected: &'static str },
}

/// Keys and values, ordered by key.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Metadata {
    entries: BTreeMap<String, Value>,
}

impl Metadata {
    pub fn value(&self, key: &str) -> Option<&Value> {
        self.entries.get(key)
    }

    /// The value as `T` (see [`FromValue`]). `None` if the key is absent; an error if the value has another
    /// type.
    ///
    /// ```
    /// use kvasir_metadata::{Metadata, Value};
    /// let metadata = Metadata::from_iter([("llama.block_count", Value::U32(30))]);
    /// assert_eq!(metadata.get::<usize>("llama.block_count")?, Some(30));
    /// assert_eq!(metadata.get::<&str>("general.name")?, None);
    /// assert!(metadata.get::<&str>("llama.block_count").is_err());
    /// # Ok::<(), kvasir_metadata::KeyError>(())
    /// ```
    pub fn get<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<Option<T>, KeyError> {
        let Some(value) = self.entries.get(key) else { return Ok(None) };
        T::from_value(value).map(Some).map_err(|mismatch| match mismatch {
            Mismatch::Type => {
                KeyError::Type { key: key.to_owned(), found: value.type_name(), expected: T::NAME }
            }
            Mismatch::Range(found) => KeyError::Range { key: key.to_owned(), found, expected: T::NAME },
        })
    }

    /// Like [`get`](Self::get), but an absent key is an error.
    pub fn require<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<T, KeyError> {
        self.get(key)?.ok_or_else(|| KeyError::Missing { key: key.to_owned() })
    }

    /// Sets a key and returns its previous value.
    pub fn insert(&mut self, key: impl Into<String>, value: impl Into<Value>) -> Option<Value> {
        self.entries.insert(key.into(), value.into())
    }

    /// Drops the keys for which `keep` is false.
    pub fn retain(&mut self, mut keep: impl FnMut(&str) -> bool) {
        self.entries.retain(|key, _| keep(key));
    }

    /// All entries, ordered by key.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Value)> {
        self.entries.iter().map(|(key, value)| (key.as_str(), value))
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

impl<K: Into<String>> FromIterator<(K, Value)> for Metadata {
    fn from_iter<I: IntoIterator<Item = (K, Value)>>(entries: I) -> Self {
        Self { entries: entries.into_iter().map(|(key, value)| (key.into(), value)).collect() }
    }
}

#[cfg(test)]
mod tests;
