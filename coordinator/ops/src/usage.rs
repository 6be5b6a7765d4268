//! `/admin/v1/usage`: what tenants, keys and models used.
//!
//! `GET usage?since=SECONDS&by=tenant,key,model,hour` answers
//! `{"from_unix_s", "until_unix_s", "by", "rows":[R], "total":R}`. `since`: the beginning, in seconds before now; 86400
//! if absent. `by`: some of `tenant`, `key`, `model` and either `hour` or `day`; `tenant,model` if absent.
//!
//! R has the fields of `by` (`hour` and `day` in seconds since 1970) and `requests`, `prompt_tokens`, `cached_tokens`,
//! `generated_tokens`, `recomputed_tokens`, `audio_s`, `attempts`, `timed_attempts`, `device_s`, `recomputed_device_s`,
//! `energy_j`, `recomputed_energy_j` and `energy_device_s`. Times of devices and energies that no worker reported are
//! null. Any coordinator may be called; usage at the others arrives within about a second.
//!
//! `GET usage/metrics` answers the usage that this coordinator has counted since its start, as metrics.

use super::{METRICS_TYPE, Ops};
use ::usage::book::{Dimension, Group};
use ::usage::recorder;
use ::usage::row::{Counter, Counters};
use api::error::ApiError;
use axum::extract::{Query, State};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::sync::Arc;

const DEFAULT_SINCE_S: u64 = 86_400;
const NS: f64 = 1e9;
const UJ: f64 = 1e6;

pub(super) fn router() -> Router<Arc<Ops>> {
    Router::new().route("/admin/v1/usage", get(usage)).route("/admin/v1/usage/metrics", get(metrics))
}

#[derive(Debug, Deserialize)]
struct Asked {
    since: Option<String>,
    by: Option<String>,
}

async fn usage(State(ops): State<Arc<Ops>>, asked: Query<Asked>) -> Result<Json<Value>, ApiError> {
    let Query(Asked { since, by }) = asked;
    let since = since.map_or(Ok(DEFAULT_SINCE_S), |since| {
        since.parse::<u64>().map_err(|_| ApiError::field("since", "a number of seconds before now"))
    })?;
    let by = by.as_deref().map_or(Ok(vec![Dimension::Tenant, Dimension::Model]), dimensions)?;
    let now = recorder::now();
    let answer = ops.dispatch.usage().query(now.saturating_sub(since), &by);
    let mut total = Counters::default();
    answer.groups.values().for_each(|counters| total.add_all(counters));
    let rows = answer.groups.iter().map(|(group, counters)| row(&by, group, counters));
    Ok(Json(json!({
        "from_unix_s": answer.from_unix_s,
        "until_unix_s": now,
        "by": by.iter().map(|by| by.name()).collect::<Vec<_>>(),
        "rows": rows.collect::<Vec<_>>(),
        "total": Value::Object(counted(&total)),
    })))
}

async fn metrics(State(ops): State<Arc<Ops>>) -> Response {
    let text = dispatch::metrics::usage::text(&ops.dispatch.usage().totals());
    ([(header::CONTENT_TYPE, METRICS_TYPE)], text).into_response()
}

fn dimensions(by: &str) -> Result<Vec<Dimension>, ApiError> {
    let mut found = Vec::new();
    for name in by.split(',').filter(|name| !name.is_empty()) {
        let known = Dimension::ALL.into_iter().find(|dimension| dimension.name() == name);
        let dimension = known.ok_or_else(|| {
            ApiError::field("by", format!("{name:?}: must be of tenant, key, model, hour and day"))
        })?;
        if !found.contains(&dimension) {
            found.push(dimension);
        }
    }
    if found.contains(&Dimension::Hour) && found.contains(&Dimension::Day) {
        return Err(ApiError::field("by", "hour and day exclude each other"));
    }
    Ok(found)
}

fn row(by: &[Dimension], group: &Group, counters: &Counters) -> Value {
    let mut json = Map::new();
    for dimension in by {
        let value: Value = match dimension {
            Dimension::Tenant => group.tenant.as_deref().into(),
            Dimension::Key => group.key.as_ref().and_then(Option::as_deref).into(),
            Dimension::Model => group.model.as_deref().into(),
            Dimension::Hour | Dimension::Day => group.period.map(|period| period.start_unix_s()).into(),
        };
        json.insert(dimension.name().to_owned(), value);
    }
    json.append(&mut counted(counters));
    Value::Object(json)
}

fn counted(counters: &Counters) -> Map<String, Value> {
    let get = |counter| counters.get(counter);
    let timed = get(Counter::TimedAttempts) > 0;
    let metered = get(Counter::EnergyDeviceNs) > 0 || get(Counter::RecomputedEnergyUj) > 0;
    let seconds = |counter| timed.then(|| get(counter) as f64 / NS);
    let joules = |counter| metered.then(|| get(counter) as f64 / UJ);
    let json = json!({
        "requests": get(Counter::Requests),
        "prompt_tokens": get(Counter::PromptTokens),
        "cached_tokens": get(Counter::CachedTokens),
        "generated_tokens": get(Counter::GeneratedTokens),
        "recomputed_tokens": get(Counter::RecomputedTokens),
        "audio_s": get(Counter::AudioMs) as f64 / 1e3,
        "attempts": get(Counter::Attempts),
        "timed_attempts": get(Counter::TimedAttempts),
        "device_s": seconds(Counter::DeviceNs),
        "recomputed_device_s": seconds(Counter::RecomputedDeviceNs),
        "energy_j": joules(Counter::EnergyUj),
        "recomputed_energy_j": joules(Counter::RecomputedEnergyUj),
        "energy_device_s": metered.then(|| get(Counter::EnergyDeviceNs) as f64 / NS),
    });
    match json {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}
