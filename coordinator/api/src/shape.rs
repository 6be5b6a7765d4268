//! The parts of an answer, and how completions and chats write them: OpenAI's JSON with vLLM's additions.
//! Other APIs have their own [`Writer`].

use super::error::ApiError;
use super::progress::Status;
use dispatch::metrics::finish_name;
use proto::message::{FinishReason, Finished, PromptLogprob, TokenIds, TokenOut};
use serde::{Serialize, Serializer};
use serde_json::Value;
use std::borrow::Cow;
use std::time::Duration;
use text::Tokenizer;

mod logprobs;

pub(crate) use logprobs::of_tokens as token_logprobs;

/// How an API writes an answer: as a stream of events, in the order of these methods, or whole.
pub trait Writer: Send {
    fn id(&self) -> &str;
    /// Appends the start of a choice. `usage`: of the prompt, as far as known.
    fn write_start(&mut self, out: &mut Vec<u8>, choice: u32, usage: Usage);
    /// Appends new content of a choice.
    fn write_delta(&mut self, out: &mut Vec<u8>, choice: u32, delta: Delta, tokenizer: &Tokenizer);
    /// Appends the end of the answer.
    fn write_end(&mut self, out: &mut Vec<u8>, usage: Usage);
    /// Appends the error that ends the stream.
    fn write_error(&mut self, out: &mut Vec<u8>, error: &ApiError);
    /// The media type of a stream.
    fn content_type(&self) -> &'static str {
        "text/event-stream"
    }
    /// Appends what clients ignore, where there is nothing to send yet. `comment`: a comment of server-sent events.
    fn write_waiting(&mut self, out: &mut Vec<u8>, comment: &str) {
        out.extend_from_slice(comment.as_bytes());
    }
    /// Appends what clients ignore, between deltas.
    fn write_silence(&mut self, out: &mut Vec<u8>) {
        self.write_waiting(out, &Status::Generating.comment());
    }
    /// Appends an event with the state of an answer that has no token yet, for a client that asked for it.
    fn write_progress(&mut self, out: &mut Vec<u8>, progress: Value);
    /// The whole answer. `choices`: the complete content of each choice.
    fn whole(&mut self, choices: Vec<Delta>, usage: Usage, tokenizer: &Tokenizer) -> Vec<u8>;
}

/// The common fields of all objects of one answer.
#[derive(Debug)]
pub struct ResponseShape {
    /// Whether it answers a chat.
    pub chat: bool,
    pub id: String,
    /// Seconds since 1970.
    pub created: u64,
    pub model: String,
    /// Whether choices have token ids.
    pub token_ids: bool,
    pub logprobs: bool,
    /// Number of alternatives of an echoed prompt's tokens. `None`: log-probabilities do not begin with the prompt.
    pub echoed_top: Option<u8>,
    /// Number of alternatives in `prompt_logprobs`. `None`: the field is absent.
    pub prompt_top: Option<u8>,
    /// Whether a stream ends with a usage chunk.
    pub include_usage: bool,
}

/// New content of a choice.
#[derive(Debug, Default)]
pub struct Delta {
    /// Parts in order.
    pub parts: Vec<DeltaPart>,
    /// At the end: whether the choice called tools and the last call has all of its arguments.
    pub called: bool,
    /// At the end: whether the last call's arguments were cut off, for whatever reason.
    pub cut: bool,
    /// At the beginning: the prompt, if the answer tells of it.
    pub prompt: Option<PromptDelta>,
    /// The tokens of this content.
    pub tokens: Vec<TokenOut>,
    /// Offset of each token in the choice's text, in characters. Empty unless log-probabilities were
    /// requested.
    pub offsets: Vec<usize>,
    pub finished: Option<Finished>,
}

/// A prompt that an answer tells of.
#[derive(Debug)]
pub struct PromptDelta {
    pub tokens: TokenIds,
    /// Log-probabilities of the tokens from the second one on. Empty unless they were computed.
    pub logprobs: Vec<PromptLogprob>,
    /// Offset of each token in the choice's text, in characters. Empty without log-probabilities.
    pub offsets: Vec<usize>,
}

/// A part of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeltaPart {
    Text(String),
    Thought(String),
    /// A part of a tool call.
    Call(CallPart),
}

impl Delta {
    pub fn add(&mut self, next: Self) {
        for part in next.parts {
            self.push(part);
        }
        self.called |= next.called;
        self.cut |= next.cut;
        self.prompt = self.prompt.take().or(next.prompt);
        self.tokens.extend(next.tokens);
        self.offsets.extend(next.offsets);
        self.finished = next.finished.or(self.finished.take());
    }

    /// Adds a part, to the last part if it continues it.
    pub fn push(&mut self, part: DeltaPart) {
        match (self.parts.last_mut(), part) {
            (_, DeltaPart::Text(text) | DeltaPart::Thought(text)) if text.is_empty() => {}
            (Some(DeltaPart::Text(text)), DeltaPart::Text(more))
            | (Some(DeltaPart::Thought(text)), DeltaPart::Thought(more)) => {
                text.push_str(&more);
            }
            (Some(DeltaPart::Call(call)), DeltaPart::Call(more))
                if call.index == more.index && more.begins.is_none() =>
            {
                call.arguments.push_str(&more.arguments);
            }
            (_, part) => self.parts.push(part),
        }
    }

    fn text(&self) -> Cow<'_, str> {
        joined(self.parts.iter().filter_map(|part| match part {
            DeltaPart::Text(text) => Some(text.as_str()),
            _ => None,
        }))
    }

    fn thought(&self) -> Cow<'_, str> {
        joined(self.parts.iter().filter_map(|part| match part {
            DeltaPart::Thought(text) => Some(text.as_str()),
            _ => None,
        }))
    }

    fn calls(&self) -> impl Iterator<Item = &CallPart> {
        self.parts.iter().filter_map(|part| match part {
            DeltaPart::Call(part) => Some(part),
            _ => None,
        })
    }
}

/// Joins texts. There is rarely more than one, which is borrowed.
fn joined<'a>(mut texts: impl Iterator<Item = &'a str>) -> Cow<'a, str> {
    let first = Cow::Borrowed(texts.next().unwrap_or_default());
    texts.fold(first, |all, text| all + text)
}

/// New content of a tool call.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct CallPart {
    /// Index of the call in the choice.
    pub index: usize,
    /// The call's id and the tool's name, at its beginning.
    pub begins: Option<(String, String)>,
    /// The next part of the arguments.
    pub arguments: String,
}

/// Token counts of a response.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Usage {
    pub prompt: u64,
    /// Prompt tokens served from the prefix cache.
    pub cached: u64,
    /// Prompt tokens that are rows of images.
    pub image: u64,
    /// For each choice, why the prefix lookup stopped where it did.
    pub lookups: Vec<String>,
    pub completion: u64,
    /// Completion tokens of reasoning, including its marks.
    pub reasoning: u64,
    /// Draft tokens that the worker verified.
    pub drafted: u64,
    /// Draft tokens that were accepted.
    pub accepted: u64,
    pub times: Times,
}

/// Times of a response's first choice, since the arrival of the request.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Times {
    /// The time at which a worker took it.
    pub started: Duration,
    /// The time of its first token.
    pub first: Duration,
    /// The time of its last token.
    pub last: Duration,
    /// Until now.
    pub ended: Duration,
}

impl Usage {
    /// Draft tokens that were rejected.
    pub fn rejected(&self) -> u64 {
        self.drafted.saturating_sub(self.accepted)
    }
}

/// [`Usage`] as JSON.
#[derive(Debug, Serialize)]
struct UsageJson {
    prompt_tokens: u64,
    completion_tokens: u64,
    total_tokens: u64,
    prompt_tokens_details: PromptDetails,
    /// `None` without reasoning and draft tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    completion_tokens_details: Option<CompletionDetails>,
}

#[derive(Debug, Serialize)]
struct CompletionDetails {
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_tokens: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    accepted_prediction_tokens: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rejected_prediction_tokens: Option<u64>,
}

#[derive(Debug, Serialize)]
struct PromptDetails {
    cached_tokens: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    image_tokens: Option<u64>,
    kvasir_lookups: Vec<String>,
}

impl From<Usage> for UsageJson {
    fn from(usage: Usage) -> Self {
        let drafted = usage.drafted > 0;
        let details = CompletionDetails {
            reasoning_tokens: (usage.reasoning > 0).then_some(usage.reasoning),
            accepted_prediction_tokens: drafted.then_some(usage.accepted),
            rejected_prediction_tokens: drafted.then_some(usage.rejected()),
        };
        Self {
            prompt_tokens: usage.prompt,
            completion_tokens: usage.completion,
            total_tokens: usage.prompt + usage.completion,
            prompt_tokens_details: PromptDetails {
                cached_tokens: usage.cached,
                image_tokens: (usage.image > 0).then_some(usage.image),
                kvasir_lookups: usage.lookups,
            },
            completion_tokens_details: (drafted || usage.reasoning > 0).then_some(details),
        }
    }
}

/// A response, or a chunk of one.
#[derive(Debug, Serialize)]
struct Envelope<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: &'a [ChoiceBody<'a>],
    /// Of chats, which have one prompt. Completions have it in their choices.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<logprobs::OfPrompt<'a>>,
    /// Outer `None`: the field is absent. Inner `None`: null.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<UsageJson>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    progress: Option<Value>,
}

#[derive(Debug, Serialize)]
struct ChoiceBody<'a> {
    index: u32,
    logprobs: Option<Value>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_reason: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "ids")]
    token_ids: Option<&'a [TokenOut]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<logprobs::OfPrompt<'a>>,
    #[serde(flatten)]
    content: ChoiceContent<'a>,
}

/// The content of a choice, under the name of the API's object.
#[derive(Debug, Serialize)]
#[serde(rename_all = "lowercase")]
enum ChoiceContent<'a> {
    Text(Cow<'a, str>),
    Delta(MessageJson<'a>),
    Message(MessageJson<'a>),
}

#[derive(Debug, Default, Serialize)]
struct MessageJson<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    /// Outer `None`: the field is absent. Inner `None`: null.
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<Option<Cow<'a, str>>>,
    /// `None`: the field is absent. Otherwise null: nothing is refused here, but clients' types expect the
    /// field.
    #[serde(skip_serializing_if = "Option::is_none")]
    refusal: Option<()>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<CallJson<'a>>,
}

#[derive(Debug, Serialize)]
struct CallJson<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    r#type: Option<&'static str>,
    function: FunctionJson<'a>,
}

#[derive(Debug, Serialize)]
struct FunctionJson<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    arguments: &'a str,
}

impl<'a> MessageJson<'a> {
    /// The content of `delta`. In a stream, each call has its index.
    fn of(delta: &'a Delta, stream: bool) -> Self {
        let call = |part: &'a CallPart| {
            let begins = part.begins.as_ref();
            CallJson {
                index: stream.then_some(part.index),
                id: begins.map(|(id, _)| id.as_str()),
                r#type: begins.map(|_| "function"),
                function: FunctionJson {
                    name: begins.map(|(_, name)| name.as_str()),
                    arguments: &part.arguments,
                },
            }
        };
        Self {
            role: None,
            content: None,
            refusal: None,
            reasoning_content: Some(delta.thought()).filter(|thought| !thought.is_empty()),
            tool_calls: delta.calls().map(call).collect(),
        }
    }
}

fn ids<S: Serializer>(tokens: &Option<&[TokenOut]>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(tokens.iter().copied().flatten().map(|token| token.id))
}

impl Writer for ResponseShape {
    fn id(&self) -> &str {
        &self.id
    }

    /// Only a chat has an opening, which names the role.
    fn write_start(&mut self, out: &mut Vec<u8>, index: u32, _: Usage) {
        if self.chat {
            let content = Some(Some("".into()));
            let content = ChoiceContent::Delta(MessageJson {
                role: Some("assistant"),
                content,
                refusal: Some(()),
                ..MessageJson::default()
            });
            let choice = ChoiceBody {
                index,
                logprobs: None,
                finish_reason: None,
                stop_reason: None,
                token_ids: None,
                prompt_logprobs: None,
                content,
            };
            self.event(out, &[choice], self.include_usage.then_some(None));
        }
    }

    fn write_delta(&mut self, out: &mut Vec<u8>, index: u32, delta: Delta, tokenizer: &Tokenizer) {
        let (text, other) =
            (delta.text(), delta.parts.iter().any(|part| !matches!(part, DeltaPart::Text(_))));
        let silent = text.is_empty() && !other && delta.finished.is_none();
        let told = delta.prompt.is_some() && delta.tokens.is_empty();
        if silent && (told && self.echoed_top.is_none() || !self.token_ids && !self.logprobs) {
            return;
        }
        let content = match self.chat {
            false => ChoiceContent::Text(text),
            true => {
                let silent = (other || delta.finished.is_some()) && text.is_empty();
                ChoiceContent::Delta(MessageJson {
                    content: (!silent).then_some(Some(text)),
                    ..MessageJson::of(&delta, true)
                })
            }
        };
        let choice = self.choice(index, &delta, content, tokenizer);
        self.event(out, &[choice], self.include_usage.then_some(None));
    }

    fn write_end(&mut self, out: &mut Vec<u8>, usage: Usage) {
        if self.include_usage {
            self.event(out, &[], Some(Some(usage.into())));
        }
        out.extend_from_slice(b"data: [DONE]\n\n");
    }

    fn write_progress(&mut self, out: &mut Vec<u8>, progress: Value) {
        let usage = self.include_usage.then_some(None);
        self.write_chunk(out, &Envelope { progress: Some(progress), ..self.chunk(&[], usage) });
    }

    fn write_error(&mut self, out: &mut Vec<u8>, error: &ApiError) {
        out.extend_from_slice(format!("event: error\ndata: {}\n\n", error.body()).as_bytes());
    }

    fn whole(&mut self, choices: Vec<Delta>, usage: Usage, tokenizer: &Tokenizer) -> Vec<u8> {
        let of_chat = choices.first().filter(|_| self.chat);
        let of_chat = of_chat.and_then(|delta| self.prompt_logprobs(delta, tokenizer));
        let choices = (0u32..).zip(&choices).map(|(index, delta)| {
            let text = delta.text();
            let content = match self.chat {
                false => ChoiceContent::Text(text),
                true => {
                    let silent = text.is_empty() && delta.calls().next().is_some();
                    let content = Some((!silent).then_some(text));
                    let message = MessageJson::of(delta, false);
                    ChoiceContent::Message(MessageJson {
                        role: Some("assistant"),
                        content,
                        refusal: Some(()),
                        ..message
                    })
                }
            };
            self.choice(index, delta, content, tokenizer)
        });
        let choices: Vec<ChoiceBody<'_>> = choices.collect();
        let object = if self.chat { "chat.completion" } else { "text_completion" };
        let mut out = Vec::new();
        let chunk = self.chunk(&choices, Some(Some(usage.into())));
        write(&mut out, &Envelope { object, prompt_logprobs: of_chat, ..chunk });
        out
    }
}

fn write(out: &mut Vec<u8>, envelope: &Envelope<'_>) {
    if let Err(error) = serde_json::to_writer(out, envelope) {
        // Neither writing to memory nor serializing these types can fail.
        tracing::error!(%error, "a response could not be serialized");
    }
}

impl ResponseShape {
    /// vLLM's log-probabilities of the prompt.
    fn prompt_logprobs<'a>(
        &self,
        delta: &'a Delta,
        tokenizer: &'a Tokenizer,
    ) -> Option<logprobs::OfPrompt<'a>> {
        Some(logprobs::OfPrompt { prompt: delta.prompt.as_ref()?, top: self.prompt_top?, tokenizer })
    }

    fn event(&self, out: &mut Vec<u8>, choices: &[ChoiceBody<'_>], usage: Option<Option<UsageJson>>) {
        self.write_chunk(out, &self.chunk(choices, usage));
    }

    fn write_chunk(&self, out: &mut Vec<u8>, chunk: &Envelope<'_>) {
        out.extend_from_slice(b"data: ");
        write(out, chunk);
        out.extend_from_slice(b"\n\n");
    }

    fn chunk<'a>(&'a self, choices: &'a [ChoiceBody<'a>], usage: Option<Option<UsageJson>>) -> Envelope<'a> {
        let object = if self.chat { "chat.completion.chunk" } else { "text_completion" };
        let (id, created, model) = (&self.id, self.created, &self.model);
        Envelope { id, object, created, model, choices, prompt_logprobs: None, usage, progress: None }
    }

    fn choice<'a>(
        &self,
        index: u32,
        delta: &'a Delta,
        content: ChoiceContent<'a>,
        tokenizer: &'a Tokenizer,
    ) -> ChoiceBody<'a> {
        let logprobs = match (self.logprobs, self.chat) {
            (false, _) => None,
            (true, false) => Some(logprobs::of_completion(delta, self.echoed_top, tokenizer)),
            (true, true) => Some(logprobs::of_chat(delta, tokenizer)),
        };
        let finished = delta.finished.as_ref();
        ChoiceBody {
            index,
            logprobs,
            finish_reason: finished.map(|finished| match finished.reason {
                FinishReason::Stop if delta.called => "tool_calls",
                reason => finish_name(reason),
            }),
            stop_reason: finished.and_then(|finished| finished.matched.as_deref()),
            token_ids: self.token_ids.then_some(&delta.tokens),
            prompt_logprobs: self.prompt_logprobs(delta, tokenizer).filter(|_| !self.chat),
            content,
        }
    }
}
