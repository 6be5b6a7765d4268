//! The part of a checkpoint that sees images: its settings as metadata, and its tensors as those of an `mmproj` file.

use serde_json::{Map, Value as Json};

use super::Folder;
use super::config::Config;
use super::families::{Form, Rule, filled, formed, matched, rule};
use super::weights::StoredTensor;
use crate::Error;
use crate::conversion::{Conversion, FloatMap};
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

/// Towers of the class SigLIP or CLIP, and what is behind them.
const CLIP: &[Rule] = &[
    rule("embeddings.patch_embedding.*", "v.patch_embd.*"),
    rule("embeddings.class_embedding", "v.class_embd"),
    rule("embeddings.position_embedding.weight", "v.position_embd.weight"),
    formed("embeddings.position_ids", "", Form::Unused),
    rule("pre_layrnorm.*", "v.pre_ln.*"),
    rule("post_layernorm.*", "v.post_ln.*"),
    rule("encoder.layers.{l}.layer_norm1.*", "v.blk.{l}.ln1.*"),
    rule("encoder.layers.{l}.layer_norm2.*", "v.blk.{l}.ln2.*"),
    rule("encoder.layers.{l}.self_attn.q_proj.*", "v.blk.{l}.attn_q.*"),
    rule("encoder.layers.{l}.self_attn.k_proj.*", "v.blk.{l}.attn_k.*"),
    rule("encoder.layers.{l}.self_attn.v_proj.*", "v.blk.{l}.attn_v.*"),
    rule("encoder.layers.{l}.self_attn.out_proj.*", "v.blk.{l}.attn_out.*"),
    rule("encoder.layers.{l}.mlp.fc1.*", "v.blk.{l}.ffn_up.*"),
    rule("encoder.layers.{l}.mlp.fc2.*", "v.blk.{l}.ffn_down.*"),
];
const PROJECTORS: &[Rule] = &[
    rule("multi_modal_projector.linear_1.*", "mm.0.*"),
    rule("multi_modal_projector.linear_2.*", "mm.2.*"),
    formed("multi_modal_projector.mm_soft_emb_norm.weight", "mm.soft_emb_norm.weight", Form::PlusOne),
    rule("connector.modality_projection.proj.*", "mm.model.fc.*"),
];
const QWEN: &[Rule] = &[
    rule("visual.patch_embed.proj.bias", "v.patch_embd.bias"),
    rule("visual.pos_embed.weight", "v.position_embd.weight"),
    rule("visual.blocks.{l}.norm1.*", "v.blk.{l}.ln1.*"),
    rule("visual.blocks.{l}.norm2.*", "v.blk.{l}.ln2.*"),
    rule("visual.blocks.{l}.attn.qkv.*", "v.blk.{l}.attn_qkv.*"),
    rule("visual.blocks.{l}.attn.proj.*", "v.blk.{l}.attn_out.*"),
    rule("visual.blocks.{l}.mlp.gate_proj.*", "v.blk.{l}.ffn_gate.*"),
    rule("visual.blocks.{l}.mlp.up_proj.*", "v.blk.{l}.ffn_up.*"),
    rule("visual.blocks.{l}.mlp.down_proj.*", "v.blk.{l}.ffn_down.*"),
    rule("visual.blocks.{l}.mlp.linear_fc1.*", "v.blk.{l}.ffn_up.*"),
    rule("visual.blocks.{l}.mlp.linear_fc2.*", "v.blk.{l}.ffn_down.*"),
    rule("visual.merger.ln_q.*", "v.post_ln.*"),
    rule("visual.merger.norm.*", "v.post_ln.*"),
    rule("visual.merger.mlp.0.*", "mm.0.*"),
    rule("visual.merger.mlp.2.*", "mm.2.*"),
    rule("visual.merger.linear_fc1.*", "mm.0.*"),
    rule("visual.merger.linear_fc2.*", "mm.2.*"),
    rule("visual.deepstack_merger_list.{l}.norm.*", "v.deepstack.{l}.norm.*"),
    rule("visual.deepstack_merger_list.{l}.linear_fc1.*", "v.deepstack.{l}.fc1.*"),
    rule("visual.deepstack_merger_list.{l}.linear_fc2.*", "v.deepstack.{l}.fc2.*"),
];

/// Tensors under the names of `mmproj` files and in their form. `name` is without the model's prefix. `None`: the
/// tensor is of another part of the model.
pub(super) fn tensors(
    config: &Config<'_>,
    name: &str,
    tensor: &StoredTensor,
) -> Result<Option<Vec<(String, StoredTensor)>>, Error> {
    match name {
        "multi_modal_projector.mm_input_projection_weight" => {
            return Ok(Some(vec![("mm.input_projection.weight".to_owned(), tensor.transposed()?)]));
        }
        "visual.patch_embed.proj.weight" => return Ok(Some(frames(tensor))),
        _ => {}
    }
    let tower = name.strip_prefix("vision_tower.").unwrap_or(name);
    let tower = tower.strip_prefix("vision_model.").unwrap_or(tower);
    // The head pools the patches, and no model of texts reads that.
    if tower != name && tower.starts_with("head.") {
        return Ok(Some(Vec::new()));
    }
    let rules: &[&[Rule]] = if tower == name { &[PROJECTORS, QWEN] } else { &[CLIP] };
    let found = rules.iter().copied().flatten().find_map(|rule| Some((rule, matched(rule.from, tower)?)));
    let Some((rule, mut words)) = found else { return Ok(None) };
    // In `mmproj` files a merger has the number of its layer.
    let layer =
        words.layer.filter(|_| rule.to.starts_with("v.deepstack.")).map(|list| layer_of(config, list));
    if layer.is_some() {
        words.layer = layer.as_deref();
    }
    let tensor = match rule.form {
        Form::Unused => return Ok(Some(Vec::new())),
        Form::PlusOne => tensor.clone().floats(FloatMap::PlusOne)?,
        _ => tensor.clone().vector_as_floats()?,
    };
    Ok(Some(vec![(filled(rule.to, &words), tensor)]))
}

/// The layer behind which the merger of this number reads.
fn layer_of(config: &Config<'_>, number: &str) -> String {
    let vision = config.outer().get("vision_config");
    let list = vision.and_then(|vision| vision.get("deepstack_visual_indexes")).and_then(Json::as_array);
    let number = number.parse().unwrap_or(usize::MAX);
    let given = list.map(|list| list.get(number).and_then(Json::as_u64));
    let layer = given.unwrap_or([8, 16, 24].get(number).copied());
    layer.map_or_else(|| "none".to_owned(), |layer| layer.to_string())
}

/// Matrices of patches, `[rows, colours, frames, lines, pixels]`: one of each frame.
fn frames(tensor: &StoredTensor) -> Vec<(String, StoredTensor)> {
    let &[rows, colours, frames, lines, pixels] = tensor.shape.as_slice() else {
        return vec![("v.patch_embd.weight".to_owned(), tensor.clone())];
    };
    let row_bytes = tensor.bytes.len() / rows.saturating_mul(colours).saturating_mul(frames).max(1);
    let frame = |number: u64| {
        let runs =
            (0..rows * colours).map(|plane| (plane * frames + number, plane * frames + number + 1)).collect();
        let bytes = Conversion::Rows { of: Box::new(tensor.bytes.clone()), row_bytes, runs };
        let shape = vec![rows, colours, lines, pixels];
        let name = match number {
            0 => "v.patch_embd.weight".to_owned(),
            number => format!("v.patch_embd.weight.{number}"),
        };
        (name, StoredTensor { ty: tensor.ty, shape, bytes })
    };
    (0..frames.min(8)).map(frame).collect()
}
