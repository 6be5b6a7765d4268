//! Moves resume points between the arena and the tiers below it.
//!
//! The resume points on the path of an ended sequence are copied to the tiers, a bounded number of bytes per
//! step. If the tiers have a longer prefix of a prompt than the arena, it is copied back before the request
//! is scheduled. If part of it is in files, the request waits until they are read, at most for the tiers' time
//! limit. Then the lookup hits as usual.

use super::Engine;
use super::request::RequestState;
use super::resume::savable;
use crate::executor::KvBlocks;
use crate::kv_cache::{ResumeBlock, ResumePoint};
use crate::pieces::{PieceKey, PrefixNames};
use crate::scheduler::{Scheduler, SeqId, SequenceRequest};
use crate::telemetry::TieringCounts;
use crate::tiers::Tiers;
use proto::block::{BlockId, HASH_UNIT_TOKENS};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

/// Maximum number of sequences that wait to be copied. The oldest is dropped when there are more.
const MAX_ENDED: usize = 256;
/// Minimum number of tokens that restoring a resume point must save.
const MIN_GAIN: u32 = 32;
/// A resume point is restored whole, so it must save at least one in this number of its tokens: copying a
/// token is faster than computing it, but not by an unlimited factor.
const GAIN_DIVISOR: u32 = 16;

/// The engine's side of the tiers.
#[derive(Debug)]
pub(super) struct Tiering {
    tiers: Tiers,
    ended: VecDeque<Ended>,
    /// Requests that wait for files, the longest waiting first.
    loading: Vec<SeqId>,
    counts: TieringCounts,
}

#[derive(Debug)]
struct Ended {
    root: BlockId,
    tokens: Arc<[u32]>,
    /// Length of the prompt: other sequences may diverge there too.
    prompt: usize,
    /// The first piece, by (end, group), from which on all pieces are done.
    done: Option<(u32, usize)>,
}

/// A piece that the tiers may lack.
struct MissingPiece {
    piece: (u32, usize),
    key: PieceKey,
    bytes: u64,
    address: (usize, u32),
}

/// A request that waits for files.
#[derive(Debug)]
pub(super) struct TierLoad {
    request: SequenceRequest,
    /// Pieces that are being read or held for it.
    keys: Vec<PieceKey>,
    until: Instant,
}

impl Tiering {
    pub(super) fn new(tiers: Tiers) -> Self {
        Self { tiers, ended: VecDeque::new(), loading: Vec::new(), counts: TieringCounts::default() }
    }

    pub(super) fn tiers(&self) -> &Tiers {
        &self.tiers
    }

    /// The requests that wait for files.
    pub(super) fn loading(&self) -> &[SeqId] {
        &self.loading
    }

    pub(super) fn counts(&self) -> TieringCounts {
        self.counts
    }
}

impl Tiering {
    /// Whether ended sequences are still to be copied.
    pub(super) fn copies(&self) -> bool {
        !self.ended.is_empty()
    }
}

impl Engine {
    /// Copies resume points of ended sequences to the tiers. Returns whether more can be copied at once.
    /// Called by every step and between requests.
    pub fn copy_out(&mut self) -> bool {
        let mut left = self.copy_bytes;
        while left > 0 {
            let Some(tiering) = self.tiering.as_mut().filter(|tiering| tiering.tiers.has_room()) else {
                return false;
            };
            let Some(mut ended) = tiering.ended.pop_front() else { return false };
            let (copied, done) = self.copy_to_tiers(&mut ended, left);
            left = left.saturating_sub(copied);
            if let Some(tiering) = self.tiering.as_mut().filter(|_| !done) {
                tiering.ended.push_front(ended);
            }
        }
        true
    }

    /// Queues the path of a live sequence that is about to end to be copied to the tiers.
    pub(super) fn queue_for_tiers(&mut self, id: SeqId) {
        let Some(tiering) = &mut self.tiering else { return };
        let (Some(request), Some(tokens)) = (self.requests.get(&id), self.scheduler.tokens(id)) else {
            return;
        };
        if tiering.ended.len() >= MAX_ENDED {
            tiering.ended.pop_front();
            tiering.counts.dropped += 1;
        }
        tiering.ended.push_back(Ended {
            root: request.root,
            tokens: tokens.into(),
            prompt: request.prompt_len,
            done: None,
        });
    }

    /// Removes the tiers' pieces of a live sequence's tokens.
    pub(super) fn forget_stored(&mut self, id: SeqId) {
        let Some(tiering) = &mut self.tiering else { return };
        let (Some(request), Some(tokens)) = (self.requests.get(&id), self.scheduler.tokens(id)) else {
            return;
        };
        let names = tiering.tiers.names(request.root, tokens);
        for (group, end) in self.scheduler.possible_pieces(tokens.len() as u32) {
            if let Some(key) = names.piece(group, end) {
                tiering.tiers.forget(key);
            }
        }
    }

    /// Copies the resume points of a path that are in the arena and in no tier, about `max_bytes` at most.
    /// Returns the number of bytes, and whether all are copied.
    ///
    /// Copies each piece once, from the end of the path on: when room runs out, or pieces age, the end is
    /// lost first and a shorter prefix remains.
    fn copy_to_tiers(&mut self, ended: &mut Ended, max_bytes: u64) -> (u64, bool) {
        let Ended { root, tokens, .. } = &*ended;
        let pieces: BTreeMap<(u32, usize), u32> = self
            .points_to_store(ended)
            .iter()
            .flat_map(|point| &point.blocks)
            .map(|block| ((block.tokens.end, block.group), block.offset))
            .collect();
        let Some(tiering) = &mut self.tiering else { return (0, true) };
        let names = tiering.tiers.names(*root, tokens);
        let blocks = &mut *self.executor;
        let to_do = pieces.into_iter().rev().filter(|(piece, _)| ended.done.is_none_or(|done| *piece < done));
        let to_do: Vec<MissingPiece> = to_do
            .filter_map(|(piece, offset)| {
                let (key, bytes) = (names.piece(piece.1, piece.0)?, blocks.block_bytes(piece.1) as u64);
                Some(MissingPiece { piece, key, bytes, address: (piece.1, offset) })
            })
            .collect();
        // Read several pieces ahead at once: they may be at other workers.
        let mut read = HashMap::new();
        let mut copied = 0;
        for (at, missing) in to_do.iter().enumerate() {
            if copied >= max_bytes {
                return (copied, false);
            }
            ended.done = Some(missing.piece);
            if !tiering.tiers.lacks(missing.key, missing.bytes) {
                continue;
            }
            if !read.contains_key(&missing.key) {
                let mut left = max_bytes - copied;
                let next = to_do[at..]
                    .iter()
                    .filter(|next| next.key == missing.key || !tiering.tiers.holds(next.key));
                let next = next.take_while(|next| {
                    let begins = left > 0;
                    left = left.saturating_sub(next.bytes);
                    begins
                });
                let (keys, addresses): (Vec<PieceKey>, Vec<(usize, u32)>) =
                    next.map(|next| (next.key, next.address)).unzip();
                match blocks.read_blocks(&addresses) {
                    Ok(pieces) => read.extend(keys.into_iter().zip(pieces)),
                    Err(error) => {
                        tracing::error!(%error, "cannot read blocks from the arena");
                        return (copied, true);
                    }
                }
            }
            if let Some(bytes) = read.remove(&missing.key) {
                copied += bytes.len() as u64;
                tiering.tiers.put(missing.key, bytes);
            }
        }
        (copied, true)
    }

    fn points_to_store(&mut self, ended: &Ended) -> Vec<ResumePoint> {
        let Ended { root, tokens, prompt, .. } = ended;
        let recurrent = self.executor.decoder().spec().is_recurrent();
        let mut points = Vec::new();
        // Without states, every shorter prefix is also a resume point as far as its windows are cached, so
        // the last resume point and the prompt's are enough. States are few, and other sequences may continue
        // at each of them.
        let mut next = Some(tokens.len());
        while let Some(end) = next {
            let Some(point) = self.scheduler.resume_point(*root, &tokens[..end]) else { break };
            next = match recurrent {
                true => (point.tokens as usize).checked_sub(HASH_UNIT_TOKENS),
                false => Some(savable(*prompt)).filter(|prompt| *prompt < end),
            };
            points.push(point);
        }
        points
    }

    /// Copies back the part of a prompt's prefix that the tiers have and the arena lacks, then returns the
    /// request. `None` if the request waits for files.
    pub(super) fn restore_or_load(
        &mut self,
        now: Instant,
        request: SequenceRequest,
    ) -> Option<SequenceRequest> {
        let Some(tiering) = &mut self.tiering else { return Some(request) };
        tiering.tiers.receive();
        let prefix = &request.prompt[..savable(request.prompt.len())];
        let names = tiering.tiers.names(request.root, prefix);
        let (arena, deepest) = self.depths(request.root, prefix, &names, Tiers::holds);
        let Some(tiering) = self.tiering.as_mut().filter(|_| worthwhile(arena, deepest)) else {
            return Some(request);
        };
        let keys = self.scheduler.shape(deepest).filter_map(|(group, end)| names.piece(group, end));
        let keys: Vec<PieceKey> = keys.collect();
        if keys.iter().any(|key| !tiering.tiers.is_here(*key)) && tiering.tiers.load(&keys) {
            let until = now + tiering.tiers.load_timeout();
            let id = request.id;
            tiering.loading.push(id);
            self.set_state(id, RequestState::LoadingTier(TierLoad { request, keys, until }));
            return None;
        }
        self.restore_from_tiers(request.root, &request.prompt);
        Some(request)
    }

    /// Schedules the requests whose files were read or whose time is up.
    pub(super) fn finish_tier_loads(&mut self, now: Instant) {
        let Some(tiering) = self.tiering.as_mut().filter(|tiering| !tiering.loading.is_empty()) else {
            return;
        };
        tiering.tiers.receive();
        for id in std::mem::take(&mut tiering.loading) {
            let Some(RequestState::LoadingTier(load)) = self.take_state(id) else { continue };
            let Some(tiering) = &mut self.tiering else { return };
            if now < load.until && load.keys.iter().any(|key| tiering.tiers.is_loading(*key)) {
                tiering.loading.push(id);
                self.set_state(id, RequestState::LoadingTier(load));
                continue;
            }
            self.restore_from_tiers(load.request.root, &load.request.prompt);
            self.drop_tier_load(id, &load);
            self.schedule(load.request);
        }
    }

    /// Releases the pieces that are being read or held for a request.
    pub(super) fn drop_tier_load(&mut self, id: SeqId, load: &TierLoad) {
        if let Some(tiering) = &mut self.tiering {
            tiering.loading.retain(|loading| *loading != id);
            tiering.tiers.done_with(&load.keys);
        }
    }

    /// Copies into the arena the part of a prompt's prefix that host memory has and the arena lacks, if that
    /// is worth it.
    fn restore_from_tiers(&mut self, root: BlockId, prompt: &[u32]) {
        let prefix = &prompt[..savable(prompt.len())];
        let Some(names) = self.tiering.as_ref().map(|tiering| tiering.tiers.names(root, prefix)) else {
            return;
        };
        let (arena, deepest) = self.depths(root, prefix, &names, Tiers::is_here);
        if !worthwhile(arena, deepest) {
            return;
        }
        let Some(tiering) = &mut self.tiering else { return };
        let point = (root, &prefix[..deepest as usize]);
        let piece = |group, end| tiering.tiers.get(names.piece(group, end)?);
        if put_back(&mut self.scheduler, &mut *self.executor, point, piece) {
            tiering.counts.hits += 1;
            tiering.counts.hit_tokens += u64::from(deepest - arena);
        }
    }

    /// The number of tokens of a prefix that the arena can serve, and that the tiers can serve according to
    /// `has`.
    fn depths(
        &self,
        root: BlockId,
        prefix: &[u32],
        names: &PrefixNames,
        has: impl Fn(&Tiers, PieceKey) -> bool,
    ) -> (u32, u32) {
        let Some(tiering) = &self.tiering else { return (0, 0) };
        let deepest = self.scheduler.deepest_whole(prefix.len() as u32, |group, end| {
            names.piece(group, end).is_some_and(|key| has(&tiering.tiers, key))
        });
        match deepest {
            0 => (0, 0),
            _ => (self.scheduler.resume_point(root, prefix).map_or(0, |point| point.tokens), deepest),
        }
    }
}

/// Copies the pieces of the resume point after `prefix` into the arena, where a lookup finds them as if they
/// had been computed. `piece` returns the piece of a group that ends at a token. On `false` nothing has
/// changed: live sequences hold too much, or a piece is missing.
pub(super) fn put_back(
    scheduler: &mut Scheduler,
    blocks: &mut dyn KvBlocks,
    (root, prefix): (BlockId, &[u32]),
    mut piece: impl FnMut(usize, u32) -> Option<Arc<[u8]>>,
) -> bool {
    let Some((id, point)) = scheduler.begin_restore(prefix.len() as u32) else { return false };
    let find = |block: &ResumeBlock| piece(block.group, block.tokens.end);
    // The end first, so that it counts as least recently used.
    let pieces: Option<Vec<Arc<[u8]>>> = point.blocks.iter().rev().map(find).collect();
    let written = pieces.is_some_and(|pieces| {
        let filled = point.blocks.iter().rev().zip(&pieces);
        let filled: Vec<(usize, u32, &[u8])> =
            filled.map(|(block, bytes)| (block.group, block.offset, &**bytes)).collect();
        let written = blocks.write_blocks(&filled);
        written.inspect_err(|error| tracing::error!(%error, "cannot write blocks to the arena")).is_ok()
    });
    scheduler.end_restore(id, written.then_some((root, prefix)))
}

/// Whether restoring a resume point of `deepest` tokens is worth it if the arena serves `arena` tokens.
pub(super) fn worthwhile(arena: u32, deepest: u32) -> bool {
    let gain = deepest.saturating_sub(arena);
    gain >= MIN_GAIN && gain >= deepest / GAIN_DIVISOR
}
