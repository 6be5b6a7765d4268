//! Requests with a grammar: the output always matches it, does not depend on other requests, and does not
//! delay them.

use crate::harness::{
    Output, QUANT, ROOT, Request, Submitted, cramped, one_by_one, open, open_on, options, prompt, submit,
    submit_guided,
};
use crate::simulated::{simulated, small};
use crate::stages::Workers;
use cuda::Arch;
use engine::engine::{Engine, StepOutcome};
use engine::grammar::{COMPILE_TIME, Grammars, Guide};
use engine::telemetry::{Refused, RefusedLabel};
use kvasir_worker::load::EngineOptions;
use proto::message::{FinishReason, GenerateError, GrammarSpec, GrammarSyntax, Sampling, Stop, TenantShare};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// One vocabulary of each kind: SentencePiece, byte-level BPE, BPE of characters; with recurrent states, with
/// windows.
const KINDS: [&str; 5] = [
    "tiny/llama/llama-f32",
    "tiny/gpt-oss/gpt-oss-f32",
    "tiny/gemma4/gemma4-f32",
    "tiny/qwen35/qwen35-f32",
    "tiny/gemma3/gemma3-f32",
];

fn grammars(engine: &Engine) -> Grammars {
    Grammars::new(engine.tokenizer(), engine.metrics().grammars.clone(), Arc::new(|| {})).unwrap()
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(future)
}

fn guide(grammars: &Grammars, grammar: &GrammarSpec, emitted: &[u32]) -> Guide {
    block_on(grammars.guide(ROOT, TenantShare::of_root(ROOT), grammar.clone(), emitted)).unwrap()
}

fn of(syntax: GrammarSyntax, text: impl Into<String>) -> GrammarSpec {
    GrammarSpec { field: "response_format".into(), syntax, text: text.into(), trigger: None }
}

fn schema() -> GrammarSpec {
    let schema = json!({
        "x-guidance": {"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "},
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
            "count": {"type": "integer", "minimum": -5, "maximum": 1200},
            "sure": {"type": "boolean"},
        },
        "required": ["name", "tags", "count", "sure"],
        "additionalProperties": false,
    });
    of(GrammarSyntax::JsonSchema, schema.to_string())
}

/// Panics unless the text matches [`schema`].
fn check(text: &str, case: &str) {
    let value: Value =
        serde_json::from_str(text).unwrap_or_else(|error| panic!("{case}: {error} in {text:?}"));
    let members = value.as_object().unwrap();
    assert_eq!(members.len(), 4, "{case}: {text}");
    assert!(value["name"].as_str().unwrap().chars().count() <= 12, "{case}: {text}");
    let tags = value["tags"].as_array().unwrap();
    let colours = ["red", "green", "blue"];
    assert!((1..=3).contains(&tags.len()) && tags.iter().all(|tag| colours.contains(&tag.as_str().unwrap())));
    assert!((-5..=1200).contains(&value["count"].as_i64().unwrap()), "{case}: {text}");
    assert!(value["sure"].is_boolean(), "{case}: {text}");
}

/// A request that ends when the output is complete, also by the model's own end token.
fn request(seed: u64, temperature: f32) -> Request {
    let sampling = Sampling { temperature, seed, ..Sampling::default() };
    let stop = Stop { max_tokens: 300, ..Stop::default() };
    Request { sampling, stop, ..Request::greedy(prompt(seed, 20 + seed as usize), 1).tokens_only() }
}

fn run(engine: &mut Engine) {
    let end = Instant::now() + Duration::from_secs(120);
    while engine.has_work() {
        assert!(Instant::now() < end, "requests do not end");
        if engine.step(Instant::now()).unwrap() == StepOutcome::Idle {
            std::thread::yield_now();
        }
    }
}

fn alone(engine: &mut Engine, grammars: &Grammars, request: &Request, grammar: &GrammarSpec) -> Output {
    let submitted = submit_guided(engine, request, guide(grammars, grammar, &request.emitted));
    run(engine);
    submitted.output()
}

#[test]
fn answers_match_their_schema_with_every_vocabulary() {
    for model in KINDS {
        let mut engine = open(model, &options(model));
        let grammars = grammars(&engine);
        for (seed, temperature) in [(1, 0.0), (2, 1.0), (3, 1.0)] {
            let output = alone(&mut engine, &grammars, &request(seed, temperature), &schema());
            let case = format!("{model}, seed {seed}");
            assert_eq!(
                output.finished.as_ref().map(|f| f.reason),
                Some(FinishReason::Stop),
                "{case}: {output:?}"
            );
            check(&output.text, &case);
        }
        assert_eq!(engine.load().kv_used, 0, "{model}");
        assert_eq!(engine.metrics().grammars.compiled.get(), 1, "{model}: it is compiled once");
    }
}

#[test]
fn regular_expressions_and_lark_grammars_are_followed() {
    let mut engine = open(KINDS[0], &options(KINDS[0]));
    let grammars = grammars(&engine);
    let phone = of(GrammarSyntax::Regex, r"\+[0-9]{2} [0-9]{3,6}");
    let output = alone(&mut engine, &grammars, &request(4, 1.0), &phone);
    let (code, number) = output.text.split_once(' ').unwrap();
    assert!(code.len() == 3 && (3..=6).contains(&number.len()), "{}", output.text);
    let sum = of(GrammarSyntax::Lark, "start: NUMBER (\" + \" NUMBER){1,3}\nNUMBER: /[0-9]{1,3}/");
    let output = alone(&mut engine, &grammars, &request(5, 1.0), &sum);
    assert!(output.text.split(" + ").all(|number| number.parse::<u32>().is_ok()), "{}", output.text);
    // Output that is cut off by its length is incomplete and has reason `Length`.
    let mut short = request(6, 1.0);
    short.stop.max_tokens = 3;
    let output = alone(&mut engine, &grammars, &short, &schema());
    assert_eq!(output.finished.unwrap().reason, FinishReason::Length);
    // The grammar's end takes precedence over the minimum length and over `ignore_eos`.
    let mut long = request(7, 0.0);
    (long.stop.min_tokens, long.stop.ignore_eos) = (200, true);
    let yes = of(GrammarSyntax::Regex, "yes");
    let output = alone(&mut engine, &grammars, &long, &yes);
    assert_eq!((output.text.as_str(), output.finished.unwrap().reason), ("yes", FinishReason::Stop));
}

/// Greedy draws take the most likely allowed token, and log-probabilities are those of the model.
#[test]
fn greedy_draws_take_the_most_likely_allowed_token() {
    let mut engine = open(KINDS[0], &options(KINDS[0]));
    let grammars = grammars(&engine);
    let mut request = request(8, 0.0);
    request.sampling.logprobs = Some(20);
    let output = alone(&mut engine, &grammars, &request, &of(GrammarSyntax::Regex, "[0-9]"));
    let free =
        one_by_one(&mut engine, &[Request { stop: Stop { max_tokens: 1, ..Stop::default() }, ..request }]);
    assert_eq!(output.logprobs[0].top, free[0].logprobs[0].top, "they are of the raw logits");
    assert!(output.logprobs[0].chosen <= free[0].logprobs[0].chosen);
}

/// The tokens are the same alone and among other requests, after preemption, after a cached prefix, as
/// choices of one prompt, and after tokens that another worker has sent.
#[test]
fn a_guided_answer_does_not_depend_on_other_requests() {
    for model in [KINDS[0], KINDS[3]] {
        let baseline = EngineOptions { prefix_cache: false, ..options(model) };
        let mut engine = open(model, &baseline);
        let engine_grammars = grammars(&engine);
        let requests: Vec<Request> = (1..7).map(|seed| request(seed, 1.0)).collect();
        let expected: Vec<Output> =
            requests.iter().map(|request| alone(&mut engine, &engine_grammars, request, &schema())).collect();
        // Other requests at the same time, in an arena that does not hold them all.
        let tight = cramped(model, &options(model), 420);
        let mut engine = open(model, &tight);
        let engine_grammars = grammars(&engine);
        for round in 0..2 {
            let free: Vec<Submitted> = (20..24)
                .map(|seed| submit(&mut engine, &Request::greedy(prompt(seed, 60), 150).tokens_only()))
                .collect();
            let guided: Vec<Submitted> = requests
                .iter()
                .map(|request| submit_guided(&mut engine, request, guide(&engine_grammars, &schema(), &[])))
                .collect();
            run(&mut engine);
            for (submitted, expected) in guided.iter().zip(&expected) {
                let output = submitted.output();
                assert_eq!(output.tokens, expected.tokens, "{model}, round {round}");
                assert_eq!(output.finished.unwrap().reason, FinishReason::Stop);
            }
            assert!(free.iter().all(|submitted| submitted.output().tokens.len() == 150), "{model}");
        }
        assert!(engine.metrics().preemptions.get() > 0, "{model}: nobody was preempted");
        // Choices of one prompt.
        let same = |seed: u64| {
            let sampling = Sampling { temperature: 1.0, seed, ..Sampling::default() };
            Request { sampling, together: 3, ..request(9, 1.0) }
        };
        let choices: Vec<Request> = (0..3).map(same).collect();
        let expected: Vec<Output> =
            choices.iter().map(|request| alone(&mut engine, &engine_grammars, request, &schema())).collect();
        let mut engine = open(model, &options(model));
        let submitted: Vec<Submitted> = choices
            .iter()
            .map(|request| submit_guided(&mut engine, request, guide(&engine_grammars, &schema(), &[])))
            .collect();
        run(&mut engine);
        for (submitted, expected) in submitted.iter().zip(&expected) {
            assert_eq!(submitted.output().tokens, expected.tokens, "{model}: a choice");
        }
        // An earlier attempt sent a part of it: any part, also all of it.
        let whole = &expected[0].tokens;
        for sent in [1, whole.len() / 2, whole.len() - 1, whole.len()] {
            let resumed = Request { emitted: whole[..sent].to_vec(), ..choices[0].clone() };
            let output = alone(&mut engine, &engine_grammars, &resumed, &schema());
            assert_eq!(output.tokens, whole[sent..], "{model}: behind {sent}");
            assert_eq!(output.finished.unwrap().reason, FinishReason::Stop, "{model}: behind {sent}");
        }
    }
}

/// Every token is allowed until the trigger occurs. What follows matches the grammar.
#[test]
fn a_grammar_may_start_at_a_trigger() {
    let mut engine = open(KINDS[0], &options(KINDS[0]));
    let grammars = grammars(&engine);
    let request =
        Request { stop: Stop { max_tokens: 60, ignore_eos: true, ..Stop::default() }, ..request(11, 1.0) };
    let free = one_by_one(&mut engine, std::slice::from_ref(&request)).remove(0);
    // A text that the model generates by itself, once.
    let letters: Vec<(usize, char)> = free.text.char_indices().collect();
    let found = letters.iter().skip(10).find_map(|&(at, _)| {
        let text: String = free.text[at..].chars().take(3).collect();
        let plain = text.chars().all(|c| c.is_ascii_alphabetic());
        (plain && free.text.find(&text) == Some(at)).then_some((at, text))
    });
    let (at, trigger) = found.unwrap();
    let grammar = GrammarSpec {
        trigger: Some(trigger.clone()),
        ..of(GrammarSyntax::Regex, "(?s:.?.?.?.?.?.?.?.?)-yes-")
    };
    let output = alone(&mut engine, &grammars, &request, &grammar);
    assert!(
        output.text.starts_with(&free.text[..at + trigger.len()]),
        "{:?} of {:?}",
        output.text,
        free.text
    );
    assert!(output.text.ends_with("-yes-"), "{:?}", output.text);
    // Also if an earlier attempt sent it.
    let whole = output.tokens;
    for sent in [3, whole.len() - 2, whole.len()] {
        let resumed = Request { emitted: whole[..sent].to_vec(), ..request.clone() };
        let output = alone(&mut engine, &grammars, &resumed, &grammar);
        assert_eq!(output.tokens, whole[sent..], "behind {sent}");
    }
}

/// Invalid and too large grammars are refused with the field's name and within their budget. Valid ones work.
#[test]
fn sec_grammar_bomb() {
    let engine = open(KINDS[0], &options(KINDS[0]));
    let grammars = grammars(&engine);
    // Compiled beforehand, so that it is not part of the measurement.
    guide(&grammars, &schema(), &[]);
    let json = |schema: Value| of(GrammarSyntax::JsonSchema, schema.to_string());
    let nested = (0..40).fold(json!({}), |inner, _| json!({"items": inner}));
    let refs: Vec<Value> = (0..400).map(|n| json!({"$ref": format!("#/$defs/d{}", n % 7)})).collect();
    let defs: serde_json::Map<String, Value> = (0..7)
        .map(|n| (format!("d{n}"), json!({"type": "object", "additionalProperties": {"$ref": "#"}})))
        .collect();
    let big = "x".repeat(300 << 10);
    for (case, grammar, refused) in [
        ("repeats", of(GrammarSyntax::Regex, "(a{1000}){1000}"), None),
        ("repeats of anything", json(json!({"type": "string", "pattern": "((.*a){200}){200}"})), None),
        ("alternatives", of(GrammarSyntax::Regex, "(((a|b)*c){50}|d){2000}"), None),
        ("stars", of(GrammarSyntax::Regex, "foo**"), None),
        ("a look-ahead", of(GrammarSyntax::Regex, "(?=a)b"), Some(true)),
        ("an open group", of(GrammarSyntax::Regex, "(a"), Some(true)),
        ("a loop", json(json!({"$ref": "#"})), Some(true)),
        ("nothing at all", json(json!({"type": "string", "minLength": 2, "maxLength": 1})), Some(true)),
        ("another host", json(json!({"$ref": "http://127.0.0.1:1/x"})), Some(true)),
        ("references", json(json!({"anyOf": refs, "$defs": defs})), None),
        ("depth", json(nested), Some(true)),
        ("bytes", of(GrammarSyntax::Regex, big), Some(true)),
        ("no JSON", of(GrammarSyntax::JsonSchema, "{"), Some(true)),
        ("an unknown rule", of(GrammarSyntax::Lark, "start: nothing"), Some(true)),
        ("no grammar", of(GrammarSyntax::Lark, "%%%"), Some(true)),
        ("left recursion", of(GrammarSyntax::Lark, "start: start start | \"a\""), None),
    ] {
        let since = Instant::now();
        let made = block_on(grammars.guide(ROOT, TenantShare::of_root(ROOT), grammar.clone(), &[]));
        let took = since.elapsed();
        assert!(took < 20 * COMPILE_TIME, "{case} takes {took:?}");
        match (&made, refused) {
            (Err(GenerateError::InvalidField { field, reason }), Some(true) | None) => {
                assert_eq!(field, "response_format", "{case}");
                assert!(!reason.is_empty() && reason.len() < 400, "{case}: {reason}");
            }
            (Ok(_), None) => {}
            (made, _) => panic!("{case}: {:?}", made.as_ref().err()),
        }
        // A known grammar takes no time.
        let since = Instant::now();
        assert_eq!(
            block_on(grammars.guide(ROOT, TenantShare::of_root(ROOT), grammar, &[])).is_ok(),
            made.is_ok(),
            "{case}"
        );
        assert!(since.elapsed() < 3 * COMPILE_TIME, "{case} again: {:?}", since.elapsed());
    }
    let metrics = &engine.metrics().grammars;
    let refused = metrics.refusals.get_or_create(&RefusedLabel { reason: Refused::invalid }).get();
    assert!(metrics.compiled.get() > 0 && refused > 0);
}

/// A grammar that is expensive to follow at most ends its own request. Other requests continue.
#[test]
fn a_hard_grammar_is_its_own_requests_trouble() {
    let mut engine = open(KINDS[0], &options(KINDS[0]));
    let grammars = grammars(&engine);
    let other = Request::greedy(prompt(30, 40), 100).tokens_only();
    let expected = one_by_one(&mut engine, std::slice::from_ref(&other)).remove(0);
    let hard =
        of(GrammarSyntax::Lark, "start: a a a a\na: b | b a | a b\nb: \"x\" | \"y\" | /[a-z]{1,40}/ | b b");
    let guides: Vec<Guide> = (0..4)
        .filter_map(|_| block_on(grammars.guide(ROOT, TenantShare::of_root(ROOT), hard.clone(), &[])).ok())
        .collect();
    let hard: Vec<Submitted> = guides
        .into_iter()
        .zip(40..)
        .map(|(guide, seed)| submit_guided(&mut engine, &request(seed, 1.0), guide))
        .collect();
    let submitted = submit(&mut engine, &other);
    run(&mut engine);
    assert_eq!(submitted.output().tokens, expected.tokens);
    for submitted in hard {
        let output = submitted.output();
        assert!(
            output.finished.is_some() || matches!(output.failed, Some(GenerateError::InvalidField { .. }))
        );
    }
    assert_eq!(engine.load().kv_used, 0);
}

/// With logits from another stage, and with a GPU, whole rows are read.
#[test]
fn an_answer_is_the_same_over_stages_and_on_a_gpu() {
    let requests: Vec<Request> =
        [(1, 0.0), (2, 1.0), (3, 1.0)].map(|(seed, temperature)| request(seed, temperature)).into();
    for model in [KINDS[0], KINDS[3]] {
        let mut engine = open(model, &options(model));
        let engine_grammars = grammars(&engine);
        let expected: Vec<Output> =
            requests.iter().map(|request| alone(&mut engine, &engine_grammars, request, &schema())).collect();
        let workers = Workers::start(model, 1, &options(model));
        let mut engine = workers.engine(model, &options(model)).unwrap();
        let engine_grammars = grammars(&engine);
        let submitted: Vec<Submitted> = requests
            .iter()
            .map(|request| submit_guided(&mut engine, request, guide(&engine_grammars, &schema(), &[])))
            .collect();
        run(&mut engine);
        for (submitted, expected) in submitted.iter().zip(&expected) {
            assert_eq!(submitted.output().tokens, expected.tokens, "{model} over two stages");
        }
    }
    let (model, options) = (QUANT[0], small(QUANT[0]));
    let few = of(GrammarSyntax::Regex, "[0-9]{2}");
    let requests = [(4, 0.0), (5, 1.0)]
        .map(|(seed, temperature)| Request { prompt: prompt(seed, 6), ..request(seed, temperature) });
    let output = |mut engine: Engine| {
        let engine_grammars = grammars(&engine);
        requests.each_ref().map(|request| alone(&mut engine, &engine_grammars, request, &few).tokens)
    };
    let device = open_on(model, &options, simulated(Arch::CHECKED[0], &options));
    assert_eq!(output(device), output(open(model, &options)), "{model} on the interpreter");
}
