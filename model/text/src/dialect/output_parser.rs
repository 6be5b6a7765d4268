//! Streaming output parser: splits an answer into text, reasoning and tool calls.

use std::sync::Arc;

use super::call::CallReader;
use super::held::HeldText;
use super::{
    CALL, CALL_END, CALLED, CHANNEL, Calls, Dialect, END, GRANITE, MESSAGE, MISTRAL, PYTHON, RETURN, START,
    THINK, THOUGHT, TO,
};

/// Marks that end a harmony message.
const MESSAGE_ENDS: [&str; 4] = [END, START, CALL_END, RETURN];

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ParsedDelta {
    Text(String),
    /// Reasoning text.
    Thought(String),
    /// A call of this tool begins. The following [`ParsedDelta::Arguments`] belong to it.
    Call(String),
    /// Part of the arguments of the latest call, as JSON.
    Arguments(String),
}

/// Splits an answer into deltas. Holds back text that may still become a mark.
#[derive(Debug)]
pub struct OutputParser {
    dialect: Arc<Dialect>,
    /// Tools that may be called. If empty, calls are treated as text.
    tools: Vec<String>,
    state: State,
    held: HeldText,
    /// True while the answer has only whitespace.
    blank: bool,
    /// True if that whitespace separates reasoning, calls and text, and belongs to none of them.
    between: bool,
}

#[derive(Debug)]
enum State {
    Text,
    Thought,
    /// Between calls: the partial call, and the mark that opened the calls.
    Calls {
        call: Option<Call>,
        within: &'static str,
        any: bool,
    },
    /// In the header of a harmony message.
    Header,
    Message(Channel),
}

#[derive(Debug)]
struct Call {
    reader: CallReader,
    /// True once the start of the call was emitted.
    emitted: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Channel {
    Answer,
    Thoughts,
    Call,
}

impl OutputParser {
    /// `thinking`: the prompt ends inside the model's reasoning.
    pub fn new(dialect: Arc<Dialect>, tools: Vec<String>, thinking: bool) -> Self {
        let state = if thinking { State::Thought } else { State::Text };
        Self { dialect, tools, state, held: HeldText::default(), blank: true, between: false }
    }

    /// Parses the next text.
    pub fn push(&mut self, text: &str) -> Vec<ParsedDelta> {
        self.held.push(text);
        self.parse()
    }

    /// Parses the next token, which is a mark ([`Dialect::mark`]).
    pub fn push_mark(&mut self, mark: &'static str) -> Vec<ParsedDelta> {
        self.held.push_token(mark);
        self.parse()
    }

    fn parse(&mut self) -> Vec<ParsedDelta> {
        let mut deltas = Vec::new();
        while self.advance(&mut deltas, false) {}
        join(deltas)
    }

    /// True if the next text is reasoning, as far as is known.
    pub fn is_thinking(&self) -> bool {
        matches!(self.state, State::Thought | State::Message(Channel::Thoughts))
    }

    /// Ends the answer. `cut`: the model did not end it itself; then an incomplete mark or call is dropped.
    pub fn finish(&mut self, cut: bool) -> Vec<ParsedDelta> {
        if cut {
            self.drop_unfinished_mark();
        }
        let mut deltas = Vec::new();
        while self.advance(&mut deltas, true) {}
        let held = self.held.take_all();
        match std::mem::replace(&mut self.state, State::Text) {
            State::Text | State::Message(Channel::Answer) => deltas.push(ParsedDelta::Text(held)),
            State::Thought | State::Message(Channel::Thoughts) => deltas.push(ParsedDelta::Thought(held)),
            State::Message(Channel::Call) => deltas.push(ParsedDelta::Arguments(held)),
            State::Header => {}
            State::Calls { call: Some(Call { reader, emitted: false }), within, .. } => {
                if !cut || (within.is_empty() && !reader.may_become(&self.tools)) {
                    deltas.push(ParsedDelta::Text(format!("{within}{}", reader.text())));
                }
            }
            State::Calls { call: None, within, any: false } if !cut => {
                deltas.push(ParsedDelta::Text(format!("{within}{held}")));
            }
            State::Calls { .. } => {}
        }
        join(deltas)
    }

    /// Drops an incomplete mark at the end of a cut answer. A single character inside an answer is kept,
    /// since it is more likely text.
    fn drop_unfinished_mark(&mut self) {
        let (marks, surely) = match &self.state {
            State::Text => (self.text_marks(), self.blank),
            State::Thought => (vec![THOUGHT], false),
            State::Message(_) => (MESSAGE_ENDS.to_vec(), false),
            State::Calls { call: None, within, .. } if *within == CALL => (vec![CALLED], true),
            State::Calls { .. } | State::Header => return,
        };
        if let Some(at) = self.held.unfinished(&self.dialect, &marks)
            && (surely || self.held.text().len() - at > 1)
        {
            let rest = self.held.text()[..at].to_owned();
            self.held = HeldText::default();
            self.held.push(&rest);
        }
    }

    /// Parses part of the held text. Returns false if more input is needed.
    fn advance(&mut self, deltas: &mut Vec<ParsedDelta>, last: bool) -> bool {
        match &mut self.state {
            State::Text => self.text(deltas, last),
            State::Thought => {
                let found = self.until(&[THOUGHT], last, deltas, ParsedDelta::Thought);
                if found.is_some() {
                    self.state = State::Text;
                    (self.blank, self.between) = (true, true);
                }
                found.is_some()
            }
            State::Calls { .. } => self.calls(deltas, last),
            State::Header => {
                let Some(at) = self.held.find(&self.dialect, MESSAGE) else { return false };
                let header = self.held.take(at + MESSAGE.len());
                let channel = match header.split(CHANNEL).nth(1).unwrap_or_default().trim_start() {
                    channel if channel.starts_with("analysis") => Channel::Thoughts,
                    _ => match header.split_once(TO) {
                        Some((_, to)) if !self.tools.is_empty() => {
                            let name: String =
                                to.chars().take_while(|c| !c.is_whitespace() && *c != '<').collect();
                            deltas.push(ParsedDelta::Call(name));
                            Channel::Call
                        }
                        _ => Channel::Answer,
                    },
                };
                self.state = State::Message(channel);
                true
            }
            State::Message(channel) => {
                let to_delta: fn(String) -> ParsedDelta = match channel {
                    Channel::Answer => ParsedDelta::Text,
                    Channel::Thoughts => ParsedDelta::Thought,
                    Channel::Call => ParsedDelta::Arguments,
                };
                let found = self.until(&MESSAGE_ENDS, last, deltas, to_delta);
                if let Some(mark) = found {
                    self.state = if mark == START { State::Header } else { State::Text };
                }
                found.is_some()
            }
        }
    }

    fn text(&mut self, deltas: &mut Vec<ParsedDelta>, last: bool) -> bool {
        if self.blank {
            let start = self.held.text().trim_start();
            let space = self.held.text().len() - start.len();
            // Whitespace before reasoning and calls, or after reasoning, is not part of the answer.
            let decided = !start.is_empty() || last;
            let bare = self.dialect.calls == Calls::Llama && !self.tools.is_empty() && start.starts_with('{');
            if !decided {
                return false;
            }
            if bare {
                self.held.take(space);
                self.state = State::Calls { call: None, within: "", any: false };
                return true;
            }
            if self.between {
                self.held.take(space);
            }
        }
        let marks = self.text_marks();
        let blank = self.blank;
        let before = deltas.len();
        let found = self.until(&marks, last, deltas, ParsedDelta::Text);
        let spoken =
            |delta: &ParsedDelta| matches!(delta, ParsedDelta::Text(text) if !text.trim().is_empty());
        let spoke = deltas[before..].iter().any(spoken);
        if blank && !spoke && (found.is_some() || !last) {
            let space: Vec<ParsedDelta> = deltas.drain(before..).collect();
            if let (None, Some(ParsedDelta::Text(space))) = (found, space.first()) {
                // The text that follows decides whether this whitespace belongs to the answer.
                self.held.put_back(space);
            }
        }
        self.blank = blank && !spoke;
        match found {
            Some(THINK) if blank && !spoke => self.state = State::Thought,
            // Inside an answer this mark is text.
            Some(THINK) => deltas.push(ParsedDelta::Text(THINK.to_owned())),
            Some(CHANNEL) => {
                self.held.put_back(CHANNEL);
                self.state = State::Header;
            }
            Some(START) => self.state = State::Header,
            // End marks after the last message.
            Some(END | CALL_END | RETURN) => {}
            Some(mark) => self.state = State::Calls { call: None, within: mark, any: false },
            None => return false,
        }
        true
    }

    /// Marks that may follow in the current text.
    fn text_marks(&self) -> Vec<&'static str> {
        let tools = !self.tools.is_empty();
        let mut marks = Vec::new();
        if self.dialect.thinks && self.blank {
            marks.push(THINK);
        }
        match self.dialect.calls {
            Calls::Harmony => marks.extend([CHANNEL, START, END, CALL_END, RETURN]),
            Calls::Hermes if tools => marks.push(CALL),
            Calls::Llama if tools => marks.push(PYTHON),
            Calls::Mistral if tools => marks.push(MISTRAL),
            Calls::Granite if tools => marks.push(GRANITE),
            _ => {}
        }
        marks
    }

    fn calls(&mut self, deltas: &mut Vec<ParsedDelta>, last: bool) -> bool {
        let State::Calls { call, within, any } = &mut self.state else { return false };
        if let Some(Call { reader, emitted }) = call {
            let taken = reader.push(self.held.text());
            self.held.take(taken);
            if !*emitted && let Some(name) = reader.name() {
                if self.tools.iter().any(|tool| tool == name) {
                    *emitted = true;
                    *any = true;
                    deltas.push(ParsedDelta::Call(name.to_owned()));
                } else {
                    // Not a tool of this request: this call and everything after it are text.
                    let text = format!("{within}{}", reader.text());
                    deltas.push(ParsedDelta::Text(text));
                    self.blank = false;
                    self.state = State::Text;
                    return true;
                }
            }
            if *emitted {
                deltas.push(ParsedDelta::Arguments(reader.arguments()));
            }
            if reader.is_over() {
                if !*emitted {
                    let text = format!("{within}{}", reader.text());
                    deltas.push(ParsedDelta::Text(text));
                    self.blank = false;
                    self.state = State::Text;
                    return true;
                }
                *call = None;
                return true;
            }
            return false;
        }
        let between = |c: char| c.is_whitespace() || matches!(c, '[' | ']' | ',' | ';');
        let rest = self.held.text().trim_start_matches(between).len();
        if rest == 0 && !last {
            // More input decides whether this whitespace is between two calls.
            return false;
        }
        // Skipped text is removed only once it is known what follows it.
        let passed = self.held.text().len() - rest;
        let next = &self.held.text()[passed..];
        if next.starts_with('{') {
            self.held.take(passed);
            *call = Some(Call { reader: CallReader::default(), emitted: false });
            return true;
        }
        if *within == CALL {
            if next.starts_with(CALLED) {
                self.held.take(passed + CALLED.len());
                self.state = State::Text;
                (self.blank, self.between) = (true, true);
                return true;
            }
            if CALLED.starts_with(next) && !last {
                return false;
            }
        }
        if rest == 0 {
            return false;
        }
        let passed = self.held.take(passed);
        let text = if *any { String::new() } else { format!("{within}{passed}") };
        deltas.push(ParsedDelta::Text(text));
        self.blank = false;
        self.state = State::Text;
        true
    }

    /// Emits the held text up to the first of `marks`, which is removed and returned. If there is none, emits
    /// everything that cannot begin a mark.
    fn until(
        &mut self,
        marks: &[&'static str],
        last: bool,
        deltas: &mut Vec<ParsedDelta>,
        to_delta: fn(String) -> ParsedDelta,
    ) -> Option<&'static str> {
        let found = marks.iter().filter_map(|mark| Some((self.held.find(&self.dialect, mark)?, *mark)));
        if let Some((at, mark)) = found.min_by_key(|(at, _)| *at) {
            deltas.push(to_delta(self.held.take(at)));
            self.held.take(mark.len());
            return Some(mark);
        }
        let keep = if last { None } else { self.held.unfinished(&self.dialect, marks) };
        let certain = keep.unwrap_or(self.held.text().len());
        deltas.push(to_delta(self.held.take(certain)));
        None
    }
}

/// Drops empty deltas and joins neighbours of the same kind.
fn join(deltas: Vec<ParsedDelta>) -> Vec<ParsedDelta> {
    let mut joined: Vec<ParsedDelta> = Vec::new();
    for delta in deltas {
        match (joined.last_mut(), &delta) {
            (_, ParsedDelta::Text(text) | ParsedDelta::Thought(text) | ParsedDelta::Arguments(text))
                if text.is_empty() => {}
            (Some(ParsedDelta::Text(before)), ParsedDelta::Text(text))
            | (Some(ParsedDelta::Thought(before)), ParsedDelta::Thought(text))
            | (Some(ParsedDelta::Arguments(before)), ParsedDelta::Arguments(text)) => before.push_str(text),
            _ => joined.push(delta),
        }
    }
    joined
}
