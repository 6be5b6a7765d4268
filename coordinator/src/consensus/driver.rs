//! The edge: one thread that owns a [`Core`] and its disk, ticks it by the monotonic clock, and answers
//! those who ask through a [`Handle`].
//!
//! Promises: nothing is answered before it is agreed on and nobody waits past a deadline; what the disk has
//! not taken is never built upon: after a failed write the thread does nothing more than say so.

mod room;
mod waiting;

#[cfg(test)]
mod tests;

use super::core::{Core, CoreError, Outbound, ProposeError, RaftRole, Settings, Status};
use super::message::Frame;
use super::storage::{Loaded, Storage, StorageError};
use super::table::{Change, ClientId, Entry, OpenSession, Outcome, Request, SessionChange, Table};
use super::telemetry::RaftMetrics;
use crate::random::random_u64;
use proto::ids::NodeId;
use room::DiskSpace;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::{oneshot, watch};
use waiting::Waiting;

/// Events that wait for the thread at most. What comes beyond is lost, if it is a frame, or refused.
const MAX_EVENTS: usize = 4096;

/// How frames leave. A frame may be lost; sending must not block.
pub trait Network: Send + 'static {
    /// Sends a frame, or does not.
    fn send(&self, outbound: Outbound);
}

/// Why the thread has ended. The process must end too, and begin anew from its disk.
#[derive(Debug, thiserror::Error)]
pub enum Fatal {
    /// The disk failed: what it holds is unknown.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// The core cannot go on.
    #[error(transparent)]
    Core(#[from] CoreError),
}

/// Why there is no outcome.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConsensusError {
    /// No majority has agreed in time. Whether a change will yet be made is not known; the same change may be
    /// sent again.
    #[error("no majority has agreed in time")]
    NoQuorum,
    /// It was not put forward.
    #[error(transparent)]
    Refused(#[from] ProposeError),
    #[error("too much waits already")]
    Overloaded,
    #[error("the coordinator is ending")]
    Stopped,
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
    /// Hand over if leading, then end, at the deadline at the latest.
    Stop {
        deadline: Instant,
    },
}

/// The thread, for whoever started it.
#[derive(Debug)]
pub struct Driver {
    handle: Handle,
    thread: JoinHandle<()>,
}

/// Talks to the thread. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Handle {
    events: SyncSender<Event>,
    table: watch::Receiver<Arc<Table>>,
    status: watch::Receiver<Status>,
}

/// What ends the process after a fatal error: [`abort`] in production.
pub type OnFatal = Box<dyn FnOnce(Fatal) + Send>;

/// Ends the process without unwinding and without another write: what was not synced must not be relied on.
pub fn abort(fatal: Fatal) {
    tracing::error!(error = %fatal, "consensus cannot go on; the process ends");
    proto::log::flush();
    std::process::abort();
}

impl Driver {
    /// Starts the thread on what the disk holds. `tick` is how long a tick of [`Settings`] lasts.
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

    /// Something to talk to it with.
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Hands leadership over if it is here, answers whoever waits, and ends the thread within `grace`. Blocks.
    pub fn stop(self, grace: Duration) {
        let deadline = Instant::now() + grace;
        // A thread that has ended already takes no events.
        let _ended = self.handle.events.send(Event::Stop { deadline });
        if self.thread.join().is_err() {
            tracing::error!("the consensus thread has panicked");
        }
    }
}

impl Handle {
    /// Opens a session for changes; changes of one session are made at most once each.
    pub async fn open_session(&self, deadline: Instant) -> Result<ClientId, ConsensusError> {
        let nonce = random_u64();
        let entry = Entry::OpenSession(OpenSession { nonce });
        match self.ask(Request::Open(nonce), entry, deadline).await? {
            Outcome::Opened(client) => Ok(client),
            Outcome::Done => Err(ConsensusError::NoQuorum),
            Outcome::Refused(refusal) => Err(ProposeError::Refused(refusal).into()),
        }
    }

    /// Makes a change and waits until it is agreed on and applied here. `seq` grows with each change of a
    /// session; after [`ConsensusError::NoQuorum`] the same number with the same change may be sent again, to
    /// any coordinator.
    pub async fn propose(
        &self,
        change: Change,
        client: ClientId,
        seq: u64,
        deadline: Instant,
    ) -> Result<Outcome, ConsensusError> {
        let entry = Entry::Change(SessionChange { client, seq, change });
        self.ask(Request::Change(client, seq), entry, deadline).await
    }

    /// The table with every change acknowledged anywhere before this call.
    pub async fn read(&self, deadline: Instant) -> Result<Arc<Table>, ConsensusError> {
        let (reply, answer) = oneshot::channel();
        self.tell(Event::Read { deadline, reply })?;
        answer.await.map_err(|_| ConsensusError::Stopped)?
    }

    /// Begins to hand leadership to `to`, or to the voter that is furthest.
    pub async fn hand_over(&self, to: Option<NodeId>) -> Result<(), ConsensusError> {
        let (reply, answer) = oneshot::channel();
        self.tell(Event::HandOver { to, reply })?;
        answer.await.map_err(|_| ConsensusError::Stopped)?
    }

    /// A frame has come from `peer`, as its certificate says. It is lost when too many wait.
    pub fn receive(&self, peer: NodeId, frame: Frame) {
        let _lost = self.events.try_send(Event::Frame(peer, Box::new(frame)));
    }

    /// The table as it is here: perhaps behind, never wrong.
    pub fn table(&self) -> watch::Receiver<Arc<Table>> {
        self.table.clone()
    }

    pub fn status(&self) -> Status {
        self.status.borrow().clone()
    }

    /// The same, as it changes.
    pub fn statuses(&self) -> watch::Receiver<Status> {
        self.status.clone()
    }

    async fn ask(
        &self,
        request: Request,
        entry: Entry,
        deadline: Instant,
    ) -> Result<Outcome, ConsensusError> {
        let (reply, answer) = oneshot::channel();
        self.tell(Event::Propose { request, entry: Box::new(entry), deadline, reply })?;
        answer.await.map_err(|_| ConsensusError::Stopped)?
    }

    fn tell(&self, event: Event) -> Result<(), ConsensusError> {
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
                // After a pause of the process time goes on from here: missed ticks would only make this
                // member suspect the others.
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
                    // What has come meanwhile shares a write.
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

    /// Takes an event; if it is the end, until when there is time.
    fn take(&mut self, event: Event) -> Option<Instant> {
        match event {
            Event::Frame(peer, frame) => {
                if let Err(error) = self.core.receive(&peer, *frame) {
                    tracing::warn!(%error, "a frame was not taken");
                }
            }
            Event::Propose { request, entry, deadline, reply } => {
                self.waiting.propose(&mut self.core, request, entry, deadline, reply);
            }
            Event::Read { deadline, reply } => self.waiting.read(&mut self.core, deadline, reply),
            Event::HandOver { to, reply } => {
                let begun = self.core.transfer_leadership(to.as_ref()).map_err(ConsensusError::from);
                let _gone = reply.send(begun);
            }
            Event::Stop { deadline } => {
                let _not_leader = self.core.transfer_leadership(None);
                return Some(deadline);
            }
        }
        None
    }

    /// Does what is to be done; false if the end came while it waited for room on the disk.
    fn work(&mut self, inbox: &Receiver<Event>) -> Result<bool, Fatal> {
        while let Some(mut batch) = self.core.batch()? {
            batch.early().into_iter().for_each(|outbound| self.network.send(outbound));
            if !batch.write().is_empty() {
                let began = Instant::now();
                while !self.room.write(batch.write())? {
                    self.metrics.has_room(false);
                    step_back(&self.status);
                    if !self.waiting.without_room(inbox) {
                        return Ok(false);
                    }
                }
                self.metrics.wrote(began.elapsed());
            }
            let done = batch.persisted()?;
            done.send.into_iter().for_each(|outbound| self.network.send(outbound));
            // Before the answers: who is answered sees a table with the change.
            show(&self.table, self.core.table());
            self.waiting.answered(&done.answers);
            self.waiting.read_done(&done.reads, self.core.table());
        }
        let status = self.core.status();
        self.status.send_if_modified(|shown| {
            if shown.role != status.role || shown.term != status.term {
                tracing::info!(role = ?status.role, term = status.term, "consensus");
            }
            self.metrics.stands(shown, &status);
            std::mem::replace(shown, status.clone()) != status
        });
        Ok(true)
    }
}

/// Who cannot write leads nobody and knows of no leader, whatever the core had come to before.
fn step_back(status: &watch::Sender<Status>) {
    status.send_if_modified(|shown| {
        let leads = shown.role == RaftRole::Leader;
        if leads {
            shown.role = RaftRole::Follower;
        }
        leads | shown.leader.take().is_some()
    });
}

fn show(out: &watch::Sender<Arc<Table>>, table: &Arc<Table>) {
    out.send_if_modified(|shown| {
        let changed = !Arc::ptr_eq(shown, table);
        if changed {
            *shown = Arc::clone(table);
        }
        changed
    });
}
