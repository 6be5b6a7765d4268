//! Finds a model's files from one path: a single file, or `PREFIX-00001-of-00003.gguf` and its siblings.
//!
//! The first file of a set carries the model's metadata; every file carries `split.no` (from 0), `split.count`
//! and `split.tensors.count` (of the whole set), and its own tensor table. The tables in file order are the
//! model's tensors in their original order.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use super::parse::{self, Header};
use super::{Malformed, limits};
use crate::Error;
use crate::conversion::Region;
use crate::header::Contents;
use crate::header::TensorInfo;
use crate::mmap::MappedFile;
use metadata::Metadata;

const NUMBER: &str = "split.no";
const COUNT: &str = "split.count";
const TENSOR_COUNT: &str = "split.tensors.count";

/// Whether a key only describes the split.
fn is_split_key(key: &str) -> bool {
    key.starts_with("split.")
}

/// Opens `path` and, if it belongs to a set, the other files.
pub(super) fn open(path: &Path) -> Result<Contents, Error> {
    let given = SplitFile::open(path)?;
    let Some(count) = given.header.metadata.get::<u64>(COUNT)? else {
        return merge(vec![given]);
    };
    if !(1..=limits::PARTS).contains(&count) {
        let expected = count.clamp(1, limits::PARTS);
        return Err(Error::SplitMismatch { path: path.to_owned(), key: COUNT, found: count, expected });
    }
    let number: u64 = given.header.metadata.require(NUMBER)?;
    if number >= count {
        let expected = count - 1;
        return Err(Error::SplitMismatch { path: path.to_owned(), key: NUMBER, found: number, expected });
    }
    let mut parts = Vec::new();
    let mut given = Some(given);
    for index in 0..count {
        let part = match given.take_if(|_| index == number) {
            Some(given) => given,
            None => SplitFile::open_sibling(path, number, index, count)?,
        };
        part.expect(NUMBER, index)?;
        part.expect(COUNT, count)?;
        parts.push(part);
    }
    let total = parts.iter().map(|part| part.header.tensors.len() as u64).sum();
    for part in &parts {
        part.expect(TENSOR_COUNT, total)?;
    }
    merge(parts)
}

fn merge(parts: Vec<SplitFile>) -> Result<Contents, Error> {
    let mut contents = Contents { files: Vec::new(), metadata: Metadata::default(), tensors: Vec::new() };
    let mut names = HashSet::new();
    for (file, part) in parts.into_iter().enumerate() {
        for entry in part.header.tensors {
            if !names.insert(entry.name.clone()) {
                let source = Malformed::DuplicateTensor { tensor: entry.name };
                return Err(Error::Malformed { path: part.file.path().to_owned(), source });
            }
            let parse::TensorEntry { name, ty, dims, bytes, offset } = entry;
            contents.tensors.push(TensorInfo::stored(name, ty, dims, Region { file, offset, bytes }));
        }
        if file == 0 {
            contents.metadata = part.header.metadata;
            contents.metadata.retain(|key| !is_split_key(key));
        }
        contents.files.push(part.file);
    }
    Ok(contents)
}

struct SplitFile {
    file: MappedFile,
    header: Header,
}

impl SplitFile {
    fn open(path: &Path) -> Result<Self, Error> {
        let file = MappedFile::open(path)?;
        let header = parse::parse(file.bytes())
            .map_err(|source| Error::Malformed { path: path.to_owned(), source })?;
        Ok(Self { file, header })
    }

    /// Opens file `index` of the set of which `path` is file `number` (both from 0).
    fn open_sibling(path: &Path, number: u64, index: u64, count: u64) -> Result<Self, Error> {
        let sibling = sibling(path, number, index, count).ok_or_else(|| Error::SplitName {
            path: path.to_owned(),
            number: number.saturating_add(1),
            count,
        })?;
        if !sibling.exists() {
            return Err(Error::MissingPart { path: sibling, number: index.saturating_add(1), count });
        }
        Self::open(&sibling)
    }

    fn expect(&self, key: &'static str, expected: u64) -> Result<(), Error> {
        let found: u64 = self.header.metadata.require(key)?;
        if found != expected {
            return Err(Error::SplitMismatch { path: self.file.path().to_owned(), key, found, expected });
        }
        Ok(())
    }
}

/// Path of file `index` of a set, derived from that of file `number` (both from 0). `None` if the name does
/// not have the form of a split set's.
fn sibling(path: &Path, number: u64, index: u64, count: u64) -> Option<PathBuf> {
    let suffix = |number: u64| format!("-{:05}-of-{count:05}.gguf", number.saturating_add(1));
    let prefix = path.file_name()?.to_str()?.strip_suffix(&suffix(number))?;
    Some(path.with_file_name(format!("{prefix}{}", suffix(index))))
}
