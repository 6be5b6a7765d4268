//! Prefixes are pulled from another engine without changing a bit. What does not arrive is computed.

use crate::harness::{
    Output, ROOT, Request, Submitted, cramped, one_by_one, open, options, prompt, submit, submit_pulling,
};
use crate::tiers::{disk, pieces};
use engine::engine::{Engine, StepOutcome};
use engine::pieces::Namer;
use engine::pull::{PullDelivery, PullFailure, PullOrder, Source};
use engine::telemetry::Direction;
use engine::tiers::TiersConfig;
use kvasir_worker::load::EngineOptions;
use proto::pull::PulledPiece;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// One model for every kind of cache: full, sliding (also with sinks), delta net and Mamba-2 states.
const KINDS: [&str; 8] = [
    "tiny/llama/llama-f32",
    "tiny/gemma3/gemma3-f32",
    "tiny/gpt-oss/gpt-oss-f32",
    "tiny/qwen35/qwen35-f32",
    "tiny/granitehybrid/granitehybrid-f32",
    "hf/falcon_h1",
    "hf/lfm2_moe",
    "tiny/qwen35/qwen35-f32+bf16",
];
const LLAMA: &str = KINDS[0];
const PROMPT: usize = 200;
const GENERATE: u32 = 12;

pub(crate) type Shared = Arc<Mutex<Engine>>;

/// A source that delivers at once what an engine offers, or a part of it.
pub(crate) struct Direct {
    holder: Shared,
    tokens: u32,
    /// Number of delivered pieces. Then the holder dies.
    max_pieces: usize,
    /// Keeps the delivery here so that it never ends.
    hang: Option<Arc<Mutex<Vec<PullDelivery>>>>,
}

impl Direct {
    pub(crate) fn from(holder: &Shared) -> Self {
        Self { holder: Arc::clone(holder), tokens: PROMPT as u32, max_pieces: usize::MAX, hang: None }
    }
}

impl Source for Direct {
    fn tokens(&self) -> u32 {
        self.tokens
    }

    fn fetch(self: Box<Self>, order: PullOrder, delivery: PullDelivery) {
        let mut holder = self.holder.lock().unwrap();
        let request = order.request();
        let offer =
            match holder.kv_sender().offer(&request.origin, request.root, &request.tokens, request.have) {
                Ok(offer) => offer,
                Err(_) => return delivery.end(Err(PullFailure::Refused)),
            };
        let prefix = &request.tokens[..offer.tokens as usize];
        let names = Namer::new(&holder.origin()).unwrap().names(request.root, prefix);
        for piece in offer.pieces.iter().take(self.max_pieces) {
            let bytes = holder
                .kv_sender()
                .copy_pieces(request.root, prefix, std::slice::from_ref(piece))
                .unwrap()
                .remove(0)
                .read();
            // Its file is damaged.
            let Some(bytes) = bytes else { return delivery.end(Err(PullFailure::Refused)) };
            let (group, end, _) = *piece;
            let digest = names.piece(group as usize, end).unwrap().digest(&bytes);
            let head = PulledPiece { group, end, bytes: bytes.len() as u32, digest };
            assert_eq!(order.length(&head), Some(bytes.len()));
            assert!(order.is_sound(&head, &bytes));
            delivery.piece(&head, bytes);
        }
        match self.hang {
            Some(hang) => hang.lock().unwrap().push(delivery),
            None if offer.pieces.len() > self.max_pieces => drop(delivery),
            None => {
                delivery.travelled(order.bytes(), Duration::from_millis(1));
                delivery.end(Ok(()));
            }
        }
    }
}

fn base_request() -> Request {
    Request::greedy(prompt(1, PROMPT), GENERATE)
}

pub(crate) fn patient(model: &str, block_tokens: usize) -> EngineOptions {
    EngineOptions { block_tokens, pull_timeout: Some(Duration::from_secs(60)), ..options(model) }
}

/// An engine that has computed these requests.
fn holder(model: &str, block_tokens: usize, requests: &[Request]) -> Shared {
    let mut engine = open(model, &patient(model, block_tokens));
    one_by_one(&mut engine, requests);
    Arc::new(Mutex::new(engine))
}

fn undisturbed(model: &str, request: &Request) -> Output {
    let options = EngineOptions { prefix_cache: false, chunk: Some(0), ..options(model) };
    one_by_one(&mut open(model, &options), std::slice::from_ref(request)).remove(0)
}

/// Steps until no work is left. Requests may wait for a pull meanwhile.
pub(crate) fn finish(engine: &mut Engine) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while engine.has_work() {
        if engine.step(Instant::now()).unwrap() == StepOutcome::Idle {
            assert!(Instant::now() < deadline, "it waits for ever");
            std::thread::yield_now();
        }
    }
}

/// Checks for the same tokens, and the same bits at every position with logits. No block may be held.
fn assert_same(case: &str, engine: &Engine, submitted: &Submitted, expected: &Output) -> Output {
    let output = submitted.output();
    assert_eq!(output.failed, None, "{case}");
    assert_eq!(output.tokens, expected.tokens, "{case}");
    assert_eq!(output.logits.len(), expected.logits.len() - output.cached(), "{case}");
    for (position, row) in &output.logits {
        assert!(*row == expected.logits[position], "{case}: logits at {position} differ");
    }
    assert_eq!(engine.load().kv_used, 0, "{case}");
    assert_eq!(engine.load().waiting, 0, "{case}");
    engine.check().unwrap();
    output
}

fn lookup(output: &Output) -> &str {
    &output.started.as_ref().unwrap().hit_stop
}

#[test]
fn a_pulled_prefix_gives_the_bits_of_a_computed_one() {
    for model in KINDS {
        for block_tokens in [16, 64] {
            let case = format!("{model}, blocks of {block_tokens}");
            let holder = holder(model, block_tokens, &[base_request()]);
            let expected = undisturbed(model, &base_request());
            let mut engine = open(model, &patient(model, block_tokens));
            let submitted = submit_pulling(&mut engine, &base_request(), Box::new(Direct::from(&holder)));
            // Arrives during the fetch, has no source of its own, and waits for the same pull.
            let next = Request::greedy([&base_request().prompt[..192], &prompt(9, 30)].concat(), GENERATE);
            let concurrent = submit(&mut engine, &next);
            finish(&mut engine);
            let output = assert_same(&case, &engine, &submitted, &expected);
            assert_eq!((output.cached(), lookup(&output)), (192, "prompt_end transfer=192"), "{case}");
            let output = assert_same(&case, &engine, &concurrent, &undisturbed(model, &next));
            assert_eq!(output.cached(), 192, "{case}");
            assert!(engine.metrics().transfers.bytes(Direction::pulled) > 0, "{case}");
            assert!(engine.metrics().transfers.report().rate > 0.0, "{case}");
            // Afterwards the prefix is cached here.
            let again = submit_pulling(&mut engine, &base_request(), Box::new(Direct::from(&holder)));
            let before = engine.metrics().transfers.bytes(Direction::pulled);
            finish(&mut engine);
            assert_eq!(assert_same(&case, &engine, &again, &expected).cached(), 192, "{case}");
            assert_eq!(engine.metrics().transfers.bytes(Direction::pulled), before, "{case}");
        }
    }
}

#[test]
fn cached_pieces_are_not_pulled() {
    for model in KINDS {
        let holder = holder(model, 16, &[base_request()]);
        let mut engine = open(model, &patient(model, 16));
        let short = Request::greedy(base_request().prompt[..100].to_vec(), 1);
        one_by_one(&mut engine, &[short]);
        let submitted = submit_pulling(&mut engine, &base_request(), Box::new(Direct::from(&holder)));
        finish(&mut engine);
        let output = assert_same(model, &engine, &submitted, &undisturbed(model, &base_request()));
        assert_eq!((output.cached(), lookup(&output)), (192, "prompt_end transfer=96"), "{model}");
        let whole: u64 = holder
            .lock()
            .unwrap()
            .kv_sender()
            .offer(&origin(&engine), ROOT, &base_request().prompt[..192], 0)
            .map_or(0, |offer| offer.pieces.iter().map(|(_, _, bytes)| *bytes as u64).sum());
        let pulled = engine.metrics().transfers.bytes(Direction::pulled);
        assert!(pulled < whole, "{model}: {pulled} of {whole} bytes");
    }
}

#[test]
fn pieces_on_the_holders_disk_are_pulled() {
    for model in KINDS {
        let dir = tempfile::tempdir().unwrap();
        let options = EngineOptions { tiers: disk(dir.path(), 0), ..patient(model, 16) };
        let mut before = open(model, &options);
        one_by_one(&mut before, &[base_request()]);
        while before.copy_out() {}
        // Another process finds the files of the previous one.
        drop(before);
        let holder = Arc::new(Mutex::new(open(model, &options)));
        let pull = |found: &str, cached: usize| {
            let mut engine = open(model, &patient(model, 16));
            let submitted = submit_pulling(&mut engine, &base_request(), Box::new(Direct::from(&holder)));
            finish(&mut engine);
            let output = assert_same(model, &engine, &submitted, &undisturbed(model, &base_request()));
            assert_eq!(output.cached(), cached, "{model}");
            assert!(lookup(&output).contains(found), "{model}: {}", lookup(&output));
        };
        pull("transfer=192", 192);
        // Damage is detected when a file is read, and that piece is not offered again.
        for path in pieces(dir.path()) {
            let mut bytes = std::fs::read(&path).unwrap();
            *bytes.last_mut().unwrap() ^= 1;
            std::fs::write(&path, bytes).unwrap();
        }
        pull("transfer=", 0);
    }
}

#[test]
fn pieces_evicted_to_the_holders_host_memory_are_pulled() {
    for model in KINDS {
        for (host_bytes, found) in [(0, "transfer=refused"), (64 << 20, "transfer=192")] {
            let tiers = TiersConfig { host_bytes, ..TiersConfig::default() };
            let options = EngineOptions { block_tokens: 16, ..options(model) };
            let mut holder = open(model, &EngineOptions { tiers, ..cramped(model, &options, 2 * PROMPT) });
            let others = (100..108).map(|seed| Request::greedy(prompt(seed, 330), 2).tokens_only());
            for request in std::iter::once(base_request()).chain(others) {
                one_by_one(&mut holder, &[request]);
                while holder.copy_out() {}
            }
            let holder = Arc::new(Mutex::new(holder));
            let mut engine = open(model, &patient(model, 16));
            let submitted = submit_pulling(&mut engine, &base_request(), Box::new(Direct::from(&holder)));
            finish(&mut engine);
            let output = assert_same(model, &engine, &submitted, &undisturbed(model, &base_request()));
            assert!(lookup(&output).ends_with(found), "{model}: {}", lookup(&output));
        }
    }
}

fn origin(engine: &Engine) -> [u8; 32] {
    Namer::new(&engine.origin()).unwrap().origin()
}

#[test]
fn a_request_that_waited_for_another_pull_then_pulls_its_own_rest() {
    for model in KINDS {
        let own = Request::greedy([&base_request().prompt[..192], &prompt(9, 100)].concat(), GENERATE);
        let holder = holder(model, 16, &[base_request(), own.clone()]);
        let mut engine = open(model, &patient(model, 16));
        let first = submit_pulling(&mut engine, &base_request(), Box::new(Direct::from(&holder)));
        let second =
            submit_pulling(&mut engine, &own, Box::new(Direct { tokens: 292, ..Direct::from(&holder) }));
        finish(&mut engine);
        let output = assert_same(model, &engine, &first, &undisturbed(model, &base_request()));
        assert_eq!(output.cached(), 192, "{model}");
        let output = assert_same(model, &engine, &second, &undisturbed(model, &own));
        assert_eq!((output.cached(), lookup(&output)), (288, "prompt_end transfer=288"), "{model}");
    }
}

#[test]
fn a_holder_that_dies_leaves_a_shorter_prefix_or_none() {
    for model in KINDS {
        let holder = holder(model, 16, &[base_request()]);
        let expected = undisturbed(model, &base_request());
        for max_pieces in [0, 1, 3, 7] {
            let case = format!("{model}, {max_pieces} pieces");
            let mut engine = open(model, &patient(model, 16));
            let source = Direct { max_pieces, ..Direct::from(&holder) };
            let submitted = submit_pulling(&mut engine, &base_request(), Box::new(source));
            finish(&mut engine);
            let output = assert_same(&case, &engine, &submitted, &expected);
            let expected_cached = if model == LLAMA && max_pieces >= 3 { max_pieces * 16 } else { 0 };
            assert!(model != LLAMA || output.cached() == expected_cached, "{case}: {}", output.cached());
            assert!(output.cached() < 192, "{case}");
            assert_eq!(engine.metrics().transfers.failures(PullFailure::Lost), 1, "{case}");
            let transferred = lookup(&output).rsplit_once("transfer=").unwrap().1;
            let reported = if output.cached() == 0 { "lost".to_owned() } else { output.cached().to_string() };
            assert_eq!(transferred, reported, "{case}");
        }
    }
}

#[test]
fn the_wait_for_a_slow_holder_is_bounded() {
    for model in KINDS {
        let holder = holder(model, 16, &[base_request()]);
        let options = EngineOptions { pull_timeout: Some(Duration::ZERO), ..patient(model, 16) };
        let mut engine = open(model, &options);
        let hang = Arc::new(Mutex::new(Vec::new()));
        let source = Direct { max_pieces: 2, hang: Some(Arc::clone(&hang)), ..Direct::from(&holder) };
        let submitted = submit_pulling(&mut engine, &base_request(), Box::new(source));
        finish(&mut engine);
        let output = assert_same(model, &engine, &submitted, &undisturbed(model, &base_request()));
        assert!(output.cached() <= 32, "{model}");
        assert_eq!(engine.metrics().transfers.failures(PullFailure::TimedOut), 1, "{model}");
    }
}

#[tokio::test]
async fn a_pull_without_waiting_requests_is_cancelled_at_once() {
    let holder = holder(LLAMA, 16, &[base_request()]);
    let mut engine = open(LLAMA, &patient(LLAMA, 16));
    let hang = Arc::new(Mutex::new(Vec::new()));
    let source = || Box::new(Direct { hang: Some(Arc::clone(&hang)), ..Direct::from(&holder) });
    let first = submit_pulling(&mut engine, &base_request(), source());
    let other = Request::greedy([&base_request().prompt[..192], &prompt(9, 30)].concat(), GENERATE);
    let second = submit_pulling(&mut engine, &other, source());
    assert_eq!((engine.load().waiting, hang.lock().unwrap().len()), (2, 1), "one pull for both");
    assert!(!engine.can_compute());
    engine.cancel(first.id.unwrap());
    let delivery = hang.lock().unwrap().remove(0);
    let still = tokio::time::timeout(Duration::from_millis(20), delivery.unwanted()).await;
    assert!(still.is_err(), "the second waits for it still");
    engine.cancel(second.id.unwrap());
    tokio::time::timeout(Duration::from_secs(20), delivery.unwanted()).await.unwrap();
    assert!(!engine.has_work());
    assert_eq!((engine.load().waiting, engine.load().kv_used), (0, 0));
    engine.check().unwrap();
}

#[test]
fn of_another_class_or_other_tokens_nothing_is_offered() {
    let holder = holder(LLAMA, 16, &[base_request()]);
    let mut changed = base_request();
    changed.prompt[3] ^= 1;
    let mut engine = open(LLAMA, &patient(LLAMA, 16));
    let submitted = submit_pulling(&mut engine, &changed, Box::new(Direct::from(&holder)));
    finish(&mut engine);
    let output = assert_same("other tokens", &engine, &submitted, &undisturbed(LLAMA, &changed));
    assert_eq!((output.cached(), lookup(&output)), (0, "not_cached group=0 token=0 transfer=refused"));

    let half = EngineOptions { kv_type: kernels::backend::KvType::F16.into(), ..patient(LLAMA, 16) };
    let mut engine = open(LLAMA, &half);
    let expected = one_by_one(&mut open(LLAMA, &half), &[base_request()]).remove(0);
    let submitted = submit_pulling(&mut engine, &base_request(), Box::new(Direct::from(&holder)));
    finish(&mut engine);
    assert_eq!(assert_same("another class", &engine, &submitted, &expected).cached(), 0);
    assert_eq!(engine.metrics().transfers.failures(PullFailure::Refused), 1);
}
