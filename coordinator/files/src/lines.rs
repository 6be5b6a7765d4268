//! The lines of a batch's input: their check, and the order in which they run.
//!
//! Lines are sorted by the beginnings of their prompts, so that those that share a document run one after the other and
//! workers compute it once.

use crate::error::FilesError;
use crate::record::LineError;
use serde::Deserialize;
use serde_json::value::RawValue;
use std::collections::HashSet;
use std::fs::File;
use std::hash::{DefaultHasher, Hasher};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

/// Longest line, in bytes.
pub const MAX_LINE_BYTES: u64 = 9 << 20;
/// Longest `custom_id`, in bytes.
pub const MAX_CUSTOM_ID: usize = 512;
/// Most faults that are listed.
const MAX_ERRORS: usize = 100;
/// Bytes of a prompt that are compared at once.
const PIECE_BYTES: usize = 256;

/// A request of a batch.
#[derive(Debug, Deserialize)]
pub struct BatchLine {
    pub custom_id: String,
    /// The body of the request.
    pub body: Box<RawValue>,
}

/// The place of a line in the input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Line {
    /// From 1.
    pub number: u64,
    offset: u64,
    bytes: usize,
}

/// The checked lines of an input, in the order in which they run.
#[derive(Debug)]
pub struct Lines {
    file: File,
    path: PathBuf,
    order: Vec<Line>,
}

/// The fields of a line that are checked.
#[derive(Deserialize)]
struct Checked<'a> {
    custom_id: Option<String>,
    method: Option<String>,
    url: Option<String>,
    #[serde(borrow)]
    body: Option<&'a RawValue>,
}

/// The fields of a body with the prompt, in the order in which they become the prompt.
#[derive(Deserialize)]
struct Prompt<'a> {
    #[serde(borrow)]
    model: Option<&'a RawValue>,
    #[serde(borrow)]
    instructions: Option<&'a RawValue>,
    #[serde(borrow)]
    messages: Option<&'a RawValue>,
    #[serde(borrow)]
    prompt: Option<&'a RawValue>,
    #[serde(borrow)]
    input: Option<&'a RawValue>,
}

impl Lines {
    /// Reads and checks all lines of `file`, which are requests to `endpoint`. The inner error lists the faults.
    pub(crate) fn index(
        file: File,
        path: PathBuf,
        endpoint: &str,
        max_lines: usize,
    ) -> Result<Result<Self, Vec<LineError>>, FilesError> {
        let mut reader = BufReader::new(&file);
        let (mut text, mut offset, mut number) = (Vec::new(), 0, 0);
        let (mut found, mut errors) = (Vec::new(), Vec::new());
        let mut ids = HashSet::new();
        loop {
            text.clear();
            let read = reader.by_ref().take(MAX_LINE_BYTES + 1).read_until(b'\n', &mut text);
            let read = read.map_err(|error| FilesError::disk(&path, &error))?;
            if read == 0 || errors.len() >= MAX_ERRORS {
                break;
            }
            number += 1;
            let line = Line { number, offset, bytes: read };
            offset += read as u64;
            if read as u64 > MAX_LINE_BYTES {
                let message = format!("the line has more than {MAX_LINE_BYTES} bytes");
                errors.push(fault("line_too_long", message, None, number));
                break;
            }
            if text.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            if found.len() >= max_lines {
                let message = format!("the file has more than {max_lines} lines");
                errors.push(LineError { line: None, ..fault("too_many_lines", message, None, number) });
                break;
            }
            match check(&text, endpoint, number) {
                Ok((id, order)) => {
                    found.push((order, line));
                    if let Some(id) = ids.replace(id) {
                        let message = format!("the custom_id {id:?} is used by an earlier line");
                        errors.push(fault("duplicate_custom_id", message, Some("custom_id"), number));
                    }
                }
                Err(error) => errors.push(error),
            }
        }
        if number == 0 || found.is_empty() && errors.is_empty() {
            let fault = fault("empty_file", "the file has no lines".to_owned(), None, 0);
            errors.push(LineError { line: None, ..fault });
        }
        if !errors.is_empty() {
            return Ok(Err(errors));
        }
        found.sort_by(|(a, x), (b, y)| (a, x.number).cmp(&(b, y.number)));
        let order = found.into_iter().map(|(_, line)| line).collect();
        Ok(Ok(Self { file, path, order }))
    }

    /// The lines in the order in which they run.
    pub fn order(&self) -> &[Line] {
        &self.order
    }

    /// Reads a line.
    pub fn read(&self, line: &Line) -> Result<BatchLine, FilesError> {
        let failed = |error| FilesError::disk(&self.path, &error);
        let mut text = vec![0; line.bytes];
        self.file.read_exact_at(&mut text, line.offset).map_err(failed)?;
        serde_json::from_slice(&text).map_err(|error| failed(error.into()))
    }
}

/// The `custom_id` of a line and its place in the order.
fn check(text: &[u8], endpoint: &str, line: u64) -> Result<(String, Vec<u64>), LineError> {
    let Checked { custom_id, method, url, body } = serde_json::from_slice(text).map_err(|error| {
        fault("invalid_json_line", format!("the line is no request of a batch: {error}"), None, line)
    })?;
    let missing = |name| {
        let message = format!("the line lacks the field {name}");
        fault("missing_required_parameter", message, Some(name), line)
    };
    let custom_id = custom_id.filter(|id| !id.is_empty()).ok_or_else(|| missing("custom_id"))?;
    if custom_id.len() > MAX_CUSTOM_ID {
        let message = format!("custom_id has {} bytes, the limit is {MAX_CUSTOM_ID}", custom_id.len());
        return Err(fault("invalid_custom_id", message, Some("custom_id"), line));
    }
    let method = method.ok_or_else(|| missing("method"))?;
    if method != "POST" {
        let message = format!("{:?} is not POST", shown(&method));
        return Err(fault("invalid_method", message, Some("method"), line));
    }
    let url = url.ok_or_else(|| missing("url"))?;
    if url != endpoint {
        let message = format!("{:?} is not the endpoint of the batch, {endpoint:?}", shown(&url));
        return Err(fault("mismatched_url", message, Some("url"), line));
    }
    let body = body.ok_or_else(|| missing("body"))?;
    Ok((custom_id, order(body.get())))
}

/// Lines are run in the order of these numbers: one for each beginning of the prompt, in pieces. A body that is no
/// object has none; it becomes an error when it runs.
fn order(body: &str) -> Vec<u64> {
    let Ok(prompt) = serde_json::from_str::<Prompt<'_>>(body) else { return Vec::new() };
    let Prompt { model, instructions, messages, prompt, input } = prompt;
    let mut hasher = DefaultHasher::new();
    hasher.write(model.map_or("", RawValue::get).as_bytes());
    let mut order = vec![hasher.finish()];
    for text in [instructions, messages, prompt, input].into_iter().flatten() {
        for piece in text.get().as_bytes().chunks(PIECE_BYTES) {
            hasher.write(piece);
            order.push(hasher.finish());
        }
    }
    order
}

fn shown(text: &str) -> String {
    text.chars().take(64).collect()
}

fn fault(code: &str, message: String, param: Option<&str>, line: u64) -> LineError {
    LineError { code: code.to_owned(), message, param: param.map(str::to_owned), line: Some(line) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn index(text: &[u8], max_lines: usize) -> Result<Lines, Vec<LineError>> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(text).unwrap();
        std::io::Seek::rewind(&mut file).unwrap();
        Lines::index(file, PathBuf::from("input"), "/v1/completions", max_lines).unwrap()
    }

    fn line(id: &str, prompt: &str) -> String {
        let body = format!(r#"{{"model":"m","prompt":"{prompt}"}}"#);
        format!(r#"{{"custom_id":"{id}","method":"POST","url":"/v1/completions","body":{body}}}"#)
    }

    #[test]
    fn lines_with_a_common_beginning_run_one_after_the_other() {
        let document = |n: usize| format!("{n}").repeat(PIECE_BYTES * 3);
        let lines: Vec<String> =
            (0..12).map(|n| line(&n.to_string(), &format!("{} question {n}", document(n % 3)))).collect();
        let lines = index(format!("\n{}\n\n", lines.join("\n")).as_bytes(), 12).unwrap();
        let ids: Vec<usize> =
            lines.order().iter().map(|at| lines.read(at).unwrap().custom_id.parse().unwrap()).collect();
        let documents: Vec<usize> = ids.iter().map(|id| id % 3).collect();
        let changes = documents.windows(2).filter(|pair| pair[0] != pair[1]).count();
        assert_eq!(changes, 2, "{ids:?}");
        assert!(lines.order().iter().zip(&ids).all(|(at, id)| at.number == *id as u64 + 2));
    }

    #[test]
    fn faults_are_listed_with_their_lines() {
        let good = line("a", "x");
        let listed = |text: &str| {
            let errors = index(text.as_bytes(), 3).unwrap_err();
            errors.into_iter().map(|e| (e.code, e.line, e.param)).collect::<Vec<_>>()
        };
        let one = |code: &str, line: Option<u64>, param: Option<&str>| {
            vec![(code.to_owned(), line, param.map(str::to_owned))]
        };
        assert_eq!(listed(""), one("empty_file", None, None));
        assert_eq!(listed("\n \n"), one("empty_file", None, None));
        assert_eq!(listed(&format!("{good}\nno")), one("invalid_json_line", Some(2), None));
        assert_eq!(
            listed(&format!("{good}\n{good}")),
            one("duplicate_custom_id", Some(2), Some("custom_id"))
        );
        let changed = |from: &str, to: &str| listed(&good.replace(from, to));
        let missing = |name| one("missing_required_parameter", Some(1), Some(name));
        assert_eq!(changed("\"custom_id\":\"a\",", ""), missing("custom_id"));
        assert_eq!(changed("\"a\"", "\"\""), missing("custom_id"));
        assert_eq!(changed("\"method\":\"POST\",", ""), missing("method"));
        assert_eq!(changed("\"url\"", "\"uri\""), missing("url"));
        assert_eq!(changed("\"body\"", "\"b\""), missing("body"));
        assert_eq!(changed("POST", "GET"), one("invalid_method", Some(1), Some("method")));
        assert_eq!(changed("/v1/completions", "/v1/x"), one("mismatched_url", Some(1), Some("url")));
        let long = "x".repeat(MAX_CUSTOM_ID + 1);
        assert_eq!(
            changed("\"a\"", &format!("{long:?}")),
            one("invalid_custom_id", Some(1), Some("custom_id"))
        );
        let four: Vec<String> = (0..4).map(|n| line(&n.to_string(), "x")).collect();
        assert_eq!(listed(&four.join("\n")), one("too_many_lines", None, None));
        let long = vec![b' '; MAX_LINE_BYTES as usize + 1];
        assert_eq!(index(&long, 3).unwrap_err()[0].code, "line_too_long");
        assert_eq!(index("no\n".repeat(500).as_bytes(), 1000).unwrap_err().len(), MAX_ERRORS);
    }
}
