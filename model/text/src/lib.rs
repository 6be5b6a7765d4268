//! Text around a model: tokenizer, chat templates, parsers of answers, JSON schemas, sampling defaults.
//!
//! Everything is built from a model's metadata, or from texts. No input bytes cause a panic, and templates run within
//! limits. This crate neither opens files nor parses formats of weights: the crate `model` does.

pub mod chat_template;
pub mod cpu_time;
pub mod dialect;
mod error;
pub mod infill;
pub mod json_schema;
pub mod pairs;
pub mod recent;
pub mod sampling;
pub mod tokenizer;

pub use chat_template::ChatTemplate;
pub use error::Error;
pub use tokenizer::Tokenizer;
