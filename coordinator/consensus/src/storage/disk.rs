//! [`Storage`] as one redb file: a write is one transaction, durable when it returns. Each record has a
//! checksum over its key and bytes. redb rolls back torn writes; these checksums detect flipped bits.

use super::room::{self, Reserve, Trouble, Watched};
use super::{Identity, Loaded, MAX_SNAPSHOT_BYTES, Snapshot, Storage, StorageError, Write};
use crate::message::{EntryBody, HardState, LogEntry, SnapshotMeta};
use crate::table::{Entry, Level, SessionChange, Table, decode_entry};
use proto::codec::{Cap, CodecError, decode, encode};
use proto::ids::NodeId;
use redb::{
    Database, ReadTransaction, ReadableDatabase, ReadableTable, StorageBackend, TableDefinition,
    WriteTransaction,
};
use serde::{Deserialize, Serialize};
use std::io::ErrorKind;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const LOG: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("log");
const STATE: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("state");

const FORMAT: &str = "format";
const IDENTITY: &str = "identity";
const HARD: &str = "hard-state";
const SNAPSHOT: &str = "snapshot";
const SNAPSHOT_DATA: &str = "snapshot-data";
const CHECKSUM_BYTES: usize = 16;
/// Size of redb's cache. The file has a few MB.
const CACHE_BYTES: usize = 8 << 20;

/// Format version of the records that this build reads. Any change of [`Record`] or its contents needs the next number.
const FORMAT_OWN: u32 = 2;
/// Format version of records up to level 1. A disk gets the next one with its first change of level 2, so that a build
/// of level 1, which would skip such changes, refuses it.
const FORMAT_FIRST: u32 = 1;

/// A record of the file.
#[derive(Debug, Serialize, Deserialize)]
enum Record {
    Identity(Identity),
    Hard(HardState),
    /// The snapshot's metadata, and the last removed entry as (index, term).
    Snapshot(SnapshotMeta, (u64, u64)),
    Entry(LogEntry),
}

/// An open file. It is locked against other processes.
pub struct Disk {
    /// `None` only after reopening failed because the disk was full.
    database: Option<Database>,
    trouble: Arc<Trouble>,
    /// `None` for a backend that is not a file.
    path: Option<PathBuf>,
}

impl std::fmt::Debug for Disk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Disk(..)")
    }
}

impl Disk {
    /// Opens or creates the file and reads `node`'s state: `None` if the file was never
    /// [formatted](Self::format).
    pub fn open(path: &Path, node: &NodeId) -> Result<(Self, Option<Loaded>), StorageError> {
        if !path.exists() {
            make(path, node)?;
        }
        let trouble = Arc::default();
        let load = || Self::load(node, Some(path), &trouble, || open_file(path, &trouble));
        match load() {
            // redb rolls back uncommitted writes on open, and that needs space.
            Err(_) if trouble.is_only_full() => {
                Reserve::for_file(path).give_up().map_err(failed)?;
                load().map_err(|error| if trouble.is_only_full() { StorageError::Full } else { error })
            }
            opened => opened,
        }
    }

    /// Renames a damaged file, so that it can be inspected.
    pub fn put_aside(path: &Path) -> Result<(), StorageError> {
        let renamed = std::fs::rename(path, aside(path));
        let synced =
            renamed.and_then(|()| path.parent().map_or(Ok(()), |dir| std::fs::File::open(dir)?.sync_all()));
        synced.map_err(failed)
    }

    /// Whether a damaged file was [put aside](Self::put_aside) there.
    pub fn was_put_aside(path: &Path) -> bool {
        aside(path).exists()
    }

    /// Like [`open`](Self::open), on another backend.
    pub fn on(backend: impl StorageBackend, node: &NodeId) -> Result<(Self, Option<Loaded>), StorageError> {
        let trouble = Arc::default();
        Self::load(node, None, &trouble, || open(backend, &trouble))
    }

    /// Writes the initial state. Only for a disk that was never formatted.
    pub fn format(&mut self, loaded: &Loaded) -> Result<(), StorageError> {
        self.transaction(|txn| {
            let format = format_of(&loaded.entries, [&loaded.snapshot]);
            put_bytes(txn, FORMAT, &format.to_le_bytes())?;
            put(txn, IDENTITY, &Record::Identity(loaded.identity.clone()))?;
            put_snapshot(txn, &loaded.snapshot, loaded.compacted)?;
            put(txn, HARD, &Record::Hard(loaded.hard))?;
            loaded.entries.iter().try_for_each(|entry| put_entry(txn, entry))
        })
    }

    fn load(
        node: &NodeId,
        path: Option<&Path>,
        trouble: &Arc<Trouble>,
        open: impl FnOnce() -> Result<Database, StorageError>,
    ) -> Result<(Self, Option<Loaded>), StorageError> {
        // redb panics on some damaged files; this turns the panic into an error.
        let opened = catch_unwind(AssertUnwindSafe(|| {
            let mut database = open()?;
            // Otherwise redb would detect damage in unread pages only when it closes the file.
            database.check_integrity().map_err(|error| damaged("the file", error.to_string()))?;
            // Creates both tables if they are missing.
            transaction(&database, |_| Ok(()))?;
            let loaded = read(&database.begin_read().map_err(unopened)?)?;
            let (trouble, path) = (Arc::clone(trouble), path.map(Path::to_owned));
            Ok((Self { database: Some(database), trouble, path }, loaded))
        }));
        let (disk, loaded) =
            opened.unwrap_or_else(|_| Err(damaged("the file", "its structure is broken")))?;
        match &loaded {
            Some(Loaded { identity, .. }) if identity.node != *node => {
                Err(StorageError::Foreign { found: identity.node.clone(), expected: node.clone() })
            }
            _ => Ok((disk, loaded)),
        }
    }

    /// Opens a file without reading its records.
    #[cfg(test)]
    pub(super) fn unread(path: &Path) -> Self {
        let trouble = Arc::default();
        let database = open_file(path, &trouble).ok();
        Self { database, trouble, path: Some(path.to_owned()) }
    }

    /// The format's number.
    #[cfg(test)]
    pub(super) fn format_number(&self) -> u32 {
        let txn = self.database.as_ref().unwrap().begin_read().unwrap();
        let sealed = txn.open_table(STATE).unwrap().get(FORMAT).unwrap().unwrap();
        let bytes = unseal(FORMAT, FORMAT.as_bytes(), sealed.value()).unwrap();
        u32::from_le_bytes(bytes.try_into().unwrap())
    }

    /// Replaces or removes the format's number.
    #[cfg(test)]
    pub(super) fn set_format(&self, format: Option<u32>) {
        let set = self.transaction(|txn| match format {
            Some(format) => put_bytes(txn, FORMAT, &format.to_le_bytes()),
            None => txn.open_table(STATE).map_err(failed)?.remove(FORMAT).map_err(failed).map(drop),
        });
        assert!(set.is_ok());
    }
    /// Runs `body` as one durable transaction. Returns [`StorageError::Full`] if lack of space was the only
    /// error.
    fn transaction(
        &self,
        body: impl FnOnce(&WriteTransaction) -> Result<(), StorageError>,
    ) -> Result<(), StorageError> {
        let Some(database) = &self.database else { return Err(StorageError::Full) };
        self.trouble.forget();
        transaction(database, body).map_err(|error| self.full_or(error))
    }

    fn full_or(&self, error: StorageError) -> StorageError {
        if self.trouble.is_only_full() { StorageError::Full } else { error }
    }

    fn reserve(&self) -> Option<Reserve> {
        self.path.as_deref().map(Reserve::for_file)
    }
}

/// Creates an empty database under a temporary name and renames it when it is complete. So a full disk or a
/// crash never leaves an incomplete file that looks damaged.
fn make(path: &Path, node: &NodeId) -> Result<(), StorageError> {
    let unfinished = path.with_extension("unfinished");
    let remove = || match std::fs::remove_file(&unfinished) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(failed(error)),
        _ => Ok(()),
    };
    remove()?;
    let trouble = Arc::default();
    let made = Disk::load(node, Some(&unfinished), &trouble, || open_file(&unfinished, &trouble)).map(drop);
    let made = made.and_then(|()| {
        std::fs::File::open(&unfinished).and_then(|file| file.sync_all()).map_err(failed)?;
        std::fs::rename(&unfinished, path).map_err(failed)?;
        // Syncs the directory, so that the file name survives a crash.
        path.parent().map_or(Ok(()), |dir| std::fs::File::open(dir)?.sync_all()).map_err(failed)
    });
    made.map_err(|error| {
        // Cleans up. A failure to do so would only hide the original error.
        let _ = remove();
        if trouble.is_only_full() { StorageError::Full } else { error }
    })
}

/// The path of a file that was put aside.
fn aside(path: &Path) -> PathBuf {
    path.with_extension("damaged")
}

fn open(backend: impl StorageBackend, trouble: &Arc<Trouble>) -> Result<Database, StorageError> {
    let watched = Watched::new(backend, trouble);
    Database::builder().set_cache_size(CACHE_BYTES).create_with_backend(watched).map_err(unopened)
}

fn open_file(path: &Path, trouble: &Arc<Trouble>) -> Result<Database, StorageError> {
    open(room::file(path).map_err(failed)?, trouble)
}

fn transaction(
    database: &Database,
    body: impl FnOnce(&WriteTransaction) -> Result<(), StorageError>,
) -> Result<(), StorageError> {
    let txn = database.begin_write().map_err(failed)?;
    txn.open_table(LOG).map_err(failed)?;
    txn.open_table(STATE).map_err(failed)?;
    body(&txn)?;
    txn.commit().map_err(failed)
}

impl Storage for Disk {
    fn write(&mut self, write: &Write) -> Result<(), StorageError> {
        let compact = write.compact.as_ref().map(|(snapshot, _)| snapshot);
        let format = format_of(&write.entries, write.install.iter().chain(compact));
        self.transaction(|txn| {
            if format > FORMAT_FIRST {
                put_bytes(txn, FORMAT, &format.to_le_bytes())?;
            }
            if let Some(snapshot) = &write.install {
                put_snapshot(txn, snapshot, (snapshot.meta.index, snapshot.meta.term))?;
                cut(txn, 0..=u64::MAX)?;
            }
            if let Some(first) = write.entries.first() {
                cut(txn, first.index..=u64::MAX)?;
                write.entries.iter().try_for_each(|entry| put_entry(txn, entry))?;
            }
            if let Some(hard) = write.hard {
                put(txn, HARD, &Record::Hard(hard))?;
            }
            if let Some((snapshot, compacted)) = &write.compact {
                put_snapshot(txn, snapshot, *compacted)?;
                cut(txn, 0..=compacted.0)?;
            }
            Ok(())
        })
    }

    fn recover(&mut self) -> Result<(), StorageError> {
        let Some(path) = self.path.clone() else {
            return Err(failed("the file cannot be opened again"));
        };
        // redb must be reopened after a failed write; this rolls back uncommitted data.
        self.database = None;
        if let Some(reserve) = self.reserve() {
            reserve.give_up().map_err(failed)?;
        }
        self.trouble.forget();
        let trouble = Arc::clone(&self.trouble);
        let opened = catch_unwind(AssertUnwindSafe(|| open_file(&path, &trouble)));
        let opened = opened.unwrap_or_else(|_| Err(damaged("the file", "its structure is broken")));
        self.database = Some(opened.map_err(|error| self.full_or(error))?);
        Ok(())
    }

    fn reserve_space(&mut self) -> Result<bool, StorageError> {
        let Some(reserve) = self.reserve() else { return Ok(true) };
        Ok(reserve.make().unwrap_or_else(|error| {
            // The log itself can still be written.
            tracing::warn!(%error, "cannot reserve disk space for the case that the disk is full");
            true
        }))
    }
}

fn failed(error: impl std::fmt::Display) -> StorageError {
    StorageError::Disk(error.to_string())
}

/// Treats redb's structural errors on readable files as damage.
fn unopened(error: impl Into<redb::Error>) -> StorageError {
    match error.into() {
        redb::Error::Corrupted(why) => damaged("the file", why),
        redb::Error::Io(error) if error.kind() == ErrorKind::InvalidData => {
            damaged("the file", error.to_string())
        }
        error => failed(error),
    }
}

fn damaged(record: impl Into<String>, why: impl Into<String>) -> StorageError {
    StorageError::Damaged { record: record.into(), why: why.into() }
}

/// For a record with a correct checksum that does not decode.
fn unknown(record: &str, error: &CodecError) -> StorageError {
    StorageError::Unknown { record: record.to_owned(), why: error.to_string() }
}

fn checksum(key: &[u8], bytes: &[u8]) -> [u8; CHECKSUM_BYTES] {
    let mut hash = blake3::Hasher::new();
    hash.update(&(key.len() as u64).to_le_bytes()).update(key).update(bytes);
    let mut sum = [0; CHECKSUM_BYTES];
    hash.finalize_xof().fill(&mut sum);
    sum
}

fn seal(key: &[u8], bytes: &[u8]) -> Vec<u8> {
    let mut sealed = checksum(key, bytes).to_vec();
    sealed.extend_from_slice(bytes);
    sealed
}

fn unseal<'a>(name: &str, key: &[u8], sealed: &'a [u8]) -> Result<&'a [u8], StorageError> {
    match sealed.split_first_chunk::<CHECKSUM_BYTES>() {
        Some((sum, bytes)) if *sum == checksum(key, bytes) => Ok(bytes),
        _ => Err(damaged(name, "its checksum is wrong")),
    }
}

fn put(txn: &WriteTransaction, name: &str, record: &Record) -> Result<(), StorageError> {
    put_bytes(txn, name, &encode(record, Cap::Control)?)
}

fn put_bytes(txn: &WriteTransaction, name: &str, bytes: &[u8]) -> Result<(), StorageError> {
    let sealed = seal(name.as_bytes(), bytes);
    let mut state = txn.open_table(STATE).map_err(failed)?;
    state.insert(name, sealed.as_slice()).map_err(failed)?;
    Ok(())
}

fn put_snapshot(
    txn: &WriteTransaction,
    snapshot: &Snapshot,
    compacted: (u64, u64),
) -> Result<(), StorageError> {
    put(txn, SNAPSHOT, &Record::Snapshot(snapshot.meta.clone(), compacted))?;
    put_bytes(txn, SNAPSHOT_DATA, &snapshot.data)
}

fn put_entry(txn: &WriteTransaction, entry: &LogEntry) -> Result<(), StorageError> {
    let sealed = seal(&entry.index.to_le_bytes(), &encode(&Record::Entry(entry.clone()), Cap::Control)?);
    let mut log = txn.open_table(LOG).map_err(failed)?;
    log.insert(entry.index, sealed.as_slice()).map_err(failed)?;
    Ok(())
}

/// The format version that these records need. An entry or a snapshot that does not decode is reported by its reader.
fn format_of<'a>(entries: &[LogEntry], snapshots: impl IntoIterator<Item = &'a Snapshot>) -> u32 {
    let first = Level(1);
    let of_entry = |entry: &LogEntry| match &entry.body {
        EntryBody::Plain(bytes) | EntryBody::Membership(bytes) => match decode_entry(bytes) {
            Ok(Entry::Change(SessionChange { change, .. })) => change.level(),
            Ok(Entry::OpenSession(_)) | Err(_) => first,
        },
    };
    let of_snapshot =
        |snapshot: &Snapshot| Table::from_bytes(&snapshot.data).map_or(first, |table| table.used_level());
    let levels = entries.iter().map(of_entry).chain(snapshots.into_iter().map(of_snapshot));
    if levels.max() > Some(first) { FORMAT_OWN } else { FORMAT_FIRST }
}

fn cut(txn: &WriteTransaction, range: std::ops::RangeInclusive<u64>) -> Result<(), StorageError> {
    let mut log = txn.open_table(LOG).map_err(failed)?;
    log.retain_in(range, |_, _| false).map_err(failed)
}

fn read(txn: &ReadTransaction) -> Result<Option<Loaded>, StorageError> {
    let state = txn.open_table(STATE).map_err(unopened)?;
    let record = |name: &str| -> Result<Option<Record>, StorageError> {
        let Some(sealed) = state.get(name).map_err(unopened)? else { return Ok(None) };
        let bytes = unseal(name, name.as_bytes(), sealed.value())?;
        decode(bytes, Cap::Control).map(Some).map_err(|error| unknown(name, &error))
    };
    if state.get(IDENTITY).map_err(unopened)?.is_none() {
        return Ok(None);
    }
    let format = match state.get(FORMAT).map_err(unopened)? {
        Some(sealed) => Some(unseal(FORMAT, FORMAT.as_bytes(), sealed.value())?.to_vec()),
        None => None,
    };
    let found = format.and_then(|bytes| Some(u32::from_le_bytes(bytes.try_into().ok()?)));
    if !found.is_some_and(|found| (FORMAT_FIRST..=FORMAT_OWN).contains(&found)) {
        return Err(StorageError::Format { found: found.unwrap_or(0), own: FORMAT_OWN });
    }
    let Some(first) = record(IDENTITY)? else { return Ok(None) };
    let (Record::Identity(identity), Some(Record::Hard(hard)), Some(Record::Snapshot(meta, compacted))) =
        (first, record(HARD)?, record(SNAPSHOT)?)
    else {
        return Err(damaged("the state", "a record is missing or has another kind"));
    };
    let missing = || damaged(SNAPSHOT_DATA, "it is missing");
    let sealed = state.get(SNAPSHOT_DATA).map_err(unopened)?.ok_or_else(missing)?;
    let data = unseal(SNAPSHOT_DATA, SNAPSHOT_DATA.as_bytes(), sealed.value())?;
    if data.len() > MAX_SNAPSHOT_BYTES {
        return Err(damaged(SNAPSHOT_DATA, "it is too long"));
    }
    let snapshot = Snapshot { meta, data: data.into() };
    let entries = read_log(txn, compacted)?;
    let last = entries.last().map_or(compacted.0, |entry| entry.index);
    if compacted.0 > snapshot.meta.index || last < snapshot.meta.index || hard.commit > last {
        return Err(damaged("the log", "it has no entries between the snapshot and the commit index"));
    }
    Ok(Some(Loaded { identity, hard, snapshot, compacted, entries }))
}

/// Reads the entries, which must follow the last removed one without a gap.
fn read_log(txn: &ReadTransaction, compacted: (u64, u64)) -> Result<Vec<LogEntry>, StorageError> {
    let log = txn.open_table(LOG).map_err(unopened)?;
    let (mut entries, mut before) = (Vec::new(), compacted);
    for item in log.iter().map_err(unopened)? {
        let (key, sealed) = item.map_err(unopened)?;
        let index = key.value();
        let name = format!("entry {index}");
        let bytes = unseal(&name, &index.to_le_bytes(), sealed.value())?;
        let Record::Entry(entry) = decode(bytes, Cap::Control).map_err(|error| unknown(&name, &error))?
        else {
            return Err(damaged(name, "it is not an entry"));
        };
        if index != before.0 + 1 || entry.index != index || entry.term < before.1 {
            return Err(damaged(name, "it does not follow the entry before"));
        }
        before = (entry.index, entry.term);
        entries.push(entry);
    }
    Ok(entries)
}
