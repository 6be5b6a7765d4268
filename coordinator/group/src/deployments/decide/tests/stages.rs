use super::*;
use ::model::costs::ModelCosts;
use ::model::{ModelFile, ModelSpec};
use std::path::Path;

const MIB: u64 = 1 << 20;

fn layers() -> Layers {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tiny/llama/llama-f32.gguf");
    let file = ModelFile::open(path).unwrap();
    Layers { costs: ModelCosts::of_file(&ModelSpec::from_file(&file).unwrap(), &file), context: 512 }
}

/// Workers of 70 MiB: room for one stage, which takes a little more than 48 MiB.
fn cluster(workers: &[&str]) -> Cluster {
    let workers: Vec<(&str, u64)> = workers.iter().map(|name| (*name, 70 * MIB)).collect();
    let mut cluster = Cluster::new(&workers);
    for host in &mut cluster.hosts {
        host.stages = Some(StageSpeed { bandwidth: 20_000_000_000, compute: 100_000_000_000 });
    }
    cluster.layers.insert("big".to_owned(), layers());
    cluster
}

fn over(shards: u16) -> DeploymentSettings {
    DeploymentSettings { shards, ..settings() }
}

/// The workers of the replicas, in the order of their layers.
fn replicas(cluster: &Cluster) -> Vec<Vec<String>> {
    let nodes = |plan: &consensus::table::ReplicaPlan| {
        let mut end = 0;
        for stage in &plan.stages {
            assert_eq!(stage.layers.0, end, "{plan:?}");
            end = stage.layers.1;
        }
        assert_eq!(end as usize, layers().costs.layers());
        plan.stages.iter().map(|stage| stage.node.to_string()).collect()
    };
    cluster.table.replicas().values().map(nodes).collect()
}

#[test]
fn a_model_over_two_workers_is_cut_and_moves_as_one() {
    let mut cluster = cluster(&["w0", "w1", "w2"]);
    cluster.deploy("big", 100 * MIB, over(2));
    cluster.settle();
    cluster.want("big");
    cluster.settle();
    let places = cluster.places(&version("big"));
    assert_eq!(places.len(), 2);
    let cut = replicas(&cluster);
    assert_eq!(cut.iter().flatten().collect::<BTreeSet<_>>(), places.iter().collect());
    let lost = cluster.hosts.iter().position(|host| host.name.as_str() == places[1]).unwrap();
    let lost = cluster.hosts.remove(lost).name;
    cluster.gone.push(lost);
    cluster.settle();
    assert_eq!((cluster.places(&version("big")), replicas(&cluster)), (Vec::new(), Vec::new()));
    cluster.want("big");
    cluster.settle();
    assert_eq!(replicas(&cluster).concat().len(), 2);
    assert!(!replicas(&cluster).concat().contains(&places[1]));
    // The worker that takes its requests tells for how long it has been idle.
    let lead = replicas(&cluster)[0][0].clone();
    cluster.report(&lead, &version("big")).idle_ms = 601_000;
    cluster.settle();
    assert_eq!((cluster.places(&version("big")), replicas(&cluster)), (Vec::new(), Vec::new()));
}

#[test]
fn idle_models_leave_all_workers_of_a_replica() {
    let mut cluster = cluster(&["w0", "w1"]);
    for (model, size) in [("a", 60), ("b", 40)] {
        cluster.deploy(model, size * MIB, settings());
        cluster.settle();
        cluster.want(model);
        cluster.settle();
    }
    cluster.deploy("big", 100 * MIB, over(2));
    cluster.settle();
    let b = cluster.places(&version("b"))[0].clone();
    cluster.report(&b, &version("b")).idle_ms = 0;
    cluster.want("big");
    cluster.settle();
    assert_eq!(
        cluster.places(&version("a")).len(),
        1,
        "no model leaves for a replica that still has no room"
    );
    cluster.report(&b, &version("b")).idle_ms = 5;
    cluster.settle();
    assert_eq!(replicas(&cluster).concat().len(), 2);
    assert!(cluster.places(&version("a")).is_empty() && cluster.places(&version("b")).is_empty());
    // And back.
    let lead = replicas(&cluster)[0][0].clone();
    cluster.report(&lead, &version("big")).idle_ms = 5;
    cluster.want("a");
    cluster.settle();
    assert_eq!((cluster.places(&version("a")).len(), replicas(&cluster).len()), (1, 0));
}

#[test]
fn a_replica_for_which_there_are_no_workers_is_refused() {
    let mut cluster = cluster(&["w0", "w1"]);
    let refused = |cluster: &mut Cluster, workers: &str| {
        cluster.want("big");
        cluster.settle();
        match cluster.table.deployments().demand().get(&version("big")) {
            Some(Demand::Refused(reason)) => assert!(reason.contains(workers), "{reason}"),
            other => panic!("{other:?}"),
        }
    };
    cluster.deploy("big", 100 * MIB, over(3));
    cluster.settle();
    refused(&mut cluster, "3 workers");
    cluster.set("big", None, over(2));
    cluster.hosts[1].report.as_mut().unwrap().budget = 40 * MIB;
    refused(&mut cluster, "each of 2 workers, and only 1");
    cluster.set("big", None, over(64));
    refused(&mut cluster, "cannot be cut");
}

#[test]
fn another_number_of_shards_needs_other_groups() {
    let mut cluster = cluster(&["w0", "w1"]);
    cluster.deploy("big", 60 * MIB, DeploymentSettings { min: 1, ..over(1) });
    cluster.settle();
    assert_eq!((cluster.places(&version("big")).len(), replicas(&cluster).len()), (1, 0));
    cluster.set("big", None, DeploymentSettings { min: 1, ..over(2) });
    cluster.settle();
    assert_eq!((cluster.places(&version("big")).len(), replicas(&cluster).len()), (2, 1));
}
