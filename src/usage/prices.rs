//! Prices of models, from a TOML file.
//!
//! ```toml
//! currency = "EUR"
//!
//! [default]              # models without a table of their own
//! prompt = 0.20          # per million prompt tokens that were not cached
//! cached = 0.02          # per million cached prompt tokens
//! generated = 0.80       # per million generated tokens
//! device_hour = 0.0      # per hour of device time
//! kwh = 0.30             # per kilowatt-hour
//! audio_minute = 0.0     # per minute of audio
//!
//! [models.qwen3-8b]
//! prompt = 0.40
//! ```

use anyhow::{Context, ensure};
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

const MAX_BYTES: u64 = 1 << 20;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Prices {
    currency: String,
    #[serde(default)]
    default: ModelPrices,
    /// By model id. A version of a model, such as `chat@1a2b3c4d5e6f`, has the prices of `chat` unless it has its own.
    #[serde(default)]
    models: BTreeMap<String, ModelPrices>,
}

/// Prices of one model; 0 if absent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct ModelPrices {
    prompt: f64,
    cached: f64,
    generated: f64,
    device_hour: f64,
    kwh: f64,
    audio_minute: f64,
}

impl Prices {
    pub(super) fn read(path: &Path) -> anyhow::Result<Self> {
        let size = std::fs::metadata(path).with_context(|| path.display().to_string())?.len();
        ensure!(size <= MAX_BYTES, "{}: {size} bytes, at most {MAX_BYTES}", path.display());
        let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
        Self::parse(&text).with_context(|| path.display().to_string())
    }

    pub(super) fn parse(text: &str) -> anyhow::Result<Self> {
        let prices: Self = toml::from_str(text)?;
        let is_code = !prices.currency.is_empty()
            && prices.currency.len() <= 8
            && prices.currency.bytes().all(|b| b.is_ascii_alphanumeric());
        ensure!(is_code, "currency: {:?}, must be 1 to 8 letters or digits", prices.currency);
        let named = prices.models.iter().map(|(name, prices)| (format!("models.{name}"), prices));
        for (name, model) in named.chain([("default".to_owned(), &prices.default)]) {
            let ModelPrices { prompt, cached, generated, device_hour, kwh, audio_minute } = model;
            for (field, price) in [
                ("prompt", prompt),
                ("cached", cached),
                ("generated", generated),
                ("device_hour", device_hour),
                ("kwh", kwh),
                ("audio_minute", audio_minute),
            ] {
                ensure!(
                    price.is_finite() && *price >= 0.0,
                    "{name}.{field}: {price}, must be a number from 0 on"
                );
            }
        }
        Ok(prices)
    }

    fn of(&self, model: &str) -> &ModelPrices {
        let parent = || model.split_once('@').and_then(|(name, _)| self.models.get(name));
        self.models.get(model).or_else(parent).unwrap_or(&self.default)
    }

    /// Adds `currency`, and `cost` to each row and to the total. The cost is null if it needs a value that is unknown.
    pub(super) fn apply(&self, usage: &mut Value) -> anyhow::Result<()> {
        let rows = usage.get_mut("rows").and_then(Value::as_array_mut);
        let rows = rows.context("the coordinator's response has no rows")?;
        let mut total = Some(0.0);
        for row in rows {
            let model = row.get("model").and_then(Value::as_str).unwrap_or_default();
            let cost = self.of(model).cost(row);
            super::set(row, "cost", cost);
            total = total.zip(cost).map(|(total, cost)| total + cost);
        }
        if let Some(sum) = usage.get_mut("total") {
            super::set(sum, "cost", total);
        }
        usage["currency"] = self.currency.clone().into();
        Ok(())
    }
}

impl ModelPrices {
    fn cost(&self, row: &Value) -> Option<f64> {
        let amount = |field: &str| row.get(field).and_then(Value::as_f64);
        // A price of 0 needs no amount. Without attempts there is nothing to measure.
        let unused = amount("attempts") == Some(0.0);
        let part = |price: f64, amount: Option<f64>, unit: f64| match price > 0.0 && !unused {
            true => amount.map(|amount| amount / unit * price),
            false => Some(0.0),
        };
        let (prompt, cached) = (amount("prompt_tokens")?, amount("cached_tokens")?);
        let tokens = (prompt - cached).max(0.0) * self.prompt
            + cached * self.cached
            + amount("generated_tokens")? * self.generated;
        // A value that covers only a part of the work is no basis for a bill.
        let timed = amount("device_s").filter(|_| amount("timed_attempts") >= amount("attempts"));
        let metered = amount("energy_j").filter(|_| timed.is_some() && amount("energy_device_s") >= timed);
        Some(
            tokens / 1e6
                + part(self.device_hour, timed, 3_600.0)?
                + part(self.kwh, metered, 3.6e6)?
                + amount("audio_s").unwrap_or(0.0) / 60.0 * self.audio_minute,
        )
    }
}
