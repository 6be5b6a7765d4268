//! `kvasir up`: a cluster on this machine. The nodes are child processes of the same executable and use QUIC
//! with mutual TLS, as on several machines.

pub(crate) mod child;
mod data_dir;
mod deployed;
mod nodes;
mod proposal;
mod supervisor;

use crate::columns::columns;
use crate::config::{self, ByteSize, ConfigError, DiskBudget};
use crate::coordinator::{CoordinatorSettings, RoutingArg};
use crate::cpus::{self, CpuSet, GpuPlace};
use crate::external::{self, EngineOption};
use crate::lora::LoraArg;
use crate::numerics::{self, ActivationsArg, Device, KvTypeArg, StateTypeArg};
use crate::role::RoleArg;
use crate::spec::SpecArg;
use crate::worker::WorkerSettings;
use crate::{home, models};
use anyhow::Context;
use api::auth::KeyEntry;
use consensus::table::MAX_VOTERS;
use data_dir::DataDir;
use nodes::Nodes;
use pki::ca::Authority;
use proto::ids::{ClusterName, NodeId, Role};
use proto::served_model::ModelTask;
use serde::{Deserialize, Serialize};
use speech::Bundle;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::path::PathBuf;
use std::time::SystemTime;
use supervisor::Supervisor;

const DEFAULT_MODEL: &str = "smollm2-135m";
/// More workers on one machine are assumed to be a typing error.
const MAX_WORKERS: usize = 64;

/// Starts a whole cluster on this machine: each coordinator and worker is a process.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  kvasir up\n  kvasir up --workers 4 --http 127.0.0.1:8000\n  \
    kvasir up ./my-model.gguf --json\n  kvasir up smollm2-135m gemma3-270m\n\n\
    Ctrl-C stops the cluster after running requests have finished; a second Ctrl-C stops it at once.")]
pub(crate) struct Up {
    #[command(flatten)]
    settings: UpSettings,
    /// TOML file with any of the settings above and a `[[keys]]` table. Variables and flags take precedence.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// When ready, print the content of up.json as one line, and nothing else on stdout.
    #[arg(long)]
    json: bool,
    /// Do not restart nodes that exit.
    #[arg(long)]
    no_restart: bool,
    /// Allow addresses that other machines can reach; requires `[[keys]]` in the configuration file.
    #[arg(long)]
    listen_public: bool,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize, clap::Args)]
#[serde(deny_unknown_fields)]
struct UpSettings {
    /// Catalog name, https:// or hf:// address, or path of a .gguf file or a Hugging Face folder [default: smollm2-135m; on
    /// a GPU the largest model of the catalog that fits and is fast; pulled on first use]
    model: Option<String>,
    /// Further models, each deployed to one of the workers beside MODEL: catalog names, addresses or paths. They stay
    /// deployed in the data directory until `kvasir models undeploy`
    #[arg(value_name = "MODEL")]
    deploy: Option<Vec<String>>,
    /// Coordinator processes, at most 5, in one group [default: 1]
    #[arg(long, value_name = "N", env = "KVASIR_UP_COORDINATORS")]
    coordinators: Option<usize>,
    /// Engine of the workers: kvasir, vllm, sglang or llama-server; servers of another project with their addresses
    /// [default: kvasir]
    #[arg(long, value_name = "NAME", env = "KVASIR_LLM_BACKEND")]
    engine: Option<String>,
    /// Addresses of the engines' servers, http://HOST:PORT, separated by commas, one for each worker. MODEL is then a
    /// .gguf file, or a Hugging Face folder with tokenizer.json, of the model that they have
    #[arg(long, value_name = "URL,..", env = "KVASIR_ENGINE_URL", value_delimiter = ',')]
    engine_url: Option<Vec<String>>,
    /// Command that starts the engine's server, for one worker [default: the servers run already]
    #[arg(long, value_name = "CMD", env = "KVASIR_ENGINE_CMD")]
    engine_cmd: Option<String>,
    /// The model's name in the engines' requests [default: their first model]
    #[arg(long, value_name = "NAME", env = "KVASIR_ENGINE_MODEL")]
    engine_model: Option<String>,
    /// File with the engines' API key
    #[arg(long, value_name = "FILE", env = "KVASIR_ENGINE_KEY_FILE")]
    engine_key_file: Option<PathBuf>,
    /// Properties of the engines that their servers do not report, separated by commas
    #[arg(long, value_enum, value_name = "LIST", env = "KVASIR_ENGINE_OPTIONS", value_delimiter = ',')]
    engine_options: Option<Vec<EngineOption>>,
    /// Where vllm or sglang publish their KV events, HOST:PORT of each server, separated by commas, or off
    #[arg(long, value_name = "HOST:PORT,..", env = "KVASIR_KV_EVENTS", value_delimiter = ',')]
    kv_events: Option<Vec<String>>,
    /// Where lost KV events can be requested again, HOST:PORT of each server [default: nowhere]
    #[arg(long, value_name = "HOST:PORT,..", env = "KVASIR_KV_EVENTS_REPLAY", value_delimiter = ',')]
    kv_events_replay: Option<Vec<String>>,
    /// Bundles of operations that all workers offer in addition to the model: silero-vad, smart-turn, whisper-base,
    /// openwakeword, resemblyzer, pyannote-diarization, piper-joe, kokoro, a directory with a folder for each operation, or
    /// ID=DIR; several times, or separated by commas
    #[arg(long, value_name = "BUNDLE", env = "KVASIR_OPERATION", value_delimiter = ',')]
    operation: Option<Vec<String>>,
    /// Worker processes [default: 2, or as many as --shards; one for each GPU if MODEL is chosen by the GPU]
    #[arg(long, value_name = "N", env = "KVASIR_WORKERS")]
    workers: Option<usize>,
    /// Worker processes per replica, each with a part of the model's layers. `--workers` is then the number of workers
    /// of all replicas together [default: 1]
    #[arg(long, value_name = "N", env = "KVASIR_SHARDS")]
    shards: Option<usize>,
    /// Number of workers that compute long prompts for the others, which then only decode [default: 0]
    #[arg(long, value_name = "N", env = "KVASIR_PREFILL_WORKERS")]
    prefill_workers: Option<usize>,
    /// Address of the first coordinator's OpenAI API; each further one uses the next port. Port 0 selects free ports
    /// [default: 127.0.0.1:8080]
    #[arg(long, value_name = "ADDR", env = "KVASIR_HTTP", value_parser = config::listen)]
    #[serde(default, deserialize_with = "config::listen_in_file")]
    http: Option<SocketAddr>,
    /// Address of the first coordinator's ops port; each further one uses the next port. Port 0 selects free ports
    /// [default: 127.0.0.1:9090]
    #[arg(long, value_name = "ADDR", env = "KVASIR_OPS", value_parser = config::listen)]
    #[serde(default, deserialize_with = "config::listen_in_file")]
    ops: Option<SocketAddr>,
    /// Compute threads of each worker [default: usable CPUs / workers, at least 1]
    #[arg(long, value_name = "N", env = "KVASIR_THREADS")]
    threads: Option<usize>,
    /// Device of the workers, which are spread over all GPUs in CUDA_VISIBLE_DEVICES [default: auto]
    #[arg(long, value_enum, env = "KVASIR_DEVICE")]
    device: Option<Device>,
    /// Memory for the KV cache of each worker, such as 2GiB [default: computed from the free memory]
    #[arg(long, value_name = "SIZE", env = "KVASIR_KV_BYTES")]
    kv_bytes: Option<ByteSize>,
    /// Host memory of each worker for prefixes that do not fit into the KV cache [default: none]
    #[arg(long, value_name = "SIZE", env = "KVASIR_KV_HOST_BYTES")]
    kv_host_bytes: Option<ByteSize>,
    /// Directory for prefixes, kept over restarts, and each worker's limit there [default: none]
    #[arg(long, value_name = "DIR:SIZE", env = "KVASIR_KV_DISK")]
    kv_disk: Option<DiskBudget>,
    /// Element type of the KV cache [default: f16]
    #[arg(long, value_enum, env = "KVASIR_KV_TYPE")]
    kv_type: Option<KvTypeArg>,
    /// Element type of cached values, if another than that of keys
    #[arg(long, value_enum, env = "KVASIR_KV_TYPE_V")]
    kv_type_v: Option<KvTypeArg>,
    /// Element type of recurrent states [default: f32]
    #[arg(long, value_enum, env = "KVASIR_STATE_TYPE")]
    state_type: Option<StateTypeArg>,
    /// With auto-bf16: the states of heads that forget within fewer tokens are stored as bf16 [default: 16]
    #[arg(long, value_name = "TOKENS", env = "KVASIR_STATE_TAU")]
    state_tau: Option<u32>,
    /// Activation type that quantised matrices are multiplied with [default: int8]
    #[arg(long, value_enum, env = "KVASIR_ACTIVATIONS")]
    activations: Option<ActivationsArg>,
    /// Longest sequence in tokens [default: the model's limit]. Models with rotary factors for short and for long
    /// contexts choose by it
    #[arg(long, value_name = "TOKENS", env = "KVASIR_MAX_MODEL_LEN")]
    max_model_len: Option<u32>,
    /// Drafter of speculative decoding: off, ngram (the tokens that followed the last ones earlier), draft-mtp
    /// (the MTP head in the model's own file), draft-mtp:MODEL (a drafter made for the model), draft:MODEL
    /// (a smaller model with the same vocabulary); the output does not depend on it [default: off]
    #[arg(long, value_name = "SPEC", env = "KVASIR_SPEC")]
    spec: Option<SpecArg>,
    /// LoRA adapters in PEFT's layout, NAME=DIR, which are served as models of these names; several times, or separated
    /// by commas. More can be loaded through the API
    #[arg(long, value_name = "NAME=DIR,..", env = "KVASIR_LORA", value_delimiter = ',')]
    lora: Option<Vec<LoraArg>>,
    /// Largest rank of an adapter, at most 512 [default: 64]
    #[arg(long, value_name = "RANK", env = "KVASIR_MAX_LORA_RANK", value_parser = clap::value_parser!(u16).range(1..=512))]
    max_lora_rank: Option<u16>,
    /// Memory for all adapters together, as 32-bit floats [default: 1GiB]
    #[arg(long, value_name = "SIZE", env = "KVASIR_LORA_BYTES")]
    lora_bytes: Option<ByteSize>,
    /// Rule by which a worker is chosen; all but `prefix` are for comparison [default: prefix]
    #[arg(long, value_enum, env = "KVASIR_ROUTING")]
    routing: Option<RoutingArg>,
    /// Most generations that wait for a worker at each coordinator; more are refused [default: 2048]
    #[arg(long, value_name = "N", env = "KVASIR_QUEUE_REQUESTS")]
    queue_requests: Option<usize>,
    /// Most generations that a coordinator sends to one worker at a time; more wait [default: 256]
    #[arg(long, value_name = "N", env = "KVASIR_WORKER_INFLIGHT")]
    worker_inflight: Option<u32>,
    /// Origins whose web pages may send requests, such as `https://app.example`, separated by commas; or `*`, or `none`
    /// [default: any origin if keys are required, else only origins on this machine]
    #[arg(long, value_name = "ORIGIN,..", env = "KVASIR_CORS_ORIGINS", value_delimiter = ',')]
    cors_origins: Option<Vec<String>>,
    /// Serve Ollama's API on the API port, too [default: true if --http is a loopback address]
    #[arg(long, value_name = "BOOL", env = "KVASIR_OLLAMA")]
    ollama: Option<bool>,
    /// Hosts from which images of chats are fetched by `http://` and `https://`, separated by commas: names,
    /// `*.example.com`, or `any`. Private addresses are never connected to [default: none]
    #[arg(long, value_name = "HOST,..", env = "KVASIR_IMAGE_URLS", value_delimiter = ',')]
    image_urls: Option<Vec<String>>,
    /// Directory for identities, secrets, logs and up.json [default: up-UID in $KVASIR_HOME]
    #[arg(long, value_name = "DIR", env = "KVASIR_DATA_DIR")]
    data_dir: Option<PathBuf>,
    /// Client keys, in the configuration file only.
    #[arg(skip)]
    #[serde(skip_serializing_if = "Option::is_none")]
    keys: Option<Vec<KeyEntry>>,
}

/// Complete and checked settings.
#[derive(Debug)]
struct Plan {
    coordinators: Vec<(SocketAddr, SocketAddr)>,
    workers: usize,
    /// Stages per replica; `None` if each worker serves the whole model.
    shards: Option<usize>,
    shares: cpus::Shares,
    /// GPU of each worker; empty if there is no choice.
    gpus: Vec<GpuPlace>,
    settings: UpSettings,
}

impl Plan {
    /// `gpus` is the number of GPUs that workers can be spread over.
    fn new(settings: UpSettings, listen_public: bool, gpus: usize) -> Result<Self, ConfigError> {
        let coordinators = count("coordinators", settings.coordinators, 1, MAX_VOTERS)?;
        if settings.shards == Some(0) {
            return Err(ConfigError::field("shards", 0, "at least 1"));
        }
        let shards = settings.shards.filter(|shards| *shards > 1);
        let servers = settings.engine_url.as_ref().map(Vec::len);
        let workers = count("workers", settings.workers, servers.or(shards).unwrap_or(2), MAX_WORKERS)?;
        if let Some(first) = settings.deploy.iter().flatten().next() {
            let without = |field: &str| Err(ConfigError::field("deploy", first, format!("not with {field}")));
            match (servers, shards) {
                (Some(_), _) => return without("engine_url"),
                (None, Some(_)) => return without("several shards"),
                (None, None) => {}
            }
        }
        if let Some(servers) = servers {
            check_servers(&settings, servers, workers)?;
        }
        if let Some(shards) = shards {
            check_sharded(&settings, shards, workers)?;
        }
        if let Some(prefill) = settings.prefill_workers.filter(|prefill| *prefill >= workers) {
            let limit = format!("less than the number of workers, {workers}");
            return Err(ConfigError::field("prefill_workers", prefill, limit));
        }
        let local = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let http = settings.http.unwrap_or(local(8080));
        let ops = settings.ops.unwrap_or(local(9090));
        if listen_public && settings.keys.as_ref().is_none_or(Vec::is_empty) {
            return Err(ConfigError::missing(
                "keys",
                "--listen-public needs at least one [[keys]] entry in --config",
            ));
        }
        for (field, address) in [("http", http), ("ops", ops)] {
            if !address.ip().is_loopback() && !listen_public {
                return Err(ConfigError::field(
                    field,
                    address,
                    "a loopback address, unless --listen-public is given",
                ));
            }
        }
        let coordinators = (0..coordinators)
            .map(|index| Ok((nth("http", http, index)?, nth("ops", ops, index)?)))
            .collect::<Result<_, ConfigError>>()?;
        let usable = CpuSet::usable().unwrap_or_else(|| CpuSet::first(cpus::capacity()));
        if settings.threads.is_some_and(|threads| !(1..=cpus::MAX_THREADS).contains(&threads)) {
            let limit = format!("1 to {}", cpus::MAX_THREADS);
            return Err(ConfigError::field("threads", settings.threads.unwrap_or(0), limit));
        }
        settings.state_type.unwrap_or(StateTypeArg::F32).with_tau(settings.state_tau)?;
        numerics::model_len(settings.max_model_len)?;
        let shares = cpus::share(&usable, cpus::capacity(), workers, settings.threads);
        let gpus = cpus::place_on_gpus(workers, gpus);
        Ok(Self { coordinators, workers, shards, shares, gpus, settings })
    }

    /// The nodes to start. Each gets an identity from the data directory's authority.
    fn nodes(&self, dir: &DataDir, model: &models::Resolved) -> anyhow::Result<Nodes> {
        let authority = authority(dir)?;
        let path = model.path.to_str().context("the model's path is not UTF-8")?;
        let named = format!("{}={path}", model.id);
        let identity = |role: Role, name: &str| -> anyhow::Result<PathBuf> {
            let path = dir.node(name).join("identity");
            authority
                .issue_recorded(&dir.authority(), role, NodeId::new(name)?, SystemTime::now())?
                .save(&path)?;
            Ok(path)
        };
        // Nodes use loopback among each other, whatever address the API has.
        let any_port = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let quics =
            free_ports(self.coordinators.len()).context("cannot find free UDP ports for the coordinators")?;
        let names = (0..).map(|index| format!("coordinator-{index}"));
        let peers: Vec<String> = names.zip(&quics).map(|(name, quic)| format!("{name}={quic}")).collect();
        let mut coordinators = Vec::new();
        for (index, ((http, ops), quic)) in self.coordinators.iter().zip(&quics).enumerate() {
            let name = format!("coordinator-{index}");
            let settings = CoordinatorSettings {
                identity: Some(identity(Role::Coordinator, &name)?),
                http: Some(*http),
                ops: Some(*ops),
                quic: Some(*quic),
                peers: Some(peers.clone()),
                data_dir: Some(dir.node(&name).join("data")),
                files_dir: Some(dir.files(&name)),
                cluster_key: Some(dir.cluster_key()),
                models: Some(vec![named.clone()]),
                hold_ready: Some(true),
                keys: self.settings.keys.clone(),
                routing: self.settings.routing,
                queue_requests: self.settings.queue_requests,
                worker_inflight: self.settings.worker_inflight,
                cors_origins: self.settings.cors_origins.clone(),
                ollama: self.settings.ollama,
                image_urls: self.settings.image_urls.clone(),
                shards: self.shards,
                ..CoordinatorSettings::default()
            };
            coordinators.push((name, settings));
        }
        let mut workers = Vec::new();
        // Make paths absolute: children have another working directory.
        let bundle = |bundle: &String| {
            let Bundle { id, dir } = models::resolve_bundle(bundle)?;
            Ok(format!("{id}={}", dir.to_str().context("the bundle's path is not UTF-8")?))
        };
        let operation = self.settings.operation.as_ref();
        let operation = operation
            .map(|bundles| bundles.iter().map(bundle).collect::<anyhow::Result<Vec<_>>>())
            .transpose()?;
        let engine_key_file = self.settings.engine_key_file.as_ref().map(std::path::absolute).transpose()?;
        for index in 0..self.workers {
            let name = format!("worker-{index}");
            let settings = WorkerSettings {
                identity: Some(identity(Role::Worker, &name)?),
                quic: Some(any_port.into()),
                ops: Some(any_port),
                model: Some(named.clone()),
                engine: self.settings.engine.clone(),
                engine_url: nth_of(&self.settings.engine_url, index),
                engine_cmd: self.settings.engine_cmd.clone(),
                engine_model: self.settings.engine_model.clone(),
                engine_key_file: engine_key_file.clone(),
                engine_options: self.settings.engine_options.clone(),
                kv_events: nth_of(&self.settings.kv_events, index),
                kv_events_replay: nth_of(&self.settings.kv_events_replay, index),
                operation: operation.clone(),
                role: self.role(index),
                workers_here: Some(self.workers),
                threads: Some(self.shares.threads),
                cpus: self.shares.sets.get(index).cloned(),
                device: self.settings.device,
                gpu: self.gpus.get(index).map(|place| place.gpu),
                gpu_workers: self.gpus.get(index).map(|place| place.workers),
                kv_bytes: self.settings.kv_bytes,
                kv_host_bytes: self.settings.kv_host_bytes,
                kv_disk: self.settings.kv_disk.as_ref().map(|disk| disk.below(&name)),
                kv_type: self.settings.kv_type,
                kv_type_v: self.settings.kv_type_v,
                state_type: self.settings.state_type,
                state_tau: self.settings.state_tau,
                activations: self.settings.activations,
                max_model_len: self.settings.max_model_len,
                spec: self.settings.spec.clone(),
                lora: self.settings.lora.clone(),
                max_lora_rank: self.settings.max_lora_rank,
                lora_bytes: self.settings.lora_bytes,
                snapshot_dir: Some(dir.snapshots(&name)),
                pool: self.shards.map(|_| true),
                bandwidth: self.shards.map(|_| crate::plan::ASSUMED_BANDWIDTH),
                ..WorkerSettings::default()
            };
            external::selected(&settings.engine_settings())?;
            workers.push((name, settings));
        }
        let replicas = self.shards.map(|shards| self.workers / shards);
        Ok(Nodes::new(model.id.to_string(), coordinators, workers, replicas))
    }
}

impl Plan {
    /// The first `prefill_workers` workers compute prompts.
    fn role(&self, worker: usize) -> Option<RoleArg> {
        let prefill = self.settings.prefill_workers.filter(|prefill| *prefill > 0)?;
        Some(if worker < prefill { RoleArg::Prefill } else { RoleArg::Decode })
    }
}

impl Up {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        let settings: UpSettings = config::layered(self.config.as_deref(), &self.settings)?;
        let settings = proposal::complete(settings)?;
        if let Some(shards) = settings.shards.filter(|shards| *shards > 1) {
            let model = models::resolve_or_pull(settings.model.as_deref().unwrap_or(DEFAULT_MODEL))?;
            let speculative_method = settings.spec.clone().unwrap_or_default().speculative_method()?;
            ::worker::load::check_shards(&model.path, &speculative_method, shards)?;
        }
        let gpus = match settings.engine_url {
            None => ::worker::load::visible_gpus(settings.device.unwrap_or(Device::Auto).into()),
            // The servers have their own.
            Some(_) => 0,
        };
        let plan = Plan::new(settings, self.listen_public, gpus)?;
        let dir = plan.settings.data_dir.clone().map_or_else(home::up_data_dir, Ok)?;
        let dir = DataDir::open(dir)?;
        let model = models::resolve_or_pull(plan.settings.model.as_deref().unwrap_or(DEFAULT_MODEL))?;
        // Report an unreadable file here, before any node is started.
        let task = match plan.settings.engine_url {
            None => {
                models::require_weights(&model.path)?;
                ::worker::load::task(&model.path).with_context(|| model.path.display().to_string())?
            }
            Some(_) => ModelTask::Generate,
        };
        let further = plan.settings.deploy.as_deref().unwrap_or_default();
        let further = deployed::resolve(further, &model.id)?;
        let nodes = plan.nodes(&dir, &model)?;
        let up_file = dir.up_file();
        // One thread: the kernel ends children together with the thread that started them.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            let mut supervisor = Supervisor::new(dir, nodes, !self.no_restart)?;
            if supervisor.start().await? {
                let names: Vec<String> = further.iter().map(|model| model.id.to_string()).collect();
                if let Some(ops) = supervisor.nodes().coordinator_ops().first().filter(|_| !names.is_empty())
                {
                    deployed::deploy(*ops, further).await?;
                }
                let nodes = supervisor.nodes();
                let text = match self.json {
                    true => nodes.up_line()? + "\n",
                    false => banner(nodes, task, &names, &up_file),
                };
                crate::node::announce(text)?;
                supervisor.run().await?;
            }
            supervisor.drain().await
        })
    }
}

/// Refuses settings that do not work with servers of another project.
fn check_servers(settings: &UpSettings, servers: usize, workers: usize) -> Result<(), ConfigError> {
    if workers != servers {
        return Err(ConfigError::field("workers", workers, format!("one for each engine_url ({servers})")));
    }
    if servers > 1 && settings.engine_cmd.is_some() {
        return Err(ConfigError::field("engine_cmd", "set", "only with one engine_url"));
    }
    if settings.shards.is_some_and(|shards| shards > 1) {
        return Err(ConfigError::field("shards", servers, "1 with engine_url"));
    }
    for (field, list) in
        [("kv_events", &settings.kv_events), ("kv_events_replay", &settings.kv_events_replay)]
    {
        // Of all servers.
        let off = |list: &Vec<String>| field == "kv_events" && list.as_slice() == ["off"];
        if let Some(list) = list.as_ref().filter(|list| list.len() != servers && !off(list)) {
            return Err(ConfigError::field(
                field,
                list.join(","),
                format!("one for each engine_url ({servers})"),
            ));
        }
    }
    Ok(())
}

/// Refuses settings that do not work with replicas of several workers.
fn check_sharded(settings: &UpSettings, shards: usize, workers: usize) -> Result<(), ConfigError> {
    if workers < shards {
        return Err(ConfigError::field("workers", workers, format!("at least as many as shards ({shards})")));
    }
    let rule = "0 with several shards, because the workers of a replica are not known in advance";
    match settings.prefill_workers.filter(|prefill| *prefill > 0) {
        Some(prefill) => Err(ConfigError::field("prefill_workers", prefill, rule)),
        None => Ok(()),
    }
}

/// The data directory's certificate authority, created on first use.
fn authority(dir: &DataDir) -> anyhow::Result<Authority> {
    let path = dir.authority();
    if !path.exists() {
        let cluster = ClusterName::new("kvasir-up")?;
        Authority::new(cluster, SystemTime::now())?.save(&path)?;
    }
    Authority::load(&path).with_context(|| path.display().to_string())
}

fn count(
    field: &'static str,
    given: Option<usize>,
    default: usize,
    max: usize,
) -> Result<usize, ConfigError> {
    match given.unwrap_or(default) {
        found if (1..=max).contains(&found) => Ok(found),
        found => Err(ConfigError::field(field, found, format!("1 to {max}"))),
    }
}

/// The `index`th entry of a list with one entry for each server, or for all.
fn nth_of(list: &Option<Vec<String>>, index: usize) -> Option<String> {
    let list = list.as_ref()?;
    list.get(index).or(list.last()).cloned()
}

/// The `index`th address from `first` on; port 0 stays 0.
fn nth(field: &'static str, first: SocketAddr, index: usize) -> Result<SocketAddr, ConfigError> {
    let port = match first.port() {
        0 => Some(0),
        port => u16::try_from(index).ok().and_then(|index| port.checked_add(index)),
    };
    let port = port.ok_or_else(|| {
        ConfigError::field(field, first, "a port that leaves enough higher ports for all coordinators")
    })?;
    Ok(SocketAddr::new(first.ip(), port))
}

/// Free UDP ports on loopback. The settings of a coordinator contain the ports of the others, so they are
/// chosen before the start.
fn free_ports(count: usize) -> std::io::Result<Vec<SocketAddr>> {
    // All sockets stay open until the last one is bound, so that no two ports are equal.
    let any_port = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let sockets = (0..count).map(|_| UdpSocket::bind(any_port)).collect::<Result<Vec<_>, _>>()?;
    sockets.iter().map(UdpSocket::local_addr).collect()
}

/// Text shown when the cluster is ready.
fn banner(nodes: &Nodes, task: ModelTask, deployed: &[String], up_file: &std::path::Path) -> String {
    let mut rows = vec![["NODE", "PID", "RSS", "API", "OPS"].map(str::to_owned).to_vec()];
    for role in [Role::Coordinator, Role::Worker] {
        for node in nodes.listening(role) {
            let url = |address: SocketAddr| format!("http://{}", reachable(address));
            let rss = resident_mib(node.pid).map_or_else(|| "?".into(), |mib| format!("{mib} MiB"));
            let api = node.http.map_or_else(|| "-".into(), url);
            rows.push(vec![node.id.clone(), node.pid.to_string(), rss, api, url(node.ops)]);
        }
    }
    let first = nodes.listening(Role::Coordinator).find_map(|node| node.http);
    let (path, question) = match task {
        ModelTask::Generate | ModelTask::GenerateFromImages => {
            ("chat/completions", r#""stream":true,"messages":[{"role":"user","content":"Hello!"}]"#)
        }
        ModelTask::Embed { .. } => ("embeddings", r#""input":"Hello!""#),
        ModelTask::Rerank { .. } => ("rerank", r#""query":"a panda?","documents":["a bear","a river"]"#),
    };
    let curl = first.map_or_else(String::new, |http| {
        format!(
            "curl -N http://{}/v1/{path} -H 'Content-Type: application/json' -d '{{\"model\":\"{}\",{question}}}'\n",
            reachable(http),
            nodes.model()
        )
    });
    let dashboard = nodes
        .listening(Role::Coordinator)
        .next()
        .map_or_else(String::new, |node| format!("dashboard: http://{}/\n", reachable(node.ops)));
    let deployed = match deployed {
        [] => String::new(),
        names => format!("deployed: {}; `kvasir status` shows how far they are\n", names.join(", ")),
    };
    format!(
        "{}\nready: {} ({})\n{deployed}{dashboard}\n{curl}\nCtrl-C stops the cluster.\n",
        columns(&rows),
        nodes.model(),
        up_file.display()
    )
}

/// Address for a client on this machine; an unspecified address becomes loopback.
fn reachable(address: SocketAddr) -> SocketAddr {
    match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => SocketAddr::from((Ipv4Addr::LOCALHOST, address.port())),
        IpAddr::V6(ip) if ip.is_unspecified() => {
            SocketAddr::from((std::net::Ipv6Addr::LOCALHOST, address.port()))
        }
        _ => address,
    }
}

fn resident_mib(pid: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib >> 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(settings: UpSettings, listen_public: bool) -> String {
        Plan::new(settings, listen_public, 0).unwrap_err().to_string()
    }

    fn keys() -> Option<Vec<KeyEntry>> {
        toml::from_str::<UpSettings>(&format!("[[keys]]\nsha256 = \"{}\"\ntenant = \"a\"\n", "0".repeat(64)))
            .unwrap()
            .keys
    }

    #[test]
    fn other_machines_are_let_in_only_with_keys_and_on_purpose() {
        let public: Option<SocketAddr> = "0.0.0.0:8080".parse().ok();
        assert!(
            refused(UpSettings { http: public, ..Default::default() }, false).contains("--listen-public")
        );
        assert!(
            refused(UpSettings { ops: public, keys: keys(), ..Default::default() }, false).contains("`ops`")
        );
        assert!(refused(UpSettings::default(), true).contains("[[keys]]"));
        Plan::new(UpSettings { http: public, keys: keys(), ..Default::default() }, true, 0).unwrap();
    }

    #[test]
    fn counts_and_threads_have_limits_that_errors_name() {
        assert!(
            refused(UpSettings { workers: Some(0), ..Default::default() }, false).contains("`workers`: 0")
        );
        assert!(
            refused(UpSettings { coordinators: Some(6), ..Default::default() }, false).contains("1 to 5")
        );
        assert!(
            refused(UpSettings { threads: Some(0), ..Default::default() }, false).contains("`threads`: 0")
        );
    }

    #[test]
    fn each_server_of_another_engine_has_a_worker() {
        let list = |entries: &[&str]| Some(entries.iter().map(|entry| (*entry).to_owned()).collect());
        let two = UpSettings { engine_url: list(&["http://a:1", "http://b:1"]), ..Default::default() };
        assert_eq!(Plan::new(two.clone(), false, 0).unwrap().workers, 2);
        let off = UpSettings { kv_events: list(&["off"]), ..two.clone() };
        Plan::new(off, false, 0).unwrap();
        for (settings, expected) in [
            (UpSettings { workers: Some(3), ..two.clone() }, "`workers`: 3"),
            (UpSettings { engine_cmd: Some("x".into()), ..two.clone() }, "`engine_cmd`"),
            (UpSettings { shards: Some(2), ..two.clone() }, "`shards`"),
            (UpSettings { kv_events: list(&["a:1"]), ..two.clone() }, "`kv_events`"),
            (UpSettings { kv_events_replay: list(&["off"]), ..two }, "`kv_events_replay`"),
        ] {
            let error = refused(settings, false);
            assert!(error.contains(expected), "{expected}: {error}");
        }
    }

    #[test]
    fn further_models_need_workers_that_take_deployments() {
        let deploy = Some(vec!["gemma3-270m".to_owned()]);
        Plan::new(UpSettings { deploy: deploy.clone(), ..Default::default() }, false, 0).unwrap();
        let engine_url = Some(vec!["http://a:1".to_owned()]);
        let over_servers = UpSettings { deploy: deploy.clone(), engine_url, ..Default::default() };
        assert!(
            refused(over_servers, false).contains("`deploy`: gemma3-270m is refused: not with engine_url")
        );
        let sharded = UpSettings { deploy, shards: Some(2), ..Default::default() };
        assert!(refused(sharded, false).contains("not with several shards"));
    }

    #[test]
    fn coordinators_take_ports_in_a_row() {
        let settings = |http: &str| UpSettings {
            coordinators: Some(2),
            http: http.parse().ok(),
            ops: "127.0.0.1:0".parse().ok(),
            ..Default::default()
        };
        let plan = Plan::new(settings("127.0.0.1:8000"), false, 0).unwrap();
        let ports: Vec<(u16, u16)> =
            plan.coordinators.iter().map(|(http, ops)| (http.port(), ops.port())).collect();
        assert_eq!(ports, [(8000, 0), (8001, 0)]);
        assert!(refused(settings("127.0.0.1:65535"), false).contains("65535"));
    }

    #[test]
    fn our_own_memory_is_seen() {
        assert!(resident_mib(std::process::id()).unwrap() > 0);
        assert_eq!(resident_mib(u32::MAX), None);
    }
}
