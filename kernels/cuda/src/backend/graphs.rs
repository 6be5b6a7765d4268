//! CUDA graphs of decode steps: recorded once and replayed.
//!
//! A step of sequences with equally many rows (a token each, and its draft tokens) launches the same kernels with
//! the same arguments as any other step of equal shape: the numbers of sequences and rows, whether a row has an
//! adapter, and the reach of the longest sequence as a power of two.
//! Everything else that differs is in the step's device memory. The second step of a shape is recorded,
//! later ones are replayed. The memory that a graph refers to stays allocated until something is freed;
//! then all graphs are dropped. The number of rows is not rounded, because recording costs about as much as
//! the step itself, and padding rows would cost time at every step.

use super::super::device::GraphId;
use super::super::tape::Taped;
use super::super::{CudaError, Device};
use super::memory::{Buffers, Shapes};
use super::step::{GraphShape, Largest, StepMemory};
use kernels::Error;
use kernels::backend::{StepCounts, StepOps};
use std::collections::HashMap;

#[cfg(test)]
mod tests;

/// Maximum number of recorded graphs. The least recently run graph is dropped first.
const MAX_GRAPHS: usize = 256;

/// Graphs of a backend.
pub(super) struct Graphs {
    on: bool,
    states: HashMap<GraphShape, GraphState>,
    /// Value of [`Taped::frees`] for which the graphs are valid.
    frees: u64,
    recording: Option<GraphShape>,
    counts: StepCounts,
}

/// State of a graph shape.
enum GraphState {
    /// A step of this shape has run, so the memory that it needs is allocated.
    Ran,
    Recorded(Recording),
}

struct Recording {
    graph: GraphId,
    /// Shapes of the buffers after the graph.
    shapes: Shapes,
    /// Largest indices that the graph's tables have rows for.
    max_index: Largest,
    /// Number of the step that ran the graph last.
    used: u64,
}

impl Default for Graphs {
    fn default() -> Self {
        Self { on: true, states: HashMap::new(), frees: 0, recording: None, counts: StepCounts::default() }
    }
}

impl Graphs {
    pub(super) fn turn_off(&mut self) {
        self.on = false;
    }

    pub(super) fn counts(&self) -> StepCounts {
        let kept = self.states.values().filter(|state| matches!(state, GraphState::Recorded(_))).count();
        StepCounts { kept, ..self.counts }
    }

    /// Drops the recording of a step that was aborted. None of it has been run.
    pub(super) fn abort_recording(&mut self, device: &mut Taped) {
        if self.recording.take().is_some() {
            device.take_tape();
        }
    }

    /// Drops all graphs, because the memory that they refer to is replaced. Memory only grows, so there is
    /// enough for the next ones.
    pub(super) fn clear(&mut self, device: &mut Taped) {
        for state in self.states.values_mut() {
            if let GraphState::Recorded(recording) = state {
                device.forget(recording.graph);
                *state = GraphState::Ran;
            }
        }
    }

    /// See [`kernels::backend::Backend::begin_ops`].
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
        let Some(graph_shape) = step.graph_shape().filter(|_| self.on) else {
            self.counts.called += 1;
            return Ok(StepOps::Called);
        };
        let now = self.counts.called + self.counts.recorded + self.counts.replayed;
        match self.states.get_mut(&graph_shape) {
            None => {
                self.states.insert(graph_shape, GraphState::Ran);
                self.counts.called += 1;
                Ok(StepOps::Called)
            }
            Some(GraphState::Ran) => {
                device.start_tape();
                self.recording = Some(graph_shape);
                Ok(StepOps::Recorded)
            }
            Some(GraphState::Recorded(recording)) => {
                // The check that an operation would have made before its launch.
                step.largest().check(&recording.max_index)?;
                device.replay(recording.graph)?;
                recording.used = now;
                buffers.set_shapes(&recording.shapes);
                self.counts.replayed += 1;
                Ok(StepOps::Replayed)
            }
        }
    }

    /// See [`kernels::backend::Backend::end_ops`].
    pub(super) fn end(
        &mut self,
        device: &mut Taped,
        step: &StepMemory,
        buffers: &Buffers,
    ) -> Result<(), CudaError> {
        let Some(graph_shape) = self.recording.take() else { return Ok(()) };
        let Some(tape) = device.take_tape() else {
            // The step used an operation that a graph cannot contain, and has been run.
            self.counts.called += 1;
            return Ok(());
        };
        let graph = match device.graph_of(&tape) {
            Ok(graph) => graph,
            Err(error @ CudaError::Lost { .. }) => return Err(error),
            Err(error) => {
                tracing::warn!(%error, "this device cannot record CUDA graphs; kernels are launched one by one");
                self.turn_off();
                self.counts.called += 1;
                return tape.iter().try_for_each(|entry| entry.play(device));
            }
        };
        self.make_room(device);
        self.counts.recorded += 1;
        let used = self.counts.called + self.counts.recorded + self.counts.replayed;
        let recording = Recording { graph, shapes: buffers.shapes(), max_index: step.max_index(), used };
        self.states.insert(graph_shape, GraphState::Recorded(recording));
        device.replay(graph)
    }

    /// Drops the graph that was run longest ago if the maximum number is stored.
    fn make_room(&mut self, device: &mut Taped) {
        let recorded = self.states.iter().filter_map(|(graph_shape, state)| match state {
            GraphState::Recorded(recording) => Some((recording.used, *graph_shape, recording.graph)),
            GraphState::Ran => None,
        });
        if recorded.clone().count() < MAX_GRAPHS {
            return;
        }
        if let Some((_, graph_shape, graph)) = recorded.min_by_key(|(used, ..)| *used) {
            self.states.remove(&graph_shape);
            device.forget(graph);
        }
    }
}
