//! The driver: one thread that owns a [`Core`] and its disk, ticks it by the monotonic clock, and serves
//! requests through a [`Handle`].
//!
//! Guarantees: a change is answered only after it is committed, and no request waits past its deadline. A
//! failed write is fatal: the thread reports it and does nothing else.

mod room;
mod waiting;

#[cfg(test)]
mod tests;

use super::core::{Core, CoreError, Outbound, ProposeError, RaftRole, Settings, Status};
use super::error::ConsensusError;
use super::message::Frame;
use super::storage::{Loaded, Storage, StorageError};
use super::table::{Change, ClientId, Entry, OpenSession, Outcome, Request, SessionChange, Table};
use super::telemetry::RaftMetrics;
use proto::ids::NodeId;
use room::DiskSpace;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::{oneshot, watch};
use waiting::Waiting;

/// Maximum of queued events. Beyond it, frames are dropped and requests refused.
const MAX_EVENTS: usize = 4096;

/// Sends frames. A frame may be lost; sending must not block.
pub trait Network: Send + 'static {
    /// Sends a frame, or drops it.
    fn send(&self, outbound: Outbound);
}

/// Why the thread ended. The process must end too, and restart from its disk.
#[derive(Debug, thiserror::Error)]
pub enum Fatal {
    /// The disk failed; its content is unknown.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// The core cannot continue.
    #[error(transparent)]
    Core(#[from] CoreError),
}

type Reply<T> = oneshot::Sender<Result<T, ConsensusError>>;

enum Event {
    Frame(NodeId, Box<Frame>),
    Propose {
        request: Request,
        entry: Box<Entry>,
        deadline: Instant,
        reply: Reply<Outcome>,
    },
    Read {
        deadline: Instant,
        reply: Reply<Arc<Table>>,
    },
    HandOver {
        to: Option<NodeId>,
        reply: Reply<()>,
    },
    /// Transfer leadership if leader, then end, at the deadline at the latest.
    Stop {
        deadline: Instant,
    },
}

/// Owns the thread.
#[derive(Debug)]
pub struct Driver {
    handle: Handle,
    thread: JoinHandle<()>,
}

/// A client of the thread. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Handle {
    events: SyncSender<Event>,
    table: watch::Receiver<Arc<Table>>,
    status: watch::Receiver<Status>,
}

/// Called once after a fatal error; [`abort`] in production.
pub type OnFatal = Box<dyn FnOnce(Fatal) + Send>;

/// Ends the process without unwinding and without further writes: unsynced state must not be used.
pub fn abort(fatal: Fatal) {
    tracing::error!(error = %fatal, "Raft cannot continue; the process ends");
    proto::log::flush();
    std::process::abort();
}

impl Driver {
    /// Starts the thread on the loaded state. `tick` is the duration of one tick of [`Settings`].
    pub fn start(
        settings: Settings,
        tick: Duration,
        loaded: Loaded,
        disk: Box<dyn Storage + Send>,
        network: impl Network,
        metrics: RaftMetrics,
        on_fatal: OnFatal,
    ) -> Result<Self, CoreError> {
        let core = Core::start(settings, loaded, random_u64())?;
        let (events, inbox) = sync_channel(MAX_EVENTS);
        let (table_out, table) = watch::channel(Arc::clone(core.table()));
        let (status_out, status) = watch::channel(core.status());
        let waiting = Waiting::new(metrics.clone());
        let room = DiskSpace::new(disk);
        let mut edge = Edge { core, room, network, waiting, table: table_out, status: status_out, metrics };
        let thread = std::thread::spawn(move || {
            if let Err(fatal) = edge.run(&inbox, tick) {
                on_fatal(fatal);
            }
        });
        Ok(Self { handle: Handle { events, table, status }, thread })
    }

    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Transfers leadership if leader, answers waiting requests, and ends the thread within `grace`. Blocks.
    pub fn stop(self, grace: Duration) {
        let deadline = Instant::now() + grace;
        // If the thread has already ended, the send fails.
        let _ended = self.handle.events.send(Event::Stop { deadline });
        if self.thread.join().is_err() {
            tracing::error!("the consensus thread panicked");
        }
    }
}

/// A random number, not for keys: the hash of nothing under a key that changes with every call.
fn random_u64() -> u64 {
    RandomState::new().hash_one(())
}

impl Handle {
    /// Opens a session for changes. Each change of a session is applied at most once.
    pub async fn open_session(&self, deadline: Instant) -> Result<ClientId, ConsensusError> {
        let nonce = random_u64();
        let entry = Entry::OpenSession(OpenSession { nonce });
        match self.send_and_wait(Request::Open(nonce), entry, deadline).await? {
            Outcome::Opened(client) => Ok(client),
            Outcome::Done => Err(ConsensusError::NoQuorum),
            Outcome::Refused(refusal) => Err(ProposeError::Refused(refusal).into()),
        }
    }

    /// Makes a change and waits until it is committed and applied here. `seq` must increase with each change
    /// of a session. After [`ConsensusError::NoQuorum`] the same change may be sent again with the same
    /// number, to any coordinator.
    pub async fn propose(
        &self,
        change: Change,
        client: ClientId,
        seq: u64,
        deadline: Instant,
    ) -> Result<Outcome, ConsensusError> {
        let entry = Entry::Change(SessionChange { client, seq, change });
        self.send_and_wait(Request::Change(client, seq), entry, deadline).await
    }

    /// Linearizable read: a table with every change that any coordinator acknowledged before this call.
    pub async fn read(&self, deadline: Instant) -> Result<Arc<Table>, ConsensusError> {
        let (reply, answer) = oneshot::channel();
        self.send_event(Event::Read { deadline, reply })?;
        answer.await.map_err(|_| ConsensusError::Stopped)?
    }

    /// Starts a leadership transfer to `to`, or to the most up-to-date voter.
    pub async fn hand_over(&self, to: Option<NodeId>) -> Result<(), ConsensusError> {
        let (reply, answer) = oneshot::channel();
        self.send_event(Event::HandOver { to, reply })?;
        answer.await.map_err(|_| ConsensusError::Stopped)?
    }

    /// Takes a frame from `peer`, as authenticated by its certificate. The frame is dropped if the event
    /// queue is full.
    pub fn receive(&self, peer: NodeId, frame: Frame) {
        let _lost = self.events.try_send(Event::Frame(peer, Box::new(frame)));
    }

    /// The local table, which may lag behind.
    pub fn table(&self) -> watch::Receiver<Arc<Table>> {
        self.table.clone()
    }

    pub fn status(&self) -> Status {
        self.status.borrow().clone()
    }

    /// The status as a watch channel.
    pub fn statuses(&self) -> watch::Receiver<Status> {
        self.status.clone()
    }

    async fn send_and_wait(
        &self,
        request: Request,
        entry: Entry,
        deadline: Instant,
    ) -> Result<Outcome, ConsensusError> {
        let (reply, answer) = oneshot::channel();
        self.send_event(Event::Propose { request, entry: Box::new(entry), deadline, reply })?;
        answer.await.map_err(|_| ConsensusError::Stopped)?
    }

    fn send_event(&self, event: Event) -> Result<(), ConsensusError> {
        self.events.try_send(event).map_err(|error| match error {
            TrySendError::Full(_) => ConsensusError::Overloaded,
            TrySendError::Disconnected(_) => ConsensusError::Stopped,
        })
    }
}

struct Edge<N> {
    core: Core,
    room: DiskSpace,
    network: N,
    waiting: Waiting,
    table: watch::Sender<Arc<Table>>,
    status: watch::Sender<Status>,
    metrics: RaftMetrics,
}

impl<N: Network> Edge<N> {
    fn run(&mut self, inbox: &Receiver<Event>, tick: Duration) -> Result<(), Fatal> {
        let mut next = Instant::now() + tick;
        let mut stop = None;
        if !self.work(inbox)? {
            return Ok(());
        }
        loop {
            let now = Instant::now();
            if now >= next {
                // After a pause of the process, skip the missed ticks: they would only make this member
                // suspect the others.
                next = now + tick;
                self.core.tick();
                self.waiting.tick(now, &mut self.core);
                self.room.tick()?;
                self.core.hold_back(!self.room.is_enough());
                self.metrics.holds(&self.core.vitals());
                self.metrics.has_room(self.room.is_enough());
            }
            match inbox.recv_timeout(next.saturating_duration_since(now)) {
                Ok(event) => {
                    stop = self.take(event).or(stop);
                    // Events that are already queued share one write.
                    while let Ok(event) = inbox.try_recv() {
                        stop = self.take(event).or(stop);
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
            if !self.work(inbox)? {
                return Ok(());
            }
            let leads = self.core.status().role == RaftRole::Leader && self.core.table().seats().count() > 1;
            if stop.is_some_and(|deadline| !leads || Instant::now() >= deadline) {
                return Ok(());
            }
        }
    }

    /// Handles an event. Returns the deadline of a stop event.
    fn take(&mut self, event: Event) -> Option<Instant> {
        match event {
            Event::Frame(peer, frame) => {
                if let Err(error) = self.core.receive(&peer, *frame) {
                    tracing::warn!(%error, "a frame of another coordinator was rejected");
                }
            }
            Event::Propose { request, entry, deadline, reply } => {
                self.waiting.propose(&mut self.core, request, entry, deadline, reply);
            }
            Event::Read { deadline, reply } => self.waiting.read(&mut self.core, deadline, reply),
            Event::HandOver { to, reply } => {
                let started = self.core.transfer_leadership(to.as_ref()).map_err(ConsensusError::from);
                let _closed = reply.send(started);
            }
            Event::Stop { deadline } => {
                let _not_leader = self.core.transfer_leadership(None);
                return Some(deadline);
            }
        }
        None
    }

    /// Executes all pending work. Returns `false` if the driver was stopped while it waited for disk space.
    fn work(&mut self, inbox: &Receiver<Event>) -> Result<bool, Fatal> {
        while let Some(mut batch) = self.core.batch()? {
            batch.early().into_iter().for_each(|outbound| self.network.send(outbound));
            if !batch.write().is_empty() {
                let began = Instant::now();
                while !self.room.write(batch.write())? {
                    self.metrics.has_room(false);
                    show_as_follower(&self.status);
                    if !self.waiting.without_room(inbox) {
                        return Ok(false);
                    }
                }
                self.metrics.wrote(began.elapsed());
            }
            let done = batch.persisted()?;
            done.send.into_iter().for_each(|outbound| self.network.send(outbound));
            // Before the answers: an answered client must see a table with its change.
            publish(&self.table, self.core.table());
            self.waiting.answered(&done.answers);
            self.waiting.read_done(&done.reads, self.core.table());
        }
        let status = self.core.status();
        self.status.send_if_modified(|shown| {
            if shown.role != status.role || shown.term != status.term {
                tracing::info!(role = ?status.role, term = status.term, "the role or term of this coordinator changed");
            }
            self.metrics.update(shown, &status);
            std::mem::replace(shown, status.clone()) != status
        });
        Ok(true)
    }
}

/// While the disk is full, shows this coordinator as a follower without a known leader.
fn show_as_follower(status: &watch::Sender<Status>) {
    status.send_if_modified(|shown| {
        let leads = shown.role == RaftRole::Leader;
        if leads {
            shown.role = RaftRole::Follower;
        }
        leads | shown.leader.take().is_some()
    });
}

fn publish(out: &watch::Sender<Arc<Table>>, table: &Arc<Table>) {
    out.send_if_modified(|shown| {
        let changed = !Arc::ptr_eq(shown, table);
        if changed {
            *shown = Arc::clone(table);
        }
        changed
    });
}
