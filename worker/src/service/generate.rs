//! One generation over QUIC: request in, frames out, cancelled when nobody reads any more.

use super::Node;
use crate::engine::EngineRequest;
use proto::message::{GenerateError, GenerateFrame, GenerateRequest, TokenOut, WorkerState};
use proto::transport::GenerateCall;
use std::time::Duration;
use tokio::sync::mpsc;

/// Tokens sent in one frame at most, when the coordinator reads slower than we generate.
const TOKENS_PER_FRAME: usize = 256;

/// Serves the call to its end.
pub(super) async fn serve(node: &Node, call: GenerateCall) {
    let GenerateCall { request, mut reply } = call;
    let GenerateRequest::V1(request) = request;
    let refusal = match node.state() {
        WorkerState::Draining => Some(GenerateError::Draining),
        _ if request.model != node.served.id => Some(GenerateError::ModelNotFound(request.model.clone())),
        _ => None,
    };
    let (Some(engine), None) = (node.engine(), &refusal) else {
        let error = refusal.unwrap_or(GenerateError::ModelNotFound(request.model));
        // The coordinator may have gone; then nobody needs the answer.
        let _ = reply.send(&GenerateFrame::Failed(error)).await;
        return;
    };
    // Bounded by the request's own max_tokens: the engine never waits for a slow reader.
    let (frames, mut inbox) = mpsc::unbounded_channel();
    let sink = move |frame: GenerateFrame| frames.send(frame).is_ok();
    let submitted = engine.submit(EngineRequest {
        root: request.root,
        prompt: request.prompt,
        emitted: request.emitted,
        sampling: request.sampling,
        stop: request.stop,
        deadline: (request.deadline_ms > 0).then(|| Duration::from_millis(request.deadline_ms)),
        sink: Box::new(sink),
    });
    let Ok(id) = submitted.await else {
        let _ = reply.send(&GenerateFrame::Failed(GenerateError::Internal)).await;
        return;
    };
    let cancelled = reply.cancelled();
    tokio::pin!(cancelled);
    let mut batch = Vec::new();
    loop {
        let taken = tokio::select! {
            taken = inbox.recv_many(&mut batch, TOKENS_PER_FRAME) => taken,
            () = &mut cancelled => break,
        };
        if taken == 0 {
            break;
        }
        for frame in coalesce(batch.drain(..)) {
            if reply.send(&frame).await.is_err() {
                id.into_iter().for_each(|id| engine.cancel(id));
                return;
            }
        }
    }
    // Harmless after a normal end; frees the blocks otherwise.
    id.into_iter().for_each(|id| engine.cancel(id));
}

/// Joins runs of token frames.
fn coalesce(frames: impl Iterator<Item = GenerateFrame>) -> Vec<GenerateFrame> {
    let mut joined: Vec<GenerateFrame> = Vec::new();
    for frame in frames {
        match (joined.last_mut(), frame) {
            (Some(GenerateFrame::Tokens(before)), GenerateFrame::Tokens(tokens)) => extend(before, tokens),
            (_, frame) => joined.push(frame),
        }
    }
    joined
}

fn extend(before: &mut Vec<TokenOut>, tokens: Vec<TokenOut>) {
    before.extend(tokens);
}
