//! Benchmark of the transport on loopback: `cargo bench -p kvasir-transport`. Prints medians and 99th
//! percentiles of connecting, of one sequential call, of sending a generate request and of a token frame
//! back, and the rate of tensors on one stream.

use kvasir_transport::service::{WorkerApi, deadline};
use kvasir_transport::{Connection, Endpoint, EndpointConfig, Incoming, TensorHeader, TensorType};
use pki::Expected;
use pki::ca::Authority;
use proto::block::BlockId;
use proto::event::KvReplay;
use proto::ids::{Attempt, ClusterName, Epoch, ModelId, NodeId, RequestId, Role};
use proto::message::*;
use proto::placement::{PlaceOrder, PlaceReport};
use proto::worker::*;
use std::time::{Duration, Instant, SystemTime};
use tarpc::context::Context;

const ROUNDS: usize = 5000;
const BULK_BYTES: usize = 64 << 20;

#[derive(Clone)]
struct NoWorkerApi;

impl WorkerApi for NoWorkerApi {
    async fn kv_replay(self, _: Context, _: u64) -> KvReplay {
        KvReplay::TakeSnapshot
    }
    async fn drain(self, _: Context) {}
    async fn undrain(self, _: Context) {}
    async fn status(self, _: Context) -> WorkerStatus {
        unreachable!("not called here")
    }
    async fn metrics_text(self, _: Context) -> String {
        String::new()
    }
    async fn place(self, _: Context, _: PlaceOrder) -> PlaceReport {
        PlaceReport::default()
    }

    async fn load_adapter(
        self,
        _: Context,
        order: proto::adapter::AdapterOrder,
    ) -> Result<(), proto::adapter::AdapterRefusal> {
        Err(proto::adapter::AdapterRefusal::Unknown(order.name))
    }

    async fn unload_adapter(
        self,
        _: Context,
        name: proto::ids::ModelId,
    ) -> Result<(), proto::adapter::AdapterRefusal> {
        Err(proto::adapter::AdapterRefusal::Unknown(name))
    }

    async fn models(self, _: Context, _: proto::deployment::ModelsOrder) -> proto::deployment::ModelsReport {
        proto::deployment::ModelsReport::default()
    }

    async fn prompt_progress(
        self,
        _: Context,
        _: proto::block::BlockId,
        _: proto::sequence::SequenceName,
    ) -> Option<proto::sequence::PromptProgress> {
        None
    }
}

fn tokens() -> GenerateFrame {
    GenerateFrame::Tokens(vec![TokenOut { id: 5, text: " hello".into(), logprobs: None }])
}

fn finished() -> GenerateFrame {
    let (matched, tail) = (None, String::new());
    let reason = FinishReason::Stop;
    GenerateFrame::Finished(Finished {
        reason,
        matched,
        tail,
        completion_tokens: 1,
        cached_tokens: None,
        preemptions: 0,
        drafted_tokens: 0,
        accepted_tokens: 0,
    })
}

fn request(max_tokens: u32) -> GenerateRequest {
    GenerateRequest {
        request_id: RequestId::new("bench").expect("a valid id"),
        choice: 0,
        attempt: Attempt(0),
        model: ModelId::new("bench").expect("a valid id"),
        root: BlockId([0; 16]),
        prompt: vec![1; 1500].into(),
        emitted: TokenIds::default(),
        sampling: Sampling::default(),
        stop: Stop { max_tokens, ..Stop::default() },
        images: Vec::new(),
        encoders: Vec::new(),
        prompt_logprobs: None,
        predicted_cached: 0,
        deadline_ms: 0,
        pull: None,
        together: 1,
        trace: None,
        grammar: None,
        tenant: TenantShare::of_root(BlockId([0; 16])),
    }
}

/// Runs the worker. The id of a token is the time at which its frame was sent, in microseconds since
/// `start`, so that the one-way time can be measured.
async fn serve(connection: Connection, start: Instant) {
    while let Ok(incoming) = connection.accept().await {
        match incoming {
            Incoming::WorkerRpc(rpc) => drop(tokio::spawn(rpc.serve(NoWorkerApi))),
            Incoming::Generate(mut call) => drop(tokio::spawn(async move {
                let request = call.request;
                for _ in 0..request.stop.max_tokens {
                    // The interval of a decode step, so that every frame is sent alone.
                    tokio::time::sleep(Duration::from_millis(1)).await;
                    let mut frame = tokens();
                    if let GenerateFrame::Tokens(tokens) = &mut frame {
                        tokens[0].id = start.elapsed().as_micros() as u32;
                    }
                    call.reply.send(&frame).await.expect("an open stream");
                }
                call.reply.send(&finished()).await.expect("an open stream");
            })),
            Incoming::Bulk(mut bulk) => {
                drop(tokio::spawn(async move { while let Ok(Some(_)) = bulk.next(BULK_BYTES).await {} }))
            }
            other => unreachable!("not opened here: {other:?}"),
        }
    }
}

fn report(label: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let at = |percent: usize| times[(times.len() - 1) * percent / 100].as_secs_f64() * 1e6;
    println!("{label:<44} p50 {:>7.1} us   p99 {:>7.1} us", at(50), at(99));
}

async fn measure() -> Result<(), Box<dyn std::error::Error>> {
    let now = SystemTime::now();
    let ca = Authority::new(ClusterName::new("bench")?, now)?;
    let bind = |role, name| -> Result<Endpoint, Box<dyn std::error::Error>> {
        let identity = ca.issue(role, NodeId::new(name)?, now)?.identity()?;
        Ok(Endpoint::bind("127.0.0.1:0".parse()?, &identity, EndpointConfig::new(Epoch(1), [Role::Worker]))?)
    };
    let (coordinator, worker) = (bind(Role::Coordinator, "c")?, bind(Role::Worker, "w")?);

    let mut joins = Vec::new();
    for _ in 0..50 {
        let started = Instant::now();
        worker.connect(coordinator.address(), &Expected::any(Role::Coordinator)).await?;
        joins.push(started.elapsed());
        coordinator.accept().await;
    }
    report("connect: TLS, certificates, hello", joins);

    let dialed = worker.connect(coordinator.address(), &Expected::any(Role::Coordinator)).await?;
    let start = Instant::now();
    tokio::spawn(serve(dialed, start));
    let connection = coordinator.accept().await.ok_or("closed")?;

    let api = connection.worker_api().await?;
    let mut calls = Vec::new();
    for _ in 0..ROUNDS {
        let started = Instant::now();
        api.drain(deadline(Duration::from_secs(10))).await?;
        calls.push(started.elapsed());
    }
    report("one call, sequential", calls);

    let mut opens = Vec::new();
    for _ in 0..ROUNDS / 5 {
        let started = Instant::now();
        let mut stream = connection.open_generate(&request(0)).await?;
        while let Some(frame) = stream.next().await {
            frame?;
        }
        opens.push(started.elapsed());
    }
    report("a generation of 1,500 tokens in, end frame out", opens);

    let mut hops = Vec::new();
    let mut stream = connection.open_generate(&request(1000)).await?;
    while let Some(frame) = stream.next().await {
        if let GenerateFrame::Tokens(tokens) = frame? {
            let sent = Duration::from_micros(tokens[0].id.into());
            hops.push(start.elapsed().saturating_sub(sent));
        }
    }
    report("one token frame, one way", hops);

    let mut bulk = connection.open_bulk().await?;
    let shape = vec![BULK_BYTES as u64];
    let header = TensorHeader { name: "x".into(), element: TensorType::U8, shape };
    let bytes = vec![7; BULK_BYTES];
    let started = Instant::now();
    for _ in 0..4 {
        bulk.send(&header, &bytes).await?;
    }
    let rate = 4.0 * BULK_BYTES as f64 / started.elapsed().as_secs_f64() / f64::from(1 << 20);
    println!("tensors, one stream: {rate:.0} MiB/s");
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?.block_on(measure())
}
