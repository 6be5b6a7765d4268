//! `/v1/embeddings`: texts to vectors of L2 norm 1.

use super::encode::{EncodePlan, Gathered, check_length};
use super::error::ApiError;
use super::fields::Fields;
use super::limits::MAX_TEXTS;
use super::params::check_tokens;
use super::plan::{Sources, check_text, requested_model, wrong_task};
use super::prompt::{Prompt, texts_or_tokens};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use proto::ids::ModelId;
use proto::message::EncodeText;
use proto::operation::Operation;
use proto::served_model::ModelTask;
use serde::{Deserialize, Serialize};

const INPUT: &str = "input";
const FIELDS: [&str; 5] = ["model", INPUT, "encoding_format", "dimensions", "add_special_tokens"];

/// How vectors are truncated and encoded.
#[derive(Debug, Clone, Copy)]
pub struct EmbeddingsFormat {
    format: Format,
    /// Values of each vector that are sent.
    dimensions: usize,
}

/// Encoding of a vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Format {
    #[default]
    Float,
    /// Its f32 values, little-endian, in base64.
    Base64,
}

/// Parses and checks a request.
pub fn plan(body: &[u8], sources: &Sources<'_>) -> Result<EncodePlan<EmbeddingsFormat>, ApiError> {
    let fields = Fields::parse(body, &FIELDS)?;
    let (model, served) = requested_model(&fields, sources)?;
    let served = served.ok_or(ApiError::NotOffered { operation: Operation::Embed })?;
    let ModelTask::Embed { width } = served.task else { return Err(wrong_task(&served)) };
    let special = fields.get("add_special_tokens")?.unwrap_or(true);
    let tokenizer = &model.tokenizer;
    let text = |(at, given): (usize, Prompt)| {
        let field = format!("{INPUT}[{at}]");
        let empty = match &given {
            Prompt::Text(text) => text.is_empty(),
            Prompt::Tokens(tokens) => tokens.is_empty(),
        };
        if empty {
            return Err(ApiError::field(field, "is empty"));
        }
        let tokens = match given {
            Prompt::Text(text) => {
                check_text(&model, text.len(), Some(served.max_model_len))?;
                let tokens = tokenizer.encode(&text, false);
                if special { tokenizer.with_ends(tokens) } else { tokens }
            }
            Prompt::Tokens(tokens) => {
                check_tokens(&field, &tokens, tokenizer.vocab_size())?;
                tokens
            }
        };
        check_length(&field, &tokens, served.max_model_len)?;
        Ok(EncodeText { tokens, segment_start: None })
    };
    let given = texts_or_tokens::<MAX_TEXTS>(&fields, INPUT)?;
    let texts = given.into_iter().enumerate().map(text).collect::<Result<_, ApiError>>()?;
    let shape = EmbeddingsFormat {
        format: fields.get("encoding_format")?.unwrap_or_default(),
        dimensions: fields.ranged("dimensions", 1..=width)?.unwrap_or(width) as usize,
    };
    Ok(EncodePlan { operation: Operation::Embed, model: model.id.clone(), texts, shape })
}

/// A response in OpenAI's form. A `serde_json::Value` would convert each f32 to f64 and write twice the
/// digits.
#[derive(Debug, Serialize)]
pub struct EmbeddingsResponse {
    object: &'static str,
    data: Vec<Item>,
    model: ModelId,
    usage: Usage,
}

#[derive(Debug, Serialize)]
struct Item {
    object: &'static str,
    index: usize,
    embedding: Vector,
}

#[derive(Debug, PartialEq, Serialize)]
#[serde(untagged)]
enum Vector {
    Float(Vec<f32>),
    Base64(String),
}

#[derive(Debug, Serialize)]
struct Usage {
    prompt_tokens: u64,
    total_tokens: u64,
}

impl EmbeddingsFormat {
    /// Builds the response from the vectors.
    pub fn answer(self, model: ModelId, gathered: &Gathered) -> EmbeddingsResponse {
        let item = |(index, values): (usize, &Vec<f32>)| Item {
            object: "embedding",
            index,
            embedding: self.vector(values),
        };
        let data = gathered.texts.iter().enumerate().map(item).collect();
        let usage = Usage { prompt_tokens: gathered.tokens, total_tokens: gathered.tokens };
        EmbeddingsResponse { object: "list", data, model, usage }
    }

    fn vector(self, values: &[f32]) -> Vector {
        let unit = unit(values.get(..self.dimensions).unwrap_or(values));
        match self.format {
            Format::Float => Vector::Float(unit),
            Format::Base64 => {
                let bytes: Vec<u8> = unit.iter().flat_map(|value| value.to_le_bytes()).collect();
                Vector::Base64(STANDARD.encode(bytes))
            }
        }
    }
}

/// `values` scaled to L2 norm 1. A zero vector stays zero.
pub(super) fn unit(values: &[f32]) -> Vec<f32> {
    let square: f64 = values.iter().map(|value| f64::from(*value).powi(2)).sum();
    if square == 0.0 {
        return values.to_vec();
    }
    values.iter().map(|value| (f64::from(*value) / square.sqrt()) as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vector(format: Format, dimensions: usize, values: &[f32]) -> Vector {
        EmbeddingsFormat { format, dimensions }.vector(values)
    }

    #[test]
    fn vectors_are_truncated_and_then_normalized() {
        assert_eq!(
            vector(Format::Float, 3, &[3.0, 4.0, 12.0]),
            Vector::Float(vec![3.0 / 13.0, 4.0 / 13.0, 12.0 / 13.0])
        );
        assert_eq!(vector(Format::Float, 2, &[3.0, 4.0, 12.0]), Vector::Float(vec![0.6, 0.8]));
        assert_eq!(vector(Format::Float, 2, &[0.0, 0.0, 1.0]), Vector::Float(vec![0.0, 0.0]));
        // The norm neither overflows nor underflows.
        for scale in [2f32.powi(120), 2f32.powi(-120)] {
            let values = [3.0 * scale, 4.0 * scale];
            assert_eq!(vector(Format::Float, 2, &values), Vector::Float(vec![0.6, 0.8]));
        }
        // 0.6f32 and 0.8f32, little-endian.
        assert_eq!(vector(Format::Base64, 2, &[3.0, 4.0]), Vector::Base64("mpkZP83MTD8=".into()));
    }

    #[test]
    fn floats_are_written_in_the_fewest_digits_that_read_back() {
        let shape = EmbeddingsFormat { format: Format::Float, dimensions: 2 };
        let gathered =
            Gathered { texts: vec![vec![3.0, 4.0]], tokens: 5, headers: axum::http::HeaderMap::new() };
        let json = serde_json::to_string(&shape.answer(ModelId::new("m").unwrap(), &gathered)).unwrap();
        let expected = r#"{"object":"list","data":[{"object":"embedding","index":0,"embedding":[0.6,0.8]}],"#;
        assert_eq!(
            json,
            format!(r#"{expected}"model":"m","usage":{{"prompt_tokens":5,"total_tokens":5}}}}"#)
        );
    }
}
