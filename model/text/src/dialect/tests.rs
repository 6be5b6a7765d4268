use super::*;
use crate::tokenizer::tests::tiny;
use serde_json::json;
use std::sync::Arc;

fn of(template: &str) -> Dialect {
    Dialect::of(Some(&ChatTemplate::new(template, "", "").unwrap()), &tiny("qwen3"))
}

fn tools() -> Vec<Tool> {
    let parameters = json!({"type": "object"});
    let tool = |name: &str| Tool {
        name: name.into(),
        description: None,
        parameters: parameters.clone(),
        strict: false,
    };
    vec![tool("weather"), tool("time")]
}

/// Simplified templates of the model families, with the expected dialects.
#[test]
fn the_dialect_follows_from_the_template() {
    for (template, calls, native, thinks) in [
        ("{% if tools %}<tool_call></tool_call>{% endif %}", Calls::Hermes, true, false),
        ("{% if tools %}<tool_call></tool_call>{% endif %}<think>", Calls::Hermes, true, true),
        ("{% if tools %}parameters Environment: ipython{% endif %}", Calls::Llama, true, false),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]", Calls::Mistral, true, false),
        ("{% if tools %}<|tool_call|>{% endif %}", Calls::Granite, true, false),
        ("{% if tools %}<|start|>{% endif %}<|channel|>final<|message|>", Calls::Harmony, true, true),
        // Calls that are not JSON.
        ("{% if tools %}<tool_call><function={% endif %}", Calls::Hermes, false, false),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", Calls::Hermes, false, false),
    ] {
        let dialect = of(template);
        assert_eq!(
            (dialect.calls(), dialect.is_native(), dialect.thinks()),
            (calls, native, thinks),
            "{template}"
        );
    }
    assert_eq!(Dialect::of(None, &tiny("llama")).calls(), Calls::Hermes);
}

/// Parses an answer in pieces of `size` characters; the model ends it.
fn parse_in_pieces(dialect: &Arc<Dialect>, thinking: bool, answer: &str, size: usize) -> Vec<ParsedDelta> {
    parse_until(dialect, thinking, answer, size, false)
}

fn parse_until(
    dialect: &Arc<Dialect>,
    thinking: bool,
    answer: &str,
    size: usize,
    cut: bool,
) -> Vec<ParsedDelta> {
    let names = tools().into_iter().map(|tool| tool.name).collect();
    let mut parser = OutputParser::new(Arc::clone(dialect), names, thinking);
    let letters: Vec<char> = answer.chars().collect();
    let mut all: Vec<ParsedDelta> = Vec::new();
    let pieces = letters.chunks(size).map(|piece| piece.iter().collect::<String>());
    for delta in pieces.flat_map(|piece| parser.push(&piece)).collect::<Vec<_>>() {
        add(&mut all, delta);
    }
    for delta in parser.finish(cut) {
        add(&mut all, delta);
    }
    all
}

fn add(all: &mut Vec<ParsedDelta>, delta: ParsedDelta) {
    match (all.last_mut(), delta) {
        (Some(ParsedDelta::Text(before)), ParsedDelta::Text(text))
        | (Some(ParsedDelta::Thought(before)), ParsedDelta::Thought(text))
        | (Some(ParsedDelta::Arguments(before)), ParsedDelta::Arguments(text)) => before.push_str(&text),
        (_, delta) => all.push(delta),
    }
}

#[test]
fn the_parser_separates_reasoning() {
    let hermes = of("{% if tools %}<tool_call></tool_call>{% endif %}<think>");
    let harmony = of("{% if tools %}<|start|>{% endif %}<|channel|>final<|message|>");
    for (dialect, thinking, pieces) in [
        (&hermes, false, &[("<think>", true), ("hm", true), ("</think>", false), ("so", false)][..]),
        (&hermes, true, &[("hm", true), ("</think>", false), ("so", false), ("<think>", false)]),
        (
            &harmony,
            false,
            &[
                ("<|channel|>", false),
                ("analysis", false),
                ("<|message|>", true),
                ("hm", true),
                ("<|end|>", false),
                ("<|start|>assistant<|channel|>final<|message|>", false),
                ("so", false),
            ],
        ),
    ] {
        let mut parser = OutputParser::new(Arc::new(dialect.clone()), Vec::new(), thinking);
        assert_eq!(parser.is_thinking(), thinking);
        for (piece, thinks) in pieces {
            parser.push(piece);
            assert_eq!(parser.is_thinking(), *thinks, "{piece} of {pieces:?}");
        }
    }
}

#[test]
fn answers_are_taken_apart_however_they_come() {
    let text = |text: &str| ParsedDelta::Text(text.into());
    let thought = |text: &str| ParsedDelta::Thought(text.into());
    let call = |name: &str| ParsedDelta::Call(name.into());
    let arguments = |text: &str| ParsedDelta::Arguments(text.into());
    let hermes = of("{% if tools %}<tool_call>{% endif %}<think>");
    let llama = of("{% if tools %}parameters ipython{% endif %}");
    let mistral = of("{% if tools %}[TOOL_CALLS]{% endif %}");
    let harmony = of("{% if tools %}{% endif %}<|channel|><|message|>");
    let table: Vec<(&Dialect, bool, &str, Vec<ParsedDelta>)> = vec![
        (&hermes, false, "Hello <b>you</b>", vec![text("Hello <b>you</b>")]),
        (&hermes, false, " two\n\nlines ", vec![text(" two\n\nlines ")]),
        (&hermes, false, "<think>\nHm.\n</think>\n\nYes.", vec![thought("\nHm.\n"), text("Yes.")]),
        (&hermes, true, "Hm.</think>Yes.", vec![thought("Hm."), text("Yes.")]),
        (&hermes, true, "Hm, for too long", vec![thought("Hm, for too long")]),
        (&hermes, false, "I say <think> and </think>.", vec![text("I say <think> and </think>.")]),
        (
            &hermes,
            false,
            "Let me see.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"at\": \"Ol}\\\"e\", \"d\": [1, {}]}}\n</tool_call>\n\
             <tool_call>\n{\"name\": \"time\", \"arguments\": {}}\n</tool_call>",
            vec![
                text("Let me see.\n"),
                call("weather"),
                arguments("{\"at\": \"Ol}\\\"e\", \"d\": [1, {}]}"),
                call("time"),
                arguments("{}"),
            ],
        ),
        (
            &hermes,
            false,
            "<think>x</think><tool_call>{\"arguments\": {\"a\": 1}, \"name\": \"time\"}</tool_call>",
            vec![thought("x"), call("time"), arguments("{\"a\": 1}")],
        ),
        // Arguments encoded in a string, and no arguments.
        (
            &hermes,
            false,
            "<tool_call>{\"name\": \"time\", \"arguments\": \"{\\\"a\\\": 1}\"}</tool_call><tool_call>{\"name\": \"time\"}</tool_call>",
            vec![call("time"), arguments("{\"a\": 1}"), call("time"), arguments("{}")],
        ),
        // Not a tool of the request, and not a call.
        (
            &hermes,
            false,
            "<tool_call>{\"name\": \"rm\", \"arguments\": {}}</tool_call>",
            vec![text("<tool_call>{\"name\": \"rm\", \"arguments\": {}}</tool_call>")],
        ),
        (&hermes, false, "<tool_call>nothing", vec![text("<tool_call>nothing")]),
        (&hermes, false, "<tool_call>{\"name\": ", vec![text("<tool_call>{\"name\": ")]),
        // Cut off by the length limit.
        (
            &hermes,
            false,
            "<tool_call>{\"name\": \"time\", \"arguments\": {\"a\": \"b",
            vec![call("time"), arguments("{\"a\": \"b")],
        ),
        (
            &llama,
            false,
            "{\"name\": \"time\", \"parameters\": {\"zone\": \"UTC\"}}",
            vec![call("time"), arguments("{\"zone\": \"UTC\"}")],
        ),
        (
            &llama,
            false,
            "<|python_tag|>{\"name\": \"time\", \"parameters\": {}}; {\"name\": \"weather\", \"parameters\": {}}",
            vec![call("time"), arguments("{}"), call("weather"), arguments("{}")],
        ),
        (&llama, false, "{\"name\": \"Ann\", \"age\": 3}", vec![text("{\"name\": \"Ann\", \"age\": 3}")]),
        (
            &mistral,
            false,
            "[TOOL_CALLS][{\"name\": \"time\", \"arguments\": {}}, {\"name\": \"weather\", \"arguments\": {\"a\": 2}}]",
            vec![call("time"), arguments("{}"), call("weather"), arguments("{\"a\": 2}")],
        ),
        (
            &harmony,
            false,
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
            vec![thought("Hm."), text("Yes.")],
        ),
        (
            &harmony,
            false,
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.time \
             <|constrain|>json<|message|>{\"zone\": \"UTC\"}",
            vec![thought("Hm."), call("time"), arguments("{\"zone\": \"UTC\"}")],
        ),
        (&harmony, false, "Plain.", vec![text("Plain.")]),
    ];
    for (dialect, thinking, answer, expected) in table {
        let dialect = Arc::new(dialect.clone());
        for size in [1, 2, 3, 7, 1000] {
            assert_eq!(parse_in_pieces(&dialect, thinking, answer, size), expected, "{answer} by {size}");
        }
    }
}

#[test]
fn a_cut_off_call_emits_no_mark() {
    let call = "{\"name\": \"weather\", \"arguments\": {\"at\": \"Oslo\"}}";
    let parameters = call.replace("arguments", "parameters");
    let table = [
        ("{% if tools %}<tool_call>{% endif %}", format!("<tool_call>\n{call}\n</tool_call>\n<tool_call>\n{call}\n</tool_call>")),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", format!("[TOOL_CALLS][{call}, {call}]")),
        ("{% if tools %}<|tool_call|>{% endif %}", format!("<|tool_call|>[{call}]")),
        ("{% if tools %}parameters ipython{% endif %}", parameters.clone()),
        ("{% if tools %}parameters ipython{% endif %}", format!("<|python_tag|>{parameters}")),
        (
            "{% if tools %}{% endif %}<|channel|><|message|>",
            "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{\"at\": \"Oslo\"}<|call|>".to_owned(),
        ),
    ];
    for (template, answer) in table {
        let dialect = Arc::new(of(template));
        for (at, size) in (0..=answer.len()).flat_map(|at| [(at, 1), (at, 1000)]) {
            let deltas = parse_until(&dialect, false, &answer[..at], size, true);
            let is_text =
                |delta: &ParsedDelta| matches!(delta, ParsedDelta::Text(_) | ParsedDelta::Thought(_));
            assert!(!deltas.iter().any(is_text), "{deltas:?} of {}", &answer[..at]);
        }
        let whole = parse_until(&dialect, false, &answer, 3, true);
        assert_eq!(whole.first(), Some(&ParsedDelta::Call("weather".into())), "{answer}");
        // Text stays text, also if it ends like the beginning of a mark.
        let text = |text: &str| vec![ParsedDelta::Text(text.into())];
        assert_eq!(parse_until(&dialect, false, "is 1 <", 2, true), text("is 1 <"));
        assert_eq!(parse_until(&dialect, false, "a [", 2, true), text("a ["));
    }
    let llama = Arc::new(of("{% if tools %}parameters ipython{% endif %}"));
    let json = vec![ParsedDelta::Text("{\"age\": 3".into())];
    assert_eq!(parse_until(&llama, false, "{\"age\": 3", 4, true), json);
}

/// If a mark has a token, only the token counts.
#[test]
fn ordinary_text_is_no_mark_where_the_vocabulary_has_a_token_for_it() {
    let base = of("{% if tools %}<tool_call></tool_call>{% endif %}<think>");
    let marks = vec![(3, THINK), (4, THOUGHT), (5, CALL), (6, CALLED)];
    let dialect = Arc::new(Dialect { marks, ..base });
    let mut parser = OutputParser::new(Arc::clone(&dialect), vec!["time".into()], true);
    let mut deltas = parser.push("I write </think> and <tool_call>");
    deltas.extend(parser.push_mark(THOUGHT));
    deltas.extend(parser.push("\n\nNo <tool_call>{\"name\": \"time\"}</tool_call> yet. "));
    deltas.extend(parser.push_mark(CALL));
    deltas.extend(parser.push("{\"name\": \"time\", \"arguments\": {\"a\": \"</tool_call>\"}}"));
    deltas.extend(parser.push_mark(CALLED));
    deltas.extend(parser.finish(false));
    let expected = [
        ParsedDelta::Thought("I write </think> and <tool_call>".into()),
        ParsedDelta::Text("No <tool_call>{\"name\": \"time\"}</tool_call> yet. ".into()),
        ParsedDelta::Call("time".into()),
        ParsedDelta::Arguments("{\"a\": \"</tool_call>\"}".into()),
    ];
    assert_eq!(deltas, expected);
    let lark = dialect.calls_grammar(&tools(), false, false, "<think>");
    assert!(lark.contains("thought: /(?s:.*)/ <[4]>") && lark.contains("<[5]> \"\\n\" call"), "{lark}");
}

proptest::proptest! {
    /// The parser loses nothing of an answer without calls, and accepts any answer.
    #[test]
    fn the_parser_loses_no_text(
        parts in proptest::collection::vec(proptest::sample::select(vec![
            "<think>", "</think>", "<tool_call>", "</tool_call>", "{\"name\": \"time\"", ", \"arguments\": {", "}", "\"",
            "\\", "[", "]", " ", "é", "x", "<|channel|>", "<|message|>", "<|end|>", "to=functions.time",
        ]), 0..24),
        size in 1usize..9,
    ) {
        let answer = parts.concat();
        for template in ["{% if tools %}<tool_call>{% endif %}<think>", "{% if tools %}<|channel|><|message|>{% endif %}",
            "{% if tools %}parameters ipython{% endif %}"] {
            let dialect = Arc::new(of_cached(template));
            let whole = parse_in_pieces(&dialect, false, &answer, 1000);
            proptest::prop_assert_eq!(&parse_in_pieces(&dialect, false, &answer, size), &whole);
            let plain = Arc::new(Dialect { thinks: false, calls: Calls::Llama, native: true, marks: Vec::new() });
            let mut parser = OutputParser::new(plain, Vec::new(), false);
            let mut deltas = parser.push(&answer);
            deltas.extend(parser.finish(false));
            let text: String = deltas.into_iter().map(|delta| match delta { ParsedDelta::Text(text) => text, _ => String::new() }).collect();
            proptest::prop_assert_eq!(&text, &answer);
        }
    }
}

fn of_cached(template: &str) -> Dialect {
    static TOKENIZER: std::sync::OnceLock<Tokenizer> = std::sync::OnceLock::new();
    let tokenizer = TOKENIZER.get_or_init(|| tiny("qwen3"));
    Dialect::of(Some(&ChatTemplate::new(template, "", "").unwrap()), tokenizer)
}

#[test]
fn grammars_of_calls_are_as_the_dialect_writes_them() {
    let hermes = of("{% if tools %}<tool_call>{% endif %}");
    let lark = hermes.calls_grammar(&tools(), true, false, "");
    assert!(lark.starts_with("start: calls\n"), "{lark}");
    assert!(
        lark.contains("call_0: \"{\\\"name\\\": \\\"weather\\\", \\\"arguments\\\": \" args_0 \"}\""),
        "{lark}"
    );
    assert!(lark.contains("call: call_0 | call_1"), "{lark}");
    assert!(lark.contains("calls: \"<tool_call>\" \"\\n\" call \"\\n\" \"</tool_call>\" ("), "{lark}");
    let single = hermes.calls_grammar(&tools(), false, true, "");
    assert!(single.contains("calls: \"\\n\" call \"\\n\" \"</tool_call>\"\n"), "{single}");
    // Reasoning comes first, and may have been begun by the prompt.
    let thinks = of("{% if tools %}<tool_call>{% endif %}<think>");
    assert!(
        thinks.calls_grammar(&tools(), false, false, "<think>\n").starts_with("start: thought gap? calls")
    );
    assert!(
        thinks
            .calls_grammar(&tools(), false, false, "")
            .starts_with("start: (\"<think>\" thought gap?)? calls")
    );
}

#[test]
fn a_schema_has_a_canonical_text() {
    let made = schema(&json!({"type": "object", "x-guidance": {"lenient": true}}), false);
    assert_eq!(made["x-guidance"]["lenient"], json!(false));
    assert_eq!(made["x-guidance"]["whitespace_flexible"], json!(false));
    assert_eq!(made["type"], json!("object"));
    assert!(schema(&json!(true), true).is_object());
}
