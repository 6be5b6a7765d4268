//! Moves chunks from other workers into the store, as the schedule says.

use super::buffers::{Buffer, Buffers};
use super::schedule::{ChunkAsk, ChunkIndex, Limits, RequestId, Schedule, SourceIndex};
use super::{Arrivals, Links, ShippingError};
use crate::telemetry::ShippingMetrics;
use model::shard::{ChunkBuffer, ChunkId, ChunkSlot, ShardStore, StoreError, StoreReservation};
use proto::Error;
use proto::shard::{ChunkRequest, ShardRequest};
use std::io;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, JoinSet};

/// What tasks tell the fetch.
enum Event {
    Received(RequestId, ChunkIndex),
    NotHeld(RequestId, ChunkIndex),
    Kept(SourceIndex, ChunkIndex),
    Damaged(SourceIndex, ChunkIndex),
    Failed(StoreError),
    Ended(RequestId, SourceIndex, Result<(), String>),
}

/// Fetches `chunks` (names and bytes) into the store, where there is `room` for them, and tells `arrivals`. Waits for
/// sources that do not answer as long as it takes; dropping the future ends it, and what has been kept stays.
///
/// # Errors
/// The store's, and [`ShippingError::NoSource`] once no source is left that can be believed.
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
        while let Some(ask) = schedule.next(Instant::now()) {
            let (store, buffers, arrivals) = (store.clone(), buffers.clone(), arrivals.clone());
            let job = FetchJob { links: Arc::clone(links), store, buffers, arrivals, events: events.clone() };
            let metrics = metrics.clone();
            tasks.spawn(async move { job.run(ask, &metrics).await });
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
            Some(Event::Kept(source, chunk)) => {
                schedule.kept(source, chunk);
                if let Some((id, bytes)) = chunks.get(chunk) {
                    metrics.kept(*bytes as u64);
                    room.used(*bytes as u64);
                    arrivals.kept(*id);
                }
            }
            Some(Event::Damaged(source, chunk)) => {
                let name = links.name(source);
                let id = chunks.get(chunk).map(|(id, _)| id.to_string()).unwrap_or_default();
                metrics.refused(name);
                tracing::warn!(
                    source = name,
                    chunk = id,
                    "a chunk with other bytes than its name says is refused"
                );
                if schedule.damaged(source, chunk, now) {
                    struck += 1;
                    metrics.struck(name, links.node(source));
                    tracing::error!(
                        source = name,
                        "it has sent wrong bytes too often and is not asked any more"
                    );
                }
            }
            Some(Event::Failed(error)) => return Err(error.into()),
            Some(Event::Ended(request, source, outcome)) => {
                if let Err(reason) = &outcome {
                    tracing::info!(source = links.name(source), reason, "a request for chunks has failed");
                }
                schedule.ended(request, outcome.is_err(), now);
            }
        }
    }
}

/// Resolves then; never if there is no such moment.
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
    async fn run(&self, ask: ChunkAsk, metrics: &ShippingMetrics) {
        let outcome = self.receive(&ask, metrics).await;
        self.tell(Event::Ended(ask.request, ask.source, outcome));
    }

    /// Whoever does not listen any more does not need to know.
    fn tell(&self, event: Event) {
        let _ = self.events.send(event);
    }

    async fn receive(&self, ask: &ChunkAsk, metrics: &ShippingMetrics) -> Result<(), String> {
        let connection = self.links.connect(ask.source, ask.lane).await?;
        let names = ask.chunks.iter().map(|(_, id, _)| id.0).collect();
        let request = ShardRequest::Chunks(ChunkRequest { names });
        let words = |error: Error| error.to_string();
        // Both to their end: a slot that is still being taken when others are asked would be missing to them.
        let (stream, slots) = tokio::join!(connection.open_shard(&request), self.slots(ask));
        let (mut stream, slots) = (stream.map_err(words)?, slots.map_err(|error| error.to_string())?);
        for ((index, id, bytes), slot) in ask.chunks.iter().zip(slots) {
            let mut place = self.place(slot).map_err(|error| error.to_string())?;
            match stream.next_into(*bytes, |part| place.push(part)).await.map_err(words)? {
                false => {
                    // Before anybody else is asked, who needs it.
                    drop(place);
                    self.tell(Event::NotHeld(ask.request, *index));
                }
                true => {
                    metrics.fetched(place.len() as u64);
                    self.tell(Event::Received(ask.request, *index));
                    self.keep(ask.source, *index, *id, place);
                }
            }
        }
        Ok(())
    }

    /// Where chunks go that stay in memory. Their pages are made while the source looks for them, and not by a thread that
    /// moves bytes.
    fn slots(&self, ask: &ChunkAsk) -> JoinHandle<Vec<Option<ChunkSlot>>> {
        let arrivals = self.arrivals.clone();
        let ids: Vec<ChunkId> = ask.chunks.iter().map(|(_, id, _)| *id).collect();
        tokio::task::spawn_blocking(move || ids.into_iter().map(|id| arrivals.slot(id)).collect())
    }

    fn place(&self, slot: Option<ChunkSlot>) -> io::Result<ChunkTarget> {
        if let Some(slot) = slot {
            return Ok(ChunkTarget::Tensor(slot));
        }
        let mut buffer = self.buffers.take();
        buffer.clear()?;
        Ok(ChunkTarget::Buffer(buffer))
    }

    /// Checks a chunk and writes it, beside the network.
    fn keep(&self, source: SourceIndex, index: ChunkIndex, id: ChunkId, place: ChunkTarget) {
        let (store, events) = (self.store.clone(), self.events.clone());
        tokio::task::spawn_blocking(move || {
            let event = match place.keep(id, &store) {
                Ok(true) => Event::Kept(source, index),
                Ok(false) => Event::Damaged(source, index),
                Err(error) => Event::Failed(error),
            };
            let _ = events.send(event);
        });
    }
}

/// Where a chunk is received.
enum ChunkTarget {
    /// It stays there, and is loaded from there.
    Tensor(ChunkSlot),
    /// It is loaded from the disk.
    Buffer(Buffer<ChunkBuffer>),
}

impl ChunkTarget {
    fn push(&mut self, part: &[u8]) {
        match self {
            Self::Tensor(slot) => slot.push(part),
            Self::Buffer(buffer) => buffer.push(part),
        }
    }

    /// Writes what is there; not, and the place is free again, if it is not as its name says.
    fn keep(self, id: ChunkId, store: &ShardStore) -> Result<bool, StoreError> {
        if ChunkId::of(&self) != id {
            return Ok(false);
        }
        match self {
            // Nobody reads it from the disk soon.
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
