//! A stage's own side: a worker that holds a layer range for a replica which another one leads.

use super::activations;
use super::lead::{arena, dial};
use super::lease::Claims;
use super::step;
use crate::Error;
use crate::decoder::Decoder;
use crate::kv_cache::Slabs;
use crate::load::{self, EngineOptions};
use parking_lot::Mutex;
use proto::ids::{Epoch, Role};
use proto::stage::{
    ActivationType, ReplicaId, StageBeginV1, StageDrawnV1, StageFailure, StageFeed, StageFeedV1, StageJoinV1,
    StageJoinedV1, StageOrder, StageReport, StageStep, StageStepV1,
};
use proto::transport::{
    ActivationReceiver, ActivationSender, Connection, Endpoint, EndpointConfig, Identity, Incoming,
    StageCall, StageOrderReceiver, StageReporter,
};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};

/// Until the stage before this one has connected.
const FEED_LIMIT: Duration = Duration::from_secs(10);
/// Until what was held before has ended.
const ROOM_LIMIT: Duration = Duration::from_secs(3);

/// What a worker that holds stages is told.
#[derive(Debug, Clone)]
pub struct StageConfig {
    /// The model's file.
    pub model_path: PathBuf,
    /// Where other stages reach this one by QUIC; port 0 is any.
    pub listen: SocketAddr,
    /// Threads, arithmetic and types. What concerns a scheduler is the first stage's.
    pub engine: EngineOptions,
}

/// A worker that holds one stage at a time, for whoever of its cluster leads a replica.
#[derive(Debug)]
pub struct StageService {
    endpoint: Arc<Endpoint>,
    task: tokio::task::JoinHandle<()>,
}

/// What holds one stage at a time. Who accepts connections hands it what comes in for it.
#[derive(Debug)]
pub(crate) struct Host {
    config: StageConfig,
    endpoint: Arc<Endpoint>,
    /// Under a cluster: only whoever has claimed this worker makes it a stage, for as long as the claim lasts.
    claims: Option<Claims>,
    /// One stage at a time.
    room: Arc<Semaphore>,
    /// Who waits for the activations of which replica.
    feeds: Mutex<HashMap<ReplicaId, oneshot::Sender<ActivationReceiver>>>,
}

impl StageService {
    /// Listens. Weights are loaded when a replica asks for them.
    pub fn start(config: StageConfig, identity: &Identity) -> Result<Self, Error> {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let epoch = Epoch(since_1970.as_micros() as u64);
        let quic = super::attentive(EndpointConfig::new(epoch, [Role::Worker]));
        let endpoint = Arc::new(Endpoint::bind(config.listen, identity, quic)?);
        let host = Host::new(config, Arc::clone(&endpoint), None);
        let accepting = Arc::clone(&endpoint);
        let task = tokio::spawn(async move {
            while let Some(connection) = accepting.accept().await {
                tokio::spawn(serve(Arc::clone(&host), connection));
            }
        });
        Ok(Self { endpoint, task })
    }

    /// Where other stages reach this one.
    pub fn quic_address(&self) -> SocketAddr {
        self.endpoint.address()
    }

    /// Ends everything now: a replica that this is a stage of has lost it.
    pub async fn stop(self) {
        self.task.abort();
        self.endpoint.close().await;
    }
}

async fn serve(host: Arc<Host>, connection: Connection) {
    while let Ok(incoming) = connection.accept().await {
        // Nothing else is served here; dropping it says so.
        drop(host.take(incoming));
    }
}

impl Host {
    /// Holds nothing yet. With `claims`, only for whoever has claimed it.
    pub(crate) fn new(config: StageConfig, endpoint: Arc<Endpoint>, claims: Option<Claims>) -> Arc<Self> {
        let room = Arc::new(Semaphore::new(1));
        Arc::new(Self { config, endpoint, claims, room, feeds: Mutex::new(HashMap::new()) })
    }

    /// Who has claimed it, under a cluster.
    pub(crate) fn claims(&self) -> Option<&Claims> {
        self.claims.as_ref()
    }

    /// Serves a stream if it is for a stage; gives it back if not.
    pub(crate) fn take(self: &Arc<Self>, incoming: Incoming) -> Option<Incoming> {
        let host = Arc::clone(self);
        match incoming {
            Incoming::Stage(call) => drop(tokio::spawn(hold(host, call))),
            Incoming::StageLease(call) if self.claims.is_some() => drop(tokio::spawn(async move {
                if let Some(claims) = &host.claims {
                    claims.serve(call).await;
                }
            })),
            Incoming::Activations(receiver) => {
                let StageFeed::V1(StageFeedV1 { replica }) = receiver.feed;
                if let Some(waits) = host.feeds.lock().remove(&replica) {
                    // Whoever has waited no longer has given up the replica.
                    let _ = waits.send(receiver);
                }
            }
            other => return Some(other),
        }
        None
    }

    /// Resolves when `replica` may hold this worker no longer.
    async fn disowned(&self, replica: ReplicaId) {
        let Some(claims) = &self.claims else { return std::future::pending().await };
        if let Some(mut hold) = claims.hold(replica) {
            hold.ended().await;
        }
    }

    /// The place for a stage. A claim has ended what was there before, which may take a moment.
    async fn room(&self) -> Option<OwnedSemaphorePermit> {
        let room = Arc::clone(&self.room);
        match self.claims {
            None => room.try_acquire_owned().ok(),
            Some(_) => tokio::time::timeout(ROOM_LIMIT, room.acquire_owned()).await.ok()?.ok(),
        }
    }
}

/// Takes part in a replica until it ends, and tells its first stage why.
async fn hold(host: Arc<Host>, call: StageCall) {
    let StageCall { mut orders, mut reporter } = call;
    let Ok(StageOrder::Join(join)) = orders.next().await else { return };
    let layers = join.layers;
    let failure = tokio::select! {
        ended = take_part(&host, &mut orders, &mut reporter, &join) => match ended {
            Ok(never) => match never {},
            Err(failure) => failure,
        },
        () = host.disowned(join.replica) => StageFailure::Busy,
    };
    host.feeds.lock().remove(&join.replica);
    tracing::info!(?layers, %failure, "the replica has ended");
    // The first stage may be gone, which is why it has ended then.
    if reporter.send(&StageReport::Failed(failure)).await.is_ok() {
        reporter.finish().await;
    }
}

type Ended = std::convert::Infallible;

fn neighbour(error: &proto::Error) -> StageFailure {
    StageFailure::Neighbour { reason: error.to_string() }
}

fn load_failure(error: &Error) -> StageFailure {
    let reason = error.to_string();
    if error.is_of_content() { StageFailure::BadFile { reason } } else { StageFailure::Load { reason } }
}

async fn take_part(
    host: &Host,
    orders: &mut StageOrderReceiver,
    reporter: &mut StageReporter,
    join: &StageJoinV1,
) -> Result<Ended, StageFailure> {
    let room = host.room().await.ok_or(StageFailure::Busy)?;
    let (feed_sender, feed) = oneshot::channel();
    host.feeds.lock().insert(join.replica, feed_sender);
    let (path, options, asked) = (host.config.model_path.clone(), host.config.engine.clone(), join.clone());
    let loading = tokio::task::spawn_blocking(move || load_range(&path, &options, &asked));
    let mut decoder = loading.await.map_err(|_| StageFailure::Stops)??;
    let block_bytes = decoder.groups().iter().map(|group| group.block_bytes as u64).collect();
    let joined = StageReport::Joined(StageJoinedV1 { block_bytes });
    reporter.send(&joined).await.map_err(|error| neighbour(&error))?;
    let begin = match orders.next().await.map_err(|error| neighbour(&error))? {
        StageOrder::Begin(begin) => begin,
        StageOrder::Join(_) => return Err(StageFailure::Busy),
    };
    let slabs = lay_out(&host.config, &mut decoder, &begin).map_err(|error| load_failure(&error))?;
    let (behind, next) = match &join.next {
        Some(address) => {
            let connected = connect(host, address, join.replica).await;
            let (connection, sender) = connected.map_err(|error| neighbour(&error))?;
            (Some(connection), Some(sender))
        }
        None => (None, None),
    };
    reporter.send(&StageReport::Ready).await.map_err(|error| neighbour(&error))?;
    let fed = async { tokio::time::timeout(FEED_LIMIT, feed).await.ok().and_then(Result::ok) };
    let feed = tokio::select! {
        feed = fed => feed.ok_or_else(|| {
            StageFailure::Neighbour { reason: "it has not connected".to_owned() }
        })?,
        error = gone(orders) => return Err(neighbour(&error)),
    };
    let last = next.is_none();
    let (row_bytes, rows) = (decoder.spec().hidden * join.activations.bytes(), join.max_rows as usize);
    let (steps, inbox) = mpsc::channel(2);
    let (outbox, out) = mpsc::channel(4);
    let stage = Stage { decoder, slabs, element: join.activations, last, _room: room };
    crate::progress::spawn("kvasir-stage", move || stage.run(inbox, &outbox))
        .map_err(|error| load_failure(&error))?;
    tokio::select! {
        failure = receive(feed, row_bytes, rows, steps) => Err(failure),
        failure = pass_on(out, next, reporter) => Err(failure),
        error = gone(orders) => Err(neighbour(&error)),
        // Also while nothing is sent there.
        error = cut(behind) => Err(neighbour(&error)),
    }
}

/// Resolves when the connection to the next stage is gone.
async fn cut(behind: Option<Connection>) -> proto::Error {
    match behind {
        Some(connection) => connection.closed().await,
        None => std::future::pending().await,
    }
}

/// Loads the layers that are asked for, if they make the bits that are asked for.
fn load_range(
    path: &std::path::Path,
    options: &EngineOptions,
    join: &StageJoinV1,
) -> Result<Decoder, StageFailure> {
    let layers = join.layers.0 as usize..join.layers.1 as usize;
    let options = EngineOptions {
        max_rows: Some(join.max_rows as usize),
        block_tokens: join.block_tokens as usize,
        ..options.clone()
    };
    let (class, decoder) = load::stage(path, &options, layers, &join.class).map_err(|error| match error {
        Error::StageStep { .. } => StageFailure::Layers,
        error => load_failure(&error),
    })?;
    decoder.ok_or(StageFailure::OtherClass { class })
}

fn lay_out(config: &StageConfig, decoder: &mut Decoder, begin: &StageBeginV1) -> Result<Slabs, Error> {
    let slabs = arena(begin.slabs, &begin.blocks_per_slab, decoder)?;
    load::admit_kv(&config.model_path, &config.engine, slabs.bytes())?;
    decoder.allocate_kv(slabs.bytes() as usize)?;
    Ok(slabs)
}

async fn connect(
    host: &Host,
    next: &proto::stage::StageAddressV1,
    replica: ReplicaId,
) -> Result<(Connection, ActivationSender), proto::Error> {
    let connection = dial(&host.endpoint, next).await?;
    let sender = connection.open_activations(&StageFeed::V1(StageFeedV1 { replica })).await?;
    Ok((connection, sender))
}

/// Resolves when the first stage is gone, or says something that it may not say now.
async fn gone(orders: &mut StageOrderReceiver) -> proto::Error {
    match orders.next().await {
        Ok(_) => proto::Error::Protocol("an order to a stage that has begun"),
        Err(error) => error,
    }
}

/// Steps from the stage before to the thread that computes.
async fn receive(
    mut feed: ActivationReceiver,
    row_bytes: usize,
    max_rows: usize,
    steps: mpsc::Sender<(StageStepV1, Vec<u8>)>,
) -> StageFailure {
    loop {
        match feed.next(row_bytes, max_rows).await {
            Ok(Some((StageStep::V1(step), bytes))) => {
                if steps.send((step, bytes)).await.is_err() {
                    // The thread has said why it ended.
                    return std::future::pending().await;
                }
            }
            Ok(None) => return StageFailure::Neighbour { reason: "it sends no more".to_owned() },
            Err(error) => return neighbour(&error),
        }
    }
}

/// From the thread that computes to the next stage, or to the first one.
async fn pass_on(
    mut out: mpsc::Receiver<Out>,
    mut next: Option<ActivationSender>,
    reporter: &mut StageReporter,
) -> StageFailure {
    while let Some(out) = out.recv().await {
        let passed = match (out, &mut next) {
            (Out::Step(step, activations), Some(next)) => next.send(&step, &activations).await,
            (Out::Drawn(drawn), None) => reporter.drawn(drawn).await,
            (Out::Row(row), None) => reporter.row(&row).await,
            (Out::Failed(failure), _) => return failure,
            (Out::Step(..), None) | (Out::Drawn(_) | Out::Row(_), Some(_)) => return StageFailure::Stops,
        };
        if let Err(error) = passed {
            return neighbour(&error);
        }
    }
    StageFailure::Stops
}

/// What comes of a step.
#[derive(Debug)]
enum Out {
    /// To the next stage.
    Step(StageStep, Vec<u8>),
    /// To the first one: what was drawn, and then each wanted row.
    Drawn(StageDrawnV1),
    Row(Vec<f32>),
    /// The stage cannot go on.
    Failed(StageFailure),
}

/// A layer range at work, on a thread of its own.
struct Stage {
    decoder: Decoder,
    slabs: Slabs,
    element: ActivationType,
    last: bool,
    /// Given back with the memory.
    _room: OwnedSemaphorePermit,
}

impl Stage {
    fn run(mut self, mut inbox: mpsc::Receiver<(StageStepV1, Vec<u8>)>, out: &mpsc::Sender<Out>) {
        self.decoder.backend().bind_thread();
        while let Some((step, bytes)) = inbox.blocking_recv() {
            if let Err(error) = self.step(step, &bytes, out) {
                let reason = error.to_string();
                // Where nobody hears it the replica has ended already.
                let _ = out.blocking_send(Out::Failed(StageFailure::Step { reason }));
                return;
            }
        }
    }

    fn step(&mut self, step: StageStepV1, bytes: &[u8], out: &mpsc::Sender<Out>) -> Result<(), Error> {
        let activations = activations::decode(self.element, bytes);
        step::forward(&mut self.decoder, &self.slabs, &step, Some(&activations))?;
        let tell = |what| out.blocking_send(what).map_err(|_| Error::EngineStopped);
        if !self.last {
            let residual = self.decoder.residual(step.tokens.len())?;
            return tell(Out::Step(StageStep::V1(step), activations::encode(self.element, &residual)));
        }
        let mut tokens = Vec::with_capacity(step.argmax.len());
        if !step.argmax.is_empty() {
            self.decoder.argmax(&step.argmax, &mut tokens)?;
        }
        tell(Out::Drawn(StageDrawnV1 { step: step.step, tokens, rows: step.logits.len() as u32 }))?;
        let mut told = Ok(());
        self.decoder.logits(&step.logits, &mut |_, row| {
            if told.is_ok() {
                told = tell(Out::Row(row.to_vec()));
            }
        })?;
        told
    }
}
