//! Compares this interpreter with Jinja, using `tests/templates/reference.py`.

use std::path::PathBuf;
use std::time::UNIX_EPOCH;

use serde::Deserialize;

use super::*;

/// Time that `strftime_now` uses in the reference: 2026-03-05 14:07:09.
const NOW: u64 = 1_772_719_629;

#[derive(Deserialize)]
struct Given {
    #[serde(default)]
    messages: Vec<Message<'static>>,
    #[serde(default)]
    tools: Option<Vec<Json>>,
    #[serde(default)]
    add_generation_prompt: bool,
    #[serde(default)]
    extra: Map<String, Json>,
}

/// Jinja's result: text or error.
#[derive(Deserialize)]
struct Outcome {
    output: Option<String>,
    error: Option<String>,
}

fn fixture(name: &str) -> String {
    let path: PathBuf = [env!("CARGO_MANIFEST_DIR"), "../../tests/fixtures/templates", name].iter().collect();
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn render_for(template: &str, given: &Given) -> Result<Prompt, TemplateError> {
    let template = ChatTemplate::new(template, "<s>", "</s>")?;
    let now = UNIX_EPOCH + Duration::from_secs(NOW);
    let tools = given.tools.as_deref();
    let (answer, limits) = (given.add_generation_prompt, template.limits);
    template.render_inner(&given.messages, tools, answer, &given.extra, now, limits)
}

/// Describes the difference of the results; `None` if they agree.
fn difference(template: &str, given: &Given, outcome: &Outcome) -> Option<String> {
    let got = render_for(template, given).map(|prompt| prompt.text);
    match (&outcome.output, &got) {
        (Some(expected), Ok(got)) if got == expected => None,
        (None, Err(_)) => None,
        (Some(expected), got) => {
            Some(format!("template: {template}\n  jinja: {expected:?}\n  ours:  {got:?}\n"))
        }
        (None, got) => {
            Some(format!("template: {template}\n  jinja: {:?}\n  ours:  {got:?}\n", outcome.error))
        }
    }
}

#[test]
fn snippets_render_as_jinja_renders_them() {
    #[derive(Deserialize)]
    struct Case {
        template: String,
        #[serde(flatten)]
        outcome: Outcome,
    }
    #[derive(Deserialize)]
    struct Snippets {
        #[serde(flatten)]
        given: Given,
        cases: Vec<Case>,
    }
    let snippets: Snippets = serde_json::from_str(&fixture("snippets.json")).unwrap();
    let differences: Vec<String> = snippets
        .cases
        .iter()
        .filter_map(|case| difference(&case.template, &snippets.given, &case.outcome))
        .collect();
    assert!(differences.is_empty(), "{} differ:\n{}", differences.len(), differences.join("\n"));
}

/// Random templates: none panics or runs without end, and where Jinja renders, the result is the same.
/// Ignored by default: needs `KVASIR_JINJA`, a Python with jinja2. `KVASIR_SEED` sets the seed and
/// `KVASIR_CASES` the number of templates.
#[test]
#[ignore = "needs jinja2: KVASIR_JINJA=PYTHON cargo test -p kvasir-text --lib random_templates -- --ignored"]
fn random_templates_render_as_jinja_renders_them() {
    #[derive(Deserialize)]
    struct Case {
        template: String,
        #[serde(flatten)]
        given: Given,
        #[serde(flatten)]
        outcome: Outcome,
    }
    let set = |name: &str, usual: &str| std::env::var(name).unwrap_or_else(|_| usual.to_owned());
    let (seed, count) = (set("KVASIR_SEED", "1"), set("KVASIR_CASES", "4000"));
    let script: PathBuf = [env!("CARGO_MANIFEST_DIR"), "../../tests/templates/reference.py"].iter().collect();
    let python = std::env::var("KVASIR_JINJA").expect("KVASIR_JINJA is a Python that has jinja2");
    let mut reference = std::process::Command::new(python);
    let output = reference.arg(script).args(["fuzz", &seed, &count]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let (mut rendered, mut differences) = (0, Vec::new());
    for line in String::from_utf8(output.stdout).unwrap().lines() {
        let case: Case = serde_json::from_str(line).unwrap();
        // Where Jinja fails, this interpreter may render, within its limits and without a panic. Object
        // addresses are not comparable.
        let comparable = case.outcome.output.as_ref().is_some_and(|output| !output.contains(" at 0x"));
        rendered += usize::from(comparable);
        let got = difference(&case.template, &case.given, &case.outcome);
        differences.extend(got.filter(|_| comparable));
    }
    assert!(rendered * 4 > count.parse().unwrap(), "only {rendered} of {count} render");
    assert!(
        differences.is_empty(),
        "seed {seed}: {} of {rendered} differ:\n{}",
        differences.len(),
        differences.join("\n")
    );
}

#[test]
fn templates_of_well_known_models_render_as_jinja_renders_them() {
    #[derive(Deserialize)]
    struct Named {
        name: String,
        template: String,
        outcomes: Vec<Outcome>,
    }
    #[derive(Deserialize)]
    struct Corpus {
        chats: Vec<Given>,
        templates: Vec<Named>,
    }
    let corpus: Corpus = serde_json::from_str(&fixture("corpus.json")).unwrap();
    assert!(corpus.templates.len() >= 50);
    let mut differences = Vec::new();
    for Named { name, template, outcomes } in &corpus.templates {
        assert!(outcomes.iter().any(|outcome| outcome.output.is_some()), "{name}");
        for (given, outcome) in corpus.chats.iter().zip(outcomes) {
            differences.extend(difference(template, given, outcome).map(|found| format!("{name}: {found}")));
        }
    }
    assert!(differences.is_empty(), "{} differ:\n{}", differences.len(), differences.join("\n"));
}
