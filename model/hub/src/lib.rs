//! The models that have names, and the downloads of models by name or address.
//!
//! This crate decides which requests to send and verifies what arrives. It opens no sockets: the caller supplies
//! [`catalog::Http`].

pub mod catalog;
mod error;

pub use error::Error;
