//! Objects that a device is given before the first step: shapes of KV and states, matrices, rotary
//! embeddings.

use super::handle::MatrixId;
use crate::attention::KvTypes;
use crate::error::Error;
use std::borrow::Cow;
use std::ops::Range;

/// Shape of one layer's KV.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvShape {
    /// Query heads that read this KV.
    pub heads: usize,
    pub kv_heads: usize,
    /// Width of a key head.
    pub head_dim: usize,
    /// Width of a value head.
    pub v_head_dim: usize,
    /// Latent attention: the cache has keys only, and a value is the last `v_head_dim` elements of its key.
    pub latent: bool,
    /// Positions per block: 16, 32 or 64.
    pub block_tokens: usize,
    pub kv_type: KvTypes,
    /// `Some(w)`: the query at position p sees keys j with p - j < w, and only these have blocks. Without causality also
    /// j - p < w, and all keys have blocks.
    pub window: Option<usize>,
    /// If true, a query sees only keys at its own position and before. If false, a sequence's whole input
    /// must be in one step, and every row sees all of it, or the window around it.
    pub causal: bool,
}

/// The recurrence that a state belongs to. A backend chooses the layout of the matrices by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StateKind {
    /// [`DeltaNetOp`](super::DeltaNetOp).
    DeltaNet,
    /// [`Mamba2Op`](super::Mamba2Op).
    Mamba2,
    /// None: the state is a convolution's. The shape has no heads, rows or columns.
    Conv,
}

/// Storage type of a head's matrix. Rows are always computed in f32. The state is rounded after each row, so
/// that chunk boundaries do not change the result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum HeadType {
    F32,
    /// Rounded to the nearest bfloat16, ties to even.
    Bf16,
}

/// Shape of one layer's recurrent state: the convolution's inputs at its last `taps` positions, all f32, and
/// `heads` matrices of `rows` x `cols`, each of a [`HeadType`]. No later row reads the oldest of these
/// inputs; it is stored because reference implementations store it and states are compared with theirs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StateShape {
    pub kind: StateKind,
    pub channels: usize,
    /// Positions that the convolution sees, including the token's own.
    pub taps: usize,
    pub heads: usize,
    /// Delta net: width of a key. Mamba-2: width of a head.
    pub rows: usize,
    /// Delta net: width of a value. Mamba-2: width of B and C.
    pub cols: usize,
}

impl StateShape {
    /// The state of a convolution without a recurrence.
    pub fn of_conv(channels: usize, taps: usize) -> Self {
        Self { kind: StateKind::Conv, channels, taps, heads: 0, rows: 0, cols: 0 }
    }

    /// Whether a backend with convolutions over up to `max_taps` positions serves the shape.
    pub fn is_served(&self, max_taps: usize) -> bool {
        let Self { kind, channels, taps, heads, rows, cols } = *self;
        let has_matrices = kind != StateKind::Conv;
        let matrices = [heads, rows, cols].into_iter().all(|n| (n > 0) == has_matrices);
        (1..=max_taps).contains(&taps) && channels > 0 && matrices
    }

    /// Values of the convolution's past inputs, `[taps][channels]`, oldest position first.
    pub fn conv_len(&self) -> usize {
        self.taps * self.channels
    }

    /// Values of the matrices, `[heads][rows][cols]`.
    pub fn recurrent_len(&self) -> usize {
        self.heads * self.rows * self.cols
    }
}

/// The bytes of matrices in the order of the model file. Parts may be read by several threads.
pub trait MatrixBytes: std::fmt::Debug + Sync {
    /// Number of all bytes.
    fn size(&self) -> usize;

    /// The bytes in `range`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] past the end, and [`Error::Read`] if they cannot be read.
    fn part(&self, range: Range<usize>) -> Result<Cow<'_, [u8]>, Error>;
}

macro_rules! in_memory {
    ($(($($generics:tt)*) $type:ty),*) => {$(
        impl $($generics)* MatrixBytes for $type {
            fn size(&self) -> usize {
                self.len()
            }

            fn part(&self, range: Range<usize>) -> Result<Cow<'_, [u8]>, Error> {
                let missing = Error::OutOfRange { what: "byte", index: range.end, len: self.len() };
                self.get(range).map(Cow::Borrowed).ok_or(missing)
            }
        }
    )*};
}

in_memory!((<const N: usize>) [u8; N], () &[u8], () Vec<u8>, () Cow<'_, [u8]>);

/// A matrix to upload: `experts` matrices of `rows` x `cols`, row-major blocks of `ggml_type`, back to back.
#[derive(Debug, Clone, Copy)]
pub struct MatrixSource<'a> {
    pub ggml_type: u32,
    pub rows: usize,
    pub cols: usize,
    /// 1 for an ordinary matrix.
    pub experts: usize,
    pub bytes: &'a dyn MatrixBytes,
}

/// Rotary embedding: see `model::spec::RopeSpec`.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeSource {
    /// Pairs (2i, 2i+1) if true, (i, i + n_rot/2) otherwise.
    pub interleaved: bool,
    pub n_rot: usize,
    pub base: f32,
    pub freq_scale: f32,
    /// Divisor of each frequency; `n_rot / 2` values.
    pub factors: Option<Vec<f32>>,
    /// Factor of cosine and sine; 1 except for YaRN.
    pub magnitude: f32,
    /// Axis, 0 to 2, whose position each pair has in rows with [`RowPlaces::axes`](super::RowPlaces::axes);
    /// `n_rot / 2` values. `None`: every pair has the row's position.
    pub axes: Option<Vec<u8>>,
}

/// The addition of an adapter to the products of a matrix: `scale * B (A x)`.
#[derive(Debug, Clone, Copy)]
pub struct LowRankSource<'a> {
    pub matrix: MatrixId,
    pub rank: usize,
    pub scale: f32,
    /// `[rank][cols]`
    pub a: &'a [f32],
    /// `[rows][rank]`
    pub b: &'a [f32],
}
