//! Connection of the operator subcommands to a coordinator.

use crate::home;
use crate::ops_client::{self, Body, Call, Incoming};
use anyhow::Context;
use serde_json::Value;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// The contacted coordinator and the API key.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct Access {
    /// Ops address of a coordinator [default: from up.json in the data directory of a running `kvasir up`].
    #[arg(long, value_name = "HOST:PORT", env = "KVASIR_OPS")]
    pub(crate) ops: Option<String>,
    /// Data directory of a `kvasir up`.
    #[arg(long, value_name = "DIR", env = "KVASIR_DATA_DIR")]
    pub(crate) data_dir: Option<PathBuf>,
    /// API key of an admin; required from another machine.
    #[arg(long, value_name = "KEY", env = "KVASIR_API_KEY", hide_env_values = true)]
    pub(crate) key: Option<String>,
}

/// Ops address of the first coordinator in a data directory's `up.json`.
fn ops_of(dir: PathBuf) -> anyhow::Result<String> {
    address_of(dir, "ops", "--ops")
}

/// API address of the first coordinator in a data directory's `up.json`.
pub(crate) fn api_of(dir: PathBuf) -> anyhow::Result<String> {
    address_of(dir, "http", "--server")
}

fn address_of(dir: PathBuf, port: &str, flag: &str) -> anyhow::Result<String> {
    let path = dir.join("up.json");
    let text = std::fs::read_to_string(&path).with_context(|| {
        format!("{}: no cluster of `kvasir up` runs from this data directory; name a coordinator with {flag} HOST:PORT", path.display())
    })?;
    let up: serde_json::Value = serde_json::from_str(&text).with_context(|| path.display().to_string())?;
    let address = up.pointer("/coordinators/0").and_then(|node| node[port].as_str());
    address.map(str::to_owned).with_context(|| format!("{}: the file names no coordinator", path.display()))
}

impl Access {
    /// Ops address of the coordinator.
    fn server(&self) -> anyhow::Result<SocketAddr> {
        let server = match (&self.ops, &self.data_dir) {
            (Some(ops), _) => ops.clone(),
            (None, dir) => ops_of(dir.clone().map_or_else(home::up_data_dir, Ok)?)?,
        };
        ops_client::address(&server)
    }

    /// Sends a request and reads the response head. `timeout` bounds every wait.
    pub(crate) fn send<'a>(
        &'a self,
        method: &'a str,
        path: &'a str,
        body: Option<Body<'a>>,
        timeout: Duration,
    ) -> anyhow::Result<Incoming> {
        let server = self.server()?;
        let call = Call { key: self.key.as_deref(), body, ..Call::new(method, path, timeout) };
        call.send(server).with_context(|| format!("coordinator {server}"))
    }

    /// Sends a request without a body and returns the response body. Any status but 2xx is an error.
    pub(crate) fn text(&self, method: &str, path: &str, timeout: Duration) -> anyhow::Result<String> {
        self.send(method, path, None, timeout)?.text()?.success()
    }

    /// Sends a request with an optional JSON body. Returns the JSON response; null if it is empty.
    pub(crate) fn json(
        &self,
        method: &str,
        path: &str,
        body: Option<&Value>,
        timeout: Duration,
    ) -> anyhow::Result<Value> {
        let text = body.map(Value::to_string).unwrap_or_default();
        let mut bytes = text.as_bytes();
        let length = bytes.len() as u64;
        let body = body.map(|_| Body { kind: "application/json", from: &mut bytes, length });
        parse(&self.send(method, path, body, timeout)?.text()?.success()?)
    }
}

/// Parses a response body as JSON; null if it is empty.
pub(crate) fn parse(body: &str) -> anyhow::Result<Value> {
    if body.is_empty() {
        return Ok(Value::Null);
    }
    serde_json::from_str(body).context("the coordinator's response is not valid JSON")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_without_a_cluster_is_explained() {
        let dir = tempfile::tempdir().unwrap();
        let error = format!("{:#}", ops_of(dir.path().to_owned()).unwrap_err());
        assert!(error.contains("--ops"), "{error}");
        std::fs::write(dir.path().join("up.json"), r#"{"coordinators":[{"ops":"127.0.0.1:9"}]}"#).unwrap();
        assert_eq!(ops_of(dir.path().to_owned()).unwrap(), "127.0.0.1:9");
    }
}
