//! The model of a `kvasir up` that names none. On a GPU it is the largest of the catalog that fits and decodes fast
//! enough to read along; on the CPU, and where nothing else fits, the small one that any machine serves.

use super::{DEFAULT_MODEL, UpSettings};
use crate::numerics::Device;
use hub::catalog::{Entry, Listed, Store};
use rustix::fs::statvfs;
use std::path::Path;
use worker::defaults;
use worker::load::{self, DeviceChoice, EngineOptions};

/// Tokens per second of one sequence from which on a model is usable: faster than people read.
const USABLE: f64 = 20.0;
/// Share of the bandwidth that decoding reaches (docs/placement.md).
const DECODE_SHARE: f64 = 0.85;
/// Room that a download leaves on the disk, in bytes.
const DISK_FLOOR: u64 = 5 << 30;
/// Architecture of the catalog's encoders, which do not generate.
const ENCODER: &str = "bert";

/// Limits that a model must fit.
#[derive(Debug, Clone, PartialEq)]
struct Machine {
    gpu: String,
    /// Bytes for the weights and caches of one copy of the model.
    memory: u64,
    /// Bytes per second of the GPU's memory, as measured by copies.
    bandwidth: f64,
    /// Bytes that a download may take.
    disk: u64,
}

/// Sets the model, and the number of workers if it was not given, on a machine whose GPU computes.
pub(super) fn complete(mut settings: UpSettings) -> anyhow::Result<UpSettings> {
    if settings.model.is_some() || settings.engine_url.is_some() {
        return Ok(settings);
    }
    let choice: DeviceChoice = settings.device.unwrap_or(Device::Auto).into();
    if choice.resolve(0)?.0 != DeviceChoice::Cuda {
        return Ok(settings);
    }
    let gpus = load::visible_gpus(choice).max(1);
    let shards = settings.shards.unwrap_or(1).max(1);
    let workers = *settings.workers.get_or_insert(if shards > 1 { shards } else { gpus });
    // The workers of a replica hold one copy together.
    let copies = (workers / shards).div_ceil(gpus).max(1);
    let options = EngineOptions { device: DeviceChoice::Cuda, ..EngineOptions::default() };
    let host = load::host(&options)?;
    let store = Store::from_env()?;
    let listed = store.list();
    let machine = Machine {
        gpu: cuda::gpus().ok().and_then(|gpus| Some(gpus.first()?.name.clone())).unwrap_or_default(),
        memory: host.memory_available.saturating_sub(defaults::floor(host).value) / copies as u64,
        bandwidth: load::gpu_copy_bandwidth(&options)?.unwrap_or(0.0),
        disk: listed.first().map_or(0, |listed| room(&listed.path)),
    };
    let (model, why) = propose(&machine, &listed);
    tracing::info!(model, "{why}");
    settings.model = Some(model.to_owned());
    Ok(settings)
}

/// Bytes that a download to `path`, which need not exist, may take.
fn room(path: &Path) -> u64 {
    let existing = path.ancestors().find(|path| path.exists()).unwrap_or(path);
    let free = statvfs(existing).map_or(0, |disk| disk.f_bavail.saturating_mul(disk.f_frsize));
    free.saturating_sub(DISK_FLOOR)
}

/// The model for a GPU, and the reason as a sentence or two.
fn propose(machine: &Machine, catalog: &[Listed]) -> (&'static str, String) {
    let Machine { gpu, memory, bandwidth, disk } = machine;
    let gib = |bytes: u64| format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30));
    let rate = |entry: &Entry| entry.about.speed.at(*bandwidth, DECODE_SHARE).filter(|rate| *rate >= USABLE);
    let fits = |listed: &&Listed| {
        let Entry { bytes, about, .. } = listed.entry;
        generates(listed.entry) && about.memory <= *memory && (listed.present || bytes <= disk)
    };
    let usable = catalog.iter().filter(fits).filter_map(|listed| Some((listed, rate(listed.entry)?)));
    let best = usable.max_by(|(a, a_rate), (b, b_rate)| {
        (a.entry.bytes, *a_rate).partial_cmp(&(b.entry.bytes, *b_rate)).unwrap_or(std::cmp::Ordering::Equal)
    });
    match best.filter(|(listed, _)| listed.entry.name != DEFAULT_MODEL) {
        Some((Listed { entry, present, .. }, rate)) => {
            let download =
                if *present { String::new() } else { format!(" ({} to download)", gib(entry.bytes)) };
            let why = format!(
                "{} is the largest model of the catalog that fits {} of {gpu} and decodes at {USABLE:.0} tokens/s or \
                 more, about {rate:.0}{download}; another one: `kvasir up MODEL`",
                entry.name,
                gib(*memory),
            );
            (entry.name, why)
        }
        None => {
            let why = format!(
                "no larger model of the catalog fits {} of {gpu}, {} of the disk and {USABLE:.0} tokens/s; another one: \
                 `kvasir up MODEL`",
                gib(*memory),
                gib(*disk),
            );
            (DEFAULT_MODEL, why)
        }
    }
}

/// Whether an entry generates text and is one that nobody has to check by hand: its checksum is pinned.
fn generates(entry: &Entry) -> bool {
    let text = entry.operation().is_none() && entry.about.arch != ENCODER;
    text && entry.not_served().is_none() && !entry.sha256().is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;
    use hub::catalog::CATALOG;

    const GIB: u64 = 1 << 30;

    /// The catalog with these models in the cache.
    fn catalog(present: &[&str]) -> Vec<Listed> {
        let listed = |entry: &'static Entry| Listed {
            entry,
            path: entry.name.into(),
            present: present.contains(&entry.name),
        };
        CATALOG.iter().map(listed).collect()
    }

    fn proposed(
        memory: f64,
        gigabytes_per_s: f64,
        disk_gib: u64,
        present: &[&str],
    ) -> (&'static str, String) {
        let machine = Machine {
            gpu: "a GPU".into(),
            memory: (memory * GIB as f64) as u64,
            bandwidth: gigabytes_per_s * 1e9,
            disk: disk_gib * GIB,
        };
        propose(&machine, &catalog(present))
    }

    /// The machine in words, GiB of memory, GB/s, GiB of disk, models in the cache, the proposed model.
    type Case = (&'static str, f64, f64, u64, &'static [&'static str], &'static str);

    #[test]
    fn the_largest_model_that_fits_and_is_fast_is_proposed() {
        let cases: [Case; 9] = [
            ("a Spark, after its floor", 104.0, 233.0, 900, &[], "gpt-oss-120b"),
            ("two workers on a Spark", 52.0, 233.0, 900, &[], "qwen3.6-35b-a3b"),
            ("a GPU of 80 GB", 75.0, 3350.0, 900, &[], "gpt-oss-120b"),
            ("a GPU of 24 GB", 22.5, 1008.0, 900, &[], "qwen3.6-27b"),
            ("a GPU of 8 GB", 7.2, 272.0, 900, &[], "llama-3.1-8b"),
            ("a Spark with little room on its disk", 104.0, 233.0, 15, &[], "gpt-oss-20b"),
            ("the same with the model in its cache", 104.0, 233.0, 15, &["gpt-oss-120b"], "gpt-oss-120b"),
            ("much slow memory", 104.0, 60.0, 900, &[], "gpt-oss-20b"),
            ("hardly any memory", 0.3, 233.0, 900, &[], DEFAULT_MODEL),
        ];
        for (case, memory, bandwidth, disk, present, expected) in cases {
            let (name, why) = proposed(memory, bandwidth, disk, present);
            assert_eq!(name, expected, "{case}: {why}");
            assert!(why.contains("kvasir up MODEL") && why.contains("a GPU"), "{why}");
        }
    }

    #[test]
    fn the_reason_has_memory_speed_and_download() {
        let (_, why) = proposed(104.0, 233.0, 900, &[]);
        assert!(
            why.contains("104.0 GiB of a GPU") && why.contains("about 59 (59.0 GiB to download)"),
            "{why}"
        );
        let (_, why) = proposed(104.0, 233.0, 900, &["gpt-oss-120b"]);
        assert!(!why.contains("download"), "{why}");
    }

    #[test]
    fn encoders_operations_and_unpinned_models_are_never_proposed() {
        let never = [
            "bge-small-en",
            "minilm-l6",
            "silero-vad",
            "whisper-base",
            "llama-3.3-70b",
            "qwen3-embedding-0.6b",
        ];
        for entry in CATALOG.iter().filter(|entry| never.contains(&entry.name)) {
            assert!(!generates(entry), "{}", entry.name);
        }
    }

    #[test]
    fn a_named_model_and_a_cpu_are_left_alone() {
        let named = UpSettings { model: Some("x".into()), ..UpSettings::default() };
        assert_eq!(complete(named).unwrap().model.as_deref(), Some("x"));
        let on_cpu = complete(UpSettings { device: Some(Device::Cpu), ..UpSettings::default() }).unwrap();
        assert_eq!((on_cpu.model, on_cpu.workers), (None, None));
    }
}
