//! The scheduler: chooses the rows of the sequences that the next step computes.
//!
//! There are no prefill and decode phases. A sequence has tokens with and without computed KV, and each step
//! computes some of the latter within one token budget; sequences that need one row go first. A sequence is
//! admitted when its whole input fits, the least served tenant's first (`tenants`). When blocks run out, the
//! sequence with the least work to recompute is preempted, never the oldest one. Sequences with the same
//! uncached prefix follow the one that computes it: block by block, or with recurrent layers from state to
//! state, and the producer keeps a state at each junction.
//!
//! The module performs no I/O: calls in, plans out. The engine's loop is [`Scheduler::plan`], compute,
//! [`Scheduler::complete`] with the drawn tokens, [`Scheduler::remove`] for ended sequences, and
//! [`Scheduler::take_events`].

mod plan;
mod request;
mod resume;
mod sequence;
mod tenants;

#[cfg(test)]
mod tests;

pub use request::{
    Counters, Decoding, Demand, LogitRows, PlannedSequence, QueuePosition, Rejected, SeqId, SeqSlot,
    SequenceInfo, SequenceRequest, SequenceState, Stats, StepLimits, StepPlan,
};
pub use resume::ForkRefused;

use crate::images::SequenceImages;
use crate::kv_cache::{
    BlockLayout, BlockTable, Broken, CacheSpec, CheckpointPolicy, KvCache, PlannedUnits, SpecError,
};
use proto::block::ClusterKey;
use proto::event::KvEvent;
use proto::message::TenantShare;
use sequence::{Sequence, State};
use std::collections::{HashMap, VecDeque};
use tenants::Tenants;

/// Maximum length of a sequence in tokens, for models whose own context would need too large an arena.
pub const MAX_CONTEXT: usize = 1 << 20;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// Rows per step over all sequences; at least 1.
    pub max_batch_tokens: u32,
    /// Maximum number of admitted sequences; at least 1.
    pub max_seqs: usize,
    /// Rows of one prompt per step; 0 means no limit but `max_batch_tokens`.
    pub chunk: u32,
    /// Share prefixes between sequences. Always off with a contiguous layout.
    pub prefix_cache: bool,
    pub block_layout: BlockLayout,
    /// Steps without progress of its producer after which a follower computes the units itself.
    pub max_stalled_steps: u32,
    /// Maximum number of waiting sequences. Further ones are refused.
    pub max_waiting: usize,
    /// Where recurrent states are kept.
    pub checkpoints: CheckpointPolicy,
    /// Bytes that pinned prefixes may hold; `None` means a quarter of the arena.
    pub pin_bytes: Option<u64>,
    /// Steps between two full recounts of all invariants; 0 means never.
    pub check_interval: u64,
}

impl Default for SchedulerConfig {
    fn default() -> Self {
        Self {
            max_batch_tokens: 2048,
            max_seqs: 64,
            chunk: 512,
            prefix_cache: true,
            block_layout: BlockLayout::Paged,
            max_stalled_steps: 4,
            max_waiting: 4096,
            checkpoints: CheckpointPolicy::default(),
            pin_bytes: None,
            check_interval: 4096,
        }
    }
}

/// A call that does not fit the scheduler's state, which is a bug of the caller.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StepError {
    /// Steps must complete in the order in which they were planned.
    #[error("step {step} cannot complete: the oldest step in flight is {oldest:?}")]
    OutOfOrder {
        step: u64,
        /// The step that must complete first.
        oldest: Option<u64>,
    },
    /// A token for a sequence for which the step draws none.
    #[error("step {step} does not draw a token for sequence {id:?}")]
    NotSampled { step: u64, id: SeqId },
}

#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    key: ClusterKey,
    cache: KvCache,
    sequences: Vec<Option<Sequence>>,
    vacant: Vec<u32>,
    by_id: HashMap<SeqId, u32>,
    /// Slots of admitted sequences, oldest first.
    running: Vec<u32>,
    tenants: Tenants,
    /// The tenant whose turn it was in the last admission and whose next sequence did not fit into the free
    /// blocks.
    short_of_blocks: Option<u64>,
    planned: PlannedUnits,
    in_flight: VecDeque<PlannedStep>,
    arrivals: u64,
    step: u64,
    /// The step before which the last full recount ran.
    checked: u64,
    /// A sequence that runs alone: nothing else is admitted until it ends. Last resort when enough blocks are
    /// free but scattered over the groups' slabs.
    alone: Option<u32>,
    following: usize,
    /// Tokens of growth for which admission keeps room, per sequence. It grows after preemptions and shrinks
    /// after quiet steps, so that a sequence is not admitted and soon preempted.
    lookahead: u32,
    /// The step in which `lookahead` last changed.
    lookahead_since: u64,
    counters: Counters,
}

/// A planned step that has not completed.
#[derive(Debug)]
struct PlannedStep {
    step: u64,
    /// (slot of a sequence with rows in the step, whether a token is drawn).
    sequences: Vec<(u32, bool)>,
    /// (group, block) that the step reads or writes in addition to the blocks of its sequences.
    held: Vec<(usize, u32)>,
}

impl Scheduler {
    /// See [`KvCache::unused`].
    #[cfg(debug_assertions)]
    pub(crate) fn unused(&self) -> Vec<(u32, u64)> {
        self.cache.unused()
    }

    /// Creates a scheduler with an empty cache. `key` must be the coordinators' cluster key, so that prefix
    /// ids agree.
    pub fn new(config: SchedulerConfig, spec: CacheSpec, key: ClusterKey) -> Result<Self, SpecError> {
        let config = SchedulerConfig {
            max_batch_tokens: config.max_batch_tokens.max(1),
            max_seqs: config.max_seqs.max(1),
            prefix_cache: config.prefix_cache && config.block_layout != BlockLayout::Contiguous,
            ..config
        };
        Ok(Self {
            lookahead: spec.block_tokens,
            cache: KvCache::new(spec, config.block_layout)?,
            config,
            key,
            sequences: Vec::new(),
            vacant: Vec::new(),
            by_id: HashMap::new(),
            running: Vec::new(),
            tenants: Tenants::default(),
            short_of_blocks: None,
            planned: PlannedUnits::default(),
            in_flight: VecDeque::new(),
            arrivals: 0,
            step: 0,
            checked: 0,
            alone: None,
            following: 0,
            lookahead_since: 0,
            counters: Counters::default(),
        })
    }

    /// Whether, since the last call, a larger arena would have saved cached content or admitted a sequence.
    pub(crate) fn take_short(&self) -> bool {
        self.cache.take_short()
    }

    /// Bytes of the arena that may not be used now, and the unit in which that changes.
    pub(crate) fn parked_bytes(&self) -> (u64, u64) {
        (self.cache.parked_bytes(), self.cache.slab_bytes())
    }

    /// Allows the use of `bytes` more of the arena, in whole units.
    pub(crate) fn grow_arena(&mut self, bytes: u64) {
        self.cache.grow((bytes / self.cache.slab_bytes().max(1)) as usize);
        // The tenant in turn may fit now.
        self.short_of_blocks = None;
    }

    /// Gives up all of the arena but `bytes`, in whole units, as far as no sequence uses it.
    pub fn shrink_arena_to(&mut self, bytes: u64) {
        let spare = self.cache.total_bytes().saturating_sub(bytes) / self.cache.slab_bytes().max(1);
        self.cache.shrink(usize::try_from(spare).unwrap_or(usize::MAX));
    }

    /// Gives up `bytes` of the arena, rounded up to whole units, as far as no sequence uses them and every sequence fits
    /// when it is alone. Returns their places: (offset in units of 64 bytes, bytes). The caller publishes the events. No
    /// step may be in flight.
    pub fn shrink_arena(&mut self, bytes: u64) -> Vec<(u32, u64)> {
        let mut places = self.cache.shrink(bytes.div_ceil(self.cache.slab_bytes().max(1)) as usize);
        let longest = self.sequences.iter().flatten().map(Sequence::longest).max().unwrap_or(0);
        let rows = self.sequences.iter().flatten().map(|sequence| self.step_tokens_of(sequence));
        let rows = rows.max().unwrap_or(0);
        while !places.is_empty() && !self.cache.possible(longest, rows) {
            self.cache.grow(1);
            places.pop();
        }
        places
    }

    /// Queues a sequence, or refuses it.
    pub fn submit(&mut self, request: SequenceRequest) -> Result<(), Rejected> {
        if request.prompt.is_empty() {
            return Err(Rejected::EmptyPrompt);
        }
        if self.by_id.contains_key(&request.id) {
            return Err(Rejected::Duplicate(request.id));
        }
        let waiting = self.tenants.len();
        if waiting >= self.config.max_waiting {
            return Err(Rejected::QueueFull { waiting });
        }
        let span = request.images.as_ref().map_or(0, |images| images.longest_span());
        if span > self.config.max_batch_tokens {
            return Err(Rejected::Span { rows: span, limit: self.config.max_batch_tokens });
        }
        self.check_length(request.prompt.len(), request.max_new_tokens, span)?;
        let share = request.tenant;
        let position = request.position.unwrap_or_else(|| self.next_position());
        let key = self.config.prefix_cache.then_some(&self.key);
        let recurrent = key.is_some() && self.cache.has_states();
        let requested_checkpoints = recurrent
            .then(|| self.config.checkpoints.of_prompt(request.prompt.len() as u32, &request.boundaries));
        let mut sequence = Sequence::new(request, position, key);
        sequence.requested_checkpoints = requested_checkpoints.unwrap_or_default();
        let (tenant, rank) = (sequence.tenant, sequence.rank);
        let slot = self.insert(sequence, share);
        self.tenants.queue(tenant, rank, slot);
        Ok(())
    }

    /// While `held`, a sequence computes all of its tokens but the last, and no token is drawn for it.
    pub fn hold(&mut self, id: SeqId, held: bool) {
        let slot = self.by_id.get(&id).copied();
        let sequence = slot.and_then(|slot| self.sequences.get_mut(slot as usize)?.as_mut());
        sequence.into_iter().for_each(|sequence| sequence.held = held);
    }

    /// Reserves the queue position of a sequence that arrives now and is submitted later.
    pub fn next_position(&mut self) -> QueuePosition {
        self.arrivals += 1;
        QueuePosition(self.arrivals)
    }

    fn insert(&mut self, sequence: Sequence, share: TenantShare) -> u32 {
        let id = sequence.id;
        self.tenants.add_sequence(share);
        let slot = match self.vacant.pop() {
            Some(slot) => {
                self.sequences[slot as usize] = Some(sequence);
                slot
            }
            None => {
                self.sequences.push(Some(sequence));
                self.sequences.len() as u32 - 1
            }
        };
        self.by_id.insert(id, slot);
        slot
    }

    fn check_length(&self, prompt: usize, max_new_tokens: u32, span: u32) -> Result<(), Rejected> {
        let need = prompt as u64 + u64::from(max_new_tokens.max(1)) - 1;
        match u32::try_from(need).is_ok_and(|need| self.cache.possible(need, self.step_tokens().max(span))) {
            true => Ok(()),
            false => Err(Rejected::TooLong { need, limit: u64::from(self.max_sequence_tokens()) }),
        }
    }

    /// The longest sequence that fits when it is alone, in tokens of KV.
    pub fn max_sequence_tokens(&self) -> u32 {
        let (mut fits, mut too_long) = (0u32, u32::MAX);
        while too_long - fits > 1 {
            let middle = fits + (too_long - fits) / 2;
            if self.cache.possible(middle, self.step_tokens()) { fits = middle } else { too_long = middle }
        }
        fits
    }

    /// Ends a sequence in any state: finished, stopped or cancelled. Its blocks become free at once, or when
    /// the step in flight that computes its rows completes. `None` if the sequence does not exist.
    pub fn remove(&mut self, id: SeqId) -> Option<SequenceInfo> {
        self.end(id, false)
    }

    /// Like [`Scheduler::remove`], for a sequence whose caches may hold NaN or infinite values. Everything
    /// cached on its path is forgotten, including units that other sequences computed. Sequences that already
    /// use such a block will detect it in their own rows.
    pub fn remove_spoiled(&mut self, id: SeqId) -> Option<SequenceInfo> {
        self.end(id, true)
    }

    fn end(&mut self, id: SeqId, spoiled: bool) -> Option<SequenceInfo> {
        let slot = self.by_id.remove(&id)?;
        let sequence = self.sequences.get_mut(slot as usize)?.as_mut()?;
        let info = sequence.info;
        if spoiled {
            self.counters.pins_lost += self.cache.spoil(&mut sequence.cache);
        }
        self.planned.withdraw(slot, sequence.units_ahead());
        match sequence.state {
            State::Waiting => self.tenants.unqueue(sequence.tenant, &sequence.rank),
            State::Running | State::Leaving => self.running.retain(|&other| other != slot),
        }
        self.tenants.remove_sequence(sequence.tenant);
        if sequence.in_flight.is_some() {
            sequence.state = State::Leaving;
        } else {
            self.drop_slot(slot, true);
        }
        Some(info)
    }

    /// Completes a step. `drawn` has one token for each sequence that samples, followed by one token for each
    /// accepted draft token of that sequence, in order. Sequences that were removed meanwhile are ignored. A
    /// sampling sequence that is not in `drawn` gets no token and waits to be removed. After `NotSampled` the
    /// step is complete, but tokens from the offending one on are lost.
    pub fn complete(&mut self, step: u64, drawn: &[(SeqId, u32)]) -> Result<(), StepError> {
        let flight = self.take_oldest(step)?;
        let drafted = self.confirm(step, drawn);
        self.cache.complete(step);
        for (group, block) in flight.held {
            self.cache.end_hold(group, block);
        }
        let mut sampling = HashMap::with_capacity(flight.sequences.len());
        for (slot, samples) in flight.sequences {
            let Some(sequence) = self.sequences[slot as usize].as_mut() else { continue };
            if sequence.in_flight != Some(step) {
                // A later step also computes rows of it.
                continue;
            }
            sequence.in_flight = None;
            if sequence.state == State::Leaving {
                sampling.insert(sequence.id, None);
                self.drop_slot(slot, true);
            } else if samples {
                sampling.insert(sequence.id, Some(slot));
            }
        }
        let key = self.config.prefix_cache.then_some(&self.key);
        for run in drawn.chunk_by(|(previous, _), (next, _)| previous == next) {
            let Some(&(id, token)) = run.first().filter(|(id, _)| !drafted.contains(id)) else { continue };
            let slot = sampling.remove(&id).ok_or(StepError::NotSampled { step, id })?;
            let Some(sequence) = slot.and_then(|slot| self.sequences[slot as usize].as_mut()) else {
                continue;
            };
            if run.len() > 1 {
                return Err(StepError::NotSampled { step, id });
            }
            sequence.push(token, key);
            self.counters.generated_tokens += 1;
        }
        Ok(())
    }

    /// Aborts a failed step and all later ones. Their units are forgotten, and every running sequence returns
    /// to the queue to be computed again.
    pub fn abort(&mut self, step: u64) -> Result<(), StepError> {
        let oldest = self.in_flight.front().map(|flight| flight.step);
        if oldest != Some(step) {
            return Err(StepError::OutOfOrder { step, oldest });
        }
        self.cache.abort();
        for flight in std::mem::take(&mut self.in_flight) {
            for (group, block) in flight.held {
                self.cache.end_hold(group, block);
            }
            for (slot, _) in flight.sequences {
                let Some(sequence) = self.sequences[slot as usize].as_mut() else { continue };
                sequence.in_flight = None;
                if sequence.state == State::Leaving {
                    self.drop_slot(slot, false);
                }
            }
        }
        for slot in std::mem::take(&mut self.running) {
            self.requeue(slot, false);
        }
        Ok(())
    }

    /// How a live sequence has been served so far. The counts of its prompt are final once it samples.
    pub fn info(&self, id: SeqId) -> Option<SequenceInfo> {
        self.get(*self.by_id.get(&id)?).map(|sequence| sequence.info)
    }

    /// The block tables of a planned sequence, one per group. They are stable until the step has completed,
    /// even if the sequence is removed meanwhile.
    pub fn tables(&self, slot: SeqSlot) -> &[BlockTable] {
        self.get(slot.0).map_or(&[], |sequence| sequence.cache.tables())
    }

    /// The changes of the set of held prefixes since the last call.
    pub fn take_events(&mut self) -> Vec<KvEvent> {
        self.cache.take_events()
    }

    /// For each kind of layer group: (name, bytes, bytes held by sequences).
    pub fn cache_bytes(&self) -> Vec<(&'static str, u64, u64)> {
        self.cache.bytes_by_kind()
    }

    /// Forgets every cached prefix. Running sequences continue.
    pub fn clear_prefixes(&mut self) {
        self.cache.clear();
    }

    pub fn stats(&self) -> Stats {
        let mut counters = self.counters;
        counters.evictions = self.cache.evictions();
        let live = self.running.iter().chain(self.tenants.slots()).filter_map(|&slot| self.get(slot));
        Stats {
            counters,
            running: self.running.len(),
            waiting: self.tenants.len(),
            following: self.following,
            pending_prefill_tokens: live
                .map(|sequence| u64::from(sequence.prompt_len.saturating_sub(sequence.cache.len())))
                .sum(),
            kv_used_bytes: self.cache.used_bytes(),
            kv_total_bytes: self.cache.total_bytes(),
            held_units: self.cache.held_units(),
            pinned_bytes: self.cache.pinned_bytes(),
        }
    }

    /// The work that is left to compute.
    pub fn demand(&self) -> Demand {
        let mut demand = Demand::default();
        for sequence in self.running.iter().chain(self.tenants.slots()).filter_map(|&slot| self.get(slot)) {
            match sequence.decodes() {
                true => demand.decoding += 1,
                false => demand.prefill += u64::from(sequence.remaining()),
            }
        }
        demand
    }

    /// Number of sequences that were submitted and not removed.
    pub fn sequences(&self) -> usize {
        self.by_id.len()
    }

    /// Recounts every invariant. [`Scheduler::plan`] does this at intervals.
    pub fn check(&self) -> Result<(), Broken> {
        let caches = self.sequences.iter().flatten().map(|sequence| &sequence.cache);
        let held = self.in_flight.iter().flat_map(|flight| flight.held.iter().copied());
        self.cache.check_all(caches, held)
    }

    /// Whether everything is as in a new scheduler: no block owned, no prefix cached, nothing planned.
    #[cfg(test)]
    fn is_pristine(&self) -> bool {
        self.cache.is_pristine() && self.planned.is_empty() && self.by_id.is_empty()
    }

    /// Free blocks that allocations have examined so far.
    #[cfg(test)]
    fn allocation_work(&self) -> u64 {
        self.cache.looked_at()
    }

    /// Maximum number of rows of one sequence in one step.
    fn step_tokens(&self) -> u32 {
        match self.config.chunk {
            0 => self.config.max_batch_tokens,
            chunk => chunk.min(self.config.max_batch_tokens),
        }
    }

    /// Like `step_tokens`, for a sequence whose spans may be longer.
    fn step_tokens_of(&self, sequence: &Sequence) -> u32 {
        let span = sequence.images.as_ref().map_or(0, |images| images.longest_span());
        self.step_tokens().max(span)
    }

    /// The images of a planned sequence.
    pub fn images(&self, slot: SeqSlot) -> Option<&SequenceImages> {
        self.get(slot.0)?.images.as_deref()
    }

    fn get(&self, slot: u32) -> Option<&Sequence> {
        self.sequences.get(slot as usize)?.as_ref()
    }

    fn take_oldest(&mut self, step: u64) -> Result<PlannedStep, StepError> {
        let oldest = self.in_flight.front().map(|flight| flight.step);
        match self.in_flight.pop_front_if(|flight| flight.step == step) {
            Some(flight) => Ok(flight),
            None => Err(StepError::OutOfOrder { step, oldest }),
        }
    }

    /// Returns a sequence without blocks to the queue, at the position of its age. The KV that it computed
    /// may stay cached; its last state stays only if `intact`, that is, if all steps that wrote it have
    /// completed.
    fn requeue(&mut self, slot: u32, intact: bool) {
        let Some(sequence) = self.sequences[slot as usize].as_mut() else { return };
        self.planned.withdraw(slot, sequence.units_ahead());
        if intact {
            self.cache.retire(&mut sequence.cache);
        } else {
            self.cache.close(&mut sequence.cache);
        }
        sequence.state = State::Waiting;
        sequence.awaited = None;
        sequence.in_flight = None;
        sequence.draft_tokens.clear();
        self.tenants.queue(sequence.tenant, sequence.rank, slot);
    }

    /// Removes a sequence. `intact` is as for [`Scheduler::requeue`].
    fn drop_slot(&mut self, slot: u32, intact: bool) {
        if let Some(mut sequence) = self.sequences[slot as usize].take() {
            if intact {
                self.cache.retire(&mut sequence.cache);
            } else {
                self.cache.close(&mut sequence.cache);
            }
            self.vacant.push(slot);
        }
        if self.alone == Some(slot) {
            self.alone = None;
            self.cache.set_compact(false);
        }
    }
}
