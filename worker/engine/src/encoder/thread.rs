//! Runs the encoder on its own thread, with a handle for other threads.

use super::queue::{Dequeued, Queue};
use super::{Encoder, Limits, Text};
use crate::Error;
use crate::energy;
use crate::engine::thread::Broken;
use crate::kv_events::EventLog;
use crate::progress::{EngineLoad, Progress, end_process, spawn};
use crate::telemetry::{EngineMetrics, FinishedLabel, Reason};
use crate::usage::{RequestUsage, RowKind, StepShare, divide_step};
use parking_lot::Mutex;
use prometheus_client::registry::Registry;
use proto::ids::Epoch;
use proto::message::GenerateError;
use proto::trace::Span;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};
use tokio::sync::{oneshot, watch};

/// Maximum tokens in the queue. An empty queue takes any request.
const QUEUE_TOKENS: u64 = 1 << 20;

/// Results of a request's texts in order, or an error.
pub type EncodeResult = Result<Vec<Vec<f32>>, GenerateError>;

enum Command {
    Encode {
        texts: Vec<Text>,
        deadline: Option<Instant>,
        trace: Option<Box<Span>>,
        usage: Option<Arc<RequestUsage>>,
        reply: oneshot::Sender<EncodeResult>,
    },
    Stop,
}

/// State that other threads may read at any time.
struct Shared {
    progress: Arc<Progress>,
    limits: Limits,
    /// Tokens of requests that are not answered yet.
    queued: AtomicU64,
    /// Always empty, because an encoder keeps no prefixes.
    events: Mutex<EventLog>,
    registry: Registry,
    metrics: EngineMetrics,
}

/// Handle of the encoder's thread. Cheap to clone.
#[derive(Clone)]
pub struct EncoderHandle {
    commands: Sender<Command>,
    shared: Arc<Shared>,
    steps: watch::Receiver<u64>,
}

impl EncoderHandle {
    /// Moves the encoder to its own thread. A watchdog ends the process if the encoder makes no progress for
    /// `stall_floor` (or 20 slow steps) while work is queued. A failed step calls `broken` and ends only the
    /// encoder; without `broken` it ends the process.
    pub fn start(
        encoder: Encoder,
        epoch: Epoch,
        stall_floor: Duration,
        broken: Option<Broken>,
    ) -> Result<Self, Error> {
        let (commands, inbox) = channel();
        let metrics = EngineMetrics::default();
        let memory = encoder.memory();
        metrics.weight_bytes.set(memory.weights as i64);
        metrics.kv_bytes.set(memory.kv as i64);
        metrics.weight_file_bytes.set(encoder.source_bytes() as i64);
        let mut registry = Registry::default();
        metrics.register(&mut registry);
        let (ticks, steps) = watch::channel(0);
        let shared = Arc::new(Shared {
            progress: Progress::watched(EngineLoad::default(), stall_floor)?,
            limits: encoder.limits,
            queued: AtomicU64::new(0),
            events: Mutex::new(EventLog::new(epoch, 0)),
            registry,
            metrics,
        });
        let serving = Serving {
            queue: Queue::new(encoder.limits),
            encoder,
            shared: Arc::clone(&shared),
            load: EngineLoad::default(),
            ticks,
            broken,
        };
        spawn("kvasir-encoder", move || serving.run(&inbox))?;
        Ok(Self { commands, shared, steps })
    }

    /// Submits texts. Dropping the receiver cancels them. The span `trace`, if any, ends with the request; `usage`
    /// counts what it uses.
    pub fn encode(
        &self,
        texts: Vec<Text>,
        deadline: Option<Instant>,
        mut trace: Option<Span>,
        usage: Option<Arc<RequestUsage>>,
    ) -> Result<oneshot::Receiver<EncodeResult>, GenerateError> {
        if texts.is_empty() {
            let (field, reason) = ("input".to_owned(), "it is empty".to_owned());
            return Err(GenerateError::InvalidField { field, reason });
        }
        texts.iter().try_for_each(|text| self.shared.limits.check(text))?;
        let tokens = tokens(&texts);
        if let Some(span) = &mut trace {
            span.set("kvasir.texts", texts.len());
            span.set("gen_ai.usage.input_tokens", tokens);
        }
        let before = self.shared.queued.fetch_add(tokens, Ordering::Relaxed);
        if before > 0 && before + tokens > QUEUE_TOKENS {
            self.shared.queued.fetch_sub(tokens, Ordering::Relaxed);
            return Err(GenerateError::QueueFull);
        }
        let (reply, answer) = oneshot::channel();
        let command = Command::Encode { texts, deadline, trace: trace.map(Box::new), usage, reply };
        self.commands.send(command).map_err(|_| GenerateError::Internal)?;
        Ok(answer)
    }

    /// Ends the thread after the current step.
    pub fn stop(&self) {
        let _ = self.commands.send(Command::Stop);
    }

    /// Load after the last step.
    pub fn load(&self) -> EngineLoad {
        self.shared.progress.load()
    }

    /// Whether any request is not answered yet.
    pub fn busy(&self) -> bool {
        self.shared.queued.load(Ordering::Relaxed) > 0
    }

    /// Time for which queued work has made no progress.
    pub fn stalled(&self) -> Duration {
        self.shared.progress.stalled()
    }

    /// Whether the encoder makes progress or is idle.
    pub fn healthy(&self) -> bool {
        self.shared.progress.healthy()
    }

    /// The KV event log, which stays empty.
    pub fn events(&self) -> &Mutex<EventLog> {
        &self.shared.events
    }

    pub fn steps(&self) -> watch::Receiver<u64> {
        self.steps.clone()
    }

    /// The encoder's metrics as Prometheus text.
    pub fn metrics_text(&self) -> String {
        self.shared.metrics.rss.set(crate::memory::resident_bytes() as i64);
        EngineMetrics::text(&self.shared.registry)
    }
}

fn tokens(texts: &[Text]) -> u64 {
    texts.iter().map(|text| text.tokens.len() as u64).sum()
}

struct Reply {
    answer: oneshot::Sender<EncodeResult>,
    tokens: u64,
    trace: Option<Box<Span>>,
    usage: Option<Arc<RequestUsage>>,
}

struct Serving {
    encoder: Encoder,
    queue: Queue<Reply>,
    shared: Arc<Shared>,
    load: EngineLoad,
    ticks: watch::Sender<u64>,
    broken: Option<Broken>,
}

impl Serving {
    fn run(mut self, inbox: &Receiver<Command>) {
        self.encoder.bind_thread();
        loop {
            // Idle: wait for a command. Busy: take the commands that are there and go on.
            if self.queue.is_empty() {
                self.shared.progress.queued(Instant::now(), false);
                let Ok(command) = inbox.recv() else { return };
                if !self.handle_command(command) {
                    return;
                }
            }
            while let Ok(command) = inbox.try_recv() {
                if !self.handle_command(command) {
                    return;
                }
            }
            self.remove_ended(Instant::now());
            self.begin_turn();
            let start = Instant::now();
            self.shared.progress.queued(start, !self.queue.is_empty());
            let stepped = self.step(start);
            if let Some(share) = &mut self.encoder.share {
                share.end(stepped.as_ref().map_or(0, |rows| *rows), !self.queue.is_empty());
            }
            match stepped {
                Ok(0) => {}
                Ok(rows) => {
                    let now = Instant::now();
                    let took = now.saturating_duration_since(start);
                    self.count_step(rows, took);
                    self.shared.progress.step_ended(now, took, !self.queue.is_empty());
                }
                Err(error) => {
                    let Some(broken) = self.broken.take() else { end_process(&error, error.exit_code()) };
                    self.shared.progress.queued(Instant::now(), false);
                    broken(&error);
                    return;
                }
            }
            self.publish();
        }
    }

    /// Waits for the turn of an encoder that shares its device, if there are texts.
    fn begin_turn(&mut self) {
        match &mut self.encoder.share {
            Some(share) if !self.queue.is_empty() => {
                self.shared.progress.queued(Instant::now(), false);
                share.begin();
            }
            Some(share) => share.withdraw(),
            None => {}
        }
    }

    fn handle_command(&mut self, command: Command) -> bool {
        let Command::Encode { texts, deadline, trace, usage, reply } = command else { return false };
        let tokens = tokens(&texts);
        self.shared.metrics.prompt_tokens.inc_by(tokens);
        self.queue.push(Instant::now(), texts, deadline, Reply { answer: reply, tokens, trace, usage });
        true
    }

    /// Drops cancelled requests and answers those that have passed their deadline.
    fn remove_ended(&mut self, now: Instant) {
        let shared = &self.shared;
        let is_cancelled = |reply: &Reply| {
            let closed = reply.answer.is_closed();
            if closed {
                shared.queued.fetch_sub(reply.tokens, Ordering::Relaxed);
            }
            closed
        };
        let forgotten = self.queue.forget(is_cancelled);
        for _ in 0..forgotten {
            self.count_end(Reason::abort);
        }
        for mut expired in self.queue.expire(now) {
            expired.reply.trace.iter_mut().for_each(|span| span.fail("deadline_exceeded"));
            let after_ms = now.saturating_duration_since(expired.received).as_millis() as u64;
            self.answer(expired, Reason::error, |_| Err(GenerateError::DeadlineExceeded { after_ms }));
        }
    }

    /// Computes one step and returns its number of rows.
    fn step(&mut self, now: Instant) -> Result<usize, Error> {
        let texts = self.queue.step(now);
        if texts.is_empty() {
            return Ok(0);
        }
        let rows = texts.iter().map(|text| text.tokens.len()).sum();
        let mut step = self.encoder.run(&texts)?;
        let encoded = (0..texts.len()).map(|index| step.pooled(index)).collect::<Result<Vec<_>, _>>()?;
        let ended = Instant::now();
        let took = ended.saturating_duration_since(now);
        let time = divide_step(took, rows, &self.shares(encoded.len()));
        self.shared.metrics.usage.step(took, time.of_requests());
        energy::step(now, ended, time);
        for done in self.queue.complete(encoded) {
            if let Some(started) = done.started {
                let queued = started.saturating_duration_since(done.received);
                self.shared.metrics.queue.0.observe(queued.as_secs_f64());
                if let Some(span) = &done.reply.trace {
                    span.child("queue", done.received).end(started);
                    span.part("compute", started);
                }
            }
            self.shared.metrics.e2e.0.observe(done.received.elapsed().as_secs_f64());
            if done.encoded.iter().all(|values| values.iter().all(|value| value.is_finite())) {
                self.answer(done, Reason::stop, Ok);
            } else {
                tracing::error!("the encoding of a text failed: {}", GenerateError::NotFinite);
                self.answer(done, Reason::error, |_| Err(GenerateError::NotFinite));
            }
        }
        Ok(rows)
    }

    /// The rows of each request of a step of `texts` texts, with what counts their time.
    fn shares(&self, texts: usize) -> Vec<StepShare> {
        let requests = self.queue.step_rows(texts).scan(0, |end, (rows, reply)| {
            let start = std::mem::replace(end, *end + rows);
            Some(StepShare { rows: start..*end, kind: RowKind::Input, usage: reply.usage.clone() })
        });
        requests.collect()
    }

    fn answer(
        &self,
        left: Dequeued<Reply>,
        reason: Reason,
        answer: impl FnOnce(Vec<Vec<f32>>) -> EncodeResult,
    ) {
        self.shared.queued.fetch_sub(left.reply.tokens, Ordering::Relaxed);
        self.count_end(reason);
        // The send fails if the caller is gone.
        let _ = left.reply.answer.send(answer(left.encoded));
    }

    fn count_end(&self, finished_reason: Reason) {
        self.shared.metrics.finished.get_or_create(&FinishedLabel { finished_reason }).inc();
    }

    fn count_step(&mut self, rows: usize, took: Duration) {
        let metrics = &self.shared.metrics;
        metrics.steps.inc();
        metrics.prefill_computed.inc_by(rows as u64);
        metrics.iteration_tokens.0.observe(rows as f64);
        let seconds = took.as_secs_f32().max(1e-6);
        let blend = |old: f32, new: f32| if old == 0.0 { new } else { old + 0.2 * (new - old) };
        self.load.steps += 1;
        self.load.step_ms = blend(self.load.step_ms, seconds * 1e3);
        self.load.prefill_rate = blend(self.load.prefill_rate, rows as f32 / seconds);
    }

    fn publish(&mut self) {
        let (running, waiting, tokens) = self.queue.sizes();
        self.load = EngineLoad { running, waiting, pending_prefill_tokens: tokens, ..self.load };
        self.shared.progress.set_load(self.load);
        self.shared.metrics.running.set(running as i64);
        self.shared.metrics.waiting.set(waiting as i64);
        self.ticks.send_replace(self.load.steps);
    }
}
