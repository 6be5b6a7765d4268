//! Products with packed matrices on a device, and rows of them as embeddings.
//!
//! A type's kernels are a source of their own, so that a worker compiles those that its model needs. Which row of a
//! matrix adds what in which order is decided by the matrix: how many tokens a call has changes no bit of any of them.
//! On 8-bit activations a segment of columns adds as [`crate::matmul`] says, then the segments' sums are added in order.

use super::pack::{BLOCK, TiledShape, UNIT_COLS};
use super::source::Source;
use super::{Argument, Compiled, CudaError, Device, DevicePtr, KernelId, Launch};
use crate::error::Error;
use crate::quant::{GgmlType, Scheme};

pub mod sources;
#[cfg(test)]
mod tests;

/// Parts of a matrix's columns that are added up by themselves, at most; as many warps share a tile.
const MAX_SEGMENTS: usize = 8;

/// Bytes of the 8-bit form of 32 activations: quants, scale, scaled sum, sums.
const QUANTISED_BLOCK: usize = 48;

/// Most products of one launch.
pub(super) const TOGETHER: usize = 3;

/// Tokens and tiles of a block of the kernel for prompts, and its threads.
const STAGED_TOKENS: usize = 128;
const STAGED_TILES: usize = 2;
const STAGED_THREADS: u32 = 256;

/// Threads of a block that reads rows of a table.
const EMBED_THREADS: usize = 64;

/// Bytes of the 8-bit form of a row of activations.
pub fn quantised_row_bytes(cols: usize) -> usize {
    cols.div_ceil(UNIT_COLS) * (UNIT_COLS / BLOCK) * QUANTISED_BLOCK
}

/// Whether products with a type may read activations of 8 bits; plain floats never do.
pub fn reads_int8(ty: GgmlType) -> bool {
    Scheme::of(ty).is_some()
}

/// A product's kernel and how many tokens a block of it takes.
#[derive(Debug, Clone, Copy)]
struct Width {
    tokens: usize,
    kernel: KernelId,
}

/// The kernels of one weight type on one device.
#[derive(Debug, Clone)]
pub struct MatmulKernels {
    ty: GgmlType,
    /// On activations of 8 bits, narrowest first; none for plain floats.
    int8: Vec<Width>,
    /// The same for prompts: a block of it makes eight times as much of what it reads.
    staged: Option<KernelId>,
    multiprocessors: usize,
    /// On activations of f32, narrowest first.
    exact: Vec<Width>,
    embed: KernelId,
}

/// A packed matrix, or one for each expert, on a device.
#[derive(Debug, Clone, Copy)]
pub struct Matrix {
    pub shape: TiledShape,
    /// What [`TiledShape::pack`] gave.
    pub start: DevicePtr,
}

/// Rows of activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activations {
    /// `[rows][cols]`
    F32(DevicePtr),
    /// Rows of [`quantised_row_bytes`].
    Int8(DevicePtr),
}

/// Which matrix of a tensor each token is multiplied with.
#[derive(Debug, Clone, Copy)]
pub enum Experts {
    One,
    /// `[tokens]` u32: the expert of each. Weights are read for each token.
    Each(DevicePtr),
    /// Tokens by expert, which share what is read.
    Listed {
        /// `[experts + 1]` u32: first entry of each expert in `list`, and their number.
        starts: DevicePtr,
        /// `[tokens]` u32.
        list: DevicePtr,
        /// Most tokens that one expert can have.
        most: usize,
    },
}

/// `out[token] = [out[token] +] (scale * matrix x[token / share] + bias)`
#[derive(Debug, Clone, Copy)]
pub struct Product<'a> {
    pub matrix: &'a Matrix,
    /// Rows of the matrix's columns.
    pub x: Activations,
    /// Rows of `out`.
    pub tokens: usize,
    /// Tokens that have a row of `x` in common; 1 if each has its own.
    pub share: usize,
    pub experts: Experts,
    pub scale: f32,
    /// f32 for each row of the matrix.
    pub bias: Option<DevicePtr>,
    /// Whether the result is added to what is there.
    pub accumulate: bool,
    /// `[tokens][ld]` f32
    pub out: DevicePtr,
    /// Values from one token's outputs to the next's.
    pub ld: usize,
}

/// `out[row] = [out[row] +] scale * table[index[row]]`
#[derive(Debug, Clone, Copy)]
pub struct Embedding<'a> {
    /// The first expert, if there are several.
    pub table: &'a Matrix,
    /// `[rows]` u32, all below the table's rows: nobody looks.
    pub index: DevicePtr,
    /// Rows of `out`.
    pub rows: usize,
    /// Multiplies the table's rows.
    pub scale: f32,
    /// Whether the result is added to what is there.
    pub accumulate: bool,
    /// `[rows][cols]` f32
    pub out: DevicePtr,
}

impl Product<'_> {
    /// What kernels take of a product that is not there.
    const NONE: [Argument; 7] = [Argument(0); 7];

    /// Whether both can be done by one launch: all that they share is the same, and neither has experts.
    pub(super) fn goes_with(&self, other: &Self) -> bool {
        let plain = |product: &Self| matches!(product.experts, Experts::One);
        let shared = |product: &Self| {
            let shape = &product.matrix.shape;
            (product.x, product.tokens, product.share, shape.ty(), shape.cols())
        };
        plain(self) && plain(other) && shared(self) == shared(other)
    }

    /// As kernels take what belongs to one of several products.
    fn arguments(&self) -> Result<[Argument; 7], CudaError> {
        Ok([
            self.matrix.start.into(),
            small(self.matrix.shape.rows())?.into(),
            self.scale.into(),
            self.bias.unwrap_or_default().into(),
            u32::from(self.accumulate).into(),
            self.out.into(),
            small(self.ld)?.into(),
        ])
    }
}

impl MatmulKernels {
    /// What has to be compiled for a type.
    ///
    /// # Errors
    /// [`Error::NoMatmul`] for a type without kernels.
    pub fn source(ty: GgmlType) -> Result<&'static Source, Error> {
        sources::of(ty).ok_or(Error::NoMatmul { ty: ty.name() })
    }

    /// Loads what was compiled of the type's source.
    ///
    /// # Errors
    /// [`CudaError::NoKernel`] for what was compiled of another source; what the device says.
    pub fn load(device: &mut dyn Device, compiled: &Compiled, ty: GgmlType) -> Result<Self, CudaError> {
        let missing =
            || CudaError::NoKernel { name: ty.name().into(), source_name: compiled.source_name.clone() };
        let source = sources::of(ty).ok_or_else(missing)?;
        let (kernels, multiprocessors) = (device.load(compiled, source.kernels)?, device.multiprocessors());
        let widths = |tokens: &[usize], kernels: &[KernelId]| -> Vec<Width> {
            tokens.iter().zip(kernels).map(|(&tokens, &kernel)| Width { tokens, kernel }).collect()
        };
        match *kernels {
            [embed, one, four] => {
                let exact = widths(&[1, 4], &[one, four]);
                Ok(Self { ty, int8: Vec::new(), staged: None, multiprocessors, exact, embed })
            }
            [embed, one, four, eight, many, staged, exact] => {
                let int8 = widths(&[1, 4, 8, 32], &[one, four, eight, many]);
                let staged = Some(staged);
                Ok(Self { ty, int8, staged, multiprocessors, exact: widths(&[2], &[exact]), embed })
            }
            _ => Err(missing()),
        }
    }

    /// Multiplies, in one launch: up to three products of the same rows with matrices of one type, without experts if there
    /// are several. What a product gives does not depend on the others.
    ///
    /// # Errors
    /// [`CudaError::Invalid`] for products that no launch has in common, a matrix of another type, activations of 8 bits
    /// with plain floats, sizes beyond 32 bits; what the device says.
    pub fn multiply(&self, device: &mut dyn Device, products: &[Product<'_>]) -> Result<(), CudaError> {
        let [first, others @ ..] = products else { return Ok(()) };
        if products.len() > TOGETHER || !others.iter().all(|other| first.goes_with(other)) {
            return Err(CudaError::Invalid { what: "products that no launch has in common".into() });
        }
        for product in products {
            self.check(product.matrix)?;
        }
        let Product { matrix, tokens, .. } = *first;
        if tokens == 0 {
            return Ok(());
        }
        let (x, widths) = match first.x {
            Activations::F32(x) => (x, &self.exact),
            Activations::Int8(x) => (x, &self.int8),
        };
        let (none, shape) = (DevicePtr::default(), &matrix.shape);
        let (experts, starts, list, most, depth) = match first.experts {
            Experts::One => (none, none, none, tokens, 1),
            Experts::Each(experts) => (experts, none, none, 1, 1),
            Experts::Listed { starts, list, most } => (none, starts, list, most, shape.experts()),
        };
        // As narrow as holds all tokens, else the widest. Who has experts one by one has blocks of one.
        let width = widths.iter().find(|width| width.tokens >= most).or(widths.last());
        let one_by_one = matches!(first.experts, Experts::Each(_));
        let width = width.filter(|width| !one_by_one || width.tokens == 1).ok_or_else(|| {
            CudaError::Invalid { what: format!("{} has no such product of these activations", self.ty) }
        })?;
        let columns = if one_by_one { tokens } else { most }.div_ceil(width.tokens);
        let (segment, segments) = segments(shape.cols());
        let mut arguments: Vec<Argument> = Vec::with_capacity(30);
        for place in 0..TOGETHER {
            arguments.extend(products.get(place).map_or(Ok(Product::NONE), Product::arguments)?);
        }
        let shared: [Argument; 9] = [
            small(shape.tile_bytes())?.into(),
            experts.into(),
            starts.into(),
            list.into(),
            x.into(),
            small(first.share.max(1))?.into(),
            small(tokens)?.into(),
            small(shape.cols())?.into(),
            small(segment)?.into(),
        ];
        arguments.extend(shared);
        let tiles: usize = products.iter().map(|product| product.matrix.shape.tiles()).sum();
        // An expert has a few of the tokens, and nobody here knows how many.
        let int8 = matches!((first.x, first.experts), (Activations::Int8(_), Experts::One));
        let staged = self.staged.filter(|_| int8);
        let (kernel, grid, threads) = match staged {
            Some(staged) if self.is_for_staged(most, tiles) => {
                (staged, [most.div_ceil(STAGED_TOKENS), tiles.div_ceil(STAGED_TILES), depth], STAGED_THREADS)
            }
            _ => (width.kernel, [columns, tiles, depth], small(segments * 32)?),
        };
        device.launch(&Launch {
            kernel,
            grid: [small(grid[0])?, small(grid[1])?, small(grid[2])?],
            block: [threads, 1, 1],
            shared_bytes: 0,
            arguments: &arguments,
        })
    }

    /// Whether so many tokens are multiplied by the kernel for prompts: where more than half of those of a block are there,
    /// and there are blocks for all of the device.
    fn is_for_staged(&self, tokens: usize, tiles: usize) -> bool {
        let blocks = tokens.div_ceil(STAGED_TOKENS) * tiles.div_ceil(STAGED_TILES);
        tokens > STAGED_TOKENS / 2 && blocks >= self.multiprocessors
    }

    /// Reads rows of a table.
    ///
    /// # Errors
    /// [`CudaError::Invalid`] for a table of another type and sizes beyond 32 bits; what the device says.
    pub fn embed(&self, device: &mut dyn Device, embedding: &Embedding<'_>) -> Result<(), CudaError> {
        let Embedding { table, index, rows, scale, accumulate, out } = *embedding;
        self.check(table)?;
        if rows == 0 {
            return Ok(());
        }
        // Of a quantised row a thread reads a unit.
        let cols = table.shape.cols();
        let threads = if self.int8.is_empty() { cols } else { cols.div_ceil(UNIT_COLS) };
        device.launch(&Launch {
            kernel: self.embed,
            grid: [small(rows)?, small(threads.div_ceil(EMBED_THREADS))?, 1],
            block: [EMBED_THREADS as u32, 1, 1],
            shared_bytes: 0,
            arguments: &[
                table.start.into(),
                small(table.shape.tile_bytes())?.into(),
                small(cols)?.into(),
                index.into(),
                scale.into(),
                u32::from(accumulate).into(),
                out.into(),
            ],
        })
    }

    fn check(&self, matrix: &Matrix) -> Result<(), CudaError> {
        match matrix.shape.ty() == self.ty {
            true => Ok(()),
            false => {
                let what = format!("kernels of {} on a matrix of {}", self.ty, matrix.shape.ty());
                Err(CudaError::Invalid { what })
            }
        }
    }
}

/// Units of a segment, and segments, of a matrix of so many columns.
fn segments(cols: usize) -> (usize, usize) {
    let units = cols.div_ceil(UNIT_COLS);
    let segment = units.div_ceil(MAX_SEGMENTS);
    (segment, units.div_ceil(segment))
}

/// A size as kernels take it.
pub(super) fn small(size: usize) -> Result<u32, CudaError> {
    u32::try_from(size).map_err(|_| CudaError::Invalid { what: format!("a size of {size}, beyond 32 bits") })
}
