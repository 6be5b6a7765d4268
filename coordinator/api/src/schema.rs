//! JSON schemas of requests.

use super::error::ApiError;
use super::fields::plain;
use super::limits::{MAX_SCHEMA_BYTES, MAX_SCHEMA_DEPTH};
use serde_json::Value;
use text::json_schema::{self, Unsupported};

/// Parses the schema in `field`.
pub(crate) fn parse(field: &str, raw: &str) -> Result<Value, ApiError> {
    if raw.len() > MAX_SCHEMA_BYTES {
        let reason = format!("has {} bytes, at most {MAX_SCHEMA_BYTES}", raw.len());
        return Err(ApiError::field(field, reason));
    }
    let schema: Value = serde_json::from_str(raw).map_err(|error| ApiError::field(field, plain(&error)))?;
    if !matches!(schema, Value::Object(_) | Value::Bool(_)) {
        return Err(ApiError::field(field, "must be a JSON schema"));
    }
    if depth(&schema) > MAX_SCHEMA_DEPTH {
        return Err(ApiError::field(field, format!("is nested deeper than {MAX_SCHEMA_DEPTH}")));
    }
    Ok(schema)
}

fn depth(value: &Value) -> usize {
    match value {
        Value::Object(members) => 1 + members.values().map(depth).max().unwrap_or(0),
        Value::Array(items) => 1 + items.iter().map(depth).max().unwrap_or(0),
        _ => 0,
    }
}

/// Prepares the schema in `field` for compilation. If `strict`, refuses everything that cannot be enforced.
pub(crate) fn prepare(field: &str, schema: &Value, strict: bool) -> Result<Value, ApiError> {
    json_schema::prepare(schema, strict).map_err(|Unsupported { path, reason }| {
        ApiError::field(field, format!("at {path}: {reason}, and strict is true"))
    })
}
