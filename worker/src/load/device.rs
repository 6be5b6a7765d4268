//! Selects the compute device and determines whose memory weights and caches use.

use super::{EngineOptions, environment, threads};
use crate::defaults::HostGpu;
use cuda::{Arch, Compiler, CubinCache, CudaBackend, CudaConfig, Device, Gpu, Survey, gpus};
use engine::Error;
use engine::kv_cache::memory::{MemInfo, ProcMemInfo};
use engine::memory::GroupMemory;
use kernels::backend::{Backend, MemoryUse};
use std::io;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeviceChoice {
    /// A usable GPU if there is one, else the CPU.
    Auto,
    #[default]
    Cpu,
    Cuda,
    /// The kernels for a GB10, interpreted on the CPU. For tests.
    #[cfg(feature = "ptx-sim")]
    PtxSim,
}

/// Variables that select CPU kernels.
const CPU_VARIABLES: [&str; 4] =
    ["KVASIR_BACKEND", "KVASIR_MATMUL_BACKEND", "KVASIR_ATTENTION_BACKEND", "KVASIR_ROWS_BACKEND"];

/// The value `off` disables CUDA graphs, so that every kernel is launched separately. For debugging.
const GRAPHS_VARIABLE: &str = "KVASIR_CUDA_GRAPHS";

impl DeviceChoice {
    /// Resolves the choice on this machine; never returns [`Self::Auto`]. `gpu` is the index of the GPU to
    /// use. Also returns the reason.
    ///
    /// # Errors
    /// [`Error::Config`] for a GPU that is not usable, with all that is missing.
    pub fn resolve(self, gpu: u32) -> Result<(Self, String), Error> {
        self.resolve_with(gpu, &environment)
    }

    pub(super) fn resolve_with(
        self,
        gpu: u32,
        environment: &dyn Fn(&str) -> Option<String>,
    ) -> Result<(Self, String), Error> {
        let demanded =
            CPU_VARIABLES.into_iter().find(|name| environment(name).is_some_and(|value| !value.is_empty()));
        self.decide(demanded, || Survey::take(self == Self::Cuda).usable(gpu).map(|(gpu, _)| gpu.name))
    }

    /// `demanded` is a variable that selects CPU kernels, if one is set. `look` returns a usable GPU's name,
    /// or what is missing.
    fn decide(
        self,
        demanded: Option<&str>,
        look: impl FnOnce() -> Result<String, String>,
    ) -> Result<(Self, String), Error> {
        let cannot = |reason| Err(Error::Config { option: "device", reason });
        match (self, demanded) {
            (Self::Cpu, _) => Ok((Self::Cpu, "it was asked for".to_owned())),
            #[cfg(feature = "ptx-sim")]
            (Self::PtxSim, _) => Ok((Self::PtxSim, "it was asked for".to_owned())),
            (Self::Auto, Some(variable)) => Ok((Self::Cpu, format!("{variable} selects CPU kernels"))),
            (Self::Cuda, Some(variable)) => {
                cannot(format!("cuda is selected, but {variable} selects CPU kernels"))
            }
            (choice, None) => match (choice, look()) {
                (_, Ok(gpu)) => Ok((Self::Cuda, format!("there is a GPU, {gpu}"))),
                (Self::Cuda, Err(missing)) => cannot(format!("cuda is not usable: {missing}")),
                (_, Err(missing)) => Ok((Self::Cpu, missing)),
            },
        }
    }
}

/// Number of GPUs that the driver shows. 0 if there are none or `choice` cannot select one.
pub fn visible_gpus(choice: DeviceChoice) -> usize {
    match choice {
        DeviceChoice::Auto | DeviceChoice::Cuda => gpus().map_or(0, |gpus| gpus.len()),
        _ => 0,
    }
}

/// Measures the bytes per second that copies inside the GPU read and write. `None` if the CPU computes.
///
/// # Errors
/// [`Error::Config`] for a GPU that is not usable; errors of the driver.
pub fn gpu_copy_bandwidth(options: &EngineOptions) -> Result<Option<f64>, Error> {
    if options.device.resolve(options.gpu)?.0 != DeviceChoice::Cuda {
        return Ok(None);
    }
    let mut gpu = Gpu::open(options.gpu).map_err(kernels::Error::from)?;
    Ok(Some(gpu.copy_bandwidth().map_err(kernels::Error::from)?))
}

/// Opens the GPU that the options select.
pub(super) fn gpu(options: &EngineOptions) -> Result<Box<dyn Backend>, Error> {
    let cannot = |reason| Error::Config { option: "device", reason };
    let (info, compiler) = Survey::take(true).usable(options.gpu).map_err(cannot)?;
    tracing::info!(gpu = info.ordinal, name = info.name, arch = %info.arch, "computing on a GPU");
    let gpu = Gpu::open(info.ordinal).map_err(kernels::Error::from)?;
    on(Box::new(gpu), info.arch, compiler, options)
}

#[cfg(feature = "ptx-sim")]
pub(super) fn simulated(options: &EngineOptions) -> Result<Box<dyn Backend>, Error> {
    let compiler = Compiler::find().map_err(kernels::Error::from)?;
    let device = cuda::SimDevice::new(ptx::Limits::GB10, 1);
    on(Box::new(device), Arch::SM_121A, compiler, options)
}

/// Creates a backend on a device.
fn on(
    device: Box<dyn Device>,
    arch: Arch,
    compiler: Compiler,
    options: &EngineOptions,
) -> Result<Box<dyn Backend>, Error> {
    let cache = options.cubins.as_ref().map(CubinCache::new);
    let config = CudaConfig { arch, activations: options.activations, threads: threads(options).get() };
    let compile = move |source: &_| match &cache {
        Some(cache) => cache.compile(&compiler, source, arch),
        None => compiler.compile(source, arch),
    };
    let backend = CudaBackend::new(device, config, Box::new(compile)).map_err(kernels::Error::from)?;
    match environment(GRAPHS_VARIABLE).as_deref() {
        None | Some("" | "on") => Ok(Box::new(backend)),
        Some("off") => Ok(Box::new(backend.without_graphs())),
        Some(other) => Err(Error::Config {
            option: GRAPHS_VARIABLE,
            reason: format!("{other:?} is neither `on` nor `off`"),
        }),
    }
}

/// Memory of the interpreted GPU in bytes. It is small because the interpreter checks every byte.
#[cfg(feature = "ptx-sim")]
const SIMULATED: u64 = 384 << 20;
/// Multiply-adds per second of the interpreted GPU, a GB10.
#[cfg(feature = "ptx-sim")]
const SIMULATED_COMPUTE: u64 = 22_000_000_000_000;

/// The memory for weights and caches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Memory {
    Host,
    /// The host's memory, shared with the GPU. `MemAvailable` is its free memory, because the driver counts
    /// the page cache as used.
    Unified,
    Own {
        total: u64,
        free: u64,
    },
}

impl Memory {
    /// Memory of the device that the options select.
    pub(super) fn of(options: &EngineOptions) -> Result<Self, Error> {
        Ok(Self::and_gpu(options)?.0)
    }

    /// The same, with the GPU's properties except whether several workers share it.
    pub(super) fn and_gpu(options: &EngineOptions) -> Result<(Self, Option<HostGpu>), Error> {
        match options.device.resolve(options.gpu)?.0 {
            DeviceChoice::Cuda => {}
            #[cfg(feature = "ptx-sim")]
            DeviceChoice::PtxSim => {
                let gpu = HostGpu { compute: SIMULATED_COMPUTE, unified: false };
                return Ok((Self::Own { total: SIMULATED, free: SIMULATED }, Some(gpu)));
            }
            DeviceChoice::Auto | DeviceChoice::Cpu => return Ok((Self::Host, None)),
        }
        let cannot = |reason| Error::Config { option: "device", reason };
        let (info, _) = Survey::take(true).usable(options.gpu).map_err(cannot)?;
        let host_gpu = Some(HostGpu { compute: info.compute(), unified: info.unified });
        if info.unified {
            return Ok((Self::Unified, host_gpu));
        }
        // Measured with an open context, which itself takes some hundred MB.
        let mut gpu = Gpu::open(info.ordinal).map_err(kernels::Error::from)?;
        let free = gpu.free_bytes().map_err(kernels::Error::from)?;
        Ok((Self::Own { total: info.memory_bytes, free }, host_gpu))
    }

    /// Memory that is left after a backend has allocated `taken`. A GPU's own memory is also measured again,
    /// since kernels, graphs and other processes use memory that no backend counts.
    pub(super) fn behind(self, taken: MemoryUse, options: &EngineOptions) -> Result<Self, Error> {
        match self {
            Self::Own { .. } => Ok(self.less(taken).at_most(Self::of(options)?)),
            other => Ok(other),
        }
    }

    /// The smaller of two amounts of free GPU memory.
    fn at_most(self, other: Self) -> Self {
        match (self, other) {
            (Self::Own { total, free }, Self::Own { free: measured, .. }) => {
                Self::Own { total, free: free.min(measured) }
            }
            (own, _) => own,
        }
    }

    /// Subtracts what a backend has allocated.
    fn less(self, taken: MemoryUse) -> Self {
        let MemoryUse { weights, activations, kv } = taken;
        match self {
            Self::Own { total, free } => {
                Self::Own { total, free: free.saturating_sub((weights + activations + kv) as u64) }
            }
            // The host's free memory is read when it is needed.
            other => other,
        }
    }

    pub(super) fn total_bytes(self) -> u64 {
        match self {
            Self::Host => {
                let total = engine::memory::total_bytes();
                GroupMemory::read().map_or(total, |group| group.limit.min(total))
            }
            Self::Unified => engine::memory::total_bytes(),
            Self::Own { total, .. } => total,
        }
    }
}

impl MemInfo for Memory {
    fn available_bytes(&self) -> io::Result<u64> {
        match self {
            Self::Host => {
                let free = ProcMemInfo.available_bytes()?;
                Ok(GroupMemory::read().map_or(free, |group| group.available.min(free)))
            }
            // Memory allocated by a driver is not counted in a cgroup.
            Self::Unified => ProcMemInfo.available_bytes(),
            Self::Own { free, .. } => Ok(*free),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_devices() {
        use DeviceChoice::{Auto, Cpu, Cuda};
        let found = || Ok("H200".to_owned());
        let missing = || Err("no CUDA driver here".to_owned());
        type Look = fn() -> Result<String, String>;
        type Case<'a> = (DeviceChoice, Option<&'a str>, Look, Result<DeviceChoice, &'a str>);
        let table: [Case<'_>; 8] = [
            (Cpu, None, found, Ok(Cpu)),
            (Cpu, Some("KVASIR_BACKEND"), missing, Ok(Cpu)),
            (Auto, None, found, Ok(Cuda)),
            (Auto, None, missing, Ok(Cpu)),
            (Auto, Some("KVASIR_BACKEND"), found, Ok(Cpu)),
            (Cuda, None, found, Ok(Cuda)),
            (Cuda, None, missing, Err("device: cuda is not usable: no CUDA driver here")),
            (Cuda, Some("KVASIR_BACKEND"), found, Err("KVASIR_BACKEND selects CPU kernels")),
        ];
        for (choice, demanded, look, expected) in table {
            match (choice.decide(demanded, look), expected) {
                (Ok((found, reason)), Ok(expected)) => {
                    assert_eq!(found, expected);
                    assert!(!reason.is_empty());
                }
                (Err(error), Err(expected)) => assert!(error.to_string().contains(expected), "{error}"),
                (found, expected) => panic!("{choice:?} {demanded:?}: {found:?}, not {expected:?}"),
            }
        }
    }

    #[test]
    fn allocated_gpu_memory_is_not_free() {
        let taken = MemoryUse { weights: 10, activations: 20, kv: 30 };
        let own = Memory::Own { total: 1000, free: 100 };
        assert_eq!(own.less(taken), Memory::Own { total: 1000, free: 40 });
        assert_eq!(own.less(taken).available_bytes().unwrap(), 40);
        assert_eq!(Memory::Own { total: 1000, free: 59 }.less(taken), Memory::Own { total: 1000, free: 0 });
        assert_eq!(Memory::Unified.less(taken), Memory::Unified);
        let measured = |free| Memory::Own { total: 1000, free };
        assert_eq!(own.less(taken).at_most(measured(30)), measured(30), "others took some, too");
        assert_eq!(own.less(taken).at_most(measured(90)), measured(40));
    }
}
