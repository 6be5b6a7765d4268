//! How a model calls tools and thinks aloud: what it writes around both, as its chat template and its vocabulary say.
//!
//! From that comes the grammar of a call ([`Dialect::calls_grammar`]), and what an answer consists of ([`OutputParser`]).

use std::fmt::Write;

use serde_json::{Map, Value};

use crate::tokenizer::Kind;
use crate::{ChatTemplate, Tokenizer};

pub use listener::{OutputParser, ParsedDelta};
pub use stop::StopStrings;

mod call;
mod held;
mod listener;
mod stop;

/// A tool that a model may call.
#[derive(Debug, Clone, PartialEq)]
pub struct Tool {
    pub name: String,
    pub description: Option<String>,
    /// The schema of its arguments.
    pub parameters: Value,
    /// Whether what of it cannot be enforced is refused; else it is left out.
    pub strict: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Calls {
    /// `<tool_call>{"name": .., "arguments": ..}</tool_call>`, as Hermes, Qwen and Granite 4 do.
    Hermes,
    /// `{"name": .., "parameters": ..}` and nothing else, perhaps behind `<|python_tag|>`, as Llama 3 does.
    Llama,
    /// `[TOOL_CALLS][{"name": .., "arguments": ..}]`, as Mistral does.
    Mistral,
    /// `<|tool_call|>[{"name": .., "arguments": ..}]`, as Granite 3 does.
    Granite,
    /// A message in the commentary channel to the tool, as gpt-oss does.
    Harmony,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dialect {
    calls: Calls,
    native: bool,
    thinks: bool,
    /// Tokens of the vocabulary that mean something here. Of a mark that has a token no other text counts.
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
/// What may be a token of its own and is looked for in answers.
const MARKS: [&str; 13] =
    [THINK, THOUGHT, CALL, CALLED, PYTHON, MISTRAL, GRANITE, CHANNEL, MESSAGE, START, END, CALL_END, RETURN];
/// What the header of a call in the harmony format has in it.
const TO: &str = "to=functions.";

/// Whether a token steers an answer's structure: it is a mark of some dialect, and no ordinary piece of text.
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
    /// What `template` and the vocabulary tell; a model that says nothing of tools is asked for calls as Hermes writes
    /// them.
    pub fn of(template: Option<&ChatTemplate>, tokenizer: &Tokenizer) -> Self {
        let says = |text: &str| template.is_some_and(|template| template.mentions(text));
        let native = |calls| (calls, says("tools"));
        let (calls, native) = if says(CHANNEL) && says(MESSAGE) {
            native(Calls::Harmony)
        } else if says(MISTRAL) {
            native(Calls::Mistral)
        // With `<function=` in it a call is no JSON.
        } else if says(CALL) && !says("<function=") {
            native(Calls::Hermes)
        } else if says(GRANITE) {
            native(Calls::Granite)
        } else if says("parameters") && (says(PYTHON) || says("ipython")) {
            native(Calls::Llama)
        } else {
            (Calls::Hermes, false)
        };
        let tokens = 0..tokenizer.vocab_size() as u32;
        let marks = tokens.filter_map(|id| Some((id, mark_of(tokenizer, id)?))).collect();
        Self { calls, native, thinks: says(THINK), marks }
    }

    pub fn calls(&self) -> Calls {
        self.calls
    }

    /// Whether the template tells the model which tools there are; else the chat has to.
    pub fn is_native(&self) -> bool {
        self.native
    }

    /// Whether something of an answer may be no answer: thoughts, or headers of messages.
    pub fn thinks(&self) -> bool {
        self.thinks || self.calls == Calls::Harmony
    }

    /// The mark that this token is.
    pub fn mark(&self, token: u32) -> Option<&'static str> {
        self.marks.iter().find(|(id, _)| *id == token).map(|(_, text)| *text)
    }

    /// Whether the vocabulary has a token for this mark.
    fn has_token(&self, mark: &str) -> bool {
        self.marks.iter().any(|(_, text)| *text == mark)
    }

    /// Whether a model is in its thoughts already where `prompt` ends.
    pub fn is_thinking(&self, prompt: &str) -> bool {
        self.thinks && prompt.trim_end().ends_with(THINK)
    }

    /// What an answer has in it where calls begin; behind it they are of [`Self::calls_grammar`] as `behind`. None
    /// where a call begins as any answer may.
    pub fn trigger(&self) -> Option<&'static str> {
        match self.calls {
            Calls::Hermes => Some(CALL),
            Calls::Llama => Some(PYTHON),
            Calls::Mistral => Some(MISTRAL),
            Calls::Granite => Some(GRANITE),
            Calls::Harmony => Some("<|channel|>commentary to=functions."),
        }
    }

    /// A Lark grammar of calls of `tools`, of several where `parallel` and the dialect has that. `behind`: of what
    /// follows [`Self::trigger`]; else of a whole answer to `prompt`, with thoughts before it.
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

    /// A Lark grammar of a whole answer to `prompt` that is of `schema`, behind thoughts; also of one that calls `tools`
    /// instead.
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
                // Its own first line says where it starts.
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

    /// `rule` behind what may come before an answer; the rules of that go to `lark`.
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

    /// A text in a grammar, or the token that it is.
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

/// A schema as grammars take it: what it allows is written on one line, with a space behind commas and colons. `lenient`:
/// what of it cannot be enforced is left out; else it is refused.
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
