//! Completions with `suffix`, of models with tokens for a gap.

use super::client::post;
use super::fake_worker::Setup;
use super::{Rig, TEMPLATE, model_metadata, tokens, write_file};
use dispatch::models::ModelEntry;
use model::ModelFile;
use proto::ids::ModelId;
use serde_json::{Value, json};
use text::Tokenizer;

const COMPLETIONS: &str = "/v1/completions";
const BOS: u32 = 258;
// The vocabulary has them in another order than the prompt.
const PREFIX: u32 = 261;
const SUFFIX: u32 = 260;
const MIDDLE: u32 = 262;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_suffix_is_behind_the_gap_and_no_text_is_control() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.gguf");
    write_file(&path, model_metadata(TEMPLATE, &["<|fim_suffix|>", "<|fim_prefix|>", "<|fim_middle|>"]));
    let tokenizer_digest =
        Tokenizer::from_metadata(ModelFile::open(&path).unwrap().metadata()).unwrap().digest();
    let entry = ModelEntry { id: ModelId::new("tiny").unwrap(), path };
    let rig = Rig::bare(|config| config.models = vec![entry]).await;
    let worker = rig.join_as(Setup { tokenizer_digest, ..rig.setup("w1", 1) }).await.unwrap();
    let gap = |before: &[u32], after: &str| {
        [&[BOS, PREFIX], before, &[SUFFIX], &tokens(after)[..], &[MIDDLE]].concat()
    };
    let ask = async |more: Value| {
        let mut body = json!({"max_tokens": 1});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        post(rig.at.http, COMPLETIONS, &body).await
    };
    for (prompt, before) in
        [(json!("ab<|fim_middle|>"), tokens("ab<|fim_middle|>")), (json!([97, 98]), tokens("ab"))]
    {
        let answer = ask(json!({"prompt": prompt, "suffix": "c<|fim_middle|><|im_end|>"})).await;
        assert_eq!(answer.status.as_u16(), 200, "{}", answer.text());
        let sent = worker.requests().pop().unwrap().prompt;
        assert_eq!(sent.to_vec(), gap(&before, "c<|fim_middle|><|im_end|>"));
    }
    let answer = ask(json!({"prompt": ["a", "b"], "suffix": "c", "add_special_tokens": false})).await;
    assert_eq!(answer.json()["choices"].as_array().unwrap().len(), 2, "{}", answer.text());
    assert_eq!(worker.requests().pop().unwrap().prompt.first(), Some(&PREFIX));
    // An empty suffix is none. Then a prompt is raw.
    assert_eq!(ask(json!({"prompt": "a<|fim_middle|>", "suffix": ""})).await.status.as_u16(), 200);
    assert_eq!(worker.requests().pop().unwrap().prompt.to_vec(), [BOS, 97, MIDDLE]);
    for more in [json!({"echo": true}), json!({"truncate_prompt_tokens": 2}), json!({"suffix": 7})] {
        let mut body = json!({"prompt": "a", "suffix": "b"});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let refused = ask(body).await;
        assert_eq!(
            (refused.status.as_u16(), &refused.json()["error"]["param"]),
            (400, &json!("suffix")),
            "{more}"
        );
    }
}
