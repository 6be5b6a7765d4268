//! Where agreement meets the rest of a coordinator: the group is founded or found again, its frames travel,
//! operators' changes go through its log, and what it has agreed on is applied to the workers here.
//!
//! Promises: a change is acknowledged only when it is agreed on and applied here; without a majority it is
//! refused in bounded time, while routing goes on with what was agreed on last; a worker's life that is older
//! than the one agreed on is not served.
//! Never waits for the group: a coordinator starts, and takes workers and requests, before it is founded.

mod founding;
mod mesh;

use crate::config::Config;
use crate::consensus::core::{CoreError, Outbound, RaftRole, Settings};
use crate::consensus::driver::{self, ConsensusError, Driver, Handle, Network};
use crate::consensus::message::{Frame, GroupId};
use crate::consensus::storage::{Disk, Loaded, StorageError};
use crate::consensus::table::{
    Change, ClientId, Kind, Outcome, Refusal, Table, WorkerDrainedV1, WorkerLeftV1,
};
use crate::dispatch::Dispatch;
use founding::{DraftFile, DraftV1, Founding};
use mesh::Mesh;
use parking_lot::Mutex;
use proto::codec::CodecError;
use proto::ids::{Epoch, NodeId};
use proto::message::{Register, RegisterV2};
use proto::transport::{Connection, Endpoint};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

pub use founding::DraftError;

/// A tick of [`Settings::default`].
const TICK: Duration = Duration::from_millis(50);
/// How long an operator's change may take. Longer than an election, shorter than two seconds.
const CHANGE_LIMIT: Duration = Duration::from_millis(1500);
/// How often coordinators tell each other where they stand.
const REPORT_EVERY: Duration = Duration::from_millis(500);
/// The same while there is no group yet.
const DRAFT_EVERY: Duration = Duration::from_millis(100);
/// A coordinator not heard of for this long is shown as unreachable.
const SILENT_AFTER: Duration = Duration::from_secs(3);
/// How often lives of workers that are not agreed on yet are put forward again.
const INTRODUCE_EVERY: Duration = Duration::from_secs(1);
/// How long handing over leadership may take at the end.
const HAND_OVER_LIMIT: Duration = Duration::from_secs(2);

/// Another coordinator of the group, or this one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PeerEntry {
    /// Its name, as its certificate says.
    pub node: NodeId,
    /// Where it is dialed, `host:port`.
    pub quic: String,
}

/// What one coordinator tells another. Variants are only appended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
enum Told {
    /// Of the group's agreement.
    Raft(Frame),
    /// Where the sender stands.
    News(News),
}

/// Where a coordinator stands. Variants are only appended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
enum News {
    /// In no group yet.
    Draft(DraftV1),
    /// In a group.
    Member(MemberV1),
}

/// Where a member stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct MemberV1 {
    group: GroupId,
    role: RaftRole,
    term: u64,
    applied: u64,
}

/// Why a coordinator cannot take part in its group.
#[derive(Debug, thiserror::Error)]
pub enum GroupError {
    /// The data directory cannot be made.
    #[error("{path}: {source}", path = path.display())]
    Directory {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The disk cannot be used.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// The draft of a group cannot be used.
    #[error(transparent)]
    Draft(#[from] DraftError),
    /// The core cannot start.
    #[error(transparent)]
    Core(#[from] CoreError),
    /// The founders do not fit into a frame.
    #[error(transparent)]
    Codec(#[from] CodecError),
}

/// Why a change was not made, or is not known to be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    /// No majority has agreed in time. It may yet be made.
    #[error("no majority of the coordinators has agreed in time")]
    NoQuorum,
    /// The table has no such thing, or another rule stands against it.
    #[error(transparent)]
    Refused(#[from] Refusal),
}

/// Where a coordinator stands, as far as this one knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standing {
    /// Which.
    pub node: NodeId,
    /// In a word: `leader`, `follower`, `candidate`, `learner`, `outsider`; `founding` while there is no group;
    /// `unreachable` if it was not heard of lately.
    pub role: &'static str,
    /// The latest term it knows.
    pub term: u64,
    /// The last entry it has applied.
    pub applied: u64,
}

/// This coordinator's part in its group. See the module.
#[derive(Debug)]
pub struct Agreement {
    shared: Arc<Shared>,
    mesh: Arc<Mesh>,
    tasks: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    node: NodeId,
    dispatch: Arc<Dispatch>,
    /// Once there is a group.
    member: OnceLock<Member>,
    driver: Mutex<Option<Driver>>,
    /// What was heard last of each peer, and when.
    heard: Mutex<BTreeMap<NodeId, (Instant, News)>>,
    /// Something was heard that a founder waits for.
    news: Notify,
    /// A worker has joined here.
    joined: Notify,
    /// Operators' changes go one after the other.
    operators: tokio::sync::Mutex<Option<Session>>,
}

#[derive(Debug)]
struct Member {
    group: GroupId,
    handle: Handle,
}

/// Changes of one client, one after the other.
#[derive(Debug)]
struct Session {
    handle: Handle,
    /// Who, and the number of the last change.
    open: Option<(ClientId, u64)>,
}

/// A disk without a group.
struct Blank {
    disk: Disk,
    file: DraftFile,
    founding: Founding,
}

impl Agreement {
    /// Takes part, inside the current tokio runtime. `None` without a data directory: what is decided here then
    /// holds here, until the process ends.
    pub fn start(
        config: &Config,
        endpoint: &Arc<Endpoint>,
        dispatch: Arc<Dispatch>,
    ) -> Result<Option<Arc<Self>>, GroupError> {
        let Some(directory) = &config.data_dir else { return Ok(None) };
        let node = endpoint.name().node.clone();
        std::fs::create_dir_all(directory)
            .map_err(|source| GroupError::Directory { path: directory.clone(), source })?;
        let (disk, loaded) = Disk::open(&directory.join("consensus.redb"), &node)?;
        let file = DraftFile(directory.join("founding"));
        let (own, others): (Vec<_>, Vec<_>) =
            config.peers.iter().cloned().partition(|peer| peer.node == node);
        let shared = Arc::new(Shared {
            node: node.clone(),
            dispatch,
            member: OnceLock::new(),
            driver: Mutex::new(None),
            heard: Mutex::new(BTreeMap::new()),
            news: Notify::new(),
            joined: Notify::new(),
            operators: tokio::sync::Mutex::new(None),
        });
        let hears = Arc::clone(&shared);
        let deliver = Arc::new(move |peer: &NodeId, told| hears.hear(peer, told));
        let mesh = Mesh::start(endpoint, &others, &shared.dispatch, deliver);
        let mesh = Arc::new(mesh);
        let mut blank = match loaded {
            Some(loaded) => {
                file.forget()?;
                shared.take_part(loaded, disk, &mesh)?;
                None
            }
            None => {
                let at = own.first().map_or_else(|| endpoint.address().to_string(), |own| own.quic.clone());
                let draft = file.load_or_draw(&node, &at)?;
                let others = others.iter().map(|peer| peer.node.clone());
                Some(Blank { disk, file, founding: Founding::new(draft, others) })
            }
        };
        if let Some(waiting) = blank.take() {
            blank = shared.found(waiting, &mesh)?;
        }
        let peers: Vec<NodeId> = others.into_iter().map(|peer| peer.node).collect();
        let life = Arc::clone(&shared).live(blank, Arc::clone(&mesh), peers);
        let tasks = vec![tokio::spawn(life), tokio::spawn(Arc::clone(&shared).follow())];
        Ok(Some(Arc::new(Self { shared, mesh, tasks })))
    }

    /// A coordinator has dialed in.
    pub fn accepted(&self, connection: Connection) {
        self.mesh.accepted(connection);
    }

    /// Has a worker take no new work, or take it again: at every coordinator, also after restarts.
    pub async fn drain(&self, node: &NodeId, draining: bool) -> Result<(), ChangeError> {
        let deadline = Instant::now() + CHANGE_LIMIT;
        let change = Change::WorkerDrained(WorkerDrainedV1 { node: node.clone(), draining });
        let made = self.shared.change(node, change, deadline);
        match tokio::time::timeout_at(deadline.into(), made).await {
            Ok(made) => made?,
            Err(_) => return Err(ChangeError::NoQuorum),
        }
        self.shared.apply();
        Ok(())
    }

    /// The epoch agreed on for a worker, if it is a later one.
    pub fn later_life(&self, node: &NodeId, epoch: Epoch) -> Option<Epoch> {
        let known = self.shared.table()?.workers().worker(node)?.epoch;
        (known > epoch).then_some(known)
    }

    /// A worker has joined here: it drains if that was agreed on, and its life is put forward.
    pub fn joined(&self) {
        self.shared.apply();
        self.shared.joined.notify_one();
    }

    /// Where each coordinator stands, this one first.
    pub fn standings(&self) -> Vec<Standing> {
        let heard = self.shared.heard.lock();
        let peers = self.mesh.peers().map(|node| match heard.get(node) {
            Some((at, news)) if at.elapsed() < SILENT_AFTER => standing(node, news),
            Some((_, News::Member(member))) => {
                let MemberV1 { term, applied, .. } = *member;
                Standing { node: node.clone(), role: "unreachable", term, applied }
            }
            _ => Standing { node: node.clone(), role: "unreachable", term: 0, applied: 0 },
        });
        std::iter::once(self.shared.own()).chain(peers).collect()
    }

    /// Hands leadership over if it is here, and takes part no more.
    pub async fn stop(&self) {
        let driver = self.shared.driver.lock().take();
        if let Some(driver) = driver {
            // It ends by itself within the limit; what could fail is only its thread, and that says so.
            let _ended = tokio::task::spawn_blocking(move || driver.stop(HAND_OVER_LIMIT)).await;
        }
    }
}

impl Drop for Agreement {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

fn standing(node: &NodeId, news: &News) -> Standing {
    let (role, term, applied) = match news {
        News::Member(MemberV1 { role, term, applied, .. }) => (role_name(*role), *term, *applied),
        News::Draft(_) => ("founding", 0, 0),
    };
    Standing { node: node.clone(), role, term, applied }
}

fn role_name(role: RaftRole) -> &'static str {
    match role {
        RaftRole::Leader => "leader",
        RaftRole::Follower => "follower",
        RaftRole::Candidate => "candidate",
        RaftRole::Learner => "learner",
        RaftRole::Outsider => "outsider",
    }
}

/// Frames of the group leave by the mesh.
struct ByMesh(Arc<Mesh>);

impl Network for ByMesh {
    fn send(&self, outbound: Outbound) {
        self.0.send(&outbound.to, Told::Raft(outbound.frame));
    }
}

impl Shared {
    fn hear(&self, peer: &NodeId, told: Told) {
        match told {
            Told::Raft(frame) => {
                // Without a group it is for an earlier life of our disk.
                if let Some(member) = self.member.get() {
                    member.handle.receive(peer.clone(), frame);
                }
            }
            Told::News(news) => {
                self.heard.lock().insert(peer.clone(), (Instant::now(), news));
                self.news.notify_one();
            }
        }
    }

    /// Goes on from what the disk holds.
    fn take_part(&self, loaded: Loaded, disk: Disk, mesh: &Arc<Mesh>) -> Result<(), CoreError> {
        let group = loaded.identity.group;
        let network = ByMesh(Arc::clone(mesh));
        let on_fatal = Box::new(driver::abort);
        let driver = Driver::start(Settings::default(), TICK, loaded, Box::new(disk), network, on_fatal)?;
        let _first = self.member.set(Member { group, handle: driver.handle() });
        *self.driver.lock() = Some(driver);
        // Whoever follows the table begins now.
        self.joined.notify_one();
        Ok(())
    }

    /// Takes part if all that is needed has been heard; gives the disk back if not.
    fn found(&self, mut blank: Blank, mesh: &Arc<Mesh>) -> Result<Option<Blank>, GroupError> {
        let mut group = None;
        for (peer, (_, news)) in self.heard.lock().iter() {
            match news {
                News::Draft(draft) => blank.founding.hear(peer, draft.clone()),
                News::Member(member) => group = Some(member.group),
            }
        }
        let loaded = match group {
            Some(group) => Some(blank.founding.found_by_another(group)?),
            None => {
                if blank.founding.agree() {
                    blank.file.save(blank.founding.draft())?;
                }
                blank.founding.founded()?
            }
        };
        let Some(loaded) = loaded else { return Ok(Some(blank)) };
        tracing::info!(group = %format_args!("{:032x}", loaded.identity.group.0), "a group of coordinators");
        blank.disk.format(&loaded)?;
        blank.file.forget()?;
        self.take_part(loaded, blank.disk, mesh)?;
        Ok(None)
    }

    /// Tells the peers where this one stands, and founds the group with them if there is none.
    async fn live(self: Arc<Self>, mut blank: Option<Blank>, mesh: Arc<Mesh>, peers: Vec<NodeId>) {
        loop {
            if let Some(waiting) = blank.take() {
                blank = match self.found(waiting, &mesh) {
                    Ok(blank) => blank,
                    Err(error) => {
                        // What is on the disk is unknown: as after a failed write of the log.
                        tracing::error!(%error, "the group cannot be founded; the process ends");
                        std::process::abort();
                    }
                };
            }
            let news = match (&blank, self.member.get()) {
                (Some(blank), _) => Some(News::Draft(blank.founding.draft().clone())),
                (None, Some(Member { group, handle })) => {
                    let status = handle.status();
                    let (role, term, applied) = (status.role, status.term, status.applied);
                    Some(News::Member(MemberV1 { group: *group, role, term, applied }))
                }
                (None, None) => None,
            };
            if let Some(news) = news {
                peers.iter().for_each(|peer| mesh.send(peer, Told::News(news.clone())));
            }
            match blank {
                Some(_) => {
                    let _news = tokio::time::timeout(DRAFT_EVERY, self.news.notified()).await;
                }
                None => tokio::time::sleep(REPORT_EVERY).await,
            }
        }
    }

    /// Applies what is agreed on whenever that changes, and puts forward the lives of workers that are not.
    async fn follow(self: Arc<Self>) {
        while self.member.get().is_none() {
            self.joined.notified().await;
        }
        let Some(Member { handle, .. }) = self.member.get() else { return };
        let mut table = handle.table();
        let mut session = Session { handle: handle.clone(), open: None };
        loop {
            self.apply();
            // One is enough: the others put forward only what the leader does not know of.
            if handle.status().role == RaftRole::Leader {
                self.introduce(&mut session).await;
            }
            tokio::select! {
                changed = table.changed() => if changed.is_err() { return },
                () = self.joined.notified() => {}
                () = tokio::time::sleep(INTRODUCE_EVERY) => self.introduce(&mut session).await,
            }
        }
    }

    /// Puts forward the lives of workers here that are not agreed on. What is not taken is tried again later.
    async fn introduce(&self, session: &mut Session) {
        for register in self.dispatch.introductions() {
            let Some(table) = self.table() else { return };
            if !is_news(&table, &register) {
                continue;
            }
            let deadline = Instant::now() + CHANGE_LIMIT;
            match session.make(Change::WorkerJoined(Register::V2((*register).clone())), deadline).await {
                Ok(Outcome::Refused(Refusal::ModelConflict(other))) => {
                    // A worker that is nowhere any more must not decide what a name stands for.
                    let here = self.dispatch.introductions().iter().any(|register| register.node == other);
                    if let Some(worker) = table.workers().worker(&other).filter(|_| !here) {
                        let left = WorkerLeftV1 { node: other, epoch: worker.epoch };
                        let _later = session.make(Change::WorkerLeft(left), deadline).await;
                    }
                }
                Ok(Outcome::Refused(refusal)) => {
                    tracing::debug!(node = %register.node, %refusal, "a worker's life is not agreed on");
                }
                Ok(Outcome::Done | Outcome::Opened(_)) => {}
                // Nor will the others be taken.
                Err(error) => {
                    tracing::debug!(%error, "a worker's life is not agreed on yet");
                    return;
                }
            }
        }
    }

    /// Makes a change about a worker.
    async fn change(&self, node: &NodeId, change: Change, deadline: Instant) -> Result<(), ChangeError> {
        let Some(Member { handle, .. }) = self.member.get() else { return Err(ChangeError::NoQuorum) };
        let mut operators = self.operators.lock().await;
        let session = operators.get_or_insert_with(|| Session { handle: handle.clone(), open: None });
        let unknown = Outcome::Refused(Refusal::Unknown(Kind::Worker));
        let mut outcome = session.make(change.clone(), deadline).await?;
        if outcome == unknown {
            // It has joined here, perhaps while there was no majority.
            let here = self.dispatch.introductions().into_iter().find(|register| register.node == *node);
            if let Some(register) = here {
                session.make(Change::WorkerJoined(Register::V2((*register).clone())), deadline).await?;
                outcome = session.make(change, deadline).await?;
            }
        }
        match outcome {
            Outcome::Done | Outcome::Opened(_) => Ok(()),
            Outcome::Refused(refusal) => Err(refusal.into()),
        }
    }

    fn table(&self) -> Option<Arc<Table>> {
        self.member.get().map(|member| Arc::clone(&member.handle.table().borrow()))
    }

    fn apply(&self) {
        if let Some(table) = self.table() {
            self.dispatch.agree(table.workers());
        }
    }

    fn own(&self) -> Standing {
        let node = self.node.clone();
        match self.member.get() {
            Some(member) => {
                let status = member.handle.status();
                Standing { node, role: role_name(status.role), term: status.term, applied: status.applied }
            }
            None => Standing { node, role: "founding", term: 0, applied: 0 },
        }
    }
}

/// Whether the table does not know this life of a worker as one that goes on.
fn is_news(table: &Table, register: &RegisterV2) -> bool {
    table.workers().worker(&register.node).is_none_or(|known| {
        known.epoch < register.epoch || known.epoch == register.epoch && known.life.register().is_none()
    })
}

impl Session {
    /// Makes a change and waits until it is applied here; each is made at most once.
    async fn make(&mut self, change: Change, deadline: Instant) -> Result<Outcome, ConsensusError> {
        loop {
            let (client, last) = match self.open {
                Some(open) => open,
                None => (self.handle.open_session(deadline).await?, 0),
            };
            // Before it is sent: when this future is dropped, the number is used up.
            self.open = Some((client, last + 1));
            match self.handle.propose(change.clone(), client, last + 1, deadline).await? {
                // Dropped for those of others; what is changed here may be made again.
                Outcome::Refused(Refusal::SessionExpired) => self.open = None,
                outcome => return Ok(outcome),
            }
        }
    }
}

impl From<ConsensusError> for ChangeError {
    fn from(error: ConsensusError) -> Self {
        tracing::warn!(%error, "a change was not agreed on");
        Self::NoQuorum
    }
}
