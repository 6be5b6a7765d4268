//! `/admin/v1/deployments`: models that are deployed.
//!
//! | request | does | answers |
//! |---|---|---|
//! | `GET` | lists | `{"deployments":[D]}` |
//! | `PUT /{model}` JSON `{"file" or "fetch"?, "min"?, "max"?, "idle_s"?, "pin"?, "nodes"?, "context"?, "priority"?, "shards"?, "engine"?, "reread"?, "canary"?, "from"?}` | deploys the model, or changes its deployment; absent settings stay | `{"revision"}` |
//! | `DELETE /{model}?from=REVISION` | removes it; running requests end normally | 204 |
//! | `POST /{model}/promote` | makes the version that is rolled out active | 204 |
//! | `POST /{model}/rollback` JSON `{"canary"?}` | ends a rollout; without one, rolls out the version before the active one | 204 |
//!
//! `file` is a path on the workers, `fetch` a catalog name or an `https://` or `hf://` address. `nodes` are labels
//! `key=value` that a worker must have, `engine` computes the model. `reread` reads the files of an unchanged source
//! again. `canary` is `{"permille", "min_requests"?, "max_errors_permille"?, "max_ttft_percent"?}`. A change with `from`
//! is refused if the deployment has another revision; 0 means that it must be new.
//!
//! D is the settings with `{"model","revision","state","progress","eta_s","reason","waiting","versions":[V],"rollout","last_rollout"}`,
//! V is `{"version","id","source","digest","active","failed","rolled_back","stages","needed_bytes","requests","errors","ttft_p50_s","workers":[{"worker","wanted","state","progress","eta_s","failures","reason","bytes","idle_s"}]}`.
//! `stages` has the workers of each replica over several, with their layers.
//! `waiting` are the requests in the coordinators' queues. `requests`, those that failed (`errors`) and the median time
//! to first token are of all coordinators, each since its start. Any coordinator may be called.

use super::keys::body;
use super::{Ops, Subject, count, to_api_error};
use api::auth::hex;
use api::error::ApiError;
use axum::extract::{Path, Query, Request, State};
use axum::http::StatusCode;
use axum::routing::{get, post, put};
use axum::{Extension, Json, Router};
use consensus::table::{
    CanaryShare, Change, Deployment, DeploymentDropped, DeploymentSet, DeploymentSettings, Refusal,
    RolloutEnded, RolloutStarted, StagePlan, Table, Version,
};
use dispatch::ModelCounts;
use group::agreement::{Agreement, ChangeError};
use group::deployments::decide::files_report;
use proto::deployment::{MAX_SOURCE, ModelReport, ModelSource, ModelsReport};
use proto::ids::{ModelId, NodeId};
use proto::served_model::ENGINES;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Limit of the wait until this coordinator offers a deployed model.
const HERE_LIMIT: Duration = Duration::from_secs(1);
const LOOK_EVERY: Duration = Duration::from_millis(10);

pub(super) fn router() -> Router<Arc<Ops>> {
    Router::new()
        .route("/admin/v1/deployments", get(list))
        .route("/admin/v1/deployments/{model}", put(set).delete(remove))
        .route("/admin/v1/deployments/{model}/promote", post(promote))
        .route("/admin/v1/deployments/{model}/rollback", post(roll_back))
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct SetRequest {
    file: Option<String>,
    fetch: Option<String>,
    min: Option<u16>,
    max: Option<u16>,
    idle_s: Option<u32>,
    pin: Option<bool>,
    nodes: Option<Vec<String>>,
    context: Option<u32>,
    priority: Option<u32>,
    shards: Option<u16>,
    engine: Option<String>,
    #[serde(default)]
    reread: bool,
    canary: Option<CanaryRequest>,
    from: Option<u64>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct CanaryRequest {
    permille: u16,
    #[serde(default = "CanaryRequest::min_requests")]
    min_requests: u32,
    #[serde(default = "CanaryRequest::max_errors_permille")]
    max_errors_permille: u16,
    #[serde(default = "CanaryRequest::max_ttft_percent")]
    max_ttft_percent: u32,
}

impl CanaryRequest {
    fn min_requests() -> u32 {
        50
    }

    fn max_errors_permille() -> u16 {
        20
    }

    fn max_ttft_percent() -> u32 {
        200
    }

    fn share(self) -> Result<CanaryShare, ApiError> {
        let Self { permille, min_requests, max_errors_permille, max_ttft_percent } = self;
        let ranges = [
            ("canary.permille", u64::from(permille), 1..=1000),
            ("canary.min_requests", min_requests.into(), 1..=u64::from(u32::MAX)),
            ("canary.max_errors_permille", max_errors_permille.into(), 0..=1000),
            ("canary.max_ttft_percent", max_ttft_percent.into(), 100..=10_000),
        ];
        for (field, value, range) in ranges {
            if !range.contains(&value) {
                let reason = format!("{value} is not in {} to {}", range.start(), range.end());
                return Err(ApiError::field(field, reason));
            }
        }
        Ok(CanaryShare { permille, min_requests, max_errors_permille, max_ttft_percent })
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct RollbackRequest {
    canary: Option<CanaryRequest>,
}

#[derive(Debug, Default, Deserialize)]
struct From {
    from: Option<u64>,
}

impl SetRequest {
    fn source(&self) -> Result<Option<ModelSource>, ApiError> {
        let (field, text, source) = match (&self.file, &self.fetch) {
            (None, None) => return Ok(None),
            (Some(file), None) => ("file", file, ModelSource::File(file.clone())),
            (None, Some(fetch)) => ("fetch", fetch, ModelSource::Fetch(fetch.clone())),
            (Some(_), Some(_)) => return Err(ApiError::field("fetch", "give either file or fetch")),
        };
        if text.is_empty() || text.len() > MAX_SOURCE {
            let reason = format!("has {} bytes, must have 1 to {MAX_SOURCE}", text.len());
            return Err(ApiError::field(field, reason));
        }
        if field == "file" && !text.starts_with('/') {
            return Err(ApiError::field(
                field,
                format!("{text:?} is not an absolute path, as workers need it"),
            ));
        }
        Ok(Some(source))
    }
}

async fn list(State(ops): State<Arc<Ops>>) -> Json<Value> {
    Json(json!({"deployments": all(&ops)}))
}

/// Reports of workers, and outcomes and queues of requests, of the deployed models.
struct Seen {
    reports: BTreeMap<NodeId, ModelsReport>,
    /// Ended requests by version.
    outcomes: BTreeMap<ModelId, ModelCounts>,
    /// Waiting requests by version.
    queued: BTreeMap<ModelId, usize>,
}

/// All deployments, by name.
pub(crate) fn all(ops: &Ops) -> Vec<Value> {
    let table = ops.agreement.as_ref().and_then(|agreement| agreement.table());
    let Some(table) = table.filter(|table| !table.deployments().models().is_empty()) else {
        return Vec::new();
    };
    let seen = Seen {
        reports: ops.deployments.as_ref().map(|deployments| deployments.reports()).unwrap_or_default(),
        outcomes: ops.dispatch.outcomes().totals(),
        queued: ops.dispatch.waiting_everywhere(),
    };
    let known = ops.models.deployed();
    let deployments = table.deployments().models().iter();
    deployments
        .map(|(model, deployment)| {
            let mut object = deployment_json(model, deployment, &table, &seen);
            if let (Some(object), Some(known)) = (object.as_object_mut(), known.model(model.as_str())) {
                let progress = &known.progress;
                object.insert("state".into(), progress.state.name().into());
                object.insert("progress".into(), percent(progress.permille));
                object.insert("eta_s".into(), progress.eta.map(|eta| eta.as_secs_f64()).into());
                let reason = known.refused.clone().unwrap_or_else(|| progress.reason.clone());
                object.insert("reason".into(), reason.into());
            }
            object
        })
        .collect()
}

fn percent(permille: u16) -> Value {
    if permille == 0 { Value::Null } else { (f64::from(permille) / 10.0).into() }
}

fn deployment_json(model: &ModelId, deployment: &Deployment, table: &Table, seen: &Seen) -> Value {
    let DeploymentSettings { min, max, idle_s, pin, nodes, context, priority, shards, engine } =
        &deployment.settings;
    let versions = deployment.versions.iter().map(|version| {
        let active = version.number == deployment.active;
        version_json(model, version, active, table, seen)
    });
    let names = deployment.versions.iter().filter_map(|version| version.name(model));
    let waiting: usize = names.filter_map(|name| seen.queued.get(&name)).sum();
    let rollout = deployment.rollout.as_ref().map(|rollout| {
        let canary = rollout.canary.map(|canary| {
            let CanaryShare { permille, min_requests, max_errors_permille, max_ttft_percent } = canary;
            json!({
                "permille": permille,
                "min_requests": min_requests,
                "max_errors_permille": max_errors_permille,
                "max_ttft_percent": max_ttft_percent,
            })
        });
        json!({"version": rollout.version, "canary": canary})
    });
    json!({
        "model": model.as_str(),
        "min": min,
        "max": max,
        "idle_s": idle_s,
        "pin": pin,
        "nodes": nodes,
        "context": context,
        "priority": priority,
        "shards": shards,
        "engine": engine,
        "revision": deployment.revision,
        "state": "absent",
        "progress": null,
        "eta_s": null,
        "reason": "",
        "waiting": waiting,
        "versions": versions.collect::<Vec<_>>(),
        "rollout": rollout,
        "last_rollout": deployment.last_rollout,
    })
}

fn version_json(model: &ModelId, version: &Version, active: bool, table: &Table, seen: &Seen) -> Value {
    let id = version.name(model);
    let placement = id.as_ref().and_then(|id| table.models().get(id)).map(|plan| plan.placement.as_slice());
    let wanted = |node: &NodeId| placement.is_some_and(|placement| placement.contains(node));
    let report_of = |report: &ModelsReport| match &id {
        Some(id) => report.models.iter().find(|report| report.model == *id).cloned(),
        None => files_report(report, model, version).cloned(),
    };
    let known = seen.reports.iter().filter_map(|(node, report)| Some((node, report_of(report)?)));
    let workers = known.map(|(node, report)| {
        let ModelReport { state, permille, eta_ms, failures, reason, bytes, idle_ms, .. } = report;
        json!({
            "worker": node.as_str(),
            "wanted": wanted(node),
            "state": state.name(),
            "progress": percent(permille),
            "eta_s": (eta_ms > 0).then(|| f64::from(eta_ms) / 1000.0),
            "failures": failures,
            "reason": reason,
            "bytes": bytes,
            "idle_s": (idle_ms > 0).then(|| idle_ms as f64 / 1000.0),
        })
    });
    let outcomes = id.as_ref().and_then(|id| seen.outcomes.get(id));
    let (kind, source) = match &version.source {
        ModelSource::File(path) => ("file", path),
        ModelSource::Fetch(address) => ("fetch", address),
    };
    json!({
        "version": version.number,
        "id": id.as_ref().map(ModelId::as_str),
        "source": {kind: source},
        "digest": version.facts.map(|facts| hex(&facts.digest)),
        "active": active,
        "failed": version.failed,
        "rolled_back": version.rolled_back,
        "stages": id.as_ref().map(|id| stages_json(id, table)),
        "needed_bytes": version.facts.map(|facts| facts.needed_bytes),
        "requests": outcomes.map_or(0, ModelCounts::requests),
        "errors": outcomes.map_or(0, |counts| counts.failed),
        "ttft_p50_s": outcomes.and_then(ModelCounts::median_first_token).map(|time| time.as_secs_f64()),
        "workers": workers.collect::<Vec<_>>(),
    })
}

/// The replicas of a version over several workers: of each the workers with their layers.
fn stages_json(version: &ModelId, table: &Table) -> Vec<Value> {
    let replicas = table.replicas().values().filter(|plan| plan.model == *version);
    let stage = |stage: &StagePlan| json!({"worker": stage.node.as_str(), "layers": stage.layers});
    replicas.map(|plan| plan.stages.iter().map(stage).collect()).collect()
}

async fn set(
    State(ops): State<Arc<Ops>>,
    Path(model): Path<String>,
    Extension(subject): Extension<Subject>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let model = name(model)?;
    let requested: SetRequest = body(request).await?;
    let agreement = agreement(&ops)?;
    let table = agreement.read_table().await.map_err(to_api_error)?;
    let current = table.deployments().get(model.as_str());
    let source = requested.source()?;
    if current.is_none() && source.is_none() {
        return Err(ApiError::field("file", format!("{model} is not deployed: give file or fetch")));
    }
    let before = current.map(|current| current.settings.clone()).unwrap_or_default();
    let max = requested.max.or_else(|| requested.min.map(|min| min.max(before.max))).unwrap_or(before.max);
    let settings = DeploymentSettings {
        min: requested.min.unwrap_or(before.min),
        max,
        idle_s: requested.idle_s.unwrap_or(before.idle_s),
        pin: requested.pin.unwrap_or(before.pin),
        nodes: requested.nodes.unwrap_or(before.nodes),
        context: requested.context.unwrap_or(before.context),
        priority: requested.priority.unwrap_or(before.priority),
        shards: requested.shards.unwrap_or(before.shards),
        engine: requested.engine.unwrap_or(before.engine),
    };
    if !ENGINES.contains(&settings.engine.as_str()) {
        let reason = format!("{:?} is unknown; known are {}", settings.engine, ENGINES.join(", "));
        return Err(ApiError::field("engine", reason));
    }
    settings.check().map_err(|(field, value, rule)| ApiError::field(field, format!("{value:?} {rule}")))?;
    let canary = requested.canary.map(CanaryRequest::share).transpose()?;
    subject.set(format!("{model} {}", source.as_ref().map_or("", ModelSource::as_str)));
    let reread = requested.reread;
    // Absent settings keep the values that were just read, so the change holds for that revision only.
    let from = requested.from.or(Some(current.map_or(0, |current| current.revision)));
    let change = DeploymentSet { model: model.clone(), settings, source, reread, canary, from };
    let made =
        agreement.change_table(Change::DeploymentSet(Box::new(change))).await.map_err(|error| match error {
            ChangeError::Refused(Refusal::Unknown(_)) if canary.is_some() => {
                ApiError::field("canary", format!("no version of {model} is being rolled out"))
            }
            error => to_api_error(error),
        });
    count(&ops, "deploy_model", &made);
    made?;
    // The next request here finds the model.
    let here = async {
        while ops.models.deployed().model(model.as_str()).is_none() {
            tokio::time::sleep(LOOK_EVERY).await;
        }
    };
    let _later = tokio::time::timeout(HERE_LIMIT, here).await;
    let table = agreement.table();
    let revision = table.as_ref().and_then(|table| Some(table.deployments().get(model.as_str())?.revision));
    Ok(Json(json!({"revision": revision})))
}

async fn remove(
    State(ops): State<Arc<Ops>>,
    Path(model): Path<String>,
    Query(From { from }): Query<From>,
) -> Result<StatusCode, ApiError> {
    let model = name(model)?;
    let change = Change::DeploymentDropped(DeploymentDropped { model: model.clone(), from });
    make(&ops, "undeploy_model", &model, change).await
}

async fn promote(State(ops): State<Arc<Ops>>, Path(model): Path<String>) -> Result<StatusCode, ApiError> {
    let model = name(model)?;
    let table = agreement(&ops)?.read_table().await.map_err(to_api_error)?;
    let rollout = deployment(&table, &model)?.rollout.as_ref();
    let version = rollout.map(|rollout| rollout.version);
    let version = version.ok_or_else(|| unknown(format!("a rollout of {model}")))?;
    let reason = "an operator promoted it".to_owned();
    let change = RolloutEnded { model: model.clone(), version, promoted: true, reason };
    make(&ops, "promote_model", &model, Change::RolloutEnded(change)).await
}

async fn roll_back(
    State(ops): State<Arc<Ops>>,
    Path(model): Path<String>,
    request: Request,
) -> Result<StatusCode, ApiError> {
    let model = name(model)?;
    let RollbackRequest { canary } = body(request).await?;
    let canary = canary.map(CanaryRequest::share).transpose()?;
    let table = agreement(&ops)?.read_table().await.map_err(to_api_error)?;
    let deployment = deployment(&table, &model)?;
    let change = match &deployment.rollout {
        Some(rollout) => {
            let reason = "an operator rolled it back".to_owned();
            let (model, version) = (model.clone(), rollout.version);
            Change::RolloutEnded(RolloutEnded { model, version, promoted: false, reason })
        }
        None => {
            let earlier = |version: &&Version| version.number != deployment.active && !version.rolled_back;
            let before = deployment.versions.iter().rfind(earlier);
            let version = before.ok_or_else(|| unknown(format!("an earlier version of {model}")))?.number;
            Change::RolloutStarted(RolloutStarted { model: model.clone(), version, canary })
        }
    };
    make(&ops, "roll_back_model", &model, change).await
}

async fn make(
    ops: &Ops,
    operation: &'static str,
    model: &ModelId,
    change: Change,
) -> Result<StatusCode, ApiError> {
    let made = agreement(ops)?.change_table(change).await.map_err(|error| match error {
        ChangeError::Refused(Refusal::Unknown(_)) => unknown(format!("a deployment of {model}")),
        error => to_api_error(error),
    });
    count(ops, operation, &made);
    made.map(|()| StatusCode::NO_CONTENT)
}

fn deployment<'a>(table: &'a Table, model: &ModelId) -> Result<&'a Deployment, ApiError> {
    let found = table.deployments().get(model.as_str());
    found.ok_or_else(|| unknown(format!("a deployment of {model}")))
}

fn unknown(what: String) -> ApiError {
    ApiError::Unknown { what }
}

fn name(model: String) -> Result<ModelId, ApiError> {
    let model = ModelId::new(model).map_err(|error| ApiError::field("model", error.rule))?;
    if model.as_str().len() > ModelId::MAX_VERSIONED {
        let (len, limit) = (model.as_str().len(), ModelId::MAX_VERSIONED);
        return Err(ApiError::field("model", format!("has {len} characters, at most {limit}")));
    }
    Ok(model)
}

fn agreement(ops: &Ops) -> Result<&Agreement, ApiError> {
    ops.agreement.as_deref().ok_or_else(|| ApiError::Refused {
        why: "this coordinator has no data directory, so models cannot be deployed".into(),
    })
}
