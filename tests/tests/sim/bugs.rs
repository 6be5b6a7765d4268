//! Bugs that are planted in the simulated world, to test that the checks find them.

use crate::invariants::apply;
use consensus::message::{Body, EntryBody, Frame, LogEntry};
use consensus::storage::Loaded;
use consensus::table::{Change, Entry, SessionChange, Table, encode_entry};
use proto::codec::{Cap, decode};
use proto::ids::Epoch;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bug {
    /// A write is not synced before the messages that depend on it are sent.
    SkipSync,
    /// A restarted coordinator loses its workers' epochs.
    ForgetEpoch,
    /// A restarted coordinator applies entries twice.
    ApplyTwice,
    /// A snapshot's second chunk is never sent.
    DropChunk,
    /// Reads return the local table without confirmation.
    StaleRead,
}

impl Bug {
    pub(crate) const ALL: [Self; 5] =
        [Self::SkipSync, Self::ForgetEpoch, Self::ApplyTwice, Self::DropChunk, Self::StaleRead];

    /// Changes the data that a disk returns. `agreed` is the whole log from index 2 on.
    pub(crate) fn on_restart(self, loaded: &mut Loaded, agreed: &[LogEntry]) {
        let index = loaded.snapshot.meta.index;
        let before = |upto: u64| agreed.iter().filter(move |entry| entry.index <= upto);
        let Ok(mut table) = Table::from_bytes(&loaded.snapshot.data) else { return };
        match self {
            Self::ForgetEpoch => {
                let seats = table.seats().cloned().collect::<Vec<_>>();
                if before(index).count() > 0 {
                    table = Table::genesis(1, seats);
                    before(index).for_each(|entry| apply(&mut table, &without_epoch(entry)));
                }
            }
            Self::ApplyTwice => {
                let upto = loaded.hard.commit;
                before(upto).filter(|entry| entry.index > index).for_each(|entry| apply(&mut table, entry));
            }
            Self::SkipSync | Self::DropChunk | Self::StaleRead => return,
        }
        if let Ok(bytes) = table.to_bytes() {
            loaded.snapshot.data = bytes.into();
        }
    }

    /// Whether this frame is dropped.
    pub(crate) fn drops(self, frame: &Frame) -> bool {
        self == Self::DropChunk && matches!(&frame.body, Body::Chunk(chunk) if chunk.offset > 0)
    }
}

fn without_epoch(entry: &LogEntry) -> LogEntry {
    let mut entry = entry.clone();
    if let EntryBody::Plain(bytes) = &mut entry.body
        && let Ok(Entry::Change(SessionChange { client, seq, change })) = decode(bytes, Cap::Stream)
        && let Change::WorkerJoined(mut worker) = change
    {
        worker.epoch = Epoch(0);
        let change = Change::WorkerJoined(worker);
        if let Ok(changed) = encode_entry(&Entry::Change(SessionChange { client, seq, change })) {
            *bytes = changed;
        }
    }
    entry
}
