//! Workers that encode images for other workers. One image is one stream, worker to worker: an [`EncodeImage`], and
//! back [`EncodeImageFrame`]s, the values as raw bytes after the head.

use super::FileBytes;
use crate::codec::bounded;
use crate::ids::{Epoch, ModelId, NodeId};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Most encoders that a request names.
pub const MAX_IMAGE_ENCODERS: usize = 16;
/// Most lists of values that are added after layers.
pub const MAX_DEEPSTACK: u32 = 16;
/// Most bytes of an encoded image.
pub const MAX_ENCODED_IMAGE_BYTES: u64 = 1 << 30;
/// Most images that one worker encodes, or sends, for others at once. Further ones are refused.
pub const IMAGES_AT_ONCE: usize = 64;
/// Interval of [`EncodeImageFrame::Working`].
pub const WORKING_EVERY: Duration = Duration::from_millis(500);

/// Report of a worker that encodes images, after each registration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EncoderReport {
    /// Epoch of this run of the process.
    pub epoch: Epoch,
    pub tower: OfferedTower,
}

/// The vision tower of a model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OfferedTower {
    /// Name of the model, for operators.
    pub model: ModelId,
    /// Digest of the model's files.
    pub model_digest: [u8; 32],
    /// Towers of one model with equal classes give bit-equal values.
    pub numeric_class: String,
}

/// A worker that encodes images, as a request names it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageEncoderSource {
    /// Its certificate must carry this id.
    pub node: NodeId,
    /// QUIC address, `ip:port`.
    pub quic: String,
    /// See [`OfferedTower::numeric_class`].
    pub numeric_class: String,
}

/// The encoders of a request's model.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ImageEncoders(
    #[serde(
        serialize_with = "bounded::serialize::<_, _, MAX_IMAGE_ENCODERS>",
        deserialize_with = "bounded::deserialize::<_, _, MAX_IMAGE_ENCODERS>"
    )]
    pub Vec<ImageEncoderSource>,
);

/// An image to encode.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EncodeImage {
    /// Digest of the model's files.
    pub model_digest: [u8; 32],
    /// BLAKE3 of everything that the pixels depend on, after preprocessing.
    pub digest: [u8; 32],
    /// Rows that the image takes in a prompt.
    pub rows: u32,
    /// PNG, JPEG, WebP or GIF.
    pub file: FileBytes,
}

/// Frame of the encoder: any number of `Working`, then `Encoded` or `Failed`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum EncodeImageFrame {
    /// The image is not encoded yet. Sent every [`WORKING_EVERY`].
    Working,
    /// The values follow the frame: `[1 + deepstack, rows, width]` f32, little endian.
    Encoded(EncodedImageHead),
    Failed(EncodeImageRefusal),
}

/// See [`EncodeImageFrame::Encoded`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct EncodedImageHead {
    /// As in the request.
    pub rows: u32,
    /// Values of a row.
    pub width: u32,
    /// Number of lists that are added after layers, at most [`MAX_DEEPSTACK`].
    pub deepstack: u32,
    /// The rows as time, height and width, for models with three axes.
    pub grid: Option<[u32; 3]>,
}

impl EncodedImageHead {
    /// Number of values in each list, and number of lists. `None` beyond [`MAX_DEEPSTACK`] and
    /// [`MAX_ENCODED_IMAGE_BYTES`].
    pub fn lists(&self) -> Option<(usize, usize)> {
        let values = u64::from(self.rows) * u64::from(self.width);
        let lists = u64::from(self.deepstack) + 1;
        let bytes = values.checked_mul(lists)?.checked_mul(size_of::<f32>() as u64)?;
        let bounded = self.deepstack <= MAX_DEEPSTACK && bytes <= MAX_ENCODED_IMAGE_BYTES;
        bounded.then_some((values as usize, lists as usize))
    }
}

/// Reason why a worker does not encode an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum EncodeImageRefusal {
    /// The worker encodes images of another model, or none.
    #[error("it has not the tower of this model")]
    OtherModel,
    /// The worker accepts no new work.
    #[error("it is draining")]
    Draining,
    /// It already encodes [`IMAGES_AT_ONCE`] images.
    #[error("it already encodes its limit of images")]
    Busy,
    /// The file is not the image of the digest, or cannot be read. No other worker will encode it.
    #[error("{reason}")]
    BadImage { reason: String },
    #[error("internal error")]
    Internal,
}
