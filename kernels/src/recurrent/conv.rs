//! Depthwise causal convolution over positions, with its past inputs in the state.

use super::layout::MAX_TAPS;
use super::plan::{LayerState, PlannedSequence};
use crate::aligned::AlignedBuf;
use crate::attention::check_len;
use crate::disjoint::Disjoint;
use crate::error::Error;
use crate::isa::Isa;
use crate::pool::Pool;
use crate::simd::{self, Kernel, LANES, Simd, dispatch};

/// Channels that one thread takes at a time: runs of memory long enough to stream, few enough for the L1 cache.
const CHANNELS: usize = 256;

/// Rows whose inputs go through the registers before the next channels have their turn.
const TILE_ROWS: usize = 8;

/// How many channels ahead of use a single row asks for its past inputs and weights.
const AHEAD: usize = 256;

/// Below this many inputs a thread is faster alone than woken.
const GRAIN: usize = 2048;

/// Weights of a convolution, `[taps][channels]`, so that a vector holds one tap of sixteen channels.
#[derive(Debug)]
pub struct ConvWeight {
    taps: usize,
    channels: usize,
    values: AlignedBuf<f32>,
}

impl ConvWeight {
    /// Transposes `[channels][taps]`.
    ///
    /// # Errors
    /// [`Error::Length`].
    pub fn new(channels: usize, taps: usize, weight: &[f32]) -> Result<Self, Error> {
        check_len("convolution weight", channels.saturating_mul(taps), weight.len())?;
        let mut values = AlignedBuf::zeroed(weight.len());
        for (channel, weights) in weight.chunks_exact(taps).enumerate() {
            for (tap, weight) in weights.iter().enumerate() {
                values[tap * channels + channel] = *weight;
            }
        }
        Ok(Self { taps, channels, values })
    }

    pub fn bytes(&self) -> usize {
        size_of_val(&self.values[..])
    }
}

/// `x_t[c] = silu(bias[c] + sum_j weight[c][j] x_{t-taps+1+j}[c])` in place on `x`, `[rows][channels]` of the plan's
/// rows. What lies before a sequence's first row comes from the slot that it reads; its last `taps` inputs go to the
/// slots that it writes, of a deferred one nowhere.
///
/// # Errors
/// [`Error::Length`] for a weight, bias or `x` that is not of the layer's shape.
pub fn conv(
    pool: &Pool,
    isa: Isa,
    state: &mut LayerState<'_>,
    weight: &ConvWeight,
    bias: Option<&[f32]>,
    x: &mut [f32],
) -> Result<(), Error> {
    let shape = *state.layout().shape();
    check_len("convolution taps", shape.taps, weight.taps)?;
    check_len("convolution channels", shape.channels, weight.channels)?;
    bias.map_or(Ok(()), |bias| check_len("convolution bias", shape.channels, bias.len()))?;
    check_len("convolution input", state.plan().rows() * shape.channels, x.len())?;
    let sequences = state.plan().sequences();
    let blocks = shape.channels.div_ceil(CHANNELS);
    let rows = state.plan().rows().max(1);
    let per_item = (rows * shape.channels).div_ceil((sequences.len() * blocks).max(1));
    let (x, state) = (Disjoint::new(x), &*state);
    pool.for_each_range(sequences.len() * blocks, GRAIN.div_ceil(per_item), &|items| {
        for item in items {
            let first = item % blocks * CHANNELS;
            let channels = CHANNELS.min(shape.channels - first);
            let sequence = &sequences[item / blocks];
            dispatch(isa, Convolve { state, sequence, weight, bias, x: &x, first, channels });
        }
    });
    Ok(())
}

/// Some channels of one sequence.
struct Convolve<'a> {
    state: &'a LayerState<'a>,
    sequence: &'a PlannedSequence,
    weight: &'a ConvWeight,
    bias: Option<&'a [f32]>,
    x: &'a Disjoint<'a, f32>,
    first: usize,
    channels: usize,
}

/// Past inputs of some channels, `[taps][channels]`, oldest first. The oldest is only carried along.
type History = [[f32; CHANNELS]; MAX_TAPS];

impl Kernel for Convolve<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.weight.taps {
            1 => self.convolve::<S, 1>(s),
            2 => self.convolve::<S, 2>(s),
            3 => self.convolve::<S, 3>(s),
            4 => self.convolve::<S, 4>(s),
            taps => unreachable!("a layout has 1 to {MAX_TAPS} taps, not {taps}"),
        }
    }
}

impl Convolve<'_> {
    #[inline(always)]
    fn convolve<S: Simd, const TAPS: usize>(&self, s: S) {
        let PlannedSequence { rows, write, exports, deferred, .. } = self.sequence;
        if rows.len() == 1 && exports.is_empty() && !deferred {
            return self.step::<S, TAPS>(s);
        }
        let mut history = self.read::<TAPS>();
        let mut row = 0;
        for &(after, slot) in exports {
            self.advance::<S, TAPS>(s, row..after + 1, &mut history);
            self.write::<TAPS>(&history, slot);
            row = after + 1;
        }
        self.advance::<S, TAPS>(s, row..rows.len(), &mut history);
        if !deferred {
            self.write::<TAPS>(&history, *write);
        }
    }

    /// One row that is not deferred, straight from slot to slot. What it reads is far away and lies in short runs, so the next channels
    /// are asked for early.
    #[inline(always)]
    fn step<S: Simd, const TAPS: usize>(&self, s: S) {
        let (width, sequence) = (self.weight.channels, self.sequence);
        for channel in (0..self.channels).step_by(LANES) {
            let (at, lanes) = (self.first + channel, LANES.min(self.channels - channel));
            let mut sum = self.bias.map_or(s.splat(0.0), |bias| load(s, &bias[at..at + lanes]));
            // The inputs of the last positions, oldest first; the last is the row's own.
            let mut inputs = [s.splat(0.0); TAPS];
            // SAFETY: sequences do not share rows, and these channels are this item's.
            let x = unsafe { self.x.slice(sequence.rows.start * width + at, lanes) };
            inputs[TAPS - 1] = load(s, x);
            if let Some(slot) = sequence.read {
                for (tap, input) in inputs.iter_mut().take(TAPS - 1).enumerate() {
                    let from = self.state.at(slot, (tap + 1) * width + at);
                    s.prefetch(from.wrapping_add(AHEAD).cast());
                    // SAFETY: the channels lie inside the layer's past inputs (`LayerState::at`), which nobody else
                    // writes; those of all taps are read before this sequence's own slot is written.
                    *input = unsafe { s.load_first(from, lanes) };
                }
            }
            for (tap, input) in inputs.iter().enumerate() {
                let weight = &self.weight.values[tap * width + at..][..lanes];
                s.prefetch(weight.as_ptr().wrapping_add(AHEAD).cast());
                sum = s.fma(load(s, weight), *input, sum);
                let to = self.state.at(sequence.write, tap * width + at);
                // SAFETY: as above; a slot that the sequence writes is its own, and these channels are this item's.
                unsafe { s.store_first(*input, to, lanes) };
            }
            s.prefetch(self.state.at(sequence.write, at).wrapping_add(AHEAD).cast());
            let y = simd::silu(s, sum);
            match x.first_chunk_mut() {
                Some(chunk) => s.put(y, chunk),
                None => s.put_tail(y, x),
            }
        }
    }

    fn read<const TAPS: usize>(&self) -> History {
        let mut history = [[0.0; CHANNELS]; MAX_TAPS];
        if let Some(slot) = self.sequence.read {
            for (tap, past) in history.iter_mut().take(TAPS).enumerate() {
                let from = self.state.at(slot, tap * self.weight.channels + self.first);
                // SAFETY: the channels lie inside the layer's past inputs (`LayerState::at`), which nobody else
                // writes; they are read before this sequence's own slots are written.
                unsafe { from.copy_to_nonoverlapping(past.as_mut_ptr(), self.channels) };
            }
        }
        history
    }

    fn write<const TAPS: usize>(&self, history: &History, slot: usize) {
        for (tap, past) in history.iter().take(TAPS).enumerate() {
            let to = self.state.at(slot, tap * self.weight.channels + self.first);
            // SAFETY: as for `read`; a slot that the sequence writes is its own, and these channels are this item's.
            unsafe { to.copy_from_nonoverlapping(past.as_ptr(), self.channels) };
        }
    }

    /// Convolves the sequence's rows `rows`.
    #[inline(always)]
    fn advance<S: Simd, const TAPS: usize>(&self, s: S, rows: std::ops::Range<usize>, history: &mut History) {
        let width = self.weight.channels;
        for tile in rows.clone().step_by(TILE_ROWS) {
            for channel in (0..self.channels).step_by(LANES) {
                let (at, lanes) = (self.first + channel, LANES.min(self.channels - channel));
                let bias = self.bias.map_or(s.splat(0.0), |bias| load(s, &bias[at..at + lanes]));
                let mut weights = [bias; TAPS];
                for (tap, weight) in weights.iter_mut().enumerate() {
                    *weight = load(s, &self.weight.values[tap * width + at..][..lanes]);
                }
                let mut oldest = load(s, &history[0][channel..channel + LANES]);
                // The inputs that a row sees, oldest first; the last is its own, which is still to come.
                let mut inputs = [bias; TAPS];
                for (input, past) in inputs.iter_mut().zip(&history[1..TAPS]) {
                    *input = load(s, &past[channel..channel + LANES]);
                }
                for row in tile..rows.end.min(tile + TILE_ROWS) {
                    // SAFETY: sequences do not share rows, and these channels are this item's.
                    let x = unsafe { self.x.slice((self.sequence.rows.start + row) * width + at, lanes) };
                    inputs[TAPS - 1] = load(s, x);
                    let mut sum = bias;
                    for (weight, input) in weights.iter().zip(&inputs) {
                        sum = s.fma(*weight, *input, sum);
                    }
                    let y = simd::silu(s, sum);
                    match x.first_chunk_mut() {
                        Some(chunk) => s.put(y, chunk),
                        None => s.put_tail(y, x),
                    }
                    oldest = inputs[0];
                    for tap in 1..TAPS {
                        inputs[tap - 1] = inputs[tap];
                    }
                }
                for (past, input) in
                    history.iter_mut().zip(std::iter::once(&oldest).chain(&inputs[..TAPS - 1]))
                {
                    let (chunks, _) = past.as_chunks_mut::<LANES>();
                    s.put(*input, &mut chunks[channel / LANES]);
                }
            }
        }
    }
}

/// Up to sixteen values, zero in the other lanes.
#[inline(always)]
fn load<S: Simd>(s: S, x: &[f32]) -> S::V {
    match x.first_chunk() {
        Some(chunk) => s.chunk(chunk),
        None => s.tail(x),
    }
}
