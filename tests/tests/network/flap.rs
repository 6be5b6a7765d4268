//! A link that goes down and up once a second, for a minute.

use crate::group::{RECOVERY, completes, converge, leader};
use crate::history::{History, term};
use kvasir_cluster_tests::fleet::{Fleet, Node};
use kvasir_cluster_tests::testnet::Link;
use kvasir_cluster_tests::wait;
use std::time::{Duration, Instant};

const FOR: Duration = Duration::from_secs(60);
const HALF: Duration = Duration::from_millis(500);
const LEADERS: u64 = 3;
/// Maximum number of new connections of the flapping node, to five others, in a minute.
const RECONNECTIONS: usize = 60;

/// Log lines of a node about connections made or tried.
fn connections(fleet: &Fleet, node: Node) -> usize {
    let log = std::fs::read_to_string(fleet.log(node).unwrap()).unwrap();
    log.lines()
        .filter(|line| line.contains("cannot connect") || line.contains("connected to a coordinator"))
        .count()
}

#[test]
fn a_flapping_link_moves_leadership_seldom_and_stops_no_other_node() {
    let fleet = Fleet::builder("flap", &crate::tiny_model(), 3, 2).in_parallel().start(36).unwrap();
    let model = fleet.model().unwrap();
    let flapping = leader(&fleet, &[0, 1, 2]);
    let (node, began, before) = (Node::Coordinator(flapping), Instant::now(), term(&fleet, &[0, 1, 2]));
    let dialed = connections(&fleet, node);
    let history = History::new();
    std::thread::scope(|scope| {
        let operator = scope.spawn(|| history.operator(&fleet, 0).act_until_over());
        let ends = history.ends();
        let mut cut = false;
        for turn in 1u32.. {
            cut = !cut;
            fleet.net().around(fleet.host(node), if cut { Link::CUT } else { Link::default() });
            let due = HALF * turn;
            if due > FOR {
                break;
            }
            // Other nodes are not affected.
            let target = (flapping + 1 + turn as usize % 2) % 3;
            assert!(completes(&fleet, target, &model), "c{target} has failed a request");
            wait::until("half a second", FOR, || (began.elapsed() >= due).then_some(())).unwrap();
        }
        fleet.net().everywhere(Link::default());
        history.goes_on(RECOVERY).unwrap();
        drop(ends);
        operator.join().unwrap();
    });
    converge(&fleet);
    let (elections, dials) = (term(&fleet, &[0, 1, 2]) - before, connections(&fleet, node) - dialed);
    println!("{elections} elections, {dials} connections made or tried, {} changes", history.acknowledged());
    assert!(elections <= LEADERS && dials <= RECONNECTIONS);
    history.check();
}
