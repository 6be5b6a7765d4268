//! Facts of GPUs: driver, compiler, and what NVIDIA's management library reports.

use cuda::nvml::{GpuHealth, Nvml};
use cuda::{CudaError, Survey};
use doctor::{Cuda, Facts, Gpu, Host};
use std::sync::mpsc::channel;
use std::time::Duration;
use worker::defaults::{self, HostGpu};

/// A library that takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(10);

/// Adds the GPUs, and the memory's floor, which depends on them.
pub(super) fn add(facts: &mut Facts, host: &Host) {
    let (cuda, unified) = survey(host);
    facts.cuda = cuda;
    facts.gpus = read();
    add_floor(facts, unified);
}

/// Driver and compiler, and whether a GPU shares the host's memory. Without an NVIDIA device nothing of CUDA is
/// needed.
pub(super) fn survey(host: &Host) -> (Option<Cuda>, bool) {
    let survey = Survey::take(host.has_nvidia_device());
    let gpus = survey.gpus.as_deref().unwrap_or_default();
    let unified = gpus.iter().any(|gpu| gpu.unified);
    if !host.has_nvidia_device() && gpus.is_empty() {
        return (None, false);
    }
    let driver = match (&survey.driver, &survey.gpus) {
        (Err(error), _) | (_, Err(error)) => Err(error.to_string()),
        (Ok(version), Ok(_)) => Ok(format!("{}.{}", version / 1000, version % 1000 / 10)),
    };
    let nvrtc = survey.nvrtc.as_ref().map_err(ToString::to_string).map(|compiler| {
        let (major, minor) = compiler.version();
        format!("{major}.{minor}")
    });
    (Some(Cuda { driver, nvrtc }), unified)
}

/// Sets the memory's floor of a machine whose GPU shares its memory, or not.
pub(super) fn add_floor(facts: &mut Facts, unified: bool) {
    let Some(memory) = &mut facts.memory else { return };
    let gpu = unified.then_some(HostGpu { compute: 0, unified });
    let host = defaults::Host {
        memory_total: memory.total,
        memory_available: memory.available,
        threads: 1,
        workers: 1,
        gpu,
    };
    (memory.floor, memory.unified) = (defaults::floor(host).value, unified);
}

/// The GPUs. Without the library there are none; one that hangs has a GPU that does not answer.
fn read() -> Vec<Gpu> {
    let (send, receive) = channel();
    // A thread that hangs ends with the process.
    let thread = std::thread::Builder::new().name("kvasir-nvml".into());
    let spawned = thread.spawn(move || drop(send.send(Nvml::open(None).and_then(|nvml| nvml.read()))));
    let lost = || vec![Gpu { lost: true, ..Gpu::default() }];
    match spawned.map(|_| receive.recv_timeout(PATIENCE)) {
        Ok(Ok(Ok(gpus))) => gpus.iter().map(gpu).collect(),
        Ok(Ok(Err(CudaError::Missing { .. }))) | Err(_) => Vec::new(),
        Ok(Ok(Err(error))) => {
            tracing::warn!(%error, "NVIDIA's management library cannot be used");
            lost()
        }
        Ok(Err(_)) => lost(),
    }
}

/// A reading as facts.
pub(super) fn gpu(health: &GpuHealth) -> Gpu {
    let uncorrected = health.ecc_errors.iter().find(|(kind, _)| *kind == "uncorrected");
    Gpu {
        index: health.index,
        lost: health.lost,
        slowed_by: health.faults().map(str::to_owned).collect(),
        temperature_celsius: health.temperature_celsius,
        performance_state: health.performance_state,
        sm_clock_mhz: health.sm_clock_mhz,
        power_limit_watts: health.power_limit_watts,
        pcie_width: health.pcie_width.zip(health.pcie_width_max),
        pcie_replays: health.pcie_replays,
        uncorrected_memory_errors: uncorrected.map(|(_, count)| *count),
    }
}
