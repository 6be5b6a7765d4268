//! A server of another project as a [`Generator`].

use super::OpenedEngine;
use super::continuation::lost_in_continuation;
use super::lost_tokens::LostTokens;
use super::metrics::{ExternalMetrics, MODELLED, NO_EVENTS, SleepMetrics, reason_of};
use super::process::EngineProcess;
use super::servers::ModelServer;
use super::sleeper::Sleeper;
use crate::generator::{Generator, RunningGeneration};
use engine::engine::EngineLoad;
use engine::engine::thread::EngineHandle;
use engine::images::RemoteEncoder;
use engine::kv_events::EventLog;
use engine::pull::Source;
use engine::sampling::stop::{Ending, OutputText};
use engine::telemetry::{EngineMetrics, FinishedLabel, Reason};
use engine::usage::RequestUsage;
use external::{
    Engine, EngineError, EngineEvent, EngineIndex, EngineKind, EngineRequest, EngineUsage, IndexConfig,
    SlotChoice, SlotModel, SubscriberLimits, Wait, spawn_kv_follower,
};
use futures::FutureExt;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use prometheus_client::registry::Registry;
use proto::block::{BlockId, ClusterKey};
use proto::event::KvEvent;
use proto::ids::Epoch;
use proto::message::{
    FinishReason, Finished, GenerateError, GenerateFrame, GenerateRequest, MAX_TOKENS_PER_FRAME,
    OPTIONAL_TOOLS, PullReport, Started, TokenOut,
};
use std::sync::Arc;
use std::time::{Duration, Instant};
use text::tokenizer::Tokenizer;
use tokio::sync::{Notify, Semaphore, SemaphorePermit, mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

/// Interval between two readings of the server's load.
const POLL_EVERY: Duration = Duration::from_secs(1);
/// Readings without an answer after which the server counts as lost. One is enough if nothing listens.
const MAX_FAILURES: u32 = 5;
/// Pause before a server that seems lost is asked again.
const ASK_AGAIN: Duration = Duration::from_millis(100);
/// Hash units that the replay ring of events may name.
const EVENT_RING_UNITS: usize = 256 * 1024;
/// Slots of a llama-server that does not report how many it has.
const ASSUMED_SLOTS: u32 = 1;
/// Prompts that are computed in fewer tokens do not measure the rate of prefill.
const RATED_TOKENS: u32 = 64;

/// Receives the reason when the server is lost.
pub(crate) type OnLost = Box<dyn FnOnce(&str) + Send>;

pub(crate) struct ExternalGenerator {
    shared: Arc<Shared>,
    tasks: Vec<JoinHandle<()>>,
}

struct Shared {
    engine: Arc<dyn Engine>,
    kind: EngineKind,
    tokenizer: Arc<Tokenizer>,
    max_model_len: u32,
    cache: CacheView,
    events: Mutex<EventLog>,
    newest: watch::Sender<u64>,
    counts: Mutex<Counts>,
    metrics: ExternalMetrics,
    registry: Registry,
    process: Option<Arc<EngineProcess>>,
    sleeper: Option<Arc<Sleeper>>,
    /// Until the generator is stopped, if it is the server of a model that is loaded by order.
    server: Mutex<Option<ModelServer>>,
    on_lost: Mutex<Option<OnLost>>,
    /// A request found the server gone.
    check: Notify,
    /// KV bytes of the whole cache, if known.
    kv_total: u64,
}

/// Knowledge of the server's prefix cache.
enum CacheView {
    /// Followed by its events.
    Events(Arc<Mutex<EngineIndex>>),
    /// Predicted from the requests.
    Slots {
        model: Mutex<SlotModel>,
        free: Semaphore,
    },
    Unknown,
}

#[derive(Debug, Default)]
struct Counts {
    /// Requests that have no token yet, and their prompt tokens that are expected to be computed.
    waiting: u32,
    waiting_tokens: u64,
    /// Requests that have tokens and no end.
    running: u32,
    tokens: u64,
    steps: u64,
    /// The last event, or answer to a reading of the load.
    alive: Option<Instant>,
    prefill_rate: f32,
    step_ms: f32,
    kv_usage: f32,
}

impl Counts {
    fn progress(&mut self) {
        self.steps += 1;
        self.alive = Some(Instant::now());
    }
}

impl ExternalGenerator {
    /// Follows the server's cache under the cluster key. `on_lost` is called once, if the server is gone or hangs.
    /// Must be called inside a runtime.
    pub(crate) fn start(opened: OpenedEngine, key: &ClusterKey, epoch: Epoch, on_lost: OnLost) -> Self {
        let OpenedEngine { engine, info, files, kv_events, max_model_len, process, sleeper, server, .. } =
            opened;
        let kind = engine.kind();
        let units = key.units();
        let cache = match (&kv_events, kind) {
            (Some(source), _) => {
                let config = IndexConfig::new(kind, source.replay.is_some());
                CacheView::Events(Arc::new(Mutex::new(EngineIndex::new(units, config))))
            }
            (None, EngineKind::LlamaServer) => {
                let slots = info.slots.unwrap_or(ASSUMED_SLOTS).max(1);
                let model = Mutex::new(SlotModel::new(units, slots));
                CacheView::Slots { model, free: Semaphore::new(slots as usize) }
            }
            (None, _) => CacheView::Unknown,
        };
        let metrics = ExternalMetrics::default();
        let mut registry = Registry::default();
        metrics.register(&mut registry);
        let sleeps = SleepMetrics::default();
        if sleeper.is_some() {
            sleeps.register(&mut registry);
        }
        let cached_tokens = match (info.cache_blocks, info.block_tokens, info.slots) {
            (Some(blocks), Some(tokens), _) => blocks.saturating_mul(tokens.into()),
            (_, _, Some(slots)) => u64::from(slots).saturating_mul(max_model_len.into()),
            _ => 0,
        };
        let shared = Arc::new(Shared {
            engine,
            kind,
            tokenizer: files.tokenizer,
            max_model_len,
            cache,
            events: Mutex::new(EventLog::new(epoch, EVENT_RING_UNITS)),
            newest: watch::Sender::new(0),
            counts: Mutex::default(),
            metrics,
            registry,
            process,
            sleeper: sleeper.clone(),
            server: Mutex::new(server),
            on_lost: Mutex::new(Some(on_lost)),
            check: Notify::new(),
            kv_total: cached_tokens.saturating_mul(files.token_bytes),
        });
        let mut tasks = vec![tokio::spawn(watch_engine(Arc::clone(&shared)))];
        if let Some(sleeper) = sleeper {
            let shared = Arc::clone(&shared);
            tasks.push(tokio::spawn(async move {
                sleeper.run(sleeps, || shared.cache_cleared(), |reason| shared.lost(reason)).await;
            }));
        }
        if let (CacheView::Events(index), Some(source)) = (&shared.cache, kv_events) {
            let log = Arc::clone(&shared);
            let report = move |events| log.append(events);
            tasks.push(spawn_kv_follower(source, SubscriberLimits::default(), Arc::clone(index), report));
        }
        Self { shared, tasks }
    }
}

#[cfg(test)]
impl ExternalGenerator {
    pub(super) fn max_model_len(&self) -> u32 {
        self.shared.max_model_len
    }
}

impl Drop for ExternalGenerator {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

impl Shared {
    fn append(&self, events: Vec<KvEvent>) {
        if events.is_empty() {
            return;
        }
        let last = {
            let mut log = self.events.lock();
            log.append(events);
            log.last_sequence()
        };
        self.newest.send_replace(last);
    }

    /// Why the cache is not known exactly.
    fn inexact(&self) -> Option<&'static str> {
        match &self.cache {
            CacheView::Events(index) => index.lock().inexact().map(reason_of),
            CacheView::Slots { .. } => Some(MODELLED),
            CacheView::Unknown => Some(NO_EVENTS),
        }
    }

    /// The server has emptied its cache.
    fn cache_cleared(&self) {
        if let CacheView::Events(index) = &self.cache {
            // Locked until the events are in the log, as the subscription's are, which keeps their order.
            let mut index = index.lock();
            index.cleared();
            let events = index.take_events();
            self.append(events);
        }
        self.counts.lock().progress();
    }

    /// The server sleeps, falls asleep or wakes, and answers only what does not need its model.
    fn away(&self) -> bool {
        self.sleeper.as_ref().is_some_and(|sleeper| !sleeper.settled())
    }

    /// The server is gone, or hangs.
    fn lost(&self, reason: &str) {
        if let Some(on_lost) = self.on_lost.lock().take() {
            on_lost(reason);
        }
    }
}

impl Generator for ExternalGenerator {
    fn submit(
        &self,
        request: GenerateRequest,
        // Never there: such a worker offers no adapters.
        _adapter: Option<[u8; 32]>,
        _pull: Option<Box<dyn Source>>,
        _encoder: Option<Arc<dyn RemoteEncoder>>,
        frames: mpsc::UnboundedSender<GenerateFrame>,
        usage: Arc<RequestUsage>,
    ) -> BoxFuture<'static, Result<RunningGeneration, GenerateError>> {
        usage.is_unknown();
        let started = Job::new(Arc::clone(&self.shared), request).map(|job| {
            let task = tokio::spawn(job.run(frames));
            RunningGeneration::new(move || task.abort())
        });
        futures::future::ready(started).boxed()
    }

    fn load(&self) -> EngineLoad {
        let counts = self.shared.counts.lock();
        EngineLoad {
            running: counts.running as usize,
            waiting: counts.waiting as usize,
            pending_prefill_tokens: counts.waiting_tokens,
            kv_used: (self.shared.kv_total as f64 * f64::from(counts.kv_usage)) as u64,
            kv_total: self.shared.kv_total,
            steps: counts.steps,
            tokens: counts.tokens,
            prefill_rate: counts.prefill_rate,
            step_ms: counts.step_ms,
        }
    }

    fn stalled(&self) -> Duration {
        // The calls to sleep and to wake have limits of their own.
        if self.shared.away() {
            return Duration::ZERO;
        }
        let counts = self.shared.counts.lock();
        match counts.running + counts.waiting {
            0 => Duration::ZERO,
            _ => counts.alive.map_or(Duration::ZERO, |alive| alive.elapsed()),
        }
    }

    fn healthy(&self) -> bool {
        self.shared.on_lost.lock().is_some()
    }

    fn events(&self) -> &Mutex<EventLog> {
        &self.shared.events
    }

    fn newest_event(&self) -> watch::Receiver<u64> {
        self.shared.newest.subscribe()
    }

    fn exact(&self) -> bool {
        self.shared.inexact().is_none()
    }

    fn outside_bytes(&self) -> u64 {
        self.shared.process.as_ref().map_or(0, |process| process.bytes())
    }

    fn transfers(&self) -> PullReport {
        PullReport::default()
    }

    fn metrics_text(&self) -> String {
        let Shared { metrics, registry, counts, cache, .. } = &*self.shared;
        {
            let counts = counts.lock();
            metrics.requests.running.set(counts.running.into());
            metrics.requests.waiting.set(counts.waiting.into());
            metrics.requests.kv_usage.set(counts.kv_usage.into());
        }
        metrics.requests.rss.set(engine::memory::resident_bytes().cast_signed());
        metrics.update_exact(self.shared.inexact());
        if let CacheView::Events(index) = cache {
            metrics.update_index(&index.lock().stats());
        }
        EngineMetrics::text(registry)
    }

    fn stop(&self) {
        self.tasks.iter().for_each(JoinHandle::abort);
        drop(self.shared.server.lock().take());
    }

    fn built_in(&self) -> Option<&EngineHandle> {
        None
    }
}

/// Reads the server's load, and notices when the server is gone.
async fn watch_engine(shared: Arc<Shared>) {
    let mut tick = interval(POLL_EVERY);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut failures = 0;
    let exited = async {
        match &shared.process {
            Some(process) => process.ended().await,
            None => std::future::pending().await,
        }
    };
    tokio::pin!(exited);
    loop {
        tokio::select! {
            _ = tick.tick() => {}
            () = shared.check.notified() => {}
            reason = &mut exited => return shared.lost(&reason),
        }
        let error = match shared.engine.load().await {
            Ok(load) => {
                failures = 0;
                let mut counts = shared.counts.lock();
                counts.kv_usage = load.kv_usage.unwrap_or(0.0);
                counts.progress();
                if let (Some(server), Some(process)) = (&mut *shared.server.lock(), &shared.process) {
                    server.count(process.bytes());
                }
                continue;
            }
            Err(error) => error,
        };
        let refused = matches!(error, EngineError::Connect { .. });
        // One that falls asleep or wakes may be slow to answer.
        failures += u32::from(refused || !shared.away());
        tracing::debug!(%error, failures, "the engine did not report its load");
        if refused {
            sleep(ASK_AGAIN).await;
        }
        // `/health` of some engines generates a token.
        let gone = refused
            && match shared.away() {
                true => shared.engine.load().await.is_err(),
                false => shared.engine.health().await.is_err(),
            };
        if failures < MAX_FAILURES && !gone {
            continue;
        }
        return shared.lost(&format!("the engine does not answer: {error}"));
    }
}

/// One generation, from its check to its last frame.
struct Job {
    shared: Arc<Shared>,
    request: EngineRequest,
    root: BlockId,
    text: OutputText,
    /// Tokens that an earlier attempt has sent.
    emitted: u32,
    /// The end, if the emitted tokens were the whole answer.
    over: Option<Ending>,
    prompt_tokens: u32,
    predicted: u32,
    deadline: Option<Duration>,
    received: Instant,
    /// Time for which the engine did not serve.
    asleep: Duration,
    /// Time from receipt to the first token.
    first_token: Option<Duration>,
    phase: Phase,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Waiting { tokens: u64 },
    Running,
    Over,
}

/// A slot of a llama-server. Dropping it reports a failed request, whose tokens are forgotten at once.
struct SlotLease<'a> {
    shared: &'a Shared,
    model: &'a Mutex<SlotModel>,
    id: u32,
    over: bool,
    _permit: SemaphorePermit<'a>,
}

impl Drop for SlotLease<'_> {
    fn drop(&mut self) {
        if self.over {
            return;
        }
        let events = {
            let mut model = self.model.lock();
            model.failed(self.id);
            model.take_events()
        };
        self.shared.append(events);
    }
}

impl Job {
    fn new(shared: Arc<Shared>, request: GenerateRequest) -> Result<Self, GenerateError> {
        let received = Instant::now();
        let mut text = OutputText::new(Arc::clone(&shared.tokenizer), request.stop.clone())?;
        let mut over = None;
        for &token in request.emitted.iter() {
            over = over.or(text.push(token).1);
        }
        let count = |tokens: &[u32]| u32::try_from(tokens.len()).unwrap_or(u32::MAX);
        let (prompt_tokens, emitted) = (count(&request.prompt), count(&request.emitted));
        let limit = u64::from(shared.max_model_len);
        let need = u64::from(prompt_tokens) + u64::from(emitted) + 1;
        if need > limit && over.is_none() {
            return Err(GenerateError::ContextLength { need, limit });
        }
        let room = limit.saturating_sub(u64::from(prompt_tokens)).min(u32::MAX.into()) as u32;
        let mut stop = request.stop;
        stop.max_tokens = stop.max_tokens.min(room).saturating_sub(emitted).max(1);
        stop.min_tokens = stop.min_tokens.saturating_sub(emitted);
        let mut sampling = request.sampling;
        if emitted > 0 {
            // Draws of the rest must not repeat those of the beginning.
            let start = [sampling.seed.to_le_bytes(), u64::from(emitted).to_le_bytes()].concat();
            let [a, b, c, d, e, f, g, h, ..] = *blake3::hash(&start).as_bytes();
            sampling.seed = u64::from_le_bytes([a, b, c, d, e, f, g, h]);
        }
        // Without a constraint a model still writes tool calls, and the answer's reader finds them.
        let grammar =
            request.grammar.filter(|grammar| grammar.trigger.is_none() || grammar.field != OPTIONAL_TOOLS);
        let seeded = sampling.seeded;
        let engine_request = EngineRequest {
            prompt: [&*request.prompt, &*request.emitted].concat().into(),
            sampling,
            stop,
            grammar,
            reproducible: seeded,
            root: Some(request.root),
            priority: 0,
            slot: None,
        };
        let unsupported = |field: String, reason: String| {
            shared.metrics.unsupported.inc();
            GenerateError::Unsupported { field, reason }
        };
        let scored =
            request.prompt_logprobs.map(|_| ("prompt_logprobs", "gives no log-probabilities of prompts"));
        let images = (!request.images.is_empty()).then_some(("images", "gets prompts as tokens alone"));
        if let Some((field, why)) = scored.or(images) {
            return Err(unsupported(field.to_owned(), format!("{} {why}", shared.kind)));
        }
        if let Err(error) = shared.engine.can_serve(&engine_request) {
            return Err(unsupported(error.argument, format!("{} {}", error.engine, error.reason)));
        }
        if emitted > 0
            && let Some(field) = lost_in_continuation(&engine_request)
        {
            return Err(unsupported(field, format!("{} cannot continue an answer with it", shared.kind)));
        }
        let waits = u64::from(prompt_tokens.saturating_sub(request.predicted_cached));
        {
            let mut counts = shared.counts.lock();
            counts.waiting += 1;
            counts.waiting_tokens += waits;
        }
        Ok(Self {
            root: request.root,
            text,
            emitted,
            over,
            prompt_tokens,
            predicted: request.predicted_cached.min(prompt_tokens),
            deadline: (request.deadline_ms > 0).then(|| Duration::from_millis(request.deadline_ms)),
            received,
            asleep: Duration::ZERO,
            first_token: None,
            request: engine_request,
            phase: Phase::Waiting { tokens: waits },
            shared,
        })
    }

    async fn run(mut self, frames: mpsc::UnboundedSender<GenerateFrame>) {
        let limit = self.deadline;
        let generated = match limit {
            Some(limit) => timeout(limit, self.generate(&frames)).await,
            None => Ok(self.generate(&frames).await),
        };
        let requests = &self.shared.metrics.requests;
        let (reason, frame) = match generated {
            Ok(Ok(finished)) => {
                requests.e2e.0.observe(self.received.elapsed().as_secs_f64());
                let reason = match finished.reason {
                    FinishReason::Stop => Reason::stop,
                    FinishReason::Length => Reason::length,
                    FinishReason::Cancelled => Reason::abort,
                };
                (reason, GenerateFrame::Finished(finished))
            }
            Ok(Err(error)) => (Reason::error, GenerateFrame::Failed(error)),
            Err(_) => {
                let after_ms = u64::try_from(self.received.elapsed().as_millis()).unwrap_or(u64::MAX);
                (Reason::error, GenerateFrame::Failed(GenerateError::DeadlineExceeded { after_ms }))
            }
        };
        requests.finished.get_or_create(&FinishedLabel { finished_reason: reason }).inc();
        // Fails if the caller is gone.
        let _ = frames.send(frame);
    }

    async fn generate(
        &mut self,
        frames: &mpsc::UnboundedSender<GenerateFrame>,
    ) -> Result<Finished, GenerateError> {
        if let Some(ending) = self.over.take() {
            self.start(frames, 0, false);
            return Ok(self.finished(ending, None));
        }
        let shared = Arc::clone(&self.shared);
        let _request = match &shared.sleeper {
            Some(sleeper) => {
                let arrived = Instant::now();
                // Another worker is tried, as after every loss of an engine.
                let request = sleeper.begin_request().await.ok_or(GenerateError::Internal)?;
                self.asleep = arrived.elapsed();
                Some(request)
            }
            None => None,
        };
        let mut lease = match &shared.cache {
            CacheView::Slots { model, free } => {
                let (lease, choice) = self.lease(&shared, model, free).await?;
                self.request.slot = Some(choice);
                Some(lease)
            }
            CacheView::Events(index) => {
                index.lock().register(self.root, &self.request.prompt, true);
                None
            }
            CacheView::Unknown => None,
        };
        let requests = &shared.metrics.requests;
        requests.prompt_tokens.inc_by(self.prompt_tokens.into());
        let mut stream = match shared.engine.submit(self.request.clone()).await {
            Ok(stream) => stream,
            Err(error) => return Err(self.failure(error)),
        };
        let mut lost_tokens =
            (shared.kind == EngineKind::LlamaServer).then(|| LostTokens::new(Arc::clone(&shared.tokenizer)));
        let (mut output, mut last_token) = (Vec::new(), None::<Instant>);
        let (ending, usage) = loop {
            let event = match stream.next().await {
                Some(Ok(event)) => event,
                Some(Err(error)) => return Err(self.failure(error)),
                None => return Err(GenerateError::Internal),
            };
            shared.counts.lock().progress();
            match event {
                EngineEvent::Started { cached_tokens } => {
                    let (cached, estimated) = match cached_tokens {
                        Some(cached) => (cached, false),
                        None => (self.predicted, true),
                    };
                    self.start(frames, cached, estimated);
                }
                EngineEvent::Tokens { tokens, text } => {
                    let tokens = match &mut lost_tokens {
                        Some(lost_tokens) => lost_tokens.complete(tokens, &text),
                        None => tokens,
                    };
                    let (now, count) = (Instant::now(), tokens.len() as u64);
                    self.count_tokens(now, last_token.replace(now), count);
                    let (mut out, mut ending) = (Vec::with_capacity(tokens.len()), None);
                    for token in tokens {
                        output.push(token.id);
                        let (text, ends) = self.text.push(token.id);
                        out.push(TokenOut { id: token.id, text, logprobs: token.logprobs });
                        ending = ends;
                        if ending.is_some() {
                            break;
                        }
                    }
                    for frame in out.chunks(MAX_TOKENS_PER_FRAME) {
                        if frames.send(GenerateFrame::Tokens(frame.to_vec())).is_err() {
                            return Err(GenerateError::Internal);
                        }
                    }
                    // The answer ends here; the engine's own end would only tell the usage.
                    if let Some(ending) = ending {
                        break (ending, self.usage(&mut stream).await);
                    }
                }
                EngineEvent::Finished(finish) => {
                    break (self.text.end(finish.reason, finish.matched), Some(finish.usage));
                }
            }
        };
        let cached = usage.and_then(|usage| usage.cached_tokens);
        if let (Some(lease), CacheView::Slots { model, .. }) = (&mut lease, &shared.cache) {
            let id = usage.and_then(|usage| usage.slot).unwrap_or(lease.id);
            let mut model = model.lock();
            if id != lease.id {
                model.failed(lease.id);
            }
            model.finished(id, self.root, &self.request.prompt, &output, cached);
            lease.over = true;
            let events = model.take_events();
            drop(model);
            shared.append(events);
        }
        self.measure(cached);
        Ok(self.finished(ending, cached))
    }

    /// Waits for a free slot of the server.
    async fn lease<'a>(
        &self,
        shared: &'a Shared,
        model: &'a Mutex<SlotModel>,
        free: &'a Semaphore,
    ) -> Result<(SlotLease<'a>, SlotChoice), GenerateError> {
        let permit = free.acquire().await.map_err(|_| GenerateError::Internal)?;
        let (assignment, events) = {
            let mut model = model.lock();
            (model.assign(self.root, &self.request.prompt), model.take_events())
        };
        shared.append(events);
        let choice = assignment.ok_or(GenerateError::Internal)?.choice;
        Ok((SlotLease { shared, model, id: choice.id, over: false, _permit: permit }, choice))
    }

    /// Reads the rest of an answer that has ended for us, up to the usage. The engine was asked for no more than
    /// this, unless a stop string or token that it does not know has ended it: then the rest is not waited for.
    async fn usage(&self, stream: &mut external::EngineStream) -> Option<EngineUsage> {
        let rest = async {
            while let Some(Ok(event)) = stream.next().await {
                if let EngineEvent::Finished(finish) = event {
                    return Some(finish.usage);
                }
            }
            None
        };
        timeout(ASK_AGAIN, rest).await.ok().flatten()
    }

    fn start(&mut self, frames: &mpsc::UnboundedSender<GenerateFrame>, cached: u32, estimated: bool) {
        let cached = cached.min(self.prompt_tokens);
        // Fails if the caller is gone, which the first token will tell.
        let _ = frames.send(GenerateFrame::Started(Started {
            cached_tokens: cached,
            estimated,
            computed_tokens: self.prompt_tokens - cached,
            hit_stop: self.shared.kind.name().to_owned(),
        }));
    }

    fn count_tokens(&mut self, now: Instant, last: Option<Instant>, count: u64) {
        let requests = &self.shared.metrics.requests;
        requests.generation_tokens.inc_by(count);
        let mut counts = self.shared.counts.lock();
        counts.tokens += count;
        match last {
            None => {
                let took = now.duration_since(self.received);
                requests.ttft.0.observe(took.as_secs_f64());
                self.first_token = Some(took);
                if let Phase::Waiting { tokens } = self.phase {
                    counts.waiting -= 1;
                    counts.waiting_tokens -= tokens;
                    counts.running += 1;
                    self.phase = Phase::Running;
                }
            }
            Some(last) if count > 0 => {
                let each = now.duration_since(last).as_secs_f64() / count as f64;
                for _ in 0..count {
                    requests.itl.0.observe(each);
                }
                counts.step_ms = blend(counts.step_ms, (each * 1e3) as f32);
            }
            Some(_) => {}
        }
    }

    /// Measures the prediction and the rate of prefill.
    fn measure(&self, cached: Option<u32>) {
        let Some(cached) = cached else { return };
        let cached = cached.min(self.prompt_tokens);
        let computed = self.prompt_tokens - cached;
        if let Some(took) = self.first_token.filter(|_| computed >= RATED_TOKENS) {
            let rate = computed as f32 / took.saturating_sub(self.asleep).as_secs_f32().max(1e-6);
            let mut counts = self.shared.counts.lock();
            counts.prefill_rate = blend(counts.prefill_rate, rate);
        }
        let ExternalMetrics { requests, mispredicted, .. } = &self.shared.metrics;
        requests.prefix_queries.inc_by(self.prompt_tokens.into());
        requests.prefix_hits.inc_by(cached.into());
        requests.prefill_computed.inc_by(computed.into());
        if self.emitted == 0 && cached != self.predicted {
            mispredicted.inc();
        }
    }

    fn finished(&self, ending: Ending, cached: Option<u32>) -> Finished {
        Finished {
            reason: ending.reason,
            matched: ending.matched,
            tail: ending.tail,
            completion_tokens: self.text.generated(),
            cached_tokens: cached.map(|cached| cached.min(self.prompt_tokens)),
            preemptions: 0,
            drafted_tokens: 0,
            accepted_tokens: 0,
        }
    }

    /// The error that the coordinator gets. Has the server checked if it seems to be gone.
    fn failure(&self, error: EngineError) -> GenerateError {
        tracing::info!(engine = %self.shared.kind, %error, "the engine did not finish a request");
        match &error {
            EngineError::TimedOut { wait: Wait::FirstEvent | Wait::NextEvent, .. } => {
                self.shared.lost(&format!("the engine hangs: {error}"))
            }
            error if error.lost() => self.shared.check.notify_one(),
            _ => {}
        }
        match error {
            EngineError::Unsupported(error) => GenerateError::Unsupported {
                field: error.argument,
                reason: format!("{} {}", error.engine, error.reason),
            },
            EngineError::Overloaded { .. } => GenerateError::QueueFull,
            error @ EngineError::Refused { .. } if !error.retryable() => {
                let grammar = self.request.grammar.as_ref().map(|grammar| grammar.field.clone());
                let field = grammar.unwrap_or_else(|| "request".to_owned());
                GenerateError::InvalidField { field, reason: error.to_string() }
            }
            _ => GenerateError::Internal,
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let mut counts = self.shared.counts.lock();
        match std::mem::replace(&mut self.phase, Phase::Over) {
            Phase::Waiting { tokens } => {
                counts.waiting -= 1;
                counts.waiting_tokens -= tokens;
            }
            Phase::Running => counts.running -= 1,
            Phase::Over => {}
        }
    }
}

fn blend(old: f32, new: f32) -> f32 {
    if old == 0.0 { new } else { old + 0.2 * (new - old) }
}
