//! Agreed changes survive the loss of any coordinator. Without a majority only changes are blocked.

use crate::group::{
    RECOVERY, completes, converge, drain, drain_by_any, is_draining, is_ready, leader, others, own,
};
use crate::history::{History, term};
use kvasir_cluster_tests::fleet::{Fleet, Node};
use kvasir_cluster_tests::testnet::Link;
use kvasir_cluster_tests::wait;
use std::time::{Duration, Instant};

/// The documented limit is 2 s.
const REFUSED_WITHIN: Duration = Duration::from_secs(6);
/// The documented limit is 2 s.
const ELECTED_WITHIN: Duration = Duration::from_secs(6);
const KILLS: usize = 10;
const FREEZES: usize = 3;

/// Operators change two registers continuously while `trouble` runs. The history of their results must be
/// linearizable.
fn under_changes(fleet: &Fleet, trouble: impl FnOnce(&History)) {
    let history = History::new();
    std::thread::scope(|scope| {
        let history = &history;
        let acting: Vec<_> = (0..2)
            .map(|worker| scope.spawn(move || history.operator(fleet, worker).act_until_over()))
            .collect();
        let ends = history.ends();
        trouble(history);
        drop(ends);
        acting.into_iter().for_each(|operator| operator.join().unwrap());
    });
    converge(fleet);
    // The final change of each register, after all other operators have stopped.
    let mut last = history.operator(fleet, 2);
    (0..3).for_each(|coordinator| assert!(last.act(coordinator)));
    println!("{} changes acknowledged", history.acknowledged());
    history.check();
}

#[test]
fn acknowledged_changes_survive_the_leaders_that_took_them() {
    let fleet = Fleet::builder("leader-killed", &crate::tiny_model(), 3, 3).start(21).unwrap();
    leader(&fleet, &[0, 1, 2]);
    let mut elections = Vec::new();
    under_changes(&fleet, |history| {
        let mut operator = history.operator(&fleet, 2);
        for _ in 0..KILLS {
            let killed = leader(&fleet, &[0, 1, 2]);
            // Acknowledged just before the leader is killed.
            operator.act_until(true, RECOVERY);
            fleet.kill(Node::Coordinator(killed)).unwrap();
            let killed_at = Instant::now();
            leader(&fleet, &others(killed));
            elections.push(killed_at.elapsed());
            for other in others(killed) {
                let there = || is_draining(&fleet, other, 2).filter(|&draining| draining);
                wait::until("no drain is lost", RECOVERY, there).unwrap();
            }
            history.goes_on(RECOVERY).unwrap();
            operator.act_until(false, RECOVERY);
            fleet.start(Node::Coordinator(killed)).unwrap();
        }
    });
    elections.sort_unstable();
    println!("{KILLS} leaders killed: another leads after {elections:.2?}");
    assert!(elections[KILLS / 2] < ELECTED_WITHIN, "{elections:?}");
}

#[test]
fn a_frozen_leader_that_goes_on_claims_nothing() {
    let fleet = Fleet::builder("leader-frozen", &crate::tiny_model(), 3, 3).start(26).unwrap();
    let model = fleet.model().unwrap();
    under_changes(&fleet, |history| {
        let mut operator = history.operator(&fleet, 2);
        for _ in 0..FREEZES {
            let frozen = leader(&fleet, &[0, 1, 2]);
            let before = term(&fleet, &[0, 1, 2]);
            fleet.freeze(Node::Coordinator(frozen), true).unwrap();
            let frozen_at = Instant::now();
            let next = leader(&fleet, &others(frozen));
            println!("c{frozen} frozen: c{next} leads after {:.2?}", frozen_at.elapsed());
            for _ in 0..2 {
                wait::until("the new leader takes a change", RECOVERY, || operator.act(next).then_some(()))
                    .unwrap();
            }
            // From the acknowledgement on, w2 accepts work, whatever the other coordinators have received.
            let completed = completes(&fleet, next, &model);
            // Resumed first, since operators wait for it.
            fleet.freeze(Node::Coordinator(frozen), false).unwrap();
            assert!(completed, "a worker that takes work again was not found");
            let follows = || own(&fleet, frozen).filter(|(role, now, _)| role != "leader" && *now > before);
            wait::until("it steps down", RECOVERY, follows).unwrap();
            history.goes_on(RECOVERY).unwrap();
        }
    });
}

/// Cuts the links from one coordinator to the two others, or from them to it.
fn cut(fleet: &Fleet, coordinator: usize, from_it: bool, link: Link) {
    for other in others(coordinator) {
        let (from, to) = if from_it { (coordinator, other) } else { (other, coordinator) };
        let [from, to] = [from, to].map(|c| fleet.host(Node::Coordinator(c)));
        fleet.net().link(from, to, link);
    }
}

#[test]
fn a_leader_cut_one_way_is_replaced_and_a_follower_disturbs_no_other() {
    let fleet = Fleet::builder("one-way", &crate::tiny_model(), 3, 3).start(22).unwrap();
    for from_it in [true, false] {
        let way = if from_it { "not heard" } else { "not hearing" };
        let cut_off = leader(&fleet, &[0, 1, 2]);
        let cut_at = Instant::now();
        cut(&fleet, cut_off, from_it, Link::CUT);
        let next = leader(&fleet, &others(cut_off));
        println!("leader c{cut_off} {way}: c{next} leads after {:.2?}", cut_at.elapsed());
        assert_ne!(next, cut_off);
        wait::until("the new leader takes a change", RECOVERY, || {
            drain(&fleet, next, 0, from_it).ok().filter(|answer| answer.status == 204)
        })
        .unwrap();
        // The isolated coordinator accepts no change and reports none.
        assert_eq!(drain(&fleet, cut_off, 1, true).unwrap().status, 503);
        assert_ne!(own(&fleet, cut_off).unwrap().0, "leader");
        cut(&fleet, cut_off, from_it, Link::default());
        converge(&fleet);
        let learned = || is_draining(&fleet, cut_off, 0).filter(|&draining| draining == from_it);
        wait::until("it has learned of the change", RECOVERY, learned).unwrap();

        let leads = leader(&fleet, &[0, 1, 2]);
        let before = term(&fleet, &[0, 1, 2]);
        let [cut_off, whole] = others(leads);
        cut(&fleet, cut_off, from_it, Link::CUT);
        let silent = || (drain(&fleet, cut_off, 1, true).ok()?.status == 503).then_some(());
        wait::until("it finds itself alone", RECOVERY, silent).unwrap();
        assert_eq!(drain(&fleet, whole, 0, !from_it).unwrap().status, 204, "a follower is not missed");
        cut(&fleet, cut_off, from_it, Link::default());
        converge(&fleet);
        assert_eq!(leader(&fleet, &[0, 1, 2]), leads, "a follower that was {way} is back: no election");
        assert_eq!(term(&fleet, &[0, 1, 2]), before);
        drain_by_any(&fleet, 0, false);
        drain_by_any(&fleet, 1, false);
    }
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
        let sent = Instant::now();
        let answer = drain(&fleet, 0, worker, worker == 1).unwrap();
        let took = sent.elapsed();
        println!("refused after {took:?}");
        assert_eq!(answer.status, 503);
        assert_eq!(answer.json().unwrap()["error"]["code"], "no_quorum");
        assert!(took < REFUSED_WITHIN, "{took:?}");
        assert!(completes(&fleet, 0, &model), "inference has stopped");
        assert!(is_ready(&fleet, 0), "who can answer is ready");
    }
    assert_eq!(is_draining(&fleet, 0, 0), Some(true), "what was agreed on last holds");
    for lost in [1, 2] {
        fleet.start(Node::Coordinator(lost)).unwrap();
    }
    drain_by_any(&fleet, 2, true);
    converge(&fleet);
    assert!(completes(&fleet, 0, &model));
}
