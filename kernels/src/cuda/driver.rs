//! A GPU behind NVIDIA's driver.
//!
//! One context, one stream; no events of cudarc's own. What the host copies passes through two pinned buffers, so that
//! no copy reads memory that its caller may have changed since. An error that leaves the context useless (a kernel that
//! read where nothing is, a fault of the hardware) is [`CudaError::Lost`], then and at every later call.

#![allow(unsafe_code)]

use super::device::GraphId;
use super::{Arch, Argument, Compiled, CudaError, Device, DevicePtr, KernelId, Launch, library};
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;
use memory::Allocations;
use staging::Staging;
use std::ffi::{CString, c_void};

mod memory;
mod staging;

/// Most parameters of a kernel.
const MAX_PARAMETERS: usize = 64;
/// Threads of a block, on every device there is.
const MAX_THREADS: u64 = 1024;

/// What the driver says of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuInfo {
    /// As the driver counts, from 0.
    pub ordinal: u32,
    /// Such as `NVIDIA H200`.
    pub name: String,
    /// What kernels are compiled for.
    pub arch: Arch,
    /// Bytes of memory, all of it.
    pub memory_bytes: u64,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of shared memory that one block may have.
    pub shared_bytes: u32,
    /// Bytes of the level 2 cache.
    pub l2_bytes: u32,
    /// Whether its memory is the host's: then what the host uses is missing on the device.
    pub unified: bool,
}

/// Of the driver, 1000 times the major and 10 times the minor version of CUDA: 13000 for 13.0.
///
/// # Errors
/// [`CudaError::Missing`], [`CudaError::Version`] for a driver older than CUDA 13.0.
pub fn driver_version() -> Result<i32, CudaError> {
    library::load_driver()?;
    let mut version = 0;
    // SAFETY: the library is there; the pointer is to an integer of ours. Needs no cuInit.
    unsafe { sys::cuDriverGetVersion(&raw mut version) }
        .result()
        .map_err(|error| failed("cuDriverGetVersion", error))?;
    if version < library::DRIVER_VERSION {
        let found = format!("{}.{}", version / 1000, version % 1000 / 10);
        return Err(CudaError::Version {
            library: "CUDA driver",
            found,
            wanted: "13.0 (driver 580) or newer",
        });
    }
    Ok(version)
}

/// All GPUs of this machine.
///
/// # Errors
/// As [`driver_version`]; [`CudaError::Call`] where the driver finds no device or does not start.
pub fn gpus() -> Result<Vec<GpuInfo>, CudaError> {
    driver_version()?;
    result::init().map_err(|error| failed("cuInit", error))?;
    let count = result::device::get_count().map_err(|error| failed("cuDeviceGetCount", error))?;
    (0..count).map(|ordinal| Ok(describe(ordinal)?.1)).collect()
}

fn describe(ordinal: i32) -> Result<(sys::CUdevice, GpuInfo), CudaError> {
    use sys::CUdevice_attribute as Attribute;
    let device = result::device::get(ordinal).map_err(|error| failed("cuDeviceGet", error))?;
    let attribute = |attribute| {
        // SAFETY: a device that the driver has just given.
        let value = unsafe { result::device::get_attribute(device, attribute) };
        value.map(i32::unsigned_abs).map_err(|error| failed("cuDeviceGetAttribute", error))
    };
    // SAFETY: as above.
    let memory =
        unsafe { result::device::total_mem(device) }.map_err(|error| failed("cuDeviceTotalMem", error))?;
    let info = GpuInfo {
        ordinal: ordinal.unsigned_abs(),
        name: result::device::get_name(device).map_err(|error| failed("cuDeviceGetName", error))?,
        arch: Arch::of(
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        memory_bytes: memory as u64,
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        shared_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        l2_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?,
        unified: attribute(Attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED)? != 0,
    };
    Ok((device, info))
}

/// A kernel, and what a launch of it must keep to.
#[derive(Debug)]
struct Kernel {
    function: sys::CUfunction,
    parameters: usize,
    /// Bytes of shared memory that a launch may add to what it declares.
    dynamic_shared: u32,
}

/// See the module.
#[derive(Debug)]
pub struct Gpu {
    info: GpuInfo,
    device: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
    staging: Option<Staging>,
    allocations: Allocations,
    modules: Vec<sys::CUmodule>,
    kernels: Vec<Kernel>,
    /// Those forgotten have left their places.
    graphs: Vec<Option<sys::CUgraphExec>>,
    recording: bool,
    lost: Option<CudaError>,
}

// SAFETY: the pointers are the driver's handles, which any thread may use once the context is current there; every call
// makes it so first. `&mut self` keeps two threads from using them at once, and nothing is shared with another value.
unsafe impl Send for Gpu {}

impl Gpu {
    /// Takes a GPU into use.
    ///
    /// # Errors
    /// As [`gpus`]; [`CudaError::Call`] for an ordinal that there is not.
    pub fn open(ordinal: u32) -> Result<Self, CudaError> {
        driver_version()?;
        result::init().map_err(|error| failed("cuInit", error))?;
        let (device, info) = describe(i32::try_from(ordinal).unwrap_or(i32::MAX))?;
        // SAFETY: a device that the driver has just given; released when this is dropped.
        let context = unsafe { result::primary_ctx::retain(device) };
        let context = context.map_err(|error| failed("cuDevicePrimaryCtxRetain", error))?;
        let mut gpu = Self {
            info,
            device,
            context,
            stream: std::ptr::null_mut(),
            staging: None,
            allocations: Allocations::default(),
            modules: Vec::new(),
            kernels: Vec::new(),
            graphs: Vec::new(),
            recording: false,
            lost: None,
        };
        gpu.enter()?;
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking);
        gpu.stream = gpu.check("cuStreamCreate", stream)?;
        let staging = Staging::new(gpu.stream);
        gpu.staging = Some(gpu.check("cuMemHostAlloc", staging)?);
        Ok(gpu)
    }

    /// What it is.
    pub fn info(&self) -> &GpuInfo {
        &self.info
    }

    /// Bytes of memory that can still be taken.
    ///
    /// # Errors
    /// [`CudaError::Lost`].
    pub fn free_bytes(&mut self) -> Result<u64, CudaError> {
        self.enter()?;
        let (free, _) = self.check("cuMemGetInfo", result::mem_get_info())?;
        Ok(free as u64)
    }

    /// Makes the context this thread's, unless it is lost.
    fn enter(&mut self) -> Result<(), CudaError> {
        if let Some(lost) = &self.lost {
            return Err(lost.clone());
        }
        // SAFETY: retained in `open` and not released before this is dropped.
        let entered = unsafe { result::ctx::set_current(self.context) };
        self.check("cuCtxSetCurrent", entered)
    }

    /// As [`Self::enter`], for what a graph cannot hold.
    fn enter_unrecorded(&mut self, what: &str) -> Result<(), CudaError> {
        if self.recording {
            return Err(CudaError::Invalid { what: format!("{what} while a graph is recorded") });
        }
        self.enter()
    }

    /// Types an error, and remembers one that nothing can follow.
    fn check<T>(&mut self, call: &'static str, result: Result<T, DriverError>) -> Result<T, CudaError> {
        result.map_err(|error| {
            let failed = failed(call, error);
            if matches!(failed, CudaError::Lost { .. }) {
                self.lost = Some(failed.clone());
            }
            failed
        })
    }

    /// Looks a kernel up, and lets it have all the shared memory that the device has for a block.
    fn find(&mut self, module: sys::CUmodule, compiled: &Compiled, name: &str) -> Result<Kernel, CudaError> {
        use sys::CUfunction_attribute as Attribute;
        let missing = || CudaError::NoKernel { name: name.into(), source_name: compiled.source_name.clone() };
        let c_name = CString::new(name).map_err(|_| missing())?;
        // SAFETY: a module that was loaded and not unloaded.
        let function = match unsafe { result::module::get_function(module, c_name) } {
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_FOUND)) => return Err(missing()),
            other => self.check("cuModuleGetFunction", other)?,
        };
        let mut parameters = 0;
        loop {
            let (mut offset, mut size) = (0, 0);
            // SAFETY: a function of a module that stays loaded; both pointers are to numbers of ours.
            let found =
                unsafe { sys::cuFuncGetParamInfo(function, parameters, &raw mut offset, &raw mut size) };
            match found {
                sys::CUresult::CUDA_ERROR_INVALID_VALUE => break,
                other => self.check("cuFuncGetParamInfo", other.result())?,
            }
            if size > size_of::<Argument>() {
                return Err(CudaError::Invalid { what: format!("{name} has a parameter of {size} bytes") });
            }
            parameters += 1;
        }
        // SAFETY: as above.
        let declared = unsafe {
            result::function::get_function_attribute(function, Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)
        };
        let declared = self.check("cuFuncGetAttribute", declared)?.unsigned_abs();
        let dynamic_shared = self.info.shared_bytes.saturating_sub(declared);
        // SAFETY: as above; the driver refuses a size that it does not have.
        let set = unsafe {
            result::function::set_function_attribute(
                function,
                Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                dynamic_shared.cast_signed(),
            )
        };
        self.check("cuFuncSetAttribute", set)?;
        Ok(Kernel { function, parameters, dynamic_shared })
    }
}

impl Device for Gpu {
    fn multiprocessors(&self) -> usize {
        self.info.multiprocessors as usize
    }

    fn load(&mut self, compiled: &Compiled, kernels: &[&str]) -> Result<Vec<KernelId>, CudaError> {
        self.enter_unrecorded("a module is loaded")?;
        if !compiled.cubin.starts_with(b"\x7fELF") {
            return Err(CudaError::Invalid {
                what: format!("{} holds no machine code", compiled.source_name),
            });
        }
        // SAFETY: an ELF image as NVRTC made it (and as the cache's hash says that it still is); the driver copies it.
        let module = unsafe { result::module::load_data(compiled.cubin.as_ptr().cast::<c_void>()) };
        let module = self.check("cuModuleLoadData", module)?;
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
        // The driver has no empty allocations.
        let bytes = bytes.max(1);
        // SAFETY: what is in the memory is read by kernels and copies only.
        let ptr = match unsafe { result::malloc_sync(bytes) } {
            Err(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => {
                let (free, _) = result::mem_get_info().unwrap_or((0, 0));
                return Err(CudaError::OutOfMemory { wanted: bytes, free });
            }
            other => self.check("cuMemAlloc", other)?,
        };
        self.allocations.add(DevicePtr(ptr), bytes);
        Ok(DevicePtr(ptr))
    }

    fn free(&mut self, ptr: DevicePtr) -> Result<(), CudaError> {
        // What was asked for before may still use it.
        self.synchronize()?;
        self.allocations.remove(ptr)?;
        // SAFETY: it was allocated here, and is known no longer.
        let freed = unsafe { result::free_sync(ptr.0) };
        self.check("cuMemFree", freed)
    }

    fn upload(&mut self, to: DevicePtr, bytes: &[u8]) -> Result<(), CudaError> {
        self.enter_unrecorded("bytes are uploaded")?;
        self.allocations.check(to, bytes.len())?;
        let Some(staging) = &mut self.staging else { return Ok(()) };
        // SAFETY: the bytes lie inside of one allocation that lives, as just checked; the context is current.
        let done = unsafe { staging.upload(to.0, bytes) };
        self.check("cuMemcpyHtoDAsync", done)
    }

    fn download(&mut self, from: DevicePtr, out: &mut [u8]) -> Result<(), CudaError> {
        self.enter_unrecorded("bytes are downloaded")?;
        self.allocations.check(from, out.len())?;
        let Some(staging) = &mut self.staging else { return Ok(()) };
        // SAFETY: as for `upload`.
        let done = unsafe { staging.download(from.0, out) };
        self.check("cuMemcpyDtoHAsync", done)
    }

    fn copy(&mut self, from: DevicePtr, to: DevicePtr, bytes: usize) -> Result<(), CudaError> {
        self.enter()?;
        self.allocations.check(from, bytes)?;
        self.allocations.check(to, bytes)?;
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: both ends lie inside of allocations that live: `free` waits for the stream.
        let copied = unsafe { result::memcpy_dtod_async(to.0, from.0, bytes, self.stream) };
        self.check("cuMemcpyDtoDAsync", copied)
    }

    fn fill(&mut self, to: DevicePtr, value: u8, bytes: usize) -> Result<(), CudaError> {
        self.enter()?;
        self.allocations.check(to, bytes)?;
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: as for `copy`.
        let filled = unsafe { result::memset_d8_async(to.0, value, bytes, self.stream) };
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
        if grid.contains(&0) || threads == 0 || threads > MAX_THREADS {
            return invalid(format!("a launch of {grid:?} blocks of {block:?} threads"));
        }
        let mut pointers = [std::ptr::null_mut::<c_void>(); MAX_PARAMETERS];
        for (pointer, argument) in pointers.iter_mut().zip(arguments) {
            // The driver only reads, as many bytes as the parameter has: eight at most.
            *pointer = (&raw const argument.0).cast_mut().cast();
        }
        let function = kernel.function;
        let [gx, gy, gz] = grid;
        let [bx, by, bz] = block;
        // SAFETY: a function of a loaded module, with a pointer to eight bytes for each of its parameters, which the
        // call copies. What the kernel does to the device's memory is checked where its sources are run by the
        // interpreter; the host's memory it cannot reach.
        let launched = unsafe {
            result::launch_kernel(
                function,
                (gx, gy, gz),
                (bx, by, bz),
                shared_bytes,
                self.stream,
                &mut pointers,
            )
        };
        self.check("cuLaunchKernel", launched)
    }

    fn synchronize(&mut self) -> Result<(), CudaError> {
        self.enter_unrecorded("the host waits")?;
        // SAFETY: made in `open`, destroyed when this is dropped.
        let done = unsafe { result::stream::synchronize(self.stream) };
        self.check("cuStreamSynchronize", done)
    }

    fn begin_graph(&mut self) -> Result<(), CudaError> {
        self.enter_unrecorded("a graph is begun")?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives.
        let begun = unsafe { result::stream::begin_capture(self.stream, mode) };
        self.check("cuStreamBeginCapture", begun)?;
        self.recording = true;
        Ok(())
    }

    fn end_graph(&mut self) -> Result<GraphId, CudaError> {
        if !std::mem::take(&mut self.recording) {
            return Err(CudaError::Invalid { what: "no graph is recorded".into() });
        }
        self.enter()?;
        // SAFETY: the stream lives and is being captured.
        let graph = unsafe { result::stream::end_capture(self.stream) };
        let graph = self.check("cuStreamEndCapture", graph)?;
        // SAFETY: a graph that the driver has just given, with no flags.
        let ready = unsafe { result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0)) };
        // SAFETY: as above; what was made from it lives on without it.
        let destroyed = unsafe { result::graph::destroy(graph) };
        let ready = self.check("cuGraphInstantiate", ready)?;
        let place = self.graphs.iter().position(Option::is_none).unwrap_or(self.graphs.len());
        match self.graphs.get_mut(place) {
            Some(free) => *free = Some(ready),
            None => self.graphs.push(Some(ready)),
        }
        self.check("cuGraphDestroy", destroyed)?;
        Ok(GraphId(place as u32))
    }

    fn replay(&mut self, graph: GraphId) -> Result<(), CudaError> {
        self.enter_unrecorded("a graph is run")?;
        let Some(graph) = self.graphs.get(graph.0 as usize).copied().flatten() else {
            return Err(CudaError::Invalid { what: format!("graph {} is not known", graph.0) });
        };
        // SAFETY: made by `end_graph`, destroyed when this is dropped; what it touches is as for `launch`.
        let launched = unsafe { result::graph::launch(graph, self.stream) };
        self.check("cuGraphLaunch", launched)
    }

    fn forget(&mut self, graph: GraphId) {
        // It may still be running. Of a lost context nothing is given back but with the context.
        if self.synchronize().is_ok()
            && let Some(graph) = self.graphs.get_mut(graph.0 as usize).and_then(Option::take)
        {
            // SAFETY: made by `end_graph`, taken out of its place, and not running.
            let _ = unsafe { result::graph::exec_destroy(graph) };
        }
    }
}

impl Drop for Gpu {
    /// Gives everything back. An error of a lost context changes nothing: the context goes with the process.
    fn drop(&mut self) {
        // SAFETY: each handle was made here and is destroyed once; the stream is idle, or its context lost, before
        // what it uses goes; the context goes last.
        unsafe {
            let _ = result::ctx::set_current(self.context);
            if !self.stream.is_null() {
                let _ = result::stream::synchronize(self.stream);
            }
            for graph in self.graphs.drain(..).flatten() {
                let _ = result::graph::exec_destroy(graph);
            }
            if let Some(staging) = self.staging.take() {
                staging.destroy();
            }
            for ptr in self.allocations.take() {
                let _ = result::free_sync(ptr.0);
            }
            for module in self.modules.drain(..) {
                let _ = result::module::unload(module);
            }
            if !self.stream.is_null() {
                let _ = result::stream::destroy(self.stream);
            }
            let _ = result::primary_ctx::release(self.device);
        }
    }
}

/// What a failed call means.
fn failed(call: &'static str, DriverError(result): DriverError) -> CudaError {
    use sys::CUresult as R;
    let status = format!("{result:?}");
    match result {
        R::CUDA_ERROR_INVALID_VALUE | R::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES => {
            CudaError::Invalid { what: format!("{call}: {status}") }
        }
        R::CUDA_ERROR_ILLEGAL_ADDRESS
        | R::CUDA_ERROR_LAUNCH_TIMEOUT
        | R::CUDA_ERROR_CONTEXT_IS_DESTROYED
        | R::CUDA_ERROR_ASSERT
        | R::CUDA_ERROR_HARDWARE_STACK_ERROR
        | R::CUDA_ERROR_ILLEGAL_INSTRUCTION
        | R::CUDA_ERROR_MISALIGNED_ADDRESS
        | R::CUDA_ERROR_INVALID_ADDRESS_SPACE
        | R::CUDA_ERROR_INVALID_PC
        | R::CUDA_ERROR_LAUNCH_FAILED
        | R::CUDA_ERROR_ECC_UNCORRECTABLE
        | R::CUDA_ERROR_NVLINK_UNCORRECTABLE
        | R::CUDA_ERROR_DEINITIALIZED
        | R::CUDA_ERROR_SYSTEM_NOT_READY
        | R::CUDA_ERROR_EXTERNAL_DEVICE
        | R::CUDA_ERROR_UNKNOWN => CudaError::Lost { call, status },
        _ => CudaError::Call { call, status },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ends_a_context_is_told_from_what_fails_a_call() {
        use sys::CUresult as R;
        let of = |result| failed("call", DriverError(result));
        assert!(matches!(of(R::CUDA_ERROR_ILLEGAL_ADDRESS), CudaError::Lost { call: "call", .. }));
        assert!(matches!(of(R::CUDA_ERROR_ECC_UNCORRECTABLE), CudaError::Lost { .. }));
        assert!(matches!(of(R::CUDA_ERROR_INVALID_VALUE), CudaError::Invalid { .. }));
        assert!(matches!(of(R::CUDA_ERROR_NO_BINARY_FOR_GPU), CudaError::Call { .. }));
        assert_eq!(of(R::CUDA_ERROR_NO_DEVICE).to_string(), "call: CUDA_ERROR_NO_DEVICE");
    }

    /// Where there is a driver and a GPU, opening works; where not, it says what is missing. Neither ends the process.
    #[test]
    fn without_a_driver_opening_says_what_was_looked_for() {
        match Gpu::open(0) {
            Ok(gpu) => assert!(gpu.info().memory_bytes > 0),
            Err(CudaError::Missing { library, looked_for }) => {
                assert_eq!(library, "CUDA driver");
                assert!(looked_for.iter().any(|name| name.contains("libcuda.so")), "{looked_for:?}");
            }
            Err(other) => assert!(!other.to_string().is_empty()),
        }
    }
}
