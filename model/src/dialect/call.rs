//! One call, `{"name": .., "arguments": ..}`, read while it is written.

use serde_json::Value;

/// Keys under which arguments stand.
const ARGUMENTS: [&str; 2] = ["arguments", "parameters"];

#[derive(Debug, Default)]
pub(super) struct CallReader {
    text: String,
    /// Bytes of it that have been looked at.
    at: usize,
    depth: usize,
    quoted: bool,
    escaped: bool,
    /// The key whose value is read.
    key: Option<String>,
    /// Where a key or a value at the first level begins.
    from: Option<usize>,
    name: Option<String>,
    arguments: Option<Arguments>,
    /// How much of these was given out.
    given: usize,
    over: bool,
}

#[derive(Debug, Clone, Copy)]
struct Arguments {
    from: usize,
    /// Where they end, if they have.
    to: Option<usize>,
}

impl CallReader {
    /// Takes in what it can use of `text`, and returns how many bytes that was: less than all once the call is over.
    pub(super) fn push(&mut self, text: &str) -> usize {
        let before = self.text.len();
        self.text.push_str(text);
        while !self.over && self.at < self.text.len() {
            let byte = self.text.as_bytes()[self.at];
            self.step(byte);
            self.at += 1;
        }
        self.text.truncate(self.at.max(before));
        self.at.saturating_sub(before)
    }

    pub(super) fn is_over(&self) -> bool {
        self.over
    }

    /// All of it so far.
    pub(super) fn text(&self) -> &str {
        &self.text
    }

    /// Whether what is there, without its name, may become a call of one of these tools.
    pub(super) fn may_become(&self, tools: &[String]) -> bool {
        let text: String = self.text.chars().filter(|c| !c.is_whitespace()).collect();
        tools.iter().any(|tool| {
            ["{\"name\":\"", "{\"type\":\"function\",\"name\":\""].iter().any(|begin| {
                let call = format!("{begin}{tool}\"");
                call.starts_with(&text) || text.starts_with(&call)
            })
        })
    }

    /// Whose call it is, once that is known.
    pub(super) fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// What is new of its arguments.
    pub(super) fn arguments(&mut self) -> String {
        let Some(Arguments { from, to }) = self.arguments else {
            let none = self.over && self.given == 0;
            self.given += usize::from(none);
            return if none { "{}".to_owned() } else { String::new() };
        };
        // Of a value that is no object the end is awaited: it may be an object in a string.
        let object = self.text.as_bytes().get(from) == Some(&b'{');
        let end = match to {
            Some(to) => to,
            None if object => self.at,
            None => return String::new(),
        };
        let all = self.text.get(from..end).unwrap_or_default();
        if object {
            let new = all.get(self.given..).unwrap_or_default().to_owned();
            self.given = all.len();
            return new;
        }
        if self.given > 0 {
            return String::new();
        }
        self.given = 1;
        match serde_json::from_str(all) {
            Ok(Value::String(inner)) => inner,
            _ => all.to_owned(),
        }
    }

    fn step(&mut self, byte: u8) {
        if self.quoted {
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' => self.escaped = true,
                b'"' => {
                    self.quoted = false;
                    if self.depth == 1 && self.key.is_none() {
                        self.key = self.from.take().and_then(|from| self.json(from, self.at + 1));
                    }
                }
                _ => {}
            }
            return;
        }
        match byte {
            b'"' => {
                self.quoted = true;
                self.begin();
            }
            b'{' | b'[' => {
                self.begin();
                self.depth += 1;
            }
            b'}' | b']' => {
                if self.depth == 1 {
                    self.end(self.at);
                    self.over = true;
                } else if self.depth == 2 && self.key.is_some() {
                    self.depth = 1;
                    self.end(self.at + 1);
                    return;
                }
                self.depth = self.depth.saturating_sub(1);
            }
            b',' if self.depth == 1 => {
                self.end(self.at);
                self.key = None;
            }
            b':' if self.depth == 1 => {}
            byte if byte.is_ascii_whitespace() => {}
            _ => self.begin(),
        }
    }

    /// A key or a value begins here, if it is of the first level.
    fn begin(&mut self) {
        if self.depth != 1 || self.from.is_some() {
            return;
        }
        self.from = Some(self.at);
        if self.key.as_deref().is_some_and(|key| ARGUMENTS.contains(&key)) && self.arguments.is_none() {
            self.arguments = Some(Arguments { from: self.at, to: None });
        }
    }

    /// A value of the first level has ended, if there was one.
    fn end(&mut self, to: usize) {
        let (Some(from), Some(key)) = (self.from.take(), self.key.as_deref()) else { return };
        let to = from + self.text.get(from..to).unwrap_or_default().trim_end().len();
        match key {
            "name" if self.name.is_none() => self.name = self.json(from, to),
            _ => {
                if let Some(arguments) = &mut self.arguments
                    && arguments.from == from
                {
                    arguments.to = Some(to);
                }
            }
        }
        if self.text.as_bytes().get(to.saturating_sub(1)).is_some_and(|end| b"}]".contains(end)) {
            // Nothing but a comma or the end may follow; the key is done with.
            self.key = Some(String::new());
        }
    }

    fn json(&self, from: usize, to: usize) -> Option<String> {
        serde_json::from_str(self.text.get(from..to)?).ok()
    }
}
