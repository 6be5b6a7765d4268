//! Adapters as models of the workers that have them.

use super::*;
use proto::adapter::OfferedAdapter;

fn model(name: &str) -> ModelId {
    ModelId::new(name).unwrap()
}

fn adapter(name: &str, parent: &str, digest: u8) -> OfferedAdapter {
    let (name, parent, path) = (model(name), model(parent), "/a".to_owned());
    OfferedAdapter { name, parent, digest: [digest; 32], rank: 8, path, ordered: false }
}

fn left_out(rig: &mut Rig, worker: &str, offered: &[OfferedAdapter]) -> Vec<String> {
    let left_out = rig.balancer.set_adapters(&node(worker), Epoch(1), offered.to_vec()).unwrap();
    left_out.into_iter().map(|adapter| adapter.name.to_string()).collect()
}

fn goes_to(rig: &mut Rig, name: &str, prompt: Arc<[BlockId]>) -> Result<NodeId, Refusal> {
    let request = RouteRequest { model: model(name), ..rig.request("t", 160, prompt) };
    let (ticket, actions) = rig.submit(request)?;
    let to = only(&actions).node.clone();
    rig.balancer.started(rig.now, ticket, 0);
    rig.balancer.ended(rig.now, ticket, 0);
    Ok(to)
}

#[test]
fn a_request_for_an_adapter_goes_to_a_worker_that_has_it() {
    let mut rig = Rig::new(Policy::default(), &["a", "b", "c"]);
    assert_eq!(left_out(&mut rig, "b", &[adapter("sql", MODEL, 1)]), [""; 0]);
    assert_eq!(left_out(&mut rig, "c", &[adapter("chat", MODEL, 2)]), [""; 0]);
    for round in 0..20 {
        let prompt = chain(10 * round..10 * round + 10);
        assert_eq!(goes_to(&mut rig, "sql", prompt.clone()), Ok(node("b")));
        assert_eq!(goes_to(&mut rig, "chat", prompt), Ok(node("c")));
    }
    let none = goes_to(&mut rig, "none", chain([]));
    assert!(none.is_err(), "{none:?}");
    // A report replaces the one before; a worker that leaves takes its adapters along.
    assert_eq!(left_out(&mut rig, "b", &[]), [""; 0]);
    assert!(goes_to(&mut rig, "sql", chain([])).is_err());
    rig.leave("c", 1);
    assert!(goes_to(&mut rig, "chat", chain([])).is_err());
    rig.join("c", 2);
    assert!(
        goes_to(&mut rig, "chat", chain([])).is_err(),
        "a new run of a worker reports its adapters itself"
    );
}

#[test]
fn a_name_means_one_thing_at_all_workers() {
    let mut rig = Rig::new(Policy::default(), &["a", "b"]);
    assert_eq!(left_out(&mut rig, "a", &[adapter("sql", MODEL, 1)]), [""; 0]);
    // Another content, a model's name, the same name twice, a model that the worker does not serve.
    let offered = [
        adapter("sql", MODEL, 2),
        adapter(MODEL, MODEL, 3),
        adapter("chat", MODEL, 4),
        adapter("chat", MODEL, 5),
        adapter("other", "another", 6),
    ];
    assert_eq!(left_out(&mut rig, "b", &offered), ["sql", MODEL, "chat", "other"]);
    for round in 0..20 {
        assert_eq!(goes_to(&mut rig, "sql", chain(10 * round..10 * round + 10)), Ok(node("a")));
    }
    assert_eq!(goes_to(&mut rig, "chat", chain([])), Ok(node("b")));
    let served = rig.balancer.table().model(&model("sql")).unwrap();
    assert_eq!((served.id.clone(), served.model_digest), (model("sql"), [1; 32]));
    // With the first one gone, the name is free.
    assert_eq!(left_out(&mut rig, "a", &[]), [""; 0]);
    assert_eq!(left_out(&mut rig, "b", &[adapter("sql", MODEL, 2)]), [""; 0]);
    assert_eq!(goes_to(&mut rig, "sql", chain([])), Ok(node("b")));
    let stale = rig.balancer.set_adapters(&node("a"), Epoch(7), vec![adapter("sql", MODEL, 1)]);
    assert!(stale.is_err(), "{stale:?}");
}
