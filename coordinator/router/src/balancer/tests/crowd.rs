//! Simulates workers that decode in batches: how a burst of requests with one prefix is distributed, with the
//! prefix cached or not, and what a slow worker gets.

use super::*;
use proto::event::{KvEvent, Medium};
use proto::worker::LoadReport;
use std::collections::VecDeque;

/// Prompt rows per step.
const CHUNK: f64 = 128.0;
/// Prompt tokens per second of an idle worker of speed 1.
const PREFILL: f64 = 2_000.0;
/// Seconds of a decode step: fixed, and for each sequence.
const STEP: (f64, f64) = (0.008, 0.002);
const TICK: Duration = Duration::from_millis(10);
const REPORT: Duration = Duration::from_millis(250);
const PULLS: f64 = 0.05;
/// KV bytes per token.
const TOKEN_BYTES: f64 = 20_000.0;
/// Default rate of pulls in bytes per second.
const PULL_RATE: f64 = 1e9;

struct Job {
    ticket: Ticket,
    /// Earliest start: when its pull has arrived.
    from: Instant,
    rows: f64,
    left: f64,
    chain: Arc<[BlockId]>,
    since: Instant,
}

struct Worker {
    name: String,
    speed: f64,
    prompts: VecDeque<Job>,
    decoding: Vec<Job>,
    tokens: f64,
    rate: f32,
    events: u64,
    last_report: Instant,
    /// When its current pull arrives.
    arrives: Instant,
}

/// Output tokens, chain, prompt tokens, and start of the wait.
type Waiting = (f64, Arc<[BlockId]>, u32, Instant);

struct World {
    rig: Rig,
    workers: Vec<Worker>,
    /// Requests that each worker was given since the last reset.
    given: Vec<usize>,
    waiting: HashMap<Ticket, Waiting>,
    /// Seconds from request to end.
    took: Vec<f64>,
    /// Requests of which a worker computed at least half of the prompt.
    computed: usize,
}

impl World {
    /// `pulls`: transfer rate of pulls in bytes per second; `None` disables pulls.
    fn new(speeds: &[f64], pulls: Option<f64>) -> Self {
        let mut rig = Rig::new(Policy::default(), &[]);
        let workers: Vec<Worker> = speeds
            .iter()
            .enumerate()
            .map(|(n, &speed)| {
                let name = format!("w{n:02}");
                rig.join(&name, 1);
                if let Some(rate) = pulls {
                    let model = ModelId::new(MODEL).unwrap();
                    let cost = PullCost { model, bytes_per_token: TOKEN_BYTES as u64, bytes_per_point: 0 };
                    rig.balancer.introduce(&node(&name), Epoch(1), WorkPart::Both, vec![cost], String::new());
                    let report = PullReport { rate: rate as f32, ..PullReport::default() };
                    rig.balancer.pulled(&node(&name), Epoch(1), report);
                }
                let last_report = rig.now;
                let (prompts, decoding) = (VecDeque::new(), Vec::new());
                let (tokens, rate, events, arrives) = (0.0, 0.0, 0, last_report);
                Worker { name, speed, prompts, decoding, tokens, rate, events, last_report, arrives }
            })
            .collect();
        let given = vec![0; workers.len()];
        Self { rig, workers, given, waiting: HashMap::new(), took: Vec::new(), computed: 0 }
    }

    fn request(&mut self, prompt: u32, output: u32, chain: Arc<[BlockId]>) {
        let request = RouteRequest {
            output: Output { max_tokens: output, fixed: true },
            images: false,
            ..self.rig.request("t", prompt, Arc::clone(&chain))
        };
        let now = self.rig.now;
        let (ticket, actions) = self.rig.submit(request).unwrap();
        self.waiting.insert(ticket, (f64::from(output), chain, prompt, now));
        self.follow(actions);
    }

    fn follow(&mut self, actions: Vec<Action>) {
        for action in actions {
            let Action::Assign(ticket, to) = action else { panic!("{action:?}") };
            let (output, chain, prompt, since) = self.waiting.remove(&ticket).unwrap();
            let at = self.workers.iter().position(|worker| worker.name == to.node.as_str()).unwrap();
            if to.pull.is_some() {
                self.workers[at].arrives = self.rig.now + Duration::from_secs_f64(PULLS);
            }
            // A request that shares a prefix being pulled waits for the pull.
            let from =
                if to.predicted > 0 { self.workers[at].arrives.max(self.rig.now) } else { self.rig.now };
            self.given[at] += 1;
            self.computed += usize::from(2 * to.predicted < prompt);
            let rows = f64::from(prompt - to.predicted);
            self.workers[at].prompts.push_back(Job { ticket, from, rows, left: output, chain, since });
        }
    }

    /// Advances time by one tick.
    fn tick(&mut self) {
        self.rig.now += TICK;
        let now = self.rig.now;
        let (mut actions, mut started, mut ended) = (Vec::new(), Vec::new(), Vec::new());
        for worker in &mut self.workers {
            let prefills = worker.prompts.iter().any(|job| job.from <= now);
            let rows = if prefills { CHUNK } else { 0.0 };
            let step = STEP.0 + STEP.1 * worker.decoding.len() as f64 + rows / PREFILL;
            let steps = TICK.as_secs_f64() * worker.speed / step;
            let mut rows = rows * steps;
            for job in worker.prompts.iter_mut().filter(|job| job.from <= now) {
                let done = rows.min(job.rows);
                (rows, job.rows) = (rows - done, job.rows - done);
            }
            worker.decoding.iter_mut().for_each(|job| job.left -= steps);
            worker.tokens += steps * worker.decoding.len() as f64;
            if prefills {
                worker.rate = (PREFILL * worker.speed) as f32;
            }
            let (over, remaining) =
                std::mem::take(&mut worker.decoding).into_iter().partition(|job| job.left <= 0.0);
            worker.decoding = remaining;
            ended.extend(<Vec<Job> as IntoIterator>::into_iter(over));
            let (begins, waits): (Vec<Job>, Vec<Job>) = std::mem::take(&mut worker.prompts)
                .into_iter()
                .partition(|job| job.rows <= 0.0 && job.from <= now);
            worker.prompts = waits.into();
            for job in begins {
                worker.events += 1;
                let stored = KvEvent::Stored {
                    parent: BlockId([0; 16]),
                    units: job.chain.to_vec(),
                    medium: Medium::Device,
                };
                let batch =
                    KvEventBatch { epoch: Epoch(1), first_sequence: worker.events, events: vec![stored] };
                started.push((worker.name.clone(), job.ticket, batch));
                worker.decoding.push(job);
            }
            if now >= worker.last_report + REPORT {
                worker.last_report = now;
                let pending = worker.prompts.iter().map(|job| job.rows as u64).sum();
                let report = LoadReport {
                    running: worker.decoding.len() as u32,
                    waiting: worker.prompts.len() as u32,
                    pending_prefill_tokens: pending,
                    tokens: worker.tokens as u64,
                    prefill_rate: worker.rate,
                    ..report(1)
                };
                actions.extend(self.rig.balancer.load(now, &node(&worker.name), report, 3));
            }
        }
        for (name, ticket, batch) in started {
            self.rig.balancer.events(&node(&name), batch).unwrap();
            actions.extend(self.rig.balancer.announced(now, 13));
            actions.extend(self.rig.balancer.started(now, ticket, 5));
        }
        for job in ended {
            self.took.push(now.saturating_duration_since(job.since).as_secs_f64());
            actions.extend(self.rig.balancer.ended(now, job.ticket, 7));
        }
        actions.extend(self.rig.balancer.tick(now, 11));
        self.follow(actions);
    }

    fn run(&mut self, seconds: f64) {
        (0..(seconds / TICK.as_secs_f64()) as usize).for_each(|_| self.tick());
    }

    fn drain(&mut self) {
        while self.rig.balancer.inflight() > 0 || !self.waiting.is_empty() {
            self.tick();
        }
    }

    /// Sends `per_second` short requests per second without a common prefix. Returns each worker's share.
    fn traffic(&mut self, seconds: f64, per_second: f64, next: &mut u64) -> Vec<f64> {
        self.given.fill(0);
        let mut due = 0.0;
        for _ in 0..(seconds / TICK.as_secs_f64()) as usize {
            due += per_second * TICK.as_secs_f64();
            while due >= 1.0 {
                due -= 1.0;
                *next += 10;
                self.request(100, 48, chain(*next..*next + 6));
            }
            self.tick();
        }
        let all: usize = self.given.iter().sum();
        self.given.iter().map(|given| *given as f64 / all as f64).collect()
    }
}

/// A burst of requests with one prefix.
#[derive(Debug, Clone, Copy)]
struct Crowd {
    workers: usize,
    each: usize,
    /// Tokens of the common prefix; each request has 8 more.
    prefix: u32,
    /// Tokens that each request generates.
    output: u32,
    /// Whether one worker has computed the prefix before.
    held: bool,
    /// Transfer rate of pulls in bytes per second; `None` disables pulls.
    pulls: Option<f64>,
}

const OWN: u32 = 8;

impl Crowd {
    /// Submits the whole burst at once.
    fn arrive(&self) -> World {
        let mut world = World::new(&vec![1.0; self.workers], self.pulls);
        let units = u64::from(self.prefix / 16);
        // Warm-up requests, so that all workers have measured rates.
        for n in 0..4 * self.workers as u64 {
            world.request(200, 16, chain(1_000_000 + 100 * n..1_000_012 + 100 * n));
        }
        world.drain();
        if self.held {
            world.request(self.prefix + OWN, 16, chain(0..units));
            world.drain();
        }
        world.run(2.0);
        world.given.fill(0);
        world.took.clear();
        world.computed = 0;
        for _ in 0..self.workers * self.each {
            world.request(self.prefix + OWN, self.output, chain(0..units));
        }
        world
    }

    /// Seconds to compute the prefix.
    fn computing(&self) -> f64 {
        f64::from(self.prefix) / PREFILL
    }

    /// Cost of a pull as estimated by the router: 0.02 s, the bytes by their rate, and two copies at 1 GB/s.
    fn pull(&self) -> f64 {
        let bytes = f64::from(self.prefix) * TOKEN_BYTES;
        self.pulls.map_or(f64::INFINITY, |rate| 0.02 + bytes / rate + 2.0 * bytes / 1e9)
    }

    /// Number of successive rounds of pulls until all workers have the prefix: a holder sends to eight at
    /// once.
    fn generations(&self) -> f64 {
        (self.workers as f64).log(9.0).ceil()
    }

    /// Maximum of requests that one worker is given.
    ///
    /// A request goes to the worker with the lowest cost. Each further sequence raises a worker's cost for
    /// the next request by `step`: the answer's tokens and those of the worker's other sequences take longer
    /// by the slope of the pace, and the request's own prompt tokens are computed first. So among workers
    /// that have the prefix, or are expected to, the counts differ by at most two: one, and one for costs
    /// that count as equal (2 %, less than a step). A worker without the prefix has an additional one-time
    /// cost: the wait for earlier pulls, and the cheaper of pull and computation, weighted by at most 3 when
    /// all workers are busy. Until a holder's sequences exceed that cost, the holder is preferred.
    fn max_requests(&self) -> usize {
        // With 8 concurrent generations a token takes 24 ms. Until the burst has been measured, each further
        // generation adds 5 %.
        let slope = 0.05 * (STEP.0 + 8.0 * STEP.1);
        let step = 2.0 * f64::from(self.output) * slope + f64::from(OWN) / PREFILL;
        let waits = if self.pulls.is_some() { (self.generations() - 1.0) * self.pull() } else { 0.0 };
        let once = waits + 3.0 * self.pull().min(self.computing());
        (self.each + 2).max((once / step) as usize + 2)
    }

    /// Upper bound of the seconds until the last answer of a burst on an uncached prefix. The prefix is
    /// computed, in steps that take [`STEP`] longer than their rows. It is pulled in successive rounds; each
    /// is announced at the end of a step and noticed at the end of a tick. Own tokens and answers follow at
    /// the busiest worker.
    fn latest(&self) -> f64 {
        let step = CHUNK / PREFILL + STEP.0;
        let max_requests = self.max_requests() as f64;
        let computing = f64::from(self.prefix) / CHUNK * step;
        let pulls = self.generations() * (PULLS + step + TICK.as_secs_f64());
        let own = max_requests * f64::from(OWN) / PREFILL + step;
        computing + pulls + own + f64::from(self.output) * (STEP.0 + STEP.1 * max_requests)
    }
}

#[test]
fn a_burst_on_one_prefix_is_distributed_evenly_if_it_can_be_pulled() {
    for (workers, each) in [(2, 16), (3, 10), (4, 4), (8, 8), (16, 4), (32, 4), (64, 4)] {
        for (prefix, output) in [(528, 48), (2_048, 200)] {
            for pulls in [1e8, PULL_RATE] {
                let crowd = Crowd { workers, each, prefix, output, held: true, pulls: Some(pulls) };
                let mut world = crowd.arrive();
                world.drain();
                let max_given = world.given.iter().max().unwrap();
                assert!(
                    *max_given <= crowd.max_requests(),
                    "{crowd:?}: {:?}, at most {}",
                    world.given,
                    crowd.max_requests()
                );
            }
        }
    }
}

/// No worker has the prefix. One computes it; the others wait and pull it.
#[test]
fn a_cold_prefix_is_computed_once_if_pulling_is_cheaper() {
    for (workers, each) in [(2, 16), (3, 10), (4, 4), (8, 8), (16, 4), (32, 4), (64, 4)] {
        for (prefix, output) in [(528, 48), (1_488, 16), (2_048, 200)] {
            let crowd = Crowd { workers, each, prefix, output, held: false, pulls: Some(PULL_RATE) };
            let mut world = crowd.arrive();
            world.drain();
            let max_given = world.given.iter().max().unwrap();
            let slowest = world.took.iter().copied().fold(0.0, f64::max);
            let summary =
                format!("{crowd:?}: {:?}, {} computed, {slowest:.2} s", world.given, world.computed);
            assert_eq!((world.computed, world.took.len()), (1, workers * each), "{summary}");
            assert!(*max_given <= crowd.max_requests(), "{summary}, at most {} each", crowd.max_requests());
            assert!(slowest <= crowd.latest(), "{summary}, at most {:.2} s", crowd.latest());
        }
    }
}

/// A pull that takes longer than computing is not awaited: several workers compute the prefix at once.
#[test]
fn a_cold_prefix_is_computed_more_than_once_if_pulling_is_slower() {
    for workers in [2, 8, 64] {
        let crowd = Crowd { workers, each: 16, prefix: 528, output: 200, held: false, pulls: Some(1e7) };
        let mut world = crowd.arrive();
        // No request waits: 528 tokens take 0.26 s to compute and more than a second to pull.
        assert!(crowd.pull() > crowd.computing() && world.waiting.is_empty());
        world.drain();
        assert!(world.computed > 1, "{:?}", world.given);
    }
}

/// Without pulls, as many workers compute the prefix as pays off.
#[test]
fn a_crowd_without_pulls_is_nearly_as_fast_as_the_best_split() {
    let token = |n: f64| STEP.0 + STEP.1 * n;
    for workers in [2, 8] {
        for (prefix, output) in [(528, 48), (4_096, 16), (528, 200)] {
            let crowd = Crowd { workers, each: 16, prefix, output, held: true, pulls: None };
            let mut world = crowd.arrive();
            world.drain();
            let requests = (16 * workers) as f64;
            let took = world.took.iter().sum::<f64>() / requests;
            let own = f64::from(output);
            let on_one = own * token(requests) + requests * f64::from(OWN) / PREFILL;
            let on_all = own * token(16.0) + crowd.computing() + 16.0 * f64::from(OWN) / PREFILL;
            let best = on_one.min(on_all);
            assert!(
                took <= 1.25 * best + 0.1,
                "{crowd:?}: {took:.2} s instead of {best:.2}, {:?}",
                world.given
            );
        }
    }
}

/// The worker that computes the awaited prefix leaves: another one computes it, and all requests are
/// answered.
#[test]
fn a_crowd_survives_the_worker_that_computes_its_prefix() {
    for workers in [2, 3, 8] {
        let crowd =
            Crowd { workers, each: 8, prefix: 2_048, output: 48, held: false, pulls: Some(PULL_RATE) };
        let mut world = crowd.arrive();
        world.run(0.3);
        assert!(!world.waiting.is_empty(), "others wait for what one computes");
        let first = world.workers.iter().position(|worker| !worker.prompts.is_empty()).unwrap();
        let removed = world.workers.remove(first);
        world.given.remove(first);
        let lost: Vec<Job> = removed.prompts.into_iter().chain(removed.decoding).collect();
        for job in &lost {
            let prompt = crowd.prefix + OWN;
            world.waiting.insert(job.ticket, (48.0, Arc::clone(&job.chain), prompt, job.since));
        }
        let actions = world.rig.leave(&removed.name, 1);
        world.follow(actions);
        for job in lost {
            let actions = world.rig.balancer.retry(world.rig.now, job.ticket, AttemptError::Lost, None, 17);
            world.follow(actions);
        }
        world.drain();
        assert_eq!((world.took.len(), world.computed), (8 * workers, 2), "{workers} workers");
        assert_eq!(world.rig.balancer.queue(), QueueView { requests: 0, tokens: 0 });
    }
}

/// A wait is bounded: a worker that reports progress but never gets the prefix delays no request for longer.
#[test]
fn a_request_whose_awaited_prefix_never_arrives_is_computed() {
    let mut world = World::new(&[1.0, 1.0], Some(PULL_RATE));
    let request = |world: &mut World| {
        let request = RouteRequest {
            output: Output { max_tokens: 400, fixed: true },
            images: false,
            ..world.rig.request("t", 2_056, chain(0..128))
        };
        world.rig.submit(request).unwrap()
    };
    let first = only(&request(&mut world).1).node.clone();
    let mut waits = Vec::new();
    for _ in 0..7 {
        let (ticket, actions) = request(&mut world);
        if actions.is_empty() {
            waits.push(ticket);
        }
    }
    assert_eq!(world.rig.balancer.queue().requests, waits.len());
    assert_eq!(world.rig.balancer.tenants()[0].requests, waits.len());
    assert!(waits.len() >= 2);
    // One request is cancelled meanwhile.
    world.rig.balancer.ended(world.rig.now, waits.pop().unwrap(), 1);
    let since = world.rig.now;
    let mut placed = Vec::new();
    while placed.len() < waits.len() {
        world.rig.now += REPORT;
        for worker in ["w00", "w01"] {
            let actions = world.rig.balancer.load(world.rig.now, &node(worker), report(1), 3);
            placed.extend(assigned(&actions).iter().map(|(ticket, to)| (*ticket, to.node.clone())));
        }
        let actions = world.rig.balancer.tick(world.rig.now, 5);
        placed.extend(assigned(&actions).iter().map(|(ticket, to)| (*ticket, to.node.clone())));
        assert!(world.rig.now <= since + Duration::from_secs(10) + REPORT, "{placed:?} of {waits:?}");
    }
    assert!(placed.iter().any(|(_, node)| *node != first), "{placed:?}");
    assert_eq!(placed.iter().map(|(ticket, _)| *ticket).collect::<Vec<_>>(), waits);
    assert_eq!(world.rig.balancer.queue().requests, 0);
}

#[test]
fn a_slow_worker_gets_a_smaller_share() {
    for slow in [0.25, 0.5] {
        let mut world = World::new(&[1.0, 1.0, slow, 1.0], None);
        let mut next = 1 << 40;
        // Enough load that the other workers alone would get slower.
        world.traffic(20.0, 16.0, &mut next);
        let shares = world.traffic(30.0, 16.0, &mut next);
        let even = 0.25;
        let max_share = if slow < 0.4 { 0.5 } else { 0.85 };
        assert!(shares[2] < max_share * even, "a worker of speed {slow}: {shares:?}");
        assert!([0, 1, 3].iter().all(|&n| shares[n] > even), "{shares:?}");
    }
}

#[test]
fn a_worker_that_becomes_slow_loses_its_share_and_gets_it_back() {
    let mut world = World::new(&[1.0; 4], None);
    let mut next = 1 << 40;
    world.traffic(20.0, 16.0, &mut next);
    let before = world.traffic(20.0, 16.0, &mut next);
    assert!(before.iter().all(|share| (0.2..0.3).contains(share)), "{before:?}");
    world.workers[1].speed = 0.25;
    world.traffic(15.0, 16.0, &mut next);
    let slow = world.traffic(20.0, 16.0, &mut next);
    assert!(slow[1] < 0.14, "{slow:?}");
    world.workers[1].speed = 1.0;
    world.traffic(90.0, 16.0, &mut next);
    let after = world.traffic(20.0, 16.0, &mut next);
    assert!(after[1] > 0.19, "{after:?}");
}

/// A slow worker without requests for a while is tried again: only work can show that it has recovered.
#[test]
fn a_worker_that_got_no_work_while_it_was_slow_is_tried_again() {
    let mut world = World::new(&[1.0, 0.2], None);
    let mut next = 1 << 40;
    world.traffic(60.0, 2.0, &mut next);
    world.workers[1].speed = 1.0;
    let shares = world.traffic(300.0, 2.0, &mut next);
    // The slow worker's tokens took 5 times as long. With n sequences a request costs 48 tokens of 8 + 2 (n +
    // 1) ms, and 2 ms of each for each of n: 0.48 s at an idle worker and 0.67 s at the other, which has one
    // sequence most of the time. So the slow one is chosen once it counts as 1.4 times as slow: 2 (x - ln
    // 1.12) = ln 1.4, at x = 0.28 instead of ln 5. That is so 30 log2(ln 5 / 0.28) = 76 s after its last
    // token was measured, or earlier. From then on the two count as equal, and each gets half of the rest,
    // within three standard deviations of 450 draws: 3 sqrt(450 / 4) of 600.
    let recovered = 30.0 * (5f64.ln() / 0.28).log2();
    let half = 0.5 * (300.0 - recovered) / 300.0;
    assert!(shares[1] > half - 3.0 * (450f64 / 4.0).sqrt() / 600.0, "{shares:?}");
    world.drain();
}
