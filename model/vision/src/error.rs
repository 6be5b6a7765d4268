use crate::limits::{MAX_DECODE_BYTES, MAX_FILE_BYTES, MAX_RATIO, MAX_SIDE};

/// Why an image, or a model's way to see images, cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("the image is no PNG, JPEG, WebP or GIF file")]
    Format,
    #[error("the image has {bytes} bytes, the limit is {MAX_FILE_BYTES}")]
    FileTooLarge { bytes: usize },
    #[error("the image has {width} x {height} pixels, the limit is {MAX_SIDE} on each side")]
    Side { width: u32, height: u32 },
    #[error("the image has {width} x {height} pixels, the limit is {MAX_RATIO} to 1")]
    Ratio { width: u32, height: u32 },
    #[error(
        "the image has {width} x {height} pixels; as {format} it takes {} MiB to decode, the limit is {} MiB",
        bytes >> 20, MAX_DECODE_BYTES >> 20
    )]
    DecodeMemory { width: u32, height: u32, format: &'static str, bytes: u64 },
    #[error("the {format} image is damaged: {detail}")]
    Damaged { format: &'static str, detail: String },
    /// A model whose images would become too large.
    #[error("the image becomes {width} x {height} pixels in preprocessing, the limit is {limit} pixels")]
    Resized { width: usize, height: usize, limit: usize },
    /// A key of the model's vision configuration that is missing or has a value that is not supported.
    #[error("the model's vision configuration: {key} {detail}")]
    Config { key: String, detail: String },
    #[error("the model's vision configuration: {0}")]
    Key(#[from] metadata::KeyError),
}
