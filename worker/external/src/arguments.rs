//! Which arguments of a request an engine honours. Each engine has one table.

use crate::request::EngineRequest;
use proto::message::GrammarSyntax;
use std::fmt;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EngineKind {
    Vllm,
    Sglang,
    LlamaServer,
}

impl EngineKind {
    pub const ALL: [Self; 3] = [Self::Vllm, Self::Sglang, Self::LlamaServer];

    /// The value of `--engine`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Vllm => "vllm",
            Self::Sglang => "sglang",
            Self::LlamaServer => "llama-server",
        }
    }

    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Start options of the engine, as the operator states them. Engines do not report these.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EngineOptions {
    /// Results do not depend on the batch: `VLLM_BATCH_INVARIANT=1`, `--enable-deterministic-inference`.
    pub batch_invariant: bool,
    /// Grammars are compiled by llguidance, so that Lark grammars mean the same as here.
    pub llguidance: bool,
    /// Log-probabilities are those of the raw logits: `SGLANG_RETURN_ORIGINAL_LOGPROB=1`.
    pub raw_logprobs: bool,
    /// Requests are scheduled by priority: `--scheduling-policy priority`, `--enable-priority-scheduling`.
    pub priority_scheduling: bool,
}

/// An argument of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Argument {
    MaxTokens,
    Temperature,
    TopK,
    TopP,
    MinP,
    RepetitionPenalty,
    PresencePenalty,
    FrequencyPenalty,
    LogitBias,
    Seed,
    Logprobs,
    MinTokens,
    StopStrings,
    StopTokenIds,
    IgnoreEos,
    JsonSchema,
    Regex,
    Lark,
    GrammarTrigger,
    CacheSalt,
    Priority,
    Slot,
}

impl Argument {
    pub const ALL: [Self; 22] = [
        Self::MaxTokens,
        Self::Temperature,
        Self::TopK,
        Self::TopP,
        Self::MinP,
        Self::RepetitionPenalty,
        Self::PresencePenalty,
        Self::FrequencyPenalty,
        Self::LogitBias,
        Self::Seed,
        Self::Logprobs,
        Self::MinTokens,
        Self::StopStrings,
        Self::StopTokenIds,
        Self::IgnoreEos,
        Self::JsonSchema,
        Self::Regex,
        Self::Lark,
        Self::GrammarTrigger,
        Self::CacheSalt,
        Self::Priority,
        Self::Slot,
    ];

    /// The field of the API. A grammar's field is in its [`GrammarSpec`](proto::message::GrammarSpec).
    pub fn name(self) -> &'static str {
        match self {
            Self::MaxTokens => "max_tokens",
            Self::Temperature => "temperature",
            Self::TopK => "top_k",
            Self::TopP => "top_p",
            Self::MinP => "min_p",
            Self::RepetitionPenalty => "repetition_penalty",
            Self::PresencePenalty => "presence_penalty",
            Self::FrequencyPenalty => "frequency_penalty",
            Self::LogitBias => "logit_bias",
            Self::Seed => "seed",
            Self::Logprobs => "logprobs",
            Self::MinTokens => "min_tokens",
            Self::StopStrings => "stop",
            Self::StopTokenIds => "stop_token_ids",
            Self::IgnoreEos => "ignore_eos",
            Self::JsonSchema => "json_schema",
            Self::Regex => "regex",
            Self::Lark => "grammar",
            Self::GrammarTrigger => "tools",
            Self::CacheSalt => "cache_salt",
            Self::Priority => "priority",
            Self::Slot => "id_slot",
        }
    }

    /// The argument's value in `request`, 1 if it has none; `None` if the request leaves it at its default.
    fn value(self, request: &EngineRequest) -> Option<f64> {
        let (sampling, stop) = (&request.sampling, &request.stop);
        let unless = |default: f32, value: f32| (value != default).then_some(f64::from(value));
        let some = |set: bool| set.then_some(1.0);
        let syntax = |wanted| some(request.grammar.as_ref().is_some_and(|grammar| grammar.syntax == wanted));
        match self {
            Self::MaxTokens => Some(f64::from(stop.max_tokens)),
            Self::Temperature => unless(0.0, sampling.temperature),
            Self::TopK => some(sampling.top_k > 0),
            Self::TopP => unless(1.0, sampling.top_p),
            Self::MinP => unless(0.0, sampling.min_p),
            Self::RepetitionPenalty => unless(1.0, sampling.repetition_penalty),
            Self::PresencePenalty => unless(0.0, sampling.presence_penalty),
            Self::FrequencyPenalty => unless(0.0, sampling.frequency_penalty),
            Self::LogitBias => some(!sampling.logit_bias.is_empty()),
            Self::Seed => some(request.reproducible),
            Self::Logprobs => sampling.logprobs.map(f64::from),
            Self::MinTokens => some(stop.min_tokens > 0),
            Self::StopStrings => some(!stop.strings.is_empty()),
            Self::StopTokenIds => some(!stop.token_ids.is_empty()),
            Self::IgnoreEos => some(stop.ignore_eos),
            Self::JsonSchema => syntax(GrammarSyntax::JsonSchema),
            Self::Regex => syntax(GrammarSyntax::Regex),
            Self::Lark => syntax(GrammarSyntax::Lark),
            Self::GrammarTrigger => {
                some(request.grammar.as_ref().is_some_and(|grammar| grammar.trigger.is_some()))
            }
            Self::CacheSalt => some(request.root.is_some()),
            Self::Priority => some(request.priority != 0),
            Self::Slot => some(request.slot.is_some()),
        }
    }
}

/// How an engine treats an argument.
#[derive(Debug, Clone, Copy)]
pub enum Support {
    Honoured,
    /// Values from the first to the second.
    Within(f64, f64),
    /// Only if the operator states it of the engine, else refused for this reason.
    If(fn(EngineOptions) -> bool, &'static str),
    /// Accepted without its full meaning, for this reason: no request relies on it.
    Declared(&'static str),
    /// Refused for this reason.
    Refused(&'static str),
}

/// An engine's rows, one an argument. An argument without a row is refused.
pub type ArgumentTable = [(Argument, Support)];

/// An argument that an engine would ignore or serve with another meaning.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{argument}: {engine} {reason}")]
pub struct Unsupported {
    /// The request's field.
    pub argument: String,
    pub engine: EngineKind,
    pub reason: String,
}

/// The first argument of `request` that the engine cannot honour, as an error.
pub(crate) fn check_arguments(
    engine: EngineKind,
    table: &ArgumentTable,
    options: EngineOptions,
    request: &EngineRequest,
) -> Result<(), Unsupported> {
    for argument in Argument::ALL {
        let Some(value) = argument.value(request) else { continue };
        let row = table.iter().find(|(known, _)| *known == argument).map(|(_, support)| support);
        let reason = match row {
            Some(Support::Honoured | Support::Declared(_)) => continue,
            Some(Support::Within(low, high)) if (*low..=*high).contains(&value) => continue,
            Some(Support::If(stated, _)) if stated(options) => continue,
            Some(Support::Within(low, high)) => format!("takes {low} to {high}, not {value}"),
            Some(Support::If(_, reason) | Support::Refused(reason)) => (*reason).to_owned(),
            None => "does not know it".to_owned(),
        };
        let field = match argument {
            Argument::JsonSchema | Argument::Regex | Argument::Lark | Argument::GrammarTrigger => {
                request.grammar.as_ref().map(|grammar| grammar.field.clone())
            }
            _ => None,
        };
        return Err(Unsupported {
            argument: field.unwrap_or_else(|| argument.name().into()),
            engine,
            reason,
        });
    }
    Ok(())
}
