//! The API port: OpenAI's API, Anthropic's Messages API and Ollama's API, authenticated by API key.
//!
//! A request passes, in this order: the connection's limits (in the crate `coordinator`), `serve` for
//! all routes (request id, authentication, deny by default), [`limits::read`], [`plan`], the dispatch,
//! and [`answer`].
//!
//! Guarantees: every request except a preflight is authenticated before its body is read, and every response
//! has a request id. An error names the field. Bodies are bounded, and the planning threads are shared by the
//! tenants in turns.
//! Must not contain: listeners and connections (the crate `coordinator`), the choice of a worker, model
//! files.

mod admitted;
pub mod answer;
mod audio;
pub mod auth;
pub mod batch_runner;
pub mod batches;
mod blocks;
mod chat;
mod content_encoding;
pub mod cors;
pub mod documents;
pub mod embeddings;
pub mod encode;
pub mod endpoint;
pub mod error;
pub mod fields;
pub mod grammar;
pub mod http_ext;
pub mod image_urls;
pub mod images;
mod kind;
mod languages;
pub mod limits;
mod loading;
pub mod lora;
mod messages;
mod model_list;
mod ollama;
mod ollama_api;
pub mod operations;
pub mod origin;
pub mod params;
pub mod plan;
pub mod planning_threads;
mod progress;
pub mod prompt;
mod prompt_scores;
mod raw;
pub mod realtime;
pub mod request_fields;
pub mod rerank;
mod responses;
#[cfg(test)]
mod round_trip;
mod schema;
pub mod shape;
mod spans;
mod speaker;
mod speech;
pub mod tools;
mod transcribe;
mod uploads;

use admitted::{AdmittedRequest, Background};
use answer::{CountsItself, ResponseStream};
use auth::{Caller, Keys};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::any;
use axum::{Json, Router};
use bytes::Bytes;
use cors::Cors;
use dispatch::metrics::Metrics;
use dispatch::models::Models;
use dispatch::quota::Permit;
use dispatch::random::random_u64;
use dispatch::{Dispatch, GenerationJob, Payer};
use documents::Popularity;
use encode::Gathered;
pub use endpoint::Endpoint;
use error::ApiError;
use image_urls::{Fetched, ImageUrls};
use loading::Loading;
use messages::MessageWriter;
use ollama::OllamaWriter;
pub use ollama_api::Route;
use origin::from_another_site;
use plan::{Effort, GenerationPlan, Kind, Sources, Unplanned};
use planning_threads::PlanningThreads;
use proto::block::Scope;
use proto::ids::{GroupId, InvalidId, ModelId, RequestId};
use proto::trace::{Span, TraceContext};
use responses::ResponseWriter;
use responses::stored::{Keep, continued};
use router::admission::BACKGROUND;
use router::balancer::{Output, RouteRequest};
use router::chain_memo::ChainMemo;
use router::routing::demand::CommonKey;
use serde_json::{Value, json};
use shape::{ResponseShape, Writer};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The client's request id; generated if the client sends none.
pub const REQUEST_ID_HEADER: HeaderName = HeaderName::from_static("x-request-id");
/// The client's id for a group of requests with a common prefix that arrive together.
pub const GROUP_HEADER: HeaderName = HeaderName::from_static("x-kvasir-group");
/// The header in which Anthropic's clients expect the request id.
const ANTHROPIC_ID_HEADER: HeaderName = HeaderName::from_static("request-id");

/// Status in metrics of a request whose client disconnected before the end of its answer.
const CLIENT_CLOSED: u16 = 499;

/// State shared by all handlers of the API port.
#[derive(Debug)]
pub struct AppState {
    pub dispatch: Arc<Dispatch>,
    pub models: Arc<Models>,
    pub keys: Arc<Keys>,
    pub chains: Arc<ChainMemo>,
    pub metrics: Arc<Metrics>,
    /// Request counts of documents.
    pub popularity: Popularity,
    /// Files and batches of the tenants.
    pub batches: batches::Batches,
    /// Fetches images at addresses. `None`: none are fetched.
    pub image_urls: Option<ImageUrls>,
    /// Bytes of images in running requests.
    pub images: images::HeldImages,
    /// Limits concurrent planning and takes the tenants in turn.
    pub planning: Arc<PlanningThreads>,
    /// Origins whose pages may send requests from browsers.
    pub cors: Cors,
    /// Records operators' changes.
    pub audit: Arc<dyn lora::AuditLog>,
    /// Time limit of a request.
    pub request_timeout: Duration,
    /// How long a request that is not streamed waits for its model to be loaded.
    pub load_wait: Duration,
    /// Silence after which a stream of events gets a comment.
    pub stream_silence: Duration,
    /// Whether Ollama's API is served.
    pub ollama: bool,
    /// Limits on the number and the length of sessions.
    pub realtime: realtime::SessionLimits,
    /// Seconds since 1970 at start.
    pub started: u64,
}

/// All routes of the port.
pub fn router(state: &Arc<AppState>) -> Router {
    let unknown = |State(state), request| serve(state, None, request);
    let unknown = Router::new().fallback(unknown).with_state(Arc::clone(state));
    let mut endpoints = Endpoint::ALL.to_vec();
    endpoints.retain(|endpoint| state.ollama || !endpoint.is_ollama());
    routes(state, &endpoints).fallback_service(unknown)
}

/// The routes of `endpoints`. Other methods than the endpoint's are also served, with an error.
pub fn routes<S: Clone + Send + Sync + 'static>(state: &Arc<AppState>, endpoints: &[Endpoint]) -> Router<S> {
    let route = |router: Router<_>, &endpoint: &Endpoint| {
        let handler = move |State(state), request| serve(state, Some(endpoint), request);
        // The name of a model may contain slashes.
        router.route(&endpoint.path().replace("{model}", "{*model}"), any(handler))
    };
    endpoints.iter().fold(Router::new(), route).with_state(Arc::clone(state))
}

/// Counts a request when it ends; as [`CLIENT_CLOSED`] if it is dropped before.
struct Tally<'a> {
    metrics: &'a Metrics,
    path: &'static str,
    counted: bool,
}

impl Tally<'_> {
    /// Counts the response now, unless the response counts itself at its end ([`CountsItself`]).
    fn answered(mut self, response: &Response, shed: bool) {
        self.counted = true;
        if response.extensions().get::<CountsItself>().is_none() {
            self.metrics.answered(self.path, response.status().as_u16(), shed);
        }
    }
}

impl Drop for Tally<'_> {
    fn drop(&mut self) {
        if !self.counted {
            self.metrics.answered(self.path, CLIENT_CLOSED, false);
        }
    }
}

/// Serves a request to an endpoint or to an unknown path (`None`). Only OPTIONS is answered without
/// authentication, since browsers send a preflight before the key. Every response has the request id.
async fn serve(state: Arc<AppState>, endpoint: Option<Endpoint>, mut request: Request) -> Response {
    let Ok(id) = request_id(request.headers()) else { return ApiError::Internal.into_response() };
    let path = endpoint.map_or("other", Endpoint::path);
    let tally = Tally { metrics: &state.metrics, path, counted: false };
    let allowed = state.cors.allowed(request.headers(), state.keys.is_open());
    let anthropic = endpoint.is_some_and(|endpoint| endpoint.is_anthropic(request.headers()));
    let mut response = match (endpoint, request.method()) {
        (Some(endpoint), &Method::OPTIONS) => options(endpoint, request.headers(), allowed.is_some()),
        (endpoint, method) => match (authenticate(&state, request.headers()), endpoint) {
            (Err(error), _) => error.into_response(),
            (Ok(_), None) => ApiError::NotFound.into_response(),
            (Ok(_), Some(endpoint)) if !endpoint.has_method(method) => {
                endpoint.method_not_allowed().into_response()
            }
            (Ok(caller), Some(endpoint)) => {
                request.extensions_mut().insert(caller);
                request.extensions_mut().insert(id.clone());
                match content_encoding::decoded(request) {
                    Ok(request) => endpoint.handle(Arc::clone(&state), request).await,
                    Err(error) => error.into_response(),
                }
            }
        },
    };
    // Inserted by `into_response`.
    let error = response.extensions_mut().remove::<ApiError>();
    if anthropic && let Some(error) = &error {
        let (status, body) = messages::refused(error, &id);
        response = error.respond(status, body);
    }
    if let (Some(Endpoint::Ollama(_)), Some(error)) = (endpoint, &error) {
        response = error.respond(error.status(), error.ollama_body());
    }
    let headers = response.headers_mut();
    headers.extend(id_headers(&id, anthropic));
    if let Some(allowed) = allowed {
        cors::expose(headers, allowed);
    }
    tally.answered(&response, error.is_some_and(|error| error.is_shed()));
    response
}

/// Answers OPTIONS: the endpoint's methods and, for an allowed origin, the preflight headers.
fn options(endpoint: Endpoint, request: &HeaderMap, allowed: bool) -> Response {
    let mut response = StatusCode::NO_CONTENT.into_response();
    let headers = response.headers_mut();
    headers.insert(header::ALLOW, HeaderValue::from_static(endpoint.allow()));
    if allowed {
        cors::preflight(request, headers, endpoint.allow());
    }
    response
}

/// Headers, status and body of a response to a request at `path` that reaches no handler.
pub fn refused_before(error: &ApiError, path: &str) -> (HeaderMap, StatusCode, Value) {
    let endpoint = Endpoint::ALL.into_iter().find(|endpoint| endpoint.path() == path);
    let anthropic = endpoint.is_some_and(|endpoint| endpoint.is_anthropic(&HeaderMap::new()));
    let Ok(id) = new_id() else { return (HeaderMap::new(), error.status(), error.body()) };
    let (status, body) = match anthropic {
        true => messages::refused(error, &id),
        false if endpoint.is_some_and(Endpoint::is_ollama) => (error.status(), error.ollama_body()),
        false => (error.status(), error.body()),
    };
    (id_headers(&id, anthropic), status, body)
}

fn id_headers(id: &RequestId, anthropic: bool) -> HeaderMap {
    let mut headers = HeaderMap::with_capacity(2);
    if let Ok(value) = HeaderValue::from_str(id.as_str()) {
        if anthropic {
            headers.insert(ANTHROPIC_ID_HEADER, value.clone());
        }
        headers.insert(REQUEST_ID_HEADER, value);
    }
    headers
}

/// Authenticates the caller. In open mode (no keys), rejects browser requests from other sites, unless the
/// operator listed the origin.
fn authenticate(state: &AppState, headers: &HeaderMap) -> Result<Caller, ApiError> {
    if state.keys.is_open() && from_another_site(headers) && !state.cors.allowed_without_key(headers) {
        return Err(ApiError::Origin);
    }
    state.keys.authenticate(headers)
}

/// The client's request id if it is valid, else a new one.
fn request_id(headers: &HeaderMap) -> Result<RequestId, InvalidId> {
    let given = headers.get(REQUEST_ID_HEADER).and_then(|value| value.to_str().ok());
    match given.and_then(|text| RequestId::new(text).ok()) {
        Some(id) => Ok(id),
        None => new_id(),
    }
}

fn new_id() -> Result<RequestId, InvalidId> {
    RequestId::new(format!("{:016x}{:016x}", random_u64(), random_u64()))
}

/// The group that the request names.
fn group(headers: &HeaderMap) -> Result<Option<GroupId>, ApiError> {
    let Some(value) = headers.get(GROUP_HEADER) else { return Ok(None) };
    let text = value.to_str().map_err(|_| ApiError::field(GROUP_HEADER.as_str(), "is not plain text"))?;
    let group =
        GroupId::new(text).map_err(|error| ApiError::field(GROUP_HEADER.as_str(), error.to_string()))?;
    Ok(Some(group))
}

async fn health(State(state): State<Arc<AppState>>) -> Result<(), ApiError> {
    let serves = state.dispatch.can_serve(&state.models);
    if serves { Ok(()) } else { Err(ApiError::NoWorker) }
}

async fn tokenize(state: Arc<AppState>, request: Request) -> Result<Response, ApiError> {
    let (admitted, body) = admit_within(&state, request, state.max_body(Kind::Chat)).await?;
    let fetched = state.fetched(&admitted, Kind::Chat, &body).await?;
    let tokenized = state.plan(&admitted, fetched, move |sources| plan::tokenize(&body, sources)).await?;
    let count = tokenized.tokens.len();
    let body = json!({"tokens": tokenized.tokens, "count": count, "max_model_len": tokenized.max_model_len});
    Ok(Json(body).into_response())
}

async fn count_tokens(state: Arc<AppState>, request: Request) -> Result<Response, ApiError> {
    let (admitted, body) = admit_within(&state, request, state.max_body(Kind::Messages)).await?;
    let fetched = state.fetched(&admitted, Kind::Messages, &body).await?;
    let tokens = state.plan(&admitted, fetched, move |sources| plan::count_tokens(&body, sources)).await?;
    Ok(Json(json!({"input_tokens": tokens})).into_response())
}

async fn detokenize(state: Arc<AppState>, request: Request) -> Result<Response, ApiError> {
    let (admitted, body) = admit(&state, request).await?;
    let text = state.plan(&admitted, None, move |sources| plan::detokenize(&body, sources)).await?;
    Ok(Json(json!({"prompt": text})).into_response())
}

async fn generate(state: Arc<AppState>, kind: Kind, request: Request) -> Result<Response, ApiError> {
    let mut trace = spans::receive(spans::operation(kind), request.headers());
    let answered = answer(state, kind, request, &mut trace).await;
    if let (Err(error), Some(span)) = (&answered, &mut trace) {
        spans::failed(span, error);
    }
    answered
}

/// Serves a generation. Takes `trace` once it hands the span of a recorded request on.
async fn answer(
    state: Arc<AppState>,
    kind: Kind,
    request: Request,
    trace: &mut Option<Span>,
) -> Result<Response, ApiError> {
    let group = group(request.headers())?;
    state.dispatch.check_room()?;
    let (admitted, body) = admit_within(&state, request, state.max_body(kind)).await?;
    if let Some(load) = ollama_api::load::requested(kind, &body)? {
        return load.answer(&state, admitted, &body).await;
    }
    let group = group.map(|group| CommonKey::of_group(admitted.caller.tenant(), &group));
    let app = Arc::clone(&state);
    let (deadline, background) = (admitted.deadline(state.request_timeout), admitted.background.is_some());
    let id = admitted.id.clone();
    let job_id = id.clone();
    let (body, keep) = match kind {
        Kind::Responses => continued(&state, &admitted, body, state.max_body(kind)).await?,
        _ => (body, None),
    };
    let fetched = state.fetched(&admitted, kind, &body).await?;
    let planned = Instant::now();
    let context = trace.as_ref().map(Span::context);
    if let Some(span) = trace {
        span.part("receive", admitted.arrived);
    }
    let plan = move |sources: &Sources<'_>, effort| {
        let mut plan = plan::generation(kind, &body, sources, effort)?;
        if background {
            plan.params.priority = BACKGROUND;
        }
        let jobs = app.jobs(&plan, sources.caller, (&job_id, context), group, deadline);
        Ok((plan, jobs))
    };
    let short = |sources: &Sources<'_>| plan(sources, Effort::Short);
    let (plan, jobs) = match state.with_sources(&admitted.caller, fetched.as_ref(), short) {
        Ok(planned) => planned,
        Err(Unplanned::Refused(error)) => return Err(error),
        Err(Unplanned::TooLong { counted }) => {
            let plan = move |sources: &Sources<'_>| match plan(sources, Effort::Full { counted }) {
                Err(Unplanned::Refused(error)) => Err(error),
                Err(Unplanned::TooLong { .. }) => Err(ApiError::Internal),
                Ok(planned) => Ok(planned),
            };
            state.plan(&admitted, fetched, plan).await?
        }
    };
    state.metrics.stage("plan", planned.elapsed());
    if let Some(span) = trace {
        spans::planned(span, &id, &plan, planned);
    }
    state.charge(&admitted.permit, plan.prompts.iter().map(|(tokens, _)| tokens.len() as u64).sum())?;
    let held = state.images.hold(&plan.images)?;
    let routed = Instant::now();
    let loading = Loading::of(&state.dispatch, &state.models, &plan.served.id, state.load_wait);
    let generations = state.dispatch.generate(jobs).map_err(ApiError::from);
    let generations =
        generations.map_err(|error| loading.iter().fold(error, |error, wait| wait.explain(error)))?;
    state.metrics.stage("route", routed.elapsed());
    let (path, writer) = (kind.endpoint().path(), writer(&plan, &id, keep));
    let answer = ResponseStream::new(&plan, writer, Arc::clone(&state.metrics), generations, admitted);
    let answer = answer.traced(trace.take()).loading(loading).holding(held);
    if plan.params.stream { answer.streamed(path, state.stream_silence).await } else { answer.whole().await }
}

/// The writer for the answer of request `id`, in the form of the plan's API.
fn writer(plan: &GenerationPlan, id: &RequestId, keep: Option<Keep>) -> Box<dyn Writer> {
    let (created, model) = (unix_seconds(), plan.served.id.name().to_owned());
    let shape = |prefix, chat| ResponseShape {
        chat,
        id: format!("{prefix}-{id}"),
        created,
        model: model.clone(),
        token_ids: plan.params.return_token_ids,
        logprobs: plan.params.sampling.logprobs.is_some(),
        echoed_top: plan.scoring.echoed(plan.params.sampling.logprobs),
        prompt_top: plan.scoring.prompt_logprobs,
        include_usage: plan.params.include_usage,
    };
    match plan.kind {
        Kind::Completion => Box::new(shape("cmpl", false)),
        Kind::Chat => Box::new(shape("chatcmpl", true)),
        Kind::Responses => {
            let mut repeats = plan.repeats.clone();
            repeats.insert("store".into(), keep.is_some().into());
            Box::new(ResponseWriter::new(format!("resp_{id}"), created, model, repeats, keep))
        }
        Kind::Messages => {
            Box::new(MessageWriter::new(format!("msg_{id}"), model, plan.params.stop.strings.clone()))
        }
        Kind::OllamaChat | Kind::OllamaGenerate => {
            let (chat, logprobs) = (plan.kind == Kind::OllamaChat, plan.params.sampling.logprobs.is_some());
            Box::new(OllamaWriter::new(id.to_string(), model, chat, logprobs))
        }
    }
}

async fn embeddings(state: Arc<AppState>, request: Request) -> Result<Response, ApiError> {
    let answer = |shape: embeddings::EmbeddingsFormat, _: &RequestId, model, gathered: &Gathered| {
        shape.answer(model, gathered)
    };
    encode::respond(&state, spans::EMBEDDINGS, request, embeddings::plan, answer).await
}

async fn rerank(state: Arc<AppState>, request: Request) -> Result<Response, ApiError> {
    let answer = |shape: rerank::RerankFormat, id: &RequestId, model, gathered: &Gathered| {
        shape.answer(id, model, gathered)
    };
    encode::respond(&state, spans::RERANK, request, rerank::plan, answer).await
}

/// Admits a request that costs work: checks the caller's limits and reads the body.
async fn admit(state: &AppState, request: Request) -> Result<(AdmittedRequest, Bytes), ApiError> {
    admit_within(state, request, limits::MAX_BODY).await
}

/// Like [`admit`], for a body of at most `max_bytes` bytes.
async fn admit_within(
    state: &AppState,
    request: Request,
    max_bytes: usize,
) -> Result<(AdmittedRequest, Bytes), ApiError> {
    let arrived = Instant::now();
    // `serve` inserted both.
    let caller = request.extensions().get::<Caller>().cloned().ok_or(ApiError::InvalidApiKey)?;
    let id = request.extensions().get::<RequestId>().cloned().ok_or(ApiError::Internal)?;
    let background = request.extensions().get::<Background>().copied();
    if background.is_none() {
        state.batches.other_arrived(arrived);
    }
    let permit = caller.enter(arrived).inspect_err(|error| error.count_limit(&state.metrics))?;
    let body = limits::read_within(request.into_body(), max_bytes).await?;
    loading::until_known(&state.models, &caller, &body, state.load_wait).await;
    Ok((AdmittedRequest { caller, id, arrived, permit, background }, body))
}

impl AppState {
    /// Longest body of a request.
    fn max_body(&self, kind: Kind) -> usize {
        let sees_images = kind != Kind::Completion && self.models.iter().any(|model| model.images().is_ok());
        if sees_images { limits::MAX_IMAGE_BODY } else { limits::MAX_BODY }
    }

    /// The jobs of a plan: for each prompt its choices. Choices of one prompt differ in their seeds.
    fn jobs(
        &self,
        plan: &GenerationPlan,
        caller: &Caller,
        (id, trace): (&RequestId, Option<TraceContext>),
        group: Option<CommonKey>,
        deadline: Instant,
    ) -> Vec<GenerationJob> {
        let root = self.chains.root(Scope {
            salt: &caller.salt(plan.params.cache_salt.as_deref()),
            model_digest: &plan.served.model_digest,
            tokenizer_digest: &plan.served.tokenizer_digest,
            adapter: b"",
        });
        let adapter = (plan.served.id != plan.model.id).then_some(plan.served.model_digest);
        let scoring = plan.scoring;
        let mut jobs = Vec::with_capacity(plan.prompts.len() * plan.params.n as usize);
        for (prompt, max_tokens) in &plan.prompts {
            let chain: Arc<[_]> = self.chains.chain_of(root, prompt).into();
            let payer = Payer::new(caller.tenant(), caller.key_id(), &plan.served.id);
            let prompt_logprobs = scoring.of_prompt(plan.params.sampling.logprobs, *max_tokens);
            for nth in 0..scoring.best_of.unwrap_or(plan.params.n) {
                let mut sampling = plan.params.sampling.clone();
                if scoring.best_of.is_some() {
                    // The best ones are those with the highest log-probability per token.
                    sampling.logprobs.get_or_insert(0);
                }
                sampling.seed = sampling.seed.wrapping_add(nth.into());
                let mut stop = plan.params.stop.clone();
                stop.max_tokens = *max_tokens;
                if plan.parser_options.is_some() {
                    // The coordinator searches for stop strings after parsing the answer.
                    stop.strings.clear();
                }
                let request = RouteRequest {
                    request_id: id.clone(),
                    tenant: Arc::clone(caller.tenant()),
                    model: plan.served.id.clone(),
                    operation: None,
                    prompt_tokens: prompt.len().try_into().unwrap_or(u32::MAX),
                    output: Output::of(&stop, plan.grammar.as_ref()),
                    images: !plan.images.is_empty(),
                    chain: Arc::clone(&chain),
                    group,
                    priority: plan.params.priority,
                    submitted: Instant::now(),
                    deadline,
                    trace,
                };
                jobs.push(GenerationJob {
                    request: Arc::new(request),
                    adapter,
                    choice: jobs.len() as u32,
                    root,
                    prompt: prompt.clone(),
                    images: plan.images.clone(),
                    prompt_logprobs,
                    sampling,
                    stop,
                    grammar: plan.grammar.clone(),
                    payer: payer.clone(),
                });
            }
        }
        jobs
    }

    /// Charges prompt tokens to the caller's limits.
    fn charge(&self, permit: &Permit, tokens: u64) -> Result<(), ApiError> {
        let charged = permit.prompt(tokens, Instant::now()).map_err(ApiError::from);
        charged.inspect_err(|error| error.count_limit(&self.metrics))
    }

    /// Runs `work` when it is the tenant's turn.
    async fn plan<T: Send + 'static>(
        self: &Arc<Self>,
        admitted: &AdmittedRequest,
        fetched: Option<Fetched>,
        work: impl FnOnce(&Sources<'_>) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let (state, caller) = (Arc::clone(self), admitted.caller.clone());
        let work = move || state.with_sources(&caller, fetched.as_ref(), work);
        self.planning.run(admitted.caller.tenant(), work).await
    }

    /// Fetches the images of a chat that are at addresses. `None`: no addresses are fetched.
    async fn fetched(
        &self,
        admitted: &AdmittedRequest,
        kind: Kind,
        body: &Bytes,
    ) -> Result<Option<Fetched>, ApiError> {
        let Some(urls) = &self.image_urls else { return Ok(None) };
        let has = |text: &str| memchr::memmem::find(body, text.as_bytes()).is_some();
        if kind == Kind::Completion || !has("image") || !has("://") && !has(":\\/") {
            return Ok(Some(Fetched::new()));
        }
        let body = body.clone();
        let addresses = move || Ok(plan::image_addresses(kind, &body));
        let addresses = self.planning.run(admitted.caller.tenant(), addresses).await?;
        urls.fetch_all(addresses).await.map(Some)
    }

    fn with_sources<T>(
        &self,
        caller: &Caller,
        fetched: Option<&Fetched>,
        work: impl FnOnce(&Sources<'_>) -> T,
    ) -> T {
        let served = |id: &ModelId| self.dispatch.model(id);
        let parent = |id: &ModelId| self.dispatch.parent(id);
        let (models, popularity) = (&*self.models, &self.popularity);
        let seed = random_u64();
        work(&Sources { caller, models, served: &served, parent: &parent, seed, popularity, fetched })
    }
}

fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
