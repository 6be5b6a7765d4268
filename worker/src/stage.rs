//! A model over several workers: a replica is an ordered list of stages, each with a layer range.
//!
//! The first stage has the engine: it schedules, and runs its layers as if they were all. What other stages must know
//! of a step goes with the activations from stage to stage (`step.rs`); the last one answers with tokens and logits.
//! Every stage keeps the caches of its own layers under the block tables of the first one: tables name blocks by
//! number, and each stage knows where a number lies in its arena (docs/decisions/0014-share-block-tables-by-number.md).
//!
//! Several steps are under way at once, so that all stages have something to do (`pace.rs`, `later.rs`). The last one
//! draws tokens; all that a draw depends on but the logits comes with the step, so it remembers nothing of a request. What
//! guesses by the model's caches is there too (`guess.rs`): a step asks for guesses behind what is drawn from it.

mod activations;
mod deadline;
mod guess;
mod head_share;
mod head_split;
mod held;
mod host;
mod keeper;
mod later;
mod lead;
mod lease;
mod outlet;
mod pace;
mod parts;
mod patience;
pub(crate) mod step;

pub(crate) use host::{Holds, Host};
pub use host::{StageConfig, StageService};
pub(crate) use later::{Answer, Asks, LaterStages, Rest, Spent, StageCounts};
pub use lead::{LostStage, Replica};
pub(crate) use lease::{Claim, Claims};

use proto::transport::EndpointConfig;
use std::time::Duration;

/// An endpoint between stages: whoever is gone is noticed within 3 s, because all of a replica waits for each of its
/// stages.
pub(crate) fn attentive(config: EndpointConfig) -> EndpointConfig {
    EndpointConfig {
        idle_timeout: Duration::from_millis(2500),
        keep_alive: Duration::from_millis(500),
        ..config
    }
}
