//! Steps that decode, recorded and run again.
//!
//! A step of one row for each sequence launches the same kernels with the same arguments as any other with so many rows
//! whose longest sequence reaches as far, in powers of two: everything else that differs lies in the step's piece of
//! memory. The second of such steps is recorded, those after it are replayed. The memory that a recording names stays as
//! long as nothing is given back; then all of them are forgotten. How many rows is not rounded: a recording costs about
//! as much as the step itself, and rows that nobody wants would cost at every step.

use super::super::device::GraphId;
use super::super::tape::Taped;
use super::super::{CudaError, Device};
use super::memory::{Buffers, Shapes};
use super::step::{Largest, StepForm, StepMemory};
use crate::backend::{StepCounts, StepOps};
use crate::error::Error;
use std::collections::HashMap;

#[cfg(test)]
mod tests;

/// Graphs that are kept; of more, the one goes that was run longest ago.
const MOST: usize = 64;

/// The recordings of a backend.
pub(super) struct Graphs {
    on: bool,
    known: HashMap<StepForm, GraphState>,
    /// [`Taped::frees`] since when they are sound.
    frees: u64,
    recording: Option<StepForm>,
    counts: StepCounts,
}

/// What is known of steps of one form.
enum GraphState {
    /// One was run; the memory that it needed is there.
    Ran,
    Recorded(Recording),
}

struct Recording {
    graph: GraphId,
    /// What the buffers hold behind it.
    shapes: Shapes,
    /// The numbers that its tables have rows for.
    most: Largest,
    /// The step that ran it last.
    used: u64,
}

impl Default for Graphs {
    fn default() -> Self {
        Self { on: true, known: HashMap::new(), frees: 0, recording: None, counts: StepCounts::default() }
    }
}

impl Graphs {
    pub(super) fn turn_off(&mut self) {
        self.on = false;
    }

    pub(super) fn counts(&self) -> StepCounts {
        let kept = self.known.values().filter(|known| matches!(known, GraphState::Recorded(_))).count();
        StepCounts { kept, ..self.counts }
    }

    /// Ends a recording whose step was given up in the middle. Nothing of it has been run.
    pub(super) fn give_up(&mut self, device: &mut Taped) {
        if self.recording.take().is_some() {
            device.take_tape();
        }
    }

    /// Forgets all recordings, as what they name is replaced. Memory only grows: there is enough for the next ones.
    pub(super) fn clear(&mut self, device: &mut Taped) {
        for known in self.known.values_mut() {
            if let GraphState::Recorded(recording) = known {
                device.forget(recording.graph);
                *known = GraphState::Ran;
            }
        }
    }

    /// See [`crate::backend::Backend::begin_ops`].
    pub(super) fn begin(
        &mut self,
        device: &mut Taped,
        step: &StepMemory,
        buffers: &mut Buffers,
    ) -> Result<StepOps, Error> {
        if self.frees != device.frees() {
            self.clear(device);
            self.frees = device.frees();
        }
        let Some(form) = step.form().filter(|_| self.on) else {
            self.counts.called += 1;
            return Ok(StepOps::Called);
        };
        let now = self.counts.called + self.counts.recorded + self.counts.replayed;
        match self.known.get_mut(&form) {
            None => {
                self.known.insert(form, GraphState::Ran);
                self.counts.called += 1;
                Ok(StepOps::Called)
            }
            Some(GraphState::Ran) => {
                device.start_tape();
                self.recording = Some(form);
                Ok(StepOps::Recorded)
            }
            Some(GraphState::Recorded(recording)) => {
                // What an op would have looked at before it was launched.
                step.largest().check(&recording.most)?;
                device.replay(recording.graph)?;
                recording.used = now;
                buffers.set_shapes(&recording.shapes);
                self.counts.replayed += 1;
                Ok(StepOps::Replayed)
            }
        }
    }

    /// See [`crate::backend::Backend::end_ops`].
    pub(super) fn end(
        &mut self,
        device: &mut Taped,
        step: &StepMemory,
        buffers: &Buffers,
    ) -> Result<(), CudaError> {
        let Some(form) = self.recording.take() else { return Ok(()) };
        let Some(tape) = device.take_tape() else {
            // It asked for something that no graph has, and was run.
            self.counts.called += 1;
            return Ok(());
        };
        let graph = match device.graph_of(&tape) {
            Ok(graph) => graph,
            Err(error @ CudaError::Lost { .. }) => return Err(error),
            Err(error) => {
                tracing::warn!(%error, "this device records no graphs; kernels are launched one by one");
                self.turn_off();
                self.counts.called += 1;
                return tape.iter().try_for_each(|entry| entry.play(device));
            }
        };
        self.make_room(device);
        self.counts.recorded += 1;
        let used = self.counts.called + self.counts.recorded + self.counts.replayed;
        let recording = Recording { graph, shapes: buffers.shapes(), most: step.most(), used };
        self.known.insert(form, GraphState::Recorded(recording));
        device.replay(graph)
    }

    /// Forgets the graph that was run longest ago, if there are as many as are kept.
    fn make_room(&mut self, device: &mut Taped) {
        let recorded = self.known.iter().filter_map(|(form, known)| match known {
            GraphState::Recorded(recording) => Some((recording.used, *form, recording.graph)),
            GraphState::Ran => None,
        });
        if recorded.clone().count() < MOST {
            return;
        }
        if let Some((_, form, graph)) = recorded.min_by_key(|(used, ..)| *used) {
            self.known.remove(&form);
            device.forget(graph);
        }
    }
}
