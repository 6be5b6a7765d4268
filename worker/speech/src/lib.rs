//! Audio operations of a worker: voice activity, ends of turns, wake words, voices of speakers, diarization,
//! transcription, speech for texts. Also the ONNX runtime.
//!
//! An operation is served in sessions; a session holds all of its state. [`backends`] selects the backends of
//! an operation once, when the model is loaded. A session uses the first one, or the one that its client has
//! chosen, to its end. Each loaded backend computes on its own thread, one piece of audio at a time, in order of
//! arrival. No async thread waits for it, and a slow model delays only its own sessions. The number of sessions,
//! their audio and their idle time are limited.
//! Invariants: a session's results do not depend on other sessions, nor on how its audio is split. A session
//! that fails or panics ends alone. An ONNX file is checked, and tried in another process, before it is
//! loaded.
//! Must not contain: generation, text encoders, connections.

pub mod backends;
mod bundle;
mod compute;
mod diarization;
mod error;
mod flushed;
mod log_mel;
#[cfg_attr(not(test), allow(dead_code, reason = "streams and gates in ONNX's order have tests only"))]
mod lstm;
mod metrics;
pub mod onnx;
mod session;
mod silero;
mod smart_turn;
mod speaker;
mod speech_rule;
mod thread;
#[cfg_attr(not(test), allow(dead_code, reason = "integers and lists of tensors have tests only"))]
mod torch_file;
mod tts;
mod wakeword;
mod whisper;

#[cfg(test)]
mod tests;

pub use backends::{Choice, load_audio_models};
pub use bundle::Bundle;
pub use error::Error;
pub use metrics::{OperationMetrics, SessionEnd};
pub use session::{AudioModel, Session};
pub use thread::{Computed, Outputs, SessionHandle};
pub use whisper::encode_speech;

use metrics::OperationLabel;
use proto::operation::{
    MAX_OPERATIONS, OfferedOperation, OpenedOperation, Operation, OperationError, OperationRequest,
};
use speech_rule::invalid;
use std::iter;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use thread::ModelThread;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SessionLimits {
    /// Maximum number of open sessions, summed over all operations.
    pub sessions: u32,
    /// A session without input for this long is ended.
    pub idle: Duration,
    /// A session whose client reads no results for this long is ended.
    pub unread: Duration,
    pub samples: u64,
}

impl Default for SessionLimits {
    /// A day of audio at 16 kHz; the other limits are far above the needs of a live client.
    fn default() -> Self {
        Self {
            sessions: 256,
            idle: Duration::from_secs(60),
            unread: Duration::from_secs(10),
            samples: 24 * 3600 * 16_000,
        }
    }
}

/// A model that is loaded for an operation by one backend.
struct Loaded {
    offered: OfferedOperation,
    thread: ModelThread,
    model: Arc<dyn AudioModel>,
    open: Arc<AtomicU32>,
}

/// All models that a worker has loaded for sessions.
pub struct Operations {
    /// Of an operation and model, the default backend is before the others.
    loaded: Vec<Loaded>,
    limits: SessionLimits,
    open: Arc<AtomicU32>,
    metrics: OperationMetrics,
}

/// An open session. It counts as open until this is dropped.
pub struct OpenSession {
    /// The response to the client.
    pub opened: OpenedOperation,
    pub handle: SessionHandle,
    pub limits: SessionLimits,
    operation: Operation,
    metrics: OperationMetrics,
    /// Counters of open sessions: of the worker, and of the model.
    open: [Arc<AtomicU32>; 2],
    end: SessionEnd,
}

impl Operations {
    /// Loads the operations of these bundles, with the backend that `environment` names, else with all that can
    /// serve. This process can run `cpus` threads at a time.
    ///
    /// # Errors
    /// [`Error::Backend`] if no backend can serve an operation that a bundle has a folder for.
    /// [`Error::Config`] if a bundle has no such folder, or two bundles serve the same operation under one
    /// name. Errors of the models.
    pub fn load(
        bundles: &[Bundle],
        limits: SessionLimits,
        environment: impl Fn(&str) -> Option<String>,
        cpus: NonZeroUsize,
    ) -> Result<Self, Error> {
        let fault = |reason: String| Error::Config { option: "operation", reason };
        let mut loaded: Vec<Loaded> = Vec::new();
        let metrics = OperationMetrics::default();
        for bundle in bundles {
            let operations = bundle.operations();
            if operations.is_empty() {
                let names: Vec<_> = Operation::ALL.iter().map(|operation| operation.name()).collect();
                let dir = bundle.dir.display();
                return Err(fault(format!(
                    "{dir} has no folder named after an operation ({})",
                    names.join(", ")
                )));
            }
            for operation in operations {
                if loaded
                    .iter()
                    .any(|other| (other.offered.operation, &other.offered.model) == (operation, &bundle.id))
                {
                    return Err(fault(format!("two bundles named {} offer {operation}", bundle.id)));
                }
                let (selected, others) =
                    load_audio_models(operation, bundle, Choice::All, &environment, cpus)?;
                for (backend, model) in iter::once(selected).chain(others) {
                    let offered = OfferedOperation { operation, model: bundle.id.clone(), backend };
                    let thread = ModelThread::start(operation, metrics.clone())?;
                    loaded.push(Loaded { offered, thread, model, open: Arc::default() });
                }
            }
        }
        if loaded.len() > MAX_OPERATIONS {
            return Err(fault(format!("{} operations are offered, at most {MAX_OPERATIONS}", loaded.len())));
        }
        Ok(Self { loaded, limits, open: Arc::default(), metrics })
    }

    pub fn is_empty(&self) -> bool {
        self.loaded.is_empty()
    }

    pub fn offered(&self) -> impl Iterator<Item = &OfferedOperation> {
        self.loaded.iter().map(|loaded| &loaded.offered)
    }

    pub fn metrics(&self) -> &OperationMetrics {
        &self.metrics
    }

    /// Opens a session and selects its model, and its backend unless the client has chosen one.
    ///
    /// # Errors
    /// Returns and counts the reason if it is refused.
    pub fn open(
        &self,
        request: &OperationRequest,
        backend: Option<&str>,
    ) -> Result<OpenSession, OperationError> {
        self.try_open(request, backend).inspect_err(|error| self.metrics.refused(request.operation, error))
    }

    fn try_open(
        &self,
        request: &OperationRequest,
        backend: Option<&str>,
    ) -> Result<OpenSession, OperationError> {
        let operation = request.operation;
        let offered = |loaded: &&Loaded| {
            loaded.offered.operation == operation
                && request.model.as_ref().is_none_or(|model| *model == loaded.offered.model)
        };
        let mut candidates = self.loaded.iter().filter(offered);
        let chosen = |loaded: &&Loaded| backend.is_none_or(|name| name == loaded.offered.backend);
        let serves = |loaded: &Loaded| loaded.offered.operation == operation;
        let Loaded { offered, thread, model, open } =
            match (candidates.clone().find(chosen), candidates.next()) {
                (Some(loaded), _) => loaded,
                (None, Some(first)) => {
                    let named =
                        iter::once(first).chain(candidates).map(|loaded| loaded.offered.backend.as_str());
                    let named = named.collect::<Vec<_>>().join(", ");
                    let backend = backend.unwrap_or_default();
                    return Err(invalid(
                        "backend",
                        format!("{backend:?} is not loaded for {operation}, only {named}"),
                    ));
                }
                (None, None) => {
                    let model = request.model.clone().filter(|_| self.loaded.iter().any(serves));
                    return Err(match model {
                        Some(model) => OperationError::ModelNotFound { operation, model },
                        None => OperationError::NotServed { operation },
                    });
                }
            };
        let session = model.open(request.sample_rate, &request.options)?;
        enter(&self.open, self.limits.sessions)?;
        enter(open, model.max_sessions()).inspect_err(|_| {
            self.open.fetch_sub(1, Ordering::Relaxed);
        })?;
        let sample_rate = session.rate().unwrap_or(request.sample_rate);
        self.metrics.sessions.get_or_create(&OperationLabel::new(operation)).inc();
        Ok(OpenSession {
            opened: OpenedOperation {
                backend: offered.backend.clone(),
                model: offered.model.clone(),
                sample_rate,
                window: session.window(),
                idle_timeout_ms: self.limits.idle.as_millis() as u64,
            },
            limits: SessionLimits { samples: self.limits.samples.min(session.max_samples()), ..self.limits },
            handle: thread.session(session, sample_rate),
            operation,
            metrics: self.metrics.clone(),
            open: [Arc::clone(&self.open), Arc::clone(open)],
            end: SessionEnd::cut,
        })
    }
}

/// Counts one more session, unless the limit is reached.
fn enter(open: &AtomicU32, limit: u32) -> Result<(), OperationError> {
    let more = |open: u32| (open < limit).then_some(open + 1);
    let entered = open.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
    entered.map(drop).map_err(|_| OperationError::TooManySessions { limit })
}

impl OpenSession {
    /// Sets the reason of the session's end. Without it, a dropped session counts as cut.
    pub fn ends(&mut self, end: SessionEnd) {
        self.end = end;
    }
}

impl Drop for OpenSession {
    fn drop(&mut self) {
        for open in &self.open {
            open.fetch_sub(1, Ordering::Relaxed);
        }
        self.metrics.sessions.get_or_create(&OperationLabel::new(self.operation)).dec();
        self.metrics.ended(self.operation, self.end);
    }
}

/// Refuses values that are NaN or infinite. `what` is the start of the error text, with a verb.
fn finite(what: &'static str, values: &[f32]) -> Result<(), Error> {
    match values.iter().all(|value| value.is_finite()) {
        true => Ok(()),
        false => Err(Error::NotFinite { what }),
    }
}
