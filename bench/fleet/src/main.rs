//! Simulates routing policies with many workers.
//!
//! Real: the coordinator's preparation of bodies, its [`Balancer`](router::balancer::Balancer), and the
//! workers' scheduler and cache with their events. Simulated: step times, from measurements of `kvasir
//! bench`, and message latency. The other routers are modelled on their sources.

mod node;
mod pulls;
mod rates;
mod report;
mod routers;
mod simulation;
mod traffic;
mod tree;

use anyhow::{Context, Result};
use clap::Parser;
use node::{Build, Node};
use pulls::PullRates;
use rates::Rates;
use report::{Against, Row};
use router::routing::Routing;
use routers::{CacheAware, Kvasir, Peer, Router};
use simulation::{Arrivals, Outcome, Setting};
use std::path::PathBuf;
use std::time::Duration;
use traffic::{Prompt, Traffic};

/// Replays RAG traffic before simulated workers and prints JSON, one line for each run.
#[derive(Debug, Parser)]
struct Arguments {
    /// The model's file, for its tokenizer and chat template.
    #[arg(long)]
    gguf: PathBuf,
    /// Output of `bench/rag/traffic.py`.
    #[arg(long)]
    traffic: PathBuf,
    /// Output of `kvasir bench --json`, or an array of several that ran at once.
    #[arg(long)]
    rates: PathBuf,
    /// The bench's `-n`.
    #[arg(long, default_value_t = 32.0)]
    decoded: f64,
    /// Numbers of workers of the simulated fleets.
    #[arg(long, value_delimiter = ',', default_value = "2,4,16,64")]
    workers: Vec<usize>,
    /// Offered load, as a share of the requests that the fleet could prefill without any cache.
    #[arg(long, value_delimiter = ',', default_value = "0.5,0.8,0.95")]
    loads: Vec<f64>,
    /// Questions per worker, if the traffic has enough.
    #[arg(long, default_value_t = 60)]
    questions: usize,
    /// KV memory of each worker in MiB.
    #[arg(long, default_value_t = 512)]
    kv_mib: u64,
    /// Prompt rows per step.
    #[arg(long, default_value_t = 448)]
    chunk: u32,
    /// Tokens of an answer.
    #[arg(long, default_value_t = 4)]
    out: u32,
    /// One-way latency between client and worker in milliseconds.
    #[arg(long, default_value_t = 1.0)]
    hop_ms: f64,
    /// Layers of the model.
    #[arg(long, default_value_t = 30)]
    layers: u32,
    /// Rate of a pull in MB per second, as measured by workers.
    #[arg(long, default_value_t = 300.0)]
    pull_mbps: f64,
    /// Additional time of a pull in milliseconds.
    #[arg(long, default_value_t = 10.0)]
    pull_ms: f64,
    /// Run only these, such as `prefix-by_rank,smg`: policy and form of the prompt, or router.
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Simulate the runs of this file of `bench/rag/replay.py` instead, and print the errors of the
    /// simulation.
    #[arg(long)]
    against: Option<PathBuf>,
}

/// A router with a form of the prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Contender {
    Kvasir(Routing),
    KvasirDocuments,
    CacheAware(Peer),
}

const CONTENDERS: [Contender; 6] = [
    Contender::Kvasir(Routing::Prefix),
    Contender::KvasirDocuments,
    Contender::Kvasir(Routing::LeastLoad),
    Contender::Kvasir(Routing::RoundRobin),
    Contender::CacheAware(Peer::Sglang),
    Contender::CacheAware(Peer::Smg),
];

impl Contender {
    /// Router, policy and form of the prompt, named as in `bench/rag/replay.py`.
    fn names(self) -> [&'static str; 3] {
        match self {
            Self::Kvasir(Routing::Prefix) => ["kvasir", "prefix", "by_rank"],
            Self::Kvasir(Routing::LeastLoad) => ["kvasir", "least-load", "by_rank"],
            Self::Kvasir(Routing::RoundRobin) => ["kvasir", "round-robin", "by_rank"],
            Self::KvasirDocuments => ["kvasir", "prefix", "by_popularity"],
            Self::CacheAware(Peer::Sglang) => ["sglang-router", "cache_aware", "by_rank"],
            Self::CacheAware(Peer::Smg) => ["smg", "cache_aware", "by_rank"],
        }
    }

    fn is_in(self, only: &[String]) -> bool {
        let [router, policy, prompt] = self.names();
        only.is_empty() || only.iter().any(|name| *name == router || *name == format!("{policy}-{prompt}"))
    }

    /// Prompt tokens that one unbounded cache would compute.
    fn ideal_prefill(self, traffic: &Traffic, questions: usize) -> u64 {
        traffic::computed_once(self.prompts(traffic, questions).iter().copied())
    }

    fn prompts(self, traffic: &Traffic, questions: usize) -> Vec<&Prompt> {
        let questions = traffic.questions.iter().take(questions);
        match self {
            Self::KvasirDocuments => questions.map(|question| &question.by_popularity).collect(),
            _ => questions.map(|question| &question.by_rank).collect(),
        }
    }

    fn run(self, setting: Setting, traffic: &Traffic, questions: usize) -> Result<Outcome> {
        let workers = setting.workers;
        let mut router: Box<dyn Router> = match self {
            Self::Kvasir(routing) => Box::new(kvasir(routing, setting, traffic)?),
            Self::KvasirDocuments => Box::new(kvasir(Routing::Prefix, setting, traffic)?),
            Self::CacheAware(peer) => Box::new(CacheAware::new(peer, workers)),
        };
        let prompts = self.prompts(traffic, questions);
        simulation::run(setting, router.as_mut(), &prompts, traffic.root)
    }
}

fn kvasir(routing: Routing, setting: Setting, traffic: &Traffic) -> Result<Kvasir> {
    let report = Node::new(setting.build)?.report();
    let build = &setting.build;
    Kvasir::new(
        routing,
        &traffic.model,
        setting.workers,
        &report,
        &build.pulls,
        build.rates.kv_bytes_per_token,
        setting.out,
    )
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let rates = Rates::read(&arguments.rates, arguments.decoded)?;
    eprintln!("{rates:?}");
    let pulls = PullRates {
        bytes_per_second: arguments.pull_mbps * 1e6,
        overhead: arguments.pull_ms / 1e3,
        copied_per_second: 1e9,
    };
    let build = Build {
        kv_bytes: arguments.kv_mib << 20,
        chunk: arguments.chunk,
        max_seqs: 64,
        layers: arguments.layers,
        rates,
        pulls,
    };
    let base = Setting {
        workers: 1,
        build,
        arrivals: Arrivals::Closed(1),
        out: arguments.out,
        hop: Duration::try_from_secs_f64(arguments.hop_ms / 1e3).context("--hop-ms")?,
        report_every: Duration::from_millis(250),
    };
    match &arguments.against {
        Some(path) => against(&Against::read(path)?, base, &arguments),
        None => sweep(base, &arguments),
    }
}

fn sweep(base: Setting, arguments: &Arguments) -> Result<()> {
    let max_questions = arguments.workers.iter().max().copied().unwrap_or(0) * arguments.questions;
    let traffic = Traffic::read(&arguments.traffic, &arguments.gguf, arguments.layers, max_questions)?;
    let tokens = traffic.mean_tokens();
    let alone = base.build.rates.prompt(tokens, f64::from(base.build.chunk));
    for &workers in &arguments.workers {
        let questions = (workers * arguments.questions).min(traffic.questions.len());
        for &load in &arguments.loads {
            let setting =
                Setting { workers, arrivals: Arrivals::Open(load * workers as f64 / alone), ..base };
            for contender in CONTENDERS.into_iter().filter(|contender| contender.is_in(&arguments.only)) {
                let outcome = contender.run(setting, &traffic, questions)?;
                let ideal_prefill = contender.ideal_prefill(&traffic, questions);
                Row::new(contender.names(), workers, load, questions, ideal_prefill, &outcome).print()?;
            }
        }
    }
    Ok(())
}

/// Simulates the questions, clients and workers of each real run.
fn against(real: &[Against], base: Setting, arguments: &Arguments) -> Result<()> {
    let max_questions = real.iter().map(|run| run.questions).max().unwrap_or(0);
    let traffic = Traffic::read(&arguments.traffic, &arguments.gguf, arguments.layers, max_questions)?;
    for run in real {
        let contender = CONTENDERS.into_iter().find(|contender| contender.names() == run.names());
        let contender = contender.with_context(|| format!("who is {:?}", run.names()))?;
        let arrivals = Arrivals::Closed(run.concurrency);
        let build = Build { kv_bytes: run.kv_bytes, ..base.build };
        let setting = Setting { workers: run.workers, arrivals, out: run.out, build, ..base };
        let outcome = contender.run(setting, &traffic, run.questions)?;
        run.compare(contender.ideal_prefill(&traffic, run.questions), &outcome).print()?;
    }
    Ok(())
}
