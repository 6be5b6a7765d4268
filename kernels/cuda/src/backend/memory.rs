//! Device memory of a backend: activation buffers, vectors, growing buffers.

use super::super::matmul::Quantised;
use super::super::rowwise::Rows;
use super::super::{CudaError, Device, DevicePtr};
use kernels::Error;
use kernels::backend::{BufferId, VectorId};

/// Memory that grows on demand and is kept. Growing drops its contents.
#[derive(Debug, Default)]
pub(super) struct GrowingBuffer {
    ptr: DevicePtr,
    bytes: usize,
}

impl GrowingBuffer {
    /// Returns a buffer of at least `bytes` bytes.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`].
    pub(super) fn of(&mut self, device: &mut dyn Device, bytes: usize) -> Result<DevicePtr, CudaError> {
        if bytes > self.bytes {
            self.release(device)?;
            self.ptr = device.allocate(bytes)?;
            self.bytes = bytes;
        }
        Ok(self.ptr)
    }

    /// Frees the memory.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn release(&mut self, device: &mut dyn Device) -> Result<(), CudaError> {
        if self.bytes > 0 {
            device.free(self.ptr)?;
            self.bytes = 0;
        }
        Ok(())
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

/// Assigns aligned ranges of the scratch memory.
#[derive(Debug, Default)]
pub(super) struct ScratchLayout {
    at: usize,
}

impl ScratchLayout {
    /// The offset of the next `bytes` bytes.
    pub(super) fn next(&mut self, bytes: usize) -> usize {
        let start = self.at;
        self.at += bytes.next_multiple_of(256);
        start
    }

    pub(super) fn bytes(&self) -> usize {
        self.at
    }
}

/// Contents of an activation buffer: `[rows][cols]` f32.
#[derive(Debug, Clone, Copy)]
pub(super) struct View {
    pub(super) ptr: DevicePtr,
    pub(super) rows: usize,
    pub(super) cols: usize,
}

impl View {
    /// Returns the shape as row kernels take it.
    pub(super) fn of(&self) -> Rows {
        Rows { rows: self.rows, cols: self.cols }
    }

    pub(super) fn bytes(&self) -> usize {
        self.rows * self.cols * size_of::<f32>()
    }

    /// Returns the address of a row.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    pub(super) fn row(&self, row: usize) -> Result<DevicePtr, Error> {
        let missing = Error::OutOfRange { what: "row", index: row, len: self.rows };
        let inside = (row < self.rows).then(|| self.ptr.offset(row * self.cols * size_of::<f32>()));
        inside.ok_or(missing)
    }
}

/// An activation buffer, which may have room for more than it holds, with the quantised forms of its rows while
/// they are up to date.
#[derive(Debug)]
struct Buffer {
    view: View,
    /// Number of f32 values that fit the buffer.
    capacity: usize,
    /// By the number of [`Quantised`].
    quantised: [GrowingBuffer; 4],
    forms: Forms,
}

/// Forms of a buffer's rows that are up to date.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Forms {
    floats: bool,
    quantised: [bool; 4],
}

impl Forms {
    const FLOATS: Self = Self { floats: true, quantised: [false; 4] };
}

/// Rows and columns of each buffer, and its forms that are up to date.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Shapes(Vec<(usize, usize, Forms)>);

#[derive(Debug, Default)]
pub(super) struct Buffers(Vec<Buffer>);

impl Buffers {
    pub(super) fn create(
        &mut self,
        device: &mut dyn Device,
        rows: usize,
        cols: usize,
    ) -> Result<BufferId, Error> {
        let impossible = Error::Shape { rows, cols, experts: 1 };
        let capacity = rows.checked_mul(cols).filter(|n| *n <= isize::MAX as usize / size_of::<f32>());
        let capacity = capacity.ok_or(impossible)?;
        let view = View { ptr: device.allocate(capacity * size_of::<f32>())?, rows: 0, cols };
        self.0.push(Buffer { view, capacity, quantised: Default::default(), forms: Forms::FLOATS });
        Ok(BufferId::new(self.0.len() as u32 - 1))
    }

    /// # Errors
    /// [`Error::OutOfRange`]; [`Error::Unsupported`] for a buffer without its floats.
    pub(super) fn get(&self, id: BufferId) -> Result<View, Error> {
        let view = self.either(id)?;
        match self.0[id.number() as usize].forms.floats {
            true => Ok(view),
            false => Err(Error::Unsupported { what: "values of which only products' 8-bit form was kept" }),
        }
    }

    /// Like [`Self::get`], for rows that are read as floats or in a quantised form.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    pub(super) fn either(&self, id: BufferId) -> Result<View, Error> {
        let missing = Error::OutOfRange { what: "buffer", index: id.number() as usize, len: self.0.len() };
        Ok(self.0.get(id.number() as usize).ok_or(missing)?.view)
    }

    /// Marks the floats of a buffer as out of date.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    pub(super) fn lacks_floats(&mut self, id: BufferId) -> Result<(), Error> {
        self.buffer(id)?.forms.floats = false;
        Ok(())
    }

    /// Returns two different buffers: one to read and one to change.
    ///
    /// # Errors
    /// [`Error::SameBuffer`], [`Error::OutOfRange`].
    pub(super) fn pair(&self, read: BufferId, write: BufferId) -> Result<(View, View), Error> {
        if read == write { Err(Error::SameBuffer) } else { Ok((self.get(read)?, self.get(write)?)) }
    }

    fn buffer(&mut self, id: BufferId) -> Result<&mut Buffer, Error> {
        let missing = Error::OutOfRange { what: "buffer", index: id.number() as usize, len: self.0.len() };
        self.0.get_mut(id.number() as usize).ok_or(missing)
    }

    /// Marks a buffer as changed, so that its quantised forms are out of date.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    pub(super) fn changed(&mut self, id: BufferId) -> Result<(), Error> {
        self.buffer(id)?.forms = Forms::FLOATS;
        Ok(())
    }

    /// Sets the number of rows and columns of a buffer.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] beyond the buffer's capacity.
    pub(super) fn shape(&mut self, id: BufferId, rows: usize, cols: usize) -> Result<View, Error> {
        let buffer = self.buffer(id)?;
        if rows.checked_mul(cols).is_none_or(|len| len > buffer.capacity) {
            let (index, len) = (rows.saturating_mul(cols), buffer.capacity);
            return Err(Error::OutOfRange { what: "buffer value", index, len });
        }
        (buffer.view.rows, buffer.view.cols, buffer.forms) = (rows, cols, Forms::FLOATS);
        Ok(buffer.view)
    }

    /// Returns the output buffer of a product or an embedding. With `accumulate` its shape is kept,
    /// otherwise it is set.
    ///
    /// # Errors
    /// [`Error::Length`] if `accumulate` is set and the rows or columns differ.
    pub(super) fn target(
        &mut self,
        id: BufferId,
        (rows, cols): (usize, usize),
        accumulate: bool,
    ) -> Result<View, Error> {
        if !accumulate {
            return self.shape(id, rows, cols);
        }
        let view = self.get(id)?;
        same("rows to add to", rows, view.rows)?;
        same("columns to add to", cols, view.cols)?;
        self.changed(id)?;
        Ok(view)
    }

    /// Returns the memory for a quantised form, to which the operation that changes the buffer must write.
    /// Marks it as up to date.
    ///
    /// # Errors
    /// [`Error::OutOfRange`]; errors of the device.
    pub(super) fn written(
        &mut self,
        device: &mut dyn Device,
        id: BufferId,
        form: Quantised,
    ) -> Result<DevicePtr, Error> {
        let buffer = self.buffer(id)?;
        let bytes = buffer.view.rows * form.row_bytes(buffer.view.cols);
        let room = buffer.quantised[form as usize].of(device, bytes)?;
        buffer.forms.quantised[form as usize] = true;
        Ok(room)
    }

    /// Returns the memory of a quantised form, and whether it still has to be computed.
    ///
    /// # Errors
    /// As [`Self::written`].
    pub(super) fn quantised(
        &mut self,
        device: &mut dyn Device,
        id: BufferId,
        form: Quantised,
    ) -> Result<(DevicePtr, bool), Error> {
        let is_quantised = self.buffer(id)?.forms.quantised[form as usize];
        Ok((self.written(device, id, form)?, !is_quantised))
    }

    /// Returns the shapes of all buffers.
    pub(super) fn shapes(&self) -> Shapes {
        Shapes(self.0.iter().map(|buffer| (buffer.view.rows, buffer.view.cols, buffer.forms)).collect())
    }

    /// Restores the shapes that [`Self::shapes`] returned.
    pub(super) fn set_shapes(&mut self, shapes: &Shapes) {
        for (buffer, &(rows, cols, forms)) in self.0.iter_mut().zip(&shapes.0) {
            (buffer.view.rows, buffer.view.cols, buffer.forms) = (rows, cols, forms);
        }
    }

    pub(super) fn bytes(&self) -> usize {
        let quantised = |buffer: &Buffer| buffer.quantised.iter().map(GrowingBuffer::bytes).sum::<usize>();
        self.0.iter().map(|buffer| buffer.capacity * size_of::<f32>() + quantised(buffer)).sum()
    }
}

/// A vector of f32.
#[derive(Debug, Clone, Copy)]
pub(super) struct Vector {
    pub(super) ptr: DevicePtr,
    pub(super) len: usize,
}

#[derive(Debug, Default)]
pub(super) struct Vectors(Vec<Vector>);

impl Vectors {
    pub(super) fn create(&mut self, device: &mut dyn Device, values: &[f32]) -> Result<VectorId, Error> {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
        let ptr = uploaded(device, &bytes)?;
        self.0.push(Vector { ptr, len: values.len() });
        Ok(VectorId::new(self.0.len() as u32 - 1))
    }

    /// # Errors
    /// [`Error::OutOfRange`].
    pub(super) fn get(&self, id: VectorId) -> Result<Vector, Error> {
        let missing = Error::OutOfRange { what: "vector", index: id.number() as usize, len: self.0.len() };
        self.0.get(id.number() as usize).copied().ok_or(missing)
    }

    /// Returns the address of a vector of length `len`, or `None` without an id.
    ///
    /// # Errors
    /// [`Error::Length`] for another length.
    pub(super) fn optional(
        &self,
        what: &'static str,
        id: Option<VectorId>,
        len: usize,
    ) -> Result<Option<DevicePtr>, Error> {
        id.map(|id| self.sized(what, id, len)).transpose()
    }

    /// Returns the address of a vector of length `len`.
    ///
    /// # Errors
    /// [`Error::Length`] for another length.
    pub(super) fn sized(&self, what: &'static str, id: VectorId, len: usize) -> Result<DevicePtr, Error> {
        let vector = self.get(id)?;
        same(what, len, vector.len)?;
        Ok(vector.ptr)
    }

    pub(super) fn bytes(&self) -> usize {
        self.0.iter().map(|vector| vector.len * size_of::<f32>()).sum()
    }
}

/// Uploads bytes to newly allocated device memory.
///
/// # Errors
/// Errors of the device.
pub(super) fn uploaded(device: &mut dyn Device, bytes: &[u8]) -> Result<DevicePtr, CudaError> {
    let ptr = device.allocate(bytes.len())?;
    device.upload(ptr, bytes)?;
    Ok(ptr)
}

/// # Errors
/// [`Error::Length`] if the two differ.
pub(super) fn same(what: &'static str, expected: usize, found: usize) -> Result<(), Error> {
    if expected == found { Ok(()) } else { Err(Error::Length { what, expected, found }) }
}
