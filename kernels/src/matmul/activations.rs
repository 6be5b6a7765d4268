//! Activations of a product: rows of f32 values and their int8 form.
#![allow(unsafe_code)]

use super::kernel::MatmulKernels;
use crate::aligned::AlignedBuf;
use crate::error::Error;
use std::marker::PhantomData;
use std::ops::Range;

/// Values that share a scale.
pub(crate) const BLOCK: usize = 32;

impl crate::aligned::Plain for QuantizedBlock {}

/// 32 consecutive activations of one row.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
pub struct QuantizedBlock {
    /// `value / scale`, rounded to nearest, ties to even.
    pub quants: [i8; BLOCK],
    /// Largest magnitude of the block / 127. If any value is not finite, NaN with quants of 0, so that the
    /// outputs become NaN.
    pub scale: f32,
    /// `scale` times the sum of the quants.
    pub scaled_sum: f32,
    /// Minus the sum of the quants. Times a format's offset, it turns a sum of codes into a sum of levels.
    pub minus_sum: i32,
    /// Minus the sums of the quants of the two halves.
    pub minus_half_sums: [i16; 2],
}

impl QuantizedBlock {
    pub(crate) const ZERO: Self =
        Self { quants: [0; BLOCK], scale: 0.0, scaled_sum: 0.0, minus_sum: 0, minus_half_sums: [0; 2] };
    /// The block for values of which one is not finite.
    pub(crate) const POISON: Self = Self { scale: f32::NAN, scaled_sum: f32::NAN, ..Self::ZERO };

    /// A block whose quants sum to `sums` over the halves. The caller must set the quants afterwards.
    #[inline(always)]
    pub(crate) fn with_sums(scale: f32, sums: [i32; 2]) -> Self {
        let sum = sums[0] + sums[1];
        Self {
            scale,
            scaled_sum: scale * sum as f32,
            minus_sum: -sum,
            // At most 16 * 127.
            minus_half_sums: sums.map(|sum| -sum as i16),
            ..Self::ZERO
        }
    }
}

/// The form of the activations that a product with quantised weights reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum ActivationMode {
    /// Activations rounded to 8 bits: the fast path.
    #[default]
    Int8,
    /// f32 activations and dequantised weights: the exact path.
    F32,
    /// Activations rounded to E4M3 with a power of two for each 32 (MXFP8), where a backend has such products with a
    /// type of weights; as [`Self::Int8`] with the others. GPUs with block-scaled tensor cores alone have it.
    Mxfp8,
    /// Activations and weights rounded to bf16, and the products of f32 weights exact. GPUs of compute capability 9.0
    /// alone have it.
    Bf16,
    /// As [`Self::Mxfp8`], and NVFP4 weights with activations rounded to NVFP4: E2M1 with an E4M3 scale for each 16 and
    /// a power of two for the row.
    Nvfp4,
}

impl ActivationMode {
    /// Whether products multiply blocks with scales on tensor cores, which few devices have.
    pub fn needs_block_scales(self) -> bool {
        matches!(self, Self::Mxfp8 | Self::Nvfp4)
    }

    /// The name in numeric classes.
    pub fn name(self) -> &'static str {
        match self {
            Self::Int8 => "int8",
            Self::F32 => "f32",
            Self::Mxfp8 => "mxfp8",
            Self::Bf16 => "bf16",
            Self::Nvfp4 => "nvfp4",
        }
    }
}

/// Activations of a call: rows (tokens) of `k` f32 values, row-major, and their int8 form if an int8 product
/// needs it. A call may use a subset of the rows, for example those of one expert.
#[derive(Debug, Clone, Copy)]
pub struct Activations<'a> {
    pub(super) k: usize,
    pub(super) f32: &'a [f32],
    pub(super) int8: Option<&'a QuantizedRows>,
    /// Number of rows in `f32` and `int8`.
    held: usize,
    chosen: Chosen<'a>,
}

/// The rows that a call uses. All of them exist.
#[derive(Debug, Clone, Copy)]
enum Chosen<'a> {
    Run { first: usize, len: usize },
    Listed(&'a [u32]),
}

impl<'a> Activations<'a> {
    /// Wraps `rows * k` values.
    ///
    /// # Errors
    /// [`Error::Length`] if `f32` or `int8` has another number of values.
    pub fn new(
        rows: usize,
        k: usize,
        f32: &'a [f32],
        int8: Option<&'a QuantizedRows>,
    ) -> Result<Self, Error> {
        let expected = rows.checked_mul(k).ok_or(Error::Shape { rows, cols: k, experts: 1 })?;
        if f32.len() != expected {
            return Err(Error::Length { what: "activations", expected, found: f32.len() });
        }
        if let Some(int8) = int8 {
            if int8.rows != rows {
                return Err(Error::Length { what: "quantised rows", expected: rows, found: int8.rows });
            }
            if int8.k != k {
                return Err(Error::Length { what: "quantised columns", expected: k, found: int8.k });
            }
        }
        Ok(Self { k, f32, int8, held: rows, chosen: Chosen::Run { first: 0, len: rows } })
    }

    /// Selects these rows, in this order. Copies nothing.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a row that does not exist.
    pub fn listed(&self, rows: &'a [u32]) -> Result<Self, Error> {
        match rows.iter().find(|row| **row as usize >= self.held) {
            Some(row) => Err(Error::OutOfRange { what: "row", index: *row as usize, len: self.held }),
            None => Ok(Self { chosen: Chosen::Listed(rows), ..*self }),
        }
    }

    /// Selects the rows of a range. Copies nothing.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a row that does not exist.
    pub fn run(&self, rows: Range<usize>) -> Result<Self, Error> {
        if rows.end > self.held {
            return Err(Error::OutOfRange { what: "row", index: rows.end, len: self.held });
        }
        Ok(Self { chosen: Chosen::Run { first: rows.start, len: rows.len() }, ..*self })
    }

    /// Number of rows (tokens) of the call.
    pub fn rows(&self) -> usize {
        match self.chosen {
            Chosen::Run { len, .. } => len,
            Chosen::Listed(rows) => rows.len(),
        }
    }

    /// Index of the row of token `token` of the call.
    #[inline]
    pub(super) fn row(&self, token: usize) -> usize {
        match self.chosen {
            Chosen::Run { first, .. } => first + token,
            Chosen::Listed(rows) => rows[token] as usize,
        }
    }
}

/// A reusable buffer of int8 activations: rows in blocks of 32 with one scale each. The last block of a row
/// is padded with zeros.
#[derive(Debug, Default)]
pub struct QuantizedRows {
    rows: usize,
    k: usize,
    blocks: AlignedBuf<QuantizedBlock>,
}

impl QuantizedRows {
    /// An empty buffer.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the shape and grows the memory if needed. Contents are unspecified until each row is quantised.
    pub fn resize(&mut self, rows: usize, k: usize) {
        self.blocks.grow(rows * k.div_ceil(BLOCK));
        (self.rows, self.k) = (rows, k);
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Values in a row.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Quantises `src` (k values) into row `row`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a row past the end, [`Error::Length`] for a source of another length.
    pub fn quantize_row(&mut self, kernels: MatmulKernels, row: usize, src: &[f32]) -> Result<(), Error> {
        // SAFETY: `self` is borrowed exclusively, so no other thread writes this row.
        unsafe { self.share().quantize_row(kernels, row, src) }
    }

    /// Resizes to `src.len() / k` rows and quantises them all.
    ///
    /// # Errors
    /// [`Error::Length`] if `src` is not a whole number of rows.
    pub fn quantize(&mut self, kernels: MatmulKernels, k: usize, src: &[f32]) -> Result<(), Error> {
        let rows = src.len().checked_div(k).unwrap_or(0);
        if rows * k != src.len() {
            return Err(Error::Length { what: "activations", expected: rows * k, found: src.len() });
        }
        self.resize(rows, k);
        (0..rows).try_for_each(|row| self.quantize_row(kernels, row, &src[row * k..][..k]))
    }

    /// A handle through which several threads may quantise different rows in parallel.
    pub fn share(&mut self) -> SharedQuantizedRows<'_> {
        SharedQuantizedRows {
            rows: self.rows,
            k: self.k,
            blocks: self.blocks.as_mut_ptr(),
            owner: PhantomData,
        }
    }

    /// Blocks from one row to the next.
    pub(super) fn stride(&self) -> usize {
        self.k.div_ceil(BLOCK)
    }

    pub fn blocks(&self) -> &[QuantizedBlock] {
        &self.blocks[..self.rows * self.stride()]
    }
}

/// See [`QuantizedRows::share`].
#[derive(Debug, Clone, Copy)]
pub struct SharedQuantizedRows<'a> {
    rows: usize,
    k: usize,
    blocks: *mut QuantizedBlock,
    owner: PhantomData<&'a mut QuantizedRows>,
}

// SAFETY: the only access is `quantize_row`, whose contract forbids two threads in one row.
unsafe impl Send for SharedQuantizedRows<'_> {}
// SAFETY: as above.
unsafe impl Sync for SharedQuantizedRows<'_> {}

impl SharedQuantizedRows<'_> {
    /// Quantises `src` (k values) into row `row`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a row past the end, [`Error::Length`] for a source of another length.
    ///
    /// # Safety
    /// While this runs, no other thread may quantise the same row of the same buffer.
    pub unsafe fn quantize_row(&self, kernels: MatmulKernels, row: usize, src: &[f32]) -> Result<(), Error> {
        if row >= self.rows {
            return Err(Error::OutOfRange { what: "row", index: row, len: self.rows });
        }
        if src.len() != self.k {
            return Err(Error::Length { what: "activation row", expected: self.k, found: src.len() });
        }
        let stride = self.k.div_ceil(BLOCK);
        // SAFETY: `row < rows`, and `QuantizedRows::resize` allocated `rows * stride` blocks, borrowed for
        // this handle's lifetime; by this function's contract nothing else accesses this row.
        let out = unsafe { std::slice::from_raw_parts_mut(self.blocks.add(row * stride), stride) };
        kernels.quantize_blocks(src, out);
        Ok(())
    }
}
