//! Row-major f32 buffers, and access of several threads to their rows.
#![allow(unsafe_code, reason = "disjoint rows of one buffer on several threads")]

use crate::Error;
use crate::aligned::AlignedBuf;
use crate::backend::BufferId;
use crate::matmul::{MatmulKernels, QuantizedRows, SharedOut};
use crate::pool::Pool;
use std::marker::PhantomData;
use std::ops::Range;

/// An activation buffer: `rows` of `cols` values with a fixed or grown capacity, and their 8-bit form.
#[derive(Debug, Default)]
pub(super) struct Buffer {
    data: AlignedBuf<f32>,
    cols: usize,
    rows: usize,
    pub(super) quantized: QuantizedRows,
    /// Whether `quantized` is the 8-bit form of the current `data`.
    is_quantized: bool,
}

impl Buffer {
    pub(super) fn new(rows: usize, cols: usize) -> Result<Self, Error> {
        let len = rows.checked_mul(cols).ok_or(Error::Shape { rows, cols, experts: 1 })?;
        let data = AlignedBuf::zeroed(len);
        Ok(Self { data, cols, rows: 0, quantized: QuantizedRows::new(), is_quantized: false })
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

    /// Sets the number of rows and their width. The previous contents are stale.
    pub(super) fn set_shape(&mut self, rows: usize, cols: usize) -> Result<(), Error> {
        if rows.checked_mul(cols).is_none_or(|len| len > self.data.len()) {
            let (index, len) = (rows.saturating_mul(cols), self.data.len());
            return Err(Error::OutOfRange { what: "buffer value", index, len });
        }
        (self.rows, self.cols, self.is_quantized) = (rows, cols, false);
        Ok(())
    }

    /// Returns an error unless the buffer has exactly `rows` rows to add to.
    pub(super) fn check_rows(&self, rows: usize) -> Result<(), Error> {
        match self.rows == rows {
            true => Ok(()),
            false => Err(Error::Length { what: "rows to add to", expected: rows, found: self.rows }),
        }
    }

    /// Sets the shape and grows the memory as needed. The previous contents are stale.
    pub(super) fn fit(&mut self, rows: usize, cols: usize) -> Result<(), Error> {
        let len = rows.checked_mul(cols).ok_or(Error::Shape { rows, cols, experts: 1 })?;
        self.data.grow(len);
        (self.rows, self.cols, self.is_quantized) = (rows, cols, false);
        Ok(())
    }

    pub(super) fn values(&self) -> &[f32] {
        &self.data[..self.rows * self.cols]
    }

    pub(super) fn values_mut(&mut self) -> &mut [f32] {
        self.is_quantized = false;
        &mut self.data[..self.rows * self.cols]
    }

    pub(super) fn row(&self, row: usize) -> Result<&[f32], Error> {
        match row < self.rows {
            true => Ok(&self.data[row * self.cols..(row + 1) * self.cols]),
            false => Err(Error::OutOfRange { what: "row", index: row, len: self.rows }),
        }
    }

    /// Index range in `values` of the `columns` of a row.
    pub(super) fn index_range(&self, row: usize, columns: Range<usize>) -> Result<Range<usize>, Error> {
        let (rows, cols) = (self.rows, self.cols);
        if row >= rows {
            return Err(Error::OutOfRange { what: "row", index: row, len: rows });
        }
        if columns.start > columns.end || columns.end > cols {
            return Err(Error::OutOfRange { what: "value of a row", index: columns.end, len: cols });
        }
        Ok(row * cols + columns.start..row * cols + columns.end)
    }

    /// Gives several threads access to the rows. Marks the 8-bit form as stale.
    pub(super) fn share(&mut self) -> SharedRows<'_> {
        self.is_quantized = false;
        SharedRows { start: self.data.as_mut_ptr(), rows: self.rows, cols: self.cols, owner: PhantomData }
    }

    /// Calls `row` for every row, rows in parallel.
    pub(super) fn change(
        &mut self,
        pool: &Pool,
        row: impl Fn(usize, &mut [f32]) -> Result<(), Error> + Sync,
    ) -> Result<(), Error> {
        let (rows, shared) = (self.rows, self.share());
        super::try_each(pool, rows, |index| {
            // SAFETY: every row is visited once.
            row(index, unsafe { shared.row(index) })
        })
    }

    /// Like [`Buffer::change`]. With `kernels`, also computes the 8-bit form of each row.
    pub(super) fn fill(
        &mut self,
        pool: &Pool,
        kernels: Option<MatmulKernels>,
        row: impl Fn(usize, &mut [f32]) -> Result<(), Error> + Sync,
    ) -> Result<(), Error> {
        let Some(kernels) = kernels else { return self.change(pool, row) };
        let (rows, cols) = (self.rows, self.cols);
        self.quantized.resize(rows, cols);
        let shared = SharedRows { start: self.data.as_mut_ptr(), rows, cols, owner: PhantomData };
        let quantized = self.quantized.share();
        super::try_each(pool, rows, |index| {
            // SAFETY: every row is visited once.
            let values = unsafe { shared.row(index) };
            row(index, values)?;
            // SAFETY: as above.
            unsafe { quantized.quantize_row(kernels, index, values) }
        })?;
        self.is_quantized = true;
        Ok(())
    }

    /// The 8-bit form, if it is current.
    pub(super) fn current_quantized(&self) -> Option<&QuantizedRows> {
        self.is_quantized.then_some(&self.quantized)
    }

    /// Computes the 8-bit form unless it is current, rows in parallel.
    pub(super) fn quantize(&mut self, pool: &Pool, kernels: MatmulKernels) -> Result<(), Error> {
        if self.is_quantized {
            return Ok(());
        }
        let (rows, cols) = (self.rows, self.cols);
        self.quantized.resize(rows, cols);
        let (shared, data) = (self.quantized.share(), &self.data);
        super::try_each(pool, rows, |row| {
            // SAFETY: every row is visited once.
            unsafe { shared.quantize_row(kernels, row, &data[row * cols..(row + 1) * cols]) }
        })?;
        self.is_quantized = true;
        Ok(())
    }

    /// The buffer as the output of products.
    pub(super) fn output(&mut self) -> SharedOut<'_> {
        self.is_quantized = false;
        // SAFETY: the pointer is valid for rows * cols initialised values and borrowed mutably for the
        // handle's lifetime; each product gives its threads disjoint panels.
        unsafe { SharedOut::new(self.data.as_mut_ptr(), self.rows, self.cols) }
    }
}

/// Two different buffers, one to read and one to change.
pub(super) fn pair(
    buffers: &mut [Buffer],
    read: BufferId,
    write: BufferId,
) -> Result<(&Buffer, &mut Buffer), Error> {
    pair_mut(buffers, read, write).map(|(read, write)| (&*read, write))
}

/// Two different buffers to change.
pub(super) fn pair_mut(
    buffers: &mut [Buffer],
    first: BufferId,
    second: BufferId,
) -> Result<(&mut Buffer, &mut Buffer), Error> {
    match buffers.get_disjoint_mut([first.0 as usize, second.0 as usize]) {
        Ok([first, second]) => Ok((first, second)),
        Err(_) => Err(Error::SameBuffer),
    }
}

/// Output handles of several buffers, all different from each other and from `input`.
pub(super) fn outputs<'a>(
    buffers: &'a mut [Buffer],
    input: usize,
    ids: &[usize],
) -> Result<(&'a Buffer, Vec<SharedOut<'a>>), Error> {
    handles(buffers, input, ids, Buffer::output)
}

/// Rows of several buffers, all different from each other and from `input`.
pub(super) fn shares<'a>(
    buffers: &'a mut [Buffer],
    input: usize,
    ids: &[usize],
) -> Result<(&'a Buffer, Vec<SharedRows<'a>>), Error> {
    handles(buffers, input, ids, Buffer::share)
}

fn handles<'a, T: Clone>(
    buffers: &'a mut [Buffer],
    input: usize,
    ids: &[usize],
    handle: impl Fn(&'a mut Buffer) -> T,
) -> Result<(&'a Buffer, Vec<T>), Error> {
    let mut seen = ids.to_vec();
    seen.push(input);
    seen.sort_unstable();
    if seen.windows(2).any(|pair| pair[0] == pair[1]) {
        return Err(Error::SameBuffer);
    }
    let (mut read, mut outs) = (None, vec![None; ids.len()]);
    for (index, buffer) in buffers.iter_mut().enumerate() {
        if index == input {
            read = Some(&*buffer);
        } else if let Some(position) = ids.iter().position(|id| *id == index) {
            outs[position] = Some(handle(buffer));
        }
    }
    let len = seen.len();
    let read = read.ok_or(Error::OutOfRange { what: "buffer", index: input, len })?;
    let outs: Option<Vec<T>> = outs.into_iter().collect();
    Ok((read, outs.ok_or(Error::OutOfRange { what: "buffer", index: len, len })?))
}

/// Rows of a buffer that several threads change, each its own rows.
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

impl<'a> SharedRows<'a> {
    /// Some columns of some rows as the output of a product with the same number of rows and columns.
    ///
    /// # Safety
    /// While a product runs on the result, nothing else may access these columns of these rows.
    pub(super) unsafe fn output(&self, rows: Range<usize>, columns: Range<usize>) -> SharedOut<'a> {
        assert!(rows.end <= self.rows && columns.end <= self.cols);
        // SAFETY: the rows from `start` on lie inside the buffer that this handle borrows mutably, `cols`
        // values apart, and the last row has at least as many values left as the columns need.
        unsafe {
            let start = self.start.add(rows.start * self.cols + columns.start);
            SharedOut::new(start, rows.len(), self.cols)
        }
    }

    /// Returns row `row`.
    ///
    /// # Safety
    /// No other reference to the same row may exist while the result lives.
    #[allow(clippy::mut_from_ref, reason = "rows are disjoint by this function's contract")]
    pub(super) unsafe fn row(&self, row: usize) -> &mut [f32] {
        assert!(row < self.rows);
        // SAFETY: the row lies inside the buffer that this handle borrows mutably; no other reference to it
        // exists.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(row * self.cols), self.cols) }
    }
}
