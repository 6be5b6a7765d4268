//! Requests with a grammar: the output always matches it, does not depend on other requests, and does not
//! delay them.

use crate::harness::{
    Ask, Asked, Heard, QUANT, ROOT, cramped, one_by_one, open, open_on, options, prompt, submit,
    submit_guided,
};
use crate::simulated::{simulated, small};
use crate::stages::Workers;
use cuda::Arch;
use kvasir_worker::engine::{Engine, StepOutcome};
use kvasir_worker::grammar::{COMPILE_TIME, Grammars, Guide};
use kvasir_worker::load::EngineOptions;
use kvasir_worker::telemetry::{Refused, RefusedLabel};
use proto::message::{FinishReason, GenerateError, GrammarSpec, GrammarSyntax, Sampling, Stop, TenantTurn};
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
    block_on(grammars.guide(ROOT, TenantTurn::of_root(ROOT), grammar.clone(), emitted)).unwrap()
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
fn check(text: &str, what: &str) {
    let value: Value =
        serde_json::from_str(text).unwrap_or_else(|error| panic!("{what}: {error} in {text:?}"));
    let members = value.as_object().unwrap();
    assert_eq!(members.len(), 4, "{what}: {text}");
    assert!(value["name"].as_str().unwrap().chars().count() <= 12, "{what}: {text}");
    let tags = value["tags"].as_array().unwrap();
    let colours = ["red", "green", "blue"];
    assert!((1..=3).contains(&tags.len()) && tags.iter().all(|tag| colours.contains(&tag.as_str().unwrap())));
    assert!((-5..=1200).contains(&value["count"].as_i64().unwrap()), "{what}: {text}");
    assert!(value["sure"].is_boolean(), "{what}: {text}");
}

/// A request that ends when the output is complete, also by the model's own end token.
fn ask(seed: u64, temperature: f32) -> Ask {
    let sampling = Sampling { temperature, seed, ..Sampling::default() };
    let stop = Stop { max_tokens: 300, ..Stop::default() };
    Ask { sampling, stop, ..Ask::greedy(prompt(seed, 20 + seed as usize), 1).tokens_only() }
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

fn alone(engine: &mut Engine, grammars: &Grammars, ask: &Ask, grammar: &GrammarSpec) -> Heard {
    let asked = submit_guided(engine, ask, guide(grammars, grammar, &ask.emitted));
    run(engine);
    asked.heard()
}

#[test]
fn answers_match_their_schema_with_every_vocabulary() {
    for model in KINDS {
        let mut engine = open(model, &options(model));
        let grammars = grammars(&engine);
        for (seed, temperature) in [(1, 0.0), (2, 1.0), (3, 1.0)] {
            let heard = alone(&mut engine, &grammars, &ask(seed, temperature), &schema());
            let what = format!("{model}, seed {seed}");
            assert_eq!(
                heard.finished.as_ref().map(|f| f.reason),
                Some(FinishReason::Stop),
                "{what}: {heard:?}"
            );
            check(&heard.text, &what);
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
    let heard = alone(&mut engine, &grammars, &ask(4, 1.0), &phone);
    let (code, number) = heard.text.split_once(' ').unwrap();
    assert!(code.len() == 3 && (3..=6).contains(&number.len()), "{}", heard.text);
    let sum = of(GrammarSyntax::Lark, "start: NUMBER (\" + \" NUMBER){1,3}\nNUMBER: /[0-9]{1,3}/");
    let heard = alone(&mut engine, &grammars, &ask(5, 1.0), &sum);
    assert!(heard.text.split(" + ").all(|number| number.parse::<u32>().is_ok()), "{}", heard.text);
    // Output that is cut off by its length is incomplete and has reason `Length`.
    let mut short = ask(6, 1.0);
    short.stop.max_tokens = 3;
    let heard = alone(&mut engine, &grammars, &short, &schema());
    assert_eq!(heard.finished.unwrap().reason, FinishReason::Length);
    // The grammar's end takes precedence over the minimum length and over `ignore_eos`.
    let mut long = ask(7, 0.0);
    (long.stop.min_tokens, long.stop.ignore_eos) = (200, true);
    let yes = of(GrammarSyntax::Regex, "yes");
    let heard = alone(&mut engine, &grammars, &long, &yes);
    assert_eq!((heard.text.as_str(), heard.finished.unwrap().reason), ("yes", FinishReason::Stop));
}

/// Greedy draws take the most likely allowed token, and log-probabilities are those of the model.
#[test]
fn greedy_draws_take_the_most_likely_allowed_token() {
    let mut engine = open(KINDS[0], &options(KINDS[0]));
    let grammars = grammars(&engine);
    let mut asked = ask(8, 0.0);
    asked.sampling.logprobs = Some(20);
    let heard = alone(&mut engine, &grammars, &asked, &of(GrammarSyntax::Regex, "[0-9]"));
    let free = one_by_one(&mut engine, &[Ask { stop: Stop { max_tokens: 1, ..Stop::default() }, ..asked }]);
    assert_eq!(heard.logprobs[0].top, free[0].logprobs[0].top, "they are of the raw logits");
    assert!(heard.logprobs[0].chosen <= free[0].logprobs[0].chosen);
}

/// The tokens are the same alone and among other requests, after preemption, after a cached prefix, as
/// choices of one prompt, and after tokens that another worker has sent.
#[test]
fn a_guided_answer_does_not_depend_on_other_requests() {
    for model in [KINDS[0], KINDS[3]] {
        let calm = EngineOptions { prefix_cache: false, ..options(model) };
        let mut engine = open(model, &calm);
        let known = grammars(&engine);
        let asks: Vec<Ask> = (1..7).map(|seed| ask(seed, 1.0)).collect();
        let wanted: Vec<Heard> = asks.iter().map(|ask| alone(&mut engine, &known, ask, &schema())).collect();
        // Other requests at the same time, in an arena that does not hold them all.
        let tight = cramped(model, &options(model), 420);
        let mut engine = open(model, &tight);
        let known = grammars(&engine);
        for round in 0..2 {
            let free: Vec<Asked> = (20..24)
                .map(|seed| submit(&mut engine, &Ask::greedy(prompt(seed, 60), 150).tokens_only()))
                .collect();
            let guided: Vec<Asked> = asks
                .iter()
                .map(|ask| submit_guided(&mut engine, ask, guide(&known, &schema(), &[])))
                .collect();
            run(&mut engine);
            for (asked, wanted) in guided.iter().zip(&wanted) {
                let heard = asked.heard();
                assert_eq!(heard.tokens, wanted.tokens, "{model}, round {round}");
                assert_eq!(heard.finished.unwrap().reason, FinishReason::Stop);
            }
            assert!(free.iter().all(|asked| asked.heard().tokens.len() == 150), "{model}");
        }
        assert!(engine.metrics().preemptions.get() > 0, "{model}: nobody was preempted");
        // Choices of one prompt.
        let same = |seed: u64| {
            let sampling = Sampling { temperature: 1.0, seed, ..Sampling::default() };
            Ask { sampling, together: 3, ..ask(9, 1.0) }
        };
        let choices: Vec<Ask> = (0..3).map(same).collect();
        let wanted: Vec<Heard> =
            choices.iter().map(|ask| alone(&mut engine, &known, ask, &schema())).collect();
        let mut engine = open(model, &options(model));
        let asked: Vec<Asked> = choices
            .iter()
            .map(|ask| submit_guided(&mut engine, ask, guide(&known, &schema(), &[])))
            .collect();
        run(&mut engine);
        for (asked, wanted) in asked.iter().zip(&wanted) {
            assert_eq!(asked.heard().tokens, wanted.tokens, "{model}: a choice");
        }
        // An earlier attempt sent a part of it: any part, also all of it.
        let whole = &wanted[0].tokens;
        for said in [1, whole.len() / 2, whole.len() - 1, whole.len()] {
            let resumed = Ask { emitted: whole[..said].to_vec(), ..choices[0].clone() };
            let heard = alone(&mut engine, &known, &resumed, &schema());
            assert_eq!(heard.tokens, whole[said..], "{model}: behind {said}");
            assert_eq!(heard.finished.unwrap().reason, FinishReason::Stop, "{model}: behind {said}");
        }
    }
}

/// Every token is allowed until the trigger occurs. What follows matches the grammar.
#[test]
fn a_grammar_may_start_at_a_trigger() {
    let mut engine = open(KINDS[0], &options(KINDS[0]));
    let grammars = grammars(&engine);
    let asked = Ask { stop: Stop { max_tokens: 60, ignore_eos: true, ..Stop::default() }, ..ask(11, 1.0) };
    let free = one_by_one(&mut engine, std::slice::from_ref(&asked)).remove(0);
    // A text that the model generates by itself, once.
    let letters: Vec<(usize, char)> = free.text.char_indices().collect();
    let begins = letters.iter().skip(10).find_map(|&(at, _)| {
        let text: String = free.text[at..].chars().take(3).collect();
        let plain = text.chars().all(|c| c.is_ascii_alphabetic());
        (plain && free.text.find(&text) == Some(at)).then_some((at, text))
    });
    let (at, trigger) = begins.unwrap();
    let grammar = GrammarSpec {
        trigger: Some(trigger.clone()),
        ..of(GrammarSyntax::Regex, "(?s:.?.?.?.?.?.?.?.?)-yes-")
    };
    let heard = alone(&mut engine, &grammars, &asked, &grammar);
    assert!(heard.text.starts_with(&free.text[..at + trigger.len()]), "{:?} of {:?}", heard.text, free.text);
    assert!(heard.text.ends_with("-yes-"), "{:?}", heard.text);
    // Also if an earlier attempt sent it.
    let whole = heard.tokens;
    for said in [3, whole.len() - 2, whole.len()] {
        let resumed = Ask { emitted: whole[..said].to_vec(), ..asked.clone() };
        let heard = alone(&mut engine, &grammars, &resumed, &grammar);
        assert_eq!(heard.tokens, whole[said..], "behind {said}");
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
    for (what, grammar, refused) in [
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
        let made = block_on(grammars.guide(ROOT, TenantTurn::of_root(ROOT), grammar.clone(), &[]));
        let took = since.elapsed();
        assert!(took < 20 * COMPILE_TIME, "{what} takes {took:?}");
        match (&made, refused) {
            (Err(GenerateError::InvalidField { field, reason }), Some(true) | None) => {
                assert_eq!(field, "response_format", "{what}");
                assert!(!reason.is_empty() && reason.len() < 400, "{what}: {reason}");
            }
            (Ok(_), None) => {}
            (made, _) => panic!("{what}: {:?}", made.as_ref().err()),
        }
        // A known grammar takes no time.
        let since = Instant::now();
        assert_eq!(
            block_on(grammars.guide(ROOT, TenantTurn::of_root(ROOT), grammar, &[])).is_ok(),
            made.is_ok(),
            "{what}"
        );
        assert!(since.elapsed() < 3 * COMPILE_TIME, "{what} again: {:?}", since.elapsed());
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
    let other = Ask::greedy(prompt(30, 40), 100).tokens_only();
    let wanted = one_by_one(&mut engine, std::slice::from_ref(&other)).remove(0);
    let hard =
        of(GrammarSyntax::Lark, "start: a a a a\na: b | b a | a b\nb: \"x\" | \"y\" | /[a-z]{1,40}/ | b b");
    let guides: Vec<Guide> = (0..4)
        .filter_map(|_| block_on(grammars.guide(ROOT, TenantTurn::of_root(ROOT), hard.clone(), &[])).ok())
        .collect();
    let hard: Vec<Asked> = guides
        .into_iter()
        .zip(40..)
        .map(|(guide, seed)| submit_guided(&mut engine, &ask(seed, 1.0), guide))
        .collect();
    let asked = submit(&mut engine, &other);
    run(&mut engine);
    assert_eq!(asked.heard().tokens, wanted.tokens);
    for asked in hard {
        let heard = asked.heard();
        assert!(heard.finished.is_some() || matches!(heard.failed, Some(GenerateError::InvalidField { .. })));
    }
    assert_eq!(engine.load().kv_used, 0);
}

/// With logits from another stage, and with a GPU, whole rows are read.
#[test]
fn an_answer_is_the_same_over_stages_and_on_a_gpu() {
    let asks: Vec<Ask> =
        [(1, 0.0), (2, 1.0), (3, 1.0)].map(|(seed, temperature)| ask(seed, temperature)).into();
    for model in [KINDS[0], KINDS[3]] {
        let mut engine = open(model, &options(model));
        let known = grammars(&engine);
        let wanted: Vec<Heard> = asks.iter().map(|ask| alone(&mut engine, &known, ask, &schema())).collect();
        let workers = Workers::start(model, 1, &options(model));
        let mut engine = workers.engine(model, &options(model)).unwrap();
        let known = grammars(&engine);
        let asked: Vec<Asked> =
            asks.iter().map(|ask| submit_guided(&mut engine, ask, guide(&known, &schema(), &[]))).collect();
        run(&mut engine);
        for (asked, wanted) in asked.iter().zip(&wanted) {
            assert_eq!(asked.heard().tokens, wanted.tokens, "{model} over two stages");
        }
    }
    let (model, options) = (QUANT[0], small(QUANT[0]));
    let few = of(GrammarSyntax::Regex, "[0-9]{2}");
    let asks = [(4, 0.0), (5, 1.0)]
        .map(|(seed, temperature)| Ask { prompt: prompt(seed, 6), ..ask(seed, temperature) });
    let heard = |mut engine: Engine| {
        let known = grammars(&engine);
        asks.each_ref().map(|ask| alone(&mut engine, &known, ask, &few).tokens)
    };
    let device = open_on(model, &options, simulated(Arch::CHECKED[0], &options));
    assert_eq!(heard(device), heard(open(model, &options)), "{model} on the interpreter");
}
