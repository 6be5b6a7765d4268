//! A cut that an operator wrote, checked.

use super::{Placement, PlacementError, Replica};
use std::ops::Range;

/// What is wrong with an operator's cut.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExplicitError {
    /// No such worker.
    #[error("there is no worker {0}")]
    UnknownWorker(String),
    /// Two stages on one worker.
    #[error("worker {0} has two ranges")]
    WorkerTwice(String),
    /// A range that holds no layer.
    #[error("the range {start}..{end} of worker {worker} is empty")]
    Empty {
        /// The worker.
        worker: String,
        /// First layer.
        start: usize,
        /// Layer behind the last.
        end: usize,
    },
    /// A range does not begin where the one before ends.
    #[error("the layers of worker {worker} begin with {found}, and {expected} is the next to be placed")]
    Gap {
        /// The worker.
        worker: String,
        /// Layer that is to come.
        expected: usize,
        /// Layer found.
        found: usize,
    },
    /// The last range does not end with the model.
    #[error("the last range ends before layer {end}, and the model has {layers} layers")]
    End {
        /// Layer behind the last range.
        end: usize,
        /// Layers of the model.
        layers: usize,
    },
    /// A layer would be parted from the one whose keys and values it reads.
    #[error(
        "no stage may begin with layer {at}: a later layer reads keys and values of an earlier one; {}",
        allowed(cuts)
    )]
    Cut {
        /// Where the plan cuts.
        at: usize,
        /// Where it may.
        cuts: Vec<usize>,
    },
    /// A range does not fit.
    #[error("worker {worker} needs {needed} bytes for layers {start}..{end} and has {memory}")]
    Memory {
        /// The worker.
        worker: String,
        /// First layer.
        start: usize,
        /// Layer behind the last.
        end: usize,
        /// Bytes that the range needs.
        needed: u64,
        /// Bytes that the worker has.
        memory: u64,
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

impl Placement<'_> {
    /// The replica that an operator asks for: workers by name with their layers, in order. It is not improved, only
    /// checked: every layer once, no cut between a layer and its keys, no worker beyond its memory.
    pub fn explicit(&self, ranges: &[(String, Range<usize>)]) -> Result<Replica, PlacementError> {
        self.check_workers()?;
        let layers = self.model.layers();
        let mut stages = Vec::with_capacity(ranges.len());
        let mut next = 0;
        for (name, range) in ranges {
            let Some(worker) = self.workers.iter().position(|worker| worker.name == *name) else {
                return Err(ExplicitError::UnknownWorker(name.clone()).into());
            };
            let (name, start, end) = (name.clone(), range.start, range.end);
            if stages.iter().any(|stage: &super::Stage| stage.worker == worker) {
                return Err(ExplicitError::WorkerTwice(name).into());
            }
            if range.is_empty() {
                return Err(ExplicitError::Empty { worker: name, start, end }.into());
            }
            if start != next {
                return Err(ExplicitError::Gap { worker: name, expected: next, found: start }.into());
            }
            if end > layers {
                return Err(ExplicitError::End { end, layers }.into());
            }
            let cuts = self.model.cuts();
            if start > 0 && !cuts.contains(&start) {
                return Err(ExplicitError::Cut { at: start, cuts: cuts.to_vec() }.into());
            }
            let stage = self.stage(worker, range.clone(), &self.model.range(range.clone()));
            let (needed, memory) = (stage.needs.total, self.workers[worker].memory);
            if needed > memory {
                return Err(ExplicitError::Memory { worker: name, start, end, needed, memory }.into());
            }
            stages.push(stage);
            next = end;
        }
        match next == layers {
            true => Ok(Replica { stages }),
            false => Err(ExplicitError::End { end: next, layers }.into()),
        }
    }
}
