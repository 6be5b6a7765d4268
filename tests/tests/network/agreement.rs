//! What coordinators have agreed on outlives any of them, and without a majority only changes wait.

use kvasir_cluster_tests::fleet::{Fleet, Node, ops};
use kvasir_cluster_tests::testnet::Link;
use kvasir_cluster_tests::{http, wait};
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Longer than any election, backoff or idle timeout, three times over.
const RECOVERY: Duration = Duration::from_secs(45);
/// What is promised is 2 s.
const REFUSED_WITHIN: Duration = Duration::from_secs(6);
/// What is promised is 2 s.
const ANSWER_WITHIN: Duration = Duration::from_secs(6);
const KILLS: usize = 3;
/// A change that was not answered is made within this time or never.
const UNKNOWN_FOR: Duration = Duration::from_secs(5);

fn drain(fleet: &Fleet, coordinator: usize, worker: usize, draining: bool) -> anyhow::Result<http::Answer> {
    let what = if draining { "drain" } else { "undrain" };
    let path = format!("/admin/v1/workers/w{worker}/{what}");
    fleet.beside(Node::Coordinator(coordinator), || http::post(ops(), &path, &Value::Null))?
}

/// As an operator does it: until somebody has acknowledged it.
fn drain_by_any(fleet: &Fleet, worker: usize, draining: bool) {
    let mut turn = 0..;
    wait::until("a drain is acknowledged", RECOVERY, || {
        let coordinator = turn.next()? % 3;
        fleet.pid(Node::Coordinator(coordinator))?;
        drain(fleet, coordinator, worker, draining).ok().filter(|answer| answer.status == 204)
    })
    .unwrap();
}

/// How a coordinator sees itself.
fn own(fleet: &Fleet, coordinator: usize) -> Option<(String, u64, u64)> {
    let status = fleet.status(coordinator).ok()?;
    let own = &status["coordinators"][0];
    assert_eq!(own["id"], format!("c{coordinator}"));
    Some((own["role"].as_str()?.to_owned(), own["term"].as_u64()?, own["applied"].as_u64()?))
}

fn is_draining(fleet: &Fleet, coordinator: usize, worker: usize) -> Option<bool> {
    let status = fleet.status(coordinator).ok()?;
    let workers = status["workers"].as_array()?;
    let worker = workers.iter().find(|listed| listed["id"] == format!("w{worker}"))?;
    worker["draining"].as_bool()
}

/// The leader that `among` agree on: one leads, and all are in its term.
fn leader(fleet: &Fleet, among: &[usize]) -> usize {
    wait::until("one leads", RECOVERY, || {
        let seen: Vec<_> = among.iter().map(|&c| own(fleet, c)).collect::<Option<_>>()?;
        let mut leaders = among.iter().zip(&seen).filter(|(_, (role, ..))| role == "leader");
        let (&leader, (_, term, _)) = leaders.next()?;
        let follow = |(role, other, _): &(String, u64, u64)| other == term && role != "candidate";
        (leaders.next().is_none() && seen.iter().all(follow)).then_some(leader)
    })
    .unwrap()
}

/// All three have applied the same, and each shows the others as they are.
fn converge(fleet: &Fleet) {
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

fn completes(fleet: &Fleet, coordinator: usize, model: &str) -> bool {
    let body = json!({"model": model, "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0});
    fleet.post(coordinator, "/v1/completions", &body).is_ok_and(|answer| answer.status == 200)
}

/// Ends the clients also when the test fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Changes one worker again and again by whoever answers; gives back what was acknowledged last, and whether
/// that is how it must be: not if a change of which nothing is known may still have been under way.
fn change_until(fleet: &Fleet, worker: usize, stop: &AtomicBool, acknowledged: &AtomicUsize) -> (bool, bool) {
    let (mut last, mut unknown) = (false, None::<Instant>);
    let certain = |unknown: Option<Instant>| unknown.is_none_or(|at| at.elapsed() > UNKNOWN_FOR);
    for turn in worker.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let coordinator = turn % 3;
        if fleet.pid(Node::Coordinator(coordinator)).is_none() {
            continue;
        }
        match drain(fleet, coordinator, worker, !last) {
            Ok(answer) if answer.status == 204 => {
                last = !last;
                acknowledged.fetch_add(1, Ordering::Relaxed);
                // Who has acknowledged it shows it, unless another change may still be under way.
                if certain(unknown)
                    && let Some(shown) = is_draining(fleet, coordinator, worker)
                {
                    assert_eq!(shown, last, "acknowledged by c{coordinator} and not there");
                }
            }
            _ => unknown = Some(Instant::now()),
        }
    }
    (last, certain(unknown))
}

#[test]
fn acknowledged_drains_survive_the_leaders_that_took_them() {
    let fleet = Fleet::builder("leader-killed", &crate::tiny_model(), 3, 3).start(21).unwrap();
    leader(&fleet, &[0, 1, 2]);
    let (stop, acknowledged) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        let (fleet, stop, acknowledged) = (&fleet, &stop, &acknowledged);
        let clients: Vec<_> = (0..2)
            .map(|worker| scope.spawn(move || change_until(fleet, worker, stop, acknowledged)))
            .collect();
        let ends_clients = Stop(stop);
        for _ in 0..KILLS {
            let killed = leader(fleet, &[0, 1, 2]);
            // Acknowledged to this test alone, just before the leader dies.
            drain_by_any(fleet, 2, true);
            fleet.kill(Node::Coordinator(killed)).unwrap();
            let killed_at = Instant::now();
            let others: Vec<usize> = (0..3).filter(|&c| c != killed).collect();
            leader(fleet, &others);
            println!("c{killed} killed: another leads after {:?}", killed_at.elapsed());
            for &other in &others {
                let there = || is_draining(fleet, other, 2).filter(|&draining| draining);
                wait::until("no drain is lost", RECOVERY, there).unwrap();
            }
            let before = acknowledged.load(Ordering::Relaxed);
            wait::until("changes are acknowledged again", RECOVERY, || {
                (acknowledged.load(Ordering::Relaxed) > before + 2).then_some(())
            })
            .unwrap();
            drain_by_any(fleet, 2, false);
            fleet.start(Node::Coordinator(killed)).unwrap();
        }
        drop(ends_clients);
        let ends: Vec<(bool, bool)> = clients.into_iter().map(|client| client.join().unwrap()).collect();
        println!("{} changes acknowledged over {KILLS} kills", acknowledged.load(Ordering::Relaxed));
        converge(fleet);
        for coordinator in 0..3 {
            let here =
                || (0..3).all(|worker| is_draining(fleet, coordinator, worker).is_some()).then_some(());
            wait::until("all workers are back", RECOVERY, here).unwrap();
            assert_eq!(is_draining(fleet, coordinator, 2), Some(false));
            for (worker, (last, certain)) in ends.iter().enumerate() {
                let shown = is_draining(fleet, coordinator, worker);
                assert_eq!(shown, is_draining(fleet, 0, worker));
                assert!(!*certain || shown == Some(*last), "w{worker}: {shown:?}, acknowledged {last}");
            }
        }
    });
}

#[test]
fn a_leader_that_nobody_hears_is_replaced() {
    let fleet = Fleet::builder("leader-cut", &crate::tiny_model(), 3, 3).start(22).unwrap();
    let cut = leader(&fleet, &[0, 1, 2]);
    let others: Vec<usize> = (0..3).filter(|&c| c != cut).collect();
    let link = |link: Link| {
        others.iter().for_each(|&other| {
            let [from, to] = [cut, other].map(|c| fleet.host(Node::Coordinator(c)));
            fleet.net().link(from, to, link);
        });
    };
    let cut_at = Instant::now();
    link(Link::CUT);
    let new = leader(&fleet, &others);
    println!("c{cut} cut: c{new} leads after {:?}", cut_at.elapsed());
    assert_ne!(new, cut);
    let answer = wait::until("the new leader takes a change", RECOVERY, || {
        drain(&fleet, new, 0, true).ok().filter(|answer| answer.status == 204)
    });
    answer.unwrap();
    // Who is cut off changes nothing and claims nothing.
    let refused = drain(&fleet, cut, 1, true).unwrap();
    assert_eq!(refused.status, 503);
    link(Link::default());
    converge(&fleet);
    wait::until("it has learned of the drain", RECOVERY, || is_draining(&fleet, cut, 0).filter(|&d| d))
        .unwrap();
}

#[test]
fn without_a_majority_only_changes_wait() {
    let fleet = Fleet::builder("majority-lost", &crate::tiny_model(), 3, 3).start(23).unwrap();
    let model = fleet.model().unwrap();
    leader(&fleet, &[0, 1, 2]);
    drain_by_any(&fleet, 0, true);
    wait::until("all know of it", RECOVERY, || is_draining(&fleet, 0, 0).filter(|&d| d)).unwrap();
    for lost in [1, 2] {
        fleet.kill(Node::Coordinator(lost)).unwrap();
    }
    for worker in [0, 1] {
        let asked = Instant::now();
        let answer = drain(&fleet, 0, worker, worker == 1).unwrap();
        let took = asked.elapsed();
        println!("refused after {took:?}");
        assert_eq!(answer.status, 503);
        assert_eq!(answer.json().unwrap()["error"]["code"], "no_quorum");
        assert!(took < REFUSED_WITHIN, "{took:?}");
        assert!(completes(&fleet, 0, &model), "inference has stopped");
    }
    assert_eq!(is_draining(&fleet, 0, 0), Some(true), "what was agreed on last holds");
    for lost in [1, 2] {
        fleet.start(Node::Coordinator(lost)).unwrap();
    }
    drain_by_any(&fleet, 2, true);
    converge(&fleet);
    assert!(completes(&fleet, 0, &model));
}

#[test]
fn a_leader_that_is_told_to_end_hands_over() {
    let fleet = Fleet::builder("leader-ends", &crate::tiny_model(), 3, 3).start(25).unwrap();
    let ending = leader(&fleet, &[0, 1, 2]);
    let others: Vec<usize> = (0..3).filter(|&c| c != ending).collect();
    assert_eq!(fleet.stop(Node::Coordinator(ending)).unwrap(), Some(0));
    // Nobody has to find out that it is gone: a change is taken at once.
    let answer = drain(&fleet, others[0], 0, true).unwrap();
    assert_eq!(answer.status, 204);
    leader(&fleet, &others);
    fleet.start(Node::Coordinator(ending)).unwrap();
    converge(&fleet);
}

#[test]
fn all_coordinators_restarted_answer_and_remember() {
    let fleet = Fleet::builder("all-restarted", &crate::tiny_model(), 3, 3).start(24).unwrap();
    let model = fleet.model().unwrap();
    leader(&fleet, &[0, 1, 2]);
    drain_by_any(&fleet, 0, true);
    (0..3).for_each(|c| fleet.kill(Node::Coordinator(c)).unwrap());
    let restarted = Instant::now();
    (0..3).for_each(|c| fleet.start(Node::Coordinator(c)).unwrap());
    for coordinator in 0..3 {
        let answered = || completes(&fleet, coordinator, &model).then_some(());
        wait::until("it answers again", RECOVERY, answered).unwrap();
        println!("c{coordinator} answers after {:?}", restarted.elapsed());
    }
    assert!(restarted.elapsed() < ANSWER_WITHIN, "{:?}", restarted.elapsed());
    converge(&fleet);
    for coordinator in 0..3 {
        wait::until("the drained worker is back", RECOVERY, || is_draining(&fleet, coordinator, 0)).unwrap();
        assert_eq!(is_draining(&fleet, coordinator, 0), Some(true), "c{coordinator} has forgotten a drain");
    }
    drain_by_any(&fleet, 0, false);
}
