//! The indexes behind one trait. Data that a router would already have (ids in the index's own type, events
//! as received) is prepared before the clock starts.

use crate::load::Stored;
use dynamo_kv_router::indexer::{SyncIndexer, WorkerTask};
use dynamo_kv_router::protocols as dynamo;
use dynamo_kv_router::{ConcurrentRadixTreeCompressed, RadixTree};
use kv_index::{ChainBlockMap, ChainIndex, ContentHash, SequenceHash, StoredBlock};
use proto::block::BlockId;
use proto::event::{KvEvent, KvEventBatch, Medium};
use proto::ids::Epoch;
use router::prefix_index::PrefixIndex;
use router::slot::Slot;
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub trait Index {
    type Query;
    type Answer;
    fn new(workers: usize) -> Self;
    /// Applies the events and returns the time.
    fn apply(&mut self, events: Vec<Stored>) -> Duration;
    fn query(blocks: &[u64]) -> Self::Query;
    /// A query that is consumed by the lookup is cloned here beforehand.
    fn find(&self, query: &mut Self::Query) -> Self::Answer;
    fn depth(answer: &Self::Answer, worker: usize) -> u32;
    /// Memory by the index's own account, in bytes.
    fn reported_bytes(&self) -> Option<u64> {
        None
    }
}

pub struct Kvasir {
    index: PrefixIndex,
    sequences: Vec<u64>,
}

/// A 128-bit id, as Kvasir's.
fn id(block: u64) -> BlockId {
    let mut id = [0; 16];
    id[..8].copy_from_slice(&block.to_le_bytes());
    id[8..].copy_from_slice(&crate::load::mix(block).to_le_bytes());
    BlockId(id)
}

const ROOT: BlockId = BlockId([0; 16]);

impl Index for Kvasir {
    type Query = Vec<BlockId>;
    type Answer = router::prefix_index::Overlap;

    fn new(workers: usize) -> Self {
        let mut index = PrefixIndex::new(16 << 30);
        index.root(ROOT);
        for slot in (0..workers).filter_map(Slot::new) {
            index.join(slot, Epoch(1));
            let no_events = KvEventBatch { epoch: Epoch(1), first_sequence: 1, events: Vec::new() };
            index.replayed(slot, Epoch(1), Some(no_events)).expect("a worker that has said nothing");
        }
        Self { index, sequences: vec![1; workers] }
    }

    fn apply(&mut self, events: Vec<Stored>) -> Duration {
        let batches: Vec<_> = events
            .into_iter()
            .map(|stored| {
                let first_sequence = self.sequences[stored.worker];
                self.sequences[stored.worker] += 1;
                let parent = stored.parent.map_or(ROOT, id);
                let units = stored.blocks.into_iter().map(id).collect();
                let events = vec![KvEvent::Stored { parent, units, medium: Medium::Device }];
                let slot = Slot::new(stored.worker).expect("a slot");
                (slot, KvEventBatch { epoch: Epoch(1), first_sequence, events })
            })
            .collect();
        let start = Instant::now();
        for (slot, batch) in batches {
            self.index.apply(slot, batch).expect("in order");
        }
        start.elapsed()
    }

    fn query(blocks: &[u64]) -> Self::Query {
        blocks.iter().map(|&block| id(block)).collect()
    }

    fn find(&self, query: &mut Self::Query) -> Self::Answer {
        self.index.lookup(query)
    }

    fn depth(answer: &Self::Answer, worker: usize) -> u32 {
        answer.units(Slot::new(worker).expect("a slot"))
    }

    fn reported_bytes(&self) -> Option<u64> {
        Some(self.index.size().bytes)
    }
}

pub struct Smg {
    index: ChainIndex,
    workers: Vec<(u32, ChainBlockMap)>,
}

impl Index for Smg {
    type Query = Vec<ContentHash>;
    type Answer = (kv_index::OverlapScores, ());

    fn new(workers: usize) -> Self {
        let index = ChainIndex::with_max_workers(workers.max(64));
        // Workers are numbered in order, so worker n gets number n.
        let worker = |n: usize| {
            let number = index.intern_worker(&format!("worker-{n:04}")).expect("room for a worker");
            assert_eq!(number as usize, n);
            (number, ChainBlockMap::new())
        };
        let workers = (0..workers).map(worker).collect();
        Self { index, workers }
    }

    fn apply(&mut self, events: Vec<Stored>) -> Duration {
        let block = |block| StoredBlock { seq_hash: SequenceHash(block), content_hash: ContentHash(block) };
        let events: Vec<_> = events
            .into_iter()
            .map(|s| {
                let blocks: Vec<StoredBlock> = s.blocks.into_iter().map(block).collect();
                (s.worker, blocks, s.parent.map(SequenceHash))
            })
            .collect();
        let start = Instant::now();
        for (worker, blocks, parent) in &events {
            let (number, map) = &mut self.workers[*worker];
            self.index.apply_stored(*number, blocks, *parent, map).expect("parents are known");
        }
        start.elapsed()
    }

    fn query(blocks: &[u64]) -> Self::Query {
        blocks.iter().map(|&block| ContentHash(block)).collect()
    }

    fn find(&self, query: &mut Self::Query) -> Self::Answer {
        (self.index.find_matches(query, false), ())
    }

    fn depth(answer: &Self::Answer, worker: usize) -> u32 {
        answer.0.scores.get(&(worker as u32)).copied().unwrap_or(0)
    }
}

fn router_event(stored: Stored) -> dynamo::RouterEvent {
    let block = |block| dynamo::KvCacheStoredBlockData {
        block_hash: dynamo::ExternalSequenceBlockHash(block),
        tokens_hash: dynamo::LocalBlockHash(block),
        mm_extra_info: None,
    };
    let data = dynamo::KvCacheEventData::Stored(dynamo::KvCacheStoreData {
        parent_hash: stored.parent.map(dynamo::ExternalSequenceBlockHash),
        start_position: None,
        blocks: stored.blocks.into_iter().map(block).collect(),
    });
    dynamo::RouterEvent::new(stored.worker as u64, dynamo::KvCacheEvent { event_id: 0, data, dp_rank: 0 })
}

fn local(blocks: &[u64]) -> Vec<dynamo::LocalBlockHash> {
    blocks.iter().map(|&block| dynamo::LocalBlockHash(block)).collect()
}

fn score(scores: &dynamo::OverlapScores, worker: usize) -> u32 {
    scores.scores.get(&dynamo::WorkerWithDpRank::new(worker as u64, 0)).copied().unwrap_or(0)
}

/// With a single writer thread, as intended by its authors.
pub struct DynamoCompressed {
    index: Arc<ConcurrentRadixTreeCompressed>,
    tasks: flume::Sender<WorkerTask>,
}

impl Index for DynamoCompressed {
    type Query = Vec<dynamo::LocalBlockHash>;
    type Answer = dynamo::OverlapScores;

    fn new(_: usize) -> Self {
        let index = Arc::new(ConcurrentRadixTreeCompressed::new());
        let (tasks, receiver) = flume::unbounded();
        let writer = Arc::clone(&index);
        std::thread::spawn(move || writer.worker(receiver, None).expect("a writer"));
        Self { index, tasks }
    }

    fn apply(&mut self, events: Vec<Stored>) -> Duration {
        let events: Vec<_> = events.into_iter().map(router_event).collect();
        let (done, wait) = tokio::sync::oneshot::channel();
        let start = Instant::now();
        for event in events {
            self.tasks.send(WorkerTask::Event(event)).expect("a writer");
        }
        self.tasks.send(WorkerTask::Flush(done)).expect("a writer");
        wait.blocking_recv().expect("an answer");
        start.elapsed()
    }

    fn query(blocks: &[u64]) -> Self::Query {
        local(blocks)
    }

    fn find(&self, query: &mut Self::Query) -> Self::Answer {
        self.index.find_matches(query, false)
    }

    fn depth(answer: &Self::Answer, worker: usize) -> u32 {
        score(answer, worker)
    }
}

pub struct DynamoRadix(RadixTree);

impl Index for DynamoRadix {
    type Query = (Vec<dynamo::LocalBlockHash>, Option<Vec<dynamo::LocalBlockHash>>);
    type Answer = dynamo::OverlapScores;

    fn new(_: usize) -> Self {
        Self(RadixTree::new())
    }

    fn apply(&mut self, events: Vec<Stored>) -> Duration {
        let events: Vec<_> = events.into_iter().map(router_event).collect();
        let start = Instant::now();
        for event in events {
            self.0.apply_event(event).expect("parents are known");
        }
        start.elapsed()
    }

    fn query(blocks: &[u64]) -> Self::Query {
        (local(blocks), Some(local(blocks)))
    }

    fn find(&self, query: &mut Self::Query) -> Self::Answer {
        // The lookup consumes the sequence; the next one is prepared outside the measured time.
        self.0.find_matches(black_box(query.1.take().unwrap_or_else(|| query.0.clone())), false)
    }

    fn depth(answer: &Self::Answer, worker: usize) -> u32 {
        score(answer, worker)
    }
}
