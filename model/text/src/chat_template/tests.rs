use std::time::Duration;

use serde_json::json;

use super::*;

mod reference;

fn compile(source: &str) -> ChatTemplate {
    ChatTemplate::new(source, "<bos>", "<eos>").unwrap()
}

fn chat() -> Vec<Message<'static>> {
    vec![Message::new("user", " Hi \n"), Message::new("assistant", "Hello"), Message::new("user", "Bye")]
}

fn render(source: &str) -> Result<String, TemplateError> {
    rendered(&compile(source), &chat(), &Map::new())
}

fn rendered(
    template: &ChatTemplate,
    messages: &[Message<'_>],
    extra: &Map<String, Json>,
) -> Result<String, TemplateError> {
    Ok(template.render_inner(messages, None, true, extra, SystemTime::now(), template.limits)?.text)
}

#[test]
fn a_turn_based_template_renders_as_its_author_meant() {
    // Like the templates of Gemma's instruction-tuned models.
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
    let error = rendered(&template, &chat()[1..], &Map::new()).unwrap_err();
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
    assert_eq!(render("{{ 'é' | tojson(ensure_ascii=true) }}").unwrap(), r#""\u00e9""#);
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
    let content = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
    assert_eq!(read(content).unwrap(), Message::new("user", "a\nb"));
    let error = read(json!([{"type": "image_url", "image_url": {}}])).unwrap_err().to_string();
    assert!(error.contains("`image_url`"), "{error}");
    for wrong in [json!(1), json!([{"type": "text"}]), json!([{"text": "a"}]), json!(["a"])] {
        assert!(read(wrong).is_err());
    }
}

#[test]
fn requests_cannot_replace_what_a_rendering_defines() {
    let set = |extra: Json| rendered(&compile("{{ bos_token }}"), &chat(), extra.as_object().unwrap());
    for name in ["messages", "bos_token", "raise_exception", "\0deep", "a b"] {
        let error = set(json!({ name: 1 })).unwrap_err();
        assert!(matches!(&error, TemplateError::Reserved { name: found } if found == name), "{error}");
    }
    assert_eq!(set(json!({"bos": 1})).unwrap(), "<bos>");
}

/// Templates that exhaust a resource, with the limit that stops them.
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
    ("a value that holds itself", "{% set n = namespace() %}{% set n.s = n %}{{ n }}", Limit::Recursion),
    ("splitting", "{% set t = 'a' * 30000000 %}{% set x = t.split('a') %}{{ x | length }}", Limit::Work),
    ("splitting into words", "{% set t = 'a ' * 15000000 %}{{ t.split() | length }}", Limit::Work),
    ("splitting into lines", "{% set t = '\n' * 8000000 %}{{ t.splitlines() | length }}", Limit::Work),
    ("splitting into characters", "{{ ('a' * 30000000) | list | length }}", Limit::Work),
    (
        "replacing in every item",
        "{% set t = '\n' * 1000000 %}{% set x = [t] | map('replace', '\n', 'b' * 1800) | list %}{{ x | length }}",
        Limit::Work,
    ),
    ("indentation of 2^63", "{{ 'a\nb' | indent(9223372036854775808) }}", Limit::Work),
    ("indentation of 2^64-1", "{{ 'a\nb' | indent(width=18446744073709551615) }}", Limit::Work),
    ("indentation of items", "{{ ['a\nb'] | map('indent', 9223372036854775808) | list }}", Limit::Work),
    ("indentation of JSON", "{{ [1] | tojson(indent=99999999999) }}", Limit::Work),
    ("a wide centre", "{{ 'a'.center(99999999999) }}", Limit::Work),
    ("leading zeros", "{{ '1'.zfill(99999999999) }}", Limit::Work),
    ("tabs", "{{ ('\t' * 1000).expandtabs(9999999) }}", Limit::Work),
    ("a wide format", "{{ '%99999999999d' % 1 }}", Limit::Work),
    ("a wide format with a star", "{{ '%*d' % (99999999999, 1) }}", Limit::Work),
    ("a wide format in braces", "{{ '{:99999999999}'.format(1) }}", Limit::Work),
    ("batches that are filled", "{{ [1] | batch(99999999999, 'x') | list }}", Limit::Work),
    ("many slices", "{{ [1] | slice(99999999) | list }}", Limit::Work),
    (
        "escaping",
        "{% set n = namespace(s='<') %}{% for i in range(99) %}{% set n.s = n.s | e ~ n.s %}{% endfor %}",
        Limit::Work,
    ),
    (
        "quoting",
        "{% set n = namespace(s='\\\\') %}{% for i in range(99) %}{% set n.s = [n.s, n.s] | string %}{% endfor %}",
        Limit::Work,
    ),
    (
        "JSON in JSON",
        "{% set n = namespace(s='\\\\') %}{% for i in range(99) %}{% set n.s = n.s | tojson %}{% endfor %}",
        Limit::Work,
    ),
    (
        "comparing lists in lists",
        "{% set n = namespace(s=[1], t=[1]) %}{% for i in range(40) %}{% set n.s = [n.s, n.s] %}{% set n.t = [n.t, n.t] %}{% endfor %}{{ n.s == n.t }}",
        Limit::Work,
    ),
    (
        "sorting lists in lists",
        "{% set n = namespace(s=[1], t=[1]) %}{% for i in range(40) %}{% set n.s = [n.s, n.s] %}{% set n.t = [n.t, n.t] %}{% endfor %}{{ [n.s, n.t] | sort }}",
        Limit::Work,
    ),
    (
        "searching",
        "{% set s = 'a' * 8000000 %}{% for i in range(99999) %}{{ 'b' in s }}{% endfor %}",
        Limit::Work,
    ),
    (
        "counting",
        "{% set s = 'a' * 8000000 %}{% for i in range(99999) %}{{ s.count('b') }}{% endfor %}",
        Limit::Work,
    ),
    (
        "characters",
        "{% set s = 'é' * 8000000 %}{% for i in range(99999) %}{{ s[9] }}{% endfor %}",
        Limit::Work,
    ),
    (
        "lengths",
        "{% set s = 'é' * 8000000 %}{% for i in range(99999) %}{{ s | length }}{% endfor %}",
        Limit::Work,
    ),
    (
        "slices",
        "{% set l = range(99999) %}{% for i in range(99999) %}{% set x = l[1:] %}{% endfor %}",
        Limit::Work,
    ),
    ("ranges", "{% for i in range(99999) %}{% set x = range(99999) %}{% endfor %}", Limit::Work),
    ("a chain of filters", "{{ x | default('a' * 30000000) | list | map('upper') | list }}", Limit::Work),
    (
        "calls with many arguments",
        "{% macro m() %}{{ varargs | length }}{% endmacro %}{% for i in range(99999) %}{{ m(*range(99999)) }}{% endfor %}",
        Limit::Work,
    ),
    (
        "a long chain of one long text",
        "{% set s = 'a' * 30000000 %}{{ s ~ s ~ s ~ s ~ s ~ s ~ s ~ s ~ s ~ s ~ s ~ s ~ s ~ s ~ s ~ s }}",
        Limit::Work,
    ),
    (
        "macros that stay",
        "{% set n = namespace() %}{% for i in range(99999) %}{% for j in range(99) %}{% macro m() %}{{ m }}{% endmacro %}{% set n.m = m %}{% endfor %}{% endfor %}",
        Limit::Instructions,
    ),
    (
        "namespaces",
        "{% for i in range(99999) %}{% for j in range(99) %}{% set n = namespace(a=i) %}{% endfor %}{% endfor %}",
        Limit::Instructions,
    ),
    (
        "groups",
        "{% for i in range(999) %}{% set x = range(99999) | map('string') | groupby('0') | list %}{% endfor %}",
        Limit::Work,
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

/// CPU time of this thread: load on the machine must not fail a test of rendering cost.
fn cpu_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(stat.split(' ').next().unwrap().parse().unwrap())
}

/// Three times the limit of 300 ms: CPU time varies on a shared machine too.
const BOUND: Duration = Duration::from_millis(900);

#[test]
fn sec_template_bomb() {
    for (name, source, limit) in BOMBS {
        let template = compile(source);
        let started = cpu_time();
        let error = rendered(&template, &chat(), &Map::new()).unwrap_err();
        let took = cpu_time() - started;
        assert!(took < BOUND, "{name}: {took:?}");
        match error {
            TemplateError::Limit(Limit::Time) => {}
            TemplateError::Limit(found) => assert_eq!(found, *limit, "{name}"),
            other => panic!("{name}: {other:?}"),
        }
    }
}

/// `n` repetitions between a start and an end. The flag says whether ten repetitions are valid.
const CHAINS: [(&str, &str, &str, bool); 26] = [
    ("{{ 1", "+1", " }}", true),
    ("{{ 1", "*1", " }}", true),
    ("{{ 1", "**1", " }}", true),
    ("{{ 1", "~1", " }}", true),
    ("{{ 1", " and 1", " }}", true),
    ("{{ 1", " or 1", " }}", true),
    ("{{ 1", " < 1", " }}", true),
    ("{{ 1", " if 1", " }}", true),
    ("{{ 1", " if 1 else 1", " }}", true),
    ("{{ ", "-", "1 }}", true),
    ("{{ ", "not ", "1 }}", true),
    ("{{ 1", "|string", " }}", true),
    ("{{ 1", " is defined", " }}", false),
    ("{{ {}", ".a", " }}", false),
    ("{{ a", "[0]", " }}", false),
    ("{{ a", "()", " }}", false),
    ("{{ ", "(", "1", false),
    ("{{ ", "[", "1", false),
    ("{{ ", "{1:", "1", false),
    ("{{ a", "[a", "", false),
    ("{{ a", "(a", "", false),
    ("{% if 0 %}", "{% elif 0 %}", "{% endif %}", true),
    ("", "{% if 0 %}", "", false),
    ("", "{% for a in [] %}", "", false),
    ("{% set ", "(", "a", false),
    ("{% set x", "|upper", "%}{% endset %}", true),
];

#[test]
fn depth_is_limited_when_parsing() {
    // Runs on a stack as small as that of any rendering thread.
    let run = || {
        for (start, link, end, valid) in CHAINS {
            for times in [10, 150, 250, 50_000] {
                let source = format!("{start}{}{end}", link.repeat(times));
                let outcome = ChatTemplate::new(&source, "", "")
                    .and_then(|template| rendered(&template, &chat(), &Map::new()));
                if times == 10 {
                    assert_eq!(outcome.is_ok(), valid, "{start}{link}{end}: {outcome:?}");
                }
            }
        }
    };
    std::thread::Builder::new().stack_size(1 << 20).spawn(run).unwrap().join().unwrap();
}

#[test]
fn depth_is_limited_when_rendering() {
    // Deepest expressions in deepest blocks in deepest calls.
    let expression = format!("{}m(){}", "[".repeat(20), "]".repeat(20));
    let chain = "1+(".repeat(20) + "m()|length" + &")".repeat(20);
    let bodies = [
        format!("{{{{ {expression} }}}}"),
        format!("{{{{ {chain} }}}}"),
        "{% for x in [1] %}{% if x %}".repeat(15) + "{{ m() }}" + &"{% endif %}{% endfor %}".repeat(15),
        "{{ [1]|map('string')|list ~ m() }}".into(),
        "{% set x %}{{ m() }}{% endset %}{{ x }}".into(),
        "{% filter upper %}{{ m() }}{% endfilter %}".into(),
        "{% macro k() %}{{ caller() }}{% endmacro %}{% call k() %}{{ m() }}{% endcall %}".into(),
    ];
    let run = move || {
        for body in bodies {
            let template = compile(&format!("{{% macro m() %}}{body}{{% endmacro %}}{{{{ m() }}}}"));
            let error = rendered(&template, &chat(), &Map::new()).unwrap_err();
            assert!(matches!(error, TemplateError::Limit(Limit::Recursion)), "{body}: {error}");
        }
        let mapped = format!("{{{{ ['a'] | map({}'upper') | list }}}}", "'map', ".repeat(1000));
        let error = rendered(&compile(&mapped), &chat(), &Map::new()).unwrap_err();
        assert!(matches!(error, TemplateError::Limit(Limit::Recursion)), "{error}");
        let deep = "{% set n = namespace(s=1, t=1) %}{% for i in range(150) %}{% set n.s = [n.s] %}{% set n.t = {'a': n.t} %}{% endfor %}";
        for end in [
            "{{ n.s }}",
            "{{ n.t }}",
            "{{ n.s|tojson }}",
            "{{ n.t|tojson }}",
            "{{ n.s == n.s }}",
            "{{ [n.s, n.s]|sort }}",
        ] {
            rendered(&compile(&format!("{deep}{end}")), &chat(), &Map::new()).unwrap();
        }
    };
    std::thread::Builder::new().stack_size(1 << 20).spawn(run).unwrap().join().unwrap();
}

#[test]
fn long_texts_in_template_errors_are_shortened() {
    for source in [
        "{{ raise_exception('é' * 999999) }}",
        "{{ {}['é' * 999999].x }}",
        "{{ ('é' * 999999)['é' * 999999].x }}",
    ] {
        let error = render(source).unwrap_err().to_string();
        assert!(error.chars().count() < REASON + 100, "{source}: {}", error.len());
    }
}

#[test]
fn sec_template_bomb_in_the_request() {
    let template = compile("{{ x }}");
    let started = cpu_time();
    let extra = json!({"x": vec![json!("a".repeat(1000)); 2000]});
    let error = rendered(&template, &chat(), extra.as_object().unwrap()).unwrap_err();
    assert!(matches!(error, TemplateError::ExtraTooLong), "{error}");
    assert!(cpu_time() - started < BOUND);
}

#[test]
fn unsupported_constructs_are_refused_when_compiled() {
    let refused = |source: &str| match ChatTemplate::new(source, "", "") {
        Err(TemplateError::Unsupported { construct }) => construct,
        other => panic!("{source}: {other:?}"),
    };
    assert_eq!(refused("{% include 'chat' %}"), "other templates");
    assert_eq!(refused("{% import 'chat' as x %}"), "other templates");
    assert_eq!(refused("{% extends 'chat' %}"), "other templates");
    assert_eq!(refused("{% autoescape true %}{% endautoescape %}"), "escaping for HTML");
    assert!(matches!(ChatTemplate::new("{% if %}", "", ""), Err(TemplateError::Syntax { .. })));
    assert!(matches!(ChatTemplate::new(&" ".repeat(SOURCE + 1), "", ""), Err(TemplateError::TooLong { .. })));
    let error = render("{{ x | nofilter }}").unwrap_err();
    assert!(matches!(&error, TemplateError::Failed { reason } if reason.contains("`nofilter`")), "{error}");
}

fn in_time(time: Duration) -> Limits {
    Limits { time, ..Limits::FULL }
}

#[test]
fn long_renderings_exceed_the_short_limits() {
    let render = |source: &str| {
        let template = ChatTemplate::new(source, "", "").unwrap();
        // Called before the full rendering, which may create the outline.
        let short = template.render_shortly(&chat(), true);
        let full = template.render(&chat(), None, true, &Map::new()).unwrap();
        short.inspect(|prompt| assert_eq!(prompt.text, full))
    };
    assert!(render("{% for message in messages %}{{ message.content | trim }}{% endfor %}").is_some());
    assert!(render("{% for x in range(9000) %}{% endfor %}").is_none());
    assert!(render("{{ 'a' * 2000000 }}").is_none());
}

#[test]
fn a_long_chat_stays_within_the_limits() {
    let source = "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message['content'] | trim + '<|im_end|>\n' }}\
                  {% if loop.index0 == messages | length - 1 %}!{% endif %}{% endfor %}";
    let messages: Vec<Message> =
        (0..2000).map(|i| Message::new("user", format!("{i}").repeat(200))).collect();
    let unhurried = ChatTemplate::with_limits(source, "", "", in_time(Duration::from_secs(60))).unwrap();
    let prompt = unhurried.render(&messages, None, true, &Map::new()).unwrap();
    assert!(prompt.len() > 1_400_000 && prompt.ends_with('!'));
}

#[test]
fn time_is_limited() {
    for source in ["a", "{{ 1 }}", "{% for x in [1] %}{% endfor %}", "{% if messages == 2 %}{% endif %}"] {
        let hurried = ChatTemplate::with_limits(source, "", "", in_time(Duration::ZERO)).unwrap();
        let error = rendered(&hurried, &chat(), &Map::new()).unwrap_err();
        assert!(matches!(error, TemplateError::Limit(Limit::Time)), "{source}: {error}");
    }
}

/// Templates, and whether they allow outlines.
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
        plain.outlining = false;
        let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(40));
        let run = runner.run(&(&chats, any::<bool>()), |(chats, answer)| {
            for chat in chats.iter().chain(&chats) {
                let chat: Vec<Message> = chat.iter().map(|(role, text)| Message::new(*role, *text)).collect();
                let render = |template: &ChatTemplate| {
                    let rendered = template.render_inner(
                        &chat,
                        None,
                        answer,
                        &Map::new(),
                        SystemTime::now(),
                        template.limits,
                    );
                    rendered.map_err(|error| error.to_string())
                };
                prop_assert_eq!(render(&template), render(&plain), "{}", source);
            }
            Ok(())
        });
        run.unwrap();
        let messages = [Message::new("user", "a"), Message::new("assistant", "b")];
        let shape = outline::Shape::of(&messages, true).unwrap();
        template.render(&messages, None, true, &Map::new()).unwrap();
        let is_cached = template.outlines.get(&shape).flatten().is_some();
        assert_eq!(is_cached, outlined, "{source}");
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

/// The parts of the prompt that came from the request, for a chat of one message.
fn quoted(source: &str, content: &str) -> Vec<String> {
    let message = [Message::new("user", content)];
    let template = compile(source);
    // The second rendering may use an outline.
    let prompts = [0, 1].map(|_| template.render_marked(&message, None, true, &Map::new()).unwrap());
    assert_eq!(prompts[0], prompts[1]);
    let Prompt { text, quoted } = &prompts[0];
    assert!(quoted.windows(2).all(|pair| pair[0].end < pair[1].start), "{quoted:?}");
    quoted.iter().map(|range| text[range.clone()].to_owned()).collect()
}

#[test]
fn a_prompt_marks_what_came_with_the_request() {
    let of = |expression: &str| quoted(&format!("<a>{{{{ {expression} }}}}<b>"), " x<y>z ");
    for whole in [
        "T",
        "'' ~ T",
        "T + ''",
        "[T] | join",
        "'%s' % T",
        "'{}'.format(T)",
        "T | string",
        "T[:]",
        "T | safe",
    ] {
        let source = whole.replace('T', "messages[0].content");
        assert_eq!(of(&source), [" x<y>z "], "{source}");
    }
    assert_eq!(of("messages[0].content | trim"), ["x<y>z"]);
    assert_eq!(of("messages[0].content.strip().split('<') | join('<')"), ["x", "y>z"]);
    assert_eq!(of("messages[0].content.replace('y', '|')"), [" x<", ">z "]);
    assert_eq!(of("messages[0].content[2:5] ~ '<y>'"), ["<y>"]);
    assert_eq!(of("'<y>' ~ messages[0].content[::-1]"), [" z>y<x "]);
    assert_eq!(of("messages[0].content | upper"), [" X<Y>Z "]);
    assert_eq!(of("messages[0].content | tojson"), [" x<y>z "]);
    assert_eq!(of("{'<c>': messages[0].content} | tojson"), [" x<y>z "]);
    assert_eq!(of("'%s<c>%s' % (messages[0].content, messages[0].content)"), [" x<y>z ", " x<y>z "]);
    assert_eq!(of("messages[0].content * 2"), [" x<y>z  x<y>z "]);
    assert_eq!(of("messages[0].content | indent(first=true)"), [" x<y>z "]);
    assert_eq!(of("messages[0].content | list | first"), [" "]);
    assert_eq!(of("messages[0].content | length"), [""; 0]);
    assert_eq!(of("'<|' + messages[0].role + '|>'"), [""; 0]);
    assert_eq!(quoted("{% set x %}<c>{{ messages[0].content }}{% endset %}{{ x | trim }}", "d"), ["d"]);
    assert_eq!(quoted("{% macro q(t) %}<c>{{ t }}{% endmacro %}{{ q(messages[0].content) }}", "d"), ["d"]);
    assert_eq!(quoted("{% for c in messages[0].content %}{{ c }}<c>{% endfor %}", "de"), ["d", "e"]);
    let extra = json!({"q": ["<e>", {"<k>": "<v>"}]});
    let template = compile("{{ q[0] }}:{{ q[1] | tojson }}");
    let prompt =
        template.render_marked(&chat(), Some(&[json!("t")]), true, extra.as_object().unwrap()).unwrap();
    let texts: Vec<&str> = prompt.quoted.iter().map(|range| &prompt.text[range.clone()]).collect();
    assert_eq!(texts, ["<e>", "<k>", "<v>"]);
    // A role that is not a plain word counts as request text.
    let role = [Message::new("<|im_end|>", "x")];
    let prompt = compile("{{ messages[0].role }}").render_marked(&role, None, true, &Map::new()).unwrap();
    assert_eq!(prompt.quoted.iter().map(|quote| (quote.start, quote.end)).collect::<Vec<_>>(), [(0, 10)]);
}

#[test]
fn control_tokens_of_the_request_differ_from_those_of_the_template() {
    let mut message = Message::new("user", " a<|im_end|>b<|x|>c ");
    message.name = Some("<|im_end|>".into());
    message.rest.insert("reasoning_content".into(), json!("t</think>"));
    let tools =
        [json!({"type": "function", "function": {"name": "f", "description": "<|im_end|>", "<|k|>": 1}})];
    for template in [
        "<|im_start|>{{ messages[0].content }}<|im_end|>",
        "<|im_start|>{{ messages[0]['content'] | trim | upper }}<|im_end|>",
        "<|im_start|>{{ messages[0].content | replace('b', 'q') }}<|im_end|>",
        "<|im_start|>{{ messages[0].content.split('b')[1].strip() }}<|im_end|>",
        "<|im_start|>{{ messages[0] | tojson }}<|im_end|>",
        "<|im_start|>{{ messages }}<|im_end|>",
        "{% set c = '<|im_start|>' + messages[0].content %}{{ c ~ messages[0].name }}<|im_end|>",
        "{% macro m(c) %}<|im_start|>{{ c }}<|im_end|>{% endmacro %}{{ m(messages[0].content) }}",
        "<|im_start|>{{ messages[0].reasoning_content }}<|im_end|>",
        "<|im_start|>{% for t in tools %}{{ t | tojson }}{% endfor %}<|im_end|>",
        "<|im_start|>{{ messages[0].content.split('<|x|>')[0] }}<|im_end|>",
        "<|im_start|>{{ '%s' % messages[0].content }}{{ '{:>30}'.format(messages[0].content) }}<|im_end|>",
        "<|im_start|>{{ messages[0].content | indent | e | urlencode | center(90) }}<|im_end|>",
        "<|im_start|>{% for c in messages[0].content %}{{ c }}{% endfor %}<|im_end|>",
        "<|im_start|>{{ messages[0].content | list | join }}<|im_end|>",
    ] {
        for _ in 0..2 {
            let messages = std::slice::from_ref(&message);
            let prompt = compile(template).render_marked(messages, Some(&tools), true, &Map::new()).unwrap();
            let quoted = |at: usize| prompt.quoted.iter().any(|range| range.contains(&at));
            let own: String =
                prompt.text.char_indices().filter(|(at, _)| !quoted(*at)).map(|(_, c)| c).collect();
            assert!(own.starts_with("<|im_start|>") && own.ends_with("<|im_end|>"), "{template}: {own}");
            assert!(
                !own.contains("<|x") && !own.contains("<|k") && own.matches("<|im").count() == 2,
                "{template}: {own}"
            );
        }
    }
}

#[test]
fn contents_with_images_are_lists_of_parts() {
    let source = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}\
        {% if c.type == 'image' %}<image>{% else %}[{{ c['text'] }}]{% endif %}{% endfor %}{% endif %};{% endfor %}";
    let mut messages = chat();
    let text = |text: &'static str| Part::Text(text.into());
    let parts = vec![text("<image>"), Part::Image(0), text("a"), Part::Image(1)];
    messages[2].content = Some(Content::Parts(parts.clone()));
    let prompt = compile(source).render_marked(&messages, None, true, &Map::new()).unwrap();
    assert_eq!(prompt.text, " Hi \n;Hello;[<image>]<image>[a]<image>;");
    let quoted: Vec<&str> = prompt.quoted.iter().map(|range| &prompt.text[range.clone()]).collect();
    assert_eq!(quoted, [" Hi \n", "Hello", "<image>", "a"]);
    let content = Content::Parts(parts);
    assert_eq!(
        (content.images().collect::<Vec<_>>(), content.texts().collect::<String>()),
        (vec![0, 1], "<image>a".into())
    );
    let between = Content::Parts(vec![Part::Image(3)]).between("x", "");
    assert_eq!(between, Content::Parts(vec![text("x"), Part::Image(3)]));
    let joined = Content::Text("b".into()).join(between);
    assert_eq!(joined, Content::Parts(vec![text("b"), text("x"), Part::Image(3)]));
}

/// The template of LLaVA 1.5, which does not read strings.
#[test]
fn a_template_that_reads_only_parts_gets_texts_as_parts() {
    let source = "{% for message in messages %}{{ message['role'].upper() + ': ' }}\
        {% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}\
        {% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' ' }}\
        {% endfor %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}";
    let template = compile(source);
    let expected = "USER:  Hi \n ASSISTANT: Hello USER: Bye ASSISTANT:";
    // The second time by the outline.
    for _ in 0..2 {
        let prompt = template.render_marked(&chat(), None, true, &Map::new()).unwrap();
        assert_eq!((prompt.text.as_str(), prompt.quoted.len()), (expected, 3));
    }
    let shape = Shape::of(&chat(), true).unwrap();
    assert!(template.outlines.get(&shape).flatten().is_some());
}
