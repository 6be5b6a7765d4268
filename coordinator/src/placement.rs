//! Which worker computes which layers: a model cut into contiguous ranges, each within its worker's memory, so that
//! the slowest stage takes as little time as can be.
//!
//! Pure: what the model costs and what the workers offer come in, plans or a refusal with its numbers go out. The
//! formulas and where they come from are in docs/placement.md.

mod explicit;
mod search;
#[cfg(test)]
mod tests;

pub use explicit::{ExplicitError, check_ranges};

use model::GgmlType;
use model::costs::{DrafterStage, ModelCosts, RangeCosts};
use std::ops::Range;

/// Prompt rows of one step, for which weights are read once.
const CHUNK_ROWS: u64 = 512;
/// Slots of recurrent state that a sequence needs to advance: one is read, another written.
const STATE_SLOTS: u64 = 2;
/// Bytes of an element of recurrent state.
const STATE_ELEMENT: u64 = 4;

/// A worker as placement sees it.
#[derive(Debug, Clone, PartialEq)]
pub struct Worker {
    pub name: String,
    /// Bytes that it can give to weights and caches.
    pub memory: u64,
    /// Bytes per second that its decode steps read.
    pub bandwidth: f64,
    /// Multiply-adds per second that its prefill steps do.
    pub compute: f64,
}

/// What a replica is to be good for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Workload {
    /// Tokens of the longest sequence; the caches of [`sequences`](Self::sequences) of them must fit.
    pub context: u64,
    /// How many sequences of that length are held at once.
    pub sequences: u64,
    /// Element type of keys and values.
    pub kv_type: GgmlType,
    /// Prompt tokens of a typical request.
    pub prompt: u64,
    /// Tokens that a typical request generates.
    pub output: u64,
}

impl Workload {
    /// One sequence of `context` tokens with keys and values in f16; requests of eight prompt tokens for one that
    /// is generated, 1,152 in all or as many as the context has.
    pub fn of_context(context: u64) -> Self {
        let total = context.clamp(2, 1152);
        let output = (total / 9).max(1);
        Self { context, sequences: 1, kv_type: GgmlType::F16, prompt: total - output, output }
    }
}

/// One worker's part of a replica.
#[derive(Debug, Clone, PartialEq)]
pub struct Stage {
    /// Index of the worker in the list that was given.
    pub worker: usize,
    pub layers: Range<usize>,
    /// Bytes that it takes there.
    pub needs: StageBytes,
    /// Seconds that it takes.
    pub times: Times,
}

/// Bytes that a stage takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StageBytes {
    pub weights: u64,
    /// Keys and values of the workload's sequences.
    pub kv: u64,
    /// Recurrent states of the workload's sequences.
    pub states: u64,
    /// What of the weights is there for the drafter alone; 0 where none guesses at the stage.
    pub drafter_weights: u64,
    /// What of keys, values and states the drafter keeps.
    pub drafter_caches: u64,
    /// All of these, with what a worker keeps besides: weights laid out for its instructions take up to a tenth
    /// more, and of a worker's memory a tenth stays for activations, queues and tables.
    pub total: u64,
}

/// Seconds that a stage takes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Times {
    /// For one prompt row in the middle of the workload's prompt.
    pub prefill_row: f64,
    /// For one step that decodes one sequence, in the middle of the workload's output.
    pub decode_step: f64,
    /// For a typical request: all rows of the prompt and all steps of the output. What cuts are balanced by.
    pub request: f64,
}

/// One replica: stages in the order of their layers.
#[derive(Debug, Clone, PartialEq)]
pub struct Replica {
    /// At least one; together they hold every layer once.
    pub stages: Vec<Stage>,
}

impl Replica {
    /// Prompt tokens per second while chunks keep all stages busy.
    pub fn prefill_rate(&self) -> f64 {
        1.0 / self.slowest(|times| times.prefill_row)
    }

    /// Tokens per second of one sequence, which every stage works on in turn. What stages send each other is not
    /// counted.
    pub fn decode_rate(&self) -> f64 {
        1.0 / self.stages.iter().map(|stage| stage.times.decode_step).sum::<f64>()
    }

    /// Tokens per second of as many sequences as there are stages, one in each.
    pub fn pipelined_decode_rate(&self) -> f64 {
        1.0 / self.slowest(|times| times.decode_step)
    }

    fn slowest(&self, time: impl Fn(&Times) -> f64) -> f64 {
        self.stages.iter().map(|stage| time(&stage.times)).fold(0.0, f64::max)
    }
}

/// Why a model is not placed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum PlacementError {
    /// Nobody to place it on.
    #[error("there is no worker to place the model on")]
    NoWorkers,
    /// A worker's memory or speed is no number that can be reckoned with.
    #[error("worker {worker}: {field} must be above zero")]
    WorkerSpeed { worker: String, field: &'static str },
    /// The model has too few places to cut it.
    #[error(
        "the model cannot be cut into {wanted} shards: {most} is the most (it has {layers} layers{shared}{drafter})",
        shared = if *most < *layers && drafter_from.is_none() {
            ", and a layer that shares keys and values stays with their source"
        } else {
            ""
        },
        drafter = of_drafter(*drafter_from)
    )]
    Shards {
        wanted: usize,
        /// The most that are possible.
        most: usize,
        layers: usize,
        /// The first layer whose caches the drafter reads, if that rules out cuts.
        drafter_from: Option<usize>,
    },
    #[error("{wanted} shards need as many workers, and there are {workers}")]
    Workers { wanted: usize, workers: usize },
    /// No cut fits; the numbers are those of the cut that comes nearest.
    #[error(
        "the model does not fit: cut into {shards} it needs {needed} bytes with a context of {context}, {missing} \
         more than the workers have where they are needed (worker {worker} needs {worker_needs} and has \
         {worker_has}){drafter}",
        drafter = match drafter_bytes {
            0 => String::new(),
            bytes => format!("; the drafter takes {bytes} of what worker {drafter_worker} needs"),
        }
    )]
    DoesNotFit {
        /// Stages of the nearest cut.
        shards: usize,
        /// Bytes that its stages need.
        needed: u64,
        /// Bytes by which they exceed their workers' memory, in sum.
        missing: u64,
        /// Context in tokens.
        context: u64,
        /// The worker that lacks most.
        worker: String,
        /// Bytes that its stage needs.
        worker_needs: u64,
        /// Bytes that it has.
        worker_has: u64,
        /// Bytes of the drafter's weights and caches; 0 without one.
        drafter_bytes: u64,
        /// The worker of the stage where it would guess.
        drafter_worker: String,
    },
    /// Some replicas can be had, not all.
    #[error("{made} of {wanted} replicas can be placed; for the next: {reason}")]
    Replicas { wanted: usize, made: usize, reason: Box<Self> },
    /// A plan that an operator wrote is no plan for this model.
    #[error("the plan of layers is refused: {0}")]
    Explicit(#[from] ExplicitError),
}

/// A model, what it is for, and the workers it may be placed on.
#[derive(Debug, Clone, Copy)]
pub struct Placement<'a> {
    pub model: &'a ModelCosts,
    /// What it is to be good for.
    pub workload: Workload,
    pub workers: &'a [Worker],
}

/// The most stages that a model can be cut into, workers or none.
pub fn most_shards(model: &ModelCosts) -> usize {
    model.cuts().len() + 1
}

/// Refuses a number of stages that the model cannot be cut into.
pub fn check_shards(model: &ModelCosts, wanted: usize) -> Result<(), PlacementError> {
    let most = most_shards(model);
    match (1..=most).contains(&wanted) {
        true => Ok(()),
        false => {
            let (layers, drafter_from) = (model.layers(), drafter_from(model));
            Err(PlacementError::Shards { wanted, most, layers, drafter_from })
        }
    }
}

/// The first layer whose caches a drafter beside the model reads, if it reads any.
fn drafter_from(model: &ModelCosts) -> Option<usize> {
    match model.drafter()?.stage {
        DrafterStage::Last { from_layer } if from_layer < model.layers() => Some(from_layer),
        DrafterStage::First | DrafterStage::Last { .. } => None,
    }
}

/// Why a drafter rules out cuts, behind a refusal.
fn of_drafter(from: Option<usize>) -> String {
    from.map_or_else(String::new, |layer| {
        format!(
            "; the drafter reads the caches of layer {layer}, and the last stage must have all from there on"
        )
    })
}

/// Bytes that a stage's weights take, laid out for its instructions.
pub(crate) fn stage_weights(costs: &RangeCosts) -> u64 {
    costs.weight_bytes.saturating_add(costs.weight_bytes / 10)
}

/// Bytes that one sequence of `context` tokens takes in a stage's caches, keys and values in f16.
pub(crate) fn stage_cache(costs: &RangeCosts, context: u64) -> u64 {
    let elements = costs.state_elements.saturating_add(costs.drafter_state_elements);
    let states = elements.saturating_mul(STATE_ELEMENT * STATE_SLOTS);
    costs.kv_bytes(context, CHUNK_ROWS, GgmlType::F16).saturating_add(states)
}

/// Bytes of these that a model which drafts keeps in an arena of its own. What other drafters keep is in the stage's.
pub(crate) fn beside_cache(model: &ModelCosts, costs: &RangeCosts, context: u64) -> u64 {
    match model.drafter().map(|drafter| drafter.stage) {
        Some(DrafterStage::First) => costs.drafter_kv_bytes(context, CHUNK_ROWS, GgmlType::F16),
        Some(DrafterStage::Last { .. }) | None => 0,
    }
}

impl Placement<'_> {
    /// Cuts the model `replicas` times, each time into `shards` stages or, where none is given, into the fewest that
    /// fit, since every further stage is a hop for each token. No worker serves two stages.
    ///
    /// Of all cuts and all ways to give stages to workers, a replica is one whose slowest stage takes the least time
    /// for a typical request, and among those one whose squared times sum to the least, so that the other stages are
    /// even too. Replicas are cut one after the other, each from the workers that are left. Where more than 512 choices
    /// of workers differ, only the 24 fastest workers (more for more shards) are looked at, in the order of their speed:
    /// they may be left out and not exchanged.
    pub fn place(&self, shards: Option<usize>, replicas: usize) -> Result<Vec<Replica>, PlacementError> {
        shards.map_or(Ok(()), |wanted| check_shards(self.model, wanted))?;
        self.check_workers()?;
        let mut free: Vec<usize> = (0..self.workers.len()).collect();
        let mut placed = Vec::new();
        while placed.len() < replicas {
            let replica = self.place_one(shards, &free).map_err(|reason| match placed.len() {
                0 if replicas == 1 => reason,
                made => PlacementError::Replicas { wanted: replicas, made, reason: Box::new(reason) },
            })?;
            free.retain(|worker| replica.stages.iter().all(|stage| stage.worker != *worker));
            placed.push(replica);
        }
        Ok(placed)
    }

    fn check_workers(&self) -> Result<(), PlacementError> {
        for worker in self.workers {
            for (field, value) in [("bandwidth", worker.bandwidth), ("compute", worker.compute)] {
                if !(value > 0.0 && value.is_finite()) {
                    return Err(PlacementError::WorkerSpeed { worker: worker.name.clone(), field });
                }
            }
        }
        Ok(())
    }

    fn place_one(&self, shards: Option<usize>, free: &[usize]) -> Result<Replica, PlacementError> {
        if free.is_empty() {
            return Err(PlacementError::NoWorkers);
        }
        let counts = match shards {
            Some(wanted) if wanted > free.len() => {
                return Err(PlacementError::Workers { wanted, workers: free.len() });
            }
            Some(wanted) => wanted..=wanted,
            None => 1..=most_shards(self.model).min(free.len()),
        };
        let search = search::Search::new(self, free, shards.unwrap_or(0));
        if let Some(replica) = counts.clone().find_map(|count| search.fastest(count)) {
            return Ok(replica);
        }
        let missing = |replica: &Replica| -> u64 {
            replica.stages.iter().map(|stage| stage.needs.missing(&self.workers[stage.worker])).sum()
        };
        let nearest = counts.filter_map(|count| search.nearest(count)).min_by_key(missing);
        let Some((nearest, worst)) = nearest.and_then(|nearest| {
            let lacks = |stage: &&Stage| stage.needs.missing(&self.workers[stage.worker]);
            let worst = nearest.stages.iter().max_by_key(lacks)?.clone();
            Some((nearest, worst))
        }) else {
            return Err(PlacementError::NoWorkers);
        };
        let drafting = nearest.stages.iter().find(|stage| stage.needs.drafter() > 0);
        Err(PlacementError::DoesNotFit {
            shards: nearest.stages.len(),
            needed: nearest.stages.iter().map(|stage| stage.needs.total).sum(),
            missing: missing(&nearest),
            context: self.workload.context,
            worker: self.workers[worst.worker].name.clone(),
            worker_needs: worst.needs.total,
            worker_has: self.workers[worst.worker].memory,
            drafter_bytes: drafting.map_or(0, |stage| stage.needs.drafter()),
            drafter_worker: drafting
                .map_or_else(String::new, |stage| self.workers[stage.worker].name.clone()),
        })
    }

    /// The stage that `worker` is when it computes `layers`.
    fn stage(&self, worker: usize, layers: Range<usize>, costs: &RangeCosts) -> Stage {
        let times = self.times(&self.workers[worker], costs);
        Stage { worker, layers, needs: self.needs(costs), times }
    }

    fn needs(&self, costs: &RangeCosts) -> StageBytes {
        let Workload { context, sequences, kv_type, .. } = self.workload;
        let weights = costs.weight_bytes;
        let held_weights = stage_weights(costs);
        let kv = costs.kv_bytes(context, CHUNK_ROWS, kv_type).saturating_mul(sequences);
        let slots = STATE_SLOTS.saturating_mul(sequences);
        let of_states = |elements: u64| elements.saturating_mul(STATE_ELEMENT).saturating_mul(slots);
        let drafter_states = of_states(costs.drafter_state_elements);
        let states = of_states(costs.state_elements).saturating_add(drafter_states);
        let held = held_weights.saturating_add(kv).saturating_add(states);
        let drafter_kv = costs.drafter_kv_bytes(context, CHUNK_ROWS, kv_type).saturating_mul(sequences);
        StageBytes {
            weights,
            kv,
            states,
            drafter_weights: costs.drafter_weight_bytes,
            drafter_caches: drafter_kv.saturating_add(drafter_states),
            total: held.saturating_add(held.div_ceil(9)),
        }
    }

    fn times(&self, worker: &Worker, costs: &RangeCosts) -> Times {
        let Workload { prompt, output, kv_type, .. } = self.workload;
        let product_time = |products: u64| products as f64 / worker.compute;
        let read_time = |bytes: u64| bytes as f64 / worker.bandwidth;

        let prefill_products = costs.row_products + costs.mixing_products(prompt / 2);
        let rows = CHUNK_ROWS.min(prompt).max(1) as f64;
        let prefill_row = product_time(prefill_products).max(read_time(costs.layer_bytes) / rows);

        let depth = prompt + output / 2;
        let decode_products = costs.row_products + costs.head_products + costs.mixing_products(depth);
        let state_bytes = 2 * STATE_ELEMENT * costs.state_elements;
        let decode_bytes = costs.token_bytes + costs.kv_token_bytes(depth, kv_type) + state_bytes;
        let decode_step = product_time(decode_products).max(read_time(decode_bytes));

        let request = prompt as f64 * prefill_row + output as f64 * decode_step;
        Times { prefill_row, decode_step, request }
    }
}

impl StageBytes {
    /// What the drafter takes of it.
    pub fn drafter(&self) -> u64 {
        self.drafter_weights.saturating_add(self.drafter_caches)
    }

    fn missing(&self, worker: &Worker) -> u64 {
        self.total.saturating_sub(worker.memory)
    }
}
