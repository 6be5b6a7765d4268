//! The part of a checkpoint that sees images: its settings as metadata.

use serde_json::{Map, Value as Json};

use super::Folder;
use super::config::Config;
use crate::Error;
use crate::vision::{CONFIG_KEY, MODEL_TYPES, PREPROCESSOR_KEY};
use metadata::Metadata;

/// Settings of images' preprocessing.
pub(super) const PREPROCESSOR: &str = "preprocessor_config.json";
/// Settings of a processor of texts and images. Newer repositories have those of [`PREPROCESSOR`] inside.
pub(super) const PROCESSOR: &str = "processor_config.json";
/// Settings that say nothing about images.
const LEFT_OUT: [&str; 6] =
    ["architectures", "dtype", "quantization_config", "torch_dtype", "transformers_version", "_name_or_path"];

/// Whether the model's part for images is read.
pub(super) fn sees_images(config: &Config<'_>) -> bool {
    let kind = config.outer().get("model_type").and_then(Json::as_str);
    kind.is_some_and(|kind| MODEL_TYPES.contains(&kind)) && config.outer().contains_key("vision_config")
}

/// Inserts the settings of a model that sees images.
pub(super) fn insert(folder: &Folder<'_>, config: &Config<'_>, metadata: &mut Metadata) -> Result<(), Error> {
    if !sees_images(config) {
        return Ok(());
    }
    let mut settings = config.outer().clone();
    settings.retain(|key, _| !LEFT_OUT.contains(&key.as_str()));
    metadata.insert(CONFIG_KEY, Json::Object(settings).to_string());
    if let Some(preprocessor) = preprocessor(folder)? {
        metadata.insert(PREPROCESSOR_KEY, Json::Object(preprocessor).to_string());
    }
    Ok(())
}

/// Settings of both files. Those of [`PREPROCESSOR`] come first.
fn preprocessor(folder: &Folder<'_>) -> Result<Option<Map<String, Json>>, Error> {
    let read = |file: &str| match folder.path.join(file).exists() {
        true => folder.json::<Map<String, Json>>(file).map(Some),
        false => Ok(None),
    };
    let (found, processor) = (read(PREPROCESSOR)?, read(PROCESSOR)?);
    if found.is_none() && processor.is_none() {
        return Ok(None);
    }
    let (mut merged, mut others) = (found.unwrap_or_default(), processor.unwrap_or_default());
    if let Some(Json::Object(inner)) = others.remove("image_processor") {
        add(&mut merged, inner);
    }
    add(&mut merged, others);
    Ok(Some(merged))
}

/// Adds the settings that are absent or null.
fn add(to: &mut Map<String, Json>, from: Map<String, Json>) {
    for (key, value) in from {
        let slot = to.entry(key).or_insert(Json::Null);
        if slot.is_null() {
            *slot = value;
        }
    }
}
