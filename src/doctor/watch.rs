//! The checks of this machine alone, repeated by a running node for its metrics.

use super::gpu;
use crate::home;
use cuda::nvml::Nvml;
use doctor::{Facts, Host, LOCAL_CHECKS, Places, Severity, findings, set_latest, worst};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

/// Interval between two runs.
const EVERY: Duration = Duration::from_secs(30);

/// Starts to repeat the checks of a coordinator's machine, which needs no GPU.
pub(crate) fn watch_coordinator(places: Places) {
    start(places, |facts| gpu::add_floor(facts, false));
}

/// Starts to repeat the checks of a worker's machine. `written` are directories that it writes to besides
/// `$KVASIR_HOME`.
pub(crate) fn watch_worker(identity: Option<PathBuf>, written: impl Iterator<Item = PathBuf>) {
    let directories = home::home().ok().into_iter().chain(written).collect();
    let places = Places { identities: identity.into_iter().collect(), directories, secrets: Vec::new() };
    let (mut surveyed, mut nvml) = (None, None);
    start(places, move |facts| {
        // Neither driver nor compiler changes under a running process.
        let (cuda, unified) = surveyed.get_or_insert_with(|| gpu::survey(&Host::default()));
        facts.cuda.clone_from(cuda);
        gpu::add_floor(facts, *unified);
        let nvml = nvml.get_or_insert_with(|| Nvml::open(None).ok());
        facts.gpus = match nvml.as_ref().map(Nvml::read) {
            Some(Ok(gpus)) => gpus.iter().map(gpu::gpu).collect(),
            Some(Err(_)) | None => Vec::new(),
        };
    });
}

/// Runs the checks on a thread that ends with the process; a library that hangs blocks only that thread.
fn start(places: Places, mut add: impl FnMut(&mut Facts) + Send + 'static) {
    let run = move || {
        let host = Host::default();
        let mut known: BTreeMap<&'static str, Severity> = BTreeMap::new();
        loop {
            let mut facts = host.facts(&places, &[]);
            add(&mut facts);
            let mut found = findings(&facts);
            found.retain(|finding| LOCAL_CHECKS.contains(&finding.check));
            let severities: BTreeMap<&'static str, Severity> = worst(&found).collect();
            for finding in &found {
                // Once for each change.
                if finding.severity > known.get(finding.check).copied().unwrap_or(Severity::Ok) {
                    tracing::warn!(
                        check = finding.check,
                        severity = finding.severity.name(),
                        remedy = finding.remedy,
                        "{}",
                        finding.fact
                    );
                }
            }
            set_latest(severities.clone());
            known = severities;
            std::thread::sleep(EVERY);
        }
    };
    if let Err(error) = std::thread::Builder::new().name("kvasir-doctor".into()).spawn(run) {
        tracing::warn!(%error, "cannot start the thread that examines this machine");
    }
}
