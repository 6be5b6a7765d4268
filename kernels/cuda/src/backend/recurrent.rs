//! Recurrent layers: their states in slots of the arena, and deferred state updates.
//!
//! This works as on the CPU (`cpu/deferred.rs`): a deferred step reads a state and does not change it. The
//! inputs of its rows are saved for each layer, and the accepted rows are run again.

use super::super::recurrent::{ConvCall, DeltaNetCall, DeviceState, Mamba2Call, RecurrentKernels, StateCall};
use super::super::step::StepPointers;
use super::super::{Device, DevicePtr, source};
use super::CudaBackend;
use super::attention::Caches;
use super::memory::{GrowingBuffer, Vectors, same, uploaded};
use super::step::StepMemory;
use kernels::Error;
use kernels::attention::OFFSET_UNIT;
use kernels::backend::{
    BufferId, ConvOp, DeltaNetOp, HeadType, MAX_DEFERRED_STEPS, Mamba2Op, StateLayerId, StateShape,
    StepInput, StepSequence, StepState,
};
use kernels::recurrent::StatePlan;
use std::collections::VecDeque;

/// Recurrent layers of a backend.
pub(super) struct States {
    layers: Vec<StateLayer>,
    /// Bytes of a slot for the layers that have been created so far.
    slot_bytes: usize,
    kernels: Option<RecurrentKernels>,
    /// Deferred steps that have not been accepted yet, the oldest first.
    deferred: VecDeque<DeferredStep>,
    /// Whether the last deferred step is the current step.
    runs: bool,
    /// Memory of accepted steps for reuse, by layer.
    spare: Vec<Vec<Inputs>>,
    /// The accepted rows, as a step of their own.
    accepted: StepMemory,
}

struct StateLayer {
    layout: DeviceState,
    head_offsets: DevicePtr,
    /// Byte offset inside a slot.
    offset: usize,
}

/// Inputs of a step's deferred rows to one layer.
#[derive(Debug, Default)]
struct Inputs {
    conv: Option<ConvOp>,
    recurrence: Option<Recurrence>,
    /// The convolution's inputs, then those of the recurrence.
    saved: [SavedInput; 4],
}

/// A step with deferred state updates.
#[derive(Debug)]
struct DeferredStep {
    /// In row order.
    sequences: Vec<DeferredSequence>,
    layers: Vec<Inputs>,
}

#[derive(Debug, Clone, Copy)]
enum Recurrence {
    DeltaNet(DeltaNetOp),
    Mamba2(Mamba2Op),
}

/// The deferred rows of a buffer, one after the other, and the accepted rows.
#[derive(Debug, Default)]
struct SavedInput {
    all: GrowingBuffer,
    accepted: GrowingBuffer,
    cols: usize,
}

#[derive(Debug, Clone, Copy)]
struct DeferredSequence {
    rows: usize,
    read: Option<u32>,
    write: u32,
}

impl Default for States {
    fn default() -> Self {
        Self {
            layers: Vec::new(),
            slot_bytes: 0,
            kernels: None,
            deferred: VecDeque::new(),
            runs: false,
            spare: Vec::new(),
            accepted: StepMemory::new(Vec::new()),
        }
    }
}

impl States {
    /// Checks the state updates of a step.
    pub(super) fn check(&self, step: &StepInput<'_>, arena_bytes: usize) -> Result<(), Error> {
        if self.deferred.len() == MAX_DEFERRED_STEPS && step.states.iter().any(|state| state.deferred) {
            return Err(Error::DeferredSteps { max: MAX_DEFERRED_STEPS });
        }
        // A worker may have none of a model's recurrent layers.
        if self.layers.is_empty() {
            return Ok(());
        }
        StatePlan::new(step.sequences, step.states, self.slot_bytes)?;
        let slots = step.states.iter().flat_map(|state| {
            let exports = state.exports.iter().map(|export| export.slot);
            state.read.into_iter().chain([state.write]).chain(exports)
        });
        for slot in slots {
            let end = slot as u64 * OFFSET_UNIT as u64 + self.slot_bytes as u64;
            if end > arena_bytes as u64 {
                return Err(Error::OutsideArena { end, len: arena_bytes });
            }
        }
        Ok(())
    }

    /// Stores the deferred sequences of a step, in addition to those of earlier steps.
    pub(super) fn begin(&mut self, step: &StepInput<'_>) {
        let deferred = step.sequences.iter().zip(step.states).filter(|(_, state)| state.deferred);
        let sequence = |(sequence, state): (&StepSequence, &StepState)| DeferredSequence {
            rows: sequence.rows.len(),
            read: state.read,
            write: state.write,
        };
        let sequences: Vec<DeferredSequence> = deferred.map(sequence).collect();
        self.runs = !sequences.is_empty();
        if self.runs {
            let mut layers = self.spare.pop().unwrap_or_default();
            layers.resize_with(self.layers.len(), Inputs::default);
            for layer in &mut layers {
                (layer.conv, layer.recurrence) = (None, None);
            }
            self.deferred.push_back(DeferredStep { sequences, layers });
        }
    }

    /// See [`kernels::backend::Backend::read_state`].
    pub(super) fn read(
        &self,
        device: &mut dyn Device,
        caches: &Caches,
        layer: StateLayerId,
        slot: u32,
        (conv, recurrent): (&mut [f32], &mut [f32]),
    ) -> Result<(), Error> {
        let StateLayer { layout, offset, .. } = self.layer(layer)?;
        let mut bytes = vec![0; layout.bytes()];
        let from = caches.arena_ptr(slot, offset + layout.bytes())?.offset(*offset);
        device.download(from, &mut bytes)?;
        layout.read(&bytes, conv, recurrent)
    }

    pub(super) fn bytes(&self) -> usize {
        let deferred = self.deferred.iter().map(|step| &step.layers);
        let saved = deferred.chain(&self.spare).flatten().flat_map(|layer| &layer.saved);
        saved.map(|saved| saved.all.bytes() + saved.accepted.bytes()).sum::<usize>() + self.accepted.bytes()
    }

    fn layer(&self, id: StateLayerId) -> Result<&StateLayer, Error> {
        let missing =
            Error::OutOfRange { what: "state layer", index: id.number() as usize, len: self.layers.len() };
        self.layers.get(id.number() as usize).ok_or(missing)
    }

    /// Returns a layer, the kernels, and the layer's memory for inputs; `None` for the last if the step
    /// defers nothing.
    fn layer_context(&mut self, id: StateLayerId) -> Result<LayerContext<'_>, Error> {
        let index = id.number() as usize;
        let missing = Error::OutOfRange { what: "state layer", index, len: self.layers.len() };
        let step = self.deferred.back_mut().filter(|_| self.runs);
        match (&self.kernels, self.layers.get(index)) {
            (Some(kernels), Some(layer)) => {
                Ok((kernels, layer, step.and_then(|step| step.layers.get_mut(index))))
            }
            _ => Err(missing),
        }
    }
}

/// See [`States::layer_context`].
type LayerContext<'a> = (&'a RecurrentKernels, &'a StateLayer, Option<&'a mut Inputs>);

/// See [`kernels::backend::Backend::create_state_layer`].
pub(super) fn create_layer(
    backend: &mut CudaBackend,
    shape: StateShape,
    heads: &[HeadType],
    offset: usize,
) -> Result<StateLayerId, Error> {
    let CudaBackend { device, modules, states, .. } = backend;
    let layout = DeviceState::new(shape, heads)?;
    let end = offset.checked_add(layout.bytes()).filter(|_| offset.is_multiple_of(OFFSET_UNIT));
    states.slot_bytes = states.slot_bytes.max(end.ok_or(Error::UnalignedArena)?);
    if states.kernels.is_none() {
        let compiled = modules.of(&source::RECURRENT)?;
        states.kernels = Some(RecurrentKernels::load(device.as_mut(), compiled)?);
    }
    let head_offsets = uploaded(device.as_mut(), &layout.head_offsets())?;
    states.layers.push(StateLayer { layout, head_offsets, offset });
    Ok(StateLayerId::new(states.layers.len() as u32 - 1))
}

impl StateLayer {
    fn call<'a>(&'a self, arena: DevicePtr, step: &'a StepPointers, sequences: usize) -> StateCall<'a> {
        StateCall {
            layout: &self.layout,
            head_offsets: self.head_offsets,
            layer_offset: self.offset,
            arena,
            states: &step.states,
            sequences,
        }
    }
}

/// Copies the deferred rows of a buffer.
fn save_input(
    device: &mut dyn Device,
    kernels: &RecurrentKernels,
    step: &StepMemory,
    (x, cols): (DevicePtr, usize),
    saved: &mut SavedInput,
) -> Result<(), Error> {
    let count = step.step().kept_rows();
    if count > 0 {
        let room = saved.all.of(device, count * cols * size_of::<f32>())?;
        saved.cols = cols;
        kernels.keep_rows(device, x, cols, step.pointers()?.kept_rows, count, room)?;
    }
    Ok(())
}

/// See [`ConvOp`].
pub(super) fn conv(backend: &mut CudaBackend, op: &ConvOp) -> Result<(), Error> {
    let CudaBackend { device, caches, buffers, vectors, step, states, .. } = backend;
    let device = device.as_mut();
    let x = buffers.get(op.x)?;
    let (kernels, layer, inputs) = states.layer_context(op.layer)?;
    same("convolution input", layer.layout.shape().channels, x.cols)?;
    same("rows of the step", step.step().rows(), x.rows)?;
    if let Some(Inputs { conv, saved, .. }) = inputs {
        save_input(device, kernels, step, (x.ptr, x.cols), &mut saved[0])?;
        *conv = Some(*op);
    }
    let call = conv_call(vectors, layer.layout.shape(), op, x.ptr)?;
    let state = layer.call(caches.arena, step.pointers()?, step.step().sequences().len());
    kernels.conv(device, &state, &call)?;
    buffers.changed(op.x)
}

fn conv_call(vectors: &Vectors, shape: &StateShape, op: &ConvOp, x: DevicePtr) -> Result<ConvCall, Error> {
    let StateShape { channels, taps, .. } = *shape;
    Ok(ConvCall {
        x,
        weight: vectors.sized("convolution weight", op.weight, channels * taps)?,
        bias: vectors.optional("convolution bias", op.bias, channels)?,
        silu: op.silu,
    })
}

/// See [`DeltaNetOp`].
pub(super) fn delta_net(backend: &mut CudaBackend, op: &DeltaNetOp) -> Result<(), Error> {
    let CudaBackend { device, caches, buffers, vectors, step, states, .. } = backend;
    let device = device.as_mut();
    let rows = step.step().rows();
    let (kernels, layer, memory) = states.layer_context(op.layer)?;
    let StateShape { heads, rows: k_dim, cols: v_dim, .. } = *layer.layout.shape();
    let input = |what, id: BufferId, width| -> Result<DevicePtr, Error> {
        let buffer = buffers.get(id)?;
        same(what, width, buffer.cols)?;
        same("rows of the step", rows, buffer.rows)?;
        Ok(buffer.ptr)
    };
    let width = 2 * op.k_heads * k_dim + heads * v_dim;
    let inputs = [
        (input("delta net qkv", op.qkv, width)?, width),
        (input("delta net beta", op.beta, heads)?, heads),
        (input("delta net alpha", op.alpha, heads)?, heads),
    ];
    if [op.qkv, op.beta, op.alpha].contains(&op.out) {
        return Err(Error::SameBuffer);
    }
    let out = buffers.shape(op.out, rows, heads * v_dim)?.ptr;
    if let Some(Inputs { recurrence, saved, .. }) = memory {
        for (input, saved) in inputs.into_iter().zip(&mut saved[1..]) {
            save_input(device, kernels, step, input, saved)?;
        }
        *recurrence = Some(Recurrence::DeltaNet(*op));
    }
    let call = delta_net_call(vectors, heads, op, inputs.map(|(ptr, _)| ptr), out)?;
    let state = layer.call(caches.arena, step.pointers()?, step.step().sequences().len());
    Ok(kernels.delta_net(device, &state, &call)?)
}

fn delta_net_call(
    vectors: &Vectors,
    heads: usize,
    op: &DeltaNetOp,
    [qkv, beta, alpha]: [DevicePtr; 3],
    out: DevicePtr,
) -> Result<DeltaNetCall, Error> {
    let DeltaNetOp { k_heads, tiled, l2_eps, .. } = *op;
    let a = vectors.sized("delta net a", op.a, heads)?;
    let dt_bias = vectors.sized("delta net dt bias", op.dt_bias, heads)?;
    Ok(DeltaNetCall { qkv, beta, alpha, a, dt_bias, k_heads, tiled, l2_eps, out })
}

/// See [`Mamba2Op`].
pub(super) fn mamba2(backend: &mut CudaBackend, op: &Mamba2Op) -> Result<(), Error> {
    let CudaBackend { device, caches, buffers, vectors, step, states, .. } = backend;
    let device = device.as_mut();
    let rows = step.step().rows();
    let (kernels, layer, memory) = states.layer_context(op.layer)?;
    let StateShape { heads, rows: head_dim, cols: width, .. } = *layer.layout.shape();
    let input = |what, id: BufferId, width| -> Result<DevicePtr, Error> {
        let buffer = buffers.get(id)?;
        same(what, width, buffer.cols)?;
        same("rows of the step", rows, buffer.rows)?;
        Ok(buffer.ptr)
    };
    let xbc_width = heads * head_dim + 2 * op.groups * width;
    let inputs = [
        (input("Mamba-2 xBC", op.xbc, xbc_width)?, xbc_width),
        (input("Mamba-2 step size", op.dt, heads)?, heads),
    ];
    if [op.xbc, op.dt].contains(&op.out) {
        return Err(Error::SameBuffer);
    }
    let out = buffers.shape(op.out, rows, heads * head_dim)?.ptr;
    if let Some(Inputs { recurrence, saved, .. }) = memory {
        for (input, saved) in inputs.into_iter().zip(&mut saved[1..]) {
            save_input(device, kernels, step, input, saved)?;
        }
        *recurrence = Some(Recurrence::Mamba2(*op));
    }
    let call = mamba2_call(vectors, heads, op, inputs.map(|(ptr, _)| ptr), out)?;
    let state = layer.call(caches.arena, step.pointers()?, step.step().sequences().len());
    Ok(kernels.mamba2(device, &state, &call)?)
}

fn mamba2_call(
    vectors: &Vectors,
    heads: usize,
    op: &Mamba2Op,
    [xbc, dt]: [DevicePtr; 2],
    out: DevicePtr,
) -> Result<Mamba2Call, Error> {
    let a = vectors.sized("Mamba-2 a", op.a, heads)?;
    let d = vectors.sized("Mamba-2 d", op.d, heads)?;
    let dt_bias = vectors.sized("Mamba-2 dt bias", op.dt_bias, heads)?;
    Ok(Mamba2Call { xbc, dt, a, d, dt_bias, groups: op.groups, out })
}

/// See [`kernels::backend::Backend::accept`].
pub(super) fn accept(backend: &mut CudaBackend, rows: &[usize]) -> Result<(), Error> {
    let States { deferred, runs, .. } = &mut backend.states;
    let sequences = deferred.front().map_or(&[][..], |step| &step.sequences);
    same("sequences with deferred states", sequences.len(), rows.len())?;
    if let Some((sequence, rows)) = sequences.iter().zip(rows).find(|(sequence, rows)| **rows > sequence.rows)
    {
        return Err(Error::OutOfRange { what: "accepted rows", index: *rows, len: sequence.rows });
    }
    let Some(DeferredStep { sequences, mut layers }) = deferred.pop_front() else { return Ok(()) };
    *runs &= !deferred.is_empty();
    let replayed = replay(backend, sequences, &mut layers, rows);
    backend.states.spare.push(layers);
    replayed
}

/// Advances the states of the sequences by their accepted rows.
fn replay(
    backend: &mut CudaBackend,
    deferred: Vec<DeferredSequence>,
    inputs: &mut [Inputs],
    rows: &[usize],
) -> Result<(), Error> {
    let CudaBackend { device, caches, vectors, states, scratch, .. } = backend;
    let device = device.as_mut();
    let States { layers, slot_bytes, kernels, accepted: step, .. } = states;
    // A worker may have none of a model's recurrent layers.
    let Some(kernels) = kernels else { return Ok(()) };
    let (mut sequences, mut plans, mut accepted_rows) = (Vec::new(), Vec::new(), Vec::new());
    let (mut start, mut count) = (0, 0);
    for (DeferredSequence { rows, read, write }, accepted) in deferred.into_iter().zip(rows) {
        // Nothing to do if no row was accepted and the state is in the right slot already.
        if *accepted > 0 || read != Some(write) {
            let rows = count..count + accepted;
            count = rows.end;
            accepted_rows.push(start..start + accepted);
            sequences.push(StepSequence { rows, context: 0, segment_start: None });
            plans.push(StepState { read, write, ..StepState::default() });
        }
        start += rows;
    }
    StatePlan::new(&sequences, &plans, *slot_bytes)?;
    let tokens = vec![0; count];
    let input = StepInput { tokens: &tokens, sequences: &sequences, tables: &[], states: &plans };
    step.begin(device, &input, caches.arena_bytes, false)?;
    for (layer, Inputs { conv, recurrence, saved }) in layers.iter().zip(inputs) {
        let mut inputs = [DevicePtr::default(); 4];
        let used = match recurrence {
            None => 1,
            Some(Recurrence::Mamba2(_)) => 3,
            Some(Recurrence::DeltaNet(_)) => 4,
        };
        for (SavedInput { all, accepted, cols }, input) in saved[..used].iter_mut().zip(&mut inputs) {
            let row = *cols * size_of::<f32>();
            let from = all.of(device, 0)?;
            *input = accepted.of(device, (count * row).max(1))?;
            let mut to = *input;
            for rows in accepted_rows.iter().filter(|rows| !rows.is_empty()) {
                device.copy(from.offset(rows.start * row), to, rows.len() * row)?;
                to = to.offset(rows.len() * row);
            }
        }
        let [x, first, second, third] = inputs;
        let shape = *layer.layout.shape();
        let out = scratch.of(device, (count * layer.layout.out_len() * size_of::<f32>()).max(1))?;
        let state = layer.call(caches.arena, step.pointers()?, sequences.len());
        if let Some(op) = conv {
            kernels.conv(device, &state, &conv_call(vectors, &shape, op, x)?)?;
        }
        // Only the states matter; the rows' outputs are known already.
        match recurrence {
            None => {}
            Some(Recurrence::DeltaNet(op)) => {
                let call = delta_net_call(vectors, shape.heads, op, [first, second, third], out)?;
                kernels.delta_net(device, &state, &call)?;
            }
            Some(Recurrence::Mamba2(op)) => {
                let call = mamba2_call(vectors, shape.heads, op, [first, second], out)?;
                kernels.mamba2(device, &state, &call)?;
            }
        }
    }
    Ok(())
}
