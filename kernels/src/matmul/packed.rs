//! Weight matrices in the panel layout.

use super::PANEL_ROWS;
use super::layout::{pack_row, panel_bytes};
use crate::aligned::{AlignedBuf, CACHE_LINE};
use crate::error::Error;
use crate::quant::{GgmlType, Scheme};
use std::ops::{Deref, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Shape and format of a tensor of `experts` matrices of `rows x cols`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shape {
    ty: GgmlType,
    rows: usize,
    cols: usize,
    experts: usize,
    /// Bytes of one row in the file.
    row_bytes: usize,
    panel_bytes: usize,
}

impl Shape {
    fn new(ty: GgmlType, rows: usize, cols: usize, experts: usize) -> Result<Self, Error> {
        let impossible = Error::Shape { rows, cols, experts };
        if rows == 0 || cols == 0 || experts == 0 {
            return Err(impossible);
        }
        let row_bytes = ty.row_bytes(cols)?;
        if !MatrixView::supports(ty) {
            return Err(Error::NoMatmul { ty: ty.name() });
        }
        let panel_bytes = panel_bytes(ty, cols).ok_or(impossible.clone())?;
        let shape = Self { ty, rows, cols, experts, row_bytes, panel_bytes };
        let checked = |count: usize, bytes: usize| {
            count.checked_mul(experts)?.checked_mul(bytes).filter(|&total| isize::try_from(total).is_ok())
        };
        checked(rows, row_bytes).ok_or(impossible.clone())?;
        checked(shape.panels(), panel_bytes).ok_or(impossible)?;
        Ok(shape)
    }

    fn panels(&self) -> usize {
        self.rows.div_ceil(PANEL_ROWS)
    }
}

/// Name of the panel layout, equal for all instruction sets. Another layout has another name.
pub const PACK_LAYOUT: &str = "panels-1";

/// Bytes with another owner, for example a mapped file.
pub type SharedBytes = Arc<dyn AsRef<[u8]> + Send + Sync>;

enum Panels {
    Own(AlignedBuf<u8>),
    Shared(SharedBytes),
}

impl Deref for Panels {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match self {
            Self::Own(data) => data,
            Self::Shared(data) => data.as_ref().as_ref(),
        }
    }
}

impl std::fmt::Debug for Panels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let owner = if matches!(self, Self::Own(_)) { "Own" } else { "Shared" };
        write!(f, "{owner}({} bytes)", self.len())
    }
}

/// Order of the values of a matrix in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    Panels,
    /// Row after row, as in a file; only for plain floats.
    Rows,
}

/// A weight tensor repacked into panels of 16 output rows: one matrix, or one matrix per expert. Padding rows
/// of the last panel are zeros. A tensor of plain floats may instead be used in file order.
#[derive(Debug)]
pub struct PackedMatrix {
    shape: Shape,
    order: Order,
    data: Panels,
}

impl PackedMatrix {
    /// Packs a whole tensor of `experts` matrices of `rows x cols` from its bytes in a file.
    ///
    /// # Errors
    /// As [`PackedMatrixBuilder::new`], and [`Error::Length`] if `bytes` is not the tensor's size.
    pub fn pack(ty: GgmlType, rows: usize, cols: usize, experts: usize, bytes: &[u8]) -> Result<Self, Error> {
        let mut builder = PackedMatrixBuilder::new(ty, rows, cols, experts)?;
        let expected = builder.file_bytes();
        if bytes.len() != expected {
            return Err(Error::Length { what: "tensor bytes", expected, found: bytes.len() });
        }
        for chunk in builder.chunks(usize::MAX) {
            let range = chunk.file_range();
            chunk.pack(&bytes[range])?;
        }
        builder.finish()
    }

    /// Creates a tensor from packed bytes: `data` is an earlier result of [`Self::packed`] under the same
    /// [`PACK_LAYOUT`]. The content is not checked; any bytes are a valid matrix.
    ///
    /// # Errors
    /// As [`PackedMatrixBuilder::new`], and [`Error::Length`] if `data` does not have the packed size or does
    /// not start on a cache line.
    pub fn from_packed(
        ty: GgmlType,
        rows: usize,
        cols: usize,
        experts: usize,
        data: SharedBytes,
    ) -> Result<Self, Error> {
        let shape = Shape::new(ty, rows, cols, experts)?;
        let expected = shape.panels() * experts * shape.panel_bytes;
        let bytes: &[u8] = data.as_ref().as_ref();
        if bytes.len() != expected {
            return Err(Error::Length { what: "packed bytes", expected, found: bytes.len() });
        }
        let beyond = bytes.as_ptr().addr() % CACHE_LINE;
        if beyond != 0 {
            return Err(Error::Length { what: "bytes behind a cache line", expected: 0, found: beyond });
        }
        Ok(Self { shape, order: Order::Panels, data: Panels::Shared(data) })
    }

    /// Whether [`Self::in_place`] takes tensors of `ty`.
    pub fn can_be_in_place(ty: GgmlType) -> bool {
        MatrixView::supports(ty) && Scheme::of(ty).is_none()
    }

    /// Creates a tensor of plain floats that products read in file order. Products give the same bits as with
    /// the packed tensor.
    ///
    /// # Errors
    /// As [`PackedMatrixBuilder::new`]; [`Error::Unsupported`] for formats other than F32, F16 and BF16, and
    /// [`Error::Length`] if `data` is not the tensor's size.
    pub fn in_place(
        ty: GgmlType,
        rows: usize,
        cols: usize,
        experts: usize,
        data: SharedBytes,
    ) -> Result<Self, Error> {
        let shape = Shape::new(ty, rows, cols, experts)?;
        if !Self::can_be_in_place(ty) {
            return Err(Error::Unsupported { what: "quantised matrices that are not repacked" });
        }
        let (expected, found) = (shape.row_bytes * rows * experts, data.as_ref().as_ref().len());
        if found != expected {
            return Err(Error::Length { what: "tensor bytes", expected, found });
        }
        Ok(Self { shape, order: Order::Rows, data: Panels::Shared(data) })
    }

    /// All bytes of the tensor, in their current order.
    pub fn packed(&self) -> &[u8] {
        &self.data
    }

    /// The file format of the weights.
    pub fn ty(&self) -> GgmlType {
        self.shape.ty
    }

    /// Output rows of each matrix.
    pub fn rows(&self) -> usize {
        self.shape.rows
    }

    /// Input columns of each matrix.
    pub fn cols(&self) -> usize {
        self.shape.cols
    }

    pub fn experts(&self) -> usize {
        self.shape.experts
    }

    /// Bytes that the weights occupy in memory.
    pub fn resident_bytes(&self) -> usize {
        self.data.len()
    }

    /// The matrix of one expert. Use 0 for a matrix without experts.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for an expert that does not exist.
    pub fn view(&self, expert: usize) -> Result<MatrixView<'_>, Error> {
        let Shape { ty, rows, cols, experts, row_bytes, panel_bytes } = self.shape;
        if expert >= experts {
            return Err(Error::OutOfRange { what: "expert", index: expert, len: experts });
        }
        let (bytes, panel_bytes) = match self.order {
            Order::Panels => (self.shape.panels() * panel_bytes, panel_bytes),
            Order::Rows => (rows * row_bytes, PANEL_ROWS * row_bytes),
        };
        let data = &self.data[expert * bytes..][..bytes];
        Ok(MatrixView { ty, rows, cols, order: self.order, panel_bytes, data })
    }
}

#[derive(Debug, Clone, Copy)]
pub struct MatrixView<'a> {
    ty: GgmlType,
    rows: usize,
    cols: usize,
    order: Order,
    panel_bytes: usize,
    data: &'a [u8],
}

impl<'a> MatrixView<'a> {
    /// Whether `ty` can be packed and multiplied.
    pub fn supports(ty: GgmlType) -> bool {
        panel_bytes(ty, 0).is_some()
    }

    /// The file format of the weights.
    pub fn ty(&self) -> GgmlType {
        self.ty
    }

    /// Output rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Panels of 16 rows: the unit in which work is split over threads.
    pub fn panels(&self) -> usize {
        self.rows.div_ceil(PANEL_ROWS)
    }

    /// Bytes read for one panel.
    pub fn panel_bytes(&self) -> usize {
        self.panel_bytes
    }

    /// The bytes of panel `panel`, which must exist. In file order the last panel may have fewer rows.
    pub(super) fn panel(&self, panel: usize) -> &'a [u8] {
        let rest = &self.data[panel * self.panel_bytes..];
        &rest[..self.panel_bytes.min(rest.len())]
    }

    pub(super) fn order(&self) -> Order {
        self.order
    }
}

/// Packs a tensor chunk by chunk. Chunks can be read and packed in parallel, and the file's bytes need never
/// be in memory as a whole.
///
/// ```
/// # use kvasir_kernels::{matmul::PackedMatrixBuilder, quant::GgmlType};
/// let bytes = vec![0; 64 * 36];
/// let mut builder = PackedMatrixBuilder::new(GgmlType::Q4_0, 64, 64, 1)?;
/// for chunk in builder.chunks(32) {
///     let range = chunk.file_range();
///     chunk.pack(&bytes[range])?;
/// }
/// let matrix = builder.finish()?;
/// # assert_eq!(matrix.rows(), 64);
/// # Ok::<(), kvasir_kernels::error::Error>(())
/// ```
#[derive(Debug)]
pub struct PackedMatrixBuilder {
    shape: Shape,
    data: AlignedBuf<u8>,
    /// Panels packed so far, counted once each chunk is complete.
    packed: AtomicUsize,
}

impl PackedMatrixBuilder {
    /// Allocates the packed tensor.
    ///
    /// # Errors
    /// [`Error::NoMatmul`] for formats that can only be dequantised, [`Error::PartialBlock`] if `cols` is not
    /// a whole number of blocks, [`Error::Shape`] for empty or impossibly large shapes.
    pub fn new(ty: GgmlType, rows: usize, cols: usize, experts: usize) -> Result<Self, Error> {
        let shape = Shape::new(ty, rows, cols, experts)?;
        let data = AlignedBuf::zeroed(shape.panels() * experts * shape.panel_bytes);
        Ok(Self { shape, data, packed: AtomicUsize::new(0) })
    }

    /// Bytes of the whole tensor in the file.
    pub fn file_bytes(&self) -> usize {
        self.shape.row_bytes * self.shape.rows * self.shape.experts
    }

    /// Cuts the tensor into independent chunks of at most `max_rows` rows (rounded down to panels, at least
    /// one panel). No chunk spans experts. Each call restarts packing.
    pub fn chunks(&mut self, max_rows: usize) -> impl Iterator<Item = PanelChunk<'_>> {
        let shape = self.shape;
        *self.packed.get_mut() = 0;
        let packed = &self.packed;
        let per_chunk = (max_rows / PANEL_ROWS).clamp(1, shape.panels());
        self.data.chunks_exact_mut(shape.panels() * shape.panel_bytes).enumerate().flat_map(
            move |(expert, data)| {
                data.chunks_mut(per_chunk * shape.panel_bytes).enumerate().map(move |(i, data)| {
                    let first = i * per_chunk * PANEL_ROWS;
                    let rows = first..shape.rows.min(first + per_chunk * PANEL_ROWS);
                    PanelChunk { shape, expert, rows, data, packed }
                })
            },
        )
    }

    /// The packed tensor.
    ///
    /// # Errors
    /// [`Error::Unpacked`] if a chunk has not been packed.
    pub fn finish(self) -> Result<PackedMatrix, Error> {
        let total = self.shape.panels() * self.shape.experts;
        let packed = self.packed.into_inner();
        if packed < total {
            return Err(Error::Unpacked { packed, total });
        }
        Ok(PackedMatrix { shape: self.shape, order: Order::Panels, data: Panels::Own(self.data) })
    }
}

/// Panels of one expert to be packed.
#[derive(Debug)]
pub struct PanelChunk<'a> {
    shape: Shape,
    expert: usize,
    rows: Range<usize>,
    data: &'a mut [u8],
    packed: &'a AtomicUsize,
}

impl PanelChunk<'_> {
    /// Byte range of this chunk's rows in the tensor's file bytes.
    pub fn file_range(&self) -> Range<usize> {
        let at = |row: usize| (self.expert * self.shape.rows + row) * self.shape.row_bytes;
        at(self.rows.start)..at(self.rows.end)
    }

    /// Packs the chunk from the bytes of its [`file_range`](Self::file_range).
    ///
    /// # Errors
    /// [`Error::Length`] if `bytes` does not have the length of the range.
    pub fn pack(self, bytes: &[u8]) -> Result<(), Error> {
        let expected = self.file_range().len();
        if bytes.len() != expected {
            return Err(Error::Length { what: "chunk bytes", expected, found: bytes.len() });
        }
        let panels = pack_panels(&self.shape, bytes, self.data);
        self.packed.fetch_add(panels, Ordering::Release);
        Ok(())
    }
}

/// Packs rows into zeroed panels and returns the number of panels.
fn pack_panels(shape: &Shape, rows: &[u8], panels: &mut [u8]) -> usize {
    let panels = panels.chunks_exact_mut(shape.panel_bytes);
    let count = panels.len();
    for (panel, rows) in panels.zip(rows.chunks(PANEL_ROWS * shape.row_bytes)) {
        for (lane, row) in rows.chunks_exact(shape.row_bytes).enumerate() {
            pack_row(shape.ty, row, lane, panel);
        }
    }
    count
}

/// Packs a tensor piece by piece into the caller's buffer. The caller stores the pieces; all pieces in order
/// are the input of [`PackedMatrix::from_packed`]. No piece spans experts.
#[derive(Debug, Clone, Copy)]
pub struct PackedPieces {
    shape: Shape,
    /// Panels of a piece; an expert's last piece may have fewer.
    panels: usize,
}

impl PackedPieces {
    /// Pieces have at most `bytes` bytes, or one panel if a panel is larger.
    ///
    /// # Errors
    /// As [`PackedMatrixBuilder::new`].
    pub fn new(ty: GgmlType, rows: usize, cols: usize, experts: usize, bytes: usize) -> Result<Self, Error> {
        let shape = Shape::new(ty, rows, cols, experts)?;
        let panels = (bytes / shape.panel_bytes.max(1)).clamp(1, shape.panels());
        Ok(Self { shape, panels })
    }

    /// Bytes of the whole tensor in the file.
    pub fn file_bytes(&self) -> usize {
        self.shape.row_bytes * self.shape.rows * self.shape.experts
    }

    /// Total bytes of all pieces.
    pub fn packed_bytes(&self) -> usize {
        self.shape.panels() * self.shape.experts * self.shape.panel_bytes
    }

    fn of_an_expert(&self) -> usize {
        self.shape.panels().div_ceil(self.panels)
    }

    pub fn count(&self) -> usize {
        self.of_an_expert() * self.shape.experts
    }

    /// Byte range in the file's tensor of what piece `index` is packed from.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a piece that does not exist.
    pub fn file_range(&self, index: usize) -> Result<Range<usize>, Error> {
        if index >= self.count() {
            return Err(Error::OutOfRange { what: "piece", index, len: self.count() });
        }
        let Shape { rows, row_bytes, .. } = self.shape;
        let (expert, first, panels) = self.panels_of(index);
        let last_row = rows.min((first + panels) * PANEL_ROWS);
        let at = |row: usize| (expert * rows + row) * row_bytes;
        Ok(at(first * PANEL_ROWS)..at(last_row))
    }

    /// Replaces the contents of `piece` by piece `index`, packed from the bytes of its
    /// [`file_range`](Self::file_range), and returns the piece's byte offset.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a piece that does not exist, [`Error::Length`] if `bytes` does not have the length of
    /// the range.
    pub fn pack(&self, index: usize, bytes: &[u8], piece: &mut Vec<u8>) -> Result<usize, Error> {
        let expected = self.file_range(index)?.len();
        if bytes.len() != expected {
            return Err(Error::Length { what: "tensor bytes", expected, found: bytes.len() });
        }
        let (expert, first, panels) = self.panels_of(index);
        piece.clear();
        piece.resize(panels * self.shape.panel_bytes, 0);
        pack_panels(&self.shape, bytes, piece);
        Ok((expert * self.shape.panels() + first) * self.shape.panel_bytes)
    }

    /// Expert, first panel in it and number of panels of a piece.
    fn panels_of(&self, index: usize) -> (usize, usize, usize) {
        let (expert, first) = (index / self.of_an_expert(), index % self.of_an_expert() * self.panels);
        (expert, first, self.panels.min(self.shape.panels() - first))
    }
}
