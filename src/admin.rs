//! Common part of the subcommands that call a coordinator's `/admin/v1`.

use crate::access::{Access, parse};
use crate::ops_client::Body;
use serde_json::Value;
use std::io::{Read, Write};
use std::time::Duration;

/// A long prefix may have to be computed before the response.
const TIMEOUT: Duration = Duration::from_secs(610);

/// The contacted coordinator, the API key, and the output format.
#[derive(Debug, clap::Args)]
pub(crate) struct Admin {
    #[command(flatten)]
    access: Access,
    /// Name of the model; required if the cluster serves several.
    #[arg(long, value_name = "ID")]
    model: Option<String>,
    /// Tenant of the sequences [default: the key's tenant, or `default`].
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,
    /// Use this worker only.
    #[arg(long, value_name = "ID")]
    worker: Option<String>,
    /// Print the coordinator's response as one line of JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

impl Admin {
    /// `path` with the common query parameters and `more`.
    fn path(&self, path: &str, more: &[(&str, Option<String>)]) -> String {
        let general = [("model", &self.model), ("tenant", &self.tenant), ("worker", &self.worker)];
        let general = general.into_iter().map(|(name, value)| (name, value.clone()));
        let pairs = general.chain(more.iter().cloned());
        let pairs = pairs.filter_map(|(name, value)| Some(format!("{name}={}", escape(&value?))));
        let query = pairs.collect::<Vec<_>>().join("&");
        if query.is_empty() { path.to_owned() } else { format!("{path}?{query}") }
    }

    /// Sends a request with an optional JSON body. Returns the JSON response; null if it is empty.
    pub(crate) fn request(
        &self,
        method: &str,
        path: &str,
        more: &[(&str, Option<String>)],
        body: Option<&Value>,
    ) -> anyhow::Result<Value> {
        self.access.json(method, &self.path(path, more), body, TIMEOUT)
    }

    pub(crate) fn upload(
        &self,
        path: &str,
        more: &[(&str, Option<String>)],
        file: &mut dyn Read,
        length: u64,
    ) -> anyhow::Result<Value> {
        let body = Body { kind: "application/octet-stream", from: file, length };
        let answer = self.access.send("POST", &self.path(path, more), Some(body), TIMEOUT)?;
        parse(&answer.text()?.success()?)
    }

    /// Copies the response body to `out` and returns its length.
    pub(crate) fn download(
        &self,
        path: &str,
        more: &[(&str, Option<String>)],
        out: &mut impl Write,
    ) -> anyhow::Result<u64> {
        self.access.send("GET", &self.path(path, more), None, TIMEOUT)?.copy_to(out)
    }

    /// Prints the response as JSON, or the text that `words` makes of it.
    pub(crate) fn show(&self, answer: &Value, words: impl FnOnce(&Value) -> String) -> anyhow::Result<()> {
        let mut out = std::io::stdout().lock();
        match self.json {
            true => writeln!(out, "{answer}")?,
            false => write!(out, "{}", words(answer))?,
        }
        Ok(())
    }
}

/// Percent-encodes a text for a path or a query.
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

/// A field of a response as text.
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
    fn parameters_are_escaped_in_the_query() {
        let admin = Admin {
            access: Access::default(),
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
