use super::*;
use proto::deployment::{ModelFacts, ModelSource};

fn chat() -> ModelId {
    ModelId::new("chat").unwrap()
}

fn file(name: &str) -> Option<ModelSource> {
    Some(ModelSource::File(name.into()))
}

fn canary(permille: u16) -> CanaryShare {
    CanaryShare { permille, min_requests: 100, max_errors_permille: 20, max_ttft_percent: 150 }
}

fn set(source: Option<ModelSource>) -> DeploymentSet {
    let settings = DeploymentSettings { nodes: vec!["gpu=gb10".into()], ..DeploymentSettings::default() };
    DeploymentSet { model: chat(), settings, source, reread: false, canary: None, from: None }
}

fn deploy(set: DeploymentSet) -> Change {
    Change::DeploymentSet(Box::new(set))
}

fn facts(digest: u8) -> ModelFacts {
    ModelFacts {
        digest: [digest; 32],
        tokenizer_digest: [2; 32],
        task: ModelTask::Generate,
        context: 8192,
        needed_bytes: 1 << 20,
    }
}

fn identified(version: u64, digest: u8) -> Change {
    Change::VersionIdentified(VersionIdentified { model: chat(), version, facts: facts(digest) })
}

fn ended(version: u64, promoted: bool) -> Change {
    Change::RolloutEnded(RolloutEnded { model: chat(), version, promoted, reason: "told".into() })
}

fn started(version: u64, canary: Option<CanaryShare>) -> Change {
    Change::RolloutStarted(RolloutStarted { model: chat(), version, canary })
}

fn version_plan(digest: u8) -> ModelPlan {
    let model = chat().version(&[digest; 32]).unwrap();
    ModelPlan { model, model_digest: [digest; 32], canary: None, ..plan("x") }
}

pub(super) fn every_change() -> Vec<Change> {
    let model = chat().version(&[7; 32]).unwrap();
    vec![
        deploy(DeploymentSet {
            reread: true,
            canary: Some(canary(50)),
            from: Some(300),
            ..set(file("/m.gguf"))
        }),
        Change::DeploymentDropped(DeploymentDropped { model: chat(), from: Some(300) }),
        identified(300, 7),
        Change::VersionFailed(VersionFailed { model: chat(), version: 300, reason: "x".into() }),
        ended(300, true),
        Change::ModelWanted(model.clone()),
        Change::ModelRefused(ModelRefused { model, reason: "x".into() }),
        started(300, Some(canary(50))),
    ]
}

/// A group of coordinators that all support deployments.
fn client() -> Client {
    let mut client = nodes::client();
    client.table.applied = 100;
    client
}

/// `chat` is served in version 1, and version 2 is rolled out.
pub(super) fn rolled_out() -> Client {
    let mut client = client();
    client.done(deploy(set(file("/1.gguf"))));
    let first = client.table.applied();
    client.done(identified(first, 1));
    client.done(Change::ModelPlanned(version_plan(1)));
    client.done(deploy(DeploymentSet { canary: Some(canary(50)), ..set(file("/2.gguf")) }));
    let second = client.table.applied();
    client.done(identified(second, 2));
    client.done(Change::ModelWanted(chat().version(&[2; 32]).unwrap()));
    client
}

fn deployment(client: &Client) -> &Deployment {
    client.table.deployments().get("chat").unwrap()
}

#[test]
fn a_member_of_an_earlier_level_keeps_models_from_being_deployed() {
    let mut client = Client::new();
    assert_eq!(client.refused(deploy(set(file("/m")))), Refusal::LevelTooLow(Level(1)));
}

#[test]
fn a_version_has_a_place_once_its_files_are_known() {
    let mut client = client();
    assert_eq!(client.refused(deploy(set(None))), Refusal::Unknown(Kind::Deployment), "no source");
    client.done(deploy(set(file("/1.gguf"))));
    let first = client.table.applied();
    assert_eq!(deployment(&client).active, first);
    assert_eq!(client.refused(Change::ModelPlanned(version_plan(1))), Refusal::Unknown(Kind::Version));
    assert_eq!(client.refused(identified(first + 1, 1)), Refusal::Unknown(Kind::Version));
    client.done(identified(first, 1));
    let name = chat().version(&[1; 32]).unwrap();
    client.done(Change::ModelWanted(name.clone()));
    assert!(matches!(client.table.deployments().demand()[&name], Demand::Wanted(_)));
    client.done(Change::ModelPlanned(version_plan(1)));
    assert!(client.table.deployments().demand().is_empty(), "it has a place");
    assert_eq!(
        client.refused(Change::ModelWanted(chat().version(&[9; 32]).unwrap())),
        Refusal::Unknown(Kind::Version)
    );
    client.done(Change::ModelBlocked(ModelBlocked { model_digest: [1; 32], ..blocked(1) }));
    assert!(client.table.models().is_empty());
    assert_eq!(client.refused(Change::ModelPlanned(version_plan(1))), Refusal::Blocked);
}

#[test]
fn a_demand_is_refused_and_asked_for_again() {
    let mut client = rolled_out();
    let name = chat().version(&[2; 32]).unwrap();
    client.done(Change::ModelRefused(ModelRefused { model: name.clone(), reason: "no room".into() }));
    assert_eq!(client.table.deployments().demand()[&name], Demand::Refused("no room".into()));
    client.done(Change::ModelWanted(name.clone()));
    assert!(matches!(client.table.deployments().demand()[&name], Demand::Wanted(_)));
}

#[test]
fn an_undeployed_model_leaves_nothing() {
    let mut client = rolled_out();
    let revision = deployment(&client).revision;
    let dropped = |from| Change::DeploymentDropped(DeploymentDropped { model: chat(), from });
    assert_eq!(client.refused(dropped(Some(revision - 1))), Refusal::DeploymentMoved(revision));
    client.done(dropped(Some(revision)));
    assert!(client.table.models().is_empty() && client.table.deployments().demand().is_empty());
    assert_eq!(client.refused(dropped(None)), Refusal::Unknown(Kind::Deployment));
}

#[test]
fn a_change_holds_for_the_revision_that_it_is_based_on() {
    let mut client = client();
    let from = |from, source| deploy(DeploymentSet { from: Some(from), ..set(source) });
    assert_eq!(client.refused(from(5, file("/1"))), Refusal::DeploymentMoved(0));
    client.done(from(0, file("/1")));
    let revision = client.table.applied();
    assert_eq!(client.refused(from(0, file("/1"))), Refusal::DeploymentMoved(revision));
    client.done(from(revision, None));
    assert_eq!(client.refused(from(revision, None)), Refusal::DeploymentMoved(revision + 2));
}

#[test]
fn a_rollout_is_promoted_or_rolled_back() {
    let client = rolled_out();
    let [first, second] = [0, 1].map(|at| deployment(&client).versions[at].number);
    assert_eq!(deployment(&client).active, first);
    for promoted in [true, false] {
        let mut client = rolled_out();
        assert_eq!(client.refused(ended(first, promoted)), Refusal::Unknown(Kind::Version));
        client.done(ended(second, promoted));
        let now = deployment(&client);
        assert_eq!((now.active, &now.rollout), (if promoted { second } else { first }, &None));
        assert_eq!(now.last_rollout, "told");
        // Back to the files of the version before.
        client.done(deploy(DeploymentSet { canary: Some(canary(1000)), ..set(file("/1.gguf")) }));
        let again = client.table.applied();
        match promoted {
            true => {
                client.done(identified(again, 1));
                assert_eq!(deployment(&client).rollout.as_ref().unwrap().version, first, "it is known");
                client.done(ended(first, true));
                assert_eq!(deployment(&client).active, first);
            }
            false => assert!(deployment(&client).rollout.is_none(), "they are active"),
        }
    }
}

#[test]
fn a_known_version_is_rolled_out_again() {
    let mut client = rolled_out();
    let [first, second] = [0, 1].map(|at| deployment(&client).versions[at].number);
    client.done(ended(second, true));
    assert_eq!(client.refused(started(second, None)), Refusal::Unknown(Kind::Version), "it is active");
    assert_eq!(client.refused(started(9, None)), Refusal::Unknown(Kind::Version));
    assert_eq!(client.refused(started(first, Some(canary(0)))), Refusal::OutOfRange);
    client.done(started(first, Some(canary(500))));
    client.done(ended(first, true));
    assert_eq!(deployment(&client).active, first);
}

#[test]
fn a_canary_needs_a_rollout_and_valid_bounds() {
    let mut client = client();
    client.done(deploy(set(file("/1"))));
    let with = |canary| deploy(DeploymentSet { canary: Some(canary), ..set(None) });
    assert_eq!(client.refused(with(canary(50))), Refusal::Unknown(Kind::Version));
    let mut client = rolled_out();
    client.done(with(canary(500)));
    assert_eq!(deployment(&client).rollout.as_ref().unwrap().canary, Some(canary(500)));
    let wrong = [
        canary(0),
        canary(1001),
        CanaryShare { min_requests: 0, ..canary(1) },
        CanaryShare { max_errors_permille: 1001, ..canary(1) },
        CanaryShare { max_ttft_percent: 99, ..canary(1) },
    ];
    wrong.into_iter().for_each(|wrong| assert_eq!(client.refused(with(wrong)), Refusal::OutOfRange));
}

#[test]
fn unchanged_files_make_no_version() {
    let mut client = client();
    client.done(deploy(set(file("/1"))));
    let first = client.table.applied();
    client.done(identified(first, 1));
    client.done(deploy(set(file("/1"))));
    assert_eq!(deployment(&client).versions.len(), 1);
    client.done(deploy(DeploymentSet { reread: true, ..set(file("/1")) }));
    let second = client.table.applied();
    assert_eq!(deployment(&client).target().unwrap().number, second);
    client.done(identified(second, 1));
    let now = deployment(&client);
    assert_eq!((now.versions.len(), now.active, &now.rollout), (1, first, &None));
}

#[test]
fn a_version_that_fails_ends_its_rollout() {
    let mut client = rolled_out();
    let (first, second) = (deployment(&client).active, deployment(&client).target().unwrap().number);
    let failed = |version| VersionFailed { model: chat(), version, reason: "bad file".into() };
    client.done(Change::VersionFailed(failed(second)));
    let now = deployment(&client);
    assert_eq!((now.active, &now.rollout, now.last_rollout.as_str()), (first, &None, "bad file"));
    // Without a version that serves, the next one becomes active at once.
    client.done(Change::VersionFailed(failed(first)));
    client.done(deploy(set(file("/3"))));
    assert_eq!(deployment(&client).active, client.table.applied());
}

#[test]
fn wrong_settings_are_refused_with_the_field() {
    let valid = DeploymentSettings::default();
    assert_eq!(valid.check(), Ok(()));
    let wrong = [
        ("replicas", DeploymentSettings { max: 0, ..valid.clone() }),
        ("replicas", DeploymentSettings { max: 65, ..valid.clone() }),
        ("replicas", DeploymentSettings { min: 2, ..valid.clone() }),
        ("idle", DeploymentSettings { idle_s: u32::MAX, ..valid.clone() }),
        ("priority", DeploymentSettings { priority: 0, ..valid.clone() }),
        ("shards", DeploymentSettings { shards: 0, ..valid.clone() }),
        ("shards", DeploymentSettings { shards: 65, ..valid.clone() }),
        ("shards", DeploymentSettings { shards: 22, max: 3, ..valid.clone() }),
        ("shards", DeploymentSettings { shards: 2, engine: "vllm".into(), ..valid.clone() }),
        ("engine", DeploymentSettings { engine: String::new(), ..valid.clone() }),
        ("engine", DeploymentSettings { engine: "e".repeat(33), ..valid.clone() }),
        ("engine", DeploymentSettings { engine: "llama server".into(), ..valid.clone() }),
        ("nodes", DeploymentSettings { nodes: vec!["gpu".into()], ..valid.clone() }),
        ("nodes", DeploymentSettings { nodes: vec!["=x".into()], ..valid.clone() }),
    ];
    let mut client = client();
    for (field, settings) in wrong {
        assert_eq!(settings.check().unwrap_err().0, field);
        let change = deploy(DeploymentSet { settings, ..set(file("/1")) });
        assert_eq!(client.refused(change), Refusal::OutOfRange);
    }
    let long = ModelId::new("m".repeat(ModelId::MAX_VERSIONED + 1)).unwrap();
    let long = deploy(DeploymentSet { model: long, ..set(file("/1")) });
    assert_eq!(client.refused(long), Refusal::TooLarge);
    let path = file(&"p".repeat(proto::deployment::MAX_SOURCE + 1));
    assert_eq!(client.refused(deploy(set(path))), Refusal::TooLarge);
}

/// A step of [`deployments_stay_whole`]. Versions are chosen among the known ones.
#[derive(Debug, Clone)]
enum Step {
    Set { source: Option<u8>, reread: bool, canary: bool },
    Identified { at: usize, digest: u8 },
    Failed(usize),
    Ended(usize, bool),
    Started(usize),
    Planned(u8),
    Wanted(u8),
    Refused(u8),
    Blocked(u8),
    Dropped,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (prop::option::of(0u8..4), any::<bool>(), any::<bool>())
            .prop_map(|(source, reread, canary)| Step::Set { source, reread, canary }),
        4 => (0usize..3, 0u8..4).prop_map(|(at, digest)| Step::Identified { at, digest }),
        1 => (0usize..3).prop_map(Step::Failed),
        3 => (0usize..3, any::<bool>()).prop_map(|(at, promoted)| Step::Ended(at, promoted)),
        2 => (0usize..3).prop_map(Step::Started),
        2 => (0u8..4).prop_map(Step::Planned),
        2 => (0u8..4).prop_map(Step::Wanted),
        1 => (0u8..4).prop_map(Step::Refused),
        1 => (0u8..4).prop_map(Step::Blocked),
        1 => Just(Step::Dropped),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// The active version and that of a rollout are always known, versions are few and different, and nothing is
    /// placed or asked for that is not deployed. The table is the same after a snapshot.
    #[test]
    fn deployments_stay_whole(steps in prop::collection::vec(step(), 1..60)) {
        let mut client = client();
        for step in steps {
            let versions: Vec<u64> = client.table.deployments().get("chat")
                .map(|now| now.versions.iter().map(|version| version.number).collect()).unwrap_or_default();
            let at = |at: usize| versions.get(at).copied().unwrap_or(9);
            let name = |digest: u8| chat().version(&[digest; 32]).unwrap();
            client.make(match step {
                Step::Set { source, reread, canary: share } => {
                    let source = source.and_then(|source| file(&source.to_string()));
                    deploy(DeploymentSet { reread, canary: share.then(|| canary(10)), ..set(source) })
                }
                Step::Identified { at: nth, digest } => identified(at(nth), digest),
                Step::Failed(nth) => {
                    let (model, reason) = (chat(), "x".to_owned());
                    Change::VersionFailed(VersionFailed { model, version: at(nth), reason })
                }
                Step::Ended(nth, promoted) => ended(at(nth), promoted),
                Step::Started(nth) => started(at(nth), None),
                Step::Planned(digest) => Change::ModelPlanned(version_plan(digest)),
                Step::Wanted(digest) => Change::ModelWanted(name(digest)),
                Step::Refused(digest) => {
                    Change::ModelRefused(ModelRefused { model: name(digest), reason: "x".into() })
                }
                Step::Blocked(digest) => {
                    Change::ModelBlocked(ModelBlocked { model_digest: [digest; 32], ..blocked(1) })
                }
                Step::Dropped => {
                    Change::DeploymentDropped(DeploymentDropped { model: chat(), from: None })
                }
            });
            let table = &client.table;
            if let Some(now) = table.deployments().get("chat") {
                prop_assert!(now.version(now.active).is_some());
                prop_assert!(now.target().is_some() && now.versions.len() <= 3, "{now:?}");
                let mut digests: Vec<_> = now.versions.iter().filter_map(|v| Some(v.facts?.digest)).collect();
                let known = digests.len();
                digests.sort_unstable();
                digests.dedup();
                prop_assert_eq!(digests.len(), known, "two versions have the same files");
                prop_assert!(now.rollout.as_ref().is_none_or(|rollout| rollout.version != now.active));
            }
            for version in table.models().keys().chain(table.deployments().demand().keys()) {
                prop_assert!(table.deployments().find(version).is_some(), "{version} is not deployed");
            }
            prop_assert!(table.models().values().all(|plan| !table.blocked().contains_key(&plan.model_digest)));
            prop_assert_eq!(&Table::from_bytes(&table.to_bytes().unwrap()).unwrap(), table);
        }
    }
}
