//! The InferencePool of the Gateway API's inference extension, v1: no registry has its types, so they are written here by
//! its reference (https://gateway-api-inference-extension.sigs.k8s.io/reference/spec), with the bounds that the API server
//! holds a pool to. Where releases differ the narrower one counts: 1.0 needs a picker, and takes one port.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::{Deserialize, Deserializer, Serialize, de};
use std::collections::BTreeMap;
use std::num::NonZeroU16;

/// An object of this kind, as an operator writes it.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct InferencePool {
    api_version: String,
    kind: String,
    metadata: ObjectMeta,
    spec: Spec,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Spec {
    selector: Selector,
    target_ports: [Port; 1],
    endpoint_picker_ref: PickerRef,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Selector {
    #[serde(deserialize_with = "labels")]
    match_labels: BTreeMap<String, String>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Port {
    number: NonZeroU16,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", try_from = "WrittenPickerRef")]
struct PickerRef {
    #[serde(skip_serializing_if = "Option::is_none")]
    group: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kind: Option<String>,
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    port: Option<Port>,
    #[serde(skip_serializing_if = "Option::is_none")]
    failure_mode: Option<FailureMode>,
}

/// Before it is known whether it has a port where it needs one.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct WrittenPickerRef {
    group: Option<String>,
    kind: Option<String>,
    name: String,
    port: Option<Port>,
    failure_mode: Option<FailureMode>,
}

#[derive(Debug, Serialize, Deserialize)]
enum FailureMode {
    FailOpen,
    FailClose,
}

impl TryFrom<WrittenPickerRef> for PickerRef {
    type Error = String;

    fn try_from(written: WrittenPickerRef) -> Result<Self, String> {
        let WrittenPickerRef { group, kind, name, port, failure_mode } = written;
        if kind.as_deref().unwrap_or("Service") == "Service" && port.is_none() {
            return Err("endpointPickerRef: a Service is named without its port".into());
        }
        if name.is_empty() || name.len() > 253 {
            return Err(format!("endpointPickerRef.name: {} characters, there may be 1 to 253", name.len()));
        }
        Ok(Self { group, kind, name, port, failure_mode })
    }
}

/// At least one label, and no value that a pod's label could not have.
fn labels<'de, D: Deserializer<'de>>(reader: D) -> Result<BTreeMap<String, String>, D::Error> {
    let labels = BTreeMap::<String, String>::deserialize(reader)?;
    if labels.is_empty() || labels.len() > 64 {
        return Err(de::Error::custom(format!("matchLabels: {} labels, there may be 1 to 64", labels.len())));
    }
    let wrong = |value: &&String| {
        let inside = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        let ends = |end: Option<char>| end.is_none_or(|c| c.is_ascii_alphanumeric());
        value.len() > 63
            || !value.chars().all(inside)
            || !ends(value.chars().next())
            || !ends(value.chars().last())
    };
    match labels.values().find(wrong) {
        Some(value) => Err(de::Error::custom(format!("matchLabels: no label has the value {value:?}"))),
        None => Ok(labels),
    }
}
