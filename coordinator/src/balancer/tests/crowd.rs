//! Simulated workers that decode in batches: how a crowd on one prefix is shared out, and what a slow worker gets.

use super::*;
use proto::event::{KvEvent, Medium};
use std::collections::VecDeque;

/// Rows of a prompt in a step.
const CHUNK: f64 = 128.0;
/// Prompt tokens per second of a worker of speed 1, alone.
const PREFILL: f64 = 2_000.0;
/// Seconds of a decode step without and for each sequence.
const STEP: (f64, f64) = (0.008, 0.002);
const TICK: Duration = Duration::from_millis(10);
const REPORT: Duration = Duration::from_millis(250);
const PULLS: f64 = 0.05;

struct Job {
    ticket: Ticket,
    /// Not before: what it pulls comes then.
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
    told: Instant,
}

/// Tokens of its answer, its chain, tokens of its prompt, and since when it waits.
type Waiting = (f64, Arc<[BlockId]>, u32, Instant);

struct World {
    rig: Rig,
    workers: Vec<Worker>,
    /// Requests that each has been given, since somebody looked.
    given: Vec<usize>,
    waiting: HashMap<Ticket, Waiting>,
    /// Seconds from request to end.
    took: Vec<f64>,
}

impl World {
    fn new(speeds: &[f64], pulls: bool) -> Self {
        let mut rig = Rig::new(Policy::default(), &[]);
        let workers: Vec<Worker> = speeds
            .iter()
            .enumerate()
            .map(|(n, &speed)| {
                let name = format!("w{n:02}");
                rig.join(&name, 1);
                if pulls {
                    let model = ModelId::new(MODEL).unwrap();
                    let cost = PullCostV1 { model, bytes_per_token: 20_000, bytes_per_point: 0 };
                    rig.balancer.introduce(&node(&name), Epoch(1), WorkPart::Both, vec![cost], String::new());
                }
                let told = rig.now;
                let (prompts, decoding) = (VecDeque::new(), Vec::new());
                Worker { name, speed, prompts, decoding, tokens: 0.0, rate: 0.0, events: 0, told }
            })
            .collect();
        let given = vec![0; workers.len()];
        Self { rig, workers, given, waiting: HashMap::new(), took: Vec::new() }
    }

    fn request(&mut self, prompt: u32, output: u32, chain: Arc<[BlockId]>) {
        let ask = Ask {
            output: Output { most: output, fixed: true },
            ..self.rig.ask("t", prompt, Arc::clone(&chain))
        };
        let now = self.rig.now;
        let (ticket, actions) = self.rig.submit(ask).unwrap();
        self.waiting.insert(ticket, (f64::from(output), chain, prompt, now));
        self.follow(actions);
    }

    fn follow(&mut self, actions: Vec<Action>) {
        for action in actions {
            let Action::Assign(ticket, to) = action else { panic!("{action:?}") };
            let (output, chain, prompt, since) = self.waiting.remove(&ticket).unwrap();
            let at = self.workers.iter().position(|worker| worker.name == to.node.as_str()).unwrap();
            let pulled = to.pull.is_some();
            let from = self.rig.now + if pulled { Duration::from_secs_f64(PULLS) } else { Duration::ZERO };
            self.given[at] += 1;
            let rows = f64::from(prompt - to.predicted);
            self.workers[at].prompts.push_back(Job { ticket, from, rows, left: output, chain, since });
        }
    }

    /// Time goes on by a tick.
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
            let (over, goes_on) =
                std::mem::take(&mut worker.decoding).into_iter().partition(|job| job.left <= 0.0);
            worker.decoding = goes_on;
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
            if now >= worker.told + REPORT {
                worker.told = now;
                let pending = worker.prompts.iter().map(|job| job.rows as u64).sum();
                let report = LoadReportV1 {
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

    /// Short requests without a common prefix, so many a second; what part each worker got.
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

/// Requests that share `prefix` tokens, which one worker has computed before, come all at once; how many each gets.
fn crowd(workers: usize, requests: usize, prefix: u32, output: u32, pulls: bool) -> (Vec<usize>, f64) {
    let mut world = World::new(&vec![1.0; workers], pulls);
    let units = u64::from(prefix / 16);
    // What measures rates comes to all.
    for n in 0..4 * workers as u64 {
        world.request(200, 16, chain(1_000_000 + 100 * n..1_000_012 + 100 * n));
    }
    world.drain();
    world.request(prefix + 8, 16, chain(0..units));
    world.drain();
    world.run(2.0);
    world.given.fill(0);
    world.took.clear();
    (0..requests).for_each(|_| world.request(prefix + 8, output, chain(0..units)));
    world.drain();
    (world.given, world.took.iter().sum::<f64>() / requests as f64)
}

#[test]
fn a_crowd_on_one_prefix_is_shared_out_evenly_where_it_can_be_pulled() {
    let cases = [(528, 48), (2_048, 200)];
    let shared_out = |workers: usize, each: usize, (prefix, output)| {
        let (given, _) = crowd(workers, workers * each, prefix, output, true);
        let (most, least) = (given.iter().copied().max().unwrap(), given.iter().copied().min().unwrap());
        (most, least, format!("{workers} workers, {prefix} tokens, {output} generated: {given:?}"))
    };
    for (workers, each) in [(2, 16), (3, 10), (8, 8)] {
        for case in cases {
            let (most, least, what) = shared_out(workers, each, case);
            assert!(most <= each + each / 4 + 2 && least + each / 3 + 1 >= each, "{what}");
        }
    }
    // One holder cannot send to all of them at once.
    for workers in [16, 64] {
        let (most, _, what) = shared_out(workers, 4, cases[0]);
        assert!(most <= 2 * 4 + 2, "{what}");
    }
}

/// Where it has to be computed again, as many workers compute it as pays.
#[test]
fn a_crowd_is_served_as_soon_as_by_one_worker_and_as_by_all() {
    let token = |n: f64| STEP.0 + STEP.1 * n;
    for workers in [2, 8] {
        for (prefix, output) in [(528, 48), (4_096, 16), (528, 200)] {
            let requests = 16 * workers;
            let (given, took) = crowd(workers, requests, prefix, output, false);
            let own = f64::from(output);
            let by_one = own * token(requests as f64) + requests as f64 * 8.0 / PREFILL;
            let by_all = own * token(16.0) + f64::from(prefix) / PREFILL + 16.0 * 8.0 / PREFILL;
            let best = by_one.min(by_all);
            assert!(
                took <= 1.25 * best + 0.1,
                "{workers} workers, {prefix} tokens, {output} generated: {took:.2} s instead of {best:.2}, {given:?}"
            );
        }
    }
}

#[test]
fn a_slow_worker_gets_what_it_can_serve_as_soon_as_the_others() {
    for slow in [0.25, 0.5] {
        let mut world = World::new(&[1.0, 1.0, slow, 1.0], false);
        let mut next = 1 << 40;
        // So much that the others could not do it alone without getting slower.
        world.traffic(20.0, 16.0, &mut next);
        let shares = world.traffic(30.0, 16.0, &mut next);
        let even = 0.25;
        let most = if slow < 0.4 { 0.5 } else { 0.85 };
        assert!(shares[2] < most * even, "a worker of speed {slow}: {shares:?}");
        assert!([0, 1, 3].iter().all(|&n| shares[n] > even), "{shares:?}");
    }
}

#[test]
fn a_worker_that_becomes_slow_loses_its_share_and_gets_it_back() {
    let mut world = World::new(&[1.0; 4], false);
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

/// A slow worker that got nothing for a while is tried again: nothing tells that it has recovered but work.
#[test]
fn a_worker_that_got_no_work_while_it_was_slow_is_tried_again() {
    let mut world = World::new(&[1.0, 0.2], false);
    let mut next = 1 << 40;
    world.traffic(60.0, 2.0, &mut next);
    world.workers[1].speed = 1.0;
    let shares = world.traffic(300.0, 2.0, &mut next);
    assert!(shares[1] > 0.15, "{shares:?}");
    world.drain();
}
