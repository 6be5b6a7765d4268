//! Products with packed matrices on a device, and embedding lookups in them.
//!
//! Each weight type has its own source, so that a worker compiles only the types of its model. The matrix
//! alone decides the order of additions in a row: the number of tokens in a call changes no bit of any
//! token's result. On 8-bit activations a segment of columns is summed as [`kernels::matmul`] defines; then
//! the segments' sums are added in order.

use super::pack::{BLOCK, TiledShape, UNIT_COLS};
use super::source::{self, Source};
use super::{Argument, Compiled, CudaError, Device, DevicePtr, KernelId, Launch};
use kernels::Error;
use kernels::quant::{GgmlType, Scheme};

#[cfg(test)]
mod tests;

/// Maximum number of segments: ranges of a matrix's columns that are summed separately. Each segment is one
/// warp of a tile's block.
const MAX_SEGMENTS: usize = 8;

/// Bytes of the 8-bit form of 32 activations: quants, scale, scaled sum, sums.
const QUANTISED_BLOCK: usize = 48;

/// Maximum number of products of one launch.
pub(super) const TOGETHER: usize = 3;

/// Maximum number of tokens of a group of one expert.
pub(super) const GROUP_TOKENS: usize = 32;

/// Tokens of a block of the kernel for prompts.
pub(super) const STAGED_TOKENS: usize = 128;
/// Tiles of a block of the kernel for prompts.
const STAGED_TILES: usize = 2;
/// Threads of a block of the kernel for prompts.
const STAGED_THREADS: u32 = 256;

/// Threads of a block that reads rows of a table.
const EMBED_THREADS: usize = 64;

/// Returns the bytes of the 8-bit form of a row of activations.
pub fn quantised_row_bytes(cols: usize) -> usize {
    cols.div_ceil(UNIT_COLS) * (UNIT_COLS / BLOCK) * QUANTISED_BLOCK
}

/// Whether products with a type may read 8-bit activations. Plain floats never do.
pub fn reads_int8(ty: GgmlType) -> bool {
    Scheme::of(ty).is_some_and(|scheme| scheme.is_integer())
}

/// A product's kernel with the number of tokens per block.
#[derive(Debug, Clone, Copy)]
struct Width {
    tokens: usize,
    kernel: KernelId,
}

/// Kernels of one weight type on one device.
#[derive(Debug, Clone)]
pub struct MatmulKernels {
    ty: GgmlType,
    /// Kernels for 8-bit activations, narrowest first. Empty for plain floats.
    int8: Vec<Width>,
    /// Kernel for prompts on 8-bit activations. A block of it computes eight times as many results from
    /// each value that it reads.
    staged: Option<KernelId>,
    multiprocessors: usize,
    /// Kernels for f32 activations, narrowest first.
    exact: Vec<Width>,
    embed: KernelId,
}

/// A packed matrix, or one for each expert, on a device.
#[derive(Debug, Clone, Copy)]
pub struct Matrix {
    pub shape: TiledShape,
    /// Start of the bytes from [`TiledShape::pack`].
    pub start: DevicePtr,
}

/// Rows of activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activations {
    /// `[rows][cols]`
    F32(DevicePtr),
    /// Rows of [`quantised_row_bytes`] bytes.
    Int8(DevicePtr),
}

/// Selects the matrix that each token is multiplied with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Experts {
    One,
    /// `[tokens]` u32: the expert of each token. Weights are read separately for each token.
    Each(DevicePtr),
    /// Groups of tokens of one expert, which share the weights that are read.
    Listed {
        /// `[count]` of two u32: the first entry of the group in `list`; the expert times 256 plus the number of its
        /// entries, 0 to `most`.
        groups: DevicePtr,
        count: usize,
        /// `[tokens]` u32.
        list: DevicePtr,
        /// Maximum number of entries of a group, 1 to 32.
        most: usize,
    },
}

/// `out[token] = [out[token] +] (scale * matrix x[token / share] + bias)`
#[derive(Debug, Clone, Copy)]
pub struct Product<'a> {
    pub matrix: &'a Matrix,
    /// Rows of as many values as the matrix has columns.
    pub x: Activations,
    /// Rows of `out`.
    pub tokens: usize,
    /// Tokens that share one row of `x`; 1 if each has its own.
    pub share: usize,
    pub experts: Experts,
    pub scale: f32,
    /// `[rows of the matrix]` f32.
    pub bias: Option<DevicePtr>,
    /// Whether the result is added to `out`.
    pub accumulate: bool,
    /// `[tokens][ld]` f32
    pub out: DevicePtr,
    /// Values between the outputs of two consecutive tokens.
    pub ld: usize,
}

/// `out[row] = [out[row] +] scale * table[index[row]]`
#[derive(Debug, Clone, Copy)]
pub struct Embedding<'a> {
    /// The first matrix is used if there are several.
    pub table: &'a Matrix,
    /// `[rows]` u32. All must be less than the table's rows; they are not checked.
    pub index: DevicePtr,
    /// Rows of `out`.
    pub rows: usize,
    pub scale: f32,
    /// Whether the result is added to `out`.
    pub accumulate: bool,
    /// `[rows][cols]` f32
    pub out: DevicePtr,
}

impl Product<'_> {
    /// Arguments of an unused product.
    const NONE: [Argument; 7] = [Argument(0); 7];

    /// Whether one launch can compute both: equal activations, tokens, experts, type and columns.
    pub(super) fn goes_with(&self, other: &Self) -> bool {
        let shared = |product: &Self| {
            let shape = &product.matrix.shape;
            (
                product.x,
                product.tokens,
                product.share,
                product.experts,
                shape.ty(),
                shape.cols(),
                shape.experts(),
            )
        };
        shared(self) == shared(other)
    }

    /// Returns the arguments that are specific to one of several products.
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
    /// Returns the source of a type.
    ///
    /// # Errors
    /// [`Error::NoMatmul`] for a type without kernels.
    pub fn source(ty: GgmlType) -> Result<&'static Source, Error> {
        source::matmul::of(ty).ok_or(Error::NoMatmul { ty: ty.name() })
    }

    /// Loads the compiled source of the type.
    ///
    /// # Errors
    /// [`CudaError::NoKernel`] for another compiled source; errors of the device.
    pub fn load(device: &mut dyn Device, compiled: &Compiled, ty: GgmlType) -> Result<Self, CudaError> {
        let missing =
            || CudaError::NoKernel { name: ty.name().into(), source_name: compiled.source_name.clone() };
        let source = source::matmul::of(ty).ok_or_else(missing)?;
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

    /// Multiplies in one launch. Up to three products of the same rows with matrices of one type are
    /// possible. A product's result does not depend on the others.
    ///
    /// # Errors
    /// [`CudaError::Invalid`] for products that cannot share a launch, a matrix of another type, 8-bit
    /// activations with plain floats, and sizes beyond 32 bits; errors of the device.
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
        let (experts, groups, list, together) = match first.experts {
            Experts::One => (none, none, none, tokens),
            Experts::Each(experts) => (experts, none, none, 1),
            // Kernels for one token know no groups.
            Experts::Listed { groups, list, most, .. } => (none, groups, list, most.max(2)),
        };
        // The narrowest kernel that holds all tokens, else the widest. With [`Experts::Each`], blocks have
        // one token.
        let width = widths.iter().find(|width| width.tokens >= together).or(widths.last());
        let pairwise = matches!(first.experts, Experts::Each(_));
        let width = width.filter(|width| !pairwise || width.tokens == 1).ok_or_else(|| {
            CudaError::Invalid { what: format!("{} has no such product of these activations", self.ty) }
        })?;
        let (columns, parts) = match first.experts {
            Experts::Listed { count, most, .. } => (count, most.div_ceil(width.tokens)),
            _ => (tokens.div_ceil(width.tokens), 1),
        };
        let (segment, segments) = segments(shape.cols());
        let mut arguments: Vec<Argument> = Vec::with_capacity(30);
        for index in 0..TOGETHER {
            arguments.extend(products.get(index).map_or(Ok(Product::NONE), Product::arguments)?);
        }
        let shared: [Argument; 9] = [
            small(shape.tile_bytes())?.into(),
            experts.into(),
            groups.into(),
            list.into(),
            x.into(),
            small(first.share.max(1))?.into(),
            small(tokens)?.into(),
            small(shape.cols())?.into(),
            small(segment)?.into(),
        ];
        arguments.extend(shared);
        let tiles: usize = products.iter().map(|product| product.matrix.shape.tiles()).sum();
        // Tokens for each matrix, and columns of blocks, if the kernel for prompts is used.
        let staged_columns = match (first.x, first.experts) {
            (Activations::Int8(_), Experts::One) => Some((tokens, tokens.div_ceil(STAGED_TOKENS))),
            (Activations::Int8(_), Experts::Listed { count, most: GROUP_TOKENS, .. }) => {
                // A block takes four whole groups.
                let columns = count / (STAGED_TOKENS / GROUP_TOKENS);
                (columns * STAGED_TOKENS == count * GROUP_TOKENS)
                    .then_some((tokens / shape.experts(), columns))
            }
            _ => None,
        };
        let staged_columns = staged_columns.filter(|&(tokens, columns)| {
            let blocks = columns * tiles.div_ceil(STAGED_TILES);
            tokens > STAGED_TOKENS / 2 && blocks >= self.multiprocessors
        });
        let (kernel, grid, threads) = match (self.staged, staged_columns) {
            (Some(staged), Some((_, columns))) => {
                (staged, [columns, tiles.div_ceil(STAGED_TILES), 1], STAGED_THREADS)
            }
            _ => (width.kernel, [columns, tiles, parts], small(segments * 32)?),
        };
        device.launch(&Launch {
            kernel,
            grid: [small(grid[0])?, small(grid[1])?, small(grid[2])?],
            block: [threads, 1, 1],
            shared_bytes: 0,
            arguments: &arguments,
        })
    }

    /// Reads rows of a table.
    ///
    /// # Errors
    /// [`CudaError::Invalid`] for a table of another type and for sizes beyond 32 bits; errors of the
    /// device.
    pub fn embed(&self, device: &mut dyn Device, embedding: &Embedding<'_>) -> Result<(), CudaError> {
        let Embedding { table, index, rows, scale, accumulate, out } = *embedding;
        self.check(table)?;
        if rows == 0 {
            return Ok(());
        }
        // A thread reads one unit of a quantised row.
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

/// Returns (units per segment, segments) for a matrix of `cols` columns.
fn segments(cols: usize) -> (usize, usize) {
    let units = cols.div_ceil(UNIT_COLS);
    let segment = units.div_ceil(MAX_SEGMENTS);
    (segment, units.div_ceil(segment))
}

/// Converts a size to the u32 that kernels take.
pub(super) fn small(size: usize) -> Result<u32, CudaError> {
    u32::try_from(size).map_err(|_| CudaError::Invalid { what: format!("a size of {size}, beyond 32 bits") })
}
