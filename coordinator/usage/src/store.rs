//! The rows on disk: one redb file, written in transactions. redb has checksums of its pages.

use crate::book::Unsaved;
use crate::row::{Owner, Row, RowKey};
use proto::codec::{Cap, CodecError, decode, encode};
use redb::backends::FileBackend;
use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};
use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

const ROWS: TableDefinition<'_, &[u8], &[u8]> = TableDefinition::new("rows");
/// The version of each owner up to which all changes are in the file.
const VERSIONS: TableDefinition<'_, &[u8], u64> = TableDefinition::new("versions");
const STATE: TableDefinition<'_, &str, u64> = TableDefinition::new("state");
const FORMAT: &str = "format";
/// Format of the records. Counters are appended without a new number.
const FORMAT_OWN: u64 = 1;
const CACHE_BYTES: usize = 4 << 20;
const FILE: &str = "usage.redb";

/// Why the file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("{path}: {why}", path = .path.display())]
    Disk { path: PathBuf, why: String },
    #[error("{path}: the file has format {found}, this version reads format {FORMAT_OWN}; start the version that wrote it, or a later one", path = .path.display())]
    Format { path: PathBuf, found: u64 },
    #[error("{path}: a record of usage cannot be encoded: {source}", path = .path.display())]
    Codec { path: PathBuf, source: CodecError },
}

/// The rows of an owner, as read from the file.
pub type SavedOwner = (Owner, u64, Vec<(RowKey, Row)>);

/// An open file, locked against other processes.
#[derive(Debug)]
pub struct Store {
    database: Database,
    path: PathBuf,
}

impl Store {
    /// Opens or creates the file in `directory` and reads it. A damaged file is renamed: the rows of the last days are
    /// also at the other coordinators.
    ///
    /// # Errors
    ///
    /// If the directory cannot be used, or a later version wrote the file.
    pub fn open(directory: &Path) -> Result<(Self, Vec<SavedOwner>), StoreError> {
        let path = directory.join(FILE);
        match Self::load(&path) {
            Ok(opened) => Ok(opened),
            Err(Trouble::Refused(error)) => Err(error),
            Err(Trouble::Damaged(why)) => {
                let aside = path.with_extension("damaged");
                tracing::error!(path = %path.display(), why, "the record of usage on this disk is damaged; it is renamed to usage.damaged, and this coordinator gets rows from the others");
                std::fs::rename(&path, aside).map_err(|error| disk(&path, error))?;
                match Self::load(&path) {
                    Ok(opened) => Ok(opened),
                    Err(Trouble::Refused(error)) => Err(error),
                    Err(Trouble::Damaged(why)) => Err(StoreError::Disk { path, why }),
                }
            }
        }
    }

    fn load(path: &Path) -> Result<(Self, Vec<SavedOwner>), Trouble> {
        // redb panics on some damaged files; this turns the panic into an error.
        let opened = catch_unwind(AssertUnwindSafe(|| {
            // The names of tenants are not for other users.
            let file =
                OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path);
            let file = file.map_err(|error| Trouble::Refused(disk(path, error)))?;
            let file = FileBackend::new(file).map_err(|error| unopened(path, error))?;
            let database = Database::builder().set_cache_size(CACHE_BYTES).create_with_backend(file);
            let mut database = database.map_err(|error| unopened(path, error))?;
            database.check_integrity().map_err(|error| unopened(path, error))?;
            let format = begin(&database).map_err(|error| unopened(path, error))?;
            if format != FORMAT_OWN {
                return Err(Trouble::Refused(StoreError::Format { path: path.to_owned(), found: format }));
            }
            let owners = read(&database)?;
            Ok((Self { database, path: path.to_owned() }, owners))
        }));
        opened.unwrap_or_else(|_| Err(Trouble::Damaged("its structure is broken".to_owned())))
    }

    /// Writes changes in one transaction, durable when this returns.
    ///
    /// # Errors
    ///
    /// If the disk fails or is full; then nothing was written.
    pub fn save(&self, changes: &[Unsaved]) -> Result<(), StoreError> {
        self.write(changes).map_err(|error| disk(&self.path, error))
    }

    fn write(&self, changes: &[Unsaved]) -> Result<(), Box<dyn std::error::Error>> {
        let txn = self.database.begin_write()?;
        {
            let (mut rows, mut versions) = (txn.open_table(ROWS)?, txn.open_table(VERSIONS)?);
            for Unsaved { owner, version, rows: changed } in changes {
                let owner_bytes = encode(owner, Cap::Stream)?;
                match version {
                    Some(version) => versions.insert(owner_bytes.as_slice(), version)?,
                    None => versions.remove(owner_bytes.as_slice())?,
                };
                for (key, row) in changed {
                    let key = encode(&(owner, key), Cap::Stream)?;
                    match row {
                        Some(row) => rows.insert(key.as_slice(), encode(row, Cap::Stream)?.as_slice())?,
                        None => rows.remove(key.as_slice())?,
                    };
                }
            }
        }
        txn.commit()?;
        Ok(())
    }
}

/// Why a file was not loaded.
enum Trouble {
    Damaged(String),
    Refused(StoreError),
}

fn disk(path: &Path, error: impl std::fmt::Display) -> StoreError {
    StoreError::Disk { path: path.to_owned(), why: error.to_string() }
}

fn unopened(path: &Path, error: impl Into<redb::Error>) -> Trouble {
    match error.into() {
        redb::Error::Corrupted(why) => Trouble::Damaged(why),
        redb::Error::Io(error) if error.kind() == std::io::ErrorKind::InvalidData => {
            Trouble::Damaged(error.to_string())
        }
        error => Trouble::Refused(disk(path, error)),
    }
}

/// Creates the tables, and returns the format of the file.
fn begin(database: &Database) -> Result<u64, redb::Error> {
    let txn = database.begin_write()?;
    let format = {
        txn.open_table(ROWS)?;
        txn.open_table(VERSIONS)?;
        let mut state = txn.open_table(STATE)?;
        let known = state.get(FORMAT)?.map(|format| format.value());
        match known {
            Some(format) => format,
            None => {
                state.insert(FORMAT, FORMAT_OWN)?;
                FORMAT_OWN
            }
        }
    };
    txn.commit()?;
    Ok(format)
}

fn read(database: &Database) -> Result<Vec<SavedOwner>, Trouble> {
    let damaged = |error: CodecError| Trouble::Damaged(error.to_string());
    let failed = |error: redb::Error| Trouble::Damaged(error.to_string());
    let txn = database.begin_read().map_err(|error| failed(error.into()))?;
    let versions = txn.open_table(VERSIONS).map_err(|error| failed(error.into()))?;
    let rows = txn.open_table(ROWS).map_err(|error| failed(error.into()))?;
    let mut owners = std::collections::BTreeMap::new();
    for entry in versions.iter().map_err(|error| failed(error.into()))? {
        let (owner, version) = entry.map_err(|error| failed(error.into()))?;
        let owner: Owner = decode(owner.value(), Cap::Stream).map_err(damaged)?;
        owners.insert(owner, (version.value(), Vec::new()));
    }
    for entry in rows.iter().map_err(|error| failed(error.into()))? {
        let (key, row) = entry.map_err(|error| failed(error.into()))?;
        let (owner, key): (Owner, RowKey) = decode(key.value(), Cap::Stream).map_err(damaged)?;
        let row: Row = decode(row.value(), Cap::Stream).map_err(damaged)?;
        owners.entry(owner).or_insert((0, Vec::new())).1.push((key, row));
    }
    Ok(owners.into_iter().map(|(owner, (version, rows))| (owner, version, rows)).collect())
}

#[cfg(test)]
mod tests;
