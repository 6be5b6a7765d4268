//! `kvasir usage`: what tenants, keys and models used, and what it costs.

use crate::access::Access;
use crate::columns::columns;
use crate::config::Period;
use prices::Prices;
use serde_json::{Map, Value, json};
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;
use time::OffsetDateTime;

mod prices;

const TIMEOUT: Duration = Duration::from_secs(10);
/// Columns of amounts: the field of the response, the table's head, and the kind of its values.
const AMOUNTS: [(&str, &str); 13] = [
    ("requests", "REQUESTS"),
    ("prompt_tokens", "PROMPT"),
    ("cached_tokens", "CACHED"),
    ("generated_tokens", "GENERATED"),
    ("recomputed_tokens", "RECOMPUTED"),
    ("audio_s", "AUDIO S"),
    ("device_s", "DEVICE S"),
    ("recomputed_device_s", "RECOMPUTED S"),
    ("energy_j", "JOULES"),
    ("recomputed_energy_j", "RECOMPUTED J"),
    ("energy_device_s", "JOULES OF S"),
    ("attempts", "ATTEMPTS"),
    ("timed_attempts", "TIMED"),
];
/// Amounts that the table shows; CSV and JSON have all.
const IN_TABLE: [&str; 7] = [
    "requests",
    "prompt_tokens",
    "cached_tokens",
    "generated_tokens",
    "recomputed_tokens",
    "device_s",
    "energy_j",
];

/// Shows the tokens, device seconds and joules that tenants, keys and models used.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  kvasir usage --since 24h\n  kvasir usage --since 30d --by tenant,day --csv > usage.csv\n  \
    kvasir usage --by tenant,model --price prices.toml\n\n\
    Every coordinator answers for all of them. Hours are kept for three days and days for 400, in UTC. A dash, an empty\n\
    CSV field and a JSON null mean that no worker has measured the value. A per cent figure behind a value is the part\n\
    of the attempts, or of the device time, that it covers."
)]
pub(crate) struct Usage {
    /// Beginning, as time before now, rounded down to a whole hour; to a whole day if it is more than three days ago.
    #[arg(long, value_name = "TIME", default_value = "24h")]
    since: Period,
    /// What is listed separately: `tenant`, `key`, `model`, and `hour` or `day`.
    #[arg(long, value_name = "NAME,..", value_delimiter = ',', default_value = "tenant,model")]
    by: Vec<String>,
    /// TOML file with the prices of models; adds the cost.
    #[arg(long, value_name = "FILE")]
    price: Option<PathBuf>,
    #[command(flatten)]
    access: Access,
    /// Print all fields as CSV.
    #[arg(long, conflicts_with = "json")]
    csv: bool,
    /// Print all fields as one line of JSON.
    #[arg(long)]
    json: bool,
}

impl Usage {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        let prices = self.price.as_deref().map(Prices::read).transpose()?;
        let mut by = self.by.clone();
        // Prices are those of a model.
        let per_model = prices.is_some() && !by.iter().any(|name| name == "model");
        if per_model {
            by.push("model".to_owned());
        }
        let since = self.since.millis().div_ceil(1000);
        let path = format!("/admin/v1/usage?since={since}&by={}", by.join(","));
        let mut usage = self.access.json("GET", &path, None, TIMEOUT)?;
        if let Some(prices) = &prices {
            prices.apply(&mut usage)?;
        }
        let mut out = std::io::stdout().lock();
        match (self.json, self.csv) {
            (true, _) => writeln!(out, "{usage}")?,
            (false, true) => write!(out, "{}", csv(&usage))?,
            (false, false) => write!(out, "{}", table(&usage))?,
        }
        Ok(())
    }
}

fn rows(usage: &Value) -> impl Iterator<Item = &Map<String, Value>> {
    usage.get("rows").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_object)
}

fn by(usage: &Value) -> Vec<&str> {
    usage.get("by").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str).collect()
}

/// The currency, if there are prices.
fn currency(usage: &Value) -> Option<&str> {
    usage.get("currency").and_then(Value::as_str)
}

fn number(row: &Map<String, Value>, field: &str) -> Option<f64> {
    row.get(field).and_then(Value::as_f64)
}

/// The text of a name or a time.
fn named(row: &Map<String, Value>, field: &str) -> Option<String> {
    match row.get(field)? {
        Value::Null => None,
        Value::Number(unix_s) => Some(moment(unix_s.as_u64()?, field)),
        value => value.as_str().map(str::to_owned),
    }
}

/// A time in UTC, such as `2026-11-29T23:00Z`, or `2026-11-29` for a day.
fn moment(unix_s: u64, field: &str) -> String {
    let time = i64::try_from(unix_s).ok().and_then(|unix_s| OffsetDateTime::from_unix_timestamp(unix_s).ok());
    let Some(time) = time else { return unix_s.to_string() };
    match field {
        "day" => time.date().to_string(),
        _ => format!("{}T{:02}:{:02}Z", time.date(), time.hour(), time.minute()),
    }
}

/// The covered part of a value, if it is not all of it.
fn coverage(part: Option<f64>, whole: Option<f64>) -> String {
    match (part, whole) {
        (Some(part), Some(whole)) if whole > 0.0 && part < 0.995 * whole => {
            format!(" ({:.0} %)", 100.0 * part / whole)
        }
        _ => String::new(),
    }
}

fn cell(row: &Map<String, Value>, field: &str) -> String {
    let Some(value) = number(row, field) else { return "-".to_owned() };
    match field {
        "device_s" => {
            let covered = coverage(number(row, "timed_attempts"), number(row, "attempts"));
            format!("{value:.3}{covered}")
        }
        "energy_j" => {
            let covered = coverage(number(row, "energy_device_s"), number(row, "device_s"));
            format!("{value:.1}{covered}")
        }
        "cost" => format!("{value:.4}"),
        _ => format!("{value:.0}"),
    }
}

fn table(usage: &Value) -> String {
    let (by, currency) = (by(usage), currency(usage));
    let mut head: Vec<String> = by.iter().map(|name| name.to_uppercase()).collect();
    let shown = AMOUNTS.iter().filter(|(field, _)| IN_TABLE.contains(field));
    head.extend(shown.map(|(_, head)| (*head).to_owned()));
    head.extend(currency.map(|currency| format!("COST {currency}")));
    let line = |row: &Map<String, Value>, names: Vec<String>| {
        let mut cells = names;
        cells.extend(IN_TABLE.iter().map(|field| cell(row, field)));
        cells.extend(currency.map(|_| cell(row, "cost")));
        cells
    };
    let mut lines = vec![head];
    for row in rows(usage) {
        let names = by.iter().map(|name| named(row, name).unwrap_or_else(|| "-".to_owned()));
        lines.push(line(row, names.collect()));
    }
    if let Some(total) = usage.get("total").and_then(Value::as_object) {
        let mut names = vec![String::new(); by.len()];
        names.first_mut().into_iter().for_each(|name| *name = "total".to_owned());
        lines.push(line(total, names));
    }
    columns(&lines)
}

/// RFC 4180, with a line of names. A field of unknown value is empty.
fn csv(usage: &Value) -> String {
    let (by, currency) = (by(usage), currency(usage));
    let quoted = |text: String| match text.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text,
    };
    let mut head: Vec<String> = by.iter().map(|name| (*name).to_owned()).collect();
    head.extend(AMOUNTS.iter().map(|(field, _)| (*field).to_owned()));
    head.extend(currency.map(|currency| format!("cost_{currency}")));
    let mut text = head.join(",") + "\r\n";
    for row in rows(usage) {
        let amount = |field: &str| match row.get(field) {
            Some(Value::Number(number)) => number.to_string(),
            _ => String::new(),
        };
        let mut fields: Vec<String> =
            by.iter().map(|name| quoted(named(row, name).unwrap_or_default())).collect();
        fields.extend(AMOUNTS.iter().map(|(field, _)| amount(field)));
        fields.extend(currency.map(|_| amount("cost")));
        text += &(fields.join(",") + "\r\n");
    }
    text
}

/// Sets a field of a row.
fn set(row: &mut Value, field: &str, value: Option<f64>) {
    row[field] = json!(value);
}

#[cfg(test)]
mod tests;
