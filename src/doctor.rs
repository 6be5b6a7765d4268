//! `kvasir doctor`: examines this machine and its cluster. Each finding has a remedy.

mod cluster;
mod gpu;
mod paths;
mod watch;

pub(crate) use watch::{watch_coordinator, watch_worker};

use crate::columns::columns;
use crate::home;
use anyhow::{Context, bail};
use doctor::{Baseline, Facts, Finding, Host, Places, Severity, findings};
use serde::Serialize;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Name of the baseline in the data directory, else in `$KVASIR_HOME`.
const BASELINE: &str = "doctor.json";

/// Examines this machine and its cluster: driver, GPU, memory, limits, disks, keys, certificates, network, clocks, versions
///
/// GPU clocks, power limits and link speeds are compared with the best values of earlier runs on this machine.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  kvasir doctor\n  \
    kvasir doctor --identity /etc/kvasir/identity --ops 10.0.0.1:9090,10.0.0.2:9090\n  \
    kvasir doctor --json | jq '.findings[] | select(.severity != \"ok\")'\n\n\
    With the identity of a worker, the paths to all other workers are measured: about a second each, over the cluster's\n\
    own transport.\n\n\
    Exit code 0 without a problem (there may be warnings), 1 with one, 2 and 64 for invalid flags and variables.")]
pub(crate) struct Doctor {
    /// Print one line of JSON.
    #[arg(long)]
    json: bool,
    /// Ops addresses of coordinators, separated by commas [default: those in up.json of the data directory].
    #[arg(long, value_name = "HOST:PORT,..", env = "KVASIR_OPS", value_delimiter = ',')]
    ops: Option<Vec<String>>,
    /// Data directory of a `kvasir up` or of the node [default: that of `kvasir up`, if there is one].
    #[arg(long, value_name = "DIR", env = "KVASIR_DATA_DIR")]
    data_dir: Option<PathBuf>,
    /// API key of an admin; required to measure paths from another machine than the coordinator's.
    #[arg(long, value_name = "KEY", env = "KVASIR_API_KEY", hide_env_values = true)]
    key: Option<String>,
    /// Identity directory of this machine's node [default: those of a `kvasir up`].
    #[arg(long, value_name = "DIR", env = "KVASIR_IDENTITY")]
    identity: Option<PathBuf>,
    /// Further directories that the node writes to, separated by commas, such as those of --kv-disk.
    #[arg(long, value_name = "DIR,..", value_delimiter = ',')]
    dir: Vec<PathBuf>,
    /// File with the values of earlier runs [default: doctor.json in the data directory, else in $KVASIR_HOME].
    #[arg(long, value_name = "FILE")]
    baseline: Option<PathBuf>,
    /// Do not measure paths to other nodes.
    #[arg(long)]
    no_paths: bool,
    /// Read /proc, /sys and /dev below this directory; for tests.
    #[arg(long, value_name = "DIR", default_value = "/", hide = true)]
    root: PathBuf,
}

#[derive(Serialize)]
struct Report<'a> {
    kvasir: &'static str,
    problems: usize,
    warnings: usize,
    findings: &'a [Finding],
}

impl Doctor {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        let home = home::home()?;
        // A directory that was named must be readable; the default one need not exist.
        let data_dir = match &self.data_dir {
            Some(dir) => Some(dir.clone()),
            None => Some(home::up_data_dir()?).filter(|dir| dir.exists()),
        };
        let path = self.baseline.clone().unwrap_or_else(|| data_dir.as_ref().unwrap_or(&home).join(BASELINE));
        let baseline = Baseline::read(&path)?.unwrap_or_default();
        let facts = self.facts(&home, data_dir.as_deref(), baseline.clone())?;
        let found = findings(&facts);
        let next = baseline.after(&facts);
        if next != baseline
            && let Err(error) = next.write(&path)
        {
            tracing::warn!(%error, "the values of this run are not kept for later ones");
        }
        let count = |severity| found.iter().filter(|finding| finding.severity == severity).count();
        let (problems, warnings) = (count(Severity::Problem), count(Severity::Warning));
        let mut out = std::io::stdout().lock();
        match self.json {
            true => {
                let kvasir = env!("CARGO_PKG_VERSION");
                let report = Report { kvasir, problems, warnings, findings: &found };
                writeln!(out, "{}", serde_json::to_string(&report)?)?;
            }
            false => write!(out, "{}", table(&found))?,
        }
        match problems {
            0 => Ok(()),
            1 => bail!("1 problem, {warnings} warnings"),
            _ => bail!("{problems} problems, {warnings} warnings"),
        }
    }

    fn facts(&self, home: &Path, data_dir: Option<&Path>, baseline: Baseline) -> anyhow::Result<Facts> {
        let host = Host::below(&self.root);
        let identities = match &self.identity {
            Some(identity) => vec![identity.clone()],
            None => data_dir.map(identities_of_up).unwrap_or_default(),
        };
        let places = Places {
            identities: identities.clone(),
            directories: [Some(home), data_dir]
                .into_iter()
                .flatten()
                .map(Path::to_owned)
                .chain(self.dir.clone())
                .collect(),
            secrets: [Some(home.join("cluster.key")), data_dir.map(|dir| dir.join("cluster.key"))]
                .into_iter()
                .flatten()
                .collect(),
        };
        let ops = match (&self.ops, data_dir) {
            (Some(ops), _) => ops.clone(),
            (None, Some(dir)) => cluster::ops_of_up(dir)?,
            (None, None) => Vec::new(),
        };
        if ops.is_empty() {
            tracing::info!(
                "no coordinator is known, so the cluster is not examined; name one with --ops HOST:PORT"
            );
        }
        let cluster = (!ops.is_empty()).then(|| cluster::ask(&ops));
        let peers = match (self.no_paths, identities.iter().find_map(|dir| paths::worker_identity(dir))) {
            (false, Some(identity)) => {
                let peers = cluster::workers(&ops, self.key.as_deref());
                paths::measure(
                    &identity,
                    &host,
                    &peers.context("cannot learn the workers' addresses, so no path is measured")?,
                )?
            }
            _ => Vec::new(),
        };
        let routed: Vec<String> = peers.iter().filter_map(|path| path.interface.clone()).collect();
        let mut facts = host.facts(&places, &routed);
        (facts.cluster, facts.paths, facts.baseline) = (cluster, peers, Some(baseline));
        gpu::add(&mut facts, &host);
        Ok(facts)
    }
}

/// Identity directories of the nodes of a `kvasir up`.
fn identities_of_up(data_dir: &Path) -> Vec<PathBuf> {
    let nodes = std::fs::read_dir(data_dir.join("nodes")).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> =
        nodes.map(|node| node.path().join("identity")).filter(|dir| dir.is_dir()).collect();
    found.sort();
    found
}

/// The findings, the worst first, with remedies below.
fn table(found: &[Finding]) -> String {
    let mut sorted: Vec<&Finding> = found.iter().collect();
    sorted.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
    let mut rows = vec![["SEVERITY", "CHECK", "FACT"].map(str::to_owned).to_vec()];
    for finding in sorted {
        rows.push(vec![finding.severity.name().to_owned(), finding.check.to_owned(), finding.fact.clone()]);
        if !finding.remedy.is_empty() {
            rows.push(vec![String::new(), String::new(), format!("-> {}", finding.remedy)]);
        }
    }
    columns(&rows)
}
