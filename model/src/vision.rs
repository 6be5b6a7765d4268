//! The part of a model that sees images.
//!
//! A Hugging Face checkpoint has it among its weights, a GGUF in a file of its own (`mmproj`). Both are presented alike:
//! settings in the form of `config.json` and `preprocessor_config.json` as metadata, tensors under the names of `mmproj`
//! files.

use metadata::Metadata;

/// Metadata key of the settings of the model and its vision tower: JSON in the form of `config.json`.
pub const CONFIG_KEY: &str = "vision.config";
/// Metadata key of the settings of images' preprocessing: JSON in the form of `preprocessor_config.json`.
pub const PREPROCESSOR_KEY: &str = "vision.preprocessor";
/// Served values of `model_type` in the settings of [`CONFIG_KEY`].
pub const MODEL_TYPES: [&str; 6] = ["gemma3", "idefics3", "llava", "qwen2_5_vl", "qwen3_vl", "smolvlm"];

/// Whether a tensor of this name is of a part that sees images.
pub fn is_vision_tensor(name: &str) -> bool {
    name.starts_with("v.") || name.starts_with("mm.")
}

/// Whether the tensor is of a part that sees images, and the model has one.
pub(crate) fn is_part(metadata: &Metadata, tensor: &str) -> bool {
    is_vision_tensor(tensor) && metadata.value(CONFIG_KEY).is_some()
}
