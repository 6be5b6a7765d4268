//! `/api/pull`: waits until a model is ready. A model that is not offered is not downloaded: operators deploy models.

use super::load::{Readiness, Waiting};
use crate::AppState;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::ollama::{self, LINES, write_line};
use axum::Json;
use axum::body::Body;
use axum::extract::Request;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use dispatch::quota::Permit;
use futures::stream;
use serde_json::{Value, json};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

/// Interval of the lines of progress.
const LINE_EVERY: Duration = Duration::from_secs(1);
const FIELDS: [&str; 3] = ["model", "name", "stream"];

/// The state of a stream of progress.
enum Progress {
    Begins(Readiness, Permit),
    Waits(Waiting, Permit),
    Ends,
}

pub(super) async fn call(state: Arc<AppState>, request: Request) -> Result<Response, ApiError> {
    let (admitted, body) = crate::admit(&state, request).await?;
    let fields = Fields::parse(&body, &FIELDS)?;
    let name = ollama::model_name(&fields)?.ok_or_else(|| ApiError::field("model", "is missing"))?;
    let mut readiness = Readiness::of(&state, &admitted, Some(name)).map_err(|error| match error {
        ApiError::ModelNotFound(name) => ApiError::field(
            "model",
            format!("{name:?} is not offered here: an operator deploys it (`kvasir models deploy`)"),
        ),
        error => error,
    })?;
    if !fields.get("stream")?.unwrap_or(true) {
        readiness.wait().await?;
        return Ok(Json(status("success")).into_response());
    }
    let first = Progress::Begins(readiness, admitted.permit);
    let body = stream::unfold(first, |progress| async {
        let mut out = Vec::new();
        let next = match progress {
            Progress::Ends => return None,
            Progress::Begins(Readiness { waits: Some(waiting), .. }, permit) => {
                write_line(&mut out, &status("pulling manifest"));
                Progress::Waits(waiting, permit)
            }
            Progress::Begins(..) => {
                write_line(&mut out, &status("pulling manifest"));
                write_line(&mut out, &status("success"));
                Progress::Ends
            }
            Progress::Waits(mut waiting, permit) => {
                match tokio::time::timeout(LINE_EVERY, waiting.taken()).await {
                    Err(_) => {
                        write_line(&mut out, &status(&waiting.loading.progress().to_string()));
                        Progress::Waits(waiting, permit)
                    }
                    Ok(Ok(())) => {
                        write_line(&mut out, &status("success"));
                        Progress::Ends
                    }
                    Ok(Err(error)) => {
                        write_line(&mut out, &error.ollama_body());
                        Progress::Ends
                    }
                }
            }
        };
        Some((Ok::<_, Infallible>(out), next))
    });
    Ok(([(header::CONTENT_TYPE, LINES)], Body::from_stream(body)).into_response())
}

fn status(text: &str) -> Value {
    json!({ "status": text })
}
