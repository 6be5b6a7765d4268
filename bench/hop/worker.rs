//! A worker without an engine: the real protocol with certificates, KV events of a simulated cache, and
//! immediate answers.

use anyhow::anyhow;
use model::ModelFile;
use parking_lot::Mutex;
use pki::Expected;
use proto::block::BlockId;
use proto::event::{KvEvent, KvEventBatch, KvReplay, KvSnapshot, Medium};
use proto::ids::{Epoch, ModelId, NodeId, Role};
use proto::message::{FinishReason, Finished, GenerateFrame, PullReport, Started, TokenOut};
use proto::placement::{PlaceOrder, PlaceReport};
use proto::served_model::{ModelTask, ServedModel};
use proto::worker::{LoadReport, WorkerInfo, WorkerState, WorkerStatus};
use router::chain_memo::ChainMemo;
use std::collections::{HashSet, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tarpc::context::Context;
use text::Tokenizer;
use tokio::sync::mpsc;
use transport::service::{WorkerApi, deadline};
use transport::{Connection, Endpoint, EndpointConfig, GenerateCall, Incoming};

const LIMIT: Duration = Duration::from_secs(5);
const MAX_MODEL_LEN: u32 = 1 << 20;
/// Most units reported as held.
const MAX_UNITS: usize = 1 << 16;
const CHAIN_BYTES: usize = 64 << 20;

/// Identity of the worker, and its coordinators.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Directory with node.crt, node.key and ca.crt.
    #[arg(long)]
    identity: PathBuf,
    /// The coordinator's UDP address.
    #[arg(long)]
    coordinator: SocketAddr,
    /// The model's file, for its tokenizer's digest.
    #[arg(long)]
    model_file: PathBuf,
    /// The model's name.
    #[arg(long, default_value = "smollm2-135m")]
    model: String,
    /// Tokens of an answer.
    #[arg(long, default_value_t = 16)]
    tokens: u32,
    /// Neither compute unit ids nor report KV events.
    #[arg(long)]
    silent: bool,
}

struct Shared {
    silent: bool,
    epoch: Epoch,
    node: NodeId,
    tokens: u32,
    chains: ChainMemo,
    held: Mutex<Held>,
    events: mpsc::UnboundedSender<KvEventBatch>,
    steps: AtomicU64,
}

/// The simulated cache: the most recent units.
#[derive(Default)]
struct Held {
    units: HashSet<BlockId, BuildHasherDefault<AsItIs>>,
    order: VecDeque<BlockId>,
    sequence: u64,
}

/// Hash: the first bytes of an id, which are already well mixed.
#[derive(Default)]
struct AsItIs(u64);

impl Hasher for AsItIs {
    fn write(&mut self, bytes: &[u8]) {
        self.0 = bytes.first_chunk().map_or(self.0, |first| u64::from_le_bytes(*first));
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    let identity = pki::ca::load_identity(&args.identity)?;
    let file = ModelFile::open(&args.model_file)?;
    let tokenizer_digest = Tokenizer::from_metadata(file.metadata())?.digest();
    let since = SystemTime::now().duration_since(UNIX_EPOCH)?;
    let epoch = Epoch(u64::try_from(since.as_millis())?);
    let endpoint =
        Endpoint::bind(([127, 0, 0, 1], 0).into(), &identity, EndpointConfig::new(epoch, [Role::Worker]))?;
    let connection = endpoint.connect(args.coordinator, &Expected::any(Role::Coordinator)).await?;
    let api = connection.coordinator_api().await?;
    let served = ServedModel {
        id: ModelId::new(args.model)?,
        model_digest: [9; 32],
        tokenizer_digest,
        max_model_len: MAX_MODEL_LEN,
        layers: (0, 30),
        engine: "kvasir".into(),
        hit_tokens: 16,
        numeric_class: "none".into(),
        block_tokens: 16,
        task: ModelTask::Generate,
    };
    let worker = WorkerInfo {
        node: identity.name().node.clone(),
        epoch,
        pid: std::process::id(),
        quic: endpoint.address().to_string(),
        ops: "127.0.0.1:1".into(),
        models: vec![served],
    };
    let registered = api.register(deadline(LIMIT), worker.into()).await?;
    let terms = registered.map_err(|refusal| anyhow!("{refusal:?}"))?;
    let (events, mut outbox) = mpsc::unbounded_channel();
    let shared = Arc::new(Shared {
        silent: args.silent,
        epoch,
        node: identity.name().node.clone(),
        tokens: args.tokens,
        chains: ChainMemo::new(&terms.cluster_key, CHAIN_BYTES),
        held: Mutex::default(),
        events,
        steps: AtomicU64::new(0),
    });
    let mut kv = connection.open_kv_events().await?;
    tokio::spawn(async move {
        while let Some(batch) = outbox.recv().await {
            if kv.send(batch).await.is_err() {
                return;
            }
        }
    });
    let serving = tokio::spawn(serve(Arc::clone(&shared), connection.clone()));
    let mut ticks = tokio::time::interval(Duration::from_millis(terms.report_every_ms));
    loop {
        ticks.tick().await;
        let reported = api.report(deadline(LIMIT), shared.report()).await;
        if serving.is_finished() || !matches!(reported, Ok(Ok(()))) {
            // The coordinator has exited, so the measurement ends.
            return Ok(());
        }
    }
}

impl Shared {
    fn report(&self) -> LoadReport {
        LoadReport {
            epoch: self.epoch,
            state: WorkerState::Ready,
            running: 0,
            waiting: 0,
            pending_prefill_tokens: 0,
            kv_used: 0,
            kv_total: 1 << 30,
            steps: self.steps.load(Ordering::Relaxed),
            tokens: 0,
            stalled_ms: 0,
            prefill_rate: 1e6,
            step_ms: 0.1,
            exact: true,
            rss: 1,
            pulls: PullReport::default(),
        }
    }

    /// Reports the new units of a prompt, and evicts the oldest ones for them.
    fn hold(&self, root: BlockId, prompt: &[u32]) {
        let chain = self.chains.chain(root, prompt);
        let mut held = self.held.lock();
        let leading = chain.iter().take_while(|unit| held.units.contains(*unit)).count();
        let Some((stored, new)) = chain.split_at_checked(leading).filter(|(_, new)| !new.is_empty()) else {
            return;
        };
        held.units.extend(new);
        held.order.extend(new);
        let parent = stored.last().copied().unwrap_or(root);
        let mut events = vec![KvEvent::Stored { parent, units: new.to_vec(), medium: Medium::Device }];
        let over = held.order.len().saturating_sub(MAX_UNITS);
        let evicted: Vec<BlockId> = held.order.drain(..over).collect();
        if !evicted.is_empty() {
            evicted.iter().for_each(|unit| {
                held.units.remove(unit);
            });
            events.push(KvEvent::Removed { units: evicted, medium: Medium::Device });
        }
        let first_sequence = held.sequence + 1;
        held.sequence += events.len() as u64;
        // Under the lock, so that numbers are sent in order. Fails only if the connection is gone.
        let _ = self.events.send(KvEventBatch { epoch: self.epoch, first_sequence, events });
    }
}

async fn serve(shared: Arc<Shared>, connection: Connection) {
    while let Ok(incoming) = connection.accept().await {
        match incoming {
            Incoming::Generate(call) => {
                tokio::spawn(generate(Arc::clone(&shared), *call));
            }
            Incoming::WorkerRpc(rpc) => {
                tokio::spawn(rpc.serve(Api(Arc::clone(&shared))));
            }
            Incoming::KvSnapshot(reply) => {
                let snapshot = {
                    let held = shared.held.lock();
                    let runs = vec![(BlockId([0; 16]), held.order.iter().copied().collect(), Medium::Device)];
                    KvSnapshot { epoch: shared.epoch, sequence: held.sequence, runs, resume_points: vec![] }
                };
                // If the coordinator no longer waits for it, it requests another one.
                let _ = reply.send(&snapshot).await;
            }
            _ => {}
        }
    }
}

async fn generate(shared: Arc<Shared>, GenerateCall { request, mut reply }: GenerateCall) {
    let cached = request.predicted_cached;
    let started = Started {
        cached_tokens: cached,
        estimated: false,
        computed_tokens: (request.prompt.len() as u32).saturating_sub(cached),
        hit_stop: "absent".into(),
    };
    let tokens =
        (0..shared.tokens).map(|_| TokenOut { id: 1, text: " word".into(), logprobs: None }).collect();
    let finished = Finished {
        reason: FinishReason::Length,
        matched: None,
        tail: String::new(),
        completion_tokens: shared.tokens,
        cached_tokens: None,
        preemptions: 0,
        drafted_tokens: 0,
        accepted_tokens: 0,
    };
    let frames =
        [GenerateFrame::Started(started), GenerateFrame::Tokens(tokens), GenerateFrame::Finished(finished)];
    for frame in &frames {
        if reply.send(frame).await.is_err() {
            return;
        }
    }
    // Yield first, so that another task writes the queued data to the socket.
    tokio::task::yield_now().await;
    shared.steps.fetch_add(1, Ordering::Relaxed);
    if !shared.silent {
        shared.hold(request.root, &request.prompt);
    }
}

#[derive(Clone)]
struct Api(Arc<Shared>);

impl WorkerApi for Api {
    async fn kv_replay(self, _: Context, from: u64) -> KvReplay {
        if from > self.0.held.lock().sequence {
            return KvReplay::Events(KvEventBatch {
                epoch: self.0.epoch,
                first_sequence: from,
                events: vec![],
            });
        }
        KvReplay::TakeSnapshot
    }

    async fn drain(self, _: Context) {}

    async fn undrain(self, _: Context) {}

    async fn status(self, _: Context) -> WorkerStatus {
        WorkerStatus {
            node: self.0.node.clone(),
            models: vec![],
            load: self.0.report(),
            kv_sequence: self.0.held.lock().sequence,
            uptime_ms: 1,
        }
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
