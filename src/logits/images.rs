//! Images of the prompts of `kvasir logits`: preprocessed pixels, or files.

use anyhow::{Context, Result, bail, ensure};
use engine::engine::{EngineImage, ImageSource};
use engine::images::{EncodedImage, PlacedImage};
use engine::vision::Pixels;
use safetensors::{Dtype, SafeTensors};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use vision::image_ids;
use worker::load::{EngineOptions, ModelVision};

/// A prompt with its images.
pub(super) struct Prompt {
    pub(super) tokens: Vec<u32>,
    pub(super) images: Vec<EngineImage>,
    /// Of its image files, in order.
    pub(super) pixels: Option<PromptPixels>,
}

/// Preprocessed pixels of all images of a prompt, with the token ids before their rows had ids of their own.
pub(super) struct PromptPixels {
    ids: Vec<u32>,
    /// That of one image, with more tiles or patches.
    shape: Vec<usize>,
    values: Vec<f32>,
    /// Three numbers for each image, of models that see images of all sizes.
    grids: Vec<u32>,
}

impl PromptPixels {
    /// Tensors from which [`with_pixels`] makes the prompt of this number.
    pub(super) fn tensors(&self, number: usize) -> Vec<(String, Dtype, Vec<usize>, Vec<u8>)> {
        let name = |field: &str| format!("v{number}.{field}");
        let integers = |ids: &[u32]| ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        let values = self.values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let mut tensors = vec![
            (name("ids"), Dtype::I32, vec![self.ids.len()], integers(&self.ids)),
            (name("pixel_values"), Dtype::F32, self.shape.clone(), values),
        ];
        if !self.grids.is_empty() {
            let shape = vec![self.grids.len() / 3, 3];
            tensors.push((name("image_grid_thw"), Dtype::I32, shape, integers(&self.grids)));
        }
        tensors
    }
}

impl From<Vec<u32>> for Prompt {
    fn from(tokens: Vec<u32>) -> Self {
        Self { tokens, images: Vec::new(), pixels: None }
    }
}

/// The vision tower of a model.
pub(super) fn open(path: &Path, options: &EngineOptions) -> Result<ModelVision> {
    let vision = ModelVision::open(path, options)?;
    vision.with_context(|| format!("{} sees no images", path.display()))
}

/// Token ids of the prompts in a file of pixels: `v{i}.ids`, or `ids` of a single one.
pub(super) fn prompts(pixels: &Path) -> Result<Vec<Vec<u32>>> {
    let bytes = read(pixels)?;
    let tensors = parse(&bytes, pixels)?;
    let ids = |name: &str| tensors.tensor(name).is_ok().then(|| integers(&tensors, name));
    match ids("ids") {
        Some(ids) => Ok(vec![ids?]),
        None => (0..).map_while(|number| ids(&format!("v{number}.ids"))).collect(),
    }
}

/// Prompts with pixels: those of prompt `i` are `v{i}.pixel_values`, or `pixel_values` if there is one prompt, with
/// `image_grid_thw` beside them if the model sees images of all sizes.
pub(super) fn with_pixels(
    vision: &mut ModelVision,
    prompts: Vec<Vec<u32>>,
    pixels: &Path,
) -> Result<Vec<Prompt>> {
    let bytes = read(pixels)?;
    let tensors = parse(&bytes, pixels)?;
    let single = prompts.len() == 1 && tensors.tensor("pixel_values").is_ok();
    let mut placed = Vec::with_capacity(prompts.len());
    for (number, tokens) in prompts.into_iter().enumerate() {
        let name = |field: &str| if single { field.to_owned() } else { format!("v{number}.{field}") };
        let Ok(tensor) = tensors.tensor(&name("pixel_values")) else {
            placed.push(tokens.into());
            continue;
        };
        let values = floats(&tensors, &name("pixel_values"))?;
        let grids = match tensors.tensor(&name("image_grid_thw")) {
            Ok(_) => Some(integers(&tensors, &name("image_grid_thw"))?),
            Err(_) => None,
        };
        let prompt = place_pixels(vision, tokens, &values, tensor.shape(), grids.as_deref());
        placed.push(prompt.with_context(|| format!("{}: {}", pixels.display(), name("pixel_values")))?);
    }
    Ok(placed)
}

fn place_pixels(
    vision: &mut ModelVision,
    tokens: Vec<u32>,
    values: &[f32],
    shape: &[usize],
    grids: Option<&[u32]>,
) -> Result<Prompt> {
    // A batch of one, as transformers keeps tiles.
    let shape = match shape {
        [1, rest @ ..] if rest.len() == 4 => rest,
        shape => shape,
    };
    let mut images = Vec::new();
    match grids {
        None => {
            let pixels = Pixels { values, shape, grid: None };
            images.push((digest(values), vision.tower().encode(&[pixels])?.remove(0)));
        }
        Some(grids) => {
            let [_, width] = *shape else {
                bail!("has {} axes, expected patches and their values", shape.len())
            };
            let mut start = 0_usize;
            for &grid in grids.as_chunks::<3>().0 {
                let patches = grid.iter().try_fold(1_usize, |all, count| all.checked_mul(*count as usize));
                let end = patches.and_then(|patches| patches.checked_mul(width)?.checked_add(start));
                let values = end.and_then(|end| values.get(start..end));
                let (Some(patches), Some(values)) = (patches, values) else {
                    bail!(
                        "has {} values, fewer than the grid of {grid:?} needs",
                        values.map_or(0, <[f32]>::len)
                    );
                };
                let pixels = Pixels { values, shape: &[patches, width], grid: Some(grid) };
                images.push((digest(values), vision.tower().encode(&[pixels])?.remove(0)));
                start += values.len();
            }
        }
    }
    let hidden = vision.tower().spec().out;
    let row_token = vision.processor().row_token();
    let images = images.into_iter().map(|(digest, image)| {
        (image.rows.len() / hidden, digest, ImageSource::Embedding(Arc::<EncodedImage>::new(image)))
    });
    place(tokens, row_token, images.collect())
}

/// A prompt with image files. Its row tokens are those of the files, in order.
pub(super) fn with_files(vision: &ModelVision, tokens: Vec<u32>, files: &[PathBuf]) -> Result<Prompt> {
    let mut pixels =
        PromptPixels { ids: tokens.clone(), shape: Vec::new(), values: Vec::new(), grids: Vec::new() };
    let mut images = Vec::with_capacity(files.len());
    for path in files {
        let file = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        let image = vision.processor().process(&file).with_context(|| path.display().to_string())?;
        let before = pixels.shape.first().copied().unwrap_or(0);
        pixels.shape.clone_from(&image.shape);
        pixels.shape[0] += before;
        pixels.values.extend(image.pixels());
        pixels.grids.extend(image.grid.into_iter().flatten());
        images.push((image.rows, image.digest, ImageSource::File(file.into())));
    }
    Ok(Prompt { pixels: Some(pixels), ..place(tokens, vision.processor().row_token(), images)? })
}

/// Replaces the row tokens of a prompt by the ids of the images' rows. `images`: rows, digest and source of each.
fn place(
    mut tokens: Vec<u32>,
    row_token: u32,
    images: Vec<(usize, [u8; 32], ImageSource)>,
) -> Result<Prompt> {
    let rows: Vec<usize> = (0..tokens.len()).filter(|at| tokens[*at] == row_token).collect();
    let needed: usize = images.iter().map(|(rows, ..)| rows).sum();
    ensure!(
        rows.len() == needed,
        "the prompt has {} tokens {row_token}, its images have {needed} rows",
        rows.len()
    );
    let (mut rest, mut placed) = (rows.as_slice(), Vec::with_capacity(images.len()));
    for (count, digest, source) in images {
        let (own, behind) = rest.split_at(count);
        rest = behind;
        for (at, id) in own.iter().zip(image_ids(&digest, count)) {
            tokens[*at] = id;
        }
        let run =
            |run: &[usize]| -> Option<Range<u32>> { Some(*run.first()? as u32..*run.last()? as u32 + 1) };
        let runs = own.chunk_by(|at, next| at + 1 == *next).filter_map(run).collect();
        placed.push(EngineImage { place: PlacedImage { runs, digest }, source });
    }
    Ok(Prompt { tokens, images: placed, pixels: None })
}

fn digest(values: &[f32]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    values.iter().for_each(|value| _ = hasher.update(&value.to_le_bytes()));
    hasher.finalize().into()
}

fn read(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}

fn parse<'a>(bytes: &'a [u8], path: &Path) -> Result<SafeTensors<'a>> {
    SafeTensors::deserialize(bytes).with_context(|| format!("{}: no safetensors file", path.display()))
}

fn floats(tensors: &SafeTensors<'_>, name: &str) -> Result<Vec<f32>> {
    let tensor = tensors.tensor(name)?;
    ensure!(tensor.dtype() == Dtype::F32, "{name} has type {:?}, expected F32", tensor.dtype());
    Ok(tensor.data().as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
}

fn integers(tensors: &SafeTensors<'_>, name: &str) -> Result<Vec<u32>> {
    let tensor = tensors.tensor(name)?;
    let data = tensor.data();
    let numbers: Option<Vec<u32>> = match tensor.dtype() {
        Dtype::I32 | Dtype::U32 => {
            let number = |bytes: &[u8; 4]| u32::try_from(i32::from_le_bytes(*bytes)).ok();
            data.as_chunks::<4>().0.iter().map(number).collect()
        }
        Dtype::I64 => {
            let number = |bytes: &[u8; 8]| u32::try_from(i64::from_le_bytes(*bytes)).ok();
            data.as_chunks::<8>().0.iter().map(number).collect()
        }
        other => bail!("{name} has type {other:?}, expected I32 or I64"),
    };
    numbers.with_context(|| format!("{name} has negative values, or values over {}", u32::MAX))
}
