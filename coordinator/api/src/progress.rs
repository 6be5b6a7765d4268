//! The state of an answer that has nothing to send, as a comment or an event of its stream.

use dispatch::Progress;
use proto::deployment::ModelState;
use proto::sequence::PromptProgress;
use serde_json::{Value, json};
use std::time::Duration;

/// Interval of the events, for a client that asks for them.
pub(super) const EVENT_EVERY: Duration = Duration::from_secs(1);

/// State of an answer that has nothing to send.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Status {
    /// No worker has the model ready. The time left is known once the load has a rate.
    Loading { model: String, state: ModelState, percent: u16, eta: Option<Duration> },
    /// It waits for a worker, or its prompt is computed. `None`: no more is known.
    Waiting(Option<Progress>),
    /// Its prompt is computed.
    Generating,
}

impl Status {
    /// A comment of a stream of server-sent events, which clients ignore.
    pub(super) fn comment(&self) -> String {
        let text = match self {
            Self::Loading { model, state, percent, eta } => {
                let eta = eta.map(|eta| format!(" eta_s={}", seconds(eta))).unwrap_or_default();
                format!("model={model} state={} percent={percent}{eta}", state.name())
            }
            Self::Waiting(Some(Progress::Queued { place, of })) => format!("waiting: place {place} of {of}"),
            Self::Waiting(Some(Progress::Prompt(PromptProgress { computed, prompt }))) => {
                format!("waiting: {computed} of {prompt} tokens")
            }
            Self::Waiting(None) => "waiting".to_owned(),
            Self::Generating => "generating".to_owned(),
        };
        format!(": {text}\n\n")
    }

    /// The state in an event.
    pub(super) fn json(&self) -> Value {
        match self {
            Self::Loading { model, state, percent, eta } => json!({
                "state": "loading", "model": model, "model_state": state.name(), "percent": percent,
                "eta_s": eta.map(seconds),
            }),
            Self::Waiting(Some(Progress::Queued { place, of })) => {
                json!({"state": "queued", "place": place, "of": of})
            }
            Self::Waiting(Some(Progress::Prompt(PromptProgress { computed, prompt }))) => {
                json!({"state": "prefill", "computed_tokens": computed, "prompt_tokens": prompt})
            }
            Self::Waiting(None) => json!({"state": "waiting"}),
            Self::Generating => json!({"state": "generating"}),
        }
    }
}

fn seconds(eta: Duration) -> f64 {
    eta.as_secs_f64().ceil()
}
