//! Row operations.

use super::super::matmul::Quantised;
use super::super::rowwise::{Affine, DeviceNorm, Up};
use super::super::sampling::SamplingKernels;
use super::super::{Device, DevicePtr, source};
use super::CudaBackend;
use super::memory::{Buffers, Vectors, same};
use kernels::Error;
use kernels::backend::{ActivationMode, BufferId, GateOp, GatedNormOp, Norm, VectorId};

/// Returns the memory for the int8 form of a buffer that an operation changes. Most products of the class read it.
fn int8(
    activations: ActivationMode,
    device: &mut dyn Device,
    buffers: &mut Buffers,
    id: BufferId,
) -> Result<Option<DevicePtr>, Error> {
    match activations {
        ActivationMode::Int8 | ActivationMode::Mxfp8 | ActivationMode::Nvfp4 => {
            Ok(Some(buffers.written(device, id, Quantised::Int8)?))
        }
        ActivationMode::F32 | ActivationMode::Bf16 => Ok(None),
    }
}

/// See [`kernels::backend::Backend::norm`].
pub(super) fn norm(backend: &mut CudaBackend, x: BufferId, norm: &Norm, out: BufferId) -> Result<(), Error> {
    let CudaBackend { device, rowwise, buffers, vectors, activations, .. } = backend;
    let device = device.as_mut();
    let from = buffers.get(x)?;
    let norm = device_norm(vectors, norm, from.cols)?;
    let to = if x == out { from } else { buffers.shape(out, from.rows, from.cols)? };
    let quantised = int8(*activations, device, buffers, out)?;
    Ok(rowwise.norm(device, from.of(), from.ptr, &norm, to.ptr, quantised)?)
}

/// See [`kernels::backend::Backend::add`].
pub(super) fn add(
    backend: &mut CudaBackend,
    x: BufferId,
    y: BufferId,
    norm: Option<&Norm>,
    scale: f32,
) -> Result<(), Error> {
    let CudaBackend { device, rowwise, buffers, vectors, .. } = backend;
    let (from, to) = buffers.pair(y, x)?;
    same("rows to add", to.rows, from.rows)?;
    same("columns to add", to.cols, from.cols)?;
    let norm = norm.map(|norm| rms_norm(vectors, norm, from.cols, "a post norm that is no RMS norm"));
    let norm = norm.transpose()?;
    rowwise.add(device.as_mut(), to.of(), to.ptr, from.ptr, norm.as_ref(), scale)?;
    buffers.changed(x)
}

/// See [`GatedNormOp`].
pub(super) fn gated_norm(backend: &mut CudaBackend, op: &GatedNormOp) -> Result<(), Error> {
    let CudaBackend { device, rowwise, buffers, vectors, activations, .. } = backend;
    let device = device.as_mut();
    let (gate, x) = buffers.pair(op.gate, op.x)?;
    same("gate", x.cols, gate.cols)?;
    same("rows of a gate", x.rows, gate.rows)?;
    let norm = rms_norm(vectors, &op.norm, x.cols, "a gated norm that is no RMS norm")?;
    let quantised = int8(*activations, device, buffers, op.x)?;
    Ok(rowwise.gated_norm(device, x.of(), x.ptr, gate.ptr, &norm, op.gate_first, quantised)?)
}

/// See [`GateOp`].
pub(super) fn gate(backend: &mut CudaBackend, op: &GateOp) -> Result<(), Error> {
    let CudaBackend { device, rowwise, buffers, activations, .. } = backend;
    let device = device.as_mut();
    let gate = buffers.get(op.gate)?;
    let up = match op.up {
        None if op.up_from > 0 => return Err(Error::Unsupported { what: "columns of nothing" }),
        None => None,
        Some(up) => {
            let (up, _) = buffers.pair(up, op.gate)?;
            same("rows to gate", gate.rows, up.rows)?;
            Some(Up { start: up.ptr, cols: up.cols, from: op.up_from })
        }
    };
    let quantised = int8(*activations, device, buffers, op.gate)?;
    Ok(rowwise.gate(device, gate.of(), gate.ptr, up, op.activation, quantised)?)
}

/// See [`kernels::backend::Backend::scale_rows`].
pub(super) fn scale_rows(backend: &mut CudaBackend, x: BufferId, gate: BufferId) -> Result<(), Error> {
    let CudaBackend { device, rowwise, buffers, .. } = backend;
    let (gate, to) = buffers.pair(gate, x)?;
    same("rows of a gate", to.rows, gate.rows)?;
    rowwise.scale_rows(device.as_mut(), to.of(), to.ptr, gate.ptr, gate.cols)?;
    buffers.changed(x)
}

/// See [`kernels::backend::Backend::finish_logits`].
pub(super) fn scale(
    backend: &mut CudaBackend,
    x: BufferId,
    factor: f32,
    softcap: Option<f32>,
) -> Result<(), Error> {
    let CudaBackend { device, rowwise, buffers, .. } = backend;
    let view = buffers.get(x)?;
    rowwise.scale(device.as_mut(), view.of(), view.ptr, factor, softcap)?;
    buffers.changed(x)
}

/// See [`kernels::backend::Backend::gather_rows`].
pub(super) fn gather(
    backend: &mut CudaBackend,
    x: BufferId,
    rows: &[u32],
    out: BufferId,
) -> Result<(), Error> {
    let CudaBackend { device, rowwise, buffers, indices, .. } = backend;
    let device = device.as_mut();
    let (from, _) = buffers.pair(x, out)?;
    if let Some(row) = rows.iter().find(|row| **row as usize >= from.rows) {
        return Err(Error::OutOfRange { what: "row", index: *row as usize, len: from.rows });
    }
    let to = buffers.shape(out, rows.len(), from.cols)?;
    if rows.is_empty() {
        return Ok(());
    }
    let bytes: Vec<u8> = rows.iter().flat_map(|row| row.to_ne_bytes()).collect();
    let index = indices.of(device, bytes.len())?;
    device.upload(index, &bytes)?;
    Ok(rowwise.gather_rows(device, to.of(), from.ptr, index, to.ptr)?)
}

/// See [`kernels::backend::Backend::argmax`].
pub(super) fn argmax(backend: &mut CudaBackend, x: BufferId, out: &mut Vec<u32>) -> Result<(), Error> {
    let CudaBackend { device, rowwise, buffers, indices, .. } = backend;
    let device = device.as_mut();
    let view = buffers.get(x)?;
    out.clear();
    if view.rows == 0 {
        return Ok(());
    }
    let mut bytes = vec![0; view.rows * size_of::<u32>()];
    let found = indices.of(device, bytes.len())?;
    rowwise.argmax(device, view.of(), view.ptr, found)?;
    device.download(found, &mut bytes)?;
    out.extend(bytes.as_chunks().0.iter().map(|bytes| u32::from_ne_bytes(*bytes)));
    Ok(())
}

/// Number of largest values that are read for a draw, which rarely needs more: half a KiB instead of a row
/// of up to a MiB.
pub(super) const BEST: usize = 64;

/// See [`kernels::backend::Backend::best`].
pub(super) fn best(backend: &mut CudaBackend, x: BufferId, out: &mut Vec<(u32, f32)>) -> Result<(), Error> {
    let CudaBackend { device, modules, sampling, buffers, indices, .. } = backend;
    let device = device.as_mut();
    let kernels = match sampling {
        Some(kernels) => *kernels,
        None => *sampling.insert(SamplingKernels::load(device, modules.of(&source::SAMPLING)?)?),
    };
    let view = buffers.get(x)?;
    out.clear();
    let count = BEST.min(view.cols);
    if view.rows * count == 0 {
        return Ok(());
    }
    let mut bytes = vec![0; view.rows * count * 2 * size_of::<u32>()];
    let found = indices.of(device, bytes.len())?;
    kernels.best(device, view.of(), view.ptr, count, found)?;
    device.download(found, &mut bytes)?;
    let number = |bytes: [u8; 4]| u32::from_ne_bytes(bytes);
    let pair = |[index, value]: &[[u8; 4]; 2]| (number(*index), f32::from_bits(number(*value)));
    out.extend(bytes.as_chunks().0.as_chunks().0.iter().map(pair));
    Ok(())
}

/// Looks up the vectors of a norm for rows of `cols` values.
fn device_norm(vectors: &Vectors, norm: &Norm, cols: usize) -> Result<DeviceNorm, Error> {
    let Norm { rms, weight, bias, eps, width } = *norm;
    if rms && bias.is_some() {
        return Err(Error::Unsupported { what: "an RMS norm with a bias" });
    }
    if width == 0 || !cols.is_multiple_of(width) {
        return Err(Error::Length { what: "row to norm", expected: width, found: cols });
    }
    let affine = |what, id: Option<VectorId>| -> Result<Option<Affine>, Error> {
        let Some(id) = id else { return Ok(None) };
        let vector = vectors.get(id)?;
        let fits = vector.len == width || vector.len == cols;
        let misfit = Error::Length { what, expected: width, found: vector.len };
        if fits { Ok(Some(Affine { start: vector.ptr, len: vector.len })) } else { Err(misfit) }
    };
    Ok(DeviceNorm {
        rms,
        weight: affine("norm weight", weight)?,
        bias: affine("norm bias", bias)?,
        eps,
        width,
    })
}

/// Like [`device_norm`], for RMS norms only. `unsupported` is the error text for another norm.
fn rms_norm(
    vectors: &Vectors,
    norm: &Norm,
    cols: usize,
    unsupported: &'static str,
) -> Result<DeviceNorm, Error> {
    if norm.rms { device_norm(vectors, norm, cols) } else { Err(Error::Unsupported { what: unsupported }) }
}
