//! What instructions are called in messages.

use std::collections::HashMap;

/// A module's text and the files that it was made from.
#[derive(Debug)]
pub(crate) struct Names {
    text: String,
    files: HashMap<u32, String>,
}

impl Names {
    pub(crate) fn new(text: &str, files: HashMap<u32, String>) -> Self {
        Self { text: text.into(), files }
    }

    /// How an instruction is written.
    pub(crate) fn instruction(&self, line: u32) -> String {
        instruction(&self.text, line).unwrap_or_else(|| "the end".into())
    }

    /// File and line of the source.
    pub(crate) fn source_line(&self, (file, line): (u32, u32)) -> String {
        let name = self.files.get(&file).map_or("?", |name| name.rsplit('/').next().unwrap_or(name));
        format!("{name}:{line}")
    }
}

/// A line of a text without what surrounds it; lines count from 1.
pub(crate) fn instruction(text: &str, line: u32) -> Option<String> {
    let line = text.lines().nth((line as usize).checked_sub(1)?)?;
    Some(line.split_whitespace().collect::<Vec<_>>().join(" "))
}
