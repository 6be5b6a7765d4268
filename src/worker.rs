//! `kvasir worker`: one engine of a cluster.

use crate::allocator;
use crate::config::{self, Bind, ByteSize, ConfigError, DiskBudget, Period};
use crate::cpus::{self, CpuSet};
use crate::doctor::watch_worker;
use crate::external::{self, EngineOption, EngineSettings, SelectedEngine};
use crate::front::LocalCoordinator;
use crate::home;
use crate::hosting::{self, HubResolver};
use crate::identity;
use crate::lora::{self, LoraArg};
use crate::models::{require_weights, resolve_bundle};
use crate::node::{Announcement, Explained, NodeArgs, StopSignals, io_runtime};
use crate::numerics::{self, ActivationsArg, Device, KvTypeArg, StateTypeArg};
use crate::otlp;
use crate::plan::{ASSUMED_BANDWIDTH, compute, decode_bandwidth, gpu_bandwidth};
use crate::role::RoleArg;
use crate::shipped;
use crate::spec::SpecArg;
use crate::try_grammar;
use dispatch::models::ModelEntry;
use engine::decoder::StateType;
use engine::snapshot::store::StoreConfig;
use engine::tiers::{DiskConfig, TiersConfig};
use model::checkpoint::lora::MAX_RANK;
use pipeline::weight_distribution::ShippingConfig;
use proto::deployment::StageSpeed;
use proto::served_model::ModelTask;
use serde::{Deserialize, Serialize};
use speech::SessionLimits;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use worker::load::{self, EngineOptions};
use worker::service::{HostingConfig, OwnModel, WorkerConfig, WorkerService};

/// More concurrent sequences would only lengthen every step.
const MAX_SEQS: usize = 4096;
/// Bytes of prefixes of each deployed model that are read from files at once, or wait to be written.
const UNDER_WAY_BYTES: u64 = 32 << 20;
const BLOCK_TOKENS: [usize; 3] = [16, 32, 64];

/// Runs one worker: it holds weights and KV cache, computes, and connects to coordinators.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  kvasir worker --identity ./w0 --coordinators 10.0.0.1:7000 --model smollm2-135m\n  \
    kvasir worker --http 127.0.0.1:8080 --model smollm2-135m\n  \
    kvasir worker --identity ./w1 --coordinators 10.0.0.1:7000 --model smollm2-135m --from 10.0.0.2:7001\n  \
    kvasir worker --identity ./w2 --coordinators 10.0.0.1:7000 --operation silero-vad --operation smart-turn\n  \
    kvasir worker --config worker.toml --explain\n\n\
    Once it listens it prints one line of JSON with its addresses on stdout; logs go to stderr."
)]
pub(crate) struct Worker {
    #[command(flatten)]
    settings: WorkerSettings,
    #[command(flatten)]
    node: NodeArgs,
}

/// All settings. Unset ones are computed.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, clap::Args)]
#[serde(deny_unknown_fields)]
pub(crate) struct WorkerSettings {
    /// Directory with node.crt, node.key and ca.crt, as created by `kvasir ca issue`.
    #[arg(long, value_name = "DIR", env = "KVASIR_IDENTITY")]
    pub(crate) identity: Option<PathBuf>,
    /// UDP addresses of all coordinators, with host names or IP addresses, separated by commas.
    #[arg(long, value_name = "HOST:PORT,..", env = "KVASIR_COORDINATORS", value_delimiter = ',')]
    pub(crate) coordinators: Option<Vec<String>>,
    /// Address of the OpenAI API of a worker without a cluster. Loopback only; not together with an identity or
    /// coordinators.
    #[arg(long, value_name = "ADDR", env = "KVASIR_WORKER_HTTP", value_parser = config::listen)]
    #[serde(default, deserialize_with = "config::listen_in_file")]
    pub(crate) http: Option<SocketAddr>,
    /// Catalog name, https:// or hf:// address, path of a .gguf file or a Hugging Face folder, or ID=PATH to set its name
    /// in the API. Optional: without it the worker serves the models that are deployed to it. With --pool it then fetches
    /// its part of each model that is placed on it from workers that have the model.
    #[arg(long, value_name = "MODEL", env = "KVASIR_MODEL")]
    pub(crate) model: Option<String>,
    /// Engine that computes the model: kvasir, vllm, sglang or llama-server; one of another project with its address
    /// [default: kvasir].
    #[arg(long, value_name = "NAME", env = "KVASIR_LLM_BACKEND")]
    pub(crate) engine: Option<String>,
    /// Address of the engine's server, http://HOST:PORT. MODEL is then a .gguf file, or a Hugging Face folder with
    /// tokenizer.json, of the model that the server has.
    #[arg(long, value_name = "URL", env = "KVASIR_ENGINE_URL")]
    pub(crate) engine_url: Option<String>,
    /// Command that starts the engine's server at that address. The worker watches it, starts it again and ends it
    /// [default: the server runs beside the worker]. Without an address and a MODEL: command that starts a server for
    /// each model that is deployed to this worker with that engine. {model} and {port} in it stand for the model's file
    /// and for the server's port; {context} for its longest sequence and {kv_bytes} for the bytes of that; {kv_port} and
    /// {replay_port} for the ports of its KV events.
    #[arg(long, value_name = "CMD", env = "KVASIR_ENGINE_CMD")]
    pub(crate) engine_cmd: Option<String>,
    /// The model's name in the engine's requests [default: its first model].
    #[arg(long, value_name = "NAME", env = "KVASIR_ENGINE_MODEL")]
    pub(crate) engine_model: Option<String>,
    /// File with the engine's API key.
    #[arg(long, value_name = "FILE", env = "KVASIR_ENGINE_KEY_FILE")]
    pub(crate) engine_key_file: Option<PathBuf>,
    /// Properties of the engine that its server does not report, separated by commas.
    #[arg(long, value_enum, value_name = "LIST", env = "KVASIR_ENGINE_OPTIONS", value_delimiter = ',')]
    pub(crate) engine_options: Option<Vec<EngineOption>>,
    /// Time without requests after which vllm or sglang are put to sleep, which frees their weights' and caches' memory.
    /// The next request wakes them [default: they stay awake].
    #[arg(long, value_name = "TIME", env = "KVASIR_ENGINE_IDLE")]
    pub(crate) engine_idle: Option<Period>,
    /// Memory of each server that is started for a deployed model [default: estimated from the model].
    #[arg(long, value_name = "SIZE", env = "KVASIR_ENGINE_MEMORY")]
    pub(crate) engine_memory: Option<ByteSize>,
    /// Where vllm or sglang publish their KV events, HOST:PORT, or off: then their caches are not known.
    #[arg(long, value_name = "HOST:PORT", env = "KVASIR_KV_EVENTS")]
    pub(crate) kv_events: Option<String>,
    /// Where lost KV events can be requested again [default: nowhere].
    #[arg(long, value_name = "HOST:PORT", env = "KVASIR_KV_EVENTS_REPLAY")]
    pub(crate) kv_events_replay: Option<String>,
    /// Topic of the KV events [default: as the engine reports it, else all topics].
    #[arg(long, value_name = "TOPIC", env = "KVASIR_KV_EVENTS_TOPIC")]
    pub(crate) kv_events_topic: Option<String>,
    /// Bundle of operations to offer, with or without a model: a catalog name (silero-vad, smart-turn, whisper-base,
    /// openwakeword, resemblyzer, pyannote-diarization, piper-joe, kokoro), a directory with a folder for each operation, or
    /// ID=DIR; several times, or separated by commas.
    #[arg(long, value_name = "BUNDLE", env = "KVASIR_OPERATION", value_delimiter = ',')]
    pub(crate) operation: Option<Vec<String>>,
    /// Workers to fetch the model from, separated by commas. MODEL is then the name under which they serve it, or its
    /// digest as blake3:HEX or ID=blake3:HEX.
    #[arg(long, value_name = "HOST:PORT,..", env = "KVASIR_FROM", value_delimiter = ',')]
    pub(crate) from: Option<Vec<String>>,
    /// Limit of this host's shard store, which keeps models received from other workers [default: 256GiB].
    #[arg(long, value_name = "SIZE", env = "KVASIR_SHARD_BYTES")]
    pub(crate) shard_bytes: Option<ByteSize>,
    /// Sockets that receive a model from other workers, each with a connection to every source, so that several CPUs
    /// share the work [default: computed, see --explain].
    #[arg(long, value_name = "N", env = "KVASIR_SHIPPING_LANES")]
    pub(crate) shipping_lanes: Option<usize>,
    /// Keep repacked weights in a file, which all workers of this machine map: one copy in memory, and a faster next start
    /// [default: true if several workers share this machine, or if the model comes from other workers].
    #[arg(long, value_name = "true|false", env = "KVASIR_WEIGHT_CACHE")]
    pub(crate) weight_cache: Option<bool>,
    /// Part of a request that this worker computes; encode: only the embeddings of images, with the vision tower of
    /// MODEL, for workers that generate [default: both].
    #[arg(long, value_enum, env = "KVASIR_ROLE")]
    pub(crate) role: Option<RoleArg>,
    /// Serve only as a part of replicas that the coordinators plan, not by itself.
    #[arg(long, value_name = "BOOL", env = "KVASIR_POOL", num_args = 0..=1, default_missing_value = "true")]
    pub(crate) pool: Option<bool>,
    /// Memory for weights and caches, such as 24GiB: with --pool of its parts of models, else of all models that are
    /// deployed to this worker, its own included [default: the free memory].
    #[arg(long, value_name = "SIZE", env = "KVASIR_MEMORY")]
    pub(crate) memory: Option<ByteSize>,
    /// Labels that deployments select workers by, separated by commas.
    #[arg(long, value_name = "KEY=VALUE,..", env = "KVASIR_LABELS", value_delimiter = ',')]
    pub(crate) labels: Option<Vec<String>>,
    /// Bytes per second that decoding reads, by which the layers of a model are divided among workers [default: measured
    /// on a GPU and with --pool, else 20 GB].
    #[arg(long, value_name = "SIZE", env = "KVASIR_BANDWIDTH")]
    pub(crate) bandwidth: Option<ByteSize>,
    /// UDP address that other nodes connect to [default: 127.0.0.1:7001]. A network, such as
    /// 192.168.100.0/24:7000, selects this host's address in it.
    #[arg(long, value_name = "ADDR", env = "KVASIR_QUIC")]
    pub(crate) quic: Option<Bind>,
    /// Address of /livez, /readyz and /metrics [default: 127.0.0.1:9091].
    #[arg(long, value_name = "ADDR", env = "KVASIR_OPS", value_parser = config::listen)]
    #[serde(default, deserialize_with = "config::listen_in_file")]
    pub(crate) ops: Option<SocketAddr>,
    /// Compute threads [default: usable CPUs].
    #[arg(long, value_name = "N", env = "KVASIR_THREADS")]
    pub(crate) threads: Option<usize>,
    /// CPUs to compute on, such as 0-3,8 [default: the operating system places the threads].
    #[arg(long, value_name = "LIST", env = "KVASIR_CPUS")]
    pub(crate) cpus: Option<CpuSet>,
    /// Device to compute on [default: auto].
    #[arg(long, value_enum, env = "KVASIR_DEVICE")]
    pub(crate) device: Option<Device>,
    /// Index of the GPU among those in CUDA_VISIBLE_DEVICES, from 0 [default: 0].
    #[arg(long, value_name = "N", env = "KVASIR_GPU")]
    pub(crate) gpu: Option<u32>,
    /// Memory for the KV cache, such as 2GiB [default: computed, see --explain].
    #[arg(long, value_name = "SIZE", env = "KVASIR_KV_BYTES")]
    pub(crate) kv_bytes: Option<ByteSize>,
    /// Limit of pinned prefixes in the KV cache [default: a quarter of it].
    #[arg(long, value_name = "SIZE", env = "KVASIR_PIN_BYTES")]
    pub(crate) pin_bytes: Option<ByteSize>,
    /// Memory for embeddings of images, so that a picture is encoded once [default: 256MiB].
    #[arg(long, value_name = "SIZE", env = "KVASIR_IMAGE_CACHE")]
    pub(crate) image_cache: Option<ByteSize>,
    /// Load the vision tower of models that see images. Without it their images need a worker with the role encode
    /// [default: true].
    #[arg(long, value_name = "true|false", env = "KVASIR_VISION_TOWER")]
    pub(crate) vision_tower: Option<bool>,
    /// Host memory for prefixes that do not fit into the KV cache [default: none].
    #[arg(long, value_name = "SIZE", env = "KVASIR_KV_HOST_BYTES")]
    pub(crate) kv_host_bytes: Option<ByteSize>,
    /// Directory for prefixes, kept over restarts, and its limit, such as /var/cache/kvasir:64GiB. Every worker needs its
    /// own directory [default: none].
    #[arg(long, value_name = "DIR:SIZE", env = "KVASIR_KV_DISK")]
    pub(crate) kv_disk: Option<DiskBudget>,
    /// Memory for snapshots, in addition to the KV cache [default: a quarter of its size].
    #[arg(long, value_name = "SIZE", env = "KVASIR_SNAPSHOT_BYTES")]
    pub(crate) snapshot_bytes: Option<ByteSize>,
    /// Directory for snapshots that outlive the process [default: none].
    #[arg(long, value_name = "DIR", env = "KVASIR_SNAPSHOT_DIR")]
    pub(crate) snapshot_dir: Option<PathBuf>,
    /// Limit of the snapshots in that directory [default: 16GiB].
    #[arg(long, value_name = "SIZE", env = "KVASIR_SNAPSHOT_DISK_BYTES")]
    pub(crate) snapshot_disk_bytes: Option<ByteSize>,
    /// Tokens of a KV block: 16, 32 or 64 [default: 16].
    #[arg(long, value_name = "N", env = "KVASIR_BLOCK_TOKENS")]
    pub(crate) block_tokens: Option<usize>,
    /// Element type of the KV cache [default: f16].
    #[arg(long, value_enum, env = "KVASIR_KV_TYPE")]
    pub(crate) kv_type: Option<KvTypeArg>,
    /// Element type of cached values, if another than that of keys.
    #[arg(long, value_enum, env = "KVASIR_KV_TYPE_V")]
    pub(crate) kv_type_v: Option<KvTypeArg>,
    /// Element type of recurrent states [default: f32].
    #[arg(long, value_enum, env = "KVASIR_STATE_TYPE")]
    pub(crate) state_type: Option<StateTypeArg>,
    /// With auto-bf16: the states of heads that forget within fewer tokens are stored as bf16 [default: 16].
    #[arg(long, value_name = "TOKENS", env = "KVASIR_STATE_TAU")]
    pub(crate) state_tau: Option<u32>,
    /// Activation type that quantised matrices are multiplied with [default: int8].
    #[arg(long, value_enum, env = "KVASIR_ACTIVATIONS")]
    pub(crate) activations: Option<ActivationsArg>,
    /// Longest sequence in tokens [default: the model's limit]. Models with rotary factors for short and for long
    /// contexts choose by it, so it must be the same for all workers of a model.
    #[arg(long, value_name = "TOKENS", env = "KVASIR_MAX_MODEL_LEN")]
    pub(crate) max_model_len: Option<u32>,
    /// Drafter of speculative decoding: off, ngram (the tokens that followed the last ones earlier), draft-mtp
    /// (the MTP head in the model's own file), draft-mtp:MODEL (a drafter made for the model), draft:MODEL
    /// (a smaller model with the same vocabulary); the output does not depend on it [default: off].
    #[arg(long, value_name = "SPEC", env = "KVASIR_SPEC")]
    pub(crate) spec: Option<SpecArg>,
    /// LoRA adapters in PEFT's layout, NAME=DIR, which are served as models of these names; several times, or separated
    /// by commas. More can be loaded through the API.
    #[arg(long, value_name = "NAME=DIR,..", env = "KVASIR_LORA", value_delimiter = ',')]
    pub(crate) lora: Option<Vec<LoraArg>>,
    /// Largest rank of an adapter, at most 512 [default: 64].
    #[arg(long, value_name = "RANK", env = "KVASIR_MAX_LORA_RANK", value_parser = clap::value_parser!(u16).range(1..=512))]
    pub(crate) max_lora_rank: Option<u16>,
    /// Memory for all adapters together, as 32-bit floats [default: 1GiB].
    #[arg(long, value_name = "SIZE", env = "KVASIR_LORA_BYTES")]
    pub(crate) lora_bytes: Option<ByteSize>,
    /// Most sequences in a step [default: computed, see --explain].
    #[arg(long, value_name = "N", env = "KVASIR_MAX_SEQS")]
    pub(crate) max_seqs: Option<usize>,
    /// Most prompt tokens of one sequence in a step [default: computed, see --explain].
    #[arg(long, value_name = "N", env = "KVASIR_CHUNK")]
    pub(crate) chunk: Option<usize>,
    /// Workers that share this machine's memory; `kvasir up` sets it.
    #[arg(long, value_name = "N", env = "KVASIR_WORKERS_HERE", hide = true)]
    pub(crate) workers_here: Option<usize>,
    /// Workers that share this GPU; `kvasir up` sets it.
    #[arg(long, value_name = "N", env = "KVASIR_GPU_WORKERS", hide = true)]
    pub(crate) gpu_workers: Option<usize>,
    /// Least time without a finished step, with work queued, after which the worker process ends [default: 10s].
    #[arg(long, value_name = "TIME", env = "KVASIR_STALL_AFTER")]
    pub(crate) stall_after: Option<Period>,
    /// Time for running requests to finish after a stop signal [default: 30s].
    #[arg(long, value_name = "TIME", env = "KVASIR_DRAIN_TIMEOUT")]
    pub(crate) drain_timeout: Option<Period>,
    /// OTLP collector that receives the spans of requests, such as http://127.0.0.1:4318; without it nothing is traced.
    #[arg(long, value_name = "URL", env = "OTEL_EXPORTER_OTLP_ENDPOINT")]
    pub(crate) otlp_endpoint: Option<String>,
    /// PEM file of certificates that verify a collector at https:// [default: those that browsers trust, and SSL_CERT_FILE].
    #[arg(long, value_name = "FILE", env = "OTEL_EXPORTER_OTLP_CERTIFICATE")]
    pub(crate) otlp_certificate: Option<PathBuf>,
}

/// Complete and checked settings.
#[derive(Debug)]
struct Plan {
    settings: WorkerSettings,
    explained: Vec<Explained>,
    config: WorkerConfig,
    drain: Duration,
}

impl WorkerSettings {
    /// Refuses a value out of its limits, with the field, the value and the limit.
    fn check(&self) -> Result<(), ConfigError> {
        let within = |field, value: Option<usize>, min: usize, max: usize| match value {
            Some(value) if !(min..=max).contains(&value) => {
                Err(ConfigError::field(field, value, format!("{min} to {max}")))
            }
            _ => Ok(()),
        };
        within("threads", self.threads, 1, cpus::MAX_THREADS)?;
        within("max_lora_rank", self.max_lora_rank.map(usize::from), 1, MAX_RANK)?;
        within("max_seqs", self.max_seqs, 1, MAX_SEQS)?;
        within("chunk", self.chunk, 1, 1 << 20)?;
        within("workers_here", self.workers_here, 1, 1024)?;
        within("gpu_workers", self.gpu_workers, 1, 1024)?;
        if let (Some(gpu), Some(Device::Cpu)) = (self.gpu, self.device) {
            return Err(ConfigError::field("gpu", gpu, "not with device = cpu"));
        }
        self.check_role()?;
        hosting::check_labels(self.labels.as_deref().unwrap_or_default())?;
        within("shipping_lanes", self.shipping_lanes, 1, shipped::MAX_LANES)?;
        if let Some(tokens) = self.block_tokens.filter(|tokens| !BLOCK_TOKENS.contains(tokens)) {
            return Err(ConfigError::field("block_tokens", tokens, "16, 32 or 64"));
        }
        if let (Some(cpus), Some(threads)) = (&self.cpus, self.threads)
            && cpus.cpus().len() < threads
        {
            return Err(ConfigError::field("cpus", cpus, format!("at least as many as threads ({threads})")));
        }
        Ok(())
    }

    /// Computes unset settings from the machine and the model.
    fn plan(self) -> anyhow::Result<Plan> {
        self.check()?;
        let engine = external::selected(&self.engine_settings())?;
        let local = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let listen = self.quic.map_or(Ok(local(0)), |quic| quic.address("quic"))?;
        let from = self.from.as_deref().unwrap_or_default();
        let identity = || identity::identity(self.identity.as_deref());
        let (model, shipping) = match self.model.as_deref() {
            Some(name) => {
                let (model, mut shipping) = shipped::resolve(name, from, self.shard_bytes, listen, identity)?;
                if self.pool == Some(true) && shipping.store.is_none() {
                    // A replica's drafter may have to be fetched from other workers.
                    shipping.store = shipped::store(self.shard_bytes)
                        .inspect_err(
                            |error| tracing::warn!(%error, "cannot open the shard store; a drafter cannot be fetched from other workers"),
                        )
                        .ok();
                }
                (Some(OwnModel { id: model.id, path: model.path }), shipping)
            }
            // The models that coordinators place on it.
            None if self.pool == Some(true) => {
                let store = Some(shipped::store(self.shard_bytes)?);
                (None, ShippingConfig { store, from: from.to_vec(), ..ShippingConfig::default() })
            }
            None => (None, ShippingConfig::default()),
        };
        let (engine, servers) = match engine {
            SelectedEngine::BuiltIn => (None, None),
            SelectedEngine::Server(kind, source) => (Some((kind, source)), None),
            SelectedEngine::Servers(servers) => (None, Some(servers)),
        };
        let hosts = engine.is_none() && self.pool != Some(true) && !self.only_encodes();
        if let (Some(labels), false) = (&self.labels, hosts) {
            let rule =
                "only for workers that models are deployed to: not with `pool`, `engine_url`, role encode";
            return Err(ConfigError::field("labels", labels.join(","), rule).into());
        }
        // Without what is computed for its own model.
        let hosted = EngineOptions {
            kv_bytes: None,
            pin_bytes: None,
            max_model_len: None,
            lora: Vec::new(),
            tiers: TiersConfig { host_bytes: 0, under_way_bytes: UNDER_WAY_BYTES, ..self.tiers() },
            ..self.options()?
        };
        let caches_weights = self.weight_cache != Some(false);
        if let (None, Some(own)) = (&engine, &model) {
            require_weights(&own.path)?;
        }
        let bundles = self.operation.iter().flatten().map(|bundle| resolve_bundle(bundle));
        let bundles = bundles.collect::<anyhow::Result<Vec<_>>>()?;
        let (settings, explained) =
            self.complete(model.as_ref().filter(|_| engine.is_none()).map(|model| model.path.as_path()))?;
        let packed = match settings.weight_cache {
            Some(true) => Some(shipped::store(settings.shard_bytes)?),
            Some(false) | None => None,
        };
        let drain = settings.drain_timeout.map_or(Duration::ZERO, |period| period.0);
        let mut shipping = ShippingConfig { lanes: settings.shipping_lanes.unwrap_or(1), ..shipping };
        let hosting = match hosts {
            false => None,
            true => {
                // Servers of other projects read whole files.
                let opened = servers.is_none().then(|| shipped::store(settings.shard_bytes));
                let opened = opened.map(|opened| opened.inspect_err(
                    |error| tracing::warn!(%error, "cannot open the shard store; models cannot be fetched from other workers"),
                ));
                let store = opened.and_then(Result::ok);
                shipping.store = shipping.store.or_else(|| store.clone());
                Some(HostingConfig {
                    budget: settings.memory.map_or(0, |memory| memory.0),
                    process: load::process_bytes(&hosted)?,
                    labels: settings.labels.clone().unwrap_or_default(),
                    stages: match model.is_none() && servers.is_none() {
                        true => Some(settings.stage_speed()?),
                        false => None,
                    },
                    servers,
                    engine: EngineOptions { packed: store.clone().filter(|_| caches_weights), ..hosted },
                    shipping: ShippingConfig { store, from: Vec::new(), lanes: shipping.lanes },
                    resolver: Arc::new(HubResolver),
                    drain_timeout: drain,
                    free_memory: allocator::free_memory,
                })
            }
        };
        let config = WorkerConfig {
            model,
            bundles,
            sessions: SessionLimits::default(),
            shipping,
            coordinators: settings.coordinators.clone().unwrap_or_default(),
            listen: settings.quic.map_or(Ok(local(0)), |quic| quic.address("quic"))?,
            ops: settings.ops.unwrap_or(local(0)),
            engine: EngineOptions {
                packed,
                speculative_method: settings.spec.clone().unwrap_or_default().speculative_method()?,
                ..settings.options()?
            },
            external: engine,
            part: settings.role.unwrap_or(RoleArg::Both).into(),
            snapshots: settings.snapshots(),
            stall_floor: settings.stall_after.map_or(Duration::MAX, |period| period.0),
            pool: settings.offer()?,
            hosting,
            floor: load::watched(&settings.options()?)?,
        };
        Ok(Plan { settings, explained, config, drain })
    }

    fn complete(self, model: Option<&Path>) -> anyhow::Result<(Self, Vec<Explained>)> {
        let mut explained = Vec::new();
        macro_rules! or {
            ($field:ident, $default:expr, $reason:expr) => {
                Some(match self.$field.clone() {
                    Some(value) => value,
                    None => {
                        let value = $default;
                        explained.push(Explained::new(stringify!($field), &value, $reason)?);
                        value
                    }
                })
            };
        }
        let options = self.options()?;
        let (device, device_reason) = Device::chosen(options.device, options.gpu)?;
        tracing::info!(?device, reason = device_reason, "device selected");
        let local = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let threads = or!(threads, cpus::capacity(), "one for each usable CPU");
        let with_threads = EngineOptions { threads, ..options.clone() };
        let (host, defaults, task) = match model {
            Some(model) => {
                let load::Plan { defaults, task, host, .. } = load::plan(model, &with_threads)?;
                (host, Some(defaults), task)
            }
            None => (load::host(&with_threads)?, None, ModelTask::Generate),
        };
        // An encoder keeps keys and values for one step only, so the step's size determines their memory.
        let encodes = !task.generates();
        let (kv_type, kv_reason) = match encodes {
            true => (KvTypeArg::F32, "kept for one step only, so a smaller type saves nothing"),
            false => (KvTypeArg::F16, "half the memory of f32 with the same answers"),
        };
        // A replica's caches are limited by the stage with the least room.
        let elsewhere = encodes || self.pool == Some(true) || self.only_encodes();
        let kv_bytes = match &defaults {
            Some(defaults) if !elsewhere => {
                or!(kv_bytes, ByteSize(defaults.arena_bytes.value), &defaults.arena_bytes.reason)
            }
            _ => self.kv_bytes,
        };
        let pooled = or!(pool, false, "a worker that serves by itself depends on no other");
        let memory = match self.engine_url {
            // An engine of another project has its own.
            Some(_) => self.memory,
            None => {
                let free = host.memory_available.saturating_sub(worker::defaults::floor(host).value);
                let share = ByteSize(free / host.workers.max(1) as u64);
                or!(memory, share, "free memory without the floor, divided among the workers of this machine")
            }
        };
        let bandwidth = match pooled {
            Some(true) => {
                let measured = || decode_bandwidth(&with_threads).map(|rate| ByteSize(rate as u64));
                or!(bandwidth, measured()?, "measured at startup")
            }
            _ => self.bandwidth,
        };
        let lanes = shipped::lanes(self.workers_here.unwrap_or(1));
        let quarter = ByteSize(kv_bytes.map_or(0, |bytes| bytes.0) / 4);
        let complete = Self {
            identity: self.identity.clone(),
            coordinators: self.coordinators.clone(),
            http: self.http,
            otlp_endpoint: self.otlp_endpoint.clone(),
            otlp_certificate: self.otlp_certificate.clone(),
            model: self.model.clone(),
            engine: self.engine.clone(),
            engine_url: self.engine_url.clone(),
            engine_cmd: self.engine_cmd.clone(),
            engine_model: self.engine_model.clone(),
            engine_key_file: self.engine_key_file.clone(),
            engine_options: self.engine_options.clone(),
            engine_idle: self.engine_idle,
            engine_memory: self.engine_memory,
            kv_events: self.kv_events.clone(),
            kv_events_replay: self.kv_events_replay.clone(),
            kv_events_topic: self.kv_events_topic.clone(),
            operation: self.operation.clone(),
            from: self.from.clone(),
            weight_cache: or!(
                weight_cache,
                self.from.is_some()
                    || self.model.is_none() && pooled == Some(true)
                    || self.workers_here.is_some_and(|workers| workers > 1),
                "one copy in memory for several workers"
            ),
            shard_bytes: or!(
                shard_bytes,
                shipped::STORE_BYTES,
                "small compared with the disks of such machines"
            ),
            shipping_lanes: or!(shipping_lanes, lanes.value, &lanes.reason),
            role: or!(role, RoleArg::Both, "this worker can replace every other one"),
            cpus: self.cpus.clone(),
            pool: pooled,
            memory,
            labels: self.labels.clone(),
            bandwidth,
            threads,
            quic: or!(quic, local(7001).into(), "reachable from this machine only"),
            ops: or!(ops, local(9091), "reachable from this machine only"),
            device: or!(device, device, &device_reason),
            gpu: match device {
                Device::Cuda => or!(gpu, 0, "the driver's first GPU"),
                _ => self.gpu,
            },
            kv_bytes,
            pin_bytes: match pooled {
                Some(true) => self.pin_bytes,
                _ => or!(pin_bytes, quarter, "a quarter of kv_bytes; the rest serves all requests"),
            },
            image_cache: self.image_cache,
            vision_tower: self.vision_tower,
            kv_host_bytes: or!(kv_host_bytes, ByteSize(0), "off unless a size is set"),
            kv_disk: self.kv_disk.clone(),
            snapshot_bytes: or!(snapshot_bytes, quarter, "a quarter of kv_bytes"),
            snapshot_dir: self.snapshot_dir.clone(),
            snapshot_disk_bytes: or!(
                snapshot_disk_bytes,
                ByteSize(16 << 30),
                "small compared with the disks of such machines"
            ),
            block_tokens: or!(
                block_tokens,
                options.block_tokens,
                "the size of the hash unit, which wastes the least memory"
            ),
            kv_type: or!(kv_type, kv_type, kv_reason),
            kv_type_v: self.kv_type_v,
            state_type: or!(state_type, StateTypeArg::F32, "bf16 is smaller but changes results"),
            state_tau: match self.state_type {
                Some(StateTypeArg::AutoBf16) => {
                    or!(
                        state_tau,
                        StateType::TAU,
                        "rounding errors add up over few tokens, see docs/measurements/state-type.md"
                    )
                }
                Some(StateTypeArg::F32) | None => None,
            },
            activations: or!(activations, ActivationsArg::Int8, "several times faster than f32"),
            max_model_len: self.max_model_len,
            spec: or!(spec, SpecArg::Off, "it pays only if answers quote their prompts"),
            lora: self.lora.clone(),
            max_lora_rank: self.max_lora_rank,
            lora_bytes: self.lora_bytes,
            max_seqs: match &defaults {
                Some(defaults) if pooled != Some(true) => {
                    or!(max_seqs, defaults.max_seqs.value, &defaults.max_seqs.reason)
                }
                _ => self.max_seqs,
            },
            chunk: match &defaults {
                Some(defaults) => or!(chunk, defaults.chunk.value as usize, &defaults.chunk.reason),
                None => self.chunk,
            },
            workers_here: or!(workers_here, 1, "alone on this machine"),
            gpu_workers: self.gpu_workers,
            stall_after: or!(stall_after, Period(Duration::from_secs(10)), "far longer than any step"),
            drain_timeout: or!(
                drain_timeout,
                Period(Duration::from_secs(30)),
                "the usual limit of supervisors"
            ),
        };
        Ok((complete, explained))
    }

    /// The settings of the engine.
    pub(crate) fn engine_settings(&self) -> EngineSettings {
        let some = |size: Option<ByteSize>| size.is_some_and(|size| size.0 > 0);
        // A file that `--check-config` printed has the defaults.
        let built_in_only = [
            ("pool", self.pool == Some(true)),
            ("from", self.from.is_some()),
            ("spec", self.spec.as_ref().is_some_and(|spec| *spec != SpecArg::Off)),
            ("lora", self.lora.is_some()),
            ("role", self.role.is_some_and(|role| role != RoleArg::Both)),
            ("kv_bytes", some(self.kv_bytes)),
            ("kv_host_bytes", some(self.kv_host_bytes)),
            ("kv_disk", self.kv_disk.is_some()),
            ("pin_bytes", some(self.pin_bytes)),
            ("image_cache", self.image_cache.is_some()),
            ("vision_tower", self.vision_tower == Some(false)),
            ("block_tokens", self.block_tokens.is_some_and(|tokens| tokens != BLOCK_TOKENS[0])),
            ("kv_type", self.kv_type.is_some_and(|ty| ty != KvTypeArg::F16)),
            ("kv_type_v", self.kv_type_v.is_some()),
            ("state_type", self.state_type.is_some_and(|ty| ty != StateTypeArg::F32)),
            ("activations", self.activations.is_some_and(|ty| ty != ActivationsArg::Int8)),
            ("max_model_len", self.max_model_len.is_some()),
            ("max_seqs", self.max_seqs.is_some()),
            ("chunk", self.chunk.is_some()),
        ];
        EngineSettings {
            engine: self.engine.clone(),
            url: self.engine_url.clone(),
            cmd: self.engine_cmd.clone(),
            model: self.engine_model.clone(),
            key_file: self.engine_key_file.clone(),
            options: self.engine_options.clone(),
            idle: self.engine_idle,
            memory: self.engine_memory,
            kv_events: self.kv_events.clone(),
            kv_events_replay: self.kv_events_replay.clone(),
            kv_events_topic: self.kv_events_topic.clone(),
            has_model: self.model.is_some(),
            built_in_only: built_in_only.iter().filter(|(_, set)| *set).map(|(field, _)| *field).collect(),
        }
    }

    /// Speed of the stages of deployed models.
    fn stage_speed(&self) -> anyhow::Result<StageSpeed> {
        let options = self.options()?;
        let bandwidth = match self.bandwidth {
            Some(bandwidth) => bandwidth.0,
            None => gpu_bandwidth(&options)?.map_or(ASSUMED_BANDWIDTH.0, |rate| rate as u64),
        };
        Ok(StageSpeed { bandwidth, compute: compute(&load::host(&options)?) as u64 })
    }

    fn snapshots(&self) -> StoreConfig {
        let bytes = |size: Option<ByteSize>| size.map_or(0, |size| size.0);
        StoreConfig {
            memory_bytes: bytes(self.snapshot_bytes),
            dir: self.snapshot_dir.clone(),
            disk_bytes: bytes(self.snapshot_disk_bytes),
        }
    }

    fn tiers(&self) -> TiersConfig {
        let disk = self.kv_disk.clone().map(|disk| DiskConfig { dir: disk.dir, bytes: disk.bytes.0 });
        let host_bytes = self.kv_host_bytes.map_or(0, |size| size.0);
        TiersConfig { host_bytes, disk, ..TiersConfig::default() }
    }

    /// Engine options as far as they are set.
    fn options(&self) -> Result<EngineOptions, ConfigError> {
        let default = EngineOptions::default();
        Ok(EngineOptions {
            threads: self.threads,
            // The set may have more CPUs than threads; the first ones are used.
            cpus: self
                .cpus
                .as_ref()
                .map(|set| set.cpus().iter().copied().take(self.threads.unwrap_or(usize::MAX)).collect()),
            kv_type: self.kv_type.unwrap_or(KvTypeArg::F16).with_values(self.kv_type_v),
            state_type: self.state_type.unwrap_or(StateTypeArg::F32).with_tau(self.state_tau)?,
            activations: self.activations.map_or(default.activations, Into::into),
            block_tokens: self.block_tokens.unwrap_or(default.block_tokens),
            kv_bytes: self.kv_bytes.map(|size| size.0),
            pin_bytes: self.pin_bytes.map(|size| size.0),
            tiers: self.tiers(),
            image_cache_bytes: self.image_cache.map_or(default.image_cache_bytes, |size| size.0),
            vision_tower: self.vision_tower(),
            chunk: self.chunk,
            max_sequences: self.max_seqs,
            max_model_len: numerics::model_len(self.max_model_len)?,
            workers: self.workers_here.unwrap_or(default.workers),
            digests: home::digests(),
            device: self.device.unwrap_or(Device::Auto).into(),
            gpu: self.gpu.unwrap_or(0),
            gpu_workers: self.gpu_workers,
            cubins: home::cubins(),
            lora: self.lora.iter().flatten().map(|arg| arg.0.clone()).collect(),
            lora_limits: lora::limits(self.max_lora_rank, self.lora_bytes),
            ..default
        })
    }
}

impl Worker {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        let settings: WorkerSettings = config::layered(self.node.config.as_deref(), &self.settings)?;
        let plan = settings.plan()?;
        if self.node.answer(&plan.settings, &plan.explained)? {
            return Ok(());
        }
        try_grammar::in_use()?;
        let Plan { settings, mut config, drain, .. } = plan;
        match (settings.http, config.coordinators.is_empty()) {
            (None, true) => {
                let need = "name at least one coordinator, or set an address for `http`";
                return Err(ConfigError::missing("coordinators", need).into());
            }
            (Some(http), false) => {
                let rule = "not together with `coordinators`, which serve the API of their cluster";
                return Err(ConfigError::field("http", http, rule).into());
            }
            (Some(_), true) if config.pool.is_some() => {
                let rule = "not together with `http`, because coordinators plan the replicas";
                return Err(ConfigError::field("pool", true, rule).into());
            }
            _ => {}
        }
        let runtime = io_runtime(config.shipping.lanes)?;
        runtime.block_on(async {
            let mut signals = StopSignals::listen()?;
            let front = match settings.http {
                Some(http) => {
                    let own = config.model.clone();
                    let OwnModel { id, path } =
                        own.ok_or_else(|| ConfigError::missing("model", "name a model to serve"))?;
                    let model = ModelEntry { id, path };
                    Some(LocalCoordinator::start(http, model, drain).await?)
                }
                None => None,
            };
            let identity = match &front {
                Some(front) => {
                    config.coordinators = vec![front.quic().to_string()];
                    front.worker_identity().clone()
                }
                None => {
                    let identity = identity::identity(settings.identity.as_deref())?;
                    if let Some(directory) = &settings.identity {
                        identity::keep_renewed(&identity, directory);
                        identity::renew_in_time(&identity, directory, config.coordinators.clone());
                    }
                    identity
                }
            };
            let (endpoint, node) = (settings.otlp_endpoint.as_deref(), &identity.name().node);
            let certificates = settings.otlp_certificate.as_deref();
            let _exporting = otlp::start(endpoint, certificates, None, "kvasir-worker", node)?;
            let written = [settings.snapshot_dir.clone(), settings.kv_disk.map(|disk| disk.dir)];
            watch_worker(settings.identity.clone(), written.into_iter().flatten());
            let started = async {
                let service = WorkerService::start(config, &identity).await?;
                if let Some(front) = &front {
                    front.joined().await;
                }
                anyhow::Ok(service)
            };
            let service = tokio::select! {
                service = started => service?,
                () = signals.next() => return Ok(()),
            };
            let announcement = Announcement {
                id: identity.name().node.to_string(),
                pid: std::process::id(),
                http: front.as_ref().map(LocalCoordinator::http),
                ops: service.ops_address(),
                quic: service.quic_address(),
            };
            announcement.print()?;
            signals.next().await;
            tracing::info!("stop signal received: no new requests are accepted, running ones finish");
            let drained = async {
                if let Some(front) = front {
                    front.stop().await;
                }
                service.drain().await;
            };
            tokio::select! {
                () = drained => {}
                () = tokio::time::sleep(drain) => tracing::warn!("the drain timeout has passed; the remaining requests are cut off"),
                () = signals.next() => {}
            }
            service.stop().await;
            Ok(())
        })
    }
}

mod roles;
#[cfg(test)]
mod tests;
