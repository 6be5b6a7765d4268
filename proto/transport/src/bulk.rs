//! Streams of tensors: a header frame, then the raw bytes.

use super::streams::{FrameReader, FrameWriter};
use crate::Error;
use proto::codec::{Cap, CodecError, bounded};
use quinn::{RecvStream, SendStream};
use serde::{Deserialize, Serialize};

const MAX_DIMENSIONS: usize = 8;

/// Type of a tensor's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum TensorType {
    /// Bytes in a layout that the header's `name` determines.
    U8,
    /// Signed 32-bit integers, little endian.
    I32,
    /// IEEE single precision, little endian.
    F32,
    /// IEEE half precision, little endian.
    F16,
    /// bfloat16, little endian.
    Bf16,
}

impl TensorType {
    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            Self::U8 => 1,
            Self::F16 | Self::Bf16 => 2,
            Self::I32 | Self::F32 => 4,
        }
    }
}

/// Header of a tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorHeader {
    /// Meaning of the tensor, agreed between sender and receiver.
    pub name: String,
    pub element: TensorType,
    /// Dimensions, slowest first; at most 8. Empty for a single element.
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_DIMENSIONS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_DIMENSIONS>"
    )]
    pub shape: Vec<u64>,
}

impl TensorHeader {
    /// Returns the number of bytes after the header.
    pub fn payload_bytes(&self) -> Result<usize, CodecError> {
        let size = self.shape.iter().try_fold(self.element.bytes(), |size, n| {
            usize::try_from(*n).ok().and_then(|n| size.checked_mul(n))
        });
        let reason = || "its size overflows".to_owned();
        size.ok_or_else(|| CodecError::Invalid { message: "TensorHeader", reason: reason() })
    }
}

/// A received tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    pub header: TensorHeader,
    /// Exactly [`TensorHeader::payload_bytes`] bytes.
    pub bytes: Vec<u8>,
}

/// Sends tensors on one stream.
#[derive(Debug)]
pub struct BulkSender {
    frames: FrameWriter<TensorHeader>,
}

impl BulkSender {
    pub(super) fn new(stream: SendStream) -> Self {
        Self { frames: FrameWriter::new(stream, Cap::Stream) }
    }

    /// Sends one tensor. `bytes` must have the length that the header implies.
    pub async fn send(&mut self, header: &TensorHeader, bytes: &[u8]) -> Result<(), Error> {
        if header.payload_bytes()? != bytes.len() {
            return Err(Error::Protocol("a tensor's bytes do not fit its shape"));
        }
        self.frames.write(header).await?;
        self.frames.write_raw(bytes).await
    }

    /// Closes the stream; no more tensors follow.
    pub fn finish(mut self) {
        self.frames.finish();
    }
}

/// Receives tensors from one stream.
#[derive(Debug)]
pub struct BulkReceiver {
    frames: FrameReader<TensorHeader>,
}

impl BulkReceiver {
    pub(super) fn new(stream: RecvStream) -> Self {
        Self { frames: FrameReader::new(stream, Cap::Stream) }
    }

    /// Returns the next tensor, or `None` at a clean end. Refuses a tensor of more than `max_bytes` after
    /// its header. Memory grows with the received bytes. If the future is dropped before it completes, the
    /// tensor and the stream are lost.
    pub async fn next(&mut self, max_bytes: usize) -> Result<Option<Tensor>, Error> {
        let Some(header) = self.frames.next().await? else { return Ok(None) };
        let len = header.payload_bytes()?;
        if len > max_bytes {
            return Err(CodecError::TooLong { message: "Tensor", len, cap: max_bytes }.into());
        }
        let mut bytes = Vec::new();
        self.frames.read_raw(len, &mut bytes).await?;
        Ok(Some(Tensor { header, bytes }))
    }
}
