//! The paths of Ollama's API besides those that generate, so that its clients work unchanged.

mod embed;
pub(super) mod load;
mod models;
mod pull;

use super::error::ApiError;
use super::{AppState, Kind, encode, generate, spans};
use axum::Json;
use axum::extract::Request;
use axum::http::Method;
use axum::response::{IntoResponse, Response};
use serde_json::json;
use std::sync::Arc;

/// The version of Ollama whose API this is. Clients refuse versions before the one that they were written for.
const VERSION: &str = "0.13.5";

/// The paths of Ollama's API.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Route {
    /// Tells that a server is there.
    Root,
    Chat,
    /// An answer to a prompt.
    Generate,
    /// Texts as vectors.
    Embed,
    /// A text as a vector, the older form.
    Embeddings,
    /// All models.
    Tags,
    /// Facts of a model.
    Show,
    /// Models that workers have ready.
    Ps,
    Version,
    /// Waits until a model is ready.
    Pull,
    Push,
    Create,
    Copy,
    Delete,
    /// A file of a model to create.
    Blob,
}

impl Route {
    pub fn path(self) -> &'static str {
        match self {
            Self::Root => "/",
            Self::Chat => "/api/chat",
            Self::Generate => "/api/generate",
            Self::Embed => "/api/embed",
            Self::Embeddings => "/api/embeddings",
            Self::Tags => "/api/tags",
            Self::Show => "/api/show",
            Self::Ps => "/api/ps",
            Self::Version => "/api/version",
            Self::Pull => "/api/pull",
            Self::Push => "/api/push",
            Self::Create => "/api/create",
            Self::Copy => "/api/copy",
            Self::Delete => "/api/delete",
            Self::Blob => "/api/blobs/{digest}",
        }
    }

    /// The methods besides HEAD and OPTIONS.
    pub fn methods(self) -> &'static [Method] {
        match self {
            Self::Root | Self::Tags | Self::Ps | Self::Version => &[Method::GET],
            Self::Delete => &[Method::DELETE],
            _ => &[Method::POST],
        }
    }
}

/// Serves a request to a path.
pub(super) async fn call(state: Arc<AppState>, route: Route, request: Request) -> Result<Response, ApiError> {
    match route {
        Route::Root => Ok("Ollama is running".into_response()),
        Route::Version => Ok(Json(json!({"version": VERSION})).into_response()),
        Route::Chat => generate(state, Kind::OllamaChat, request).await,
        Route::Generate => generate(state, Kind::OllamaGenerate, request).await,
        Route::Embed => {
            encode::respond(&state, spans::EMBEDDINGS, request, embed::plan, embed::Given::answer).await
        }
        Route::Embeddings => {
            encode::respond(&state, spans::EMBEDDINGS, request, embed::plan_one, embed::Given::one).await
        }
        Route::Tags => models::tags(&state, &request),
        Route::Ps => models::running(&state, &request),
        Route::Show => models::show(&state, request).await,
        Route::Pull => pull::call(state, request).await,
        Route::Push | Route::Create | Route::Copy | Route::Delete | Route::Blob => Err(ApiError::Refused {
            why: format!(
                "{} is not served: operators add and remove models (`kvasir models deploy` and `undeploy`)",
                route.path()
            ),
        }),
    }
}
