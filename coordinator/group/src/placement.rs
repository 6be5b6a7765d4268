//! Placement: cuts a model into contiguous layer ranges and assigns each to a worker with enough memory, so
//! that the slowest stage takes as little time as possible.
//!
//! A pure function: model costs and worker capacities in, plans or an error with the numbers out.
//! docs/placement.md has the formulas and their derivation.

mod explicit;
mod search;
#[cfg(test)]
mod tests;

pub use explicit::{ExplicitError, check_ranges};

use model::costs::{DrafterStage, KvSize, ModelCosts, RangeCosts};
use std::ops::Range;

/// Prompt rows of one step; the weights are read once per step.
const CHUNK_ROWS: u64 = 512;
/// Recurrent-state slots per sequence: one is read while another is written.
const STATE_SLOTS: u64 = 2;
/// Bytes of a recurrent-state element.
const STATE_ELEMENT: u64 = 4;

/// A worker's capacity.
#[derive(Debug, Clone, PartialEq)]
pub struct Worker {
    pub name: String,
    /// Bytes available for weights and caches.
    pub memory: u64,
    /// Memory bandwidth of decode steps, in bytes per second.
    pub bandwidth: f64,
    /// Prefill throughput in multiply-adds per second.
    pub compute: f64,
}

/// The load that a replica is planned for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Workload {
    /// Length of the longest sequence in tokens. The caches must hold [`sequences`](Self::sequences) of
    /// these.
    pub context: u64,
    /// Number of concurrent sequences of that length.
    pub sequences: u64,
    /// Element type of keys and values.
    pub kv_size: KvSize,
    /// Prompt tokens of a typical request.
    pub prompt: u64,
    /// Generated tokens of a typical request.
    pub output: u64,
}

impl Workload {
    /// One sequence of `context` tokens with an f16 KV cache. Typical requests have 1,152 tokens in total, at
    /// most `context`, with eight prompt tokens per generated one.
    pub fn of_context(context: u64) -> Self {
        let total = context.clamp(2, 1152);
        let output = (total / 9).max(1);
        Self { context, sequences: 1, kv_size: KvSize::F16, prompt: total - output, output }
    }
}

/// One worker's stage of a replica.
#[derive(Debug, Clone, PartialEq)]
pub struct Stage {
    /// Index of the worker in [`Placement::workers`].
    pub worker: usize,
    pub layers: Range<usize>,
    pub needs: StageBytes,
    pub times: Times,
}

/// Memory of a stage, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StageBytes {
    pub weights: u64,
    /// KV of the workload's sequences.
    pub kv: u64,
    /// Recurrent states of the workload's sequences.
    pub states: u64,
    /// Weights that only the drafter needs; 0 without a drafter at this stage.
    pub drafter_weights: u64,
    /// The drafter's share of `kv` and `states`.
    pub drafter_caches: u64,
    /// Total including reserves: up to a tenth more for repacked weights, and a tenth of the worker's memory
    /// for activations, queues and tables.
    pub total: u64,
}

/// Durations of a stage, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Times {
    /// One prompt row, in the middle of the workload's prompt.
    pub prefill_row: f64,
    /// One decode step of one sequence, in the middle of the workload's output.
    pub decode_step: f64,
    /// A typical request: all rows of the prompt and all steps of the output. Cuts are balanced by this.
    pub request: f64,
}

/// One replica: stages in layer order.
#[derive(Debug, Clone, PartialEq)]
pub struct Replica {
    /// At least one stage. Together the stages hold every layer once.
    pub stages: Vec<Stage>,
}

impl Replica {
    /// Prompt tokens per second while chunks keep all stages busy.
    pub fn prefill_rate(&self) -> f64 {
        1.0 / self.slowest(|times| times.prefill_row)
    }

    /// Tokens per second of one sequence, which passes through all stages in turn. Transfers between stages
    /// are not counted.
    pub fn decode_rate(&self) -> f64 {
        1.0 / self.stages.iter().map(|stage| stage.times.decode_step).sum::<f64>()
    }

    /// Tokens per second of one sequence per stage, all running at once.
    pub fn pipelined_decode_rate(&self) -> f64 {
        1.0 / self.slowest(|times| times.decode_step)
    }

    fn slowest(&self, time: impl Fn(&Times) -> f64) -> f64 {
        self.stages.iter().map(|stage| time(&stage.times)).fold(0.0, f64::max)
    }
}

/// Why a model cannot be placed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum PlacementError {
    #[error("there is no worker to place the model on")]
    NoWorkers,
    /// A worker's bandwidth or compute is not a positive finite number.
    #[error("worker {worker}: {field} must be above zero")]
    WorkerSpeed { worker: String, field: &'static str },
    /// The model cannot be cut into this many stages.
    #[error(
        "the model cannot be cut into {requested} shards, at most {max} \
         (it has {layers} layers{shared}{drafter})",
        shared = if *max < *layers && drafter_from.is_none() {
            ", and a layer that shares keys and values stays with their source"
        } else {
            ""
        },
        drafter = of_drafter(*drafter_from)
    )]
    Shards {
        requested: usize,
        /// Maximum number of stages.
        max: usize,
        layers: usize,
        /// The first layer whose caches the drafter reads, if that rules out cuts.
        drafter_from: Option<usize>,
    },
    #[error("{requested} shards need {requested} workers, but there are {workers}")]
    Workers { requested: usize, workers: usize },
    /// No cut fits. The numbers are those of the nearest cut.
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
        /// Bytes that all its stages need.
        needed: u64,
        /// Bytes by which its stages exceed their workers' memory, in total.
        missing: u64,
        /// Context in tokens.
        context: u64,
        /// The worker that lacks the most memory.
        worker: String,
        /// Bytes that its stage needs.
        worker_needs: u64,
        /// Bytes that it has.
        worker_has: u64,
        /// Bytes of the drafter's weights and caches; 0 without a drafter.
        drafter_bytes: u64,
        /// The worker of the drafter's stage; empty without a drafter.
        drafter_worker: String,
    },
    /// Only some of the replicas can be placed.
    #[error("only {made} of {requested} replicas can be placed; the next one: {reason}")]
    Replicas { requested: usize, made: usize, reason: Box<Self> },
    /// An operator's plan does not suit the model.
    #[error("the plan of layers is refused: {0}")]
    Explicit(#[from] ExplicitError),
}

/// The inputs of a placement.
#[derive(Debug, Clone, Copy)]
pub struct Placement<'a> {
    pub model: &'a ModelCosts,
    pub workload: Workload,
    pub workers: &'a [Worker],
}

/// Maximum number of stages of a model, whatever the workers.
pub fn max_shards(model: &ModelCosts) -> usize {
    model.cuts().len() + 1
}

/// Checks that the model can be cut into this number of stages.
pub fn check_shards(model: &ModelCosts, requested: usize) -> Result<(), PlacementError> {
    let max = max_shards(model);
    match (1..=max).contains(&requested) {
        true => Ok(()),
        false => {
            let (layers, drafter_from) = (model.layers(), drafter_from(model));
            Err(PlacementError::Shards { requested, max, layers, drafter_from })
        }
    }
}

/// The first layer whose caches the model's drafter reads, if it reads any.
fn drafter_from(model: &ModelCosts) -> Option<usize> {
    match model.drafter()?.stage {
        DrafterStage::Last { from_layer } if from_layer < model.layers() => Some(from_layer),
        DrafterStage::First | DrafterStage::Last { .. } => None,
    }
}

/// The part of an error message that explains how a drafter rules out cuts.
fn of_drafter(from: Option<usize>) -> String {
    from.map_or_else(String::new, |layer| {
        format!(
            "; the drafter reads the caches of layer {layer}, and the last stage must have all from there on"
        )
    })
}

/// Bytes of a stage's weights after repacking.
pub(crate) fn stage_weights(costs: &RangeCosts) -> u64 {
    costs.weight_bytes.saturating_add(costs.weight_bytes / 10)
}

/// Cache bytes of one sequence of `context` tokens in a stage, with an f16 KV cache.
pub(crate) fn stage_cache(costs: &RangeCosts, context: u64) -> u64 {
    let elements = costs.state_elements.saturating_add(costs.drafter_state_elements);
    let states = elements.saturating_mul(STATE_ELEMENT * STATE_SLOTS);
    costs.kv_bytes(context, CHUNK_ROWS, KvSize::F16).saturating_add(states)
}

/// The part of [`stage_cache`] that a draft model keeps in an arena of its own. Other drafters use the
/// stage's arena.
pub(crate) fn draft_model_cache(model: &ModelCosts, costs: &RangeCosts, context: u64) -> u64 {
    match model.drafter().map(|drafter| drafter.stage) {
        Some(DrafterStage::First) => costs.drafter_kv_bytes(context, CHUNK_ROWS, KvSize::F16),
        Some(DrafterStage::Last { .. }) | None => 0,
    }
}

impl Placement<'_> {
    /// Cuts the model `replicas` times into `shards` stages. `None` uses the fewest stages that fit, since
    /// every stage adds a hop per token. No worker serves two stages.
    ///
    /// A replica minimizes the time of its slowest stage for a typical request over all cuts and assignments.
    /// Ties are broken by the sum of squared times, which balances the other stages. Replicas are cut one
    /// after the other, each from the remaining workers. With more than 512 distinct choices of workers, only
    /// the 24 fastest workers (or `shards`, if that is more) are considered, in order of speed: workers may
    /// be skipped but not reordered.
    pub fn place(&self, shards: Option<usize>, replicas: usize) -> Result<Vec<Replica>, PlacementError> {
        shards.map_or(Ok(()), |requested| check_shards(self.model, requested))?;
        self.check_workers()?;
        let mut free: Vec<usize> = (0..self.workers.len()).collect();
        let mut placed = Vec::new();
        while placed.len() < replicas {
            let replica = self.place_one(shards, &free).map_err(|reason| match placed.len() {
                0 if replicas == 1 => reason,
                made => PlacementError::Replicas { requested: replicas, made, reason: Box::new(reason) },
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
            Some(requested) if requested > free.len() => {
                return Err(PlacementError::Workers { requested, workers: free.len() });
            }
            Some(requested) => requested..=requested,
            None => 1..=max_shards(self.model).min(free.len()),
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

    /// The stage of `layers` on `worker`.
    fn stage(&self, worker: usize, layers: Range<usize>, costs: &RangeCosts) -> Stage {
        let times = self.times(&self.workers[worker], costs);
        Stage { worker, layers, needs: self.needs(costs), times }
    }

    fn needs(&self, costs: &RangeCosts) -> StageBytes {
        let Workload { context, sequences, kv_size, .. } = self.workload;
        let weights = costs.weight_bytes;
        let held_weights = stage_weights(costs);
        let kv = costs.kv_bytes(context, CHUNK_ROWS, kv_size).saturating_mul(sequences);
        let slots = STATE_SLOTS.saturating_mul(sequences);
        let of_states = |elements: u64| elements.saturating_mul(STATE_ELEMENT).saturating_mul(slots);
        let drafter_states = of_states(costs.drafter_state_elements);
        let states = of_states(costs.state_elements).saturating_add(drafter_states);
        let held = held_weights.saturating_add(kv).saturating_add(states);
        let drafter_kv = costs.drafter_kv_bytes(context, CHUNK_ROWS, kv_size).saturating_mul(sequences);
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
        let Workload { prompt, output, kv_size, .. } = self.workload;
        let product_time = |products: u64| products as f64 / worker.compute;
        let read_time = |bytes: u64| bytes as f64 / worker.bandwidth;

        let prefill_products = costs.row_products + costs.mixing_products(prompt / 2);
        let rows = CHUNK_ROWS.min(prompt).max(1) as f64;
        let prefill_row = product_time(prefill_products).max(read_time(costs.layer_bytes) / rows);

        let depth = prompt + output / 2;
        let decode_products = costs.row_products + costs.head_products + costs.mixing_products(depth);
        let state_bytes = 2 * STATE_ELEMENT * costs.state_elements;
        let decode_bytes = costs.token_bytes + costs.kv_token_bytes(depth, kv_size) + state_bytes;
        let decode_step = product_time(decode_products).max(read_time(decode_bytes));

        let request = prompt as f64 * prefill_row + output as f64 * decode_step;
        Times { prefill_row, decode_step, request }
    }
}

impl StageBytes {
    /// Bytes of the drafter's weights and caches.
    pub fn drafter(&self) -> u64 {
        self.drafter_weights.saturating_add(self.drafter_caches)
    }

    fn missing(&self, worker: &Worker) -> u64 {
        self.total.saturating_sub(worker.memory)
    }
}
