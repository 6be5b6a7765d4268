//! `kvasir plan --fleet`: replays an arrival log on a virtual fleet, and proposes settings of its deployments.

mod report;

use crate::apply::{FleetFile, ModelEntry};
use crate::config::ConfigError;
use crate::deploy::Replicas;
use crate::fleet_file::{CostsEntry, NodeEntry};
use crate::hosting::check_labels;
use crate::models::resolve_here;
use anyhow::{Context, bail};
use consensus::table::DeploymentSettings;
use coordinator::config::Config;
use model::costs::{KvSize, ModelCosts};
use model::{ModelFile, ModelSpec};
use planner::fleet::{Costs, Fleet, MAX_NODES, Model, Node};
use planner::search::propose;
use planner::simulation::{Outcome, Policy, simulate};
use planner::traffic::{Synthetic, Traffic};
use proto::deployment::ModelSource;
use proto::ids::{ModelId, NodeId};
use serde_json::json;
use std::fs::File;
use std::io::{BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};
use worker::load::{self, DeviceChoice, EngineOptions};

/// Longest file of a fleet, in bytes.
const MAX_FILE_BYTES: u64 = 4 << 20;
/// Seconds of a load besides reading, if the file has none (docs/measurements/several-models.md).
const LOAD_OVERHEAD: f64 = 0.3;
/// Depth in tokens at which attention is counted.
const DEPTH: u64 = 1024;

/// Flags of a simulation.
#[derive(Debug, clap::Args)]
pub(super) struct FleetArgs {
    /// Replay traffic on the fleet of this file, the one of `kvasir apply` with `[[node]]` entries
    #[arg(long, value_name = "FILE", conflicts_with_all = FLAGS_OF_LAYERS, requires = "arrivals")]
    pub(super) fleet: Option<PathBuf>,
    /// Arrival log: JSON lines with t (seconds), model, prompt_tokens and output_tokens, or spans of the coordinators
    /// in OTLP's JSON form
    #[arg(long, value_name = "FILE", requires = "fleet", group = "arrivals")]
    traffic: Option<PathBuf>,
    /// Draw the traffic: zipf:EXPONENT and any of rate=, requests=, prompt=, output= (means) and drift= (seconds until
    /// the ranks move on by one model), separated by commas. The models' ranks are the order of their names
    #[arg(long, value_name = "zipf:EXPONENT,..", requires = "fleet", group = "arrivals")]
    synthetic: Option<Synthetic>,
    /// Seed of drawn traffic
    #[arg(long, value_name = "N", default_value_t = 1, requires = "synthetic")]
    seed: u64,
    /// Write the traffic to this file, as an arrival log
    #[arg(long, value_name = "FILE", requires = "fleet")]
    save_traffic: Option<PathBuf>,
    /// Also replay it with other orders of evictions: the least recently used model first (LRU), and the one whose
    /// next request comes last (Belady)
    #[arg(long, requires = "fleet")]
    compare: bool,
    /// Most simulations of the search for better settings; 1: no search
    #[arg(long, value_name = "N", requires = "fleet", default_value_t = 100)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=100_000))]
    evaluations: u32,
}

/// Flags of plans for layers.
const FLAGS_OF_LAYERS: [&str; 10] = [
    "model",
    "workers_file",
    "shards",
    "replicas",
    "context",
    "sequences",
    "kv_type",
    "kv_type_v",
    "apply",
    "withdraw",
];

impl FleetArgs {
    pub(super) fn run(&self, path: &Path, json: bool) -> anyhow::Result<()> {
        let text = read(path)?;
        let refuse = |reason: String| ConfigError::File { path: path.display().to_string(), reason };
        let file: FleetFile = toml::from_str(&text).map_err(|error| refuse(error.to_string()))?;
        let fleet = fleet(&file).map_err(|error| refuse(format!("{error:#}")))?;
        let traffic = self.arrivals(&fleet)?;
        if let Some(path) = &self.save_traffic {
            let write = || traffic.write(&fleet, BufWriter::new(File::create(path)?));
            write().with_context(|| path.display().to_string())?;
        }
        let proposal = propose(&fleet, &traffic.arrivals, self.evaluations as usize)?;
        let found = &proposal.before;
        let other = |policy| simulate(&fleet, &traffic.arrivals, policy);
        let others: Vec<(&str, Outcome)> = match self.compare {
            true => vec![("lru", other(Policy::Lru)?), ("belady", other(Policy::Belady)?)],
            false => Vec::new(),
        };
        let mut out = std::io::stdout().lock();
        if json {
            let totals = others.iter().map(|(name, other)| ((*name).to_owned(), report::totals(other)));
            let totals: serde_json::Map<String, serde_json::Value> = totals.collect();
            let report = json!({
                "outcome": found,
                "others": totals,
                "proposal": report::proposal(&proposal),
                "unknown_models": traffic.unknown,
            });
            writeln!(out, "{report}")?;
        } else {
            // Comments in a file for `kvasir apply`.
            let mut tables = report::text(found);
            if !others.is_empty() {
                tables = tables + "\n" + &report::compared(found, &others);
            }
            for line in tables.lines() {
                writeln!(out, "{}", format!("# {line}").trim_end())?;
            }
            if self.evaluations > 1 {
                write!(out, "\n{}", report::file(&proposal, &fleet.models, &text)?)?;
            }
        }
        out.flush()?;
        for (model, requests) in &traffic.unknown {
            eprintln!("left out {requests} requests for {model}, which the fleet does not have");
        }
        Ok(())
    }

    fn arrivals(&self, fleet: &Fleet) -> anyhow::Result<Traffic> {
        match (&self.traffic, &self.synthetic) {
            (Some(path), _) => {
                let name = || path.display().to_string();
                let file = File::open(path).with_context(name)?;
                Traffic::read(BufReader::new(file), fleet).with_context(name)
            }
            (None, Some(synthetic)) => Ok(synthetic.draw(fleet, self.seed)),
            (None, None) => bail!("give --traffic or --synthetic"),
        }
    }
}

fn read(path: &Path) -> Result<String, ConfigError> {
    let refuse = |reason: String| ConfigError::File { path: path.display().to_string(), reason };
    let bytes = std::fs::metadata(path).map_err(|error| refuse(error.to_string()))?.len();
    if bytes > MAX_FILE_BYTES {
        return Err(refuse(format!("the file has {bytes} bytes, at most {MAX_FILE_BYTES}")));
    }
    std::fs::read_to_string(path).map_err(|error| refuse(error.to_string()))
}

fn fleet(file: &FleetFile) -> anyhow::Result<Fleet> {
    let mut nodes = Vec::new();
    for entry in &file.node {
        let of_entry = entry.nodes().with_context(|| format!("node {}", entry.name))?;
        nodes.extend(of_entry);
        if nodes.len() > MAX_NODES {
            bail!("node: more than {MAX_NODES}");
        }
    }
    let model = |(name, entry): (&String, &ModelEntry)| {
        planned(name, entry).with_context(|| format!("models.{name}"))
    };
    let models = file.models.iter().map(model).collect::<anyhow::Result<Vec<Model>>>()?;
    Ok(Fleet::new(nodes, models, Config::default().load_wait_s as f64)?)
}

impl NodeEntry {
    fn nodes(&self) -> anyhow::Result<Vec<Node>> {
        check_labels(&self.labels)?;
        let names = match self.count {
            None => vec![self.name.clone()],
            Some(count) if (1..=MAX_NODES as u32).contains(&count) => {
                (0..count).map(|number| format!("{}-{number}", self.name)).collect()
            }
            Some(count) => bail!("count: {count}, must be 1 to {MAX_NODES}"),
        };
        let files = self.files.as_ref().map(|files| files.iter().map(ModelId::new).collect()).transpose()?;
        let or = |rate: Option<crate::config::ByteSize>| rate.unwrap_or(self.read).0 as f64;
        let node = |name: String| {
            Ok(Node {
                name: NodeId::new(name)?,
                labels: self.labels.iter().cloned().collect(),
                memory: self.memory.0,
                bandwidth: self.bandwidth.0 as f64,
                compute: self.compute,
                read: self.read.0 as f64,
                copy: or(self.copy),
                link: or(self.link),
                page_cache: self.page_cache.unwrap_or(self.memory).0,
                load_overhead: self.load_overhead.map_or(LOAD_OVERHEAD, |overhead| overhead.0.as_secs_f64()),
                files: files.clone(),
            })
        };
        names.into_iter().map(node).collect()
    }
}

/// A model of the file, with its costs.
fn planned(name: &str, entry: &ModelEntry) -> anyhow::Result<Model> {
    let replicas = entry.replicas.as_deref().unwrap_or("0:1");
    let replicas: Replicas = replicas.parse().map_err(|error| anyhow::anyhow!("replicas: {error}"))?;
    let default = DeploymentSettings::default();
    let idle_s = match entry.idle {
        Some(idle) => u32::try_from(idle.0.as_secs()).context("idle: too long")?,
        None => default.idle_s,
    };
    let settings = DeploymentSettings {
        min: replicas.min,
        max: replicas.max,
        idle_s,
        pin: entry.pin,
        nodes: entry.nodes.clone(),
        context: entry.context,
        priority: entry.priority.unwrap_or(default.priority),
        shards: entry.shards.unwrap_or(default.shards),
        engine: entry.engine.clone().unwrap_or(default.engine),
    };
    let (source, named) = match (&entry.file, &entry.from) {
        (Some(file), None) => (ModelSource::File(file.clone()), file),
        (None, Some(from)) => (ModelSource::Fetch(from.clone()), from),
        _ => bail!("give either file or from"),
    };
    let costs = match &entry.costs {
        Some(costs) => costs.costs(),
        None => {
            let here = resolve_here(named)?.with_context(|| {
                format!("{named} is not on this machine: give its costs ([models.{name}.costs])")
            })?;
            costs_of(&here.path, entry.context as usize)?
        }
    };
    Ok(Model { name: ModelId::new(name)?, source, settings, costs })
}

impl CostsEntry {
    fn costs(&self) -> Costs {
        let read = self.token_bytes.unwrap_or(self.bytes).0 as f64;
        Costs {
            bytes: self.bytes.0,
            needed: self.needed_bytes.0,
            layer_bytes: read,
            token_bytes: read,
            kv_bytes: self.kv_bytes,
            products: self.products,
            head_products: self.head_products,
            attention: self.attention,
        }
    }
}

/// The costs of a model by the header of its file.
fn costs_of(path: &Path, context: usize) -> anyhow::Result<Costs> {
    let file = ModelFile::open(path)?;
    let spec = ModelSpec::from_file(&file)?;
    let costs = ModelCosts::of_file(&spec, &file).range(0..spec.layers.len());
    let options = EngineOptions {
        device: DeviceChoice::Auto,
        max_model_len: (context > 0).then_some(context),
        ..EngineOptions::default()
    };
    let constant = costs.mixing_products(0);
    Ok(Costs {
        bytes: file.files().filter_map(|path| Some(path.metadata().ok()?.len())).sum(),
        needed: load::needed_bytes(path, &options)?,
        layer_bytes: costs.layer_bytes as f64,
        token_bytes: costs.token_bytes as f64,
        kv_bytes: costs.kv_token_bytes(DEPTH, KvSize::F16) as f64 / DEPTH as f64,
        products: (costs.row_products + constant) as f64,
        head_products: costs.head_products as f64,
        attention: costs.mixing_products(DEPTH).saturating_sub(constant) as f64 / DEPTH as f64,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODE: &str = "[[node]]\nname = \"a\"\ncount = 2\nmemory = \"2GiB\"\nbandwidth = \"20GB\"\ncompute = 1e12\n\
        read = \"1GB\"\nlabels = [\"zone=a\"]\n";

    fn model(name: &str, more: &str) -> String {
        format!(
            "[models.{name}]\nfile = \"/{name}\"\n{more}\n[models.{name}.costs]\nbytes = \"1GB\"\n\
             needed_bytes = \"1.5GB\"\nproducts = 1e9\n"
        )
    }

    fn parse(text: &str) -> anyhow::Result<Fleet> {
        fleet(&toml::from_str(text)?)
    }

    #[test]
    fn a_proposal_is_a_file_of_the_same_form_with_all_settings() {
        let settings = "replicas = \"0:2\"\nidle = \"30m\"\npin = true\nnodes = [\"zone=a\"]\ncontext = 99\npriority = 3";
        let text = [NODE, &model("x", settings), &model("y", ""), &model("z", "")].concat();
        let fleet = parse(&text).unwrap();
        assert_eq!(fleet.nodes[1].name.as_str(), "a-1");
        let traffic = "zipf:0.5,rate=1,requests=100".parse::<Synthetic>().unwrap().draw(&fleet, 1);
        let proposal = propose(&fleet, &traffic.arrivals, 30).unwrap();
        let text = report::file(&proposal, &fleet.models, &text).unwrap();
        let again: FleetFile = toml::from_str(&text).unwrap();
        for (model, (name, mut entry)) in proposal.fleet.models.iter().zip(again.models) {
            let costs = "bytes = 1\nneeded_bytes = 1\nproducts = 1.0\n";
            entry.costs = Some(toml::from_str(costs).unwrap());
            let read = planned(&name, &entry).unwrap();
            assert_eq!((&read.settings, &read.source), (&model.settings, &model.source), "{text}");
        }
    }

    #[test]
    fn wrong_files_are_named() {
        for (text, named) in [
            (NODE.to_owned(), "models: 0"),
            (model("x", ""), "node: 0"),
            (
                [&NODE.replace("count = 2", "count = 0"), &model("x", "")[..]].concat(),
                "node a: count: 0, must be 1 to",
            ),
            ([&NODE.replace("zone=a", "zone"), &model("x", "")[..]].concat(), "node a: setting `labels`"),
            ([&NODE.replace("1e12", "-1.0"), &model("x", "")[..]].concat(), "node a-0: compute: -1"),
            ([NODE, &model("x", "replicas = \"3:2\"")].concat(), "models.x: replicas: 3:2, must be"),
            ([NODE, &model("x", "shards = 2")].concat(), "models.x: shards: 2, must be 1"),
            ([NODE, &model("x", "engine = \"vllm\"")].concat(), "models.x: engine: vllm, must be kvasir"),
            (
                [NODE, "[models.x]\nfile = \"/nowhere.gguf\"\n"].concat(),
                "models.x: /nowhere.gguf is not on this machine",
            ),
            ([NODE, "files = [\"y\"]\n", &model("x", "")].concat(), "node a-0: files: y, is not in models"),
        ] {
            let error = format!("{:#}", parse(&text).unwrap_err());
            assert!(error.starts_with(named), "{error}");
        }
        assert!(parse(&NODE.replace("read", "reads")).is_err());
    }
}
