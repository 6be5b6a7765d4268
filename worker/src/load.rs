//! From a model file to an engine: reads the spec, loads the weights, and sizes the KV cache by the memory
//! that is left.

use crate::Error;
use crate::defaults::{Defaults, Host, ModelNeeds, defaults};
use engine::decoder::{CacheGroup, Decoder, DecoderConfig, Widths};
use engine::engine::{AdapterLimits, Engine, EngineAdapter};
use engine::executor::{Executor, LocalExecutor};
use engine::kv_cache::memory::{HostFloor, MemInfo, MemoryFloor, ProcMemInfo};
use engine::kv_cache::{CacheSpec, GroupKind, GroupSpec};
use engine::kv_events::EventLog;
use engine::scheduler::{MAX_CONTEXT, Scheduler, SchedulerConfig};
use engine::share::{DeviceShare, ElasticArena};
use engine::snapshot::Origin;
use engine::speculation::{Speculation, SpeculativeMethod};
use engine::tiers::{Tiers, TiersConfig};
use engine::weights::{Packs, TensorSource};
use kernels::backend::{Backend, BackendInfo, KvTypes, MemoryUse, SharedBytes};
use kernels::cpu::{CpuBackend, CpuConfig};
use kernels::pool::{Pool, PoolConfig};
use metadata::Metadata;
use model::costs::{DrafterCosts, ModelCosts};
use model::shard::TensorMemory;
use model::spec::{AttentionSpec, FfnPart, FfnSpec, ModelSpec};
use model::{ModelFile, TensorBytes};
use pipeline::weight_distribution::Arrivals;
use pipeline::{DownstreamRanks, PipelineExecutor, Replica};
use proto::block::{ClusterKey, HASH_UNIT_TOKENS};
use proto::ids::{Epoch, ModelId};
use proto::message::PullCost;
use proto::served_model::{BUILT_IN, ModelTask, ServedModel};
use std::num::NonZeroUsize;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use text::tokenizer::Tokenizer;

mod adapters;
mod device;
mod drafter;
mod encoder;
mod hosted;
mod images;
mod options;
mod reading;
mod staged;
mod stages;
mod text_backends;

pub use adapters::{LoraSource, read_adapter, served_digest};
pub(crate) use adapters::{refuse_adapters, stage_adapter};
use device::Memory;
pub use device::{DeviceChoice, gpu_copy_bandwidth, visible_gpus};
use drafter::LoadedDrafter;
pub(crate) use drafter::{digest_of as drafter_digest, offered as offered_drafter};
pub use encoder::encoder;
pub(crate) use hosted::pinned_files;
pub use hosted::{HostedLoad, SharedDevice, facts, needed_bytes, process_bytes};
use hosted::{HostedSource, elastic_floor};
use images::Sight;
pub use images::{LoadedTower, ModelVision, tower};
pub use options::{EngineOptions, IMAGE_CACHE_BYTES, TowerPlace};
use reading::Reading;
use staged::Staged;
pub(crate) use stages::{admit_kv, prepare_replica, range_bytes, range_cache, stage};
pub use stages::{check_shards, open_replica};

/// Maximum number of hash units in the replay ring of KV events: 4 MiB of ids.
const EVENT_RING_UNITS: usize = 256 * 1024;
/// Rows whose logits are computed together.
const LOGIT_ROWS: usize = 64;

/// A loaded model. It becomes an engine once the cluster key is known.
pub struct Prepared {
    decoder: Decoder,
    /// The downstream ranks of a replica, and the suffix of the numeric class for their activations' type.
    downstream: Option<(DownstreamRanks, Option<&'static str>)>,
    tokenizer: Arc<Tokenizer>,
    metadata: Metadata,
    model_digest: [u8; 32],
    cache: CacheSpec,
    scheduler: SchedulerConfig,
    max_model_len: usize,
    kv_type: KvTypes,
    tiers: TiersConfig,
    pull_timeout: Option<Duration>,
    drafter: LoadedDrafter,
    adapters: Vec<EngineAdapter>,
    lora_limits: AdapterLimits,
    /// The part that sees images, and bytes of its cache.
    sight: Option<(Sight, u64)>,
    /// The model's file.
    path: PathBuf,
    /// Declared last, because its memory is free only when all other fields are.
    share: Option<DeviceShare>,
}

/// A model with its engine.
pub struct LoadedModel {
    pub engine: Engine,
    pub tokenizer: Arc<Tokenizer>,
    pub metadata: Metadata,
    pub max_model_len: usize,
}

/// Called with (layers loaded, total layers).
pub type Progress<'a> = dyn FnMut(usize, usize) + 'a;

/// Memory and compute needs of a model on this machine, and the defaults computed from them.
#[derive(Debug, Clone)]
pub struct Plan {
    pub host: Host,
    pub needs: ModelNeeds,
    /// The defaults, each with its reason.
    pub defaults: Defaults,
    /// The model's task.
    pub task: ModelTask,
}

/// Loads a decoder without a KV arena.
pub fn decoder(path: &Path, options: &EngineOptions, progress: &mut Progress<'_>) -> Result<Decoder, Error> {
    let gguf = ModelFile::open(path)?;
    let spec = spec_of(&gguf, options)?;
    generates(&spec)?;
    let rows = options.max_rows.unwrap_or(512);
    let layers = 0..spec.layers.len();
    load_decoder((&gguf, false), spec, options, backend(options, &environment)?, (layers, rows), progress)
}

/// Opens the device that `options` select. `environment` returns the variables that select kernels
/// (`KVASIR_BACKEND`, `KVASIR_MATMUL_BACKEND` and others, see `kernels::registry`).
pub fn backend(
    options: &EngineOptions,
    environment: &dyn Fn(&str) -> Option<String>,
) -> Result<Box<dyn Backend>, Error> {
    let (device, reason) = options.device.resolve_with(options.gpu, environment)?;
    tracing::debug!(?device, reason, "device selected");
    match device {
        DeviceChoice::Cuda => Ok(device::gpu(options)?),
        #[cfg(feature = "ptx-sim")]
        DeviceChoice::PtxSim => Ok(device::simulated(options)?),
        DeviceChoice::Auto | DeviceChoice::Cpu => {
            let config = CpuConfig::select(options.activations, environment)?;
            let pool = match options.hosted.as_ref().and_then(HostedLoad::pool) {
                Some(shared) => shared,
                None => Arc::new(Pool::new(pool_config(options))?),
            };
            Ok(Box::new(CpuBackend::new(config, pool)?))
        }
    }
}

/// Reads a variable of the process's environment. A value that is not UTF-8 is converted with replacement
/// characters, not dropped, so that as a choice of kernels it fails.
pub(crate) fn environment(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

/// Task of the model in a file.
pub fn task(path: &Path) -> Result<ModelTask, Error> {
    Ok(engine::encoder::task(&ModelSpec::from_file(&ModelFile::open(path)?)?))
}

fn generates(spec: &ModelSpec) -> Result<(), Error> {
    match spec.logits() {
        Some(_) => Ok(()),
        None => Err(Error::WrongTask {
            does: "encodes texts and does not generate text",
            instead: "use it with `kvasir embed` or `kvasir up`",
        }),
    }
}

/// Computes the defaults for a model on this machine without loading weights.
pub fn plan(path: &Path, options: &EngineOptions) -> Result<Plan, Error> {
    let gguf = ModelFile::open(path)?;
    plan_for(&gguf, &spec_of(&gguf, options)?, options)
}

/// Costs of the drafter `speculative_method` next to the model in `path`, without loading anything. `None` for drafters
/// without costs.
///
/// # Errors
/// [`engine::Error::Config`] for a drafter of another model, or a model without an MTP head.
pub fn drafter_costs(
    path: &Path,
    speculative_method: &SpeculativeMethod,
) -> Result<Option<DrafterCosts>, Error> {
    let file = ModelFile::open(path)?;
    drafter::costs(speculative_method, (&file, &ModelSpec::from_file(&file)?))
}

/// Loads a model and its engine for use in one process. Its prefixes are named with a fixed key.
pub fn open(path: &Path, options: &EngineOptions, progress: &mut Progress<'_>) -> Result<LoadedModel, Error> {
    open_on(path, options, backend(options, &environment)?, progress)
}

/// Like [`open`], on a device that the caller opened.
pub fn open_on(
    path: &Path,
    options: &EngineOptions,
    backend: Box<dyn Backend>,
    progress: &mut Progress<'_>,
) -> Result<LoadedModel, Error> {
    assemble(prepare_on(path, options, backend, None, progress)?)
}

/// Creates an engine with a fixed key, for use in one process.
fn assemble(prepared: Prepared) -> Result<LoadedModel, Error> {
    let (tokenizer, metadata) = (Arc::clone(&prepared.tokenizer), prepared.metadata.clone());
    let max_model_len = prepared.max_model_len;
    let engine = prepared.engine(ClusterKey([0; 32]), Epoch(1))?;
    Ok(LoadedModel { engine, tokenizer, metadata, max_model_len })
}

/// Loads a model and allocates its KV arena.
pub fn prepare(path: &Path, options: &EngineOptions, progress: &mut Progress<'_>) -> Result<Prepared, Error> {
    prepare_on(path, options, backend(options, &environment)?, None, progress)
}

fn prepare_on(
    path: &Path,
    options: &EngineOptions,
    backend: Box<dyn Backend>,
    replica: Option<Replica>,
    progress: &mut Progress<'_>,
) -> Result<Prepared, Error> {
    let gguf = ModelFile::open(path)?;
    let spec = spec_of(&gguf, options)?;
    generates(&spec)?;
    let tokenizer = Arc::new(Tokenizer::from_metadata(gguf.metadata())?);
    let plan = plan_for(&gguf, &spec, options)?;
    let admit = |hosted: &HostedLoad| hosted.admit(hosted::bytes_of(&gguf, &spec, &plan, options));
    let mut admitted = options.hosted.as_ref().map(admit).transpose()?;
    let Plan { defaults, .. } = plan;
    let chunk = options.chunk.unwrap_or(defaults.chunk.value as usize);
    let max_sequences = options.max_sequences.unwrap_or(defaults.max_seqs.value);
    let len_limit = spec.context_length.min(MAX_CONTEXT);
    let rows = match options.max_rows {
        Some(rows) => rows,
        None if chunk == 0 => len_limit,
        None => defaults.max_batch_tokens.value as usize,
    };
    let rows = rows.max(chunk).max(max_sequences);
    let floor = MemoryFloor { bytes: defaults.floor_bytes.value };
    let refused = |refused: engine::kv_cache::memory::MemoryRefused| engine::Error::KvMemory {
        reason: refused.to_string(),
    };
    let hashing = options.digests.as_ref().map(|cache| cache.begin(&gguf)).transpose()?;
    let metadata = gguf.metadata().clone();
    let wire = replica.as_ref().and_then(Replica::class);
    let (layers, mut joining, last_stage_drafter) = match replica {
        None => (0..spec.layers.len(), None, None),
        Some(replica) => {
            let model_digest = gguf.digest()?;
            let class = stages::class(backend.info(), &model_digest, &spec, options);
            let last_stage_drafter = drafter::last_stage_drafter(options, (&gguf, &spec), max_sequences)?;
            let join_request = (model_digest, class, last_stage_drafter);
            let (first, joining) = replica.join(&spec, join_request, rows, options.block_tokens)?;
            (first, Some(joining), last_stage_drafter)
        }
    };
    let weights = match joining {
        None => gguf.total_tensor_bytes() - images::left_out_bytes(&gguf, options),
        Some(_) => ModelCosts::of_file(&spec, &gguf).range(layers.clone()).weight_bytes,
    };
    let memory = Memory::of(options)?;
    floor.admit(&memory, "weights", weights).map_err(refused)?;
    let mut decoder = load_decoder((&gguf, true), spec, options, backend, (layers, rows), progress)?;
    hashing.map(|hashing| hashing.finish(&gguf)).transpose()?;
    let model_digest = gguf.digest()?;
    let arena_bytes = options.kv_bytes.unwrap_or(defaults.arena_bytes.value);
    let drafter = match last_stage_drafter {
        Some(_) => LoadedDrafter::InDecoder,
        None => {
            let own = (tokenizer.as_ref(), max_sequences);
            drafter::load_drafter(options, &gguf, &mut decoder, own, (floor, arena_bytes))?
        }
    };
    let adapters = adapters::load_all(options, &gguf, &mut decoder)?;
    let sight = match joining {
        None => images::of_model(&gguf, &decoder, options)?,
        Some(_) => None,
    };
    let scheduler = SchedulerConfig {
        max_batch_tokens: rows as u32,
        max_seqs: max_sequences,
        chunk: chunk as u32,
        prefix_cache: options.prefix_cache,
        // Pins stay when the arena of a model that shares its device shrinks.
        pin_bytes: options.pin_bytes.or_else(|| Some(admitted.as_ref()?.pin_bytes())),
        block_layout: options.block_layout,
        ..SchedulerConfig::default()
    };
    // Only used to find the longest sequence that fits. The real scheduler is created with the cluster key.
    let longest = |cache: CacheSpec, usable: u64| {
        let mut probe = Scheduler::new(scheduler.clone(), cache, ClusterKey([0; 32]))
            .map_err(|error| engine::Error::KvMemory { reason: error.to_string() })?;
        probe.shrink_arena_to(usable);
        Ok::<_, engine::Error>((probe.max_sequence_tokens() as usize, probe.stats().kv_total_bytes))
    };
    let mut groups: Vec<GroupSpec> = decoder.groups().iter().map(CacheGroup::spec).collect();
    if let Some(joining) = &mut joining {
        let own: Vec<u64> = groups.iter().map(|group| group.block_bytes).collect();
        for (group, bytes) in groups.iter_mut().zip(joining.block_bytes(&own)?) {
            group.block_bytes = bytes;
        }
        joining.load_adapters(&adapters::for_stages(&adapters))?;
    }
    let mut cache = CacheSpec { groups, block_tokens: options.block_tokens as u32, arena_bytes };
    let mut smallest_arena = None;
    if let Some(admitted) = admitted.as_mut().filter(|admitted| !admitted.has_fixed_arena()) {
        cache.arena_bytes = admitted.largest_arena(&decoder, defaults.arena_bytes.value, &cache);
        let fits = |arena_bytes| longest(cache.clone(), arena_bytes).unwrap_or((0, 0));
        smallest_arena = Some(admitted.arena(len_limit, fits));
    }
    let arena_bytes = smallest_arena.unwrap_or(cache.arena_bytes);
    let memory = memory.behind(decoder.backend().memory(), options)?;
    let sight_bytes = sight.as_ref().map_or(0, |sight| sight.buffer_bytes() + options.image_cache_bytes);
    let bytes = arena_bytes + decoder.spare_bytes() as u64 + sight_bytes;
    floor.admit(&memory, "the KV cache", bytes).map_err(refused)?;
    cache.validate().map_err(|error| engine::Error::KvMemory { reason: error.to_string() })?;
    let downstream = match joining {
        None => {
            decoder.allocate_kv(cache.arena_bytes as usize)?;
            None
        }
        Some(joining) => Some((joining.begin(&mut decoder, &cache)?, wire)),
    };
    let max_model_len = len_limit.min(longest(cache.clone(), arena_bytes)?.0);
    if max_model_len < 2 {
        let reason = format!("{arena_bytes} bytes hold no sequence of two tokens");
        return Err(engine::Error::KvMemory { reason }.into());
    }
    let mut used = MemoryUse { kv: arena_bytes as usize, ..decoder.backend().memory() };
    if let Some(sight) = &sight {
        used.weights += sight.memory().weights;
        used.activations += sight_bytes as usize;
    }
    let share = match (admitted, smallest_arena) {
        (Some(admitted), Some(smallest)) => Some(
            admitted
                .settle(used)
                .with_elastic_arena(ElasticArena { smallest, host: elastic_floor(options)? }),
        ),
        (admitted, _) => admitted.map(|admitted| admitted.settle(used)),
    };
    Ok(Prepared {
        decoder,
        downstream,
        tokenizer,
        metadata,
        model_digest,
        cache,
        scheduler,
        max_model_len,
        kv_type: options.kv_type,
        tiers: options.tiers.clone(),
        pull_timeout: options.pull_timeout,
        drafter,
        adapters,
        lora_limits: options.lora_limits,
        sight: sight.map(|sight| (sight, options.image_cache_bytes)),
        path: path.to_owned(),
        share,
    })
}

impl Prepared {
    /// Describes the model as the worker registers it.
    pub fn served(&self, id: ModelId) -> ServedModel {
        let digests = (self.model_digest, self.tokenizer.digest());
        let lengths = (self.max_model_len, self.cache.block_tokens as usize);
        let described = describe(id, &self.decoder, digests, lengths, self.kv_type);
        match self.sight {
            Some(_) => ServedModel { task: ModelTask::GenerateFromImages, ..described },
            None => described,
        }
    }

    /// Class of the vision tower whose embeddings it takes. `None`: it sees no images.
    pub(crate) fn tower_class(&self) -> Option<&str> {
        self.sight.as_ref().map(|(sight, _)| sight.tower_class.as_str())
    }

    /// The adapters that are loaded with it.
    pub fn adapters(&self) -> &[EngineAdapter] {
        &self.adapters
    }

    /// The model's file, for adapters that are loaded later.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn numeric_class(&self) -> String {
        let class = numeric_class(&self.decoder, &self.model_digest, self.kv_type);
        match &self.downstream {
            Some((_, Some(wire))) => format!("{class}/{wire}"),
            _ => class,
        }
    }

    /// Costs of KV transfers for this model. `None` if prefixes are not cached.
    pub(crate) fn pull_cost(&self, model: ModelId) -> Option<PullCost> {
        let block_tokens = u64::from(self.cache.block_tokens.max(1));
        let (mut bytes_per_token, mut bytes_per_point) = (0, 0);
        for group in &self.cache.groups {
            match group.kind {
                GroupKind::Full => bytes_per_token += group.block_bytes.div_ceil(block_tokens),
                // A window that starts inside a block spans one block more than its length.
                GroupKind::Sliding { window } => {
                    bytes_per_point += (u64::from(window).div_ceil(block_tokens) + 1) * group.block_bytes;
                }
                GroupKind::State => bytes_per_point += group.block_bytes,
            }
        }
        let cost = PullCost { model, bytes_per_token, bytes_per_point };
        self.scheduler.prefix_cache.then_some(cost)
    }

    /// The origin that a snapshot must have to be restored here.
    fn origin(&self) -> Origin {
        Origin {
            model_digest: self.model_digest,
            tokenizer_digest: self.tokenizer.digest(),
            numeric_class: self.numeric_class(),
            block_tokens: self.cache.block_tokens,
            block_bytes: self.cache.groups.iter().map(|group| group.block_bytes).collect(),
        }
    }

    /// Creates the engine, whose prefixes are named with `key`.
    pub fn engine(self, key: ClusterKey, epoch: Epoch) -> Result<Engine, Error> {
        let origin = self.origin();
        let tiers = Tiers::open(&self.tiers, &origin)?;
        let mut scheduler = Scheduler::new(self.scheduler, self.cache, key)
            .map_err(|error| engine::Error::KvMemory { reason: error.to_string() })?;
        if let Some(elastic) = self.share.as_ref().and_then(DeviceShare::elastic) {
            scheduler.shrink_arena_to(elastic.smallest);
        }
        let events = EventLog::new(epoch, EVENT_RING_UNITS);
        let executor: Box<dyn Executor> = match self.downstream {
            Some((downstream, _)) => Box::new(PipelineExecutor::new(self.decoder, downstream)),
            None => Box::new(LocalExecutor::new(self.decoder)),
        };
        let engine =
            Engine::with_executor(executor, scheduler, events, self.tokenizer, self.max_model_len, origin)?;
        let engine = engine.with_adapters(self.adapters, self.lora_limits);
        let engine = match self.drafter {
            LoadedDrafter::Off => engine,
            LoadedDrafter::Ngrams => engine.with_speculation(Speculation::ngram()),
            LoadedDrafter::InDecoder => engine.with_drafter(None),
            LoadedDrafter::DraftModel(model) => engine.with_drafter(Some(*model)),
        };
        let engine = match self.sight {
            Some((sight, cache_bytes)) => engine.with_images(sight.encoder(), cache_bytes as usize)?,
            None => engine,
        };
        let engine = match self.pull_timeout {
            Some(limit) => engine.with_transfer_time(limit),
            None => engine,
        };
        let engine = match self.share {
            Some(share) => engine.with_share(share),
            None => engine,
        };
        Ok(match tiers {
            Some(tiers) => engine.with_tiers(tiers),
            None => engine,
        })
    }
}

/// Describes a model as the worker registers it: its digest and its tokenizer's, the maximum length of a
/// sequence, and the tokens of a block.
fn describe(
    id: ModelId,
    decoder: &Decoder,
    (model_digest, tokenizer_digest): ([u8; 32], [u8; 32]),
    (max_model_len, block_tokens): (usize, usize),
    kv_type: KvTypes,
) -> ServedModel {
    let numeric_class = numeric_class(decoder, &model_digest, kv_type);
    ServedModel {
        id,
        model_digest,
        tokenizer_digest,
        max_model_len: max_model_len as u32,
        layers: (0, decoder.spec().layers.len() as u32),
        numeric_class,
        block_tokens: block_tokens as u32,
        engine: BUILT_IN.to_owned(),
        hit_tokens: HASH_UNIT_TOKENS as u32,
        task: engine::encoder::task(decoder.spec()),
    }
}

/// The numeric class, as text.
fn numeric_class(decoder: &Decoder, model_digest: &[u8; 32], kv_type: KvTypes) -> String {
    let class = base_class(decoder.backend().info(), model_digest, decoder.spec(), kv_type);
    match decoder.state_class() {
        Some(state) => format!("{class}/{state}"),
        None => class,
    }
}

/// The numeric class without the state type.
fn base_class(info: &BackendInfo, model_digest: &[u8; 32], spec: &ModelSpec, kv_type: KvTypes) -> String {
    let digest: String = model_digest[..8].iter().map(|byte| format!("{byte:02x}")).collect();
    let class = format!("{digest}/{}/{}/{}/kv-{kv_type}", info.device, info.isa, info.weight_path);
    match spec.context_class() {
        Some(factors) => format!("{class}/{factors}"),
        None => class,
    }
}

/// The model in a file, for sequences of the configured length.
fn spec_of(file: &ModelFile, options: &EngineOptions) -> Result<ModelSpec, Error> {
    let mut spec = ModelSpec::from_file(file)?;
    if let Some(tokens) = options.max_model_len {
        spec.limit_context(tokens);
    }
    Ok(spec)
}

/// `hashes`: whether tensors are hashed while they are loaded.
fn load_decoder(
    (gguf, hashes): (&ModelFile, bool),
    spec: ModelSpec,
    options: &EngineOptions,
    backend: Box<dyn Backend>,
    (layers, max_rows): (Range<usize>, usize),
    progress: &mut Progress<'_>,
) -> Result<Decoder, Error> {
    let config = DecoderConfig {
        layers,
        max_rows,
        logit_rows: LOGIT_ROWS,
        block_tokens: options.block_tokens,
        kv_type: options.kv_type,
        state_type: options.state_type,
    };
    let names = engine::weights::tensors_of(&spec, config.layers.clone());
    let names: Vec<&str> = names.into_iter().filter_map(|name| Some(gguf.tensor(name)?.name())).collect();
    let packs = match &options.packed {
        None => Packs::Off,
        store => {
            let size = |name: &&str| gguf.tensor(name).map_or(0, model::header::TensorInfo::bytes);
            let bytes = names.iter().map(size).sum();
            let digest = digest(gguf, options)?;
            Packs::open(store.as_ref(), backend.as_ref(), &digest, &config.layers, bytes)
        }
    };
    let floor = watched(options)?;
    let mut progress = |done, total| {
        options.hosted.iter().for_each(|hosted| hosted.progress(done, total));
        progress(done, total);
    };
    let load =
        |source: &dyn TensorSource| Decoder::load(spec, config, (source, packs), backend, &mut progress);
    let load = |source: &dyn TensorSource| match &options.hosted {
        Some(hosted) => load(&HostedSource::new(source, gguf, hosted)),
        None => load(source),
    };
    let load = |source: &dyn TensorSource| match &floor {
        Some(HostFloor { floor, memory }) => load(&Staged::new(source, *floor, memory.as_ref())),
        None => load(source),
    };
    Ok(match &options.arrivals {
        Some(arrivals) => load(&Arriving { file: gguf, arrivals })?,
        None if gguf.is_stored() => load(gguf)?,
        None => Reading::with((gguf, hashes), &names, load)?,
    })
}

/// The memory that must stay free on a host whose GPU shares its memory. `None` for other hosts.
///
/// # Errors
/// Those of [`host`].
pub fn watched(options: &EngineOptions) -> Result<Option<HostFloor>, Error> {
    let host = host(options)?;
    Ok(host.unified_gpu().then(|| HostFloor {
        floor: MemoryFloor { bytes: crate::defaults::floor(host).value },
        memory: Arc::new(ProcMemInfo),
    }))
}

/// A model of the shard store some of whose tensors are still being fetched. Reading one waits for it.
struct Arriving<'a> {
    file: &'a ModelFile,
    arrivals: &'a Arrivals,
}

impl TensorSource for Arriving<'_> {
    fn tensor(&self, name: &str) -> Result<TensorBytes<'_>, engine::Error> {
        self.arrivals.wait(name);
        let gathered = self.arrivals.gathered(name).and_then(TensorMemory::bytes);
        match (gathered, self.file.tensor(name)) {
            (Some(bytes), Some(info)) => Ok(TensorBytes::in_memory(info, bytes)),
            _ => TensorSource::tensor(self.file, name),
        }
    }

    fn forget(&self, name: &str) {
        TensorSource::forget(self.file, name);
    }

    fn shared(&self, name: &str) -> Result<Option<SharedBytes>, engine::Error> {
        self.arrivals.wait(name);
        match self.arrivals.gathered(name).and_then(TensorMemory::stored) {
            Some(bytes) => Ok(Some(bytes)),
            None => self.file.shared(name),
        }
    }

    fn measure(&self, name: &str) -> Result<(u32, u64), engine::Error> {
        self.file.measure(name)
    }
}

/// Digest of the model in a file. Refuses models that do not generate text.
pub(crate) fn model_digest(path: &Path, options: &EngineOptions) -> Result<[u8; 32], Error> {
    let gguf = ModelFile::open(path)?;
    generates(&ModelSpec::from_file(&gguf)?)?;
    digest(&gguf, options)
}

/// The model's digest, from the cache or computed.
fn digest(gguf: &ModelFile, options: &EngineOptions) -> Result<[u8; 32], Error> {
    if let Some(cache) = &options.digests {
        cache.fill(gguf)?;
    }
    Ok(gguf.digest()?)
}

fn pool_config(options: &EngineOptions) -> PoolConfig {
    PoolConfig { cpus: options.cpus.clone(), ..PoolConfig::new(threads(options)) }
}

fn threads(options: &EngineOptions) -> NonZeroUsize {
    let usable = engine::cgroup::cpus();
    options.threads.and_then(NonZeroUsize::new).unwrap_or(usable)
}

/// Memory, CPUs and GPU of this machine, as a worker may use them.
pub fn host(options: &EngineOptions) -> Result<Host, Error> {
    let (memory, gpu) = Memory::and_gpu(options)?;
    let available = memory.available_bytes().map_err(|source| engine::Error::Io {
        what: "cannot read the free memory of this host".to_owned(),
        source,
    })?;
    Ok(Host {
        memory_total: memory.total_bytes().max(available),
        memory_available: available,
        threads: threads(options).get() as u32,
        workers: match memory {
            Memory::Own { .. } => options.gpu_workers.unwrap_or(options.workers).max(1) as u32,
            Memory::Host | Memory::Unified => options.workers.max(1) as u32,
        },
        gpu,
    })
}

fn plan_for(gguf: &ModelFile, spec: &ModelSpec, options: &EngineOptions) -> Result<Plan, Error> {
    let mut host = host(options)?;
    if let Some(budget) = options.hosted.as_ref().and_then(HostedLoad::limit) {
        // The whole budget, so that the defaults do not depend on the other models.
        let available = budget.saturating_add(crate::defaults::floor(host).value);
        (host.memory_available, host.workers) = (available, 1);
    }
    let mtp_head = match &options.speculative_method {
        SpeculativeMethod::MtpHead if spec.logits().is_some() => Some(drafter::mtp_head(gguf, &spec.arch)?),
        // Encoders have no drafter.
        _ => None,
    };
    let layers = spec.layers.iter().chain(mtp_head.iter().map(|mtp_head| &mtp_head.layer));
    let types = options.kv_type;
    let token_bytes = |attention: &AttentionSpec| {
        let all = attention.cache_width() as u64;
        let keys = all.min(attention.k_width() as u64);
        (keys * types.k.bytes_of_32() + (all - keys) * types.v.bytes_of_32()).div_ceil(32)
    };
    let kv_bytes: u64 = layers.filter_map(|layer| layer.attention().map(token_bytes)).sum();
    // An MTP head adds a hidden state to each recurrent state, and its own activations to each row.
    let (past, mtp_head_rows) =
        mtp_head.map_or((0, 0), |_| (spec.hidden as u64 * 4, spec.hidden as u64 * 5 * 6));
    let bytes = |name: &str| gguf.tensor(name).map_or(0, model::header::TensorInfo::bytes);
    let head = spec.logits().map_or(0, |logits| bytes(&logits.linear.weight));
    let weights = gguf.total_tensor_bytes() - images::left_out_bytes(gguf, options);
    let vision = images::needed_bytes(gguf, options).unwrap_or(0);
    let costs = ModelCosts::of_file(spec, gguf).range(0..spec.layers.len());
    let needs = ModelNeeds {
        weight_bytes: weights + weights / 10 + vision,
        // Prompt rows use the layers and only the experts that they are routed to. The head is read once a
        // step.
        active_weight_bytes: costs.token_bytes.saturating_sub(head),
        row_products: costs.row_products,
        experts_per_used: experts_per_used(spec),
        kv_bytes_per_token: kv_bytes,
        // Upper bound: which heads can use a narrower state type is known only once the weights are loaded.
        state_bytes: spec.layers.iter().map(|layer| layer.state_elements() as u64 * 4).sum::<u64>() + past,
        activation_bytes_per_row: activation_bytes(spec) + mtp_head_rows,
        max_context: spec.context_length.min(MAX_CONTEXT) as u32,
    };
    Ok(Plan { defaults: defaults(host, needs), host, needs, task: engine::encoder::task(spec) })
}

/// See [`ModelNeeds::experts_per_used`].
fn experts_per_used(spec: &ModelSpec) -> u64 {
    let share = |part: &FfnPart| match &part.ffn {
        FfnSpec::Gated { .. } | FfnSpec::Plain { .. } => 1,
        FfnSpec::Moe(moe) => (moe.experts / moe.used.max(1)) as u64,
    };
    spec.layers.iter().flat_map(|layer| &layer.ffn).map(share).max().unwrap_or(1)
}

/// Bytes of activation buffers per row: f32 and the 8-bit form.
fn activation_bytes(spec: &ModelSpec) -> u64 {
    let experts = |part: &FfnPart| match &part.ffn {
        FfnSpec::Gated { .. } | FfnSpec::Plain { .. } => 0,
        FfnSpec::Moe(moe) => moe.used * (4 * moe.expert_ff + 2 * spec.hidden),
    };
    let widest = spec.layers.iter().flat_map(|layer| &layer.ffn).map(experts).max().unwrap_or(0);
    ((widest + Widths::of(spec, &spec.layers).total() + 3 * spec.hidden) * 6) as u64
}
