//! Errors of malformed GGUF files.

/// Error of a file that is not valid GGUF. Offsets count from the start of the file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// The first four bytes are not `GGUF`.
    #[error("the file starts with {found:02x?}, not with \"GGUF\"")]
    Magic { found: [u8; 4] },
    /// The file is big-endian.
    #[error("the file is big-endian (version {version} with its bytes swapped); only little-endian is read")]
    BigEndian { version: u32 },
    /// Unsupported format version.
    #[error("GGUF version {found}, only 2 and 3 are read")]
    Version { found: u32 },
    /// The file ends inside a field.
    #[error("the file ends inside {field}: {need} bytes needed at offset {offset}, {have} left")]
    Truncated {
        field: String,
        offset: u64,
        /// Bytes that the field needs.
        need: u64,
        /// Bytes left.
        have: u64,
    },
    /// A count or a length is above its cap.
    #[error("{field} is {found}, the limit is {limit}")]
    OverLimit { field: String, found: u64, limit: u64 },
    /// A name, a dimension or a number of dimensions is empty or zero.
    #[error("{field} is empty or zero")]
    Zero { field: String },
    /// A string is not UTF-8.
    #[error("{field} at offset {offset} is not UTF-8")]
    NotUtf8 { field: String, offset: u64 },
    /// A bool is neither 0 nor 1.
    #[error("{field} is a bool with value {found}, must be 0 or 1")]
    NotBool { field: String, found: u8 },
    /// Unknown value type.
    #[error("{field} has value type {found}, the highest is 12")]
    ValueType { field: String, found: u32 },
    /// Two entries with one key.
    #[error("key {key} occurs twice")]
    DuplicateKey { key: String },
    /// Two tensors with one name.
    #[error("tensor {tensor} occurs twice")]
    DuplicateTensor { tensor: String },
    /// `general.alignment` is not a `u32`, or not a power of two of at least 8.
    #[error("general.alignment is {found}, must be a power of two, at least 8")]
    Alignment {
        /// The value, or its type.
        found: String,
    },
    /// Unknown tensor type.
    #[error("tensor {tensor} has the unknown type {found}")]
    TensorType { tensor: String, found: u32 },
    /// The row length is not a multiple of the block size.
    #[error("rows of tensor {tensor} have {row} elements, {ty} needs a multiple of {block}")]
    PartialBlock { tensor: String, ty: crate::GgmlType, row: u64, block: u64 },
    /// The size of a tensor does not fit 64 bits.
    #[error("the size of tensor {tensor} with dimensions {dims:?} overflows")]
    SizeOverflow { tensor: String, dims: Vec<u64> },
    /// A tensor does not start at a multiple of the alignment.
    #[error("tensor {tensor} starts at {offset} of the data section, not a multiple of {alignment}")]
    Misaligned { tensor: String, offset: u64, alignment: u64 },
    /// A tensor reaches past the end of the file.
    #[error("tensor {tensor} takes {bytes} bytes from {offset} of the data section, which has {have}")]
    OutOfFile {
        tensor: String,
        offset: u64,
        bytes: u64,
        /// Size of the data section.
        have: u64,
    },
    /// Two tensors share bytes.
    #[error("tensors {first} and {second} overlap")]
    Overlap {
        /// The one that starts first.
        first: String,
        second: String,
    },
}
