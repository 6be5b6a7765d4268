//! How a layer's recurrent state lies in memory.

use crate::aligned::CACHE_LINE;
use crate::attention::check_len;
use crate::backend::{StateKind, StateShape};
use crate::error::Error;
use crate::simd::LANES;

/// Most positions that a convolution sees.
pub(super) const MAX_TAPS: usize = 4;

/// Layout of one layer's state in a slot: the convolution's past inputs `[taps][channels]`, oldest first, then
/// from the next cache line on the matrices.
///
/// Each recurrence sums over one side of its matrices (`inner`: delta net rows, Mamba-2 columns) and works on the
/// elements of the other (`outer`) independently. A head's matrix is cut along `outer` into strips of sixteen
/// lanes, `[strips][inner][16]`, the last one padded with zeroes: a strip is one run of memory, and a vector of it
/// is sixteen sums that never meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateLayout {
    shape: StateShape,
    inner: usize,
    outer: usize,
}

impl StateLayout {
    /// The layout of a shape.
    ///
    /// # Errors
    /// [`Error::StateShape`] for a dimension of zero, a convolution of more than 4 taps, or a size that does not
    /// fit the address space.
    pub fn new(shape: StateShape) -> Result<Self, Error> {
        let StateShape { kind, channels, taps, heads, rows, cols } = shape;
        let (inner, outer) = match kind {
            StateKind::DeltaNet => (rows, cols),
            StateKind::Mamba2 => (cols, rows),
        };
        let padded = |n: usize| n.checked_next_multiple_of(LANES);
        let conv = taps.checked_mul(channels).and_then(padded);
        let matrices =
            padded(outer).and_then(|outer| outer.checked_mul(inner)).and_then(|head| head.checked_mul(heads));
        let bytes = conv.zip(matrices).and_then(|(conv, matrices)| {
            conv.checked_add(matrices)?
                .checked_mul(size_of::<f32>())
                .filter(|bytes| isize::try_from(*bytes).is_ok())
        });
        let served = (1..=MAX_TAPS).contains(&taps) && channels > 0 && heads > 0 && rows > 0 && cols > 0;
        if !served || bytes.is_none() {
            return Err(Error::StateShape { channels, taps, heads, rows, cols });
        }
        Ok(Self { shape, inner, outer })
    }

    /// What it is the layout of.
    pub fn shape(&self) -> &StateShape {
        &self.shape
    }

    /// Bytes of the layer's part of a slot; a multiple of 64.
    pub fn bytes(&self) -> usize {
        (self.matrices() + self.shape.heads * self.head_len()) * size_of::<f32>()
    }

    /// Takes a layer's part of a slot apart into what the convolution saw, `[taps][channels]`, oldest first,
    /// and the matrices `[heads][rows][cols]`.
    ///
    /// # Errors
    /// [`Error::Length`].
    pub fn read(&self, state: &[u8], conv: &mut [f32], recurrent: &mut [f32]) -> Result<(), Error> {
        let StateShape { kind, heads, rows, cols, .. } = self.shape;
        check_len("layer state", self.bytes(), state.len())?;
        check_len("convolution state", self.shape.conv_len(), conv.len())?;
        check_len("recurrent state", self.shape.recurrent_len(), recurrent.len())?;
        let (values, _) = state.as_chunks::<{ size_of::<f32>() }>();
        for (out, value) in conv.iter_mut().zip(values) {
            *out = f32::from_ne_bytes(*value);
        }
        let places = (0..heads).flat_map(|head| {
            (0..rows * cols).map(move |i| {
                let (row, col) = (i / cols, i % cols);
                let (inner, outer) = match kind {
                    StateKind::DeltaNet => (row, col),
                    StateKind::Mamba2 => (col, row),
                };
                self.strip(head, outer / LANES) + inner * LANES + outer % LANES
            })
        });
        for (out, place) in recurrent.iter_mut().zip(places) {
            *out = f32::from_ne_bytes(values[place]);
        }
        Ok(())
    }

    /// Length of the sums.
    pub(super) fn inner(&self) -> usize {
        self.inner
    }

    /// Width of a head's output.
    pub(super) fn outer(&self) -> usize {
        self.outer
    }

    /// Strips of a head.
    pub(super) fn strips(&self) -> usize {
        self.outer.div_ceil(LANES)
    }

    /// Values of a strip.
    pub(super) fn strip_len(&self) -> usize {
        self.inner * LANES
    }

    /// The value of the layer's part at which a strip starts.
    pub(super) fn strip(&self, head: usize, strip: usize) -> usize {
        self.matrices() + head * self.head_len() + strip * self.strip_len()
    }

    /// The value at which the matrices start.
    fn matrices(&self) -> usize {
        self.shape.conv_len().next_multiple_of(CACHE_LINE / size_of::<f32>())
    }

    fn head_len(&self) -> usize {
        self.strips() * self.strip_len()
    }
}
