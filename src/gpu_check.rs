//! `kvasir gpu-check`: reports this machine's GPUs and their speed, and compares every op with the CPU.

use crate::config::ConfigError;
use crate::home;
use anyhow::{Result, bail};
use cuda::check::{Case, Checked, OPS, compare};
use cuda::speed::CompileShared;
use cuda::{
    Arch, Compiler, CubinCache, CudaBackend, CudaConfig, CudaError, Device, Gpu, GpuInfo, Survey, record,
    source,
};
use kernels::backend::{ActivationMode, Backend};
use kernels::cpu::{CpuBackend, CpuConfig};
use kernels::pool::{Pool, PoolConfig};
use serde::Serialize;
use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

/// Launches and replays per timing.
const TIMED: u32 = 50;
/// Launches of one graph.
const GRAPH_LAUNCHES: usize = 200;

/// Checks this machine's GPUs: libraries, speed of memory and launches, and the results of every op against the CPU's
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  kvasir gpu-check --json > gpu.json\n  \
    kvasir gpu-check --prebuild ./cubins\n\n\
    Exit code 1 if there is no usable GPU, or if a GPU's results differ from the CPU's by more than the tolerance.")]
pub(crate) struct GpuCheck {
    /// Print one JSON object, to attach to a bug report
    #[arg(long)]
    json: bool,
    /// Compile all kernels for all supported architectures into this directory instead of checking. Machines without a
    /// compiler load them by KVASIR_CUBINS. Requires NVRTC, but no GPU
    #[arg(long, value_name = "DIR", conflicts_with = "json")]
    prebuild: Option<PathBuf>,
    /// Only compare results with the CPU's; for tools that check every memory access, which make copies and launches slow
    #[arg(long)]
    cases_only: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    kvasir: &'static str,
    driver: Option<String>,
    nvrtc: Option<Nvrtc>,
    /// Reasons why no GPU is usable; empty if one is.
    missing: Vec<String>,
    devices: Vec<DeviceReport>,
    /// Device of each op when a worker uses a GPU.
    coverage: BTreeMap<&'static str, &'static str>,
}

#[derive(Debug, Serialize)]
struct Nvrtc {
    version: String,
    found_at: String,
    /// Precompiled kernels by architecture; empty if KVASIR_CUBINS is not set.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    prebuilt: BTreeMap<String, Prebuilt>,
}

/// Kernel files found in the folder of KVASIR_CUBINS.
#[derive(Debug, Serialize)]
struct Prebuilt {
    found: usize,
    of: usize,
}

#[derive(Debug, Serialize)]
struct DeviceReport {
    ordinal: u32,
    name: String,
    arch: String,
    memory_bytes: u64,
    unified_memory: bool,
    multiprocessors: u32,
    shared_bytes_per_block: u32,
    l2_bytes: u32,
    /// Measurements of the first device; `None` without a compiler.
    #[serde(flatten)]
    measured: Option<Measured>,
    /// Error of the measurement.
    #[serde(skip_serializing_if = "Option::is_none")]
    failed: Option<String>,
}

#[derive(Debug, Serialize)]
struct Measured {
    /// `None` if only the cases were requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    ceilings: Option<Ceilings>,
    correct: bool,
    refused: Vec<String>,
    cases: Vec<CaseReport>,
}

#[derive(Debug, Serialize)]
struct Ceilings {
    /// Bytes per second, read plus written, of copies inside the device.
    copy_bytes_per_second: f64,
    /// Microseconds per launch of almost empty kernels.
    launch_us: f64,
    /// The same for these kernels recorded as one graph.
    graph_launch_us: f64,
}

#[derive(Debug, Serialize)]
struct CaseReport {
    op: &'static str,
    what: String,
    error: f64,
    tolerance: f64,
    passed: bool,
}

impl GpuCheck {
    /// Runs the command.
    pub(crate) fn run(self) -> Result<()> {
        if let Some(folder) = self.prebuild {
            let kernels = CubinCache::new(&folder).prebuild(&Compiler::find()?)?;
            println!("wrote {kernels} kernel files to {}", folder.display());
            return Ok(());
        }
        let survey = Survey::take(true);
        let missing = survey.missing();
        let version = |version: &i32| format!("{}.{}", version / 1000, version % 1000 / 10);
        let nvrtc = survey.nvrtc.as_ref().ok().map(|compiler| {
            let (major, minor) = compiler.version();
            let version = format!("{major}.{minor}");
            let prebuilt = compiler.prebuilt().into_iter();
            let prebuilt = prebuilt
                .map(|(arch, found)| (arch.to_string(), Prebuilt { found, of: source::all(arch).count() }))
                .collect();
            Nvrtc { version, found_at: compiler.found_at(), prebuilt }
        });
        let driver = survey.driver.as_ref().ok().map(version);
        let gpus = survey.gpus.unwrap_or_default();
        let mut devices: Vec<DeviceReport> = gpus.iter().map(DeviceReport::of).collect();
        if let (Some(first), Some(report), Ok(compiler)) = (gpus.first(), devices.first_mut(), survey.nvrtc) {
            match measure(first, compiler, self.cases_only) {
                Ok(measured) => report.measured = Some(measured),
                // A report is still written, because the failure is worth reporting.
                Err(error) => report.failed = Some(format!("{error:#}")),
            }
        }
        let kvasir = env!("CARGO_PKG_VERSION");
        let report = Report { kvasir, driver, nvrtc, missing, devices, coverage: coverage() };
        match self.json {
            true => println!("{}", serde_json::to_string(&report)?),
            false => report.print(),
        }
        if let Some(failed) = report.devices.first().and_then(|device| device.failed.as_ref()) {
            bail!("the GPU cannot be used: {failed}");
        }
        match report.devices.first().and_then(|device| device.measured.as_ref()) {
            None => bail!("no usable GPU: {}", report.missing.join("; ")),
            Some(measured) if !measured.correct => {
                bail!("results of the GPU differ from the CPU's by more than the tolerance")
            }
            Some(_) => Ok(()),
        }
    }
}

impl DeviceReport {
    fn of(info: &GpuInfo) -> Self {
        Self {
            ordinal: info.ordinal,
            name: info.name.clone(),
            arch: info.arch.to_string(),
            memory_bytes: info.memory_bytes,
            unified_memory: info.unified,
            multiprocessors: info.multiprocessors,
            shared_bytes_per_block: info.shared_bytes,
            l2_bytes: info.l2_bytes,
            measured: None,
            failed: None,
        }
    }
}

/// Every op has a kernel. Unsupported weight types and head shapes are refused when a model is loaded.
fn coverage() -> BTreeMap<&'static str, &'static str> {
    OPS.into_iter().map(|op| (op, "gpu")).collect()
}

/// Compiles for a device and caches the result if there is a home directory.
pub(crate) fn compile(compiler: Compiler, arch: Arch) -> CompileShared {
    let cache = home::cubins().map(CubinCache::new);
    Arc::new(move |source| match &cache {
        Some(cache) => cache.compile(&compiler, source, arch),
        None => compiler.compile(source, arch),
    })
}

fn measure(info: &GpuInfo, compiler: Compiler, cases_only: bool) -> Result<Measured> {
    let (arch, compile) = (info.arch, compile(compiler, info.arch));
    let mut gpu = Gpu::open(info.ordinal)?;
    let ceilings = if cases_only { None } else { Some(ceilings(&mut gpu, &compile)?) };
    let environment = |name: &str| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
    CpuConfig::select(ActivationMode::Int8, environment)
        .map_err(|error| ConfigError::Environment(error.to_string()))?;
    // The first device stays open, so that later cases find it initialised.
    let mut device = |activations| -> Result<Box<dyn Backend>, kernels::Error> {
        let (device, compile) = (Box::new(Gpu::open(info.ordinal)?), compile.clone());
        let config = CudaConfig { arch, activations, threads: 1 };
        Ok(Box::new(CudaBackend::new(device, config, Box::new(move |source| compile(source)))?))
    };
    let mut oracle = |activations| -> Result<Box<dyn Backend>, kernels::Error> {
        let cpu = CpuConfig::select(activations, environment);
        let cpu = cpu
            .map_err(|_| kernels::Error::Unsupported { what: "the backend that the environment selects" })?;
        Ok(Box::new(CpuBackend::new(cpu, Pool::new(PoolConfig::new(NonZeroUsize::MIN))?)?))
    };
    let checked = compare(&mut device, &mut oracle, info.multiprocessors as usize, arch);
    let correct = checked.passed();
    let Checked { cases, refused } = checked;
    Ok(Measured { ceilings, correct, refused, cases: cases.into_iter().map(CaseReport::from).collect() })
}

impl From<Case> for CaseReport {
    fn from(case: Case) -> Self {
        let passed = case.passed();
        let Case { op, what, error, tolerance } = case;
        Self { op, what, error, tolerance, passed }
    }
}

fn ceilings(gpu: &mut Gpu, compile: &CompileShared) -> Result<Ceilings, CudaError> {
    use cuda::rowwise::{Rows, RowwiseKernels};
    // Before any measurement: a device that rejects kernels is useless.
    let kernels = RowwiseKernels::load(gpu, &compile(&source::ROWWISE)?)?;
    let copy_bytes_per_second = gpu.copy_bandwidth()?;
    let scalar = gpu.allocate(size_of::<f32>())?;
    let small = |gpu: &mut dyn Device| kernels.scale(gpu, Rows { rows: 1, cols: 1 }, scalar, 1.0, None);
    let launch = timed(gpu, |gpu| (0..GRAPH_LAUNCHES).try_for_each(|_| small(gpu)))?;
    let graph = record(gpu, |gpu| (0..GRAPH_LAUNCHES).try_for_each(|_| small(gpu)))?;
    let no_graphs = || CudaError::Invalid { what: "this device cannot record CUDA graphs".into() };
    let graph = graph.ok_or_else(no_graphs)?;
    let replayed = timed(gpu, |gpu| gpu.replay(graph))?;
    gpu.free(scalar)?;
    let each = |seconds: f64| seconds * 1e6 / GRAPH_LAUNCHES as f64;
    Ok(Ceilings { copy_bytes_per_second, launch_us: each(launch), graph_launch_us: each(replayed) })
}

/// Seconds per run of `work`, after one warm-up run.
fn timed(gpu: &mut Gpu, mut work: impl FnMut(&mut Gpu) -> Result<(), CudaError>) -> Result<f64, CudaError> {
    work(gpu)?;
    gpu.synchronize()?;
    let started = Instant::now();
    (0..TIMED).try_for_each(|_| work(gpu))?;
    gpu.synchronize()?;
    Ok(started.elapsed().as_secs_f64() / f64::from(TIMED))
}

impl Report {
    fn print(&self) {
        let or_none = |text: &Option<String>| text.clone().unwrap_or_else(|| "none".to_owned());
        println!("driver    {}", or_none(&self.driver));
        match &self.nvrtc {
            Some(Nvrtc { version, found_at, prebuilt }) => {
                println!("NVRTC     {version}, {found_at}");
                for (arch, Prebuilt { found, of }) in prebuilt {
                    println!("compiled  {arch}: {found} of {of}");
                }
            }
            None => println!("NVRTC     none"),
        }
        for missing in &self.missing {
            println!("missing   {missing}");
        }
        for device in &self.devices {
            let DeviceReport { ordinal, name, arch, memory_bytes, multiprocessors, .. } = device;
            let memory = *memory_bytes as f64 / 1e9;
            println!("device {ordinal}  {name}, {arch}, {memory:.1} GB, {multiprocessors} multiprocessors");
            if let Some(measured) = &device.measured {
                measured.print();
            }
        }
        let ops: Vec<_> = self.coverage.keys().copied().collect();
        println!("on a GPU  {}; nothing falls back to the CPU", ops.join(", "));
    }
}

impl Measured {
    fn print(&self) {
        if let Some(Ceilings { copy_bytes_per_second, launch_us, graph_launch_us }) = &self.ceilings {
            println!("  copies        {:.0} GB/s read and written", copy_bytes_per_second / 1e9);
            println!("  launches      {launch_us:.2} us each, {graph_launch_us:.2} us in a graph");
        }
        for refused in &self.refused {
            println!("  refused       {refused}");
        }
        let failed = self.cases.iter().filter(|case| !case.passed);
        for CaseReport { op, what, error, tolerance, .. } in failed {
            println!("  WRONG         {op}, {what}: {error:.1e} off, {tolerance:.0e} allowed");
        }
        let passed = self.cases.iter().filter(|case| case.passed).count();
        println!("  as the CPU    {passed} of {} cases", self.cases.len());
    }
}
