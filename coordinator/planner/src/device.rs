//! The steps of a node's loaded models as a fluid: between two events each sequence advances at a constant rate.
//!
//! Models with running sequences share the device by their priorities. A model's step has one row of each sequence that
//! decodes, and up to [`CHUNK`] rows of the first prompt. It takes as long as its arithmetic or its reads, whichever is
//! longer (docs/placement.md).

use crate::fleet::{Costs, Node};
use std::collections::VecDeque;

/// Prompt rows of a step; the scheduler's default.
const CHUNK: f64 = 512.0;
/// Most sequences of a replica; the scheduler's default.
pub(crate) const MAX_SEQUENCES: usize = 64;
/// Tokens that count as none, for rounding errors.
const NOTHING: f64 = 1e-6;
/// Longest step of time, in seconds. Times are added without overflow.
const LONGEST: f64 = 1e12;

/// Microseconds since the beginning of the simulation.
pub(crate) type Micros = u64;

pub(crate) fn micros(seconds: f64) -> Micros {
    (seconds.clamp(0.0, LONGEST) * 1e6).ceil() as Micros
}

pub(crate) fn seconds(time: Micros) -> f64 {
    time as f64 / 1e6
}

/// A request at a replica.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sequence {
    pub(crate) request: usize,
    /// Prompt tokens to compute.
    pub(crate) prompt: f64,
    /// Tokens to generate.
    pub(crate) output: f64,
    /// Tokens that a prompt row reads on average, and a decoded row.
    pub(crate) depths: (f64, f64),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Progress {
    /// The first token of a request.
    Started(usize),
    Ended(usize),
}

/// Sequences of one model.
#[derive(Debug, Default)]
struct Batch {
    prompts: VecDeque<Sequence>,
    decoding: Vec<Sequence>,
}

#[derive(Debug)]
pub(crate) struct Device {
    compute: f64,
    bandwidth: f64,
    /// By model.
    batches: Vec<Batch>,
    /// Models with sequences.
    active: Vec<usize>,
    at: Micros,
    /// Time with sequences.
    pub(crate) busy: Micros,
}

/// A model's costs and its priority.
pub(crate) type Loads<'a> = &'a [(Costs, f64)];

impl Device {
    pub(crate) fn new(node: &Node, models: usize) -> Self {
        Self {
            compute: node.compute,
            bandwidth: node.bandwidth,
            batches: std::iter::repeat_with(Batch::default).take(models).collect(),
            active: Vec::new(),
            at: 0,
            busy: 0,
        }
    }

    pub(crate) fn running(&self, model: usize) -> usize {
        self.batches[model].prompts.len() + self.batches[model].decoding.len()
    }

    /// Seconds of prefill that are in hand for a model.
    pub(crate) fn backlog(&self, model: usize, loads: Loads<'_>) -> f64 {
        let rows: f64 = self.batches[model].prompts.iter().map(|sequence| sequence.prompt).sum();
        rows * loads[model].0.products / (self.compute * self.share(model, loads))
    }

    /// Adds a sequence. The device must have been advanced to the present.
    pub(crate) fn submit(&mut self, model: usize, sequence: Sequence) {
        self.batches[model].prompts.push_back(sequence);
        if !self.active.contains(&model) {
            self.active.push(model);
        }
    }

    /// Share of the device that a model has, or would have.
    fn share(&self, model: usize, loads: Loads<'_>) -> f64 {
        let others: f64 =
            self.active.iter().filter(|other| **other != model).map(|other| loads[*other].1).sum();
        loads[model].1 / (loads[model].1 + others)
    }

    /// Prompt rows per second of the first prompt, and tokens per second of each sequence that decodes.
    fn rates(&self, model: usize, loads: Loads<'_>) -> (f64, f64) {
        let (batch, costs) = (&self.batches[model], &loads[model].0);
        let decoded = batch.decoding.len() as f64;
        let depth: f64 = batch.decoding.iter().map(|sequence| sequence.depths.1).sum();
        let mut products = decoded * (costs.products + costs.head_products) + depth * costs.attention;
        let mut read = depth * costs.kv_bytes;
        let rows = match batch.prompts.front() {
            Some(first) => {
                products += CHUNK * (costs.products + first.depths.0 * costs.attention);
                read += costs.layer_bytes;
                CHUNK
            }
            None => {
                read += costs.token_bytes;
                0.0
            }
        };
        let step = (products / self.compute).max(read / self.bandwidth);
        let share = self.share(model, loads);
        (share * rows / step, share / step)
    }

    /// Advances all sequences to `now`. Returns the first tokens and ends until then.
    pub(crate) fn advance(&mut self, now: Micros, loads: Loads<'_>) -> Vec<(usize, Progress)> {
        let passed = seconds(now - self.at);
        let rates: Vec<(f64, f64)> = self.active.iter().map(|model| self.rates(*model, loads)).collect();
        if !self.active.is_empty() {
            self.busy += now - self.at;
        }
        self.at = now;
        let mut progress = Vec::new();
        for (model, (prefill, decode)) in self.active.iter().copied().zip(rates) {
            let Batch { prompts, decoding } = &mut self.batches[model];
            decoding.iter_mut().for_each(|sequence| sequence.output -= decode * passed);
            decoding.retain(|sequence| {
                let ended = sequence.output <= NOTHING;
                if ended {
                    progress.push((model, Progress::Ended(sequence.request)));
                }
                !ended
            });
            let Some(first) = prompts.front_mut() else { continue };
            first.prompt -= prefill * passed;
            if first.prompt > NOTHING {
                continue;
            }
            let Some(mut started) = prompts.pop_front() else { continue };
            progress.push((model, Progress::Started(started.request)));
            // The step with the last prompt row draws the first token.
            started.output -= 1.0;
            match started.output > NOTHING {
                true => decoding.push(started),
                false => progress.push((model, Progress::Ended(started.request))),
            }
        }
        let batches = &self.batches;
        self.active
            .retain(|model| !batches[*model].prompts.is_empty() || !batches[*model].decoding.is_empty());
        progress
    }

    /// The time of the next first token or end, if nothing else happens before.
    pub(crate) fn next(&self, loads: Loads<'_>) -> Option<Micros> {
        let next = |model: &usize| {
            let (prefill, decode) = self.rates(*model, loads);
            let Batch { prompts, decoding } = &self.batches[*model];
            let first = prompts.front().map_or(f64::INFINITY, |first| first.prompt / prefill);
            let least = decoding.iter().map(|sequence| sequence.output).fold(f64::INFINITY, f64::min);
            first.min(least / decode)
        };
        let after = self.active.iter().map(next).fold(f64::INFINITY, f64::min);
        after.is_finite().then(|| self.at.saturating_add(micros(after).max(1)))
    }
}
