//! Ollama's `options`: sampling, stopping, and how a model is loaded.

use crate::error::ApiError;
use crate::fields::Fields;
use crate::request_fields::Treatment::{self, Ignored, Refused, Served};
use crate::request_fields::refuse;
use std::sync::LazyLock;

const OPTIONS: &str = "options";

/// All options, and their treatment. An option in no row is ignored.
const TABLE: &[(Treatment, &[&str])] = &[
    (
        Served,
        &[
            "num_predict",
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "seed",
            "stop",
            "repeat_penalty",
            "presence_penalty",
            "frequency_penalty",
        ],
    ),
    // Parsed where the model's limit is known.
    (Served, &["num_ctx"]),
    (
        Ignored,
        &[
            "num_gpu",
            "num_thread",
            "num_batch",
            "main_gpu",
            "low_vram",
            "f16_kv",
            "use_mmap",
            "use_mlock",
            "numa",
            "num_keep",
            "repeat_last_n",
            "mirostat_tau",
            "mirostat_eta",
        ],
    ),
    (Refused(&["0", "0.0"], "is not served"), &["mirostat"]),
    (Refused(&["1", "1.0"], "is not served"), &["typical_p", "tfs_z"]),
    (Refused(&["true"], "line ends are penalized like other tokens"), &["penalize_newline"]),
    (Refused(&["false"], "is not served"), &["vocab_only", "logits_all", "embedding_only"]),
];

static KNOWN: LazyLock<Vec<&'static str>> = LazyLock::new(|| {
    let parsed = TABLE.iter().filter(|(treatment, _)| !matches!(treatment, Ignored));
    parsed.flat_map(|(_, names)| names.iter().copied()).collect()
});

/// The options of a request. Refuses those that would change the answer and are not served.
pub(crate) fn read<'a>(fields: &Fields<'a>) -> Result<Fields<'a>, ApiError> {
    let raw = fields.raw(OPTIONS).unwrap_or("{}");
    let options = Fields::parse(raw.as_bytes(), &KNOWN).map_err(|error| match error {
        ApiError::InvalidField { reason, .. } => ApiError::field(OPTIONS, reason),
        error => error,
    })?;
    let refusal = |name: &str| {
        TABLE.iter().find_map(|(treatment, names)| match treatment {
            Refused(unless, why) if names.contains(&name) => Some((*unless, *why)),
            _ => None,
        })
    };
    refuse(&options, refusal).map_err(named)?;
    Ok(options)
}

/// An error of an option, by its path in the body.
pub(crate) fn named(error: ApiError) -> ApiError {
    match error {
        ApiError::InvalidField { field, reason } => ApiError::field(format!("{OPTIONS}.{field}"), reason),
        error => error,
    }
}

/// The table of options in docs/api.md.
#[cfg(test)]
pub(crate) fn documented() -> String {
    use std::fmt::Write;
    let mut text = String::from("| options | |\n|---|---|\n");
    for (treatment, names) in TABLE {
        let names = names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
        // Writing to a string cannot fail.
        let _ = writeln!(text, "| {names} | {} |", crate::request_fields::note(*treatment));
    }
    text
}
