//! Which chunks are asked of which source, over which lane, and when: the state of one fetch, without clock and sockets.
//!
//! A chunk is *wanted* until somebody is asked for it, *asked for* until its bytes are here, *held* until they are
//! checked and on the disk, and then done. What is asked for or held counts against the window: that is what a crash
//! costs. A source that sends other bytes than a chunk's name says gets a strike, and after [`STRIKES`] is not asked any
//! more; what a source does not hold, or could not send, others are asked for.
//!
//! A *lane* is a socket of ours, with a connection to each source. It is no more than a way: strikes and failures are the
//! source's, whichever lane they came over.

use model::shard::ChunkId;
use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

#[cfg(test)]
mod tests;

/// Chunks with other bytes than their name says, until a source is not asked any more.
pub const STRIKES: u32 = 3;
/// Before a source is asked again for a chunk that it did not have, or had wrong.
const ASK_AGAIN: Duration = Duration::from_millis(500);
/// Before a source that failed is asked again: doubling from the first to the last.
const RETRY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// How much is under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes that are asked for or held, at least one chunk.
    pub window: u64,
    /// Bytes of one request, at least one chunk.
    pub request: u64,
    pub chunks: usize,
    /// Requests to one source at a time.
    pub requests: usize,
    /// Lanes that requests are spread over, at least one.
    pub lanes: usize,
}

/// Bytes of one request.
const REQUEST: u64 = 8 << 20;

impl Limits {
    /// For so many lanes.
    ///
    /// The link's own product of bandwidth and delay, 200 Gbit/s times 0.2 to 1 ms, is 5 to 25 MB, which one window of
    /// 32 MiB covers. But bytes count against it until they are checked and written: a chunk of 4 MiB takes 3 ms to come at
    /// the 1.4 GB/s that a CPU carries, some more to be hashed and written, and the source has to read and hash the first
    /// chunk of a request before it sends anything. So each lane has two requests under way, one that comes and one behind
    /// it: 16 MiB, 12 ms of what a lane carries. The least is what one lane has always had, since it may be of several
    /// sources.
    ///
    /// A crash costs one window: with more lanes more bytes, and less time, since 128 MiB are 12 ms of eight lanes and
    /// 32 MiB 24 ms of one.
    pub fn of_lanes(lanes: usize) -> Self {
        let lanes = lanes.max(1);
        let window = (2 * REQUEST).saturating_mul(lanes as u64).max(32 << 20);
        Self { window, request: REQUEST, chunks: 256, requests: lanes.saturating_mul(2).max(3), lanes }
    }
}

/// A source, by its number among those that the fetch began with.
pub type SourceIndex = usize;
/// A chunk, by its number among those that the fetch began with.
pub type ChunkIndex = usize;

/// A request that was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(u64);

/// A request to be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChunkAsk {
    pub request: RequestId,
    pub source: SourceIndex,
    pub lane: usize,
    /// For what: number, name and bytes of each chunk.
    pub chunks: Vec<(ChunkIndex, ChunkId, usize)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Wanted,
    Asked,
    Held,
    Done,
}

#[derive(Debug)]
struct Chunk {
    id: ChunkId,
    bytes: usize,
    state: State,
    /// Who is not to be asked for it before when.
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

/// What is still to come of one.
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
    /// Chunks that are wanted, the next one first.
    wanted: VecDeque<ChunkIndex>,
    sources: Vec<Source>,
    requests: HashMap<RequestId, Request>,
    /// Bytes that are asked for over each lane, of all sources.
    lanes: Vec<u64>,
    next_request: u64,
    under_way: u64,
    done_bytes: u64,
    left: usize,
}

impl Schedule {
    /// A fetch of `chunks` (names and bytes) from so many sources.
    pub fn new(limits: Limits, chunks: impl IntoIterator<Item = (ChunkId, usize)>, sources: usize) -> Self {
        let chunk = |(id, bytes)| Chunk { id, bytes, state: State::Wanted, not_from: Vec::new() };
        let chunks: Vec<Chunk> = chunks.into_iter().map(chunk).collect();
        let (wanted, left) = ((0..chunks.len()).collect(), chunks.len());
        let sources = vec![Source::default(); sources];
        let (requests, lanes) = (HashMap::new(), vec![0; limits.lanes.max(1)]);
        let (next_request, under_way, done_bytes) = (0, 0, 0);
        Self { limits, chunks, wanted, sources, requests, lanes, next_request, under_way, done_bytes, left }
    }

    /// The next request to be made now, if there is one.
    pub fn next(&mut self, now: Instant) -> Option<ChunkAsk> {
        let mut idle: Vec<SourceIndex> =
            (0..self.sources.len()).filter(|source| self.may_ask(*source, now)).collect();
        // Whoever has least to do; of equals the first.
        idle.sort_by_key(|source| self.sources.get(*source).map_or(0, |source| source.requests));
        idle.into_iter().find_map(|source| self.ask(source, now))
    }

    fn may_ask(&self, source: SourceIndex, now: Instant) -> bool {
        self.sources.get(source).is_some_and(|source| {
            !source.is_out()
                && source.requests < self.limits.requests
                && source.not_before.is_none_or(|since| since <= now)
        })
    }

    fn ask(&mut self, source: SourceIndex, now: Instant) -> Option<ChunkAsk> {
        let (mut taken, mut bytes) = (Vec::new(), 0);
        let (chunks, limits, under_way) = (&mut self.chunks, self.limits, self.under_way);
        let mut full = false;
        self.wanted.retain(|index| {
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
            chunk.state = State::Asked;
            bytes += size;
            taken.push((*index, chunk.id, chunk.bytes));
            false
        });
        if taken.is_empty() {
            return None;
        }
        self.under_way += bytes;
        let request = RequestId(self.next_request);
        self.next_request += 1;
        let lane = self.freest_lane();
        self.load(lane, |load| load + bytes);
        let left = taken.iter().map(|(index, ..)| *index).collect();
        self.requests.insert(request, Request { source, lane, chunks: left });
        if let Some(source) = self.sources.get_mut(source) {
            source.requests += 1;
        }
        Some(ChunkAsk { request, source, lane, chunks: taken })
    }

    /// The lane over which the least is to come, of whichever sources, since what a lane carries is bounded by the CPU that
    /// reads its socket; of equals the first, so that no more are opened than have something to carry.
    fn freest_lane(&self) -> usize {
        self.lanes.iter().enumerate().min_by_key(|(_, bytes)| **bytes).map_or(0, |(lane, _)| lane)
    }

    fn load(&mut self, lane: usize, change: impl FnOnce(u64) -> u64) {
        if let Some(load) = self.lanes.get_mut(lane) {
            *load = change(*load);
        }
    }

    /// The bytes of a chunk have come and are being checked.
    pub fn received(&mut self, request: RequestId, chunk: ChunkIndex) {
        if self.leave(request, chunk).is_some()
            && let Some(chunk) = self.chunks.get_mut(chunk)
        {
            chunk.state = State::Held;
        }
    }

    /// A chunk that was held is on the disk.
    pub fn kept(&mut self, source: SourceIndex, chunk: ChunkIndex) {
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

    /// A chunk that was held is not what its name says. Whether its source will not be asked any more.
    pub fn damaged(&mut self, source: SourceIndex, chunk: ChunkIndex, now: Instant) -> bool {
        let others = self.others(source);
        let held = self.chunks.get(chunk).is_some_and(|chunk| chunk.state == State::Held);
        if held {
            self.give_back(chunk, others.then_some((source, now + ASK_AGAIN)));
        }
        let Some(source) = self.sources.get_mut(source) else { return false };
        source.strikes += 1;
        source.strikes == STRIKES
    }

    /// A source does not have a chunk that it was asked for.
    pub fn not_held(&mut self, request: RequestId, chunk: ChunkIndex, now: Instant) {
        if let Some(source) = self.leave(request, chunk) {
            self.give_back(chunk, Some((source, now + ASK_AGAIN)));
        }
    }

    /// A request has ended; what has not come of it is wanted again. A source that has failed is left alone for a while.
    pub fn ended(&mut self, request: RequestId, failed: bool, now: Instant) {
        let Some(Request { source, lane, chunks }) = self.requests.remove(&request) else { return };
        for chunk in chunks.into_iter().rev() {
            self.come(lane, chunk);
            self.give_back(chunk, None);
        }
        let Some(source) = self.sources.get_mut(source) else { return };
        source.requests -= 1;
        if failed {
            source.not_before = Some(now + RETRY.0.saturating_mul(1 << source.failures.min(16)).min(RETRY.1));
            source.failures += 1;
        }
    }

    /// Takes a chunk out of its request, and says who was asked; none if it is not in it any more.
    fn leave(&mut self, request: RequestId, chunk: ChunkIndex) -> Option<SourceIndex> {
        let Request { source, lane, chunks } = self.requests.get_mut(&request)?;
        let place = chunks.iter().position(|other| *other == chunk)?;
        chunks.remove(place);
        let (source, lane) = (*source, *lane);
        self.come(lane, chunk);
        Some(source)
    }

    /// A chunk is not to come over this lane any more.
    fn come(&mut self, lane: usize, chunk: ChunkIndex) {
        let bytes = self.chunks.get(chunk).map_or(0, |chunk| chunk.bytes as u64);
        self.load(lane, |load| load.saturating_sub(bytes));
    }

    /// A chunk that was asked for, or held, is wanted again.
    fn give_back(&mut self, index: ChunkIndex, not_from: Option<(SourceIndex, Instant)>) {
        let Some(chunk) = self.chunks.get_mut(index) else { return };
        chunk.state = State::Wanted;
        chunk.not_from.extend(not_from);
        self.under_way -= chunk.bytes as u64;
        self.wanted.push_front(index);
    }

    fn others(&self, source: SourceIndex) -> bool {
        self.sources.iter().enumerate().any(|(index, other)| index != source && !other.is_out())
    }

    /// When [`Self::next`] may have something to ask for though nothing happens; none if only events can change that.
    pub fn wake(&self, now: Instant) -> Option<Instant> {
        let sources =
            self.sources.iter().filter(|source| !source.is_out()).filter_map(|source| source.not_before);
        let wanted = self.wanted.iter().filter_map(|index| self.chunks.get(*index));
        let chunks = wanted.flat_map(|chunk| chunk.not_from.iter().map(|(_, until)| *until));
        sources.chain(chunks).filter(|at| *at > now).min()
    }

    /// Everything is on the disk.
    pub fn is_done(&self) -> bool {
        self.left == 0
    }

    /// There is nobody left to ask.
    pub fn is_hopeless(&self) -> bool {
        !self.is_done() && self.under_way == 0 && self.sources.iter().all(Source::is_out)
    }

    /// Bytes on the disk by this fetch.
    pub fn done_bytes(&self) -> u64 {
        self.done_bytes
    }
}
