//! Operators' requests to coordinators, and coordinators' states.

use kvasir_cluster_tests::fleet::{Fleet, Node, ops};
use kvasir_cluster_tests::{http, wait};
use serde_json::{Value, json};
use std::time::Duration;

/// Three times longer than any election, backoff or idle timeout.
pub(crate) const RECOVERY: Duration = Duration::from_secs(45);

/// Requests that a worker drains, or accepts work again.
pub(crate) fn drain(
    fleet: &Fleet,
    coordinator: usize,
    worker: usize,
    draining: bool,
) -> anyhow::Result<http::HttpAnswer> {
    let action = if draining { "drain" } else { "undrain" };
    let path = format!("/admin/v1/workers/w{worker}/{action}");
    fleet.on_host(Node::Coordinator(coordinator), || http::post(ops(), &path, &Value::Null))?
}

/// Retries at all coordinators until one acknowledges the change, as an operator does.
pub(crate) fn drain_by_any(fleet: &Fleet, worker: usize, draining: bool) {
    let mut turn = 0..;
    wait::until("a drain is acknowledged", RECOVERY, || {
        let coordinator = turn.next()? % 3;
        fleet.pid(Node::Coordinator(coordinator))?;
        drain(fleet, coordinator, worker, draining).ok().filter(|answer| answer.status == 204)
    })
    .unwrap();
}

/// A coordinator's own state: role, term, and the last applied change.
pub(crate) fn own(fleet: &Fleet, coordinator: usize) -> Option<(String, u64, u64)> {
    let status = fleet.status(coordinator).ok()?;
    let own = &status["coordinators"][0];
    assert_eq!(own["id"], format!("c{coordinator}"));
    Some((own["role"].as_str()?.to_owned(), own["term"].as_u64()?, own["applied"].as_u64()?))
}

/// Whether a worker drains, as reported by a coordinator.
pub(crate) fn is_draining(fleet: &Fleet, coordinator: usize, worker: usize) -> Option<bool> {
    let status = fleet.status(coordinator).ok()?;
    let workers = status["workers"].as_array()?;
    let worker = workers.iter().find(|listed| listed["id"] == format!("w{worker}"))?;
    worker["draining"].as_bool()
}

/// The leader of `among`: exactly one leads, and all are in its term.
pub(crate) fn leader(fleet: &Fleet, among: &[usize]) -> usize {
    wait::until("one leads", RECOVERY, || {
        let seen: Vec<_> = among.iter().map(|&c| own(fleet, c)).collect::<Option<_>>()?;
        let mut leaders = among.iter().zip(&seen).filter(|(_, (role, ..))| role == "leader");
        let (&leader, (_, term, _)) = leaders.next()?;
        let follow = |(role, other, _): &(String, u64, u64)| other == term && role != "candidate";
        (leaders.next().is_none() && seen.iter().all(follow)).then_some(leader)
    })
    .unwrap()
}

/// The two others of three.
pub(crate) fn others(coordinator: usize) -> [usize; 2] {
    [(coordinator + 1) % 3, (coordinator + 2) % 3]
}

/// Waits until all three have applied the same entries and report each other correctly.
pub(crate) fn converge(fleet: &Fleet) {
    leader(fleet, &[0, 1, 2]);
    wait::until("status converges", RECOVERY, || {
        let views: Vec<Vec<Value>> = (0..3)
            .map(|c| {
                let mut listed = fleet.status(c).ok()?["coordinators"].as_array()?.clone();
                listed.sort_by_key(|entry| entry["id"].to_string());
                Some(listed)
            })
            .collect::<Option<_>>()?;
        let applied = &views[0][0]["applied"];
        let same = views.iter().all(|view| *view == views[0]);
        (same && views[0].iter().all(|entry| entry["applied"] == *applied)).then_some(())
    })
    .unwrap();
}

/// Whether a coordinator completes a short request.
pub(crate) fn completes(fleet: &Fleet, coordinator: usize, model: &str) -> bool {
    let body = json!({"model": model, "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0});
    let answer = fleet.post(coordinator, "/v1/completions", &body);
    let completed = answer.as_ref().is_ok_and(|answer| answer.status == 200);
    if !completed {
        println!("c{coordinator} does not complete: {answer:?}");
    }
    completed
}

/// Whether a coordinator reports itself ready.
pub(crate) fn is_ready(fleet: &Fleet, coordinator: usize) -> bool {
    let answer = fleet.on_host(Node::Coordinator(coordinator), || http::get(ops(), "/readyz"));
    answer.is_ok_and(|answer| answer.is_ok_and(|answer| answer.status == 200))
}
