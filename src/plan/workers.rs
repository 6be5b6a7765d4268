//! Workers to plan for: from a file, or this machine's.

use crate::config::{ByteSize, ConfigError};
use crate::cpus::{self, GpuPlace, place_on_gpus};
use anyhow::Context;
use group::placement::Worker;
use kernels::bandwidth::BandwidthProbe;
use kernels::pool::{Pool, PoolConfig};
use serde::Deserialize;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::path::Path;
use worker::defaults::Host;
use worker::load::{self, DeviceChoice, EngineOptions};

/// Bandwidth of a worker that is not measured. Among equal workers the value has no effect.
pub(crate) const ASSUMED_BANDWIDTH: ByteSize = ByteSize(20_000_000_000);
/// Multiply-adds per second of one core in int8 prefill (docs/placement.md).
const COMPUTE_PER_CORE: f64 = 100e9;
/// Share of the probed bandwidth that decoding achieves (docs/placement.md).
const DECODE_SHARE: f64 = 0.85;
/// Longest workers file in bytes; thousands of workers need far less.
const MAX_FILE_BYTES: u64 = 4 << 20;

/// Workers, and their layers if the operator assigned them.
pub(super) struct Workers {
    pub(super) workers: Vec<Worker>,
    /// Assigned layers of each replica, in file order; empty if none are assigned.
    pub(super) explicit: Vec<Vec<LayersOf>>,
}

/// A worker's name and its layers.
pub(super) type LayersOf = (String, Range<usize>);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WorkersFile {
    #[serde(rename = "worker", alias = "workers")]
    workers: Vec<WorkerEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WorkerEntry {
    name: String,
    /// Bytes for weights and caches.
    memory: ByteSize,
    /// Bytes per second.
    bandwidth: ByteSize,
    /// Multiply-adds per second.
    compute: f64,
    /// First layer, and the index after the last one.
    #[serde(default)]
    layers: Option<(usize, usize)>,
}

/// Reads a file of workers, TOML or, if its name ends in `.json`, JSON.
pub(super) fn read(path: &Path) -> Result<Workers, ConfigError> {
    let refuse = |reason: String| ConfigError::File { path: path.display().to_string(), reason };
    let bytes = std::fs::metadata(path).map_err(|error| refuse(error.to_string()))?.len();
    if bytes > MAX_FILE_BYTES {
        return Err(refuse(format!("the file has {bytes} bytes, at most {MAX_FILE_BYTES}")));
    }
    let text = std::fs::read_to_string(path).map_err(|error| refuse(error.to_string()))?;
    let file: WorkersFile = match path.extension().is_some_and(|extension| extension == "json") {
        true => serde_json::from_str(&text).map_err(|error| refuse(error.to_string()))?,
        false => toml::from_str(&text).map_err(|error| refuse(error.to_string()))?,
    };
    let mut workers: Vec<Worker> = Vec::with_capacity(file.workers.len());
    let mut explicit: Vec<Vec<LayersOf>> = Vec::new();
    for WorkerEntry { name, memory, bandwidth, compute, layers } in file.workers {
        if workers.iter().any(|worker| worker.name == name) {
            return Err(refuse(format!("worker {name} is listed twice")));
        }
        if let Some((first, end)) = layers {
            let range = (name.clone(), first..end);
            match explicit.last_mut() {
                // A range that begins at layer 0 starts another replica.
                Some(replica) if first > 0 => replica.push(range),
                _ => explicit.push(vec![range]),
            }
        }
        workers.push(Worker { name, memory: memory.0, bandwidth: bandwidth.0 as f64, compute });
    }
    Ok(Workers { workers, explicit })
}

/// Bytes per second that decoding reads on the device of these options, measured now. The workers of a GPU
/// share it.
pub(crate) fn decode_bandwidth(options: &EngineOptions) -> anyhow::Result<f64> {
    if let Some(rate) = gpu_bandwidth(options)? {
        return Ok(rate);
    }
    let threads = options.threads.and_then(NonZeroUsize::new).unwrap_or(NonZeroUsize::MIN);
    let pool = Pool::new(PoolConfig::new(threads)).context("cannot start threads to probe the bandwidth")?;
    Ok(BandwidthProbe::new().median(&pool, 3) * DECODE_SHARE)
}

/// The same for a GPU; `None` if the CPUs compute.
pub(crate) fn gpu_bandwidth(options: &EngineOptions) -> anyhow::Result<Option<f64>> {
    let Some(copies) = load::gpu_copy_bandwidth(options)? else { return Ok(None) };
    Ok(Some(copies * DECODE_SHARE / f64::from(load::host(options)?.workers)))
}

/// Multiply-adds per second of one worker: of its share of a GPU, or of its threads.
pub(crate) fn compute(host: &Host) -> f64 {
    match host.gpu_compute() {
        Some(compute) => compute as f64,
        None => COMPUTE_PER_CORE * f64::from(host.threads),
    }
}

/// This machine, divided evenly among `count` workers: memory that a worker for `model` would have, and
/// measured bandwidth. Several GPUs are divided as by `kvasir up`.
pub(super) fn this_machine(model: &Path, count: usize) -> anyhow::Result<Workers> {
    let auto = EngineOptions { device: DeviceChoice::Auto, ..EngineOptions::default() };
    let name = |index: usize| if count == 1 { "this-machine".to_owned() } else { format!("worker-{index}") };
    let on_gpus = auto.device.resolve(0)?.0 == DeviceChoice::Cuda;
    let gpus = if on_gpus { load::visible_gpus(auto.device) } else { 0 };
    let places = place_on_gpus(count, gpus);
    let mut workers: Vec<Worker> = Vec::new();
    for index in 0..count {
        // An earlier worker on the same device was already measured.
        if let Some(same) = index.checked_sub(gpus.max(1)).and_then(|same| workers.get(same)) {
            workers.push(Worker { name: name(index), ..same.clone() });
            continue;
        }
        let GpuPlace { gpu, workers: sharing } =
            places.get(index).copied().unwrap_or(GpuPlace { gpu: 0, workers: count });
        let options = EngineOptions {
            gpu,
            gpu_workers: Some(sharing),
            workers: count,
            threads: Some(cpus::capacity()),
            ..auto.clone()
        };
        let load::Plan { host, defaults, .. } = load::plan(model, &options)?;
        let memory = host.memory_available.saturating_sub(defaults.floor_bytes.value);
        // A GPU's numbers are already per worker.
        let share = if host.gpu.is_some() { 1.0 } else { count as f64 };
        workers.push(Worker {
            name: name(index),
            memory: memory / u64::from(host.workers),
            bandwidth: decode_bandwidth(&options)? / share,
            compute: compute(&host) / share,
        });
    }
    Ok(Workers { workers, explicit: Vec::new() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(name: &str, text: &str) -> Result<Workers, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        read(&path).map_err(|error| error.to_string())
    }

    #[test]
    fn workers_are_read_from_toml_and_json_alike() {
        let toml = "[[worker]]\nname = \"a\"\nmemory = \"2GiB\"\nbandwidth = \"20GB\"\ncompute = 1e11\n";
        let json = r#"{"workers":[{"name":"a","memory":2147483648,"bandwidth":20000000000,"compute":1e11}]}"#;
        let expected = Worker { name: "a".into(), memory: 2 << 30, bandwidth: 20e9, compute: 1e11 };
        for (name, text) in [("w.toml", toml), ("w.json", json)] {
            let Workers { workers, explicit } = parse(name, text).unwrap();
            assert_eq!(workers, std::slice::from_ref(&expected));
            assert!(explicit.is_empty());
        }
        let Workers { explicit, .. } = parse("w.toml", &format!("{toml}layers = [0, 3]\n")).unwrap();
        assert_eq!(explicit, [[("a".to_owned(), 0..3)]]);
        let other = |name: &str, layers: &str| format!("{}layers = {layers}\n", toml.replace("\"a\"", name));
        let file = [other("'a'", "[0, 2]"), other("'b'", "[2, 3]"), other("'c'", "[0, 3]")].concat();
        let Workers { explicit, .. } = parse("w.toml", &file).unwrap();
        assert_eq!(explicit.iter().map(Vec::len).collect::<Vec<_>>(), [2, 1], "each from layer 0 on");
    }

    #[test]
    fn a_file_with_other_contents_is_refused_with_its_name() {
        let twice = "[[worker]]\nname = \"a\"\nmemory = 1\nbandwidth = 1\ncompute = 1.0\n".repeat(2);
        for (text, expected) in [
            (twice.as_str(), "twice"),
            ("[[worker]]\nname = \"a\"\n", "memory"),
            ("[[worker]]\nname = \"a\"\nspeed = 3\n", "speed"),
            ("{", "w.toml"),
        ] {
            let error = parse("w.toml", text).map(|_| ()).unwrap_err();
            assert!(error.contains(expected) && error.contains("w.toml"), "{error}");
        }
        let dir = tempfile::tempdir().unwrap();
        assert!(read(&dir.path().join("none.toml")).is_err());
    }
}
