//! Connects Raft to the rest of a coordinator: founds or rejoins the group, carries its frames, proposes
//! operators' changes, and applies the table to the workers here.
//!
//! Guarantees: a change is acknowledged only after it is committed and applied here. Without a majority,
//! changes are refused in bounded time while routing continues with the last table. A worker with an older
//! epoch than the committed one is not served.
//!
//! A coordinator never waits for the group: it starts, and accepts workers and requests, before the group is
//! founded.

mod access;
mod changes;
mod founding;
mod members;
mod mesh;
mod news;
mod replicas;
mod settings;

use changes::Session;
use consensus::core::{CoreError, Outbound, RaftRole, Settings};
use consensus::driver::{self, Driver, Handle, Network};
use consensus::message::GroupId;
use consensus::storage::{Disk, Loaded, StorageError};
use consensus::table::{Change, GroupMember, Level, Refusal, Table, WorkerDrained};
use consensus::telemetry::RaftMetrics;
use dispatch::Dispatch;
use founding::{Founding, ProposalFile};
use members::MemberReply;
use mesh::Mesh;
use news::{GroupMessage, LatestNews, MemberStatus, News};
use parking_lot::Mutex;
use pki::Identity;
use proto::codec::CodecError;
use proto::ids::{Epoch, NodeId};
use proto::log::Repeats;
use settings::{Compared, SettingDigests};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::task::JoinHandle;
use transport::{Connection, Endpoint};

pub use access::AccessControl;
pub use founding::ProposalError;
pub use members::{GroupView, MemberRequest, MemberView};
pub use mesh::PeerEntry;
pub use news::Standing;
pub use settings::{Difference, ModelDigests, OwnSettings};

/// Duration of a tick of [`Settings::default`].
const TICK: Duration = Duration::from_millis(50);
/// Timeout of an operator's change: longer than an election, shorter than two seconds.
const CHANGE_LIMIT: Duration = Duration::from_millis(1500);
/// Interval of status messages between coordinators.
const REPORT_EVERY: Duration = Duration::from_millis(500);
/// The same interval before there is a group.
const DRAFT_EVERY: Duration = Duration::from_millis(100);
/// Interval between attempts to propose worker epochs that are not in the table.
const INTRODUCE_EVERY: Duration = Duration::from_secs(1);
/// Timeout of a leadership transfer on shutdown.
const HAND_OVER_LIMIT: Duration = Duration::from_secs(2);
/// How long a worker's registration waits at most, after the start, for the comparison of settings.
const COMPARE_LIMIT: Duration = Duration::from_secs(2);
/// Interval of checks for that comparison.
const COMPARE_EVERY: Duration = Duration::from_millis(10);
/// Rate limit for logs of differing settings.
static DIFFERS: Repeats = Repeats::new();
/// Rate limit for logs of coordinators of an earlier version.
static TOO_OLD: Repeats = Repeats::new();
/// The Raft storage in the data directory.
const CONSENSUS_FILE: &str = "consensus.redb";
/// Maximum of queued orders from other coordinators. The sender of a dropped order retries.
const MAX_ORDERS: usize = 8;

/// Why a coordinator cannot take part in its group.
#[derive(Debug, thiserror::Error)]
pub enum GroupError {
    /// The Raft storage cannot be read or written.
    #[error("{path}: {}{}", source, remedy(source), path = path.display())]
    Storage { path: PathBuf, source: StorageError },
    /// The founding proposal's file cannot be used.
    #[error(transparent)]
    FoundingProposal(#[from] ProposalError),
    #[error(transparent)]
    Core(#[from] CoreError),
    /// The founders do not fit into a frame.
    #[error(transparent)]
    Codec(#[from] CodecError),
}

fn remedy(error: &StorageError) -> &'static str {
    match error {
        StorageError::Full => "; make room, or raise the exceeded limit, and start again",
        StorageError::Damaged { .. } => {
            "; in a group, start with an empty data directory and add the coordinator again; alone, restore the directory \
            or start with an empty one"
        }
        StorageError::Unknown { .. } => "; start the version that wrote it, or a later one",
        StorageError::Foreign { .. } => "; name this coordinator's own data directory",
        StorageError::Disk(_) | StorageError::Unwritable(_) | StorageError::Format { .. } => "",
    }
}

/// Why a change was not made, or may not have been made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    /// No majority agreed in time. The change may still be applied later.
    #[error("no majority of the coordinators has agreed in time")]
    NoQuorum,
    /// The table refused the change.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The group's state rules the change out. The text names the remedy.
    #[error("{0}")]
    Explained(String),
}

/// The configured part of a group.
#[derive(Debug, Clone, Copy)]
pub struct GroupConfig<'a> {
    /// Directory for what the group agreed on. `None`: this coordinator is in no group.
    pub data_dir: Option<&'a Path>,
    /// All coordinators of the group, with or without this one. Empty: a group of one.
    pub peers: &'a [PeerEntry],
}

/// This coordinator's participation in its group.
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
    access: Arc<dyn AccessControl>,
    metrics: RaftMetrics,
    /// Set once there is a group.
    member: OnceLock<Member>,
    driver: Mutex<Option<Driver>>,
    /// This coordinator's seat, once its incarnation is known.
    seat: OnceLock<GroupMember>,
    /// A member has reported that this incarnation was removed. A coordinator that was away at the time
    /// cannot learn this from its own log. Not persisted: members report it again after a restart.
    removed: AtomicBool,
    /// The Raft storage was damaged and put aside: this coordinator founds no group and sends rejoin requests.
    lost: bool,
    latest: Mutex<LatestNews>,
    /// The settings that must be equal on all coordinators.
    settings: OwnSettings,
    compared: Mutex<Compared>,
    identity: Identity,
    /// Notified when news arrives that a founder waits for.
    news: Notify,
    /// Notified when a worker has joined here.
    joined: Notify,
    /// Held while a table is applied, so that an older table never overwrites a newer one.
    applying: Mutex<()>,
    /// Serializes operators' changes.
    operators: tokio::sync::Mutex<Option<Session>>,
    /// Serializes membership changes; used on the leader.
    members: tokio::sync::Mutex<Option<Session>>,
    /// Serializes replica plans; used on the leader.
    replicas: tokio::sync::Mutex<Option<Session>>,
    /// Orders sent to the leader, by number, that wait for a reply.
    pending_orders: Mutex<HashMap<u64, oneshot::Sender<MemberReply>>>,
    /// Orders received from other coordinators.
    orders: mpsc::Sender<(NodeId, u64, MemberRequest)>,
}

#[derive(Debug)]
struct Member {
    group: GroupId,
    handle: Handle,
}

/// An initialized disk without a group.
struct Blank {
    disk: Disk,
    file: ProposalFile,
    founding: Founding,
}

impl Agreement {
    /// Joins or founds the group, inside the current tokio runtime. `None` without a data directory: changes
    /// then last until the process ends and hold on this coordinator only.
    pub fn start(
        config: GroupConfig<'_>,
        endpoint: &Arc<Endpoint>,
        dispatch: Arc<Dispatch>,
        access: Arc<dyn AccessControl>,
        metrics: RaftMetrics,
        settings: OwnSettings,
        identity: &Identity,
    ) -> Result<Option<Arc<Self>>, GroupError> {
        let Some(directory) = config.data_dir else { return Ok(None) };
        let node = endpoint.name().node.clone();
        let (own, others): (Vec<_>, Vec<_>) =
            config.peers.iter().cloned().partition(|peer| peer.node == node);
        let path = directory.join(CONSENSUS_FILE);
        let at = |source| GroupError::Storage { path: path.clone(), source };
        let (disk, loaded) = match Disk::open(&path, &node) {
            // The other coordinators have all data. What is left here must not vote, so it is treated as
            // wiped.
            Err(error @ StorageError::Damaged { .. }) if !others.is_empty() => {
                tracing::error!(%error, "the Raft log on this disk is damaged; it is set aside, and this coordinator gets the table from the others");
                Disk::put_aside(&path).map_err(at)?;
                Disk::open(&path, &node).map_err(at)?
            }
            opened => opened.map_err(at)?,
        };
        let lost = Disk::was_put_aside(&path);
        let file = ProposalFile(directory.join("founding"));
        let (orders, received_orders) = mpsc::channel(MAX_ORDERS);
        let shared = Arc::new(Shared {
            node: node.clone(),
            dispatch,
            access,
            metrics,
            member: OnceLock::new(),
            driver: Mutex::new(None),
            seat: OnceLock::new(),
            removed: AtomicBool::new(false),
            lost,
            latest: Mutex::default(),
            settings,
            compared: Mutex::default(),
            identity: identity.clone(),
            news: Notify::new(),
            joined: Notify::new(),
            applying: Mutex::new(()),
            operators: tokio::sync::Mutex::new(None),
            members: tokio::sync::Mutex::new(None),
            replicas: tokio::sync::Mutex::new(None),
            pending_orders: Mutex::default(),
            orders,
        });
        let receiver = Arc::clone(&shared);
        let deliver = Arc::new(move |peer: &NodeId, message| receiver.on_message(peer, message));
        let mesh = Mesh::start(endpoint, &others, &shared.dispatch, deliver);
        let mesh = Arc::new(mesh);
        let at = own.first().map_or_else(|| endpoint.address().to_string(), |own| own.quic.clone());
        let mut blank = match loaded {
            Some(loaded) => {
                file.forget()?;
                let incarnation = loaded.identity.incarnation;
                let _first = shared.seat.set(GroupMember { node, incarnation, quic: at, level: Level::OWN });
                shared.start_raft(loaded, disk, &mesh)?;
                None
            }
            None => {
                let proposal = file.load_or_create(&node, &at)?;
                let _first = shared.seat.set(GroupMember { level: Level::OWN, ..proposal.seat.clone() });
                let others = others.iter().map(|peer| peer.node.clone());
                Some(Blank { disk, file, founding: Founding::new(proposal, others) })
            }
        };
        if let Some(waiting) = blank.take() {
            blank = shared.found(waiting, &mesh)?;
        }
        let tasks = vec![
            tokio::spawn(Arc::clone(&shared).report_status(blank, Arc::clone(&mesh))),
            tokio::spawn(Arc::clone(&shared).follow(Arc::clone(&mesh))),
            tokio::spawn(Arc::clone(&shared).serve_orders(Arc::clone(&mesh), received_orders)),
            tokio::spawn(Arc::clone(&shared).settle_keys()),
        ];
        Ok(Some(Arc::new(Self { shared, mesh, tasks, started: Instant::now() })))
    }

    /// Takes a connection that another coordinator has dialed.
    pub fn accepted(&self, connection: Connection) {
        self.mesh.accepted(connection);
    }

    /// Drains a worker, or ends its drain, at every coordinator and across restarts.
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

    /// The committed epoch of a worker, if it is later than `epoch`.
    pub fn newer_epoch(&self, node: &NodeId, epoch: Epoch) -> Option<Epoch> {
        let committed = self.shared.table()?.workers().worker(node)?.epoch;
        (committed > epoch).then_some(committed)
    }

    /// A worker has joined here: applies its committed drain state, and proposes its epoch.
    pub fn joined(&self) {
        self.shared.apply();
        self.shared.joined.notify_one();
    }

    /// The settings on which the coordinators disagree.
    pub fn differences(&self) -> Vec<Difference> {
        self.shared.compared.lock().differences(&self.shared.node)
    }

    /// Names of the settings that keep this coordinator from serving because they differ; `None` if there are
    /// none.
    pub fn odd_settings(&self) -> Option<String> {
        let differences = self.differences();
        let odd = differences.iter().filter(|difference| difference.own && difference.binding);
        let odd: Vec<&str> = odd.map(|difference| difference.setting.as_str()).collect();
        (!odd.is_empty()).then(|| odd.join(", "))
    }

    /// Waits until the other coordinators have sent their settings, at most 2 s after the start. A worker
    /// uses the cluster key of the first coordinator that accepts it, so that key must be the right one.
    pub async fn settings_compared(&self) {
        while self.started.elapsed() < COMPARE_LIMIT
            && !self.shared.compared.lock().has_all(&self.mesh.peers())
        {
            tokio::time::sleep(COMPARE_EVERY).await;
        }
    }

    /// Expiry of a coordinator's certificate in Unix seconds; `None` if not reported.
    pub fn certificate_ends(&self, node: &NodeId) -> Option<i64> {
        self.shared.compared.lock().certificate_ends(node)
    }

    /// The status of each coordinator, this one first.
    pub fn standings(&self) -> Vec<Standing> {
        let latest = self.shared.latest.lock();
        let peers = self.mesh.peers().into_iter().map(|node| latest.standing(&node));
        std::iter::once(self.shared.own()).chain(peers).collect()
    }

    /// Transfers leadership if leader, and leaves the consensus.
    pub async fn stop(&self) {
        let driver = self.shared.driver.lock().take();
        if let Some(driver) = driver {
            // The driver ends within the limit; a panic of its thread is logged there.
            let _ended = tokio::task::spawn_blocking(move || driver.stop(HAND_OVER_LIMIT)).await;
        }
    }
}

impl Drop for Agreement {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

/// Sends Raft frames through the mesh.
struct ByMesh(Arc<Mesh>, Weak<Shared>);

impl Network for ByMesh {
    fn send(&self, outbound: Outbound) {
        if self.1.upgrade().is_some_and(|shared| shared.keeps_whole(&outbound.to)) {
            self.0.send(&outbound.to, GroupMessage::Raft(outbound.frame));
        }
    }
}

impl Shared {
    fn on_message(&self, peer: &NodeId, message: GroupMessage) {
        match message {
            GroupMessage::Raft(frame) => {
                // Without a group, the frame is for an earlier incarnation of this disk.
                if let Some(member) = self.member.get() {
                    member.handle.receive(peer.clone(), frame);
                }
            }
            GroupMessage::News(news) => {
                self.latest.lock().news(peer, news);
                self.news.notify_one();
            }
            GroupMessage::Seat(seat) => self.latest.lock().seat(peer, seat),
            GroupMessage::Removed(incarnation) => self.on_removed(peer, incarnation),
            GroupMessage::Settings(settings) => self.compared.lock().insert(peer, settings),
            GroupMessage::Spending(spending) => self.access.spent_elsewhere(peer, &spending),
            GroupMessage::UsageVersions(versions) => self.dispatch.usage().peer_knows(peer, versions),
            GroupMessage::UsageRows(rows) => self.dispatch.usage().merge(rows),
            GroupMessage::Outcomes(report) => self.dispatch.outcomes().reported(peer, report),
            GroupMessage::Waiting(report) => self.dispatch.waiting_elsewhere(peer, report),
            GroupMessage::MemberRequest(number, order) => {
                let _lost = self.orders.try_send((peer.clone(), number, order));
            }
            GroupMessage::MemberReply(number, answer) => {
                if let Some(reply) = self.pending_orders.lock().remove(&number) {
                    let _gone = reply.send(answer);
                }
            }
        }
    }

    /// Whether a peer's build knows everything that is in the table. An earlier build, such as one that was away when
    /// its group was upgraded, would skip what it does not know.
    fn keeps_whole(&self, peer: &NodeId) -> bool {
        let used = self.table().map_or(Level(1), |table| table.used_level());
        if used <= Level(1) {
            return true;
        }
        let reported = self.latest.lock().seat_of(peer).map(|seat| seat.level);
        if let Some(level) = reported.filter(|level| *level < used)
            && let Some(left_out) = TOO_OLD.due(peer.clone())
        {
            let (level, used) = (level.0, used.0);
            tracing::error!(%peer, level, used, left_out, "a coordinator of an earlier version gets no log entries: start this version there");
        }
        reported.is_some_and(|level| level >= used)
    }

    /// Starts Raft with the state of the disk.
    fn start_raft(self: &Arc<Self>, loaded: Loaded, disk: Disk, mesh: &Arc<Mesh>) -> Result<(), CoreError> {
        let group = loaded.identity.group;
        let network = ByMesh(Arc::clone(mesh), Arc::downgrade(self));
        let on_fatal = Box::new(driver::abort);
        let (settings, metrics) = (Settings::default(), self.metrics.clone());
        let driver = Driver::start(settings, TICK, loaded, Box::new(disk), network, metrics, on_fatal)?;
        let _first = self.member.set(Member { group, handle: driver.handle() });
        *self.driver.lock() = Some(driver);
        // Wakes `follow`, which waits for the member.
        self.joined.notify_one();
        Ok(())
    }

    /// Joins or founds the group if all required news has arrived; otherwise returns the disk.
    fn found(self: &Arc<Self>, mut blank: Blank, mesh: &Arc<Mesh>) -> Result<Option<Blank>, GroupError> {
        let mut group = None;
        for (peer, news) in self.latest.lock().all_news() {
            match news {
                News::FoundingProposal(proposal) => blank.founding.add_proposal(peer, proposal.clone()),
                News::Member(member) => group = Some(member.group),
            }
        }
        let loaded = match group {
            Some(group) => Some(blank.founding.found_by_another(group)?),
            // A group exists; a coordinator that lost its data must not found another one.
            None if self.lost => None,
            None => {
                if blank.founding.agree() {
                    blank.file.save(blank.founding.proposal())?;
                }
                blank.founding.founded()?
            }
        };
        let Some(loaded) = loaded else { return Ok(Some(blank)) };
        tracing::info!(group = %format_args!("{:032x}", loaded.identity.group.0), "joined the coordinators' group");
        let path = blank.file.0.with_file_name(CONSENSUS_FILE);
        blank.disk.format(&loaded).map_err(|source| GroupError::Storage { path, source })?;
        blank.file.forget()?;
        self.start_raft(loaded, blank.disk, mesh)?;
        Ok(None)
    }

    /// Sends status messages to the peers, and founds the group with them if there is none.
    async fn report_status(self: Arc<Self>, mut blank: Option<Blank>, mesh: Arc<Mesh>) {
        let mut outside = false;
        loop {
            if let Some(waiting) = blank.take() {
                blank = match self.found(waiting, &mesh) {
                    Ok(blank) => blank,
                    Err(error) => {
                        // The content of the disk is unknown, as after a failed write of the log.
                        tracing::error!(%error, "cannot found the coordinators' group; the process ends");
                        proto::log::flush();
                        std::process::abort();
                    }
                };
            }
            let news = match (&blank, self.member.get()) {
                (Some(blank), _) => Some(News::FoundingProposal(blank.founding.proposal().clone())),
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
                self.request_rejoin(&mesh);
            }
            let spending = self.access.spending();
            let peers = mesh.peers();
            let settings = self.compare(&peers);
            let versions = self.dispatch.usage().versions();
            let outcomes = self.dispatch.outcomes().report();
            let waiting = self.dispatch.waiting_report();
            for peer in peers {
                mesh.send(&peer, GroupMessage::Settings(settings.clone()));
                mesh.send(&peer, GroupMessage::UsageVersions(versions.clone()));
                mesh.send(&peer, GroupMessage::Outcomes(outcomes.clone()));
                mesh.send(&peer, GroupMessage::Waiting(waiting.clone()));
                let rows = self.dispatch.usage().rows_for(&peer);
                if !rows.is_empty() {
                    mesh.send(&peer, GroupMessage::UsageRows(rows));
                }
                spending
                    .iter()
                    .for_each(|spending| mesh.send(&peer, GroupMessage::Spending(spending.clone())));
                if let Some(incarnation) = self.removed_incarnation(&peer) {
                    mesh.send(&peer, GroupMessage::Removed(incarnation));
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

    /// Applies each new table, and proposes what is seen here and missing in the table.
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
            // One proposer is enough: the leader.
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

    /// After the first linearizable read, keys that are not in the table are invalid.
    async fn settle_keys(self: Arc<Self>) {
        loop {
            if let Some(Member { handle, .. }) = self.member.get()
                && handle.read(Instant::now() + CHANGE_LIMIT).await.is_ok()
            {
                self.apply();
                return self.access.settle();
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
            self.access.agree(table.access());
        }
    }

    /// Compares settings with the peers, logs differences, and returns the message to send.
    fn compare(&self, peers: &[NodeId]) -> SettingDigests {
        let ends = self.identity.validities().map_or(0, |validities| validities.node.ends);
        let own = self.settings.digests(ends, &[]);
        let mut compared = self.compared.lock();
        compared.keep(peers, &self.node);
        compared.insert(&self.node, own);
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
                    "{setting} differs from the other coordinators: this one is not ready and refuses workers until they are equal"
                ),
                (false, true) => tracing::error!(
                    nodes,
                    setting,
                    left_out,
                    "{setting} of {nodes} differs from the other coordinators"
                ),
                (_, false) => tracing::warn!(
                    nodes,
                    setting,
                    left_out,
                    "the list of {setting} of {nodes} differs from the other coordinators"
                ),
            }
        }
        drop(compared);
        if must_not_serve {
            self.dispatch
                .remove_idle_workers("a setting of this coordinator differs from the other coordinators");
        }
        self.settings.digests(ends, &odd_here)
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
