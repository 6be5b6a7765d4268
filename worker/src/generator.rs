//! Engines that generate text, behind one interface: Kvasir's own, and servers of other projects.
//!
//! `Generator` is what the service needs of an engine. [`select_backend`] knows the engines of this build, and
//! chooses one for a model: the one that is named, else the built-in one.

use crate::Error;
use engine::engine::EngineLoad;
use engine::engine::thread::EngineHandle;
use engine::images::RemoteEncoder;
use engine::kv_events::EventLog;
use engine::pull::Source;
use engine::usage::RequestUsage;
use external::EngineKind;
use futures::future::BoxFuture;
use kernels::registry::{Operation, Provider, Refusal, Registry, SelectError};
use parking_lot::Mutex;
use proto::message::{GenerateError, GenerateFrame, GenerateRequest, PullReport};
use proto::served_model::BUILT_IN;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};

mod built_in;
mod source;

pub use source::{EngineSource, KvEvents};

/// Variable that selects the engine.
pub const BACKEND_VARIABLE: &str = "KVASIR_LLM_BACKEND";

/// An engine that generates text. Its methods are called from any thread and do not block.
pub(crate) trait Generator: Send + Sync {
    /// Starts a generation with the adapter of this digest, if there is one. It takes its place in the order of calls
    /// at once. Its frames go to `frames`, which is closed behind the last one. Dropping the future, or the receiver of
    /// the frames, cancels it. `encoder` encodes its images. `usage` counts what it uses.
    ///
    /// # Errors
    ///
    /// If the engine refuses the request before its first frame: an invalid grammar, or an argument that the
    /// engine would ignore.
    fn submit(
        &self,
        request: GenerateRequest,
        adapter: Option<[u8; 32]>,
        pull: Option<Box<dyn Source>>,
        encoder: Option<Arc<dyn RemoteEncoder>>,
        frames: mpsc::UnboundedSender<GenerateFrame>,
        usage: Arc<RequestUsage>,
    ) -> BoxFuture<'static, Result<RunningGeneration, GenerateError>>;

    fn load(&self) -> EngineLoad;

    /// Time for which work has waited without progress.
    fn stalled(&self) -> Duration;

    /// Whether the engine makes progress or is idle.
    fn healthy(&self) -> bool;

    /// Changes of its prefix cache.
    fn events(&self) -> &Mutex<EventLog>;

    /// Changes when there are new events.
    fn newest_event(&self) -> watch::Receiver<u64>;

    /// Whether the events name exactly what the cache holds.
    fn exact(&self) -> bool;

    /// Bytes of memory that the engine uses outside this process.
    fn outside_bytes(&self) -> u64;

    /// KV transfers from and to other workers.
    fn transfers(&self) -> PullReport;

    fn metrics_text(&self) -> String;

    /// Ends the engine. Running generations end without a last frame.
    fn stop(&self);

    /// The built-in engine, whose caches this worker can read and write: KV transfers, sequences, snapshots.
    fn built_in(&self) -> Option<&EngineHandle>;
}

/// A generation in an engine. Dropping it cancels it.
pub(crate) struct RunningGeneration(Option<Box<dyn FnOnce() + Send>>);

impl RunningGeneration {
    /// `cancel` is called when the value is dropped, also after a normal end.
    pub(crate) fn new(cancel: impl FnOnce() + Send + 'static) -> Self {
        Self(Some(Box::new(cancel)))
    }
}

impl Drop for RunningGeneration {
    fn drop(&mut self) {
        if let Some(cancel) = self.0.take() {
            cancel();
        }
    }
}

/// The operation whose backends are engines.
enum Llm {}

impl Operation for Llm {
    /// Whether there is a server, or a command that starts servers.
    type Request = bool;
    type Service = Backend;
    const NAME: &'static str = "llm";
}

/// An engine that can be selected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    BuiltIn,
    External(EngineKind),
}

impl Backend {
    pub fn name(self) -> &'static str {
        match self {
            Self::BuiltIn => BUILT_IN,
            Self::External(kind) => kind.name(),
        }
    }
}

impl Provider<Llm> for Backend {
    fn name(&self) -> &str {
        Self::name(*self)
    }

    fn rank(&self) -> i32 {
        match self {
            Self::BuiltIn => 100,
            Self::External(_) => 0,
        }
    }

    fn available(&self) -> Result<(), String> {
        Ok(())
    }

    fn can_serve(&self, has_server: &bool) -> Result<(), Refusal> {
        let refuse = |reason: &str| Err(Refusal::Artefact { reason: reason.to_owned() });
        match (self, has_server) {
            (Self::BuiltIn, false) | (Self::External(_), true) => Ok(()),
            (Self::BuiltIn, true) => {
                refuse("it computes in this process and takes neither engine_url nor engine_cmd")
            }
            (Self::External(_), false) => {
                refuse("it needs engine_url or engine_cmd, and only `kvasir worker` and `up` take them")
            }
        }
    }

    fn service(&self) -> &Self {
        self
    }
}

fn registry() -> Registry<Llm> {
    let mut registry = Registry::new(Box::new(Backend::BuiltIn));
    for kind in EngineKind::ALL {
        registry.register(Box::new(Backend::External(kind)));
    }
    registry
}

/// Chooses the engine: `named`, else the built-in one. `has_server`: there is a server of another project, or a command
/// that starts servers.
///
/// # Errors
///
/// If `named` is unknown, with the list of engines, or if it does not fit to `has_server`.
pub fn select_backend(named: Option<&str>, has_server: bool) -> Result<Backend, SelectError> {
    // An engine that runs beside the worker is never chosen unasked: which one it is cannot be found out.
    let named = named.filter(|name| !name.is_empty()).unwrap_or(BUILT_IN);
    let environment = |variable: &str| (variable == BACKEND_VARIABLE).then(|| named.to_owned());
    registry().select(&has_server, environment).map(|provider| *provider.service())
}

/// Fails if the environment selects another engine than the built-in one: for commands that compute in their
/// own process.
///
/// # Errors
///
/// See [`select_backend`].
pub fn require_built_in() -> Result<(), Error> {
    let named = crate::load::environment(BACKEND_VARIABLE);
    select_backend(named.as_deref(), false)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::served_model::ENGINES;
    use std::iter;

    #[test]
    fn an_unknown_engine_is_refused_with_the_list() {
        assert_eq!(select_backend(None, false).unwrap(), Backend::BuiltIn);
        assert_eq!(select_backend(Some(""), false).unwrap(), Backend::BuiltIn);
        assert_eq!(select_backend(Some("kvasir"), false).unwrap(), Backend::BuiltIn);
        let error = select_backend(Some("nonsense"), false).unwrap_err().to_string();
        assert!(error.contains("KVASIR_LLM_BACKEND selects backend \"nonsense\""), "{error}");
        assert!(error.contains("known are kvasir, vllm, sglang, llama-server"), "{error}");
    }

    #[test]
    fn an_engine_of_another_project_needs_its_place_and_the_built_in_one_has_none() {
        assert_eq!(select_backend(Some("vllm"), true).unwrap(), Backend::External(EngineKind::Vllm));
        for (named, has_server) in [(Some("vllm"), false), (None, true), (Some("kvasir"), true)] {
            let error = select_backend(named, has_server).unwrap_err().to_string();
            assert!(error.contains("engine_url"), "{error}");
        }
    }

    #[test]
    fn deployments_name_the_engines_of_this_build() {
        let names: Vec<&str> = iter::once(BUILT_IN).chain(EngineKind::ALL.map(EngineKind::name)).collect();
        assert_eq!(names, ENGINES);
    }
}
