//! Clients and the subscriber against the fakes.

use crate::arguments::{Argument, EngineKind, EngineOptions};
use crate::fake::{EventForm, FakeEngine, FakePublisher, Fault, PublisherForm, output_token, root_in};
use crate::*;
use parking_lot::Mutex;
use proto::block::{BlockId, ClusterKey};
use proto::event::KvEvent;
use proto::message::{FinishReason, GrammarSpec, GrammarSyntax, Sampling, Stop, TokenLogprobs};
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

const ROOT: BlockId = BlockId([9; 16]);

/// Time limits that a busy machine keeps.
fn limits() -> HttpLimits {
    let long = Duration::from_secs(60);
    HttpLimits {
        connect: long,
        response: long,
        sleep: long,
        first_event: long,
        next_event: long,
        max_body: 1 << 20,
        max_event: 1 << 20,
    }
}

/// Whether the condition holds within a minute.
async fn becomes(condition: impl Fn() -> bool) -> bool {
    let holds = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), holds).await.is_ok()
}

fn connect(fake: &FakeEngine, kind: EngineKind) -> Box<dyn Engine> {
    let options = EngineOptions { raw_logprobs: true, ..EngineOptions::default() };
    let config = EngineConfig {
        kind,
        url: fake.url(),
        api_key: None,
        model: "fake".into(),
        options,
        limits: limits(),
    };
    connect_engine(config).unwrap()
}

fn request(prompt: &[u32], max_tokens: u32) -> EngineRequest {
    EngineRequest {
        prompt: prompt.to_vec().into(),
        stop: Stop { max_tokens, ..Stop::default() },
        root: Some(ROOT),
        ..EngineRequest::default()
    }
}

async fn collect(engine: &dyn Engine, request: EngineRequest) -> Result<Vec<EngineEvent>, EngineError> {
    let mut stream = engine.submit(request).await?;
    let mut events = Vec::new();
    while let Some(event) = stream.next().await {
        events.push(event?);
    }
    assert!(stream.next().await.is_none());
    Ok(events)
}

fn ids(events: &[EngineEvent]) -> Vec<u32> {
    let tokens = events.iter().filter_map(|event| match event {
        EngineEvent::Tokens { tokens, .. } => Some(tokens),
        _ => None,
    });
    tokens.flatten().map(|token| token.id).collect()
}

fn finish(events: &[EngineEvent]) -> &EngineFinish {
    let Some(EngineEvent::Finished(finish)) = events.last() else { panic!("{events:?}") };
    finish
}

#[tokio::test]
async fn an_answer_is_the_tokens_of_the_engine_with_their_usage() {
    let prompt: Vec<u32> = (0..40).collect();
    for kind in EngineKind::ALL {
        let fake = FakeEngine::start(kind, 100, None).await.unwrap();
        let engine = connect(&fake, kind);
        assert_eq!(engine.kind(), kind);
        for cached in [0, 32] {
            let events = collect(&*engine, request(&prompt, 5)).await.unwrap();
            let expected: Vec<u32> = (0..5).map(|index| output_token(&prompt, index)).collect();
            assert_eq!(ids(&events), expected, "{kind}");
            let finish = finish(&events);
            assert_eq!((finish.reason, &finish.matched), (FinishReason::Length, &None));
            let slot = (kind == EngineKind::LlamaServer).then_some(1);
            let usage =
                EngineUsage { prompt_tokens: 40, completion_tokens: 5, cached_tokens: Some(cached), slot };
            assert_eq!(finish.usage, usage, "{kind}");
            let known = (kind != EngineKind::Vllm).then_some(cached);
            assert_eq!(events[0], EngineEvent::Started { cached_tokens: known }, "{kind}");
            let text: String = events
                .iter()
                .filter_map(|event| {
                    if let EngineEvent::Tokens { text, .. } = event { Some(text.as_str()) } else { None }
                })
                .collect();
            assert_eq!(text, expected.iter().map(|id| format!("t{id} ")).collect::<String>(), "{kind}");
        }
    }
}

#[tokio::test]
async fn arguments_arrive_under_the_names_of_each_engine() {
    let sampling = Sampling {
        temperature: 0.5,
        top_k: 7,
        top_p: 0.75,
        min_p: 0.25,
        logit_bias: vec![(5, -1.0)],
        seed: u64::MAX,
        logprobs: Some(2),
        ..Sampling::default()
    };
    let stop = Stop { max_tokens: 2, strings: vec!["end".into()], ignore_eos: true, ..Stop::default() };
    let grammar = GrammarSpec {
        field: "response_format".into(),
        syntax: GrammarSyntax::JsonSchema,
        text: r#"{"type":"object"}"#.into(),
        trigger: None,
    };
    for kind in EngineKind::ALL {
        let fake = FakeEngine::start(kind, 100, None).await.unwrap();
        let mut request = request(&[1, 2, 3], 2);
        (request.sampling, request.stop, request.grammar) =
            (sampling.clone(), stop.clone(), Some(grammar.clone()));
        request.slot = Some(SlotChoice { id: 1, reuse: false });
        let events = collect(&*connect(&fake, kind), request).await.unwrap();
        let body = &fake.requests()[0];
        let at =
            |path: &str| body.pointer(path).unwrap_or_else(|| panic!("{kind}: {path} in {body}")).clone();
        let prefix = if kind == EngineKind::Sglang { "/sampling_params" } else { "" };
        for (field, value) in [("temperature", 0.5), ("top_p", 0.75), ("min_p", 0.25), ("top_k", 7.0)] {
            assert_eq!(at(&format!("{prefix}/{field}")).as_f64(), Some(value), "{kind} {field}");
        }
        assert_eq!(at(&format!("{prefix}/stop/0")), "end");
        assert_eq!(at(&format!("{prefix}/ignore_eos")), true);
        match kind {
            EngineKind::Vllm => {
                assert_eq!(at("/structured_outputs/json/type"), "object");
                assert_eq!((at("/seed"), at("/logit_bias/5")), ((-1).into(), (-1.0).into()));
                assert_eq!(
                    (at("/stream_options/include_usage"), at("/return_token_ids")),
                    (true.into(), true.into())
                );
                assert_eq!(
                    (at("/add_special_tokens"), at("/skip_special_tokens")),
                    (false.into(), false.into())
                );
                assert_eq!((at("/model"), root_in(body)), ("fake".into(), Some(ROOT)));
            }
            EngineKind::Sglang => {
                assert_eq!(at("/sampling_params/json_schema"), r#"{"type":"object"}"#);
                assert_eq!(
                    (at("/sampling_params/sampling_seed"), at("/top_logprobs_num")),
                    ((-1).into(), 2.into())
                );
                assert_eq!(root_in(body), Some(ROOT));
            }
            EngineKind::LlamaServer => {
                assert_eq!((at("/json_schema/type"), at("/n_probs")), ("object".into(), 2.into()));
                assert_eq!((at("/id_slot"), at("/cache_prompt")), (1.into(), false.into()));
                assert_eq!(at("/logit_bias"), serde_json::json!([[5, -1.0]]));
            }
        }
        let EngineEvent::Tokens { tokens, .. } = &events[1] else { panic!("{events:?}") };
        let logprobs = tokens[0].logprobs.clone().unwrap();
        let expected = match kind {
            // vLLM's alternatives begin with the drawn token.
            EngineKind::Vllm => vec![(output_token(&[1, 2, 3], 0), -0.5), (50_000, -1.0)],
            _ => vec![(50_000, -1.0), (50_001, -2.0)],
        };
        assert_eq!(logprobs, TokenLogprobs { chosen: -0.5, top: expected }, "{kind}");
    }
}

#[tokio::test]
async fn health_identity_and_load_are_read() {
    for kind in EngineKind::ALL {
        let fake = FakeEngine::start(kind, 100, None).await.unwrap();
        let engine = connect(&fake, kind);
        engine.health().await.unwrap();
        let info = engine.info().await.unwrap();
        assert_eq!((info.model.as_str(), info.context_tokens), ("fake", Some(4096)), "{kind}");
        assert!(info.version.is_some() && info.model_path.is_some());
        let load = engine.load().await.unwrap();
        assert_eq!(load, EngineLoad { running: 0, queued: 2, kv_usage: Some(0.5) }, "{kind}");
        if kind == EngineKind::LlamaServer {
            assert_eq!(info.slots, Some(2));
        } else {
            assert_eq!((info.block_tokens, info.cache_blocks), (Some(16), Some(100)));
        }
        let ports = KvEventPorts { port: 5557, replay_port: Some(5558), topic: String::new() };
        assert_eq!(info.kv_events, (kind == EngineKind::Sglang).then_some(ports));
        let mut stream = engine.submit(request(&[1], 1000)).await.unwrap();
        stream.next().await.unwrap().unwrap();
        assert_eq!(engine.load().await.unwrap().running, 1, "{kind}");

        fake.set_fault(Fault::Status(503));
        assert!(matches!(engine.health().await, Err(EngineError::Overloaded { status: 503, .. })));
        let model = EngineConfig { model: "other".into(), ..config(&fake.url(), kind) };
        fake.set_fault(Fault::None);
        assert_eq!(connect_engine(model).unwrap().info().await.is_err(), kind == EngineKind::Vllm);
    }
}

fn config(url: &str, kind: EngineKind) -> EngineConfig {
    let options = EngineOptions::default();
    EngineConfig { kind, url: url.into(), api_key: None, model: "fake".into(), options, limits: limits() }
}

#[tokio::test]
async fn each_fault_has_its_own_error() {
    type Check = fn(&EngineError) -> bool;
    let faults: [(Fault, Check); 15] = [
        (
            Fault::Status(503),
            |error| matches!(error, EngineError::Overloaded { status: 503, message } if message == "fault 503"),
        ),
        (Fault::Status(429), |error| matches!(error, EngineError::Overloaded { status: 429, .. })),
        (
            Fault::Status(400),
            |error| matches!(error, EngineError::Refused { status: 400, message } if message == "fault 400"),
        ),
        (Fault::Status(500), |error| matches!(error, EngineError::Failed { status: 500, .. })),
        (Fault::HangBeforeHead, |error| {
            matches!(error, EngineError::TimedOut { wait: Wait::FirstEvent, .. })
        }),
        (Fault::HangAfter(3), |error| matches!(error, EngineError::TimedOut { wait: Wait::NextEvent, .. })),
        (Fault::CloseAfter(3), |error| matches!(error, EngineError::Closed { tokens: 3, .. })),
        (Fault::EndAfter(3), |error| matches!(error, EngineError::Closed { tokens: 3, .. })),
        (Fault::MalformedAfter(3), |error| matches!(error, EngineError::InvalidAnswer { .. })),
        (
            Fault::ErrorAfter(3),
            |error| matches!(error, EngineError::Failed { status: 500, message } if message == "fault in the stream"),
        ),
        (Fault::WrongIds, |error| matches!(error, EngineError::InvalidAnswer { .. })),
        (Fault::LostToken, |error| matches!(error, EngineError::InvalidAnswer { .. })),
        (Fault::ChangedPrompt, |error| matches!(error, EngineError::InvalidAnswer { .. })),
        (Fault::NotStream, |error| matches!(error, EngineError::InvalidAnswer { .. })),
        (Fault::EndlessEvent, |error| matches!(error, EngineError::TooLarge { what: "event", .. })),
    ];
    for kind in EngineKind::ALL {
        let fake = FakeEngine::start(kind, 100, None).await.unwrap();
        let short = Duration::from_millis(300);
        let limited = |limits| connect_engine(EngineConfig { limits, ..config(&fake.url(), kind) }).unwrap();
        let hasty = limited(HttpLimits { first_event: short, ..limits() });
        let impatient = limited(HttpLimits { next_event: short, ..limits() });
        let engine = connect(&fake, kind);
        for (fault, expected) in faults {
            if (kind, fault) == (EngineKind::LlamaServer, Fault::LostToken) {
                // It leaves out tokens itself.
                continue;
            }
            fake.set_fault(fault);
            let limited = match fault {
                Fault::HangBeforeHead => &hasty,
                Fault::HangAfter(_) => &impatient,
                _ => &engine,
            };
            let error = collect(&**limited, request(&[1, 2, 3], 6)).await.unwrap_err();
            assert!(expected(&error), "{kind}, {fault:?}: {error:?}");
            assert_eq!(error.retryable(), fault != Fault::Status(400), "{kind}, {fault:?}");
        }
        fake.set_fault(Fault::OnlyComments);
        let error = collect(&*hasty, request(&[1, 2, 3], 6)).await.unwrap_err();
        assert!(matches!(error, EngineError::TimedOut { wait: Wait::FirstEvent, .. }), "{kind}: {error:?}");
        fake.set_fault(Fault::None);
        assert_eq!(ids(&collect(&*engine, request(&[1, 2, 3], 6)).await.unwrap()).len(), 6);
        drop(fake);
        tokio::time::sleep(Duration::from_millis(20)).await;
        let error = collect(&*engine, request(&[1], 1)).await.unwrap_err();
        assert!(matches!(error, EngineError::Connect { .. }) && error.lost(), "{kind}: {error:?}");
    }
}

#[tokio::test]
async fn a_dropped_stream_cancels_the_generation() {
    for kind in EngineKind::ALL {
        let fake = FakeEngine::start(kind, 100, None).await.unwrap();
        fake.set_fault(Fault::HangAfter(2));
        let engine = connect(&fake, kind);
        let mut stream = engine.submit(request(&[1, 2, 3], 6)).await.unwrap();
        while stream.tokens() < 2 {
            stream.next().await.unwrap().unwrap();
        }
        assert_eq!(fake.cancelled(), 0);
        drop(stream);
        assert!(becomes(|| fake.cancelled() == 1).await, "{kind}");
    }
}

#[test]
fn every_engine_has_a_row_for_every_argument() {
    for kind in EngineKind::ALL {
        assert_eq!(EngineKind::from_name(kind.name()), Some(kind));
        let table = argument_table(kind);
        for argument in Argument::ALL {
            let rows = table.iter().filter(|(known, _)| *known == argument).count();
            assert_eq!(rows, 1, "{kind}: {}", argument.name());
        }
    }
}

#[test]
fn an_argument_that_an_engine_would_ignore_is_named() {
    let refused = |kind: EngineKind, options: EngineOptions, change: fn(&mut EngineRequest)| {
        let engine = connect_engine(EngineConfig { options, ..config("http://localhost:1", kind) }).unwrap();
        let mut request = request(&[1], 1);
        change(&mut request);
        engine.can_serve(&request).err().map(|error| (error.argument.clone(), error.to_string()))
    };
    let field = |kind, options, change| refused(kind, options, change).map(|(argument, _)| argument);
    let plain = EngineOptions::default();
    let invariant = EngineOptions { batch_invariant: true, ..plain };
    for kind in EngineKind::ALL {
        assert_eq!(field(kind, plain, |_| {}), None);
        // A seed that nobody relies on is not refused.
        assert_eq!(field(kind, plain, |request| request.sampling.seed = 5), None);
        assert_eq!(field(kind, plain, |request| request.reproducible = true).as_deref(), Some("seed"));
        assert_eq!(field(kind, invariant, |request| request.reproducible = true), None);
        assert_eq!(field(kind, plain, |request| request.stop.max_tokens = 0).as_deref(), Some("max_tokens"));
        assert_eq!(field(kind, plain, |request| request.priority = -1).as_deref(), Some("priority"));
        let trigger: fn(&mut EngineRequest) = |request| {
            request.grammar = Some(GrammarSpec {
                field: "tools".into(),
                syntax: GrammarSyntax::JsonSchema,
                text: "{}".into(),
                trigger: Some("<tool_call>".into()),
            });
        };
        assert_eq!(field(kind, plain, trigger).as_deref(), Some("tools"));
    }
    use EngineKind::{LlamaServer, Sglang, Vllm};
    let min_tokens: fn(&mut EngineRequest) = |request| request.stop.min_tokens = 1;
    let presence: fn(&mut EngineRequest) = |request| request.sampling.presence_penalty = 0.5;
    let repetition: fn(&mut EngineRequest) = |request| request.sampling.repetition_penalty = 1.1;
    let hot: fn(&mut EngineRequest) = |request| request.sampling.temperature = 2.5;
    let logprobs: fn(&mut EngineRequest) = |request| request.sampling.logprobs = Some(0);
    let regex: fn(&mut EngineRequest) = |request| {
        request.grammar = Some(GrammarSpec {
            field: "response_format".into(),
            syntax: GrammarSyntax::Regex,
            text: "a+".into(),
            trigger: None,
        });
    };
    for (change, honoured_by) in [
        (min_tokens, &[Vllm, Sglang][..]),
        (presence, &[Vllm, Sglang]),
        (repetition, &[Vllm, LlamaServer]),
        (hot, &[Sglang, LlamaServer]),
        (logprobs, &[Vllm, LlamaServer]),
        (regex, &[Vllm, Sglang]),
    ] {
        for kind in EngineKind::ALL {
            assert_eq!(field(kind, plain, change).is_none(), honoured_by.contains(&kind), "{kind}");
        }
    }
    assert_eq!(
        refused(LlamaServer, plain, regex).unwrap().1,
        "response_format: llama-server has no regular expressions"
    );
    assert_eq!(refused(Vllm, plain, hot).unwrap().1, "temperature: vllm takes 0 to 2, not 2.5");
}

/// Follows a publisher. The consumer's units are those that the events name.
struct Follower {
    index: Arc<Mutex<EngineIndex>>,
    held: Arc<Mutex<HashSet<BlockId>>>,
    task: tokio::task::JoinHandle<()>,
}

impl Follower {
    fn start(publisher: &FakePublisher, kind: EngineKind, replay: bool) -> Self {
        let key = ClusterKey([3; 32]).units();
        let index = Arc::new(Mutex::new(EngineIndex::new(key, IndexConfig::new(kind, replay))));
        let held = Arc::new(Mutex::new(HashSet::new()));
        let source = KvEventSource {
            address: publisher.address().into(),
            replay: replay.then(|| publisher.replay_address().into()),
            topic: String::new(),
        };
        let limits = SubscriberLimits {
            probe: Duration::from_millis(50),
            pause: Duration::from_millis(10),
            ..SubscriberLimits::default()
        };
        let consumer = Arc::clone(&held);
        let report = move |events: Vec<KvEvent>| {
            let mut held = consumer.lock();
            for event in events {
                match event {
                    KvEvent::Stored { units, .. } => held.extend(units),
                    KvEvent::Removed { units, .. } => {
                        units.iter().for_each(|unit| assert!(held.remove(unit)))
                    }
                    KvEvent::Cleared => held.clear(),
                    KvEvent::ResumePoint { .. } => unreachable!(),
                }
            }
        };
        let task = spawn_kv_follower(source, limits, Arc::clone(&index), report);
        Self { index, held, task }
    }

    /// Waits until exactly the units of these prompts are held and the index is exact.
    async fn expect(&self, prompts: &[&[u32]]) {
        let key = ClusterKey([3; 32]).units();
        let expected: HashSet<BlockId> = prompts.iter().flat_map(|prompt| key.chain(ROOT, prompt)).collect();
        if becomes(|| *self.held.lock() == expected && self.index.lock().exact()).await {
            return;
        }
        let index = self.index.lock();
        let held = self.held.lock().len();
        panic!("{held} of {} units, {:?}, {:?}", expected.len(), index.inexact(), index.stats());
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[tokio::test]
async fn the_index_follows_a_publisher_over_losses_and_restarts() {
    for (kind, events, replay_topic) in [
        (EngineKind::Vllm, EventForm::VllmMaps, true),
        (EngineKind::Vllm, EventForm::VllmMaps, false),
        (EngineKind::Sglang, EventForm::SglangMaps, true),
    ] {
        let publisher =
            FakePublisher::start(PublisherForm { events, replay_topic, kept: 1000 }).await.unwrap();
        let fake = FakeEngine::start(kind, 100, Some(publisher.clone())).await.unwrap();
        let engine = connect(&fake, kind);
        let (a, b): (Vec<u32>, Vec<u32>) = ((0..64).collect(), (0..32).chain(100..132).collect());
        // Published before anybody follows.
        collect(&*engine, request(&a, 1)).await.unwrap();
        let follower = Follower::start(&publisher, kind, true);
        follower.expect(&[&a]).await;
        collect(&*engine, request(&b, 1)).await.unwrap();
        follower.expect(&[&a, &b]).await;
        let c: Vec<u32> = (200..264).collect();
        publisher.lose(1);
        collect(&*engine, request(&c, 1)).await.unwrap();
        // A probe finds what was lost without a successor.
        follower.expect(&[&a, &b, &c]).await;
        publisher.disconnect();
        let d: Vec<u32> = (300..332).collect();
        collect(&*engine, request(&d, 1)).await.unwrap();
        follower.expect(&[&a, &b, &c, &d]).await;
        publisher.restart();
        follower.expect(&[]).await;
        assert_eq!(follower.index.lock().stats().restarts, 1);
        fake.clear_cache();
        collect(&*engine, request(&a, 1)).await.unwrap();
        follower.expect(&[&a]).await;
    }
}

#[tokio::test]
async fn a_publisher_without_replay_is_exact_after_its_cache_was_cleared() {
    let form = PublisherForm { events: EventForm::VllmMaps, replay_topic: true, kept: 0 };
    let publisher = FakePublisher::start(form).await.unwrap();
    let fake = FakeEngine::start(EngineKind::Vllm, 100, Some(publisher.clone())).await.unwrap();
    let engine = connect(&fake, EngineKind::Vllm);
    let a: Vec<u32> = (0..64).collect();
    collect(&*engine, request(&a, 1)).await.unwrap();
    let follower = Follower::start(&publisher, EngineKind::Vllm, false);
    // The subscription needs a moment before messages arrive.
    while follower.index.lock().inexact() != Some(Inexact::HistoryLost) {
        let other: Vec<u32> = (1000..1032).collect();
        fake.clear_cache();
        collect(&*engine, request(&other, 1)).await.unwrap();
        if follower.index.lock().exact() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    fake.clear_cache();
    collect(&*engine, request(&a, 1)).await.unwrap();
    follower.expect(&[&a]).await;
}
