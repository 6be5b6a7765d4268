//! Deferred state updates: states of draft rows are written once the number of accepted rows is known.
//!
//! Verifying several draft tokens in one step pays off only if rejected ones are cheap. A KV cache drops rows
//! by not counting them, but a recurrent state cannot be run backwards. Other engines (vLLM, SGLang) write a
//! whole state per row and then pick one, so the number of states and of writes equals the number of draft
//! tokens. Here a deferred step reads the state, does not change it, and stores the inputs of its rows for
//! each layer. Afterwards the accepted rows are computed once more from the same state by the same kernels,
//! so the state is bit for bit the one of an ordinary step. The cost is one more pass over the state, and
//! memory for the inputs of the draft rows instead of their states. The idea is that of ReplaySSM.

use super::rows::Buffer;
use crate::Error;
use crate::attention::check_len;
use crate::backend::{
    ConvOp, DeltaNetOp, MAX_DEFERRED_STEPS, Mamba2Op, StateLayerId, StepInput, StepSequence, StepState,
};
use std::collections::VecDeque;
use std::ops::Range;

/// Deferred steps that have not been accepted yet, oldest first.
#[derive(Debug, Default)]
pub(super) struct Deferred {
    steps: VecDeque<DeferredStep>,
    /// Whether the last of `steps` is the step that is running.
    runs: bool,
}

/// The deferred sequences of one step and the inputs of their rows.
#[derive(Debug)]
struct DeferredStep {
    sequences: Vec<Sequence>,
    /// Number of rows of the whole step.
    rows: usize,
    layers: Vec<Inputs>,
}

/// A sequence whose state is deferred.
#[derive(Debug)]
struct Sequence {
    /// Rows of the step that belong to the sequence.
    rows: Range<usize>,
    read: Option<u32>,
    write: u32,
}

/// Inputs of the deferred rows at one layer.
#[derive(Debug, Default)]
pub(super) struct Inputs {
    pub(super) conv: Option<(ConvOp, SavedInput)>,
    pub(super) recurrence: Option<Recurrence>,
}

/// The op of a recurrence and copies of its inputs.
#[derive(Debug)]
pub(super) enum Recurrence {
    DeltaNet { op: DeltaNetOp, qkv: SavedInput, beta: SavedInput, alpha: SavedInput },
    Mamba2 { op: Mamba2Op, xbc: SavedInput, dt: SavedInput },
}

/// Copies of the deferred rows of a buffer, one after the other.
#[derive(Debug)]
pub(super) struct SavedInput {
    values: Vec<f32>,
    cols: usize,
}

/// The deferred rows that were accepted.
#[derive(Debug)]
pub(super) struct Accepted {
    /// Each sequence with its accepted rows only.
    pub(super) sequences: Vec<StepSequence>,
    pub(super) states: Vec<StepState>,
    /// Ranges of the accepted rows among the deferred rows.
    ranges: Vec<Range<usize>>,
}

impl Deferred {
    /// Records the sequences of a step that have a deferred state.
    ///
    /// # Errors
    /// [`Error::DeferredSteps`].
    pub(super) fn begin(&mut self, step: &StepInput<'_>) -> Result<(), Error> {
        let deferred = step.sequences.iter().zip(step.states).filter(|(_, state)| state.deferred);
        let sequence = |(sequence, state): (&StepSequence, &StepState)| Sequence {
            rows: sequence.rows.clone(),
            read: state.read,
            write: state.write,
        };
        let sequences: Vec<Sequence> = deferred.map(sequence).collect();
        self.runs = !sequences.is_empty();
        if self.runs && self.steps.len() == MAX_DEFERRED_STEPS {
            self.runs = false;
            return Err(Error::DeferredSteps { max: MAX_DEFERRED_STEPS });
        }
        if self.runs {
            self.steps.push_back(DeferredStep { sequences, rows: step.tokens.len(), layers: Vec::new() });
        }
        Ok(())
    }

    /// Returns where to store a layer's inputs. `None`: the running step defers nothing.
    pub(super) fn layer(&mut self, id: StateLayerId) -> Option<(DeferredCopies<'_>, &mut Inputs)> {
        let DeferredStep { sequences, rows, layers } = self.steps.back_mut().filter(|_| self.runs)?;
        let index = id.0 as usize;
        layers.resize_with(layers.len().max(index + 1), Inputs::default);
        Some((DeferredCopies { sequences, rows: *rows }, &mut layers[index]))
    }

    /// Removes the oldest step and returns its inputs by layer and its accepted rows. `rows` has the number
    /// of accepted rows of each deferred sequence.
    ///
    /// # Errors
    /// [`Error::Length`] if the number of sequences differs, [`Error::OutOfRange`] if a sequence has fewer
    /// rows. Then nothing is removed.
    pub(super) fn accept(&mut self, rows: &[usize]) -> Result<(Accepted, Vec<Inputs>), Error> {
        let sequences = self.steps.front().map_or(&[][..], |step| &step.sequences);
        check_len("sequences with deferred states", sequences.len(), rows.len())?;
        let too_many = sequences.iter().zip(rows).find(|(sequence, rows)| **rows > sequence.rows.len());
        if let Some((sequence, rows)) = too_many {
            return Err(Error::OutOfRange { what: "accepted rows", index: *rows, len: sequence.rows.len() });
        }
        let mut accepted = Accepted { sequences: Vec::new(), states: Vec::new(), ranges: Vec::new() };
        let (mut start, mut row) = (0, 0);
        let Some(DeferredStep { sequences, layers, .. }) = self.steps.pop_front() else {
            return Ok((accepted, Vec::new()));
        };
        self.runs &= !self.steps.is_empty();
        for (sequence, rows) in sequences.into_iter().zip(rows) {
            let Sequence { read, write, .. } = sequence;
            // With no accepted row, a state that is already in its slot needs no pass.
            if *rows > 0 || read != Some(write) {
                let rows = row..row + rows;
                row = rows.end;
                accepted.ranges.push(start..start + rows.len());
                accepted.sequences.push(StepSequence { rows, context: 0, segment_start: None });
                accepted.states.push(StepState { read, write, ..StepState::default() });
            }
            start += sequence.rows.len();
        }
        Ok((accepted, layers))
    }

    pub(super) fn bytes(&self) -> usize {
        self.steps.iter().flat_map(|step| &step.layers).map(Inputs::bytes).sum()
    }
}

/// Copies the deferred rows of a step out of its buffers.
pub(super) struct DeferredCopies<'a> {
    sequences: &'a [Sequence],
    rows: usize,
}

impl DeferredCopies<'_> {
    /// # Errors
    /// [`Error::Length`] for a buffer that does not hold the step's rows.
    pub(super) fn save(&self, buffer: &Buffer) -> Result<SavedInput, Error> {
        check_len("rows to keep", self.rows, buffer.rows())?;
        let (cols, values) = (buffer.cols(), buffer.values());
        let rows = |sequence: &Sequence| &values[sequence.rows.start * cols..sequence.rows.end * cols];
        Ok(SavedInput { values: self.sequences.iter().flat_map(rows).copied().collect(), cols })
    }
}

impl SavedInput {
    /// The accepted rows.
    pub(super) fn accepted(&self, accepted: &Accepted) -> Vec<f32> {
        let rows = |rows: &Range<usize>| &self.values[rows.start * self.cols..rows.end * self.cols];
        accepted.ranges.iter().flat_map(rows).copied().collect()
    }

    fn bytes(&self) -> usize {
        size_of_val(self.values.as_slice())
    }
}

impl Inputs {
    fn bytes(&self) -> usize {
        let recurrence = match &self.recurrence {
            None => 0,
            Some(Recurrence::DeltaNet { qkv, beta, alpha, .. }) => qkv.bytes() + beta.bytes() + alpha.bytes(),
            Some(Recurrence::Mamba2 { xbc, dt, .. }) => xbc.bytes() + dt.bytes(),
        };
        recurrence + self.conv.as_ref().map_or(0, |(_, x)| x.bytes())
    }
}
