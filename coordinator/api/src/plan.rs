//! Turns a request body into a generation plan: checks fields, renders templates, tokenizes texts. It
//! computes and never waits, so it runs where blocking is allowed.

use super::auth::Caller;
use super::chat::{self, CONTINUE, Chat, Ending};
use super::documents::{self, Document, Popularity};
use super::error::ApiError;
use super::fields::Fields;
use super::grammar;
use super::image_urls::Fetched;
use super::images;
pub use super::kind::Kind;
use super::limits::{MAX_CHOICES, MAX_LOGPROBS};
use super::params::{MaxTokens, Params, Vocabulary, check_tokens};
use super::prompt::{Prompt, prompts};
use super::prompt_scores::{self, Scoring};
use super::request_fields;
use super::tools;
use super::{messages, ollama, responses};
use dispatch::models::{DeployedModel, Models, OfferedModel};
use proto::ids::ModelId;
use proto::message::{GrammarSpec, PromptImage, TokenIds};
use proto::served_model::{ModelTask, ServedModel};
use serde_json::{Map, Value};
use std::sync::Arc;
use std::time::Duration;
use text::chat_template::{self, Content, Message, TemplateError};
use text::cpu_time::CpuDeadline;
use text::dialect::OutputParser;

impl Kind {
    /// The fields that this API reads.
    pub(super) fn known_fields(self) -> &'static [&'static str] {
        request_fields::known_fields(self)
    }

    /// The name of the field with the stop strings.
    fn stop(self) -> &'static str {
        match self {
            Self::Messages => messages::STOP,
            _ => "stop",
        }
    }
}

#[derive(Debug)]
pub struct GenerationPlan {
    pub kind: Kind,
    pub model: Arc<OfferedModel>,
    /// How the workers serve the model.
    pub served: ServedModel,
    /// The prompts, each with its max_tokens.
    pub prompts: Vec<(TokenIds, u32)>,
    /// The parts of answers about their prompts, and `best_of`.
    pub scoring: Scoring,
    /// The text of each prompt, if answers begin with it.
    pub echoes: Vec<Arc<str>>,
    /// Images of the prompt, which is the only one then.
    pub images: Vec<PromptImage>,
    /// Indices of the request's documents, in the order of the prompt.
    pub documents: Vec<usize>,
    /// The grammar of the answer. `None`: no restriction.
    pub grammar: Option<GrammarSpec>,
    /// How to parse the answer. `None` if it can only be text.
    pub parser_options: Option<ParserOptions>,
    /// Fields of the request that the answer repeats.
    pub repeats: Map<String, Value>,
    pub params: Params,
}

/// Parts that an answer may contain besides text.
#[derive(Debug)]
pub struct ParserOptions {
    /// Names of the callable tools.
    tools: Vec<String>,
    /// Whether the prompt ends inside the model's reasoning.
    thinking: bool,
}

impl ParserOptions {
    /// A parser for one answer.
    pub fn parser(&self, model: &OfferedModel) -> OutputParser {
        OutputParser::new(Arc::clone(&model.dialect), self.tools.clone(), self.thinking)
    }
}

/// The result of `/tokenize`.
#[derive(Debug)]
pub struct Tokenized {
    pub tokens: Vec<u32>,
    /// The model's limit; `None` if no worker serves it.
    pub max_model_len: Option<u32>,
}

/// A prefix to pin.
#[derive(Debug)]
pub struct Prefix {
    pub tokens: Vec<u32>,
    /// Time to live; 0: until it is unpinned.
    pub ttl: Duration,
}

/// Inputs of the planner besides the body.
pub struct Sources<'a> {
    pub caller: &'a Caller,
    pub models: &'a Models,
    /// How a model is currently served; `None` if no worker serves it.
    pub served: &'a dyn Fn(&ModelId) -> Option<ServedModel>,
    /// The model that an adapter of this name adds to.
    pub parent: &'a dyn Fn(&ModelId) -> Option<ModelId>,
    /// The seed for requests without one.
    pub seed: u64,
    /// Request counts of documents.
    pub popularity: &'a Popularity,
    /// Images that were fetched for the request. `None`: no addresses are fetched.
    pub fetched: Option<&'a Fetched>,
}

/// How much work planning a request may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effort {
    /// A few milliseconds at most, on a thread that serves connections.
    Short,
    /// All that the limits of requests and templates allow.
    Full {
        /// Whether a short attempt already counted the documents.
        counted: bool,
    },
}

/// Why there is no plan.
#[derive(Debug, thiserror::Error)]
pub enum Unplanned {
    #[error(transparent)]
    Refused(#[from] ApiError),
    /// Planning takes longer than [`Effort::Short`] allows.
    #[error("planning takes longer than the effort allows")]
    TooLong {
        /// As in [`Effort::Full`].
        counted: bool,
    },
}

/// Largest body that is planned with a short effort, in bytes.
const SHORT_BODY: usize = 64 << 10;
/// CPU time for rendering and tokenizing all texts of a short plan. At most twice as much is used.
const SHORT_TOKENIZING: Duration = Duration::from_millis(2);
/// Fields that take no longer to read than to copy. Any other field makes planning long.
const SHORT_FIELDS: [&str; 32] = [
    "model",
    "messages",
    "prompt",
    "input",
    "instructions",
    "system",
    "documents",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "seed",
    "stop",
    "stop_sequences",
    "stream",
    "stream_options",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
    "logprobs",
    "top_logprobs",
    "priority",
    "user",
    "store",
    "options",
    "raw",
];

const PREFIX: [&str; 7] =
    ["prompt", "messages", "tools", "tool_choice", "chat_template_kwargs", "add_special_tokens", "ttl_s"];
/// Default time to live of a pinned prefix.
const DEFAULT_TTL_S: u64 = 3600;
const MAX_TTL_S: u64 = 366 * 86_400;
/// Bytes of a prompt's beginning that tell conversations apart.
const CONVERSATION_BYTES: usize = 512;
const DETOKENIZE: [&str; 2] = ["model", "tokens"];
/// Default max_tokens of a completion.
const COMPLETION_TOKENS: u32 = 16;

/// Parses and checks a generation request.
pub fn generation(
    kind: Kind,
    body: &[u8],
    sources: &Sources<'_>,
    effort: Effort,
) -> Result<GenerationPlan, Unplanned> {
    let short = effort == Effort::Short;
    if short && body.len() > SHORT_BODY {
        return Err(Unplanned::TooLong { counted: false });
    }
    let fields = Fields::parse(body, kind.known_fields())?;
    if short && !fields.are_among(&SHORT_FIELDS) {
        return Err(Unplanned::TooLong { counted: false });
    }
    let name = match kind.is_ollama() {
        true => ollama::model_name(&fields)?,
        false => fields.get("model")?,
    };
    let (model, served) = named_model(name, &fields, sources)?;
    if let Some(served) = served.as_ref().filter(|served| !served.task.generates()) {
        return Err(wrong_task(served).into());
    }
    let encode = |text: &str| model.tokenizer.encode(text, false);
    let vocabulary = Vocabulary { size: model.tokenizer.vocab_size(), encode: &encode };
    let limit = served.as_ref().map(|served| served.max_model_len);
    let mut params = match kind.is_ollama() {
        true => ollama::params(&fields, &vocabulary, (sources.seed, &model.sampling), limit)?,
        false => Params::read(&fields, &vocabulary, sources.seed, &model.sampling, kind.stop())?,
    };
    params.sampling.logprobs = logprobs(kind, &fields)?;
    refuse_unsupported(kind, &fields)?;
    let scoring = Scoring::read(kind, &fields, &params)?;
    if kind.is_ollama() {
        ollama::check_thinking(&fields, &model)?;
    }
    let documents = documents::documents(&fields)?;
    let order = match effort {
        Effort::Full { counted: true } => sources.popularity.order(sources.caller.tenant(), &documents),
        _ => sources.popularity.count(sources.caller.tenant(), &documents),
    };
    let too_long = || Unplanned::TooLong { counted: true };
    // One deadline for all texts of the request.
    let deadline = CpuDeadline::after(SHORT_TOKENIZING);
    let bos = params.add_special_tokens.unwrap_or(true);
    // A prompt that is truncated may be longer than the context.
    let text_limit = if params.truncate.is_some() { Some(0) } else { limit };
    let mut images = Vec::new();
    let text_prompts = || {
        completion_prompts(&fields, &model, text_limit, |text| match effort {
            Effort::Short => model.prompt_shortly(text, bos, &deadline).ok_or_else(too_long),
            Effort::Full { .. } => Ok(model.prompt(text, bos)),
        })
    };
    let (max_tokens, prompts, grammar, parser_options) = match kind {
        Kind::OllamaGenerate if ollama::is_plain(&fields, &model)? => {
            let grammar = grammar::of_completion(ollama::output_format(&fields)?)?;
            (ollama::max_tokens(&fields)?, text_prompts()?, grammar, None)
        }
        Kind::Completion => {
            let requested = chat::limit(&fields)?;
            let max_tokens = MaxTokens {
                field: "max_tokens",
                tokens: requested.or(Some(COMPLETION_TOKENS)),
                explicit: requested.is_some(),
            };
            let prompts = match suffix(&fields, &model, (&params, &scoring), text_limit)? {
                Some(suffix) => {
                    let before = completion_prompts(&fields, &model, text_limit, |text| {
                        Ok::<_, ApiError>(model.plain(text).into())
                    })?;
                    let fill = |before: TokenIds| model.infill(&before, &suffix, bos).ok_or_else(no_gaps);
                    before.into_iter().map(fill).collect::<Result<_, _>>()?
                }
                None => text_prompts()?,
            };
            (max_tokens, prompts, grammar::of_completion(grammar::output_format(&fields)?)?, None)
        }
        Kind::Chat | Kind::Responses | Kind::Messages | Kind::OllamaChat | Kind::OllamaGenerate => {
            let mut chat = match kind {
                Kind::OllamaChat | Kind::OllamaGenerate => ollama::read(kind, &fields)?,
                Kind::Responses => responses::read(&fields)?,
                Kind::Messages => messages::read(&fields, true)?,
                _ => chat::read(&fields)?,
            };
            check_chat(&model, &chat, text_limit)?;
            if params.truncate.is_some() && !chat.images.is_empty() {
                return Err(chat
                    .images
                    .wrong(chat.field, "a prompt with images cannot be truncated".to_owned())
                    .into());
            }
            if short && !chat.images.is_empty() {
                return Err(too_long());
            }
            let files = chat.images.see(&model, served.as_ref(), &chat.messages, sources.fetched)?;
            let rendered = rendered(&mut chat, &model, (&documents, &order), true, short)?;
            let rendered = rendered.ok_or_else(too_long)?;
            check_text(&model, rendered.text.len(), text_limit)?;
            let prompt = match effort {
                Effort::Short => model.chat_shortly(&rendered, bos, &deadline).ok_or_else(too_long)?,
                Effort::Full { .. } if files.is_empty() => model.chat(&rendered, bos),
                Effort::Full { .. } => {
                    let placed = images::place(&model, &rendered, files, bos);
                    let (tokens, placed) = placed.map_err(|reason| chat.images.wrong(chat.field, reason))?;
                    images = placed;
                    tokens
                }
            };
            let text = rendered.text;
            let Chat { tools, output_format, max_tokens, .. } = chat;
            let grammar = grammar::of_chat(output_format, &tools, &model.dialect, &text)?;
            let needs_parser = model.dialect.thinks() || !tools.tools.is_empty();
            let parser_options = needs_parser.then(|| ParserOptions {
                thinking: model.dialect.is_thinking(&text),
                tools: tools.tools.into_iter().map(|tool| tool.name).collect(),
            });
            (max_tokens, vec![prompt], grammar, parser_options)
        }
    };
    let (field, choices) = scoring.best_of.map_or(("n", params.n), |best_of| ("best_of", best_of));
    if prompts.len() * choices as usize > MAX_CHOICES {
        return Err(ApiError::field(field, format!("prompts times {field} is above {MAX_CHOICES}")).into());
    }
    let served = served.ok_or(ApiError::NoWorker)?;
    let limit = served.max_model_len;
    let prompts: Vec<_> = prompts
        .into_iter()
        .map(|tokens| max_tokens.fit(tokens, limit, params.truncate, scoring.allows_no_tokens()))
        .collect::<Result<_, _>>()?;
    scoring.check(&params, prompts.iter().map(|(tokens, max_tokens)| (tokens.len(), *max_tokens)))?;
    if !images.is_empty() && scoring.allows_no_tokens() {
        let reason = "rows of images have no log-probabilities";
        return Err(ApiError::field("prompt_logprobs", reason).into());
    }
    let echoes = match scoring.echo {
        true => echoes(&fields, &model, &prompts, params.truncate.is_some())?,
        false => Vec::new(),
    };
    let shortest = prompts.iter().map(|(_, max_tokens)| *max_tokens).min().unwrap_or(0);
    if params.stop.min_tokens > shortest {
        let reason = format!("{} is above the {shortest} tokens to generate", params.stop.min_tokens);
        return Err(ApiError::field("min_tokens", reason).into());
    }
    let repeats = match kind {
        Kind::Responses => responses::repeats(&fields, &params)?,
        _ => Map::new(),
    };
    Ok(GenerationPlan {
        kind,
        model,
        served,
        prompts,
        scoring,
        echoes,
        images,
        documents: order,
        grammar,
        parser_options,
        repeats,
        params,
    })
}

/// The addresses of a chat's images: the path of the field, and the address. Of a body that is no chat there are none.
pub fn image_addresses(kind: Kind, body: &[u8]) -> Vec<(String, String)> {
    let chat = Fields::parse(body, kind.known_fields()).and_then(|fields| match kind {
        Kind::Completion => Ok(Vec::new()),
        Kind::Chat => Ok(chat::read(&fields)?.images.addresses()),
        Kind::Responses => Ok(responses::read(&fields)?.images.addresses()),
        Kind::Messages => Ok(messages::read(&fields, false)?.images.addresses()),
        // Its images are in base64.
        Kind::OllamaChat | Kind::OllamaGenerate => Ok(Vec::new()),
    });
    // A fault is reported when the request is planned.
    chat.unwrap_or_default()
}

/// Counts the tokens of an Anthropic prompt.
pub fn count_tokens(body: &[u8], sources: &Sources<'_>) -> Result<usize, ApiError> {
    let fields = Fields::parse(body, Kind::Messages.known_fields())?;
    let (model, served) = requested_model(&fields, sources)?;
    let documents = documents::documents(&fields)?;
    let order = sources.popularity.order(sources.caller.tenant(), &documents);
    let bos = fields.get("add_special_tokens")?.unwrap_or(true);
    let chat = messages::read(&fields, false)?;
    Ok(chat_prompt(chat, (&model, served.as_ref()), (&documents, &order), bos, sources.fetched)?.len())
}

/// Serves `/tokenize`.
pub fn tokenize(body: &[u8], sources: &Sources<'_>) -> Result<Tokenized, ApiError> {
    let fields = Fields::parse(body, request_fields::tokenized())?;
    let (model, served) = requested_model(&fields, sources)?;
    let special = fields.get("add_special_tokens")?.unwrap_or(true);
    let encodes = served.as_ref().is_some_and(|served| !served.task.generates());
    let tokens = match (fields.raw("prompt"), fields.raw("messages")) {
        (Some(_), None) => {
            let text: String = fields.get("prompt")?.unwrap_or_default();
            if encodes && special {
                model.tokenizer.with_ends(model.tokenizer.encode(&text, false))
            } else {
                model.tokens(&text, special)
            }
        }
        (None, Some(_)) => {
            let documents = documents::documents(&fields)?;
            let order = sources.popularity.order(sources.caller.tenant(), &documents);
            let chat = chat::read(&fields)?;
            let tokens =
                chat_prompt(chat, (&model, served.as_ref()), (&documents, &order), special, sources.fetched)?;
            model.in_vocabulary(&tokens)
        }
        _ => return Err(ApiError::field("prompt", "give either prompt or messages")),
    };
    let max_model_len = served.map(|served| served.max_model_len);
    Ok(Tokenized { tokens, max_model_len })
}

/// Parses a prefix to pin, of at most `limit` tokens.
pub fn prefix(body: &[u8], model: &OfferedModel, limit: u32) -> Result<Prefix, ApiError> {
    let fields = Fields::parse(body, &PREFIX)?;
    let bos = fields.get("add_special_tokens")?.unwrap_or(true);
    let tokens = match (fields.raw("prompt"), fields.raw("messages")) {
        (Some(_), None) => {
            let prompts = completion_prompts(&fields, model, Some(limit), |text| {
                Ok::<_, ApiError>(model.prompt(text, bos))
            })?;
            let [tokens] = <[TokenIds; 1]>::try_from(prompts)
                .map_err(|_| ApiError::field("prompt", "give one prefix at a time"))?;
            tokens.to_vec()
        }
        (None, Some(_)) => {
            let mut chat = chat::read(&fields)?;
            check_chat(model, &chat, Some(limit))?;
            if !chat.images.is_empty() {
                return Err(chat
                    .images
                    .wrong(chat.field, "prefixes with images cannot be pinned".to_owned()));
            }
            let rendered = chat_text(&mut chat, model, (&[], &[]), false)?;
            check_text(model, rendered.text.len(), Some(limit))?;
            model.chat(&rendered, bos).to_vec()
        }
        _ => return Err(ApiError::field("prompt", "give either prompt or messages")),
    };
    let (prompt, limit) = (tokens.len() as u64, u64::from(limit));
    if prompt > limit {
        return Err(ApiError::ContextLength { prompt, need: prompt, limit });
    }
    let ttl = fields.ranged("ttl_s", 0..=MAX_TTL_S)?.unwrap_or(DEFAULT_TTL_S);
    Ok(Prefix { tokens, ttl: Duration::from_secs(ttl) })
}

/// Serves `/detokenize`.
pub fn detokenize(body: &[u8], sources: &Sources<'_>) -> Result<String, ApiError> {
    let fields = Fields::parse(body, &DETOKENIZE)?;
    let (model, _) = offered(fields.get("model")?, &fields, sources)?;
    let tokens: Vec<u32> = fields.get("tokens")?.ok_or_else(|| ApiError::field("tokens", "is missing"))?;
    check_tokens("tokens", &tokens, model.tokenizer.vocab_size())?;
    Ok(model.tokenizer.decode(&tokens, false))
}

/// The model that the request names, and how it is currently served (`None` if no worker serves it).
pub(super) fn requested_model(
    fields: &Fields<'_>,
    sources: &Sources<'_>,
) -> Result<(Arc<OfferedModel>, Option<ServedModel>), ApiError> {
    named_model(fields.get("model")?, fields, sources)
}

/// Like [`requested_model`], for a request that names the model `name`.
pub(super) fn named_model(
    name: Option<String>,
    fields: &Fields<'_>,
    sources: &Sources<'_>,
) -> Result<(Arc<OfferedModel>, Option<ServedModel>), ApiError> {
    let (model, id) = offered(name, fields, sources)?;
    let served = (sources.served)(&id);
    Ok((model, served))
}

/// The error for a model that serves another task; it names the model's endpoint.
pub(super) fn wrong_task(served: &ServedModel) -> ApiError {
    let hint = match served.task {
        ModelTask::Generate | ModelTask::GenerateFromImages => {
            "generates text: use /v1/completions or /v1/chat/completions"
        }
        ModelTask::Embed { .. } => "embeds texts: use /v1/embeddings",
        ModelTask::Rerank { .. } => "compares texts: use /v1/rerank",
    };
    ApiError::field("model", format!("{} {hint}", served.id))
}

/// The model that the request names, with the name, which may be that of an adapter of it.
fn offered(
    name: Option<String>,
    fields: &Fields<'_>,
    sources: &Sources<'_>,
) -> Result<(Arc<OfferedModel>, ModelId), ApiError> {
    let own = |model: Arc<OfferedModel>| {
        let id = model.id.clone();
        (model, id)
    };
    let found = match &name {
        Some(name) => {
            let share = || conversation(fields, sources.caller);
            sources.models.choose(name, share).map(own).or_else(|| {
                let id = ModelId::new(name.clone()).ok()?;
                Some((sources.models.get((sources.parent)(&id)?.as_str())?, id))
            })
        }
        None => sources.models.only().map(own),
    };
    let deployed = sources.models.deployed();
    let unread = name.as_ref().filter(|_| found.is_none()).and_then(|name| {
        let model = deployed.model(name).filter(|model| model.active.is_none())?;
        sources.caller.may_use(&ModelId::parse(name.clone()).ok()?).then_some(model)
    });
    if let (Some(name), Some(DeployedModel { progress, refused, .. })) = (&name, unread) {
        let (model, progress) = (name.clone(), progress.clone());
        return Err(match refused.clone() {
            Some(reason) => ApiError::ModelUnavailable { model, reason },
            None => ApiError::ModelLoading { model, progress },
        });
    }
    // To the caller, a model outside the key's scope does not exist.
    match (found.filter(|(_, id)| sources.caller.may_use(id)), name) {
        (Some((model, id)), _) => Ok((model, id)),
        (None, _) if sources.models.is_incomplete() => Err(ApiError::ModelsUnknown),
        (None, Some(name)) => Err(ApiError::ModelNotFound(name.chars().take(ModelId::MAX_LEN).collect())),
        (None, None) => Err(ApiError::field("model", "is missing")),
    }
}

/// A number that is equal for all requests of a conversation: it depends on the tenant and on the beginning of the
/// prompt.
fn conversation(fields: &Fields<'_>, caller: &Caller) -> u64 {
    let beginning = ["messages", "prompt", "input"].iter().find_map(|field| fields.raw(field));
    let text = beginning.unwrap_or_default();
    // Later turns are appended to a list, so its first item stays. A text counts up to its first characters.
    let first = serde_json::from_str::<Vec<&serde_json::value::RawValue>>(text).ok();
    let items: Vec<&str> = first.iter().flatten().map(|item| item.get()).collect();
    // An instruction is equal in many conversations.
    let own = items.iter().position(|item| !is_instruction(item)).map_or(0, |at| at + 1);
    let messages = items.get(..own).unwrap_or_default();
    let text = if messages.is_empty() { text } else { &messages.concat() };
    let hash = blake3::Hasher::new()
        .update(caller.tenant().as_bytes())
        .update(&[0])
        .update(text.get(..text.floor_char_boundary(CONVERSATION_BYTES)).unwrap_or(text).as_bytes())
        .finalize();
    hash.as_bytes().first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

/// Whether a message is one of the operator's, not of the user.
fn is_instruction(message: &str) -> bool {
    #[derive(serde::Deserialize)]
    struct Role<'a> {
        #[serde(borrow)]
        role: Option<std::borrow::Cow<'a, str>>,
    }
    let role = serde_json::from_str(message).ok().and_then(|Role { role }| role);
    role.is_some_and(|role| role == "system" || role == "developer")
}

fn completion_prompts<E: From<ApiError>>(
    fields: &Fields<'_>,
    model: &OfferedModel,
    limit: Option<u32>,
    encode: impl Fn(&str) -> Result<TokenIds, E>,
) -> Result<Vec<TokenIds>, E> {
    let vocab = model.tokenizer.vocab_size();
    let tokens = |prompt| match prompt {
        Prompt::Text(text) => {
            check_text(model, text.len(), limit)?;
            encode(&text)
        }
        Prompt::Tokens(tokens) => {
            check_tokens("prompt", &tokens, vocab)?;
            Ok(tokens.into())
        }
    };
    prompts(fields)?.into_iter().map(tokens).collect()
}

/// The text behind the gap that a completion fills. `None`: the answer continues the prompt.
fn suffix(
    fields: &Fields<'_>,
    model: &OfferedModel,
    (params, scoring): (&Params, &Scoring),
    limit: Option<u32>,
) -> Result<Option<String>, ApiError> {
    let suffix: Option<String> = fields.get("suffix")?;
    let Some(suffix) = suffix.filter(|suffix| !suffix.is_empty()) else { return Ok(None) };
    if scoring.echo {
        return Err(ApiError::field("suffix", "not with echo: the answer is between two texts"));
    }
    if params.truncate.is_some() {
        return Err(ApiError::field("suffix", "not with a truncated prompt"));
    }
    check_text(model, suffix.len(), limit)?;
    Ok(Some(suffix))
}

fn no_gaps() -> ApiError {
    ApiError::field("suffix", "the model has no tokens for a gap between two texts")
}

/// The texts with which answers begin: those of the request, or of the tokens of a prompt that has no text or was
/// truncated.
fn echoes(
    fields: &Fields<'_>,
    model: &OfferedModel,
    encoded: &[(TokenIds, u32)],
    truncated: bool,
) -> Result<Vec<Arc<str>>, ApiError> {
    let text = |(prompt, (tokens, _)): (Prompt, &(TokenIds, u32))| match prompt {
        Prompt::Text(text) if !truncated => text.into(),
        Prompt::Text(_) | Prompt::Tokens(_) => prompt_scores::text_of(&model.tokenizer, tokens).into(),
    };
    Ok(prompts(fields)?.into_iter().zip(encoded).map(text).collect())
}

/// Refuses a chat that cannot fit into the model's context, before it is rendered. Assistant messages and
/// whitespace around texts are not counted, since a template may leave them out.
fn check_chat(model: &OfferedModel, chat: &Chat<'_>, limit: Option<u32>) -> Result<(), ApiError> {
    let others = chat.messages.iter().filter(|message| message.role != "assistant");
    let texts = others.filter_map(|message| message.content.as_ref()).flat_map(Content::texts);
    check_text(model, texts.map(|text| text.trim().len()).sum(), limit)
}

/// Refuses a text of `bytes` bytes that has too many tokens by any tokenization, before it is tokenized.
/// `limit`: the served limit; `None`: the limit in the model's file.
pub(super) fn check_text(model: &OfferedModel, bytes: usize, limit: Option<u32>) -> Result<(), ApiError> {
    let limit = limit.map_or(model.context as u64, u64::from);
    let min_tokens = model.tokenizer.fewest_tokens(bytes) as u64;
    if limit > 0 && min_tokens > limit {
        Err(ApiError::TextLength { bytes, min_tokens, limit })
    } else {
        Ok(())
    }
}

/// The tokens of a chat that ends where an answer begins. `documents`: the documents and the order of their indices.
fn chat_prompt(
    mut chat: Chat<'_>,
    (model, served): (&OfferedModel, Option<&ServedModel>),
    documents: (&[Document], &[usize]),
    bos: bool,
    fetched: Option<&Fetched>,
) -> Result<TokenIds, ApiError> {
    let files = chat.images.see(model, served, &chat.messages, fetched)?;
    let text = chat_text(&mut chat, model, documents, true)?;
    if files.is_empty() {
        return Ok(model.chat(&text, bos));
    }
    let placed = images::place(model, &text, files, bos);
    placed.map(|(tokens, _)| tokens).map_err(|reason| chat.images.wrong(chat.field, reason))
}

/// The text of a chat. `answer`: whether it ends where an answer begins.
fn chat_text(
    chat: &mut Chat<'_>,
    model: &OfferedModel,
    documents: (&[Document], &[usize]),
    answer: bool,
) -> Result<chat_template::Prompt, ApiError> {
    rendered(chat, model, documents, answer, false)?.ok_or(ApiError::Internal)
}

/// Like [`chat_text`]. `short`: returns `None` if rendering takes more than about a millisecond, or fails.
fn rendered(
    chat: &mut Chat<'_>,
    model: &OfferedModel,
    (documents, order): (&[Document], &[usize]),
    answer: bool,
    short: bool,
) -> Result<Option<chat_template::Prompt>, ApiError> {
    let Chat { field, messages, tools, template_arguments, ending, .. } = chat;
    if !documents.is_empty() {
        documents::insert(messages, documents, order)?;
    }
    let native = model.dialect.is_native();
    if !native {
        tools::describe(messages, tools)?;
    }
    let given = Some(tools.given.as_slice()).filter(|given| native && !given.is_empty());
    let template = model.template.as_ref();
    let template = template.ok_or_else(|| ApiError::field(*field, "the model has no chat template"))?;
    // A template without the role `developer` would write it literally or write nothing.
    if !template.mentions("developer") {
        for message in messages.iter_mut().filter(|message| message.role == "developer") {
            message.role = "system".to_owned();
        }
    }
    let answer = answer && *ending == Ending::Answer;
    let mut prompt = if short {
        let plain = given.is_none() && template_arguments.is_empty();
        match plain.then(|| template.render_shortly(messages, answer)).flatten() {
            Some(prompt) => prompt,
            None => return Ok(None),
        }
    } else {
        let rendered = template.render_marked(messages, given, answer, template_arguments);
        rendered.map_err(|error| match error {
            text::Error::ChatTemplate(TemplateError::Raised { message }) => ApiError::field(*field, message),
            error => ApiError::field(*field, error.to_string()),
        })?
    };
    if *ending == Ending::Continued {
        let end = end_of_last(&prompt.text, messages);
        let end = end.ok_or_else(|| ApiError::field(CONTINUE, "the template changes the last message"))?;
        prompt.text.truncate(end);
        prompt.quoted.retain_mut(|range| {
            range.end = range.end.min(end);
            range.start < range.end
        });
    }
    Ok(Some(prompt))
}

/// The end of the last message's text in a rendered chat.
fn end_of_last(text: &str, messages: &[Message<'_>]) -> Option<usize> {
    let content = messages.last()?.content.as_ref()?.texts().last()?;
    // Most templates trim whitespace around it.
    [content, content.trim()].iter().find_map(|content| text.rfind(content).map(|at| at + content.len()))
}

fn logprobs(kind: Kind, fields: &Fields<'_>) -> Result<Option<u8>, ApiError> {
    match kind {
        Kind::Completion => fields.ranged("logprobs", 0..=MAX_LOGPROBS),
        Kind::Chat | Kind::OllamaChat | Kind::OllamaGenerate => {
            let logprobs = fields.get("logprobs")?.unwrap_or(false);
            let top: Option<u8> = fields.ranged("top_logprobs", 0..=MAX_LOGPROBS)?;
            match (logprobs, top) {
                (false, Some(1..)) => Err(ApiError::field("top_logprobs", "only with logprobs")),
                (false, _) => Ok(None),
                (true, top) => Ok(Some(top.unwrap_or(0))),
            }
        }
        // Refused elsewhere, or not a field of these APIs.
        Kind::Responses | Kind::Messages => Ok(None),
    }
}

/// Refuses fields that would change the answer and are not served. They are never ignored.
fn refuse_unsupported(kind: Kind, fields: &Fields<'_>) -> Result<(), ApiError> {
    request_fields::refuse_unsupported(kind, fields)?;
    match kind {
        Kind::Completion | Kind::Chat | Kind::OllamaChat | Kind::OllamaGenerate => Ok(()),
        Kind::Responses => responses::refuse_unsupported(fields),
        Kind::Messages => messages::refuse_unsupported(fields),
    }
}
