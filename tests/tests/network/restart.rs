//! Restarts of coordinators and workers: one, all at once, with an empty disk, with a damaged disk.

use crate::group::{RECOVERY, completes, converge, drain, drain_by_any, is_draining, leader, others, own};
use crate::history::term;
use crate::stream::prompt;
use kvasir_cluster_tests::fleet::{Fleet, Node, ops};
use kvasir_cluster_tests::testnet::Link;
use kvasir_cluster_tests::{http, wait};
use serde_json::json;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The documented limit is 2 s.
const ANSWER_WITHIN: Duration = Duration::from_secs(6);
/// The documented limit is 10 s.
const WARM_WITHIN: Duration = Duration::from_secs(30);
/// The documented limit is 15 s.
const ALL_UP_WITHIN: Duration = Duration::from_secs(45);
/// After everything is up for this long, no node may lose another.
const CALM: Duration = Duration::from_secs(3);
const PROMPTS: u32 = 48;
/// Share of the hit rate before the restart.
const WARM: f64 = 0.95;

/// Sends each prompt to the coordinators in turn. Returns the cached share of the prompts' tokens; `None` if
/// a request failed.
fn hit_rate(fleet: &Fleet, model: &str, coordinators: &[usize]) -> Option<f64> {
    let (mut cached, mut total) = (0, 0);
    for (number, &coordinator) in (0..PROMPTS).zip(coordinators.iter().cycle()) {
        let prompt: Vec<u32> = prompt(number, 160).into_iter().map(|token| token % 400).collect();
        let body = json!({"model": model, "prompt": prompt, "max_tokens": 2, "temperature": 0});
        let answer = fleet.post(coordinator, "/v1/completions", &body).ok()?.ok().ok()?;
        total += answer["usage"]["prompt_tokens"].as_u64()?;
        cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64()?;
    }
    Some(cached as f64 / total as f64)
}

/// Kills these coordinators at once and restarts them. They must serve requests soon, and soon have their
/// prefix index back.
fn restarted(fleet: &Fleet, model: &str, killed: &[usize]) {
    let all = [0, 1, 2];
    // While no pace is measured, estimates of load may outweigh a short cached prefix.
    let cached = || hit_rate(fleet, model, &all).filter(|rate| *rate > 0.85);
    let before = wait::until("the prompts are cached", RECOVERY, cached).unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Traffic from before the kill until the cluster has recovered.
        for client in 0..2 {
            let over = &over;
            scope.spawn(move || {
                for turn in client.. {
                    if over.load(Ordering::Relaxed) {
                        return;
                    }
                    completes(fleet, turn % 3, model);
                }
            });
        }
        killed.iter().for_each(|&c| fleet.kill(Node::Coordinator(c)).unwrap());
        let began = Instant::now();
        std::thread::scope(|scope| {
            killed
                .iter()
                .for_each(|&c| drop(scope.spawn(move || fleet.start(Node::Coordinator(c)).unwrap())));
        });
        let answers = killed.iter().map(|&c| {
            wait::until("it answers", RECOVERY, || completes(fleet, c, model).then_some(())).unwrap();
            began.elapsed()
        });
        let answers: Vec<Duration> = answers.collect();
        let warm = || hit_rate(fleet, model, killed).filter(|rate| *rate >= before * WARM);
        let after = wait::until("the hit rate is back", RECOVERY, warm).unwrap();
        let took = began.elapsed();
        over.store(true, Ordering::Relaxed);
        println!(
            "{} restarted: first answers after {answers:.2?}, hit rate {before:.3} before, {after:.3} after {took:.2?}",
            killed.len()
        );
        assert!(answers.iter().all(|took| *took < ANSWER_WITHIN) && took < WARM_WITHIN);
    });
}

#[test]
fn restarted_coordinators_answer_and_rebuild_the_prefix_index() {
    let fleet = Fleet::builder("all-restarted", &crate::tiny_model(), 3, 3).start(24).unwrap();
    let model = fleet.model().unwrap();
    leader(&fleet, &[0, 1, 2]);
    restarted(&fleet, &model, &[1]);
    restarted(&fleet, &model, &[0, 1, 2]);
    drain_by_any(&fleet, 0, true);
    restarted(&fleet, &model, &[0, 1, 2]);
    converge(&fleet);
    for coordinator in 0..3 {
        wait::until("the drained worker is back", RECOVERY, || is_draining(&fleet, coordinator, 0)).unwrap();
        assert_eq!(is_draining(&fleet, coordinator, 0), Some(true), "c{coordinator} has forgotten a drain");
    }
}

#[test]
fn after_a_power_cut_everything_comes_back_at_once() {
    let fleet = Fleet::builder("power-cut", &crate::tiny_model(), 3, 3).start(31).unwrap();
    let model = fleet.model().unwrap();
    leader(&fleet, &[0, 1, 2]);
    fleet.nodes().into_iter().for_each(|node| fleet.kill(node).unwrap());
    let began = Instant::now();
    std::thread::scope(|scope| {
        let fleet = &fleet;
        for node in fleet.nodes() {
            scope.spawn(move || fleet.start(node).unwrap());
        }
    });
    (0..3).for_each(|coordinator| fleet.wait_for_workers(coordinator, 3).unwrap());
    let leads = leader(&fleet, &[0, 1, 2]);
    let took = began.elapsed();
    println!("all up after {took:.2?}");
    assert!(took < ALL_UP_WITHIN, "{took:?}");
    let (calm, before) = (Instant::now(), term(&fleet, &[0, 1, 2]));
    while calm.elapsed() < CALM {
        assert!((0..3).all(|coordinator| completes(&fleet, coordinator, &model)));
    }
    assert_eq!(
        (leader(&fleet, &[0, 1, 2]), term(&fleet, &[0, 1, 2])),
        (leads, before),
        "the leader was lost"
    );
}

#[test]
fn a_coordinator_with_a_lost_or_damaged_disk_has_no_vote() {
    let fleet = Fleet::builder("disk-lost", &crate::tiny_model(), 3, 2).start(32).unwrap();
    let model = fleet.model().unwrap();
    let leads = leader(&fleet, &[0, 1, 2]);
    drain_by_any(&fleet, 0, true);
    drain_by_any(&fleet, 0, false);
    let [wiped, other] = others(leads);
    fleet.kill(Node::Coordinator(wiped)).unwrap();
    std::fs::remove_dir_all(fleet.data_dir(Node::Coordinator(wiped)).join("data")).unwrap();
    fleet.start(Node::Coordinator(wiped)).unwrap();
    let outsider = || own(&fleet, wiped).filter(|(role, ..)| role == "outsider");
    wait::until("it finds that there is a group without it", RECOVERY, outsider).unwrap();
    assert_eq!(drain(&fleet, other, 0, true).unwrap().status, 204);
    // If its vote counted, there would be a majority.
    fleet.kill(Node::Coordinator(leads)).unwrap();
    for _ in 0..3 {
        assert_eq!(drain(&fleet, other, 0, false).unwrap().status, 503);
    }
    assert_ne!(own(&fleet, other).unwrap().0, "leader");
    assert_eq!(outsider().unwrap().0, "outsider");
    assert!(completes(&fleet, wiped, &model) || completes(&fleet, other, &model));

    let file = fleet.data_dir(Node::Coordinator(leads)).join("data/consensus.redb");
    let whole = std::fs::read(&file).unwrap();
    // Every byte that carries data and is not redb's own belongs to a record with a checksum.
    let damaged: Vec<u8> = whole.iter().enumerate().map(|(at, byte)| byte ^ u8::from(at % 64 == 7)).collect();
    std::fs::write(&file, damaged).unwrap();
    fleet.start(Node::Coordinator(leads)).unwrap();
    let outside = || own(&fleet, leads).filter(|(role, ..)| role == "outsider");
    wait::until("it finds that it has lost its place", RECOVERY, outside).unwrap();
    // One of three is no majority that could restore it, and its damaged state gives no vote.
    for _ in 0..3 {
        assert_eq!(drain(&fleet, other, 0, false).unwrap().status, 503);
    }
    assert_eq!(outside().unwrap().0, "outsider");
    fleet.kill(Node::Coordinator(leads)).unwrap();
    std::fs::write(&file, whole).unwrap();
    fleet.start(Node::Coordinator(leads)).unwrap();
    leader(&fleet, &[leads, other]);
    wait::until("changes are taken again", RECOVERY, || {
        drain(&fleet, other, 0, false).ok().filter(|answer| answer.status == 204)
    })
    .unwrap();
}

/// Stops a coordinator and damages its log. Returns the file and its contents.
fn damage(fleet: &Fleet, coordinator: usize) -> (PathBuf, Vec<u8>) {
    fleet.kill(Node::Coordinator(coordinator)).unwrap();
    let file = fleet.data_dir(Node::Coordinator(coordinator)).join("data/consensus.redb");
    let bytes = std::fs::read(&file).unwrap();
    let flipped: Vec<u8> = bytes.iter().enumerate().map(|(at, byte)| byte ^ u8::from(at % 64 == 7)).collect();
    std::fs::write(&file, &flipped).unwrap();
    (file, flipped)
}

#[test]
fn a_coordinator_with_a_damaged_disk_rejoins_by_itself() {
    let fleet = Fleet::builder("disk-damaged", &crate::tiny_model(), 3, 1).start(36).unwrap();
    let leads = leader(&fleet, &[0, 1, 2]);
    let [damaged, other] = others(leads);
    drain_by_any(&fleet, 0, true);
    let (file, flipped) = damage(&fleet, damaged);
    fleet.start(Node::Coordinator(damaged)).unwrap();
    let follows = || own(&fleet, damaged).filter(|(role, ..)| role == "follower");
    wait::until("it is a member again", RECOVERY, follows).unwrap();
    assert_eq!(std::fs::read(file.with_extension("damaged")).unwrap(), flipped, "what is damaged is kept");
    // It has the agreed changes, and forms a majority without the member that sent them.
    wait::until("it knows of the drain", RECOVERY, || is_draining(&fleet, damaged, 0).filter(|&d| d))
        .unwrap();
    let votes = || {
        let group = fleet.on_host(Node::Coordinator(other), || http::get(ops(), "/admin/v1/coordinators"));
        let group = group.ok()?.ok()?.ok().ok()?;
        let members = group["coordinators"].as_array()?;
        (members.iter().filter(|member| member["votes"] == true).count() == 3).then_some(())
    };
    wait::until("it votes", RECOVERY, votes).unwrap();
    fleet.kill(Node::Coordinator(leads)).unwrap();
    wait::until("changes are taken", RECOVERY, || {
        drain(&fleet, damaged, 0, false).ok().filter(|answer| answer.status == 204)
    })
    .unwrap();
}

/// The leader fails after the old incarnation was removed and before the new one votes. The next leader
/// completes the replacement.
#[test]
fn a_coordinator_with_a_damaged_disk_rejoins_though_the_leader_is_lost_meanwhile() {
    let fleet = Fleet::builder("half-back", &crate::tiny_model(), 3, 1).start(38).unwrap();
    let leads = leader(&fleet, &[0, 1, 2]);
    let [damaged, other] = others(leads);
    drain_by_any(&fleet, 0, true);
    damage(&fleet, damaged);
    // High latency, so that catching up takes long.
    let far = Link { delay: Duration::from_millis(250), ..Link::default() };
    fleet.net().around(fleet.host(Node::Coordinator(damaged)), far);
    fleet.start(Node::Coordinator(damaged)).unwrap();
    let votes = |coordinator: usize| {
        let group =
            fleet.on_host(Node::Coordinator(coordinator), || http::get(ops(), "/admin/v1/coordinators"));
        let group = group.ok()?.ok()?.ok().ok()?;
        let members = group["coordinators"].as_array()?;
        Some(members.iter().filter(|member| member["votes"] == true).count())
    };
    wait::until("its old life has gone", RECOVERY, || votes(leads).filter(|&votes| votes == 2)).unwrap();
    fleet.kill(Node::Coordinator(leads)).unwrap();
    assert_eq!(votes(other), Some(2), "it votes already: there was no half");
    fleet.start(Node::Coordinator(leads)).unwrap();
    wait::until("it votes", RECOVERY, || votes(other).filter(|&votes| votes == 3)).unwrap();
    fleet.net().around(fleet.host(Node::Coordinator(damaged)), Link::default());
    wait::until("it knows of the drain", RECOVERY, || is_draining(&fleet, damaged, 0).filter(|&d| d))
        .unwrap();
}

#[test]
fn members_are_found_where_it_was_agreed_that_they_are() {
    let fleet = Fleet::builder("old-peers", &crate::tiny_model(), 3, 1).start(37).unwrap();
    leader(&fleet, &[0, 1, 2]);
    drain_by_any(&fleet, 0, true);
    (0..3).for_each(|c| fleet.kill(Node::Coordinator(c)).unwrap());
    // As after membership changes that the flags do not reflect: one address is wrong, one member is missing.
    let old = |c: usize| {
        format!("c{c}={}:7000,c{}={}:7001", fleet.net().address(c), (c + 1) % 3, fleet.net().address(c))
    };
    for c in 0..3 {
        fleet.use_peers(c, &old(c));
        fleet.start(Node::Coordinator(c)).unwrap();
    }
    leader(&fleet, &[0, 1, 2]);
    drain_by_any(&fleet, 0, false);
    converge(&fleet);
}
