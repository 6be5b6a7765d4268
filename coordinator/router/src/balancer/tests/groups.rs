//! Requests with a common prefix, and requests that wait because all workers have enough to do.

use super::*;
use proto::worker::LoadReport;
use std::collections::VecDeque;

fn stored(units: &[BlockId]) -> KvEventBatch {
    let parent = BlockId([0; 16]);
    let stored = KvEvent::Stored { parent, units: units.to_vec(), medium: Medium::Device };
    KvEventBatch { epoch: Epoch(1), first_sequence: 1, events: vec![stored] }
}

/// A request of `common` shared units and a tail of its own.
fn sibling(rig: &Rig, common: u64, tail: u32, number: u64) -> RouteRequest {
    let own = 1_000_000 + 1_000 * number;
    let units = (0..common).chain(own..own + u64::from(tail / 16));
    rig.request("t", common as u32 * 16 + tail, chain(units))
}

#[test]
fn a_follower_has_the_reason_group() {
    let mut rig = Rig::new(Policy::default(), &["a", "b"]);
    let request = sibling(&rig, 40, 30, 0);
    let (leader, actions) = rig.submit(request).unwrap();
    let first = only(&actions).clone();
    assert_eq!(first.reason, Reason::Load);
    let request = sibling(&rig, 40, 30, 1);
    let (_, actions) = rig.submit(request).unwrap();
    assert_eq!((&only(&actions).node, only(&actions).reason), (&first.node, Reason::Group));
    // Once the leader's prompt is computed, the prefix is cached.
    rig.balancer.started(rig.now, leader, 0);
    let request = sibling(&rig, 40, 30, 2);
    let (_, actions) = rig.submit(request).unwrap();
    assert_eq!((&only(&actions).node, only(&actions).reason), (&first.node, Reason::Prefix));
}

#[test]
fn a_group_by_name_may_have_less_in_common() {
    let mut rig = Rig::new(Policy::default(), &["a", "b"]);
    for (number, group, reason) in [
        (0, Some(CommonKey([7; 16])), Reason::Load),
        (1, Some(CommonKey([7; 16])), Reason::Group),
        (2, None, Reason::Prefix),
    ] {
        let request = RouteRequest { group, ..sibling(&rig, 6, 30, number) };
        let (_, actions) = rig.submit(request).unwrap();
        assert_eq!(only(&actions).reason, reason, "request {number}");
    }
}

#[test]
fn requests_wait_while_all_workers_have_enough_prefill() {
    let mut rig = Rig::new(Policy::default(), &["a", "b"]);
    let mut placed = Vec::new();
    for number in 0..4 {
        // Two seconds each.
        let request = sibling(&rig, 0, 4_000, number);
        let (ticket, actions) = rig.submit(request).unwrap();
        placed.extend(assigned(&actions).iter().map(|(ticket, to)| (*ticket, to.node.clone())));
        assert_eq!(actions.len(), usize::from(number < 2), "request {number} {ticket:?}");
    }
    assert_eq!(rig.balancer.queue().requests, 2);
    assert_ne!(placed[0].1, placed[1].1);
    let actions = rig.balancer.started(rig.now, placed[1].0, 0);
    assert_eq!(only(&actions).node, placed[1].1);
    // Another tenant's request whose prompt is already cached does not wait: it is almost no work.
    let there = chain((0..250).map(|i| 1_000_000 + i));
    let request = RouteRequest { tenant: "u".into(), chain: there, ..sibling(&rig, 0, 4_010, 0) };
    let (_, actions) = rig.submit(request).unwrap();
    assert_eq!((&only(&actions).node, only(&actions).predicted), (&placed[0].1, 4_000));
}

#[test]
fn the_first_holder_is_used_again_after_the_demand() {
    let mut rig = Rig::new(Policy { lease: Duration::MAX, ..Policy::default() }, &["a", "b", "c"]);
    let mut number = 0;
    let mut request = |rig: &mut Rig| {
        number += 1;
        let request = sibling(rig, 100, 200, number);
        let (ticket, actions) = rig.submit(request).unwrap();
        (ticket, only(&actions).clone())
    };
    let (leader, home) = request(&mut rig);
    rig.balancer.started(rig.now, leader, 0);
    let common: Vec<BlockId> = chain(0..100).to_vec();
    rig.balancer.events(&home.node, stored(&common)).unwrap();
    rig.balancer.ended(rig.now, leader, 0);
    // Ten at once are a burst. Then as many arrive as are computed, which is lasting demand.
    let mut open = VecDeque::new();
    for _ in 0..10 {
        let (ticket, to) = request(&mut rig);
        assert_eq!((&to.node, to.predicted), (&home.node, 1_600));
        open.push_back(ticket);
    }
    let start = rig.now;
    let replica = loop {
        let (ticket, to) = request(&mut rig);
        open.push_back(ticket);
        if to.node != home.node {
            assert_eq!((to.reason, to.predicted), (Reason::Replica, 0));
            rig.balancer.started(rig.now, ticket, 0);
            break to.node;
        }
        rig.now += Duration::from_millis(100);
        assert!(rig.now < start + Duration::from_secs(10));
        let done = open.pop_front().unwrap();
        rig.balancer.started(rig.now, done, 0);
        rig.balancer.ended(rig.now, done, 0);
        for worker in ["a", "b", "c"] {
            rig.balancer.load(rig.now, &node(worker), report(1), 0);
        }
    };
    assert!(rig.now > start + Duration::from_secs(1));
    rig.balancer.events(&replica, stored(&common)).unwrap();
    // While requests wait, both holders are used.
    let (ticket, to) = request(&mut rig);
    open.push_back(ticket);
    assert_eq!((to.node, to.predicted), (replica, 1_600));
    for ticket in open {
        rig.balancer.started(rig.now, ticket, 0);
        rig.balancer.ended(rig.now, ticket, 0);
    }
    // With one request at a time, only the first holder is used.
    for _ in 0..30 {
        rig.now += Duration::from_secs(2);
        for worker in ["a", "b", "c"] {
            rig.balancer.load(rig.now, &node(worker), report(1), 0);
        }
        let (ticket, to) = request(&mut rig);
        assert_eq!((&to.node, to.predicted), (&home.node, 1_600));
        rig.balancer.started(rig.now, ticket, 0);
        rig.balancer.ended(rig.now, ticket, 0);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    /// K requests with P common tokens and t own ones, all at once over W workers. Another computation of P
    /// pays only if the holders' tails delay more than that work: with R holders, 2 R / W times P, and half
    /// of P less for replicas.
    #[test]
    fn a_common_prefix_is_computed_few_times(
        names in 2usize..=6,
        common in 64u64..200,
        tail in 16u32..200,
        requests in 2u64..64,
        named in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let workers = &["a", "b", "c", "d", "e", "f"][..names];
        let policy = Policy { max_pending: Duration::from_secs(1_000), ..Policy::default() };
        let mut rig = Rig::new(policy, workers);
        rig.random = seed;
        let mut computed = 0;
        for number in 0..requests {
            let group = named.then_some(CommonKey([1; 16]));
            let request = RouteRequest { group, ..sibling(&rig, common, tail, number) };
            let (_, actions) = rig.submit(request).unwrap();
            computed += usize::from(only(&actions).predicted < 256);
        }
        let before = (computed - 1) as f64;
        // Tolerance for ties and for recently assigned work.
        let least = 2.0 * before / names as f64 - 0.2;
        let tails = if computed > 1 { least + (before - 1.0) * (least - 0.5).max(0.0) } else { 0.0 };
        let (prefix, own) = (16.0 * common as f64, f64::from(tail));
        prop_assert!(tails * prefix <= requests as f64 * own, "{computed} of {requests}");
        prop_assert!(computed <= names);
    }
}

#[test]
fn cached_requests_overtake_and_requests_that_would_recompute_yield() {
    let mut rig = Rig::new(Policy::default(), &["a", "b"]);
    assert_eq!(rig.balancer.events(&node("a"), stored(&chain(0..93))), Ok(None));
    let busy = |rig: &mut Rig, name: &str, pending_prefill_tokens| {
        let report = LoadReport { pending_prefill_tokens, ..report(1) };
        rig.balancer.load(rig.now, &node(name), report, 3)
    };
    busy(&mut rig, "a", 10_000);
    busy(&mut rig, "b", 10_000);
    let new = rig.request("t", 1_530, chain(1_000..1_095));
    let (waits, actions) = rig.submit(new).unwrap();
    assert_eq!(actions, []);
    let cached = rig.request("t", 1_530, chain(0..95));
    let (_, actions) = rig.submit(cached).unwrap();
    assert_eq!(only(&actions).node, node("a"));
    // Half of the next prompt is being computed at a, which is full. The room at b goes to the request behind
    // it.
    let half = rig.request("t", 1_530, chain((0..47).chain(2_000..2_048)));
    let other = rig.request("t", 1_530, chain(3_000..3_095));
    let (half, actions) = rig.submit(half).unwrap();
    assert_eq!(actions, []);
    let (other, actions) = rig.submit(other).unwrap();
    assert_eq!(actions, []);
    let order = |actions: &[Action]| {
        assigned(actions).iter().map(|(ticket, to)| (*ticket, to.node.clone())).collect::<Vec<_>>()
    };
    let actions = busy(&mut rig, "b", 0);
    assert_eq!(order(&actions), [(waits, node("b")), (other, node("b"))]);
    let actions = rig.balancer.started(rig.now, waits, 1);
    assert_eq!(order(&actions), [(half, node("b"))], "nobody can go in its stead");
}
