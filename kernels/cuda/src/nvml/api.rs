//! Calls of NVIDIA's management library. The functions are looked up by name at each call, so that a library
//! without one of them serves the others.

#![allow(unsafe_code)]

use super::super::CudaError;
use super::super::library::{self, Loaded};
use std::ffi::{CStr, CString, c_char, c_void};
use std::path::{Path, PathBuf};

const LIBRARY: &str = "NVML";
/// File name on the loader's path.
const FILE: &str = "libnvidia-ml.so.1";
/// Folders where containers, WSL and distributions install the driver outside the loader's path.
const FOLDERS: [&str; 3] =
    ["/usr/local/nvidia/lib64", "/usr/lib/wsl/lib", "/usr/lib/x86_64-linux-gnu/nvidia/current"];

const SUCCESS: u32 = 0;
const GPU_IS_LOST: u32 = 15;
const RESET_REQUIRED: u32 = 16;
/// Longest text that a call returns, in bytes. NVML's own limits are 96 and less.
const TEXT_BYTES: usize = 128;

type Handle = *mut c_void;

/// Function `(device, *u32)`.
#[derive(Clone, Copy)]
pub(super) struct Number(&'static str);
/// Function `(device, u32, *u32)`.
#[derive(Clone, Copy)]
pub(super) struct NumberOf(&'static str);
/// Function `(device, *u64)`.
#[derive(Clone, Copy)]
pub(super) struct Large(&'static str);
/// Function `(device, u32, u32, *u64)`.
#[derive(Clone, Copy)]
pub(super) struct LargeOf(&'static str);

pub(super) const INDEX: Number = Number("nvmlDeviceGetIndex");
pub(super) const POWER_MILLIWATTS: Number = Number("nvmlDeviceGetPowerUsage");
pub(super) const POWER_LIMIT_MILLIWATTS: Number = Number("nvmlDeviceGetEnforcedPowerLimit");
pub(super) const PERFORMANCE_STATE: Number = Number("nvmlDeviceGetPerformanceState");
pub(super) const PCIE_GENERATION: Number = Number("nvmlDeviceGetCurrPcieLinkGeneration");
pub(super) const PCIE_GENERATION_MAX: Number = Number("nvmlDeviceGetMaxPcieLinkGeneration");
pub(super) const PCIE_WIDTH: Number = Number("nvmlDeviceGetCurrPcieLinkWidth");
pub(super) const PCIE_WIDTH_MAX: Number = Number("nvmlDeviceGetMaxPcieLinkWidth");
pub(super) const PCIE_REPLAYS: Number = Number("nvmlDeviceGetPcieReplayCounter");
/// By kind of clock.
pub(super) const CLOCK_MHZ: NumberOf = NumberOf("nvmlDeviceGetClockInfo");
pub(super) const CLOCK_MAX_MHZ: NumberOf = NumberOf("nvmlDeviceGetMaxClockInfo");
/// By sensor.
pub(super) const TEMPERATURE: NumberOf = NumberOf("nvmlDeviceGetTemperature");
/// By kind of threshold.
pub(super) const TEMPERATURE_THRESHOLD: NumberOf = NumberOf("nvmlDeviceGetTemperatureThreshold");
/// By link.
pub(super) const NVLINK_STATE: NumberOf = NumberOf("nvmlDeviceGetNvLinkState");
pub(super) const CLOCK_REASONS: Large = Large("nvmlDeviceGetCurrentClocksEventReasons");
/// Name of [`CLOCK_REASONS`] before driver 535.
pub(super) const CLOCK_REASONS_BEFORE_535: Large = Large("nvmlDeviceGetCurrentClocksThrottleReasons");
pub(super) const ENERGY_MILLIJOULES: Large = Large("nvmlDeviceGetTotalEnergyConsumption");
/// By link and kind of error.
pub(super) const NVLINK_ERRORS: LargeOf = LargeOf("nvmlDeviceGetNvLinkErrorCounter");
/// By kind of error and of counter.
pub(super) const ECC_ERRORS: LargeOf = LargeOf("nvmlDeviceGetTotalEccErrors");

/// The loaded and initialised library.
#[derive(Debug, Clone, Copy)]
pub(super) struct Api(Loaded);

/// A device's handle, valid until the process ends.
#[derive(Debug, Clone, Copy)]
pub(super) struct Device(Handle);

// SAFETY: NVML may be called by any thread; the handles are opaque numbers to this crate.
unsafe impl Send for Api {}
// SAFETY: as above.
unsafe impl Send for Device {}

/// Looks up a function.
///
/// Only the functions below call it, each with the constants whose type stands for its signature.
macro_rules! function {
    ($api:expr, $name:expr, fn($($argument:ty),*)) => {{
        let found = $api.0.symbol(LIBRARY, $name)?;
        // SAFETY: NVML's functions of this name have this signature: the types of the names above say which.
        // Pointers to functions have the size of pointers to data.
        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> u32>(found) }
    }};
}

impl Api {
    /// Loads the library from the loader's path or the usual folders, and initialises it.
    ///
    /// # Errors
    /// [`CudaError::Missing`] without the library; [`CudaError::Call`] if it does not start.
    pub(super) fn find() -> Result<Self, CudaError> {
        let folders = FOLDERS.map(|folder| Path::new(folder).join(FILE));
        let candidates: Vec<PathBuf> = std::iter::once(FILE.into()).chain(folders).collect();
        let loaded = candidates.iter().find_map(|path| library::open(path, libc::RTLD_NOW).ok());
        let looked_for = || candidates.iter().map(|path| path.display().to_string()).collect();
        Self::start(loaded.ok_or_else(|| CudaError::Missing { library: LIBRARY, looked_for: looked_for() })?)
    }

    /// Loads one file.
    #[cfg(test)]
    pub(super) fn load(path: &Path) -> Result<Self, CudaError> {
        Self::start(library::open(path, libc::RTLD_NOW)?)
    }

    fn start(loaded: Loaded) -> Result<Self, CudaError> {
        let api = Self(loaded);
        let init = function!(api, "nvmlInit_v2", fn());
        // SAFETY: the function has no argument. It may be called again.
        api.check("nvmlInit_v2", unsafe { init() })?;
        Ok(api)
    }

    pub(super) fn device_count(self) -> Result<u32, CudaError> {
        let call = function!(self, "nvmlDeviceGetCount_v2", fn(*mut u32));
        let mut count = 0;
        // SAFETY: the pointer is to a local integer.
        self.check("nvmlDeviceGetCount_v2", unsafe { call(&raw mut count) })?;
        Ok(count)
    }

    pub(super) fn device(self, index: u32) -> Result<Device, CudaError> {
        let call = function!(self, "nvmlDeviceGetHandleByIndex_v2", fn(u32, *mut Handle));
        let mut handle = std::ptr::null_mut();
        // SAFETY: the pointer is to a local pointer.
        self.check("nvmlDeviceGetHandleByIndex_v2", unsafe { call(index, &raw mut handle) })?;
        Ok(Device(handle))
    }

    /// The device at a PCI address, such as `0000:01:00.0`.
    pub(super) fn device_at(self, pci: &str) -> Result<Device, CudaError> {
        let call = function!(self, "nvmlDeviceGetHandleByPciBusId_v2", fn(*const c_char, *mut Handle));
        let pci =
            CString::new(pci).map_err(|_| CudaError::Invalid { what: "a PCI address with a zero".into() })?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the text ends with a zero, and the other pointer is to a local pointer.
        self.check("nvmlDeviceGetHandleByPciBusId_v2", unsafe { call(pci.as_ptr(), &raw mut handle) })?;
        Ok(Device(handle))
    }

    pub(super) fn name(self, device: Device) -> Result<Option<String>, CudaError> {
        let name = "nvmlDeviceGetName";
        let call = function!(self, name, fn(Handle, *mut c_char, u32));
        let mut text = [0; TEXT_BYTES];
        // SAFETY: the buffer has the length that the call gets, without the last byte, which stays zero.
        let status = unsafe { call(device.0, text.as_mut_ptr(), TEXT_BYTES as u32 - 1) };
        Ok(self.value(name, status, ())?.map(|()| text_of(&text)))
    }

    pub(super) fn number(self, of: Number, device: Device) -> Result<Option<u32>, CudaError> {
        let Ok(_) = self.0.symbol(LIBRARY, of.0) else { return Ok(None) };
        let call = function!(self, of.0, fn(Handle, *mut u32));
        let mut value = u32::MAX;
        // SAFETY: NVML has returned the handle; the pointer is to a local integer.
        let status = unsafe { call(device.0, &raw mut value) };
        Ok(self.value(of.0, status, value)?.filter(|value| *value != u32::MAX))
    }

    pub(super) fn number_of(self, of: NumberOf, device: Device, kind: u32) -> Result<Option<u32>, CudaError> {
        let Ok(_) = self.0.symbol(LIBRARY, of.0) else { return Ok(None) };
        let call = function!(self, of.0, fn(Handle, u32, *mut u32));
        let mut value = u32::MAX;
        // SAFETY: as above.
        let status = unsafe { call(device.0, kind, &raw mut value) };
        Ok(self.value(of.0, status, value)?.filter(|value| *value != u32::MAX))
    }

    pub(super) fn large(self, of: Large, device: Device) -> Result<Option<u64>, CudaError> {
        let Ok(_) = self.0.symbol(LIBRARY, of.0) else { return Ok(None) };
        let call = function!(self, of.0, fn(Handle, *mut u64));
        let mut value = u64::MAX;
        // SAFETY: as above.
        let status = unsafe { call(device.0, &raw mut value) };
        Ok(self.value(of.0, status, value)?.filter(|value| *value != u64::MAX))
    }

    pub(super) fn large_of(
        self,
        of: LargeOf,
        device: Device,
        kinds: (u32, u32),
    ) -> Result<Option<u64>, CudaError> {
        let Ok(_) = self.0.symbol(LIBRARY, of.0) else { return Ok(None) };
        let call = function!(self, of.0, fn(Handle, u32, u32, *mut u64));
        let mut value = u64::MAX;
        // SAFETY: as above.
        let status = unsafe { call(device.0, kinds.0, kinds.1, &raw mut value) };
        Ok(self.value(of.0, status, value)?.filter(|value| *value != u64::MAX))
    }

    /// `value` after a successful call, `None` if the device does not have it.
    ///
    /// # Errors
    /// [`CudaError::Lost`] for a device that has to be reset.
    fn value<T>(self, call: &'static str, status: u32, value: T) -> Result<Option<T>, CudaError> {
        match status {
            SUCCESS => Ok(Some(value)),
            GPU_IS_LOST | RESET_REQUIRED => Err(CudaError::Lost { call, status: self.text(status) }),
            other => {
                tracing::trace!(call, status = self.text(other), "a GPU does not report a value");
                Ok(None)
            }
        }
    }

    fn check(self, call: &'static str, status: u32) -> Result<(), CudaError> {
        match status {
            SUCCESS => Ok(()),
            GPU_IS_LOST | RESET_REQUIRED => Err(CudaError::Lost { call, status: self.text(status) }),
            other => Err(CudaError::Call { call, status: self.text(other) }),
        }
    }

    /// NVML's text for a status.
    fn text(self, status: u32) -> String {
        let number = || format!("NVML error {status}");
        let Ok(found) = self.0.symbol(LIBRARY, "nvmlErrorString") else { return number() };
        // SAFETY: the function of this name has this signature.
        let call =
            unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn(u32) -> *const c_char>(found) };
        // SAFETY: any number may be given.
        let text = unsafe { call(status) };
        if text.is_null() {
            return number();
        }
        // SAFETY: the text is NVML's own and ends with a zero.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

/// The text before the first zero, of which there is at least one.
fn text_of(buffer: &[c_char; TEXT_BYTES]) -> String {
    let bytes: Vec<u8> =
        buffer.iter().take_while(|byte| **byte != 0).flat_map(|byte| byte.to_ne_bytes()).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}
