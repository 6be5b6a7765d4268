//! Requests, a router and workers in simulated time.

use crate::node::{Build, Node, Progress};
use crate::pulls::{PullRequest, Pulling};
use crate::routers::{Placed, Random, Router};
use crate::traffic::Prompt;
use anyhow::{Context, Result, bail};
use proto::block::BlockId;
use proto::event::KvEvent;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;
use std::time::Duration;

/// Arrival process of the requests.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Arrivals {
    /// This number of clients; each sends its next request when it has a response.
    Closed(usize),
    /// This many requests per second, at random times (Poisson).
    Open(f64),
}

/// Parameters besides router and requests.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Setting {
    pub(crate) workers: usize,
    /// Configuration of each worker.
    pub(crate) build: Build,
    pub(crate) arrivals: Arrivals,
    /// Tokens per answer.
    pub(crate) out: u32,
    /// One-way latency between client and worker.
    pub(crate) hop: Duration,
    /// Interval of a worker's reports.
    pub(crate) report_every: Duration,
}

/// Results of a run.
#[derive(Debug, Clone, Default)]
pub(crate) struct Outcome {
    /// Seconds until the last answer is complete.
    pub(crate) seconds: f64,
    /// Prompt tokens of all requests.
    pub(crate) prompt_tokens: u64,
    /// Prompt tokens found in a cache.
    pub(crate) cached: u64,
    /// Prompt tokens that each worker computed.
    pub(crate) computed: Vec<u64>,
    /// Seconds to each request's first token, ascending.
    pub(crate) ttft: Vec<f64>,
    /// Requests whose cached tokens differ from the router's prediction.
    pub(crate) mispredicted: usize,
    /// KV transfers requested by workers.
    pub(crate) pulls: usize,
    /// Requests by the router's reason.
    pub(crate) reasons: Vec<(&'static str, usize)>,
}

#[derive(Debug)]
enum Event {
    Arrive,
    AtWorker(Placed),
    StepEnds(usize),
    /// (holder, request): a worker requests a prefix.
    PullRequested(usize, PullRequest),
    /// (worker, pull, depth): a prefix arrives.
    Brought(usize, usize, u32),
    /// A worker's pull may have timed out.
    PullTimeout(usize),
    AtRouter(usize, Vec<Progress>, Vec<KvEvent>),
    Report(usize),
}

struct Run<'a> {
    setting: Setting,
    router: &'a mut dyn Router,
    prompts: &'a [&'a Prompt],
    root: BlockId,
    nodes: Vec<Node>,
    /// Future events; ties go to the one queued first.
    queue: BinaryHeap<Reverse<(Duration, u64, usize)>>,
    events: Vec<Option<Event>>,
    random: Random,
    arrived: usize,
    ended: usize,
    sent: Vec<Duration>,
    predicted: Vec<Option<u32>>,
    outcome: Outcome,
}

/// Replays the prompts in order.
pub(crate) fn run(
    setting: Setting,
    router: &mut dyn Router,
    prompts: &[&Prompt],
    root: BlockId,
) -> Result<Outcome> {
    let nodes = (0..setting.workers).map(|_| Node::new(setting.build)).collect::<Result<_>>()?;
    let mut run = Run {
        setting,
        router,
        prompts,
        root,
        nodes,
        queue: BinaryHeap::new(),
        events: Vec::new(),
        random: Random(11),
        arrived: 0,
        ended: 0,
        sent: vec![Duration::ZERO; prompts.len()],
        predicted: vec![None; prompts.len()],
        outcome: Outcome::default(),
    };
    let first = match setting.arrivals {
        Arrivals::Closed(clients) => clients.min(prompts.len()),
        Arrivals::Open(_) => 1,
    };
    (0..first).for_each(|_| run.at(Duration::ZERO, Event::Arrive));
    for worker in 0..setting.workers {
        // Spread the reports over the interval.
        run.at(setting.report_every * worker as u32 / setting.workers as u32, Event::Report(worker));
    }
    let mut now = Duration::ZERO;
    while run.ended < prompts.len() {
        let Reverse((time, _, event)) = run.queue.pop().context("requests that never end")?;
        now = time;
        let event = run.events.get_mut(event).and_then(Option::take).context("an event")?;
        run.handle(now, event)?;
    }
    let mut outcome = run.outcome;
    outcome.seconds = now.as_secs_f64();
    outcome.prompt_tokens = prompts.iter().map(|prompt| prompt.tokens.len() as u64).sum();
    outcome.computed = run.nodes.iter().map(Node::computed).collect();
    outcome.ttft.sort_by(f64::total_cmp);
    if outcome.cached + outcome.computed.iter().sum::<u64>() != outcome.prompt_tokens {
        bail!("every token of a prompt is either found or computed");
    }
    Ok(outcome)
}

impl Run<'_> {
    fn at(&mut self, time: Duration, event: Event) {
        let number = self.events.len();
        self.queue.push(Reverse((time, number as u64, number)));
        self.events.push(Some(event));
    }

    fn handle(&mut self, now: Duration, event: Event) -> Result<()> {
        match event {
            Event::Arrive => {
                let request = self.arrived;
                let Some(prompt) = self.prompts.get(request) else { return Ok(()) };
                self.arrived += 1;
                self.sent[request] = now;
                if let Arrivals::Open(rate) = self.setting.arrivals {
                    let uniform = (self.random.next() >> 11) as f64 / (1u64 << 53) as f64;
                    let gap = -(1.0 - uniform).ln() / rate;
                    self.at(now + Duration::from_secs_f64(gap), Event::Arrive);
                }
                let placed = self.router.submit(now, request, prompt)?;
                self.send(now, placed);
            }
            Event::AtWorker(Placed { request, worker, pull, .. }) => {
                let prompt = Arc::clone(&self.prompts[request].tokens);
                let asking = Pulling { request, prompt, source: pull };
                let pull_request = self.nodes[worker].submit(now, self.root, asking, self.setting.out)?;
                if let Some(pull_request) = pull_request {
                    self.outcome.pulls += 1;
                    self.at(pull_request.until, Event::PullTimeout(worker));
                    self.at(now + self.setting.hop, Event::PullRequested(worker, pull_request));
                }
                self.step(now, worker)?;
            }
            Event::StepEnds(worker) => {
                let (progress, events) = self.nodes[worker].complete()?;
                self.at(now + self.setting.hop, Event::AtRouter(worker, progress, events));
                self.step(now, worker)?;
            }
            Event::PullRequested(puller, pull_request) => {
                let holder = pull_request.holder;
                self.nodes[holder].request_pull(puller, pull_request);
                self.serve(now, holder);
            }
            Event::Brought(worker, pull, depth) => {
                self.nodes[worker].brought(pull, depth);
                self.step(now, worker)?;
            }
            Event::PullTimeout(worker) => self.step(now, worker)?,
            Event::AtRouter(worker, progress, events) => {
                if !events.is_empty() {
                    self.router.events(worker, events)?;
                }
                for progress in progress {
                    self.progressed(now, progress)?;
                }
            }
            Event::Report(worker) => {
                let report = self.nodes[worker].report();
                let placed = self.router.report(now, worker, report)?;
                self.send(now, placed);
                self.at(now + self.setting.report_every, Event::Report(worker));
            }
        }
        Ok(())
    }

    fn progressed(&mut self, now: Duration, progress: Progress) -> Result<()> {
        match progress {
            Progress::Started { request, cached } => {
                let placed = self.router.started(now, request)?;
                self.send(now, placed);
                self.outcome.ttft.push((now - self.sent[request]).as_secs_f64());
                self.outcome.cached += u64::from(cached);
                let wrong = self.predicted[request].is_some_and(|predicted| predicted != cached);
                self.outcome.mispredicted += usize::from(wrong);
            }
            Progress::Ended { request } => {
                self.ended += 1;
                let placed = self.router.ended(now, request)?;
                self.send(now, placed);
                if matches!(self.setting.arrivals, Arrivals::Closed(_)) {
                    self.at(now, Event::Arrive);
                }
            }
        }
        Ok(())
    }

    fn send(&mut self, now: Duration, placed: Vec<Placed>) {
        for placed in placed {
            self.predicted[placed.request] = placed.predicted;
            if let Some(reason) = placed.reason.map(|reason| reason.as_str()) {
                match self.outcome.reasons.iter_mut().find(|(name, _)| *name == reason) {
                    Some((_, count)) => *count += 1,
                    None => self.outcome.reasons.push((reason, 1)),
                }
            }
            self.at(now + self.setting.hop, Event::AtWorker(placed));
        }
    }

    /// A worker sends the requested prefixes.
    fn serve(&mut self, now: Duration, worker: usize) {
        for (puller, pull, depth, at) in self.nodes[worker].serve(now, self.root) {
            self.at(at, Event::Brought(puller, pull, depth));
        }
    }

    /// Between two steps a worker handles arrivals and begins the next step.
    fn step(&mut self, now: Duration, worker: usize) -> Result<()> {
        let events = self.nodes[worker].end_pulls(now, self.root)?;
        if !events.is_empty() {
            self.at(now + self.setting.hop, Event::AtRouter(worker, Vec::new(), events));
        }
        if let Some(took) = self.nodes[worker].begin()? {
            self.at(now + took, Event::StepEnds(worker));
        }
        Ok(())
    }
}

impl Outcome {
    /// Prompt tokens computed by all workers.
    pub(crate) fn total(&self) -> u64 {
        self.computed.iter().sum()
    }

    /// Standard deviation of the workers' computed tokens divided by their mean, as in `bench/rag/replay.py`.
    pub(crate) fn load_cov(&self) -> f64 {
        let mean = self.total() as f64 / self.computed.len() as f64;
        let variance = self.computed.iter().map(|tokens| (*tokens as f64 - mean).powi(2)).sum::<f64>();
        if mean > 0.0 { (variance / self.computed.len() as f64).sqrt() / mean } else { 0.0 }
    }

    /// A quantile of TTFT, as in `bench/rag/replay.py`.
    pub(crate) fn ttft(&self, share: f64) -> f64 {
        let at = (share * self.ttft.len() as f64) as usize;
        self.ttft.get(at.min(self.ttft.len().saturating_sub(1))).copied().unwrap_or(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pulls::PullRates;
    use crate::rates::Rates;
    use crate::traffic::computed_once;
    use proto::block::{ClusterKey, Scope, TenantSalt};

    /// Sends each request to a given worker.
    struct Scripted(Vec<(usize, Option<(usize, u32)>)>);

    impl Router for Scripted {
        fn submit(&mut self, _: Duration, request: usize, _: &Prompt) -> Result<Vec<Placed>> {
            let (worker, pull) = self.0[request];
            Ok(vec![Placed { request, worker, predicted: None, reason: None, pull }])
        }
        fn ended(&mut self, _: Duration, _: usize) -> Result<Vec<Placed>> {
            Ok(Vec::new())
        }
    }

    const KEY: ClusterKey = ClusterKey([3; 32]);

    fn root() -> BlockId {
        KEY.root(Scope {
            salt: &TenantSalt([0; 32]),
            model_digest: &[7; 32],
            tokenizer_digest: &[7; 32],
            adapter: b"",
        })
    }

    fn prompt(tokens: impl Iterator<Item = u32>) -> Prompt {
        let tokens: Arc<[u32]> = tokens.collect();
        Prompt { text: "".into(), chain: KEY.chain(root(), &tokens).into(), tokens }
    }

    /// Two workers with one millisecond per token and one second per 10 MB.
    fn simulate(script: Vec<(usize, Option<(usize, u32)>)>, clients: usize, prompts: &[Prompt]) -> Outcome {
        let rates = Rates { step: 0.001, row: 0.001, kv_bytes_per_token: 10_000, ..Rates::default() };
        let pulls = PullRates { bytes_per_second: 1e7, overhead: 0.0, copied_per_second: 1e9 };
        let build = Build { kv_bytes: 64 << 20, chunk: 64, layers: 10, max_seqs: 8, rates, pulls };
        let (hop, report_every) = (Duration::from_millis(1), Duration::from_millis(250));
        let setting =
            Setting { workers: 2, build, arrivals: Arrivals::Closed(clients), out: 2, hop, report_every };
        let prompts: Vec<&Prompt> = prompts.iter().collect();
        run(setting, &mut Scripted(script), &prompts, root()).unwrap()
    }

    #[test]
    fn pulled_tokens_are_not_computed() {
        let prompts = [prompt(0..400), prompt((0..320).chain(1_000..1_080))];
        let ideal = computed_once(prompts.iter());
        assert_eq!(ideal, 400 + 80);
        let alone = simulate(vec![(0, None), (1, None)], 1, &prompts);
        assert_eq!((alone.computed.as_slice(), alone.pulls), ([400, 400].as_slice(), 0));
        let pulled = simulate(vec![(0, None), (1, Some((0, 320)))], 1, &prompts);
        assert_eq!((pulled.computed.as_slice(), pulled.pulls), ([400, 80].as_slice(), 1));
        // 3.2 MB take 0.32 s, as long as the computation.
        assert!((pulled.seconds - alone.seconds).abs() < 0.05, "{} {}", pulled.seconds, alone.seconds);
        // A holder with less than expected sends that; without any, nothing.
        let less = simulate(vec![(0, None), (1, Some((0, 400)))], 1, &prompts);
        assert_eq!(less.computed, [400, 80]);
        let unheld = simulate(vec![(1, Some((0, 320))), (0, None)], 1, &prompts);
        assert_eq!((unheld.computed.as_slice(), unheld.pulls), ([400, 400].as_slice(), 1));
    }

    #[test]
    fn a_holder_sends_blocks_while_it_computes() {
        let prompts = [
            prompt(0..320),
            prompt(5_000..5_400),
            prompt(2_000..4_000),
            prompt((0..304).chain(1_000..1_080)),
        ];
        let outcome = simulate(vec![(0, None), (1, None), (0, None), (1, Some((0, 304)))], 2, &prompts);
        assert_eq!((outcome.computed.as_slice(), outcome.cached), ([320 + 2_000, 400 + 80].as_slice(), 304));
        // The third request takes two seconds, and ends last.
        assert!((2.3..2.6).contains(&outcome.seconds), "{}", outcome.seconds);
    }
}
