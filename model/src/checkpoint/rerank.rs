//! Folders of models that compare two texts: with a classifier, or with a language model's logits of one or two tokens.

use std::collections::HashMap;

use serde::Deserialize;
use serde_json::Value as Json;

use super::Folder;
use super::config::{Config, Keys};
use super::families::NamedTensors;
use super::weights::{StoredTensor, StoredTensors};
use crate::Error;
use metadata::{Metadata, Strings};

/// Number of the pooling that gives scores.
const RANK: u32 = 4;
/// Files of sentence-transformers.
pub(super) const MODULES: &str = "modules.json";
pub(super) const LOGIT_SCORE: &str = "1_LogitScore/config.json";
/// Names the model in its first heading.
pub(super) const README: &str = "README.md";
/// Labels that no model has.
const MANY_LABELS: u64 = 1 << 20;
/// Key of a prompt with the places `{query}` and `{document}`.
const PROMPT: &str = "tokenizer.chat_template.rerank";
/// The prompt of Qwen3-Reranker as its authors give it.
const QWEN3_PROMPT: &str = "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and \
    the Instruct provided. Note that the answer can only be \"yes\" or \"no\".<|im_end|>\n<|im_start|>user\n<Instruct>: \
    Given a web search query, retrieve relevant passages that answer the query\n<Query>: {query}\n<Document>: {document}\
    <|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n";

/// What gives the scores.
pub(super) enum Ranker {
    /// The rows of `score.weight`.
    Classifier,
    /// The logit of the first token, less that of the second. The file that names them.
    Tokens { file: String, ids: Vec<(&'static str, u64)> },
}

#[derive(Deserialize)]
struct Module {
    path: String,
    r#type: String,
}

/// Refuses modules that change vectors in ways that are not supported, such as further matrices.
pub(super) fn check_modules(folder: &Folder<'_>) -> Result<(), Error> {
    if !folder.path.join(MODULES).exists() {
        return Ok(());
    }
    let modules: Vec<Module> = folder.json(MODULES)?;
    let known = ["Transformer", "Pooling", "Normalize"];
    let is_known = |module: &Module| known.contains(&module.r#type.rsplit('.').next().unwrap_or_default());
    match modules.iter().find(|module| !is_known(module)) {
        Some(module) => {
            Err(folder.setting(MODULES, "type", format!("{:?}", module.r#type), &known.join(", ")))
        }
        None => Ok(()),
    }
}

#[derive(Deserialize)]
struct LogitScore {
    true_token_id: u64,
    false_token_id: Option<u64>,
}

#[derive(Deserialize)]
struct TokenizerFile {
    model: TokenizerModel,
}

#[derive(Deserialize)]
struct TokenizerModel {
    vocab: HashMap<String, u64>,
}

/// Whether the model has a classifier behind it.
pub(super) fn classifies(config: &Config<'_>) -> bool {
    let named = |name: &Json| name.as_str().is_some_and(|name| name.ends_with("ForSequenceClassification"));
    config.get("architectures").and_then(Json::as_array).is_some_and(|names| names.iter().any(named))
}

/// Whether the chat template has the roles of two texts.
fn has_roles(metadata: &Metadata) -> Result<bool, Error> {
    let template = metadata.get::<&str>("tokenizer.chat_template")?.unwrap_or_default();
    Ok(["query", "document"].iter().all(|role| template.contains(role)))
}

/// Sets one label for each row of the matrix that has one of `names`. Returns the kind of pooling.
pub(super) fn label(metadata: &mut Metadata, arch: &str, stored: &StoredTensors, names: &[&str]) -> u32 {
    let rows = names.iter().find_map(|name| rows(stored, name));
    let labels = (0..rows.unwrap_or(1).min(MANY_LABELS)).map(|label| label.to_string());
    metadata.insert(format!("{arch}.classifier.output_labels"), labels.collect::<Strings>());
    RANK
}

/// The matrix with this name, maybe behind others.
fn named<'a>(stored: &'a StoredTensors, name: &str) -> Option<&'a StoredTensor> {
    let is_named =
        |stored: &str| stored.strip_suffix(name).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'));
    stored.iter().find(|(stored, _)| is_named(stored)).map(|(_, tensor)| tensor)
}

fn rows(stored: &StoredTensors, name: &str) -> Option<u64> {
    named(stored, name)?.shape.first().copied()
}

impl Ranker {
    /// `None` if the folder's model does not compare texts. `metadata` is that of its tokenizer.
    pub(super) fn of(
        folder: &Folder<'_>,
        config: &Config<'_>,
        metadata: &mut Metadata,
    ) -> Result<Option<Self>, Error> {
        let heading = |line: &str| line.starts_with("# Qwen3-Reranker");
        let is_named = folder.path.join(README).exists()
            && folder.text(README).is_ok_and(|text| text.lines().any(heading));
        if classifies(config) {
            if is_named && !has_roles(metadata)? {
                metadata.insert(PROMPT, QWEN3_PROMPT);
            }
            return Ok(Some(Self::Classifier));
        }
        if folder.path.join(MODULES).exists() {
            let modules: Vec<Module> = folder.json(MODULES)?;
            if let Some(module) = modules.iter().find(|module| module.r#type.ends_with(".LogitScore")) {
                return Self::of_module(folder, module, metadata).map(Some);
            }
        }
        if is_named {
            let file = "tokenizer.json";
            let TokenizerFile { model: TokenizerModel { vocab } } = folder.json(file)?;
            let id = |word: &'static str| match vocab.get(word) {
                Some(&id) => Ok((word, id)),
                None => Err(folder.setting(
                    file,
                    word,
                    "absent".to_owned(),
                    "the token that a reranker answers by",
                )),
            };
            metadata.insert(PROMPT, QWEN3_PROMPT);
            return Ok(Some(Self::Tokens { file: file.to_owned(), ids: vec![id("yes")?, id("no")?] }));
        }
        Ok(None)
    }

    fn of_module(folder: &Folder<'_>, module: &Module, metadata: &Metadata) -> Result<Self, Error> {
        let word = |c: char| c.is_ascii_alphanumeric() || "_-".contains(c);
        if module.path.is_empty() || !module.path.chars().all(word) {
            return Err(folder.setting(
                MODULES,
                "path",
                format!("{:?}", module.path),
                "the name of a folder",
            ));
        }
        if !has_roles(metadata)? {
            let needs = "a chat template of the roles query and document beside it";
            return Err(folder.setting(MODULES, "type", "LogitScore".to_owned(), needs));
        }
        let file = format!("{}/config.json", module.path);
        let LogitScore { true_token_id, false_token_id } = folder.json(&file)?;
        let second = false_token_id.map(|id| ("false_token_id", id));
        Ok(Self::Tokens {
            file,
            ids: [Some(("true_token_id", true_token_id)), second].into_iter().flatten().collect(),
        })
    }

    /// Sets the keys, and takes the rows of the output matrix that give the scores.
    pub(super) fn read(
        self,
        folder: &Folder<'_>,
        keys: &mut Keys<'_>,
        stored: &StoredTensors,
    ) -> Result<NamedTensors, Error> {
        let (file, ids) = match self {
            Self::Classifier => {
                let rank =
                    label(&mut keys.metadata, keys.arch, stored, &["score.weight", "classifier.weight"]);
                keys.set("pooling_type", rank);
                return Ok(Vec::new());
            }
            Self::Tokens { file, ids } => (file, ids),
        };
        keys.set("pooling_type", RANK);
        let name = "embed_tokens.weight";
        let matrix = named(stored, "lm_head.weight").or_else(|| named(stored, name));
        let matrix = matrix.ok_or_else(|| Error::MissingTensor { tensor: name.to_owned() })?;
        let rows = matrix.shape.first().copied().unwrap_or(0);
        if let Some((key, id)) = ids.iter().find(|(_, id)| *id >= rows) {
            return Err(folder.setting(&file, key, id.to_string(), &format!("less than {rows}")));
        }
        let labels = ["yes", "no"].into_iter().take(ids.len());
        keys.set("classifier.output_labels", labels.collect::<Strings>());
        let runs: Vec<(u64, u64)> = ids.iter().map(|(_, id)| (*id, id + 1)).collect();
        Ok(vec![("cls.output.weight", matrix.rows(&runs))])
    }
}
