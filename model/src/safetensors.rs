//! Reads the header of a safetensors file: the tensors and their positions.
//!
//! The format is eight bytes with the header's length, the header as JSON, and the tensors' bytes. The header
//! is completely checked. After that every tensor has a known element type, a size that matches its shape,
//! and bytes inside the file, aligned to an element's size, that overlap no other tensor.
//!
//! The crate `safetensors` provides the entries' types. Its own reader is not used: it takes the last of two tensors
//! with one name, adds offsets without a check for overflow, and its errors do not name the tensor.

use std::collections::{HashMap, HashSet};
use std::fmt;

use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};

/// Upper bounds; a file above one is refused before it is read.
pub mod limits {
    /// Bytes of the header.
    pub const HEADER_BYTES: u64 = 16 << 20;
    pub const TENSORS: u64 = 65_536;
    pub const DIMS: u64 = 8;
    /// Longest name of a tensor in bytes.
    pub const NAME_BYTES: u64 = 1_024;
    /// Longest error of the JSON parser, which may quote the file, in characters.
    pub const REASON: usize = 300;
}

/// Header entry that is not a tensor.
const METADATA: &str = "__metadata__";

/// Error of a file that is not valid safetensors.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Malformed {
    /// The file ends before its header does.
    #[error("the file has {have} bytes, its header needs {need}")]
    Truncated {
        /// Bytes of the header and its length field.
        need: u64,
        /// Bytes of the file.
        have: u64,
    },
    /// A count or a length is above its cap.
    #[error("{field} is {found}, the limit is {limit}")]
    OverLimit { field: String, found: u64, limit: u64 },
    /// The header is not JSON or has the wrong structure.
    #[error("the header is malformed: {reason}")]
    Header {
        /// Error of the JSON parser.
        reason: String,
    },
    /// A tensor's shape and offsets contradict each other, or its size does not fit 64 bits.
    #[error("tensor {tensor} of shape {shape:?} and type {ty} does not fit its byte range {start} to {end}")]
    Size {
        tensor: String,
        shape: Vec<usize>,
        ty: Dtype,
        /// Offset in the data section.
        start: usize,
        end: usize,
    },
    /// A tensor reaches past the end of the file.
    #[error("tensor {tensor} ends at {end} of the data section, which has {have} bytes")]
    OutOfFile {
        tensor: String,
        end: u64,
        /// Size of the data section.
        have: u64,
    },
    /// A tensor does not start at a multiple of its element's size.
    #[error("tensor {tensor} starts at byte {offset} of the file, not a multiple of {size}")]
    Misaligned {
        tensor: String,
        /// From the start of the file.
        offset: u64,
        /// Bytes of an element.
        size: usize,
    },
    /// Two tensors share bytes.
    #[error("tensors {first} and {second} overlap")]
    Overlap {
        /// The tensor that starts first.
        first: String,
        second: String,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    /// The last dimension is contiguous.
    pub(crate) shape: Vec<usize>,
    /// From the start of the file.
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

/// Parses and checks the header of `file`. Returns the tensors in the order of their bytes.
pub(crate) fn parse(file: &[u8]) -> Result<Vec<Tensor>, Malformed> {
    let have = file.len() as u64;
    let Some((length, rest)) = file.split_first_chunk::<8>() else {
        return Err(Malformed::Truncated { need: 8, have });
    };
    let length = u64::from_le_bytes(*length);
    within("the length of the header", length, limits::HEADER_BYTES)?;
    // The length is below the limit, so nothing overflows.
    let Some((header, data)) = rest.split_at_checked(length as usize) else {
        return Err(Malformed::Truncated { need: 8 + length, have });
    };
    let malformed = |error: serde_json::Error| Malformed::Header {
        reason: error.to_string().chars().take(limits::REASON).collect(),
    };
    let Header(entries) = serde_json::from_slice(header).map_err(malformed)?;
    let data = Data { start: 8 + length, bytes: data.len() as u64 };
    let mut tensors: Vec<Tensor> =
        entries.into_iter().map(|(name, entry)| data.locate(name, entry)).collect::<Result<_, _>>()?;
    tensors.sort_by_key(|tensor| (tensor.offset, tensor.bytes));
    for (first, second) in tensors.iter().zip(tensors.iter().skip(1)) {
        if first.offset.saturating_add(first.bytes) > second.offset {
            let (first, second) = (first.name.clone(), second.name.clone());
            return Err(Malformed::Overlap { first, second });
        }
    }
    Ok(tensors)
}

fn within(field: &str, found: u64, limit: u64) -> Result<(), Malformed> {
    match found > limit {
        true => Err(Malformed::OverLimit { field: field.to_owned(), found, limit }),
        false => Ok(()),
    }
}

/// The part of the file after the header.
struct Data {
    /// From the start of the file.
    start: u64,
    bytes: u64,
}

impl Data {
    fn locate(&self, name: String, entry: TensorInfo) -> Result<Tensor, Malformed> {
        let TensorInfo { dtype, shape, data_offsets: (start, end) } = entry;
        within(&format!("the number of dimensions of {name}"), shape.len() as u64, limits::DIMS)?;
        let bits = shape.iter().try_fold(dtype.bitsize(), |bits, &dim| bits.checked_mul(dim));
        let bytes = bits.filter(|bits| bits.is_multiple_of(8)).map(|bits| bits / 8);
        let Some(bytes) = bytes.filter(|&bytes| start.checked_add(bytes) == Some(end)) else {
            return Err(Malformed::Size { tensor: name, shape, ty: dtype, start, end });
        };
        let (start, end, bytes) = (start as u64, end as u64, bytes as u64);
        if end > self.bytes {
            return Err(Malformed::OutOfFile { tensor: name, end, have: self.bytes });
        }
        let (offset, size) = (self.start.saturating_add(start), dtype.bitsize().div_ceil(8));
        if !offset.is_multiple_of(size as u64) {
            return Err(Malformed::Misaligned { tensor: name, offset, size });
        }
        Ok(Tensor { name, dtype, shape, offset, bytes })
    }
}

struct Header(Vec<(String, TensorInfo)>);

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(HeaderVisitor)
    }
}

/// Refuses duplicate names, which a map would drop.
struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = Header;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map from names to tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
        let (mut entries, mut names) = (Vec::new(), HashSet::new());
        while let Some(name) = map.next_key::<String>()? {
            if name == METADATA {
                map.next_value::<HashMap<String, IgnoredAny>>()?;
                continue;
            }
            let tensors = entries.len() as u64 + 1;
            within("the number of tensors", tensors, limits::TENSORS).map_err(A::Error::custom)?;
            within("the length of a tensor's name", name.len() as u64, limits::NAME_BYTES)
                .map_err(A::Error::custom)?;
            if !names.insert(name.clone()) {
                return Err(A::Error::custom(format_args!("tensor {name} occurs twice")));
            }
            let entry = map.next_value();
            let entry =
                entry.map_err(|error: A::Error| A::Error::custom(format_args!("tensor {name}: {error}")))?;
            entries.push((name, entry));
        }
        Ok(Header(entries))
    }
}

#[cfg(test)]
mod tests;
