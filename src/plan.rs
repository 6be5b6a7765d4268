//! `kvasir plan`: predicts a placement of layers and its speed without loading the model, and applies an
//! operator's plan to a cluster. With `--fleet`, replays traffic on a virtual fleet of deployed models.

mod apply;
mod fleet;
mod workers;

use crate::access::Access;
use crate::columns::columns;
use crate::config::ConfigError;
use crate::models::{Resolved, resolve_here, resolve_or_pull};
use crate::numerics::KvTypeArg;
use crate::spec::SpecArg;
use anyhow::Result;
use group::placement::{Placement, Replica, Workload, check_shards, max_shards};
use model::costs::{DrafterStage, KvSize, ModelCosts};
use model::{ModelFile, ModelSpec};
use serde::Serialize;
use std::path::PathBuf;
pub(crate) use workers::{ASSUMED_BANDWIDTH, compute, decode_bandwidth, gpu_bandwidth};
use workers::{LayersOf, Workers};

/// Default context, if the model's own is longer.
const CONTEXT: usize = 8192;

/// Shows a placement of a model's layers on workers and its predicted speed, without loading the model
///
/// With --apply the plan of the workers file is sent to a cluster. From then on the model has these replicas, and the
/// named workers serve nothing else, until --withdraw returns the model to the coordinators' planning.
///
/// With --fleet an arrival log is replayed on a virtual fleet, and replicas of its deployed models are proposed.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    kvasir plan smollm2-135m\n  \
    kvasir plan ./model-00001-of-00003.gguf --workers-file workers.toml --shards 2 --context 32768 --json\n  \
    kvasir plan smollm2-135m --workers-file workers.toml --apply --ops 10.0.0.7:9090\n  \
    kvasir plan smollm2-135m --withdraw --ops 10.0.0.7:9090\n  \
    kvasir plan --fleet fleet.toml --traffic log.jsonl > proposal.toml\n  \
    kvasir plan --fleet fleet.toml --synthetic zipf:1.1,rate=2 --seed 7 --compare\n\n\
    workers.toml, with compute in multiply-adds per second. `layers` is for your own plan; each worker whose layers begin\n\
    with 0 begins another replica:\n  \
    [[worker]]\n  name = \"w0\"\n  memory = \"24GiB\"\n  bandwidth = \"40GB\"\n  compute = 4e11\n  layers = [0, 20]\n\n\
    MODEL may also be a name that the cluster serves, without a file on this machine; then no speed is predicted. With a\n\
    file, a plan that does not fit its workers is not sent.")]
pub(crate) struct Plan {
    /// Catalog name, https:// or hf:// address, or path to a .gguf or a Hugging Face folder
    #[arg(required_unless_present = "fleet")]
    model: Option<String>,
    #[command(flatten)]
    simulation: fleet::FleetArgs,
    /// File of workers, TOML or .json [default: this machine, divided among the shards]
    #[arg(long, value_name = "FILE")]
    workers_file: Option<PathBuf>,
    /// Workers per replica [default: the fewest that have room for the model]
    #[arg(long, value_name = "N")]
    shards: Option<usize>,
    /// Number of replicas
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    replicas: u16,
    /// Tokens of a sequence that must fit [default: the model's context, at most 8192]
    #[arg(long, value_name = "N")]
    context: Option<usize>,
    /// Sequences of that length that must fit
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    sequences: u32,
    /// Element type of the KV cache
    #[arg(long, value_enum, default_value = "f16")]
    kv_type: KvTypeArg,
    /// Element type of cached values, if another than that of keys
    #[arg(long, value_enum)]
    kv_type_v: Option<KvTypeArg>,
    /// `--spec` of the workers. A drafter's bytes count at the stage where it runs, and the last stage gets the layers whose
    /// caches it reads. The prediction contains no time for drafts
    #[arg(long, value_name = "SPEC", default_value = "off", env = "KVASIR_SPEC")]
    spec: SpecArg,
    /// Send the plan of the workers file to the coordinators
    #[arg(long, requires = "workers_file")]
    apply: bool,
    /// Withdraw the plan: the coordinators plan the model again
    #[arg(long, conflicts_with_all = ["apply", "workers_file", "shards"])]
    withdraw: bool,
    #[command(flatten)]
    access: Access,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Output of `--json`.
#[derive(Debug, Serialize)]
struct Report {
    model: String,
    layers: usize,
    context: u64,
    sequences: u64,
    max_shards: usize,
    /// `None` without a drafter.
    #[serde(skip_serializing_if = "Option::is_none")]
    drafter: Option<DrafterReport>,
    replicas: Vec<ReplicaReport>,
    /// `None` unless the plan was to be applied.
    #[serde(skip_serializing_if = "Option::is_none")]
    applied: Option<bool>,
}

#[derive(Debug, Serialize)]
struct DrafterReport {
    spec: String,
    /// `None` for an MTP head in the model's own file.
    file: Option<String>,
    /// First layer whose caches it reads; `None` if it reads none.
    from_layer: Option<usize>,
}

#[derive(Debug, Serialize)]
struct ReplicaReport {
    stages: Vec<StageReport>,
    prefill_tps: f64,
    /// Tokens per second of one sequence, and of one sequence per stage. `None` for an encoder.
    decode_tps: Option<f64>,
    pipelined_decode_tps: Option<f64>,
}

#[derive(Debug, Serialize)]
struct StageReport {
    worker: String,
    /// First layer, and the index after the last one.
    layers: (usize, usize),
    weight_bytes: u64,
    kv_bytes: u64,
    state_bytes: u64,
    needed_bytes: u64,
    memory_bytes: u64,
    /// The drafter's part of the numbers above; only at its stage.
    #[serde(skip_serializing_if = "Option::is_none")]
    drafter: Option<StageDrafterReport>,
    prefill_us_per_token: f64,
    decode_ms_per_token: f64,
}

#[derive(Debug, Serialize)]
struct StageDrafterReport {
    weight_bytes: u64,
    /// Keys, values and recurrent states.
    cache_bytes: u64,
}

impl Plan {
    /// Only empty with `--fleet`.
    fn model(&self) -> &str {
        self.model.as_deref().unwrap_or_default()
    }

    /// Runs the command.
    pub(crate) fn run(self) -> Result<()> {
        if let Some(path) = &self.simulation.fleet {
            return self.simulation.run(path, self.json);
        }
        if self.withdraw {
            return self.withdraw();
        }
        if !self.apply {
            return self.show(&self.report(&resolve_or_pull(self.model())?)?);
        }
        // Validate the plan before anything is sent or measured.
        let plan = self.requested_plan()?;
        match resolve_here(self.model())? {
            Some(here) => {
                let mut report = self.report(&here)?;
                self.send(&here.id, &plan)?;
                report.applied = Some(true);
                self.show(&report)?;
                self.print_applied(here.id.as_str());
            }
            None => {
                self.send_unseen(&plan)?;
                self.print_applied(self.model());
            }
        }
        Ok(())
    }

    /// Predictions for a plan.
    fn report(&self, Resolved { path, .. }: &Resolved) -> Result<Report> {
        let file = ModelFile::open(path)?;
        let spec = ModelSpec::from_file(&file)?;
        let context = self.context.unwrap_or(spec.context_length.min(CONTEXT));
        if !(1..=spec.context_length).contains(&context) {
            let limit = format!("1 to {}, the model's context", spec.context_length);
            return Err(ConfigError::field("context", context, limit).into());
        }
        let speculative_method = self.spec.speculative_method()?;
        let costs = ModelCosts::of_file(&spec, &file);
        let costs = match worker::load::drafter_costs(path, &speculative_method)? {
            Some(drafter) => costs.with_drafter(drafter),
            None => costs,
        };
        // Checked before any measurement.
        self.shards.map_or(Ok(()), |shards| check_shards(&costs, shards))?;
        let Workers { workers, explicit } = match &self.workers_file {
            Some(file) => workers::read(file)?,
            None => workers::this_machine(path, self.shards.unwrap_or(1))?,
        };
        let types = self.kv_type.with_values(self.kv_type_v);
        let workload = Workload {
            sequences: u64::from(self.sequences),
            kv_size: KvSize { k: types.k.bytes_of_32(), v: types.v.bytes_of_32() },
            ..Workload::of_context(context as u64)
        };
        let placement = Placement { model: &costs, workload, workers: &workers };
        let replicas = match explicit.is_empty() {
            true => placement.place(self.shards, usize::from(self.replicas))?,
            false => {
                self.check_counts(&explicit)?;
                let placed = explicit.iter().map(|ranges| placement.explicit(ranges));
                placed.collect::<Result<Vec<Replica>, _>>()?
            }
        };
        let replica = |replica: &Replica| ReplicaReport {
            stages: replica
                .stages
                .iter()
                .map(|stage| StageReport {
                    worker: workers[stage.worker].name.clone(),
                    layers: (stage.layers.start, stage.layers.end),
                    weight_bytes: stage.needs.weights,
                    kv_bytes: stage.needs.kv,
                    state_bytes: stage.needs.states,
                    needed_bytes: stage.needs.total,
                    memory_bytes: workers[stage.worker].memory,
                    drafter: (stage.needs.drafter() > 0).then_some(StageDrafterReport {
                        weight_bytes: stage.needs.drafter_weights,
                        cache_bytes: stage.needs.drafter_caches,
                    }),
                    prefill_us_per_token: stage.times.prefill_row * 1e6,
                    decode_ms_per_token: stage.times.decode_step * 1e3,
                })
                .collect(),
            prefill_tps: replica.prefill_rate(),
            decode_tps: spec.logits().map(|_| replica.decode_rate()),
            pipelined_decode_tps: spec.logits().map(|_| replica.pipelined_decode_rate()),
        };
        Ok(Report {
            model: self.model().to_owned(),
            layers: costs.layers(),
            context: workload.context,
            sequences: workload.sequences,
            max_shards: max_shards(&costs),
            drafter: costs.drafter().map(|drafter| DrafterReport {
                spec: self.spec.to_string(),
                file: speculative_method.file().map(|path| path.display().to_string()),
                from_layer: match drafter.stage {
                    DrafterStage::Last { from_layer } if from_layer < costs.layers() => Some(from_layer),
                    DrafterStage::First | DrafterStage::Last { .. } => None,
                },
            }),
            replicas: replicas.iter().map(replica).collect(),
            applied: None,
        })
    }

    fn show(&self, report: &Report) -> Result<()> {
        match self.json {
            true => println!("{}", serde_json::to_string(report)?),
            false => print!("{}", text(report)),
        }
        Ok(())
    }

    /// Refuses count flags, which do not apply to an operator's plan.
    fn check_counts(&self, explicit: &[Vec<LayersOf>]) -> Result<()> {
        let limit = "not with `layers` in the workers file, which set the replicas";
        if let Some(shards) =
            self.shards.filter(|shards| explicit.iter().any(|ranges| ranges.len() != *shards))
        {
            return Err(ConfigError::field("shards", shards, limit).into());
        }
        if self.replicas != 1 && usize::from(self.replicas) != explicit.len() {
            return Err(ConfigError::field("replicas", self.replicas, limit).into());
        }
        Ok(())
    }
}

fn text(report: &Report) -> String {
    let mut text = format!(
        "{}: {} layers, at most {} shards; {} x {} tokens of context\n",
        report.model, report.layers, report.max_shards, report.sequences, report.context
    );
    let mib = |bytes: u64| format!("{} MiB", bytes.div_ceil(1 << 20));
    for replica in &report.replicas {
        let heads = ["WORKER", "LAYERS", "WEIGHTS", "KV", "STATES", "NEEDS", "HAS", "PREFILL", "DECODE"];
        let mut rows = vec![heads.map(str::to_owned).to_vec()];
        rows.extend(replica.stages.iter().map(|stage| {
            vec![
                stage.worker.clone(),
                format!("{}..{}", stage.layers.0, stage.layers.1),
                mib(stage.weight_bytes),
                mib(stage.kv_bytes),
                mib(stage.state_bytes),
                mib(stage.needed_bytes),
                mib(stage.memory_bytes),
                format!("{:.0} us/token", stage.prefill_us_per_token),
                format!("{:.2} ms/token", stage.decode_ms_per_token),
            ]
        }));
        text += &columns(&rows);
        let drafting = replica.stages.iter().filter_map(|stage| Some((stage, stage.drafter.as_ref()?)));
        for ((stage, bytes), drafter) in drafting.zip(&report.drafter) {
            let file = drafter.file.as_deref().unwrap_or("in the model's file");
            text += &format!(
                "drafter: {} ({file}) at {}: {} of its weights, {} of its caches\n",
                drafter.spec,
                stage.worker,
                mib(bytes.weight_bytes),
                mib(bytes.cache_bytes)
            );
        }
        text += &format!("predicted: prefill {:.0} tokens/s", replica.prefill_tps);
        if let Some((one, all)) = replica.decode_tps.zip(replica.pipelined_decode_tps) {
            text += &format!(", decode {one:.1} tokens/s");
            if replica.stages.len() > 1 {
                text += &format!(" of one sequence and {all:.1} of {}", replica.stages.len());
            }
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn people_see_ranges_bytes_and_speeds() {
        let stage = |worker: &str, layers| StageReport {
            worker: worker.to_owned(),
            layers,
            weight_bytes: 3 << 20,
            kv_bytes: 1,
            state_bytes: 0,
            needed_bytes: 5 << 20,
            memory_bytes: 7 << 20,
            drafter: (worker == "w1").then_some(StageDrafterReport { weight_bytes: 2 << 20, cache_bytes: 1 }),
            prefill_us_per_token: 12.0,
            decode_ms_per_token: 0.5,
        };
        let report = Report {
            model: "m".to_owned(),
            layers: 9,
            context: 64,
            sequences: 2,
            max_shards: 8,
            drafter: Some(DrafterReport {
                spec: "draft-mtp:a".to_owned(),
                file: Some("/m/a.gguf".to_owned()),
                from_layer: Some(7),
            }),
            replicas: vec![ReplicaReport {
                stages: vec![stage("w0", (0, 4)), stage("w1", (4, 9))],
                prefill_tps: 83_333.0,
                decode_tps: Some(1000.0),
                pipelined_decode_tps: Some(2000.0),
            }],
            applied: None,
        };
        let text = text(&report);
        assert!(
            text.contains(
                "drafter: draft-mtp:a (/m/a.gguf) at w1: 2 MiB of its weights, 1 MiB of its caches\n"
            ),
            "{text}"
        );
        for expected in
            ["at most 8 shards", "w0", "4..9", "3 MiB", "1 MiB", "7 MiB", "83333", "1000.0", "2000.0 of 2"]
        {
            assert!(text.contains(expected), "{expected} not in\n{text}");
        }
    }
}
