//! Requests that only load a model: a chat without messages, or a prompt without text.
//!
//! A model that no worker has ready is loaded for a request that waits. So such a request waits, for one token.

use crate::AppState;
use crate::admitted::AdmittedRequest;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::kind::Kind;
use crate::loading::Loading;
use crate::ollama::{self, now};
use crate::plan::{self, Effort, Sources, Unplanned, named_model};
use axum::Json;
use axum::response::{IntoResponse, Response};
use dispatch::{Event, Generation};
use serde_json::{Map, Value, json};
use std::sync::Arc;
use std::time::Instant;

const FIELDS: [&str; 6] = ["model", "name", "messages", "prompt", "images", "keep_alive"];

/// A request that asks for no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LoadRequest {
    chat: bool,
    /// Whether Ollama would unload the model. Here models are for all clients, and stay.
    unload: bool,
}

/// The load request in `body`, if it is one.
pub(crate) fn requested(kind: Kind, body: &[u8]) -> Result<Option<LoadRequest>, ApiError> {
    if !kind.is_ollama() {
        return Ok(None);
    }
    let fields = Fields::parse(body, &FIELDS)?;
    let chat = kind == Kind::OllamaChat;
    let empty = |name| {
        fields
            .raw(name)
            .is_none_or(|raw| matches!(raw, "\"\"") || raw.split_whitespace().collect::<String>() == "[]")
    };
    let loads = if chat { empty("messages") } else { empty("prompt") && empty("images") };
    let unload = fields.raw("keep_alive").map(|raw| raw.trim_matches('"'));
    let unload = unload.is_some_and(|time| matches!(time, "0" | "0.0" | "0s" | "0m" | "0h"));
    Ok(loads.then_some(LoadRequest { chat, unload }))
}

impl LoadRequest {
    /// Answers once the model is ready.
    pub(crate) async fn answer(
        self,
        state: &Arc<AppState>,
        admitted: AdmittedRequest,
        body: &[u8],
    ) -> Result<Response, ApiError> {
        let fields = Fields::parse(body, &FIELDS)?;
        let mut readiness = Readiness::of(state, &admitted, ollama::model_name(&fields)?)?;
        if !self.unload {
            readiness.wait().await?;
        }
        let mut answer = Map::from_iter([
            ("model".to_owned(), Value::from(readiness.model)),
            ("created_at".to_owned(), now().into()),
        ]);
        match self.chat {
            true => answer.insert("message".into(), json!({"role": "assistant", "content": ""})),
            false => answer.insert("response".into(), "".into()),
        };
        answer.insert("done_reason".into(), if self.unload { "unload" } else { "load" }.into());
        answer.insert("done".into(), true.into());
        Ok(Json(answer).into_response())
    }
}

/// Whether a model is ready, or what waits for it.
pub(super) struct Readiness {
    /// The model's name.
    pub(super) model: String,
    /// `None` if a worker has the model.
    pub(super) waits: Option<Waiting>,
}

/// A model that is not ready.
pub(super) struct Waiting {
    pub(super) loading: Loading,
    /// The request for which it is loaded.
    pub(super) generation: Generation,
}

impl Readiness {
    pub(super) fn of(
        state: &Arc<AppState>,
        admitted: &AdmittedRequest,
        name: Option<String>,
    ) -> Result<Self, ApiError> {
        let caller = &admitted.caller;
        let named = |sources: &Sources<'_>| {
            named_model(name.clone(), &Fields::parse(b"{}", &[])?, sources)
                .map(|(model, served)| (model, served.map(|served| served.id)))
        };
        let (model, served) = state.with_sources(caller, None, named)?;
        let id = served.unwrap_or_else(|| model.id.clone());
        let name = id.name().to_owned();
        let Some(loading) = Loading::of(&state.dispatch, &state.models, &id, state.load_wait) else {
            let ready = state.dispatch.serves(&id);
            return if ready { Ok(Self { model: name, waits: None }) } else { Err(ApiError::NoWorker) };
        };
        let body = json!({"model": id.as_str(), "prompt": [0], "max_tokens": 1}).to_string();
        let deadline = Instant::now() + state.request_timeout;
        let planned = |sources: &Sources<'_>| {
            let effort = Effort::Full { counted: false };
            let plan = plan::generation(Kind::Completion, body.as_bytes(), sources, effort)?;
            Ok(state.jobs(&plan, caller, (&admitted.id, None), None, deadline))
        };
        let jobs = state.with_sources(caller, None, planned).map_err(|error| match error {
            Unplanned::Refused(error) => error,
            Unplanned::TooLong { .. } => ApiError::Internal,
        })?;
        state.charge(&admitted.permit, 1)?;
        let generations = state.dispatch.generate(jobs).map_err(|error| loading.explain(error.into()))?;
        let generation = generations.into_iter().next().ok_or(ApiError::Internal)?;
        Ok(Self { model: name, waits: Some(Waiting { loading, generation }) })
    }

    /// Waits until the model is ready, no longer than requests wait that are not streamed.
    pub(super) async fn wait(&mut self) -> Result<(), ApiError> {
        let Some(mut waiting) = self.waits.take() else { return Ok(()) };
        let until = waiting.loading.until.into();
        tokio::time::timeout_at(until, waiting.taken())
            .await
            .unwrap_or_else(|_| Err(waiting.loading.too_long()))
    }
}

impl Waiting {
    /// Waits until a worker takes the request: it has the model. Cancel-safe.
    pub(super) async fn taken(&mut self) -> Result<(), ApiError> {
        match self.generation.next().await {
            Some(Ok(Event::Started(_) | Event::Tokens(_) | Event::Finished(_))) => Ok(()),
            Some(Err(failure)) => Err(self.loading.explain(failure.into())),
            None => Err(ApiError::Internal),
        }
    }
}
