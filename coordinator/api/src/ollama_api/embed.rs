//! `/api/embed` and `/api/embeddings`: texts to vectors of L2 norm 1.

use crate::embeddings::unit;
use crate::encode::{EncodePlan, Gathered, check_length};
use crate::error::ApiError;
use crate::fields::Fields;
use crate::limits::MAX_TEXTS;
use crate::ollama::{self, LATEST, options};
use crate::plan::{Sources, named_model, wrong_task};
use crate::prompt::{Prompt, texts_or_tokens};
use proto::ids::{ModelId, RequestId};
use proto::message::EncodeText;
use proto::operation::Operation;
use proto::served_model::ModelTask;
use serde::Serialize;
use std::time::Instant;

const FIELDS: [&str; 6] = ["model", "name", "input", "truncate", "dimensions", "options"];
const ONE_FIELDS: [&str; 4] = ["model", "name", "prompt", "options"];

/// Parts of a request that the answer needs.
#[derive(Debug)]
pub(super) struct Given {
    arrived: Instant,
    /// Values of each vector that are sent.
    dimensions: usize,
}

#[derive(Debug, Serialize)]
pub(super) struct EmbedResponse {
    model: String,
    embeddings: Vec<Vec<f32>>,
    /// Nanoseconds.
    total_duration: u64,
    prompt_eval_count: u64,
}

#[derive(Debug, Serialize)]
pub(super) struct EmbeddingResponse {
    embedding: Vec<f32>,
}

/// Parses a request to `/api/embed`.
pub(super) fn plan(body: &[u8], sources: &Sources<'_>) -> Result<EncodePlan<Given>, ApiError> {
    let fields = Fields::parse(body, &FIELDS)?;
    let truncate = fields.get("truncate")?.unwrap_or(true);
    texts(&fields, "input", truncate, sources)
}

/// Parses a request to `/api/embeddings`.
pub(super) fn plan_one(body: &[u8], sources: &Sources<'_>) -> Result<EncodePlan<Given>, ApiError> {
    let fields = Fields::parse(body, &ONE_FIELDS)?;
    if fields.raw("prompt").is_some_and(|prompt| !prompt.starts_with('"')) {
        return Err(ApiError::field("prompt", "must be a text"));
    }
    texts(&fields, "prompt", true, sources)
}

fn texts(
    fields: &Fields<'_>,
    name: &'static str,
    truncate: bool,
    sources: &Sources<'_>,
) -> Result<EncodePlan<Given>, ApiError> {
    let arrived = Instant::now();
    let (model, served) = named_model(ollama::model_name(fields)?, fields, sources)?;
    let served = served.ok_or(ApiError::NotOffered { operation: Operation::Embed })?;
    let ModelTask::Embed { width } = served.task else { return Err(wrong_task(&served)) };
    let limit = served.max_model_len;
    options::read(fields)?.ranged("num_ctx", 0..=limit).map_err(options::named)?;
    let tokenizer = &model.tokenizer;
    let room = (limit as usize).saturating_sub(tokenizer.with_ends(Vec::new()).len());
    let text = |(at, given): (usize, Prompt)| {
        let field = format!("{name}[{at}]");
        let Prompt::Text(text) = given else { return Err(ApiError::field(name, "must be a text or texts")) };
        if text.is_empty() {
            return Err(ApiError::field(field, "is empty"));
        }
        let mut tokens = tokenizer.encode(&text, false);
        if truncate {
            tokens.truncate(room);
        }
        let tokens = tokenizer.with_ends(tokens);
        check_length(&field, &tokens, limit)?;
        Ok(EncodeText { tokens, segment_start: None })
    };
    let given = texts_or_tokens::<MAX_TEXTS>(fields, name)?;
    let texts = given.into_iter().enumerate().map(text).collect::<Result<_, ApiError>>()?;
    let dimensions = fields.ranged("dimensions", 1..=width)?.unwrap_or(width) as usize;
    Ok(EncodePlan {
        operation: Operation::Embed,
        model: model.id.clone(),
        texts,
        shape: Given { arrived, dimensions },
    })
}

impl Given {
    fn vector(&self, values: &[f32]) -> Vec<f32> {
        unit(values.get(..self.dimensions).unwrap_or(values))
    }

    /// The answer of `/api/embed`.
    pub(super) fn answer(self, _: &RequestId, model: ModelId, gathered: &Gathered) -> EmbedResponse {
        EmbedResponse {
            model: format!("{model}{LATEST}"),
            embeddings: gathered.texts.iter().map(|values| self.vector(values)).collect(),
            total_duration: u64::try_from(self.arrived.elapsed().as_nanos()).unwrap_or(u64::MAX),
            prompt_eval_count: gathered.tokens,
        }
    }

    /// The answer of `/api/embeddings`.
    pub(super) fn one(self, _: &RequestId, _: ModelId, gathered: &Gathered) -> EmbeddingResponse {
        let values = gathered.texts.first().map_or(&[][..], Vec::as_slice);
        EmbeddingResponse { embedding: self.vector(values) }
    }
}
