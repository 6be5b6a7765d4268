//! Servers of another project that compute deployed models: one for each loaded model, started by a command with the
//! model's file, and ended with the model.

use super::needs::server_facts;
use super::{EngineSupervisor, ExternalEngineError, OpenedEngine};
use crate::Error;
use crate::generator::{EngineSource, KvEvents};
use crate::load::{EngineOptions, HostedLoad};
use engine::budget::Reservation;
use external::EngineKind;
use futures::future::join_all;
use parking_lot::Mutex;
use proto::deployment::ModelFacts;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::time::{sleep, timeout};

/// Time limit of a server's start. Compilers of graphs take many minutes for large models.
const START_LIMIT: Duration = Duration::from_secs(30 * 60);
/// Interval of looks whether a load is cancelled.
const CANCEL_TICK: Duration = Duration::from_millis(50);

/// Parts of the command that stand for values of a server.
const MODEL: &str = "{model}";
const PORT: &str = "{port}";
const CONTEXT: &str = "{context}";
const CACHE_BYTES: &str = "{kv_bytes}";
const EVENTS_PORT: &str = "{kv_port}";
const REPLAY_PORT: &str = "{replay_port}";

/// Servers of one engine, as an operator describes them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineServers {
    pub kind: EngineKind,
    /// Shell command of a server, in which `{model}`, `{port}`, `{context}`, `{kv_bytes}`, `{kv_port}` and
    /// `{replay_port}` stand for values.
    pub command: String,
    /// Settings of all servers. Address, command and events are set for each.
    pub source: EngineSource,
    /// Bytes of a server. `None`: estimated from the model.
    pub memory: Option<u64>,
}

impl EngineServers {
    /// The rule that the command breaks.
    pub fn check(&self) -> Result<(), String> {
        let has = |part: &str| self.command.contains(part);
        match [MODEL, PORT].into_iter().find(|part| !has(part)) {
            Some(part) => return Err(format!("without engine_url it must have {part}")),
            None if has(REPLAY_PORT) && !has(EVENTS_PORT) => {
                return Err(format!("{REPLAY_PORT} only with {EVENTS_PORT}"));
            }
            None => {}
        }
        match self.kind {
            EngineKind::LlamaServer if has(EVENTS_PORT) => Err("llama-server publishes no events".to_owned()),
            _ => Ok(()),
        }
    }

    /// Content of a model's files, and what a server needs.
    pub(crate) fn facts(&self, path: &Path, options: &EngineOptions) -> Result<ModelFacts, Error> {
        Ok(server_facts(path, options, (self.kind, self.memory))?.0)
    }

    /// The server of a model: where it will listen, and its command.
    ///
    /// # Errors
    /// For a path with characters that a shell may read otherwise, or without free ports.
    fn source(
        &self,
        path: &Path,
        context: u32,
        cache_bytes: u64,
    ) -> Result<EngineSource, ExternalEngineError> {
        let word = path.to_str().and_then(quoted);
        let word = word.ok_or_else(|| ExternalEngineError::Path { path: path.to_owned() })?;
        // Held together, so that the ports differ.
        let listeners = [(); 3].map(|()| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)));
        let mut ports = [0; 3];
        for (port, listener) in ports.iter_mut().zip(&listeners) {
            let address = listener.as_ref().ok().and_then(|listener| listener.local_addr().ok());
            *port = address.ok_or(ExternalEngineError::NoPort)?.port();
        }
        let [port, events, replay] = ports;
        let values = [
            (MODEL, word),
            (PORT, port.to_string()),
            (CONTEXT, context.to_string()),
            (CACHE_BYTES, cache_bytes.to_string()),
            (EVENTS_PORT, events.to_string()),
            (REPLAY_PORT, replay.to_string()),
        ];
        let local = |port: u16| format!("{}:{port}", Ipv4Addr::LOCALHOST);
        let has = |part: &str| self.command.contains(part);
        let kv_events = match has(EVENTS_PORT) {
            true => KvEvents::At {
                address: local(events),
                replay: has(REPLAY_PORT).then(|| local(replay)),
                topic: String::new(),
            },
            false => KvEvents::Off,
        };
        let command = fill(&self.command, &values);
        let url = format!("http://{}", local(port));
        Ok(EngineSource { url, command: Some(command), kv_events, ..self.source.clone() })
    }
}

/// Replaces the parts in one pass, so that values are not searched.
fn fill(command: &str, values: &[(&str, String)]) -> String {
    let (mut filled, mut rest) = (String::new(), command);
    while let Some(at) = rest.find('{') {
        let (before, from) = rest.split_at(at);
        filled.push_str(before);
        let found = values.iter().find_map(|(part, value)| Some((from.strip_prefix(part)?, value.as_str())));
        let (after, value) = found.unwrap_or_else(|| (from.get(1..).unwrap_or_default(), "{"));
        filled.push_str(value);
        rest = after;
    }
    filled + rest
}

/// A word for a shell. Quotes may be around it in the command, so `None` if it has characters that start something else
/// there.
fn quoted(word: &str) -> Option<String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+=@:,%".contains(c);
    let safe = |c: char| plain(c) || c == ' ' || c.is_alphanumeric();
    match (word.chars().all(plain), word.chars().all(safe)) {
        (true, _) => Some(word.to_owned()),
        (false, true) => Some(format!("'{word}'")),
        (false, false) => None,
    }
}

/// Starts the servers of a worker.
#[derive(Debug)]
pub(crate) struct ServerLoader {
    servers: EngineServers,
    stall_after: Duration,
    /// Servers that have not been dropped. `None` once the worker ends.
    started: Mutex<Option<Vec<Weak<EngineSupervisor>>>>,
}

impl ServerLoader {
    /// `stall_after`: longest time between two tokens of an answer.
    pub(crate) fn new(servers: EngineServers, stall_after: Duration) -> Self {
        Self { servers, stall_after, started: Mutex::new(Some(Vec::new())) }
    }

    /// Starts a server of the model at `path` and waits until it answers. Its memory is reserved until it has ended.
    ///
    /// # Errors
    /// If the server cannot be started, ends, or is not fit; if there is no room; if the load is cancelled.
    pub(crate) async fn load(
        &self,
        path: PathBuf,
        options: EngineOptions,
        load: &HostedLoad,
    ) -> Result<OpenedEngine, Error> {
        let (read, with, kind) = (path.clone(), options.clone(), self.servers.kind);
        let stated = self.servers.memory;
        let facts = tokio::task::spawn_blocking(move || server_facts(&read, &with, (kind, stated)));
        let (_, needs) = facts.await.map_err(|_| engine::Error::EngineStopped)??;
        let memory = load.reserve(needs.bytes)?;
        let source = self.servers.source(&path, needs.context, needs.cache_bytes);
        let supervisor = EngineSupervisor::once((kind, source?), path, options, self.stall_after);
        let supervisor = Arc::new(supervisor);
        let started = self.started.lock().as_mut().map(|started| {
            started.retain(|server| server.strong_count() > 0);
            started.push(Arc::downgrade(&supervisor));
        });
        started.ok_or(engine::Error::EngineStopped)?;
        let server = ModelServer {
            supervisor: Arc::clone(&supervisor),
            counts_process: load.counts_processes(),
            reserved: needs.bytes,
            memory: Some(memory),
            runtime: Handle::current(),
        };
        let cancelled = async {
            loop {
                if let Err(error) = load.check() {
                    return error;
                }
                sleep(CANCEL_TICK).await;
            }
        };
        let opened = tokio::select! {
            opened = timeout(START_LIMIT, supervisor.open()) => opened,
            error = cancelled => return Err(error.into()),
        };
        let opened = opened.map_err(|_| ExternalEngineError::NoStart { kind, limit: START_LIMIT })?;
        Ok(OpenedEngine { server: Some(server), ..opened? })
    }

    /// Ends all servers for good, and waits until they have ended.
    pub(crate) async fn end(&self) {
        let started = self.started.lock().take().unwrap_or_default();
        let running: Vec<_> = started.iter().filter_map(Weak::upgrade).collect();
        join_all(running.iter().map(|server| server.end())).await;
    }
}

/// The server of a loaded model. Dropping it ends the server; its memory is given back when its process is gone.
pub(super) struct ModelServer {
    supervisor: Arc<EngineSupervisor>,
    /// Whether the process's memory is that of the budget.
    counts_process: bool,
    /// Bytes that were reserved for it.
    reserved: u64,
    memory: Option<Reservation>,
    runtime: Handle,
}

impl ModelServer {
    /// Counts what the process has if that is more than was reserved.
    pub(super) fn count(&mut self, resident: u64) {
        if let Some(memory) = self.memory.as_mut().filter(|_| self.counts_process) {
            memory.settle(self.reserved.max(resident));
        }
    }
}

impl Drop for ModelServer {
    fn drop(&mut self) {
        let (supervisor, memory) = (Arc::clone(&self.supervisor), self.memory.take());
        self.runtime.spawn(async move {
            supervisor.end().await;
            drop(memory);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn servers(kind: EngineKind, command: &str) -> EngineServers {
        let source = EngineSource { api_key: Some("k".to_owned()), ..EngineSource::at("") };
        EngineServers { kind, command: command.to_owned(), source, memory: None }
    }

    #[test]
    fn a_command_names_model_and_port() {
        let refused = |kind, command| servers(kind, command).check().err().unwrap_or_default();
        assert_eq!(refused(EngineKind::Vllm, "vllm serve {model} --port {port} {kv_port} {replay_port}"), "");
        assert_eq!(refused(EngineKind::LlamaServer, "s -m {model} --port {port} -c {context}"), "");
        for (kind, command, part) in [
            (EngineKind::Vllm, "vllm serve {model}", "{port}"),
            (EngineKind::Vllm, "vllm serve --port {port}", "{model}"),
            (EngineKind::Vllm, "{model} {port} {replay_port}", "only with {kv_port}"),
            (EngineKind::LlamaServer, "{model} {port} {kv_port}", "no events"),
        ] {
            assert!(refused(kind, command).contains(part), "{command}");
        }
    }

    #[test]
    fn values_take_their_places_and_all_else_stays() {
        let command =
            r#"X='{"a": {}}' serve {model} --port {port} -c {context} {kv_bytes} {kv_port} {replay_port}"#;
        let source = servers(EngineKind::Vllm, command).source(Path::new("/ä b/m.gguf"), 9, 77).unwrap();
        let KvEvents::At { address, replay: Some(replay), .. } = &source.kv_events else { panic!() };
        let port = |address: &str| address.rsplit_once(':').unwrap().1.to_owned();
        let (at, events, replay) = (port(&source.url), port(address), port(replay));
        assert!(at != events && events != replay && replay != at);
        let expected =
            format!(r#"X='{{"a": {{}}}}' serve '/ä b/m.gguf' --port {at} -c 9 77 {events} {replay}"#);
        assert_eq!(source.command.as_deref(), Some(expected.as_str()));
        assert_eq!(source.api_key.as_deref(), Some("k"));
        let plain =
            servers(EngineKind::Vllm, "serve \"{model}\" {port}").source(Path::new("/m/a-1.gguf"), 9, 7);
        let plain = plain.unwrap();
        assert!(plain.command.unwrap().starts_with("serve \"/m/a-1.gguf\" "));
        assert_eq!(plain.kv_events, KvEvents::Off);
        for path in ["/a'b", "/a\"b", "/a$(b)", "/a`b`", "/a;b", "/a\\b", "/a\nb", "/{port}"] {
            let refused = servers(EngineKind::Vllm, command).source(Path::new(path), 9, 7).unwrap_err();
            assert!(refused.to_string().contains("shell"), "{path}: {refused}");
        }
    }
}
