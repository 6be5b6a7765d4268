//! Depthwise causal convolution over positions. Its past inputs are part of the recurrent state.

use super::layout::MAX_TAPS;
use super::plan::{LayerState, PlannedSequence};
use crate::aligned::AlignedBuf;
use crate::attention::check_len;
use crate::disjoint::Disjoint;
use crate::error::Error;
use crate::isa::Isa;
use crate::pool::Pool;
use crate::simd::{self, Kernel, LANES, Simd, dispatch};

/// Channels per work item: enough that a run of memory streams, few enough for the L1 cache.
const CHANNELS: usize = 256;

/// Rows that are convolved in registers before the next channels.
const TILE_ROWS: usize = 8;

/// Prefetch distance of the single-row path, in channels.
const AHEAD: usize = 256;

/// Below this number of inputs the calling thread alone is faster than waking other threads.
const GRAIN: usize = 2048;

/// Weights of a convolution, `[taps][channels]`, so that a vector holds one tap of 16 channels.
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

/// `x_t[c] = bias[c] + sum_j weight[c][j] x_{t-taps+1+j}[c]`, or `silu` of that, in place on `x`,
/// `[rows][channels]` of the plan's rows. The inputs before a sequence's first row come from the slot that it reads. Its last `taps`
/// inputs are stored in the slots that it writes; a deferred sequence stores none.
///
/// # Errors
/// [`Error::Length`] if a weight, bias or `x` does not have the layer's shape.
pub fn conv(
    pool: &Pool,
    isa: Isa,
    state: &mut LayerState<'_>,
    weight: &ConvWeight,
    (bias, silu): (Option<&[f32]>, bool),
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
            dispatch(isa, Convolve { state, sequence, weight, bias, silu, x: &x, first, channels });
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
    silu: bool,
    x: &'a Disjoint<'a, f32>,
    first: usize,
    channels: usize,
}

/// Past inputs of some channels, `[taps][channels]`, oldest first. The oldest is stored but not used.
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

    /// Convolves a single row that is not deferred, from slot to slot. Its reads are short runs at distant
    /// addresses, so the next channels are prefetched.
    #[inline(always)]
    fn step<S: Simd, const TAPS: usize>(&self, s: S) {
        let (width, sequence) = (self.weight.channels, self.sequence);
        for channel in (0..self.channels).step_by(LANES) {
            let (at, lanes) = (self.first + channel, LANES.min(self.channels - channel));
            let mut sum = self.bias.map_or(s.splat(0.0), |bias| load(s, &bias[at..at + lanes]));
            // Inputs of the last positions, oldest first; the last one is the row's own input.
            let mut inputs = [s.splat(0.0); TAPS];
            // SAFETY: sequences do not share rows, and only this item uses these channels.
            let x = unsafe { self.x.slice(sequence.rows.start * width + at, lanes) };
            inputs[TAPS - 1] = load(s, x);
            if let Some(slot) = sequence.read {
                for (tap, input) in inputs.iter_mut().take(TAPS - 1).enumerate() {
                    let from = self.state.at(slot, (tap + 1) * width + at);
                    s.prefetch(from.wrapping_add(AHEAD).cast());
                    // SAFETY: the channels lie inside the layer's past inputs (`LayerState::at`), which no
                    // other thread writes; those of all taps are read before this sequence's own slot is
                    // written.
                    *input = unsafe { s.load_first(from, lanes) };
                }
            }
            for (tap, input) in inputs.iter().enumerate() {
                let weight = &self.weight.values[tap * width + at..][..lanes];
                s.prefetch(weight.as_ptr().wrapping_add(AHEAD).cast());
                sum = s.fma(load(s, weight), *input, sum);
                let to = self.state.at(sequence.write, tap * width + at);
                // SAFETY: as above; only its sequence uses a slot that it writes, and only this item these
                // channels.
                unsafe { s.store_first(*input, to, lanes) };
            }
            s.prefetch(self.state.at(sequence.write, at).wrapping_add(AHEAD).cast());
            let y = if self.silu { simd::silu(s, sum) } else { sum };
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
                // SAFETY: the channels lie inside the layer's past inputs (`LayerState::at`), which no other
                // thread writes; they are read before this sequence's own slots are written.
                unsafe { from.copy_to_nonoverlapping(past.as_mut_ptr(), self.channels) };
            }
        }
        history
    }

    fn write<const TAPS: usize>(&self, history: &History, slot: usize) {
        for (tap, past) in history.iter().take(TAPS).enumerate() {
            let to = self.state.at(slot, tap * self.weight.channels + self.first);
            // SAFETY: as for `read`; only its sequence uses a slot that it writes, and only this item these
            // channels.
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
                // Inputs that a row sees, oldest first. The last is the row's own input, which is set below.
                let mut inputs = [bias; TAPS];
                for (input, past) in inputs.iter_mut().zip(&history[1..TAPS]) {
                    *input = load(s, &past[channel..channel + LANES]);
                }
                for row in tile..rows.end.min(tile + TILE_ROWS) {
                    // SAFETY: sequences do not share rows, and only this item uses these channels.
                    let x = unsafe { self.x.slice((self.sequence.rows.start + row) * width + at, lanes) };
                    inputs[TAPS - 1] = load(s, x);
                    let mut sum = bias;
                    for (weight, input) in weights.iter().zip(&inputs) {
                        sum = s.fma(*weight, *input, sum);
                    }
                    let y = if self.silu { simd::silu(s, sum) } else { sum };
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

/// Loads up to 16 values; the other lanes are zero.
#[inline(always)]
fn load<S: Simd>(s: S, x: &[f32]) -> S::V {
    match x.first_chunk() {
        Some(chunk) => s.chunk(chunk),
        None => s.tail(x),
    }
}
