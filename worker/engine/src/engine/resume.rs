//! Sequences and prefixes as named objects. An ended sequence can be saved, restored, forked and cut by its
//! name. A prefix can be computed ahead and pinned.
//!
//! A snapshot covers the sequence up to the deepest unit boundary before its last token, so that at most one
//! unit must be computed to continue. If the cache no longer reaches that position, the sequence is first
//! computed again as a request without output.

mod remembered;
mod saving;

use super::Engine;
use crate::images::IMAGE_ID;
use crate::kv_cache::{PinId, PinRefused, ResumePoint};
use crate::scheduler::{LogitRows, Rejected, SeqId, SequenceRequest};
pub use crate::snapshot::store::SequenceKey;
use crate::snapshot::{Origin, Snapshot};
use proto::block::{BlockId, HASH_UNIT_TOKENS};
use proto::message::TenantShare;
use proto::sequence::{PinInfo, PromptProgress, SequenceError, SequenceInfo, SequenceName};
use remembered::EndedSequences;
use saving::Saving;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// Receives the result of an operation that may have to compute first.
pub type Reply<T> = oneshot::Sender<Result<T, SequenceError>>;

/// The copied caches of a sequence. Turning it into a [`Snapshot`], which computes digests, needs no engine.
#[derive(Debug)]
pub struct Capture {
    origin: Arc<Origin>,
    tokens: Arc<[u32]>,
    position: u32,
    pieces: Vec<(u32, u32, Vec<u8>)>,
}

impl Capture {
    pub fn into_snapshot(self) -> Snapshot {
        Snapshot::new((*self.origin).clone(), self.tokens.to_vec(), self.position, self.pieces)
    }
}

/// State of named sequences and pins, apart from live requests.
#[derive(Debug)]
pub(super) struct Resume {
    origin: Arc<Origin>,
    remembered: EndedSequences,
    saving: VecDeque<Saving>,
    /// Prompts that are computed in order to be saved or pinned.
    warming: HashMap<SeqId, Warming>,
    pins: BTreeMap<u64, Pinned>,
    last_pin: u64,
}

#[derive(Debug)]
struct Warming {
    root: BlockId,
    tokens: Arc<[u32]>,
    then: Then,
}

#[derive(Debug)]
enum Then {
    Save(Reply<Capture>),
    Pin(Option<Instant>, Reply<PinInfo>),
}

#[derive(Debug)]
struct Pinned {
    root: BlockId,
    tokens: Arc<[u32]>,
    pin: PinId,
    covered: u32,
    until: Option<Instant>,
}

impl Then {
    /// Whether the receiver of the result is gone.
    fn is_closed(&self) -> bool {
        match self {
            Self::Save(reply) => reply.is_closed(),
            Self::Pin(_, reply) => reply.is_closed(),
        }
    }

    fn refuse(self, error: SequenceError) {
        // Fails only if the receiver is gone.
        match self {
            Self::Save(reply) => drop(reply.send(Err(error))),
            Self::Pin(_, reply) => drop(reply.send(Err(error))),
        }
    }
}

impl Resume {
    pub(super) fn new(origin: Origin) -> Self {
        Self {
            origin: Arc::new(origin),
            remembered: EndedSequences::default(),
            saving: VecDeque::new(),
            warming: HashMap::new(),
            pins: BTreeMap::new(),
            last_pin: 0,
        }
    }

    /// Whether a sequence is being saved, or a prompt waits to be computed.
    pub(super) fn has_work(&self) -> bool {
        !self.saving.is_empty() || !self.warming.is_empty()
    }
}

fn unknown(name: &SequenceName) -> SequenceError {
    SequenceError::Unknown { what: format!("sequence {name}") }
}

fn field(field: &str, reason: String) -> SequenceError {
    SequenceError::InvalidField { field: field.to_owned(), reason }
}

/// Number of tokens that a snapshot of `tokens` tokens covers: the full units before the last token, which is
/// always computed.
pub(super) fn savable(tokens: usize) -> usize {
    tokens.saturating_sub(1) / HASH_UNIT_TOKENS * HASH_UNIT_TOKENS
}

impl Engine {
    /// The origin that a snapshot must have to be restored here.
    pub fn origin(&self) -> Arc<Origin> {
        Arc::clone(&self.resume.origin)
    }

    /// Named sequences under `root`: first the ended ones, the least recently used first, then those that are
    /// being generated.
    pub fn sequences(&self, root: BlockId) -> Vec<SequenceInfo> {
        let ended = self.resume.remembered.iter().filter(|(key, _)| key.root == root);
        let ended = ended.map(|(key, tokens)| self.describe(key, tokens, false));
        let live = self.requests.iter().filter_map(|(id, live)| {
            let key = live.key.as_ref().filter(|key| key.root == root)?;
            Some(self.describe(key, self.scheduler.tokens(*id)?, true))
        });
        ended.chain(live).collect()
    }

    /// Copies the caches of a sequence out, some at once and the rest between steps. Computes them first if
    /// they are not all cached.
    pub fn save(&mut self, key: &SequenceKey, reply: Reply<Capture>) {
        let Some(tokens) = self.tokens_of(key) else { return drop(reply.send(Err(unknown(&key.name)))) };
        if self.reaches(key.root, &tokens[..savable(tokens.len())]) {
            return self.begin_save(key.root, tokens, reply);
        }
        self.warm(key.root, tokens, Then::Save(reply));
    }

    /// Restores a snapshot's caches and names the sequence. After an error nothing has changed.
    pub fn restore(&mut self, key: SequenceKey, snapshot: &Snapshot) -> Result<SequenceInfo, SequenceError> {
        self.not_live(&key)?;
        self.check_tokens("tokens", snapshot.tokens())?;
        let position = snapshot.position();
        let Some(prefix) = snapshot.tokens().get(..position as usize) else {
            return Err(SequenceError::NotThisSnapshot("its position is after its last token".to_owned()));
        };
        if !prefix.len().is_multiple_of(HASH_UNIT_TOKENS) {
            return Err(SequenceError::NotThisSnapshot(format!("position {position} is not a resume point")));
        }
        if !prefix.is_empty() {
            let restore = self.scheduler.begin_restore(position);
            let (id, point) = restore.ok_or(SequenceError::NoRoom { tokens: position })?;
            let written = self.write(&point, snapshot);
            let named = self.scheduler.end_restore(id, written.is_ok().then_some((key.root, prefix)));
            written?;
            if !named {
                return Err(SequenceError::Internal);
            }
        }
        // Publish first, so that the event log already has the events when the caller gets its answer.
        self.publish();
        Ok(self.remember(key, snapshot.tokens()))
    }

    /// Creates another name for a sequence at its present end.
    pub fn fork(&mut self, of: &SequenceKey, name: SequenceName) -> Result<SequenceInfo, SequenceError> {
        let tokens = self.tokens_of(of).ok_or_else(|| unknown(&of.name))?;
        let key = SequenceKey { root: of.root, name };
        self.not_live(&key)?;
        Ok(self.remember(key, &tokens))
    }

    /// Cuts a sequence to its first `keep` tokens, 0 included. Cached units after them are forgotten unless another
    /// sequence or pin shares them.
    pub fn reset(&mut self, key: &SequenceKey, keep: u32) -> Result<SequenceInfo, SequenceError> {
        self.not_live(key)?;
        let tokens = self.resume.remembered.get(key).ok_or_else(|| unknown(&key.name))?;
        let Some(prefix) = tokens.get(..keep as usize) else {
            return Err(field(
                "keep",
                format!("{keep} tokens, must be 0 to {}, the sequence's length", tokens.len()),
            ));
        };
        let info = self.remember(key.clone(), prefix);
        // A fork has no blocks of its own: compare the tokens of all named sequences.
        let shared =
            self.resume.remembered.iter().filter(|(other, _)| *other != key && other.root == key.root);
        let shared = shared.map(|(_, other)| other.iter().zip(&*tokens).take_while(|(a, b)| a == b).count());
        let keep = shared.fold(prefix.len(), usize::max);
        self.scheduler.cut(key.root, &tokens, keep as u32);
        Ok(info)
    }

    /// Removes a sequence's name. Returns `false` if the name does not exist.
    pub fn forget(&mut self, key: &SequenceKey) -> Result<bool, SequenceError> {
        self.not_live(key)?;
        Ok(self.resume.remembered.remove(key))
    }

    /// Pins the full units of a prefix, for `ttl` or without limit if it is `None`. Computes them first if
    /// they are not cached. Pinning a pinned prefix again replaces its `ttl`.
    pub fn pin(
        &mut self,
        now: Instant,
        root: BlockId,
        tokens: &[u32],
        ttl: Option<Duration>,
        reply: Reply<PinInfo>,
    ) {
        self.expire_pins(now);
        let until = ttl.and_then(|ttl| now.checked_add(ttl));
        let whole = tokens.as_chunks::<HASH_UNIT_TOKENS>().0.as_flattened();
        let checked = match whole.is_empty() {
            true => Err(field(
                "tokens",
                format!("{} tokens are fewer than one unit of {HASH_UNIT_TOKENS}", tokens.len()),
            )),
            false => self.check_tokens("tokens", whole),
        };
        if let Err(error) = checked {
            return drop(reply.send(Err(error)));
        }
        if self.reaches(root, whole) {
            let held = self.hold(now, root, whole.into(), until);
            return drop(reply.send(held));
        }
        self.warm(root, whole.into(), Then::Pin(until, reply));
    }

    /// Removes a pin. The prefix stays cached until its bytes are needed.
    pub fn unpin(&mut self, now: Instant, root: BlockId, pin: u64) -> Result<(), SequenceError> {
        self.expire_pins(now);
        let held = self.resume.pins.get(&pin).filter(|held| held.root == root);
        let Some(held) = held.map(|held| held.pin) else {
            return Err(SequenceError::Unknown { what: format!("pin {pin}") });
        };
        self.resume.pins.remove(&pin);
        self.scheduler.unpin(held);
        Ok(())
    }

    /// The part of a request's prompt that is computed; `None` if no request of this name is here.
    pub fn prompt_progress(&self, key: &SequenceKey) -> Option<PromptProgress> {
        let (id, request) = self.requests.iter().find(|(_, request)| request.key.as_ref() == Some(key))?;
        let prompt = u32::try_from(request.prompt_len).unwrap_or(u32::MAX);
        let computed = self
            .scheduler
            .info(*id)
            .map_or(0, |info| info.cached_tokens.saturating_add(info.computed_tokens));
        Some(PromptProgress { computed: computed.min(prompt), prompt })
    }

    /// Pins under `root`, the oldest first.
    pub fn pins(&mut self, now: Instant, root: BlockId) -> Vec<PinInfo> {
        self.expire_pins(now);
        let pins = self.resume.pins.iter().filter(|(_, pinned)| pinned.root == root);
        pins.map(|(pin, pinned)| self.describe_pin(now, *pin, pinned)).collect()
    }

    /// Removes pins whose time is up, and forgets those that the scheduler has dropped.
    pub(super) fn expire_pins(&mut self, now: Instant) {
        let scheduler = &mut self.scheduler;
        self.resume.pins.retain(|_, pinned| {
            let over = pinned.until.is_some_and(|until| until <= now);
            if over {
                scheduler.unpin(pinned.pin);
            }
            !over && scheduler.is_pinned(pinned.pin)
        });
    }

    /// Cancels computations whose receiver is gone.
    pub(super) fn expire_warming(&mut self) {
        let scheduler = &mut self.scheduler;
        self.resume.warming.retain(|id, warming| {
            let closed = warming.then.is_closed();
            if closed {
                scheduler.remove(*id);
            }
            !closed
        });
    }

    /// Continues after the last rows of a prompt were computed.
    pub(super) fn warmed(&mut self, now: Instant, id: SeqId) {
        let Some(Warming { root, tokens, then }) = self.resume.warming.remove(&id) else { return };
        self.scheduler.remove(id);
        // Sending fails only if the receiver is gone.
        match then {
            Then::Save(reply) => self.begin_save(root, tokens, reply),
            Then::Pin(until, reply) => drop(reply.send(self.hold(now, root, tokens, until))),
        }
    }

    /// Stores the tokens of a live request that is about to end, so that it can be named afterwards.
    pub(super) fn remember_live(&mut self, id: SeqId) {
        self.queue_for_tiers(id);
        let key = self.requests.get(&id).and_then(|live| live.key.clone());
        if let (Some(key), Some(tokens)) = (key, self.scheduler.tokens(id)) {
            self.resume.remembered.insert(key, tokens);
        }
    }

    fn remember(&mut self, key: SequenceKey, tokens: &[u32]) -> SequenceInfo {
        let info = self.describe(&key, tokens, false);
        self.resume.remembered.insert(key, tokens);
        info
    }

    fn describe(&self, key: &SequenceKey, tokens: &[u32], live: bool) -> SequenceInfo {
        let cached = self.scheduler.resume_point(key.root, &tokens[..savable(tokens.len())]);
        SequenceInfo {
            name: key.name.clone(),
            tokens: tokens.len() as u32,
            cached: cached.map_or(0, |point| point.tokens),
            live,
        }
    }

    fn live_id(&self, key: &SequenceKey) -> Option<SeqId> {
        self.requests.iter().find(|(_, live)| live.key.as_ref() == Some(key)).map(|(id, _)| *id)
    }

    fn not_live(&self, key: &SequenceKey) -> Result<(), SequenceError> {
        self.live_id(key).map_or(Ok(()), |_| Err(SequenceError::Live(key.name.clone())))
    }

    fn tokens_of(&mut self, key: &SequenceKey) -> Option<Arc<[u32]>> {
        match self.live_id(key) {
            Some(id) => self.scheduler.tokens(id).map(Into::into),
            None => self.resume.remembered.get(key),
        }
    }

    fn check_tokens(&self, name: &str, tokens: &[u32]) -> Result<(), SequenceError> {
        let vocab = self.executor.decoder().spec().vocab;
        if tokens.is_empty() || tokens.len() > self.max_model_len {
            let reason = format!("{} tokens, must be 1 to {}", tokens.len(), self.max_model_len);
            return Err(field(name, reason));
        }
        match tokens.iter().find(|token| **token as usize >= vocab) {
            Some(token) => Err(field(name, format!("token {token} is outside the vocabulary of {vocab}"))),
            None => Ok(()),
        }
    }

    /// Whether the cache serves all of these tokens, which must be whole units.
    fn reaches(&self, root: BlockId, tokens: &[u32]) -> bool {
        let point = || self.scheduler.resume_point(root, tokens);
        tokens.is_empty() || point().is_some_and(|point| point.tokens as usize == tokens.len())
    }

    /// Computes a prompt without output.
    fn warm(&mut self, root: BlockId, tokens: Arc<[u32]>, then: Then) {
        if tokens.iter().any(|token| *token >= IMAGE_ID) {
            return then
                .refuse(field("sequence", "it has images, whose rows cannot be computed again".to_owned()));
        }
        self.next_id += 1;
        let id = SeqId(self.next_id);
        let submitted = self.scheduler.submit(SequenceRequest {
            id,
            root,
            prompt: tokens.to_vec(),
            max_new_tokens: 0,
            logit_rows: LogitRows::LastOnly,
            // Keep a state at the very end too: longer prompts continue from there.
            boundaries: vec![tokens.len() as u32],
            images: None,
            tenant: TenantShare::of_root(root),
            priority: 0,
            position: None,
        });
        match submitted {
            Ok(()) => drop(self.resume.warming.insert(id, Warming { root, tokens, then })),
            Err(Rejected::QueueFull { .. }) => then.refuse(SequenceError::QueueFull),
            Err(Rejected::TooLong { need, .. }) => {
                then.refuse(SequenceError::NoRoom { tokens: need.try_into().unwrap_or(u32::MAX) });
            }
            Err(Rejected::EmptyPrompt | Rejected::Duplicate(_) | Rejected::Span { .. }) => {
                then.refuse(SequenceError::Internal)
            }
        }
    }

    /// Fills the blocks of a resume point from a snapshot.
    fn write(&mut self, point: &ResumePoint, snapshot: &Snapshot) -> Result<(), SequenceError> {
        let expected = point.blocks.iter().map(|block| (block.group as u32, block.tokens.start));
        if !expected.eq(snapshot.pieces().map(|(piece, _)| (piece.group, piece.token))) {
            let reason = "the pieces do not form a resume point of this model".to_owned();
            return Err(SequenceError::NotThisSnapshot(reason));
        }
        let pieces = point.blocks.iter().zip(snapshot.pieces());
        let pieces: Vec<(usize, u32, &[u8])> =
            pieces.map(|(block, (_, bytes))| (block.group, block.offset, bytes)).collect();
        self.executor.write_blocks(&pieces).map_err(|error| {
            tracing::error!(%error, "cannot write blocks to the arena");
            SequenceError::Internal
        })
    }

    fn hold(
        &mut self,
        now: Instant,
        root: BlockId,
        tokens: Arc<[u32]>,
        until: Option<Instant>,
    ) -> Result<PinInfo, SequenceError> {
        let existing =
            self.resume.pins.iter().find(|(_, existing)| existing.root == root && existing.tokens == tokens);
        let existing = existing.map(|(number, existing)| (*number, existing.pin, existing.covered));
        let (number, pin, covered) = match existing {
            Some(existing) => existing,
            None => {
                let (pin, covered) = self.scheduler.pin(root, &tokens).map_err(|refused| match refused {
                    PinRefused::NotCached => SequenceError::NoRoom { tokens: tokens.len() as u32 },
                    PinRefused::OverBudget { wanted, budget: limit } => {
                        SequenceError::OverBudget { what: "pinned prefixes".to_owned(), wanted, limit }
                    }
                })?;
                if (covered as usize) < tokens.len() {
                    self.scheduler.unpin(pin);
                    return Err(SequenceError::NoRoom { tokens: tokens.len() as u32 });
                }
                self.resume.last_pin += 1;
                (self.resume.last_pin, pin, covered)
            }
        };
        let pinned = Pinned { root, tokens, pin, covered, until };
        let info = self.describe_pin(now, number, &pinned);
        self.resume.pins.insert(number, pinned);
        self.publish();
        Ok(info)
    }

    fn describe_pin(&self, now: Instant, pin: u64, pinned: &Pinned) -> PinInfo {
        let left = pinned.until.map(|until| until.saturating_duration_since(now).as_millis().max(1));
        PinInfo {
            pin,
            tokens: pinned.covered,
            ttl_ms: left.map_or(0, |left| left.try_into().unwrap_or(u64::MAX)),
            pinned_bytes: self.scheduler.stats().pinned_bytes,
            budget_bytes: self.scheduler.pin_budget(),
        }
    }
}
