//! The API port.
pub mod error;
pub mod fields;
