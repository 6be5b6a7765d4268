//! Servers that speak the engines' protocols, for tests. They compute nothing: an answer's tokens are a function
//! of its prompt ([`output_token`]), and the prefix cache is [`SimulatedCache`].

use crate::arguments::EngineKind;
use crate::salt::root_of;
use bytes::Bytes;
use futures::stream;
use http_body_util::{BodyExt, Full, StreamBody, combinators::BoxBody};
use hyper::body::{Frame, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use proto::block::BlockId;
use serde_json::{Value, json};
use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinHandle;

mod cache;
mod encode;
mod publisher;
mod script;

pub use cache::{RunningBlocks, SimulatedCache};
pub use encode::{EventForm, encode_batch};
pub use publisher::{FakePublisher, PublisherForm};

/// Tokens of a block of the fakes' caches.
pub const BLOCK_TOKENS: usize = 16;

/// What a fake does wrong. Numbers are output tokens before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    None,
    /// Every request is answered with this status.
    Status(u16),
    /// No head.
    HangBeforeHead,
    HangAfter(u32),
    /// The connection is closed in the middle.
    CloseAfter(u32),
    /// The stream ends in order, without a finish reason.
    EndAfter(u32),
    /// An event that is not JSON.
    MalformedAfter(u32),
    /// An error inside the stream.
    ErrorAfter(u32),
    /// Token ids that are no token ids.
    WrongIds,
    /// One token less than the usage says.
    LostToken,
    /// One prompt token more than was sent.
    ChangedPrompt,
    /// An answer that is not a stream.
    NotStream,
    /// An event without end.
    EndlessEvent,
    /// Comments in place of events.
    OnlyComments,
}

/// A server with the protocol of an engine.
#[derive(Debug)]
pub struct FakeEngine {
    address: String,
    shared: Arc<Shared>,
    task: JoinHandle<()>,
}

#[derive(Debug)]
struct Shared {
    kind: EngineKind,
    fault: Mutex<Fault>,
    requests: Mutex<Vec<Value>>,
    cancelled: AtomicUsize,
    running: AtomicUsize,
    cache: Mutex<SimulatedCache>,
    publisher: Option<FakePublisher>,
    sleep: FakeSleep,
}

/// Sleep of a fake, which clears its cache. The event of that is published with the next generation.
#[derive(Debug)]
struct FakeSleep {
    enabled: AtomicBool,
    asleep: AtomicBool,
    sleeps: AtomicUsize,
    wakes: AtomicUsize,
    /// Each call to sleep takes one before it has an effect.
    permits: Semaphore,
}

impl Drop for FakeEngine {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The `index`th token of the answer to a prompt.
pub fn output_token(prompt: &[u32], index: u32) -> u32 {
    let sum = prompt.iter().fold(0u32, |sum, token| sum.wrapping_mul(31).wrapping_add(*token));
    sum.wrapping_add(index.wrapping_mul(7919)) % 30_000 + 100
}

impl FakeEngine {
    /// A server on a free port of this machine, with a cache of `blocks` blocks. If there is a publisher, the
    /// cache's events go there.
    ///
    /// # Errors
    ///
    /// If no port can be opened.
    pub async fn start(
        kind: EngineKind,
        blocks: usize,
        publisher: Option<FakePublisher>,
    ) -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?.to_string();
        let shared = Arc::new(Shared {
            kind,
            fault: Mutex::new(Fault::None),
            requests: Mutex::new(Vec::new()),
            cancelled: AtomicUsize::new(0),
            running: AtomicUsize::new(0),
            cache: Mutex::new(SimulatedCache::new(BLOCK_TOKENS, blocks, kind != EngineKind::Vllm)),
            publisher,
            sleep: FakeSleep {
                enabled: AtomicBool::new(false),
                asleep: AtomicBool::new(false),
                sleeps: AtomicUsize::new(0),
                wakes: AtomicUsize::new(0),
                permits: Semaphore::new(0),
            },
        });
        let server = Arc::clone(&shared);
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let server = Arc::clone(&server);
                tokio::spawn(async move {
                    let answer = service_fn(|request| answer(Arc::clone(&server), request));
                    let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), answer).await;
                });
            }
        });
        Ok(Self { address, shared, task })
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn set_fault(&self, fault: Fault) {
        *self.shared.fault.lock() = fault;
    }

    /// Bodies of all generations, in order of arrival.
    pub fn requests(&self) -> Vec<Value> {
        self.shared.requests.lock().clone()
    }

    /// Generations whose client closed the connection.
    pub fn cancelled(&self) -> usize {
        self.shared.cancelled.load(Ordering::SeqCst)
    }

    /// The server was started so that it can sleep.
    pub fn enable_sleep(&self) {
        self.shared.sleep.enabled.store(true, Ordering::SeqCst);
    }

    /// Lets one call to sleep end.
    pub fn permit_sleep(&self) {
        self.shared.sleep.permits.add_permits(1);
    }

    pub fn is_asleep(&self) -> bool {
        self.shared.sleep.asleep.load(Ordering::SeqCst)
    }

    /// Calls to sleep that have begun, and calls to wake.
    pub fn sleeps_and_wakes(&self) -> (usize, usize) {
        let FakeSleep { sleeps, wakes, .. } = &self.shared.sleep;
        (sleeps.load(Ordering::SeqCst), wakes.load(Ordering::SeqCst))
    }

    /// Clears the prefix cache.
    pub fn clear_cache(&self) {
        self.shared.cache.lock().clear();
        self.shared.publish();
    }
}

impl Shared {
    /// Answers an order to sleep or to wake. `None`: it is another path, or the server cannot sleep.
    async fn order(&self, path: &str) -> Option<Response<Body>> {
        let FakeSleep { enabled, asleep, sleeps, wakes, permits } = &self.sleep;
        let orders = match self.kind {
            EngineKind::Vllm => ["/sleep", "/wake_up"],
            EngineKind::Sglang => ["/release_memory_occupation", "/resume_memory_occupation"],
            EngineKind::LlamaServer => return None,
        };
        let sleeps_now = *orders.iter().find(|order| **order == path)? == orders[0];
        if !enabled.load(Ordering::SeqCst) {
            return None;
        }
        if sleeps_now {
            sleeps.fetch_add(1, Ordering::SeqCst);
            permits.acquire().await.ok()?.forget();
            self.cache.lock().clear();
        } else {
            wakes.fetch_add(1, Ordering::SeqCst);
        }
        let before = asleep.swap(sleeps_now, Ordering::SeqCst);
        let status = if before == sleeps_now { 500 } else { 200 };
        Some(full(status, "application/json", "null".to_owned()))
    }

    /// Sends the cache's events.
    fn publish(&self) {
        let events = self.cache.lock().take_events();
        if let Some(publisher) = &self.publisher
            && !events.is_empty()
        {
            publisher.publish(&events);
        }
    }
}

type Body = BoxBody<Bytes, io::Error>;

fn full(status: u16, kind: &'static str, body: String) -> Response<Body> {
    let body = Full::new(Bytes::from(body)).map_err(|never: Infallible| match never {}).boxed();
    let response = Response::builder().status(status).header("content-type", kind).body(body);
    response.unwrap_or_else(|_| {
        Response::new(Full::default().map_err(|never: Infallible| match never {}).boxed())
    })
}

fn json_answer(value: &Value) -> Response<Body> {
    full(200, "application/json", value.to_string())
}

async fn answer(shared: Arc<Shared>, request: Request<Incoming>) -> Result<Response<Body>, Infallible> {
    let fault = *shared.fault.lock();
    match fault {
        Fault::Status(status) => {
            let body = json!({"error": {"message": format!("fault {status}"), "code": status}});
            return Ok(full(status, "application/json", body.to_string()));
        }
        Fault::HangBeforeHead => std::future::pending().await,
        _ => {}
    }
    let path = request.uri().path().to_owned();
    if request.method() == Method::GET {
        let sleep = shared.sleep.enabled.load(Ordering::SeqCst);
        let sleep = sleep.then(|| shared.sleep.asleep.load(Ordering::SeqCst));
        let running = shared.running.load(Ordering::SeqCst);
        return Ok(script::page(shared.kind, &path, running, sleep).map_or_else(
            || full(404, "application/json", json!({"detail": "Not Found"}).to_string()),
            |(kind, page)| full(200, kind, page),
        ));
    }
    if let Some(answer) = shared.order(&path).await {
        return Ok(answer);
    }
    if shared.sleep.asleep.load(Ordering::SeqCst) {
        let body = json!({"error": {"message": "a generation while asleep", "code": 500}});
        return Ok(full(500, "application/json", body.to_string()));
    }
    if path == "/tokenize" {
        // Not every server has it.
        return Ok(full(404, "application/json", json!({"detail": "Not Found"}).to_string()));
    }
    let body = request.into_body().collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    let Ok(body) = serde_json::from_slice::<Value>(&body) else {
        return Ok(full(400, "application/json", json!({"error": "not JSON"}).to_string()));
    };
    shared.requests.lock().push(body.clone());
    let Some(generation) = script::Generation::parse(shared.kind, &path, &body) else {
        return Ok(full(422, "application/json", json!({"detail": "invalid body"}).to_string()));
    };
    if fault == Fault::NotStream {
        return Ok(json_answer(&json!({"text": "no stream"})));
    }
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(async move {
        shared.running.fetch_add(1, Ordering::SeqCst);
        if stream_answer(&shared, fault, &generation, &sender).await.is_err() {
            shared.cancelled.fetch_add(1, Ordering::SeqCst);
        }
        shared.running.fetch_sub(1, Ordering::SeqCst);
    });
    let frames = stream::unfold(receiver, |mut receiver| async { Some((receiver.recv().await?, receiver)) });
    let body = StreamBody::new(frames).boxed();
    let response = Response::builder().header("content-type", "text/event-stream; charset=utf-8").body(body);
    Ok(response.unwrap_or_else(|_| full(500, "text/plain", String::new())))
}

/// The client has closed the connection.
struct Gone;

type FrameSender = mpsc::Sender<Result<Frame<Bytes>, io::Error>>;

async fn send(sender: &FrameSender, text: String) -> Result<(), Gone> {
    sender.send(Ok(Frame::data(Bytes::from(text)))).await.map_err(|_| Gone)
}

async fn stream_answer(
    shared: &Shared,
    fault: Fault,
    generation: &script::Generation,
    sender: &FrameSender,
) -> Result<(), Gone> {
    let (prompt, salt) = (&generation.prompt, generation.salt.as_deref());
    let total = generation.max_tokens;
    let tokens: Vec<u32> =
        prompt.iter().copied().chain((0..total).map(|index| output_token(prompt, index))).collect();
    // The last token is drawn but not computed.
    let computed = &tokens[..tokens.len().saturating_sub(1).max(prompt.len())];
    let mut blocks = shared.cache.lock().begin(salt, computed, prompt.len());
    let cached = blocks.as_ref().map_or(0, RunningBlocks::cached_tokens);
    if let Some(blocks) = &mut blocks {
        shared.cache.lock().store(blocks, prompt.len());
    }
    shared.publish();
    let result = send_events(fault, generation, cached, sender).await;
    if let Some(mut blocks) = blocks {
        let mut cache = shared.cache.lock();
        cache.store(&mut blocks, if result.is_ok() { computed.len() } else { prompt.len() });
        cache.finish(blocks);
    }
    shared.publish();
    result
}

async fn send_events(
    fault: Fault,
    generation: &script::Generation,
    cached: usize,
    sender: &FrameSender,
) -> Result<(), Gone> {
    match fault {
        Fault::EndlessEvent => loop {
            send(sender, format!("data: {}", "x".repeat(10_000))).await?;
        },
        Fault::OnlyComments => loop {
            send(sender, ": ping\n\n".to_owned()).await?;
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        },
        _ => {}
    }
    let events = generation.events(cached, fault);
    for (tokens, event) in events {
        match fault {
            Fault::HangAfter(after) if tokens >= after => {
                sender.closed().await;
                return Err(Gone);
            }
            Fault::CloseAfter(after) if tokens >= after => {
                let _ = sender.send(Err(io::Error::other("fault"))).await;
                return Ok(());
            }
            Fault::EndAfter(after) if tokens >= after => return Ok(()),
            Fault::MalformedAfter(after) if tokens >= after => {
                return send(sender, "data: {\"cut\n\n".into()).await;
            }
            Fault::ErrorAfter(after) if tokens >= after => {
                let error = json!({"error": {"message": "fault in the stream", "code": 500}});
                return send(sender, format!("data: {error}\n\n")).await;
            }
            _ => send(sender, format!("data: {event}\n\n")).await?,
        }
    }
    Ok(())
}

/// The root inside the salt of a request's body.
pub fn root_in(body: &Value) -> Option<BlockId> {
    root_of(body.get("cache_salt")?.as_str()?)
}
