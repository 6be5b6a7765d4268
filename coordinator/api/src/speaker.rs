//! `POST /v1/audio/speaker`: the vector of a speaker's voice, and whether two recordings are of one speaker.
//! The body is the recording's file, or a form with `file` and `reference`.

use super::admitted::AdmittedRequest;
use super::audio::{recorded, run_in_time};
use super::error::ApiError;
use super::operations::{COSINE_RULE, Query, is_cosine, seconds, session_headers};
use super::{AppState, admit_within, limits, spans};
use axum::Json;
use axum::extract::Request;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use dispatch::OperationJob;
use futures::stream;
use multer::Multipart;
use proto::ids::{ModelId, NodeId};
use proto::operation::{OpenedOperation, Operation, OperationOptions, SpeakerVector};
use proto::trace::Span;
use serde::Serialize;
use sound::Recording;
use std::convert::Infallible;
use std::sync::Arc;

/// A parsed request.
#[derive(Debug, Default, PartialEq)]
struct Call {
    file: Bytes,
    /// A recording to compare with.
    reference: Option<Bytes>,
    model: Option<ModelId>,
    backend: Option<String>,
    threshold: Option<f32>,
}

#[derive(Debug, Serialize)]
struct SpeakerResponse {
    object: &'static str,
    model: ModelId,
    backend: String,
    sample_rate: u32,
    samples: u64,
    duration_s: f64,
    embedding: Vec<f32>,
    #[serde(flatten)]
    verification: Option<Verification>,
}

/// Likeness of two recordings.
#[derive(Debug, Serialize)]
struct Verification {
    /// Cosine of the vectors.
    score: f32,
    same: bool,
    threshold: f32,
    reference_embedding: Vec<f32>,
}

pub(super) async fn call(state: Arc<AppState>, request: Request) -> Result<Response, ApiError> {
    let mut trace = spans::receive(Operation::Speaker.name(), request.headers());
    let answered = answer(&state, request, &mut trace).await;
    if let (Err(error), Some(span)) = (&answered, &mut trace) {
        spans::failed(span, error);
    }
    answered
}

async fn answer(
    state: &Arc<AppState>,
    request: Request,
    trace: &mut Option<Span>,
) -> Result<Response, ApiError> {
    let query = Query::read(request.uri())?;
    let (backend, threshold) = (query.backend(), query.cosine()?);
    let given = Call { model: query.model()?, backend, threshold, ..Call::default() };
    let boundary = boundary(request.headers())?;
    let (admitted, body) = admit_within(state, request, limits::MAX_FORM).await?;
    if let Some(span) = &trace {
        span.part("receive", admitted.arrived);
    }
    let Call { file, reference, model, backend, threshold } = match boundary {
        Some(boundary) => read(body, boundary, given).await?,
        None => Call { file: body, ..given },
    };
    let recording = recorded(state, &admitted, Operation::Speaker, ("file", file)).await?;
    let reference = match reference {
        Some(reference) => {
            Some(recorded(state, &admitted, Operation::Speaker, ("reference", reference)).await?)
        }
        None => None,
    };
    let (sample_rate, samples) = (recording.sample_rate, recording.samples());
    let served_by = (model, backend);
    let (worker, opened, vector) = embed(state, &admitted, ("file", recording), served_by, trace).await?;
    let verification = match reference {
        Some(reference) => {
            let served_by = (Some(opened.model.clone()), Some(opened.backend.clone()));
            let (_, _, other) = embed(state, &admitted, ("reference", reference), served_by, trace).await?;
            let score = vector.cosine(&other.values).ok_or(ApiError::Internal)?;
            let threshold = threshold.unwrap_or(vector.threshold);
            Some(Verification {
                score,
                same: score >= threshold,
                threshold,
                reference_embedding: other.values,
            })
        }
        None => None,
    };
    if let Some(span) = trace {
        spans::session_ended(span, samples, "finished", None);
    }
    let headers = session_headers(&worker, &opened);
    let answer = SpeakerResponse {
        object: Operation::Speaker.name(),
        model: opened.model,
        backend: opened.backend,
        sample_rate,
        samples,
        duration_s: seconds(samples, sample_rate),
        embedding: vector.values,
        verification,
    };
    Ok((headers, Json(answer)).into_response())
}

/// Computes the vector of a recording.
async fn embed(
    state: &Arc<AppState>,
    admitted: &AdmittedRequest,
    (field, recording): (&'static str, Recording),
    (model, backend): (Option<ModelId>, Option<String>),
    trace: &mut Option<Span>,
) -> Result<(NodeId, OpenedOperation, SpeakerVector), ApiError> {
    let duration = seconds(recording.samples(), recording.sample_rate);
    let Recording { sample_rate, pieces } = recording;
    let job = OperationJob {
        request_id: admitted.id.clone(),
        operation: Operation::Speaker,
        model,
        backend,
        sample_rate,
        options: OperationOptions::Default,
        trace: trace.as_ref().map(Span::context),
        tenant: Arc::clone(admitted.caller.tenant()),
        key: admitted.caller.key_id().map(str::to_owned),
    };
    let (worker, opened, results) = run_in_time(state, &job, admitted, &pieces, None).await?;
    if let Some(span) = trace {
        let session = (&admitted.id, &opened.model);
        spans::session_opened(span, Operation::Speaker, session, &worker, &opened.backend);
    }
    let too_short = || ApiError::field(field, format!("is {duration} s long; the model needs more"));
    Ok((worker, opened, results.speaker.ok_or_else(too_short)?))
}

/// The boundary of a form; `None` if the body is a recording itself.
fn boundary(headers: &HeaderMap) -> Result<Option<String>, ApiError> {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let lower = kind.to_ascii_lowercase();
    let wrong = |rule| ApiError::field("content-type", rule);
    if lower.starts_with("multipart/") {
        let rule = "a form is multipart/form-data with a boundary";
        return multer::parse_boundary(kind).map(Some).map_err(|_| wrong(rule));
    }
    match lower.starts_with("application/json") {
        true => Err(wrong("the body is the recording's file itself, or a form (multipart/form-data)")),
        false => Ok(None),
    }
}

/// Reads a form. Its fields precede those of the query.
async fn read(body: Bytes, boundary: String, mut call: Call) -> Result<Call, ApiError> {
    let mut form = Multipart::new(stream::iter([Ok::<_, Infallible>(body)]), boundary);
    let torn = |_| ApiError::field("body", "is cut off, or no form");
    let mut file = None;
    for fields in 0.. {
        let Some(field) = form.next_field().await.map_err(torn)? else { break };
        if fields == limits::MAX_FORM_FIELDS {
            let rule = format!("has more than {} fields", limits::MAX_FORM_FIELDS);
            return Err(ApiError::field("body", rule));
        }
        let name = field.name().unwrap_or_default().chars().take(64).collect::<String>();
        let bytes = field.bytes().await.map_err(torn)?;
        let shown = || String::from_utf8_lossy(&bytes).chars().take(64).collect::<String>();
        match name.as_str() {
            "file" if file.is_none() => file = Some(bytes),
            // A second file is the reference.
            "file" | "reference" if call.reference.is_none() => call.reference = Some(bytes),
            "file" | "reference" => return Err(ApiError::field(name, "at most two recordings are compared")),
            "model" => {
                let id = ModelId::new(shown()).map_err(|error| ApiError::ModelNotFound(error.text))?;
                call.model = Some(id);
            }
            "backend" => call.backend = Some(shown()),
            "threshold" => {
                let threshold = shown().trim().parse().ok().filter(is_cosine);
                let wrong = || ApiError::field("threshold", format!("{:?} is not {COSINE_RULE}", shown()));
                call.threshold = Some(threshold.ok_or_else(wrong)?);
            }
            _ => return Err(ApiError::field(name, "is not a known field")),
        }
    }
    call.file = file.ok_or_else(|| ApiError::field("file", "is missing: a recording"))?;
    Ok(call)
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::executor::block_on;

    fn form(fields: &[(&str, &str)]) -> Result<Call, ApiError> {
        let mut body = String::new();
        for (name, value) in fields {
            body += &format!("--XX\r\nContent-Disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n");
        }
        body += "--XX--\r\n";
        block_on(read(body.into(), "XX".to_owned(), Call::default()))
    }

    #[test]
    fn a_form_has_one_or_two_recordings() {
        let all = form(&[("file", "a"), ("reference", "b"), ("model", "resemblyzer"), ("threshold", "0.8")])
            .unwrap();
        assert_eq!((all.file.as_ref(), all.reference.as_deref()), (&b"a"[..], Some(&b"b"[..])));
        assert_eq!((all.model.unwrap().as_str(), all.threshold), ("resemblyzer", Some(0.8)));
        let twice = form(&[("file", "a"), ("file", "b")]).unwrap();
        assert_eq!((twice.file.as_ref(), twice.reference.as_deref()), (&b"a"[..], Some(&b"b"[..])));
        assert_eq!(form(&[("file", "a")]).unwrap().reference, None);
    }

    #[test]
    fn unsupported_fields_are_refused_by_name() {
        for (fields, name) in [
            (&[("reference", "b")][..], "file"),
            (&[("file", "a"), ("file", "b"), ("file", "c")], "file"),
            (&[("file", "a"), ("reference", "b"), ("reference", "c")], "reference"),
            (&[("file", "a"), ("threshold", "2")], "threshold"),
            (&[("file", "a"), ("threshold", "NaN")], "threshold"),
            (&[("file", "a"), ("language", "en")], "language"),
        ] {
            assert_eq!(form(fields).unwrap_err().param(), Some(name), "{fields:?}");
        }
        assert_eq!(form(&[("file", "a"), ("model", "../x")]).unwrap_err().code(), "model_not_found");
        let torn = block_on(read(Bytes::from_static(b"--XX\r\n"), "XX".to_owned(), Call::default()));
        assert_eq!(torn.unwrap_err().param(), Some("body"));
        let kind =
            |kind: &str| boundary(&HeaderMap::from_iter([(header::CONTENT_TYPE, kind.parse().unwrap())]));
        assert_eq!(kind("audio/wav"), Ok(None));
        assert_eq!(kind("multipart/form-data; boundary=XX"), Ok(Some("XX".to_owned())));
        for wrong in ["multipart/form-data", "application/json"] {
            assert_eq!(kind(wrong).unwrap_err().param(), Some("content-type"));
        }
    }
}
