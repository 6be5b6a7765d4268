//! Model files: GGUF and safetensors, the model as data (`spec`), architectures, tokenizer, chat template,
//! catalog.
//!
//! No input bytes cause a panic. Every count and length from a file is capped before allocation. A model is
//! data:
//! a new architecture needs one translator file and a fixture. This crate does no tensor arithmetic and opens
//! no sockets.

pub mod arch;
pub mod catalog;
pub mod chat_template;
pub mod checkpoint;
pub mod costs;
pub mod dialect;
pub mod error;
pub mod file;
pub mod ggml_type;
pub mod gguf;
pub mod inspect;
pub mod json_schema;
pub mod metadata;
mod mmap;
pub mod recent;
pub mod safetensors;
pub mod sampling;
pub mod shard;
pub mod spec;
pub mod tokenizer;

#[cfg(test)]
mod test_files;

pub use chat_template::ChatTemplate;
pub use error::Error;
pub use file::ModelFile;
pub use ggml_type::GgmlType;
pub use metadata::Metadata;
pub use spec::ModelSpec;
pub use tokenizer::Tokenizer;
