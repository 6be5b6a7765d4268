//! `/v1/rerank`: documents sorted by relevance to a query. The form is vLLM's and Jina's, which is Cohere's
//! with `usage` (docs/decisions/0006-normalize-embeddings-and-scores.md).

use super::encode::{EncodePlan, Gathered, check_length};
use super::error::ApiError;
use super::fields::Fields;
use super::limits::MAX_TEXTS;
use super::params::Bounded;
use super::plan::{Sources, check_text, requested_model, wrong_task};
use proto::ids::{ModelId, RequestId};
use proto::message::EncodeText;
use proto::operation::Operation;
use proto::served_model::ModelTask;
use serde::{Deserialize, Serialize};

const FIELDS: [&str; 6] = ["model", "query", "documents", "top_n", "return_documents", "use_activation"];

/// How scores are converted, sorted and written.
#[derive(Debug)]
pub struct RerankFormat {
    top_n: usize,
    /// Whether scores go through a sigmoid.
    sigmoid: bool,
    /// Texts to return. `None` if `return_documents` is false.
    documents: Option<Vec<String>>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a text or an object with a text")]
enum DocumentInput {
    Text(String),
    Object { text: String },
}

/// Parses and checks a request.
pub fn plan(body: &[u8], sources: &Sources<'_>) -> Result<EncodePlan<RerankFormat>, ApiError> {
    let fields = Fields::parse(body, &FIELDS)?;
    let (model, served) = requested_model(&fields, sources)?;
    let served = served.ok_or(ApiError::NotOffered { operation: Operation::Rerank })?;
    let ModelTask::Rerank { scores } = served.task else { return Err(wrong_task(&served)) };
    if scores != 1 {
        let reason = format!("{} returns {scores} scores for a pair; sorting needs exactly one", served.id);
        return Err(ApiError::field("model", reason));
    }
    let query: String = fields.get("query")?.ok_or_else(|| ApiError::field("query", "is missing"))?;
    let given: Option<Bounded<DocumentInput, MAX_TEXTS>> = fields.get("documents")?;
    let given = given.ok_or_else(|| ApiError::field("documents", "is missing"))?.0;
    if given.is_empty() {
        return Err(ApiError::field("documents", "is empty"));
    }
    let documents: Vec<String> = given
        .into_iter()
        .map(|given| match given {
            DocumentInput::Text(text) | DocumentInput::Object { text } => text,
        })
        .collect();
    let tokenizer = &model.tokenizer;
    let fits = |text: &String| check_text(&model, text.len(), Some(served.max_model_len));
    fits(&query)?;
    documents.iter().try_for_each(fits)?;
    let pairs = tokenizer.pairs(&query);
    let pair = |(at, document): (usize, &String)| {
        let (tokens, second) = pairs.with(document);
        check_length(&format!("documents[{at}]"), &tokens, served.max_model_len)?;
        Ok(EncodeText { tokens, segment_start: second.and_then(|second| u32::try_from(second).ok()) })
    };
    let texts = documents.iter().enumerate().map(pair).collect::<Result<_, ApiError>>()?;
    let top_n = match fields.get("top_n")?.unwrap_or(0) {
        0 => usize::MAX,
        n => n,
    };
    let sigmoid = fields.get("use_activation")?.unwrap_or(true);
    let return_documents = fields.get("return_documents")?.unwrap_or(true);
    let shape = RerankFormat { top_n, sigmoid, documents: return_documents.then_some(documents) };
    Ok(EncodePlan { operation: Operation::Rerank, model: model.id.clone(), texts, shape })
}

#[derive(Debug, Serialize)]
pub struct RerankResponse {
    id: String,
    object: &'static str,
    model: ModelId,
    results: Vec<Ranked>,
    usage: Usage,
}

#[derive(Debug, PartialEq, Serialize)]
struct Ranked {
    index: usize,
    relevance_score: f32,
    #[serde(skip_serializing_if = "Option::is_none")]
    document: Option<Document>,
}

#[derive(Debug, PartialEq, Serialize)]
struct Document {
    text: String,
}

#[derive(Debug, Serialize)]
struct Usage {
    prompt_tokens: u64,
    total_tokens: u64,
}

impl RerankFormat {
    /// Builds the response, best document first. Ties go to the earlier document.
    pub fn answer(mut self, id: &RequestId, model: ModelId, gathered: &Gathered) -> RerankResponse {
        let score = |values: &Vec<f32>| values.first().copied().unwrap_or(f32::NEG_INFINITY);
        let mut scored: Vec<(usize, f32)> = gathered.texts.iter().map(score).enumerate().collect();
        // Sorted before the sigmoid, which saturates to 0 or 1.
        scored.sort_by(|a, b| b.1.total_cmp(&a.1));
        scored.truncate(self.top_n);
        let ranked = |(index, score): (usize, f32)| {
            let text = self.documents.as_mut().and_then(|documents| documents.get_mut(index));
            Ranked {
                index,
                relevance_score: if self.sigmoid { sigmoid(score) } else { score },
                document: text.map(|text| Document { text: std::mem::take(text) }),
            }
        };
        let results = scored.into_iter().map(ranked).collect();
        let usage = Usage { prompt_tokens: gathered.tokens, total_tokens: gathered.tokens };
        RerankResponse { id: format!("rerank-{id}"), object: "list", model, results, usage }
    }
}

fn sigmoid(score: f32) -> f32 {
    (1.0 / (1.0 + (-f64::from(score)).exp())) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(shape: RerankFormat, scores: &[f32]) -> RerankResponse {
        let texts = scores.iter().map(|score| vec![*score]).collect();
        let gathered = Gathered { texts, tokens: 9, headers: axum::http::HeaderMap::new() };
        shape.answer(&RequestId::new("r").unwrap(), ModelId::new("m").unwrap(), &gathered)
    }

    #[test]
    fn the_best_document_comes_first_and_ties_keep_their_order() {
        let shape = RerankFormat { top_n: usize::MAX, sigmoid: true, documents: None };
        let found = answer(shape, &[0.0, 200.0, -1.0, 300.0, 0.0]);
        let order: Vec<usize> = found.results.iter().map(|ranked| ranked.index).collect();
        assert_eq!(order, [3, 1, 0, 4, 2], "also where the sigmoid is 1 for two");
        assert_eq!(found.results[2].relevance_score, 0.5);
        assert_eq!(found.results[4].relevance_score, 0.268_941_43);
    }

    #[test]
    fn results_are_limited_to_top_n_and_have_their_documents() {
        let documents = Some(vec!["a".into(), "b".into(), "c".into()]);
        let found = answer(RerankFormat { top_n: 2, sigmoid: false, documents }, &[1.0, -2.0, 3.0]);
        let expected = r#"[{"index":2,"relevance_score":3.0,"document":{"text":"c"}},{"index":0,"relevance_score":1.0,"document":{"text":"a"}}]"#;
        assert_eq!(serde_json::to_string(&found.results).unwrap(), expected);
    }
}
