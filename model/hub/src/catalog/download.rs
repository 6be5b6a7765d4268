//! Downloads the files of an address into a directory. A download resumes where an earlier one stopped; a
//! file has its final name only when it is complete.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::Error;

use super::disk::{io_error, lock};
use super::http::{Head, Http};
use super::transfer::{MAX_BYTES, PlainHttp, ResponseAction, Size, Transfer, TransferState};
use super::{Address, CatalogError, Hub, Progress, Refusal, Step};
use partial::{Hash, PartialFile, read_json, write_json};

pub use folder::FolderRefusal;

mod folder;
mod partial;

/// File that records the completed download of a directory.
const RECORD: &str = "download.json";
const GGUF: &[u8; 4] = b"GGUF";

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
    /// Of a repository's folder.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub folder: Option<FolderState>,
}

/// The commit of a repository's folder, and its state on disk.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct FolderState {
    /// The commit that all files are of, if the hub named it.
    pub commit: Option<String>,
    /// Whether all files that the folder needs are among the recorded ones.
    pub complete: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordedFile {
    /// Path in the directory.
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

    fn empty(address: &Address, verification: Verification) -> Self {
        let folder = address.is_folder().then(FolderState::default);
        Self { address: address.to_string(), files: Vec::new(), verification, folder }
    }

    /// True if all files of `address` exist with their recorded lengths.
    pub(super) fn is_complete(&self, dir: &Path, address: &Address) -> bool {
        let named = |name: &String| self.files.iter().any(|file| file.name == *name && file.is_in(dir));
        self.address == address.to_string()
            && match &self.folder {
                Some(folder) => folder.complete && self.files.iter().all(|file| file.is_in(dir)),
                None => !address.is_folder() && address.files().iter().all(named),
            }
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
    if address.is_folder() {
        return folder::fetch(dir, address, network, progress);
    }
    if !expected.sha256.is_empty() && expected.sha256.len() != address.files().len() {
        let (given, files) = (expected.sha256.len(), address.files().len());
        return Err(CatalogError::Checksums { address: address.to_string(), given, files }.into());
    }
    fs::create_dir_all(dir).map_err(io_error("create", dir))?;
    let _lock = lock(dir, progress)?;
    let empty = || Record::empty(address, expected.verification);
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
        let size = Size { expected: None, limit: MAX_BYTES };
        let (number, of, format) = (at + 1, address.files().len(), Format::Gguf);
        let request = FileRequest { dir, name, format, sha256, size, number, of };
        record.files.push(request.fetch(address, network, progress)?.file);
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

/// The format that a file must have, known by its first bytes. It keeps a page of a login or of a proxy from being taken
/// for the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    Gguf,
    Safetensors,
    Json,
    Text,
}

impl Format {
    /// Whether a file that begins with these 16 bytes, or is as short as they, may have the format.
    fn is_of(self, beginning: &[u8]) -> bool {
        match self {
            Self::Gguf => beginning.starts_with(GGUF),
            // The length of the header, then its JSON.
            Self::Safetensors => beginning.get(8) == Some(&b'{'),
            Self::Json => matches!(beginning.trim_ascii_start().first(), Some(b'{' | b'[')),
            Self::Text => true,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Gguf => "a GGUF file",
            Self::Safetensors => "a safetensors file",
            Self::Json => "a JSON file",
            Self::Text => "a text",
        }
    }
}

/// A file to be downloaded.
struct FileRequest<'a> {
    /// Directory that `name` is a path in.
    dir: &'a Path,
    name: &'a str,
    format: Format,
    sha256: Option<&'a str>,
    size: Size,
    number: usize,
    of: usize,
}

/// A file that was downloaded, and the commit that the hub named.
struct Fetched {
    file: RecordedFile,
    commit: Option<String>,
}

impl FileRequest<'_> {
    fn fetch(
        &self,
        address: &Address,
        network: &Network,
        progress: &mut dyn Progress,
    ) -> Result<Fetched, Error> {
        let url = address.url(&network.hub, self.name);
        let refused = |source: Refusal| -> Error {
            CatalogError::Download { address: address.to_string(), file: self.name.to_owned(), source }.into()
        };
        let mut partial = PartialFile::open(self.dir, self.name, self.format, progress)?;
        let bearer = network.hub.token.clone().filter(|_| address.is_of_hub());
        let mut transfer =
            Transfer::new(url, bearer, network.plain, self.size, partial.state.clone()).map_err(refused)?;
        let mut begin = |progress: &mut dyn Progress, total| {
            progress
                .begin(Step::Downloading { requirement: self.name, number: self.number, of: self.of }, total);
        };
        let stopped = drive(&mut transfer, &mut partial, network, &mut begin, progress)?;
        match stopped {
            Ok(()) if partial.has_its_format() => {}
            Ok(()) | Err(Stop::Format) => {
                partial.remove()?;
                let file = match address.is_folder() {
                    true => format!("{address}/{}", self.name),
                    false => address.to_string(),
                };
                return Err(CatalogError::NoModel { file, expected: self.format.name() }.into());
            }
            Err(Stop::Network(error)) => return Err(refused(Refusal::Failed(error.to_string()))),
            Err(Stop::Refused(refusal)) => {
                if matches!(refusal, Refusal::Absent(_)) {
                    partial.remove()?;
                }
                return Err(refused(refusal));
            }
        }
        // The server's own checksum detects bytes that a cache in between corrupted. It does not verify the
        // model.
        let reported = transfer.state().reported_sha256.clone();
        let file = partial.finish(self.sha256.map(str::to_owned).or(reported))?;
        Ok(Fetched { file, commit: transfer.commit().map(str::to_owned) })
    }
}

/// Where the bytes of a transfer go.
trait Sink {
    /// Prepares for a body that begins at `at`, which is the number of bytes here, or 0.
    fn begin(&mut self, at: u64, state: &TransferState) -> Result<(), Error>;

    /// Appends the body. The outer error is local I/O, the inner one a failure of the server or the network.
    fn append(
        &mut self,
        body: &mut dyn Read,
        transfer: &mut Transfer,
        progress: &mut dyn Progress,
    ) -> Result<Result<(), Stop>, Error>;

    /// Reads further headers of the last response.
    fn head(&mut self, _: &Head) {}
}

/// Sends requests until the transfer is complete or cannot succeed. `begin` announces each body.
fn drive(
    transfer: &mut Transfer,
    sink: &mut dyn Sink,
    network: &Network,
    begin: &mut dyn FnMut(&mut dyn Progress, Option<u64>),
    progress: &mut dyn Progress,
) -> Result<Result<(), Stop>, Error> {
    loop {
        let verdict = match network.http.get(&transfer.request()) {
            Err(error) if is_final(&error) => return Ok(Err(Stop::Network(error))),
            Err(error) => transfer.broken(&error.to_string(), None),
            Ok(mut response) => match transfer.head(&response.head) {
                Ok(ResponseAction::Body { at }) => {
                    sink.head(&response.head);
                    let state = transfer.state().clone();
                    sink.begin(at, &state)?;
                    begin(progress, state.total);
                    match sink.append(&mut response.body, transfer, progress)? {
                        Ok(()) => transfer.ended(),
                        Err(Stop::Network(error)) if !is_final(&error) => {
                            transfer.broken(&error.to_string(), None)
                        }
                        Err(stop) => return Ok(Err(stop)),
                    }
                }
                verdict => verdict,
            },
        };
        match verdict {
            Ok(ResponseAction::Complete) => return Ok(Ok(())),
            Ok(ResponseAction::RetryAfter(pause)) => network.http.pause(pause),
            Ok(ResponseAction::Again | ResponseAction::Body { .. }) => {}
            Err(refusal) => return Ok(Err(Stop::Refused(refusal))),
        }
    }
}

/// True if a retry is useless: certificate errors, and servers that do not speak HTTP.
fn is_final(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput)
}

/// Reason why a transfer stopped.
enum Stop {
    Network(io::Error),
    Refused(Refusal),
    /// The bytes are of another format.
    Format,
}

#[cfg(test)]
mod tests;
