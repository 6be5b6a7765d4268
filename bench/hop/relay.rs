//! A relay from HTTP to the same dummy workers over the same QUIC, without keys, tokens, unit ids, index or
//! queue. It reads whole bodies, sends as many bytes as the coordinator would for a body with nine tenths
//! known, and returns a prepared response. Its cost is the lower bound for any such relay on this machine.

use super::server::streamed_answer;
use anyhow::Context as _;
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, Incoming as Received};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
use proto::block::{BlockId, ClusterKey};
use proto::ids::{Attempt, Epoch, ModelId, RequestId, Role};
use proto::message::{GenerateFrame, GenerateRequest, Sampling, Stop, TenantShare, TokenIds};
use proto::shard::ShippingReport;
use proto::worker::{CertificateReport, LoadReport, Refusal, Register, Registered};
use std::convert::Infallible;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use tarpc::context;
use tokio::net::TcpListener;
use transport::service::CoordinatorApi;
use transport::{Connection, Endpoint, EndpointConfig, Incoming};

/// Approximate bytes of text per token.
const BYTES_PER_TOKEN: usize = 4;
/// Prompts are prepared for multiples of this many tokens, up to the longest.
const STEP: usize = 64;
const MAX_TOKENS: usize = 16 << 10;

/// Identity of the relay.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Directory with node.crt, node.key and ca.crt of a coordinator.
    #[arg(long)]
    identity: PathBuf,
    /// The model's name.
    #[arg(long, default_value = "smollm2-135m")]
    model: String,
}

pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    let identity = pki::ca::load_identity(&args.identity)?;
    let loopback = ([127, 0, 0, 1], 0).into();
    let endpoint = Endpoint::bind(loopback, &identity, EndpointConfig::new(Epoch(1), [Role::Worker]))?;
    let listener = TcpListener::bind(loopback).await.context("binding")?;
    let addresses = serde_json::json!({
        "pid": std::process::id(),
        "http": listener.local_addr()?.to_string(),
        "quic": endpoint.address().to_string(),
    });
    println!("{addresses}");
    let relay = Arc::new(Relay::new(args.model)?);
    tokio::spawn(serve(listener, Arc::clone(&relay)));
    while let Some(connection) = endpoint.accept().await {
        tokio::spawn(welcome(connection, Arc::clone(&relay)));
    }
    Ok(())
}

struct Relay {
    request: GenerateRequest,
    prompts: Vec<TokenIds>,
    answer: Bytes,
    workers: Mutex<Vec<Connection>>,
    next: AtomicUsize,
}

impl Relay {
    fn new(model: String) -> anyhow::Result<Self> {
        let answer = streamed_answer(&model, 16);
        let request = GenerateRequest {
            request_id: RequestId::new("r")?,
            choice: 0,
            attempt: Attempt(0),
            model: ModelId::new(model)?,
            root: BlockId([0; 16]),
            prompt: TokenIds::default(),
            emitted: TokenIds::default(),
            sampling: Sampling::default(),
            stop: Stop::default(),
            images: Vec::new(),
            encoders: Vec::new(),
            prompt_logprobs: None,
            predicted_cached: 0,
            deadline_ms: 60_000,
            pull: None,
            together: 1,
            trace: None,
            grammar: None,
            tenant: TenantShare::of_root(BlockId([0; 16])),
        };
        // Two bytes per token on the wire, as in most vocabularies.
        let prompts = (0..=MAX_TOKENS / STEP).map(|steps| vec![40_000; steps * STEP].into()).collect();
        Ok(Self { request, prompts, answer, workers: Mutex::default(), next: AtomicUsize::new(0) })
    }

    async fn to(&self, request: Request<Received>) -> Result<Response<Streamed>, Infallible> {
        let body = request.into_body().collect().await.map(|body| body.to_bytes().len());
        let answered = match body {
            Ok(0) => !self.workers.lock().is_empty(),
            Ok(bytes) => self.relay(bytes).await.is_some(),
            Err(_) => false,
        };
        let mut response = Response::new(Streamed(answered.then(|| self.answer.clone())));
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
        if !answered {
            *response.status_mut() = StatusCode::BAD_GATEWAY;
        }
        Ok(response)
    }

    /// Relays a body of `bytes` bytes to a worker; `None` on failure.
    async fn relay(&self, bytes: usize) -> Option<()> {
        let worker = {
            let workers = self.workers.lock();
            let next = self.next.fetch_add(1, Ordering::Relaxed);
            workers.get(next.checked_rem(workers.len())?)?.clone()
        };
        let prompt = self.prompts.get(bytes / BYTES_PER_TOKEN / STEP)?.clone();
        let predicted_cached = u32::try_from(prompt.len() * 9 / 10).unwrap_or(0);
        let request = GenerateRequest { prompt, predicted_cached, ..self.request.clone() };
        let mut frames = worker.open_generate(&request).await.ok()?;
        while let Some(frame) = frames.next().await {
            if matches!(frame.ok()?, GenerateFrame::Finished(_)) {
                return Some(());
            }
        }
        None
    }
}

/// A chunked body with one chunk.
struct Streamed(Option<Bytes>);

impl Body for Streamed {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.0.take().map(Frame::data).map(Ok))
    }
}

async fn serve(listener: TcpListener, relay: Arc<Relay>) -> anyhow::Result<()> {
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        let relay = Arc::clone(&relay);
        tokio::spawn(async move {
            let service = service_fn(|request| relay.to(request));
            let builder = &mut http1::Builder::new();
            // The client reports broken connections.
            let _ = builder.timer(TokioTimer::new()).serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

async fn welcome(connection: Connection, relay: Arc<Relay>) {
    while let Ok(incoming) = connection.accept().await {
        if let Incoming::CoordinatorRpc(rpc) = incoming {
            tokio::spawn(rpc.serve(Api { relay: Arc::clone(&relay), connection: connection.clone() }));
        }
    }
}

#[derive(Clone)]
struct Api {
    relay: Arc<Relay>,
    connection: Connection,
}

impl CoordinatorApi for Api {
    async fn register(self, _: context::Context, _: Register) -> Result<Registered, Refusal> {
        self.relay.workers.lock().push(self.connection);
        let cluster_key = ClusterKey([0; 32]);
        Ok(Registered { lease_ms: 4_000, report_every_ms: 1_000, cluster_key })
    }

    async fn report(self, _: context::Context, _: LoadReport) -> Result<(), Refusal> {
        Ok(())
    }

    async fn shipping(self, _: context::Context, _: ShippingReport) {}
    async fn certificate(self, _: context::Context, _: CertificateReport) {}

    async fn usage(self, _: tarpc::context::Context, _: proto::usage::UsageReport) {}
    async fn encoder(self, _: tarpc::context::Context, _: proto::message::image_encoder::EncoderReport) {}

    async fn adapters(
        self,
        _: tarpc::context::Context,
        _: proto::adapter::AdapterReport,
    ) -> Result<(), Refusal> {
        Ok(())
    }

    async fn host(self, _: tarpc::context::Context, _: proto::deployment::HostReport) -> Result<(), Refusal> {
        Ok(())
    }
}
