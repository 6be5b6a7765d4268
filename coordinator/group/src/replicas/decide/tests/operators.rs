//! Operators' plans are placed completely or not at all, and other replicas do not take their workers.

use super::*;

type Stages<'a> = &'a [(&'a str, u32, u32)];

impl Rig {
    /// Sets an operator's plan of a model.
    fn set_plan(&mut self, model: &str, replicas: &[Stages<'_>]) {
        let stage =
            |&(name, first, end): &(&str, u32, u32)| StagePlan { node: node(name), layers: (first, end) };
        let replicas = replicas.iter().map(|stages| stages.iter().map(stage).collect()).collect();
        self.make(Change::OperatorPlanned(OperatorPlan { model: ModelId::new(model).unwrap(), replicas }));
    }

    /// Why a part of this model's plan is not placed.
    fn why(&self, model: &str) -> String {
        let (change, why) = self.decide(2);
        assert_eq!(change, None);
        why.get(&ModelId::new(model).unwrap()).cloned().unwrap_or_default()
    }

    fn plan_indices(&self) -> Vec<u64> {
        self.table.replicas().keys().copied().collect()
    }

    fn without(&mut self, name: &str) -> (NodeId, Capacity) {
        let at = self.workers.iter().position(|(worker, _)| worker.as_str() == name).unwrap();
        self.workers.remove(at)
    }
}

const A_B: Stages<'_> = &[("a", 0, 2), ("b", 2, 3)];
const B_A: Stages<'_> = &[("b", 0, 1), ("a", 1, 3)];

#[test]
fn an_operators_plan_replaces_the_leaders_in_one_step() {
    let mut rig = Rig::new(&["a", "b"]);
    rig.set_plan("m", &[B_A]);
    assert_eq!(rig.settle(2), [["b", "a"]]);
    let before = rig.plan_indices();
    rig.set_plan("m", &[A_B]);
    let (Some(Change::ReplicaPlaced(placed)), why) = rig.decide(2) else { panic!("nothing is placed") };
    assert_eq!((placed.replaces, why.len()), (Some(before[0]), 0), "requests wait for the new one");
    assert_eq!(rig.settle(2), [["a", "b"]]);
    let ranges = rig.table.replicas().values().flat_map(|plan| &plan.stages).map(|stage| stage.layers);
    assert_eq!(ranges.collect::<Vec<_>>(), [(0, 2), (2, 3)]);
    assert!(rig.table.replicas().values().all(|plan| rig.table.is_operators(plan)));
}

#[test]
fn an_operators_plan_without_room_for_the_drafter_waits_with_a_reason() {
    let mut rig = Rig::new(&["a", "b"]);
    rig.set_plan("m", &[A_B]);
    rig.drafter = drafter(1, 1000);
    let why = rig.why("m");
    assert!(why.contains("layer 2: the drafter reads the caches of layer 1"), "{why}");
    rig.drafter = drafter(2, 2 << 30);
    let why = rig.why("m");
    assert!(why.contains("worker b needs") && why.contains("the drafter takes"), "{why}");
    rig.drafter = drafter(2, 1000);
    assert_eq!(rig.settle(2), [["a", "b"]]);
}

#[test]
fn other_replicas_are_dropped_once_the_operators_are_placed() {
    let mut rig = Rig::new(&["a", "b", "c", "d", "e", "f"]);
    assert_eq!(rig.settle(2).len(), 3);
    // Two of the replicas must go for the plan; the third, which is not in the way, goes afterwards.
    rig.set_plan("m", &[&[("a", 0, 1), ("c", 1, 3)]]);
    assert_eq!(rig.settle(2), [["a", "c"]]);
    rig.set_plan("m", &[&[("a", 0, 1), ("c", 1, 3)], &[("e", 0, 3)]]);
    assert_eq!(rig.settle(2).len(), 2);
    assert_eq!(rig.why("m"), "", "those who are in no replica are nobody's concern");
}

#[test]
fn a_replica_keeps_serving_until_the_plans_workers_are_available() {
    let mut rig = Rig::new(&["a", "b"]);
    let before = rig.settle(2);
    let plan_indices = rig.plan_indices();
    rig.set_plan("m", &[&[("a", 0, 1), ("z", 1, 3)]]);
    assert_eq!((rig.settle(2), rig.plan_indices()), (before, plan_indices));
    assert!(rig.why("m").contains("worker z is not connected"), "{}", rig.why("m"));
    rig.workers.push((node("z"), capacity(1 << 30, DIGEST)));
    rig.draining.push(node("z"));
    assert!(rig.why("m").contains("worker z is draining"), "{}", rig.why("m"));
    rig.draining.clear();
    assert_eq!(rig.settle(2), [["a", "z"]]);
}

#[test]
fn an_absent_worker_of_an_operators_replica_is_not_replaced() {
    let mut rig = Rig::new(&["a", "b", "c", "d"]);
    rig.set_plan("m", &[A_B]);
    assert_eq!(rig.settle(2), [["a", "b"]], "nor are others made of those who are free");
    let plan_indices = rig.plan_indices();
    rig.gone.push(node("b"));
    let b = rig.without("b");
    assert_eq!(
        (rig.settle(2), rig.plan_indices()),
        (vec![vec!["a".to_owned(), "b".into()]], plan_indices.clone())
    );
    rig.gone.clear();
    rig.workers.push(b);
    assert_eq!(rig.settle(2).len(), 1);
    assert_eq!(rig.plan_indices(), plan_indices);
    // A worker that returns with another file can never serve the planned replica.
    let [at_a, at_b] =
        ["a", "b"].map(|name| rig.workers.iter().position(|(n, _)| n.as_str() == name).unwrap());
    rig.workers[at_b].1 = capacity(1 << 30, [2; 32]);
    assert!(rig.settle(2).is_empty());
    assert!(rig.why("m").contains("another file"), "{}", rig.why("m"));
    rig.workers[at_a].1 = capacity(1 << 30, [2; 32]);
    assert_eq!(rig.settle(2), [["a", "b"]]);
    assert!(rig.table.replicas().values().all(|plan| plan.model_digest == [2; 32]));
}

#[test]
fn workers_of_an_operators_plan_are_kept_for_it() {
    let mut rig = Rig::new(&["a", "b", "c", "d"]);
    let both = |model: &str| OfferedModelFile { model: ModelId::new(model).unwrap(), digest: DIGEST };
    rig.workers.iter_mut().for_each(|(_, capacity)| capacity.files.push(both("n")));
    rig.models.push(ModelId::new("n").unwrap());
    // The plan cannot be placed yet; its workers are kept free.
    rig.set_plan("m", &[&[("a", 0, 1), ("b", 1, 2), ("z", 2, 3)]]);
    let planned = rig.settle(2);
    assert_eq!(planned.len(), 1);
    assert!(planned[0].iter().all(|name| ["c", "d"].contains(&name.as_str())), "{planned:?}");
    assert!(rig.table.replicas().values().all(|plan| plan.model.as_str() == "n"));
    // Another model's replica on its workers is dropped once the plan can be placed.
    rig.set_plan("m", &[&[("a", 0, 1), ("c", 1, 3)]]);
    let placed = rig.settle(2);
    assert_eq!(placed, [["a", "c"], ["b", "d"]], "n has those who are not named any more");
    rig.set_plan("n", &[&[("d", 0, 3)]]);
    assert_eq!(rig.settle(2), [["a", "c"].as_slice(), &["d"]]);
}

#[test]
fn a_withdrawn_plan_leaves_the_model_to_the_leader() {
    let mut rig = Rig::new(&["a", "b", "c", "d"]);
    rig.set_plan("m", &[B_A]);
    assert_eq!(rig.settle(2), [["b", "a"]]);
    let plan_indices = rig.plan_indices();
    rig.make(Change::OperatorPlanWithdrawn(ModelId::new("m").unwrap()));
    let after = rig.settle(2);
    assert_eq!((after.len(), rig.plan_indices()[0]), (2, plan_indices[0]), "what stands may stand");
    rig.gone.push(node("a"));
    rig.without("a");
    rig.workers.push((node("e"), capacity(1 << 30, DIGEST)));
    let healed = rig.settle(2);
    assert!(healed.len() == 2 && healed.iter().flatten().all(|name| name != "a"), "{healed:?}");
}

#[test]
fn a_plan_that_does_not_fit_is_reported_with_its_numbers() {
    let mut rig = Rig::new(&["a", "b"]);
    rig.workers[1].1.memory = 1000;
    rig.set_plan("m", &[A_B]);
    assert!(rig.why("m").contains("worker b needs") && rig.why("m").contains("has 1000"), "{}", rig.why("m"));
    rig.workers[1].1 = capacity(1 << 30, DIGEST);
    rig.set_plan("m", &[&[("a", 0, 2), ("b", 2, 9)]]);
    assert!(rig.why("m").contains("3 layers"), "{}", rig.why("m"));
}

#[test]
fn no_cut_separates_a_layer_from_the_kv_it_reads() {
    let mut rig = Rig::new(&["a", "b"]);
    rig.costs = costs("gemma4/gemma4-f32.gguf");
    let layers = rig.costs.layers() as u32;
    let allowed = rig.costs.cuts().to_vec();
    let wrong = (1..rig.costs.layers()).find(|at| !allowed.contains(at)).unwrap() as u32;
    rig.set_plan("m", &[&[("a", 0, wrong), ("b", wrong, layers)]]);
    assert!(rig.settle(2).is_empty());
    assert!(rig.why("m").contains(&format!("a stage cannot begin with layer {wrong}")), "{}", rig.why("m"));
    let right = allowed[0] as u32;
    rig.set_plan("m", &[&[("a", 0, right), ("b", right, layers)]]);
    assert_eq!(rig.settle(2), [["a", "b"]]);
}

#[test]
fn workers_without_the_file_receive_it_and_blocked_files_are_not_placed() {
    let mut rig = Rig::new(&["a", "b", "c"]);
    rig.workers.iter_mut().take(2).for_each(|(_, capacity)| capacity.files.clear());
    rig.set_plan("m", &[A_B]);
    assert_eq!(rig.settle(2), [["a", "b"]], "c has what they need");
    let mut rig = Rig::new(&["a", "b"]);
    rig.workers.iter_mut().for_each(|(_, capacity)| capacity.files.clear());
    rig.set_plan("m", &[A_B]);
    assert!(rig.settle(2).is_empty());
    assert!(rig.why("m").contains("no worker of the pool has an unblocked file"), "{}", rig.why("m"));
    // The file that most of them have, not the first one.
    let mut rig = Rig::new(&["a", "b"]);
    rig.workers[1].1 = capacity(1 << 30, [2; 32]);
    rig.workers[0].1.files.push(OfferedModelFile { model: ModelId::new("m").unwrap(), digest: [2; 32] });
    rig.set_plan("m", &[A_B]);
    assert_eq!(rig.settle(2).len(), 1);
    assert!(rig.table.replicas().values().all(|plan| plan.model_digest == [2; 32]));
    // A blocked file is not placed.
    rig.unusable_file = Some("no words".into());
    assert!(rig.settle(2).is_empty());
    assert!(!rig.why("m").is_empty());
    rig.unusable_file = None;
    rig.models.clear();
    assert!(rig.why("m").contains("does not offer"), "{}", rig.why("m"));
}
