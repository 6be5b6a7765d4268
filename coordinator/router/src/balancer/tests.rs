mod pulls;

use super::*;
use crate::table::tests::register;
use proptest::prelude::*;
use proto::event::{KvEvent, Medium};
use proto::worker::{LoadReport, WorkerState};

mod adapters;
mod crowd;
mod groups;
mod operations;
mod recent;

const MODEL: &str = "m";

struct Rig {
    balancer: Balancer,
    now: Instant,
    random: u64,
}

fn node(name: &str) -> NodeId {
    NodeId::new(name).unwrap()
}

fn report(epoch: u64) -> LoadReport {
    LoadReport {
        epoch: Epoch(epoch),
        state: WorkerState::Ready,
        running: 0,
        waiting: 0,
        pending_prefill_tokens: 0,
        kv_used: 0,
        kv_total: 1 << 30,
        steps: 1,
        tokens: 1,
        stalled_ms: 0,
        prefill_rate: 2_000.0,
        step_ms: 8.0,
        exact: true,
        rss: 0,
        pulls: PullReport::default(),
    }
}

fn chain(numbers: impl IntoIterator<Item = u64>) -> Arc<[BlockId]> {
    let id =
        |n: u64| BlockId(u128::from(n).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835).to_le_bytes());
    numbers.into_iter().map(id).collect()
}

impl Rig {
    fn new(policy: Policy, workers: &[&str]) -> Self {
        let mut rig = Self { balancer: Balancer::new(policy), now: Instant::now(), random: 1 };
        workers.iter().for_each(|w| {
            rig.join(w, 1);
        });
        rig
    }

    fn join(&mut self, name: &str, epoch: u64) -> Vec<Action> {
        let join = TableChange::Join(register(name, epoch, &[(MODEL, 1)]));
        let mut actions = self.balancer.change(self.now, join, 3).unwrap();
        let fetch =
            Action::Fetch { node: node(name), epoch: Epoch(epoch), need: GapRepair::Replay { from: 1 } };
        assert_eq!(actions.remove(0), fetch);
        let no_events = KvEventBatch { epoch: Epoch(epoch), first_sequence: 1, events: vec![] };
        assert_eq!(self.balancer.replayed(&node(name), Epoch(epoch), Some(no_events)), Ok(None));
        actions.extend(self.balancer.load(self.now, &node(name), report(epoch), 3));
        actions
    }

    fn leave(&mut self, name: &str, epoch: u64) -> Vec<Action> {
        let leave = TableChange::Leave { node: node(name), epoch: Epoch(epoch) };
        self.balancer.change(self.now, leave, 3).unwrap()
    }

    fn request(&self, tenant: &str, prompt_tokens: u32, chain: Arc<[BlockId]>) -> RouteRequest {
        let model = ModelId::new(MODEL).unwrap();
        RouteRequest {
            request_id: RequestId::new("r").unwrap(),
            tenant: tenant.into(),
            model,
            operation: None,
            prompt_tokens,
            output: Output::default(),
            images: false,
            chain,
            group: None,
            priority: 0,
            submitted: self.now,
            deadline: self.now + Duration::from_secs(60),
            trace: None,
        }
    }

    fn submit(&mut self, request: RouteRequest) -> Result<(Ticket, Vec<Action>), Refusal> {
        self.random = mix(self.random);
        let (tickets, actions) = self.balancer.submit(self.now, &[Arc::new(request)], self.random)?;
        Ok((tickets[0], actions))
    }

    fn plain(&mut self) -> (Ticket, Vec<Action>) {
        let request = self.request("t", 64, chain([]));
        self.submit(request).unwrap()
    }
}

fn assigned(actions: &[Action]) -> Vec<(Ticket, &Assignment)> {
    actions.iter().filter_map(|a| if let Action::Assign(t, to) = a { Some((*t, to)) } else { None }).collect()
}

fn only(actions: &[Action]) -> &Assignment {
    let [Action::Assign(_, assignment)] = actions else { panic!("{actions:?}") };
    assignment
}

#[test]
fn a_burst_with_one_uncached_prefix_is_computed_once_and_found_again() {
    let mut rig = Rig::new(Policy::default(), &["a", "b"]);
    let prompt = |i: u64| chain((0..93).chain(1_000 + 10 * i..1_000 + 10 * i + 2));
    let mut tickets = Vec::new();
    let mut leader = None;
    for i in 0..32 {
        let request = rig.request("t", 1_530, prompt(i));
        let (ticket, actions) = rig.submit(request).unwrap();
        let to = only(&actions);
        let leader = leader.get_or_insert(to.node.clone());
        assert_eq!((&to.node, to.predicted), (&*leader, if i == 0 { 0 } else { 1_488 }), "request {i}");
        tickets.push(ticket);
    }
    let leader = leader.unwrap();
    let pending = |rig: &Rig| {
        let workers = rig.balancer.workers(rig.now);
        workers.iter().find(|w| w.member.register.node == leader).unwrap().pending_tokens
    };
    assert_eq!(pending(&rig), 1_530 + 31 * 42);
    // The worker computes, reports and answers. The next wave finds the whole prefix cached.
    let units = (0..32).flat_map(|i| prompt(i).to_vec()).collect();
    let stored = KvEvent::Stored { parent: BlockId([0; 16]), units, medium: Medium::Device };
    let batch = KvEventBatch { epoch: Epoch(1), first_sequence: 1, events: vec![stored] };
    assert_eq!(rig.balancer.events(&leader, batch), Ok(None));
    for ticket in tickets {
        rig.balancer.started(rig.now, ticket, 0);
        rig.balancer.ended(rig.now, ticket, 0);
    }
    assert_eq!((pending(&rig), rig.balancer.index_size().reservations), (0, 0));
    for i in 100..132 {
        let request = rig.request("t", 1_530, prompt(i));
        let (_, actions) = rig.submit(request).unwrap();
        let to = only(&actions);
        assert_eq!((&to.node, to.predicted, to.reason), (&leader, 1_488, Reason::Prefix));
    }
}

/// A worker takes a few requests of a tenant that has none there, even if it is full of another tenant's.
#[test]
fn a_tenant_is_not_kept_out_by_anothers_requests() {
    let mut rig = Rig::new(Policy { max_inflight: 32, ..Policy::default() }, &["a"]);
    let goes = |rig: &mut Rig, tenant: &str| {
        let request = rig.request(tenant, 10, chain([]));
        let (ticket, actions) = rig.submit(request).unwrap();
        rig.balancer.started(rig.now, ticket, 0);
        (ticket, actions.len())
    };
    let of_first: Vec<_> = (0..40).map(|_| goes(&mut rig, "x")).collect();
    assert_eq!(of_first.iter().map(|(_, placed)| placed).sum::<usize>(), 32);
    let others: Vec<_> = ["y", "y", "y", "z"].map(|tenant| goes(&mut rig, tenant)).to_vec();
    assert_eq!(others.iter().map(|(_, placed)| *placed).collect::<Vec<_>>(), [1, 1, 0, 1]);
    // An ended request makes room for one of its own tenant, not for one of the tenant that has filled the
    // worker.
    let next = rig.balancer.ended(rig.now, others[0].0, 0);
    assert_eq!(assigned(&next).iter().map(|(ticket, _)| *ticket).collect::<Vec<_>>(), [others[2].0]);
    assert_eq!(rig.balancer.queue().requests, 8);
}

#[test]
fn requests_beyond_capacity_are_queued_and_served_fairly() {
    let policy = Policy { max_inflight: 1, ..Policy::default() };
    let mut rig = Rig::new(policy, &["a"]);
    let (first, actions) = rig.plain();
    assert_eq!(only(&actions).reason, Reason::Only);
    let mut waiting = Vec::new();
    for tenant in ["x", "x", "y"] {
        let request = rig.request(tenant, 10, chain([]));
        let (ticket, actions) = rig.submit(request).unwrap();
        assert_eq!(actions, []);
        waiting.push(ticket);
    }
    assert_eq!(rig.balancer.queue(), QueueView { requests: 3, tokens: 30 });
    let mut order = Vec::new();
    let mut running = first;
    while let [Action::Assign(next, _)] = rig.balancer.ended(rig.now, running, 0)[..] {
        order.push(next);
        running = next;
    }
    assert_eq!(order, [waiting[0], waiting[2], waiting[1]]);
}

#[test]
fn a_full_queue_refuses_all_or_nothing_and_suggests_a_delay() {
    let limits = QueueLimits { requests: 100, tokens: 20_000 };
    let mut rig = Rig::new(Policy { max_inflight: 1, queue: limits, ..Policy::default() }, &["a"]);
    rig.plain();
    let request = rig.request("t", 18_000, chain([]));
    rig.submit(request).unwrap();
    let pair = [1_000, 1_001].map(|tokens| Arc::new(rig.request("t", tokens, chain([]))));
    let refused = rig.balancer.submit(rig.now, &pair, 0).unwrap_err();
    // 18,000 queued and 64 pending tokens at 2,000 per second.
    assert_eq!(refused, Refusal::QueueFull { retry_after: Duration::from_secs(10) });
    assert_eq!(rig.balancer.queue().requests, 1);
}

#[test]
fn an_expired_request_is_refused_and_a_cancelled_one_leaves_the_queue() {
    let mut rig = Rig::new(Policy { max_inflight: 1, lease: Duration::MAX, ..Policy::default() }, &["a"]);
    rig.plain();
    let request = rig.request("t", 10, chain([]));
    let (queued, _) = rig.submit(request).unwrap();
    let request = rig.request("t", 10, chain([]));
    let (cancelled, _) = rig.submit(request).unwrap();
    assert_eq!(rig.balancer.ended(rig.now, cancelled, 0), []);
    assert_eq!(rig.balancer.queue().requests, 1);
    assert_eq!(rig.balancer.tick(rig.now + Duration::from_secs(59), 0), []);
    let actions = rig.balancer.tick(rig.now + Duration::from_secs(60), 0);
    assert_eq!(actions, [Action::Refuse(queued, Refusal::Deadline)]);
}

#[test]
fn a_report_made_before_a_request_ended_is_not_the_work_of_other_coordinators() {
    let mut rig = Rig::new(Policy::default(), &["a"]);
    let queue = |rig: &Rig| rig.balancer.workers(rig.now)[0].queue_seconds;
    let request = rig.request("t", 160, chain([]));
    let (ticket, _) = rig.submit(request).unwrap();
    rig.balancer.started(rig.now, ticket, 0);
    rig.balancer.ended(rig.now, ticket, 0);
    let before = LoadReport { running: 1, pending_prefill_tokens: 160, ..report(1) };
    rig.balancer.load(rig.now, &node("a"), before.clone(), 0);
    assert_eq!(queue(&rig), 0.0);
    // The same in the next report can only be of others.
    rig.balancer.load(rig.now, &node("a"), before, 0);
    assert!(queue(&rig) > 0.08, "160 tokens at 2,000 per second");
}

#[test]
fn without_a_worker_a_request_is_refused_at_once() {
    let mut rig = Rig::new(Policy::default(), &[]);
    let request = rig.request("t", 10, chain([]));
    assert_eq!(rig.submit(request).unwrap_err(), Refusal::NoWorker);
    // A worker that is loading or draining does not help.
    rig.balancer.change(rig.now, TableChange::Join(register("a", 1, &[(MODEL, 1)])), 0).unwrap();
    let request = rig.request("t", 10, chain([]));
    assert_eq!(rig.submit(request.clone()).unwrap_err(), Refusal::NoWorker);
    rig.balancer.load(rig.now, &node("a"), report(1), 0);
    rig.balancer.change(rig.now, TableChange::Drain { node: node("a"), draining: true }, 0).unwrap();
    assert_eq!(rig.submit(request.clone()).unwrap_err(), Refusal::NoWorker);
    rig.balancer.change(rig.now, TableChange::Drain { node: node("a"), draining: false }, 0).unwrap();
    assert!(rig.submit(request).is_ok());
}

#[test]
fn a_lost_workers_requests_go_to_another_and_back_when_it_returns() {
    let mut rig = Rig::new(Policy::default(), &["a", "b"]);
    let request = rig.request("t", 160, chain(0..10));
    let (ticket, actions) = rig.submit(request).unwrap();
    let first = only(&actions).node.clone();
    let other = node(if first.as_str() == "a" { "b" } else { "a" });
    assert_eq!(rig.leave(first.as_str(), 1), []);
    let actions = rig.balancer.retry(rig.now, ticket, AttemptError::Lost, None, 0);
    let second = only(&actions);
    assert_eq!((&second.node, second.attempt, second.predicted), (&other, Attempt(1), 0));
    // The other worker is lost too: none is left.
    rig.leave(other.as_str(), 1);
    let actions = rig.balancer.retry(rig.now, ticket, AttemptError::Lost, None, 0);
    assert_eq!(actions, [Action::Refuse(ticket, Refusal::NoWorker)]);
    assert_eq!(rig.balancer.inflight(), 0);
    // A new epoch may be tried.
    rig.join(first.as_str(), 2);
    let (ticket, actions) = rig.plain();
    assert_eq!(only(&actions).epoch, Epoch(2));
    let actions = rig.balancer.retry(rig.now, ticket, AttemptError::Lost, None, 0);
    assert_eq!(only(&actions).attempt, Attempt(1));
}

#[test]
fn a_worker_that_refused_is_not_tried_again_and_attempts_are_bounded() {
    let mut rig = Rig::new(Policy::default(), &["a", "b"]);
    let (ticket, actions) = rig.plain();
    let first = only(&actions).node.clone();
    let actions = rig.balancer.retry(rig.now, ticket, AttemptError::Declined, None, 0);
    assert_ne!(only(&actions).node, first);
    let actions = rig.balancer.retry(rig.now, ticket, AttemptError::Declined, None, 0);
    assert_eq!(actions, [Action::Refuse(ticket, Refusal::AttemptsFailed)]);
    let (ticket, _) = rig.plain();
    let mut attempts = 1;
    while !assigned(&rig.balancer.retry(rig.now, ticket, AttemptError::Lost, None, 0)).is_empty() {
        attempts += 1;
    }
    assert_eq!(attempts, Policy::default().max_attempts);
}

#[test]
fn an_undrained_worker_is_waited_for_until_it_reports_ready() {
    let mut rig = Rig::new(Policy::default(), &["a"]);
    let drains = LoadReport { state: WorkerState::Draining, ..report(1) };
    let turn = |rig: &mut Rig, draining| {
        rig.balancer.change(rig.now, TableChange::Drain { node: node("a"), draining }, 0).unwrap();
    };
    turn(&mut rig, true);
    rig.balancer.load(rig.now, &node("a"), drains.clone(), 0);
    let request = rig.request("t", 64, chain([]));
    assert_eq!(rig.submit(request.clone()).unwrap_err(), Refusal::NoWorker);
    // The last report is from before the undrain.
    turn(&mut rig, false);
    let (ticket, actions) = rig.submit(request.clone()).unwrap();
    assert_eq!(actions, []);
    let actions = rig.balancer.load(rig.now, &node("a"), report(1), 0);
    assert_eq!(assigned(&actions)[0].0, ticket);
    // The worker still refuses because of the ended drain: the request goes to it again once it reports that
    // it is ready.
    assert_eq!(rig.balancer.retry(rig.now, ticket, AttemptError::Draining, None, 0), []);
    rig.now += Duration::from_millis(100);
    let actions = rig.balancer.load(rig.now, &node("a"), report(1), 0);
    assert_eq!(assigned(&actions)[0].0, ticket);
    // A worker that keeps reporting a drain is not waited for any longer.
    assert_eq!(rig.balancer.retry(rig.now, ticket, AttemptError::Draining, None, 0), []);
    rig.balancer.load(rig.now, &node("a"), drains, 0);
    rig.now += Duration::from_secs(3);
    assert_eq!(rig.balancer.tick(rig.now, 0), [Action::Refuse(ticket, Refusal::NoWorker)]);
    assert_eq!(rig.submit(request).unwrap_err(), Refusal::NoWorker);
}

#[test]
fn choices_of_one_prompt_carry_the_number_sent_together() {
    let mut rig = Rig::new(Policy::default(), &["a"]);
    let (shared, other) = (chain(0..20), chain(0..20));
    let requests =
        [&shared, &shared, &other, &shared].map(|chain| Arc::new(rig.request("t", 320, Arc::clone(chain))));
    let (tickets, actions) = rig.balancer.submit(rig.now, &requests, 1).unwrap();
    let together: HashMap<Ticket, u32> =
        assigned(&actions).into_iter().map(|(ticket, assignment)| (ticket, assignment.together)).collect();
    assert_eq!(tickets.iter().map(|ticket| together[ticket]).collect::<Vec<_>>(), [3, 3, 1, 3]);
    // A retried choice goes alone.
    let actions = rig.balancer.retry(rig.now, tickets[0], AttemptError::Lost, None, 0);
    assert_eq!(only(&actions).together, 1);
}

#[test]
fn an_engine_that_cannot_serve_a_request_is_not_tried_again_and_not_counted() {
    let policy = Policy { max_attempts: 1, ..Policy::default() };
    let mut rig = Rig::new(policy, &["a", "b"]);
    let mut other = register("c", 1, &[(MODEL, 1)]);
    other.models[0].numeric_class = "another".into();
    rig.balancer.change(rig.now, TableChange::Join(other), 3).unwrap();
    rig.balancer.load(rig.now, &node("c"), report(1), 3);
    let (ticket, actions) = rig.plain();
    let first = only(&actions).numeric_class.clone();
    let actions = rig.balancer.retry(rig.now, ticket, AttemptError::Unsupported, None, 0);
    let second = only(&actions).numeric_class.clone();
    assert_ne!(first, second);
    // No engine is left, whatever the number of workers.
    let actions = rig.balancer.retry(rig.now, ticket, AttemptError::Unsupported, None, 0);
    assert_eq!(actions, [Action::Refuse(ticket, Refusal::AttemptsFailed)]);
    assert_eq!(rig.balancer.inflight(), 0);
    // The next request may use both classes.
    let (_, actions) = rig.plain();
    assert!([first, second].contains(&only(&actions).numeric_class));
}

#[test]
fn a_request_with_emitted_tokens_stays_in_its_numeric_class() {
    let mut rig = Rig::new(Policy::default(), &["a"]);
    let (ticket, actions) = rig.plain();
    let class = only(&actions).numeric_class.clone();
    let mut other = register("b", 1, &[(MODEL, 1)]);
    other.models[0].numeric_class = "another".into();
    rig.balancer.change(rig.now, TableChange::Join(other), 0).unwrap();
    rig.balancer.load(rig.now, &node("b"), report(1), 0);
    rig.leave("a", 1);
    let actions = rig.balancer.retry(rig.now, ticket, AttemptError::Lost, Some(class), 0);
    assert_eq!(actions, [Action::Refuse(ticket, Refusal::NoWorker)]);
    // A request without emitted tokens may go anywhere.
    let (_, actions) = rig.plain();
    assert_eq!(only(&actions).node, node("b"));
}

#[test]
fn a_silent_worker_first_gets_nothing_and_then_loses_its_lease() {
    let mut rig = Rig::new(Policy::default(), &["a", "b"]);
    let start = rig.now;
    rig.now = start + Duration::from_secs(2);
    rig.balancer.load(rig.now, &node("b"), report(1), 0);
    for _ in 0..10 {
        let (_, actions) = rig.plain();
        assert_eq!(only(&actions).node, node("b"));
    }
    let availability = |rig: &Rig| ["a", "b"].map(|name| rig.balancer.availability(rig.now, &node(name)));
    assert_eq!(availability(&rig), [Availability::Silent, Availability::Ready]);
    let actions = rig.balancer.tick(start + Duration::from_secs(5), 0);
    assert_eq!(actions, [Action::Drop { node: node("a"), epoch: Epoch(1) }]);
    assert_eq!(rig.balancer.table().members().count(), 1);
    assert_eq!(availability(&rig)[0], Availability::Away);
    // A silent worker is used if it is the only one.
    rig.now = start + Duration::from_secs(6);
    let (_, actions) = rig.plain();
    assert_eq!(only(&actions).node, node("b"));
}

#[test]
fn reports_of_another_epoch_and_events_of_unknown_workers_are_ignored() {
    let mut rig = Rig::new(Policy::default(), &["a"]);
    rig.join("a", 2);
    let draining = LoadReport { state: WorkerState::Draining, ..report(1) };
    rig.balancer.load(rig.now, &node("a"), draining, 0);
    assert!(rig.balancer.serves(&ModelId::new(MODEL).unwrap()));
    assert_eq!(rig.balancer.availability(rig.now, &node("a")), Availability::Ready);
    let batch = KvEventBatch { epoch: Epoch(1), first_sequence: 1, events: vec![KvEvent::Cleared] };
    assert_eq!(rig.balancer.events(&node("z"), batch.clone()), Err(StreamError::NotFollowed));
    assert!(matches!(rig.balancer.events(&node("a"), batch), Err(StreamError::WrongEpoch { .. })));
    let ahead = KvEventBatch { epoch: Epoch(2), first_sequence: 9, events: vec![KvEvent::Cleared] };
    let fetch = Action::Fetch { node: node("a"), epoch: Epoch(2), need: GapRepair::Replay { from: 1 } };
    assert_eq!(rig.balancer.events(&node("a"), ahead), Ok(Some(fetch)));
}

#[derive(Debug, Clone)]
enum Step {
    Submit(u32, u64),
    Started(usize),
    Ended(usize),
    Retry(usize, bool),
    Leave(u8),
    Join(u8),
    Report(u8, u64),
    Later(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let index = 0..64usize;
    prop_oneof![
        6 => (1u32..200, 0u64..4).prop_map(|(tokens, family)| Step::Submit(tokens, family)),
        4 => index.clone().prop_map(Step::Started),
        4 => index.clone().prop_map(Step::Ended),
        2 => (index, any::<bool>()).prop_map(|(n, declined)| Step::Retry(n, declined)),
        1 => (0u8..3).prop_map(Step::Leave),
        2 => (0u8..3).prop_map(Step::Join),
        2 => (0u8..3, 0u64..10_000).prop_map(|(w, pending)| Step::Report(w, pending)),
        1 => (0u64..3_000).prop_map(Step::Later),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever happens, every ticket is assigned or refused at most once per attempt. When all have ended,
    /// no booking is left.
    #[test]
    fn bookings_always_balance(steps in proptest::collection::vec(step(), 1..120), seed in any::<u64>()) {
        let policy = Policy {
            max_inflight: 3,
            queue: QueueLimits { requests: 8, tokens: 600 },
            ..Policy::default()
        };
        let mut rig = Rig::new(policy, &["w0", "w1", "w2"]);
        let mut epochs = [1u64; 3];
        let mut present = [true; 3];
        let mut open: Vec<Ticket> = Vec::new();
        let mut placed: Vec<Ticket> = Vec::new();
        let mut random = seed;
        for step in steps {
            random = mix(random);
            let pick = |n: usize, from: &[Ticket]| (!from.is_empty()).then(|| from[n % from.len()]);
            let mut actions = Vec::new();
            match step {
                Step::Submit(tokens, family) => {
                    let chain = chain((0..u64::from(tokens / 16)).map(|i| family * 1_000 + i));
                    let request = rig.request("t", tokens, chain);
                    if let Ok((tickets, more)) = rig.balancer.submit(rig.now, &[Arc::new(request)], random) {
                        open.extend(tickets);
                        actions = more;
                    }
                }
                Step::Started(n) => if let Some(ticket) = pick(n, &placed) {
                    actions = rig.balancer.started(rig.now, ticket, random);
                },
                Step::Ended(n) => if let Some(ticket) = pick(n, &open) {
                    open.retain(|t| *t != ticket);
                    placed.retain(|t| *t != ticket);
                    actions = rig.balancer.ended(rig.now, ticket, random);
                },
                Step::Retry(n, declined) => if let Some(ticket) = pick(n, &placed) {
                    placed.retain(|t| *t != ticket);
                    let error = if declined { AttemptError::Declined } else { AttemptError::Lost };
                    actions = rig.balancer.retry(rig.now, ticket, error, None, random);
                },
                Step::Leave(w) => if std::mem::take(&mut present[usize::from(w)]) {
                    let epoch = epochs[usize::from(w)];
                    let leave = TableChange::Leave { node: node(&format!("w{w}")), epoch: Epoch(epoch) };
                    // The worker may have lost its lease before.
                    actions = rig.balancer.change(rig.now, leave, random).unwrap_or_default();
                },
                Step::Join(w) => {
                    epochs[usize::from(w)] += 1;
                    present[usize::from(w)] = true;
                    actions = rig.join(&format!("w{w}"), epochs[usize::from(w)]);
                }
                Step::Report(w, pending) => {
                    let report = LoadReport {
                        pending_prefill_tokens: pending,
                        ..report(epochs[usize::from(w)])
                    };
                    actions = rig.balancer.load(rig.now, &node(&format!("w{w}")), report, random);
                }
                Step::Later(ms) => {
                    rig.now += Duration::from_millis(ms);
                    actions = rig.balancer.tick(rig.now, random);
                }
            }
            for action in actions {
                match action {
                    Action::Assign(ticket, to) => {
                        prop_assert!(open.contains(&ticket) && !placed.contains(&ticket));
                        prop_assert!(rig.balancer.table().member(&to.node).is_some());
                        placed.push(ticket);
                    }
                    Action::Refuse(ticket, _) => {
                        prop_assert!(open.contains(&ticket) && !placed.contains(&ticket));
                        open.retain(|t| *t != ticket);
                    }
                    Action::Fetch { .. } => prop_assert!(false, "no events were sent"),
                    Action::Drop { .. } => {}
                }
            }
            prop_assert_eq!(rig.balancer.inflight(), placed.len());
            prop_assert_eq!(rig.balancer.queue().requests, open.len() - placed.len());
            for worker in rig.balancer.workers(rig.now) {
                prop_assert!(worker.inflight <= policy.max_inflight);
            }
        }
        while let Some(ticket) = open.pop() {
            for action in rig.balancer.ended(rig.now, ticket, 0) {
                if let Action::Refuse(ticket, _) = action {
                    open.retain(|t| *t != ticket);
                }
            }
        }
        rig.balancer.tick(rig.now + policy.event_lag, 0);
        prop_assert_eq!(rig.balancer.queue(), QueueView { requests: 0, tokens: 0 });
        prop_assert_eq!(rig.balancer.inflight(), 0);
        prop_assert_eq!(rig.balancer.index_size().reservations, 0);
        for worker in rig.balancer.workers(rig.now) {
            prop_assert_eq!((worker.inflight, worker.pending_tokens), (0, 0));
        }
    }
}

#[test]
fn a_model_that_will_be_served_again_is_awaited_for_a_bounded_time() {
    let mut rig = Rig::new(Policy::default(), &["a"]);
    let model = ModelId::new(MODEL).unwrap();
    rig.balancer.expect(&model, rig.now + Duration::from_secs(10));
    rig.leave("a", 1);
    assert!(rig.balancer.model(&model).is_some(), "as it was served last");
    let (ticket, actions) = rig.submit(rig.request("t", 100, chain(0..6))).unwrap();
    assert_eq!(actions, []);
    let served = rig.join("a", 2);
    assert!(matches!(&served[..], [Action::Assign(assigned, _)] if *assigned == ticket), "{served:?}");
    let (queued, actions) = {
        rig.leave("a", 2);
        rig.submit(rig.request("t", 100, chain(0..6))).unwrap()
    };
    assert_eq!(actions, []);
    rig.now += Duration::from_secs(11);
    assert_eq!(rig.balancer.tick(rig.now, 1), [Action::Refuse(queued, Refusal::NoWorker)]);
    assert_eq!(rig.submit(rig.request("t", 100, chain(0..6))).unwrap_err(), Refusal::NoWorker);
}

/// Whatever ends a request, no table has an entry of it afterwards.
#[test]
fn no_way_out_of_the_queue_or_of_a_worker_leaves_an_entry() {
    let group = Some(CommonKey([7; 16]));
    let policy = Policy { max_inflight: 2, max_attempts: 2, ..Policy::default() };
    type WayOut = fn(&mut Rig, &[Ticket]);
    let ways: [(&str, WayOut); 7] = [
        ("cancelled", |_, _| {}),
        ("deadline", |rig, _| {
            rig.now += Duration::from_secs(61);
            rig.balancer.tick(rig.now, 1);
        }),
        ("attempts", |rig, tickets| {
            for ticket in tickets.iter().chain(tickets) {
                rig.balancer.retry(rig.now, *ticket, AttemptError::Lost, None, 1);
            }
        }),
        ("declined", |rig, tickets| {
            for ticket in tickets {
                rig.balancer.retry(rig.now, *ticket, AttemptError::Declined, None, 1);
            }
        }),
        ("lost", |rig, _| drop(rig.leave("a", 1))),
        ("drained", |rig, tickets| {
            rig.balancer.retry(rig.now, tickets[0], AttemptError::Draining, None, 1);
            rig.now += Duration::from_secs(3);
            rig.balancer.tick(rig.now, 1);
        }),
        ("another epoch", |rig, _| drop(rig.join("a", 2))),
    ];
    for (way, leave) in ways {
        for started in [false, true] {
            let mut rig = Rig::new(policy, &["a"]);
            let mut tickets = Vec::new();
            for i in 0..5 {
                let tenant = if i < 3 { "t" } else { "u" };
                let request = RouteRequest { group, ..rig.request(tenant, 320, chain(0..20)) };
                tickets.push(rig.submit(request).unwrap().0);
            }
            if started {
                rig.balancer.started(rig.now, tickets[0], 1);
            }
            leave(&mut rig, &tickets);
            for ticket in tickets {
                rig.balancer.ended(rig.now, ticket, 1);
            }
            rig.now += policy.event_lag;
            rig.balancer.tick(rig.now, 1);
            assert!(rig.balancer.worker_pool.is_idle(), "{way}, started: {started}");
            assert_eq!(rig.balancer.queue(), QueueView { requests: 0, tokens: 0 }, "{way}");
            assert_eq!(rig.balancer.tenants(), [], "{way}");
        }
    }
}
