//! External tests of the crate's guarantees: wire forms, and nodes over loopback QUIC.
#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

mod authority;
mod bare;
mod cluster;
mod encode_images;
mod golden;
mod joining;
mod operations;
mod probes;
mod pulls;
mod round_trip;
mod samples;
mod sec_frames;
mod sec_join;
mod sequences;
mod shards;
mod stages;
mod streams;
