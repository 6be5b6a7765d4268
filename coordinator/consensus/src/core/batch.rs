//! One round of the core: send early frames, write, then everything that depends on the write.

use super::{Core, CoreError, Outbound, Request, Table, conf_change};
use crate::member::MemberId;
use crate::message::{Body, HardState, LogEntry, RaftMessage, SnapshotMeta, SnapshotOffer};
use crate::storage::{Snapshot, Write};
use crate::table::Outcome;
use raft::eraftpb::{self, EntryType, MessageType};
use raft::{Ready, StateRole};
use std::sync::Arc;

/// Pending work of a core: send [`early`](Self::early), make [`write`](Self::write) durable, then call
/// [`persisted`](Self::persisted) for the rest. The batch borrows the core. If the batch is dropped before
/// `persisted`, the core must be dropped too, as if the process had ended before the write.
#[must_use]
pub struct Batch<'a> {
    core: &'a mut Core,
    ready: Option<Ready>,
    early: Vec<Outbound>,
    write: Write,
}

/// Results of a batch after its write.
#[derive(Debug, Default)]
pub struct Done {
    pub send: Vec<Outbound>,
    /// Answers to applied entries, in log order.
    pub answers: Vec<ProposalResult>,
    /// Tokens of completed reads.
    pub reads: Vec<u64>,
}

/// The answer to a proposal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProposalResult {
    pub request: Request,
    /// Log index of the entry; for a repeated change, the index of the repetition.
    pub index: u64,
    pub outcome: Outcome,
}

impl<'a> Batch<'a> {
    pub(super) fn of(core: &'a mut Core) -> Result<Option<Self>, CoreError> {
        core.cut |= core.raw.store().take_snapshot_request();
        let log = core.raw.store();
        let due = core.table.applied() - log.snapshot_meta().index >= core.settings.snapshot_after;
        let ready = core.raw.has_ready().then(|| core.raw.ready());
        if ready.is_none() && core.outbox.is_empty() && !due && !core.cut {
            return Ok(None);
        }
        let mut batch = Self { core, ready: None, early: Vec::new(), write: Write::default() };
        batch.early = std::mem::take(&mut batch.core.outbox);
        if let Some(mut ready) = ready {
            let messages = ready.take_messages();
            batch.early.extend(batch.core.address(messages));
            if !ready.snapshot().is_empty() {
                batch.write.install = Some(snapshot_of(ready.snapshot()));
            }
            batch.write.entries = ready.entries().iter().map(LogEntry::from_raft).collect();
            batch.write.hard = ready.hs().map(HardState::from_raft);
            batch.ready = Some(ready);
        }
        if (due || batch.core.cut) && batch.write.install.is_none() {
            batch.compact()?;
        }
        Ok(Some(batch))
    }

    /// Frames that do not depend on the write.
    pub fn early(&mut self) -> Vec<Outbound> {
        std::mem::take(&mut self.early)
    }

    /// Records that must be durable before [`persisted`](Self::persisted).
    pub fn write(&self) -> &Write {
        &self.write
    }

    /// Call after the write is durable: applies committed entries and returns the results.
    pub fn persisted(mut self) -> Result<Done, CoreError> {
        let mut done = Done { send: std::mem::take(&mut self.early), ..Done::default() };
        let write = std::mem::take(&mut self.write);
        if let Some(snapshot) = write.install {
            self.core.table = Arc::new(Table::from_bytes(&snapshot.data)?);
            self.core.raw.mut_store().install(snapshot);
            self.core.update_names();
        }
        if let Some(mut ready) = self.ready.take() {
            let committed = ready.take_committed_entries();
            self.apply(committed, &mut done)?;
            let (log, entries) = (self.core.raw.mut_store(), ready.take_entries());
            log.append(entries);
            if let Some(hard) = write.hard {
                log.set_hard(hard);
            }
            let reads = ready.take_read_states();
            self.core.note_reads(reads);
            done.send.extend(self.core.address(ready.take_persisted_messages()));
            let mut light = self.core.raw.advance_append(ready);
            done.send.extend(self.core.address(light.take_messages()));
            self.apply(light.take_committed_entries(), &mut done)?;
            self.core.raw.advance_apply();
            self.core.leave_if_removed();
        }
        if let Some((snapshot, compacted)) = write.compact {
            self.core.raw.mut_store().compact(snapshot, compacted);
        }
        self.core.finish_reads(&mut done);
        self.core.draw_timeout();
        Ok(done)
    }

    fn compact(&mut self) -> Result<(), CoreError> {
        self.core.cut = false;
        let (table, log) = (&self.core.table, self.core.raw.store());
        let index = table.applied();
        // No entry was applied since the last snapshot.
        let Some(term) = log.term_of(index).filter(|_| index > log.snapshot_meta().index) else {
            return Ok(());
        };
        let conf = self.core.raw.raft.prs().conf().to_conf_state();
        let meta = SnapshotMeta { index, term, voters: conf.voters, learners: conf.learners };
        let at = index.saturating_sub(self.core.settings.keep_entries).max(log.compacted().0);
        let compacted = (at, log.term_of(at).unwrap_or(term));
        let snapshot = Snapshot { meta, data: table.to_bytes()?.into() };
        let hard = self.write.hard.unwrap_or_else(|| HardState::from_raft(&self.core.raw.raft.hard_state()));
        self.write.hard = Some(hard);
        self.write.compact = Some((snapshot, compacted));
        Ok(())
    }

    fn apply(&mut self, entries: Vec<eraftpb::Entry>, done: &mut Done) -> Result<(), CoreError> {
        if entries.is_empty() {
            return Ok(());
        }
        let core = &mut *self.core;
        for entry in entries {
            let table = Arc::make_mut(&mut core.table);
            let membership = entry.get_entry_type() != EntryType::EntryNormal;
            let bytes = if membership { &entry.context } else { &entry.data };
            let applied = table.apply(entry.index, bytes, membership);
            if let Some(membership) = applied.membership {
                core.raw.apply_conf_change(&conf_change(membership))?;
                core.step_down_if_removed();
                core.update_names();
            }
            if let Some(request) = applied.request {
                done.answers.push(ProposalResult { request, index: entry.index, outcome: applied.outcome });
            }
        }
        Ok(())
    }
}

impl Core {
    /// Converts messages of the Raft library to frames; a snapshot becomes an offer.
    fn address(&mut self, messages: Vec<eraftpb::Message>) -> Vec<Outbound> {
        let mut outbound = Vec::with_capacity(messages.len());
        for message in messages {
            // Raft forwards a request for the leader in the original sender's name. The receiver would reject
            // it as forged; the original sender retries.
            if message.from != self.id() {
                continue;
            }
            let member = self.names.keys().find(|member| member.get() == message.to).copied();
            let (Some(member), Some(mirror)) = (member, RaftMessage::from_raft(&message)) else { continue };
            let body = if message.get_msg_type() == MessageType::MsgSnapshot {
                self.offer(member, mirror, &message)
            } else {
                Body::Raft(mirror)
            };
            outbound.extend(self.frame(member, body));
        }
        outbound
    }

    fn offer(&mut self, to: MemberId, mirror: RaftMessage, message: &eraftpb::Message) -> Body {
        let data = Arc::clone(self.raw.store().snapshot_data());
        let meta = SnapshotMeta::from_raft(message.get_snapshot().get_metadata());
        let (len, digest) = (data.len() as u64, *blake3::hash(&data).as_bytes());
        self.sending.begin(to, digest, data);
        Body::Offer(SnapshotOffer { message: mirror, meta, len, digest })
    }

    fn note_reads(&mut self, reads: Vec<raft::ReadState>) {
        for read in reads {
            let Some((seed, token)) = read.request_ctx.split_first_chunk::<8>() else { continue };
            // The answer belongs to a read of an earlier process.
            if u64::from_le_bytes(*seed) == self.seed
                && let Ok(token) = token.try_into()
            {
                self.reads.push((read.index, u64::from_le_bytes(token)));
            }
        }
    }

    fn finish_reads(&mut self, done: &mut Done) {
        let applied = self.table.applied();
        self.reads.retain(|&(index, token)| {
            if index <= applied {
                done.reads.push(token);
            }
            index > applied
        });
    }

    /// A leader that was removed transfers leadership. The others continue in any case.
    fn leave_if_removed(&mut self) {
        let raft = &self.raw.raft;
        let removed = !raft.prs().conf().voters().contains(self.id());
        if raft.state == StateRole::Leader && removed && raft.lead_transferee.is_none() {
            let _not_now = self.transfer_leadership(None);
        }
    }
}

fn snapshot_of(snapshot: &eraftpb::Snapshot) -> Snapshot {
    let meta = SnapshotMeta::from_raft(snapshot.get_metadata());
    Snapshot { meta, data: snapshot.data.to_vec().into() }
}
