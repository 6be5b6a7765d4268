//! From a model file to an engine: read the spec, load weights, size the KV cache from what memory is left.

use crate::Error;
use crate::decoder::{CacheGroup, CacheKind, Decoder, DecoderConfig, StateType, Widths};
use crate::defaults::{Defaults, Host, ModelNeeds, defaults};
use crate::engine::Engine;
use crate::kv_cache::memory::{HostFloor, MemInfo, MemoryFloor, ProcMemInfo};
use crate::kv_cache::{CacheSpec, GroupKind, GroupSpec, Placement};
use crate::kv_events::EventLog;
use crate::pipeline::{PipelineExecutor, Replica};
use crate::scheduler::{Scheduler, SchedulerConfig};
use crate::snapshot::Origin;
use crate::speculation::{Guesses, Speculation};
use crate::tiers::{Tiers, TiersConfig};
use crate::weight_distribution::Arrivals;
use crate::weights::{Packs, TensorSource, TensorView};
use kernels::backend::{ActivationMode, Backend, BackendInfo, KvType, SharedBytes};
use kernels::cpu::{CpuBackend, CpuConfig};
use kernels::pool::{Pool, PoolConfig};
use model::ModelFile;
use model::costs::{DrafterCosts, ModelCosts};
use model::file::DigestCache;
use model::metadata::Metadata;
use model::shard::{ShardStore, TensorMemory};
use model::spec::{AttentionSpec, FfnPart, FfnSpec, MixerSpec, ModelSpec};
use model::tokenizer::Tokenizer;
use proto::block::ClusterKey;
use proto::ids::{Epoch, ModelId};
use proto::message::{ModelTask, PullCost, ServedModel};
use std::num::NonZeroUsize;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

mod device;
mod drafter;
mod encoder;
mod staged;
mod stages;

use device::Memory;
pub use device::{DeviceChoice, gpu_copy_bandwidth, visible_gpus};
use drafter::Guesser;
pub(crate) use drafter::{Elsewhere, digest_of as drafter_digest, offered as offered_drafter};
pub use encoder::encoder;
pub(crate) use encoder::{kernel_encoder, onnx_encoder};
use staged::Staged;
pub(crate) use stages::{admit_kv, check_ranges, prepare_replica, stage, stage_ranges};
pub use stages::{check_shards, open_replica};

/// Units that the replay ring of KV events names at most: 4 MiB of ids.
const EVENT_RING_UNITS: usize = 256 * 1024;
/// Logits rows computed together.
const LOGIT_ROWS: usize = 64;
/// Longest sequence served where the model's own context would need an absurd arena, in tokens.
pub(crate) const MAX_CONTEXT: usize = 1 << 20;

/// How to run a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineOptions {
    /// Compute threads; none = as many as CPUs are usable.
    pub threads: Option<usize>,
    /// CPU of each thread; none leaves placement to the operating system.
    pub cpus: Option<Vec<usize>>,
    /// Element type of the KV cache.
    pub kv_type: KvType,
    /// How recurrent states are kept.
    pub state_type: StateType,
    /// What quantised matrices are multiplied with.
    pub activations: ActivationMode,
    /// Tokens per KV block: 16, 32 or 64.
    pub block_tokens: usize,
    /// Bytes of the KV arena; none = computed.
    pub kv_bytes: Option<u64>,
    /// Rows of one prompt per step; none = computed, 0 = the whole prompt.
    pub chunk: Option<usize>,
    /// Rows of a step; none = computed.
    pub max_rows: Option<usize>,
    /// Sequences admitted at once; none = computed.
    pub max_sequences: Option<usize>,
    /// Longest sequence served; none = the model's own.
    pub max_model_len: Option<usize>,
    pub prefix_cache: bool,
    /// Bytes of the KV arena that pinned prefixes may hold; none = a quarter.
    pub pin_bytes: Option<u64>,
    /// Where resume points are kept besides the arena.
    pub tiers: TiersConfig,
    /// How long a request waits for its prefix to come from another worker; none = as long as computing would take.
    pub pull_patience: Option<Duration>,
    pub placement: Placement,
    /// Workers started on this machine together, this one included.
    pub workers: usize,
    /// Where repacked weights are kept, for other processes of this host and later ones; none keeps them in memory.
    pub packed: Option<ShardStore>,
    /// What of a model of the shard store is still being fetched; its tensors are waited for.
    pub arrivals: Option<Arrivals>,
    /// Where digests of models are remembered; none reads every tensor to know the model's.
    pub digests: Option<DigestCache>,
    pub device: DeviceChoice,
    /// Which GPU, as the driver numbers those that `CUDA_VISIBLE_DEVICES` leaves.
    pub gpu: u32,
    /// Workers that compute on that GPU, this one included; none = all of `workers`.
    pub gpu_workers: Option<usize>,
    /// Who guesses what is drawn next.
    pub guesses: Guesses,
    /// Where compiled kernels of GPUs are kept; none compiles them at every start.
    pub cubins: Option<PathBuf>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            threads: None,
            cpus: None,
            kv_type: KvType::F16,
            state_type: StateType::F32,
            activations: ActivationMode::Int8,
            block_tokens: 16,
            kv_bytes: None,
            chunk: None,
            max_rows: None,
            max_sequences: None,
            max_model_len: None,
            prefix_cache: true,
            pin_bytes: None,
            tiers: TiersConfig::default(),
            pull_patience: None,
            placement: Placement::Paged,
            workers: 1,
            packed: None,
            arrivals: None,
            digests: None,
            device: DeviceChoice::Cpu,
            gpu: 0,
            gpu_workers: None,
            guesses: Guesses::Off,
            cubins: None,
        }
    }
}

/// A loaded model, not yet an engine: that needs the cluster's key.
pub struct Prepared {
    decoder: Decoder,
    /// The stages that have the other layers, and what their activations add to the numeric class.
    later: Option<(PipelineExecutor, Option<&'static str>)>,
    tokenizer: Arc<Tokenizer>,
    metadata: Metadata,
    model_digest: [u8; 32],
    cache: CacheSpec,
    scheduler: SchedulerConfig,
    max_model_len: usize,
    kv_type: KvType,
    tiers: TiersConfig,
    pull_patience: Option<Duration>,
    guesser: Guesser,
}

/// A model with its engine.
pub struct LoadedModel {
    pub engine: Engine,
    pub tokenizer: Arc<Tokenizer>,
    pub metadata: Metadata,
    pub max_model_len: usize,
}

/// Hears (layers loaded, layers in all).
pub type Progress<'a> = dyn FnMut(usize, usize) + 'a;

/// What a model asks of a machine, and the defaults computed from both.
#[derive(Debug, Clone)]
pub struct Plan {
    pub host: Host,
    pub needs: ModelNeeds,
    /// The defaults, each with its reason.
    pub defaults: Defaults,
    /// What the model is asked for.
    pub task: ModelTask,
}

/// Loads a decoder without a KV arena.
pub fn decoder(path: &Path, options: &EngineOptions, progress: &mut Progress<'_>) -> Result<Decoder, Error> {
    let gguf = ModelFile::open(path)?;
    let spec = ModelSpec::from_file(&gguf)?;
    generates(&spec)?;
    let rows = options.max_rows.unwrap_or(512);
    let layers = 0..spec.layers.len();
    load_decoder(&gguf, spec, options, backend(options, &environment)?, (layers, rows), progress)
}

/// The device that `options` ask for. `environment` looks up the variables that choose kernels
/// (`KVASIR_BACKEND`, `KVASIR_MATMUL_BACKEND` and the like, see `kernels::registry`).
pub fn backend(
    options: &EngineOptions,
    environment: &dyn Fn(&str) -> Option<String>,
) -> Result<Box<dyn Backend>, Error> {
    let (device, reason) = options.device.resolve_with(options.gpu, environment)?;
    tracing::debug!(?device, reason, "what is computed on");
    match device {
        DeviceChoice::Cuda => device::gpu(options),
        #[cfg(feature = "ptx-sim")]
        DeviceChoice::PtxSim => device::simulated(options),
        DeviceChoice::Auto | DeviceChoice::Cpu => {
            let config = CpuConfig::select(options.activations, environment)?;
            let pool = PoolConfig { cpus: options.cpus.clone(), ..PoolConfig::new(threads(options)) };
            Ok(Box::new(CpuBackend::new(config, Pool::new(pool)?)?))
        }
    }
}

/// The process's own variables. One that is not UTF-8 is not left out: as a choice it must fail.
/// A variable of the environment.
pub(crate) fn environment(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

/// What the model in a file is asked for.
pub fn task(path: &Path) -> Result<ModelTask, Error> {
    Ok(crate::encoder::task(&ModelSpec::from_file(&ModelFile::open(path)?)?))
}

fn generates(spec: &ModelSpec) -> Result<(), Error> {
    match spec.logits() {
        Some(_) => Ok(()),
        None => Err(Error::WrongTask {
            does: "encodes texts, it generates none",
            instead: "`kvasir embed` shows what it makes of them, `kvasir up` serves it",
        }),
    }
}

/// Computes the defaults for a model on this machine without loading weights.
pub fn plan(path: &Path, options: &EngineOptions) -> Result<Plan, Error> {
    let gguf = ModelFile::open(path)?;
    plan_for(&gguf, &ModelSpec::from_file(&gguf)?, options)
}

/// What `guesses` take beside the model in `path`, without loading anything; none of those that take nothing.
///
/// # Errors
/// [`Error::Config`] for a drafter of another model, or a model that has no block which guesses.
pub fn drafter_costs(path: &Path, guesses: &Guesses) -> Result<Option<DrafterCosts>, Error> {
    let file = ModelFile::open(path)?;
    drafter::costs(guesses, (&file, &ModelSpec::from_file(&file)?))
}

/// Loads a model and its engine; for one process, so the key of its prefixes does not matter.
pub fn open(path: &Path, options: &EngineOptions, progress: &mut Progress<'_>) -> Result<LoadedModel, Error> {
    open_on(path, options, backend(options, &environment)?, progress)
}

/// As [`open`], on a device of the caller's.
pub fn open_on(
    path: &Path,
    options: &EngineOptions,
    backend: Box<dyn Backend>,
    progress: &mut Progress<'_>,
) -> Result<LoadedModel, Error> {
    assemble(prepare_on(path, options, backend, None, progress)?)
}

/// The engine of one process, whose key does not matter.
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
    let spec = ModelSpec::from_file(&gguf)?;
    generates(&spec)?;
    let tokenizer = Arc::new(Tokenizer::from_metadata(gguf.metadata())?);
    let Plan { defaults, .. } = plan_for(&gguf, &spec, options)?;
    let chunk = options.chunk.unwrap_or(defaults.chunk.value as usize);
    let max_sequences = options.max_sequences.unwrap_or(defaults.max_seqs.value);
    let wanted_len =
        options.max_model_len.unwrap_or(spec.context_length).min(spec.context_length).min(MAX_CONTEXT);
    let rows = match options.max_rows {
        Some(rows) => rows,
        None if chunk == 0 => wanted_len,
        None => defaults.max_batch_tokens.value as usize,
    };
    let rows = rows.max(chunk).max(max_sequences);
    let floor = MemoryFloor { bytes: defaults.floor_bytes.value };
    let refused =
        |refused: crate::kv_cache::memory::MemoryRefused| Error::KvMemory { reason: refused.to_string() };
    let model_digest = digest(&gguf, options)?;
    let metadata = gguf.metadata().clone();
    let wire = replica.as_ref().and_then(Replica::class);
    let (layers, mut joining, elsewhere) = match replica {
        None => (0..spec.layers.len(), None, None),
        Some(replica) => {
            let class = stages::class(backend.info(), &model_digest, options);
            let elsewhere = drafter::elsewhere(options, (&gguf, &spec), max_sequences)?;
            let told = (model_digest, class, elsewhere);
            let (first, joining) = replica.join(&spec, told, rows, options.block_tokens)?;
            (first, Some(joining), elsewhere)
        }
    };
    let weights = match joining {
        None => gguf.total_tensor_bytes(),
        Some(_) => ModelCosts::of_file(&spec, &gguf).range(layers.clone()).weight_bytes,
    };
    let memory = Memory::of(options)?;
    floor.admit(&memory, "weights", weights).map_err(refused)?;
    let mut decoder = load_decoder(&gguf, spec, options, backend, (layers, rows), progress)?;
    let arena_bytes = options.kv_bytes.unwrap_or(defaults.arena_bytes.value);
    let guesser = match elsewhere {
        Some(_) => Guesser::Drafter(None),
        None => {
            let own = (tokenizer.as_ref(), max_sequences);
            drafter::guesser(options, &gguf, &mut decoder, own, (floor, arena_bytes))?
        }
    };
    let memory = memory.behind(decoder.backend().memory(), options)?;
    floor.admit(&memory, "the KV cache", arena_bytes + decoder.spare_bytes() as u64).map_err(refused)?;
    let mut groups: Vec<GroupSpec> = decoder.groups().iter().map(group_spec).collect();
    if let Some(joining) = &mut joining {
        let own: Vec<u64> = groups.iter().map(|group| group.block_bytes).collect();
        for (group, bytes) in groups.iter_mut().zip(joining.block_bytes(&own)?) {
            group.block_bytes = bytes;
        }
    }
    let cache = CacheSpec { groups, block_tokens: options.block_tokens as u32, arena_bytes };
    cache.validate().map_err(|error| Error::KvMemory { reason: error.to_string() })?;
    let later = match joining {
        None => {
            decoder.allocate_kv(arena_bytes as usize)?;
            None
        }
        Some(joining) => Some((joining.begin(&mut decoder, &cache)?, wire)),
    };
    let scheduler = SchedulerConfig {
        max_batch_tokens: rows as u32,
        max_seqs: max_sequences,
        chunk: chunk as u32,
        prefix_cache: options.prefix_cache,
        pin_bytes: options.pin_bytes,
        placement: options.placement,
        ..SchedulerConfig::default()
    };
    // Only to learn the longest sequence that fits; the real one is made with the cluster's key.
    let probe = Scheduler::new(scheduler.clone(), cache.clone(), ClusterKey([0; 32]))
        .map_err(|error| Error::KvMemory { reason: error.to_string() })?;
    let max_model_len = wanted_len.min(probe.max_sequence_tokens() as usize);
    if max_model_len < 2 {
        let reason = format!("{arena_bytes} bytes hold no sequence of two tokens");
        return Err(Error::KvMemory { reason });
    }
    Ok(Prepared {
        decoder,
        later,
        tokenizer,
        metadata,
        model_digest,
        cache,
        scheduler,
        max_model_len,
        kv_type: options.kv_type,
        tiers: options.tiers.clone(),
        pull_patience: options.pull_patience,
        guesser,
    })
}

impl Prepared {
    /// What this worker tells coordinators of the model.
    pub fn served(&self, id: ModelId) -> ServedModel {
        let digests = (self.model_digest, self.tokenizer.digest());
        let lengths = (self.max_model_len, self.cache.block_tokens as usize);
        describe(id, &self.decoder, digests, lengths, self.kv_type)
    }

    fn numeric_class(&self) -> String {
        let class = numeric_class(&self.decoder, &self.model_digest, self.kv_type);
        match &self.later {
            Some((_, Some(wire))) => format!("{class}/{wire}"),
            _ => class,
        }
    }

    /// What pulling prefixes of this model costs; none where none are kept.
    pub(crate) fn pull_cost(&self, model: ModelId) -> Option<PullCost> {
        let block_tokens = u64::from(self.cache.block_tokens.max(1));
        let (mut bytes_per_token, mut bytes_per_point) = (0, 0);
        for group in &self.cache.groups {
            match group.kind {
                GroupKind::Full => bytes_per_token += group.block_bytes.div_ceil(block_tokens),
                // A window touches a block more than it is long.
                GroupKind::Sliding { window } => {
                    bytes_per_point += (u64::from(window).div_ceil(block_tokens) + 1) * group.block_bytes;
                }
                GroupKind::State => bytes_per_point += group.block_bytes,
            }
        }
        let cost = PullCost { model, bytes_per_token, bytes_per_point };
        self.scheduler.prefix_cache.then_some(cost)
    }

    /// What a snapshot must come from to be restored here.
    fn origin(&self) -> Origin {
        Origin {
            model_digest: self.model_digest,
            tokenizer_digest: self.tokenizer.digest(),
            numeric_class: self.numeric_class(),
            block_tokens: self.cache.block_tokens,
            block_bytes: self.cache.groups.iter().map(|group| group.block_bytes).collect(),
        }
    }

    /// The engine, its prefixes named under `key`.
    pub fn engine(self, key: ClusterKey, epoch: Epoch) -> Result<Engine, Error> {
        let origin = self.origin();
        let tiers = Tiers::open(&self.tiers, &origin)?;
        let scheduler = Scheduler::new(self.scheduler, self.cache, key)
            .map_err(|error| Error::KvMemory { reason: error.to_string() })?;
        let events = EventLog::new(epoch, EVENT_RING_UNITS);
        let engine =
            Engine::new(self.decoder, scheduler, events, self.tokenizer, self.max_model_len, origin)?;
        let engine = match self.later {
            Some((later, _)) => engine.with_later_stages(later),
            None => engine,
        };
        let engine = match self.guesser {
            Guesser::Nobody => engine,
            Guesser::Ngrams => engine.with_speculation(Speculation::ngram()),
            Guesser::Drafter(model) => engine.with_drafter(model.map(|model| *model)),
        };
        let engine = match self.pull_patience {
            Some(patience) => engine.with_pull_patience(patience),
            None => engine,
        };
        Ok(match tiers {
            Some(tiers) => engine.with_tiers(tiers),
            None => engine,
        })
    }
}

/// What a worker tells coordinators of a model: its digest and its tokenizer's, the longest sequence, the tokens of
/// a block.
pub(crate) fn describe(
    id: ModelId,
    decoder: &Decoder,
    (model_digest, tokenizer_digest): ([u8; 32], [u8; 32]),
    (max_model_len, block_tokens): (usize, usize),
    kv_type: KvType,
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
        task: crate::encoder::task(decoder.spec()),
    }
}

/// What decides the bits of a result, in words.
fn numeric_class(decoder: &Decoder, model_digest: &[u8; 32], kv_type: KvType) -> String {
    let class = base_class(decoder.backend().info(), model_digest, kv_type);
    match decoder.state_class() {
        Some(state) => format!("{class}/{state}"),
        None => class,
    }
}

/// What decides the bits of a result on a device, but for how states are kept.
fn base_class(info: &BackendInfo, model_digest: &[u8; 32], kv_type: KvType) -> String {
    let digest: String = model_digest[..8].iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{digest}/{}/{}/{}/kv-{}", info.device, info.isa, info.weight_path, kv_type.name())
}

/// A group of layers as the cache sees it.
pub(crate) fn group_spec(group: &CacheGroup) -> GroupSpec {
    GroupSpec {
        kind: match group.kind {
            CacheKind::Full => GroupKind::Full,
            CacheKind::Sliding(window) => {
                GroupKind::Sliding { window: u32::try_from(window).unwrap_or(u32::MAX) }
            }
            CacheKind::State => GroupKind::State,
        },
        block_bytes: group.block_bytes as u64,
    }
}

fn load_decoder(
    gguf: &ModelFile,
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
    let packs = match &options.packed {
        None => Packs::Off,
        store => {
            let size = |name: &str| gguf.tensor(name).map_or(0, model::gguf::TensorInfo::bytes);
            let bytes = crate::weights::tensors_of(&spec, config.layers.clone()).into_iter().map(size).sum();
            let digest = digest(gguf, options)?;
            Packs::open(store.as_ref(), backend.as_ref(), &digest, &config.layers, bytes)
        }
    };
    let arriving = options.arrivals.as_ref().map(|arrivals| Arriving { file: gguf, arrivals });
    let source: &dyn TensorSource = match &arriving {
        None => gguf,
        Some(arriving) => arriving,
    };
    match watched(options)? {
        None => Decoder::load(spec, config, (source, packs), backend, progress),
        Some(HostFloor { floor, memory }) => {
            let staged = Staged::new(source, floor, memory.as_ref());
            Decoder::load(spec, config, (&staged, packs), backend, progress)
        }
    }
}

/// What must stay free of a host whose GPU shares its memory; none for any other.
///
/// # Errors
/// As [`host`].
pub fn watched(options: &EngineOptions) -> Result<Option<HostFloor>, Error> {
    let host = host(options)?;
    Ok(host.unified_gpu().then(|| HostFloor {
        floor: MemoryFloor { bytes: crate::defaults::floor(host).value },
        memory: Arc::new(ProcMemInfo),
    }))
}

/// A model of the shard store whose tensors are waited for.
struct Arriving<'a> {
    file: &'a ModelFile,
    arrivals: &'a Arrivals,
}

impl TensorSource for Arriving<'_> {
    fn tensor(&self, name: &str) -> Result<TensorView<'_>, Error> {
        self.arrivals.wait(name);
        let gathered = self.arrivals.gathered(name).and_then(TensorMemory::bytes);
        match (gathered, self.file.tensor(name)) {
            (Some(bytes), Some(info)) => {
                Ok(TensorView { ggml_type: info.ty().id(), dims: info.dims(), bytes })
            }
            _ => TensorSource::tensor(self.file, name),
        }
    }

    fn forget(&self, name: &str) {
        TensorSource::forget(self.file, name);
    }

    fn shared(&self, name: &str) -> Result<Option<SharedBytes>, Error> {
        self.arrivals.wait(name);
        match self.arrivals.gathered(name).and_then(TensorMemory::stored) {
            Some(bytes) => Ok(Some(bytes)),
            None => self.file.shared(name),
        }
    }

    fn measure(&self, name: &str) -> Result<(u32, u64), Error> {
        self.file.measure(name)
    }
}

/// The digest of the model in a file, of which tokens can be generated.
pub(crate) fn model_digest(path: &Path, options: &EngineOptions) -> Result<[u8; 32], Error> {
    let gguf = ModelFile::open(path)?;
    generates(&ModelSpec::from_file(&gguf)?)?;
    digest(&gguf, options)
}

/// The model's digest, remembered or read.
fn digest(gguf: &ModelFile, options: &EngineOptions) -> Result<[u8; 32], Error> {
    if let Some(cache) = &options.digests {
        cache.fill(gguf)?;
    }
    Ok(gguf.digest()?)
}

fn threads(options: &EngineOptions) -> NonZeroUsize {
    let usable = crate::cgroup::cpus();
    options.threads.and_then(NonZeroUsize::new).unwrap_or(usable)
}

/// What this machine offers to a worker.
pub fn host(options: &EngineOptions) -> Result<Host, Error> {
    let (memory, gpu) = Memory::and_gpu(options)?;
    let available = memory.available_bytes().map_err(|source| Error::Io {
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
    let host = host(options)?;
    let element = match options.kv_type {
        KvType::F32 => 4.0,
        KvType::F16 => 2.0,
        KvType::Q8_0 => 34.0 / 32.0,
    };
    let own_kv = |a: &AttentionSpec| a.own_kv().map_or(0, |_| a.k_width() + a.v_width());
    let appended = match &options.guesses {
        Guesses::Appended if spec.logits().is_some() => Some(drafter::appended(gguf, &spec.arch)?),
        // An encoder guesses nothing.
        _ => None,
    };
    let layers = spec.layers.iter().chain(appended.iter().map(|appended| &appended.layer));
    let kv_elements: usize = layers
        .map(|layer| match &layer.mixer {
            MixerSpec::Attention(attention) => own_kv(attention),
            MixerSpec::DeltaNet(_) | MixerSpec::Mamba2(_) => 0,
        })
        .sum();
    // With the states stands a hidden state, and beside the rows of a step what is made of them.
    let (past, appended_rows) =
        appended.map_or((0, 0), |_| (spec.hidden as u64 * 4, spec.hidden as u64 * 5 * 6));
    let bytes = |name: &str| gguf.tensor(name).map_or(0, model::gguf::TensorInfo::bytes);
    let head = spec.logits().map_or(0, |logits| bytes(&logits.linear.weight));
    let weights = gguf.total_tensor_bytes();
    let costs = ModelCosts::of_file(spec, gguf).range(0..spec.layers.len());
    let needs = ModelNeeds {
        weight_bytes: weights + weights / 10,
        // Prompt rows pass the layers only, and of experts those that they use; the head is read once per step.
        active_weight_bytes: costs.token_bytes.saturating_sub(head),
        row_products: costs.row_products,
        kv_bytes_per_token: (kv_elements as f64 * element) as u64,
        // Which heads could do with less is known with the weights only.
        state_bytes: spec.layers.iter().map(|layer| layer.mixer.state_elements() as u64 * 4).sum::<u64>()
            + past,
        activation_bytes_per_row: activation_bytes(spec) + appended_rows,
        max_context: options.max_model_len.unwrap_or(spec.context_length).min(MAX_CONTEXT) as u32,
    };
    Ok(Plan { defaults: defaults(host, needs), host, needs, task: crate::encoder::task(spec) })
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
