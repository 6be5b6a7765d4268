//! `kvasir apply`: makes the deployments of a cluster those of a file.

use crate::access::Access;
use crate::config::Period;
use crate::deploy::{Replicas, list, path_of};
use crate::fleet_file::{CostsEntry, NodeEntry};
use anyhow::Context;
use proto::served_model::BUILT_IN;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

/// Coordinators accept or refuse a change within two seconds.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Makes the deployed models those of a file. Shows the differences first.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  kvasir apply -f fleet.toml --dry-run --ops 127.0.0.1:9090\n\n\
    fleet.toml:\n  [models.chat]\n  from = \"smollm2-135m\"\n  replicas = \"1:2\"\n  idle = \"10m\"\n  \
    nodes = [\"gpu=gb10\"]\n\n  [models.big]\n  file = \"/models/big.gguf\"\n  priority = 10\n\n\
    A setting that the file leaves out gets its default. Another source is rolled out as a new version.\n\
    What `kvasir plan --fleet` reads besides, [[node]] and `costs` of models, changes nothing.")]
pub(crate) struct Apply {
    /// File of the deployments, in TOML.
    #[arg(short, long, value_name = "FILE")]
    file: PathBuf,
    /// Show the differences and change nothing.
    #[arg(long)]
    dry_run: bool,
    /// Also undeploy the models that the file does not name.
    #[arg(long)]
    prune: bool,
    #[command(flatten)]
    access: Access,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FleetFile {
    #[serde(default)]
    pub(crate) models: BTreeMap<String, ModelEntry>,
    /// For `kvasir plan --fleet`.
    #[serde(default)]
    pub(crate) node: Vec<NodeEntry>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ModelEntry {
    pub(crate) file: Option<String>,
    pub(crate) from: Option<String>,
    pub(crate) replicas: Option<String>,
    pub(crate) idle: Option<Period>,
    #[serde(default)]
    pub(crate) pin: bool,
    #[serde(default)]
    pub(crate) nodes: Vec<String>,
    #[serde(default)]
    pub(crate) context: u32,
    pub(crate) priority: Option<u32>,
    /// For `kvasir plan --fleet`.
    pub(crate) costs: Option<CostsEntry>,
    pub(crate) shards: Option<u16>,
    pub(crate) engine: Option<String>,
}

/// A change of one deployment.
#[derive(Debug, PartialEq)]
enum Step {
    /// The settings to send, and lines that describe the difference.
    Set(String, Value, Vec<String>),
    Remove(String, u64),
}

impl ModelEntry {
    /// The entry in the form of the coordinator's API, with all settings.
    fn json(&self, name: &str) -> anyhow::Result<Map<String, Value>> {
        let replicas: Replicas = self
            .replicas
            .as_deref()
            .unwrap_or("0:1")
            .parse()
            .map_err(|error| anyhow::anyhow!("models.{name}.replicas: {error}"))?;
        let mut body = Map::new();
        match (&self.file, &self.from) {
            (Some(file), None) => drop(body.insert("file".into(), file.as_str().into())),
            (None, Some(from)) => drop(body.insert("fetch".into(), from.as_str().into())),
            _ => anyhow::bail!("models.{name}: give either file or from"),
        }
        let idle = self.idle.map_or(600, |idle| idle.0.as_secs());
        let settings = json!({
            "min": replicas.min,
            "max": replicas.max,
            "idle_s": idle,
            "pin": self.pin,
            "nodes": self.nodes,
            "context": self.context,
            "priority": self.priority.unwrap_or(1),
            "shards": self.shards.unwrap_or(1),
            "engine": self.engine.as_deref().unwrap_or(BUILT_IN),
        });
        body.extend(settings.as_object().cloned().unwrap_or_default());
        Ok(body)
    }
}

/// The origin of the files of the version that is, or becomes, active: `file` or `fetch`, and the path or address.
fn source(deployment: &Value) -> (String, Value) {
    let versions = deployment["versions"].as_array().map(Vec::as_slice).unwrap_or_default();
    let target = deployment["rollout"]["version"].as_u64();
    let wanted = versions.iter().find(|version| match target {
        Some(target) => version["version"] == target,
        None => version["active"] == true,
    });
    let source = wanted.and_then(|version| version["source"].as_object()?.iter().next());
    source.map(|(kind, text)| (kind.clone(), text.clone())).unwrap_or_default()
}

/// The steps from the present deployments to those of the file.
fn steps(fleet: &FleetFile, present: &[Value], prune: bool) -> anyhow::Result<Vec<Step>> {
    let mut steps = Vec::new();
    for (name, entry) in &fleet.models {
        let mut body = entry.json(name)?;
        let Some(now) = present.iter().find(|deployment| deployment["model"] == name.as_str()) else {
            let lines = body.iter().map(|(field, value)| format!("{field} = {value}")).collect();
            body.insert("from".into(), 0.into());
            steps.push(Step::Set(name.clone(), body.into(), lines));
            continue;
        };
        let (kind, origin) = source(now);
        let before = |field: &str| match field {
            "file" | "fetch" if field == kind => origin.clone(),
            "file" | "fetch" => Value::Null,
            _ => now[field].clone(),
        };
        let differs = body.iter().filter(|(field, value)| before(field) != **value);
        let lines: Vec<String> =
            differs.map(|(field, value)| format!("{field}: {} -> {value}", before(field))).collect();
        if !lines.is_empty() {
            body.insert("from".into(), now["revision"].clone());
            steps.push(Step::Set(name.clone(), body.into(), lines));
        }
    }
    if prune {
        let others = present.iter().filter_map(|deployment| {
            let name = deployment["model"].as_str()?;
            let other = !fleet.models.contains_key(name);
            other.then(|| Step::Remove(name.to_owned(), deployment["revision"].as_u64().unwrap_or(0)))
        });
        steps.extend(others);
    }
    Ok(steps)
}

impl Apply {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        let name = self.file.display().to_string();
        let text = std::fs::read_to_string(&self.file).with_context(|| name.clone())?;
        let fleet: FleetFile = toml::from_str(&text).with_context(|| name.clone())?;
        let present = list(&self.access)?;
        let steps = steps(&fleet, &present, self.prune).with_context(|| name)?;
        let mut out = std::io::stdout().lock();
        for step in &steps {
            match step {
                Step::Set(model, body, lines) => {
                    let sign = if body["from"] == 0 { '+' } else { '~' };
                    writeln!(out, "{sign} {model}")?;
                    lines.iter().try_for_each(|line| writeln!(out, "    {line}"))?;
                }
                Step::Remove(model, _) => writeln!(out, "- {model}")?,
            }
        }
        out.flush()?;
        if steps.is_empty() {
            eprintln!("nothing differs");
        }
        if self.dry_run {
            return Ok(());
        }
        for step in &steps {
            let (model, made) = match step {
                Step::Set(model, body, _) => {
                    (model, self.access.json("PUT", &path_of(model), Some(body), TIMEOUT))
                }
                Step::Remove(model, revision) => {
                    let path = format!("{}?from={revision}", path_of(model));
                    (model, self.access.json("DELETE", &path, None, TIMEOUT))
                }
            };
            made.with_context(|| format!("{model}; changes before it were made"))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fleet(text: &str) -> FleetFile {
        toml::from_str(text).unwrap()
    }

    fn present() -> Vec<Value> {
        let deployed = |model: &str, revision: u64| {
            json!({
                "model": model, "min": 0, "max": 1, "idle_s": 600, "pin": false, "nodes": [], "context": 0,
                "priority": 1, "shards": 1, "engine": "kvasir", "revision": revision, "rollout": null,
                "versions": [{"version": 3, "active": true, "source": {"fetch": "smollm2-135m"}}],
            })
        };
        vec![deployed("chat", 7), deployed("old", 8)]
    }

    #[test]
    fn only_differences_are_changed_and_only_with_prune_models_are_removed() {
        let same = fleet("[models.chat]\nfrom = \"smollm2-135m\"\n");
        assert_eq!(steps(&same, &present(), false).unwrap(), []);
        assert_eq!(steps(&same, &present(), true).unwrap(), [Step::Remove("old".into(), 8)]);
        let other = fleet("[models.chat]\nfile = \"/m.gguf\"\nreplicas = \"1:2\"\nidle = \"10m\"\n");
        let [Step::Set(name, body, lines)] = &steps(&other, &present(), false).unwrap()[..] else { panic!() };
        assert_eq!((name.as_str(), &body["from"], &body["file"]), ("chat", &json!(7), &json!("/m.gguf")));
        assert_eq!(lines[..], ["file: null -> \"/m.gguf\"", "min: 0 -> 1", "max: 1 -> 2"]);
        let planned = "[models.chat.costs]\nbytes = 1\nneeded_bytes = 1\nproducts = 1.0\n[[node]]\nname = \"a\"\n\
            memory = 1\nbandwidth = 1\ncompute = 1.0\nread = 1\n";
        let with_nodes = fleet(&format!("[models.chat]\nfrom = \"smollm2-135m\"\n{planned}"));
        assert_eq!(
            steps(&with_nodes, &present(), false).unwrap(),
            [],
            "nodes and costs are of no deployment"
        );
        let new = fleet("[models.new]\nfrom = \"gemma3-270m\"\n");
        let [Step::Set(name, body, lines)] = &steps(&new, &present(), false).unwrap()[..] else { panic!() };
        assert_eq!((name.as_str(), &body["from"]), ("new", &json!(0)));
        assert!(lines.iter().any(|line| line == "fetch = \"gemma3-270m\""), "{lines:?}");
    }

    #[test]
    fn a_wrong_entry_is_named() {
        for (text, named) in [
            ("[models.a]\n", "models.a"),
            ("[models.a]\nfile = \"x\"\nfrom = \"y\"\n", "models.a"),
            ("[models.a]\nfrom = \"y\"\nreplicas = \"x\"\n", "models.a.replicas"),
        ] {
            let error = steps(&fleet(text), &[], false).unwrap_err().to_string();
            assert!(error.contains(named), "{error}");
        }
        assert!(toml::from_str::<FleetFile>("[models.a]\nform = \"y\"\n").is_err());
    }
}
