//! A group of coordinators in a virtual world with simulated time and seeded randomness.

use crate::bugs::Bug;
use crate::client::{Client, ClientRequest, History, node};
use crate::disk::Disk;
use crate::invariants::{Invariants, Violation};
use crate::network::Network;
use crate::operator::Operator;
use consensus::Incarnation;
use consensus::core::{Core, Done, Outbound, RaftRole, ReceiveError, Settings};
use consensus::message::{Frame, GroupId};
use consensus::storage::{Identity, Loaded};
use consensus::table::{GroupMember, Level};
use kvasir_cluster_tests::linearizable::linearizable;
use kvasir_cluster_tests::random::Random;
use proto::ids::NodeId;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

const GROUP: GroupId = GroupId(77);
/// Microseconds per tick of a correct clock.
const TICK: u64 = 50_000;
/// Microseconds until everything is at rest after healing: crashed members are back, calls are completed or
/// given up, snapshots are transferred.
const REST: u64 = 10_000_000;
/// All possible coordinators; those beyond the founders can be added.
const NAMES: [&str; 6] = ["c0", "c1", "c2", "c3", "c4", "c5"];

/// Parameters of a simulation.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    /// Microseconds with faults. After that everything heals and must come to rest.
    pub(crate) trouble: u64,
    pub(crate) bug: Option<Bug>,
}

/// Counters of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Report {
    /// Completed calls of clients.
    pub(crate) answered: usize,
    /// Agreed entries.
    pub(crate) entries: usize,
    pub(crate) crashes: usize,
    pub(crate) wipes: usize,
    pub(crate) snapshots: usize,
    pub(crate) terms: u64,
}

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A member's clock ticks; the number is the process's start count.
    Tick(NodeId, u64),
    Packet {
        from: NodeId,
        to: NodeId,
        bytes: Vec<u8>,
    },
    Clients,
    Operator,
    Trouble,
    Start(NodeId),
}

/// A coordinator's machine.
pub(crate) struct Machine {
    pub(crate) incarnation: Incarnation,
    disk: Disk,
    pub(crate) core: Option<Core>,
    /// Number of starts of its process.
    starts: u64,
    /// Length of its tick in microseconds.
    tick: u64,
    /// The process is frozen until this time.
    frozen: u64,
}

pub(crate) struct World {
    plan: Plan,
    pub(crate) now: u64,
    pub(crate) random: Random,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    count: u64,
    pub(crate) machines: BTreeMap<NodeId, Machine>,
    network: Network,
    clients: Vec<Client>,
    history: History,
    operator: Option<Operator>,
    pub(crate) invariants: Invariants,
    /// True after healing: no further faults.
    pub(crate) calm: bool,
    report: Report,
}

pub(crate) fn run(plan: Plan) -> Result<Report, Violation> {
    let mut world = World::new(plan);
    let end = world.plan.trouble;
    world.until(end)?;
    world.heal();
    world.until(end + REST)?;
    world.at_rest()?;
    for (register, calls) in &world.history.calls {
        if !linearizable(calls) {
            return Err(Violation(format!("{register:?} is not linearizable: {calls:?}")));
        }
    }
    world.report.entries = world.invariants.agreed().len();
    world.report.answered = world.history.done;
    Ok(world.report)
}

impl World {
    fn new(plan: Plan) -> Self {
        let mut random = Random::new(plan.seed);
        let founders = *random.pick(&[1, 3, 3, 3, 5]).unwrap_or(&3);
        let seats: Vec<GroupMember> =
            NAMES[..founders].iter().map(|name| seat(&node(name), Incarnation(1))).collect();
        let mut machines = BTreeMap::new();
        for (at, name) in NAMES.iter().map(|name| node(name)).enumerate() {
            let identity = Identity { group: GROUP, node: name.clone(), incarnation: Incarnation(1) };
            let loaded = if at < founders {
                Loaded::founded(identity, seats.clone()).unwrap_or_else(|error| panic!("{error}"))
            } else {
                Loaded::joining(identity)
            };
            // Clocks are wrong by up to 20%.
            let tick = random.within(TICK * 4 / 5, TICK * 6 / 5);
            let disk = Disk::new(loaded);
            let incarnation = Incarnation(1);
            machines.insert(name, Machine { incarnation, disk, core: None, starts: 0, tick, frozen: 0 });
        }
        let report = Report { answered: 0, entries: 0, crashes: 0, wipes: 0, snapshots: 0, terms: 0 };
        let mut world = Self {
            plan,
            now: 0,
            random,
            events: BinaryHeap::new(),
            count: 0,
            machines,
            network: Network::default(),
            clients: (1..=3).map(Client::new).collect(),
            history: History::default(),
            operator: Some(Operator::new()),
            invariants: Invariants::new(seats, 1),
            calm: false,
            report,
        };
        for name in NAMES {
            world.at(0, Event::Start(node(name)));
        }
        for (time, event) in [(1_000, Event::Clients), (2_000, Event::Operator), (1_500_000, Event::Trouble)]
        {
            world.at(time, event);
        }
        world
    }

    fn at(&mut self, time: u64, event: Event) {
        self.count += 1;
        self.events.push(Reverse((time, self.count, event)));
    }

    fn until(&mut self, end: u64) -> Result<(), Violation> {
        while let Some(Reverse((time, _, event))) = self.events.pop() {
            if time > end {
                self.at(time, event);
                break;
            }
            self.now = time;
            self.happens(event)?;
        }
        Ok(())
    }

    fn happens(&mut self, event: Event) -> Result<(), Violation> {
        if let Event::Tick(name, _) | Event::Packet { to: name, .. } = &event
            && let Some(machine) = self.machines.get(name)
            && machine.frozen > self.now
        {
            let until = machine.frozen;
            self.at(until, event);
            return Ok(());
        }
        match event {
            Event::Start(name) => self.start(&name),
            Event::Tick(name, starts) => {
                let now = self.now;
                let Some(machine) = self.machines.get_mut(&name).filter(|m| m.starts == starts) else {
                    return Ok(());
                };
                let Some(core) = machine.core.as_mut() else { return Ok(()) };
                core.tick();
                let next = now + machine.tick;
                self.at(next, Event::Tick(name.clone(), starts));
                self.work(&name)
            }
            Event::Packet { from, to, bytes } => self.arrives(&from, &to, &bytes),
            Event::Clients => self.clients_act(),
            Event::Operator => {
                let mut operator = self.operator.take();
                let changed = operator.as_mut().and_then(|operator| operator.act(self));
                self.operator = operator;
                let pause = self.random.within(100_000, 400_000);
                self.at(self.now + pause, Event::Operator);
                changed.map_or(Ok(()), |name| self.work(&name))
            }
            Event::Trouble => {
                self.trouble();
                Ok(())
            }
        }
    }

    fn clients_act(&mut self) -> Result<(), Violation> {
        let next = self.now + self.random.within(20_000, 60_000);
        self.at(next, Event::Clients);
        let names: Vec<NodeId> = self.machines.keys().cloned().collect();
        for at in 0..self.clients.len() {
            let Some(name) = self.random.pick(&names).cloned() else { continue };
            let (client, now) = (&mut self.clients[at], self.now);
            let table = self.invariants.table();
            let request = client.act(now, &mut self.random, table, &mut self.history);
            let Some(machine) = self.machines.get_mut(&name).filter(|m| m.frozen <= now) else { continue };
            let (Some(request), Some(core)) = (request, machine.core.as_mut()) else { continue };
            // A refused request is retried elsewhere.
            match request {
                ClientRequest::Propose(entry) => {
                    let _tried_again = core.propose(&entry);
                }
                ClientRequest::Read(token) if self.plan.bug == Some(Bug::StaleRead) => {
                    self.clients[at].read(now, token, core.table(), &mut self.history);
                }
                ClientRequest::Read(token) => {
                    let _tried_again = core.read_index(token);
                }
            }
            self.work(&name)?;
        }
        Ok(())
    }

    fn arrives(&mut self, from: &NodeId, to: &NodeId, bytes: &[u8]) -> Result<(), Violation> {
        let Some(core) = self.machines.get_mut(to).and_then(|m| m.core.as_mut()) else { return Ok(()) };
        let frame = Frame::from_bytes(bytes).map_err(|error| Violation(format!("frame: {error}")))?;
        match core.receive(from, frame) {
            // Members send to an ended incarnation until they learn of the new one.
            Ok(()) | Err(ReceiveError::NotForMe { .. }) => {}
            Err(error) => return Err(Violation(format!("{to} refuses what a member sent: {error}"))),
        }
        self.work(to)
    }

    /// Performs a core's actions, possibly not to the end.
    fn work(&mut self, name: &NodeId) -> Result<(), Violation> {
        // The process may crash before a write, before its sync, or before the actions that depend on it.
        let mut dies = (!self.calm && self.random.chance(2)).then(|| self.random.below(3));
        loop {
            let Some(machine) = self.machines.get_mut(name) else { return Ok(()) };
            let Some(core) = machine.core.as_mut() else { return Ok(()) };
            let batch = core.batch().map_err(|error| Violation(format!("{name}: {error}")))?;
            let Some(mut batch) = batch else { return Ok(()) };
            let (early, write) = (batch.early(), batch.write().clone());
            self.invariants.writes(name, &write)?;
            self.report.snapshots += usize::from(write.compact.is_some());
            if dies == Some(0) {
                self.crash(name);
                return Ok(());
            }
            if !write.is_empty() {
                machine.disk.write(write);
                if dies.take_if(|dies| *dies == 1).is_some() {
                    self.send(name, early);
                    self.crash(name);
                    return Ok(());
                }
                if self.plan.bug != Some(Bug::SkipSync) {
                    machine.disk.sync();
                }
            }
            let done = batch.persisted().map_err(|error| Violation(format!("{name}: {error}")))?;
            self.report.terms = self.report.terms.max(core.status().term);
            self.invariants.stepped(core, &done.answers)?;
            if dies == Some(2) && !done.send.is_empty() {
                self.crash(name);
                return Ok(());
            }
            self.send(name, early);
            self.deliver(name, done);
        }
    }

    fn deliver(&mut self, name: &NodeId, done: Done) {
        let Some(core) = self.machines.get(name).and_then(|m| m.core.as_ref()) else { return };
        for client in &mut self.clients {
            for answer in &done.answers {
                client.answered(self.now, answer, &mut self.history);
            }
            for &token in &done.reads {
                client.read(self.now, token, core.table(), &mut self.history);
            }
        }
        if let Some(operator) = &mut self.operator {
            done.answers.iter().for_each(|answer| operator.answered(answer));
        }
        self.send(name, done.send);
    }

    fn send(&mut self, from: &NodeId, frames: Vec<Outbound>) {
        for Outbound { to, frame } in frames {
            if self.plan.bug.is_some_and(|bug| bug.drops(&frame)) {
                continue;
            }
            let Ok(bytes) = frame.to_bytes() else { panic!("a frame is too long") };
            for delay in self.network.send(&mut self.random, from, &to) {
                let packet = Event::Packet { from: from.clone(), to: to.clone(), bytes: bytes.clone() };
                self.at(self.now + delay, packet);
            }
        }
    }

    fn start(&mut self, name: &NodeId) -> Result<(), Violation> {
        let now = self.now;
        let Some(machine) = self.machines.get_mut(name).filter(|m| m.core.is_none()) else { return Ok(()) };
        machine.starts += 1;
        let mut loaded = machine.disk.load();
        if machine.starts > 1
            && let Some(bug) = self.plan.bug
        {
            bug.on_restart(&mut loaded, self.invariants.agreed());
        }
        let settings = Settings {
            snapshot_after: 25,
            keep_entries: 5,
            chunk_bytes: 100,
            message_bytes: 2_000,
            ..Settings::default()
        };
        self.invariants.restarted(loaded.identity.member());
        let seed = self.random.next();
        let core = Core::start(settings, loaded, seed);
        machine.core = Some(core.map_err(|error| Violation(format!("{name} does not start: {error}")))?);
        let (first, starts) = (now + self.random.below(machine.tick), machine.starts);
        self.at(first, Event::Tick(name.clone(), starts));
        self.work(name)
    }

    /// The process crashes and restarts after a while.
    fn crash(&mut self, name: &NodeId) {
        self.report.crashes += 1;
        let Some(machine) = self.machines.get_mut(name) else { return };
        machine.core = None;
        machine.disk.crash(&mut self.random);
        let back = self.now + self.random.within(50_000, 3_000_000);
        self.at(back, Event::Start(name.clone()));
    }

    /// Deletes a coordinator's data.
    pub(crate) fn wipe(&mut self, name: &NodeId) {
        self.report.wipes += 1;
        self.crash(name);
        let Some(machine) = self.machines.get_mut(name) else { return };
        machine.incarnation = Incarnation(machine.incarnation.0 + 1);
        let identity = Identity { group: GROUP, node: name.clone(), incarnation: machine.incarnation };
        machine.disk = Disk::new(Loaded::joining(identity));
    }

    fn trouble(&mut self) {
        if self.calm {
            return;
        }
        let next = self.now + self.random.within(200_000, 1_500_000);
        self.at(next, Event::Trouble);
        let names: Vec<NodeId> = self.machines.keys().cloned().collect();
        let Some(one) = self.random.pick(&names).cloned() else { return };
        match self.random.below(10) {
            0 | 1 => self.crash(&one),
            2 => {
                // The leader, if there is one.
                let leads =
                    |m: &Machine| m.core.as_ref().is_some_and(|c| c.status().role == RaftRole::Leader);
                if let Some(leader) = names.iter().find(|name| leads(&self.machines[*name])).cloned() {
                    self.crash(&leader);
                }
            }
            3 | 4 => self.network.change(&mut self.random),
            5 | 6 => self.network.cut(&mut self.random, &names),
            7 => self.network.mend(),
            8 => {
                let until = self.now + self.random.within(100_000, 4_000_000);
                if let Some(machine) = self.machines.get_mut(&one) {
                    machine.frozen = until;
                }
            }
            _ => {
                if let Some(core) = self.machines.get_mut(&one).and_then(|m| m.core.as_mut()) {
                    let _not_leader = core.transfer_leadership(None);
                }
            }
        }
    }

    fn heal(&mut self) {
        self.calm = true;
        self.network.heal();
        let down: Vec<NodeId> =
            self.machines.iter().filter(|(_, m)| m.core.is_none()).map(|(name, _)| name.clone()).collect();
        for name in down {
            self.at(self.now, Event::Start(name));
        }
        self.machines.values_mut().for_each(|machine| machine.frozen = 0);
    }

    /// After the faults every member has caught up and changes succeed again.
    fn at_rest(&mut self) -> Result<(), Violation> {
        let before = self.history.done;
        // Many clients try a non-member first.
        for _ in 0..20 {
            self.until(self.now + 500_000)?;
            if self.history.done > before {
                break;
            }
        }
        if self.history.done == before {
            let status = |(name, m): (&NodeId, &Machine)| {
                let core = m.core.as_ref()?;
                Some(format!("{name} ({:?}): {:?}", m.incarnation, core.status()))
            };
            let all: Vec<String> = self.machines.iter().filter_map(status).collect();
            return Err(Violation(format!("nothing is answered after everything has healed: {all:#?}")));
        }
        let agreed = self.invariants.agreed().len() as u64;
        for (name, machine) in &self.machines {
            let (Some(core), seat) = (&machine.core, self.seat(name)) else {
                return Err(Violation(format!("{name} is down after everything has healed")));
            };
            let seated = seat.is_some_and(|incarnation| incarnation == machine.incarnation);
            let applied = core.status().applied;
            if seated && applied + 30 < agreed {
                return Err(Violation(format!("{name} stays behind: {applied} of {agreed}")));
            }
        }
        for client in &mut self.clients {
            client.give_up(&mut self.history);
        }
        Ok(())
    }

    fn seat(&self, name: &NodeId) -> Option<Incarnation> {
        let standing = self.invariants.table().coordinators().get(name)?;
        standing.seat().map(|seat| seat.incarnation)
    }
}

/// A coordinator's membership entry.
pub(crate) fn seat(name: &NodeId, incarnation: Incarnation) -> GroupMember {
    GroupMember { node: name.clone(), incarnation, quic: "127.0.0.1:1".into(), level: Level::OWN }
}
