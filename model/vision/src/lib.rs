//! Images as a model sees them: decoding, preprocessing, placeholder tokens, identity, positions.
//!
//! The reference is transformers 5.24 with its torchvision processors. Files come from users: each limit of
//! [`limits`] is checked before memory is taken, and no bytes cause a panic.
//! Must not contain: towers, tokenizers, sockets. The worker encodes pixels, and the crate `text` has the tokens.

mod config;
mod decode;
mod error;
pub mod limits;
mod positions;
mod processor;
mod resize;
#[cfg(test)]
mod test_images;

pub use error::Error;
pub use positions::{Placed, mrope_positions};
pub use processor::{ImageProcessor, Piece, ProcessedImage};

/// The smallest id that stands for a row of an image. Ids of vocabularies are smaller.
pub const IMAGE_ID: u32 = 1 << 31;

/// The ids that stand for the rows of an image in its prompt: 31 bits of each from the image's digest.
pub fn image_ids(digest: &[u8; 32], rows: usize) -> Vec<u32> {
    let mut hasher = blake3::Hasher::new();
    hasher.update(digest);
    let mut bytes = vec![0; rows * 4];
    hasher.finalize_xof().fill(&mut bytes);
    let (ids, _) = bytes.as_chunks();
    ids.iter().map(|id| u32::from_le_bytes(*id) | IMAGE_ID).collect()
}
