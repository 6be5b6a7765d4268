//! Device implementation on NVIDIA's driver.
//!
//! A [`Gpu`] has one context and one stream. Host copies pass through two pinned buffers, so that no copy
//! reads memory that its caller may have changed since. An error that makes the context unusable (a
//! kernel's invalid access, a hardware fault) is [`CudaError::Lost`], and every later call returns it
//! again. A wait that does not end is [`CudaError::Lost`] too.

#![allow(unsafe_code)]

use super::device::GraphId;
use super::{Arch, Argument, Compiled, CudaError, Device, DevicePtr, KernelId, Launch, library};
use api::Driver;
use cudarc::driver::sys;
use memory::Allocations;
use staging::Staging;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::time::{Duration, Instant};

mod api;
mod memory;
mod staging;
#[cfg(test)]
mod tests;
mod wait;

/// The stream does not synchronise with the default stream.
const NON_BLOCKING: u32 = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
/// A thread that waits inside the driver sleeps instead of spinning.
const SCHEDULE_BLOCKING: u32 = sys::CUctx_flags::CU_CTX_SCHED_BLOCKING_SYNC as u32;
/// Maximum number of parameters of a kernel.
const MAX_PARAMETERS: usize = 64;
/// Maximum number of threads of a block, on every device.
const MAX_THREADS: u64 = 1024;
/// Maximum number of blocks of a grid along each axis, on every device.
const MAX_GRID: [u32; 3] = [i32::MAX.cast_unsigned(), 65_535, 65_535];
/// Bytes of the buffer for a device's name.
const NAME_BYTES: usize = 256;
/// Longest wait for the device. No launch takes longer; one that does has hung, or the device has fallen
/// off the bus without an error.
const LONGEST_WAIT: Duration = Duration::from_secs(60);
/// Bytes per copy when memory bandwidth is measured; many times the size of the device's caches.
const COPY_BYTES: usize = 1 << 30;
/// Number of copies in one time measurement.
const TIMED_COPIES: u32 = 50;
/// Multiply-adds per cycle of a multiprocessor that computes a prompt with 8-bit activations, from the
/// instruction counts in docs/measurements/gpu.md.
const PRODUCTS_PER_CYCLE: u64 = 190;
/// Assumed clock in kHz of a device that does not report its clock.
const USUAL_CLOCK: u64 = 1_500_000;

/// Properties of a GPU, as the driver reports them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuInfo {
    /// The driver's index from 0, among the devices that `CUDA_VISIBLE_DEVICES` leaves.
    pub ordinal: u32,
    /// For example `NVIDIA H200`.
    pub name: String,
    /// Architecture that kernels are compiled for.
    pub arch: Arch,
    /// Total memory in bytes.
    pub memory_bytes: u64,
    pub multiprocessors: u32,
    /// Clock of the multiprocessors in kHz; 0 if the driver does not report it.
    pub clock_khz: u32,
    /// Maximum bytes of shared memory for one block.
    pub shared_bytes: u32,
    /// Bytes of the L2 cache.
    pub l2_bytes: u32,
    /// Whether the device shares the host's memory, so that the host's use reduces the device's free
    /// memory.
    pub unified: bool,
}

impl GpuInfo {
    /// Estimates the multiply-adds per second of prompt computation.
    pub fn compute(&self) -> u64 {
        let kilohertz = if self.clock_khz == 0 { USUAL_CLOCK } else { u64::from(self.clock_khz) };
        u64::from(self.multiprocessors).saturating_mul(kilohertz).saturating_mul(1000 * PRODUCTS_PER_CYCLE)
    }
}

/// Returns the driver's CUDA version as 1000 times the major plus 10 times the minor number: 13000 for
/// 13.0.
///
/// # Errors
/// [`CudaError::Missing`]; [`CudaError::Version`] for a driver older than CUDA 13.0.
pub fn driver_version() -> Result<i32, CudaError> {
    version_of(Driver::here()?)
}

fn version_of(driver: &Driver) -> Result<i32, CudaError> {
    let mut version = 0;
    // SAFETY: the pointer is to a local integer. The call does not need cuInit.
    driver.check_before_context("cuDriverGetVersion", unsafe { (driver.version)(&raw mut version) })?;
    if version < library::DRIVER_VERSION {
        let found = format!("{}.{}", version / 1000, version % 1000 / 10);
        return Err(CudaError::Version {
            library: "CUDA driver",
            found,
            required: "13.0 (driver 580) or newer",
        });
    }
    Ok(version)
}

/// Returns all GPUs of this machine that `CUDA_VISIBLE_DEVICES` leaves.
///
/// # Errors
/// As [`driver_version`]; [`CudaError::Call`] if the driver finds no device or does not start.
pub fn gpus() -> Result<Vec<GpuInfo>, CudaError> {
    let driver = Driver::here()?;
    (0..count(driver)?).map(|ordinal| Ok(describe(driver, ordinal)?.1)).collect()
}

/// Returns the PCI address of a GPU, such as `0000:01:00.0`, by which other libraries find it.
///
/// # Errors
/// As [`gpus`]; [`CudaError::Call`] for an ordinal without a device.
pub fn pci_address(ordinal: u32) -> Result<String, CudaError> {
    let driver = Driver::here()?;
    count(driver)?;
    let (device, _) = describe(driver, c_int::try_from(ordinal).unwrap_or(c_int::MAX))?;
    let mut text: [c_char; NAME_BYTES] = [0; NAME_BYTES];
    // SAFETY: the buffer has the length that the call gets; the driver has just returned the device.
    let status = unsafe { (driver.device_pci_address)(text.as_mut_ptr(), NAME_BYTES as c_int, device) };
    driver.check_before_context("cuDeviceGetPCIBusId", status)?;
    text[NAME_BYTES - 1] = 0;
    // SAFETY: the buffer ends with a zero, which was set above.
    Ok(unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned())
}

/// Initialises the driver and returns the number of devices.
fn count(driver: &Driver) -> Result<c_int, CudaError> {
    version_of(driver)?;
    // SAFETY: the only argument is a number that must be 0.
    driver.check_before_context("cuInit", unsafe { (driver.init)(0) })?;
    let mut count = 0;
    // SAFETY: the pointer is to a local integer.
    driver.check_before_context("cuDeviceGetCount", unsafe { (driver.device_count)(&raw mut count) })?;
    Ok(count)
}

fn describe(driver: &Driver, ordinal: c_int) -> Result<(sys::CUdevice, GpuInfo), CudaError> {
    use sys::CUdevice_attribute as Attribute;
    let mut device = 0;
    // SAFETY: the pointer is to a local integer.
    driver.check_before_context("cuDeviceGet", unsafe { (driver.device)(&raw mut device, ordinal) })?;
    let attribute = |attribute: Attribute| {
        let mut value = 0;
        // SAFETY: the driver has just returned this device; the pointer is to a local integer.
        let status = unsafe { (driver.device_attribute)(&raw mut value, attribute, device) };
        driver.check_before_context("cuDeviceGetAttribute", status).map(|()| c_int::unsigned_abs(value))
    };
    let mut memory = 0;
    // SAFETY: as above.
    driver.check_before_context("cuDeviceTotalMem", unsafe {
        (driver.device_memory)(&raw mut memory, device)
    })?;
    let mut name: [c_char; NAME_BYTES] = [0; NAME_BYTES];
    // SAFETY: the buffer has the length that the call gets.
    let status = unsafe { (driver.device_name)(name.as_mut_ptr(), NAME_BYTES as c_int, device) };
    driver.check_before_context("cuDeviceGetName", status)?;
    name[NAME_BYTES - 1] = 0;
    // SAFETY: the buffer ends with a zero, which was set above.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
    let info = GpuInfo {
        ordinal: ordinal.unsigned_abs(),
        name,
        arch: Arch::of(
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        memory_bytes: memory as u64,
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        // Not every driver reports it for every device, and only an estimate depends on it.
        clock_khz: attribute(Attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE).unwrap_or(0),
        shared_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        l2_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?,
        unified: attribute(Attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED)? != 0,
    };
    Ok((device, info))
}

/// The value `off` turns programmatic dependent launch off: a kernel starts after the one before it has ended. For
/// debugging.
const DEPENDENT_VARIABLE: &str = "KVASIR_CUDA_DEPENDENT_LAUNCHES";

/// A kernel and the limits of its launches.
#[derive(Debug)]
struct Kernel {
    function: sys::CUfunction,
    parameters: usize,
    /// Maximum bytes of dynamic shared memory of a launch.
    dynamic_shared: u32,
    /// Whether it waits for earlier kernels, so that it may start before they have ended.
    waits: bool,
}

#[derive(Debug)]
pub struct Gpu {
    driver: &'static Driver,
    info: GpuInfo,
    device: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
    /// Event that marks the end of the work to wait for.
    done: sys::CUevent,
    longest_wait: Duration,
    staging: Option<Staging>,
    allocations: Allocations,
    modules: Vec<sys::CUmodule>,
    kernels: Vec<Kernel>,
    /// A forgotten graph leaves `None` at its index.
    graphs: Vec<Option<sys::CUgraphExec>>,
    recording: bool,
    /// Whether kernels that wait for earlier ones may start before those have ended.
    dependent_launches: bool,
    lost: Option<CudaError>,
    /// Set after a wait that did not end. Any further call of the driver may never return.
    hung: bool,
}

// SAFETY: the pointers are the driver's handles. Any thread may use them once the context is current on
// that thread, and every call makes it current first. `&mut self` prevents two threads from using them at
// once, and no other value shares them.
unsafe impl Send for Gpu {}

impl Gpu {
    /// Opens a GPU.
    ///
    /// # Errors
    /// As [`gpus`]; [`CudaError::Call`] for an ordinal without a device; [`CudaError::Invalid`] for a value of
    /// `KVASIR_CUDA_DEPENDENT_LAUNCHES` other than `on` and `off`.
    pub fn open(ordinal: u32) -> Result<Self, CudaError> {
        let value = std::env::var_os(DEPENDENT_VARIABLE).unwrap_or_default();
        let mut gpu = Self::open_with(Driver::here()?, ordinal, LONGEST_WAIT)?;
        gpu.dependent_launches = match value.to_str() {
            Some("" | "on") => true,
            Some("off") => false,
            _ => {
                let what = format!("{DEPENDENT_VARIABLE} is {value:?}, neither `on` nor `off`");
                return Err(CudaError::Invalid { what });
            }
        };
        Ok(gpu)
    }

    fn open_with(driver: &'static Driver, ordinal: u32, longest_wait: Duration) -> Result<Self, CudaError> {
        count(driver)?;
        let (device, info) = describe(driver, c_int::try_from(ordinal).unwrap_or(c_int::MAX))?;
        // SAFETY: the driver has just returned this device. If other code in this process already uses the
        // primary context, the context keeps its flags.
        let set = unsafe { (driver.set_context_flags)(device, SCHEDULE_BLOCKING) };
        if set != api::PRIMARY_CONTEXT_ACTIVE {
            driver.check_before_context("cuDevicePrimaryCtxSetFlags", set)?;
        }
        let mut context = std::ptr::null_mut();
        // SAFETY: as above; released when `self` is dropped.
        let retained = unsafe { (driver.retain_context)(&raw mut context, device) };
        driver.check_before_context("cuDevicePrimaryCtxRetain", retained)?;
        let mut gpu = Self {
            driver,
            info,
            device,
            context,
            stream: std::ptr::null_mut(),
            done: std::ptr::null_mut(),
            longest_wait,
            staging: None,
            allocations: Allocations::default(),
            modules: Vec::new(),
            kernels: Vec::new(),
            graphs: Vec::new(),
            recording: false,
            dependent_launches: true,
            lost: None,
            hung: false,
        };
        gpu.enter()?;
        // SAFETY: the pointers are to local handles, and the context is current.
        let created = unsafe { (driver.create_stream)(&raw mut gpu.stream, NON_BLOCKING) };
        gpu.check("cuStreamCreate", created)?;
        // SAFETY: as above.
        let created = unsafe { (driver.create_event)(&raw mut gpu.done, wait::EVENT_FLAGS) };
        gpu.check("cuEventCreate", created)?;
        let staging = Staging::new(driver, gpu.stream, longest_wait);
        gpu.staging = Some(gpu.keep(staging)?);
        Ok(gpu)
    }

    pub fn info(&self) -> &GpuInfo {
        &self.info
    }

    /// Returns the bytes of memory that can still be allocated.
    ///
    /// # Errors
    /// [`CudaError::Lost`].
    pub fn free_bytes(&mut self) -> Result<u64, CudaError> {
        self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both pointers are to local numbers.
        let status = unsafe { (self.driver.memory_info)(&raw mut free, &raw mut total) };
        self.check("cuMemGetInfo", status)?;
        Ok(free as u64)
    }

    /// Measures the bytes per second that device-to-device copies read and write.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`]; errors of the driver.
    pub fn copy_bandwidth(&mut self) -> Result<f64, CudaError> {
        let free = self.free_bytes()?;
        let bytes = COPY_BYTES.min(usize::try_from(free / 4).unwrap_or(COPY_BYTES));
        let (from, to) = (self.allocate(bytes)?, self.allocate(bytes)?);
        self.fill(from, 1, bytes)?;
        // The first copy brings the device to its clock.
        self.copy(from, to, bytes)?;
        self.synchronize()?;
        let started = Instant::now();
        (0..TIMED_COPIES).try_for_each(|_| self.copy(from, to, bytes))?;
        self.synchronize()?;
        let seconds = started.elapsed().as_secs_f64() / f64::from(TIMED_COPIES);
        self.free(from)?;
        self.free(to)?;
        Ok(2.0 * bytes as f64 / seconds)
    }

    /// Makes the context current on this thread. Fails if the context is lost.
    fn enter(&mut self) -> Result<(), CudaError> {
        if let Some(lost) = &self.lost {
            return Err(lost.clone());
        }
        // SAFETY: the context was retained in `open` and is not released before `self` is dropped.
        let entered = unsafe { (self.driver.set_current)(self.context) };
        self.check("cuCtxSetCurrent", entered)
    }

    /// Like [`Self::enter`], for operations that a graph cannot contain.
    fn enter_unrecorded(&mut self, operation: &str) -> Result<(), CudaError> {
        if self.recording {
            return Err(CudaError::Invalid { what: format!("{operation} while a graph is recorded") });
        }
        self.enter()
    }

    /// Converts a status to a result, and stores a fatal error.
    fn check(&mut self, call: &'static str, status: u32) -> Result<(), CudaError> {
        let checked = self.driver.check(call, status);
        self.keep(checked)
    }

    /// Stores an error after which no call can succeed.
    fn keep<T>(&mut self, result: Result<T, CudaError>) -> Result<T, CudaError> {
        result.inspect_err(|error| {
            if let CudaError::Lost { .. } = error {
                self.lost.get_or_insert_with(|| error.clone());
                self.hung |= wait::is_hang(error);
            }
        })
    }

    /// Waits for all work of the stream.
    fn drain(&mut self) -> Result<(), CudaError> {
        // SAFETY: both were created in `open` and are destroyed when `self` is dropped.
        let recorded = unsafe { (self.driver.record_event)(self.done, self.stream) };
        self.check("cuEventRecord", recorded)?;
        let waited = wait::event(self.driver, self.done, self.longest_wait);
        self.keep(waited)
    }

    /// Loads the CUBIN. If there is none, or the driver refuses it, the driver compiles the PTX.
    fn load_module(&mut self, compiled: &Compiled) -> Result<sys::CUmodule, CudaError> {
        let mut module = std::ptr::null_mut();
        if !compiled.cubin.is_empty() {
            if !compiled.cubin.starts_with(b"\x7fELF") {
                let what = format!("{} holds no machine code", compiled.source_name);
                return Err(CudaError::Invalid { what });
            }
            let image = compiled.cubin.as_ptr().cast();
            // SAFETY: an ELF image from NVRTC, verified by the cache's hash if it comes from there. The
            // driver copies it.
            let status = unsafe { (self.driver.load_module)(&raw mut module, image) };
            let refused = [api::NO_BINARY_FOR_GPU, api::INVALID_IMAGE].contains(&status);
            if !refused || compiled.ptx.is_empty() {
                return self.check("cuModuleLoadData", status).map(|()| module);
            }
            tracing::info!(
                source = compiled.source_name,
                "the driver refused cached machine code; it compiles the PTX instead"
            );
        }
        let without =
            |_| CudaError::Invalid { what: format!("{}: PTX with a zero byte", compiled.source_name) };
        let ptx = CString::new(compiled.ptx.as_str()).map_err(without)?;
        // SAFETY: a text that ends with a zero; the driver copies it.
        let status = unsafe { (self.driver.load_module)(&raw mut module, ptx.as_ptr().cast()) };
        self.check("cuModuleLoadData of PTX", status)?;
        Ok(module)
    }

    /// Looks up a kernel and allows it all shared memory that the device has for a block.
    fn find(&mut self, module: sys::CUmodule, compiled: &Compiled, name: &str) -> Result<Kernel, CudaError> {
        use sys::CUfunction_attribute as Attribute;
        let missing = || CudaError::NoKernel { name: name.into(), source_name: compiled.source_name.clone() };
        let c_name = CString::new(name).map_err(|_| missing())?;
        let driver = self.driver;
        let mut function = std::ptr::null_mut();
        // SAFETY: the module is loaded, and the text ends with a zero.
        match unsafe { (driver.function)(&raw mut function, module, c_name.as_ptr()) } {
            api::NOT_FOUND => return Err(missing()),
            other => self.check("cuModuleGetFunction", other)?,
        }
        let mut parameters = 0;
        loop {
            let (mut offset, mut size) = (0, 0);
            // SAFETY: the function's module stays loaded; both pointers are to local numbers.
            match unsafe { (driver.parameter)(function, parameters, &raw mut offset, &raw mut size) } {
                api::INVALID_VALUE => break,
                other => self.check("cuFuncGetParamInfo", other)?,
            }
            if size > size_of::<Argument>() || parameters >= MAX_PARAMETERS {
                let what = format!("{name}: parameter {parameters} has {size} bytes");
                return Err(CudaError::Invalid { what });
            }
            parameters += 1;
        }
        let mut declared = 0;
        // SAFETY: as above.
        let status = unsafe {
            (driver.function_attribute)(
                &raw mut declared,
                Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
                function,
            )
        };
        self.check("cuFuncGetAttribute", status)?;
        let dynamic_shared = self.info.shared_bytes.saturating_sub(declared.unsigned_abs());
        let attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: as above; the driver refuses a size that the device does not have.
        let set =
            unsafe { (driver.set_function_attribute)(function, attribute, dynamic_shared.cast_signed()) };
        self.check("cuFuncSetAttribute", set)?;
        Ok(Kernel { function, parameters, dynamic_shared, waits: compiled.arch.has_dependent_launches() })
    }
}

impl Device for Gpu {
    fn multiprocessors(&self) -> usize {
        self.info.multiprocessors as usize
    }

    fn load(&mut self, compiled: &Compiled, kernels: &[&str]) -> Result<Vec<KernelId>, CudaError> {
        self.enter_unrecorded("a module is loaded")?;
        let module = self.load_module(compiled)?;
        self.modules.push(module);
        let first = self.kernels.len();
        for name in kernels {
            let kernel = self.find(module, compiled, name)?;
            self.kernels.push(kernel);
        }
        Ok((first..self.kernels.len()).map(|index| KernelId(index as u32)).collect())
    }

    fn allocate(&mut self, bytes: usize) -> Result<DevicePtr, CudaError> {
        self.enter_unrecorded("memory is taken")?;
        // The driver does not support empty allocations.
        let bytes = bytes.max(1);
        let mut ptr = 0;
        // SAFETY: the pointer is to a local number. Only kernels and copies read the memory's contents.
        match unsafe { (self.driver.allocate)(&raw mut ptr, bytes) } {
            api::OUT_OF_MEMORY => {
                let free = self.free_bytes().unwrap_or(0);
                return Err(CudaError::OutOfMemory { requested: bytes, free: free as usize });
            }
            other => self.check("cuMemAlloc", other)?,
        }
        self.allocations.add(DevicePtr(ptr), bytes);
        Ok(DevicePtr(ptr))
    }

    fn free(&mut self, ptr: DevicePtr) -> Result<(), CudaError> {
        // Earlier work may still use the memory.
        self.synchronize()?;
        self.allocations.remove(ptr)?;
        // SAFETY: the memory was allocated here, and is no longer in `allocations`.
        let freed = unsafe { (self.driver.free)(ptr.0) };
        self.check("cuMemFree", freed)
    }

    fn upload(&mut self, to: DevicePtr, bytes: &[u8]) -> Result<(), CudaError> {
        self.enter_unrecorded("bytes are uploaded")?;
        self.allocations.check(to, bytes.len())?;
        let Some(staging) = &mut self.staging else { return Ok(()) };
        // SAFETY: the bytes lie inside one live allocation, as just checked; the context is current.
        let done = unsafe { staging.upload(to.0, bytes) };
        self.keep(done)
    }

    fn download(&mut self, from: DevicePtr, out: &mut [u8]) -> Result<(), CudaError> {
        self.enter_unrecorded("bytes are downloaded")?;
        self.allocations.check(from, out.len())?;
        let Some(staging) = &mut self.staging else { return Ok(()) };
        // SAFETY: as for `upload`.
        let done = unsafe { staging.download(from.0, out) };
        self.keep(done)
    }

    fn copy(&mut self, from: DevicePtr, to: DevicePtr, bytes: usize) -> Result<(), CudaError> {
        self.enter()?;
        self.allocations.check(from, bytes)?;
        self.allocations.check(to, bytes)?;
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: both ranges lie inside live allocations, because `free` waits for the stream.
        let copied = unsafe { (self.driver.copy)(to.0, from.0, bytes, self.stream) };
        self.check("cuMemcpyDtoDAsync", copied)
    }

    fn fill(&mut self, to: DevicePtr, value: u8, bytes: usize) -> Result<(), CudaError> {
        self.enter()?;
        self.allocations.check(to, bytes)?;
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: as for `copy`.
        let filled = unsafe { (self.driver.fill)(to.0, value, bytes, self.stream) };
        self.check("cuMemsetD8Async", filled)
    }

    fn launch(&mut self, launch: &Launch<'_>) -> Result<(), CudaError> {
        self.enter()?;
        let Launch { kernel, grid, block, shared_bytes, arguments } = *launch;
        let invalid = |what: String| Err(CudaError::Invalid { what });
        let Some(kernel) = self.kernels.get(kernel.0 as usize) else {
            return invalid(format!("kernel {} is not loaded", kernel.0));
        };
        if kernel.parameters != arguments.len() || arguments.len() > MAX_PARAMETERS {
            return invalid(format!("{} arguments for {} parameters", arguments.len(), kernel.parameters));
        }
        if shared_bytes > kernel.dynamic_shared {
            return invalid(format!(
                "{shared_bytes} bytes of shared memory, there are {}",
                kernel.dynamic_shared
            ));
        }
        let threads: u64 = block.iter().map(|n| u64::from(*n)).product();
        let beyond = grid.iter().zip(MAX_GRID).any(|(blocks, max)| *blocks > max);
        if grid.contains(&0) || beyond || threads == 0 || threads > MAX_THREADS {
            return invalid(format!("a launch of {grid:?} blocks of {block:?} threads"));
        }
        let mut pointers = [std::ptr::null_mut::<c_void>(); MAX_PARAMETERS];
        for (pointer, argument) in pointers.iter_mut().zip(arguments) {
            // The driver only reads, and only the bytes of the parameter: at most eight.
            *pointer = (&raw const argument.0).cast_mut().cast();
        }
        let function = kernel.function;
        let mut dependent = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: grid[0],
            gridDimY: grid[1],
            gridDimZ: grid[2],
            blockDimX: block[0],
            blockDimY: block[1],
            blockDimZ: block[2],
            sharedMemBytes: shared_bytes,
            hStream: self.stream,
            attrs: &raw mut dependent,
            numAttrs: u32::from(self.dependent_launches && kernel.waits),
        };
        // SAFETY: the function belongs to a loaded module, and there is a pointer to eight bytes for each
        // of its parameters, which the call copies, as it does the attribute. The kernel cannot access the
        // host's memory. Its accesses to device memory are checked when the interpreter runs the same
        // sources in tests; so is that it waits before the first one if it says so.
        let launched = unsafe {
            (self.driver.launch)(&raw const config, function, pointers.as_mut_ptr(), std::ptr::null_mut())
        };
        self.check("cuLaunchKernelEx", launched)
    }

    fn synchronize(&mut self) -> Result<(), CudaError> {
        self.enter_unrecorded("the host waits")?;
        self.drain()
    }

    fn begin_graph(&mut self) -> Result<(), CudaError> {
        self.enter_unrecorded("a graph is begun")?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is live.
        let status = unsafe { (self.driver.begin_capture)(self.stream, mode) };
        self.check("cuStreamBeginCapture", status)?;
        self.recording = true;
        Ok(())
    }

    fn end_graph(&mut self) -> Result<GraphId, CudaError> {
        if !std::mem::take(&mut self.recording) {
            return Err(CudaError::Invalid { what: "no graph is recorded".into() });
        }
        self.enter()?;
        let driver = self.driver;
        let mut graph = std::ptr::null_mut();
        // SAFETY: the stream is live and is being captured.
        let ended = unsafe { (driver.end_capture)(self.stream, &raw mut graph) };
        self.check("cuStreamEndCapture", ended)?;
        let mut ready = std::ptr::null_mut();
        // SAFETY: the driver has just returned this graph; the call has no flags.
        let instantiated = unsafe { (driver.instantiate)(&raw mut ready, graph, 0) };
        // SAFETY: as above; the instantiated graph does not need it.
        let destroyed = unsafe { (driver.destroy_graph)(graph) };
        self.check("cuGraphInstantiate", instantiated)?;
        let index = self.graphs.iter().position(Option::is_none).unwrap_or(self.graphs.len());
        match self.graphs.get_mut(index) {
            Some(free) => *free = Some(ready),
            None => self.graphs.push(Some(ready)),
        }
        self.check("cuGraphDestroy", destroyed)?;
        Ok(GraphId(index as u32))
    }

    fn replay(&mut self, graph: GraphId) -> Result<(), CudaError> {
        self.enter_unrecorded("a graph is run")?;
        let Some(graph) = self.graphs.get(graph.0 as usize).copied().flatten() else {
            return Err(CudaError::Invalid { what: format!("graph {} is not known", graph.0) });
        };
        // SAFETY: created by `end_graph` and destroyed when `self` is dropped. For its memory accesses see
        // `launch`.
        let launched = unsafe { (self.driver.launch_graph)(graph, self.stream) };
        self.check("cuGraphLaunch", launched)
    }

    fn forget(&mut self, graph: GraphId) {
        // The graph may still be running. In a lost context it is freed with the context.
        if self.synchronize().is_ok()
            && let Some(graph) = self.graphs.get_mut(graph.0 as usize).and_then(Option::take)
        {
            // SAFETY: created by `end_graph`, taken out of `graphs`, and not running.
            let _ = unsafe { (self.driver.destroy_instance)(graph) };
        }
    }
}

impl Drop for Gpu {
    /// Frees all resources. Errors of a lost context are ignored; the context is freed with the process.
    /// Frees nothing if the device hangs, since those calls may not return.
    fn drop(&mut self) {
        let driver = self.driver;
        if self.lost.is_none() && !self.stream.is_null() && !self.done.is_null() && self.enter().is_ok() {
            let _ = self.drain();
        }
        if self.hung {
            return;
        }
        // SAFETY: each handle was created here and is destroyed once. The stream is idle or its context is
        // lost before its resources are destroyed. The context goes last.
        unsafe {
            let _ = (driver.set_current)(self.context);
            for graph in self.graphs.drain(..).flatten() {
                let _ = (driver.destroy_instance)(graph);
            }
            if let Some(staging) = self.staging.take() {
                staging.destroy();
            }
            for ptr in self.allocations.take() {
                let _ = (driver.free)(ptr.0);
            }
            for module in self.modules.drain(..) {
                let _ = (driver.unload_module)(module);
            }
            if !self.done.is_null() {
                let _ = (driver.destroy_event)(self.done);
            }
            if !self.stream.is_null() {
                let _ = (driver.destroy_stream)(self.stream);
            }
            let _ = (driver.release_context)(self.device);
        }
    }
}
