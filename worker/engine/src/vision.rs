//! Vision tower: images in, rows for the text model out.
//!
//! The pictures or frames of an image are sequences of a step, as texts are in an encoder: a row sees all of its
//! sequence and nothing else. Layers with windows run in a step of their own, whose sequences are the windows. So the
//! rows of an image depend on no other image. All values are f32.

use crate::Error;
use crate::decoder::{LayerOps, Widths};
use crate::images::EncodedImage;
use crate::weights::{LayerWeights, Linear, Loader, Packs, TensorSource, gate_activation};
use kernels::backend::{
    Backend, BlockTable, BufferId, GateActivation, GateOp, KvLayerId, KvShape, KvType, MatmulJob, MemoryUse,
    Norm, RowPlaces, StepInput, StepSequence,
};
use model::spec::{MergeSpec, ProjectorSpec, VisionSpec};
use pictures::{Picture, pictures};
use positions::Positions;
use std::ops::Range;

mod pictures;
mod positions;
#[cfg(test)]
mod tests;

/// Positions of a block of keys and values.
const BLOCK: usize = 16;
/// Unit of offsets in the arena, in bytes.
const OFFSET_UNIT: usize = 64;

/// The preprocessed pixels of an image.
#[derive(Debug, Clone, Copy)]
pub struct Pixels<'a> {
    pub values: &'a [f32],
    /// `[pictures, 3, height, width]`, or `[patches, values of a patch]`.
    pub shape: &'a [usize],
    /// Frames, and patches in height and width, of an image that comes as patches.
    pub grid: Option<[u32; 3]>,
}

/// A loaded vision tower.
pub struct VisionTower {
    spec: VisionSpec,
    weights: TowerWeights,
    backend: Box<dyn Backend>,
    work: Work,
    /// Patches of the largest step.
    step_rows: usize,
}

struct TowerWeights {
    /// Matrices of the frames of a patch.
    patches: Vec<Linear>,
    class: Option<Vec<f32>>,
    positions: Positions,
    norm: Option<Norm>,
    layers: Vec<LayerWeights>,
    projector: Projector,
    /// Layers and the projectors behind them.
    deepstack: Vec<(usize, Projector)>,
    /// Bytes of the tensors in the source's format.
    source_bytes: usize,
}

struct Projector {
    norm: Option<Norm>,
    merge: MergeSpec,
    merged_norm: Option<Norm>,
    up: Linear,
    down: Option<(GateActivation, Linear)>,
}

/// Buffers and cache of a step.
struct Work {
    ops: LayerOps,
    /// Pixels of the patches' frames.
    pixels: BufferId,
    /// Inputs of a projector, its inner values and its results.
    merged: BufferId,
    inner: BufferId,
    projected: BufferId,
    /// The keys and values of all layers, one after the other.
    cache: KvLayerId,
    /// Distance of blocks in the arena.
    stride: u32,
}

/// Range of rows that a row sees in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sight {
    Picture,
    Window,
}

impl VisionTower {
    /// Loads the tower. A picture or frame has at most `step_rows` patches, and so have those of a step together.
    pub fn load(
        spec: VisionSpec,
        source: &dyn TensorSource,
        mut backend: Box<dyn Backend>,
        step_rows: usize,
    ) -> Result<Self, Error> {
        let weights = TowerWeights::load(&spec, source, backend.as_mut())?;
        let work = Work::new(&spec, step_rows + usize::from(spec.class.is_some()), backend.as_mut())?;
        Ok(Self { spec, weights, backend, work, step_rows })
    }

    /// Bytes of the buffers and caches of a tower whose pictures have at most `step_rows` patches.
    pub fn scratch_bytes(spec: &VisionSpec, step_rows: usize) -> u64 {
        let attention = spec.layers.first().and_then(|layer| layer.attention());
        let cached = attention.map_or(0, |attention| 2 * attention.heads * attention.head_dim);
        let most = |of: fn(&ProjectorSpec) -> usize| spec.projectors().map(of).max().unwrap_or(0);
        let merged = most(|projector| projector.up.cols) + most(|projector| projector.up.rows) + spec.out;
        let row = Widths::of_layers(spec.hidden, &spec.layers).total()
            + 3 * spec.hidden
            + cached
            + spec.patches.frame_values()
            + merged.div_ceil(spec.merge_side().pow(2));
        (step_rows as u64).saturating_mul(4 * row as u64)
    }

    pub fn spec(&self) -> &VisionSpec {
        &self.spec
    }

    /// Device memory in use.
    pub fn memory(&self) -> MemoryUse {
        self.backend.memory()
    }

    /// Bytes of the loaded tensors in the source.
    pub fn source_bytes(&self) -> usize {
        self.weights.source_bytes
    }

    /// Must be called on the thread that will encode.
    pub fn bind_thread(&self) {
        self.backend.bind_thread();
    }

    /// Number of rows that an image becomes.
    ///
    /// # Errors
    /// [`Error::Image`] for pixels that the tower does not serve.
    pub fn rows(&self, pixels: &Pixels<'_>) -> Result<usize, Error> {
        let pictures = pictures(&self.spec, self.step_rows, pixels)?;
        let (class, skipped) = (usize::from(self.spec.class.is_some()), usize::from(self.spec.skips_first));
        let rows =
            |picture: &Picture<'_>| (picture.patches() + class - skipped) / self.spec.merge_side().pow(2);
        Ok(pictures.iter().map(rows).sum())
    }

    /// Encodes images. The rows of one depend on no other.
    ///
    /// # Errors
    /// [`Error::Image`] for pixels that the tower does not serve; errors of the device.
    pub fn encode(&mut self, images: &[Pixels<'_>]) -> Result<Vec<EncodedImage>, Error> {
        let mut all = Vec::new();
        for (image, pixels) in images.iter().enumerate() {
            let pictures = pictures(&self.spec, self.step_rows, pixels)?;
            all.extend(pictures.into_iter().map(|picture| (image, picture)));
        }
        let (lists, side) = (self.spec.deepstack.len(), self.spec.merge_side() as u32);
        let empty = |pixels: &Pixels<'_>| EncodedImage {
            rows: Vec::new(),
            deepstack: vec![Vec::new(); lists],
            grid: pixels.grid.map(|[frames, height, width]| [frames, height / side, width / side]),
        };
        let mut embeddings: Vec<EncodedImage> = images.iter().map(empty).collect();
        let class = usize::from(self.spec.class.is_some());
        let mut rest = all.as_slice();
        while !rest.is_empty() {
            let mut rows = 0;
            let fits = |(_, picture): &&(usize, Picture<'_>)| {
                rows += picture.patches() + class;
                rows <= self.step_rows + class
            };
            let (step, behind) = rest.split_at(rest.iter().take_while(fits).count().max(1));
            let pictures: Vec<&Picture<'_>> = step.iter().map(|(_, picture)| picture).collect();
            let mut run = Run { tower: &mut *self, places: places(&pictures, class), pictures: &pictures };
            let results = run.encode()?;
            for ((image, _), result) in step.iter().zip(results) {
                let embedding = &mut embeddings[*image];
                embedding.rows.extend(result.rows);
                for (to, from) in embedding.deepstack.iter_mut().zip(result.deepstack) {
                    to.extend(from);
                }
            }
            rest = behind;
        }
        Ok(embeddings)
    }
}

/// The rows of each picture in a step.
fn places(pictures: &[&Picture<'_>], class: usize) -> Vec<Range<usize>> {
    let mut end = 0;
    let place = |picture: &&Picture<'_>| {
        let start = end;
        end += picture.patches() + class;
        start..end
    };
    pictures.iter().map(place).collect()
}

impl TowerWeights {
    fn load(spec: &VisionSpec, source: &dyn TensorSource, backend: &mut dyn Backend) -> Result<Self, Error> {
        let mut loader = Loader::new(source, Packs::Off, backend);
        let mut patches = Vec::with_capacity(spec.patches.frames.len());
        for frame in &spec.patches.frames {
            patches.push(loader.linear(frame)?);
        }
        let class = spec.class.as_deref().map(|name| loader.floats(name, spec.hidden)).transpose()?;
        let positions = Positions::load(spec, &mut loader)?;
        let norm = spec.norm.as_ref().map(|norm| loader.norm(norm)).transpose()?;
        let mut layers = Vec::with_capacity(spec.layers.len());
        for layer in &spec.layers {
            layers.push(loader.layer(layer)?);
        }
        let projector = Projector::load(&spec.projector, &mut loader)?;
        let mut deepstack = Vec::with_capacity(spec.deepstack.len());
        for (layer, projector) in &spec.deepstack {
            deepstack.push((*layer, Projector::load(projector, &mut loader)?));
        }
        let source_bytes = loader.source_bytes();
        Ok(Self { patches, class, positions, norm, layers, projector, deepstack, source_bytes })
    }
}

impl Projector {
    fn load(spec: &ProjectorSpec, loader: &mut Loader<'_>) -> Result<Self, Error> {
        let ProjectorSpec { norm, merge, merged_norm, up, down } = spec;
        let down = match down {
            Some((activation, down)) => Some((gate_activation(*activation), loader.linear(down)?)),
            None => None,
        };
        Ok(Self {
            norm: norm.as_ref().map(|norm| loader.norm(norm)).transpose()?,
            merge: *merge,
            merged_norm: merged_norm.as_ref().map(|norm| loader.norm(norm)).transpose()?,
            up: loader.linear(up)?,
            down,
        })
    }
}

impl Work {
    /// For steps of at most `rows`.
    fn new(spec: &VisionSpec, rows: usize, backend: &mut dyn Backend) -> Result<Self, Error> {
        let ops = LayerOps::new(spec.hidden, &spec.layers, rows, backend)?;
        let shape = cache_shape(spec)?;
        let block_bytes = backend.kv_block_bytes(shape)?;
        let cache = backend.create_kv_layer(0, shape, 0)?;
        // A picture has a row at least. So has a window, of merged ones, and each may leave a block partly unused.
        let sequences = if spec.windows.is_some() { rows.div_ceil(spec.merge_side().pow(2)) } else { rows };
        let blocks = rows.div_ceil(BLOCK) + sequences;
        let too_large = || Error::KvMemory { reason: format!("{blocks} blocks of {block_bytes} bytes") };
        backend.create_kv_arena(blocks.checked_mul(block_bytes).ok_or_else(too_large)?, &[block_bytes])?;
        let unit = block_bytes / OFFSET_UNIT;
        let stride = u32::try_from(unit).ok().filter(|_| u32::try_from(unit.saturating_mul(blocks)).is_ok());
        let merged_rows = rows.div_ceil(spec.merge_side().pow(2));
        let most = |of: fn(&ProjectorSpec) -> usize| spec.projectors().map(of).max().unwrap_or(0);
        Ok(Self {
            ops,
            pixels: backend.create_buffer(rows, spec.patches.frame_values())?,
            merged: backend.create_buffer(merged_rows, most(|projector| projector.up.cols))?,
            inner: backend.create_buffer(merged_rows, most(|projector| projector.up.rows))?,
            projected: backend.create_buffer(merged_rows, spec.out)?,
            cache,
            stride: stride.ok_or_else(too_large)?,
        })
    }
}

/// All layers have the same heads.
fn cache_shape(spec: &VisionSpec) -> Result<KvShape, Error> {
    let attention = spec.layers.first().and_then(|layer| layer.attention());
    // A tower without layers caches nothing.
    let (heads, head_dim) = attention.map_or((1, BLOCK), |attention| (attention.heads, attention.head_dim));
    Ok(KvShape {
        heads,
        kv_heads: heads,
        head_dim,
        v_head_dim: head_dim,
        latent: false,
        block_tokens: BLOCK,
        kv_type: KvType::F32.into(),
        window: None,
        causal: false,
    })
}

/// A step: pictures that are encoded together.
struct Run<'a> {
    tower: &'a mut VisionTower,
    pictures: &'a [&'a Picture<'a>],
    /// The rows of each picture, that of the class first.
    places: Vec<Range<usize>>,
}

impl Run<'_> {
    fn encode(&mut self) -> Result<Vec<EncodedImage>, Error> {
        self.begin(Sight::Picture)?;
        self.embed()?;
        let (mut sight, mut features, mut deepstack) = (Sight::Picture, Vec::new(), Vec::new());
        let layers = self.tower.weights.layers.len();
        for layer in 0..=layers {
            if self.tower.spec.features.contains(&layer) {
                features.push(self.residual(self.tower.weights.projector.norm)?);
            }
            if layer == layers {
                break;
            }
            let needed = match &self.tower.spec.windows {
                Some(windows) if !windows.whole[layer] => Sight::Window,
                _ => Sight::Picture,
            };
            if needed != sight {
                self.begin(needed)?;
                sight = needed;
            }
            let VisionTower { weights, backend, work, .. } = &mut *self.tower;
            work.ops.run(backend.as_mut(), &weights.layers[layer], work.cache)?;
            for number in 0..self.tower.weights.deepstack.len() {
                let (behind, Projector { norm, .. }) = self.tower.weights.deepstack[number];
                if behind == layer {
                    let rows = self.residual(norm)?;
                    deepstack.push(self.project(Some(number), &[rows])?);
                }
            }
        }
        let rows = self.project(None, &features)?;
        let out = self.tower.spec.out;
        let embedding = |(number, picture): (usize, &&Picture<'_>)| EncodedImage {
            grid: None,
            rows: picture.in_order(&rows[number], out),
            deepstack: deepstack
                .iter()
                .map(|list: &Vec<Vec<f32>>| picture.in_order(&list[number], out))
                .collect(),
        };
        Ok(self.pictures.iter().enumerate().map(embedding).collect())
    }

    /// Begins a step, or begins it anew with other sequences.
    fn begin(&mut self, sight: Sight) -> Result<(), Error> {
        let rows = self.places.last().map_or(0, |place| place.end);
        let mut sequences = Vec::new();
        for (place, picture) in self.places.iter().zip(self.pictures) {
            match sight {
                Sight::Picture => sequences.push(place.clone()),
                Sight::Window => {
                    let of_window =
                        |window: &Range<usize>| place.start + window.start..place.start + window.end;
                    sequences.extend(picture.windows().iter().map(of_window));
                }
            }
        }
        let mut block = 0;
        let stride = self.tower.work.stride;
        let table = |rows: &Range<usize>| {
            let table = BlockTable::Contiguous { first: block * stride, stride };
            block += rows.len().div_ceil(BLOCK) as u32;
            table
        };
        let tables = [sequences.iter().map(table).collect()];
        let sequence = |rows: Range<usize>| StepSequence { rows, context: 0, segment_start: None };
        let sequences: Vec<StepSequence> = sequences.into_iter().map(sequence).collect();
        let axes = match self.tower.spec.layers.iter().any(rotates) {
            true => self.axes(rows),
            false => Vec::new(),
        };
        let backend = self.tower.backend.as_mut();
        backend.place_rows(&RowPlaces { axes: &axes, spans: &[] })?;
        let tokens = vec![0; rows];
        let input = StepInput { tokens: &tokens, sequences: &sequences, tables: &tables, states: &[] };
        Ok(backend.begin_step(&input)?)
    }

    /// Line and column of each row.
    fn axes(&self, rows: usize) -> Vec<[u32; 3]> {
        let mut axes = vec![[0; 3]; rows];
        for (place, picture) in self.places.iter().zip(self.pictures) {
            let first = place.end - picture.patches();
            for (axes, (line, column)) in axes[first..place.end].iter_mut().zip(picture.patch_places()) {
                *axes = [*line, *column, 0];
            }
        }
        axes
    }

    /// Embeds the patches into the residual stream.
    fn embed(&mut self) -> Result<(), Error> {
        let VisionTower { spec, weights, backend, work, .. } = &mut *self.tower;
        let (backend, rows) = (backend.as_mut(), self.places.last().map_or(0, |place| place.end));
        let values = spec.patches.frame_values();
        for (frame, linear) in weights.patches.iter().enumerate() {
            let mut pixels = vec![0.0; rows * values];
            for (place, picture) in self.places.iter().zip(self.pictures) {
                let first = place.end - picture.patches();
                picture.write_patches(frame, &mut pixels[first * values..place.end * values]);
            }
            backend.write_rows(work.pixels, &pixels)?;
            backend.matmul(work.pixels, &[job(linear, work.ops.residual(), frame > 0)])?;
        }
        let mut added = vec![0.0; rows * spec.hidden];
        for (place, picture) in self.places.iter().zip(self.pictures) {
            let rows = &mut added[place.start * spec.hidden..place.end * spec.hidden];
            weights.positions.write(picture, weights.class.as_deref(), rows);
        }
        if weights.class.is_some() || weights.positions.is_some() {
            backend.write_rows(work.ops.branch(), &added)?;
            backend.add(work.ops.residual(), work.ops.branch(), None, 1.0)?;
        }
        match &weights.norm {
            Some(norm) => Ok(backend.norm(work.ops.residual(), norm, work.ops.residual())?),
            None => Ok(()),
        }
    }

    /// All rows of the residual stream, normed.
    fn residual(&mut self, norm: Option<Norm>) -> Result<Vec<f32>, Error> {
        let VisionTower { spec, backend, work, .. } = &mut *self.tower;
        let mut from = work.ops.residual();
        if let Some(norm) = &norm {
            backend.norm(from, norm, work.ops.normed())?;
            from = work.ops.normed();
        }
        let rows = self.places.last().map_or(0, |place| place.end);
        read(backend.as_mut(), from, rows, spec.hidden)
    }

    /// The rows of each picture. `further`: the number of the projector among those of `deepstack`.
    fn project(&mut self, further: Option<usize>, features: &[Vec<f32>]) -> Result<Vec<Vec<f32>>, Error> {
        let VisionTower { spec, weights, backend, work, .. } = &mut *self.tower;
        let (backend, hidden) = (backend.as_mut(), spec.hidden);
        let projector = match further {
            Some(number) => &weights.deepstack[number].1,
            None => &weights.projector,
        };
        let (mut merged, mut counts) = (Vec::new(), Vec::with_capacity(self.places.len()));
        for place in &self.places {
            let first = place.start + usize::from(spec.skips_first);
            let of_picture = features.iter().map(|rows| &rows[first * hidden..place.end * hidden]);
            let before = merged.len();
            merge(projector.merge, hidden, &of_picture.collect::<Vec<_>>(), &mut merged);
            counts.push(merged.len() - before);
        }
        let cols = match projector.merge {
            MergeSpec::Concat { side } => side * side * hidden * features.len(),
            MergeSpec::Mean { .. } => hidden * features.len(),
        };
        backend.write_rows(work.merged, &merged)?;
        if let Some(norm) = &projector.merged_norm {
            backend.norm(work.merged, norm, work.merged)?;
        }
        match &projector.down {
            None => backend.matmul(work.merged, &[job(&projector.up, work.projected, false)])?,
            Some((activation, down)) => {
                backend.matmul(work.merged, &[job(&projector.up, work.inner, false)])?;
                backend.gate(&GateOp { gate: work.inner, up: None, up_from: 0, activation: *activation })?;
                backend.matmul(work.inner, &[job(down, work.projected, false)])?;
            }
        }
        let projected = read(backend, work.projected, merged.len() / cols, spec.out)?;
        let mut rest = projected.as_slice();
        let of_picture = |values: usize| {
            let (rows, behind) = rest.split_at(values / cols * spec.out);
            rest = behind;
            rows.to_vec()
        };
        Ok(counts.into_iter().map(of_picture).collect())
    }
}

fn rotates(layer: &model::spec::LayerSpec) -> bool {
    layer.attention().is_some_and(|attention| attention.rope.is_some())
}

fn job(linear: &Linear, out: BufferId, accumulate: bool) -> MatmulJob {
    MatmulJob { matrix: linear.matrix, out, bias: linear.bias, scale: linear.scale, accumulate }
}

fn read(backend: &mut dyn Backend, from: BufferId, rows: usize, width: usize) -> Result<Vec<f32>, Error> {
    let mut values = vec![0.0; rows * width];
    for (row, out) in values.chunks_exact_mut(width.max(1)).enumerate() {
        backend.read_row(from, row, out)?;
    }
    Ok(values)
}

/// Appends the merged rows of a picture. Rows that are merged follow each other in each of `features`.
fn merge(merge: MergeSpec, hidden: usize, features: &[&[f32]], merged: &mut Vec<f32>) {
    let count = merge.side().pow(2);
    let rows = features.first().map_or(0, |rows| rows.len() / hidden.max(1) / count);
    for row in 0..rows {
        let of_row = row * count * hidden..(row + 1) * count * hidden;
        match merge {
            MergeSpec::Concat { .. } => {
                for patch in 0..count {
                    for rows in features {
                        let at = (row * count + patch) * hidden;
                        merged.extend_from_slice(&rows[at..at + hidden]);
                    }
                }
            }
            MergeSpec::Mean { .. } => {
                for rows in features {
                    let start = merged.len();
                    merged.resize(start + hidden, 0.0);
                    let mean = &mut merged[start..];
                    for patch in rows[of_row.clone()].chunks_exact(hidden) {
                        mean.iter_mut().zip(patch).for_each(|(mean, value)| *mean += value);
                    }
                    mean.iter_mut().for_each(|mean| *mean /= count as f32);
                }
            }
        }
    }
}
