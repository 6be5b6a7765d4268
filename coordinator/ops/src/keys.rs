//! `/admin/v1/keys` and `/admin/v1/tenants`: API keys, their scopes, and limits.
//!
//! | request | does | answers |
//! |---|---|---|
//! | `GET keys` | lists | `{"keys":[K]}` |
//! | `POST keys` JSON `{"tenant", "models"?, "rpm"?, "tpm"?, "concurrency"?, "expires_s"?, "admin"?}` | creates a key that expires after `expires_s` seconds | 201 K with `"key"`, which is never returned again |
//! | `DELETE keys/{id}` | revokes it | 204 |
//! | `GET tenants` | lists | `{"tenants":[T]}` |
//! | `PUT tenants/{tenant}` JSON `{"rpm"?, "tpm"?, "concurrency"?, "cache_group"?}` | sets the tenant's limits and cache group | 204 |
//! | `DELETE tenants/{tenant}` | removes the tenant with its limits, and revokes its keys | 204 |
//!
//! K is `{"id","tenant","admin","models","rpm","tpm","concurrency","created_unix_s","expires_unix_s","from"}`.
//! `from` is `cluster`, or `file` for a key of the coordinator's configuration, which only that coordinator
//! lists. `id` is the first digits of the key's SHA-256. T is
//! `{"tenant","rpm","tpm","concurrency","cache_group"}`. An absent limit means no limit and is returned as null;
//! so is an absent time. Any coordinator may be called.

use super::{Ops, Subject, count, to_api_error};
use api::auth::{hex, key_id};
use api::error::ApiError;
use api::limits;
use axum::extract::{Path, Request, State};
use axum::http::StatusCode;
use axum::routing::{delete, get, put};
use axum::{Extension, Json, Router};
use consensus::table::{Access, CacheGroup, Change, KeyIssued, KeyRecord, KeyScope, Quota, TenantTuned};
use dispatch::random::random_bytes;
use group::agreement::Agreement;
use proto::block::TenantSalt;
use proto::ids::{ModelId, TenantId};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// The beginning of every key, by which scanners find leaked keys.
const PREFIX: &str = "kvasir-";
const MAX_EXPIRES_S: u64 = 100 * 365 * 86_400;

pub(super) fn router() -> Router<Arc<Ops>> {
    Router::new()
        .route("/admin/v1/keys", get(list).post(create))
        .route("/admin/v1/keys/{id}", delete(revoke))
        .route("/admin/v1/tenants", get(tenants))
        .route("/admin/v1/tenants/{tenant}", put(tune).delete(remove))
}

/// The limits in a request. `None`: no limit.
#[derive(Debug, Default, Deserialize)]
struct Limits {
    rpm: Option<u32>,
    tpm: Option<u64>,
    concurrency: Option<u32>,
}

impl From<Limits> for Quota {
    fn from(limits: Limits) -> Self {
        Self {
            requests_per_minute: limits.rpm.unwrap_or(0),
            tokens_per_minute: limits.tpm.unwrap_or(0),
            concurrency: limits.concurrency.unwrap_or(0),
        }
    }
}

#[derive(Debug, Deserialize)]
struct KeyRequest {
    tenant: TenantId,
    #[serde(default)]
    models: Vec<ModelId>,
    #[serde(default)]
    admin: bool,
    expires_s: Option<u64>,
    #[serde(flatten)]
    limits: Limits,
}

#[derive(Debug, Deserialize)]
struct Tuned {
    cache_group: Option<TenantId>,
    #[serde(flatten)]
    limits: Limits,
}

async fn list(State(ops): State<Arc<Ops>>) -> Json<Value> {
    let access = access(&ops);
    let agreed = access.keys().values().map(|key| {
        let scope = access.scope(&key.sha256).cloned().unwrap_or_default();
        key_json(key, &scope, "cluster")
    });
    let configured = ops.keys.configured().map(|(sha256, tenant, admin)| {
        let key = KeyRecord { sha256: *sha256, tenant: tenant.clone(), admin, expires_unix_s: 0 };
        key_json(&key, &KeyScope::default(), "file")
    });
    Json(json!({"keys": agreed.chain(configured).collect::<Vec<_>>()}))
}

async fn create(
    State(ops): State<Arc<Ops>>,
    Extension(subject): Extension<Subject>,
    request: Request,
) -> Result<(StatusCode, Json<Value>), ApiError> {
    let KeyRequest { tenant, models, admin, expires_s, limits } = body(request).await?;
    if expires_s.is_some_and(|s| s == 0 || s > MAX_EXPIRES_S) {
        return Err(ApiError::field("expires_s", format!("must be 1 to {MAX_EXPIRES_S}")));
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let secret = format!("{PREFIX}{}", hex(&random()?));
    let key = KeyRecord {
        sha256: Sha256::digest(secret.as_bytes()).into(),
        tenant,
        admin,
        expires_unix_s: expires_s.map_or(0, |s| now + s),
    };
    subject.set(format!("key {} of {}", key_id(&key.sha256), key.tenant));
    let scope = KeyScope { models, quota: limits.into(), created_unix_s: now };
    let mut answer = key_json(&key, &scope, "cluster");
    if let Some(answer) = answer.as_object_mut() {
        answer.insert("key".into(), secret.into());
    }
    let issued = KeyIssued { key, scope, salt: TenantSalt(random()?) };
    change(&ops, "create_key", Change::KeyIssued(issued)).await?;
    Ok((StatusCode::CREATED, Json(answer)))
}

async fn revoke(
    State(ops): State<Arc<Ops>>,
    Extension(subject): Extension<Subject>,
    Path(id): Path<String>,
) -> Result<StatusCode, ApiError> {
    let hexadecimal = id.len() >= 8 && id.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
    if !hexadecimal {
        return Err(ApiError::field("id", "at least 8 digits of a key's id, as listed"));
    }
    let named = |sha256: &[u8; 32]| hex(sha256).starts_with(&id);
    let access = access(&ops);
    let mut found = access.keys().keys().filter(|sha256| named(sha256));
    match (found.next(), found.next()) {
        (Some(sha256), None) => {
            subject.set(format!("key {}", key_id(sha256)));
            change(&ops, "revoke_key", Change::KeyRevoked(*sha256)).await
        }
        (Some(_), Some(_)) => Err(ApiError::field("id", "several keys begin with these digits")),
        (None, _) if ops.keys.configured().any(|(sha256, ..)| named(sha256)) => Err(ApiError::Refused {
            why: "the key is in the coordinator's configuration file: remove it there and restart the coordinator".into(),
        }),
        (None, _) => Err(ApiError::Unknown { what: format!("key {id}") }),
    }
}

async fn tenants(State(ops): State<Arc<Ops>>) -> Json<Value> {
    let access = access(&ops);
    let tenants = access.tenants().values().map(|tenant| {
        let mut json = limits(&tenant.quota);
        json["tenant"] = tenant.tenant.as_str().into();
        json["cache_group"] = access.cache_group(&tenant.tenant).map(TenantId::as_str).into();
        json
    });
    Json(json!({"tenants": tenants.collect::<Vec<_>>()}))
}

async fn tune(
    State(ops): State<Arc<Ops>>,
    Path(tenant): Path<String>,
    request: Request,
) -> Result<StatusCode, ApiError> {
    let tenant = TenantId::new(tenant).map_err(|error| ApiError::field("tenant", error.rule))?;
    let Tuned { cache_group, limits } = body(request).await?;
    let group = |name| Ok::<_, ApiError>(CacheGroup { name, salt: TenantSalt(random()?) });
    let tuned = TenantTuned {
        tenant,
        salt: TenantSalt(random()?),
        quota: limits.into(),
        cache_group: cache_group.map(group).transpose()?,
    };
    change(&ops, "tune_tenant", Change::TenantTuned(tuned)).await
}

async fn remove(State(ops): State<Arc<Ops>>, Path(tenant): Path<String>) -> Result<StatusCode, ApiError> {
    let tenant = TenantId::new(tenant).map_err(|error| ApiError::field("tenant", error.rule))?;
    if !access(&ops).tenants().contains_key(&tenant) {
        return Err(ApiError::Unknown { what: format!("tenant {tenant}") });
    }
    change(&ops, "remove_tenant", Change::TenantDropped(tenant)).await
}

fn key_json(key: &KeyRecord, scope: &KeyScope, from: &str) -> Value {
    let time = |seconds: u64| (seconds > 0).then_some(seconds);
    let mut json = limits(&scope.quota);
    json["id"] = key_id(&key.sha256).into();
    json["tenant"] = key.tenant.as_str().into();
    json["admin"] = key.admin.into();
    json["models"] = scope.models.iter().map(ModelId::as_str).collect();
    json["created_unix_s"] = time(scope.created_unix_s).into();
    json["expires_unix_s"] = time(key.expires_unix_s).into();
    json["from"] = from.into();
    json
}

fn limits(quota: &Quota) -> Value {
    let nonzero = |n: u64| (n > 0).then_some(n);
    json!({
        "rpm": nonzero(quota.requests_per_minute.into()),
        "tpm": nonzero(quota.tokens_per_minute),
        "concurrency": nonzero(quota.concurrency.into()),
    })
}

/// The agreed keys and tenants, as far as known here.
fn access(ops: &Ops) -> Arc<Access> {
    let table = ops.agreement.as_ref().and_then(|agreement| agreement.table());
    table.map(|table| Arc::clone(table.access())).unwrap_or_default()
}

async fn change(ops: &Ops, operation: &'static str, change: Change) -> Result<StatusCode, ApiError> {
    let agreement: &Agreement = ops.agreement.as_deref().ok_or_else(|| ApiError::Refused {
        why: "this coordinator has no data directory, so its keys are in its configuration file only".into(),
    })?;
    let made = agreement.change_table(change).await.map_err(to_api_error);
    count(ops, operation, &made);
    made.map(|()| StatusCode::NO_CONTENT)
}

pub(super) async fn body<T: DeserializeOwned>(request: Request) -> Result<T, ApiError> {
    let body = limits::read(request.into_body()).await?;
    serde_json::from_slice(&body).map_err(|error| ApiError::field("body", error.to_string()))
}

pub(super) fn random() -> Result<[u8; 32], ApiError> {
    random_bytes().map_err(|error| {
        tracing::error!(%error, "cannot read random bytes from the system; nothing is created");
        ApiError::Internal
    })
}
