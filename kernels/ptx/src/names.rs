//! Names of instructions and source lines in messages.

use std::collections::HashMap;

/// Text of a module and the source files that it was compiled from.
#[derive(Debug)]
pub(crate) struct Names {
    text: String,
    files: HashMap<u32, String>,
}

impl Names {
    pub(crate) fn new(text: &str, files: HashMap<u32, String>) -> Self {
        Self { text: text.into(), files }
    }

    /// Returns the text of an instruction.
    pub(crate) fn instruction(&self, line: u32) -> String {
        instruction(&self.text, line).unwrap_or_else(|| "the end".into())
    }

    /// Returns all lines of the module without surrounding space.
    pub(crate) fn lines(&self) -> Vec<&str> {
        self.text.lines().map(str::trim).collect()
    }

    /// Returns file and line of the source.
    pub(crate) fn source_line(&self, (file, line): (u32, u32)) -> String {
        let name = self.files.get(&file).map_or("?", |name| name.rsplit('/').next().unwrap_or(name));
        format!("{name}:{line}")
    }
}

/// Returns a line of a text without surrounding space; lines count from 1.
pub(crate) fn instruction(text: &str, line: u32) -> Option<String> {
    let line = text.lines().nth((line as usize).checked_sub(1)?)?;
    Some(line.split_whitespace().collect::<Vec<_>>().join(" "))
}
