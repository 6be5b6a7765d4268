//! `/admin/v1/coordinators`: the members of the coordinators' group, and changes of them.
//!
//! | request | does | answers |
//! |---|---|---|
//! | `GET` | lists | G |
//! | `POST` JSON `{"id","quic"}` | adds the coordinator at this address: it becomes a learner, catches up, then votes | 204 |
//! | `DELETE /{id}` | removes it | 204 |
//! | `POST /{id}/lead` | hands leadership to it | 204 |
//!
//! G is `{"agreed","leader","needed","coordinators":
//! [{"id","quic","incarnation","votes","here","another_life","level"}]}`. `agreed`: a majority has just
//! confirmed the list. `needed`: the number of voters that a decision needs. `another_life`: a coordinator of
//! this name is connected whose disk has another incarnation than the member's. Any coordinator may be called.
//! 409 explains why a change is refused and what to do; 503 `no_quorum` means that there is no majority.

use super::{Ops, count, to_api_error};
use api::error::ApiError;
use api::limits;
use axum::extract::{Path, Request, State};
use axum::http::StatusCode;
use axum::routing::{delete, get, post};
use axum::{Json, Router};
use group::agreement::{Agreement, GroupView, MemberRequest, PeerEntry};
use proto::ids::NodeId;
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

pub(super) fn router() -> Router<Arc<Ops>> {
    Router::new()
        .route("/admin/v1/coordinators", get(list).post(add))
        .route("/admin/v1/coordinators/{id}", delete(remove))
        .route("/admin/v1/coordinators/{id}/lead", post(lead))
}

/// The coordinator to add.
#[derive(Debug, Deserialize)]
struct Added {
    id: String,
    quic: String,
}

async fn list(State(ops): State<Arc<Ops>>) -> Result<Json<Value>, ApiError> {
    Ok(Json(view(&group(&ops)?.group().await.map_err(to_api_error)?)))
}

async fn add(State(ops): State<Arc<Ops>>, request: Request) -> Result<StatusCode, ApiError> {
    let body = limits::read(request.into_body()).await?;
    let added: Result<Added, _> = serde_json::from_slice(&body);
    let Added { id, quic } = added.map_err(|error| ApiError::field("body", error.to_string()))?;
    let node = name(id)?;
    let port = quic.rsplit_once(':').filter(|(host, _)| !host.is_empty());
    if !port.is_some_and(|(_, port)| port.parse::<u16>().is_ok_and(|port| port > 0)) {
        return Err(ApiError::field("quic", "must be HOST:PORT"));
    }
    change(&ops, "add_coordinator", MemberRequest::Add(PeerEntry { node, quic })).await
}

async fn remove(State(ops): State<Arc<Ops>>, Path(id): Path<String>) -> Result<StatusCode, ApiError> {
    change(&ops, "remove_coordinator", MemberRequest::Remove(name(id)?)).await
}

async fn lead(State(ops): State<Arc<Ops>>, Path(id): Path<String>) -> Result<StatusCode, ApiError> {
    change(&ops, "transfer_leadership", MemberRequest::Lead(name(id)?)).await
}

async fn change(ops: &Ops, operation: &'static str, order: MemberRequest) -> Result<StatusCode, ApiError> {
    let made = group(ops)?.order(order).await.map_err(to_api_error);
    count(ops, operation, &made);
    made.map(|()| StatusCode::NO_CONTENT)
}

fn group(ops: &Ops) -> Result<&Agreement, ApiError> {
    ops.agreement.as_deref().ok_or_else(|| ApiError::Refused {
        why: "this coordinator has no data directory, so it is in no group".into(),
    })
}

fn name(id: String) -> Result<NodeId, ApiError> {
    NodeId::new(id).map_err(|error| ApiError::field("id", error.rule))
}

fn view(group: &GroupView) -> Value {
    let voters = group.members.iter().filter(|member| member.votes).count();
    let members = group.members.iter().map(|member| {
        json!({
            "id": member.seat.node.as_str(),
            "quic": member.seat.quic,
            "incarnation": format!("{:016x}", member.seat.incarnation.0),
            "votes": member.votes,
            "here": member.here,
            "another_life": member.another_incarnation,
            "level": member.seat.level.0,
        })
    });
    json!({
        "agreed": group.agreed,
        "leader": group.leader.as_ref().map(NodeId::as_str),
        "needed": voters / 2 + 1,
        "coordinators": members.collect::<Vec<_>>(),
    })
}
