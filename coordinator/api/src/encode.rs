//! Encoder requests: splits the texts over the model's workers and gathers the results in order.

use super::admitted::AdmittedRequest;
use super::answer::{ROUTE_HEADER, WORKER_HEADER};
use super::error::ApiError;
use super::loading::Loading;
use super::plan::Sources;
use super::{AppState, admit, spans};
use axum::Json;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue};
use axum::response::{IntoResponse, Response};
use dispatch::{EncodeJob, Encoded, Encoding, Payer};
use futures::future::try_join_all;
use proto::ids::{ModelId, RequestId};
use proto::message::{EncodeText, MAX_ENCODE_TEXTS};
use proto::operation::Operation;
use proto::trace::{Span, TraceContext};
use router::balancer::{Output, RouteRequest};
use serde::Serialize;
use std::sync::Arc;
use std::time::Instant;

/// Most texts in one call to a worker. The limits are small enough that several workers share a request, and
/// large enough that the overhead of a call is small. A longer text is a call of its own.
const MAX_CALL_TEXTS: usize = 32;
const MAX_CALL_TOKENS: usize = 512;
const _: () = assert!(MAX_CALL_TEXTS <= MAX_ENCODE_TEXTS);

/// A parsed encoder request.
#[derive(Debug)]
pub struct EncodePlan<S> {
    /// `Embed` or `Rerank`.
    pub operation: Operation,
    pub model: ModelId,
    pub texts: Vec<EncodeText>,
    /// How the response is written.
    pub shape: S,
}

/// The results of a request's texts.
#[derive(Debug)]
pub struct Gathered {
    /// The values of each text, in the order of the request.
    pub texts: Vec<Vec<f32>>,
    /// Input tokens of all texts.
    pub tokens: u64,
    /// Worker and routing reason of the first call.
    pub headers: HeaderMap,
}

/// Encodes the texts that `plan` reads from the body. `answer` builds the response from the vectors or
/// scores.
pub(super) async fn respond<S: Send + 'static, A: Serialize>(
    state: &Arc<AppState>,
    operation: &'static str,
    request: Request,
    plan: fn(&[u8], &Sources<'_>) -> Result<EncodePlan<S>, ApiError>,
    answer: impl FnOnce(S, &RequestId, ModelId, &Gathered) -> A + Send + 'static,
) -> Result<Response, ApiError> {
    let mut trace = spans::receive(operation, request.headers());
    let answered = async {
        state.dispatch.check_room()?;
        let (admitted, body) = admit(state, request).await?;
        if let Some(span) = &trace {
            span.part("receive", admitted.arrived);
        }
        let (id, read) = (admitted.id.clone(), Instant::now());
        let planned = state.plan(&admitted, None, move |sources| plan(&body, sources)).await?;
        let EncodePlan { operation: task, model, texts, shape } = planned;
        if let Some(span) = &mut trace {
            spans::encodes(span, operation, (&id, &model), texts.len(), read);
        }
        let tenant = Arc::clone(admitted.caller.tenant());
        let loading = Loading::of(&state.dispatch, &state.models, &model, state.load_wait);
        let gathering = gather(state, admitted, (task, &model), texts, trace.as_ref().map(Span::context));
        let gathered = match loading {
            None => gathering.await?,
            Some(loading) => match tokio::time::timeout_at(loading.until.into(), gathering).await {
                Ok(gathered) => gathered.map_err(|error| loading.explain(error))?,
                Err(_) => return Err(loading.too_long()),
            },
        };
        if let Some(span) = &mut trace {
            span.set("gen_ai.usage.input_tokens", gathered.tokens);
        }
        // Serializes in a turn, since there may be thousands of vectors.
        let write = move || {
            let model = model.to_name();
            Ok((gathered.headers.clone(), Json(answer(shape, &id, model, &gathered))).into_response())
        };
        state.planning.run(&tenant, write).await
    }
    .await;
    if let (Err(error), Some(span)) = (&answered, &mut trace) {
        spans::failed(span, error);
    }
    answered
}

/// Encodes `texts` at workers of `model`. `trace`: the parent span; `None` if the request is not recorded.
pub async fn gather(
    state: &AppState,
    admitted: AdmittedRequest,
    (operation, model): (Operation, &ModelId),
    texts: Vec<EncodeText>,
    trace: Option<TraceContext>,
) -> Result<Gathered, ApiError> {
    let jobs: Vec<EncodeJob> = (0u32..)
        .zip(split(texts))
        .map(|(part, texts)| {
            let request = RouteRequest {
                request_id: admitted.id.clone(),
                tenant: Arc::clone(admitted.caller.tenant()),
                model: model.clone(),
                operation: Some(operation),
                prompt_tokens: texts.iter().map(|text| text.tokens.len() as u32).sum(),
                output: Output::default(),
                images: false,
                // Encoders cache no prefixes.
                chain: [].into(),
                group: None,
                priority: admitted.priority(0),
                submitted: Instant::now(),
                deadline: admitted.deadline(state.request_timeout),
                trace,
            };
            let payer = Payer::new(admitted.caller.tenant(), admitted.caller.key_id(), model);
            EncodeJob { request: Arc::new(request), part, texts, payer }
        })
        .collect();
    let tokens = jobs.iter().map(|job| u64::from(job.request.prompt_tokens)).sum();
    state.charge(&admitted.permit, tokens)?;
    let named = |error: ApiError| match error {
        ApiError::NoWorker => ApiError::NotOffered { operation },
        error => error,
    };
    let encodings = state.dispatch.encode(jobs)?;
    // The first failure cancels the other calls.
    let all = try_join_all(encodings.into_iter().map(Encoding::run));
    let calls = tokio::select! {
        biased;
        calls = all => calls.map_err(|failure| named(failure.into()))?,
        () = admitted.caller.revoked() => return Err(ApiError::InvalidApiKey),
    };
    let queued = calls.iter().map(|call| call.queued).max().unwrap_or_default();
    let times = (queued, admitted.arrived.elapsed());
    state.metrics.encoded(model, times, tokens, trace.map(|trace| trace.trace));
    let headers = calls.first().map(route).unwrap_or_default();
    let texts: Vec<Vec<f32>> = calls.into_iter().flat_map(|call| call.texts).collect();
    if texts.iter().flatten().any(|value| !value.is_finite()) {
        tracing::error!(%model, request = %admitted.id, "a worker returned values that are not finite; the request fails");
        return Err(ApiError::NotFinite);
    }
    Ok(Gathered { texts, tokens, headers })
}

/// Splits a request into calls, in order.
fn split(texts: Vec<EncodeText>) -> Vec<Vec<EncodeText>> {
    let mut calls: Vec<Vec<EncodeText>> = Vec::new();
    let mut tokens = 0;
    for text in texts {
        let more = text.tokens.len();
        match calls.last_mut() {
            Some(call) if call.len() < MAX_CALL_TEXTS && tokens + more <= MAX_CALL_TOKENS => {
                tokens += more;
                call.push(text);
            }
            _ => {
                tokens = more;
                calls.push(vec![text]);
            }
        }
    }
    calls
}

fn route(call: &Encoded) -> HeaderMap {
    let mut headers = HeaderMap::new();
    let route = format!("reason={};predicted=0", call.reason.as_str());
    // By their types, names have only characters that headers allow.
    if let (Ok(worker), Ok(route)) =
        (HeaderValue::from_str(call.node.as_str()), HeaderValue::from_str(&route))
    {
        headers.insert(WORKER_HEADER, worker);
        headers.insert(ROUTE_HEADER, route);
    }
    headers
}

/// Refuses a text without tokens, or with more than the model's context.
pub fn check_length(field: &str, tokens: &[u32], limit: u32) -> Result<(), ApiError> {
    let (need, limit) = (tokens.len() as u64, u64::from(limit));
    match need {
        0 => Err(ApiError::field(field, "has no tokens")),
        need if need > limit => Err(ApiError::ContextLength { prompt: need, need, limit }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(len: usize) -> EncodeText {
        EncodeText { tokens: vec![1; len], segment_start: None }
    }

    fn lengths(lengths: &[usize]) -> Vec<Vec<usize>> {
        let calls = split(lengths.iter().map(|len| text(*len)).collect());
        calls.iter().map(|call| call.iter().map(|text| text.tokens.len()).collect()).collect()
    }

    #[test]
    fn a_request_is_split_in_order_by_texts_and_by_tokens() {
        assert_eq!(lengths(&[3]), [[3]]);
        assert_eq!(lengths(&[300, 212, 1]), [vec![300, 212], vec![1]]);
        assert_eq!(lengths(&[1, 5_000, 2]), [vec![1], vec![5_000], vec![2]]);
        let many = lengths(&[1; 70]);
        assert_eq!(many.iter().map(Vec::len).collect::<Vec<_>>(), [32, 32, 6]);
        assert_eq!(lengths(&[]), Vec::<Vec<usize>>::new());
    }

    #[test]
    fn a_text_fits_whole_or_not_at_all() {
        assert_eq!(check_length("input", &[1; 8], 8), Ok(()));
        let refused = check_length("input", &[1; 9], 8);
        assert_eq!(refused, Err(ApiError::ContextLength { prompt: 9, need: 9, limit: 8 }));
        assert_eq!(check_length("input", &[], 8), Err(ApiError::field("input", "has no tokens")));
    }
}
