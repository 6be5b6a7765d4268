//! One run of a worker: each step computes a token of each of its sequences; it caches prefixes and reports
//! them.

use super::model;
use kvasir_cluster_tests::random::Random;
use proto::block::BlockId;
use proto::event::{KvEvent, KvEventBatch, KvSnapshot, Medium};
use proto::ids::{Attempt, Epoch, NodeId};
use proto::message::PullReport;
use proto::served_model::{ModelTask, ServedModel};
use proto::worker::{LoadReport, WorkerInfo, WorkerState};
use router::balancer::Ticket;
use std::collections::BTreeMap;
use std::sync::Arc;

pub(super) const CLASS: &str = "class";
/// Hash units that the prompts of a group have in common.
const SHARED: usize = 4;
/// Maximum number of hash units held.
const ROOM: usize = 40;
/// Steps between two reports.
const REPORT_EVERY: u64 = 10;

/// A request to a worker: its tokens from `next` on.
#[derive(Debug, Clone)]
pub(super) struct Call {
    pub(super) ticket: Ticket,
    pub(super) attempt: Attempt,
    pub(super) number: u64,
    pub(super) group: u64,
    pub(super) next: usize,
    pub(super) max_tokens: usize,
}

/// A worker's message.
#[derive(Debug, Clone)]
pub(super) enum WorkerMessage {
    Started(Ticket, Attempt),
    Token(Ticket, Attempt, u32),
    Finished(Ticket, Attempt),
    Declined(Ticket, Attempt),
    Report(LoadReport),
    Events(KvEventBatch),
}

#[derive(Debug)]
struct Sequence {
    session: u64,
    call: Call,
    /// Steps until the prompt is computed.
    prompt: u64,
}

#[derive(Debug)]
pub(super) struct WorkerRun {
    pub(super) node: NodeId,
    pub(super) epoch: Epoch,
    pub(super) alive: bool,
    /// Frozen until this time.
    pub(super) frozen: u64,
    /// Whether it ever was a member.
    pub(super) joined: bool,
    pub(super) session: Option<u64>,
    sequences: Vec<Sequence>,
    /// Each held unit and its predecessor.
    held: BTreeMap<BlockId, BlockId>,
    log: Vec<KvEvent>,
    /// Events sent so far, including earlier connections.
    sent: usize,
    steps: u64,
}

/// Token at position `at` of an undisturbed run.
pub(super) fn token(number: u64, at: usize) -> u32 {
    Random::new(number << 16 | at as u64).next() as u32
}

/// Units of a request's prompt: some shared by its group, then its own.
pub(super) fn chain(group: u64, number: u64) -> Arc<[BlockId]> {
    let unit = |of: u64, at: u64| {
        let mut random = Random::new(of << 8 | at);
        BlockId((u128::from(random.next()) << 64 | u128::from(random.next())).to_le_bytes())
    };
    (0..SHARED as u64).map(|at| unit(group, at)).chain((0..2).map(|at| unit(1 << 40 | number, at))).collect()
}

impl WorkerRun {
    pub(super) fn new(node: NodeId, epoch: Epoch) -> Self {
        Self {
            node,
            epoch,
            alive: true,
            frozen: 0,
            joined: false,
            session: None,
            sequences: Vec::new(),
            held: BTreeMap::new(),
            log: Vec::new(),
            sent: 0,
            steps: 0,
        }
    }

    pub(super) fn register(&self) -> WorkerInfo {
        let model = ServedModel {
            id: model(),
            model_digest: [1; 32],
            tokenizer_digest: [1; 32],
            max_model_len: 10_000,
            layers: (0, 1),
            engine: "kvasir".into(),
            hit_tokens: 16,
            numeric_class: CLASS.into(),
            block_tokens: 64,
            task: ModelTask::Generate,
        };
        let (node, epoch) = (self.node.clone(), self.epoch);
        WorkerInfo { node, epoch, pid: 1, quic: String::new(), ops: String::new(), models: vec![model] }
    }

    pub(super) fn joins(&mut self, session: u64) {
        (self.joined, self.session, self.sent) = (true, Some(session), self.log.len());
    }

    /// Whether this was the current connection. If so, drops its requests.
    pub(super) fn closed(&mut self, session: u64) -> bool {
        self.sequences.retain(|sequence| sequence.session != session);
        self.session.take_if(|now| *now == session).is_some()
    }

    pub(super) fn called(&mut self, session: u64, call: Call) {
        let cached =
            chain(call.group, call.number).iter().take_while(|unit| self.held.contains_key(unit)).count();
        self.sequences.push(Sequence { session, call, prompt: 8 - cached as u64 });
    }

    /// Computes a step. Returns messages and their connections.
    pub(super) fn step(&mut self, random: &mut Random) -> Vec<(u64, WorkerMessage)> {
        self.steps += 1;
        let mut messages = Vec::new();
        let mut computed = Vec::new();
        self.sequences.retain_mut(|Sequence { session, call, prompt }| {
            let (ticket, attempt) = (call.ticket, call.attempt);
            if *prompt > 0 {
                *prompt -= 1;
                if *prompt == 0 {
                    computed.push(chain(call.group, call.number));
                    messages.push((*session, WorkerMessage::Started(ticket, attempt)));
                }
                return true;
            }
            if call.next < call.max_tokens {
                messages
                    .push((*session, WorkerMessage::Token(ticket, attempt, token(call.number, call.next))));
                call.next += 1;
                return true;
            }
            messages.push((*session, WorkerMessage::Finished(ticket, attempt)));
            false
        });
        computed.iter().for_each(|chain| self.stores(chain));
        while self.held.len() > ROOM {
            let units: Vec<BlockId> = self.held.keys().copied().collect();
            let Some(&unit) = random.pick(&units) else { break };
            self.held.remove(&unit);
            self.log.push(KvEvent::Removed { units: vec![unit], medium: Medium::Device });
        }
        if let Some(session) = self.session {
            if self.sent < self.log.len() {
                messages.push((session, WorkerMessage::Events(self.replay(self.sent as u64 + 1))));
                self.sent = self.log.len();
            }
            if self.steps.is_multiple_of(REPORT_EVERY) {
                messages.push((session, WorkerMessage::Report(self.report())));
            }
        }
        messages
    }

    /// Adds an event, so that a loss of the previous ones is detected.
    pub(super) fn stores_one_more(&mut self) {
        self.stores(&chain(1 << 50, self.epoch.0));
    }

    /// Events from this number on.
    pub(super) fn replay(&self, from: u64) -> KvEventBatch {
        let events = self.log.iter().skip(from as usize - 1).cloned().collect();
        KvEventBatch { epoch: self.epoch, first_sequence: from, events }
    }

    pub(super) fn snapshot(&self) -> KvSnapshot {
        let runs = self.held.iter().map(|(unit, before)| (*before, vec![*unit], Medium::Device)).collect();
        KvSnapshot { epoch: self.epoch, sequence: self.last_event(), runs, resume_points: Vec::new() }
    }

    /// Units of a group's prefix up to the deepest held one.
    pub(super) fn deepest(&self, group: u64) -> u32 {
        let units = chain(group, 0);
        let held = units[..SHARED].iter().rposition(|unit| self.held.contains_key(unit));
        held.map_or(0, |at| at as u32 + 1)
    }

    /// Number of the last event.
    pub(super) fn last_event(&self) -> u64 {
        self.log.len() as u64
    }

    fn stores(&mut self, chain: &[BlockId]) {
        let mut before = BlockId([0; 16]);
        for &unit in chain {
            if self.held.insert(unit, before).is_none() {
                self.log.push(KvEvent::Stored { parent: before, units: vec![unit], medium: Medium::Device });
            }
            before = unit;
        }
    }

    fn report(&self) -> LoadReport {
        let waiting = self.sequences.iter().filter(|sequence| sequence.prompt > 0).count() as u32;
        LoadReport {
            epoch: self.epoch,
            state: WorkerState::Ready,
            running: self.sequences.len() as u32 - waiting,
            waiting,
            pending_prefill_tokens: 0,
            kv_used: 0,
            kv_total: 1 << 30,
            steps: self.steps,
            tokens: self.steps,
            stalled_ms: 0,
            prefill_rate: 6_400.0,
            step_ms: 10.0,
            exact: true,
            rss: 0,
            pulls: PullReport::default(),
        }
    }
}
