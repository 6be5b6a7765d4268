//! Products with packed matrices on a device, and embedding lookups in them.
//!
//! Each weight type has its own source, so that a worker compiles only the types of its model. The matrix
//! alone decides the order of additions in a row: the number of tokens in a call changes no bit of any
//! token's result. On int8 activations a segment of columns is summed as [`kernels::matmul`] defines; then
//! the segments' sums are added in order. On MXFP8, NVFP4 and bf16 activations a matrix product of a warp adds each 32,
//! 64 or 16 columns of a segment to the sum of those before.

use super::pack::{BLOCK, TiledShape, UNIT_COLS};
use super::source::{self, Source};
use super::{Argument, Compiled, CudaError, Device, DevicePtr, KernelId, Launch};
use kernels::Error;
use kernels::backend::ActivationMode;
use kernels::quant::{GgmlType, Scheme};

#[cfg(test)]
mod tests;

/// Maximum number of segments: ranges of a matrix's columns that are summed separately. Each segment is one
/// warp of a tile's block.
const MAX_SEGMENTS: usize = 8;

/// Bytes of the int8 form of 32 activations: quants, scale, scaled sum, sums.
const QUANTISED_BLOCK: usize = 48;

/// Maximum number of products of one launch.
pub(super) const TOGETHER: usize = 3;

/// Maximum number of tokens of a group of one expert.
pub(super) const GROUP_TOKENS: usize = 32;

/// Tokens of a block of the kernel for prompts.
pub(super) const STAGED_TOKENS: usize = 128;
/// Tiles of a block of the kernel for prompts.
const STAGED_TILES: usize = 2;
/// The same with bf16 activations.
const BF16_TILES: usize = 4;
/// Threads of a block of the kernel for prompts.
const STAGED_THREADS: u32 = 256;

/// Threads of a block that reads rows of a table.
const EMBED_THREADS: usize = 64;

/// Returns the bytes of the int8 form of a row of activations.
pub fn quantised_row_bytes(cols: usize) -> usize {
    Quantised::Int8.row_bytes(cols)
}

/// A form of activations with fewer bits than f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quantised {
    /// Integers with an f32 scale for 32 of them.
    Int8,
    /// E4M3 with a UE8M0 scale for 32 of them.
    Mxfp8,
    /// bf16.
    Bf16,
    /// E2M1 with an E4M3 scale for 16 of them, and a power of two for the row.
    Nvfp4,
}

impl Quantised {
    /// Returns the form that products with a type read. `None`: f32.
    pub fn of(mode: ActivationMode, ty: GgmlType) -> Option<Self> {
        let int8 = || reads_int8(ty).then_some(Self::Int8);
        match mode {
            ActivationMode::F32 => None,
            ActivationMode::Int8 => int8(),
            ActivationMode::Bf16 => source::matmul::bf16(ty).map(|_| Self::Bf16),
            ActivationMode::Mxfp8 => Self::scaled(ty).filter(|form| *form == Self::Mxfp8).or_else(int8),
            ActivationMode::Nvfp4 => Self::scaled(ty).or_else(int8),
        }
    }

    /// Returns the form that a type's products on tensor cores with scaled blocks read.
    fn scaled(ty: GgmlType) -> Option<Self> {
        match ty {
            GgmlType::MXFP4 => Some(Self::Mxfp8),
            GgmlType::NVFP4 => Some(Self::Nvfp4),
            _ => None,
        }
    }

    /// Returns the bytes of a row of activations, which is padded to whole units.
    pub fn row_bytes(self, cols: usize) -> usize {
        let blocks = cols.div_ceil(UNIT_COLS) * (UNIT_COLS / BLOCK);
        match self {
            Self::Int8 => blocks * QUANTISED_BLOCK,
            Self::Mxfp8 => (blocks * (BLOCK + 1)).next_multiple_of(16),
            Self::Bf16 => blocks * BLOCK * 2,
            // A scale for half a block, and the row's factor.
            Self::Nvfp4 => blocks * (BLOCK / 2 + 2) + 16,
        }
    }

    /// Returns the source of a type's products with this form, if it has one of its own.
    pub(super) fn source(self, ty: GgmlType) -> Option<&'static Source> {
        match self {
            Self::Int8 => None,
            Self::Mxfp8 | Self::Nvfp4 => {
                source::matmul::scaled(ty).filter(|_| Self::scaled(ty) == Some(self))
            }
            Self::Bf16 => source::matmul::bf16(ty),
        }
    }

    /// The number of `Form` of `rows.cuh`.
    pub(super) fn code(self) -> u32 {
        self as u32
    }

    pub fn at(self, rows: DevicePtr) -> Activations {
        match self {
            Self::Int8 => Activations::Int8(rows),
            Self::Mxfp8 => Activations::Mxfp8(rows),
            Self::Bf16 => Activations::Bf16(rows),
            Self::Nvfp4 => Activations::Nvfp4(rows),
        }
    }
}

/// Whether products with a type may read int8 activations. Plain floats never do.
pub fn reads_int8(ty: GgmlType) -> bool {
    Scheme::of(ty).is_some_and(|scheme| scheme.is_integer())
}

/// A product's kernel with the number of tokens per block.
#[derive(Debug, Clone, Copy)]
struct Width {
    tokens: usize,
    kernel: KernelId,
}

/// Kernels for one form of activations.
#[derive(Debug, Clone, Default)]
struct Widths {
    /// Narrowest first.
    widths: Vec<Width>,
    /// Kernel for prompts. A block of it computes eight times as many results from each value that it reads.
    staged: Option<KernelId>,
}

impl Widths {
    fn new(tokens: &[usize], kernels: &[KernelId], staged: Option<KernelId>) -> Self {
        let widths = tokens.iter().zip(kernels).map(|(&tokens, &kernel)| Width { tokens, kernel }).collect();
        Self { widths, staged }
    }
}

/// Kernels of one weight type on one device.
#[derive(Debug, Clone)]
pub struct MatmulKernels {
    ty: GgmlType,
    /// None for plain floats.
    int8: Widths,
    scaled: Widths,
    bf16: Widths,
    exact: Widths,
    multiprocessors: usize,
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
    /// Rows of [`Quantised::row_bytes`].
    Int8(DevicePtr),
    /// Rows of [`Quantised::row_bytes`].
    Mxfp8(DevicePtr),
    /// Rows of [`Quantised::row_bytes`].
    Bf16(DevicePtr),
    /// Rows of [`Quantised::row_bytes`].
    Nvfp4(DevicePtr),
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
        let (int8, exact, embed) = match *kernels {
            [embed, one, four] => (Widths::default(), Widths::new(&[1, 4], &[one, four], None), embed),
            [embed, one, four, eight, many, staged, exact] => {
                let int8 = Widths::new(&[1, 4, 8, 32], &[one, four, eight, many], Some(staged));
                (int8, Widths::new(&[2], &[exact], None), embed)
            }
            _ => return Err(missing()),
        };
        Ok(Self {
            ty,
            int8,
            scaled: Widths::default(),
            bf16: Widths::default(),
            exact,
            multiprocessors,
            embed,
        })
    }

    /// Loads the compiled source of the type's products with a form of activations.
    ///
    /// # Errors
    /// [`CudaError::NoKernel`] for another compiled source; errors of the device.
    pub fn load_form(
        &mut self,
        device: &mut dyn Device,
        compiled: &Compiled,
        form: Quantised,
    ) -> Result<(), CudaError> {
        let missing =
            || CudaError::NoKernel { name: self.ty.name().into(), source_name: compiled.source_name.clone() };
        let source = form.source(self.ty).ok_or_else(missing)?;
        let [one, eight, many, staged] = *device.load(compiled, source.kernels)? else {
            return Err(missing());
        };
        let widths = Widths::new(&[1, 8, 32], &[one, eight, many], Some(staged));
        match form {
            Quantised::Bf16 => self.bf16 = widths,
            _ => self.scaled = widths,
        }
        Ok(())
    }

    /// Multiplies in one launch. Up to three products of the same rows with matrices of one type are
    /// possible. A product's result does not depend on the others.
    ///
    /// # Errors
    /// [`CudaError::Invalid`] for products that cannot share a launch, a matrix of another type, activations in a form
    /// that the type has no kernels for, and sizes beyond 32 bits; errors of the device.
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
        let (x, Widths { widths, staged }) = match first.x {
            Activations::F32(x) => (x, &self.exact),
            Activations::Int8(x) => (x, &self.int8),
            Activations::Mxfp8(x) if self.ty == GgmlType::MXFP4 => (x, &self.scaled),
            Activations::Nvfp4(x) if self.ty == GgmlType::NVFP4 => (x, &self.scaled),
            Activations::Bf16(x) => (x, &self.bf16),
            Activations::Mxfp8(_) | Activations::Nvfp4(_) => {
                let what = format!("{} has no products of activations with scaled blocks", self.ty);
                return Err(CudaError::Invalid { what });
            }
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
        let groups_tokens = matches!(first.x, Activations::Bf16(_));
        let staged_tiles = if groups_tokens { BF16_TILES } else { STAGED_TILES };
        let staged_columns = match first.experts {
            Experts::One => Some((tokens, tokens.div_ceil(STAGED_TOKENS))),
            // All tokens of a product of a warp group have the same weights.
            Experts::Listed { count, most: GROUP_TOKENS, .. } if !groups_tokens => {
                // A block takes four whole groups.
                let columns = count / (STAGED_TOKENS / GROUP_TOKENS);
                (columns * STAGED_TOKENS == count * GROUP_TOKENS)
                    .then_some((tokens / shape.experts(), columns))
            }
            _ => None,
        };
        let staged_columns = staged_columns.filter(|&(tokens, columns)| {
            let blocks = columns * tiles.div_ceil(staged_tiles);
            tokens > STAGED_TOKENS / 2 && blocks >= self.multiprocessors
        });
        let (kernel, grid, threads) = match (*staged, staged_columns) {
            (Some(staged), Some((_, columns))) => {
                (staged, [columns, tiles.div_ceil(staged_tiles), 1], STAGED_THREADS)
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
        let threads = if self.int8.widths.is_empty() { cols } else { cols.div_ceil(UNIT_COLS) };
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
