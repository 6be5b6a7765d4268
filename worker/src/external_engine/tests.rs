//! The generator against servers that speak the engines' protocols.

use super::*;
use crate::generator::Generator;
use engine::usage::RequestUsage;
use external::fake::{EventForm, FakeEngine, FakePublisher, Fault, PublisherForm, output_token};
use proto::block::{BlockId, ClusterKey};
use proto::ids::{Attempt, Epoch, RequestId};
use proto::message::{
    FinishReason, Finished, GenerateError, GenerateFrame, GenerateRequest, GrammarSpec, GrammarSyntax,
    OPTIONAL_TOOLS, Started, TenantShare, TokenIds,
};
use tokio::sync::mpsc;

const KEY: ClusterKey = ClusterKey([7; 32]);
const ROOT: BlockId = BlockId([9; 16]);
const LIMIT: Duration = Duration::from_secs(20);

fn model() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/tiny/llama/llama-f32.gguf")
}

/// A generator over a fake, and the reasons for which it was lost.
struct Rig {
    fake: FakeEngine,
    generator: ExternalGenerator,
    lost: mpsc::UnboundedReceiver<String>,
    supervisor: EngineSupervisor,
}

async fn rig(kind: EngineKind) -> Rig {
    sleepy_rig(kind, None).await
}

/// `idle`: the engine can sleep, and does so after this time.
async fn sleepy_rig(kind: EngineKind, idle: Option<Duration>) -> Rig {
    let (publisher, kv_events) = match kind {
        EngineKind::LlamaServer => (None, KvEvents::Off),
        _ => {
            let vllm = kind == EngineKind::Vllm;
            let events = if vllm { EventForm::VllmMaps } else { EventForm::SglangMaps };
            let form = PublisherForm { events, replay_topic: true, kept: 1000 };
            let publisher = FakePublisher::start(form).await.unwrap();
            let (address, replay) =
                (publisher.address().to_owned(), Some(publisher.replay_address().to_owned()));
            (Some(publisher), KvEvents::At { address, replay, topic: String::new() })
        }
    };
    let fake = FakeEngine::start(kind, 64, publisher).await.unwrap();
    if idle.is_some() {
        fake.enable_sleep();
    }
    let source = EngineSource { kv_events, idle, ..EngineSource::at(&fake.url()) };
    let options = crate::load::EngineOptions::default();
    let supervisor = EngineSupervisor::new((kind, source), model(), options, Duration::from_millis(500));
    let opened = supervisor.open().await.unwrap();
    let (sender, lost) = mpsc::unbounded_channel();
    let on_lost: OnLost = Box::new(move |reason| drop(sender.send(reason.to_owned())));
    let generator = ExternalGenerator::start(opened, &KEY, Epoch(1), on_lost);
    Rig { fake, generator, lost, supervisor }
}

fn request(prompt: &[u32], max_tokens: u32) -> GenerateRequest {
    GenerateRequest {
        request_id: RequestId::new("r").unwrap(),
        choice: 0,
        attempt: Attempt(1),
        model: ModelId::new("m").unwrap(),
        root: ROOT,
        prompt: prompt.to_vec().into(),
        emitted: TokenIds::default(),
        sampling: Sampling::default(),
        stop: Stop { max_tokens, ignore_eos: true, ..Stop::default() },
        images: Vec::new(),
        encoders: Vec::new(),
        prompt_logprobs: None,
        predicted_cached: 0,
        deadline_ms: 0,
        pull: None,
        together: 1,
        trace: None,
        grammar: None,
        tenant: TenantShare::of_root(ROOT),
    }
}

/// Result of a request.
#[derive(Debug, Default)]
struct Outcome {
    started: Option<Started>,
    tokens: Vec<u32>,
    finished: Option<Finished>,
    failed: Option<GenerateError>,
}

async fn run(generator: &ExternalGenerator, request: GenerateRequest) -> Outcome {
    let (frames, mut inbox) = mpsc::unbounded_channel();
    let mut outcome = Outcome::default();
    let running = match generator.submit(request, None, None, None, frames, RequestUsage::new(|_| {})).await {
        Ok(running) => running,
        Err(error) => return Outcome { failed: Some(error), ..outcome },
    };
    let all = async {
        while let Some(frame) = inbox.recv().await {
            match frame {
                GenerateFrame::Started(started) => outcome.started = Some(started),
                GenerateFrame::Tokens(tokens) => outcome.tokens.extend(tokens.iter().map(|token| token.id)),
                GenerateFrame::Prompt(_) => panic!("no engine gives log-probabilities of prompts"),
                GenerateFrame::Finished(finished) => outcome.finished = Some(finished),
                GenerateFrame::Failed(error) => outcome.failed = Some(error),
            }
        }
    };
    tokio::time::timeout(LIMIT, all).await.unwrap();
    drop(running);
    outcome
}

fn prompt(seed: u32, len: u32) -> Vec<u32> {
    (0..len).map(|index| (seed * 1000 + index) % 250 + 3).collect()
}

fn answer(prompt: &[u32], len: u32) -> Vec<u32> {
    (0..len).map(|index| output_token(prompt, index)).collect()
}

/// Waits until the cache's events satisfy `held`.
async fn until_held(generator: &ExternalGenerator, held: impl Fn(usize) -> bool) {
    let mut newest = generator.newest_event();
    let wait = async {
        while !held(generator.events().lock().held_units()) {
            newest.changed().await.unwrap();
        }
    };
    tokio::time::timeout(LIMIT, wait).await.unwrap();
}

#[tokio::test]
async fn every_engine_generates_and_reports_its_cached_tokens() {
    for kind in EngineKind::ALL {
        let rig = rig(kind).await;
        let asked = prompt(1, 70);
        for (round, cached) in [(0, 0), (1, 64)] {
            let outcome = run(&rig.generator, request(&asked, 5)).await;
            assert_eq!(outcome.tokens, answer(&asked, 5), "{kind}, round {round}");
            let (started, finished) = (outcome.started.unwrap(), outcome.finished.unwrap());
            assert_eq!((finished.reason, finished.completion_tokens), (FinishReason::Length, 5), "{kind}");
            assert_eq!(finished.cached_tokens, Some(cached), "{kind}, round {round}");
            // Only vLLM tells it at the end alone.
            assert_eq!(started.estimated, kind == EngineKind::Vllm, "{kind}");
        }
        let load = rig.generator.load();
        assert_eq!((load.running, load.waiting, load.tokens), (0, 0, 10), "{kind}");
        assert_eq!(rig.generator.exact(), kind != EngineKind::LlamaServer, "{kind}");
        let text = rig.generator.metrics_text();
        assert!(text.contains("vllm:prefix_cache_hits_total 64\n"), "{kind}: {text}");
    }
}

#[tokio::test]
async fn the_index_names_what_an_engine_holds_as_the_built_in_engine_would() {
    let rig = rig(EngineKind::Vllm).await;
    let asked = prompt(2, 64);
    run(&rig.generator, request(&asked, 1)).await;
    until_held(&rig.generator, |units| units == 4).await;
    let snapshot = rig.generator.events().lock().snapshot();
    let held: Vec<BlockId> = snapshot.runs.iter().flat_map(|(_, units, _)| units.clone()).collect();
    assert_eq!(held, KEY.units().chain(ROOT, &asked));
    rig.fake.clear_cache();
    until_held(&rig.generator, |units| units == 0).await;
}

#[tokio::test]
async fn slots_of_a_llama_server_are_chosen_and_modelled() {
    let rig = rig(EngineKind::LlamaServer).await;
    let asked = prompt(3, 64);
    run(&rig.generator, request(&asked, 1)).await;
    until_held(&rig.generator, |units| units == 4).await;
    let other = GenerateRequest { root: BlockId([1; 16]), ..request(&asked, 1) };
    run(&rig.generator, other).await;
    let sent = rig.fake.requests();
    let slots: Vec<_> = sent.iter().map(|body| body["id_slot"].clone()).collect();
    assert!(slots[1].is_u64() && slots[1] != slots[2], "two tenants share a slot: {slots:?}");
}

#[tokio::test]
async fn an_argument_that_an_engine_would_ignore_is_refused_by_name() {
    let rig = rig(EngineKind::LlamaServer).await;
    let mut asked = request(&prompt(4, 20), 2);
    asked.sampling.seeded = true;
    let refused = run(&rig.generator, asked).await.failed.unwrap();
    assert!(matches!(&refused, GenerateError::Unsupported { field, .. } if field == "seed"), "{refused:?}");
    assert!(refused.retryable(), "another engine may honour it");
    let tools = |field: &str| {
        let (field, text) = (field.to_owned(), "start: \"a\"".to_owned());
        let trigger = Some("<tool_call>".to_owned());
        Some(GrammarSpec { field, syntax: GrammarSyntax::Lark, text, trigger })
    };
    let strict = GenerateRequest { grammar: tools("tools.function.strict"), ..request(&prompt(4, 20), 2) };
    let refused = run(&rig.generator, strict).await.failed.unwrap();
    assert!(matches!(refused, GenerateError::Unsupported { .. }), "{refused:?}");
    // Calls that are optional may be generated freely.
    let optional = GenerateRequest { grammar: tools(OPTIONAL_TOOLS), ..request(&prompt(4, 20), 2) };
    assert_eq!(run(&rig.generator, optional).await.tokens.len(), 2);
}

#[tokio::test]
async fn a_request_beyond_the_context_is_refused_and_one_at_its_end_is_cut() {
    let rig = rig(EngineKind::Vllm).await;
    let limit = rig.generator_limit();
    let refused = run(&rig.generator, request(&vec![5; limit as usize], 1)).await.failed.unwrap();
    assert_eq!(refused, GenerateError::ContextLength { need: u64::from(limit) + 1, limit: limit.into() });
    let last = run(&rig.generator, request(&vec![5; limit as usize - 2], 100)).await;
    assert_eq!(last.tokens.len(), 2, "{last:?}");
}

#[tokio::test]
async fn an_answer_continues_behind_the_tokens_of_an_earlier_attempt() {
    let rig = rig(EngineKind::Vllm).await;
    let asked = prompt(5, 40);
    let emitted = vec![11, 12, 13];
    let whole = [&asked[..], &emitted].concat();
    let rest = GenerateRequest { emitted: emitted.clone().into(), ..request(&asked, 8) };
    let outcome = run(&rig.generator, rest).await;
    assert_eq!(outcome.tokens, answer(&whole, 5));
    assert_eq!(outcome.finished.unwrap().completion_tokens, 8);
    // All of the answer was sent, but for its end.
    let over = GenerateRequest { emitted: vec![11; 8].into(), ..request(&asked, 8) };
    let outcome = run(&rig.generator, over).await;
    assert_eq!((outcome.tokens.len(), outcome.finished.unwrap().reason), (0, FinishReason::Length));
    // A grammar would begin anew.
    let grammar = Some(GrammarSpec {
        field: "response_format".to_owned(),
        syntax: GrammarSyntax::JsonSchema,
        text: "{}".to_owned(),
        trigger: None,
    });
    let refused = GenerateRequest { emitted: emitted.into(), grammar, ..request(&asked, 8) };
    let refused = run(&rig.generator, refused).await.failed.unwrap();
    assert!(matches!(&refused, GenerateError::Unsupported { field, .. } if field == "response_format"));
}

#[tokio::test]
async fn an_engine_that_hangs_or_dies_is_lost_and_one_that_refuses_is_not() {
    for kind in EngineKind::ALL {
        for (fault, expected, is_lost) in [
            (Fault::Status(503), GenerateError::QueueFull, false),
            (Fault::Status(500), GenerateError::Internal, false),
            (Fault::CloseAfter(2), GenerateError::Internal, false),
            (Fault::EndAfter(2), GenerateError::Internal, false),
            (Fault::MalformedAfter(2), GenerateError::Internal, false),
            (Fault::WrongIds, GenerateError::Internal, false),
            (Fault::HangAfter(2), GenerateError::Internal, true),
        ] {
            let mut rig = rig(kind).await;
            rig.fake.set_fault(fault);
            let outcome = run(&rig.generator, request(&prompt(6, 40), 5)).await;
            assert_eq!(outcome.failed.as_ref(), Some(&expected), "{kind}, {fault:?}: {outcome:?}");
            assert_eq!(rig.lost.try_recv().is_ok(), is_lost, "{kind}, {fault:?}");
            assert_eq!(rig.generator.healthy(), !is_lost, "{kind}, {fault:?}");
            let load = rig.generator.load();
            assert_eq!((load.running, load.waiting), (0, 0), "{kind}, {fault:?}");
        }
    }
    let Rig { fake, generator: _generator, mut lost, .. } = rig(EngineKind::Vllm).await;
    drop(fake);
    let reason = tokio::time::timeout(LIMIT, lost.recv()).await.unwrap().unwrap();
    assert!(reason.contains("does not answer"), "{reason}");
}

#[tokio::test]
async fn a_dropped_request_is_cancelled_at_the_engine() {
    let rig = rig(EngineKind::LlamaServer).await;
    rig.fake.set_fault(Fault::HangAfter(1));
    let (frames, mut inbox) = mpsc::unbounded_channel();
    let running = rig
        .generator
        .submit(request(&prompt(7, 40), 5), None, None, None, frames, RequestUsage::new(|_| {}))
        .await
        .unwrap();
    inbox.recv().await.unwrap();
    drop(running);
    let cancelled = async {
        while rig.fake.cancelled() == 0 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(LIMIT, cancelled).await.unwrap();
    let load = rig.generator.load();
    assert_eq!((load.running, load.waiting), (0, 0));
}

#[tokio::test]
async fn another_tokenizer_is_refused() {
    let fake = FakeEngine::start(EngineKind::Vllm, 64, None).await.unwrap();
    let error = ExternalEngineError::OtherTokenizer {
        kind: EngineKind::Vllm,
        url: fake.url(),
        path: model(),
        text: TOKENIZER_TEXT,
        theirs: vec![1],
        ours: vec![2],
    };
    assert!(error.to_string().contains("tokenizes"), "{error}");
    let source = EngineSource::at("http://127.0.0.1:1/x?y=z");
    let options = crate::load::EngineOptions::default();
    let supervisor = EngineSupervisor::new((EngineKind::Vllm, source), model(), options, LIMIT);
    let Err(error) = supervisor.open().await else { panic!("a URL with a query was taken") };
    assert!(error.to_string().contains("query"), "{error}");
}

/// Waits for something that changes without a signal.
async fn until(holds: impl Fn() -> bool) {
    let wait = async {
        while !holds() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(LIMIT, wait).await.unwrap();
}

#[tokio::test]
async fn an_idle_engine_sleeps_and_any_number_of_requests_wakes_it_once() {
    for kind in [EngineKind::Vllm, EngineKind::Sglang] {
        let mut rig = sleepy_rig(kind, Some(Duration::from_millis(1))).await;
        let (fake, generator) = (&rig.fake, &rig.generator);
        let asked = [prompt(1, 64), prompt(1, 65)[1..].to_vec()];
        // A request during the first order to sleep waits for its end.
        until(|| fake.sleeps_and_wakes() == (1, 0)).await;
        let sent = fake.requests().len();
        let early = async {
            until(|| generator.load().waiting == 1).await;
            assert_eq!(fake.requests().len(), sent, "{kind}: a request went to an engine that falls asleep");
            assert!(generator.stalled().is_zero());
            fake.permit_sleep();
        };
        let (outcome, ()) = tokio::join!(run(generator, request(&asked[0], 1)), early);
        assert_eq!(outcome.tokens, answer(&asked[0], 1), "{kind}: {outcome:?}");
        assert_eq!(fake.sleeps_and_wakes().1, 1, "{kind}");
        until_held(generator, |units| units == 4).await;

        // No event of the engine's tells that its cache is gone.
        fake.permit_sleep();
        until_held(generator, |units| units == 0).await;
        until(|| fake.is_asleep()).await;
        assert!(generator.healthy() && generator.exact(), "{kind}");
        let both = [&asked[0], &asked[1]].map(|asked| run(generator, request(asked, 1)));
        for (outcome, asked) in futures::future::join_all(both).await.into_iter().zip(&asked) {
            assert_eq!(outcome.tokens, answer(asked, 1), "{kind}: {outcome:?}");
            assert_eq!(outcome.finished.unwrap().cached_tokens, Some(0), "{kind}: a cache outlived a sleep");
        }
        assert_eq!(fake.sleeps_and_wakes().1, 2, "{kind}");
        until_held(generator, |units| units == 8).await;
        let text = generator.metrics_text();
        for line in ["sleeps_total 2", "wakes_total 2", "wake_seconds_count 2", "asleep 0"] {
            assert!(text.contains(&format!("kvasir_engine_{line}\n")), "{kind}: {line}: {text}");
        }
        assert!(rig.lost.try_recv().is_err(), "{kind}");

        // The worker ends and leaves the engine awake.
        fake.permit_sleep();
        until_held(generator, |units| units == 0).await;
        until(|| generator.metrics_text().contains("kvasir_engine_asleep 1\n")).await;
        generator.stop();
        rig.supervisor.end().await;
        assert!(!fake.is_asleep(), "{kind}");
    }
}

#[tokio::test]
async fn an_engine_that_does_not_wake_is_lost_and_its_request_goes_elsewhere() {
    let mut rig = sleepy_rig(EngineKind::Vllm, Some(Duration::from_millis(1))).await;
    rig.fake.permit_sleep();
    until(|| rig.generator.metrics_text().contains("kvasir_engine_asleep 1\n")).await;
    rig.fake.set_fault(Fault::Status(500));
    let failed = run(&rig.generator, request(&prompt(1, 20), 1)).await.failed.unwrap();
    assert!(failed == GenerateError::Internal && failed.retryable(), "{failed:?}");
    let reason = rig.lost.try_recv().unwrap();
    assert!(reason.contains("does not wake"), "{reason}");
    // The next epoch finds it asleep.
    rig.fake.set_fault(Fault::None);
    rig.supervisor.open().await.unwrap();
    assert!(!rig.fake.is_asleep());
}

#[tokio::test]
async fn an_engine_that_cannot_sleep_is_refused_with_what_it_needs() {
    for (kind, needs) in [
        (EngineKind::Vllm, "VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode"),
        (EngineKind::Sglang, "--enable-memory-saver and --enable-weights-cpu-backup"),
    ] {
        let fake = FakeEngine::start(kind, 64, None).await.unwrap();
        let source = EngineSource { idle: Some(LIMIT), ..EngineSource::at(&fake.url()) };
        let options = crate::load::EngineOptions::default();
        let supervisor = EngineSupervisor::new((kind, source), model(), options, LIMIT);
        let Err(error) = supervisor.open().await else { panic!("{kind}: it was taken") };
        let error = error.to_string();
        assert!(error.contains("`engine_idle`") && error.contains(needs), "{kind}: {error}");
    }
}

impl Rig {
    fn generator_limit(&self) -> u32 {
        self.generator.max_model_len()
    }
}
