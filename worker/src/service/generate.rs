//! Serves one generation over QUIC: request in, frames out. Cancelled when the caller stops reading.

use super::peers::Holder;
use super::runner::Runner;
use super::{Node, images};
use crate::generator::RunningGeneration;
use engine::pull::Source;
use proto::message::{GenerateError, GenerateFrame, MAX_TOKENS_PER_FRAME};
use proto::usage::AttemptId;
use proto::worker::WorkerState;
use std::sync::Arc;
use tokio::sync::mpsc;
use transport::{Connection, GenerateCall, GenerateReply};

/// Maximum number of engine frames that are joined if the coordinator reads slower than the engine generates.
const FRAMES_AT_ONCE: usize = 256;

/// Submits the call to the engine at once, in the order of calls. The returned future serves it to its end.
pub(super) fn serve(
    node: &Node,
    connection: &Connection,
    call: GenerateCall,
) -> impl Future<Output = ()> + Send + use<> {
    let GenerateCall { request, reply } = call;
    let id = AttemptId {
        request: request.request_id.clone(),
        part: request.choice,
        attempt: request.attempt,
        root: request.root,
    };
    let usage = node.usage.attempt(connection, id, request.model.clone());
    let refusal = match node.state() {
        WorkerState::Draining => Some(GenerateError::Draining),
        _ if !node.serves(&request.model) => Some(GenerateError::ModelNotFound(request.model.clone())),
        _ => None,
    };
    let submitted = match (node.engine(), refusal) {
        (Some(Runner::Generates(engine)), None) => {
            let pull = request
                .pull
                .clone()
                .map(|source| Box::new(Holder::new(Arc::clone(&node.peers), source)) as Box<dyn Source>);
            let encoder = images::encoder(node, &request);
            let constrained = request.grammar.is_some();
            // Bounded by the request's own max_tokens: the engine never waits for a slow reader.
            let (frames, inbox) = mpsc::unbounded_channel();
            let adapter = node.adapter(&request.model);
            Ok((engine.submit(request, adapter, pull, encoder, frames, usage), constrained, inbox))
        }
        (_, refusal) => Err(refusal.unwrap_or(GenerateError::ModelNotFound(request.model))),
    };
    async move {
        match submitted {
            Ok((running, constrained, inbox)) => {
                let running = tokio::select! {
                    running = running => running,
                    // A grammar takes a while to compile.
                    () = reply.cancelled(), if constrained => return,
                };
                match running {
                    Ok(running) => forward(running, inbox, reply).await,
                    Err(error) => refuse(reply, error).await,
                }
            }
            Err(error) => refuse(reply, error).await,
        }
    }
}

async fn refuse(mut reply: GenerateReply, error: GenerateError) {
    // The send fails if the coordinator is gone.
    let _ = reply.send(&GenerateFrame::Failed(error)).await;
}

/// Sends the frames, until they end or the caller stops reading. Both end the generation.
async fn forward(
    _running: RunningGeneration,
    mut inbox: mpsc::UnboundedReceiver<GenerateFrame>,
    mut reply: GenerateReply,
) {
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
                return;
            }
        }
    }
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
