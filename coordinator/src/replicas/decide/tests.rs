mod operators;

use super::*;
use crate::consensus::Incarnation;
use crate::consensus::table::{ChangeV1, ClientId, Entry, OpenSessionV1, Outcome, SeatV1, encode_entry};
use model::{ModelFile, ModelSpec};
use proto::placement::ModelFileV1;
use std::path::Path;

const DIGEST: [u8; 32] = [1; 32];

fn node(name: &str) -> NodeId {
    NodeId::new(name).unwrap()
}

fn capacity(memory: u64, digest: [u8; 32]) -> CapacityV1 {
    let files = vec![ModelFileV1 { model: ModelId::new("m").unwrap(), digest }];
    CapacityV1 { memory, bandwidth: 20_000_000_000, compute: 100_000_000_000, files }
}

fn costs(fixture: &str) -> ModelCosts {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/tiny").join(fixture);
    let file = ModelFile::open(path).unwrap();
    ModelCosts::of_file(&ModelSpec::from_file(&file).unwrap(), &file)
}

/// A table, and workers as they are seen.
struct Rig {
    table: Table,
    client: ClientId,
    seq: u64,
    models: Vec<ModelId>,
    costs: ModelCosts,
    workers: Vec<(NodeId, CapacityV1)>,
    gone: Vec<NodeId>,
    draining: Vec<NodeId>,
    bad: Option<String>,
}

impl Rig {
    fn new(level: u32, workers: &[&str]) -> Self {
        let seat =
            SeatV1 { node: node("c0"), incarnation: Incarnation(1), quic: "h:1".into(), level: Level(level) };
        let mut table = Table::genesis(1, [seat]);
        let open = encode_entry(&Entry::OpenSession(OpenSessionV1 { nonce: 1 })).unwrap();
        let Outcome::Opened(client) = table.apply(2, &open, false).outcome else { panic!("not opened") };
        let workers = workers.iter().map(|name| (node(name), capacity(1 << 30, DIGEST))).collect();
        Self {
            table,
            client,
            seq: 0,
            models: vec![ModelId::new("m").unwrap()],
            costs: costs("llama/llama-f32.gguf"),
            workers,
            gone: Vec::new(),
            draining: Vec::new(),
            bad: None,
        }
    }

    fn decide(&self, shards: usize) -> (Option<Change>, BTreeMap<ModelId, String>) {
        let want = |model| Want { model, costs: &self.costs, context: 512 };
        let wants: Vec<Want<'_>> = self.models.iter().map(want).collect();
        let nodes: Vec<Node<'_>> = self
            .workers
            .iter()
            .map(|(name, capacity)| Node { name, capacity, draining: self.draining.contains(name) })
            .collect();
        decide(&View {
            table: &self.table,
            wants: &wants,
            shards: Some(shards),
            nodes: &nodes,
            gone: &|node| self.gone.contains(node),
            bad: &|_, _| self.bad.clone(),
        })
    }

    fn make(&mut self, change: Change) {
        self.seq += 1;
        let entry = Entry::Change(ChangeV1 { client: self.client, seq: self.seq, change });
        let applied = self.table.apply(self.table.applied() + 1, &encode_entry(&entry).unwrap(), false);
        assert_eq!(applied.outcome, Outcome::Done);
    }

    /// Makes what is decided, until nothing is: the workers of each replica.
    fn settle(&mut self, shards: usize) -> Vec<Vec<String>> {
        while let (Some(change), _) = self.decide(shards) {
            self.make(change);
        }
        let names = |plan: &ReplicaPlanV1| plan.stages.iter().map(|stage| stage.node.to_string()).collect();
        self.table.replicas().values().map(names).collect()
    }
}

#[test]
fn free_workers_become_replicas_and_what_is_left_is_spare() {
    let mut rig = Rig::new(2, &["a", "b", "c", "d", "e"]);
    assert_eq!(rig.settle(2).len(), 2);
    let (nothing, why) = rig.decide(2);
    assert_eq!(nothing, None);
    assert!(why.values().all(|why| why.contains("as many workers")), "{why:?}");
    assert!(Rig::new(1, &["a", "b"]).settle(2).is_empty(), "not before all members understand it");
    assert!(Rig::new(2, &["a"]).settle(2).is_empty());
}

#[test]
fn who_is_gone_is_replaced_where_another_is_free_and_waited_for_where_none_is() {
    let mut rig = Rig::new(2, &["a", "b"]);
    let first = rig.settle(2);
    let lost = node(&first[0][1]);
    rig.gone.push(lost.clone());
    rig.workers.retain(|(name, _)| *name != lost);
    assert_eq!(rig.settle(2), first, "its plan stands");
    rig.workers.push((node("c"), capacity(1 << 30, DIGEST)));
    let after = rig.settle(2);
    assert_eq!(after.len(), 1);
    assert!(after[0].contains(&"c".to_owned()) && !after[0].contains(&lost.to_string()), "{after:?}");
    // Back again, it is a spare: a plan that serves stands.
    rig.gone.clear();
    rig.workers.push((lost, capacity(1 << 30, DIGEST)));
    assert_eq!(rig.settle(2), after);
}

#[test]
fn a_plan_whose_workers_have_another_file_gives_way_to_one_of_what_they_have() {
    let mut rig = Rig::new(2, &["a", "b"]);
    rig.settle(2);
    rig.workers[0].1 = capacity(1 << 30, [2; 32]);
    assert!(rig.settle(2).is_empty(), "no two have the same file");
    rig.workers[1].1 = capacity(1 << 30, [2; 32]);
    assert_eq!(rig.settle(2).len(), 1);
    assert!(rig.table.replicas().values().all(|plan| plan.model_digest == [2; 32]));
}

#[test]
fn a_file_that_is_no_model_is_placed_nowhere_and_another_one_is() {
    let mut rig = Rig::new(2, &["a", "b"]);
    rig.settle(2);
    rig.bad = Some("é".repeat(MAX_REASON));
    assert!(matches!(rig.decide(2).0, Some(Change::ModelCondemned(_))));
    assert!(rig.settle(2).is_empty());
    let condemned = &rig.table.condemned()[&DIGEST];
    assert!(condemned.reason.len() <= MAX_REASON, "also where it is cut inside of a character");
    rig.bad = None;
    rig.workers.push((node("c"), capacity(1 << 30, [2; 32])));
    rig.workers.push((node("d"), capacity(1 << 30, [2; 32])));
    assert_eq!(rig.settle(2).len(), 1, "with other weights under the same name");
}

#[test]
fn what_does_not_fit_is_told_with_its_numbers() {
    let mut rig = Rig::new(2, &["a", "b"]);
    rig.workers.iter_mut().for_each(|(_, capacity)| capacity.memory = 1000);
    let (nothing, why) = rig.decide(2);
    assert_eq!(nothing, None);
    assert!(why.values().all(|why| why.contains("does not fit")), "{why:?}");
}

#[test]
fn who_has_no_file_is_taken_where_those_with_it_are_too_few() {
    let mut rig = Rig::new(2, &["a", "b", "c"]);
    let without = |rig: &mut Rig, names: &[&str]| {
        let named = |name: &NodeId| names.iter().any(|other| name.as_str() == *other);
        rig.workers
            .iter_mut()
            .filter(|(name, _)| named(name))
            .for_each(|(_, capacity)| capacity.files.clear());
    };
    without(&mut rig, &["b"]);
    let planned = rig.settle(2);
    assert!(planned.len() == 1 && !planned[0].contains(&"b".to_owned()), "{planned:?}");

    let mut rig = Rig::new(2, &["a", "b"]);
    without(&mut rig, &["b"]);
    assert_eq!(rig.settle(2).len(), 1);
    assert_eq!(rig.decide(2).0, None, "who has no file is no stray");

    let mut rig = Rig::new(2, &["a", "b"]);
    without(&mut rig, &["a", "b"]);
    assert!(rig.settle(2).is_empty(), "there is nobody to get it from");
}
