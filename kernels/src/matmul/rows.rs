//! Plain floats in file order, row after row, converted to panel order just before a product.

use super::PANEL_ROWS;
use super::layout::pack_row;
use crate::quant::GgmlType;

/// Number of columns that are transposed at a time.
pub(super) const TURNED_COLUMNS: usize = 32;

/// Up to 16 consecutive rows.
#[derive(Clone, Copy)]
pub(super) struct PlainRows<'a> {
    pub(super) ty: GgmlType,
    pub(super) cols: usize,
    bytes: &'a [u8],
}

impl<'a> PlainRows<'a> {
    /// `bytes` must be whole rows, at least one, of a plain float format.
    pub(super) fn new(ty: GgmlType, cols: usize, bytes: &'a [u8]) -> Self {
        Self { ty, cols, bytes }
    }

    /// The rows, in order.
    pub(super) fn rows(&self) -> impl Iterator<Item = &'a [u8]> {
        self.bytes.chunks_exact(self.cols * self.ty.block_bytes()).take(PANEL_ROWS)
    }
}

/// Bytes of a panel of plain floats, including the bytes after its last column that may be written.
pub(super) fn interleaved_bytes(ty: GgmlType, cols: usize) -> usize {
    cols.next_multiple_of(TURNED_COLUMNS) * PANEL_ROWS * ty.block_bytes()
}

/// Copies rows to a panel in panel order, on any processor. Missing rows become zeros.
#[inline(always)]
pub(super) fn interleave(rows: &PlainRows<'_>, panel: &mut [u8]) {
    if rows.rows().count() < PANEL_ROWS {
        panel.fill(0);
    }
    for (lane, row) in rows.rows().enumerate() {
        pack_row(rows.ty, row, lane, panel);
    }
}
