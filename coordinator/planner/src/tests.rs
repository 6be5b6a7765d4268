use crate::Error;
use crate::fleet::{Costs, Fleet, Model, Node};
use crate::search::propose;
use crate::simulation::{Outcome, Policy, run, simulate};
use crate::traffic::{Synthetic, Traffic};
use consensus::table::DeploymentSettings;
use proptest::prelude::*;
use proto::deployment::ModelSource;
use proto::ids::{ModelId, NodeId};
use std::collections::BTreeSet;

const MB: u64 = 1_000_000;

fn id(name: &str) -> ModelId {
    ModelId::new(name).unwrap()
}

fn node(name: &str, memory: u64) -> Node {
    Node {
        name: NodeId::new(name).unwrap(),
        labels: BTreeSet::new(),
        memory,
        bandwidth: 20e9,
        compute: 1e12,
        read: 1e9,
        copy: 4e9,
        link: 1e9,
        page_cache: memory,
        load_overhead: 0.2,
        files: None,
    }
}

fn model(name: &str, bytes: u64, settings: DeploymentSettings) -> Model {
    let costs = Costs {
        bytes,
        needed: bytes,
        layer_bytes: bytes as f64,
        token_bytes: bytes as f64,
        kv_bytes: 1e4,
        products: bytes as f64,
        head_products: 1e6,
        attention: 1e3,
    };
    Model { name: id(name), source: ModelSource::File(format!("/{name}")), settings, costs }
}

fn fleet(nodes: Vec<Node>, models: Vec<Model>) -> Fleet {
    Fleet::new(nodes, models, 120.0).unwrap()
}

fn traffic(fleet: &Fleet, log: &[(f64, &str, u64, u64)]) -> Traffic {
    let lines: String = log
        .iter()
        .map(|(t, model, prompt, output)| {
            format!(r#"{{"t":{t},"model":"{model}","prompt_tokens":{prompt},"output_tokens":{output}}}"#)
                + "\n"
        })
        .collect();
    Traffic::read(lines.as_bytes(), fleet).unwrap()
}

fn outcome(fleet: &Fleet, traffic: &Traffic) -> Outcome {
    simulate(fleet, &traffic.arrivals, Policy::Uses).unwrap()
}

fn close(found: f64, expected: f64) -> bool {
    (found - expected).abs() < 1e-3
}

#[test]
fn a_request_waits_for_the_decision_the_order_and_the_load() {
    let fleet =
        fleet(vec![node("w0", 2000 * MB)], vec![model("m", 1000 * MB, DeploymentSettings::default())]);
    // It comes in the middle between two decisions. The prefill of 1000 tokens takes 1 s.
    let found = outcome(&fleet, &traffic(&fleet, &[(0.0, "m", 1000, 1), (100.0, "m", 1000, 11)]));
    // Demand and place after 100 ms, the order 200 ms later, 1 s of reading and 200 ms more.
    let m = &found.models[0];
    assert!(close(m.wait.p99, 1.5), "{m:?}");
    // Attention takes half a millisecond.
    assert!(close(m.ttft.p99, 2.5005) && close(m.ttft.p50, 1.0005), "{m:?}");
    assert_eq!((m.waited, m.loads, m.wakes, m.answered), (1, 1, 0, 2));
    // The 10 further tokens read 1 GB and about 1000 tokens' keys and values each.
    assert!(found.seconds > 101.5 && found.seconds < 101.51, "{}", found.seconds);
    assert_eq!(found.nodes[0].most_used, 1000 * MB);
    assert!(close(m.replicas, (found.seconds - 1.5) / found.seconds), "{m:?}");
}

#[test]
fn a_sleeping_model_wakes_from_memory_and_an_evicted_one_is_read_again() {
    let settings = DeploymentSettings { idle_s: 30, ..DeploymentSettings::default() };
    let small = Node { page_cache: 1000 * MB, ..node("w0", 1000 * MB) };
    let models = vec![model("a", 1000 * MB, settings.clone()), model("b", 1000 * MB, settings)];
    let fleet = fleet(vec![small], models);
    let log = [(0.0, "a", 100, 1), (100.0, "a", 100, 1), (110.0, "b", 100, 1), (120.0, "a", 100, 1)];
    let found = outcome(&fleet, &traffic(&fleet, &log));
    let [a, b] = &found.models[..] else { panic!() };
    assert_eq!((a.loads, a.wakes, a.sleeps, a.evictions), (1, 2, 1, 1));
    assert_eq!((b.loads, b.wakes, b.evictions), (1, 0, 1));
    // From memory: 250 ms in place of 1 s. The file of the other model took its place there.
    assert!(close(a.wait.p99, 1.5) && close(a.wait.mean, (1.5 + 0.75 + 1.5) / 3.0), "{a:?}");
}

#[test]
fn files_come_from_a_node_that_has_them_and_one_link_sends_one_model_at_a_time() {
    let settings = DeploymentSettings { min: 3, max: 3, ..DeploymentSettings::default() };
    let empty = |name: &str| Node { files: Some(BTreeSet::new()), ..node(name, 1000 * MB) };
    let nodes = vec![node("w0", 1000 * MB), empty("w1"), empty("w2")];
    let fleet = fleet(nodes, vec![model("m", 1000 * MB, settings)]);
    let found = outcome(&fleet, &traffic(&fleet, &[(0.0, "m", 10, 1)]));
    // The second node gets them after 1 s and the third after 2 s; both have them in memory then: 450 ms.
    assert!(found.warm_up > 2.4 && found.warm_up < 2.9, "{}", found.warm_up);
    let nowhere = Fleet::new(vec![empty("w0")], fleet.models, 120.0);
    assert_eq!(nowhere, Err(Error::NoFiles { model: "m".into() }));
}

#[test]
fn a_model_without_a_place_is_refused_and_one_that_loads_too_long_as_well() {
    let big = model("big", 3000 * MB, DeploymentSettings::default());
    let slow = model("slow", 1000 * MB, DeploymentSettings::default());
    let nodes = vec![Node { read: 1e6, ..node("w0", 2000 * MB) }];
    let fleet = fleet(nodes, vec![big, slow]);
    let log = [(0.0, "big", 10, 1), (1.0, "big", 10, 1), (2.0, "slow", 10, 1), (9.0, "big", 10, 1)];
    let found = outcome(&fleet, &traffic(&fleet, &log));
    assert_eq!(found.models[0].refused.no_place, 3);
    assert_eq!(found.models[1].refused.load_wait, 1);
    assert_eq!(found.refused, 4);
}

#[test]
fn another_order_of_evictions_gives_lru_and_belady() {
    // Two places, three models: LRU misses all of a cycle, the best policy every second one.
    let models = ["a", "b", "c"].map(|name| model(name, 1000 * MB, DeploymentSettings::default()));
    let fleet = fleet(vec![node("w0", 2000 * MB)], models.to_vec());
    let log: Vec<(f64, &str, u64, u64)> =
        (0..30).map(|at| (f64::from(at) * 20.0, ["a", "b", "c"][at as usize % 3], 10, 1)).collect();
    let traffic = traffic(&fleet, &log);
    let loads = |policy| {
        let found = simulate(&fleet, &traffic.arrivals, policy).unwrap();
        found.loads + found.wakes
    };
    let found = [Policy::Lru, Policy::Belady, Policy::Uses].map(loads);
    assert_eq!(found[..2], [30, 16], "{found:?}");
    assert!((16..=30).contains(&found[2]), "{found:?}");
}

#[test]
fn wrong_lines_are_named() {
    let fleet = fleet(vec![node("w0", 2000 * MB)], vec![model("m", MB, DeploymentSettings::default())]);
    let line = r#"{"t":1,"model":"m","prompt_tokens":5,"output_tokens":6}"#;
    let read = |second: &str| Traffic::read(format!("{line}\n{second}\n").as_bytes(), &fleet);
    assert_eq!(read("").unwrap().arrivals.len(), 1);
    for (from, to, named) in [
        ("\"t\":1", "\"t\":-1", "line 2: t: -1, must be 0"),
        (":5", ":0", "line 2: prompt_tokens: 0, must be 1 to"),
        (":6", ":99999999", "line 2: output_tokens: 99999999, must be 1 to"),
        ("}", ",\"cached_tokens\":9}", "line 2: cached_tokens: 9, must be at most prompt_tokens, 5"),
        ("model", "mode", "line 2: unknown field `mode`"),
        ("}", "", "line 2: EOF"),
        ("\"t\":1", "\"t\":9999999", "t: 9999998, must span"),
    ] {
        let error = read(&line.replace(from, to)).unwrap_err().to_string();
        assert!(error.starts_with(named), "{error}");
    }
    let unknown = read(&line.replace("\"m\"", "\"other\"")).unwrap().unknown;
    assert_eq!(unknown.into_iter().collect::<Vec<_>>(), [("other".to_owned(), 1)]);
    assert!(Traffic::read(line.replace("\"m\"", "\"other\"").as_bytes(), &fleet).is_err());
}

#[test]
fn spans_of_the_coordinators_are_a_log() {
    let fleet = fleet(vec![node("w0", 2000 * MB)], vec![model("m", MB, DeploymentSettings::default())]);
    let span = |start: &str, attributes: &str| {
        format!(r#"{{"startTimeUnixNano":"{start}","attributes":[{attributes}]}}"#)
    };
    let text = |key: &str, value: &str| format!(r#"{{"key":"{key}","value":{{"stringValue":"{value}"}}}}"#);
    let number = |key: &str, value: u32| format!(r#"{{"key":"{key}","value":{{"intValue":"{value}"}}}}"#);
    let model = text("gen_ai.request.model", "m@0123456789ab");
    let answered = [
        model.clone(),
        number("gen_ai.usage.input_tokens", 30),
        number("gen_ai.usage.output_tokens", 4),
        number("gen_ai.usage.cache_read.input_tokens", 16),
    ];
    let spans = [
        span("1700000001500000000", &answered.join(",")),
        span("1700000000000000000", &answered[..2].join(",")),
        span("1700000000000000000", &model),
        span("1700000000000000000", &number("gen_ai.usage.input_tokens", 30)),
    ];
    let line = format!(r#"{{"resourceSpans":[{{"scopeSpans":[{{"spans":[{}]}}]}}]}}"#, spans.join(","));
    let found = Traffic::read(line.as_bytes(), &fleet).unwrap().arrivals;
    assert_eq!(found.len(), 2);
    assert_eq!((found[0].at, found[0].prompt, found[0].cached, found[0].output), (0, 30, 0, 1));
    assert_eq!((found[1].at, found[1].prompt, found[1].cached, found[1].output), (1_500_000, 30, 16, 4));
}

#[test]
fn drawn_traffic_follows_its_parameters_and_its_log_is_read_back() {
    let models = ["a", "b", "c", "d"].map(|name| model(name, MB, DeploymentSettings::default()));
    let fleet = fleet(vec![node("w0", 2000 * MB)], models.to_vec());
    let synthetic: Synthetic = "zipf:1,rate=2,requests=20000,prompt=100,output=20".parse().unwrap();
    let drawn = synthetic.draw(&fleet, 7);
    assert_eq!(drawn, synthetic.draw(&fleet, 7));
    assert_ne!(drawn, synthetic.draw(&fleet, 8));
    let of = |model| drawn.arrivals.iter().filter(|arrival| arrival.model == model).count() as f64;
    assert!((of(0) / of(3) - 4.0).abs() < 0.4, "{} {}", of(0), of(3));
    let last = drawn.arrivals.last().unwrap().at as f64 / 1e6;
    assert!((last / 10_000.0 - 1.0).abs() < 0.05, "{last}");
    let mean = drawn.arrivals.iter().map(|arrival| f64::from(arrival.prompt)).sum::<f64>() / 20_000.0;
    assert!((mean / 100.0 - 1.0).abs() < 0.05, "{mean}");
    let mut log = Vec::new();
    drawn.write(&fleet, &mut log).unwrap();
    assert_eq!(Traffic::read(&log[..], &fleet).unwrap(), drawn);
    for (wrong, named) in [
        ("uniform", "zipf:"),
        ("zipf:x", "zipf"),
        ("zipf:1,rate=0", "rate"),
        ("zipf:1,speed=1", "speed"),
        ("zipf:1,rate=0.001,requests=500000", "requests / rate"),
    ] {
        assert!(wrong.parse::<Synthetic>().unwrap_err().contains(named), "{wrong}");
    }
}

#[test]
fn limits_of_the_fleet_are_named() {
    let good = || vec![model("m", MB, DeploymentSettings::default())];
    let error = |nodes, models| Fleet::new(nodes, models, 120.0).unwrap_err().to_string();
    assert!(error(Vec::new(), good()).starts_with("node: 0, must be 1 to"));
    assert!(error(vec![node("w", MB), node("w", MB)], good()).starts_with("node.name: w"));
    let bad = Node { compute: f64::NAN, ..node("w", MB) };
    assert!(error(vec![bad], good()).starts_with("node w: compute: NaN, must be"));
    let settings = DeploymentSettings { min: 2, max: 1, ..DeploymentSettings::default() };
    assert!(
        error(vec![node("w", MB)], vec![model("m", MB, settings)]).starts_with("models.m: replicas: 2:1")
    );
    let files = Some(BTreeSet::from([id("other")]));
    assert!(error(vec![Node { files, ..node("w", MB) }], good()).starts_with("node w: files: other"));
}

#[test]
fn a_proposal_is_no_worse_and_keeps_popular_models_ready() {
    let models: Vec<Model> = ["a", "b", "c", "d"]
        .iter()
        .map(|name| model(name, 1000 * MB, DeploymentSettings::default()))
        .collect();
    let fleet = fleet(vec![node("w0", 2000 * MB), node("w1", 1000 * MB)], models);
    let synthetic: Synthetic = "zipf:1,rate=0.5,requests=300,prompt=200,output=20".parse().unwrap();
    let traffic = synthetic.draw(&fleet, 3).arrivals;
    let proposal = propose(&fleet, &traffic, 60).unwrap();
    assert!(proposal.evaluations <= 60);
    assert!(proposal.after.cost < proposal.before.cost * 0.99, "{}", proposal.after.cost);
    assert_eq!(simulate(&proposal.fleet, &traffic, Policy::Uses).unwrap(), proposal.after);
    assert_eq!(propose(&fleet, &traffic, 60).unwrap(), proposal);
    let one = propose(&fleet, &traffic, 0).unwrap();
    assert_eq!((one.evaluations, one.fleet), (1, fleet));
}

/// The requests for a model are refused before another model is idle, whose room it then takes: nothing waits, and the
/// leader decides all the same.
#[test]
fn a_model_that_was_asked_for_takes_room_when_nothing_waits_any_more() {
    let settings = |min| DeploymentSettings { min, max: 1, ..DeploymentSettings::default() };
    let w0 = Node { compute: 250e9, ..node("w0", 1700 * MB) };
    let models = [("a", 13, 0), ("b", 15, 0), ("c", 2, 1)]
        .map(|(name, size, min)| model(name, size * 100 * MB, settings(min)));
    let fleet = fleet(vec![w0], models.into());
    let mut log: Vec<(f64, &str, u64, u64)> =
        (0..60).map(|at| (f64::from(at) / 10.0, "a", 400, 400)).collect();
    log.extend([(7.0, "b", 10, 10), (8.0, "c", 10, 30_000)]);
    let traffic = traffic(&fleet, &log);
    let [found, always] =
        [false, true].map(|always| run(&fleet, &traffic.arrivals, Policy::Uses, always).unwrap());
    assert_eq!((found.refused, found.evictions, found.loads), (1, 1, 2), "{found:#?}");
    assert_eq!(found.models, always.models);
}

prop_compose! {
    fn any_model(index: usize)(
        size in 1_u64..20,
        min in 0_u16..2,
        more in 0_u16..3,
        idle_s in prop_oneof![Just(0), 1_u32..120],
        pin: bool,
        priority in 1_u32..4,
        labelled in prop::bool::weighted(0.2),
    ) -> Model {
        let nodes = if labelled { vec!["zone=a".to_owned()] } else { Vec::new() };
        let max = (min + more).max(1);
        let settings = DeploymentSettings { min, max, idle_s, pin, nodes, priority, ..DeploymentSettings::default() };
        model(&format!("m{index}"), size * 100 * MB, settings)
    }
}

prop_compose! {
    fn any_node(index: usize)(
        memory in 1_u64..40,
        zone: bool,
        files in prop_oneof![Just(None), Just(Some(BTreeSet::new()))],
        page_cache in 1_u64..4000,
        speed in 1_u32..100,
    ) -> Node {
        let labels = if zone { BTreeSet::from(["zone=a".to_owned()]) } else { BTreeSet::new() };
        // The first one has all files.
        let files = if index == 0 { None } else { files };
        let compute = f64::from(speed) * 1e10;
        Node { labels, files, page_cache: page_cache * MB, compute, ..node(&format!("w{index}"), memory * 100 * MB) }
    }
}

prop_compose! {
    fn any_fleet()(nodes in 1_usize..5, models in 1_usize..7)(
        nodes in (0..nodes).map(any_node).collect::<Vec<_>>(),
        models in (0..models).map(any_model).collect::<Vec<_>>(),
    ) -> Fleet {
        fleet(nodes, models)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn each_request_ends_once_memory_holds_and_the_outcome_is_the_same(
        fleet in any_fleet(),
        seed: u64,
        rate in 0.01_f64..20.0,
        requests in 1_usize..300,
    ) {
        let synthetic = Synthetic { exponent: 1.0, rate, requests, prompt: 200.0, output: 50.0, drift: 60.0 };
        let traffic = synthetic.draw(&fleet, seed);
        for policy in [Policy::Uses, Policy::Lru, Policy::Belady] {
            let found = simulate(&fleet, &traffic.arrivals, policy).unwrap();
            for (index, model) in found.models.iter().enumerate() {
                let sent = traffic.arrivals.iter().filter(|arrival| arrival.model == index).count() as u64;
                prop_assert_eq!(model.requests, sent);
                prop_assert_eq!(model.answered + model.refused.total(), sent, "{:?}", model);
            }
            for node in &found.nodes {
                prop_assert!(node.most_used <= node.memory, "{node:?}");
                prop_assert!(node.busy <= 1.0 + 1e-9 && node.loading <= 1.0 + 1e-9, "{node:?}");
            }
            let again = simulate(&fleet, &traffic.arrivals, policy).unwrap();
            prop_assert_eq!(&found, &again);
        }
    }

    /// The leader of the simulation decides only when something has changed that it decides by.
    #[test]
    fn decisions_that_are_left_out_would_change_nothing(
        fleet in any_fleet(),
        seed: u64,
        rate in 0.05_f64..20.0,
        requests in 1_usize..200,
    ) {
        let synthetic = Synthetic { exponent: 0.8, rate, requests, prompt: 200.0, output: 50.0, drift: 0.0 };
        let traffic = synthetic.draw(&fleet, seed);
        let found = |always| {
            let found = run(&fleet, &traffic.arrivals, Policy::Uses, always).unwrap();
            Outcome { steps: 0, warm_up: 0.0, ..found }
        };
        prop_assert_eq!(found(false), found(true));
    }
}
