//! Runs a model on several workers, and distributes its weights to them. A replica is an ordered list of
//! stages, each with a layer range.
//!
//! The first stage runs the engine and schedules as if all layers were local. A step travels with its
//! activations from stage to stage (`step.rs`); the last stage returns tokens and logits. Each stage keeps
//! the caches of its own layers. Block tables name blocks by number, and each stage maps a number to an
//! offset in its arena (docs/decisions/0014-share-block-tables-by-number.md).
//!
//! Several steps are in the pipeline at once so that all stages are busy (`microbatch.rs`, `downstream_ranks.rs`).
//! The last stage samples. It keeps no state of a request: a step carries all that sampling needs besides the
//! logits. Drafters that read the model's caches also run there (`draft.rs`), when a step requests draft
//! tokens. The later stages' side is `rank_server` in the worker.
//!
//! Invariants: a replica whose stages exchange f32 activations has the numeric class of one worker. A lost
//! stage ends the replica. A chunk of a model is checked before it is written.
//! Must not contain: the choice of stages, devices and defaults, sampling, coordinators' connections.

pub mod activations;
mod deadline;
mod downstream_ranks;
pub mod draft;
mod error;
mod executor;
pub mod handshake;
mod keep_awake;
mod lease;
mod lm_head_share;
mod lm_head_split;
mod microbatch;
mod ranges;
mod remote_blocks;
pub mod send_queue;
pub mod step;
pub mod wait_policy;
pub mod weight_distribution;

pub use downstream_ranks::DownstreamRanks;
pub use error::Error;
pub use executor::PipelineExecutor;
pub use handshake::Replica;
pub use lease::{Claims, ReplicaClaim};
pub use ranges::{LastStageDrafter, ShardCountError, stage_ranges};

#[cfg(test)]
mod test_stage;

use std::time::Duration;
use transport::EndpointConfig;

/// Configures an endpoint between stages. A lost peer is noticed within 3 s, because every stage of a replica
/// waits for all others.
pub fn attentive(config: EndpointConfig) -> EndpointConfig {
    EndpointConfig {
        idle_timeout: Duration::from_millis(2500),
        keep_alive: Duration::from_millis(500),
        ..config
    }
}
