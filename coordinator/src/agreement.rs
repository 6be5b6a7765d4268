//! Where agreement meets the rest of a coordinator: the group is founded or found again, its frames travel,
//! operators' changes go through its log, and what it has agreed on is applied to the workers here.
//!
//! Promises: a change is acknowledged only when it is agreed on and applied here; without a majority it is
//! refused in bounded time, while routing goes on with what was agreed on last; a worker's life that is older
//! than the one agreed on is not served.
//! Never waits for the group: a coordinator starts, and takes workers and requests, before it is founded.

mod changes;
mod founding;
mod members;
mod mesh;
mod news;
mod replicas;
mod settings;

use crate::api::auth::Keys;
use crate::config::{Config, PeerEntry};
use crate::consensus::core::{CoreError, Outbound, RaftRole, Settings};
use crate::consensus::driver::{self, Driver, Handle, Network};
use crate::consensus::message::GroupId;
use crate::consensus::storage::{Disk, Loaded, StorageError};
use crate::consensus::table::{Change, GroupMember, Level, Refusal, Table, WorkerDrained};
use crate::consensus::telemetry::RaftMetrics;
use crate::dispatch::Dispatch;
use changes::Session;
use founding::{DraftFile, Founding};
use members::MemberReply;
use mesh::Mesh;
use news::{GroupMessage, LatestNews, MemberStatus, News};
use parking_lot::Mutex;
use proto::codec::CodecError;
use proto::ids::{Epoch, NodeId};
use proto::log::Repeats;
use proto::transport::{Connection, Endpoint, Identity};
use settings::{Compared, SettingDigests};
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::task::JoinHandle;

pub use founding::DraftError;
pub use members::{GroupView, MemberRequest, MemberView};
pub use news::Standing;
pub use settings::{Difference, ModelDigests, OwnSettings};

/// A tick of [`Settings::default`].
const TICK: Duration = Duration::from_millis(50);
/// How long an operator's change may take. Longer than an election, shorter than two seconds.
const CHANGE_LIMIT: Duration = Duration::from_millis(1500);
/// How often coordinators tell each other where they stand.
const REPORT_EVERY: Duration = Duration::from_millis(500);
/// The same while there is no group yet.
const DRAFT_EVERY: Duration = Duration::from_millis(100);
/// How often lives of workers that are not agreed on yet are put forward again.
const INTRODUCE_EVERY: Duration = Duration::from_secs(1);
/// How long handing over leadership may take at the end.
const HAND_OVER_LIMIT: Duration = Duration::from_secs(2);
/// How long workers wait at most, after the start, until settings are compared.
const COMPARE_LIMIT: Duration = Duration::from_secs(2);
/// How often it is looked whether they are.
const COMPARE_EVERY: Duration = Duration::from_millis(10);
/// Settings that differ, as far as that was logged.
static DIFFERS: Repeats = Repeats::new();
/// What was agreed on, in the data directory.
const CONSENSUS_FILE: &str = "consensus.redb";
/// Orders of others that wait to be carried out. Whoever has given one that is lost gives it again.
const MAX_ORDERS: usize = 8;

/// Why a coordinator cannot take part in its group.
#[derive(Debug, thiserror::Error)]
pub enum GroupError {
    /// The Raft storage cannot be read or written.
    #[error("{path}: {}{}", source, remedy(source), path = path.display())]
    Storage { path: PathBuf, source: StorageError },
    /// The draft of a group cannot be used.
    #[error(transparent)]
    Draft(#[from] DraftError),
    #[error(transparent)]
    Core(#[from] CoreError),
    /// The founders do not fit into a frame.
    #[error(transparent)]
    Codec(#[from] CodecError),
}

fn remedy(error: &StorageError) -> &'static str {
    match error {
        StorageError::Full => "; make room, or raise the limit that is reached, and start again",
        StorageError::Damaged { .. } => {
            "; with other coordinators, start with an empty data directory and have it be a member again; alone, restore the \
             directory or start anew with an empty one"
        }
        StorageError::Unknown { .. } => "; start the version that has written it, or a later one",
        StorageError::Foreign { .. } => "; name this coordinator's own data directory",
        StorageError::Disk(_) | StorageError::Unwritable(_) | StorageError::Format { .. } => "",
    }
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
    /// Not as the group is; what is to be done is told.
    #[error("{0}")]
    Explained(String),
}

/// This coordinator's part in its group. See the module.
#[derive(Debug)]
pub struct Agreement {
    shared: Arc<Shared>,
    mesh: Arc<Mesh>,
    tasks: Vec<JoinHandle<()>>,
    started: Instant,
}

#[derive(Debug)]
struct Shared {
    node: NodeId,
    dispatch: Arc<Dispatch>,
    keys: Arc<Keys>,
    metrics: RaftMetrics,
    /// Once there is a group.
    member: OnceLock<Member>,
    driver: Mutex<Option<Driver>>,
    /// Who this one is, once it is known in which life.
    seat: OnceLock<GroupMember>,
    /// A member has said that this one was removed in its present life: who was away meanwhile learns it from
    /// nobody's log. It is not kept, since whoever starts again is told again.
    removed: AtomicBool,
    /// What this one had of the group was damaged and put aside: it founds none, and wants to be a member again.
    lost: bool,
    heard: Mutex<LatestNews>,
    /// The settings that must be equal on all coordinators.
    settings: OwnSettings,
    compared: Mutex<Compared>,
    identity: Identity,
    /// Something was heard that a founder waits for.
    news: Notify,
    /// A worker has joined here.
    joined: Notify,
    /// Held while a table is brought here, so that an older one is never brought after a newer one.
    applying: Mutex<()>,
    /// Operators' changes go one after the other.
    operators: tokio::sync::Mutex<Option<Session>>,
    /// So do changes of the group, here at the leader.
    members: tokio::sync::Mutex<Option<Session>>,
    /// And plans of replicas, at the leader too.
    replicas: tokio::sync::Mutex<Option<Session>>,
    /// Orders that have been handed to the leader.
    asked: Mutex<HashMap<u64, oneshot::Sender<MemberReply>>>,
    /// Orders that others have handed here.
    orders: mpsc::Sender<(NodeId, u64, MemberRequest)>,
}

#[derive(Debug)]
struct Member {
    group: GroupId,
    handle: Handle,
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
        keys: Arc<Keys>,
        metrics: RaftMetrics,
        settings: OwnSettings,
        identity: &Identity,
    ) -> Result<Option<Arc<Self>>, GroupError> {
        let Some(directory) = &config.data_dir else { return Ok(None) };
        let node = endpoint.name().node.clone();
        let (own, others): (Vec<_>, Vec<_>) =
            config.peers.iter().cloned().partition(|peer| peer.node == node);
        let path = directory.join(CONSENSUS_FILE);
        let at = |source| GroupError::Storage { path: path.clone(), source };
        let (disk, loaded) = match Disk::open(&path, &node) {
            // The others have all of it. What is left here must not vote: it is as if it had been wiped.
            Err(error @ StorageError::Damaged { .. }) if !others.is_empty() => {
                tracing::error!(%error, "what was agreed on is damaged here; it is put aside and asked of the others");
                Disk::put_aside(&path).map_err(at)?;
                Disk::open(&path, &node).map_err(at)?
            }
            opened => opened.map_err(at)?,
        };
        let lost = Disk::was_put_aside(&path);
        let file = DraftFile(directory.join("founding"));
        let (orders, given) = mpsc::channel(MAX_ORDERS);
        let shared = Arc::new(Shared {
            node: node.clone(),
            dispatch,
            keys,
            metrics,
            member: OnceLock::new(),
            driver: Mutex::new(None),
            seat: OnceLock::new(),
            removed: AtomicBool::new(false),
            lost,
            heard: Mutex::default(),
            settings,
            compared: Mutex::default(),
            identity: identity.clone(),
            news: Notify::new(),
            joined: Notify::new(),
            applying: Mutex::new(()),
            operators: tokio::sync::Mutex::new(None),
            members: tokio::sync::Mutex::new(None),
            replicas: tokio::sync::Mutex::new(None),
            asked: Mutex::default(),
            orders,
        });
        let hears = Arc::clone(&shared);
        let deliver = Arc::new(move |peer: &NodeId, told| hears.hear(peer, told));
        let mesh = Mesh::start(endpoint, &others, &shared.dispatch, deliver);
        let mesh = Arc::new(mesh);
        let at = own.first().map_or_else(|| endpoint.address().to_string(), |own| own.quic.clone());
        let mut blank = match loaded {
            Some(loaded) => {
                file.forget()?;
                let incarnation = loaded.identity.incarnation;
                let _first = shared.seat.set(GroupMember { node, incarnation, quic: at, level: Level::OWN });
                shared.take_part(loaded, disk, &mesh)?;
                None
            }
            None => {
                let draft = file.load_or_draw(&node, &at)?;
                let _first = shared.seat.set(GroupMember { level: Level::OWN, ..draft.seat.clone() });
                let others = others.iter().map(|peer| peer.node.clone());
                Some(Blank { disk, file, founding: Founding::new(draft, others) })
            }
        };
        if let Some(waiting) = blank.take() {
            blank = shared.found(waiting, &mesh)?;
        }
        let tasks = vec![
            tokio::spawn(Arc::clone(&shared).live(blank, Arc::clone(&mesh))),
            tokio::spawn(Arc::clone(&shared).follow(Arc::clone(&mesh))),
            tokio::spawn(Arc::clone(&shared).obey(Arc::clone(&mesh), given)),
            tokio::spawn(Arc::clone(&shared).settle()),
        ];
        Ok(Some(Arc::new(Self { shared, mesh, tasks, started: Instant::now() })))
    }

    /// A coordinator has dialed in.
    pub fn accepted(&self, connection: Connection) {
        self.mesh.accepted(connection);
    }

    /// Has a worker take no new work, or take it again: at every coordinator, also after restarts.
    pub async fn drain(&self, node: &NodeId, draining: bool) -> Result<(), ChangeError> {
        self.shared.check_member()?;
        let deadline = Instant::now() + CHANGE_LIMIT;
        let change = Change::WorkerDrained(WorkerDrained { node: node.clone(), draining });
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

    /// The settings on which the coordinators disagree.
    pub fn differences(&self) -> Vec<Difference> {
        self.shared.compared.lock().differences(&self.shared.node)
    }

    /// Why this one must not serve: settings of its own that must be the others'.
    pub fn odd_settings(&self) -> Option<String> {
        let differences = self.differences();
        let odd = differences.iter().filter(|difference| difference.own && difference.binding);
        let odd: Vec<&str> = odd.map(|difference| difference.setting.as_str()).collect();
        (!odd.is_empty()).then(|| odd.join(", "))
    }

    /// Waits until the others have told their settings, or have had the time to: a worker takes the cluster's key of
    /// whoever answers it first.
    pub async fn settings_compared(&self) {
        while self.started.elapsed() < COMPARE_LIMIT && !self.shared.compared.lock().knows(&self.mesh.peers())
        {
            tokio::time::sleep(COMPARE_EVERY).await;
        }
    }

    /// When a coordinator's certificate ends, in seconds since 1970, if it has said so.
    pub fn certificate_ends(&self, node: &NodeId) -> Option<i64> {
        self.shared.compared.lock().certificate_ends(node)
    }

    /// Where each coordinator stands, this one first.
    pub fn standings(&self) -> Vec<Standing> {
        let heard = self.shared.heard.lock();
        let peers = self.mesh.peers().into_iter().map(|node| heard.standing(&node));
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

/// Frames of the group leave by the mesh.
struct ByMesh(Arc<Mesh>);

impl Network for ByMesh {
    fn send(&self, outbound: Outbound) {
        self.0.send(&outbound.to, GroupMessage::Raft(outbound.frame));
    }
}

impl Shared {
    fn hear(&self, peer: &NodeId, told: GroupMessage) {
        match told {
            GroupMessage::Raft(frame) => {
                // Without a group it is for an earlier life of our disk.
                if let Some(member) = self.member.get() {
                    member.handle.receive(peer.clone(), frame);
                }
            }
            GroupMessage::News(news) => {
                self.heard.lock().news(peer, news);
                self.news.notify_one();
            }
            GroupMessage::Seat(seat) => self.heard.lock().seat(peer, seat),
            GroupMessage::Removed(life) => self.told_removed(peer, life),
            GroupMessage::Settings(settings) => self.compared.lock().hear(peer, settings),
            GroupMessage::Spending(spending) => self.keys.spent_elsewhere(peer, &spending),
            GroupMessage::MemberRequest(number, order) => {
                let _lost = self.orders.try_send((peer.clone(), number, order));
            }
            GroupMessage::MemberReply(number, answer) => {
                if let Some(asked) = self.asked.lock().remove(&number) {
                    let _gone = asked.send(answer);
                }
            }
        }
    }

    /// Goes on from what the disk holds.
    fn take_part(&self, loaded: Loaded, disk: Disk, mesh: &Arc<Mesh>) -> Result<(), CoreError> {
        let group = loaded.identity.group;
        let network = ByMesh(Arc::clone(mesh));
        let on_fatal = Box::new(driver::abort);
        let (settings, metrics) = (Settings::default(), self.metrics.clone());
        let driver = Driver::start(settings, TICK, loaded, Box::new(disk), network, metrics, on_fatal)?;
        let _first = self.member.set(Member { group, handle: driver.handle() });
        *self.driver.lock() = Some(driver);
        // Whoever follows the table begins now.
        self.joined.notify_one();
        Ok(())
    }

    /// Takes part if all that is needed has been heard; gives the disk back if not.
    fn found(&self, mut blank: Blank, mesh: &Arc<Mesh>) -> Result<Option<Blank>, GroupError> {
        let mut group = None;
        for (peer, news) in self.heard.lock().all_news() {
            match news {
                News::Draft(draft) => blank.founding.hear(peer, draft.clone()),
                News::Member(member) => group = Some(member.group),
            }
        }
        let loaded = match group {
            Some(group) => Some(blank.founding.found_by_another(group)?),
            // There was a group, and it is not for those to found another that have lost it.
            None if self.lost => None,
            None => {
                if blank.founding.agree() {
                    blank.file.save(blank.founding.draft())?;
                }
                blank.founding.founded()?
            }
        };
        let Some(loaded) = loaded else { return Ok(Some(blank)) };
        tracing::info!(group = %format_args!("{:032x}", loaded.identity.group.0), "a group of coordinators");
        let path = blank.file.0.with_file_name(CONSENSUS_FILE);
        blank.disk.format(&loaded).map_err(|source| GroupError::Storage { path, source })?;
        blank.file.forget()?;
        self.take_part(loaded, blank.disk, mesh)?;
        Ok(None)
    }

    /// Tells the peers where this one stands, and founds the group with them if there is none.
    async fn live(self: Arc<Self>, mut blank: Option<Blank>, mesh: Arc<Mesh>) {
        let mut outside = false;
        loop {
            if let Some(waiting) = blank.take() {
                blank = match self.found(waiting, &mesh) {
                    Ok(blank) => blank,
                    Err(error) => {
                        // What is on the disk is unknown: as after a failed write of the log.
                        tracing::error!(%error, "the group cannot be founded; the process ends");
                        proto::log::flush();
                        std::process::abort();
                    }
                };
            }
            let news = match (&blank, self.member.get()) {
                (Some(blank), _) => Some(News::Draft(blank.founding.draft().clone())),
                (None, Some(Member { group, handle })) => {
                    let status = handle.status();
                    let (role, term, applied) = (self.role(&status), status.term, status.applied);
                    Some(News::Member(MemberStatus { group: *group, role, term, applied }))
                }
                (None, None) => None,
            };
            let was_outside = std::mem::replace(&mut outside, self.check_member().is_err());
            if let (true, false, Some(seat)) = (outside, was_outside, self.seat.get()) {
                tracing::warn!("{}", members::outsider(seat));
            }
            let follows = || self.member.get().is_some_and(|m| m.handle.status().role == RaftRole::Learner);
            if self.lost && (outside || follows()) {
                self.ask_to_rejoin(&mesh);
            }
            let spending = self.keys.spending();
            let peers = mesh.peers();
            let settings = self.compare(&peers);
            for peer in peers {
                mesh.send(&peer, GroupMessage::Settings(settings.clone()));
                spending
                    .iter()
                    .for_each(|spending| mesh.send(&peer, GroupMessage::Spending(spending.clone())));
                if let Some(life) = self.removed_life(&peer) {
                    mesh.send(&peer, GroupMessage::Removed(life));
                }
                news.iter().for_each(|news| mesh.send(&peer, GroupMessage::News(news.clone())));
                self.seat
                    .get()
                    .into_iter()
                    .for_each(|seat| mesh.send(&peer, GroupMessage::Seat(seat.clone())));
            }
            match blank {
                Some(_) => {
                    let _news = tokio::time::timeout(DRAFT_EVERY, self.news.notified()).await;
                }
                None => tokio::time::sleep(REPORT_EVERY).await,
            }
        }
    }

    /// Applies what is agreed on whenever that changes, and puts forward what is seen here and is not agreed on.
    async fn follow(self: Arc<Self>, mesh: Arc<Mesh>) {
        while self.member.get().is_none() {
            self.joined.notified().await;
        }
        let Some(Member { handle, .. }) = self.member.get() else { return };
        let mut table = handle.table();
        let mut session = Session::new(handle.clone());
        loop {
            self.apply();
            for seat in table.borrow_and_update().seats().filter(|seat| seat.node != self.node) {
                mesh.ensure(&PeerEntry { node: seat.node.clone(), quic: seat.quic.clone() });
            }
            // One is enough: the others put forward only what the leader does not know of.
            if handle.status().role == RaftRole::Leader {
                self.introduce(&mut session).await;
                self.report_levels(&mut session).await;
            }
            tokio::select! {
                changed = table.changed() => if changed.is_err() { return },
                () = self.joined.notified() => {}
                () = tokio::time::sleep(INTRODUCE_EVERY) => self.introduce(&mut session).await,
            }
        }
    }

    /// Once a majority has said what is agreed on, keys that are not known here are none.
    async fn settle(self: Arc<Self>) {
        loop {
            if let Some(Member { handle, .. }) = self.member.get()
                && handle.read(Instant::now() + CHANGE_LIMIT).await.is_ok()
            {
                self.apply();
                return self.keys.settle();
            }
            tokio::time::sleep(DRAFT_EVERY).await;
        }
    }

    fn table(&self) -> Option<Arc<Table>> {
        self.member.get().map(|member| Arc::clone(&member.handle.table().borrow()))
    }

    fn apply(&self) {
        let _turn = self.applying.lock();
        if let Some(table) = self.table() {
            self.dispatch.agree(table.workers());
            self.keys.agree(table.access());
        }
    }

    /// Looks whether the settings here are those of the others, and says so if not. What to tell them of ours.
    fn compare(&self, peers: &[NodeId]) -> SettingDigests {
        let ends = self.identity.validities().map_or(0, |validities| validities.node.ends);
        let own = self.settings.told(ends, &[]);
        let mut compared = self.compared.lock();
        compared.keep(peers, &self.node);
        compared.hear(&self.node, own);
        let (mut odd_here, mut must_not_serve) = (Vec::new(), false);
        for Difference { setting, odd, own, binding } in compared.differences(&self.node) {
            if own {
                odd_here.push(setting.clone());
                must_not_serve |= binding;
            }
            let Some(left_out) = DIFFERS.due((&self.node, &setting, &odd)) else { continue };
            let nodes: Vec<&str> = odd.iter().map(NodeId::as_str).collect();
            let nodes = nodes.join(", ");
            match (own, binding) {
                (true, true) => tracing::error!(
                    setting,
                    left_out,
                    "this coordinator has another {setting} than the others: it is not ready and takes no workers until they are the same"
                ),
                (false, true) => tracing::error!(
                    nodes,
                    setting,
                    left_out,
                    "{nodes} has another {setting} than the other coordinators"
                ),
                (_, false) => tracing::warn!(
                    nodes,
                    setting,
                    left_out,
                    "{nodes} has another list of {setting} than the other coordinators"
                ),
            }
        }
        drop(compared);
        if must_not_serve {
            self.dispatch.let_idle_go("a setting here is not that of the other coordinators");
        }
        self.settings.told(ends, &odd_here)
    }

    fn own(&self) -> Standing {
        let node = self.node.clone();
        match self.member.get() {
            Some(member) => {
                let status = member.handle.status();
                let role = self.role(&status).name();
                Standing { node, role, term: status.term, applied: status.applied }
            }
            None => Standing { node, role: "founding", term: 0, applied: 0 },
        }
    }
}
