//! Selects the counter of the energy that this worker uses: that of its GPU, else those of the processors.

use cuda::CudaError;
use cuda::nvml::Nvml;
use engine::energy::rapl::{Rapl, cpu_share};
use engine::energy::{self, EnergySource};
use engine::telemetry::EnergyMetrics;
use std::path::PathBuf;

/// Variable with the folder of the processors' counters, for containers, which do not see the usual one.
const POWERCAP_VARIABLE: &str = "KVASIR_POWERCAP";
const POWERCAP: &str = "/sys/class/powercap";

/// The energy of one GPU since its driver was loaded.
struct GpuEnergy(Nvml);

impl EnergySource for GpuEnergy {
    fn read(&mut self) -> Option<u64> {
        self.0.energy_millijoules().ok().flatten().map(|millijoules| millijoules.saturating_mul(1_000))
    }
}

/// Starts the meter. `gpu`: ordinal of the GPU that computes the model; `None`: the CPUs compute it.
pub(super) fn start(gpu: Option<u32>, metrics: EnergyMetrics) {
    match gpu {
        Some(gpu) => energy::start(move || open_gpu(gpu), metrics),
        None => energy::start(open_processors, metrics),
    }
}

fn open_gpu(gpu: u32) -> Option<GpuEnergy> {
    let opened = cuda::pci_address(gpu).and_then(|pci| Nvml::open(Some(pci)));
    let read = opened.and_then(|nvml| Ok((nvml.energy_millijoules()?, nvml)));
    match read {
        Ok((Some(_), nvml)) => Some(GpuEnergy(nvml)),
        Ok((None, _)) => {
            tracing::info!("the GPU does not report its energy: requests have none");
            None
        }
        Err(error @ CudaError::Missing { .. }) => {
            tracing::debug!(%error, "the energy of the GPU is not read");
            None
        }
        Err(error) => {
            tracing::warn!(%error, "the energy of the GPU cannot be read: requests have none");
            None
        }
    }
}

fn open_processors() -> Option<impl EnergySource> {
    let folder = std::env::var_os(POWERCAP_VARIABLE).map_or_else(|| POWERCAP.into(), PathBuf::from);
    let opened = Rapl::open(&folder, cpu_share());
    if opened.is_none() {
        tracing::info!(folder = %folder.display(), "the energy of the processors cannot be read: requests have none");
    }
    opened
}
