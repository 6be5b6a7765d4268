//! Models, prompts, and a sink that records everything.

use engine::decoder::StateType;
use engine::engine::{Engine, EngineRequest, Sink, StepOutcome};
use engine::grammar::Guide;
use engine::pull::Source;
use engine::scheduler::SeqId;
use kernels::backend::{ActivationMode, Backend, KvType, KvTypes};
use kvasir_worker::Error;
use kvasir_worker::load::{self, EngineOptions};
use proto::block::BlockId;
use proto::message::{
    Finished, GenerateError, GenerateFrame, PromptLogprob, PromptLogprobs, Sampling, Started, Stop,
    TenantShare, TokenLogprobs,
};
use proto::sequence::SequenceName;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// Whether a test runs its whole matrix of cases, as in `./test matrices`. Otherwise it runs a sample.
pub(crate) fn whole_matrix() -> bool {
    std::env::var_os("KVASIR_WHOLE_MATRIX").is_some()
}

/// Models of exact weights, by folder: full attention, a mixture of experts, sliding windows, windows with
/// sinks, layers that share KV, delta nets, Mamba-2, attention beside Mamba-2, short convolutions. With `+bf16`
/// some heads have their states in bfloat16.
pub(crate) const TINY: [&str; 12] = [
    "tiny/llama/llama-f32",
    "tiny/qwen3moe/qwen3moe-f32",
    "tiny/gemma3/gemma3-f32",
    "tiny/gpt-oss/gpt-oss-f32",
    "tiny/gemma4/gemma4-f32",
    "tiny/qwen35/qwen35-f32",
    "tiny/granitehybrid/granitehybrid-f32",
    "hf/falcon_h1",
    "hf/lfm2_moe",
    "tiny/qwen35/qwen35-f32+bf16",
    "tiny/granitehybrid/granitehybrid-f32+bf16",
    "tiny/gemma3/gemma3-f32+kv:q4_0/fp8",
];
pub(crate) const QUANT: [&str; 2] = ["quant/qwen3-q/qwen3-q-q4_k_m", "quant/qwen3moe-q/qwen3moe-q-mxfp4_moe"];

/// Suffix of a model's name for states of both types in every recurrent layer.
const NARROW: &str = "+bf16";
/// Suffix of a model's name for types of keys and values, as in `+kv:q8_0/q4_0`.
const CACHED: &str = "+kv:";

/// Root of all requests.
pub(crate) const ROOT: BlockId = BlockId([7; 16]);

/// The file or folder of a model of the set.
pub(crate) fn path(model: &str) -> PathBuf {
    let named = std::env::var_os("KVASIR_FIXTURES").map(PathBuf::from);
    let root = named.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures"));
    let model = model.split('+').next().unwrap();
    root.join(if model.starts_with("hf/") { model.to_owned() } else { format!("{model}.gguf") })
}

fn kv_types(model: &str) -> Option<KvTypes> {
    let (k, v) = model.split_once(CACHED)?.1.split_once('/')?;
    let [k, v] = [k, v].map(|name| KvType::from_name(name).unwrap());
    Some(KvTypes { k, v })
}

/// Options: exact arithmetic for F32 models, the default for the others; one thread, and room for everything.
pub(crate) fn options(model: &str) -> EngineOptions {
    let exact = model.starts_with("tiny/") || model.starts_with("hf/");
    EngineOptions {
        threads: Some(1),
        kv_type: kv_types(model).unwrap_or(KvTypes::both(if exact { KvType::F32 } else { KvType::F16 })),
        activations: if exact { ActivationMode::F32 } else { ActivationMode::Int8 },
        state_type: if model.ends_with(NARROW) { StateType::AutoBf16 { tau: 4 } } else { StateType::F32 },
        kv_bytes: Some(16 << 20),
        chunk: Some(64),
        max_rows: Some(1024),
        max_sequences: Some(16),
        ..EngineOptions::default()
    }
}

/// Loads an engine on the CPU.
pub(crate) fn open(model: &str, options: &EngineOptions) -> Engine {
    load::open(&path(model), options, &mut |_, _| {}).unwrap().engine
}

/// Loads an engine on a device.
pub(crate) fn open_on(model: &str, options: &EngineOptions, device: Box<dyn Backend>) -> Engine {
    load::open_on(&path(model), options, device, &mut |_, _| {}).unwrap().engine
}

/// `options` with an arena that holds one sequence of `tokens` tokens and little more.
pub(crate) fn cramped(model: &str, options: &EngineOptions, tokens: usize) -> EngineOptions {
    let block: u64 =
        open(model, options).decoder().groups().iter().map(|group| group.block_bytes as u64).sum();
    let fits = |blocks: &u64| {
        let options = EngineOptions { kv_bytes: Some(blocks * block), ..options.clone() };
        match load::open(&path(model), &options, &mut |_, _| {}) {
            Ok(loaded) => loaded.max_model_len >= tokens,
            // An arena that holds no sequence is refused.
            Err(Error::Engine(engine::Error::KvMemory { .. })) => false,
            Err(error) => panic!("{model}: {error}"),
        }
    };
    let blocks = (1..1000).find(fits).unwrap();
    EngineOptions { kv_bytes: Some(blocks * block), ..options.clone() }
}

/// `len` tokens of a vocabulary that every model of the set has, different for each seed.
pub(crate) fn prompt(seed: u64, len: usize) -> Vec<u32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        4 + (state >> 33) as u32 % 360
    };
    (0..len).map(next).collect()
}

/// Everything that the sink of a request received.
#[derive(Debug, Clone, Default)]
pub(crate) struct Output {
    /// Bits of the logits at each position.
    pub(crate) logits: BTreeMap<usize, Vec<u32>>,
    /// Number of logit rows. A position that was computed twice counts twice.
    pub(crate) rows: usize,
    pub(crate) started: Option<Started>,
    /// Log-probabilities of the prompt's tokens, from the second one on.
    pub(crate) prompt: Vec<PromptLogprob>,
    pub(crate) tokens: Vec<u32>,
    pub(crate) logprobs: Vec<TokenLogprobs>,
    pub(crate) text: String,
    pub(crate) finished: Option<Finished>,
    pub(crate) failed: Option<GenerateError>,
}

impl Output {
    /// Tokens served by the prefix cache.
    pub(crate) fn cached(&self) -> usize {
        self.started.as_ref().unwrap().cached_tokens as usize
    }

    pub(crate) fn preemptions(&self) -> u32 {
        self.finished.as_ref().unwrap().preemptions
    }
}

/// A request of a test.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) name: Option<SequenceName>,
    pub(crate) prompt: Vec<u32>,
    pub(crate) emitted: Vec<u32>,
    pub(crate) sampling: Sampling,
    pub(crate) stop: Stop,
    /// Whether the sink receives all logits, or tokens only.
    pub(crate) logits: bool,
    pub(crate) prompt_logprobs: Option<PromptLogprobs>,
    /// Number of requests for its prompt that arrive together.
    pub(crate) together: u32,
}

impl Request {
    /// Greedy, exactly `max_tokens` tokens, all logits.
    pub(crate) fn greedy(prompt: Vec<u32>, max_tokens: u32) -> Self {
        Self {
            name: None,
            prompt,
            emitted: Vec::new(),
            sampling: Sampling::default(),
            stop: Stop { max_tokens, ignore_eos: true, ..Stop::default() },
            logits: true,
            prompt_logprobs: None,
            together: 1,
        }
    }

    /// With a name, as from a coordinator.
    pub(crate) fn named(self, name: SequenceName) -> Self {
        Self { name: Some(name), ..self }
    }

    /// With the log-probabilities of its prompt, and tokens only.
    pub(crate) fn scored(self, top: u8) -> Self {
        Self { prompt_logprobs: Some(PromptLogprobs { top }), logits: false, ..self }
    }

    /// Tokens only, as from a server.
    pub(crate) fn tokens_only(self) -> Self {
        Self { logits: false, ..self }
    }
}

pub(crate) struct RecordingSink {
    pub(crate) wants_logits: bool,
    pub(crate) output: Arc<Mutex<Output>>,
}

impl Sink for RecordingSink {
    fn frame(&mut self, frame: GenerateFrame) -> bool {
        let mut output = self.output.lock().unwrap();
        match frame {
            GenerateFrame::Started(started) => output.started = Some(started),
            GenerateFrame::Tokens(tokens) => {
                for token in tokens {
                    output.tokens.push(token.id);
                    output.text.push_str(&token.text);
                    output.logprobs.extend(token.logprobs);
                }
            }
            GenerateFrame::Prompt(logprobs) => {
                assert!(output.started.is_none(), "the prompt's log-probabilities precede the start");
                output.prompt.extend(logprobs);
            }
            GenerateFrame::Finished(finished) => {
                output.text.push_str(&finished.tail);
                output.finished = Some(finished);
            }
            GenerateFrame::Failed(error) => output.failed = Some(error),
        }
        true
    }

    fn wants_logits(&self) -> bool {
        self.wants_logits
    }

    /// A position that is computed again after preemption must give the same bits.
    fn logits(&mut self, position: usize, row: &[f32]) {
        let bits: Vec<u32> = row.iter().map(|value| value.to_bits()).collect();
        assert!(row.iter().all(|value| value.is_finite()), "position {position}");
        let mut output = self.output.lock().unwrap();
        output.rows += 1;
        if let Some(before) = output.logits.insert(position, bits.clone()) {
            assert!(before == bits, "position {position} has other logits when it is computed again");
        }
    }
}

/// A submitted request: its id if it was accepted, and what its sink received.
pub(crate) struct Submitted {
    pub(crate) id: Option<SeqId>,
    output: Arc<Mutex<Output>>,
}

impl Submitted {
    pub(crate) fn output(&self) -> Output {
        self.output.lock().unwrap().clone()
    }
}

pub(crate) fn submit(engine: &mut Engine, request: &Request) -> Submitted {
    submit_at(engine, request, Instant::now(), None)
}

/// Submits a request at `now`, with a deadline.
pub(crate) fn submit_at(
    engine: &mut Engine,
    request: &Request,
    now: Instant,
    deadline: Option<std::time::Duration>,
) -> Submitted {
    submit_with(engine, request, (now, deadline), None, None)
}

/// Submits a request whose prefix another worker probably holds.
pub(crate) fn submit_pulling(engine: &mut Engine, request: &Request, source: Box<dyn Source>) -> Submitted {
    submit_with(engine, request, (Instant::now(), None), Some(source), None)
}

/// Submits a request with a grammar.
pub(crate) fn submit_guided(engine: &mut Engine, request: &Request, guide: Guide) -> Submitted {
    submit_with(engine, request, (Instant::now(), None), None, Some(guide))
}

fn submit_with(
    engine: &mut Engine,
    request: &Request,
    (now, deadline): (Instant, Option<std::time::Duration>),
    pull: Option<Box<dyn Source>>,
    guide: Option<Guide>,
) -> Submitted {
    let output = Arc::new(Mutex::new(Output::default()));
    let engine_request = EngineRequest {
        name: request.name.clone(),
        root: ROOT,
        adapter: None,
        tenant: TenantShare::of_root(ROOT),
        prompt: request.prompt.clone(),
        images: Vec::new(),
        emitted: request.emitted.clone(),
        prompt_logprobs: request.prompt_logprobs,
        sampling: request.sampling.clone(),
        stop: request.stop.clone(),
        deadline,
        pull,
        together: request.together,
        guide,
        sink: Box::new(RecordingSink { wants_logits: request.logits, output: output.clone() }),
    };
    Submitted { id: engine.submit(now, engine_request), output }
}

/// Steps until no work is left.
pub(crate) fn run_to_end(engine: &mut Engine) {
    while engine.has_work() {
        let outcome = engine.step(Instant::now()).unwrap();
        assert!(outcome != StepOutcome::Idle || !engine.has_work(), "work is left but nothing is planned");
    }
    engine.check().unwrap();
}

/// Runs all requests at once to the end.
pub(crate) fn together(engine: &mut Engine, requests: &[Request]) -> Vec<Output> {
    let submitted: Vec<Submitted> = requests.iter().map(|request| submit(engine, request)).collect();
    run_to_end(engine);
    submitted.iter().map(Submitted::output).collect()
}

/// Runs one request after the other.
pub(crate) fn one_by_one(engine: &mut Engine, requests: &[Request]) -> Vec<Output> {
    requests.iter().map(|request| together(engine, std::slice::from_ref(request)).remove(0)).collect()
}
