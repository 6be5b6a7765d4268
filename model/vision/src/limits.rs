//! Limits of images that users send.

/// Bytes of a file.
pub const MAX_FILE_BYTES: usize = 20 << 20;
/// Pixels on each side.
pub const MAX_SIDE: u32 = 16_384;
/// Memory of a decoder with its result.
pub const MAX_DECODE_BYTES: u64 = 144 << 20;
/// The longer side divided by the shorter one.
pub const MAX_RATIO: u32 = 200;
/// Patches of an image of a model that sees images of all sizes. Larger images are resized to so many.
pub const MAX_PATCHES: usize = 16_384;
