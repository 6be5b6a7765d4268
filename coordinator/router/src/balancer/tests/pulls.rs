//! KV transfers instead of prefill, and prompts that a prefill worker computes.

use super::*;
use proto::pull::SENDS_AT_ONCE;
use proto::worker::LoadReport;

/// Introduces a worker with its role, a pull rate of 1 GB/s, and an address made of its name.
fn introduce(rig: &mut Rig, name: &str, part: WorkPart) {
    let cost = PullCost { model: ModelId::new(MODEL).unwrap(), bytes_per_token: 20_000, bytes_per_point: 0 };
    rig.balancer.introduce(&node(name), Epoch(1), part, vec![cost], format!("{name}:1"));
    rig.balancer.pulled(&node(name), Epoch(1), PullReport { rate: 1e9, ..PullReport::default() });
}

fn rig(workers: &[(&str, WorkPart)]) -> Rig {
    let names: Vec<&str> = workers.iter().map(|(name, _)| *name).collect();
    let mut rig = Rig::new(Policy::default(), &names);
    workers.iter().for_each(|(name, part)| introduce(&mut rig, name, *part));
    rig
}

/// Announces units of a worker.
fn holds(rig: &mut Rig, name: &str, units: Arc<[BlockId]>) {
    let stored = KvEvent::Stored { parent: BlockId([0; 16]), units: units.to_vec(), medium: Medium::Device };
    let batch = KvEventBatch { epoch: Epoch(1), first_sequence: 1, events: vec![stored] };
    assert_eq!(rig.balancer.events(&node(name), batch), Ok(None));
}

fn busy(rig: &mut Rig, name: &str, pending_prefill_tokens: u64) {
    let report = LoadReport { pending_prefill_tokens, ..report(1) };
    rig.balancer.load(rig.now, &node(name), report, 3);
}

fn source(name: &str, tokens: u32) -> Option<PullSource> {
    Some(PullSource { node: node(name), quic: format!("{name}:1"), tokens })
}

const BOTH: WorkPart = WorkPart::Both;

#[test]
fn a_worker_that_relieves_a_busy_holder_pulls_from_it() {
    let mut rig = rig(&[("a", BOTH), ("b", BOTH)]);
    holds(&mut rig, "a", chain(0..93));
    let request = rig.request("t", 1_530, chain(0..95));
    let (ticket, actions) = rig.submit(request).unwrap();
    let to = only(&actions);
    assert_eq!((&to.node, to.predicted, &to.pull), (&node("a"), 1_488, &None), "the holder itself");
    rig.balancer.ended(rig.now, ticket, 1);

    busy(&mut rig, "a", 2_000);
    let request = rig.request("t", 1_530, chain(0..95));
    let (_, actions) = rig.submit(request).unwrap();
    let to = only(&actions);
    assert_eq!((&to.node, to.predicted), (&node("b"), 1_488), "the pulled tokens are predicted");
    assert_eq!((&to.pull, &to.prefill), (&source("a", 1_488), &None));
    let pending = rig.balancer.workers(rig.now).iter().map(|w| w.pending_tokens).sum::<u64>();
    assert_eq!(pending, 42, "and not counted as work");
}

#[test]
fn a_draining_worker_still_serves_pulls() {
    let mut rig = rig(&[("a", BOTH), ("b", BOTH)]);
    holds(&mut rig, "a", chain(0..93));
    rig.balancer.change(rig.now, TableChange::Drain { node: node("a"), draining: true }, 1).unwrap();
    let request = rig.request("t", 1_530, chain(0..95));
    let (_, actions) = rig.submit(request).unwrap();
    let to = only(&actions);
    assert_eq!((&to.node, to.predicted, &to.pull), (&node("b"), 1_488, &source("a", 1_488)));
}

#[test]
fn a_holder_serves_a_bounded_number_of_pulls_at_once() {
    let mut rig = rig(&[("a", BOTH), ("b", BOTH)]);
    holds(&mut rig, "a", chain(0..930));
    rig.balancer.change(rig.now, TableChange::Drain { node: node("a"), draining: true }, 1).unwrap();
    // Prompts with a common prefix, each longer than the one before by enough to justify a pull.
    let pulls = |rig: &mut Rig, from: u64| {
        let pulled = |units: u64| {
            let request = rig.request(
                "t",
                16 * units as u32 + 10,
                chain((0..units).chain(10_000 + units..10_001 + units)),
            );
            only(&rig.submit(request).unwrap().1).pull.is_some()
        };
        (from..from + 10).map(|n| 93 * n).map(pulled).filter(|pulled| *pulled).count()
    };
    assert_eq!(pulls(&mut rig, 1), SENDS_AT_ONCE);
    rig.now += Duration::from_millis(1_000);
    busy(&mut rig, "b", 0);
    rig.balancer.load(rig.now, &node("a"), report(1), 1);
    assert_eq!(pulls(&mut rig, 1), 0, "b is expected to hold all that a does");
}

#[test]
fn an_expected_prefix_is_not_pulled() {
    let mut rig = rig(&[("a", BOTH), ("b", BOTH)]);
    let request = rig.request("t", 1_530, chain(0..95));
    let (_, actions) = rig.submit(request).unwrap();
    let first = only(&actions).node.clone();
    busy(&mut rig, first.as_str(), 100_000);
    let request = rig.request("t", 1_530, chain(0..95));
    let (_, actions) = rig.submit(request).unwrap();
    let to = only(&actions);
    assert!(to.node != first && to.pull.is_none() && to.predicted == 0, "{to:?}");
}

#[test]
fn no_pull_from_another_numeric_class_or_without_pull_costs() {
    for class in [true, false] {
        let mut rig = Rig::new(Policy::default(), &["b"]);
        let mut other = register("a", 1, &[(MODEL, 1)]);
        if class {
            other.models[0].numeric_class = "other".into();
        }
        rig.balancer.change(rig.now, TableChange::Join(other), 3).unwrap();
        let no_events = KvEventBatch { epoch: Epoch(1), first_sequence: 1, events: vec![] };
        rig.balancer.replayed(&node("a"), Epoch(1), Some(no_events)).unwrap();
        introduce(&mut rig, "b", BOTH);
        if class {
            introduce(&mut rig, "a", BOTH);
        }
        holds(&mut rig, "a", chain(0..93));
        busy(&mut rig, "a", 100_000);
        let request = rig.request("t", 1_530, chain(0..95));
        let (_, actions) = rig.submit(request).unwrap();
        let to = only(&actions);
        assert_eq!((&to.node, &to.pull, to.predicted), (&node("b"), &None, 0), "other class: {class}");
    }
}

#[test]
fn a_long_prompt_is_computed_by_a_prefill_worker_and_pulled_by_a_decoding_one() {
    let mut rig = rig(&[("p", WorkPart::Prefill), ("q", WorkPart::Prefill), ("d", WorkPart::Decode)]);
    let pending =
        |rig: &Rig| -> Vec<u64> { rig.balancer.workers(rig.now).iter().map(|w| w.pending_tokens).collect() };
    let mut stages = Vec::new();
    let mut tickets = Vec::new();
    for i in 0..2 {
        let request = rig.request("t", 1_000, chain(100 * i..100 * i + 62));
        let (ticket, actions) = rig.submit(request).unwrap();
        let to = only(&actions);
        assert_eq!((&to.node, to.predicted), (&node("d"), 992));
        let (stage, _) = to.prefill.clone().unwrap();
        assert_eq!(to.pull, source(stage.as_str(), 992));
        stages.push(stage);
        tickets.push(ticket);
    }
    let first = stages[0].clone();
    stages.sort();
    assert_eq!(stages, [node("p"), node("q")], "the one with less in hand");
    assert_eq!(pending(&rig), [16, 1_000, 1_000], "d computes the rest");
    // The same prompt again waits for its prefill worker: d is expected to hold it, but does not yet.
    let request = rig.request("t", 1_000, chain(0..62));
    let (again, actions) = rig.submit(request).unwrap();
    let to = only(&actions);
    assert_eq!((&to.node, to.predicted), (&node("d"), 992));
    assert_eq!(to.prefill.as_ref().map(|(node, _)| node), Some(&first));
    assert_eq!(pending(&rig).iter().sum::<u64>(), 24 + 2_008, "and costs next to nothing there");
    for ticket in tickets.iter().chain([&again]) {
        rig.balancer.started(rig.now, *ticket, 0);
    }
    assert_eq!(pending(&rig), [0, 0, 0]);
    for ticket in tickets.into_iter().chain([again]) {
        rig.balancer.ended(rig.now, ticket, 1);
    }
    rig.now += Duration::from_secs(2);
    rig.balancer.tick(rig.now, 1);
    assert_eq!(rig.balancer.index_size().reservations, 0);
    // A cached prompt is not pulled.
    holds(&mut rig, "d", chain(0..62));
    let request = rig.request("t", 1_000, chain(0..62));
    let (_, actions) = rig.submit(request).unwrap();
    let to = only(&actions);
    assert_eq!((&to.prefill, &to.pull, to.predicted), (&None, &None, 992));
    // A short prompt is computed by the decode worker.
    let request = rig.request("t", 200, chain(900..912));
    let (_, actions) = rig.submit(request).unwrap();
    let to = only(&actions);
    assert_eq!((&to.node, &to.prefill, &to.pull), (&node("d"), &None, &None));
}

#[test]
fn roles_never_cause_a_refusal() {
    // No prefill worker is left: the decode worker computes prompts.
    let mut rig = rig(&[("p", WorkPart::Prefill), ("d", WorkPart::Decode)]);
    let request = rig.request("t", 1_000, chain(0..62));
    let (ticket, actions) = rig.submit(request).unwrap();
    assert_eq!(only(&actions).prefill.as_ref().map(|(node, _)| node), Some(&node("p")));
    rig.leave("p", 1);
    let actions = rig.balancer.retry(rig.now, ticket, AttemptError::Declined, None, 1);
    assert!(
        matches!(actions[..], [Action::Refuse(_, Refusal::AttemptsFailed)]),
        "d does not want it: {actions:?}"
    );
    let request = rig.request("t", 1_000, chain(0..62));
    let (_, actions) = rig.submit(request).unwrap();
    let to = only(&actions);
    assert_eq!((&to.node, &to.prefill, &to.pull, to.predicted), (&node("d"), &None, &None, 0));
    // No decode worker is left: the prefill worker generates.
    rig.join("p", 2);
    rig.leave("d", 1);
    let (_, actions) = rig.plain();
    assert_eq!(only(&actions).node, node("p"));
}
