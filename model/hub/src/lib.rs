//! The models that have names, and the downloads of models by name or address.
//!
//! This crate decides which requests to send and verifies what arrives.
//!
//! Guarantees: a download whose checksum is known is used only if it matches, and a model without a trusted
//! checksum is recorded as unverified. An interrupted download continues where it ended.
//! Must not contain: sockets and TLS (the caller supplies [`catalog::Http`], and pip opens its own), formats
//! of model files.

pub mod catalog;
mod error;

pub use error::Error;
