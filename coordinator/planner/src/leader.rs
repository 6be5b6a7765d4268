//! The leader of the coordinators: the table and its placement, as in a cluster.

use crate::Error;
use crate::device::{Micros, seconds};
use crate::fleet::{Fleet, Model};
use crate::host::{Held, Host, Stage};
use consensus::Incarnation;
use consensus::table::{
    Change, ClientId, Demand, DeploymentSet, Entry, GroupMember, Level, OpenSession, Outcome, SessionChange,
    Table, VersionIdentified, encode_entry,
};
use group::deployments::decide::{self, View};
use group::deployments::uses::Uses;
use proto::deployment::{ModelFacts, ModelReport, ModelState, ModelsReport};
use proto::ids::{ModelId, NodeId};
use proto::served_model::{BUILT_IN, ModelTask};
use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

/// Interval of the leader's decisions.
pub(crate) const EVERY: Micros = 200_000;
/// Most changes of one decision.
const MAX_CHANGES: usize = 32;

pub(crate) struct Leader {
    table: Table,
    client: ClientId,
    seq: u64,
    hosts: Vec<decide::Host>,
    /// The version's name of each model.
    pub(crate) versions: Vec<ModelId>,
    /// Each version's model.
    models: HashMap<ModelId, usize>,
    nodes: HashMap<NodeId, usize>,
    uses: Uses,
    /// The instant of simulated time 0.
    epoch: Instant,
    queued: BTreeMap<ModelId, usize>,
}

/// The values by which models lose their room.
pub(crate) enum Ranking<'a> {
    Uses,
    Recency,
    NextUse(&'a dyn Fn(usize) -> f64),
}

/// Requests for a model that wait.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Queue {
    pub(crate) requests: usize,
    /// Waiting time of the first of them, as of the leader's decisions.
    pub(crate) waited: Micros,
}

/// A change of the places of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Moved {
    Placed,
    /// It leaves a node, since it was idle there for too long, or since another model needs the room.
    Removed {
        model: usize,
        idle: bool,
    },
    /// It has no place at any node.
    Refused(usize),
}

impl Leader {
    /// A table with the deployed models, whose files are known.
    pub(crate) fn new(fleet: &Fleet) -> Result<Self, Error> {
        let refused = |reason: String| Error::Refused { change: "the first coordinator".to_owned(), reason };
        let node = NodeId::new("coordinator").map_err(|error| refused(error.to_string()))?;
        let quic = "127.0.0.1:1".to_owned();
        let seat = GroupMember { node, incarnation: Incarnation(1), quic, level: Level::OWN };
        let mut table = Table::genesis(1, [seat]);
        let open = encode_entry(&Entry::OpenSession(OpenSession { nonce: 1 }));
        let open = open.map_err(|error| refused(error.to_string()))?;
        let Outcome::Opened(client) = table.apply(2, &open, false).outcome else {
            return Err(refused("no session".to_owned()));
        };
        let host = |node: &crate::fleet::Node| decide::Host {
            name: node.name.clone(),
            labels: node.labels.clone(),
            engine: BUILT_IN.to_owned(),
            draining: false,
            stages: None,
            report: Some(ModelsReport { budget: node.memory, ..ModelsReport::default() }),
        };
        let mut leader = Self {
            table,
            client,
            seq: 0,
            hosts: fleet.nodes.iter().map(host).collect(),
            versions: Vec::new(),
            models: HashMap::new(),
            nodes: fleet.nodes.iter().enumerate().map(|(at, node)| (node.name.clone(), at)).collect(),
            uses: Uses::default(),
            epoch: Instant::now(),
            queued: BTreeMap::new(),
        };
        for (at, Model { name, source, settings, costs }) in fleet.models.iter().enumerate() {
            let (model, settings) = (name.clone(), settings.clone());
            let set = DeploymentSet {
                model: model.clone(),
                settings,
                source: Some(source.clone()),
                reread: false,
                canary: None,
                from: None,
            };
            leader.make(Change::DeploymentSet(Box::new(set)))?;
            // Names of versions begin with the digest: digests differ in their first bytes.
            let mut digest = [0; 32];
            digest[..8].copy_from_slice(&(at as u64).to_le_bytes());
            let facts = ModelFacts {
                digest,
                tokenizer_digest: digest,
                task: ModelTask::Generate,
                context: 0,
                needed_bytes: costs.needed,
            };
            let unnamed = |error: proto::ids::InvalidId| refused(error.to_string());
            let version = model.version(&digest).map_err(unnamed)?;
            let number = leader.table.applied();
            leader.make(Change::VersionIdentified(VersionIdentified { model, version: number, facts }))?;
            leader.models.insert(version.clone(), at);
            leader.versions.push(version.clone());
            for host in &mut leader.hosts {
                let report = ModelReport {
                    model: version.clone(),
                    state: ModelState::Absent,
                    permille: 0,
                    eta_ms: 0,
                    failures: 0,
                    reason: String::new(),
                    bytes: 0,
                    idle_ms: 0,
                    has_files: false,
                    facts: Some(facts),
                };
                host.report.iter_mut().for_each(|all| all.models.push(report.clone()));
            }
        }
        Ok(leader)
    }

    fn make(&mut self, change: Change) -> Result<(), Error> {
        let refused = |reason: String| Error::Refused { change: format!("{change:?}"), reason };
        self.seq += 1;
        let change = SessionChange { client: self.client, seq: self.seq, change: change.clone() };
        let bytes = encode_entry(&Entry::Change(change)).map_err(|error| refused(error.to_string()))?;
        match self.table.apply(self.table.applied() + 1, &bytes, false).outcome {
            Outcome::Done => Ok(()),
            other => Err(refused(format!("{other:?}"))),
        }
    }

    /// Index of the table's latest change.
    pub(crate) fn applied(&self) -> u64 {
        self.table.applied()
    }

    /// The nodes where the model is placed.
    pub(crate) fn places(&self, model: usize) -> impl Iterator<Item = usize> {
        let plan = self.table.models().get(&self.versions[model]);
        plan.into_iter().flat_map(|plan| &plan.placement).filter_map(|node| self.nodes.get(node).copied())
    }

    /// Whether the last demand for the model was refused.
    pub(crate) fn refuses(&self, model: usize) -> bool {
        matches!(self.table.deployments().demand().get(&self.versions[model]), Some(Demand::Refused(_)))
    }

    /// Whether a model that was asked for has no place yet, or one has fewer than its least number. The requests that
    /// asked may have been refused since.
    pub(crate) fn lacks_replicas(&self, fleet: &Fleet) -> bool {
        let demand = self.table.deployments().demand();
        let lacks = |(model, found): (usize, &Model)| {
            matches!(demand.get(&self.versions[model]), Some(Demand::Wanted(_)))
                || self.places(model).count() < usize::from(found.settings.min)
        };
        fleet.models.iter().enumerate().any(lacks)
    }

    /// A request has ended, of which the leader knows at its next decision.
    pub(crate) fn ended(&mut self, now: Micros, model: usize, total: u64) {
        self.uses.count(self.instant(next_decision(now)), [(self.versions[model].clone(), total)]);
    }

    fn instant(&self, now: Micros) -> Instant {
        self.epoch + Duration::from_micros(now)
    }

    /// Takes the workers' reports and the queues, and makes the changes that are due.
    pub(crate) fn decide(
        &mut self,
        now: Micros,
        fleet: &Fleet,
        hosts: &[Host],
        queues: &[Queue],
        ranking: &Ranking<'_>,
    ) -> Result<Vec<Moved>, Error> {
        for (host, simulated) in self.hosts.iter_mut().zip(hosts) {
            let reports = host.report.iter_mut().flat_map(|all| &mut all.models);
            for (model, (report, held)) in reports.zip(&simulated.models).enumerate() {
                let running = simulated.device.running(model) > 0;
                (report.state, report.idle_ms) = reported(now, held, running);
                report.has_files = simulated.has_files(model);
            }
        }
        self.queued.clear();
        let waiting = queues.iter().enumerate().filter(|(_, queue)| queue.requests > 0);
        self.queued.extend(waiting.map(|(model, queue)| (self.versions[model].clone(), queue.requests)));
        let mut moved = Vec::new();
        for version in self.queued.keys().cloned().collect::<Vec<_>>() {
            let asked = matches!(self.table.deployments().demand().get(&version), Some(Demand::Wanted(_)));
            let placed = self.table.models().get(&version).is_some_and(|plan| !plan.placement.is_empty());
            if !asked && !placed {
                self.make(Change::ModelWanted(version))?;
            }
        }
        for _ in 0..MAX_CHANGES {
            let at = self.instant(now);
            let uses = |version: &ModelId| match ranking {
                Ranking::Uses => self.uses.of(at, version),
                Ranking::Recency => 0.0,
                Ranking::NextUse(next) => self.models.get(version).map_or(0.0, |model| next(*model)),
            };
            let waited = |version: &ModelId| {
                let queue = self.models.get(version).map(|model| queues[*model]).unwrap_or_default();
                Duration::from_micros(queue.waited)
            };
            let view = View {
                table: &self.table,
                hosts: &self.hosts,
                is_gone: &|_| false,
                queued: &self.queued,
                waited: &waited,
                layers: &|_| None,
                failure: &|_, _| None,
                uses: &uses,
            };
            let Some(change) = decide::decide(&view) else { break };
            moved.extend(self.moved(now, fleet, hosts, queues, &change));
            self.make(change)?;
        }
        Ok(moved)
    }

    fn moved(
        &self,
        now: Micros,
        fleet: &Fleet,
        hosts: &[Host],
        queues: &[Queue],
        change: &Change,
    ) -> Option<Moved> {
        let (version, left) = match change {
            Change::ModelPlanned(plan) => (&plan.model, plan.placement.as_slice()),
            Change::ModelDropped(version) => (version, [].as_slice()),
            Change::ModelRefused(refused) => return Some(Moved::Refused(*self.models.get(&refused.model)?)),
            _ => return None,
        };
        let model = *self.models.get(version)?;
        let before = self.table.models().get(version).map_or([].as_slice(), |plan| &plan.placement);
        let Some(gone) = before.iter().find(|node| !left.contains(node)) else { return Some(Moved::Placed) };
        let held = &hosts[*self.nodes.get(gone)?].models[model];
        let settings = &fleet.models[model].settings;
        let idle_s = seconds(now.saturating_sub(held.idle_since));
        let idle = settings.idle_s > 0
            && idle_s >= f64::from(settings.idle_s)
            && before.len() > usize::from(settings.min)
            && queues[model].requests == 0;
        Some(Moved::Removed { model, idle })
    }
}

/// The first decision after an event.
pub(crate) fn next_decision(now: Micros) -> Micros {
    (now / EVERY + 1).saturating_mul(EVERY)
}

/// State and idle time in milliseconds, as a worker reports them.
fn reported(now: Micros, held: &Held, running: bool) -> (ModelState, u64) {
    let idle = ((now - held.idle_since) / 1000).max(1);
    match held.stage {
        Stage::Absent => (ModelState::Absent, 0),
        Stage::Fetching => (ModelState::Fetching, 0),
        Stage::Found => match held.wanted {
            true => (ModelState::Loading, 0),
            false => (ModelState::Asleep, 0),
        },
        Stage::Loading { wakes: true } => (ModelState::Waking, 0),
        Stage::Loading { wakes: false } => (ModelState::Loading, 0),
        Stage::Ready => (ModelState::Ready, if running { 0 } else { idle }),
        Stage::Draining => (ModelState::Ready, 0),
    }
}
