//! The common part of `/admin/v1/snapshots` and `/admin/v1/prefixes`: selects the tenant, finds the worker of
//! a sequence, and calls it.

use super::Ops;
use api::auth::Caller;
use api::error::ApiError;
use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use dispatch::models::OfferedModel;
use proto::block::{BlockId, Scope};
use proto::ids::{ModelId, NodeId, RequestId};
use proto::sequence::{SequenceName, SequenceOperation, SequenceReply, SequenceRequest};
use proto::served_model::ServedModel;
use serde::Deserialize;
use std::sync::Arc;
use std::time::Duration;
use transport::{SequenceBytes, SequenceExchange, StreamCode};

/// Time limit of an operation; some compute a long prefix.
pub(super) const OPERATION_LIMIT: Duration = Duration::from_secs(600);

/// Query fields of all requests.
#[derive(Debug, Clone, Default, Deserialize)]
pub(super) struct Query {
    /// The model; optional if there is only one.
    pub(super) model: Option<String>,
    /// The tenant; by default the caller's. Only administrators reach these handlers, so any tenant is
    /// allowed.
    pub(super) tenant: Option<String>,
    /// Index of the choice of the request.
    pub(super) choice: Option<u32>,
    pub(super) worker: Option<String>,
    /// The name of a new sequence.
    pub(super) id: Option<String>,
}

impl<S: Send + Sync> FromRequestParts<S> for Query {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let query = axum::extract::Query::<Self>::from_request_parts(parts, state).await;
        query.map(|query| query.0).map_err(|error| ApiError::field("query", error.body_text()))
    }
}

/// The sequences of one tenant and model.
#[derive(Debug)]
pub(super) struct SequenceAccess<'a> {
    ops: &'a Ops,
    pub(super) model: Arc<OfferedModel>,
    pub(super) served: ServedModel,
    pub(super) root: BlockId,
}

impl<'a> SequenceAccess<'a> {
    pub(super) fn new(ops: &'a Ops, caller: &Caller, query: &Query) -> Result<Self, ApiError> {
        let found = match &query.model {
            Some(name) => ops.models.get(name),
            None => ops.models.only(),
        };
        let model = found.ok_or_else(|| match &query.model {
            Some(name) => ApiError::ModelNotFound(name.chars().take(ModelId::MAX_LEN).collect()),
            None => ApiError::field("model", "is missing"),
        })?;
        let served = ops.dispatch.model(&model.id).ok_or(ApiError::NoWorker)?;
        if !served.task.generates() {
            return Err(ApiError::field("model", "does not generate text, so it has no sequences"));
        }
        let root = ops.cluster_key.root(Scope {
            salt: &ops.keys.salt(query.tenant.as_deref().unwrap_or(caller.tenant())),
            model_digest: &served.model_digest,
            tokenizer_digest: &served.tokenizer_digest,
            adapter: b"",
        });
        Ok(Self { ops, model, served, root })
    }

    /// The workers that serve the model, the likely holder of `sequence` first; or only the one that the
    /// query names.
    pub(super) fn workers(
        &self,
        query: &Query,
        sequence: Option<&SequenceName>,
    ) -> Result<Vec<NodeId>, ApiError> {
        let mut workers = self.ops.dispatch.serving(&self.model.id, sequence.map(|name| (self.root, name)));
        if let Some(only) = &query.worker {
            workers.retain(|node| node.as_str() == only);
            if workers.is_empty() {
                return Err(ApiError::field("worker", "no worker of this name serves the model"));
            }
        }
        if workers.is_empty() { Err(ApiError::NoWorker) } else { Ok(workers) }
    }

    /// Runs an operation at one worker.
    pub(super) async fn call_worker(
        &self,
        node: &NodeId,
        operation: SequenceOperation,
    ) -> Result<(SequenceReply, SequenceBytes), ApiError> {
        let operation = async { answer(self.open(node, operation).await?).await };
        tokio::time::timeout(OPERATION_LIMIT, operation).await.unwrap_or(Err(ApiError::DeadlineExceeded))
    }

    /// Begins an operation for which the caller will send bytes.
    pub(super) async fn open(
        &self,
        node: &NodeId,
        operation: SequenceOperation,
    ) -> Result<SequenceExchange, ApiError> {
        let model = self.model.id.clone();
        let request = SequenceRequest { model, root: self.root, operation };
        let opened = self.ops.dispatch.open_sequence(node, &request).await.ok_or(ApiError::WorkerLost)?;
        opened.map_err(lost)
    }

    /// Runs an operation at the first worker that has the sequence.
    pub(super) async fn call_holder(
        &self,
        query: &Query,
        sequence: &SequenceName,
        operation: &SequenceOperation,
    ) -> Result<(NodeId, SequenceReply, SequenceBytes), ApiError> {
        let mut refusal = ApiError::Unknown { what: format!("sequence {sequence}") };
        for node in self.workers(query, Some(sequence))? {
            match self.call_worker(&node, operation.clone()).await {
                Ok((reply, bytes)) => return Ok((node, reply, bytes)),
                Err(ApiError::Unknown { .. }) => {}
                // Another worker may still have it.
                Err(error @ (ApiError::WorkerLost | ApiError::Refused { .. })) => refusal = error,
                Err(error) => return Err(error),
            }
        }
        Err(refusal)
    }

    /// Waits until the prefix index has applied what the worker has announced so far.
    pub(super) async fn catch_up(&self, node: &NodeId) {
        if let Err(why) = self.ops.dispatch.catch_up(node).await {
            // The operation is complete anyway: only requests arriving now may be routed elsewhere.
            tracing::warn!(%node, why, "the prefix index has not yet applied the changes of an operation on a sequence");
        }
    }

    /// Records that a worker has a sequence of this name.
    pub(super) fn note(&self, name: SequenceName, node: &NodeId) {
        self.ops.dispatch.note_served(self.root, &name, node);
    }
}

/// The worker's reply; a refusal is an error.
pub(super) async fn answer(exchange: SequenceExchange) -> Result<(SequenceReply, SequenceBytes), ApiError> {
    match exchange.answer().await.map_err(lost)? {
        (SequenceReply::Failed(error), _) => Err(error.into()),
        answered => Ok(answered),
    }
}

fn lost(error: transport::Error) -> ApiError {
    tracing::info!(%error, "an operation on a sequence was cut off by its worker");
    match error {
        transport::Error::StreamEnded(StreamCode::UnknownKind) => ApiError::Refused {
            why: "the worker's version does not support operations on sequences".to_owned(),
        },
        transport::Error::Codec(error) => ApiError::field("body", error.to_string()),
        _ => ApiError::WorkerLost,
    }
}

/// The sequence named by the path and the query.
pub(super) fn named(id: String, query: &Query) -> Result<SequenceName, ApiError> {
    let request = RequestId::new(id).map_err(|error| ApiError::field("id", error.rule))?;
    Ok(SequenceName { request, choice: query.choice.unwrap_or(0) })
}
