//! Test cluster: real `kvasir` processes, controlled and observed from outside, as by a user.
//!
//! Every wait has a deadline. Every process started here ends when its handle is dropped. Node logs are in
//! `target/test-logs`. This library never links Kvasir's libraries, so that the shipped binary is tested.
//! Some tests do: the simulator (`tests/sim`), which runs the coordinators' consensus in a virtual world; the
//! fuzz targets (`fuzz`); and tests that write model files or certificates, read schemas, or speak to a node
//! as another node (`cluster/{grammars,shards,operate}.rs`, `network/shipping.rs`).

pub mod binary;
pub mod browser;
pub mod cluster;
pub mod file_server;
pub mod fixtures;
pub mod fleet;
pub mod http;
pub mod linearizable;
pub mod llama_server;
pub mod logits;
pub mod machine;
pub mod nvml;
pub mod quantised;
pub mod random;
pub mod replay;
pub mod signal;
pub mod testnet;
pub mod wait;

/// Whether a test runs its whole matrix of cases, as in `./test matrices`. Otherwise it runs a sample.
pub fn whole_matrix() -> bool {
    std::env::var_os("KVASIR_WHOLE_MATRIX").is_some()
}
