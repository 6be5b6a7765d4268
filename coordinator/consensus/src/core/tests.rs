use super::*;
use crate::member::{Incarnation, MemberId};
use crate::message::{
    EntryBody, GroupId, RaftMessage, RaftMessageKind, SnapshotChunk, SnapshotMeta, SnapshotOffer,
    SnapshotRequest,
};
use crate::table::{
    Change, ClientId, GroupMember, LevelReported, OpenSession, Outcome, PolicyAdvanced, Standing,
};
use proptest::prelude::*;

const GROUP: GroupId = GroupId(9);

fn node(name: &str) -> NodeId {
    NodeId::new(name).unwrap()
}

fn identity(name: &str, incarnation: u64) -> Identity {
    Identity { group: GROUP, node: node(name), incarnation: Incarnation(incarnation) }
}

fn seat(name: &str, incarnation: u64) -> GroupMember {
    let level = super::super::table::Level::OWN;
    GroupMember { node: node(name), incarnation: Incarnation(incarnation), quic: "127.0.0.1:1".into(), level }
}

fn settings() -> Settings {
    Settings { snapshot_after: 20, keep_entries: 5, chunk_bytes: 64, ..Settings::default() }
}

fn founder(name: &str, all: &[&str]) -> Core {
    let seats = all.iter().map(|name| seat(name, 1)).collect();
    let loaded = Loaded::founded(identity(name, 1), seats).unwrap();
    Core::start(settings(), loaded, 1).unwrap()
}

/// A group on a perfect network and perfect disks.
struct Group {
    cores: BTreeMap<NodeId, Core>,
    answers: Vec<(NodeId, ProposalResult)>,
    reads: Vec<(NodeId, u64)>,
    refused: Vec<ReceiveError>,
    cut: Option<NodeId>,
}

impl Group {
    fn new(names: &[&str]) -> Self {
        let cores = names.iter().map(|name| (node(name), founder(name, names))).collect();
        Self { cores, answers: Vec::new(), reads: Vec::new(), refused: Vec::new(), cut: None }
    }

    fn settle(&mut self) {
        loop {
            let mut sent = Vec::new();
            for (name, core) in &mut self.cores {
                while let Some(mut batch) = core.batch().unwrap() {
                    sent.extend(batch.early().into_iter().map(|out| (name.clone(), out)));
                    let done = batch.persisted().unwrap();
                    sent.extend(done.send.into_iter().map(|out| (name.clone(), out)));
                    self.answers.extend(done.answers.into_iter().map(|a| (name.clone(), a)));
                    self.reads.extend(done.reads.into_iter().map(|token| (name.clone(), token)));
                }
            }
            if sent.is_empty() {
                return;
            }
            for (from, Outbound { to, frame }) in sent {
                if [&from, &to].into_iter().any(|end| Some(end) == self.cut.as_ref()) {
                    continue;
                }
                let frame = Frame::from_bytes(&frame.to_bytes().unwrap()).unwrap();
                if let Some(core) = self.cores.get_mut(&to) {
                    self.refused.extend(core.receive(&from, frame).err());
                }
            }
        }
    }

    fn tick(&mut self, times: usize) {
        for _ in 0..times {
            self.cores.values_mut().for_each(Core::tick);
            self.settle();
        }
    }

    fn leader(&mut self) -> NodeId {
        for _ in 0..100 {
            self.tick(1);
            let leads = |(_, core): &(&NodeId, &Core)| core.status().role == RaftRole::Leader;
            if let Some((name, _)) = self.cores.iter().find(leads) {
                return name.clone();
            }
        }
        panic!("nobody leads")
    }

    fn core(&mut self, name: &NodeId) -> &mut Core {
        self.cores.get_mut(name).unwrap()
    }

    fn propose(&mut self, at: &NodeId, entry: &Entry) -> Outcome {
        self.answers.clear();
        self.core(at).propose(entry).unwrap();
        self.settle();
        self.answers.iter().find(|(name, _)| name == at).map(|(_, a)| a.outcome.clone()).unwrap()
    }

    fn session(&mut self, at: &NodeId) -> ClientId {
        match self.propose(at, &Entry::OpenSession(OpenSession { nonce: 1 })) {
            Outcome::Opened(client) => client,
            other => panic!("{other:?}"),
        }
    }
}

fn policy(client: ClientId, seq: u64) -> Entry {
    change(client, seq, Change::PolicyAdvanced(PolicyAdvanced { from: seq - 1, to: seq }))
}

fn change(client: ClientId, seq: u64, change: Change) -> Entry {
    Entry::Change(SessionChange { client, seq, change })
}

#[test]
fn a_group_of_one_leads_at_once() {
    let mut group = Group::new(&["c0"]);
    group.settle();
    let name = node("c0");
    assert_eq!(group.core(&name).status().role, RaftRole::Leader);
    let client = group.session(&name);
    assert_eq!(group.propose(&name, &policy(client, 1)), Outcome::Done);
    group.core(&name).read_index(5).unwrap();
    group.settle();
    assert_eq!(group.reads, [(name, 5)]);
}

#[test]
fn any_member_takes_changes_and_reads_and_all_tables_are_equal() {
    let mut group = Group::new(&["c0", "c1", "c2"]);
    let leader = group.leader();
    let follower = group.cores.keys().find(|name| **name != leader).unwrap().clone();
    let client = group.session(&follower);
    assert_eq!(group.propose(&follower, &policy(client, 1)), Outcome::Done);
    group.core(&follower).read_index(7).unwrap();
    group.settle();
    assert_eq!(group.reads, [(follower, 7)]);
    let tables: Vec<Table> = group.cores.values().map(|core| Table::clone(core.table())).collect();
    assert!(tables.iter().all(|table| *table == tables[0] && table.policy() == 1));
}

#[test]
fn a_newcomer_gets_the_table_in_chunks_and_becomes_a_voter() {
    let mut group = Group::new(&["c0"]);
    group.settle();
    let name = node("c0");
    let client = group.session(&name);
    let newcomer = node("late");
    let joining = Core::start(settings(), Loaded::joining(identity("late", 4)), 2).unwrap();
    group.cores.insert(newcomer.clone(), joining);
    assert_eq!(group.core(&newcomer).status().role, RaftRole::Outsider);
    let add = change(client, 1, Change::LearnerAdded(seat("late", 4)));
    assert_eq!(group.propose(&name, &add), Outcome::Done);
    group.tick(10);
    assert_eq!(group.core(&newcomer).status().role, RaftRole::Learner);
    assert_eq!(
        group.propose(&name, &change(client, 2, Change::LearnerPromoted(newcomer.clone()))),
        Outcome::Done
    );
    group.tick(5);
    assert_eq!(group.core(&newcomer).status().role, RaftRole::Follower);
    // The leader must transfer leadership before it is removed.
    let go = change(client, 3, Change::CoordinatorRemoved(name.clone()));
    assert_eq!(group.core(&name).propose(&go), Err(ProposeError::LeaderStays));
    group.core(&name).transfer_leadership(None).unwrap();
    group.settle();
    assert_eq!(group.leader(), newcomer);
    assert_eq!(group.propose(&newcomer, &go), Outcome::Done);
    group.tick(5);
    assert_eq!(group.core(&newcomer).status().role, RaftRole::Leader);
    assert_eq!(group.refused, []);
}

#[test]
fn a_member_that_was_away_for_long_catches_up_by_a_snapshot() {
    let mut group = Group::new(&["c0", "c1", "c2"]);
    let leader = group.leader();
    let away = group.cores.keys().find(|name| **name != leader).unwrap().clone();
    let client = group.session(&leader);
    group.cut = Some(away.clone());
    for seq in 1..=60 {
        assert_eq!(group.propose(&leader, &policy(client, seq)), Outcome::Done);
    }
    assert!(group.core(&leader).entries().count() < 40, "the log is cut");
    group.cut = None;
    group.tick(60);
    assert_eq!(group.core(&away).table().policy(), 60);
    assert_eq!(group.leader(), leader, "who was away does not force an election");
}

#[test]
fn a_wiped_coordinator_has_no_vote_until_it_is_added_again() {
    let mut group = Group::new(&["c0", "c1", "c2"]);
    let leader = group.leader();
    let wiped = group.cores.keys().find(|name| **name != leader).unwrap().clone();
    let reborn = Core::start(settings(), Loaded::joining(identity(wiped.as_str(), 2)), 3).unwrap();
    group.cores.insert(wiped.clone(), reborn);
    group.tick(50);
    let status = group.core(&wiped).status();
    assert_eq!(
        (status.role, status.term),
        (RaftRole::Outsider, 0),
        "it hears nothing, so it votes for nobody"
    );
    let not_for_me = |error: &ReceiveError| matches!(error, ReceiveError::NotForMe { .. });
    assert!(!group.refused.is_empty() && group.refused.iter().all(not_for_me));
    let client = group.session(&leader);
    let add = |seq, incarnation| change(client, seq, Change::LearnerAdded(seat(wiped.as_str(), incarnation)));
    let refusal = ProposeError::Refused(Refusal::AnotherLife(Incarnation(1)));
    assert_eq!(group.core(&leader).propose(&add(1, 2)), Err(refusal));
    let remove = change(client, 2, Change::CoordinatorRemoved(wiped.clone()));
    assert_eq!(group.propose(&leader, &remove), Outcome::Done);
    assert_eq!(group.propose(&leader, &add(3, 2)), Outcome::Done);
    group.tick(10);
    assert_eq!(group.core(&wiped).status().role, RaftRole::Learner);
}

#[test]
fn a_change_above_a_members_level_is_not_proposed() {
    let mut old = seat("c0", 1);
    old.level = super::super::table::Level(0);
    let loaded = Loaded::founded(identity("c0", 1), vec![old]).unwrap();
    let core = Core::start(settings(), loaded, 1).unwrap();
    let mut group = Group::new(&[]);
    let name = node("c0");
    group.cores.insert(name.clone(), core);
    group.settle();
    let client = group.session(&name);
    let refused = group.core(&name).propose(&policy(client, 1));
    let level = super::super::table::Level(0);
    assert_eq!(refused, Err(ProposeError::Refused(Refusal::LevelTooLow(level))));
    let level = super::super::table::Level::OWN;
    let report = Change::LevelReported(LevelReported { node: name.clone(), level });
    assert_eq!(group.propose(&name, &change(client, 2, report)), Outcome::Done);
    assert_eq!(group.propose(&name, &policy(client, 3)), Outcome::Refused(Refusal::PolicyMoved(0)));
}

/// A heartbeat from c1, to be modified.
fn heartbeat(core: &Core) -> Frame {
    let message = RaftMessage {
        kind: RaftMessageKind::Heartbeat,
        to: core.id(),
        from: MemberId::of(&node("c1"), Incarnation(1)).get(),
        term: 2,
        log_term: 0,
        index: 0,
        entries: Vec::new(),
        commit: 0,
        commit_term: 0,
        request_snapshot: 0,
        reject: false,
        reject_hint: 0,
        context: Vec::new(),
        priority: 0,
    };
    let to = core.identity.member();
    Frame { group: GROUP, incarnation: Incarnation(1), to, body: Body::Raft(message) }
}

#[test]
fn a_spoofed_sender_is_rejected() {
    let mut core = founder("c0", &["c0", "c1", "c2"]);
    let good = heartbeat(&core);
    core.receive(&node("c1"), good.clone()).unwrap();
    let refused = core.receive(&node("c2"), good.clone());
    assert!(matches!(refused, Err(ReceiveError::Spoofed { peer, .. }) if peer == node("c2")));
    // Another incarnation of the same coordinator is another member.
    let other = Frame { incarnation: Incarnation(2), ..good.clone() };
    let refused = core.receive(&node("c1"), other);
    assert!(matches!(refused, Err(ReceiveError::Spoofed { .. })));
    let foreign = Frame { group: GroupId(1), ..good.clone() };
    let refused = core.receive(&node("c1"), foreign);
    assert_eq!(refused, Err(ReceiveError::ForeignGroup(node("c1"))));
    let astray = Frame { to: MemberId::of(&node("c0"), Incarnation(7)), ..good };
    let refused = core.receive(&node("c1"), astray);
    assert!(matches!(refused, Err(ReceiveError::NotForMe { .. })));
}

/// Found by the simulator (seed 2765 at the time). A leader sends entries before its own disk has them. After
/// a crash in the same term it receives answers about entries that it has lost. It is no longer leader; the
/// current leader has lost nothing.
#[test]
fn an_answer_about_lost_entries_is_accepted_by_a_follower() {
    let taken = |core: &Core| {
        let mut frame = heartbeat(core);
        if let Body::Raft(message) = &mut frame.body {
            (message.kind, message.term, message.index) =
                (RaftMessageKind::AppendResponse, core.status().term, 40);
        }
        frame
    };
    let seats = ["c0", "c1", "c2"].map(|name| seat(name, 1)).to_vec();
    let mut loaded = Loaded::founded(identity("c0", 1), seats).unwrap();
    loaded.hard.term = 2;
    loaded.hard.vote = loaded.identity.member().get();
    let mut crashed = Core::start(settings(), loaded, 1).unwrap();
    assert_eq!(crashed.status().role, RaftRole::Follower);
    let answer = taken(&crashed);
    assert_eq!(crashed.receive(&node("c1"), answer), Ok(()));

    let mut group = Group::new(&["c0", "c1", "c2"]);
    while group.leader() != node("c0") {
        let leads = group.leader();
        group.core(&leads).transfer_leadership(Some(&node("c0"))).unwrap();
        group.settle();
    }
    let leader = group.core(&node("c0"));
    let answer = taken(leader);
    let refused = leader.receive(&node("c1"), answer);
    assert!(matches!(refused, Err(ReceiveError::Implausible { .. })), "{refused:?}");
}

/// Found by `no_frame_makes_it_panic`: Raft reads term 0 as a match for a missing entry and commits past its
/// log.
#[test]
fn an_append_after_a_missing_entry_is_refused() {
    let mut core = founder("c0", &["c0", "c1", "c2"]);
    let mut frame = heartbeat(&core);
    if let Body::Raft(message) = &mut frame.body {
        (message.kind, message.index, message.commit) = (RaftMessageKind::Append, 3, 3);
    }
    let refused = core.receive(&node("c1"), frame);
    assert!(matches!(refused, Err(ReceiveError::Implausible { .. })), "{refused:?}");
}

/// Found by the simulator (seed 7 at the time). A follower that is mistaken for the leader forwards a read to
/// the leader in the original sender's name. The leader would take that for a forged sender.
#[test]
fn forwarded_frames_in_anothers_name_are_dropped() {
    let mut group = Group::new(&["c0", "c1", "c2"]);
    let leader = group.leader();
    let mut followers = group.cores.keys().filter(|name| **name != leader).cloned();
    let (forwarder, requester) = (followers.next().unwrap(), followers.next().unwrap());
    drop(followers);
    let core = group.core(&forwarder);
    let mut frame = heartbeat(core);
    if let Body::Raft(message) = &mut frame.body {
        message.from = MemberId::of(&requester, Incarnation(1)).get();
        (message.kind, message.term) = (RaftMessageKind::ReadIndex, 0);
        message.entries = vec![LogEntry { term: 0, index: 0, body: EntryBody::Plain(vec![1; 16]) }];
    }
    core.receive(&requester, frame).unwrap();
    group.settle();
    assert_eq!(group.refused, []);
}

fn any_message() -> impl Strategy<Value = RaftMessage> {
    use RaftMessageKind::*;
    let kinds = vec![
        Propose,
        Append,
        AppendResponse,
        RequestVote,
        RequestVoteResponse,
        Heartbeat,
        HeartbeatResponse,
        TimeoutNow,
        ReadIndex,
        ReadIndexResponse,
        RequestPreVote,
        RequestPreVoteResponse,
        Snapshot,
    ];
    let body = prop_oneof![
        prop::collection::vec(any::<u8>(), 0..12).prop_map(EntryBody::Plain),
        prop::collection::vec(any::<u8>(), 0..12).prop_map(EntryBody::Membership),
    ];
    let small = || prop_oneof![4 => 0u64..6, 1 => any::<u64>()];
    let entry = (0u64..4, small(), body).prop_map(|(term, index, body)| LogEntry { term, index, body });
    let numbers = (small(), small(), small(), small(), small(), small());
    let rest = (any::<bool>(), prop::collection::vec(any::<u8>(), 0..20), any::<i64>());
    (prop::sample::select(kinds), 0u64..4, prop::collection::vec(entry, 0..3), numbers, rest).prop_map(
        |(kind, term, entries, n, (reject, context, priority))| RaftMessage {
            kind,
            to: 0,
            from: 0,
            term,
            log_term: n.0 % 4,
            index: n.1,
            entries,
            commit: n.2,
            commit_term: n.3 % 4,
            request_snapshot: n.4,
            reject,
            reject_hint: n.5,
            context,
            priority,
        },
    )
}

fn any_body() -> impl Strategy<Value = Body> {
    let digest = || prop::sample::select(vec![[0; 32], [1; 32]]);
    let bytes = prop::collection::vec(any::<u8>(), 0..8);
    let ids = || prop::collection::vec(0u64..4, 0..3);
    let meta = (0u64..4, 0u64..4, ids(), ids()).prop_map(|(index, term, voters, learners)| SnapshotMeta {
        index,
        term,
        voters,
        learners,
    });
    prop_oneof![
        6 => any_message().prop_map(Body::Raft),
        1 => (any_message(), meta, 0u64..9, digest())
            .prop_map(|(message, meta, len, digest)| Body::Offer(SnapshotOffer { message, meta, len, digest })),
        1 => (digest(), 0u64..9).prop_map(|(digest, offset)| Body::Want(SnapshotRequest { digest, offset })),
        1 => (digest(), 0u64..9, bytes)
            .prop_map(|(digest, offset, bytes)| Body::Chunk(SnapshotChunk { digest, offset, bytes })),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Any frames in any order cause an error or nothing, but never a panic, and committed entries stay.
    #[test]
    fn no_frame_makes_it_panic(bodies in prop::collection::vec((any_body(), 0u8..3), 1..25), lead in any::<bool>()) {
        let mut group = Group::new(&["c0", "c1", "c2"]);
        group.leader();
        let own = group.cores.values().find(|core| (core.status().role == RaftRole::Leader) == lead);
        let own = own.unwrap().identity.node.clone();
        let peers: Vec<NodeId> = group.cores.keys().filter(|name| **name != own).cloned().collect();
        let core = group.core(&own);
        for (mut body, ticks) in bodies {
            let peer = &peers[usize::from(ticks) % 2];
            let from = MemberId::of(peer, Incarnation(1));
            if let Body::Raft(message) | Body::Offer(SnapshotOffer { message, .. }) = &mut body {
                (message.from, message.to) = (from.get(), core.id());
            }
            let to = core.identity.member();
            let frame = Frame { group: GROUP, incarnation: Incarnation(1), to, body };
            let before = core.table().applied();
            let _judged = core.receive(peer, frame);
            for _ in 0..ticks {
                core.tick();
            }
            while let Some(batch) = core.batch().unwrap() {
                batch.persisted().unwrap();
            }
            prop_assert!(core.table().applied() >= before);
        }
        let voters = core.table().coordinators().values().filter(|s| matches!(s, Standing::Voter(_))).count();
        prop_assert!(voters >= 1);
    }
}
