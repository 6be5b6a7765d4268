//! Conversion to and from the Raft library's types, and validation of received messages.

use super::{EntryBody, LogEntry, RaftMessage, RaftMessageKind};
use raft::eraftpb::{self, MessageType};

/// Maximum length of a message's context, in bytes.
const MAX_CONTEXT: usize = 64;

/// The receiver's log, as far as validation needs it.
pub(crate) struct Log<'a> {
    /// The receiver's term. Raft drops messages of earlier terms.
    pub(crate) now: u64,
    /// Whether the receiver leads this term. A leader sends entries before its own disk has them. After a
    /// crash it may receive answers about entries that it has lost, but then it is no longer leader.
    pub(crate) leads: bool,
    pub(crate) last: u64,
    pub(crate) committed: u64,
    /// The term of an entry, if the log still has it.
    pub(crate) term: &'a dyn Fn(u64) -> Option<u64>,
}

impl RaftMessageKind {
    fn from_raft(kind: MessageType) -> Option<Self> {
        Some(match kind {
            MessageType::MsgPropose => Self::Propose,
            MessageType::MsgAppend => Self::Append,
            MessageType::MsgAppendResponse => Self::AppendResponse,
            MessageType::MsgRequestVote => Self::RequestVote,
            MessageType::MsgRequestVoteResponse => Self::RequestVoteResponse,
            MessageType::MsgHeartbeat => Self::Heartbeat,
            MessageType::MsgHeartbeatResponse => Self::HeartbeatResponse,
            MessageType::MsgTimeoutNow => Self::TimeoutNow,
            MessageType::MsgReadIndex => Self::ReadIndex,
            MessageType::MsgReadIndexResp => Self::ReadIndexResponse,
            MessageType::MsgRequestPreVote => Self::RequestPreVote,
            MessageType::MsgRequestPreVoteResponse => Self::RequestPreVoteResponse,
            MessageType::MsgSnapshot => Self::Snapshot,
            MessageType::MsgHup
            | MessageType::MsgBeat
            | MessageType::MsgUnreachable
            | MessageType::MsgSnapStatus
            | MessageType::MsgCheckQuorum
            | MessageType::MsgTransferLeader => return None,
        })
    }

    fn to_raft(self) -> MessageType {
        match self {
            Self::Propose => MessageType::MsgPropose,
            Self::Append => MessageType::MsgAppend,
            Self::AppendResponse => MessageType::MsgAppendResponse,
            Self::RequestVote => MessageType::MsgRequestVote,
            Self::RequestVoteResponse => MessageType::MsgRequestVoteResponse,
            Self::Heartbeat => MessageType::MsgHeartbeat,
            Self::HeartbeatResponse => MessageType::MsgHeartbeatResponse,
            Self::TimeoutNow => MessageType::MsgTimeoutNow,
            Self::ReadIndex => MessageType::MsgReadIndex,
            Self::ReadIndexResponse => MessageType::MsgReadIndexResp,
            Self::RequestPreVote => MessageType::MsgRequestPreVote,
            Self::RequestPreVoteResponse => MessageType::MsgRequestPreVoteResponse,
            Self::Snapshot => MessageType::MsgSnapshot,
        }
    }
}

impl RaftMessage {
    /// `None` for a message that is local to the library.
    pub(crate) fn from_raft(message: &eraftpb::Message) -> Option<Self> {
        Some(Self {
            kind: RaftMessageKind::from_raft(message.get_msg_type())?,
            to: message.to,
            from: message.from,
            term: message.term,
            log_term: message.log_term,
            index: message.index,
            entries: message.entries.iter().map(LogEntry::from_raft).collect(),
            commit: message.commit,
            commit_term: message.commit_term,
            request_snapshot: message.request_snapshot,
            reject: message.reject,
            reject_hint: message.reject_hint,
            context: message.context.to_vec(),
            priority: message.priority,
        })
    }

    pub(crate) fn into_raft(self) -> eraftpb::Message {
        let mut message = eraftpb::Message {
            to: self.to,
            from: self.from,
            term: self.term,
            log_term: self.log_term,
            index: self.index,
            entries: self.entries.into_iter().map(LogEntry::into_raft).collect(),
            commit: self.commit,
            commit_term: self.commit_term,
            request_snapshot: self.request_snapshot,
            reject: self.reject,
            reject_hint: self.reject_hint,
            context: self.context.into(),
            priority: self.priority,
            ..Default::default()
        };
        message.set_msg_type(self.kind.to_raft());
        message
    }
}

/// Refuses messages that no correct member sends and that would make the Raft library panic. Returns the
/// reason.
pub(crate) fn check(message: &RaftMessage, log: &Log<'_>) -> Result<(), &'static str> {
    if message.context.len() > MAX_CONTEXT {
        return Err("its context is too long");
    }
    let termless = matches!(message.kind, RaftMessageKind::Propose | RaftMessageKind::ReadIndex);
    if termless != (message.term == 0) {
        return Err("its term does not go with its kind");
    }
    match message.kind {
        RaftMessageKind::Propose => match message.entries.as_slice() {
            [LogEntry { body: EntryBody::Plain(data), .. }] if !data.is_empty() => Ok(()),
            [_] => Err("it proposes what only the leader may"),
            _ => Err("it does not propose one entry"),
        },
        RaftMessageKind::ReadIndex | RaftMessageKind::ReadIndexResponse => match message.entries.as_slice() {
            [LogEntry { body: EntryBody::Plain(data), .. }] if data.len() <= MAX_CONTEXT => Ok(()),
            _ => Err("it does not carry one read"),
        },
        RaftMessageKind::Append if message.term >= log.now => append(message, log),
        RaftMessageKind::Append => Ok(()),
        _ if !message.entries.is_empty() => Err("it carries entries"),
        RaftMessageKind::Heartbeat if message.term >= log.now && message.commit > log.last => {
            Err("it commits what is not there")
        }
        RaftMessageKind::AppendResponse
            if log.leads && message.term == log.now && !message.reject && message.index > log.last =>
        {
            Err("it has taken what was never sent")
        }
        _ => Ok(()),
    }
}

fn append(message: &RaftMessage, log: &Log<'_>) -> Result<(), &'static str> {
    // Raft reads term 0 as "no such entry", which would match any missing entry.
    if (message.log_term == 0) != (message.index == 0) {
        return Err("the entry before has no term");
    }
    let mut term = message.log_term;
    for (entry, position) in message.entries.iter().zip(1u64..) {
        if message.index.checked_add(position) != Some(entry.index) {
            return Err("its entries do not follow each other");
        }
        if entry.term < term || entry.term > message.term {
            return Err("its entries' terms do not follow each other");
        }
        term = entry.term;
        let own_term = (entry.index <= log.committed).then(|| (log.term)(entry.index)).flatten();
        if own_term.is_some_and(|own_term| own_term != entry.term) {
            return Err("it contradicts what was agreed on");
        }
    }
    Ok(())
}
