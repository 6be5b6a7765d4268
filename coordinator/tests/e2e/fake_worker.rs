//! A worker without an engine: it implements the protocol, keeps a prefix cache of ids, and generates letters
//! that depend on the prompt.

use super::fake_sequences::{self, Sequences};
use super::fake_sessions::{self, FakeSessions};
use api::auth::{DEFAULT_TENANT, salt};
use parking_lot::Mutex;
use pki::{Expected, Identity};
use proto::block::{BlockId, HASH_UNIT_TOKENS, Scope};
use proto::event::{KvEvent, KvEventBatch, KvReplay, KvSnapshot, Medium};
use proto::ids::{Epoch, ModelId, NodeId, RequestId, Role};
use proto::message::{
    EncodeRequest, EncodeText, FinishReason, Finished, GenerateError, GenerateFrame, GenerateRequest,
    PromptLogprob, PullReport, Started, TokenLogprobs, TokenOut,
};
use proto::operation::OfferedOperation;
use proto::placement::{PlaceOrder, PlaceReport};
use proto::sequence::{SequenceName, SequenceOperation};
use proto::served_model::{ModelTask, ServedModel};
use proto::worker::{LoadReport, Refusal, Register, WorkerInfo, WorkerState, WorkerStatus};
use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tarpc::context::Context;
use tokio::sync::{mpsc, watch};
use transport::service::{WorkerApi, deadline};
use transport::{CloseCode, Connection, EncodeCall, Endpoint, EndpointConfig, GenerateCall, Incoming};

pub(crate) const MAX_MODEL_LEN: u32 = 4096;

/// Parameters of a fake worker.
#[derive(Clone)]
pub(crate) struct Setup {
    pub(crate) name: &'static str,
    pub(crate) epoch: u64,
    pub(crate) tokenizer_digest: [u8; 32],
    /// Units that are cached before it joins.
    pub(crate) warm: Vec<BlockId>,
    /// Whether it can replay the events of these units; otherwise a snapshot is needed.
    pub(crate) keeps_events: bool,
    /// The model's task.
    pub(crate) task: ModelTask,
    /// Whether prompts may have images.
    pub(crate) images: bool,
    /// Additional offers.
    pub(crate) operations: Vec<OfferedOperation>,
}

/// A worker under the test's control. Dropping it closes its connection.
pub(crate) struct FakeWorker {
    pub(crate) name: NodeId,
    shared: Arc<Shared>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
    endpoint: Arc<Endpoint>,
    connection: Connection,
}

struct Shared {
    setup: Setup,
    sequences: Mutex<Sequences>,
    sessions: FakeSessions,
    state: Mutex<State>,
    /// While true, requests compute their prompts.
    open: watch::Sender<bool>,
    /// Number of tokens that each request may emit.
    tokens: watch::Sender<u32>,
    /// While true, nothing is reported or sent.
    frozen: watch::Sender<bool>,
    counters: watch::Sender<Counters>,
    events: mpsc::UnboundedSender<KvEventBatch>,
}

#[derive(Default)]
struct State {
    held: HashSet<BlockId>,
    log: Vec<KvEvent>,
    fail: Option<GenerateError>,
    /// Draft tokens and accepted draft tokens of every request.
    drafted: (u32, u32),
    requests: Vec<GenerateRequest>,
    encodes: Vec<EncodeRequest>,
    draining: bool,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Counters {
    pub(crate) received: u32,
    pub(crate) cancelled: u32,
    pub(crate) finished: u32,
    pub(crate) computed: u64,
}

/// The letters generated after `prompt`.
pub(crate) fn letters(prompt: &[u32], n: usize) -> String {
    let start = prompt.iter().fold(7u32, |sum, &t| sum.wrapping_mul(31).wrapping_add(t));
    (0..n as u32).map(|i| letter(start, i)).map(|id| char::from(id as u8)).collect()
}

fn letter(start: u32, i: u32) -> u32 {
    u32::from(b'a') + start.wrapping_add(i.wrapping_mul(i).wrapping_add(3 * i)) % 26
}

impl FakeWorker {
    /// Joins the coordinator at `quic` and waits until it is accepted.
    pub(crate) async fn join(setup: Setup, identity: &Identity, quic: SocketAddr) -> Result<Self, Refusal> {
        let config = EndpointConfig::new(Epoch(setup.epoch), [Role::Worker]);
        let endpoint = Arc::new(Endpoint::bind(([127, 0, 0, 1], 0).into(), identity, config).unwrap());
        let connection = endpoint.connect(quic, &Expected::any(Role::Coordinator)).await.unwrap();
        let (events, outbox) = mpsc::unbounded_channel();
        let name = NodeId::new(setup.name).unwrap();
        let mut state = State::default();
        state.held.extend(&setup.warm);
        if !setup.warm.is_empty() {
            state.log.push(stored(setup.warm.clone()));
        }
        let shared = Arc::new(Shared {
            setup,
            sequences: Mutex::default(),
            sessions: FakeSessions::default(),
            state: Mutex::new(state),
            open: watch::Sender::new(true),
            tokens: watch::Sender::new(u32::MAX),
            frozen: watch::Sender::new(false),
            counters: watch::Sender::default(),
            events,
        });
        let mut tasks = vec![tokio::spawn(serve(Arc::clone(&shared), connection.clone()))];
        let api = connection.coordinator_api().await.unwrap();
        let limit = Duration::from_secs(5);
        let mut register = Register::from(shared.register(&name));
        register.operations.clone_from(&shared.setup.operations);
        let terms = api.register(deadline(limit), register).await.unwrap()?;
        assert!(terms.report_every_ms > 0);
        let mut kv = connection.open_kv_events().await.unwrap();
        let mut outbox: mpsc::UnboundedReceiver<KvEventBatch> = outbox;
        let this = Arc::clone(&shared);
        tasks.push(tokio::spawn(async move {
            while let Some(batch) = outbox.recv().await {
                this.thaw().await;
                if kv.send(batch).await.is_err() {
                    return;
                }
            }
        }));
        let this = Arc::clone(&shared);
        api.report(deadline(limit), this.report()).await.unwrap()?;
        tasks.push(tokio::spawn(async move {
            loop {
                tokio::time::sleep(Duration::from_millis(20)).await;
                this.thaw().await;
                let report = this.report();
                if !matches!(api.report(deadline(limit), report).await, Ok(Ok(()))) {
                    return;
                }
            }
        }));
        Ok(Self { name, shared, tasks, endpoint, connection })
    }

    /// Holds or releases requests before their prompts are computed.
    pub(crate) fn hold(&self, hold: bool) {
        self.shared.open.send_replace(!hold);
    }

    /// Stops each request after `n` tokens until more are allowed.
    pub(crate) fn allow_tokens(&self, n: u32) {
        self.shared.tokens.send_replace(n);
    }

    /// Stops all messages, like a frozen or dead process.
    pub(crate) fn freeze(&self) {
        self.shared.frozen.send_replace(true);
    }

    /// Fails every following request with `error`, and a running one at its next token; `None` ends this.
    pub(crate) fn fail(&self, error: Option<GenerateError>) {
        self.shared.state.lock().fail = error;
    }

    /// Sets the draft tokens and accepted draft tokens of every following request.
    pub(crate) fn draft_round(&self, drafted: u32, accepted: u32) {
        self.shared.state.lock().drafted = (drafted, accepted);
    }

    /// The received requests, in order of arrival.
    pub(crate) fn requests(&self) -> Vec<GenerateRequest> {
        self.shared.state.lock().requests.clone()
    }

    /// The received encode requests, in order of arrival.
    pub(crate) fn encodes(&self) -> Vec<EncodeRequest> {
        self.shared.state.lock().encodes.clone()
    }

    /// The received sequence operations, in order.
    pub(crate) fn operations(&self) -> Vec<SequenceOperation> {
        self.shared.sequences.lock().operations.clone()
    }

    /// The state of its audio sessions.
    pub(crate) fn sessions(&self) -> &FakeSessions {
        &self.shared.sessions
    }

    /// Adds a sequence of this name for the default tenant.
    pub(crate) fn add_sequence(&self, request: &str, prompt: &[u32]) {
        let key = super::cluster_key();
        let root = key.root(Scope {
            salt: &salt(&key, DEFAULT_TENANT),
            model_digest: &[9; 32],
            tokenizer_digest: &self.shared.setup.tokenizer_digest,
            adapter: b"",
        });
        let name = SequenceName { request: RequestId::new(request).unwrap(), choice: 0 };
        self.shared.sequences.lock().generated((root, name), prompt, 0);
    }

    pub(crate) fn draining(&self) -> bool {
        self.shared.state.lock().draining
    }

    pub(crate) fn counters(&self) -> Counters {
        *self.shared.counters.borrow()
    }

    /// Waits until the counters match.
    pub(crate) async fn until(&self, description: &str, condition: impl FnMut(&Counters) -> bool) {
        let mut counters = self.shared.counters.subscribe();
        let reached = tokio::time::timeout(Duration::from_secs(20), counters.wait_for(condition)).await;
        assert!(reached.is_ok(), "{description}: {:?}", self.counters());
    }

    /// Closes the connection like a process that has lost its GPU.
    pub(crate) fn lose_device(&self) {
        self.connection.close(CloseCode::DeviceLost);
    }

    /// Closes the connection like a process that is shut down.
    pub(crate) async fn leave(self) {
        self.endpoint.close().await;
    }
}

impl Drop for FakeWorker {
    fn drop(&mut self) {
        self.tasks.iter().for_each(tokio::task::JoinHandle::abort);
    }
}

impl Shared {
    fn register(&self, name: &NodeId) -> WorkerInfo {
        WorkerInfo {
            node: name.clone(),
            epoch: Epoch(self.setup.epoch),
            pid: 1,
            quic: "127.0.0.1:1".into(),
            ops: "127.0.0.1:2".into(),
            models: self.models(),
        }
    }

    fn models(&self) -> Vec<ServedModel> {
        vec![ServedModel {
            id: ModelId::new("tiny").unwrap(),
            model_digest: [9; 32],
            tokenizer_digest: self.setup.tokenizer_digest,
            max_model_len: MAX_MODEL_LEN,
            layers: (0, 2),
            engine: "kvasir".into(),
            hit_tokens: 16,
            numeric_class: "fake".into(),
            block_tokens: 16,
            task: if self.setup.images { ModelTask::GenerateFromImages } else { self.setup.task },
        }]
    }

    fn report(&self) -> LoadReport {
        let counters = *self.counters.borrow();
        LoadReport {
            epoch: Epoch(self.setup.epoch),
            state: if self.state.lock().draining { WorkerState::Draining } else { WorkerState::Ready },
            running: counters.received - counters.cancelled - counters.finished,
            waiting: 0,
            pending_prefill_tokens: 0,
            kv_used: 0,
            kv_total: 1 << 20,
            steps: u64::from(counters.received),
            tokens: 0,
            stalled_ms: 0,
            prefill_rate: 5_000.0,
            step_ms: 1.0,
            exact: true,
            rss: 1,
            pulls: PullReport::default(),
        }
    }

    async fn thaw(&self) {
        let _ = self.frozen.subscribe().wait_for(|frozen| !*frozen).await;
    }

    fn count(&self, change: impl FnOnce(&mut Counters)) {
        self.counters.send_modify(change);
    }

    /// Prompt tokens that are cached or pulled (a pull never fails). The others count as cached for the next
    /// request.
    fn look_up(&self, request: &GenerateRequest) -> (u32, Vec<BlockId>) {
        let key = super::cluster_key();
        let chain = key.chain(request.root, &request.prompt);
        let mut state = self.state.lock();
        let held = chain.iter().take_while(|unit| state.held.contains(unit)).count();
        let pulled = request.pull.as_ref().map_or(0, |pull| pull.tokens as usize / HASH_UNIT_TOKENS);
        let leading = held.max(pulled);
        let max_units = (request.prompt.len() - 1) / HASH_UNIT_TOKENS;
        let new: Vec<BlockId> = chain.into_iter().filter(|unit| state.held.insert(*unit)).collect();
        ((leading.min(max_units) * HASH_UNIT_TOKENS) as u32, new)
    }

    fn send_stored(&self, units: Vec<BlockId>) {
        if units.is_empty() {
            return;
        }
        let mut state = self.state.lock();
        let event = stored(units);
        state.log.push(event.clone());
        let first_sequence = state.log.len() as u64;
        // Sent under the lock, so that sequence numbers are sent in order.
        let batch = KvEventBatch { epoch: Epoch(self.setup.epoch), first_sequence, events: vec![event] };
        let _ = self.events.send(batch);
    }
}

fn stored(units: Vec<BlockId>) -> KvEvent {
    KvEvent::Stored { parent: BlockId([0; 16]), units, medium: Medium::Device }
}

async fn serve(shared: Arc<Shared>, connection: Connection) {
    let mut streams = tokio::task::JoinSet::new();
    while let Ok(incoming) = connection.accept().await {
        match incoming {
            Incoming::Generate(call) => {
                let request = &call.request;
                shared.state.lock().requests.push(request.clone());
                let name = SequenceName { request: request.request_id.clone(), choice: request.choice };
                let max_tokens = request.stop.max_tokens;
                shared.sequences.lock().generated((request.root, name), &request.prompt, max_tokens);
                let cached = shared.look_up(request);
                shared.count(|c| c.received += 1);
                streams.spawn(generate(Arc::clone(&shared), *call, cached));
            }
            Incoming::Encode(call) => {
                shared.state.lock().encodes.push(call.request.clone());
                shared.count(|c| c.received += 1);
                streams.spawn(encode(Arc::clone(&shared), call));
            }
            Incoming::Sequence(call) => {
                let shared = Arc::clone(&shared);
                streams.spawn(async move { fake_sequences::serve(&shared.sequences, call).await });
            }
            Incoming::Operation(call) => {
                let shared = Arc::clone(&shared);
                streams.spawn(async move { fake_sessions::serve(&shared.sessions, *call).await });
            }
            Incoming::WorkerRpc(rpc) => {
                streams.spawn(rpc.serve(Api(Arc::clone(&shared))));
            }
            Incoming::KvSnapshot(reply) => {
                let snapshot = {
                    let state = shared.state.lock();
                    let runs = state.log.iter().filter_map(|event| match event {
                        KvEvent::Stored { parent, units, medium } => Some((*parent, units.clone(), *medium)),
                        _ => None,
                    });
                    let runs = runs.collect();
                    KvSnapshot {
                        epoch: Epoch(shared.setup.epoch),
                        sequence: state.log.len() as u64,
                        runs,
                        resume_points: vec![],
                    }
                };
                reply.send(&snapshot).await.unwrap();
            }
            other => panic!("a coordinator does not open {other:?}"),
        }
    }
}

async fn generate(shared: Arc<Shared>, mut call: GenerateCall, (cached, new): (u32, Vec<BlockId>)) {
    let request = call.request;
    let cancelled = call.reply.cancelled();
    let run = async {
        let _ = shared.open.subscribe().wait_for(|open| *open).await;
        shared.thaw().await;
        let fail = shared.state.lock().fail.clone();
        if let Some(error) = fail {
            return call.reply.send(&GenerateFrame::Failed(error)).await;
        }
        let computed_tokens = request.prompt.len() as u32 - cached;
        shared.send_stored(new);
        shared.count(|c| c.computed += u64::from(computed_tokens));
        if request.prompt_logprobs.is_some() {
            let logprobs = prompt_logprobs(&request);
            for part in logprobs.chunks(3) {
                call.reply.send(&GenerateFrame::Prompt(part.to_vec())).await?;
            }
        }
        let started =
            Started { cached_tokens: cached, estimated: false, computed_tokens, hit_stop: "absent".into() };
        call.reply.send(&GenerateFrame::Started(started)).await?;
        let start = request.prompt.iter().fold(7u32, |sum, &t| sum.wrapping_mul(31).wrapping_add(t));
        for i in request.emitted.len() as u32..request.stop.max_tokens {
            let _ = shared.tokens.subscribe().wait_for(|tokens| i < *tokens).await;
            shared.thaw().await;
            let fail = shared.state.lock().fail.clone();
            if let Some(error) = fail {
                return call.reply.send(&GenerateFrame::Failed(error)).await;
            }
            let id = letter(start, i);
            let logprobs = request.sampling.logprobs.map(|n| TokenLogprobs {
                chosen: -0.5,
                top: (0..u32::from(n)).map(|k| (id + k, -0.5 - k as f32)).collect(),
            });
            let token = TokenOut { id, text: char::from(id as u8).into(), logprobs };
            call.reply.send(&GenerateFrame::Tokens(vec![token])).await?;
        }
        shared.thaw().await;
        let (drafted_tokens, accepted_tokens) = shared.state.lock().drafted;
        call.reply
            .send(&GenerateFrame::Finished(Finished {
                reason: FinishReason::Length,
                matched: None,
                tail: String::new(),
                completion_tokens: request.stop.max_tokens,
                cached_tokens: None,
                preemptions: 0,
                drafted_tokens,
                accepted_tokens,
            }))
            .await
    };
    tokio::select! {
        biased;
        ended = run => match ended {
            Ok(()) => shared.count(|c| c.finished += 1),
            Err(_) => shared.count(|c| c.cancelled += 1),
        },
        () = cancelled => shared.count(|c| c.cancelled += 1),
    }
}

/// The log-probabilities of a prompt: a function of each token and its position.
fn prompt_logprobs(request: &GenerateRequest) -> Vec<PromptLogprob> {
    let top = request.prompt_logprobs.map_or(0, |requested| u32::from(requested.top));
    let scored = |(at, token): (usize, &u32)| PromptLogprob {
        logprob: -(at as f32) - (token % 8) as f32 / 8.0,
        rank: at as u32,
        top: (0..top).map(|k| (k + 97, -0.25 - k as f32)).collect(),
    };
    request.prompt.iter().enumerate().skip(1).map(scored).collect()
}

/// The values of a text: a function of its tokens and of where its second part begins.
pub(crate) fn values(text: &EncodeText, task: ModelTask) -> Vec<f32> {
    let sum: u32 = text.tokens.iter().zip(1..).map(|(token, index)| token * index).sum();
    match task {
        ModelTask::Generate | ModelTask::GenerateFromImages => Vec::new(),
        ModelTask::Embed { width } => (0..width).map(|i| (sum % 97 + i * i % 13) as f32 - 40.0).collect(),
        ModelTask::Rerank { scores } => {
            let start = text.segment_start.unwrap_or(0);
            (0..scores).map(|i| (sum % 31 + start + i) as f32 / 16.0 - 1.0).collect()
        }
    }
}

async fn encode(shared: Arc<Shared>, call: EncodeCall) {
    let request = call.request;
    let cancelled = call.reply.cancelled();
    let run = async {
        let _ = shared.open.subscribe().wait_for(|open| *open).await;
        shared.thaw().await;
        let fail = shared.state.lock().fail.clone();
        match fail {
            Some(error) => call.reply.fail(error).await,
            None => {
                let encoded: Vec<Vec<f32>> =
                    request.texts.iter().map(|text| values(text, shared.setup.task)).collect();
                call.reply.send(&encoded).await
            }
        }
    };
    tokio::select! {
        biased;
        ended = run => match ended {
            Ok(()) => shared.count(|c| c.finished += 1),
            Err(_) => shared.count(|c| c.cancelled += 1),
        },
        () = cancelled => shared.count(|c| c.cancelled += 1),
    }
}

#[derive(Clone)]
struct Api(Arc<Shared>);

impl WorkerApi for Api {
    async fn kv_replay(self, _: Context, from: u64) -> KvReplay {
        let state = self.0.state.lock();
        let from = usize::try_from(from).unwrap().max(1);
        let events: Vec<KvEvent> = state.log.iter().skip(from - 1).cloned().collect();
        if !events.is_empty() && !self.0.setup.keeps_events {
            return KvReplay::TakeSnapshot;
        }
        let epoch = Epoch(self.0.setup.epoch);
        KvReplay::Events(KvEventBatch { epoch, first_sequence: from as u64, events })
    }

    async fn drain(self, _: Context) {
        self.0.state.lock().draining = true;
        self.0.sessions.drain(true);
    }

    async fn undrain(self, _: Context) {
        self.0.state.lock().draining = false;
        self.0.sessions.drain(false);
    }

    async fn status(self, _: Context) -> WorkerStatus {
        self.0.thaw().await;
        WorkerStatus {
            node: NodeId::new(self.0.setup.name).unwrap(),
            models: self.0.models(),
            load: self.0.report(),
            kv_sequence: self.0.state.lock().log.len() as u64,
            uptime_ms: 1,
        }
    }

    async fn metrics_text(self, _: Context) -> String {
        "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{model_name=\"tiny\"} 0\n# EOF\n"
            .into()
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

    /// While prompts are not computed, half of each is.
    async fn prompt_progress(
        self,
        _: Context,
        root: BlockId,
        name: proto::sequence::SequenceName,
    ) -> Option<proto::sequence::PromptProgress> {
        let state = self.0.state.lock();
        let is_it = |request: &&GenerateRequest| {
            (request.root, &request.request_id, request.choice) == (root, &name.request, name.choice)
        };
        let prompt = state.requests.iter().rfind(is_it)?.prompt.len() as u32;
        let computed = if *self.0.open.borrow() { prompt } else { prompt / 2 };
        Some(proto::sequence::PromptProgress { computed, prompt })
    }

    async fn models(self, _: Context, _: proto::deployment::ModelsOrder) -> proto::deployment::ModelsReport {
        proto::deployment::ModelsReport::default()
    }
}
