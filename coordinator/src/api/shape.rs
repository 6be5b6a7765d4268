//! What an answer is made of, and how completions and chats write it: JSON as OpenAI's clients expect it, with vLLM's
//! additions. Other APIs have a [`Writer`] of their own.

use super::error::ApiError;
use crate::metrics::finish_name;
use model::Tokenizer;
use proto::message::{FinishReason, Finished, TokenOut};
use serde::{Serialize, Serializer};
use serde_json::Value;
use std::borrow::Cow;

mod logprobs;

/// How an API writes an answer: as a stream of events, in the order of these methods, or whole.
pub trait Writer: Send {
    fn id(&self) -> &str;
    /// Appends that a choice begins. `usage`: of the prompt, as far as it is known.
    fn opens(&mut self, out: &mut Vec<u8>, choice: u32, usage: Usage);
    /// Appends something new of a choice.
    fn says(&mut self, out: &mut Vec<u8>, choice: u32, delta: Delta, tokenizer: &Tokenizer);
    /// Appends that all has been said.
    fn ends(&mut self, out: &mut Vec<u8>, usage: Usage);
    /// Appends why there will be no more.
    fn fails(&mut self, out: &mut Vec<u8>, error: &ApiError);
    /// The whole answer, of which each choice has said this.
    fn whole(&mut self, choices: Vec<Delta>, usage: Usage, tokenizer: &Tokenizer) -> Vec<u8>;
}

/// What all objects of one answer have in common.
#[derive(Debug)]
pub struct ResponseShape {
    /// Whether it is a chat's.
    pub chat: bool,
    pub id: String,
    /// Seconds since 1970.
    pub created: u64,
    pub model: String,
    /// Whether choices carry token ids.
    pub token_ids: bool,
    pub logprobs: bool,
    /// Whether a stream ends with a chunk that tells the usage.
    pub include_usage: bool,
}

/// Something new of a choice.
#[derive(Debug, Default)]
pub struct Delta {
    /// What is said, in its order.
    pub said: Vec<DeltaPart>,
    /// At the end: whether the choice has called tools, the last of them with all of its arguments.
    pub called: bool,
    /// At the end: whether the last call lacks some of its arguments, whatever has ended the choice.
    pub cut: bool,
    /// The tokens that it came with.
    pub tokens: Vec<TokenOut>,
    /// Where each of them begins, in characters of the choice's text; only where log-probabilities are told.
    pub offsets: Vec<usize>,
    pub finished: Option<Finished>,
}

/// A part of what is said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeltaPart {
    Text(String),
    Thought(String),
    /// Of a call of a tool.
    Call(CallPart),
}

impl Delta {
    pub fn add(&mut self, next: Self) {
        for part in next.said {
            self.say(part);
        }
        self.called |= next.called;
        self.cut |= next.cut;
        self.tokens.extend(next.tokens);
        self.offsets.extend(next.offsets);
        self.finished = next.finished.or(self.finished.take());
    }

    /// Adds a part, to the last one if it goes on there.
    pub fn say(&mut self, part: DeltaPart) {
        match (self.said.last_mut(), part) {
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
            (_, part) => self.said.push(part),
        }
    }

    fn text(&self) -> Cow<'_, str> {
        joined(self.said.iter().filter_map(|part| match part {
            DeltaPart::Text(text) => Some(text.as_str()),
            _ => None,
        }))
    }

    fn thought(&self) -> Cow<'_, str> {
        joined(self.said.iter().filter_map(|part| match part {
            DeltaPart::Thought(text) => Some(text.as_str()),
            _ => None,
        }))
    }

    fn calls(&self) -> impl Iterator<Item = &CallPart> {
        self.said.iter().filter_map(|part| match part {
            DeltaPart::Call(part) => Some(part),
            _ => None,
        })
    }
}

/// Hardly ever are there two.
fn joined<'a>(mut texts: impl Iterator<Item = &'a str>) -> Cow<'a, str> {
    let first = Cow::Borrowed(texts.next().unwrap_or_default());
    texts.fold(first, |all, text| all + text)
}

/// Something new of a call of a tool.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct CallPart {
    /// Which call of the choice.
    pub index: usize,
    /// Its id and the tool's name, where it begins.
    pub begins: Option<(String, String)>,
    /// What comes next of its arguments.
    pub arguments: String,
}

/// Tokens counted, as clients are told.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Usage {
    pub prompt: u64,
    /// Of these, served from the prefix cache.
    pub cached: u64,
    /// Per choice, why the prefix lookup stopped where it did.
    pub lookups: Vec<String>,
    pub completion: u64,
    /// Of these, what the model has thought, with the marks around it.
    pub reasoning: u64,
    /// Tokens that a worker guessed and looked at.
    pub drafted: u64,
    /// Of these, right and so generated.
    pub accepted: u64,
}

impl Usage {
    /// Tokens that a worker guessed wrong.
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
    /// Where something was thought or guessed.
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
    kvasir_lookups: Vec<String>,
}

impl From<Usage> for UsageJson {
    fn from(usage: Usage) -> Self {
        let guessed = usage.drafted > 0;
        let details = CompletionDetails {
            reasoning_tokens: (usage.reasoning > 0).then_some(usage.reasoning),
            accepted_prediction_tokens: guessed.then_some(usage.accepted),
            rejected_prediction_tokens: guessed.then_some(usage.rejected()),
        };
        Self {
            prompt_tokens: usage.prompt,
            completion_tokens: usage.completion,
            total_tokens: usage.prompt + usage.completion,
            prompt_tokens_details: PromptDetails {
                cached_tokens: usage.cached,
                kvasir_lookups: usage.lookups,
            },
            completion_tokens_details: (guessed || usage.reasoning > 0).then_some(details),
        }
    }
}

/// An answer, or a chunk of one.
#[derive(Debug, Serialize)]
struct Envelope<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: &'a [ChoiceBody<'a>],
    /// Not there, not yet known, or known.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<UsageJson>>,
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
    #[serde(flatten)]
    said: ChoiceContent<'a>,
}

/// What a choice says, under the name that its kind of answer has for it.
#[derive(Debug, Serialize)]
#[serde(rename_all = "lowercase")]
enum ChoiceContent<'a> {
    Text(Cow<'a, str>),
    Delta(Speech<'a>),
    Message(Speech<'a>),
}

#[derive(Debug, Default, Serialize)]
struct Speech<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    /// Not there, none, or this.
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<Option<Cow<'a, str>>>,
    /// Not there, or none: nobody refuses here, but clients' types have it.
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

impl<'a> Speech<'a> {
    /// What `delta` has; of a stream each call says which one it is.
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

    /// In a chat it is said who speaks; of other answers nothing is.
    fn opens(&mut self, out: &mut Vec<u8>, index: u32, _: Usage) {
        if self.chat {
            let content = Some(Some("".into()));
            let said = ChoiceContent::Delta(Speech {
                role: Some("assistant"),
                content,
                refusal: Some(()),
                ..Speech::default()
            });
            let choice = ChoiceBody {
                index,
                logprobs: None,
                finish_reason: None,
                stop_reason: None,
                token_ids: None,
                said,
            };
            self.event(out, &[choice], self.include_usage.then_some(None));
        }
    }

    fn says(&mut self, out: &mut Vec<u8>, index: u32, delta: Delta, tokenizer: &Tokenizer) {
        let (text, other) = (delta.text(), delta.said.iter().any(|part| !matches!(part, DeltaPart::Text(_))));
        let silent = text.is_empty() && !other && delta.finished.is_none();
        if silent && !self.token_ids && !self.logprobs {
            return;
        }
        let said = match self.chat {
            false => ChoiceContent::Text(text),
            true => {
                let silent = (other || delta.finished.is_some()) && text.is_empty();
                ChoiceContent::Delta(Speech {
                    content: (!silent).then_some(Some(text)),
                    ..Speech::of(&delta, true)
                })
            }
        };
        let choice = self.choice(index, &delta, said, tokenizer);
        self.event(out, &[choice], self.include_usage.then_some(None));
    }

    fn ends(&mut self, out: &mut Vec<u8>, usage: Usage) {
        if self.include_usage {
            self.event(out, &[], Some(Some(usage.into())));
        }
        out.extend_from_slice(b"data: [DONE]\n\n");
    }

    fn fails(&mut self, out: &mut Vec<u8>, error: &ApiError) {
        out.extend_from_slice(format!("event: error\ndata: {}\n\n", error.body()).as_bytes());
    }

    fn whole(&mut self, choices: Vec<Delta>, usage: Usage, tokenizer: &Tokenizer) -> Vec<u8> {
        let choices = (0u32..).zip(&choices).map(|(index, delta)| {
            let text = delta.text();
            let said = match self.chat {
                false => ChoiceContent::Text(text),
                true => {
                    let silent = text.is_empty() && delta.calls().next().is_some();
                    let content = Some((!silent).then_some(text));
                    let speech = Speech::of(delta, false);
                    ChoiceContent::Message(Speech {
                        role: Some("assistant"),
                        content,
                        refusal: Some(()),
                        ..speech
                    })
                }
            };
            self.choice(index, delta, said, tokenizer)
        });
        let choices: Vec<ChoiceBody<'_>> = choices.collect();
        let object = if self.chat { "chat.completion" } else { "text_completion" };
        let mut out = Vec::new();
        self.write(&mut out, object, &choices, Some(Some(usage.into())));
        out
    }
}

impl ResponseShape {
    fn event(&self, out: &mut Vec<u8>, choices: &[ChoiceBody<'_>], usage: Option<Option<UsageJson>>) {
        let object = if self.chat { "chat.completion.chunk" } else { "text_completion" };
        out.extend_from_slice(b"data: ");
        self.write(out, object, choices, usage);
        out.extend_from_slice(b"\n\n");
    }

    fn write(
        &self,
        out: &mut Vec<u8>,
        object: &'static str,
        choices: &[ChoiceBody<'_>],
        usage: Option<Option<UsageJson>>,
    ) {
        let envelope =
            Envelope { id: &self.id, object, created: self.created, model: &self.model, choices, usage };
        if let Err(error) = serde_json::to_writer(out, &envelope) {
            // Neither memory nor these types can fail.
            tracing::error!(%error, "an answer could not be written");
        }
    }

    fn choice<'a>(
        &self,
        index: u32,
        delta: &'a Delta,
        said: ChoiceContent<'a>,
        tokenizer: &Tokenizer,
    ) -> ChoiceBody<'a> {
        let logprobs = match (self.logprobs, self.chat) {
            (false, _) => None,
            (true, false) => Some(logprobs::of_completion(delta, tokenizer)),
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
            said,
        }
    }
}
