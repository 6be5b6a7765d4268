//! The part of a model that sees images in a file of its own beside a text model's GGUF: `mmproj` files of llama.cpp.
//!
//! A text model's GGUF and the file beside it are presented as one model: the tensors of both, and settings as those of
//! a checkpoint.

use std::borrow::Cow;
use std::collections::HashSet;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Map, Value as Json, json};

use crate::conversion::Conversion;
use crate::header::{Contents, TensorInfo};
use crate::vision::{CONFIG_KEY, PREPROCESSOR_KEY, is_vision_tensor};
use crate::{Error, GgmlType, gguf};
use metadata::{Metadata, Strings};

/// Part of the names of such files.
const NAME: &str = "mmproj";
/// Their `general.architecture`.
const ARCH: &str = "clip";
/// Most files that are looked at.
const MAX_FILES: usize = 64;
const PROJECTION: &str = "mm.input_projection.weight";

/// Settings of the model, and of preprocessing.
type Settings = (Json, Json);

/// A kind of projector.
struct Kind {
    /// Value of `clip.projector_type`.
    projector: &'static str,
    /// `general.architecture` of text models with it.
    arches: &'static [&'static str],
    /// Matrix whose rows are as wide as the text model's, and the dimension with their width.
    last: (&'static str, usize),
    /// Settings of ids, and the tokens that they name. The first is a row's.
    tokens: &'static [(&'static str, &'static str)],
    settings: fn(&Metadata, &[TensorInfo]) -> Result<Settings, Error>,
}

const QWEN_TOKENS: &[(&str, &str)] = &[
    ("image_token_id", "<|image_pad|>"),
    ("vision_start_token_id", "<|vision_start|>"),
    ("vision_end_token_id", "<|vision_end|>"),
];

const KINDS: [Kind; 5] = [
    Kind {
        projector: "gemma3",
        arches: &["gemma3"],
        last: (PROJECTION, 0),
        tokens: &[
            ("image_token_index", "<image_soft_token>"),
            ("boi_token_index", "<start_of_image>"),
            ("eoi_token_index", "<end_of_image>"),
        ],
        settings: gemma3,
    },
    Kind {
        projector: "idefics3",
        arches: &["llama", "smollm3"],
        last: ("mm.model.fc.weight", 1),
        tokens: &[("image_token_id", "<image>")],
        settings: idefics3,
    },
    Kind {
        projector: "mlp",
        arches: &["llama", "qwen2"],
        last: ("mm.2.weight", 1),
        tokens: &[("image_token_index", "<image>")],
        settings: llava,
    },
    Kind {
        projector: "qwen2.5vl_merger",
        arches: &["qwen2vl"],
        last: ("mm.2.weight", 1),
        tokens: QWEN_TOKENS,
        settings: qwen2_5,
    },
    Kind {
        projector: "qwen3vl_merger",
        arches: &["qwen3vl", "qwen3vlmoe"],
        last: ("mm.2.weight", 1),
        tokens: QWEN_TOKENS,
        settings: qwen3,
    },
];

/// Adds the part that sees images to the text model at `path`, if a file beside it has one of its kind and width. Of
/// several the one with the most words of the text model's name is used, then F16 before BF16 before others.
pub(crate) fn add(path: &Path, text: Contents) -> Result<Contents, Error> {
    // Keys of other types are refused where they are needed.
    let arch = word(&text.metadata, "general.architecture").unwrap_or_default().to_owned();
    let has_one = text.metadata.value(CONFIG_KEY).is_some();
    if has_one || !KINDS.iter().any(|kind| kind.arches.contains(&arch.as_str())) {
        return Ok(text);
    }
    let width = text.metadata.get::<u64>(&format!("{arch}.embedding_length")).ok().flatten();
    for candidate in candidates(path) {
        let part = match gguf::open(&candidate) {
            Ok(part) => part,
            Err(error) => {
                tracing::warn!(path = %candidate.display(), %error, "a file for images cannot be read");
                continue;
            }
        };
        let Some(kind) = kind_of(&part.metadata).filter(|kind| kind.arches.contains(&arch.as_str())) else {
            continue;
        };
        let (name, dim) = kind.last;
        let found =
            part.tensors.iter().find(|info| info.name() == name).and_then(|info| info.dims().get(dim));
        if found.is_none() || found.copied() != width {
            continue;
        }
        let Some(ids) = ids(kind, &text.metadata) else {
            tracing::warn!(path = %candidate.display(), "the text model has no token of images: they are not served");
            continue;
        };
        tracing::info!(path = %candidate.display(), "images are served by the file beside the model");
        return join(text, part, kind, ids);
    }
    Ok(text)
}

/// The kind of a file, if it has a projector of images that is served.
fn kind_of(metadata: &Metadata) -> Option<&'static Kind> {
    if word(metadata, "general.architecture") != Some(ARCH) {
        return None;
    }
    let found = word(metadata, "clip.vision.projector_type").or(word(metadata, "clip.projector_type"));
    KINDS.iter().find(|kind| kind.projector == found.unwrap_or("mlp"))
}

fn word<'a>(metadata: &'a Metadata, key: &str) -> Option<&'a str> {
    metadata.get::<&str>(key).ok().flatten()
}

/// Files beside `path` that may have the part, the best first.
fn candidates(path: &Path) -> Vec<PathBuf> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name =
        |path: &Path| path.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_lowercase();
    let is_part =
        |found: &PathBuf| name(found).contains(NAME) && name(found).ends_with(".gguf") && found != path;
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut found: Vec<PathBuf> =
        entries.filter_map(|entry| Some(entry.ok()?.path())).filter(is_part).collect();
    let words = |path: &Path| -> HashSet<String> {
        let name = name(path);
        let stem = name.strip_suffix(".gguf").unwrap_or(&name);
        stem.split(['-', '_', '.', ' ']).filter(|word| *word != NAME).map(str::to_owned).collect()
    };
    let own = words(path);
    found.sort_by_cached_key(|found| {
        let words = words(found);
        let precision = ["f16", "bf16"].iter().position(|precision| words.contains(*precision)).unwrap_or(2);
        (std::cmp::Reverse(words.intersection(&own).count()), precision, found.clone())
    });
    found.truncate(MAX_FILES);
    found
}

/// A token that `tokenizer.json` adds to the vocabulary.
#[derive(Deserialize)]
struct AddedToken {
    id: u64,
    content: String,
}

#[derive(Deserialize)]
struct AddedTokens {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
}

/// Ids of the tokens around images, by their settings. `None` if the text model lacks one.
fn ids(kind: &Kind, text: &Metadata) -> Option<Map<String, Json>> {
    let tokens = text.get::<&Strings>("tokenizer.ggml.tokens").ok().flatten();
    let added = word(text, "tokenizer.huggingface.json");
    let added = added.and_then(|text| serde_json::from_str::<AddedTokens>(text).ok());
    let id_of = |token: &str| -> Option<u64> {
        let of_file =
            added.as_ref().and_then(|all| all.added_tokens.iter().find(|added| added.content == token));
        let of_list =
            || (0..tokens?.len()).find(|&id| tokens.and_then(|tokens| tokens.get(id)) == Some(token));
        of_file.map(|added| added.id).or_else(|| of_list().map(|id| id as u64))
    };
    let id = |(setting, token): &(&str, &str)| Some(((*setting).to_owned(), id_of(token)?.into()));
    kind.tokens.iter().map(id).collect()
}

fn join(text: Contents, part: Contents, kind: &Kind, ids: Map<String, Json>) -> Result<Contents, Error> {
    let Contents { mut files, mut metadata, mut tensors } = text;
    let (mut config, preprocessor) = (kind.settings)(&part.metadata, &part.tensors)?;
    if let Json::Object(config) = &mut config {
        config.extend(ids);
    }
    metadata.insert(CONFIG_KEY, config.to_string());
    metadata.insert(PREPROCESSOR_KEY, preprocessor.to_string());
    let before = files.len();
    files.extend(part.files);
    let of_images = |info: &TensorInfo| is_vision_tensor(&info.name) && !info.name.starts_with("mm.a.");
    for mut info in part.tensors.into_iter().filter(of_images) {
        if let Conversion::Stored(region) = &mut info.source {
            region.file += before;
        }
        tensors.push(if info.name == PROJECTION { transposed(info)? } else { info });
    }
    Ok(Contents { files, metadata, tensors })
}

/// Gemma's projection has a row for each input.
fn transposed(info: TensorInfo) -> Result<TensorInfo, Error> {
    let size = match info.ty {
        GgmlType::F32 => 4,
        GgmlType::F16 | GgmlType::BF16 => 2,
        found => return Err(Error::TensorType { tensor: info.name, found, expected: GgmlType::F16 }),
    };
    let &[cols, rows] = info.dims.as_slice() else { return Ok(info) };
    let source = Conversion::Transposed { of: Box::new(info.source), rows, cols, size };
    Ok(TensorInfo { dims: vec![rows, cols], source, ..info })
}

/// A count of the tower.
fn count(metadata: &Metadata, key: &str) -> Result<u64, Error> {
    Ok(metadata.require(&format!("clip.vision.{key}"))?)
}

fn optional(metadata: &Metadata, key: &str, absent: u64) -> Result<u64, Error> {
    Ok(metadata.get(&format!("clip.vision.{key}"))?.unwrap_or(absent))
}

/// Settings of towers with the names `[layers, heads]`.
fn tower(metadata: &Metadata, [layers, heads]: [&str; 2]) -> Result<Map<String, Json>, Error> {
    let mut settings = Map::new();
    let mut set = |key: &str, value: Json| _ = settings.insert(key.to_owned(), value);
    for (key, to) in [
        ("embedding_length", "hidden_size"),
        ("feed_forward_length", "intermediate_size"),
        ("block_count", layers),
        ("attention.head_count", heads),
        ("patch_size", "patch_size"),
    ] {
        set(to, count(metadata, key)?.into());
    }
    if let Some(eps) = metadata.get::<f32>("clip.vision.attention.layer_norm_epsilon")? {
        set("layer_norm_eps", f64::from(eps).into());
    }
    let flag = |key: &str| Ok::<bool, Error>(metadata.get::<bool>(key)?.unwrap_or(false));
    let act = match (flag("clip.use_gelu")?, flag("clip.use_silu")?) {
        (true, _) => "gelu_pytorch_tanh",
        (false, true) => "silu",
        (false, false) => "quick_gelu",
    };
    set("hidden_act", act.into());
    Ok(settings)
}

/// Settings of towers of the class CLIP or SigLIP.
fn clip(metadata: &Metadata, model_type: &str) -> Result<Map<String, Json>, Error> {
    let mut settings = tower(metadata, ["num_hidden_layers", "num_attention_heads"])?;
    settings.insert("image_size".to_owned(), count(metadata, "image_size")?.into());
    settings.insert("model_type".to_owned(), model_type.into());
    Ok(settings)
}

/// Settings of preprocessing that all have.
fn preprocessor(metadata: &Metadata, settings: Json) -> Result<Json, Error> {
    let mut all = settings;
    for key in ["image_mean", "image_std"] {
        if let Some(list) = metadata.get::<Cow<'_, [f32]>>(&format!("clip.vision.{key}"))? {
            all[key] = json!(list.iter().map(|value| f64::from(*value)).collect::<Vec<f64>>());
        }
    }
    Ok(all)
}

fn gemma3(metadata: &Metadata, _: &[TensorInfo]) -> Result<Settings, Error> {
    let (image, patch) = (count(metadata, "image_size")?, count(metadata, "patch_size")?);
    let side = image / patch.max(1) / optional(metadata, "projector.scale_factor", 4)?.max(1);
    let rows = side.saturating_mul(side);
    let config = json!({"model_type": "gemma3", "mm_tokens_per_image": rows,
        "vision_config": clip(metadata, "siglip_vision_model")?});
    let size = json!({"height": image, "width": image});
    Ok((config, preprocessor(metadata, json!({"size": size, "resample": 2, "image_seq_length": rows}))?))
}

fn idefics3(metadata: &Metadata, _: &[TensorInfo]) -> Result<Settings, Error> {
    let tile = count(metadata, "image_size")?;
    let config = json!({"model_type": "idefics3", "scale_factor": optional(metadata, "projector.scale_factor", 2)?,
        "vision_config": clip(metadata, "idefics3_vision")?});
    let longest = optional(metadata, "preproc_image_size", 4 * tile)?;
    let settings =
        json!({"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": tile}, "resample": 1});
    Ok((config, preprocessor(metadata, settings)?))
}

fn llava(metadata: &Metadata, tensors: &[TensorInfo]) -> Result<Settings, Error> {
    let image = count(metadata, "image_size")?;
    let has_class = tensors.iter().any(|info| info.name() == "v.class_embd");
    let model_type = if has_class { "clip_vision_model" } else { "siglip_vision_model" };
    let layers: Option<Cow<'_, [i32]>> = metadata.get("clip.vision.feature_layer")?;
    // Files without that list end with the layer of the feature.
    let features = layers.map_or_else(|| json!(-1), |layers| json!(layers));
    let strategy = if has_class { "default" } else { "full" };
    let config = json!({"model_type": "llava", "vision_feature_layer": features,
        "vision_feature_select_strategy": strategy, "vision_config": clip(metadata, model_type)?});
    let settings = json!({"size": {"shortest_edge": image}, "crop_size": {"height": image, "width": image},
        "resample": 3});
    Ok((config, preprocessor(metadata, settings)?))
}

/// Settings of Qwen's towers and their preprocessing.
fn qwen(metadata: &Metadata, limits: [u64; 2]) -> Result<(Map<String, Json>, Json), Error> {
    let mut vision = tower(metadata, ["depth", "num_heads"])?;
    let merge = optional(metadata, "spatial_merge_size", 2)?;
    vision.insert("spatial_merge_size".to_owned(), merge.into());
    vision.insert("temporal_patch_size".to_owned(), 2.into());
    let settings = json!({"patch_size": count(metadata, "patch_size")?, "temporal_patch_size": 2, "merge_size": merge,
        "resample": 3, "min_pixels": optional(metadata, "image_min_pixels", limits[0])?,
        "max_pixels": optional(metadata, "image_max_pixels", limits[1])?});
    Ok((vision, preprocessor(metadata, settings)?))
}

fn qwen2_5(metadata: &Metadata, _: &[TensorInfo]) -> Result<Settings, Error> {
    let (mut vision, preprocessor) = qwen(metadata, [56 * 56, 12_845_056])?;
    let (pattern, layers) = (count(metadata, "n_wa_pattern")?.max(1), count(metadata, "block_count")?);
    let whole: Vec<u64> = (0..layers.min(1 << 16)).filter(|layer| (layer + 1) % pattern == 0).collect();
    vision.insert("fullatt_block_indexes".to_owned(), json!(whole));
    vision.insert("window_size".to_owned(), optional(metadata, "window_size", 112)?.into());
    vision.insert("hidden_act".to_owned(), "silu".into());
    Ok((json!({"model_type": "qwen2_5_vl", "vision_config": vision}), preprocessor))
}

fn qwen3(metadata: &Metadata, tensors: &[TensorInfo]) -> Result<Settings, Error> {
    let (mut vision, preprocessor) = qwen(metadata, [65_536, 16_777_216])?;
    let table = tensors.iter().find(|info| info.name() == "v.position_embd.weight");
    if let Some(&[_, rows]) = table.map(TensorInfo::dims) {
        vision.insert("num_position_embeddings".to_owned(), rows.into());
    }
    let key = "clip.vision.is_deepstack_layers";
    let flags: Cow<'_, [bool]> = metadata.get(key)?.unwrap_or_default();
    let layers: Vec<usize> =
        flags.iter().enumerate().filter(|(_, flag)| **flag).map(|(layer, _)| layer).collect();
    vision.insert("deepstack_visual_indexes".to_owned(), json!(layers));
    Ok((json!({"model_type": "qwen3_vl", "vision_config": vision}), preprocessor))
}

#[cfg(test)]
mod tests;
