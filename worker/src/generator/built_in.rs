//! Kvasir's own engine as a [`Generator`].

use super::{Generator, RunningGeneration};
use engine::Error;
use engine::engine::thread::EngineHandle;
use engine::engine::{EngineImage, EngineLoad, EngineRequest, ImageSource, Sink};
use engine::images::{PlacedImage, RemoteEncoder};
use engine::kv_events::EventLog;
use engine::pull::Source;
use engine::scheduler::SeqId;
use engine::usage::RequestUsage;
use futures::FutureExt;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use proto::message::{
    FileBytes, GenerateError, GenerateFrame, GenerateRequest, GrammarSpec, PromptImage, PullReport,
};
use proto::sequence::SequenceName;
use proto::trace::TraceContext;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};

/// Passes frames to the task that sends them.
struct Frames {
    frames: mpsc::UnboundedSender<GenerateFrame>,
    span: Option<TraceContext>,
    usage: Arc<RequestUsage>,
}

impl Sink for Frames {
    fn frame(&mut self, frame: GenerateFrame) -> bool {
        self.frames.send(frame).is_ok()
    }

    fn usage(&self) -> Option<Arc<RequestUsage>> {
        Some(Arc::clone(&self.usage))
    }

    fn span(&self) -> Option<TraceContext> {
        self.span
    }
}

impl Generator for EngineHandle {
    fn submit(
        &self,
        request: GenerateRequest,
        adapter: Option<[u8; 32]>,
        pull: Option<Box<dyn Source>>,
        encoder: Option<Arc<dyn RemoteEncoder>>,
        frames: mpsc::UnboundedSender<GenerateFrame>,
        usage: Arc<RequestUsage>,
    ) -> BoxFuture<'static, Result<RunningGeneration, GenerateError>> {
        let grammar = request.grammar;
        // Bounded by the request's own max_tokens: the engine never waits for a slow reader.
        let engine_request = EngineRequest {
            name: Some(SequenceName { request: request.request_id, choice: request.choice }),
            root: request.root,
            adapter,
            tenant: request.tenant,
            prompt: request.prompt.to_vec(),
            images: request.images.into_iter().map(|image| engine_image(image, encoder.as_ref())).collect(),
            prompt_logprobs: request.prompt_logprobs,
            emitted: request.emitted.to_vec(),
            sampling: request.sampling,
            stop: request.stop,
            deadline: (request.deadline_ms > 0).then(|| Duration::from_millis(request.deadline_ms)),
            pull,
            together: request.together,
            guide: None,
            sink: Box::new(Frames { frames: frames.clone(), span: request.trace, usage }),
        };
        let engine = self.clone();
        match grammar {
            None => {
                let id = self.submit(engine_request);
                running(engine, id).boxed()
            }
            // A refused grammar costs no computing.
            Some(grammar) => constrained(engine, grammar, engine_request, frames).boxed(),
        }
    }

    fn load(&self) -> EngineLoad {
        Self::load(self)
    }

    fn stalled(&self) -> Duration {
        Self::stalled(self)
    }

    fn healthy(&self) -> bool {
        Self::healthy(self)
    }

    fn events(&self) -> &Mutex<EventLog> {
        Self::events(self)
    }

    fn newest_event(&self) -> watch::Receiver<u64> {
        Self::newest_event(self)
    }

    fn exact(&self) -> bool {
        true
    }

    fn outside_bytes(&self) -> u64 {
        0
    }

    fn transfers(&self) -> PullReport {
        Self::transfers(self).report()
    }

    fn metrics_text(&self) -> String {
        Self::metrics_text(self)
    }

    fn stop(&self) {
        Self::stop(self);
    }

    fn built_in(&self) -> Option<&EngineHandle> {
        Some(self)
    }
}

fn engine_image(image: PromptImage, encoder: Option<&Arc<dyn RemoteEncoder>>) -> EngineImage {
    let PromptImage { file: FileBytes(file), digest, runs } = image;
    let source = match encoder {
        Some(encoder) => ImageSource::Elsewhere(file, Arc::clone(encoder)),
        None => ImageSource::File(file),
    };
    EngineImage { place: PlacedImage { runs, digest }, source }
}

/// Submits the request once its grammar is compiled.
async fn constrained(
    engine: EngineHandle,
    grammar: GrammarSpec,
    request: EngineRequest,
    frames: mpsc::UnboundedSender<GenerateFrame>,
) -> Result<RunningGeneration, GenerateError> {
    let (root, tenant) = (request.root, request.tenant);
    let guide = engine.grammars().guide(root, tenant, grammar, &request.emitted).await?;
    // Only the engine's sender is left, so that the frames end with the request.
    drop(frames);
    let id = engine.submit(EngineRequest { guide: Some(guide), ..request });
    running(engine, id).await
}

async fn running(
    engine: EngineHandle,
    id: impl Future<Output = Result<Option<SeqId>, Error>> + Send,
) -> Result<RunningGeneration, GenerateError> {
    let id = id.await.map_err(|_| GenerateError::Internal)?;
    // No effect after a normal end; otherwise frees the blocks.
    Ok(RunningGeneration::new(move || id.into_iter().for_each(|id| engine.cancel(id))))
}
