//! Dialect: the markup that a model uses for tool calls and reasoning, derived from its chat template and
//! vocabulary.
//!
//! A dialect provides the grammar of a call ([`Dialect::calls_grammar`]) and parses answers
//! ([`OutputParser`]).

use std::fmt::Write;

use serde_json::{Map, Value};

use crate::tokenizer::Kind;
use crate::{ChatTemplate, Tokenizer};

pub use output_parser::{OutputParser, ParsedDelta};
pub use stop::StopStrings;

mod call;
mod held;
mod output_parser;
mod stop;

/// A tool that a model may call.
#[derive(Debug, Clone, PartialEq)]
pub struct Tool {
    pub name: String,
    pub description: Option<String>,
    /// JSON Schema of the arguments.
    pub parameters: Value,
    /// True: a schema that cannot be fully enforced is refused. False: unenforceable parts are dropped.
    pub strict: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Calls {
    /// `<tool_call>{"name": .., "arguments": ..}</tool_call>`: Hermes, Qwen, Granite 4.
    Hermes,
    /// A bare `{"name": .., "parameters": ..}`, optionally after `<|python_tag|>`: Llama 3.
    Llama,
    /// `[TOOL_CALLS][{"name": .., "arguments": ..}]`: Mistral.
    Mistral,
    /// `<|tool_call|>[{"name": .., "arguments": ..}]`: Granite 3.
    Granite,
    /// A message to the tool in the commentary channel: gpt-oss.
    Harmony,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dialect {
    calls: Calls,
    native: bool,
    thinks: bool,
    /// Tokens of the vocabulary that are marks. If a mark has a token, only that token counts, not the same
    /// text.
    marks: Vec<(u32, &'static str)>,
}

const THINK: &str = "<think>";
const THOUGHT: &str = "</think>";
const CALL: &str = "<tool_call>";
const CALLED: &str = "</tool_call>";
const PYTHON: &str = "<|python_tag|>";
const MISTRAL: &str = "[TOOL_CALLS]";
const GRANITE: &str = "<|tool_call|>";
const CHANNEL: &str = "<|channel|>";
const MESSAGE: &str = "<|message|>";
const START: &str = "<|start|>";
const END: &str = "<|end|>";
const CALL_END: &str = "<|call|>";
const RETURN: &str = "<|return|>";
/// Marks that may be single tokens and are searched for in answers.
const MARKS: [&str; 13] =
    [THINK, THOUGHT, CALL, CALLED, PYTHON, MISTRAL, GRANITE, CHANNEL, MESSAGE, START, END, CALL_END, RETURN];
/// Part of a harmony call's header.
const TO: &str = "to=functions.";

/// True if a token is a mark of some dialect, not ordinary text.
pub fn is_mark(tokenizer: &Tokenizer, token: u32) -> bool {
    mark_of(tokenizer, token).is_some()
}

fn mark_of(tokenizer: &Tokenizer, token: u32) -> Option<&'static str> {
    if !matches!(tokenizer.kind(token), Some(Kind::Control | Kind::UserDefined)) {
        return None;
    }
    let text = tokenizer.token_text(token)?;
    MARKS.into_iter().find(|mark| *mark == text)
}

impl Dialect {
    /// Derives the dialect from the template and the vocabulary. If the template has no tool markup, the
    /// prompt requests calls in Hermes format.
    pub fn of(template: Option<&ChatTemplate>, tokenizer: &Tokenizer) -> Self {
        let mentions = |text: &str| template.is_some_and(|template| template.mentions(text));
        let native = |calls| (calls, mentions("tools"));
        let (calls, native) = if mentions(CHANNEL) && mentions(MESSAGE) {
            native(Calls::Harmony)
        } else if mentions(MISTRAL) {
            native(Calls::Mistral)
        // A template with `<function=` does not write calls as JSON.
        } else if mentions(CALL) && !mentions("<function=") {
            native(Calls::Hermes)
        } else if mentions(GRANITE) {
            native(Calls::Granite)
        } else if mentions("parameters") && (mentions(PYTHON) || mentions("ipython")) {
            native(Calls::Llama)
        } else {
            (Calls::Hermes, false)
        };
        let tokens = 0..tokenizer.vocab_size() as u32;
        let marks = tokens.filter_map(|id| Some((id, mark_of(tokenizer, id)?))).collect();
        Self { calls, native, thinks: mentions(THINK), marks }
    }

    pub fn calls(&self) -> Calls {
        self.calls
    }

    /// True if the template describes the tools to the model. Otherwise the chat must do so.
    pub fn is_native(&self) -> bool {
        self.native
    }

    /// True if an answer may contain reasoning or message headers.
    pub fn thinks(&self) -> bool {
        self.thinks || self.calls == Calls::Harmony
    }

    /// The mark of this token; `None` for other tokens.
    pub fn mark(&self, token: u32) -> Option<&'static str> {
        self.marks.iter().find(|(id, _)| *id == token).map(|(_, text)| *text)
    }

    /// True if the vocabulary has a token for this mark.
    fn has_token(&self, mark: &str) -> bool {
        self.marks.iter().any(|(_, text)| *text == mark)
    }

    /// True if the model is already in its reasoning at the end of `prompt`.
    pub fn is_thinking(&self, prompt: &str) -> bool {
        self.thinks && prompt.trim_end().ends_with(THINK)
    }

    /// The text that precedes calls; what follows it matches [`Self::calls_grammar`] with `behind`. `None` if
    /// a call has no such text.
    pub fn trigger(&self) -> Option<&'static str> {
        match self.calls {
            Calls::Hermes => Some(CALL),
            Calls::Llama => Some(PYTHON),
            Calls::Mistral => Some(MISTRAL),
            Calls::Granite => Some(GRANITE),
            Calls::Harmony => Some("<|channel|>commentary to=functions."),
        }
    }

    /// A Lark grammar for calls of `tools`; several calls if `parallel` and the dialect supports it. With
    /// `behind`, it matches the text after [`Self::trigger`]; otherwise a whole answer to `prompt`, including
    /// reasoning.
    pub fn calls_grammar(&self, tools: &[Tool], parallel: bool, behind: bool, prompt: &str) -> String {
        let mut lark = String::new();
        let call = |lark: &mut String, key: &str| {
            let mut names = Vec::new();
            for (at, tool) in tools.iter().enumerate() {
                let head = format!("{{\"name\": {}, \"{key}\": ", Value::from(tool.name.as_str()));
                // Writing to a string does not fail.
                let _ = writeln!(lark, "call_{at}: {} args_{at} \"}}\"", quoted(&head));
                let _ = writeln!(lark, "args_{at}: %json {}", schema(&tool.parameters, !tool.strict));
                names.push(format!("call_{at}"));
            }
            let _ = writeln!(lark, "call: {}", names.join(" | "));
        };
        let several = |first: String, more: String| match parallel {
            true => format!("{first} ({more})*"),
            false => first,
        };
        let body = match self.calls {
            Calls::Hermes => {
                call(&mut lark, "arguments");
                let (open, close) = (self.atom(CALL), self.atom(CALLED));
                let first = format!("\"\\n\" call \"\\n\" {close}");
                let more = format!("\"\\n\" {open} {first}");
                let first = if behind { first } else { format!("{open} {first}") };
                several(first, more)
            }
            Calls::Llama => {
                call(&mut lark, "parameters");
                "call".to_owned()
            }
            Calls::Mistral | Calls::Granite => {
                call(&mut lark, "arguments");
                let open = self.atom(if self.calls == Calls::Mistral { MISTRAL } else { GRANITE });
                let list = format!("\"[\" {} \"]\"", several("call".to_owned(), "\", \" call".to_owned()));
                if behind { list } else { format!("{open} {list}") }
            }
            Calls::Harmony => {
                let mut names = Vec::new();
                for (at, tool) in tools.iter().enumerate() {
                    let head = quoted(&format!("{} <|constrain|>json<|message|>", tool.name));
                    let _ = writeln!(lark, "call_{at}: {head} args_{at}");
                    let _ = writeln!(lark, "args_{at}: %json {}", schema(&tool.parameters, !tool.strict));
                    names.push(format!("call_{at}"));
                }
                let _ = writeln!(lark, "call: {}", names.join(" | "));
                match behind {
                    true => "call".to_owned(),
                    false => format!("{} call", quoted("<|channel|>commentary to=functions.")),
                }
            }
        };
        let _ = writeln!(lark, "calls: {body}");
        let start =
            if behind { "calls".to_owned() } else { self.behind_thoughts("calls", prompt, &mut lark) };
        format!("start: {start}\n{lark}")
    }

    /// A Lark grammar for a whole answer to `prompt` that matches `schema` after optional reasoning, or that
    /// calls `tools` instead.
    pub fn answer_grammar(&self, schema: &Value, tools: &[Tool], parallel: bool, prompt: &str) -> String {
        let mut lark = String::new();
        let json = format!("json: %json {schema}");
        let answer = match self.calls {
            Calls::Harmony => format!("{} json", quoted("<|channel|>final<|message|>")),
            _ => "json".to_owned(),
        };
        let start = match tools.is_empty() {
            true => format!("answer: {answer}"),
            false => {
                let calls = self.calls_grammar(tools, parallel, true, "");
                // The first line of the calls grammar is its start rule, which is skipped.
                lark += calls.split_once('\n').map_or("", |(_, rules)| rules);
                let open = self.trigger().map_or_else(String::new, |text| match self.calls {
                    Calls::Harmony => quoted(text),
                    Calls::Llama => String::new(),
                    _ => self.atom(text),
                });
                format!("answer: {answer} | {open} calls")
            }
        };
        let first = self.behind_thoughts("answer", prompt, &mut lark);
        format!("start: {first}\n{start}\n{json}\n{lark}")
    }

    /// A rule that matches optional reasoning followed by `rule`. Appends the helper rules to `lark`.
    fn behind_thoughts(&self, rule: &str, prompt: &str, lark: &mut String) -> String {
        if self.calls == Calls::Harmony {
            let thoughts = quoted("<|channel|>analysis<|message|>");
            let next = quoted("<|start|>assistant");
            let _ = writeln!(lark, "thoughts: {thoughts} thought {next}");
            let _ = writeln!(lark, "thought[suffix={}]: /(?s:.*)/", quoted(END));
            return format!("thoughts? {rule}");
        }
        if !self.thinks {
            return rule.to_owned();
        }
        match self.marks.iter().find(|(_, text)| *text == THOUGHT) {
            Some((id, _)) => {
                let _ = writeln!(lark, "thought: /(?s:.*)/ <[{id}]>");
            }
            None => {
                let _ = writeln!(lark, "thought[suffix={}]: /(?s:.*)/", quoted(THOUGHT));
            }
        }
        let _ = writeln!(lark, "gap: /[ \\n]{{1,3}}/");
        match self.is_thinking(prompt) {
            true => format!("thought gap? {rule}"),
            false => format!("({} thought gap?)? {rule}", self.atom(THINK)),
        }
    }

    /// A grammar atom for `text`: its token if it is a mark, else a string.
    fn atom(&self, text: &str) -> String {
        match self.marks.iter().find(|(_, mark)| *mark == text) {
            Some((id, _)) => format!("<[{id}]>"),
            None => quoted(text),
        }
    }
}

fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// Prepares a schema for grammars: JSON on one line, with a space after commas and colons. `lenient` drops
/// unenforceable parts; otherwise they are refused.
pub fn schema(schema: &Value, lenient: bool) -> Value {
    let mut options = Map::new();
    options.insert("whitespace_flexible".into(), false.into());
    options.insert("item_separator".into(), ", ".into());
    options.insert("key_separator".into(), ": ".into());
    options.insert("lenient".into(), lenient.into());
    let mut schema = match schema {
        Value::Object(schema) => schema.clone(),
        Value::Bool(false) => Map::from_iter([("not".to_owned(), Value::Object(Map::new()))]),
        _ => Map::new(),
    };
    schema.insert("x-guidance".into(), options.into());
    Value::Object(schema)
}

#[cfg(test)]
mod tests;
