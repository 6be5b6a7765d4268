//! A model on a device that it shares with others: its part of the memory, its turns, the progress of its load, and what
//! it needs.

use super::{DeviceChoice, EngineOptions, LOGIT_ROWS, Memory, Plan, digest, plan_for, spec_of};
use crate::Error;
use crate::defaults::{ModelNeeds, STATES_PER_SEQUENCE};
use engine::budget::{BudgetExceeded, MemoryBudget, Reservation, ReservedBytes};
use engine::decoder::Decoder;
use engine::encoder::task;
use engine::kv_cache::CacheSpec;
use engine::kv_cache::memory::{HostFloor, MemoryFloor};
use engine::scheduler::MAX_CONTEXT;
use engine::share::DeviceShare;
use engine::turns::Turns;
use engine::weights::{Packs, TensorSource};
use kernels::backend::{MemoryUse, SharedBytes};
use kernels::matmul::PACK_LAYOUT;
use kernels::pool::Pool;
use model::costs::ModelCosts;
use model::spec::ModelSpec;
use model::{ModelFile, TensorBytes};
use parking_lot::Mutex;
use proto::deployment::ModelFacts;
use proto::served_model::ModelTask;
use std::cell::RefCell;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use text::tokenizer::Tokenizer;

/// Estimate of the bytes that tokenizer, templates and names take for each token of the vocabulary, from resident memory
/// before and after loads.
const VOCABULARY_BYTES: u64 = 256;
/// Estimate of what an engine needs beside weights, caches and buffers: stacks, queues, the ring of KV events.
const ENGINE_BYTES: u64 = 12 << 20;
/// Memory of a process that serves, beside its models and beyond that at its start: code, connections, queues, and what
/// its allocator keeps. 85 MiB after the files of eight models were read, docs/measurements/several-models.md.
const PROCESS_BYTES: u64 = 96 << 20;
/// Divisor of the arena: the bytes of block lists and of the prefix tree.
const TREE_DIVISOR: u64 = 32;
/// The smallest arena takes at most this part of the budget, whatever the model's longest sequence.
const ARENA_DIVISOR: u64 = 4;
/// Parts of an arena that is too small for the longest sequence by which it grows.
const ARENA_STEPS: u64 = 16;

/// The device of a worker that holds several models: one pool of threads, one memory, one step at a time.
#[derive(Debug, Clone)]
pub struct SharedDevice {
    pub budget: MemoryBudget,
    pub turns: Turns,
    /// `None` if another device computes.
    pool: Option<Arc<Pool>>,
    /// Memory of the process without models.
    process: Arc<Mutex<Reservation>>,
    /// The least that it is. 0: the device's memory is not the process's.
    least: u64,
}

impl SharedDevice {
    /// The device and the threads that `options` select, and `budget` bytes for all models and for what the process
    /// takes without them, `process` bytes.
    ///
    /// # Errors
    /// For a device that is not usable, or if the operating system cannot start a thread.
    pub fn new(options: &EngineOptions, budget: u64, process: u64) -> Result<Self, Error> {
        let pool = match options.device.resolve(options.gpu)?.0 {
            DeviceChoice::Auto | DeviceChoice::Cpu => Some(Arc::new(Pool::new(super::pool_config(options))?)),
            _ => None,
        };
        let budget = MemoryBudget::new(budget);
        let least = process;
        let process = Arc::new(Mutex::new(budget.record(process)));
        Ok(Self { process, least, budget, turns: Turns::default(), pool })
    }

    /// Bytes that the process takes without models. They are a part of the budget.
    pub(crate) fn process_bytes(&self) -> u64 {
        self.process.lock().bytes()
    }

    /// Counts memory of the process that no reservation covers, so that models do not get it. `resident`: all that it
    /// has. `with_models`: the models are in this process.
    pub(crate) fn count_process(&self, resident: u64, with_models: bool) {
        if self.least > 0 {
            let mut process = self.process.lock();
            let models = self.budget.reserved().saturating_sub(process.bytes());
            let others = if with_models { resident.saturating_sub(models) } else { resident };
            process.settle(others.max(self.least));
        }
    }
}

/// Bytes of the device's memory that this process takes without models: what it has now, and an estimate of what it will
/// need once it serves.
pub fn process_bytes(options: &EngineOptions) -> Result<u64, Error> {
    Ok(match Memory::of(options)? {
        Memory::Host | Memory::Unified => engine::memory::resident_bytes() + PROCESS_BYTES,
        Memory::Own { .. } => 0,
    })
}

/// One load of a model on a shared device. Cheap to clone.
#[derive(Debug, Clone)]
pub struct HostedLoad(Arc<LoadState>);

#[derive(Debug)]
struct LoadState {
    device: SharedDevice,
    priority: u32,
    kind: LoadKind,
    /// Memory of a [`LoadKind::Stage`] until the load takes it.
    granted: Mutex<Option<Reservation>>,
    /// Thousandths of the layers that are loaded.
    permille: AtomicU32,
    cancelled: AtomicBool,
    /// Bytes that the model's arena keeps when it is shrunk.
    smallest_arena: AtomicU64,
    /// Bytes that the load, and then the model, has reserved.
    reserved: Mutex<ReservedBytes>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LoadKind {
    /// By order: its arena grows and shrinks.
    Ordered,
    /// The worker's own model: memory is only counted, not limited, and the arena has the size of the options.
    Own,
    /// A stage of a model on several workers, whose memory was reserved before. The arena has one size.
    Stage,
}

impl PartialEq for HostedLoad {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for HostedLoad {}

impl HostedLoad {
    /// A model that is loaded by order.
    pub fn new(device: &SharedDevice, priority: u32) -> Self {
        Self::with(device, priority, LoadKind::Ordered, None)
    }

    /// A stage of a model on several workers, with all memory that it takes.
    pub(crate) fn stage(device: &SharedDevice, priority: u32, memory: Reservation) -> Self {
        Self::with(device, priority, LoadKind::Stage, Some(memory))
    }

    /// The worker's own model. It counts in the budget whether or not it fits.
    pub fn own(device: &SharedDevice) -> Self {
        Self::with(device, 1, LoadKind::Own, None)
    }

    fn with(device: &SharedDevice, priority: u32, kind: LoadKind, granted: Option<Reservation>) -> Self {
        let reserved = granted.as_ref().map(Reservation::watch).unwrap_or_default();
        Self(Arc::new(LoadState {
            device: device.clone(),
            priority,
            kind,
            granted: Mutex::new(granted),
            permille: AtomicU32::new(0),
            cancelled: AtomicBool::new(false),
            smallest_arena: AtomicU64::new(0),
            reserved: Mutex::new(reserved),
        }))
    }

    pub(super) fn pool(&self) -> Option<Arc<Pool>> {
        self.0.device.pool.clone()
    }

    /// Bytes for all models of the device.
    pub(crate) fn limit(&self) -> Option<u64> {
        (self.0.kind != LoadKind::Own).then(|| self.0.device.budget.limit())
    }

    /// Thousandths of the load that are done.
    pub fn permille(&self) -> u32 {
        self.0.permille.load(Ordering::Relaxed)
    }

    /// Bytes of an arena that the model can give back; `total` and `used` are those of its arena and of its sequences.
    pub fn spare_arena(&self, total: u64, used: u64) -> u64 {
        match self.0.smallest_arena.load(Ordering::Relaxed) {
            0 => 0,
            smallest => total.saturating_sub(smallest.max(used)),
        }
    }

    /// Bytes that the load has reserved, and then the model; 0 once all its memory is free.
    pub fn bytes(&self) -> u64 {
        self.0.reserved.lock().get()
    }

    pub(super) fn progress(&self, done: usize, total: usize) {
        let permille = done as u64 * 1000 / (total as u64).max(1);
        self.0.permille.store(permille as u32, Ordering::Relaxed);
    }

    /// Ends the load before its next tensor, with [`engine::Error::LoadCancelled`].
    pub fn cancel(&self) {
        self.0.cancelled.store(true, Ordering::Relaxed);
    }

    /// Reserves the memory of a server of another project that computes the model.
    ///
    /// # Errors
    /// [`engine::Error::KvMemory`] if the budget does not have it, [`engine::Error::LoadCancelled`].
    pub(crate) fn reserve(&self, bytes: u64) -> Result<Reservation, Error> {
        self.check()?;
        let refused = |refused: BudgetExceeded| engine::Error::KvMemory { reason: refused.to_string() };
        let memory = self.0.device.budget.reserve(bytes).map_err(refused)?;
        *self.0.reserved.lock() = memory.watch();
        Ok(memory)
    }

    /// Whether the budget is of the host's memory, which also is that of processes.
    pub(crate) fn counts_processes(&self) -> bool {
        self.0.device.least > 0
    }

    /// # Errors
    /// [`engine::Error::LoadCancelled`] after [`cancel`](Self::cancel).
    pub(crate) fn check(&self) -> Result<(), engine::Error> {
        match self.0.cancelled.load(Ordering::Relaxed) {
            true => Err(engine::Error::LoadCancelled),
            false => Ok(()),
        }
    }

    /// The turns and the memory of a later stage. `None` if they were taken.
    pub(crate) fn share(&self) -> Option<DeviceShare> {
        let memory = self.0.granted.lock().take()?;
        Some(DeviceShare::new(self.0.device.turns.join(self.0.priority), memory))
    }

    /// Reserves what the load takes at its peak.
    ///
    /// # Errors
    /// [`engine::Error::KvMemory`] if the budget does not have it.
    pub(super) fn admit(&self, bytes: HostedBytes) -> Result<Admitted, Error> {
        self.check()?;
        let budget = &self.0.device.budget;
        let refused = |refused: BudgetExceeded| engine::Error::KvMemory { reason: refused.to_string() };
        let memory = match (self.0.kind, self.0.granted.lock().take()) {
            (_, Some(granted)) => granted,
            (LoadKind::Own, None) => budget.record(bytes.peak()),
            (LoadKind::Ordered | LoadKind::Stage, None) => budget.reserve(bytes.peak()).map_err(refused)?,
        };
        *self.0.reserved.lock() = memory.watch();
        Ok(Admitted { load: self.clone(), memory, bytes })
    }
}

/// Bytes of a model on a shared device. Upper estimates, made before its weights are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct HostedBytes {
    weights: u64,
    /// The largest tensor, while it is read and repacked.
    staging: u64,
    /// Activations and logits of a step.
    scratch: u64,
    /// The smallest arena.
    pub(super) arena: u64,
    /// Tokenizer, queues, block lists.
    tables: u64,
}

impl HostedBytes {
    /// `rows`: those of a step. `arena`: bytes of keys and values.
    pub(super) fn new(
        file: &ModelFile,
        spec: &ModelSpec,
        needs: &ModelNeeds,
        rows: usize,
        arena: u64,
    ) -> Self {
        let largest = file.tensors().map(model::header::TensorInfo::bytes).max().unwrap_or(0);
        let logits = spec.logits().map_or(0, |_| LOGIT_ROWS.min(rows) as u64 * spec.vocab as u64 * 4);
        Self {
            weights: needs.weight_bytes,
            staging: largest,
            scratch: (rows as u64).saturating_mul(needs.activation_bytes_per_row).saturating_add(logits),
            arena,
            tables: ENGINE_BYTES + spec.vocab as u64 * VOCABULARY_BYTES + arena / TREE_DIVISOR,
        }
    }

    fn peak(self) -> u64 {
        let Self { weights, staging, scratch, arena, tables } = self;
        [weights, staging, scratch, arena, tables].into_iter().fold(0, u64::saturating_add)
    }
}

/// Bytes of an arena for one sequence of `tokens`, at most a quarter of `limit`, whatever the sequence needs.
pub(super) fn smallest_arena(
    needs: &ModelNeeds,
    (tokens, chunk): (usize, usize),
    block: usize,
    limit: u64,
) -> u64 {
    let tokens = (tokens as u64).saturating_add(2 * block as u64);
    let rows = (chunk as u64).saturating_add(2 * block as u64);
    let states = STATES_PER_SEQUENCE.saturating_mul(needs.state_bytes);
    let bytes = |tokens: u64| tokens.saturating_mul(needs.kv_bytes_per_token).saturating_add(states);
    let least = bytes(rows.min(tokens));
    (bytes(tokens).min(limit / ARENA_DIVISOR)).max(least).next_multiple_of(1 << 16)
}

/// A load whose memory is reserved.
pub(super) struct Admitted {
    load: HostedLoad,
    memory: Reservation,
    bytes: HostedBytes,
}

impl Admitted {
    /// Whether the arena has the size of the options.
    pub(super) fn has_fixed_arena(&self) -> bool {
        self.load.0.kind != LoadKind::Ordered
    }

    /// Bytes that pinned prefixes may hold.
    pub(super) fn pin_bytes(&self) -> u64 {
        self.bytes.arena / 4
    }

    /// Bytes to which the arena may grow: `computed` if the device can give memory of an arena back, else what it has
    /// from the start.
    pub(super) fn largest_arena(&self, decoder: &Decoder, computed: u64, cache: &CacheSpec) -> u64 {
        let largest = computed.max(self.bytes.arena);
        let valid = CacheSpec { arena_bytes: largest, ..cache.clone() }.validate().is_ok();
        // A GPU's driver frees whole allocations only.
        if valid && decoder.backend().gives_back_kv() { largest } else { self.bytes.arena }
    }

    /// The smallest arena, for one sequence of `tokens`: grown as long as `longest` is shorter and the budget allows it.
    /// `longest` returns the longest sequence that fits into some bytes, and these bytes in whole units.
    pub(super) fn arena(&mut self, tokens: usize, longest: impl Fn(u64) -> (usize, u64)) -> u64 {
        let step = (self.bytes.arena / ARENA_STEPS).next_multiple_of(1 << 16);
        for _ in 0..ARENA_STEPS {
            let capped =
                self.load.limit().is_none_or(|limit| self.bytes.arena + step > limit / ARENA_DIVISOR);
            if capped || longest(self.bytes.arena).0 >= tokens || self.memory.grow(step).is_err() {
                break;
            }
            self.bytes.arena += step;
        }
        let smallest = longest(self.bytes.arena).1;
        self.load.0.smallest_arena.store(smallest, Ordering::Relaxed);
        smallest
    }

    /// The model's share, with what it has allocated in the end.
    pub(super) fn settle(mut self, used: MemoryUse) -> DeviceShare {
        if self.load.0.kind == LoadKind::Stage {
            // `used` has the arena of all stages.
            return self.keep();
        }
        let MemoryUse { weights, activations, kv } = used;
        let held = weights as u64 + activations as u64 + kv as u64 + self.bytes.tables;
        if held > self.memory.bytes() && self.load.0.kind != LoadKind::Own {
            tracing::warn!(
                held,
                reserved = self.memory.bytes(),
                "a model has allocated more than was estimated"
            );
        }
        self.memory.settle(held);
        let LoadState { device, priority, .. } = self.load.0.as_ref();
        DeviceShare::new(device.turns.join(*priority), self.memory)
    }

    /// The share of a model on a runtime that does not report its memory: keeps what was reserved.
    pub(super) fn keep(self) -> DeviceShare {
        let LoadState { device, priority, .. } = self.load.0.as_ref();
        DeviceShare::new(device.turns.join(*priority), self.memory)
    }
}

/// Memory of the host that the growth of arenas must leave free. `None` if they are not in the host's memory.
pub(super) fn elastic_floor(options: &EngineOptions) -> Result<Option<HostFloor>, Error> {
    let host = super::host(options)?;
    let memory = Memory::of(options)?;
    Ok((!matches!(memory, Memory::Own { .. })).then(|| HostFloor {
        floor: MemoryFloor { bytes: crate::defaults::floor(host).value },
        memory: Arc::new(memory),
    }))
}

/// Reads the tensors of a load: ends it when it is cancelled, and drops the pages of a file's tensor before the next one
/// is read, so that one tensor at a time is in memory twice.
pub(super) struct HostedSource<'a> {
    source: &'a dyn TensorSource,
    file: &'a ModelFile,
    load: &'a HostedLoad,
    taken: RefCell<Option<String>>,
}

impl<'a> HostedSource<'a> {
    pub(super) fn new(source: &'a dyn TensorSource, file: &'a ModelFile, load: &'a HostedLoad) -> Self {
        Self { source, file, load, taken: RefCell::new(None) }
    }

    fn release(&self, next: Option<String>) {
        if let Some(before) = self.taken.replace(next) {
            self.file.release_tensor(&before);
        }
    }
}

impl TensorSource for HostedSource<'_> {
    /// # Errors
    /// [`engine::Error::LoadCancelled`] after [`HostedLoad::cancel`].
    fn tensor(&self, name: &str) -> Result<TensorBytes<'_>, engine::Error> {
        self.load.check()?;
        self.release(Some(name.to_owned()));
        self.source.tensor(name)
    }

    fn shared(&self, name: &str) -> Result<Option<SharedBytes>, engine::Error> {
        self.load.check()?;
        self.source.shared(name)
    }

    fn forget(&self, name: &str) {
        self.source.forget(name);
    }

    fn measure(&self, name: &str) -> Result<(u32, u64), engine::Error> {
        self.source.measure(name)
    }
}

impl Drop for HostedSource<'_> {
    fn drop(&mut self) {
        self.release(None);
    }
}

/// Content of the model in a file, and what it needs on this worker with `options`. Reads the whole file if its digest
/// is not in the options' cache.
pub fn facts(path: &Path, options: &EngineOptions) -> Result<ModelFacts, Error> {
    let file = ModelFile::open(path)?;
    let full = ModelSpec::from_file(&file)?;
    let spec = spec_of(&file, options)?;
    let tokenizer = Tokenizer::from_metadata(file.metadata())?;
    let plan = plan_for(&file, &spec, options)?;
    let bytes = bytes_of(&file, &spec, &plan, options);
    let digest = digest(&file, options)?;
    Ok(ModelFacts {
        digest,
        tokenizer_digest: tokenizer.digest(),
        task: match super::images::needed_bytes(&file, options) {
            Some(_) => ModelTask::GenerateFromImages,
            None => task(&spec),
        },
        context: full.context_length.min(MAX_CONTEXT) as u32,
        needed_bytes: bytes.peak(),
    })
}

/// Bytes of a layer range: weights, buffers of `rows` rows and tables, without its caches.
pub(super) fn range_bytes(
    (file, spec): (&ModelFile, &ModelSpec),
    needs: &ModelNeeds,
    layers: Range<usize>,
    rows: usize,
) -> u64 {
    let weights = ModelCosts::of_file(spec, file).range(layers).weight_bytes;
    let needs = ModelNeeds { weight_bytes: weights + weights / 10, ..*needs };
    HostedBytes::new(file, spec, &needs, rows, 0).peak()
}

/// Bytes that the model in a file needs at least with `options`. Reads no weights.
pub fn needed_bytes(path: &Path, options: &EngineOptions) -> Result<u64, Error> {
    let file = ModelFile::open(path)?;
    let spec = spec_of(&file, options)?;
    let plan = plan_for(&file, &spec, options)?;
    Ok(bytes_of(&file, &spec, &plan, options).peak())
}

/// Files that hold the weights of a model as the device reads them: the repacked ones if there are any, else the model's.
pub(crate) fn pinned_files(path: &Path, digest: &[u8; 32], options: &EngineOptions) -> Vec<PathBuf> {
    let Ok(file) = ModelFile::open(path) else { return Vec::new() };
    let layers = ModelSpec::from_file(&file).map_or(0, |spec| spec.layers.len());
    let packed = options.packed.as_ref().map(|store| Packs::path(store, PACK_LAYOUT, digest, &(0..layers)));
    match packed.filter(|packed| packed.is_file()) {
        Some(packed) => vec![packed],
        None => file.files().map(Path::to_owned).collect(),
    }
}

/// Bytes that a model needs with the defaults of its plan.
pub(super) fn bytes_of(
    file: &ModelFile,
    spec: &ModelSpec,
    plan: &Plan,
    options: &EngineOptions,
) -> HostedBytes {
    let Plan { needs, defaults, .. } = plan;
    let chunk = options.chunk.unwrap_or(defaults.chunk.value as usize);
    let sequences = options.max_sequences.unwrap_or(defaults.max_seqs.value);
    let tokens = spec.context_length.min(MAX_CONTEXT);
    let limit = options.hosted.as_ref().and_then(HostedLoad::limit).unwrap_or(u64::MAX);
    let (rows, arena) = match spec.logits() {
        Some(_) => {
            let rows = options.max_rows.unwrap_or(if chunk == 0 { tokens } else { chunk + sequences });
            let arena = smallest_arena(needs, (tokens, chunk), options.block_tokens, limit);
            (rows.max(chunk).max(sequences), arena)
        }
        // An encoder has whole texts in a step, and keys and values of one step.
        None => {
            let rows = chunk.max(tokens);
            let blocks = rows as u64 + (sequences * options.block_tokens) as u64;
            (rows, blocks.saturating_mul(needs.kv_bytes_per_token))
        }
    };
    let arena = options.kv_bytes.unwrap_or(arena);
    let bytes = HostedBytes::new(file, spec, needs, rows, arena);
    // Prefixes that are read from files, or wait to be written.
    let under_way = options.tiers.shared_disk.as_ref().map_or(0, |_| options.tiers.under_way_bytes);
    HostedBytes { tables: bytes.tables + under_way, ..bytes }
}
