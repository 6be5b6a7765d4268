//! Membership of the group: a coordinator with a wiped disk reports how to replace it; members are added and
//! removed; a change that would lose the majority is refused.

use kvasir_cluster_tests::fleet::{Fleet, Node, ops};
use kvasir_cluster_tests::{binary, http, wait};
use serde_json::{Value, json};
use std::time::Duration;

const RECOVERY: Duration = Duration::from_secs(45);

/// Runs `kvasir coordinators ..` on a coordinator's host. Returns success, stdout and stderr.
fn kvasir(fleet: &Fleet, coordinator: usize, arguments: &[&str]) -> (bool, String, String) {
    let at = ops().to_string();
    let all = [&["coordinators"], arguments, &["--ops", &at]].concat();
    let output = fleet.on_host(Node::Coordinator(coordinator), || binary::run(&all)).unwrap().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.success(), text(&output.stdout), text(&output.stderr))
}

fn group(fleet: &Fleet, coordinator: usize) -> Option<Value> {
    let (done, shown, _) = kvasir(fleet, coordinator, &["list", "--json"]);
    done.then(|| serde_json::from_str(&shown).unwrap())
}

/// A member as listed by a coordinator.
fn member(fleet: &Fleet, coordinator: usize, name: &str) -> Option<Value> {
    let group = group(fleet, coordinator)?;
    group["coordinators"].as_array()?.iter().find(|member| member["id"] == name).cloned()
}

fn leader(fleet: &Fleet, coordinator: usize) -> usize {
    let leads = || Some(group(fleet, coordinator)?["leader"].as_str()?.strip_prefix('c')?.parse().unwrap());
    wait::until("one leads", RECOVERY, leads).unwrap()
}

fn all_here(fleet: &Fleet, coordinator: usize, count: usize) {
    wait::until("all are here", RECOVERY, || {
        let group = group(fleet, coordinator)?;
        let members = group["coordinators"].as_array()?;
        let here = members.iter().filter(|member| member["here"] == true && member["votes"] == true).count();
        (here == count && members.len() == count && group["agreed"] == true).then_some(())
    })
    .unwrap();
}

fn drain(fleet: &Fleet, coordinator: usize, draining: bool) -> http::HttpAnswer {
    let path = format!("/admin/v1/workers/w0/{}", if draining { "drain" } else { "undrain" });
    fleet.on_host(Node::Coordinator(coordinator), || http::post(ops(), &path, &Value::Null)).unwrap().unwrap()
}

fn wipe(fleet: &Fleet, coordinator: usize) {
    fleet.kill(Node::Coordinator(coordinator)).unwrap();
    std::fs::remove_dir_all(fleet.data_dir(Node::Coordinator(coordinator)).join("data")).unwrap();
    fleet.start(Node::Coordinator(coordinator)).unwrap();
}

#[test]
fn a_wiped_founder_reports_how_to_replace_it_and_the_procedure_works() {
    let fleet = Fleet::builder("wiped-founder", &crate::tiny_model(), 3, 1).start(41).unwrap();
    let wiped = (leader(&fleet, 0) + 1) % 3;
    let (target, name) = ((wiped + 1) % 3, format!("c{wiped}"));
    all_here(&fleet, target, 3);
    let quic = member(&fleet, target, &name).unwrap()["quic"].as_str().unwrap().to_owned();
    assert_eq!(drain(&fleet, target, true).status, 204);
    wipe(&fleet, wiped);

    // It reports the required commands, and accepts no changes.
    let remove = format!("kvasir coordinators remove {name}");
    let add = format!("{name}={quic}");
    wait::until("it finds the group", RECOVERY, || {
        let (done, _, stderr) = kvasir(&fleet, wiped, &["list"]);
        (!done && stderr.contains(&remove) && stderr.contains(&add)).then_some(())
    })
    .unwrap();
    let refused = drain(&fleet, wiped, false);
    assert_eq!(refused.status, 409);
    assert!(refused.text().unwrap().contains(&remove));
    // The others detect that its disk was wiped, and refuse to add a second incarnation.
    wait::until("it is known for wiped", RECOVERY, || {
        (member(&fleet, target, &name)?["another_life"] == true).then_some(())
    })
    .unwrap();
    let (done, _, stderr) = kvasir(&fleet, target, &["add", &add]);
    assert!(!done && stderr.contains(&remove), "{stderr}");
    // While one member is away, no other may be removed.
    let other = format!("c{}", (0..3).find(|c| ![wiped, target].contains(c)).unwrap());
    let (done, _, stderr) = kvasir(&fleet, target, &["remove", &other]);
    assert!(!done && stderr.contains("need 2"), "{stderr}");

    let (done, stdout, error) = kvasir(&fleet, target, &["remove", &name]);
    assert!(done && stdout.contains(&name), "{error}");
    all_here(&fleet, target, 2);
    let (done, stdout, error) = kvasir(&fleet, target, &["add", &add]);
    assert!(done && stdout.contains(&name), "{error}");
    (0..3).for_each(|c| all_here(&fleet, c, 3));
    // It has the changes made without it, and takes part in decisions.
    let draining = || fleet.status(wiped).ok()?["workers"][0]["draining"].as_bool().filter(|&d| d);
    wait::until("it knows of the drain", RECOVERY, draining).unwrap();
    fleet.kill(Node::Coordinator(target)).unwrap();
    wait::until("it is one of a majority", RECOVERY, || {
        (drain(&fleet, wiped, false).status == 204).then_some(())
    })
    .unwrap();
}

#[test]
fn leadership_is_handed_over_and_a_leader_can_be_removed() {
    let fleet = Fleet::builder("members-change", &crate::tiny_model(), 3, 1).start(42).unwrap();
    let first = leader(&fleet, 0);
    all_here(&fleet, first, 3);
    let next = (first + 1) % 3;
    let target = (first + 2) % 3;
    let (done, stdout, error) = kvasir(&fleet, target, &["transfer", &format!("c{next}")]);
    assert!(done && stdout.contains("is the leader"), "{error}");
    assert_eq!(leader(&fleet, target), next);
    let (done, _, stderr) = kvasir(&fleet, target, &["transfer", "c9"]);
    assert!(!done && stderr.contains("c9"), "{stderr}");
    // The leader transfers leadership before its removal, whichever coordinator receives the request.
    let (done, _, error) = kvasir(&fleet, target, &["remove", &format!("c{next}")]);
    assert!(done, "{error}");
    all_here(&fleet, target, 2);
    assert_ne!(leader(&fleet, target), next);
    // Its disk belongs to a removed incarnation.
    let quic = format!("c{next}={}", std::net::SocketAddr::from((fleet.net().address(next), 7000)));
    let (done, _, stderr) = kvasir(&fleet, target, &["add", &quic]);
    assert!(!done && stderr.contains("empty its data directory"), "{stderr}");
    wipe(&fleet, next);
    let added = || kvasir(&fleet, target, &["add", &quic]).0.then_some(());
    wait::until("it is a member again", RECOVERY, added).unwrap();
    (0..3).for_each(|c| all_here(&fleet, c, 3));
    // Adding a coordinator that does not exist fails.
    let (done, _, stderr) = kvasir(&fleet, target, &["add", "c7=127.0.0.1:9"]);
    assert!(!done && stderr.contains("does not answer"), "{stderr}");
    let answer = fleet.on_host(Node::Coordinator(target), || {
        http::post(ops(), "/admin/v1/coordinators", &json!({"id": "c7", "quic": "nowhere"}))
    });
    assert_eq!(answer.unwrap().unwrap().status, 400);
}

#[test]
fn a_coordinator_that_was_removed_while_away_learns_of_its_removal() {
    let fleet = Fleet::builder("removed-away", &crate::tiny_model(), 3, 1).start(43).unwrap();
    let away = (leader(&fleet, 0) + 1) % 3;
    let (target, name) = ((away + 1) % 3, format!("c{away}"));
    all_here(&fleet, target, 3);
    fleet.freeze(Node::Coordinator(away), true).unwrap();
    let removed = || kvasir(&fleet, target, &["remove", &name]).0.then_some(());
    wait::until("it is removed", RECOVERY, removed).unwrap();
    fleet.freeze(Node::Coordinator(away), false).unwrap();
    // It does not wait for a majority of a group that it no longer belongs to.
    wait::until("it knows", RECOVERY, || {
        let refused = drain(&fleet, away, true);
        (refused.status == 409 && refused.text().unwrap().contains("it was removed")).then_some(())
    })
    .unwrap();
    let shown = fleet.status(away).unwrap()["coordinators"][0]["role"].clone();
    assert_eq!(shown, "outsider");
    all_here(&fleet, target, 2);
}
