//! A file of records that only grows. A record is a line: the first 16 hexadecimal digits of its BLAKE3, a space, and
//! its bytes, which have no line feed.

use crate::error::FilesError;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, BufWriter, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Longest record, in bytes.
pub(crate) const MAX_RECORD: usize = 68 << 20;
const DIGEST_DIGITS: usize = 16;

/// An open journal.
#[derive(Debug)]
pub(crate) struct Journal {
    file: File,
    path: PathBuf,
    len: u64,
}

impl Journal {
    /// Opens or creates the journal and calls `each` with every record. What a crash left of the last append is cut
    /// off. `each` returns whether it could read the record.
    ///
    /// # Errors
    ///
    /// If the disk fails, or a record is damaged that is followed by a whole one.
    pub(crate) fn open(path: &Path, mut each: impl FnMut(&[u8]) -> bool) -> Result<Self, FilesError> {
        let failed = |error| FilesError::disk(path, &error);
        // Requests and answers of tenants are not for other users.
        let mut options = OpenOptions::new();
        options.read(true).append(true).create(true).mode(0o600);
        let file = options.open(path).map_err(failed)?;
        let mut lines = BufReader::new(&file);
        let (mut len, mut damaged) = (0, None);
        let mut at = 0;
        let mut line = Vec::new();
        loop {
            line.clear();
            let read = lines.by_ref().take(MAX_RECORD as u64).read_until(b'\n', &mut line).map_err(failed)?;
            if read == 0 {
                break;
            }
            match (payload(&line), damaged) {
                (Some(_), Some(at)) => return Err(FilesError::Damaged { path: path.to_owned(), at }),
                (Some(record), None) if each(record) => len = at + read as u64,
                (Some(_), None) => return Err(FilesError::Damaged { path: path.to_owned(), at }),
                (None, _) => damaged = damaged.or(Some(at)),
            }
            at += read as u64;
        }
        if at > len {
            tracing::warn!(path = %path.display(), bytes = at - len, "the end of a journal was not written whole; it is cut off");
            file.set_len(len).and_then(|()| file.sync_all()).map_err(failed)?;
        }
        if len == 0 {
            sync_parent(path)?;
        }
        Ok(Self { file, path: path.to_owned(), len })
    }

    /// Calls `each` with every record of the journal.
    pub(crate) fn for_each(
        &self,
        mut each: impl FnMut(&[u8]) -> std::io::Result<()>,
    ) -> Result<(), FilesError> {
        let failed = |error| FilesError::disk(&self.path, &error);
        let mut lines = BufReader::new(File::open(&self.path).map_err(failed)?).take(self.len);
        let mut line = Vec::new();
        let mut at = 0;
        loop {
            line.clear();
            let read = lines.read_until(b'\n', &mut line).map_err(failed)? as u64;
            if read == 0 {
                return Ok(());
            }
            let record = payload(&line).ok_or_else(|| FilesError::Damaged { path: self.path.clone(), at })?;
            each(record).map_err(failed)?;
            at += read;
        }
    }

    /// Appends records, on disk when this returns. If it fails, none of them is in the journal.
    pub(crate) fn append<'a>(
        &mut self,
        records: impl IntoIterator<Item = &'a [u8]>,
    ) -> Result<(), FilesError> {
        let mut lines = Vec::new();
        records.into_iter().for_each(|record| push(&mut lines, record));
        let written = self.file.write_all(&lines).and_then(|()| self.file.sync_data());
        if let Err(error) = written {
            // If this fails too, the next start cuts off what is not whole.
            let _cut = self.file.set_len(self.len);
            return Err(FilesError::disk(&self.path, &error));
        }
        self.len += lines.len() as u64;
        Ok(())
    }

    /// Replaces the journal by one with these records, in one step.
    pub(crate) fn replace(
        path: &Path,
        records: impl IntoIterator<Item = Vec<u8>>,
    ) -> Result<Self, FilesError> {
        let failed = |error| FilesError::disk(path, &error);
        let new = path.with_extension("new");
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600);
        let mut out = BufWriter::new(options.open(&new).map_err(failed)?);
        let mut line = Vec::new();
        for record in records {
            line.clear();
            push(&mut line, &record);
            out.write_all(&line).map_err(failed)?;
        }
        let file = out.into_inner().map_err(|error| failed(error.into_error()))?;
        file.sync_all().map_err(failed)?;
        std::fs::rename(&new, path).map_err(failed)?;
        sync_parent(path)?;
        Self::open(path, |_| true)
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }
}

/// Makes the entries of the file's directory durable.
pub(crate) fn sync_parent(path: &Path) -> Result<(), FilesError> {
    let Some(parent) = path.parent() else { return Ok(()) };
    File::open(parent)
        .and_then(|directory| directory.sync_all())
        .map_err(|error| FilesError::disk(parent, &error))
}

fn digest(record: &[u8]) -> String {
    let mut digits = blake3::hash(record).to_hex().to_string();
    digits.truncate(DIGEST_DIGITS);
    digits
}

fn push(lines: &mut Vec<u8>, record: &[u8]) {
    lines.extend_from_slice(digest(record).as_bytes());
    lines.push(b' ');
    lines.extend_from_slice(record);
    lines.push(b'\n');
}

/// The record of a line; `None` if the line is not whole.
fn payload(line: &[u8]) -> Option<&[u8]> {
    let line = line.strip_suffix(b"\n")?;
    let (given, record) = line.split_at_checked(DIGEST_DIGITS)?;
    let record = record.strip_prefix(b" ")?;
    (digest(record).as_bytes() == given).then_some(record)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records(path: &Path) -> Result<Vec<Vec<u8>>, FilesError> {
        let mut all = Vec::new();
        Journal::open(path, |record| {
            all.push(record.to_vec());
            true
        })?;
        Ok(all)
    }

    #[test]
    fn a_journal_cut_at_any_byte_has_the_whole_records_before_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("journal");
        let written: [&[u8]; 4] = [b"one", b"", b"{\"three\": 3}", b"four"];
        let mut journal = Journal::open(&path, |_| true).unwrap();
        let mut ends = vec![0];
        for record in written {
            journal.append([record]).unwrap();
            ends.push(journal.len());
        }
        let whole = std::fs::read(&path).unwrap();
        for cut in 0..=whole.len() {
            std::fs::write(&path, &whole[..cut]).unwrap();
            let kept = ends.iter().filter(|end| **end <= cut as u64).count() - 1;
            assert_eq!(records(&path).unwrap(), written[..kept], "cut at {cut}");
            // The next record follows the last whole one.
            Journal::open(&path, |_| true).unwrap().append([&b"after"[..]]).unwrap();
            let mut after = written[..kept].to_vec();
            after.push(b"after");
            assert_eq!(records(&path).unwrap(), after, "cut at {cut}");
        }
    }

    #[test]
    fn a_damaged_record_before_a_whole_one_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("journal");
        Journal::open(&path, |_| true).unwrap().append([&b"one"[..], b"two", b"three"]).unwrap();
        let whole = std::fs::read(&path).unwrap();
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            std::fs::write(&path, &damaged).unwrap();
            // A line feed that is lost joins its record to the next one.
            let after = whole[at + 1..].iter().filter(|byte| **byte == b'\n').count();
            let (last, lost) = if whole[at] == b'\n' { (after <= 1, after + 1) } else { (after <= 1, 1) };
            match records(&path) {
                Ok(kept) => assert!(last && kept.len() == 3 - lost, "byte {at}"),
                Err(error) => {
                    assert!(!last && matches!(error, FilesError::Damaged { .. }), "byte {at}: {error}")
                }
            }
        }
    }
}
