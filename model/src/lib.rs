//! Model files: GGUF, safetensors and the shard store, the model as data (`spec`), architectures, costs.
//!
//! No input bytes cause a panic. Every count and length from a file is capped before allocation. A model is data: a
//! new architecture needs one translator file and a fixture. This crate does no tensor arithmetic, opens no sockets
//! and handles neither text nor names of models: `text` and `hub` do.

pub mod arch;
pub mod checkpoint;
mod conversion;
pub mod costs;
pub mod error;
pub mod file;
pub mod ggml_type;
pub mod gguf;
pub mod header;
pub mod inspect;
mod mmap;
mod mmproj;
mod parallel;
pub mod safetensors;
pub mod shard;
pub mod spec;
pub mod vision;

#[cfg(test)]
mod test_files;

pub use error::Error;
pub use file::{ModelFile, TensorBytes};
pub use ggml_type::GgmlType;
pub use mmap::PinnedFile;
pub use spec::ModelSpec;
