//! Arrivals: read from a log, or drawn.

use crate::Error;
use crate::device::{Micros, micros};
use crate::fleet::Fleet;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::{BufRead, Read, Write};
use std::str::FromStr;

/// Most requests of a log.
pub const MAX_REQUESTS: usize = 500_000;
/// Longest line of a log in bytes. A collector writes hundreds of spans into one.
pub const MAX_LINE: usize = 16 << 20;
/// Longest log in seconds.
pub const MAX_SECONDS: f64 = 31.0 * 86_400.0;
/// Most tokens of a prompt or an answer.
pub const MAX_TOKENS: u64 = 10_000_000;

/// A request that arrives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arrival {
    /// Microseconds since the log's first request.
    pub at: Micros,
    /// Index in [`Fleet::models`].
    pub model: usize,
    pub prompt: u32,
    /// Tokens of the prompt that are in a cache.
    pub cached: u32,
    pub output: u32,
}

/// Content of a log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Traffic {
    pub arrivals: Vec<Arrival>,
    /// Requests for models that the fleet does not have, by model.
    pub unknown: BTreeMap<String, u64>,
}

/// A line of a log.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line<'a> {
    /// Seconds.
    t: f64,
    #[serde(borrow)]
    model: Cow<'a, str>,
    prompt_tokens: u64,
    output_tokens: u64,
    #[serde(default, skip_serializing_if = "is_zero")]
    cached_tokens: u64,
    /// Tenant of the request. It has no effect on the simulation.
    #[serde(default, rename = "tenant", skip_serializing)]
    _tenant: Option<Cow<'a, str>>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(tokens: &u64) -> bool {
    *tokens == 0
}

/// Most models without a deployment that are counted one by one.
const MAX_UNKNOWN: usize = 64;

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

struct Reader<'a> {
    models: BTreeMap<&'a str, usize>,
    /// With the time in seconds.
    found: Vec<(f64, Arrival)>,
    unknown: BTreeMap<String, u64>,
    line: usize,
}

impl Traffic {
    /// Reads a log: lines with a request each, or with spans in OTLP's JSON form. The lines need no order.
    ///
    /// # Errors
    /// Names the line, the field, the value and its limit.
    pub fn read(mut log: impl BufRead, fleet: &Fleet) -> Result<Self, Error> {
        let mut reader =
            Reader { models: fleet.index(), found: Vec::new(), unknown: BTreeMap::new(), line: 0 };
        let mut line = Vec::new();
        loop {
            reader.line += 1;
            line.clear();
            let read = log.by_ref().take(MAX_LINE as u64 + 1).read_until(b'\n', &mut line);
            let read = read.map_err(|error| Error::Read { line: reader.line, reason: error.to_string() })?;
            if read == 0 {
                break;
            }
            if read > MAX_LINE {
                let limit = format!("at most {MAX_LINE} bytes");
                return Err(reader.wrong("length", format!("over {MAX_LINE}"), limit));
            }
            if !line.trim_ascii().is_empty() {
                reader.take(&line)?;
            }
        }
        let Reader { mut found, unknown, .. } = reader;
        found.sort_by(|a, b| a.0.total_cmp(&b.0));
        let (first, last) = match (found.first(), found.last()) {
            (Some((first, _)), Some((last, _))) => (*first, *last),
            _ => return Err(Error::field("traffic", 0, "must have a request for a model of the fleet")),
        };
        if last - first > MAX_SECONDS {
            return Err(Error::field("t", last - first, format!("must span at most {MAX_SECONDS} s")));
        }
        let arrivals = found
            .into_iter()
            .map(|(t, arrival)| Arrival { at: ((t - first) * 1e6).round() as Micros, ..arrival });
        Ok(Self { arrivals: arrivals.collect(), unknown })
    }

    /// Writes the arrivals as a log.
    ///
    /// # Errors
    /// If `out` cannot be written.
    pub fn write(&self, fleet: &Fleet, mut out: impl Write) -> std::io::Result<()> {
        for arrival in &self.arrivals {
            let line = Line {
                t: crate::device::seconds(arrival.at),
                model: fleet.models[arrival.model].name.as_str().into(),
                prompt_tokens: arrival.prompt.into(),
                output_tokens: arrival.output.into(),
                cached_tokens: arrival.cached.into(),
                _tenant: None,
            };
            serde_json::to_writer(&mut out, &line)?;
            out.write_all(b"\n")?;
        }
        out.flush()
    }
}

impl Reader<'_> {
    fn wrong(&self, field: &str, value: impl ToString, limit: impl Into<String>) -> Error {
        Error::field(format!("line {}: {field}", self.line), value, limit)
    }

    fn take(&mut self, bytes: &[u8]) -> Result<(), Error> {
        match serde_json::from_slice::<Line<'_>>(bytes) {
            Ok(line) => {
                self.add(line.t, &line.model, [line.prompt_tokens, line.cached_tokens, line.output_tokens])
            }
            Err(error) => {
                let value: Option<Value> = serde_json::from_slice(bytes).ok();
                match value.filter(|value| value.get("resourceSpans").is_some()) {
                    Some(value) => self.take_spans(&value),
                    None => Err(Error::Read { line: self.line, reason: error.to_string() }),
                }
            }
        }
    }

    /// Spans of the file exporter of OpenTelemetry's collector. Those of requests that were answered count, since
    /// only they have tokens.
    fn take_spans(&mut self, value: &Value) -> Result<(), Error> {
        let scopes = list(&value["resourceSpans"]).iter().flat_map(|one| list(&one["scopeSpans"]));
        for span in scopes.flat_map(|one| list(&one["spans"])) {
            let attribute = |key: &str| {
                let found = list(&span["attributes"]).iter().find(|attribute| attribute["key"] == key)?;
                Some(&found["value"])
            };
            // Integers of 64 bits are texts in this form.
            let number = |value: &Value| value.as_u64().or_else(|| value.as_str()?.parse().ok());
            let count = |key: &str| attribute(key).and_then(|value| number(&value["intValue"]));
            let model = attribute("gen_ai.request.model").and_then(|value| value["stringValue"].as_str());
            let (Some(model), Some(prompt)) = (model, count("gen_ai.usage.input_tokens")) else { continue };
            let Some(nanos) = number(&span["startTimeUnixNano"]) else {
                return Err(self.wrong("startTimeUnixNano", &span["startTimeUnixNano"], "must be a number"));
            };
            // An embedding has no output.
            let output = count("gen_ai.usage.output_tokens").unwrap_or(1);
            let cached = count("gen_ai.usage.cache_read.input_tokens").unwrap_or(0);
            self.add(nanos as f64 / 1e9, model, [prompt, cached, output.max(1)])?;
        }
        Ok(())
    }

    fn add(&mut self, t: f64, model: &str, [prompt, cached, output]: [u64; 3]) -> Result<(), Error> {
        if !(0.0..=1e11).contains(&t) {
            return Err(self.wrong("t", t, "must be 0 to 1e11 s"));
        }
        for (field, value) in [("prompt_tokens", prompt), ("output_tokens", output)] {
            if !(1..=MAX_TOKENS).contains(&value) {
                return Err(self.wrong(field, value, format!("must be 1 to {MAX_TOKENS}")));
            }
        }
        if cached > prompt {
            return Err(self.wrong(
                "cached_tokens",
                cached,
                format!("must be at most prompt_tokens, {prompt}"),
            ));
        }
        // A version of a deployed model is a request for the model.
        let name = model.split_once('@').map_or(model, |(name, _)| name);
        let Some(&model) = self.models.get(name) else {
            if self.unknown.len() < MAX_UNKNOWN || self.unknown.contains_key(name) {
                *self.unknown.entry(name.chars().take(100).collect()).or_default() += 1;
            }
            return Ok(());
        };
        if self.found.len() >= MAX_REQUESTS {
            return Err(self.wrong("requests", self.found.len() + 1, format!("at most {MAX_REQUESTS}")));
        }
        let (prompt, cached, output) = (prompt as u32, cached as u32, output as u32);
        self.found.push((t, Arrival { at: 0, model, prompt, cached, output }));
        Ok(())
    }
}

/// Synthetic traffic: models by Zipf's law in the order of their names, Poisson arrivals, and lengths with an exponential
/// distribution.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Synthetic {
    /// The model of rank n gets a share proportional to n^-exponent.
    pub exponent: f64,
    /// Requests per second.
    pub rate: f64,
    pub requests: usize,
    /// Mean tokens.
    pub prompt: f64,
    pub output: f64,
    /// Seconds after which the ranks move on by one model; 0: never.
    pub drift: f64,
}

impl FromStr for Synthetic {
    type Err = String;

    /// `zipf:EXPONENT` and, separated by commas, `rate=`, `requests=`, `prompt=`, `output=` and `drift=`.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split(',');
        let exponent = parts.next().and_then(|first| first.strip_prefix("zipf:"));
        let exponent = exponent.ok_or_else(|| format!("{text:?} does not begin with zipf:EXPONENT"))?;
        let number = |field: &str, value: &str, (min, max): (f64, f64)| match value.parse::<f64>() {
            Ok(number) if (min..=max).contains(&number) => Ok(number),
            _ => Err(format!("{field}: {value:?} is not a number of {min} to {max}")),
        };
        let exponent = number("zipf", exponent, (0.0, 10.0))?;
        let mut found =
            Self { exponent, rate: 1.0, requests: 1000, prompt: 512.0, output: 128.0, drift: 0.0 };
        for part in parts {
            let (field, value) = part.split_once('=').ok_or_else(|| format!("{part:?} is not NAME=VALUE"))?;
            match field {
                "rate" => found.rate = number(field, value, (1e-6, 1e6))?,
                "requests" => found.requests = number(field, value, (1.0, MAX_REQUESTS as f64))? as usize,
                "prompt" => found.prompt = number(field, value, (1.0, 1e6))?,
                "output" => found.output = number(field, value, (1.0, 1e6))?,
                "drift" => found.drift = number(field, value, (0.0, MAX_SECONDS))?,
                _ => return Err(format!("{field:?} is not rate, requests, prompt, output or drift")),
            }
        }
        match found.requests as f64 / found.rate > MAX_SECONDS {
            true => Err(format!("requests / rate: more than {MAX_SECONDS} s")),
            false => Ok(found),
        }
    }
}

impl Synthetic {
    /// Draws the arrivals.
    pub fn draw(&self, fleet: &Fleet, seed: u64) -> Traffic {
        let models = fleet.models.len();
        let shares: Vec<f64> = (1..=models)
            .scan(0.0, |sum, rank| {
                *sum += (rank as f64).powf(-self.exponent);
                Some(*sum)
            })
            .collect();
        let total = shares.last().copied().unwrap_or(1.0);
        let mut random = Random(seed);
        let mut t = 0.0;
        let mut arrivals = Vec::with_capacity(self.requests);
        for _ in 0..self.requests {
            let drawn = random.uniform() * total;
            let rank = shares.partition_point(|share| *share <= drawn).min(models - 1);
            let moved = if self.drift > 0.0 { (t / self.drift) as usize } else { 0 };
            let mut tokens =
                |mean: f64| (random.exponential() * mean).ceil().clamp(1.0, MAX_TOKENS as f64) as u32;
            let (prompt, output) = (tokens(self.prompt), tokens(self.output));
            let model = (rank + moved) % models;
            arrivals.push(Arrival { at: micros(t), model, prompt, cached: 0, output });
            t += random.exponential() / self.rate;
        }
        Traffic { arrivals, unknown: BTreeMap::new() }
    }
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// At least 0 and below 1.
    fn uniform(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// With mean 1.
    fn exponential(&mut self) -> f64 {
        -(1.0 - self.uniform()).ln()
    }
}
