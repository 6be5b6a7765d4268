//! An engine controlled by lines on stdin, with the whole model or as the first stage of a replica whose
//! other stages it starts as processes; see `run.py` in this directory.
//!
//! A line `STREAMS PROMPT TOKENS` computes STREAMS prompts of PROMPT tokens at once and generates TOKENS
//! tokens for each. The response is one line of JSON. Speed does not depend on the tokens, so they are
//! arbitrary.

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use engine::engine::{Engine, EngineRequest, StepOutcome};
use engine::telemetry::StageLabel;
use pipeline::Replica;
use pki::ca::Authority;
use proto::block::{BlockId, ClusterKey, Scope, TenantSalt};
use proto::ids::{ClusterName, NodeId, Role};
use proto::message::{GenerateFrame, Sampling, Stop, TenantShare};
use proto::stage::{ActivationType, StageAddress};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Sender, channel};
use std::time::{Instant, SystemTime};
use tokio::runtime::{Builder, Runtime};
use worker::load::{self, EngineOptions};

mod wire;

/// The same allocator as `kvasir`: another one would use other pages for large buffers.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Engines with stages, and the cost of their connections
#[derive(Debug, Parser)]
enum Tool {
    /// Run an engine
    Engine(Args),
    /// Measure the cost of a byte between stages
    Wire {
        /// Steps to send
        #[arg(long, default_value_t = 4000)]
        steps: usize,
        /// Rows per step
        #[arg(long, default_value_t = 128)]
        rows: usize,
        /// Pairs of endpoints, which send the steps at the same time
        #[arg(long, default_value_t = 1)]
        lanes: usize,
        /// Threads that move the bytes [default: one for one lane, else as many as there are CPUs]
        #[arg(long)]
        threads: Option<usize>,
    },
}

#[derive(Debug, clap::Args)]
struct Args {
    /// The model's file
    model: PathBuf,
    /// The kvasir binary
    #[arg(long, default_value = "target/release/kvasir")]
    kvasir: PathBuf,
    /// CPU of each later stage; their number is the number of later stages. The caller pins this process
    #[arg(long, value_delimiter = ',')]
    cpus: Vec<usize>,
}

/// Processes of the later stages.
struct Stages(Vec<Child>);

impl Drop for Stages {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // It may have exited already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn main() -> Result<()> {
    match Tool::parse() {
        // One thread moves the bytes, and shares a CPU with the computing one.
        Tool::Engine(args) => engine(&args, &runtime(1)?),
        Tool::Wire { steps, rows, lanes, threads } => {
            let threads = threads.unwrap_or_else(|| wire::threads(lanes));
            println!("{}", runtime(threads)?.block_on(wire::run(steps, rows, lanes))?);
            Ok(())
        }
    }
}

fn runtime(threads: usize) -> std::io::Result<Runtime> {
    Builder::new_multi_thread().worker_threads(threads.max(1)).enable_all().build()
}

fn engine(args: &Args, runtime: &Runtime) -> Result<()> {
    let options =
        EngineOptions { threads: Some(1), workers: args.cpus.len() + 1, ..EngineOptions::default() };
    let dir = tempfile::tempdir()?;
    let (stages, replica) = start(args, runtime, dir.path())?;
    let model = args.model.as_path();
    let loaded = match replica {
        None => load::open(model, &options, &mut |_, _| {})?,
        Some(replica) => load::open_replica(model, &options, replica, &mut |_, _| {})?,
    };
    let mut engine = loaded.engine;
    engine.bind_thread();
    println!("{}", json!({"stages": args.cpus.len() + 1}));
    let mut salt = 0;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let numbers: Vec<usize> = line.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
        let [streams, prompt, tokens] = numbers[..] else { bail!("{line:?} is not STREAMS PROMPT TOKENS") };
        let result = run(&mut engine, &mut salt, streams, prompt, tokens)?;
        println!("{result}");
        std::io::stdout().flush()?;
    }
    drop(engine);
    drop(stages);
    Ok(())
}

fn start(args: &Args, runtime: &Runtime, dir: &std::path::Path) -> Result<(Stages, Option<Replica>)> {
    let mut stages = Stages(Vec::new());
    if args.cpus.is_empty() {
        return Ok((stages, None));
    }
    let ca = Authority::new(ClusterName::new("bench")?, SystemTime::now())?;
    let mut addresses = Vec::new();
    for (index, cpu) in args.cpus.iter().enumerate() {
        let node = NodeId::new(format!("stage-{}", index + 1))?;
        let identity = dir.join(node.as_str());
        ca.issue(Role::Worker, node.clone(), SystemTime::now())?.save(&identity)?;
        let mut command = Command::new("taskset");
        command.args(["-c", &cpu.to_string()]).arg(&args.kvasir).arg("stage").arg(&args.model);
        command.args(["--threads", "1", "--quic", "127.0.0.1:0", "--identity"]).arg(&identity);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
        let stdout = child.stdout.take().context("a stage without stdout")?;
        stages.0.push(child);
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line)?;
        let message: Value = serde_json::from_str(&line).context("a stage's first line")?;
        let quic = message["quic"].as_str().context("a stage that does not say where it listens")?;
        addresses.push(StageAddress { node, quic: quic.to_owned() });
    }
    let own = ca.issue(Role::Worker, NodeId::new("stage-0")?, SystemTime::now())?.identity()?;
    let replica = Replica::new(runtime.handle().clone(), &own, addresses, ActivationType::F32)?;
    Ok((stages, Some(replica)))
}

/// Time at which a stream received a token.
struct Token {
    at: Instant,
    first: bool,
    last: bool,
}

fn request(prompt: Vec<u32>, tokens: usize, root: BlockId, sender: Sender<Token>) -> EngineRequest {
    let mut count = 0;
    let sink = move |frame: GenerateFrame| {
        if let GenerateFrame::Tokens(new) = frame {
            let at = Instant::now();
            for _ in new {
                count += 1;
                // The receiver outlives the engine's work.
                let _ = sender.send(Token { at, first: count == 1, last: count == tokens });
            }
        }
        true
    };
    EngineRequest {
        name: None,
        root,
        adapter: None,
        tenant: TenantShare::of_root(root),
        prompt,
        images: Vec::new(),
        emitted: Vec::new(),
        prompt_logprobs: None,
        sampling: Sampling::default(),
        stop: Stop { max_tokens: tokens as u32, ignore_eos: true, ..Stop::default() },
        deadline: None,
        pull: None,
        together: 1,
        guide: None,
        sink: Box::new(sink),
    }
}

fn run(engine: &mut Engine, salt: &mut u32, streams: usize, prompt: usize, tokens: usize) -> Result<Value> {
    ensure!(streams > 0 && prompt > 0 && tokens > 0, "at least one stream of a token");
    let vocab = engine.decoder().spec().vocab as u32;
    let root = ClusterKey([0; 32]).root(Scope {
        salt: &TenantSalt([0; 32]),
        model_digest: b"bench",
        tokenizer_digest: b"bench",
        adapter: b"",
    });
    let (sender, receiver) = channel();
    let start = Instant::now();
    for _ in 0..streams {
        *salt += 1;
        let first = *salt;
        let prompt = (0..prompt as u32).map(|i| (i * 7919 + first * 104_729 + 11) % vocab).collect();
        engine.submit(Instant::now(), request(prompt, tokens, root, sender.clone()));
    }
    drop(sender);
    let mut times: Vec<Token> = Vec::with_capacity(streams * tokens);
    let mut prompts = Vec::new();
    while engine.has_work() {
        if engine.step(Instant::now())? == StepOutcome::Idle && engine.has_work() {
            bail!("internal error: the scheduler has work but planned an empty step");
        }
        let seen = times.len();
        times.extend(receiver.try_iter());
        if times[seen..].iter().any(|token| token.first) {
            prompts = busy_seconds(engine);
        }
    }
    ensure!(times.len() == streams * tokens, "{} tokens of {}", times.len(), streams * tokens);
    let all_in = times.iter().filter(|token| token.first).map(|token| token.at).max().unwrap_or(start);
    let first_end = times.iter().filter(|token| token.last).map(|token| token.at).min().unwrap_or(start);
    let prefill = (streams * prompt) as f64 / (all_in - start).as_secs_f64();
    // While all streams decode.
    let decoded = times.iter().filter(|token| token.at > all_in && token.at <= first_end).count();
    let decode = decoded as f64 / first_end.saturating_duration_since(all_in).as_secs_f64().max(1e-9);
    // Since all prompts were computed.
    let busy: Vec<f64> =
        busy_seconds(engine).iter().zip(prompts).map(|(after, before)| after - before).collect();
    Ok(json!({
        "prefill": prefill, "decode": if tokens > 8 { Some(decode) } else { None },
        "busy": busy,
    }))
}

/// Compute seconds of each stage so far; empty for a whole model.
fn busy_seconds(engine: &Engine) -> Vec<f64> {
    let busy = &engine.metrics().shards.busy;
    (0..).map_while(|stage| busy.get(&StageLabel { stage }).map(|seconds| seconds.get())).collect()
}
