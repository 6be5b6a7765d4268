//! Whole operations: what a worker does beside, or instead of, generating text.
//!
//! Texts (embed, rerank) are the [`encoder`](crate::encoder)'s; what hears is served in sessions here, each of which
//! holds all of its state. [`backends`] decides who serves an operation, when a model is loaded: once, so that all
//! sessions of a model are the same. The arithmetic of each model runs on a thread of its own, one piece of sound at a
//! time, in the order in which pieces came: no async thread and no step of the engine ever waits for it, and a model
//! that is slow delays its own sessions only. Sessions are bounded in number, in what they hear, and in silence.

pub mod backends;
mod flushed;
mod log_mel;
pub mod onnx;
mod resample;
mod session;
mod silero;
mod smart_turn;
mod speech;
mod thread;
mod whisper;

#[cfg(test)]
mod tests;

pub use backends::{Bundle, KERNELS, TextModel, load_encoder, load_hearing};
pub use session::{Hears, Session};
pub use thread::SessionHandle;
pub use whisper::encode_speech;

use crate::Error;
use crate::telemetry::{OperationLabel, OperationMetrics, SessionEnd};
use proto::ids::ModelId;
use proto::operation::{
    MAX_OPERATIONS, OfferedOperation, OpenedOperation, Operation, OperationError, OperationRequest,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use thread::ModelThread;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SessionLimits {
    /// Sessions open at a time, of all operations together.
    pub sessions: u32,
    /// A session that hears nothing for so long ends.
    pub idle: Duration,
    /// A session whose client takes no answer for so long ends.
    pub unread: Duration,
    pub samples: u64,
}

impl Default for SessionLimits {
    /// A day of sound at 16 kHz; the rest is far beyond what a client that lives would need.
    fn default() -> Self {
        Self {
            sessions: 256,
            idle: Duration::from_secs(60),
            unread: Duration::from_secs(10),
            samples: 24 * 3600 * 16_000,
        }
    }
}

/// A model that is loaded for an operation.
struct Loaded {
    offered: OfferedOperation,
    thread: ModelThread,
    model: Arc<dyn Hears>,
    open: Arc<AtomicU32>,
}

/// All that a worker has loaded for sessions.
pub struct Operations {
    loaded: Vec<Loaded>,
    limits: SessionLimits,
    open: Arc<AtomicU32>,
    metrics: OperationMetrics,
}

/// A session that is open. It counts as such until this is dropped.
pub struct OpenSession {
    /// What the client is told.
    pub opened: OpenedOperation,
    pub handle: SessionHandle,
    pub limits: SessionLimits,
    operation: Operation,
    metrics: OperationMetrics,
    /// Of the worker, and of the model.
    open: [Arc<AtomicU32>; 2],
    end: SessionEnd,
}

impl Operations {
    /// Loads everything that these bundles have folders of operations for, by the backends that `environment` chooses.
    ///
    /// # Errors
    /// [`Error::Backend`] where nobody serves an operation that a bundle has a folder for; [`Error::Config`] where a
    /// bundle has no such folder, or two serve the same under one name; the models'.
    pub fn load(
        bundles: &[Bundle],
        limits: SessionLimits,
        environment: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, Error> {
        let fault = |reason: String| Error::Config { option: "operation", reason };
        let mut loaded: Vec<Loaded> = Vec::new();
        let metrics = OperationMetrics::default();
        for bundle in bundles {
            let operations = bundle.operations();
            if operations.is_empty() {
                let known: Vec<_> = Operation::ALL.iter().map(|operation| operation.name()).collect();
                let dir = bundle.dir.display();
                return Err(fault(format!("{dir} has no folder of an operation ({})", known.join(", "))));
            }
            for operation in operations {
                let (backend, model) = load_hearing(operation, bundle, &environment)?;
                let offered = OfferedOperation { operation, model: bundle.id.clone(), backend };
                if loaded
                    .iter()
                    .any(|other| (other.offered.operation, &other.offered.model) == (operation, &bundle.id))
                {
                    return Err(fault(format!("two bundles are called {} and have {operation}", bundle.id)));
                }
                let thread = ModelThread::start(operation, metrics.clone())?;
                loaded.push(Loaded { offered, thread, model, open: Arc::default() });
            }
        }
        if loaded.len() > MAX_OPERATIONS {
            return Err(fault(format!("{} are offered, the limit is {MAX_OPERATIONS}", loaded.len())));
        }
        Ok(Self { loaded, limits, open: Arc::default(), metrics })
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.loaded.is_empty()
    }

    pub fn offered(&self) -> impl Iterator<Item = &OfferedOperation> {
        self.loaded.iter().map(|loaded| &loaded.offered)
    }

    pub fn metrics(&self) -> &OperationMetrics {
        &self.metrics
    }

    /// Opens a session: here, and nowhere later, is decided by which model.
    ///
    /// # Errors
    /// Why it is refused; counted.
    pub fn open(&self, request: &OperationRequest) -> Result<OpenSession, OperationError> {
        self.try_open(request).inspect_err(|error| self.metrics.refused(request.operation, error))
    }

    fn try_open(&self, request: &OperationRequest) -> Result<OpenSession, OperationError> {
        let operation = request.operation;
        let mut of_it = self.loaded.iter().filter(|loaded| loaded.offered.operation == operation).peekable();
        if of_it.peek().is_none() {
            return Err(OperationError::NotServed { operation });
        }
        let asked =
            |loaded: &&Loaded| request.model.as_ref().is_none_or(|model| *model == loaded.offered.model);
        let missing = |model: ModelId| OperationError::ModelNotFound { operation, model };
        let Loaded { offered, thread, model, open } = match (of_it.find(asked), &request.model) {
            (Some(loaded), _) => loaded,
            (None, Some(model)) => return Err(missing(model.clone())),
            (None, None) => return Err(OperationError::NotServed { operation }),
        };
        let session = model.open(request.sample_rate, &request.options)?;
        enter(&self.open, self.limits.sessions)?;
        enter(open, model.most_sessions()).inspect_err(|_| {
            self.open.fetch_sub(1, Ordering::Relaxed);
        })?;
        self.metrics.sessions.get_or_create(&OperationLabel::new(operation)).inc();
        Ok(OpenSession {
            opened: OpenedOperation {
                backend: offered.backend.clone(),
                model: offered.model.clone(),
                sample_rate: request.sample_rate,
                window: session.window(),
                idle_timeout_ms: self.limits.idle.as_millis() as u64,
            },
            limits: SessionLimits { samples: self.limits.samples.min(session.most_samples()), ..self.limits },
            handle: thread.session(session, request.sample_rate),
            operation,
            metrics: self.metrics.clone(),
            open: [Arc::clone(&self.open), Arc::clone(open)],
            end: SessionEnd::cut,
        })
    }
}

/// One more, where there may be.
fn enter(open: &AtomicU32, limit: u32) -> Result<(), OperationError> {
    let more = |open: u32| (open < limit).then_some(open + 1);
    let entered = open.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
    entered.map(drop).map_err(|_| OperationError::TooManySessions { limit })
}

impl OpenSession {
    /// Why it ends; one that is dropped without was cut off.
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

/// Refuses values of which some are NaN or infinity; `what` they are, with a verb.
fn finite(what: &'static str, values: &[f32]) -> Result<(), Error> {
    match values.iter().all(|value| value.is_finite()) {
        true => Ok(()),
        false => Err(Error::NotFinite { what }),
    }
}

/// The sum of products, in eight sums so that it is vectorised, which are added in their order: the same bits for the same
/// values wherever it is called.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; 8];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<8>(), b.as_chunks::<8>());
    for (a, b) in a.iter().zip(b) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    for ((sum, a), b) in sums.iter_mut().zip(a_rest).zip(b_rest) {
        *sum += a * b;
    }
    sums.iter().sum()
}
