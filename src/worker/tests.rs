use super::*;

fn tiny_model() -> Option<String> {
    Some(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tiny/llama/llama-f32.gguf").to_owned())
}

#[test]
fn given_settings_are_kept_and_computed_ones_explained() {
    let set = WorkerSettings { model: tiny_model(), chunk: Some(48), ..Default::default() };
    let plan = set.plan().unwrap();
    assert_eq!(plan.config.engine.chunk, Some(48));
    assert!(!plan.explained.iter().any(|e| e.field == "chunk"));
    let kv = plan.explained.iter().find(|e| e.field == "kv_bytes").unwrap();
    assert_eq!(plan.config.engine.kv_bytes, plan.settings.kv_bytes.map(|size| size.0));
    assert_eq!(Some(plan.config.shipping.lanes), plan.settings.shipping_lanes);
    assert!(!kv.reason.is_empty());
    // Completing twice changes nothing, and the printed file can be parsed.
    let file = toml::to_string(&plan.settings).unwrap();
    let again: WorkerSettings = toml::from_str(&file).unwrap();
    assert_eq!(again, plan.settings);
    assert!(again.plan().unwrap().explained.is_empty());
}

#[test]
fn settings_of_another_engine_are_complete_and_can_be_read_again() {
    let set = WorkerSettings {
        model: tiny_model(),
        engine: Some("llama-server".to_owned()),
        engine_url: Some("http://127.0.0.1:1".to_owned()),
        ..Default::default()
    };
    let plan = set.clone().plan().unwrap();
    assert!(plan.config.external.is_some());
    let file = toml::to_string(&plan.settings).unwrap();
    let again: WorkerSettings = toml::from_str(&file).unwrap();
    assert_eq!(again.plan().unwrap().settings, plan.settings);
    let ignored = WorkerSettings { kv_bytes: Some(ByteSize(1 << 30)), ..set };
    let error = ignored.plan().unwrap_err().to_string();
    assert!(error.contains("`kv_bytes`") && error.contains("llama-server"), "{error}");
}

#[test]
fn tiers_are_what_was_asked_for() {
    let plan = WorkerSettings { model: tiny_model(), ..Default::default() }.plan().unwrap();
    assert_eq!(plan.config.engine.tiers, TiersConfig::default());
    let settings = WorkerSettings {
        model: tiny_model(),
        kv_host_bytes: Some(ByteSize(5)),
        kv_disk: "/kv:6B".parse().ok(),
        ..Default::default()
    };
    let file = toml::to_string(&settings).unwrap();
    let plan = toml::from_str::<WorkerSettings>(&file).unwrap().plan().unwrap();
    let disk = Some(DiskConfig { dir: "/kv".into(), bytes: 6 });
    assert_eq!(plan.config.engine.tiers, TiersConfig { host_bytes: 5, disk, ..Default::default() });
}

#[test]
fn an_encoder_keeps_keys_and_values_as_computed_and_for_one_step() {
    let model = tiny_model().map(|path| path.replace("llama", "bert"));
    let plan = WorkerSettings { model: model.clone(), ..Default::default() }.plan().unwrap();
    assert_eq!((plan.settings.kv_type, plan.settings.kv_bytes), (Some(KvTypeArg::F32), None));
    let set = WorkerSettings { model, kv_type: Some(KvTypeArg::F16), ..Default::default() };
    assert_eq!(set.plan().unwrap().settings.kv_type, Some(KvTypeArg::F16));
}

#[test]
fn states_are_f32_unless_asked_for_otherwise() {
    let plan = |state_type, state_tau| {
        let set = WorkerSettings { model: tiny_model(), state_type, state_tau, ..Default::default() };
        set.plan()
    };
    let default = plan(None, None).unwrap();
    assert_eq!(default.config.engine.state_type, StateType::F32);
    assert_eq!((default.settings.state_type, default.settings.state_tau), (Some(StateTypeArg::F32), None));
    let auto = plan(Some(StateTypeArg::AutoBf16), None).unwrap();
    assert_eq!(auto.config.engine.state_type, StateType::AutoBf16 { tau: StateType::TAU });
    assert_eq!(auto.settings.state_tau, Some(StateType::TAU));
    assert!(auto.explained.iter().any(|e| e.field == "state_tau"));
    let error = plan(None, Some(8)).unwrap_err();
    assert!(error.is::<ConfigError>() && error.to_string().contains("`state_tau`: 8"), "{error}");
}

#[test]
fn limits_are_reported_with_field_and_value() {
    let cases = [
        (WorkerSettings { threads: Some(0), ..Default::default() }, "`threads`: 0"),
        (WorkerSettings { block_tokens: Some(17), ..Default::default() }, "`block_tokens`: 17"),
        (WorkerSettings { max_seqs: Some(1 << 20), ..Default::default() }, "`max_seqs`: 1048576"),
        (
            WorkerSettings { max_model_len: Some(1), model: tiny_model(), ..Default::default() },
            "`max_model_len`: 1",
        ),
        (WorkerSettings { cpus: "0".parse().ok(), threads: Some(2), ..Default::default() }, "`cpus`: 0"),
        (WorkerSettings { shipping_lanes: Some(0), ..Default::default() }, "`shipping_lanes`: 0"),
        (WorkerSettings { shipping_lanes: Some(17), ..Default::default() }, "`shipping_lanes`: 17"),
        (WorkerSettings { labels: Some(vec!["zone".to_owned()]), ..Default::default() }, "`labels`: zone"),
        (
            WorkerSettings {
                labels: Some(vec!["zone=a".to_owned()]),
                pool: Some(true),
                ..Default::default()
            },
            "`labels`: zone=a",
        ),
    ];
    for (settings, expected) in cases {
        let error = settings.plan().unwrap_err();
        assert!(error.is::<ConfigError>() && error.to_string().contains(expected), "{error}");
    }
}

#[test]
fn a_worker_that_encodes_images_has_a_model_and_nothing_that_generates() {
    let model = Some(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/hf/vlm-smolvlm").to_owned());
    let set = WorkerSettings { role: Some(RoleArg::Encode), model, ..Default::default() };
    let plan = set.clone().plan().unwrap();
    assert_eq!(plan.config.engine.vision_tower, load::TowerPlace::Alone);
    assert!(plan.config.hosting.is_none() && plan.settings.kv_bytes.is_none());
    let file = toml::to_string(&plan.settings).unwrap();
    assert_eq!(toml::from_str::<WorkerSettings>(&file).unwrap().plan().unwrap().settings, plan.settings);
    for (refused, field) in [
        (WorkerSettings { model: None, ..set.clone() }, "`model`"),
        (WorkerSettings { pool: Some(true), ..set.clone() }, "`pool`"),
        (WorkerSettings { vision_tower: Some(false), ..set.clone() }, "`vision_tower`"),
        (WorkerSettings { labels: Some(vec!["a=b".to_owned()]), ..set }, "`labels`"),
    ] {
        let error = refused.plan().unwrap_err().to_string();
        assert!(error.contains(field) && error.contains("role encode"), "{error}");
    }
    let towerless = WorkerSettings { model: tiny_model(), vision_tower: Some(false), ..Default::default() };
    assert_eq!(towerless.plan().unwrap().config.engine.vision_tower, load::TowerPlace::Elsewhere);
}
