//! Whole clusters: real processes over QUIC with mutual TLS, used through their HTTP API.
#![allow(clippy::unwrap_used, reason = "a panic in a test is its report")]

mod alone;
mod embeddings;
mod failover;
mod openai_client;
mod operate;
mod shared_prefix;
mod snapshots;
mod up;

use kvasir_cluster_tests::fixtures::Manifest;

/// A model of a few hundred kilobytes, for tests of everything but speed.
fn tiny_model() -> String {
    let manifest = Manifest::read().unwrap();
    manifest.tiny("llama").unwrap().path().to_str().unwrap().to_owned()
}
