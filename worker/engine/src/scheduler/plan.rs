//! Plans one step: how many rows each sequence computes, which sequences follow others, and which are
//! preempted.

mod draft_tokens;
mod follow;
mod states;

use super::sequence::{Sequence, State, hit_end};
use super::{
    LogitRows, PlannedSequence, PlannedStep, Scheduler, SeqSlot, SequenceState, StepLimits, StepPlan,
};
use crate::kv_cache::{Broken, CopyBlock};
use crate::scheduler::tenants::Next;
use proto::block::HASH_UNIT_TOKENS;
use std::collections::HashMap;

/// Upper limit of the growth, in tokens per sequence, for which admission keeps room.
const MAX_LOOKAHEAD: u32 = 1024;
/// Part of a step's rows (one over it) for the background beside sequences that decode.
const BACKGROUND_DIVISOR: u32 = 4;
/// After this number of steps without preemption, that room is halved.
const LOOKAHEAD_STEPS: u64 = 64;

#[derive(Debug)]
pub(super) struct StepBuilder {
    step: u64,
    /// Rows that are not assigned yet.
    budget: u32,
    /// Number of decoding sequences that may still take part.
    decoding: u32,
    entries: Vec<Entry>,
    /// Copies with their source blocks.
    copies: Vec<(CopyBlock, u32)>,
    /// States kept in the middle of a sequence's rows.
    exports: Vec<Export>,
    /// A sequence was preempted, so none is admitted in this step.
    preempted: bool,
    /// Number of sequences that wait for units of others.
    following: usize,
    /// Whether sequences may wait for others at all.
    may_wait: bool,
    /// Whether a sequence that is not in the background waits, or has no token yet.
    urgent: bool,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    slot: u32,
    from: u32,
    rows: u32,
    /// Further rows that are draft tokens.
    draft_tokens: u32,
}

/// Writes the state after a row to a slot of its own.
#[derive(Debug, Clone, Copy)]
struct Export {
    slot: u32,
    /// Units before the state, counted from the sequence's start.
    unit: u32,
    offset: u32,
    /// (group, slot) to release after the step.
    held: (usize, u32),
}

/// Result of advancing a sequence.
#[derive(Debug, PartialEq, Eq)]
enum GrowOutcome {
    /// The sequence got rows, waits, or has nothing to compute.
    Over,
    /// The sequence has the least to lose and is preempted itself.
    GivesWay,
    /// The sequence is the oldest, no other can be preempted, and there are still too few blocks.
    Stuck,
}

impl Scheduler {
    /// Plans the next step. `None` if nothing can be computed before a step in flight completes, or a
    /// sequence is submitted or removed. After an error the cache must not be used any more.
    pub fn plan(&mut self) -> Result<Option<StepPlan>, Broken> {
        self.plan_within(StepLimits::NONE)
    }

    /// Like [`Scheduler::plan`], with a smaller step.
    pub fn plan_within(&mut self, limits: StepLimits) -> Result<Option<StepPlan>, Broken> {
        self.cache.check()?;
        let step = self.step + 1;
        if self.config.check_interval > 0 && step - self.checked >= self.config.check_interval {
            self.checked = step;
            self.check()?;
        }
        if step - self.lookahead_since >= LOOKAHEAD_STEPS {
            self.lookahead = (self.lookahead / 2).max(self.cache.spec().block_tokens);
            self.lookahead_since = step;
        }
        let mut builder = StepBuilder {
            step,
            budget: self.config.max_batch_tokens.min(limits.rows.max(1)),
            decoding: limits.decoding.max(1),
            entries: Vec::with_capacity(self.running.len()),
            copies: Vec::new(),
            exports: Vec::new(),
            preempted: false,
            following: 0,
            may_wait: true,
            urgent: self.is_urgent(),
        };
        self.yield_one_sequence(&mut builder);
        // Further rounds run only if the first one found no row while no step is in flight. Then waiting for
        // others is pointless, and preempted sequences can be admitted at once.
        for round in 0..3 {
            builder.following = 0;
            self.schedule_running(&mut builder);
            if !builder.preempted || round > 0 {
                self.admit(&mut builder);
            }
            if !builder.entries.is_empty() || !self.in_flight.is_empty() {
                break;
            }
            builder.may_wait = false;
        }
        self.following = builder.following;
        self.attach_draft_tokens(&mut builder);
        Ok((!builder.entries.is_empty()).then(|| self.build(builder)))
    }

    /// Schedules all admitted sequences, those in the background last.
    fn schedule_running(&mut self, builder: &mut StepBuilder) {
        let background = |&slot: &u32| self.get(slot).is_some_and(Sequence::is_background);
        // Ranks order the running sequences, and the background has the last ones.
        let first = self.running.partition_point(|slot| !background(slot));
        let (upper, lower) = self.running.split_at(first);
        let (upper, lower) = (upper.to_vec(), lower.to_vec());
        self.schedule_class(&upper, builder);
        if !lower.is_empty() && self.open_to_background(builder) {
            self.schedule_class(&lower, builder);
        }
    }

    /// Whether a sequence that is not in the background waits, or computes what its next token needs.
    fn is_urgent(&self) -> bool {
        let first =
            |s: &Sequence| s.len() == s.prompt_len || s.cache.len() < s.prompt_len || s.remaining() > 1;
        self.tenants.waits() || self.upper_class().any(first)
    }

    /// The running sequences that are not in the background.
    fn upper_class(&self) -> impl Iterator<Item = &Sequence> {
        self.running
            .iter()
            .filter_map(|&slot| self.get(slot))
            .take_while(|sequence| !sequence.is_background())
    }

    /// Whether the step may have rows of sequences in the background: none while another sequence is urgent, unless
    /// nothing else can be computed. Beside sequences that decode, they get a part of the rows.
    fn open_to_background(&self, builder: &mut StepBuilder) -> bool {
        if builder.urgent {
            return !builder.may_wait && builder.entries.is_empty();
        }
        if self.upper_class().next().is_some() {
            builder.budget = builder.budget.min(self.config.max_batch_tokens / BACKGROUND_DIVISOR);
        }
        builder.budget > 0 && builder.decoding > 0
    }

    /// Schedules the admitted sequences of a class: first the oldest, then those that need one row, then prompts.
    /// Within each of these the least served tenant goes first, then the oldest sequence. Prompts of several
    /// tenants share the rows.
    fn schedule_class(&mut self, class: &[u32], builder: &mut StepBuilder) {
        let Some((&oldest, others)) = class.split_first() else { return };
        let needs_one_row = |slot: u32| {
            self.get(slot).is_some_and(|sequence| sequence.in_flight.is_none() && sequence.remaining() == 1)
        };
        let (mut order, mut prompts): (Vec<u32>, Vec<u32>) =
            others.iter().partition(|&&slot| needs_one_row(slot));
        let served = |slot: &u32| self.get(*slot).map(|sequence| self.tenants.served(sequence.tenant));
        order.sort_by_key(served);
        order.truncate((builder.decoding as usize).saturating_sub(usize::from(needs_one_row(oldest))));
        prompts.sort_by_key(served);
        // The oldest leaves one row for each of the others, but always gets at least one itself.
        let rows = builder.budget.saturating_sub(order.len() as u32).max(1);
        let mut demands: HashMap<u64, u32> = HashMap::new();
        for sequence in
            std::iter::once(oldest).chain(prompts.iter().copied()).filter_map(|slot| self.get(slot))
        {
            let rows = sequence.remaining().min(self.step_tokens());
            if rows > 0 {
                let demand = demands.entry(sequence.tenant).or_default();
                *demand = demand.saturating_add(rows);
            }
        }
        let mut shares = (demands.len() > 1).then(|| self.tenants.share_out(rows, demands));
        let own = self.get(oldest).map(|sequence| sequence.tenant);
        if let Some(share) = own.and_then(|tenant| shares.as_mut()?.get_mut(&tenant)) {
            *share = (*share).max(1);
        }
        self.schedule_prompt(oldest, rows, &mut shares, builder);
        for slot in order {
            self.schedule(slot, builder.budget, builder);
        }
        for slot in prompts {
            self.schedule_prompt(slot, builder.budget, &mut shares, builder);
        }
    }

    /// Schedules a prompt, limited to its tenant's share of the step's rows if there are shares.
    fn schedule_prompt(
        &mut self,
        slot: u32,
        max_rows: u32,
        shares: &mut Option<HashMap<u64, u32>>,
        builder: &mut StepBuilder,
    ) {
        let tenant = self.get(slot).map(|sequence| sequence.tenant);
        let mut share = tenant.and_then(|tenant| shares.as_mut()?.get_mut(&tenant));
        let max_rows = share.as_ref().map_or(max_rows, |share| max_rows.min(**share));
        // Rows that see each other are in one step, also if others get fewer.
        let span = self.get(slot).map_or(0, Sequence::next_span);
        let max_rows = if max_rows > 0 { max_rows.max(span).min(builder.budget) } else { 0 };
        let before = builder.budget;
        self.schedule(slot, max_rows, builder);
        if let Some(share) = &mut share {
            **share = share.saturating_sub(before.saturating_sub(builder.budget));
        }
    }

    fn schedule(&mut self, slot: u32, max_rows: u32, builder: &mut StepBuilder) {
        // Taken out of `sequences` meanwhile, so that code that iterates over the other sequences does not
        // see it.
        let Some(mut sequence) = self.sequences[slot as usize].take() else { return };
        let outcome = if sequence.state == State::Running && may_decode(&sequence, builder) {
            self.advance(&mut sequence, slot, max_rows, builder)
        } else {
            GrowOutcome::Over
        };
        self.sequences[slot as usize] = Some(sequence);
        match outcome {
            GrowOutcome::Over => {}
            GrowOutcome::GivesWay => self.preempt(slot, builder),
            GrowOutcome::Stuck => self.run_alone(slot, builder),
        }
    }

    fn advance(
        &mut self,
        sequence: &mut Sequence,
        slot: u32,
        max_rows: u32,
        builder: &mut StepBuilder,
    ) -> GrowOutcome {
        if sequence.remaining() == 0 || sequence.held && sequence.remaining() == 1 {
            return GrowOutcome::Over;
        }
        let copies = builder.copies.len();
        let prefill = sequence.remaining() > 1 || sequence.cache.len() < sequence.prompt_len;
        if prefill && self.follow(sequence, slot, max_rows, builder) || max_rows == 0 {
            return GrowOutcome::Over;
        }
        sequence.awaited = None;
        let from = sequence.cache.len();
        let mut rows = sequence.remaining().min(max_rows);
        if sequence.held && rows == sequence.remaining() {
            rows -= 1;
            // Copies that it has taken over require a row of it in this step: then it is no longer held.
            match (rows, builder.copies.len() > copies) {
                (0, false) => return GrowOutcome::Over,
                (0, true) => {
                    sequence.held = false;
                    rows = 1;
                }
                _ => {}
            }
        }
        let mut joins_at = None;
        if prefill {
            rows = rows.min(self.step_tokens());
            joins_at = self.next_followed(sequence, slot, rows, builder.step);
            rows = sequence.uncut(joins_at.unwrap_or(rows));
            if rows == 0 {
                rows = sequence.uncut(sequence.next_span().min(max_rows));
            }
            if rows == 0 {
                return GrowOutcome::Over;
            }
        }
        let room = loop {
            if self.cache.extend(&mut sequence.cache, from + rows) {
                break rows;
            }
            let oldest = self.running.first() == Some(&slot);
            match self.cheapest_victim(sequence, slot, oldest, builder.step) {
                Some(victim) if victim == slot => return GrowOutcome::GivesWay,
                Some(victim) => self.preempt(victim, builder),
                None => {
                    let room = self.cache.room(&mut sequence.cache).min(rows);
                    let room = sequence.uncut(room);
                    if room == 0 {
                        let stuck = oldest && builder.entries.is_empty() && self.in_flight.is_empty();
                        return if stuck { GrowOutcome::Stuck } else { GrowOutcome::Over };
                    }
                    break room;
                }
            }
        };
        if self.cache.copy_tail(&mut sequence.cache, builder.step, &mut builder.copies) {
            // Its copies belong to this step, so it must take part in it.
            sequence.committed_in = builder.step;
        }
        let (first, end) = (from as usize / HASH_UNIT_TOKENS, (from + room) as usize / HASH_UNIT_TOKENS);
        if prefill && sequence.cache.shares() {
            let ahead = sequence.units_ahead();
            let first = ahead.first().is_some_and(|&unit| self.planned.producer(unit) != Some(slot));
            if first || sequence.following && self.cache.has_states() {
                self.planned.plan(slot, ahead);
            }
        }
        self.cache.commit(&mut sequence.cache, &sequence.units, &sequence.tokens, from + room, builder.step);
        if !sequence.cache.shares() {
            // A unit's id collided: no other sequence can wait for this one any more.
            self.planned.withdraw(slot, sequence.units.get(first..).unwrap_or_default());
        } else if end > first {
            self.planned.withdraw(slot, &sequence.units[first..end]);
            sequence.committed_in = builder.step;
        }
        self.keep_states(sequence, slot, from, builder);
        sequence.progressed_in = builder.step;
        sequence.following = joins_at == Some(room);
        builder.budget = builder.budget.saturating_sub(room);
        builder.entries.push(Entry { slot, from, rows: room, draft_tokens: 0 });
        GrowOutcome::Over
    }

    /// The sequence to preempt for `sequence`, possibly itself: among those that would free blocks, first of the
    /// background, which alone is preempted for sequences in the background, the one with the least work to recompute;
    /// ties go to the youngest. Never the oldest sequence, one with rows in flight, or one that committed units in this
    /// step, because others may have taken these units over and would read blocks that nothing writes.
    fn cheapest_victim(&self, sequence: &Sequence, slot: u32, oldest: bool, step: u64) -> Option<u32> {
        let own = (!oldest).then_some((slot, sequence));
        let others = self.running.iter().skip(1).filter_map(|&slot| Some((slot, self.get(slot)?)));
        own.into_iter()
            .chain(others)
            .filter(|(_, s)| s.in_flight.is_none() && s.committed_in != step && s.cache.holds_any())
            .filter(|(_, s)| s.is_background() || !sequence.is_background())
            .min_by_key(|(_, s)| {
                let lost = s.cache.len() - self.cache.tokens_shared(&s.cache);
                (!self.cache.frees_any(&s.cache), !s.is_background(), lost, std::cmp::Reverse(s.rank))
            })
            .map(|(slot, _)| slot)
    }

    fn preempt(&mut self, slot: u32, builder: &mut StepBuilder) {
        builder.preempted = true;
        self.lookahead = (self.lookahead * 2).min(MAX_LOOKAHEAD);
        self.lookahead_since = builder.step;
        self.counters.preemptions += 1;
        self.put_back(slot, builder);
    }

    /// Removes a sequence from the step and returns it to the queue.
    pub(super) fn put_back(&mut self, slot: u32, builder: &mut StepBuilder) {
        builder.entries.retain(|entry| {
            if entry.slot == slot {
                builder.budget += entry.rows;
            }
            entry.slot != slot
        });
        self.running.retain(|&other| other != slot);
        if let Some(sequence) = self.sequences[slot as usize].as_mut() {
            sequence.info.preemptions += 1;
        }
        self.requeue(slot, true);
    }

    /// Last resort: free blocks are so scattered over groups that the oldest sequence cannot continue even
    /// with all others gone. It restarts alone in an empty cache, in compact mode.
    fn run_alone(&mut self, slot: u32, builder: &mut StepBuilder) {
        self.preempt(slot, builder);
        for other in std::mem::take(&mut self.running) {
            self.requeue(other, false);
        }
        self.counters.pins_lost += self.cache.unpin_all();
        self.cache.clear();
        self.cache.set_compact(true);
        self.alone = Some(slot);
        self.counters.lone_restarts += 1;
    }

    /// Admits sequences from the queue in order, while the whole input of the next one fits.
    fn admit(&mut self, builder: &mut StepBuilder) {
        self.short_of_blocks = None;
        while self.running.len() < self.config.max_seqs {
            let next = match self.alone {
                Some(slot) => self.get(slot).filter(|s| s.state == State::Waiting).map(|s| Next {
                    tenant: s.tenant,
                    rank: s.rank,
                    slot,
                }),
                None => self.tenants.next(),
            };
            let Some(Next { tenant, rank, slot }) = next else { return };
            let background = self.get(slot).is_some_and(Sequence::is_background);
            if background && self.alone.is_none() && !self.open_to_background(builder) {
                return;
            }
            let Some(mut sequence) = self.sequences[slot as usize].take() else { return };
            let mut admitted = self.open_if_fits(&mut sequence);
            if admitted.is_none() && self.running.is_empty() && self.in_flight.is_empty() {
                // No sequence that ends could free blocks: pins must be removed.
                let lost = self.cache.unpin_all();
                self.counters.pins_lost += lost;
                admitted = if lost > 0 { self.open_if_fits(&mut sequence) } else { None };
            }
            if let Some(skipped_units) = admitted {
                sequence.state = State::Running;
                sequence.reached_before = sequence.reached;
                sequence.following = true;
                sequence.progressed_in = builder.step;
                if sequence.cache.shares() && !sequence.seen {
                    self.counters.prefix_query_tokens += u64::from(sequence.prompt_len);
                }
                sequence.seen = true;
                let units = if sequence.cache.shares() { &sequence.units[..] } else { &[] };
                self.planned.plan(slot, units.get(skipped_units..).unwrap_or_default());
            }
            self.sequences[slot as usize] = Some(sequence);
            if admitted.is_none() {
                self.short_of_blocks = Some(tenant);
                return;
            }
            self.tenants.unqueue(tenant, &rank);
            let at = self.running.partition_point(|&other| self.get(other).is_some_and(|s| s.rank < rank));
            self.running.insert(at, slot);
            self.schedule(slot, builder.budget, builder);
            if builder.preempted && self.alone.is_none() {
                return;
            }
        }
    }

    /// Opens the sequence's cache if its whole input fits next to the room reserved for running sequences.
    /// Returns the number of leading units that it need not plan to compute. With recurrent layers these
    /// include units with cached KV, which may wait for a state from the sequence that computed them.
    fn open_if_fits(&mut self, sequence: &mut Sequence) -> Option<usize> {
        if self.cache.is_contiguous() {
            sequence.cache = self.cache.open_contiguous(sequence.longest())?;
            return Some(0);
        }
        let share = self.config.prefix_cache && self.alone.is_none();
        let mut cache = self.cache.open(share.then_some(sequence.root));
        let step_tokens = self.step_tokens_of(sequence);
        let len = if self.running.is_empty() { sequence.len() } else { self.ahead(sequence) };
        let hit = self.cache.find(&cache, &sequence.units, &sequence.tokens, sequence.unit_cap(), &|end| {
            hit_end(sequence.images.as_deref(), end, self.cache.spec().block_tokens)
        });
        let mut needs = self.cache.admission_needs(&hit, len, step_tokens);
        for other in self.running.iter().filter_map(|&slot| self.get(slot)) {
            self.cache.add_outstanding(
                &other.cache,
                self.ahead(other),
                self.step_tokens_of(other),
                &mut needs,
            );
        }
        if !self.cache.fits(&needs) {
            self.cache.close(&mut cache);
            return None;
        }
        sequence.cache = cache;
        Some(if self.cache.has_states() { hit.kv_units } else { 0 })
    }

    /// Tokens for which room is reserved: the sequence's input and some growth.
    pub(super) fn ahead(&self, sequence: &Sequence) -> u32 {
        sequence.len().saturating_add(self.lookahead).min(sequence.longest().max(sequence.len()))
    }

    fn build(&mut self, builder: StepBuilder) -> StepPlan {
        let rows: u32 = builder.entries.iter().map(|entry| entry.rows + entry.draft_tokens).sum();
        let mut plan = StepPlan {
            step: builder.step,
            copies: builder.copies.iter().map(|&(copy, _)| copy).collect(),
            tokens: Vec::with_capacity(rows as usize),
            positions: Vec::with_capacity(rows as usize),
            logit_rows: Vec::new(),
            sequences: Vec::with_capacity(builder.entries.len()),
        };
        let mut flight = PlannedStep {
            step: builder.step,
            sequences: Vec::with_capacity(builder.entries.len()),
            held: builder.copies.iter().map(|&(copy, src)| (copy.group, src)).collect(),
        };
        flight.held.extend(builder.exports.iter().map(|export| export.held));
        for Entry { slot, from, rows, draft_tokens } in builder.entries {
            let Some(sequence) = self.sequences[slot as usize].as_mut() else { continue };
            let to = from + rows;
            self.tenants.serve(sequence.tenant, rows);
            let (new, again) = sequence.count_computed(from, to);
            self.counters.prefill_tokens_computed += u64::from(new);
            self.counters.recomputed_tokens += u64::from(again);
            sequence.in_flight = Some(builder.step);
            let state = self.cache.step_state(&mut sequence.cache, from > 0).map(|state| {
                flight.held.extend(state.held);
                SequenceState {
                    read: state.read,
                    write: state.write,
                    exports: exports_of(&builder.exports, slot, from),
                    deferred: draft_tokens > 0,
                }
            });
            let first_row = plan.tokens.len() as u32;
            plan.tokens.extend_from_slice(&sequence.tokens[from as usize..to as usize]);
            plan.tokens.extend_from_slice(&sequence.draft_tokens);
            plan.positions.extend(from..to + draft_tokens);
            let last_chunk = to == sequence.len();
            let samples = last_chunk && sequence.max_new_tokens > 0;
            let first_logit = plan.logit_rows.len() as u32;
            let logit_positions = match sequence.logit_rows {
                LogitRows::All | LogitRows::Prompt => from..to.min(sequence.prompt_len),
                LogitRows::LastOnly => from..from,
            };
            plan.logit_rows.extend(logit_positions.clone().map(|position| first_row + position - from));
            if samples && !logit_positions.contains(&(to - 1)) {
                plan.logit_rows.push(first_row + rows - 1);
            }
            plan.logit_rows.extend(first_row + rows..first_row + rows + draft_tokens);
            plan.sequences.push(PlannedSequence {
                id: sequence.id,
                rows: first_row..first_row + rows + draft_tokens,
                context_before: from,
                draft_tokens,
                logits: first_logit..plan.logit_rows.len() as u32,
                last_chunk,
                state,
                samples,
                slot: SeqSlot(slot),
            });
            flight.sequences.push((slot, samples));
        }
        self.step = builder.step;
        self.counters.steps += 1;
        self.in_flight.push_back(flight);
        plan
    }
}

/// Whether the step has room for one more decoding sequence, if `sequence` decodes.
fn may_decode(sequence: &Sequence, builder: &mut StepBuilder) -> bool {
    if !sequence.decodes() || sequence.remaining() == 0 {
        return true;
    }
    let room = builder.decoding > 0;
    builder.decoding = builder.decoding.saturating_sub(1);
    room
}

/// The exports of one sequence whose rows start at `from`, in the form of its plan.
fn exports_of(exports: &[Export], slot: u32, from: u32) -> Vec<(u32, u32)> {
    let own = exports.iter().filter(|export| export.slot == slot);
    let row = |export: &Export| export.unit * HASH_UNIT_TOKENS as u32 - 1 - from;
    let mut exports: Vec<(u32, u32)> = own.map(|export| (row(export), export.offset)).collect();
    exports.sort_unstable();
    exports
}
