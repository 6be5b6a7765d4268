//! Attributes of a request's trace span, named by OpenTelemetry's GenAI conventions.

use super::error::ApiError;
use super::plan::{GenerationPlan, Kind};
use super::shape::Usage;
use axum::http::HeaderMap;
use proto::ids::{ModelId, NodeId, RequestId};
use proto::operation::Operation;
use proto::trace::{self, Span, TRACEPARENT_HEADER};
use std::time::Instant;

pub(super) const EMBEDDINGS: &str = "embeddings";
/// Reranking; the conventions have no name for it.
pub(super) const RERANK: &str = "rerank";

/// Begins the span of a request. `None` if the request is not recorded.
pub(super) fn receive(operation: &'static str, headers: &HeaderMap) -> Option<Span> {
    let parent = || headers.get(TRACEPARENT_HEADER)?.to_str().ok();
    trace::receive(parent, || operation.into(), Instant::now())
}

/// Records a parsed generation request. `read`: when its body was read.
pub(super) fn planned(span: &mut Span, id: &RequestId, plan: &GenerationPlan, read: Instant) {
    let params = &plan.params;
    named(span, operation(plan.kind), id, &plan.served.id, read);
    span.set("gen_ai.request.choice.count", params.n);
    span.set("gen_ai.request.temperature", f64::from(params.sampling.temperature));
    span.set("gen_ai.request.top_p", f64::from(params.sampling.top_p));
    let max_tokens = plan.prompts.iter().map(|(_, max_tokens)| *max_tokens).max();
    span.set("gen_ai.request.max_tokens", max_tokens.unwrap_or_default());
}

/// Records a parsed encoder request. `read`: when its body was read.
pub(super) fn encodes(
    span: &mut Span,
    operation: &'static str,
    (id, model): (&RequestId, &ModelId),
    texts: usize,
    read: Instant,
) {
    named(span, operation, id, model, read);
    span.set("kvasir.texts", texts);
}

/// Records that a session of an operation was opened at a worker.
pub(super) fn session_opened(
    span: &mut Span,
    operation: Operation,
    (id, model): (&RequestId, &ModelId),
    worker: &NodeId,
    backend: &str,
) {
    names(span, operation.name(), id, model);
    span.set("kvasir.worker", worker.to_string());
    span.set("kvasir.backend", backend.to_owned());
}

/// Records the end of a session. `samples`: samples sent to the worker.
pub(super) fn session_ended(
    span: &mut Span,
    samples: u64,
    reason: &'static str,
    error: Option<&'static str>,
) {
    span.set("kvasir.samples", samples);
    span.set("kvasir.end", reason);
    if let Some(code) = error {
        span.fail(code);
    }
}

fn named(span: &mut Span, operation: &'static str, id: &RequestId, model: &ModelId, read: Instant) {
    span.part("tokenise", read);
    names(span, operation, id, model);
}

fn names(span: &mut Span, operation: &'static str, id: &RequestId, model: &ModelId) {
    span.rename(format!("{operation} {model}"));
    span.set("gen_ai.operation.name", operation);
    span.set("gen_ai.provider.name", "kvasir");
    span.set("gen_ai.request.model", model.to_string());
    span.set("kvasir.request_id", id.to_string());
}

/// Records a completed answer.
pub(super) fn answered(span: &mut Span, id: &str, model: &str, usage: &Usage, reasons: Vec<String>) {
    span.set("gen_ai.response.id", id.to_owned());
    span.set("gen_ai.response.model", model.to_owned());
    span.set("gen_ai.response.finish_reasons", reasons);
    span.set("gen_ai.usage.input_tokens", usage.prompt);
    span.set("gen_ai.usage.output_tokens", usage.completion);
    span.set("gen_ai.usage.cache_read.input_tokens", usage.cached);
}

/// Records an error response.
pub(super) fn failed(span: &mut Span, error: &ApiError) {
    span.fail(error.code());
}

pub(super) fn operation(kind: Kind) -> &'static str {
    match kind {
        Kind::Completion | Kind::OllamaGenerate => "text_completion",
        Kind::Chat | Kind::Responses | Kind::Messages | Kind::OllamaChat => "chat",
    }
}
