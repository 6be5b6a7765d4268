//! Planning with the short effort gives the same plan or none.

use super::write_model;
use api::auth::{Caller, Keys};
use api::documents::Popularity;
use api::error::ApiError;
use api::plan::{Effort, GenerationPlan, Kind, Sources, Unplanned, generation};
use dispatch::models::{ModelEntry, Models};
use proto::block::ClusterKey;
use proto::ids::ModelId;
use proto::served_model::{ModelTask, ServedModel};
use serde_json::{Value, json};

const FULL: Effort = Effort::Full { counted: false };
const TEMPLATE: &str = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n\
                        {% endfor %}";

struct Planner {
    models: Models,
    caller: Caller,
    popularity: Popularity,
}

impl Planner {
    fn new(template: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tiny.gguf");
        write_model(&path, template);
        let models = Models::open(&[ModelEntry { id: ModelId::new("tiny").unwrap(), path }], false).unwrap();
        let caller =
            Keys::new(&[], ClusterKey([7; 32]), None).unwrap().authenticate(&Default::default()).unwrap();
        Self { models, caller, popularity: Popularity::default() }
    }

    fn plan(&self, body: &Value, effort: Effort) -> Result<GenerationPlan, Unplanned> {
        let served = |id: &ModelId| {
            Some(ServedModel {
                id: id.clone(),
                model_digest: [9; 32],
                tokenizer_digest: self.models.only()?.tokenizer.digest(),
                max_model_len: 1 << 20,
                layers: (0, 2),
                engine: "kvasir".into(),
                hit_tokens: 16,
                numeric_class: "none".into(),
                block_tokens: 16,
                task: ModelTask::Generate,
            })
        };
        let (caller, models, popularity) = (&self.caller, &self.models, &self.popularity);
        let parent = |_: &ModelId| None;
        let fetched = None;
        let sources =
            Sources { caller, models, served: &served, parent: &parent, seed: 1, popularity, fetched };
        generation(Kind::Chat, body.to_string().as_bytes(), &sources, effort)
    }
}

fn chat(text: &str) -> Value {
    json!({"messages": [{"role": "user", "content": text}], "max_tokens": 1})
}

#[test]
fn a_short_effort_plans_the_same_or_gives_up() {
    let planner = Planner::new(TEMPLATE);
    // A text of this length is not tokenized with the short effort.
    let long = chat(&"a".repeat(40_000));
    assert!(matches!(planner.plan(&long, Effort::Short), Err(Unplanned::TooLong { counted: true })));
    for body in [chat("hi"), long] {
        let full = planner.plan(&body, FULL).expect("there is no limit");
        let short = planner.plan(&body, Effort::Short).expect("it is short, or remembered");
        assert_eq!(short.prompts, full.prompts);
    }
    let mut tools = chat("hi");
    tools["tools"] = json!([{"type": "function", "function": {"name": "f"}}]);
    for body in [tools, chat(&" ".repeat(1 << 16))] {
        assert!(matches!(planner.plan(&body, Effort::Short), Err(Unplanned::TooLong { counted: false })));
        planner.plan(&body, FULL).expect("there is no limit");
    }
    let refused = planner.plan(&json!({"messages": 1}), Effort::Short);
    assert!(matches!(refused, Err(Unplanned::Refused(ApiError::InvalidField { .. }))));
}

#[test]
fn a_template_that_takes_long_is_not_rendered_with_a_short_effort() {
    let planner = Planner::new("{% for x in range(9000) %}{% endfor %}{{ messages[0].content }}");
    assert!(matches!(planner.plan(&chat("hi"), Effort::Short), Err(Unplanned::TooLong { .. })));
    planner.plan(&chat("hi"), FULL).expect("it is within the limits of templates");
    // An error raised by a template is reported with the full effort only.
    let planner = Planner::new("{{ raise_exception('not so') }}");
    assert!(matches!(planner.plan(&chat("hi"), Effort::Short), Err(Unplanned::TooLong { .. })));
    assert!(matches!(planner.plan(&chat("hi"), FULL), Err(Unplanned::Refused(_))));
}

#[test]
fn documents_are_counted_once_whatever_the_effort() {
    let mut body = chat("why");
    body["documents"] = json!([{"id": "b", "text": "a".repeat(40_000)}]);
    let counts = |efforts: &[Effort]| {
        let planner = Planner::new(TEMPLATE);
        for effort in efforts {
            let planned = planner.plan(&body, *effort);
            assert_eq!(planned.is_ok(), *effort != Effort::Short);
        }
        format!("{:?}", planner.popularity)
    };
    let once = counts(&[FULL]);
    assert_eq!(counts(&[Effort::Short, Effort::Full { counted: true }]), once);
    assert_ne!(counts(&[Effort::Short, FULL]), once);
}
