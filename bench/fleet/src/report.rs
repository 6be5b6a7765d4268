//! JSON lines: a simulated run, and its difference from a real one.

use crate::simulation::Outcome;
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

#[derive(Debug, Serialize)]
pub(crate) struct Row {
    router: &'static str,
    policy: &'static str,
    prompt: &'static str,
    workers: usize,
    load: f64,
    questions: usize,
    prompt_tokens: u64,
    hit_ratio: f64,
    computed: u64,
    /// Ideal prefill: tokens that one unbounded cache would compute.
    floor: u64,
    load_cov: f64,
    seconds: f64,
    ttft_p50: f64,
    ttft_p99: f64,
    mispredicted: usize,
    pulls: usize,
    reasons: BTreeMap<&'static str, usize>,
}

impl Row {
    /// Results of a run of `questions` questions.
    pub(crate) fn new(
        names: [&'static str; 3],
        workers: usize,
        load: f64,
        questions: usize,
        ideal_prefill: u64,
        outcome: &Outcome,
    ) -> Self {
        let [router, policy, prompt] = names;
        Self {
            router,
            policy,
            prompt,
            workers,
            load,
            questions,
            prompt_tokens: outcome.prompt_tokens,
            hit_ratio: hit_ratio(outcome),
            computed: outcome.total(),
            floor: ideal_prefill,
            load_cov: rounded(outcome.load_cov(), 4),
            seconds: rounded(outcome.seconds, 2),
            ttft_p50: rounded(outcome.ttft(0.5), 3),
            ttft_p99: rounded(outcome.ttft(0.99), 3),
            mispredicted: outcome.mispredicted,
            pulls: outcome.pulls,
            reasons: outcome.reasons.iter().copied().collect(),
        }
    }

    /// Prints one line.
    pub(crate) fn print(&self) -> Result<()> {
        println!("{}", serde_json::to_string(self)?);
        Ok(())
    }
}

/// A real run, as written by `bench/rag/replay.py`.
#[derive(Debug, Deserialize)]
pub(crate) struct Against {
    router: String,
    policy: String,
    prompt: String,
    hit_ratio: f64,
    computed: u64,
    load_cov: f64,
    seconds: f64,
    ttft_p50: f64,
    ttft_p99: f64,
    pub(crate) workers: usize,
    /// Bytes of KV per worker.
    pub(crate) kv_bytes: u64,
    pub(crate) questions: usize,
    /// Number of clients.
    pub(crate) concurrency: usize,
    /// Tokens per answer.
    pub(crate) out: u32,
}

/// Real and simulated values, and the relative error of the simulation: 0.1 is 10% too high.
#[derive(Debug, Serialize)]
pub(crate) struct Comparison<'a> {
    router: &'a str,
    policy: &'a str,
    prompt: &'a str,
    computed: [f64; 3],
    /// Ideal prefill: tokens that one unbounded cache would compute.
    floor: u64,
    pulls: usize,
    mispredicted: usize,
    seconds: [f64; 3],
    ttft_p50: [f64; 3],
    ttft_p99: [f64; 3],
    /// Real and simulated.
    hit_ratio: [f64; 2],
    /// Real and simulated.
    load_cov: [f64; 2],
}

impl Against {
    /// Reads all runs of a file.
    pub(crate) fn read(path: &Path) -> Result<Vec<Self>> {
        let text = std::fs::read_to_string(path).with_context(|| format!("{}", path.display()))?;
        text.lines().map(|line| Ok(serde_json::from_str(line)?)).collect()
    }

    /// Router, policy and form of the prompt.
    pub(crate) fn names(&self) -> [&str; 3] {
        [&self.router, &self.policy, &self.prompt]
    }

    /// Compares the run with a simulation.
    pub(crate) fn compare(&self, ideal_prefill: u64, outcome: &Outcome) -> Comparison<'_> {
        let error =
            |real: f64, simulated: f64| [real, rounded(simulated, 3), rounded(simulated / real - 1.0, 4)];
        Comparison {
            router: &self.router,
            policy: &self.policy,
            prompt: &self.prompt,
            computed: error(self.computed as f64, outcome.total() as f64),
            floor: ideal_prefill,
            pulls: outcome.pulls,
            mispredicted: outcome.mispredicted,
            seconds: error(self.seconds, outcome.seconds),
            ttft_p50: error(self.ttft_p50, outcome.ttft(0.5)),
            ttft_p99: error(self.ttft_p99, outcome.ttft(0.99)),
            hit_ratio: [self.hit_ratio, hit_ratio(outcome)],
            load_cov: [self.load_cov, rounded(outcome.load_cov(), 4)],
        }
    }
}

impl Comparison<'_> {
    /// Prints one line.
    pub(crate) fn print(&self) -> Result<()> {
        println!("{}", serde_json::to_string(self)?);
        Ok(())
    }
}

fn hit_ratio(outcome: &Outcome) -> f64 {
    rounded(outcome.cached as f64 / outcome.prompt_tokens.max(1) as f64, 4)
}

fn rounded(value: f64, digits: i32) -> f64 {
    let scale = 10f64.powi(digits);
    (value * scale).round() / scale
}
