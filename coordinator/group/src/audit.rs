//! The audit log: changes to the cluster with author, time and result, as JSON lines appended to
//! `audit.jsonl` in the data directory, or to the process's log without a data directory. Each coordinator
//! records the requests that it received; the leader records its plans.
//!
//! A line is `{"unix_ms","node","who","from","what","on","result"}`. It contains no prompt, key or salt: the
//! holder of a key is named by the key's id and tenant.

use parking_lot::Mutex;
use proto::directory;
use proto::ids::NodeId;
use serde::Serialize;
use std::fs::File;
use std::io::Write;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// A file larger than this is rotated.
const FILE_BYTES: u64 = 16 << 20;
/// Rotated files that are kept; the oldest is deleted.
const OLD_FILES: usize = 8;

/// The log cannot be opened.
#[derive(Debug, thiserror::Error)]
#[error("{}", directory::failed(path, source))]
pub struct AuditError {
    path: PathBuf,
    source: std::io::Error,
}

#[derive(Debug, Clone, Copy, Serialize)]
pub struct Record<'a> {
    /// The author: `key ID of TENANT`, `local` for a caller on this machine, `worker NAME`, `leader`, or
    /// `authority` for a signed change.
    pub who: &'a str,
    pub from: Option<IpAddr>,
    pub what: &'a str,
    pub on: &'a str,
    /// The result: an HTTP status, or words.
    pub result: &'a str,
}

#[derive(Serialize)]
struct Line<'a> {
    unix_ms: u64,
    node: &'a NodeId,
    #[serde(flatten)]
    record: Record<'a>,
}

/// The audit log.
#[derive(Debug)]
pub struct Audit {
    node: NodeId,
    log: Option<Mutex<Log>>,
}

#[derive(Debug)]
struct Log {
    path: PathBuf,
    file: File,
    bytes: u64,
    limit: u64,
    /// Whether the last line may be incomplete.
    torn: bool,
}

impl Audit {
    /// Opens the log in `data_dir`, creating it if necessary. `None`: the process's log.
    pub fn open(data_dir: Option<&Path>, node: NodeId) -> Result<Self, AuditError> {
        let log = data_dir.map(|directory| Log::open(directory, FILE_BYTES)).transpose()?;
        Ok(Self { node, log: log.map(Mutex::new) })
    }

    /// Records an action. If writing fails, the failure is logged and the action is not undone.
    pub fn note(&self, record: &Record<'_>) {
        let unix_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis());
        let unix_ms = u64::try_from(unix_ms).unwrap_or(u64::MAX);
        let line = Line { unix_ms, node: &self.node, record: *record };
        let Some(log) = &self.log else {
            let Record { who, from, what, on, result } = record;
            tracing::info!(who, ?from, what, on, result, "audit");
            return;
        };
        let written = serde_json::to_vec(&line).map_err(std::io::Error::from).and_then(|mut line| {
            line.push(b'\n');
            log.lock().append(&line)
        });
        if let Err(error) = written {
            tracing::error!(%error, what = record.what, "cannot write an action to the audit log");
        }
    }
}

impl Log {
    fn open(directory: &Path, limit: u64) -> Result<Self, AuditError> {
        let path = directory.join("audit.jsonl");
        let opened = proto::directory::make_private(directory).and_then(|()| append_to(&path));
        let opened = opened.and_then(|file| Ok((file.metadata()?.len(), file)));
        match opened {
            Ok((bytes, file)) => Ok(Self { path, file, bytes, limit, torn: false }),
            Err(source) => Err(AuditError { path, source }),
        }
    }

    fn append(&mut self, line: &[u8]) -> std::io::Result<()> {
        if self.bytes > 0 && self.bytes + line.len() as u64 > self.limit {
            self.rotate()?;
        }
        if std::mem::replace(&mut self.torn, true) {
            self.file.write_all(b"\n")?;
        }
        // One write, so that lines of two processes do not mix.
        self.file.write_all(line)?;
        self.torn = false;
        self.bytes += line.len() as u64;
        Ok(())
    }

    fn rotate(&mut self) -> std::io::Result<()> {
        let old = |n: usize| self.path.with_extension(format!("{n}.jsonl"));
        for n in (1..OLD_FILES).rev() {
            match std::fs::rename(old(n), old(n + 1)) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        std::fs::rename(&self.path, old(1))?;
        (self.file, self.bytes) = (append_to(&self.path)?, 0);
        Ok(())
    }
}

fn append_to(path: &Path) -> std::io::Result<File> {
    directory::private().append(true).create(true).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_appended_over_restarts_and_old_files_are_deleted() {
        let dir = tempfile::tempdir().unwrap();
        let note = |what: &str| {
            let log = Log::open(dir.path(), 1_000).unwrap();
            let audit = Audit { node: NodeId::new("c1").unwrap(), log: Some(Mutex::new(log)) };
            audit.note(&Record { who: "local", from: None, what, on: "line\nbreak \u{1b}", result: "204" });
        };
        (0..200).for_each(|n| note(&n.to_string()));
        let files = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path());
        let mut files: Vec<_> = files.map(|path| std::fs::read_to_string(path).unwrap()).collect();
        assert_eq!(files.len(), OLD_FILES + 1);
        files.sort_by_key(|text| {
            let first: serde_json::Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
            first["what"].as_str().unwrap().parse::<u32>().unwrap()
        });
        let lines: Vec<serde_json::Value> = files
            .iter()
            .flat_map(|text| text.lines())
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert!(files.iter().all(|text| text.len() <= 1_000));
        let whats: Vec<u32> =
            lines.iter().map(|line| line["what"].as_str().unwrap().parse().unwrap()).collect();
        assert!(whats.windows(2).all(|pair| pair[1] == pair[0] + 1) && whats.last() == Some(&199));
        assert_eq!(lines[0]["on"], "line\nbreak \u{1b}");
    }
}
