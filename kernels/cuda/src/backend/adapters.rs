//! Adapters of rows: low-rank additions to their products.

use super::super::lora::{Addition, LoraKernels, Part};
use super::super::{Device, DevicePtr, source};
use super::CudaBackend;
use super::memory::{GrowingBuffer, same};
use kernels::Error;
use kernels::backend::{AdapterId, BufferId, LowRankSource, MatmulJob};
use std::collections::HashMap;
use std::ops::Range;

/// Marker for a row without an adapter.
const NONE: u32 = u32::MAX;

/// The loaded adapters, and those of the rows of the running step.
#[derive(Default)]
pub(super) struct Adapters {
    kernels: Option<LoraKernels>,
    /// By the number of the matrix.
    tables: HashMap<u32, Table>,
    loaded: Vec<Option<Loaded>>,
    /// Of the next step.
    next: Vec<(Range<usize>, AdapterId)>,
    /// Adapter of each row of the step, u32.
    rows: GrowingBuffer,
    step: Option<Step>,
}

struct Loaded {
    /// A and B of all parts.
    memory: DevicePtr,
    bytes: usize,
}

/// The running step, if a row has an adapter.
#[derive(Clone, Copy)]
struct Step {
    rows: usize,
    adapters: DevicePtr,
}

/// The parts of all adapters for one matrix, by the adapters' numbers.
#[derive(Default)]
struct Table {
    memory: GrowingBuffer,
    parts: Vec<Part>,
}

impl Table {
    /// Makes room for `count` parts.
    fn reserve(&mut self, device: &mut dyn Device, count: usize) -> Result<(), Error> {
        self.parts.resize(count.max(self.parts.len()), Part::default());
        self.memory.of(device, self.parts.len().next_power_of_two() * Part::BYTES)?;
        self.upload(device)
    }

    fn upload(&mut self, device: &mut dyn Device) -> Result<(), Error> {
        let bytes: Vec<u8> = self.parts.iter().flat_map(Part::bytes).collect();
        let memory = self.memory.of(device, bytes.len())?;
        Ok(device.upload(memory, &bytes)?)
    }

    fn rank(&self) -> usize {
        self.parts.iter().map(|part| part.rank as usize).max().unwrap_or(0)
    }
}

impl Adapters {
    /// Whether a row of the step has an adapter.
    pub(super) fn are_used(&self) -> bool {
        self.step.is_some()
    }

    pub(super) fn bytes(&self) -> usize {
        self.loaded.iter().flatten().map(|loaded| loaded.bytes).sum()
    }

    /// See [`kernels::backend::Backend::use_adapters`].
    pub(super) fn use_for(&mut self, rows: &[(Range<usize>, AdapterId)]) -> Result<(), Error> {
        self.next.clear();
        let known = |id: AdapterId| matches!(self.loaded.get(id.number() as usize), Some(Some(_)));
        if let Some((_, id)) = rows.iter().find(|(_, id)| !known(*id)) {
            let (index, len) = (id.number() as usize, self.loaded.len());
            return Err(Error::OutOfRange { what: "adapter", index, len });
        }
        self.next.extend_from_slice(rows);
        Ok(())
    }

    /// Starts a step with this number of rows. Returns whether one of them has an adapter.
    pub(super) fn begin(&mut self, device: &mut dyn Device, rows: usize) -> Result<bool, Error> {
        self.step = None;
        if self.next.is_empty() {
            return Ok(false);
        }
        let mut adapters = vec![NONE; rows];
        for (range, id) in self.next.drain(..) {
            let index = range.end;
            let missing = Error::OutOfRange { what: "row with an adapter", index, len: rows };
            adapters.get_mut(range).ok_or(missing)?.fill(id.number());
        }
        let bytes: Vec<u8> = adapters.iter().flat_map(|number| number.to_ne_bytes()).collect();
        let memory = self.rows.of(device, bytes.len().next_power_of_two())?;
        device.upload(memory, &bytes)?;
        self.step = Some(Step { rows, adapters: memory });
        Ok(true)
    }
}

/// See [`kernels::backend::Backend::load_adapter`].
pub(super) fn load(backend: &mut CudaBackend, parts: &[LowRankSource<'_>]) -> Result<AdapterId, Error> {
    let CudaBackend { device, modules, matrices, adapters, graphs, .. } = backend;
    let mut bytes = 0;
    for (at, LowRankSource { matrix, rank, a, b, .. }) in parts.iter().enumerate() {
        let shape = matrices.get(*matrix)?.0.shape;
        same("A of an adapter", rank.saturating_mul(shape.cols()), a.len())?;
        same("B of an adapter", rank.saturating_mul(shape.rows()), b.len())?;
        if parts[..at].iter().any(|earlier| earlier.matrix == *matrix) {
            return Err(Error::Unsupported { what: "two additions of an adapter to one matrix" });
        }
        bytes += 4 * (a.len() + b.len());
    }
    // Their launches have other tables and ranks.
    graphs.clear(device);
    let device = device.as_mut();
    if adapters.kernels.is_none() {
        adapters.kernels = Some(LoraKernels::load(device, modules.of(&source::LORA)?)?);
    }
    let free = adapters.loaded.iter().position(Option::is_none).unwrap_or(adapters.loaded.len());
    for part in parts {
        adapters.tables.entry(part.matrix.number()).or_default().reserve(device, free + 1)?;
    }
    let memory = device.allocate(bytes.max(1))?;
    let mut at = memory;
    for &LowRankSource { matrix, rank, scale, a, b } in parts {
        let outputs = b.len() / rank.max(1);
        let upright = (0..rank).flat_map(|j| (0..outputs).map(move |i| b[i * rank + j]));
        let values: Vec<u8> = a.iter().copied().chain(upright).flat_map(f32::to_ne_bytes).collect();
        device.upload(at, &values)?;
        let part = Part { a: at, b: at.offset(4 * a.len()), rank: rank as u32, scale };
        let table = adapters.tables.entry(matrix.number()).or_default();
        table.parts[free] = part;
        table.upload(device)?;
        at = at.offset(values.len());
    }
    let loaded = Some(Loaded { memory, bytes });
    match adapters.loaded.get_mut(free) {
        Some(slot) => *slot = loaded,
        None => adapters.loaded.push(loaded),
    }
    Ok(AdapterId::new(free as u32))
}

/// See [`kernels::backend::Backend::unload_adapter`].
pub(super) fn unload(backend: &mut CudaBackend, id: AdapterId) -> Result<(), Error> {
    let CudaBackend { device, adapters, graphs, .. } = backend;
    let number = id.number() as usize;
    let Some(Loaded { memory, .. }) = adapters.loaded.get_mut(number).and_then(Option::take) else {
        return Ok(());
    };
    graphs.clear(device);
    for table in adapters.tables.values_mut() {
        if let Some(part) = table.parts.get_mut(number).filter(|part| part.rank > 0) {
            *part = Part::default();
            table.upload(device.as_mut())?;
        }
    }
    Ok(device.free(memory)?)
}

/// Adds what the adapters of the step's rows add to these products.
pub(super) fn add(backend: &mut CudaBackend, x: BufferId, jobs: &[MatmulJob]) -> Result<(), Error> {
    let CudaBackend { device, buffers, adapters, scratch, .. } = backend;
    let (Some(Step { rows, adapters: of_rows }), Some(kernels)) = (adapters.step, adapters.kernels) else {
        return Ok(());
    };
    let x = buffers.get(x)?;
    if x.rows != rows {
        return Ok(());
    }
    for job in jobs {
        let Some(table) = adapters.tables.get_mut(&job.matrix.number()) else { continue };
        let (rank, count) = (table.rank(), table.parts.len());
        if rank == 0 {
            continue;
        }
        let out = buffers.get(job.out)?;
        let device = device.as_mut();
        let addition = Addition {
            rows,
            x: x.ptr,
            cols: x.cols,
            adapters: of_rows,
            parts: table.memory.of(device, count * Part::BYTES)?,
            count,
            rank,
            inner: scratch.of(device, rows * rank * size_of::<f32>())?,
            out: out.ptr,
            outputs: out.cols,
        };
        kernels.add(device, &addition)?;
    }
    Ok(())
}
