//! Serves one operation on sequences over QUIC. Files are hashed, checked, written and read on blocking
//! threads. The engine only copies blocks.

use super::Node;
use engine::engine::resume::{Reply, SequenceKey};
use engine::engine::thread::EngineHandle;
use engine::snapshot::Snapshot;
use proto::sequence::{
    MAX_LISTED, SequenceError, SequenceInfo, SequenceList, SequenceOperation, SequenceReply, SequenceRequest,
};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
use transport::{SequenceBody, SequenceCall};

/// Maximum length of a snapshot's header.
const HEADER_BYTES: u64 = 32 << 20;

enum SequenceAnswer {
    Reply(SequenceReply),
    File(Arc<[u8]>),
}

/// Serves the call to its end, or until the caller stops reading.
pub(super) async fn serve(node: Arc<Node>, call: SequenceCall) {
    let SequenceCall { request, body, reply } = call;
    let answer = tokio::select! {
        answer = perform(&node, request, body) => answer,
        // Work that the engine has not started is dropped with its reply; started work is finished.
        () = reply.cancelled() => return,
    };
    let sent = match answer {
        Ok(SequenceAnswer::Reply(answer)) => reply.send(answer).await,
        Ok(SequenceAnswer::File(file)) => reply.send_bytes(&file).await,
        Err(error) => reply.fail(error).await,
    };
    if let Err(error) = sent {
        tracing::debug!(%error, "a coordinator did not read the result of an operation on a sequence");
    }
}

async fn perform(
    node: &Arc<Node>,
    request: SequenceRequest,
    body: SequenceBody,
) -> Result<SequenceAnswer, SequenceError> {
    let SequenceRequest { model, root, operation } = request;
    let Some(runner) = node.engine().filter(|_| node.has_model(&model)) else {
        return Err(SequenceError::Unsupported(format!("this worker does not generate text with {model}")));
    };
    let Some(engine) = runner.built_in() else {
        let name = node.engine_name();
        return Err(SequenceError::Unsupported(format!("the engine {name} does not give out its sequences")));
    };
    let key = |name| SequenceKey { root, name };
    let reply = match operation {
        SequenceOperation::List => {
            let of_engine = call_engine(engine, move |engine| {
                (engine.sequences(root), engine.pins(Instant::now(), root))
            });
            let (sequences, pins) = of_engine.await?;
            let snapshots = blocking(node, move |node| node.snapshots.list(root)).await?;
            SequenceReply::List(SequenceList {
                sequences: latest(sequences),
                snapshots: latest(snapshots),
                pins: latest(pins),
            })
        }
        SequenceOperation::Save { sequence, medium } => {
            let key = key(sequence);
            let file = capture(node, engine, key.clone()).await?;
            blocking(node, move |node| node.snapshots.put(&key, medium, file))
                .await
                .map(SequenceReply::Saved)?
        }
        SequenceOperation::Fetch { sequence } => {
            let key = key(sequence);
            let saved = key.clone();
            let saved = blocking(node, move |node| node.snapshots.get(&saved)).await?;
            return Ok(SequenceAnswer::File(match saved {
                Some(file) => file,
                None => capture(node, engine, key).await?.into(),
            }));
        }
        SequenceOperation::Restore { snapshot, name } => {
            let saved = key(snapshot.clone());
            let file = blocking(node, move |node| node.snapshots.get(&saved)).await?;
            let what = format!("snapshot {snapshot}");
            let file = file.ok_or(SequenceError::Unknown { what })?;
            SequenceReply::Sequence(restore(node, engine, key(name), file).await?)
        }
        SequenceOperation::Upload { name, .. } => {
            let max_bytes = engine.load().kv_total + HEADER_BYTES;
            let file = body.read(max_bytes).await.map_err(|error| SequenceError::InvalidField {
                field: "body".to_owned(),
                reason: error.to_string(),
            })?;
            SequenceReply::Sequence(restore(node, engine, key(name), file.into()).await?)
        }
        SequenceOperation::Fork { sequence, name } => {
            let of = key(sequence);
            SequenceReply::Sequence(call_engine(engine, move |engine| engine.fork(&of, name)).await??)
        }
        SequenceOperation::Reset { sequence, keep } => {
            let key = key(sequence);
            SequenceReply::Sequence(call_engine(engine, move |engine| engine.reset(&key, keep)).await??)
        }
        SequenceOperation::Drop { sequence } => {
            let key = key(sequence);
            let what = format!("sequence {}", key.name);
            let named = key.clone();
            let existed = call_engine(engine, move |engine| engine.forget(&named)).await??;
            let saved = blocking(node, move |node| node.snapshots.remove(&key)).await?;
            match existed || saved {
                true => SequenceReply::Done,
                false => return Err(SequenceError::Unknown { what }),
            }
        }
        SequenceOperation::Pin { tokens, ttl_ms } => {
            let ttl = (ttl_ms > 0).then(|| Duration::from_millis(ttl_ms));
            let pinned = computed(engine, move |engine, reply| {
                engine.pin(Instant::now(), root, &tokens, ttl, reply);
            });
            SequenceReply::Pinned(pinned.await?)
        }
        SequenceOperation::Unpin { pin } => {
            call_engine(engine, move |engine| engine.unpin(Instant::now(), root, pin)).await??;
            SequenceReply::Done
        }
    };
    Ok(SequenceAnswer::Reply(reply))
}

/// Returns the snapshot file of a sequence in its current state.
async fn capture(
    node: &Arc<Node>,
    engine: &EngineHandle,
    key: SequenceKey,
) -> Result<Vec<u8>, SequenceError> {
    let capture = computed(engine, move |engine, reply| engine.save(&key, reply)).await?;
    blocking(node, move |_| {
        capture.into_snapshot().to_bytes().map_err(|error| {
            tracing::error!(%error, "cannot write a snapshot");
            SequenceError::Internal
        })
    })
    .await
}

async fn restore(
    node: &Arc<Node>,
    engine: &EngineHandle,
    key: SequenceKey,
    file: Arc<[u8]>,
) -> Result<SequenceInfo, SequenceError> {
    let origin = engine.origin();
    let snapshot = blocking(node, move |_| {
        Snapshot::from_bytes(&file, &origin)
            .map_err(|error| SequenceError::NotThisSnapshot(error.to_string()))
    });
    let snapshot = snapshot.await?;
    call_engine(engine, move |engine| engine.restore(key, &snapshot)).await?
}

/// Runs a call on the engine's thread that needs no step.
async fn call_engine<T: Send + 'static>(
    engine: &EngineHandle,
    call: impl FnOnce(&mut engine::engine::Engine) -> T + Send + 'static,
) -> Result<T, SequenceError> {
    engine.call(call).await.map_err(|_| SequenceError::Internal)
}

/// Runs a call on the engine's thread that may need steps before it replies.
async fn computed<T: Send + 'static>(
    engine: &EngineHandle,
    call: impl FnOnce(&mut engine::engine::Engine, Reply<T>) + Send + 'static,
) -> Result<T, SequenceError> {
    let (reply, answer) = oneshot::channel();
    call_engine(engine, move |engine| call(engine, reply)).await?;
    answer.await.unwrap_or(Err(SequenceError::Internal))
}

async fn blocking<T: Send + 'static>(
    node: &Arc<Node>,
    work: impl FnOnce(&Node) -> Result<T, SequenceError> + Send + 'static,
) -> Result<T, SequenceError> {
    let node = Arc::clone(node);
    tokio::task::spawn_blocking(move || work(&node)).await.unwrap_or(Err(SequenceError::Internal))
}

/// The last [`MAX_LISTED`] entries.
fn latest<T>(mut all: Vec<T>) -> Vec<T> {
    all.drain(..all.len().saturating_sub(MAX_LISTED));
    all
}
