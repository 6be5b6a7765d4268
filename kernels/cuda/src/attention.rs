//! Paged attention on a device: `softmax(scale * q k^T) v` over the visible keys of each row.

use super::kv::KvBlock;
use super::source::{AttentionKind, CacheSource, Source};
use super::step::{StepPointers, has_several};
use super::{Argument, Compiled, CudaError, Device, DevicePtr, KernelId, Launch};
use kernels::Error;
use kernels::backend::{KvShape, KvType, StepSequence};
use std::ops::Range;

#[cfg(test)]
mod tests;

/// Keys of a split. Splits begin at multiples of this position. As in `common.cuh`.
pub(super) const SPLIT: usize = 512;

/// Marker in place of a count of common splits, for a row of the same sequence as the row before. As in
/// `common.cuh`.
pub(super) const SAME: u32 = u32::MAX;

/// Window of a row that sees every key.
const ALL: usize = i32::MAX as usize;

/// Smallest size of the scratch memory for partial results, if a single row does not need more.
const SCRATCH_BYTES: usize = 32 << 20;

/// Maximum number of blocks of a grid's second and third dimension.
const MAX_GRID: usize = 65_535;

/// Head widths that the kernels are compiled for.
const WIDTHS: [usize; 4] = [64, 128, 256, 512];
const LATENT_WIDTH: usize = 768;

/// Kernels for layers of one shape.
#[derive(Debug, Clone)]
pub struct AttentionKernels {
    shape: KvShape,
    block: KvBlock,
    /// Kernels with the query vectors that a block processes, ascending.
    attend: Vec<(usize, KernelId)>,
    /// Kernel that goes through all splits, with its query vectors.
    prompt: Option<(usize, KernelId)>,
    combine: KernelId,
    multiprocessors: usize,
    /// Query heads that a block processes together. They share one key/value head.
    together: usize,
    /// Maximum number of query vectors of a block.
    max_vectors: usize,
}

#[derive(Debug, Clone, Copy)]
pub struct AttentionCall<'a> {
    /// `[rows][heads * head_dim]`
    pub q: DevicePtr,
    /// `[rows][heads * v_head_dim]`
    pub out: DevicePtr,
    /// [`AttentionKernels::scratch_bytes`] bytes for partial results.
    pub scratch: DevicePtr,
    pub arena: DevicePtr,
    pub step: &'a StepPointers,
    pub sequences: &'a [StepSequence],
    pub group: usize,
    /// Byte offset of the layer inside a block.
    pub layer_offset: usize,
    /// `[heads]`: attention sinks, an additional logit of each head without a value.
    pub sinks: Option<DevicePtr>,
    pub scale: f32,
}

/// Rows of one launch, as indices into the step's order.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Rows {
    rows: Range<usize>,
    /// Rows that a block of threads is responsible for.
    tile: usize,
    /// Maximum number of rows that a block of threads processes together. With a `tile` of 1, these include
    /// rows of other blocks of threads whose caches begin with the same blocks.
    join: usize,
    /// Maximum number of splits of a row.
    splits: usize,
    /// Maximum number of splits of a block's rows together.
    grid_splits: usize,
    /// Whether a block of threads goes through all splits of its rows.
    prompt: bool,
}

impl AttentionKernels {
    /// Returns the source for a shape.
    ///
    /// # Errors
    /// As [`KvBlock::new`]; [`Error::EmptyWindow`], [`Error::Unsupported`] for a window on both sides of wide heads.
    pub fn source(shape: &KvShape) -> Result<&'static Source, Error> {
        let types = check(shape)?.type_numbers();
        let (width, kind) = match shape.latent {
            true => (LATENT_WIDTH, AttentionKind::Latent),
            false if is_around(shape) => (WIDTHS[width_class(shape)], AttentionKind::TwoSided),
            false => (WIDTHS[width_class(shape)], AttentionKind::Plain),
        };
        Ok(CacheSource::Attention { types, width, kind }.get())
    }

    /// Loads the compiled [`Self::source`].
    ///
    /// # Errors
    /// [`CudaError::NoKernel`] for another compiled source, [`CudaError::Invalid`] for an unsupported
    /// shape; errors of the device.
    pub fn load(device: &mut dyn Device, compiled: &Compiled, shape: KvShape) -> Result<Self, CudaError> {
        let source = Self::source(&shape).map_err(not_served)?;
        let block = KvBlock::new(&shape).map_err(not_served)?;
        let (kernels, multiprocessors) = (device.load(compiled, source.kernels)?, device.multiprocessors());
        let missing =
            || CudaError::NoKernel { name: "attend".into(), source_name: compiled.source_name.clone() };
        let ((sizes, of_prompt), mut kernels) = (vectors(&shape), kernels.into_iter());
        let max_vectors = *sizes.last().ok_or_else(missing)?;
        let combine = kernels.next().ok_or_else(missing)?;
        let attend = sizes.iter().copied().zip(kernels.by_ref()).collect();
        let prompt = of_prompt.zip(kernels.next());
        let group = shape.heads / shape.kv_heads;
        let together = group.div_ceil(group.div_ceil(max_vectors));
        Ok(Self { shape, block, attend, prompt, combine, multiprocessors, together, max_vectors })
    }

    /// Returns the layout of the layer's blocks.
    pub fn block(&self) -> &KvBlock {
        &self.block
    }

    /// Returns the bytes of device memory that a call needs besides its buffers, for sequences of at most
    /// `positions`.
    pub fn scratch_bytes(&self, positions: usize) -> usize {
        let positions = positions.max(1);
        let start = self.window().map_or(0, |window| positions.saturating_sub(window));
        self.row_scratch(splits(start..positions).len()).max(SCRATCH_BYTES)
    }

    /// Processes the step's rows. [`AttentionCall::scratch`] has `scratch_bytes` bytes.
    ///
    /// # Errors
    /// [`CudaError::Invalid`] for too little scratch memory; errors of the device.
    pub fn launch(
        &self,
        device: &mut dyn Device,
        call: &AttentionCall<'_>,
        scratch_bytes: usize,
    ) -> Result<(), CudaError> {
        for rows in self.plan(call.sequences, scratch_bytes)? {
            self.launch_rows(device, call, &rows)?;
        }
        Ok(())
    }

    /// Splits the step into launches. Sequences of one row and longer ones are not mixed, and the partial
    /// results of a launch fit the scratch memory. A row's result does not depend on the split into
    /// launches.
    fn plan(&self, sequences: &[StepSequence], scratch_bytes: usize) -> Result<Vec<Rows>, CudaError> {
        let mut launches = Vec::new();
        for run in sequences.chunk_by(|a, b| has_several(a) == has_several(b)) {
            let several = has_several(&run[0]);
            if several && let Some(prompt) = self.whole_prompt(run) {
                launches.push(prompt);
                continue;
            }
            let join = (self.max_vectors / self.together).max(1);
            let (tile, join) = match self.attend.len() {
                _ if several => (join, join),
                1 => (1, join),
                // Kernels by lanes do the work of every vector that they have room for, present or not.
                _ => (1, 1),
            };
            let rows = run.iter().flat_map(|sequence| {
                let end = sequence.context + sequence.rows.len();
                sequence.rows.clone().map(move |row| {
                    let own = sequence.context + (row - sequence.rows.start) + 1;
                    (row, splits(self.seen(own, end)).len())
                })
            });
            // The step orders single rows itself, so any of them may be at any index.
            let max_splits =
                if several { 0 } else { rows.clone().map(|(_, splits)| splits).max().unwrap_or(0) };
            let rows = rows.map(|(row, splits)| (row, splits.max(max_splits)));
            let mut open: Option<Rows> = None;
            for (row, splits) in rows {
                let fits = |open: &Rows| {
                    let joined_splits = open.splits.max(splits);
                    let rows = open.rows.len() + 1;
                    let held = if joined_splits > 1 { rows * self.row_scratch(joined_splits) } else { 0 };
                    held <= scratch_bytes && rows <= MAX_GRID
                };
                match &mut open {
                    Some(open) if fits(open) => {
                        open.rows.end = row + 1;
                        open.splits = open.splits.max(splits);
                    }
                    _ => {
                        let next =
                            Rows { rows: row..row + 1, tile, join, splits, grid_splits: 0, prompt: false };
                        if splits > 1 && self.row_scratch(splits) > scratch_bytes {
                            let what =
                                format!("{scratch_bytes} bytes of scratch for {splits} splits of a row");
                            return Err(CudaError::Invalid { what });
                        }
                        launches.extend(open.replace(next));
                    }
                }
            }
            launches.extend(open);
        }
        for launch in &mut launches {
            // The windows of a block's rows begin in at most two splits.
            let slides = usize::from(self.shape.window.is_some() && launch.tile > 1);
            launch.grid_splits = launch.splits + slides;
        }
        Ok(launches)
    }

    /// Returns a launch of [`Self::prompt`] for sequences of several rows, if its blocks occupy at least half of
    /// the multiprocessors. With fewer, splits that are processed at the same time take less time.
    fn whole_prompt(&self, run: &[StepSequence]) -> Option<Rows> {
        let (vectors, _) = self.prompt?;
        let rows = run.first()?.rows.start..run.last()?.rows.end;
        let tile = (vectors / self.together).max(1);
        let blocks = rows.len().div_ceil(tile) * self.head_groups();
        (2 * blocks >= self.multiprocessors).then_some(Rows {
            rows,
            tile,
            join: tile,
            splits: 1,
            grid_splits: 1,
            prompt: true,
        })
    }

    /// Returns the number of groups of query heads that a block processes together.
    fn head_groups(&self) -> usize {
        let KvShape { heads, kv_heads, .. } = self.shape;
        kv_heads * (heads / kv_heads).div_ceil(self.together)
    }

    fn launch_rows(
        &self,
        device: &mut dyn Device,
        call: &AttentionCall<'_>,
        launch: &Rows,
    ) -> Result<(), CudaError> {
        let KvShape { heads, kv_heads, head_dim, v_head_dim, causal, .. } = self.shape;
        let rows = launch.rows.len();
        let sums_bytes = rows * heads * launch.splits * 2 * size_of::<f32>();
        let vectors = self.together * launch.tile.min(rows);
        let fits = self.attend.iter().find(|(size, _)| *size >= vectors).or(self.attend.last());
        let Some((_, kernel)) = self.prompt.as_ref().filter(|_| launch.prompt).or(fits) else {
            return Err(CudaError::Invalid { what: "attention without a kernel".into() });
        };
        let number = |n: usize| Argument::from(n as u32);
        let arguments = [
            call.q.into(),
            call.out.into(),
            call.scratch.offset(sums_bytes).into(),
            call.scratch.into(),
            call.arena.into(),
            call.step.tables.into(),
            call.step.table_starts(call.group).into(),
            call.step.positions.into(),
            call.step.row_sequences.into(),
            call.step.sequence_ends.into(),
            call.step.order(call.group).into(),
            call.step.common(call.group).into(),
            call.sinks.unwrap_or_default().into(),
            Argument::from(call.layer_offset as u64),
            number(launch.rows.start),
            number(rows),
            number(launch.tile.min(rows)),
            number(launch.join),
            number(heads),
            number(kv_heads),
            number(self.together),
            number(head_dim),
            number(v_head_dim),
            self.block.block_shift().into(),
            number(self.block.k_stripe()),
            number(self.block.v_stripe()),
            (self.window().unwrap_or(ALL).min(ALL) as u32).into(),
            u32::from(causal).into(),
            number(launch.splits),
            (call.scale * std::f32::consts::LOG2_E).into(),
        ];
        let tiles = rows.div_ceil(launch.tile.min(rows));
        device.launch(&Launch {
            kernel: *kernel,
            grid: [tiles as u32, self.head_groups() as u32, launch.grid_splits as u32],
            block: [128, 1, 1],
            shared_bytes: 0,
            arguments: &arguments,
        })?;
        if launch.splits > 1 {
            device.launch(&Launch {
                kernel: self.combine,
                grid: [rows as u32, heads as u32, 1],
                block: [128, 1, 1],
                shared_bytes: 0,
                arguments: &arguments,
            })?;
        }
        Ok(())
    }

    /// Returns the number of keys that a row sees, on both sides if it sees those around it.
    fn window(&self) -> Option<usize> {
        let around = is_around(&self.shape);
        self.shape.window.map(|window| if around { window.saturating_mul(2) - 1 } else { window })
    }

    /// Returns the positions that a row sees whose position is before `own`, in a sequence that ends at `end`.
    fn seen(&self, own: usize, end: usize) -> Range<usize> {
        let KvShape { window, causal, .. } = self.shape;
        let start = window.map_or(0, |window| own.saturating_sub(window));
        match (causal, window) {
            (true, _) => start..own,
            (false, None) => start..end,
            (false, Some(window)) => start..own.saturating_add(window - 1).min(end),
        }
    }

    /// Returns the bytes of partial results of a row with `splits` splits.
    fn row_scratch(&self, splits: usize) -> usize {
        self.shape.heads * splits * (self.shape.v_head_dim + 2) * size_of::<f32>()
    }
}

/// Returns the splits that have some of the positions `keys`.
fn splits(keys: Range<usize>) -> Range<usize> {
    keys.start / SPLIT..keys.end.div_ceil(SPLIT)
}

fn not_served(error: Error) -> CudaError {
    CudaError::Invalid { what: error.to_string() }
}

fn check(shape: &KvShape) -> Result<KvBlock, Error> {
    let block = KvBlock::new(shape)?;
    match (shape.window, shape.causal) {
        (Some(0), _) => Err(Error::EmptyWindow),
        (Some(_), false) if shape.latent || width_class(shape) > 0 => {
            Err(Error::Unsupported { what: "a window on both sides of heads wider than 64" })
        }
        _ => Ok(block),
    }
}

/// Whether a row sees the keys around it, and no others.
fn is_around(shape: &KvShape) -> bool {
    !shape.causal && shape.window.is_some()
}

/// Returns the index of the narrowest of [`WIDTHS`] that fits keys and values.
fn width_class(shape: &KvShape) -> usize {
    let widest = shape.head_dim.max(shape.v_head_dim);
    WIDTHS.iter().position(|width| *width >= widest).unwrap_or(WIDTHS.len() - 1)
}

/// Returns the query vectors per block of each of the shape's kernels for one split, by lanes as many as the
/// registers allow, and of the kernel for prompts.
fn vectors(shape: &KvShape) -> (&'static [usize], Option<usize>) {
    if shape.latent {
        return (&[1, 2], None);
    }
    match (shape.kv_type == KvType::F16.into(), WIDTHS[width_class(shape)]) {
        (_, 64) if is_around(shape) => (&[1, 2, 4], None),
        (true, 64 | 128) => (&[16], Some(64)),
        (true, 256) => (&[16], Some(32)),
        (_, 512) => (&[1, 2, 4], None),
        _ => (&[1, 2, 4, 8], None),
    }
}
