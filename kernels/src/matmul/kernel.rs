//! Entry point of products: chooses the kernel, checks the arguments and fixes the order of tiles.
#![allow(unsafe_code)]

use super::activations::{ActivationMode, Activations, BLOCK, QuantizedBlock, QuantizedRows};
use super::layout::{Block, Layout};
use super::output::{Epilogue, SharedOut};
use super::packed::{MatrixView, Order};
use super::rows::{PlainRows, interleaved_bytes};
use super::{PANEL_ROWS, scalar};
use crate::aligned::AlignedBuf;
use crate::error::Error;
use crate::isa::Isa;
use crate::quant::{GgmlType, Scheme};
use half::{bf16, f16};
use std::ops::Range;

/// Maximum number of tokens of one kernel call. They share the unpacking of a panel's blocks.
pub(super) const TILE_TOKENS: usize = 16;

/// Bytes of activations that are used for all panels before the next tokens, so that they stay in L2.
const L2_ACTIVATIONS: usize = 384 << 10;

/// Results of one panel and up to [`TILE_TOKENS`] tokens. It is not cleared before a call; kernels overwrite
/// the lanes of their tokens.
#[repr(align(64))]
pub(super) struct Tile(pub(super) [[f32; PANEL_ROWS]; TILE_TOKENS]);

/// One panel times some quantised tokens.
#[derive(Clone, Copy)]
pub(super) struct Int8Call<'a> {
    pub(super) ty: GgmlType,
    /// Start of the panel: `cols / 32` blocks in the layout of `ty`.
    pub(super) panel: *const u8,
    /// Number of blocks of 32 columns.
    pub(super) blocks: usize,
    /// Blocks of all tokens' activations.
    pub(super) activations: *const QuantizedBlock,
    /// Index in `activations` of the first block of each token, for 1 to [`TILE_TOKENS`] tokens.
    pub(super) tokens: &'a [usize],
}

/// One panel times some f32 tokens.
#[derive(Clone, Copy)]
pub(super) struct F32Call<'a> {
    pub(super) ty: GgmlType,
    /// Start of the panel: `cols` columns in the layout of `ty`.
    pub(super) panel: *const u8,
    pub(super) cols: usize,
    /// Values of all tokens' activations.
    pub(super) activations: *const f32,
    /// Index in `activations` of the first value of each token, for 1 to [`TILE_TOKENS`] tokens.
    pub(super) tokens: &'a [usize],
}

/// The kernels of one instruction set.
///
/// Contracts of the unsafe functions: the processor has the instruction set; the pointers of a call cover the
/// lengths in its fields; `int8` is called only for formats with a [`Scheme`], `f32` for those and plain
/// floats.
pub(super) struct KernelSet {
    pub(super) int8: unsafe fn(&Int8Call<'_>, &mut Tile),
    pub(super) f32: unsafe fn(&F32Call<'_>, &mut Tile),
    /// Quantises a row into `len.div_ceil(32)` blocks.
    pub(super) quantize: unsafe fn(&[f32], &mut [QuantizedBlock]),
    /// Copies rows of plain floats to a panel in panel order. It may write any bytes after the last column,
    /// up to [`interleaved_bytes`].
    pub(super) interleave: unsafe fn(&PlainRows<'_>, &mut [u8]),
}

/// The matmul kernels of an instruction set that this processor has.
#[derive(Clone, Copy)]
pub struct MatmulKernels {
    isa: Isa,
    set: &'static KernelSet,
}

impl std::fmt::Debug for MatmulKernels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MatmulKernels").field("isa", &self.isa).finish_non_exhaustive()
    }
}

impl MatmulKernels {
    /// The kernels of `isa`.
    ///
    /// # Errors
    /// [`Error::IsaUnavailable`] if this processor lacks it.
    pub fn for_isa(isa: Isa) -> Result<Self, Error> {
        if !isa.is_available() {
            return Err(Error::IsaUnavailable { isa });
        }
        let set = match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => &super::avx512::KERNELS,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => &super::avx2::KERNELS,
            #[cfg(target_arch = "aarch64")]
            Isa::NeonI8mm => &super::neon::I8MM,
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => &super::neon::DOTPROD,
            _ => &scalar::KERNELS,
        };
        Ok(Self { isa, set })
    }

    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Whether products with `ty` read the int8 activations in `mode`. Plain floats never do.
    pub fn reads_int8(ty: GgmlType, mode: ActivationMode) -> bool {
        mode == ActivationMode::Int8 && Scheme::of(ty).is_some_and(|scheme| scheme.is_integer())
    }

    pub(super) fn quantize_blocks(&self, src: &[f32], out: &mut [QuantizedBlock]) {
        assert_eq!(out.len(), src.len().div_ceil(BLOCK));
        // SAFETY: `for_isa` checked the instruction set, and the lengths agree.
        unsafe { (self.set.quantize)(src, out) }
    }

    /// Computes `out[token][row]` for all tokens of `activations` and the rows of `panels`, on the calling
    /// thread. The result has the same bits for any split of panels into calls.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for panels past the end, [`Error::Length`] if activations, output or bias do not
    /// fit the matrix, [`Error::NotQuantized`] if the int8 form is needed and absent.
    pub fn run(
        &self,
        matrix: MatrixView<'_>,
        panels: Range<usize>,
        activations: &Activations<'_>,
        mode: ActivationMode,
        out: SharedOut<'_>,
        epilogue: &Epilogue<'_>,
    ) -> Result<(), Error> {
        check(&matrix, &panels, activations, out, epilogue)?;
        if Self::reads_int8(matrix.ty(), mode) {
            let quantized = activations.int8.ok_or(Error::NotQuantized)?;
            self.run_int8(matrix, panels, activations, quantized, out, epilogue);
        } else {
            self.run_f32(matrix, panels, activations, out, epilogue);
        }
        Ok(())
    }

    fn run_int8(
        &self,
        matrix: MatrixView<'_>,
        panels: Range<usize>,
        activations: &Activations<'_>,
        quantized: &QuantizedRows,
        out: SharedOut<'_>,
        epilogue: &Epilogue<'_>,
    ) {
        let stride = quantized.stride();
        let all = quantized.blocks();
        let token_bytes = stride * size_of::<QuantizedBlock>();
        let walk = Walk { panels, tokens: activations.rows(), token_bytes };
        let mut tile = Tile([[0.0; PANEL_ROWS]; TILE_TOKENS]);
        let mut starts = [0; TILE_TOKENS];
        walk.tiles(|panel, tokens| {
            for (start, token) in starts.iter_mut().zip(tokens.clone()) {
                out.prefetch(token, panel * PANEL_ROWS);
                *start = activations.row(token) * stride;
            }
            let call = Int8Call {
                ty: matrix.ty(),
                panel: matrix.panel(panel).as_ptr(),
                blocks: matrix.cols() / BLOCK,
                activations: all.as_ptr(),
                tokens: &starts[..tokens.len()],
            };
            // SAFETY: `for_isa` checked the instruction set. The panel slice holds `cols / 32` blocks of the
            // format (`PackedMatrix` only exists with whole blocks). Rows of a call exist (`Activations`), so
            // `stride` blocks follow each start, and `check` verified that these are `cols` columns.
            unsafe { (self.set.int8)(&call, &mut tile) };
            store(&matrix, panel, tokens, &tile, out, epilogue);
        });
    }

    fn run_f32(
        &self,
        matrix: MatrixView<'_>,
        panels: Range<usize>,
        activations: &Activations<'_>,
        out: SharedOut<'_>,
        epilogue: &Epilogue<'_>,
    ) {
        let cols = matrix.cols();
        let walk = Walk { panels, tokens: activations.rows(), token_bytes: cols * size_of::<f32>() };
        let mut tile = Tile([[0.0; PANEL_ROWS]; TILE_TOKENS]);
        let mut starts = [0; TILE_TOKENS];
        let mut turned = Turned::default();
        walk.tiles(|panel, tokens| {
            for (start, token) in starts.iter_mut().zip(tokens.clone()) {
                out.prefetch(token, panel * PANEL_ROWS);
                *start = activations.row(token) * cols;
            }
            let bytes = match matrix.order() {
                Order::Panels => matrix.panel(panel),
                Order::Rows => turned.panel(self.set, &matrix, panel),
            };
            let call = F32Call {
                ty: matrix.ty(),
                panel: bytes.as_ptr(),
                cols,
                activations: activations.f32.as_ptr(),
                tokens: &starts[..tokens.len()],
            };
            // SAFETY: as for int8; `cols` values follow each start.
            unsafe { (self.set.f32)(&call, &mut tile) };
            store(&matrix, panel, tokens, &tile, out, epilogue);
        });
    }

    /// Dequantises row `row` to `out` (`cols` values), exactly like [`dequantize`](crate::quant::dequantize).
    /// Used for embedding lookups in a packed matrix.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a row past the end, [`Error::Length`] if the output has another length.
    pub fn dequantize_row(&self, matrix: MatrixView<'_>, row: usize, out: &mut [f32]) -> Result<(), Error> {
        if row >= matrix.rows() {
            return Err(Error::OutOfRange { what: "row", index: row, len: matrix.rows() });
        }
        if out.len() != matrix.cols() {
            return Err(Error::Length { what: "weight row", expected: matrix.cols(), found: out.len() });
        }
        let (panel, lane) = (matrix.panel(row / PANEL_ROWS), row % PANEL_ROWS);
        if matrix.order() == Order::Rows {
            let size = matrix.ty().block_bytes();
            let values = panel.chunks_exact(size).skip(lane * matrix.cols());
            for (x, value) in out.iter_mut().zip(values) {
                *x = plain_value(matrix.ty(), value);
            }
            return Ok(());
        }
        let Some(scheme) = Scheme::of(matrix.ty()) else {
            let size = matrix.ty().block_bytes();
            for (x, slots) in out.iter_mut().zip(panel.chunks_exact(PANEL_ROWS * size)) {
                *x = plain_value(matrix.ty(), &slots[lane * size..][..size]);
            }
            return Ok(());
        };
        let mut block = Block::EMPTY;
        let blocks = Layout::of(&scheme).blocks(panel, matrix.cols() / BLOCK);
        for (out, packed) in out.chunks_exact_mut(BLOCK).zip(blocks) {
            block.unpack(&scheme, packed);
            for (k, x) in out.iter_mut().enumerate() {
                *x = block.weight(&scheme, k, lane);
            }
        }
        Ok(())
    }
}

/// The most recent panel of a matrix in file order, converted to the order that kernels read.
#[derive(Default)]
struct Turned {
    panel: Option<usize>,
    bytes: AlignedBuf<u8>,
}

impl Turned {
    fn panel(&mut self, set: &KernelSet, matrix: &MatrixView<'_>, panel: usize) -> &[u8] {
        if self.panel != Some(panel) {
            let rows = PlainRows::new(matrix.ty(), matrix.cols(), matrix.panel(panel));
            self.bytes.grow(interleaved_bytes(matrix.ty(), matrix.cols()));
            // SAFETY: `for_isa` checked the instruction set.
            unsafe { (set.interleave)(&rows, &mut self.bytes) };
            self.panel = Some(panel);
        }
        &self.bytes
    }
}

/// One value of a plain float format.
pub(super) fn plain_value(ty: GgmlType, bytes: &[u8]) -> f32 {
    match ty {
        GgmlType::F16 => f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        GgmlType::BF16 => bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        _ => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
    }
}

fn check(
    matrix: &MatrixView<'_>,
    panels: &Range<usize>,
    activations: &Activations<'_>,
    out: SharedOut<'_>,
    epilogue: &Epilogue<'_>,
) -> Result<(), Error> {
    let length = |what, expected, found| Error::Length { what, expected, found };
    if panels.end > matrix.panels() {
        return Err(Error::OutOfRange { what: "panel", index: panels.end, len: matrix.panels() });
    }
    if activations.k != matrix.cols() {
        return Err(length("activation columns", matrix.cols(), activations.k));
    }
    if out.rows() != activations.rows() {
        return Err(length("output rows", activations.rows(), out.rows()));
    }
    if out.ld() < matrix.rows() {
        return Err(length("output columns", matrix.rows(), out.ld()));
    }
    match epilogue.bias {
        Some(bias) if bias.len() != matrix.rows() => Err(length("bias", matrix.rows(), bias.len())),
        _ => Ok(()),
    }
}

fn store(
    matrix: &MatrixView<'_>,
    panel: usize,
    tokens: Range<usize>,
    tile: &Tile,
    out: SharedOut<'_>,
    epilogue: &Epilogue<'_>,
) {
    let first_row = panel * PANEL_ROWS;
    let rows = PANEL_ROWS.min(matrix.rows() - first_row);
    for (token, lanes) in tokens.zip(&tile.0) {
        // SAFETY: `check` verified that tokens, rows and bias are in bounds; access is exclusive by the
        // contract of `SharedOut::new`.
        unsafe { out.store(epilogue, token, first_row, rows, lanes) };
    }
}

/// The order of tiles: chunks of tokens that stay in L2, and all panels for each chunk.
struct Walk {
    panels: Range<usize>,
    tokens: usize,
    token_bytes: usize,
}

impl Walk {
    fn tiles(&self, mut tile: impl FnMut(usize, Range<usize>)) {
        let per_chunk = (L2_ACTIVATIONS / self.token_bytes).max(1).next_multiple_of(TILE_TOKENS);
        for chunk in (0..self.tokens).step_by(per_chunk) {
            let chunk_end = self.tokens.min(chunk + per_chunk);
            for panel in self.panels.clone() {
                for start in (chunk..chunk_end).step_by(TILE_TOKENS) {
                    tile(panel, start..chunk_end.min(start + TILE_TOKENS));
                }
            }
        }
    }
}

/// The product of a whole matrix on the calling thread: sets `out` to `[tokens][rows]`.
///
/// # Errors
/// As [`MatmulKernels::run`], and [`Error::Length`] if `out` has another size.
pub fn matmul_single_thread(
    kernels: MatmulKernels,
    matrix: MatrixView<'_>,
    activations: &Activations<'_>,
    mode: ActivationMode,
    epilogue: &Epilogue<'_>,
    out: &mut [f32],
) -> Result<(), Error> {
    let expected = activations.rows() * matrix.rows();
    if out.len() != expected {
        return Err(Error::Length { what: "output", expected, found: out.len() });
    }
    // SAFETY: `out` is borrowed exclusively and holds `rows` tokens of `matrix.rows()` values.
    let shared = unsafe { SharedOut::new(out.as_mut_ptr(), activations.rows(), matrix.rows()) };
    kernels.run(matrix, 0..matrix.panels(), activations, mode, shared, epilogue)
}
