//! `kvasir batch`: runs the requests of a file as a batch and fetches their results.

use crate::access;
use crate::home;
use crate::ops_client::{self, Body, Call};
use anyhow::{Context, ensure};
use serde_json::{Value, json};
use std::fs::File;
use std::io::{BufRead, BufReader, IsTerminal, Read, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Bounds every wait of a request.
const CALL_LIMIT: Duration = Duration::from_secs(30);
/// Interval of looks at the batch.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// A coordinator that does not answer for this long is given up. The batch goes on there.
const SILENCE: Duration = Duration::from_secs(300);
/// Interval of log lines where stderr is no terminal.
const LOG_EVERY: Duration = Duration::from_secs(30);
/// Longest line that is read for the endpoint.
const MAX_LINE: u64 = 16 << 20;
const BOUNDARY: &str = "kvasir-batch-7c1f0e9a52d84b36";

/// Runs the requests of a file in the fleet's idle time
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  kvasir batch run requests.jsonl --output results.jsonl")]
pub(crate) struct BatchCommand {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, clap::Subcommand)]
enum Action {
    Run(Run),
}

/// Uploads a file, waits for its results and writes them
///
/// Each line of the file is a request in the form of OpenAI's Batch API. Exits with 1 if a request failed. The batch
/// goes on if this command is ended.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  kvasir batch run requests.jsonl --output results.jsonl")]
struct Run {
    /// Requests, a line each: {"custom_id", "method": "POST", "url", "body"}
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// File for the results: a line for each request, failed ones last
    #[arg(long, value_name = "FILE")]
    output: PathBuf,
    /// API address of a coordinator [default: from up.json in the data directory of a running `kvasir up`]
    #[arg(long, value_name = "HOST:PORT", env = "KVASIR_SERVER")]
    server: Option<String>,
    /// API key, if the cluster has keys
    #[arg(long, value_name = "KEY", env = "KVASIR_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
}

impl BatchCommand {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        match self.action {
            Action::Run(run) => run.run(),
        }
    }
}

impl Run {
    fn run(self) -> anyhow::Result<()> {
        let server = match &self.server {
            Some(server) => server.clone(),
            None => access::api_of(home::up_data_dir()?)?,
        };
        let client = Client { server: ops_client::address(&server)?, key: self.api_key.as_deref() };
        let endpoint = endpoint(&self.file)?;
        let file = client.upload(&self.file)?;
        let new = json!({"input_file_id": file, "endpoint": endpoint, "completion_window": "24h"});
        let batch = client.json("POST", "/v1/batches", Some(&new))?;
        let id = text(&batch, "id")?;
        eprintln!("{id}: {} was uploaded", self.file.display());
        let ended = client.wait(&id)?;
        let faults = ended.pointer("/errors/data").and_then(Value::as_array).cloned().unwrap_or_default();
        for fault in &faults {
            let line = fault["line"].as_u64().map(|line| format!("line {line}: ")).unwrap_or_default();
            eprintln!("{line}{}", fault["message"].as_str().unwrap_or_default());
        }
        let status = text(&ended, "status")?;
        ensure!(status != "failed", "{id}: the file was refused");
        let results = ["output_file_id", "error_file_id"].map(|name| ended[name].as_str());
        client.fetch(&results, &self.output)?;
        let count = |name: &str| ended["request_counts"][name].as_u64().unwrap_or(0);
        let (completed, failed, total) = (count("completed"), count("failed"), count("total"));
        eprintln!(
            "{id}: {completed} of {total} requests completed, {failed} failed: {}",
            self.output.display()
        );
        ensure!(status == "completed", "{id}: the batch is {status}");
        ensure!(failed == 0, "{id}: {failed} requests failed");
        Ok(())
    }
}

/// The API that the first request of a file is for.
fn endpoint(path: &Path) -> anyhow::Result<String> {
    let file = File::open(path).with_context(|| path.display().to_string())?;
    let mut lines = BufReader::new(file).take(MAX_LINE);
    let mut line = String::new();
    while line.trim().is_empty() {
        line.clear();
        let read = lines.read_line(&mut line).with_context(|| path.display().to_string())?;
        ensure!(read > 0, "{}: the file has no request", path.display());
    }
    let request: Value =
        serde_json::from_str(&line).with_context(|| format!("{}: the first line", path.display()))?;
    text(&request, "url").with_context(|| format!("{}: the first line", path.display()))
}

fn text(object: &Value, name: &str) -> anyhow::Result<String> {
    object[name].as_str().map(str::to_owned).with_context(|| format!("{name} is missing"))
}

struct Client<'a> {
    server: SocketAddr,
    key: Option<&'a str>,
}

impl Client<'_> {
    fn call<'b>(&'b self, method: &'b str, path: &'b str) -> Call<'b> {
        Call { key: self.key, ..Call::new(method, path, CALL_LIMIT) }
    }

    fn json(&self, method: &str, path: &str, body: Option<&Value>) -> anyhow::Result<Value> {
        let text = body.map(Value::to_string).unwrap_or_default();
        let (length, mut bytes) = (text.len() as u64, text.as_bytes());
        let body = body.map(|_| Body { kind: "application/json", from: &mut bytes, length });
        let call = Call { body, ..self.call(method, path) };
        access::parse(&call.send(self.server)?.text()?.success()?)
    }

    /// Uploads the file as a form, and returns its id.
    fn upload(&self, path: &Path) -> anyhow::Result<String> {
        let file = File::open(path).with_context(|| path.display().to_string())?;
        let length = file.metadata().with_context(|| path.display().to_string())?.len();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or("requests.jsonl");
        let name: String = name.chars().filter(|c| !matches!(c, '"' | '\\' | '\r' | '\n')).collect();
        let head = format!(
            "--{BOUNDARY}\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n--{BOUNDARY}\r\n\
             Content-Disposition: form-data; name=\"file\"; filename=\"{name}\"\r\n\r\n"
        );
        let tail = format!("\r\n--{BOUNDARY}--\r\n");
        let whole = head.len() as u64 + length + tail.len() as u64;
        let mut from = head.as_bytes().chain(file.take(length)).chain(tail.as_bytes());
        let body = Body { kind: FORM, from: &mut from, length: whole };
        let call = Call { body: Some(body), ..self.call("POST", "/v1/files") };
        let answer = call.send(self.server)?.text()?.success();
        text(&access::parse(&answer.with_context(|| path.display().to_string())?)?, "id")
    }

    /// Waits for the end of a batch and shows how far it is. A coordinator that restarts goes on with it.
    fn wait(&self, id: &str) -> anyhow::Result<Value> {
        let path = format!("/v1/batches/{id}");
        let terminal = std::io::stderr().is_terminal();
        let (mut heard, mut logged, mut shown) = (Instant::now(), None::<Instant>, false);
        loop {
            let answer = self.call("GET", &path).send(self.server).and_then(ops_client::Incoming::text);
            match answer {
                Ok(answer) if answer.status < 500 => {
                    heard = Instant::now();
                    let batch = access::parse(&answer.success()?)?;
                    let status = text(&batch, "status")?;
                    let is_final = ["completed", "failed", "expired", "cancelled"].contains(&status.as_str());
                    if terminal {
                        eprint!("\r\x1b[K{}", progress(&batch, &status));
                        shown = true;
                    } else if logged.is_none_or(|at| at.elapsed() >= LOG_EVERY) {
                        logged = Some(Instant::now());
                        eprintln!("{}", progress(&batch, &status));
                    }
                    if is_final {
                        if shown {
                            eprintln!();
                        }
                        return Ok(batch);
                    }
                }
                answer if heard.elapsed() > SILENCE => {
                    answer?.success()?;
                }
                _ => {}
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Writes files of results one after the other to a file, which is there once it is whole.
    fn fetch(&self, files: &[Option<&str>], to: &Path) -> anyhow::Result<()> {
        let mut part = to.as_os_str().to_owned();
        part.push(".part");
        let named = || to.display().to_string();
        let mut out = File::create(&part).with_context(named)?;
        for id in files.iter().flatten() {
            let path = format!("/v1/files/{id}/content");
            self.call("GET", &path).send(self.server)?.copy_to(&mut out)?;
        }
        out.flush().and_then(|()| out.sync_all()).with_context(named)?;
        std::fs::rename(&part, to).with_context(named)
    }
}

const FORM: &str = "multipart/form-data; boundary=kvasir-batch-7c1f0e9a52d84b36";

fn progress(batch: &Value, status: &str) -> String {
    let count = |name: &str| batch["request_counts"][name].as_u64().unwrap_or(0);
    let (completed, failed, total) = (count("completed"), count("failed"), count("total"));
    format!("{status}: {} of {total} requests, {failed} failed", completed + failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_endpoint_is_that_of_the_first_request() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("in");
        let read = |text: &str| {
            std::fs::write(&path, text).unwrap();
            endpoint(&path).map_err(|error| format!("{error:#}"))
        };
        assert_eq!(read("\n{\"url\": \"/v1/embeddings\"}\nno").unwrap(), "/v1/embeddings");
        assert!(read("").unwrap_err().contains("no request"));
        assert!(read("{}").unwrap_err().contains("url is missing"));
        assert!(read("no").unwrap_err().contains("the first line"));
        assert!(FORM.ends_with(BOUNDARY));
    }
}
