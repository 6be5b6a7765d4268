//! A complete coordinator over loopback, with workers that implement the protocol but compute nothing.
#![allow(clippy::unwrap_used)] // a panic is the report

mod agreement;
mod api;
mod audio_sessions;
mod batches;
mod chats;
mod client;
mod dashboard;
mod dialects;
mod edge;
mod encode;
mod fake_sequences;
mod fake_sessions;
mod fake_worker;
mod faults;
mod images;
mod infill;
mod keys;
mod limits;
mod ollama;
mod operations;
mod planning;
mod promises;
mod prompt_scores;
mod sequences;
mod silence;
mod speech;
mod transcribe;
mod websocket;

use client::get;
use dispatch::models::ModelEntry;
use fake_worker::{FakeWorker, Setup};
use kvasir_coordinator::server::Addresses;
use kvasir_coordinator::{Config, Coordinator};
use metadata::{Metadata, Strings, Value};
use model::ModelFile;
use model::gguf::writer::Writer;
use pki::ca::Authority;
use proto::block::ClusterKey;
use proto::ids::{ClusterName, ModelId, NodeId, Role};
use proto::served_model::ModelTask;
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};
use text::Tokenizer;

pub(crate) fn cluster_key() -> ClusterKey {
    ClusterKey([3; 32])
}

/// A running coordinator, and what workers need to join it.
pub(crate) struct Rig {
    pub(crate) at: Addresses,
    coordinator: Option<Coordinator>,
    authority: Authority,
    digest: [u8; 32],
    _dir: tempfile::TempDir,
}

pub(crate) fn any_port() -> SocketAddr {
    ([127, 0, 0, 1], 0).into()
}

impl Rig {
    pub(crate) async fn bare(change: impl FnOnce(&mut Config)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tiny.gguf");
        write_model(&path, TEMPLATE);
        let digest = Tokenizer::from_metadata(ModelFile::open(&path).unwrap().metadata()).unwrap().digest();
        let authority = Authority::new(ClusterName::new("test").unwrap(), SystemTime::now()).unwrap();
        let node = NodeId::new("c1").unwrap();
        let identity =
            authority.issue(Role::Coordinator, node, SystemTime::now()).unwrap().identity().unwrap();
        let entry = ModelEntry { id: ModelId::new("tiny").unwrap(), path };
        let mut config = Config {
            http: any_port(),
            ops: any_port(),
            quic: any_port(),
            models: vec![entry],
            report_every_ms: 20,
            // Test machines stall. Leases have tests of their own.
            suspect_ms: 10_000,
            lease_ms: 60_000,
            drain_s: 10,
            ..Config::default()
        };
        change(&mut config);
        let coordinator = Coordinator::start(config, &identity, cluster_key()).await.unwrap();
        Self { at: coordinator.addresses(), coordinator: Some(coordinator), authority, digest, _dir: dir }
    }

    /// A coordinator with workers `w1`, `w2`, ..., all ready, with a model for generation.
    pub(crate) async fn with_workers<const N: usize>(
        change: impl FnOnce(&mut Config),
    ) -> (Self, [FakeWorker; N]) {
        Self::with_task(ModelTask::Generate, change).await
    }

    /// A coordinator with workers `w1`, `w2`, ..., all ready, with a model for `task`.
    pub(crate) async fn with_task<const N: usize>(
        task: ModelTask,
        change: impl FnOnce(&mut Config),
    ) -> (Self, [FakeWorker; N]) {
        let rig = Self::bare(change).await;
        let mut workers = Vec::new();
        for name in ["w1", "w2", "w3"].into_iter().take(N) {
            workers.push(rig.join_as(Setup { task, ..rig.setup(name, 1) }).await.unwrap());
        }
        (rig, workers.try_into().unwrap_or_else(|_| panic!("{N} workers")))
    }

    pub(crate) fn setup(&self, name: &'static str, epoch: u64) -> Setup {
        Setup {
            name,
            epoch,
            tokenizer_digest: self.digest,
            warm: Vec::new(),
            keeps_events: true,
            task: ModelTask::Generate,
            images: false,
            operations: Vec::new(),
        }
    }

    pub(crate) async fn join(&self, name: &'static str, epoch: u64) -> FakeWorker {
        self.join_as(self.setup(name, epoch)).await.unwrap()
    }

    pub(crate) async fn join_as(&self, setup: Setup) -> Result<FakeWorker, proto::worker::Refusal> {
        let node = NodeId::new(setup.name).unwrap();
        let identity =
            self.authority.issue(Role::Worker, node, SystemTime::now()).unwrap().identity().unwrap();
        FakeWorker::join(setup, &identity, self.at.quic).await
    }

    pub(crate) fn coordinator(&self) -> &Coordinator {
        self.coordinator.as_ref().unwrap()
    }

    pub(crate) async fn stop(mut self) -> bool {
        self.coordinator.take().unwrap().stop().await
    }

    /// A value of `/metrics`, by the start of its line.
    pub(crate) async fn metric(&self, line: &str) -> f64 {
        let text = get(self.at.ops, "/metrics").await.text();
        let value = text.lines().find_map(|l| l.strip_prefix(line)?.trim().parse().ok());
        value.unwrap_or(0.0)
    }

    /// `/admin/v1/cluster`.
    pub(crate) async fn cluster(&self) -> serde_json::Value {
        get(self.at.ops, "/admin/v1/cluster").await.json()
    }
}

/// Waits until `reached` returns `true`.
pub(crate) async fn until(description: &str, mut reached: impl AsyncFnMut() -> bool) {
    let start = Instant::now();
    while !reached().await {
        assert!(start.elapsed() < Duration::from_secs(20), "{description}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

const TEMPLATE: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// Writes a file with a byte tokenizer and a chat template, without weights.
pub(crate) fn write_model(path: &Path, template: &str) {
    write_file(path, model_metadata(template, &[]));
}

pub(crate) fn write_file(path: &Path, metadata: Metadata) {
    let mut file = std::fs::File::create(path).unwrap();
    Writer::new(metadata).unwrap().write(&mut file, |_| Vec::new()).unwrap();
}

/// A byte tokenizer with more control tokens from 260 on, and a chat template.
pub(crate) fn model_metadata(template: &str, more: &[&str]) -> Metadata {
    // Bytes in the notation of byte-level BPE.
    let printable = |b: u32| (33..=126).contains(&b) || (161..=172).contains(&b) || (174..=255).contains(&b);
    let mut others = 256..;
    let mut tokens: Vec<String> = (0..256u32)
        .map(|byte| {
            let code = if printable(byte) { byte } else { others.next().unwrap() };
            char::from_u32(code).unwrap().to_string()
        })
        .collect();
    tokens.extend(
        ["<|im_start|>", "<|im_end|>", "<bos>", "~~"].iter().chain(more).map(|token| (*token).to_owned()),
    );
    let types: Vec<i32> = (0..tokens.len()).map(|id| if id < 256 || id == 259 { 1 } else { 3 }).collect();
    Metadata::from_iter([
        ("general.architecture", Value::from("llama")),
        ("tokenizer.ggml.model", Value::from("gpt2")),
        ("tokenizer.ggml.pre", Value::from("gpt-2")),
        ("tokenizer.ggml.tokens", Value::from(tokens.iter().collect::<Strings>())),
        ("tokenizer.ggml.token_type", Value::from(types)),
        ("tokenizer.ggml.merges", Value::from(["~ ~"].iter().collect::<Strings>())),
        ("tokenizer.ggml.bos_token_id", Value::from(258u32)),
        ("tokenizer.ggml.eos_token_id", Value::from(257u32)),
        ("tokenizer.ggml.add_bos_token", Value::from(true)),
        ("tokenizer.ggml.add_eos_token", Value::from(true)),
        ("tokenizer.chat_template", Value::from(template)),
    ])
}

/// The tokens of a text, without BOS.
pub(crate) fn tokens(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}
