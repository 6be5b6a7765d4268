//! What an answer consists of, while it comes: text, thoughts, calls of tools.

use std::sync::Arc;

use super::call::CallReader;
use super::{
    CALL, CALLED, CHANNEL, Calls, Dialect, END, GRANITE, MESSAGE, MISTRAL, PYTHON, START, THINK, THOUGHT, TO,
};

/// A part of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Said {
    /// Of the answer itself.
    Text(String),
    /// Of what the model thinks.
    Thought(String),
    /// A call of this tool begins; what follows as [`Said::Arguments`] is its.
    Call(String),
    /// Of the arguments of the call that has begun last, as JSON.
    Arguments(String),
}

/// Takes an answer apart. What may yet become a mark is held back.
#[derive(Debug)]
pub struct Listener {
    dialect: Arc<Dialect>,
    /// Names of the tools that may be called; without any, calls are text.
    tools: Vec<String>,
    state: State,
    held: String,
    /// Nothing but space has been said so far.
    blank: bool,
    /// That space is between thoughts, calls and the answer, and of none of them.
    between: bool,
}

#[derive(Debug)]
enum State {
    Text,
    Thought,
    /// Between calls: what is there already of one, and what they are within.
    Calls {
        call: Option<Call>,
        within: &'static str,
        any: bool,
    },
    /// Of a message in the harmony format.
    Header,
    Message(Channel),
}

#[derive(Debug)]
struct Call {
    reader: CallReader,
    /// That it has begun was told.
    told: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Channel {
    Answer,
    Thoughts,
    Call,
}

impl Listener {
    /// Of an answer to a prompt behind which the model is `thinking` already or not.
    pub fn new(dialect: Arc<Dialect>, tools: Vec<String>, thinking: bool) -> Self {
        let state = if thinking { State::Thought } else { State::Text };
        Self { dialect, tools, state, held: String::new(), blank: true, between: false }
    }

    /// Takes in what comes next: text, or the name of a control token ([`Dialect::mark`]).
    pub fn push(&mut self, text: &str) -> Vec<Said> {
        self.held.push_str(text);
        let mut said = Vec::new();
        while self.advance(&mut said, false) {}
        join(said)
    }

    /// Whether what comes next is thought, as far as is known.
    pub fn is_thinking(&self) -> bool {
        matches!(self.state, State::Thought | State::Message(Channel::Thoughts))
    }

    /// The answer has ended.
    pub fn finish(&mut self) -> Vec<Said> {
        let mut said = Vec::new();
        while self.advance(&mut said, true) {}
        let held = std::mem::take(&mut self.held);
        match std::mem::replace(&mut self.state, State::Text) {
            State::Text | State::Message(Channel::Answer) => said.push(Said::Text(held)),
            State::Thought | State::Message(Channel::Thoughts) => said.push(Said::Thought(held)),
            State::Message(Channel::Call) => said.push(Said::Arguments(held)),
            State::Header => {}
            State::Calls { call, within, any } => {
                if let Some(Call { reader, told: false }) = call {
                    // It was no call.
                    said.push(Said::Text(format!("{within}{}", reader.text())));
                } else if !any && call.is_none() {
                    said.push(Said::Text(format!("{within}{held}")));
                }
            }
        }
        join(said)
    }

    /// Takes in part of what is held; `false` when nothing more can be said of it now.
    fn advance(&mut self, said: &mut Vec<Said>, last: bool) -> bool {
        match &mut self.state {
            State::Text => self.text(said, last),
            State::Thought => {
                let found = self.until(&[THOUGHT], last, said, Said::Thought);
                if found.is_some() {
                    self.state = State::Text;
                    (self.blank, self.between) = (true, true);
                }
                found.is_some()
            }
            State::Calls { .. } => self.calls(said, last),
            State::Header => {
                let Some(at) = self.held.find(MESSAGE) else { return false };
                let header: String = self.held.drain(..at + MESSAGE.len()).collect();
                let channel = match header.split(CHANNEL).nth(1).unwrap_or_default().trim_start() {
                    channel if channel.starts_with("analysis") => Channel::Thoughts,
                    _ => match header.split_once(TO) {
                        Some((_, to)) if !self.tools.is_empty() => {
                            let name: String =
                                to.chars().take_while(|c| !c.is_whitespace() && *c != '<').collect();
                            said.push(Said::Call(name));
                            Channel::Call
                        }
                        _ => Channel::Answer,
                    },
                };
                self.state = State::Message(channel);
                true
            }
            State::Message(channel) => {
                let part: fn(String) -> Said = match channel {
                    Channel::Answer => Said::Text,
                    Channel::Thoughts => Said::Thought,
                    Channel::Call => Said::Arguments,
                };
                let found = self.until(&[END, START, "<|call|>", "<|return|>"], last, said, part);
                if let Some(mark) = found {
                    self.state = if mark == START { State::Header } else { State::Text };
                }
                found.is_some()
            }
        }
    }

    fn text(&mut self, said: &mut Vec<Said>, last: bool) -> bool {
        let calls = self.dialect.calls;
        let tools = !self.tools.is_empty();
        if self.blank {
            let start = self.held.trim_start();
            // Space before thoughts and calls, or behind thoughts, is of no answer.
            let decided = !start.is_empty() || last;
            let bare = calls == Calls::Llama && tools && start.starts_with('{');
            if !decided {
                return false;
            }
            if bare {
                self.held = start.to_owned();
                self.state = State::Calls { call: None, within: "", any: false };
                return true;
            }
            if self.between {
                self.held = start.to_owned();
            }
        }
        let mut marks: Vec<&'static str> = Vec::new();
        if self.dialect.thinks && self.blank {
            marks.push(THINK);
        }
        match calls {
            Calls::Harmony => marks.extend([CHANNEL, START]),
            Calls::Hermes if tools => marks.push(CALL),
            Calls::Llama if tools => marks.push(PYTHON),
            Calls::Mistral if tools => marks.push(MISTRAL),
            Calls::Granite if tools => marks.push(GRANITE),
            _ => {}
        }
        let blank = self.blank;
        let before = said.len();
        let found = self.until(&marks, last, said, Said::Text);
        let spoken = |said: &Said| matches!(said, Said::Text(text) if !text.trim().is_empty());
        let spoke = said[before..].iter().any(spoken);
        if blank && !spoke && (found.is_some() || !last) {
            let space: Vec<Said> = said.drain(before..).collect();
            if let (None, Some(Said::Text(space))) = (found, space.first()) {
                // What follows it tells whether it is of the answer.
                self.held.insert_str(0, space);
            }
        }
        self.blank = blank && !spoke;
        match found {
            Some(THINK) if blank && !spoke => self.state = State::Thought,
            // In the middle of an answer it is text.
            Some(THINK) => said.push(Said::Text(THINK.to_owned())),
            Some(CHANNEL) => {
                self.held.insert_str(0, CHANNEL);
                self.state = State::Header;
            }
            Some(START) => self.state = State::Header,
            Some(mark) => self.state = State::Calls { call: None, within: mark, any: false },
            None => return false,
        }
        true
    }

    fn calls(&mut self, said: &mut Vec<Said>, last: bool) -> bool {
        let State::Calls { call, within, any } = &mut self.state else { return false };
        if let Some(Call { reader, told }) = call {
            let taken = reader.push(&self.held);
            self.held.drain(..taken);
            if !*told && let Some(name) = reader.name() {
                if self.tools.iter().any(|tool| tool == name) {
                    *told = true;
                    *any = true;
                    said.push(Said::Call(name.to_owned()));
                } else {
                    // No tool of this request: it is text, as all that follows.
                    let text = format!("{within}{}", reader.text());
                    said.push(Said::Text(text));
                    self.blank = false;
                    self.state = State::Text;
                    return true;
                }
            }
            if *told {
                said.push(Said::Arguments(reader.arguments()));
            }
            if reader.is_over() {
                if !*told {
                    let text = format!("{within}{}", reader.text());
                    said.push(Said::Text(text));
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
        let rest = self.held.trim_start_matches(between).len();
        if rest == 0 && !last {
            // Whether it was between two calls is not known yet.
            return false;
        }
        // What is passed over is taken out when it is clear between what it stands.
        let passed = self.held.len() - rest;
        let next = &self.held[passed..];
        if next.starts_with('{') {
            self.held.drain(..passed);
            *call = Some(Call { reader: CallReader::default(), told: false });
            return true;
        }
        if *within == CALL {
            if next.starts_with(CALLED) {
                self.held.drain(..passed + CALLED.len());
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
        let passed: String = self.held.drain(..passed).collect();
        let text = if *any { String::new() } else { format!("{within}{passed}") };
        said.push(Said::Text(text));
        self.blank = false;
        self.state = State::Text;
        true
    }

    /// Gives out what is held up to the first of `marks`, which is returned and left out; without one all that cannot be
    /// the beginning of one.
    fn until(
        &mut self,
        marks: &[&'static str],
        last: bool,
        said: &mut Vec<Said>,
        part: fn(String) -> Said,
    ) -> Option<&'static str> {
        let found = marks.iter().filter_map(|mark| Some((self.held.find(mark)?, *mark)));
        if let Some((at, mark)) = found.min_by_key(|(at, _)| *at) {
            said.push(part(self.held[..at].to_owned()));
            self.held.drain(..at + mark.len());
            return Some(mark);
        }
        let begins = |at: &usize| {
            let end = &self.held[*at..];
            marks.iter().any(|mark| mark.starts_with(end))
        };
        let starts = self.held.char_indices().map(|(at, _)| at);
        let keep = if last { None } else { starts.filter(begins).min() };
        let certain = keep.unwrap_or(self.held.len());
        said.push(part(self.held[..certain].to_owned()));
        self.held.drain(..certain);
        None
    }
}

/// Without what is empty, and with neighbours of one kind as one.
fn join(said: Vec<Said>) -> Vec<Said> {
    let mut joined: Vec<Said> = Vec::new();
    for part in said {
        match (joined.last_mut(), &part) {
            (_, Said::Text(text) | Said::Thought(text) | Said::Arguments(text)) if text.is_empty() => {}
            (Some(Said::Text(before)), Said::Text(text))
            | (Some(Said::Thought(before)), Said::Thought(text))
            | (Some(Said::Arguments(before)), Said::Arguments(text)) => before.push_str(text),
            _ => joined.push(part),
        }
    }
    joined
}
