//! The engine: one decoder and one scheduler on one thread. Requests go in, frames come out.
//!
//! Each step is planned by the scheduler, computed by the decoder and sampled; the drawn tokens go back to
//! the scheduler. An invalid request fails alone. A broken invariant ends the worker.

use crate::Error;
use crate::decoder::{Decoder, LayerState};
use crate::energy;
use crate::executor::{Executor, LocalExecutor, StepRequest, StepResult};
use crate::grammar::Guide;
use crate::images::PlacedImage;
use crate::kv_events::EventLog;
use crate::pieces::Namer;
pub use crate::progress::EngineLoad;
use crate::pull::Source;
use crate::scheduler::{LogitRows, PlannedSequence, Scheduler, SeqId, SequenceRequest, StepPlan};
use crate::share::DeviceShare;
use crate::snapshot::Origin;
use crate::speculation::Speculation;
use crate::telemetry::EngineMetrics;
use crate::tiers::Tiers;
use crate::usage::{RequestUsage, RowKind, StepShare, divide_step};
use adapters::Adapters;
pub use adapters::{AdapterLimits, EngineAdapter};
pub use draft_model::DraftModel;
use drafting::{NewestRows, RemoteDrafts};
use draw::{Drawn, Targets};
use equal_prompts::EqualPrompts;
use guided::Guided;
pub use images::ImageSource;
use images::Images;
use kv_receive::KvReceiver;
use kv_send::KvReads;
use parking_lot::Mutex;
use proto::block::BlockId;
use proto::ids::ModelId;
use proto::message::{
    GenerateError, GenerateFrame, PromptLogprobs, Sampling, Stop, TenantShare, TokenLogprobs,
};
use proto::sequence::SequenceName;
use proto::trace::{Span, TraceContext};
use report::Rates;
use request::{Removal, Request, RequestState};
use resume::{Resume, SequenceKey};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};
use text::tokenizer::Tokenizer;
use tiering::Tiering;
use trace::Traced;

mod adapters;
mod draft_model;
mod drafting;
mod draw;
mod elastic;
mod equal_prompts;
mod guided;
mod images;
mod kv_receive;
pub mod kv_send;
mod output;
mod prompt_logprobs;
mod report;
mod request;
pub mod resume;
pub mod thread;
mod tiering;
mod trace;

/// Bytes that are copied out between two steps, to tiers and to snapshots alike. The last piece may exceed
/// it. Takes a few milliseconds.
const COPY_BYTES: u64 = 16 << 20;
/// Maximum number of turn ends passed to the scheduler. It would not keep more as checkpoints.
const MAX_TURN_ENDS: usize = 16;

/// A request to the engine.
pub struct EngineRequest {
    /// The name of its sequence, valid also after it has ended. `None`: it cannot be named.
    pub name: Option<SequenceName>,
    /// Root of its prefix chain.
    pub root: BlockId,
    /// Digest of the adapter that it uses, part of its root.
    pub adapter: Option<[u8; 32]>,
    pub tenant: TenantShare,
    /// Prompt tokens; not empty.
    pub prompt: Vec<u32>,
    /// The images whose rows are in the prompt.
    pub images: Vec<EngineImage>,
    /// The log-probabilities of the prompt's tokens are requested. Then no prefix is taken from a cache, and
    /// `max_tokens` may be 0.
    pub prompt_logprobs: Option<PromptLogprobs>,
    /// Tokens that an earlier attempt drew and sent. They are replayed and not sent again.
    pub emitted: Vec<u32>,
    pub sampling: Sampling,
    pub stop: Stop,
    /// Time limit, counted from receipt. `None` means no limit.
    pub deadline: Option<Duration>,
    /// Another worker that probably holds a prefix of the prompt.
    pub pull: Option<Box<dyn Source>>,
    /// Number of requests for this prompt that arrive together, including this one. The first token of each
    /// is drawn from one computation, which waits a moment for late ones.
    pub together: u32,
    /// The grammar of the output, if any. It has already accepted `emitted`.
    pub guide: Option<Guide>,
    pub sink: Box<dyn Sink>,
}

/// An image of a request.
#[derive(Debug, Clone)]
pub struct EngineImage {
    pub place: PlacedImage,
    pub source: ImageSource,
}

/// Receives the results of a request. Called on the engine's thread, so implementations must not block.
pub trait Sink: Send {
    /// Frames for the client. Returns `false` if the receiver is gone: the request is then cancelled.
    fn frame(&mut self, frame: GenerateFrame) -> bool;

    /// Counts what the request uses.
    fn usage(&self) -> Option<Arc<RequestUsage>> {
        None
    }

    /// The parent span of the request, if the request is traced.
    fn span(&self) -> Option<TraceContext> {
        None
    }

    /// Whether the sink receives the logits of every row, not only those of sampled rows.
    fn wants_logits(&self) -> bool {
        false
    }

    /// Logits of the row at `position` of the prompt and output, if requested.
    fn logits(&mut self, position: usize, row: &[f32]) {
        let _ = (position, row);
    }

    /// Whether the sink receives the recurrent states after the prompt.
    fn wants_states(&self) -> bool {
        false
    }

    /// The states after the prompt, if requested.
    fn states(&mut self, states: Vec<LayerState>) {
        let _ = states;
    }
}

impl<F: FnMut(GenerateFrame) -> bool + Send> Sink for F {
    fn frame(&mut self, frame: GenerateFrame) -> bool {
        self(frame)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepOutcome {
    Idle,
    /// `rows` rows were computed here. In a pipeline their results may arrive in a later step, and results of
    /// earlier rows may have arrived in this one, which then has no rows.
    Ran {
        rows: usize,
    },
}

/// A drawn token.
struct Draw {
    /// The sequence from whose row it was drawn.
    of: SeqId,
    /// The sequence that drew it: the sequence itself, or a fork that continues from there.
    id: SeqId,
    /// The row.
    row: u32,
    token: u32,
    logprobs: Option<TokenLogprobs>,
}

/// A step that was submitted and has no result yet.
struct InFlightStep {
    plan: StepPlan,
    targets: Targets,
    since: Instant,
    shares: Vec<StepShare>,
    /// Spans of the ranks' work for traced requests.
    spans: Vec<Span>,
    drafts: RemoteDrafts,
}

pub struct Engine {
    executor: Box<dyn Executor>,
    /// The oldest first.
    in_flight: VecDeque<InFlightStep>,
    /// When the last step completed.
    completed: Option<Instant>,
    scheduler: Scheduler,
    events: Arc<Mutex<EventLog>>,
    tokenizer: Arc<Tokenizer>,
    requests: HashMap<SeqId, Request>,
    equal_prompts: EqualPrompts,
    adapters: Adapters,
    resume: Resume,
    tiering: Option<Tiering>,
    kv_receiver: KvReceiver,
    kv_reads: KvReads,
    /// Maximum number of bytes copied out between two steps.
    copy_bytes: u64,
    next_id: u64,
    max_model_len: usize,
    metrics: EngineMetrics,
    tokens: u64,
    steps: u64,
    rates: Rates,
    speculation: Option<Speculation>,
    newest_rows: NewestRows,
    /// Draft tokens of the last rank that no step has verified yet.
    draft_tokens: HashMap<SeqId, Vec<u32>>,
    draft_model: Option<DraftModel>,
    images: Images,
    /// Cloned by every traced request: the reference count shows whether there is one.
    recorded: Arc<()>,
    /// The arena was too small, and the device had no memory for a larger one.
    lacks_memory: bool,
    /// Dropped last: its memory is free only when all fields above are.
    share: Option<DeviceShare>,
}

impl Engine {
    /// Creates an engine over a loaded decoder whose KV arena is allocated. Sequences end at `max_model_len`
    /// tokens. `origin` is written into their snapshots.
    pub fn new(
        decoder: Decoder,
        scheduler: Scheduler,
        events: EventLog,
        tokenizer: Arc<Tokenizer>,
        max_model_len: usize,
        origin: Origin,
    ) -> Result<Self, Error> {
        let executor = Box::new(LocalExecutor::new(decoder));
        Self::with_executor(executor, scheduler, events, tokenizer, max_model_len, origin)
    }

    /// Like [`Self::new`], over an executor.
    pub fn with_executor(
        executor: Box<dyn Executor>,
        scheduler: Scheduler,
        events: EventLog,
        tokenizer: Arc<Tokenizer>,
        max_model_len: usize,
        origin: Origin,
    ) -> Result<Self, Error> {
        let metrics = EngineMetrics::default();
        let decoder = executor.decoder();
        let memory = decoder.backend().memory();
        metrics.weight_bytes.set(memory.weights as i64);
        metrics.kv_bytes.set(memory.kv as i64);
        metrics.weight_file_bytes.set(decoder.source_bytes() as i64);
        metrics.device.covers(decoder.backend().info());
        let namer = Namer::new(&origin)?;
        let (kv_receiver, kv_reads) = (KvReceiver::new(namer), KvReads::new(&namer, max_model_len));
        Ok(Self {
            executor,
            in_flight: VecDeque::new(),
            completed: None,
            scheduler,
            events: Arc::new(Mutex::new(events)),
            tokenizer,
            requests: HashMap::new(),
            equal_prompts: EqualPrompts::default(),
            adapters: Adapters::default(),
            resume: Resume::new(origin),
            tiering: None,
            kv_receiver,
            kv_reads,
            copy_bytes: COPY_BYTES,
            next_id: 0,
            max_model_len,
            metrics,
            tokens: 0,
            steps: 0,
            rates: Rates::default(),
            speculation: None,
            newest_rows: NewestRows::new(),
            draft_tokens: HashMap::new(),
            draft_model: None,
            images: Images::default(),
            recorded: Arc::new(()),
            lacks_memory: false,
            share: None,
        })
    }

    /// Computes its steps in the turns of `share`, which it keeps as long as it holds memory.
    pub fn with_share(self, share: DeviceShare) -> Self {
        self.metrics.kv_bytes.set(self.scheduler.stats().kv_total_bytes as i64);
        Self { share: Some(share), ..self }
    }

    /// Also keeps resume points in these tiers and serves prompts from them.
    pub fn with_tiers(self, tiers: Tiers) -> Self {
        Self { tiering: Some(Tiering::new(tiers)), ..self }
    }

    /// Copies at most `copy_bytes` and one further block out between two steps, to tiers and to snapshots
    /// alike.
    pub fn with_copy_bytes(self, copy_bytes: u64) -> Self {
        Self { copy_bytes, ..self }
    }

    /// Drafts tokens and verifies several of a sequence in one step where that pays.
    pub fn with_speculation(self, speculation: Speculation) -> Self {
        Self { speculation: Some(speculation), ..self }
    }

    /// Always uses all available draft tokens, at most `max_draft_tokens` per sequence, whatever they cost.
    pub fn with_draft_len(self, max_draft_tokens: u32) -> Self {
        Self { speculation: self.speculation.map(|speculation| speculation.always(max_draft_tokens)), ..self }
    }

    /// Like [`Self::with_speculation`], with draft tokens computed by the draft model, or by the decoder if
    /// it is `None`.
    pub fn with_drafter(self, model: Option<DraftModel>) -> Self {
        Self { draft_model: model, ..self.with_speculation(Speculation::computed()) }
    }

    pub fn metrics(&self) -> &EngineMetrics {
        &self.metrics
    }

    pub fn tokenizer(&self) -> Arc<Tokenizer> {
        Arc::clone(&self.tokenizer)
    }

    /// The decoder. If the model is split, that of the first rank.
    pub fn decoder(&self) -> &Decoder {
        self.executor.decoder()
    }

    /// Accepts a request. If it cannot be served, its sink receives the reason. If an earlier attempt has
    /// sent all tokens but no end frame, the sink receives the end frame.
    pub fn submit(&mut self, now: Instant, request: EngineRequest) -> Option<SeqId> {
        self.next_id += 1;
        let id = SeqId(self.next_id);
        let EngineRequest {
            name,
            root,
            adapter,
            tenant,
            prompt,
            images,
            prompt_logprobs,
            emitted,
            sampling,
            mut stop,
            deadline,
            pull,
            together,
            guide,
            mut sink,
        } = request;
        let adapter = match adapter.map(|digest| self.adapter(&digest).ok_or(digest)).transpose() {
            Ok(adapter) => adapter,
            Err(digest) => {
                let error = GenerateError::ModelNotFound(ModelId::of_adapter(&digest));
                sink.frame(GenerateFrame::Failed(error));
                return None;
            }
        };
        // A completion ends at the context limit.
        let room = self.max_model_len.saturating_sub(prompt.len());
        stop.max_tokens = stop.max_tokens.min(u32::try_from(room).unwrap_or(u32::MAX));
        let placed = self.place_images(&prompt, &images);
        let prepared = placed.and_then(|placed| {
            let scores = self.prompt_scores(prompt_logprobs, &prompt, !images.is_empty())?;
            let prepared =
                self.prepare(&prompt, &emitted, sampling, stop, (!images.is_empty(), scores.is_some()))?;
            Ok((placed, scores, prepared))
        });
        let (placed, scores, (sampler, text, ending)) = match prepared {
            Ok(prepared) => prepared,
            Err(error) => {
                sink.frame(GenerateFrame::Failed(error));
                return None;
            }
        };
        if let Some(ending) = ending {
            self.finish_at_once(&mut *sink, ending, text.generated());
            return None;
        }
        let (all_logits, states) = (sink.wants_logits(), sink.wants_states());
        let prompt_len = prompt.len();
        let usage = sink.usage();
        let traced = sink.span().and_then(|parent| Traced::begin(parent, now, prompt_len, &self.recorded));
        let mut tokens = prompt;
        tokens.extend_from_slice(&emitted);
        let left = text.tokens_left();
        let boundaries = self.turn_ends(&tokens);
        let request = SequenceRequest {
            id,
            root,
            prompt: tokens,
            max_new_tokens: left,
            logit_rows: match (all_logits, &scores) {
                (_, Some(_)) => LogitRows::Prompt,
                (true, None) => LogitRows::All,
                (false, None) => LogitRows::LastOnly,
            },
            boundaries,
            images: None,
            tenant,
            priority: 0,
            position: Some(self.scheduler.next_position()),
        };
        let state = RequestState::Scheduled;
        let live = Request {
            state,
            key: name.map(|name| SequenceKey { root, name }),
            root,
            adapter,
            sampler,
            guide: guide.map(Guided::new),
            has_images: placed.is_some(),
            text,
            sink,
            prompt_len,
            all_logits,
            scores,
            states,
            started: false,
            received: now,
            deadline,
            last_token: None,
            transfer: None,
            traced,
            usage,
        };
        self.requests.insert(id, live);
        match placed {
            None => self.schedule_or_wait(now, request, pull, together),
            Some(placed) => {
                let sources = images.into_iter().map(|image| image.source).collect();
                self.encode_or_schedule(now, request, pull, together, (placed, sources));
            }
        }
        self.requests.contains_key(&id).then_some(id)
    }

    /// Schedules a request, or lets it wait for another one with the same prompt, or for a prefix from a tier
    /// or another worker. Removes it if the scheduler refuses it. A request that waits for a leader or a tier
    /// drops its pull source: it computes what these do not bring, unless a running KV transfer brings it.
    fn schedule_or_wait(
        &mut self,
        now: Instant,
        request: SequenceRequest,
        source: Option<Box<dyn Source>>,
        together: u32,
    ) {
        let id = request.id;
        if request.logit_rows == LogitRows::Prompt {
            // It computes its whole prompt by itself.
            return self.schedule(request);
        }
        let can_fork =
            |live: &Request| !live.all_logits && !live.states && live.prompt_len == request.prompt.len();
        if self.scheduler.shares() && self.requests.get(&id).is_some_and(can_fork) {
            let prompt = (request.root, request.prompt.as_slice());
            if let Some(leader) = self.equal_prompts.join(now, id, prompt, together) {
                return self.set_state(id, RequestState::WaitingForLeader { leader, request });
            }
        }
        let request = self.restore_or_load(now, request);
        if let Some(request) = request.and_then(|request| self.schedule_or_receive(now, request, source)) {
            self.schedule(request);
        }
    }

    /// Passes a request to the scheduler. Removes it if the scheduler refuses it.
    fn schedule(&mut self, request: SequenceRequest) {
        let id = request.id;
        match self.scheduler.submit(request) {
            Ok(()) => {
                if self.equal_prompts.is_gathering(id) {
                    self.scheduler.hold(id, true);
                }
                let prompt_len = self.requests.get(&id).map_or(0, |request| request.prompt_len as u64);
                self.metrics.prompt_tokens.inc_by(prompt_len);
            }
            Err(rejected) => self.remove(id, Removal::Rejected(rejected)),
        }
    }

    /// The last ends of chat turns: the same conversation continues there, or another one diverges.
    fn turn_ends(&self, tokens: &[u32]) -> Vec<u32> {
        if !self.executor.decoder().spec().is_recurrent() {
            return Vec::new();
        }
        let ends = (1u32..).zip(tokens).filter(|(_, token)| self.tokenizer.is_eog(**token));
        let mut ends: Vec<u32> = ends.map(|(end, _)| end).collect();
        ends.drain(..ends.len().saturating_sub(MAX_TURN_ENDS));
        ends
    }

    /// Fills all cache bytes that no request holds and that serve no later one with NaN, which spreads into
    /// every result computed from them. Returns the number of bytes. For tests that no request reads another
    /// one's data.
    #[cfg(debug_assertions)]
    pub fn poison_unused(&mut self) -> Result<u64, Error> {
        let mut poisoned = 0;
        for (offset, bytes) in self.scheduler.unused() {
            // All ones are NaN in every float type.
            self.executor.decoder_mut().write_bytes(offset, &vec![0xff; bytes as usize])?;
            poisoned += bytes;
        }
        Ok(poisoned)
    }

    /// Cancels a request. Its blocks become free after the step in flight.
    pub fn cancel(&mut self, id: SeqId) {
        self.remove(id, Removal::Cancelled);
    }

    /// Recounts every invariant of caches and tables.
    pub fn check(&self) -> Result<(), Error> {
        self.check_waiting()?;
        self.scheduler.check().map_err(|broken| Error::Invariant(broken.to_string()))
    }

    /// Binds the calling thread, which must be the one that runs the steps, to its CPU.
    pub fn bind_thread(&self) {
        self.executor.decoder().backend().bind_thread();
    }

    /// Whether there is something to compute. Requests that wait for files or other workers do not count as a
    /// stall.
    pub fn can_compute(&self) -> bool {
        self.scheduler.sequences() > 0
    }

    /// Whether anything is queued or running.
    pub fn has_work(&self) -> bool {
        !self.requests.is_empty()
            || self.resume.has_work()
            || !self.in_flight.is_empty()
            || self.executor.is_lost()
    }

    /// Waits for the turn of an engine that shares its device, if it has something to compute. Calls `waits` before.
    fn begin_turn(&mut self, waits: impl FnOnce()) {
        let computes = self.can_compute();
        match &mut self.share {
            Some(share) if computes => {
                waits();
                share.begin();
            }
            Some(share) => share.withdraw(),
            None => {}
        }
    }

    /// Ends the turn after a step; `None` if it failed.
    fn end_turn(&mut self, outcome: Option<&StepOutcome>) {
        let rows = match outcome {
            Some(StepOutcome::Ran { rows }) => *rows,
            Some(StepOutcome::Idle) | None => 0,
        };
        let again = rows > 0 && self.can_compute();
        if let Some(share) = &mut self.share {
            share.end(rows, again);
        }
    }

    /// Whether prefixes of ended sequences are still to be copied to the tiers.
    pub fn copies_prefixes(&self) -> bool {
        self.tiering.as_ref().is_some_and(Tiering::copies)
    }

    /// Weight of its model in the turns of its device; 0 counts as 1. No effect on an engine with a device of its own.
    pub fn set_priority(&self, priority: u32) {
        if let Some(share) = &self.share {
            share.set_priority(priority);
        }
    }

    /// Plans, runs and completes one step. In a pipeline, steps are submitted while there is work, and
    /// completed when their results arrive.
    pub fn step(&mut self, now: Instant) -> Result<StepOutcome, Error> {
        self.expire(now);
        self.settle(now);
        self.copy_out();
        let saves = self.copy_saved();
        self.finish_tier_loads(now);
        self.finish_transfers(now);
        self.finish_encodings(now);
        for orphan in self.equal_prompts.take_orphans() {
            if let Some(RequestState::WaitingForLeader { request, .. }) = self.take_state(orphan) {
                self.schedule_or_wait(now, request, None, 1);
            }
        }
        for leader in self.equal_prompts.take_gathered(now) {
            self.scheduler.hold(leader, false);
        }
        // Results make room, and other sequences may be waiting for them.
        if self.take_result(false)? {
            return Ok(StepOutcome::Ran { rows: 0 });
        }
        if self.can_compute() && self.share.as_ref().is_some_and(|share| !share.has_turn()) {
            // Sequences arrived meanwhile. They are computed in a turn.
            return Ok(StepOutcome::Ran { rows: 0 });
        }
        self.grow_arena();
        if let Some(plan) = self.plan()? {
            let (rows, targets) = (plan.tokens.len(), self.targets(&plan));
            let spans = self.trace_plan(&plan);
            let shares = self.shares(&plan);
            let drafts = RemoteDrafts::default();
            self.submit_step(InFlightStep { plan, targets, since: now, shares, spans, drafts })?;
            return Ok(StepOutcome::Ran { rows });
        }
        if self.take_result(true)? {
            return Ok(StepOutcome::Ran { rows: 0 });
        }
        self.publish();
        Ok(if saves { StepOutcome::Ran { rows: 0 } } else { StepOutcome::Idle })
    }

    /// The next step, if there is something to compute and the executor can take another step.
    fn plan(&mut self) -> Result<Option<StepPlan>, Error> {
        let Some(limits) = self.executor.limits(self.scheduler.demand()) else { return Ok(None) };
        self.set_drafts()?;
        self.scheduler.plan_within(limits).map_err(|broken| Error::Invariant(broken.to_string()))
    }

    /// Submits a step to the executor, and completes it if its result is there at once.
    fn submit_step(&mut self, mut step: InFlightStep) -> Result<(), Error> {
        let mut request = StepRequest { adapters: self.adapter_rows(&step.plan), ..StepRequest::default() };
        if self.executor.ranks() > 1 {
            request.rows = self.requested_rows(&step.targets);
            (request.drafts, step.drafts) = self.request_drafts(&step.plan, &mut request.rows);
            request.traces = step.spans.iter().map(Span::context).collect();
        }
        let (kv_reads, scheduler) = (&mut self.kv_reads, &self.scheduler);
        let tiers = self.tiering.as_ref().map(Tiering::tiers);
        let result = self.executor.submit(scheduler, &step.plan, request, &mut |blocks| {
            kv_reads.run_next(blocks, scheduler, tiers);
        })?;
        match result {
            Some(result) => self.complete_with(step, result),
            None => {
                self.in_flight.push_back(step);
                Ok(())
            }
        }
    }

    /// The rows of each sequence of a step, with what counts their time.
    fn shares(&self, plan: &StepPlan) -> Vec<StepShare> {
        let share = |sequence: &PlannedSequence| {
            let request = self.requests.get(&sequence.id);
            let started = request.is_some_and(|request| request.last_token.is_some());
            let drawn_from = sequence.rows.len() == 1 + sequence.draft_tokens as usize;
            StepShare {
                rows: sequence.rows.start as usize..sequence.rows.end as usize,
                kind: if started && drawn_from { RowKind::Output } else { RowKind::Input },
                usage: request.and_then(|request| request.usage.clone()),
            }
        };
        plan.sequences.iter().map(share).collect()
    }

    /// Completes the oldest step in flight. Returns `false` if no step is in flight, or if its result has not
    /// arrived and `wait` is false.
    fn take_result(&mut self, wait: bool) -> Result<bool, Error> {
        let Some(result) = self.executor.result(wait)? else { return Ok(false) };
        let Some(step) = self.in_flight.pop_front().filter(|step| step.plan.step == result.step) else {
            return Err(Error::Invariant(format!("step {} was not in flight", result.step)));
        };
        self.complete_with(step, result)?;
        Ok(true)
    }

    fn complete_with(&mut self, mut step: InFlightStep, result: StepResult) -> Result<(), Error> {
        if let Some(spent) = &result.spent {
            trace::record_times(std::mem::take(&mut step.spans), spent);
        }
        self.store_drafts(&mut step, result.draft_tokens, result.draft_time);
        // The next step is not planned yet, so the slots still hold the states after the prompt.
        self.read_states(&step.plan)?;
        let drawn = self.draw(&step.targets, result.rows)?;
        self.complete(&step, drawn)
    }

    /// Completes a computed step with its drawn tokens.
    fn complete(&mut self, step: &InFlightStep, drawn: Drawn) -> Result<(), Error> {
        let InFlightStep { plan, since, shares, drafts, .. } = step;
        let Drawn { draws: mut sampled, spoiled } = drawn;
        if !spoiled.is_empty() {
            sampled.retain(|draw| !spoiled.contains(&draw.id));
            spoiled.into_iter().for_each(|id| self.remove(id, Removal::NotFinite));
        }
        let rows = plan.tokens.len();
        let lengths = plan.sequences.iter().map(|s| s.rows.len() - s.draft_tokens as usize);
        let prefill_rows: usize = lengths.filter(|len| *len > 1).sum();
        self.end_with_the_text(&mut sampled);
        self.accept(plan, &sampled)?;
        let own = sampled.iter().filter(|draw| draw.of == draw.id);
        let drawn: Vec<(SeqId, u32)> = own.map(|draw| (draw.id, draw.token)).collect();
        self.scheduler.complete(plan.step, &drawn).map_err(|broken| Error::Invariant(broken.to_string()))?;
        let ended = Instant::now();
        // Several steps may be in flight: each counts from the end of the one before it.
        let began = self.completed.map_or(*since, |completed| completed.max(*since));
        self.completed = Some(ended);
        let took = ended.saturating_duration_since(began);
        self.rates.step_ended(took, rows, prefill_rows);
        // All devices of a replica work for its steps.
        let device_time = took * u32::try_from(self.executor.ranks()).unwrap_or(u32::MAX);
        let time = divide_step(device_time, rows, shares);
        self.metrics.usage.step(device_time, time.of_requests());
        // The energy of the other stages' devices is not known here.
        if self.executor.ranks() == 1 {
            energy::step(began, ended, time);
        }
        if let Some(speculation) = self.speculation.as_mut().filter(|_| prefill_rows == 0) {
            // The time for drafting is counted separately.
            speculation.step_took(rows, took.saturating_sub(drafts.took));
        }
        self.steps += 1;
        self.metrics.steps.inc();
        self.metrics.iteration_tokens.0.observe(rows as f64);
        self.send_prompt_logprobs(plan);
        self.fork_followers(plan, &mut sampled);
        for draw in &sampled {
            self.start(draw.id);
        }
        for sequence in plan.sequences.iter().filter(|sequence| sequence.last_chunk && !sequence.samples) {
            self.warmed(ended, sequence.id);
            self.finish_scored(ended, sequence.id);
        }
        let mut sampled = sampled.into_iter().peekable();
        while let Some(Draw { id, token, logprobs, .. }) = sampled.next() {
            let mut tokens = vec![(token, logprobs)];
            while let Some(Draw { token, logprobs, .. }) = sampled.next_if(|draw| draw.id == id) {
                tokens.push((token, logprobs));
            }
            self.emit(ended, id, tokens);
        }
        self.settle(ended);
        self.publish();
        Ok(())
    }

    /// At the end of a prompt, forks the sequences that waited for it, each with its own first token. A
    /// sequence that cannot be forked is scheduled and will draw the same token again, because a draw depends
    /// only on the seed and the logits.
    fn fork_followers(&mut self, plan: &StepPlan, drawn: &mut Vec<Draw>) {
        for sequence in plan.sequences.iter().filter(|sequence| sequence.samples) {
            for id in self.equal_prompts.take_followers(sequence.id) {
                let Some(RequestState::WaitingForLeader { request, .. }) = self.take_state(id) else {
                    continue;
                };
                let Some(at) = drawn.iter().position(|draw| draw.id == id) else {
                    // The request arrived while the step was in flight, or its mask was not ready.
                    self.schedule(request);
                    continue;
                };
                let (token, max_tokens) = (drawn[at].token, request.max_new_tokens);
                if self.scheduler.fork(sequence.id, id, token, max_tokens).is_ok() {
                    self.metrics.prompt_tokens.inc_by(request.prompt.len() as u64);
                } else {
                    drawn.remove(at);
                    self.schedule(request);
                }
            }
        }
    }

    /// Passes the states after a prompt to the sinks that request them.
    fn read_states(&mut self, plan: &StepPlan) -> Result<(), Error> {
        for sequence in plan.sequences.iter().filter(|sequence| sequence.last_chunk) {
            let request = self.requests.get_mut(&sequence.id).filter(|request| request.states);
            if let (Some(request), Some(state)) = (request, &sequence.state) {
                request.sink.states(self.executor.read_states(state.write)?);
                request.states = false;
            }
        }
        Ok(())
    }

    /// The KV event log, shared with its readers.
    pub fn events(&self) -> Arc<Mutex<EventLog>> {
        Arc::clone(&self.events)
    }
}
