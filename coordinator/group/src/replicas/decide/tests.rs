mod operators;

use super::*;
use consensus::Incarnation;
use consensus::table::{
    ClientId, Entry, GroupMember, Level, OpenSession, Outcome, SessionChange, encode_entry,
};
use model::{ModelFile, ModelSpec};
use proto::placement::{Drafter, OfferedModelFile};
use std::path::Path;

const DIGEST: [u8; 32] = [1; 32];

fn node(name: &str) -> NodeId {
    NodeId::new(name).unwrap()
}

fn capacity(memory: u64, digest: [u8; 32]) -> Capacity {
    let files = vec![OfferedModelFile { model: ModelId::new("m").unwrap(), digest }];
    Capacity { memory, bandwidth: 20_000_000_000, compute: 100_000_000_000, files }
}

fn costs(fixture: &str) -> ModelCosts {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tiny").join(fixture);
    let file = ModelFile::open(path).unwrap();
    ModelCosts::of_file(&ModelSpec::from_file(&file).unwrap(), &file)
}

/// A table and observed workers.
struct Rig {
    table: Table,
    client: ClientId,
    seq: u64,
    models: Vec<ModelId>,
    costs: ModelCosts,
    workers: Vec<(NodeId, Capacity)>,
    /// The drafter of the model on every worker that has a file.
    drafter: Option<OfferedDrafter>,
    gone: Vec<NodeId>,
    draining: Vec<NodeId>,
    unusable_file: Option<String>,
    setup_failed: bool,
}

impl Rig {
    fn new(workers: &[&str]) -> Self {
        let seat = GroupMember {
            node: node("c0"),
            incarnation: Incarnation(1),
            quic: "h:1".into(),
            level: Level::OWN,
        };
        let mut table = Table::genesis(1, [seat]);
        let open = encode_entry(&Entry::OpenSession(OpenSession { nonce: 1 })).unwrap();
        let Outcome::Opened(client) = table.apply(2, &open, false).outcome else { panic!("not opened") };
        let workers = workers.iter().map(|name| (node(name), capacity(1 << 30, DIGEST))).collect();
        Self {
            table,
            client,
            seq: 0,
            models: vec![ModelId::new("m").unwrap()],
            costs: costs("llama/llama-f32.gguf"),
            workers,
            drafter: None,
            gone: Vec::new(),
            draining: Vec::new(),
            unusable_file: None,
            setup_failed: false,
        }
    }

    fn decide(&self, shards: usize) -> (Option<Change>, BTreeMap<ModelId, String>) {
        let target = |model| WantedModel { model, costs: &self.costs, context: 512 };
        let targets: Vec<WantedModel<'_>> = self.models.iter().map(target).collect();
        let nodes: Vec<Node<'_>> = self
            .workers
            .iter()
            .map(|(name, capacity)| Node {
                name,
                capacity,
                drafter: self.drafter.as_ref(),
                draining: self.draining.contains(name),
            })
            .collect();
        decide(&View {
            table: &self.table,
            targets: &targets,
            shards: Some(shards),
            nodes: &nodes,
            is_gone: &|node| self.gone.contains(node),
            unusable_file: &|_, _| self.unusable_file.clone(),
            setup_failed: &|_, _| self.setup_failed,
        })
    }

    fn make(&mut self, change: Change) {
        self.seq += 1;
        let entry = Entry::Change(SessionChange { client: self.client, seq: self.seq, change });
        let applied = self.table.apply(self.table.applied() + 1, &encode_entry(&entry).unwrap(), false);
        assert_eq!(applied.outcome, Outcome::Done);
    }

    /// Applies decisions until there are none. Returns the workers of each replica.
    fn settle(&mut self, shards: usize) -> Vec<Vec<String>> {
        while let (Some(change), _) = self.decide(shards) {
            self.make(change);
        }
        let names = |plan: &ReplicaPlan| plan.stages.iter().map(|stage| stage.node.to_string()).collect();
        self.table.replicas().values().map(names).collect()
    }
}

#[test]
fn free_workers_become_replicas_and_the_rest_are_spares() {
    let mut rig = Rig::new(&["a", "b", "c", "d", "e"]);
    assert_eq!(rig.settle(2).len(), 2);
    let (change, why) = rig.decide(2);
    assert_eq!(change, None);
    assert!(why.values().all(|why| why.contains("workers, but there are")), "{why:?}");
    assert!(Rig::new(&["a"]).settle(2).is_empty());
}

#[test]
fn a_lost_worker_is_replaced_if_another_is_free_and_otherwise_its_plan_stays() {
    let mut rig = Rig::new(&["a", "b"]);
    let first = rig.settle(2);
    let lost = node(&first[0][1]);
    rig.gone.push(lost.clone());
    rig.workers.retain(|(name, _)| *name != lost);
    assert_eq!(rig.settle(2), first, "its plan stands");
    rig.workers.push((node("c"), capacity(1 << 30, DIGEST)));
    let after = rig.settle(2);
    assert_eq!(after.len(), 1);
    assert!(after[0].contains(&"c".to_owned()) && !after[0].contains(&lost.to_string()), "{after:?}");
    // A worker that returns is a spare: a working plan stays.
    rig.gone.clear();
    rig.workers.push((lost, capacity(1 << 30, DIGEST)));
    assert_eq!(rig.settle(2), after);
}

#[test]
fn a_plan_is_dropped_if_its_workers_have_another_file() {
    let mut rig = Rig::new(&["a", "b"]);
    rig.settle(2);
    rig.workers[0].1 = capacity(1 << 30, [2; 32]);
    assert!(rig.settle(2).is_empty(), "no two have the same file");
    rig.workers[1].1 = capacity(1 << 30, [2; 32]);
    assert_eq!(rig.settle(2).len(), 1);
    assert!(rig.table.replicas().values().all(|plan| plan.model_digest == [2; 32]));
}

#[test]
fn a_file_that_is_no_model_is_placed_nowhere_and_another_one_is() {
    let mut rig = Rig::new(&["a", "b"]);
    rig.settle(2);
    rig.unusable_file = Some("é".repeat(MAX_REASON));
    assert!(matches!(rig.decide(2).0, Some(Change::ModelBlocked(_))));
    assert!(rig.settle(2).is_empty());
    let blocked = &rig.table.blocked()[&DIGEST];
    assert!(blocked.reason.len() <= MAX_REASON, "also where it is cut inside of a character");
    rig.unusable_file = None;
    rig.workers.push((node("c"), capacity(1 << 30, [2; 32])));
    rig.workers.push((node("d"), capacity(1 << 30, [2; 32])));
    assert_eq!(rig.settle(2).len(), 1, "with other weights under the same name");
}

#[test]
fn a_model_that_does_not_fit_is_reported_with_its_numbers() {
    let mut rig = Rig::new(&["a", "b"]);
    rig.workers.iter_mut().for_each(|(_, capacity)| capacity.memory = 1000);
    let (change, why) = rig.decide(2);
    assert_eq!(change, None);
    assert!(why.values().all(|why| why.contains("does not fit")), "{why:?}");
}

/// A drafter of the model [`DIGEST`] that reads the caches of `from_layer` and takes `weight_bytes` bytes.
fn drafter(from_layer: u32, weight_bytes: u64) -> Option<OfferedDrafter> {
    Some(OfferedDrafter {
        model_digest: DIGEST,
        drafter: Drafter::Assistant([9; 32]),
        from_layer,
        weight_bytes,
        reads_embedding: true,
        kv_elements: 0,
        state_elements: 0,
    })
}

fn first_ranges(rig: &Rig) -> Vec<(u32, u32)> {
    rig.table.replicas().values().next().unwrap().stages.iter().map(|stage| stage.layers).collect()
}

#[test]
fn layers_whose_caches_a_drafter_reads_are_the_last_stages() {
    let mut rig = Rig::new(&["a", "b", "c"]);
    rig.drafter = drafter(1, 1000);
    assert_eq!(rig.settle(2).len(), 1);
    assert_eq!(first_ranges(&rig), [(0, 1), (1, 3)]);
    let mut rig = Rig::new(&["a", "b", "c"]);
    assert_eq!(rig.settle(3).len(), 1, "without it");
    let mut rig = Rig::new(&["a", "b", "c"]);
    rig.drafter = drafter(1, 1000);
    let (change, why) = rig.decide(3);
    assert_eq!(change, None);
    let why = &why[&rig.models[0]];
    assert!(why.contains("at most 2") && why.contains("the drafter reads the caches of layer 1"), "{why}");
    // A drafter of another model's file has no effect.
    rig.drafter = rig.drafter.map(|drafter| OfferedDrafter { model_digest: [2; 32], ..drafter });
    assert_eq!(rig.settle(3).len(), 1);
}

#[test]
fn a_drafter_without_room_is_refused_with_its_bytes() {
    let mut rig = Rig::new(&["a", "b"]);
    rig.drafter = drafter(2, 2 << 30);
    let (change, why) = rig.decide(2);
    assert_eq!(change, None);
    let why = &why[&rig.models[0]];
    let with = drafters::with(&rig.costs, rig.drafter.as_ref());
    let bytes = with.range(2..3).drafter_weight_bytes;
    assert!(bytes >= 2 << 30);
    assert!(why.contains("does not fit") && why.contains(&format!("the drafter takes {bytes} of")), "{why}");
    rig.drafter = drafter(2, 1000);
    assert_eq!(rig.settle(2).len(), 1);
}

#[test]
fn a_plan_from_before_the_drafter_is_cut_anew_once_it_fails() {
    let mut rig = Rig::new(&["a", "b", "c"]);
    assert_eq!(rig.settle(3).len(), 1);
    rig.drafter = drafter(1, 1000);
    assert_eq!(rig.decide(2).0, None, "what serves stands");
    rig.setup_failed = true;
    assert_eq!(rig.settle(2).len(), 1);
    assert_eq!(first_ranges(&rig), [(0, 1), (1, 3)]);
    assert_eq!(rig.decide(2).0, None, "it fails for something else now");
    // Without room for the drafter, the plan stays and the reason is reported.
    rig.drafter = drafter(1, 4 << 30);
    let (change, why) = rig.decide(2);
    assert_eq!(change, None);
    assert!(why[&rig.models[0]].contains("the drafter takes"), "{why:?}");
}

#[test]
fn workers_without_the_file_are_used_if_its_holders_are_too_few() {
    let mut rig = Rig::new(&["a", "b", "c"]);
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

    let mut rig = Rig::new(&["a", "b"]);
    without(&mut rig, &["b"]);
    assert_eq!(rig.settle(2).len(), 1);
    assert_eq!(rig.decide(2).0, None, "who has no file is no stray");

    let mut rig = Rig::new(&["a", "b"]);
    without(&mut rig, &["a", "b"]);
    assert!(rig.settle(2).is_empty(), "there is nobody to get it from");
}
