//! Results of a stage, and the stream that takes them.

use pipeline::send_queue::Writes;
use proto::stage::{StageDrawn, StageFrame, StageReport, StageRest};
use std::sync::Arc;
use transport::{ActivationSender, StageReporter};

/// Shared by the task that reads the orders of the first stage, and on the last stage by the compute thread.
pub(super) type Reporter = Arc<tokio::sync::Mutex<StageReporter>>;

/// A stage's output for a step, with its payload.
#[derive(Debug)]
pub(super) enum Outcome {
    /// For the next stage: a step with its activations, or a message between steps.
    Passed(StageFrame, Vec<u8>),
    /// From the last stage to the first one: the results of a step.
    Drawn(StageDrawn, Vec<u8>),
    /// From the last stage to the first one: the last stage's part of logits that both compute.
    Rest(StageRest, Vec<u8>),
}

pub(super) enum Sink {
    Next(ActivationSender),
    First(Reporter),
}

impl Writes for Sink {
    type Message = Outcome;

    async fn write(&mut self, outcome: Outcome) -> Result<(), transport::Error> {
        match (outcome, self) {
            (Outcome::Passed(step, activations), Self::Next(next)) => {
                next.send(&step, activations).await.map(drop)
            }
            (Outcome::Drawn(drawn, rows), Self::First(first)) => {
                first.lock().await.send(&StageReport::Drawn(drawn), rows).await
            }
            (Outcome::Rest(rest, logits), Self::First(first)) => {
                first.lock().await.send(&StageReport::Rest(rest), logits).await
            }
            (Outcome::Passed(..), Self::First(_)) => {
                Err(transport::Error::Protocol("nobody is behind the last stage"))
            }
            (Outcome::Drawn(..) | Outcome::Rest(..), Self::Next(_)) => {
                Err(transport::Error::Protocol("only the last stage draws"))
            }
        }
    }

    fn bytes(outcome: &Outcome) -> usize {
        match outcome {
            Outcome::Passed(_, bytes) | Outcome::Drawn(_, bytes) | Outcome::Rest(_, bytes) => bytes.len(),
        }
    }
}
