//! The rules. Each check has at least one finding when its facts are known.

use crate::facts::{Facts, Gpu, GpuBaseline, Interface, NodePath};
use serde::Serialize;
use std::collections::BTreeSet;
use std::time::UNIX_EPOCH;

mod files;
mod network;

#[cfg(test)]
mod tests;

/// Bytes of a GiB and a MiB.
const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;
/// A clock below this share of the baseline's, in the same performance state, is a problem.
const CLOCK_SHARE: f64 = 0.85;
/// Temperature in degrees Celsius from which on a GPU is close to lowering its clocks.
const HOT_CELSIUS: u32 = 88;
/// Share of the memory above which the page cache of a host with a unified GPU is reported, if little is free.
const CACHE_SHARE: f64 = 0.5;
/// Reserved huge pages that nothing uses, in bytes, above which they are reported.
const HUGE_PAGES: u64 = GIB;

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    Ok,
    /// The node serves, but slower or not for long.
    Warning,
    /// The node does not serve, or will stop.
    Problem,
}

impl Severity {
    /// The value of the metrics: 0, 1 or 2.
    pub fn number(self) -> i64 {
        match self {
            Self::Ok => 0,
            Self::Warning => 1,
            Self::Problem => 2,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Problem => "problem",
        }
    }
}

/// The result of a check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Name of the check, one of [`CHECKS`].
    pub check: &'static str,
    pub severity: Severity,
    /// One line with the value and its limit.
    pub fact: String,
    /// One line; empty if all is well.
    pub remedy: String,
}

/// Findings of one check, before they have its name.
type Found = Vec<(Severity, String, String)>;
type Check = fn(&Facts) -> Found;

const RULES: [(&str, Check); 18] = [
    ("gpu_driver", gpu_driver),
    ("nvrtc", nvrtc),
    ("gpu", gpu),
    ("gpu_clocks", gpu_clocks),
    ("gpu_link", gpu_link),
    ("memory_floor", memory_floor),
    ("page_cache", page_cache),
    ("huge_pages", huge_pages),
    ("file_descriptors", files::file_descriptors),
    ("disk_room", files::disk_room),
    ("owner", files::owner),
    ("mode", files::mode),
    ("certificate", certificate),
    ("interface", network::interface),
    ("cluster", network::cluster),
    ("version", network::version),
    ("clock", network::clock),
    ("link", network::link),
];

/// Names of all checks.
pub const CHECKS: [&str; RULES.len()] = {
    let mut names = [""; RULES.len()];
    let mut at = 0;
    while at < RULES.len() {
        names[at] = RULES[at].0;
        at += 1;
    }
    names
};

/// Names of the checks that look at this machine only, in the order of [`CHECKS`].
pub const LOCAL_CHECKS: &[&str] = CHECKS.split_at(14).0;

/// All findings, in the order of [`CHECKS`].
pub fn findings(facts: &Facts) -> Vec<Finding> {
    let named = |(check, rule): (&'static str, Check)| {
        let name = move |(severity, fact, remedy)| Finding { check, severity, fact, remedy };
        rule(facts).into_iter().map(name)
    };
    RULES.into_iter().flat_map(named).collect()
}

/// The worst severity of each check that has a finding.
pub fn worst(findings: &[Finding]) -> impl Iterator<Item = (&'static str, Severity)> + '_ {
    CHECKS.into_iter().filter_map(|check| {
        let of_check = findings.iter().filter(move |finding| finding.check == check);
        of_check.map(|finding| finding.severity).max().map(|severity| (check, severity))
    })
}

fn ok(fact: impl Into<String>) -> Found {
    vec![(Severity::Ok, fact.into(), String::new())]
}

/// `found`, or one finding that all is well.
fn or_ok(found: Found, fact: impl FnOnce() -> String) -> Found {
    if found.is_empty() { ok(fact()) } else { found }
}

/// Joins names for a sentence.
fn list<T: ToString>(names: impl IntoIterator<Item = T>) -> String {
    names.into_iter().map(|name| name.to_string()).collect::<Vec<_>>().join(", ")
}

/// Bytes as GiB or MiB.
fn size(bytes: u64) -> String {
    match bytes {
        GIB.. => format!("{:.1} GiB", bytes as f64 / GIB as f64),
        _ => format!("{} MiB", bytes / MIB),
    }
}

fn library(found: Option<&Result<String, String>>, name: &str, remedy: &str) -> Found {
    match found {
        None => Vec::new(),
        Some(Ok(version)) => ok(format!("{name} {version}")),
        Some(Err(error)) => vec![(Severity::Problem, format!("{name}: {error}"), remedy.to_owned())],
    }
}

fn gpu_driver(facts: &Facts) -> Found {
    let remedy = "install NVIDIA's driver 580 or newer; in a container, start it with the NVIDIA runtime";
    library(facts.cuda.as_ref().map(|cuda| &cuda.driver), "CUDA driver", remedy)
}

fn nvrtc(facts: &Facts) -> Found {
    let remedy = "pip install nvidia-cuda-nvrtc, or set KVASIR_CUDA_LIBRARIES to its folder";
    library(facts.cuda.as_ref().map(|cuda| &cuda.nvrtc), "NVRTC", remedy)
}

fn gpu(facts: &Facts) -> Found {
    let mut found = Vec::new();
    for gpu in &facts.gpus {
        let index = gpu.index;
        if gpu.lost {
            let remedy = "drain the worker and restart the node; see `dmesg` for Xid";
            found.push((Severity::Problem, format!("GPU {index} does not answer"), remedy.to_owned()));
        }
        if let Some(errors) = gpu.uncorrected_memory_errors.filter(|errors| *errors > 0) {
            let fact = format!("GPU {index} had {errors} uncorrected memory errors, 0 expected");
            found.push((
                Severity::Problem,
                fact,
                "restart the node; replace the GPU if it returns".to_owned(),
            ));
        }
        if let Some(temperature) = gpu.temperature_celsius.filter(|degrees| *degrees >= HOT_CELSIUS) {
            let fact = format!("GPU {index} has {temperature} °C, below {HOT_CELSIUS} expected");
            found.push((Severity::Warning, fact, "free the air inlets and check the fans".to_owned()));
        }
    }
    if facts.gpus.is_empty() {
        return Vec::new();
    }
    or_ok(found, || {
        let hottest = facts.gpus.iter().filter_map(|gpu| gpu.temperature_celsius).max();
        let hottest = hottest.map_or(String::new(), |degrees| format!(", at most {degrees} °C"));
        format!("{} GPUs answer{hottest}", facts.gpus.len())
    })
}

fn of_baseline<'a>(facts: &'a Facts, gpu: &Gpu) -> Option<&'a GpuBaseline> {
    facts.baseline.as_ref()?.gpus.iter().find(|known| known.index == gpu.index)
}

fn gpu_clocks(facts: &Facts) -> Found {
    let mut found = Vec::new();
    let mut known = Vec::new();
    for gpu in facts.gpus.iter().filter(|gpu| !gpu.lost) {
        let index = gpu.index;
        if !gpu.slowed_by.is_empty() {
            let fact = format!("GPU {index} has lowered its clocks: {}", list(&gpu.slowed_by));
            let remedy = "thermal: free the air inlets; power: use the node's own power supply, and disconnect it for a minute";
            found.push((Severity::Problem, fact, remedy.to_owned()));
        }
        known.extend(gpu.sm_clock_mhz.map(|mhz| format!("GPU {index} {mhz} MHz")));
        let Some(baseline) = of_baseline(facts, gpu) else { continue };
        // A slower state is that of an idle GPU.
        let same_state =
            gpu.performance_state.is_some() && gpu.performance_state == baseline.performance_state;
        if let (true, Some(clock), Some(best)) = (same_state, gpu.sm_clock_mhz, baseline.sm_clock_mhz)
            && f64::from(clock) < CLOCK_SHARE * f64::from(best)
        {
            let fact = format!(
                "GPU {index} runs at {clock} MHz, an earlier run saw {best} MHz in the same performance state"
            );
            let remedy = "look for a locked clock (`nvidia-smi -q -d CLOCK`), heat and the power supply";
            found.push((Severity::Problem, fact, remedy.to_owned()));
        }
        if let (Some(limit), Some(best)) = (gpu.power_limit_watts, baseline.power_limit_watts)
            && limit < best
        {
            let fact = format!("GPU {index} is limited to {limit:.0} W, an earlier run saw {best:.0} W");
            found.push((Severity::Warning, fact, format!("nvidia-smi -i {index} -pl {best:.0}")));
        }
    }
    if known.is_empty() && found.is_empty() {
        return Vec::new();
    }
    or_ok(found, || list(known))
}

fn gpu_link(facts: &Facts) -> Found {
    let mut found = Vec::new();
    let mut known = Vec::new();
    for gpu in facts.gpus.iter().filter(|gpu| !gpu.lost) {
        let index = gpu.index;
        if let Some((width, most)) = gpu.pcie_width {
            known.push(format!("GPU {index} has {width} of {most} PCIe lanes"));
            if width < most {
                let fact = format!("GPU {index} has {width} PCIe lanes, {most} are possible");
                found.push((
                    Severity::Warning,
                    fact,
                    "power the node off and put the card into its slot again".to_owned(),
                ));
            }
        }
        let before = of_baseline(facts, gpu).and_then(|known| known.pcie_replays);
        if let (Some(replays), Some(before)) = (gpu.pcie_replays, before)
            && replays > before
        {
            let more = replays - before;
            let fact = format!("GPU {index} sent {more} PCIe packets again since the last run, 0 expected");
            found.push((
                Severity::Warning,
                fact,
                "put the card into its slot again; see `dmesg` for AER".to_owned(),
            ));
        }
    }
    if known.is_empty() && found.is_empty() {
        return Vec::new();
    }
    or_ok(found, || list(known))
}

fn memory_floor(facts: &Facts) -> Found {
    let Some(memory) = &facts.memory else { return Vec::new() };
    let (available, floor) = (size(memory.available), size(memory.floor));
    if memory.available >= memory.floor {
        return ok(format!("{available} of {} available, the floor is {floor}", size(memory.total)));
    }
    let severity = if memory.unified { Severity::Problem } else { Severity::Warning };
    let fact = format!("{available} of memory available, below the floor of {floor}");
    vec![(severity, fact, "end other programs, or lower kv_bytes or the model's size".to_owned())]
}

fn page_cache(facts: &Facts) -> Found {
    let Some(memory) = &facts.memory else { return Vec::new() };
    let (cache, free) = (size(memory.page_cache), size(memory.free));
    let large = memory.page_cache as f64 > CACHE_SHARE * memory.total as f64;
    if memory.unified && large && memory.free < memory.floor {
        let fact = format!("the page cache has {cache} and {free} are free: the GPU gets memory late");
        let remedy = "sync; echo 3 > /proc/sys/vm/drop_caches (as root), before a large model is loaded";
        return vec![(Severity::Warning, fact, remedy.to_owned())];
    }
    ok(format!("the page cache has {cache}, {free} are free"))
}

fn huge_pages(facts: &Facts) -> Found {
    let Some(memory) = &facts.memory else { return Vec::new() };
    let mut found = Vec::new();
    if memory.huge_pages_free > HUGE_PAGES {
        let fact = format!("{} are reserved as huge pages that nothing uses", size(memory.huge_pages_free));
        found.push((Severity::Warning, fact, "sysctl vm.nr_hugepages=0".to_owned()));
    }
    if memory.huge_pages_off {
        let fact = "transparent huge pages are off, madvise or always expected".to_owned();
        let remedy = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (as root)".to_owned();
        found.push((Severity::Warning, fact, remedy));
    }
    or_ok(found, || "transparent huge pages are available".to_owned())
}

fn certificate(facts: &Facts) -> Found {
    let now = facts.now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs().cast_signed());
    let renew = "kvasir ca issue --dir CA --role ROLE --node NAME --out DIR --replace";
    let mut found = Vec::new();
    let mut soonest = None;
    for certificate in &facts.certificates {
        let state = match &certificate.state {
            Ok(state) => state,
            Err(error) => {
                found.push((Severity::Problem, error.clone(), format!("issue the identity again: {renew}")));
                continue;
            }
        };
        let at = format!("{}: the {}'s certificate", certificate.directory.display(), state.name);
        let days = |seconds: i64| format!("{:.1} days", seconds as f64 / 86_400.0);
        let left = state.ends.saturating_sub(now);
        if state.revoked {
            let fact = format!("{at} is revoked");
            found.push((
                Severity::Problem,
                fact,
                "remove the node, or issue it a new certificate".to_owned(),
            ));
        } else if left < 0 {
            let fact = format!("{at} expired {} ago", days(-left));
            found.push((Severity::Problem, fact, renew.to_owned()));
        } else if state.begins > now {
            let fact = format!("{at} is valid only in {}", days(state.begins - now));
            found.push((
                Severity::Problem,
                fact,
                "set this machine's clock, or issue the certificate again".to_owned(),
            ));
        } else if left < state.ends.saturating_sub(state.begins) / 10 {
            let fact = format!("{at} ends in {}, less than a tenth of its life", days(left));
            found.push((Severity::Warning, fact, renew.to_owned()));
        }
        soonest = Some(soonest.map_or(left, |known: i64| known.min(left)));
    }
    if facts.certificates.is_empty() {
        return Vec::new();
    }
    or_ok(found, || format!("valid, the first ends in {:.0} days", soonest.unwrap_or(0) as f64 / 86_400.0))
}
