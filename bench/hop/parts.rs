//! A coordinator's computation from a body to a placed request, step by step: one thread, no sockets, the
//! same bodies as in the other rows. Each part has its own models and memos, because a memo changes the cost
//! of repetitions. The sum of the parts is therefore only about the whole.

use super::bodies::{Bodies, Kind};
use anyhow::{Context, anyhow};
use api::auth::{Caller, Keys};
use api::documents::Popularity;
use api::fields::Fields;
use api::images::GivenImages;
use api::plan::{self, GenerationPlan, Sources};
use api::prompt::messages;
use dispatch::models::{ModelEntry, Models, OfferedModel};
use proto::block::{BlockId, ClusterKey};
use proto::event::{KvEvent, KvEventBatch, Medium};
use proto::ids::{Epoch, ModelId, NodeId, RequestId};
use proto::message::PullReport;
use proto::served_model::{ModelTask, ServedModel};
use proto::worker::{LoadReport, WorkerInfo, WorkerState};
use router::balancer::{Action, Balancer, Output, Policy, RouteRequest};
use router::chain_memo::ChainMemo;
use router::table::TableChange;
use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

const EPOCH: Epoch = Epoch(1);
const WORKERS: [&str; 2] = ["w0", "w1"];
const CHAIN_BYTES: usize = 32 << 20;
const CHAT: &[&str] =
    &["messages", "model", "max_tokens", "temperature", "ignore_eos", "stream", "stream_options"];

/// Requests to plan.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The model's file, for its tokenizer and chat template.
    #[arg(long)]
    model_file: PathBuf,
    /// The model's name.
    #[arg(long, default_value = "smollm2-135m")]
    model: String,
    /// Kind of bodies [default: all kinds].
    #[arg(long, value_enum)]
    body: Option<Kind>,
    /// Timed requests, after a warm-up of as many.
    #[arg(long, default_value_t = 400)]
    requests: usize,
}

pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    let kinds = args.body.map_or(vec![Kind::Short, Kind::Prefix, Kind::Rag, Kind::Cold], |kind| vec![kind]);
    for kind in kinds {
        let mut bench = Bench::open(&args)?;
        let mut bodies = Bodies::new(kind, &args.model, 16, true, 1);
        let mut body = String::new();
        let mut times: Vec<Vec<u64>> = PARTS.iter().map(|_| Vec::new()).collect();
        let mut sizes = (0, 0);
        for number in 0..2 * args.requests {
            body.clear();
            bodies.next(&mut body);
            let (parts, tokens) = bench.time_request(body.as_bytes())?;
            if number >= args.requests {
                times.iter_mut().zip(parts).for_each(|(times, took)| times.push(took));
                sizes = (sizes.0 + body.len(), sizes.1 + tokens);
            }
        }
        let (bytes, tokens) = (sizes.0 / args.requests, sizes.1 / args.requests);
        println!("{kind:?}: {bytes} bytes, {tokens} tokens; ns\n{:<10} {:>9} {:>9}", "", "lowest", "median");
        for (name, mut times) in PARTS.iter().zip(times) {
            times.sort_unstable();
            let (lowest, median) = (times.first(), times.get(times.len() / 2));
            println!("{name:<10} {:>9} {:>9}", lowest.context("none")?, median.context("none")?);
        }
    }
    Ok(())
}

const PARTS: [&str; 8] =
    ["plan", "- fields", "- messages", "- render", "- tokens", "names", "place", "events"];

struct Bench {
    models: Models,
    again: Models,
    root: BlockId,
    chains: ChainMemo,
    served: ServedModel,
    caller: Caller,
    popularity: Popularity,
    balancer: Balancer,
    /// For each worker: its reported units, and its last event.
    held: HashMap<NodeId, (HashSet<BlockId>, u64)>,
    /// Advances faster than real time, so that delayed work does not accumulate.
    now: Instant,
    random: u64,
}

impl Bench {
    fn open(args: &Args) -> anyhow::Result<Self> {
        let id = ModelId::new(args.model.as_str())?;
        let entry = ModelEntry { id: id.clone(), path: args.model_file.clone() };
        let open = || Models::open(std::slice::from_ref(&entry), false);
        let models = open()?;
        let served = ServedModel {
            tokenizer_digest: models.only().context("no model")?.tokenizer.digest(),
            id,
            model_digest: [9; 32],
            max_model_len: 1 << 20,
            layers: (0, 30),
            engine: "kvasir".into(),
            hit_tokens: 16,
            numeric_class: "none".into(),
            block_tokens: 16,
            task: ModelTask::Generate,
        };
        let (mut balancer, mut held, now) =
            (Balancer::new(Policy::default()), HashMap::new(), Instant::now());
        for (pid, name) in (1..).zip(WORKERS) {
            let node = NodeId::new(name)?;
            let register = WorkerInfo {
                node: node.clone(),
                epoch: EPOCH,
                pid,
                quic: format!("127.0.0.1:{pid}"),
                ops: "127.0.0.1:1".into(),
                models: vec![served.clone()],
            };
            balancer.change(now, TableChange::Join(register), 1)?;
            let no_events = KvEventBatch { epoch: EPOCH, first_sequence: 1, events: vec![] };
            balancer.replayed(&node, EPOCH, Some(no_events))?;
            held.insert(node, Default::default());
        }
        Ok(Self {
            again: open()?,
            models,
            root: BlockId([1; 16]),
            chains: ChainMemo::new(&ClusterKey([7; 32]), CHAIN_BYTES),
            served,
            // Without keys every caller is accepted.
            caller: Keys::new(&[], ClusterKey([7; 32]), None)?.authenticate(&Default::default())?,
            popularity: Popularity::default(),
            balancer,
            held,
            now,
            random: 1,
        })
    }

    /// Time of each part, and the number of prompt tokens.
    fn time_request(&mut self, body: &[u8]) -> anyhow::Result<([u64; PARTS.len()], usize)> {
        self.step();
        let mut took = Vec::with_capacity(PARTS.len());
        let plan = timed(&mut took, || self.plan(body))?;
        let [(prompt, _)] = plan.prompts.as_slice() else { return Err(anyhow!("not one prompt")) };

        let again: &Arc<OfferedModel> = &self.again.only().context("no model")?;
        let template = again.template.as_ref().context("no chat template")?;
        let fields = timed(&mut took, || Fields::parse(body, CHAT))?;
        let messages = timed(&mut took, || messages(&fields, &mut GivenImages::default()))?;
        let text =
            timed(&mut took, || template.render_marked(&messages, None, true, &serde_json::Map::new()))?;
        let tokens = timed(&mut took, || again.chat(&text, true));
        anyhow::ensure!(tokens == *prompt, "planned otherwise");

        let chain: Arc<[BlockId]> = timed(&mut took, || self.chains.chain_of(self.root, prompt).into());
        let request = RouteRequest {
            request_id: RequestId::new("bench")?,
            tenant: "tenant".into(),
            model: self.served.id.clone(),
            operation: None,
            prompt_tokens: u32::try_from(prompt.len())?,
            chain: Arc::clone(&chain),
            output: Output::default(),
            images: false,
            group: None,
            priority: 0,
            submitted: self.now,
            deadline: self.now + Duration::from_secs(60),
            trace: None,
        };
        let node = timed(&mut took, || self.place(request))?;
        let batch = self.kv_events(&node, &chain);
        timed(&mut took, || self.balancer.events(&node, batch))?;
        Ok((took.try_into().map_err(|_| anyhow!("a part is missing"))?, prompt.len()))
    }

    fn plan(&self, body: &[u8]) -> anyhow::Result<GenerationPlan> {
        let served = |_: &ModelId| Some(self.served.clone());
        let sources = Sources {
            caller: &self.caller,
            models: &self.models,
            served: &served,
            parent: &|_| None,
            seed: 1,
            popularity: &self.popularity,
            fetched: None,
        };
        Ok(plan::generation(plan::Kind::Chat, body, &sources, plan::Effort::Full { counted: false })?)
    }

    /// Advances time and renews the workers' leases.
    fn step(&mut self) {
        self.now += Duration::from_millis(1);
        self.random = self.random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        let report = LoadReport {
            epoch: EPOCH,
            state: WorkerState::Ready,
            running: 0,
            waiting: 0,
            pending_prefill_tokens: 0,
            kv_used: 0,
            kv_total: 1 << 30,
            steps: 1,
            tokens: 0,
            stalled_ms: 0,
            prefill_rate: 1e6,
            step_ms: 0.1,
            exact: true,
            rss: 1,
            pulls: PullReport::default(),
        };
        for node in self.held.keys() {
            self.balancer.load(self.now, node, report.clone(), self.random);
        }
    }

    /// Queues a request and runs it to its end, with periodic work once per request.
    fn place(&mut self, request: RouteRequest) -> anyhow::Result<NodeId> {
        let (tickets, actions) = self.balancer.submit(self.now, &[Arc::new(request)], self.random)?;
        let node = actions.into_iter().find_map(|action| match action {
            Action::Assign(_, assignment) => Some(assignment.node),
            _ => None,
        });
        for ticket in tickets {
            self.balancer.started(self.now, ticket, self.random);
            self.balancer.ended(self.now, ticket, self.random);
        }
        self.balancer.tick(self.now, self.random);
        node.context("no worker")
    }

    /// A worker's KV events for a computed prompt.
    fn kv_events(&mut self, node: &NodeId, chain: &[BlockId]) -> KvEventBatch {
        let (held, sequence) = self.held.entry(node.clone()).or_default();
        let held_units = chain.iter().take_while(|unit| held.contains(*unit)).count();
        let (before, new) = chain.split_at(held_units);
        held.extend(new);
        let parent = before.last().copied().unwrap_or(self.root);
        let events = vec![KvEvent::Stored { parent, units: new.to_vec(), medium: Medium::Device }];
        *sequence += 1;
        KvEventBatch { epoch: EPOCH, first_sequence: *sequence, events }
    }
}

fn timed<T>(took: &mut Vec<u64>, operation: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let made = operation();
    took.push(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX));
    made
}
