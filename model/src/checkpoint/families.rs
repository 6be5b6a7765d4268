//! Model families: the settings and names of Hugging Face checkpoints as those of a GGUF. One table each.
//!
//! A tensor that no rule names keeps its name. The architecture's translator then refuses it, unless nothing of the
//! text model uses it ([`Form::Unused`]).

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde_json::Value as Json;

use super::CheckpointError;
use super::config::{Config, Keys, RopeFactors};
use super::weights::{StoredTensor, StoredTensors};
use super::{bert, vision};
use crate::conversion::{Conversion, FloatMap, FloatType, Scaled, Turned};
use crate::header::TensorInfo;
use crate::mmap::MappedFile;
use crate::{Error, GgmlType};

mod decoders;
mod deepseek;
mod falcon_h1;
mod gemma;
mod gpt_oss;
mod granite;
mod lfm2;
mod mixtures;
mod modern_bert;
mod nemotron_h;
mod qwen_hybrid;

/// Tensors by the GGUF's names, which may have `{l}` for the layer.
pub(super) type NamedTensors = Vec<(&'static str, StoredTensor)>;

pub(super) struct Family {
    /// Values of `model_type`.
    types: &'static [&'static str],
    /// The GGUF's `general.architecture`.
    pub(super) arch: &'static str,
    /// Sets the keys, and returns tensors that no file has.
    pub(super) keys: fn(&mut Keys<'_>, &StoredTensors) -> Result<NamedTensors, Error>,
    /// Names of tensors. The first rule that matches counts.
    rules: &'static [&'static [Rule]],
}

/// All families, by architecture.
const FAMILIES: &[&Family] = &[
    &decoders::COHERE2,
    &decoders::GLM4,
    &decoders::LLAMA,
    &decoders::MISTRAL,
    &decoders::OLMO2,
    &decoders::PHI3,
    &decoders::QWEN2,
    &decoders::QWEN2_MOE,
    &decoders::QWEN2_VL,
    &decoders::QWEN3,
    &decoders::QWEN3_MOE,
    &decoders::QWEN3_VL,
    &decoders::SEED_OSS,
    &decoders::SMOLLM3,
    &deepseek::DEEPSEEK,
    &falcon_h1::FALCON_H1,
    &gemma::GEMMA2,
    &gemma::GEMMA3,
    &gemma::GEMMA4,
    &gpt_oss::GPT_OSS,
    &granite::GRANITE_HYBRID,
    &lfm2::LFM2,
    &lfm2::LFM2_MOE,
    &mixtures::ERNIE4_5_MOE,
    &mixtures::GLM4_MOE,
    &mixtures::MINIMAX_M2,
    &modern_bert::MODERN_BERT,
    &nemotron_h::NEMOTRON_H,
    &qwen_hybrid::QWEN3_NEXT,
    &qwen_hybrid::QWEN3_5,
    &qwen_hybrid::QWEN3_5_MOE,
];

/// A name in the checkpoint and in the GGUF. `{l}` is a layer's number, `{e}` an expert's; a final `*` is one word,
/// such as `weight`.
pub(super) struct Rule {
    pub(super) from: &'static str,
    pub(super) to: &'static str,
    pub(super) form: Form,
}

pub(super) enum Form {
    /// As it is; vectors become F32.
    Same,
    /// F32 without dimensions of 1.
    Floats,
    /// F32 with the dimensions in this order; 0 is what remains.
    Shaped(&'static [u64]),
    /// `1 + x`.
    PlusOne,
    /// `-exp(x)`.
    NegativeExp,
    /// One of the experts, which the GGUF has as one tensor.
    Expert,
    /// Not part of the text model.
    Unused,
    Custom(fn(&Config<'_>, StoredTensor) -> Result<NamedTensors, Error>),
}

pub(super) const fn rule(from: &'static str, to: &'static str) -> Rule {
    Rule { from, to, form: Form::Same }
}

pub(super) const fn formed(from: &'static str, to: &'static str, form: Form) -> Rule {
    Rule { from, to, form }
}

/// Rules of most decoders.
const MODEL: &[Rule] =
    &[rule("embed_tokens.*", "token_embd.*"), rule("norm.*", "output_norm.*"), rule("lm_head.*", "output.*")];
const ATTENTION: &[Rule] = &[
    rule("layers.{l}.self_attn.q_proj.*", "blk.{l}.attn_q.*"),
    rule("layers.{l}.self_attn.k_proj.*", "blk.{l}.attn_k.*"),
    rule("layers.{l}.self_attn.v_proj.*", "blk.{l}.attn_v.*"),
    rule("layers.{l}.self_attn.o_proj.*", "blk.{l}.attn_output.*"),
    rule("layers.{l}.self_attn.q_norm.*", "blk.{l}.attn_q_norm.*"),
    rule("layers.{l}.self_attn.k_norm.*", "blk.{l}.attn_k_norm.*"),
    formed("layers.{l}.self_attn.rotary_emb.inv_freq", "", Form::Unused),
];
const MLP: &[Rule] = &[
    rule("layers.{l}.mlp.gate_proj.*", "blk.{l}.ffn_gate.*"),
    rule("layers.{l}.mlp.up_proj.*", "blk.{l}.ffn_up.*"),
    rule("layers.{l}.mlp.down_proj.*", "blk.{l}.ffn_down.*"),
];
const PRE_NORMS: &[Rule] = &[
    rule("layers.{l}.input_layernorm.*", "blk.{l}.attn_norm.*"),
    rule("layers.{l}.post_attention_layernorm.*", "blk.{l}.ffn_norm.*"),
];
const EXPERTS: &[Rule] = &[
    rule("layers.{l}.mlp.gate.*", "blk.{l}.ffn_gate_inp.*"),
    formed("layers.{l}.mlp.experts.{e}.gate_proj.*", "blk.{l}.ffn_gate_exps.*", Form::Expert),
    formed("layers.{l}.mlp.experts.{e}.up_proj.*", "blk.{l}.ffn_up_exps.*", Form::Expert),
    formed("layers.{l}.mlp.experts.{e}.down_proj.*", "blk.{l}.ffn_down_exps.*", Form::Expert),
    rule("layers.{l}.mlp.shared_expert.gate_proj.*", "blk.{l}.ffn_gate_shexp.*"),
    rule("layers.{l}.mlp.shared_expert.up_proj.*", "blk.{l}.ffn_up_shexp.*"),
    rule("layers.{l}.mlp.shared_expert.down_proj.*", "blk.{l}.ffn_down_shexp.*"),
    rule("layers.{l}.mlp.shared_expert_gate.*", "blk.{l}.ffn_gate_inp_shexp.*"),
];

/// Prefixes of names, the longest first. A model with images has its text model inside; the last is Nemotron-H's.
const PREFIXES: [&str; 6] = [
    "model.language_model.",
    "language_model.model.",
    "model.text_model.",
    "language_model.",
    "model.",
    "backbone.",
];
/// Beginnings of names of the parts for images and sound.
const OTHER_INPUTS: [&str; 9] = [
    "visual.",
    "vision_tower.",
    "vision_model.",
    "multi_modal_projector.",
    "connector.",
    "image_newline",
    "embed_vision.",
    "audio_tower.",
    "embed_audio.",
];

/// Architectures of which no head that predicts further tokens is used.
const UNUSED_HEADS: [&str; 2] = ["ernie4_5-moe", "nemotron_h"];

impl Family {
    /// The family of a checkpoint.
    pub(super) fn of(config: &Config<'_>) -> Result<&'static Self, Error> {
        let found: Vec<&str> = config.model_types().collect();
        let families = || FAMILIES.iter().copied();
        let family = found.iter().find_map(|found| families().find(|family| family.types.contains(found)));
        family.ok_or_else(|| {
            let mut needs: Vec<&str> = families().flat_map(|family| family.types).copied().collect();
            needs.extend(bert::TYPES);
            needs.sort_unstable();
            let found = found.first().map_or("absent".to_owned(), |found| format!("{found:?}"));
            config.refuse("model_type", found, needs.join(", "))
        })
    }

    /// The tensors of `files` under the GGUF's names and in its form, by name. `pools`: the model has no logits.
    pub(super) fn tensors(
        &self,
        config: &Config<'_>,
        files: &[MappedFile],
        stored: StoredTensors,
        pools: bool,
    ) -> Result<Vec<TensorInfo>, Error> {
        let mut renamed = Renamed::default();
        // The output matrix is the embedding, perhaps with a bias of its own.
        let tied = config.ties_embeddings() && is_head_tied(&stored, files)?;
        let layers = config.layers()?;
        let sees_images = vision::sees_images(config);
        let mut left_out = 0_usize;
        for (name, tensor) in stored {
            let plain = PREFIXES.iter().find_map(|prefix| name.strip_prefix(prefix)).unwrap_or(&name);
            // Heads that predict further tokens, and that nothing uses.
            let is_head = plain.starts_with("mtp_") || plain.starts_with("mtp.");
            if is_head && UNUSED_HEADS.contains(&self.arch) {
                continue;
            }
            let plain = &*of_mtp_head(plain, layers);
            if pools && plain.starts_with("lm_head.") || tied && plain == "lm_head.weight" {
                continue;
            }
            if sees_images && let Some(parts) = vision::tensors(config, plain, &tensor)? {
                for (to, tensor) in parts {
                    renamed.insert(to, name.clone(), tensor)?;
                }
                continue;
            }
            if OTHER_INPUTS.iter().any(|part| plain.starts_with(part)) {
                left_out += 1;
                continue;
            }
            let matching = self
                .rules
                .iter()
                .copied()
                .flatten()
                .find_map(|rule| Some((rule, matched(rule.from, plain)?)));
            let Some((rule, words)) = matching else {
                renamed.insert(name.clone(), name, tensor)?;
                continue;
            };
            let to = |pattern: &str| filled(pattern, &words);
            match rule.form {
                Form::Unused => {}
                Form::Same => renamed.insert(to(rule.to), name, tensor.vector_as_floats()?)?,
                Form::Floats => {
                    renamed.insert(to(rule.to), name, tensor.floats(FloatMap::Same)?.squeezed())?
                }
                Form::Shaped(shape) => {
                    renamed.insert(to(rule.to), name, tensor.floats(FloatMap::Same)?.shaped(shape))?;
                }
                Form::PlusOne => renamed.insert(to(rule.to), name, tensor.floats(FloatMap::PlusOne)?)?,
                Form::NegativeExp => {
                    renamed.insert(to(rule.to), name, tensor.floats(FloatMap::NegativeExp)?)?
                }
                Form::Expert => renamed.insert_expert(to(rule.to), words.expert, name, tensor)?,
                Form::Custom(convert) => {
                    for (pattern, tensor) in convert(config, tensor)? {
                        renamed.insert(to(pattern), name.clone(), tensor)?;
                    }
                }
            }
        }
        if left_out > 0 {
            tracing::info!(tensors = left_out, "the parts of the model for images and sound are not used");
        }
        renamed.finish()
    }
}

/// Whether the output matrix is as the embedding or not stored. One that differs is used whatever the settings say.
fn is_head_tied(stored: &StoredTensors, files: &[MappedFile]) -> Result<bool, Error> {
    let ends = |end: &'static str| move |(name, _): &(&String, &StoredTensor)| name.ends_with(end);
    let embedding = |end| stored.iter().find(ends(end));
    let head = stored.iter().find(ends("lm_head.weight"));
    let others = ["backbone.embeddings.weight", "model.embeddings.weight"];
    let embedding = embedding("embed_tokens.weight").or_else(|| others.into_iter().find_map(embedding));
    let Some(((_, head), (_, embedding))) = head.zip(embedding) else { return Ok(true) };
    Ok((head.ty, &head.shape) == (embedding.ty, &embedding.shape)
        && head.bytes.bytes(files)? == embedding.bytes.bytes(files)?)
}

/// The GGUF's name of the weight of a module, if it has the same rows there but perhaps in another order.
pub(super) fn weight_of_module(arch: &str, module: &str) -> Option<String> {
    let plain = PREFIXES.iter().find_map(|prefix| module.strip_prefix(prefix)).unwrap_or(module);
    let name = format!("{plain}.weight");
    let rules = || FAMILIES.iter().filter(|family| family.arch == arch).flat_map(|family| family.rules);
    let (rule, words) =
        rules().copied().flatten().find_map(|rule| Some((rule, matched(rule.from, &name)?)))?;
    matches!(rule.form, Form::Same).then(|| filled(rule.to, &words))
}

/// The layer of an MTP head is behind the model's: `mtp.layers.0.X` is `layers.L.X`, and `mtp.X` is `layers.L.mtp.X`.
fn of_mtp_head(name: &str, layers: u64) -> Cow<'_, str> {
    let Some(rest) = name.strip_prefix("mtp.") else { return Cow::Borrowed(name) };
    let of_layer = rest.strip_prefix("layers.").and_then(|rest| rest.split_once('.'));
    let moved = of_layer.and_then(|(number, rest)| {
        let number = layers.checked_add(number.parse().ok()?)?;
        Some(format!("layers.{number}.{rest}"))
    });
    Cow::Owned(moved.unwrap_or_else(|| format!("layers.{layers}.mtp.{rest}")))
}

/// What the placeholders of a rule stand for.
#[derive(Default)]
pub(super) struct Words<'a> {
    pub(super) layer: Option<&'a str>,
    expert: Option<usize>,
    part: Option<&'a str>,
}

/// Matches word by word.
pub(super) fn matched<'a>(pattern: &str, name: &'a str) -> Option<Words<'a>> {
    let (mut words, mut found) = (Words::default(), name.split('.'));
    for expected in pattern.split('.') {
        let word = found.next()?;
        match expected {
            "{l}" => words.layer = Some(word.parse::<u32>().ok().map(|_| word)?),
            "{e}" => words.expert = Some(word.parse().ok()?),
            "*" => words.part = Some(word),
            _ if word == expected => {}
            _ => return None,
        }
    }
    found.next().is_none().then_some(words)
}

pub(super) fn filled(pattern: &str, words: &Words<'_>) -> String {
    let name = pattern.replace("{l}", words.layer.unwrap_or_default());
    match name.strip_suffix('*') {
        Some(stem) => format!("{stem}{}", words.part.unwrap_or_default()),
        None => name,
    }
}

/// Tensors under the GGUF's names.
#[derive(Default)]
struct Renamed {
    /// With the checkpoint's name.
    tensors: BTreeMap<String, (String, StoredTensor)>,
    experts: BTreeMap<String, BTreeMap<usize, (String, StoredTensor)>>,
}

impl Renamed {
    fn insert(&mut self, to: String, from: String, tensor: StoredTensor) -> Result<(), Error> {
        let second = from.clone();
        match self.tensors.insert(to, (from, tensor)) {
            None => Ok(()),
            Some((first, _)) => Err(CheckpointError::SameTensor { first, second }.into()),
        }
    }

    fn insert_expert(
        &mut self,
        to: String,
        expert: Option<usize>,
        from: String,
        tensor: StoredTensor,
    ) -> Result<(), Error> {
        if from.ends_with(".order") {
            return Err(CheckpointError::ExpertOrder { tensor: from }.into());
        }
        let second = from.clone();
        match self.experts.entry(to).or_default().insert(expert.unwrap_or_default(), (from, tensor)) {
            None => Ok(()),
            Some((first, _)) => Err(CheckpointError::SameTensor { first, second }.into()),
        }
    }

    fn finish(mut self) -> Result<Vec<TensorInfo>, Error> {
        for (name, experts) in std::mem::take(&mut self.experts) {
            let stacked = stack(experts)?;
            self.insert(name.clone(), name, stacked)?;
        }
        self.tensors.into_iter().map(|(name, (from, tensor))| tensor.info(name, from)).collect()
    }
}

/// The experts' tensors as one, with the number of experts as the first dimension.
fn stack(experts: BTreeMap<usize, (String, StoredTensor)>) -> Result<StoredTensor, Error> {
    let count = experts.len();
    let mut all: Option<StoredTensor> = None;
    let mut parts = Vec::with_capacity(count);
    for (place, (number, (name, tensor))) in experts.into_iter().enumerate() {
        let StoredTensor { ty, shape, bytes } = tensor;
        let first = all.get_or_insert_with(|| StoredTensor {
            ty,
            shape: shape.clone(),
            bytes: Conversion::Concat(vec![]),
        });
        if (number, ty, &shape) != (place, first.ty, &first.shape) {
            return Err(CheckpointError::Experts { tensor: name, place }.into());
        }
        parts.push(bytes);
    }
    let StoredTensor { ty, shape, .. } = all.ok_or(Error::MissingTensor { tensor: "experts".to_owned() })?;
    // A scale of each matrix becomes a list.
    let shape = if shape == [1] { vec![count as u64] } else { [vec![count as u64], shape].concat() };
    Ok(StoredTensor { ty, shape, bytes: Conversion::Concat(parts) })
}

impl StoredTensor {
    /// F32 values that no file has.
    pub(super) fn literal(values: &[f32]) -> Self {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Self { ty: GgmlType::F32, shape: vec![values.len() as u64], bytes: Conversion::Literal(bytes) }
    }

    /// Kernels read vectors as F32.
    pub(super) fn vector_as_floats(self) -> Result<Self, Error> {
        if self.shape.len() < 2 { self.floats(FloatMap::Same) } else { Ok(self) }
    }

    pub(super) fn floats(self, map: FloatMap) -> Result<Self, Error> {
        let from = match self.ty {
            GgmlType::F32 if map == FloatMap::Same => return Ok(self),
            GgmlType::F32 => FloatType::F32,
            GgmlType::F16 => FloatType::F16,
            GgmlType::BF16 => FloatType::BF16,
            found => {
                let (tensor, expected) = ("of a norm or a vector".to_owned(), GgmlType::F32);
                return Err(Error::TensorType { tensor, found, expected });
            }
        };
        let bytes = Conversion::Floats { of: Box::new(self.bytes), from, map };
        Ok(Self { ty: GgmlType::F32, shape: self.shape, bytes })
    }

    /// `[rows, cols]` to `[cols, rows]`.
    pub(super) fn transposed(&self) -> Result<Self, Error> {
        let size = match self.ty {
            GgmlType::F32 => 4,
            GgmlType::F16 | GgmlType::BF16 => 2,
            found => {
                let (tensor, expected) = ("of a transposed projection".to_owned(), GgmlType::BF16);
                return Err(Error::TensorType { tensor, found, expected });
            }
        };
        let &[rows, cols] = self.shape.as_slice() else { return Ok(self.clone()) };
        let bytes = Conversion::Transposed { of: Box::new(self.bytes.clone()), rows, cols, size };
        Ok(Self { ty: self.ty, shape: vec![cols, rows], bytes })
    }

    fn squeezed(mut self) -> Self {
        self.shape.retain(|&dim| dim != 1);
        self
    }

    fn shaped(mut self, shape: &[u64]) -> Self {
        let all = elements(&self.shape);
        let given: u64 = shape.iter().filter(|&&dim| dim != 0).fold(1, |all, &dim| all.saturating_mul(dim));
        self.shape = shape.iter().map(|&dim| if dim == 0 { all / given.max(1) } else { dim }).collect();
        self
    }

    /// Rows (of the second last dimension) of each matrix, in the order of `runs`.
    pub(super) fn rows(&self, runs: &[(u64, u64)]) -> Self {
        let (mut shape, depth) = (self.shape.clone(), self.shape.len().saturating_sub(2));
        let matrices = elements(&shape[..depth]);
        let rows = shape.get(depth).copied().unwrap_or(1);
        let picked = runs.iter().map(|(start, end)| end - start).sum();
        if let Some(rows) = shape.get_mut(depth) {
            *rows = picked;
        }
        let row_bytes = self.bytes.len() / matrices.saturating_mul(rows).max(1);
        let of_matrix =
            |matrix: u64| runs.iter().map(move |(start, end)| (matrix * rows + start, matrix * rows + end));
        let runs = (0..matrices).flat_map(of_matrix).collect();
        let bytes = Conversion::Rows { of: Box::new(self.bytes.clone()), row_bytes, runs };
        Self { ty: self.ty, shape, bytes }
    }

    /// `heads` runs of `len` rows of a matrix `[heads * stride, cols]`, each transposed: `[heads, cols, len]`.
    /// Quantised values whose groups would be torn become F32.
    fn turned(&self, heads: u64, stride: u64, len: u64) -> Result<Self, Error> {
        let runs: Vec<(u64, u64)> = (0..heads).map(|head| (head * stride, head * stride + len)).collect();
        let cols = self.shape.last().copied().unwrap_or(1);
        let turned = |of: Self, size| Conversion::Transposed {
            of: Box::new(of.rows(&runs).bytes),
            rows: len,
            cols,
            size,
        };
        let shape = vec![heads, cols, len];
        let turned_fp4 = |codes: &Conversion, scales: &Conversion, group| {
            let (codes, scales) = (Box::new(codes.clone()), Box::new(scales.clone()));
            let bytes = Conversion::Fp4Values { codes, scales, group };
            (GgmlType::BF16, turned(Self { ty: GgmlType::BF16, bytes, ..self.clone() }, 2))
        };
        let (ty, bytes) = match (&self.bytes, self.ty) {
            (Conversion::Scaled(scaled), GgmlType::FP8) if is_whole(&runs, scaled.block[0]) => {
                let codes = Self { bytes: scaled.codes.clone(), ..self.clone() };
                let scaled = Scaled {
                    codes: turned(codes, 1),
                    rows: heads * cols,
                    cols: len,
                    turned: Some(Turned { stride, cols }),
                    ..(**scaled).clone()
                };
                (self.ty, Conversion::Scaled(Box::new(scaled)))
            }
            (Conversion::Scaled(scaled), _) => {
                let bytes = Conversion::Dequantised(scaled.clone());
                let floats = Self { ty: GgmlType::F32, bytes, ..self.clone() };
                (GgmlType::F32, turned(floats, 4))
            }
            (Conversion::Nvfp4 { codes, scales }, _) => turned_fp4(codes, scales, 16),
            (Conversion::Mxfp4 { codes, scales }, _) => turned_fp4(codes, scales, 32),
            (_, GgmlType::F32) => (self.ty, turned(self.clone(), 4)),
            (_, GgmlType::F16 | GgmlType::BF16) => (self.ty, turned(self.clone(), 2)),
            (_, found) => {
                let (tensor, expected) = ("of a transposed projection".to_owned(), GgmlType::BF16);
                return Err(Error::TensorType { tensor, found, expected });
            }
        };
        Ok(Self { ty, shape, bytes })
    }

    pub(super) fn info(self, name: String, from: String) -> Result<TensorInfo, Error> {
        let Self { ty, shape, bytes } = self;
        if shape.len() > 4 || shape.contains(&0) {
            let shape = shape.into_iter().map(|dim| dim as usize).collect();
            return Err(CheckpointError::Shape { tensor: from, shape }.into());
        }
        let dims = if shape.is_empty() { vec![1] } else { shape.into_iter().rev().collect() };
        Ok(TensorInfo { name, ty, dims, bytes: bytes.len(), source: bytes })
    }
}

/// Whether 32 consecutive rows of each run, from its beginning on, have the same scales.
fn is_whole(runs: &[(u64, u64)], row_block: u64) -> bool {
    runs.iter().all(|&(start, end)| {
        (end - start).is_multiple_of(32)
            && (start..end).step_by(32).all(|row| row / row_block == (row + 31) / row_block)
    })
}

/// Number of elements. Saturates, since a shape with a 0 is only refused later.
fn elements(shape: &[u64]) -> u64 {
    shape.iter().fold(1, |all, &dim| all.saturating_mul(dim))
}

/// No tensors but those of the files.
fn none() -> Result<NamedTensors, Error> {
    Ok(Vec::new())
}

/// Sets the rotary embedding's keys; returns the tensors of its frequencies, if it has some.
fn rope(keys: &mut Keys<'_>) -> Result<NamedTensors, Error> {
    keys.rope().map(factors)
}

/// Factors of frequencies as tensors.
fn factors(found: RopeFactors) -> NamedTensors {
    found.into_iter().map(|(name, factors)| (name, StoredTensor::literal(&factors))).collect()
}

/// Pairs of a head rotate by one of three axes, which are equal in text. `alternate`: they do so in turns, also without
/// the setting.
fn sections(keys: &mut Keys<'_>, alternate: bool) -> Result<(), Error> {
    let refuse = || keys.config.refuse("rope_parameters.mrope_section", "something else", "three counts");
    let rope = keys.rope_config("full_attention")?;
    let counts = match rope.setting("mrope_section") {
        None if alternate => {
            let pairs = keys.rotating(&rope)? / 2;
            vec![pairs.div_ceil(3), (pairs + 1) / 3, pairs / 3, 0]
        }
        None => return Err(refuse()),
        Some(list) => {
            let counts = list.as_array().and_then(|list| list.iter().map(Json::as_u64).collect());
            let mut counts: Vec<u64> = counts.ok_or_else(refuse)?;
            if counts.len() != 3 {
                return Err(refuse());
            }
            counts.push(0);
            counts
        }
    };
    keys.set("rope.dimension_sections", counts);
    Ok(())
}

/// Keys of a mixture of experts. `renormalise`: what the architecture does without the setting; `more`: blocks behind
/// the layers, which have experts.
fn experts(keys: &mut Keys<'_>, renormalise: bool, more: u64) -> Result<(), Error> {
    let config = keys.config;
    let count = match config.count("num_experts")? {
        Some(count) => count,
        None => config.need_count("num_local_experts")?,
    };
    keys.set("expert_count", count);
    keys.set("expert_used_count", config.need_count("num_experts_per_tok")?);
    keys.counts(&[
        ("moe_intermediate_size", "expert_feed_forward_length"),
        ("shared_expert_intermediate_size", "expert_shared_feed_forward_length"),
    ])?;
    keys.set("expert_weights_norm", config.flag("norm_topk_prob")?.unwrap_or(renormalise));
    let (layers, key) = (config.layers()?, "mlp_only_layers");
    let step = config.count("decoder_sparse_step")?.unwrap_or(1).max(1);
    let dense: Vec<u64> = match config.get(key) {
        None => Vec::new(),
        Some(found) => found
            .as_array()
            .and_then(|list| list.iter().map(serde_json::Value::as_u64).collect())
            .ok_or_else(|| config.refuse(key, "something else", "a list of layers"))?,
    };
    set_expert_layers(keys, layers, more, |layer| {
        !dense.contains(&layer) && (layer + 1).is_multiple_of(step)
    });
    Ok(())
}

/// Says which layers have experts, if not all have. `more`: blocks behind the layers, which have some.
fn set_expert_layers(keys: &mut Keys<'_>, layers: u64, more: u64, has: impl Fn(u64) -> bool) {
    let all = layers.saturating_add(more).min(1 << 16);
    let flags: Vec<bool> = (0..all).map(|layer| layer >= layers || has(layer)).collect();
    if flags.contains(&false) {
        keys.set("expert_layers", flags);
    }
}

#[cfg(test)]
mod tests;
