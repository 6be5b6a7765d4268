//! config.json and preprocessor_config.json, read within limits.

use crate::error::Error;
use crate::limits::MAX_PATCHES;
use crate::resize::Filter;
use metadata::Metadata;
use serde::Deserialize;
use serde_json::{Map, Value};

/// Upper limit of each size in the files.
const MAX_SIZE: usize = 8192;
const MAX_PIXELS: usize = 64 << 20;

const CLIP_MEAN: [f32; 3] = [0.48145466, 0.4578275, 0.40821073];
const CLIP_STD: [f32; 3] = [0.26862954, 0.261_302_6, 0.275_777_1];

/// The families, with what is special to their preprocessing.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Family {
    /// Any size within two numbers of pixels, in patches.
    Qwen { patch: usize, temporal: usize, merge: usize, min_pixels: usize, max_pixels: usize },
    /// One size, and crops of wide and high images.
    Gemma { height: usize, width: usize, pan_and_scan: Option<PanAndScan>, rows: usize },
    /// Tiles of one size, and the whole image in that size.
    Idefics { size: Size, tile: usize, splitting: bool, rows: usize },
    /// The centre of the image in one size.
    Llava(Llava),
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct PanAndScan {
    pub(crate) min_crop_size: usize,
    pub(crate) max_crops: usize,
    pub(crate) min_ratio: f64,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Llava {
    /// If the image is made square, with its mean colour, before it is resized.
    pub(crate) pad: bool,
    pub(crate) size: Size,
    /// Height and width of the part that is kept.
    pub(crate) crop: (usize, usize),
    pub(crate) rows: usize,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Size {
    Shortest(usize),
    Longest(usize),
    Exact { height: usize, width: usize },
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Config {
    pub(crate) family: Family,
    pub(crate) filter: Filter,
    /// Factor of a pixel's value.
    pub(crate) rescale: Option<f64>,
    /// Mean and standard deviation of each channel, after the factor.
    pub(crate) normalise: Option<([f32; 3], [f32; 3])>,
    /// The token that templates write for an image.
    pub(crate) marker: String,
    /// The token that stands for one row of an image in transformers.
    pub(crate) row_token: u32,
    pub(crate) end: Option<String>,
    pub(crate) around: String,
    pub(crate) global: String,
}

/// A JSON object, with the name of its file for errors.
struct Fields<'a> {
    file: &'static str,
    fields: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    fn error(&self, key: &str, detail: impl Into<String>) -> Error {
        Error::Config { key: format!("{}: {key}", self.file), detail: detail.into() }
    }

    fn get(&self, key: &str) -> Option<&'a Value> {
        self.fields.get(key).filter(|value| !value.is_null())
    }

    fn object(&self, key: &str) -> Result<Option<Self>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(fields)) => Ok(Some(Self { file: self.file, fields })),
            Some(_) => Err(self.error(key, "is no object")),
        }
    }

    /// A number from 1 to `most`.
    fn number(&self, key: &str, most: usize) -> Result<Option<usize>, Error> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let number = value.as_u64().or_else(|| value.as_f64().filter(|x| x.fract() == 0.0).map(|x| x as u64));
        match number.and_then(|number| usize::try_from(number).ok()) {
            Some(number) if (1..=most).contains(&number) => Ok(Some(number)),
            _ => Err(self.error(key, format!("is {value}, expected 1 to {most}"))),
        }
    }

    fn flag(&self, key: &str, default: bool) -> Result<bool, Error> {
        match self.get(key) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(value) => Err(self.error(key, format!("is {value}, expected true or false"))),
        }
    }

    fn float(&self, key: &str) -> Result<Option<f64>, Error> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let float = value.as_f64().filter(|float| *float > 0.0 && *float < 1e6);
        float.map(Some).ok_or_else(|| self.error(key, format!("is {value}, expected a positive number")))
    }

    fn text(&self, key: &str) -> Option<&'a str> {
        self.get(key).and_then(Value::as_str)
    }

    /// A list of three numbers, or one for all channels.
    fn channels(&self, key: &str, default: [f32; 3]) -> Result<[f32; 3], Error> {
        let Some(value) = self.get(key) else { return Ok(default) };
        let number = |value: &Value| value.as_f64().filter(|x| x.abs() < 1e6).map(|x| x as f32);
        let channels = match value {
            Value::Array(values) => match values.as_slice() {
                [red, green, blue] => number(red).zip(number(green)).zip(number(blue)),
                _ => None,
            },
            value => number(value).map(|x| ((x, x), x)),
        };
        let ((red, green), blue) = channels.ok_or_else(|| {
            self.error(key, format!("is {value}, expected a number for each of three channels"))
        })?;
        Ok([red, green, blue])
    }

    /// Height and width, from an object or one number for both.
    fn rectangle(&self, key: &str) -> Result<Option<(usize, usize)>, Error> {
        if self.get(key).is_some_and(Value::is_number) {
            return Ok(self.number(key, MAX_SIZE)?.map(|size| (size, size)));
        }
        let Some(size) = self.object(key)? else { return Ok(None) };
        Ok(size.number("height", MAX_SIZE)?.zip(size.number("width", MAX_SIZE)?))
    }

    /// `size`, of which a lone number is read as `lone`.
    fn size(&self, lone: fn(usize) -> Size) -> Result<Option<Size>, Error> {
        if self.get("size").is_some_and(Value::is_number) {
            return Ok(self.number("size", MAX_SIZE)?.map(lone));
        }
        let Some(size) = self.object("size")? else { return Ok(None) };
        let edges = [size.number("shortest_edge", MAX_SIZE)?, size.number("longest_edge", MAX_SIZE)?];
        match (edges, self.rectangle("size")?) {
            ([Some(edge), None], None) => Ok(Some(Size::Shortest(edge))),
            ([None, Some(edge)], None) => Ok(Some(Size::Longest(edge))),
            ([None, None], Some((height, width))) => Ok(Some(Size::Exact { height, width })),
            _ => {
                let expected = "shortest_edge, longest_edge, or height and width";
                Err(self.error("size", format!("has another form than one of: {expected}")))
            }
        }
    }

    fn require<T>(&self, key: &str, value: Option<T>) -> Result<T, Error> {
        value.ok_or_else(|| self.error(key, "is missing"))
    }
}

impl Config {
    /// `None` if the model has no vision configuration.
    pub(crate) fn from_metadata(metadata: &Metadata) -> Result<Option<Self>, Error> {
        let Some(config) = metadata.get::<&str>("vision.config")? else { return Ok(None) };
        let config = object("vision.config", config)?;
        let preprocessor = match metadata.get::<&str>("vision.preprocessor")? {
            Some(text) => object("vision.preprocessor", text)?,
            None => Map::new(),
        };
        let config = Fields { file: "config.json", fields: &config };
        let preprocessor = Fields { file: "preprocessor_config.json", fields: &preprocessor };
        let tokens = metadata.get::<&metadata::Strings>("tokenizer.ggml.tokens")?;
        let added = match tokens {
            Some(_) => Vec::new(),
            None => added_tokens(metadata)?,
        };
        let token = |key: &str, id: u32| {
            let of_file = || added.iter().find(|token| token.id == id).map(|token| token.content.as_str());
            let token = tokens.map_or_else(of_file, |tokens| tokens.get(id as usize));
            token.map(str::to_owned).ok_or_else(|| config.error(key, format!("is {id}, which is no token")))
        };
        Self::read(&config, &preprocessor, &token).map(Some)
    }

    fn read(
        config: &Fields<'_>,
        preprocessor: &Fields<'_>,
        token: &dyn Fn(&str, u32) -> Result<String, Error>,
    ) -> Result<Self, Error> {
        let id = |keys: &[&str]| -> Result<u32, Error> {
            let found = keys.iter().find(|key| config.get(key).is_some()).unwrap_or(&keys[0]);
            let value = config.require(found, config.get(found))?;
            let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
            id.ok_or_else(|| config.error(found, format!("is {value}, expected the id of a token")))
        };
        let row_token = id(&["image_token_id", "image_token_index"])?;
        let mut marker = token("image_token_id", row_token)?;
        let mut end = None;
        let kind = config.text("model_type").unwrap_or_default();
        let half = [0.5; 3];
        let (family, default_filter, mean, std) = match kind {
            "qwen2_5_vl" | "qwen3_vl" => (qwen(preprocessor)?, Filter::Bicubic, CLIP_MEAN, CLIP_STD),
            "gemma3" => {
                marker = token("boi_token_index", id(&["boi_token_index", "boi_token_id"])?)?;
                end = Some(token("eoi_token_index", id(&["eoi_token_index", "eoi_token_id"])?)?);
                (gemma(config, preprocessor)?, Filter::Bilinear, half, half)
            }
            "smolvlm" | "idefics3" => (idefics(config, preprocessor)?, Filter::Lanczos, half, half),
            "llava" => (llava(config, preprocessor)?, Filter::Bicubic, CLIP_MEAN, CLIP_STD),
            _ => {
                return Err(
                    config.error("model_type", format!("is {kind:?}, whose images are not supported"))
                );
            }
        };
        let filter = match preprocessor.get("resample").map(Value::as_u64) {
            None => default_filter,
            Some(Some(1)) => Filter::Lanczos,
            Some(Some(2)) => Filter::Bilinear,
            Some(Some(3)) => Filter::Bicubic,
            Some(_) => {
                let detail = "is none of 1 (Lanczos), 2 (bilinear) and 3 (bicubic)";
                return Err(preprocessor.error("resample", detail));
            }
        };
        if !preprocessor.flag("do_resize", true)? {
            return Err(preprocessor.error("do_resize", "is false, which is not supported"));
        }
        let rescale = preprocessor.float("rescale_factor")?.unwrap_or(1.0 / 255.0);
        let std = preprocessor.channels("image_std", std)?;
        if std.iter().any(|std| *std <= 0.0) {
            return Err(preprocessor.error("image_std", "has a value that is not positive"));
        }
        let normalise = (preprocessor.channels("image_mean", mean)?, std);
        let text = |key: &str, default: &str| preprocessor.text(key).unwrap_or(default).to_owned();
        Ok(Self {
            family,
            filter,
            rescale: preprocessor.flag("do_rescale", true)?.then_some(rescale),
            normalise: preprocessor.flag("do_normalize", true)?.then_some(normalise),
            marker,
            row_token,
            end,
            around: text("fake_image_token", "<fake_token_around_image>"),
            global: text("global_image_token", "<global-img>"),
        })
    }
}

#[derive(Deserialize)]
struct AddedToken {
    id: u32,
    content: String,
}

/// The tokens that a folder's tokenizer.json adds to its vocabulary; those of images are among them.
fn added_tokens(metadata: &Metadata) -> Result<Vec<AddedToken>, Error> {
    #[derive(Deserialize)]
    struct Tokenizer {
        #[serde(default)]
        added_tokens: Vec<AddedToken>,
    }
    const KEY: &str = "tokenizer.huggingface.json";
    let Some(text) = metadata.get::<&str>(KEY)? else { return Ok(Vec::new()) };
    let read = serde_json::from_str::<Tokenizer>(text);
    let read =
        read.map_err(|cause| Error::Config { key: KEY.to_owned(), detail: format!("is not read: {cause}") })?;
    Ok(read.added_tokens)
}

fn object(key: &str, text: &str) -> Result<Map<String, Value>, Error> {
    let error = |detail: String| Error::Config { key: key.to_owned(), detail };
    match serde_json::from_str(text) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(_) => Err(error("is no object".to_owned())),
        Err(cause) => Err(error(format!("is not JSON: {cause}"))),
    }
}

fn qwen(preprocessor: &Fields<'_>) -> Result<Family, Error> {
    let patch = preprocessor.number("patch_size", 256)?.unwrap_or(14);
    let temporal = preprocessor.number("temporal_patch_size", 8)?.unwrap_or(2);
    let merge = preprocessor.number("merge_size", 8)?.unwrap_or(2);
    let size = preprocessor.object("size")?;
    // The old keys win over the new ones, as in transformers.
    let limit = |old: &str, new: &str, default| -> Result<usize, Error> {
        let of_size = |key| size.as_ref().map_or(Ok(None), |size| size.number(key, MAX_PIXELS));
        let found = preprocessor.number(old, MAX_PIXELS)?.or(of_size(new)?).or(of_size(old)?);
        Ok(found.unwrap_or(default))
    };
    let min_pixels = limit("min_pixels", "shortest_edge", 56 * 56)?;
    let max_pixels = limit("max_pixels", "longest_edge", 28 * 28 * 1280)?;
    if min_pixels > max_pixels {
        let detail = format!("is {min_pixels} pixels, more than max_pixels, {max_pixels}");
        return Err(preprocessor.error("min_pixels", detail));
    }
    let max_pixels = max_pixels.min(MAX_PATCHES * patch * patch).max(min_pixels);
    Ok(Family::Qwen { patch, temporal, merge, min_pixels, max_pixels })
}

fn gemma(config: &Fields<'_>, preprocessor: &Fields<'_>) -> Result<Family, Error> {
    let (height, width) = preprocessor.rectangle("size")?.unwrap_or((224, 224));
    let rows = config.number("mm_tokens_per_image", 1 << 16)?.unwrap_or(256);
    let pan_and_scan = if preprocessor.flag("do_pan_and_scan", false)? {
        let require = |key, most| preprocessor.require(key, preprocessor.number(key, most)?);
        let ratio = "pan_and_scan_min_ratio_to_activate";
        Some(PanAndScan {
            min_crop_size: require("pan_and_scan_min_crop_size", MAX_SIZE)?,
            max_crops: require("pan_and_scan_max_num_crops", 64)?,
            min_ratio: preprocessor.require(ratio, preprocessor.float(ratio)?)?,
        })
    } else {
        None
    };
    Ok(Family::Gemma { height, width, pan_and_scan, rows })
}

fn idefics(config: &Fields<'_>, preprocessor: &Fields<'_>) -> Result<Family, Error> {
    let vision = config.require("vision_config", config.object("vision_config")?)?;
    let patch = vision.require("patch_size", vision.number("patch_size", 256)?)?;
    let scale = config.number("scale_factor", 64)?.unwrap_or(2);
    let edge = match preprocessor.object("max_image_size")? {
        Some(size) => size.number("longest_edge", MAX_SIZE)?,
        None => None,
    };
    let tile = edge.unwrap_or(364);
    let rows = (tile / patch / scale).pow(2);
    let stated = preprocessor.number("image_seq_len", 1 << 16)?;
    if rows == 0 || stated.is_some_and(|stated| stated != rows) {
        let stated = stated.map_or_else(|| "missing".to_owned(), |stated| stated.to_string());
        let detail = format!("is {stated}, but images of {tile} pixels have {rows} rows");
        return Err(preprocessor.error("image_seq_len", detail));
    }
    let size = preprocessor.size(Size::Longest)?.unwrap_or(Size::Longest(4 * 364));
    if matches!(size, Size::Shortest(_)) {
        return Err(preprocessor.error("size", "has no longest_edge"));
    }
    Ok(Family::Idefics { size, tile, splitting: preprocessor.flag("do_image_splitting", true)?, rows })
}

fn llava(config: &Fields<'_>, preprocessor: &Fields<'_>) -> Result<Family, Error> {
    let vision = config.require("vision_config", config.object("vision_config")?)?;
    let patch = vision.require("patch_size", vision.number("patch_size", 256)?)?;
    let size = preprocessor.size(Size::Shortest)?.unwrap_or(Size::Shortest(224));
    let pad = preprocessor.flag("do_pad", false)?;
    let crop = if preprocessor.flag("do_center_crop", true)? {
        preprocessor.rectangle("crop_size")?.unwrap_or((224, 224))
    } else {
        match size {
            Size::Exact { height, width } => (height, width),
            Size::Shortest(edge) if pad => (edge, edge),
            _ => return Err(preprocessor.error("do_center_crop", "is false, and images have no single size")),
        }
    };
    // CLIP has a class token, and the strategy "default" leaves the first row of the tower's result out.
    let class = usize::from(vision.text("model_type") == Some("clip_vision_model"));
    let strategy = config.text("vision_feature_select_strategy").unwrap_or("default");
    let left_out = match strategy {
        "default" => 1,
        "full" => 0,
        _ => {
            let detail = format!("is {strategy:?}, expected \"default\" or \"full\"");
            return Err(config.error("vision_feature_select_strategy", detail));
        }
    };
    match ((crop.0 / patch) * (crop.1 / patch) + class).checked_sub(left_out) {
        Some(rows) if rows > 0 => Ok(Family::Llava(Llava { pad, size, crop, rows })),
        _ => {
            Err(vision.error("patch_size", format!("is {patch}, images have {} x {} pixels", crop.1, crop.0)))
        }
    }
}
