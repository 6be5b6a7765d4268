//! Images of prompts.

use crate::codec::bounded;
use serde::de::Visitor;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;

/// Most images of one prompt.
pub const MAX_PROMPT_IMAGES: usize = 64;
/// Most runs of rows of one image.
pub const MAX_IMAGE_RUNS: usize = 1024;

/// An image of a prompt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PromptImage {
    /// PNG, JPEG, WebP or GIF.
    pub file: FileBytes,
    /// BLAKE3 of everything that its pixels depend on, after preprocessing.
    pub digest: [u8; 32],
    /// Positions of its rows in the prompt, ascending.
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_IMAGE_RUNS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_IMAGE_RUNS>"
    )]
    pub runs: Vec<Range<u32>>,
}

/// The images of a prompt.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct PromptImages(
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_PROMPT_IMAGES>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_PROMPT_IMAGES>"
    )]
    pub Vec<PromptImage>,
);

/// A file's bytes. Cheap to clone.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct FileBytes(pub Arc<[u8]>);

impl Deref for FileBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl From<Vec<u8>> for FileBytes {
    fn from(bytes: Vec<u8>) -> Self {
        Self(bytes.into())
    }
}

impl fmt::Debug for FileBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.len())
    }
}

impl Serialize for FileBytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(self)
    }
}

impl<'de> Deserialize<'de> for FileBytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Bytes;

        impl Visitor<'_> for Bytes {
            type Value = FileBytes;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("bytes")
            }

            fn visit_bytes<E>(self, bytes: &[u8]) -> Result<FileBytes, E> {
                Ok(FileBytes(bytes.into()))
            }
        }

        deserializer.deserialize_bytes(Bytes)
    }
}
