//! From a picture to the values that a tower gets, and the tokens around them.

#[cfg(test)]
mod tests;

use crate::config::{Config, Family, Llava, PanAndScan, Size};
use crate::decode::decode;
use crate::error::Error;
use crate::resize::{Rgb, resize};
use metadata::Metadata;

/// Pixels of a resized image. The files of models allow no more.
const MAX_RESIZED: usize = 64 << 20;
/// The longest side of idefics' images, before they are divided.
const MAX_IDEFICS_SIDE: usize = 4096;

/// The preprocessing of one model.
#[derive(Debug, Clone)]
pub struct ImageProcessor {
    config: Config,
    /// Values of each channel's 256 levels.
    levels: [Vec<f32>; 3],
}

/// A piece of what replaces a marker in a prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// Text of the template's kind: special tokens are parsed.
    Text(String),
    /// So many rows of the image, the next ones.
    Rows(usize),
}

/// An image as the tower of one model gets it.
#[derive(Debug, Clone)]
pub struct ProcessedImage {
    /// Shape of [`pixels`](Self::pixels): \[patches, values of a patch\] with a grid, else \[tiles, 3, height, width\].
    pub shape: Vec<usize>,
    /// Time, height and width in patches, of models that see images of all sizes.
    pub grid: Option<[u32; 3]>,
    /// Time, height and width in rows of the prompt, of the same models.
    pub row_grid: Option<[u32; 3]>,
    /// Rows of the prompt.
    pub rows: usize,
    /// BLAKE3 of everything that the pixels depend on.
    pub digest: [u8; 32],
    /// Rows and columns of tiles, of images that are divided.
    division: Option<(usize, usize)>,
    tiles: Vec<Rgb>,
    levels: [Vec<f32>; 3],
    patches: Option<Patches>,
}

#[derive(Debug, Clone, Copy)]
struct Patches {
    patch: usize,
    temporal: usize,
    merge: usize,
}

impl ImageProcessor {
    /// Reads `vision.config` and `vision.preprocessor`: the texts of config.json and of preprocessor_config.json
    /// with processor_config.json. `None` if the model sees no images.
    pub fn from_metadata(metadata: &Metadata) -> Result<Option<Self>, Error> {
        Ok(Config::from_metadata(metadata)?.map(|config| Self { levels: levels(&config), config }))
    }

    /// The text that chat templates write for an image.
    pub fn marker(&self) -> &str {
        &self.config.marker
    }

    /// The token that stands for one row of an image in transformers.
    pub fn row_token(&self) -> u32 {
        self.config.row_token
    }

    /// Pixels of the largest picture or tile that the tower gets.
    pub fn largest_picture(&self) -> usize {
        match &self.config.family {
            Family::Qwen { max_pixels, .. } => *max_pixels,
            Family::Gemma { height, width, .. } => height * width,
            Family::Idefics { tile, .. } => tile * tile,
            Family::Llava(Llava { crop: (height, width), .. }) => height * width,
        }
    }

    /// Decodes and preprocesses a PNG, JPEG, WebP or GIF file.
    pub fn process(&self, file: &[u8]) -> Result<ProcessedImage, Error> {
        let image = decode(file)?;
        let filter = self.config.filter;
        let to = |image: Rgb, (height, width): (usize, usize)| match height.checked_mul(width) {
            Some(pixels) if pixels <= MAX_RESIZED => Ok(resize(image, width, height, filter)),
            _ => Err(Error::Resized { width, height, limit: MAX_RESIZED }),
        };
        match &self.config.family {
            &Family::Qwen { patch, temporal, merge, min_pixels, max_pixels } => {
                let size = smart_size((image.height, image.width), patch * merge, min_pixels, max_pixels);
                let image = to(image, size)?;
                let [height, width] = [image.height / patch, image.width / patch].map(|side| side as u32);
                let merged = [1, height / merge as u32, width / merge as u32];
                let patches = Patches { patch, temporal, merge };
                let shape = vec![(height * width) as usize, 3 * temporal * patch * patch];
                let rows = (merged[1] * merged[2]) as usize;
                let mut processed = self.processed(vec![image], shape, rows, Some(patches));
                processed.grid = Some([1, height, width]);
                processed.row_grid = Some(merged);
                Ok(processed)
            }
            Family::Gemma { height, width, pan_and_scan, rows } => {
                let crops = pan_and_scan.as_ref().map_or_else(Vec::new, |options| crops(&image, options));
                let mut tiles = Vec::with_capacity(1 + crops.len());
                for image in std::iter::once(image).chain(crops) {
                    tiles.push(to(image, (*height, *width))?);
                }
                let rows = rows * tiles.len();
                Ok(self.tiled(tiles, rows))
            }
            &Family::Idefics { size, tile, splitting, rows } => {
                let target = match size {
                    Size::Longest(edge) => idefics_size((image.height, image.width), edge),
                    Size::Shortest(edge) => shortest((image.height, image.width), edge),
                    Size::Exact { height, width } => (height, width),
                };
                let image = to(image, target)?;
                if !splitting {
                    return Ok(self.tiled(vec![to(image, (tile, tile))?], rows));
                }
                let size = whole_tiles((image.height, image.width), tile);
                let image = to(image, size)?;
                let division = (image.height / tile, image.width / tile);
                if division == (1, 1) {
                    return Ok(self.tiled(vec![image], rows));
                }
                let mut tiles = Vec::with_capacity(division.0 * division.1 + 1);
                for row in 0..division.0 {
                    for column in 0..division.1 {
                        tiles.push(image.crop(column * tile, row * tile, tile, tile));
                    }
                }
                tiles.push(to(image, (tile, tile))?);
                let rows = rows * tiles.len();
                let mut processed = self.tiled(tiles, rows);
                processed.division = Some(division);
                Ok(processed)
            }
            Family::Llava(Llava { pad, size, crop, rows }) => {
                let image = if *pad { self.square(image)? } else { image };
                let target = match *size {
                    Size::Shortest(edge) | Size::Longest(edge) => shortest((image.height, image.width), edge),
                    Size::Exact { height, width } => (height, width),
                };
                Ok(self.tiled(vec![centre(&to(image, target)?, *crop)], *rows))
            }
        }
    }

    /// The pieces that replace one marker of the prompt.
    pub fn expand(&self, image: &ProcessedImage) -> Vec<Piece> {
        let text = |text: &str| Piece::Text(text.to_owned());
        let per_tile = image.rows / image.tiles.len();
        let mut pieces = Vec::new();
        match &self.config.family {
            Family::Qwen { .. } | Family::Llava(_) => pieces.push(Piece::Rows(image.rows)),
            Family::Gemma { .. } => {
                let begin = format!("\n\n{}", self.config.marker);
                let end = format!("{}\n\n", self.config.end.as_deref().unwrap_or_default());
                let mut lead = match image.tiles.len() {
                    1 => "",
                    _ => "Here is the original image ",
                };
                for at in 0..image.tiles.len() {
                    pieces.extend([text(&format!("{lead}{begin}")), Piece::Rows(per_tile), text(&end)]);
                    lead = match at {
                        0 => " and here are some crops to help you see better ",
                        _ => " ",
                    };
                }
            }
            Family::Idefics { .. } => {
                let (around, global) = (&self.config.around, &self.config.global);
                let mut lead = "";
                if let Some((rows, columns)) = image.division {
                    for row in 1..=rows {
                        for column in 1..=columns {
                            let tile = format!("{lead}{around}<row_{row}_col_{column}>");
                            pieces.extend([Piece::Text(tile), Piece::Rows(per_tile)]);
                            lead = "";
                        }
                        lead = "\n";
                    }
                    lead = "\n\n";
                }
                pieces.push(Piece::Text(format!("{lead}{around}{global}")));
                pieces.extend([Piece::Rows(per_tile), text(around)]);
            }
        }
        pieces
    }

    /// The image in the middle of a square of the mean colour.
    fn square(&self, image: Rgb) -> Result<Rgb, Error> {
        let side = image.width.max(image.height);
        if side == image.width.min(image.height) {
            return Ok(image);
        }
        if side * side > MAX_RESIZED {
            return Err(Error::Resized { width: side, height: side, limit: MAX_RESIZED });
        }
        let mean = self.config.normalise.map_or([0.0; 3], |(mean, _)| mean);
        let mut square = Rgb::filled(side, side, mean.map(|value| (value * 255.0) as u8));
        square.paste(&image, (side - image.width) / 2, (side - image.height) / 2);
        Ok(square)
    }

    fn tiled(&self, tiles: Vec<Rgb>, rows: usize) -> ProcessedImage {
        let shape = vec![tiles.len(), 3, tiles[0].height, tiles[0].width];
        self.processed(tiles, shape, rows, None)
    }

    fn processed(
        &self,
        tiles: Vec<Rgb>,
        shape: Vec<usize>,
        rows: usize,
        patches: Option<Patches>,
    ) -> ProcessedImage {
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"kvasir image v1");
        for level in self.levels.iter().flatten() {
            hasher.update(&level.to_le_bytes());
        }
        let patch = patches.map_or([0; 3], |patches| [patches.patch, patches.temporal, patches.merge]);
        for number in patch.iter().chain([&rows]) {
            hasher.update(&(*number as u64).to_le_bytes());
        }
        for tile in &tiles {
            hasher.update(&(tile.width as u64).to_le_bytes());
            hasher.update(&(tile.height as u64).to_le_bytes());
            hasher.update(&tile.bytes);
        }
        ProcessedImage {
            shape,
            grid: None,
            row_grid: None,
            rows,
            digest: hasher.finalize().into(),
            division: None,
            tiles,
            levels: self.levels.clone(),
            patches,
        }
    }
}

impl ProcessedImage {
    /// The values of the image, as `pixel_values` of transformers: patches in the order in which they are merged, or
    /// tiles.
    pub fn pixels(&self) -> Vec<f32> {
        let mut pixels = Vec::with_capacity(self.shape.iter().product());
        let value = |tile: &Rgb, channel: usize, y: usize, x: usize| {
            self.levels[channel][usize::from(tile.bytes[(y * tile.width + x) * 3 + channel])]
        };
        let Some(Patches { patch, temporal, merge }) = self.patches else {
            for tile in &self.tiles {
                for channel in 0..3 {
                    let levels = &self.levels[channel];
                    let bytes = tile.bytes.iter().skip(channel).step_by(3);
                    pixels.extend(bytes.map(|byte| levels[usize::from(*byte)]));
                }
            }
            return pixels;
        };
        for tile in &self.tiles {
            let side = patch * merge;
            for top in (0..tile.height).step_by(side) {
                for left in (0..tile.width).step_by(side) {
                    for at in 0..merge * merge {
                        let (top, left) = (top + at / merge * patch, left + at % merge * patch);
                        for channel in 0..3 {
                            let start = pixels.len();
                            for y in top..top + patch {
                                pixels.extend((left..left + patch).map(|x| value(tile, channel, y, x)));
                            }
                            let once = start..pixels.len();
                            for _ in 1..temporal {
                                pixels.extend_from_within(once.clone());
                            }
                        }
                    }
                }
            }
        }
        pixels
    }
}

/// Values of all levels of the channels. Factor and normalisation are one step, as in torchvision's processors.
fn levels(config: &Config) -> [Vec<f32>; 3] {
    std::array::from_fn(|channel| {
        let value = |level: u8| {
            let level = f32::from(level);
            match (config.rescale, config.normalise) {
                (Some(factor), Some((mean, std))) => {
                    let inverse = (1.0 / factor) as f32;
                    (level - mean[channel] * inverse) / (std[channel] * inverse)
                }
                (None, Some((mean, std))) => (level - mean[channel]) / std[channel],
                (Some(factor), None) => level * factor as f32,
                (None, None) => level,
            }
        };
        (0..=255).map(value).collect()
    })
}

/// Height and width: multiples of `factor` within the numbers of pixels, of about the image's ratio.
fn smart_size((height, width): (usize, usize), factor: usize, min: usize, max: usize) -> (usize, usize) {
    let round = |side: usize| (side as f64 / factor as f64).round_ties_even() as usize * factor;
    let [high, wide] = [round(height), round(width)];
    let pixels = (height * width) as f64;
    let unit = factor as f64;
    if high * wide > max {
        let beta = (pixels / max as f64).sqrt();
        let fit = |side: usize| factor.max((side as f64 / beta / unit).floor() as usize * factor);
        (fit(height), fit(width))
    } else if high * wide < min {
        let beta = (min as f64 / pixels).sqrt();
        let fit = |side: usize| (side as f64 * beta / unit).ceil() as usize * factor;
        (fit(height), fit(width))
    } else {
        (high, wide)
    }
}

/// Height and width of the image whose shorter side is `edge`.
fn shortest((height, width): (usize, usize), edge: usize) -> (usize, usize) {
    let (short, long) = (height.min(width), height.max(width));
    let long = edge * long / short;
    if width <= height { (long, edge) } else { (edge, long) }
}

/// Height and width of the image whose longer side is `edge`, the other one even, then within a limit.
fn idefics_size((height, width): (usize, usize), edge: usize) -> (usize, usize) {
    let ratio = width as f64 / height as f64;
    let even = |side: usize| side + side % 2;
    let (height, width) = if width >= height {
        (even((edge as f64 / ratio) as usize), edge)
    } else {
        (edge, even((edge as f64 * ratio) as usize))
    };
    let (height, width) = (height.max(1), width.max(1));
    let ratio = width as f64 / height as f64;
    let limit = MAX_IDEFICS_SIDE;
    if width >= height && width > limit {
        (((limit as f64 / ratio) as usize).max(1), limit)
    } else if height > width && height > limit {
        (limit, ((limit as f64 * ratio) as usize).max(1))
    } else {
        (height, width)
    }
}

/// Height and width as multiples of a tile's side.
fn whole_tiles((height, width): (usize, usize), tile: usize) -> (usize, usize) {
    let ratio = width as f64 / height as f64;
    if width >= height {
        let width = width.next_multiple_of(tile);
        (((width as f64 / ratio) as usize).next_multiple_of(tile).max(tile), width)
    } else {
        let height = height.next_multiple_of(tile);
        (height, ((height as f64 * ratio) as usize).next_multiple_of(tile).max(tile))
    }
}

/// The middle of the image, with black around it where the image is smaller.
fn centre(image: &Rgb, (height, width): (usize, usize)) -> Rgb {
    let (kept_height, kept_width) = (height.min(image.height), width.min(image.width));
    let kept =
        image.crop((image.width - kept_width) / 2, (image.height - kept_height) / 2, kept_width, kept_height);
    if (kept.height, kept.width) == (height, width) {
        return kept;
    }
    let mut centre = Rgb::filled(width, height, [0; 3]);
    centre.paste(&kept, (width - kept_width) / 2, (height - kept_height) / 2);
    centre
}

/// Parts of an image that is much wider than high, or higher than wide.
fn crops(image: &Rgb, options: &PanAndScan) -> Vec<Rgb> {
    let (long, short) = (image.width.max(image.height), image.width.min(image.height));
    let ratio = long as f64 / short as f64;
    if ratio < options.min_ratio {
        return Vec::new();
    }
    let count = ((ratio + 0.5).floor() as usize).min(long / options.min_crop_size);
    let count = count.max(2).min(options.max_crops);
    let side = long.div_ceil(count);
    if side.min(short) < options.min_crop_size {
        return Vec::new();
    }
    let part = |at: usize| {
        let start = (at * side).min(long);
        let length = side.min(long - start);
        match image.width >= image.height {
            true => image.crop(start, 0, length, short),
            false => image.crop(0, start, short, length),
        }
    };
    (0..count).map(part).filter(|part| !part.bytes.is_empty()).collect()
}
