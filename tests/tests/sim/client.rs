//! Clients of the table. Each does one operation at a time, retries until it has a result or gives up, and
//! records the times and results.

use consensus::core::ProposalResult;
use consensus::table::{
    Change, ClientId, Entry, OpenSession, Outcome, PolicyAdvanced, Quota, Refusal, Request, SessionChange,
    Table, TenantRecord,
};
use kvasir_cluster_tests::linearizable::{Call, Op};
use kvasir_cluster_tests::random::Random;
use proto::block::TenantSalt;
use proto::ids::{Epoch, NodeId, TenantId};
use proto::worker::WorkerInfo;
use std::collections::BTreeMap;

/// Number of tenants. Registers are one number per tenant, and the version of the policy.
const TENANTS: u64 = 2;
/// Microseconds until a call is retried.
const TRY_AGAIN: u64 = 400_000;
/// Microseconds until a call is given up.
const GIVE_UP: u64 = 6_000_000;

/// A register of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Cell {
    Tenant(u64),
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
        let register = if random.chance(300) { Cell::Policy } else { Cell::Tenant(random.below(TENANTS)) };
        self.written += 1;
        let new = self.number << 32 | self.written;
        self.doing = match (random.below(10), register) {
            (0, _) => Doing::Changing { operation: None, change: worker(random) },
            (1..6, register) => Doing::Reading { register, tokens: Vec::new() },
            (_, Cell::Tenant(number)) => {
                Doing::Changing { operation: Some((register, Op::Write(new))), change: write(number, new) }
            }
            (_, Cell::Policy) => {
                let from = if random.chance(800) { table.policy() } else { 0 };
                let change = Change::PolicyAdvanced(PolicyAdvanced { from, to: new });
                Doing::Changing { operation: Some((register, Op::Swap { from, to: new })), change }
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
        _ => None,
    }
}

fn value(table: &Table, register: Cell) -> u64 {
    match register {
        Cell::Policy => table.policy(),
        Cell::Tenant(number) => tenant(number)
            .and_then(|id| table.access().tenants().get(&id))
            .map_or(0, |t| t.quota.tokens_per_minute),
    }
}

fn tenant(number: u64) -> Option<TenantId> {
    TenantId::new(format!("t{number}")).ok()
}

fn write(number: u64, value: u64) -> Change {
    let quota = Quota { requests_per_minute: 1, tokens_per_minute: value, concurrency: 1 };
    match tenant(number) {
        Some(tenant) => Change::TenantSet(TenantRecord { tenant, salt: TenantSalt([0; 32]), quota }),
        None => Change::PolicyAdvanced(PolicyAdvanced { from: 0, to: 0 }),
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
