//! A partially downloaded file on disk, and small files of JSON beside it.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};

use crate::Error;

use super::super::disk::{io_error, sync_dir};
use super::super::transfer::{Transfer, TransferState};
use super::super::{CatalogError, Progress, Step, copy};
use super::{Format, RecordedFile, Sink, Stop, mismatch};

/// Suffix of a partial file.
const PART_SUFFIX: &str = ".part";
/// Suffix of the file with the state of a partial download.
const STATE_SUFFIX: &str = ".part.json";
/// Bytes between syncs. At most this much is downloaded again after a crash.
const SYNC_EVERY: u64 = 64 << 20;
/// Disk space that a download leaves free.
const SPARE: u64 = 64 << 20;
/// Longer record files are ignored.
const MAX_RECORD: u64 = 4 << 20;
/// Bytes of a file's beginning that show its format.
const BEGINNING: usize = 16;

#[derive(Default)]
pub(super) struct Hash {
    hash: Sha256,
    pub(super) bytes: u64,
}

impl Hash {
    pub(super) fn hex(self) -> String {
        self.hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl Write for Hash {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.hash.update(bytes);
        self.bytes += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A partially downloaded file: the first `state.have` bytes are synced to disk, later ones may not be.
pub(super) struct PartialFile {
    dir: PathBuf,
    name: String,
    format: Format,
    path: PathBuf,
    state_path: PathBuf,
    file: File,
    /// Hash of all bytes in the file.
    hash: Hash,
    pub(super) state: TransferState,
}

/// Bytes of `name` in `dir` that an earlier download left.
pub(super) fn bytes_of_part(dir: &Path, name: &str) -> u64 {
    fs::metadata(dir.join(format!("{name}{PART_SUFFIX}"))).map_or(0, |part| part.len())
}

/// Fails if the disk of `dir` has no room for `needed` bytes.
pub(super) fn check_room(dir: &Path, needed: u64) -> Result<(), Error> {
    let disk = rustix::fs::statvfs(dir).map_err(|error| Error::Io {
        action: "measure",
        path: dir.to_owned(),
        source: error.into(),
    })?;
    let free = disk.f_bavail.saturating_mul(disk.f_frsize);
    if free < needed.saturating_add(SPARE) {
        return Err(CatalogError::NoRoom { path: dir.to_owned(), needed, free }.into());
    }
    Ok(())
}

impl PartialFile {
    /// Opens the part of `name`, whose folder is created.
    pub(super) fn open(
        dir: &Path,
        name: &str,
        format: Format,
        progress: &mut dyn Progress,
    ) -> Result<Self, Error> {
        let (path, state_path) =
            (dir.join(format!("{name}{PART_SUFFIX}")), dir.join(format!("{name}{STATE_SUFFIX}")));
        let dir = path.parent().unwrap_or(dir).to_owned();
        fs::create_dir_all(&dir).map_err(io_error("create", &dir))?;
        let mut file = File::options()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(&path)
            .map_err(io_error("create", &path))?;
        let length = file.metadata().map_err(io_error("read", &path))?.len();
        let state: TransferState = read_json(&state_path).unwrap_or_default();
        let state = if state.have <= length { state } else { TransferState::default() };
        file.set_len(state.have).map_err(io_error("write", &path))?;
        let mut hash = Hash::default();
        if state.have > 0 {
            progress.begin(Step::Checking, Some(state.have));
            copy(&mut file, &mut hash, &mut |bytes| progress.at(bytes)).map_err(io_error("read", &path))?;
        }
        Ok(Self { dir, name: name.to_owned(), format, path, state_path, file, hash, state })
    }

    /// Truncates the file to `at`, which is its current length or 0.
    fn cut(&mut self, at: u64, state: &TransferState) -> Result<(), Error> {
        if at != self.hash.bytes {
            self.file.set_len(0).map_err(io_error("write", &self.path))?;
            self.hash = Hash::default();
        }
        self.file.seek(SeekFrom::End(0)).map_err(io_error("write", &self.path))?;
        self.keep(state)
    }

    /// Syncs the bytes written so far and records their number.
    fn keep(&mut self, state: &TransferState) -> Result<(), Error> {
        self.file.sync_data().map_err(io_error("write", &self.path))?;
        self.state = TransferState { have: self.hash.bytes, ..state.clone() };
        write_json(&self.state_path, &self.state)
    }

    pub(super) fn has_its_format(&self) -> bool {
        let mut beginning = [0; BEGINNING];
        let length = self.hash.bytes.min(BEGINNING as u64) as usize;
        let read = beginning
            .get_mut(..length)
            .is_some_and(|beginning| self.file.read_exact_at(beginning, 0).is_ok());
        read && self.format.is_of(beginning.get(..length).unwrap_or_default())
    }

    /// Renames the file to its name if its SHA-256 matches `sha256` (if given); removes it otherwise.
    pub(super) fn finish(self, sha256: Option<String>) -> Result<RecordedFile, Error> {
        let file = self.name.rsplit('/').next().unwrap_or_default();
        let target = self.dir.join(file);
        let (bytes, found) = (self.hash.bytes, self.hash.hex());
        let found = RecordedFile { name: self.name, bytes, sha256: found };
        let remove = |path: &Path| fs::remove_file(path).map_err(io_error("remove", path));
        if let Some(expected) = sha256.filter(|expected| *expected != found.sha256) {
            remove(&self.path)?;
            remove(&self.state_path)?;
            return Err(mismatch(target, &found, &expected));
        }
        self.file.sync_all().map_err(io_error("write", &self.path))?;
        fs::rename(&self.path, &target).map_err(io_error("create", &target))?;
        remove(&self.state_path)?;
        sync_dir(&self.dir)?;
        Ok(found)
    }

    pub(super) fn remove(&self) -> Result<(), Error> {
        for path in [&self.path, &self.state_path] {
            match fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(io_error("remove", path)(error));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

impl Sink for PartialFile {
    fn begin(&mut self, at: u64, state: &TransferState) -> Result<(), Error> {
        self.cut(at, state)?;
        check_room(&self.dir, state.total.unwrap_or(0).saturating_sub(self.hash.bytes))
    }

    fn append(
        &mut self,
        body: &mut dyn Read,
        transfer: &mut Transfer,
        progress: &mut dyn Progress,
    ) -> Result<Result<(), Stop>, Error> {
        let mut buffer = vec![0; 256 << 10];
        let mut synced = self.hash.bytes;
        let stop = loop {
            let got = match body.read(&mut buffer) {
                Ok(0) => break Ok(()),
                Ok(got) => buffer.get(..got).unwrap_or_default(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => break Err(Stop::Network(error)),
            };
            if let Err(refusal) = transfer.received(got.len() as u64) {
                break Err(Stop::Refused(refusal));
            }
            let before = self.hash.bytes;
            self.file.write_all(got).map_err(io_error("write", &self.path))?;
            self.hash.write_all(got).map_err(io_error("write", &self.path))?;
            let beginning = BEGINNING as u64;
            if before < beginning && self.hash.bytes >= beginning && !self.has_its_format() {
                break Err(Stop::Format);
            }
            progress.at(self.hash.bytes);
            if !progress.is_wanted() {
                self.keep(transfer.state())?;
                return Err(CatalogError::Cancelled.into());
            }
            if self.hash.bytes - synced >= SYNC_EVERY {
                synced = self.hash.bytes;
                self.keep(transfer.state())?;
            }
        };
        self.keep(transfer.state())?;
        Ok(stop)
    }
}

/// Reads a JSON file. `None` if it is missing, too long or malformed.
pub(super) fn read_json<T: DeserializeOwned>(path: &Path) -> Option<T> {
    if fs::metadata(path).ok()?.len() > MAX_RECORD {
        return None;
    }
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

/// Writes a JSON file atomically.
pub(super) fn write_json(path: &Path, value: &impl Serialize) -> Result<(), Error> {
    let text = serde_json::to_vec(value).map_err(|source| Error::Io {
        action: "write",
        path: path.into(),
        source: source.into(),
    })?;
    let new = path.with_extension("new");
    fs::write(&new, text).map_err(io_error("write", &new))?;
    File::open(&new).and_then(|file| file.sync_all()).map_err(io_error("write", &new))?;
    fs::rename(&new, path).map_err(io_error("create", path))
}
