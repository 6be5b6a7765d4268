//! A fake engine. Each token's KV and each recurrent state in its memory is a digest of the whole history up
//! to that position. The model draws the next token from that digest. A coordinator's view is built from the
//! events.

mod world;

pub(super) use world::{Rng, expected_output};

use super::super::*;
use crate::kv_cache::{CacheSpec, GroupKind, GroupSpec, NULL_OFFSET, PinId, ResumePoint};
use crate::kv_events::EventLog;
use proto::block::{BlockId, HASH_UNIT_TOKENS};
use proto::ids::Epoch;
use proto::message::TenantShare;
use std::collections::{BTreeMap, HashMap, HashSet};
use world::{Memory, draw, extend, histories};

pub(super) const KEY: ClusterKey = ClusterKey([7; 32]);

#[derive(Debug, Clone)]
pub(super) struct Client {
    pub(super) root: BlockId,
    pub(super) prompt: Vec<u32>,
    pub(super) max_new: u32,
    pub(super) output: Vec<u32>,
    pub(super) info: Option<SequenceInfo>,
    /// A token that was not drawn here but passed to the fork.
    given: Option<u32>,
    /// The true history after each token of prompt and output.
    truth: Vec<u64>,
    /// Of a sequence that needs the logits of its whole prompt: number of rows that have had them.
    scored: Option<usize>,
}

impl Client {
    fn token(&self, position: usize) -> u32 {
        self.prompt.get(position).copied().unwrap_or_else(|| self.output[position - self.prompt.len()])
    }
}

/// A planned step that has not been computed.
pub(super) struct Pending {
    plan: StepPlan,
    tables: Vec<Vec<BlockTable>>,
}

pub(super) struct Sim {
    pub(super) spec: CacheSpec,
    pub(super) scheduler: Scheduler,
    memory: Memory,
    pub(super) live: BTreeMap<SeqId, Client>,
    pub(super) done: BTreeMap<SeqId, Client>,
    pub(super) log: EventLog,
    mirror: HashSet<BlockId>,
    next_id: u64,
    pub(super) copies: u64,
    /// Priority of submitted sequences.
    pub(super) priority: i32,
    /// Tenant of submitted sequences; `None` derives it from the root.
    pub(super) tenant: Option<TenantShare>,
    pub(super) boundaries: Vec<u32>,
    pub(super) pins: Vec<PinId>,
    pub(super) limits: StepLimits,
    /// States kept in the middle of a step's rows.
    pub(super) exports: u64,
    /// Drafts tokens if set: three in four are correct.
    pub(super) draft_tokens: Option<Rng>,
    /// Some submitted sequences need the logits of their whole prompts.
    pub(super) scores: bool,
}

/// A resume point as a snapshot would hold it: (group, digests) of each block.
pub(super) struct Saved {
    pub(super) root: BlockId,
    pub(super) tokens: Vec<u32>,
    blocks: Vec<(usize, Vec<Option<u64>>)>,
}

impl Sim {
    pub(super) fn new(config: SchedulerConfig, spec: CacheSpec) -> Self {
        Self {
            scheduler: Scheduler::new(config, spec.clone(), KEY).unwrap(),
            spec,
            memory: Memory::default(),
            live: BTreeMap::new(),
            done: BTreeMap::new(),
            log: EventLog::new(Epoch(1), 1 << 20),
            mirror: HashSet::new(),
            next_id: 0,
            copies: 0,
            priority: 0,
            tenant: None,
            boundaries: Vec::new(),
            pins: Vec::new(),
            limits: StepLimits::NONE,
            exports: 0,
            draft_tokens: None,
            scores: false,
        }
    }

    /// Sets draft tokens for all decoding sequences.
    fn draft_round(&mut self) {
        let Some(rng) = &mut self.draft_tokens else { return };
        let mut drafted = Vec::new();
        for decoding in self.scheduler.decoding() {
            let mut history = self.live[&decoding.id].truth.last().copied().unwrap();
            let count = rng.below(u64::from(decoding.max_draft_tokens).min(7) + 1);
            let mut draft_token = |_| {
                let token = if rng.chance(75) { draw(history) } else { rng.below(3) as u32 };
                history = extend(history, token);
                token
            };
            drafted.push((decoding.id, (0..count).map(&mut draft_token).collect()));
        }
        drafted.into_iter().for_each(|(id, draft_tokens)| self.scheduler.set_draft_tokens(id, draft_tokens));
    }

    /// The histories after a sequence's tokens and after its draft tokens in a step.
    fn histories_in_step(&self, plan: &StepPlan, planned: &PlannedSequence) -> Vec<u64> {
        let mut truth = self.live[&planned.id].truth.clone();
        for row in planned.rows.end - planned.draft_tokens..planned.rows.end {
            truth.push(extend(truth[truth.len() - 1], plan.tokens[row as usize]));
        }
        truth
    }

    pub(super) fn submit(
        &mut self,
        root: BlockId,
        prompt: Vec<u32>,
        max_new: u32,
    ) -> Result<SeqId, Rejected> {
        self.next_id += 1;
        let id = SeqId(self.next_id);
        let scored = (self.scores && self.next_id.is_multiple_of(4)).then_some(0);
        self.scheduler.submit(SequenceRequest {
            id,
            root,
            prompt: prompt.clone(),
            max_new_tokens: max_new,
            logit_rows: match scored {
                Some(_) => LogitRows::Prompt,
                None if self.next_id.is_multiple_of(3) => LogitRows::All,
                None => LogitRows::LastOnly,
            },
            boundaries: self.boundaries.clone(),
            images: None,
            tenant: self.tenant.unwrap_or_else(|| TenantShare::of_root(root)),
            priority: self.priority,
            position: None,
        })?;
        let truth = histories(root, &prompt);
        self.live.insert(
            id,
            Client { root, prompt, max_new, output: Vec::new(), info: None, given: None, truth, scored },
        );
        Ok(id)
    }

    /// Forks a sequence with another last token.
    pub(super) fn fork(&mut self, of: SeqId, token: u32, max_new: u32) -> Result<SeqId, ForkRefused> {
        self.next_id += 1;
        let id = SeqId(self.next_id);
        self.scheduler.fork(of, id, token, max_new)?;
        let parent = &self.live[&of];
        let (root, mut truth) = (parent.root, parent.truth.clone());
        let mut prompt = [&parent.prompt[..], &parent.output].concat();
        prompt.pop();
        truth.pop();
        truth.push(extend(truth[truth.len() - 1], token));
        let (output, given) = (vec![token], Some(token));
        self.live
            .insert(id, Client { root, prompt, max_new, output, info: None, given, truth, scored: None });
        Ok(id)
    }

    /// The content of a snapshot of the deepest resume point within these tokens.
    pub(super) fn save(&self, root: BlockId, tokens: &[u32]) -> Option<Saved> {
        let point = self.scheduler.resume_point(root, tokens)?;
        let tokens = tokens[..point.tokens as usize].to_vec();
        let truth = histories(root, &tokens);
        let mut blocks = Vec::new();
        for block in &point.blocks {
            let seen = self.memory.read(block.group, block.offset).expect("a block that was written");
            let saved: Vec<_> = if self.is_state(block.group) {
                assert_eq!(
                    (block.tokens.clone(), seen[0]),
                    (point.tokens..point.tokens, truth.last().copied())
                );
                vec![seen[0]]
            } else {
                let range = block.tokens.start as usize..block.tokens.end as usize;
                assert_eq!(range.start % self.spec.block_tokens as usize, 0);
                let truth: Vec<_> = truth[range.clone()].iter().copied().map(Some).collect();
                assert_eq!(truth, seen[..range.len()], "a resume point's block is not what it says");
                truth
            };
            blocks.push((block.group, saved));
        }
        Some(Saved { root, tokens, blocks })
    }

    /// Restores a snapshot. Returns whether there was room.
    pub(super) fn restore(&mut self, saved: &Saved) -> bool {
        let Some((id, point)) = self.scheduler.begin_restore(saved.tokens.len() as u32) else { return false };
        let ResumePoint { tokens, blocks } = point;
        assert_eq!((tokens as usize, blocks.len()), (saved.tokens.len(), saved.blocks.len()));
        for (block, (group, digests)) in blocks.iter().zip(&saved.blocks) {
            assert_eq!(block.group, *group);
            let memory = self.memory.block(&self.spec, block.group, block.offset);
            memory.fill(None);
            memory[..digests.len()].copy_from_slice(digests);
        }
        self.scheduler.check().unwrap();
        assert!(self.scheduler.end_restore(id, Some((saved.root, &saved.tokens))));
        true
    }

    fn is_state(&self, group: usize) -> bool {
        self.spec.groups[group].kind == GroupKind::State
    }

    pub(super) fn remove(&mut self, id: SeqId) -> Client {
        let info = self.scheduler.remove(id).expect("a live sequence");
        self.removed(id, info)
    }

    /// Removes a sequence whose caches must not be used again.
    pub(super) fn remove_spoiled(&mut self, id: SeqId) -> Client {
        let info = self.scheduler.remove_spoiled(id).expect("a live sequence");
        self.removed(id, info)
    }

    fn removed(&mut self, id: SeqId, info: SequenceInfo) -> Client {
        let mut client = self.live.remove(&id).expect("a live sequence");
        client.info = Some(info);
        client
    }

    /// Plans a step and computes it: a device executes steps in order, so its memory changes here.
    pub(super) fn plan(&mut self) -> Option<Pending> {
        self.draft_round();
        let plan = self.scheduler.plan_within(self.limits).unwrap()?;
        let tables: Vec<Vec<BlockTable>> =
            plan.sequences.iter().map(|s| self.scheduler.tables(s.slot).to_vec()).collect();
        self.copies += plan.copies.len() as u64;
        self.compute(&plan, &tables);
        Some(Pending { plan, tables })
    }

    fn compute(&mut self, plan: &StepPlan, tables: &[Vec<BlockTable>]) {
        assert!(!plan.tokens.is_empty() && plan.tokens.len() == plan.positions.len());
        assert!(plan.tokens.len() <= self.scheduler.config.max_batch_tokens as usize);
        for copy in &plan.copies {
            let src = self.memory.block(&self.spec, copy.group, copy.src).clone();
            let dst = self.memory.block(&self.spec, copy.group, copy.dst);
            dst[..copy.tokens as usize].copy_from_slice(&src[..copy.tokens as usize]);
        }
        self.compute_states(plan);
        let block = self.spec.block_tokens as usize;
        let mut rows_seen = 0;
        let mut writers = HashSet::new();
        for (planned, tables) in plan.sequences.iter().zip(tables) {
            let Some(client) = self.live.get(&planned.id) else { panic!("{:?} is not live", planned.id) };
            assert_eq!(planned.rows.start, rows_seen);
            rows_seen = planned.rows.end;
            let (first, rows) = (planned.context_before as usize, planned.rows.len());
            let truth_len = client.truth.len();
            let truth = self.histories_in_step(plan, planned);
            assert_eq!(planned.last_chunk, first + rows == truth.len());
            assert_eq!(planned.samples, planned.last_chunk && client.max_new > 0);
            assert!(
                planned.draft_tokens == 0
                    || rows == 1 + planned.draft_tokens as usize && first >= client.prompt.len()
            );
            for (row, position) in (planned.rows.start as usize..).zip(first..first + rows) {
                assert!(position >= truth_len || plan.tokens[row] == client.token(position));
                assert_eq!(plan.positions[row] as usize, position);
                for (group, table) in tables.iter().enumerate() {
                    if self.is_state(group) {
                        continue;
                    }
                    let offset = table.offsets()[position / block];
                    assert_ne!(offset, NULL_OFFSET);
                    writers.insert((group, offset, planned.id));
                    self.memory.block(&self.spec, group, offset)[position % block] = Some(truth[position]);
                }
            }
            let logits = &plan.logit_rows[planned.logits.start as usize..planned.logits.end as usize];
            assert!(logits.iter().all(|row| planned.rows.contains(row)));
            assert!(!planned.samples || logits.last() == Some(&(planned.rows.end - 1)));
            let in_prompt = rows.min(client.prompt.len().saturating_sub(first));
            let client = self.live.get_mut(&planned.id).expect("a live sequence");
            if let Some(scored) = &mut client.scored {
                let all: Vec<u32> = (planned.rows.start..).take(in_prompt).collect();
                assert!(logits.starts_with(&all), "a row of the prompt has no logits");
                let prompt = client.prompt.len();
                assert!(first <= *scored || *scored == prompt, "{first} is behind {scored}");
                *scored = (*scored).max(first + in_prompt).min(prompt);
            }
        }
        assert_eq!(rows_seen as usize, plan.tokens.len());
        let blocks: HashSet<_> = writers.iter().map(|&(group, offset, _)| (group, offset)).collect();
        assert_eq!(blocks.len(), writers.len(), "two sequences write into one block");
        // All rows are written before any is read.
        for (planned, tables) in plan.sequences.iter().zip(tables) {
            let truth = self.histories_in_step(plan, planned);
            let last = (planned.context_before as usize) + planned.rows.len() - 1;
            for (group, table) in tables.iter().enumerate() {
                let first = match self.spec.groups[group].kind {
                    GroupKind::State => continue,
                    GroupKind::Full => 0,
                    GroupKind::Sliding { window } => {
                        (planned.context_before as usize + 1).saturating_sub(window as usize)
                    }
                };
                for at in first / block..=last / block {
                    let seen = self.memory.read(group, table.offsets()[at]);
                    for position in first.max(at * block)..=last.min(at * block + block - 1) {
                        let seen = seen.and_then(|kv| kv[position % block]);
                        assert_eq!(
                            seen,
                            Some(truth[position]),
                            "{:?} group {group} at {position}",
                            planned.id
                        );
                    }
                }
            }
        }
    }

    /// Reads and writes the states of a step. Sequences may be computed in any order, so no slot may be
    /// written that another sequence reads.
    fn compute_states(&mut self, plan: &StepPlan) {
        let group = self.spec.groups.iter().position(|group| group.kind == GroupKind::State);
        let (mut readers, mut writes) = (HashMap::new(), HashMap::new());
        let mut deferred = HashSet::new();
        for planned in &plan.sequences {
            assert_eq!(planned.state.is_some(), group.is_some());
            let (Some(group), Some(state)) = (group, &planned.state) else { continue };
            let truth = self.histories_in_step(plan, planned);
            let first = planned.context_before as usize;
            assert_eq!(state.deferred, planned.draft_tokens > 0);
            if state.deferred {
                assert!(state.exports.is_empty());
                deferred.insert(state.write);
            }
            assert_eq!(state.read.is_some(), first > 0, "{:?} starts with the wrong state", planned.id);
            if let Some(read) = state.read {
                let seen = self.memory.read(group, read).and_then(|state| state[0]);
                assert_eq!(seen, Some(truth[first - 1]), "{:?} reads another state at {first}", planned.id);
                readers.entry(read).or_insert_with(Vec::new).push(planned.id);
            }
            assert!(state.exports.is_sorted_by(|a, b| a.0 < b.0));
            assert!(state.exports.iter().all(|&(row, _)| row + 1 < planned.rows.len() as u32));
            self.exports += state.exports.len() as u64;
            let last = (planned.rows.len() as u32 - 1, state.write);
            for (row, slot) in state.exports.iter().copied().chain(std::iter::once(last)) {
                let content = (planned.id, truth[first + row as usize]);
                assert_eq!(writes.insert(slot, content), None, "a slot is written twice");
            }
        }
        for (&slot, &(id, state)) in &writes {
            let readers = readers.get(&slot);
            assert!(readers.is_none_or(|readers| readers[..] == [id]), "{id:?} writes what {readers:?} read");
            if !deferred.contains(&slot) {
                self.memory.block(&self.spec, group.unwrap(), slot)[0] = Some(state);
            }
        }
    }

    /// Computes the states of the accepted rows of a step from the state before them.
    fn accept(&mut self, planned: &PlannedSequence, rows: usize) {
        let group = self.spec.groups.iter().position(|group| group.kind == GroupKind::State);
        let (Some(group), Some(state)) = (group, planned.state.as_ref().filter(|state| state.deferred))
        else {
            return;
        };
        let truth = &self.live[&planned.id].truth;
        let first = planned.context_before as usize;
        let read = self.memory.read(group, state.read.unwrap()).and_then(|state| state[0]);
        assert_eq!(read, Some(truth[first - 1]), "the state before draft tokens is still there");
        let counted = truth[first + rows - 1];
        self.memory.block(&self.spec, group, state.write)[0] = Some(counted);
    }

    /// Completes a step: draws tokens from the fake KV of the last rows and removes sequences that have all
    /// their tokens.
    pub(super) fn complete(&mut self, pending: Pending) {
        let block = self.spec.block_tokens as usize;
        let mut drawn = Vec::new();
        for (planned, tables) in pending.plan.sequences.iter().zip(&pending.tables) {
            let Some(client) = self.live.get_mut(&planned.id).filter(|_| planned.samples) else { continue };
            let end = planned.context_before as usize + planned.rows.len();
            let mut counted = 0;
            for last in end - 1 - planned.draft_tokens as usize..end {
                let seen = (0..tables.len())
                    .filter_map(|group| match &planned.state {
                        Some(state) if self.spec.groups[group].kind == GroupKind::State => {
                            // A deferred state is not written yet, and there may be no other group.
                            (!state.deferred).then_some((group, state.write, 0))
                        }
                        _ => Some((group, tables[group].offsets()[last / block], last % block)),
                    })
                    .map(|(group, offset, at)| {
                        self.memory.read(group, offset).and_then(|block| block[at]).unwrap()
                    });
                let mut seen: HashSet<u64> = seen.collect();
                if planned.state.as_ref().is_some_and(|state| state.deferred) {
                    seen.insert(client.truth[last]);
                }
                assert_eq!(seen.len(), 1, "groups have seen different pasts");
                let token = draw(seen.into_iter().next().unwrap());
                client.output.push(token);
                client.truth.push(extend(client.truth[last], token));
                drawn.push((planned.id, token));
                counted += 1;
                let row = planned.rows.start as usize + last + 1 - planned.context_before as usize;
                let right = last + 1 < end && pending.plan.tokens[row] == token;
                if !right || client.output.len() as u32 == client.max_new {
                    break;
                }
            }
            self.accept(planned, counted);
        }
        self.scheduler.complete(pending.plan.step, &drawn).unwrap();
        self.follow_events();
        let ended: Vec<SeqId> = pending
            .plan
            .sequences
            .iter()
            .filter(|planned| {
                self.live
                    .get(&planned.id)
                    .is_some_and(|client| planned.last_chunk && client.output.len() as u32 == client.max_new)
            })
            .map(|planned| planned.id)
            .collect();
        for id in ended {
            let client = self.remove(id);
            let mut input = client.prompt.clone();
            input.extend(client.given);
            let (given, drawn) = client.output.split_at(input.len() - client.prompt.len());
            assert_eq!(given, &input[client.prompt.len()..], "{id:?}");
            assert_eq!(drawn, expected_output(client.root, &input, drawn.len() as u32), "{id:?}");
            assert_eq!(client.output.len() as u32, client.max_new, "{id:?}");
            let info = client.info.unwrap();
            assert_eq!(info.cached_tokens + info.computed_tokens, client.prompt.len() as u32, "{id:?}");
            self.done.insert(id, client);
        }
    }

    /// Fails the steps in flight, oldest first: nothing that they wrote is reliable.
    pub(super) fn abort(&mut self, in_flight: impl IntoIterator<Item = Pending>) {
        // Their logits are lost too. No executor fails a step and goes on, so that is not made up for.
        let scored = self.live.values_mut().filter(|client| client.scored.is_some());
        scored.for_each(|client| client.scored = Some(client.prompt.len()));
        let mut first = None;
        for Pending { plan, tables } in in_flight {
            first.get_or_insert(plan.step);
            for copy in &plan.copies {
                self.memory.block(&self.spec, copy.group, copy.dst).fill(None);
            }
            let block = self.spec.block_tokens;
            for (planned, tables) in plan.sequences.iter().zip(&tables) {
                for state in planned.state.iter() {
                    let group = tables.iter().enumerate().find(|&(group, _)| self.is_state(group)).unwrap().0;
                    for slot in state.exports.iter().map(|&(_, slot)| slot).chain([state.write]) {
                        self.memory.block(&self.spec, group, slot).fill(None);
                    }
                }
                for position in planned.context_before..planned.context_before + planned.rows.len() as u32 {
                    for (group, table) in tables.iter().enumerate() {
                        if self.is_state(group) {
                            continue;
                        }
                        let offset = table.offsets()[(position / block) as usize];
                        let kv = self.memory.block(&self.spec, group, offset);
                        kv[(position % block) as usize] = None;
                    }
                }
            }
        }
        self.scheduler.abort(first.expect("a step in flight")).unwrap();
        self.follow_events();
    }

    /// Plans and completes one step. Returns `false` if there was nothing to do.
    pub(super) fn step(&mut self) -> bool {
        match self.plan() {
            Some(pending) => {
                self.complete(pending);
                true
            }
            None => false,
        }
    }

    pub(super) fn run(&mut self) {
        while self.step() {}
        assert!(self.live.is_empty(), "idle with {} sequences left", self.live.len());
    }

    /// Takes up to `slabs` slabs from the arena. Returns whether there were any.
    pub(super) fn shrink(&mut self, slabs: u64) -> bool {
        let (before, unit) = (self.scheduler.stats().kv_total_bytes, self.scheduler.parked_bytes().1);
        let places = self.scheduler.shrink_arena(slabs * unit);
        self.follow_events();
        let after = self.scheduler.stats().kv_total_bytes;
        assert_eq!(before - after, places.iter().map(|(_, bytes)| bytes).sum::<u64>());
        !places.is_empty()
    }

    pub(super) fn grow(&mut self, slabs: u64) {
        let unit = self.scheduler.parked_bytes().1;
        self.scheduler.grow_arena(slabs * unit);
    }

    pub(super) fn follow_events(&mut self) {
        let events = self.scheduler.take_events();
        for event in &events {
            match event {
                KvEvent::Stored { units, .. } => {
                    for unit in units {
                        assert!(self.mirror.insert(*unit), "{unit} stored twice");
                    }
                }
                KvEvent::Removed { units, .. } => {
                    for unit in units {
                        assert!(self.mirror.remove(unit), "{unit} removed without being held");
                    }
                }
                KvEvent::Cleared => self.mirror.clear(),
                KvEvent::ResumePoint { unit, position, .. } => {
                    assert!(position > &0 && position.is_multiple_of(HASH_UNIT_TOKENS as u32));
                    assert!(self.mirror.insert(*unit), "{unit} announced twice");
                }
            }
        }
        self.log.append(events);
        assert_eq!(self.mirror.len(), self.scheduler.stats().held_units);
    }

    /// Prediction of a coordinator that receives only the events: the deepest held unit.
    pub(super) fn predict(&self, root: BlockId, prompt: &[u32]) -> u32 {
        let units = KEY.chain(root, &prompt[..prompt.len() - 1]);
        let deepest = units.iter().rposition(|unit| self.mirror.contains(unit));
        deepest.map_or(0, |at| ((at + 1) * HASH_UNIT_TOKENS) as u32)
    }

    pub(super) fn check(&mut self) {
        self.follow_events();
        self.scheduler.check().unwrap();
        assert_eq!(self.log.held_units(), self.mirror.len());
        let snapshot = self.log.snapshot();
        let points = snapshot.resume_points.iter().map(|&(unit, _, _)| unit);
        let snapshot: HashSet<BlockId> =
            snapshot.runs.into_iter().flat_map(|run| run.1).chain(points).collect();
        assert_eq!(snapshot, self.mirror);
        for (group, offset, first, root, tokens) in self.scheduler.cache.contents() {
            let truth = histories(root, &tokens);
            let unit = truth.iter().skip(tokens.len() - HASH_UNIT_TOKENS).copied().map(Some);
            let kv = self.memory.read(group, offset).expect("a block that was written");
            if self.is_state(group) {
                assert_eq!(kv[0], truth.last().copied(), "a cached state is not there");
                continue;
            }
            assert!(
                unit.eq(kv[first..first + HASH_UNIT_TOKENS].iter().copied()),
                "a cached unit is not there"
            );
        }
    }
}

pub(super) const ROOT: BlockId = BlockId([9; 16]);

pub(super) fn full(block_tokens: u32, blocks: u64) -> CacheSpec {
    let groups = vec![GroupSpec { kind: GroupKind::Full, block_bytes: 64 }];
    CacheSpec { groups, block_tokens, arena_bytes: 64 * blocks }
}

/// One full layer for every five with a sliding window.
pub(super) fn mixed(window: u32, bytes: u64) -> CacheSpec {
    let groups = vec![
        GroupSpec { kind: GroupKind::Full, block_bytes: 64 },
        GroupSpec { kind: GroupKind::Sliding { window }, block_bytes: 320 },
    ];
    CacheSpec { groups, block_tokens: 16, arena_bytes: bytes }
}

/// One full layer for every three recurrent ones. A slot is as large as 10 blocks.
pub(super) fn hybrid(block_tokens: u32, slots: u64, blocks: u64) -> CacheSpec {
    let groups = vec![
        GroupSpec { kind: GroupKind::Full, block_bytes: 64 },
        GroupSpec { kind: GroupKind::State, block_bytes: 640 },
    ];
    CacheSpec { groups, block_tokens, arena_bytes: 640 * slots + 64 * blocks }
}

pub(super) fn tokens(range: std::ops::Range<u32>) -> Vec<u32> {
    range.collect()
}

pub(super) fn chunked(chunk: u32) -> SchedulerConfig {
    SchedulerConfig { chunk, max_batch_tokens: 512, ..SchedulerConfig::default() }
}

pub(super) fn request(id: u64, prompt: Vec<u32>, max_new_tokens: u32) -> SequenceRequest {
    SequenceRequest {
        id: SeqId(id),
        root: ROOT,
        prompt,
        max_new_tokens,
        logit_rows: LogitRows::LastOnly,
        boundaries: Vec::new(),
        images: None,
        tenant: TenantShare::of_root(ROOT),
        priority: 0,
        position: None,
    }
}

/// A scheduler without a model.
pub(super) fn bare(config: SchedulerConfig, spec: CacheSpec) -> Scheduler {
    Scheduler::new(config, spec, KEY).unwrap()
}

/// Completes a step in which every sequence that samples draws token 1.
pub(super) fn finish(scheduler: &mut Scheduler, plan: &StepPlan) {
    let drawn: Vec<_> = plan.sequences.iter().filter(|s| s.samples).map(|s| (s.id, 1)).collect();
    scheduler.complete(plan.step, &drawn).unwrap();
}
