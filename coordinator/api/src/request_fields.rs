//! All request fields known to this API or to similar servers, and their treatment.
//!
//! The table decides what is parsed and what is refused, and docs/api.md contains it. A field in no row is
//! ignored.

use super::error::ApiError;
use super::fields::Fields;
use super::kind::Kind;
use Kind::{Chat, Completion, Messages, OllamaChat, OllamaGenerate, Responses};
use Treatment::{Ignored, Refused, Served};
use std::collections::HashMap;
use std::fmt::Write;
use std::sync::LazyLock;

/// Treatment of a field.
#[derive(Debug, Clone, Copy)]
pub(super) enum Treatment {
    Served,
    /// Ignored: it does not change the answer.
    Ignored,
    /// Refused, since it would change the answer, unless it has one of these values, which have no effect.
    /// The text is the reason.
    Refused(&'static [&'static str], &'static str),
}

/// A row of the table: APIs, treatment, field names.
struct Row(&'static [Kind], Treatment, &'static [&'static str]);

/// OpenAI's and Anthropic's.
const ALL: &[Kind] = &[Completion, Chat, Responses, Messages];
const OLLAMA: &[Kind] = &[OllamaChat, OllamaGenerate];
const OPENAI: &[Kind] = &[Completion, Chat, Responses];
const CHOICES: &[Kind] = &[Completion, Chat];
const CHATS: &[Kind] = &[Chat, Responses, Messages];
const OFF: &[&str] = &["false"];
const EMPTY: &[&str] = &["[]", "{}", "\"\""];
const STORE: &str = "only responses are stored: send the whole history";
const TOOLS_ELSEWHERE: &str = "the server runs no tools";

#[rustfmt::skip]
const TABLE: &[Row] = &[
    // Sampling, stopping, and vLLM's additions.
    Row(ALL, Served, &[
        "model", "stream", "stream_options", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "repeat_penalty", "presence_penalty",
        "frequency_penalty", "logit_bias", "seed", "priority", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens", "add_special_tokens",
        "cache_salt",
    ]),
    Row(OPENAI, Served, &["stop"]),
    Row(CHOICES, Served, &["n", "return_token_ids", "logprobs", "max_tokens", "max_completion_tokens", "max_new_tokens", "n_predict", "num_predict", "response_format"]),
    Row(&[Responses, Messages], Refused(&["1", "1.0"], "this API returns one answer; chat completions return several"), &["n"]),
    Row(&[Responses, Messages], Refused(OFF, "is served for completions and chats"), &["return_token_ids"]),
    Row(&[Responses, Messages], Refused(OFF, "is served for completions and chats"), &["logprobs"]),
    Row(&[Completion], Refused(&["0"], "is served as logprobs"), &["top_logprobs"]),
    Row(&[Messages], Refused(&["0"], "is served for completions and chats"), &["top_logprobs"]),
    Row(&[Responses, Messages], Refused(&["-1"], "is served by the name that this API has for it"), &["max_new_tokens", "n_predict", "num_predict"]),
    // Constraints on the answer, under the names of all servers.
    Row(ALL, Served, &[
        "grammar", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "json_schema", "regex", "ebnf",
    ]),
    Row(ALL, Ignored, &["guided_decoding_backend"]),
    Row(ALL, Refused(&[], "JSON is written on one line"), &["guided_whitespace_pattern"]),
    Row(ALL, Refused(&[], "is served as response_format or grammar"), &["structural_tag", "guided_json_object", "format", "gbnf", "lark"]),
    // Completions.
    Row(&[Completion], Served, &["prompt"]),
    Row(&[Completion], Served, &["suffix"]),
    Row(&[Completion], Refused(&["\"\""], "is served as prompt and suffix"), &["input_prefix", "input_suffix"]),
    Row(&[Completion], Served, &["echo", "best_of"]),
    Row(&[Completion], Refused(EMPTY, "is served for chats"), &["messages", "tools", "functions", "chat_template", "chat_template_kwargs"]),
    // Chats.
    Row(&[Chat, Messages], Served, &["messages"]),
    Row(CHATS, Served, &["tools", "tool_choice", "documents", "chat_template_kwargs", "enable_thinking"]),
    Row(&[Chat, Responses], Served, &["parallel_tool_calls"]),
    Row(&[Chat], Served, &[
        "top_logprobs", "functions", "function_call", "reasoning_effort", "continue_final_message", "add_generation_prompt",
    ]),
    Row(&[Chat, Responses], Served, &["reasoning"]),
    Row(CHATS, Refused(&[], "only the model's own template is used"), &["chat_template", "template", "system_prompt"]),
    Row(&[Chat], Refused(OFF, "is served as continue_final_message"), &["echo"]),
    Row(&[Chat], Refused(&["1", "1.0"], "is not served"), &["best_of"]),
    Row(&[Chat], Refused(&["[\"text\"]", "[]"], "answers are text only"), &["modalities"]),
    Row(&[Chat], Refused(&[], "answers are text only"), &["audio"]),
    Row(&[Chat], Refused(&[], TOOLS_ELSEWHERE), &["web_search_options", "plugins", "search_parameters"]),
    Row(&[Chat], Refused(&["{\"type\":\"adaptive\"}"], "is served as chat_template_kwargs or reasoning_effort"), &["thinking", "think"]),
    Row(&[Chat], Ignored, &["prediction", "verbosity"]),
    // Responses.
    Row(&[Responses], Served, &[
        "input", "instructions", "max_output_tokens", "text", "metadata", "store", "include", "truncation", "top_logprobs", "user",
        "safety_identifier", "prompt_cache_key",
    ]),
    Row(&[Responses], Served, &["previous_response_id"]),
    Row(&[Responses], Refused(&[], "is served as previous_response_id"), &["conversation"]),
    Row(&[Responses], Refused(&[], "the server stores no prompts"), &["prompt"]),
    Row(&[Responses], Refused(OFF, "answers are not computed in the background: stream the answer"), &["background"]),
    Row(&[Responses], Ignored, &["max_tool_calls", "context_management"]),
    Row(&[Responses], Refused(&[], "is served as text.format"), &["response_format"]),
    // Messages.
    Row(&[Messages], Served, &["system", "max_tokens", "stop_sequences", "thinking", "output_config", "metadata", "thread"]),
    Row(&[Messages], Refused(EMPTY, "is served as a last message of the assistant"), &["prefill"]),
    Row(&[Messages], Refused(EMPTY, "the server runs no code"), &["container"]),
    Row(&[Messages], Refused(EMPTY, TOOLS_ELSEWHERE), &["mcp_servers"]),
    Row(&[Messages], Refused(&[], "is served as output_config.format"), &["output_format", "response_format"]),
    Row(&[Messages], Ignored, &["context_management", "cache_control", "betas", "inference_geo", "speed", "diagnostics", "user_profile_id"]),
    // Operations of other servers on logits or text that are not served.
    Row(ALL, Refused(EMPTY, "is not served: use logit_bias"), &["bad_words", "bad_words_ids", "allowed_token_ids", "sequence_bias"]),
    Row(CHOICES, Served, &["prompt_logprobs"]),
    Row(&[Responses, Messages], Refused(&["0"], "is served for completions and chats"), &["prompt_logprobs"]),
    Row(CHOICES, Refused(OFF, "is served as prompt_logprobs"), &["decoder_input_details"]),
    Row(&[Responses, Messages], Refused(OFF, "is served for completions and chats, as prompt_logprobs"), &["decoder_input_details"]),
    Row(ALL, Served, &["truncate_prompt_tokens", "truncate"]),
    Row(ALL, Refused(&["0", "-1"], "is served as truncate_prompt_tokens"), &["n_keep", "num_keep"]),
    Row(ALL, Refused(OFF, "is served as include_stop_str_in_output"), &["no_stop_trim"]),
    Row(ALL, Refused(OFF, "is not served"), &["use_beam_search", "early_stopping"]),
    Row(ALL, Refused(&["1", "1.0", "0", "0.0"], "is not served"), &["length_penalty"]),
    Row(ALL, Refused(&["true"], "special tokens are never text"), &["skip_special_tokens"]),
    Row(ALL, Refused(&["true"], "reasoning is always returned"), &["include_reasoning", "separate_reasoning"]),
    Row(ALL, Refused(&["\"auto\"", "\"deepseek\"", "\"parsed\""], "reasoning is returned in a field of its own"), &["reasoning_format"]),
    Row(ALL, Refused(&["-1"], "reasoning has no limit of its own"), &["thinking_budget", "thinking_budget_tokens", "thinking_token_budget", "reasoning_budget"]),
    Row(ALL, Refused(&["0", "0.0"], "is not served"), &[
        "mirostat", "xtc_probability", "dry_multiplier", "dynatemp_range", "top_a", "epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size",
        "smoothing_factor",
    ]),
    Row(ALL, Refused(&["1", "1.0"], "is not served"), &["typical_p", "tfs_z", "tfs"]),
    Row(ALL, Refused(&["-1", "-1.0", "0", "0.0"], "is not served"), &["top_n_sigma"]),
    Row(ALL, Refused(&[], "is served as max_tokens"), &["max_length"]),
    Row(ALL, Refused(EMPTY, "is served as fields of the request itself"), &["options", "sampling_params", "parameters", "nvext", "extra_body"]),
    Row(ALL, Refused(EMPTY, "an adapter is served as `model`, by its name"), &["lora_path", "lora", "adapter_id", "lora_request"]),
    Row(ALL, Refused(EMPTY, "is served as parts of messages in chats"), &["images", "image_data", "multi_modal_data"]),
    Row(ALL, Refused(EMPTY, "images are preprocessed as the model's files say"), &["mm_processor_kwargs"]),
    Row(ALL, Refused(EMPTY, "is not served"), &["logits_processors", "custom_logit_processor", "custom_params", "vllm_xargs", "kv_transfer_params", "samplers", "sampler_seq"]),
    Row(ALL, Refused(&["0"], "is not served"), &["n_probs", "top_n_tokens"]),
    Row(&[Chat, Messages], Refused(EMPTY, STORE), &["previous_response_id", "conversation"]),
    // User, billing, storage and cache hints: no effect on the answer.
    Row(&[Completion, Chat, Messages], Ignored, &["user", "safety_identifier", "prompt_cache_key", "store"]),
    Row(CHOICES, Ignored, &["metadata"]),
    Row(ALL, Ignored, &[
        "service_tier", "spaces_between_special_tokens", "prompt_cache_retention", "prompt_cache_options", "moderation", "request_id", "keep_alive", "cache_prompt", "id_slot",
        "slot_id", "return_tokens_as_token_ids", "timings_per_token", "rid", "mirostat_tau", "mirostat_eta", "dry_base",
        "dry_allowed_length", "dry_penalty_last_n", "xtc_threshold", "dynatemp_exponent", "repeat_last_n", "penalty_last_n",
    ]),
    // Ollama's.
    Row(OLLAMA, Served, &["model", "name", "stream", "options", "format", "think", "logprobs", "top_logprobs"]),
    Row(&[OllamaChat], Served, &["messages", "tools", "tool_choice"]),
    Row(&[OllamaGenerate], Served, &["prompt", "system", "images", "raw"]),
    Row(&[OllamaGenerate], Refused(EMPTY, "only the model's own template is used"), &["template"]),
    Row(&[OllamaGenerate], Refused(EMPTY, "the server stores no conversations: send the messages to /api/chat"), &["context"]),
    Row(&[OllamaGenerate], Refused(EMPTY, "is not served"), &["suffix"]),
    Row(&[OllamaGenerate], Refused(&["0"], "is not served: no images are made"), &["width", "height", "steps"]),
    Row(OLLAMA, Refused(OFF, "is not served: a prompt that is too long is refused"), &["truncate"]),
    Row(OLLAMA, Refused(OFF, "is not served: an answer ends where the model's context does"), &["shift"]),
    Row(OLLAMA, Refused(OFF, "is not served"), &["_debug_render_only"]),
    Row(OLLAMA, Ignored, &["keep_alive"]),
];

/// Values with which a field is accepted, and the reason for which others are refused.
pub(super) type Refusal = (&'static [&'static str], &'static str);

static KNOWN_FIELDS: LazyLock<[Vec<&'static str>; 6]> = LazyLock::new(|| {
    Kind::ALL.map(|kind| {
        let rows = TABLE.iter().filter(|Row(kinds, _, _)| kinds.contains(&kind));
        // Served fields come first, since most bodies have only these.
        let (served, others): (Vec<_>, Vec<_>) =
            rows.partition(|Row(_, treatment, _)| matches!(treatment, Served));
        let parsed =
            served.into_iter().chain(others).filter(|Row(_, treatment, _)| !matches!(treatment, Ignored));
        parsed.flat_map(|Row(_, _, names)| names.iter().copied()).collect()
    })
});

static REFUSALS: LazyLock<[HashMap<&'static str, Refusal>; 6]> = LazyLock::new(|| {
    Kind::ALL.map(|kind| {
        let rows = TABLE.iter().filter(|Row(kinds, _, _)| kinds.contains(&kind));
        let refused = rows.filter_map(|Row(_, treatment, names)| match treatment {
            Refused(unless, why) => Some(names.iter().map(|name| (*name, (*unless, *why)))),
            Served | Ignored => None,
        });
        refused.flatten().collect()
    })
});

/// The fields that an API parses.
pub(super) fn known_fields(kind: Kind) -> &'static [&'static str] {
    of_kind::<Vec<_>>(&KNOWN_FIELDS, kind)
}

/// The value for a kind, of those in the order of [`Kind::ALL`].
fn of_kind<T>(
    [completion, chat, responses, messages, ollama_chat, ollama_generate]: &[T; 6],
    kind: Kind,
) -> &T {
    match kind {
        Completion => completion,
        Chat => chat,
        Responses => responses,
        Messages => messages,
        OllamaChat => ollama_chat,
        OllamaGenerate => ollama_generate,
    }
}

/// The fields of `/tokenize`: a text, or everything of a chat, so that the body of a chat gives the tokens of
/// its prompt.
pub(super) fn tokenized() -> &'static [&'static str] {
    static ALL: LazyLock<Vec<&'static str>> = LazyLock::new(|| [known_fields(Chat), &["prompt"]].concat());
    &ALL
}

/// Refuses fields that would change the answer and are not served.
pub(super) fn refuse_unsupported(kind: Kind, fields: &Fields<'_>) -> Result<(), ApiError> {
    let refusals = of_kind(&REFUSALS, kind);
    refuse(fields, |name| refusals.get(name).copied())
}

/// Refuses the fields that have a refusal, unless their value has no effect.
pub(super) fn refuse(
    fields: &Fields<'_>,
    refusal: impl Fn(&'static str) -> Option<Refusal>,
) -> Result<(), ApiError> {
    for name in fields.names() {
        let Some((unless, why)) = refusal(name) else { continue };
        let Some(raw) = fields.raw(name) else { continue };
        let value: String = raw.split_ascii_whitespace().collect();
        if !unless.contains(&value.as_str()) {
            let reason =
                if why.starts_with("is ") { why.to_owned() } else { format!("is not served: {why}") };
            return Err(ApiError::field(name, reason));
        }
    }
    Ok(())
}

/// The section about fields in docs/api.md.
pub fn documented() -> String {
    let apis = |kinds: &[Kind]| {
        let api = |kind: &Kind| match kind {
            Completion => "completions",
            Chat => "chats",
            Responses => "responses",
            Messages => "messages",
            OllamaChat => "`/api/chat`",
            OllamaGenerate => "`/api/generate`",
        };
        match kinds.len() {
            4 => "all".to_owned(),
            _ => kinds.iter().map(api).collect::<Vec<_>>().join(", "),
        }
    };
    let mut text = String::from("| fields | of | |\n|---|---|---|\n");
    for Row(kinds, treatment, names) in TABLE {
        let names = names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
        // Writing to a string cannot fail.
        let _ = writeln!(text, "| {names} | {} | {} |", apis(kinds), note(*treatment));
    }
    text
}

/// A treatment in docs/api.md.
pub(super) fn note(treatment: Treatment) -> String {
    match treatment {
        Served => "served".to_owned(),
        Ignored => "ignored: does not change the answer".to_owned(),
        Refused(unless, why) => {
            let unless: Vec<String> = unless.iter().map(|value| format!("`{value}`")).collect();
            let unless =
                if unless.is_empty() { String::new() } else { format!(" unless {}", unless.join(", ")) };
            format!("refused{unless}: {why}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_field_has_one_row_for_each_api() {
        for kind in Kind::ALL {
            let mut names: Vec<&str> = TABLE
                .iter()
                .filter(|Row(kinds, _, _)| kinds.contains(&kind))
                .flat_map(|Row(_, _, names)| names.iter().copied())
                .collect();
            names.sort_unstable();
            let twice: Vec<_> = names.windows(2).filter(|pair| pair[0] == pair[1]).collect();
            assert!(twice.is_empty(), "{kind:?}: {twice:?}");
        }
    }

    #[test]
    fn unsupported_fields_are_refused_unless_their_value_has_no_effect() {
        for Row(kinds, treatment, names) in TABLE {
            let Refused(unless, _) = treatment else { continue };
            for (kind, name) in kinds.iter().flat_map(|kind| names.iter().map(move |name| (*kind, *name))) {
                let check = |value: &str| {
                    let body = format!("{{\"{name}\": {value}}}");
                    let fields = Fields::parse(body.as_bytes(), known_fields(kind)).unwrap();
                    refuse_unsupported(kind, &fields)
                };
                match check("{\"odd\": [\"value\"]}") {
                    Err(ApiError::InvalidField { field, .. }) => assert_eq!(field, name),
                    other => panic!("{kind:?} {name}: {other:?}"),
                }
                assert_eq!(check("null"), Ok(()), "{name}");
                for value in *unless {
                    assert_eq!(check(value), Ok(()), "{name}: {value}");
                }
            }
        }
    }

    #[test]
    fn unknown_fields_are_ignored() {
        let body = json!({"model": "m", "never_heard_of": 7, "user": "u"}).to_string();
        for kind in ALL {
            let fields = Fields::parse(body.as_bytes(), known_fields(*kind)).unwrap();
            assert_eq!(refuse_unsupported(*kind, &fields), Ok(()));
        }
    }

    #[test]
    fn the_documentation_has_this_table() {
        let docs = include_str!("../../../docs/api.md");
        let table = documented();
        assert!(docs.contains(&table), "docs/api.md must have this table:\n{table}");
    }
}
