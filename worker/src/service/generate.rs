//! Serves one generation over QUIC: request in, frames out. Cancelled when the caller stops reading.

use super::Node;
use super::peers::Holder;
use super::runner::Runner;
use engine::Error;
use engine::engine::thread::EngineHandle;
use engine::engine::{EngineRequest, Sink};
use engine::pull::Source;
use engine::scheduler::SeqId;
use proto::message::{GenerateError, GenerateFrame, GrammarSpec, MAX_TOKENS_PER_FRAME};
use proto::sequence::SequenceName;
use proto::trace::TraceContext;
use proto::worker::WorkerState;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use transport::{GenerateCall, GenerateReply};

/// Maximum number of engine frames that are joined if the coordinator reads slower than the engine generates.
const FRAMES_AT_ONCE: usize = 256;

/// Submits the call to the engine at once, in the order of calls. The returned future serves it to its end.
pub(super) fn serve(node: &Node, call: GenerateCall) -> impl Future<Output = ()> + Send + use<> {
    let GenerateCall { request, reply } = call;
    let pull =
        request.pull.map(|source| Box::new(Holder::new(Arc::clone(&node.peers), source)) as Box<dyn Source>);
    let refusal = match node.state() {
        WorkerState::Draining => Some(GenerateError::Draining),
        _ if !node.serves(&request.model) => Some(GenerateError::ModelNotFound(request.model.clone())),
        _ => None,
    };
    let submitted = match (node.engine(), refusal) {
        (Some(Runner::Generates(engine)), None) => {
            // Bounded by the request's own max_tokens: the engine never waits for a slow reader.
            let (frames, inbox) = mpsc::unbounded_channel();
            let sink = Frames { frames, span: request.trace };
            let engine_request = EngineRequest {
                name: Some(SequenceName { request: request.request_id, choice: request.choice }),
                root: request.root,
                tenant: request.tenant,
                prompt: request.prompt.to_vec(),
                emitted: request.emitted.to_vec(),
                sampling: request.sampling,
                stop: request.stop,
                deadline: (request.deadline_ms > 0).then(|| Duration::from_millis(request.deadline_ms)),
                pull,
                together: request.together,
                guide: None,
                sink: Box::new(sink),
            };
            let submitted = match request.grammar {
                None => Submitted::At(Box::pin(engine.submit(engine_request))),
                Some(grammar) => Submitted::Behind(grammar, Box::new(engine_request)),
            };
            Ok((engine, submitted, inbox))
        }
        (_, refusal) => Err(refusal.unwrap_or(GenerateError::ModelNotFound(request.model))),
    };
    async move {
        match submitted {
            Ok((engine, Submitted::At(id), inbox)) => forward(&engine, id, inbox, reply).await,
            Ok((engine, Submitted::Behind(grammar, engine_request), inbox)) => {
                let guide = tokio::select! {
                    guide = engine.grammars().guide(
                        engine_request.root,
                        engine_request.tenant,
                        grammar,
                        &engine_request.emitted,
                    ) => guide,
                    () = reply.cancelled() => return,
                };
                match guide {
                    Ok(guide) => {
                        let id = engine.submit(EngineRequest { guide: Some(guide), ..*engine_request });
                        forward(&engine, id, inbox, reply).await;
                    }
                    Err(error) => refuse(reply, error).await,
                }
            }
            Err(error) => refuse(reply, error).await,
        }
    }
}

/// How a call was submitted to the engine.
enum Submitted {
    At(Pin<Box<dyn Future<Output = Result<Option<SeqId>, Error>> + Send>>),
    /// Submitted once its grammar is compiled. A refused grammar costs no computing.
    Behind(GrammarSpec, Box<EngineRequest>),
}

/// Passes frames to the task that sends them.
struct Frames {
    frames: mpsc::UnboundedSender<GenerateFrame>,
    span: Option<TraceContext>,
}

impl Sink for Frames {
    fn frame(&mut self, frame: GenerateFrame) -> bool {
        self.frames.send(frame).is_ok()
    }

    fn span(&self) -> Option<TraceContext> {
        self.span
    }
}

async fn refuse(mut reply: GenerateReply, error: GenerateError) {
    // The send fails if the coordinator is gone.
    let _ = reply.send(&GenerateFrame::Failed(error)).await;
}

async fn forward(
    engine: &EngineHandle,
    id: impl Future<Output = Result<Option<SeqId>, Error>>,
    mut inbox: mpsc::UnboundedReceiver<GenerateFrame>,
    mut reply: GenerateReply,
) {
    let Ok(id) = id.await else { return refuse(reply, GenerateError::Internal).await };
    let cancelled = reply.cancelled();
    tokio::pin!(cancelled);
    let mut batch = Vec::new();
    loop {
        let taken = tokio::select! {
            taken = inbox.recv_many(&mut batch, FRAMES_AT_ONCE) => taken,
            () = &mut cancelled => break,
        };
        if taken == 0 {
            // A draining worker closes its connections as soon as no call is in progress, so wait until the
            // stream is read.
            if reply.is_finished() {
                cancelled.await;
            }
            break;
        }
        for frame in coalesce(batch.drain(..)) {
            if reply.send(&frame).await.is_err() {
                id.into_iter().for_each(|id| engine.cancel(id));
                return;
            }
        }
    }
    // No effect after a normal end; otherwise frees the blocks.
    id.into_iter().for_each(|id| engine.cancel(id));
}

/// Joins consecutive token frames into frames of at most [`MAX_TOKENS_PER_FRAME`] tokens. The codec refuses
/// longer ones.
fn coalesce(frames: impl Iterator<Item = GenerateFrame>) -> Vec<GenerateFrame> {
    let mut joined: Vec<GenerateFrame> = Vec::new();
    for frame in frames {
        match (joined.last_mut(), frame) {
            (Some(GenerateFrame::Tokens(before)), GenerateFrame::Tokens(tokens))
                if before.len() + tokens.len() <= MAX_TOKENS_PER_FRAME =>
            {
                before.extend(tokens);
            }
            (_, frame) => joined.push(frame),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::message::TokenOut;

    #[test]
    fn joined_frames_keep_the_order_and_the_codecs_limit() {
        // As of speculative steps: 17 tokens each.
        let token = |id| TokenOut { id, text: String::new(), logprobs: None };
        let frame = |n: u32| GenerateFrame::Tokens((0..17).map(|i| token(17 * n + i)).collect());
        let joined = coalesce((0..FRAMES_AT_ONCE as u32).map(frame));
        let lengths: Vec<usize> = joined
            .iter()
            .map(|frame| match frame {
                GenerateFrame::Tokens(tokens) => tokens.len(),
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(lengths, [240 * 17, 16 * 17]);
        let ids = joined.into_iter().flat_map(|frame| match frame {
            GenerateFrame::Tokens(tokens) => tokens,
            _ => Vec::new(),
        });
        assert!(ids.map(|token| token.id).eq(0..17 * FRAMES_AT_ONCE as u32));
    }
}
