//! The engine: one decoder, one scheduler, one thread. Requests in, events out, a step at a time.
//!
//! The step loop plans (scheduler), runs (decoder), draws (sampling) and tells the scheduler what came out.
//! A request that is wrong fails alone; a broken invariant ends the worker.

use crate::Error;
use crate::decoder::{CacheKind, Decoder, LayerState};
use crate::kv_events::EventLog;
use crate::sampling::Sampler;
use crate::sampling::stop::{Ending, OutputText};
use crate::scheduler::{
    LogitRows, PlannedSequence, Rejected, Scheduler, SeqId, SequenceRequest, SequenceState, StepPlan,
};
use crate::snapshot::Origin;
use crate::telemetry::{EngineMetrics, FinishedLabel, LookupLabel, Reason};
use crate::tiers::Tiers;
use kernels::backend::{BlockTable, KvCopy, StateExport, StepInput, StepSequence, StepState};
use model::tokenizer::Tokenizer;
use parking_lot::Mutex;
use proto::block::BlockId;
use proto::event::KvEvent;
use proto::message::{
    FinishReason, FinishedV1, GenerateError, GenerateFrame, Sampling, StartedV1, Stop, TokenLogprobs,
    TokenOut,
};
use proto::sequence::SequenceName;
use resume::{Resume, SequenceKey};
use siblings::Siblings;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tiering::Tiering;
pub(crate) use tiering::TieringCounts;

pub mod resume;
mod siblings;
pub mod thread;
mod tiering;

/// Ends of chat turns that the scheduler hears of; more are not kept as checkpoints anyway.
const MAX_TURN_ENDS: usize = 16;

/// A request to the engine.
pub struct EngineRequest {
    /// How it can be named, also after it has ended; none is not at all.
    pub name: Option<SequenceName>,
    /// Root of its prefix chain.
    pub root: BlockId,
    /// Prompt tokens; not empty.
    pub prompt: Vec<u32>,
    /// Tokens that an earlier attempt has drawn and sent: replayed, not sent again.
    pub emitted: Vec<u32>,
    /// How to draw.
    pub sampling: Sampling,
    /// When to end.
    pub stop: Stop,
    /// From receipt until it is worth nothing; none is no limit.
    pub deadline: Option<Duration>,
    /// Who hears of it.
    pub sink: Box<dyn Sink>,
}

/// Hears what becomes of a request. Called on the engine's thread: it must not block.
pub trait Sink: Send {
    /// Frames for the requester. `false` says that nobody listens any more: the request is cancelled.
    fn frame(&mut self, frame: GenerateFrame) -> bool;

    /// Whether every row's logits are wanted, not only those that are drawn from.
    fn wants_logits(&self) -> bool {
        false
    }

    /// Logits of the row at `position` of the prompt and output, if wanted.
    fn logits(&mut self, position: usize, row: &[f32]) {
        let _ = (position, row);
    }

    /// Whether the recurrent states behind the prompt are wanted.
    fn wants_states(&self) -> bool {
        false
    }

    /// The states behind the prompt, if wanted.
    fn states(&mut self, states: Vec<LayerState>) {
        let _ = states;
    }
}

impl<F: FnMut(GenerateFrame) -> bool + Send> Sink for F {
    fn frame(&mut self, frame: GenerateFrame) -> bool {
        self(frame)
    }
}

/// What a step did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepOutcome {
    /// Nothing to do.
    Idle,
    /// So many rows were computed.
    Ran {
        /// Rows.
        rows: usize,
    },
}

/// What the engine holds right now.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct EngineLoad {
    /// Sequences in the batch.
    pub running: usize,
    /// Sequences queued.
    pub waiting: usize,
    /// Prompt tokens not yet computed.
    pub pending_prefill_tokens: u64,
    /// KV bytes held by live sequences.
    pub kv_used: u64,
    /// KV bytes in all.
    pub kv_total: u64,
    /// Steps so far.
    pub steps: u64,
    /// Tokens generated so far.
    pub tokens: u64,
    /// Prefill rate over recent steps, tokens per second.
    pub prefill_rate: f32,
    /// Recent step time, milliseconds.
    pub step_ms: f32,
}

struct Live {
    key: Option<SequenceKey>,
    root: BlockId,
    sampler: Sampler,
    text: OutputText,
    sink: Box<dyn Sink>,
    prompt_len: usize,
    all_logits: bool,
    states: bool,
    started: bool,
    received: Instant,
    deadline: Option<Duration>,
    last_token: Option<Instant>,
}

/// A token that was drawn.
struct Draw {
    /// The sequence whose row it was drawn from.
    of: SeqId,
    /// Who has drawn it: the sequence itself, or one that goes on from there as its fork.
    id: SeqId,
    token: u32,
    logprobs: Option<TokenLogprobs>,
}

/// See the module.
pub struct Engine {
    decoder: Decoder,
    scheduler: Scheduler,
    events: Arc<Mutex<EventLog>>,
    tokenizer: Arc<Tokenizer>,
    live: HashMap<SeqId, Live>,
    siblings: Siblings,
    resume: Resume,
    tiering: Option<Tiering>,
    next_id: u64,
    max_model_len: usize,
    metrics: EngineMetrics,
    tokens: u64,
    steps: u64,
    rates: Rates,
}

/// Exponential averages over recent steps.
#[derive(Debug, Default)]
struct Rates {
    prefill: f32,
    step_ms: f32,
}

impl Engine {
    /// An engine over a loaded decoder whose KV arena is allocated; sequences end at `max_model_len` tokens, and
    /// snapshots of them say that they are of `origin`.
    pub fn new(
        decoder: Decoder,
        scheduler: Scheduler,
        events: EventLog,
        tokenizer: Arc<Tokenizer>,
        max_model_len: usize,
        origin: Origin,
    ) -> Self {
        let metrics = EngineMetrics::default();
        let memory = decoder.backend().memory();
        metrics.weight_bytes.set(memory.weights as i64);
        metrics.kv_bytes.set(memory.kv as i64);
        metrics.weight_file_bytes.set(decoder.source_bytes() as i64);
        Self {
            decoder,
            scheduler,
            events: Arc::new(Mutex::new(events)),
            tokenizer,
            live: HashMap::new(),
            siblings: Siblings::default(),
            resume: Resume::new(origin),
            tiering: None,
            next_id: 0,
            max_model_len,
            metrics,
            tokens: 0,
            steps: 0,
            rates: Rates::default(),
        }
    }

    /// Keeps resume points in these tiers too, and serves prompts from them.
    pub fn with_tiers(self, tiers: Tiers) -> Self {
        Self { tiering: Some(Tiering::new(tiers)), ..self }
    }

    /// The engine's metrics.
    pub fn metrics(&self) -> &EngineMetrics {
        &self.metrics
    }

    /// The decoder.
    pub fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    /// Takes a request in. One that cannot be served hears why through its sink; the id names it until then.
    pub fn submit(&mut self, now: Instant, request: EngineRequest) -> Option<SeqId> {
        self.next_id += 1;
        let id = SeqId(self.next_id);
        let EngineRequest { name, root, prompt, emitted, sampling, mut stop, deadline, mut sink } = request;
        // A completion ends where the context does.
        let room = self.max_model_len.saturating_sub(prompt.len());
        stop.max_tokens = stop.max_tokens.min(u32::try_from(room).unwrap_or(u32::MAX));
        let prepared = self.prepare(&prompt, &emitted, sampling, stop);
        let (sampler, text) = match prepared {
            Ok(prepared) => prepared,
            Err(error) => {
                sink.frame(GenerateFrame::Failed(error));
                return None;
            }
        };
        let (all_logits, states) = (sink.wants_logits(), sink.wants_states());
        let prompt_len = prompt.len();
        let mut tokens = prompt;
        tokens.extend_from_slice(&emitted);
        let left = text.tokens_left();
        let boundaries = self.turn_ends(&tokens);
        let request = SequenceRequest {
            id,
            root,
            prompt: tokens,
            max_new_tokens: left,
            logit_rows: if all_logits { LogitRows::All } else { LogitRows::LastOnly },
            boundaries,
            priority: 0,
        };
        let live = Live {
            key: name.map(|name| SequenceKey { root, name }),
            root,
            sampler,
            text,
            sink,
            prompt_len,
            all_logits,
            states,
            started: false,
            received: now,
            deadline,
            last_token: None,
        };
        self.live.insert(id, live);
        self.queue(now, request).then_some(id)
    }

    /// Has the request of a live sequence wait for one with the same prompt, or for what a tier has of it, or queues
    /// it; `false` if it is refused, and its sink has heard so.
    fn queue(&mut self, now: Instant, request: SequenceRequest) -> bool {
        let can_fork =
            |live: &Live| !live.all_logits && !live.states && live.prompt_len == request.prompt.len();
        let joins = self.scheduler.shares() && self.live.get(&request.id).is_some_and(can_fork);
        let request = if joins { self.siblings.join(request) } else { Some(request) };
        let Some(request) = request else { return true };
        self.bring_or_park(now, request).is_none_or(|request| self.enqueue(request))
    }

    /// Queues the request of a live sequence; `false` if it is refused, and its sink has heard so.
    fn enqueue(&mut self, request: SequenceRequest) -> bool {
        let id = request.id;
        let refused = self.scheduler.submit(request).err();
        match (refused, self.live.get(&id)) {
            (None, live) => {
                self.metrics.prompt_tokens.inc_by(live.map_or(0, |live| live.prompt_len as u64));
                true
            }
            (Some(rejected), _) => {
                if let Some(mut live) = self.live.remove(&id) {
                    live.sink.frame(GenerateFrame::Failed(refusal(rejected)));
                }
                self.siblings.gone(id);
                false
            }
        }
    }

    fn prepare(
        &self,
        prompt: &[u32],
        emitted: &[u32],
        sampling: Sampling,
        stop: Stop,
    ) -> Result<(Sampler, OutputText), GenerateError> {
        let vocab = self.decoder.spec().vocab;
        let refuse = |field: &str, reason: String| {
            Err(GenerateError::InvalidField { field: field.to_owned(), reason })
        };
        if prompt.is_empty() {
            return refuse("prompt", "it is empty".to_owned());
        }
        if prompt.len() >= self.max_model_len {
            return Err(GenerateError::ContextLength {
                need: prompt.len() as u64 + 1,
                limit: self.max_model_len as u64,
            });
        }
        if stop.max_tokens == 0 {
            // Nothing would ever end it.
            return refuse("max_tokens", "it is 0".to_owned());
        }
        if let Some(token) = prompt.iter().chain(emitted).find(|token| **token as usize >= vocab) {
            return refuse("prompt", format!("token {token} is outside the vocabulary of {vocab}"));
        }
        let mut text = OutputText::new(self.tokenizer.clone(), stop.clone())?;
        let mut sampler = Sampler::new(sampling, &stop, prompt, text.ending_tokens(), vocab)?;
        for &token in emitted {
            sampler.accept(token);
            if text.push(token).1.is_some() {
                return refuse("emitted", "the tokens already sent end the generation".to_owned());
            }
        }
        Ok((sampler, text))
    }

    /// Where chat turns end, the last ones: there the same conversation will go on, or another part from it.
    fn turn_ends(&self, tokens: &[u32]) -> Vec<u32> {
        if !self.decoder.spec().is_recurrent() {
            return Vec::new();
        }
        let ends = (1u32..).zip(tokens).filter(|(_, token)| self.tokenizer.is_eog(**token));
        let mut ends: Vec<u32> = ends.map(|(end, _)| end).collect();
        ends.drain(..ends.len().saturating_sub(MAX_TURN_ENDS));
        ends
    }

    /// Forgets a request; its blocks are free after the step in flight.
    pub fn cancel(&mut self, id: SeqId) {
        self.remember_live(id);
        if self.live.remove(&id).is_some() {
            self.scheduler.remove(id);
            self.siblings.gone(id);
            self.count_end(Reason::abort);
        }
    }

    /// Binds the calling thread to its CPU: it is the one that will run the steps.
    pub fn bind_thread(&self) {
        self.decoder.backend().bind_thread();
    }

    /// Whether anything is queued or running.
    pub fn has_work(&self) -> bool {
        !self.live.is_empty() || self.resume.is_warming()
    }

    /// Plans, runs and accounts for one step.
    pub fn step(&mut self, now: Instant) -> Result<StepOutcome, Error> {
        self.expire(now);
        self.copy_out();
        self.unpark(now);
        for orphan in self.siblings.take_orphans() {
            if self.live.contains_key(&orphan.id) {
                self.queue(now, orphan);
            }
        }
        let planned = self.scheduler.plan().map_err(|broken| Error::Invariant(broken.to_string()))?;
        let Some(plan) = planned else {
            self.publish();
            return Ok(StepOutcome::Idle);
        };
        run(&mut self.decoder, &self.scheduler, &plan)?;
        self.read_states(&plan)?;
        let mut sampled = self.draw(&plan)?;
        let rows = plan.tokens.len();
        let prefill_rows: usize = plan.sequences.iter().map(|s| s.rows.len()).filter(|len| *len > 1).sum();
        let own = sampled.iter().filter(|draw| draw.of == draw.id);
        let drawn: Vec<(SeqId, u32)> = own.map(|draw| (draw.id, draw.token)).collect();
        self.scheduler.complete(plan.step, &drawn).map_err(|broken| Error::Invariant(broken.to_string()))?;
        let ended = Instant::now();
        let took = ended.saturating_duration_since(now);
        self.rates.step_ended(took, rows, prefill_rows);
        self.steps += 1;
        self.metrics.steps.inc();
        self.metrics.iteration_tokens.0.observe(rows as f64);
        self.fork_siblings(&plan, &mut sampled);
        for draw in &sampled {
            self.start(draw.id);
        }
        for sequence in plan.sequences.iter().filter(|sequence| sequence.last_chunk && !sequence.samples) {
            self.warmed(ended, sequence.id);
        }
        for Draw { id, token, logprobs, .. } in sampled {
            self.emit(ended, id, token, logprobs);
        }
        self.publish();
        Ok(StepOutcome::Ran { rows })
    }

    /// Where a prompt has ended, those that waited for it go on from there with what they have drawn. Who cannot be
    /// forked is queued, and will draw the same again: a draw depends on the seed and the logits.
    fn fork_siblings(&mut self, plan: &StepPlan, drawn: &mut Vec<Draw>) {
        for sequence in plan.sequences.iter().filter(|sequence| sequence.samples) {
            for request in self.siblings.part(sequence.id) {
                let Some(at) = drawn.iter().position(|draw| draw.id == request.id) else { continue };
                let (id, token, most) = (request.id, drawn[at].token, request.max_new_tokens);
                if self.scheduler.fork(sequence.id, id, token, most).is_ok() {
                    self.metrics.prompt_tokens.inc_by(request.prompt.len() as u64);
                } else {
                    drawn.remove(at);
                    self.enqueue(request);
                }
            }
        }
    }

    /// Hands the states behind a prompt to whoever wants them.
    fn read_states(&mut self, plan: &StepPlan) -> Result<(), Error> {
        for sequence in plan.sequences.iter().filter(|sequence| sequence.last_chunk) {
            let Some(live) = self.live.get_mut(&sequence.id).filter(|live| live.states) else { continue };
            if let Some(state) = &sequence.state {
                live.sink.states(self.decoder.states(state.write)?);
                live.states = false;
            }
        }
        Ok(())
    }

    /// Logits of rows that are drawn from or wanted whole, and the draws.
    /// A last row of a prompt is drawn from for everybody who waits for it.
    fn draw(&mut self, plan: &StepPlan) -> Result<Vec<Draw>, Error> {
        // (sequence of the row, who draws, row)
        let mut plain: Vec<(SeqId, SeqId, u32)> = Vec::new();
        let mut rows: Vec<u32> = Vec::new();
        // (sequence of the row, who hears or draws, position, whether this row is drawn from)
        let mut targets: Vec<(SeqId, SeqId, usize, bool)> = Vec::new();
        let with_siblings = plan.sequences.iter().flat_map(|sequence| {
            let siblings = sequence.samples.then(|| self.siblings.followers(sequence.id));
            let ids = std::iter::once(sequence.id).chain(siblings.into_iter().flatten());
            ids.map(move |id| (sequence, id))
        });
        for (sequence, id) in with_siblings {
            let Some(live) = self.live.get(&id) else { continue };
            let of = sequence.id;
            let last = sequence.rows.end - 1;
            let position = |row: u32| (sequence.context_before + row - sequence.rows.start) as usize;
            if live.all_logits {
                for row in sequence.rows.clone() {
                    rows.push(row);
                    targets.push((of, id, position(row), sequence.samples && row == last));
                }
            } else if sequence.samples {
                match live.sampler.is_plain_argmax() {
                    true => plain.push((of, id, last)),
                    false => {
                        rows.push(last);
                        targets.push((of, id, position(last), true));
                    }
                }
            }
        }
        let mut drawn = Vec::with_capacity(plan.sequences.len());
        if !plain.is_empty() {
            let picked: Vec<u32> = plain.iter().map(|(_, _, row)| *row).collect();
            let mut best = Vec::with_capacity(picked.len());
            self.decoder.argmax(&picked, &mut best)?;
            let draws = plain.iter().zip(best);
            drawn.extend(draws.map(|(&(of, id, _), token)| Draw { of, id, token, logprobs: None }));
        }
        if !rows.is_empty() {
            let live = &mut self.live;
            self.decoder.logits(&rows, &mut |index, row| {
                let (of, id, position, draws) = targets[index];
                let Some(live) = live.get_mut(&id) else { return };
                if live.all_logits {
                    live.sink.logits(position, row);
                }
                if draws {
                    let mut scratch = row.to_vec();
                    let (token, logprobs) = live.sampler.draw(&mut scratch);
                    drawn.push(Draw { of, id, token, logprobs });
                }
            })?;
        }
        Ok(drawn)
    }

    fn start(&mut self, id: SeqId) {
        let Some(live) = self.live.get_mut(&id).filter(|live| !live.started) else { return };
        let Some(info) = self.scheduler.info(id) else { return };
        live.started = true;
        self.metrics.queue.0.observe(live.received.elapsed().as_secs_f64());
        let stop = info.hit_stop.name();
        self.metrics.lookups.get_or_create(&LookupLabel { stop }).inc();
        let cached = (info.cached_tokens as usize).min(live.prompt_len);
        live.sink.frame(GenerateFrame::Started(StartedV1 {
            cached_tokens: cached as u32,
            computed_tokens: (live.prompt_len - cached) as u32,
            hit_stop: info.hit_stop.to_string(),
        }));
    }

    fn emit(&mut self, now: Instant, id: SeqId, token: u32, logprobs: Option<TokenLogprobs>) {
        let Some(live) = self.live.get_mut(&id) else { return };
        match live.last_token.replace(now) {
            None => self.metrics.ttft.0.observe(now.saturating_duration_since(live.received).as_secs_f64()),
            Some(before) => self.metrics.itl.0.observe(now.saturating_duration_since(before).as_secs_f64()),
        }
        self.tokens += 1;
        self.metrics.generation_tokens.inc();
        live.sampler.accept(token);
        let (text, ending) = live.text.push(token);
        let heard = live.sink.frame(GenerateFrame::Tokens(vec![TokenOut { id: token, text, logprobs }]));
        match ending {
            Some(ending) => self.finish(now, id, ending),
            None if !heard => self.cancel(id),
            None => {}
        }
    }

    fn finish(&mut self, now: Instant, id: SeqId, ending: Ending) {
        self.remember_live(id);
        let preemptions = self.scheduler.remove(id).map_or(0, |info| info.preemptions);
        let Some(mut live) = self.live.remove(&id) else { return };
        let reason = match ending.reason {
            FinishReason::Stop => Reason::stop,
            FinishReason::Length => Reason::length,
            FinishReason::Cancelled => Reason::abort,
        };
        self.metrics.e2e.0.observe(now.saturating_duration_since(live.received).as_secs_f64());
        self.count_end(reason);
        live.sink.frame(GenerateFrame::Finished(FinishedV1 {
            reason: ending.reason,
            matched: ending.matched,
            tail: ending.tail,
            completion_tokens: live.text.generated(),
            preemptions,
        }));
    }

    fn expire(&mut self, now: Instant) {
        self.expire_pins(now);
        self.expire_warming();
        let late = self.live.iter().filter_map(|(id, live)| {
            let age = now.saturating_duration_since(live.received);
            live.deadline.filter(|deadline| age >= *deadline).map(|_| (*id, age))
        });
        let late: Vec<(SeqId, Duration)> = late.collect();
        for (id, age) in late {
            self.remember_live(id);
            self.scheduler.remove(id);
            self.siblings.gone(id);
            let Some(mut live) = self.live.remove(&id) else { continue };
            self.count_end(Reason::error);
            let after_ms = age.as_millis() as u64;
            live.sink.frame(GenerateFrame::Failed(GenerateError::DeadlineExceeded { after_ms }));
        }
    }

    fn count_end(&self, finished_reason: Reason) {
        self.metrics.finished.get_or_create(&FinishedLabel { finished_reason }).inc();
    }

    /// Moves the scheduler's KV events to the log and refreshes gauges.
    fn publish(&mut self) {
        let events: Vec<KvEvent> = self.scheduler.take_events();
        if !events.is_empty() {
            self.events.lock().append(events);
        }
        let counters = self.scheduler.stats().counters;
        let raise = |metric: &prometheus_client::metrics::counter::Counter, to: u64| {
            metric.inc_by(to.saturating_sub(metric.get()));
        };
        raise(&self.metrics.prefill_computed, counters.prefill_tokens_computed);
        raise(&self.metrics.recomputed, counters.recomputed_tokens);
        raise(&self.metrics.prefix_queries, counters.prefix_query_tokens);
        raise(&self.metrics.prefix_hits, counters.prefix_hit_tokens);
        raise(&self.metrics.preemptions, counters.preemptions);
        raise(&self.metrics.evictions, counters.evictions);
        raise(&self.metrics.checkpoints, counters.checkpoints);
        raise(&self.metrics.checkpoints_skipped, counters.checkpoints_skipped);
        raise(&self.metrics.pins_lost, counters.pins_lost);
        raise(&self.metrics.forks, counters.forks);
        self.publish_tiers();
        let load = self.load();
        self.metrics.running.set(load.running as i64);
        self.metrics.waiting.set(load.waiting as i64);
        self.metrics.kv_usage.set(if load.kv_total == 0 {
            0.0
        } else {
            load.kv_used as f64 / load.kv_total as f64
        });
    }

    fn publish_tiers(&self) {
        let Some(tiering) = &self.tiering else { return };
        self.metrics.tiers.update(&tiering.tiers().stats(), &tiering.counts());
    }

    /// What the engine holds.
    pub fn load(&self) -> EngineLoad {
        let stats = self.scheduler.stats();
        EngineLoad {
            running: stats.running,
            waiting: stats.waiting
                + self.siblings.waiting()
                + self.tiering.as_ref().map_or(0, Tiering::parked),
            pending_prefill_tokens: stats.pending_prefill_tokens,
            kv_used: stats.kv_used_bytes,
            kv_total: stats.kv_total_bytes,
            steps: self.steps,
            tokens: self.tokens,
            prefill_rate: self.rates.prefill,
            step_ms: self.rates.step_ms,
        }
    }

    /// The KV event log, to be read by others.
    pub fn events(&self) -> Arc<Mutex<EventLog>> {
        Arc::clone(&self.events)
    }
}

/// Uploads the plan and runs the layers.
fn run(decoder: &mut Decoder, scheduler: &Scheduler, plan: &StepPlan) -> Result<(), Error> {
    let part = |sequence: &PlannedSequence| StepSequence {
        rows: sequence.rows.start as usize..sequence.rows.end as usize,
        context: sequence.context_before as usize,
        segment_start: None,
    };
    let sequences: Vec<StepSequence> = plan.sequences.iter().map(part).collect();
    let paged = decoder.groups().iter().filter(|group| group.kind != CacheKind::State);
    let strides: Vec<u32> = paged.map(|group| (group.block_bytes / 64) as u32).collect();
    let table = |sequence: &PlannedSequence, group: usize| {
        let table = scheduler.tables(sequence.slot).get(group);
        table.map_or(BlockTable::Paged(&[]), |table| match table.contiguous_base() {
            Some(first) => BlockTable::Contiguous { first, stride: strides[group] },
            None => BlockTable::Paged(table.offsets()),
        })
    };
    let tables: Vec<Vec<BlockTable<'_>>> = (0..strides.len())
        .map(|group| plan.sequences.iter().map(|sequence| table(sequence, group)).collect())
        .collect();
    let states: Vec<StepState> =
        plan.sequences.iter().filter_map(|sequence| sequence.state.as_ref()).map(step_state).collect();
    let copies: Vec<KvCopy> =
        plan.copies.iter().map(|copy| KvCopy { group: copy.group, from: copy.src, to: copy.dst }).collect();
    let input = StepInput { tokens: &plan.tokens, sequences: &sequences, tables: &tables, states: &states };
    decoder.forward(&copies, &input)
}

fn step_state(state: &SequenceState) -> StepState {
    let export = |&(row, slot): &(u32, u32)| StateExport { row: row as usize, slot };
    let exports = state.exports.iter().map(export).collect();
    StepState { read: state.read, write: state.write, exports, deferred: false }
}

fn refusal(rejected: Rejected) -> GenerateError {
    match rejected {
        Rejected::TooLong { need, limit } => GenerateError::ContextLength { need, limit },
        Rejected::QueueFull { .. } => GenerateError::QueueFull,
        Rejected::EmptyPrompt => {
            GenerateError::InvalidField { field: "prompt".to_owned(), reason: rejected.to_string() }
        }
        Rejected::Duplicate(_) => GenerateError::Internal,
    }
}

impl Rates {
    fn step_ended(&mut self, took: Duration, rows: usize, prefill_rows: usize) {
        let seconds = took.as_secs_f32().max(1e-6);
        let blend = |old: f32, new: f32| if old == 0.0 { new } else { old + 0.2 * (new - old) };
        self.step_ms = blend(self.step_ms, seconds * 1e3);
        // Mixed steps say little about prefill alone.
        if prefill_rows * 10 >= rows * 9 && prefill_rows >= 64 {
            self.prefill = blend(self.prefill, prefill_rows as f32 / seconds);
        }
    }
}
