//! `GET /v1/models` and `GET /v1/models/{model}`: objects with the fields of both OpenAI's and Anthropic's
//! model objects.
//!
//! A model is listed once a worker serves it, and only for callers whose key may use it. A deployed model is always
//! listed, since a request has it loaded.

use super::AppState;
use super::auth::Caller;
use super::error::ApiError;
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::{Extension, Json};
use proto::ids::ModelId;
use proto::served_model::ModelTask;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// Most models of a page: Anthropic's limit.
const MAX_PAGE: usize = 1_000;

/// A model that the caller can use now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct ModelObject {
    id: String,
    object: &'static str,
    #[serde(rename = "type")]
    kind: &'static str,
    display_name: String,
    /// Start of this coordinator, in seconds since 1970.
    created: u64,
    /// The same in RFC 3339.
    created_at: String,
    owned_by: &'static str,
    /// Tokens of prompt and output together. `None` for an operation without tokens.
    max_model_len: Option<u32>,
    max_input_tokens: Option<u32>,
    max_tokens: Option<u32>,
    task: &'static str,
    /// The model that an adapter adds to.
    #[serde(skip_serializing_if = "Option::is_none")]
    parent: Option<String>,
    /// State of a deployed model: `absent`, `loading`, `ready` and others.
    #[serde(skip_serializing_if = "Option::is_none")]
    state: Option<&'static str>,
    /// Per cent of the present stage of a deployed model that are done.
    #[serde(skip_serializing_if = "Option::is_none")]
    progress: Option<u16>,
}

/// A page of the list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct ModelList {
    object: &'static str,
    data: Vec<ModelObject>,
    first_id: Option<String>,
    last_id: Option<String>,
    has_more: bool,
}

/// Anthropic's paging. Without `limit` the page has all models.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Page {
    limit: Option<usize>,
    after_id: Option<String>,
    before_id: Option<String>,
}

/// One page of the models that the caller can use. `serve` inserted the caller.
pub(super) async fn list(
    State(state): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    page: Result<Query<Page>, QueryRejection>,
) -> Result<Json<ModelList>, ApiError> {
    let Query(page) = page.map_err(|error| ApiError::field("query", error.body_text()))?;
    page_of(served(&state, &caller), &page).map(Json)
}

/// The model that the path names: the rest of the path, which may have slashes and percent-encoding.
pub(super) async fn retrieve(
    State(state): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<ModelObject>, ApiError> {
    // No model has a name that is not UTF-8.
    let id = id.map_or_else(|_| String::from(char::REPLACEMENT_CHARACTER), |Path(id)| id);
    match served(&state, &caller).into_iter().find(|model| model.id == id) {
        Some(model) => Ok(Json(model)),
        None if state.models.is_incomplete() => Err(ApiError::ModelsUnknown),
        None => Err(ApiError::ModelNotFound(id.chars().take(ModelId::MAX_LEN).collect())),
    }
}

fn served(state: &AppState, caller: &Caller) -> Vec<ModelObject> {
    let created_at = rfc3339(state.started);
    let model = |id: &ModelId, max_model_len: Option<u32>, task| ModelObject {
        id: id.as_str().to_owned(),
        object: "model",
        kind: "model",
        display_name: id.as_str().to_owned(),
        created: state.started,
        created_at: created_at.clone(),
        owned_by: "kvasir",
        max_model_len,
        max_input_tokens: max_model_len,
        max_tokens: max_model_len,
        task,
        parent: None,
        state: None,
        progress: None,
    };
    let configured = state.models.configured().iter().filter(|model| caller.may_use(&model.id));
    let configured = configured.filter_map(|offered| {
        let served = state.dispatch.model(&offered.id)?;
        Some(model(&offered.id, Some(served.max_model_len), served.task.name()))
    });
    let offered = state.dispatch.offered();
    let sessions = offered.iter().filter(|(operation, id)| operation.is_session() && caller.may_use(id));
    let adapters = state.dispatch.adapters().into_iter().filter(|adapter| {
        caller.may_use(&adapter.name) && state.models.get(adapter.parent.as_str()).is_some()
    });
    let adapters = adapters.filter_map(|adapter| {
        let served = state.dispatch.model(&adapter.name)?;
        let listed = model(&adapter.name, Some(served.max_model_len), served.task.name());
        Some(ModelObject { parent: Some(adapter.parent.to_string()), ..listed })
    });
    let all = state.models.deployed();
    let deployed = all.models().iter().filter(|(name, _)| caller.may_use(name)).map(|(name, deployed)| {
        let served = deployed.active.as_ref().and_then(|active| state.dispatch.model(&active.id));
        let progress = &deployed.progress;
        let (max_model_len, task) = match served {
            Some(served) => (Some(served.max_model_len), served.task),
            None => (None, ModelTask::Generate),
        };
        let percent = (progress.permille > 0).then_some(progress.permille / 10);
        let listed = model(name, max_model_len, task.name());
        ModelObject { state: Some(progress.state.name()), progress: percent, ..listed }
    });
    let configured = configured.chain(adapters).chain(deployed);
    configured.chain(sessions.map(|(operation, id)| model(id, None, operation.name()))).collect()
}

fn page_of(mut models: Vec<ModelObject>, page: &Page) -> Result<ModelList, ApiError> {
    let limit = page.limit.unwrap_or(usize::MAX);
    if limit == 0 || page.limit > Some(MAX_PAGE) {
        return Err(ApiError::field("limit", format!("is {limit}; allowed are 1 to {MAX_PAGE}")));
    }
    let position = |field: &str, id: &str| {
        let found = models.iter().position(|model| model.id == id);
        found.ok_or_else(|| ApiError::field(field, format!("names {id:?}, which is not in the list")))
    };
    let (from, until) = match (&page.after_id, &page.before_id) {
        (Some(_), Some(_)) => return Err(ApiError::field("before_id", "cannot be combined with after_id")),
        (Some(id), None) => (position("after_id", id)? + 1, models.len()),
        (None, Some(id)) => (0, position("before_id", id)?),
        (None, None) => (0, models.len()),
    };
    let count = (until - from).min(limit);
    // With `before_id`, the page ends directly before that model.
    let start = if page.before_id.is_some() { until - count } else { from };
    let data: Vec<_> = models.drain(start..start + count).collect();
    let id = |model: Option<&ModelObject>| model.map(|model| model.id.clone());
    Ok(ModelList {
        object: "list",
        first_id: id(data.first()),
        last_id: id(data.last()),
        has_more: count < until - from,
        data,
    })
}

/// Seconds since 1970 as `2026-11-27T16:49:14Z`. Years of more than four digits give 1970.
pub(super) fn rfc3339(unix_seconds: u64) -> String {
    let time = i64::try_from(unix_seconds).ok().and_then(|s| OffsetDateTime::from_unix_timestamp(s).ok());
    let text = time.unwrap_or(OffsetDateTime::UNIX_EPOCH).format(&Rfc3339);
    text.unwrap_or_else(|_| String::from("1970-01-01T00:00:00Z"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn models(ids: &[&str]) -> Vec<ModelObject> {
        let model = |id: &&str| ModelObject {
            id: (*id).to_owned(),
            object: "model",
            kind: "model",
            display_name: (*id).to_owned(),
            created: 0,
            created_at: rfc3339(0),
            owned_by: "kvasir",
            max_model_len: Some(512),
            max_input_tokens: Some(512),
            max_tokens: Some(512),
            task: "generate",
            parent: None,
            state: None,
            progress: None,
        };
        ids.iter().map(model).collect()
    }

    fn ids(page: Page) -> Result<(Vec<String>, bool), String> {
        let list = page_of(models(&["a", "b", "c", "d"]), &page).map_err(|error| error.to_string())?;
        let ids: Vec<_> = list.data.into_iter().map(|model| model.id).collect();
        assert_eq!((list.first_id.as_ref(), list.last_id.as_ref()), (ids.first(), ids.last()));
        Ok((ids, list.has_more))
    }

    #[test]
    fn pages_cover_the_list_in_both_directions() {
        let page = |limit, after: Option<&str>, before: Option<&str>| {
            let (after_id, before_id) = (after.map(str::to_owned), before.map(str::to_owned));
            ids(Page { limit, after_id, before_id })
        };
        let is = |ids: &[&str], more| Ok((ids.iter().map(|id| (*id).to_owned()).collect(), more));
        assert_eq!(page(None, None, None), is(&["a", "b", "c", "d"], false));
        assert_eq!(page(Some(3), None, None), is(&["a", "b", "c"], true));
        assert_eq!(page(Some(3), Some("c"), None), is(&["d"], false));
        assert_eq!(page(Some(1), Some("b"), None), is(&["c"], true));
        assert_eq!(page(None, Some("d"), None), is(&[], false));
        assert_eq!(page(Some(2), None, Some("d")), is(&["b", "c"], true));
        assert_eq!(page(Some(2), None, Some("c")), is(&["a", "b"], false));
        for (limit, after, before, field) in [
            (Some(0), None, None, "limit"),
            (Some(1_001), None, None, "limit"),
            (None, Some("x"), None, "after_id"),
            (None, None, Some("x"), "before_id"),
            (None, Some("a"), Some("b"), "before_id"),
        ] {
            let refused = page(limit, after, before).unwrap_err();
            assert!(refused.contains(field), "{refused}");
        }
    }

    #[test]
    fn times_are_written_in_rfc_3339() {
        assert_eq!(rfc3339(1_795_798_154), "2026-11-27T16:49:14Z");
        assert_eq!(rfc3339(u64::MAX), "1970-01-01T00:00:00Z");
    }
}
