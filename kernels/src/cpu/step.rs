//! The running step: its tokens, the positions of its rows, and the attention plans of its layers.

use crate::Error;
use crate::attention::{AttentionShape, BlockTable, QueryRow, StepPlan, check_len};
use crate::backend::{KvLayerId, RowPlaces, StepInput};

use super::attend::KvLayer;

/// The parts of a step's input that its ops read.
#[derive(Debug, Default)]
pub(super) struct Step {
    pub(super) tokens: Vec<u32>,
    pub(super) rows: Vec<QueryRow>,
    /// Of the next step; see [`RowPlaces`].
    next: (Vec<[u32; 3]>, Vec<(u32, u32)>),
    pub(super) axes: Vec<[u32; 3]>,
    spans: Vec<(u32, u32)>,
    /// Start of the second segment of each sequence. With one segment, a value above all positions.
    segment_starts: Vec<usize>,
    /// Index into `plans` per KV layer. Layers of one group and shape share a plan.
    plan_of: Vec<usize>,
    plans: Vec<StepPlan>,
}

impl Step {
    /// Sets the places of the next step's rows.
    pub(super) fn place(&mut self, places: &RowPlaces<'_>) {
        self.next = (places.axes.to_vec(), places.spans.to_vec());
    }

    /// End of the positions on axes.
    pub(super) fn axes_end(&self) -> usize {
        self.axes.iter().flatten().max().map_or(0, |last| *last as usize + 1)
    }

    /// Stores a step's input and returns the end of its positions.
    pub(super) fn begin(&mut self, input: &StepInput<'_>) -> Result<usize, Error> {
        (self.axes, self.spans) = std::mem::take(&mut self.next);
        self.tokens.clear();
        self.tokens.extend_from_slice(input.tokens);
        self.rows.clear();
        self.segment_starts.clear();
        let mut end = 0;
        for (sequence, step_sequence) in input.sequences.iter().enumerate() {
            if step_sequence.rows.start != self.rows.len() {
                let (expected, found) = (self.rows.len(), step_sequence.rows.start);
                return Err(Error::Length { what: "rows before a sequence", expected, found });
            }
            let positions = step_sequence.context..step_sequence.context + step_sequence.rows.len();
            end = end.max(positions.end);
            self.rows.extend(
                positions.map(|position| QueryRow { sequence: sequence as u32, position: position as u32 }),
            );
            self.segment_starts.push(step_sequence.segment_start.unwrap_or(usize::MAX));
        }
        if self.rows.len() != self.tokens.len() {
            let (expected, found) = (self.tokens.len(), self.rows.len());
            return Err(Error::Length { what: "rows of the step's sequences", expected, found });
        }
        for (what, found) in [("positions on axes", self.axes.len()), ("spans of rows", self.spans.len())] {
            if found > 0 {
                check_len(what, self.rows.len(), found)?;
            }
        }
        Ok(end)
    }

    /// Creates one plan for each combination of group and shape.
    pub(super) fn make_plans(
        &mut self,
        layers: &[KvLayer],
        tables: &[Vec<BlockTable<'_>>],
        threads: usize,
    ) -> Result<(), Error> {
        self.plans.clear();
        self.plan_of.clear();
        let mut made: Vec<(usize, AttentionShape)> = Vec::new();
        for layer in layers {
            let existing = made.iter().position(|made| *made == (layer.group, layer.shape));
            let index = match existing {
                Some(index) => index,
                None => {
                    let missing =
                        Error::OutOfRange { what: "KV group", index: layer.group, len: tables.len() };
                    let placements = tables.get(layer.group).ok_or(missing)?;
                    self.plans.push({
                        let (rows, spans) = (&self.rows, &self.spans);
                        StepPlan::with_spans(layer.shape, rows, spans, placements, threads)?
                    });
                    made.push((layer.group, layer.shape));
                    made.len() - 1
                }
            };
            self.plan_of.push(index);
        }
        Ok(())
    }

    /// The plan of a layer's shape.
    pub(super) fn plan(&self, layer: KvLayerId) -> Result<&StepPlan, Error> {
        let index = layer.0 as usize;
        let plan = self.plan_of.get(index).and_then(|plan| self.plans.get(*plan));
        plan.ok_or(Error::OutOfRange { what: "KV layer of the step", index, len: self.plan_of.len() })
    }

    /// Segment of a row's position: 0 or 1.
    pub(super) fn segment(&self, row: usize) -> usize {
        let QueryRow { sequence, position } = self.rows[row];
        usize::from(position as usize >= self.segment_starts[sequence as usize])
    }
}
