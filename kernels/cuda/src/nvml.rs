//! Health of NVIDIA GPUs: power, clocks, temperature and links, read through NVIDIA's management library.
//!
//! Calls of a broken driver may never return. Call them on a thread that nothing waits for.

mod api;

use super::CudaError;
use api::{Api, Device};

/// `NVML_CLOCK_SM` and `NVML_CLOCK_MEM`.
const SM_CLOCK: u32 = 1;
const MEMORY_CLOCK: u32 = 2;
/// `NVML_TEMPERATURE_GPU`.
const GPU_SENSOR: u32 = 0;
/// `NVML_TEMPERATURE_THRESHOLD_SLOWDOWN`.
const SLOWDOWN: u32 = 1;
/// `NVML_NVLINK_MAX_LINKS`.
const MAX_LINKS: u32 = 18;
/// `NVML_PSTATE_UNKNOWN`.
const UNKNOWN_STATE: u32 = 32;
/// `NVML_VOLATILE_ECC`: since the driver was loaded.
const SINCE_LOADED: u32 = 0;
/// More GPUs of one host are not read.
const MAX_GPUS: u32 = 64;

/// A reason why clocks are below what the load asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClockReason {
    /// Value of the label `reason` in metrics.
    pub name: &'static str,
    /// Bit in NVML's mask.
    bit: u64,
    /// Whether cooling, the power supply or the hardware is at fault. The other reasons are settings, the
    /// power limit or an idle GPU.
    pub fault: bool,
}

/// All reasons with a name.
pub const CLOCK_REASONS: [ClockReason; 9] = [
    ClockReason { name: "idle", bit: 0x1, fault: false },
    ClockReason { name: "applications_clocks", bit: 0x2, fault: false },
    ClockReason { name: "sw_power_cap", bit: 0x4, fault: false },
    ClockReason { name: "hw_slowdown", bit: 0x8, fault: true },
    ClockReason { name: "sync_boost", bit: 0x10, fault: false },
    ClockReason { name: "sw_thermal", bit: 0x20, fault: true },
    ClockReason { name: "hw_thermal", bit: 0x40, fault: true },
    ClockReason { name: "hw_power_brake", bit: 0x80, fault: true },
    ClockReason { name: "display_clocks", bit: 0x100, fault: false },
];

/// Kinds of NVLink errors, each with NVML's number.
const NVLINK_ERRORS: [(&str, u32); 5] =
    [("replay", 0), ("recovery", 1), ("crc_flit", 2), ("crc_data", 3), ("ecc_data", 4)];
/// Kinds of memory errors, each with NVML's number.
const ECC_ERRORS: [(&str, u32); 2] = [("corrected", 0), ("uncorrected", 1)];

/// One reading of a GPU. A value that the GPU does not report is `None`: a GB10 shares the host's memory and
/// has neither a memory clock nor memory errors.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GpuHealth {
    /// NVML's index, which `nvidia-smi` shows.
    pub index: u32,
    pub name: Option<String>,
    /// The GPU does not answer until it is reset. All values are `None` then.
    pub lost: bool,
    pub power_watts: Option<f64>,
    pub power_limit_watts: Option<f64>,
    /// 0 is the fastest, 15 the slowest.
    pub performance_state: Option<u32>,
    pub sm_clock_mhz: Option<u32>,
    pub sm_clock_max_mhz: Option<u32>,
    pub memory_clock_mhz: Option<u32>,
    pub memory_clock_max_mhz: Option<u32>,
    pub temperature_celsius: Option<u32>,
    /// Temperature from which on the GPU lowers its clocks.
    pub slowdown_celsius: Option<u32>,
    /// NVML's mask of reasons; see [`GpuHealth::slowed_by`].
    pub clock_reasons: Option<u64>,
    pub pcie_generation: Option<u32>,
    /// Highest generation that both the GPU and its slot support.
    pub pcie_generation_max: Option<u32>,
    /// Lanes.
    pub pcie_width: Option<u32>,
    pub pcie_width_max: Option<u32>,
    /// Packets that were sent again over PCIe, since the driver was loaded.
    pub pcie_replays: Option<u32>,
    /// Errors of active NVLinks: (link, kind of error, count).
    pub nvlink_errors: Vec<(u32, &'static str, u64)>,
    /// Errors of the memory since the driver was loaded: (kind of error, count).
    pub ecc_errors: Vec<(&'static str, u64)>,
}

impl GpuHealth {
    /// Whether this reason lowers the clocks. `None` if the GPU does not report reasons.
    pub fn slowed_by(&self, reason: ClockReason) -> Option<bool> {
        self.clock_reasons.map(|mask| mask & reason.bit != 0)
    }

    /// Names of the faults that lower the clocks.
    pub fn faults(&self) -> impl Iterator<Item = &'static str> + '_ {
        let active = |reason: &ClockReason| reason.fault && self.slowed_by(*reason) == Some(true);
        CLOCK_REASONS.into_iter().filter(active).map(|reason| reason.name)
    }
}

/// NVIDIA's management library.
#[derive(Debug)]
pub struct Nvml {
    api: Api,
    /// PCI address of the only GPU to read.
    only: Option<String>,
}

impl Nvml {
    /// Loads the library. Reads all GPUs, or that with the PCI address `only`.
    ///
    /// # Errors
    /// [`CudaError::Missing`] without the library, which machines without a GPU do not have;
    /// [`CudaError::Call`] if it does not start.
    pub fn open(only: Option<String>) -> Result<Self, CudaError> {
        Ok(Self { api: Api::find()?, only })
    }

    /// Reads the GPUs.
    ///
    /// # Errors
    /// Only if the GPUs cannot be listed. A lost GPU is listed as such.
    pub fn read(&self) -> Result<Vec<GpuHealth>, CudaError> {
        let lost = |index| GpuHealth { index, lost: true, ..GpuHealth::default() };
        if let Some(pci) = &self.only {
            return match self.api.device_at(pci).and_then(|device| self.health(device, 0)) {
                Ok(health) => Ok(vec![health]),
                Err(CudaError::Lost { .. }) => Ok(vec![lost(0)]),
                Err(error) => Err(error),
            };
        }
        let read = |index| match self.api.device(index).and_then(|device| self.health(device, index)) {
            Ok(health) => Ok(Some(health)),
            Err(CudaError::Lost { .. }) => Ok(Some(lost(index))),
            // A GPU that this process may not use.
            Err(CudaError::Call { .. }) => Ok(None),
            Err(error) => Err(error),
        };
        (0..self.api.device_count()?.min(MAX_GPUS)).filter_map(|index| read(index).transpose()).collect()
    }

    /// Energy of the only GPU to read, else of the first one, since the driver was loaded. `None` if the GPU does not
    /// report it.
    ///
    /// # Errors
    /// If the GPU is lost or its handle cannot be looked up.
    pub fn energy_millijoules(&self) -> Result<Option<u64>, CudaError> {
        let device = match &self.only {
            Some(pci) => self.api.device_at(pci),
            None => self.api.device(0),
        };
        self.api.large(api::ENERGY_MILLIJOULES, device?)
    }

    fn health(&self, device: Device, index: u32) -> Result<GpuHealth, CudaError> {
        let number = |of| self.api.number(of, device);
        let number_of = |of, kind| self.api.number_of(of, device, kind);
        let watts = |milliwatts: Option<u32>| milliwatts.map(|milliwatts| f64::from(milliwatts) / 1000.0);
        let reasons = match self.api.large(api::CLOCK_REASONS, device)? {
            Some(reasons) => Some(reasons),
            None => self.api.large(api::CLOCK_REASONS_BEFORE_535, device)?,
        };
        let mut nvlink_errors = Vec::new();
        for link in 0..MAX_LINKS {
            match number_of(api::NVLINK_STATE, link)? {
                // The links of a GPU are numbered without gaps.
                None => break,
                Some(0) => continue,
                Some(_) => {}
            }
            for (name, kind) in NVLINK_ERRORS {
                let count = self.api.large_of(api::NVLINK_ERRORS, device, (link, kind))?;
                nvlink_errors.extend(count.map(|count| (link, name, count)));
            }
        }
        let mut ecc_errors = Vec::new();
        for (name, kind) in ECC_ERRORS {
            let count = self.api.large_of(api::ECC_ERRORS, device, (kind, SINCE_LOADED))?;
            ecc_errors.extend(count.map(|count| (name, count)));
        }
        Ok(GpuHealth {
            index: number(api::INDEX)?.unwrap_or(index),
            name: self.api.name(device)?,
            lost: false,
            power_watts: watts(number(api::POWER_MILLIWATTS)?),
            power_limit_watts: watts(number(api::POWER_LIMIT_MILLIWATTS)?),
            performance_state: number(api::PERFORMANCE_STATE)?.filter(|state| *state != UNKNOWN_STATE),
            sm_clock_mhz: number_of(api::CLOCK_MHZ, SM_CLOCK)?,
            sm_clock_max_mhz: number_of(api::CLOCK_MAX_MHZ, SM_CLOCK)?,
            memory_clock_mhz: number_of(api::CLOCK_MHZ, MEMORY_CLOCK)?,
            memory_clock_max_mhz: number_of(api::CLOCK_MAX_MHZ, MEMORY_CLOCK)?,
            temperature_celsius: number_of(api::TEMPERATURE, GPU_SENSOR)?,
            slowdown_celsius: number_of(api::TEMPERATURE_THRESHOLD, SLOWDOWN)?,
            clock_reasons: reasons,
            pcie_generation: number(api::PCIE_GENERATION)?,
            pcie_generation_max: number(api::PCIE_GENERATION_MAX)?,
            pcie_width: number(api::PCIE_WIDTH)?,
            pcie_width_max: number(api::PCIE_WIDTH_MAX)?,
            pcie_replays: number(api::PCIE_REPLAYS)?,
            nvlink_errors,
            ecc_errors,
        })
    }
}

#[cfg(test)]
mod tests;
