//! Fetches chunks from other workers into the store, as the schedule decides.

use super::buffers::{Buffer, Buffers};
use super::schedule::{ChunkIndex, Limits, RequestId, Schedule, ScheduledRequest, SourceIndex};
use super::{Arrivals, Links, ShippingError};
use engine::telemetry::ShippingMetrics;
use model::shard::{ChunkBuffer, ChunkId, ChunkSlot, ShardStore, StoreError, StoreReservation};
use proto::shard::{ChunkRequest, ShardRequest};
use std::io;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, JoinSet};
use transport::Error;

/// Events that tasks send to the fetch.
enum Event {
    Received(RequestId, ChunkIndex),
    NotHeld(RequestId, ChunkIndex),
    Stored(SourceIndex, ChunkIndex),
    Damaged(SourceIndex, ChunkIndex),
    Failed(StoreError),
    Ended(RequestId, SourceIndex, Result<(), String>),
}

/// Fetches `chunks` (names and bytes) into the store, where `room` is reserved for them, and updates
/// `arrivals`. Retries sources without limit. Dropping the future ends the fetch; stored chunks stay.
///
/// # Errors
/// Those of the store, and [`ShippingError::NoSource`] once all sources have been dropped for wrong bytes.
pub(crate) async fn fetch(
    links: &Arc<Links>,
    store: &ShardStore,
    chunks: &[(ChunkId, usize)],
    (room, arrivals): (&StoreReservation, &Arrivals),
    metrics: &ShippingMetrics,
) -> Result<(), ShippingError> {
    let buffers = Buffers::<ChunkBuffer>::default();
    let mut schedule = Schedule::new(Limits::of_lanes(links.lanes()), chunks.iter().copied(), links.len());
    let (events, mut inbox) = mpsc::unbounded_channel();
    let mut tasks = JoinSet::new();
    let mut struck = 0;
    loop {
        while let Some(request) = schedule.next(Instant::now()) {
            let (store, buffers, arrivals) = (store.clone(), buffers.clone(), arrivals.clone());
            let job = FetchJob { links: Arc::clone(links), store, buffers, arrivals, events: events.clone() };
            let metrics = metrics.clone();
            tasks.spawn(async move { job.run(request, &metrics).await });
        }
        if schedule.is_done() {
            return Ok(());
        }
        if schedule.is_hopeless() {
            return Err(ShippingError::NoSource { sources: links.len(), struck });
        }
        let wake = schedule.wake(Instant::now());
        let event = tokio::select! {
            event = inbox.recv() => event,
            () = until(wake) => None,
        };
        while tasks.try_join_next().is_some() {}
        let now = Instant::now();
        match event {
            None => {}
            Some(Event::Received(request, chunk)) => schedule.received(request, chunk),
            Some(Event::NotHeld(request, chunk)) => schedule.not_held(request, chunk, now),
            Some(Event::Stored(source, chunk)) => {
                schedule.stored(source, chunk);
                if let Some((id, bytes)) = chunks.get(chunk) {
                    metrics.stored(*bytes as u64);
                    room.used(*bytes as u64);
                    arrivals.stored(*id);
                }
            }
            Some(Event::Damaged(source, chunk)) => {
                let name = links.name(source);
                let id = chunks.get(chunk).map(|(id, _)| id.to_string()).unwrap_or_default();
                metrics.refused(name);
                tracing::warn!(source = name, chunk = id, "refused a chunk: its bytes do not match its name");
                if schedule.damaged(source, chunk, now) {
                    struck += 1;
                    metrics.struck(name, links.node(source));
                    tracing::error!(
                        source = name,
                        "the source has sent wrong bytes too often; no more chunks are requested from it"
                    );
                }
            }
            Some(Event::Failed(error)) => return Err(error.into()),
            Some(Event::Ended(request, source, outcome)) => {
                if let Err(reason) = &outcome {
                    tracing::info!(source = links.name(source), reason, "a request for chunks failed");
                }
                schedule.ended(request, outcome.is_err(), now);
            }
        }
    }
}

/// Sleeps until `moment`; never resolves if it is `None`.
async fn until(moment: Option<Instant>) {
    match moment {
        Some(moment) => tokio::time::sleep_until(moment.into()).await,
        None => std::future::pending().await,
    }
}

struct FetchJob {
    links: Arc<Links>,
    store: ShardStore,
    buffers: Buffers<ChunkBuffer>,
    arrivals: Arrivals,
    events: mpsc::UnboundedSender<Event>,
}

impl FetchJob {
    async fn run(&self, request: ScheduledRequest, metrics: &ShippingMetrics) {
        let outcome = self.receive(&request, metrics).await;
        self.send_event(Event::Ended(request.id, request.source, outcome));
    }

    /// Sends an event. If the receiver is gone, the fetch has ended.
    fn send_event(&self, event: Event) {
        let _ = self.events.send(event);
    }

    async fn receive(&self, request: &ScheduledRequest, metrics: &ShippingMetrics) -> Result<(), String> {
        let connection = self.links.connect(request.source, request.lane).await?;
        let names = request.chunks.iter().map(|(_, id, _)| id.0).collect();
        let shard_request = ShardRequest::Chunks(ChunkRequest { names });
        let words = |error: Error| error.to_string();
        // Await both. A slot that is still being taken would look occupied to the next request for its chunk.
        let (stream, slots) = tokio::join!(connection.open_shard(&shard_request), self.slots(request));
        let (mut stream, slots) = (stream.map_err(words)?, slots.map_err(|error| error.to_string())?);
        for ((index, id, bytes), slot) in request.chunks.iter().zip(slots) {
            let mut target = self.target(slot).map_err(|error| error.to_string())?;
            match stream.next_into(*bytes, |data| target.push(data)).await.map_err(words)? {
                false => {
                    // Free the slot before the chunk is requested from another source.
                    drop(target);
                    self.send_event(Event::NotHeld(request.id, *index));
                }
                true => {
                    metrics.fetched(target.len() as u64);
                    self.send_event(Event::Received(request.id, *index));
                    self.store_chunk(request.source, *index, *id, target);
                }
            }
        }
        Ok(())
    }

    /// Allocates the slots of chunks that stay in memory, on a blocking thread. Its page faults then overlap
    /// with the source's lookup and do not delay I/O threads.
    fn slots(&self, request: &ScheduledRequest) -> JoinHandle<Vec<Option<ChunkSlot>>> {
        let arrivals = self.arrivals.clone();
        let ids: Vec<ChunkId> = request.chunks.iter().map(|(_, id, _)| *id).collect();
        tokio::task::spawn_blocking(move || ids.into_iter().map(|id| arrivals.slot(id)).collect())
    }

    fn target(&self, slot: Option<ChunkSlot>) -> io::Result<ChunkTarget> {
        if let Some(slot) = slot {
            return Ok(ChunkTarget::Tensor(slot));
        }
        let mut buffer = self.buffers.take();
        buffer.clear()?;
        Ok(ChunkTarget::Buffer(buffer))
    }

    /// Checks and stores a chunk on a blocking thread, while the network goes on.
    fn store_chunk(&self, source: SourceIndex, index: ChunkIndex, id: ChunkId, target: ChunkTarget) {
        let (store, events) = (self.store.clone(), self.events.clone());
        tokio::task::spawn_blocking(move || {
            let event = match target.store_chunk(id, &store) {
                Ok(true) => Event::Stored(source, index),
                Ok(false) => Event::Damaged(source, index),
                Err(error) => Event::Failed(error),
            };
            let _ = events.send(event);
        });
    }
}

/// Where a chunk is received.
enum ChunkTarget {
    /// Memory of its tensor, from which it is loaded.
    Tensor(ChunkSlot),
    /// A temporary buffer; the chunk is loaded from the disk.
    Buffer(Buffer<ChunkBuffer>),
}

impl ChunkTarget {
    fn push(&mut self, data: &[u8]) {
        match self {
            Self::Tensor(slot) => slot.push(data),
            Self::Buffer(buffer) => buffer.push(data),
        }
    }

    /// Stores the chunk. Returns false, and frees the slot, if its hash is wrong.
    fn store_chunk(self, id: ChunkId, store: &ShardStore) -> Result<bool, StoreError> {
        if ChunkId::of(&self) != id {
            return Ok(false);
        }
        match self {
            // The chunk will be loaded from memory, so it need not stay in the page cache.
            Self::Tensor(slot) => {
                store.put_aside(id, &slot)?;
                Ok(slot.finish())
            }
            Self::Buffer(buffer) => store.put(id, &buffer).map(|()| true),
        }
    }
}

impl Deref for ChunkTarget {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match self {
            Self::Tensor(slot) => slot,
            Self::Buffer(buffer) => buffer,
        }
    }
}
