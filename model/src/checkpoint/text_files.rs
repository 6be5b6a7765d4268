//! Tokenizer and chat template of a Hugging Face repository, as metadata.

use std::path::Path;

use serde_json::{Map, Value as Json};

use super::{CheckpointError, Folder};
use crate::Error;
use metadata::Metadata;

/// Keys of files that are kept as they are.
const FILES: [(&str, &str); 4] = [
    ("tokenizer.json", "tokenizer.huggingface.json"),
    ("tokenizer_config.json", "tokenizer.huggingface.config"),
    ("special_tokens_map.json", "tokenizer.huggingface.special_tokens_map"),
    ("generation_config.json", "tokenizer.huggingface.generation_config"),
];

/// Key of the chat template.
const TEMPLATE: &str = "tokenizer.chat_template";
/// Longest name of a further chat template in bytes.
const MAX_NAME: usize = 64;

/// Reads what makes text of `folder`, the files of a Hugging Face repository: `tokenizer.json`, and if present
/// `tokenizer_config.json`, `special_tokens_map.json`, `generation_config.json` and the chat template. The
/// crate `text` makes a tokenizer and a template of the result, as of any model's metadata.
///
/// The template is that of `chat_template.jinja`, of `chat_template.json`, or of the configuration, in this
/// order. Of several templates in a list, the others are kept under their names.
///
/// # Errors
/// [`Error`] of a file that cannot be read, and [`CheckpointError`].
pub fn tokenizer_metadata(folder: impl AsRef<Path>) -> Result<Metadata, Error> {
    let folder = Folder { path: folder.as_ref() };
    let mut metadata = Metadata::default();
    let mut template = None;
    for (file, key) in FILES {
        if key != "tokenizer.huggingface.json" && !folder.path.join(file).exists() {
            continue;
        }
        let mut text = folder.text(file)?;
        if key == "tokenizer.huggingface.config" {
            // The template is kept once.
            let mut config: Map<String, Json> = folder.parse(file, &text)?;
            template = config.shift_remove("chat_template");
            text = Json::Object(config).to_string();
        }
        metadata.insert(key, text);
    }
    if folder.path.join("chat_template.json").exists() {
        let mut file: Map<String, Json> = folder.json("chat_template.json")?;
        template = file.shift_remove("chat_template").or(template);
    }
    if folder.path.join("chat_template.jinja").exists() {
        template = Some(Json::String(folder.text("chat_template.jinja")?));
    }
    add_templates(&folder, template, &mut metadata)?;
    Ok(metadata)
}

fn add_templates(folder: &Folder<'_>, template: Option<Json>, metadata: &mut Metadata) -> Result<(), Error> {
    let wrong = |found: String| {
        let needs = "a text, or a list of objects with `name` and `template`";
        Err::<(), _>(folder.setting("tokenizer_config.json", "chat_template", found, needs))
    };
    match template {
        None | Some(Json::Null) => {}
        Some(Json::String(template)) => drop(metadata.insert(TEMPLATE, template)),
        Some(Json::Array(named)) => {
            for entry in named {
                let text = |key: &str| entry.get(key).and_then(Json::as_str);
                let (Some(name), Some(template)) = (text("name"), text("template")) else {
                    return wrong("a list of something else".to_owned());
                };
                let word = |c: char| c.is_ascii_alphanumeric() || "_-".contains(c);
                if name.len() > MAX_NAME || !name.chars().all(word) {
                    return wrong("a list with a name that is no word".to_owned());
                }
                let key = match name {
                    "default" => TEMPLATE.to_owned(),
                    name => format!("{TEMPLATE}.{name}"),
                };
                metadata.insert(key, template);
            }
        }
        Some(_) => return wrong("something else".to_owned()),
    }
    Ok(())
}

impl Folder<'_> {
    pub(super) fn parse(&self, file: &str, text: &str) -> Result<Map<String, Json>, Error> {
        serde_json::from_str(text)
            .map_err(|source| CheckpointError::Json { path: self.path.join(file), source }.into())
    }
}
