//! Checks a cut that an operator wrote.

use super::{Placement, PlacementError, Replica, drafter_from};
use model::costs::ModelCosts;
use std::ops::Range;

/// Why an operator's cut is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExplicitError {
    #[error("there is no worker {0}")]
    UnknownWorker(String),
    /// A worker has two stages.
    #[error("worker {0} has two ranges")]
    WorkerTwice(String),
    /// A range without layers.
    #[error("the range {start}..{end} of worker {worker} is empty")]
    Empty { worker: String, start: usize, end: usize },
    /// A range does not begin where the one before it ends.
    #[error("the layers of worker {worker} begin with {found}, expected {expected}")]
    Gap {
        worker: String,
        /// The next layer to be placed.
        expected: usize,
        found: usize,
    },
    /// The last range does not end with the model.
    #[error("the last range ends at layer {end}, but the model has {layers} layers")]
    End {
        /// The layer after the last range.
        end: usize,
        layers: usize,
    },
    /// The cut separates a layer from the one whose KV it reads.
    #[error(
        "a stage cannot begin with layer {at}: {}; {}",
        drafter_from.map_or_else(
            || "a later layer reads keys and values of an earlier one".to_owned(),
            |layer| format!("the drafter reads the caches of layer {layer}, and the last stage must have all from there on"),
        ),
        allowed(cuts)
    )]
    Cut {
        at: usize,
        /// The first layer whose caches the drafter reads, if it lies before the cut.
        drafter_from: Option<usize>,
        cuts: Vec<usize>,
    },
    /// A range exceeds its worker's memory.
    #[error(
        "worker {worker} needs {needed} bytes for layers {start}..{end} and has {memory}{}",
        match drafter { 0 => String::new(), bytes => format!("; the drafter takes {bytes} of these") }
    )]
    Memory {
        worker: String,
        start: usize,
        end: usize,
        /// Bytes that the range needs.
        needed: u64,
        /// Bytes that the worker has.
        memory: u64,
        /// Bytes of the drafter's weights and caches in the range.
        drafter: u64,
    },
}

fn allowed(cuts: &[usize]) -> String {
    match cuts {
        [] => "the model cannot be cut".to_owned(),
        cuts => {
            format!("it may with one of {}", cuts.iter().map(usize::to_string).collect::<Vec<_>>().join(", "))
        }
    }
}

/// Checks the parts of an operator's cut that depend on the model alone: every layer once, no cut between a
/// layer and the KV it reads, no worker twice.
pub fn check_ranges(model: &ModelCosts, ranges: &[(String, Range<usize>)]) -> Result<(), ExplicitError> {
    let (layers, cuts) = (model.layers(), model.cuts());
    let mut next = 0;
    for (at, (name, range)) in ranges.iter().enumerate() {
        let (worker, start, end) = (name.clone(), range.start, range.end);
        if ranges.iter().take(at).any(|(earlier, _)| earlier == name) {
            return Err(ExplicitError::WorkerTwice(worker));
        }
        if range.is_empty() {
            return Err(ExplicitError::Empty { worker, start, end });
        }
        if start != next {
            return Err(ExplicitError::Gap { worker, expected: next, found: start });
        }
        if end > layers {
            return Err(ExplicitError::End { end, layers });
        }
        if start > 0 && !cuts.contains(&start) {
            let drafter_from = drafter_from(model).filter(|from| start > *from);
            return Err(ExplicitError::Cut { at: start, drafter_from, cuts: cuts.to_vec() });
        }
        next = end;
    }
    if next == layers { Ok(()) } else { Err(ExplicitError::End { end: next, layers }) }
}

impl Placement<'_> {
    /// The replica that an operator defines: workers by name with their layers, in order. It is checked, not
    /// optimized: every layer once, no cut between a layer and the KV it reads, no worker beyond its memory.
    pub fn explicit(&self, ranges: &[(String, Range<usize>)]) -> Result<Replica, PlacementError> {
        self.check_workers()?;
        let worker = |(name, range): &(String, Range<usize>)| {
            let worker = self.workers.iter().position(|worker| worker.name == *name);
            let worker = worker.ok_or_else(|| ExplicitError::UnknownWorker(name.clone()))?;
            Ok((worker, range.clone()))
        };
        let placed: Result<Vec<(usize, Range<usize>)>, ExplicitError> = ranges.iter().map(worker).collect();
        let placed = placed?;
        check_ranges(self.model, ranges)?;
        let mut stages = Vec::with_capacity(placed.len());
        for (worker, range) in placed {
            let stage = self.stage(worker, range.clone(), &self.model.range(range.clone()));
            let (needed, memory) = (stage.needs.total, self.workers[worker].memory);
            if needed > memory {
                let worker = self.workers[worker].name.clone();
                let Range { start, end } = range;
                let drafter = stage.needs.drafter();
                return Err(ExplicitError::Memory { worker, start, end, needed, memory, drafter }.into());
            }
            stages.push(stage);
        }
        Ok(Replica { stages })
    }
}
