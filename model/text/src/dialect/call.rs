//! Streaming parser of one call, `{"name": .., "arguments": ..}`.

use serde_json::Value;

/// Keys that hold the arguments.
const ARGUMENTS: [&str; 2] = ["arguments", "parameters"];

#[derive(Debug, Default)]
pub(super) struct CallReader {
    text: String,
    /// Bytes of `text` parsed so far.
    at: usize,
    depth: usize,
    quoted: bool,
    escaped: bool,
    /// Key of the current value.
    key: Option<String>,
    /// Start of the current top-level key or value.
    from: Option<usize>,
    name: Option<String>,
    arguments: Option<Arguments>,
    /// Bytes of the arguments returned so far.
    given: usize,
    over: bool,
}

#[derive(Debug, Clone, Copy)]
struct Arguments {
    from: usize,
    /// End of the arguments, once known.
    to: Option<usize>,
}

impl CallReader {
    /// Consumes `text` and returns the number of bytes used: fewer than all once the call is complete.
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

    /// The whole text of the call so far.
    pub(super) fn text(&self) -> &str {
        &self.text
    }

    /// True if the text, whose name is still incomplete, may become a call of one of `tools`.
    pub(super) fn may_become(&self, tools: &[String]) -> bool {
        let text: String = self.text.chars().filter(|c| !c.is_whitespace()).collect();
        tools.iter().any(|tool| {
            ["{\"name\":\"", "{\"type\":\"function\",\"name\":\""].iter().any(|begin| {
                let call = format!("{begin}{tool}\"");
                call.starts_with(&text) || text.starts_with(&call)
            })
        })
    }

    /// Name of the called tool, once known.
    pub(super) fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// The part of the arguments that was not returned before.
    pub(super) fn arguments(&mut self) -> String {
        let Some(Arguments { from, to }) = self.arguments else {
            let none = self.over && self.given == 0;
            self.given += usize::from(none);
            return if none { "{}".to_owned() } else { String::new() };
        };
        // If the value is not an object, wait for its end: it may be an object encoded in a string.
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
