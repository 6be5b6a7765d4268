//! The operations port: health, metrics, administration.

pub mod metrics;
