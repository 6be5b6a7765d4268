//! Step times: a linear model fitted to measurements of `kvasir bench`.

use anyhow::{Context, Result, bail};
use engine::scheduler::StepPlan;
use serde::Deserialize;
use serde_json::Value;
use std::path::Path;

/// Prompt rows per step of the bench; its default.
const BENCH_CHUNK: f64 = 512.0;
/// Depth at which the bench decodes batches.
const BATCH_DEPTH: f64 = 128.0;
/// Steps that the bench decodes at that depth.
const BATCH_STEPS: f64 = 32.0;
/// Iterations of the fit; it converges much earlier.
const PASSES: usize = 100_000;

/// Seconds of a step: `step + rows * row + tokens attended to by prompt rows * prefill_attended + tokens
/// attended to by decoded rows * decode_attended`.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Rates {
    /// Seconds per step.
    pub(crate) step: f64,
    /// Seconds per row.
    pub(crate) row: f64,
    /// Seconds per token attended to by a prompt row.
    pub(crate) prefill_attended: f64,
    /// Seconds per token attended to by a decoded row.
    pub(crate) decode_attended: f64,
    /// Bytes of KV per token.
    pub(crate) kv_bytes_per_token: u64,
    /// Largest relative error of the model: 0.1 is 10%.
    pub(crate) worst_error: f64,
}

#[derive(Deserialize)]
struct Bench {
    rows: Vec<Row>,
}

#[derive(Deserialize)]
struct Row {
    test: String,
    tokens: f64,
    batch: f64,
    tps: f64,
    #[serde(default)]
    bytes_per_token: f64,
}

/// A measurement: coefficients of the four unknowns, and seconds.
type Equation = ([f64; 4], f64);

impl Rates {
    /// Reads the output of `kvasir bench --json`, or an array of several concurrent runs. `decoded` is its
    /// `-n`.
    pub(crate) fn read(path: &Path, decoded: f64) -> Result<Self> {
        let text = std::fs::read_to_string(path).with_context(|| format!("{}", path.display()))?;
        let value: Value = serde_json::from_str(&text)?;
        let benches: Vec<Bench> = if value.is_array() {
            serde_json::from_value(value)?
        } else {
            vec![serde_json::from_value(value)?]
        };
        let rows: Vec<Row> = benches.into_iter().flat_map(|bench| bench.rows).collect();
        let equations: Vec<Equation> = rows.iter().filter_map(|row| equation(row, decoded)).collect();
        if !["prefill", "decode", "batch"].iter().all(|test| rows.iter().any(|row| row.test == *test)) {
            bail!("{}: needs rows of prefill, decode and batch", path.display());
        }
        let [step, row, prefill_attended, decode_attended] = fit(&equations);
        let mut rates = Self { step, row, prefill_attended, decode_attended, ..Self::default() };
        rates.worst_error =
            equations.iter().map(|(c, s)| (rates.seconds(c) / s - 1.0).abs()).fold(0.0, f64::max);
        rates.kv_bytes_per_token = kv_bytes(&rows).context("needs decode at two depths")?;
        Ok(rates)
    }

    /// Seconds of `plan`, and its prompt rows.
    pub(crate) fn of(
        &self,
        plan: &StepPlan,
        is_prompt: impl Fn(&engine::scheduler::PlannedSequence) -> bool,
    ) -> (f64, u32) {
        let mut counts = [1.0, 0.0, 0.0, 0.0];
        let mut prompt_rows = 0;
        for sequence in &plan.sequences {
            let (rows, before) =
                (sequence.rows.end - sequence.rows.start, f64::from(sequence.context_before));
            let attended = f64::from(rows) * (before + (f64::from(rows) + 1.0) / 2.0);
            counts[1] += f64::from(rows);
            let prompt = is_prompt(sequence);
            counts[if prompt { 2 } else { 3 }] += attended;
            prompt_rows += if prompt { rows } else { 0 };
        }
        (self.seconds(&counts), prompt_rows)
    }

    /// Seconds of a whole uncached prompt on an idle worker.
    pub(crate) fn prompt(&self, tokens: f64, chunk: f64) -> f64 {
        self.seconds(&prompt(tokens, chunk))
    }

    fn seconds(&self, counts: &[f64; 4]) -> f64 {
        let [step, row, prefill, decode] = counts;
        step * self.step + row * self.row + prefill * self.prefill_attended + decode * self.decode_attended
    }
}

fn prompt(tokens: f64, chunk: f64) -> [f64; 4] {
    [(tokens / chunk).ceil(), tokens, tokens * (tokens + 1.0) / 2.0, 0.0]
}

fn equation(row: &Row, decoded: f64) -> Option<Equation> {
    match row.test.as_str() {
        "prefill" => Some((prompt(row.tokens, BENCH_CHUNK), row.tokens / row.tps)),
        "decode" => Some(([1.0, 1.0, 0.0, row.tokens + decoded / 2.0], 1.0 / row.tps)),
        "batch" => {
            let attended = row.batch * (BATCH_DEPTH + BATCH_STEPS / 2.0);
            Some(([1.0, row.batch, 0.0, attended], row.batch / row.tps))
        }
        _ => None,
    }
}

/// Least squares of relative errors with non-negative coefficients, by coordinate descent.
fn fit(equations: &[Equation]) -> [f64; 4] {
    let relative: Vec<[f64; 4]> = equations.iter().map(|(c, seconds)| c.map(|c| c / seconds)).collect();
    let mut x = [0.0; 4];
    for _ in 0..PASSES {
        for k in 0..4 {
            let (mut up, mut down) = (0.0, 0.0);
            for c in &relative {
                let rest: f64 = (0..4).filter(|&j| j != k).map(|j| c[j] * x[j]).sum();
                up += c[k] * (1.0 - rest);
                down += c[k] * c[k];
            }
            x[k] = if down > 0.0 { (up / down).max(0.0) } else { 0.0 };
        }
    }
    x
}

/// Additional bytes that a decoded token reads per token before it.
fn kv_bytes(rows: &[Row]) -> Option<u64> {
    let decodes = || rows.iter().filter(|row| row.test == "decode");
    let low = decodes().min_by(|a, b| a.tokens.total_cmp(&b.tokens))?;
    let high = decodes().max_by(|a, b| a.tokens.total_cmp(&b.tokens))?;
    let bytes = (high.bytes_per_token - low.bytes_per_token) / (high.tokens - low.tokens);
    (bytes >= 1.0).then_some(bytes.round() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exact_rates_are_recovered() {
        let truth = [4e-3, 8e-4, 2e-7, 1e-7];
        let rows = [[1.0, 512.0, 131_328.0, 0.0], [4.0, 2048.0, 2_098_176.0, 0.0], [1.0, 1.0, 0.0, 16.0]];
        let more = [[1.0, 1.0, 0.0, 4_112.0], [1.0, 8.0, 0.0, 1_152.0], [1.0, 32.0, 0.0, 4_608.0]];
        let seconds = |c: &[f64; 4]| c.iter().zip(truth).map(|(c, t)| c * t).sum::<f64>();
        let equations: Vec<Equation> = rows.iter().chain(&more).map(|c| (*c, seconds(c))).collect();
        for (found, true_value) in fit(&equations).iter().zip(truth) {
            assert!((found / true_value - 1.0).abs() < 0.02, "{found} {true_value}");
        }
    }
}
