//! `/admin/v1/plans`: operators' plans, which assign a model's layers to workers.
//!
//! | request | does | answers |
//! |---|---|---|
//! | `GET` | lists | `{"plans":[P]}` |
//! | `PUT /{model}` JSON `{"replicas":[[{"worker":"w0","layers":[0,14]},{"worker":"w1","layers":[14,28]}]]}` | replaces the model's replicas, whether planned by the leader or by an operator | 204 |
//! | `DELETE /{model}` | returns the model to the leader's planning; existing replicas may stay | 204 |
//!
//! P is `{"model","replicas","waits"}`. `waits` is the reason why the plan is not fully placed; null if it
//! is, or if the called coordinator does not lead. A range is the first layer and the layer after the last. A
//! plan that does not match the model's layers is refused before it is proposed. The workers need not be
//! connected yet. Any coordinator may be called.

use super::{Ops, count, to_api_error};
use api::error::ApiError;
use api::limits;
use axum::extract::{Path, Request, State};
use axum::http::StatusCode;
use axum::routing::{get, put};
use axum::{Json, Router};
use consensus::table::{Change, MAX_PLANNED_WORKERS, OperatorPlan, Refusal, StagePlan};
use dispatch::models::OfferedModel;
use group::agreement::{Agreement, ChangeError};
use group::placement::check_ranges;
use proto::ids::{ModelId, NodeId};
use proto::placement::MAX_STAGES;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

pub(super) fn router() -> Router<Arc<Ops>> {
    Router::new()
        .route("/admin/v1/plans", get(list))
        .route("/admin/v1/plans/{model}", put(plan).delete(withdraw))
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct PlanRequest {
    replicas: Vec<Vec<StageInput>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct StageInput {
    worker: NodeId,
    layers: (u32, u32),
}

async fn list(State(ops): State<Arc<Ops>>) -> Json<Value> {
    let table = ops.agreement.as_ref().and_then(|agreement| agreement.table());
    let reasons = ops.replicas.as_ref().map(|replicas| replicas.unplanned()).unwrap_or_default();
    let plans = table.iter().flat_map(|table| table.operator_plans().values());
    let plans = plans.map(|OperatorPlan { model, replicas }| {
        let stages = |stages: &Vec<StagePlan>| stages.iter().map(stage).collect::<Vec<_>>();
        let replicas: Vec<Vec<Value>> = replicas.iter().map(stages).collect();
        json!({"model": model.as_str(), "replicas": replicas, "waits": reasons.get(model)})
    });
    Json(json!({"plans": plans.collect::<Vec<_>>()}))
}

fn stage(stage: &StagePlan) -> Value {
    json!({"worker": stage.node.as_str(), "layers": [stage.layers.0, stage.layers.1]})
}

async fn plan(
    State(ops): State<Arc<Ops>>,
    Path(model): Path<String>,
    request: Request,
) -> Result<StatusCode, ApiError> {
    let offered = ops.models.get(&model).ok_or(ApiError::ModelNotFound(model))?;
    let body = limits::read(request.into_body()).await?;
    let requested: PlanRequest =
        serde_json::from_slice(&body).map_err(|error| ApiError::field("body", error.to_string()))?;
    let plan = checked(&offered, requested)?;
    let agreement = agreement(&ops)?;
    let made = agreement.change_table(Change::OperatorPlanned(plan)).await.map_err(to_api_error);
    count(&ops, "plan_model", &made);
    made.map(|()| StatusCode::NO_CONTENT)
}

async fn withdraw(State(ops): State<Arc<Ops>>, Path(model): Path<String>) -> Result<StatusCode, ApiError> {
    let model = ModelId::new(model).map_err(|error| ApiError::field("model", error.rule))?;
    let agreement = agreement(&ops)?;
    let made = agreement.change_table(Change::OperatorPlanWithdrawn(model.clone())).await;
    let made = made.map_err(|error| match error {
        ChangeError::Refused(Refusal::Unknown(_)) => {
            ApiError::Unknown { what: format!("an operator's plan of {model}") }
        }
        error => to_api_error(error),
    });
    count(&ops, "withdraw_plan", &made);
    made.map(|()| StatusCode::NO_CONTENT)
}

fn agreement(ops: &Ops) -> Result<&Agreement, ApiError> {
    ops.agreement.as_deref().ok_or_else(|| ApiError::Refused {
        why: "this coordinator has no data directory, so it plans no replicas".into(),
    })
}

/// Checks that a request is a plan of the model's layers, independent of the workers.
fn checked(model: &OfferedModel, requested: PlanRequest) -> Result<OperatorPlan, ApiError> {
    let PlanRequest { replicas } = requested;
    let Some(costs) = &model.costs else {
        let reason = format!("{} does not generate text, so its layers are not placed", model.id);
        return Err(ApiError::field("model", reason));
    };
    if replicas.is_empty() {
        return Err(ApiError::field("replicas", "is empty, must have at least 1; DELETE withdraws a plan"));
    }
    let named = replicas.iter().map(Vec::len).sum::<usize>();
    if named > MAX_PLANNED_WORKERS {
        let reason =
            format!("all operators' plans would name {named} workers, at most {MAX_PLANNED_WORKERS}");
        return Err(ApiError::field("replicas", reason));
    }
    let mut workers = BTreeSet::new();
    for (at, stages) in replicas.iter().enumerate() {
        let field = format!("replicas[{at}]");
        if stages.len() > MAX_STAGES {
            let reason = format!("{} stages, at most {MAX_STAGES}", stages.len());
            return Err(ApiError::field(field, reason));
        }
        let range = |StageInput { worker, layers: (first, end) }: &StageInput| {
            (worker.to_string(), Range { start: *first as usize, end: *end as usize })
        };
        let ranges: Vec<(String, Range<usize>)> = stages.iter().map(range).collect();
        check_ranges(costs, &ranges).map_err(|error| ApiError::field(field, error.to_string()))?;
        for (position, StageInput { worker, .. }) in stages.iter().enumerate() {
            if !workers.insert(worker) {
                let reason = format!("{worker} is also in another replica; a worker has one range");
                return Err(ApiError::field(format!("replicas[{at}][{position}].worker"), reason));
            }
        }
    }
    let to_stage = |StageInput { worker: node, layers }| StagePlan { node, layers };
    let replicas = replicas.into_iter().map(|stages| stages.into_iter().map(to_stage).collect()).collect();
    Ok(OperatorPlan { model: model.id.clone(), replicas })
}

#[cfg(test)]
mod tests;
