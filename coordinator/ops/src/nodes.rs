//! `/admin/v1/nodes` and `/admin/v1/join-tokens`: nodes with certificates of the cluster, and the tokens by which
//! they join.
//!
//! | request | does | answers |
//! |---|---|---|
//! | `GET nodes` | lists | `{"nodes":[N],"authority","revoked"}` |
//! | `POST nodes/{role}/{id}/approve` JSON `{"key"}` | approves the node that waits with this key | 204 |
//! | `DELETE nodes/{role}/{id}` | removes it: its certificates are revoked; or refuses one that waits | 204 |
//! | `GET join-tokens` | lists | `{"tokens":[T]}` |
//! | `POST join-tokens` JSON `{"role", "ttl_s"?, "uses"?, "node"?, "approval"?}` | creates a token | 201 T with `"token"`, which is never returned again |
//! | `DELETE join-tokens/{id}` | revokes it; nodes that have joined stay | 204 |
//!
//! N is `{"id","role","state","by","key","labels","certificates":[{"serial","ends_unix_s"}],"since_unix_s","here"}`.
//! `state`: `waiting`, `approved`, `joined`, or `unrecorded` for a node whose certificate was issued elsewhere.
//! `here`: it is connected to this coordinator. `authority`: the coordinators can issue certificates. `revoked`: the
//! number of revoked certificates that have not ended. T is
//! `{"id","role","node","approval","uses","created_unix_s","expires_unix_s"}`. Any coordinator may be called.

use super::keys::{body, random};
use super::{Ops, Subject, count, to_api_error};
use api::auth::hex;
use api::error::ApiError;
use axum::extract::{Path, Request, State};
use axum::http::StatusCode;
use axum::routing::{delete, get, post};
use axum::{Extension, Json, Router};
use consensus::table::{
    Change, JoinedBy, NodeApproved, NodeRecord, NodeRemoved, NodeState, Table, TokenRecord,
};
use group::agreement::Agreement;
use model::shard::ChunkId;
use proto::ids::{NodeId, Role};
use proto::join::{JoinToken, TokenId, TokenSecret};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

const DEFAULT_TTL_S: u64 = 60 * 60;
/// A token is for the next hours or days; a longer-lived way is a service account.
const MAX_TTL_S: u64 = 30 * 24 * 60 * 60;
const MAX_USES: u32 = 1000;

pub(super) fn router() -> Router<Arc<Ops>> {
    Router::new()
        .route("/admin/v1/nodes", get(list))
        .route("/admin/v1/nodes/{role}/{id}", delete(remove))
        .route("/admin/v1/nodes/{role}/{id}/approve", post(approve))
        .route("/admin/v1/join-tokens", get(tokens).post(create))
        .route("/admin/v1/join-tokens/{id}", delete(revoke))
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Created {
    role: Role,
    ttl_s: Option<u64>,
    uses: Option<u32>,
    node: Option<NodeId>,
    #[serde(default)]
    approval: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Approved {
    key: String,
}

async fn list(State(ops): State<Arc<Ops>>) -> Result<Json<Value>, ApiError> {
    let table = table(&ops)?;
    let nodes = table.nodes();
    let recorded = nodes.nodes().iter().map(|(name, record)| node_json(&ops, name, Some(record)));
    let others = others(&ops, &table);
    let others = others.iter().map(|name| node_json(&ops, name, None));
    Ok(Json(json!({
        "nodes": recorded.chain(others).collect::<Vec<_>>(),
        "authority": nodes.authority().is_some(),
        "revoked": nodes.revoked().len(),
    })))
}

/// Connected workers and members of the group without a record: their certificates were issued elsewhere.
fn others(ops: &Ops, table: &Table) -> BTreeSet<(Role, NodeId)> {
    let workers = ops.dispatch.introductions().into_iter().map(|worker| (Role::Worker, worker.node.clone()));
    let coordinators = table.seats().map(|seat| (Role::Coordinator, seat.node.clone()));
    workers.chain(coordinators).filter(|name| !table.nodes().nodes().contains_key(name)).collect()
}

fn node_json(ops: &Ops, (role, node): &(Role, NodeId), record: Option<&NodeRecord>) -> Value {
    let here = match role {
        Role::Worker => ops.dispatch.introductions().iter().any(|worker| worker.node == *node),
        Role::Coordinator => {
            let standings = ops.agreement.as_ref().map(|agreement| agreement.standings());
            standings
                .unwrap_or_default()
                .iter()
                .any(|standing| standing.node == *node && standing.role != "unreachable")
        }
    };
    let state = record.map_or("unrecorded", |record| match record.state {
        NodeState::Waiting => "waiting",
        NodeState::Approved => "approved",
        NodeState::Joined => "joined",
    });
    let by = record.map(|record| match &record.by {
        JoinedBy::Token(id) => format!("token {id}"),
        JoinedBy::ServiceAccount(account) => account.clone(),
        JoinedBy::Certificate => "certificate".into(),
    });
    let labels = record.iter().flat_map(|record| &record.labels);
    let labels: Map<_, _> = labels.map(|(key, value)| (key.clone(), value.as_str().into())).collect();
    let certificates = record.iter().flat_map(|record| &record.certificates);
    let certificates = certificates.map(
        |certificate| json!({"serial": hex(&certificate.serial), "ends_unix_s": certificate.ends_unix_s}),
    );
    json!({
        "id": node.as_str(),
        "role": role.as_str(),
        "state": state,
        "by": by,
        "key": record.map(|record| hex(&record.key)),
        "labels": labels,
        "certificates": certificates.collect::<Vec<_>>(),
        "since_unix_s": record.map(|record| record.since_unix_s),
        "here": here,
    })
}

async fn approve(
    State(ops): State<Arc<Ops>>,
    Path((role, id)): Path<(String, String)>,
    request: Request,
) -> Result<StatusCode, ApiError> {
    let (role, node) = name(&role, id)?;
    let Approved { key } = body(request).await?;
    let ChunkId(key) =
        ChunkId::from_hex(&key).ok_or_else(|| ApiError::field("key", "64 hexadecimal digits"))?;
    let approved = NodeApproved { role, node, key, now_unix_s: unix_s() };
    change(&ops, "approve_node", Change::NodeApproved(approved)).await
}

async fn remove(
    State(ops): State<Arc<Ops>>,
    Path((role, id)): Path<(String, String)>,
) -> Result<StatusCode, ApiError> {
    let (role, node) = name(&role, id)?;
    let table = table(&ops)?;
    if role == Role::Coordinator && table.seats().any(|seat| seat.node == node) {
        let why = format!("{node} is a member of the group: run `kvasir coordinators remove {node}` first");
        return Err(ApiError::Refused { why });
    }
    if others(&ops, &table).contains(&(role, node.clone())) {
        let why = "its certificate was issued elsewhere: revoke it there with `kvasir ca revoke`";
        return Err(ApiError::Refused { why: why.into() });
    }
    let removed = NodeRemoved { role, node, now_unix_s: unix_s() };
    change(&ops, "remove_node", Change::NodeRemoved(removed)).await
}

async fn tokens(State(ops): State<Arc<Ops>>) -> Result<Json<Value>, ApiError> {
    let table = table(&ops)?;
    let tokens = table.nodes().tokens().values().map(token_json);
    Ok(Json(json!({"tokens": tokens.collect::<Vec<_>>()})))
}

async fn create(
    State(ops): State<Arc<Ops>>,
    Extension(subject): Extension<Subject>,
    request: Request,
) -> Result<(StatusCode, Json<Value>), ApiError> {
    let Created { role, ttl_s, uses, node, approval } = body(request).await?;
    let ttl_s = ttl_s.unwrap_or(DEFAULT_TTL_S);
    let uses = uses.unwrap_or(1);
    if !(1..=MAX_TTL_S).contains(&ttl_s) {
        return Err(ApiError::field("ttl_s", format!("must be 1 to {MAX_TTL_S}")));
    }
    if !(1..=MAX_USES).contains(&uses) {
        return Err(ApiError::field("uses", format!("must be 1 to {MAX_USES}")));
    }
    if table(&ops)?.nodes().authority().is_none() {
        let why = "the coordinators have no authority: start one with --ca, or issue certificates with `kvasir ca issue`";
        return Err(ApiError::Refused { why: why.into() });
    }
    let root = ops.identity.root().map_err(|error| {
        tracing::error!(%error, "this node's own root cannot be found; no token is created");
        ApiError::Internal
    })?;
    let (secret, id) = (random()?, random()?);
    let id = TokenId(id.first_chunk().copied().unwrap_or_default());
    subject.set(format!("token {id} for {}", role.as_str()));
    let created_unix_s = unix_s();
    let record = TokenRecord {
        id,
        sha256: Sha256::digest(secret).into(),
        role,
        node,
        approval,
        uses,
        created_unix_s,
        expires_unix_s: created_unix_s + ttl_s,
    };
    let mut answer = token_json(&record);
    answer["token"] = JoinToken { id, secret: TokenSecret(secret), root: root.0 }.to_text().into();
    change(&ops, "create_join_token", Change::JoinTokenIssued(record)).await?;
    Ok((StatusCode::CREATED, Json(answer)))
}

async fn revoke(State(ops): State<Arc<Ops>>, Path(id): Path<String>) -> Result<StatusCode, ApiError> {
    let table = table(&ops)?;
    let id = table.nodes().tokens().keys().copied().find(|known| known.to_string() == id);
    let id = id.ok_or_else(|| ApiError::Unknown { what: "join token".into() })?;
    change(&ops, "revoke_join_token", Change::JoinTokenRevoked(id)).await
}

fn token_json(token: &TokenRecord) -> Value {
    json!({
        "id": token.id.to_string(),
        "role": token.role.as_str(),
        "node": token.node.as_ref().map(NodeId::as_str),
        "approval": token.approval,
        "uses": token.uses,
        "created_unix_s": token.created_unix_s,
        "expires_unix_s": token.expires_unix_s,
    })
}

fn name(role: &str, id: String) -> Result<(Role, NodeId), ApiError> {
    let found = [Role::Coordinator, Role::Worker].into_iter().find(|known| known.as_str() == role);
    let role = found.ok_or_else(|| ApiError::field("role", "must be coordinator or worker"))?;
    Ok((role, NodeId::new(id).map_err(|error| ApiError::field("id", error.rule))?))
}

fn table(ops: &Ops) -> Result<Arc<Table>, ApiError> {
    agreement(ops)?.table().ok_or(ApiError::NoQuorum)
}

fn agreement(ops: &Ops) -> Result<&Agreement, ApiError> {
    ops.agreement.as_deref().ok_or_else(|| ApiError::Refused {
        why: "this coordinator has no data directory, so no node joins by it".into(),
    })
}

async fn change(ops: &Ops, operation: &'static str, change: Change) -> Result<StatusCode, ApiError> {
    let made = agreement(ops)?.change_table(change).await.map_err(to_api_error);
    count(ops, operation, &made);
    made.map(|()| StatusCode::NO_CONTENT)
}

fn unix_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
