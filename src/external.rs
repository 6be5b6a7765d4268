//! Settings of a worker whose engine is a server of another project, or that starts such servers for deployed models.

use crate::config::{ByteSize, ConfigError, Period};
use anyhow::Context;
use external::{EngineKind, EngineOptions};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::time::Duration;
use worker::EngineServers;
use worker::generator::{self, Backend, EngineSource, KvEvents};

/// Most bytes of a file with an API key.
const MAX_KEY_BYTES: u64 = 4096;
/// Shortest `engine_idle`: an engine takes seconds to sleep and to wake.
const MIN_IDLE: Duration = Duration::from_secs(1);
/// Value of `kv_events` without events.
const OFF: &str = "off";

/// Property of an engine that its server does not report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum EngineOption {
    /// Results do not depend on the batch: VLLM_BATCH_INVARIANT=1, or SGLang's deterministic inference.
    BatchInvariant,
    /// Grammars are compiled by llguidance, so that Lark grammars mean the same as here.
    Llguidance,
    /// Log-probabilities are those of the raw logits: SGLANG_RETURN_ORIGINAL_LOGPROB=1.
    RawLogprobs,
    /// Requests are scheduled by their priority.
    PriorityScheduling,
}

fn options(stated: &[EngineOption]) -> EngineOptions {
    let has = |option| stated.contains(&option);
    EngineOptions {
        batch_invariant: has(EngineOption::BatchInvariant),
        llguidance: has(EngineOption::Llguidance),
        raw_logprobs: has(EngineOption::RawLogprobs),
        priority_scheduling: has(EngineOption::PriorityScheduling),
    }
}

/// Settings of a worker's engine, as they are given.
#[derive(Debug, Clone, Default)]
pub(crate) struct EngineSettings {
    pub(crate) engine: Option<String>,
    pub(crate) url: Option<String>,
    pub(crate) cmd: Option<String>,
    pub(crate) model: Option<String>,
    pub(crate) key_file: Option<PathBuf>,
    pub(crate) options: Option<Vec<EngineOption>>,
    pub(crate) idle: Option<Period>,
    pub(crate) memory: Option<ByteSize>,
    pub(crate) kv_events: Option<String>,
    pub(crate) kv_events_replay: Option<String>,
    pub(crate) kv_events_topic: Option<String>,
    /// A model is named.
    pub(crate) has_model: bool,
    /// Set fields that only the built-in engine has.
    pub(crate) built_in_only: Vec<&'static str>,
}

/// Engine of a worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SelectedEngine {
    BuiltIn,
    /// One server with the worker's own model.
    Server(EngineKind, EngineSource),
    /// A server for each model that is deployed to the worker.
    Servers(EngineServers),
}

/// The engine that the settings select.
///
/// # Errors
/// If the settings name an unknown engine, or do not fit to the engine.
pub(crate) fn selected(settings: &EngineSettings) -> anyhow::Result<SelectedEngine> {
    let has_server = settings.url.is_some() || settings.cmd.is_some();
    let kind = match generator::select_backend(settings.engine.as_deref(), has_server)? {
        Backend::BuiltIn => {
            // Refuses what only other engines have.
            source(settings)?;
            return Ok(SelectedEngine::BuiltIn);
        }
        Backend::External(kind) => kind,
    };
    if let (None, Some(command)) = (&settings.url, &settings.cmd) {
        return servers(settings, kind, command).map(SelectedEngine::Servers);
    }
    let Some(source) = source(settings)? else { return Ok(SelectedEngine::BuiltIn) };
    if let Some(memory) = settings.memory {
        return Err(ConfigError::field("engine_memory", memory, "only without engine_url").into());
    }
    if let Some(field) = settings.built_in_only.first() {
        return Err(ConfigError::field(field, "set", format!("not with engine = {kind}")).into());
    }
    if !settings.has_model {
        let need = "name the model's GGUF file, or its Hugging Face folder with tokenizer.json, as ID=PATH";
        return Err(ConfigError::missing("model", need).into());
    }
    if let Some(idle) = settings.idle {
        if kind == EngineKind::LlamaServer {
            let rule = "llama-server sleeps by its own --sleep-idle-seconds";
            return Err(ConfigError::field("engine_idle", idle, rule).into());
        }
        if idle.0 < MIN_IDLE {
            return Err(ConfigError::field("engine_idle", idle, "at least 1s").into());
        }
    }
    match (kind, &settings.kv_events) {
        (EngineKind::LlamaServer, Some(events)) if events != OFF => {
            Err(ConfigError::field("kv_events", events, "llama-server publishes no events").into())
        }
        (EngineKind::Vllm | EngineKind::Sglang, None) => {
            let need = "name the HOST:PORT where the engine publishes its KV events, or off";
            Err(ConfigError::missing("kv_events", need).into())
        }
        _ => Ok(SelectedEngine::Server(kind, source)),
    }
}

/// Servers that are started for deployed models.
fn servers(settings: &EngineSettings, kind: EngineKind, command: &str) -> anyhow::Result<EngineServers> {
    let refuse = |field, rule: &str| Err(ConfigError::field(field, "set", rule).into());
    if settings.has_model {
        return refuse("model", "not with engine_cmd without engine_url: deploy it to this worker");
    }
    if let Some(field) = settings.built_in_only.first() {
        return Err(ConfigError::field(field, "set", format!("not with engine = {kind}")).into());
    }
    let by_place = [
        ("engine_model", settings.model.is_some()),
        ("engine_idle", settings.idle.is_some()),
        ("kv_events", settings.kv_events.is_some()),
        ("kv_events_replay", settings.kv_events_replay.is_some()),
        ("kv_events_topic", settings.kv_events_topic.is_some()),
    ];
    if let Some((field, _)) = by_place.iter().find(|(_, set)| *set) {
        return refuse(field, "only with engine_url");
    }
    let source = EngineSource {
        api_key: settings.key_file.as_deref().map(read_key).transpose()?,
        options: options(settings.options.as_deref().unwrap_or_default()),
        ..EngineSource::at("")
    };
    let memory = settings.memory.map(|memory| memory.0);
    let servers = EngineServers { kind, command: command.to_owned(), source, memory };
    servers.check().map_err(|rule| ConfigError::field("engine_cmd", command, rule))?;
    Ok(servers)
}

fn source(settings: &EngineSettings) -> anyhow::Result<Option<EngineSource>> {
    let EngineSettings { url, cmd, model, key_file, options: stated, .. } = settings;
    let Some(url) = url else {
        for (field, set) in [
            ("engine_memory", settings.memory.is_some()),
            ("engine_model", model.is_some()),
            ("engine_key_file", key_file.is_some()),
            ("engine_options", stated.is_some()),
            ("engine_idle", settings.idle.is_some()),
            ("kv_events", settings.kv_events.is_some()),
        ] {
            if set {
                return Err(ConfigError::field(field, "set", "only with the server of an engine").into());
            }
        }
        return Ok(None);
    };
    let kv_events = match settings.kv_events.as_deref() {
        None | Some(OFF) => KvEvents::Off,
        Some(address) => {
            check_address("kv_events", address)?;
            let replay = settings.kv_events_replay.clone();
            if let Some(replay) = &replay {
                check_address("kv_events_replay", replay)?;
            }
            let topic = settings.kv_events_topic.clone().unwrap_or_default();
            KvEvents::At { address: address.to_owned(), replay, topic }
        }
    };
    Ok(Some(EngineSource {
        url: url.clone(),
        command: cmd.clone(),
        model: model.clone().unwrap_or_default(),
        api_key: key_file.as_deref().map(read_key).transpose()?,
        options: options(stated.as_deref().unwrap_or_default()),
        kv_events,
        idle: settings.idle.map(|idle| idle.0),
    }))
}

fn check_address(field: &'static str, address: &str) -> Result<(), ConfigError> {
    let port = address.rsplit_once(':').filter(|(host, _)| !host.is_empty()).map(|(_, port)| port);
    match port.and_then(|port| port.parse::<u16>().ok()) {
        Some(1..) => Ok(()),
        _ => Err(ConfigError::field(field, address, "must be HOST:PORT")),
    }
}

fn read_key(path: &Path) -> anyhow::Result<String> {
    let shown = path.display();
    let bytes = path.metadata().with_context(|| shown.to_string())?.len();
    if bytes > MAX_KEY_BYTES {
        let rule = format!("has {bytes} bytes, at most {MAX_KEY_BYTES}");
        return Err(ConfigError::field("engine_key_file", shown, rule).into());
    }
    let key = std::fs::read_to_string(path).with_context(|| shown.to_string())?;
    Ok(key.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(engine: &str) -> EngineSettings {
        EngineSettings {
            engine: Some(engine.to_owned()),
            url: Some("http://127.0.0.1:8000".to_owned()),
            has_model: true,
            ..EngineSettings::default()
        }
    }

    #[test]
    fn without_an_engine_the_built_in_one_is_used() {
        assert_eq!(selected(&EngineSettings::default()).unwrap(), SelectedEngine::BuiltIn);
        let named = EngineSettings { engine: Some("kvasir".to_owned()), ..EngineSettings::default() };
        assert_eq!(selected(&named).unwrap(), SelectedEngine::BuiltIn);
    }

    #[test]
    fn a_server_is_taken_with_what_the_operator_states() {
        let settings = EngineSettings {
            kv_events: Some("127.0.0.1:5557".to_owned()),
            kv_events_replay: Some("127.0.0.1:5558".to_owned()),
            options: Some(vec![EngineOption::Llguidance]),
            idle: Some(Period(Duration::from_secs(600))),
            ..at("vllm")
        };
        let SelectedEngine::Server(kind, source) = selected(&settings).unwrap() else { panic!() };
        assert_eq!(kind, EngineKind::Vllm);
        assert_eq!(source.idle, Some(Duration::from_secs(600)));
        assert_eq!(source.options, EngineOptions { llguidance: true, ..EngineOptions::default() });
        let (address, replay) = ("127.0.0.1:5557".to_owned(), Some("127.0.0.1:5558".to_owned()));
        assert_eq!(source.kv_events, KvEvents::At { address, replay, topic: String::new() });
        let selected = selected(&at("llama-server")).unwrap();
        assert!(matches!(selected, SelectedEngine::Server(EngineKind::LlamaServer, _)));
    }

    /// Servers for deployed models.
    fn starting(engine: &str, command: &str) -> EngineSettings {
        let text = |text: &str| Some(text.to_owned());
        EngineSettings { engine: text(engine), cmd: text(command), ..EngineSettings::default() }
    }

    #[test]
    fn a_command_without_an_address_starts_a_server_for_each_deployed_model() {
        let command = "llama-server -m {model} --port {port} -c {context}";
        let settings = EngineSettings { memory: Some(ByteSize(9)), ..starting("llama-server", command) };
        let SelectedEngine::Servers(servers) = selected(&settings).unwrap() else { panic!() };
        assert_eq!((servers.kind, servers.memory), (EngineKind::LlamaServer, Some(9)));
        assert_eq!(servers.command, command);
        let set = || Some("x".to_owned());
        let idle = Some(Period(Duration::from_secs(9)));
        for (settings, expected) in [
            (starting("vllm", "vllm serve {model}"), "`engine_cmd`"),
            (starting("kvasir", command), "neither engine_url nor engine_cmd"),
            (EngineSettings { has_model: true, ..starting("vllm", command) }, "`model`"),
            (EngineSettings { built_in_only: vec!["pool"], ..starting("vllm", command) }, "`pool`"),
            (EngineSettings { model: set(), ..starting("vllm", command) }, "`engine_model`"),
            (EngineSettings { idle, ..starting("vllm", command) }, "`engine_idle`"),
            (EngineSettings { kv_events: set(), ..starting("vllm", command) }, "`kv_events`"),
        ] {
            let error = selected(&settings).unwrap_err().to_string();
            assert!(error.contains(expected), "{expected}: {error}");
        }
    }

    #[test]
    fn settings_that_do_not_fit_to_the_engine_are_refused_by_name() {
        let events = |address: &str| Some(address.to_owned());
        let idle = |millis| Some(Period(Duration::from_millis(millis)));
        let cases = [
            (at("nonsense"), "known are kvasir, vllm, sglang, llama-server"),
            (at("kvasir"), "engine_url"),
            (at("vllm"), "`kv_events`"),
            (EngineSettings { kv_events: events("5557"), ..at("sglang") }, "HOST:PORT"),
            (EngineSettings { kv_events: events("h:0"), ..at("sglang") }, "HOST:PORT"),
            (EngineSettings { kv_events: events("h:1"), ..at("llama-server") }, "publishes no events"),
            (EngineSettings { built_in_only: vec!["pool"], ..at("llama-server") }, "`pool`"),
            (EngineSettings { has_model: false, ..at("llama-server") }, "`model`"),
            (EngineSettings { url: None, ..at("llama-server") }, "engine_url"),
            (EngineSettings { cmd: events("x"), ..EngineSettings::default() }, "engine_cmd"),
            (EngineSettings { idle: idle(1000), ..EngineSettings::default() }, "`engine_idle`"),
            (EngineSettings { memory: Some(ByteSize(1)), ..EngineSettings::default() }, "`engine_memory`"),
            (EngineSettings { memory: Some(ByteSize(1)), ..at("llama-server") }, "`engine_memory`"),
            (EngineSettings { idle: idle(1000), ..at("llama-server") }, "--sleep-idle-seconds"),
            (EngineSettings { idle: idle(999), kv_events: events("off"), ..at("vllm") }, "at least 1s"),
        ];
        for (settings, expected) in cases {
            let error = selected(&settings).unwrap_err().to_string();
            assert!(error.contains(expected), "{expected}: {error}");
        }
    }
}
