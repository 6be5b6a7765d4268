//! Responses of tenants with the items that led to them, each in a file of its own.

use crate::error::FilesError;
use crate::journal::sync_parent;
use crate::store::{create, now, remove};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Ending of a file that is being written.
const PARTIAL: &str = "partial";

/// Responses between two searches for expired ones.
const FORGET_EVERY: u32 = 1_000;

/// Bounds of the responses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResponseLimits {
    /// Responses of a tenant. Beyond it and the bytes, its oldest are forgotten.
    pub responses: usize,
    /// Bytes of a tenant's responses.
    pub tenant_bytes: u64,
    /// Bytes of all responses. Beyond them, the oldest of all are forgotten.
    pub total_bytes: u64,
    /// Seconds that a response is kept.
    pub keep_s: u64,
}

impl Default for ResponseLimits {
    fn default() -> Self {
        Self { responses: 10_000, tenant_bytes: 256 << 20, total_bytes: 2 << 30, keep_s: 30 * 24 * 60 * 60 }
    }
}

/// The first line of a file: all that is read of it at the start.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Head {
    tenant: String,
    id: String,
    expires_at: u64,
}

/// Longest first line, in bytes.
const MAX_HEAD: u64 = 64 << 10;

/// A response and the items that led to it: the second line of a file.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct StoredResponse {
    /// The response, as it was answered.
    pub response: Box<RawValue>,
    /// The input, with that of the responses before it and their output.
    pub input: Vec<Box<RawValue>>,
}

/// The responses of one coordinator.
#[derive(Debug)]
pub struct Responses {
    directory: PathBuf,
    limits: ResponseLimits,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    kept: HashMap<Key, Kept>,
    /// Number of the next response.
    next: u64,
    /// At least what the tenants use.
    tenants: HashMap<Arc<str>, Totals>,
    /// At least the bytes of all responses.
    bytes: u64,
    /// Responses until what has expired is forgotten.
    until_forget: u32,
}

/// Responses and their bytes.
type Totals = (u64, u64);

/// Tenant and id.
type Key = (Arc<str>, String);

#[derive(Debug)]
struct Kept {
    /// Order of arrival.
    number: u64,
    bytes: u64,
    expires_at: u64,
    /// Set until it is on disk.
    unwritten: Option<Arc<(Head, StoredResponse)>>,
}

impl Responses {
    /// Opens the responses in `directory`, which exists. Files that cannot be read are removed.
    pub(crate) fn open(directory: PathBuf, limits: ResponseLimits) -> Result<Self, FilesError> {
        let entries = fs::read_dir(&directory).map_err(|error| FilesError::disk(&directory, &error))?;
        let mut found = Vec::new();
        for entry in entries.flatten() {
            let path = entry.path();
            match read_head(&path).filter(|_| path.extension().is_none()) {
                Some(head) => found.push(head),
                None => remove(&path),
            }
        }
        found.sort_unstable_by_key(|(head, _)| head.expires_at);
        let mut state = State::default();
        for (Head { tenant, id, expires_at }, bytes) in found {
            let kept = Kept { number: state.next, bytes, expires_at, unwritten: None };
            state.next += 1;
            state.kept.insert((tenant.into(), id), kept);
        }
        let responses = Self { directory, limits, state: Mutex::new(state) };
        responses.forget(&mut responses.state.lock());
        Ok(responses)
    }

    /// Keeps a response. It can be read at once, and is on disk after [`Responses::write`]. Replaces an earlier one of
    /// this id.
    pub fn keep(&self, tenant: &Arc<str>, id: &str, response: Box<RawValue>, input: Vec<Box<RawValue>>) {
        let expires_at = now() + self.limits.keep_s;
        let bytes = response.get().len() + input.iter().map(|item| item.get().len()).sum::<usize>();
        let head = Head { tenant: tenant.to_string(), id: id.to_owned(), expires_at };
        let stored = (head, StoredResponse { response, input });
        let mut state = self.state.lock();
        let number = state.next;
        state.next += 1;
        let kept = Kept { number, bytes: bytes as u64, expires_at, unwritten: Some(Arc::new(stored)) };
        state.kept.insert((Arc::clone(tenant), id.to_owned()), kept);
        state.bytes += bytes as u64;
        state.until_forget = state.until_forget.saturating_sub(1);
        let used = state.tenants.entry(Arc::clone(tenant)).or_default();
        *used = (used.0 + 1, used.1 + bytes as u64);
        let over = used.0 > self.limits.responses as u64 || used.1 > self.limits.tenant_bytes;
        if over || state.bytes > self.limits.total_bytes || state.until_forget == 0 {
            self.forget(&mut state);
        }
    }

    /// Writes a response to the disk. Blocks.
    ///
    /// # Errors
    ///
    /// If the disk fails; the response then stays in memory.
    pub fn write(&self, tenant: &Arc<str>, id: &str) -> Result<(), FilesError> {
        let key = (Arc::clone(tenant), id.to_owned());
        let waiting = |state: &State| {
            state.kept.get(&key).and_then(|kept| Some((kept.number, kept.unwritten.clone()?)))
        };
        let Some((number, stored)) = waiting(&self.state.lock()) else { return Ok(()) };
        let path = self.path(tenant, id);
        let partial = path.with_extension(format!("{number}.{PARTIAL}"));
        let failed = |error| FilesError::disk(&partial, &error);
        let (head, stored) = &*stored;
        let mut bytes = serde_json::to_vec(head).map_err(|error| failed(error.into()))?;
        bytes.push(b'\n');
        serde_json::to_writer(&mut bytes, stored).map_err(|error| failed(error.into()))?;
        let written = create(&partial).and_then(|mut file| {
            file.write_all(&bytes).and_then(|()| file.sync_all()).map_err(failed)?;
            Ok(())
        });
        if written.is_err() {
            remove(&partial);
        }
        written?;
        // Under the lock, so that a response that is forgotten meanwhile does not come back.
        let mut state = self.state.lock();
        match state.kept.get_mut(&key).filter(|kept| kept.number == number) {
            Some(kept) => {
                fs::rename(&partial, &path).map_err(failed)?;
                kept.unwritten = None;
                drop(state);
                sync_parent(&path)
            }
            None => {
                remove(&partial);
                Ok(())
            }
        }
    }

    /// Reads a response. Blocks.
    ///
    /// # Errors
    ///
    /// If the tenant has none of this id, or the disk fails.
    pub fn read(&self, tenant: &Arc<str>, id: &str) -> Result<StoredResponse, FilesError> {
        let unknown = || FilesError::Unknown(id.chars().take(128).collect());
        {
            let state = self.state.lock();
            let kept = state.kept.get(&(Arc::clone(tenant), id.to_owned()));
            let kept = kept.filter(|kept| kept.expires_at > now()).ok_or_else(unknown)?;
            if let Some(stored) = &kept.unwritten {
                return Ok(stored.1.clone());
            }
        }
        let path = self.path(tenant, id);
        let bytes = match fs::read(&path) {
            // Forgotten meanwhile.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Err(unknown()),
            read => read.map_err(|error| FilesError::disk(&path, &error))?,
        };
        let head = bytes.iter().position(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        let stored = serde_json::from_slice(bytes.get(head..).unwrap_or_default());
        stored.map_err(|error| FilesError::disk(&path, &error.into()))
    }

    /// Deletes a response. Blocks.
    ///
    /// # Errors
    ///
    /// If the tenant has none of this id.
    pub fn delete(&self, tenant: &Arc<str>, id: &str) -> Result<(), FilesError> {
        let key = (Arc::clone(tenant), id.to_owned());
        let gone = self.state.lock().kept.remove(&key).filter(|kept| kept.expires_at > now());
        remove(&self.path(tenant, id));
        gone.map(drop).ok_or_else(|| FilesError::Unknown(id.chars().take(128).collect()))
    }

    /// Forgets what has expired and what is beyond the limits. A tenant beyond them loses an eighth more, so that this
    /// is rare.
    fn forget(&self, state: &mut State) {
        let now = now();
        let mut newest: Vec<(u64, Key)> =
            state.kept.iter().map(|(key, kept)| (kept.number, key.clone())).collect();
        newest.sort_unstable_by_key(|(number, _)| std::cmp::Reverse(*number));
        let sum = |state: &State, tenant: Option<&str>| {
            let of = state.kept.iter().filter(|((own, _), _)| tenant.is_none_or(|tenant| **own == *tenant));
            of.fold((0, 0), |(count, bytes), (_, kept)| (count + 1, bytes + kept.bytes))
        };
        let less = |limit: u64, over: bool| if over { limit - limit / 8 } else { limit };
        let total = less(self.limits.total_bytes, sum(state, None).1 > self.limits.total_bytes);
        let mut tenants = HashMap::<Arc<str>, (Totals, Totals)>::new();
        let mut all = 0;
        for (_, key) in newest {
            let (used, limit) = tenants.entry(Arc::clone(&key.0)).or_insert_with(|| {
                let (count, bytes) = sum(state, Some(&key.0));
                let over = count > self.limits.responses as u64 || bytes > self.limits.tenant_bytes;
                let limits = (self.limits.responses as u64, self.limits.tenant_bytes);
                ((0, 0), (less(limits.0, over), less(limits.1, over)))
            });
            let Some(kept) = state.kept.get(&key) else { continue };
            let fits = used.0 < limit.0 && used.1 + kept.bytes <= limit.1 && all + kept.bytes <= total;
            if fits && kept.expires_at > now {
                (*used, all) = ((used.0 + 1, used.1 + kept.bytes), all + kept.bytes);
            } else {
                // Nothing older stays.
                *limit = (0, 0);
                state.kept.remove(&key);
                remove(&self.path(&key.0, &key.1));
            }
        }
        state.tenants = tenants.into_iter().map(|(tenant, (used, _))| (tenant, used)).collect();
        state.bytes = all;
        state.until_forget = FORGET_EVERY;
    }

    fn path(&self, tenant: &str, id: &str) -> PathBuf {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&(tenant.len() as u64).to_le_bytes()).update(tenant.as_bytes()).update(id.as_bytes());
        self.directory.join(hasher.finalize().to_hex().as_str())
    }
}

/// The first line of a file, and the file's bytes. `None` if the line is not whole.
fn read_head(path: &Path) -> Option<(Head, u64)> {
    let file = File::open(path).ok()?;
    let bytes = file.metadata().ok()?.len();
    let mut line = Vec::new();
    BufReader::new(file).take(MAX_HEAD).read_until(b'\n', &mut line).ok()?;
    let head = serde_json::from_slice(line.strip_suffix(b"\n")?).ok()?;
    Some((head, bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(directory: &std::path::Path, limits: ResponseLimits) -> Responses {
        Responses::open(directory.to_owned(), limits).unwrap()
    }

    fn keep(responses: &Responses, tenant: &str, id: &str, text: &str) {
        let raw = |text: &str| serde_json::value::to_raw_value(text).unwrap();
        responses.keep(&tenant.into(), id, raw(text), vec![raw("in")]);
    }

    fn read(responses: &Responses, tenant: &str, id: &str) -> Option<String> {
        match responses.read(&tenant.into(), id) {
            Ok(stored) => {
                assert_eq!(stored.input[0].get(), "\"in\"");
                Some(serde_json::from_str(stored.response.get()).unwrap())
            }
            Err(FilesError::Unknown(unknown)) => {
                assert_eq!(unknown, id);
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn a_response_is_read_before_and_after_it_is_written_and_after_a_restart() {
        let directory = tempfile::tempdir().unwrap();
        let responses = open(directory.path(), ResponseLimits::default());
        keep(&responses, "a", "r1", "one");
        keep(&responses, "a", "r2", "not written");
        assert_eq!(read(&responses, "a", "r1").as_deref(), Some("one"));
        responses.write(&"a".into(), "r1").unwrap();
        assert_eq!(read(&responses, "a", "r1").as_deref(), Some("one"));
        assert_eq!(read(&responses, "b", "r1"), None, "of another tenant");
        drop(responses);
        std::fs::write(directory.path().join("x.7.partial"), "cut").unwrap();
        std::fs::write(directory.path().join("damaged"), "{").unwrap();
        let responses = open(directory.path(), ResponseLimits::default());
        assert_eq!(read(&responses, "a", "r1").as_deref(), Some("one"));
        assert_eq!(read(&responses, "a", "r2"), None);
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
        responses.delete(&"a".into(), "r1").unwrap();
        assert!(matches!(responses.delete(&"a".into(), "r1"), Err(FilesError::Unknown(_))));
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    #[test]
    fn the_oldest_responses_of_the_tenant_beyond_its_limits_are_forgotten() {
        let directory = tempfile::tempdir().unwrap();
        let limits = ResponseLimits { responses: 8, tenant_bytes: 100, ..ResponseLimits::default() };
        let responses = open(directory.path(), limits);
        let all = |tenant| {
            (0..20).filter(|n| read(&responses, tenant, &n.to_string()).is_some()).collect::<Vec<_>>()
        };
        for n in 0..9 {
            keep(&responses, "a", &n.to_string(), "");
            responses.write(&"a".into(), &n.to_string()).unwrap();
            keep(&responses, "b", &n.to_string(), "");
        }
        // One is beyond the limit, and an eighth of it goes too.
        assert_eq!(all("a"), [2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 7);
        keep(&responses, "a", "9", &"x".repeat(80));
        assert_eq!(all("a"), [9], "by their bytes");
        assert_eq!(all("b"), [2, 3, 4, 5, 6, 7, 8]);
        let late = ResponseLimits { keep_s: 0, ..limits };
        let expired = open(directory.path(), late);
        keep(&expired, "c", "0", "");
        assert_eq!(read(&expired, "c", "0"), None);
    }
}
