//! The results of a running batch: a journal with one record for each line that has ended.

use crate::error::FilesError;
use crate::journal::{Journal, MAX_RECORD};
use std::collections::HashSet;
use std::io::{self, Write};
use std::path::Path;

/// Longest result of a line, in bytes.
pub const MAX_RESULT_BYTES: usize = MAX_RECORD - (1 << 20);

/// Where the result of a line belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The output file.
    Completed,
    /// The error file.
    Failed,
}

impl Outcome {
    fn letter(self) -> &'static str {
        match self {
            Self::Completed => "o",
            Self::Failed => "e",
        }
    }
}

/// The results of a batch so far.
#[derive(Debug)]
pub struct Results {
    journal: Journal,
    done: HashSet<u64>,
    completed: u64,
    failed: u64,
}

impl Results {
    pub(crate) fn open(path: &Path) -> Result<Self, FilesError> {
        let (mut done, mut completed, mut failed) = (HashSet::new(), 0, 0);
        let journal = Journal::open(path, |record| {
            let Some((number, outcome, _)) = parsed(record) else { return false };
            if done.insert(number) {
                *(match outcome {
                    Outcome::Completed => &mut completed,
                    Outcome::Failed => &mut failed,
                }) += 1;
            }
            true
        })?;
        Ok(Self { journal, done, completed, failed })
    }

    /// Whether the line has a result.
    pub fn has(&self, number: u64) -> bool {
        self.done.contains(&number)
    }

    /// Lines that completed and lines that failed.
    pub fn counts(&self) -> (u64, u64) {
        (self.completed, self.failed)
    }

    /// Records results, on disk when this returns: the line's number, and a JSON object on one line. A line that has a
    /// result keeps it. If this fails, none is recorded, and the call may be repeated.
    pub fn append(&mut self, results: &[(u64, Outcome, Vec<u8>)]) -> Result<(), FilesError> {
        let mut batch = HashSet::new();
        let new: Vec<_> = results.iter().filter(|(n, ..)| !self.has(*n) && batch.insert(*n)).collect();
        let records: Vec<Vec<u8>> = new
            .iter()
            .map(|(number, outcome, json)| {
                let mut record = format!("{number} {} ", outcome.letter()).into_bytes();
                record.extend_from_slice(json);
                record
            })
            .collect();
        self.journal.append(records.iter().map(Vec::as_slice))?;
        for (number, outcome, _) in new {
            self.done.insert(*number);
            match outcome {
                Outcome::Completed => self.completed += 1,
                Outcome::Failed => self.failed += 1,
            }
        }
        Ok(())
    }

    /// Writes the results of one outcome, a line each.
    pub(crate) fn write(&self, which: Outcome, out: &mut impl Write) -> Result<(), FilesError> {
        let mut written = HashSet::new();
        self.journal.for_each(|record| {
            let (number, outcome, json) = parsed(record).ok_or(io::ErrorKind::InvalidData)?;
            if outcome != which || !written.insert(number) {
                return Ok(());
            }
            out.write_all(json)?;
            out.write_all(b"\n")
        })
    }
}

/// Number, outcome and JSON of a record.
fn parsed(record: &[u8]) -> Option<(u64, Outcome, &[u8])> {
    let mut parts = record.splitn(3, |byte| *byte == b' ');
    let number = std::str::from_utf8(parts.next()?).ok()?.parse().ok()?;
    let outcome = match parts.next()? {
        b"o" => Outcome::Completed,
        b"e" => Outcome::Failed,
        _ => return None,
    };
    Some((number, outcome, parts.next()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use Outcome::{Completed, Failed};

    #[test]
    fn a_line_has_one_result_wherever_the_process_was_killed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("results");
        let result = |number: u64| {
            let outcome = if number.is_multiple_of(3) { Failed } else { Completed };
            (number, outcome, format!("{{\"n\":{number}}}").into_bytes())
        };
        let mut results = Results::open(&path).unwrap();
        for pair in [[4, 1], [2, 6], [3, 5]] {
            results.append(&pair.map(result)).unwrap();
        }
        drop(results);
        let whole = std::fs::read(&path).unwrap();
        let all = |results: &Results, which| {
            let mut out = Vec::new();
            results.write(which, &mut out).unwrap();
            String::from_utf8(out).unwrap()
        };
        for cut in 0..=whole.len() {
            std::fs::write(&path, &whole[..cut]).unwrap();
            let mut results = Results::open(&path).unwrap();
            let before = (1..=6).filter(|n| results.has(*n)).count();
            assert_eq!(before, whole[..cut].iter().filter(|byte| **byte == b'\n').count());
            // A runner that starts again runs the others; what it repeats by mistake is not recorded.
            results.append(&[1, 2, 3, 4, 5, 6, 1].map(result)).unwrap();
            assert_eq!(results.counts(), (4, 2));
            let (good, bad) = (all(&results, Completed), all(&results, Failed));
            let mut lines: Vec<&str> = good.lines().collect();
            lines.sort_unstable();
            assert_eq!(lines, ["{\"n\":1}", "{\"n\":2}", "{\"n\":4}", "{\"n\":5}"]);
            assert_eq!(bad.lines().count(), 2);
        }
    }
}
