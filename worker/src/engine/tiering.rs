//! Resume points to the tiers below the arena, and back.
//!
//! A sequence that has ended leaves copies of the resume points on its path, so many bytes per step. A request whose
//! prompt the tiers know further than the arena has that copied back before it is queued; if part of it lies in
//! files it is parked until that has been read, at most as long as the tiers' patience lasts. Then the lookup hits as
//! any other.

use super::Engine;
use super::caches::Caches;
use super::resume::savable;
use crate::kv_cache::{ResumeBlock, ResumePoint};
use crate::pieces::{PieceKey, PrefixNames};
use crate::scheduler::{Scheduler, SeqId, SequenceRequest};
use crate::telemetry::TieringCounts;
use crate::tiers::Tiers;
use proto::block::{BlockId, HASH_UNIT_TOKENS};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

/// Sequences that wait to be copied; of more, those that have waited longest are left out.
const MAX_ENDED: usize = 256;
/// Tokens that bringing a resume point back must save at least.
const LEAST_GAIN: u32 = 32;
/// It is brought back whole, so it must save this part of its tokens at least: copying a token is faster than
/// computing it, but not by any factor.
const GAIN_PART: u32 = 16;

/// The engine's side of the tiers.
#[derive(Debug)]
pub(super) struct Tiering {
    tiers: Tiers,
    ended: VecDeque<Ended>,
    parked: VecDeque<Parked>,
    counts: TieringCounts,
}

#[derive(Debug)]
struct Ended {
    root: BlockId,
    tokens: Arc<[u32]>,
    /// Its prompt ended here: there, too, others may part from it.
    prompt: usize,
    /// Its pieces from this one on, by end and group, have been dealt with.
    done: Option<(u32, usize)>,
}

/// A piece that tiers may lack.
struct MissingPiece {
    piece: (u32, usize),
    key: PieceKey,
    bytes: u64,
    place: (usize, u32),
}

#[derive(Debug)]
struct Parked {
    request: SequenceRequest,
    /// Pieces that are read, or held, for it.
    keys: Vec<PieceKey>,
    until: Instant,
}

impl Tiering {
    pub(super) fn new(tiers: Tiers) -> Self {
        Self { tiers, ended: VecDeque::new(), parked: VecDeque::new(), counts: TieringCounts::default() }
    }

    pub(super) fn tiers(&self) -> &Tiers {
        &self.tiers
    }

    pub(super) fn counts(&self) -> TieringCounts {
        self.counts
    }

    /// Requests that wait for files.
    pub(super) fn parked(&self) -> usize {
        self.parked.len()
    }
}

impl Engine {
    /// Copies out some of what has ended; whether there is more to copy at once. Called by every step, and between
    /// requests.
    pub fn copy_out(&mut self) -> bool {
        let mut left = self.copy_bytes;
        while left > 0 {
            let Some(tiering) = self.tiering.as_mut().filter(|tiering| tiering.tiers.has_room()) else {
                return false;
            };
            let Some(mut ended) = tiering.ended.pop_front() else { return false };
            let (copied, done) = self.keep(&mut ended, left);
            left = left.saturating_sub(copied);
            if let Some(tiering) = self.tiering.as_mut().filter(|_| !done) {
                tiering.ended.push_front(ended);
            }
        }
        true
    }

    /// A live sequence is about to end.
    pub(super) fn keep_ended(&mut self, id: SeqId) {
        let Some(tiering) = &mut self.tiering else { return };
        let (Some(live), Some(tokens)) = (self.live.get(&id), self.scheduler.tokens(id)) else { return };
        if tiering.ended.len() >= MAX_ENDED {
            tiering.ended.pop_front();
            tiering.counts.dropped += 1;
        }
        tiering.ended.push_back(Ended {
            root: live.root,
            tokens: tokens.into(),
            prompt: live.prompt_len,
            done: None,
        });
    }

    /// What tiers have of a live sequence's tokens is not to be used again.
    pub(super) fn forget_kept(&mut self, id: SeqId) {
        let Some(tiering) = &mut self.tiering else { return };
        let (Some(live), Some(tokens)) = (self.live.get(&id), self.scheduler.tokens(id)) else { return };
        let names = tiering.tiers.names(live.root, tokens);
        for (group, end) in self.scheduler.places(tokens.len() as u32) {
            if let Some(key) = names.piece(group, end) {
                tiering.tiers.forget(key);
            }
        }
    }

    /// Copies the resume points of a path that are in the arena and in no tier yet, but no more than about `most` bytes.
    /// Returns how many, and whether that is all.
    ///
    /// From the end of the path on, each piece once: what runs out of room, or grows old, is then its end and leaves a
    /// shorter prefix.
    fn keep(&mut self, ended: &mut Ended, most: u64) -> (u64, bool) {
        let Ended { root, tokens, .. } = &*ended;
        let pieces: BTreeMap<(u32, usize), u32> = self
            .points_to_keep(ended)
            .iter()
            .flat_map(|point| &point.blocks)
            .map(|block| ((block.tokens.end, block.group), block.offset))
            .collect();
        let Some(tiering) = &mut self.tiering else { return (0, true) };
        let names = tiering.tiers.names(*root, tokens);
        let mut caches = Caches::new(self.decoder.blocks(), self.later.as_mut());
        let to_do = pieces.into_iter().rev().filter(|(piece, _)| ended.done.is_none_or(|done| *piece < done));
        let to_do: Vec<MissingPiece> = to_do
            .filter_map(|(piece, offset)| {
                let (key, bytes) = (names.piece(piece.1, piece.0)?, caches.block_bytes(piece.1) as u64);
                Some(MissingPiece { piece, key, bytes, place: (piece.1, offset) })
            })
            .collect();
        // Read ahead, several at once: they may lie at other workers.
        let mut read = HashMap::new();
        let mut copied = 0;
        for (at, wanted) in to_do.iter().enumerate() {
            if copied >= most {
                return (copied, false);
            }
            ended.done = Some(wanted.piece);
            if !tiering.tiers.lacks(wanted.key, wanted.bytes) {
                continue;
            }
            if !read.contains_key(&wanted.key) {
                let mut left = most - copied;
                let next = to_do[at..]
                    .iter()
                    .filter(|next| next.key == wanted.key || !tiering.tiers.holds(next.key));
                let next = next.take_while(|next| {
                    let begins = left > 0;
                    left = left.saturating_sub(next.bytes);
                    begins
                });
                let (keys, places): (Vec<PieceKey>, Vec<(usize, u32)>) =
                    next.map(|next| (next.key, next.place)).unzip();
                match caches.read(&places) {
                    Ok(pieces) => read.extend(keys.into_iter().zip(pieces)),
                    Err(error) => {
                        tracing::error!(%error, "blocks cannot be read");
                        return (copied, true);
                    }
                }
            }
            if let Some(bytes) = read.remove(&wanted.key) {
                copied += bytes.len() as u64;
                tiering.tiers.put(wanted.key, bytes);
            }
        }
        (copied, true)
    }

    fn points_to_keep(&mut self, ended: &Ended) -> Vec<ResumePoint> {
        let Ended { root, tokens, prompt, .. } = ended;
        let recurrent = self.decoder.spec().is_recurrent();
        let mut points = Vec::new();
        // Without states, what lies before a resume point is one too as far as its windows are there: the last one
        // and the prompt's are enough. States are few, and each of them is a place where others may go on.
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

    /// Brings back what the tiers know of a prompt and the arena does not, then hands the request on; `None` if it
    /// waits for files.
    pub(super) fn bring_or_park(
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
            let until = now + tiering.tiers.patience();
            tiering.parked.push_back(Parked { request, keys, until });
            return None;
        }
        self.bring_back(request.root, &request.prompt);
        Some(request)
    }

    /// Queues the requests for which everything has been read, or which have waited long enough.
    pub(super) fn unpark(&mut self, now: Instant) {
        let Some(tiering) = self.tiering.as_mut().filter(|tiering| !tiering.parked.is_empty()) else {
            return;
        };
        tiering.tiers.receive();
        for Parked { request, keys, until } in std::mem::take(&mut tiering.parked) {
            let Some(tiering) = &mut self.tiering else { return };
            if !self.live.contains_key(&request.id) {
                tiering.tiers.done_with(&keys);
            } else if now < until && keys.iter().any(|key| tiering.tiers.is_loading(*key)) {
                tiering.parked.push_back(Parked { request, keys, until });
            } else {
                self.bring_back(request.root, &request.prompt);
                if let Some(tiering) = &mut self.tiering {
                    tiering.tiers.done_with(&keys);
                }
                self.enqueue(request);
            }
        }
    }

    /// Copies into the arena what is in memory of a prompt beyond what the arena has, if that is worth it.
    fn bring_back(&mut self, root: BlockId, prompt: &[u32]) {
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
        let caches = Caches::new(self.decoder.blocks(), self.later.as_mut());
        if put_back(&mut self.scheduler, caches, point, piece) {
            tiering.counts.hits += 1;
            tiering.counts.hit_tokens += u64::from(deepest - arena);
        }
    }

    /// How many tokens of a prefix the arena can serve, and how many the tiers by what `has` says.
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

/// Copies the pieces of the resume point behind `prefix` into the arena, where a lookup finds them as if they had been
/// computed; `piece` gives those of a group that end at a token. `false`: nothing has changed, since live sequences
/// hold too much, or a piece is missing.
pub(super) fn put_back(
    scheduler: &mut Scheduler,
    mut caches: Caches<'_>,
    (root, prefix): (BlockId, &[u32]),
    mut piece: impl FnMut(usize, u32) -> Option<Arc<[u8]>>,
) -> bool {
    let Some((id, point)) = scheduler.begin_restore(prefix.len() as u32) else { return false };
    let find = |block: &ResumeBlock| piece(block.group, block.tokens.end);
    // The end first, so that it is what was used the longest ago.
    let pieces: Option<Vec<Arc<[u8]>>> = point.blocks.iter().rev().map(find).collect();
    let written = pieces.is_some_and(|pieces| {
        let filled = point.blocks.iter().rev().zip(&pieces);
        let filled: Vec<(usize, u32, &[u8])> =
            filled.map(|(block, bytes)| (block.group, block.offset, &**bytes)).collect();
        let written = caches.write(&filled);
        written.inspect_err(|error| tracing::error!(%error, "blocks cannot be written")).is_ok()
    });
    scheduler.end_restore(id, written.then_some((root, prefix)))
}

/// Whether it is worth it to bring back a resume point where the arena serves `arena` tokens.
pub(super) fn worthwhile(arena: u32, deepest: u32) -> bool {
    let gain = deepest.saturating_sub(arena);
    gain >= LEAST_GAIN && gain >= deepest / GAIN_PART
}
