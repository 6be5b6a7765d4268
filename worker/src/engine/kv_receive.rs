//! KV transfers from other workers. A request with a known holder of its prefix waits while the resume point
//! is fetched, at most as long as computing it would take. Requests that arrive meanwhile and share the
//! prefix wait too. The received pieces are put where a computed prefix would be, and the lookup hits as
//! usual.
//!
//! If a pull ends early because its holder died or was slow, a shorter prefix or none remains, and the rest
//! is computed. A damaged pull leaves nothing.

use super::Engine;
use super::caches::Caches;
use super::resume::savable;
use super::tiering::{put_back, worthwhile};
use crate::pieces::Namer;
use crate::pull::{PullDelivery, PullEvent, PullFailure, PullOrder, Source};
use crate::scheduler::{SeqId, SequenceRequest};
use crate::telemetry::Direction;
use proto::block::{BlockId, HASH_UNIT_TOKENS};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::mpsc::error::TryRecvError;

/// Maximum number of bytes in flight. A single pull may exceed it.
const UNDER_WAY_BYTES: u64 = 512 << 20;
/// Maximum number of requests that wait for one pull. Further ones compute.
const MAX_WAITING: usize = 256;
/// Lower limit of the time that a pull may take. Between the limits it is the estimated time to compute the
/// tokens.
const LEAST_PATIENCE: Duration = Duration::from_secs(1);
/// Upper limit of the time that a pull may take.
const MOST_PATIENCE: Duration = Duration::from_secs(10);

type Pieces = HashMap<(usize, u32), Arc<[u8]>>;

/// The engine's side of pulls.
pub(super) struct Pulling {
    namer: Namer,
    /// Fixed time that a pull may take; `None` derives it from the time to compute the tokens.
    patience: Option<Duration>,
    pulls: Vec<Pull>,
}

struct Pull {
    root: BlockId,
    tokens: Arc<[u32]>,
    /// The pieces of the resume point after all tokens.
    wanted: HashSet<(usize, u32)>,
    /// Expected size in bytes.
    bytes: u64,
    arrived: Pieces,
    /// Bytes received and the time that they took since the holder began to send.
    travelled: Option<(u64, Duration)>,
    inbox: UnboundedReceiver<PullEvent>,
    waiting: Vec<Waiting>,
    began: Instant,
    until: Instant,
}

/// A request that waits for a pull, perhaps one of another request. It may then still pull more from its own
/// `source`.
struct Waiting {
    request: SequenceRequest,
    source: Option<Box<dyn Source>>,
}

/// Result of a pull for a request, for its lookup report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pulled {
    /// Number of tokens received.
    Tokens(u32),
    Nothing(PullFailure),
}

impl std::fmt::Display for Pulled {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tokens(tokens) => write!(f, "transfer={tokens}"),
            Self::Nothing(why) => write!(f, "transfer={}", why.name()),
        }
    }
}

impl Pulling {
    pub(super) fn new(namer: Namer) -> Self {
        Self { namer, patience: None, pulls: Vec::new() }
    }

    /// Number of requests that wait for a pull.
    pub(super) fn waiting(&self) -> usize {
        self.pulls.iter().map(|pull| pull.waiting.len()).sum()
    }

    /// Removes a request. Pulls that no request waits for are cancelled at once.
    pub(super) fn gone(&mut self, id: SeqId) {
        self.pulls.retain_mut(|pull| {
            pull.waiting.retain(|waiting| waiting.request.id != id);
            !pull.waiting.is_empty()
        });
    }

    fn under_way(&self) -> u64 {
        self.pulls.iter().map(|pull| pull.bytes).sum()
    }
}

impl Pull {
    /// Receives pieces. Returns the outcome once the pull has ended.
    fn receive(&mut self) -> Option<Result<(), PullFailure>> {
        loop {
            match self.inbox.try_recv() {
                Ok(PullEvent::Piece(group, end, bytes)) => {
                    self.arrived.insert((group, end), bytes);
                }
                Ok(PullEvent::Travelled(bytes, took)) => self.travelled = Some((bytes, took)),
                Ok(PullEvent::End(outcome)) => return Some(outcome),
                Err(TryRecvError::Empty) => return None,
                Err(TryRecvError::Disconnected) => return Some(Err(PullFailure::Lost)),
            }
        }
    }
}

impl Engine {
    /// Sets a fixed time limit for every pull, instead of the estimated computing time.
    pub fn with_pull_patience(mut self, patience: Duration) -> Self {
        self.pulling.patience = Some(patience);
        self
    }

    /// Lets the request of a live sequence wait for a pull that brings a prefix of it. Returns the request if
    /// no pull is worth it.
    pub(super) fn pull_or_compute(
        &mut self,
        now: Instant,
        request: SequenceRequest,
        source: Option<Box<dyn Source>>,
    ) -> Option<SequenceRequest> {
        if !self.scheduler.shares() || (source.is_none() && self.pulling.pulls.is_empty()) {
            return Some(request);
        }
        let prefix = &request.prompt[..savable(request.prompt.len())];
        let arena = self.scheduler.resume_point(request.root, prefix).map_or(0, |point| point.tokens);
        let scheduler = &self.scheduler;
        let shares = |pull: &&mut Pull| {
            let common = prefix.iter().zip(&*pull.tokens).take_while(|(a, b)| a == b).count();
            let common = (common / HASH_UNIT_TOKENS * HASH_UNIT_TOKENS) as u32;
            let brought =
                || scheduler.deepest_whole(common, |group, end| pull.wanted.contains(&(group, end)));
            pull.root == request.root && pull.waiting.len() < MAX_WAITING && worthwhile(arena, brought())
        };
        if let Some(pull) = self.pulling.pulls.iter_mut().find(shares) {
            pull.waiting.push(Waiting { request, source });
            return None;
        }
        let Some(source) = source else { return Some(request) };
        let depth = prefix.len().min(source.tokens() as usize) / HASH_UNIT_TOKENS * HASH_UNIT_TOKENS;
        if !worthwhile(arena, depth as u32) {
            return Some(request);
        }
        let wanted: HashSet<(usize, u32)> = self.scheduler.shape(depth as u32).collect();
        let groups = 0..self.decoder.groups().len();
        let caches = self.caches();
        let piece_bytes: Vec<usize> = groups.map(|group| caches.block_bytes(group)).collect();
        let of = |&(group, _): &(usize, u32)| piece_bytes.get(group).map_or(0, |bytes| *bytes as u64);
        // Pieces that are already here are also copied within the arena through memory, so they count too.
        let bytes: u64 = wanted.iter().map(of).sum();
        let under_way = self.pulling.under_way();
        if under_way > 0 && under_way + bytes > UNDER_WAY_BYTES {
            self.pulled(request.id, Pulled::Nothing(PullFailure::Budget));
            self.metrics.transfers.failed(PullFailure::Budget);
            return Some(request);
        }
        let tokens: Arc<[u32]> = prefix[..depth].into();
        let root = request.root;
        let order =
            PullOrder::new(&self.pulling.namer, (root, Arc::clone(&tokens)), arena, piece_bytes, bytes);
        let (delivery, inbox) = PullDelivery::new();
        source.fetch(order, delivery);
        self.pulling.pulls.push(Pull {
            root,
            tokens,
            wanted,
            bytes,
            arrived: HashMap::new(),
            travelled: None,
            inbox,
            waiting: vec![Waiting { request, source: None }],
            began: now,
            until: now + self.patience(depth as u32 - arena),
        });
        None
    }

    /// Time limit for pulling `tokens` tokens: the estimated time to compute them, within [`LEAST_PATIENCE`] and
    /// [`MOST_PATIENCE`].
    fn patience(&self, tokens: u32) -> Duration {
        let rate = self.rates.prefill();
        let computing = match rate > 0.0 {
            true => Duration::try_from_secs_f32(tokens as f32 / rate).unwrap_or(MOST_PATIENCE),
            false => MOST_PATIENCE,
        };
        self.pulling.patience.unwrap_or_else(|| computing.clamp(LEAST_PATIENCE, MOST_PATIENCE))
    }

    /// Queues the requests whose pull has ended or timed out.
    pub(super) fn end_pulls(&mut self, now: Instant) {
        let mut ended = Vec::new();
        for mut pull in std::mem::take(&mut self.pulling.pulls) {
            let late = (now >= pull.until).then_some(Err(PullFailure::Patience));
            match pull.receive().or(late) {
                Some(outcome) => ended.push((pull, outcome)),
                None => self.pulling.pulls.push(pull),
            }
        }
        for (mut pull, outcome) in ended {
            let pulled = self.install(&mut pull, outcome);
            for Waiting { request, source } in std::mem::take(&mut pull.waiting) {
                self.pulled(request.id, pulled);
                // The pull may have brought part of what another source has. After a failed pull, or one that the
                // arena has no room for, the request computes.
                let source = source.filter(|_| outcome.is_ok() && matches!(pulled, Pulled::Tokens(_)));
                if let Some(request) = self.pull_or_compute(now, request, source) {
                    self.enqueue(request);
                }
            }
        }
    }

    /// Copies the received pieces into the arena.
    fn install(&mut self, pull: &mut Pull, outcome: Result<(), PullFailure>) -> Pulled {
        let bytes: u64 = pull.arrived.values().map(|bytes| bytes.len() as u64).sum();
        self.metrics.transfers.moved(Direction::pulled, bytes);
        // After one wrong piece no other piece of this pull is trusted.
        if outcome == Err(PullFailure::Damaged) {
            pull.arrived.clear();
        }
        let put = self.put_pieces(pull);
        let took = pull.began.elapsed();
        if let Some((bytes, took)) = pull.travelled {
            self.metrics.transfers.travelled(bytes, took);
        }
        let failure = outcome.err().or(put.is_none().then_some(PullFailure::NoRoom));
        match failure {
            None => self.metrics.transfers.succeeded(took),
            Some(why) => {
                tracing::info!(reason = why.name(), bytes, ?took, "a KV transfer brought less than expected");
                self.metrics.transfers.failed(why);
            }
        }
        match (put.unwrap_or(0), failure) {
            (0, Some(why)) => Pulled::Nothing(why),
            (tokens, _) => Pulled::Tokens(tokens),
        }
    }

    /// The number of tokens that the arena serves in addition. `None` if it has no room.
    fn put_pieces(&mut self, pull: &mut Pull) -> Option<u32> {
        let (root, prefix) = (pull.root, &pull.tokens);
        let here = self.scheduler.resume_point(root, prefix);
        let arena = here.as_ref().map_or(0, |point| point.tokens);
        let here: HashMap<(usize, u32), u32> = here
            .iter()
            .flat_map(|point| &point.blocks)
            .map(|block| ((block.group, block.tokens.end), block.offset))
            .collect();
        let has = |group, end| pull.arrived.contains_key(&(group, end)) || here.contains_key(&(group, end));
        let deepest = self.scheduler.deepest_whole(prefix.len() as u32, has);
        if !worthwhile(arena, deepest) {
            return Some(0);
        }
        // Copy pieces that are already here before allocating: allocation may evict these very blocks.
        let lacking: Vec<(usize, u32)> =
            self.scheduler.shape(deepest).filter(|piece| !pull.arrived.contains_key(piece)).collect();
        let place = |piece: &(usize, u32)| Some((piece.0, *here.get(piece)?));
        let Some(places) = lacking.iter().map(place).collect::<Option<Vec<_>>>() else { return Some(0) };
        let mut caches = Caches::new(self.decoder.blocks(), self.later.as_mut());
        match caches.read(&places) {
            Ok(read) => pull.arrived.extend(lacking.into_iter().zip(read.into_iter().map(Arc::from))),
            Err(error) => {
                tracing::error!(%error, "cannot read blocks from the arena");
                return Some(0);
            }
        }
        let point = (root, &prefix[..deepest as usize]);
        let arrived = &pull.arrived;
        let piece = |group, end| arrived.get(&(group, end)).cloned();
        put_back(&mut self.scheduler, caches, point, piece).then_some(deepest - arena)
    }

    /// Records the result of a pull for a request.
    fn pulled(&mut self, id: SeqId, pulled: Pulled) {
        if let Some(live) = self.live.get_mut(&id) {
            live.pulled = Some(match (live.pulled, pulled) {
                (Some(Pulled::Tokens(before)), Pulled::Tokens(more)) => Pulled::Tokens(before + more),
                (Some(before @ Pulled::Tokens(1..)), Pulled::Nothing(_)) => before,
                (_, last) => last,
            });
        }
    }
}
