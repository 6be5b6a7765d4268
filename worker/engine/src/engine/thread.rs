//! The engine's thread, and the handle through which other threads use it.

use super::kv_send::{KvRead, KvSender};
use super::{Engine, EngineLoad, EngineRequest, StepOutcome};
use crate::Error;
use crate::grammar::Grammars;
use crate::kv_events::EventLog;
use crate::progress::{Progress, end_process, spawn};
use crate::scheduler::SeqId;
use crate::snapshot::Origin;
use crate::telemetry::{EngineMetrics, TransferMetrics};
use parking_lot::Mutex;
use prometheus_client::registry::Registry;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::time::{Duration, Instant};
use tokio::sync::{oneshot, watch};

/// Exit code when a step fails: the engine's state can no longer be trusted.
pub const EXIT_BROKEN: i32 = 71;

/// Exit code when the process has lost its device. The next process may be able to use it.
pub const EXIT_DEVICE_LOST: i32 = 72;

enum Command {
    Submit(Box<EngineRequest>, oneshot::Sender<Option<SeqId>>),
    Cancel(SeqId),
    Call(Box<dyn FnOnce(&mut Engine) + Send>),
    /// A read of caches was requested. It may already have been served between two layers.
    ReadKv,
    /// A grammar mask is ready.
    MaskReady,
    Stop,
}

/// State that other threads may read at any time.
struct Shared {
    progress: Arc<Progress>,
    events: Arc<Mutex<EventLog>>,
    origin: Arc<Origin>,
    registry: Registry,
    transfers: TransferMetrics,
    rss: prometheus_client::metrics::gauge::Gauge,
}

/// Receives the error of an engine that cannot continue, before the engine is dropped.
pub type Broken = Box<dyn FnOnce(&Error) + Send>;

/// Sends commands to the engine thread. Cheap to clone.
#[derive(Clone)]
pub struct EngineHandle {
    commands: Sender<Command>,
    kv_reads: Sender<KvRead>,
    /// Not part of `Shared`, which the engine's thread also holds: it must be dropped when no handle is left.
    grammars: Arc<Grammars>,
    shared: Arc<Shared>,
    /// Number of the newest KV event.
    newest: watch::Receiver<u64>,
}

impl EngineHandle {
    /// Moves the engine to its own thread. A watchdog ends the process if the engine makes no progress for
    /// `stall_floor` (or 20 slow steps) while work is queued. A failed step also ends the process.
    pub fn start(engine: Engine, stall_floor: Duration) -> Result<Self, Error> {
        Self::start_with(engine, stall_floor, None)
    }

    /// Like [`Self::start`], but with `broken` a failed step calls it and ends only the engine.
    pub fn start_with(
        mut engine: Engine,
        stall_floor: Duration,
        broken: Option<Broken>,
    ) -> Result<Self, Error> {
        let ((commands, inbox), (kv_reads, queue)) = (channel(), channel());
        engine.set_kv_reads(queue);
        let mut registry = Registry::default();
        engine.metrics().register(&mut registry);
        let events = engine.events();
        let (newest_sender, newest) = watch::channel(events.lock().last_sequence());
        let (rss, transfers) = (engine.metrics().rss.clone(), engine.metrics().transfers.clone());
        let progress = Progress::watched(engine.load(), stall_floor)?;
        let origin = engine.origin();
        let shared = Arc::new(Shared { progress, events, origin, registry, transfers, rss });
        let for_engine = Arc::clone(&shared);
        let wake = commands.clone();
        // A stopped engine ignores the command.
        let wake = Arc::new(move || drop(wake.send(Command::MaskReady)));
        let grammars = Grammars::new(engine.tokenizer(), engine.metrics().grammars.clone(), wake)?;
        let grammars = Arc::new(grammars);
        spawn("kvasir-engine", move || serve(engine, &inbox, &for_engine, &newest_sender, broken))?;
        Ok(Self { commands, kv_reads, grammars, shared, newest })
    }

    /// Submits a request at once, in the order of calls. The future returns its id, or `None` if it was
    /// refused through its sink.
    pub fn submit(
        &self,
        request: EngineRequest,
    ) -> impl Future<Output = Result<Option<SeqId>, Error>> + Send + use<> {
        let (reply, answer) = oneshot::channel();
        let sent = self.commands.send(Command::Submit(Box::new(request), reply));
        async move {
            sent.map_err(|_| Error::EngineStopped)?;
            answer.await.map_err(|_| Error::EngineStopped)
        }
    }

    /// The compiler of output grammars.
    pub fn grammars(&self) -> &Grammars {
        &self.grammars
    }

    pub fn cancel(&self, id: SeqId) {
        // A stopped engine has already forgotten the request.
        let _ = self.commands.send(Command::Cancel(id));
    }

    /// Runs a function on the engine between two steps. It must be short.
    pub async fn call<T: Send + 'static>(
        &self,
        call: impl FnOnce(&mut Engine) -> T + Send + 'static,
    ) -> Result<T, Error> {
        let (reply, answer) = oneshot::channel();
        // The caller may be gone.
        let call = move |engine: &mut Engine| drop(reply.send(call(engine)));
        self.commands.send(Command::Call(Box::new(call))).map_err(|_| Error::EngineStopped)?;
        answer.await.map_err(|_| Error::EngineStopped)
    }

    /// Runs a function that reads the engine's caches, between two steps or between two layers of one. It
    /// must be short.
    pub async fn read_kv<T: Send + 'static>(
        &self,
        read: impl FnOnce(&mut KvSender<'_>) -> T + Send + 'static,
    ) -> Result<T, Error> {
        let (reply, answer) = oneshot::channel();
        let read = move |sender: &mut KvSender<'_>| drop(reply.send(read(sender)));
        self.kv_reads.send(Box::new(read)).map_err(|_| Error::EngineStopped)?;
        self.commands.send(Command::ReadKv).map_err(|_| Error::EngineStopped)?;
        answer.await.map_err(|_| Error::EngineStopped)
    }

    /// The origin that a snapshot must have to be restored here.
    pub fn origin(&self) -> Arc<Origin> {
        Arc::clone(&self.shared.origin)
    }

    /// Stops the thread after the step in flight.
    pub fn stop(&self) {
        let _ = self.commands.send(Command::Stop);
    }

    /// The load after the last step.
    pub fn load(&self) -> EngineLoad {
        self.shared.progress.load()
    }

    /// Time for which work has waited without progress.
    pub fn stalled(&self) -> Duration {
        self.shared.progress.stalled()
    }

    /// Whether the engine makes progress.
    pub fn healthy(&self) -> bool {
        self.shared.progress.healthy()
    }

    pub fn events(&self) -> &Mutex<EventLog> {
        &self.shared.events
    }

    /// Changes when there are new KV events.
    pub fn newest_event(&self) -> watch::Receiver<u64> {
        self.newest.clone()
    }

    /// Metrics of KV transfers from and to other workers.
    pub fn transfers(&self) -> &TransferMetrics {
        &self.shared.transfers
    }

    /// The engine's metrics as Prometheus text.
    pub fn metrics_text(&self) -> String {
        self.shared.rss.set(crate::memory::resident_bytes() as i64);
        EngineMetrics::text(&self.shared.registry)
    }
}

fn serve(
    mut engine: Engine,
    inbox: &Receiver<Command>,
    shared: &Shared,
    newest: &watch::Sender<u64>,
    broken: Option<Broken>,
) {
    engine.bind_thread();
    loop {
        // Idle: wait for a command. Busy: process the queued commands and continue.
        if !engine.has_work() {
            shared.progress.queued(Instant::now(), false);
            let copying = engine.copy_out();
            let command = match inbox.try_recv() {
                Err(TryRecvError::Empty) if copying => continue,
                Err(TryRecvError::Empty) => inbox.recv().ok(),
                command => command.ok(),
            };
            let Some(command) = command else { return };
            if !execute(&mut engine, command) {
                return;
            }
        }
        while let Ok(command) = inbox.try_recv() {
            if !execute(&mut engine, command) {
                return;
            }
        }
        engine.begin_turn(|| shared.progress.queued(Instant::now(), false));
        let start = Instant::now();
        shared.progress.queued(start, engine.can_compute());
        let stepped = engine.step(start);
        engine.end_turn(stepped.as_ref().ok());
        match stepped {
            Ok(StepOutcome::Ran { .. }) => {
                let now = Instant::now();
                shared.progress.step_ended(now, now - start, engine.has_work());
            }
            Ok(StepOutcome::Idle) if engine.has_work() => {
                // All work waits for an external event: a command or a deadline.
                match inbox.recv_timeout(Duration::from_millis(1)) {
                    Ok(command) => {
                        if !execute(&mut engine, command) {
                            return;
                        }
                    }
                    Err(RecvTimeoutError::Disconnected) => return,
                    Err(RecvTimeoutError::Timeout) => {}
                }
            }
            Ok(StepOutcome::Idle) => {}
            Err(error) => {
                let Some(broken) = broken else { end_process(&error, error.exit_code()) };
                shared.progress.queued(Instant::now(), false);
                broken(&error);
                return;
            }
        }
        shared.progress.set_load(engine.load());
        let sequence = shared.events.lock().last_sequence();
        newest.send_if_modified(|current| std::mem::replace(current, sequence) != sequence);
    }
}

/// Returns `false` if the thread must end.
fn execute(engine: &mut Engine, command: Command) -> bool {
    match command {
        Command::Submit(request, reply) => {
            let id = engine.submit(Instant::now(), *request);
            // If the caller is gone, so is the sink: the next frame will cancel the request.
            let _ = reply.send(id);
        }
        Command::Cancel(id) => engine.cancel(id),
        Command::Call(call) => call(engine),
        Command::ReadKv => engine.run_kv_reads(),
        // The next step looks at the masks.
        Command::MaskReady => {}
        Command::Stop => return false,
    }
    true
}
