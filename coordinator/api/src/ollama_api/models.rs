//! `/api/tags`, `/api/show` and `/api/ps`: what is known of the models.

use crate::AppState;
use crate::auth::{Caller, hex};
use crate::error::ApiError;
use crate::fields::Fields;
use crate::limits;
use crate::model_list::rfc3339;
use crate::ollama::{self, LATEST};
use axum::Json;
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use dispatch::models::OfferedModel;
use proto::ids::ModelId;
use proto::served_model::{BUILT_IN, ModelTask, ServedModel};
use serde_json::{Map, Value, json};
use std::sync::Arc;

const FIELDS: [&str; 2] = ["model", "name"];
/// The end of a model of which no end is known.
const NEVER: &str = "9999-12-31T23:59:59Z";

/// A model that is listed: all that generate or embed.
struct Known {
    name: ModelId,
    offered: Arc<OfferedModel>,
    /// The served model; `None` if no worker has the deployed model.
    served: Option<ServedModel>,
    /// Whether a worker has it ready.
    ready: bool,
    /// The model that an adapter adds to.
    parent: Option<ModelId>,
}

/// The models that the caller may use, in the order of `/v1/models`. A deployed model is listed once its files are
/// known.
fn known(state: &AppState, caller: &Caller) -> Vec<Known> {
    let of = |name: ModelId, id: &ModelId, offered: Arc<OfferedModel>, parent| {
        let (served, ready) = (state.dispatch.model(id), state.dispatch.serves(id));
        Known { name, offered, served, ready, parent }
    };
    let configured = state
        .models
        .configured()
        .iter()
        .map(|model| of(model.id.clone(), &model.id, Arc::clone(model), None));
    let adapters = state.dispatch.adapters().into_iter().filter_map(|adapter| {
        let offered = state.models.get(adapter.parent.as_str())?;
        Some(of(adapter.name.clone(), &adapter.name, offered, Some(adapter.parent)))
    });
    let all = state.models.deployed();
    let deployed = all.models().iter().filter_map(|(name, model)| {
        let active = model.active.as_ref()?;
        Some((name.clone(), Arc::clone(active)))
    });
    let deployed = deployed.map(|(name, active)| {
        let id = active.id.clone();
        of(name, &id, active, None)
    });
    let is_deployed = |known: &Known| known.offered.id.is_version();
    let is_listed = |known: &Known| match &known.served {
        Some(served) => !matches!(served.task, ModelTask::Rerank { .. }),
        None => is_deployed(known),
    };
    let all = configured.chain(adapters).chain(deployed);
    all.filter(|known| caller.may_use(&known.name) && is_listed(known)).collect()
}

impl Known {
    /// The fields of lists.
    fn listed(&self, state: &AppState) -> Map<String, Value> {
        let name = format!("{}{LATEST}", self.name);
        // The name of a version ends with the first digits of its digest.
        let digest = match &self.served {
            Some(served) => hex(&served.model_digest),
            None => self
                .offered
                .id
                .as_str()
                .split_once('@')
                .map_or_else(String::new, |(_, digits)| digits.to_owned()),
        };
        Map::from_iter([
            ("name".to_owned(), Value::from(name.as_str())),
            ("model".to_owned(), name.into()),
            ("modified_at".to_owned(), rfc3339(state.started).into()),
            ("size".to_owned(), self.offered.facts.bytes.into()),
            ("digest".to_owned(), digest.into()),
            ("details".to_owned(), self.details()),
        ])
    }

    fn details(&self) -> Value {
        let facts = &self.offered.facts;
        let families = Some([&facts.architecture]).filter(|[name]| !name.is_empty());
        json!({
            "parent_model": self.parent.as_ref().map_or("", ModelId::as_str),
            "family": facts.architecture, "families": families,
            "parameter_size": in_short(facts.parameters),
            "quantization_level": facts.tensor_type.map(|ty| ty.name()).unwrap_or_default(),
        })
    }

    /// The longest sequence, in tokens.
    fn context(&self) -> u64 {
        self.served.as_ref().map_or(self.offered.context as u64, |served| served.max_model_len.into())
    }

    fn capabilities(&self) -> Vec<&'static str> {
        let task = self.served.as_ref().map(|served| served.task);
        if let Some(ModelTask::Embed { .. }) = task {
            return vec!["embedding"];
        }
        let chats = self.offered.template.is_some();
        let all = [
            ("completion", true),
            ("tools", chats),
            ("vision", task.is_some_and(ModelTask::sees_images)),
            ("thinking", chats && self.offered.dialect.thinks()),
        ];
        all.into_iter().filter(|(_, has)| *has).map(|(name, _)| name).collect()
    }

    /// Bytes of GPU memory that one copy takes. `None` if an engine of another project has it.
    fn gpu_bytes(&self) -> Option<u64> {
        let served = self.served.as_ref().filter(|served| served.engine == BUILT_IN)?;
        let device = served.numeric_class.split('/').nth(1)?;
        Some(if device == "cpu" { 0 } else { self.offered.facts.bytes })
    }

    /// Name and value of each parameter, a line each, as in Ollama's model files.
    fn parameters(&self) -> String {
        let sampling = &self.offered.sampling;
        let lines = [
            ("num_ctx", self.context().to_string()),
            ("temperature", sampling.temperature.to_string()),
            ("top_k", sampling.top_k.to_string()),
            ("top_p", sampling.top_p.to_string()),
            ("min_p", sampling.min_p.to_string()),
            ("repeat_penalty", sampling.repetition_penalty.to_string()),
        ];
        lines.map(|(name, value)| format!("{name:<30} {value}")).join("\n")
    }

    fn shown(&self, state: &AppState) -> Value {
        let facts = &self.offered.facts;
        let mut info = Map::new();
        if !facts.architecture.is_empty() {
            info.insert("general.architecture".into(), facts.architecture.as_str().into());
            info.insert(format!("{}.context_length", facts.architecture), self.context().into());
            if let Some(ModelTask::Embed { width }) = self.served.as_ref().map(|served| served.task) {
                info.insert(format!("{}.embedding_length", facts.architecture), width.into());
            }
        }
        if facts.parameters > 0 {
            info.insert("general.parameter_count".into(), facts.parameters.into());
        }
        json!({
            "modified_at": rfc3339(state.started), "details": self.details(), "model_info": info,
            "capabilities": self.capabilities(), "parameters": self.parameters(),
            "template": self.offered.template.as_ref().map_or("", |template| template.source()),
        })
    }
}

/// A number of parameters: `134.5M`, `8.0B`. Empty if it is not known.
fn in_short(parameters: u64) -> String {
    let of = |unit: f64, letter: char| format!("{:.1}{letter}", parameters as f64 / unit);
    match parameters {
        0 => String::new(),
        1..1_000 => parameters.to_string(),
        1_000..1_000_000 => of(1e3, 'K'),
        1_000_000..1_000_000_000 => of(1e6, 'M'),
        _ => of(1e9, 'B'),
    }
}

/// The models of the caller, which `serve` inserted.
fn of_caller(state: &AppState, request: &Request) -> Result<Vec<Known>, ApiError> {
    let caller = request.extensions().get::<Caller>().ok_or(ApiError::InvalidApiKey)?;
    Ok(known(state, caller))
}

/// `/api/tags`.
pub(super) fn tags(state: &AppState, request: &Request) -> Result<Response, ApiError> {
    let models: Vec<_> = of_caller(state, request)?.iter().map(|known| known.listed(state)).collect();
    Ok(Json(json!({ "models": models })).into_response())
}

/// `/api/ps`: the models that are ready.
pub(super) fn running(state: &AppState, request: &Request) -> Result<Response, ApiError> {
    let running = |known: &Known| {
        let mut listed = known.listed(state);
        listed.remove("modified_at");
        listed.insert("expires_at".into(), NEVER.into());
        listed.insert("context_length".into(), known.context().into());
        listed.extend(known.gpu_bytes().map(|bytes| ("size_vram".to_owned(), bytes.into())));
        listed
    };
    let models: Vec<_> = of_caller(state, request)?.iter().filter(|known| known.ready).map(running).collect();
    Ok(Json(json!({ "models": models })).into_response())
}

/// `/api/show`.
pub(super) async fn show(state: &AppState, request: Request) -> Result<Response, ApiError> {
    let known = of_caller(state, &request)?;
    let body = limits::read(request.into_body()).await?;
    let name = ollama::model_name(&Fields::parse(&body, &FIELDS)?)?;
    let name = name.ok_or_else(|| ApiError::field("model", "is missing"))?;
    match known.iter().find(|known| known.name.as_str() == name) {
        Some(known) => Ok(Json(known.shown(state)).into_response()),
        None if state.models.is_incomplete() => Err(ApiError::ModelsUnknown),
        None => Err(ApiError::ModelNotFound(name.chars().take(ModelId::MAX_LEN).collect())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_counted_in_thousands() {
        for (count, short) in
            [(0, ""), (999, "999"), (1_500, "1.5K"), (134_515_008, "134.5M"), (8_030_261_248, "8.0B")]
        {
            assert_eq!(in_short(count), short);
        }
    }
}
