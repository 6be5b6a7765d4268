//! Memory layout of a layer's recurrent state.

use crate::aligned::CACHE_LINE;
use crate::attention::check_len;
use crate::backend::{HeadType, StateKind, StateShape};
use crate::error::Error;
use crate::simd::LANES;
use half::bf16;
use std::sync::Arc;

/// Maximum number of positions that a convolution sees.
pub(super) const MAX_TAPS: usize = 4;

/// Layout of one layer's state in a slot: the convolution's past inputs `[taps][channels]`, oldest first,
/// then the matrices, from the next cache line on.
///
/// Each recurrence sums over one dimension of its matrices (`inner`: delta net rows, Mamba-2 columns) and
/// computes the elements of the other (`outer`) independently. A head's matrix is cut along `outer` into
/// strips of 16 lanes, `[strips][inner][16]`, the last one padded with zeros. A strip is contiguous, and a
/// vector of it holds 16 independent sums.
///
/// Offsets are in units of 4 bytes: one f32 or two bfloat16. Every head starts on a cache line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateLayout {
    shape: StateShape,
    inner: usize,
    outer: usize,
    heads: Arc<[HeadPlace]>,
    /// Size of the layer's part of a slot, in units.
    len: usize,
}

/// Offset and element type of a head's matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct HeadPlace {
    ty: HeadType,
    start: usize,
}

/// Bytes of the unit of offsets.
const UNIT: usize = size_of::<f32>();

/// Units of a vector of 16 values.
fn vector_len(ty: HeadType) -> usize {
    match ty {
        HeadType::F32 => LANES,
        HeadType::Bf16 => LANES / 2,
    }
}

impl StateLayout {
    /// Creates the layout of a shape; `heads` has the type of each head.
    ///
    /// # Errors
    /// [`Error::Length`] unless there is one type for each head. [`Error::StateShape`] if a dimension is
    /// zero (of a convolution's state: not zero), the convolution has more than 4 taps, or the size does not fit the address space.
    pub fn new(shape: StateShape, heads: &[HeadType]) -> Result<Self, Error> {
        let StateShape { kind, channels, taps, rows, cols, .. } = shape;
        let refused = || Error::StateShape { channels, taps, heads: shape.heads, rows, cols };
        if !shape.is_served(MAX_TAPS) {
            return Err(refused());
        }
        let (inner, outer) = match kind {
            StateKind::DeltaNet => (rows, cols),
            StateKind::Mamba2 | StateKind::Conv => (cols, rows),
        };
        check_len("types of heads", shape.heads, heads.len())?;
        let aligned = |n: usize| n.checked_next_multiple_of(CACHE_LINE / UNIT);
        let head_len = |ty| outer.div_ceil(LANES).checked_mul(inner)?.checked_mul(vector_len(ty));
        let mut end = taps.checked_mul(channels).and_then(aligned).ok_or_else(refused)?;
        let mut head_places = Vec::with_capacity(heads.len());
        for ty in heads.iter().copied() {
            head_places.push(HeadPlace { ty, start: end });
            let next = head_len(ty).and_then(|len| end.checked_add(len)).and_then(aligned);
            end = next.ok_or_else(refused)?;
        }
        let bytes = end.checked_mul(UNIT).filter(|bytes| isize::try_from(*bytes).is_ok());
        bytes.ok_or_else(refused)?;
        Ok(Self { shape, inner, outer, heads: head_places.into(), len: end })
    }

    pub fn shape(&self) -> &StateShape {
        &self.shape
    }

    /// Bytes of the layer's part of a slot; a multiple of 64.
    pub fn bytes(&self) -> usize {
        self.len * UNIT
    }

    /// Number of values of a row's output, over all heads.
    pub fn out_len(&self) -> usize {
        self.shape.heads * self.outer
    }

    /// Splits a layer's part of a slot into the convolution's past inputs, `[taps][channels]`, oldest first,
    /// and the matrices `[heads][rows][cols]`.
    ///
    /// # Errors
    /// [`Error::Length`].
    pub fn read(&self, state: &[u8], conv: &mut [f32], recurrent: &mut [f32]) -> Result<(), Error> {
        let StateShape { kind, rows, cols, .. } = self.shape;
        check_len("layer state", self.bytes(), state.len())?;
        check_len("convolution state", self.shape.conv_len(), conv.len())?;
        check_len("recurrent state", self.shape.recurrent_len(), recurrent.len())?;
        let (values, _) = state.as_chunks::<{ size_of::<f32>() }>();
        for (out, value) in conv.iter_mut().zip(values) {
            *out = f32::from_ne_bytes(*value);
        }
        for (head_place, out) in self.heads.iter().zip(recurrent.chunks_exact_mut((rows * cols).max(1))) {
            let head = &state[head_place.start * UNIT..];
            let (floats, _) = head.as_chunks::<{ size_of::<f32>() }>();
            let (narrow, _) = head.as_chunks::<{ size_of::<bf16>() }>();
            for (i, out) in out.iter_mut().enumerate() {
                let (row, col) = (i / cols, i % cols);
                let (inner, outer) = match kind {
                    StateKind::DeltaNet => (row, col),
                    StateKind::Mamba2 | StateKind::Conv => (col, row),
                };
                let at = (outer / LANES * self.inner + inner) * LANES + outer % LANES;
                *out = match head_place.ty {
                    HeadType::F32 => f32::from_ne_bytes(floats[at]),
                    HeadType::Bf16 => bf16::from_ne_bytes(narrow[at]).to_f32(),
                };
            }
        }
        Ok(())
    }

    pub(super) fn inner(&self) -> usize {
        self.inner
    }

    /// Width of a head's output.
    pub(super) fn outer(&self) -> usize {
        self.outer
    }

    pub(super) fn strips(&self) -> usize {
        self.outer.div_ceil(LANES)
    }

    pub(super) fn head_type(&self, head: usize) -> HeadType {
        self.heads[head].ty
    }

    /// Units of a strip of a head.
    pub(super) fn strip_len(&self, head: usize) -> usize {
        self.inner * vector_len(self.heads[head].ty)
    }

    /// First unit of a strip, in the layer's part of a slot.
    pub(super) fn strip(&self, head: usize, strip: usize) -> usize {
        self.heads[head].start + strip * self.strip_len(head)
    }
}
