//! Clients of the table. Each does one operation at a time, retries until it has a result or gives up, and
//! records the times and results.

use consensus::core::ProposalResult;
use consensus::table::{
    CanaryShare, Change, ClientId, DeploymentDropped, DeploymentSet, DeploymentSettings, Entry, Kind,
    OpenSession, Outcome, PolicyAdvanced, Refusal, Request, RolloutEnded, SessionChange, Table,
    VersionIdentified,
};
use kvasir_cluster_tests::linearizable::{Call, Op};
use kvasir_cluster_tests::random::Random;
use proto::deployment::{ModelFacts, ModelSource};
use proto::ids::{Epoch, ModelId, NodeId};
use proto::served_model::ModelTask;
use proto::worker::WorkerInfo;
use std::collections::BTreeMap;

/// Number of deployments that are set and removed. Registers are one number for each of them, the canary of a further
/// one, and the version of the policy.
const DEPLOYMENTS: u64 = 2;
/// The deployment with canaries.
const CANARIES: u64 = 9;
/// Microseconds until a call is retried.
const TRY_AGAIN: u64 = 400_000;
/// Microseconds until a call is given up.
const GIVE_UP: u64 = 6_000_000;

/// A register of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Cell {
    Deployment(u64),
    Canary,
    Policy,
}

/// A client's request to a coordinator.
#[derive(Debug, Clone)]
pub(crate) enum ClientRequest {
    Propose(Entry),
    /// A read with this token.
    Read(u64),
}

#[derive(Debug, Clone)]
enum Doing {
    Idle,
    Opening,
    Changing { operation: Option<(Cell, Op)>, change: Change },
    Reading { register: Cell, tokens: Vec<u64> },
}

#[derive(Debug)]
pub(crate) struct Client {
    number: u64,
    session: Option<ClientId>,
    seq: u64,
    nonce: u64,
    doing: Doing,
    called: u64,
    tried: u64,
    /// The last written value, so that every value is different.
    written: u64,
}

/// All results of clients.
#[derive(Debug, Default)]
pub(crate) struct History {
    pub(crate) calls: BTreeMap<Cell, Vec<Call>>,
    pub(crate) done: usize,
}

impl Client {
    pub(crate) fn new(number: u64) -> Self {
        let nonce = number << 32;
        let doing = Doing::Idle;
        Self { number, session: None, seq: 0, nonce, doing, called: 0, tried: 0, written: 0 }
    }

    /// The request to send to a coordinator now; `None` if it is not time.
    pub(crate) fn act(
        &mut self,
        now: u64,
        random: &mut Random,
        table: &Table,
        history: &mut History,
    ) -> Option<ClientRequest> {
        if !matches!(self.doing, Doing::Idle) && now > self.called + GIVE_UP {
            self.give_up(history);
        }
        if matches!(self.doing, Doing::Idle) {
            if !random.chance(600) {
                return None;
            }
            self.begin(now, random, table);
        } else if now < self.tried + TRY_AGAIN {
            return None;
        }
        self.tried = now;
        match &mut self.doing {
            Doing::Idle => None,
            Doing::Opening => {
                Some(ClientRequest::Propose(Entry::OpenSession(OpenSession { nonce: self.nonce })))
            }
            Doing::Changing { change, .. } => {
                let (client, seq, change) = (self.session?, self.seq, change.clone());
                Some(ClientRequest::Propose(Entry::Change(SessionChange { client, seq, change })))
            }
            Doing::Reading { tokens, .. } => {
                self.nonce += 1;
                tokens.push(self.nonce);
                Some(ClientRequest::Read(self.nonce))
            }
        }
    }

    /// Handles an applied entry of a coordinator.
    pub(crate) fn answered(&mut self, now: u64, answer: &ProposalResult, history: &mut History) {
        match (&self.doing, answer.request, &answer.outcome) {
            (Doing::Opening, Request::Open(nonce), Outcome::Opened(client)) if nonce == self.nonce => {
                (self.session, self.seq, self.doing) = (Some(*client), 0, Doing::Idle);
            }
            (Doing::Changing { operation, .. }, Request::Change(client, seq), outcome)
                if Some(client) == self.session && seq == self.seq =>
            {
                if *outcome == Outcome::Refused(Refusal::SessionExpired) {
                    self.give_up(history);
                    self.session = None;
                    return;
                }
                let completed =
                    operation.and_then(|(register, op)| Some((register, completed_op(op, outcome)?)));
                self.finish(now, completed, history);
            }
            _ => {}
        }
    }

    /// Handles a read that a coordinator with this table may serve.
    pub(crate) fn read(&mut self, now: u64, token: u64, table: &Table, history: &mut History) {
        if let Doing::Reading { register, tokens } = &self.doing
            && tokens.contains(&token)
        {
            let completed = (*register, Op::Read(value(table, *register)));
            self.finish(now, Some(completed), history);
        }
    }

    fn begin(&mut self, now: u64, random: &mut Random, table: &Table) {
        self.called = now;
        if self.session.is_none() {
            self.nonce += 1;
            self.doing = Doing::Opening;
            return;
        }
        let register = match random.below(4) {
            0 => Cell::Policy,
            1 => Cell::Canary,
            _ => Cell::Deployment(random.below(DEPLOYMENTS)),
        };
        self.written += 1;
        let new = (self.number << 16 | self.written) as u32;
        self.doing = match (random.below(10), register) {
            (0, _) => Doing::Changing { operation: None, change: worker(random) },
            (1..6, register) => Doing::Reading { register, tokens: Vec::new() },
            (6, Cell::Deployment(number)) => {
                let dropped = DeploymentDropped { model: model(number), from: None };
                let change = Change::DeploymentDropped(dropped);
                Doing::Changing { operation: Some((register, Op::Write(0))), change }
            }
            (7, Cell::Deployment(number)) => {
                let deployed = table.deployments().models().get(&model(number));
                let from =
                    if random.chance(800) { deployed.map_or(0, |deployed| deployed.revision) } else { 0 };
                // Every revision has another value.
                let value = if from == 0 { 0 } else { value(table, register) };
                let operation = Some((register, Op::Swap { from: value, to: u64::from(new) }));
                Doing::Changing { operation, change: set(deploy(model(number), new, Some(from))) }
            }
            (_, Cell::Deployment(number)) => {
                let operation = Some((register, Op::Write(u64::from(new))));
                Doing::Changing { operation, change: set(deploy(model(number), new, None)) }
            }
            (_, Cell::Canary) => {
                let (operation, change) = change_canary(table, new, random);
                Doing::Changing { operation, change }
            }
            (_, Cell::Policy) => {
                let from = if random.chance(800) { table.policy() } else { 0 };
                let to = u64::from(new);
                let change = Change::PolicyAdvanced(PolicyAdvanced { from, to });
                Doing::Changing { operation: Some((register, Op::Swap { from, to })), change }
            }
        };
        if matches!(self.doing, Doing::Changing { .. }) {
            self.seq += 1;
        }
    }

    fn finish(&mut self, now: u64, completed: Option<(Cell, Op)>, history: &mut History) {
        if let Some((register, op)) = completed {
            let call = Call { op, called: self.called, returned: Some(now) };
            history.calls.entry(register).or_default().push(call);
        }
        history.done += 1;
        self.doing = Doing::Idle;
    }

    /// Ends a call whose effect is unknown.
    pub(crate) fn give_up(&mut self, history: &mut History) {
        if let Doing::Changing { operation: Some((register, op)), .. } = self.doing {
            let call = Call { op, called: self.called, returned: None };
            history.calls.entry(register).or_default().push(call);
        }
        self.doing = Doing::Idle;
    }
}

/// The completed operation for an outcome.
fn completed_op(op: Op, outcome: &Outcome) -> Option<Op> {
    match (op, outcome) {
        (op, Outcome::Done) => Some(op),
        (Op::Swap { from, .. }, Outcome::Refused(Refusal::PolicyMoved(found))) => {
            Some(Op::NotSwapped { from, found: *found })
        }
        // There was nothing to remove.
        (Op::Write(0), Outcome::Refused(Refusal::Unknown(Kind::Deployment))) => Some(Op::Read(0)),
        _ => None,
    }
}

/// The value of a register; 0 while there is no deployment, or no canary.
fn value(table: &Table, register: Cell) -> u64 {
    let value = match register {
        Cell::Policy => return table.policy(),
        Cell::Deployment(number) => {
            table.deployments().models().get(&model(number)).map(|deployed| deployed.settings.context)
        }
        Cell::Canary => canary(table).map(|canary| canary.min_requests),
    };
    u64::from(value.unwrap_or(0))
}

fn model(number: u64) -> ModelId {
    ModelId::new(format!("m{number}")).unwrap_or_else(|error| panic!("{error}"))
}

fn canary(table: &Table) -> Option<CanaryShare> {
    table.deployments().models().get(&model(CANARIES))?.rollout.as_ref()?.canary
}

/// A change of a deployment. Its register's value is its `context`.
fn deploy(model: ModelId, value: u32, from: Option<u64>) -> DeploymentSet {
    let settings = DeploymentSettings { context: value, ..DeploymentSettings::default() };
    let source = Some(ModelSource::File("/m.gguf".into()));
    DeploymentSet { model, settings, source, reread: false, canary: None, from }
}

fn set(set: DeploymentSet) -> Change {
    Change::DeploymentSet(Box::new(set))
}

/// A change of the model with canaries, whose register's value is the canary's `min_requests`. While there is none, the
/// change is the next step towards one, and no operation.
fn change_canary(table: &Table, new: u32, random: &mut Random) -> (Option<(Cell, Op)>, Change) {
    let model = model(CANARIES);
    let share =
        CanaryShare { permille: 10, min_requests: new, max_errors_permille: 1, max_ttft_percent: 200 };
    let deployed = table.deployments().models().get(&model);
    let unread = deployed.and_then(|d| d.versions.iter().find(|version| version.facts.is_none()));
    match (deployed.map(|deployed| &deployed.rollout), unread) {
        (None, _) => (None, set(deploy(model, 1, Some(0)))),
        (Some(_), Some(version)) => {
            let mut digest = [0; 32];
            digest[..8].copy_from_slice(&version.number.to_le_bytes());
            let facts = ModelFacts {
                digest,
                tokenizer_digest: [0; 32],
                task: ModelTask::Generate,
                context: 1,
                needed_bytes: 1,
            };
            let version = version.number;
            (None, Change::VersionIdentified(VersionIdentified { model, version, facts }))
        }
        // Starts a rollout without a canary.
        (Some(None), None) => {
            let from = deployed.map(|deployed| deployed.revision);
            (None, set(DeploymentSet { reread: true, ..deploy(model, 1, from) }))
        }
        (Some(Some(rollout)), None) if random.chance(300) => {
            let (version, promoted) = (rollout.version, random.chance(500));
            let ended = RolloutEnded { model, version, promoted, reason: String::new() };
            (Some((Cell::Canary, Op::Write(0))), Change::RolloutEnded(ended))
        }
        (Some(Some(_)), None) => {
            let shared = DeploymentSet { source: None, canary: Some(share), ..deploy(model, 1, None) };
            (Some((Cell::Canary, Op::Write(u64::from(new)))), set(shared))
        }
    }
}

/// A worker registers with a new epoch; sometimes with an old one.
fn worker(random: &mut Random) -> Change {
    let name = ["w0", "w1"][random.below(2) as usize];
    let register = WorkerInfo {
        node: node(name),
        epoch: Epoch(random.below(30)),
        pid: 1,
        quic: String::new(),
        ops: String::new(),
        models: Vec::new(),
    };
    Change::WorkerJoined(Box::new(register))
}

pub(crate) fn node(name: &str) -> NodeId {
    NodeId::new(name).unwrap_or_else(|error| panic!("{error}"))
}
