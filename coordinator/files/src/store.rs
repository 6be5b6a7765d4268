//! The files and batches of one coordinator: their records in a journal, their bytes in files beside it.

use crate::error::FilesError;
use crate::journal::{Journal, sync_parent};
use crate::lines::Lines;
use crate::record::{BatchRecord, Counts, FileRecord, LineError, Purpose, Status};
use crate::responses::{ResponseLimits, Responses};
use crate::results::{Outcome, Results};
use parking_lot::Mutex;
use proto::ids::NodeId;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, HashMap};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

const DAY_S: u64 = 24 * 60 * 60;
const JOURNAL: &str = "journal";
/// Uploads that have not ended. They end with the process.
const UPLOADS: &str = "uploads";
/// Bytes of files, by their ids.
const CONTENTS: &str = "contents";
/// Results of batches that have not ended.
const RESULTS: &str = "results";
/// Responses, in a file each.
const RESPONSES: &str = "responses";
const FILE_PREFIX: &str = "file-";
const BATCH_PREFIX: &str = "batch_";
const ID_DIGITS: usize = 24;
/// The journal is rewritten once it is this long, and four times as long as after the last time.
const REWRITE_BYTES: u64 = 1 << 20;

/// Bounds of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of a file.
    pub file_bytes: u64,
    /// Files of a tenant.
    pub files: u64,
    /// Bytes of all files of a tenant.
    pub tenant_bytes: u64,
    /// Bytes of all files.
    pub total_bytes: u64,
    /// Lines of a batch.
    pub lines: usize,
    /// Batches of a tenant that have not ended.
    pub batches: u64,
    /// Batches of a tenant that are kept. Beyond them, those that ended first are forgotten.
    pub kept_batches: usize,
    /// Seconds that a file is kept if its owner names no time, and that a batch is kept after its end.
    pub keep_s: u64,
    /// Seconds from the creation of a batch to its end.
    pub window_s: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            file_bytes: 200 << 20,
            files: 1_000,
            tenant_bytes: 4 << 30,
            total_bytes: 16 << 30,
            lines: 50_000,
            batches: 64,
            kept_batches: 1_000,
            keep_s: 30 * DAY_S,
            window_s: DAY_S,
        }
    }
}

impl Limits {
    /// Most bytes of a store in a temporary directory.
    const TEMPORARY_BYTES: u64 = 1 << 30;

    fn temporary(self) -> Self {
        let bytes = self.total_bytes.min(Self::TEMPORARY_BYTES);
        Self { tenant_bytes: self.tenant_bytes.min(bytes), total_bytes: bytes, ..self }
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Order {
    /// Oldest first.
    Ascending,
    #[default]
    Descending,
}

/// The part of a list that is asked for.
#[derive(Debug, Clone, Default)]
pub struct Paging {
    /// Id of the object before the page.
    pub after: Option<String>,
    pub limit: usize,
    pub order: Order,
}

/// A part of a list.
#[derive(Debug, PartialEq)]
pub struct Page<T> {
    pub items: Vec<T>,
    pub has_more: bool,
}

/// A batch to create.
#[derive(Debug, Clone)]
pub struct NewBatch {
    /// Id of the key that creates it; `None` without a key.
    pub key: Option<String>,
    pub endpoint: String,
    pub input_file_id: String,
    pub metadata: Option<Map<String, Value>>,
    /// Seconds that the result files are kept.
    pub keep_output_s: Option<u64>,
}

/// The files and batches of one coordinator.
#[derive(Debug)]
pub struct Store {
    directory: PathBuf,
    temporary: bool,
    node: NodeId,
    limits: Limits,
    responses: Responses,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    journal: Journal,
    /// Length of the journal after it was rewritten.
    rewritten: u64,
    records: Records,
    /// Bytes of uploads that have not ended, by tenant.
    uploading: HashMap<Arc<str>, u64>,
    /// Number in the last id.
    last_id: u64,
}

/// All records, by id. Ids are in the order of creation.
#[derive(Debug, Default)]
struct Records {
    files: BTreeMap<String, FileRecord>,
    batches: BTreeMap<String, BatchRecord>,
}

/// A record of the journal.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Change {
    File(FileRecord),
    FileGone(String),
    Batch(Box<BatchRecord>),
    BatchGone(String),
}

impl Records {
    fn apply(&mut self, change: Change) {
        match change {
            Change::File(file) => drop(self.files.insert(file.id.clone(), file)),
            Change::FileGone(id) => drop(self.files.remove(&id)),
            Change::Batch(batch) => drop(self.batches.insert(batch.id.clone(), *batch)),
            Change::BatchGone(id) => drop(self.batches.remove(&id)),
        }
    }

    /// The unfinished batch that reads a file.
    fn reader_of(&self, file: &str) -> Option<&BatchRecord> {
        self.batches.values().find(|batch| !batch.status.is_final() && batch.input_file_id == file)
    }
}

impl State {
    /// Records changes and makes them.
    fn commit(&mut self, path: &Path, changes: Vec<Change>) -> Result<(), FilesError> {
        let records: Vec<Vec<u8>> = changes
            .iter()
            .map(serde_json::to_vec)
            .collect::<Result<_, _>>()
            .map_err(|error| FilesError::Disk { path: path.to_owned(), why: error.to_string() })?;
        self.journal.append(records.iter().map(Vec::as_slice))?;
        changes.into_iter().for_each(|change| self.records.apply(change));
        if self.journal.len() > REWRITE_BYTES.max(4 * self.rewritten) {
            self.rewrite(path)?;
        }
        Ok(())
    }

    fn rewrite(&mut self, path: &Path) -> Result<(), FilesError> {
        let files = self.records.files.values().cloned().map(Change::File);
        let batches = self.records.batches.values().cloned().map(|batch| Change::Batch(Box::new(batch)));
        let records = files.chain(batches).map(|change| serde_json::to_vec(&change));
        let records: Vec<Vec<u8>> = records
            .collect::<Result<_, _>>()
            .map_err(|error| FilesError::Disk { path: path.to_owned(), why: error.to_string() })?;
        self.journal = Journal::replace(path, records)?;
        self.rewritten = self.journal.len();
        Ok(())
    }

    /// Number and bytes of a tenant's files with its uploads, and the bytes of all.
    fn used(&self, tenant: &str) -> (u64, u64, u64) {
        let own = self.records.files.values().filter(|file| file.tenant == tenant);
        let (files, bytes) = own.fold((0, 0), |(files, bytes), file| (files + 1, bytes + file.bytes));
        let all: u64 = self.records.files.values().map(|file| file.bytes).sum();
        let uploading = self.uploading.get(tenant).copied().unwrap_or(0);
        (files, bytes + uploading, all + self.uploading.values().sum::<u64>())
    }

    /// A new number: the milliseconds since 1970, or one more than the last.
    fn next_number(&mut self) -> u64 {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
        self.last_id = u64::try_from(now).unwrap_or(u64::MAX).max(self.last_id + 1);
        self.last_id
    }
}

/// A file that is being uploaded. Dropping it before [`Upload::finish`] removes it.
#[derive(Debug)]
pub struct Upload {
    store: Arc<Store>,
    tenant: Arc<str>,
    path: PathBuf,
    file: File,
    bytes: u64,
}

impl Upload {
    /// Adds bytes.
    ///
    /// # Errors
    ///
    /// If a limit would be exceeded, or the disk fails.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), FilesError> {
        let more = bytes.len() as u64;
        let limits = &self.store.limits;
        within("file bytes", self.bytes + more, limits.file_bytes)?;
        {
            let mut state = self.store.state.lock();
            let (_, own, all) = state.used(&self.tenant);
            within("bytes of all files of the tenant", own + more, limits.tenant_bytes)?;
            within("bytes of all files at this coordinator", all + more, limits.total_bytes)?;
            *state.uploading.entry(Arc::clone(&self.tenant)).or_default() += more;
            self.bytes += more;
        }
        self.file.write_all(bytes).map_err(|error| FilesError::disk(&self.path, &error))
    }

    /// Keeps the file, for `keep_s` seconds if given. It is on disk when this returns.
    pub fn finish(self, name: String, keep_s: Option<u64>) -> Result<FileRecord, FilesError> {
        let store = Arc::clone(&self.store);
        let failed = |error| FilesError::disk(&self.path, &error);
        self.file.sync_all().map_err(failed)?;
        let id = store.new_id(FILE_PREFIX);
        let path = store.content(&id);
        fs::rename(&self.path, &path).map_err(failed)?;
        sync_parent(&path)?;
        let created_at = now();
        let file = FileRecord {
            id,
            tenant: self.tenant.to_string(),
            name,
            bytes: self.bytes,
            purpose: Purpose::Batch,
            created_at,
            expires_at: created_at + keep_s.unwrap_or(store.limits.keep_s),
        };
        let kept = {
            let mut state = store.state.lock();
            let files = state.used(&self.tenant).0;
            let kept = within("files of the tenant", files + 1, store.limits.files);
            kept.and_then(|()| state.commit(&store.journal_path(), vec![Change::File(file.clone())]))
        };
        if kept.is_err() {
            remove(&path);
        }
        kept.map(|()| file)
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        remove(&self.path);
        let mut state = self.store.state.lock();
        if let Some(bytes) = state.uploading.get_mut(&self.tenant) {
            *bytes -= self.bytes.min(*bytes);
            if *bytes == 0 {
                state.uploading.remove(&self.tenant);
            }
        }
    }
}

impl Store {
    /// Opens the store in `directory`, or creates it. Without a directory it is in a temporary one, which ends with the
    /// store. A damaged journal is renamed, and the store is then empty.
    ///
    /// # Errors
    ///
    /// If the directory cannot be used.
    pub fn open(directory: Option<&Path>, node: NodeId, limits: Limits) -> Result<Arc<Self>, FilesError> {
        let temporary = directory.is_none();
        let directory = directory.map_or_else(
            || std::env::temp_dir().join(format!("kvasir-files-{:016x}", random())),
            Path::to_owned,
        );
        let limits = if temporary { limits.temporary() } else { limits };
        for part in ["", UPLOADS, CONTENTS, RESULTS, RESPONSES] {
            let path = directory.join(part);
            // Files of tenants are not for other users.
            let made = DirBuilder::new().recursive(true).mode(0o700).create(&path);
            made.map_err(|error| FilesError::disk(&path, &error))?;
        }
        let path = directory.join(JOURNAL);
        let (journal, records) = match load(&path) {
            Err(FilesError::Damaged { path, at }) => {
                let aside = path.with_extension("damaged");
                tracing::error!(path = %path.display(), at, "the record of files and batches is damaged; it is renamed to journal.damaged, and there are no files and batches now");
                fs::rename(&path, aside).map_err(|error| FilesError::disk(&path, &error))?;
                load(&path)?
            }
            loaded => loaded?,
        };
        let number = |id: &String| u64::from_str_radix(id.get(..12)?, 16).ok();
        let digits = |id: &String| Some(id.split_once(['-', '_'])?.1.to_owned());
        let ids = records.files.keys().chain(records.batches.keys());
        let last_id = ids.filter_map(|id| number(&digits(id)?)).max().unwrap_or(0);
        let mut state = State { journal, rewritten: 0, records, uploading: HashMap::new(), last_id };
        state.rewrite(&path)?;
        let responses = Responses::open(directory.join(RESPONSES), ResponseLimits::default())?;
        let store = Self { directory, temporary, node, limits, responses, state: Mutex::new(state) };
        store.remove_strays();
        store.expire(now())?;
        Ok(Arc::new(store))
    }

    /// The responses of the tenants.
    pub fn responses(&self) -> &Responses {
        &self.responses
    }

    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The directory, and whether it ends with the store.
    pub fn place(&self) -> (&Path, bool) {
        (&self.directory, self.temporary)
    }

    /// Number and bytes of all files, and the batches that have not ended.
    pub fn sizes(&self) -> (u64, u64, u64) {
        let state = self.state.lock();
        let unfinished = state.records.batches.values().filter(|batch| !batch.status.is_final()).count();
        let bytes = state.records.files.values().map(|file| file.bytes).sum();
        (state.records.files.len() as u64, bytes, unfinished as u64)
    }

    /// Begins an upload.
    ///
    /// # Errors
    ///
    /// If the tenant has as many files as it may have, or the disk fails.
    pub fn upload(self: &Arc<Self>, tenant: &Arc<str>) -> Result<Upload, FilesError> {
        let files = self.state.lock().used(tenant).0;
        within("files of the tenant", files + 1, self.limits.files)?;
        let path = self.directory.join(UPLOADS).join(format!("{:016x}", random()));
        let file = create(&path)?;
        Ok(Upload { store: Arc::clone(self), tenant: Arc::clone(tenant), path, file, bytes: 0 })
    }

    pub fn file(&self, tenant: &str, id: &str) -> Result<FileRecord, FilesError> {
        let state = self.state.lock();
        let file =
            state.records.files.get(id).filter(|file| file.tenant == tenant && file.expires_at > now());
        file.cloned().ok_or_else(|| self.unknown(id, FILE_PREFIX))
    }

    /// Opens a file.
    pub fn read(&self, tenant: &str, id: &str) -> Result<(FileRecord, File), FilesError> {
        let record = self.file(tenant, id)?;
        let path = self.content(&record.id);
        let file = File::open(&path).map_err(|error| FilesError::disk(&path, &error))?;
        Ok((record, file))
    }

    pub fn files(
        &self,
        tenant: &str,
        purpose: Option<Purpose>,
        paging: &Paging,
    ) -> Result<Page<FileRecord>, FilesError> {
        let (state, now) = (self.state.lock(), now());
        let shown = |file: &&FileRecord| {
            file.tenant == tenant && file.expires_at > now && purpose.is_none_or(|own| own == file.purpose)
        };
        page(state.records.files.values().filter(shown), |file| &file.id, paging)
    }

    /// Deletes a file.
    ///
    /// # Errors
    ///
    /// If an unfinished batch reads it.
    pub fn delete(&self, tenant: &str, id: &str) -> Result<(), FilesError> {
        let mut state = self.state.lock();
        let known = state.records.files.get(id).is_some_and(|file| file.tenant == tenant);
        if !known {
            return Err(self.unknown(id, FILE_PREFIX));
        }
        if let Some(batch) = state.records.reader_of(id) {
            return Err(FilesError::InUse { file: id.to_owned(), batch: batch.id.clone() });
        }
        state.commit(&self.journal_path(), vec![Change::FileGone(id.to_owned())])?;
        remove(&self.content(id));
        Ok(())
    }

    /// Creates a batch. Its lines are checked later.
    ///
    /// # Errors
    ///
    /// If the file is unknown or no input, or the tenant has too many unfinished batches.
    pub fn create_batch(&self, tenant: &str, new: NewBatch) -> Result<BatchRecord, FilesError> {
        let input = self.file(tenant, &new.input_file_id)?;
        if input.purpose != Purpose::Batch {
            return Err(FilesError::Purpose(input.id));
        }
        let id = self.new_id(BATCH_PREFIX);
        let created_at = now();
        let batch = BatchRecord {
            id,
            tenant: tenant.to_owned(),
            key: new.key,
            endpoint: new.endpoint,
            input_file_id: input.id,
            metadata: new.metadata,
            keep_output_s: new.keep_output_s.unwrap_or(self.limits.keep_s),
            status: Status::Validating,
            ends_as: None,
            counts: Counts::default(),
            errors: Vec::new(),
            created_at,
            expires_at: created_at + self.limits.window_s,
            in_progress_at: None,
            finalizing_at: None,
            completed_at: None,
            failed_at: None,
            expired_at: None,
            cancelling_at: None,
            cancelled_at: None,
            output_file_id: None,
            error_file_id: None,
        };
        let mut state = self.state.lock();
        // The file may have been deleted meanwhile.
        if !state.records.files.contains_key(&batch.input_file_id) {
            return Err(self.unknown(&batch.input_file_id, FILE_PREFIX));
        }
        let own = || state.records.batches.values().filter(|batch| batch.tenant == tenant);
        let unfinished = own().filter(|batch| !batch.status.is_final()).count() as u64;
        within("unfinished batches of the tenant", unfinished + 1, self.limits.batches)?;
        let too_many = (own().count() + 1).saturating_sub(self.limits.kept_batches);
        let oldest = own().filter(|batch| batch.status.is_final()).take(too_many);
        let mut changes: Vec<Change> = oldest.map(|batch| Change::BatchGone(batch.id.clone())).collect();
        changes.push(Change::Batch(Box::new(batch.clone())));
        state.commit(&self.journal_path(), changes)?;
        Ok(batch)
    }

    pub fn batch(&self, tenant: &str, id: &str) -> Result<BatchRecord, FilesError> {
        let state = self.state.lock();
        let batch = state.records.batches.get(id).filter(|batch| batch.tenant == tenant);
        batch.cloned().ok_or_else(|| self.unknown(id, BATCH_PREFIX))
    }

    pub fn batches(&self, tenant: &str, paging: &Paging) -> Result<Page<BatchRecord>, FilesError> {
        let state = self.state.lock();
        let own = state.records.batches.values().filter(|batch| batch.tenant == tenant);
        page(own, |batch| &batch.id, paging)
    }

    /// Cancels a batch that has not ended. Its runner ends it.
    pub fn cancel(&self, tenant: &str, id: &str) -> Result<BatchRecord, FilesError> {
        match self.batch(tenant, id)?.status {
            Status::Validating | Status::InProgress | Status::Cancelling => {}
            status => return Err(FilesError::Ended { id: id.to_owned(), status }),
        }
        self.change(id, |batch| {
            if matches!(batch.status, Status::Validating | Status::InProgress) {
                batch.set(Status::Cancelling, now());
            }
        })
    }

    /// The batches that have not ended, oldest first.
    pub fn unfinished(&self) -> Vec<BatchRecord> {
        let state = self.state.lock();
        state.records.batches.values().filter(|batch| !batch.status.is_final()).cloned().collect()
    }

    /// The present record of a batch.
    pub fn present(&self, id: &str) -> Result<BatchRecord, FilesError> {
        self.state.lock().records.batches.get(id).cloned().ok_or_else(|| FilesError::Unknown(id.to_owned()))
    }

    /// Checks the lines of a batch. The inner error lists the faults.
    pub fn lines(&self, batch: &BatchRecord) -> Result<Result<Lines, Vec<LineError>>, FilesError> {
        let path = self.content(&batch.input_file_id);
        let file = File::open(&path).map_err(|error| FilesError::disk(&path, &error))?;
        Lines::index(file, path, &batch.endpoint, self.limits.lines)
    }

    /// The results of a batch so far. Only one caller may have them.
    pub fn results(&self, batch: &BatchRecord) -> Result<Results, FilesError> {
        Results::open(&self.directory.join(RESULTS).join(&batch.id))
    }

    /// The lines of a batch are checked and run now, unless it was cancelled meanwhile.
    pub fn begin(&self, id: &str, total: u64) -> Result<BatchRecord, FilesError> {
        self.change(id, |batch| {
            batch.counts.total = total;
            if batch.status == Status::Validating {
                batch.set(Status::InProgress, now());
            }
        })
    }

    /// Ends a batch whose input is refused.
    pub fn fail(&self, id: &str, errors: Vec<LineError>) -> Result<BatchRecord, FilesError> {
        let failed = self.change(id, |batch| {
            batch.errors = errors;
            batch.set(Status::Failed, now());
        })?;
        remove(&self.directory.join(RESULTS).join(id));
        Ok(failed)
    }

    /// Shows how many lines of a batch have ended.
    pub fn count(&self, id: &str, (completed, failed): (u64, u64)) {
        if let Some(batch) = self.state.lock().records.batches.get_mut(id) {
            (batch.counts.completed, batch.counts.failed) = (completed, failed);
        }
    }

    /// Ends a batch as `Completed`, `Expired` or `Cancelled`: writes the files of its results. After a crash it may be
    /// called again.
    pub fn finish(&self, id: &str, results: &Results, end: Status) -> Result<BatchRecord, FilesError> {
        let (completed, failed) = results.counts();
        let ids = [self.new_id(FILE_PREFIX), self.new_id(FILE_PREFIX)];
        let batch = self.change(id, |batch| {
            (batch.counts.completed, batch.counts.failed) = (completed, failed);
            batch.ends_as = Some(end);
            if end != Status::Cancelled {
                batch.set(Status::Finalizing, now());
            }
            let [output, error] = ids;
            batch.output_file_id = batch.output_file_id.take().or((completed > 0).then_some(output));
            batch.error_file_id = batch.error_file_id.take().or((failed > 0).then_some(error));
        })?;
        let mut ended = batch.clone();
        ended.set(end, now());
        let mut changes = Vec::new();
        let files = [(&batch.output_file_id, Outcome::Completed), (&batch.error_file_id, Outcome::Failed)];
        for (file, outcome) in files.into_iter().filter_map(|(id, outcome)| Some((id.as_ref()?, outcome))) {
            let path = self.content(file);
            let failed = |error| FilesError::disk(&path, &error);
            remove(&path);
            let mut out = BufWriter::new(create(&path)?);
            results.write(outcome, &mut out)?;
            let written = out.into_inner().map_err(|error| failed(error.into_error()))?;
            written.sync_all().map_err(failed)?;
            let created_at = now();
            let name = match outcome {
                Outcome::Completed => format!("{id}_output.jsonl"),
                Outcome::Failed => format!("{id}_error.jsonl"),
            };
            changes.push(Change::File(FileRecord {
                id: file.clone(),
                tenant: batch.tenant.clone(),
                name,
                bytes: written.metadata().map_err(failed)?.len(),
                purpose: Purpose::BatchOutput,
                created_at,
                expires_at: created_at + batch.keep_output_s,
            }));
        }
        sync_parent(&self.directory.join(CONTENTS).join(id))?;
        changes.push(Change::Batch(Box::new(ended.clone())));
        self.state.lock().commit(&self.journal_path(), changes)?;
        remove(&self.directory.join(RESULTS).join(id));
        Ok(ended)
    }

    /// Forgets what is too old at `now`, in seconds since 1970.
    pub fn expire(&self, now: u64) -> Result<(), FilesError> {
        let mut state = self.state.lock();
        let old = |file: &&FileRecord| file.expires_at <= now && state.records.reader_of(&file.id).is_none();
        let files: Vec<String> =
            state.records.files.values().filter(old).map(|file| file.id.clone()).collect();
        let ended = |batch: &&BatchRecord| batch.ended_at().is_some_and(|at| at + self.limits.keep_s <= now);
        let batches = state.records.batches.values().filter(ended);
        let mut changes: Vec<Change> = batches.map(|batch| Change::BatchGone(batch.id.clone())).collect();
        changes.extend(files.iter().cloned().map(Change::FileGone));
        if !changes.is_empty() {
            state.commit(&self.journal_path(), changes)?;
        }
        drop(state);
        files.iter().for_each(|id| remove(&self.content(id)));
        Ok(())
    }

    fn change(&self, id: &str, change: impl FnOnce(&mut BatchRecord)) -> Result<BatchRecord, FilesError> {
        let mut state = self.state.lock();
        let mut batch =
            state.records.batches.get(id).cloned().ok_or_else(|| FilesError::Unknown(id.to_owned()))?;
        let before = batch.clone();
        change(&mut batch);
        if batch != before {
            state.commit(&self.journal_path(), vec![Change::Batch(Box::new(batch.clone()))])?;
        }
        Ok(batch)
    }

    /// A new id: its prefix, digits that grow with time, and the name of this coordinator.
    fn new_id(&self, prefix: &str) -> String {
        let number = self.state.lock().next_number();
        let separator = if prefix == FILE_PREFIX { '-' } else { '_' };
        format!("{prefix}{:012x}{:012x}{separator}{}", number, random() >> 16, self.node.as_str())
    }

    /// The error for an id that is not known here.
    fn unknown(&self, id: &str, prefix: &str) -> FilesError {
        let owner = || {
            let (digits, rest) = id.strip_prefix(prefix)?.split_at_checked(ID_DIGITS)?;
            let owner = rest.strip_prefix(['-', '_'])?;
            let whole = digits.bytes().all(|digit| digit.is_ascii_hexdigit());
            let node = NodeId::new(owner).ok().filter(|node| whole && *node != self.node)?;
            Some(node.as_str().to_owned())
        };
        match owner() {
            Some(owner) => FilesError::Elsewhere { id: id.to_owned(), owner },
            None => FilesError::Unknown(id.chars().take(128).collect()),
        }
    }

    fn content(&self, id: &str) -> PathBuf {
        self.directory.join(CONTENTS).join(id)
    }

    fn journal_path(&self) -> PathBuf {
        self.directory.join(JOURNAL)
    }

    /// Removes what an interrupted call left.
    fn remove_strays(&self) {
        let state = self.state.lock();
        let unfinished =
            |id: &str| state.records.batches.get(id).is_some_and(|batch| !batch.status.is_final());
        let known = |part: &str, name: &str| match part {
            CONTENTS => state.records.files.contains_key(name),
            RESULTS => unfinished(name),
            _ => false,
        };
        for part in [UPLOADS, CONTENTS, RESULTS] {
            let Ok(entries) = fs::read_dir(self.directory.join(part)) else { continue };
            for entry in entries.flatten() {
                let name = entry.file_name();
                if !name.to_str().is_some_and(|name| known(part, name)) {
                    remove(&entry.path());
                }
            }
        }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        if self.temporary
            && let Err(error) = fs::remove_dir_all(&self.directory)
        {
            tracing::warn!(path = %self.directory.display(), %error, "the temporary directory of files stays");
        }
    }
}

fn load(path: &Path) -> Result<(Journal, Records), FilesError> {
    let mut records = Records::default();
    let journal = Journal::open(path, |record| {
        let change = serde_json::from_slice(record);
        change.map(|change| records.apply(change)).is_ok()
    })?;
    Ok((journal, records))
}

fn page<'a, T: Clone + 'a>(
    all: impl DoubleEndedIterator<Item = &'a T>,
    id: impl Fn(&T) -> &String,
    paging: &Paging,
) -> Result<Page<T>, FilesError> {
    let ordered: Vec<&T> = match paging.order {
        Order::Ascending => all.collect(),
        Order::Descending => all.rev().collect(),
    };
    let start = match &paging.after {
        None => 0,
        Some(after) => match ordered.iter().position(|item| id(item) == after) {
            Some(at) => at + 1,
            None => return Err(FilesError::Unknown(after.chars().take(128).collect())),
        },
    };
    let items: Vec<T> = ordered.iter().skip(start).take(paging.limit).map(|item| (*item).clone()).collect();
    Ok(Page { has_more: start + items.len() < ordered.len(), items })
}

fn within(field: &'static str, value: u64, limit: u64) -> Result<(), FilesError> {
    if value > limit { Err(FilesError::Limit { field, value, limit }) } else { Ok(()) }
}

pub(crate) fn create(path: &Path) -> Result<File, FilesError> {
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    file.map_err(|error| FilesError::disk(path, &error))
}

/// Removes a file that may not be there. What cannot be removed now is removed at the next start.
pub(crate) fn remove(path: &Path) {
    if let Err(error) = fs::remove_file(path)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(path = %path.display(), %error, "a file cannot be removed");
    }
}

/// A random number, from the keys with which the standard library seeds its maps.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// Seconds since 1970.
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests;
