//! Where a server of another project is.

use external::EngineOptions;
use std::fmt;
use std::time::Duration;

/// Place of a server, and what the operator states of it.
#[derive(Clone, PartialEq, Eq)]
pub struct EngineSource {
    /// `http://HOST[:PORT][/PATH]`.
    pub url: String,
    /// Command that starts the server. `None`: it runs beside this worker.
    pub command: Option<String>,
    /// The model's name in the server's requests. Empty: the server's only model.
    pub model: String,
    pub api_key: Option<String>,
    pub options: EngineOptions,
    pub kv_events: KvEvents,
    /// Time without requests after which the server is put to sleep. `None`: never.
    pub idle: Option<Duration>,
}

/// Place of a server's KV events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KvEvents {
    /// The server publishes none that are followed: its cache is not known.
    Off,
    At {
        /// `host:port` of the publisher.
        address: String,
        /// `host:port` of the replay socket.
        replay: Option<String>,
        topic: String,
    },
}

impl EngineSource {
    /// A server that runs beside this worker, with everything else at its default.
    pub fn at(url: &str) -> Self {
        Self {
            url: url.to_owned(),
            command: None,
            model: String::new(),
            api_key: None,
            options: EngineOptions::default(),
            kv_events: KvEvents::Off,
            idle: None,
        }
    }
}

impl fmt::Debug for EngineSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { url, command, model, api_key, options, kv_events, idle } = self;
        f.debug_struct("EngineSource")
            .field("url", url)
            .field("command", command)
            .field("model", model)
            .field("api_key", &api_key.as_ref().map(|_| "***"))
            .field("options", options)
            .field("kv_events", kv_events)
            .field("idle", idle)
            .finish()
    }
}
