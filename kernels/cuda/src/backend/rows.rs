//! Row operations.

use super::super::matmul::Quantised;
use super::super::rowwise::{Affine, DeviceNorm, Up};
use super::super::sampling::SamplingKernels;
use super::super::{Device, DevicePtr, source};
use super::CudaBackend;
use super::memory::{Buffers, Vectors, same};
use kernels::Error;
use kernels::backend::{ActivationMode, BufferId, GateOp, GatedNormOp, MatrixId, Norm, VectorId};

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

/// Whether products with `readers`, of which there are some, read only the int8 form of their rows in this step.
fn only_int8(backend: &CudaBackend, readers: &[MatrixId]) -> bool {
    let CudaBackend { matrices, adapters, activations: mode, .. } = backend;
    let all = readers.iter().all(|matrix| matrices.reads_only_int8(*mode, *matrix));
    all && !readers.is_empty() && !adapters.are_used()
}

/// See [`kernels::backend::Backend::norm_for`]; without `readers`, [`kernels::backend::Backend::norm`].
pub(super) fn norm(
    backend: &mut CudaBackend,
    x: BufferId,
    norm: &Norm,
    out: BufferId,
    readers: &[MatrixId],
) -> Result<(), Error> {
    let only_int8 = only_int8(backend, readers);
    let CudaBackend { device, rowwise, buffers, vectors, activations, .. } = backend;
    let device = device.as_mut();
    let from = buffers.get(x)?;
    let norm = device_norm(vectors, norm, from.cols)?;
    let to = if x == out { from } else { buffers.shape(out, from.rows, from.cols)? };
    let quantised = int8(*activations, device, buffers, out)?;
    match quantised.filter(|_| only_int8 && norm.width == from.cols) {
        None => Ok(rowwise.norm(device, from.of(), from.ptr, &norm, to.ptr, quantised)?),
        Some(quantised) => {
            rowwise.norm_to_int8(device, from.of(), from.ptr, &norm, quantised)?;
            buffers.lacks_floats(out)
        }
    }
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

/// See [`kernels::backend::Backend::gate_for`]; without `readers`, [`GateOp`].
pub(super) fn gate(backend: &mut CudaBackend, op: &GateOp, readers: &[MatrixId]) -> Result<(), Error> {
    let only_int8 = only_int8(backend, readers);
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
    let keeps = !only_int8 || quantised.is_none();
    rowwise.gate(device, gate.of(), gate.ptr, up, op.activation, (keeps, quantised))?;
    if keeps { Ok(()) } else { buffers.lacks_floats(op.gate) }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::Source;
    use crate::tests::compiled;
    use crate::tests::sim::{bits, numbers};
    use crate::{Arch, CudaConfig, SimDevice};
    use kernels::backend::{Backend, GateActivation, MatmulJob, MatrixSource};
    use kernels::quant::GgmlType;

    const ROWS: usize = 2;
    const COLS: usize = 288;
    const OUTPUTS: usize = 40;

    fn values(backend: &mut CudaBackend, x: BufferId, cols: usize) -> Result<Vec<u32>, Error> {
        let mut row = vec![0.0; cols];
        backend.read_row(x, ROWS - 1, &mut row)?;
        Ok(bits(&row))
    }

    #[test]
    fn rows_for_products_alone_have_their_bits_and_no_floats() {
        let compile = |source: &Source| Ok(compiled(source, Arch::SM_90).clone());
        let config = CudaConfig { arch: Arch::SM_90, activations: ActivationMode::Int8, threads: 1 };
        let device = Box::new(SimDevice::new(ptx::Limits::HOPPER, 1));
        let mut backend = CudaBackend::new(device, config, Box::new(compile)).unwrap();
        let mut matrix = |ty: GgmlType| {
            let bytes = vec![0x35; ty.row_bytes(COLS).unwrap() * OUTPUTS];
            let source =
                MatrixSource { ggml_type: ty.id(), rows: OUTPUTS, cols: COLS, experts: 1, bytes: &bytes };
            backend.create_matrix(source).unwrap()
        };
        let (int8, floats) = (matrix(GgmlType::Q8_0), matrix(GgmlType::F32));
        let [x, up, out] = [COLS, COLS, OUTPUTS].map(|cols| backend.create_buffer(ROWS, cols).unwrap());
        let norm = Norm { rms: true, weight: None, bias: None, eps: 1e-6, width: COLS };
        let op = GateOp { gate: x, up: Some(up), up_from: 0, activation: GateActivation::Silu };
        let job = |matrix| MatmulJob { matrix, out, bias: None, scale: 1.0, accumulate: false };
        backend.write_rows(up, &numbers(2, 0, ROWS * COLS)).unwrap();
        for gates in [false, true] {
            let mut run = |readers: &[MatrixId]| {
                backend.write_rows(x, &numbers(1, 0, ROWS * COLS)).unwrap();
                let ran = match gates {
                    false => backend.norm_for(x, &norm, x, readers),
                    true => backend.gate_for(&op, readers),
                };
                ran.unwrap();
                backend.matmul(x, &[job(int8)]).unwrap();
                let product = values(&mut backend, out, OUTPUTS).unwrap();
                (product, values(&mut backend, x, COLS), backend.matmul(x, &[job(floats)]))
            };
            let (expected, kept, product) = run(&[int8, floats]);
            assert!(kept.is_ok() && product.is_ok());
            let (found, read, product) = run(&[int8]);
            assert_eq!(found, expected);
            for refused in [read.map(drop), product] {
                assert!(matches!(refused, Err(Error::Unsupported { .. })), "{refused:?}");
            }
        }
    }
}
