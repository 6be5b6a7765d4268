//! Placement of sessions, and the reasons for refusing them.

use super::*;
use crate::balancer::{SessionPlacement, SessionRefusal, SessionRequest};
use proto::operation::{OfferedOperation, Operation};
use proto::worker::{LoadReport, WorkerState};

fn model(id: &str) -> ModelId {
    ModelId::new(id).unwrap()
}

fn offer(rig: &mut Rig, name: &str, epoch: u64, offers: &[(Operation, &str)]) {
    let offer = |(operation, id): &(Operation, &str)| OfferedOperation {
        operation: *operation,
        model: model(id),
        backend: "test".into(),
    };
    rig.balancer.offer(&node(name), Epoch(epoch), offers.iter().map(offer).collect());
}

fn seat_with(
    rig: &mut Rig,
    named: Option<&str>,
    declined_by: &[&str],
    opens: &[&str],
) -> Result<SessionPlacement, SessionRefusal> {
    rig.random = mix(rig.random);
    let declined_by: Vec<_> = declined_by.iter().map(|name| (node(name), Epoch(1))).collect();
    let named = named.map(model);
    let opens = |model: &ModelId| opens.is_empty() || opens.contains(&model.as_str());
    let request = SessionRequest {
        operation: Operation::Vad,
        model: named.as_ref(),
        backend: None,
        opens: &opens,
        declined_by: &declined_by,
    };
    rig.balancer.seat(rig.now, &request, rig.random)
}

fn seat(rig: &mut Rig) -> Result<SessionPlacement, SessionRefusal> {
    seat_with(rig, None, &[], &[])
}

const VAD: [(Operation, &str); 1] = [(Operation::Vad, "v")];

#[test]
fn a_session_goes_to_the_offering_worker_with_the_fewest_sessions() {
    let mut rig = Rig::new(Policy::default(), &["a", "b", "c"]);
    offer(&mut rig, "a", 1, &VAD);
    offer(&mut rig, "b", 1, &[(Operation::TurnDetection, "t")]);
    offer(&mut rig, "c", 1, &[(Operation::TurnDetection, "t"), (Operation::Vad, "v")]);
    let mut counts = HashMap::new();
    let seats: Vec<SessionPlacement> = (0..10).map(|_| seat(&mut rig).unwrap()).collect();
    seats.iter().for_each(|seated| *counts.entry(seated.node.as_str()).or_insert(0) += 1);
    assert_eq!(counts, HashMap::from([("a", 5), ("c", 5)]));
    // An ended session makes room.
    for seated in seats.iter().filter(|seated| seated.node == node("c")) {
        rig.balancer.unseat(seated.seat);
    }
    let next: Vec<NodeId> = (0..5).map(|_| seat(&mut rig).unwrap().node).collect();
    assert_eq!(next, vec![node("c"); 5]);
    let views = rig.balancer.workers(rig.now);
    let c = views.iter().find(|view| view.member.register.node == node("c")).unwrap();
    let open: Vec<_> = c.operations.iter().map(|offer| (offer.operation, offer.sessions)).collect();
    assert_eq!(open, [(Operation::TurnDetection, 0), (Operation::Vad, 5)]);
}

#[test]
fn a_refused_session_has_a_reason() {
    let mut rig = Rig::new(Policy::default(), &["a", "b"]);
    assert_eq!(seat(&mut rig), Err(SessionRefusal::Operation));
    offer(&mut rig, "a", 1, &[(Operation::Vad, "v"), (Operation::Vad, "w")]);
    let refusal = seat_with(&mut rig, Some("x"), &[], &[]);
    assert_eq!(refusal, Err(SessionRefusal::Model { models: vec![model("v"), model("w")] }));
    assert_eq!(seat_with(&mut rig, Some("w"), &[], &[]).unwrap().model, model("w"));
    // A model that the key may not use is treated as absent.
    assert_eq!(seat_with(&mut rig, None, &[], &["w"]).unwrap().model, model("w"));
    let refusal = seat_with(&mut rig, Some("v"), &[], &["w"]);
    assert_eq!(refusal, Err(SessionRefusal::Model { models: vec![model("w")] }));
    assert_eq!(seat_with(&mut rig, None, &[], &["m"]), Err(SessionRefusal::Operation));
    assert_eq!(seat_with(&mut rig, None, &["a"], &[]), Err(SessionRefusal::Declined));
    // A draining worker gets no session, whether an operator or the worker itself started the drain.
    let drain = |draining| TableChange::Drain { node: node("a"), draining };
    rig.balancer.change(rig.now, drain(true), 1).unwrap();
    assert_eq!(seat(&mut rig), Err(SessionRefusal::Away));
    rig.balancer.change(rig.now, drain(false), 1).unwrap();
    assert!(seat(&mut rig).is_ok());
    let draining = LoadReport { state: WorkerState::Draining, ..report(1) };
    rig.balancer.load(rig.now, &node("a"), draining, 1);
    assert_eq!(seat(&mut rig), Err(SessionRefusal::Away));
    rig.leave("a", 1);
    assert_eq!(seat(&mut rig), Err(SessionRefusal::Operation));
}

#[test]
fn a_session_goes_to_a_worker_that_offers_the_requested_backend() {
    let mut rig = Rig::new(Policy::default(), &["a", "b"]);
    let offer = |backend: &str| OfferedOperation {
        operation: Operation::Vad,
        model: model("v"),
        backend: backend.into(),
    };
    rig.balancer.offer(&node("a"), Epoch(1), vec![offer("kernels")]);
    rig.balancer.offer(&node("b"), Epoch(1), vec![offer("kernels"), offer("onnx")]);
    let opens = |opened: &ModelId| *opened == model("v");
    let seat = |rig: &mut Rig, named: &ModelId, backend| {
        rig.random = mix(rig.random);
        let request = SessionRequest {
            operation: Operation::Vad,
            model: Some(named),
            backend: Some(backend),
            opens: &opens,
            declined_by: &[],
        };
        rig.balancer.seat(rig.now, &request, rig.random)
    };
    for _ in 0..4 {
        let seated = seat(&mut rig, &model("v"), "onnx").unwrap();
        assert_eq!((seated.node, seated.several_backends), (node("b"), true));
    }
    // The other worker has fewer sessions. Its only backend need not be named to it.
    let seated = seat(&mut rig, &model("v"), "kernels").unwrap();
    assert_eq!((seated.node, seated.several_backends), (node("a"), false));
    let views = rig.balancer.workers(rig.now);
    let open: Vec<_> =
        views[1].operations.iter().map(|offer| (offer.backend.as_str(), offer.sessions)).collect();
    assert_eq!(open, [("kernels", 0), ("onnx", 4)]);
    let backends = ["kernels".to_owned(), "onnx".to_owned()].into();
    let refusal = SessionRefusal::Backend { requested: "npu".into(), backends };
    assert_eq!(seat(&mut rig, &model("v"), "npu"), Err(refusal));
    let refusal = SessionRefusal::Model { models: vec![model("v")] };
    assert_eq!(seat(&mut rig, &model("w"), "npu"), Err(refusal));
}

#[test]
fn a_silent_worker_gets_a_session_only_if_there_is_no_other() {
    let mut rig = Rig::new(Policy::default(), &["a", "b"]);
    offer(&mut rig, "a", 1, &VAD);
    rig.now += rig.balancer.worker_pool.policy().suspect_after;
    assert_eq!(seat(&mut rig).unwrap().node, node("a"));
    offer(&mut rig, "b", 1, &VAD);
    rig.balancer.load(rig.now, &node("b"), report(1), 1);
    for _ in 0..3 {
        assert_eq!(seat(&mut rig).unwrap().node, node("b"));
    }
}

#[test]
fn sessions_of_an_earlier_epoch_are_not_released_in_the_next() {
    let mut rig = Rig::new(Policy::default(), &["a"]);
    offer(&mut rig, "a", 1, &VAD);
    let old = seat(&mut rig).unwrap();
    rig.leave("a", 1);
    rig.join("a", 2);
    assert_eq!(seat(&mut rig), Err(SessionRefusal::Operation), "it has not offers so in this life");
    offer(&mut rig, "a", 2, &VAD);
    seat(&mut rig).unwrap();
    rig.balancer.unseat(old.seat);
    let sessions = |rig: &Rig| rig.balancer.workers(rig.now)[0].operations[0].sessions;
    assert_eq!(sessions(&rig), 1);
}

/// Calls to encode texts also go to workers that offer them.
#[test]
fn calls_to_encode_go_to_workers_that_offer_it() {
    let mut rig = Rig::new(Policy::default(), &["a", "b", "c"]);
    let embed = |rig: &mut Rig| {
        let request = RouteRequest { operation: Some(Operation::Embed), ..rig.request("t", 16, chain([])) };
        rig.submit(request).unwrap()
    };
    // The offers of workers that register none follow from their models' tasks, here generation.
    let (_, actions) = embed(&mut rig);
    assert!(matches!(actions[..], [Action::Refuse(_, Refusal::NoWorker)]), "{actions:?}");
    offer(&mut rig, "b", 1, &[(Operation::Embed, MODEL)]);
    offer(&mut rig, "c", 1, &[(Operation::Embed, "other"), (Operation::Rerank, MODEL)]);
    for _ in 0..4 {
        let (_, actions) = embed(&mut rig);
        assert_eq!(only(&actions).node, node("b"));
    }
    // Generations still go to any worker.
    let nodes: std::collections::BTreeSet<NodeId> =
        (0..12).map(|_| only(&rig.plain().1).node.clone()).collect();
    assert!(nodes.len() > 1, "{nodes:?}");
}
