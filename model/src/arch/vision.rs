//! Vision towers: from settings in the form of `config.json` and the tensors of an `mmproj` file to a [`VisionSpec`].
//!
//! Values that stand for absent settings are those of the published configuration classes.

use std::collections::HashSet;

use serde_json::{Map, Value as Json};

use super::decoder::bare_layer;
use super::shape::limits;
use super::source::Source;
use crate::header::ModelHeader;
use crate::spec::{
    Activation, AttentionSpec, COLOURS, FfnPart, FfnSpec, KvSpec, LayerSpec, LinearSpec, MergeSpec,
    MixerSpec, NormSpec, OwnKvSpec, PatchSpec, PixelLayout, PositionSpec, ProjectorSpec, RopeFactors,
    RopeSpec, RopeStyle, RowSlice, TableSpec, VisionSpec, WindowSpec,
};
use crate::vision::{CONFIG_KEY, MODEL_TYPES, is_vision_tensor};
use crate::{Error, ModelFile};
use settings::{Function, Settings};

mod settings;

const POSITIONS: &str = "v.position_embd.weight";
const CLASS: &str = "v.class_embd";
/// Base of the rotary embedding of towers.
const ROPE_BASE: f64 = 10_000.0;
/// Epsilon of Qwen's norms.
const QWEN_EPS: f32 = 1e-6;
/// Slope of the quick GELU.
const QUICK: f32 = 1.702;

impl VisionSpec {
    /// The part of the model in `file` that sees images; `None` if it has none.
    ///
    /// Fails if a setting is out of range or not supported, or if the tensors are not exactly the expected ones.
    pub fn from_file(file: &ModelFile) -> Result<Option<Self>, Error> {
        Self::from_header(file.header())
    }

    /// Like [`from_file`](Self::from_file), without tensor bytes.
    pub fn from_header(header: &ModelHeader) -> Result<Option<Self>, Error> {
        let Some(text) = header.metadata().get::<&str>(CONFIG_KEY)? else { return Ok(None) };
        let map: Map<String, Json> = serde_json::from_str(text).map_err(|error| Error::HyperParameter {
            key: CONFIG_KEY.to_owned(),
            found: error.to_string(),
            needs: "an object of JSON".to_owned(),
        })?;
        let (outer, source) = (Settings::new(&map), Source::new(header, CONFIG_KEY));
        let tower =
            |defaults: Defaults, act: &'static str| Tower::read(&source, outer.vision()?, defaults, act);
        let spec = match outer.text("model_type", "")? {
            "gemma3" => gemma3(&tower(Defaults::SIGLIP, "gelu_pytorch_tanh")?, outer)?,
            "idefics3" | "smolvlm" => idefics3(&tower(Defaults::IDEFICS, "gelu_pytorch_tanh")?, outer)?,
            "llava" => match outer.vision()?.text("model_type", "clip_vision_model")? {
                "clip_vision_model" => llava(&tower(Defaults::CLIP, "quick_gelu")?, outer)?,
                "siglip_vision_model" => llava(&tower(Defaults::SIGLIP, "gelu_pytorch_tanh")?, outer)?,
                other => {
                    let needs = "clip_vision_model or siglip_vision_model";
                    return Err(outer.vision()?.refuse("model_type", other, needs));
                }
            },
            "qwen2_5_vl" => qwen2_5(&tower(Defaults::QWEN2_5, "silu")?)?,
            "qwen3_vl" => qwen3(&tower(Defaults::QWEN3, "gelu_pytorch_tanh")?)?,
            other => return Err(outer.refuse("model_type", other, MODEL_TYPES.join(", "))),
        };
        check_tensors(header, &spec)?;
        Ok(Some(spec))
    }
}

/// Fails if the file has a tensor of a tower that is not used. Layers behind the last used one may be there, and the
/// norm behind them.
fn check_tensors(header: &ModelHeader, spec: &VisionSpec) -> Result<(), Error> {
    let used: HashSet<&str> = spec.tensors().into_iter().collect();
    let behind = |name: &str| {
        let layer = name.strip_prefix("v.blk.").and_then(|rest| rest.split('.').next()?.parse().ok());
        layer.is_some_and(|layer: usize| layer >= spec.layers.len()) || name.starts_with("v.post_ln.")
    };
    let is_unused = |name: &str| is_vision_tensor(name) && !used.contains(name) && !behind(name);
    match header.tensors().find(|info| is_unused(info.name())) {
        Some(info) => {
            Err(Error::UnusedTensor { tensor: info.name().to_owned(), arch: CONFIG_KEY.to_owned() })
        }
        None => Ok(()),
    }
}

/// Values of absent settings of a tower.
struct Defaults {
    layers: (&'static str, usize),
    heads: (&'static str, usize),
    hidden: usize,
    inner: usize,
    image: usize,
    patch: usize,
    eps: f32,
}

impl Defaults {
    const LAYERS: &'static str = "num_hidden_layers";
    const HEADS: &'static str = "num_attention_heads";
    const SIGLIP: Self = Self {
        layers: (Self::LAYERS, 12),
        heads: (Self::HEADS, 12),
        hidden: 768,
        inner: 3072,
        image: 224,
        patch: 16,
        eps: 1e-6,
    };
    const IDEFICS: Self = Self { heads: (Self::HEADS, 16), hidden: 1152, patch: 32, ..Self::SIGLIP };
    const CLIP: Self = Self { patch: 32, eps: 1e-5, ..Self::SIGLIP };
    const QWEN2_5: Self = Self {
        layers: ("depth", 32),
        heads: ("num_heads", 16),
        hidden: 3584,
        inner: 3420,
        image: 0,
        patch: 14,
        eps: QWEN_EPS,
    };
    const QWEN3: Self = Self { layers: ("depth", 27), hidden: 1152, inner: 4304, patch: 16, ..Self::QWEN2_5 };
}

/// Common settings of towers, and their tensors.
struct Tower<'a> {
    source: &'a Source<'a>,
    settings: Settings<'a>,
    layers: usize,
    heads: usize,
    hidden: usize,
    inner: usize,
    /// Pixels on each side of a picture; 0 if it has none.
    image: usize,
    patch: usize,
    eps: f32,
    function: Function,
}

impl<'a> Tower<'a> {
    fn read(
        source: &'a Source<'a>,
        settings: Settings<'a>,
        defaults: Defaults,
        act: &'a str,
    ) -> Result<Self, Error> {
        let (layers, heads) = (defaults.layers, defaults.heads);
        let hidden = settings.width("hidden_size", defaults.hidden)?;
        let heads = settings.count(heads.0, 1..=limits::HEADS, heads.1)?;
        if !hidden.is_multiple_of(heads) || hidden / heads > limits::HEAD_DIM {
            let needs = format!("a multiple of {heads} heads of at most {}", limits::HEAD_DIM);
            return Err(settings.refuse("hidden_size", hidden, needs));
        }
        for key in ["num_channels", "in_channels", "in_chans"] {
            settings.count(key, COLOURS..=COLOURS, COLOURS)?;
        }
        // Qwen's has no such setting.
        let images = if defaults.image == 0 { 0..=0 } else { 1..=1 << 14 };
        let image =
            if defaults.image == 0 { 0 } else { settings.count("image_size", images, defaults.image)? };
        Ok(Self {
            source,
            settings,
            layers: settings.count(layers.0, 1..=limits::LAYERS, layers.1)?,
            heads,
            hidden,
            inner: settings.width("intermediate_size", defaults.inner)?,
            image,
            patch: settings.count("patch_size", 1..=1 << 10, defaults.patch)?,
            eps: settings.positive("layer_norm_eps", defaults.eps)?,
            function: settings.function("hidden_act", act)?,
        })
    }

    /// Patches on each side of a picture.
    fn grid(&self) -> usize {
        self.image / self.patch
    }

    fn norm(&self, stem: &str, width: usize) -> Result<NormSpec, Error> {
        self.source.layer_norm(stem, width, self.eps)
    }

    fn linear(&self, stem: &str, cols: usize, rows: usize) -> Result<LinearSpec, Error> {
        self.source.linear(stem, cols, rows)
    }

    /// Rows of a matrix.
    fn rows(&self, stem: &str) -> Result<usize, Error> {
        let dims = self.source.dims(&format!("{stem}.weight"))?;
        let rows = dims.get(1).copied().unwrap_or(1);
        usize::try_from(rows).ok().filter(|rows| *rows <= limits::WIDTH).ok_or_else(|| Error::TensorShape {
            tensor: format!("{stem}.weight"),
            found: dims.to_vec(),
            expected: vec![limits::WIDTH as u64; 2],
        })
    }

    /// The matrices of patches of so many frames.
    fn patches(&self, frames: usize, pixels: PixelLayout) -> Result<PatchSpec, Error> {
        let (side, source) = (self.patch, self.source);
        let frame = |number: usize| {
            let name = match number {
                0 => "v.patch_embd.weight".to_owned(),
                number => format!("v.patch_embd.weight.{number}"),
            };
            let weight = source.tensor(&name, &[side, side, COLOURS, self.hidden])?;
            let bias = match number {
                0 => source.optional_floats("v.patch_embd.bias", &[self.hidden])?,
                _ => None,
            };
            Ok(LinearSpec { bias, ..LinearSpec::new(weight, COLOURS * side * side, self.hidden) })
        };
        Ok(PatchSpec { side, frames: (0..frames).map(frame).collect::<Result<_, Error>>()?, pixels })
    }

    fn table(&self, rows: usize) -> Result<TableSpec, Error> {
        Ok(TableSpec { tensor: self.source.tensor(POSITIONS, &[self.hidden, rows])?, rows })
    }

    /// The first `count` layers.
    fn layers(&self, count: usize, rms: bool, rope: Option<&RopeSpec>) -> Result<Vec<LayerSpec>, Error> {
        (0..count.min(self.layers)).map(|layer| self.layer(layer, rms, rope)).collect()
    }

    fn layer(&self, layer: usize, rms: bool, rope: Option<&RopeSpec>) -> Result<LayerSpec, Error> {
        let (hidden, stem) = (self.hidden, |name: &str| format!("v.blk.{layer}.{name}"));
        let norm = |name: &str| match rms {
            true => self.source.rms_norm(&stem(name), hidden, self.eps).map(Some),
            false => self.norm(&stem(name), hidden).map(Some),
        };
        let attention = self.attention(layer, rope)?;
        Ok(LayerSpec {
            mixer_norm: norm("ln1")?,
            ffn_norm: norm("ln2")?,
            ..bare_layer(MixerSpec::Attention(attention), vec![FfnPart::plain(self.ffn(layer)?)])
        })
    }

    fn ffn(&self, layer: usize) -> Result<FfnSpec, Error> {
        let stem = |name: &str| format!("v.blk.{layer}.{name}");
        let (gate, mut up, mut down) = (stem("ffn_gate"), stem("ffn_up"), stem("ffn_down"));
        // Older files have the two names exchanged.
        let cols = |stem: &str| self.source.dims(&format!("{stem}.weight")).map(|dims| dims.first().copied());
        if cols(&down)? == Some(self.hidden as u64) && self.hidden != self.inner {
            std::mem::swap(&mut up, &mut down);
        }
        let up = self.linear(&up, self.hidden, self.inner)?;
        let down = self.linear(&down, self.inner, self.hidden)?;
        Ok(match (self.source.has(&format!("{gate}.weight")), self.function) {
            (true, Function::Plain(activation)) => {
                let gate = self.linear(&gate, self.hidden, self.inner)?;
                FfnSpec::Gated { gate, up, down, activation, row_gate: None }
            }
            (true, Function::QuickGelu) => {
                return Err(self.settings.refuse("hidden_act", "quick_gelu", "another function of gates"));
            }
            (false, function) => {
                let (up, activation, down) = plain(up, function, down);
                FfnSpec::Plain { up, down, activation }
            }
        })
    }

    fn attention(&self, layer: usize, rope: Option<&RopeSpec>) -> Result<AttentionSpec, Error> {
        let (hidden, head_dim) = (self.hidden, self.hidden / self.heads);
        let stem = |name: &str| format!("v.blk.{layer}.{name}");
        let fused = stem("attn_qkv");
        let is_fused = self.source.has(&format!("{fused}.weight"));
        let part = |number: usize, name: &str| match is_fused {
            true => {
                let of = 3 * hidden;
                let slice = RowSlice { of, period: of, start: number * hidden, len: hidden };
                self.source.linear_slice(&fused, hidden, slice)
            }
            false => self.linear(&stem(name), hidden, hidden),
        };
        Ok(AttentionSpec {
            causal: false,
            window: None,
            heads: self.heads,
            kv_heads: self.heads,
            head_dim,
            v_head_dim: head_dim,
            q: part(0, "attn_q")?,
            q_norm: None,
            kv: KvSpec::Own(OwnKvSpec {
                k: part(1, "attn_k")?,
                v: Some(part(2, "attn_v")?),
                k_norm: None,
                v_norm: None,
            }),
            rope: rope.cloned(),
            q_growth: None,
            scale: (head_dim as f32).sqrt().recip(),
            softcap: None,
            sinks: None,
            gate: None,
            o: self.linear(&stem("attn_out"), hidden, hidden)?,
        })
    }

    /// A tower whose layers see all of a picture, and whose last one gives the feature.
    fn whole(
        &self,
        out: usize,
        patches: PatchSpec,
        positions: PositionSpec,
        projector: ProjectorSpec,
    ) -> Result<VisionSpec, Error> {
        Ok(VisionSpec {
            hidden: self.hidden,
            out,
            patches,
            class: None,
            positions,
            norm: None,
            layers: self.layers(self.layers, false, None)?,
            windows: None,
            features: vec![self.layers],
            skips_first: false,
            projector,
            deepstack: Vec::new(),
        })
    }
}

/// Two matrices and the function between them. The quick GELU is `silu(1.702 x) / 1.702`.
fn plain(up: LinearSpec, function: Function, down: LinearSpec) -> (LinearSpec, Activation, LinearSpec) {
    match function {
        Function::Plain(activation) => (up, activation, down),
        Function::QuickGelu => (
            LinearSpec { factor: up.factor * QUICK, bias_factor: up.bias_factor * QUICK, ..up },
            Activation::Silu,
            LinearSpec { factor: down.factor / QUICK, ..down },
        ),
    }
}

fn gemma3(tower: &Tower<'_>, outer: Settings<'_>) -> Result<VisionSpec, Error> {
    let (grid, key) = (tower.grid(), "mm_tokens_per_image");
    let rows = outer.count(key, 1..=1 << 20, 256)?;
    let side = rows.isqrt();
    if side * side != rows || side > grid || !grid.is_multiple_of(side) {
        return Err(outer.refuse(key, rows, format_args!("a square whose root divides {grid} patches")));
    }
    let stem = "mm.input_projection";
    let out = tower.rows(stem)?;
    let projector = ProjectorSpec {
        norm: Some(tower.norm("v.post_ln", tower.hidden)?),
        merge: MergeSpec::Mean { side: grid / side },
        merged_norm: Some(tower.source.rms_norm("mm.soft_emb_norm", tower.hidden, tower.eps)?),
        up: tower.linear(stem, tower.hidden, out)?,
        down: None,
    };
    let patches = tower.patches(1, PixelLayout::Pictures { sides: Some(tower.image) })?;
    tower.whole(out, patches, PositionSpec::Each(tower.table(grid * grid)?), projector)
}

fn idefics3(tower: &Tower<'_>, outer: Settings<'_>) -> Result<VisionSpec, Error> {
    let (stem, side) = ("mm.model.fc", outer.count("scale_factor", 1..=64, 2)?);
    let (out, grid) = (tower.rows(stem)?, tower.grid());
    let projector = ProjectorSpec {
        norm: Some(tower.norm("v.post_ln", tower.hidden)?),
        merge: MergeSpec::Concat { side },
        merged_norm: None,
        up: tower.linear(stem, tower.hidden * side * side, out)?,
        down: None,
    };
    let patches = tower.patches(1, PixelLayout::Pictures { sides: None })?;
    let positions = PositionSpec::Fraction { table: tower.table(grid * grid)?, side: grid };
    tower.whole(out, patches, positions, projector)
}

fn llava(tower: &Tower<'_>, outer: Settings<'_>) -> Result<VisionSpec, Error> {
    let (key, layers) = ("vision_feature_layer", tower.layers as i64);
    let list = outer.integers(key, &[-2])?;
    let of_end = |&layer: &i64| if layer < 0 { layers + 1 + layer } else { layer };
    let features: Vec<usize> =
        list.iter().map(of_end).filter_map(|layer| usize::try_from(layer).ok()).collect();
    let ascending = features.is_sorted_by(|first, second| first < second);
    if features.len() != list.len()
        || features.is_empty()
        || !ascending
        || features[features.len() - 1] > tower.layers
    {
        let needs = format_args!("ascending layers of {layers}").to_string();
        return Err(outer.refuse(key, format_args!("{list:?}"), needs));
    }
    let select = "vision_feature_select_strategy";
    let skips_first = match outer.text(select, "default")? {
        "default" => true,
        "full" => false,
        other => return Err(outer.refuse(select, other, "default or full")),
    };
    let class = tower.source.optional_floats(CLASS, &[tower.hidden])?;
    let grid = tower.grid();
    let out = tower.rows("mm.2")?;
    let inner = tower.rows("mm.0")?;
    let function = outer.function("projector_hidden_act", "gelu")?;
    let (up, activation, down) = plain(
        tower.linear("mm.0", tower.hidden * features.len(), inner)?,
        function,
        tower.linear("mm.2", inner, out)?,
    );
    let projector = ProjectorSpec {
        norm: None,
        merge: MergeSpec::Concat { side: 1 },
        merged_norm: None,
        up,
        down: Some((activation, down)),
    };
    let patches = tower.patches(1, PixelLayout::Pictures { sides: Some(tower.image) })?;
    if class.is_some() && patches.frames.iter().any(|frame| frame.bias.is_some()) {
        return Err(Error::UnusedTensor {
            tensor: "v.patch_embd.bias".to_owned(),
            arch: CONFIG_KEY.to_owned(),
        });
    }
    let norm = match tower.source.has("v.pre_ln.weight") {
        true => Some(tower.norm("v.pre_ln", tower.hidden)?),
        false => None,
    };
    let positions = PositionSpec::Each(tower.table(grid * grid + usize::from(class.is_some()))?);
    let last = features.last().copied().unwrap_or(0);
    Ok(VisionSpec {
        class,
        norm,
        layers: tower.layers(last, false, None)?,
        features,
        skips_first,
        ..tower.whole(out, patches, positions, projector)?
    })
}

/// The rotary embedding of Qwen's towers: the first half of the pairs by the line, the second by the column.
fn rope(tower: &Tower<'_>) -> Result<RopeSpec, Error> {
    let head_dim = tower.hidden / tower.heads;
    if !head_dim.is_multiple_of(4) {
        let needs = format_args!("a multiple of 4 for each of {} heads", tower.heads).to_string();
        return Err(tower.settings.refuse("hidden_size", tower.hidden, needs));
    }
    let of_axis = head_dim / 4;
    let divisor = |pair: usize| ROPE_BASE.powf((pair % of_axis) as f64 / of_axis as f64) as f32;
    Ok(RopeSpec {
        style: RopeStyle::Half,
        n_rot: head_dim,
        base: 1.0,
        freq_scale: 1.0,
        factors: Some(RopeFactors::Values((0..2 * of_axis).map(divisor).collect())),
        magnitude: 1.0,
        axes: Some((0..2 * of_axis).map(|pair| (pair / of_axis) as u8).collect()),
    })
}

/// Patches of Qwen's towers, and patches on each side of a merged row.
fn qwen_patches(tower: &Tower<'_>) -> Result<(PatchSpec, usize), Error> {
    let frames = tower.settings.count("temporal_patch_size", 1..=8, 2)?;
    Ok((tower.patches(frames, PixelLayout::Patches)?, tower.settings.count("spatial_merge_size", 1..=64, 2)?))
}

/// Projector of merged patches, `STEM1` and `STEM2`.
fn merger(
    tower: &Tower<'_>,
    side: usize,
    (norm, merged_norm): (Option<NormSpec>, Option<NormSpec>),
    (first, second): (&str, &str),
) -> Result<ProjectorSpec, Error> {
    let width = tower.hidden * side * side;
    let (inner, out) = (tower.rows(first)?, tower.rows(second)?);
    Ok(ProjectorSpec {
        norm,
        merge: MergeSpec::Concat { side },
        merged_norm,
        up: tower.linear(first, width, inner)?,
        down: Some((Activation::GeluErf, tower.linear(second, inner, out)?)),
    })
}

fn qwen2_5(tower: &Tower<'_>) -> Result<VisionSpec, Error> {
    let (settings, hidden) = (tower.settings, tower.hidden);
    let (patches, side) = qwen_patches(tower)?;
    let whole = settings.layers("fullatt_block_indexes", tower.layers, &[7, 15, 23, 31])?;
    let window = settings.count("window_size", 1..=1 << 14, 112)? / side / tower.patch;
    if window == 0 {
        return Err(settings.refuse("window_size", 0, format_args!("at least {}", side * tower.patch)));
    }
    let norm = tower.source.rms_norm("v.post_ln", hidden, QWEN_EPS)?;
    let projector = merger(tower, side, (Some(norm), None), ("mm.0", "mm.2"))?;
    let out = tower.rows("mm.2")?;
    let rope = rope(tower)?;
    let layers = tower.layers(tower.layers, true, Some(&rope))?;
    let windows = WindowSpec { side: window, whole: (0..tower.layers).map(|l| whole.contains(&l)).collect() };
    Ok(VisionSpec {
        hidden,
        out,
        patches,
        class: None,
        positions: PositionSpec::None,
        norm: None,
        layers,
        windows: Some(windows),
        features: vec![tower.layers],
        skips_first: false,
        projector,
        deepstack: Vec::new(),
    })
}

fn qwen3(tower: &Tower<'_>) -> Result<VisionSpec, Error> {
    let (settings, hidden) = (tower.settings, tower.hidden);
    let (patches, side) = qwen_patches(tower)?;
    let rows = settings.count("num_position_embeddings", 1..=1 << 24, 2304)?;
    let grid = rows.isqrt();
    if grid * grid != rows {
        return Err(settings.refuse("num_position_embeddings", rows, "a square"));
    }
    let positions = PositionSpec::Interpolated { table: tower.table(rows)?, side: grid };
    let norm = tower.norm("v.post_ln", hidden)?;
    let projector = merger(tower, side, (Some(norm), None), ("mm.0", "mm.2"))?;
    let out = tower.rows("mm.2")?;
    let further = |layer: usize| {
        let stem = |name: &str| format!("v.deepstack.{layer}.{name}");
        let norm = tower.norm(&stem("norm"), hidden * side * side)?;
        merger(tower, side, (None, Some(norm)), (&stem("fc1"), &stem("fc2"))).map(|merger| (layer, merger))
    };
    let deepstack = settings.layers("deepstack_visual_indexes", tower.layers, &[8, 16, 24])?;
    let deepstack = deepstack.into_iter().map(further).collect::<Result<_, Error>>()?;
    let rope = rope(tower)?;
    Ok(VisionSpec {
        layers: tower.layers(tower.layers, false, Some(&rope))?,
        deepstack,
        ..tower.whole(out, patches, positions, projector)?
    })
}
