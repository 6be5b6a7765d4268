//! Downloads the folder of a Hugging Face repository: the files that `model::checkpoint` reads, all of one commit.
//!
//! The hub's list of files gives sizes and checksums. A server without that list is asked for each file by its name.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Read};
use std::path::Path;

use model::checkpoint::{CONFIG, FILE_BYTES, INDEX, MAX_FILES, SINGLE, TEXT_FILES};
use serde::Deserialize;

use crate::Error;

use super::super::disk::{io_error, lock};
use super::super::transfer::{MAX_BYTES, Size, Transfer, TransferState};
use super::super::{Address, CatalogError, Progress, Refusal, Url};
use super::partial::{bytes_of_part, check_room};
use super::{FileRequest, Format, Head, Network, Record, Sink, Stop, Verification, drive};

/// Files that `model::checkpoint` does not read, but engines of other projects do.
const FOR_OTHERS: [&str; 5] = [
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
    "modules.json",
    "config_sentence_transformers.json",
];
/// Longest page of the list of files, in bytes.
const PAGE_BYTES: u64 = 16 << 20;
/// Most pages and most files of the list. The hub puts 1,000 files on a page.
const MAX_PAGES: usize = 1000;
const MAX_LISTED: usize = 100_000;
/// Longest name of a file with weights.
const MAX_NAME: usize = 200;

/// Why a repository cannot be pulled as a folder.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FolderRefusal {
    /// It has GGUF files instead of a checkpoint.
    #[error("its weights are GGUF files; name one of them, such as {example}")]
    Gguf { example: String },
    /// Its weights are pickles.
    #[error(
        "its weights are pickles ({file}), which can run code and are not read; name a repository with safetensors"
    )]
    Pickles { file: String },
    /// It has no file that a model needs.
    #[error("it has no {file}; a folder needs {CONFIG} and {SINGLE}, or {INDEX} with its files")]
    Lacks { file: String },
    #[error(
        "{INDEX} names the file {name:?}, expected a name of at most {MAX_NAME} letters, digits and -_. that ends with .safetensors"
    )]
    Name { name: String },
    #[error("{INDEX} names {found} files, at most {MAX_FILES} are accepted")]
    Files { found: usize },
    #[error("{file} has {found} bytes, at most {limit} are accepted")]
    Large { file: String, found: u64, limit: u64 },
    /// A file that is not what its name says.
    #[error("{file} cannot be read: {reason}")]
    Malformed { file: String, reason: String },
    #[error("its list of files has more than {MAX_LISTED} files or {MAX_PAGES} pages")]
    List,
}

/// A file's entry in the repository's list.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Listed {
    bytes: u64,
    /// Of files that the hub keeps in its large file storage.
    sha256: Option<String>,
}

/// Downloads the folder of `address` into `dir` unless it is there. If two processes call this at once, one downloads
/// and the other waits.
pub(super) fn fetch(
    dir: &Path,
    address: &Address,
    network: &Network,
    progress: &mut dyn Progress,
) -> Result<Record, Error> {
    fs::create_dir_all(dir).map_err(io_error("create", dir))?;
    let _lock = lock(dir, progress)?;
    let record = Record::read(dir).filter(|record| record.address == address.to_string());
    let mut record = record
        .filter(|record| record.folder.is_some())
        .unwrap_or_else(|| Record::empty(address, Verification::Unverified));
    if record.is_complete(dir, address) {
        return Ok(record);
    }
    record.files.retain(|file| file.is_in(dir));
    Pull { dir, address, network, record, listed: None, number: 0, of: 0 }.run(progress)
}

struct Pull<'a> {
    dir: &'a Path,
    address: &'a Address,
    network: &'a Network,
    record: Record,
    /// Files of the repository by path. `None` if the server has no list.
    listed: Option<BTreeMap<String, Listed>>,
    /// Number of the file that is downloaded, of so many.
    number: usize,
    of: usize,
}

impl Pull<'_> {
    fn run(mut self, progress: &mut dyn Progress) -> Result<Record, Error> {
        // The first answer names the commit of which all other files are requested.
        self.fetch(CONFIG, progress)?;
        self.listed = self.list(progress)?;
        if let Some(listed) = &self.listed {
            self.record.files.retain(|file| listed.get(&file.name).is_some_and(|listed| listed.is_of(file)));
        }
        if !self.fetch(CONFIG, progress)? {
            return Err(self.refuse_without(CONFIG));
        }
        let weights = self.weights(progress)?;
        let small = TEXT_FILES.iter().chain(&FOR_OTHERS).map(|name| (*name).to_owned());
        let mut missing: Vec<String> = small.filter(|name| self.may_have(name)).collect();
        missing.extend(weights.iter().cloned());
        missing.retain(|name| !self.has(name));
        self.check_sizes(&missing)?;
        self.number = self.record.files.len();
        self.of = self.number + missing.len();
        for name in &missing {
            if !self.fetch(name, progress)? && weights.contains(name) {
                return Err(self.refuse(FolderRefusal::Lacks { file: name.clone() }));
            }
        }
        self.folder().complete = true;
        self.record.write(self.dir)?;
        Ok(self.record)
    }

    fn folder(&mut self) -> &mut super::FolderState {
        self.record.folder.get_or_insert_default()
    }

    /// The address of the commit that the pull is of, or the given one while that is unknown.
    fn pinned(&self) -> Address {
        let commit = self.record.folder.as_ref().and_then(|folder| folder.commit.as_deref());
        commit.map_or_else(|| self.address.clone(), |commit| self.address.at(commit))
    }

    /// Whether the file has been downloaded.
    fn has(&self, name: &str) -> bool {
        self.record.files.iter().any(|file| file.name == name)
    }

    /// Whether the repository may have the file: it is in the list, or there is no list.
    fn may_have(&self, name: &str) -> bool {
        self.listed.as_ref().is_none_or(|listed| listed.contains_key(name))
    }

    /// Downloads a file unless it is there. False if the server has no such file.
    fn fetch(&mut self, name: &str, progress: &mut dyn Progress) -> Result<bool, Error> {
        if self.has(name) {
            return Ok(true);
        }
        if !self.may_have(name) {
            return Ok(false);
        }
        let listed = self.listed.as_ref().and_then(|listed| listed.get(name)).cloned();
        let (format, limit) = format_of(name);
        let expected = listed.as_ref().map(|listed| listed.bytes);
        if let Some(found) = expected.filter(|found| *found > limit) {
            let file = name.to_owned();
            return Err(self.refuse(FolderRefusal::Large { file, found, limit }));
        }
        self.number += 1;
        let request = FileRequest {
            dir: self.dir,
            name,
            format,
            sha256: listed.as_ref().and_then(|listed| listed.sha256.as_deref()),
            size: Size { expected, limit },
            number: self.number,
            of: self.of.max(self.number),
        };
        match request.fetch(&self.pinned(), self.network, progress) {
            Ok(fetched) => {
                let folder = self.folder();
                folder.commit = folder.commit.take().or(fetched.commit);
                self.record.files.push(fetched.file);
                self.record.write(self.dir)?;
                Ok(true)
            }
            Err(Error::Catalog(CatalogError::Download { source: Refusal::Absent(_), .. })) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Names of the files with weights.
    fn weights(&mut self, progress: &mut dyn Progress) -> Result<Vec<String>, Error> {
        if self.fetch(INDEX, progress)? {
            let names = self.indexed()?;
            if let Some(missing) = names.iter().find(|name| !self.may_have(name)) {
                return Err(self.refuse(FolderRefusal::Lacks { file: missing.clone() }));
            }
            return Ok(names.into_iter().collect());
        }
        match self.may_have(SINGLE) {
            true => Ok(vec![SINGLE.to_owned()]),
            false => Err(self.refuse_without(SINGLE)),
        }
    }

    /// The files that the index names.
    fn indexed(&self) -> Result<BTreeSet<String>, Error> {
        #[derive(Deserialize)]
        struct Index {
            weight_map: BTreeMap<String, String>,
        }
        let path = self.dir.join(INDEX);
        let text = fs::read(&path).map_err(io_error("read", &path))?;
        let index: Index = serde_json::from_slice(&text).map_err(|error| {
            self.refuse(FolderRefusal::Malformed { file: INDEX.to_owned(), reason: error.to_string() })
        })?;
        let names: BTreeSet<String> = index.weight_map.into_values().collect();
        if names.len() > MAX_FILES || names.is_empty() {
            return Err(self.refuse(FolderRefusal::Files { found: names.len() }));
        }
        // The names become names of local files.
        let plain = |name: &str| {
            let word = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
            name.len() <= MAX_NAME
                && name.ends_with(".safetensors")
                && !name.starts_with('.')
                && name.bytes().all(word)
        };
        match names.iter().find(|name| !plain(name)) {
            None => Ok(names),
            Some(name) => {
                let name = name.chars().take(MAX_NAME).collect();
                Err(self.refuse(FolderRefusal::Name { name }))
            }
        }
    }

    /// Refuses files that are too large, or more than the disk has room for.
    fn check_sizes(&self, missing: &[String]) -> Result<(), Error> {
        let Some(listed) = &self.listed else { return Ok(()) };
        let mut needed = 0_u64;
        for name in missing {
            let found = listed.get(name).map_or(0, |listed| listed.bytes);
            let (_, limit) = format_of(name);
            if found > limit {
                return Err(self.refuse(FolderRefusal::Large { file: name.clone(), found, limit }));
            }
            needed = needed.saturating_add(found.saturating_sub(bytes_of_part(self.dir, name)));
        }
        check_room(self.dir, needed)
    }

    fn refuse(&self, why: FolderRefusal) -> Error {
        CatalogError::Folder { address: self.address.to_string(), why }.into()
    }

    /// The error for a repository without `file`, by what it has instead.
    fn refuse_without(&self, file: &str) -> Error {
        let ends = |suffixes: &[&str]| {
            let names = self.listed.iter().flat_map(BTreeMap::keys);
            names.into_iter().find(|name| suffixes.iter().any(|suffix| name.ends_with(suffix)))
        };
        let why = if let Some(file) = ends(&[".gguf"]) {
            FolderRefusal::Gguf { example: format!("{}/{file}", self.address) }
        } else if let Some(file) = ends(&[".bin", ".pt", ".pth", ".pkl", ".ckpt"]) {
            FolderRefusal::Pickles { file: file.clone() }
        } else {
            FolderRefusal::Lacks { file: file.to_owned() }
        };
        self.refuse(why)
    }

    /// Reads the list of files. `None` if the server has none.
    fn list(&self, progress: &mut dyn Progress) -> Result<Option<BTreeMap<String, Listed>>, Error> {
        let mut files = BTreeMap::new();
        let mut next = self.pinned().list_url(&self.network.hub);
        let mut pages = 0;
        while let Some(url) = next.take() {
            pages += 1;
            if pages > MAX_PAGES || files.len() > MAX_LISTED {
                return Err(self.refuse(FolderRefusal::List));
            }
            let Some(page) = self.page(&url, progress)? else { return Ok(None) };
            let malformed = |reason: String| {
                self.refuse(FolderRefusal::Malformed { file: "its list of files".to_owned(), reason })
            };
            let entries: Vec<Entry> =
                serde_json::from_slice(&page.bytes).map_err(|error| malformed(error.to_string()))?;
            for entry in entries.into_iter().filter(|entry| entry.kind == "file") {
                let large = entry.lfs.unwrap_or_default();
                let bytes = large.size.unwrap_or(entry.size);
                let sha256 = large.oid.and_then(|oid| sha256(&oid));
                // Other names are not asked for, and are not shown.
                if is_plain(&entry.path) {
                    files.insert(entry.path, Listed { bytes, sha256 });
                }
            }
            next = match page.next {
                Some(location) => Some(url.join(&location).map_err(|error| malformed(error.to_string()))?),
                None => None,
            };
        }
        Ok(Some(files))
    }

    /// Reads a page of the list. `None` if the server has none.
    fn page(&self, url: &Url, progress: &mut dyn Progress) -> Result<Option<Page>, Error> {
        let refused = |source: Refusal| -> Error {
            let file = "the list of files".to_owned();
            CatalogError::Download { address: self.address.to_string(), file, source }.into()
        };
        let hub = &self.network.hub;
        let bearer = hub.token.clone().filter(|_| url.same_server(&hub.endpoint));
        let size = Size { expected: None, limit: PAGE_BYTES };
        let mut transfer =
            Transfer::new(url.clone(), bearer, self.network.plain, size, TransferState::default())
                .map_err(refused)?;
        let mut page = Page::default();
        match drive(&mut transfer, &mut page, self.network, &mut |_, _| {}, progress)? {
            Ok(()) => Ok(Some(page)),
            Err(Stop::Refused(Refusal::Absent(_))) => Ok(None),
            Err(Stop::Refused(refusal)) => Err(refused(refusal)),
            Err(Stop::Network(error)) => Err(refused(Refusal::Failed(error.to_string()))),
            Err(Stop::Format) => Err(refused(Refusal::Unsteady)),
        }
    }
}

impl Listed {
    /// Whether the recorded file may be this one.
    fn is_of(&self, file: &super::RecordedFile) -> bool {
        self.bytes == file.bytes && self.sha256.as_ref().is_none_or(|sha256| *sha256 == file.sha256)
    }
}

/// Format and largest size of a file of a folder.
fn format_of(name: &str) -> (Format, u64) {
    match name.rsplit_once('.').map(|(_, ending)| ending) {
        Some("safetensors") => (Format::Safetensors, MAX_BYTES),
        Some("json") => (Format::Json, FILE_BYTES),
        _ => (Format::Text, FILE_BYTES),
    }
}

/// Whether a path of the list can be shown, and be part of an address.
fn is_plain(path: &str) -> bool {
    path.len() <= 2 * MAX_NAME
        && path.split('/').all(|part| !part.is_empty() && !part.starts_with('.'))
        && path.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_./".contains(&byte))
}

/// Reads 64 hexadecimal digits, which some hubs write after `sha256:`.
fn sha256(oid: &str) -> Option<String> {
    let hex = oid.strip_prefix("sha256:").unwrap_or(oid);
    (hex.len() == 64 && hex.bytes().all(|byte| byte.is_ascii_hexdigit())).then(|| hex.to_ascii_lowercase())
}

/// An entry of the list, as the hub sends it.
#[derive(Deserialize)]
struct Entry {
    #[serde(rename = "type")]
    kind: String,
    path: String,
    #[serde(default)]
    size: u64,
    #[serde(default)]
    lfs: Option<Large>,
}

#[derive(Deserialize, Default)]
struct Large {
    oid: Option<String>,
    size: Option<u64>,
}

/// A page of the list, in memory.
#[derive(Default)]
struct Page {
    bytes: Vec<u8>,
    /// Address of the next page.
    next: Option<String>,
}

impl Sink for Page {
    fn begin(&mut self, at: u64, _: &TransferState) -> Result<(), Error> {
        self.bytes.truncate(at as usize);
        Ok(())
    }

    fn append(
        &mut self,
        body: &mut dyn Read,
        transfer: &mut Transfer,
        _: &mut dyn Progress,
    ) -> Result<Result<(), Stop>, Error> {
        let mut buffer = vec![0; 64 << 10];
        Ok(loop {
            match body.read(&mut buffer) {
                Ok(0) => break Ok(()),
                Ok(got) => {
                    if let Err(refusal) = transfer.received(got as u64) {
                        break Err(Stop::Refused(refusal));
                    }
                    self.bytes.extend_from_slice(buffer.get(..got).unwrap_or_default());
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => break Err(Stop::Network(error)),
            }
        })
    }

    fn head(&mut self, head: &Head) {
        self.next = head.header("link").and_then(next_link).map(str::to_owned);
    }
}

/// The target of `<target>; rel="next"` in a `Link` header.
fn next_link(header: &str) -> Option<&str> {
    header.split(',').find_map(|link| {
        let (target, relation) = link.trim().strip_prefix('<')?.split_once('>')?;
        relation.contains("rel=\"next\"").then_some(target)
    })
}

#[cfg(test)]
mod tests;
