mod stages;

use super::*;
use consensus::Incarnation;
use consensus::table::{
    DeploymentDropped, DeploymentSet, DeploymentSettings, Entry, GroupMember, Level, OpenSession, Outcome,
    SessionChange, encode_entry,
};
use proto::deployment::ModelFacts;
use proto::served_model::{BUILT_IN, ModelTask};
use std::cell::RefCell;
use std::collections::HashMap;

fn node(name: &str) -> NodeId {
    NodeId::new(name).unwrap()
}

fn id(name: &str) -> ModelId {
    ModelId::new(name).unwrap()
}

/// The digest of a model in these tests: its name's bytes.
fn facts(model: &str, needed_bytes: u64) -> ModelFacts {
    let mut digest = [0; 32];
    digest[..model.len()].copy_from_slice(model.as_bytes());
    ModelFacts { digest, tokenizer_digest: [1; 32], task: ModelTask::Generate, context: 8192, needed_bytes }
}

fn version(model: &str) -> ModelId {
    id(model).version(&facts(model, 0).digest).unwrap()
}

/// A cluster whose workers do at once what they are told, except where a test says otherwise.
struct Cluster {
    table: Table,
    client: consensus::table::ClientId,
    seq: u64,
    hosts: Vec<Host>,
    queued: BTreeMap<ModelId, usize>,
    /// Milliseconds.
    waited: HashMap<ModelId, u64>,
    uses: HashMap<ModelId, f64>,
    gone: Vec<NodeId>,
    failed: RefCell<Vec<(ModelId, NodeId)>>,
    /// Bytes that each model needs.
    needs: HashMap<String, u64>,
    layers: HashMap<String, Layers>,
}

impl Cluster {
    /// Workers with a budget in bytes.
    fn new(workers: &[(&str, u64)]) -> Self {
        let seat = GroupMember {
            node: node("c0"),
            incarnation: Incarnation(1),
            quic: "127.0.0.1:1".into(),
            level: Level::OWN,
        };
        let mut table = Table::genesis(1, [seat]);
        let open = encode_entry(&Entry::OpenSession(OpenSession { nonce: 1 })).unwrap();
        let Outcome::Opened(client) = table.apply(2, &open, false).outcome else { panic!() };
        let host = |&(name, budget): &(&str, u64)| Host {
            name: node(name),
            labels: BTreeSet::new(),
            engine: BUILT_IN.to_owned(),
            draining: false,
            stages: None,
            report: Some(ModelsReport { version: u64::MAX, budget, ..ModelsReport::default() }),
        };
        Self {
            table,
            client,
            seq: 0,
            hosts: workers.iter().map(host).collect(),
            queued: BTreeMap::new(),
            waited: HashMap::new(),
            uses: HashMap::new(),
            gone: Vec::new(),
            failed: RefCell::default(),
            needs: HashMap::new(),
            layers: HashMap::new(),
        }
    }

    fn make(&mut self, change: Change) {
        self.seq += 1;
        let entry =
            Entry::Change(SessionChange { client: self.client, seq: self.seq, change: change.clone() });
        let applied = self.table.apply(self.table.applied() + 1, &encode_entry(&entry).unwrap(), false);
        assert_eq!(applied.outcome, Outcome::Done, "{change:?}");
    }

    fn set(&mut self, model: &str, source: Option<ModelSource>, settings: DeploymentSettings) {
        let model = id(model);
        let set = DeploymentSet { model, settings, source, reread: false, canary: None, from: None };
        self.make(Change::DeploymentSet(Box::new(set)));
    }

    /// Deploys a model that needs so many bytes.
    fn deploy(&mut self, model: &str, needed: u64, settings: DeploymentSettings) {
        self.needs.insert(model.to_owned(), needed);
        self.set(model, Some(ModelSource::File(format!("/{model}"))), settings);
    }

    fn next(&self) -> Option<Change> {
        decide(&View {
            table: &self.table,
            hosts: &self.hosts,
            is_gone: &|node| self.gone.contains(node),
            queued: &self.queued,
            waited: &|version| Duration::from_millis(self.waited.get(version).copied().unwrap_or(0)),
            failure: &|version, node| {
                let failed = self.failed.borrow().contains(&(version.clone(), node.clone()));
                failed.then(|| "exit status: 3".to_owned())
            },
            uses: &|version| self.uses.get(version).copied().unwrap_or(0.0),
            layers: &|version| self.layers.get(version.name()).cloned(),
        })
    }

    /// Makes all changes that are due; the workers follow. Returns them.
    fn settle(&mut self) -> Vec<Change> {
        let mut made = Vec::new();
        loop {
            self.follow();
            let Some(change) = self.next() else { return made };
            assert!(made.len() < 100, "it never ends: {made:?}");
            made.push(change.clone());
            self.make(change);
        }
    }

    /// The workers report their files and load what is placed on them.
    fn follow(&mut self) {
        let deployments = self.table.deployments().models().clone();
        for host in &mut self.hosts {
            let Some(report) = &mut host.report else { continue };
            for (model, deployment) in &deployments {
                if deployment.settings.engine != host.engine {
                    continue;
                }
                for found in &deployment.versions {
                    let needed = self.needs.get(model.as_str()).copied().unwrap_or(1);
                    let source = found.source.as_str().trim_start_matches('/');
                    match found.name(model) {
                        None => {
                            report.models.retain(|known| known.model != *model);
                            let facts = Some(facts(source, needed));
                            report
                                .models
                                .push(ModelReport { facts, ..reported(model.clone(), ModelState::Absent) });
                        }
                        Some(version) => {
                            let plan = self.table.models().get(&version);
                            let placed = plan.is_some_and(|plan| plan.placement.contains(&host.name));
                            let known = report.models.iter_mut().find(|known| known.model == version);
                            let sleeps =
                                known.as_ref().is_some_and(|known| known.state == ModelState::Asleep);
                            match (placed, known) {
                                (true, Some(known)) if known.state == ModelState::Asleep => {
                                    (known.state, known.idle_ms) = (ModelState::Ready, 1);
                                }
                                (true, None) => {
                                    report.models.push(ModelReport {
                                        idle_ms: 1,
                                        ..reported(version, ModelState::Ready)
                                    });
                                }
                                // The files of a model over several workers are fetched before.
                                (false, None) if deployment.settings.shards > 1 => {
                                    report.models.push(reported(version, ModelState::Asleep));
                                }
                                (false, Some(known)) if !sleeps => known.state = ModelState::Asleep,
                                _ => {}
                            }
                        }
                    }
                }
            }
        }
    }

    fn report(&mut self, worker: &str, version: &ModelId) -> &mut ModelReport {
        let host = self.hosts.iter_mut().find(|host| host.name.as_str() == worker).unwrap();
        host.report.as_mut().unwrap().models.iter_mut().find(|report| report.model == *version).unwrap()
    }

    fn places(&self, version: &ModelId) -> Vec<String> {
        let plan = self.table.models().get(version);
        plan.map(|plan| plan.placement.iter().map(ToString::to_string).collect()).unwrap_or_default()
    }

    fn want(&mut self, model: &str) {
        self.make(Change::ModelWanted(version(model)));
    }
}

fn reported(model: ModelId, state: ModelState) -> ModelReport {
    ModelReport {
        model,
        state,
        permille: 0,
        eta_ms: 0,
        failures: 0,
        reason: String::new(),
        bytes: 0,
        idle_ms: 0,
        has_files: true,
        facts: None,
    }
}

fn settings() -> DeploymentSettings {
    DeploymentSettings::default()
}

#[test]
fn a_model_is_loaded_when_it_is_asked_for_where_it_has_room() {
    let mut cluster = Cluster::new(&[("w0", 10), ("w1", 20)]);
    cluster.deploy("a", 15, settings());
    cluster.settle();
    assert!(cluster.table.models().is_empty(), "nothing asks for it");
    cluster.want("a");
    cluster.settle();
    assert_eq!(cluster.places(&version("a")), ["w1"]);
    cluster.deploy("b", 8, DeploymentSettings { min: 1, ..settings() });
    cluster.settle();
    assert_eq!(cluster.places(&version("b")), ["w0"], "a replica that stays ready is loaded unasked");
}

#[test]
fn the_least_used_idle_model_makes_room() {
    let mut cluster = Cluster::new(&[("w0", 20)]);
    for model in ["a", "b", "c"] {
        cluster.deploy(model, 10, settings());
        cluster.settle();
    }
    cluster.want("a");
    cluster.want("b");
    cluster.settle();
    cluster.uses = HashMap::from([(version("a"), 5.0), (version("b"), 1.0)]);
    cluster.want("c");
    cluster.settle();
    assert_eq!((cluster.places(&version("a")).len(), cluster.places(&version("b")).len()), (1, 0));
    assert_eq!(cluster.places(&version("c")), ["w0"]);
    // Of equally used ones, that which was used last stays.
    cluster.uses.clear();
    cluster.report("w0", &version("a")).idle_ms = 10;
    cluster.report("w0", &version("c")).idle_ms = 20;
    cluster.want("b");
    cluster.settle();
    assert_eq!(cluster.places(&version("c")), Vec::<String>::new());
}

#[test]
fn room_is_what_models_do_not_hold() {
    let mut cluster = Cluster::new(&[("w0", 30)]);
    for model in ["a", "b", "c"] {
        cluster.deploy(model, 10, settings());
        cluster.settle();
    }
    cluster.want("a");
    cluster.want("b");
    cluster.settle();
    // Running requests of this model fill a larger cache than it needs at least.
    (cluster.report("w0", &version("a")).bytes, cluster.report("w0", &version("a")).idle_ms) = (12, 0);
    cluster.want("c");
    cluster.settle();
    let places = ["a", "b", "c"].map(|model| cluster.places(&version(model)).len());
    assert_eq!(places, [1, 0, 1], "a third one would not fit");
}

#[test]
fn the_model_whose_requests_have_waited_longest_together_is_loaded_first() {
    let first = |waiting: [(&'static str, usize, u64); 2]| {
        let mut cluster = Cluster::new(&[("w0", 10)]);
        for (model, ..) in waiting {
            cluster.deploy(model, 10, settings());
            cluster.settle();
        }
        for (model, requests, waited) in waiting {
            cluster.want(model);
            cluster.queued.insert(version(model), requests);
            cluster.waited.insert(version(model), waited);
        }
        cluster.settle();
        let placed = |(model, ..): &(&'static str, usize, u64)| !cluster.places(&version(model)).is_empty();
        waiting.iter().find(|of_model| placed(of_model)).unwrap().0
    };
    assert_eq!(first([("a", 1, 300), ("b", 4, 100)]), "b");
    assert_eq!(first([("a", 1, 500), ("b", 4, 100)]), "a", "one that waits alone is not left for ever");
    assert_eq!(first([("a", 1, 0), ("b", 1, 0)]), "a", "it was asked for first");
}

#[test]
fn a_model_with_requests_of_higher_priority_or_that_must_stay_keeps_its_room() {
    let busy = |cluster: &mut Cluster| cluster.report("w0", &version("a")).idle_ms = 0;
    let queued = |cluster: &mut Cluster| {
        cluster.queued.insert(version("a"), 1);
    };
    let higher = |cluster: &mut Cluster| {
        cluster.set("a", None, DeploymentSettings { priority: 2, ..settings() });
    };
    let stays = |cluster: &mut Cluster| cluster.set("a", None, DeploymentSettings { min: 1, ..settings() });
    let cases: [&dyn Fn(&mut Cluster); 4] = [&busy, &queued, &higher, &stays];
    for case in cases {
        let mut cluster = Cluster::new(&[("w0", 10)]);
        for model in ["a", "b"] {
            cluster.deploy(model, 10, settings());
            cluster.settle();
        }
        cluster.want("a");
        cluster.settle();
        case(&mut cluster);
        cluster.want("b");
        assert_eq!(cluster.settle(), [], "it waits");
        assert_eq!(cluster.places(&version("a")), ["w0"]);
    }
}

#[test]
fn a_model_that_no_worker_can_hold_is_refused_with_the_reason() {
    let mut cluster = Cluster::new(&[("w0", 10)]);
    cluster.deploy("a", 11, settings());
    cluster.settle();
    cluster.want("a");
    cluster.settle();
    let refused = |cluster: &Cluster| match &cluster.table.deployments().demand()[&version("a")] {
        Demand::Refused(reason) => reason.clone(),
        Demand::Wanted(_) => panic!("it is not refused"),
    };
    assert!(refused(&cluster).contains("11 bytes"), "{}", refused(&cluster));
    cluster.set("a", None, DeploymentSettings { nodes: vec!["gpu=gb10".into()], ..settings() });
    cluster.want("a");
    cluster.settle();
    assert!(refused(&cluster).contains("gpu=gb10"));
}

#[test]
fn a_model_is_placed_where_its_engine_is_and_moves_with_the_setting() {
    let mut cluster = Cluster::new(&[("w0", 100), ("w1", 10)]);
    let with = |engine: &str| DeploymentSettings { engine: engine.into(), min: 1, ..settings() };
    let reason = |cluster: &Cluster| {
        unfit(&cluster.hosts, cluster.table.deployments().get("a").unwrap()).unwrap_or_default()
    };
    cluster.deploy("a", 10, with("vllm"));
    assert_eq!(cluster.next(), None, "no worker can read its files");
    assert_eq!(reason(&cluster), "no worker offers the engine vllm");
    cluster.hosts[1].engine = "vllm".into();
    cluster.settle();
    assert_eq!((cluster.places(&version("a")), reason(&cluster)), (vec!["w1".to_owned()], String::new()));
    cluster.set("a", None, with(BUILT_IN));
    cluster.settle();
    assert_eq!(cluster.places(&version("a")), ["w0"]);
    let labelled = DeploymentSettings { nodes: vec!["zone=b".into()], ..with("vllm") };
    cluster.set("a", None, labelled);
    assert_eq!(reason(&cluster), "no worker with the engine vllm has the labels zone=b");
    cluster.set("a", None, with("vllm"));
    cluster.hosts[1].draining = true;
    assert_eq!(reason(&cluster), "every worker that may serve it is drained");
    // One that has not reported yet may be another one.
    cluster.hosts[0].report = None;
    assert_eq!(reason(&cluster), "");
    cluster.hosts.clear();
    assert_eq!(reason(&cluster), "no worker that loads models is connected");
}

#[test]
fn only_workers_with_the_labels_serve_a_model() {
    let mut cluster = Cluster::new(&[("w0", 100), ("w1", 10)]);
    cluster.hosts[1].labels.insert("gpu=gb10".into());
    let labelled = DeploymentSettings { nodes: vec!["gpu=gb10".into()], min: 1, ..settings() };
    cluster.deploy("a", 10, labelled.clone());
    cluster.settle();
    assert_eq!(cluster.places(&version("a")), ["w1"]);
    // A label that the worker loses, or a drain, takes the model from it.
    cluster.hosts[1].labels.clear();
    cluster.hosts[0].labels.insert("gpu=gb10".into());
    cluster.settle();
    assert_eq!(cluster.places(&version("a")), ["w0"]);
    cluster.hosts[1].labels.insert("gpu=gb10".into());
    cluster.hosts[0].draining = true;
    cluster.settle();
    assert_eq!(cluster.places(&version("a")), ["w1"]);
}

#[test]
fn a_worker_that_is_gone_is_replaced_and_one_that_is_away_is_not() {
    let mut cluster = Cluster::new(&[("w0", 10), ("w1", 10)]);
    cluster.deploy("a", 10, DeploymentSettings { min: 1, ..settings() });
    cluster.settle();
    let first = cluster.places(&version("a")).remove(0);
    cluster.hosts.retain(|host| host.name.as_str() != first);
    assert_eq!(cluster.settle(), []);
    cluster.gone.push(node(&first));
    cluster.settle();
    let second = cluster.places(&version("a"));
    assert!(second.len() == 1 && second[0] != first, "{second:?}");
}

#[test]
fn an_idle_replica_sleeps_and_one_that_must_stay_does_not() {
    let mut cluster = Cluster::new(&[("w0", 10), ("w1", 10)]);
    cluster.deploy("a", 10, DeploymentSettings { min: 1, max: 2, idle_s: 60, ..settings() });
    cluster.settle();
    let first = cluster.places(&version("a")).remove(0);
    // All replicas are busy, and a request waits.
    cluster.report(&first, &version("a")).idle_ms = 0;
    cluster.queued.insert(version("a"), 1);
    cluster.settle();
    assert_eq!(cluster.places(&version("a")).len(), 2);
    cluster.queued.clear();
    cluster.report("w0", &version("a")).idle_ms = 70_000;
    cluster.report("w1", &version("a")).idle_ms = 61_000;
    cluster.settle();
    assert_eq!(cluster.places(&version("a")), ["w1"], "the one that is idle for longer sleeps");
}

#[test]
fn a_sleeping_model_wakes_where_it_sleeps() {
    let mut cluster = Cluster::new(&[("w0", 10), ("w1", 100)]);
    cluster.deploy("a", 10, DeploymentSettings { idle_s: 60, ..settings() });
    cluster.settle();
    cluster.hosts[1].draining = true;
    cluster.want("a");
    cluster.settle();
    assert_eq!(cluster.places(&version("a")), ["w0"]);
    cluster.hosts[1].draining = false;
    cluster.report("w0", &version("a")).idle_ms = 60_000;
    cluster.settle();
    assert!(cluster.places(&version("a")).is_empty());
    // The other worker has more room, but would read the files.
    cluster.hosts[1].report.as_mut().unwrap().models.retain(|report| report.model != version("a"));
    cluster.want("a");
    let change = cluster.next();
    assert!(
        matches!(&change, Some(Change::ModelPlanned(plan)) if plan.placement == [node("w0")]),
        "{change:?}"
    );
}

#[test]
fn a_load_that_fails_is_tried_elsewhere_and_then_refused() {
    let mut cluster = Cluster::new(&[("w0", 10), ("w1", 10)]);
    cluster.deploy("a", 10, settings());
    cluster.settle();
    cluster.want("a");
    cluster.settle();
    let mut tried = Vec::new();
    while let Some(worker) = cluster.places(&version("a")).pop() {
        cluster.follow();
        let report = cluster.report(&worker, &version("a"));
        (report.state, report.failures) = (ModelState::Failed, 2);
        cluster.failed.borrow_mut().push((version("a"), node(&worker)));
        tried.push(worker);
        let Some(change) = cluster.next() else { break };
        cluster.make(change);
        cluster.want("a");
        if let Some(change) = cluster.next() {
            cluster.make(change);
        }
    }
    tried.sort();
    assert_eq!(tried, ["w0", "w1"]);
    let Demand::Refused(reason) = &cluster.table.deployments().demand()[&version("a")] else { panic!() };
    assert!(reason.contains("failed to load"), "{reason}");
    assert!(reason.contains("w0: exit status: 3; w1: exit status: 3"), "{reason}");
}

#[test]
fn files_that_cannot_be_loaded_are_not_placed_again() {
    let mut cluster = Cluster::new(&[("w0", 10), ("w1", 10)]);
    cluster.deploy("a", 10, DeploymentSettings { min: 1, ..settings() });
    cluster.settle();
    let worker = cluster.places(&version("a")).remove(0);
    let report = cluster.report(&worker, &version("a"));
    (report.state, report.reason) = (ModelState::BadFile, "no layers".into());
    let Some(change @ Change::ModelBlocked(_)) = cluster.next() else { panic!("it is not blocked") };
    cluster.make(change);
    assert!(cluster.places(&version("a")).is_empty());
    assert_eq!(cluster.next(), None);
}

#[test]
fn a_version_that_no_worker_can_read_fails_with_all_reasons() {
    let mut cluster = Cluster::new(&[("w0", 10), ("w1", 10)]);
    cluster.set("a", Some(ModelSource::File("/a".into())), settings());
    for (worker, state, failures) in
        [("w0", ModelState::BadFile, 1), ("w1", ModelState::Failed, ATTEMPTS - 1)]
    {
        let host = cluster.hosts.iter_mut().find(|host| host.name.as_str() == worker).unwrap();
        let report = ModelReport { failures, reason: format!("of {worker}"), ..reported(id("a"), state) };
        host.report.as_mut().unwrap().models.push(report);
    }
    assert_eq!(cluster.next(), None, "a worker still tries");
    cluster.report("w1", &id("a")).failures = ATTEMPTS;
    let Some(Change::VersionFailed(failed)) = cluster.next() else { panic!() };
    assert_eq!(failed.reason, "w0: of w0; w1: of w1");
}

#[test]
fn one_worker_downloads_and_all_look_for_a_file() {
    let mut cluster = Cluster::new(&[("w0", 10), ("w1", 10)]);
    cluster.set("f", Some(ModelSource::File("/f".into())), settings());
    cluster.set("d", Some(ModelSource::Fetch("smollm2-135m".into())), settings());
    let asked = |model: &str| {
        let deployment = cluster.table.deployments().get(model).unwrap();
        let asked = identifiers(&cluster.hosts, deployment, &deployment.versions[0], &id(model));
        asked.iter().map(|host| host.name.to_string()).collect::<Vec<_>>()
    };
    assert_eq!((asked("f"), asked("d")), (vec!["w0".into(), "w1".into()], vec!["w0".to_owned()]));
}

#[test]
fn a_new_version_replaces_the_old_one_once_it_is_ready() {
    let mut cluster = Cluster::new(&[("w0", 20)]);
    cluster.deploy("a", 10, DeploymentSettings { min: 1, ..settings() });
    cluster.settle();
    cluster.set("a", Some(ModelSource::File("/b".into())), DeploymentSettings { min: 1, ..settings() });
    cluster.follow();
    let mut changes = cluster.settle();
    let new = id("a").version(&facts("b", 0).digest).unwrap();
    assert_eq!(cluster.places(&version("a")), ["w0"], "requests may still arrive for it");
    cluster.report("w0", &version("a")).idle_ms = RETIRED_AFTER;
    changes.extend(cluster.settle());
    let at = |wanted: &dyn Fn(&Change) -> bool| changes.iter().position(wanted).unwrap();
    let placed = at(&|change| matches!(change, Change::ModelPlanned(plan) if plan.model == new));
    let promoted = at(&|change| matches!(change, Change::RolloutEnded(ended) if ended.promoted));
    let dropped = at(&|change| *change == Change::ModelDropped(version("a")));
    assert!(placed < promoted && promoted < dropped, "{changes:?}");
    assert_eq!((cluster.places(&new).len(), cluster.places(&version("a")).len()), (1, 0));
}

#[test]
fn without_room_for_both_versions_requests_wait_for_the_new_one() {
    let mut cluster = Cluster::new(&[("w0", 10)]);
    cluster.deploy("a", 10, DeploymentSettings { min: 1, ..settings() });
    cluster.settle();
    cluster.set("a", Some(ModelSource::File("/b".into())), DeploymentSettings { min: 1, ..settings() });
    cluster.settle();
    let new = id("a").version(&facts("b", 0).digest).unwrap();
    assert_eq!(cluster.places(&new), ["w0"]);
}

#[test]
fn a_canary_stays_until_it_is_judged() {
    let mut cluster = Cluster::new(&[("w0", 20)]);
    cluster.deploy("a", 10, DeploymentSettings { min: 1, ..settings() });
    cluster.settle();
    let canary = consensus::table::CanaryShare {
        permille: 50,
        min_requests: 1,
        max_errors_permille: 1,
        max_ttft_percent: 200,
    };
    let source = Some(ModelSource::File("/b".into()));
    let set = DeploymentSet {
        model: id("a"),
        settings: settings(),
        source,
        reread: false,
        canary: Some(canary),
        from: None,
    };
    cluster.make(Change::DeploymentSet(Box::new(set)));
    cluster.settle();
    let new = id("a").version(&facts("b", 0).digest).unwrap();
    assert_eq!(cluster.places(&new), ["w0"]);
    assert!(cluster.table.deployments().get("a").unwrap().rollout.is_some());
    cluster.make(Change::DeploymentDropped(DeploymentDropped { model: id("a"), from: None }));
    assert_eq!((cluster.settle(), cluster.table.models().len()), (Vec::new(), 0));
}
