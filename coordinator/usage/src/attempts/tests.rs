use super::*;
use proto::block::BlockId;
use proto::ids::{Attempt, ModelId, RequestId};
use std::collections::HashMap;

fn id(request: &str, attempt: u32) -> AttemptId {
    AttemptId {
        request: RequestId::new(request).unwrap(),
        part: 0,
        attempt: Attempt(attempt),
        root: BlockId([1; 16]),
    }
}

fn record(id: AttemptId, input: u64, output: u64) -> UsageRecord {
    UsageRecord {
        id,
        model: ModelId::new("m").unwrap(),
        input_tokens: input,
        cached_tokens: 5,
        output_tokens: output,
        input_ns: 1_000,
        output_ns: 500,
        energy_uj: 300,
        energy_ns: 1_500,
    }
}

fn report(epoch: u64, first: u64, records: Vec<UsageRecord>) -> UsageReport {
    UsageReport { epoch: Epoch(epoch), first, records }
}

fn node() -> NodeId {
    NodeId::new("w").unwrap()
}

fn account(tenant: &str) -> Account {
    Account { tenant: tenant.into(), key: None, model: "m".into() }
}

fn amounts(charge: &Charge) -> HashMap<Counter, u64> {
    charge.1.iter().copied().filter(|(_, amount)| *amount > 0).collect()
}

#[test]
fn an_attempt_is_settled_whichever_side_comes_first() {
    let (node, id) = (node(), id("r", 0));
    let ended = Ended { input: PaidInput::Tokens(10), delivered: 4 };
    let mut first = Attempts::default();
    first.began(&node, &id, &account("t"));
    assert!(first.reported(&node, report(1, 0, vec![record(id.clone(), 10, 4)])).is_empty());
    let charge = first.ended(0, &node, &id, ended).unwrap();
    let mut second = Attempts::default();
    second.began(&node, &id, &account("t"));
    assert!(second.ended(0, &node, &id, ended).is_none());
    assert_eq!(second.reported(&node, report(1, 0, vec![record(id, 10, 4)])), std::slice::from_ref(&charge));
    let expected = [
        (Counter::DeviceNs, 1_500),
        (Counter::EnergyUj, 300),
        (Counter::EnergyDeviceNs, 1_500),
        (Counter::TimedAttempts, 1),
    ];
    assert_eq!(amounts(&charge), HashMap::from(expected));
    assert_eq!(charge.0, account("t"));
    assert!(first.is_empty() && second.is_empty());
}

#[test]
fn what_is_computed_again_is_apart_and_the_sums_are_exact() {
    let (node, id) = (node(), id("r", 0));
    let mut attempts = Attempts::default();
    attempts.began(&node, &id, &account("t"));
    attempts.ended(0, &node, &id, Ended { input: PaidInput::Tokens(7), delivered: 2 });
    let charge = &attempts.reported(&node, report(1, 0, vec![record(id, 10, 3)]))[0];
    let amounts = amounts(charge);
    assert_eq!(amounts[&Counter::RecomputedTokens], 3 + 1);
    assert_eq!(amounts[&Counter::DeviceNs], 700 + 333);
    assert_eq!(amounts[&Counter::RecomputedDeviceNs], 300 + 167);
    assert_eq!(amounts[&Counter::EnergyUj] + amounts[&Counter::RecomputedEnergyUj], 300);
}

#[test]
fn a_request_that_the_client_left_pays_for_what_was_computed() {
    let (node, id) = (node(), id("r", 0));
    let mut attempts = Attempts::default();
    attempts.began(&node, &id, &account("t"));
    attempts.ended(0, &node, &id, Ended { input: PaidInput::AsComputed, delivered: 0 });
    let amounts = amounts(&attempts.reported(&node, report(1, 0, vec![record(id, 10, 0)]))[0]);
    assert_eq!(amounts[&Counter::PromptTokens], 15);
    assert_eq!(amounts[&Counter::CachedTokens], 5);
    assert_eq!(amounts[&Counter::DeviceNs], 1_500);
}

#[test]
fn a_lost_attempt_costs_the_tenant_nothing_even_without_tokens() {
    let (node, id) = (node(), id("r", 0));
    let mut attempts = Attempts::default();
    attempts.began(&node, &id, &account("t"));
    attempts.ended(0, &node, &id, Ended { input: PaidInput::Nothing, delivered: 0 });
    let amounts = amounts(&attempts.reported(&node, report(1, 0, vec![record(id, 0, 0)]))[0]);
    assert_eq!(amounts[&Counter::RecomputedDeviceNs], 1_500);
    assert_eq!(amounts[&Counter::RecomputedEnergyUj], 300);
    assert!(!amounts.contains_key(&Counter::DeviceNs));
}

#[test]
fn a_record_counts_once() {
    let node = node();
    let mut attempts = Attempts::default();
    let records = |range: std::ops::Range<u32>| range.map(|n| record(id("r", n), 1, 1)).collect::<Vec<_>>();
    let mut counted =
        |epoch, first, range| attempts.reported(&node, report(epoch, first, records(range))).len();
    assert_eq!(counted(1, 0, 0..3), 3);
    assert_eq!(counted(1, 0, 0..3), 0, "repeated");
    assert_eq!(counted(1, 1, 1..5), 2, "two of them are new");
    assert_eq!(counted(2, 0, 0..1), 1, "a later epoch");
    assert_eq!(counted(1, 5, 5..6), 0, "an earlier epoch");
}

#[test]
fn work_that_nothing_explains_has_a_row_of_its_own() {
    let charge = &Attempts::default().reported(&node(), report(1, 0, vec![record(id("r", 0), 10, 4)]))[0];
    assert_eq!(&*charge.0.tenant, crate::row::UNATTRIBUTED);
    assert_eq!(amounts(charge)[&Counter::DeviceNs], 1_500);
}

#[test]
fn a_worker_reports_for_its_instances() {
    let (node, id) = (node(), id("r", 0));
    let mut attempts = Attempts::default();
    attempts.began(&node.instance(2), &id, &account("t"));
    attempts.ended(0, &node.instance(2), &id, Ended { input: PaidInput::Tokens(10), delivered: 4 });
    assert_eq!(attempts.reported(&node, report(1, 0, vec![record(id, 10, 4)]))[0].0, account("t"));
}

#[test]
fn equal_names_are_settled_in_order() {
    let (node, id) = (node(), id("r", 0));
    let mut attempts = Attempts::default();
    for tenant in ["t", "u"] {
        attempts.began(&node, &id, &account(tenant));
    }
    attempts.ended(0, &node, &id, Ended { input: PaidInput::Tokens(10), delivered: 4 });
    let records = vec![record(id.clone(), 10, 4), record(id.clone(), 10, 4)];
    let charges = attempts.reported(&node, report(1, 0, records));
    assert_eq!(charges.len(), 1);
    assert_eq!(charges[0].0, account("t"));
    let last = attempts.ended(0, &node, &id, Ended { input: PaidInput::Tokens(10), delivered: 4 });
    assert_eq!(last.unwrap().0, account("u"));
}

#[test]
fn attempts_without_a_record_are_given_up() {
    let (node, id) = (node(), id("r", 0));
    let mut attempts = Attempts::default();
    attempts.began(&node, &id, &account("t"));
    attempts.ended(100, &node, &id, Ended::default());
    attempts.expire(100 + RECORD_LIMIT_S - 1);
    assert_eq!(attempts.len(), 1);
    attempts.expire(100 + RECORD_LIMIT_S);
    assert!(attempts.is_empty());
}
