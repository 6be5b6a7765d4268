//! Clusters with each node on its own simulated host: behaviour when nodes die, freeze or are partitioned.
//! Needs root, for network namespaces.
#![allow(clippy::unwrap_used, reason = "a panic in a test is its report")]

mod agreement;
mod bare_metal;
mod clock;
mod disk_full;
mod doctor;
mod ending;
mod engines;
mod flap;
mod group;
mod history;
mod images;
mod index;
mod members;
mod restart;
mod rolling_restart;
mod shipping;
mod stages;
mod stream;
mod sync_fails;
mod upgrade;
mod wedge;
mod worker_loss;
mod zombie;

use kvasir_cluster_tests::binary;
use kvasir_cluster_tests::fixtures::Manifest;

/// A model that is slow enough to be interrupted.
fn real_model() -> String {
    binary::catalog_model("smollm2-135m").unwrap().to_str().unwrap().to_owned()
}

/// A model of a few hundred kilobytes, for tests that need no long requests.
fn tiny_model() -> String {
    let manifest = Manifest::read().unwrap();
    manifest.tiny("llama").unwrap().path().to_str().unwrap().to_owned()
}
