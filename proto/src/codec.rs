//! Wire encoding. Only this module and the decoder of KV events use bincode: positional fields, little-endian,
//! variable-length integers.
//!
//! Invariants: a value decodes only from exactly its own bytes; trailing bytes are refused. For any input,
//! decoding allocates at most twice the [`Cap`] of the frame: lengths are checked against the cap before
//! allocation, and collections of large elements have their own limits. An unknown variant is
//! [`CodecError::UnknownVariant`]; it never causes a panic and is never a reason to drop the connection.

pub mod bounded;

use bincode::config::{Configuration, Limit, LittleEndian, Varint};
use bincode::error::{DecodeError, EncodeError};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Longest frame of a kind, in bytes. Both sides check it before they allocate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Cap {
    /// Hellos, RPC requests and replies: 16 MiB.
    Control,
    /// A [`GenerateRequest`](crate::message::GenerateRequest): 8 MiB.
    GenerateRequest,
    /// The images of a generate request: 32 MiB.
    Images,
    /// Frames of KV events and snapshots: 4 MiB.
    Events,
    /// Token frames, tensor headers and tensor chunks: 1 MiB.
    Stream,
}

const MIB: usize = 1 << 20;

impl Cap {
    pub const fn bytes(self) -> usize {
        match self {
            Self::Control => 16 * MIB,
            Self::GenerateRequest => 8 * MIB,
            Self::Images => 32 * MIB,
            Self::Events => 4 * MIB,
            Self::Stream => MIB,
        }
    }
}

/// Reason why bytes do not decode, or a message does not encode.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CodecError {
    /// The message is longer than the cap of its kind.
    #[error("{message}: {len} bytes, the cap is {cap}")]
    TooLong {
        message: &'static str,
        /// Actual or claimed length in bytes; cap + 1 if it is only known to be longer.
        len: usize,
        cap: usize,
    },
    /// The bytes end before the message does.
    #[error("{message}: cut short")]
    CutShort { message: &'static str },
    /// The message ends before the bytes do.
    #[error("{message}: {extra} bytes too many")]
    Trailing {
        message: &'static str,
        /// Number of bytes after the message.
        extra: usize,
    },
    /// A newer peer uses a variant that this build does not know. Not fatal: skip the message.
    #[error("{message}: unknown variant {index}")]
    UnknownVariant {
        message: &'static str,
        /// Number of the variant on the wire.
        index: u64,
    },
    /// A value breaks a rule of its type.
    #[error("{message}: {reason}")]
    Invalid { message: &'static str, reason: String },
}

pub(crate) type Config<const CAP: usize> = Configuration<LittleEndian, Varint, Limit<CAP>>;

pub(crate) const fn config<const CAP: usize>() -> Config<CAP> {
    bincode::config::standard().with_limit::<CAP>()
}

/// Encodes `value`. Refuses a message that a receiver with the same cap would refuse as too long.
pub fn encode<T: Serialize>(value: &T, cap: Cap) -> Result<Vec<u8>, CodecError> {
    let mut bytes = Vec::new();
    encode_into(value, cap, &mut bytes)?;
    Ok(bytes)
}

/// Appends the encoding of `value`, at most `cap` bytes, to `bytes`. On error `bytes` is unchanged.
pub fn encode_into<T: Serialize>(value: &T, cap: Cap, bytes: &mut Vec<u8>) -> Result<(), CodecError> {
    let message = std::any::type_name::<T>();
    let start = bytes.len();
    let mut writer = CappedWriter { bytes, end: start + cap.bytes() };
    let result = bincode::serde::encode_into_writer(value, &mut writer, bincode::config::standard());
    result.map_err(|error| {
        bytes.truncate(start);
        match error {
            EncodeError::UnexpectedEnd => {
                CodecError::TooLong { message, len: cap.bytes() + 1, cap: cap.bytes() }
            }
            other => CodecError::Invalid { message, reason: other.to_string() },
        }
    })
}

/// Decodes a `T` that fills `bytes` exactly.
pub fn decode<T: DeserializeOwned>(bytes: &[u8], cap: Cap) -> Result<T, CodecError> {
    let (value, rest) = decode_prefix(bytes, cap)?;
    match rest.len() {
        0 => Ok(value),
        extra => Err(CodecError::Trailing { message: std::any::type_name::<T>(), extra }),
    }
}

/// Decodes a `T` from the front of `bytes` and returns the remaining bytes with it.
pub fn decode_prefix<T: DeserializeOwned>(bytes: &[u8], cap: Cap) -> Result<(T, &[u8]), CodecError> {
    let message = std::any::type_name::<T>();
    if bytes.len() > cap.bytes() {
        return Err(CodecError::TooLong { message, len: bytes.len(), cap: cap.bytes() });
    }
    // bincode takes the limit as a const parameter, so each cap needs its own instance.
    let result = match cap {
        Cap::Control => bincode::serde::decode_from_slice(bytes, config::<{ Cap::Control.bytes() }>()),
        Cap::GenerateRequest => {
            bincode::serde::decode_from_slice(bytes, config::<{ Cap::GenerateRequest.bytes() }>())
        }
        Cap::Images => bincode::serde::decode_from_slice(bytes, config::<{ Cap::Images.bytes() }>()),
        Cap::Events => bincode::serde::decode_from_slice(bytes, config::<{ Cap::Events.bytes() }>()),
        Cap::Stream => bincode::serde::decode_from_slice(bytes, config::<{ Cap::Stream.bytes() }>()),
    };
    let (value, used) = result.map_err(|error| explain(message, cap, error))?;
    let rest = bytes.get(used..).ok_or(CodecError::CutShort { message })?;
    Ok((value, rest))
}

pub(crate) fn explain(message: &'static str, cap: Cap, error: DecodeError) -> CodecError {
    match error {
        DecodeError::UnexpectedEnd { .. } => CodecError::CutShort { message },
        DecodeError::LimitExceeded => CodecError::TooLong { message, len: cap.bytes() + 1, cap: cap.bytes() },
        DecodeError::OtherString(text) => match unknown_variant(&text) {
            Some(index) => CodecError::UnknownVariant { message, index },
            None => CodecError::Invalid { message, reason: text },
        },
        other => CodecError::Invalid { message, reason: other.to_string() },
    }
}

/// Parses the variant's number from serde's error text, the only place that has it. Both crates are pinned,
/// and a test checks the text.
fn unknown_variant(text: &str) -> Option<u64> {
    let (index, rest) = text.strip_prefix("invalid value: integer `")?.split_once('`')?;
    rest.contains("variant index").then(|| index.parse().ok()).flatten()
}

/// Stops at the cap, so that encoding never produces more bytes than may be sent.
struct CappedWriter<'a> {
    bytes: &'a mut Vec<u8>,
    end: usize,
}

impl bincode::enc::write::Writer for CappedWriter<'_> {
    #[inline]
    fn write(&mut self, chunk: &[u8]) -> Result<(), EncodeError> {
        if self.bytes.len() + chunk.len() > self.end {
            return Err(EncodeError::UnexpectedEnd);
        }
        match chunk {
            // Most tokens of a prompt encode to up to three bytes; a call to copy them would cost more than
            // the pushes.
            [a] => self.bytes.push(*a),
            [a, b] => self.bytes.extend_from_slice(&[*a, *b]),
            [a, b, c] => self.bytes.extend_from_slice(&[*a, *b, *c]),
            chunk => self.bytes.extend_from_slice(chunk),
        }
        Ok(())
    }
}
