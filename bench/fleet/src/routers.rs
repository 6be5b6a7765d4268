//! Routers: Kvasir's own balancer, and models of other routers.

use crate::pulls::PullRates;
use crate::traffic::{Prompt, TENANT};
use crate::tree::Tree;
use anyhow::{Context, Result, anyhow, bail};
use proto::event::{KvEvent, KvEventBatch};
use proto::ids::{Epoch, NodeId, RequestId};
use proto::message::{PullCost, PullReport, WorkPart};
use proto::served_model::ServedModel;
use proto::worker::{LoadReport, WorkerInfo};
use router::balancer::{Action, Balancer, Output, Policy, RouteRequest, Ticket};
use router::routing::{Reason, Routing};
use router::table::TableChange;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Epoch of every worker.
pub(crate) const EPOCH: Epoch = Epoch(1);

/// A routed request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Placed {
    pub(crate) request: usize,
    pub(crate) worker: usize,
    /// Prompt tokens expected in the worker's cache; `None` if the router has no tokens.
    pub(crate) predicted: Option<u32>,
    /// Reason of the decision, if the router reports one.
    pub(crate) reason: Option<Reason>,
    /// Holder that the worker may pull from, and the number of leading tokens.
    pub(crate) pull: Option<(usize, u32)>,
}

/// A router. Times are relative to the start.
pub(crate) trait Router {
    fn submit(&mut self, now: Duration, request: usize, prompt: &Prompt) -> Result<Vec<Placed>>;
    /// The first token of a request has arrived.
    fn started(&mut self, _now: Duration, _request: usize) -> Result<Vec<Placed>> {
        Ok(Vec::new())
    }
    /// The last token of a request has arrived.
    fn ended(&mut self, now: Duration, request: usize) -> Result<Vec<Placed>>;
    /// KV events of a worker.
    fn events(&mut self, _worker: usize, _events: Vec<KvEvent>) -> Result<()> {
        Ok(())
    }
    /// A worker's load report.
    fn report(&mut self, _now: Duration, _worker: usize, _report: LoadReport) -> Result<Vec<Placed>> {
        Ok(Vec::new())
    }
}

/// splitmix64, for ties and arrivals; the same in every run.
#[derive(Debug)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// The coordinator's balancer.
pub(crate) struct Kvasir {
    balancer: Balancer,
    start: Instant,
    random: Random,
    model: ServedModel,
    nodes: Vec<NodeId>,
    /// Sequence number of each worker's next event.
    next_event: Vec<u64>,
    requests: HashMap<Ticket, usize>,
    tickets: HashMap<usize, Ticket>,
    /// Tokens per answer.
    out: u32,
}

impl Kvasir {
    /// All workers have joined and are idle; `report` is their first report.
    pub(crate) fn new(
        routing: Routing,
        model: &ServedModel,
        workers: usize,
        report: &LoadReport,
        pulls: &PullRates,
        kv_bytes_per_token: u64,
        out: u32,
    ) -> Result<Self> {
        let policy = Policy { routing, ..Policy::default() };
        let (mut balancer, start) = (Balancer::new(policy), Instant::now());
        let mut random = Random(1);
        let nodes: Vec<NodeId> =
            (0..workers).map(|n| NodeId::new(format!("w{n:03}"))).collect::<Result<_, _>>()?;
        for node in &nodes {
            let register = WorkerInfo {
                node: node.clone(),
                epoch: EPOCH,
                pid: 1,
                quic: String::new(),
                ops: String::new(),
                models: vec![model.clone()],
            };
            balancer.change(start, TableChange::Join(register), random.next())?;
            let no_events = KvEventBatch { epoch: EPOCH, first_sequence: 1, events: Vec::new() };
            balancer.replayed(node, EPOCH, Some(no_events))?;
            balancer.load(start, node, report.clone(), random.next());
            let cost =
                PullCost { model: model.id.clone(), bytes_per_token: kv_bytes_per_token, bytes_per_point: 0 };
            balancer.introduce(node, EPOCH, WorkPart::Both, vec![cost], String::new());
            // Pull rate as measured by the worker.
            let report = PullReport { rate: pulls.bytes_per_second as f32, ..PullReport::default() };
            balancer.pulled(node, EPOCH, report);
        }
        let next_event = vec![1; workers];
        let (requests, tickets) = (HashMap::new(), HashMap::new());
        Ok(Self { balancer, start, random, model: model.clone(), nodes, next_event, requests, tickets, out })
    }

    fn placed(&self, actions: Vec<Action>) -> Result<Vec<Placed>> {
        let mut placed = Vec::new();
        for action in actions {
            match action {
                Action::Assign(ticket, to) => {
                    let request = *self.requests.get(&ticket).context("a request behind the ticket")?;
                    let number = |node: &NodeId| self.nodes.iter().position(|other| other == node);
                    let worker = number(&to.node).context("a worker")?;
                    let (predicted, reason) = (Some(to.predicted), Some(to.reason));
                    let pull = to.pull.and_then(|pull| Some((number(&pull.node)?, pull.tokens)));
                    placed.push(Placed { request, worker, predicted, reason, pull });
                }
                Action::Refuse(_, refusal) => bail!("a request was refused: {refusal}"),
                action => bail!("nothing is lost here: {action:?}"),
            }
        }
        Ok(placed)
    }
}

impl Router for Kvasir {
    fn submit(&mut self, now: Duration, request: usize, prompt: &Prompt) -> Result<Vec<Placed>> {
        let now = self.start + now;
        let route_request = RouteRequest {
            request_id: RequestId::new(request.to_string())?,
            tenant: TENANT.into(),
            model: self.model.id.clone(),
            operation: None,
            prompt_tokens: prompt.tokens.len() as u32,
            chain: Arc::clone(&prompt.chain),
            output: Output { max_tokens: self.out, fixed: true },
            images: false,
            group: None,
            priority: 0,
            submitted: now,
            deadline: now + Duration::from_secs(1_000_000),
            trace: None,
        };
        let (tickets, actions) = self
            .balancer
            .submit(now, &[Arc::new(route_request)], self.random.next())
            .map_err(|refusal| anyhow!("{refusal}"))?;
        for ticket in tickets {
            self.requests.insert(ticket, request);
            self.tickets.insert(request, ticket);
        }
        self.placed(actions)
    }

    fn started(&mut self, now: Duration, request: usize) -> Result<Vec<Placed>> {
        let Some(ticket) = self.tickets.get(&request) else { return Ok(Vec::new()) };
        let actions = self.balancer.started(self.start + now, *ticket, self.random.next());
        self.placed(actions)
    }

    fn ended(&mut self, now: Duration, request: usize) -> Result<Vec<Placed>> {
        let Some(ticket) = self.tickets.remove(&request) else { return Ok(Vec::new()) };
        let actions = self.balancer.ended(self.start + now, ticket, self.random.next());
        self.requests.remove(&ticket);
        self.placed(actions)
    }

    fn events(&mut self, worker: usize, events: Vec<KvEvent>) -> Result<()> {
        let first_sequence = self.next_event[worker];
        self.next_event[worker] += events.len() as u64;
        let batch = KvEventBatch { epoch: EPOCH, first_sequence, events };
        match self.balancer.events(&self.nodes[worker], batch)? {
            None => Ok(()),
            Some(action) => bail!("no event is lost here: {action:?}"),
        }
    }

    fn report(&mut self, now: Duration, worker: usize, report: LoadReport) -> Result<Vec<Placed>> {
        let now = self.start + now;
        let mut actions = self.balancer.load(now, &self.nodes[worker], report, self.random.next());
        actions.extend(self.balancer.tick(now, self.random.next()));
        self.placed(actions)
    }
}

/// Differences of the two other routers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Peer {
    /// `sglang-router` 0.3.2: ties go to the first worker.
    Sglang,
    /// `smg` 1.13: ties are random.
    Smg,
}

/// `cache_aware` with a tree of texts, before plain servers that report no load: the router only has the
/// requests sent and completed. Modelled on the other routers' sources.
pub(crate) struct CacheAware {
    peer: Peer,
    tree: Tree,
    /// In-flight requests of each worker.
    loads: Vec<usize>,
    on: HashMap<usize, usize>,
    random: Random,
}

/// Defaults of both routers (`--help` of sglang-router 0.3.2 and smg 1.13.0).
const CACHE_THRESHOLD: f64 = 0.3;
const BALANCE_ABS: usize = 64;
const BALANCE_REL: f64 = 1.5;
const MAX_TREE: usize = 1 << 26;

impl CacheAware {
    /// Idle workers and an empty tree.
    pub(crate) fn new(peer: Peer, workers: usize) -> Self {
        let (tree, on) = (Tree::new(), HashMap::new());
        Self { peer, tree, loads: vec![0; workers], on, random: Random(1) }
    }

    fn least_busy(&mut self) -> usize {
        let least = self.loads.iter().min().copied().unwrap_or(0);
        let all: Vec<usize> = (0..self.loads.len()).filter(|w| self.loads[*w] == least).collect();
        match self.peer {
            Peer::Sglang => all[0],
            Peer::Smg => all[(self.random.next() % all.len() as u64) as usize],
        }
    }
}

impl Router for CacheAware {
    fn submit(&mut self, _: Duration, request: usize, prompt: &Prompt) -> Result<Vec<Placed>> {
        let (max, min) =
            (self.loads.iter().max().copied().unwrap_or(0), self.loads.iter().min().copied().unwrap_or(0));
        let imbalanced = max - min > BALANCE_ABS && max as f64 > min as f64 * BALANCE_REL;
        let worker = match self.tree.matched(&prompt.text) {
            (matched, Some(worker))
                if !imbalanced && matched as f64 > CACHE_THRESHOLD * prompt.text.len() as f64 =>
            {
                worker
            }
            _ => self.least_busy(),
        };
        self.tree.insert(&prompt.text, worker);
        if self.tree.size() > MAX_TREE {
            bail!(
                "the peers' trees would begin to forget, which is not simulated: fewer or shorter questions"
            );
        }
        self.loads[worker] += 1;
        self.on.insert(request, worker);
        Ok(vec![Placed { request, worker, predicted: None, reason: None, pull: None }])
    }

    fn ended(&mut self, _: Duration, request: usize) -> Result<Vec<Placed>> {
        if let Some(worker) = self.on.remove(&request) {
            self.loads[worker] -= 1;
        }
        Ok(Vec::new())
    }
}
