//! Recurrent layers: their states in the arena and the ops that advance them.

use super::CpuBackend;
use super::arena::checked_range;
use super::deferred::{Deferred, Inputs, Recurrence};
use super::rows::{Buffer, pair};
use super::rowwise::rms;
use crate::Error;
use crate::attention::check_len;
use crate::backend::{
    BufferId, ConvOp, DeltaNetOp, GatedNormOp, HeadType, Mamba2Op, StateLayerId, StateShape, StepInput,
    VectorId,
};
use crate::ops::{self, GateOrder};
use crate::recurrent::{self, ConvWeight, LayerState, ScanScratch, StateLayout, StatePlan};
use std::collections::HashMap;
use std::collections::hash_map::Entry;

/// The recurrent layers of a backend.
#[derive(Debug, Default)]
pub(super) struct States {
    layers: Vec<StateLayer>,
    /// Bytes of a slot for the layers declared so far.
    slot_bytes: usize,
    plan: StatePlan,
    /// Weights in the kernel's order, created on first use. Vectors never change, so they stay valid.
    conv_weights: HashMap<(VectorId, usize), ConvWeight>,
    scratch: ScanScratch,
    deferred: Deferred,
}

/// A layer's position in the slots.
#[derive(Debug)]
struct StateLayer {
    layout: StateLayout,
    offset: usize,
}

impl States {
    /// See [`crate::backend::Backend::create_state_layer`].
    pub(super) fn create_layer(
        &mut self,
        shape: StateShape,
        heads: &[HeadType],
        offset: usize,
    ) -> Result<StateLayerId, Error> {
        let layout = StateLayout::new(shape, heads)?;
        let end =
            offset.checked_add(layout.bytes()).filter(|_| offset.is_multiple_of(crate::aligned::CACHE_LINE));
        self.slot_bytes = self.slot_bytes.max(end.ok_or(Error::UnalignedArena)?);
        self.layers.push(StateLayer { layout, offset });
        Ok(StateLayerId(self.layers.len() as u32 - 1))
    }

    /// Plans the reads and writes of states of a step.
    pub(super) fn begin(&mut self, step: &StepInput<'_>) -> Result<(), Error> {
        // A stage may have none of a model's recurrent layers.
        self.plan = match self.layers.is_empty() {
            true => StatePlan::default(),
            false => StatePlan::new(step.sequences, step.states, self.slot_bytes)?,
        };
        self.deferred.begin(step)
    }

    /// See [`crate::backend::Backend::read_state`].
    pub(super) fn read(
        &self,
        arena: &[u8],
        layer: StateLayerId,
        slot: u32,
        conv: &mut [f32],
        recurrent: &mut [f32],
    ) -> Result<(), Error> {
        let StateLayer { layout, offset } = find(&self.layers, layer)?;
        let slot = checked_range(arena, slot, offset + layout.bytes())?;
        layout.read(&arena[slot][*offset..], conv, recurrent)
    }

    /// Bytes of convolution weights in the kernel's order.
    pub(super) fn weight_bytes(&self) -> usize {
        self.conv_weights.values().map(ConvWeight::bytes).sum()
    }

    /// Bytes of scratch and of deferred inputs.
    pub(super) fn scratch_bytes(&self) -> usize {
        self.scratch.bytes() + self.deferred.bytes()
    }
}

fn find(layers: &[StateLayer], id: StateLayerId) -> Result<&StateLayer, Error> {
    let missing = Error::OutOfRange { what: "state layer", index: id.0 as usize, len: layers.len() };
    layers.get(id.0 as usize).ok_or(missing)
}

/// See [`ConvOp`].
pub(super) fn conv(backend: &mut CpuBackend, op: &ConvOp) -> Result<(), Error> {
    let States { layers, plan, conv_weights, deferred, .. } = &mut backend.states;
    let StateLayer { layout, offset } = find(layers, op.layer)?;
    let (channels, taps) = (layout.shape().channels, layout.shape().taps);
    let weight = match conv_weights.entry((op.weight, taps)) {
        Entry::Occupied(occupied) => occupied.into_mut(),
        Entry::Vacant(vacant) => {
            vacant.insert(ConvWeight::new(channels, taps, &backend.vectors[op.weight.0 as usize])?)
        }
    };
    let bias = op.bias.map(|id| backend.vectors[id.0 as usize].as_slice());
    let mut state = LayerState::new(&mut backend.arena, plan, layout, *offset)?;
    let x = &mut backend.buffers[op.x.0 as usize];
    check_len("convolution input", channels, x.cols())?;
    if let Some((copies, inputs)) = deferred.layer(op.layer) {
        inputs.conv = Some((*op, copies.save(x)?));
    }
    let (pool, isa) = (&backend.pool, backend.config.rows);
    recurrent::conv(pool, isa, &mut state, weight, (bias, op.silu), x.values_mut())
}

/// See [`DeltaNetOp`].
pub(super) fn delta_net(backend: &mut CpuBackend, op: &DeltaNetOp) -> Result<(), Error> {
    let States { layers, plan, scratch, deferred, .. } = &mut backend.states;
    let StateLayer { layout, offset } = find(layers, op.layer)?;
    let shape = *layout.shape();
    let mut state = LayerState::new(&mut backend.arena, plan, layout, *offset)?;
    let [qkv, beta, alpha, out] = buffers(&mut backend.buffers, [op.qkv, op.beta, op.alpha, op.out])?;
    let keys = 2 * op.k_heads * shape.rows;
    check_len("delta net qkv", keys + shape.heads * shape.cols, qkv.cols())?;
    check_len("delta net beta", shape.heads, beta.cols())?;
    check_len("delta net alpha", shape.heads, alpha.cols())?;
    out.set_shape(qkv.rows(), shape.heads * shape.cols)?;
    if let Some((copies, inputs)) = deferred.layer(op.layer) {
        let [qkv, beta, alpha] = [copies.save(qkv)?, copies.save(beta)?, copies.save(alpha)?];
        inputs.recurrence = Some(Recurrence::DeltaNet { op: *op, qkv, beta, alpha });
    }
    let input = recurrent::DeltaNetInput { qkv: qkv.values(), beta: beta.values(), alpha: alpha.values() };
    let (pool, isa, net) = (&backend.pool, backend.config.rows, net(&backend.vectors, op));
    recurrent::delta_net(pool, isa, &mut state, &net, &input, out.values_mut(), scratch)
}

fn net<'a>(vectors: &'a [Vec<f32>], op: &DeltaNetOp) -> recurrent::DeltaNet<'a> {
    let vector = |id: VectorId| vectors[id.0 as usize].as_slice();
    let DeltaNetOp { k_heads, tiled, l2_eps, .. } = *op;
    recurrent::DeltaNet { a: vector(op.a), dt_bias: vector(op.dt_bias), k_heads, tiled, l2_eps }
}

/// See [`Mamba2Op`].
pub(super) fn mamba2(backend: &mut CpuBackend, op: &Mamba2Op) -> Result<(), Error> {
    let States { layers, plan, scratch, deferred, .. } = &mut backend.states;
    let StateLayer { layout, offset } = find(layers, op.layer)?;
    let shape = *layout.shape();
    let mut state = LayerState::new(&mut backend.arena, plan, layout, *offset)?;
    let [xbc, dt, out] = buffers(&mut backend.buffers, [op.xbc, op.dt, op.out])?;
    let inner = shape.heads * shape.rows;
    check_len("Mamba-2 xBC", inner + 2 * op.groups * shape.cols, xbc.cols())?;
    check_len("Mamba-2 step size", shape.heads, dt.cols())?;
    out.set_shape(xbc.rows(), inner)?;
    if let Some((copies, inputs)) = deferred.layer(op.layer) {
        let (xbc, dt) = (copies.save(xbc)?, copies.save(dt)?);
        inputs.recurrence = Some(Recurrence::Mamba2 { op: *op, xbc, dt });
    }
    let input = recurrent::Mamba2Input { xbc: xbc.values(), dt: dt.values() };
    let (pool, isa, net) = (&backend.pool, backend.config.rows, mamba(&backend.vectors, op));
    recurrent::mamba2(pool, isa, &mut state, &net, &input, out.values_mut(), scratch)
}

fn mamba<'a>(vectors: &'a [Vec<f32>], op: &Mamba2Op) -> recurrent::Mamba2<'a> {
    let vector = |id: VectorId| vectors[id.0 as usize].as_slice();
    recurrent::Mamba2 { a: vector(op.a), d: vector(op.d), dt_bias: vector(op.dt_bias), groups: op.groups }
}

/// See [`crate::backend::Backend::accept`].
pub(super) fn accept(backend: &mut CpuBackend, rows: &[usize]) -> Result<(), Error> {
    let CpuBackend { states, vectors, arena, pool, config, .. } = backend;
    let States { layers, slot_bytes, conv_weights, scratch, deferred, .. } = states;
    let (accepted, inputs) = deferred.accept(rows)?;
    let plan = StatePlan::new(&accepted.sequences, &accepted.states, *slot_bytes)?;
    for (StateLayer { layout, offset }, Inputs { conv, recurrence }) in layers.iter().zip(inputs) {
        let shape = *layout.shape();
        let mut state = LayerState::new(arena, &plan, layout, *offset)?;
        if let Some((op, x)) = conv
            && let Some(weight) = conv_weights.get(&(op.weight, shape.taps))
        {
            let bias = op.bias.map(|id| vectors[id.0 as usize].as_slice());
            let mut x = x.accepted(&accepted);
            recurrent::conv(pool, config.rows, &mut state, weight, (bias, op.silu), &mut x)?;
        }
        // The results of the rows are not used: the deferred step has already returned them.
        let mut out = vec![0.0; plan.rows() * layout.out_len()];
        match recurrence {
            None => {}
            Some(Recurrence::DeltaNet { op, qkv, beta, alpha }) => {
                let [qkv, beta, alpha] = [qkv, beta, alpha].map(|saved| saved.accepted(&accepted));
                let input = recurrent::DeltaNetInput { qkv: &qkv, beta: &beta, alpha: &alpha };
                let net = net(vectors, &op);
                recurrent::delta_net(pool, config.rows, &mut state, &net, &input, &mut out, scratch)?;
            }
            Some(Recurrence::Mamba2 { op, xbc, dt }) => {
                let [xbc, dt] = [xbc, dt].map(|saved| saved.accepted(&accepted));
                let input = recurrent::Mamba2Input { xbc: &xbc, dt: &dt };
                let net = mamba(vectors, &op);
                recurrent::mamba2(pool, config.rows, &mut state, &net, &input, &mut out, scratch)?;
            }
        }
    }
    Ok(())
}

/// See [`GatedNormOp`].
pub(super) fn gated_norm(backend: &mut CpuBackend, op: &GatedNormOp) -> Result<(), Error> {
    let (gate, x) = pair(&mut backend.buffers, op.gate, op.x)?;
    check_len("gate", x.cols(), gate.cols())?;
    let norm = rms(&backend.vectors, &op.norm, x.cols(), "a gated norm that is no RMS norm")?;
    let order = if op.gate_first { GateOrder::GateFirst } else { GateOrder::NormFirst };
    ops::gated_norm(&backend.pool, backend.config.rows, norm, order, x.values_mut(), gate.values())
}

fn buffers<const N: usize>(all: &mut [Buffer], ids: [BufferId; N]) -> Result<[&mut Buffer; N], Error> {
    all.get_disjoint_mut(ids.map(|id| id.0 as usize)).map_err(|_| Error::SameBuffer)
}
