//! Simulation of token streams over workers that die, freeze, refuse and return: the real balancer and prefix
//! index between virtual workers and readers. At every step a reader's tokens are a prefix of an undisturbed
//! run's, and in the end all of them.
//!
//! A reader accepts only tokens of its current attempt, as the front does, where each attempt has its own
//! stream. Here only the attempt's number separates late tokens from current ones.

mod worker_run;

use crate::client::node;
use crate::invariants::Violation;
use kvasir_cluster_tests::random::Random;
use proto::block::HASH_UNIT_TOKENS;
use proto::event::{KvEventBatch, KvSnapshotFrame};
use proto::ids::{Attempt, Epoch, ModelId, NodeId, RequestId};
use proto::worker::LoadReport;
use router::balancer::{Action, AttemptError, Balancer, Output, Policy, RouteRequest, Ticket};
use router::prefix_index::GapRepair;
use router::table::TableChange;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use worker_run::{Call, WorkerMessage, WorkerRun, chain, token};

const NAMES: [&str; 3] = ["w0", "w1", "w2"];
/// Number of groups; requests of a group have a common prefix.
const GROUPS: u64 = 4;
/// Microseconds between two checks of deadlines and leases.
const TICK: u64 = 50_000;
/// Deadline of a request in microseconds.
const LIMIT: u64 = 20_000_000;
/// Microseconds until the healed world must be at rest.
const REST: u64 = 30_000_000;

/// Numbering of attempts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Numbering {
    /// As assigned by the balancer.
    Fresh,
    /// Planted bug: all attempts of a request have the same number.
    Reused,
}

/// Counters of a run.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Report {
    pub(crate) finished: usize,
    pub(crate) refused: usize,
    /// Attempts after the first.
    pub(crate) moved: usize,
    /// Tokens of abandoned attempts.
    pub(crate) late: usize,
    pub(crate) deaths: usize,
    pub(crate) gaps: u64,
}

#[derive(Debug)]
enum Event {
    Clients,
    Tick,
    Trouble,
    Born(NodeId),
    Dial(Epoch),
    Step(Epoch),
    /// A worker receives a request, or the closing of a connection.
    Called(Epoch, u64, Call),
    Closed(Epoch, u64),
    /// The coordinator receives a worker's message.
    Received(u64, NodeId, WorkerMessage),
    Disconnected(u64, NodeId),
    Fetched(u64, NodeId, Epoch, GapRepair),
}

/// The client of a stream.
#[derive(Debug)]
struct Reader {
    number: u64,
    group: u64,
    max_tokens: usize,
    tokens: Vec<u32>,
    /// Connection of its current attempt, and the attempt's number.
    placed: Option<(u64, Attempt)>,
    over: bool,
}

struct World {
    numbering: Numbering,
    random: Random,
    start: Instant,
    now: u64,
    count: u64,
    events: BTreeMap<(u64, u64), Event>,
    balancer: Balancer,
    /// Every run of every worker by epoch, including ended ones.
    runs: BTreeMap<Epoch, WorkerRun>,
    /// The current connection of each worker, and the epoch at its other end.
    sessions: BTreeMap<NodeId, (u64, Epoch)>,
    readers: BTreeMap<Ticket, Reader>,
    /// Arrival of the last frame of each attempt: frames do not overtake each other.
    arrivals: BTreeMap<(u64, Ticket, Attempt), u64>,
    /// Lost batches of events, per 1000.
    lost: u64,
    calm: bool,
    report: Report,
}

/// Runs a seed: `trouble` microseconds with faults, then a quiet period.
pub(crate) fn run(seed: u64, trouble: u64, numbering: Numbering) -> Result<Report, Violation> {
    let mut world = World::new(seed, numbering);
    world.until(trouble)?;
    world.heal();
    world.until(trouble + REST)?;
    world.at_rest()?;
    Ok(world.report)
}

impl World {
    fn new(seed: u64, numbering: Numbering) -> Self {
        let mut world = Self {
            numbering,
            random: Random::new(seed),
            start: Instant::now(),
            now: 0,
            count: 0,
            events: BTreeMap::new(),
            balancer: Balancer::new(Policy { max_inflight: 6, ..Policy::default() }),
            runs: BTreeMap::new(),
            sessions: BTreeMap::new(),
            readers: BTreeMap::new(),
            arrivals: BTreeMap::new(),
            lost: 0,
            calm: false,
            report: Report::default(),
        };
        NAMES.iter().for_each(|name| world.after(0, Event::Born(node(name))));
        for (delay, event) in [(0, Event::Tick), (500_000, Event::Clients), (1_500_000, Event::Trouble)] {
            world.after(delay, event);
        }
        world
    }

    fn after(&mut self, delay: u64, event: Event) {
        self.count += 1;
        self.events.insert((self.now + delay, self.count), event);
    }

    fn instant(&self) -> Instant {
        self.start + Duration::from_micros(self.now)
    }

    fn way(&mut self) -> u64 {
        let max = if !self.calm && self.random.chance(30) { 1_500_000 } else { 4_000 };
        self.random.within(200, max)
    }

    fn until(&mut self, end: u64) -> Result<(), Violation> {
        while let Some(entry) = self.events.first_entry().filter(|entry| entry.key().0 <= end) {
            self.now = entry.key().0;
            let event = entry.remove();
            self.happens(event)?;
        }
        Ok(())
    }

    fn happens(&mut self, event: Event) -> Result<(), Violation> {
        match event {
            Event::Clients => self.clients_act(),
            Event::Tick => {
                self.after(TICK, Event::Tick);
                let actions = self.balancer.tick(self.instant(), self.random.next());
                self.perform(actions);
            }
            Event::Trouble => self.trouble(),
            Event::Born(name) => {
                let epoch = Epoch(self.count);
                self.runs.insert(epoch, WorkerRun::new(name, epoch));
                self.after(1_000, Event::Dial(epoch));
                self.after(2_000, Event::Step(epoch));
            }
            Event::Dial(epoch) => self.dials(epoch)?,
            Event::Step(epoch) => self.steps(epoch),
            Event::Called(epoch, session, call) => {
                let (ticket, attempt) = (call.ticket, call.attempt);
                let declines = !self.calm && self.random.chance(30);
                let Some(run) = self.runs.get_mut(&epoch).filter(|run| run.alive) else { return Ok(()) };
                if declines {
                    let name = run.node.clone();
                    self.send_message(session, name, WorkerMessage::Declined(ticket, attempt));
                } else {
                    run.called(session, call);
                }
            }
            Event::Closed(epoch, session) => {
                let run = self.runs.get_mut(&epoch).filter(|run| run.alive);
                if run.is_some_and(|run| run.closed(session)) {
                    let wait = self.random.within(20_000, 400_000);
                    self.after(wait, Event::Dial(epoch));
                }
            }
            Event::Received(session, name, message) => self.on_message(session, &name, message)?,
            Event::Disconnected(session, name) => self.disconnected(session, &name),
            Event::Fetched(session, name, epoch, need) => self.fetched(session, &name, epoch, need),
        }
        Ok(())
    }

    fn clients_act(&mut self) {
        let next = self.random.within(10_000, 150_000);
        self.after(next, Event::Clients);
        if self.calm {
            return;
        }
        if self.random.chance(30) {
            self.leave();
        }
        let (group, number) = (self.random.below(GROUPS), self.count);
        let max_tokens = self.random.within(1, 60) as usize;
        let request = self.route_request(group, number);
        let submitted = self.balancer.submit(self.instant(), &[Arc::new(request)], self.random.next());
        // Refused if there is no worker.
        let Ok((tickets, actions)) = submitted else { return };
        for ticket in tickets {
            let reader = Reader { number, group, max_tokens, tokens: Vec::new(), placed: None, over: false };
            self.readers.insert(ticket, reader);
        }
        self.perform(actions);
    }

    fn route_request(&self, group: u64, number: u64) -> RouteRequest {
        let units = chain(group, number);
        RouteRequest {
            request_id: RequestId::new(format!("{group}-{number}")).expect("digits and a dash"),
            tenant: "t".into(),
            model: model(),
            operation: None,
            prompt_tokens: (units.len() * HASH_UNIT_TOKENS) as u32,
            chain: units,
            output: Output::default(),
            images: false,
            group: None,
            priority: 0,
            submitted: self.instant(),
            deadline: self.instant() + Duration::from_micros(LIMIT),
            trace: None,
        }
    }

    /// A client cancels.
    fn leave(&mut self) {
        let open: Vec<Ticket> =
            self.readers.iter().filter(|(_, reader)| !reader.over).map(|(ticket, _)| *ticket).collect();
        let Some(&ticket) = self.random.pick(&open) else { return };
        self.ends(ticket);
    }

    fn ends(&mut self, ticket: Ticket) {
        let Some(reader) = self.readers.get_mut(&ticket) else { return };
        (reader.over, reader.placed) = (true, None);
        let actions = self.balancer.ended(self.instant(), ticket, self.random.next());
        self.perform(actions);
    }

    fn perform(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Assign(ticket, assignment) => {
                    let Some(&(session, epoch)) = self.sessions.get(&assignment.node) else { continue };
                    let Some(reader) = self.readers.get_mut(&ticket) else { continue };
                    let attempt = match self.numbering {
                        Numbering::Fresh => assignment.attempt,
                        Numbering::Reused => Attempt(0),
                    };
                    self.report.moved += usize::from(assignment.attempt > Attempt(0));
                    reader.placed = Some((session, attempt));
                    let Reader { number, group, max_tokens, .. } = *reader;
                    let next = reader.tokens.len();
                    let call = Call { ticket, attempt, number, group, next, max_tokens };
                    let way = self.way();
                    self.after(way, Event::Called(epoch, session, call));
                }
                Action::Refuse(ticket, _) => {
                    self.report.refused += 1;
                    if let Some(reader) = self.readers.get_mut(&ticket) {
                        (reader.over, reader.placed) = (true, None);
                    }
                }
                Action::Fetch { node, epoch, need } => {
                    let Some(&(session, _)) = self.sessions.get(&node) else { continue };
                    let way = self.way() + self.way();
                    self.after(way, Event::Fetched(session, node, epoch, need));
                }
                Action::Drop { node, .. } => {
                    if let Some((session, epoch)) = self.sessions.remove(&node) {
                        self.ended(session, epoch);
                    }
                }
            }
        }
    }

    /// A connection ended: its requests are retried elsewhere, and the worker will notice.
    fn ended(&mut self, session: u64, epoch: Epoch) {
        let way = self.way();
        self.after(way, Event::Closed(epoch, session));
        let there = |reader: &Reader| reader.placed.is_some_and(|(on, _)| on == session);
        let moving: Vec<Ticket> =
            self.readers.iter().filter(|(_, reader)| there(reader)).map(|(ticket, _)| *ticket).collect();
        moving.into_iter().for_each(|ticket| self.retries(ticket, AttemptError::Lost));
    }

    fn retries(&mut self, ticket: Ticket, setback: AttemptError) {
        let Some(reader) = self.readers.get_mut(&ticket).filter(|reader| !reader.over) else { return };
        reader.placed = None;
        let class = (!reader.tokens.is_empty()).then(|| worker_run::CLASS.to_owned());
        let actions = self.balancer.retry(self.instant(), ticket, setback, class, self.random.next());
        self.perform(actions);
    }

    fn dials(&mut self, epoch: Epoch) -> Result<(), Violation> {
        let session = self.count;
        let Some(run) = self.runs.get_mut(&epoch).filter(|run| run.alive) else { return Ok(()) };
        if run.frozen > self.now {
            let wait = run.frozen - self.now;
            self.after(wait, Event::Dial(epoch));
            return Ok(());
        }
        let (name, join) = (run.node.clone(), TableChange::Join(run.register()));
        let has_later =
            self.runs.values().any(|other| other.node == name && other.epoch > epoch && other.joined);
        match self.balancer.change(self.instant(), join, self.random.next()) {
            Ok(_) if has_later => return Err(Violation(format!("{name} has joined with an older epoch"))),
            Ok(actions) => {
                if let Some(run) = self.runs.get_mut(&epoch) {
                    run.joins(session);
                }
                let before = self.sessions.insert(name, (session, epoch));
                self.perform(actions);
                if let Some((before, other)) = before {
                    self.ended(before, other);
                }
            }
            // A superseded worker has nothing left to do.
            Err(_) => {
                self.runs.values_mut().filter(|run| run.epoch == epoch).for_each(|run| run.alive = false)
            }
        }
        Ok(())
    }

    fn steps(&mut self, epoch: Epoch) {
        let Some(run) = self.runs.get_mut(&epoch).filter(|run| run.alive) else { return };
        let wait = if run.frozen > self.now { run.frozen - self.now } else { 10_000 };
        let messages = if run.frozen > self.now { Vec::new() } else { run.step(&mut self.random) };
        let name = run.node.clone();
        self.after(wait, Event::Step(epoch));
        for (session, message) in messages {
            self.send_message(session, name.clone(), message);
        }
    }

    /// Sends a worker's message. Its KV events may be lost, duplicated and late.
    fn send_message(&mut self, session: u64, name: NodeId, message: WorkerMessage) {
        let mut due = self.now + self.way();
        match &message {
            WorkerMessage::Started(ticket, attempt)
            | WorkerMessage::Token(ticket, attempt, _)
            | WorkerMessage::Finished(ticket, attempt)
            | WorkerMessage::Declined(ticket, attempt) => {
                let last = self.arrivals.entry((session, *ticket, *attempt)).or_insert(0);
                due = due.max(*last);
                *last = due;
            }
            WorkerMessage::Events(batch) => {
                if self.random.chance(self.lost) {
                    return;
                }
                if self.random.chance(self.lost) {
                    let again = self.way();
                    self.after(
                        again,
                        Event::Received(session, name.clone(), WorkerMessage::Events(batch.clone())),
                    );
                }
            }
            WorkerMessage::Report(_) => {}
        }
        self.after(due - self.now, Event::Received(session, name, message));
    }

    fn on_message(&mut self, session: u64, name: &NodeId, message: WorkerMessage) -> Result<(), Violation> {
        match message {
            WorkerMessage::Report(report) => self.reported(session, name, report),
            WorkerMessage::Events(batch) => self.on_events(session, name, batch),
            WorkerMessage::Started(ticket, attempt) if self.waits(ticket, attempt) => {
                let (now, random) = (self.instant(), self.random.next());
                let actions = self.balancer.started(now, ticket, random);
                self.perform(actions);
            }
            WorkerMessage::Token(ticket, attempt, token) if self.waits(ticket, attempt) => {
                return self.takes(ticket, token);
            }
            WorkerMessage::Finished(ticket, attempt) if self.waits(ticket, attempt) => {
                if let Some(Reader { number, max_tokens, tokens, .. }) = self.readers.get(&ticket)
                    && tokens.len() != *max_tokens
                {
                    let tokens = tokens.len();
                    return Err(Violation(format!(
                        "request {number} ends with {tokens} tokens of {max_tokens}"
                    )));
                }
                self.report.finished += 1;
                self.ends(ticket);
            }
            WorkerMessage::Declined(ticket, attempt) if self.waits(ticket, attempt) => {
                self.retries(ticket, AttemptError::Declined);
            }
            WorkerMessage::Token(..) => self.report.late += 1,
            WorkerMessage::Started(..) | WorkerMessage::Finished(..) | WorkerMessage::Declined(..) => {}
        }
        Ok(())
    }

    /// Whether this is the reader's current attempt.
    fn waits(&self, ticket: Ticket, attempt: Attempt) -> bool {
        self.readers.get(&ticket).is_some_and(|reader| reader.placed.is_some_and(|(_, now)| now == attempt))
    }

    fn takes(&mut self, ticket: Ticket, got: u32) -> Result<(), Violation> {
        let Some(Reader { number, tokens, .. }) = self.readers.get_mut(&ticket) else { return Ok(()) };
        if got != token(*number, tokens.len()) {
            let at = tokens.len();
            return Err(Violation(format!("request {number} is told another token {at} than undisturbed")));
        }
        tokens.push(got);
        Ok(())
    }

    fn is_session(&self, session: u64, name: &NodeId) -> bool {
        self.sessions.get(name).is_some_and(|(now, _)| *now == session)
    }

    fn reported(&mut self, session: u64, name: &NodeId, report: LoadReport) {
        if self.is_session(session, name) {
            let actions = self.balancer.load(self.instant(), name, report, self.random.next());
            self.perform(actions);
        }
    }

    fn on_events(&mut self, session: u64, name: &NodeId, batch: KvEventBatch) {
        if self.is_session(session, name)
            && let Ok(Some(action)) = self.balancer.events(name, batch)
        {
            self.perform(vec![action]);
        }
    }

    /// The coordinator detects that a connection is gone.
    fn disconnected(&mut self, session: u64, name: &NodeId) {
        let Some((_, epoch)) = self.sessions.get(name).copied().filter(|(now, _)| *now == session) else {
            return;
        };
        self.sessions.remove(name);
        let leave = TableChange::Leave { node: name.clone(), epoch };
        // Refused if its lease has already ended.
        let left = self.balancer.change(self.instant(), leave, self.random.next());
        self.perform(left.unwrap_or_default());
        self.ended(session, epoch);
    }

    /// A worker's response to a request of the index.
    fn fetched(&mut self, session: u64, name: &NodeId, epoch: Epoch, need: GapRepair) {
        if !self.is_session(session, name) {
            return;
        }
        let fails = !self.calm && self.random.chance(100);
        let forgotten = !self.calm && self.random.chance(200);
        let run = self.runs.get(&epoch).filter(|run| run.alive && run.frozen <= self.now && !fails);
        let Some(run) = run else {
            self.balancer.fetch_failed(name);
            return;
        };
        let action = match need {
            GapRepair::Replay { from } => {
                let missed = (!forgotten).then(|| run.replay(from));
                self.balancer.replayed(name, epoch, missed)
            }
            GapRepair::Snapshot => {
                let frames: Vec<KvSnapshotFrame> = run.snapshot().into_parts().collect();
                frames.into_iter().try_fold(None, |_, frame| self.balancer.snapshot(name, frame))
            }
        };
        self.perform(action.ok().flatten().into_iter().collect());
    }

    fn trouble(&mut self) {
        if self.calm {
            return;
        }
        let next = self.random.within(100_000, 900_000);
        self.after(next, Event::Trouble);
        let alive: Vec<Epoch> = self.runs.values().filter(|run| run.alive).map(|run| run.epoch).collect();
        let Some(&epoch) = self.random.pick(&alive) else { return };
        let (kind, moment) = (self.random.below(10), self.random.within(50_000, 2_000_000));
        let Some(run) = self.runs.get_mut(&epoch) else { return };
        let (name, session) = (run.node.clone(), run.session);
        match kind {
            // The worker dies; the connection closes soon, late or never.
            0..3 => {
                run.alive = false;
                self.report.deaths += 1;
                self.after(moment, Event::Born(name.clone()));
                if let Some(session) = session
                    && self.random.chance(700)
                {
                    let way = self.way();
                    self.after(way, Event::Disconnected(session, name));
                }
            }
            3..6 => run.frozen = self.now + moment * 3,
            // A second instance starts while the first one is only frozen.
            6 => {
                run.frozen = self.now + moment * 3;
                self.after(moment, Event::Born(name));
            }
            7 => {
                if let Some(session) = session {
                    self.after(0, Event::Disconnected(session, name));
                }
            }
            _ => self.lost = *self.random.pick(&[0, 50, 200]).unwrap_or(&0),
        }
    }

    fn heal(&mut self) {
        (self.calm, self.lost) = (true, 0);
        self.runs.values_mut().for_each(|run| run.frozen = 0);
    }

    /// After the faults: no request waits, nothing is reserved, and the index matches the workers' caches.
    fn at_rest(&mut self) -> Result<(), Violation> {
        // A lost last event is detected with the next one.
        let epochs: Vec<Epoch> = self.runs.keys().copied().collect();
        for epoch in epochs {
            self.runs.get_mut(&epoch).into_iter().for_each(WorkerRun::stores_one_more);
        }
        self.until(self.now + REST)?;
        let rest = |holds: bool, problem: &str| match holds {
            true => Ok(()),
            false => Err(Violation(format!("after everything has healed {problem}"))),
        };
        rest(self.readers.values().all(|reader| reader.over), "somebody waits for ever")?;
        rest(self.balancer.inflight() == 0 && self.balancer.queue().requests == 0, "something is booked")?;
        let views = self.balancer.workers(self.instant());
        rest(views.len() == NAMES.len(), "a worker is missing")?;
        let mut expected = Vec::new();
        for view in views {
            let run = self.runs.get(&view.member.register.epoch);
            let (Some(run), Some(stream)) = (run, view.stream) else {
                return rest(false, "an epoch without a process is a member");
            };
            self.report.gaps += stream.gaps;
            rest(!stream.behind && stream.applied == run.last_event(), "events of a worker are missing")?;
            rest(view.inflight == 0 && view.pending_tokens == 0, "a worker seems busy")?;
            expected.extend((0..GROUPS).map(|group| (run.node.clone(), group, run.deepest(group))));
        }
        for (name, group, units) in expected {
            let hint = self.hint(&name, group);
            rest(
                hint == Some(units * HASH_UNIT_TOKENS as u32),
                &format!("{name} holds {units} units of {group}, not {hint:?}"),
            )?;
        }
        Ok(())
    }

    /// Prompt tokens of a group that a worker is expected to hold.
    fn hint(&mut self, name: &NodeId, group: u64) -> Option<u32> {
        let others = || NAMES.iter().map(|name| node(name)).filter(|other| other != name);
        self.drain(others(), true);
        self.count += 1;
        let request = self.route_request(group, self.count);
        let (tickets, actions) =
            self.balancer.submit(self.instant(), &[Arc::new(request)], self.random.next()).ok()?;
        let hint = actions.iter().find_map(|action| match action {
            Action::Assign(_, assignment) if assignment.node == *name => Some(assignment.predicted),
            _ => None,
        });
        for ticket in tickets {
            self.balancer.ended(self.instant(), ticket, self.random.next());
        }
        self.drain(others(), false);
        hint
    }

    fn drain(&mut self, nodes: impl Iterator<Item = NodeId>, draining: bool) {
        for node in nodes {
            let drain = TableChange::Drain { node, draining };
            let drained = self.balancer.change(self.instant(), drain, self.random.next());
            assert_eq!(drained, Ok(Vec::new()), "nobody waits, and all are members");
        }
    }
}

fn model() -> ModelId {
    ModelId::new("m").unwrap_or_else(|error| panic!("{error}"))
}
