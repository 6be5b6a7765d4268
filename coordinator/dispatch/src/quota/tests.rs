use super::*;

fn quota(requests_per_minute: u32, tokens_per_minute: u64, concurrency: u32) -> Quota {
    Quota { requests_per_minute, tokens_per_minute, concurrency }
}

fn meter(quota: Quota, now: Instant) -> Arc<Meter> {
    Arc::new(Meter::new([1; 32], Of::Key, quota, now))
}

fn enter(meter: &Arc<Meter>, now: Instant) -> Result<Permit, (Limit, Duration)> {
    Permit::new([Some(meter), None], now).map_err(|exceeded| (exceeded.limit, exceeded.retry_after))
}

fn seconds(s: u64) -> Duration {
    Duration::from_secs(s)
}

#[test]
fn the_request_bucket_refills_evenly() {
    let now = Instant::now();
    let meter = meter(quota(3, 0, 0), now);
    for _ in 0..3 {
        enter(&meter, now).unwrap();
    }
    assert_eq!(enter(&meter, now).unwrap_err(), (Limit::Requests, seconds(20)));
    assert_eq!(enter(&meter, now + seconds(15)).unwrap_err(), (Limit::Requests, seconds(5)));
    enter(&meter, now + seconds(20)).unwrap();
    assert!(enter(&meter, now + seconds(20)).is_err());
    // After a long time the bucket has one minute's amount.
    let after_an_hour = now + seconds(3_600);
    assert_eq!((0..9).filter(|_| enter(&meter, after_an_hour).is_ok()).count(), 3);
}

#[test]
fn concurrent_requests_are_limited() {
    let now = Instant::now();
    let meter = meter(quota(0, 0, 2), now);
    let first = enter(&meter, now).unwrap();
    let _second = enter(&meter, now).unwrap();
    assert_eq!(enter(&meter, now).unwrap_err(), (Limit::Concurrency, seconds(1)));
    drop(first);
    enter(&meter, now).unwrap();
}

#[test]
fn prompts_are_charged_before_and_generated_tokens_after() {
    let now = Instant::now();
    let meter = meter(quota(0, 600, 0), now);
    let permit = enter(&meter, now).unwrap();
    permit.prompt(500, now).unwrap();
    permit.generated(200);
    let refused = permit.prompt(10, now).unwrap_err();
    assert_eq!((refused.limit, refused.allowed, refused.retry_after), (Limit::Tokens, 600, seconds(11)));
    permit.prompt(10, now + seconds(11)).unwrap();
    // A prompt longer than a minute's tokens waits for a full bucket.
    let after_refill = now + seconds(600);
    permit.prompt(5_000, after_refill).unwrap();
    assert_eq!(permit.prompt(1, after_refill).unwrap_err().retry_after, Duration::from_secs_f64(120.1));
}

#[test]
fn a_refusal_by_the_second_meter_reverts_the_first() {
    let now = Instant::now();
    let (key, tenant) = (meter(quota(1, 0, 1), now), meter(quota(0, 0, 1), now));
    let running = enter(&tenant, now).unwrap();
    assert!(Permit::new([Some(&key), Some(&tenant)], now).is_err());
    drop(running);
    Permit::new([Some(&key), Some(&tenant)], now).unwrap();
}

#[test]
fn spending_at_other_coordinators_counts_once() {
    let now = Instant::now();
    let (here, there) = (meter(quota(10, 0, 4), now), meter(quota(10, 0, 4), now));
    let peer = NodeId::new("c1").unwrap();
    here.add_report(&peer, 7, &there.report(now).unwrap(), now);
    let running: Vec<_> = (0..3).map(|_| enter(&there, now).unwrap()).collect();
    for _ in 0..5 {
        here.add_report(&peer, 7, &there.report(now).unwrap(), now);
    }
    let own = enter(&here, now).unwrap();
    assert_eq!(enter(&here, now).unwrap_err().0, Limit::Concurrency);
    drop((running, own));
    here.add_report(&peer, 7, &there.report(now).unwrap(), now);
    let left = (0..10).filter(|_| enter(&here, now).is_ok()).count();
    assert_eq!(left, 10 - 3 - 1);
    // A meter that only received reports does not report them.
    let silent = meter(quota(10, 0, 4), now);
    silent.add_report(&peer, 7, &there.report(now).unwrap(), now + REPORT_FOR);
    assert_eq!(silent.report(now + REPORT_FOR), None);
    assert_eq!((0..10).filter(|_| enter(&silent, now + REPORT_FOR).is_ok()).count(), 7);
    // A restarted coordinator counts from zero.
    here.add_report(&peer, 8, &QuotaSpent { subject: [1; 32], requests: 2, tokens: 0, inflight: 4 }, now);
    assert_eq!(enter(&here, now + seconds(2)).unwrap_err().0, Limit::Requests);
    let after_a_minute = now + seconds(60);
    here.add_report(
        &peer,
        8,
        &QuotaSpent { subject: [1; 32], requests: 2, tokens: 0, inflight: 4 },
        after_a_minute,
    );
    assert_eq!(enter(&here, after_a_minute).unwrap_err().0, Limit::Concurrency);
    enter(&here, after_a_minute + SILENT_AFTER).unwrap();
    let spent = there.report(now + REPORT_FOR);
    assert_eq!(spent, None, "what nobody uses is not told for ever");
}

#[test]
fn limits_can_change_while_requests_run() {
    let now = Instant::now();
    let meter = meter(quota(0, 0, 1), now);
    let _running = enter(&meter, now).unwrap();
    meter.limit(quota(1, 0, 0), now);
    enter(&meter, now).unwrap();
    assert_eq!(enter(&meter, now).unwrap_err().0, Limit::Requests);
}

#[test]
fn usage_includes_all_coordinators() {
    let now = Instant::now();
    let meter = meter(quota(60, 0, 4), now);
    let permits = [enter(&meter, now).unwrap(), enter(&meter, now).unwrap()];
    permits[0].generated(500);
    let spent = |requests, inflight| QuotaSpent { subject: [1; 32], requests, tokens: 0, inflight };
    let peer = NodeId::new("c2").unwrap();
    meter.add_report(&peer, 7, &spent(10, 1), now);
    let usage = meter.usage(now);
    assert_eq!(usage, Usage { requests: (12, 60), tokens: (0, 0), inflight: (3, 4) });
    // One request is refilled each second. In-flight requests of a silent coordinator do not count.
    drop(permits);
    let usage = meter.usage(now + seconds(5));
    assert_eq!(usage, Usage { requests: (7, 60), tokens: (0, 0), inflight: (0, 4) });
    assert_eq!(meter.usage(now + seconds(60)).requests, (0, 60));
}
