//! Recurrent layers on a device: convolution, gated delta net and Mamba-2, with their states in slots of
//! the arena.

use super::step::StatePointers;
use super::{Argument, Compiled, CudaError, Device, DevicePtr, KernelId, Launch, source};
use half::bf16;
use kernels::Error;
use kernels::attention::check_len;
use kernels::backend::{HeadType, StateKind, StateShape};

#[cfg(test)]
mod tests;

/// Maximum number of positions that a convolution sees.
const MAX_TAPS: usize = 4;

/// Maximum number of terms of a recurrence's sum.
const MAX_INNER: usize = 256;

/// Rows of a head's matrix per block.
const BLOCK_ROWS: usize = 32;

/// Layout of one layer's state in a slot: first the convolution's past inputs `[taps][channels]`, oldest
/// first, then the heads' matrices, each from a multiple of 64 bytes on.
///
/// Each recurrence sums over one side of its matrices (`inner`: delta net rows, Mamba-2 columns) and
/// processes the elements of the other side (`outer`) independently. A matrix is stored `[outer][inner]`,
/// so that a warp's sums read contiguous memory. Rows are padded to whole lanes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceState {
    shape: StateShape,
    inner: usize,
    outer: usize,
    heads: Vec<HeadPlace>,
    bytes: usize,
}

/// Start and element type of a head's matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct HeadPlace {
    ty: HeadType,
    start: usize,
}

impl DeviceState {
    /// Creates the layout of a shape. `heads` has the element type of each head.
    ///
    /// # Errors
    /// [`Error::Length`] unless there is one type for each head; [`Error::StateShape`] for a dimension of
    /// zero, more than 4 taps or a size that does not fit the address space; [`Error::Unsupported`] for a
    /// sum over more than 256.
    pub fn new(shape: StateShape, heads: &[HeadType]) -> Result<Self, Error> {
        let StateShape { kind, channels, taps, rows, cols, .. } = shape;
        let refused = || Error::StateShape { channels, taps, heads: shape.heads, rows, cols };
        if !shape.is_served(MAX_TAPS) {
            return Err(refused());
        }
        check_len("types of heads", shape.heads, heads.len())?;
        let (inner, outer) = match kind {
            StateKind::DeltaNet => (rows, cols),
            StateKind::Mamba2 | StateKind::Conv => (cols, rows),
        };
        if inner > MAX_INNER {
            return Err(Error::Unsupported { what: "a recurrence that sums over more than 256 elements" });
        }
        let aligned = |n: usize| n.checked_next_multiple_of(64);
        let padded = inner.next_multiple_of(per_lane(inner));
        let conv = taps.checked_mul(channels).and_then(|n| n.checked_mul(size_of::<f32>()));
        let mut bytes = conv.and_then(aligned).ok_or_else(refused)?;
        let mut head_places = Vec::with_capacity(heads.len());
        for ty in heads.iter().copied() {
            head_places.push(HeadPlace { ty, start: bytes });
            let len = outer.checked_mul(padded).and_then(|n| n.checked_mul(element(ty)));
            let end = len.and_then(|len| bytes.checked_add(len)).and_then(aligned);
            // Kernels store offsets in 32 bits, in units of 64 bytes, times two.
            bytes = end.filter(|end| *end / 64 <= (u32::MAX / 2) as usize).ok_or_else(refused)?;
        }
        Ok(Self { shape, inner, outer, heads: head_places, bytes })
    }

    /// Returns the bytes of the layer's part of a slot; a multiple of 64.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the shape of the layout.
    pub fn shape(&self) -> &StateShape {
        &self.shape
    }

    /// Returns the values of a row's output, all heads together.
    pub fn out_len(&self) -> usize {
        self.shape.heads * self.outer
    }

    /// Returns the heads' offsets in the kernels' format, to upload once.
    pub fn head_offsets(&self) -> Vec<u8> {
        let encode = |head: &HeadPlace| (head.start / 64 * 2) as u32 + u32::from(head.ty == HeadType::Bf16);
        self.heads.iter().flat_map(|head| encode(head).to_ne_bytes()).collect()
    }

    /// Splits a layer's part of a slot into the convolution's past inputs, `[taps][channels]`, oldest
    /// first, and the matrices `[heads][rows][cols]`.
    ///
    /// # Errors
    /// [`Error::Length`].
    pub fn read(&self, state: &[u8], conv: &mut [f32], recurrent: &mut [f32]) -> Result<(), Error> {
        let StateShape { kind, rows, cols, .. } = self.shape;
        check_len("layer state", self.bytes, state.len())?;
        check_len("convolution state", self.shape.conv_len(), conv.len())?;
        check_len("recurrent state", self.shape.recurrent_len(), recurrent.len())?;
        let (values, _) = state.as_chunks::<{ size_of::<f32>() }>();
        for (out, value) in conv.iter_mut().zip(values) {
            *out = f32::from_ne_bytes(*value);
        }
        let padded = self.inner.next_multiple_of(per_lane(self.inner));
        for (head, out) in self.heads.iter().zip(recurrent.chunks_exact_mut((rows * cols).max(1))) {
            let matrix = &state[head.start..];
            let (floats, _) = matrix.as_chunks::<{ size_of::<f32>() }>();
            let (narrow, _) = matrix.as_chunks::<{ size_of::<bf16>() }>();
            for (i, out) in out.iter_mut().enumerate() {
                let (row, col) = (i / cols, i % cols);
                let at = match kind {
                    StateKind::DeltaNet => col * padded + row,
                    StateKind::Mamba2 | StateKind::Conv => row * padded + col,
                };
                *out = match head.ty {
                    HeadType::F32 => f32::from_ne_bytes(floats[at]),
                    HeadType::Bf16 => bf16::from_ne_bytes(narrow[at]).to_f32(),
                };
            }
        }
        Ok(())
    }
}

/// Returns the elements of a row per lane.
fn per_lane(inner: usize) -> usize {
    [2, 4].into_iter().find(|per| inner <= 32 * per).unwrap_or(MAX_INNER / 32)
}

fn element(ty: HeadType) -> usize {
    match ty {
        HeadType::F32 => size_of::<f32>(),
        HeadType::Bf16 => size_of::<bf16>(),
    }
}

/// The kernels of [`source::RECURRENT`].
#[derive(Debug, Clone, Copy)]
pub struct RecurrentKernels {
    conv: KernelId,
    keep_rows: KernelId,
    /// For sums over 64, 128 and 256 elements.
    delta_net: [KernelId; 3],
    mamba2: [KernelId; 3],
}

/// States of one layer and the sequences that they belong to.
#[derive(Debug, Clone, Copy)]
pub struct StateCall<'a> {
    /// Layout of a state in a slot.
    pub layout: &'a DeviceState,
    /// The uploaded [`DeviceState::head_offsets`].
    pub head_offsets: DevicePtr,
    /// Byte offset of the layer inside a slot.
    pub layer_offset: usize,
    pub arena: DevicePtr,
    /// State updates of the step.
    pub states: &'a StatePointers,
    pub sequences: usize,
}

/// Convolution of one layer, in place in `x`.
#[derive(Debug, Clone, Copy)]
pub struct ConvCall {
    /// `[rows][channels]`
    pub x: DevicePtr,
    /// `[channels][taps]`
    pub weight: DevicePtr,
    /// `[channels]`
    pub bias: Option<DevicePtr>,
    pub silu: bool,
}

/// Delta net of one layer: see [`DeltaNetOp`](kernels::backend::DeltaNetOp).
#[derive(Debug, Clone, Copy)]
pub struct DeltaNetCall {
    /// `[rows][2 k_heads k_dim + v_heads v_dim]`
    pub qkv: DevicePtr,
    /// `[rows][v_heads]`
    pub beta: DevicePtr,
    /// `[rows][v_heads]`
    pub alpha: DevicePtr,
    /// `[v_heads]`
    pub a: DevicePtr,
    /// `[v_heads]`
    pub dt_bias: DevicePtr,
    /// Heads of q and k.
    pub k_heads: usize,
    /// Head h uses key head `h % k_heads` if true, otherwise `h / (v_heads / k_heads)`.
    pub tiled: bool,
    /// Added to the squared length of q and k.
    pub l2_eps: f32,
    /// `[rows][v_heads v_dim]`
    pub out: DevicePtr,
}

/// Mamba-2 of one layer: see [`Mamba2Op`](kernels::backend::Mamba2Op).
#[derive(Debug, Clone, Copy)]
pub struct Mamba2Call {
    /// `[rows][heads head_dim + 2 groups state]`
    pub xbc: DevicePtr,
    /// `[rows][heads]`
    pub dt: DevicePtr,
    /// `[heads]`
    pub a: DevicePtr,
    /// `[heads]`
    pub d: DevicePtr,
    /// `[heads]`
    pub dt_bias: DevicePtr,
    /// Groups of heads that share B and C.
    pub groups: usize,
    /// `[rows][heads head_dim]`
    pub out: DevicePtr,
}

/// Common arguments of the two recurrences.
struct Scan {
    kernels: [KernelId; 3],
    x: DevicePtr,
    gains: DevicePtr,
    steps: DevicePtr,
    a: DevicePtr,
    bias: DevicePtr,
    skips: DevicePtr,
    out: DevicePtr,
    width: usize,
    key_at: usize,
    query_at: usize,
    value_at: usize,
    key_heads: usize,
    tiled: bool,
    l2_eps: f32,
    query_scale: f32,
}

impl RecurrentKernels {
    /// Loads the compiled [`source::RECURRENT`].
    ///
    /// # Errors
    /// [`CudaError::NoKernel`] for another compiled source; errors of the device.
    pub fn load(device: &mut dyn Device, compiled: &Compiled) -> Result<Self, CudaError> {
        let kernels = device.load(compiled, source::RECURRENT.kernels)?;
        let [conv, keep_rows, d64, d128, d256, m64, m128, m256] = kernels[..] else {
            return Err(CudaError::NoKernel {
                name: "conv".into(),
                source_name: compiled.source_name.clone(),
            });
        };
        Ok(Self { conv, keep_rows, delta_net: [d64, d128, d256], mamba2: [m64, m128, m256] })
    }

    /// Convolves the rows of the sequences in place and advances the past inputs.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn conv(
        &self,
        device: &mut dyn Device,
        state: &StateCall<'_>,
        call: &ConvCall,
    ) -> Result<(), CudaError> {
        let StateShape { channels, taps, .. } = state.layout.shape;
        if state.sequences == 0 {
            return Ok(());
        }
        let pointers = [call.x, call.weight, call.bias.unwrap_or_default(), state.arena];
        let mut arguments: Vec<Argument> = pointers.map(Argument::from).to_vec();
        arguments.extend(state.pointers());
        arguments.extend([Argument::from(state.layer_offset as u64), (channels as u32).into()]);
        arguments.extend([taps as u32, u32::from(call.silu)].map(Argument::from));
        device.launch(&Launch {
            kernel: self.conv,
            grid: [channels.div_ceil(32) as u32, state.sequences as u32, 1],
            block: [256, 1, 1],
            shared_bytes: 0,
            arguments: &arguments,
        })
    }

    /// Runs the recurrence over the rows of the sequences and advances the matrices.
    ///
    /// # Errors
    /// [`CudaError::Invalid`] for the state of another recurrence, or if the key heads do not divide the
    /// heads; errors of the device.
    pub fn delta_net(
        &self,
        device: &mut dyn Device,
        state: &StateCall<'_>,
        call: &DeltaNetCall,
    ) -> Result<(), CudaError> {
        let StateShape { kind, heads, rows: k_dim, cols: v_dim, .. } = state.layout.shape;
        check(kind == StateKind::DeltaNet, "the state of a delta net")?;
        check(shares(heads, call.k_heads), "key heads that divide the heads")?;
        let keys = call.k_heads * k_dim;
        let scan = Scan {
            kernels: self.delta_net,
            x: call.qkv,
            gains: call.beta,
            steps: call.alpha,
            a: call.a,
            bias: call.dt_bias,
            skips: DevicePtr::default(),
            out: call.out,
            width: 2 * keys + heads * v_dim,
            key_at: keys,
            query_at: 0,
            value_at: 2 * keys,
            key_heads: call.k_heads,
            tiled: call.tiled,
            l2_eps: call.l2_eps,
            query_scale: 1.0 / (k_dim as f32).sqrt(),
        };
        scan.launch(device, state)
    }

    /// Like [`Self::delta_net`].
    ///
    /// # Errors
    /// As [`Self::delta_net`].
    pub fn mamba2(
        &self,
        device: &mut dyn Device,
        state: &StateCall<'_>,
        call: &Mamba2Call,
    ) -> Result<(), CudaError> {
        let StateShape { kind, heads, rows: head_dim, cols: width, .. } = state.layout.shape;
        check(kind == StateKind::Mamba2, "the state of Mamba-2")?;
        check(shares(heads, call.groups), "groups that divide the heads")?;
        let inner = heads * head_dim;
        let scan = Scan {
            kernels: self.mamba2,
            x: call.xbc,
            gains: call.dt,
            steps: call.dt,
            a: call.a,
            bias: call.dt_bias,
            skips: call.d,
            out: call.out,
            width: inner + 2 * call.groups * width,
            key_at: inner,
            query_at: inner + call.groups * width,
            value_at: 0,
            key_heads: call.groups,
            tiled: false,
            l2_eps: 0.0,
            query_scale: 1.0,
        };
        scan.launch(device, state)
    }

    /// `saved[i] = x[rows[i]]`, both `cols` wide. Saves the inputs of deferred rows before an operation
    /// changes them. `rows` are [`StepPointers::kept_rows`](super::step::StepPointers::kept_rows).
    ///
    /// # Errors
    /// Errors of the device.
    pub fn keep_rows(
        &self,
        device: &mut dyn Device,
        x: DevicePtr,
        cols: usize,
        rows: DevicePtr,
        count: usize,
        saved: DevicePtr,
    ) -> Result<(), CudaError> {
        if count == 0 {
            return Ok(());
        }
        device.launch(&Launch {
            kernel: self.keep_rows,
            grid: [count as u32, cols.div_ceil(128) as u32, 1],
            block: [128, 1, 1],
            shared_bytes: 0,
            arguments: &[saved.into(), x.into(), rows.into(), (cols as u32).into()],
        })
    }
}

impl StateCall<'_> {
    fn pointers(&self) -> [Argument; 7] {
        let states = self.states;
        [
            states.first_rows,
            states.rows,
            states.reads,
            states.writes,
            states.export_starts,
            states.export_rows,
            states.export_slots,
        ]
        .map(Argument::from)
    }
}

impl Scan {
    fn launch(&self, device: &mut dyn Device, state: &StateCall<'_>) -> Result<(), CudaError> {
        let DeviceState { shape: StateShape { heads, .. }, inner, outer, .. } = *state.layout;
        if state.sequences == 0 {
            return Ok(());
        }
        let number = |n: usize| Argument::from(n as u32);
        let mut arguments: Vec<Argument> =
            [self.x, self.gains, self.steps, self.a, self.bias, self.skips, self.out, state.arena]
                .map(Argument::from)
                .to_vec();
        arguments.extend(state.pointers());
        arguments.extend([state.head_offsets.into(), Argument::from(state.layer_offset as u64)]);
        arguments.extend([self.width, self.key_at, self.query_at, self.value_at, heads].map(number));
        arguments.extend([number(self.key_heads), u32::from(self.tiled).into()]);
        arguments.extend([inner, outer].map(number));
        arguments.extend([self.l2_eps, self.query_scale].map(Argument::from));
        let kernel = match per_lane(inner) {
            2 => self.kernels[0],
            4 => self.kernels[1],
            _ => self.kernels[2],
        };
        device.launch(&Launch {
            kernel,
            grid: [outer.div_ceil(BLOCK_ROWS) as u32, heads as u32, state.sequences as u32],
            block: [256, 1, 1],
            shared_bytes: 0,
            arguments: &arguments,
        })
    }
}

fn shares(heads: usize, key_heads: usize) -> bool {
    key_heads > 0 && heads.is_multiple_of(key_heads)
}

fn check(holds: bool, requirement: &'static str) -> Result<(), CudaError> {
    if holds { Ok(()) } else { Err(CudaError::Invalid { what: format!("{requirement} is needed") }) }
}
