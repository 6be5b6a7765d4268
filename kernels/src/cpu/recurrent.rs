//! Recurrent layers: their states in the arena and the ops that advance them.

use super::CpuBackend;
use super::arena::part;
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
    /// Bytes of a slot, as far as layers have been declared.
    slot_bytes: usize,
    plan: StatePlan,
    /// Weights in the order of the kernel, made when first used: vectors never change.
    conv_weights: HashMap<(VectorId, usize), ConvWeight>,
    scratch: ScanScratch,
}

/// One layer's place in the slots.
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

    /// Takes in what a step does with the states.
    pub(super) fn begin(&mut self, step: &StepInput<'_>) -> Result<(), Error> {
        // A worker may hold none of a model's recurrent layers.
        self.plan = match self.layers.is_empty() {
            true => StatePlan::default(),
            false => StatePlan::new(step.sequences, step.states, self.slot_bytes)?,
        };
        Ok(())
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
        let slot = part(arena, slot, offset + layout.bytes())?;
        layout.read(&arena[slot][*offset..], conv, recurrent)
    }

    /// Bytes of weights in the order of the kernels.
    pub(super) fn weight_bytes(&self) -> usize {
        self.conv_weights.values().map(ConvWeight::bytes).sum()
    }

    /// Bytes of scratch.
    pub(super) fn scratch_bytes(&self) -> usize {
        self.scratch.bytes()
    }
}

fn find(layers: &[StateLayer], id: StateLayerId) -> Result<&StateLayer, Error> {
    let missing = Error::OutOfRange { what: "state layer", index: id.0 as usize, len: layers.len() };
    layers.get(id.0 as usize).ok_or(missing)
}

/// See [`ConvOp`].
pub(super) fn conv(backend: &mut CpuBackend, op: &ConvOp) -> Result<(), Error> {
    let States { layers, plan, conv_weights, .. } = &mut backend.states;
    let StateLayer { layout, offset } = find(layers, op.layer)?;
    let weight = &backend.vectors[op.weight.0 as usize];
    let bias = op.bias.map(|id| backend.vectors[id.0 as usize].as_slice());
    let (channels, taps) = (layout.shape().channels, layout.shape().taps);
    let weight = match conv_weights.entry((op.weight, taps)) {
        Entry::Occupied(known) => known.into_mut(),
        Entry::Vacant(place) => place.insert(ConvWeight::new(channels, taps, weight)?),
    };
    let mut state = LayerState::new(&mut backend.arena, plan, layout, *offset)?;
    let x = &mut backend.buffers[op.x.0 as usize];
    check_len("convolution input", channels, x.cols())?;
    recurrent::conv(&backend.pool, backend.config.rows, &mut state, weight, bias, x.values_mut())
}

/// See [`DeltaNetOp`].
pub(super) fn delta_net(backend: &mut CpuBackend, op: &DeltaNetOp) -> Result<(), Error> {
    let States { layers, plan, scratch, .. } = &mut backend.states;
    let StateLayer { layout, offset } = find(layers, op.layer)?;
    let shape = *layout.shape();
    let mut state = LayerState::new(&mut backend.arena, plan, layout, *offset)?;
    let [qkv, beta, alpha, out] = buffers(&mut backend.buffers, [op.qkv, op.beta, op.alpha, op.out])?;
    let keys = 2 * op.k_heads * shape.rows;
    check_len("delta net qkv", keys + shape.heads * shape.cols, qkv.cols())?;
    check_len("delta net beta", shape.heads, beta.cols())?;
    check_len("delta net alpha", shape.heads, alpha.cols())?;
    out.set_shape(qkv.rows(), shape.heads * shape.cols)?;
    let vector = |id: VectorId| backend.vectors[id.0 as usize].as_slice();
    let net = recurrent::DeltaNet {
        a: vector(op.a),
        dt_bias: vector(op.dt_bias),
        k_heads: op.k_heads,
        tiled: op.tiled,
        l2_eps: op.l2_eps,
    };
    let input = recurrent::DeltaNetInput { qkv: qkv.values(), beta: beta.values(), alpha: alpha.values() };
    let (pool, isa) = (&backend.pool, backend.config.rows);
    recurrent::delta_net(pool, isa, &mut state, &net, &input, out.values_mut(), scratch)
}

/// See [`Mamba2Op`].
pub(super) fn mamba2(backend: &mut CpuBackend, op: &Mamba2Op) -> Result<(), Error> {
    let States { layers, plan, scratch, .. } = &mut backend.states;
    let StateLayer { layout, offset } = find(layers, op.layer)?;
    let shape = *layout.shape();
    let mut state = LayerState::new(&mut backend.arena, plan, layout, *offset)?;
    let [xbc, dt, out] = buffers(&mut backend.buffers, [op.xbc, op.dt, op.out])?;
    let inner = shape.heads * shape.rows;
    check_len("Mamba-2 xBC", inner + 2 * op.groups * shape.cols, xbc.cols())?;
    check_len("Mamba-2 step size", shape.heads, dt.cols())?;
    out.set_shape(xbc.rows(), inner)?;
    let vector = |id: VectorId| backend.vectors[id.0 as usize].as_slice();
    let net = recurrent::Mamba2 {
        a: vector(op.a),
        d: vector(op.d),
        dt_bias: vector(op.dt_bias),
        groups: op.groups,
    };
    let input = recurrent::Mamba2Input { xbc: xbc.values(), dt: dt.values() };
    let (pool, isa) = (&backend.pool, backend.config.rows);
    recurrent::mamba2(pool, isa, &mut state, &net, &input, out.values_mut(), scratch)
}

/// See [`GatedNormOp`].
pub(super) fn gated_norm(backend: &mut CpuBackend, op: &GatedNormOp) -> Result<(), Error> {
    let (gate, x) = pair(&mut backend.buffers, op.gate, op.x)?;
    check_len("gate", x.cols(), gate.cols())?;
    let norm = rms(&backend.vectors, &op.norm, x.cols(), "a gated norm that is no RMS norm")?;
    let order = if op.gate_first { GateOrder::GateFirst } else { GateOrder::NormFirst };
    ops::gated_norm(&backend.pool, backend.config.rows, norm, order, x.values_mut(), gate.values())
}

/// Different buffers.
fn buffers<const N: usize>(all: &mut [Buffer], ids: [BufferId; N]) -> Result<[&mut Buffer; N], Error> {
    all.get_disjoint_mut(ids.map(|id| id.0 as usize)).map_err(|_| Error::SameBuffer)
}
