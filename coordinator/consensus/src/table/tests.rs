use super::*;
use proptest::prelude::*;
use proto::block::TenantSalt;
use proto::ids::{Epoch, TenantId};
use proto::served_model::{ModelTask, ServedModel};
use proto::worker::WorkerInfo;
use router::table::roster::WorkerStanding;

mod deployments;
mod nodes;

const GOLDEN: &str = include_str!("golden.txt");

fn node(name: &str) -> NodeId {
    NodeId::new(name).unwrap()
}

fn worker_info(name: &str, epoch: u64, digest: u8) -> WorkerInfo {
    let model = ServedModel {
        id: ModelId::new("m").unwrap(),
        model_digest: [digest; 32],
        tokenizer_digest: [1; 32],
        max_model_len: 4096,
        layers: (0, 4),
        engine: "kvasir".into(),
        hit_tokens: 16,
        numeric_class: "test".into(),
        block_tokens: 16,
        task: ModelTask::Generate,
    };
    WorkerInfo {
        node: node(name),
        epoch: Epoch(epoch),
        pid: 1,
        quic: "127.0.0.1:1".into(),
        ops: "127.0.0.1:2".into(),
        models: vec![model],
    }
}

fn seat(name: &str, incarnation: u64) -> GroupMember {
    GroupMember {
        node: node(name),
        incarnation: Incarnation(incarnation),
        quic: "127.0.0.1:1".into(),
        level: Level(1),
    }
}

fn genesis() -> Table {
    Table::genesis(1, ["c0", "c1", "c2"].map(|name| seat(name, 1)))
}

/// A client's session on a table.
struct Client {
    table: Table,
    id: ClientId,
    seq: u64,
}

impl Client {
    fn new() -> Self {
        let mut table = genesis();
        let id = open(&mut table, 7);
        Self { table, id, seq: 0 }
    }

    fn make(&mut self, change: Change) -> Applied {
        self.seq += 1;
        apply_change(&mut self.table, self.id, self.seq, change)
    }

    fn done(&mut self, change: Change) -> Option<Membership> {
        let applied = self.make(change);
        assert_eq!(applied.outcome, Outcome::Done);
        applied.membership
    }

    fn refused(&mut self, change: Change) -> Refusal {
        let before = self.table.clone();
        let Outcome::Refused(refusal) = self.make(change).outcome else { panic!("not refused") };
        let mut after = self.table.clone();
        (after.applied, after.sessions) = (before.applied, before.sessions.clone());
        assert_eq!(after, before, "{refusal:?} has changed something");
        refusal
    }
}

fn apply(table: &mut Table, entry: &Entry, membership: bool) -> Applied {
    let bytes = encode_entry(entry).unwrap();
    table.apply(table.applied() + 1, &bytes, membership)
}

fn apply_change(table: &mut Table, client: ClientId, seq: u64, change: Change) -> Applied {
    let membership = change.is_membership();
    apply(table, &Entry::Change(SessionChange { client, seq, change }), membership)
}

fn open(table: &mut Table, nonce: u64) -> ClientId {
    match apply(table, &Entry::OpenSession(OpenSession { nonce }), false).outcome {
        Outcome::Opened(client) => client,
        other => panic!("{other:?}"),
    }
}

fn policy(from: u64, to: u64) -> Change {
    Change::PolicyAdvanced(PolicyAdvanced { from, to })
}

fn tenant(name: &str) -> TenantRecord {
    let quota = Quota { requests_per_minute: 60, tokens_per_minute: 1 << 20, concurrency: 4 };
    TenantRecord { tenant: TenantId::new(name).unwrap(), salt: TenantSalt([3; 32]), quota }
}

fn key(byte: u8, of: &str) -> KeyRecord {
    KeyRecord { sha256: [byte; 32], tenant: TenantId::new(of).unwrap(), admin: false, expires_unix_s: 0 }
}

fn issued(byte: u8, of: &str) -> KeyIssued {
    let quota = Quota { requests_per_minute: 0, tokens_per_minute: 1000, concurrency: 2 };
    let scope = KeyScope { models: vec![ModelId::new("m").unwrap()], quota, created_unix_s: 1 << 31 };
    KeyIssued { key: key(byte, of), scope, salt: TenantSalt([byte; 32]) }
}

fn tuned(name: &str, group_name: Option<&str>, salt: u8) -> TenantTuned {
    let TenantRecord { tenant, quota, .. } = tenant(name);
    let salt = TenantSalt([salt; 32]);
    let group = |name| CacheGroup { name: TenantId::new(name).unwrap(), salt: salt.clone() };
    let cache_group = group_name.map(group);
    TenantTuned { tenant, salt, quota, cache_group }
}

fn plan(name: &str) -> ModelPlan {
    ModelPlan {
        model: ModelId::new(name).unwrap(),
        model_digest: [1; 32],
        tokenizer_digest: [2; 32],
        placement: vec![node("w0")],
        draining: false,
        canary: Some(Canary { model: ModelId::new("other").unwrap(), permille: 50 }),
    }
}

fn replica(nodes: &[&str]) -> ReplicaPlan {
    let stages = (0..).zip(nodes).map(|(at, name)| StagePlan { node: node(name), layers: (at, at + 1) });
    ReplicaPlan { model: ModelId::new("m").unwrap(), model_digest: [1; 32], stages: stages.collect() }
}

fn placed(nodes: &[&str], replaces: Option<u64>) -> Change {
    Change::ReplicaPlaced(ReplicaPlaced { plan: replica(nodes), replaces })
}

fn blocked(byte: u8) -> ModelBlocked {
    ModelBlocked { model_digest: [byte; 32], node: node("w0"), reason: "no layers".into() }
}

fn operator_plan(model: &str, replicas: &[&[&str]]) -> OperatorPlan {
    let replicas = replicas.iter().map(|nodes| replica(nodes).stages).collect();
    OperatorPlan { model: ModelId::new(model).unwrap(), replicas }
}

/// One of each change, in the order of the variants.
fn every_change() -> Vec<Change> {
    let register = worker_info("w0", 3, 7);
    vec![
        Change::WorkerJoined(Box::new(register)),
        Change::WorkerLeft(WorkerLeft { node: node("w0"), epoch: Epoch(3) }),
        Change::WorkerDrained(WorkerDrained { node: node("w0"), draining: true }),
        Change::LearnerAdded(seat("c3", 9)),
        Change::LearnerPromoted(node("c3")),
        Change::CoordinatorRemoved(node("c3")),
        Change::LevelReported(LevelReported { node: node("c0"), level: Level(1) }),
        Change::ModelPlanned(plan("m")),
        Change::ModelDropped(ModelId::new("m").unwrap()),
        Change::TenantSet(tenant("a")),
        Change::TenantDropped(TenantId::new("a").unwrap()),
        Change::KeySet(key(5, "a")),
        Change::KeyRevoked([5; 32]),
        Change::PolicyAdvanced(PolicyAdvanced { from: 0, to: 1 }),
        Change::ReplicaPlaced(ReplicaPlaced { plan: replica(&["w0", "w1"]), replaces: Some(300) }),
        Change::ReplicaDropped(300),
        Change::ModelBlocked(blocked(9)),
        Change::ModelUnblocked([9; 32]),
        Change::KeyIssued(issued(6, "d")),
        Change::TenantTuned(tuned("d", Some("g"), 4)),
        Change::CoordinatorLost(node("c4")),
        Change::OperatorPlanned(operator_plan("m", &[&["w0", "w1"], &["w2"]])),
        Change::OperatorPlanWithdrawn(ModelId::new("m").unwrap()),
    ]
    .into_iter()
    .chain(nodes::every_change())
    .chain(deployments::every_change())
    .collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn every_entry_and_the_table_are_written_as_shipped() {
    let golden: BTreeMap<&str, &str> = GOLDEN
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| line.split_once(' ').unwrap())
        .collect();
    let mut forms = vec![("open".to_owned(), Entry::OpenSession(OpenSession { nonce: 1 << 40 }))];
    for (at, change) in every_change().into_iter().enumerate() {
        let entry = Entry::Change(SessionChange { client: ClientId(300), seq: 2, change });
        let bytes = encode_entry(&entry).unwrap();
        // Entry, client (3 bytes), seq, then the number of the change.
        assert_eq!((bytes[0], usize::from(bytes[5])), (1, at), "the samples stand in the order of variants");
        forms.push((format!("change/{at}"), entry));
    }
    let mut written: Vec<(String, Vec<u8>)> = Vec::new();
    for (name, entry) in forms {
        let bytes = encode_entry(&entry).unwrap();
        assert_eq!(decode_entry(&bytes).unwrap(), entry, "{name}");
        written.push((name, bytes));
    }
    let mut client = Client::new();
    for change in every_change().into_iter().filter(|change| change.level() < Level(2)) {
        client.make(change);
    }
    client.done(Change::LearnerAdded(seat("c4", 1)));
    client.done(Change::TenantSet(tenant("b")));
    client.done(Change::KeySet(key(6, "b")));
    client.done(Change::ModelPlanned(plan("n")));
    client.done(Change::WorkerJoined(Box::new(worker_info("w1", 1, 7))));
    client.done(placed(&["w0", "w1"], None));
    client.done(Change::ModelBlocked(blocked(8)));
    client.done(Change::KeyIssued(issued(7, "d")));
    client.done(Change::TenantTuned(tuned("d", Some("g"), 4)));
    client.done(Change::CoordinatorLost(node("c4")));
    client.done(Change::OperatorPlanned(operator_plan("m", &[&["w0", "w1"], &["w2"]])));
    written.push(("table".into(), client.table.to_bytes().unwrap()));
    written.push(("table/nodes".into(), nodes::joined().table.to_bytes().unwrap()));
    written.push(("table/deployments".into(), deployments::rolled_out().table.to_bytes().unwrap()));
    let mut missing = String::new();
    for (name, bytes) in &written {
        match golden.get(name.as_str()) {
            Some(shipped) => assert_eq!(hex(bytes), **shipped, "{name} is written in another form"),
            None => missing += &format!("{name} {}\n", hex(bytes)),
        }
    }
    assert!(missing.is_empty(), "append to golden.txt:\n{missing}");
    assert_eq!(golden.len(), written.len(), "golden.txt has lines for which there is no sample");
    assert_eq!(Table::from_bytes(&client.table.to_bytes().unwrap()).unwrap(), client.table);
}

#[test]
fn unknown_kinds_and_malformed_entries_are_refused_and_change_nothing() {
    let mut table = genesis();
    let before = table.clone();
    let unknown = |kind| Outcome::Refused(Refusal::UnknownKind(kind));
    assert_eq!(table.apply(2, &[9, 0, 0], false).outcome, unknown(9));
    // A change of an unknown kind: entry 1, client 0, seq 1, change 99.
    assert_eq!(table.apply(3, &[1, 0, 1, 99, 0], false).outcome, unknown(99));
    assert_eq!(table.apply(4, &[1], false).outcome, Outcome::Refused(Refusal::Malformed));
    assert_eq!(
        table.apply(5, &vec![0; MAX_ENTRY_BYTES + 1], false).outcome,
        Outcome::Refused(Refusal::Malformed)
    );
    assert_eq!(table, Table { applied: 5, ..before });
}

#[test]
fn a_change_sent_twice_is_made_once() {
    let mut client = Client::new();
    client.done(policy(0, 5));
    let (id, seq) = (client.id, client.seq);
    let again = apply_change(&mut client.table, id, seq, policy(0, 5));
    assert_eq!(again.outcome, Outcome::Done);
    assert_eq!(client.table.policy(), 5);
    client.done(policy(5, 6));
    let superseded = apply_change(&mut client.table, id, seq, policy(0, 5));
    assert_eq!(superseded.outcome, Outcome::Refused(Refusal::Superseded { last: seq + 1 }));
    // A repeated membership change has no effect on the group.
    assert!(client.done(Change::LearnerAdded(seat("c3", 1))).is_some());
    let (id, seq) = (client.id, client.seq);
    let again = apply_change(&mut client.table, id, seq, Change::LearnerAdded(seat("c3", 1)));
    assert_eq!((again.outcome, again.membership), (Outcome::Done, None));
}

#[test]
fn the_session_unused_for_longest_expires() {
    let mut table = genesis();
    let (first, second) = (open(&mut table, 1), open(&mut table, 2));
    assert_eq!(apply_change(&mut table, first, 1, policy(0, 1)).outcome, Outcome::Done);
    for nonce in 3..=MAX_SESSIONS as u64 + 1 {
        open(&mut table, nonce);
    }
    assert_eq!(table.sessions(), MAX_SESSIONS);
    let expired = Outcome::Refused(Refusal::SessionExpired);
    assert_eq!(apply_change(&mut table, second, 1, policy(1, 2)).outcome, expired);
    assert_eq!(apply_change(&mut table, first, 2, policy(1, 2)).outcome, Outcome::Done);
}

#[test]
fn a_coordinator_joins_as_a_learner_and_a_removed_incarnation_never_returns() {
    let mut client = Client::new();
    let member = seat("c3", 1).member();
    assert_eq!(client.done(Change::LearnerAdded(seat("c3", 1))), Some(Membership::Learner(member)));
    // Its disk was wiped: another incarnation may not join in addition to the first.
    let refusal = Refusal::AnotherLife(Incarnation(1));
    assert_eq!(client.refused(Change::LearnerAdded(seat("c3", 2))), refusal);
    assert_eq!(client.done(Change::LearnerPromoted(node("c3"))), Some(Membership::Voter(member)));
    assert_eq!(client.refused(Change::LearnerPromoted(node("c3"))), Refusal::NoLearner);
    assert_eq!(client.done(Change::CoordinatorRemoved(node("c3"))), Some(Membership::Gone(member)));
    assert_eq!(client.refused(Change::LearnerAdded(seat("c3", 1))), Refusal::LifeEnded);
    let reborn = seat("c3", 2).member();
    assert_ne!(reborn, member);
    assert_eq!(client.done(Change::LearnerAdded(seat("c3", 2))), Some(Membership::Learner(reborn)));
    for name in ["c4", "c5", "c6"] {
        client.done(Change::LearnerAdded(seat(name, 1)));
    }
    client.done(Change::LearnerPromoted(node("c4")));
    client.done(Change::LearnerPromoted(node("c5")));
    assert_eq!(client.refused(Change::LearnerPromoted(node("c6"))), Refusal::Full(Kind::Coordinator));
    for name in ["c1", "c2", "c4", "c5"] {
        client.done(Change::CoordinatorRemoved(node(name)));
    }
    assert_eq!(client.refused(Change::CoordinatorRemoved(node("c0"))), Refusal::LastVoter);
}

#[test]
fn a_coordinator_that_lost_its_disk_may_rejoin_with_another_incarnation() {
    let mut client = Client::new();
    let lost = || Change::CoordinatorLost(node("c2"));
    assert_eq!(client.done(lost()), Some(Membership::Gone(seat("c2", 1).member())));
    assert!(client.table.seats().all(|seat| seat.node != node("c2")));
    assert_eq!(client.refused(Change::LearnerPromoted(node("c2"))), Refusal::NoLearner);
    assert_eq!(client.refused(Change::LearnerAdded(seat("c2", 1))), Refusal::LifeEnded);
    let reborn = seat("c2", 2);
    assert_eq!(client.done(Change::LearnerAdded(reborn.clone())), Some(Membership::Learner(reborn.member())));
    client.done(Change::LearnerPromoted(node("c2")));
    // An operator can still remove it.
    client.done(lost());
    client.done(Change::CoordinatorRemoved(node("c2")));
    let standing = client.table.coordinators().get(&node("c2"));
    assert_eq!(standing, Some(&Standing::Removed(Incarnation(2))));
}

#[test]
fn membership_changes_and_table_changes_are_not_interchangeable() {
    let mut client = Client::new();
    let entry = |seq, change| Entry::Change(SessionChange { client: client.id, seq, change });
    let wrong = Outcome::Refused(Refusal::WrongPath);
    let add = entry(1, Change::LearnerAdded(seat("c3", 1)));
    assert_eq!(apply(&mut client.table, &add, false).outcome, wrong);
    let advance = entry(2, policy(0, 1));
    assert_eq!(apply(&mut client.table, &advance, true).outcome, wrong);
}

#[test]
fn a_change_waits_until_every_member_understands_it() {
    let mut old = seat("c1", 1);
    old.level = Level(0);
    let mut table = Table::genesis(1, [seat("c0", 1), old]);
    let client = open(&mut table, 1);
    let outcome = apply_change(&mut table, client, 1, policy(0, 1)).outcome;
    assert_eq!(outcome, Outcome::Refused(Refusal::LevelTooLow(Level(0))));
    let report = Change::LevelReported(LevelReported { node: node("c1"), level: Level::OWN });
    assert_eq!(apply_change(&mut table, client, 2, report).outcome, Outcome::Done);
    assert_eq!(apply_change(&mut table, client, 3, policy(0, 1)).outcome, Outcome::Done);
}

#[test]
fn workers_are_fenced_by_epoch_and_drains_outlive_them() {
    let mut client = Client::new();
    let join = |epoch| Change::WorkerJoined(Box::new(worker_info("w0", epoch, 7)));
    client.done(join(5));
    assert_eq!(client.refused(join(4)), Refusal::StaleEpoch(Epoch(5)));
    client.done(Change::WorkerDrained(WorkerDrained { node: node("w0"), draining: true }));
    client.done(Change::WorkerLeft(WorkerLeft { node: node("w0"), epoch: Epoch(5) }));
    assert_eq!(client.refused(join(4)), Refusal::StaleEpoch(Epoch(5)));
    client.done(join(6));
    let worker = client.table.workers().worker(&node("w0")).unwrap();
    assert!(matches!(worker.standing, WorkerStanding::Draining(_)));
    let other = Change::WorkerJoined(Box::new(worker_info("w1", 1, 8)));
    assert_eq!(client.refused(other), Refusal::ModelConflict(node("w0")));
}

#[test]
fn a_worker_that_sees_images_joins_once_every_member_knows_its_task() {
    let mut client = Client::new();
    let mut sees = worker_info("w0", 5, 7);
    sees.models[0].task = ModelTask::GenerateFromImages;
    let join = || Change::WorkerJoined(Box::new(sees.clone()));
    assert_eq!(client.refused(join()), Refusal::LevelTooLow(Level(1)));
    for name in ["c0", "c1", "c2"] {
        client.done(Change::LevelReported(LevelReported { node: node(name), level: Level::OWN }));
    }
    assert_eq!(client.table.used_level(), Level(1));
    client.done(join());
    assert_eq!(client.table.used_level(), Level(2));
    client.done(Change::WorkerLeft(WorkerLeft { node: node("w0"), epoch: Epoch(5) }));
    assert_eq!(client.table.used_level(), Level(1));
}

#[test]
fn keys_are_removed_with_their_tenant() {
    let mut client = Client::new();
    assert_eq!(client.refused(Change::KeySet(key(1, "a"))), Refusal::Unknown(Kind::Tenant));
    client.done(Change::TenantSet(tenant("a")));
    client.done(Change::KeySet(key(1, "a")));
    client.done(Change::KeySet(key(2, "a")));
    client.done(Change::KeyRevoked([2; 32]));
    client.done(Change::TenantDropped(TenantId::new("a").unwrap()));
    assert!(client.table.access().keys().is_empty());
    let mut bad = plan("m");
    bad.canary = Some(Canary { model: ModelId::new("n").unwrap(), permille: 1001 });
    assert_eq!(client.refused(Change::ModelPlanned(bad)), Refusal::OutOfRange);
    assert_eq!(client.refused(policy(3, 4)), Refusal::PolicyMoved(0));
}

#[test]
fn a_tenant_keeps_its_salt_and_a_group_its_own() {
    let mut client = Client::new();
    client.done(Change::KeyIssued(issued(1, "a")));
    client.done(Change::KeyIssued(issued(2, "a")));
    let id = |name: &str| TenantId::new(name).unwrap();
    let salt = |client: &Client, name| client.table.access().salt(&id(name)).map(|salt| salt.0[0]);
    assert_eq!(salt(&client, "a"), Some(1), "the second key brings none");
    client.done(Change::TenantTuned(tuned("a", Some("g"), 3)));
    client.done(Change::TenantTuned(tuned("b", Some("g"), 4)));
    assert_eq!((salt(&client, "a"), salt(&client, "b")), (Some(3), Some(3)));
    client.done(Change::TenantTuned(tuned("a", None, 5)));
    assert_eq!((salt(&client, "a"), salt(&client, "b")), (Some(1), Some(3)));
    assert_eq!(client.table.access().tenants()[&id("a")].quota, tenant("a").quota);

    let scope = |client: &Client, byte| client.table.access().scope(&[byte; 32]).is_some();
    client.done(Change::KeyRevoked([1; 32]));
    assert_eq!((scope(&client, 1), scope(&client, 2)), (false, true));
    client.done(Change::TenantDropped(id("a")));
    assert!(!scope(&client, 2) && client.table.access().keys().is_empty());
    let mut wide = issued(3, "a");
    wide.scope.models = vec![ModelId::new("m").unwrap(); MAX_KEY_MODELS + 1];
    assert_eq!(client.refused(Change::KeyIssued(wide)), Refusal::TooLarge);
    assert_eq!(Table::from_bytes(&client.table.to_bytes().unwrap()).unwrap(), client.table);
}

fn any_change() -> impl Strategy<Value = Change> {
    let name = prop::sample::select(vec!["w0", "w1", "w2"]);
    let join = (name.clone(), 0u64..4, 0u8..2)
        .prop_map(|(n, e, d)| Change::WorkerJoined(Box::new(worker_info(n, e, d))));
    let leave = (name.clone(), 0u64..4)
        .prop_map(|(n, e)| Change::WorkerLeft(WorkerLeft { node: node(n), epoch: Epoch(e) }));
    let drain = (name, any::<bool>())
        .prop_map(|(n, draining)| Change::WorkerDrained(WorkerDrained { node: node(n), draining }));
    let seats = prop::sample::select(vec!["c2", "c3"]);
    let group = (seats, 1u64..3, 0u8..3).prop_map(|(n, incarnation, kind)| match kind {
        0 => Change::LearnerAdded(seat(n, incarnation)),
        1 => Change::LearnerPromoted(node(n)),
        _ => Change::CoordinatorRemoved(node(n)),
    });
    let advance = (0u64..3, 0u64..3).prop_map(|(from, to)| policy(from, to));
    prop_oneof![join, leave, drain, group, advance]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// A table that is encoded and decoded midway continues as one that is not. Epochs never fall. Repeating
    /// all changes has no effect.
    #[test]
    fn a_table_is_a_function_of_its_log(changes in prop::collection::vec(any_change(), 1..40), cut in 0usize..40) {
        let (mut whole, mut twice) = (genesis(), genesis());
        let client = open(&mut whole, 1);
        open(&mut twice, 1);
        let mut cut_table = whole.clone();
        for (at, change) in changes.into_iter().enumerate() {
            if at == cut {
                cut_table = Table::from_bytes(&cut_table.to_bytes().unwrap()).unwrap();
            }
            let before: Vec<_> = whole.workers.workers().map(|(n, w)| (n.clone(), w.epoch)).collect();
            let seq = at as u64 + 1;
            let first = apply_change(&mut whole, client, seq, change.clone());
            prop_assert_eq!(&first, &apply_change(&mut cut_table, client, seq, change.clone()));
            apply_change(&mut twice, client, seq, change.clone());
            let again = apply_change(&mut twice, client, seq, change);
            prop_assert_eq!(again.outcome, first.outcome);
            prop_assert_eq!(again.membership, None);
            for (name, epoch) in before {
                prop_assert!(whole.workers.worker(&name).unwrap().epoch >= epoch);
            }
        }
        prop_assert_eq!(&whole, &cut_table);
        prop_assert_eq!((&whole.workers, &whole.coordinators, whole.policy), (&twice.workers, &twice.coordinators, twice.policy));
    }
}

#[test]
fn a_replica_has_workers_of_its_own_and_gives_way_to_the_one_that_replaces_it() {
    let mut client = Client::new();
    client.done(placed(&["w0", "w1"], None));
    let first = client.table.applied();
    assert_eq!(client.refused(placed(&["w2", "w1"], None)), Refusal::Taken(node("w1")));
    client.done(placed(&["w2", "w3"], None));
    assert_eq!(client.table.replicas().keys().copied().collect::<Vec<_>>(), [first, first + 2]);
    client.done(placed(&["w1", "w4", "w0"], Some(first)));
    let plan_indices: Vec<u64> = client.table.replicas().keys().copied().collect();
    assert_eq!(plan_indices, [first + 2, first + 3], "a later plan has a larger life");
    // A late leader cannot replace a replaced replica again.
    assert_eq!(client.refused(placed(&["w0"], Some(first))), Refusal::Unknown(Kind::Replica));
    for wrong in [&["w8", "w8"][..], &[]] {
        assert_eq!(client.refused(placed(wrong, None)), Refusal::OutOfRange);
    }
    client.done(Change::ReplicaDropped(first + 2));
    assert_eq!(client.refused(Change::ReplicaDropped(first + 2)), Refusal::Unknown(Kind::Replica));
    assert_eq!(Table::from_bytes(&client.table.to_bytes().unwrap()).unwrap(), client.table);
}

#[test]
fn a_file_that_cannot_be_served_is_placed_nowhere() {
    let mut client = Client::new();
    client.done(placed(&["w0", "w1"], None));
    client.done(Change::ModelBlocked(blocked(1)));
    assert!(client.table.replicas().is_empty(), "what was made of it goes");
    assert_eq!(client.refused(placed(&["w2"], None)), Refusal::Blocked);
    client.done(Change::ModelUnblocked([1; 32]));
    assert_eq!(client.refused(Change::ModelUnblocked([1; 32])), Refusal::Unknown(Kind::Model));
    client.done(placed(&["w2"], None));
    let long = ModelBlocked { reason: "x".repeat(MAX_REASON + 1), ..blocked(2) };
    assert_eq!(client.refused(Change::ModelBlocked(long)), Refusal::TooLarge);
}

#[test]
fn an_operators_plan_holds_until_it_is_withdrawn_and_names_no_worker_twice() {
    let mut client = Client::new();
    let plan = |model: &str, replicas: &[&[&str]]| Change::OperatorPlanned(operator_plan(model, replicas));
    let withdrawn = || Change::OperatorPlanWithdrawn(ModelId::new("m").unwrap());
    client.done(plan("m", &[&["w0", "w1"], &["w2"]]));
    assert_eq!(client.refused(plan("n", &[&["w3", "w1"]])), Refusal::Taken(node("w1")));
    let wrong: [&[&[&str]]; 5] = [&[], &[&[]], &[&["w0"], &[]], &[&["w0", "w0"]], &[&["w0"], &["w1", "w0"]]];
    for wrong in wrong {
        assert_eq!(client.refused(plan("m", wrong)), Refusal::OutOfRange, "{wrong:?}");
    }
    let mut gap = operator_plan("m", &[&["w0", "w1"]]);
    gap.replicas[0][1].layers = (2, 3);
    assert_eq!(client.refused(Change::OperatorPlanned(gap)), Refusal::OutOfRange);
    // A model's later plan replaces the earlier one, whose workers become free.
    client.done(plan("m", &[&["w1", "w0"]]));
    client.done(plan("n", &[&["w2"]]));
    assert!(client.table.replicas().is_empty(), "the leader places, not the table");
    client.done(placed(&["w1", "w0"], None));
    client.done(placed(&["w3", "w4"], None));
    let own: Vec<bool> = client.table.replicas().values().map(|r| client.table.is_operators(r)).collect();
    assert_eq!(own, [true, false]);
    assert_eq!(Table::from_bytes(&client.table.to_bytes().unwrap()).unwrap(), client.table);
    client.done(withdrawn());
    assert_eq!(client.refused(withdrawn()), Refusal::Unknown(Kind::Model));
    assert_eq!(client.table.replicas().len(), 2, "what stands may stand");
    client.done(Change::OperatorPlanWithdrawn(ModelId::new("n").unwrap()));
}

#[test]
fn the_total_of_operators_plans_is_bounded() {
    let mut client = Client::new();
    let long = |at: usize| NodeId::new(format!("{at:0>width$}", width = NodeId::MAX_LEN)).unwrap();
    let wide = |model: &str, from: usize, count: usize| {
        let alone = |at| vec![StagePlan { node: long(at), layers: (0, 1 << 20) }];
        let replicas = (from..from + count).map(alone).collect();
        Change::OperatorPlanned(OperatorPlan { model: ModelId::new(model).unwrap(), replicas })
    };
    let max = MAX_PLANNED_WORKERS;
    assert_eq!(client.refused(wide("m", 0, max + 1)), Refusal::Full(Kind::Place));
    client.done(wide("m", 0, max - 1));
    assert_eq!(client.refused(wide("n", max, 2)), Refusal::Full(Kind::Place));
    client.done(wide("n", max, 1));
    client.done(wide("m", 0, 1));
    let stage = |at| StagePlan { node: long(at), layers: (at as u32, at as u32 + 1) };
    let deep = |count| OperatorPlan {
        model: ModelId::new("m").unwrap(),
        replicas: vec![(0..count).map(stage).collect()],
    };
    let stages = proto::placement::MAX_STAGES;
    client.done(Change::OperatorPlanned(deep(stages)));
    assert_eq!(client.refused(Change::OperatorPlanned(deep(stages + 1))), Refusal::OutOfRange);
}
