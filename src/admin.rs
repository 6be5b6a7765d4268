//! What the subcommands have in common that ask a coordinator's `/admin/v1` for something.

use crate::ops_client::{self, Body, Call, Incoming};
use crate::{home, status};
use anyhow::Context;
use serde_json::Value;
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// A long prefix may have to be computed before there is an answer.
const TIMEOUT: Duration = Duration::from_secs(610);

/// Which coordinator, as whom, and how the answer is shown.
#[derive(Debug, clap::Args)]
pub(crate) struct Admin {
    /// Ops address of a coordinator; default: that of the cluster `kvasir up` runs from the data directory.
    #[arg(long, value_name = "HOST:PORT", env = "KVASIR_OPS")]
    ops: Option<String>,
    /// Data directory of a `kvasir up`.
    #[arg(long, value_name = "DIR", env = "KVASIR_DATA_DIR")]
    data_dir: Option<PathBuf>,
    /// An admin's API key; needed from another machine.
    #[arg(long, value_name = "KEY", env = "KVASIR_API_KEY", hide_env_values = true)]
    key: Option<String>,
    /// Which model, where the cluster serves several.
    #[arg(long, value_name = "ID")]
    model: Option<String>,
    /// Whose sequences; default: the key's tenant, or `default`.
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,
    /// At which worker only.
    #[arg(long, value_name = "ID")]
    worker: Option<String>,
    /// Print the coordinator's answer as one line of JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

impl Admin {
    fn server(&self) -> anyhow::Result<SocketAddr> {
        let server = match (&self.ops, &self.data_dir) {
            (Some(ops), _) => ops.clone(),
            (None, dir) => status::ops_of(dir.clone().map_or_else(home::up_data_dir, Ok)?)?,
        };
        ops_client::address(&server)
    }

    /// `path` with what is asked in general and `more` in its query.
    fn path(&self, path: &str, more: &[(&str, Option<String>)]) -> String {
        let general = [("model", &self.model), ("tenant", &self.tenant), ("worker", &self.worker)];
        let general = general.into_iter().map(|(name, value)| (name, value.clone()));
        let pairs = general.chain(more.iter().cloned());
        let pairs = pairs.filter_map(|(name, value)| Some(format!("{name}={}", escape(&value?))));
        let query = pairs.collect::<Vec<_>>().join("&");
        if query.is_empty() { path.to_owned() } else { format!("{path}?{query}") }
    }

    fn send<'a>(
        &'a self,
        method: &'a str,
        path: &'a str,
        body: Option<Body<'a>>,
    ) -> anyhow::Result<Incoming> {
        let server = self.server()?;
        let call = Call { key: self.key.as_deref(), body, ..Call::new(method, path, TIMEOUT) };
        call.send(server).with_context(|| format!("coordinator {server}"))
    }

    /// Asks without a body, or with one of JSON; the answer, null where it has no body.
    pub(crate) fn ask(
        &self,
        method: &str,
        path: &str,
        more: &[(&str, Option<String>)],
        body: Option<&Value>,
    ) -> anyhow::Result<Value> {
        let text = body.map(Value::to_string).unwrap_or_default();
        let mut bytes = text.as_bytes();
        let length = bytes.len() as u64;
        let body = body.map(|_| Body { kind: "application/json", from: &mut bytes, length });
        read(self.send(method, &self.path(path, more), body)?)
    }

    /// Sends a file.
    pub(crate) fn upload(
        &self,
        path: &str,
        more: &[(&str, Option<String>)],
        file: &mut dyn Read,
        length: u64,
    ) -> anyhow::Result<Value> {
        let body = Body { kind: "application/octet-stream", from: file, length };
        read(self.send("POST", &self.path(path, more), Some(body))?)
    }

    /// Copies what is answered into `out`; its length.
    pub(crate) fn download(
        &self,
        path: &str,
        more: &[(&str, Option<String>)],
        out: &mut impl Write,
    ) -> anyhow::Result<u64> {
        self.send("GET", &self.path(path, more), None)?.copy_to(out)
    }

    /// Prints the answer as it is, or what `words` makes of it.
    pub(crate) fn show(&self, answer: &Value, words: impl FnOnce(&Value) -> String) -> anyhow::Result<()> {
        let mut out = std::io::stdout().lock();
        match self.json {
            true => writeln!(out, "{answer}")?,
            false => write!(out, "{}", words(answer))?,
        }
        Ok(())
    }
}

fn read(answer: Incoming) -> anyhow::Result<Value> {
    let body = answer.text()?.success()?;
    if body.is_empty() {
        return Ok(Value::Null);
    }
    serde_json::from_str(&body).context("the coordinator's answer")
}

/// A text as it may stand in a path or a query.
pub(crate) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' | b':' => {
                escaped.push(char::from(byte));
            }
            other => escaped += &format!("%{other:02X}"),
        }
    }
    escaped
}

/// A field of an answer, in words.
pub(crate) fn word(answer: &Value, name: &str) -> String {
    match answer.get(name) {
        None | Some(Value::Null) => "-".to_owned(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_stands_in_the_query_and_cannot_break_out_of_it() {
        let admin = Admin {
            ops: None,
            data_dir: None,
            key: None,
            model: Some("a b&c=d".into()),
            tenant: None,
            worker: Some("worker-1".into()),
            json: false,
        };
        let path = admin.path("/p", &[("choice", Some("3".into())), ("id", None)]);
        assert_eq!(path, "/p?model=a%20b%26c%3Dd&worker=worker-1&choice=3");
        assert_eq!(escape("req/../x\r\n"), "req%2F..%2Fx%0D%0A");
    }

    #[test]
    fn fields_become_words() {
        let answer = serde_json::json!({"a": "x", "b": 7, "c": null});
        assert_eq!(["a", "b", "c", "d"].map(|name| word(&answer, name)), ["x", "7", "-", "-"]);
    }
}
