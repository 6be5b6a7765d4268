use serde_json::json;

use super::*;

fn compile(source: &str) -> ChatTemplate {
    ChatTemplate::new(source, "<bos>", "<eos>").unwrap()
}

fn chat() -> Vec<Message<'static>> {
    vec![Message::new("user", " Hi \n"), Message::new("assistant", "Hello"), Message::new("user", "Bye")]
}

fn render(source: &str) -> Result<String, TemplateError> {
    compile(source).render_inner(&chat(), None, true, &Map::new()).map(|prompt| prompt.text)
}

#[test]
fn a_turn_based_template_renders_as_its_author_meant() {
    // Of the shape that Gemma's instruction-tuned models carry.
    let source = "{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first = messages[0]['content'] + '\n\n' -%}
    {%- set rest = messages[1:] -%}
{%- else -%}
    {%- set first = '' -%}
    {%- set rest = messages -%}
{%- endif -%}
{%- for message in rest -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('Roles must alternate') }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (first if loop.first else '') }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- else -%}
        {{ raise_exception('Invalid content type') }}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\n' }}
{%- endif -%}
";
    let template = compile(source);
    let expected = "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n\
                    <start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n";
    assert_eq!(template.render(&chat(), None, true, &Map::new()).unwrap(), expected);
    let mut with_system = vec![Message::new("system", "Be brief.")];
    with_system.extend(chat());
    let prompt = template.render(&with_system, None, false, &Map::new()).unwrap();
    assert!(prompt.starts_with("<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>"), "{prompt}");
    assert!(prompt.ends_with("Bye<end_of_turn>\n"), "{prompt}");
    let error = template.render_inner(&chat()[1..], None, true, &Map::new()).unwrap_err();
    assert!(
        matches!(&error, TemplateError::Raised { message } if message == "Roles must alternate"),
        "{error}"
    );
}

#[test]
fn tools_and_further_variables_are_visible() {
    let source = "{%- if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif -%}
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif -%}
{{ messages[0].tool_calls[0].function.name }}|{{ messages[0].content is none }}|{{ messages[0].tool_call_id }}";
    let tools = [
        json!({"type": "function", "name": "f<g>", "z": [1, 2.5, null], "a": {"é": true}, "e": {}, "l": []}),
    ];
    let message: Message = serde_json::from_value(json!({
        "role": "assistant", "content": null, "tool_call_id": "7", "tool_calls": [{"function": {"name": "f"}}],
    }))
    .unwrap();
    let extra = json!({"enable_thinking": false});
    let prompt = compile(source).render(&[message], Some(&tools), true, extra.as_object().unwrap()).unwrap();
    assert_eq!(
        prompt,
        "{\"type\": \"function\", \"name\": \"f<g>\", \"z\": [1, 2.5, null], \"a\": {\"é\": true}, \"e\": {}, \"l\": []}\n\
         <think></think>f|True|7"
    );
    assert_eq!(
        render("{{ ['é'] | tojson(ensure_ascii=false, separators=(', ', ': ')) }}").unwrap(),
        "[\"é\"]"
    );
    let error = render("{{ 'é' | tojson(ensure_ascii=true) }}").unwrap_err();
    assert!(matches!(&error, TemplateError::Failed { reason } if reason.contains("ensure_ascii")), "{error}");
    assert_eq!(render("{{ {'a': [1]} | tojson(indent=2) }}").unwrap(), "{\n  \"a\": [\n    1\n  ]\n}");
}

#[test]
fn python_methods_and_values_work() {
    let source = "{{ ' a,b '.strip().split(',')[1].upper() }} {{ 'x' in {'x': 1} }} {{ none }} {{ messages[0].get('role') }} \
                  {% for k, v in {'b': 1, 'a': 2}.items() %}{{ k }}{{ v }}{% endfor %} {{ 'abc'[::-1] }} {{ 7 // 2 }}";
    assert_eq!(render(source).unwrap(), "B True None user b1a2 cba 3");
    assert_eq!(render("{{ strftime_now('%Y') | length }}").unwrap(), "4");
}

#[test]
fn content_parts_of_text_are_joined_and_others_named() {
    let read = |content: Json| serde_json::from_value::<Message>(json!({"role": "user", "content": content}));
    assert_eq!(read(json!("a")).unwrap(), Message::new("user", "a"));
    let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
    assert_eq!(read(parts).unwrap(), Message::new("user", "a\nb"));
    let error = read(json!([{"type": "image_url", "image_url": {}}])).unwrap_err().to_string();
    assert!(error.contains("`image_url`"), "{error}");
    for wrong in [json!(1), json!([{"type": "text"}]), json!([{"text": "a"}]), json!(["a"])] {
        assert!(read(wrong).is_err());
    }
}

#[test]
fn requests_cannot_replace_what_a_rendering_defines() {
    let set = |extra: Json| {
        compile("{{ bos_token }}").render_inner(&chat(), None, true, extra.as_object().unwrap())
    };
    for name in ["messages", "bos_token", "raise_exception", "\0deep", "a b"] {
        let error = set(json!({ name: 1 })).unwrap_err();
        assert!(matches!(&error, TemplateError::Reserved { name: found } if found == name), "{error}");
    }
    assert_eq!(set(json!({"bos": 1})).unwrap().text, "<bos>");
}

/// Templates that use up something; what limit stops them.
const BOMBS: &[(&str, &str, Limit)] = &[
    (
        "nested loops",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        Limit::Instructions,
    ),
    (
        "nested loops that write",
        "{% for a in range(9999) %}{% for b in range(9999) %}aaaaaaaa{% endfor %}{% endfor %}",
        Limit::Instructions,
    ),
    ("output", "{% set s = 'a' * 1000000 %}{% for a in range(99999) %}{{ s }}{% endfor %}", Limit::Output),
    (
        "captured output",
        "{% set c %}{% for a in range(99999) %}{{ 'a' * 10000 }}{% endfor %}{% endset %}",
        Limit::Output,
    ),
    (
        "doubling",
        "{% set n = namespace(s='a') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        Limit::Work,
    ),
    (
        "doubling by +",
        "{% set n = namespace(s='a') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
        Limit::Work,
    ),
    (
        "doubling by a filter",
        "{% set n = namespace(s='aa') %}{% for i in range(99) %}{% set n.s = n.s | replace('a', n.s) %}{% endfor %}",
        Limit::Work,
    ),
    (
        "doubling by a method",
        "{% set n = namespace(s='aa') %}{% for i in range(99) %}{% set n.s = n.s.replace('a', n.s) %}{% endfor %}",
        Limit::Work,
    ),
    (
        "doubling by join",
        "{% set n = namespace(s='aa') %}{% for i in range(99) %}{% set n.s = [n.s, n.s] | join(n.s) %}{% endfor %}",
        Limit::Work,
    ),
    (
        "doubling by a join method",
        "{% set n = namespace(s='aa') %}{% for i in range(99) %}{% set n.s = n.s.join([n.s, n.s]) %}{% endfor %}",
        Limit::Work,
    ),
    ("repetition", "{{ 'a' * 99999999 }}", Limit::Work),
    ("repeated lists", "{{ [1, 2] * 99999999 }}", Limit::Work),
    ("indentation", "{{ ('\n' * 10000) | indent(99999999) }}", Limit::Work),
    ("indentation by name", "{{ ('\n' * 10000) | indent(width=99999999) }}", Limit::Work),
    (
        "a filter for every item",
        "{% set s = 'a' * 100000 %}{{ [s, s] | map('replace', 'a', s) | list }}",
        Limit::Work,
    ),
    (
        "comparing",
        "{% set s = 'a' * 8000000 %}{% set t = s ~ '' %}{% for i in range(99999) %}{{ s == t }}{% endfor %}",
        Limit::Work,
    ),
    (
        "lists in lists, twice",
        "{% set n = namespace(s=[1]) %}{% for i in range(99) %}{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s }}",
        Limit::Work,
    ),
    (
        "lists in lists",
        "{% set n = namespace(s=[1]) %}{% for i in range(99999) %}{% set n.s = [n.s] %}{% endfor %}",
        Limit::Nesting,
    ),
    ("a value that holds itself", "{% set n = namespace() %}{% set n.s = n %}{{ n }}", Limit::Nesting),
    (
        "a value that holds itself, as JSON",
        "{% set n = namespace() %}{% set n.s = n %}{{ n | tojson }}",
        Limit::Nesting,
    ),
    (
        "a value that holds itself, compared",
        "{% set n = namespace() %}{% set n.s = n %}{{ n == n }}",
        Limit::Nesting,
    ),
    ("macros that call themselves", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", Limit::Recursion),
    (
        "macros that call themselves twice",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(99) }}",
        Limit::Recursion,
    ),
    (
        "macros that call others twice",
        "{% macro a(n) %}{% if n %}{{ a(n - 1) }}{{ a(n - 1) }}{{ a(n - 1) }}{{ a(n - 1) }}{% endif %}{% endmacro %}{% for i in range(9999) %}{{ a(6) }}{% endfor %}",
        Limit::Instructions,
    ),
    (
        "loops that call themselves",
        "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
        Limit::Recursion,
    ),
];

/// CPU time of this thread: a busy machine must not fail a test of what a rendering costs.
fn cpu_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(stat.split(' ').next().unwrap().parse().unwrap())
}

/// Three times the promise of 300 ms: a shared machine's CPU time stretches too.
const BOUND: Duration = Duration::from_millis(900);

#[test]
fn sec_template_bomb() {
    for (name, source, limit) in BOMBS {
        let template = compile(source);
        let started = cpu_time();
        let error = template.render_inner(&chat(), None, true, &Map::new()).unwrap_err();
        let took = cpu_time() - started;
        assert!(took < BOUND, "{name}: {took:?}");
        match error {
            TemplateError::Limit(Limit::Time) => {}
            TemplateError::Limit(found) => assert_eq!(found, *limit, "{name}"),
            other => panic!("{name}: {other:?}"),
        }
    }
}

#[test]
fn sec_template_bomb_in_the_request() {
    let template = compile("{{ x }}");
    let started = cpu_time();
    let extra = json!({"x": vec![json!("a".repeat(1000)); 2000]});
    let error = template.render_inner(&chat(), None, true, extra.as_object().unwrap()).unwrap_err();
    assert!(matches!(error, TemplateError::ExtraTooLong), "{error}");
    assert!(cpu_time() - started < BOUND);
}

#[test]
fn what_is_never_done_is_refused_when_compiled() {
    let refused = |source: &str| match ChatTemplate::new(source, "", "") {
        Err(TemplateError::Unsupported { construct }) => construct,
        other => panic!("{source}: {other:?}"),
    };
    assert_eq!(refused("{% include 'chat' %}"), "other templates");
    assert_eq!(refused("{% import 'chat' as x %}"), "other templates");
    assert_eq!(refused("{% extends 'chat' %}"), "other templates");
    assert_eq!(refused("{% block a %}{% endblock %}"), "blocks");
    assert_eq!(refused("{{ '{:9999999999}'.format(1) }}"), "the method format");
    assert!(matches!(ChatTemplate::new("{% if %}", "", ""), Err(TemplateError::Syntax { .. })));
    assert!(matches!(ChatTemplate::new(&" ".repeat(SOURCE + 1), "", ""), Err(TemplateError::TooLong { .. })));
    let error = render("{{ x | pprint }}").unwrap_err();
    assert!(matches!(&error, TemplateError::Failed { reason } if reason.contains("pprint")), "{error}");
}

#[test]
fn guards_change_nothing() {
    // Every kind of jump and operand, against the interpreter alone.
    let sources = [
        "{% for m in messages %}{{ loop.index }}{% if loop.first %}a{% elif loop.last %}b{% else %}c{% endif %}{% else %}none{% endfor %}",
        "{% for x in [] %}x{% else %}empty{% endfor %}{% for x in range(9) if x % 2 %}{% if x == 5 %}{% break %}{% endif %}{% if x == 1 %}{% continue %}{% endif %}{{ x }}{% endfor %}",
        "{% macro m(a, b='x') %}[{{ a }}{{ b }}{{ caller() if caller }}]{% endmacro %}{{ m(1) }}{{ m(1, b=2) }}{% call m(3) %}in{% endcall %}",
        "{% set s %}abc{{ 1 + 2 }}{% endset %}{{ s | upper }}{% filter lower %}ABC{{ s }}{% endfilter %}{% with y = 4 %}{{ y * 2 }}{% endwith %}",
        "{{ 1 and 0 or 'z' }}{{ not 1 }}{{ 'a' if 0 else 'b' }}{{ 1 < 2 <= 2 }}{{ 3 > 2 > 2 }}{{ [1, 2][-1] }}{{ 'abcd'[1:3] }}{{ -3 // 2 }}{{ 2 ** 5 }}{{ 7 % 4 }}{{ 7 - 4 }}",
        "{% set n = namespace(c=0, l=[]) %}{% for m in messages %}{% set n.c = n.c + 1 %}{% set n.l = n.l + [m.role] %}{% endfor %}{{ n.c }}{{ n.l | join(', ') }}",
        "{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}",
        "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join('|') }}{{ [3, 1, 2] | sort | reverse | list }}",
        "{% set a, b = 1, (2, 3) %}{{ a }}{{ b }}{{ {'k': [1, {'l': 2}]} }}{{ 'user' in messages[0].values() }}{{ 'x' not in 'y' }}{{ x is defined }}{{ 4 is divisibleby 2 }}",
        "{{ 'a-b'.replace('-', '+') }}{{ 'a' ~ 1 ~ 'b' }}{{ ('ab' * 3) | indent(2, first=true) }}{{ ', '.join(['a', 'b']) }}{{ messages[1:] | length }}{{ [1, 2] == [1, 2] }}",
    ];
    for source in sources {
        let mut plain = Environment::new();
        plain.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        let context = Serde(json!({"messages": chat()}));
        let expected = plain.render_str(source, context).unwrap();
        let got = render(source).unwrap();
        // Truth values are Python's here.
        let python = |text: &str| text.replace("true", "True").replace("false", "False");
        assert_eq!(python(&got), python(&expected), "{source}");
    }
}

#[test]
fn a_long_chat_stays_within_the_limits() {
    let source = "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message['content'] | trim + '<|im_end|>\n' }}\
                  {% if loop.index0 == messages | length - 1 %}!{% endif %}{% endfor %}";
    let messages: Vec<Message> =
        (0..2000).map(|i| Message::new("user", format!("{i}").repeat(200))).collect();
    let unhurried = ChatTemplate::with_time(source, "", "", Duration::from_secs(60)).unwrap();
    let prompt = unhurried.render(&messages, None, true, &Map::new()).unwrap();
    assert!(prompt.len() > 1_400_000 && prompt.ends_with('!'));
}

#[test]
fn time_is_limited() {
    for source in ["a", "{{ 1 }}", "{% for x in [1] %}{% endfor %}", "{% if messages == 2 %}{% endif %}"] {
        let hurried = ChatTemplate::with_time(source, "", "", Duration::ZERO).unwrap();
        let error = hurried.render_inner(&chat(), None, true, &Map::new()).unwrap_err();
        assert!(matches!(error, TemplateError::Limit(Limit::Time)), "{source}: {error}");
    }
}

/// Templates, and whether chats have outlines by them.
const OUTLINED: [(&str, bool); 16] = [
    (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        true,
    ),
    ("{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}", true),
    ("{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '\n' }}{% endfor %}", true),
    (
        "{% for m in messages %}{% if m.content is string and m.content is not none %}{{ m.content }}{% endif %}{% endfor %}",
        true,
    ),
    (
        "{% set first = messages[0].content if messages[0].role == 'system' else '' %}{% for m in messages[1:] %}{{ first + '\n' + m.content if loop.last else m.content }}{% endfor %}",
        true,
    ),
    (
        "{% for m in messages %}{% if m.content %}{{ m.content }}{% else %}nothing{% endif %}{% endfor %}",
        true,
    ),
    ("{% for m in messages %}{{ m.content or 'nothing' }}{{ messages | length }}{% endfor %}", true),
    ("{% for m in messages %}{{ m.content | trim }}{% endfor %}", false),
    ("{% for m in messages %}{% if 'a' in m.content %}{{ m.content }}{% endif %}{% endfor %}", false),
    ("{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}", false),
    ("{% for m in messages %}{{ m.content[0] }}{% endfor %}", false),
    ("{% for m in messages %}{% if m.content == 'a' %}!{% endif %}{% endfor %}", false),
    ("{% for m in messages %}{% if messages[0] == m %}!{% endif %}{% endfor %}", false),
    ("{{ messages | tojson }}{{ messages }}", false),
    ("{% macro say(m) %}{{ m.content }}{% endmacro %}{% for m in messages %}{{ say(m) }}{% endfor %}", false),
    ("{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content }}{% endfor %}", false),
];

#[test]
fn outlines_change_nothing() {
    use proptest::prelude::*;
    let texts =
        ["", "a", " a ", "x</think>\n", "{{ 1 }}", "<|im_end|>", "é", "0", "False", "\0", "a longer text"];
    let message =
        (prop::sample::select(vec!["system", "user", "assistant"]), prop::sample::select(texts.to_vec()));
    let chats = prop::collection::vec(prop::collection::vec(message, 1..4), 1..6);
    for (source, outlined) in OUTLINED {
        let template = compile(source);
        let mut plain = compile(source);
        plain.outlining = None;
        let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(40));
        let run = runner.run(&(&chats, any::<bool>()), |(chats, answer)| {
            for chat in chats.iter().chain(&chats) {
                let chat: Vec<Message> = chat.iter().map(|(role, text)| Message::new(*role, *text)).collect();
                let render = |template: &ChatTemplate| {
                    let rendered = template.render_inner(&chat, None, answer, &Map::new());
                    rendered.map(|prompt| prompt.text).map_err(|error| error.to_string())
                };
                prop_assert_eq!(render(&template), render(&plain), "{}", source);
            }
            Ok(())
        });
        run.unwrap();
        let said = [Message::new("user", "a"), Message::new("assistant", "b")];
        let shape = outline::Shape::of(&said, true).unwrap();
        template.render(&said, None, true, &Map::new()).unwrap();
        let known = template.outlines.known(&shape).flatten().is_some();
        assert_eq!(known, outlined, "{source}");
    }
}

#[test]
fn chats_with_more_than_texts_have_no_outline() {
    let shape = |message: Message| outline::Shape::of(&[message], true);
    assert!(shape(Message::new("user", "a")) == shape(Message::new("user", "b")));
    assert!(shape(Message::new("user", "a")) != shape(Message::new("user", "")));
    assert!(shape(Message::new("user", "a")) != shape(Message::new("system", "a")));
    let mut named = Message::new("user", "a");
    named.name = Some("n".into());
    let mut calling = Message::new("assistant", "a");
    calling.tool_calls = Some(json!([]));
    let mut more = Message::new("tool", "a");
    more.rest.insert("tool_call_id".into(), json!("1"));
    let silent = Message { content: None, ..Message::new("assistant", "") };
    for message in [named, calling, more, silent] {
        assert!(shape(message.clone()).is_none(), "{message:?}");
    }
}
