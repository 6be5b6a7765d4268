//! A run of the virtual fleet: arrivals, the leader's decisions every 200 ms, loads, and the service of requests.

use crate::Error;
use crate::device::{Loads, MAX_SEQUENCES, Micros, Progress, Sequence, micros, seconds};
use crate::fleet::{Costs, Fleet};
use crate::host::{Host, Stage, Timer};
use crate::leader::{EVERY, Leader, Moved, Queue, Ranking, next_decision};
use crate::traffic::Arrival;
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

/// A replica takes no further request while it has prefill for so many seconds in hand, as for the router.
const BACKLOG: f64 = 1.0;
/// Most requests in the queue; the coordinators' default.
const MAX_QUEUED: usize = 2048;
/// A refused model is refused at once for so long.
const REFUSED_FOR: Micros = 5_000_000;
/// A request that has waited for so long is refused; the coordinators' default.
const DEADLINE: Micros = 600_000_000;
/// Longest wait for the replicas that stay ready before the first arrival.
const WARM_UP: Micros = 3_600_000_000;
/// Most decisions and events of a run.
const MAX_STEPS: u64 = 20_000_000;

/// The order in which models lose their room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// Kvasir's.
    Uses,
    /// The least recently used one first.
    Lru,
    /// The one whose next request comes last goes first; it knows the arrivals.
    Belady,
}

/// Number of requests that were refused, by reason.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Refused {
    /// The queue was full.
    pub queue_full: u64,
    /// They waited too long for a load.
    pub load_wait: u64,
    /// They waited too long for a replica.
    pub deadline: u64,
    /// No node can hold the model.
    pub no_place: u64,
}

impl Refused {
    pub fn total(&self) -> u64 {
        self.queue_full + self.load_wait + self.deadline + self.no_place
    }
}

/// Percentiles of times in seconds; 0 without values.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Percentiles {
    pub mean: f64,
    pub p50: f64,
    pub p95: f64,
    pub p99: f64,
}

impl Percentiles {
    fn of(values: &mut [f64]) -> Self {
        values.sort_by(f64::total_cmp);
        // The nearest rank.
        let at = |share: f64| {
            let rank = (share * values.len() as f64).ceil() as usize;
            values.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
        };
        let mean = values.iter().fold(0.0, |sum, value| sum + value) / values.len().max(1) as f64;
        Self { mean, p50: at(0.5), p95: at(0.95), p99: at(0.99) }
    }
}

/// A model's counts since the first arrival.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModelOutcome {
    pub model: String,
    pub requests: u64,
    pub answered: u64,
    pub refused: Refused,
    /// Seconds to the first token of answered requests.
    pub ttft: Percentiles,
    /// Requests that came while no replica was ready.
    pub waited: u64,
    /// Their seconds until a replica took them or they were refused.
    pub wait: Percentiles,
    pub loads: u64,
    /// Loads of a model that was loaded before.
    pub wakes: u64,
    /// Replicas that left because another model needed the room.
    pub evictions: u64,
    /// Replicas that left because they were idle.
    pub sleeps: u64,
    /// Ready replicas on average.
    pub replicas: f64,
    /// Nodes at which it was ready, with the share of the time, most first.
    pub places: Vec<(String, f64)>,
    /// Seconds that all its requests waited for their first token, a refused one for the longest time.
    pub cost: f64,
}

/// A node's counts since the first arrival.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct NodeOutcome {
    pub node: String,
    /// Share of the time with running requests, and with a load.
    pub busy: f64,
    pub loading: f64,
    /// Bytes of models that are loaded or pinned.
    pub memory: u64,
    pub mean_used: u64,
    pub most_used: u64,
    pub loads: u64,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Outcome {
    /// Seconds from the first arrival to the last answer.
    pub seconds: f64,
    /// Seconds before, until the replicas that stay ready were loaded.
    pub warm_up: f64,
    pub requests: u64,
    pub refused: u64,
    pub ttft: Percentiles,
    /// Mean seconds to the first token; a refused request counts as one that waits for the longest time.
    pub cost: f64,
    pub loads: u64,
    pub wakes: u64,
    pub evictions: u64,
    pub models: Vec<ModelOutcome>,
    pub nodes: Vec<NodeOutcome>,
    /// The leader's decisions and the events of the simulation.
    #[serde(skip)]
    pub steps: u64,
}

/// Of events at one time, the first ones go first. A decision comes before whatever happens at its time, also before
/// arrivals, so the next decision after an event is always [`next_decision`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Decide,
    /// (node, model, epoch): a fetch or a load ends.
    Stage(usize, usize, u32),
    /// (node, number of the timer): a first token or an end.
    Service(usize, u32),
    /// A request has waited for the longest time.
    Expire(usize),
}

#[derive(Debug, Clone, Default)]
struct Model {
    queue: VecDeque<usize>,
    /// The decision since which requests have been waiting at all decisions.
    waits_since: Option<Micros>,
    emptied_at: Micros,
    /// Time at which its demand was refused.
    refused_at: Option<Micros>,
    arrived: u64,
    answered: u64,
    ended: u64,
    refused: Refused,
    ttft: Vec<f64>,
    waits: Vec<f64>,
    evictions: u64,
    sleeps: u64,
}

struct Run<'a> {
    fleet: &'a Fleet,
    traffic: &'a [Arrival],
    policy: Policy,
    /// For [`Policy::Belady`]: the arrivals of each model.
    arrivals: Vec<Vec<Micros>>,
    /// Costs and priority of each model.
    costs: Vec<(Costs, f64)>,
    leader: Leader,
    /// The table's index at the last orders.
    ordered: u64,
    hosts: Vec<Host>,
    models: Vec<Model>,
    events: BinaryHeap<Reverse<(Micros, Event)>>,
    /// Models with progress, whose queues may advance.
    progressed: Vec<usize>,
    /// The earliest decision that is scheduled.
    decides_at: Option<Micros>,
    /// Arrival times of the requests.
    arrived: Vec<Micros>,
    /// Requests that came while no replica was ready.
    cold: Vec<bool>,
    /// Whether the leader decides every 200 ms; else only when something has changed that it decides by.
    always: bool,
    start: Micros,
    end: Micros,
    waiting: usize,
    open: usize,
    steps: u64,
}

/// Replays the arrivals, which are sorted by time.
///
/// # Errors
/// For settings that the coordinators' table refuses, and for a run that takes too many steps.
pub fn simulate(fleet: &Fleet, traffic: &[Arrival], policy: Policy) -> Result<Outcome, Error> {
    run(fleet, traffic, policy, false)
}

/// `always`: the leader decides every 200 ms.
pub(crate) fn run(
    fleet: &Fleet,
    traffic: &[Arrival],
    policy: Policy,
    always: bool,
) -> Result<Outcome, Error> {
    let mut run = Run {
        fleet,
        traffic,
        policy,
        arrivals: vec![Vec::new(); fleet.models.len()],
        costs: fleet.models.iter().map(|model| (model.costs, f64::from(model.settings.priority))).collect(),
        leader: Leader::new(fleet)?,
        ordered: 0,
        hosts: fleet.nodes.iter().map(|node| Host::new(node, fleet)).collect(),
        models: vec![Model::default(); fleet.models.len()],
        events: BinaryHeap::new(),
        progressed: Vec::new(),
        decides_at: None,
        arrived: vec![0; traffic.len()],
        cold: vec![false; traffic.len()],
        always,
        start: 0,
        end: 0,
        waiting: 0,
        open: traffic.len(),
        steps: 0,
    };
    run.warm_up()?;
    run.replay()?;
    Ok(run.outcome())
}

impl Run<'_> {
    fn schedule(&mut self, at: Micros, event: Event) {
        self.events.push(Reverse((at, event)));
    }

    /// Has the leader decide at `at` or before.
    fn decide_by(&mut self, at: Micros) {
        if self.decides_at.is_none_or(|earliest| at < earliest) {
            self.decides_at = Some(at);
            self.schedule(at, Event::Decide);
        }
    }

    fn timer(&mut self, node: usize, timer: Option<Timer>) {
        if let Some(Timer { model, epoch, at }) = timer {
            self.schedule(at, Event::Stage(node, model, epoch));
        }
    }

    /// Runs until the replicas that stay ready are.
    fn warm_up(&mut self) -> Result<(), Error> {
        let mut now = 0;
        (0..self.hosts.len()).for_each(|node| self.fetch(0, node));
        self.decide_by(next_decision(0));
        let is_ready = |run: &Self| {
            run.fleet.models.iter().enumerate().all(|(model, found)| {
                let ready = run.hosts.iter().filter(|host| host.models[model].stage == Stage::Ready);
                ready.count() >= usize::from(found.settings.min)
            })
        };
        while now < WARM_UP && !is_ready(self) {
            let Some(Reverse((at, event))) = self.events.pop() else { break };
            now = at;
            self.handle(now, event)?;
        }
        // In the middle between two decisions.
        self.start = next_decision(now) + EVERY / 2;
        while self.events.peek().is_some_and(|Reverse((at, _))| *at < self.start) {
            let Some(Reverse((at, event))) = self.events.pop() else { break };
            self.handle(at, event)?;
        }
        for host in &mut self.hosts {
            host.begin_counts(self.start);
        }
        self.models.fill(Model::default());
        for (request, arrival) in self.traffic.iter().enumerate() {
            self.arrived[request] = self.start.saturating_add(arrival.at);
            self.arrivals[arrival.model].push(self.arrived[request]);
        }
        Ok(())
    }

    fn replay(&mut self) -> Result<(), Error> {
        let mut next = 0;
        let mut now = self.start;
        while self.open > 0 {
            let event = self.events.peek().map(|Reverse((at, ..))| *at);
            match self.arrived.get(next) {
                Some(at) if event.is_none_or(|event| *at < event) => {
                    now = *at;
                    self.arrive(now, next);
                    next += 1;
                }
                _ => {
                    let Some(Reverse((at, event))) = self.events.pop() else { break };
                    now = at;
                    self.handle(now, event)?;
                }
            }
        }
        self.hosts.iter_mut().for_each(|host| host.end_counts(now));
        self.end = now;
        Ok(())
    }

    fn arrive(&mut self, now: Micros, request: usize) {
        let model = self.traffic[request].model;
        let found = &mut self.models[model];
        found.arrived += 1;
        if found.refused_at.is_some_and(|at| now < at + REFUSED_FOR) {
            self.refuse(now, request, |refused| &mut refused.no_place);
            return;
        }
        if self.waiting >= MAX_QUEUED {
            self.refuse(now, request, |refused| &mut refused.queue_full);
            return;
        }
        let ready = |host: &Host| host.models[model].stage == Stage::Ready;
        self.cold[request] = !self.hosts.iter().any(ready);
        let found = &mut self.models[model];
        if found.queue.is_empty() && next_decision(found.emptied_at) <= now {
            found.waits_since = None;
        }
        found.queue.push_back(request);
        self.waiting += 1;
        self.pump(now, model);
        self.pump_progressed(now);
        if self.models[model].queue.back() == Some(&request) {
            self.schedule(now.saturating_add(micros(self.fleet.load_wait)), Event::Expire(request));
            self.decide_by(next_decision(now));
        }
    }

    fn refuse(&mut self, now: Micros, request: usize, reason: impl Fn(&mut Refused) -> &mut u64) {
        let model = &mut self.models[self.traffic[request].model];
        *reason(&mut model.refused) += 1;
        if self.cold[request] {
            model.waits.push(seconds(now - self.arrived[request]));
        }
        self.open -= 1;
    }

    /// Sends requests to the replicas with the least prefill in hand.
    fn pump(&mut self, now: Micros, model: usize) {
        while let Some(&request) = self.models[model].queue.front() {
            for node in 0..self.hosts.len() {
                let host = &self.hosts[node];
                if host.models[model].stage == Stage::Ready && host.device.running(model) > 0 {
                    self.advance(now, node);
                }
            }
            let loads: Loads<'_> = &self.costs;
            let open = self.hosts.iter().enumerate().filter_map(|(node, host)| {
                let running = host.device.running(model);
                let ready = host.models[model].stage == Stage::Ready && running < MAX_SEQUENCES;
                let backlog = if ready { host.device.backlog(model, loads) } else { BACKLOG };
                (backlog < BACKLOG).then_some((backlog, running, node))
            });
            let least = open.min_by(|a, b| a.0.total_cmp(&b.0).then_with(|| (a.1, a.2).cmp(&(b.1, b.2))));
            let Some((.., node)) = least else { return };
            self.models[model].queue.pop_front();
            self.models[model].emptied_at = now;
            self.waiting -= 1;
            if self.cold[request] {
                self.models[model].waits.push(seconds(now - self.arrived[request]));
            }
            let Arrival { prompt, cached, output, .. } = self.traffic[request];
            let (prompt, output) = (f64::from(prompt), f64::from(output));
            let sequence = Sequence {
                request,
                prompt: (prompt - f64::from(cached)).max(1.0),
                output,
                depths: ((prompt + f64::from(cached)) / 2.0, prompt + output / 2.0),
            };
            self.advance(now, node);
            self.hosts[node].device.submit(model, sequence);
            self.serve(node);
        }
    }

    /// Advances the queues of models with progress.
    fn pump_progressed(&mut self, now: Micros) {
        while let Some(model) = self.progressed.pop() {
            self.pump(now, model);
        }
    }

    /// Takes the progress of a node's requests until now.
    fn advance(&mut self, now: Micros, node: usize) {
        let progress = self.hosts[node].device.advance(now, &self.costs);
        if !progress.is_empty() {
            self.serve(node);
        }
        for (model, progress) in progress {
            if !self.models[model].queue.is_empty() {
                self.progressed.push(model);
            }
            match progress {
                Progress::Started(request) => {
                    self.models[model].ttft.push(seconds(now - self.arrived[request]));
                    self.models[model].answered += 1;
                }
                Progress::Ended(_) => {
                    self.models[model].ended += 1;
                    self.open -= 1;
                    let host = &mut self.hosts[node];
                    host.models[model].idle_since = now;
                    if host.device.running(model) == 0 {
                        let before = host.used;
                        host.drained(now, self.fleet, model);
                        if host.used != before {
                            let timer = host.reconcile(now, &self.fleet.nodes[node], self.fleet);
                            self.timer(node, timer);
                            self.decide_by(next_decision(now));
                        }
                        self.sleep_later(now, model);
                    }
                    self.leader.ended(now, model, self.models[model].ended);
                    if self.waiting > 0 || self.leader.lacks_replicas(self.fleet) {
                        self.decide_by(next_decision(now));
                    }
                }
            }
        }
    }

    /// Schedules the decision that may put an idle replica to sleep.
    fn sleep_later(&mut self, idle_since: Micros, model: usize) {
        let idle_s = self.fleet.models[model].settings.idle_s;
        if idle_s > 0 {
            let due = idle_since.saturating_add(Micros::from(idle_s) * 1_000_000);
            self.decide_by(next_decision(due.saturating_sub(1)));
        }
    }

    /// Schedules the next progress of a node's requests.
    fn serve(&mut self, node: usize) {
        let host = &mut self.hosts[node];
        host.service_epoch = host.service_epoch.wrapping_add(1);
        if let Some(at) = host.device.next(&self.costs) {
            let epoch = host.service_epoch;
            self.schedule(at, Event::Service(node, epoch));
        }
    }

    fn handle(&mut self, now: Micros, event: Event) -> Result<(), Error> {
        self.steps += 1;
        if self.steps > MAX_STEPS {
            return Err(Error::TooLong { limit: MAX_STEPS });
        }
        match event {
            Event::Decide if self.decides_at == Some(now) => {
                self.decides_at = None;
                self.decide(now)?;
            }
            Event::Service(node, epoch) if self.hosts[node].service_epoch == epoch => {
                self.advance(now, node);
                self.serve(node);
            }
            Event::Stage(node, model, epoch) if self.hosts[node].models[model].epoch == epoch => {
                let (fleet, host) = (self.fleet, &mut self.hosts[node]);
                match host.models[model].stage {
                    Stage::Fetching => {
                        host.fetched(now, &fleet.nodes[node], fleet, model);
                        // Other nodes may wait for a holder.
                        (0..self.hosts.len()).for_each(|node| self.fetch(now, node));
                    }
                    Stage::Loading { .. } => {
                        host.loaded(now, fleet, model);
                        self.sleep_later(now, model);
                        self.pump(now, model);
                    }
                    _ => {}
                }
                let timer = self.hosts[node].reconcile(now, &fleet.nodes[node], fleet);
                self.timer(node, timer);
                self.decide_by(next_decision(now));
            }
            Event::Expire(request) => self.expire(now, request),
            _ => {}
        }
        self.pump_progressed(now);
        Ok(())
    }

    /// Refuses a request that waits for a load, or whose time is over.
    fn expire(&mut self, now: Micros, request: usize) {
        let model = self.traffic[request].model;
        let Some(at) = self.models[model].queue.iter().position(|waiting| *waiting == request) else {
            return;
        };
        let deadline = self.arrived[request].saturating_add(DEADLINE);
        let loads = !self.hosts.iter().any(|host| host.models[model].stage == Stage::Ready);
        if now < deadline && !loads {
            return self.schedule(deadline, Event::Expire(request));
        }
        self.decide_by(next_decision(now));
        self.models[model].queue.remove(at);
        self.models[model].emptied_at = now;
        self.waiting -= 1;
        match loads {
            true => self.refuse(now, request, |refused| &mut refused.load_wait),
            false => self.refuse(now, request, |refused| &mut refused.deadline),
        }
    }

    /// Has a node without some model's files get them from a node that has them.
    fn fetch(&mut self, now: Micros, node: usize) {
        let Some(model) = self.hosts[node].next_fetch() else { return };
        let holders = (0..self.hosts.len()).filter(|holder| self.hosts[*holder].has_files(model));
        let Some(holder) = holders.min_by_key(|holder| (self.hosts[*holder].link_free, *holder)) else {
            return;
        };
        let link = self.fleet.nodes[node].link.min(self.fleet.nodes[holder].link);
        let begins = now.max(self.hosts[node].link_free).max(self.hosts[holder].link_free);
        let takes = micros(self.fleet.models[model].costs.bytes as f64 / link).max(1);
        let at = begins.saturating_add(takes);
        (self.hosts[node].link_free, self.hosts[holder].link_free) = (at, at);
        let timer = self.hosts[node].fetch(now, model, at);
        self.timer(node, Some(timer));
    }

    /// A round of the leader: orders, reports, demand and changes.
    fn decide(&mut self, now: Micros) -> Result<(), Error> {
        if self.ordered != self.leader.applied() {
            self.ordered = self.leader.applied();
            self.order(now);
        }
        let queue = |model: &mut Model| {
            let waits = !model.queue.is_empty();
            model.waits_since = model.waits_since.filter(|_| waits).or(waits.then_some(now));
            Queue { requests: model.queue.len(), waited: now - model.waits_since.unwrap_or(now) }
        };
        let queued: Vec<Queue> = self.models.iter_mut().map(queue).collect();
        let next_use = |model: usize| {
            let arrivals = &self.arrivals[model];
            let next = arrivals.get(arrivals.partition_point(|at| *at <= now));
            // Above the part of a value that is for the time since the last use, which is at most 1.
            next.map_or(0.0, |next| 1e15 / (1.0 + seconds(next - now)))
        };
        let ranking = match self.policy {
            Policy::Uses => Ranking::Uses,
            Policy::Lru => Ranking::Recency,
            Policy::Belady => Ranking::NextUse(&next_use),
        };
        let moved = self.leader.decide(now, self.fleet, &self.hosts, &queued, &ranking)?;
        for change in &moved {
            match *change {
                Moved::Placed => {}
                Moved::Removed { model, idle: true } => self.models[model].sleeps += 1,
                Moved::Removed { model, idle: false } => self.models[model].evictions += 1,
                Moved::Refused(model) => {
                    self.models[model].emptied_at = now;
                    for request in std::mem::take(&mut self.models[model].queue) {
                        self.waiting -= 1;
                        self.refuse(now, request, |refused| &mut refused.no_place);
                    }
                }
            }
        }
        for model in 0..self.models.len() {
            let refuses = self.leader.refuses(model);
            let found = &mut self.models[model];
            found.refused_at = refuses.then(|| found.refused_at.unwrap_or(now));
        }
        if !moved.is_empty() || self.always {
            self.decide_by(next_decision(now));
        }
        for model in 0..self.models.len() {
            let ready = self.hosts.iter().filter(|host| host.models[model].stage == Stage::Ready);
            let idle = ready.filter(|host| host.device.running(model) == 0);
            let idle: Vec<Micros> = idle.map(|host| host.models[model].idle_since).collect();
            // Those that are overdue wait for something else, such as another replica.
            let after = Micros::from(self.fleet.models[model].settings.idle_s) * 1_000_000;
            let next = idle.into_iter().filter(|since| since + after > now).min();
            next.into_iter().for_each(|since| self.sleep_later(since, model));
        }
        Ok(())
    }

    /// Has the nodes follow the table.
    fn order(&mut self, now: Micros) {
        for model in 0..self.models.len() {
            let mut wanted = vec![false; self.hosts.len()];
            self.leader.places(model).for_each(|node| wanted[node] = true);
            for (node, wanted) in wanted.into_iter().enumerate() {
                if self.hosts[node].models[model].wanted != wanted {
                    self.advance(now, node);
                    self.hosts[node].order(now, self.fleet, model, wanted);
                    self.serve(node);
                    self.fetch(now, node);
                }
            }
        }
        for node in 0..self.hosts.len() {
            let timer = self.hosts[node].reconcile(now, &self.fleet.nodes[node], self.fleet);
            self.timer(node, timer);
        }
    }

    fn outcome(mut self) -> Outcome {
        let lasted = (self.end - self.start).max(1);
        let share = |time: Micros| time as f64 / lasted as f64;
        let (mut all, mut cost) = (Vec::new(), 0.0);
        let mut models = Vec::new();
        for (index, (model, found)) in self.models.iter_mut().zip(&self.fleet.models).enumerate() {
            all.extend(&model.ttft);
            let waited = model.ttft.iter().fold(0.0, |sum, ttft| sum + ttft);
            let of_model = waited + model.refused.total() as f64 * seconds(DEADLINE);
            cost += of_model;
            let counts = || self.hosts.iter().map(|host| host.counts[index]);
            let held = self.hosts.iter().zip(&self.fleet.nodes);
            let ready = held.map(|(host, node)| (node.name.to_string(), share(host.models[index].ready_for)));
            let mut places: Vec<(String, f64)> = ready.filter(|(_, share)| *share > 0.0).collect();
            places.sort_by(|a, b| b.1.total_cmp(&a.1));
            models.push(ModelOutcome {
                model: found.name.to_string(),
                requests: model.arrived,
                answered: model.answered,
                refused: model.refused,
                ttft: Percentiles::of(&mut model.ttft),
                waited: model.waits.len() as u64,
                wait: Percentiles::of(&mut model.waits),
                loads: counts().map(|counts| counts.loads).sum(),
                wakes: counts().map(|counts| counts.wakes).sum(),
                evictions: model.evictions,
                sleeps: model.sleeps,
                replicas: places.iter().fold(0.0, |sum, (_, share)| sum + share),
                places,
                cost: of_model,
            });
        }
        let node = |(host, node): (&Host, &crate::fleet::Node)| NodeOutcome {
            node: node.name.to_string(),
            busy: share(host.device.busy),
            loading: share(host.loading_for),
            memory: node.memory,
            mean_used: (host.used_for / lasted as f64) as u64,
            most_used: host.most_used,
            loads: host.counts.iter().map(|counts| counts.loads + counts.wakes).sum(),
        };
        let sum = |count: fn(&ModelOutcome) -> u64| models.iter().map(count).sum();
        Outcome {
            seconds: seconds(self.end - self.start),
            warm_up: seconds(self.start),
            requests: sum(|model| model.requests),
            refused: sum(|model| model.refused.total()),
            ttft: Percentiles::of(&mut all),
            cost: cost / self.traffic.len().max(1) as f64,
            loads: sum(|model| model.loads),
            wakes: sum(|model| model.wakes),
            evictions: sum(|model| model.evictions),
            nodes: self.hosts.iter().zip(&self.fleet.nodes).map(node).collect(),
            models,
            steps: self.steps,
        }
    }
}
