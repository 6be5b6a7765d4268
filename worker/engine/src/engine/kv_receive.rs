//! KV transfers from other workers. A request with a known holder of its prefix waits while the resume point
//! is fetched. The limit is the estimated time to compute it, within 1 to 10 seconds. Requests that arrive
//! meanwhile and share the prefix wait too. The received pieces are put where a computed prefix would be, and
//! the lookup hits as usual.
//!
//! If a pull ends early because its holder died or was slow, a shorter prefix or none remains, and the rest
//! is computed. A damaged pull leaves nothing.

use super::Engine;
use super::request::RequestState;
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

/// Maximum number of bytes in flight. A single transfer may exceed it.
const MAX_IN_FLIGHT_BYTES: u64 = 512 << 20;
/// Maximum number of requests that wait for one transfer. Further ones compute.
const MAX_WAITING: usize = 256;
/// Lower limit of the time that a transfer may take. Between the limits it is the estimated time to compute
/// the tokens.
const MIN_TRANSFER_TIME: Duration = Duration::from_secs(1);
/// Upper limit of the time that a transfer may take.
const MAX_TRANSFER_TIME: Duration = Duration::from_secs(10);

type Pieces = HashMap<(usize, u32), Arc<[u8]>>;

pub(super) struct KvReceiver {
    namer: Namer,
    /// Fixed time that a transfer may take; `None` derives it from the time to compute the tokens.
    time_limit: Option<Duration>,
    transfers: Vec<KvTransfer>,
}

struct KvTransfer {
    root: BlockId,
    tokens: Arc<[u32]>,
    /// The pieces of the resume point after all tokens.
    expected: HashSet<(usize, u32)>,
    /// Expected size in bytes.
    bytes: u64,
    arrived: Pieces,
    /// Bytes received and the time that they took since the holder began to send.
    travelled: Option<(u64, Duration)>,
    inbox: UnboundedReceiver<PullEvent>,
    /// The requests that wait for it.
    waiting: Vec<SeqId>,
    began: Instant,
    until: Instant,
}

/// Result of a transfer for a request, for its lookup report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TransferResult {
    /// Number of tokens received.
    Tokens(u32),
    Failed(PullFailure),
}

impl std::fmt::Display for TransferResult {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tokens(tokens) => write!(f, "transfer={tokens}"),
            Self::Failed(failure) => write!(f, "transfer={}", failure.name()),
        }
    }
}

impl KvReceiver {
    pub(super) fn new(namer: Namer) -> Self {
        Self { namer, time_limit: None, transfers: Vec::new() }
    }

    /// All requests that wait for a transfer.
    pub(super) fn waiting(&self) -> Vec<SeqId> {
        self.transfers.iter().flat_map(|transfer| &transfer.waiting).copied().collect()
    }

    /// Removes a request. Transfers that no request waits for are cancelled at once.
    pub(super) fn remove(&mut self, id: SeqId) {
        self.transfers.retain_mut(|transfer| {
            transfer.waiting.retain(|waiting| *waiting != id);
            !transfer.waiting.is_empty()
        });
    }

    fn bytes_in_flight(&self) -> u64 {
        self.transfers.iter().map(|transfer| transfer.bytes).sum()
    }
}

impl KvTransfer {
    /// Receives pieces. Returns the outcome once the transfer has ended.
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
    /// Sets a fixed time limit for every transfer, instead of the estimated computing time.
    pub fn with_transfer_time(mut self, limit: Duration) -> Self {
        self.kv_receiver.time_limit = Some(limit);
        self
    }

    /// Lets a request wait for a transfer that brings a prefix of it. Returns the request if no transfer is
    /// worth it.
    pub(super) fn schedule_or_receive(
        &mut self,
        now: Instant,
        request: SequenceRequest,
        source: Option<Box<dyn Source>>,
    ) -> Option<SequenceRequest> {
        if !self.scheduler.shares() || (source.is_none() && self.kv_receiver.transfers.is_empty()) {
            return Some(request);
        }
        let prefix = &request.prompt[..savable(request.prompt.len())];
        let arena = self.scheduler.resume_point(request.root, prefix).map_or(0, |point| point.tokens);
        let scheduler = &self.scheduler;
        let shares = |transfer: &&mut KvTransfer| {
            let common = prefix.iter().zip(&*transfer.tokens).take_while(|(a, b)| a == b).count();
            let common = (common / HASH_UNIT_TOKENS * HASH_UNIT_TOKENS) as u32;
            let gained =
                || scheduler.deepest_whole(common, |group, end| transfer.expected.contains(&(group, end)));
            transfer.root == request.root
                && transfer.waiting.len() < MAX_WAITING
                && worthwhile(arena, gained())
        };
        if let Some(transfer) = self.kv_receiver.transfers.iter_mut().find(shares) {
            transfer.waiting.push(request.id);
            self.set_state(request.id, RequestState::ReceivingKv { request, source });
            return None;
        }
        let Some(source) = source else { return Some(request) };
        let depth = prefix.len().min(source.tokens() as usize) / HASH_UNIT_TOKENS * HASH_UNIT_TOKENS;
        if !worthwhile(arena, depth as u32) {
            return Some(request);
        }
        let expected: HashSet<(usize, u32)> = self.scheduler.shape(depth as u32).collect();
        let groups = 0..self.executor.decoder().groups().len();
        let piece_bytes: Vec<usize> = groups.map(|group| self.executor.block_bytes(group)).collect();
        let of = |&(group, _): &(usize, u32)| piece_bytes.get(group).map_or(0, |bytes| *bytes as u64);
        // Pieces that are already here are also copied within the arena through memory, so they count too.
        let bytes: u64 = expected.iter().map(of).sum();
        let in_flight = self.kv_receiver.bytes_in_flight();
        if in_flight > 0 && in_flight + bytes > MAX_IN_FLIGHT_BYTES {
            self.record_transfer(request.id, TransferResult::Failed(PullFailure::Budget));
            self.metrics.transfers.failed(PullFailure::Budget);
            return Some(request);
        }
        let tokens: Arc<[u32]> = prefix[..depth].into();
        let (id, root) = (request.id, request.root);
        let prefix = (root, Arc::clone(&tokens));
        let order = PullOrder::new(&self.kv_receiver.namer, prefix, arena, piece_bytes, bytes);
        let (delivery, inbox) = PullDelivery::new();
        source.fetch(order, delivery);
        self.kv_receiver.transfers.push(KvTransfer {
            root,
            tokens,
            expected,
            bytes,
            arrived: HashMap::new(),
            travelled: None,
            inbox,
            waiting: vec![id],
            began: now,
            until: now + self.transfer_time(depth as u32 - arena),
        });
        self.set_state(id, RequestState::ReceivingKv { request, source: None });
        None
    }

    /// Time limit for a transfer of `tokens` tokens: the estimated time to compute them, within
    /// [`MIN_TRANSFER_TIME`] and [`MAX_TRANSFER_TIME`].
    fn transfer_time(&self, tokens: u32) -> Duration {
        let rate = self.rates.prefill();
        let computing = match rate > 0.0 {
            true => Duration::try_from_secs_f32(tokens as f32 / rate).unwrap_or(MAX_TRANSFER_TIME),
            false => MAX_TRANSFER_TIME,
        };
        self.kv_receiver.time_limit.unwrap_or_else(|| computing.clamp(MIN_TRANSFER_TIME, MAX_TRANSFER_TIME))
    }

    /// Schedules the requests whose transfer has ended or timed out.
    pub(super) fn finish_transfers(&mut self, now: Instant) {
        let mut ended = Vec::new();
        for mut transfer in std::mem::take(&mut self.kv_receiver.transfers) {
            let timed_out = (now >= transfer.until).then_some(Err(PullFailure::TimedOut));
            match transfer.receive().or(timed_out) {
                Some(outcome) => ended.push((transfer, outcome)),
                None => self.kv_receiver.transfers.push(transfer),
            }
        }
        for (mut transfer, outcome) in ended {
            let result = self.install_pieces(&mut transfer, outcome);
            for id in transfer.waiting {
                self.record_transfer(id, result);
                let Some(RequestState::ReceivingKv { request, source }) = self.take_state(id) else {
                    continue;
                };
                // The request's own source may have more than the transfer brought. It is not used after a
                // failed transfer, or one that the arena has no room for: then the request joins another
                // running transfer that shares its prefix, or computes.
                let source =
                    source.filter(|_| outcome.is_ok() && matches!(result, TransferResult::Tokens(_)));
                if let Some(request) = self.schedule_or_receive(now, request, source) {
                    self.schedule(request);
                }
            }
        }
    }

    /// Copies the received pieces into the arena.
    fn install_pieces(
        &mut self,
        transfer: &mut KvTransfer,
        outcome: Result<(), PullFailure>,
    ) -> TransferResult {
        let bytes: u64 = transfer.arrived.values().map(|bytes| bytes.len() as u64).sum();
        self.metrics.transfers.moved(Direction::pulled, bytes);
        // After one wrong piece no other piece of this pull is trusted.
        if outcome == Err(PullFailure::Damaged) {
            transfer.arrived.clear();
        }
        let put = self.put_pieces(transfer);
        let took = transfer.began.elapsed();
        if let Some((bytes, took)) = transfer.travelled {
            self.metrics.transfers.travelled(bytes, took);
        }
        let failure = outcome.err().or(put.is_none().then_some(PullFailure::NoRoom));
        match failure {
            None => self.metrics.transfers.succeeded(took),
            Some(failure) => {
                tracing::info!(
                    reason = failure.name(),
                    bytes,
                    ?took,
                    "a KV transfer brought less than expected"
                );
                self.metrics.transfers.failed(failure);
            }
        }
        match (put.unwrap_or(0), failure) {
            (0, Some(failure)) => TransferResult::Failed(failure),
            (tokens, _) => TransferResult::Tokens(tokens),
        }
    }

    /// The number of tokens that the arena serves in addition. `None` if it has no room.
    fn put_pieces(&mut self, transfer: &mut KvTransfer) -> Option<u32> {
        let (root, prefix) = (transfer.root, &transfer.tokens);
        let here = self.scheduler.resume_point(root, prefix);
        let arena = here.as_ref().map_or(0, |point| point.tokens);
        let here: HashMap<(usize, u32), u32> = here
            .iter()
            .flat_map(|point| &point.blocks)
            .map(|block| ((block.group, block.tokens.end), block.offset))
            .collect();
        let has =
            |group, end| transfer.arrived.contains_key(&(group, end)) || here.contains_key(&(group, end));
        let deepest = self.scheduler.deepest_whole(prefix.len() as u32, has);
        if !worthwhile(arena, deepest) {
            return Some(0);
        }
        // Copy pieces that are already here before allocating: allocation may evict these very blocks.
        let missing: Vec<(usize, u32)> =
            self.scheduler.shape(deepest).filter(|piece| !transfer.arrived.contains_key(piece)).collect();
        let block = |piece: &(usize, u32)| Some((piece.0, *here.get(piece)?));
        let Some(blocks) = missing.iter().map(block).collect::<Option<Vec<_>>>() else { return Some(0) };
        match self.executor.read_blocks(&blocks) {
            Ok(read) => transfer.arrived.extend(missing.into_iter().zip(read.into_iter().map(Arc::from))),
            Err(error) => {
                tracing::error!(%error, "cannot read blocks from the arena");
                return Some(0);
            }
        }
        let point = (root, &prefix[..deepest as usize]);
        let arrived = &transfer.arrived;
        let piece = |group, end| arrived.get(&(group, end)).cloned();
        put_back(&mut self.scheduler, &mut *self.executor, point, piece).then_some(deepest - arena)
    }

    /// Records the result of a transfer for a request.
    fn record_transfer(&mut self, id: SeqId, result: TransferResult) {
        if let Some(request) = self.requests.get_mut(&id) {
            request.transfer = Some(match (request.transfer, result) {
                (Some(TransferResult::Tokens(before)), TransferResult::Tokens(more)) => {
                    TransferResult::Tokens(before + more)
                }
                (Some(before @ TransferResult::Tokens(1..)), TransferResult::Failed(_)) => before,
                (_, last) => last,
            });
        }
    }
}
