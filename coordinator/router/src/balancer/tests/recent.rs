//! The stored routing decisions.

use super::*;
use crate::balancer::recent::{DECISIONS, Decided, Ending, Locality, Lost, Outcome};

fn last(rig: &Rig) -> (Arc<Decided>, Outcome) {
    rig.balancer.recent().since(0).last().unwrap()
}

fn locality(rig: &Rig) -> Locality {
    let mut all = Locality::default();
    rig.balancer.recent().locality().last(rig.now, 10).for_each(|(_, at)| all.merge(at));
    all
}

fn place(rig: &mut Rig, units: u64) -> Ticket {
    let request = rig.request("t", units as u32 * 16 + 8, chain(0..units));
    rig.submit(request).unwrap().0
}

#[test]
fn a_decision_is_stored_with_its_outcome() {
    let mut rig = Rig::new(Policy::default(), &["a", "b"]);
    let ticket = place(&mut rig, 20);
    let (decided, outcome) = last(&rig);
    assert_eq!((decided.candidates.len(), decided.predicted, outcome), (2, 0, Outcome::default()));
    let parts = decided.parts();
    assert_eq!(parts.len(), 2);
    assert!((parts[0].prefill - 328.0 / 2_000.0).abs() < 1e-9, "{parts:?}");
    let seen = rig.balancer.recent().changes();
    rig.now += Duration::from_millis(300);
    rig.balancer.found_cached(ticket, 0);
    rig.balancer.started(rig.now, ticket, 0);
    let (_, outcome) = rig.balancer.recent().since(seen).last().unwrap();
    assert_eq!((outcome.started, outcome.cached, outcome.ended), (Some(rig.now), Some(0), None));
    rig.balancer.generated(ticket, 7);
    rig.balancer.ended(rig.now, ticket, 0);
    let (_, outcome) = last(&rig);
    assert_eq!((outcome.generated, outcome.ended), (Some(7), Some((rig.now, Ending::Over))));
    let seen = rig.balancer.recent().changes();
    assert_eq!(rig.balancer.recent().since(seen).count(), 0, "nothing has become of it since");

    let ticket = place(&mut rig, 2);
    rig.balancer.retry(rig.now, ticket, AttemptError::Declined, None, 0);
    let both: Vec<_> = rig.balancer.recent().since(seen).collect();
    assert_eq!((both.len(), both[1].0.attempt), (2, Attempt(1)));
    assert!(matches!(both[0].1.ended, Some((_, Ending::Failed))));
}

#[test]
fn stored_decisions_are_bounded() {
    let mut rig = Rig::new(Policy::default(), &["a"]);
    for _ in 0..3 * DECISIONS as u64 {
        let ticket = place(&mut rig, 1);
        rig.balancer.ended(rig.now, ticket, 0);
    }
    let stored: Vec<u64> = rig.balancer.recent().since(0).map(|(decided, _)| decided.number).collect();
    assert_eq!((stored.len(), stored.last()), (DECISIONS, Some(&(3 * DECISIONS as u64 - 1))));
    for _ in 0..20 {
        // 40 000 units each: only a few of these are stored.
        let request = rig.request("t", 40_000 * 16, chain(0..40_000));
        let (ticket, _) = rig.submit(request).unwrap();
        rig.balancer.ended(rig.now, ticket, 0);
    }
    let units: usize = rig.balancer.recent().prompts().map(|prompt| prompt.request.chain.len()).sum();
    assert!((40_000..=1 << 18).contains(&units), "{units}");
}

#[test]
fn lost_locality_has_a_reason() {
    let mut rig = Rig::new(Policy::default(), &["a", "b"]);
    let ticket = place(&mut rig, 20);
    let holder = last(&rig).0.names.of(last(&rig).0.choice.slot).unwrap().clone();
    rig.balancer.started(rig.now, ticket, 0);
    assert_eq!(locality(&rig), Locality { requests: 1, prompt: 328, ..Locality::default() });
    // The holder drains: another worker computes the prompt again.
    rig.balancer.change(rig.now, TableChange::Drain { node: holder.clone(), draining: true }, 0).unwrap();
    place(&mut rig, 20);
    let (decided, _) = last(&rig);
    assert_eq!((decided.lost, decided.best.map(|(tokens, _)| tokens)), (Some(Lost::Drain), Some(320)));
    assert_ne!(decided.names.of(decided.choice.slot), Some(&holder));
    let now = locality(&rig);
    assert_eq!((now.prompt, now.best, now.predicted), (656, 320, 0));
    assert_eq!(now.lost[Lost::Drain as usize], 320);
    assert_eq!(now.lost.iter().sum::<u64>(), 320);
}

#[test]
fn a_decision_keeps_the_node_names_of_its_time() {
    let mut rig = Rig::new(Policy::default(), &["a"]);
    place(&mut rig, 1);
    let (before, _) = last(&rig);
    rig.leave("a", 1);
    rig.join("b", 1);
    place(&mut rig, 1);
    let (after, _) = last(&rig);
    assert_eq!(before.choice.slot, after.choice.slot, "the slot is used again");
    assert_eq!(before.names.of(before.choice.slot), Some(&node("a")));
    assert_eq!(after.names.of(after.choice.slot), Some(&node("b")));
}

#[test]
fn holders_are_listed_with_announced_and_expected_units() {
    let mut rig = Rig::new(Policy::default(), &["a", "b"]);
    place(&mut rig, 20);
    let holder = last(&rig).0.names.of(last(&rig).0.choice.slot).unwrap().clone();
    let ids = chain(0..20);
    assert_eq!(rig.balancer.holders(&ids), [(holder.clone(), 0, 20)], "expected, not announced");
    let stored = KvEvent::Stored { parent: BlockId([0; 16]), units: ids.to_vec(), medium: Medium::Device };
    let batch = KvEventBatch { epoch: Epoch(1), first_sequence: 1, events: vec![stored] };
    assert_eq!(rig.balancer.events(&holder, batch), Ok(None));
    assert_eq!(rig.balancer.holders(&ids[..8]), [(holder, 8, 8)]);
}
