//! Row-major f32 buffers, and their rows handed to several threads at once.
#![allow(unsafe_code, reason = "disjoint rows of one buffer on several threads")]

use crate::Error;
use crate::aligned::AlignedBuf;
use crate::matmul::{QuantizedRows, SharedOut};
use std::marker::PhantomData;

/// An activation buffer: up to `capacity` rows of `cols` values, and their 8-bit form while it is fresh.
#[derive(Debug)]
pub(super) struct Buffer {
    data: AlignedBuf<f32>,
    cols: usize,
    capacity: usize,
    rows: usize,
    pub(super) quantized: QuantizedRows,
    /// Whether `quantized` holds what `data` holds.
    pub(super) fresh: bool,
}

impl Buffer {
    pub(super) fn new(capacity: usize, cols: usize) -> Result<Self, Error> {
        let len = capacity.checked_mul(cols).ok_or(Error::Shape { rows: capacity, cols, experts: 1 })?;
        let data = AlignedBuf::zeroed(len);
        Ok(Self { data, cols, capacity, rows: 0, quantized: QuantizedRows::new(), fresh: false })
    }

    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    pub(super) fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes of the f32 values.
    pub(super) fn bytes(&self) -> usize {
        self.data.len() * size_of::<f32>()
    }

    /// Declares how many rows the buffer holds; what it held is stale.
    pub(super) fn set_rows(&mut self, rows: usize) -> Result<(), Error> {
        if rows > self.capacity {
            return Err(Error::OutOfRange { what: "buffer row", index: rows, len: self.capacity });
        }
        self.rows = rows;
        self.fresh = false;
        Ok(())
    }

    pub(super) fn values(&self) -> &[f32] {
        &self.data[..self.rows * self.cols]
    }

    pub(super) fn values_mut(&mut self) -> &mut [f32] {
        self.fresh = false;
        &mut self.data[..self.rows * self.cols]
    }

    pub(super) fn row(&self, row: usize) -> Result<&[f32], Error> {
        match row < self.rows {
            true => Ok(&self.data[row * self.cols..(row + 1) * self.cols]),
            false => Err(Error::OutOfRange { what: "row", index: row, len: self.rows }),
        }
    }

    /// The rows for several threads; what the 8-bit form holds is stale.
    pub(super) fn share(&mut self) -> SharedRows<'_> {
        self.fresh = false;
        SharedRows { start: self.data.as_mut_ptr(), rows: self.rows, cols: self.cols, owner: PhantomData }
    }

    /// The buffer as the output of products.
    pub(super) fn output(&mut self) -> SharedOut<'_> {
        self.fresh = false;
        // SAFETY: the pointer is valid for rows * cols initialised values and borrowed mutably for the handle's
        // life; each product gives its threads disjoint panels.
        unsafe { SharedOut::new(self.data.as_mut_ptr(), self.rows, self.cols) }
    }
}

/// Rows of a buffer, to be changed by several threads, each its own.
#[derive(Debug, Clone, Copy)]
pub(super) struct SharedRows<'a> {
    start: *mut f32,
    rows: usize,
    cols: usize,
    owner: PhantomData<&'a mut [f32]>,
}

// SAFETY: the only access is `row`, whose contract forbids two threads in one row.
unsafe impl Send for SharedRows<'_> {}
// SAFETY: as above.
unsafe impl Sync for SharedRows<'_> {}

impl SharedRows<'_> {
    /// Row `row`.
    ///
    /// # Safety
    /// No other reference to the same row may exist while the result lives.
    #[allow(clippy::mut_from_ref, reason = "rows are disjoint by this function's contract")]
    pub(super) unsafe fn row(&self, row: usize) -> &mut [f32] {
        assert!(row < self.rows);
        // SAFETY: the row lies inside the buffer that this handle borrows mutably; nobody else is in it.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(row * self.cols), self.cols) }
    }
}
