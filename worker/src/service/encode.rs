//! Serves one encode call over QUIC: texts in, values out. Cancelled when the caller stops reading.

use super::Node;
use super::runner::Runner;
use engine::encoder::Text;
use engine::encoder::thread::EncodeResult;
use engine::usage::RequestUsage;
use proto::block::BlockId;
use proto::message::{EncodeRequest, EncodeText, GenerateError};
use proto::trace::follow;
use proto::usage::AttemptId;
use proto::worker::WorkerState;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
use transport::{Connection, EncodeCall};

/// Submits the call to the encoder at once. The returned future serves it to its end.
pub(super) fn serve(
    node: &Node,
    connection: &Connection,
    call: EncodeCall,
) -> impl Future<Output = ()> + Send + use<> {
    let EncodeCall { request, reply } = call;
    let id = AttemptId {
        request: request.request_id.clone(),
        part: request.part,
        attempt: request.attempt,
        root: BlockId([0; 16]),
    };
    let usage = node.usage.attempt(connection, id, request.model.clone());
    let submitted = submit(node, request, usage);
    async move {
        let answer = match submitted {
            Ok(answer) => tokio::select! {
                // The encoder drops a call without an answer only when the process ends.
                answer = answer => answer.unwrap_or(Err(GenerateError::Internal)),
                // Dropping the receiver cancels the work.
                () = reply.cancelled() => return,
            },
            Err(error) => Err(error),
        };
        let sent = match answer {
            Ok(encoded) => reply.send(&encoded).await,
            Err(error) => reply.fail(error).await,
        };
        if let Err(error) = sent {
            tracing::debug!(%error, "a coordinator did not read the result of an encode call");
        }
    }
}

fn submit(
    node: &Node,
    request: EncodeRequest,
    usage: Arc<RequestUsage>,
) -> Result<oneshot::Receiver<EncodeResult>, GenerateError> {
    if node.state() == WorkerState::Draining {
        return Err(GenerateError::Draining);
    }
    let EncodeRequest { model, texts, deadline_ms, trace, .. } = request;
    let Some(Runner::Encodes(encoder)) = node.engine().filter(|_| node.serves(&model)) else {
        return Err(GenerateError::ModelNotFound(model));
    };
    let text = |EncodeText { tokens, segment_start }| Text {
        tokens,
        second: segment_start.map(|start| start as usize),
    };
    let deadline = (deadline_ms > 0).then(|| Instant::now().checked_add(Duration::from_millis(deadline_ms)));
    let trace = trace.and_then(|parent| follow(parent, "encode", Instant::now()));
    encoder.encode(texts.into_iter().map(text).collect(), deadline.flatten(), trace, Some(usage))
}
