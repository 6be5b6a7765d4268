//! `config.json` of a checkpoint, and the GGUF keys that it becomes.

use serde_json::{Map, Value as Json};

use super::{CONFIG, CheckpointError, Folder, defaults};
use crate::Error;
use metadata::{Metadata, Value};

/// Largest width of a head. Lists of frequencies are as long.
pub(super) const MAX_HEAD_DIM: u64 = 1 << 14;

/// The settings of a model's text part. Those of a `text_config` come before the outer ones, and both before those
/// that the model's type gives an absent setting.
pub(super) struct Config<'a> {
    folder: &'a Folder<'a>,
    text: Map<String, Json>,
    outer: Map<String, Json>,
    absent: Map<String, Json>,
}

impl<'a> Config<'a> {
    pub(super) fn read(folder: &'a Folder<'a>) -> Result<Self, Error> {
        let text = without_infinity(&folder.text(CONFIG)?);
        let mut outer: Map<String, Json> = folder.parse(CONFIG, &text)?;
        let text = match outer.remove("text_config") {
            Some(Json::Object(text)) => text,
            _ => Map::new(),
        };
        let mut config = Self { folder, text, outer, absent: Map::new() };
        let absent = config.model_types().find_map(defaults::of);
        config.absent = absent.unwrap_or_default();
        Ok(config)
    }

    /// The setting or what stands for an absent one, unless that is null.
    pub(super) fn get(&self, key: &str) -> Option<&Json> {
        let maps = [&self.text, &self.outer, &self.absent];
        maps.into_iter().find_map(|map| map.get(key)).filter(|value| !value.is_null())
    }

    /// Like [`get`](Self::get), if the checkpoint has the setting.
    pub(super) fn given(&self, key: &str) -> Option<&Json> {
        let maps = [&self.text, &self.outer];
        maps.into_iter().find_map(|map| map.get(key)).filter(|value| !value.is_null())
    }

    /// A setting that a `text_config` may contain, but that counts outside of it if it is there.
    fn outer_first(&self, key: &str) -> Option<&Json> {
        self.outer.get(key).or_else(|| self.text.get(key)).filter(|value| !value.is_null())
    }

    /// Names of the model's type, the inner one first.
    pub(super) fn model_types(&self) -> impl Iterator<Item = &str> {
        [&self.text, &self.outer].into_iter().filter_map(|map| map.get("model_type")?.as_str())
    }

    /// The settings beside those of a `text_config`.
    pub(super) fn outer(&self) -> &Map<String, Json> {
        &self.outer
    }

    pub(super) fn refuse(&self, key: &str, found: impl ToString, needs: impl ToString) -> Error {
        let path = self.folder.path.join(CONFIG);
        CheckpointError::Setting {
            path,
            key: key.to_owned(),
            found: found.to_string(),
            needs: needs.to_string(),
        }
        .into()
    }

    fn typed<T>(
        &self,
        key: &str,
        needs: &str,
        read: impl Fn(&'_ Json) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(found) => read(found).map(Some).ok_or_else(|| self.refuse(key, short(found), needs)),
        }
    }

    pub(super) fn count(&self, key: &str) -> Result<Option<u64>, Error> {
        self.typed(key, "a whole number of at least 0", Json::as_u64)
    }

    pub(super) fn need_count(&self, key: &str) -> Result<u64, Error> {
        self.count(key)?.ok_or_else(|| self.refuse(key, "absent", "a whole number of at least 0"))
    }

    pub(super) fn number(&self, key: &str) -> Result<Option<f64>, Error> {
        self.typed(key, "a number", Json::as_f64)
    }

    pub(super) fn need_number(&self, key: &str) -> Result<f64, Error> {
        self.number(key)?.ok_or_else(|| self.refuse(key, "absent", "a number"))
    }

    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>, Error> {
        self.typed(key, "true or false", Json::as_bool)
    }

    /// Whether the output matrix is the embedding. LFM2's key has another name.
    pub(super) fn ties_embeddings(&self) -> bool {
        let key = |key| self.outer_first(key).and_then(Json::as_bool);
        let tied = key("tie_word_embeddings").or_else(|| key("tie_embedding"));
        tied.or_else(|| self.absent.get("tie_word_embeddings")?.as_bool()).unwrap_or(false)
    }

    /// Number of layers. Nemotron-H's newer files have only a list.
    pub(super) fn layers(&self) -> Result<u64, Error> {
        match self.get("layers_block_type").and_then(Json::as_array) {
            Some(list) => Ok(list.len() as u64),
            None => self.need_count("num_hidden_layers"),
        }
    }

    pub(super) fn object(&self, key: &str) -> Result<Option<&Map<String, Json>>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(Json::Object(map)) => Ok(Some(map)),
            Some(found) => Err(self.refuse(key, short(found), "an object")),
        }
    }

    /// Refuses other texts than those in `needs`; an absent setting is as good as the first of them.
    pub(super) fn one_of(&self, keys: &[&str], needs: &[&str]) -> Result<(), Error> {
        for key in keys {
            if let Some(found) = self.get(key) {
                let good = found.as_str().is_some_and(|found| needs.contains(&found));
                if !good {
                    return Err(self.refuse(key, short(found), needs.join(" or ")));
                }
            }
        }
        Ok(())
    }

    /// Refuses true.
    pub(super) fn never(&self, key: &str) -> Result<(), Error> {
        match self.flag(key)? {
            Some(true) => Err(self.refuse(key, true, false)),
            _ => Ok(()),
        }
    }

    /// `layer_types`: for each layer the place of its name in `names`. `None` if there is no such list.
    pub(super) fn layer_types(&self, layers: u64, names: &[&str]) -> Result<Option<Vec<usize>>, Error> {
        self.layer_names("layer_types", layers, names)
    }

    /// A list of layers' names: for each the place in `names`. `None` if there is no such list.
    pub(super) fn layer_names(
        &self,
        key: &str,
        layers: u64,
        names: &[&str],
    ) -> Result<Option<Vec<usize>>, Error> {
        let Some(found) = self.get(key) else { return Ok(None) };
        let place = |name: &Json| {
            let name = newer_name(name.as_str()?);
            names.iter().position(|known| *known == name)
        };
        let list = found.as_array().filter(|list| list.len() as u64 == layers);
        let places = list.and_then(|list| list.iter().map(place).collect::<Option<Vec<usize>>>());
        places.map(Some).ok_or_else(|| {
            self.refuse(key, short(found), format!("a list of {layers} names of {}", names.join(" and ")))
        })
    }
}

/// Today's name of a kind of layer.
fn newer_name(name: &str) -> &str {
    match name {
        "mamba" => "linear_attention",
        "attention" => "full_attention",
        name => name,
    }
}

/// The text with `null` for the words `Infinity` and `NaN`, which Python writes and JSON does not know.
fn without_infinity(text: &str) -> String {
    let (mut result, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(at) = rest.find(['"', 'I', 'N', '-']) {
        let (before, from) = rest.split_at(at);
        result.push_str(before);
        if let Some(string) = from.strip_prefix('"') {
            let escaped = |(at, _): &(usize, char)| {
                string[..*at].bytes().rev().take_while(|byte| *byte == b'\\').count() % 2 == 1
            };
            let end = string.char_indices().filter(|(_, c)| *c == '"').find(|found| !escaped(found));
            let length = end.map_or(from.len(), |(at, _)| at + 2);
            result.push_str(&from[..length]);
            rest = &from[length..];
            continue;
        }
        let word = ["-Infinity", "Infinity", "NaN"].into_iter().find(|word| from.starts_with(word));
        let length = word.map_or(1, str::len);
        result.push_str(if word.is_some() { "null" } else { &from[..length] });
        rest = &from[length..];
    }
    result + rest
}

/// What `quantization_config` says beyond the tensors.
#[derive(Debug, Clone)]
pub(super) struct Quantisation {
    pub(super) awq: bool,
    /// GPTQ's first version stores zero points less 1.
    pub(super) zeros_less_one: bool,
    pub(super) symmetric: bool,
    /// Rows and columns of a scale in matrices with blocks.
    pub(super) block: [u64; 2],
    /// Columns of a scale in matrices with groups; several if matrices differ.
    pub(super) groups: Vec<u64>,
}

impl Quantisation {
    pub(super) const PLAIN: Self =
        Self { awq: false, zeros_less_one: false, symmetric: true, block: [128, 128], groups: Vec::new() };
}

impl Config<'_> {
    pub(super) fn quantisation(&self) -> Result<Quantisation, Error> {
        let plain = Quantisation::PLAIN;
        let key = "quantization_config";
        let Some(Json::Object(map)) = self.outer_first(key) else { return Ok(plain) };
        let text = |key: &str| map.get(key).and_then(Json::as_str);
        let refuse = |at: &str, needs: &str| {
            let found = map.get(at).map_or("absent".to_owned(), short);
            self.refuse(&format!("{key}.{at}"), found, needs)
        };
        let methods = ["fp8", "compressed-tensors", "modelopt", "awq", "gptq", "mxfp4"];
        let method = text("quant_method").filter(|method| methods.contains(method));
        let method = method.ok_or_else(|| refuse("quant_method", &methods.join(", ")))?;
        if method == "awq" && text("version").is_some_and(|version| !version.eq_ignore_ascii_case("gemm")) {
            return Err(refuse("version", "gemm"));
        }
        let bits = map.get("bits").filter(|bits| !bits.is_null()).map_or(Some(4), Json::as_u64);
        if !matches!((method, bits), ("awq", Some(4)) | ("gptq", Some(4 | 8)))
            && ["awq", "gptq"].contains(&method)
        {
            return Err(refuse("bits", "4, or 8 with gptq"));
        }
        // Rotations of what matrices read.
        let transforms = map.get("transform_config").and_then(|found| found.get("config_groups"));
        if transforms.is_some_and(|found| found.as_object().is_none_or(|found| !found.is_empty())) {
            return Err(refuse("transform_config", "none"));
        }
        let groups = map.get("config_groups").and_then(Json::as_object);
        let weights =
            || groups.into_iter().flat_map(|groups| groups.values()).filter_map(|group| group.get("weights"));
        let structure =
            weights().filter_map(|weights| weights.get("block_structure")).find(|found| !found.is_null());
        let structure = map.get("weight_block_size").filter(|found| !found.is_null()).or(structure);
        let count = |found: &Json| found.as_u64().filter(|&count| count > 0);
        let block = match structure {
            None => plain.block,
            Some(found) => {
                // A list, or `128x128`.
                let list = match found.as_str() {
                    Some(text) => text.split('x').map(|count| count.parse().ok()).collect(),
                    None => {
                        found.as_array().and_then(|list| list.iter().map(count).collect::<Option<Vec<u64>>>())
                    }
                };
                let block = list.and_then(|list| <[u64; 2]>::try_from(list).ok());
                block
                    .filter(|block| !block.contains(&0))
                    .ok_or_else(|| refuse("weight_block_size", "two counts of at least 1"))?
            }
        };
        let sizes = weights().filter_map(|weights| weights.get("group_size")).chain(map.get("group_size"));
        Ok(Quantisation {
            awq: method == "awq",
            zeros_less_one: method == "gptq" && text("checkpoint_format") != Some("gptq_v2"),
            symmetric: match method {
                "awq" => map.get("zero_point").and_then(Json::as_bool) == Some(false),
                _ => map.get("sym").and_then(Json::as_bool).unwrap_or(false),
            },
            block,
            groups: sizes.filter_map(count).collect(),
        })
    }
}

/// Functions between the matrices of feed-forwards, by the names that checkpoints have for them.
pub(super) const ACTIVATIONS: &str = "silu, gelu, gelu_pytorch_tanh or relu2";

/// The name under which [`Keys`] have such a function.
pub(super) fn activation(name: &str) -> Option<&'static str> {
    match name {
        "silu" | "swish" => Some("silu"),
        "gelu" => Some("gelu"),
        "gelu_pytorch_tanh" | "gelu_new" => Some("gelu_tanh"),
        "relu2" => Some("relu2"),
        _ => None,
    }
}

/// The beginning of a value, for an error.
fn short(value: &Json) -> String {
    value.to_string().chars().take(100).collect()
}

/// Keys of the GGUF that a checkpoint would convert to.
pub(super) struct Keys<'a> {
    pub(super) config: &'a Config<'a>,
    pub(super) arch: &'static str,
    pub(super) metadata: Metadata,
}

/// Frequencies of rotary embeddings.
pub(super) struct Rope<'a> {
    /// Settings of the scaling.
    map: Option<&'a Map<String, Json>>,
    pub(super) theta: f64,
    pub(super) kind: String,
    /// Part of a head that rotates.
    pub(super) partial: Option<f64>,
}

/// Names of tensors with factors of frequencies, and their elements.
pub(super) type RopeFactors = Vec<(&'static str, Vec<f32>)>;

/// Architectures of whose heads a part may rotate.
const PARTIAL: [&str; 7] = ["glm4", "glm4moe", "minimax-m2", "phi3", "qwen3next", "qwen35", "qwen35moe"];

impl<'a> Keys<'a> {
    pub(super) fn set(&mut self, key: &str, value: impl Into<Value>) {
        self.metadata.insert(format!("{}.{key}", self.arch), value);
    }

    /// Copies counts that are there.
    pub(super) fn counts(&mut self, pairs: &[(&str, &str)]) -> Result<(), Error> {
        for (from, to) in pairs {
            if let Some(count) = self.config.count(from)? {
                self.set(to, count);
            }
        }
        Ok(())
    }

    /// Copies numbers that are there.
    pub(super) fn numbers(&mut self, pairs: &[(&str, &str)]) -> Result<(), Error> {
        for (from, to) in pairs {
            if let Some(number) = self.config.number(from)? {
                self.set(to, number);
            }
        }
        Ok(())
    }

    /// Keys that all decoders have, without those of the rotary embedding. Returns the number of layers.
    pub(super) fn decoder(&mut self) -> Result<u64, Error> {
        self.decoder_with("rms_norm_eps", "attention.layer_norm_rms_epsilon")
    }

    /// Like [`decoder`](Self::decoder), with another setting for the norms' epsilon.
    pub(super) fn decoder_with(&mut self, eps: &str, eps_key: &str) -> Result<u64, Error> {
        let config = self.config;
        let layers = config.layers()?;
        let heads = config.need_count("num_attention_heads")?;
        self.set("block_count", layers);
        self.set("context_length", config.need_count("max_position_embeddings")?);
        self.set("embedding_length", config.need_count("hidden_size")?);
        self.set("attention.head_count", heads);
        self.set("attention.head_count_kv", config.count("num_key_value_heads")?.unwrap_or(heads));
        self.set(eps_key, config.need_number(eps)?);
        self.counts(&[
            ("intermediate_size", "feed_forward_length"),
            ("head_dim", "attention.key_length"),
            ("head_dim", "attention.value_length"),
        ])?;
        Ok(layers)
    }

    pub(super) fn head_dim(&self) -> Result<u64, Error> {
        let key = "head_dim";
        match self.config.count(key)? {
            Some(dim) if dim <= MAX_HEAD_DIM => Ok(dim),
            Some(dim) => Err(self.config.refuse(key, dim, format_args!("at most {MAX_HEAD_DIM}"))),
            None => {
                let (hidden, heads) =
                    (self.config.need_count("hidden_size")?, self.config.need_count("num_attention_heads")?);
                let dim = hidden / heads.max(1);
                let needs = format_args!("at most {MAX_HEAD_DIM} for each head");
                if dim <= MAX_HEAD_DIM {
                    Ok(dim)
                } else {
                    Err(self.config.refuse("hidden_size", hidden, needs))
                }
            }
        }
    }

    /// The rotary embedding of `rope_parameters`, or of `rope_theta` and `rope_scaling`. `kind`: that of a kind of
    /// layer, if there are several.
    pub(super) fn rope_config(&self, kind: &str) -> Result<Rope<'a>, Error> {
        let config = self.config;
        let scaling = "rope_scaling";
        let old = ["rope_theta", scaling].iter().any(|key| config.given(key).is_some());
        let parameters = match config.given("rope_parameters") {
            None if old => None,
            _ => config.object("rope_parameters")?,
        };
        let map = match parameters {
            Some(map) if map.values().any(Json::is_object) => map.get(kind).and_then(Json::as_object),
            Some(map) => Some(map),
            None => config.object(scaling)?,
        };
        let number = |key: &str| match map.and_then(|map| map.get(key)).and_then(Json::as_f64) {
            None => config.number(key),
            found => Ok(found),
        };
        let found = ["rope_type", "type"].iter().find_map(|key| map?.get(*key)?.as_str());
        Ok(Rope {
            map,
            theta: number("rope_theta")?.unwrap_or(10_000.0),
            kind: found.unwrap_or("default").to_owned(),
            partial: number("partial_rotary_factor")?,
        })
    }

    /// Elements of a head that rotate. Most types have no partial rotation, whatever the settings say.
    pub(super) fn rotating(&self, rope: &Rope<'_>) -> Result<u64, Error> {
        let dim = self.head_dim()?;
        let is_partial = PARTIAL.contains(&self.arch);
        let given = if is_partial { self.config.count("rotary_dim")? } else { None };
        Ok(match (rope.partial.filter(|_| is_partial), given) {
            (Some(partial), _) => ((partial * dim as f64) as u64).min(dim),
            (None, Some(count)) => count.min(dim),
            (None, None) => dim,
        })
    }

    /// Keys of the rotary embedding. Returns its frequency factors by the names of their tensors.
    pub(super) fn rope(&mut self) -> Result<RopeFactors, Error> {
        let rope = self.rope_config("full_attention")?;
        let rotating = self.rotating(&rope)?;
        self.rope_over(&rope, rotating)
    }

    /// Like [`rope`](Self::rope), for this number of elements of a head.
    pub(super) fn rope_over(&mut self, rope: &Rope<'_>, rotating: u64) -> Result<RopeFactors, Error> {
        if let Some(beta) = rope.number("llama_4_scaling_beta").filter(|&beta| beta != 0.0) {
            if self.arch != "mistral3" {
                return Err(self.config.refuse("rope_parameters.llama_4_scaling_beta", beta, 0));
            }
            self.set("attention.temperature_scale", beta);
            self.set("rope.scaling.original_context_length", self.original_context(rope)?);
        }
        self.set("rope.freq_base", rope.theta);
        self.set("rope.dimension_count", rotating);
        match rope.kind.as_str() {
            // Up to the longest context the second is as the first.
            "default" | "dynamic" | "mrope" => {
                self.set("rope.scaling.type", "none");
                Ok(Vec::new())
            }
            "linear" => {
                self.set("rope.scaling.type", "linear");
                self.set("rope.scaling.factor", self.scaling(rope, "factor")?);
                Ok(Vec::new())
            }
            "llama3" => Ok(vec![("rope_freqs.weight", self.llama3_factors(rope, rotating)?)]),
            "yarn" if self.arch != "phi3" => self.yarn(rope).map(|()| Vec::new()),
            // Older names of Phi's.
            "longrope" | "su" | "yarn" => self.long_rope(rope, rotating / 2),
            other => {
                let needs = "default, dynamic, linear, llama3, longrope or yarn";
                Err(self.config.refuse("rope_scaling.rope_type", format!("{other:?}"), needs))
            }
        }
    }

    /// Positions before the context was stretched.
    fn original_context(&self, rope: &Rope<'_>) -> Result<u64, Error> {
        let key = "original_max_position_embeddings";
        match (self.config.count(key)?, rope.number(key)) {
            (Some(outer), _) => Ok(outer),
            (None, Some(original)) => Ok(original as u64),
            (None, None) => self.config.need_count("max_position_embeddings"),
        }
    }

    /// How often the original context is in the longest one, unless a factor says so.
    fn stretch(&self, rope: &Rope<'_>) -> Result<f64, Error> {
        if let Some(factor) = rope.number("factor") {
            return Ok(factor);
        }
        let context = self.config.need_count("max_position_embeddings")?;
        Ok(context as f64 / self.original_context(rope)?.max(1) as f64)
    }

    fn yarn(&mut self, rope: &Rope<'_>) -> Result<(), Error> {
        let factor = self.stretch(rope)?;
        self.set("rope.scaling.type", "yarn");
        self.set("rope.scaling.factor", factor);
        self.set("rope.scaling.original_context_length", self.original_context(rope)?);
        let given = |key: &str| rope.number(key).filter(|&number| number != 0.0);
        for (from, to) in [("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")] {
            if let Some(beta) = given(from) {
                self.set(&format!("rope.scaling.{to}"), beta);
            }
        }
        // The key's value multiplies the usual one.
        let log = factor.max(1.0).ln();
        let of = |mscale: f64| 1.0 + 0.1 * mscale * log;
        let both = given("mscale").zip(given("mscale_all_dim"));
        let given = rope.number("attention_factor").or_else(|| both.map(|both| of(both.0) / of(both.1)));
        if let Some(given) = given {
            self.set("rope.scaling.attn_factor", given / of(1.0));
        }
        if rope.map.and_then(|map| map.get("truncate")).and_then(Json::as_bool) == Some(false) {
            self.set("rope.scaling.yarn_truncate", false);
        }
        Ok(())
    }

    /// Frequency factors of `pairs` for short and for long contexts.
    fn long_rope(&mut self, rope: &Rope<'_>, pairs: u64) -> Result<RopeFactors, Error> {
        let (original, stretch) = (self.original_context(rope)?, self.stretch(rope)?);
        let factor = match rope.number("attention_factor") {
            Some(given) => given,
            None if stretch <= 1.0 => 1.0,
            None => (1.0 + stretch.ln() / (original as f64).ln()).sqrt(),
        };
        self.set("rope.scaling.type", "longrope");
        self.set("rope.scaling.original_context_length", original);
        self.set("rope.scaling.attn_factor", factor);
        let list = |key: &str| {
            let number = |number: &Json| Some(number.as_f64()? as f32);
            let found = rope.map.and_then(|map| map.get(key)?.as_array());
            let list = found.and_then(|list| list.iter().map(number).collect::<Option<Vec<f32>>>());
            list.filter(|list| list.len() as u64 == pairs).ok_or_else(|| {
                let needs = format_args!("a list of {pairs} numbers").to_string();
                self.config.refuse(&format!("rope_scaling.{key}"), "something else", needs)
            })
        };
        Ok(vec![
            ("rope_factors_long.weight", list("long_factor")?),
            ("rope_factors_short.weight", list("short_factor")?),
        ])
    }

    fn scaling(&self, rope: &Rope<'_>, key: &str) -> Result<f64, Error> {
        let name = format!("rope_scaling.{key}");
        rope.number(key).ok_or_else(|| self.config.refuse(&name, "absent or no number", "a number"))
    }

    /// Llama 3's divisors of the frequencies: those of long waves by `factor`, those of short ones by 1, and a ramp
    /// over the waves' number in the original context between the two.
    fn llama3_factors(&self, rope: &Rope<'_>, rotating: u64) -> Result<Vec<f32>, Error> {
        let factor = self.scaling(rope, "factor")?;
        let (low, high) = (self.scaling(rope, "low_freq_factor")?, self.scaling(rope, "high_freq_factor")?);
        let original = self.original_context(rope)? as f64;
        let divisor = |pair: u64| {
            let wavelength = std::f64::consts::TAU * rope.theta.powf(2.0 * pair as f64 / rotating as f64);
            let ramp = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0);
            ((1.0 - ramp) / factor + ramp).recip() as f32
        };
        Ok((0..rotating / 2).map(divisor).collect())
    }

    /// Sets the rotary embedding of the layers with a window, which has no scaling.
    pub(super) fn sliding_rope(&mut self, theta: f64) -> Result<(), Error> {
        let parameters = self.config.object("rope_parameters")?;
        let map = parameters.and_then(|map| map.get("sliding_attention")).and_then(Json::as_object);
        let kind = map.and_then(|map| map.get("rope_type"));
        if let Some(kind) = kind.filter(|kind| *kind != "default") {
            let key = "rope_parameters.sliding_attention.rope_type";
            return Err(self.config.refuse(key, short(kind), "\"default\""));
        }
        let given = map.and_then(|map| map.get("rope_theta")?.as_f64());
        self.set("rope.freq_base_swa", given.unwrap_or(theta));
        Ok(())
    }

    /// Sets the window, and returns the layers that have it: those of `layer_types`, or those that `slides` says,
    /// counted from 1.
    pub(super) fn windows(
        &mut self,
        layers: u64,
        window: Option<u64>,
        slides: impl Fn(u64) -> bool,
    ) -> Result<Vec<bool>, Error> {
        let list = match self.config.layer_types(layers, &["full_attention", "sliding_attention"])? {
            Some(kinds) => kinds.iter().map(|&kind| kind == 1).collect::<Vec<bool>>(),
            None => (1..=layers.min(1 << 16)).map(slides).collect(),
        };
        self.set("attention.sliding_window", window.unwrap_or(0));
        self.set("attention.sliding_window_pattern", list.clone());
        Ok(list)
    }

    /// Sets the function between the matrices of feed-forwards, if it is not the architecture's usual one.
    pub(super) fn activation(&mut self, key: &str) -> Result<(), Error> {
        let Some(found) = self.config.get(key) else { return Ok(()) };
        let name = found.as_str().and_then(activation);
        let name = name.ok_or_else(|| self.config.refuse(key, short(found), ACTIVATIONS))?;
        self.set("feed_forward.activation", name);
        Ok(())
    }
}

impl Rope<'_> {
    pub(super) fn setting(&self, key: &str) -> Option<&Json> {
        self.map?.get(key)
    }

    pub(super) fn number(&self, key: &str) -> Option<f64> {
        self.map?.get(key)?.as_f64()
    }
}

#[cfg(test)]
mod tests {
    use super::without_infinity;

    #[test]
    fn words_that_are_no_json_become_null() {
        for (text, expected) in [
            (
                r#"{"a": [0.0, Infinity], "b": -Infinity, "c": NaN}"#,
                r#"{"a": [0.0, null], "b": null, "c": null}"#,
            ),
            (
                r#"{"Infinity": "NaN \" Infinity", "n": -1, "N": "\\"}"#,
                r#"{"Infinity": "NaN \" Infinity", "n": -1, "N": "\\"}"#,
            ),
            (r#"{"a": "open Infinity"#, r#"{"a": "open Infinity"#),
            ("", ""),
        ] {
            assert_eq!(without_infinity(text), expected);
        }
    }
}
