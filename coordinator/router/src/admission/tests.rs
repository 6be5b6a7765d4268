use super::*;
use proptest::prelude::*;

#[derive(Debug, Clone, PartialEq)]
struct Item {
    name: &'static str,
    tokens: u64,
    deadline: Instant,
    rank: Instant,
    priority: i32,
}

impl Waiting for Item {
    type Kind = &'static str;
    /// The part of the name before a slash.
    fn kind(&self) -> &'static str {
        self.name.split_once('/').map_or("", |(kind, _)| kind)
    }
    fn tokens(&self) -> u64 {
        self.tokens
    }
    fn deadline(&self) -> Instant {
        self.deadline
    }
    fn rank(&self) -> Instant {
        self.rank
    }
    fn priority(&self) -> i32 {
        self.priority
    }
}

fn item(name: &'static str, tokens: u64, at: Instant) -> Item {
    Item { name, tokens, deadline: at, rank: rank(at, 0), priority: 0 }
}

fn queue(requests: usize, tokens: u64) -> (Queue<Item>, Instant) {
    (Queue::new(QueueLimits { requests, tokens }, TenantWeights::default()), Instant::now())
}

fn drained(queue: &mut Queue<Item>) -> Vec<&'static str> {
    let mut order = Vec::new();
    queue.drain(|item, _| {
        order.push(item.name);
        PlacementOutcome::Done
    });
    order
}

#[test]
fn a_place_counts_the_requests_of_the_tenant_that_go_first() {
    let (mut q, now) = queue(10, 100);
    let place = |q: &Queue<Item>, name| q.place(|item| item.name == name);
    for name in ["m/a", "n/b", "m/c"] {
        q.push("t", item(name, 1, now));
    }
    q.push("other", item("m/d", 1, now));
    let urgent = item("n/e", 1, now);
    q.push("t", Item { rank: rank(now, -1), priority: -1, ..urgent });
    let places = ["n/e", "m/a", "n/b", "m/c", "m/d", "m/x"].map(|name| place(&q, name));
    assert_eq!(places, [Some((1, 4)), Some((2, 4)), Some((3, 4)), Some((4, 4)), Some((1, 1)), None]);
}

#[test]
fn the_queue_is_full_by_requests_or_by_tokens_but_never_when_empty() {
    let (mut q, now) = queue(2, 100);
    assert_eq!(q.check(1, 1_000), Ok(()));
    q.push("t", item("a", 60, now));
    assert_eq!(q.check(1, 40), Ok(()));
    assert_eq!(q.check(1, 41), Err(QueueFull { requests: 1, tokens: 60 }));
    q.push("t", item("b", 1, now));
    assert_eq!(q.check(1, 0), Err(QueueFull { requests: 2, tokens: 61 }));
    drained(&mut q);
    assert_eq!((q.requests(), q.tokens()), (0, 0));
}

#[test]
fn a_request_holds_back_only_those_of_its_kind() {
    let (mut q, now) = queue(100, 1_000);
    let step = Duration::from_millis(1);
    // More than are looked at behind a request that is stuck.
    let names = ["a/0", "a/1", "a/2", "a/3", "a/4", "a/5", "b/0", "a/6", "b/1"];
    names.iter().zip(0..).for_each(|(name, at)| q.push("t", item(name, 1, now + step * at)));
    let mut placed = Vec::new();
    let mut place = |free: &'static str, q: &mut Queue<Item>| {
        q.drain(|item, _| match item.kind() == free {
            true => {
                placed.push(item.name);
                PlacementOutcome::Done
            }
            false => PlacementOutcome::Blocked(item),
        });
    };
    place("b", &mut q);
    assert_eq!((q.requests(), q.kinds().collect::<Vec<_>>()), (7, vec![(&"a", 7)]));
    place("a", &mut q);
    assert_eq!(placed, ["b/0", "b/1", "a/0", "a/1", "a/2", "a/3", "a/4", "a/5", "a/6"]);
    assert_eq!((q.requests(), q.tokens()), (0, 0));
}

#[test]
fn tenants_take_turns_by_tokens_whatever_they_queue() {
    let (mut q, now) = queue(100, 1_000);
    for name in ["a1", "a2", "a3", "a4"] {
        q.push("a", item(name, 10, now));
    }
    q.push("b", item("b1", 30, now));
    q.push("b", item("b2", 30, now));
    q.push("c", item("c1", 10, now));
    assert_eq!(drained(&mut q), ["a1", "b1", "c1", "a2", "a3", "a4", "b2"]);
}

#[test]
fn a_late_tenant_gets_no_credit_for_earlier_service_of_others() {
    let (mut q, now) = queue(100, 10_000);
    (0..4).for_each(|_| q.push("a", item("a", 100, now)));
    let mut placed = 0;
    q.drain(|item, _| {
        placed += 1;
        if placed > 3 { PlacementOutcome::Blocked(item) } else { PlacementOutcome::Done }
    });
    (0..3).for_each(|_| q.push("b", item("b", 100, now)));
    (0..2).for_each(|_| q.push("a", item("a", 100, now)));
    assert_eq!(drained(&mut q), ["b", "a", "b", "a", "b", "a"]);
}

#[test]
fn a_blocked_lane_does_not_block_the_others() {
    let (mut q, now) = queue(100, 1_000);
    for (tenant, name) in [("a", "a1"), ("a", "a2"), ("b", "b1"), ("b", "b2")] {
        q.push(tenant, item(name, 5, now));
    }
    let mut order = Vec::new();
    q.drain(|item, _| {
        if item.name.starts_with('a') {
            return PlacementOutcome::Blocked(item);
        }
        order.push(item.name);
        PlacementOutcome::Done
    });
    assert_eq!(order, ["b1", "b2"]);
    assert_eq!((q.requests(), q.tokens()), (2, 10));
    assert_eq!(drained(&mut q), ["a1", "a2"]);
}

#[test]
fn requests_put_back_go_first_and_expired_ones_are_removed() {
    let (mut q, now) = queue(100, 1_000);
    let deadline = now + Duration::from_secs(1);
    q.push("a", item("late", 3, now));
    q.push("a", item("a1", 1, deadline));
    q.push_back_first("a", item("back", 1, deadline));
    assert_eq!(q.expire(now), [item("late", 3, now)]);
    assert_eq!(q.tokens(), 2);
    assert_eq!(drained(&mut q), ["back", "a1"]);
}

#[test]
fn urgent_requests_overtake_those_that_have_not_waited_long() {
    let (mut q, start) = queue(100, 1_000);
    let at = |name, seconds, priority| {
        let arrived = start + Duration::from_secs(seconds);
        Item { rank: rank(arrived, priority), priority, ..item(name, 1, start) }
    };
    for item in [at("patient", 0, 5), at("plain", 1, 0), at("urgent", 3, -3), at("late", 7, 0)] {
        q.push("t", item);
    }
    assert_eq!(drained(&mut q), ["urgent", "plain", "patient", "late"]);
    // However urgent all later requests are.
    assert!(rank(start, i32::MAX - 1) < rank(start + Duration::from_secs(201), i32::MIN));
    // Except the background, which waits for a day.
    let day = Duration::from_secs(24 * 60 * 60);
    assert!(rank(start, BACKGROUND) > rank(start + day - Duration::from_secs(201), MAX_PRIORITY));
    assert!(rank(start, BACKGROUND) < rank(start + day + Duration::from_secs(1), -MAX_PRIORITY));
}

/// Offers until one request is placed, by the answers of `verdict` to names; returns its name.
fn offer_one(queue: &mut Queue<Item>, verdict: impl Fn(&str) -> Verdict) -> Option<&'static str> {
    let mut taken = None;
    queue.drain(|item, yields| match verdict(item.name) {
        _ if taken.is_some() => PlacementOutcome::Blocked(item),
        Verdict::Stays => PlacementOutcome::Blocked(item),
        Verdict::Yields if yields => PlacementOutcome::Deferrable(item),
        Verdict::Yields | Verdict::Goes => {
            taken = Some(item.name);
            PlacementOutcome::Done
        }
    });
    taken
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Stays,
    Yields,
    Goes,
}

#[test]
fn a_yielding_or_stuck_request_is_overtaken_by_a_few_close_behind() {
    use Verdict::{Goes, Stays, Yields};
    let (mut q, now) = queue(100, 1_000);
    let names = ["a", "b", "c", "d", "e"];
    names.into_iter().for_each(|name| q.push("t", item(name, 1, now)));
    let but = |others, one, answer| move |name: &str| if name == one { answer } else { others };
    assert_eq!(offer_one(&mut q, but(Stays, "e", Goes)), None, "too far behind");
    assert_eq!(offer_one(&mut q, but(Stays, "d", Goes)), Some("d"));
    assert_eq!(offer_one(&mut q, but(Yields, "c", Goes)), Some("c"));
    assert_eq!(offer_one(&mut q, but(Stays, "b", Yields)), Some("b"), "nobody can go in its stead");
    assert_eq!(offer_one(&mut q, |_| Yields), Some("a"));
    assert_eq!((q.requests(), q.tokens()), (1, 1));
    // Requests of another priority do not overtake.
    q.push("t", Item { priority: 1, rank: rank(now, 1), ..item("f", 1, now) });
    assert_eq!(offer_one(&mut q, but(Yields, "f", Goes)), Some("e"));
}

#[test]
fn retry_after_follows_the_backlog_within_bounds() {
    let s = Duration::from_secs;
    assert_eq!(retry_after(0, 1_000.0), s(1));
    assert_eq!(retry_after(12_500, 1_000.0), s(13));
    assert_eq!(retry_after(u64::MAX, 1.0), s(60));
    assert_eq!(retry_after(10, 0.0), s(1));
}

#[test]
fn tenants_get_tokens_by_their_weights() {
    let weights = TenantWeights::new(&["heavy=3".to_owned()]).unwrap();
    let (mut q, at) =
        (Queue::new(QueueLimits { requests: 1_000, tokens: 1_000_000 }, weights), Instant::now());
    for _ in 0..100 {
        q.push("heavy", item("heavy", 10, at));
        q.push("light", item("light", 10, at));
    }
    let mut taken = Vec::new();
    q.drain(|item, _| match taken.len() < 80 {
        true => {
            taken.push(item.name);
            PlacementOutcome::Done
        }
        false => PlacementOutcome::Blocked(item),
    });
    let heavy = taken.iter().filter(|name| **name == "heavy").count();
    assert_eq!((heavy, taken.len() - heavy), (60, 20));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Under overload, three tenants get the same number of tokens to within one request, whatever the
    /// lengths and the number of their requests, and though some requests are put back.
    #[test]
    fn tenants_get_equal_shares_of_tokens(
        longest in proptest::collection::vec(1u64..2_000, 3),
        backlog in proptest::collection::vec(1usize..20, 3),
        capacity in 200usize..400,
        seed in any::<u64>(),
    ) {
        const TENANTS: [&str; 3] = ["a", "b", "c"];
        let (mut q, now) = queue(usize::MAX, u64::MAX);
        let mut random = seed;
        let mut draw = |below: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % below
        };
        let mut waiting = [0usize; 3];
        let mut served = [0u64; 3];
        for _ in 0..capacity {
            for tenant in 0..3 {
                while waiting[tenant] < backlog[tenant] {
                    q.push(TENANTS[tenant], item(TENANTS[tenant], 1 + draw(longest[tenant]), now));
                    waiting[tenant] += 1;
                }
            }
            // One worker is free.
            let mut taken = None;
            q.drain(|item, _| match &taken {
                None => { taken = Some(item); PlacementOutcome::Done }
                Some(_) => PlacementOutcome::Blocked(item),
            });
            let item = taken.unwrap();
            let tenant = TENANTS.iter().position(|name| *name == item.name).unwrap();
            if draw(10) == 0 {
                q.push_back_first(item.name, item);
            } else {
                served[tenant] += item.tokens;
                waiting[tenant] -= 1;
            }
        }
        let (max, min) = (served.iter().max().unwrap(), served.iter().min().unwrap());
        let slack = 2 * longest.iter().max().unwrap();
        prop_assert!(max - min <= slack, "{served:?} {longest:?}");
        // In the long run the shares are within a fifth of each other.
        prop_assert!(*max < 5 * slack || min * 5 >= max * 4, "{served:?} {longest:?}");
    }

    /// Whichever requests yield or are stuck, a request is overtaken from behind within its tenant only a
    /// bounded number of times, and only by requests of the same priority.
    #[test]
    fn a_request_is_overtaken_a_bounded_number_of_times(
        items in proptest::collection::vec((0u64..20, -1i32..=1), 1..60),
        answers in proptest::collection::vec(0u8..8, 60..200),
    ) {
        let (mut q, start) = queue(usize::MAX, u64::MAX);
        let mut waiting: Vec<(Instant, u64, i32, u8)> = Vec::new();
        let mut coming = items.into_iter().enumerate();
        for answer in answers {
            for (number, (seconds, priority)) in coming.by_ref().take(2) {
                let rank = rank(start + Duration::from_secs(seconds), priority);
                q.push("t", Item { name: "", tokens: number as u64, deadline: start, rank, priority });
                waiting.push((rank, number as u64, priority, 0));
            }
            let mut taken = None;
            q.drain(|item, yields| match (item.tokens + u64::from(answer)) % 4 {
                _ if taken.is_some() => PlacementOutcome::Blocked(item),
                0 => PlacementOutcome::Blocked(item),
                1 | 2 if yields => PlacementOutcome::Deferrable(item),
                _ => { taken = Some(item.tokens); PlacementOutcome::Done }
            });
            let Some(at) = waiting.iter().position(|(_, number, ..)| Some(*number) == taken) else { continue };
            let (rank, number, priority, _) = waiting.remove(at);
            for (other, other_number, other_priority, overtaken) in &mut waiting {
                if (*other, *other_number) < (rank, number) {
                    prop_assert_eq!(*other_priority, priority);
                    *overtaken += 1;
                    prop_assert!(*overtaken <= MAX_OVERTAKEN);
                }
            }
        }
    }

    /// By rank, a request is overtaken only by later requests within their head start.
    #[test]
    fn priority_overtakes_only_within_its_head_start(
        priorities in proptest::collection::vec((0u64..500, -MAX_PRIORITY..=MAX_PRIORITY), 2..40),
    ) {
        let start = Instant::now();
        for (early, urgent) in &priorities {
            for (late, more_urgent) in &priorities {
                let at = |seconds: &u64, priority: &i32| rank(start + Duration::from_secs(*seconds), *priority);
                let overtakes = at(late, more_urgent) < at(early, urgent);
                let head_start = u64::try_from((urgent - more_urgent).max(0)).unwrap();
                prop_assert!(!overtakes || late < early || late - early < head_start);
            }
        }
    }
}
