//! Long short-term memory networks of one or two directions and several layers, in f32 on this engine's
//! kernels.
//!
//! For each time, with the gates `i` (input), `f` (forget), `o` (output), `g` (cell) and all biases summed:
//!
//! ```text
//! i, f, o = sigmoid(W x + R h + b)      g = tanh(W x + R h + b)
//! c = f c + i g                         h = o tanh(c)
//! ```
//!
//! Files store the rows of the gates in different orders ([`GateOrder`]); they are rearranged once, when the
//! network is loaded. The results of a sequence have the same bits in any batch, and a sequence of one
//! direction has them for any division into pieces.

use crate::Error;
use crate::compute::{Compute, Linear, Matrix};
use kernels::ops::{Activation, Gating, gated_row, sigmoid, tanh};

#[cfg(test)]
mod tests;

/// Number of gates.
const GATES: usize = 4;
/// Sequences that a thread computes together. More share the reading of the weights.
const GROUP: usize = 8;

/// Order of the gates in a file. Each has `hidden` consecutive rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GateOrder {
    /// PyTorch's files: input, forget, cell, output.
    InputForgetCellOutput,
    /// ONNX's files: input, output, forget, cell.
    InputOutputForgetCell,
}

impl GateOrder {
    /// Positions in the file of the gates input, forget, output and cell, which is the order in memory: three
    /// sigmoids, then the hyperbolic tangent.
    fn positions(self) -> [usize; GATES] {
        match self {
            Self::InputForgetCellOutput => [0, 1, 3, 2],
            Self::InputOutputForgetCell => [0, 2, 1, 3],
        }
    }

    /// Brings the gates of a file into the order in memory.
    fn rearranged(self, values: &[f32]) -> Vec<f32> {
        let gate = values.len() / GATES;
        self.positions().iter().flat_map(|at| &values[at * gate..(at + 1) * gate]).copied().collect()
    }
}

/// Weights of one direction of a layer, as a file stores them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LstmWeights<'a> {
    pub(crate) order: GateOrder,
    /// `[4 hidden, inputs]`
    pub(crate) input: &'a [f32],
    /// `[4 hidden, hidden]`
    pub(crate) recurrent: &'a [f32],
    /// `[4 hidden]`, of the input's product and of the recurrent product. They are added.
    pub(crate) biases: [&'a [f32]; 2],
}

/// One direction of a layer.
struct Direction {
    input: Linear,
    recurrent: Linear,
    hidden: usize,
}

/// Output and cell after the last time of some sequences, each `[sequences, hidden]`.
#[derive(Debug, Clone, PartialEq)]
struct LayerState {
    h: Vec<f32>,
    c: Vec<f32>,
}

impl LayerState {
    fn zero(len: usize) -> Self {
        Self { h: vec![0.0; len], c: vec![0.0; len] }
    }
}

fn shape_fault(reason: String) -> Error {
    Error::Config { option: "lstm", reason }
}

impl Direction {
    /// # Errors
    /// [`Error::Config`] if the lengths do not fit each other.
    fn new(weights: &LstmWeights<'_>) -> Result<Self, Error> {
        let LstmWeights { order, input, recurrent, biases } = weights;
        let rows = biases[0].len();
        let hidden = rows / GATES;
        let fits = hidden > 0
            && rows == GATES * hidden
            && biases[1].len() == rows
            && recurrent.len() == rows * hidden
            && !input.is_empty()
            && input.len().is_multiple_of(rows);
        if !fits {
            let lens = [input.len(), recurrent.len(), biases[0].len(), biases[1].len()];
            return Err(shape_fault(format!("its weights have {lens:?} values")));
        }
        let bias: Vec<f32> = biases[0].iter().zip(biases[1]).map(|(input, own)| input + own).collect();
        let matrix = |values: &[f32]| Matrix::of(&order.rearranged(values), values.len() / rows);
        let input = Linear { weight: matrix(input)?, bias: Some(order.rearranged(&bias)) };
        Ok(Self { input, recurrent: Linear { weight: matrix(recurrent)?, bias: None }, hidden })
    }

    /// Computes sequences on the calling thread. `x` is `[times, sequences, inputs]`. Returns the outputs
    /// `[times, sequences, hidden]`; `state` becomes that after the last computed time. `reverse`: from the
    /// last time to the first.
    fn scan(
        &self,
        compute: &Compute,
        x: &[f32],
        reverse: bool,
        state: &mut LayerState,
    ) -> Result<Vec<f32>, Error> {
        let (hidden, isa) = (self.hidden, compute.isa);
        let LayerState { h, c } = state;
        let step = h.len();
        let mut gates = vec![0.0; x.len() / self.input.weight.cols() * GATES * hidden];
        self.input.apply(compute.kernels, x, false, &mut gates)?;
        let times = gates.len() / (GATES * step);
        let mut out = vec![0.0; times * step];
        for time in 0..times {
            let time = if reverse { times - 1 - time } else { time };
            let gates = &mut gates[time * GATES * step..][..GATES * step];
            self.recurrent.apply(compute.kernels, h, true, gates)?;
            for ((gates, c), h) in
                gates.chunks_mut(GATES * hidden).zip(c.chunks_mut(hidden)).zip(h.chunks_mut(hidden))
            {
                let (sigmoids, cell) = gates.split_at_mut(3 * hidden);
                sigmoid(isa, sigmoids);
                tanh(isa, cell);
                let (input, rest) = sigmoids.split_at(hidden);
                let (forget, output) = rest.split_at(hidden);
                for (((c, input), forget), cell) in c.iter_mut().zip(input).zip(forget).zip(&*cell) {
                    *c = forget.mul_add(*c, input * cell);
                }
                cell.copy_from_slice(c);
                tanh(isa, cell);
                gated_row(isa, Gating::By(Activation::Identity), cell, output, h)?;
            }
            out[time * step..][..step].copy_from_slice(h);
        }
        Ok(out)
    }
}

/// Some sequences of `[times, sequences, width]`, as `[times, some, width]`.
fn sequences(x: &[f32], all: usize, some: std::ops::Range<usize>, width: usize) -> Vec<f32> {
    x.chunks(all * width).flat_map(|time| &time[some.start * width..some.end * width]).copied().collect()
}

/// A network of one direction. Its state can be carried from one piece of a sequence to the next.
pub(crate) struct Lstm {
    layers: Vec<Direction>,
}

/// State of a sequence of [`Lstm`].
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct LstmState {
    layers: Vec<LayerState>,
}

impl LstmState {
    /// The output `[hidden]` of the last layer at the last time.
    pub(crate) fn last_output(&self) -> &[f32] {
        self.layers.last().map_or(&[], |layer| &layer.h)
    }
}

impl Lstm {
    /// # Errors
    /// [`Error::Config`] if the lengths do not fit each other.
    pub(crate) fn new(layers: &[LstmWeights<'_>]) -> Result<Self, Error> {
        let layers = layers.iter().map(Direction::new).collect::<Result<Vec<_>, _>>()?;
        check_widths(layers.iter().map(|layer| (layer.input.weight.cols(), layer.hidden)))?;
        Ok(Self { layers })
    }

    /// The state before the first time.
    pub(crate) fn initial_state(&self) -> LstmState {
        LstmState { layers: self.layers.iter().map(|layer| LayerState::zero(layer.hidden)).collect() }
    }

    /// Computes the next times of one sequence, `x`: `[times, inputs]`. Returns `[times, hidden]`.
    ///
    /// # Errors
    /// Errors of the kernels.
    pub(crate) fn run(&self, compute: &Compute, x: &[f32], state: &mut LstmState) -> Result<Vec<f32>, Error> {
        let mut x = x.to_vec();
        for (layer, state) in self.layers.iter().zip(&mut state.layers) {
            x = layer.scan(compute, &x, false, state)?;
        }
        Ok(x)
    }

    /// Computes whole sequences on all threads, `x`: `[times, sequences, inputs]`. Returns the output of the
    /// last layer at the last time, `[sequences, hidden]`.
    ///
    /// # Errors
    /// Errors of the kernels.
    pub(crate) fn last_outputs(&self, compute: &Compute, x: &[f32], count: usize) -> Result<Vec<f32>, Error> {
        let width = self.layers.first().map_or(1, |layer| layer.input.weight.cols());
        let groups = compute.all(count.div_ceil(GROUP), |group| {
            let range = group * GROUP..((group + 1) * GROUP).min(count);
            let len = range.len();
            let mut x = sequences(x, count, range, width);
            let mut last = Vec::new();
            for layer in &self.layers {
                let mut state = LayerState::zero(len * layer.hidden);
                x = layer.scan(compute, &x, false, &mut state)?;
                last = state.h;
            }
            Ok(last)
        })?;
        Ok(groups.concat())
    }
}

/// A network of two directions. A layer's output has those of the forward direction, then those of the
/// backward direction, for each time.
pub(crate) struct BidirectionalLstm {
    layers: Vec<[Direction; 2]>,
}

impl BidirectionalLstm {
    /// The weights of each layer: forward, backward.
    ///
    /// # Errors
    /// [`Error::Config`] if the lengths do not fit each other.
    pub(crate) fn new(layers: &[[LstmWeights<'_>; 2]]) -> Result<Self, Error> {
        let layer = |[forward, backward]: &[LstmWeights<'_>; 2]| {
            let directions = [Direction::new(forward)?, Direction::new(backward)?];
            let [forward, backward] = directions.each_ref().map(|one| (one.input.weight.cols(), one.hidden));
            match forward == backward {
                true => Ok(directions),
                false => Err(shape_fault("the directions of a layer have different sizes".to_owned())),
            }
        };
        let layers = layers.iter().map(layer).collect::<Result<Vec<_>, Error>>()?;
        check_widths(layers.iter().map(|[layer, _]| (layer.input.weight.cols(), 2 * layer.hidden)))?;
        Ok(Self { layers })
    }

    /// Computes whole sequences on all threads, `x`: `[times, sequences, inputs]`. Returns
    /// `[times, sequences, 2 hidden]`.
    ///
    /// # Errors
    /// Errors of the kernels.
    pub(crate) fn run(&self, compute: &Compute, x: Vec<f32>, count: usize) -> Result<Vec<f32>, Error> {
        let mut x = x;
        for layer in &self.layers {
            let (width, hidden) = (layer[0].input.weight.cols(), layer[0].hidden);
            let times = x.len() / (count * width).max(1);
            let group = |item: usize| item / 2 * GROUP..((item / 2 + 1) * GROUP).min(count);
            let groups = compute.all(2 * count.div_ceil(GROUP), |item| {
                let range = group(item);
                let mut state = LayerState::zero(range.len() * hidden);
                layer[item % 2].scan(compute, &sequences(&x, count, range, width), item % 2 == 1, &mut state)
            })?;
            x = vec![0.0; times * count * 2 * hidden];
            for (item, values) in groups.iter().enumerate() {
                let range = group(item);
                for (row, values) in values.chunks(hidden).enumerate() {
                    let (time, sequence) = (row / range.len(), range.start + row % range.len());
                    let start = ((time * count + sequence) * 2 + item % 2) * hidden;
                    x[start..start + hidden].copy_from_slice(values);
                }
            }
        }
        Ok(x)
    }
}

/// Checks that each layer's input is the output of the one before. Layers are (inputs, outputs).
fn check_widths(layers: impl Iterator<Item = (usize, usize)>) -> Result<(), Error> {
    let mut before = None;
    for (inputs, outputs) in layers {
        if before.is_some_and(|before| before != inputs) {
            return Err(shape_fault(format!(
                "a layer has {inputs} inputs, the one before {before:?} outputs"
            )));
        }
        before = Some(outputs);
    }
    Ok(())
}
