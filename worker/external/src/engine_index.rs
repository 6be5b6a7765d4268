//! Which prefixes an engine's cache holds, from its KV events, in Kvasir's names.
//!
//! # Method
//!
//! An engine names its blocks by hashes that nobody else can compute, but an event has each block's tokens and
//! its parent's hash. The index keeps blocks as a forest ([`BlockForest`]). A chain of
//! blocks from a beginning of a prompt is cut again into hash units: a block *owns* the units that end inside
//! it, whatever the block's size. A unit is held while a block that owns it can be hit, which needs all blocks
//! before it. Its medium is the slowest of these blocks'. Several blocks may own one unit; it is held while
//! one of them can be hit.
//!
//! A chain belongs to the root whose salt its first block has ([`salt_of`](crate::salt_of)). Engines whose
//! events have no salts are covered in [`ChainNames`](names::ChainNames).
//!
//! A block can be hit only as a whole. A consumer that compares a prompt with the held units therefore rounds
//! the match down to a multiple of the block size, and to less than the prompt. With that, and blocks of a multiple of
//! 16 tokens, the match equals the engine's cached tokens. Smaller or other blocks may hit up to 15 tokens more.
//!
//! # Lost messages
//!
//! Batches are numbered from 0 in each run of the engine. A gap is filled from the engine's replay socket. A
//! batch that cannot be had again makes the index forget everything: it then follows the events from there
//! on, which names a part of what the engine holds and nothing else, and is not [`exact`](EngineIndex::exact)
//! until the engine clears its cache or restarts. After a new connection, and whenever the caller
//! [`probe`](EngineIndex::probe)s, the last known batch is requested again. If it differs or is missing, the
//! engine has restarted with an empty cache. While there is no connection the index reports nothing as held.
//! Without a replay socket a lost batch is noticed when the next one arrives, and until then the index may count
//! as exact; a connection loses batches only where the publisher's queue overflows.
//!
//! # Limits
//!
//! Models with more than one kind of attention publish several cache groups. A prefix can be hit only if every
//! group has it, and events do not tell which part the others need, so such an index is never exact; it follows
//! the group with full attention. Blocks of images and embeddings are not named. One index follows one
//! data-parallel rank. Storage that engines share is not followed.

use crate::arguments::EngineKind;
use crate::kv_events::{CacheEvent, CacheEventBatch, KvEventError};
use bytes::Bytes;
use forest::{BlockForest, ForestError};
use proto::block::{BlockId, UnitKey};
use proto::event::KvEvent;
use std::collections::VecDeque;

mod forest;
mod names;
mod units;

#[cfg(test)]
mod tests;

/// Replays that are requested for one gap.
const MAX_REPLAYS: u32 = 3;

/// Settings of an [`EngineIndex`].
#[derive(Debug, Clone)]
pub struct IndexConfig {
    pub engine: EngineKind,
    /// The engine has a replay socket.
    pub replay: bool,
    /// Most blocks that are kept.
    pub max_blocks: usize,
    /// Most tokens of blocks that are kept.
    pub max_tokens: usize,
    /// Most bytes of live messages that are kept during a replay.
    pub max_waiting: usize,
}

impl IndexConfig {
    /// Room for 4 million tokens, which take about 100 MB.
    pub fn new(engine: EngineKind, replay: bool) -> Self {
        Self { engine, replay, max_blocks: 1 << 20, max_tokens: 4 << 20, max_waiting: 64 << 20 }
    }
}

/// Action that the caller must take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IndexAction {
    /// Request all batches from this number on, report each by [`EngineIndex::replayed`], then call
    /// [`EngineIndex::replay_ended`] or [`EngineIndex::replay_failed`].
    Replay { from: u64 },
}

/// Why an index is not exact.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Inexact {
    /// There is no subscription.
    NotConnected,
    /// A replay of missing batches is under way.
    CatchingUp,
    /// Earlier batches of this run are not in the replay any more.
    HistoryLost,
    /// Batches were lost and could not be had again.
    Gap,
    /// A batch or an event could not be understood.
    InvalidEvent,
    /// The engine holds more than the index has room for.
    Full,
    /// The cache was cleared while other storage than the device's was in use.
    OtherTiers,
    /// The model has several kinds of attention.
    CacheGroups,
    /// Events of more than one data-parallel rank.
    DataParallel,
    /// Chains that may belong to several roots.
    AmbiguousRoot,
}

impl Inexact {
    /// Value of a metric's label.
    pub fn name(self) -> &'static str {
        match self {
            Self::NotConnected => "not_connected",
            Self::CatchingUp => "catching_up",
            Self::HistoryLost => "history_lost",
            Self::Gap => "gap",
            Self::InvalidEvent => "invalid_event",
            Self::Full => "full",
            Self::OtherTiers => "other_tiers",
            Self::CacheGroups => "cache_groups",
            Self::DataParallel => "data_parallel",
            Self::AmbiguousRoot => "ambiguous_root",
        }
    }
}

/// Counters since the index was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct IndexStats {
    pub batches: u64,
    /// Batches missing when their successor arrived.
    pub gaps: u64,
    pub replays: u64,
    /// Restarts of the engine.
    pub restarts: u64,
    /// Times that everything was forgotten with the engine still running.
    pub forgotten: u64,
    /// Batches that could not be understood.
    pub invalid: u64,
    /// Blocks not recorded because the index was full.
    pub refused: u64,
}

/// Follows one engine's KV events. Without sockets and clock: the caller brings messages and executes actions.
#[derive(Debug)]
pub struct EngineIndex {
    config: IndexConfig,
    forest: BlockForest,
    phase: Phase,
    /// Number of the next batch; all before it are applied. `None` until the first one is known.
    next: Option<u64>,
    /// Digest of batch `next - 1`, if it was seen.
    last_digest: Option<[u8; 16]>,
    /// Live messages that arrived during a replay.
    waiting: VecDeque<(u64, Bytes)>,
    waiting_bytes: usize,
    /// Replays without progress.
    attempts: u32,
    actions: VecDeque<IndexAction>,
    /// Whether everything that the engine holds was seen, until it clears its cache or restarts.
    complete: Result<(), Inexact>,
    /// Why the index cannot be exact in this run of the engine.
    permanent: Option<Inexact>,
    /// The cache group that is followed.
    group: Option<u32>,
    rank: Option<u32>,
    stats: IndexStats,
}

#[derive(Debug, Clone, Copy)]
enum Phase {
    Offline,
    Live,
    Replaying(Replay),
}

#[derive(Debug, Clone, Copy)]
struct Replay {
    kind: ReplayKind,
    from: u64,
    /// A batch has arrived.
    any: bool,
    /// The engine turned out to be another run. The rest of this replay is ignored.
    restarted: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReplayKind {
    /// Everything of a run that is not known.
    FromStart,
    /// From the last known batch on, to see whether the run is the same.
    Verify,
    /// From the first missing batch on.
    Fill,
}

impl EngineIndex {
    pub fn new(units: UnitKey, config: IndexConfig) -> Self {
        // vLLM stores equal blocks several times and reports each copy. SGLang's tree has each block once.
        let counts_copies = config.engine == EngineKind::Vllm;
        Self {
            forest: BlockForest::new(units, counts_copies, config.max_blocks, config.max_tokens),
            config,
            phase: Phase::Offline,
            next: None,
            last_digest: None,
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            attempts: 0,
            actions: VecDeque::new(),
            complete: Err(Inexact::NotConnected),
            permanent: None,
            group: None,
            rank: None,
            stats: IndexStats::default(),
        }
    }

    /// A request of `root` is about to be sent. `salted`: it carries the root's salt.
    pub fn register(&mut self, root: BlockId, prompt: &[u32], salted: bool) {
        self.forest.register(root, prompt, salted);
    }

    /// The subscription is open.
    pub fn connected(&mut self) {
        self.drop_waiting();
        self.attempts = 0;
        match self.next {
            _ if !self.config.replay => {
                self.phase = Phase::Live;
                self.forest.resume();
            }
            Some(next) if self.last_digest.is_some() => {
                self.start_replay(ReplayKind::Verify, next.saturating_sub(1))
            }
            _ => self.start_from_scratch(),
        }
    }

    /// The subscription is closed. Nothing counts as held until it is open again.
    pub fn disconnected(&mut self) {
        self.phase = Phase::Offline;
        self.actions.clear();
        self.drop_waiting();
        if self.config.replay {
            self.forest.suspend();
        } else {
            self.forget(Inexact::NotConnected);
            self.next = None;
            self.last_digest = None;
        }
    }

    /// The engine's process was replaced: its cache is empty.
    pub fn engine_restarted(&mut self) {
        self.stats.restarts += 1;
        match self.phase {
            Phase::Offline => self.reset(Inexact::NotConnected),
            _ if self.config.replay => self.start_from_scratch(),
            _ => self.reset(Inexact::HistoryLost),
        }
    }

    /// The engine has cleared its cache, whether or not it has published that yet.
    pub fn cleared(&mut self) {
        let other_tiers = self.forest.uses_other_tiers();
        self.forest.clear();
        if other_tiers {
            self.complete = Err(Inexact::OtherTiers);
        }
    }

    /// Checks by a replay that the engine runs on and that its last batches arrived. For calls every few
    /// seconds.
    pub fn probe(&mut self) {
        if !self.config.replay || !matches!(self.phase, Phase::Live) {
            return;
        }
        match self.next {
            Some(next) if self.last_digest.is_some() => {
                self.start_replay(ReplayKind::Verify, next.saturating_sub(1))
            }
            Some(next) => self.start_replay(ReplayKind::Fill, next),
            None => self.start_from_scratch(),
        }
    }

    /// A message of the subscription.
    pub fn message(&mut self, sequence: u64, payload: Bytes) {
        match self.phase {
            Phase::Offline => {}
            Phase::Live => self.live(sequence, payload),
            Phase::Replaying(_) => self.wait(sequence, payload),
        }
    }

    /// A batch of the requested replay.
    pub fn replayed(&mut self, sequence: u64, payload: &[u8]) {
        let Phase::Replaying(mut replay) = self.phase else { return };
        if replay.restarted || sequence < replay.from {
            return;
        }
        let first = !std::mem::replace(&mut replay.any, true);
        self.phase = Phase::Replaying(replay);
        if first && replay.kind == ReplayKind::Verify {
            if sequence == replay.from && self.last_digest == Some(digest(payload)) {
                return;
            }
            if sequence == replay.from {
                replay.restarted = true;
                self.phase = Phase::Replaying(replay);
                return self.reset(Inexact::HistoryLost);
            }
            // The replay does not go back far enough to compare anything.
            self.forget(Inexact::HistoryLost);
            self.next = None;
        }
        match self.next {
            None => self.complete = if sequence == 0 { Ok(()) } else { Err(Inexact::HistoryLost) },
            Some(next) if sequence < next => return,
            Some(next) if sequence > next => {
                self.stats.gaps += 1;
                self.forget(Inexact::Gap);
            }
            Some(_) => {}
        }
        self.apply(sequence, payload);
    }

    /// The replay has sent its end marker.
    pub fn replay_ended(&mut self) {
        let Phase::Replaying(replay) = self.phase else { return };
        let lost = !replay.any && replay.kind == ReplayKind::Verify;
        if replay.restarted || lost {
            self.stats.restarts += 1;
            return self.start_from_scratch();
        }
        if self.next.is_none() {
            // A run that has published nothing has stored nothing.
            self.next = Some(0);
            self.complete = Ok(());
        }
        self.go_live();
    }

    /// The replay broke off, timed out, or its socket refused the connection.
    pub fn replay_failed(&mut self) {
        let Phase::Replaying(replay) = self.phase else { return };
        if replay.kind == ReplayKind::Verify && !self.forest.is_suspended() {
            // A probe. The subscription is still open, so nothing tells that anything was lost.
            return self.go_live();
        }
        self.attempts += 1;
        if self.attempts < MAX_REPLAYS {
            // What was applied of it stays.
            let from = match replay.kind {
                ReplayKind::Fill => self.next.unwrap_or(0),
                ReplayKind::Verify | ReplayKind::FromStart => replay.from,
            };
            if replay.kind == ReplayKind::FromStart {
                return self.start_from_scratch();
            }
            return self.start_replay(replay.kind, from);
        }
        self.attempts = 0;
        let reason = if replay.kind == ReplayKind::Fill { Inexact::Gap } else { Inexact::HistoryLost };
        self.forget(reason);
        self.next = None;
        self.last_digest = None;
        self.go_live();
    }

    /// What to do next, if anything.
    pub fn next_action(&mut self) -> Option<IndexAction> {
        self.actions.pop_front()
    }

    /// Changes since the last call, in order.
    pub fn take_events(&mut self) -> Vec<KvEvent> {
        self.forest.take_events()
    }

    /// Whether the held units are all that the engine holds of the roots.
    pub fn exact(&self) -> bool {
        self.inexact().is_none()
    }

    pub fn inexact(&self) -> Option<Inexact> {
        match self.phase {
            Phase::Offline => return Some(Inexact::NotConnected),
            Phase::Live => {}
            Phase::Replaying(replay) => {
                let behind = match replay.kind {
                    ReplayKind::FromStart => true,
                    ReplayKind::Verify => self.forest.is_suspended(),
                    // A message that revealed a gap waits. A probe has none.
                    ReplayKind::Fill => !self.waiting.is_empty(),
                };
                if behind {
                    return Some(Inexact::CatchingUp);
                }
            }
        }
        let ambiguous = self.forest.is_ambiguous().then_some(Inexact::AmbiguousRoot);
        self.permanent.or(self.complete.err()).or(ambiguous)
    }

    /// Units that are held.
    pub fn held_units(&self) -> usize {
        self.forest.held_units()
    }

    /// Blocks that the index keeps.
    pub fn blocks(&self) -> usize {
        self.forest.len()
    }

    pub fn stats(&self) -> IndexStats {
        IndexStats { refused: self.forest.refused(), ..self.stats }
    }

    fn live(&mut self, sequence: u64, payload: Bytes) {
        match self.next {
            None => self.complete = if sequence == 0 { Ok(()) } else { Err(Inexact::HistoryLost) },
            Some(next) if sequence == next => self.attempts = 0,
            Some(next)
                if sequence.checked_add(1) == Some(next) && self.last_digest == Some(digest(&payload)) =>
            {
                return;
            }
            Some(next) if sequence < next => {
                self.stats.restarts += 1;
                if self.config.replay {
                    self.wait(sequence, payload);
                    return self.start_from_scratch();
                }
                self.reset(Inexact::HistoryLost);
                self.complete = if sequence == 0 { Ok(()) } else { Err(Inexact::HistoryLost) };
            }
            Some(next) => {
                self.stats.gaps += 1;
                if self.config.replay && self.attempts < MAX_REPLAYS {
                    self.attempts += 1;
                    self.wait(sequence, payload);
                    return self.start_replay(ReplayKind::Fill, next);
                }
                self.attempts = 0;
                self.forget(Inexact::Gap);
            }
        }
        self.apply(sequence, &payload);
    }

    fn apply(&mut self, sequence: u64, payload: &[u8]) {
        self.stats.batches += 1;
        if self.apply_batch(payload).is_err() {
            self.stats.invalid += 1;
            self.forget(Inexact::InvalidEvent);
        }
        self.next = Some(sequence.saturating_add(1));
        self.last_digest = Some(digest(payload));
    }

    fn apply_batch(&mut self, payload: &[u8]) -> Result<(), BatchError> {
        let batch = CacheEventBatch::decode(self.config.engine, payload)?;
        if let Some(rank) = batch.data_parallel_rank
            && *self.rank.get_or_insert(rank) != rank
        {
            self.permanent = Some(Inexact::DataParallel);
            return Ok(());
        }
        for event in batch.events {
            match event {
                CacheEvent::Stored(blocks) if blocks.partial_attention => {
                    self.permanent = Some(Inexact::CacheGroups);
                }
                CacheEvent::Stored(blocks) => {
                    if let Some(group) = blocks.group
                        && *self.group.get_or_insert(group) != group
                    {
                        self.permanent = Some(Inexact::CacheGroups);
                        continue;
                    }
                    match self.forest.store(&blocks) {
                        Err(ForestError::Full) => self.complete = Err(Inexact::Full),
                        result => result?,
                    }
                }
                CacheEvent::Removed { hashes, medium, group } => {
                    if group.is_none_or(|group| self.group.is_none_or(|followed| followed == group)) {
                        self.forest.remove(&hashes, medium);
                    }
                }
                CacheEvent::AllCleared => {
                    let other_tiers = self.forest.uses_other_tiers();
                    self.forest.clear();
                    self.complete = if other_tiers { Err(Inexact::OtherTiers) } else { Ok(()) };
                }
            }
        }
        Ok(())
    }

    fn forget(&mut self, reason: Inexact) {
        self.stats.forgotten += 1;
        self.forest.clear();
        self.complete = Err(reason);
    }

    /// Forgets a run of the engine.
    fn reset(&mut self, reason: Inexact) {
        self.forest.reset();
        self.complete = Err(reason);
        self.permanent = None;
        self.group = None;
        self.rank = None;
        self.next = None;
        self.last_digest = None;
    }

    fn start_from_scratch(&mut self) {
        self.reset(Inexact::HistoryLost);
        self.start_replay(ReplayKind::FromStart, 0);
    }

    fn start_replay(&mut self, kind: ReplayKind, from: u64) {
        self.stats.replays += 1;
        self.phase = Phase::Replaying(Replay { kind, from, any: false, restarted: false });
        self.actions.clear();
        self.actions.push_back(IndexAction::Replay { from });
    }

    /// Ends a replay and applies the messages that waited for it.
    fn go_live(&mut self) {
        self.phase = Phase::Live;
        self.forest.resume();
        while matches!(self.phase, Phase::Live)
            && let Some((sequence, payload)) = self.waiting.pop_front()
        {
            self.waiting_bytes = self.waiting_bytes.saturating_sub(payload.len());
            // The replay had it.
            if self.next.is_some_and(|next| sequence < next) {
                continue;
            }
            self.live(sequence, payload);
        }
    }

    /// Keeps a live message for the end of the replay. If there is no room the earlier ones are dropped; the
    /// gap is seen afterwards.
    fn wait(&mut self, sequence: u64, payload: Bytes) {
        self.waiting_bytes += payload.len();
        let at = self.waiting.partition_point(|(known, _)| *known < sequence);
        self.waiting.insert(at, (sequence, payload));
        while self.waiting_bytes > self.config.max_waiting
            && let Some((_, dropped)) = self.waiting.pop_front()
        {
            self.waiting_bytes -= dropped.len();
        }
    }

    fn drop_waiting(&mut self) {
        self.waiting.clear();
        self.waiting_bytes = 0;
    }
}

/// Why a batch was not applied as a whole.
enum BatchError {
    Decode,
    Forest,
}

impl From<KvEventError> for BatchError {
    fn from(_: KvEventError) -> Self {
        Self::Decode
    }
}

impl From<ForestError> for BatchError {
    fn from(_: ForestError) -> Self {
        Self::Forest
    }
}

fn digest(payload: &[u8]) -> [u8; 16] {
    let mut first = [0; 16];
    first.copy_from_slice(&blake3::hash(payload).as_bytes()[..16]);
    first
}
