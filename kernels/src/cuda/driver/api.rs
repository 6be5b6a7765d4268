//! The functions of NVIDIA's driver that are called, and what their statuses mean.

#![allow(unsafe_code)]

use super::super::CudaError;
use super::super::library::{self, functions};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

/// A handle of the driver.
pub(super) type Handle = *mut c_void;

functions! {
    /// NVIDIA's driver.
    Driver of "CUDA driver" {
        init = c"cuInit" (c_uint);
        version = c"cuDriverGetVersion" (*mut c_int);
        error_name = c"cuGetErrorName" (u32, *mut *const c_char);
        device_count = c"cuDeviceGetCount" (*mut c_int);
        device = c"cuDeviceGet" (*mut c_int, c_int);
        device_name = c"cuDeviceGetName" (*mut c_char, c_int, c_int);
        device_memory = c"cuDeviceTotalMem_v2" (*mut usize, c_int);
        device_attribute = c"cuDeviceGetAttribute" (*mut c_int, c_uint, c_int);
        set_context_flags = c"cuDevicePrimaryCtxSetFlags_v2" (c_int, c_uint);
        retain_context = c"cuDevicePrimaryCtxRetain" (*mut Handle, c_int);
        release_context = c"cuDevicePrimaryCtxRelease_v2" (c_int);
        set_current = c"cuCtxSetCurrent" (Handle);
        memory_info = c"cuMemGetInfo_v2" (*mut usize, *mut usize);
        allocate = c"cuMemAlloc_v2" (*mut u64, usize);
        free = c"cuMemFree_v2" (u64);
        allocate_host = c"cuMemHostAlloc" (*mut Handle, usize, c_uint);
        free_host = c"cuMemFreeHost" (Handle);
        upload = c"cuMemcpyHtoDAsync_v2" (u64, *const c_void, usize, Handle);
        download = c"cuMemcpyDtoHAsync_v2" (*mut c_void, u64, usize, Handle);
        copy = c"cuMemcpyDtoDAsync_v2" (u64, u64, usize, Handle);
        fill = c"cuMemsetD8Async" (u64, u8, usize, Handle);
        load_module = c"cuModuleLoadData" (*mut Handle, *const c_void);
        unload_module = c"cuModuleUnload" (Handle);
        function = c"cuModuleGetFunction" (*mut Handle, Handle, *const c_char);
        parameter = c"cuFuncGetParamInfo" (Handle, usize, *mut usize, *mut usize);
        function_attribute = c"cuFuncGetAttribute" (*mut c_int, c_uint, Handle);
        set_function_attribute = c"cuFuncSetAttribute" (Handle, c_uint, c_int);
        launch = c"cuLaunchKernel" (
            Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void, *mut *mut c_void
        );
        create_stream = c"cuStreamCreate" (*mut Handle, c_uint);
        destroy_stream = c"cuStreamDestroy_v2" (Handle);
        begin_capture = c"cuStreamBeginCapture_v2" (Handle, c_uint);
        end_capture = c"cuStreamEndCapture" (Handle, *mut Handle);
        instantiate = c"cuGraphInstantiateWithFlags" (*mut Handle, Handle, u64);
        destroy_graph = c"cuGraphDestroy" (Handle);
        launch_graph = c"cuGraphLaunch" (Handle, Handle);
        destroy_instance = c"cuGraphExecDestroy" (Handle);
        create_event = c"cuEventCreate" (*mut Handle, c_uint);
        record_event = c"cuEventRecord" (Handle, Handle);
        query_event = c"cuEventQuery" (Handle);
        destroy_event = c"cuEventDestroy_v2" (Handle);
    }
}

/// `CU_CTX_SCHED_BLOCKING_SYNC`: a thread that waits inside the driver sleeps instead of spinning.
pub(super) const SCHEDULE_BLOCKING: c_uint = 4;
/// `CU_STREAM_NON_BLOCKING`.
pub(super) const STREAM_NON_BLOCKING: c_uint = 1;
/// `CU_EVENT_DISABLE_TIMING`.
pub(super) const EVENT_DISABLE_TIMING: c_uint = 2;
/// `CU_STREAM_CAPTURE_MODE_THREAD_LOCAL`.
pub(super) const CAPTURE_THREAD_LOCAL: c_uint = 1;
/// `CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES`.
pub(super) const FUNCTION_SHARED_BYTES: c_uint = 1;
/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`.
pub(super) const FUNCTION_MOST_DYNAMIC_SHARED_BYTES: c_uint = 8;

/// `CUdevice_attribute`.
#[derive(Debug, Clone, Copy)]
#[repr(u32)]
pub(super) enum Attribute {
    ClockKilohertz = 13,
    Multiprocessors = 16,
    Integrated = 18,
    L2Bytes = 38,
    ComputeMajor = 75,
    ComputeMinor = 76,
    SharedBytesOptIn = 97,
}

pub(super) const SUCCESS: u32 = 0;
pub(super) const INVALID_VALUE: u32 = 1;
pub(super) const OUT_OF_MEMORY: u32 = 2;
pub(super) const INVALID_IMAGE: u32 = 200;
pub(super) const NO_BINARY_FOR_GPU: u32 = 209;
pub(super) const NOT_FOUND: u32 = 500;
pub(super) const NOT_READY: u32 = 600;
pub(super) const LAUNCH_OUT_OF_RESOURCES: u32 = 701;
pub(super) const PRIMARY_CONTEXT_ACTIVE: u32 = 708;

/// Codes after which the context can be used as before: the call was refused. Every other code, one that is not known
/// here above all, may come from work that ran before the call, and then no later call of this process succeeds.
const REFUSALS: &[u32] = &[
    INVALID_VALUE,
    OUT_OF_MEMORY,
    34, // STUB_LIBRARY
    36, // CALL_REQUIRES_NEWER_DRIVER
    INVALID_IMAGE,
    NO_BINARY_FOR_GPU,
    218, // INVALID_PTX
    221, // JIT_COMPILER_NOT_FOUND
    222, // UNSUPPORTED_PTX_VERSION
    223, // JIT_COMPILATION_DISABLED
    300, // INVALID_SOURCE
    301, // FILE_NOT_FOUND
    302, // SHARED_OBJECT_SYMBOL_NOT_FOUND
    303, // SHARED_OBJECT_INIT_FAILED
    400, // INVALID_HANDLE
    401, // ILLEGAL_STATE
    NOT_FOUND,
    LAUNCH_OUT_OF_RESOURCES,
    720, // COOPERATIVE_LAUNCH_TOO_LARGE
    800, // NOT_PERMITTED
    801, // NOT_SUPPORTED
    900, // STREAM_CAPTURE_UNSUPPORTED
    901, // STREAM_CAPTURE_INVALIDATED
    902, // STREAM_CAPTURE_MERGE
    903, // STREAM_CAPTURE_UNMATCHED
    904, // STREAM_CAPTURE_UNJOINED
    905, // STREAM_CAPTURE_ISOLATION
    906, // STREAM_CAPTURE_IMPLICIT
    907, // CAPTURED_EVENT
    908, // STREAM_CAPTURE_WRONG_THREAD
    910, // GRAPH_EXEC_UPDATE_FAILURE
];

impl Driver {
    /// The driver of this machine, looked for once.
    ///
    /// # Errors
    /// [`CudaError::Missing`] for a library or a function that is not there.
    pub(super) fn here() -> Result<&'static Self, CudaError> {
        static FOUND: OnceLock<Result<Driver, CudaError>> = OnceLock::new();
        let found = FOUND.get_or_init(|| Self::load(library::load_driver()?));
        found.as_ref().map_err(Clone::clone)
    }

    /// What a status is called: the driver's own name, or the number.
    fn name(&self, status: u32) -> String {
        let mut name = std::ptr::null();
        // SAFETY: the pointer is ours; the driver sets it to a text of its own that stays.
        let found = unsafe { (self.error_name)(status, &raw mut name) };
        if found != SUCCESS || name.is_null() {
            return format!("CUDA error {status}");
        }
        // SAFETY: the driver has just set it to a text that ends with a zero.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }

    /// Checks a status of a call that comes before there is a context: nothing can be lost yet.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub(super) fn begun(&self, call: &'static str, status: u32) -> Result<(), CudaError> {
        match status {
            SUCCESS => Ok(()),
            other => Err(CudaError::Call { call, status: self.name(other) }),
        }
    }

    /// Checks a status of a call in a context.
    ///
    /// # Errors
    /// [`CudaError::Invalid`] and [`CudaError::Call`] for a call that was refused; [`CudaError::Lost`] for everything else.
    pub(super) fn check(&self, call: &'static str, status: u32) -> Result<(), CudaError> {
        match status {
            SUCCESS => Ok(()),
            INVALID_VALUE | LAUNCH_OUT_OF_RESOURCES => {
                Err(CudaError::Invalid { what: format!("{call}: {}", self.name(status)) })
            }
            refused if REFUSALS.contains(&refused) => {
                Err(CudaError::Call { call, status: self.name(refused) })
            }
            other => Err(CudaError::Lost { call, status: self.name(other) }),
        }
    }
}
