//! State of one fetch: which chunks are requested from which source, over which lane, and when. Sans-IO.
//!
//! A chunk is *pending* until it is requested, *requested* until its bytes have arrived, *held* until they
//! are checked and stored, and then done. Bytes that are requested or held count against the window, which
//! bounds the bytes that a crash loses. A source that sends wrong bytes gets a strike and is dropped after
//! [`STRIKES`] strikes. Chunks that a source does not have or failed to send are requested from other
//! sources.
//!
//! A *lane* is a local socket with a connection to each source. Strikes and failures belong to the source,
//! whichever lane they came over.

use model::shard::ChunkId;
use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

#[cfg(test)]
mod tests;

/// Number of chunks with wrong bytes after which a source is dropped.
pub const STRIKES: u32 = 3;
/// Pause before a chunk is requested again from a source that did not have it or sent it damaged.
const CHUNK_RETRY: Duration = Duration::from_millis(500);
/// Pause before the next request to a source that failed: the first and the longest pause. It doubles in
/// between.
const SOURCE_RETRY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// Limits of outstanding requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Maximum bytes that are requested or held; one chunk is always allowed.
    pub window: u64,
    /// Maximum bytes of a request; one chunk is always allowed.
    pub request: u64,
    pub chunks: usize,
    /// Maximum requests to a source at a time.
    pub requests: usize,
    /// Number of lanes that requests are spread over, at least one.
    pub lanes: usize,
}

/// Bytes of one request.
const REQUEST: u64 = 8 << 20;

impl Limits {
    /// Limits for this many lanes.
    ///
    /// The bandwidth-delay product of a link (200 Gbit/s times 0.2 to 1 ms) is 5 to 25 MB, less than a window
    /// of 32 MiB. But bytes count against the window until they are checked and stored. A chunk of 4 MiB
    /// takes 3 ms to arrive at the 1.4 GB/s that a CPU handles, plus time for hashing and writing, and a
    /// source reads and hashes the first chunk of a request before it sends. So each lane has two requests of
    /// 8 MiB outstanding, 12 ms of its throughput. The window has at least 32 MiB, since one lane may serve
    /// several sources.
    ///
    /// A crash costs one window. With more lanes that is more bytes but less time: 128 MiB are 12 ms of eight
    /// lanes, 32 MiB are 24 ms of one.
    pub fn of_lanes(lanes: usize) -> Self {
        let lanes = lanes.max(1);
        let window = (2 * REQUEST).saturating_mul(lanes as u64).max(32 << 20);
        Self { window, request: REQUEST, chunks: 256, requests: lanes.saturating_mul(2).max(3), lanes }
    }
}

/// Index of a source in the fetch.
pub type SourceIndex = usize;
/// Index of a chunk in the fetch.
pub type ChunkIndex = usize;

/// Identifies a request of this fetch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(u64);

/// A request to be sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScheduledRequest {
    pub id: RequestId,
    pub source: SourceIndex,
    pub lane: usize,
    /// Index, name and bytes of each chunk.
    pub chunks: Vec<(ChunkIndex, ChunkId, usize)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Pending,
    Requested,
    Held,
    Done,
}

#[derive(Debug)]
struct Chunk {
    id: ChunkId,
    bytes: usize,
    state: State,
    /// Sources from which this chunk must not be requested before the given time.
    not_from: Vec<(SourceIndex, Instant)>,
}

#[derive(Debug, Clone, Default)]
struct Source {
    strikes: u32,
    requests: usize,
    failures: u32,
    not_before: Option<Instant>,
}

impl Source {
    fn is_out(&self) -> bool {
        self.strikes >= STRIKES
    }
}

/// The chunks of a request that have not arrived.
#[derive(Debug)]
struct Request {
    source: SourceIndex,
    lane: usize,
    chunks: Vec<ChunkIndex>,
}

#[derive(Debug)]
pub struct Schedule {
    limits: Limits,
    chunks: Vec<Chunk>,
    /// Pending chunks; the front is requested first.
    pending: VecDeque<ChunkIndex>,
    sources: Vec<Source>,
    requests: HashMap<RequestId, Request>,
    /// Bytes outstanding over each lane, from all sources.
    lanes: Vec<u64>,
    next_request: u64,
    under_way: u64,
    done_bytes: u64,
    left: usize,
}

impl Schedule {
    /// A fetch of `chunks` (names and bytes) from this many sources.
    pub fn new(limits: Limits, chunks: impl IntoIterator<Item = (ChunkId, usize)>, sources: usize) -> Self {
        let chunk = |(id, bytes)| Chunk { id, bytes, state: State::Pending, not_from: Vec::new() };
        let chunks: Vec<Chunk> = chunks.into_iter().map(chunk).collect();
        let (pending, left) = ((0..chunks.len()).collect(), chunks.len());
        let sources = vec![Source::default(); sources];
        let (requests, lanes) = (HashMap::new(), vec![0; limits.lanes.max(1)]);
        let (next_request, under_way, done_bytes) = (0, 0, 0);
        Self { limits, chunks, pending, sources, requests, lanes, next_request, under_way, done_bytes, left }
    }

    /// Returns the next request to send now, if any.
    pub fn next(&mut self, now: Instant) -> Option<ScheduledRequest> {
        let mut idle: Vec<SourceIndex> =
            (0..self.sources.len()).filter(|source| self.may_request(*source, now)).collect();
        // Sources with the fewest requests first; ties go to the lowest index.
        idle.sort_by_key(|source| self.sources.get(*source).map_or(0, |source| source.requests));
        idle.into_iter().find_map(|source| self.take_request(source, now))
    }

    fn may_request(&self, source: SourceIndex, now: Instant) -> bool {
        self.sources.get(source).is_some_and(|source| {
            !source.is_out()
                && source.requests < self.limits.requests
                && source.not_before.is_none_or(|since| since <= now)
        })
    }

    fn take_request(&mut self, source: SourceIndex, now: Instant) -> Option<ScheduledRequest> {
        let (mut taken, mut bytes) = (Vec::new(), 0);
        let (chunks, limits, under_way) = (&mut self.chunks, self.limits, self.under_way);
        let mut full = false;
        self.pending.retain(|index| {
            let Some(chunk) = chunks.get_mut(*index).filter(|_| !full) else { return true };
            chunk.not_from.retain(|(_, until)| *until > now);
            if chunk.not_from.iter().any(|(other, _)| *other == source) {
                return true;
            }
            let size = chunk.bytes as u64;
            let over = bytes + size > limits.request || taken.len() >= limits.chunks;
            let beyond = under_way + bytes + size > limits.window;
            if (over && !taken.is_empty()) || (beyond && under_way + bytes > 0) {
                full = true;
                return true;
            }
            chunk.state = State::Requested;
            bytes += size;
            taken.push((*index, chunk.id, chunk.bytes));
            false
        });
        if taken.is_empty() {
            return None;
        }
        self.under_way += bytes;
        let id = RequestId(self.next_request);
        self.next_request += 1;
        let lane = self.freest_lane();
        self.load(lane, |load| load + bytes);
        let left = taken.iter().map(|(index, ..)| *index).collect();
        self.requests.insert(id, Request { source, lane, chunks: left });
        if let Some(source) = self.sources.get_mut(source) {
            source.requests += 1;
        }
        Some(ScheduledRequest { id, source, lane, chunks: taken })
    }

    /// The lane with the fewest outstanding bytes from all sources, since a lane's throughput is limited by
    /// the CPU that reads its socket. Ties go to the lowest lane, so that no lane is opened without need.
    fn freest_lane(&self) -> usize {
        self.lanes.iter().enumerate().min_by_key(|(_, bytes)| **bytes).map_or(0, |(lane, _)| lane)
    }

    fn load(&mut self, lane: usize, change: impl FnOnce(u64) -> u64) {
        if let Some(load) = self.lanes.get_mut(lane) {
            *load = change(*load);
        }
    }

    /// Records that the bytes of a chunk have arrived and are being checked.
    pub fn received(&mut self, request: RequestId, chunk: ChunkIndex) {
        if self.remove_from_request(request, chunk).is_some()
            && let Some(chunk) = self.chunks.get_mut(chunk)
        {
            chunk.state = State::Held;
        }
    }

    /// Records that a held chunk is stored.
    pub fn stored(&mut self, source: SourceIndex, chunk: ChunkIndex) {
        let Some(held) = self.chunks.get_mut(chunk).filter(|chunk| chunk.state == State::Held) else {
            return;
        };
        held.state = State::Done;
        self.under_way -= held.bytes as u64;
        self.done_bytes += held.bytes as u64;
        self.left -= 1;
        if let Some(source) = self.sources.get_mut(source) {
            source.failures = 0;
        }
    }

    /// Records that a held chunk has wrong bytes. Returns whether its source is dropped.
    pub fn damaged(&mut self, source: SourceIndex, chunk: ChunkIndex, now: Instant) -> bool {
        let others = self.others(source);
        let held = self.chunks.get(chunk).is_some_and(|chunk| chunk.state == State::Held);
        if held {
            self.requeue(chunk, others.then_some((source, now + CHUNK_RETRY)));
        }
        let Some(source) = self.sources.get_mut(source) else { return false };
        source.strikes += 1;
        source.strikes == STRIKES
    }

    /// Records that a source does not have a requested chunk.
    pub fn not_held(&mut self, request: RequestId, chunk: ChunkIndex, now: Instant) {
        if let Some(source) = self.remove_from_request(request, chunk) {
            self.requeue(chunk, Some((source, now + CHUNK_RETRY)));
        }
    }

    /// Records the end of a request. Its remaining chunks are pending again. A failed source gets no
    /// request for a while.
    pub fn ended(&mut self, request: RequestId, failed: bool, now: Instant) {
        let Some(Request { source, lane, chunks }) = self.requests.remove(&request) else { return };
        for chunk in chunks.into_iter().rev() {
            self.unload(lane, chunk);
            self.requeue(chunk, None);
        }
        let Some(source) = self.sources.get_mut(source) else { return };
        source.requests -= 1;
        if failed {
            source.not_before =
                Some(now + SOURCE_RETRY.0.saturating_mul(1 << source.failures.min(16)).min(SOURCE_RETRY.1));
            source.failures += 1;
        }
    }

    /// Removes a chunk from its request and returns the source. `None` if the chunk is no longer in it.
    fn remove_from_request(&mut self, request: RequestId, chunk: ChunkIndex) -> Option<SourceIndex> {
        let Request { source, lane, chunks } = self.requests.get_mut(&request)?;
        let position = chunks.iter().position(|other| *other == chunk)?;
        chunks.remove(position);
        let (source, lane) = (*source, *lane);
        self.unload(lane, chunk);
        Some(source)
    }

    /// Removes a chunk's bytes from the outstanding bytes of a lane.
    fn unload(&mut self, lane: usize, chunk: ChunkIndex) {
        let bytes = self.chunks.get(chunk).map_or(0, |chunk| chunk.bytes as u64);
        self.load(lane, |load| load.saturating_sub(bytes));
    }

    /// Makes a requested or held chunk pending again.
    fn requeue(&mut self, index: ChunkIndex, not_from: Option<(SourceIndex, Instant)>) {
        let Some(chunk) = self.chunks.get_mut(index) else { return };
        chunk.state = State::Pending;
        chunk.not_from.extend(not_from);
        self.under_way -= chunk.bytes as u64;
        self.pending.push_front(index);
    }

    fn others(&self, source: SourceIndex) -> bool {
        self.sources.iter().enumerate().any(|(index, other)| index != source && !other.is_out())
    }

    /// The next time at which [`Self::next`] may return a request without any event. `None` if only events
    /// can change that.
    pub fn wake(&self, now: Instant) -> Option<Instant> {
        let sources =
            self.sources.iter().filter(|source| !source.is_out()).filter_map(|source| source.not_before);
        let pending = self.pending.iter().filter_map(|index| self.chunks.get(*index));
        let chunks = pending.flat_map(|chunk| chunk.not_from.iter().map(|(_, until)| *until));
        sources.chain(chunks).filter(|at| *at > now).min()
    }

    /// Whether all chunks are stored.
    pub fn is_done(&self) -> bool {
        self.left == 0
    }

    /// Whether chunks are left and all sources are dropped.
    pub fn is_hopeless(&self) -> bool {
        !self.is_done() && self.under_way == 0 && self.sources.iter().all(Source::is_out)
    }

    /// Bytes that this fetch has stored.
    pub fn done_bytes(&self) -> u64 {
        self.done_bytes
    }
}
