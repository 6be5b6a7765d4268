//! Downloads the files of an address into a directory. A download resumes where an earlier one stopped; a
//! file has its final name only when it is complete.

use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::Error;

use super::disk::{io_error, lock, sync_dir};
use super::http::Http;
use super::transfer::{PlainHttp, ResponseAction, Transfer, TransferState};
use super::{Address, CatalogError, Hub, Progress, Refusal, Step};

/// File that records the completed download of a directory.
const RECORD: &str = "download.json";
/// Suffix of a partial file.
const PART_SUFFIX: &str = ".part";
/// Suffix of the file with the state of a partial download.
const STATE_SUFFIX: &str = ".part.json";
/// Bytes between syncs. At most this much is downloaded again after a crash.
const SYNC_EVERY: u64 = 64 << 20;
/// Disk space that a download leaves free.
const SPARE: u64 = 64 << 20;
const GGUF: &[u8; 4] = b"GGUF";
/// Longer record files are ignored.
const MAX_RECORD: u64 = 4 << 20;

/// Network access for downloads.
pub struct Network {
    pub http: Box<dyn Http>,
    /// Hub that `hf://` addresses refer to.
    pub hub: Hub,
    /// Hosts that may be contacted without TLS.
    pub plain: PlainHttp,
}

/// Verification of a model's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Verification {
    /// Their SHA-256 is pinned in the catalog.
    Pinned,
    /// The user gave their SHA-256.
    Given,
    /// Not verified: the server's bytes were accepted as they are.
    Unverified,
}

impl Verification {
    /// The word shown to users.
    pub fn word(self) -> &'static str {
        match self {
            Self::Pinned => "pinned",
            Self::Given => "given",
            Self::Unverified => "unverified",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Source address without its query.
    pub address: String,
    /// Downloaded files, in the order of a split set.
    pub files: Vec<RecordedFile>,
    pub verification: Verification,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordedFile {
    /// File name in the directory.
    pub name: String,
    pub bytes: u64,
    /// SHA-256 of the downloaded bytes, in hexadecimal.
    pub sha256: String,
}

/// Expected checksums: one SHA-256 per file, or empty.
#[derive(Debug, Clone, Copy)]
pub(super) struct ExpectedChecksums<'a> {
    pub(super) sha256: &'a [String],
    /// Recorded as the source of the checksums.
    pub(super) verification: Verification,
}

impl Record {
    /// Reads the record of `dir`. `None` if there is none.
    pub(super) fn read(dir: &Path) -> Option<Self> {
        read_json(&dir.join(RECORD))
    }

    fn write(&self, dir: &Path) -> Result<(), Error> {
        write_json(&dir.join(RECORD), self)
    }

    /// True if all files of `address` exist with their recorded lengths.
    pub(super) fn is_complete(&self, dir: &Path, address: &Address) -> bool {
        self.address == address.to_string()
            && address
                .files()
                .iter()
                .all(|name| self.files.iter().any(|file| file.name == *name && file.is_in(dir)))
    }

    /// Total size of all files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }
}

impl RecordedFile {
    fn is_in(&self, dir: &Path) -> bool {
        fs::metadata(dir.join(&self.name)).is_ok_and(|file| file.is_file() && file.len() == self.bytes)
    }
}

/// Downloads the files of `address` into `dir` unless they are present. If two processes call this at once,
/// one downloads and the other waits.
pub(super) fn fetch(
    dir: &Path,
    address: &Address,
    expected: ExpectedChecksums<'_>,
    network: &Network,
    progress: &mut dyn Progress,
) -> Result<Record, Error> {
    if !expected.sha256.is_empty() && expected.sha256.len() != address.files().len() {
        let (given, files) = (expected.sha256.len(), address.files().len());
        return Err(CatalogError::Checksums { address: address.to_string(), given, files }.into());
    }
    fs::create_dir_all(dir).map_err(io_error("create", dir))?;
    let _lock = lock(dir, progress)?;
    let empty =
        || Record { address: address.to_string(), files: Vec::new(), verification: expected.verification };
    let mut record =
        Record::read(dir).filter(|record| record.address == address.to_string()).unwrap_or_else(empty);
    record.files.retain(|file| file.is_in(dir));
    let before = record.clone();
    for (at, name) in address.files().iter().enumerate() {
        let sha256 = expected.sha256.get(at).map(String::as_str);
        if let Some(file) = record.files.iter().find(|file| file.name == *name) {
            if let Some(sha256) = sha256.filter(|sha256| *sha256 != file.sha256) {
                return Err(mismatch(dir.join(name), file, sha256));
            }
            continue;
        }
        let request = FileRequest { dir, name, sha256, number: at + 1, of: address.files().len() };
        let file = request.fetch(address, network, progress)?;
        record.files.push(file);
        record.write(dir)?;
    }
    // Files that were downloaded unverified become verified if checksums are given now.
    if !expected.sha256.is_empty() {
        record.verification = expected.verification;
    }
    if record != before {
        record.write(dir)?;
    }
    Ok(record)
}

/// Hashes the files of `dir` and compares them with the record.
pub(super) fn verify(dir: &Path, record: &Record, progress: &mut dyn Progress) -> Result<(), Error> {
    for recorded in &record.files {
        let path = dir.join(&recorded.name);
        let mut file = File::open(&path).map_err(io_error("open", &path))?;
        progress.begin(Step::Checking, Some(recorded.bytes));
        let mut hash = Hash::default();
        super::copy(&mut file, &mut hash, &mut |bytes| progress.at(bytes))
            .map_err(io_error("read", &path))?;
        let found = RecordedFile { name: recorded.name.clone(), bytes: hash.bytes, sha256: hash.hex() };
        if found != *recorded {
            return Err(mismatch(path, &found, &recorded.sha256));
        }
    }
    Ok(())
}

fn mismatch(path: PathBuf, found: &RecordedFile, expected: &str) -> Error {
    let (found, bytes) = (found.sha256.clone(), found.bytes);
    CatalogError::Digest { path, found, bytes, expected: expected.to_owned() }.into()
}

/// A file to be downloaded.
struct FileRequest<'a> {
    dir: &'a Path,
    name: &'a str,
    sha256: Option<&'a str>,
    number: usize,
    of: usize,
}

impl FileRequest<'_> {
    fn fetch(
        &self,
        address: &Address,
        network: &Network,
        progress: &mut dyn Progress,
    ) -> Result<RecordedFile, Error> {
        let mut partial = PartialFile::open(self.dir, self.name, progress)?;
        let bearer = network.hub.token.clone().filter(|_| address.is_of_hub());
        let url = address.url(&network.hub, self.name);
        let refused = |source: Refusal| -> Error {
            CatalogError::Download { address: address.to_string(), file: self.name.to_owned(), source }.into()
        };
        let mut transfer =
            Transfer::new(url, bearer, network.plain, None, partial.state.clone()).map_err(refused)?;
        loop {
            let verdict = match network.http.get(&transfer.request()) {
                Err(error) if is_final(&error) => return Err(refused(Refusal::Failed(error.to_string()))),
                Err(error) => transfer.broken(&error.to_string(), None),
                Ok(mut response) => match transfer.head(&response.head) {
                    Ok(ResponseAction::Body { at }) => {
                        let state = transfer.state().clone();
                        partial.cut(at, &state)?;
                        partial.check_room(state.total)?;
                        let step =
                            Step::Downloading { requirement: self.name, number: self.number, of: self.of };
                        progress.begin(step, state.total);
                        match partial.append(&mut response.body, &mut transfer, progress)? {
                            Ok(()) => transfer.ended(),
                            Err(Stop::Network(error)) if is_final(&error) => {
                                return Err(refused(Refusal::Failed(error.to_string())));
                            }
                            Err(Stop::Network(error)) => transfer.broken(&error.to_string(), None),
                            Err(Stop::Refused(refusal)) => Err(refusal),
                            Err(Stop::NoModel) => {
                                partial.remove()?;
                                return Err(CatalogError::NoModel { address: address.to_string() }.into());
                            }
                        }
                    }
                    verdict => verdict,
                },
            };
            match verdict.map_err(refused)? {
                ResponseAction::Complete => break,
                ResponseAction::RetryAfter(pause) => network.http.pause(pause),
                ResponseAction::Again | ResponseAction::Body { .. } => {}
            }
        }
        if !partial.begins_as_gguf() {
            partial.remove()?;
            return Err(CatalogError::NoModel { address: address.to_string() }.into());
        }
        // The server's own checksum detects bytes that a cache in between corrupted. It does not verify the
        // model.
        let reported = transfer.state().reported_sha256.clone();
        partial.finish(self.name, self.sha256.map(str::to_owned).or(reported))
    }
}

/// True if a retry is useless: certificate errors, and servers that do not speak HTTP.
fn is_final(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput)
}

/// Reason why reading a body stopped early.
enum Stop {
    Network(io::Error),
    Refused(Refusal),
    NoModel,
}

#[derive(Default)]
struct Hash {
    hash: Sha256,
    bytes: u64,
}

impl Hash {
    fn hex(self) -> String {
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
struct PartialFile {
    dir: PathBuf,
    path: PathBuf,
    state_path: PathBuf,
    file: File,
    /// Hash of all bytes in the file.
    hash: Hash,
    state: TransferState,
}

impl PartialFile {
    fn open(dir: &Path, name: &str, progress: &mut dyn Progress) -> Result<Self, Error> {
        let (path, state_path) =
            (dir.join(format!("{name}{PART_SUFFIX}")), dir.join(format!("{name}{STATE_SUFFIX}")));
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
            super::copy(&mut file, &mut hash, &mut |bytes| progress.at(bytes))
                .map_err(io_error("read", &path))?;
        }
        Ok(Self { dir: dir.into(), path, state_path, file, hash, state })
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

    fn check_room(&self, total: Option<u64>) -> Result<(), Error> {
        let needed = total.unwrap_or(0).saturating_sub(self.hash.bytes);
        let disk = rustix::fs::statvfs(&self.dir).map_err(|error| Error::Io {
            action: "measure",
            path: self.dir.clone(),
            source: error.into(),
        })?;
        let free = disk.f_bavail.saturating_mul(disk.f_frsize);
        if free < needed.saturating_add(SPARE) {
            return Err(CatalogError::NoRoom { path: self.dir.clone(), needed, free }.into());
        }
        Ok(())
    }

    /// Appends the body to the file. The outer error is local I/O, the inner one a failure of the server or
    /// the network.
    fn append(
        &mut self,
        body: &mut dyn io::Read,
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
            let magic = GGUF.len() as u64;
            if before < magic && self.hash.bytes >= magic && !self.begins_as_gguf() {
                break Err(Stop::NoModel);
            }
            progress.at(self.hash.bytes);
            if self.hash.bytes - synced >= SYNC_EVERY {
                synced = self.hash.bytes;
                self.keep(transfer.state())?;
            }
        };
        self.keep(transfer.state())?;
        Ok(stop)
    }

    fn begins_as_gguf(&self) -> bool {
        let mut magic = [0; GGUF.len()];
        self.file.read_exact_at(&mut magic, 0).is_ok_and(|()| magic == *GGUF)
    }

    /// Renames the file to `name` if its SHA-256 matches `sha256` (if given); removes it otherwise.
    fn finish(self, name: &str, sha256: Option<String>) -> Result<RecordedFile, Error> {
        let target = self.dir.join(name);
        let (bytes, found) = (self.hash.bytes, self.hash.hex());
        let found = RecordedFile { name: name.to_owned(), bytes, sha256: found };
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

    fn remove(&self) -> Result<(), Error> {
        for path in [&self.path, &self.state_path] {
            fs::remove_file(path).map_err(io_error("remove", path))?;
        }
        Ok(())
    }
}

/// Reads a JSON file. `None` if it is missing, too long or malformed.
fn read_json<T: DeserializeOwned>(path: &Path) -> Option<T> {
    if fs::metadata(path).ok()?.len() > MAX_RECORD {
        return None;
    }
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

/// Writes a JSON file atomically.
fn write_json(path: &Path, value: &impl Serialize) -> Result<(), Error> {
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

#[cfg(test)]
mod tests;
