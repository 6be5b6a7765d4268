//! Rows that may be taken back: their states are written when it is known how many of them count.
//!
//! To guess several tokens, compute them in one step and keep those that were right is only worth it if the wrong ones
//! cost little. A KV cache forgets rows by not counting them; a recurrent state cannot be run backwards. Engines in the
//! field (vLLM, SGLang) write a whole state per row and then pick one: as many states, and as many writes, as there
//! are guesses. Here a deferred step reads the state, leaves it alone and keeps what the rows brought to each layer;
//! afterwards the rows that count are run once more from the same state, by the same kernels, so that the state is bit
//! for bit the one of having stepped. It costs one more pass over the state, and the guesses' inputs in place of their
//! states (the idea is that of ReplaySSM).

use super::rows::Buffer;
use crate::Error;
use crate::attention::check_len;
use crate::backend::{
    ConvOp, DeltaNetOp, MAX_DEFERRED_STEPS, Mamba2Op, StateLayerId, StepInput, StepSequence, StepState,
};
use std::collections::VecDeque;
use std::ops::Range;

/// What steps have deferred that nobody has accepted yet.
#[derive(Debug, Default)]
pub(super) struct Deferred {
    steps: VecDeque<DeferredStep>,
    /// Whether the last of them is the one that is run.
    runs: bool,
}

/// What one of them has deferred.
#[derive(Debug)]
struct DeferredStep {
    sequences: Vec<Sequence>,
    /// Rows of the step.
    rows: usize,
    layers: Vec<Inputs>,
}

/// A sequence whose state is deferred.
#[derive(Debug)]
struct Sequence {
    /// Its rows of the step.
    rows: Range<usize>,
    read: Option<u32>,
    write: u32,
}

/// What the deferred rows brought to one layer.
#[derive(Debug, Default)]
pub(super) struct Inputs {
    pub(super) conv: Option<(ConvOp, Kept)>,
    pub(super) recurrence: Option<Recurrence>,
}

/// The op of a recurrence, and its inputs.
#[derive(Debug)]
pub(super) enum Recurrence {
    DeltaNet { op: DeltaNetOp, qkv: Kept, beta: Kept, alpha: Kept },
    Mamba2 { op: Mamba2Op, xbc: Kept, dt: Kept },
}

/// The deferred rows of a buffer, one after the other.
#[derive(Debug)]
pub(super) struct Kept {
    values: Vec<f32>,
    cols: usize,
}

/// Which of the deferred rows count.
#[derive(Debug)]
pub(super) struct Accepted {
    /// The sequences with these rows alone, and what happens to their states.
    pub(super) sequences: Vec<StepSequence>,
    pub(super) states: Vec<StepState>,
    /// Their places among the deferred rows.
    kept: Vec<Range<usize>>,
}

impl Deferred {
    /// Has the rows of a step that defers remembered beside those of others.
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
            return Err(Error::DeferredSteps { most: MAX_DEFERRED_STEPS });
        }
        if self.runs {
            self.steps.push_back(DeferredStep { sequences, rows: step.tokens.len(), layers: Vec::new() });
        }
        Ok(())
    }

    /// Where a layer's inputs are to be kept; none where the step defers nothing.
    pub(super) fn layer(&mut self, id: StateLayerId) -> Option<(DeferredCopies<'_>, &mut Inputs)> {
        let DeferredStep { sequences, rows, layers } = self.steps.back_mut().filter(|_| self.runs)?;
        let index = id.0 as usize;
        layers.resize_with(layers.len().max(index + 1), Inputs::default);
        Some((DeferredCopies { sequences, rows: *rows }, &mut layers[index]))
    }

    /// Takes out what the oldest step has kept, by layer, and which of it counts: `rows` of each sequence.
    ///
    /// # Errors
    /// [`Error::Length`] where there are not as many sequences, [`Error::OutOfRange`] for more rows than one has. Then
    /// nothing is taken out.
    pub(super) fn accept(&mut self, rows: &[usize]) -> Result<(Accepted, Vec<Inputs>), Error> {
        let sequences = self.steps.front().map_or(&[][..], |step| &step.sequences);
        check_len("sequences with deferred states", sequences.len(), rows.len())?;
        let too_many = sequences.iter().zip(rows).find(|(sequence, rows)| **rows > sequence.rows.len());
        if let Some((sequence, rows)) = too_many {
            return Err(Error::OutOfRange { what: "accepted rows", index: *rows, len: sequence.rows.len() });
        }
        let mut accepted = Accepted { sequences: Vec::new(), states: Vec::new(), kept: Vec::new() };
        let (mut place, mut row) = (0, 0);
        let Some(DeferredStep { sequences, layers, .. }) = self.steps.pop_front() else {
            return Ok((accepted, Vec::new()));
        };
        self.runs &= !self.steps.is_empty();
        for (sequence, rows) in sequences.into_iter().zip(rows) {
            let Sequence { read, write, .. } = sequence;
            // Where it stands already, a state needs no passage.
            if *rows > 0 || read != Some(write) {
                let rows = row..row + rows;
                row = rows.end;
                accepted.kept.push(place..place + rows.len());
                accepted.sequences.push(StepSequence { rows, context: 0, segment_start: None });
                accepted.states.push(StepState { read, write, ..StepState::default() });
            }
            place += sequence.rows.len();
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
    pub(super) fn keep(&self, buffer: &Buffer) -> Result<Kept, Error> {
        check_len("rows to keep", self.rows, buffer.rows())?;
        let (cols, values) = (buffer.cols(), buffer.values());
        let rows = |sequence: &Sequence| &values[sequence.rows.start * cols..sequence.rows.end * cols];
        Ok(Kept { values: self.sequences.iter().flat_map(rows).copied().collect(), cols })
    }
}

impl Kept {
    /// The rows that count.
    pub(super) fn accepted(&self, accepted: &Accepted) -> Vec<f32> {
        let rows = |rows: &Range<usize>| &self.values[rows.start * self.cols..rows.end * self.cols];
        accepted.kept.iter().flat_map(rows).copied().collect()
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
