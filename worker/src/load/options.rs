//! Options of a model that is loaded.

use super::{DeviceChoice, HostedLoad, LoraSource};
use engine::decoder::StateType;
use engine::engine::AdapterLimits;
use engine::kv_cache::BlockLayout;
use engine::speculation::SpeculativeMethod;
use engine::tiers::TiersConfig;
use kernels::backend::{ActivationMode, KvType, KvTypes};
use model::file::DigestCache;
use model::shard::ShardStore;
use pipeline::weight_distribution::Arrivals;
use std::path::PathBuf;
use std::time::Duration;

/// Default of [`EngineOptions::image_cache_bytes`]: about 30,000 rows of 2,048 values.
pub const IMAGE_CACHE_BYTES: u64 = 256 << 20;

/// Place of a model's vision tower.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TowerPlace {
    /// In this worker, beside the model.
    #[default]
    Here,
    /// In other workers, with the role encode.
    Elsewhere,
    /// In this worker, without the model: it has the role encode.
    Alone,
}

/// Options of a model that is loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineOptions {
    /// Compute threads. `None`: as many as there are usable CPUs.
    pub threads: Option<usize>,
    /// CPU of each thread. `None`: the operating system places the threads.
    pub cpus: Option<Vec<usize>>,
    /// Element type of the KV cache.
    pub kv_type: KvTypes,
    /// Element type of recurrent states.
    pub state_type: StateType,
    /// Type that quantized matrices are multiplied with.
    pub activations: ActivationMode,
    /// Tokens per KV block: 16, 32 or 64.
    pub block_tokens: usize,
    /// Bytes of the KV arena. `None`: computed.
    pub kv_bytes: Option<u64>,
    /// Rows of one prompt in a step. `None`: computed; 0: the whole prompt.
    pub chunk: Option<usize>,
    /// Maximum rows of a step. `None`: computed.
    pub max_rows: Option<usize>,
    /// Maximum number of sequences that are admitted at once. `None`: computed.
    pub max_sequences: Option<usize>,
    /// Maximum tokens of a sequence. `None`: the model's own limit, which a larger number does not raise.
    pub max_model_len: Option<usize>,
    pub prefix_cache: bool,
    /// Bytes of the KV arena that pinned prefixes may hold. `None`: a quarter.
    pub pin_bytes: Option<u64>,
    /// Tiers for resume points below the arena.
    pub tiers: TiersConfig,
    /// Bytes of image embeddings that are kept.
    pub image_cache_bytes: u64,
    pub vision_tower: TowerPlace,
    /// How long a request waits for a KV transfer. `None`: as long as computing the prefix would take.
    pub pull_timeout: Option<Duration>,
    pub block_layout: BlockLayout,
    /// Number of workers that are started together on this machine, this one included.
    pub workers: usize,
    /// Store for repacked weights, shared with other processes of this host and later runs. `None`: repacked
    /// weights are only kept in memory.
    pub packed: Option<ShardStore>,
    /// Chunks of a model in the shard store that are still being fetched. Loading waits for them.
    pub arrivals: Option<Arrivals>,
    /// Cache of model digests. `None`: every tensor is read to compute the digest.
    pub digests: Option<DigestCache>,
    pub device: DeviceChoice,
    /// Index of the GPU, as the driver numbers those that `CUDA_VISIBLE_DEVICES` leaves.
    pub gpu: u32,
    /// Number of workers that use that GPU, this one included. `None`: all of `workers`.
    pub gpu_workers: Option<usize>,
    /// The drafter.
    pub speculative_method: SpeculativeMethod,
    /// Adapters that are loaded at the start.
    pub lora: Vec<LoraSource>,
    pub lora_limits: AdapterLimits,
    /// Directory for compiled GPU kernels. `None`: kernels are compiled at every start.
    pub cubins: Option<PathBuf>,
    /// The device, if the model shares it with others. `None`: it has the device for itself.
    pub hosted: Option<HostedLoad>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            threads: None,
            cpus: None,
            kv_type: KvType::F16.into(),
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
            image_cache_bytes: IMAGE_CACHE_BYTES,
            vision_tower: TowerPlace::Here,
            pull_timeout: None,
            block_layout: BlockLayout::Paged,
            workers: 1,
            packed: None,
            arrivals: None,
            digests: None,
            device: DeviceChoice::Cpu,
            gpu: 0,
            gpu_workers: None,
            speculative_method: SpeculativeMethod::Off,
            lora: Vec::new(),
            lora_limits: AdapterLimits::default(),
            cubins: None,
            hosted: None,
        }
    }
}

impl EngineOptions {
    /// The GPU that computes, as the driver numbers it. `None`: the CPU or a server of another project
    /// computes, and no GPU is this worker's own.
    pub(crate) fn own_gpu(&self) -> Option<u32> {
        (self.device == DeviceChoice::Cuda).then_some(self.gpu)
    }
}
