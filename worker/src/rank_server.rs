//! The pipeline rank server: runs a layer range for a replica whose first stage is another worker. One stage
//! at a time; orders and steps of the first stage are checked before they are applied.

mod block_server;
mod output;
mod room;

use crate::Error;
use crate::load::{self, EngineOptions, HostedLoad};
use block_server::{BlockServer, BlockTask};
use engine::decoder::{Blocks, Decoder};
use engine::kv_cache::Slabs;
use engine::sampling::Sampler;
use engine::share::DeviceShare;
use engine::speculation::SpeculativeMethod;
use engine::telemetry::ShippingMetrics;
use kernels::backend::{AdapterId, NO_INDEX};
use output::{Outcome, Reporter, Sink};
use parking_lot::Mutex;
use pipeline::Claims;
use pipeline::activations::{self, Gathered};
use pipeline::draft;
use pipeline::handshake::{arena, dial};
use pipeline::send_queue::SendQueue;
use pipeline::step::{self, Uncounted};
use pipeline::wait_policy::WaitPolicy;
use pipeline::weight_distribution::{Inventory, Shipper, ShippingConfig, WantedLayers};
use pki::Identity;
use proto::ids::{Epoch, Role};
use proto::message::GenerateError;
use proto::stage::{
    ActivationType, ReplicaId, StageAdapters, StageCounted, StageDrafter, StageDrawn, StageFailure,
    StageFeed, StageFrame, StageHead, StageJoin, StageJoined, StageOrder, StageProgressReport, StageReport,
    StageRest, StageSample, StageSampled, StageSpent, StageStep,
};
use proto::trace::{self, Span, TraceContext};
pub(crate) use room::StageRoom;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch};
use tokio::task::JoinSet;
use transport::{
    ActivationReceiver, ActivationSender, Connection, Endpoint, EndpointConfig, Incoming, StageCall,
    StageOrderReceiver,
};

/// Time for the previous stage to connect.
const FEED_LIMIT: Duration = Duration::from_secs(10);
/// Time for an earlier replica's stage to end and release its memory.
const ROOM_LIMIT: Duration = Duration::from_secs(3);

/// Configuration of a worker that serves stages.
#[derive(Debug, Clone)]
pub struct StageConfig {
    /// The model's file, or its manifest in the shard store. `None`: the first stage names the model, and its
    /// weights are received from other workers.
    pub model_path: Option<PathBuf>,
    /// Sources of chunks that are not in the store.
    pub shipping: ShippingConfig,
    /// QUIC address for other stages; port 0 selects a free port.
    pub listen: SocketAddr,
    /// Threads, arithmetic and types. Scheduler options are ignored: the first stage schedules.
    pub engine: EngineOptions,
}

/// A worker that serves one stage at a time to any first stage of its cluster.
#[derive(Debug)]
pub struct StageService {
    endpoint: Arc<Endpoint>,
    task: tokio::task::JoinHandle<()>,
}

/// Receives weights from other workers, and sends them to others.
#[derive(Debug, Clone)]
pub(crate) struct Holds {
    pub(crate) shipper: Arc<Shipper>,
    pub(crate) holdings: Arc<Inventory>,
    /// Memory and files that are shared with other models. `None`: the stage has the worker for itself.
    pub(crate) room: Option<StageRoom>,
}

/// Serves one stage at a time. The owner of the endpoint passes incoming streams to [`RankServer::take`].
#[derive(Debug)]
pub(crate) struct RankServer {
    config: StageConfig,
    endpoint: Arc<Endpoint>,
    holds: Holds,
    /// In a cluster, only the first stage that has claimed this worker may use it, until the claim ends.
    /// `None`: no claim is needed.
    claims: Option<Claims>,
    /// One permit: one stage at a time.
    room: Arc<Semaphore>,
    /// For each replica, the channel that receives the stream of its activations.
    feeds: Mutex<HashMap<ReplicaId, oneshot::Sender<ActivationReceiver>>>,
    /// For each replica, the server that reads and writes its blocks.
    block_servers: Mutex<HashMap<ReplicaId, BlockServer>>,
}

impl StageService {
    /// Starts to listen. Weights are loaded when a replica requests them.
    pub fn start(config: StageConfig, identity: &Identity) -> Result<Self, Error> {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let epoch = Epoch(since_1970.as_micros() as u64);
        let quic = pipeline::attentive(EndpointConfig::new(epoch, [Role::Worker]));
        let endpoint = Arc::new(Endpoint::bind(config.listen, identity, quic)?);
        let metrics = ShippingMetrics::default();
        let shipper = Shipper::new(Arc::clone(&endpoint), &config.shipping, metrics.clone());
        let drafter = (config.engine.speculative_method.file(), config.engine.digests.clone());
        let holdings = Inventory::new(None, config.model_path.as_deref(), drafter, &config.shipping, metrics);
        let holds = Holds { shipper: Arc::new(shipper), holdings: Arc::new(holdings), room: None };
        let server = RankServer::new(config, Arc::clone(&endpoint), holds, None);
        let accepting = Arc::clone(&endpoint);
        let task = tokio::spawn(async move {
            while let Some(connection) = accepting.accept().await {
                tokio::spawn(serve(Arc::clone(&server), connection));
            }
        });
        Ok(Self { endpoint, task })
    }

    /// The bound QUIC address.
    pub fn quic_address(&self) -> SocketAddr {
        self.endpoint.address()
    }

    /// Closes the endpoint at once. A replica that uses this stage loses it.
    pub async fn stop(self) {
        self.task.abort();
        self.endpoint.close().await;
    }
}

async fn serve(server: Arc<RankServer>, connection: Connection) {
    while let Ok(incoming) = connection.accept().await {
        // Other streams are not served here; dropping one resets it.
        drop(server.take(incoming));
    }
}

impl RankServer {
    /// Creates a server without a stage. With `claims`, only a first stage that has claimed this worker may
    /// use it.
    pub(crate) fn new(
        config: StageConfig,
        endpoint: Arc<Endpoint>,
        holds: Holds,
        claims: Option<Claims>,
    ) -> Arc<Self> {
        let room = Arc::new(Semaphore::new(1));
        Arc::new(Self {
            config,
            endpoint,
            holds,
            claims,
            room,
            feeds: Mutex::default(),
            block_servers: Mutex::default(),
        })
    }

    /// The claims on this worker; `None` outside a cluster.
    pub(crate) fn claims(&self) -> Option<&Claims> {
        self.claims.as_ref()
    }

    /// Serves a stream that is meant for a stage; returns any other stream.
    pub(crate) fn take(self: &Arc<Self>, incoming: Incoming) -> Option<Incoming> {
        let server = Arc::clone(self);
        match incoming {
            Incoming::Stage(call) => drop(tokio::spawn(serve_stage_call(server, call))),
            Incoming::StageLease(call) if self.claims.is_some() => drop(tokio::spawn(async move {
                if let Some(claims) = &server.claims {
                    claims.serve(call).await;
                }
            })),
            Incoming::Shard(call) => drop(tokio::spawn(Arc::clone(&self.holds.holdings).answer(call))),
            Incoming::StageBlocks(call) => {
                let StageFeed { replica } = call.feed;
                if let Some(block_server) = server.block_servers.lock().get(&replica).cloned() {
                    tokio::spawn(block_server.serve(call));
                }
            }
            Incoming::Activations(receiver) => {
                let StageFeed { replica } = receiver.feed;
                if let Some(waits) = server.feeds.lock().remove(&replica) {
                    // If the receiver is gone, the replica was given up.
                    let _ = waits.send(receiver);
                }
            }
            other => return Some(other),
        }
        None
    }

    /// Resolves when `replica` no longer has a claim on this worker. Never resolves outside a cluster.
    async fn disowned(&self, replica: ReplicaId) {
        let Some(claims) = &self.claims else { return std::future::pending().await };
        if let Some(mut hold) = claims.hold(replica) {
            hold.ended().await;
        }
    }

    /// How this stage drafts, with the path of the draft model: this worker's own file, or one of the shard
    /// store.
    async fn speculative_method(&self, drafter: Option<StageDrafter>) -> Result<SpeculativeMethod, Error> {
        Ok(match drafter {
            None => SpeculativeMethod::Off,
            Some(StageDrafter::MtpHead { .. }) => SpeculativeMethod::MtpHead,
            Some(StageDrafter::Assistant { digest }) => {
                let options = self.config.engine.clone();
                let own = self.config.engine.speculative_method.file();
                let digest_of = move |path: &Path| load::drafter_digest(path, &options);
                SpeculativeMethod::Assistant(
                    self.holds.shipper.locate_drafter(&digest, own, digest_of).await?,
                )
            }
        })
    }

    /// Acquires the permit for a stage. With claims, waits up to [`ROOM_LIMIT`] for an earlier stage to end.
    async fn room(&self) -> Option<OwnedSemaphorePermit> {
        let room = Arc::clone(&self.room);
        match self.claims {
            None => room.try_acquire_owned().ok(),
            Some(_) => tokio::time::timeout(ROOM_LIMIT, room.acquire_owned()).await.ok()?.ok(),
        }
    }
}

/// Serves a stage of a replica until it ends, and reports the reason to the first stage.
async fn serve_stage_call(server: Arc<RankServer>, call: StageCall) {
    let StageCall { mut orders, reporter } = call;
    let reporter: Reporter = Arc::new(tokio::sync::Mutex::new(reporter));
    let Ok(StageOrder::Join(join)) = orders.next().await else { return };
    let layers = join.layers;
    let failure = tokio::select! {
        ended = run_stage(&server, &mut orders, &reporter, &join) => match ended {
            Ok(never) => match never {},
            Err(failure) => failure,
        },
        () = server.disowned(join.replica) => StageFailure::Busy,
    };
    server.feeds.lock().remove(&join.replica);
    server.block_servers.lock().remove(&join.replica);
    server.holds.room.iter().for_each(StageRoom::returned);
    tracing::info!(?layers, %failure, "the replica has ended");
    let mut reporter = reporter.lock().await;
    // The send fails if the first stage is gone.
    if reporter.send(&StageReport::Failed(failure), Vec::new()).await.is_ok() {
        reporter.finish().await;
    }
}

async fn report(reporter: &Reporter, report: StageReport) -> Result<(), StageFailure> {
    reporter.lock().await.send(&report, Vec::new()).await.map_err(|error| neighbour(&error))
}

type Ended = std::convert::Infallible;

fn neighbour(error: &transport::Error) -> StageFailure {
    StageFailure::Neighbour { reason: error.to_string() }
}

fn load_failure(error: &Error) -> StageFailure {
    let reason = error.to_string();
    if error.is_of_content() { StageFailure::BadFile { reason } } else { StageFailure::Load { reason } }
}

async fn run_stage(
    server: &RankServer,
    orders: &mut StageOrderReceiver,
    reporter: &Reporter,
    join: &StageJoin,
) -> Result<Ended, StageFailure> {
    let room = server.room().await.ok_or(StageFailure::Busy)?;
    let (feed_sender, feed) = oneshot::channel();
    server.feeds.lock().insert(join.replica, feed_sender);
    let here = server.holds.room.as_ref().and_then(|room| room.file(&join.model_digest));
    let located = match here.or_else(|| server.config.model_path.clone()) {
        Some(path) => Ok(path),
        None => server.holds.shipper.locate(&join.model_digest).await,
    };
    let model_path = located.map_err(|error| load_failure(&error.into()))?;
    let speculative_method =
        server.speculative_method(join.drafter).await.map_err(|error| load_failure(&error))?;
    let layers = join.layers.0 as usize..join.layers.1 as usize;
    let mut options =
        EngineOptions { speculative_method: speculative_method.clone(), ..server.config.engine.clone() };
    if let Some(room) = &server.holds.room {
        let bytes = load::range_bytes(&model_path, &options, layers.clone(), Some(join.max_rows as usize));
        let load = room.load(bytes.map_err(|error| load_failure(&error))?, 1).await;
        options.hosted = Some(load.map_err(|error| load_failure(&error))?);
    }
    let hosted = options.hosted.clone();
    let (path, requested) = (model_path.clone(), join.clone());
    let load = {
        let layers = layers.clone();
        move |arrivals| {
            let options = EngineOptions { arrivals, ..options.clone() };
            load_range(&path, &options, layers.clone(), &requested)
        }
    };
    let needed = WantedLayers { layers: Some(layers), speculative_method, embedding: join.drafter.is_some() };
    let loaded = server.holds.shipper.load(&model_path, needed, load).await;
    let (class, decoder) = loaded.map_err(|error| match error {
        Error::Engine(engine::Error::StageStep { .. }) => StageFailure::Layers,
        Error::Engine(engine::Error::EngineStopped) => StageFailure::Stops,
        error => load_failure(&error),
    })?;
    let mut decoder = decoder.ok_or(StageFailure::OtherClass { class })?;
    let part_bytes: Vec<usize> = decoder.groups().iter().map(|group| group.block_bytes).collect();
    let block_bytes = part_bytes.iter().map(|bytes| *bytes as u64).collect();
    report(reporter, StageReport::Joined(StageJoined { block_bytes })).await?;
    let mut adapters = HashMap::new();
    let begin = loop {
        match orders.next().await.map_err(|error| neighbour(&error))? {
            StageOrder::Begin(begin) => break begin,
            StageOrder::Adapter(adapter) => {
                let loaded = load::stage_adapter(&model_path, &adapter, &mut decoder);
                let id = loaded.map_err(|error| load_failure(&error))?;
                adapters.insert(adapter.number, id);
                report(reporter, StageReport::AdapterLoaded).await?;
            }
            StageOrder::Join(_) | StageOrder::TellProgress => return Err(StageFailure::Busy),
        }
    };
    let slabs = arena(begin.slabs, &begin.blocks_per_slab, &decoder);
    let slabs = slabs.map_err(|error| load_failure(&error.into()))?;
    let kv_bytes = slabs.bytes() + decoder.spare_bytes() as u64;
    let mut share = hosted.as_ref().and_then(HostedLoad::share);
    if let (Some(share), Some(room)) = (&mut share, &server.holds.room) {
        share.add(room.reserve(kv_bytes).await.map_err(|error| load_failure(&error))?);
    }
    load::admit_kv(&model_path, &server.config.engine, kv_bytes).map_err(|error| load_failure(&error))?;
    decoder.allocate_kv(slabs.bytes() as usize).map_err(|error| load_failure(&error.into()))?;
    let (counted, last_counted) = watch::channel(0);
    let (block_server, block_tasks) = BlockServer::new(slabs.clone(), part_bytes, last_counted);
    server.block_servers.lock().insert(join.replica, block_server);
    let (next_connection, next) = match &join.next {
        Some(address) => {
            let connected = connect(server, address, join.replica).await;
            let (connection, sender) = connected.map_err(|error| neighbour(&error))?;
            (Some(connection), Some(sender))
        }
        None => (None, None),
    };
    report(reporter, StageReport::Ready).await?;
    let fed = async { tokio::time::timeout(FEED_LIMIT, feed).await.ok().and_then(Result::ok) };
    let feed = tokio::select! {
        feed = fed => feed.ok_or_else(|| {
            StageFailure::Neighbour { reason: "the previous stage has not connected".to_owned() }
        })?,
        error = disconnected(orders) => return Err(neighbour(&error)),
    };
    let progress = Arc::new(Mutex::new(StageProgress::default()));
    let is_last = next.is_none();
    let (sink, handover) = match next {
        Some(next) => {
            let handover = next.handover();
            (Sink::Next(next), handover)
        }
        None => (Sink::First(Arc::clone(reporter)), reporter.lock().await.handover()),
    };
    let (output, queue) = SendQueue::new(Handle::current(), sink, handover);
    let mut sending = JoinSet::new();
    sending.spawn(queue.write_all());
    let stage = Stage {
        decoder,
        adapters,
        slabs,
        element: join.activations,
        layers: join.layers,
        max_rows: join.max_rows as usize,
        block_tasks,
        uncounted: Uncounted::default(),
        counted,
        is_last,
        output,
        progress: Arc::clone(&progress),
        runtime: Handle::current(),
        share,
        _room: room,
    };
    // The thread ends when `_end` is dropped with the replica.
    let (_end, ended) = oneshot::channel();
    let (failed, mut failure) = oneshot::channel();
    // The receiver is gone if the replica has already ended.
    engine::progress::spawn("kvasir-stage", move || drop(failed.send(stage.run(feed, ended))))
        .map_err(|error| load_failure(&error.into()))?;
    let mut next_connection = std::pin::pin!(next_stage_lost(next_connection));
    loop {
        let order = tokio::select! {
            failure = &mut failure => return Err(failure.unwrap_or(StageFailure::Stops)),
            Some(Ok(Err(error))) = sending.join_next() => return Err(neighbour(&error)),
            order = orders.next() => order,
            // Notices a lost connection also while nothing is sent.
            error = &mut next_connection => return Err(neighbour(&error)),
        };
        match order {
            Ok(StageOrder::TellProgress) => {
                let stage_progress = progress.lock().report();
                self::report(reporter, StageReport::Progress(stage_progress)).await?;
            }
            Ok(_) => {
                return Err(neighbour(&transport::Error::Protocol("an order to a stage that has begun")));
            }
            Err(error) => return Err(neighbour(&error)),
        }
    }
}

/// Resolves when the connection to the next stage is lost. Never resolves on the last stage.
async fn next_stage_lost(next_connection: Option<Connection>) -> transport::Error {
    match next_connection {
        Some(connection) => connection.closed().await,
        None => std::future::pending().await,
    }
}

/// Loads the requested layers if their numeric class is the requested one. Returns the class of this worker;
/// the decoder is `None` if it differs.
fn load_range(
    path: &Path,
    options: &EngineOptions,
    layers: Range<usize>,
    join: &StageJoin,
) -> Result<(String, Option<Decoder>), Error> {
    let options = EngineOptions {
        max_rows: Some(join.max_rows as usize),
        block_tokens: join.block_tokens as usize,
        ..options.clone()
    };
    load::stage(path, &options, layers, (&join.class, join.drafter))
}

async fn connect(
    server: &RankServer,
    next: &proto::stage::StageAddress,
    replica: ReplicaId,
) -> Result<(Connection, ActivationSender), transport::Error> {
    let connection = dial(&server.endpoint, next).await?;
    let sender = connection.open_activations(&StageFeed { replica }).await?;
    Ok((connection, sender))
}

/// Resolves when the first stage is gone or sends an order that is not allowed now.
async fn disconnected(orders: &mut StageOrderReceiver) -> transport::Error {
    match orders.next().await {
        Ok(_) => transport::Error::Protocol("an order to a stage that has begun"),
        Err(error) => error,
    }
}

/// Progress of the compute thread.
#[derive(Debug, Default)]
struct StageProgress {
    done: u64,
    computes: Option<(u64, Instant)>,
}

impl StageProgress {
    fn report(&self) -> StageProgressReport {
        let for_us = self.computes.map_or(0, |(_, since)| since.elapsed().as_micros() as u64);
        StageProgressReport { done: self.done, computes: self.computes.map_or(0, |(step, _)| step), for_us }
    }
}

/// A running layer range. Its compute thread reads its stream itself and sends small messages itself
/// (`send_queue.rs`).
struct Stage {
    decoder: Decoder,
    /// By the numbers of the first stage.
    adapters: HashMap<u32, AdapterId>,
    slabs: Slabs,
    element: ActivationType,
    layers: (u32, u32),
    max_rows: usize,
    /// Reads and writes of this stage's blocks.
    block_tasks: mpsc::UnboundedReceiver<BlockTask>,
    uncounted: Uncounted,
    /// The last step whose accepted rows have been applied.
    counted: watch::Sender<u64>,
    is_last: bool,
    output: SendQueue<Sink>,
    progress: Arc<Mutex<StageProgress>>,
    runtime: Handle,
    /// Its memory and its turns on a device that several models share.
    share: Option<DeviceShare>,
    /// Released together with the memory.
    _room: OwnedSemaphorePermit,
}

impl Stage {
    /// Computes steps until the replica ends; returns the reason.
    fn run(mut self, mut feed: ActivationReceiver, mut ended: oneshot::Receiver<()>) -> StageFailure {
        self.decoder.backend().bind_thread();
        let row_bytes = self.decoder.spec().hidden * self.element.bytes();
        let (mut gathered, mut wait_policy) = (Gathered::new(self.element), WaitPolicy::default());
        loop {
            let idle = Instant::now();
            let mut arrived = None;
            let mut received = 0u64;
            let mut sink = |bytes: &[u8]| {
                // From its first byte on, the step counts as received; its transfer time is not counted as
                // waiting.
                arrived.get_or_insert_with(Instant::now);
                received += bytes.len() as u64;
                gathered.push(bytes);
            };
            let runtime = self.runtime.clone();
            let next = wait_policy.block_on(&runtime, async {
                let mut next = std::pin::pin!(feed.next(row_bytes, self.max_rows, &mut sink));
                loop {
                    tokio::select! {
                        biased;
                        _ = &mut ended => return None,
                        next = &mut next => return Some(next),
                        Some(task) = self.block_tasks.recv() => task(&mut self.decoder.blocks()),
                    }
                }
            });
            let step = match next {
                None => return StageFailure::Stops,
                Some(Ok(Some(StageFrame::Step(step)))) => step,
                Some(Ok(Some(StageFrame::Counted(counted)))) => match self.count(counted) {
                    Ok(()) => continue,
                    Err(failure) => return failure,
                },
                Some(Ok(Some(StageFrame::Adapters(adapters)))) => match self.use_adapters(adapters) {
                    Ok(()) => continue,
                    Err(failure) => return failure,
                },
                Some(Ok(Some(StageFrame::AdapterUnloaded(number)))) => {
                    self.unload_adapter(number);
                    continue;
                }
                Some(Ok(None)) => {
                    return StageFailure::Neighbour {
                        reason: "the previous stage has closed its stream".to_owned(),
                    };
                }
                Some(Err(error)) => return neighbour(&error),
            };
            let stalled = arrived.unwrap_or(idle).saturating_duration_since(idle);
            let spent = StageSpent { stalled_us: micros(stalled), computed_us: 0, received };
            let (number, since) = (step.step, Instant::now());
            self.progress.lock().computes = Some((number, since));
            let rows = step.tokens.len();
            self.share.iter_mut().for_each(DeviceShare::begin);
            let computed = self.step(step, &gathered.take(), spent, since);
            self.share.iter_mut().for_each(|share| share.end(rows, false));
            if let Err(failure) = computed {
                return failure;
            }
            *self.progress.lock() = StageProgress { done: number, computes: None };
        }
    }

    fn step(
        &mut self,
        mut step: StageStep,
        activations: &[f32],
        spent: StageSpent,
        since: Instant,
    ) -> Result<(), StageFailure> {
        let _spans = self.record(&step, spent, since);
        let spent = || StageSpent { computed_us: micros(since.elapsed()), ..spent };
        if self.is_last {
            draft::draft_requests(&step, &self.decoder).map_err(failed)?;
            self.check_head(&step)?;
        }
        let block_tasks = &mut self.block_tasks;
        let mut between_layers = |mut blocks: Blocks<'_>| {
            while let Ok(task) = block_tasks.try_recv() {
                task(&mut blocks);
            }
        };
        step::forward(&mut self.decoder, &self.slabs, &step, Some(activations), &mut between_layers)
            .map_err(failed)?;
        self.uncounted.ran(&step);
        if !self.is_last {
            let residual = self.decoder.residual(0..step.tokens.len()).map_err(failed)?;
            let bytes = activations::encode(self.element, &residual);
            step.spent.push(spent());
            self.output.send(Outcome::Passed(StageFrame::Step(step), bytes));
            return Ok(());
        }
        let samplers = self.samplers(std::mem::take(&mut step.samples))?;
        let (mut drawn, rows) = self.draw(&step, &samplers).map_err(failed)?;
        self.draft_round(&step, &samplers, &mut drawn).map_err(failed)?;
        drawn.spent = step.spent;
        drawn.spent.push(spent());
        self.output.send(Outcome::Drawn(drawn, rows));
        match (step.head, step.returned.as_slice()) {
            (Some(StageHead { from, best }), [row]) => {
                self.rest(step.step, *row, from as usize, best).map_err(failed)
            }
            _ => Ok(()),
        }
    }

    /// Refuses a step if this stage cannot compute its part of the logits.
    fn check_head(&self, step: &StageStep) -> Result<(), StageFailure> {
        let (vocab, returned) = (self.decoder.spec().vocab, step.returned.len());
        match step.head {
            Some(StageHead { from, .. })
                if from as usize >= vocab || returned != 1 || !self.decoder.splits_head() =>
            {
                let reason = format!("logits from {from} on of {vocab}, of {returned} rows");
                Err(StageFailure::Step { reason })
            }
            _ => Ok(()),
        }
    }

    /// Computes the logits of a returned row for the tokens from `from` on. Sends them, or with `best` only
    /// the largest one.
    fn rest(&mut self, step: u64, row: u32, from: usize, best: bool) -> Result<(), engine::Error> {
        let since = Instant::now();
        let range = from..self.decoder.spec().vocab;
        self.decoder.make_part(row, &range)?;
        let (best, logits) = match best {
            true => (Some(self.decoder.best_of_part(range)?), Vec::new()),
            false => (None, self.decoder.part(range)?),
        };
        let computed_us = micros(since.elapsed());
        let rest = StageRest { step, logits: logits.len() as u32, best, computed_us };
        self.output.send(Outcome::Rest(rest, activations::encode(ActivationType::F32, &logits)));
        Ok(())
    }

    /// Forwards the adapters of rows of the next step, and uses them in it.
    fn use_adapters(&mut self, adapters: StageAdapters) -> Result<(), StageFailure> {
        let id = |&(start, end, number): &(u32, u32, u32)| {
            let unknown = || StageFailure::Step { reason: format!("there is no adapter {number}") };
            let id = self.adapters.get(&number).copied().ok_or_else(unknown)?;
            Ok((start as usize..end as usize, id))
        };
        let rows = adapters.rows.iter().map(id).collect::<Result<Vec<_>, StageFailure>>()?;
        if !self.is_last {
            self.output.send(Outcome::Passed(StageFrame::Adapters(adapters), Vec::new()));
        }
        self.decoder.use_adapters(&rows).map_err(failed)
    }

    fn unload_adapter(&mut self, number: u32) {
        if !self.is_last {
            self.output.send(Outcome::Passed(StageFrame::AdapterUnloaded(number), Vec::new()));
        }
        if let Some(id) = self.adapters.remove(&number) {
            self.decoder.unload_adapter(id);
        }
    }

    /// Forwards the accepted rows of a step and applies them to this stage's states.
    fn count(&mut self, counted: StageCounted) -> Result<(), StageFailure> {
        if !self.is_last {
            self.output.send(Outcome::Passed(StageFrame::Counted(counted.clone()), Vec::new()));
        }
        self.uncounted.count(&mut self.decoder, &counted).map_err(failed)?;
        self.counted.send_replace(counted.step);
        Ok(())
    }

    /// Starts a span for each traced request of a step. The spans end when they are dropped.
    fn record(&self, step: &StageStep, spent: StageSpent, since: Instant) -> Vec<Span> {
        let span = |parent: &TraceContext| {
            let mut span = trace::follow(*parent, "stage", since)?;
            let (first, end) = self.layers;
            span.set("kvasir.layers", format!("{first}..{end}"));
            span.set("kvasir.step", step.step);
            span.set("kvasir.step_rows", step.tokens.len());
            span.set("kvasir.stalled_seconds", Duration::from_micros(spent.stalled_us.into()));
            span.set("kvasir.received_bytes", spent.received);
            Some(span)
        };
        step.traces.iter().filter_map(span).collect()
    }

    /// The row and the sampler of each sample.
    fn samplers(&self, samples: Vec<StageSample>) -> Result<Vec<(u32, Sampler)>, StageFailure> {
        let vocab = self.decoder.spec().vocab;
        let sampler = |sample: StageSample| Ok((sample.row, Sampler::of_sample(sample, vocab)?));
        let samplers = samples.into_iter().map(sampler).collect::<Result<_, GenerateError>>();
        samplers.map_err(|error| StageFailure::Step { reason: error.to_string() })
    }

    /// Computes the tokens, samples and logits that the step requests. Also returns the bytes of all rows
    /// that are sent back.
    fn draw(
        &mut self,
        step: &StageStep,
        samplers: &[(u32, Sampler)],
    ) -> Result<(StageDrawn, Vec<u8>), engine::Error> {
        let mut tokens = Vec::with_capacity(step.argmax.len());
        if !step.argmax.is_empty() {
            self.decoder.argmax(&step.argmax, &mut tokens)?;
        }
        let (mut samples, mut rows) = (Vec::with_capacity(samplers.len()), Vec::new());
        let requested: Vec<u32> =
            samplers.iter().map(|(row, _)| *row).chain(step.logits.iter().copied()).collect();
        self.decoder.logits(&requested, &mut |index, row| match samplers.get(index) {
            Some((_, sampler)) => {
                let (token, logprobs) = sampler.draw(&mut row.to_vec()).unwrap_or((NO_INDEX, None));
                samples.push(StageSampled { token, logprobs });
            }
            None => rows.extend_from_slice(&activations::encode(ActivationType::F32, row)),
        })?;
        let returned = self.decoder.residual(step.returned.iter().map(|row| *row as usize))?;
        rows.extend_from_slice(&activations::encode(ActivationType::F32, &returned));
        let drawn = StageDrawn {
            step: step.step,
            tokens,
            rows: step.logits.len() as u32,
            samples,
            returned: step.returned.len() as u32,
            ..StageDrawn::default()
        };
        Ok((drawn, rows))
    }

    /// Drafts tokens after sampling, if the step requests them. The step's residual stream is invalid
    /// afterwards.
    fn draft_round(
        &mut self,
        step: &StageStep,
        samplers: &[(u32, Sampler)],
        drawn: &mut StageDrawn,
    ) -> Result<(), engine::Error> {
        if step.draft_requests.is_empty() {
            return Ok(());
        }
        let since = Instant::now();
        let best = step.argmax.iter().copied().zip(drawn.tokens.iter().copied());
        let sampled = samplers.iter().zip(&drawn.samples).map(|((row, _), sample)| (*row, sample.token));
        let requests = draft::draft_requests(step, &self.decoder)?;
        let newest = best.chain(sampled).filter(|(_, token)| *token != NO_INDEX);
        drawn.drafted = draft::draft(&mut self.decoder, &self.slabs, (step, &requests), newest)?;
        drawn.drafting_us = micros(since.elapsed());
        Ok(())
    }
}

fn failed(error: engine::Error) -> StageFailure {
    let reason = error.to_string();
    if error.is_device_lost() {
        // On another thread, so that the failure is sent before the process exits. A restarted process may
        // get the device back.
        let _ = engine::progress::spawn("kvasir-end", move || {
            engine::progress::end_process(&error, error.exit_code())
        });
    }
    StageFailure::Step { reason }
}

fn micros(duration: Duration) -> u32 {
    u32::try_from(duration.as_micros()).unwrap_or(u32::MAX)
}
