//! The endpoints of the API port: their paths, methods and handlers.

use super::error::ApiError;
use super::ollama_api::Route;
use super::plan::Kind;
use super::responses::stored;
use super::transcribe::Task;
use super::{
    AppState, audio, batches, count_tokens, detokenize, generate, health, lora, model_list, ollama_api,
    realtime, speaker, speech, tokenize, transcribe, uploads,
};
use axum::extract::Request;
use axum::handler::Handler;
use axum::http::{HeaderMap, HeaderName, Method};
use axum::response::{IntoResponse, Response};
use futures::future::BoxFuture;
use proto::operation::Operation;
use std::sync::Arc;

/// Sent by Anthropic's clients with every request.
const ANTHROPIC_VERSION: HeaderName = HeaderName::from_static("anthropic-version");

const GET: &[Method] = &[Method::GET];
const POST: &[Method] = &[Method::POST];
const GET_AND_POST: &[Method] = &[Method::GET, Method::POST];
const GET_AND_DELETE: &[Method] = &[Method::GET, Method::DELETE];

/// All endpoints of the API port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Endpoint {
    /// Whether requests can be served, for routers in front of this port. Probes use the ops port.
    Health,
    Models,
    Model,
    /// Completions of text or tokens.
    Completions,
    Chat,
    /// OpenAI's Responses API.
    Responses,
    Response,
    ResponseInput,
    CancelResponse,
    /// Anthropic's Messages API.
    Messages,
    /// The number of tokens of an Anthropic prompt.
    CountTokens,
    Embeddings,
    /// Ranks documents by relevance to a query.
    Rerank,
    /// Loads a LoRA adapter.
    LoadLora,
    UnloadLora,
    /// Uploads and lists files.
    Files,
    File,
    FileContent,
    /// Creates and lists batches.
    Batches,
    Batch,
    CancelBatch,
    /// Text to tokens.
    Tokenize,
    /// Tokens to text.
    Detokenize,
    /// The text of a recording.
    Transcriptions,
    /// The text of a recording, translated into English.
    Translations,
    Speech,
    /// An operation on a recording.
    Audio(Operation),
    /// A session of an operation, over a WebSocket.
    Realtime(Operation),
    /// Ollama's API.
    Ollama(Route),
}

impl Endpoint {
    pub const ALL: [Self; 52] = [
        Self::Health,
        Self::Models,
        Self::Model,
        Self::Completions,
        Self::Chat,
        Self::Responses,
        Self::Response,
        Self::ResponseInput,
        Self::CancelResponse,
        Self::Messages,
        Self::CountTokens,
        Self::Embeddings,
        Self::Rerank,
        Self::LoadLora,
        Self::UnloadLora,
        Self::Files,
        Self::File,
        Self::FileContent,
        Self::Batches,
        Self::Batch,
        Self::CancelBatch,
        Self::Tokenize,
        Self::Detokenize,
        Self::Transcriptions,
        Self::Translations,
        Self::Speech,
        Self::Audio(Operation::Vad),
        Self::Audio(Operation::TurnDetection),
        Self::Audio(Operation::Wakeword),
        Self::Audio(Operation::Speaker),
        Self::Audio(Operation::Diarization),
        Self::Realtime(Operation::Vad),
        Self::Realtime(Operation::TurnDetection),
        Self::Realtime(Operation::Wakeword),
        Self::Realtime(Operation::Speaker),
        Self::Realtime(Operation::Diarization),
        Self::Realtime(Operation::Asr),
        Self::Ollama(Route::Root),
        Self::Ollama(Route::Chat),
        Self::Ollama(Route::Generate),
        Self::Ollama(Route::Embed),
        Self::Ollama(Route::Embeddings),
        Self::Ollama(Route::Tags),
        Self::Ollama(Route::Show),
        Self::Ollama(Route::Ps),
        Self::Ollama(Route::Version),
        Self::Ollama(Route::Pull),
        Self::Ollama(Route::Push),
        Self::Ollama(Route::Create),
        Self::Ollama(Route::Copy),
        Self::Ollama(Route::Delete),
        Self::Ollama(Route::Blob),
    ];

    pub fn path(self) -> &'static str {
        match self {
            Self::Health => "/health",
            Self::Models => "/v1/models",
            Self::Model => "/v1/models/{model}",
            Self::Completions => "/v1/completions",
            Self::Chat => "/v1/chat/completions",
            Self::Responses => "/v1/responses",
            Self::Response => "/v1/responses/{response}",
            Self::ResponseInput => "/v1/responses/{response}/input_items",
            Self::CancelResponse => "/v1/responses/{response}/cancel",
            Self::Messages => "/v1/messages",
            Self::CountTokens => "/v1/messages/count_tokens",
            Self::Embeddings => "/v1/embeddings",
            Self::Rerank => "/v1/rerank",
            Self::LoadLora => "/v1/load_lora_adapter",
            Self::UnloadLora => "/v1/unload_lora_adapter",
            Self::Files => "/v1/files",
            Self::File => "/v1/files/{file}",
            Self::FileContent => "/v1/files/{file}/content",
            Self::Batches => "/v1/batches",
            Self::Batch => "/v1/batches/{batch}",
            Self::CancelBatch => "/v1/batches/{batch}/cancel",
            Self::Tokenize => "/tokenize",
            Self::Detokenize => "/detokenize",
            Self::Transcriptions => "/v1/audio/transcriptions",
            Self::Translations => "/v1/audio/translations",
            Self::Speech => "/v1/audio/speech",
            Self::Audio(Operation::TurnDetection) => "/v1/audio/turn_detection",
            Self::Audio(Operation::Wakeword) => "/v1/audio/wakeword",
            Self::Audio(Operation::Speaker) => "/v1/audio/speaker",
            Self::Audio(Operation::Diarization) => "/v1/audio/diarization",
            Self::Audio(_) => "/v1/audio/vad",
            Self::Realtime(Operation::TurnDetection) => "/v1/realtime/turn_detection",
            Self::Realtime(Operation::Wakeword) => "/v1/realtime/wakeword",
            Self::Realtime(Operation::Speaker) => "/v1/realtime/speaker",
            Self::Realtime(Operation::Diarization) => "/v1/realtime/diarization",
            Self::Realtime(Operation::Asr) => "/v1/realtime/asr",
            Self::Realtime(_) => "/v1/realtime/vad",
            Self::Ollama(route) => route.path(),
        }
    }

    /// The methods besides HEAD and OPTIONS.
    pub fn methods(self) -> &'static [Method] {
        match self {
            Self::Health | Self::Models | Self::Model | Self::Realtime(_) => GET,
            Self::FileContent | Self::Batch | Self::ResponseInput => GET,
            Self::Files | Self::Batches => GET_AND_POST,
            Self::File | Self::Response => GET_AND_DELETE,
            Self::Ollama(route) => route.methods(),
            _ => POST,
        }
    }

    /// The value of the header `Allow`.
    pub(super) fn allow(self) -> &'static str {
        match self {
            Self::Realtime(_) => "GET, OPTIONS",
            Self::Files | Self::Batches => "GET, HEAD, POST, OPTIONS",
            Self::File | Self::Response => "GET, HEAD, DELETE, OPTIONS",
            _ if self.methods() == GET => "GET, HEAD, OPTIONS",
            _ if self.methods() == [Method::DELETE] => "DELETE, OPTIONS",
            _ => "POST, OPTIONS",
        }
    }

    /// The error for a method that the path does not have.
    pub(super) fn method_not_allowed(self) -> ApiError {
        ApiError::Method { allow: self.allow() }
    }

    /// Whether errors have Anthropic's form.
    pub(super) fn is_anthropic(self, headers: &HeaderMap) -> bool {
        match self {
            Self::Messages | Self::CountTokens => true,
            Self::Models | Self::Model => headers.contains_key(ANTHROPIC_VERSION),
            _ => false,
        }
    }

    pub(super) fn is_ollama(self) -> bool {
        matches!(self, Self::Ollama(_))
    }

    /// Whether the endpoint has this method, besides OPTIONS.
    pub(super) fn has_method(self, method: &Method) -> bool {
        let head = *method == Method::HEAD && !matches!(self, Self::Realtime(_));
        self.methods().contains(if head { &Method::GET } else { method })
    }

    /// Calls the endpoint's handler.
    pub(super) fn handle(self, state: Arc<AppState>, request: Request) -> BoxFuture<'static, Response> {
        match self {
            Self::Health => health.call(request, state),
            Self::Models => model_list::list.call(request, state),
            Self::Model => model_list::retrieve.call(request, state),
            Self::Completions => respond(generate(state, Kind::Completion, request)),
            Self::Chat => respond(generate(state, Kind::Chat, request)),
            Self::Responses => respond(generate(state, Kind::Responses, request)),
            Self::Response => respond(stored::retrieve_or_delete(state, request)),
            Self::ResponseInput => respond(stored::input_items(state, request)),
            Self::CancelResponse => respond(stored::cancel(state, request)),
            Self::Messages => respond(generate(state, Kind::Messages, request)),
            Self::CountTokens => respond(count_tokens(state, request)),
            Self::Embeddings => respond(super::embeddings(state, request)),
            Self::Rerank => respond(super::rerank(state, request)),
            Self::LoadLora => respond(lora::call(state, lora::Change::Load, request)),
            Self::UnloadLora => respond(lora::call(state, lora::Change::Unload, request)),
            Self::Files => respond(uploads::list_or_upload(state, request)),
            Self::File => respond(uploads::retrieve_or_delete(state, request)),
            Self::FileContent => respond(uploads::content(state, request)),
            Self::Batches => respond(batches::list_or_create(state, request)),
            Self::Batch => respond(batches::retrieve(state, request)),
            Self::CancelBatch => respond(batches::cancel(state, request)),
            Self::Tokenize => respond(tokenize(state, request)),
            Self::Detokenize => respond(detokenize(state, request)),
            Self::Transcriptions => respond(transcribe::call(state, Task::Transcribe, request)),
            Self::Translations => respond(transcribe::call(state, Task::Translate, request)),
            Self::Speech => respond(speech::call(state, request)),
            Self::Audio(Operation::Speaker) => respond(speaker::call(state, request)),
            Self::Audio(operation) => respond(audio::call(state, operation, request)),
            Self::Realtime(operation) => respond(realtime::open(state, operation, request)),
            Self::Ollama(route) => respond(ollama_api::call(state, route, request)),
        }
    }
}

fn respond(
    handler: impl Future<Output = Result<Response, ApiError>> + Send + 'static,
) -> BoxFuture<'static, Response> {
    Box::pin(async { handler.await.into_response() })
}
